"""A repository as one stream, and a repository from one: git's bundle, version 2 (gitformat-bundle(5)).

Writing copies the entries of every pack byte for byte into one pack (only distances to bases that moved
are written anew), so it costs what reading them costs. Nothing is locked: all packs are opened before
the first byte is written, and an open pack keeps its bytes whatever becomes of its name. Objects to
which no branch leads are carried too.

dulwich has bundles, but holds all objects of one in memory, and indexes a pack in as much; git itself
is never run. What is read may come from anybody: every object is inflated within a bound and hashed,
no base may be outside, and nothing is written but names that we made and paths that git, too, accepts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from ..durable import Disk
from ..durable.files import open_file
from ..errors import Damaged, InvalidInput, RepositoryRefused
from .create import make_skeleton, write_work_tree
from .draft import AUTHOR
from .heal import Listing
from .objects import ObjectStore, PackFile
from .packdir import PackDirectory
from .packs import (
    OFS_DELTA,
    PACK_HEADER_BYTES,
    REF_DELTA,
    Entry,
    deflate,
    encode_index,
    entry_header,
    offset_bytes,
    read_header,
    read_offset,
)
from .packscan import PackRegion, index_pack
from .refs import is_branch, list_refs, read_branch
from .scratch import Scratch
from .trees import DIRECTORY, EXECUTABLE, FILE, decode_name, path_parts
from .view import parse_commit

SIGNATURE = b"# v2 git bundle\n"
#: the most that stands before the pack: names of branches and tags
_HEAD_MOST_BYTES = 1 << 20
#: a session's commit holds a few thousand files at the most
MOST_FILES = 100_000
_DEEPEST = 40
_WINDOW_BYTES = 1 << 20
_TRIES = 50
_LOOSE = re.compile(r"[0-9a-f]{38}\Z")
_FAN = re.compile(r"[0-9a-f]{2}\Z")
_HEAD_LINE = re.compile(rb"([0-9a-f]{40}) ([^\n]{1,1024})\n\Z")
_PACK_TEMPORARY, _INDEX_TEMPORARY = "openjobs-pack.tmp", "openjobs-idx.tmp"


class Source(Protocol):
    """What a bundle is read from, once and in order."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end only."""
        ...


# --- writing ------------------------------------------------------------------------------------------------


def refs_of(path: Path, commit_id: str) -> tuple[str, dict[str, str]]:
    """The branch that HEAD is on, and every branch and tag with its object; HEAD's branch is at `commit_id`."""
    git_dir = str(path / ".git")
    branch = read_branch(git_dir)
    named = {name: sha for name, sha in list_refs(git_dir).items() if is_branch_or_tag(name)}
    return branch, {**named, branch: commit_id}


class BundleWriter:
    """The repository at `path` with some refs, as a bundle; other programs may write meanwhile."""

    def __init__(self, path: Path, branch: str, refs: Mapping[str, str]) -> None:
        """`branch` is what a clone of it checks out."""
        self._git_dir = path / ".git"
        self._refs = {"HEAD": refs[branch], **dict(sorted(refs.items()))}
        #: every object that is in it, known once the first piece is
        self.ids: set[bytes] = set()

    def head(self) -> bytes:
        """What stands before the pack."""
        names = [f"{sha} {name}\n".encode("utf-8", "surrogateescape") for name, sha in self._refs.items()]
        return SIGNATURE + b"".join(names) + b"\n"

    def pieces(self) -> Iterator[bytes]:
        """Raises `Damaged`, OSError."""
        with contextlib.ExitStack() as stack:
            objects = ObjectStore(self._git_dir)
            stack.callback(objects.close)
            packs = _opened(objects, stack)
            loose = [sha for sha in _loose(self._git_dir / "objects") if not any(sha in pack.ids for pack in packs)]
            self.ids.update(loose, *(pack.ids for pack in packs))
            yield self.head()
            digest = hashlib.sha1()
            for piece in _pack_pieces(packs, loose, objects, len(self.ids)):
                digest.update(piece)
                yield piece
            yield digest.digest()


def _pack_pieces(packs: Sequence[_Pack], loose: Sequence[bytes], objects: ObjectStore, count: int) -> Iterator[bytes]:
    yield struct.pack(">4sLL", b"PACK", 2, count)
    placed: dict[bytes, int] = {}
    at = PACK_HEADER_BYTES
    for pack in packs:
        moved: dict[int, int] = {}
        for sha, old_at, end in pack.entries:
            if sha in placed:
                moved[old_at] = placed[sha]
                continue
            piece = _moved(pack, objects, sha, old_at, end, moved, at)
            moved[old_at] = placed[sha] = at
            at += len(piece)
            yield piece
    for sha in loose:
        yield _whole(objects, sha)


