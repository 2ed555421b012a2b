"""Text of jobs on its way to a person: everything that came from a prompt, a result, an id or a path
goes through `visible` (or `one_line`, or `to_json`) before it can reach a terminal.

A terminal obeys control characters: they retitle it, paste into it, or overwrite what stands above
(R10). Here they become what they are, readable: ESC is shown as `\\x1b`. Characters that reorder or
hide text (bidirectional controls, zero-width spaces, tags) are shown too, since a line that looks
harmless and is not does the same damage in a reader's head. The joiners U+200C and U+200D stay:
Persian and emoji need them.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_SPACES = re.compile(r"[ \t\n]+")


def visible(text: str) -> str:
    """`text` with every control character shown; newlines and tabs stay what they are.

    The line end of other systems (CR LF) counts as a newline; a lone CR would move the cursor back.
    """
    return _UNSAFE.sub(_shown, text.replace("\r\n", "\n"))


def one_line(text: str, limit: int | None = None) -> str:
    """`text` as one line of at most `limit` characters, control characters shown."""
    line = _SPACES.sub(" ", visible(text)).strip()
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def short_id(job_id: str) -> str:
    """As many characters as people are shown of an id, which in a damaged store may be anything."""
    from ..ids import SHORT  # late: it brings `uuid`, which `--help` has no use for

    return one_line(job_id[:SHORT])


def to_json(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON in which nothing is left that a terminal would obey.

    Such a character can only stand inside a JSON string, where its escape means the same.
    """
    return _UNSAFE.sub(_escaped, json.dumps(value, ensure_ascii=False, indent=indent))


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x0D:
        return "\\r"
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def duration(seconds: float) -> str:
    """A span as people say it: `0.4s`, `12s`, `3m05s`, `2h10m`, `4d3h`."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = int(seconds + 0.5)
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days}d{hours_left}h"
    if hours:
        return f"{hours}h{minutes_left:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def age(then: datetime, now: datetime) -> str:
    """How long ago, in one unit: `now`, `5s`, `12m`, `3h`, `9d`."""
    seconds = int((now - then).total_seconds())
    if seconds < 1:
        return "now"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def size(n_bytes: int) -> str:
    """`512 B`, `1.4 KB`, `23 MB`: steps of 1024, as `ls -h` has them."""
    value = float(n_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
