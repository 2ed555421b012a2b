"""Our repository beside real git: what git thinks of it, and what both do to each other."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import dulwich.repo
import pytest

from openjobs import errors
from openjobs.durable import Disk, FileLock
from openjobs.durable.disk import AnyPath, Buffers
from openjobs.repo import Change, GitRepository, RepositoryBusy, Transaction, View
from openjobs.repo.objects import ObjectStore, PackFile
from openjobs.repo.scratch import Scratch
from tests.support import git
from tests.support.disks import FaultyDisk, RecordingDisk

NOW = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
FILES = {"meta.json": b"{}\n", "jobs.json": b"start\n", "history/00/0000.jsonl": b"line\n" * 200}


def append(text: str, path: str = "jobs.json", *more: str) -> Transaction:
    def change(view: View) -> Change:
        files = {name: (view.read(name) or b"") + text.encode() + b"\n" for name in (path, *more)}
        return Change(files=files, subject=text, trailers=(("Openjobs-Kind", "test"),))

    return change


def lines(repository: GitRepository, path: str = "jobs.json") -> list[str]:
    return (repository.view().read(path) or b"").decode().splitlines()


def patiently(repository: GitRepository, transaction: Transaction) -> None:
    """A process that is being started holds a copy of our flock for the moment between fork and exec."""
    for _ in range(200):
        try:
            repository.transact([transaction])
            return
        except RepositoryBusy:
            time.sleep(0.005)
    raise AssertionError("the repository was never free")


def packs(repository: GitRepository, end: str = "pack") -> list[str]:
    return sorted(path.name for path in (repository.path / ".git" / "objects" / "pack").glob(f"*.{end}"))


def healthy(repository: GitRepository, *, clean: bool = True) -> None:
    """git finds nothing wrong, and neither do we."""
    git("fsck", "--strict", "--full", "--no-dangling", cwd=repository.path)
    if clean:
        assert repository.check() == []
        assert git("status", "--porcelain", cwd=repository.path) == ""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[GitRepository]:
    made = GitRepository.create(tmp_path / "repo", Disk(durable=False), FILES, now=NOW)
    yield made
    made.close()


def test_git_sees_an_ordinary_repository(repository: GitRepository) -> None:
    """log, status, reflog, show, blame and fsck work as in any other."""
    repository.transact([append("one"), append("two", "jobs.json", "jobs/00/0000.json")], now=NOW)
    repository.transact([append("three")], now=NOW)
    healthy(repository)
    assert git("log", "--format=%an <%ae>|%cn|%cI|%s", cwd=repository.path).splitlines() == [
        f"openjobs <openjobs@localhost>|openjobs|2026-05-06T07:08:09+00:00|{subject}"
        for subject in ("three", "two", "one", "session created")
    ]
    assert git("log", "-1", "--format=%(trailers:key=Openjobs-Kind,valueonly)", cwd=repository.path) == "test\n"
    assert git("show", "HEAD~1:jobs.json", cwd=repository.path) == "start\none\ntwo"
    assert git("reflog", "--format=%gs", cwd=repository.path).splitlines() == [
        "commit: three",
        "commit: 2 changes, last: two",
        "commit (initial): session created",
    ]
    assert len(git("blame", "jobs.json", cwd=repository.path).splitlines()) == 4
    assert git("rev-parse", "--abbrev-ref", "HEAD", cwd=repository.path) == "main"


def test_a_clone_has_everything(repository: GitRepository, tmp_path: Path) -> None:
    """Through the protocol, so git has repacked all of it."""
    for number in range(70):
        repository.transact([append(f"n{number}")])
    git("clone", "-q", "--no-local", repository.path, tmp_path / "clone", cwd=tmp_path)
    assert (tmp_path / "clone" / "jobs.json").read_text().splitlines() == lines(repository)
    git("fsck", "--strict", cwd=tmp_path / "clone")


def test_every_version_can_be_read_by_dulwich(repository: GitRepository) -> None:
    """All 200 commits, through sealed and rolling packs."""
    for number in range(20):
        repository.transact([append(f"{number}.{k}") for k in range(10)])
    with dulwich.repo.Repo(str(repository.path)) as other:
        entries = list(other.get_walker())
        assert len(entries) == 201
        sizes = [len(other[other[entry.commit.tree][b"jobs.json"][1]].data) for entry in entries]
    assert sizes == sorted(sizes, reverse=True)


def test_the_effects_come_in_the_order_of_the_protocol(tmp_path: Path) -> None:
    """`.keep` before the pack, pack before work tree, index before branch, and each synced before it counts.

    A file that grows is appended to, another is replaced.
    """
    disk = RecordingDisk()
    repository = GitRepository.create(tmp_path / "repo", disk, FILES)
    repository.transact([append("warm")])
    disk.effects.clear()
    grown = (repository.view().read("jobs.json") or b"") + b"one\n"
    repository.transact([lambda view: Change(files={"jobs.json": grown, "meta.json": b"{1}\n"}, subject="one")])
    seen = [(effect.name, effect.target.removeprefix(str(repository.path) + "/")) for effect in disk.effects]
    short = [(name, "pack" + target[-5:] if "pack-" in target else target) for name, target in seen]
    scratch, pack = ".git/openjobs/scratch", ".git/objects/pack"
    assert [(name, target.replace(f"{pack}/", "")) for name, target in short] == [
        ("open", ".git/openjobs/lock"),
        ("create", ".git/index.lock"),
        ("write", ".git/index.lock"),
        ("create", "pack.keep"),
        ("write", "pack.keep"),
        ("create", "openjobs-pack.tmp"),
        ("write", "openjobs-pack.tmp"),
        ("sync", "openjobs-pack.tmp"),
        ("create", "openjobs-idx.tmp"),
        ("write", "openjobs-idx.tmp"),
        ("sync", "openjobs-idx.tmp"),
        ("rename", "pack.pack"),
        ("rename", "pack" + seen[12][1][-5:]),
        ("sync_dir", pack),
        ("open", "jobs.json"),
        ("write", "jobs.json"),
        ("create", f"{scratch}/work"),
        ("write", f"{scratch}/work"),
        ("rename", "meta.json"),
        ("create", f"{scratch}/index"),
        ("write", f"{scratch}/index"),
        ("sync", f"{scratch}/index"),
        ("rename", ".git/index"),
        ("create", ".git/refs/heads/main.lock"),
        ("write", ".git/refs/heads/main.lock"),
        ("sync", ".git/refs/heads/main.lock"),
        ("rename", ".git/refs/heads/main"),
        ("sync_dir", ".git/refs/heads"),
        ("open", ".git/logs/refs/heads/main"),
        ("write", ".git/logs/refs/heads/main"),
        ("open", ".git/logs/HEAD"),
        ("write", ".git/logs/HEAD"),
        ("unlink", ".git/index.lock"),
        *[("unlink", target.replace(f"{pack}/", "")) for name, target in short[33:]],
    ]
    assert seen[12][1].endswith(".idx")
    repository.close()


def test_a_file_that_grows_is_appended_to(repository: GitRepository) -> None:
    """A segment of messages is not written again for each line: it stays the same file, and git sees nothing amiss."""
    path = repository.path / "jobs.json"
    repository.transact([append("one")])
    same = path.stat().st_ino
    repository.transact([append("two"), append("three")])
    assert path.read_text() == "start\none\ntwo\nthree\n"
    assert path.stat().st_ino == same
    healthy(repository)


def test_a_file_with_a_second_name_is_replaced(repository: GitRepository, tmp_path: Path) -> None:
    """Whoever made a hard link of it keeps what it was."""
    path, link = repository.path / "jobs.json", tmp_path / "copy"
    repository.transact([append("one")])
    link.hardlink_to(path)
    repository.transact([append("two")])
    assert (link.read_text(), path.read_text()) == ("start\none\n", "start\none\ntwo\n")
    healthy(repository)


def test_a_file_that_is_exchanged_in_the_last_moment_is_not_appended_to(tmp_path: Path) -> None:
    """Between the look at the file and its opening: 1. somebody removes it, 2. we open, and make, an empty one."""

    class Removing(Disk):
        def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
            if str(path).endswith("jobs.json"):
                os.unlink(path)
            return super().open_append(path, mode)

    repository = GitRepository.create(tmp_path / "repo", Removing(durable=False), FILES)
    repository.transact([append("one")])
    repository.transact([append("two")])
    assert (repository.path / "jobs.json").read_text() == "start\none\ntwo\n"
    healthy(repository)
    repository.close()


class Meddling(Disk):
    """Before (or right after) the named step on `jobs.json`, once, somebody does something to it."""

    def __init__(self, step: str, meddle: Callable[[Path], object]) -> None:
        super().__init__(durable=False)
        self._step, self._meddle = step, meddle
        self.is_armed = False
        self._ours = -1

    def _at(self, step: str, path: AnyPath) -> None:
        if self.is_armed and step == self._step and str(path).endswith("jobs.json"):
            self.is_armed = False
            self._meddle(Path(path))

    def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
        self._at("open", path)
        fd = super().open_append(path, mode)
        self._path = path
        self._ours = fd if str(path).endswith("jobs.json") else -1
        return fd

    def write(self, fd: int, data: Buffers) -> int:
        if fd != self._ours:
            return super().write(fd, data)
        self._at("write", self._path)
        written = super().write(fd, data)
        self._ours = -1
        self._at("written", self._path)
        return written

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        super().rename(source, target)
        self._at("renamed", target)


def overwrite(path: Path) -> None:
    """In place, of the same size."""
    with path.open("r+b") as file:
        file.write(b"S")


def add_a_line(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"Somebody's\n")


def exchange(path: Path) -> None:
    path.with_name("other").write_text("Somebody's\n")
    path.with_name("other").rename(path)


def put_a_directory_there(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "Somebody's").touch()


def put_a_link_there(path: Path) -> None:
    path.unlink()
    path.symlink_to("Somebody's")


def put_a_fifo_there(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def meddled_with(path: Path, step: str, meddle: Callable[[Path], object]) -> GitRepository:
    """A repository in whose second batch somebody met `jobs.json` at that step of its being written."""
    disk = Meddling(step, meddle)
    repository = GitRepository.create(path, disk, FILES)
    repository.transact([append("one")])
    disk.is_armed = True
    if step == "renamed":
        repository.transact([lambda view: Change(files={"jobs.json": b"a new beginning\n"}, subject="two")])
    else:
        repository.transact([append("two")])
    assert not disk.is_armed
    return repository


@pytest.mark.parametrize(
    "meddle", [overwrite, add_a_line, exchange, put_a_directory_there, put_a_link_there, put_a_fifo_there]
)
@pytest.mark.parametrize("step", ["open", "write", "written", "renamed"])
def test_what_somebody_does_to_a_file_as_it_is_written_is_kept_aside(
    tmp_path: Path, step: str, meddle: Callable[[Path], object]
) -> None:
    """Nothing of theirs is lost, goes on in our file or passes for it, whether ours was appended or renamed there."""
    repository = meddled_with(tmp_path / "repo", step, meddle)
    repository.transact([append("three")])
    assert repository.kept_aside == ("jobs.json.edited-1",)
    theirs = repository.path / "jobs.json.edited-1"
    if theirs.is_symlink():
        assert os.readlink(theirs) == "Somebody's"
    elif theirs.is_dir():
        assert os.listdir(theirs) == ["Somebody's"]
    elif not theirs.is_fifo():
        assert b"S" in theirs.read_bytes()
    assert (repository.path / "jobs.json").read_bytes() == repository.view().read("jobs.json")
    assert repository.check() == []
    assert git("status", "--porcelain", "-uno", cwd=repository.path) == ""
    repository.close()


@pytest.mark.parametrize(
    "meddle",
    [
        lambda path: os.truncate(path, 0),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o755),
        lambda path: (path.parent / "second").hardlink_to(path),
    ],
    ids=["emptied", "removed", "made a program", "a second name"],
)
@pytest.mark.parametrize("step", ["open", "write", "written", "renamed"])
def test_what_takes_nothing_but_ours_from_a_file_as_it_is_written_is_put_right(
    tmp_path: Path, step: str, meddle: Callable[[Path], object]
) -> None:
    """The index never says of the file what it was given by others, so the next write makes it ours again."""
    repository = meddled_with(tmp_path / "repo", step, meddle)
    assert git("diff", "--cached", "--name-only", cwd=repository.path) == ""
    repository.transact([append("three")])
    assert (repository.path / "jobs.json").read_bytes() == repository.view().read("jobs.json")
    assert repository.check() == []
    assert git("status", "--porcelain", "-uno", cwd=repository.path) == ""
    repository.close()


def test_a_file_that_we_may_not_write_to_is_replaced(tmp_path: Path) -> None:
    """A person made it read-only, or it belongs to root since a `git checkout` of theirs; the directory is ours."""

    class Guarded(Disk):
        def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
            if str(path).endswith("jobs.json"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return super().open_append(path, mode)

    repository = GitRepository.create(tmp_path / "repo", Guarded(durable=False), FILES)
    repository.transact([append("one")])
    repository.transact([append("two")])
    assert (repository.path / "jobs.json").read_text() == "start\none\ntwo\n"
    assert repository.kept_aside == ()
    healthy(repository)
    repository.close()


@pytest.mark.parametrize("files", [{"jobs.json": b"a new beginning\n"}, {"jobs.json": None}, None])
def test_an_edit_that_no_time_stamp_shows_is_kept_aside(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes | None] | None
) -> None:
    """The clocks of many file systems stand still for milliseconds, in which a busy session is written twice and a
    person's edit of the same size may fall between; replaced, removed or appended to, the file is looked into."""
    repository.transact([append("one")])
    overwrite(repository.path / "jobs.json")
    monkeypatch.setattr("openjobs.repo.worktree.entry_matches", lambda entry, found: True)
    change = append("two") if files is None else lambda view: Change(files=files, subject="two")
    repository.transact([change])
    assert repository.kept_aside == ("jobs.json.edited-1",)
    assert (repository.path / "jobs.json.edited-1").read_text().startswith("Start\none\n")
    assert repository.check() == []


