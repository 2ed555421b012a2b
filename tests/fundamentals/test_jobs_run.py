"""Jobs that run: a tutorial. Every step here is what a host program does, on a real repository."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

from openjobs import GitJobStore, JobClient, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult


def shout(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    """What runs a job: it gets the request and an event, and returns the turn's result."""
    return TurnResult(final_text=request.prompt.upper())


def test_a_job_runs_and_its_result_comes_back(tmp_path: Path) -> None:
    """Open a store, make a session, submit, wait."""
    with GitJobStore(tmp_path / "home") as store:
        session_id = store.create_session(title="My first session")
        with JobRunner(store, workers=2, sync_fn=shout) as runner:
            job = runner.submit(SpawnRequest(prompt="hello", description="say hello", parent_session_id=session_id))
            assert job.status is JobStatus.QUEUED  # the id is here at once, and the job is durable

            job = runner.await_job(job.job_id, timeout=30)
            assert job.status is JobStatus.COMPLETED
            assert job.result_text == "HELLO"


def test_git_log_tells_what_happened(tmp_path: Path) -> None:
    """Each state the job passed through is one commit of the session's repository."""
    with GitJobStore(tmp_path / "home") as store:
        session_id = store.create_session("demo")
        with JobRunner(store, sync_fn=shout) as runner:
            runner.submit(SpawnRequest(prompt="hello", description="say hello", parent_session_id=session_id))

        repository = store.session_dir(session_id) / "repo"
        log = subprocess.run(
            ["git", "log", "--reverse", "--format=%s"], cwd=repository, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert [line.split(" ", 2)[2] for line in log[1:]] == [
            "pending: say hello",
            "pending → queued: say hello",
            "queued → running: say hello",
            "running → completed: say hello",
        ]


def test_a_job_is_cancelled_while_it_runs(tmp_path: Path) -> None:
    """The event is set; the job stops when it looks; what it had so far is kept."""
    started = threading.Event()

    def patient(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        request.partial("half of the answer")
        started.set()
        cancel_event.wait()
        request.raise_if_cancelled()
        return TurnResult()

    with GitJobStore(tmp_path / "home") as store:
        session_id = store.create_session("demo")
        with JobRunner(store, sync_fn=patient) as runner:
            job = runner.submit(SpawnRequest(prompt="think", parent_session_id=session_id))
            started.wait(30)
            assert runner.get(job.job_id).result_text == "half of the answer"

            runner.cancel(job.job_id, reason="changed my mind")
            job = runner.await_job(job.job_id)
            assert (job.status, job.cancel_reason) == (JobStatus.CANCELLED, "changed my mind")
            assert job.result_text == "half of the answer"


def test_a_job_hands_work_to_other_jobs_and_waits_for_them(tmp_path: Path) -> None:
    """One worker is enough: a job that waits lends its slot to those it waits for."""

    def plan(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        children = [
            runner.submit(
                SpawnRequest(prompt=word, parent_session_id=request.session_id, parent_job_id=request.job_id),
                sync_fn=shout,
            )
            for word in request.prompt.split()
        ]
        ended = runner.await_tasks([child.job_id for child in children], mode="all")
        return TurnResult(final_text=" ".join(child.result_text or "" for child in ended))

    with GitJobStore(tmp_path / "home") as store:
        session_id = store.create_session("demo")
        with JobRunner(store, workers=1, sync_fn=plan) as runner:
            job = runner.submit(SpawnRequest(prompt="one two three", parent_session_id=session_id))
            assert runner.await_job(job.job_id).result_text == "ONE TWO THREE"
            assert [child.description for child in runner.list(parent_job_id=job.job_id)] == ["three", "two", "one"]


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    """What it raised is its error; the runner goes on."""

    def broken(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        raise ValueError("no such thing")

    with GitJobStore(tmp_path / "home") as store:
        session_id = store.create_session("demo")
        with JobRunner(store, sync_fn=shout) as runner:
            job = runner.submit(SpawnRequest(prompt="x", parent_session_id=session_id), sync_fn=broken)
            job = runner.await_job(job.job_id)
            assert (job.status, job.error) == (JobStatus.ERRORED, "ValueError: no such thing")


def test_everything_is_still_there_after_a_restart(tmp_path: Path) -> None:
    """Another process reads it without a runner, by any unique beginning of the id."""
    with GitJobStore(tmp_path / "home") as store:
        session_id = store.create_session("demo")
        with JobRunner(store, sync_fn=shout) as runner:
            job = runner.submit(SpawnRequest(prompt="remember me", parent_session_id=session_id))

    with GitJobStore(tmp_path / "home") as store, JobClient(store) as client:
        found = client.get(job.job_id[:8])
        assert found.result_text == "REMEMBER ME"
        assert [message.content for message in store.session(session_id).branch(found.head_id)] == [
            "remember me",
            "REMEMBER ME",
        ]


def test_listening_while_jobs_run(tmp_path: Path) -> None:
    """A host shows progress live; each event follows its commit."""

    def count(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        for number in range(3):
            request.progress(number)
        return TurnResult(final_text="counted")

    with GitJobStore(tmp_path / "home") as store:
        session_id = store.create_session("demo")
        with JobRunner(store, sync_fn=count) as runner, runner.subscribe() as events:
            runner.submit(SpawnRequest(prompt="count", parent_session_id=session_id))
            heard = []
            while not heard or heard[-1].status != "completed":
                event = events.get(timeout=30)
                assert event is not None
                heard.append(event)
        assert [event.value for event in heard if event.kind == "task_progress"] == [0, 1, 2]
        assert [event.status for event in heard if event.kind == "job_status"] == ["queued", "running", "completed"]
