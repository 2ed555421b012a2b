"""Cancelling (spec 003, D5, scenario D, invariant 3; R6)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.runner.cancel import STUCK
from tests.support import FakeClock, eventually
from tests.support.thin_store import ThinStore
from tests.support.turns import Ask, MakeRunner, Turns


def trail(store: MockTaskStore, job_id: str) -> list[str]:
    return [t.status.value if t.kind == "transition" else t.kind for t in store.history(job_id)]


def test_a_queued_job_is_cancelled_at_once_and_never_starts(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask
) -> None:
    """One commit from queued to cancelled; the callable is never called."""
    runner = make_runner(1)
    runner.submit(ask("first"))
    second = runner.submit(ask("second"))
    cancelled = runner.cancel(second.job_id, "not needed")
    assert (cancelled.status, cancelled.cancel_reason) == (JobStatus.CANCELLED, "not needed")
    assert cancelled.cancel_requested_at is not None
    assert trail(store, second.job_id) == ["pending", "queued", "cancelled"]
    turns.finish_all()
    assert runner.wait_idle()
    assert turns.order == ["first"]


def test_a_running_job_is_asked_to_stop_and_returned_as_it_stands(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask
) -> None:
    """The request is committed, the event set, the status still running; the end is cancelled."""
    job = runner.submit(ask())
    request = turns["work"].until_started()
    turns["work"].obeys = False
    asked = runner.cancel(job.job_id, "stop")
    assert asked.status is JobStatus.RUNNING
    assert asked.cancel_requested_at is not None
    assert store.get(job.job_id).cancel_requested_at is not None
    assert request.cancel_event.is_set()
    with pytest.raises(errors.CancelledError):
        request.raise_if_cancelled()
    turns["work"].finish.set()
    ended = runner.await_job(job.job_id)
    assert (ended.status, ended.cancel_reason, ended.error) == (JobStatus.CANCELLED, "stop", None)
    assert trail(store, job.job_id) == ["pending", "queued", "running", "cancel-request", "cancelled"]


def test_a_second_cancel_changes_nothing(runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask) -> None:
    """The first reason stays; there is one request in the history."""
    turns["work"].obeys = False
    job = runner.submit(ask())
    turns["work"].until_started()
    runner.cancel(job.job_id, "first")
    assert runner.cancel(job.job_id, "second").status is JobStatus.RUNNING
    turns["work"].finish.set()
    assert runner.await_job(job.job_id).cancel_reason == "first"
    assert trail(store, job.job_id).count("cancel-request") == 1


def test_a_finished_job_stays_as_it_is(runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask) -> None:
    """Invariant 2: completed never becomes cancelled."""
    turns.finish_all()
    ended = runner.await_job(runner.submit(ask()).job_id)
    assert runner.wait_idle()
    assert runner.cancel(ended.job_id) == ended
    assert trail(store, ended.job_id)[-1] == "completed"


def test_cancelling_what_is_not_there_says_so(runner: JobRunner) -> None:
    """`UnknownJob`."""
    with pytest.raises(errors.UnknownJob):
        runner.cancel("00000000-0000-4000-8000-000000000000")


@pytest.mark.parametrize("how", ["returns", "raises", "raises CancelledError", "returns nothing"])
def test_any_end_after_a_request_is_cancelled_and_keeps_the_partial_result(
    runner: JobRunner, turns: Turns, ask: Ask, how: str
) -> None:
    """By return or by exception; the text it returned, else the last partial text, is kept."""

    def outcome(request: TurnRequest) -> TurnResult:
        request.partial("half of it")
        if how == "raises":
            raise ValueError("broken by the stop")
        if how == "raises CancelledError":
            request.raise_if_cancelled()
        return TurnResult(final_text="as far as it got" if how == "returns" else "")

    turns["work"].outcome = outcome
    job = runner.submit(ask())
    turns["work"].until_started()
    runner.cancel(job.job_id)
    ended = runner.await_job(job.job_id)
    assert ended.status is JobStatus.CANCELLED
    assert ended.result_text == ("as far as it got" if how == "returns" else "half of it")
    assert ended.error == ("ValueError: broken by the stop" if how == "raises" else None)


def test_a_job_that_ignores_its_event_is_cancelled_after_thirty_seconds(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """D13's key test: forced to cancelled with the exact text, its slot given back, its thread named."""
    runner = make_runner(1)
    turns["stubborn"].obeys = False
    job = runner.submit(ask("stubborn"))
    request = turns["stubborn"].until_started()
    request.partial("so far")
    waiting = runner.submit(ask("next"))
    runner.cancel(job.job_id, "enough")
    clock.advance(29.9)
    assert runner.get(job.job_id).status is JobStatus.RUNNING
    clock.advance(0.2)
    ended = runner.await_job(job.job_id)
    assert (ended.status, ended.error) == (JobStatus.CANCELLED, STUCK)
    assert STUCK == "cancel timed out, worker may be stuck"
    assert (ended.cancel_reason, ended.result_text) == ("enough", "so far")
    turns["next"].until_started()
    (stuck,) = runner.stats().stuck
    assert (stuck.job_id, stuck.thread_name) == (job.job_id, turns["stubborn"].thread_name)
    assert waiting.job_id != job.job_id


