"""A session leaves a home as one file and comes into another one whole: `openjobs export` and `import`."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.host.transfer import IMPORTED_JOB, export_session, import_session
from openjobs.jobs import Cancelled, Queued
from openjobs.processes import ProcessSupervisor, TaskClient, TaskStatus, run_directory
from openjobs.runlog import RunLogReader
from tests.support import git
from tests.support.cli import Cli
from tests.support.homes import SESSION, Filled, fill, until_running
from tests.support.jobs import job_for
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Filled]:
    home = tmp_path_factory.mktemp("filled")
    return home, fill(home, many=70)


@pytest.fixture(scope="module")
def archive(filled: tuple[Path, Filled], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "demo.openjobs"
    with GitJobStore(filled[0], "relaxed") as store:
        made = export_session(store, SESSION, path)
    assert made.path == path
    assert made.size_bytes == path.stat().st_size
    assert not made.unfinished_jobs
    assert not made.unfinished_tasks
    return path


def read_log(home: Path, session_id: str, run_id: str) -> bytes:
    return (run_directory(home, session_id, run_id) / "log").read_bytes()


def test_a_session_comes_back_as_it_was(filled: tuple[Path, Filled], archive: Path, tmp_path: Path) -> None:
    """Jobs, whole texts, messages, commits, commands, their output and logs: the same in the other home."""
    home, made = filled
    with GitJobStore(home, "relaxed") as before, GitJobStore(tmp_path / "new", "relaxed") as after:
        imported = import_session(after, archive)
        assert imported.session_id == SESSION
        assert imported.jobs == len(made.jobs)
        assert imported.tasks == len(made.tasks)
        assert imported.commit_id == before.head(SESSION) == after.head(SESSION)
        for job_id in made.jobs.values():
            assert after.get(job_id) == before.get(job_id)
            assert after.history(job_id) == before.history(job_id)
        assert list(after.session(SESSION).nodes()) == list(before.session(SESSION).nodes())
        assert after.fsck(SESSION).clean
        with TaskClient(home) as old, TaskClient(tmp_path / "new") as new:
            for task_id in made.tasks.values():
                assert new.get(task_id) == old.get(task_id)
                assert new.output(new.get(task_id)) == old.output(old.get(task_id))
                assert read_log(after.home or home, SESSION, task_id) == read_log(home, SESSION, task_id)
        run_id = before.get(made.jobs["command"]).run_id or ""
        assert read_log(tmp_path / "new", SESSION, run_id) == b"out\nerr\n"


def test_what_came_in_goes_on(archive: Path, filled: tuple[Path, Filled], tmp_path: Path) -> None:
    """New jobs and commands run in it, an old idempotency key gives the old job, and a second export is possible."""
    with GitJobStore(tmp_path / "new", "relaxed") as store:
        import_session(store, archive)
        with JobRunner(store, sync_fn=lambda request, event: TurnResult(final_text="ok")) as runner:
            again = SpawnRequest(
                prompt="say hello", description="completed", parent_session_id=SESSION, origin_tool_call_id="call-1"
            )
            assert runner.submit(again).job_id == filled[1].jobs["completed"]
            job = runner.submit(SpawnRequest(prompt="more", parent_session_id=SESSION))
            assert runner.await_job(job.job_id, timeout=30).status is JobStatus.COMPLETED
        with ProcessSupervisor(store) as supervisor:
            first = supervisor.start(SESSION, "exit 3", origin_tool_call_id="call-2")
            assert first.task_id == filled[1].tasks["failed"]
        assert store.fsck(SESSION).clean
        assert git("status", "--porcelain", cwd=store.session_dir(SESSION) / "repo") == ""
        export_session(store, SESSION, tmp_path / "again")


def test_pages_that_shrink_with_the_name_are_in_order(tmp_path: Path) -> None:
    """Their rows have long texts, so each was closed for its bytes, and has fewer of them under a short name."""
    name = "x" * 64
    with (
        GitJobStore(tmp_path / "before", durability="relaxed") as before,
        GitJobStore(tmp_path / "after", durability="relaxed") as after,
    ):
        before.create_session(name)
        while before.documents(name).older_pages() < 2:
            job = before.create(job_for(before, name, "word " * 200), Queued(runner_id="r1"), fresh_id=True)
            before.apply(job.job_id, Cancelled(event_id=before.new_id()))
        export_session(before, name, tmp_path / "archive")
        import_session(after, tmp_path / "archive", "s")
        page = after.documents("s").older_page(0)
        assert not page.is_full(0)
        assert len(page) == len(before.documents(name).older_page(0))
        assert after.fsck("s").clean


def test_under_another_name_everything_names_the_new_session(archive: Path, tmp_path: Path) -> None:
    """Rows, cards, title page and commands; the jobs that were there are found by their ids."""
    with GitJobStore(tmp_path / "new", "relaxed") as store:
        imported = import_session(store, archive, "moved")
        assert store.sessions() == ["moved"]
        assert store.session("moved").meta.session_id == "moved"
        jobs = store.list("moved", limit=None)
        assert len(jobs) == imported.jobs
        assert {job.parent_session_id for job in jobs} == {"moved"}
        cards = [node for node in store.session("moved").nodes() if node.function == "attach"]
        assert {card.extra["attach"]["session_id"] for card in cards} == {"moved"}
        with TaskClient(tmp_path / "new") as tasks:
            assert {task.session_id for task in tasks.list("moved")} == {"moved"}
        assert store.fsck("moved").clean
        with pytest.raises(errors.Refused, match="of this home already"):
            import_session(store, archive)
        with pytest.raises(errors.SessionExists):
            import_session(store, archive, "MOVED")
        assert store.sessions() == ["moved"]


def test_standard_tools_read_an_archive(archive: Path, tmp_path: Path) -> None:
    """tar, sha256sum and git need nothing of ours; git finds every object in order."""
    subprocess.run(["tar", "xf", archive], cwd=tmp_path, check=True)
    said = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / SESSION, check=True, capture_output=True
    )
    assert b"repo.bundle: OK" in said.stdout
    git("clone", "-q", "repo.bundle", "clone", cwd=tmp_path / SESSION)
    git("fsck", "--strict", "--full", cwd=tmp_path / SESSION / "clone")
    assert (tmp_path / SESSION / "clone" / "jobs" / "00" / "0000.json").exists()


def test_a_foreign_commit_a_branch_and_a_tag_come_along(filled: tuple[Path, Filled], tmp_path: Path) -> None:
    """What a person made with git itself, loose objects and packs of git's own included."""
    home = tmp_path / "old"
    fill(home, many=1)
    repo = home / "sessions" / SESSION / "repo"
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    (repo / "notes.txt").write_text("mine\n" * 500)
    git("add", "notes.txt", cwd=repo)
    git(*who, "commit", "-q", "-m", "notes", cwd=repo)
    git(*who, "tag", "-a", "-m", "a tag", "v1", cwd=repo)
    git("gc", "-q", cwd=repo)
    (repo / "notes.txt").write_text("mine\n" * 500 + "more\n")
    git(*who, "commit", "-q", "-a", "-m", "more notes", cwd=repo)
    git("branch", "topic/one", "HEAD~1", cwd=repo)
    with GitJobStore(home, "relaxed") as before, GitJobStore(tmp_path / "new", "relaxed") as after:
        export_session(before, SESSION, tmp_path / "x")
        import_session(after, tmp_path / "x")
        there = after.session_dir(SESSION) / "repo"
    for ref in ("HEAD", "refs/heads/main", "refs/heads/topic/one", "refs/tags/v1"):
        assert git("rev-parse", ref, cwd=there) == git("rev-parse", ref, cwd=repo)
    assert (there / "notes.txt").read_text().endswith("more\n")
    git("fsck", "--strict", cwd=there)
    assert git("status", "--porcelain", cwd=there) == ""


