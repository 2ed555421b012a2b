"""Long texts do not live in rows: a row keeps a beginning, a message node keeps the whole."""

from __future__ import annotations

#: of `description`, `result_text` and `error`, a row keeps at most this many bytes of UTF-8
ROW_TEXT_LIMIT_BYTES = 512


def fits(text: str | None) -> bool:
    return (
        text is None or len(text) <= ROW_TEXT_LIMIT_BYTES // 4 or len(storable(text).encode()) <= ROW_TEXT_LIMIT_BYTES
    )


def beginning(text: str) -> str:
    """The longest beginning of `text` that a row can hold, cut between characters."""
    raw = storable(text).encode()
    return raw[:ROW_TEXT_LIMIT_BYTES].decode("utf-8", "ignore")


def storable(text: str) -> str:
    """`text` with lone surrogates (which UTF-8 cannot hold) replaced by U+FFFD; nothing else changes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
