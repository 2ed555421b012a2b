"""Encoding sealed packs anew, so that a job costs what has changed and not what stood around it.

A sealed pack begins with whole blobs, since the packs before it may be joined or gone on with by
others; a quarter of all bytes are such repetitions. Here packs are read a chunk at a time, their
commits followed along first parents, oldest first, and every file and directory becomes a delta
against its version before. Commits become deltas against the first one of the same job.

Guarantees: no object is dropped, whether a commit leads to it or not. A new pack is read back
whole and every object in it hashed before it gets its name; only then do the old ones go. What is
done is marked in its `.keep`, so that nothing is done twice but small packs, which are taken again
when at least as much has come after them (each byte is so encoded a logarithmic number of times).
Assumption: the session's flock is held in `step`, and may be given back between two steps.

A step as others see it:
  1. the new pack appears, with every object of its chunk
  2. a source goes once each of its objects is in such a pack
  3. who is killed between the two leaves objects twice, which `PackDirectory.mend` sees to
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from ..durable.files import open_file, read_file
from ..errors import Damaged
from .objects import ObjectStore, PackFile
from .packdir import PackDirectory, checksum_fits, is_whole
from .packs import (
    COMMIT,
    KIND_NAMES,
    OFS_DELTA,
    PACK_HEADER_BYTES,
    REF_DELTA,
    TREE,
    Entry,
    apply_delta,
    deflate,
    encode_delta,
    encode_index,
    entry_header,
    make_delta,
    object_id,
    offset_bytes,
    read_header,
    read_offset,
)
from .trees import DIRECTORY, EMPTY, SUBMODULE, Tree

#: packs are taken together up to this size; a larger one alone, in parts of so many commits. Both bound how
#: long other processes wait, and how much is in memory
_CHUNK_BYTES = 2 << 20
_CHUNK_COMMITS = 1024
#: chains: a version of a page at the end of the longest one is read in a few milliseconds
_FILE_CHAIN = 250
_TREE_CHAIN = 40
#: a delta against the last whole tree is taken if it is no more than this larger: it makes chains short
_STAR_BYTES = 12
_LEVEL = 9
_CACHE_BYTES = 16 << 20
#: deeper directories are carried over without a look inside
_DEEPEST = 40
#: ids by which it is found out in which packs a part of a source is already
_SAMPLES = 64

#: how many entries are written at once
_PARTS = 1000

_JOB = re.compile(rb"^Openjobs-Job: (.+)$", re.MULTILINE)
_TOKENS = re.compile(rb"[^ \n]*[ \n]*")
#: a token below this is cheaper written than copied, unless it continues a copy
_COPIED_BYTES = 6


#: a commit's tree and first parent (nothing where it has none)
Links = tuple[bytes, bytes]


class Repacker:
    """One run over a repository, in steps. What is damaged is left as it is, and named in `damaged`."""

    def __init__(self, packs: PackDirectory, objects: ObjectStore) -> None:
        self._packs = packs
        self._objects = objects
        self._seen: set[str] = set()
        self._opened: _Chunk | None = None
        self.damaged: list[str] = []

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def step(self, busy: set[str]) -> bool:
        """Encode one chunk; False when nothing is left to do. Raises OSError.

        `busy` are the packs that the next batch goes on with.
        """
        group, done = self._choose(busy)
        if not group:
            return False
        try:
            is_last, name = self._encode(group, done)
        except Damaged as error:
            # The checksums are right and the content is not: readers may still find much in it.
            bad = [pack for pack in group if pack.base + ".pack" == error.path] or group
            self.damaged += [pack.base + ".pack" for pack in bad]
            self._seen.update(pack.name for pack in bad)
            self.close()
            return True
        if is_last:
            for pack in group:
                if pack.name != name:
                    self._packs.remove(pack.name)
            self._seen.update(pack.name for pack in group)
            self.close()
        if name is not None:
            # Small, it may be taken again another time, but not in this run.
            self._seen.add(name)
        self._objects.forget_packs()
        return True

    def _encode(self, group: Sequence[PackFile], done: Sequence[PackFile]) -> tuple[bool, str | None]:
        """One new pack from a group, or none; whether the group is whole in new ones now."""
        chunk = self._open(group)
        encoder = _Encoder(chunk.sources, _ids_in(done, chunk.sources))
        is_last = not encoder.encode(chunk.commits, _CHUNK_COMMITS)
        entries = sorted(encoder.entries)
        if not entries:
            return is_last, None

        def check(pack: str, index: str) -> None:
            try:
                verify(pack, index, entries)
            except Damaged as error:
                chunk.sources.blame({sha for sha, at, _ in entries if at == error.offset}, error)
                raise

        return is_last, self._packs.publish_stream(encoder.blocks, entries, repacked=True, check=check)

    def _open(self, group: Sequence[PackFile]) -> _Chunk:
        """A large source stays open from part to part: whatever becomes of its name, its bytes are the same."""
        names = [pack.name for pack in group]
        if self._opened is None or self._opened.names != names:
            self.close()
            self._opened = _Chunk(group, self._objects)
        return self._opened

    def _choose(self, busy: set[str]) -> tuple[list[PackFile], list[PackFile]]:
        """What is encoded next, oldest first, and the packs that were encoded before."""
        fresh: list[tuple[PackFile, int]] = []
        done: list[tuple[PackFile, int]] = []
        for pack in reversed(list(self._objects.rescan())):
            with contextlib.suppress(FileNotFoundError):
                if pack.name not in busy and pack.is_ours():
                    (done if pack.is_repacked() else fresh).append((pack, pack.size_bytes()))
        group: list[PackFile] = []
        total = 0
        for pack, size in fresh:
            if pack.name in self._seen:
                continue
            if group and total + size > _CHUNK_BYTES:
                break
            if not is_whole(pack):
                self._seen.add(pack.name)
                self.damaged.append(f"{pack.base}.pack")
                continue
            group.append(pack)
            total += size
        again: set[str] = set()
        if 0 < total < _CHUNK_BYTES:
            for pack, size in sorted(done, key=lambda item: item[1]):
                if size > total or total + size > _CHUNK_BYTES:
                    break
                if pack.name not in self._seen and is_whole(pack):
                    again.add(pack.name)
                    total += size
        before = [pack for pack, _ in done if pack.name in again]
        return before + group, [pack for pack, _ in done if pack.name not in again]


# --- what is read -----------------------------------------------------------------------------------------


class _Cache:
    """Contents by key, the least recently used dropped first."""

    def __init__(self) -> None:
        self._found: OrderedDict[object, tuple[int, bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, key: object) -> tuple[int, bytes] | None:
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        return found

    def put(self, key: object, found: tuple[int, bytes]) -> None:
        if key in self._found:
            return
        self._found[key] = found
        self._bytes += len(found[1]) + 200
        while self._bytes > _CACHE_BYTES and len(self._found) > 1:
            _, dropped = self._found.popitem(last=False)
            self._bytes -= len(dropped[1]) + 200


class _Source:
    """A pack while it is encoded anew. The file stays open, so it may be removed meanwhile."""

    def __init__(self, path: str, entries: Iterable[Entry]) -> None:
        self.name = path
        #: in order of their places
        self.ids = {at: sha for sha, at, _ in sorted(entries, key=lambda entry: entry[1])}
        self._fd = open_file(path)
        self._end = os.fstat(self._fd).st_size - 20
        #: all of a small one: asking the system for every entry costs as much as inflating it
        self._raw = os.pread(self._fd, self._end + 20, 0) if self._end <= 2 * _CHUNK_BYTES else b""
        self._ends = dict(zip(self.ids, [*itertools.islice(self.ids, 1, None), self._end], strict=True))

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def chunk(self, at: int, size: int) -> bytes:
        return self._raw[at : at + size] if self._raw else os.pread(self._fd, size, at)

    def entry(self, at: int) -> tuple[int, int, bytes]:
        """Kind, where the base's entry begins (0 for none), and the content or delta. Raises `Damaged`."""
        raw = self.chunk(at, self._ends[at] - at)
        try:
            kind, size, used = read_header(raw)
            base_at = 0
            if kind == OFS_DELTA:
                distance, used = read_offset(raw, used)
                base_at = at - distance
            data = zlib.decompress(raw[used:], bufsize=max(size, 64)) if kind != REF_DELTA else b""
        except (IndexError, zlib.error) as error:
            raise Damaged(f"{self.name} is damaged at byte {at}: {error}", path=self.name, offset=at) from None
        return kind, base_at, data

    def checksum(self) -> bytes:
        return self.chunk(self._end, 20)

    def read(self, at: int, cache: _Cache) -> tuple[int, bytes] | None:
        """Kind and content, not hashed; None where its chain leads out of the pack."""
        sha = self.ids[at]
        deltas: list[tuple[int, bytes]] = []
        found = cache.get(sha)
        while found is None:
            kind, base_at, data = self.entry(at)
            if kind in KIND_NAMES:
                found = kind, data
            elif kind != OFS_DELTA or base_at not in self.ids:
                return None
            else:
                deltas.append((at, data))
                at = base_at
                found = cache.get(self.ids[at])
        for at, delta in reversed(deltas):
            found = found[0], apply_delta(self, at, found[1], delta)
        cache.put(sha, found)
        return found

    def kind(self, at: int) -> int:
        """The kind at the end of the entry's chain, or REF_DELTA where it leads out of the pack."""
        for _ in self.ids:
            raw = self.chunk(at, 32)
            try:
                kind, _, used = read_header(raw)
                if kind != OFS_DELTA:
                    return kind
                at -= read_offset(raw, used)[0]
                if at not in self.ids:
                    break
            except IndexError:
                break
        raise Damaged(f"{self.name} is damaged at byte {at}: the delta has no base", path=self.name, offset=at)


