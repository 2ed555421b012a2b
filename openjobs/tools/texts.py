"""What models read: ends, states, lists, and how a text that is too long is cut. Pure.

Source: spec 003, D15 (a foreground agent's text is that of a synchronous tool), scenario A.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..ids import short
from ..jobs import Job, JobStatus
from ..session.cards import ending_text

if TYPE_CHECKING:
    from ..processes import Task

CANCELLED = "[cancelled]"
TOLD = "You will be told when it ends; there is no need to ask again."

Row = Mapping[str, Any]


def end_text(job: Job) -> str:
    """What an ended job gives to who called it: the result, `[task error] …`, or what there was and `[cancelled]`."""
    if job.terminal:
        return ending_text(job, CANCELLED)
    # A host that stopped waits no longer than a cancel may take; the end is still to come.
    said = f"{job.result_text}\n" if job.result_text else ""
    return f"{said}{CANCELLED} job {job.job_id} was asked to stop and has not stopped yet"


def job_line(job: Job, now: datetime) -> str:
    """One line: which job, how it stands, how long that took, what it is."""
    return f"job {job.job_id}: {_state(job)}{_lasted(job, now)} ({job.subject})"


def task_line(task: Task, now: datetime) -> str:
    return f"task {task.task_id}: {_task_state(task, now)} ({task_subject(task)})"


def job_row(job: Job, now: datetime, *, own: bool = False) -> dict[str, Any]:
    """A job in a list; `own` says that who asks runs inside it."""
    row = {
        "job_id": job.job_id,
        "kind": "agent",
        "status": job.status.value,
        "subject": job.subject,
        "created_at": job.created_at,
    }
    state = f"{_state(job)}{_lasted(job, now)}"
    return {**row, "state": f"{state}, you are in it" if own else state}


def task_row(task: Task, now: datetime) -> dict[str, Any]:
    return {
        "job_id": task.task_id,
        "kind": "shell",
        "status": task.status.value,
        "subject": task_subject(task),
        "created_at": task.created_at,
        "state": _task_state(task, now),
    }


def table(rows: Sequence[Row]) -> str:
    """Rows as lines: id, kind, state, subject. Ids are shortened where that leaves them different."""
    ids = [row["job_id"] for row in rows]
    shown = [short(each) for each in ids]
    if len(set(shown)) < len(set(ids)):
        shown = ids
    lines = [(each, row["kind"], row["state"], row["subject"]) for each, row in zip(shown, rows, strict=True)]
    widths = [max((len(line[column]) for line in lines), default=0) for column in range(3)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in lines
    )


def task_subject(task: Task) -> str:
    if task.description:
        return " ".join(task.description.split())
    command = task.command if isinstance(task.command, str) else " ".join(task.command)
    line = " ".join(command.split())
    return line if len(line) <= 80 else line[:79] + "…"


def outcome(task: Task) -> str:
    """How a background command stands, in a few words."""
    match task.status.value:
        case "completed":
            return "completed, exit code 0"
        case "failed" if task.exit_code is not None and task.stopped_by == "exit":
            return f"failed, exit code {task.exit_code}"
        case "failed" if task.signal is not None and task.stopped_by == "signal":
            return f"failed, ended by {_signal_name(task.signal)}"
        case "failed":
            return f"failed: {task.error or task.stopped_by}"
        case "timed_out":
            return f"timed out after {duration(task.timeout_s or 0)}"
        case "lost":
            return "lost: how it ended cannot be known"
        case "running" if task.stop_requested_at is not None:
            return "running, asked to stop"
        case status:
            return str(status)


def marker(task: Task) -> str:
    """What follows the output of a foreground command that did not simply succeed."""
    match task.status.value:
        case "completed":
            return ""
        case "cancelled":
            return CANCELLED
        case "running":
            return f"{CANCELLED} task {task.task_id} was asked to stop and has not stopped yet"
        case "failed" if task.exit_code is not None and task.stopped_by == "exit":
            return f"[exit code {task.exit_code}]"
        case _:
            return f"[{outcome(task)}]"


def cut(text: str, limit_chars: int, where: Callable[[], str]) -> str:
    """`text`, or its beginning and end with a line between them that says how much is missing, and where it is.

    `where` is asked only when something is cut.
    """
    missing = len(text) - limit_chars
    if missing <= 0:
        return text
    head = (limit_chars + 1) // 2
    return f"{text[:head]}\n[{missing:,} characters left out here; {where()}]\n{text[head + missing :]}"


def duration(seconds: float) -> str:
    """Short and exact enough: 30 ms, 4.2 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _state(job: Job) -> str:
    if job.terminal:
        reason = f" ({job.cancel_reason})" if job.status is JobStatus.CANCELLED and job.cancel_reason else ""
        return job.status.value + reason
    return job.status.value + (", asked to stop" if job.cancel_requested_at is not None else "")


def _task_state(task: Task, now: datetime) -> str:
    lasted = duration(((task.ended_at or now) - task.created_at).total_seconds())
    return f"{outcome(task)}{', after' if task.terminal else ' for'} {lasted}"


def _lasted(job: Job, now: datetime) -> str:
    if job.terminal and job.completed_at is not None:
        return f" after {duration((job.completed_at - job.created_at).total_seconds())}"
    return f" for {duration((now - (job.started_at or job.created_at)).total_seconds())}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
