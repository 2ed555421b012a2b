"""The repository when the disk fails at any step, and when its process is killed at any moment (R1, R2, R3, R5)."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from openjobs import errors
from openjobs.durable import Disk
from openjobs.durable.disk import AnyPath, Buffers
from openjobs.repo import Change, GitRepository, Outcome, Transaction, View
from tests.support import git
from tests.support.chaos import Chaos
from tests.support.disks import FaultyDisk

FILES = {"meta.json": b"{}\n", "jobs.json": b"start\n", "old/file": b"old\n"}


def append(text: str, path: str = "jobs.json") -> Transaction:
    """One file that grows, and one that is replaced. A retry with the same text changes nothing, as with a job's id."""

    def change(view: View) -> Change | None:
        before = view.read(path) or b""
        if text.encode() in before.splitlines():
            return None
        return Change(files={path: before + text.encode() + b"\n", "newest": text.encode()}, subject=text)

    return change


def lines(repository: GitRepository) -> list[str]:
    return (repository.view().read("jobs.json") or b"").decode().splitlines()


def drop(view: View) -> Change:
    return Change(files={"old/file": None}, subject="drop")


BATCH = [append("one"), append("two"), append("deep", "a/b/c"), drop]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a rolling pack, one that it replaced, and one that goes with the next batch."""
    path = tmp_path_factory.mktemp("template") / "repo"
    with_packs = GitRepository.create(path, Disk(durable=False), FILES)
    for number in range(3):
        with_packs.transact([append(f"before {number}")])
    with_packs.close()
    return path


BEFORE = ["start", "before 0", "before 1", "before 2", "warm 0", "warm 1"]


def prepared(template: Path, path: Path) -> tuple[GitRepository, FaultyDisk]:
    shutil.copytree(template, path)
    disk = FaultyDisk()
    repository = GitRepository(path, disk)
    for number in range(2):
        repository.transact([append(f"warm {number}")])
    return repository, disk


def attempt(repository: GitRepository) -> list[Outcome] | errors.OpenJobsError:
    try:
        return repository.transact(BATCH)
    except (errors.StoreWriteFailed, errors.OutcomeUnknown) as error:
        return error


def all_is_well(repository: GitRepository, *, with_git: bool) -> None:
    assert repository.check() == []
    assert [name for name in os.listdir(repository.path) if "edited" in name] == []
    if with_git:
        git("fsck", "--strict", "--full", "--no-dangling", cwd=repository.path)
        assert git("status", "--porcelain", cwd=repository.path) == ""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize(
    ("code", "late"),
    [(errno.EIO, False), (errno.ENOSPC, False), (errno.EACCES, False), (errno.EIO, True)],
    ids=["EIO", "ENOSPC", "EACCES", "EIO-after-the-effect"],
)
def test_each_effect_of_a_batch_may_fail(template: Path, tmp_path: Path, code: int, for_good: bool, late: bool) -> None:
    """k = 1, 2, … until nothing fails: done, refused with nothing changed, or unknown; afterwards all works again."""
    ends: set[str] = set()
    for k in range(1, 200):
        path = tmp_path / str(k)
        repository, disk = prepared(template, path)
        before = repository.view().commit_id
        disk.arm(k, code, for_good=for_good, late=late)
        end = attempt(repository)
        reached = bool(disk.failed)
        where = f"effect {k}: {disk.failed[:1]}"
        disk.disarm()
        fresh = GitRepository(path, Disk(durable=False))
        if isinstance(end, errors.StoreWriteFailed):
            ends.add("refused")
            assert end.errno == code, where
            assert fresh.view().commit_id == before, where
            assert lines(fresh) == BEFORE, where
            if k % 8 == 0 and not for_good:
                git("fsck", "--strict", "--no-dangling", cwd=path)
        elif isinstance(end, errors.OutcomeUnknown):
            ends.add("unknown")
            assert fresh.view().commit_id == before or lines(fresh) == [*BEFORE, "one", "two"], where
            repository.republish()
        else:
            ends.add("done")
            assert [outcome.error for outcome in end] == [None] * 4, where
            assert lines(fresh) == [*BEFORE, "one", "two"], where
        assert lines(repository) == lines(fresh), where
        repository.transact([*BATCH[:3], append("after")])
        assert lines(repository) == [*BEFORE, "one", "two", "after"], where
        assert [info.subject for info in repository.log()].count("one") == 1, where
        all_is_well(repository, with_git=k % 10 == 0)
        fresh.close()
        repository.close()
        shutil.rmtree(path)
        if not reached:
            break
    else:
        pytest.fail("the batch never ended without a failure")
    assert k > 40
    assert ends == {"refused", "unknown", "done"}


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
def test_each_effect_of_creating_may_fail(tmp_path: Path, for_good: bool) -> None:
    """Nothing is there, or everything; what is left over is swept by the next that creates it."""
    for k in range(1, 200):
        home = tmp_path / str(k)
        home.mkdir()
        disk = FaultyDisk()
        disk.arm(k, errno.ENOSPC, for_good=for_good)
        try:
            GitRepository.create(home / "repo", disk, FILES)
        except errors.StoreWriteFailed:
            assert not (home / "repo").exists()
            if not for_good:
                assert [name for name in os.listdir(home) if (home / name / ".git" / "HEAD").exists()] == []
        except errors.OutcomeUnknown:
            assert (home / "repo").exists()
        reached = bool(disk.failed)
        disk.disarm()
        if not (home / "repo").exists():
            GitRepository.create(home / "repo", disk, FILES)
        repository = GitRepository(home / "repo", disk)
        repository.transact([append("one")])
        assert lines(repository) == ["start", "one"]
        all_is_well(repository, with_git=k % 10 == 0)
        repository.close()
        if not reached:
            break
    assert k > 40


def test_each_effect_of_recovery_may_fail(template: Path, tmp_path: Path) -> None:
    """Recovery that fails is refused, and the next one does the rest."""
    for k in range(1, 200):
        path = tmp_path / str(k)
        shutil.copytree(template, path)
        killed_in_the_middle(path)
        disk = FaultyDisk()
        repository = GitRepository(path, disk)
        disk.arm(k, errno.EIO)
        with contextlib.suppress(errors.StoreWriteFailed, errors.OutcomeUnknown):
            repository.transact([append("one")])
        reached = bool(disk.failed)
        disk.disarm()
        repository.transact([append("one"), append("two")])
        assert lines(repository) == ["start", "before 0", "before 1", "before 2", "one", "two"]
        all_is_well(repository, with_git=k % 8 == 0)
        repository.close()
        if not reached:
            break
    assert k > 40


def killed_in_the_middle(path: Path) -> None:
    """As a process leaves it that dies just before the branch moves."""

    class Killed(BaseException):
        pass

    class Dying(FaultyDisk):
        def rename(self, source: object, target: object) -> None:
            if str(target).endswith("refs/heads/main"):
                self.dead = True
            self._check()
            super().rename(source, target)  # type: ignore[arg-type]

        dead = False

        def _check(self) -> None:
            if self.dead:
                raise Killed

        def unlink(self, path: object) -> None:
            self._check()
            super().unlink(path)  # type: ignore[arg-type]

    repository = GitRepository(path, Dying())
    with pytest.raises(Killed):
        repository.transact([append("lost")])
    assert (path / ".git" / "index.lock").exists()
    assert (path / ".git" / "refs" / "heads" / "main.lock").exists()
    assert "lost" in (path / "jobs.json").read_text()


def test_what_a_killed_process_left_is_mended(template: Path, tmp_path: Path) -> None:
    """Locks, packs, work tree and index ahead of the branch: all as in HEAD again, without anybody's help."""
    path = tmp_path / "repo"
    shutil.copytree(template, path)
    killed_in_the_middle(path)
    repository = GitRepository(path, Disk(durable=False))
    assert repository.check() != []
    assert lines(repository)[-1] == "before 2"
    repository.transact([lambda view: None])
    assert (path / "jobs.json").read_text().splitlines()[-1] == "before 2"
    all_is_well(repository, with_git=True)
    repository.close()


