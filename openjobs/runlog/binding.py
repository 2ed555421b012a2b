"""The files of one run, and the proof that a descriptor still is what its name says.

`runs/<run_id>/`: `log`, `log.state` (sidecar), `stdout` and `stderr` (native). The directory is
opened once; every later look goes through that descriptor, so nobody can slip another tree under a
writer. Spec 004: "validates the log's rooted binding".
"""

from __future__ import annotations

import os
from pathlib import Path

from ..durable.private import NOT_WRITABLE, check_directory, check_file, is_same, open_for_reading
from ..errors import FileRefused
from .state import Stream

LOG = "log"
SIDECAR = "log.state"


class RunDirectory:
    """Raises FileNotFoundError and `FileRefused` when made. Holds one descriptor until `close`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.log = self.path / LOG
        self.sidecar = self.path / SIDECAR
        found = os.lstat(self.path)
        check_directory(self.path, found)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._identity = found
        if not is_same(found, os.fstat(self._fd)):
            self.close()
            raise self._refused(self.path)

    def native(self, stream: Stream) -> Path:
        return self.path / stream.value

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def look(self, path: Path) -> os.stat_result | None:
        """What stands at that name in this directory now; None where nothing does. Checked to be ours."""
        try:
            found = os.stat(path.name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        check_file(path, found)
        return found

    def open(self, path: Path) -> int:
        """For reading only. Raises FileNotFoundError, `FileRefused`."""
        return open_for_reading(path, NOT_WRITABLE, dir_fd=self._fd)

    def verify(self, path: Path, fd: int) -> os.stat_result:
        """The state of `fd`, which must be the file at `path` in this directory, under its own name."""
        found = os.fstat(fd)
        there = self.look(path)
        if there is None or not is_same(there, found) or not is_same(os.lstat(self.path), self._identity):
            raise self._refused(path)
        return found

    def _refused(self, path: Path) -> FileRefused:
        return FileRefused(f"{path} was put in place of what was opened; it was left as it was", path=str(path))
