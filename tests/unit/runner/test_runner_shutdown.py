"""The end of a runner (design, *Shutdown*, *Fork*; spec 003, D12)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, TurnRequest, TurnResult, errors
from tests.support import FakeClock, eventually
from tests.support.turns import Ask, MakeRunner, Turns


def shutting_down(runner: JobRunner, timeout: float = 5.0) -> threading.Thread:
    thread = threading.Thread(target=runner.shutdown, args=(timeout,))
    thread.start()
    eventually(lambda: runner._roster.closing)
    return thread


def test_queued_jobs_are_cancelled_and_running_ones_may_finish_as_themselves(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask
) -> None:
    """First two seconds: nothing is asked of what runs; what has not started never starts."""
    runner = make_runner(1)
    first, second = runner.submit(ask("first")), runner.submit(ask("second"))
    request = turns["first"].until_started()
    ending = shutting_down(runner)
    eventually(lambda: store.get(second.job_id).terminal)
    assert not request.cancel_event.is_set()
    turns["first"].finish.set()
    ending.join(10)
    assert not ending.is_alive()
    assert store.get(first.job_id).status is JobStatus.COMPLETED
    cancelled = store.get(second.job_id)
    assert (cancelled.status, cancelled.cancel_reason) == (JobStatus.CANCELLED, "shutdown")
    assert turns.order == ["first"]


def test_after_two_seconds_running_jobs_are_asked_to_stop(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """What ends in time then ends as it ends: here it returns, so it is completed."""
    runner = make_runner(1)
    job = runner.submit(ask())
    turns["work"].until_started()
    ending = shutting_down(runner)
    clock.until_waiting(2)
    clock.advance(1.9)
    assert not turns["work"].saw_cancel.is_set()
    clock.advance(0.2)
    ending.join(10)
    assert turns["work"].saw_cancel.is_set()
    assert store.get(job.job_id).status is JobStatus.COMPLETED


def test_a_job_that_answers_the_shutdown_with_cancelled_is_cancelled(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """`raise_if_cancelled` in its turn."""

    def outcome(request: TurnRequest) -> TurnResult:
        request.raise_if_cancelled()
        return TurnResult()

    runner = make_runner(1)
    turns["work"].outcome = outcome
    job = runner.submit(ask())
    turns["work"].until_started()
    ending = shutting_down(runner)
    clock.until_waiting(2)
    clock.advance(2.1)
    ending.join(10)
    ended = store.get(job.job_id)
    assert (ended.status, ended.cancel_reason) == (JobStatus.CANCELLED, "shutdown")


def test_what_does_not_stop_is_errored(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """D12: "worker pool shutdown", its partial text kept, its late result dropped."""
    runner = make_runner(1)
    turns["work"].obeys = False
    job = runner.submit(ask())
    turns["work"].until_started().partial("so far")
    ending = shutting_down(runner)
    clock.until_waiting(2)
    clock.advance(2.1)
    assert turns["work"].saw_cancel.wait(10)
    clock.until_waiting(2)
    clock.advance(1.5)
    ending.join(10)
    ended = store.get(job.job_id)
    assert (ended.status, ended.error, ended.result_text) == (JobStatus.ERRORED, "worker pool shutdown", "so far")
    turns["work"].finish.set()
    assert turns["work"].left.wait(10)
    assert store.get(job.job_id) == ended


def test_a_closed_runner_takes_no_jobs_and_still_reads(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """`Closed` for a submit; `get`, `list` and waits answer from the store."""
    turns.finish_all()
    job = runner.await_job(runner.submit(ask()).job_id)
    runner.shutdown()
    runner.shutdown()
    with pytest.raises(errors.Closed):
        runner.submit(ask("more"))
    assert runner.get(job.job_id) == job
    assert [row.job_id for row in runner.list()] == [job.job_id]
    assert runner.await_job(job.job_id) == job


def test_a_clean_with_waits_until_idle(store: MockTaskStore, turns: Turns, ask: Ask) -> None:
    """As an executor does."""
    with JobRunner(store, 1, turns) as runner:
        jobs = [runner.submit(ask(f"j{n}")) for n in range(3)]
        threading.Timer(0.02, turns.finish_all).start()
    assert {store.get(job.job_id).status for job in jobs} == {JobStatus.COMPLETED}


def test_a_with_that_is_left_by_an_exception_does_not_wait(store: MockTaskStore, turns: Turns, ask: Ask) -> None:
    """The bounded form: what is queued is cancelled."""

    def fail() -> None:
        with JobRunner(store, 1, turns) as runner:
            ids.extend(runner.submit(ask(f"j{n}")).job_id for n in range(3))
            turns["j0"].until_started()
            threading.Timer(0.02, turns["j0"].finish.set).start()
            raise KeyError("mine")

    ids: list[str] = []
    with pytest.raises(KeyError):
        fail()
    assert [store.get(job_id).status.value for job_id in ids] == ["completed", "cancelled", "cancelled"]


def test_a_shutdown_leaves_no_lease_and_no_marker(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask
) -> None:
    """Nothing for the next start-up to look at."""
    turns.finish_all()
    runner.await_job(runner.submit(ask()).job_id)
    runner.shutdown()
    assert not store.leases.is_held(runner.runner_id)
    assert store.leases.dead() == []


def test_ends_that_cannot_be_written_in_time_are_left_to_recovery(
    store: MockTaskStore, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease file stays, so the next runner finds the session and ends the job."""
    from concurrent.futures import Future

    clock = FakeClock()
    runner = JobRunner(store, 1, turns, clock=clock)
    job = runner.submit(ask())
    turns["work"].until_started()
    eventually(lambda: runner.get(job.job_id).status is JobStatus.RUNNING)
    monkeypatch.setattr(store, "apply_later", lambda *args, **kwargs: Future())
    turns["work"].finish.set()
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            runner.await_job(job.job_id)
        except errors.Closed as error:
            waiting.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: runner._roster.jobs[job.job_id].waiters)
    ending = shutting_down(runner)
    clock.until_waiting(2)
    clock.advance(5)
    ending.join(10)
    waiter.join(10)
    assert waiting
    assert "left to recovery" in caplog.text
    monkeypatch.undo()
    with JobRunner(store, 1, turns) as after:
        ended = after.get(job.job_id)
        assert (ended.status, ended.error) == (JobStatus.ERRORED, "worker died before completion")
    assert store.leases.dead() == []


