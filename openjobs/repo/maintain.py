"""Keeping the number of packs small: sealed ones are joined byte for byte, in levels.

Packs of a like size (a level is eight times the one below) are joined when there are eight of them,
so every byte is copied once per level, and there are never more than about 50 packs. No object is
ever dropped; pruning what nobody refers to is left to `git gc` and its two weeks.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence

from ..durable import Disk
from ..durable.files import open_file, read_file
from ..errors import Damaged
from .locks import create_lock
from .objects import ObjectStore, PackFile
from .packdir import PackDirectory, is_whole
from .packs import (
    OFS_DELTA,
    PACK_HEADER_BYTES,
    Entry,
    entry_header,
    offset_bytes,
    read_header,
    read_offset,
)
from .scratch import Scratch

_LEVEL_BYTES = 256 << 10
_PER_LEVEL = 8
#: packs above this stay as they are
_LARGEST_BYTES = 128 << 20
#: how much may be copied on the way, after a batch
BY_THE_WAY_BYTES = 16 << 20
#: from so many packs on, the limit above gives way
_MANY_PACKS = 45
#: with so many packs joining is overdue
CROWDED_PACKS = 24
#: from this size on a reflog is cut to that: a few hundred moves of the branch
_REFLOG_BYTES = 256 << 10
_REFLOG_KEEP_BYTES = 128 << 10


def join_packs(packs: PackDirectory, objects: ObjectStore, *, busy: set[str], limit_bytes: int | None = None) -> int:
    """Join what there is to join, smallest first; how many packs went away.

    `busy` are the packs that the next batch goes on with. Raises OSError and `Damaged`; what is
    left then is whole, and mended by `PackDirectory.mend`.
    """
    gone = 0
    while went := join_once(packs, objects, busy=busy, limit_bytes=limit_bytes):
        gone += went
    return gone


def join_once(packs: PackDirectory, objects: ObjectStore, *, busy: set[str], limit_bytes: int | None = None) -> int:
    """As `join_packs`, one level only."""
    levels = _levels(objects, busy)
    many = sum(map(len, levels.values())) > _MANY_PACKS
    ready = [level for level, found in levels.items() if len(found) >= _PER_LEVEL]
    if not ready:
        return 0
    repacked, _ = level = min(ready)
    group = levels[level]
    if limit_bytes is not None and not many and sum(pack.size_bytes() for pack in group) > limit_bytes:
        return 0
    _join(packs, group, repacked=repacked)
    objects.forget_packs()
    return len(group) - 1


def _levels(objects: ObjectStore, busy: set[str]) -> dict[tuple[bool, int], list[PackFile]]:
    """Packs by size. Those that were encoded anew are joined among themselves, so that they stay marked."""
    levels: dict[tuple[bool, int], list[PackFile]] = {}
    for pack in list(objects.rescan()):
        with contextlib.suppress(FileNotFoundError):
            size = pack.size_bytes()
            if pack.name not in busy and size <= _LARGEST_BYTES and pack.is_ours():
                level = 0
                while size > _LEVEL_BYTES << 3 * level:
                    level += 1
                levels.setdefault((pack.is_repacked(), level), []).append(pack)
    return levels


def _join(packs: PackDirectory, group: Sequence[PackFile], *, repacked: bool) -> None:
    """One pack that holds every object of `group`; then the others go.

    A pack that is damaged is left out and stays as it is: readers may still find much in it.
    """
    whole = [pack for pack in group if is_whole(pack)]
    if len(whole) < 2:
        raise Damaged(f"{group[0].base}.pack or one beside it is damaged", path=f"{group[0].base}.pack")
    plan = _Plan(whole)
    name = packs.publish_stream(plan.blocks, plan.entries, repacked=repacked)
    for pack in whole:
        if pack.name != name:
            packs.remove(pack.name)


class _Plan:
    """Which bytes go where. Entries keep their bytes; only a delta whose base moved gets a new distance."""

    def __init__(self, group: Sequence[PackFile]) -> None:
        self._runs: list[tuple[PackFile, list[tuple[bytes, int, int]] | None]] = []
        self.entries: list[Entry] = []
        seen: dict[bytes, int] = {}
        at = PACK_HEADER_BYTES
        for pack in group:
            entries = pack.entries()
            if seen.keys().isdisjoint(entry[0] for entry in entries):
                shift = at - PACK_HEADER_BYTES
                moved = [(sha, offset + shift, crc) for sha, offset, crc in entries]
                self._runs.append((pack, None))
                at += pack.size_bytes() - PACK_HEADER_BYTES - 20
            else:
                pieces, moved, at = _without_doubles(pack, entries, seen, at)
                self._runs.append((pack, pieces))
            self.entries += moved
            seen.update([entry[:2] for entry in moved])
        self.entries.sort()

    def blocks(self) -> Iterator[bytes]:
        yield struct.pack(">4sLL", b"PACK", 2, len(self.entries))
        for pack, pieces in self._runs:
            if pieces is not None:
                raw = read_file(pack.base + ".pack")
                for head, start, stop in pieces:
                    yield head + raw[start:stop]
                continue
            left = pack.size_bytes() - PACK_HEADER_BYTES - 20
            with os.fdopen(open_file(pack.base + ".pack"), "rb") as file:
                file.seek(PACK_HEADER_BYTES)
                while left > 0 and (block := file.read(min(left, 1 << 20))):
                    left -= len(block)
                    yield block


def _without_doubles(
    pack: PackFile, entries: Sequence[Entry], seen: dict[bytes, int], at: int
) -> tuple[list[tuple[bytes, int, int]], list[Entry], int]:
    """The pack's entries but for those that are there already, on which its deltas may then stand."""
    raw = read_file(pack.base + ".pack")
    in_order = sorted(entries, key=lambda entry: entry[1])
    ends = [entry[1] for entry in in_order[1:]] + [len(raw) - 20]
    new_at: dict[int, int] = {}
    pieces: list[tuple[bytes, int, int]] = []
    moved: list[Entry] = []
    for (sha, offset, crc), end in zip(in_order, ends, strict=True):
        if sha in seen:
            new_at[offset] = seen[sha]
            continue
        new_at[offset] = at
        if raw[offset] >> 4 & 7 == OFS_DELTA:
            _, size, used = read_header(raw[offset : offset + 32])
            distance, start = read_offset(raw, offset + used)
            base_at = new_at[offset - distance]
            if at - base_at != distance:
                head = entry_header(OFS_DELTA, size) + offset_bytes(at - base_at)
                pieces.append((head, start, end))
                moved.append((sha, at, zlib.crc32(memoryview(raw)[start:end], zlib.crc32(head))))
                at += len(head) + end - start
                continue
        if pieces and pieces[-1][2] == offset:
            head, start, _ = pieces[-1]
            pieces[-1] = (head, start, end)  # the bytes between go together
        else:
            pieces.append((b"", offset, end))
        moved.append((sha, at, crc))
        at += end - offset
    return pieces, moved, at


def cut_reflogs(git_dir: str, ref: str, scratch: Scratch, disk: Disk) -> None:
    """A reflog that has grown large keeps its newest lines. Git writes it under `<ref>.lock`, so do we."""
    for name in (ref, "HEAD"):
        path = f"{git_dir}/logs/{name}"
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_size <= _REFLOG_BYTES:
                continue
            fd, _ = create_lock(disk, f"{git_dir}/{name}.lock")
            try:
                raw = read_file(path)[-_REFLOG_KEEP_BYTES:]
                scratch.move(scratch.write("reflog", raw[raw.index(b"\n") + 1 :]), path)
            finally:
                os.close(fd)
                disk.unlink(f"{git_dir}/{name}.lock")
