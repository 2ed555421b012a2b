"""The home's index of ids, made again from the rows: they are the truth, and it may be lost."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from ..errors import Damaged, OpenJobsError, RepositoryRefused, StoreWriteFailed, UnknownSession
from ..jobs import Job
from .damage import OnDamage
from .index import Entry, Index, key_of

if TYPE_CHECKING:
    from .base import JobStore

#: so many are written to the index at once
_ENTRIES = 1000

Dated = tuple[datetime, Entry]


def entry_of(job: Job) -> Entry:
    """As it was written when the job was made."""
    origin, session_id = job.origin_tool_call_id, job.parent_session_id
    return Entry(
        job_id=job.job_id,
        session_id=session_id,
        parent_job_id=job.parent_job_id,
        key=key_of(session_id, origin) if origin is not None else None,
        run_id=job.run_id,
        caller_session_id=job.caller_session_id if job.elsewhere else None,
    )


def lacking(index: Index, session_id: str, entries: Iterable[Entry]) -> list[Entry]:
    """Those of `entries`, all of one session and read before, by whose id or key nothing is found.

    An entry is durable before its row can be seen, so one that is looked for after the row and is not there is lost.
    """
    wanted = list(entries)
    known = {(entry.job_id, entry.key) for entry in index.of_session(session_id)}
    return [entry for entry in wanted if (entry.job_id, entry.key) not in known]


def put_back(index: Index, dated: Iterable[Dated]) -> int:
    """Durable when it returns, oldest first: the order of the index is that of creation. Raises OSError."""
    entries = [entry for _, entry in sorted(dated, key=lambda each: each[0])]
    for at in range(0, len(entries), _ENTRIES):
        index.add(entries[at : at + _ENTRIES])
    return len(entries)


def reindex(store: JobStore, session_ids: Iterable[str], on_damage: OnDamage | None) -> int:
    """As `JobStore.reindex`."""
    lost: list[Dated] = []
    failed: list[OpenJobsError] = []
    for session_id in session_ids:
        errors: list[OpenJobsError] = []
        try:
            readable = store.documents(session_id).jobs_newest_first(on_damage=errors.append)
            jobs = {job.job_id: job for job in readable}
        except UnknownSession:
            continue  # taken away meanwhile
        except (Damaged, RepositoryRefused) as error:
            jobs, errors = {}, [error]
        entries = lacking(store.index, session_id, map(entry_of, jobs.values()))
        lost += [(jobs[entry.job_id].created_at, entry) for entry in entries]
        failed += errors[:1]
        if errors and on_damage is not None:
            on_damage(session_id, errors[0])
    try:
        put = put_back(store.index, lost)
    except OSError as error:
        if isinstance(error, OpenJobsError):
            raise
        raise StoreWriteFailed(f"the index could not be written: {error}; try again", errno=error.errno) from error
    if failed and on_damage is None:
        raise failed[0]
    return put
