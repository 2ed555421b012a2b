"""`openjobs wait` and `openjobs stop`."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import click

from ..jobs import Job
from . import exits, output, shapes, table
from .options import JOB_ID, SECONDS, WORDS, command
from .state import LONGEST_WAIT_S, State
from .text import duration, one_line, plural

if TYPE_CHECKING:
    from ..processes.task import Task


@command("wait")
@click.argument("ids", type=JOB_ID, nargs=-1, required=True, metavar="ID...")
@click.option("--any", "any_", is_flag=True, help="Until the first of them has ended.")
@click.option("--timeout", type=SECONDS, help="Give up after this time (exit code 4); the jobs go on.")
def wait_command(state: State, ids: tuple[str, ...], any_: bool, timeout: float | None) -> int:
    """Wait until jobs have ended, or background commands.

    Prints a line for each job when it ends. The exit code is 0 when all completed, else that of the
    worst: 4 unfinished, 1 errored, 5 cancelled. With --any it is that of the one that ended first.
    """
    wanted, task_ids = state.split(ids)
    if task_ids:
        return _wait_for_tasks(state, wanted, task_ids, any_, timeout)
    jobs = _wait(state, wanted, any_, timeout)
    ended = [job for job in jobs if job.terminal]
    timed_out = not ended if any_ else len(ended) < len(jobs)
    if state.json:
        output.json_value({"jobs": [shapes.job(job) for job in jobs], "timed_out": timed_out})
    elif timed_out:
        left = [table.short_ids(wanted)(job.job_id) for job in jobs if not job.terminal]
        output.note(f"timed out; not ended: {' '.join(left[:8])}{' …' if len(left) > 8 else ''}")
    if any_ and ended:
        return exits.of_job(min(ended, key=lambda job: job.completed_at or job.created_at))
    return exits.of_jobs(jobs)


def _wait_for_tasks(state: State, ids: list[str], task_ids: list[str], any_: bool, timeout: float | None) -> int:
    """Background commands, and perhaps jobs; the time is for all together."""
    from . import tasks

    if ids and any_:
        raise click.UsageError("--any waits for jobs or for background commands, not for both")
    end = None if timeout is None else time.monotonic() + timeout
    found = tasks.wait_for(state, task_ids, any_, timeout)
    jobs = _wait(state, ids, False, None if end is None else max(0.0, end - time.monotonic())) if ids else []
    ended = [task for task in found if task.terminal]
    timed_out = not ended if any_ else len(ended) < len(found) or not all(job.terminal for job in jobs)
    if state.json:
        shown = {"jobs": [shapes.job(job) for job in jobs], "tasks": [shapes.task(task) for task in found]}
        output.json_value(shown | {"timed_out": timed_out})
    elif timed_out:
        output.note("timed out")
    if any_ and ended:
        return tasks.exit_of(min(ended, key=lambda task: task.ended_at or task.created_at))
    return exits.worst([*(exits.of_job(job) for job in jobs), *(tasks.exit_of(task) for task in found)])


def _wait(state: State, ids: list[str], any_: bool, timeout: float | None) -> list[Job]:
    """The jobs in the order given, as they stand at the end; each is told as it ends."""
    started = time.monotonic()
    end = None if timeout is None else started + timeout
    latest = {job_id: state.client.outcome(job_id) for job_id in ids}
    told: set[str] = set()
    while True:
        ended = [job for job in latest.values() if job.terminal and job.job_id not in told]
        _tell(state, ended, ids)
        told |= {job.job_id for job in ended}
        left = [job_id for job_id in ids if job_id not in told]
        now = time.monotonic()
        if not left or (any_ and told) or (end is not None and now >= end):
            return [latest[job_id] for job_id in ids]
        # The spinner is off while a line is told: both would stand on one line of the terminal.
        with _waiting([latest[job_id] for job_id in left], started):
            pause = None if end is None else min(max(0.0, end - now), LONGEST_WAIT_S)
            latest |= {job.job_id: job for job in state.await_jobs(left, "any", pause)}


def _waiting(left: list[Job], started: float) -> AbstractContextManager[None]:
    from .live import spinner

    what = one_line(left[0].subject) if len(left) == 1 else plural(len(left), "job")
    return spinner(lambda: f"waiting {duration(time.monotonic() - started)} for {what}")


def _tell(state: State, jobs: list[Job], ids: list[str]) -> None:
    if state.json or not jobs:
        return
    if not output.is_terminal(sys.stdout):
        output.lines(table.plain(jobs))
        return
    shorten = table.short_ids(ids)
    for job in jobs:
        output.line(ended_line(job, shorten(job.job_id)))


def ended_line(job: Job, shown_id: str, colour: bool | None = None) -> str:
    """`1a2b3c4d  completed in 3.2s  subject`, for a terminal."""
    word = table.status_word(job)
    took = table.seconds_taken(job, None)
    spent = f" in {duration(took)}" if took is not None else ""
    room = max(10, table.terminal_width() - len(shown_id) - 2 - len(word + spent) - 2)
    said = job.subject if job.error is None else f"{job.subject}: {job.error}"
    pieces = [
        (shown_id, "bold"),
        ("  ", ""),
        (word + spent, table.STATUS_STYLE[word]),
        ("  ", ""),
        (table.fitted(one_line(said), room).rstrip(), ""),
    ]
    return table.to_ansi(table.clipped(pieces, table.terminal_width()), table.coloured() if colour is None else colour)


@command("stop")
@click.argument("ids", type=JOB_ID, nargs=-1, required=True, metavar="ID...")
@click.option("--reason", type=WORDS, help="Why; kept with the job.")
def stop_command(state: State, ids: tuple[str, ...], reason: str | None) -> int:
    """Ask jobs, and the jobs they started, to stop; or background commands.

    Returns at once with the state each job is in now; a running job may take up to 30 seconds to end.
    A job that has ended already stays as it is.
    """
    wanted, task_ids = state.split(ids)
    shorten = table.short_ids([*wanted, *task_ids])
    tasks: list[Task] = []
    stopped: list[Job] = []
    before: list[Job] = []
    try:
        tasks.extend(_stop_task(state, task_id, reason) for task_id in task_ids)
        for job_id in wanted:
            before.append(state.client.outcome(job_id))
            stopped.append(before[-1] if before[-1].terminal else state.client.cancel(job_id, reason=reason))
    finally:  # only now: who cannot be told must not keep the others from being asked
        if not state.json:
            _tell_tasks(tasks)
            for was, job in zip(before, stopped, strict=False):
                _tell_stopped(was, job, shorten(job.job_id))
    if state.json:
        output.json_value(
            {"jobs": [shapes.stopped(job) for job in stopped], "tasks": [shapes.task(task) for task in tasks]}
        )
    elif unfinished := [
        *(job.job_id for job in stopped if not job.terminal),
        *(task.task_id for task in tasks if not task.terminal),
    ]:
        left = " ".join(map(shorten, unfinished))
        output.hint(f"`{state.prog} wait {left}` waits for the end")
    return exits.COMPLETED


def _stop_task(state: State, task_id: str, reason: str | None) -> Task:
    from . import tasks

    return tasks.stop(state, task_id, reason)


def _tell_tasks(stopped: list[Task]) -> None:
    if stopped:
        from . import tasks

        tasks.tell(stopped)


def _tell_stopped(was: Job, job: Job, shown_id: str) -> None:
    if not output.is_terminal(sys.stdout):
        output.lines(table.plain([job]))
    elif was.terminal:
        output.line(f"{shown_id}  had already ended: {job.status.value}")
    elif job.terminal:
        output.line(ended_line(job, shown_id))
    else:
        output.line(f"{shown_id}  was asked to stop ({job.status.value})")