def test_git_sees_an_edit_of_the_second_in_which_we_wrote_the_file(repository: GitRepository) -> None:
    """git goes by whole seconds, and looks into files that are not older than its index. Whoever writes a newer index
    makes them older, and has to mark what has changed since."""
    page, index = repository.path / "page", repository.path / ".git" / "index"
    repository.transact([append("one", "page")])
    written_ns = page.stat().st_mtime_ns
    os.utime(index, ns=(written_ns, written_ns))
    with page.open("r+b") as file:
        file.write(b"O")
    os.utime(page, ns=(written_ns, written_ns // 10**9 * 10**9 + (written_ns + 1) % 10**9))
    repository.transact([append("two")])
    os.utime(index, ns=(written_ns + 5 * 10**9, written_ns + 5 * 10**9))
    status = git("-c", "core.trustctime=false", "status", "--porcelain", cwd=repository.path)
    assert status.split() == ["M", "page"]
    repository.transact([append("three", "page")])
    assert (repository.path / "page.edited-1").read_text() == "One\n"
    assert repository.check() == []


def test_an_index_that_looks_like_ours_is_read_again_when_the_branch_has_moved(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that writes twice in one tick may leave an index with the number, size and times of ours."""
    repository.transact([append("one", "page")])
    other = GitRepository(repository.path, Disk(durable=False))
    other.transact([append("two", "page")])
    other.close()
    monkeypatch.setattr("openjobs.repo.git.signature", lambda path: repository._index_seen)
    repository.transact([append("three")])
    healthy(repository)


def test_the_rolling_pack_keeps_the_number_of_packs_small(repository: GitRepository) -> None:
    """One at a time: one pack per 32 commits, one that was just replaced, and joined ones; never fifty."""
    most = 0
    for number in range(250):
        repository.transact([append(f"n{number}")])
        most = max(most, len(packs(repository)))
    assert most <= 12
    healthy(repository)
    assert packs(repository, "keep") == [name.replace(".pack", ".keep") for name in packs(repository)]


def test_many_batches_stay_under_fifty_packs(repository: GitRepository) -> None:
    """Batches that seal a pack each time are joined in levels."""
    for number in range(60):
        repository.transact([append(f"{number}.{k}", f"p{k % 5}") for k in range(33)])
    assert len(packs(repository)) <= 50
    repository.maintain()
    assert len(packs(repository)) <= 20
    healthy(repository)
    assert len(list(repository.log())) == 60 * 33 + 1


def test_packs_that_nobody_lived_to_join_are_joined_by_the_next_to_come(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writer before was killed when it had sealed its pack."""
    with monkeypatch.context() as killed:
        killed.setattr("openjobs.repo.git.SEAL_COMMITS", 1)
        killed.setattr("openjobs.repo.maintain.join_packs", lambda *args, **options: 0)
        for number in range(120):
            repository.transact([append(str(number))])
        repository.close()
    assert len(packs(repository)) >= 40
    after = GitRepository(repository.path, Disk(durable=False))
    after.transact([append("after")])
    after.close()
    assert len(packs(repository)) <= 12
    healthy(repository)


def test_the_rolling_pack_is_gone_on_with_after_a_restart(tmp_path: Path) -> None:
    """Processes that make one commit each leave one pack, not one per process."""
    GitRepository.create(tmp_path / "repo", Disk(durable=False), FILES).close()
    for number in range(20):
        repository = GitRepository(tmp_path / "repo", Disk(durable=False))
        repository.transact([append(f"n{number}")])
        repository.close()
    assert len(packs(repository)) <= 2
    healthy(repository)


def test_two_processes_worth_of_repositories_take_turns(repository: GitRepository) -> None:
    """Two objects on one directory, as two processes would have: each sees the other's commits, one pack stays."""
    other = GitRepository(repository.path, Disk(durable=False))
    for number in range(40):
        (repository, other)[number % 2].transact([append(f"n{number}")])
    assert lines(other) == ["start", *(f"n{n}" for n in range(40))]
    assert len(packs(repository)) <= 4
    healthy(repository)
    other.close()


def test_small_steps_cost_small_bytes(repository: GitRepository) -> None:
    """A row changed in a 50 KB page costs a delta, not the page: 1,000 commits in batches stay under 2 KB each."""
    rows = [os.urandom(290).hex().encode() for _ in range(84)]

    def change(number: int) -> Transaction:
        def apply(view: View) -> Change:
            rows[number % 84] = os.urandom(290).hex().encode()
            return Change(files={"jobs.json": b"\n".join(rows)}, subject=f"n{number}")

        return apply

    for batch in range(20):
        repository.transact([change(batch * 50 + k) for k in range(50)])
    size = sum(path.stat().st_size for path in (repository.path / ".git" / "objects" / "pack").iterdir())
    assert size < 1000 * 2000
    assert [path for path in (repository.path / ".git" / "objects").iterdir() if len(path.name) == 2] == []
    healthy(repository)


def write_in_turns(path: str, name: str, results: object) -> None:
    try:
        repository = GitRepository(Path(path), Disk(durable=False))
        for number in range(0, 60, 3):
            batch = [append(f"{name}.{number + k}") for k in range(3)]
            for _ in range(5000):
                try:
                    assert all(outcome.error is None for outcome in repository.transact(batch))
                    break
                except RepositoryBusy:
                    time.sleep(0.001)
        repository.close()
        results.put("done")  # type: ignore[attr-defined]
    except BaseException as error:
        results.put(repr(error))  # type: ignore[attr-defined]


def test_processes_that_write_at_once_lose_nothing(repository: GitRepository) -> None:
    """Three processes take turns by the flock, this one reads: every commit once, each process's in its order."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=write_in_turns, args=(str(repository.path), name, results)) for name in ("a", "b", "c")
    ]
    for process in processes:
        process.start()
    seen: list[list[str]] = []
    try:
        while any(process.is_alive() for process in processes):
            seen.append(lines(repository))
            del seen[:-100]
        found = [results.get() for _ in processes]
    finally:
        for process in processes:
            process.join()
            process.close()
        results.close()
    for texts in seen:
        assert texts[0] == "start"
        assert len(set(texts)) == len(texts)
    assert found == ["done"] * 3
    for name in ("a", "b", "c"):
        assert [text for text in lines(repository) if text[0] == name] == [f"{name}.{n}" for n in range(60)]
    assert len(list(repository.log())) == 181
    assert len(packs(repository)) <= 12
    healthy(repository)


def test_a_reader_that_is_slower_than_every_writer_finds_what_is_there(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between each list of packs and the look into them another process replaces and removes those on it."""
    repository.transact([append("one")])
    reader = GitRepository(repository.path, Disk(durable=False))
    commit = reader.view().commit_id
    listed = ObjectStore.rescan
    swaps = 0

    def listed_late(objects: ObjectStore) -> list[PackFile]:
        nonlocal swaps
        found = listed(objects)
        if objects is reader._objects and swaps < 8:
            swaps += 1
            for number in range(3):
                repository.transact([append(f"{swaps}.{number}")])
        return found

    monkeypatch.setattr(ObjectStore, "rescan", listed_late)
    try:
        reader._objects.close()
        assert commit is not None
        assert next(iter(reader.log(start=commit))).subject == "one"
        assert swaps == 8
        with pytest.raises(errors.NotFound, match="there is no commit 1111"):
            reader.view("1" * 40)
    finally:
        reader.close()
    healthy(repository)


# --- commits of others ---------------------------------------------------------------------------------


def test_a_foreign_commit_is_the_new_head(repository: GitRepository) -> None:
    """Transactions see what git committed, and our commit is on top of it."""
    repository.transact([append("one")])
    (repository.path / "notes.md").write_text("mine\n")
    (repository.path / "jobs.json").write_text("start\none\nby hand\n")
    git("add", ".", cwd=repository.path)
    git("commit", "-qm", "foreign", cwd=repository.path)
    assert lines(repository) == ["start", "one", "by hand"]
    repository.transact([append("two")])
    assert lines(repository) == ["start", "one", "by hand", "two"]
    assert repository.kept_aside == ()
    assert git("log", "--format=%s", cwd=repository.path).splitlines()[:3] == ["two", "foreign", "one"]
    assert (repository.path / "notes.md").read_text() == "mine\n"
    healthy(repository)


def test_a_branch_that_moves_at_the_last_moment_is_not_overwritten(repository: GitRepository) -> None:
    """Step 6 finds another head: nothing of the first attempt is left, and the transaction is asked again."""
    repository.transact([append("one")])
    moved: list[str] = []

    def move() -> None:
        """A foreign commit by plumbing, which needs no index.lock."""
        if not moved:
            blob = git("hash-object", "-w", "--stdin", cwd=repository.path, stdin=b"start\none\nforeign\n")
            env = {"GIT_INDEX_FILE": str(repository.path / ".git" / "other-index")}
            git("read-tree", "HEAD", cwd=repository.path, env=env)
            git("update-index", "--cacheinfo", f"100644,{blob},jobs.json", cwd=repository.path, env=env)
            git("update-index", "--add", "--cacheinfo", f"100644,{blob},extra", cwd=repository.path, env=env)
            tree = git("write-tree", cwd=repository.path, env=env)
            commit = git("commit-tree", tree, "-p", "HEAD", "-m", "foreign", cwd=repository.path)
            git("update-ref", "refs/heads/main", commit, cwd=repository.path)
            moved.append(commit)

    seen: list[bytes | None] = []

    def change(view: View) -> Change:
        seen.append(view.read("jobs.json"))
        if view.read("extra"):
            return Change(files={"jobs.json": (view.read("jobs.json") or b"") + b"ours\n"}, subject="ours")
        return Change(files={"only-first": b"x", "jobs.json": b"first attempt"}, subject="ours")

    [outcome] = repository.transact([change], before_publish=move)
    assert seen == [b"start\none\n", b"start\none\nforeign\n"]
    assert outcome.error is None
    assert lines(repository) == ["start", "one", "foreign", "ours"]
    assert not (repository.path / "only-first").exists()
    assert git("log", "--format=%s", cwd=repository.path).splitlines()[:3] == ["ours", "foreign", "one"]
    assert git("ls-files", "only-first", cwd=repository.path) == ""
    git("fsck", "--strict", "--no-dangling", cwd=repository.path)


def test_no_foreign_commit_is_lost(repository: GitRepository) -> None:
    """git commits in a loop while we do; every commit of both is in the history, none is reverted."""
    stop, made = threading.Event(), []

    def commit() -> None:
        number = 0
        while not stop.is_set():
            path = repository.path / f"foreign-{number % 5}"
            path.write_text(f"{number}\n")
            done = subprocess.run(
                f"git add {path.name} && git -c user.name=x -c user.email=x commit -qm foreign-{number}",
                shell=True,
                cwd=repository.path,
                capture_output=True,
                check=False,
            )
            if done.returncode == 0:
                made.append(f"foreign-{number}")
            number += 1

    thread = threading.Thread(target=commit)
    thread.start()
    ours: list[str] = []
    try:
        for number in range(2000):
            if len(made) >= 8 and len(ours) >= 30:
                break
            try:
                repository.transact([append(f"ours-{number}")])
            except RepositoryBusy:
                pass
            else:
                ours.append(f"ours-{number}")
            time.sleep(0.02)  # git does not try again: leave it a gap
    finally:
        stop.set()
        thread.join()
    assert len(made) >= 8
    subjects = [info.subject for info in repository.log()]
    assert set(made) <= set(subjects)
    assert [subject for subject in reversed(subjects) if subject.startswith("ours")] == ours
    assert lines(repository)[1:] == ours
    git("fsck", "--strict", "--no-dangling", cwd=repository.path)


@pytest.mark.parametrize(
    "command", [["gc", "-q"], ["repack", "-a", "-d", "-q"], ["gc", "-q", "--prune=now"], ["pack-refs", "--all"]]
)
def test_maintenance_of_git_loses_nothing(repository: GitRepository, command: list[str]) -> None:
    """Before, between and after our batches, and in a process that had everything open."""
    ours = []
    for number in range(60):
        repository.transact([append(f"n{number}")])
        ours.append(f"n{number}")
        if number % 12 == 5:
            git(*command, cwd=repository.path)
    assert lines(repository) == ["start", *ours]
    fresh = GitRepository(repository.path, Disk(durable=False))
    assert lines(fresh) == ["start", *ours]
    fresh.transact([append("last")])
    fresh.close()
    healthy(repository)


def test_a_repack_beside_us_loses_nothing(repository: GitRepository) -> None:
    """`git repack -a -d` in a loop, while we commit and a reader reads: every acknowledged commit stays."""
    stop, wrong = threading.Event(), []

    def repack() -> None:
        while not stop.is_set():
            git("repack", "-a", "-d", "-q", cwd=repository.path, check=False)

    def read() -> None:
        reader = GitRepository(repository.path, Disk(durable=False))
        while not stop.is_set():
            try:
                texts = lines(reader)
                newest = [info.subject for _, info in zip(range(5), reader.log(paths=["jobs.json"]), strict=False)]
                if len(newest) < min(5, len(texts)):
                    wrong.append(newest)
            except Exception as error:
                wrong.append(error)
        reader.close()

    threads = [threading.Thread(target=repack), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    try:
        for number in range(120):
            patiently(repository, append(f"n{number}"))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert lines(repository) == ["start", *(f"n{n}" for n in range(120))]
    assert len(list(repository.log())) == 121
    git("fsck", "--strict", "--no-dangling", cwd=repository.path)


def test_everything_of_git_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile GIT_* variables, a user's config, hooks, filters and signers: nothing runs, no byte changes."""
    trap = tmp_path / "trap"
    trap.mkdir()
    alarm = tmp_path / "ran"
    for hook in ("pre-commit", "post-commit", "reference-transaction", "post-index-change", "commit-msg", "fsmonitor"):
        (trap / hook).write_text(f"#!/bin/sh\necho {hook} >> {alarm}\nexit 1\n")
        (trap / hook).chmod(0o755)
    config = Path(os.environ["HOME"]) / ".gitconfig"
    config.write_text(
        f"[core]\nautocrlf = true\nhooksPath = {trap}\nfsmonitor = {trap}/fsmonitor\neol = crlf\n"
        f"[commit]\ngpgSign = true\n[gpg]\nprogram = {trap}/pre-commit\n[user]\nname = Somebody\n"
        f'[filter "x"]\nclean = {trap}/pre-commit\nsmudge = {trap}/pre-commit\nrequired = true\n'
    )
    for name in (
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    ):
        monkeypatch.setenv(name, str(trap))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    content = b"a\r\nb\n\r\n"
    repository = GitRepository.create(tmp_path / "repo", Disk(durable=False), {".gitattributes": b"* filter=x text\n"})
    repository.transact([lambda view: Change(files={"jobs.json": content}, subject="x")])
    assert repository.view().read("jobs.json") == content
    assert (repository.path / "jobs.json").read_bytes() == content
    assert next(iter(repository.log())).author == "openjobs <openjobs@localhost>"
    assert not alarm.exists()
    assert sorted(path.name for path in trap.iterdir()) == sorted(
        ("pre-commit", "post-commit", "reference-transaction", "post-index-change", "commit-msg", "fsmonitor")
    )
    healthy(repository)
    assert repository.check() == []
    repository.close()


# --- the index and the work tree ------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3, 4])
def test_an_index_of_any_version_is_kept_right(repository: GitRepository, version: int) -> None:
    """Entries of others stay, with their flags; git reads what we write."""
    (repository.path / "staged").write_text("s\n")
    (repository.path / "intended").write_text("i\n")
    git("add", "staged", cwd=repository.path)
    if version == 3:
        git("add", "-N", "intended", cwd=repository.path)
    else:
        (repository.path / "intended").unlink()
        git("update-index", "--index-version", str(version), cwd=repository.path)
    repository.transact([append("one", "jobs.json", "a/b/c", "z")])
    repository.transact([append("two")])
    assert "staged" in git("diff", "--cached", "--name-only", cwd=repository.path).splitlines()
    expected = ["A  staged", *([" A intended"] if version == 3 else [])]
    assert sorted(git("status", "--porcelain", cwd=repository.path).splitlines()) == sorted(expected)
    assert git("ls-files", "a/b/c", cwd=repository.path) == "a/b/c"


def test_a_file_edited_by_hand_is_kept_aside(repository: GitRepository) -> None:
    """git is the truth: the edit is moved next to its place, reported, and our version written."""
    repository.transact([append("one")])
    for number in (1, 2):
        (repository.path / "jobs.json").write_text(f"edited {number}\n")
        repository.transact([append(f"after {number}")])
        assert (repository.path / f"jobs.json.edited-{number}").read_text() == f"edited {number}\n"
    assert repository.kept_aside == ("jobs.json.edited-1", "jobs.json.edited-2")
    assert (repository.path / "jobs.json").read_text() == "start\none\nafter 1\nafter 2\n"
    assert repository.check() == []


def test_what_stands_in_the_way_is_kept_aside(repository: GitRepository, tmp_path: Path) -> None:
    """A directory, an untracked file, a link out of the work tree: none is followed, none is lost."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (repository.path / "link").symlink_to(outside)
    (repository.path / "new").write_text("untracked\n")
    (repository.path / "jobs.json").unlink()
    (repository.path / "jobs.json").mkdir()
    (repository.path / "jobs.json" / "inside").write_text("x")
    repository.transact([append("one", "jobs.json", "link/file", "new")])
    assert list(outside.iterdir()) == []
    assert (repository.path / "link.edited-1").is_symlink()
    assert (repository.path / "new.edited-1").read_text() == "untracked\n"
    assert (repository.path / "jobs.json.edited-1" / "inside").read_text() == "x"
    assert (repository.path / "link" / "file").read_text() == "one\n"
    assert repository.check() == []


def test_a_touched_file_is_not_an_edited_one(repository: GitRepository) -> None:
    """Another time stamp, the same bytes: nothing is kept, nothing reported."""
    os.utime(repository.path / "jobs.json", (1, 1))
    repository.transact([append("one")])
    assert repository.kept_aside == ()
    healthy(repository)


def test_a_removed_file_leaves_no_empty_directory(repository: GitRepository) -> None:
    """In the work tree as in git."""
    repository.transact([append("one", "a/b/c")])
    repository.transact([lambda view: Change(files={"a/b/c": None}, subject="x")])
    assert not (repository.path / "a").exists()
    healthy(repository)


def test_staged_work_of_a_person_is_left_alone(repository: GitRepository) -> None:
    """Recovery mends what is ours; a person's own edits and staged files stay."""
    (repository.path / "notes.md").write_text("1\n")
    git("add", "notes.md", cwd=repository.path)
    git("commit", "-qm", "notes", cwd=repository.path)
    (repository.path / "notes.md").write_text("2\n")
    git("add", "notes.md", cwd=repository.path)
    (repository.path / "notes.md").write_text("3\n")
    (repository.path / "other.md").write_text("staged\n")
    git("add", "other.md", cwd=repository.path)
    repository.recover()
    repository.transact([append("one")])
    assert git("status", "--porcelain", cwd=repository.path).splitlines() == ["MM notes.md", "A  other.md"]
    assert (repository.path / "notes.md").read_text() == "3\n"


def test_recovery_writes_back_only_what_is_ours(repository: GitRepository) -> None:
    """After somebody was killed: our file that is gone is written again; a person's file that he removed, his link,
    and a file of ours that he took out of the index by hand stay as he left them."""
    repo = repository.path
    (repo / "notes.md").write_text("a person's\n")
    (repo / "link").symlink_to("notes.md")
    git("add", ".", cwd=repo)
    git("commit", "-qm", "notes", cwd=repo)
    for name in ("notes.md", "link", "jobs.json"):
        (repo / name).unlink()
    (repo / "link").symlink_to("elsewhere")
    repository.recover()
    assert (repo / "jobs.json").read_bytes() == b"start\n"
    assert git("status", "--porcelain", cwd=repo).splitlines() == [" M link", " D notes.md"]
    assert os.readlink(repo / "link") == "elsewhere"


def test_an_edit_of_a_file_that_was_to_go_is_kept(repository: GitRepository) -> None:
    """A process died after it had put a file into index and work tree, before the branch had it; then somebody
    edited that file. It leaves the index, as it is not in the newest commit, and the edit stays where it is."""
    repo = repository.path
    repository.transact([append("one", "extra")])
    repository.transact([append("two")])
    git("update-ref", "refs/heads/main", "HEAD~2", cwd=repo)
    (repo / "extra").write_text("edited\n")
    repository.recover()
    assert (repo / "extra").read_text() == "edited\n"
    assert (repo / "jobs.json").read_bytes() == b"start\n"
    assert git("status", "--porcelain", cwd=repo).splitlines() == ["?? extra"]


def test_the_same_commit_made_again_is_the_same_commit(repository: GitRepository) -> None:
    """Somebody took the branch back, and a caller tries again with the same time: the id is the one that it was, and
    the pack that holds it stays."""
    repository.transact([append("one")], now=NOW)
    [made] = repository.transact([append("two")], now=NOW)
    names = packs(repository)
    git("reset", "-q", "--hard", "HEAD~1", cwd=repository.path)
    [again] = repository.transact([append("two")], now=NOW)
    assert again.commit_id == made.commit_id
    assert packs(repository) == names
    assert lines(repository) == ["start", "one", "two"]
    healthy(repository)


def test_the_same_commit_that_fails_leaves_its_pack(tmp_path: Path) -> None:
    """At whichever effect: the pack was there before, so it is not what is undone."""
    disk = FaultyDisk()
    repository = GitRepository.create(tmp_path / "repo", disk, FILES, now=NOW)
    repository.transact([append("one")], now=NOW)
    [made] = repository.transact([append("two")], now=NOW)

    def once(view: View) -> Change | None:
        return None if "two" in (view.read("jobs.json") or b"").decode().split() else append("two")(view)

    for k in range(1, 100):
        git("reset", "-q", "--hard", "HEAD~1", cwd=repository.path)
        disk.arm(k)
        try:
            [outcome] = repository.transact([once], now=NOW)
        except (errors.StoreWriteFailed, errors.OutcomeUnknown):
            git("cat-file", "-e", made.commit_id or "", cwd=repository.path)
            [outcome] = repository.transact([once], now=NOW)
        disk.disarm()
        assert outcome.commit_id == made.commit_id
        assert lines(repository) == ["start", "one", "two"]
        assert repository.check() == []
        if not disk.failed:
            break
    assert 10 < k < 99
    healthy(repository)
    repository.close()


def test_reflogs_that_somebody_removed_are_begun_again(repository: GitRepository) -> None:
    """With their directories."""
    repository.transact([append("one")])
    shutil.rmtree(repository.path / ".git" / "logs")
    repository.transact([append("two")])
    for name in ("HEAD", "main"):
        assert git("reflog", "show", "--format=%gs", name, cwd=repository.path) == "commit: two"
    healthy(repository)


@pytest.mark.parametrize("dropped", [False, True])
def test_an_index_that_another_program_puts_back_is_mended(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch, dropped: bool
) -> None:
    """It had read the index before us and writes it after us: what we added is added again, and what we removed is
    removed again; what it added stays."""
    repository.transact([append("one", "extra")])
    index = repository.path / ".git" / "index"
    (repository.path / "theirs").write_text("theirs\n")
    git("add", "theirs", cwd=repository.path)
    before = index.read_bytes()
    git("reset", "-q", cwd=repository.path)
    log = repository._write_reflog

    def then_put_back(draft: object) -> None:
        log(draft)  # type: ignore[arg-type]
        index.write_bytes(before)

    with monkeypatch.context() as patch:
        patch.setattr(repository, "_write_reflog", then_put_back)
        files: dict[str, bytes | None] = {"extra": None if dropped else b"new\n", "jobs.json": b"changed\n"}
        repository.transact([lambda view: Change(files=files, subject="two")])
    assert git("status", "--porcelain", cwd=repository.path) == "A  theirs"
    assert git("ls-files", "extra", cwd=repository.path) == ("" if dropped else "extra")
    assert repository.view().read("extra") == files["extra"]


def test_a_copy_of_ours_that_cannot_be_read_is_written_anew(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process died when it had put a file into index and work tree, before the branch had it; and now the disk does
    not give that file: by all that can be told it is the one that was written, so nothing of anybody's is in it."""
    from openjobs.repo import worktree

    def unreadable(path: str, limit: int | None = None) -> bytes:
        raise OSError(errno.EIO, "Input/output error", path)

    repository.transact([append("one")])
    git("update-ref", "refs/heads/main", "HEAD~1", cwd=repository.path)
    with monkeypatch.context() as patch:
        patch.setattr(worktree, "read_file", unreadable)
        repository.recover()
    assert repository.kept_aside == ()
    assert (repository.path / "jobs.json").read_bytes() == b"start\n"
    healthy(repository)


# --- views --------------------------------------------------------------------------------------------------


def test_a_submodule_is_nothing_to_read(repository: GitRepository) -> None:
    """Its commit is in another repository: `Damaged` with the path, never an empty file; what is below a file is
    not there."""
    head = git("rev-parse", "HEAD", cwd=repository.path)
    git("update-index", "--add", "--cacheinfo", f"160000,{head},module", cwd=repository.path)
    git("commit", "-qm", "a submodule", cwd=repository.path)
    view = repository.view()
    with pytest.raises(errors.Damaged, match="module cannot be read: it is a submodule") as raised:
        view.read("module")
    assert raised.value.path == "module"
    assert view.version("module") == head
    assert (view.read("jobs.json/below"), view.version("jobs.json/below"), view.names("jobs.json")) == (None, None, [])


def test_a_directory_that_cannot_be_read_is_named(repository: GitRepository) -> None:
    """Reading below it, its names, and the version of what is in it: `Damaged` with the path that was asked for."""
    repository.transact([append("one", "jobs/00/0000.json")])
    git("repack", "-adfq", cwd=repository.path)
    below = git("rev-parse", "HEAD:jobs/00", cwd=repository.path)
    objects = repository.path / ".git" / "objects"
    for keep in (objects / "pack").glob("*.keep"):
        keep.unlink()
    repository.close()
    shutil.copytree(objects / "pack", repository.path.parent / "packs")
    for file in (objects / "pack").iterdir():
        file.unlink()
    for pack in (repository.path.parent / "packs").glob("*.pack"):
        git("unpack-objects", "-q", cwd=repository.path, stdin=pack.read_bytes())
    (objects / below[:2] / below[2:]).unlink()
    view = GitRepository(repository.path, Disk(durable=False)).view()
    assert view.read("jobs.json") == b"start\n"
    for ask, path in (
        (view.read, "jobs/00/0000.json"),
        (view.version, "jobs/00/0000.json"),
        (view.names, "jobs/00"),
    ):
        with pytest.raises(errors.Damaged, match=below) as raised:
            ask(path)
        assert raised.value.path == path
    assert view.names("jobs") == ["00"]
    assert view.version("jobs/00") == below


def test_what_is_no_directory_stays_what_it_is(repository: GitRepository) -> None:
    """Nothing is written below somebody's link or another repository: it would be gone for it."""
    repo = repository.path
    (repo / "link").symlink_to("history")
    git("add", "link", cwd=repo)
    head = git("rev-parse", "HEAD", cwd=repo)
    git("update-index", "--add", "--cacheinfo", f"160000,{head},module", cwd=repo)
    git("commit", "-qm", "a person's", cwd=repo)
    for name in ("link", "module"):
        [outcome] = repository.transact([append("one", f"{name}/x")])
        assert isinstance(outcome.error, errors.InvalidInput)
        assert str(outcome.error) == f"{name} is no directory"
    assert os.readlink(repo / "link") == "history"
    assert repository.view().version("module") == head
    repository.transact([append("one")])
    assert repository.check() == []


# --- locks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", ["index.lock", "refs/heads/main.lock"])
def test_the_lock_of_another_program_is_respected(repository: GitRepository, lock: str) -> None:
    """It was only tried: RepositoryBusy at once, nothing written, the lock still there."""
    repository.transact([append("one")])
    before, held = git("rev-parse", "HEAD", cwd=repository.path), repository.path / ".git" / lock
    held.touch(0o644)
    for _ in range(2):
        with pytest.raises(RepositoryBusy):
            repository.transact([append("two")])
    assert held.exists()
    assert git("rev-parse", "HEAD", cwd=repository.path) == before
    held.unlink()
    healthy(repository)
    repository.transact([append("three")])
    assert lines(repository) == ["start", "one", "three"]
    healthy(repository)


def test_the_flock_of_another_process_is_respected(repository: GitRepository) -> None:
    """And no lock of git's is touched before it is held."""
    held = FileLock(repository.path / ".git" / "openjobs" / "lock", Disk())
    assert held.try_acquire()
    with pytest.raises(RepositoryBusy):
        repository.transact([append("one")])
    with pytest.raises(errors.SessionBusy):
        repository.republish()
    assert not (repository.path / ".git" / "index.lock").exists()
    held.release()
    repository.transact([append("one")])


@pytest.mark.parametrize("text", [b"", b"openjobs 12345\n"])
@pytest.mark.parametrize("lock", ["index.lock", "refs/heads/main.lock"])
def test_a_dead_lock_of_ours_is_removed(repository: GitRepository, lock: str, text: bytes) -> None:
    """Who holds the flock knows that its owner is dead; even where the power went before its text was written."""
    repository.transact([append("one")])
    path = repository.path / ".git" / lock
    path.write_bytes(text)
    path.chmod(0o400)
    fresh = GitRepository(repository.path, Disk(durable=False))
    assert [problem for problem in fresh.check() if "killed process" in problem]
    fresh.transact([append("two")])
    assert lines(fresh) == ["start", "one", "two"]
    healthy(fresh)
    fresh.close()


class Interrupted(Disk):
    """A disk on which `act` happens once, right after something whose name ends so was removed."""

    def __init__(self, end: str, act: Callable[[], object]) -> None:
        super().__init__(durable=False)
        self._end, self._act = end, act

    def unlink(self, path: str | os.PathLike[str]) -> None:
        super().unlink(path)
        if os.fspath(path).endswith(self._end):
            self._end = "no such name"
            self._act()


@pytest.mark.parametrize("lock", ["index.lock", "refs/heads/main.lock"])
def test_a_lock_that_is_taken_as_a_dead_one_goes_is_respected(repository: GitRepository, lock: str) -> None:
    """Between the removal of ours and the new one another program was first: it keeps its lock, nothing is written."""
    repository.close()
    held = repository.path / ".git" / lock
    held.touch(0o400)
    other = GitRepository(repository.path, Interrupted(lock, lambda: held.write_text("another's")))
    with pytest.raises(RepositoryBusy, match="another program"):
        other.transact([append("one")])
    assert held.read_text() == "another's"
    held.unlink()
    healthy(other)
    other.transact([append("two")])
    assert lines(other) == ["start", "two"]
    healthy(other)
    other.close()


def test_a_half_written_file_of_a_dead_process_is_written_anew(tmp_path: Path) -> None:
    """Temporary files have fixed names; one that a kill left holds nothing that the next can start from."""
    scratch = Scratch(tmp_path, Disk(durable=False))
    (tmp_path / "index").write_bytes(b"half of a longer text")
    (tmp_path / "index").chmod(0o400)
    assert Path(scratch.write("index", b"whole")).read_bytes() == b"whole"
    assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_read_counts_as_edited(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be compared is kept aside, as if a person had written it; recovery does the same."""
    from openjobs.repo import worktree

    repo = repository.path

    def unreadable(path: str, limit: int | None = None) -> bytes:
        raise OSError(errno.EIO, "Input/output error", path)

    (repo / "jobs.json").write_text("who knows")
    with monkeypatch.context() as patch:
        patch.setattr(worktree, "read_file", unreadable)
        repository.transact([append("one")])
        assert repository.kept_aside == ("jobs.json.edited-1",)
        os.utime(repo / "jobs.json", (1, 1))
        repository.recover()
    assert (repo / "jobs.json.edited-1").read_text() == "who knows"
    assert (repo / "jobs.json").read_text() == "start\none\n"
    repository.transact([append("two")])
    assert (repo / "jobs.json").read_text() == "start\none\ntwo\n"


@pytest.mark.parametrize("lock", ["HEAD.lock", "refs/heads/main.lock"])
def test_maintenance_waits_for_who_writes_a_reflog(repository: GitRepository, lock: str) -> None:
    """git writes a reflog under a reference's lock: a long one is cut when that is free, and whole until then."""
    repository.transact([append("one")])
    name = lock.removesuffix(".lock")
    path = repository.path / ".git" / "logs" / name
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[-1] * 3000)
    long = path.read_bytes()
    held = repository.path / ".git" / lock
    held.write_text("another's")
    maintenance = repository.maintenance()

    def to_the_end() -> None:
        while maintenance.step():
            pass

    with pytest.raises(RepositoryBusy, match="another program"):
        to_the_end()
    assert path.read_bytes() == long
    assert held.read_text() == "another's"
    held.unlink()
    to_the_end()
    maintenance.close()
    assert long.endswith(path.read_bytes())
    assert len(path.read_bytes()) <= 128 << 10
    repository.transact([append("two")])
    healthy(repository)


# --- creating ---------------------------------------------------------------------------------------------


def create_one(path: str, start: object, results: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    try:
        GitRepository.create(Path(path), Disk(durable=False), FILES).close()
        results.put("made")  # type: ignore[attr-defined]
    except errors.SessionExists:
        results.put("exists")  # type: ignore[attr-defined]
    except BaseException as error:
        results.put(repr(error))  # type: ignore[attr-defined]


def test_of_thirty_creators_one_wins(tmp_path: Path) -> None:
    """The others get SessionExists, and nothing of theirs is left."""
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.SimpleQueue()
    processes = [context.Process(target=create_one, args=(str(tmp_path / "repo"), start, results)) for _ in range(30)]
    for process in processes:
        process.start()
    start.set()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
        process.close()
    results.close()
    assert sorted(found) == ["exists"] * 29 + ["made"]
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]
    repository = GitRepository(tmp_path / "repo", Disk(durable=False))
    repository.transact([append("one")])
    healthy(repository)
    repository.close()


def test_what_stands_there_is_not_replaced(tmp_path: Path) -> None:
    """A repository, a file, a link: SessionExists, and it is as it was."""
    GitRepository.create(tmp_path / "repo", Disk(durable=False), FILES).close()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("repo", "file", "link"):
        with pytest.raises(errors.SessionExists):
            GitRepository.create(tmp_path / name, Disk(durable=False), FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "repo"]


def test_a_name_that_is_there_although_its_making_failed_is_unknown(tmp_path: Path) -> None:
    """The disk renamed it and then said that it had not: nobody may say that nothing happened."""
    disk = FaultyDisk()
    renames = RecordingDisk()
    GitRepository.create(tmp_path / "first", renames, FILES).close()
    [number] = [n for n, effect in enumerate(renames.effects, 1) if effect.target == str(tmp_path / "first")]
    disk.arm(number, late=True)
    with pytest.raises(errors.OutcomeUnknown):
        GitRepository.create(tmp_path / "repo", disk, FILES)
    with pytest.raises(errors.SessionExists):
        GitRepository.create(tmp_path / "repo", Disk(durable=False), FILES)
    made = GitRepository(tmp_path / "repo", Disk(durable=False))
    assert lines(made) == ["start"]
    healthy(made)
    made.close()


def test_what_creators_left_who_were_killed_is_swept(tmp_path: Path) -> None:
    """By the next that creates the same one: what has a lock that nobody holds, and what has none and is old. What is
    being made, and what is somebody else's, stays."""
    names = [".repo.1-1.tmp", ".repo.1-2.tmp", ".repo.1-3.tmp", ".repo.1-4.tmp", ".other.1-1.tmp", ".repo.1-1.txt"]
    for name in names:
        (tmp_path / name / ".git" / "openjobs").mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    old, made, free, held = (tmp_path / name for name in names[:4])
    for path in (free, held):
        (path / ".git" / "openjobs" / "lock").touch()
    for name in (names[0], names[4], names[5]):
        os.utime(tmp_path / name, (1, 1))
    lock = FileLock(held / ".git" / "openjobs" / "lock", Disk(durable=False))
    assert lock.try_acquire()
    GitRepository.create(tmp_path / "repo", Disk(durable=False), FILES).close()
    lock.release()
    assert not old.exists()
    assert not free.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"repo", made.name, held.name, names[4], names[5]}


def test_a_creator_whose_directory_is_swept_has_made_nothing(tmp_path: Path) -> None:
    """Another takes the lock between the making of the directory and ours: refused, and nothing is left by us."""

    class Swept(Disk):
        lock: FileLock | None = None

        def mkdir(self, path: str | os.PathLike[str], mode: int = 0o700) -> None:
            super().mkdir(path, mode)
            if os.fspath(path).endswith("/.git/openjobs"):
                self.lock = FileLock(Path(path) / "lock", Disk(durable=False))
                assert self.lock.try_acquire()

    disk = Swept(durable=False)
    with pytest.raises(errors.StoreWriteFailed, match="swept by another process"):
        GitRepository.create(tmp_path / "repo", disk, FILES)
    assert disk.lock is not None
    disk.lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_private_repository(repository: GitRepository) -> None:
    """Nobody else may read what a session holds."""
    for directory, _, names in os.walk(repository.path):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        for name in names:
            assert not os.stat(f"{directory}/{name}").st_mode & 0o077


# --- refusals ---------------------------------------------------------------------------------------------


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() and not path.is_symlink() else b"")
        for path in sorted(root.rglob("*"))
    }


def detached(repo: Path) -> None:
    git("checkout", "-q", "--detach", cwd=repo)


def unborn(repo: Path) -> None:
    git("symbolic-ref", "HEAD", "refs/heads/unborn", cwd=repo)


def bare(repo: Path) -> None:
    git("config", "core.bare", "true", cwd=repo)


def linked(repo: Path) -> None:
    git("worktree", "add", "-q", "-b", "other", repo.parent / "linked", cwd=repo)
    shutil.rmtree(repo)
    (repo.parent / "linked").rename(repo)


def sha256(repo: Path) -> None:
    shutil.rmtree(repo)
    git("init", "-q", "--object-format=sha256", repo, cwd=repo.parent)
    git("commit", "-q", "--allow-empty", "-m", "x", cwd=repo)


def split_index(repo: Path) -> None:
    git("update-index", "--split-index", cwd=repo)


def alternates(repo: Path) -> None:
    git("clone", "-q", "--shared", repo, repo.parent / "shared", cwd=repo.parent)
    shutil.rmtree(repo)
    (repo.parent / "shared").rename(repo)


def shallow(repo: Path) -> None:
    git("clone", "-q", "--depth=1", f"file://{repo}", repo.parent / "clone", cwd=repo.parent)
    shutil.rmtree(repo)
    (repo.parent / "clone").rename(repo)


def partial(repo: Path) -> None:
    git("config", "uploadpack.allowFilter", "true", cwd=repo)
    git("clone", "-q", "--filter=blob:none", f"file://{repo}", repo.parent / "clone", cwd=repo.parent)
    shutil.rmtree(repo)
    (repo.parent / "clone").rename(repo)


def linked_git_directory(repo: Path) -> None:
    (repo / ".git").rename(repo.parent / "elsewhere")
    (repo / ".git").symlink_to(repo.parent / "elsewhere")


def linked_objects(repo: Path) -> None:
    (repo / ".git" / "objects").rename(repo.parent / "objects")
    (repo / ".git" / "objects").symlink_to(repo.parent / "objects")


def reftable(repo: Path) -> None:
    git("config", "core.repositoryFormatVersion", "1", cwd=repo)
    git("config", "extensions.refStorage", "reftable", cwd=repo)


def unknown_extension(repo: Path) -> None:
    git("config", "core.repositoryFormatVersion", "1", cwd=repo)
    with (repo / ".git" / "config").open("a") as config:
        config.write("[extensions]\n\tfuture = yes\n")


def other_work_tree(repo: Path) -> None:
    git("config", "core.worktree", "/tmp", cwd=repo)


def promised(repo: Path) -> None:
    """A partial clone whose packs were all made here since."""
    git("config", "remote.origin.promisor", "true", cwd=repo)


def filtered(repo: Path) -> None:
    git("config", "remote.origin.partialCloneFilter", "blob:none", cwd=repo)


def split_index_to_come(repo: Path) -> None:
    git("config", "core.splitIndex", "true", cwd=repo)


def newer_format(repo: Path) -> None:
    git("config", "core.repositoryFormatVersion", "2", cwd=repo)


def broken_config(repo: Path) -> None:
    (repo / ".git" / "config").write_text("[core\n\tbare = false\n")


def linked_config(repo: Path) -> None:
    (repo / ".git" / "config").rename(repo.parent / "config")
    (repo / ".git" / "config").symlink_to(repo.parent / "config")


def no_objects(repo: Path) -> None:
    shutil.rmtree(repo / ".git" / "objects" / "pack")


def file_for_directory(repo: Path) -> None:
    shutil.rmtree(repo / ".git" / "logs")
    (repo / ".git" / "logs").write_text("")


def head_outside(repo: Path) -> None:
    (repo / ".git" / "HEAD").write_text("ref: refs/heads/../../../outside\n")


def no_repository(repo: Path) -> None:
    shutil.rmtree(repo / ".git")


REFUSED = [
    *(detached, unborn, bare, linked, sha256, split_index, alternates, shallow, partial, linked_git_directory),
    *(linked_objects, reftable, unknown_extension, other_work_tree, head_outside, no_repository),
    *(promised, filtered, split_index_to_come, newer_format, broken_config, linked_config, no_objects),
    file_for_directory,
]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_any_other_kind_of_repository_is_refused(tmp_path: Path, kind: object) -> None:
    """With a reason, and left exactly as it was."""
    repo = tmp_path / "repo"
    git("init", "-q", "-b", "main", repo, cwd=tmp_path)
    (repo / "jobs.json").write_text("x\n")
    git("add", ".", cwd=repo)
    git("commit", "-qm", "first", cwd=repo)
    kind(repo)  # type: ignore[operator]
    before = snapshot(tmp_path)
    repository = GitRepository(repo, Disk(durable=False))
    with pytest.raises(errors.RepositoryRefused):
        repository.transact([append("x")])
    if kind is not split_index:
        with pytest.raises(errors.RepositoryRefused):
            repository.view()
    after = snapshot(tmp_path)
    ours = {name for name in after if "/openjobs" in name}
    assert {name: found for name, found in after.items() if name not in ours} == before
    assert not ours or kind is split_index
    repository.close()


def test_a_repository_that_git_made_is_accepted(tmp_path: Path) -> None:
    """Plain, with a branch of any name, its refs packed, a remote, extensions that change nothing, and a commit."""
    git("init", "-q", "-b", "feature/x", tmp_path / "repo", cwd=tmp_path)
    git("remote", "add", "origin", tmp_path / "nowhere", cwd=tmp_path / "repo")
    git("config", "core.repositoryFormatVersion", "1", cwd=tmp_path / "repo")
    for key, value in (("noop", "any"), ("preciousObjects", "true"), ("objectFormat", "sha1")):
        git("config", f"extensions.{key}", value, cwd=tmp_path / "repo")
    (tmp_path / "repo" / "jobs.json").write_text("start\n")
    git("add", ".", cwd=tmp_path / "repo")
    git("commit", "-qm", "first", cwd=tmp_path / "repo")
    git("pack-refs", "--all", cwd=tmp_path / "repo")
    repository = GitRepository(tmp_path / "repo", Disk(durable=False))
    repository.transact([append("one")])
    assert lines(repository) == ["start", "one"]
    assert git("rev-parse", "--abbrev-ref", "HEAD", cwd=repository.path) == "feature/x"
    healthy(repository)
    git("checkout", "-q", "-b", "another", cwd=repository.path)
    repository.transact([append("two")])
    assert git("log", "--format=%s", "another", "-1", cwd=repository.path) == "two"
    assert git("log", "--format=%s", "feature/x", "-1", cwd=repository.path) == "one"
    healthy(repository)
    repository.close()


def test_an_edit_in_a_repository_that_git_made_is_kept_aside(tmp_path: Path) -> None:
    """Nothing there is ours yet that it could be a torn copy of, not even what is in git's own pack."""
    root = tmp_path / "repo"
    git("init", "-q", root, cwd=tmp_path)
    (root / "jobs.json").write_text("start\ngone on\n")
    git("add", ".", cwd=root)
    git("commit", "-qm", "first", cwd=root)
    git("repack", "-adq", cwd=root)
    (root / "jobs.json").write_text("start\n")
    repository = GitRepository(root, Disk(durable=False))
    repository.transact([append("one")])
    assert (root / "jobs.json.edited-1").read_text() == "start\n"
    assert lines(repository) == ["start", "gone on", "one"]
    assert repository.check() == []
    repository.close()


# --- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["HEAD", "index", "refs/heads/main"])
@pytest.mark.parametrize("content", [b"", b"garbage\n", b"DIRC\0\0\0\2\0\0\0\5" + b"\0" * 40])
def test_a_damaged_file_is_named(repository: GitRepository, name: str, content: bytes) -> None:
    """HEAD, branch or index that cannot be read is `Damaged`, with its path; never an empty repository."""
    repository.transact([append("one")])
    path = repository.path / ".git" / name
    good = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content)
    with pytest.raises(errors.Damaged) as raised:
        repository.transact([append("two")])
    assert raised.value.path == str(path)
    assert path.read_bytes() == content
    path.write_bytes(good)
    repository.transact([append("three")])
    assert lines(repository) == ["start", "one", "three"]


def test_a_damaged_object_is_named_by_its_path(repository: GitRepository) -> None:
    """A blob that cannot be read is `Damaged`, inside a transaction an outcome; other paths can be read and written."""
    repository.transact([append("one")])
    repository.close()
    directory = repository.path / ".git" / "objects" / "pack"
    with dulwich.repo.Repo(str(repository.path)) as other:
        tree = other[other[other.head()].tree]
        for name in (b"jobs.json", b"meta.json"):
            blob = other[tree[name][1]]
            kept = directory.parent / blob.id[:2].decode() / blob.id[2:].decode()
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(blob.as_legacy_object() if name == b"meta.json" else b"")
        objects = [*other.object_store]
        for sha in objects:
            found = other[sha]
            kept = directory.parent / sha[:2].decode() / sha[2:].decode()
            kept.parent.mkdir(exist_ok=True)
            if not kept.exists():
                kept.write_bytes(found.as_legacy_object())
    shutil.rmtree(directory)
    directory.mkdir()
    fresh = GitRepository(repository.path, Disk(durable=False))
    with pytest.raises(errors.Damaged) as raised:
        fresh.view().read("jobs.json")
    assert raised.value.path == "jobs.json"
    damaged, fine = fresh.transact([append("two"), append("three", "other")])
    assert isinstance(damaged.error, errors.Damaged)
    assert fine.error is None
    assert fresh.view().read("other") == b"three\n"
    assert fresh.check() != []
    fresh.close()


def test_a_missing_index_is_made_again(repository: GitRepository) -> None:
    """git takes a missing index for an empty one, and would show every file as removed; we do not."""
    repository.transact([append("one")])
    (repository.path / ".git" / "index").unlink()
    repository.transact([append("two")])
    healthy(repository)


def test_a_large_reflog_is_cut_by_maintenance(repository: GitRepository) -> None:
    """Its newest lines stay, whole; git reads it as before."""
    repository.transact([append("one")])
    for name in ("HEAD", "refs/heads/main"):
        path = repository.path / ".git" / "logs" / name
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[-1] * 40_000)
    repository.transact([append("two")])
    repository.maintain()
    for name in ("HEAD", "refs/heads/main"):
        assert (repository.path / ".git" / "logs" / name).stat().st_size <= 1 << 20
    assert git("reflog", "-1", "--format=%gs", cwd=repository.path) == "commit: two"
    healthy(repository)


