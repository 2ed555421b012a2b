"""Where a reader of a ledger stands."""

from __future__ import annotations

import re

import attrs

from ..errors import InvalidInput

_TEXT = re.compile(r"(\d{1,18})\.(\d{1,18})\.(\d{1,18})\.([0-9a-f]{8})\Z")


@attrs.frozen(kw_only=True)
class Cursor:
    """Just behind one record of a ledger.

    It names that record (`seq`, `crc`) and where it stood. The place is only a hint that is checked:
    after a compaction the record is found again by its number, and if another record now has that
    number (the one that was read had never become durable), that other one is still to be read.
    """

    #: the record's number; 0 stands before the first
    seq: int = 0
    #: where the record began, in bytes
    start_bytes: int = 0
    #: where the next one begins, in bytes
    offset_bytes: int = 0
    #: the record's checksum
    crc: int = 0

    def to_text(self) -> str:
        return f"{self.seq}.{self.start_bytes}.{self.offset_bytes}.{self.crc:08x}"

    @classmethod
    def from_text(cls, text: str) -> Cursor:
        """Raises `InvalidInput`."""
        match = _TEXT.match(text)
        if match is None:
            raise InvalidInput(f"{text!r} is not a cursor of a ledger")
        seq, start, offset = (int(match[i]) for i in (1, 2, 3))
        return cls(seq=seq, start_bytes=start, offset_bytes=offset, crc=int(match[4], 16))


START = Cursor()
