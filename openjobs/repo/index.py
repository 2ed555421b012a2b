"""git's index file as a list of raw entries: read once, then only the changed ones are patched.

Sources: gitformat-index(5). Versions 2, 3 and 4 are read; 2 (or 3, where an entry has extended
flags) is written. Extensions are caches of git's; they are dropped, as git allows.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Mapping

from ..durable.files import read_file, unreadable
from ..errors import Damaged, RepositoryRefused
from .packs import read_offset
from .trees import EXECUTABLE, FILE, LINK

_FIXED_BYTES = 62
_EXTENDED = 0x4000
_SIZE_AT = 36
_STAT = struct.Struct(">10L")

#: name, zero, stage: sorts as git sorts
Key = bytes
Signature = tuple[int, int, int, int]


def signature(path: str) -> Signature | None:
    """What tells whether the file is still the one that was read or written."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


def key_of(name: bytes, stage: int = 0) -> Key:
    return name + bytes((0, stage))


class Index:
    """The entries of one index file. Not safe for threads: only who holds `index.lock` has it."""

    def __init__(self, entries: Mapping[Key, bytes] | None = None) -> None:
        self._entries: dict[Key, bytes] = dict(entries or {})
        self._sorted = not entries
        self._extended = any(_flags(entry) & _EXTENDED for entry in self._entries.values())
        #: entries of files that may be younger than the index file
        self._young = set(self._entries)

    @classmethod
    def load(cls, path: str) -> Index:
        """Raises FileNotFoundError, `Damaged`, or `RepositoryRefused` (split and sparse index)."""
        try:
            raw = read_file(path)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise Damaged(f"{path} is no regular file", path=path) from None
            raise
        except OSError as error:
            raise unreadable(error, path) from error
        try:
            return cls(_parse(raw))
        except (ValueError, IndexError, struct.error) as error:
            raise Damaged(f"{path} is damaged: {error}", path=path) from None

    def get(self, name: bytes) -> bytes | None:
        return self._entries.get(key_of(name))

    def names(self) -> list[bytes]:
        return [key[:-2] for key in self._entries]

    def unmerged(self) -> list[bytes]:
        return sorted({key[:-2] for key in self._entries if key[-1]})

    def put(self, name: bytes, entry: bytes) -> None:
        key = key_of(name)
        if key not in self._entries:
            self._make_room(name)
            self._sorted = False
        self._entries[key] = entry
        self._young.add(key)

    def drop(self, name: bytes) -> None:
        for stage in range(4):
            self._entries.pop(key_of(name, stage), None)

    def young(self, since_s: int) -> list[bytes]:
        """Files that were last changed in the second `since_s`, or later, when their entries were made.

        With `since_s` the second in which the index file was written: git compares their content, since a change
        in the same second may not show in stat. It no longer does for an index of a later second, so who writes
        one must look first (and `doubt` what was changed).
        """
        self._young = {
            key for key in self._young if (entry := self._entries.get(key)) is not None and _changed_s(entry) >= since_s
        }
        return [key[:-2] for key in self._young if not key[-1]]

    def doubt(self, name: bytes) -> None:
        """From now on whoever compares the entry looks at the content; git marks it in the same way."""
        entry = self._entries[key_of(name)]
        self._entries[key_of(name)] = entry[:_SIZE_AT] + bytes(4) + entry[_SIZE_AT + 4 :]

    def _make_room(self, name: bytes) -> None:
        """A file excludes its own conflict stages, and any file where one of its directories is."""
        for stage in (1, 2, 3):
            self._entries.pop(key_of(name, stage), None)
        at = name.find(b"/")
        while at >= 0:
            self.drop(name[:at])
            at = name.find(b"/", at + 1)

    def encode(self) -> list[bytes]:
        if not self._sorted:
            self._entries = dict(sorted(self._entries.items()))
            self._sorted = True
        head = struct.pack(">4sLL", b"DIRC", 3 if self._extended else 2, len(self._entries))
        body = b"".join(self._entries.values())
        digest = hashlib.sha1(head)
        digest.update(body)
        return [head, body, digest.digest()]