def test_maintenance_leaves_one_pack_or_few(repository: GitRepository) -> None:
    """And may be asked at any time, with nothing to do too."""
    for number in range(12):
        repository.transact([append(f"{number}.{k}") for k in range(40)])
    repository.maintain()
    repository.maintain()
    assert len(packs(repository)) <= 8
    assert len(list(repository.log())) == 12 * 40 + 1
    healthy(repository)


def test_an_unknown_outcome_is_published_again_before_anything_else(tmp_path: Path) -> None:
    """The rename could not be synced: the next batch writes the branch anew, even with nothing to commit."""
    disk = FaultyDisk()
    repository = GitRepository.create(tmp_path / "repo", disk, FILES)
    repository.transact([append("warm")])
    start = len(disk.effects)
    repository.transact([append("warm 2")])
    names = [(effect.name, effect.target.endswith("refs/heads")) for effect in disk.effects[start:]]
    disk.arm(names.index(("sync_dir", True)) + 1)
    with pytest.raises(errors.OutcomeUnknown) as raised:
        repository.transact([append("one")])
    assert raised.value.__cause__ is not None
    disk.disarm()
    start = len(disk.effects)
    [outcome] = repository.transact([lambda view: None])
    assert outcome.commit_id == repository.view().commit_id
    moved = [effect.target for effect in disk.effects[start:] if effect.name == "rename"]
    assert [target for target in moved if target.endswith("refs/heads/main")] != []
    assert lines(repository) == ["start", "warm", "warm 2", "one"]
    healthy(repository)
    repository.close()


