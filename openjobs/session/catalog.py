"""Where things are: which closed page has a job, which closed segment has a node.

A derived index, never the truth: every hit is checked in the document it names, and what it does
not cover is read. It names each block (page or segment) by the version it was read at, so after any
commit, a foreign one too, only changed blocks are read again. A block that is damaged hides no other:
it is passed over, and named to whoever finds what he looks for nowhere else.

It is kept in a file under the repository's private folder, one record for each block, appended
without a barrier. A record that does not check ends what is believed of the file; the rest is made anew.
"""

from __future__ import annotations

import bisect
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from ..durable.files import read_file
from ..errors import Damaged
from ..repo import View

#: a pipe in the file's place is not waited for
APPEND = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HEADER = struct.Struct(">4sIIII20s")  # magic, number, count, tag count, crc32 of keys and tags, version
_MAGIC = b"ojc1"
KEY_BYTES = 8
_UNREADABLE_TAGS = b"\0"

#: the ids in a block, and one byte for each that is worth knowing without reading it (a job's status)
Entries = tuple[list[str], bytes]


def key(item_id: str) -> bytes:
    return blake2b(item_id.encode("utf-8", "replace"), digest_size=KEY_BYTES).digest()


class Catalog:
    """The blocks below one directory of the session (`jobs` or `history`), numbered from 0.

    Owned by one thread at a time (the caller's lock). `read_block` decodes a block's entries.
    """

    def __init__(
        self,
        directory: str,
        number_of: Callable[[str], int | None],
        read_block: Callable[[View, int], Entries],
        file: Path | None = None,
    ) -> None:
        self._directory = directory
        self._number_of = number_of
        self._read_block = read_block
        self._file = file
        self._keys = bytearray()
        self._starts: list[int] = []  # index of each block's first key
        self._versions: list[str] = []  # "" where the block must be read before it is believed
        self._tags: list[bytes] = []
        #: what is in these is not known: they could not be read at the last sync
        self._unreadable: set[int] = set()
        self._seen: dict[str, str] = {}  # sub-directory -> version at the last sync
        self._loaded = file is None

    # --- keeping up ---

    def sync(self, view: View, *, closed_only_below: int | None = None) -> None:
        """Bring it up to `view`. Reads the names of changed directories, and changed or unreadable blocks only."""
        self._load_once()
        for sub in view.names(self._directory):
            path = f"{self._directory}/{sub}"
            version = view.version(path)
            if version is None or self._seen.get(sub) == version:
                continue
            complete = True
            for name in view.names(path):
                number = self._number_of(name)
                if number is None:
                    continue
                if closed_only_below is not None and number >= closed_only_below:
                    complete = False
                    continue
                if not self._sync_block(view, number, view.version(f"{path}/{name}") or ""):
                    complete = False
            if complete:
                self._seen[sub] = version
            else:  # what was seen before is not what stands here now: it may come back
                self._seen.pop(sub, None)

    def _sync_block(self, view: View, number: int, version: str) -> bool:
        """False where it could not be read."""
        if number < len(self._versions) and self._versions[number] == version:
            return True
        try:
            ids, tags = self._read_block(view, number)
        except Damaged:
            if number not in self._unreadable:
                self._put(number, "", b"", _UNREADABLE_TAGS)
                self._unreadable.add(number)
            return False
        self.put(number, version, ids, tags)
        return True

    def put(self, number: int, version: str, ids: Sequence[str], tags: bytes) -> None:
        """What block `number` holds now."""
        self._unreadable.discard(number)
        self._put(number, version, b"".join([key(i) for i in ids]), tags)

    def _put(self, number: int, version: str, keys: bytes, tags: bytes) -> None:
        while number > len(self._versions):  # a gap: somebody removed a block; it stays empty
            self._put(len(self._versions), "", b"", b"")
        self._place(number, version, keys, tags)
        self._append(number, version, keys, tags)

    def _place(self, number: int, version: str, keys: bytes, tags: bytes) -> None:
        if number == len(self._versions):
            self._starts.append(len(self._keys) // KEY_BYTES)
            self._keys += keys
            self._versions.append(version)
            self._tags.append(tags)
            return
        start = self._starts[number] * KEY_BYTES
        end = self._starts[number + 1] * KEY_BYTES if number + 1 < len(self._starts) else len(self._keys)
        self._versions[number], self._tags[number] = version, tags
        if len(keys) == end - start:
            self._keys[start:end] = keys
            return
        self._keys[start:end] = keys
        shift = (len(keys) - (end - start)) // KEY_BYTES
        for later in range(number + 1, len(self._starts)):
            self._starts[later] += shift

    # --- asking ---

    @property
    def blocks(self) -> int:
        return len(self._versions)

    def find(self, item_id: str) -> Iterator[int]:
        """Numbers of the blocks that may hold it, newest first, as far as the last `sync` or the file says."""
        self._load_once()
        wanted, end, last = key(item_id), len(self._keys), -1
        while (at := self._keys.rfind(wanted, 0, end)) >= 0:
            if at % KEY_BYTES == 0:
                number = bisect.bisect_right(self._starts, at // KEY_BYTES) - 1
                if number != last:
                    yield number
                last = number
                end = at
            else:
                end = at + KEY_BYTES - 1

    def unreadable(self) -> list[int]:
        """Numbers of the blocks of which nobody knows what is in them, newest first."""
        return sorted(self._unreadable, reverse=True)

    def tagged(self, tags: Iterable[int]) -> Iterator[int]:
        """Numbers of the blocks in which one of these tags occurs, newest first; 0 is a tag of the unreadable ones."""
        wanted = frozenset(tags)
        for number in range(len(self._tags) - 1, -1, -1):
            if not wanted.isdisjoint(self._tags[number]):
                yield number

    # --- its file ---

    def _append(self, number: int, version: str, keys: bytes, tags: bytes) -> None:
        if self._file is None:
            return
        body = keys + tags
        record = _HEADER.pack(
            _MAGIC, number, len(keys) // KEY_BYTES, len(tags), zlib.crc32(body), bytes.fromhex(version or "00" * 20)
        )
        try:
            fd = os.open(self._file, APPEND, 0o600)
            try:
                os.write(fd, record + body)
            finally:
                os.close(fd)
        except OSError:  # derived and supplementary: without the file it is read from the pages again
            self._file = None

    def _load_once(self) -> None:
        if not self._loaded:
            self._load()
            self._loaded = True

    def _load(self) -> None:
        assert self._file is not None
        try:
            data = read_file(os.fspath(self._file))
        except OSError:
            return
        at = 0
        while at + _HEADER.size <= len(data):
            magic, number, count, tag_count, crc, version = _HEADER.unpack_from(data, at)
            keys_end = at + _HEADER.size + count * KEY_BYTES
            end = keys_end + tag_count
            body = data[at + _HEADER.size : end]
            if magic != _MAGIC or end > len(data) or zlib.crc32(body) != crc or number > len(self._versions):
                break
            self._place(number, version.hex(), data[at + _HEADER.size : keys_end], data[keys_end:end])
            at = end
        if at < len(data):
            self._rewrite()

    def _rewrite(self) -> None:
        """The file again from what is believed of it."""
        assert self._file is not None
        try:
            self._file.unlink(missing_ok=True)
        except OSError:
            self._file = None
            return
        for number, version in enumerate(self._versions):
            start = self._starts[number] * KEY_BYTES
            end = self._starts[number + 1] * KEY_BYTES if number + 1 < len(self._starts) else len(self._keys)
            self._append(number, version, bytes(self._keys[start:end]), self._tags[number])
