"""Moments in which two things happen to one job at once, and calls that come too late: each job ends once (R4, R6)."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import attrs
import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, TurnRequest, TurnResult, errors
from openjobs.clock import SystemClock
from openjobs.jobs import Cancelled, Errored, Job, Queued
from openjobs.runner import JobClient
from tests.support import FakeClock, eventually
from tests.support.jobs import job_for
from tests.support.turns import Ask, MakeRunner, Turns

PATIENCE_S = 10.0


def ran(runner: JobRunner, turns: Turns, ask: Ask) -> Job:
    turns["work"].finish.set()
    return runner.await_job(runner.submit(ask()).job_id)


# --- submitting --------------------------------------------------------------------------------------------


def test_what_cannot_be_called_is_refused_and_nothing_is_written(
    runner: JobRunner, store: MockTaskStore, sid: str, ask: Ask
) -> None:
    """Before the job has an id."""
    with pytest.raises(errors.InvalidInput, match="a callable, not str"):
        runner.submit(ask(), sync_fn="turn")  # type: ignore[arg-type]
    assert store.list(sid) == []


@pytest.mark.parametrize("error", [OSError(28, "no space left on device"), errors.InvalidInput("no such name")])
def test_a_session_that_cannot_be_marked_gets_no_job(
    error: Exception,
    runner: JobRunner,
    store: MockTaskStore,
    sid: str,
    turns: Turns,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would find it after a crash: it is refused, with the reason, and the same again succeeds."""

    def fail(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(runner._markers, "use", fail)
        with pytest.raises(errors.StoreWriteFailed if isinstance(error, OSError) else errors.InvalidInput):
            runner.submit(ask())
    assert store.list(sid) == []
    assert runner.wait_idle(0)
    assert ran(runner, turns, ask).status is JobStatus.COMPLETED


def test_an_interrupt_while_the_job_is_handed_to_the_store_leaves_nothing_behind(
    runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the store has it: no job, and the runner waits for none."""

    def interrupted(*args: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "create_later", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.submit(ask())
    assert runner.wait_idle(10)
    assert store.list(sid) == []
    assert ran(runner, turns, ask).status is JobStatus.COMPLETED


def test_a_job_that_may_be_there_and_cannot_be_looked_for_is_ended(
    runner: JobRunner,
    store: MockTaskStore,
    sid: str,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its submit failed half way, and so does the look for what it left: it counts as there."""
    create_later, row = store.create_later, store.row

    def half(*args: Any, when_done: Any, **more: Any) -> Future[Job]:
        create_later(*args, **more).result()
        failed: Future[Job] = Future()
        failed.add_done_callback(when_done)
        failed.set_exception(errors.OutcomeUnknown("the last sync failed"))
        return failed

    def unreadable(job_id: str) -> Job:
        monkeypatch.setattr(store, "row", row)
        raise errors.Damaged("a page cannot be read")

    monkeypatch.setattr(store, "create_later", half)
    monkeypatch.setattr(store, "row", unreadable)
    with pytest.raises(errors.OutcomeUnknown):
        runner.submit(ask())
    assert runner.wait_idle()
    (job,) = store.list(sid)
    assert (job.status, job.error) == (JobStatus.ERRORED, "submit failed: the last sync failed")
    assert "cannot be read" in caplog.text


# --- cancelling --------------------------------------------------------------------------------------------


def test_the_end_of_a_jobs_patience_that_comes_after_its_end_changes_nothing(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask
) -> None:
    """The timer was on its way when the job ended, and so was the one of its timeout."""
    job = runner.submit(ask(timeout_s=5.0))
    turns["work"].until_started()
    live = runner._roster.jobs[job.job_id]
    turns["work"].finish.set()
    ended = runner.await_job(job.job_id)
    timers = len(live.timers)
    runner._canceller.force(live)
    runner._canceller.end_in_time(live)
    assert store.get(job.job_id) == ended
    assert len(live.timers) == timers
    assert runner.stats().stuck == ()


def test_a_shutdown_wakes_who_waits_for_a_stranger_and_keeps_reasons_that_were_given(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """A turn that waits for a job that is not under it sees the shutdown at once; one that was asked to stop before
    ends for the reason that it was given."""
    runner = make_runner(3)
    turns["stubborn"].obeys = False
    stubborn, stranger = runner.submit(ask("stubborn")), runner.submit(ask("stranger"))
    for prompt in ("stubborn", "stranger"):
        turns[prompt].until_started()
    woken: list[BaseException] = []
    waiting = threading.Event()

    def waits(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        waiting.set()
        try:
            runner.await_job(stranger.job_id)
        except errors.CancelledError as error:
            woken.append(error)
            raise
        return TurnResult()

    turns["stranger"].obeys = False
    waiter = runner.submit(ask("waits"), sync_fn=waits)
    assert waiting.wait(PATIENCE_S)
    eventually(lambda: runner.stats().lent == 1)
    runner.cancel(stubborn.job_id, "enough")
    ending = threading.Thread(target=runner.shutdown, args=(5.0,))
    ending.start()
    eventually(lambda: runner._roster.closing)
    clock.until_waiting(2)
    clock.advance(2.1)
    eventually(lambda: woken)
    turns.finish_all()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    assert store.get(waiter.job_id).cancel_reason == "shutdown"
    assert (store.get(stubborn.job_id).status, store.get(stubborn.job_id).cancel_reason) == (
        JobStatus.CANCELLED,
        "enough",
    )


def test_a_look_for_requests_that_was_under_way_when_the_last_job_ended_finds_nothing_to_do(
    runner: JobRunner, turns: Turns, ask: Ask, sid: str
) -> None:
    """The watch is dropped once, whoever comes second."""
    ran(runner, turns, ask)
    requests = runner._submissions._requests
    requests._look(sid, True)
    requests._look(sid, True)
    assert sid not in requests._watches
    assert ran(runner, turns, ask).status is JobStatus.COMPLETED


def test_a_client_ends_a_job_that_no_runner_ever_had(store: MockTaskStore, sid: str) -> None:
    """Written by hand: nobody else would."""
    job = store.create(job_for(store, sid), Queued(runner_id="r"))
    row = attrs.evolve(job, runner_id=None)
    with JobClient(store) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "outcome", lambda job_id: row)
        patch.setattr(client.recovery, "mend", lambda found: found)
        ended = client.cancel(job.job_id, "by hand")
    assert (ended.status, ended.cancel_reason) == (JobStatus.CANCELLED, "by hand")


def test_a_client_that_asks_as_the_job_ends_gets_the_end(store: MockTaskStore, sid: str) -> None:
    """Its look came before the end and its request after it: that is no error."""
    job = store.create(job_for(store, sid), Queued(runner_id="r"))
    with JobClient(store) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.recovery, "mend", lambda found: found)
        apply = store.apply

        def late(job_id: str, event: Any) -> Job:
            patch.undo()
            apply(job_id, Errored(event_id="e", error="it was faster"))
            return apply(job_id, event)

        patch.setattr(store, "apply", late)
        assert client.cancel(job.job_id).error == "it was faster"


def test_a_child_that_cannot_be_asked_keeps_no_parent_from_being_cancelled(
    store: MockTaskStore, sid: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's request is written; which job below it was not asked is said."""
    lease = store.leases.acquire("r")
    parent = store.create(job_for(store, sid, "parent"), Queued(runner_id="r"))
    child = store.create(job_for(store, sid, "child", parent_job_id=parent.job_id), Queued(runner_id="r"))

    def fails(*args: Any, **more: Any) -> Future[Job]:
        failed: Future[Job] = Future()
        failed.set_exception(errors.StoreWriteFailed("the disk is full"))
        return failed

    with JobClient(store) as client:
        with monkeypatch.context() as patch:
            apply, apply_later = store.apply, store.apply_later

            def asked(*args: Any) -> Job:
                patch.setattr(store, "apply_later", apply_later)
                done = apply(*args)
                patch.setattr(store, "apply_later", fails)
                return done

            patch.setattr(store, "apply", asked)
            client.cancel(parent.job_id, "never mind")
        assert "was not asked to stop: the disk is full" in caplog.text
        assert store.get(parent.job_id).cancel_reason == "never mind"
        assert store.get(child.job_id).cancel_requested_at is None
    lease.release()
    for job in (parent, child):
        store.apply(job.job_id, Cancelled(event_id=store.new_id(), reason="the test is over"))


def test_a_job_that_is_asked_to_stop_as_it_begins_to_wait_does_not_wait(
    make_runner: MakeRunner, turns: Turns, ask: Ask
) -> None:
    """The request came between the turn's last look and its wait for a job that is not under it."""
    runner = make_runner(2)
    turns["stranger"].obeys = False
    stranger = runner.submit(ask("stranger"))
    begun, cancelled = threading.Event(), threading.Event()

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        begun.set()
        assert cancelled.wait(PATIENCE_S)
        assert cancel_event.is_set()
        runner.await_job(stranger.job_id)
        return TurnResult()

    job = runner.submit(ask("waits"), sync_fn=turn)
    assert begun.wait(PATIENCE_S)
    runner.cancel(job.job_id, "never mind")
    cancelled.set()
    ended = runner.await_job(job.job_id)
    assert (ended.status, ended.cancel_reason) == (JobStatus.CANCELLED, "never mind")
    assert not runner.get(stranger.job_id).terminal


def test_a_grandchild_is_under_its_grandparent_and_not_the_other_way_round(
    make_runner: MakeRunner, turns: Turns, ask: Ask
) -> None:
    """What is under a job stops with it, so that a job that waits for its grandchild need not be woken to stop."""
    runner = make_runner(3)
    parent = runner.submit(ask("parent"))
    child = runner.submit(ask("child", parent_job_id=parent.job_id))
    grandchild = runner.submit(ask("grandchild", parent_job_id=child.job_id))
    for prompt in ("parent", "child", "grandchild"):
        turns[prompt].until_started()
    one, two, three = (runner._roster.jobs[job.job_id] for job in (parent, child, grandchild))
    assert three.is_under(one)
    assert three.is_under(two)
    assert not one.is_under(three)
    assert not one.is_under(one)


def test_a_line_with_many_waiters_stays_as_long_as_its_jobs(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """A job that a thousand wait for stands in it once: memory is bounded by the jobs (R11)."""
    runner = make_runner(1)
    first = runner.submit(ask("first"))
    turns["first"].until_started()
    queued = runner.submit(ask("queued"))
    live = runner._roster.jobs[queued.job_id]
    with runner._roster.lock:
        for _ in range(1000):
            runner._roster.line.want(live)
        assert len(runner._roster.line._wanted) <= 67
    turns.finish_all()
    assert [job.status for job in runner.await_tasks([first.job_id, queued.job_id])] == [JobStatus.COMPLETED] * 2
    with runner._roster.lock:
        assert runner._roster.line.take(False) is None


def test_a_client_that_is_closed_in_a_forked_child_closes_nothing_of_its_parents(
    store: MockTaskStore, sid: str
) -> None:
    """Its thread is in the parent."""
    with JobClient(store) as client:
        client._pid += 1  # as in a child
        client.close()
        assert not client._timers._closed
        client._pid -= 1


# --- the end of a turn -------------------------------------------------------------------------------------


def test_a_turn_that_cannot_even_begin_ends_its_job_as_errored(
    runner: JobRunner,
    store: MockTaskStore,
    turns: Turns,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault of ours around the turn: the job says it, and the worker takes the next one."""

    def broken(live: Any) -> Any:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(runner._worker, "_request", broken)
        ended = runner.await_job(runner.submit(ask("broken")).job_id)
    assert (ended.status, ended.error) == (JobStatus.ERRORED, "RuntimeError: a fault of ours")
    assert "could not be run" in caplog.text
    assert ran(runner, turns, ask).status is JobStatus.COMPLETED


def test_a_turn_is_told_that_its_job_runs_whether_or_not_that_is_committed_yet(
    runner: JobRunner, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit may be slower than the turn's beginning, or faster: the turn sees the same."""
    seen: list[Job] = []
    request = runner._worker._request

    def committed_before(live: Any) -> TurnRequest:
        eventually(lambda: live.job.status is JobStatus.RUNNING)
        return request(live)

    def look(given: TurnRequest) -> TurnResult:
        seen.append(given.job)
        return TurnResult()

    for prompt in ("as it comes", "late"):
        turns[prompt].outcome = look
        turns[prompt].finish.set()
    runner.await_job(runner.submit(ask("as it comes")).job_id)
    monkeypatch.setattr(runner._worker, "_request", committed_before)
    runner.await_job(runner.submit(ask("late")).job_id)
    assert [job.status for job in seen] == [JobStatus.RUNNING] * 2
    assert all(job.started_at is not None for job in seen)


def test_progress_after_the_end_is_nobodys(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """A thread that the turn left behind goes on reporting: listeners hear of nothing behind the end."""
    turns["work"].finish.set()
    with runner.hub.subscribe() as events:
        job = runner.submit(ask())
        request = turns["work"].until_started()
        runner.await_job(job.job_id)
        assert runner.wait_idle()
        events.drain()
        request.progress({"late": True})
        request.partial("late")
        assert events.drain() == []
    assert runner.get(job.job_id).result_text == "did work"


def test_a_store_that_closes_under_its_runner_leaves_the_end_to_recovery(
    sid: str, store: MockTaskStore, turns: Turns, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """The row says what it said before, the reason is logged, and the runner's own end takes its time and no more."""
    runner = JobRunner(store, 1, turns, clock=SystemClock())
    job = runner.submit(ask())
    turns["work"].until_started()
    eventually(lambda: store.get(job.job_id).status is JobStatus.RUNNING)

    def closed(*args: Any, **more: Any) -> Any:
        raise errors.Closed("the store is closed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "apply_later", closed)
        turns["work"].finish.set()
        eventually(lambda: "before the store closed; recovery will" in caplog.text)
        runner.shutdown(0.2)
    assert store.get(job.job_id).status is JobStatus.RUNNING
    with JobClient(store) as client:
        assert [ended.job_id for ended in client.recover()] == [job.job_id]
    assert store.get(job.job_id).status is JobStatus.ERRORED


def test_a_fault_of_ours_in_settling_one_step_keeps_no_job_from_its_end(
    runner: JobRunner, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged as one, and what comes next is settled."""
    committed = runner._settler._committed

    def broken(live: Any, job: Job, **more: Any) -> None:
        if not job.terminal:
            raise RuntimeError("a fault of ours")
        committed(live, job, **more)

    monkeypatch.setattr(runner._settler, "_committed", broken)
    assert ran(runner, turns, ask).status is JobStatus.COMPLETED
    assert "settling an event failed: a fault of ours" in caplog.text


def test_a_submit_that_wrote_nothing_and_could_not_look_leaves_nothing_to_wait_for(
    runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is refused, since there is no such job: the runner forgets it, and says what was the matter."""
    row = store.row

    def nothing(*args: Any, when_done: Any, **more: Any) -> Future[Job]:
        failed: Future[Job] = Future()
        failed.add_done_callback(when_done)
        failed.set_exception(errors.OutcomeUnknown("the last sync failed"))
        return failed

    def unreadable(job_id: str) -> Job:
        monkeypatch.setattr(store, "row", row)
        raise errors.Damaged("a page cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(store, "create_later", nothing)
        monkeypatch.setattr(store, "row", unreadable)
        with pytest.raises(errors.OutcomeUnknown):
            runner.submit(ask())
    assert runner.wait_idle()
    assert store.list(sid) == []
    assert ran(runner, turns, ask).status is JobStatus.COMPLETED


# --- waiting for others ------------------------------------------------------------------------------------


def test_a_turn_that_waits_for_another_runners_job_only_lends_nothing_and_can_be_stopped(
    make_runner: MakeRunner, turns: Turns, ask: Ask
) -> None:
    """Nothing here could use its slot for that; it is woken when it is asked to stop."""
    one, two = make_runner(1), make_runner(1)
    stranger = two.submit(ask("stranger"))
    turns["stranger"].until_started()
    waiting = threading.Event()

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        waiting.set()
        one.await_job(stranger.job_id)
        return TurnResult()

    job = one.submit(ask("waits"), sync_fn=turn)
    assert waiting.wait(PATIENCE_S)
    live = one._roster.jobs[job.job_id]
    eventually(lambda: live.on_cancel)
    assert one.stats().lent == 0
    one.cancel(job.job_id, "never mind")
    assert one.await_job(job.job_id).status is JobStatus.CANCELLED
    assert not two.get(stranger.job_id).terminal


def test_a_look_that_is_faster_than_who_asked_for_it_is_enough(store: MockTaskStore, sid: str) -> None:
    """The job ends, and that is seen, before the wait has its watch in hand: it is over, and nothing is left of it."""
    lease = store.leases.acquire("r")
    job = store.create(job_for(store, sid), Queued(runner_id="r"))
    with JobClient(store) as client, pytest.MonkeyPatch.context() as patch:
        watch = client.heads.watch

        def fast(session_id: str, look: Any) -> Any:
            made = watch(session_id, look)
            store.apply(job.job_id, Errored(event_id="e", error="it was faster"))
            look(True)
            return made

        patch.setattr(client.heads, "watch", fast)
        assert client.await_job(job.job_id).error == "it was faster"
        assert not client.heads._watches
    lease.release()


def test_a_job_that_is_dropped_twice_is_gone_once(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """Its end and the failure of its submit may both drop it; others of its session stay."""
    first, second = runner.submit(ask("first")), runner.submit(ask("second"))
    for prompt in ("first", "second"):
        turns[prompt].until_started()
    live = runner._roster.jobs[first.job_id]
    turns["first"].finish.set()
    runner.await_job(first.job_id)
    eventually(lambda: first.job_id not in runner._roster.jobs)
    with runner._roster.lock:
        runner._roster.drop(live)
    assert list(runner._roster.jobs) == [second.job_id]
    assert not runner.wait_idle(0)
    turns["second"].finish.set()
    runner.await_job(second.job_id)
    assert runner.wait_idle()
    with runner._roster.lock:
        runner._roster.drop(live)
    assert runner._roster.by_session == {}


# --- threads -----------------------------------------------------------------------------------------------


def test_a_worker_thread_that_cannot_be_started_is_started_with_the_next_job(
    make_runner: MakeRunner, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without memory for another thread: the job waits in the line, and runs once there is one."""
    runner = make_runner(2)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) is not None and thread._target.__name__ == "_make":  # type: ignore[attr-defined]
            raise RuntimeError("can't start new thread")
        start(thread)

    turns["first"].finish.set()
    turns["second"].finish.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = runner.submit(ask("first"))
        assert "no further worker thread" in caplog.text
        assert runner.get(first.job_id).status is JobStatus.QUEUED
    second = runner.submit(ask("second"))
    assert [job.status for job in runner.await_tasks([first.job_id, second.job_id])] == [JobStatus.COMPLETED] * 2
