"""Disks that write down what happens to them, and disks that fail at a chosen effect."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

import attrs

from openjobs.durable import Disk
from openjobs.durable.disk import AnyPath, Buffers

T = TypeVar("T")


@attrs.frozen(slots=True)
class Effect:
    """One call through the durable seam: its name, and the path or descriptor that it was for."""

    name: str
    target: str


class RecordingDisk(Disk):
    """The real disk; `effects` is everything that was asked of it, in order."""

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__(durable=durable)
        self.effects: list[Effect] = []
        self._paths: dict[int, str] = {}

    def _do(
        self, name: str, target: AnyPath | int, act: Callable[[], T], torn: Callable[[], object] | None = None
    ) -> T:
        self.effects.append(
            Effect(name, self._paths.get(target, "?") if isinstance(target, int) else os.fspath(target))
        )
        return act()

    def _opened(self, fd: int, path: AnyPath) -> int:
        self._paths[fd] = os.fspath(path)
        return fd

    def create(self, path: AnyPath, mode: int = 0o600) -> int:
        return self._opened(self._do("create", path, lambda: super(RecordingDisk, self).create(path, mode)), path)

    def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
        return self._opened(self._do("open", path, lambda: super(RecordingDisk, self).open_append(path, mode)), path)

    def open_update(self, path: AnyPath, mode: int = 0o600) -> int:
        return self._opened(self._do("open", path, lambda: super(RecordingDisk, self).open_update(path, mode)), path)

    def write(self, fd: int, data: Buffers) -> int:
        buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
        write = super().write

        def torn() -> object:
            whole = b"".join(bytes(buffer) for buffer in buffers)
            write(fd, whole[: len(whole) // 2])
            return [memoryview(buffer) for buffer in buffers]

        return self._do("write", fd, lambda: write(fd, buffers), torn)

    def truncate(self, fd: int, length: int) -> None:
        self._do("truncate", fd, lambda: super(RecordingDisk, self).truncate(fd, length))

    def sync(self, fd: int) -> None:
        self._do("sync", fd, lambda: super(RecordingDisk, self).sync(fd))

    def sync_data(self, fd: int) -> None:
        self._do("sync", fd, lambda: super(RecordingDisk, self).sync_data(fd))

    def sync_dir(self, path: AnyPath) -> None:
        self._do("sync_dir", path, lambda: super(RecordingDisk, self).sync_dir(path))

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        self._do("rename", target, lambda: super(RecordingDisk, self).rename(source, target))

    def unlink(self, path: AnyPath) -> None:
        self._do("unlink", path, lambda: super(RecordingDisk, self).unlink(path))

    def mkdir(self, path: AnyPath, mode: int = 0o700) -> None:
        self._do("mkdir", path, lambda: super(RecordingDisk, self).mkdir(path, mode))

    def rmdir(self, path: AnyPath) -> None:
        self._do("rmdir", path, lambda: super(RecordingDisk, self).rmdir(path))


class FaultyDisk(RecordingDisk):
    """From `arm` on, the k-th effect fails: once, or it and every later one.

    A write that fails has written half of its bytes, and its error still looks at the buffers, as the frames of a
    failed call do. With `late`, the effect happens and the error is reported all the same, as a disk does that loses
    its power after the write.
    """

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__(durable=durable)
        self._left = 0
        self._error: int | type[Exception] = errno.EIO
        self._for_good = self._late = False
        self.failed: list[Effect] = []

    def arm(
        self, k: int, error: int | type[Exception] = errno.EIO, *, for_good: bool = False, late: bool = False
    ) -> None:
        """`error` is an errno, or what is raised instead of an OSError."""
        self._left, self._error, self._for_good, self._late = k, error, for_good, late
        self.failed = []

    def disarm(self) -> None:
        self._left = 0

    def _do(
        self, name: str, target: AnyPath | int, act: Callable[[], T], torn: Callable[[], object] | None = None
    ) -> T:
        def fail() -> T:
            if self._left <= 0:
                return act()
            self._left -= 1
            if self._left:
                return act()
            if self._for_good:
                self._left = 1
            self.failed.append(self.effects[-1])
            if self._late:
                done = act()
                if isinstance(done, int) and name in ("create", "open"):
                    os.close(done)
            code = self._error
            error = OSError(code, os.strerror(code)) if isinstance(code, int) else code()
            if torn is not None and not self._late:
                vars(error)["looked_at"] = torn()
            raise error

        return super()._do(name, target, fail)


__all__ = ["Effect", "FaultyDisk", "RecordingDisk"]