def test_what_was_unfinished_ends_when_it_comes_in(tmp_path: Path) -> None:
    """A running job and a queued one are exported as they stand and named; in the copy they are errored and the
    command is lost, its output kept; the first copy is not disturbed, and its command never signalled."""
    started, go = threading.Event(), threading.Event()

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        started.set()
        go.wait(30)
        return TurnResult(final_text="done")

    with GitJobStore(tmp_path / "old", "relaxed") as store:
        store.create_session(SESSION)
        with JobRunner(store, workers=1, sync_fn=turn) as runner, ProcessSupervisor(store) as supervisor:
            running, queued = (
                runner.submit(SpawnRequest(prompt=text, parent_session_id=SESSION)).job_id for text in ("one", "two")
            )
            until_running(runner, running)
            task = supervisor.start(SESSION, ["sh", "-c", "echo before; read x < /dev/null; exec sleep 60"])
            eventually(lambda: supervisor.output(task.task_id).data == b"before\n")
            made = export_session(store, SESSION, tmp_path / "x")
            assert set(made.unfinished_jobs) == {running, queued}
            assert list(made.unfinished_tasks) == [task.task_id]
            with GitJobStore(tmp_path / "new", "relaxed") as copy:
                imported = import_session(copy, tmp_path / "x")
                assert set(imported.ended_jobs) == {running, queued}
                assert list(imported.ended_tasks) == [task.task_id]
                for job_id in (running, queued):
                    job = copy.get(job_id)
                    assert (job.status, job.error) == (JobStatus.ERRORED, IMPORTED_JOB)
                assert copy.fsck(SESSION).clean
                with TaskClient(tmp_path / "new") as tasks:
                    lost = tasks.get(task.task_id)
                    assert lost.status is TaskStatus.LOST
                    assert tasks.output(lost).data == b"before\n"
                reader = RunLogReader(run_directory(tmp_path / "new", SESSION, task.task_id))
                assert read_log(tmp_path / "new", SESSION, task.task_id) == b"before\n"
                state = reader.state()
                assert state is not None
                assert state.completion is not None
                assert state.completion.outcome == "lost"
                # Somebody recovers the copy, on the machine where the first one lives.
                with JobRunner(copy, sync_fn=turn), ProcessSupervisor(copy) as other:
                    assert other.recover() == []
            assert supervisor.get(task.task_id).status is TaskStatus.RUNNING
            assert task.pid is not None
            os.kill(task.pid, 0)
            go.set()
            assert runner.await_job(queued, timeout=30).status is JobStatus.COMPLETED
            supervisor.stop(task.task_id, grace_s=0.5)
            assert supervisor.wait(task.task_id, timeout=30).status is TaskStatus.CANCELLED


