"""The card of a job whose caller lives in another session. Source: spec 003, D6 and D8.

Two repositories cannot change in one commit, so there is an order: the job's session commits first, its
caller's follows. What a crash leaves behind in between is found by the caller's session being named in
the home's index, and mended from the row, which alone says what the job is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import attrs

from ..errors import Damaged, OpenJobsError, RepositoryRefused, UnknownNode, UnknownSession
from ..ids import check_session_id, short
from ..jobs import UNFINISHED, Job, JobStatus
from ..repo import Change
from ..session import Documents, cards
from .damage import OnDamage, once

if TYPE_CHECKING:
    from .base import JobStore

log = logging.getLogger(__name__)


def with_caller(store: JobStore, job: Job) -> Job:
    """`job` with the message of its caller that its card will hang on: the head, where none was named.

    Raises `UnknownSession`, `UnknownNode`. A caller's session that cannot be read does not keep the job from
    running; its card waits until it can.
    """
    assert job.caller_session_id is not None
    store.session(check_session_id(job.caller_session_id))
    try:
        documents = store.documents(job.caller_session_id)
        if job.caller_msg_id is None:
            return attrs.evolve(job, caller_msg_id=documents.meta().head_id)
        known = documents.has_node(job.caller_msg_id)
    except (Damaged, RepositoryRefused):
        return job
    if not known:
        raise UnknownNode(f"there is no message {job.caller_msg_id} in session {job.caller_session_id}")
    return job


def called_jobs(store: JobStore, session_id: str, statuses: frozenset[JobStatus] | None) -> Iterator[Job]:
    """The jobs of other sessions that this one asked for, newest first within each, or of all.

    Those that have not ended are found by what pages are tagged with, however many others there are. What
    cannot be read, a session, a page or a row, hides no other; it is logged.
    """

    @once
    def say(target: str, error: OpenJobsError) -> None:
        log.warning("what session %s asked session %s for cannot be read: %s", session_id, target, error)

    entries = list(dict.fromkeys((e.session_id, e.job_id) for e in store.index.by_caller(session_id)))
    if statuses is not None and statuses <= UNFINISHED:
        for target in dict.fromkeys(target for target, _ in entries):
            if (documents := _readable(store, target, say)) is not None:
                readable = documents.jobs_newest_first(statuses, functools.partial(say, target))
                yield from (job for job in readable if job.caller_session_id == session_id)
        return
    known: dict[str, Documents | None] = {}
    for target, job_id in reversed(entries):
        if target not in known:
            known[target] = _readable(store, target, say)
        documents = known[target]
        try:
            job = documents.job(job_id) if documents is not None else None
        except Damaged as error:
            say(target, error)
            continue
        if job is not None and (statuses is None or job.status in statuses):
            yield job


def _readable(store: JobStore, target: str, say: OnDamage) -> Documents | None:
    try:
        documents = store.documents(target)
        documents.older_pages()
    except UnknownSession:
        return None
    except (Damaged, RepositoryRefused) as error:
        say(target, error)
        return None
    return documents


def mirror_later(store: JobStore, job: Job) -> Future[bool]:
    """Bring the card in the caller's session up to `job`, which is durable as it is given, with whole texts.

    Idempotent, and never back: a card that says how the job ended stays. True where this wrote it. Raises
    `UnknownSession`; the future has `SessionBusy`, `StoreWriteFailed`, `OutcomeUnknown`, `Damaged`: try again.
    """
    assert job.caller_session_id is not None
    assert job.attach_id is not None
    attach_id = job.attach_id
    source_commit_id = store.running_commit(job) if job.terminal else None
    now = store.clock.now()
    wrote = [False]

    def decide(documents: Documents) -> Change | None:
        wrote[0] = False
        before = documents.find_node(attach_id)
        if before is not None and (cards.is_final(before) or not job.terminal):
            return None
        shown = attrs.evolve(job, caller_msg_id=before.parent if before is not None else _parent(documents, job))
        card = (
            cards.finished(shown, source_commit_id, now) if job.terminal else cards.placeholder(shown, attach_id, now)
        )
        documents.append([card])
        wrote[0] = True
        return Change(
            files=documents.changes,
            subject=f"card of job {short(job.job_id)} {cards.status_of(card)}: {job.subject}",
            trailers=[
                ("Openjobs-Kind", "card"),
                ("Openjobs-Job", job.job_id),
                ("Openjobs-Status", job.status.value),
            ],
        )

    return store.write_later(job.caller_session_id, decide, lambda: wrote[0])


def _parent(documents: Documents, job: Job) -> str | None:
    """The message it hangs on: the head, where the session could not be read at submit."""
    if job.caller_msg_id is not None and documents.has_node(job.caller_msg_id):
        return job.caller_msg_id
    return documents.meta().head_id