def _moved(
    pack: _Pack, objects: ObjectStore, sha: bytes, old_at: int, end: int, moved: Mapping[int, int], at: int
) -> bytes:
    """The entry at `old_at` as it must be at `at`: the same, or with another distance to its base."""
    raw = pack.piece(old_at, end)
    try:
        kind, size, used = read_header(raw)
        if kind == REF_DELTA:
            return _whole(objects, sha)
        if kind != OFS_DELTA:
            return raw
        distance, start = read_offset(raw, used)
        return entry_header(OFS_DELTA, size) + offset_bytes(at - moved[old_at - distance]) + raw[start:]
    except (IndexError, KeyError):
        raise Damaged(f"{pack.name} is damaged at byte {old_at}", path=pack.name, offset=old_at) from None


class _Pack:
    """A pack that is being copied; its file stays open."""

    def __init__(self, pack: PackFile, stack: contextlib.ExitStack) -> None:
        self.name = pack.base + ".pack"
        self._fd = open_file(self.name)
        stack.callback(os.close, self._fd)
        in_order = sorted(pack.entries(), key=lambda entry: entry[1])
        ends = [*(entry[1] for entry in in_order[1:]), os.fstat(self._fd).st_size - 20]
        self.entries = [(sha, at, end) for (sha, at, _), end in zip(in_order, ends, strict=True)]
        self.ids = {sha for sha, _, _ in self.entries}
        self._window, self._window_at = b"", 0

    def piece(self, at: int, end: int) -> bytes:
        start = at - self._window_at
        if start < 0 or end - self._window_at > len(self._window):
            self._window, self._window_at, start = os.pread(self._fd, max(_WINDOW_BYTES, end - at), at), at, 0
        found = self._window[start : start + end - at]
        if len(found) < end - at:
            raise Damaged(f"{self.name} is damaged: it is cut", path=self.name, offset=at)
        return found


def _opened(objects: ObjectStore, stack: contextlib.ExitStack) -> list[_Pack]:
    """Every pack, at one moment: one that goes away between listing and opening is in another by then."""
    for left in reversed(range(_TRIES)):
        with contextlib.ExitStack() as attempt:
            try:
                packs = [_Pack(pack, attempt) for pack in reversed(list(objects.rescan()))]
            except FileNotFoundError:
                if not left:
                    raise
                continue
            stack.push(attempt.pop_all())
            return packs
    raise AssertionError("unreachable")


def _loose(directory: Path) -> Iterator[bytes]:
    for fan in sorted(filter(_FAN.match, os.listdir(directory))):
        for name in sorted(filter(_LOOSE.match, os.listdir(directory / fan))):
            yield bytes.fromhex(fan + name)


def _whole(objects: ObjectStore, sha: bytes) -> bytes:
    kind, data = objects.read(sha)
    return entry_header(kind, len(data)) + deflate(data)


# --- reading ------------------------------------------------------------------------------------------------


def read_head(source: Source) -> tuple[dict[str, str], bytes]:
    """The refs that a bundle names, and what was read of its pack already. Raises `Damaged`."""
    raw = b""
    while b"\n\n" not in raw and len(raw) <= _HEAD_MOST_BYTES and (piece := source.read(4096)):
        raw += piece
    head, end, rest = raw.partition(b"\n\n")
    refs: dict[str, str] = {}
    for line in (head + b"\n").removeprefix(SIGNATURE).splitlines(keepends=True):
        match = _HEAD_LINE.match(line)
        if match is None:
            raise Damaged("the bundle names something that is no branch and no tag of a whole repository")
        refs[match[2].decode("utf-8", "surrogateescape")] = match[1].decode()
    if not end or not raw.startswith(SIGNATURE):
        raise Damaged("it is no bundle of git's, version 2")
    return refs, rest


