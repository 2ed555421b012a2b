"""Two processes with a runner each on one home: they share sessions, cancel and wait for each other's jobs,
and the one that lives ends what the one that was killed left (design, *Job*, *Recovery*; R4 to R6)."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobClient, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult
from openjobs.jobs import EDGES, TERMINAL
from tests.support import eventually, git

#: a host that runs one job for each prompt on its standard input and says what it does
HOST = r"""
import sys, threading
from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult

def say(line):
    sys.stdout.write(line + "\n")  # one write, so that threads do not mix their lines
    sys.stdout.flush()

def work(request, cancel_event):
    say("began " + request.job_id)
    if request.prompt.startswith("quick"):
        return TurnResult(final_text=request.prompt)
    cancel_event.wait(120)
    return TurnResult(final_text="stopped" if cancel_event.is_set() else "never")

with GitJobStore(sys.argv[1], durability="relaxed") as store, JobRunner(store, 2, work) as runner:
    say("runner " + runner.runner_id)
    for line in sys.stdin:
        job = runner.submit(SpawnRequest(prompt=line.strip(), parent_session_id="s1"))
        say("job " + job.job_id)
"""


class Host:
    """Another process; `read` gives the next line that begins with a word."""

    def __init__(self, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: list[list[str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.runner_id = self.said("runner")
        except BaseException:
            self.end()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.split())

    def said(self, word: str) -> str:
        def found() -> list[str] | None:
            assert self.process.poll() in (None, -signal.SIGKILL), "the other process ended by itself"
            return next((line for line in self._lines if line[0] == word), None)

        line = eventually(found, 20)
        assert line is not None
        self._lines.remove(line)
        return line[1]

    def submit(self, prompt: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(prompt + "\n")
        self.process.stdin.flush()
        return self.said("job")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> None:
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        elif not self.process.stdin.closed:
            self.process.stdin.close()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s1")
        yield store
        report = store.fsck("s1")
        assert report.clean, "\n".join(map(str, report.findings))
        git("fsck", "--strict", cwd=store.session_dir("s1") / "repo")
        for job in store.list(limit=None):
            walked = [t.status for t in store.history(job.job_id) if t.kind == "transition"]
            assert all(after in EDGES[before] for before, after in itertools.pairwise(walked))
            assert [status in TERMINAL for status in walked].count(True) == 1


@pytest.fixture
def other(store: GitJobStore) -> Iterator[Host]:
    assert store.home is not None
    host = Host(store.home)
    yield host
    host.end()


def quick(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    return TurnResult(final_text=request.prompt)


def ask(prompt: str) -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id="s1")


def test_both_run_jobs_on_one_session(store: GitJobStore, other: Host) -> None:
    """Their commits mix into one linear, legal history; each finds the other's jobs."""
    with JobRunner(store, 2, quick) as runner:
        theirs = [other.submit(f"quick {n}") for n in range(10)]
        ours = [runner.submit(ask(f"mine {n}")).job_id for n in range(10)]
        ended = runner.await_tasks([*theirs, *ours], timeout=30)
    assert [job.status for job in ended] == [JobStatus.COMPLETED] * 20
    assert {job.runner_id for job in ended[:10]} == {other.runner_id}
    parents = git("log", "--format=%p", cwd=store.session_dir("s1") / "repo").splitlines()
    assert all(len(line.split()) <= 1 for line in parents)


@pytest.mark.parametrize("by", ["client", "runner"])
def test_a_job_of_the_other_process_is_cancelled_within_half_a_second(store: GitJobStore, other: Host, by: str) -> None:
    """The request is a commit; the owner sees it, ends the job, and is the only one to do so."""
    job_id = other.submit("long")
    assert other.said("began") == job_id
    eventually(lambda: store.get(job_id).status is JobStatus.RUNNING)
    with JobClient(store) as client, JobRunner(store, 1, quick) as runner:
        asker = client if by == "client" else runner
        asked = asker.cancel(job_id, "from the other process")
        assert asked.status is JobStatus.RUNNING
        ended = asker.await_job(job_id, timeout=30)
    assert (ended.status, ended.cancel_reason, ended.result_text) == (
        JobStatus.CANCELLED,
        "from the other process",
        "stopped",
    )
    history = store.history(job_id)
    assert [t.kind for t in history][-2:] == ["cancel-request", "transition"]
    assert history[-1].runner_id == other.runner_id


def test_a_queued_job_of_the_other_process_is_cancelled_and_never_starts(store: GitJobStore, other: Host) -> None:
    """Behind two long ones."""
    running = [other.submit("long"), other.submit("long")]
    for _ in running:
        other.said("began")
    waiting = other.submit("quick behind")
    with JobClient(store) as client:
        client.cancel(waiting)
        assert client.await_job(waiting, timeout=30).status is JobStatus.CANCELLED
        assert store.get(waiting).started_at is None
        for job_id in running:
            client.cancel(job_id)
        client.await_tasks(running, timeout=30)


def test_a_killed_processs_jobs_are_ended_by_whoever_meets_them(store: GitJobStore, other: Host) -> None:
    """kill -9, then `get`: errored, with the text of the spec; nothing is run again."""
    running = [other.submit("long"), other.submit("long")]
    for _ in running:
        other.said("began")
    queued = other.submit("quick behind")
    with JobRunner(store, 1, quick) as runner:
        waited: list[JobStatus] = []
        wait = threading.Thread(target=lambda: waited.append(runner.await_job(running[0], timeout=30).status))
        wait.start()
        assert not runner.get(running[1]).terminal
        other.kill()
        for job_id in [running[1], queued]:
            job = runner.get(job_id)
            assert (job.status, job.error) == (JobStatus.ERRORED, "worker died before completion")
        wait.join(30)
        assert waited == [JobStatus.ERRORED]
        runner.recover()
        assert store.leases.dead() == []
        assert store.active.sessions(other.runner_id) == []


def test_a_new_process_ends_what_a_killed_one_left(store: GitJobStore, other: Host) -> None:
    """At its start, from the active markers, without being asked for any job."""
    job_id = other.submit("long")
    other.said("began")
    other.kill()
    with JobRunner(store, 1, quick):
        assert store.get(job_id).error == "worker died before completion"


def test_many_recover_at_once_and_each_job_ends_once(store: GitJobStore, other: Host) -> None:
    """Three processes meet the same dead runner's jobs; the fixture checks that there is one end each."""
    jobs = [other.submit("long") for _ in range(6)]
    other.kill()
    assert store.home is not None
    program = (
        "import sys; from openjobs import GitJobStore, JobClient\n"
        "with GitJobStore(sys.argv[1]) as store, JobClient(store) as client: client.recover()"
    )
    recovering = [subprocess.Popen([sys.executable, "-c", program, str(store.home)]) for _ in range(3)]
    assert [process.wait(60) for process in recovering] == [0, 0, 0]
    assert {store.get(job_id).error for job_id in jobs} == {"worker died before completion"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_keep_the_parents_lease_alive(store: GitJobStore, other: Host) -> None:
    """The child of a killed host lives on; its jobs are recoverable all the same."""
    runner = JobRunner(store, 1, quick)
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    try:
        runner._lease.release()
        eventually(lambda: not store.leases.is_held(runner.runner_id))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        runner.shutdown()
