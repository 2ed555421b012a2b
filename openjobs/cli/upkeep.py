"""`openjobs recover`, `fsck` and `gc`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from ..errors import Damaged, FileRefused, InvalidInput, OpenJobsError, Refused, RepositoryRefused
from . import exits, output, shapes
from .listing import print_jobs
from .live import spinner
from .options import SECONDS, SESSION_ID, command
from .state import State
from .text import one_line, plural, size

if TYPE_CHECKING:
    from ..processes.task import Task


@command("recover")
def recover_command(state: State) -> int:
    """End the jobs whose process died.

    Every command does this for the jobs it meets; this one looks at all of them. Each is recorded as
    errored ("worker died before completion"); jobs of living processes are never touched. Before
    that, what the home's index of ids lacks is put back from the sessions: it may have been lost.
    """
    damaged: set[str] = set()
    indexed = _reindexed(state, damaged)
    jobs = state.client.recover()
    tasks = _recovered_tasks(state, damaged)
    if state.json:
        shown = {"jobs": [shapes.job(job) for job in jobs], "tasks": [shapes.task(task) for task in tasks]}
        output.json_value({**shown, "indexed": indexed})
        return exits.REFUSED if damaged else exits.COMPLETED
    if indexed:
        output.note(f"{plural(indexed, 'id')} put back into the home's index")
    print_jobs(state, jobs)
    if tasks:
        from .tasks import tell

        tell(tasks)
        output.note(f"{plural(len(tasks), 'background command')} ended")
    if jobs or not (tasks or indexed):
        output.note(f"{plural(len(jobs), 'job')} ended" if jobs else "nothing to recover: no job's process has died")
    return exits.REFUSED if damaged else exits.COMPLETED


def _reindexed(state: State, damaged: set[str]) -> int:
    """How many jobs and background commands the index lacked. Sessions that could not be read whole are told of, and
    put into `damaged`."""
    from ..store.reindex import put_back

    def on_damage(session_id: str, error: OpenJobsError) -> None:
        damaged.add(session_id)
        output.note(f"session {session_id} could not be read whole for the index: {one_line(str(error))}")

    indexed = state.store.reindex(on_damage=on_damage)
    lost = []
    for session_id in state.store.sessions():
        if not _has_tasks(state, session_id):
            continue
        try:
            lost += state.tasks.unindexed(session_id)
        except (Damaged, FileRefused) as error:
            on_damage(session_id, error)
    return indexed + put_back(state.tasks.index, lost)


def _has_tasks(state: State, session_id: str) -> bool:
    return os.path.lexists(state.home / "sessions" / session_id / "tasks.jsonl")


def _recovered_tasks(state: State, damaged: set[str]) -> list[Task]:
    """Those whose end is recorded now: what still runs waits for a process that stays. Damage is told of once."""
    if not (state.home / "active-tasks").exists():
        return []
    from ..processes import ProcessSupervisor

    def on_damage(session_id: str, error: OpenJobsError | OSError) -> None:
        if session_id not in damaged:
            damaged.add(session_id)
            said = one_line(str(error))
            output.note(f"the background commands of session {session_id} could not be recovered: {said}")

    with ProcessSupervisor(state.store) as supervisor:
        return [task for task in supervisor.recover(adopt=False, on_damage=on_damage) if task.terminal]


@command("fsck")
@click.argument("sessions", type=SESSION_ID, nargs=-1, metavar="[SESSION]...")
def fsck_command(state: State, sessions: tuple[str, ...]) -> int:
    """Check that sessions are whole; without names all of them.

    Looks at git's objects, the legality of every job's history, rows against history, pages and
    message segments, index and work tree, locks, the journal of background commands, run logs against
    their states, and what keepers left against the journal; without names also at the leases of the
    home. Changes nothing. Exit code 6 with any finding.
    """
    reports: list[dict[str, Any]] = []
    for session_id in sessions or state.every_session():
        with spinner(f"checking {session_id}"):
            report = state.store.fsck(session_id)
        found = [{"where": finding.where, "what": finding.what} for finding in report.findings]
        if os.path.isdir(state.home / "sessions" / session_id):  # else that is said, and there is nothing in it
            found += _journal_findings(state, session_id) + _run_findings(state, session_id)
            found += _fact_findings(state, session_id)
        reports.append({"session_id": session_id, "counts": dict(report.counts), "findings": found})
        if not state.json:
            told = [(count, one_line(name)) for name, count in report.counts.items() if name != "sessions"]
            counts = ", ".join(f"{count:,} {name}" for count, name in told)
            verdict = plural(len(found), "finding") if found else "ok"
            output.line(f"{session_id}: {verdict} ({counts})")
            output.lines(["  " + one_line(f"{finding['where']}: {finding['what']}") for finding in found])
    home = [] if sessions or state.missing else _lease_findings(state)
    total = sum(len(report["findings"]) for report in reports) + len(home)
    if home and not state.json:
        output.line(f"the home: {plural(len(home), 'finding')}")
        output.lines(["  " + one_line(f"{finding['where']}: {finding['what']}") for finding in home])
    if state.json:
        output.json_value({"sessions": reports, "home": home, "findings": total})
    else:
        output.note(f"{plural(len(reports), 'session')} checked, {plural(total, 'finding')}")
    return exits.REFUSED if total else exits.COMPLETED


def _journal_findings(state: State, session_id: str) -> list[dict[str, str]]:
    """Whether the facts of background commands can be read to their end, and the index finds each command."""
    from ..store.fsck import lacks

    if not _has_tasks(state, session_id):
        return []
    found = []
    try:
        state.tasks.journal(session_id).check_lock()
    except Refused as error:
        found.append({"where": ".tasks.jsonl.lock", "what": str(error)})
    try:
        if lost := state.tasks.unindexed(session_id):
            what = lacks("background command", [entry.job_id for _, entry in lost])
            found.append({"where": "index", "what": what})
    except (Damaged, Refused) as error:
        found.append({"where": "tasks.jsonl", "what": str(error)})
    return found


def _fact_findings(state: State, session_id: str) -> list[dict[str, str]]:
    """Whether the facts of jobs and background commands can be read to their end."""
    from ..facts import read

    try:
        for _ in read(state.home / "sessions" / session_id):
            pass
    except (Damaged, Refused) as error:
        return [{"where": "events.jsonl", "what": str(error)}]
    return []


def _run_findings(state: State, session_id: str) -> list[dict[str, str]]:
    from ..processes.runs import check_runs

    found = check_runs(state.home, session_id, state.tasks.journal(session_id))
    return [{"where": where, "what": what} for where, what in found]


def _lease_findings(state: State) -> list[dict[str, str]]:
    from ..durable.lease import lease_findings

    found = lease_findings(state.home / "leases")
    return [{"where": f"leases/{name}".rstrip("/"), "what": what} for name, what in found]


@command("gc")
@click.argument("sessions", type=SESSION_ID, nargs=-1, metavar="[SESSION]...")
@click.option("--older-than", type=SECONDS, help="Take away logs and output of what ended longer ago, and was seen.")
def gc_command(state: State, sessions: tuple[str, ...], older_than: float | None) -> int:
    """Pack sessions into less space; without names all of them.

    Nothing that any job or message needs is removed. It may run beside living runners.
    """
    reports: list[dict[str, Any]] = []
    refused = False
    for session_id in sessions or state.every_session():
        try:
            with spinner(f"packing {session_id}"):
                report = state.store.gc(session_id)
        except (Damaged, RepositoryRefused) as error:
            refused = True
            output.note(f"session {session_id} was left as it is: {one_line(str(error))}")
            continue
        sizes = {"before_bytes": report.before_bytes, "after_bytes": report.after_bytes}
        removed, freed = (0, 0) if older_than is None else _remove_logs(state, session_id, older_than)
        reports.append({"session_id": session_id, **sizes, "logs_removed": removed, "logs_bytes": freed})
        if not state.json:
            logs = f", {plural(removed, 'log')} of {size(freed)} removed" if removed else ""
            output.line(f"{session_id}: {size(report.before_bytes)} -> {size(report.after_bytes)}{logs}")
    if state.json:
        output.json_value({"sessions": reports})
    else:
        before = sum(report["before_bytes"] for report in reports)
        after = sum(report["after_bytes"] for report in reports)
        output.note(f"{plural(len(reports), 'session')}: {size(before)} -> {size(after)}")
    return exits.REFUSED if refused else exits.COMPLETED


def _remove_logs(state: State, session_id: str, older_than_s: float) -> tuple[int, int]:
    """Logs of ended jobs (their results are in git) and of background commands whose end was seen; how many, and
    how many bytes. Who ran and how it ended stays written down."""
    from ..jobs import TERMINAL
    from ..processes.runs import remove_run

    before = state.store.clock.now() - timedelta(seconds=older_than_s)
    runs = [
        job.run_id
        for job in state.store.list(session_id, status=TERMINAL, limit=None)
        if job.run_id is not None and job.completed_at is not None and job.completed_at < before
    ]
    journal = state.tasks.journal(session_id)
    old = [task for task in journal.tasks() if task.consumed and task.ended_at is not None and task.ended_at < before]
    freed = []
    for run_id in (*runs, *(task.task_id for task in old)):
        try:
            freed.append(remove_run(state.home, session_id, run_id))
        except InvalidInput as error:
            output.note(f"openjobs: {one_line(str(error))}; nothing of it was removed")
    if old:
        journal.compact()
    return sum(1 for one in freed if one), sum(freed)