def restore(path: Path, disk: Disk, source: Source, branch: str, now: datetime) -> str:
    """A repository at `path`, which must not exist, from a bundle; the commit that it is at.

    Everything is synced when this returns, but for the name of `path`. Nobody may look at `path` before: a
    failure leaves what was made, for the caller to remove. Raises `Damaged`, `RepositoryRefused`, OSError.
    """
    refs, rest = read_head(source)
    refs.pop("HEAD", None)
    if not is_branch(branch) or branch not in refs:
        raise RepositoryRefused("the bundle lacks the branch that the session was on")
    make_skeleton(path, disk, branch)
    objects = ObjectStore(path / ".git")
    try:
        known = _place_pack(objects, disk, source, rest)
        for name, sha in refs.items():
            if bytes.fromhex(sha) not in known:
                raise Damaged(f"the bundle lacks {sha}, where {name} is")
        _write_refs(path, disk, refs, branch, now)
        tree = parse_commit(objects.commit(bytes.fromhex(refs[branch])), refs[branch]).tree
        write_work_tree(path, disk, objects, list_regular_files(objects, tree))
    finally:
        objects.close()
    return refs[branch]


def _place_pack(objects: ObjectStore, disk: Disk, source: Source, rest: bytes) -> set[bytes]:
    """The pack with its index and its `.keep`; the ids of what is in it."""
    scratch = Scratch(Path(objects.pack_dir), disk)

    def pieces() -> Iterator[bytes]:
        yield rest
        while piece := source.read(_WINDOW_BYTES):
            yield piece

    pack_path = scratch.write(_PACK_TEMPORARY, pieces())
    fd = open_file(pack_path)
    try:
        entries, checksum = index_pack(PackRegion(fd, 0, os.fstat(fd).st_size, "the bundle"))
    finally:
        os.close(fd)
    name = f"pack-{checksum.hex()}"
    PackDirectory(objects, disk).keep(name)
    index_path = scratch.write(_INDEX_TEMPORARY, encode_index(entries, checksum))
    scratch.move(pack_path, f"{objects.pack_dir}/{name}.pack")
    scratch.move(index_path, f"{objects.pack_dir}/{name}.idx")
    disk.sync_dir(objects.pack_dir)
    objects.forget_packs()
    return {entry[0] for entry in entries}


def _write_refs(path: Path, disk: Disk, refs: Mapping[str, str], branch: str, now: datetime) -> None:
    """The branch as a file of its own; all other names in one table, where no name can be a path."""
    git_dir = path / ".git"
    commit = refs[branch]
    others = {name: sha for name, sha in refs.items() if name != branch and is_branch_or_tag(name)}
    if others:
        table = "".join(f"{sha} {name}\n" for name, sha in sorted(others.items()))
        disk.write_new(git_dir / "packed-refs", table.encode("utf-8", "surrogateescape"))
    line = b"%s %s %s %d +0000\tclone: from an archive\n" % (b"0" * 40, commit.encode(), AUTHOR, int(now.timestamp()))
    for name in ("HEAD", branch):
        disk.make_dirs((git_dir / "logs" / name).parent)
        disk.write_new(git_dir / "logs" / name, line)
    disk.make_dirs((git_dir / branch).parent)
    disk.write_new(git_dir / branch, commit.encode() + b"\n")


def is_branch_or_tag(name: str) -> bool:
    return is_branch(name) or is_branch(name.replace("refs/tags/", "refs/heads/", 1))


def list_regular_files(objects: ObjectStore, tree: bytes) -> Listing:
    """Path, mode and id of every file. Raises `RepositoryRefused` for what no session holds: links, other
    repositories, names that lead elsewhere, more files than there can be."""
    found: Listing = {}

    def walk(at: bytes, where: bytes, depth: int) -> None:
        if depth > _DEEPEST:
            raise RepositoryRefused("a commit in it has directories nested too deeply")
        for name, (mode, sha, _) in objects.tree(at).entries.items():
            if len(found) >= MOST_FILES:
                raise RepositoryRefused(f"a commit in it has more than {MOST_FILES} files")
            if mode == DIRECTORY:
                walk(sha, where + name + b"/", depth + 1)
                continue
            path = where + name
            if mode not in (FILE, EXECUTABLE):
                raise RepositoryRefused(f"{decode_name(path)!r} in it is a link or another repository")
            try:
                path_parts(decode_name(path))
            except InvalidInput as error:
                raise RepositoryRefused(str(error)) from None
            found[path] = mode, sha

    walk(tree, b"", 0)
    return found


def same_objects(entries: Sequence[Entry], wanted: set[bytes]) -> bool:
    """Whether a pack holds these objects and no others."""
    return {entry[0] for entry in entries} == wanted