def test_a_command_whose_keeper_has_spoken_keeps_its_end(tmp_path: Path) -> None:
    """Exported after the keeper's record and before the worker's: the import records what the keeper said."""
    with GitJobStore(tmp_path / "old", "relaxed") as store:
        store.create_session(SESSION)
        with ProcessSupervisor(store) as supervisor:
            task = supervisor.start(SESSION, ["sh", "-c", "echo bye; exit 4"])
            supervisor.wait(task.task_id, timeout=30)
        journal = store.session_dir(SESSION) / "tasks.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        assert b'"ended"' in lines[-1]
        journal.write_bytes(b"".join(lines[:-1]))
        export_session(store, SESSION, tmp_path / "x")
    with GitJobStore(tmp_path / "new", "relaxed") as copy, TaskClient(tmp_path / "new") as tasks:
        assert list(import_session(copy, tmp_path / "x").ended_tasks) == [task.task_id]
        found = tasks.get(task.task_id)
        assert (found.status, found.exit_code) == (TaskStatus.FAILED, 4)


def test_an_export_beside_a_busy_runner_is_consistent(tmp_path: Path) -> None:
    """Exports while jobs stream through: each comes in whole, with fsck clean and every finished job."""
    with GitJobStore(tmp_path / "old", "relaxed") as store:
        store.create_session(SESSION)
        stop = threading.Event()
        ended: list[str] = []
        with JobRunner(store, sync_fn=lambda request, event: TurnResult(final_text=request.prompt)) as runner:

            def submit() -> None:
                while not stop.is_set():
                    job = runner.submit(SpawnRequest(prompt="x" * 300, parent_session_id=SESSION))
                    runner.await_job(job.job_id, timeout=30)
                    ended.append(job.job_id)

            threads = [threading.Thread(target=submit) for _ in range(3)]
            for thread in threads:
                thread.start()
            try:
                for number in range(50):
                    if number >= 4 and len(ended) > 20:
                        break
                    before = list(ended)
                    export_session(store, SESSION, tmp_path / f"x{number}")
                    with GitJobStore(tmp_path / f"new{number}", "relaxed") as copy:
                        import_session(copy, tmp_path / f"x{number}")
                        assert {copy.get(job_id).status for job_id in before} <= {JobStatus.COMPLETED}
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
    assert len(ended) > 20


def test_the_command_line_moves_a_session(filled: tuple[Path, Filled], tmp_path: Path) -> None:
    """Export prints the file, import the session; a second time is refused; both say what they did in JSON."""
    old, new = Cli(filled[0]), Cli(tmp_path / "new")
    said = old.inside("export", SESSION, tmp_path / "x")
    assert said.out == f"{tmp_path / 'x'}\n"
    assert "verified" in said.err
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    refused = old.inside("export", SESSION, tmp_path / "x", code=6)
    assert "exists already" in refused.err
    assert old.inside("export", "nobody", tmp_path / "y", code=3).err
    assert not (tmp_path / "y").exists()
    assert new.inside("import", tmp_path / "x").out == f"{SESSION}\n"
    assert "already" in new.inside("import", tmp_path / "x", code=6).err
    assert new.inside("import", tmp_path / "missing", code=2).err
    assert new.json_inside("fsck")["findings"] == 0
    value = new.json_inside("export", SESSION, tmp_path / "z")
    assert value["jobs"] == len(filled[1].jobs)
    other = Cli(tmp_path / "other").json_inside("import", tmp_path / "z", "--session", "again")
    assert other["session_id"] == "again"
    assert other["counts"]["jobs"] == len(filled[1].jobs)
    assert Cli(tmp_path / "none").inside("export", SESSION, tmp_path / "w", code=3).err
    assert not (tmp_path / "none").exists()
