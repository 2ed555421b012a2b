"""Waiting, and the slots that are lent meanwhile (design, *The runner*; spec 003, D10, D14)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from tests.support import FakeClock, eventually
from tests.support.turns import Ask, MakeRunner, Turns


def waits_for_child(runner: JobRunner, prompt: str = "child", timeout: float | None = None) -> object:
    """A turn that submits a child and returns the child's text."""

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        child = runner.submit(
            SpawnRequest(prompt=prompt, parent_session_id=request.session_id, parent_job_id=request.job_id)
        )
        return TurnResult(final_text=f"got: {runner.await_job(child.job_id, timeout).result_text}")

    return turn


def test_await_job_returns_the_ended_job(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """As it ended, at once when it has ended already."""
    job = runner.submit(ask())
    threading.Timer(0.01, turns["work"].finish.set).start()
    ended = runner.await_job(job.job_id)
    assert ended.status is JobStatus.COMPLETED
    assert runner.await_job(job.job_id, timeout=0) == ended


def test_await_job_returns_the_job_as_it_stands_when_the_time_is_up(
    runner: JobRunner, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """Still running; the job goes on."""
    job = runner.submit(ask())
    turns["work"].until_started()
    assert runner.await_job(job.job_id, timeout=0).status is not JobStatus.COMPLETED
    assert runner.await_job(job.job_id, timeout=-3).job_id == job.job_id
    eventually(lambda: runner.get(job.job_id).status is JobStatus.RUNNING)
    got = []
    thread = threading.Thread(target=lambda: got.append(runner.await_job(job.job_id, timeout=5)))
    thread.start()
    clock.until_waiting(2)
    clock.advance(5.1)
    thread.join(10)
    assert got[0].status is JobStatus.RUNNING


def test_all_and_any(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """`all` waits for the last, `any` for the first; both give every job, in the order asked for."""
    ids = [runner.submit(ask(prompt)).job_id for prompt in ("slow", "fast")]
    turns["fast"].finish.set()
    slow, fast = runner.await_tasks(ids, mode="any")
    assert (slow.terminal, fast.status) == (False, JobStatus.COMPLETED)
    turns["slow"].finish.set()
    assert [job.result_text for job in runner.await_tasks([*ids, ids[0]])] == ["did slow", "did fast", "did slow"]


def test_partial_failure_is_a_result_like_any_other(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """Each job carries its own status and error (scenario C, D12)."""

    def fail(request: TurnRequest) -> TurnResult:
        raise RuntimeError("no luck")

    turns["bad"].outcome = fail
    ids = [runner.submit(ask(prompt)).job_id for prompt in ("good", "bad")]
    turns.finish_all()
    good, bad = runner.await_tasks(ids)
    assert (good.status, good.error) == (JobStatus.COMPLETED, None)
    assert (bad.status, bad.error) == (JobStatus.ERRORED, "RuntimeError: no luck")


def test_waiting_for_nothing_is_over_at_once(runner: JobRunner) -> None:
    """An empty list, in either mode."""
    assert runner.await_tasks([]) == runner.await_tasks([], mode="any") == []


@pytest.mark.parametrize(
    ("ids", "mode", "timeout", "error"),
    [
        (["00000000-0000-4000-8000-000000000000"], "all", None, errors.UnknownJob),
        (["zz"], "all", None, errors.UnknownJob),
        ([], "most", None, errors.InvalidInput),
        ([], "all", float("nan"), errors.InvalidInput),
        ([], "all", "5", errors.InvalidInput),
        ("an id", "all", None, errors.InvalidInput),
    ],
)
def test_a_wait_that_cannot_be_is_refused(
    runner: JobRunner, ids: list[str], mode: str, timeout: float | None, error: type[Exception]
) -> None:
    """A typed error at once, never an endless wait."""
    with pytest.raises(error):
        runner.await_tasks(ids, mode, timeout)


def test_a_unique_beginning_of_an_id_is_enough(runner: JobRunner, ask: Ask) -> None:
    """For get, wait and cancel."""
    job = runner.submit(ask())
    assert runner.get(job.job_id[:8]).job_id == job.job_id
    assert runner.cancel(job.job_id[:8]).job_id == job.job_id
    assert runner.await_job(job.job_id[:8]).job_id == job.job_id


def test_a_very_long_timeout_is_as_long_as_can_be(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """1e12 seconds do not overflow."""
    turns.finish_all()
    assert runner.await_job(runner.submit(ask()).job_id, timeout=1e12).terminal


def test_many_waiters_of_one_job_are_all_woken(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """Fifty threads, one job."""
    job = runner.submit(ask())
    got: list[JobStatus] = []
    threads = [threading.Thread(target=lambda: got.append(runner.await_job(job.job_id).status)) for _ in range(50)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(runner._roster.jobs[job.job_id].waiters) == 50)
    turns["work"].finish.set()
    for thread in threads:
        thread.join(10)
    assert got == [JobStatus.COMPLETED] * 50


def test_a_wait_that_is_over_leaves_nothing_behind(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """After its time is up the job knows no waiter any more."""
    job = runner.submit(ask())
    turns["work"].until_started()
    for _ in range(10):
        runner.await_job(job.job_id, timeout=0)
    assert not runner._roster.jobs[job.job_id].waiters


# --- lent slots ---------------------------------------------------------------------------------------------


def test_one_worker_and_a_job_that_waits_for_its_own_child(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """The waiting parent lends its slot to the child."""
    runner = make_runner(1)
    turns.finish_all()
    parent = runner.submit(ask("parent"), sync_fn=waits_for_child(runner))
    assert runner.await_job(parent.job_id).result_text == "got: did child"


def test_a_parent_that_only_looks_at_its_child_never_loses_its_slot(
    make_runner: MakeRunner, turns: Turns, ask: Ask
) -> None:
    """A wait that ends at once, while the token for the child is still on its way: 200 parents on one worker."""
    runner = make_runner(1)
    turns.finish_all()

    def parent(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        child = runner.submit(ask("child", parent_job_id=request.job_id))
        for _ in range(3):
            runner.await_tasks([child.job_id], timeout=0)
        return TurnResult(final_text=runner.await_job(child.job_id).status.value)

    for number in range(200):
        job = runner.submit(ask(f"parent {number}"), sync_fn=parent)
        assert runner.await_job(job.job_id, timeout=30).result_text == "completed"


def test_four_parents_wait_for_children_on_four_workers(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """All four slots are lent at once, and all four children run."""
    runner = make_runner(4)
    together = threading.Barrier(4)
    fn: Any = waits_for_child(runner)

    def parent(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        together.wait(10)
        result: TurnResult = fn(request, cancel_event)
        return result

    parents = [runner.submit(ask(f"p{n}"), sync_fn=parent).job_id for n in range(4)]
    eventually(lambda: runner.stats().lent == 4)
    turns.finish_all()
    assert {job.result_text for job in runner.await_tasks(parents)} == {"got: did child"}
    assert runner.stats().lent == 0


def test_waiting_nests_through_generations_on_one_worker(make_runner: MakeRunner, ask: Ask) -> None:
    """Thirty generations, each waiting for the next."""
    runner = make_runner(1)

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        depth = int(request.prompt)
        if depth == 0:
            return TurnResult(final_text="bottom")
        child = runner.submit(
            SpawnRequest(prompt=str(depth - 1), parent_session_id=request.session_id, parent_job_id=request.job_id),
            sync_fn=turn,
        )
        return TurnResult(final_text=runner.await_job(child.job_id).result_text or "")

    assert runner.await_job(runner.submit(ask("30"), sync_fn=turn).job_id).result_text == "bottom"


def test_a_lent_slot_runs_nothing_that_nobody_waits_for(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """Queued before the child and waited for by nobody: it has to wait for the parent's own slot."""
    runner = make_runner(1)
    go = threading.Event()

    def parent(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        assert go.wait(10)
        return waits_for_child(runner)(request, cancel_event)  # type: ignore[operator,no-any-return]

    job = runner.submit(ask("parent"), sync_fn=parent)
    runner.submit(ask("other"))
    go.set()
    turns["child"].until_started()
    assert "other" not in turns.order
    turns["child"].finish.set()
    runner.await_job(job.job_id)
    turns["other"].until_started()


def test_a_lent_slot_runs_descendants_of_what_is_waited_for(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """The child that is waited for ends only after a grandchild that it does not wait for by `await_job`."""
    runner = make_runner(1)

    def child(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        runner.submit(
            SpawnRequest(prompt="grandchild", parent_session_id=request.session_id, parent_job_id=request.job_id)
        )
        return TurnResult(final_text="child")

    def parent(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        first = runner.submit(
            SpawnRequest(prompt="c", parent_session_id=request.session_id, parent_job_id=request.job_id), sync_fn=child
        )
        second = runner.submit(
            SpawnRequest(prompt="held", parent_session_id=request.session_id, parent_job_id=request.job_id)
        )
        runner.await_tasks([first.job_id, second.job_id])
        return TurnResult(final_text="parent")

    runner.submit(ask("parent"), sync_fn=parent)
    turns["held"].until_started()
    turns["held"].finish.set()
    turns["grandchild"].until_started()


def test_a_job_cannot_wait_for_itself(runner: JobRunner, ask: Ask) -> None:
    """It would never end; it is told so."""

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        runner.await_job(request.job_id)
        return TurnResult()

    ended = runner.await_job(runner.submit(ask(), sync_fn=turn).job_id)
    assert ended.status is JobStatus.ERRORED
    assert ended.error is not None
    assert ended.error.startswith("InvalidInput: ")


def test_a_parent_that_waits_for_its_child_gets_the_childs_end_when_both_are_cancelled(
    make_runner: MakeRunner, turns: Turns, ask: Ask
) -> None:
    """The cancel reaches the child too, so the wait ends with it, and the partial work can be gathered."""
    runner = make_runner(1)
    parent = runner.submit(ask("parent"), sync_fn=waits_for_child(runner))
    turns["child"].outcome = lambda request: TurnResult(final_text="half")
    turns["child"].until_started()
    runner.cancel(parent.job_id)
    ended = runner.await_job(parent.job_id)
    assert (ended.status, ended.result_text) == (JobStatus.CANCELLED, "got: half")


def test_a_job_that_waits_for_a_stranger_stops_when_it_is_asked_to(
    make_runner: MakeRunner, turns: Turns, ask: Ask
) -> None:
    """What is not under it goes on, so its wait is ended with `CancelledError`, at once."""
    runner = make_runner(2)
    turns["stranger"].obeys = False
    stranger = runner.submit(ask("stranger"))
    waiting = threading.Event()

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        waiting.set()
        runner.await_job(stranger.job_id)
        return TurnResult()

    job = runner.submit(ask("waits"), sync_fn=turn)
    assert waiting.wait(10)
    eventually(lambda: runner.stats().lent == 1)
    runner.cancel(job.job_id, "never mind")
    ended = runner.await_job(job.job_id)
    assert (ended.status, ended.cancel_reason, ended.error) == (JobStatus.CANCELLED, "never mind", None)
    assert not runner.get(stranger.job_id).terminal


def test_a_waiting_job_that_is_given_up_costs_no_slot(
    make_runner: MakeRunner, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """Forced while it waits for a child that ignores its event: both slots come back."""
    runner = make_runner(1)
    turns["child"].obeys = False
    parent = runner.submit(ask("parent"), sync_fn=waits_for_child(runner))
    turns["child"].until_started()
    runner.cancel(parent.job_id)
    clock.advance(31)
    assert runner.await_job(parent.job_id).error == "cancel timed out, worker may be stuck"
    runner.submit(ask("next"))
    turns["next"].until_started()
    turns["next"].finish.set()
    turns["child"].finish.set()
    eventually(lambda: not runner.stats().stuck)
    stats = runner.stats()
    assert (stats.lent, stats.running, stats.withheld) == (0, 0, 0)


def test_a_job_may_wait_in_a_thread_of_its_own(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """Its slot is lent when the thread copied the turn's context, as `asyncio.to_thread` does."""
    import asyncio

    runner = make_runner(1)
    turns.finish_all()

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        async def gather() -> str:
            ids = [
                runner.submit(
                    SpawnRequest(prompt=f"c{n}", parent_session_id=request.session_id, parent_job_id=request.job_id)
                ).job_id
                for n in range(3)
            ]
            jobs = await asyncio.gather(*(asyncio.to_thread(runner.await_job, job_id) for job_id in ids))
            return " ".join(job.result_text or "" for job in jobs)

        return TurnResult(final_text=asyncio.run(gather()))

    assert runner.await_job(runner.submit(ask("p"), sync_fn=turn).job_id).result_text == "did c0 did c1 did c2"
    assert runner.stats().lent == 0


def test_waiting_for_a_job_of_another_runner(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """Seen within half a second by looking at the session's head."""
    theirs, ours = make_runner(), make_runner()
    job = theirs.submit(ask())
    turns["work"].until_started()
    got: list[JobStatus] = []
    thread = threading.Thread(target=lambda: got.append(ours.await_job(job.job_id).status))
    thread.start()
    eventually(lambda: ours._client.heads._watches)
    turns["work"].finish.set()
    theirs.await_job(job.job_id)
    clock.until_waiting(2)
    clock.advance(0.5)
    thread.join(10)
    assert got == [JobStatus.COMPLETED]
