"""Notices: the message by which a conversation learns that background work has ended. Source: spec 000, 001.

One message may tell of many ends, and `extra.event_ids` names each. An end is told once: whoever adds a
message looks in the same transaction whether one tells of that end already.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from datetime import datetime

import attrs

from ..errors import Damaged
from ..jobs import Job, JobStatus
from .branch import chain
from .documents import Documents
from .history import NOTICE, Node, events_of
from .text import beginning

#: a notice's text, in characters, whatever has ended
TEXT_LIMIT_CHARS = 4000
_LABEL_CHARS = 100
#: of a result or an error: for one end alone, and for one of several
_EXCERPT_ALONE_CHARS = 500
_EXCERPT_CHARS = 160
#: how many messages are looked at to find out which notices were answered
_LOOK_BACK = 512

_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]+")


@attrs.frozen(kw_only=True, slots=True)
class Notice:
    """One end that a conversation is to be told of."""

    #: identity of the end; what `ack` takes
    event_id: str
    #: the session whose conversation is to be told
    session_id: str
    #: "job", or "task" for a background command
    kind: str
    #: the job's or task's whole id
    id: str
    #: how it ended, as text
    status: str
    #: one line
    label: str
    #: the beginning of its result, or of its error: as much as a row keeps of a text
    excerpt: str
    ended_at: datetime
    #: the session it ran in
    target_session_id: str
    #: the job whose turn started it
    parent_job_id: str | None = None


def of_job(job: Job) -> Notice:
    """Of an ended job; the beginnings of its texts, as a row has them, are enough."""
    assert job.event_id is not None
    assert job.completed_at is not None
    text = job.error if job.status is JobStatus.ERRORED else job.result_text or job.error
    return Notice(
        event_id=job.event_id,
        session_id=job.conversation_id,
        kind="job",
        id=job.job_id,
        status=job.status.value,
        label=job.subject,
        excerpt=beginning(text or ""),
        ended_at=job.completed_at,
        target_session_id=job.parent_session_id,
        parent_job_id=job.parent_job_id,
    )


def text_of(notices: Sequence[Notice], limit_chars: int = TEXT_LIMIT_CHARS) -> str:
    """What the model reads: at most `limit_chars` characters, one line an end, each id whole or not at all.

    What does not fit is counted, and found with `list_jobs`.
    """
    alone = len(notices) == 1
    head = "Background work has ended:" if alone else f"{len(notices)} pieces of background work have ended:"
    lines = [_line(notice, _EXCERPT_ALONE_CHARS if alone else _EXCERPT_CHARS) for notice in notices]
    tail = "Use job_output with an id for the whole result."
    whole = "\n".join([head, *lines, tail])
    if len(whole) <= limit_chars:
        return whole
    shown: list[str] = []
    bare = [_line(notice, 0) for notice in notices]
    for line in lines if not alone else bare:
        rest = _rest(len(notices) - len(shown) - 1)
        if len("\n".join([head, *shown, line, *rest, tail])) > limit_chars:
            break
        shown.append(line)
    text = "\n".join([head, *shown, *_rest(len(notices) - len(shown)), *([tail] if shown else [])])
    return text if len(text) <= limit_chars else _rest(len(notices))[0][:limit_chars]


def _rest(count: int) -> list[str]:
    if not count:
        return []
    return [f"- {count} {'' if count == 1 else 'more '}that cannot be shown here; list_jobs shows all of them"]


def _line(notice: Notice, excerpt_chars: int) -> str:
    what = "job" if notice.kind == "job" else "command"
    line = f'- {what} {notice.id} {notice.status}: "{one_line(notice.label, _LABEL_CHARS)}"'
    excerpt = one_line(notice.excerpt, excerpt_chars) if excerpt_chars else ""
    return f"{line}: {excerpt}" if excerpt else line


def one_line(text: str, limit_chars: int) -> str:
    """`text` on one line, without what could move a cursor or turn the direction of writing, cut with an ellipsis."""
    line = _BLANK.sub(" ", text[: 4 * limit_chars + 64]).strip()
    return line if len(line) <= limit_chars else line[: limit_chars - 1].rstrip() + "…"


def node_of(notices: Sequence[Notice], node_id: str, parent: str | None, now: datetime) -> Node:
    """The message that tells of these ends."""
    return Node(
        id=node_id,
        parent=parent,
        role="user",
        function=NOTICE,
        content=text_of(notices),
        created_at=now,
        extra={
            "event_ids": [notice.event_id for notice in notices],
            "ids": [notice.id for notice in notices],
        },
    )


def answered(documents: Documents, head_id: str | None) -> set[str]:
    """The ends told on the branch of `head_id` with an assistant message after the notice: the model has seen those.

    Looks at the newest messages only, so that a long conversation costs no more than a short one, and no further than
    can be read: what is told there counts as not seen yet.
    """
    seen: set[str] = set()
    after_answer = False
    with contextlib.suppress(Damaged):
        for node in _newest(documents, head_id):
            if node.function == NOTICE and after_answer:
                seen.update(events_of(node))
            after_answer = after_answer or node.role == "assistant"
    return seen


def _newest(documents: Documents, head_id: str | None) -> Iterator[Node]:
    if head_id is not None:
        for _, node in zip(range(_LOOK_BACK), chain(documents, head_id), strict=False):
            yield node


__all__ = ["TEXT_LIMIT_CHARS", "Notice", "answered", "node_of", "of_job", "one_line", "text_of"]
