"""Ctrl-C in the main thread, at every place of a submit; what strangers' code raises; children that a turn forks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.runner.ending import EndStep
from openjobs.runner.strangers import FORKED_EXIT_CODE
from openjobs.runner.submission import Submission
from openjobs.store import JobStore
from tests.support import eventually
from tests.support.interrupts import Interrupts
from tests.support.jobs import clean

#: they look at the request and share nothing with another thread
_PURE = ("/admission.py", "/ids.py", "/jobs.py", "/enum.py", "/text.py", "/strict_json.py", "/uuid.py")
SID = "s1"
#: why nothing can be done about one
_DESCRIPTOR = "between the opening of a file and the writing down of its number an interrupt loses a descriptor"


@pytest.fixture(params=["memory", "git"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    """On the machine's clock: what is interrupted ends within a real time."""
    store: JobStore = (
        MockTaskStore() if request.param == "memory" else GitJobStore(tmp_path / "home", durability="relaxed")
    )
    store.create_session(SID)
    yield store
    try:
        clean(store)
    finally:
        store.close()


@pytest.fixture
def runner(store: JobStore) -> Iterator[JobRunner]:
    runner = JobRunner(store, 2, done)
    yield runner
    runner.shutdown()


def done(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    return TurnResult(final_text="done")


def ask(prompt: str = "work", **fields: object) -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id=SID, **fields)  # type: ignore[arg-type]


def still_works(runner: JobRunner) -> None:
    assert runner.await_job(runner.submit(ask("after")).job_id, 10).status is JobStatus.COMPLETED
    assert runner.wait_idle(10)
    assert (runner._pool._starting, runner._pool.stats().in_use) == (0, 0)


def ended_soon(runner: JobRunner) -> None:
    begun = time.monotonic()
    runner.shutdown()
    assert time.monotonic() - begun < 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(runner._settler._name[:17])]


# --- a submit that is interrupted -----------------------------------------------------------------------------