def test_the_late_result_of_a_given_up_job_is_dropped(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """It finishes after the forced cancel: no second terminal commit, and the stuck thread is gone from the stats."""
    runner = make_runner(1)
    turns["stubborn"].obeys = False
    job = runner.submit(ask("stubborn"))
    request = turns["stubborn"].until_started()
    runner.cancel(job.job_id)
    clock.advance(31)
    ended = runner.await_job(job.job_id)
    turns["stubborn"].finish.set()
    eventually(lambda: not runner.stats().stuck)
    request.partial("too late")
    assert runner.get(job.job_id) == ended == store.get(job.job_id)
    assert trail(store, job.job_id) == ["pending", "queued", "running", "cancel-request", "cancelled"]
    assert runner.stats().running == 0


def test_the_time_to_stop_is_configurable(make_runner: MakeRunner, turns: Turns, ask: Ask, clock: FakeClock) -> None:
    """`cancel_timeout_s`."""
    runner = make_runner(cancel_timeout_s=3)
    turns["work"].obeys = False
    job = runner.submit(ask())
    turns["work"].until_started()
    runner.cancel(job.job_id)
    clock.advance(3.1)
    assert runner.await_job(job.job_id).error == STUCK


def test_a_timeout_is_a_cancel_with_its_own_reason(runner: JobRunner, turns: Turns, ask: Ask, clock: FakeClock) -> None:
    """`timeout_s` counts from the start of the run."""
    job = runner.submit(ask(timeout_s=2.5))
    request = turns["work"].until_started()
    assert request.deadline == clock.monotonic() + 2.5
    eventually(lambda: runner._timers._thread is not None)
    clock.advance(2.4)
    assert not request.cancel_event.is_set()
    clock.advance(0.2)
    ended = runner.await_job(job.job_id)
    assert (ended.status, ended.cancel_reason) == (JobStatus.CANCELLED, "timed out after 2.5 s")


def test_a_job_that_ends_in_time_leaves_no_timer(runner: JobRunner, turns: Turns, ask: Ask, clock: FakeClock) -> None:
    """Neither its timeout nor a cancel's thirty seconds touch it later."""
    job = runner.submit(ask(timeout_s=5))
    turns["work"].until_started()
    runner.cancel(job.job_id)
    ended = runner.await_job(job.job_id)
    clock.advance(100)
    assert runner.get(job.job_id) == ended
    assert not runner.stats().stuck


# --- descendants ------------------------------------------------------------------------------------------


def test_cancelling_a_job_cancels_its_descendants(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """Running and queued ones, to any depth, each with a reason that names the ancestor."""
    runner = make_runner(2)
    parent = runner.submit(ask("parent"))
    child = runner.submit(ask("child", parent_job_id=parent.job_id))
    grandchild = runner.submit(ask("grandchild", parent_job_id=child.job_id))
    other = runner.submit(ask("other"))
    turns["child"].until_started()
    runner.cancel(parent.job_id, "no more")
    ended = runner.await_tasks([parent.job_id, child.job_id, grandchild.job_id])
    assert [job.status for job in ended] == [JobStatus.CANCELLED] * 3
    assert ended[1].cancel_reason == f"its ancestor {parent.job_id} was cancelled: no more"
    assert "grandchild" not in turns.order
    assert not runner.get(other.job_id).terminal


def test_descendants_of_finished_children_are_reached(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """The child has ended and is forgotten; its own child still stops with the grandparent."""
    runner = make_runner(3)
    parent = runner.submit(ask("parent"))
    child = runner.submit(ask("child", parent_job_id=parent.job_id))
    grandchild = runner.submit(ask("grandchild", parent_job_id=child.job_id))
    turns["child"].finish.set()
    runner.await_job(child.job_id)
    eventually(lambda: runner.stats().unfinished == 2)
    runner.cancel(parent.job_id)
    assert runner.await_job(grandchild.job_id).status is JobStatus.CANCELLED
    assert runner.get(child.job_id).status is JobStatus.COMPLETED


@pytest.mark.parametrize("how", ["cancelled", "finished"])
def test_a_child_of_a_stopped_parent_is_refused(
    runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask, how: str
) -> None:
    """`ParentFinished`, nothing written: while the parent is being cancelled, and after its end."""
    turns["parent"].obeys = False
    parent = runner.submit(ask("parent"))
    turns["parent"].until_started()
    if how == "cancelled":
        runner.cancel(parent.job_id)
    else:
        turns["parent"].finish.set()
        runner.await_job(parent.job_id)
        assert runner.wait_idle()
    before = store.head(sid)
    with pytest.raises(errors.ParentFinished):
        runner.submit(ask("child", parent_job_id=parent.job_id))
    assert store.head(sid) == before


def test_a_child_on_its_way_to_the_store_is_cancelled_with_its_parent(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel comes while the child's commit is under way: it becomes durable, and then cancelled, unstarted."""
    parent = runner.submit(ask("parent"))
    turns["parent"].until_started()
    turns["parent"].obeys = False
    create_later = store.create_later

    def cancelled_meanwhile(*args: object, **kwargs: object) -> object:
        runner.cancel(parent.job_id)
        return create_later(*args, **kwargs)  # type: ignore[arg-type]

    # The store itself refuses it, since the parent's request was committed first.
    monkeypatch.setattr(store, "create_later", cancelled_meanwhile)
    with pytest.raises(errors.ParentFinished):
        runner.submit(ask("child", parent_job_id=parent.job_id))
    monkeypatch.undo()
    assert "child" not in turns.order
    assert runner.stats().unfinished == 1


def test_a_submit_that_was_first_is_cancelled_unstarted(
    runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's commit was handed in before the cancel: it is durable and ends as cancelled, never started."""
    turns["parent"].obeys = False
    parent = runner.submit(ask("parent"))
    turns["parent"].until_started()
    create_later = store.create_later

    def cancelled_after(*args: object, **kwargs: object) -> object:
        future = create_later(*args, **kwargs)  # type: ignore[arg-type]
        runner.cancel(parent.job_id)
        return future

    monkeypatch.setattr(store, "create_later", cancelled_after)
    child = runner.submit(ask("child", parent_job_id=parent.job_id))
    monkeypatch.undo()
    assert runner.await_job(child.job_id).status is JobStatus.CANCELLED
    assert "child" not in turns.order


# --- sessions ---------------------------------------------------------------------------------------------


def test_cancelling_a_session_ends_all_its_jobs_and_no_other(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask
) -> None:
    """The user stops the session: running and queued jobs of it, not those of another session."""
    runner = make_runner(2)
    other_session = store.create_session("s2")
    jobs = [runner.submit(ask(f"j{n}")) for n in range(3)]
    other = runner.submit(ask("other", parent_session_id=other_session))
    turns["j1"].until_started()
    stopped = runner.cancel_session("s1", "user stopped")
    assert {job.job_id for job in stopped} == {job.job_id for job in jobs}
    ended = runner.await_tasks([job.job_id for job in jobs])
    assert {(job.status, job.cancel_reason) for job in ended} == {(JobStatus.CANCELLED, "user stopped")}
    assert not runner.get(other.job_id).terminal


# --- races -------------------------------------------------------------------------------------------------


def test_cancelled_means_never_ran_or_saw_the_event() -> None:
    """Ten thousand cancels race with a worker's start: each job either never ran, or its turn saw the event."""
    rounds, batch = 10_000, 20
    ran: dict[str, bool] = {}

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        ran[request.job_id] = cancel_event.wait(10)
        return TurnResult()

    store: Any = ThinStore()
    begun = 0
    with JobRunner(store, 4, turn) as runner:
        for _ in range(rounds // batch):
            ids = [runner.submit(SpawnRequest(prompt="x", parent_session_id="s")).job_id for _ in range(batch)]
            for job_id in ids:
                runner._canceller.cancel(runner._roster.jobs[job_id], None)
            for job in runner.await_tasks(ids):
                saw = ran.pop(job.job_id, None)
                assert job.status is JobStatus.CANCELLED
                assert saw in (None, True)
                assert (job.started_at is None) == (saw is None)
                begun += saw is True
    store.close()
    assert 0 < begun < rounds
    assert store.refused == 0