def test_shutdown_from_inside_a_job_ends(store: MockTaskStore, ask: Ask) -> None:
    """The job that calls it is given up like any other that does not stop."""
    clock = FakeClock()
    runner = JobRunner(store, 1, clock=clock)

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        runner.shutdown()
        return TurnResult()

    job = runner.submit(ask(), sync_fn=turn)
    for part in (2.1, 1.5):
        clock.until_waiting(2)
        clock.advance(part)
    eventually(runner._closed.is_set)
    assert store.get(job.job_id).error == "worker pool shutdown"


PROGRAM = """
import sys, threading, time
from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult
def work(request, cancel_event):
    begun.set()
    {turn}
    return TurnResult(final_text="done")
begun = threading.Event()
store = GitJobStore(sys.argv[1])
sid = store.create_session("s1")
runner = JobRunner(store, 1, work)
job = runner.submit(SpawnRequest(prompt="x", parent_session_id=sid))
print(job.job_id, flush=True)
assert begun.wait(10)
"""


@pytest.mark.parametrize(
    ("turn", "status", "bound_s"),
    [
        ("time.sleep(0.3)", "completed", 4.5),
        ("cancel_event.wait(60)", "completed", 6),
        ("time.sleep(60)", "errored", 9),
    ],
)
def test_a_program_that_just_ends_ends_its_jobs(tmp_path: Path, turn: str, status: str, bound_s: float) -> None:
    """At interpreter exit: time to finish, then asked, then errored; the process never hangs."""
    from openjobs import GitJobStore

    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(turn=turn), str(tmp_path / "home")],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < bound_s + 20  # a polled bound, generous for a loaded machine
    with GitJobStore(tmp_path / "home") as store:
        job = store.get(done.stdout.strip())
        assert job.status.value == status
        assert (job.error == "worker pool shutdown") == (status == "errored")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_a_clear_error(runner: JobRunner, store: MockTaskStore, ask: Ask) -> None:
    """`ForkedProcess` from every call of the parent's runner and client; leaving its `with` does nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seen = []
        calls: list[Any] = [
            lambda: runner.submit(ask()),
            lambda: runner.get("0" * 36),
            runner.list,
            runner.stats,
            lambda: runner.await_tasks([]),
            lambda: runner.cancel("0" * 36),
            runner.recover,
            runner.shutdown,
            runner.subscribe,
            lambda: runner._client.list(),
        ]
        for call in calls:
            try:
                call()
                seen.append("no error")
            except errors.ForkedProcess:
                seen.append("ok")
            except BaseException as error:
                seen.append(repr(error))
        runner.__exit__(None, None, None)
        os.write(write, " ".join(seen).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == " ".join(["ok"] * 10)
    os.waitpid(child, 0)
