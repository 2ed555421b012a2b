"""The job: what it is made of, the states it can be in, and the one function that changes it.

Everything that ever happens to a job is an `Event` given to `transition`; the store only persists
what that function returns. Source: spec 003, D1 (fields), D2 (states), D5 (cancel), D12 (ends).
"""

from __future__ import annotations

import enum
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from .errors import CancelledError, InvalidInput, InvalidTransition

#: a job's own metadata, encoded as JSON, holds at most this many bytes
METADATA_LIMIT_BYTES = 1024
SUBJECT_LIMIT_CHARS = 200


class JobStatus(enum.StrEnum):
    PENDING = "pending"  #: written down, not yet given to the pool
    QUEUED = "queued"  #: waits for a free worker
    RUNNING = "running"  #: a worker runs it
    COMPLETED = "completed"  #: returned
    CANCELLED = "cancelled"  #: stopped on request, perhaps with partial output
    ERRORED = "errored"  #: raised, or its process died

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({JobStatus.COMPLETED, JobStatus.CANCELLED, JobStatus.ERRORED})
UNFINISHED = frozenset(JobStatus) - TERMINAL

#: the legal edges, each walked at most once (spec 003, invariants 1 and 2)
EDGES: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.PENDING: frozenset({JobStatus.QUEUED, JobStatus.CANCELLED, JobStatus.ERRORED}),
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.CANCELLED, JobStatus.ERRORED}),
    JobStatus.RUNNING: TERMINAL,
    JobStatus.COMPLETED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
    JobStatus.ERRORED: frozenset(),
}


class ContextMode(enum.StrEnum):
    INHERIT = "inherit"  #: the turn forks off `parent_msg_id`
    CLEAN = "clean"  #: the turn starts a new root


class NoticeStage(enum.StrEnum):
    """How far the news of a job's end is on its way to the conversation that asked for it (spec 000)."""

    WANTED = "wanted"  #: the job has not ended
    RECORDED = "recorded"  #: it has; nobody was told
    DELIVERED = "delivered"  #: a message of the conversation says so
    CONSUMED = "consumed"  #: the model, or the host that keeps a conversation of its own, has seen it


#: a stage is never left for an earlier one
STAGES = tuple(NoticeStage)


@attrs.frozen(kw_only=True, slots=True)
class Job:
    """One asynchronous agent turn: what it is, never how it is run.

    Texts here are whole; a row on disk may hold only their beginnings (the store joins them again).
    Times are UTC with whole milliseconds.
    """

    job_id: str
    #: one line for lists, also the branch's label
    subject: str
    #: the whole prompt
    description: str
    agent_id: str
    status: JobStatus = JobStatus.PENDING
    created_at: datetime
    queued_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    #: the session it runs on; never changes (invariant 6)
    parent_session_id: str
    parent_job_id: str | None = None
    #: the message that triggered it; the attach card hangs there
    parent_msg_id: str | None = None
    context_mode: ContextMode = ContextMode.INHERIT
    #: the assistant message where it landed
    head_id: str | None = None
    result_text: str | None = None
    error: str | None = None
    cancel_requested_at: datetime | None = None
    #: always 0: nothing is retried by itself
    attempt: int = 0

    #: the session of the caller where it is another one
    caller_session_id: str | None = None
    #: the message of that session on which the card hangs
    caller_msg_id: str | None = None
    cancel_reason: str | None = None
    #: the live runner that alone changes the status
    runner_id: str | None = None
    #: the attempt whose log this is
    run_id: str | None = None
    origin_tool_call_id: str | None = None
    #: the node of the attach card
    attach_id: str | None = None
    #: the node that holds the whole prompt
    user_msg_id: str | None = None
    #: the node that holds the whole result or error where that is not `head_id`
    result_msg_id: str | None = None
    #: digest of the request, for idempotency
    request_digest: str | None = None
    #: grows by one with every transition and every cancel request
    revision: int = 0
    #: identity of the end, for notices: set once, with the terminal status
    event_id: str | None = None
    #: of a background job, how far the news of its end is; None: nobody is to be told
    notice: NoticeStage | None = None
    metadata: Mapping[str, Any] | None = None
    #: what the profile reported, e.g. tokens and cost
    usage: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    #: whether the session's head follows the job (a foreground turn)
    foreground: bool = False
    #: the session's head at submit, for `foreground`
    head_at_submit: str | None = None
    #: fields of a newer version, kept as they are
    extra: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def elsewhere(self) -> bool:
        """Whether the caller lives in another session: card and notice are there (spec 003, D6)."""
        return self.caller_session_id is not None and self.caller_session_id != self.parent_session_id

    @property
    def conversation_id(self) -> str:
        """The session whose conversation asked for the job: where its card is, and where its end is told."""
        return self.caller_session_id or self.parent_session_id

    def owned_by(self, session_id: str) -> bool:
        """Whether that session may see and stop the job: it runs there, or was asked for there (D6)."""
        return session_id in (self.parent_session_id, self.caller_session_id)


