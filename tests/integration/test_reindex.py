"""The home's index of ids is derived: where it is lost, in whole or in part, `recover` makes it again from the rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from openjobs import GitJobStore, MockTaskStore, errors
from openjobs.durable import Disk
from openjobs.jobs import Queued
from openjobs.repo import RepositoryBusy
from openjobs.store.index import Entry, FileIndex
from tests.support import git
from tests.support.cli import Cli
from tests.support.homes import SESSION, Filled, fill
from tests.support.jobs import job_for


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Filled]:
    home = tmp_path_factory.mktemp("filled")
    made = fill(home, many=70)  # a page closes
    with GitJobStore(home, "relaxed") as store:
        store.create_session("second")
        for number in range(3):
            job = job_for(store, "second", f"number {number}", origin_tool_call_id=f"call-{number}")
            store.create(job, Queued(runner_id="r1"))
        parent = store.list("second")[0].job_id
        store.create(job_for(store, "second", "nested", parent_job_id=parent), Queued(runner_id="r1"))
    return home, made


@pytest.fixture
def home(filled: tuple[Path, Filled], tmp_path: Path) -> Path:
    """A home of one's own, which is known whole."""
    return shutil.copytree(filled[0], tmp_path / "h", symlinks=True)


def entries(home: Path, name: str = "jobs") -> list[Entry]:
    index = FileIndex(home / "index", Disk(durable=False), name=name)
    found = list(index.newest_first())
    index.close()
    return found


def test_a_lost_index_is_a_finding_and_recover_makes_it_again(home: Path, filled: tuple[Path, Filled]) -> None:
    """Jobs of all sessions and background commands: hidden, named by fsck, and found again, in their order, with
    parents and idempotency keys; a second recover has nothing to do."""
    cli = Cli(home)
    cli.inside("fsck")
    listed, shown = cli.json_inside("list", "--limit", "0"), cli.json_inside("ps", "-a")
    before = entries(home), entries(home, "tasks")
    shutil.rmtree(home / "index")
    assert cli.json_inside("list", "--limit", "0")["jobs"] == []

    report = cli.json_inside("fsck", code=6)
    told = {(one["session_id"], each["where"]) for one in report["sessions"] for each in one["findings"]}
    assert told == {(SESSION, "index"), ("second", "index")}
    words = [each["what"] for one in report["sessions"] for each in one["findings"]]
    assert len(words) == 3  # jobs of two sessions, commands of one
    assert all("openjobs recover" in each for each in words)
    assert any("lacks 4 jobs" in each for each in words)
    assert any("lacks 3 background commands" in each for each in words)

    ended = cli.inside("recover")
    assert f"{len(before[0]) + len(before[1])} ids put back" in ended.err
    assert (entries(home), entries(home, "tasks")) == before
    assert [job["job_id"] for job in cli.json_inside("list", "--limit", "0")["jobs"]] == [
        job["job_id"] for job in listed["jobs"]
    ]
    assert [task["task_id"] for task in cli.json_inside("ps", "-a")["tasks"]] == [
        task["task_id"] for task in shown["tasks"]
    ]
    cli.inside("fsck")
    assert cli.json_inside("recover")["indexed"] == 0
    with GitJobStore(home, "relaxed") as store, pytest.raises(errors.OpenJobsError) as caught:
        store.create(job_for(store, "second", "another", origin_tool_call_id="call-1"))
    assert isinstance(caught.value, errors.IdempotencyConflict | errors.JobExists)


def test_only_what_is_missing_is_put_back(home: Path) -> None:
    """A line that is gone, at the end of the file or within: that one, durable, and no other one twice."""
    path = home / "index" / "jobs.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:-1]) + lines[-1][:20])
    with GitJobStore(home, "relaxed") as store:
        assert store.reindex("second") == 1
        assert store.reindex(SESSION) == 1
        assert store.reindex() == 0
        with pytest.raises(errors.UnknownSession):
            store.reindex("third")
        assert store.fsck(SESSION).clean
        assert store.fsck("second").clean
    ids = [line[6:42] for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    assert len(ids) == len(set(ids)) == len(lines)


def test_a_damaged_session_hides_no_other(home: Path) -> None:
    """What can be read is put back, in the damaged session, too, and the damage is told."""
    shutil.rmtree(home / "index")
    objects = home / "sessions" / "second" / "repo" / ".git" / "HEAD"
    objects.write_text("nonsense\n")
    told: list[str] = []
    with GitJobStore(home, "relaxed") as store:
        put = store.reindex(on_damage=lambda session_id, error: told.append(session_id))
        assert put > 70
        assert told == ["second"]
        with pytest.raises((errors.Damaged, errors.RepositoryRefused)):
            store.reindex()
    ended = Cli(home).inside("recover", code=None)
    assert ended.code == 6
    assert "session second could not be read whole" in ended.err


@pytest.mark.parametrize("damage", ["a row", "a page"])
def test_a_damaged_row_or_page_hides_no_other(damage: str, home: Path) -> None:
    """Of the same session, too: all others are put back, and that session is named."""
    repo = home / "sessions" / SESSION / "repo"
    with GitJobStore(home, "relaxed") as store:
        ids = [entry.job_id for entry in store.index.newest_first() if entry.session_id == SESSION]
        page = store.documents(SESSION).older_page(0) if damage == "a page" else store.documents(SESSION).newest_page()
        hurt = list(page.lines) if damage == "a page" else list(page.lines)[:1]
    if damage == "a page":
        (repo / page.path).write_bytes(b"[1, 2]")
    else:
        (repo / page.path).write_bytes(page.data.replace(b'"status":"', b'"status":"not-', 1))
    git("commit", "-qam", "by hand", cwd=repo)
    shutil.rmtree(home / "index")
    told: list[tuple[str, bool]] = []
    with GitJobStore(home, "relaxed") as store:
        put = store.reindex(
            SESSION, on_damage=lambda session_id, error: told.append((session_id, isinstance(error, errors.Damaged)))
        )
        assert told == [(SESSION, True)]
        assert put == len(ids) - len(hurt)
        for job_id in set(ids) - set(hurt):
            assert store.get(job_id).job_id == job_id
        with pytest.raises(errors.Damaged):
            store.reindex(SESSION)


def test_a_session_that_is_taken_away_meanwhile_is_passed_over(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there when the names were read: nothing of it is missing any more."""
    shutil.rmtree(home / "index")
    with GitJobStore(home, "relaxed") as store:
        names = store.sessions()
        monkeypatch.setattr(store, "sessions", lambda: [*names, "gone"])
        assert store.reindex() > 70
        assert store.fsck("second").clean


@pytest.mark.parametrize("held", [False, True])
def test_an_index_that_cannot_be_written_is_said(held: bool, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was put back, for what reason is said, and the same again does it."""
    shutil.rmtree(home / "index")
    with GitJobStore(home, "relaxed") as store:

        def fail(entries: object) -> None:
            raise RepositoryBusy("the index is held") if held else OSError(28, "no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(store.index, "add", fail)
            with pytest.raises(errors.SessionBusy if held else errors.StoreWriteFailed) as failed:
                store.reindex()
        assert held or failed.value.errno == 28
        assert store.reindex() > 70


def test_a_store_in_memory_has_nothing_to_put_back() -> None:
    """The same call, and the same answer of fsck."""
    with MockTaskStore() as store:
        store.create_session("s1")
        store.create(job_for(store, "s1", "do it"), Queued(runner_id="r1"))
        assert store.reindex() == 0
        assert store.fsck("s1").clean
