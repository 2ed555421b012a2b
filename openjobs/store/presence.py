"""Who is alive, and on which sessions it works: leases and active markers.

A marker is durable before a runner's first commit in a session, and outlives the runner when it is
killed; so start-up reads only the sessions in the folders of leases that nobody holds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Protocol

from ..durable import Disk, Lease
from ..durable.files import names_in
from ..durable.lease import is_held, remove_if_free
from ..errors import Bug

#: which jobs have background commands, and in which sessions (`processes/owned.py`)
JOB_TASKS = "job-tasks"
#: how often one mark may meet a removal; each takes a whole removal of the same folder between two of our calls
_MEETINGS = 16


class Held(Protocol):
    def release(self) -> None: ...


class Leases(Protocol):
    def acquire(self, runner_id: str) -> Held: ...
    def is_held(self, runner_id: str) -> bool: ...
    def dead(self) -> list[str]: ...
    def remove(self, runner_id: str) -> None: ...


class Active(Protocol):
    def mark(self, runner_id: str, session_id: str) -> None: ...
    def clear(self, runner_id: str, session_id: str) -> None: ...
    def sessions(self, runner_id: str) -> list[str]: ...
    def runners(self) -> list[str]: ...


class FileLeases:
    """One file a runner under `leases/`."""

    def __init__(self, home: Path, disk: Disk) -> None:
        self._directory = home / "leases"
        self._active = home / "active"
        self._disk = disk

    def acquire(self, runner_id: str) -> Held:
        lease = Lease(self._directory, runner_id, self._disk)
        lease.acquire()
        return lease

    def is_held(self, runner_id: str) -> bool:
        return is_held(self._directory, runner_id)

    def dead(self) -> list[str]:
        """Runners that left work behind: a free lease, or an active folder without any lease."""
        names = {name for d in (self._directory, self._active) for name in _names(d) if not name.startswith(".")}
        return sorted(name for name in names if not self.is_held(name))

    def remove(self, runner_id: str) -> None:
        """The active folder first: while the lease is there, nobody takes the work for done."""
        folder = self._active / runner_id
        for name in _names(folder):
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(folder / name)
        with contextlib.suppress(FileNotFoundError, OSError):
            self._disk.rmdir(folder)
        remove_if_free(self._directory, runner_id, self._disk)


class FileActive:
    """One empty file for each session that a runner works on, under `active/<runner_id>/`."""

    def __init__(self, home: Path, disk: Disk, name: str = "active") -> None:
        """`name` is the directory in the home: who looks after something else has one of its own."""
        self._directory = home / name
        self._disk = disk

    def runners(self) -> list[str]:
        """Who has a folder here, alive or not."""
        return sorted(name for name in _names(self._directory) if not name.startswith("."))

    def remove(self, runner_id: str) -> None:
        """Take away a folder without marks."""
        with contextlib.suppress(OSError):
            self._disk.rmdir(self._directory / runner_id)

    def mark(self, runner_id: str, session_id: str) -> None:
        """Durable when it returns, even while somebody else takes away the folder that was empty until now:
        (1) we make it or find it, (2) they clear and `remove` it, (3) our file or its sync finds no folder: again.
        """
        folder = self._directory / runner_id
        for _ in range(_MEETINGS - 1):
            with contextlib.suppress(FileNotFoundError):
                self._make(folder, session_id)
                return
        self._make(folder, session_id)

    def _make(self, folder: Path, session_id: str) -> None:
        self._disk.make_dirs(folder)
        with contextlib.suppress(FileExistsError):
            os.close(self._disk.create(folder / session_id))
        self._disk.sync_dir(folder)

    def clear(self, runner_id: str, session_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(self._directory / runner_id / session_id)

    def sessions(self, runner_id: str) -> list[str]:
        return sorted(_names(self._directory / runner_id))


class MemoryLeases:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, bool] = {}

    def acquire(self, runner_id: str) -> Held:
        with self._lock:
            if runner_id in self._held:
                raise Bug(f"the lease {runner_id} is taken although its name is new")
            self._held[runner_id] = True
        return _MemoryLease(self, runner_id)

    def is_held(self, runner_id: str) -> bool:
        with self._lock:
            return self._held.get(runner_id, False)

    def dead(self) -> list[str]:
        with self._lock:
            return sorted(name for name, held in self._held.items() if not held)

    def remove(self, runner_id: str) -> None:
        with self._lock:
            self._held.pop(runner_id, None)

    def _free(self, runner_id: str) -> None:
        with self._lock:
            if runner_id in self._held:
                self._held[runner_id] = False


class _MemoryLease:
    def __init__(self, leases: MemoryLeases, runner_id: str) -> None:
        self._leases, self._runner_id = leases, runner_id

    def release(self) -> None:
        self._leases._free(self._runner_id)


class MemoryActive:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[str, set[str]] = {}

    def mark(self, runner_id: str, session_id: str) -> None:
        with self._lock:
            self._marks.setdefault(runner_id, set()).add(session_id)

    def clear(self, runner_id: str, session_id: str) -> None:
        with self._lock:
            self._marks.get(runner_id, set()).discard(session_id)

    def sessions(self, runner_id: str) -> list[str]:
        with self._lock:
            return sorted(self._marks.get(runner_id, ()))

    def runners(self) -> list[str]:
        with self._lock:
            return sorted(runner_id for runner_id, sessions in self._marks.items() if sessions)


def _names(directory: Path) -> list[str]:
    try:
        return names_in(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
