"""Is everything there, and is it what it says it is? Nothing is changed, nothing is trusted.

Whether each commit is a legal step of a job is a higher floor's question; here it is about bytes:
every object that the branch reaches exists and hashes to its id, our own history is a line, packs
have their checksums, index and work tree are copies of the newest commit, and nothing of ours lies about.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..durable import is_locked
from ..durable.files import lstat, names_in, open_file, read_file
from ..errors import Damaged, OpenJobsError
from .draft import AUTHOR
from .heal import Listing, list_files
from .index import Index, entry_sha
from .locks import is_ours
from .objects import ObjectStore
from .packdir import is_whole
from .packs import BLOB, object_id
from .packscan import PackRegion, scan_pack
from .refs import read_branch, read_ref
from .trees import DIRECTORY, SUBMODULE
from .view import parse_commit

#: how often it is looked whether a writer has finished, and how many times
_FINISH_S = 0.02
_FINISH_TRIES = 250


def check(path: Path, objects: ObjectStore) -> list[str]:
    """One line for each thing that is wrong; none where all is well. No other process may be writing."""
    git_dir = str(path / ".git")
    problems: list[str] = []
    try:
        _let_finish(git_dir)
        problems += _locks(git_dir)
        problems += _packs(git_dir, objects)
        commit = read_ref(git_dir, read_branch(git_dir))
        if commit is None:
            return [*problems, "the branch has no commit"]
        problems += _history(objects, commit)
        tree = parse_commit(objects.commit(bytes.fromhex(commit)), commit).tree
        listing = list_files(objects, tree)
        problems += _index(git_dir, listing)
        problems += _files(path, listing)
    except (OpenJobsError, OSError) as error:
        problems.append(str(error))
    return problems


def _locks(git_dir: str) -> Iterator[str]:
    paths = [f"{git_dir}/index.lock", f"{git_dir}/HEAD.lock"]
    for directory, _, names in os.walk(f"{git_dir}/refs"):
        paths += [f"{directory}/{name}" for name in names if name.endswith(".lock")]
    for path in paths:
        if os.path.lexists(path):
            yield f"{path}: a lock {'of a killed process of ours' if is_ours(path) else 'of another program'}"
    scratch = f"{git_dir}/openjobs/scratch"
    if os.path.isdir(scratch):
        for name in sorted(os.listdir(scratch)):
            yield f"{scratch}/{name}: a temporary file of a killed process of ours"


def _let_finish(git_dir: str) -> None:
    """Wait for a writer that has answered and is still putting things in order; not for long."""
    for _ in range(_FINISH_TRIES):
        if not is_locked(f"{git_dir}/openjobs/lock"):
            return
        time.sleep(_FINISH_S)


def _packs(git_dir: str, objects: ObjectStore) -> Iterator[str]:
    odd = _odd_files(objects.pack_dir)
    if odd:
        _let_finish(git_dir)
        still = _odd_files(objects.pack_dir)
        yield from (f"{objects.pack_dir}/{name}: {what}" for name, what in odd.items() if still.get(name) == what)
    for pack in list(objects.rescan()):
        if not is_whole(pack) and os.path.exists(pack.base + ".pack"):  # a writer may have replaced it meanwhile
            yield f"{pack.base}.pack is damaged: a checksum is wrong"


def _odd_files(pack_dir: str) -> dict[str, str]:
    names = set(names_in(pack_dir))
    odd = {}
    for name in sorted(names):
        base, end = os.path.splitext(name)
        if end in (".pack", ".idx", ".keep") and {base + ".pack", base + ".idx"} - names:
            odd[name] = "half of a pack"
        elif end == ".tmp":
            odd[name] = "a temporary file of a killed process"
    return odd


def _history(objects: ObjectStore, commit: str) -> Iterator[str]:
    """Every object is read, and so hashed. One that was seen as what it should be is not read again."""
    seen: set[bytes] = set()
    trees: set[bytes] = set()
    blobs = _whole_blobs(objects)
    queue = [commit]
    while queue:
        at = queue.pop()
        sha = bytes.fromhex(at)
        if sha in seen:
            continue
        seen.add(sha)
        try:
            raw = objects.commit(sha)
            found = parse_commit(raw, at)
        except Damaged as error:
            yield str(error)
            continue
        if found.author.encode() == AUTHOR and len(found.parents) > 1:
            yield f"commit {at} is ours and has {len(found.parents)} parents"
        queue += found.parents
        yield from _tree(objects, found.tree, trees, blobs)


def _whole_blobs(objects: ObjectStore) -> set[bytes]:
    """Blobs that were found whole by reading packs from end to end: many times quicker than one after the other,
    since each is a delta against the one before. What is not among them is read by itself."""
    whole: set[bytes] = set()
    for pack in objects.packs():
        with contextlib.suppress(OSError, Damaged):
            places = {sha: at for sha, at, _ in pack.entries()}
            fd = open_file(pack.base + ".pack")
            try:
                region = PackRegion(fd, 0, os.fstat(fd).st_size, pack.base + ".pack")
                whole.update(sha for kind, sha, at, _ in scan_pack(region) if kind == BLOB and places.get(sha) == at)
            finally:
                os.close(fd)
    return whole


def _tree(objects: ObjectStore, sha: bytes, trees: set[bytes], blobs: set[bytes]) -> Iterator[str]:
    queue = [sha]  # and not a call for each directory in another: somebody's may be nested deeper than those go
    while queue:
        at = queue.pop()
        if at in trees:
            continue
        trees.add(at)
        try:
            entries = objects.tree(at).entries
        except Damaged as error:
            yield str(error)
            continue
        for mode, below, _ in entries.values():
            if mode == DIRECTORY:
                queue.append(below)
            elif mode != SUBMODULE and below not in blobs:
                blobs.add(below)
                try:
                    objects.blob(below)
                except Damaged as error:
                    yield str(error)


def _index(git_dir: str, listing: Listing) -> Iterator[str]:
    try:
        index = Index.load(f"{git_dir}/index")
    except FileNotFoundError:
        yield f"{git_dir}/index is missing"
        return
    for name in index.unmerged():
        yield f"index: {_text(name)} has a conflict"
    for name, (_, sha) in listing.items():
        entry = index.get(name)
        if entry is None:
            yield f"index: {_text(name)} is missing"
        elif entry_sha(entry) != sha:
            yield f"index: {_text(name)} is not as in the newest commit"
    yield from (f"index: {_text(name)} is not in the newest commit" for name in index.names() if name not in listing)


def _files(root: Path, listing: Listing) -> Iterator[str]:
    for name, (mode, sha) in listing.items():
        path = f"{root}/{_text(name)}"
        if mode == SUBMODULE:
            continue
        if lstat(path) is None:
            yield f"{path} is missing in the work tree"
            continue
        try:
            data = os.fsencode(os.readlink(path)) if os.path.islink(path) else read_file(path)
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"
            continue
        if object_id(BLOB, data) != sha:
            yield f"{path} is not as in the newest commit"


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