@pytest.mark.parametrize("commits", [1, 40], ids=["pack goes on", "pack is full"])
def test_a_file_that_was_half_appended_to_is_not_an_edited_one(template: Path, tmp_path: Path, commits: int) -> None:
    """Its other half is in the pack of the batch that never became visible, though nothing goes on from that one."""
    path = tmp_path / "repo"
    shutil.copytree(template, path)

    class Killed(BaseException):
        pass

    class Dying(FaultyDisk):
        dead = False

        def write(self, fd: int, data: Buffers) -> int:
            if self.effects[-1].name == "open" and self.effects[-1].target.endswith("jobs.json"):
                super().write(fd, bytes(data)[:-3])  # type: ignore[arg-type]
                self.dead = True
                raise Killed
            return super().write(fd, data)

        def rename(self, source: AnyPath, target: AnyPath) -> None:
            self._check()
            super().rename(source, target)

        def unlink(self, path: AnyPath) -> None:
            self._check()
            super().unlink(path)

        def _check(self) -> None:
            if self.dead:
                raise Killed

    repository = GitRepository(path, Dying())
    with pytest.raises(Killed):
        repository.transact([append(f"lost {number}") for number in range(commits)])
    torn = (path / "jobs.json").read_text()
    assert "lost" in torn
    assert not torn.endswith("\n")
    fresh = GitRepository(path, Disk(durable=False))
    fresh.transact([append("after")])
    assert fresh.kept_aside == ()
    assert (path / "jobs.json").read_bytes() == fresh.view().read("jobs.json")
    all_is_well(fresh, with_git=True)
    fresh.close()