@pytest.mark.leaks(_DESCRIPTOR)
@pytest.mark.parametrize("later", [False, True])
def test_a_submit_that_is_interrupted_anywhere_leaves_nothing_that_does_not_end(
    store: JobStore, runner: JobRunner, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """R6: for each place in turn, what was handed over ends, nothing else is kept for it, and the next job runs."""
    still_works(runner)
    interrupts = Interrupts(but=_PURE)
    while True:
        with interrupts:
            if later:
                runner.submit_later(ask())
            else:
                runner.submit(ask())
        if interrupts.place is None:
            break
        assert runner.wait_idle(10), interrupts.place
    assert len(interrupts) > 100
    still_works(runner)
    ended = store.list(SID, limit=None)
    assert {job.status for job in ended} <= {JobStatus.COMPLETED, JobStatus.CANCELLED}
    assert {job.cancel_reason for job in ended} <= {None, "submit was interrupted"}
    assert "not recorded" not in caplog.text  # the lock of the session's facts was given back every time
    ended_soon(runner)


def test_a_first_submit_that_is_interrupted_anywhere_leaves_no_half_started_thread() -> None:
    """The first job of a store and a runner begins their threads; the next one finds them, or begins others.

    Without the places inside `threading` itself, where a thread may be left that nobody knows of.
    """
    interrupts = Interrupts(but=(*_PURE, "/threading.py"))
    while True:
        with MockTaskStore() as store:
            store.create_session(SID)
            runner = JobRunner(store, 2, done)
            with interrupts:
                runner.submit(ask())
            assert runner.wait_idle(10), interrupts.place
            still_works(runner)
            ended_soon(runner)
            clean(store)
        if interrupts.place is None:
            break
    assert len(interrupts) > 100


@pytest.mark.leaks(_DESCRIPTOR)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_submit_of_a_job_that_is_there_already_leaves_that_one_alone(
    store: JobStore, runner: JobRunner
) -> None:
    """The id is another submit's: whatever becomes of the second one, the first job runs to its own end."""
    begun, go = threading.Event(), threading.Event()

    def wait(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        begun.set()
        assert go.wait(60)
        return TurnResult(final_text="as it was asked", error="cancelled" if cancel_event.is_set() else None)

    request = ask("first", job_id=store.new_id())
    first = runner.submit(request, wait)
    assert begun.wait(10)
    interrupts = Interrupts(but=_PURE)
    while True:
        with interrupts:
            runner.submit(request, wait)
        if interrupts.place is None:
            break
    go.set()
    assert runner.await_job(first.job_id, 10).result_text == "as it was asked"
    still_works(runner)
    assert store.get(first.job_id).status is JobStatus.COMPLETED


@pytest.mark.leaks(_DESCRIPTOR)
def test_an_interrupted_submit_that_ends_its_job_itself_leaves_it_ended(
    store: JobStore, runner: JobRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cancelled while its commit was under way: deciding its end and handing that in is interrupted anywhere."""
    still_works(runner)
    submission_wait = Submission.wait

    def cancelled_meanwhile(submission: Submission) -> None:
        submission_wait(submission)
        runner._canceller.cancel(submission.live, "meanwhile")

    monkeypatch.setattr(Submission, "wait", cancelled_meanwhile)
    interrupts = Interrupts(but=(*_PURE, "/ledger.py", "/log.py", "/lock.py", "/disk.py", "/files.py"))
    while True:
        with interrupts:
            runner.submit(ask())
        assert runner.wait_idle(10), interrupts.place
        if interrupts.place is None:
            break
    monkeypatch.undo()
    before, *ended = reversed(store.list(SID, limit=None))
    assert before.status is JobStatus.COMPLETED
    assert {job.status for job in ended} == {JobStatus.CANCELLED}
    still_works(runner)
    ended_soon(runner)


@pytest.mark.leaks(_DESCRIPTOR)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("running", [False, True])
def test_a_cancel_that_is_interrupted_anywhere_can_be_asked_for_again(
    store: JobStore, runner: JobRunner, running: bool
) -> None:
    """R6: the job, and the one under it, end as cancelled after the second call at the latest, and nothing is kept."""

    def wait(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        assert cancel_event.wait(60)
        raise errors.CancelledError

    blockers = [] if running else [runner.submit(ask("blocker"), wait) for _ in range(2)]
    interrupts = Interrupts(but=_PURE)
    while True:
        job = runner.submit(ask(), wait)
        child = runner.submit(ask(parent_job_id=job.job_id), wait)
        if running:
            eventually(lambda: runner.stats().running == 2)
        with interrupts:
            runner.cancel(job.job_id, "first")
        runner.cancel(job.job_id, "again")
        ended = runner.await_tasks([job.job_id, child.job_id], timeout=10)
        assert [each.status for each in ended] == [JobStatus.CANCELLED] * 2, interrupts.place
        if interrupts.place is None:
            break
    assert len(interrupts) > 30
    for blocker in blockers:
        runner.cancel(blocker.job_id)
    assert runner.wait_idle(10)
    still_works(runner)
    ended_soon(runner)


# --- what strangers' code raises ---------------------------------------------------------------------------------


def in_a_thread(call: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert failed == []


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, KeyboardInterrupt])
def test_a_listener_that_raises_anything_is_dropped_and_costs_no_job(
    runner: JobRunner, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """On a thread of its caller's, and on the runner's own."""

    def fail() -> None:
        raise error

    subscription = runner.subscribe(on_event=fail)
    other = runner.subscribe()
    in_a_thread(lambda: still_works(runner))
    assert subscription.closed
    assert "a subscriber of the hub failed" in caplog.text
    assert [event.status for event in other.drain()][-1] == "completed"


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_listener_that_exits_in_the_main_thread_costs_no_job_either(
    runner: JobRunner, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    subscription = runner.subscribe(on_event=fail)
    still_works(runner)
    assert subscription.closed


def test_a_ctrl_c_inside_a_listener_comes_out_of_the_submit_and_the_job_is_cancelled(
    store: JobStore, runner: JobRunner
) -> None:
    """A person's: it may not get lost, and is told once nothing is half done."""
    subscription = runner.subscribe(on_event=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        runner.submit(ask())
    assert subscription.closed
    assert runner.wait_idle(10)
    (job,) = store.list(SID)
    assert (job.status, job.cancel_reason) == (JobStatus.CANCELLED, "submit was interrupted")
    still_works(runner)


@pytest.mark.parametrize(("error", "comes_out"), [(SystemExit, False), (KeyboardInterrupt, True)])
def test_a_listener_that_raises_at_the_end_of_a_runner_does_not_keep_it_from_ending(
    store: JobStore, error: type[BaseException], comes_out: bool
) -> None:
    """The lease is given back and gone in any case; only a Ctrl-C comes out, after that."""
    runner = JobRunner(store, 1, done)
    still_works(runner)

    def fail() -> None:
        raise error

    runner.subscribe(on_event=fail)
    runner.notices.subscribe(lambda notice: None, on_end=fail)
    if comes_out:
        with pytest.raises(KeyboardInterrupt):
            runner.shutdown()
    else:
        runner.shutdown()
    assert runner._closed.is_set()
    assert not store.leases.is_held(runner.runner_id)
    runner.shutdown()


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_step_that_raises_anything_keeps_no_job_from_its_place_or_its_end(
    runner: JobRunner, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*about: object) -> None:
        raise error

    runner.after_submit.append(fail)
    for step in EndStep:
        runner.ending.also(f"a stranger's at {step.value}", step, fail)
    still_works(runner)
    eventually(lambda: caplog.text.count("of its end failed") == len(EndStep))


def test_a_callback_that_exits_is_called_again_and_keeps_no_other_from_being_called(runner: JobRunner) -> None:
    """The thread that it shares with all others goes on."""
    heard: list[str] = []

    def fail(notice: object) -> None:
        raise SystemExit

    with runner.notices.subscribe(fail), runner.notices.subscribe(lambda notice: heard.append(notice.id)):
        first = runner.submit(ask("one", notify=True))
        eventually(lambda: heard == [first.job_id])
        second = runner.submit(ask("two", notify=True))
        eventually(lambda: heard == [first.job_id, second.job_id])


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_waiter_that_cannot_be_woken_keeps_no_other_asleep(runner: JobRunner, error: type[BaseException]) -> None:
    go = threading.Event()

    def wait(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        assert go.wait(60)
        return TurnResult(final_text="done")

    def fail() -> None:
        raise error

    woken = threading.Event()
    job = runner.submit(ask(), wait)
    bad = runner.open_wait([job.job_id], "all", fail)
    good = runner.open_wait([job.job_id], "all", woken.set)
    go.set()
    assert woken.wait(10)
    for each in (bad, good):
        each.close()
        assert each.answers()[0].status is JobStatus.COMPLETED


def test_an_error_that_exits_when_it_is_shown_is_the_jobs_and_nobody_elses(runner: JobRunner) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise SystemExit

    def fail(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        raise Odd

    job = runner.await_job(runner.submit(ask(), fail).job_id, 10)
    assert (job.status, job.error) == (JobStatus.ERRORED, "Odd: (its message cannot be shown)")
    still_works(runner)


# --- children that come back ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "code"), [("returns", FORKED_EXIT_CODE), ("raises", FORKED_EXIT_CODE), ("exits", 3), ("leaves", 0)]
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_comes_back_out_of_a_turn_ends_at_once(
    store: JobStore, runner: JobRunner, way: str, code: int
) -> None:
    """It has one thread and no runner: it writes nothing, and nobody waits for it for ever."""

    def fork(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        pid = os.fork()
        if pid == 0:
            if way == "raises":
                raise ValueError("in the child")
            if way in ("exits", "leaves"):
                sys.exit(3 if way == "exits" else None)
            return TurnResult(final_text="from the child")
        try:
            ended = eventually(lambda: (found := os.waitpid(pid, os.WNOHANG))[0] and found)
        except AssertionError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        assert isinstance(ended, tuple)
        return TurnResult(final_text=str(os.waitstatus_to_exitcode(ended[1])))

    job = runner.await_job(runner.submit(ask(), fork).job_id, 30)
    assert (job.status, job.result_text) == (JobStatus.COMPLETED, str(code))
    assert [each.job_id for each in store.list(SID)] == [job.job_id]
    still_works(runner)
