"""`openjobs list`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from ..jobs import TERMINAL, UNFINISHED, Job, JobStatus
from . import exits, output, shapes, table
from .damage import Unread
from .options import JOB_ID, SESSION_ID, command, limit_option
from .state import State
from .text import short_id

POLL_S = 0.5
#: a watched list may take a fifth of one processor, however long it is
IDLE_SHARE = 4
DRAWN = 200


@command("list")
@click.option("--session", type=SESSION_ID, help="Only jobs of this session.")
@click.option(
    "--status",
    type=click.Choice([*(status.value for status in JobStatus), "unfinished", "finished"]),
    multiple=True,
    metavar="STATUS",
    help="Only jobs in this state: pending, queued, running, completed, cancelled, errored, "
    "or unfinished or finished. May be given more than once.",
)
@click.option("--parent", type=JOB_ID, help="Only the children of this job.")
@limit_option("At most so many; 0 means all.")
@click.option("--before", type=JOB_ID, help="Only jobs older than this one: the next page.")
@click.option("--watch", "-w", is_flag=True, help="Keep showing what changes until Ctrl-C.")
def list_command(
    state: State,
    session: str | None,
    status: tuple[str, ...],
    parent: str | None,
    limit: int,
    before: str | None,
    watch: bool,
) -> int:
    """List jobs, newest first.

    On a terminal a table; in a pipe one line a job, separated by tabs: id, status, creation time (UTC),
    seconds it ran, agent, session, subject.
    """
    wanted: dict[str, Any] = {
        "session_id": session,
        "status": _statuses(status),
        "parent_job_id": state.resolve(parent) if parent is not None else None,
        "before": state.resolve(before) if before is not None else None,
    }
    if watch:
        try:
            _watch(state, wanted, limit)
        except KeyboardInterrupt:  # the way to end it, nothing to complain about
            return exits.INTERRUPTED
    unread = Unread()
    jobs = state.client.list(**wanted, limit=limit + 1 if limit else None, on_damage=unread)
    more = bool(limit) and len(jobs) > limit
    jobs = jobs[:limit] if limit else jobs
    if state.json:
        output.json_value({"jobs": shapes.jobs(jobs), "more": more})
    else:
        print_jobs(state, jobs)
        _say_more(state, jobs, more, bool(session or status or parent or before))
    return unread.say()


def print_jobs(state: State, jobs: list[Job]) -> None:
    if not output.is_terminal(sys.stdout):
        output.lines(table.plain(jobs))
        return
    if jobs:
        colour = table.coloured()
        rows = table.aligned(jobs, state.store.clock.now(), table.terminal_width())
        output.lines([table.to_ansi(row, colour) for row in rows])


def _say_more(state: State, jobs: list[Job], more: bool, filtered: bool) -> None:
    if not output.is_terminal(sys.stdout):
        return  # `id=$(openjobs list -n 1 | cut -f1)` knows what it asked for
    if more:
        output.hint(f"the newest {len(jobs):,}; `--limit 0` shows all, `--before {short_id(jobs[-1].job_id)}` the next")
    elif not jobs:
        first = f"no jobs yet; `{state.prog} agent --agent shell 'echo hello'` runs one"
        output.hint("no such jobs" if filtered else first)


def _statuses(names: tuple[str, ...]) -> list[JobStatus] | None:
    chosen: set[JobStatus] = set()
    for name in names:
        match name:
            case "unfinished":
                chosen |= UNFINISHED
            case "finished":
                chosen |= TERMINAL
            case _:
                chosen.add(JobStatus(name))
    return sorted(chosen) if chosen else None


def _watch(state: State, wanted: dict[str, Any], limit: int) -> None:
    if state.json:
        for job in _changes(state, wanted, limit):
            output.json_line(shapes.jobs([job])[0])
    elif output.is_live(sys.stdout):
        _draw(state, wanted, limit)
    else:
        for job in _changes(state, wanted, limit):
            output.lines(table.plain([job]))


def _draw(state: State, wanted: dict[str, Any], limit: int) -> None:
    from . import live

    # No more than any terminal shows: at 10,000 jobs the rest would only be read and thrown away.
    reader = _Reader(state, wanted, min(limit or DRAWN, DRAWN))
    shown = reader.read()

    def draw(width: int, height: int) -> list[list[table.Piece]]:
        rows = table.aligned(shown[: height - 2], state.store.clock.now(), width, live.frame(sys.stdout))
        return [*rows, [(f"{_summary(shown)} · Ctrl-C ends", "dim")]]

    with live.drawing(draw):
        while True:
            shown = reader.read()


def _summary(jobs: list[Job]) -> str:
    counts: dict[str, int] = {}
    for job in jobs:
        word = table.status_word(job)
        counts[word] = counts.get(word, 0) + 1
    order = [word for word in table.STATUS_STYLE if word in counts]
    return ", ".join(f"{counts[word]} {word}" for word in order) or "no jobs yet"


def _changes(state: State, wanted: dict[str, Any], limit: int) -> Iterator[Job]:
    """Every job once, oldest first, and again whenever its row changes."""
    seen: dict[str, int] = {}
    reader = _Reader(state, wanted, limit or None)
    while True:
        jobs = reader.read()
        for job in reversed(jobs):
            if seen.get(job.job_id) != job.revision:
                yield job
        seen = {job.job_id: job.revision for job in jobs}


class _Reader:
    """Reads the list again and again, with pauses that grow with what the reading costs."""

    def __init__(self, state: State, wanted: dict[str, Any], limit: int | None) -> None:
        self._state, self._wanted, self._limit = state, wanted, limit
        self._pause_s = 0.0

    def read(self) -> list[Job]:
        time.sleep(self._pause_s)
        started = time.monotonic()
        self._state.look_again()
        jobs = self._state.client.list(**self._wanted, limit=self._limit)
        self._pause_s = max(POLL_S, (time.monotonic() - started) * IDLE_SHARE)
        return jobs
