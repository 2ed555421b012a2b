"""Telling a conversation what has ended: the message and the rows it is about, in one commit. Source: spec 000.

A row's stage says how far its notice is, so that what is still to be told is found without a search. That a
message tells of an end is the truth of "delivered": where the two are in different files or sessions, the message
comes first, and a stage that a crash left behind is found by that message.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import attrs

from ..errors import Damaged, OpenJobsError, RepositoryRefused
from ..ids import short
from ..jobs import UNFINISHED, Job, NoticeStage, noticed
from ..repo import Change
from ..session import Documents, Node, notices
from ..session.notices import Notice
from .base import JobStore
from .damage import OnDamage, once, raised

log = logging.getLogger(__name__)

Notices = list[Notice]


@attrs.define(kw_only=True, slots=True)
class Delivery:
    """What came of one delivery; filled in each time it is decided."""

    #: the message that was added, or None
    node: Node | None = None
    #: what it tells of
    told: Sequence[Notice] = ()
    #: a turn of the conversation is running, and nothing may be put behind it
    held: bool = False
    #: what could not be read
    damage: Sequence[Damaged] = ()
    #: where it is held for a turn that may be running there: what cannot be read
    hidden: Damaged | None = None
    #: ends that were told before and that the model has answered
    seen: frozenset[str] = frozenset()


def pending_jobs(
    store: JobStore,
    session_id: str,
    stage: NoticeStage = NoticeStage.RECORDED,
    on_damage: OnDamage | None = None,
) -> list[Job]:
    """The jobs at `stage` that the session's conversation is to be told of, in whatever session they ran; those of
    one session in order of creation.

    Costs one look at each session concerned, however many jobs there are in it. A row or page that cannot be read
    hides no other: `on_damage` is told of it; without that it is raised, and in another session logged.
    """
    tell = on_damage or raised
    found = _in_order(store.documents(session_id), session_id, stage, functools.partial(tell, session_id))
    tell = on_damage or once(functools.partial(_say, session_id))
    for target in dict.fromkeys(entry.session_id for entry in store.index.by_caller(session_id)):
        if target != session_id and store.has_session(target):
            try:
                found += _in_order(store.documents(target), session_id, stage, functools.partial(tell, target))
            except (Damaged, RepositoryRefused) as error:
                tell(target, error)
    return found


def _say(session_id: str, target: str, error: OpenJobsError) -> None:
    log.warning("what session %s asked session %s for cannot be read: %s", session_id, target, error)


def _in_order(
    documents: Documents, conversation_id: str, stage: NoticeStage, tell: Callable[[Damaged], object]
) -> list[Job]:
    found = documents.jobs_noticed(stage, tell)
    return [job for job in found if job.conversation_id == conversation_id][::-1]


#: whether a job of the session whose row cannot be read may be running: the one by that id, or, of None, any foreground
#: turn. Decided without the row
MayRun = Callable[[str | None], bool]


def deliver_later(
    store: JobStore, session_id: str, others: Sequence[Notice], may_run: MayRun = lambda job_id: True
) -> Future[Delivery]:
    """Add one message that tells of all that has ended: the session's own jobs, and `others`.

    In one commit: (1) rows of the session are read, and what a message tells of already is left out, (2) the
    message follows the head, and the head follows it, (3) the rows it is about become delivered, and those that
    the model has answered meanwhile consumed. Nothing is written while a foreground turn of the session is
    unfinished, nor where there is nothing to tell.

    What cannot be read holds back as little as it may: all of it only where `may_run` says that a foreground turn may
    be running there, one end where the job that it belongs to may be, or where a message may tell of it already.
    Those are told once the damage is mended.
    """
    delivery = Delivery()
    now = store.clock.now()
    node_id = store.new_id()

    def decide(documents: Documents) -> Change | None:
        damage: list[Damaged] = []
        delivery.node, delivery.told, delivery.held, delivery.seen = None, (), False, frozenset()
        delivery.damage, delivery.hidden = damage, None
        delivery.held = is_turn_running(documents, damage.append)
        if not delivery.held and damage and may_run(None):
            delivery.held, delivery.hidden = True, damage[0]
        if delivery.held:
            return None
        found = documents.meta()
        delivery.seen = frozenset(notices.answered(documents, found.head_id))
        rows = [
            job
            for job in _in_order(documents, session_id, NoticeStage.RECORDED, damage.append)
            if _is_due(documents, job, may_run, damage.append)
        ]
        candidates = [*map(notices.of_job, rows), *others]
        delivery.told = sorted(
            (each for each in candidates if _is_untold(documents, each, session_id, damage.append)),
            key=lambda each: each.ended_at,
        )
        changed = [noticed(job, NoticeStage.DELIVERED) for job in rows]
        changed += [
            noticed(job, NoticeStage.CONSUMED)
            for job in documents.jobs_noticed(NoticeStage.DELIVERED, damage.append)
            if job.event_id in delivery.seen
        ]
        if not delivery.told and not rows:
            return None
        for job in changed:
            documents.put_job(job)
        if delivery.told:
            delivery.node = notices.node_of(delivery.told, node_id, found.head_id, now)
            documents.append([delivery.node])
            documents.put_meta(attrs.evolve(found, head_id=node_id))
        return Change(
            files=documents.changes,
            subject=f"notice {short(node_id)}: {len(delivery.told)} ended",
            trailers=[("Openjobs-Kind", "notice")],
        )

    return store.write_later(session_id, decide, lambda: delivery)


def is_turn_running(documents: Documents, on_damage: Callable[[Damaged], object] | None = None) -> bool:
    """Whether a turn that the session's head follows is unfinished, as far as rows can be read."""
    return any(job.foreground for job in documents.jobs_newest_first(UNFINISHED, on_damage))


