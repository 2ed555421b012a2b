"""One record as one line, and a file of such lines read in bounded memory.

    {"v":1,"seq":9,"prev":8,"crc":"9ae0daaf","data":{...}}

`seq` grows; `prev` is the number of the record before, so that a missing line is noticed although
compaction may leave gaps between numbers. `crc` is the CRC-32 of `seq` and the bytes of `data` as
they stand; everything else on the line has one spelling only, so any flipped bit is seen. `data`
is null where compaction dropped the last record: its number must not be given out again.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson

from ..errors import Damaged, InvalidInput, NewerFormat
from .cursor import START, Cursor

VERSION = 1
#: the longest line, without its newline
MAX_LINE_BYTES = 2**20
_CHUNK_BYTES = 2**16
#: how much is looked at behind the first bad byte before it is called damage
_TAIL_BYTES = 2 * MAX_LINE_BYTES

_NUMBER = rb"(0|[1-9][0-9]{0,17})"
_LINE = re.compile(
    rb'\{"v":1,"seq":' + _NUMBER + rb',"prev":' + _NUMBER + rb',"crc":"([0-9a-f]{8})","data":(.+)\}', re.DOTALL
)
_ANY_VERSION = re.compile(rb'\{"v":([1-9][0-9]{0,8}),"')


@attrs.frozen
class Line:
    #: just behind the line
    cursor: Cursor
    #: the payload's bytes
    raw: bytes


def checksum(seq: int, raw: bytes) -> int:
    return zlib.crc32(raw, zlib.crc32(b"%d," % seq))


def encode(seq: int, prev: int, raw: bytes) -> bytes:
    """The line with its newline. Raises `InvalidInput` when it is too long."""
    line = b'{"v":1,"seq":%d,"prev":%d,"crc":"%08x","data":%b}\n' % (seq, prev, checksum(seq, raw), raw)
    if len(line) > MAX_LINE_BYTES:
        raise InvalidInput(f"a record of {len(line)} bytes is too long for a ledger; {MAX_LINE_BYTES} are the most")
    return line


def encode_payload(payload: Mapping[str, Any]) -> bytes:
    """Raises `InvalidInput` for what JSON cannot hold."""
    try:
        return json.dumps(dict(payload), separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"a ledger cannot hold this: {error}") from error


def decode_payload(raw: bytes, path: Path, offset: int) -> dict[str, Any] | None:
    """Raises `Damaged` where the payload is not one JSON object without a key twice."""
    try:
        value = _quickly(raw)
        if value is None:
            value = json.loads(raw, object_pairs_hook=_no_key_twice)
    except (ValueError, RecursionError) as error:
        raise damaged(path, offset, f"the record is not JSON ({error})") from error
    if value is not None and not isinstance(value, dict):
        raise damaged(path, offset, "the record is not an object")
    return value


def _quickly(raw: bytes) -> Any:
    """The value, or None where the strict parser must look: orjson takes the last of two equal keys and
    refuses half surrogate pairs. Most of what we wrote encodes back to the same bytes."""
    try:
        value = orjson.loads(raw)
        return value if orjson.dumps(value) == raw else None
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def damaged(path: Path, offset: int, why: str) -> Damaged:
    return Damaged(f"{path} is damaged at byte {offset}: {why}; it was left as it was", path=str(path), offset=offset)


def decode(line: bytes, at: Cursor, path: Path) -> Line:
    """`line` (without newline) as the record behind `at`. Raises `Damaged`, `NewerFormat`."""
    offset = at.offset_bytes
    match = _LINE.fullmatch(line)
    if match is None:
        version = _ANY_VERSION.match(line)
        if version is not None and int(version[1]) > VERSION:
            raise NewerFormat(
                f"{path} was written by a newer version of openjobs (byte {offset}); it was left as it was",
                path=str(path),
                offset=offset,
            )
        raise damaged(path, offset, "no record of ours")
    seq, prev, crc, raw = int(match[1]), int(match[2]), int(match[3], 16), match[4]
    if checksum(seq, raw) != crc:
        raise damaged(path, offset, "the checksum is wrong")
    if prev != at.seq or seq <= prev:
        raise damaged(path, offset, f"record {seq} says that it follows {prev}, but it stands behind {at.seq}")
    end = offset + len(line) + 1
    return Line(Cursor(seq=seq, start_bytes=offset, offset_bytes=end, crc=crc), raw)


class Scan:
    """The lines of an open ledger behind a cursor, one after the other, in bounded memory.

    After the last line, `position` is where the good part ends and `tail_bytes` is how much of an
    incomplete record stands behind it. Raises `Damaged` at the first byte that is neither.
    """

    def __init__(self, fd: int, position: Cursor, path: Path) -> None:
        self.position = position
        self.tail_bytes = 0
        self._fd = fd
        self._path = path

    def __iter__(self) -> Iterator[Line]:
        pending, read_at = b"", self.position.offset_bytes
        while chunk := os.pread(self._fd, _CHUNK_BYTES, read_at):
            read_at += len(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            for text in lines:
                try:
                    line = decode(text, self.position, self._path)
                except Damaged:
                    self._accept_tail_or_raise()
                    return
                self.position = line.cursor
                yield line
            if len(pending) > MAX_LINE_BYTES:
                break
        if pending:
            self._accept_tail_or_raise()

    def _accept_tail_or_raise(self) -> None:
        """An append that a crash cut short leaves a beginning of what was written, or (if the file
        system grew the file first) blocks of NULs in it. Anything else is damage. A whole record that
        lacks its newline is such a beginning; one with another byte in the newline's place is not."""
        at = self.position.offset_bytes
        rest = os.pread(self._fd, _TAIL_BYTES + 1, at)
        first, newline, _ = rest.partition(b"\n")
        torn = len(rest) <= _TAIL_BYTES and len(first) <= MAX_LINE_BYTES
        if newline:
            torn = torn and b"\0" in first and not any(_is_record(line) for line in rest.split(b"\n"))
        else:
            torn = torn and not _is_record(first[:-1])
        if not torn:
            decode(first, self.position, self._path)
            raise damaged(self._path, at, "the record has no end")
        self.tail_bytes = len(rest)


