"""A session's conversation for the server: one branch with its cards, and where other branches begin.

The tree of a session is kept as it was at a commit; of the segments that did not change since then
nothing is read again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import orjson

from ..clock import to_text
from ..errors import UnknownNode
from ..session import Documents, Meta, Node
from ..session.history import ATTACH, Segment
from ..store import JobStore
from .markdown import to_html
from .rows import clean

BRANCHES_LIMIT = 200
#: names, in the place of a message, what stands before all of them: the cards that hang on none
ROOT = "root"
#: how far up a branch is followed to find where it leaves the one that is shown
_FORK_STEPS = 2_000
_SESSIONS = 4
_METAS = 10_000
_META_S = 5.0


@attrs.frozen(slots=True)
class _Light:
    """A message without its text."""

    id: str
    parent: str | None
    is_card: bool
    created_at: str
    job_id: str | None


class _Tree:
    def __init__(self) -> None:
        self.commit_id: str | None = None
        #: path of a segment -> the length at which it was read, and what was in it
        self.segments: dict[str, tuple[int, list[_Light]]] = {}
        self.nodes: dict[str, _Light] = {}
        self.children: dict[str | None, list[str]] = {}
        self.cards: dict[str | None, list[str]] = {}

    def read(self, documents: Documents) -> None:
        if self.commit_id is not None and self.commit_id == documents.commit_id:
            return
        found: dict[str, tuple[int, list[_Light]]] = {}
        for segment in documents.segments():
            known = self.segments.get(segment.path)
            same = known is not None and known[0] == len(segment.data)
            found[segment.path] = known if known is not None and same else (len(segment.data), list(_lights(segment)))
        self.segments = found
        self.nodes = {light.id: light for _, lights in found.values() for light in lights}
        self.children, self.cards = {}, {}
        for light in self.nodes.values():
            (self.cards if light.is_card else self.children).setdefault(light.parent, []).append(light.id)
        self.commit_id = documents.commit_id

    def up(self, node_id: str | None) -> Iterator[_Light]:
        """From a message to its root; ends at a ring or a missing parent."""
        seen: set[str] = set()
        while node_id is not None and node_id not in seen and (light := self.nodes.get(node_id)) is not None:
            seen.add(node_id)
            yield light
            node_id = light.parent


def _lights(segment: Segment) -> Iterator[_Light]:
    """The messages of a segment without their texts: a fourth of the time of decoding each as a `Node`.

    A line that cannot be read is passed over here; showing that message says where the damage is.
    """
    for offset, length in segment.places.values():
        try:
            fields = orjson.loads(segment.data[offset : offset + length])
            job_id = (fields.get("extra") or {}).get("job_id")
            yield _Light(
                fields["id"],
                fields.get("parent"),
                fields.get("function") == ATTACH,
                fields["created_at"],
                job_id if isinstance(job_id, str) else None,
            )
        except (ValueError, KeyError, AttributeError):
            continue


class Subjects(Protocol):
    def get(self, job_id: str) -> str | None: ...


class Metas:
    """What is true of each session as a whole, read again after a while: a home may have thousands.

    What the lock protects: what is remembered. It is not held while a session is read.
    """

    def __init__(self, store: JobStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, str, Meta]] = {}

    def get(self, session_id: str, changed_at: str = "") -> Meta:
        """`changed_at` is when something was seen to change in it last. Raises `UnknownSession`, `Damaged`, ..."""
        now = self._monotonic()
        with self._lock:
            known = self._known.get(session_id)
        if known is not None and known[0] > now and known[1] == changed_at:
            return known[2]
        found = self._store.session(session_id).meta
        with self._lock:
            if len(self._known) >= _METAS:
                self._known.clear()
            # Not all at the same time, so that no list has to read every session again.
            self._known[session_id] = (now + _META_S * (1 + len(self._known) % 10 / 10), changed_at, found)
        return found


class Conversations:
    """What the lock protects: the trees. It is held while one is brought up to date."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._trees: OrderedDict[str, _Tree] = OrderedDict()

    def show(
        self,
        session_id: str,
        head: str | None,
        before: str | None,
        limit: int,
        subjects: Subjects,
    ) -> dict[str, Any]:
        """See docs/server.md, "A conversation". `subjects` names jobs. Raises `UnknownSession`, `UnknownNode`."""
        self._store.session(session_id)  # raises, and says which ids are close
        documents = self._store.documents(session_id)
        meta = documents.meta()
        with self._lock:
            tree = self._trees.setdefault(session_id, _Tree())
            self._trees.move_to_end(session_id)
            while len(self._trees) > _SESSIONS:
                self._trees.popitem(last=False)
            tree.read(documents)
            head_id = head if head is not None else meta.head_id
            if head_id == ROOT and ROOT not in tree.nodes:
                head_id = None
            if head_id is not None and head_id not in tree.nodes:
                raise UnknownNode(f"there is no message {head_id[:80]} in session {session_id}")
            branch = list(tree.up(head_id))
            if head_id is not None:
                ids, more_before = _page(branch, before, limit)
                shown = [each for node_id in ids for each in (node_id, *tree.cards.get(node_id, ()))]
            else:
                first = [tree.nodes[card_id] for card_id in tree.cards.get(None, ())]
                shown, more_before = _page(first[::-1], before, limit)
            children = {node_id: list(tree.children.get(node_id, ())) for node_id in shown}
            branches = list(_branches(tree, {light.id for light in branch}, head_id, subjects))
        return {
            "session_id": session_id,
            "title": clean(meta.title),
            "session_head_id": meta.head_id,
            "head_id": head_id,
            "messages": [message(documents.node(node_id), children[node_id]) for node_id in shown],
            "more_before": more_before,
            "branches": branches[:BRANCHES_LIMIT],
            "complete": len(branches) <= BRANCHES_LIMIT,
        }