@attrs.frozen(kw_only=True, slots=True)
class SpawnRequest:
    """What a caller asks for. `description` is short (a list shows it), `prompt` is the whole task.

    `env` and `cwd` reach the worker in memory only and are never written to disk. With `inherit`
    and no `parent_msg_id` the turn forks off the session's head as it is at submit.

    A caller in another session names it as `caller_session_id`; `caller_msg_id` is its message there
    (default: that session's head), while `parent_msg_id` is always one of the target's. With `notify`
    the job is a background one: its end becomes a notice for the caller's conversation.
    """

    prompt: str
    parent_session_id: str
    description: str = ""
    agent_id: str = "main"
    context_mode: ContextMode | str = ContextMode.INHERIT
    parent_msg_id: str | None = None
    parent_job_id: str | None = None
    caller_session_id: str | None = None
    caller_msg_id: str | None = None
    origin_tool_call_id: str | None = None
    job_id: str | None = None
    cwd: str | Path | None = None
    env: Mapping[str, str] | None = attrs.field(default=None, repr=False)
    #: seconds the run may take before it is cancelled
    timeout_s: float | None = None
    metadata: Mapping[str, Any] | None = None
    foreground: bool = False
    #: tell the caller's conversation when it has ended; not for a result that the caller waits for
    notify: bool = False


@attrs.frozen(kw_only=True, slots=True)
class TurnResult:
    """What a turn came to. `error` set means errored, whatever else is there; so does a field that cannot be stored
    (a `head_id` that names no message, a `usage` that is no JSON), which costs only itself: the text is kept.

    `head_id` names a message of the session that the turn itself appended; without it the runner
    appends `final_text` as the assistant message.
    """

    final_text: str = ""
    head_id: str | None = None
    error: str | None = None
    usage: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True, slots=True)
class TurnRequest:
    """One turn as its callable sees it."""

    job: Job
    session_id: str
    prompt: str
    agent_id: str
    context_mode: ContextMode
    parent_msg_id: str | None
    user_msg_id: str | None
    #: reads the ordered context items when called: most callables never need them
    read_context: Callable[[], list[Any]] = attrs.field(repr=False)
    cwd: Path | None = None
    env: Mapping[str, str] | None = attrs.field(default=None, repr=False)
    #: on the runner's monotonic clock, or None
    deadline: float | None = None
    cancel_event: threading.Event = attrs.field(factory=threading.Event, repr=False)
    #: sends a progress value to live listeners; nothing is stored
    progress: Callable[[Any], None] = attrs.field(default=lambda value: None, repr=False)
    #: replaces the partial text that is shown while running and kept when the job is cancelled or errs
    partial: Callable[[str], None] = attrs.field(default=lambda text: None, repr=False)
    #: the `JobRunner` that runs it, for jobs of its own (`AgentTools.for_turn`); None where nobody does
    runner: Any = attrs.field(default=None, repr=False, eq=False)

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def context(self) -> list[Any]:
        return self.read_context()

    def raise_if_cancelled(self) -> None:
        """Raises `CancelledError` once the job was asked to stop."""
        if self.cancel_event.is_set():
            raise CancelledError(f"job {self.job_id} was asked to stop")


SyncFn = Callable[[TurnRequest, threading.Event], TurnResult]


# --- events -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, slots=True)
class Queued:
    runner_id: str | None = None


@attrs.frozen(kw_only=True, slots=True)
class Started:
    run_id: str | None = None


@attrs.frozen(kw_only=True, slots=True)
class CancelRequested:
    reason: str | None = None


@attrs.frozen(kw_only=True, slots=True)
class Completed:
    event_id: str
    result_text: str = ""
    head_id: str | None = None
    usage: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True, slots=True)
class Cancelled:
    """The end of a job that was asked to stop; `error` only where the end was forced."""

    event_id: str
    reason: str | None = None
    #: partial output
    result_text: str | None = None
    error: str | None = None
    head_id: str | None = None
    usage: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True, slots=True)
