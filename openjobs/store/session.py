"""A session as its users see it: append messages, read a branch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..session import Documents, Meta, Node
from ..session.branch import cards_beside, chain
from ..session.context import ContextItem, chat_messages, context_of

if TYPE_CHECKING:
    from ..facts.log import FactLog
    from .base import JobStore


class Session:
    """One conversation: a tree of messages, a head, and the jobs that run on it.

    Reading takes the newest commit each time; writing goes through the same transaction as jobs do
    and is durable when it returns.
    """

    def __init__(self, store: JobStore, session_id: str) -> None:
        self._store = store
        self.session_id = session_id

    def __repr__(self) -> str:
        return f"Session({self.session_id!r})"

    @property
    def meta(self) -> Meta:
        return self._documents().meta()

    @property
    def title(self) -> str:
        return self.meta.title

    @property
    def head_id(self) -> str | None:
        """The message where the conversation stands; None while there is none."""
        return self.meta.head_id

    @property
    def facts(self) -> FactLog:
        """When its jobs and background commands were registered and settled; read it with `openjobs.facts`."""
        return self._store.facts(self.session_id)

    def append(
        self,
        role: str,
        content: str,
        *,
        parent: str | None = None,
        root: bool = False,
        node_id: str | None = None,
        function: str | None = None,
        extra: Mapping[str, Any] | None = None,
        advance_head: bool | None = None,
    ) -> Node:
        """A new message after `parent` (default: the head; `root=True`: after none).

        The head follows when the message was appended to it (or as `advance_head` says).
        Raises `UnknownNode`, `InvalidInput`, `SessionBusy`, `StoreWriteFailed`, `OutcomeUnknown`.
        A message with the same `node_id` again replaces the earlier one for readers.
        """
        return self._store.append_message(
            self.session_id,
            role=role,
            content=content,
            parent=parent,
            root=root,
            node_id=node_id,
            function=function,
            extra=extra,
            advance_head=advance_head,
        )

    def checkout(self, node_id: str | None) -> None:
        """Move the head to a message of the session."""
        self._store.move_head(self.session_id, node_id)

    def node(self, node_id: str) -> Node:
        """Raises `UnknownNode`."""
        return self._documents().node(node_id)

    def branch(self, head_id: str | None = None) -> list[Node]:
        """The messages from the root to `head_id` (default: the head), oldest first, without cards."""
        documents = self._documents()
        head = head_id if head_id is not None else documents.meta().head_id
        return [] if head is None else list(reversed(list(chain(documents, head))))

    def branch_with_cards(self, head_id: str | None = None) -> list[Node]:
        """As `branch`, with the attach cards that hang on its messages, each after its message."""
        documents = self._documents()
        nodes = self.branch(head_id)
        cards = cards_beside(documents, {node.id for node in nodes})
        return [each for node in nodes for each in (node, *cards.get(node.id, ()))]

    def context(
        self, head_id: str | None = None, budget: int | None = None, *, expand_branches: bool = False
    ) -> list[ContextItem]:
        """The ordered items that a turn at `head_id` (default: the head) sees: messages, and the jobs on them that have
        ended, also those that run in other sessions; see `session.context`."""
        documents = self._documents()
        head = head_id if head_id is not None else documents.meta().head_id
        if head is None:
            return []
        return context_of(
            documents,
            head,
            budget=budget,
            expand_branches=expand_branches,
            open_session=self._store.documents,
        )

    def messages(self, head_id: str | None = None, budget: int | None = None) -> list[dict[str, str]]:
        """The same as plain chat messages, `{"role", "content"}`, for a provider."""
        return chat_messages(self.context(head_id, budget))

    def nodes(self) -> Iterator[Node]:
        """Every message, cards too, in order of first appearance; reads the whole history."""
        documents = self._documents()
        newest: dict[str, Node] = {}
        for segment in documents.segments():
            for node in segment.nodes():
                newest[node.id] = node
        return iter(newest.values())

    def _documents(self) -> Documents:
        return self._store.documents(self.session_id)
