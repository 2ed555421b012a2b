"""Lock files as git uses them (`index.lock`, `<ref>.lock`): tried, never waited for.

A lock file of ours has the mode 0400, which no git, dulwich or libgit2 gives to one. The mode is in
the inode, so it is there however early we were killed, even where the power went before a single
byte of text was written. Whoever holds the session's flock knows that every such file belongs to a
dead process, for a live one would hold the flock. Any other lock is somebody else's and stays.
"""

from __future__ import annotations

import contextlib
import os
import stat

from ..durable import Disk
from ..durable.files import lstat
from .base import RepositoryBusy

LOCK_MODE = 0o400
_LONGEST_TEXT = 256


def create_lock(disk: Disk, path: str) -> tuple[int, bool]:
    """A descriptor of the new lock file, and whether a dead one of ours stood there.

    Assumption: the session's flock is held. Raises `RepositoryBusy`, OSError.
    """
    try:
        return disk.create(path, LOCK_MODE), False
    except FileExistsError:
        if not is_ours(path):
            raise RepositoryBusy(f"{path} is held by another program") from None
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(path)
    try:
        return disk.create(path, LOCK_MODE), True
    except FileExistsError:
        raise RepositoryBusy(f"{path} is held by another program") from None


def is_ours(path: str) -> bool:
    found = lstat(path)
    return (
        found is not None
        and stat.S_ISREG(found.st_mode)
        and stat.S_IMODE(found.st_mode) == LOCK_MODE
        and found.st_size <= _LONGEST_TEXT
        and found.st_uid == os.geteuid()
    )
