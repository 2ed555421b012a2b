"""The files that people see. git is the truth; these are a copy of the newest commit.

A file is replaced by a new one, or appended to where it only grows. One that somebody changed by hand
is never overwritten: it is moved aside, next to where it was, and reported. Nothing here is synced: after
a power cut the copy is made again from git.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ..durable import Disk
from ..durable.files import lstat, read_file
from .index import entry_matches, entry_sha, mode_of
from .packs import BLOB, object_id
from .scratch import Scratch
from .trees import EXECUTABLE

log = logging.getLogger(__name__)

#: whether the content with this id is safe in git
IsSafe = Callable[[bytes], bool]
#: whether that is a part of a content of ours, as a write that was cut short leaves it
IsTorn = Callable[[bytes], bool]


def _never(data: bytes) -> bool:
    return False


def _is_plain(found: os.stat_result, entry: bytes, mode: int) -> bool:
    """Whether it is, to all that stat tells, the file of `entry`, of that mode and with one name."""
    return found.st_nlink == 1 and mode_of(found) == mode and entry_matches(entry, found)


def _identity(found: os.stat_result) -> tuple[int, int, int, int, int, int]:
    """What stays when a file gets another name, and changes with most that is done to it."""
    return found.st_dev, found.st_ino, found.st_mode, found.st_nlink, found.st_size, found.st_mtime_ns


class WorkTree:
    """Assumptions: the session's flock and `index.lock` are held by the caller."""

    def __init__(self, root: Path, scratch: Scratch, disk: Disk) -> None:
        self._root = str(root)
        self._scratch = scratch
        self._disk = disk
        #: the newest files that were moved aside, as paths in the work tree
        self.kept_aside: deque[str] = deque(maxlen=100)

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def put(
        self,
        name: str,
        data: bytes,
        mode: int,
        entry: bytes | None,
        is_safe: IsSafe,
        *,
        before: bytes | None = None,
        is_torn: IsTorn = _never,
    ) -> os.stat_result | None:
        """The file holds `data`, or what it held before. `entry` is what the index says of it.

        `before` is the content that `entry` names. Where `data` only goes on from there the rest is appended,
        and whoever reads meanwhile may see a part of it: a segment of messages grows by a line or two a batch
        and would be written again whole each time.

        What stat says of the file that was written, for its entry; None where somebody has had a hand in it
        since, so that it must not pass for ours.
        """
        path = self.path(name)
        self._make_parents(name)
        if before and data.startswith(before) and (grown := self._append(path, data, len(before), mode, entry)):
            return grown
        # Written before the look, so that next to nothing lies between that and the replacement.
        new = self._scratch.write("work", data, 0o700 if mode == EXECUTABLE else 0o600, sync=False)
        made = os.lstat(new)
        if self.is_edited(name, entry, is_safe, is_torn, before):
            self._move_aside(name)
        # A link of somebody else's becomes a plain file, as git itself does it where there are no links.
        self._scratch.move(new, path)
        found = lstat(path)
        return found if found is not None and _identity(found) == _identity(made) else None

    def _append(self, path: str, data: bytes, at: int, mode: int, entry: bytes | None) -> os.stat_result | None:
        """The file of `entry` gets what `data` has from `at` on. None where it does not hold `data` afterwards: it
        is to be looked at, and replaced.

        A file with a second name is not appended to: the other name would show it, too. Nor is one that we may not
        write to, while its directory lets us replace it. The content is read back, since stat cannot tell:
          1. we look at the file, and it is ours
          2. somebody writes into it
          3. we append; size and times are as our own write has left them
        """
        found = lstat(path)
        if entry is None or found is None or not _is_plain(found, entry, mode):
            return None
        try:
            fd = self._disk.open_append(path)
        except OSError:
            return None
        try:
            # It may have been exchanged since, or removed (and be a new one, empty).
            if not _is_plain(os.fstat(fd), entry, mode):
                return None
            self._disk.write(fd, data[at:])
            grown = os.fstat(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):
            is_ours = grown.st_nlink == 1 and mode_of(grown) == mode and _identity(os.lstat(path)) == _identity(grown)
            if is_ours and read_file(path) == data:
                return grown
        return None

    def remove(self, name: str, entry: bytes | None, is_safe: IsSafe, *, before: bytes | None = None) -> None:
        """The file is gone, and directories that are empty by that. `before` is as in `put`."""
        if self.is_edited(name, entry, is_safe, before=before):
            self._move_aside(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._disk.unlink(self.path(name))
        parent = name.rpartition("/")[0]
        while parent:
            try:
                self._disk.rmdir(self.path(parent))
            except OSError:
                break
            parent = parent.rpartition("/")[0]

    def is_edited(
        self,
        name: str,
        entry: bytes | None,
        is_safe: IsSafe,
        is_torn: IsTorn = _never,
        before: bytes | None = None,
    ) -> bool:
        """Whether something stands there whose content is nowhere in git (nor a torn copy of what is).

        With `before` (as in `put`) stat is not believed: the clock of many file systems stands still for
        milliseconds, in which an edit that keeps the size leaves no trace but the content.
        """
        path = self.path(name)
        found = lstat(path)
        if found is None:
            return False
        is_plain = stat.S_ISREG(found.st_mode)
        if entry is not None and entry_matches(entry, found) and (before is None or not is_plain):
            return False
        if not is_plain:
            return True
        if found.st_size == 0:
            return False
        try:
            data = read_file(path)
        except OSError:
            return True
        if data == before:
            return False
        sha = object_id(BLOB, data)
        return not ((entry is not None and entry_sha(entry) == sha) or is_safe(sha) or is_torn(data))

    def _make_parents(self, name: str) -> None:
        """Real directories all the way: a link in their place could lead out of the work tree."""
        at = name.find("/")
        while at >= 0:
            parent = name[:at]
            found = lstat(self.path(parent))
            if found is not None and not stat.S_ISDIR(found.st_mode):
                self._move_aside(parent)
                found = None
            if found is None:
                self._disk.mkdir(self.path(parent))
            at = name.find("/", at + 1)

    def _move_aside(self, name: str) -> None:
        number = 1
        while os.path.lexists(self.path(aside := f"{name}.edited-{number}")):
            number += 1
        self._disk.rename(self.path(name), self.path(aside))
        self.kept_aside.append(aside)
        log.warning("%s was changed by hand; it was kept as %s", self.path(name), aside)

    def holds(self, name: str, sha: bytes) -> bool:
        try:
            return object_id(BLOB, read_file(self.path(name))) == sha
        except OSError:
            return False
