"""Maintenance when the disk fails at any step, when it is killed at any moment, beside other writers (R1, R2, R5)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from openjobs import errors
from openjobs.durable import Disk
from openjobs.repo import Change, GitRepository, RepositoryBusy, Transaction, View, repack
from openjobs.repo.objects import PackFile
from tests.support import git
from tests.support.chaos import Chaos
from tests.support.disks import FaultyDisk


def append(text: str) -> Transaction:
    """A row in one of three pages, a message in one segment."""

    def change(view: View) -> Change:
        page = f"pages/{len(text) % 3}"
        files = {path: (view.read(path) or b"") + text.encode() + b"\n" for path in (page, "log")}
        return Change(files=files, subject=text, trailers=[("Openjobs-Job", text[:-1])])

    return change


def fill(repository: GitRepository, name: str, batches: int) -> None:
    for batch in range(batches):
        repository.transact([append(f"{name} {batch}.{k}") for k in range(11)])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a pack that was encoded anew, sealed packs, a rolling pack and one that it replaced."""
    path = tmp_path_factory.mktemp("template") / "repo"
    repository = GitRepository.create(path, Disk(durable=False), {"meta.json": b"{}\n"})
    fill(repository, "old", 4)
    repository.maintain()
    fill(repository, "new", 7)
    repository.close()
    return path


def objects(path: Path) -> set[str]:
    return set(git("cat-file", "--batch-all-objects", "--batch-check", cwd=path).splitlines())


def pack_files(path: Path) -> list[PackFile]:
    directory = path / ".git" / "objects" / "pack"
    return [PackFile(str(directory), found.stem) for found in directory.glob("*.pack")]


def all_is_well(repository: GitRepository, *, with_git: bool) -> None:
    assert repository.check() == []
    if with_git:
        git("fsck", "--strict", "--full", "--no-dangling", cwd=repository.path)
        assert git("status", "--porcelain", cwd=repository.path) == ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("code", "for_good", "late"),
    [(errno.EIO, False, False), (errno.ENOSPC, True, False), (errno.EIO, False, True)],
    ids=["EIO-once", "ENOSPC-for-good", "EIO-once-after-the-effect"],
)
def test_each_effect_of_maintenance_may_fail(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, for_good: bool, late: bool
) -> None:
    """k = 1, 2, … until nothing fails: every object is there at once, writing goes on, the next run does it all."""
    monkeypatch.setattr(repack, "_CHUNK_BYTES", 12_000)
    monkeypatch.setattr(repack, "_CHUNK_COMMITS", 30)
    before = objects(template)
    failures = 0
    for k in range(1, 200):
        path = tmp_path / str(k)
        shutil.copytree(template, path)
        disk = FaultyDisk()
        repository = GitRepository(path, disk)
        repository.transact([lambda view: None])
        disk.arm(k, code, for_good=for_good, late=late)
        try:
            repository.maintain()
        except errors.StoreWriteFailed:
            failures += 1
        reached = bool(disk.failed)
        where = f"effect {k}: {disk.failed[:1]}"
        disk.disarm()
        assert before <= objects(path), where
        repository.transact([append("after")])
        repository.maintain()
        assert before <= objects(path), where
        fresh = sum(not pack.is_repacked() for pack in pack_files(path))
        assert fresh <= 3, where
        assert len(list(repository.log())) == 1 + 11 * 11 + 1, where
        assert {path.suffix for path in (path / ".git/objects/pack").iterdir()} == {".pack", ".idx", ".keep"}, where
        if k % 4 == 0:
            all_is_well(repository, with_git=k % 12 == 0)
        repository.close()
        shutil.rmtree(path)
        if not reached:
            break
    else:
        pytest.fail("maintenance never ended without a failure")
    assert k > 20
    assert failures > 15


def maintain_until_killed(path: Path, out: int) -> None:
    repository = GitRepository(path, Disk(durable=False))
    os.write(out, b"x")
    repository.maintain()


