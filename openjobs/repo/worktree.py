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
from .files import lstat, read_file
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
    ) -> os.stat_result:
        """The file holds `data`, or what it held before. `entry` is what the index says of it.

        `before` is the content that `entry` names. Where `data` only goes on from there the rest is appended,
        and whoever reads meanwhile may see a part of it: a segment of messages grows by a line or two a batch
        and would be written again whole each time.
        """
        path = self.path(name)
        self._make_parents(name)
        if before and data.startswith(before) and (grown := self._append(path, data[len(before) :], mode, entry)):
            return grown
        self._keep_if_edited(name, entry, is_safe, is_torn)
        # A link of somebody else's becomes a plain file, as git itself does it where there are no links.
        self._scratch.move(self._scratch.write("work", data, 0o700 if mode == EXECUTABLE else 0o600, sync=False), path)
        return os.lstat(path)

    def _append(self, path: str, more: bytes, mode: int, entry: bytes | None) -> os.stat_result | None:
        """None where the file is not, to all that stat tells, the one of `entry`; nothing was written then.

        A file with a second name is not appended to: the other name would show it, too.
        """
        found = lstat(path)
        if entry is None or found is None or found.st_nlink > 1 or mode_of(found) != mode:
            return None
        if not entry_matches(entry, found):
            return None
        fd = self._disk.open_append(path)
        try:
            # It may have been exchanged since, or removed (and be a new one, empty).
            if not entry_matches(entry, os.fstat(fd)):
                return None
            self._disk.write(fd, more)
            return os.fstat(fd)
        finally:
            os.close(fd)

    def remove(self, name: str, entry: bytes | None, is_safe: IsSafe) -> None:
        """The file is gone, and directories that are empty by that."""
        self._keep_if_edited(name, entry, is_safe)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._disk.unlink(self.path(name))
        parent = name.rpartition("/")[0]
        while parent:
            try:
                self._disk.rmdir(self.path(parent))
            except OSError:
                break
            parent = parent.rpartition("/")[0]

    def is_edited(self, name: str, entry: bytes | None, is_safe: IsSafe, is_torn: IsTorn = _never) -> bool:
        """Whether something stands there whose content is nowhere in git (nor a torn copy of what is)."""
        path = self.path(name)
        found = lstat(path)
        if found is None or (entry is not None and entry_matches(entry, found)):
            return False
        if not stat.S_ISREG(found.st_mode):
            return True
        if found.st_size == 0:
            return False
        try:
            data = read_file(path)
        except OSError:
            return True
        sha = object_id(BLOB, data)
        return not ((entry is not None and entry_sha(entry) == sha) or is_safe(sha) or is_torn(data))

    def _keep_if_edited(self, name: str, entry: bytes | None, is_safe: IsSafe, is_torn: IsTorn = _never) -> None:
        if self.is_edited(name, entry, is_safe, is_torn):
            self._move_aside(name)

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
