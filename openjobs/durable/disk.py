"""One small seam for every effect on disk.

Nothing in openjobs that must survive a crash is written by any other way, so a test that replaces
`Disk` sees each effect in order and can let the k-th one fail (docs/guarantees.md).

What each step promises, on a disk that honours flush:

- `sync(fd)`: the file's bytes survive a power cut. Not its name.
- `sync_dir(path)`: names made, renamed or removed in that directory before the call survive.
- `rename`: after a crash the name has the old or the new file, never a mixture, provided the new
  file was synced before.

An error from `sync` is final for what was written: the kernel may already have dropped the pages,
so the same descriptor is never synced again in the hope of a better answer. Write a new file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

AnyPath = str | os.PathLike[str]
Buffers = bytes | bytearray | memoryview | Iterable[bytes | bytearray | memoryview]

_IOV_MAX = 512
#: file systems that cannot sync a directory say so by one of these
_NO_DIR_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
#: numbers for temporary names: two threads that replace one file never share one
_temporary_numbers = itertools.count()


class Disk:
    """The real disk. With `durable=False` ("relaxed") the sync steps do nothing: what was
    acknowledged survives the death of the process, but not a power cut."""

    def __init__(self, *, durable: bool = True) -> None:
        self.durable = durable

    # --- single effects, each one system call (a long write may need several) ---

    def create(self, path: AnyPath, mode: int = 0o600) -> int:
        """A new file, open for writing. Raises FileExistsError; never follows a link."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
        """A file, made where missing, whose every write lands at its end. A FIFO is not waited for (ENXIO)."""
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(path, flags, mode)

    def open_update(self, path: AnyPath, mode: int = 0o600) -> int:
        """A file, made where missing, open for reading and writing at any place."""
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    def write(self, fd: int, data: Buffers) -> int:
        """Write all of `data` at the descriptor's place; the number of bytes. A short write is continued."""
        total = 0
        if isinstance(data, bytes):  # the usual case, in one call
            total = os.write(fd, data)
            if total == len(data):
                return total
            data = memoryview(data)[total:]
        buffers = [data] if isinstance(data, bytearray | memoryview) else data
        # Counted in bytes whatever the items are; empty ones would never be "written".
        views = deque(view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view)
        try:
            while views:
                written = os.writev(fd, list(islice(views, _IOV_MAX)))
                total += written
                while views and written >= len(views[0]):
                    written -= len(views.popleft())
                if written:
                    views[0] = views[0][written:]
        finally:
            for view in views:
                view.release()  # an error keeps this frame, and a buffer that is looked at cannot be shortened
        return total

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        if self.durable:
            _full_sync(fd)

    def sync_data(self, fd: int) -> None:
        """As `sync`, for a file whose times need not survive."""
        if not self.durable:
            return
        if sys.platform == "darwin":
            _full_sync(fd)
        else:
            os.fdatasync(fd)

    def sync_dir(self, path: AnyPath) -> None:
        if not self.durable:
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _full_sync(fd)
        except OSError as error:
            if error.errno not in _NO_DIR_SYNC:
                raise
        finally:
            os.close(fd)

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        os.rename(source, target)

    def unlink(self, path: AnyPath) -> None:
        os.unlink(path)

    def mkdir(self, path: AnyPath, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: AnyPath) -> None:
        os.rmdir(path)

    # --- the combinations that are needed everywhere ---

    def write_new(self, path: AnyPath, data: Buffers, mode: int = 0o600) -> None:
        """A new file with `data`, its bytes synced; its name is not (see `sync_dir`).

        A file that could not be written whole is removed again where the disk still lets us.
        """
        fd = self.create(path, mode)
        try:
            self.write(fd, data)
            self.sync(fd)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self.unlink(path)
            raise
        os.close(fd)

    def replace(self, path: AnyPath, data: Buffers, mode: int = 0o600) -> None:
        """`path` holds `data`, or what it held before: after any crash one of the two, whole.

        Returning means durable. An error before the rename leaves the old file; an error after it
        means that the outcome is unknown, and the caller must read before it writes again.
        """
        path = Path(path)
        temporary = self._write_temporary(path, data, mode)
        try:
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        self.sync_dir(path.parent)

    def _write_temporary(self, path: Path, data: Buffers, mode: int) -> Path:
        """A name that exists was left by a dead process with our number, or belongs to one in another
        container: it is passed over, never removed."""
        while True:
            temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_temporary_numbers)}.tmp")
            try:
                self.write_new(temporary, data, mode)
            except FileExistsError:
                continue
            return temporary

    def make_dirs(self, path: AnyPath, mode: int = 0o700) -> None:
        """`path` and its missing parents, durable when it returns.

        A directory whose name could not be synced is removed again where it can be: left there, the
        next call would find it and take it for durable.
        """
        path = Path(path)
        missing = list(_missing(path))
        for directory in reversed(missing):
            ours = self._make_dir(directory, mode)
            try:
                self.sync_dir(directory.parent)
            except OSError:
                if ours:
                    with contextlib.suppress(OSError):
                        self.rmdir(directory)
                raise

    def _make_dir(self, path: Path, mode: int) -> bool:
        try:
            self.mkdir(path, mode)
        except FileExistsError:
            return False
        return True


def _missing(path: Path) -> Iterator[Path]:
    while not path.exists():
        yield path
        path = path.parent


if sys.platform == "darwin":

    def _full_sync(fd: int) -> None:
        """On macOS fsync only reaches the drive's cache; F_FULLFSYNC reaches the medium."""
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL):
                raise
            os.fsync(fd)

else:

    def _full_sync(fd: int) -> None:
        os.fsync(fd)
