"""Attach cards: the node that stands for a job in a conversation. Source: spec 003, D8.

Written with the job's `pending` commit as running, and again with its terminal commit; never
between. Cards hang beside the chain: their parent is the message that triggered the job.

The card of a job whose caller lives in another session is in that session and names the job's own
as `session_id` (D6). It follows the commits of the job's session: running after the job was
admitted, its end after the terminal commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from ..clock import to_text
from ..jobs import TERMINAL, Job, JobStatus
from .history import ATTACH, Node

FUNCTION = ATTACH
RUNNING = "(running)"


def placeholder(job: Job, attach_id: str, now: datetime) -> Node:
    return _card(job, attach_id, RUNNING, "running", None, now)


def finished(job: Job, source_commit_id: str | None, now: datetime) -> Node:
    """The card of an ended job; `job` has its whole texts."""
    assert job.attach_id is not None
    return _card(job, job.attach_id, ending_text(job), job.status.value, source_commit_id, now)


def status_of(card: Node) -> str:
    """How the job of a card stands: "running", or its end; "" for a node that is no card of ours."""
    attach = card.extra.get("attach")
    status = attach.get("status") if card.function == FUNCTION and isinstance(attach, Mapping) else None
    return status if isinstance(status, str) else ""


def is_final(card: Node) -> bool:
    return status_of(card) in TERMINAL


def ending_text(job: Job, cancelled: str | None = None) -> str:
    """What stands for the job's end in a conversation: result, error line, or partial text and marker.

    `cancelled` is the marker of a cancelled job; without one it has the time of the end.
    """
    match job.status:
        case JobStatus.COMPLETED:
            return job.result_text or ""
        case JobStatus.ERRORED:
            return f"[task error] {job.error or ''}".rstrip()
        case JobStatus.CANCELLED:
            at = f" at {to_text(job.completed_at)}" if job.completed_at else ""
            marker = cancelled or f"[cancelled{at}]"
            return f"{job.result_text}\n{marker}" if job.result_text else marker
        case _:
            return RUNNING


def _card(job: Job, attach_id: str, content: str, status: str, source_commit_id: str | None, now: datetime) -> Node:
    return Node(
        id=attach_id,
        parent=job.caller_msg_id if job.elsewhere else job.parent_msg_id,
        role="system",
        function=FUNCTION,
        content=content,
        created_at=now,
        extra={
            "attach": {
                "job_id": job.job_id,
                "session_id": job.parent_session_id,
                "status": status,
                "head_id": job.head_id if status != "running" else None,
                "source_commit_id": source_commit_id,
            },
            "label": job.subject,
        },
    )