def test_an_edit_after_a_kill_is_not_lost(template: Path, tmp_path: Path) -> None:
    """What a person wrote on top of a dead process's work tree is theirs: it is kept aside."""
    path = tmp_path / "repo"
    shutil.copytree(template, path)
    killed_in_the_middle(path)
    (path / "jobs.json").write_text("edited\n")
    repository = GitRepository(path, Disk(durable=False))
    repository.transact([append("one")])
    assert (path / "jobs.json.edited-1").read_text() == "edited\n"
    assert lines(repository)[-1] == "one"
    assert repository.check() == []
    repository.close()


def test_a_failed_reflog_is_no_failure(template: Path, tmp_path: Path) -> None:
    """The commit stands whatever happens to its reflog."""
    repository, _ = prepared(template, tmp_path / "repo")
    logs = tmp_path / "repo" / ".git" / "logs"
    shutil.rmtree(logs)
    logs.write_text("in the way")
    [outcome] = repository.transact([append("one")])
    assert outcome.error is None
    assert lines(repository) == [*BEFORE, "one"]
    repository.close()


def test_a_fifo_is_waited_for_by_nobody(template: Path, tmp_path: Path) -> None:
    """One in the place of a reflog, which nobody reads: the commit stands, and the locks are given back."""
    repository, _ = prepared(template, tmp_path / "repo")
    reflog = tmp_path / "repo" / ".git" / "logs" / "HEAD"
    reflog.unlink()
    os.mkfifo(reflog)
    [outcome] = repository.transact([append("one")])
    assert outcome.error is None
    assert lines(repository) == [*BEFORE, "one"]
    repository.close()


# --- killed processes -----------------------------------------------------------------------------------


def write_until_killed(path: Path, cycle: int, out: int) -> None:
    """The child: batches of one to six, each acknowledged through the pipe once it is durable."""
    repository = GitRepository(path, Disk(durable=False))
    source, number = random.Random(cycle), 0
    while True:
        texts = [f"{cycle}.{number + k}" for k in range(source.randint(1, 6))]
        number += len(texts)
        outcomes = repository.transact(
            [append(text, "jobs.json" if source.random() < 0.8 else f"p{number % 3}/x") for text in texts]
        )
        assert all(outcome.error is None for outcome in outcomes)
        os.write(out, "".join(f"{text}\n" for text in texts).encode())


def killed_writer(path: Path, cycle: int, delay_s: float) -> list[str]:
    """One child from its start to its death; what it had acknowledged."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            write_until_killed(path, cycle, writer)
        finally:
            os._exit(1)
    os.close(writer)
    first = os.read(reader, 65536)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as rest:
        acknowledged = (first + rest.read()).decode().splitlines()
    assert os.WIFSIGNALED(status), "the writer ended by itself"
    return acknowledged


@pytest.mark.timeout(300)
def test_killed_writers_lose_nothing(tmp_path: Path, chaos: Chaos) -> None:
    """A hundred kills at random moments: every acknowledged commit is there once, and all is well without help."""
    path = tmp_path / "repo"
    GitRepository.create(path, Disk(durable=False), FILES).close()
    source, acknowledged = random.Random(chaos.seed(7)), []
    most = 0
    for cycle in range(chaos.rounds(100, 1000, "kills")):
        acknowledged += killed_writer(path, cycle, source.random() * 0.02)
        repository = GitRepository(path, Disk(durable=False))
        repository.transact([append(f"recovered {cycle}")])
        acknowledged.append(f"recovered {cycle}")
        subjects = [info.subject for info in repository.log()]
        assert len(subjects) == len(set(subjects))
        assert set(acknowledged) <= set(subjects), f"cycle {cycle}"
        most = max(most, len(list((path / ".git" / "objects" / "pack").glob("*.pack"))))
        if cycle % 10 == 9:
            all_is_well(repository, with_git=cycle % 50 == 49)
        repository.close()
    assert most < 50
