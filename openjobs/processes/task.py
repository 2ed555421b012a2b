"""A task: one background command of a session, and the one function that changes it.

What is known of a task is what the facts in `tasks.jsonl` say, in their order (journal.py keeps them):

    intent ─► running ─► (output, adopted, stop_requested)* ─► ended ─► delivered ─► consumed

Each is a durable record of its own, so that a crash between any two leaves it plain which happened.
Source: spec 000.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import attrs

from ..clock import from_text, to_text
from ..errors import InvalidInput, InvalidTransition
from . import layout
from .identity import Identity, from_json
from .rundir import ExitRecord

#: most of a command that is written down; its digest is of all of it
COMMAND_LIMIT_CHARS = 16_384
TEXT_LIMIT_CHARS = 2_000

#: `stopped_by` of a task whose end nobody saw
BY_LOST = "lost"
#: `stopped_by` of a task whose keeper left a record that nobody can read
BY_UNREADABLE = "unreadable"


class TaskStatus(enum.StrEnum):
    RUNNING = "running"  #: in the start flow, or started, and not known to have ended
    COMPLETED = "completed"  #: ended by itself with code 0
    FAILED = "failed"  #: another code, a signal that was not ours, the output limit, or it could not be started
    CANCELLED = "cancelled"  #: ended because it was asked to
    TIMED_OUT = "timed_out"
    LOST = "lost"  #: how it ended, or whether it ran at all, cannot be known; it is not run again

    @property
    def terminal(self) -> bool:
        return self is not TaskStatus.RUNNING


class Fact(enum.StrEnum):
    """The kinds of records in `tasks.jsonl`."""

    INTENT = "intent"  #: before anything is started
    RUNNING = "running"  #: keeper and command, by pid, start time and boot
    OUTPUT = "output"  #: how much was written by then; not synced
    ADOPTED = "adopted"  #: another worker looks after it from now on
    STOP_REQUESTED = "stop_requested"
    ENDED = "ended"  #: status, code, signal and a stable `event_id`
    DELIVERED = "delivered"  #: the message is in the session
    CONSUMED = "consumed"  #: the model has seen it


@attrs.frozen(kw_only=True, slots=True)
class Task:
    """What the facts say of one task. Times are UTC with whole milliseconds."""

    task_id: str
    session_id: str
    #: a text for the shell, or an argv; of a very long one the beginning
    command: str | Sequence[str]
    #: of the whole command
    digest: str
    created_at: datetime
    #: the live worker that alone may act on it
    worker_id: str
    #: the boot in which the worker wrote the intent
    boot: str
    cwd: str = ""
    description: str = ""
    origin_tool_call_id: str | None = None
    #: the job whose turn it belongs to: it ends with the worker
    job_id: str | None = None
    timeout_s: float | None = None
    output_limit_bytes: int = layout.DEFAULT_OUTPUT_LIMIT_BYTES

    started_at: datetime | None = None
    keeper: Identity | None = None
    child: Identity | None = None
    stop_requested_at: datetime | None = None
    stop_reason: str | None = None
    stop_grace_s: float = layout.DEFAULT_GRACE_S

    status: TaskStatus = TaskStatus.RUNNING
    ended_at: datetime | None = None
    exit_code: int | None = None
    #: the number of the signal that ended it
    signal: int | None = None
    #: one of `layout.BY_…`, "lost" or "unreadable"; None while it runs
    stopped_by: str | None = None
    error: str = ""
    #: identity of the end, set once with it
    event_id: str | None = None
    #: bytes kept, as last recorded
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    #: bytes written, kept or not
    seen_bytes: int = 0
    truncated: bool = False
    #: members of its tree that could not be ended: pid, start, boot, name
    leftovers: Sequence[Mapping[str, Any]] = ()
    delivered: bool = False
    consumed: bool = False

    @property
    def terminal(self) -> bool:
        return self.status.terminal

    @property
    def started(self) -> bool:
        return self.started_at is not None

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None else None


def digest_of(command: str | Sequence[str]) -> str:
    """What makes two commands the same; a text for the shell is never the same as an argv."""
    value = command if isinstance(command, str) else list(command)
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def shown_command(command: str | Sequence[str]) -> str | list[str]:
    """The command as it is written down: whole, or its beginning with an ellipsis."""
    if isinstance(command, str):
        return command if len(command) <= COMMAND_LIMIT_CHARS else command[: COMMAND_LIMIT_CHARS - 1] + "…"
    shown: list[str] = []
    left = COMMAND_LIMIT_CHARS
    for word in command:
        if left <= 0:
            shown.append("…")
            break
        shown.append(word if len(word) <= left else word[: left - 1] + "…")
        left -= len(word) + 1
    return shown


def after(task: Task | None, fact: Mapping[str, Any]) -> Task:
    """The task after one more fact. Pure.

    Raises `InvalidTransition` for a fact that does not fit, with nothing changed, and ValueError for one that no
    writer of ours made.
    """
    kind = Fact(fact["fact"])
    if not may_follow(task, kind):
        raise InvalidTransition(f"task {fact['task']}: {kind.value} does not follow", status=_status_text(task))
    if task is None:
        return _begun(fact)
    at = from_text(fact["at"])
    match kind:
        case Fact.RUNNING:
            return attrs.evolve(task, started_at=at, keeper=from_json(fact["keeper"]), child=_identity(fact["child"]))
        case Fact.OUTPUT:
            return attrs.evolve(
                task, stdout_bytes=number_of(fact, "stdout_bytes"), stderr_bytes=number_of(fact, "stderr_bytes")
            )
        case Fact.ADOPTED:
            return attrs.evolve(
                task,
                worker_id=text_of(fact, "worker"),
                keeper=task.keeper or _identity(fact.get("keeper")),
                child=task.child or _identity(fact.get("child")),
            )
        case Fact.STOP_REQUESTED:
            return attrs.evolve(
                task,
                stop_requested_at=task.stop_requested_at or at,
                stop_reason=task.stop_reason if task.stop_requested_at else fact["reason"],
                stop_grace_s=float(fact["grace_s"]),
            )
        case Fact.ENDED:
            return _ended(task, fact, at)
        case Fact.DELIVERED:
            return attrs.evolve(task, delivered=True)
        case _:
            return attrs.evolve(task, consumed=True)


def check_fact(kind: Fact, fact: Mapping[str, Any]) -> None:
    """Raises ValueError for a record that no writer of ours made: the id of a task names its directory, and what
    else it says is shown, compared and counted with by whoever reads it. Fields of a newer version are passed over."""
    for name, is_sound in {**_EVERY, **_SHAPES[kind]}.items():
        if name not in fact and name in _MAY_LACK.get(kind, ()):
            continue
        try:
            sound = name in fact and is_sound(fact[name])
        except ValueError:
            sound = False
        if not sound:
            raise ValueError(f"{name} of its {kind.value} is missing or not of the form it must have")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_run_id(value: object) -> bool:
    return isinstance(value, str) and layout.RUN_ID.match(value) is not None


def _is_command(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(word, str) for word in value))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_whole_or_none(value: object) -> bool:
    return value is None or type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_number_or_none(value: object) -> bool:
    return value is None or _is_number(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_time(value: object) -> bool:
    if isinstance(value, str):
        from_text(value)  # raises ValueError
        return True
    return False


def _is_time_or_none(value: object) -> bool:
    return value is None or _is_time(value)


def _is_identity(value: object) -> bool:
    from_json(value)  # raises ValueError
    return True


def _is_identity_or_none(value: object) -> bool:
    return value is None or _is_identity(value)


def _is_end(value: object) -> bool:
    return isinstance(value, str) and TaskStatus(value).terminal


def _are_members(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(member, dict) for member in value)


_IsSound = Callable[[Any], bool]
_EVERY: Mapping[str, _IsSound] = {"task": _is_run_id, "at": _is_time}
_SHAPES: Mapping[Fact, Mapping[str, _IsSound]] = {
    Fact.INTENT: {
        "session": _is_text,
        "origin": _is_text_or_none,
        "digest": _is_text,
        "command": _is_command,
        "cwd": _is_text,
        "description": _is_text,
        "worker": _is_text,
        "boot": _is_text,
        "job": _is_text_or_none,
        "timeout_s": _is_number_or_none,
        "output_limit_bytes": _is_count,
    },
    Fact.RUNNING: {"keeper": _is_identity, "child": _is_identity_or_none},
    Fact.OUTPUT: {"stdout_bytes": _is_count, "stderr_bytes": _is_count},
    Fact.ADOPTED: {"worker": _is_text, "keeper": _is_identity_or_none, "child": _is_identity_or_none},
    Fact.STOP_REQUESTED: {"reason": _is_text_or_none, "grace_s": _is_number},
    Fact.ENDED: {
        "status": _is_end,
        "exit_code": _is_whole_or_none,
        "signal": _is_whole_or_none,
        "stopped_by": _is_text,
        "error": _is_text,
        "event_id": _is_text_or_none,
        "stdout_bytes": _is_count,
        "stderr_bytes": _is_count,
        "seen_bytes": _is_count,
        "truncated": _is_flag,
        "leftovers": _are_members,
        "worker": _is_text,
        "started_at": _is_time_or_none,
        "ended_at": _is_time_or_none,
        "keeper": _is_identity_or_none,
        "child": _is_identity_or_none,
        "stop_requested_at": _is_time_or_none,
        "stop_reason": _is_text_or_none,
        "stop_grace_s": _is_number,
    },
    Fact.DELIVERED: {"event_id": _is_text_or_none},
    Fact.CONSUMED: {"event_id": _is_text_or_none},
}
#: what an end says only where it is known, and an adoption where it was found
_MAY_LACK: Mapping[Fact, frozenset[str]] = {
    Fact.ADOPTED: frozenset({"keeper", "child"}),
    Fact.ENDED: frozenset(
        {"worker", "started_at", "ended_at", "keeper", "child", "stop_requested_at", "stop_reason", "stop_grace_s"}
    ),
}


class Stage(Protocol):
    """How far a task has come: all that decides which facts may follow."""

    @property
    def started(self) -> bool: ...
    @property
    def terminal(self) -> bool: ...
    @property
    def delivered(self) -> bool: ...
    @property
    def consumed(self) -> bool: ...


def may_follow(task: Stage | None, kind: Fact) -> bool:
    """The table of what may happen to a task: once an intent, any time before the end what belongs there, once an
    end, then a delivery and a consumption, each once; who reads the output before the delivery consumes at once."""
    match kind:
        case Fact.INTENT:
            return task is None
        case _ if task is None:
            return False
        case Fact.RUNNING:
            return not task.terminal and not task.started
        case Fact.OUTPUT | Fact.ADOPTED | Fact.STOP_REQUESTED | Fact.ENDED:
            return not task.terminal
        case Fact.DELIVERED:
            return task.terminal and not task.delivered and not task.consumed
        case Fact.CONSUMED:
            return task.terminal and not task.consumed


def end_of(record: ExitRecord) -> dict[str, Any]:
    """The fields of the `ended` fact that an exit record means."""
    return {
        "status": _status_of(record).value,
        "exit_code": record.exit_code,
        "signal": record.signal,
        "stopped_by": record.stopped_by,
        "error": _error_of(record)[:TEXT_LIMIT_CHARS],
        "stdout_bytes": record.stdout_bytes,
        "stderr_bytes": record.stderr_bytes,
        "seen_bytes": record.stdout_seen_bytes + record.stderr_seen_bytes,
        "truncated": record.truncated,
        "leftovers": [dict(member) for member in record.leftovers or ()],
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "keeper": record.keeper.to_json(),
        "child": record.child.to_json() if record.child is not None else None,
    }


def known_at_the_end(task: Task) -> dict[str, Any]:
    """What the `ended` fact repeats of those before it, so that intent and end say all when the rest is gone."""
    return {
        "worker": task.worker_id,
        "started_at": to_text(task.started_at) if task.started_at is not None else None,
        "keeper": task.keeper.to_json() if task.keeper is not None else None,
        "child": task.child.to_json() if task.child is not None else None,
        "stop_requested_at": to_text(task.stop_requested_at) if task.stop_requested_at is not None else None,
        "stop_reason": task.stop_reason,
        "stop_grace_s": task.stop_grace_s,
    }


def lost(
    error: str,
    *,
    unreadable: str = "",
    leftovers: Sequence[Mapping[str, Any]] = (),
    stdout_bytes: int = 0,
    stderr_bytes: int = 0,
) -> dict[str, Any]:
    """The fields of the `ended` fact of a task whose keeper left no record, or one that cannot be read: then
    `unreadable` is the name under which it is kept, and said with the error."""
    if unreadable:
        error = f"{error}; its keeper's record of that cannot be read and is kept as {unreadable}"
    return {
        "status": TaskStatus.LOST.value,
        "exit_code": None,
        "signal": None,
        "stopped_by": BY_UNREADABLE if unreadable else BY_LOST,
        "error": error,
        "stdout_bytes": stdout_bytes,
        "stderr_bytes": stderr_bytes,
        "seen_bytes": stdout_bytes + stderr_bytes,
        "truncated": False,
        "leftovers": [dict(member) for member in leftovers],
    }


def _status_of(record: ExitRecord) -> TaskStatus:
    match record.stopped_by:
        case layout.BY_EXIT:
            return TaskStatus.COMPLETED if record.exit_code == 0 else TaskStatus.FAILED
        case layout.BY_TERM | layout.BY_KILL:
            return TaskStatus.CANCELLED
        case layout.BY_TIMEOUT:
            return TaskStatus.TIMED_OUT
        case layout.BY_NEVER_STARTED if record.reason:
            return TaskStatus.CANCELLED
        case _:
            return TaskStatus.FAILED


def _error_of(record: ExitRecord) -> str:
    if record.error:
        return record.error
    if record.stopped_by == layout.BY_OUTPUT_LIMIT:
        kept = record.stdout_bytes + record.stderr_bytes
        seen = record.stdout_seen_bytes + record.stderr_seen_bytes
        return f"its output was cut at {kept:,} of {seen:,} bytes, and it was ended"
    if record.stopped_by == layout.BY_NEVER_STARTED:
        return "it was never started; nothing ran"
    return ""


def _begun(fact: Mapping[str, Any]) -> Task:
    command = fact["command"]
    if not isinstance(command, str):
        command = tuple(str(word) for word in command)
    return Task(
        task_id=text_of(fact, "task"),
        session_id=text_of(fact, "session"),
        command=command,
        digest=text_of(fact, "digest"),
        created_at=from_text(fact["at"]),
        worker_id=text_of(fact, "worker"),
        boot=text_of(fact, "boot"),
        cwd=text_of(fact, "cwd"),
        description=text_of(fact, "description"),
        origin_tool_call_id=None if fact["origin"] is None else text_of(fact, "origin"),
        job_id=None if fact["job"] is None else text_of(fact, "job"),
        timeout_s=fact["timeout_s"],
        output_limit_bytes=fact["output_limit_bytes"],
    )


def _ended(task: Task, fact: Mapping[str, Any], at: datetime) -> Task:
    started, ended, stop_asked = fact.get("started_at"), fact.get("ended_at"), fact.get("stop_requested_at")
    return attrs.evolve(
        task,
        worker_id=text_of(fact, "worker") if "worker" in fact else task.worker_id,
        stop_requested_at=from_text(stop_asked) if stop_asked else task.stop_requested_at,
        stop_reason=fact.get("stop_reason", task.stop_reason),
        stop_grace_s=float(fact.get("stop_grace_s", task.stop_grace_s)),
        status=TaskStatus(fact["status"]),
        # As its keeper saw it: who records it may have come hours later.
        ended_at=from_text(ended) if ended else at,
        exit_code=None if fact["exit_code"] is None else number_of(fact, "exit_code"),
        signal=None if fact["signal"] is None else number_of(fact, "signal"),
        stopped_by=text_of(fact, "stopped_by"),
        error=text_of(fact, "error"),
        # Only what was read without being recorded has none.
        event_id=None if fact["event_id"] is None else text_of(fact, "event_id"),
        stdout_bytes=number_of(fact, "stdout_bytes"),
        stderr_bytes=number_of(fact, "stderr_bytes"),
        seen_bytes=number_of(fact, "seen_bytes"),
        truncated=bool(fact["truncated"]),
        leftovers=tuple(dict(member) for member in fact["leftovers"]),
        # The keeper's own word, which is there for good; `running` is not, after a compaction.
        started_at=from_text(started) if started else task.started_at,
        keeper=task.keeper or _identity(fact.get("keeper")),
        child=task.child or _identity(fact.get("child")),
    )


def text_of(fact: Mapping[str, Any], name: str) -> str:
    """Raises ValueError, or KeyError, for what no writer of ours made."""
    value = fact[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


def number_of(fact: Mapping[str, Any], name: str) -> int:
    value = fact[name]
    if type(value) is not int:
        raise ValueError(f"{name} is no number")
    return value


def _identity(value: object) -> Identity | None:
    return None if value is None else from_json(value)


def _status_text(task: Task | None) -> str:
    return "unknown" if task is None else task.status.value


def check_origin(origin_tool_call_id: str | None) -> str | None:
    """Raises `InvalidInput` for what cannot be written down as it is."""
    if origin_tool_call_id is None:
        return None
    if not isinstance(origin_tool_call_id, str) or not 0 < len(origin_tool_call_id) <= 512:
        raise InvalidInput("origin_tool_call_id is a text of 1 to 512 characters")
    return origin_tool_call_id
