"""Packs as bytes: entries, deltas, the index, and the rolling pack that each batch writes anew.

Sources: gitformat-pack(5). A pack is never written in place and never thin: every delta's base is
in the same pack, before it.

The rolling pack exists because a commit that comes alone would otherwise cost three loose files
(three creations and three syncs) or leave one tiny pack behind. Here each batch writes one pack
that holds the entries of the previous one, copied byte for byte, plus its own; the one before last
is removed (/docs: git store, *Packs*).
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import attrs

from ..errors import Damaged

COMMIT, TREE, BLOB, TAG, OFS_DELTA, REF_DELTA = 1, 2, 3, 4, 6, 7
KIND_NAMES = {COMMIT: b"commit", TREE: b"tree", BLOB: b"blob", TAG: b"tag"}
KINDS = {name: kind for kind, name in KIND_NAMES.items()}

#: longest chain of deltas that is written; git's own default
MAX_CHAIN = 50
#: longest chain that is read (git itself writes up to 4095)
MAX_CHAIN_READ = 5000
#: a repository's content is not to be trusted: nothing larger is ever inflated
MAX_OBJECT_BYTES = 512 << 20
#: trees below this are written whole: a delta of theirs saves nothing
MIN_DELTA_BYTES = 400

PACK_HEADER_BYTES = 12
IDX_NAMES_AT = 8 + 4 * 256
#: how much of a pack is read at once
_CHUNK = 4096
#: how much is compared at once
_BLOCK = 16 << 10
_ZLIB_LEVEL = 1
_SMALL_BYTES = 4096
#: what is not larger is stored as it is
_TINY_BYTES = 1024
_STORED = struct.Struct("<BHH")
_COPY = struct.Struct("<BIH")


def object_id(kind: int, data: bytes) -> bytes:
    """The 20-byte id of an object."""
    if len(data) < _SMALL_BYTES:
        return hashlib.sha1(b"%s %d\0%s" % (KIND_NAMES[kind], len(data), data)).digest()
    digest = hashlib.sha1(b"%s %d\0" % (KIND_NAMES[kind], len(data)))
    digest.update(data)
    return digest.digest()


# --- deltas -----------------------------------------------------------------------------------------


def common_prefix(one: bytes, other: bytes) -> int:
    """How many first bytes agree: whole blocks are compared at memcmp's speed, the one that differs is halved.

    `startswith` with a place compares without copying its own side.
    """
    limit = min(len(one), len(other))
    low = 0
    while low < limit:
        high = min(low + _BLOCK, limit)
        if not one.startswith(other[low:high], low):
            break
        low = high
    else:
        return limit
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(one: bytes, other: bytes, limit: int) -> int:
    """How many last bytes agree, `limit` at most; found as the prefix is."""
    end, other_end, low = len(one), len(other), 0
    while low < limit:
        high = min(low + _BLOCK, limit)
        if not one.startswith(other[other_end - high : other_end - low], end - high):
            break
        low = high
    else:
        return low
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[other_end - middle : other_end - low], end - middle):
            low = middle
        else:
            high = middle - 1
    return low


#: a changed region above this is looked at field by field (a row of which some fields changed), and above
#: the second line by line (two rows far apart)
_BY_FIELDS_BYTES = 100
_BY_LINES_BYTES = 1500

Regions = list[tuple[int, int] | bytes]


def make_delta(old: bytes, new: bytes) -> bytes:
    """Instructions that turn `old` into `new`.

    A row replaced in a page or lines appended to a segment is one region between an equal beginning
    and an equal end, which is found in microseconds; a general differ is not needed.
    """
    old_bytes, new_bytes = len(old), len(new)
    head = old_bytes if new.startswith(old) else common_prefix(old, new)
    tail = common_suffix(old, new, min(old_bytes, new_bytes) - head)
    middle = new[head : new_bytes - tail]
    regions: Regions = [middle]
    if len(middle) > _BY_FIELDS_BYTES and old_bytes - head - tail > 0:
        before = old[head : old_bytes - tail]
        if len(middle) > _BY_LINES_BYTES:
            regions = _by_pieces(before.splitlines(keepends=True), head, middle.splitlines(keepends=True))
        elif b"\0" not in before and b"\0" not in middle:
            regions = _by_pieces(_fields(before), head, _fields(middle))
    instructions = [_varint(old_bytes), _varint(new_bytes)]
    if head:
        instructions.append(_instruction((0, head)))
    instructions += map(_instruction, regions)
    if tail:
        instructions.append(_instruction((old_bytes - tail, tail)))
    return b"".join(instructions)


def _fields(row: bytes) -> list[bytes]:
    """A row in pieces that begin where a field does; joined they are the row. Assumption: no zero byte in it."""
    return row.replace(b',"', b'\0,"').split(b"\0")


def _by_pieces(old: list[bytes], at: int, new: list[bytes]) -> Regions:
    """What of `new` is copied from `old`, which begins at `at`; neighbours as one region."""
    where = dict(zip(old, itertools.accumulate(map(len, old), initial=at), strict=False))
    regions: Regions = []
    fresh: list[bytes] = []
    begin = end = 0
    for piece in new:
        found = where.get(piece, -1)
        if found >= 0 and found == end and begin < end:
            end += len(piece)
            continue
        if begin < end:
            regions.append((begin, end - begin))
            begin = end = 0
        if found < 0 or len(piece) < _COPY.size:
            fresh.append(piece)
            continue
        if fresh:
            regions.append(b"".join(fresh))
            fresh = []
        begin, end = found, found + len(piece)
    if begin < end:
        regions.append((begin, end - begin))
    if fresh:
        regions.append(b"".join(fresh))
    return regions


def encode_delta(old_bytes: int, new_bytes: int, regions: Iterable[tuple[int, int] | bytes]) -> bytes:
    """A delta from its regions: a place and a size in the old text, or new bytes."""
    return _varint(old_bytes) + _varint(new_bytes) + b"".join(map(_instruction, _merged(regions)))


def _merged(regions: Iterable[tuple[int, int] | bytes]) -> list[tuple[int, int] | bytes]:
    merged: list[tuple[int, int] | bytes] = []
    for region in regions:
        last = merged[-1] if merged else None
        if isinstance(region, bytes):
            if not region:
                continue
            if isinstance(last, bytes):
                merged[-1] = last + region
                continue
        elif not region[1]:
            continue
        elif isinstance(last, tuple) and sum(last) == region[0]:
            merged[-1] = (last[0], last[1] + region[1])
            continue
        merged.append(region)
    return merged


def _instruction(region: tuple[int, int] | bytes) -> bytes:
    if isinstance(region, bytes):
        size = len(region)
        whole = size - size % 127
        parts = [b"\x7f" + region[i : i + 127] for i in range(0, whole, 127)]
        if whole < size:
            parts.append(bytes((size - whole,)) + region[whole:])
        return b"".join(parts)
    at, size = region
    if size <= 0x10000:
        return _copy(at, size)
    return b"".join([_copy(at + i, min(0x10000, size - i)) for i in range(0, size, 0x10000)])


def _copy(at: int, size: int) -> bytes:
    """One copy instruction with all its operands, zeros too: quicker than leaving them out. 0x10000 is written as 0."""
    return _COPY.pack(0xBF, at, size & 0xFFFF)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def deflate(data: bytes, level: int = _ZLIB_LEVEL) -> bytes:
    """zlib, quick. Its tables cost more to set up than a commit costs to compress (80 against 10 µs), so
    small data gets small ones."""
    if len(data) > _SMALL_BYTES:
        return zlib.compress(data, level)
    deflater = zlib.compressobj(level, zlib.DEFLATED, 12, 4)
    return deflater.compress(data) + deflater.flush()


def store(data: bytes) -> bytes:
    """A zlib stream that holds `data` as it is: for ids, which nothing makes smaller, and for what is so
    small that compressing it would cost more time than its bytes are worth before the next `gc`."""
    size = len(data)
    if size <= 0xFFFF:
        checksum = zlib.adler32(data).to_bytes(4, "big")
        return b"".join((b"\x78\x01", _STORED.pack(1, size, size ^ 0xFFFF), data, checksum))
    blocks = [data[at : at + 0xFFFF] for at in range(0, size, 0xFFFF)]
    stream = [b"\x78\x01"]
    for block in blocks[:-1]:
        stream += (b"\x00\xff\xff\x00\x00", block)
    size = len(blocks[-1])
    stream += (_STORED.pack(1, size, size ^ 0xFFFF), blocks[-1], zlib.adler32(data).to_bytes(4, "big"))
    return b"".join(stream)


# --- entries: writing ---------------------------------------------------------------------------------


def entry_header(kind: int, size: int) -> bytes:
    first, size = kind << 4 | size & 15, size >> 4
    return bytes((first | 0x80,)) + _varint(size) if size else bytes((first,))


def offset_bytes(distance: int) -> bytes:
    """How far back a delta's base begins, in git's base-128 form (a longer one starts where the shorter ends)."""
    out = [distance & 0x7F]
    distance >>= 7
    while distance:
        distance -= 1
        out.append(0x80 | distance & 0x7F)
        distance >>= 7
    return bytes(reversed(out))


def read_offset(raw: bytes, at: int) -> tuple[int, int]:
    """The number and where it ends. Raises IndexError when it is cut."""
    byte = raw[at]
    number = byte & 0x7F
    while byte & 0x80:
        at += 1
        byte = raw[at]
        number = (number + 1) << 7 | byte & 0x7F
    return number, at + 1


def read_header(raw: bytes) -> tuple[int, int, int]:
    """Kind, size and where the header ends. Raises IndexError when it is cut."""
    byte = raw[0]
    kind, size, shift, at = byte >> 4 & 7, byte & 15, 4, 1
    while byte & 0x80:
        byte = raw[at]
        size |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return kind, size, at


# --- entries: reading ---------------------------------------------------------------------------------


class Source(Protocol):
    """Where a pack's bytes come from: memory or a file."""

    name: str

    def chunk(self, at: int, size: int) -> bytes:
        """Up to `size` bytes at `at`; fewer only at the end."""
        ...


