"""What one event changes in a session's documents: row, messages and card, in one commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

import attrs

from ..errors import Damaged, IdempotencyConflict, JobExists, ParentFinished, UnknownJob, UnknownNode
from ..ids import IdMaker, short
from ..jobs import CancelRequested, ContextMode, Event, Job, JobStatus, transition
from ..repo import Change
from ..session import Documents, Node, cards
from ..session.text import fits
from .committer import BATCH_LIMIT


@attrs.define(slots=True)
class JobChange:
    """The job that came out; filled in each time the change is decided (it may be decided again)."""

    job: Job | None


def refuse_again(first: Job, again: Job) -> None:
    """The same request came before: `JobExists` with it, or `IdempotencyConflict` where it differs."""
    if first.request_digest == again.request_digest:
        raise JobExists(f"this request is job {first.job_id} already", job=first)
    what = "job id" if first.job_id == again.job_id else f"tool call id {again.origin_tool_call_id!r}"
    raise IdempotencyConflict(
        f"the {what} belongs to job {first.job_id}, which was another request; use a new one", first_id=first.job_id
    )


def refuse_child_of(parent: Job) -> None:
    if parent.terminal or parent.cancel_requested_at is not None:
        state = parent.status.value if parent.terminal else "being cancelled"
        raise ParentFinished(f"the parent job {parent.job_id} is {state} and takes no more children")


def job_created(
    documents: Documents, change: JobChange, now: datetime, *, fresh_id: bool = False, rivals: Iterable[str] = ()
) -> Change:
    """The `pending` commit: row, user message with the whole prompt, and the card as running.

    `rivals` are ids of jobs that may have been made for the same tool call since the caller looked.

    The card of a job whose caller lives in another session follows in that one (`mirror`).
    """
    job = change.job
    assert job is not None
    assert job.user_msg_id is not None
    assert job.attach_id is not None
    first = None if fresh_id else documents.job(job.job_id)
    if first is not None:
        refuse_again(first, job)
    if job.origin_tool_call_id is not None:
        _refuse_second_call(documents, job, rivals)
    if job.parent_job_id is not None and (parent := documents.job(job.parent_job_id)) is not None:
        refuse_child_of(parent)
    found = documents.meta()
    parent_msg_id = job.parent_msg_id
    if parent_msg_id is None and job.context_mode is ContextMode.INHERIT:
        parent_msg_id = found.head_id
    elif parent_msg_id is not None and not documents.has_node(parent_msg_id):
        raise UnknownNode(f"there is no message {parent_msg_id} in session {job.parent_session_id}")
    job = attrs.evolve(
        job,
        status=JobStatus.PENDING,
        created_at=now,
        parent_msg_id=parent_msg_id,
        head_at_submit=found.head_id if job.foreground else None,
    )
    nodes = [
        Node(
            id=job.user_msg_id,  # type: ignore[arg-type]
            parent=parent_msg_id if job.context_mode is ContextMode.INHERIT else None,
            role="user",
            content=job.description,
            created_at=now,
            extra={"job_id": job.job_id},
        )
    ]
    if not job.elsewhere:
        nodes.append(cards.placeholder(job, job.attach_id, now))  # type: ignore[arg-type]
    documents.append(nodes)
    documents.put_job(job)
    change.job = job
    return Change(
        files=documents.changes,
        subject=f"job {short(job.job_id)} pending: {job.subject}",
        trailers=_trailers("transition", job),
    )


def _refuse_second_call(documents: Documents, job: Job, rivals: Iterable[str]) -> None:
    """Two that make the same call at once:
    1. each looks in the index, and neither finds the other
    2. the first is in an earlier batch, or another process's: its entry is in the index by now, a rival
    3. or it is before this one in the same batch: its row is among the newest
    """
    assert job.origin_tool_call_id is not None
    for job_id in rivals:
        first = documents.job(job_id)
        if first is not None:
            refuse_again(first, job)
    first = documents.job_of_call(job.origin_tool_call_id, among=BATCH_LIMIT // 2)  # each is two events
    if first is not None:
        refuse_again(first, job)


def job_changed(
    documents: Documents,
    job_id: str,
    change: JobChange,
    event: Event,
    now: datetime,
    running_commit: Callable[[Job], str | None],
    new_id: IdMaker,
) -> Change | None:
    """The commit of one event on an existing job. Raises `InvalidTransition`, `UnknownJob`, `UnknownNode`."""
    before = documents.job(job_id)
    if before is None:
        raise UnknownJob(f"there is no job {job_id!r}")
    if _is_applied(before, event):
        change.job = documents.outcome(before)
        return None
    job = transition(before, event, now)
    if job.terminal:
        job = _ended(documents, job, now, running_commit(before), new_id)
    documents.put_job(job)
    change.job = documents.outcome(job)
    if isinstance(event, CancelRequested):
        return Change(
            files=documents.changes,
            subject=f"job {short(job_id)} cancel requested: {job.subject}",
            trailers=_trailers("cancel-request", job),
        )
    return Change(
        files=documents.changes,
        subject=f"job {short(job_id)} {before.status.value} → {job.status.value}: {job.subject}",
        trailers=_trailers("transition", job),
    )


def _is_applied(job: Job, event: Event) -> bool:
    """An end carries its identity, so one whose outcome was unknown is recognised, not refused."""
    return job.event_id is not None and job.event_id == getattr(event, "event_id", None)


def _ended(documents: Documents, job: Job, now: datetime, running_commit_id: str | None, new_id: IdMaker) -> Job:
    """The job with the messages of its end appended: assistant message, whole texts, card, head."""
    nodes: list[Node] = []
    if job.head_id is not None:
        if not documents.has_node(job.head_id):
            raise UnknownNode(
                f"the turn ended at message {job.head_id}, which session {job.parent_session_id} does not have"
            )
        if not (fits(job.result_text) and fits(job.error)):
            holder = _result_node(job, new_id(), job.head_id, "result", now)
            nodes.append(holder)
            job = attrs.evolve(job, result_msg_id=holder.id)
    elif job.started_at is not None or not (fits(job.result_text) and fits(job.error)):
        answer = _result_node(job, new_id(), job.user_msg_id, None, now)
        nodes.append(answer)
        job = attrs.evolve(job, head_id=answer.id)
    if job.attach_id is not None and (not job.elsewhere or _has_card(documents, job.attach_id)):
        nodes.append(cards.finished(job, running_commit_id, now))
    if nodes:
        documents.append(nodes)
    if job.foreground and job.status is JobStatus.COMPLETED:
        found = documents.meta()
        if found.head_id == job.head_at_submit:
            documents.put_meta(attrs.evolve(found, head_id=job.head_id))
    return job


def _has_card(documents: Documents, attach_id: str) -> bool:
    """Whether the card of a job that was asked for elsewhere is here: of a store from before they went to the caller's
    session. One that may only be where nothing can be read keeps no job from ending."""
    try:
        return documents.has_node(attach_id)
    except Damaged:
        return False


def _result_node(job: Job, node_id: str, parent: str | None, function: str | None, now: datetime) -> Node:
    extra = {"job_id": job.job_id, "status": job.status.value}
    if job.error is not None:
        extra["error"] = job.error
    content = job.result_text if job.result_text is not None else cards.ending_text(job)
    return Node(
        id=node_id, parent=parent, role="assistant", function=function, content=content, created_at=now, extra=extra
    )


def _trailers(kind: str, job: Job) -> list[tuple[str, str]]:
    trailers = [("Openjobs-Kind", kind), ("Openjobs-Job", job.job_id), ("Openjobs-Status", job.status.value)]
    if job.runner_id is not None:
        trailers.append(("Openjobs-Runner", job.runner_id))
    return trailers
