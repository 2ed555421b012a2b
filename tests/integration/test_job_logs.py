"""The run logs of jobs that are commands: whole, in the one order, and completed whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs import JobRunner, SpawnRequest, TurnResult
from openjobs.agents import Profiles
from openjobs.errors import NotFound
from openjobs.jobs import Job, JobStatus, TurnRequest
from openjobs.runlog import Ending, RunLogReader
from openjobs.runner import JobClient
from openjobs.runner.ending import EndStep
from openjobs.store import GitJobStore
from tests.support import eventually
from tests.support.chaos import Chaos
from tests.support.cli import ROOT
from tests.support.disks import FaultyDisk

BOUND_S = 20.0
ENV = {"PATH": os.environ.get("PATH", os.defpath)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s")
        yield store


@pytest.fixture
def runner(store: GitJobStore) -> Iterator[JobRunner]:
    with Profiles(store.home, disk=store.disk) as profiles, JobRunner(store, workers=2, profiles=profiles) as runner:
        yield runner


def shell(script: str) -> SpawnRequest:
    return SpawnRequest(prompt=script, parent_session_id="s", agent_id="shell", env=ENV)


def log_of(store: GitJobStore, job: Job) -> RunLogReader:
    assert job.run_id is not None
    return RunLogReader(store.session_dir("s") / "runs" / job.run_id, task_id=job.job_id, run_id=job.run_id)


def completion(store: GitJobStore, job: Job) -> str | None:
    try:
        state = log_of(store, job).state()
    except NotFound:
        return None
    return state.completion.outcome if state is not None and state.completion is not None else None


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("seq 1 50000; printf end", JobStatus.COMPLETED, b"".join(b"%d\n" % n for n in range(1, 50001)) + b"end"),
        ("printf 'no newline' >&2; exit 3", JobStatus.ERRORED, b"no newline"),
        ("true", JobStatus.COMPLETED, b""),
    ],
)
def test_a_finished_job_has_a_complete_log(
    script: str, status: JobStatus, said: bytes, runner: JobRunner, store: GitJobStore
) -> None:
    """Every byte is in it, and its completion is there before anybody who waits for the job is woken."""
    job = runner.await_job(runner.submit(shell(script)).job_id, BOUND_S)
    assert job.status is status
    assert completion(store, job) == status.value
    state = log_of(store, job).state()
    assert state is not None
    assert state.completion is not None
    assert state.completion.ending is Ending.DRAINED
    assert b"".join(log_of(store, job).follow()) == said


def test_the_log_is_complete_only_after_the_commit(runner: JobRunner, store: GitJobStore) -> None:
    """Drained, then the terminal commit, then complete: at the moment of completion the row says the end."""
    seen: list[tuple[JobStatus, str | None, int]] = []
    finish = runner.ending.set(EndStep.RUN_LOG, lambda ended: None)

    def look(ended: object) -> None:
        job = store.get(ended.job.job_id)  # type: ignore[attr-defined]
        state = log_of(store, job).state()
        seen.append((job.status, completion(store, job), state.log_bytes if state else -1))
        finish(ended)  # type: ignore[arg-type]

    runner.ending.set(EndStep.RUN_LOG, look)
    job = runner.await_job(runner.submit(shell("echo hi")).job_id, BOUND_S)
    assert seen == [(JobStatus.COMPLETED, None, 3)]
    assert completion(store, job) == "completed"


def test_a_job_can_be_followed_while_it_runs(runner: JobRunner, store: GitJobStore, tmp_path: Path) -> None:
    """The follower has each line before the next one is written, and ends with the job."""
    job = runner.submit(shell(f"cd {tmp_path}; for n in 1 2; do echo $n; while [ ! -e $n ]; do sleep 0.02; done; done"))
    eventually(lambda: log_of(store, job)._path.exists() and (log_of(store, job)._path / "log.state").exists())
    seen = b""
    for chunk in log_of(store, job).follow():
        seen += chunk
        for line in seen.split():
            (tmp_path / line.decode()).touch()
    assert seen == b"1\n2\n"


def test_a_callable_has_no_log(runner: JobRunner, store: GitJobStore) -> None:
    """A Python turn writes to no stream: it has a result and no log."""
    job = runner.submit(
        SpawnRequest(prompt="x", parent_session_id="s"), sync_fn=lambda request, cancel: TurnResult(final_text="done")
    )
    job = runner.await_job(job.job_id, BOUND_S)
    assert job.status is JobStatus.COMPLETED
    assert job.run_id is not None
    with pytest.raises(NotFound):
        log_of(store, job).read()


def test_a_forced_cancel_leaves_a_log_that_is_completed_when_the_tree_is_drained(
    store: GitJobStore, tmp_path: Path
) -> None:
    """The job is over before its command is; what the command still says is in the log, which completes after it."""
    held, entered = threading.Event(), threading.Event()
    with Profiles(store.home, disk=store.disk) as profiles:
        command = profiles.get("shell")

        def stubborn(request: TurnRequest, cancel: threading.Event) -> TurnResult:
            """Does not look at its cancel until the test lets it."""
            entered.set()
            return command(request, held)

        runner = JobRunner(store, workers=1, profiles=profiles, cancel_timeout_s=0.1)
        job = runner.submit(
            shell(f"echo early; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo late"), stubborn
        )
        assert entered.wait(BOUND_S)
        eventually(lambda: completion(store, job) is None and (log_of(store, job)._path / "log.state").exists())
        runner.cancel(job.job_id)
        ended = runner.await_job(job.job_id, BOUND_S)
        assert ended.status is JobStatus.CANCELLED
        assert completion(store, job) is None
        assert profiles.run_logs.unfinished == 1
        (tmp_path / "go").touch()
        eventually(lambda: completion(store, job) == "cancelled")
        assert log_of(store, job).read().data == b"early\nlate\n"
        eventually(lambda: not runner.stats().stuck)
        runner.shutdown()


def test_a_disk_that_fails_once_costs_no_log(tmp_path: Path) -> None:
    """Each effect of a run's log fails once: the job ends as it ends, and its log is whole at the latest with the
    end of another job."""
    effect, failed = 0, True
    while failed:
        effect += 1
        disk = FaultyDisk()
        with GitJobStore(tmp_path / str(effect), durability="relaxed") as store:
            store.create_session("s")
            with (
                Profiles(store.home, disk=disk) as profiles,
                JobRunner(store, workers=1, profiles=profiles) as runner,
            ):
                disk.arm(effect)
                first = runner.await_job(runner.submit(shell("echo one; echo two >&2; exit 3")).job_id, BOUND_S)
                failed = bool(disk.failed)
                runner.await_job(runner.submit(shell("true")).job_id, BOUND_S)
                assert profiles.run_logs.unfinished == 0
                if first.error is not None and "exit code 3" in first.error:
                    assert completion(store, first) == "errored"
                    assert sorted(_all(store, first).splitlines()) == [b"one", b"two"]
    assert effect > 5


DYING = """
import os, sys
from pathlib import Path
from openjobs import JobRunner, SpawnRequest
from openjobs.agents import Profiles
from openjobs.runner.ending import EndStep
from openjobs.store import GitJobStore
store = GitJobStore(Path(sys.argv[1]), durability="relaxed")
profiles = Profiles(store.home, disk=store.disk)
runner = JobRunner(store, workers=1, profiles=profiles)
if sys.argv[2] == "after the commit":
    runner.ending.set(EndStep.RUN_LOG, lambda ended: os.kill(os.getpid(), 9))