def read_entry(source: Source, at: int, find: Callable[[bytes], tuple[int, bytes]]) -> tuple[int, bytes]:
    """Kind and content of the object whose entry begins at `at`, through its chain of deltas.

    `find` reads a base that is named by id (packs of other writers). Raises `Damaged`.
    """
    deltas: list[bytes] = []
    while True:
        kind, size, raw, used = _start(source, at)
        if kind == OFS_DELTA:
            try:
                distance, used = read_offset(raw, used)
            except IndexError:
                raise _damaged(source, at, "the entry is cut") from None
            deltas.append(_inflate(source, at, raw, used, size))
            if not 0 < distance <= at - PACK_HEADER_BYTES:
                raise _damaged(source, at, "the delta has no base")
            at -= distance
        elif kind == REF_DELTA:
            deltas.append(_inflate(source, at, raw, used + 20, size))
            kind, data = find(raw[used : used + 20])
            break
        elif kind in KIND_NAMES:
            data = _inflate(source, at, raw, used, size)
            break
        else:
            raise _damaged(source, at, f"there is no kind of entry {kind}")
        if len(deltas) > MAX_CHAIN_READ:
            raise _damaged(source, at, "the chain of deltas is too long")
    for delta in reversed(deltas):
        data = apply_delta(source, at, data, delta)
    return kind, data


