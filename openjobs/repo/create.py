"""A new repository: made whole in a directory beside its place, then renamed there.

rename(2) onto a directory that is not empty fails, so of thirty processes that create the same
repository one wins, and the others find theirs unwanted.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ..durable import Disk, FileLock
from ..errors import OpenJobsError, OutcomeUnknown, SessionExists, StoreWriteFailed
from . import message
from .draft import AUTHOR, Draft, Head
from .heal import Listing
from .index import Index, make_entry, mode_of
from .objects import ObjectStore
from .packdir import PackDirectory
from .packs import RollingPack
from .refs import MAIN
from .trees import EXECUTABLE, decode_name

#: the bytes of a session are what they are: nobody's line endings, file watchers or hooks
_CONFIG = b"""[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
\tautocrlf = false
\tsafecrlf = false
\tfsmonitor = false
\tuntrackedCache = false
[commit]
\tgpgSign = false
"""
_ATTRIBUTES = b"* -text -filter -ident -working-tree-encoding\n"
_DIRECTORIES = (
    ".git",
    ".git/openjobs",
    ".git/openjobs/scratch",
    ".git/info",
    ".git/objects",
    ".git/objects/info",
    ".git/objects/pack",
    ".git/refs",
    ".git/refs/heads",
    ".git/refs/tags",
    ".git/logs",
    ".git/logs/refs",
    ".git/logs/refs/heads",
)
#: an unfinished directory without a lock is only removed when it is older
_ABANDONED_S = 3600
_numbers = itertools.count()


def create(
    path: Path,
    disk: Disk,
    files: Mapping[str, bytes],
    *,
    subject: str,
    trailers: Sequence[tuple[str, str]],
    now: datetime,
) -> None:
    """See `GitRepository.create`."""
    if os.path.lexists(path):
        raise SessionExists(f"{path} exists already")
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}.tmp")
    lock = FileLock(temporary / ".git" / "openjobs" / "lock", disk)
    try:
        _make(temporary, disk, lock, files, subject, trailers, now)
        _move(temporary, path, disk)
    except BaseException as error:
        _remove(temporary, disk)
        if not isinstance(error, OSError) or isinstance(error, OpenJobsError):
            raise
        if os.path.lexists(path):
            # Somebody else won; perhaps he has already swept ours away.
            raise SessionExists(f"{path} exists already") from None
        raise StoreWriteFailed(f"nothing was created: {error}", errno=error.errno) from error
    finally:
        lock.release()
    try:
        disk.sync_dir(path.parent)
    except OSError as error:
        raise OutcomeUnknown(f"{path}: {error}", errno=error.errno) from error
    _sweep(path, disk)


def _move(temporary: Path, path: Path, disk: Disk) -> None:
    try:
        disk.rename(temporary, path)
    except OSError as error:
        if not os.path.lexists(temporary):
            raise OutcomeUnknown(f"{path}: {error}", errno=error.errno) from error
        raise


def _make(
    root: Path,
    disk: Disk,
    lock: FileLock,
    files: Mapping[str, bytes],
    subject: str,
    trailers: Sequence[tuple[str, str]],
    now: datetime,
) -> None:
    _make_directories(root, disk)
    if not lock.try_acquire():
        raise FileNotFoundError(errno.ENOENT, "swept by another process", str(root))
    git_dir = root / ".git"
    objects = ObjectStore(git_dir)
    objects.rolling = RollingPack()
    commit, states = _first_commit(objects, files, subject, trailers, now)
    _write_settings(git_dir, disk, MAIN)
    PackDirectory(objects, disk).publish(objects.rolling.encode())
    index = Index()
    for name, sha in states.items():
        place = root / name
        _make_parents(root, place.parent, disk)
        disk.write_new(place, files[name])
        raw = name.encode("utf-8", "surrogateescape")
        found = os.lstat(place)
        index.put(raw, make_entry(raw, sha, mode_of(found), found))
    disk.write_new(git_dir / "index", index.encode())
    line = b"%s %s %s %d +0000\tcommit (initial): %s\n" % (
        b"0" * 40,
        commit.encode(),
        AUTHOR,
        int(now.timestamp()),
        message.clean_subject(subject).encode(),
    )
    disk.write_new(git_dir / "logs" / "HEAD", line)
    disk.write_new(git_dir / "logs" / MAIN, line)
    disk.write_new(git_dir / MAIN, commit.encode() + b"\n")
    for directory in reversed(_DIRECTORIES):
        disk.sync_dir(root / directory)
    disk.sync_dir(root)


def _make_directories(root: Path, disk: Disk) -> None:
    disk.mkdir(root)
    for directory in _DIRECTORIES:
        disk.mkdir(root / directory)


def _write_settings(git_dir: Path, disk: Disk, branch: str) -> None:
    disk.write_new(git_dir / "HEAD", f"ref: {branch}\n".encode())
    disk.write_new(git_dir / "config", _CONFIG)
    disk.write_new(git_dir / "info" / "attributes", _ATTRIBUTES)


def make_skeleton(root: Path, disk: Disk, branch: str) -> None:
    """A repository without objects and refs, in a new directory; for `bundle.restore`, which fills it."""
    _make_directories(root, disk)
    _write_settings(root / ".git", disk, branch)


def write_work_tree(root: Path, disk: Disk, objects: ObjectStore, listing: Listing) -> None:
    """The files of a commit and the index that says so, in a fresh repository; synced, with all directories."""
    index = Index()
    for name, (mode, sha) in listing.items():
        place = root / decode_name(name)
        _make_parents(root, place.parent, disk)
        disk.write_new(place, objects.blob(sha), 0o700 if mode == EXECUTABLE else 0o600)
        index.put(name, make_entry(name, sha, mode, os.lstat(place)))
    disk.write_new(root / ".git" / "index", index.encode())
    for directory, _, _ in os.walk(root, topdown=False):
        disk.sync_dir(directory)


def _first_commit(
    objects: ObjectStore,
    files: Mapping[str, bytes],
    subject: str,
    trailers: Sequence[tuple[str, str]],
    now: datetime,
) -> tuple[str, dict[str, bytes]]:
    draft = Draft(objects, Head(ref=MAIN, commit="", tree=b""), now)
    draft.start(files, subject, trailers)
    return draft.commit, {path: state[1] for path, state in draft.files.items() if state is not None}


def _make_parents(root: Path, directory: Path, disk: Disk) -> None:
    if directory != root and not directory.is_dir():
        _make_parents(root, directory.parent, disk)
        disk.mkdir(directory)


def _remove(root: Path, disk: Disk) -> None:
    """As much of it as the disk lets us."""
    for directory, directories, names in os.walk(root, topdown=False):
        for name in names:
            with contextlib.suppress(OSError):
                disk.unlink(f"{directory}/{name}")
        for name in directories:
            with contextlib.suppress(OSError):
                disk.rmdir(f"{directory}/{name}")
    with contextlib.suppress(OSError):
        disk.rmdir(root)


def _sweep(path: Path, disk: Disk) -> None:
    """Remove what creators of this repository have left who were killed: their flock is free."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if not (name.startswith(f".{path.name}.") and name.endswith(".tmp")):
                continue
            abandoned = path.parent / name
            held = abandoned / ".git" / "openjobs" / "lock"
            if held.exists():
                lock = FileLock(held, disk)
                if lock.try_acquire():
                    _remove(abandoned, disk)
                    lock.release()
            elif time.time() - os.lstat(abandoned).st_mtime > _ABANDONED_S:
                _remove(abandoned, disk)


__all__ = ["create", "make_skeleton", "write_work_tree"]