def _is_record(line: bytes) -> bool:
    match = _LINE.fullmatch(line)
    return match is not None and checksum(int(match[1]), match[4]) == int(match[3], 16)


def resume(fd: int, cursor: Cursor) -> Cursor:
    """`cursor` if its record stands where it stood, else the beginning."""
    length = cursor.offset_bytes - cursor.start_bytes
    if cursor.seq and 0 < length <= MAX_LINE_BYTES:
        line = os.pread(fd, length, cursor.start_bytes)
        match = _LINE.fullmatch(line[:-1])
        if match is None or not line.endswith(b"\n") or not _is_record(line[:-1]):
            return START
        if (int(match[1]), int(match[3], 16)) == (cursor.seq, cursor.crc):
            return cursor
    return START


def newest(fd: int) -> Cursor:
    """A place near the end from which `Scan` can judge the end: behind the last whole record but one.

    Behind the last one where what stands before it is none; the beginning where none is found near the end.
    """
    size = os.fstat(fd).st_size
    for reach in (_CHUNK_BYTES, _TAIL_BYTES):
        begin = max(0, size - reach)
        chunk = os.pread(fd, size - begin, begin)
        end = chunk.rfind(b"\n")
        while end > 0:
            start = chunk.rfind(b"\n", 0, end) + 1
            last = _record_at(chunk, start, end, begin)
            if last is not None and (begin > 0 or start > 0):
                before = chunk.rfind(b"\n", 0, max(0, start - 1)) + 1
                return _record_at(chunk, before, start - 1, begin) or last
            end = start - 1
        if begin == 0:
            break
    return START


def _record_at(chunk: bytes, start: int, end: int, begin: int) -> Cursor | None:
    """Behind the whole record that is `chunk[start:end]`, where the chunk stands at byte `begin` of its file."""
    match = _LINE.fullmatch(chunk, start, end) if start > 0 or begin == 0 else None
    if match is None or checksum(int(match[1]), match[4]) != int(match[3], 16):
        return None
    return Cursor(seq=int(match[1]), start_bytes=begin + start, offset_bytes=begin + end + 1, crc=int(match[3], 16))


def is_record_of(line: Line, cursor: Cursor) -> bool:
    """Whether it is the record behind which `cursor` stands, wherever it stands now."""
    return (line.cursor.seq, line.cursor.crc) == (cursor.seq, cursor.crc)


def is_news(line: Line, since: Cursor) -> bool:
    """Whether a reader that stands at `since` has not read this line yet."""
    at = line.cursor
    return at.seq > since.seq or (at.seq == since.seq and at.crc != since.crc)