def _start(source: Source, at: int) -> tuple[int, int, bytes, int]:
    raw = source.chunk(at, _CHUNK)
    try:
        kind, size, used = read_header(raw)
    except IndexError:
        raise _damaged(source, at, "the pack is cut") from None
    if size > MAX_OBJECT_BYTES:
        raise _damaged(source, at, f"an object of {size} bytes is too large")
    return kind, size, raw, used


def _inflate(source: Source, at: int, raw: bytes, used: int, size: int) -> bytes:
    inflater = zlib.decompressobj()
    pieces: list[bytes] = []
    got, feed, next_at = 0, raw[used:], at + len(raw)
    while not inflater.eof:
        if not feed:
            feed = source.chunk(next_at, 16 * _CHUNK)
            next_at += len(feed)
            if not feed:
                raise _damaged(source, at, "the pack is cut")
        try:
            piece = inflater.decompress(feed, size - got + 1)
        except zlib.error as error:
            raise _damaged(source, at, str(error)) from None
        got += len(piece)
        if got > size:
            break
        pieces.append(piece)
        feed = inflater.unconsumed_tail
    if got != size:
        raise _damaged(source, at, f"the entry has not {size} bytes")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def apply_delta(source: Source, at: int, base: bytes, delta: bytes) -> bytes:
    """What `delta`, from `source` at `at`, makes of `base`. Raises `Damaged`."""
    from dulwich import pack
    from dulwich.errors import ApplyDeltaError

    try:
        return b"".join(pack.apply_delta(base, delta))
    except (ApplyDeltaError, ValueError, IndexError, AssertionError) as error:
        raise _damaged(source, at, f"the delta does not fit: {error}") from None


def _damaged(source: Source, at: int, problem: str) -> Damaged:
    return Damaged(f"{source.name} is damaged at byte {at}: {problem}", path=source.name, offset=at)


# --- the index ----------------------------------------------------------------------------------------

#: id, where the entry begins, CRC-32 of its raw bytes
Entry = tuple[bytes, int, int]


def encode_index(entries: Sequence[Entry], checksum: bytes) -> bytes:
    """The index (version 2) of a pack; `entries` in order of their ids."""
    count = len(entries)
    names = b"".join([entry[0] for entry in entries])
    counts = [0] * 256
    for first in names[::20]:
        counts[first] += 1
    large: list[int] = []
    offsets = [entry[1] for entry in entries]
    if offsets and max(offsets) >= 1 << 31:
        for position, at in enumerate(offsets):
            if at >= 1 << 31:
                offsets[position] = 1 << 31 | len(large)
                large.append(at)
    raw = b"".join(
        (
            b"\xfftOc\0\0\0\x02",
            struct.pack(">256L", *itertools.accumulate(counts)),
            names,
            struct.pack(f">{count}L", *[entry[2] for entry in entries]),
            struct.pack(f">{count}L", *offsets),
            struct.pack(f">{len(large)}Q", *large),
            checksum,
        )
    )
    return raw + hashlib.sha1(raw).digest()


