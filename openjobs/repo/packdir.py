"""`objects/pack` as the writer sees it: publish a pack, remove one, find the one to go on with.

Order of effects when a pack appears: `.keep`, pack, index, each whole and synced, then the
directory. When one goes: index, pack, `.keep`. A reader never sees an index without its pack, and
a foreign `git repack -a -d` never sees our pack without its `.keep`:
  1. repack lists the packs and reads the refs
  2. we publish a pack and move the ref
  3. repack writes a pack of what it saw reachable, and deletes the packs it listed
Without `.keep` a pack made between 1's two halves would be deleted with commits that only it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import attrs

from ..durable import Disk
from ..durable.files import lstat, names_in, open_file, read_file
from ..errors import Damaged
from .objects import KEEP_MODE, KEEP_TEXT, REPACKED_TEXT, ObjectStore, PackFile
from .packs import EncodedPack, Entry, RollingPack, encode_index
from .scratch import Scratch

#: a rolling pack is sealed at this many commits or bytes
SEAL_COMMITS = 32
SEAL_BYTES = 1 << 20
#: other programs make packs read-only, whatever their umask; so one that can be written is ours
PACK_MODE = 0o600
#: how many of the newest packs are looked at for one to go on with
_LOOK_AT = 4
_TEMPORARY = ("openjobs-pack.tmp", "openjobs-idx.tmp", "openjobs-keep.tmp")


@attrs.frozen(kw_only=True, slots=True)
class Resumed:
    rolling: RollingPack
    #: its file, or None for a new one
    name: str | None
    #: packs whose objects are all in that file
    superseded: Sequence[str]


class PackDirectory:
    """Assumption: the session's flock is held by the caller."""

    def __init__(self, objects: ObjectStore, disk: Disk) -> None:
        self.path = objects.pack_dir
        self._objects = objects
        # In the same directory: one sync makes both ends of the rename durable, on any file system. The
        # names do not begin with `tmp_`, which `git prune` would take for leftovers of its own.
        self._scratch = Scratch(Path(self.path), disk)
        self._disk = disk

    def has(self, name: str) -> bool:
        return os.path.exists(f"{self.path}/{name}.pack") and os.path.exists(f"{self.path}/{name}.idx")

    def publish(
        self, encoded: EncodedPack, *, repacked: bool = False, check: Callable[[str, str], None] | None = None
    ) -> None:
        """The pack is there and durable. Equal names have equal bytes, so one that is there may be replaced.

        `check` is given both files, written and synced, before anybody can see them under their names.
        What an error leaves is removed by `remove`.
        """
        final = f"{self.path}/{encoded.name}"
        self.keep(encoded.name, REPACKED_TEXT if repacked else KEEP_TEXT)
        pack = self._scratch.write(_TEMPORARY[0], encoded.pack, PACK_MODE)
        index = self._scratch.write(_TEMPORARY[1], encoded.index, PACK_MODE)
        if check is not None:
            try:
                check(pack, index)
            except BaseException:
                for name in _TEMPORARY:
                    self._scratch.drop(name)
                raise
        self._scratch.move(pack, final + ".pack")
        self._scratch.move(index, final + ".idx")
        self._disk.sync_dir(self.path)

    def publish_stream(
        self,
        blocks: Callable[[], Iterable[bytes]],
        entries: Sequence[Entry],
        *,
        repacked: bool = False,
        check: Callable[[str, str], None] | None = None,
    ) -> str:
        """As `publish`, for a pack that is too large to hold in memory; its name.

        `blocks` is the pack without its checksum; it is read twice, once to know the name.
        """
        digest = hashlib.sha1()
        for block in blocks():
            digest.update(block)
        checksum = digest.digest()
        encoded = EncodedPack(
            name=f"pack-{checksum.hex()}", pack=chain(blocks(), (checksum,)), index=encode_index(entries, checksum)
        )
        was_there = self.has(encoded.name)
        try:
            self.publish(encoded, repacked=repacked, check=check)
        except BaseException:
            if not was_there:
                with contextlib.suppress(OSError):
                    self.remove(encoded.name)
            raise
        return encoded.name

    def keep(self, name: str, text: bytes = KEEP_TEXT) -> None:
        """There is a `.keep` of ours; one that says less than `text` is replaced, and is never missing meanwhile."""
        path = f"{self.path}/{name}.keep"
        try:
            fd = self._disk.create(path, KEEP_MODE)
        except FileExistsError:
            if text != KEEP_TEXT and PackFile(self.path, name).is_ours():
                self._scratch.move(self._scratch.write(_TEMPORARY[2], text, KEEP_MODE), path)
            return
        try:
            self._disk.write(fd, text)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Raises OSError; what is left then is removed by the next `mend`."""
        # git keeps a table over all packs where it was told to; one that names a pack that is gone
        # only costs git warnings, so it goes first, as `git repack` does it. A look is cheaper than the attempt.
        files = [f"{self.path}/{name}.idx", f"{self.path}/{name}.pack", f"{self.path}/{name}.keep"]
        table = f"{self.path}/multi-pack-index"
        for file in [table, *files] if os.path.lexists(table) else files:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(file)

    def clear(self) -> None:
        """Remove temporary files that a failure or a kill has left. Raises OSError."""
        for name in _TEMPORARY:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(f"{self.path}/{name}")

    # --- what earlier processes left ---

    def resume(self) -> Resumed:
        """The newest pack of ours, to be gone on with, or an empty one."""
        ours = self._newest_of_ours()
        if not ours:
            return Resumed(rolling=RollingPack(), name=None, superseded=())
        best = ours[0]
        for other in ours[1:]:
            if len(other) > len(best) and holds_all(other, best):
                best = other
        superseded = [pack.name for pack in ours if pack is not best and holds_all(best, pack)]
        rolling = self._load(best)
        if rolling is None:
            return Resumed(rolling=RollingPack(), name=None, superseded=())
        if rolling.commits >= SEAL_COMMITS or rolling.size_bytes >= SEAL_BYTES:
            return Resumed(rolling=RollingPack(), name=None, superseded=superseded)
        return Resumed(rolling=rolling, name=best.name, superseded=superseded)

    def newest(self) -> str | None:
        """The name of the newest pack of ours."""
        ours = self._newest_of_ours(1)
        return ours[0].name if ours else None

    def _newest_of_ours(self, limit: int = _LOOK_AT) -> list[PackFile]:
        ours: list[PackFile] = []
        for pack in list(self._objects.rescan()):
            if len(ours) == limit:
                break
            with contextlib.suppress(OSError, Damaged):
                # One that was encoded anew is sealed whatever its size: its age says nothing about its commits.
                if pack.is_ours() and not pack.is_repacked() and len(pack) and pack.size_bytes() < 4 * SEAL_BYTES:
                    ours.append(pack)
        return ours

    def _load(self, pack: PackFile) -> RollingPack | None:
        """None where it is damaged: readers say so when they need it, the writer begins a new one."""
        try:
            return RollingPack.resume(read_file(pack.base + ".pack"), pack.entries())
        except (OSError, Damaged, IndexError):
            return None

    def mend(self) -> None:
        """Remove what a killed process left of ours: halves of packs, and packs that another one holds whole.

        Nothing that is in no other pack is ever removed. A pack that was written but never published
        is gone on with: its unreachable objects cost a few kilobytes, their loss might cost a person
        who has found them in the work tree.
        """
        self.clear()
        names = set(names_in(self.path))
        for base in sorted({os.path.splitext(name)[0] for name in names if name.startswith("pack-")}):
            if base + ".pack" in names and base + ".idx" in names:
                if base + ".keep" not in names and self._is_made_by_us(base):
                    self.keep(base)
            elif self._is_made_by_us(base):
                self.remove(base)
        self._objects.forget_packs()
        ours = [pack for pack in self._objects.packs() if pack.is_ours()]
        removed: set[str] = set()
        for small in ours:
            for large in ours:
                if large is small or large.name in removed or not _is_larger(large, small):
                    continue
                if small.is_repacked() and not large.is_repacked():
                    # A part of it that is encoded anew already; maintenance goes on from there.
                    continue
                if holds_all(large, small) and is_whole(large):
                    self.remove(small.name)
                    removed.add(small.name)
                    break
        if removed:
            self._objects.forget_packs()

    def _is_made_by_us(self, base: str) -> bool:
        """By its `.keep`, or by the modes of what is there."""
        if PackFile(self.path, base).is_ours():
            return True
        for end, mode in ((".pack", PACK_MODE), (".idx", PACK_MODE), (".keep", KEEP_MODE)):
            found = lstat(f"{self.path}/{base}{end}")
            if found is not None and (stat.S_IMODE(found.st_mode) != mode or found.st_uid != os.geteuid()):
                return False
        return True


def _is_larger(one: PackFile, other: PackFile) -> bool:
    """Of two with the same objects, one that was encoded anew is the one to keep."""
    try:
        return (len(one), one.is_repacked(), one.name) > (len(other), other.is_repacked(), other.name)
    except (OSError, Damaged):
        return False


def holds_all(large: PackFile, small: PackFile) -> bool:
    """Whether every object of `small` is in `large`. False where either cannot be read."""
    try:
        # Packs have hardly anything in common, as a rule: one look spares reading the whole index.
        if len(small) and large.find(small.id_at(len(small) // 2)) is None:
            return False
        return all(large.find(entry[0]) is not None for entry in small.entries())
    except (OSError, Damaged):
        return False


def is_whole(pack: PackFile) -> bool:
    """Whether the last 20 bytes of pack and index are the checksums of what comes before them."""
    try:
        return checksum_fits(pack.base + ".pack") and checksum_fits(pack.base + ".idx")
    except OSError:
        return False


def checksum_fits(path: str) -> bool:
    """Whether a file's last 20 bytes are the checksum of what comes before them. Raises OSError."""
    digest, left = hashlib.sha1(), os.stat(path).st_size - 20
    with os.fdopen(open_file(path), "rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        return left == 0 and file.read(21) == digest.digest()
