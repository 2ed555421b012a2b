"""Branches: chains of messages, and the cards that hang beside them. Source: spec 003, D6 to D8."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Damaged
from . import cards
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
    """The newest version of each attach card whose parent is one of these messages, in order of creation."""
    newest: dict[str, Node] = {}
    for segment in documents.segments():
        for node in segment.nodes():
            if node.function == cards.FUNCTION and node.parent in node_ids:
                newest[node.id] = node
    found: dict[str, list[Node]] = {}
    for node in newest.values():
        assert node.parent is not None
        found.setdefault(node.parent, []).append(node)
    return found
