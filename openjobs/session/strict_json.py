"""JSON as it is kept in a session: one canonical form, and no key twice.

orjson takes the last of two equal keys without a word. What we wrote ourselves encodes back to the
same bytes, so that is the quick check; anything else goes through the parser that can refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from ..errors import Damaged

#: orjson writes 254 levels; so many are left for what a value is put into
_LAYERS = 16


def dumps(value: Any) -> bytes:
    return orjson.dumps(value)


def dumps_foreign(value: Mapping[str, Any]) -> bytes:
    """What somebody else made, as it can be kept: with room for the documents and answers that it becomes part of.

    Raises `TypeError` with what cannot be written, and whatever a mapping of somebody's own raises when it is read.
    """
    wrapped: Any = dict(value)
    for _ in range(_LAYERS):
        wrapped = [wrapped]
    return orjson.dumps(wrapped)[_LAYERS:-_LAYERS]


def loads(raw: bytes, path: str, offset: int = 0) -> Any:
    """The value. Raises `Damaged` with `path` and the byte offset where it is not JSON or has a key twice."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        at = offset + len(error.doc[: error.pos].encode("utf-8", "replace"))
        raise Damaged(
            f"{path}: not JSON at byte {at} ({error.msg}); it was left as it was", path=path, offset=at
        ) from None
    if orjson.dumps(value) != raw:
        _refuse_duplicates(raw, path, offset)
    return value


def loads_object(raw: bytes, path: str, offset: int = 0) -> dict[str, Any]:
    value = loads(raw, path, offset)
    if not isinstance(value, dict):
        raise Damaged(f"{path}: expected a JSON object at byte {offset}", path=path, offset=offset)
    return value


def _refuse_duplicates(raw: bytes, path: str, offset: int) -> None:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise Damaged(f"{path}: the key {key!r} stands twice; it was left as it was", path=path, offset=offset)
            found[key] = value
        return found

    try:
        json.loads(raw, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: not JSON ({error}); it was left as it was", path=path, offset=offset) from None
