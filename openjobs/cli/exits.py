"""How a command ends: one number for scripts, one line for people."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import (
    AmbiguousId,
    CancelledError,
    Damaged,
    InvalidInput,
    NotFound,
    OpenJobsError,
    OutcomeUnknown,
    Refused,
    SessionBusy,
    UnknownJob,
    UnknownSession,
)
from .text import visible

if TYPE_CHECKING:
    from ..jobs import Job  # not at run time: `--help` must not pay for it

COMPLETED = 0
ERRORED = 1  #: the job errored, or openjobs itself failed
USAGE = 2
NOT_FOUND = 3  #: nothing by that id, or more than one
TIMED_OUT = 4  #: the wait ended before the job
CANCELLED = 5
REFUSED = 6  #: the store is damaged, or what was asked for was refused
UNWRITTEN = 74  #: stdout took no more; `EX_IOERR` of sysexits.h, so that nobody takes it for a job's end
INTERRUPTED = 130
BROKEN_PIPE = 141  #: the reader of our output went away

#: how many candidates an answer names
CANDIDATES = 8


def of_job(job: Job) -> int:
    ended = {"completed": COMPLETED, "errored": ERRORED, "cancelled": CANCELLED}
    return ended.get(job.status.value, TIMED_OUT)


def of_jobs(jobs: Iterable[Job]) -> int:
    """One number for several jobs."""
    return worst(of_job(job) for job in jobs)


def worst(codes: Iterable[int]) -> int:
    """Unfinished outweighs errored outweighs cancelled."""
    found = set(codes)
    return next((code for code in (TIMED_OUT, ERRORED, CANCELLED) if code in found), COMPLETED)


def of_error(error: BaseException) -> int:
    match error:
        case NotFound():
            return NOT_FOUND
        case InvalidInput():
            return USAGE
        case CancelledError():
            return CANCELLED  # the job that we wait in was asked to stop
        case Refused() | Damaged() | OutcomeUnknown() | OSError():
            return REFUSED
        case _:
            return ERRORED


def explain(error: BaseException) -> str:
    """One clear line (and perhaps the candidates below it): what is wrong and what to do."""
    if not isinstance(error, OpenJobsError):
        what = visible(str(error)) or "no further words"
        if isinstance(error, OSError):
            return what
        return f"openjobs failed: {type(error).__name__}: {what} (OPENJOBS_DEBUG=1 shows where)"
    # The host puts its name for what it was asked in front; nobody typed that.
    said = re.sub(r"\A[a-z]+_(?:jobs?|tasks?|session): ", "", visible(str(error)))
    lines = said.splitlines()[:12]
    if isinstance(error, NotFound):
        lines += _candidates(error, lines[0])
        if isinstance(error, UnknownSession) and not error.candidates and "; " not in lines[0]:
            lines[0] += "; `openjobs sessions` lists those there are"
    elif isinstance(error, SessionBusy) and "again" not in lines[0]:
        lines[0] += " (try again)"
    return "\n".join(lines)


def _candidates(error: NotFound, said: str) -> list[str]:
    shown = [" ".join(visible(str(candidate)).splitlines()) for candidate in error.candidates]
    if not shown or all(candidate in said for candidate in shown):
        return []
    heads = {AmbiguousId: "it could be", UnknownJob: "the newest jobs are", UnknownSession: "there is"}
    head = heads.get(type(error), "known are")
    more = [f"  … and {len(shown) - CANDIDATES:,} more"] if len(shown) > CANDIDATES else []
    return [f"{head}:", *(f"  {candidate}" for candidate in shown[:CANDIDATES]), *more]