def _source(pack: PackFile) -> _Source:
    return _Source(pack.base + ".pack", pack.entries())


class _Sources:
    """The objects of some packs, by id; others are read from the store.

    `Damaged` has the pack that the object is in as its `path`, wherever else its base may be.
    """

    def __init__(self, packs: Iterable[_Source], objects: ObjectStore) -> None:
        self._objects = objects
        self._at: dict[bytes, tuple[_Source, int]] = {}
        for pack in packs:
            for at, sha in pack.ids.items():
                self._at.setdefault(sha, (pack, at))
        self._cache = _Cache()

    def __contains__(self, sha: bytes) -> bool:
        return sha in self._at

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._at)

    def kind(self, sha: bytes) -> int:
        pack, at = self._at[sha]
        kind = pack.kind(at)
        return kind if kind in KIND_NAMES else self.read(sha)[0]

    def delta(self, sha: bytes) -> tuple[bytes, bytes] | None:
        """The base's id and the delta, where the object is one."""
        pack, at = self._at[sha]
        kind, base_at, data = pack.entry(at)
        base = pack.ids.get(base_at)
        return (base, data) if kind == OFS_DELTA and base is not None else None

    def read(self, sha: bytes) -> tuple[int, bytes]:
        """Kind and content, not hashed: the new pack is, as a whole."""
        place = self._at.get(sha)
        if place is None:
            return self._objects.read(sha)
        pack, at = place
        found = pack.read(at, self._cache)
        try:
            return found if found is not None else self._objects.read(sha)
        except Damaged as error:
            raise self._blamed(sha, error) from error

    def tree(self, sha: bytes) -> Tree:
        try:
            return Tree.parse(self.read(sha)[1])
        except Damaged as error:
            raise self._blamed(sha, error) from error

    def links(self, sha: bytes) -> Links:
        """Of a commit."""
        try:
            return _links(self.read(sha)[1])
        except Damaged as error:
            raise self._blamed(sha, error) from error

    def blame(self, ids: Iterable[bytes], error: Damaged) -> None:
        """Raises `Damaged` of the pack in which one of these objects is not what it should be."""
        for sha in ids:
            if object_id(*self.read(sha)) != sha:
                raise self._blamed(sha, error)

    def _blamed(self, sha: bytes, error: Damaged) -> Damaged:
        place = self._at.get(sha)
        return error if place is None else Damaged(f"{place[0].name}: {error}", path=place[0].name)


