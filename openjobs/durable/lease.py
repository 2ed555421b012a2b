"""Leases: a file whose flock says "this one is alive".

Made under a temporary name, locked, and only then renamed to its own name, so that nobody ever
sees a lease that is not held although its owner lives. A lease is never unlinked while locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import Bug, FileRefused
from .disk import Disk
from .lock import FileLock, is_locked, no_fork
from .private import check_file, refuse_in_place_of_directory

log = logging.getLogger(__name__)

#: names that can be a lease's; whoever reads one from a row may be reading a stranger's text
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_TEMPORARY = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\.tmp\Z")
#: how a look at something else in a lease's place fails: a link, a path through no directory, a socket
_NO_LEASE = frozenset({errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.ENXIO})
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Lease:
    """The lease of one live runner or supervisor, held from `acquire` to `release`."""

    def __init__(self, directory: Path, name: str, disk: Disk) -> None:
        # Checked as given, before it becomes part of a path: an absolute name would replace the directory.
        if not _NAME.match(name):
            raise Bug(f"{name!r} cannot be the name of a lease")
        self.path = directory / name
        self._disk = disk
        self._lock: FileLock | None = None

    def acquire(self) -> None:
        if self.held:
            raise Bug(f"the lease {self.path.name} is taken already")
        self._disk.make_dirs(self.path.parent)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        lock = FileLock(temporary, self._disk)
        if not lock.try_acquire():
            raise Bug(f"the lease {self.path.name} is taken although its name is new")
        try:
            self._disk.rename(temporary, self.path)
            self._disk.sync_dir(self.path.parent)
        except BaseException:
            lock.release()
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
            raise
        self._lock = lock

    @property
    def held(self) -> bool:
        return self._lock is not None and self._lock.held

    def release(self) -> None:
        """Give it up; the file stays until who cleans up removes it (`remove_if_free`)."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def is_held(directory: Path, name: str) -> bool:
    """Whether a live process holds that lease.

    A missing file means not held: its owner made it before anything could name it. A name that no
    lease can have (a row may hold any text) is held by nobody. One that cannot be looked at, since something
    else stands there, is taken for held and named in the log: who may live is never taken for dead.
    """
    if not _NAME.match(name):
        return False
    try:
        return is_locked(directory / name)
    except OSError as error:
        if error.errno not in _NO_LEASE:
            raise
        _say_unknown(str(error))
        return True


@functools.cache
def _say_unknown(error: str) -> None:
    """Once: a list asks for the lease of every job in it."""
    log.warning("whether the owner of a lease lives cannot be known, so its work is left as it is: %s", error)


def lease_findings(directory: Path) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) for what stands among the leases and is none. Looks only, and waits for nothing.

    One that a killed process was just making is no damage, and neither is one that nobody holds any more.
    """
    try:
        refuse_in_place_of_directory(directory)
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    except (FileRefused, OSError) as error:
        yield "", str(error)
        return
    for name in names:
        path = directory / name
        try:
            found = os.lstat(path)
            check_file(path, found)
        except FileNotFoundError:
            continue  # it was given back meanwhile
        except FileRefused as error:
            follows = "" if stat.S_ISREG(found.st_mode) else _what_follows(path)
            yield name, f"{error}{follows}"
            continue
        if not _NAME.match(name) and not _TEMPORARY.match(name):
            yield name, "is no name of a lease; nobody needs it"
        elif found.st_size:
            yield name, f"has {found.st_size:,} bytes, and a lease has none"


def _what_follows(path: Path) -> str:
    """See `is_held`."""
    try:
        is_locked(path)
    except OSError:
        return "; whoever has that name counts as alive until it is moved away"
    return "; whoever has that name counts as dead"


def remove_if_free(directory: Path, name: str, disk: Disk) -> bool:
    """Remove a dead owner's lease. True when there is none by that name (any more)."""
    if not _NAME.match(name):
        return True
    with no_fork():
        try:
            fd = os.open(directory / name, _LOOK)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(directory / name)
            return True
        finally:
            os.close(fd)
