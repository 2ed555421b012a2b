"""A whole pack from its first byte to its last, every object hashed, without its index.

For packs that came from somebody else, and for who looks at all objects anyway: a chain of deltas is then
walked once, and not once for each object in it. No base may be outside, and nothing is inflated, or made by
a delta, beyond the bound that every object has.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator

from ..errors import Damaged
from .packs import (
    KIND_NAMES,
    MAX_OBJECT_BYTES,
    OFS_DELTA,
    PACK_HEADER_BYTES,
    Entry,
    apply_delta,
    object_id,
    read_entry,
    read_header,
    read_offset,
)

_WINDOW_BYTES = 1 << 20
_CACHE_BYTES = 16 << 20

#: kind, id, where its entry begins and where it ends
Scanned = tuple[int, bytes, int, int]


class PackRegion:
    """A pack inside an open file. Raises `Damaged` with places counted from the pack's beginning."""

    def __init__(self, fd: int, start: int, size: int, name: str) -> None:
        self.name = name
        self._fd, self._start, self.size = fd, start, size

    def chunk(self, at: int, size: int) -> bytes:
        return os.pread(self._fd, max(0, min(size, self.size - at)), self._start + at)

    def damaged(self, at: int, why: str) -> Damaged:
        return Damaged(f"{self.name} is damaged at byte {at} of its pack: {why}", path=self.name, offset=at)


def index_pack(pack: PackRegion) -> tuple[list[Entry], bytes]:
    """The entries for a pack's index, in order of ids, and its checksum. Raises `Damaged`."""
    entries = sorted((sha, at, zlib.crc32(pack.chunk(at, end - at))) for _, sha, at, end in scan_pack(pack))
    return entries, pack.chunk(pack.size - 20, 20)


def scan_pack(pack: PackRegion) -> Iterator[Scanned]:
    """Every object of a pack, inflated and hashed, in order of its place. Raises `Damaged`.

    Takes as long as inflating each entry once, where bases stand shortly before their deltas; and 16 MB
    of memory, with the largest object and its base.
    """
    raw = pack.chunk(0, PACK_HEADER_BYTES)
    if len(raw) < PACK_HEADER_BYTES or raw[:8] != b"PACK\0\0\0\x02" or pack.size < PACK_HEADER_BYTES + 20:
        raise pack.damaged(0, "it does not begin as a pack does")
    (count,) = struct.unpack(">L", raw[8:])
    _check_sum(pack)
    cache = _Contents(pack)
    at = PACK_HEADER_BYTES
    for _ in range(count):
        kind, data, end = cache.entry(at)
        yield kind, object_id(kind, data), at, end
        at = end
    if at != pack.size - 20:
        raise pack.damaged(at, "its last object does not end where the pack does")


def _check_sum(pack: PackRegion) -> None:
    digest, at = hashlib.sha1(), 0
    while at < pack.size - 20:
        piece = pack.chunk(at, min(_WINDOW_BYTES, pack.size - 20 - at))
        if not piece:
            raise pack.damaged(at, "the pack is cut")
        digest.update(piece)
        at += len(piece)
    if pack.chunk(at, 20) != digest.digest():
        raise pack.damaged(at, "its checksum is wrong")


class _Contents:
    """What the entries of a pack hold; those met last are kept, since they are the bases of the next."""

    def __init__(self, pack: PackRegion) -> None:
        self._pack = pack
        self._found: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._bytes = 0

    def entry(self, at: int) -> tuple[int, bytes, int]:
        """Kind and content of the object whose entry begins at `at`, and where that entry ends."""
        pack = self._pack
        raw = pack.chunk(at, 4096)
        try:
            kind, size, used = read_header(raw)
            distance, used = read_offset(raw, used) if kind == OFS_DELTA else (0, used)
        except IndexError:
            raise pack.damaged(at, "the pack is cut") from None
        if size > MAX_OBJECT_BYTES:
            raise pack.damaged(at, f"an object of {size} bytes is too large")
        if kind != OFS_DELTA and kind not in KIND_NAMES:
            raise pack.damaged(at, "its base is outside, or it is of no kind that there is")
        data, end = self._inflate(at, raw, used, size)
        if kind == OFS_DELTA:
            if not 0 < distance <= at - PACK_HEADER_BYTES:
                raise pack.damaged(at, "the delta has no base")
            if made_bytes(data) > MAX_OBJECT_BYTES:
                raise pack.damaged(at, "what the delta makes is too large")
            kind, base = self._base(at - distance)
            data = apply_delta(pack, at, base, data)
        self._keep(at, kind, data)
        return kind, data, end

    def _base(self, at: int) -> tuple[int, bytes]:
        found = self._found.get(at)
        if found is None:
            found = read_entry(self._pack, at, self._outside)
            self._keep(at, *found)
        return found

    def _outside(self, sha: bytes) -> tuple[int, bytes]:
        raise Damaged(f"{self._pack.name} is damaged: the base {sha.hex()} is outside", path=self._pack.name)

    def _keep(self, at: int, kind: int, data: bytes) -> None:
        if at in self._found or len(data) > _CACHE_BYTES // 2:
            return
        self._found[at] = kind, data
        self._bytes += len(data) + 200
        while self._bytes > _CACHE_BYTES:
            _, (_, dropped) = self._found.popitem(last=False)
            self._bytes -= len(dropped) + 200

    def _inflate(self, at: int, raw: bytes, used: int, size: int) -> tuple[bytes, int]:
        inflater = zlib.decompressobj()
        pieces: list[bytes] = []
        got, feed, next_at = 0, raw[used:], at + len(raw)
        while not inflater.eof:
            if not feed:
                feed = self._pack.chunk(next_at, 65536)
                next_at += len(feed)
                if not feed:
                    raise self._pack.damaged(at, "the pack is cut")
            try:
                piece = inflater.decompress(feed, size - got + 1)
            except zlib.error as error:
                raise self._pack.damaged(at, str(error)) from None
            got += len(piece)
            if got > size:
                raise self._pack.damaged(at, f"the entry has more than {size} bytes")
            pieces.append(piece)
            feed = inflater.unconsumed_tail
        if got != size:
            raise self._pack.damaged(at, f"the entry has not {size} bytes")
        return b"".join(pieces), next_at - len(inflater.unused_data)


def made_bytes(delta: bytes) -> int:
    """How much a delta's instructions make, by adding them up: applying it would need that much memory first."""
    total = at = 0
    for _ in range(2):
        while at < len(delta) and delta[at] & 0x80:
            at += 1
        at += 1
    while at < len(delta):
        op = delta[at]
        at += 1
        if not op & 0x80:
            total, at = total + op, at + op
            continue
        size = shift = 0
        for bit in range(7):
            if op & 1 << bit:
                if bit >= 4 and at < len(delta):
                    size |= delta[at] << shift
                at += 1
            shift += 8 if bit >= 4 else 0
        total += size or 0x10000
    return total
