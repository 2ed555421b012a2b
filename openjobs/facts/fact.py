"""A fact: what is said once when a job is registered, and once when it has settled.

A settled fact says again all that the registered one said, so that whoever saw only the end (a
reader of the last hour) knows whose job it was. Source: spec 001.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from ..clock import to_epoch_ms
from ..ids import check_job_id
from ..jobs import Job
from ..ledger import START, Cursor

#: `Fact.kind`: what produced the work
JOB = "job"  #: an agent turn, run by a runner
PROCESS = "process"  #: a background command, run under a keeper


class FactType(enum.StrEnum):
    REGISTERED = "job/registered"
    SETTLED = "job/settled"


@attrs.frozen(kw_only=True, slots=True)
class Fact:
    """What both facts say. Times are milliseconds since 1970-01-01 UTC and equal those of the row (or task)."""

    type: ClassVar[FactType]

    #: the job's or task's own id, a UUID: never given out twice, also not by another process or in a copy
    job_id: str
    #: `JOB` or `PROCESS`
    kind: str
    #: the owner: the session it belongs to, whoever ends it
    session_id: str
    #: the session that asked for it, where that is another one
    caller_session_id: str | None = None
    #: the job whose turn asked for it
    parent_job_id: str | None = None
    #: one line for lists
    label: str = ""
    #: the tool call that made it, as the caller named it
    tool_call_id: str | None = None
    #: when it was written down first (`created_at`)
    registered_at_ms: int
    #: just behind it in its session's ledger: where `read` and `follow` go on
    cursor: Cursor = attrs.field(default=START, eq=False, repr=False)

    @property
    def at_ms(self) -> int:
        """When what it says happened."""
        return self.registered_at_ms


@attrs.frozen(kw_only=True, slots=True)
class Registered(Fact):
    """`job/registered`: it is durable, and somebody has its id."""

    type = FactType.REGISTERED


@attrs.frozen(kw_only=True, slots=True)
class Settled(Fact):
    """`job/settled`: it has ended, and its end is durable."""

    type = FactType.SETTLED

    #: None: it never started
    started_at_ms: int | None = None
    settled_at_ms: int
    #: the terminal status of the row or task
    status: str
    #: whether the end was told by the work itself: the callable returned, the command ended. False where it
    #: raised, was given up or killed, or never started. It does not say that everything it used is free.
    producer_reported: bool

    @property
    def at_ms(self) -> int:
        return self.settled_at_ms


_TYPES: Mapping[str, type[Registered] | type[Settled]] = {one.type.value: one for one in (Registered, Settled)}
#: name -> (type, whether it may be null), in the order in which they are written
_COMMON: Mapping[str, tuple[type, bool]] = {
    "job_id": (str, False),
    "kind": (str, False),
    "session_id": (str, False),
    "caller_session_id": (str, True),
    "parent_job_id": (str, True),
    "label": (str, False),
    "tool_call_id": (str, True),
    "registered_at_ms": (int, False),
}
_FIELDS: Mapping[FactType, Mapping[str, tuple[type, bool]]] = {
    FactType.REGISTERED: _COMMON,
    FactType.SETTLED: {
        **_COMMON,
        "started_at_ms": (int, True),
        "settled_at_ms": (int, False),
        "status": (str, False),
        "producer_reported": (bool, False),
    },
}


def to_json(fact: Fact) -> dict[str, Any]:
    """As it stands in the ledger."""
    return {"type": fact.type.value, **{name: getattr(fact, name) for name in _FIELDS[fact.type]}}


def from_json(data: Mapping[str, Any], cursor: Cursor) -> Fact | None:
    """None for a type that only a newer version knows. Raises ValueError for what no writer of ours made."""
    kind = data.get("type")
    if not isinstance(kind, str):
        raise ValueError("the record has no type")
    made = _TYPES.get(kind)
    if made is None:
        return None
    fields = {name: _value(data, name, of, nullable) for name, (of, nullable) in _FIELDS[made.type].items()}
    check_job_id(fields["job_id"])
    return made(**fields, cursor=cursor)


def _value(data: Mapping[str, Any], name: str, of: type, nullable: bool) -> Any:
    value = data.get(name)
    if type(value) is not of and not (nullable and value is None):
        raise ValueError(f"{name} is {value!r}")
    return value


# --- the facts of jobs ------------------------------------------------------------------------------------


def registered(job: Job) -> Registered:
    return Registered(**_of_job(job))


def settled(job: Job, *, producer_reported: bool) -> Settled:
    """The fact of a terminal row."""
    assert job.completed_at is not None
    return Settled(
        **_of_job(job),
        started_at_ms=to_epoch_ms(job.started_at) if job.started_at is not None else None,
        settled_at_ms=to_epoch_ms(job.completed_at),
        status=job.status.value,
        producer_reported=producer_reported,
    )


def _of_job(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "kind": JOB,
        "session_id": job.parent_session_id,
        "caller_session_id": job.caller_session_id,
        "parent_job_id": job.parent_job_id,
        "label": job.subject,
        "tool_call_id": job.origin_tool_call_id,
        "registered_at_ms": to_epoch_ms(job.created_at),
    }
