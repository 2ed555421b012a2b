"""Branches: chains of messages, and the cards that hang beside them. Source: spec 003, D6 to D8."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Damaged
from .documents import Documents
from .history import Node


def chain(documents: Documents, head_id: str) -> Iterator[Node]:
    """From `head_id` up to the root. Raises `UnknownNode`, and `Damaged` where the parents form a ring."""
    seen: set[str] = set()
    at: str | None = head_id
    while at is not None:
        if at in seen:
            raise Damaged(f"the messages above {head_id} form a ring at {at}", path="history")
        seen.add(at)
        node = documents.node(at)
        yield node
        at = node.parent


def cards_beside(documents: Documents, node_ids: set[str]) -> dict[str, list[Node]]:
    """The attach cards whose parent is one of these messages, by parent, in order of creation."""
    found: dict[str, list[Node]] = {}
    for card in documents.cards_on(node_ids):
        assert card.parent is not None
        found.setdefault(card.parent, []).append(card)
    return found
