"""Reading objects: the rolling pack in memory, packs on disk, loose files.

Written here instead of taken from dulwich because its object store keeps one descriptor and one
map per pack, and must not be shared between threads; its `apply_delta` (in Rust) is used. No file
stays open between two calls, so there is nothing to give back but memory.

Every object that comes from disk is hashed before it is believed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from ..durable.files import damaged, names_in, open_file, open_sized, read_all, read_failed, read_file
from ..errors import Damaged
from .packs import (
    BLOB,
    COMMIT,
    IDX_NAMES_AT,
    KINDS,
    MAX_OBJECT_BYTES,
    MIN_DELTA_BYTES,
    TREE,
    Entry,
    RollingPack,
    object_id,
    read_entry,
)
from .trees import EMPTY, Tree

#: an index up to this size is kept in memory, a larger one is read where it is needed
_IDX_IN_MEMORY_BYTES = 64 << 10
_CACHE_BYTES = 8 << 20
_CACHED_TREES = 64
#: what stays of both while the repository rests
_RESTING_BYTES = 64 << 10
_RESTING_TREES = 8
#: looks for an object while other programs swap packs between any two of them
_LOOKS = 200
#: bases that are named by their ids (packs of other writers) and lie each in another's chain
_DEEPEST = 120
#: objects that are looked at for the one of which a file is a torn copy
_NEWEST = 10_000
#: what a `.keep` file of ours says; anything else in one means that the pack is somebody else's
KEEP_TEXT = b"openjobs\n"
#: the same for a pack that was encoded anew; cut, it is `KEEP_TEXT` or the beginning of it
REPACKED_TEXT = KEEP_TEXT + b"repacked\n"
KEEP_MODE = 0o400

#: errors that say something about the file, not about this process
_UNREADABLE = frozenset({errno.EIO, errno.ELOOP, errno.EISDIR})


class _OpenPack:
    """A pack file while it is being read."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._fd = open_file(path)

    def __enter__(self) -> _OpenPack:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def chunk(self, at: int, size: int) -> bytes:
        return os.pread(self._fd, size, at)