@attrs.frozen(kw_only=True, slots=True)
class EncodedPack:
    """A pack that is ready to be written. Its name is its own checksum, so equal names have equal bytes."""

    name: str
    #: an iterator where it is larger than memory should hold
    pack: Sequence[bytes | bytearray] | Iterator[bytes]
    index: bytes


# --- the rolling pack -----------------------------------------------------------------------------------


def _squeeze(kind: int, data: bytes) -> bytes:
    if len(data) <= _TINY_BYTES or (kind == TREE and len(data) < 1024):
        return store(data)
    return deflate(data)


class RollingPack:
    """The newest pack, whole in memory; its next version is encoded from there.

    Guarantees: entries never move and never change, only `rollback` takes the newest away.
    Assumptions: one writer; readers see only ids of commits that were published.
    """

    name = "the newest pack"

    def __init__(self) -> None:
        self._body = bytearray(b"PACK\0\0\0\x02\0\0\0\0")
        self._entries: list[Entry] = []
        #: the entries of the last `encode` in order of their ids: the next one has few to put between them
        self._ordered: list[Entry] = []
        self._at: dict[bytes, int] = {}
        self._depth: dict[int, int] = {}
        self.commits = 0

    def __contains__(self, sha: bytes) -> bool:
        return sha in self._at

    def ids(self) -> list[bytes]:
        """The newest first."""
        return [entry[0] for entry in reversed(self._entries)]

    @property
    def size_bytes(self) -> int:
        return len(self._body) + 20

    def chunk(self, at: int, size: int) -> bytes:
        return bytes(self._body[at : at + size])

    def read(self, sha: bytes, find: Callable[[bytes], tuple[int, bytes]]) -> tuple[int, bytes]:
        return read_entry(self, self._at[sha], find)

    def add(self, kind: int, sha: bytes, data: bytes, base: bytes | None = None, base_data: bytes = b"") -> None:
        """Append an object, as a delta where `base` is in this pack and a delta is worth it."""
        if sha in self._at:
            return
        at = len(self._body)
        raw = b""
        base_at = self._at.get(base) if base is not None else None
        if base_at is not None and len(data) >= MIN_DELTA_BYTES:
            depth = self._depth.get(base_at, 0) + 1
            delta = make_delta(base_data, data) if depth <= MAX_CHAIN else data
            if len(delta) < len(data) // 2:
                head = entry_header(OFS_DELTA, len(delta)) + offset_bytes(at - base_at)
                raw = head + _squeeze(kind, delta)
                self._depth[at] = depth
        if not raw:
            raw = entry_header(kind, len(data)) + _squeeze(kind, data)
        self._body += raw
        self._entries.append((sha, at, zlib.crc32(raw)))
        self._at[sha] = at
        self.commits += kind == COMMIT

    def mark(self) -> tuple[int, int, int]:
        return len(self._body), len(self._entries), self.commits

    def rollback(self, mark: tuple[int, int, int]) -> None:
        size, count, self.commits = mark
        self._body = self._body[:size]  # not in place: whoever failed to write it may still be looking at it
        for sha, at, _ in self._entries[count:]:
            del self._at[sha]
            self._depth.pop(at, None)
        del self._entries[count:]
        if len(self._ordered) > count:
            self._ordered = []

    def encode(self) -> EncodedPack:
        self._body[8:12] = struct.pack(">L", len(self._entries))
        checksum = hashlib.sha1(self._body).digest()
        self._ordered += self._entries[len(self._ordered) :]
        self._ordered.sort()
        index = encode_index(self._ordered, checksum)
        return EncodedPack(name=f"pack-{checksum.hex()}", pack=(self._body, checksum), index=index)

    @classmethod
    def resume(cls, raw: bytes, entries: Sequence[Entry]) -> RollingPack:
        """The rolling pack of an earlier process. Raises `Damaged` unless `raw` is whole."""
        if hashlib.sha1(memoryview(raw)[:-20]).digest() != raw[-20:] or raw[:8] != b"PACK\0\0\0\x02":
            raise Damaged("the newest pack is damaged: its checksum is wrong")
        rolling = cls()
        rolling._body = bytearray(raw[:-20])
        rolling._entries = sorted(entries, key=lambda entry: entry[1])
        for sha, at, _ in rolling._entries:
            rolling._at[sha] = at
            kind, _, used = read_header(raw[at : at + 32])
            rolling.commits += kind == COMMIT
            if kind == OFS_DELTA:
                distance, _ = read_offset(raw, at + used)
                rolling._depth[at] = rolling._depth.get(at - distance, 0) + 1
        return rolling