def _is_due(documents: Documents, job: Job, may_run: MayRun, tell: Callable[[Damaged], object]) -> bool:
    """Whether the conversation is to be told now: what a running job started is that one's to hear of."""
    if job.parent_job_id is None:
        return True
    try:
        parent = documents.job(job.parent_job_id)
    except Damaged as error:
        tell(error)
        return not may_run(job.parent_job_id)
    return parent is None or parent.terminal


def _is_untold(documents: Documents, notice: Notice, session_id: str, tell: Callable[[Damaged], object]) -> bool:
    try:
        return documents.notice_of(notice.event_id) is None
    except Damaged as error:
        tell(error)
        # A row of this session goes on with the message, in one commit: it says that there is none.
        return notice.kind == "job" and notice.target_session_id == session_id


def note_later(store: JobStore, session_id: str, job_ids: Iterable[str], stage: NoticeStage) -> Future[list[Job]]:
    """Bring the notices of these jobs of one session to `stage`; the future has those that were not there yet."""
    ids = list(job_ids)
    changed: list[Job] = []

    def decide(documents: Documents) -> Change | None:
        changed.clear()
        for job_id in ids:
            before = documents.job(job_id)
            after = before if before is None else noticed(before, stage)
            if after is not None and after is not before:
                documents.put_job(after)
                changed.append(after)
        if not changed:
            return None
        return Change(
            files=documents.changes,
            subject=f"notice of {_names(changed)} {stage.value}",
            trailers=[("Openjobs-Kind", "notice")],
        )

    return store.write_later(session_id, decide, lambda: list(changed))


def _names(jobs: Sequence[Job]) -> str:
    shown = ", ".join(f"job {short(job.job_id)}" for job in jobs[:3])
    return shown if len(jobs) <= 3 else f"{shown} and {len(jobs) - 3} more"


def by_session(jobs: Iterable[Job]) -> Mapping[str, list[str]]:
    """Job ids by the session in which they ran."""
    found: dict[str, list[str]] = {}
    for job in jobs:
        found.setdefault(job.parent_session_id, []).append(job.job_id)
    return found


__all__ = ["Delivery", "MayRun", "by_session", "deliver_later", "is_turn_running", "note_later", "pending_jobs"]
