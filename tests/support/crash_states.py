"""What a disk may hold after a power cut, rebuilt from the effects of a workload.

`RecordingDisk` writes down every effect; `crash_states` gives, for every moment of the workload,
every file tree that the rules of `openjobs.durable.disk` allow then: what was synced is there; of
what was not synced, any part may be: each write wholly, not at all, its beginning, or its end (the
blocks before it never arrived); each name change or not.

`DyingDisk` stops the workload at its k-th effect, as a kill does: what was done stays.
`FailingDisk` lets the k-th effect fail with an error, once or from then on.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from openjobs.durable import Disk
from openjobs.durable.disk import AnyPath, Buffers

_BLOCK = 4096
#: the states of one moment are a product; more than this of them is a sign of a workload without syncs
_MOST = 4000


@attrs.frozen
class Effect:
    kind: str
    #: a number for the file, the same through renames
    inode: int = 0
    path: str = ""
    target: str = ""
    offset: int = 0
    data: bytes = b""


def joined(data: Buffers) -> bytes:
    return bytes(data) if isinstance(data, bytes | bytearray | memoryview) else b"".join(bytes(b) for b in data)


class Fate(enum.Enum):
    OPEN = "may be on the disk, and a sync brings it there"
    SYNCED = "is on the disk"
    DROPPED = "may be on the disk, and no sync brings it there any more"


@attrs.define
class _Write:
    effect: Effect
    fate: Fate = Fate.OPEN


class RecordingDisk(Disk):
    """The real disk; `effects` is what happened, in order, and `note` puts an acknowledgement among it.

    The sync of a file's bytes number `fail_sync` (from 0) fails, and as a kernel does that has dropped the
    pages, later syncs of that file say yes and do not bring back what was written before.
    """

    def __init__(self, root: Path, *, fail_sync: int | None = None) -> None:
        super().__init__(durable=False)  # what a sync does is in the model
        self.root = root
        self.syncs = 0
        self.fail_sync = fail_sync
        self.effects: list[Effect] = []
        self.base: dict[str, bytes] = {}
        self._numbers = itertools.count(1)
        self._inodes: dict[str, int] = {}
        self._fds: dict[int, int] = {}
        for path in sorted(root.rglob("*")):
            name = self._name(path)
            if path.is_file():
                self.base[name] = path.read_bytes()
                self._inodes[name] = next(self._numbers)

    @property
    def base_inodes(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(sorted(self.base), start=1)}

    def note(self, text: str) -> None:
        self.effects.append(Effect("note", path=text))

    def _name(self, path: AnyPath) -> str:
        return str(Path(path).relative_to(self.root))

    def _opened(self, path: AnyPath, existed: bool, fd: int) -> int:
        name = self._name(path)
        if not existed:
            self._inodes[name] = next(self._numbers)
            self.effects.append(Effect("create", self._inodes[name], name))
        self._fds[fd] = self._inodes[name]
        return fd

    def create(self, path: AnyPath, mode: int = 0o600) -> int:
        return self._opened(path, False, super().create(path, mode))

    def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
        existed = os.path.lexists(path)
        return self._opened(path, existed, super().open_append(path, mode))

    def open_update(self, path: AnyPath, mode: int = 0o600) -> int:
        existed = os.path.lexists(path)
        return self._opened(path, existed, super().open_update(path, mode))

    def write(self, fd: int, data: Buffers) -> int:
        raw = joined(data)
        written = super().write(fd, raw)
        offset = os.lseek(fd, 0, os.SEEK_CUR) - written
        self.effects.append(Effect("write", self._fds[fd], offset=offset, data=raw))
        return written

    def truncate(self, fd: int, length: int) -> None:
        super().truncate(fd, length)
        self.effects.append(Effect("truncate", self._fds[fd], offset=length))

    def sync(self, fd: int) -> None:
        self._fail_or_not(fd)
        super().sync(fd)
        self.effects.append(Effect("sync", self._fds[fd]))

    def sync_data(self, fd: int) -> None:
        self._fail_or_not(fd)
        super().sync_data(fd)
        self.effects.append(Effect("sync", self._fds[fd]))

    def _fail_or_not(self, fd: int) -> None:
        number, self.syncs = self.syncs, self.syncs + 1
        if number == self.fail_sync:
            self.effects.append(Effect("failed_sync", self._fds[fd]))
            raise OSError(errno.EIO, "the sync failed")

    def sync_dir(self, path: AnyPath) -> None:
        super().sync_dir(path)
        self.effects.append(Effect("sync_dir", path=self._name(path)))

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        super().rename(source, target)
        one, two = self._name(source), self._name(target)
        self._inodes[two] = self._inodes.pop(one)
        self.effects.append(Effect("rename", self._inodes[two], one, two))

    def unlink(self, path: AnyPath) -> None:
        super().unlink(path)
        name = self._name(path)
        self.effects.append(Effect("unlink", self._inodes.pop(name), name))


@attrs.frozen
class CrashState:
    #: what had happened, for a failure's message
    moment: int
    #: the notes made before it
    notes: Sequence[str]
    files: dict[str, bytes]

    def build(self, root: Path) -> None:
        for name, data in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(data)
            path.chmod(0o600)


def crash_states(disk: RecordingDisk, *, only_beginnings: Iterable[str] = (), since: int = 0) -> Iterator[CrashState]:
    """Every tree that a power cut may leave, at every moment after `since` effects.

    Files that ever had a name in `only_beginnings` arrive in the order of their writes (file systems that
    make a file longer only after its data).
    """
    beginnings = frozenset(only_beginnings)
    for moment in range(since, len(disk.effects) + 1):
        seen: set[tuple[tuple[str, bytes], ...]] = set()
        notes = [effect.path for effect in disk.effects[:moment] if effect.kind == "note"]
        for files in _at(disk, disk.effects[:moment], beginnings):
            key = tuple(sorted(files.items()))
            if key not in seen:
                seen.add(key)
                assert len(seen) <= _MOST
                yield CrashState(moment, notes, files)


def distinct(disk: RecordingDisk, *, only_beginnings: Iterable[str] = ()) -> Iterator[CrashState]:
    """`crash_states`, each tree once, for the last moment at which it is possible: most was acknowledged
    then. From the failed sync on, where there is one: what can happen before it is the same in every run."""
    failures = [number for number, effect in enumerate(disk.effects) if effect.kind == "failed_sync"]
    since = failures[0] if failures else 0
    states = crash_states(disk, only_beginnings=only_beginnings, since=since)
    yield from {tuple(sorted(state.files.items())): state for state in states}.values()


def _at(disk: RecordingDisk, effects: Sequence[Effect], beginnings: frozenset[str]) -> Iterator[dict[str, bytes]]:
    names = disk.base_inodes
    contents = {names[name]: data for name, data in disk.base.items()}
    known = {inode: {name} for name, inode in names.items()}
    unsynced: dict[int, list[_Write]] = {}
    renaming: list[Effect] = []
    for effect in effects:
        if effect.kind in ("write", "truncate"):
            unsynced.setdefault(effect.inode, []).append(_Write(effect))
        elif effect.kind in ("sync", "failed_sync"):
            todo = unsynced.get(effect.inode, [])
            for write in todo:
                if write.fate is Fate.OPEN:
                    write.fate = Fate.SYNCED if effect.kind == "sync" else Fate.DROPPED
            while todo and todo[0].fate is Fate.SYNCED:
                contents[effect.inode] = _applied(contents.get(effect.inode, b""), todo.pop(0).effect)
        elif effect.kind == "sync_dir":
            done = [e for e in renaming if str(Path(e.path).parent) == effect.path]
            renaming = [e for e in renaming if e not in done]
            names = _renamed(names, done)
        elif effect.kind in ("create", "rename", "unlink"):
            renaming.append(effect)
            known.setdefault(effect.inode, set()).update({effect.path, effect.target})
    variants = {
        inode: list(_contents(contents.get(inode, b""), todo, bool(known.get(inode, set()) & beginnings)))
        for inode, todo in unsynced.items()
    }
    for chosen in _subsets(renaming):
        tree = _renamed(names, chosen)
        for data in itertools.product(*variants.values()):
            now = contents | dict(zip(variants, data, strict=True))
            yield {name: now.get(inode, b"") for name, inode in tree.items()}


def _subsets(effects: Sequence[Effect]) -> Iterator[list[Effect]]:
    for keep in itertools.product((True, False), repeat=len(effects)):
        yield [effect for effect, kept in zip(effects, keep, strict=True) if kept]


def _renamed(names: dict[str, int], effects: Sequence[Effect]) -> dict[str, int]:
    names = dict(names)
    for effect in effects:
        if effect.kind == "create":
            names[effect.path] = effect.inode
        elif effect.kind == "unlink":
            names.pop(effect.path, None)
        else:
            names.pop(effect.path, None)
            names[effect.target] = effect.inode
    return names


def _contents(base: bytes, todo: Sequence[_Write], beginnings: bool) -> Iterator[bytes]:
    if beginnings and all(write.fate is Fate.OPEN for write in todo):
        yield base
        for write in todo:
            yield from _partly(base, write.effect, beginnings)
            base = _applied(base, write.effect)
        return
    states = [base]
    for write in todo:
        if write.fate is Fate.SYNCED:
            states = [_applied(before, write.effect) for before in states]
        else:
            states = [after for before in states for after in _partly(before, write.effect, beginnings)]
    yield from dict.fromkeys(states)


def _partly(before: bytes, effect: Effect, beginnings: bool) -> Iterator[bytes]:
    yield before
    yield _applied(before, effect)
    if effect.kind == "write":
        length = len(effect.data)
        for cut in sorted({1, length // 2, length - 1, _BLOCK, length - _BLOCK} & set(range(1, length))):
            yield _applied(before, attrs.evolve(effect, data=effect.data[:cut]))
            if not beginnings:
                yield _applied(before, attrs.evolve(effect, offset=effect.offset + cut, data=effect.data[cut:]))


def _applied(before: bytes, effect: Effect) -> bytes:
    if effect.kind == "truncate":
        return before[: effect.offset].ljust(effect.offset, b"\0")
    head = before[: effect.offset].ljust(effect.offset, b"\0")
    return head + effect.data + before[effect.offset + len(effect.data) :]


# --- stopping and failing --------------------------------------------------------------------------


class Killed(BaseException):
    """The process is no more. No `except Exception` sees it."""


class _CountingDisk(Disk):
    """Calls `_before` for every effect with what a write would still have to write."""

    def __init__(self) -> None:
        super().__init__(durable=False)  # neither a kill nor an error depends on what has reached the disk
        self.count = 0

    def _before(self, fd: int | None = None, data: bytes = b"") -> None:
        raise NotImplementedError

    def create(self, path: AnyPath, mode: int = 0o600) -> int:
        self._before()
        return super().create(path, mode)

    def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
        self._before()
        return super().open_append(path, mode)

    def open_update(self, path: AnyPath, mode: int = 0o600) -> int:
        self._before()
        return super().open_update(path, mode)

    def write(self, fd: int, data: Buffers) -> int:
        raw = joined(data)
        self._before(fd, raw)
        return super().write(fd, raw)

    def truncate(self, fd: int, length: int) -> None:
        self._before()
        super().truncate(fd, length)

    def sync(self, fd: int) -> None:
        self._before()
        super().sync(fd)

    def sync_data(self, fd: int) -> None:
        self._before()
        super().sync_data(fd)

    def sync_dir(self, path: AnyPath) -> None:
        self._before()
        super().sync_dir(path)

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        self._before()
        super().rename(source, target)

    def unlink(self, path: AnyPath) -> None:
        self._before()
        super().unlink(path)


class DyingDisk(_CountingDisk):
    """Dies before its effect number `after` (from 0); of a write, `part` (0 to 1) still happens."""

    def __init__(self, after: int, part: float = 0.0) -> None:
        super().__init__()
        self._after = after
        self._part = part

    def _before(self, fd: int | None = None, data: bytes = b"") -> None:
        number, self.count = self.count, self.count + 1
        if number == self._after and fd is not None:
            Disk.write(self, fd, data[: int(len(data) * self._part)])
        if number >= self._after:
            raise Killed


class FailingDisk(_CountingDisk):
    """Effect number `at` (from 0) fails with `code`, or it and all later ones; of a write, half happens first."""

    def __init__(self, at: int, code: int = errno.EIO, *, once: bool = True) -> None:
        super().__init__()
        self._at = at
        self._code = code
        self._once = once
        self.failed = False

    def _before(self, fd: int | None = None, data: bytes = b"") -> None:
        number, self.count = self.count, self.count + 1
        if number == self._at or (number > self._at and not self._once):
            self.failed = True
            if fd is not None:
                Disk.write(self, fd, data[: len(data) // 2])
            raise OSError(self._code, os.strerror(self._code))