class _Chunk:
    """Some packs, open, and the commits in them."""

    def __init__(self, group: Sequence[PackFile], objects: ObjectStore) -> None:
        self.names = [pack.name for pack in group]
        with contextlib.ExitStack() as stack:
            self.sources = _Sources([stack.enter_context(_source(pack)) for pack in group], objects)
            #: tree and first parent of each
            self.commits = {sha: self.sources.links(sha) for sha in self.sources if self.sources.kind(sha) == COMMIT}
            self.close = stack.pop_all().close


def _ids_in(done: Iterable[PackFile], sources: _Sources) -> set[bytes]:
    """Which objects of the sources are in packs that were encoded before: of an earlier part, or by another process."""
    ids = list(sources)
    samples = ids[:: max(1, len(ids) // _SAMPLES)]
    found: set[bytes] = set()
    for pack in done:
        with contextlib.suppress(OSError, Damaged):
            if any(pack.find(sha) is not None for sha in samples) and is_whole(pack):
                found.update(sha for sha, _, _ in pack.entries() if sha in sources)
    return found


# --- what is written --------------------------------------------------------------------------------------


@attrs.frozen(slots=True)
class _Version:
    """The last version at a path that is in the new pack."""

    sha: bytes
    data: bytes


@attrs.define(slots=True)
class _Directory:
    """The last version of a directory, and the last that was written whole."""

    sha: bytes
    tree: Tree
    whole: _Version


class _Encoder:
    """A new pack, in memory until it is published."""

    def __init__(self, sources: _Sources, had: set[bytes]) -> None:
        self._sources = sources
        self._had = had
        self._parts: list[bytes] = []
        self._at = PACK_HEADER_BYTES
        #: where an object's entry begins, and how long its chain is
        self._where: dict[bytes, tuple[int, int]] = {}
        self._files: dict[bytes, bytes] = {}
        self._directories: dict[bytes, _Directory] = {}
        self._jobs: dict[bytes, _Version] = {}
        self._first_commit: _Version | None = None
        self.entries: list[Entry] = []

    def blocks(self) -> Iterator[bytes]:
        yield struct.pack(">4sLL", b"PACK", 2, len(self.entries))
        for first in range(0, len(self._parts), _PARTS):
            yield b"".join(self._parts[first : first + _PARTS])

    def encode(self, commits: Mapping[bytes, Links], limit: int) -> bool:
        """Take the oldest `limit` commits with what is theirs, or everything; whether something is left."""
        wanted = {sha: links for sha, links in commits.items() if sha not in self._had}
        for number, sha in enumerate(_oldest_first(wanted)):
            if number == limit:
                return True
            tree, parent = wanted[sha]
            self._commit(sha)
            self._directory(b"", tree, self._tree_before(parent, commits))
        for sha in self._sources:
            if self._is_wanted(sha):
                self._carry(sha)
        return False

    def _is_wanted(self, sha: bytes) -> bool:
        return sha in self._sources and sha not in self._where and sha not in self._had

    def _tree_before(self, parent: bytes, commits: Mapping[bytes, Links]) -> bytes:
        """The tree of a parent, or nothing where there is none to be read: then all of a tree is looked at."""
        if not parent or parent in commits:
            return commits[parent][0] if parent else b""
        with contextlib.suppress(Damaged):
            return self._sources.links(parent)[0]
        return b""

    def _commit(self, sha: bytes) -> None:
        data = self._sources.read(sha)[1]
        version = _Version(sha, data)
        job = _JOB.search(data)
        base = (self._jobs.get(job[1]) if job else None) or self._first_commit
        delta = token_delta(base.data, data) if base is not None else b""
        if base is not None and len(delta) < len(data) * 3 // 4:
            self._put_delta(sha, base.sha, delta)
        else:
            self._put(sha, COMMIT, data)
            self._first_commit = self._first_commit or version
        if job:
            self._jobs.setdefault(job[1], version)

    def _directory(self, path: bytes, sha: bytes, before: bytes) -> None:
        """A directory and what is new in it. Below one that is in no source nothing is, or it is carried over."""
        if sha == before or sha not in self._sources or path.count(b"/") > _DEEPEST:
            return
        last = self._directories.get(path)
        old = last.tree if last is not None and last.sha == before else self._parse_before(before)
        tree = self._parse(sha)
        if self._is_wanted(sha):
            self._put_tree(sha, tree, last, path)
        elif last is not None:
            last.sha, last.tree = sha, tree
        for name, (mode, child, _) in tree.entries.items():
            had = old.entries.get(name)
            if had is not None and had[1] == child:
                continue
            if mode == DIRECTORY:
                self._directory(path + name + b"/", child, had[1] if had and had[0] == DIRECTORY else b"")
            elif mode != SUBMODULE:
                self._file(path + name, child)

    def _parse(self, sha: bytes) -> Tree:
        return self._sources.tree(sha) if sha else EMPTY

    def _parse_before(self, sha: bytes) -> Tree:
        """What was there before only says what is new, so damage elsewhere is no reason to stop here."""
        try:
            return self._parse(sha)
        except Damaged:
            return EMPTY

    def _put_tree(self, sha: bytes, tree: Tree, last: _Directory | None, path: bytes) -> None:
        raw = tree.raw
        if last is not None:
            base, delta = last.whole.sha, make_delta(last.whole.data, raw)
            place = self._where.get(last.sha)
            if place is not None and place[1] < _TREE_CHAIN:
                against_last = make_delta(last.tree.raw, raw)
                if len(against_last) + _STAR_BYTES < len(delta):
                    base, delta = last.sha, against_last
            if len(delta) < len(raw) * 3 // 4:
                self._put_delta(sha, base, delta)
                last.sha, last.tree = sha, tree
                return
        self._put(sha, TREE, raw)
        self._directories[path] = _Directory(sha, tree, _Version(sha, raw))

    def _file(self, path: bytes, sha: bytes) -> None:
        base = self._files.get(path)
        if self._is_wanted(sha):
            if base is None or base == sha or self._where[base][1] >= _FILE_CHAIN:
                self._put(sha, *self._sources.read(sha))
            else:
                self._put_version(sha, base)
        if sha in self._where:
            self._files[path] = sha

    def _put_version(self, sha: bytes, base: bytes) -> None:
        known = self._sources.delta(sha)
        if known is not None and known[0] == base:
            self._put_delta(sha, base, known[1])
            return
        kind, data = self._sources.read(sha)
        base_kind, base_data = self._sources.read(base)
        delta = make_delta(base_data, data) if kind == base_kind else data
        if len(delta) < len(data) // 2:
            self._put_delta(sha, base, delta)
        else:
            self._put(sha, kind, data)

    def _carry(self, sha: bytes) -> None:
        """An object that no commit led to, as it stands where that is possible."""
        known = self._sources.delta(sha)
        place = self._where.get(known[0]) if known is not None else None
        if known is not None and place is not None and place[1] < _TREE_CHAIN:
            self._put_delta(sha, *known)
        else:
            self._put(sha, *self._sources.read(sha))

    def _put_delta(self, sha: bytes, base: bytes, delta: bytes) -> None:
        base_at, depth = self._where[base]
        head = entry_header(OFS_DELTA, len(delta)) + offset_bytes(self._at - base_at)
        self._append(sha, head + _squeezed(delta), depth + 1)

    def _put(self, sha: bytes, kind: int, data: bytes) -> None:
        self._append(sha, entry_header(kind, len(data)) + _squeezed(data), 0)

    def _append(self, sha: bytes, raw: bytes, depth: int) -> None:
        self._where[sha] = self._at, depth
        self.entries.append((sha, self._at, zlib.crc32(raw)))
        self._parts.append(raw)
        self._at += len(raw)


def _squeezed(data: bytes) -> bytes:
    """zlib, or stored where that is smaller: ids do not shrink."""
    small = deflate(data, _LEVEL)
    return small if len(small) <= len(data) + 11 else deflate(data, 0)


def _links(commit: bytes) -> Links:
    """Tree and first parent. Raises `Damaged`."""
    try:
        lines = commit.split(b"\n", 2)
        tree = bytes.fromhex(lines[0].removeprefix(b"tree ").decode("ascii"))
        second = lines[1]
        parent = bytes.fromhex(second[7:].decode("ascii")) if second.startswith(b"parent ") else b""
    except (ValueError, IndexError):
        raise Damaged("a commit is damaged: it has no tree") from None
    return tree, parent


def _oldest_first(commits: Mapping[bytes, Links]) -> Iterator[bytes]:
    """Each after its first parent, where that is among them."""
    seen: set[bytes] = set()
    for newest in commits:
        chain: list[bytes] = []
        sha = newest
        while sha in commits and sha not in seen:
            seen.add(sha)
            chain.append(sha)
            sha = commits[sha][1]
        yield from reversed(chain)


def token_delta(old: bytes, new: bytes) -> bytes:
    """A delta of short texts, by their words: two commits of a job differ in ids, time and status."""
    where: dict[bytes, int] = {}
    at = 0
    for token in _TOKENS.findall(old):
        where.setdefault(token, at)
        at += len(token)
    regions: list[tuple[int, int] | bytes] = []
    next_at = 0
    for token in _TOKENS.findall(new):
        if old.startswith(token, next_at):
            at = next_at
        else:
            at = where.get(token, -1) if len(token) >= _COPIED_BYTES else -1
        if at < 0:
            regions.append(token)
            # An id in place of another: what comes after it is most likely the same again.
            next_at += len(token)
        else:
            regions.append((at, len(token)))
            next_at = at + len(token)
    return encode_delta(len(old), len(new), regions)


# --- what is believed -------------------------------------------------------------------------------------


def verify(pack: str, index: str, entries: Sequence[Entry]) -> None:
    """Every object is read from the file and hashed; both files are what they should be. Raises `Damaged`, OSError."""
    with _Source(pack, entries) as source:
        cache = _Cache()
        for at, sha in source.ids.items():
            found = source.read(at, cache)
            if found is None or object_id(*found) != sha:
                raise Damaged(f"{pack} is damaged at byte {at}: it has another content", path=pack, offset=at)
        checksum = source.checksum()
    for path, fits in (
        (pack, checksum_fits(pack)),
        (index, read_file(index) == encode_index(entries, checksum)),
    ):
        if not fits:
            raise Damaged(f"{path} is damaged: it has other bytes than were written", path=path)
