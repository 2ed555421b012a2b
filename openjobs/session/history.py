"""The messages of a session: nodes in append-only segments, newest version of an id wins.

`history/NN/NNNN.jsonl`; the segment with the highest number is the open one. Source: spec 003, D6 to D8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import attrs

from ..clock import from_text, to_text
from ..errors import Damaged
from . import blocks, strict_json
from .text import storable

HISTORY = "history"
#: a segment is closed when it has this many nodes or bytes, or a multiple of them (`blocks.scale`)
SEGMENT_NODES = 256
SEGMENT_BYTES = 64 * 1024

#: the `function` of an attach card
ATTACH = "attach"
_CARD = b'"function":"attach"'
#: the `function` of a message that tells of ended jobs and commands
NOTICE = "notice"
_NOTICE = b'"function":"notice"'

_NAME = re.compile(r"(\d{4,})\.jsonl\Z")


@attrs.frozen(kw_only=True, slots=True)
class Node:
    """One message. `parent` is the message before it on its branch, None for a root.

    `role` is the chat role ("user", "assistant", "system", "tool"); `function` marks nodes that are
    more than text ("attach" is a card, "notice" tells of what has ended). `extra` is kept as it is given (JSON).
    """

    id: str
    parent: str | None = None
    role: str
    content: str = ""
    function: str | None = None
    created_at: datetime
    extra: Mapping[str, Any] = attrs.field(factory=dict)


def encode(node: Node) -> bytes:
    """One line, with its newline."""
    fields: dict[str, Any] = {"id": node.id, "parent": node.parent, "role": node.role}
    if node.function is not None:
        fields["function"] = node.function
    fields["created_at"] = to_text(node.created_at)
    fields["content"] = node.content
    if node.extra:
        fields["extra"] = node.extra
    try:
        return strict_json.dumps(fields) + b"\n"
    except TypeError:
        return strict_json.dumps(_storable(fields)) + b"\n"


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable(str(k)): _storable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(v) for v in value]
    return value


def decode(line: bytes, path: str, offset: int) -> Node:
    fields = strict_json.loads_object(line, path, offset)
    try:
        return Node(
            id=_text(fields["id"]),
            parent=None if fields.get("parent") is None else _text(fields["parent"]),
            role=_text(fields["role"]),
            content=_text(fields.get("content", "")),
            function=None if fields.get("function") is None else _text(fields["function"]),
            created_at=from_text(fields["created_at"]),
            extra=_mapping(fields.get("extra") or {}),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise Damaged(
            f"{path}: the message at byte {offset} cannot be read: {error!r}", path=path, offset=offset
        ) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value


#: ASCII only: what else stands there is looked at by who can refuse it
_ID = re.compile(rb'\{"id":"([^"\\\x80-\xff]+)",')


class Segment:
    """An immutable segment: its bytes, and where in them the newest version of each id stands."""

    __slots__ = ("data", "path", "places")

    def __init__(self, path: str, data: bytes, places: Mapping[str, tuple[int, int]]) -> None:
        self.path = path
        self.data = data
        #: id -> offset and length of its newest line, without the newline
        self.places = places

    @classmethod
    def parse(cls, path: str, data: bytes | None) -> Segment:
        """Raises `Damaged` with the offset of the first line that is not a node."""
        places: dict[str, tuple[int, int]] = {}
        offset = 0
        if data and not data.endswith(b"\n"):
            at = data.rfind(b"\n") + 1
            raise Damaged(f"{path}: the last message is cut off at byte {at}", path=path, offset=at)
        for line in (data or b"").splitlines(keepends=True):
            body = line[:-1]
            match = _ID.match(body)
            node_id = match[1].decode() if match else decode(body, path, offset).id
            places[node_id] = (offset, len(body))
            offset += len(line)
        return cls(path, data or b"", places)

    def __contains__(self, node_id: str) -> bool:
        return node_id in self.places

    def get(self, node_id: str) -> Node | None:
        place = self.places.get(node_id)
        if place is None:
            return None
        offset, length = place
        return decode(self.data[offset : offset + length], self.path, offset)

    def nodes(self) -> Iterator[Node]:
        """The newest version of each, in order of first appearance."""
        for node_id in self.places:
            node = self.get(node_id)
            assert node is not None
            yield node

    def cards(self) -> Iterator[Node]:
        """The newest version here of each attach card."""
        for node_id, (offset, length) in self.places.items():
            if _CARD in self.data[offset : offset + length]:
                node = self.get(node_id)
                if node is not None and node.function == ATTACH:
                    yield node

    def card_parents(self) -> list[str]:
        """The messages on which cards of this segment hang, each once."""
        return list(dict.fromkeys(card.parent for card in self.cards() if card.parent is not None))

    def notices(self) -> Iterator[Node]:
        """The newest version here of each message that tells of ended jobs and commands."""
        if _NOTICE not in self.data:
            return
        for node_id, (offset, length) in self.places.items():
            if _NOTICE in self.data[offset : offset + length]:
                node = self.get(node_id)
                if node is not None and node.function == NOTICE:
                    yield node

    def append(self, nodes: list[Node]) -> Segment:
        places, chunks, offset = dict(self.places), [self.data], len(self.data)
        for node in nodes:
            line = encode(node)
            places[node.id] = (offset, len(line) - 1)
            chunks.append(line)
            offset += len(line)
        return Segment(self.path, b"".join(chunks), places)

    def is_full(self, number: int) -> bool:
        """Whether segment `number`, which this is, is large enough to be closed."""
        scale = blocks.scale(number)
        return len(self.data) >= scale * SEGMENT_BYTES or len(self.places) >= scale * SEGMENT_NODES


def events_of(notice: Node) -> list[str]:
    """The ids of the ends that a notice covers."""
    found = notice.extra.get("event_ids")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def segment_path(number: int) -> str:
    return blocks.path_of(HISTORY, number, ".jsonl")


def number_of(name: str) -> int | None:
    match = _NAME.match(name)
    return int(match[1]) if match else None
