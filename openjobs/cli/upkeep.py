"""`openjobs recover`, `fsck` and `gc`."""

from __future__ import annotations

from typing import Any

import click

from . import exits, output, shapes
from .listing import print_jobs
from .live import spinner
from .options import SESSION_ID, command
from .state import State
from .text import one_line, plural, size


@command("recover")
def recover_command(state: State) -> int:
    """End the jobs whose process died.

    Every command does this for the jobs it meets; this one looks at all of them. Each is recorded as
    errored ("worker died before completion"); jobs of living processes are never touched.
    """
    jobs = state.client.recover()
    if state.json:
        output.json_value({"jobs": [shapes.job(job) for job in jobs]})
        return exits.COMPLETED
    print_jobs(state, jobs)
    output.note(f"{plural(len(jobs), 'job')} ended" if jobs else "nothing to recover: no job's process has died")
    return exits.COMPLETED


@command("fsck")
@click.argument("sessions", type=SESSION_ID, nargs=-1, metavar="[SESSION]...")
def fsck_command(state: State, sessions: tuple[str, ...]) -> int:
    """Check that sessions are whole; without names all of them.

    Looks at git's objects, the legality of every job's history, rows against history, pages and
    message segments, index and work tree, and locks. Changes nothing. Exit code 6 with any finding.
    """
    reports: list[dict[str, Any]] = []
    for session_id in sessions or state.store.sessions():
        with spinner(f"checking {session_id}"):
            report = state.store.fsck(session_id)
        found = [{"where": finding.where, "what": finding.what} for finding in report.findings]
        reports.append({"session_id": session_id, "counts": dict(report.counts), "findings": found})
        if not state.json:
            told = [(count, one_line(name)) for name, count in report.counts.items() if name != "sessions"]
            counts = ", ".join(f"{count:,} {name}" for count, name in told)
            verdict = plural(len(found), "finding") if found else "ok"
            output.line(f"{session_id}: {verdict} ({counts})")
            output.lines(["  " + one_line(f"{finding['where']}: {finding['what']}") for finding in found])
    total = sum(len(report["findings"]) for report in reports)
    if state.json:
        output.json_value({"sessions": reports, "findings": total})
    else:
        output.note(f"{plural(len(reports), 'session')} checked, {plural(total, 'finding')}")
    return exits.REFUSED if total else exits.COMPLETED


@command("gc")
@click.argument("sessions", type=SESSION_ID, nargs=-1, metavar="[SESSION]...")
def gc_command(state: State, sessions: tuple[str, ...]) -> int:
    """Pack sessions into less space; without names all of them.

    Nothing that any job or message needs is removed. It may run beside living runners.
    """
    reports: list[dict[str, Any]] = []
    for session_id in sessions or state.store.sessions():
        with spinner(f"packing {session_id}"):
            report = state.store.gc(session_id)
        sizes = {"before_bytes": report.before_bytes, "after_bytes": report.after_bytes}
        reports.append({"session_id": session_id, **sizes})
        if not state.json:
            output.line(f"{session_id}: {size(report.before_bytes)} -> {size(report.after_bytes)}")
    if state.json:
        output.json_value({"sessions": reports})
    else:
        before = sum(report["before_bytes"] for report in reports)
        after = sum(report["after_bytes"] for report in reports)
        output.note(f"{plural(len(reports), 'session')}: {size(before)} -> {size(after)}")
    return exits.COMPLETED
