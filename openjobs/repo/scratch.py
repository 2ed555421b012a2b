"""Temporary files of ours, most of them under `.git/openjobs`, where no `git prune` finds them.

Their names are fixed, since only one process at a time (who holds the flock) has any.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..durable import Disk
from ..durable.disk import Buffers


class Scratch:
    def __init__(self, directory: Path, disk: Disk) -> None:
        self.directory = str(directory)
        self._disk = disk

    def write(self, name: str, data: Buffers | Iterator[Buffers], mode: int = 0o600, *, sync: bool = True) -> str:
        """The path of a new file that holds `data`; where it could not be written whole, there is none.

        An iterator is written piece by piece, so that it may be larger than memory.
        """
        path = f"{self.directory}/{name}"
        try:
            fd = self._disk.create(path, mode)
        except FileExistsError:
            # Left by somebody who was killed.
            self._disk.unlink(path)
            fd = self._disk.create(path, mode)
        try:
            for piece in data if isinstance(data, Iterator) else (data,):
                self._disk.write(fd, piece)
            if sync:
                self._disk.sync(fd)
        except BaseException:
            os.close(fd)
            self.drop(name)
            raise
        os.close(fd)
        return path

    def move(self, path: str, target: str) -> None:
        try:
            self._disk.rename(path, target)
        except BaseException:
            self.drop(os.path.basename(path))
            raise

    def drop(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._disk.unlink(f"{self.directory}/{name}")

    def clear(self) -> None:
        """Raises OSError."""
        for name in os.listdir(self.directory):
            self._disk.unlink(f"{self.directory}/{name}")
