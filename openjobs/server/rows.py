"""What the server says of jobs, processes and messages: plain values, ready for JSON (docs/server.md, "Shapes").

Every text is given as it is stored and must be treated as untrusted by whoever shows it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import orjson

from ..clock import to_text
from ..host.wire import job_to_wire, task_to_wire
from ..jobs import Job
from ..processes.task import Task
from ..runner.cancel import STUCK
from ..session.text import beginning, storable

Row = dict[str, Any]

JOB = "job"
PROCESS = "process"

#: of a command, a row keeps at most this many characters
_COMMAND_CHARS = 500


def job_row(job: Job) -> Row:
    """A job as lists and events show it; `children` and `queue_position` are filled in by the feed."""
    times = (job.created_at, job.queued_at, job.started_at, job.completed_at, job.cancel_requested_at)
    return {
        "kind": JOB,
        "id": job.job_id,
        "job_id": job.job_id,
        "session_id": job.parent_session_id,
        "caller_session_id": job.caller_session_id,
        "subject": storable(job.subject),
        "agent_id": job.agent_id,
        "status": job.status.value,
        "created_at": to_text(job.created_at),
        "queued_at": _time(job.queued_at),
        "started_at": _time(job.started_at),
        "completed_at": _time(job.completed_at),
        "changed_at": to_text(max(time for time in times if time is not None)),
        "cancel_requested_at": _time(job.cancel_requested_at),
        "cancel_reason": _text(job.cancel_reason),
        "error": beginning(job.error) if job.error is not None and job.terminal else None,
        "stuck": job.error is not None and job.error.startswith(STUCK),
        "parent_job_id": job.parent_job_id,
        "parent_msg_id": job.parent_msg_id,
        "attach_id": job.attach_id,
        "head_id": job.head_id,
        "children": 0,
        "queue_position": None,
        "run_id": job.run_id,
        "foreground": job.foreground,
        "timeout_s": job.timeout_s,
        "attempt": job.attempt,
        "revision": job.revision,
    }


def process_row(task: Task) -> Row:
    """A background command as lists and events show it."""
    times = (task.created_at, task.started_at, task.ended_at, task.stop_requested_at)
    command = one_line(task.command)
    return {
        "kind": PROCESS,
        "id": task.task_id,
        "task_id": task.task_id,
        "session_id": task.session_id,
        "job_id": task.job_id,
        "subject": storable(task.description) or command,
        "command": command,
        "agent_id": None,
        "status": task.status.value,
        "created_at": to_text(task.created_at),
        "started_at": _time(task.started_at),
        "completed_at": _time(task.ended_at),
        "changed_at": to_text(max(time for time in times if time is not None)),
        "cancel_requested_at": _time(task.stop_requested_at),
        "cancel_reason": _text(task.stop_reason),
        "exit_code": task.exit_code,
        "signal": task.signal,
        "pid": task.pid,
        "error": storable(task.error) or None,
        "stopped_by": task.stopped_by,
        "run_id": task.task_id,
        "stdout_bytes": task.stdout_bytes,
        "stderr_bytes": task.stderr_bytes,
        "truncated": task.truncated,
    }


def whole_job(job: Job, row: Mapping[str, Any], partial: str | None) -> Row:
    """Every field of a job with its whole texts; `row` is its row as the feed has it."""
    fields = clean(job_to_wire(job))
    result = None if partial is not None else _text(job.result_text)
    return {
        **fields,
        **row,
        "description": storable(job.description),
        "prompt": storable(job.description),
        "result_text": result,
        "error": _text(job.error),
        "partial_result": _text(partial),
    }


def whole_process(task: Task, row: Mapping[str, Any]) -> Row:
    return {**clean(task_to_wire(task)), **row, "description": storable(task.description)}


def clean(value: Any) -> Any:
    """`value` with all its texts made storable: the names of files and commands need not be UTF-8."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def encoded(fields: Any) -> bytes:
    """As JSON. A lone surrogate (a path in an error, an echoed name) becomes U+FFFD instead of an error."""
    try:
        return orjson.dumps(fields)
    except TypeError:
        return orjson.dumps(clean(fields))


def one_line(command: Any) -> str:
    """A command as a person would type it, in one line."""
    text = command if isinstance(command, str) else shlex.join(command)
    line = " ".join(storable(text).split())
    return line if len(line) <= _COMMAND_CHARS else line[: _COMMAND_CHARS - 1] + "…"


def _time(value: datetime | None) -> str | None:
    return None if value is None else to_text(value)


def _text(value: str | None) -> str | None:
    return None if value is None else storable(value)