def test_a_branch_that_is_interrupted_as_it_moves_is_written_anew(repository: GitRepository) -> None:
    """A signal in the last step passes through as it is; whether it happened or not, the next call sees to it that
    what is visible is durable."""

    class Signalled(RecordingDisk):
        signalled = False

        def rename(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
            super().rename(source, target)
            if os.fspath(target).endswith("refs/heads/main") and not self.signalled:
                self.signalled = True
                raise KeyboardInterrupt

    disk = Signalled()
    other = GitRepository(repository.path, disk)
    with pytest.raises(KeyboardInterrupt):
        other.transact([append("one")])
    start = len(disk.effects)
    other.republish()
    moved = [effect.target for effect in disk.effects[start:] if effect.name == "rename"]
    assert [target for target in moved if target.endswith("refs/heads/main")] != []
    assert lines(other) == ["start", "one"]
    other.close()
    healthy(repository)


def test_a_branch_that_moves_while_it_is_published_again_is_left_where_it_is(repository: GitRepository) -> None:
    """git was first between the look and the lock: its commit stays, and the next try publishes that one."""
    repository.transact([append("one")])
    foreign = git("commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "foreign", cwd=repository.path)

    class Overtaken(Disk):
        overtaken = False

        def create(self, path: str | os.PathLike[str], mode: int = 0o600) -> int:
            if os.fspath(path).endswith("refs/heads/main.lock") and not self.overtaken:
                self.overtaken = True
                git("update-ref", "HEAD", foreign, cwd=repository.path)
            return super().create(path, mode)

    other = GitRepository(repository.path, Overtaken(durable=False))
    with pytest.raises(RepositoryBusy, match="has just been moved by another program"):
        other.republish()
    assert git("rev-parse", "HEAD", cwd=repository.path) == foreign
    assert not (repository.path / ".git" / "refs" / "heads" / "main.lock").exists()
    other.republish()
    other.transact([append("two")])
    assert [info.subject for info in other.log()][:3] == ["two", "foreign", "one"]
    other.close()
    healthy(repository)


def test_a_repository_that_goes_while_it_is_open_is_refused(repository: GitRepository, tmp_path: Path) -> None:
    """Taken away, or left without its commit: it is said what is missing, nothing is made in its place, and it can be
    used again when it is back."""
    repository.transact([append("one")])
    branch = repository.path / ".git" / "refs" / "heads" / "main"
    kept = branch.read_bytes()
    branch.unlink()
    for ask in (repository.view, lambda: repository.transact([append("two")])):
        with pytest.raises(errors.RepositoryRefused, match="the branch refs/heads/main has no commit"):
            ask()
    branch.write_bytes(kept)
    repository.path.rename(tmp_path / "elsewhere")
    for ask in (repository.view, lambda: repository.transact([append("two")])):
        with pytest.raises(errors.RepositoryRefused, match=r"there is no \.git in it"):
            ask()
    assert not repository.path.exists()
    (tmp_path / "elsewhere").rename(repository.path)
    repository.transact([append("two")])
    assert lines(repository) == ["start", "one", "two"]
    healthy(repository)


# --- bounds -----------------------------------------------------------------------------------------------


def test_no_file_stays_open_between_calls(repository: GitRepository) -> None:
    """An idle repository holds no descriptor, closed or not."""
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for number in range(70):
        repository.transact([append(f"n{number}")])
    list(repository.log())
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_git_is_not_imported_with_openjobs() -> None:
    """dulwich is loaded when a git repository is first asked for, not before."""
    script = (
        "import sys, openjobs, openjobs.repo\n"
        "assert not any(name.startswith('dulwich') for name in sys.modules)\n"
        "from openjobs.repo import GitRepository\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).resolve().parents[2])