def _page(branch: list[_Light], before: str | None, limit: int) -> tuple[list[str], str | None]:
    """Ids of one page of a branch, oldest first; `branch` has the newest first."""
    ids = [light.id for light in branch]
    if before is not None:
        if before not in ids:
            raise UnknownNode(f"message {before[:80]} is not on this branch")
        ids = ids[ids.index(before) + 1 :]
    page = ids[:limit]
    more = page[-1] if len(ids) > limit else None
    return page[::-1], more


def _branches(tree: _Tree, shown: set[str], head_id: str | None, subjects: Subjects) -> Iterator[dict[str, Any]]:
    leaves = [light for light in tree.nodes.values() if not light.is_card and light.id not in tree.children]
    leaves.sort(key=lambda light: light.created_at, reverse=True)
    for leaf in leaves[: BRANCHES_LIMIT + 1]:
        fork_id, job_id = None, leaf.job_id
        for step, light in enumerate(tree.up(leaf.id)):
            job_id = job_id or (light.job_id if step == 1 else None)
            if light.id in shown:
                fork_id = light.id
                break
            if step >= _FORK_STEPS:
                break
        yield {
            "head_id": leaf.id,
            "fork_id": fork_id,
            "label": subjects.get(job_id) if job_id is not None else None,
            "created_at": leaf.created_at,
            "job_id": job_id,
            "current": leaf.id == head_id,
        }


def message(node: Node, children: list[str]) -> dict[str, Any]:
    """One message with its text, as it is and rendered."""
    attach = node.extra.get("attach") if node.function == ATTACH else None
    job_id = node.extra.get("job_id")
    return {
        "id": node.id,
        "parent": node.parent,
        "role": clean(node.role),
        "function": clean(node.function),
        "created_at": to_text(node.created_at),
        "content": clean(node.content),
        "content_html": to_html(node.content),
        "job_id": job_id if isinstance(job_id, str) else None,
        "children": children,
        "attach": _attach(attach, node.extra.get("label")) if isinstance(attach, Mapping) else None,
    }


def _attach(attach: Mapping[str, Any], label: Any) -> dict[str, Any]:
    names = ("job_id", "session_id", "status", "head_id", "source_commit_id")
    texts = {name: value if isinstance(value := attach.get(name), str) else None for name in names}
    return {**clean(texts), "label": clean(label) if isinstance(label, str) else None}