class PackFile:
    """One pack on disk and its index. Raises FileNotFoundError where it is gone, `Damaged` where it is bad."""

    def __init__(self, directory: str, name: str) -> None:
        self.name = name
        self.base = f"{directory}/{name}"
        self._fan: tuple[int, ...] | None = None
        self._index = b""

    def __len__(self) -> int:
        return self._fanout()[255]

    def is_ours(self) -> bool:
        """Whether our own maintenance may replace it.

        Of the mode that we give it and with the beginning of our text it is ours too: the power went
        before the text was written. git makes its own with 0600.
        """
        text, mode = self._keep()
        torn = mode == KEEP_MODE and REPACKED_TEXT.startswith(text.rstrip(b"\0"))
        return text in (KEEP_TEXT, REPACKED_TEXT) or torn

    def is_repacked(self) -> bool:
        """Whether it is ours and was encoded anew already. False where its mark was torn: it is done once more."""
        return self._keep()[0] == REPACKED_TEXT

    def _keep(self) -> tuple[bytes, int]:
        """Text and mode of its `.keep`; a mode of -1 where there is none."""
        try:
            fd, size = open_sized(self.base + ".keep")
        except OSError:
            return b"", -1
        try:
            return read_all(fd, size, 64), stat.S_IMODE(os.fstat(fd).st_mode)
        finally:
            os.close(fd)

    def _fanout(self) -> tuple[int, ...]:
        if self._fan is None:
            path = self.base + ".idx"
            fd, size = open_sized(path)
            try:
                raw = read_all(fd, size, _IDX_IN_MEMORY_BYTES + 1 if size <= _IDX_IN_MEMORY_BYTES else IDX_NAMES_AT)
            finally:
                os.close(fd)
            if len(raw) < IDX_NAMES_AT or raw[:8] != b"\xfftOc\0\0\0\x02":
                raise Damaged(f"{path} is damaged: it is no index of version 2", path=path)
            fan = struct.unpack(">256L", raw[8:IDX_NAMES_AT])
            if any(a > b for a, b in itertools.pairwise(fan)) or size < IDX_NAMES_AT + 28 * fan[255] + 40:
                raise Damaged(f"{path} is damaged: it is cut or its table is wrong", path=path)
            self._fan, self._index = fan, raw if size <= _IDX_IN_MEMORY_BYTES else b""
        return self._fan

    def forget(self) -> None:
        """Give back the index; it is read again when it is needed."""
        self._fan, self._index = None, b""

    def _part(self, at: int, size: int) -> bytes:
        if self._index:
            part = self._index[at : at + size]
        else:
            fd = open_file(self.base + ".idx")
            try:
                part = os.pread(fd, size, at)
            finally:
                os.close(fd)
        if len(part) < size:
            raise Damaged(f"{self.base}.idx is damaged: it is cut", path=f"{self.base}.idx")
        return part

    def find(self, sha: bytes) -> int | None:
        """Where the object's entry begins, or None."""
        fan = self._fanout()
        first = sha[0]
        low, high = fan[first - 1] if first else 0, fan[first]
        if low == high:
            return None
        names, start = self._part(IDX_NAMES_AT + 20 * low, 20 * (high - low)), low
        while low < high:
            middle = (low + high) // 2
            name = names[20 * (middle - start) : 20 * (middle - start) + 20]
            if name == sha:
                return self._offset(middle)
            if name < sha:
                low = middle + 1
            else:
                high = middle
        return None

    def id_at(self, position: int) -> bytes:
        return self._part(IDX_NAMES_AT + 20 * position, 20)

    def _offset(self, position: int) -> int:
        count = len(self)
        (at,) = struct.unpack(">L", self._part(IDX_NAMES_AT + 24 * count + 4 * position, 4))
        if at < 1 << 31:
            return int(at)
        (large,) = struct.unpack(">Q", self._part(IDX_NAMES_AT + 28 * count + 8 * (at & 0x7FFFFFFF), 8))
        return int(large)

    def entries(self) -> list[Entry]:
        """Every entry, in order of ids."""
        count = len(self)
        raw = self._part(0, IDX_NAMES_AT + 28 * count)
        crc_at, offset_at = IDX_NAMES_AT + 20 * count, IDX_NAMES_AT + 24 * count
        names = [name for (name,) in struct.iter_unpack("20s", raw[IDX_NAMES_AT:crc_at])]
        crcs = struct.unpack(f">{count}L", raw[crc_at:offset_at])
        offsets = struct.unpack(f">{count}L", raw[offset_at:])
        if count and max(offsets) >= 1 << 31:
            offsets = tuple(at if at < 1 << 31 else self._offset(i) for i, at in enumerate(offsets))
        return list(zip(names, offsets, crcs, strict=True))

    def open(self) -> _OpenPack:
        return _OpenPack(self.base + ".pack")

    def size_bytes(self) -> int:
        return os.stat(self.base + ".pack").st_size