job = runner.submit(SpawnRequest(prompt=sys.argv[3], parent_session_id="s", agent_id="shell", env=dict(os.environ)))
print(job.job_id, flush=True)
runner.await_job(job.job_id)
"""


def dying(store: GitJobStore, moment: str, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DYING, str(store.home), moment, script]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize("moment", ["while it runs", "after the commit"])
def test_a_dead_hosts_log_is_completed_by_recovery(moment: str, store: GitJobStore) -> None:
    """Its command is ended, its output drained to the last byte, and the log says how the job ended."""
    script = "echo one; echo two >&2" + ("; exec sleep 60" if moment == "while it runs" else "")
    with dying(store, moment, script) as process:
        assert process.stdout is not None
        job_id = process.stdout.readline().strip()
        if moment == "while it runs":
            eventually(lambda: (found := store.get(job_id)).status is JobStatus.RUNNING and found)
            job = store.get(job_id)
            eventually(lambda: (log_of(store, job)._path / "log.state").exists() and len(_all(store, job)) == 8)
            process.send_signal(signal.SIGKILL)
        process.wait(BOUND_S)
    job = store.get(job_id)
    assert completion(store, job) is None
    with JobClient(store) as client:
        client.recover()
        client.recover()
    job = store.get(job_id)
    assert job.status is (JobStatus.ERRORED if moment == "while it runs" else JobStatus.COMPLETED)
    assert completion(store, job) == job.status.value
    assert sorted(_all(store, job).splitlines()) == [b"one", b"two"]


def _all(store: GitJobStore, job: Job) -> bytes:
    return log_of(store, job).read().data


# --- many ---------------------------------------------------------------------------------------------------


def test_many_short_commands_of_jobs_leave_nothing_behind(runner: JobRunner, store: GitJobStore, chaos: Chaos) -> None:
    """Each drains in the thread of its worker: threads, descriptors and open logs are as many after a thousand jobs
    as after a few, and every log is complete."""

    def batch(number: int) -> list[Job]:
        jobs = [runner.submit(shell(f"echo {n}")) for n in range(number)]
        return runner.await_tasks([job.job_id for job in jobs], timeout=10 * BOUND_S)

    def used() -> tuple[int, int]:
        return len(os.listdir("/dev/fd")), threading.active_count()

    def few_more() -> bool:
        # The pool may have needed fewer threads before; one left by each job would be twenty more with each batch.
        files, threads = used()
        return files <= before[0] + 4 and threads <= before[1] + runner.workers

    ended = batch(10)
    before = used()
    for _ in range(chaos.rounds(4, 100)):
        ended += batch(20)
        eventually(few_more, BOUND_S)
    assert {job.status for job in ended} == {JobStatus.COMPLETED}
    eventually(lambda: all(completion(store, job) == "completed" for job in ended), BOUND_S)