class Errored:
    event_id: str
    error: str
    #: partial output
    result_text: str | None = None
    head_id: str | None = None
    usage: Mapping[str, Any] | None = None


Event = Queued | Started | CancelRequested | Completed | Cancelled | Errored
End = Completed | Cancelled | Errored


def transition(job: Job, event: Event, now: datetime) -> Job:
    """The job after `event`. Pure. Raises `InvalidTransition` and changes nothing where it does not fit.

    An end that comes after a cancel request is a cancelled one, whatever the worker made of it
    (design: "How it ends"); its text is kept as partial output.
    """
    match event:
        case Queued(runner_id=runner_id):
            return _moved(job, JobStatus.QUEUED, queued_at=now, runner_id=runner_id or job.runner_id)
        case Started(run_id=run_id):
            return _moved(job, JobStatus.RUNNING, started_at=now, run_id=run_id or job.run_id)
        case CancelRequested(reason=reason):
            if job.terminal or job.cancel_requested_at is not None:
                raise _illegal(job, "cancel-requested")
            return attrs.evolve(job, cancel_requested_at=now, cancel_reason=reason, revision=job.revision + 1)
        case Completed() | Errored() if job.cancel_requested_at is not None:
            error = event.error if isinstance(event, Errored) else None
            return _moved(
                job,
                JobStatus.CANCELLED,
                **_end_fields(job, event, now),
                result_text=event.result_text,
                error=error,
            )
        case Completed():
            return _moved(job, JobStatus.COMPLETED, **_end_fields(job, event, now), result_text=event.result_text)
        case Errored():
            return _moved(
                job, JobStatus.ERRORED, **_end_fields(job, event, now), result_text=event.result_text, error=event.error
            )
        case Cancelled():
            return _moved(
                job,
                JobStatus.CANCELLED,
                **_end_fields(job, event, now),
                result_text=event.result_text,
                error=event.error,
                cancel_requested_at=job.cancel_requested_at or now,
                cancel_reason=job.cancel_reason if job.cancel_requested_at is not None else event.reason,
            )


def _end_fields(job: Job, event: End, now: datetime) -> dict[str, Any]:
    fields = {"completed_at": now, "event_id": event.event_id, "head_id": event.head_id, "usage": event.usage}
    return fields if job.notice is None else {**fields, "notice": NoticeStage.RECORDED}


def noticed(job: Job, stage: NoticeStage) -> Job:
    """An ended job whose notice has come to `stage`; itself where it is there already, or has none."""
    if job.notice is None or not job.terminal or STAGES.index(job.notice) >= STAGES.index(stage):
        return job
    return attrs.evolve(job, notice=stage)


def _moved(job: Job, to: JobStatus, **changes: Any) -> Job:
    if to not in EDGES[job.status]:
        raise _illegal(job, to.value)
    return attrs.evolve(job, status=to, revision=job.revision + 1, **changes)


def _illegal(job: Job, to: str) -> InvalidTransition:
    return InvalidTransition(f"job {job.job_id} is {job.status.value}; it cannot become {to}", status=job.status.value)


def subject_of(description: str, prompt: str) -> str:
    """One line for lists: the description, or else the prompt's first words."""
    line = " ".join((description or prompt).split())
    return line if len(line) <= SUBJECT_LIMIT_CHARS else line[: SUBJECT_LIMIT_CHARS - 1] + "…"


def request_digest(request: SpawnRequest) -> str:
    """What makes two requests the same: everything that is asked for but the id, `env` and `cwd`."""
    asked: list[Any] = [
        request.prompt,
        request.description,
        request.parent_session_id,
        request.agent_id,
        str(request.context_mode),
        request.parent_msg_id,
        request.parent_job_id,
        request.caller_session_id,
        request.timeout_s,
        request.foreground,
        dict(request.metadata) if request.metadata is not None else None,
    ]
    # Only where they say something, so that the digest of a request that does without stays what it was.
    if request.caller_msg_id is not None:
        asked.append(["caller_msg_id", request.caller_msg_id])
    if request.notify:
        asked.append("notify")
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:32]


def check_metadata(encoded: bytes) -> None:
    if len(encoded) > METADATA_LIMIT_BYTES:
        raise InvalidInput(f"metadata is {len(encoded)} bytes of JSON; the limit is {METADATA_LIMIT_BYTES}")