@pytest.mark.timeout(300)
def test_killed_maintenance_loses_nothing(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chaos: Chaos
) -> None:
    """Kills at random moments, with writing in between: every object stays, and the last run finds all to do done."""
    monkeypatch.setattr(repack, "_CHUNK_BYTES", 12_000)
    monkeypatch.setattr(repack, "_CHUNK_COMMITS", 30)
    path = tmp_path / "repo"
    shutil.copytree(template, path)
    source, killed = random.Random(11), 0
    for cycle in range(chaos.rounds(25, 300, "kills")):
        before = objects(path)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                maintain_until_killed(path, writer)
            finally:
                os._exit(0)
        os.close(writer)
        os.read(reader, 1)
        time.sleep(source.random() * 0.15)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(reader)
        killed += os.WIFSIGNALED(status)
        assert before <= objects(path), f"cycle {cycle}"
        repository = GitRepository(path, Disk(durable=False))
        fill(repository, f"cycle {cycle}", 2)
        assert before <= objects(path), f"cycle {cycle}"
        all_is_well(repository, with_git=cycle % 10 == 9)
        repository.close()
    assert killed > 3
    repository = GitRepository(path, Disk(durable=False))
    repository.maintain()
    all_is_well(repository, with_git=True)
    assert len(pack_files(path)) < 40
    repository.close()


@pytest.mark.timeout(300)
def test_writers_and_git_beside_maintenance_lose_nothing(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of ours commits, git commits and repacks, a reader reads everything, all while packs are encoded.

    git gives up where the branch moves between its look and its lock, and a busy writer may never let it in: after each
    of its rounds, in which all of them meet, the writer rests until git has made a commit and maintenance a step.
    """
    monkeypatch.setattr(repack, "_CHUNK_BYTES", 12_000)
    path = tmp_path / "repo"
    shutil.copytree(template, path)
    rounds, a_round = 8, 20
    made: list[str] = []
    foreign: list[str] = []
    reads = encoded = repacks = 0
    git_got_in, stepped, over = threading.Event(), threading.Event(), threading.Event()
    problems: list[BaseException] = []

    def write() -> None:
        repository = GitRepository(path, Disk(durable=False))
        for _ in range(rounds):
            goal = len(made) + a_round
            while len(made) < goal and not over.is_set():
                text = f"beside {len(made)}."
                with contextlib.suppress(RepositoryBusy):
                    repository.transact([append(text)])
                    made.append(text)
            for event in (git_got_in, stepped):
                event.clear()
            for event in (git_got_in, stepped):
                assert event.wait(60)
        repository.close()
        over.set()

    def commit() -> None:
        nonlocal repacks
        for number in itertools.count():
            if over.is_set() and (repacks or problems):
                return
            # git gives up where a lock is taken; only what it says it has made is expected.
            with contextlib.suppress(AssertionError):
                git("commit", "-q", "--allow-empty", "-m", f"foreign {number}", cwd=path)
                foreign.append(f"foreign {number}")
                git_got_in.set()
            if number % 5 == 4:
                with contextlib.suppress(AssertionError):
                    git("repack", "-a", "-d", "-q", cwd=path)
                    repacks += 1

    def read() -> None:
        nonlocal reads
        while not (over.is_set() and (reads or problems)):
            repository = GitRepository(path, Disk(durable=False))
            assert len(list(repository.log(paths=["log"]))) >= 11 * 11
            repository.close()
            reads += 1

    def encode() -> None:
        nonlocal encoded
        while not over.is_set():
            with contextlib.closing(repository.maintenance()) as maintenance, contextlib.suppress(RepositoryBusy):
                while maintenance.step() and not over.is_set():
                    encoded += 1
                    stepped.set()
                stepped.set()

    def watched(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)
            for event in (over, git_got_in, stepped):
                event.set()

    repository = GitRepository(path, Disk(durable=False))
    threads = [threading.Thread(target=watched, args=(work,)) for work in (write, commit, read)]
    for thread in threads:
        thread.start()
    watched(encode)
    for thread in threads:
        thread.join()
    assert problems == []
    assert (len(made), len(foreign) >= rounds, encoded > 0) == (rounds * a_round, True, True)
    subjects = [info.subject for info in repository.log()]
    assert {*made, *foreign} <= set(subjects)
    assert len(subjects) == len(set(subjects))
    repository.maintain()
    git("fsck", "--strict", "--full", "--no-dangling", cwd=path)
    repository.close()
