"""Homes that earlier versions left behind open for ever: read, checked, recovered, and gone on with (fixtures/home)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs import GitJobStore, JobClient, JobRunner, JobStatus, SpawnRequest, TurnResult
from openjobs.host.transfer import export_session, import_session
from openjobs.processes import ProcessSupervisor, TaskClient, TaskStatus, run_directory
from tests.support import git
from tests.support.cli import Cli

FIXTURES = Path(__file__).parents[2] / "fixtures" / "home"
VERSIONS = sorted(path.name.removesuffix(".tar.gz") for path in FIXTURES.glob("*.tar.gz"))


@attrs.frozen
class Old:
    home: Path
    #: what was in it when it was made
    said: dict[str, Any]


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Old:
    with tarfile.open(FIXTURES / f"{request.param}.tar.gz") as tar:
        tar.extractall(tmp_path / "home", filter="tar")  # keeps the modes, which say whose a pack is
    (tmp_path / "home").chmod(0o700)
    return Old(tmp_path / "home", json.loads((FIXTURES / f"{request.param}.json").read_text()))


def test_there_is_a_home_of_the_first_version() -> None:
    """The tests below are not silently about nothing."""
    assert "v1" in VERSIONS


def test_every_job_reads_as_it_was_written(old: Old) -> None:
    """Status, whole text, error and every step of each, the jobs of the closed page too."""
    with GitJobStore(old.home, "relaxed") as store:
        assert store.head(old.said["session"]) == old.said["head"]
        assert len(store.list(old.said["session"], limit=None)) == len(old.said["jobs"])
        for label, said in old.said["jobs"].items():
            job = store.get(said["job_id"])
            assert (job.status.value, job.result_text, job.error, job.run_id) == (
                said["status"],
                said["result_text"],
                said["error"],
                said["run_id"],
            ), label
            assert [step.status.value for step in store.history(job.job_id)] == said["steps"], label
        assert len(list(store.session(old.said["session"]).nodes())) == old.said["messages"]


def test_every_command_and_log_reads_as_it_was_written(old: Old) -> None:
    """Ends, output, and the bytes of the log of a job that was a command."""
    with TaskClient(old.home) as tasks:
        for label, said in old.said["tasks"].items():
            task = tasks.get(said["task_id"])
            assert (task.status.value, task.exit_code) == (said["status"], said["exit_code"]), label
            assert tasks.output(task).data.decode() == said["output"], label
    run_id = old.said["jobs"]["command"]["run_id"]
    assert (run_directory(old.home, old.said["session"], run_id) / "log").read_bytes() == b"out\nerr\n"


def test_it_is_whole_for_us_and_for_git(old: Old) -> None:
    """fsck has nothing to say, and neither has git's."""
    assert Cli(old.home).json_inside("fsck")["findings"] == 0
    for session in (old.said["session"], old.said["crashed"]["session"]):
        git("fsck", "--strict", cwd=old.home / "sessions" / session / "repo")


def test_what_was_running_when_its_runner_was_killed_is_recovered(old: Old) -> None:
    """Whoever looks first records that it died."""
    said = old.said["crashed"]
    with GitJobStore(old.home, "relaxed") as store, JobClient(store) as client:
        assert store.get(said["job_id"]).status.value == said["status"]
        assert [job.job_id for job in client.recover()] == [said["job_id"]]
        assert store.get(said["job_id"]).error == "worker died before completion"
        assert store.fsck(said["session"]).clean


def test_it_is_gone_on_with(old: Old) -> None:
    """New jobs and commands beside the old ones; old keys give the old ones; gc, export and import still do."""
    session = old.said["session"]
    with GitJobStore(old.home, "relaxed") as store:
        with JobRunner(store, sync_fn=lambda request, event: TurnResult(final_text="new")) as runner:
            job = runner.submit(SpawnRequest(prompt="more", parent_session_id=session))
            again = SpawnRequest(
                prompt="say hello", description="completed", parent_session_id=session, origin_tool_call_id="call-1"
            )
            assert runner.submit(again).job_id == old.said["jobs"]["completed"]["job_id"]
            assert runner.await_job(job.job_id, timeout=30).status is JobStatus.COMPLETED
        with ProcessSupervisor(store) as supervisor:
            assert (
                supervisor.start(session, "exit 3", origin_tool_call_id="call-2").task_id
                == old.said["tasks"]["failed"]["task_id"]
            )
            task = supervisor.start(session, "true")
            assert supervisor.wait(task.task_id, timeout=30).status is TaskStatus.COMPLETED
        store.gc(session)
        assert store.fsck(session).clean
        export_session(store, session, old.home.parent / "x")
        with GitJobStore(old.home.parent / "other", "relaxed") as other:
            assert import_session(other, old.home.parent / "x").jobs == len(old.said["jobs"]) + 1
