"""Is this file one of ours? Asked before any file that openjobs wrote earlier is opened again.

A home is private to its owner, so a link, a FIFO or a file of somebody else in it is either a
mistake or an attack; in both cases it is refused and left as it was. `lstat` comes first because
opening a FIFO can block; what was opened is then compared with what was looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import FileRefused
from .files import SHORTAGES, read_failed

#: nobody else may do anything (files that we write)
PRIVATE = 0o077
#: nobody else may write (files that are only read)
NOT_WRITABLE = 0o022


def check_file(path: Path, found: os.stat_result, forbidden: int = PRIVATE) -> None:
    """Raises `FileRefused` unless `found` is a regular file of ours without `forbidden` permission bits."""
    _check(path, found, stat.S_ISREG, "a regular file", forbidden)


def check_directory(path: Path, found: os.stat_result) -> None:
    """Raises `FileRefused` unless `found` is a directory of ours that nobody else may write."""
    _check(path, found, stat.S_ISDIR, "a directory", NOT_WRITABLE)


def refuse_in_place_of_directory(path: Path) -> None:
    """Raises `FileRefused` for something that stands at `path`, is no directory and leads to none: what lacks in it
    was not left out on purpose. Nothing at all is no offence."""
    if os.path.lexists(path) and not os.path.isdir(path):
        kind = "it is a link that leads nowhere" if path.is_symlink() else "it is not a directory"
        raise FileRefused(f"{path} was refused and left as it was: {kind}", path=str(path))


def _check(path: Path, found: os.stat_result, is_kind: object, kind: str, forbidden: int) -> None:
    assert callable(is_kind)
    problem = None
    if not is_kind(found.st_mode):
        problem = f"it is not {kind}"
    elif found.st_uid != os.geteuid():
        problem = f"it belongs to user {found.st_uid}"
    elif found.st_mode & forbidden:
        problem = f"its permissions are {stat.S_IMODE(found.st_mode):04o}"
    if problem:
        raise FileRefused(f"{path} was refused and left as it was: {problem}", path=str(path))


def is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


@contextlib.contextmanager
def opened_for_reading(path: Path, forbidden: int = PRIVATE) -> Iterator[int]:
    """A descriptor of the checked file at `path`, closed at the end.

    Raises FileNotFoundError and `FileRefused`. O_NONBLOCK keeps a FIFO that appeared between the two
    steps from blocking us; it means nothing for a regular file.
    """
    fd = open_for_reading(path, forbidden)
    try:
        yield fd
    finally:
        os.close(fd)


def open_for_reading(path: Path, forbidden: int = PRIVATE, dir_fd: int | None = None) -> int:
    """As `opened_for_reading`; the caller closes. With `dir_fd`, only the name of `path` is used, in that directory."""
    name = path if dir_fd is None else Path(path.name)
    check_file(path, os.stat(name, dir_fd=dir_fd, follow_symlinks=False), forbidden)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise FileRefused(f"{path} was refused and left as it was: it is a link", path=str(path)) from error
        if error.errno in SHORTAGES:
            raise read_failed(error, str(path)) from error
        raise
    try:
        check_file(path, os.fstat(fd), forbidden)
    except BaseException:
        os.close(fd)
        raise
    return fd
