"""A power cut at any moment (R1, R2): what was synced is there, of everything else any part may be.

The states are drawn at random (seeded), since a batch has too many unsynced effects for all of
their subsets: at every moment of a workload some trees that the rules of `openjobs.durable.disk`
allow, with the modes of files, which tell our locks from other programs'.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from openjobs.durable import Disk
from openjobs.durable.disk import AnyPath, Buffers
from openjobs.repo import Change, GitRepository, Transaction, View
from tests.support import git
from tests.support.chaos import Chaos


@attrs.define
class File:
    mode: int
    content: bytes = b""


@attrs.frozen
class Step:
    kind: str
    file: File | None = None
    path: str = ""
    target: str = ""
    content: bytes = b""


class PowerDisk(Disk):
    """The real disk, and a log from which the disk after a power cut is drawn. Every file starts out durable."""

    def __init__(self, root: Path, *, forgets: Callable[[str, str], bool] = lambda kind, path: False) -> None:
        super().__init__(durable=False)  # what a sync does is in the model
        self.root = root
        self.steps: list[Step] = []
        self._forgets = forgets
        self._fds: dict[int, tuple[File, str]] = {}
        self.base = {
            self._name(path): File(path.lstat().st_mode & 0o777, path.read_bytes())
            for path in root.rglob("*")
            if path.is_file()
        }
        self._files = dict(self.base)
        self._at_start = {id(file): file.content for file in self.base.values()}

    def _name(self, path: AnyPath) -> str:
        return os.path.relpath(path, self.root)

    def acknowledge(self, text: str) -> None:
        self.steps.append(Step("ack", path=text))

    def _opened(self, fd: int, path: AnyPath, mode: int, *, made: bool) -> int:
        name = self._name(path)
        if made:
            self._files[name] = File(mode)
            self.steps.append(Step("create", self._files[name], name))
        self._fds[fd] = self._files[name], name
        return fd

    def create(self, path: AnyPath, mode: int = 0o600) -> int:
        return self._opened(super().create(path, mode), path, mode, made=True)

    def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
        made = not os.path.lexists(path)
        return self._opened(super().open_append(path, mode), path, mode, made=made)

    def open_update(self, path: AnyPath, mode: int = 0o600) -> int:
        made = not os.path.lexists(path)
        return self._opened(super().open_update(path, mode), path, mode, made=made)

    def write(self, fd: int, data: Buffers) -> int:
        raw = bytes(data) if isinstance(data, bytes | bytearray | memoryview) else b"".join(map(bytes, data))
        file = self._fds[fd][0]
        file.content += raw
        self.steps.append(Step("write", file, content=file.content))
        return super().write(fd, raw)

    def sync(self, fd: int) -> None:
        file, name = self._fds[fd]
        if not self._forgets("sync", name):
            self.steps.append(Step("sync", file, content=file.content))

    def sync_dir(self, path: AnyPath) -> None:
        if not self._forgets("sync_dir", self._name(path)):
            self.steps.append(Step("sync_dir", path=self._name(path)))

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        super().rename(source, target)
        one, two = self._name(source), self._name(target)
        self._files[two] = self._files.pop(one)
        self.steps.append(Step("rename", self._files[two], one, two))

    def unlink(self, path: AnyPath) -> None:
        super().unlink(path)
        self.steps.append(Step("unlink", self._files.pop(self._name(path)), self._name(path)))

    def after_cut(self, moment: int, source: random.Random) -> dict[str, File]:
        """One tree that may be on the disk when the power goes after `moment` steps."""
        known = dict(self._at_start)
        names: list[tuple[Step, bool]] = []
        written: dict[int, bytes] = {}
        for step in self.steps[:moment]:
            if step.kind == "write":
                written[id(step.file)] = step.content
            elif step.kind == "sync":
                known[id(step.file)] = step.content
                written.pop(id(step.file), None)
            elif step.kind == "sync_dir":
                names = [(old, kept or self._concerns(old, step.path)) for old, kept in names]
            elif step.kind in ("create", "rename", "unlink"):
                names.append((step, False))
        tree = dict(self.base)
        in_order, cut = source.random() < 0.5, source.randint(0, len(names))
        for number, (step, kept) in enumerate(names):
            if kept or (number < cut if in_order else source.random() < 0.5):
                tree.pop(step.path, None)
                if step.kind != "unlink":
                    assert step.file is not None
                    tree[step.target or step.path] = step.file
        return {name: File(file.mode, self._content(file, known, written, source)) for name, file in tree.items()}

    @staticmethod
    def _concerns(step: Step, directory: str) -> bool:
        return os.path.dirname(step.target or step.path) == ("" if directory == "." else directory)

    @staticmethod
    def _content(file: File, known: dict[int, bytes], written: dict[int, bytes], source: random.Random) -> bytes:
        before, after = known.get(id(file), b""), written.get(id(file))
        if after is None:
            return before
        half = after[: (len(before) + len(after)) // 2]
        return source.choice([before, after, half, before + bytes(len(after) - len(before))])


def build(tree: dict[str, File], base: Path, root: Path) -> None:
    """Directories are as they were at the start; none is made or removed by the workload."""
    shutil.copytree(base, root, ignore=lambda directory, names: [n for n in names if not Path(directory, n).is_dir()])
    for name, file in tree.items():
        (root / name).write_bytes(file.content)
        (root / name).chmod(file.mode)


def append(text: str, path: str = "jobs.json") -> Transaction:
    def change(view: View) -> Change:
        grown = (view.read(path) or b"") + text.encode() + b"\n"
        return Change(files={path: grown, "newest": text.encode()}, subject=text)

    return change


def workload(root: Path, disk: PowerDisk, *, batches: int = 4) -> list[str]:
    repository = GitRepository(root, disk)
    texts: list[str] = []
    for number in range(batches):
        batch = [f"{number}.{k}" for k in range(1 + number % 3)]
        repository.transact([append(text, "history/0" if text.endswith("1") else "jobs.json") for text in batch])
        texts += batch
        disk.acknowledge(str(len(texts)))
    repository.close()
    return texts


@pytest.fixture
def base(tmp_path: Path) -> Path:
    made = GitRepository.create(tmp_path / "base", Disk(durable=False), {"jobs.json": b"", "history/0": b""})
    for number in range(3):
        made.transact([append(f"before {number}")])
    made.close()
    return tmp_path / "base"


def problem_after(tree: dict[str, File], acknowledged: int, texts: list[str], base: Path, root: Path) -> str | None:
    """What is wrong with a session that is opened after the cut; None where all is well."""
    build(tree, base, root)
    repository = GitRepository(root, Disk(durable=False))
    try:
        repository.transact([append("after")])
        history = [info.subject for info in repository.log()][::-1]
        problems = repository.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        repository.close()
    expected = ["session created", "before 0", "before 1", "before 2", *texts]
    there = len(history) - 1
    if there < 4 + acknowledged:
        return f"{4 + acknowledged - there} acknowledged commits are lost"
    if history[:-1] != expected[:there] or history[-1] != "after":
        return f"the history is not a beginning of what was committed: {history}"
    return "; ".join(problems) or None


def failures(base: Path, tmp_path: Path, disk: PowerDisk, root: Path, *, draws: int) -> list[str]:
    texts = workload(root, disk)
    source, found = random.Random(3), []
    for moment in range(len(disk.steps) + 1):
        acknowledged = max([0, *(int(step.path) for step in disk.steps[:moment] if step.kind == "ack")])
        for draw in range(draws):
            place = tmp_path / f"{moment}-{draw}"
            problem = problem_after(disk.after_cut(moment, source), acknowledged, texts, base, place)
            if problem:
                found.append(f"after step {moment} ({disk.steps[moment - 1].kind}): {problem}")
            elif moment % 40 == 0:
                git("fsck", "--strict", "--no-dangling", cwd=place)
            shutil.rmtree(place)
    return found


@pytest.mark.timeout(300)
def test_no_power_cut_loses_or_tears_anything(base: Path, tmp_path: Path, chaos: Chaos) -> None:
    """Acknowledged commits are there, no others but whole batches' beginnings, and it opens without help."""
    root = tmp_path / "work"
    shutil.copytree(base, root)
    assert failures(base, tmp_path, PowerDisk(root), root, draws=chaos.rounds(2, 60, "power cuts at each moment")) == []


@pytest.mark.parametrize(
    ("kind", "where"), [("sync", "openjobs-pack.tmp"), ("sync_dir", "objects/pack"), ("sync_dir", "refs/heads")]
)
@pytest.mark.timeout(300)
def test_the_harness_bites(base: Path, tmp_path: Path, kind: str, where: str) -> None:
    """Each sync is needed: without it the same states show lost or torn commits."""
    root = tmp_path / "work"
    shutil.copytree(base, root)
    disk = PowerDisk(root, forgets=lambda what, path: what == kind and path.endswith(where))
    assert failures(base, tmp_path, disk, root, draws=1) != []
