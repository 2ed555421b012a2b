"""Reading a file whole, without following a link and without waiting for a FIFO."""

from __future__ import annotations

import errno
import os
import stat

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_file(path: str) -> int:
    """A descriptor of a regular file. Raises OSError (ELOOP for a link)."""
    fd = os.open(path, _FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "it is no regular file", path)
    return fd


def read_file(path: str, limit: int | None = None) -> bytes:
    """The file's bytes, `limit` at most. Raises OSError."""
    fd = open_file(path)
    try:
        return read_all(fd, limit)
    finally:
        os.close(fd)


def read_all(fd: int, limit: int | None = None) -> bytes:
    size = os.fstat(fd).st_size + 1 if limit is None else limit
    pieces: list[bytes] = []
    while size > 0:
        piece = os.read(fd, size)
        if not piece:
            break
        pieces.append(piece)
        size = size - len(piece) if limit is not None else max(size - len(piece), 65536)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def lstat(path: str) -> os.stat_result | None:
    """What stands at `path` itself, or None."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
