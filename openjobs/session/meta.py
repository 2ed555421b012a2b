"""`meta.json`: what is true of the session as a whole. Nothing in it grows with the number of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs

from ..clock import from_text, to_text
from ..errors import Damaged, NewerFormat
from . import strict_json

PATH = "meta.json"
#: the format of everything in a session; a store of a higher one is refused
FORMAT = 1


@attrs.frozen(kw_only=True, slots=True)
class Meta:
    session_id: str
    title: str = ""
    created_at: datetime
    #: the message where the conversation stands, or None while there is none
    head_id: str | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict)


def encode(meta: Meta) -> bytes:
    return (
        strict_json.dumps(
            {
                "format": FORMAT,
                "session_id": meta.session_id,
                "title": meta.title,
                "created_at": to_text(meta.created_at),
                "head_id": meta.head_id,
                **meta.extra,
            }
        )
        + b"\n"
    )


def decode(data: bytes | None) -> Meta:
    if data is None:
        raise Damaged(f"{PATH} is missing: this is not a session of openjobs, or it is damaged", path=PATH)
    fields = strict_json.loads_object(data.removesuffix(b"\n"), PATH)
    version = fields.pop("format", None)
    if not isinstance(version, int):
        raise Damaged(f"{PATH}: the format number is missing", path=PATH)
    if version > FORMAT:
        raise NewerFormat(
            f"{PATH}: the session has format {version}; this version of openjobs reads up to {FORMAT}", path=PATH
        )
    try:
        return Meta(
            session_id=fields.pop("session_id"),
            title=fields.pop("title", ""),
            created_at=from_text(fields.pop("created_at")),
            head_id=fields.pop("head_id", None),
            extra=fields,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise Damaged(f"{PATH} cannot be read: {error!r}", path=PATH) from None