def make_entry(name: bytes, sha: bytes, mode: int, found: os.stat_result | None) -> bytes:
    """With None the entry matches no file, so whoever compares it looks at the content."""
    flags = min(len(name), 0xFFF)
    known = stat_bytes(mode, found) if found is not None else _STAT.pack(0, 0, 0, 0, 0, 0, mode, 0, 0, 0)
    raw = known + sha + flags.to_bytes(2, "big") + name
    return raw.ljust((len(raw) + 8) & ~7, b"\0")


def stat_bytes(mode: int, found: os.stat_result) -> bytes:
    ctime, mtime = found.st_ctime_ns, found.st_mtime_ns
    return _STAT.pack(
        ctime // 10**9 & 0xFFFFFFFF,
        ctime % 10**9,
        mtime // 10**9 & 0xFFFFFFFF,
        mtime % 10**9,
        found.st_dev & 0xFFFFFFFF,
        found.st_ino & 0xFFFFFFFF,
        mode,
        found.st_uid,
        found.st_gid,
        found.st_size & 0xFFFFFFFF,
    )


def entry_sha(entry: bytes) -> bytes:
    return entry[40:60]


def entry_matches(entry: bytes, found: os.stat_result) -> bool:
    """Whether the file is, to all that stat tells, the one the entry was made of."""
    return entry[:40] == stat_bytes(mode_of(found), found)


def mode_of(found: os.stat_result) -> int:
    if stat.S_ISLNK(found.st_mode):
        return LINK
    if not stat.S_ISREG(found.st_mode):
        return 0
    return EXECUTABLE if found.st_mode & 0o100 else FILE


def _changed_s(entry: bytes) -> int:
    return int.from_bytes(entry[8:12], "big")


def _flags(entry: bytes) -> int:
    return int.from_bytes(entry[60:62], "big")


def _parse(raw: bytes) -> dict[Key, bytes]:
    if len(raw) < 32 or raw[:4] != b"DIRC":
        raise ValueError("it does not begin as an index does")
    version, count = struct.unpack(">LL", raw[4:12])
    if version not in (2, 3, 4):
        raise ValueError(f"there is no version {version}")
    trailer = raw[-20:]
    if trailer != bytes(20) and hashlib.sha1(memoryview(raw)[:-20]).digest() != trailer:
        raise ValueError("its checksum is wrong")
    end = len(raw) - 20
    entries: dict[Key, bytes] = {}
    at, previous = 12, b""
    for _ in range(count):
        start = at
        flags = int.from_bytes(raw[at + 60 : at + 62], "big")
        at += _FIXED_BYTES + (2 if flags & _EXTENDED else 0)
        fixed = raw[start:at]
        if version == 4:
            strip, at = read_offset(raw, at)
            if strip > len(previous):
                raise ValueError(f"the entry at byte {start} is wrong")
            zero = raw.index(b"\0", at, end)
            name = previous[: len(previous) - strip] + raw[at:zero]
            at, previous = zero + 1, name
            entry = (fixed + name).ljust((len(fixed) + len(name) + 8) & ~7, b"\0")
        else:
            zero = raw.index(b"\0", at, end)
            name = raw[at:zero]
            at = start + ((zero - start + 8) & ~7)
            entry = raw[start:at]
        if at > end:
            raise ValueError(f"the entry at byte {start} is wrong")
        entries[key_of(name, flags >> 12 & 3)] = entry
    _check_extensions(raw, at, end)
    if any(len(key) == 2 for key in entries):
        raise ValueError("an entry has no name")
    return entries


def _check_extensions(raw: bytes, at: int, end: int) -> None:
    while at < end:
        if at + 8 > end:
            raise ValueError("an extension is cut")
        name, size = raw[at : at + 4], int.from_bytes(raw[at + 4 : at + 8], "big")
        if name == b"link":
            raise RepositoryRefused("its index is split")
        if not 65 <= name[0] <= 90:
            raise RepositoryRefused(f"its index needs the extension {name.decode(errors='replace')}")
        at += 8 + size
    if at != end:
        raise ValueError("an extension is cut")