class ObjectStore:
    """All objects of one repository.

    Guarantees: an object that exists is found although another program swaps packs at the same time,
    however slow this reader is. Content is returned whole and verified, or `Damaged` is raised.
    The lock protects the caches, the list of packs and the rolling pack's growth.

    A swap as seen by a reader:
      1. the reader finds the object in pack A
      2. a writer publishes pack B (which holds all of A) and removes A
      3. the reader cannot open A; it lists the packs again and finds the object in B
    Before the reader opens B, that may be gone, too. So an object is missing only where the packs were the
    same before the look through all of them and after it.
    """

    def __init__(self, git_dir: Path) -> None:
        self._objects = str(git_dir / "objects")
        self.pack_dir = f"{self._objects}/pack"
        self._lock = threading.RLock()
        self._cache: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        self._cached_bytes = 0
        self._trees: OrderedDict[bytes, Tree] = OrderedDict()
        self._packs: list[PackFile] = []
        self._listing_is_old = True
        #: during one look: objects that are being read, or could not be; each is tried once
        self._bad: dict[bytes, Damaged] = {}
        self.rolling: RollingPack | None = None

    def rest(self) -> None:
        """Only what was met last stays in memory, and the rolling pack."""
        with self._lock:
            self._shrink(_RESTING_BYTES)
            while len(self._trees) > _RESTING_TREES:
                self._trees.popitem(last=False)
            for pack in self._packs:
                pack.forget()

    def close(self) -> None:
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0
            self._trees.clear()
            self._packs = []
            self._listing_is_old = True
            self.rolling = None

    # --- reading ---

    def read(self, sha: bytes) -> tuple[int, bytes]:
        """Kind and content. Raises `Damaged` when it is missing or cannot be read."""
        with self._lock:
            return self._read(sha, 0)

    def _read(self, sha: bytes, depth: int) -> tuple[int, bytes]:
        found = self._cache.get(sha)
        if found is not None:
            self._cache.move_to_end(sha)
            return found
        rolling = self.rolling  # may be exchanged by the writer at any moment
        if rolling is not None and sha in rolling:
            found = rolling.read(sha, lambda base: self._read(base, depth + 1))
        else:
            found = self._from_disk(sha, depth)
        self._remember(sha, found)
        return found

    def _from_disk(self, sha: bytes, depth: int) -> tuple[int, bytes]:
        packs = self._listed()
        if depth:
            # Who asks for a base looks again for it; each base of a chain would double the looks for the next.
            return self._look(sha, packs, depth)
        for look in range(_LOOKS):
            try:
                return self._look(sha, packs, depth)
            except Damaged as error:
                problem = error
            finally:
                self._bad.clear()
            before, packs = {pack.name for pack in packs}, self.rescan()
            if look and before == {pack.name for pack in packs}:
                break
        raise problem

    def _look(self, sha: bytes, packs: list[PackFile], depth: int) -> tuple[int, bytes]:
        """A copy that is whole, if there is one in `packs` or in a file of its own. Raises `Damaged`."""
        if depth > _DEEPEST:
            raise Damaged(f"object {sha.hex()} is damaged: its chain of deltas is too long", path=sha.hex())
        if sha in self._bad:
            raise self._bad[sha]
        self._bad[sha] = Damaged(f"object {sha.hex()} is damaged: its deltas go in circles", path=sha.hex())
        problem: Damaged | None = None
        for found in self._copies(sha, packs, depth):
            if isinstance(found, Damaged):
                problem = found
            elif object_id(*found) == sha:
                del self._bad[sha]
                return found
            else:
                problem = Damaged(f"object {sha.hex()} is damaged: it has another content", path=sha.hex())
        self._bad[sha] = problem or Damaged(f"object {sha.hex()} is missing", path=sha.hex(), missing=True)
        raise self._bad[sha]

    def _copies(self, sha: bytes, packs: list[PackFile], depth: int) -> Iterator[tuple[int, bytes] | Damaged]:
        """Each copy that can be found, as its content or as what is wrong with it."""
        for number, pack in enumerate(list(packs)):
            try:
                at = pack.find(sha)
                if at is None:
                    continue
                with pack.open() as source:
                    content = read_entry(source, at, lambda base: self._read(base, depth + 1))
            except FileNotFoundError:
                continue
            except Damaged as error:
                yield error
            except OSError as error:
                yield _unreadable(error, pack.base)
            else:
                if number > 3 and pack in packs:
                    # The next object is most likely in the same pack.
                    packs.remove(pack)
                    packs.insert(0, pack)
                yield content
        loose = self._loose(sha)
        if loose is not None:
            yield loose

    def _loose(self, sha: bytes) -> tuple[int, bytes] | Damaged | None:
        path = self._loose_path(sha)
        try:
            raw = read_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return _unreadable(error, path)
        try:
            inflater = zlib.decompressobj()
            data = inflater.decompress(raw, MAX_OBJECT_BYTES + 64)
            head, _, content = data.partition(b"\0")
            name, _, size = head.partition(b" ")
            if not inflater.eof or inflater.unused_data or int(size) != len(content):
                raise ValueError("its length is wrong")
            return KINDS[name], content
        except (zlib.error, ValueError, KeyError) as error:
            return Damaged(f"{path} is damaged: {error}", path=path)

    def _loose_path(self, sha: bytes) -> str:
        text = sha.hex()
        return f"{self._objects}/{text[:2]}/{text[2:]}"

    def tree(self, sha: bytes) -> Tree:
        with self._lock:
            tree = self._trees.get(sha)
            if tree is None:
                tree = Tree.parse(self.read_kind(sha, TREE)) if sha != _EMPTY_TREE else EMPTY
                self._remember_tree(sha, tree)
            else:
                self._trees.move_to_end(sha)
            return tree

    def blob(self, sha: bytes) -> bytes:
        return self.read_kind(sha, BLOB)

    def commit(self, sha: bytes) -> bytes:
        return self.read_kind(sha, COMMIT)

    def read_kind(self, sha: bytes, kind: int) -> bytes:
        found, data = self.read(sha)
        if found != kind:
            raise Damaged(f"object {sha.hex()} is not of the kind that it should be", path=sha.hex())
        return data

    def in_our_packs(self, sha: bytes) -> bool:
        """Whether it was this library that wrote the object (so its content is not lost with a file that holds it)."""
        with self._lock:
            rolling = self.rolling
            if rolling is not None and sha in rolling:
                return True
            for pack in self.rescan():
                with contextlib.suppress(OSError, Damaged):
                    if pack.find(sha) is not None and pack.is_ours():
                        return True
            return False

    def is_torn(self, data: bytes) -> bool:
        """Whether `data` is the beginning of a recent content of ours, or that and zeros: what a power
        cut leaves of a file that was being copied into the work tree."""
        beginning = data.rstrip(b"\0")
        with self._lock:
            for sha in self._newest():
                kind, content = self._read(sha, 0)
                if kind == BLOB and content.startswith(beginning):
                    return True
            return False

    def _newest(self) -> list[bytes]:
        """What the last batch wrote comes first, though it may have filled its pack, which is then sealed, and
        its branch may never have moved."""
        if self.rolling is not None and (ids := self.rolling.ids()):
            return ids
        for pack in self.rescan():
            with contextlib.suppress(OSError, Damaged):
                if pack.is_ours():
                    entries = sorted(pack.entries(), key=lambda entry: -entry[1])
                    return [entry[0] for entry in entries[:_NEWEST]]
        return []

    # --- the list of packs ---

    def packs(self) -> list[PackFile]:
        with self._lock:
            return list(self._listed())

    def _listed(self) -> list[PackFile]:
        return self.rescan() if self._listing_is_old else self._packs

    def rescan(self) -> list[PackFile]:
        """Look which packs there are now. Newest first: it is the newest that are asked for."""
        with self._lock:
            known = {pack.name: pack for pack in self._packs}
            found: list[tuple[int, PackFile]] = []
            names = set(names_in(self.pack_dir))
            for name in names:
                if name.endswith(".idx") and name[:-4] + ".pack" in names:
                    with contextlib.suppress(FileNotFoundError):
                        changed = os.stat(f"{self.pack_dir}/{name}").st_mtime_ns
                        found.append((changed, known.get(name[:-4]) or PackFile(self.pack_dir, name[:-4])))
            self._packs = [pack for _, pack in sorted(found, key=lambda item: (-item[0], item[1].name))]
            self._listing_is_old = False
            return self._packs

    def forget_packs(self) -> None:
        with self._lock:
            self._listing_is_old = True

    # --- what is being written ---

    def add(self, kind: int, data: bytes, base: bytes | None = None) -> bytes:
        """Put a new object into the rolling pack and the cache; its id."""
        sha = object_id(kind, data)
        if sha == base:
            return sha
        with self._lock:
            rolling = self.rolling
            assert rolling is not None
            if base is not None and len(data) >= MIN_DELTA_BYTES and base in rolling:
                rolling.add(kind, sha, data, base, self._read(base, 0)[1])
            else:
                rolling.add(kind, sha, data)
            self._remember(sha, (kind, data))
        return sha

    def add_tree(self, tree: Tree, base: bytes | None) -> bytes:
        sha = self.add(TREE, tree.raw, base)
        with self._lock:
            self._remember_tree(sha, tree)
        return sha

    def _remember(self, sha: bytes, found: tuple[int, bytes]) -> None:
        size = len(found[1])
        if size > _CACHE_BYTES // 4 or sha in self._cache:
            return
        self._cache[sha] = found
        self._cached_bytes += size + 200
        if self._cached_bytes > _CACHE_BYTES:
            self._shrink(_CACHE_BYTES)

    def _shrink(self, limit_bytes: int) -> None:
        while self._cached_bytes > limit_bytes:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= len(dropped[1]) + 200

    def _remember_tree(self, sha: bytes, tree: Tree) -> None:
        self._trees[sha] = tree
        if len(self._trees) > _CACHED_TREES:
            self._trees.popitem(last=False)


_EMPTY_TREE = object_id(TREE, b"")


def _unreadable(error: OSError, path: str) -> Damaged:
    """EIO and the like say that the file is bad; anything else (EMFILE) says something about us, and is raised."""
    if error.errno in _UNREADABLE:
        return damaged(error, path)
    raise read_failed(error, path) from error
