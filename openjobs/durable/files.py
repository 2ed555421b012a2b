"""Reading a file whole, without following a link and without waiting for a FIFO."""

from __future__ import annotations

import errno
import os
import stat

from ..errors import Damaged, ReadFailed

#: the system has no room for us, which says nothing of any file
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_file(path: str) -> int:
    """A descriptor of a regular file. Raises OSError (ELOOP for a link)."""
    return open_sized(path)[0]


def open_sized(path: str) -> tuple[int, int]:
    """As `open_file`, and the file's size in bytes."""
    fd = os.open(path, _FLAGS)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "it is no regular file", path)
    return fd, found.st_size


def read_file(path: str, limit: int | None = None) -> bytes:
    """The file's bytes, `limit` at most. Raises OSError."""
    fd, size = open_sized(path)
    try:
        return read_all(fd, size, limit)
    finally:
        os.close(fd)


def read_all(fd: int, size: int, limit: int | None = None) -> bytes:
    """What stands in a file that had `size` bytes when it was opened, from its beginning, `limit` bytes at most.

    All of it is asked for in one go, and a byte more: who is given less has seen the end.
    """
    wanted = size + 1 if limit is None else limit
    pieces: list[bytes] = []
    got = 0
    while wanted > 0:
        piece = os.read(fd, wanted)
        pieces.append(piece)
        got += len(piece)
        if not piece or (len(piece) < wanted and got >= size):
            break
        wanted = wanted - len(piece) if limit is not None else max(wanted - len(piece), 65536)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def names_in(path: str | os.PathLike[str]) -> list[str]:
    """What stands in a directory, in no order. Raises OSError, of which `ReadFailed` where the system has no room."""
    try:
        return os.listdir(path)
    except OSError as error:
        if error.errno in SHORTAGES:
            raise read_failed(error, os.fspath(path)) from error
        raise


def unreadable(error: OSError, path: str) -> Damaged | ReadFailed:
    """What to raise for a file that could not be read: it is damaged, unless the system has no room for us."""
    return read_failed(error, path) if error.errno in SHORTAGES else damaged(error, path)


def damaged(error: OSError, path: str) -> Damaged:
    return Damaged(f"{path} cannot be read: {error.strerror}", path=path)


def read_failed(error: OSError, path: str) -> ReadFailed:
    return ReadFailed(f"{path} could not be read now: {error.strerror}. Try again.", errno=error.errno)


def lstat(path: str) -> os.stat_result | None:
    """What stands at `path` itself, or None."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
