"""A session under another name: what a copy must say of itself. Pure over a view."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from ..jobs import Job
from ..repo import Change
from ..session import Documents, Node, Page

#: cards are appended in groups, so that a segment closes where it is full
_CARDS = 64


def renamed(documents: Documents, new_id: str) -> Change | None:
    """The one commit that makes the session's documents those of `new_id`, or None where they are.

    `meta.json`, each row and each card of a job of this session name it from then on; older commits go on
    telling the old name. Raises `Damaged` for a row that cannot be read.
    """
    meta = documents.meta()
    old_id = meta.session_id
    if old_id == new_id:
        return None
    documents.put_meta(attrs.evolve(meta, session_id=new_id))
    files: dict[str, bytes | None] = {}
    for page in _pages(documents):
        for job in page.jobs():
            page = page.put(_renamed_job(job, old_id, new_id))
        files[page.path] = page.data
    cards = [_renamed_card(card, new_id) for card in _cards(documents, old_id)]
    for at in range(0, len(cards), _CARDS):
        documents.append(cards[at : at + _CARDS])
    return Change(
        files={**documents.changes, **files},
        subject=f"session {old_id} is {new_id} from here on",
        trailers=[("Openjobs-Kind", "import")],
    )


def all_jobs(documents: Documents) -> Iterator[Job]:
    """Every row, in order of creation. Raises `Damaged`."""
    for page in _pages(documents):
        yield from page.jobs()


def _pages(documents: Documents) -> Iterator[Page]:
    for number in range(documents.older_pages()):
        yield documents.older_page(number)
    yield documents.newest_page()


def _renamed_job(job: Job, old_id: str, new_id: str) -> Job:
    caller = new_id if job.caller_session_id == old_id else job.caller_session_id
    return attrs.evolve(job, parent_session_id=new_id, caller_session_id=caller)


def _cards(documents: Documents, old_id: str) -> list[Node]:
    """The newest version of each card of a job of this session."""
    newest = {card.id: card for segment in documents.segments() for card in segment.cards()}
    return [card for card in newest.values() if _attached(card).get("session_id") == old_id]


def _renamed_card(card: Node, new_id: str) -> Node:
    return attrs.evolve(card, extra={**card.extra, "attach": {**_attached(card), "session_id": new_id}})


def _attached(card: Node) -> dict[str, object]:
    found = card.extra.get("attach")
    return found if isinstance(found, dict) else {}
