"""Spec 003 as tests: scenarios A to D, the cases of D13, and the eight invariants of part 3."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Iterator

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.jobs import EDGES, TERMINAL, Job, Queued, Started, transition
from tests.support import FakeClock, eventually
from tests.support.turns import Turns


@pytest.fixture
def store(clock: FakeClock) -> Iterator[MockTaskStore]:
    with MockTaskStore(clock=clock) as store:
        store.create_session("s1")
        yield store
        assert store.fsck("s1").clean


@pytest.fixture
def turns() -> Turns:
    return Turns()


def ask(prompt: str, **fields: object) -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id="s1", **fields)  # type: ignore[arg-type]


def card_status(store: MockTaskStore, job: Job) -> str:
    assert job.attach_id is not None
    status: str = store.session("s1").node(job.attach_id).extra["attach"]["status"]
    return status


def trail(store: MockTaskStore, job: Job) -> list[str]:
    return [t.status.value for t in store.history(job.job_id) if t.kind == "transition"]


def finish(turns: Turns, runner: JobRunner) -> None:
    turns.finish_all()
    assert runner.wait_idle()


# --- the scenarios --------------------------------------------------------------------------------------------


def test_scenario_a_a_single_sync_task(store: MockTaskStore, turns: Turns) -> None:
    """Spawn, await, result: all four states in the history, the card at once in its final state."""
    with JobRunner(store, 4, turns) as runner:
        job = runner.submit(ask("probe X", description="probe"))
        assert (job.context_mode.value, job.parent_job_id, job.parent_session_id) == ("inherit", None, "s1")
        turns["probe X"].finish.set()
        ended = runner.await_job(job.job_id)
    assert ended.result_text == "did probe X"
    assert trail(store, ended) == ["pending", "queued", "running", "completed"]
    assert card_status(store, ended) == "completed"


def test_scenario_a_the_user_stops_the_session(store: MockTaskStore, turns: Turns) -> None:
    """The cancel reaches the turn; partial output is kept and the card says when it was stopped."""
    with JobRunner(store, 4, turns) as runner:
        job = runner.submit(ask("probe X"))
        turns["probe X"].outcome = lambda request: TurnResult(final_text="half an answer")
        turns["probe X"].until_started()
        runner.cancel_session("s1")
        ended = runner.await_job(job.job_id)
    assert (ended.status, ended.result_text) == (JobStatus.CANCELLED, "half an answer")
    card = store.session("s1").node(ended.attach_id or "")
    assert card.content.startswith("half an answer")
    assert "[cancelled at " in card.content


def test_scenario_b_a_single_async_task(store: MockTaskStore, turns: Turns) -> None:
    """The id comes back at once; until the end the card says running and is no part of any context."""
    with JobRunner(store, 4, turns) as runner:
        head = store.session("s1").append("user", "start something long")
        job = runner.submit(ask("long"))
        assert job.status in (JobStatus.QUEUED, JobStatus.RUNNING)
        assert card_status(store, job) == "running"
        assert [item.text for item in store.session("s1").context(head.id)] == ["start something long"]
        turns["long"].until_started()
        turns["long"].finish.set()
        assert runner.await_job(job.job_id).status is JobStatus.COMPLETED
        assert len(store.session("s1").context(head.id)) == 2


def test_scenario_c_a_plan_of_five(store: MockTaskStore, turns: Turns) -> None:
    """Pool of four: four run and one waits; `await_tasks` gathers all ends, partial failure included."""

    def fail(request: TurnRequest) -> TurnResult:
        raise LookupError("no sources")

    with JobRunner(store, 4, turns) as runner:
        fork = store.session("s1").append("assistant", "here is my plan")
        turns["t3"].outcome = fail
        jobs = [
            runner.submit(ask(f"t{n}", description=f"task {n}", parent_msg_id=fork.id, context_mode="clean"))
            for n in range(5)
        ]
        for n in range(4):
            turns[f"t{n}"].until_started()
        eventually(lambda: store.get(jobs[3].job_id).status is JobStatus.RUNNING)
        assert store.get(jobs[4].job_id).status is JobStatus.QUEUED
        turns["t0"].finish.set()
        turns["t4"].until_started()
        turns.finish_all()
        ended = runner.await_tasks([job.job_id for job in jobs], mode="all")
    assert [job.status.value for job in ended] == ["completed"] * 3 + ["errored", "completed"]
    assert ended[3].error == "LookupError: no sources"
    assert [row.job_id for row in store.list(parent_msg_id=fork.id)] == [job.job_id for job in reversed(jobs)]
    assert len({job.head_id for job in ended}) == 5


def test_scenario_d_a_long_task_is_cancelled_after_ten_minutes(
    store: MockTaskStore, turns: Turns, clock: FakeClock
) -> None:
    """The request is committed at once, the end when the worker has left."""
    with JobRunner(store, 4, turns) as runner:
        job = runner.submit(ask("research"))
        turns["research"].obeys = False
        turns["research"].until_started()
        clock.advance(600)
        asked = runner.cancel(job.job_id, "user clicked stop")
        assert (asked.status, asked.cancel_requested_at) == (JobStatus.RUNNING, clock.now())
        clock.advance(5)
        turns["research"].finish.set()
        ended = runner.await_job(job.job_id)
    assert (ended.status, ended.completed_at) == (JobStatus.CANCELLED, clock.now())
    assert card_status(store, ended) == "cancelled"


def test_scenario_d_a_worker_that_ignores_its_event_for_thirty_seconds(
    store: MockTaskStore, turns: Turns, clock: FakeClock
) -> None:
    """D13's key test."""
    with JobRunner(store, 1, turns) as runner:
        job = runner.submit(ask("stubborn"))
        turns["stubborn"].obeys = False
        turns["stubborn"].until_started()
        runner.cancel(job.job_id)
        clock.advance(30.1)
        ended = runner.await_job(job.job_id)
        assert (ended.status, ended.error) == (JobStatus.CANCELLED, "cancel timed out, worker may be stuck")
        finish(turns, runner)


# --- D13 ------------------------------------------------------------------------------------------------------


def test_pool_of_two_and_six_tasks(store: MockTaskStore, turns: Turns) -> None:
    """Backpressure: tasks 3 to 6 stay queued until the first two have ended."""
    with JobRunner(store, 2, turns) as runner:
        ids = [runner.submit(ask(f"t{n}")).job_id for n in range(6)]
        turns["t0"].until_started()
        turns["t1"].until_started()
        eventually(lambda: [store.get(i).status.value for i in ids] == ["running"] * 2 + ["queued"] * 4)
        turns["t0"].finish.set()
        turns["t2"].until_started()
        assert turns.order == ["t0", "t1", "t2"]
        turns["t1"].finish.set()
        turns["t3"].until_started()
        finish(turns, runner)
    assert turns.order == [f"t{n}" for n in range(6)]


def test_a_task_that_raises(store: MockTaskStore) -> None:
    """D12: errored with `{type}: {message}`, card too."""

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        raise ValueError("bad input")

    with JobRunner(store, 1, turn) as runner:
        ended = runner.await_job(runner.submit(ask("x")).job_id)
    assert (ended.status, ended.error) == (JobStatus.ERRORED, "ValueError: bad input")
    assert card_status(store, ended) == "errored"


def test_a_crash_marks_running_as_errored(store: MockTaskStore, turns: Turns) -> None:
    """D4: what a dead process left running is errored at the next start, and nothing is run again."""
    with JobRunner(store, 1, turns) as runner:
        job = runner.submit(ask("x"))
        turns["x"].until_started()
        eventually(lambda: store.get(job.job_id).status is JobStatus.RUNNING)
        runner._lease.release()  # as when the process dies
        with JobRunner(store, 1, turns) as after:
            assert after.get(job.job_id).error == "worker died before completion"
            assert card_status(store, job) == "errored"
        turns.finish_all()
    assert turns.order == ["x"]


# --- the invariants ---------------------------------------------------------------------------------------------


def ends(store: MockTaskStore, turns: Turns, clock: FakeClock) -> Iterator[Job]:
    """One job for each way to end."""
    runner = JobRunner(store, 2, turns)

    def fail(request: TurnRequest) -> TurnResult:
        raise ValueError

    turns["completed"].finish.set()
    turns["raised"].outcome = fail
    turns["raised"].finish.set()
    for prompt in ("stubborn", "shutdown"):
        turns[prompt].obeys = False
    ids = [runner.submit(ask(prompt)).job_id for prompt in ("completed", "raised", "obeys", "stubborn", "waits")]
    turns["stubborn"].until_started()
    turns["obeys"].until_started()
    runner.cancel(ids[4])
    runner.cancel(ids[2])
    runner.cancel(ids[3])
    runner.await_job(ids[2])
    clock.advance(31)
    ids.append(runner.submit(ask("shutdown")).job_id)
    turns["shutdown"].until_started()
    ids.append(runner.submit(ask("shutdown too")).job_id)
    turns["shutdown too"].obeys = False
    turns["shutdown too"].until_started()
    ids.append(runner.submit(ask("queued at shutdown")).job_id)
    ending = threading.Thread(target=runner.shutdown)
    ending.start()
    eventually(lambda: runner._roster.closing)
    clock.until_waiting(2)
    clock.advance(2.1)
    for prompt in ("shutdown", "shutdown too"):
        assert turns[prompt].saw_cancel.wait(10)
    clock.until_waiting(2)
    clock.advance(1.5)
    ending.join(10)
    turns.finish_all()
    for prompt in ("stubborn", "shutdown", "shutdown too"):
        assert turns[prompt].left.wait(10)
    for job_id in ids:
        yield store.get(job_id)


def test_invariants_1_2_and_4_for_every_way_to_end(store: MockTaskStore, turns: Turns, clock: FakeClock) -> None:
    """One terminal state, each edge once and legal, and the card says what the row says."""
    found = list(ends(store, turns, clock))
    assert [job.status.value for job in found] == [
        "completed", "errored", "cancelled", "cancelled", "cancelled", "errored", "errored", "cancelled",
    ]  # fmt: skip
    for job in found:
        walked = [JobStatus(status) for status in trail(store, job)]
        assert all(after in EDGES[before] for before, after in itertools.pairwise(walked))
        assert [status in TERMINAL for status in walked].count(True) == 1
        assert card_status(store, job) == job.status.value


def test_invariant_2_there_is_no_way_back(clock: FakeClock) -> None:
    """From a terminal state every event is refused."""
    base = Job(
        job_id="j", subject="", description="", agent_id="a", created_at=clock.now(), parent_session_id="s1",
        status=JobStatus.COMPLETED,
    )  # fmt: skip
    for event in (Queued(), Started()):
        with pytest.raises(errors.InvalidTransition):
            transition(base, event, clock.now())


def test_invariant_3_cancel_is_reachable(store: MockTaskStore, turns: Turns, clock: FakeClock) -> None:
    """R6: thirty seconds after a cancel every job is terminal, whatever it does."""
    with JobRunner(store, 2, turns) as runner:
        ids = [runner.submit(ask(f"t{n}")).job_id for n in range(4)]
        for n in range(4):
            turns[f"t{n}"].obeys = n % 2 == 0
        turns["t1"].until_started()
        for job_id in ids:
            runner.cancel(job_id)
        clock.advance(30.1)
        assert all(job.terminal for job in runner.await_tasks(ids))
        finish(turns, runner)


def test_invariant_4_the_card_changes_in_the_same_commit(store: MockTaskStore, turns: Turns) -> None:
    """At each commit of the job's life the card of that version says running, or what the row says."""
    with JobRunner(store, 1, turns) as runner:
        job = runner.submit(ask("x"))
        assert card_status(store, job) == "running"
        turns["x"].until_started()
        eventually(lambda: store.get(job.job_id).status is JobStatus.RUNNING)
        assert card_status(store, job) == "running"
        with runner.subscribe() as events:
            turns["x"].finish.set()
            event = events.get(10)
            while event is not None and not event.job.terminal:
                event = events.get(10)
            assert event is not None
            assert card_status(store, job) == event.status


def test_invariant_5_the_same_id_is_never_revived(store: MockTaskStore, turns: Turns) -> None:
    """After a reload an unfinished job is errored; submitting its id again returns that job and runs nothing."""
    request = ask("x", job_id="11111111-1111-4111-8111-111111111111")
    with JobRunner(store, 1, turns) as runner:
        runner.submit(request)
        turns["x"].until_started()
        runner._lease.release()
        with JobRunner(store, 1, turns) as after:
            again = after.submit(request)
            assert (again.status, again.error) == (JobStatus.ERRORED, "worker died before completion")
        turns.finish_all()
    assert turns.order == ["x"]


def test_invariant_6_the_session_never_changes(store: MockTaskStore, turns: Turns) -> None:
    """No event can move a job; the same id asked for on another session is a conflict."""
    store.create_session("s2")
    with JobRunner(store, 1, turns) as runner:
        turns.finish_all()
        request = ask("x", job_id="11111111-1111-4111-8111-111111111111")
        runner.await_job(runner.submit(request).job_id)
        with pytest.raises(errors.IdempotencyConflict):
            runner.submit(SpawnRequest(prompt="x", parent_session_id="s2", job_id=request.job_id))
        assert runner.get(request.job_id or "").parent_session_id == "s1"


def test_invariant_7_many_threads_at_once(store: MockTaskStore) -> None:
    """Sixteen threads submit, read, wait and cancel; every history is legal and nothing is left."""

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        return TurnResult(final_text=request.prompt)

    failed: list[BaseException] = []
    with JobRunner(store, 4, turn) as runner:

        def work(seed: int) -> None:
            try:
                for n in range(10):
                    job = runner.submit(ask(f"{seed}-{n}"))
                    if (seed + n) % 3 == 0:
                        runner.cancel(job.job_id)
                    runner.list(limit=5)
                    assert runner.await_job(job.job_id).terminal
                    assert runner.get(job.job_id).terminal
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert not failed
        assert runner.wait_idle()
    jobs = store.list(limit=None)
    assert len(jobs) == 160
    for job in jobs:
        walked = [JobStatus(status) for status in trail(store, job)]
        assert all(after in EDGES[before] for before, after in itertools.pairwise(walked))
        assert walked[-1] in TERMINAL


def test_invariant_8_store_and_callable_are_arguments() -> None:
    """The whole state machine runs without git and without a model."""
    accepted = inspect.signature(JobRunner).parameters
    assert list(accepted)[:7] == [
        "store", "workers", "sync_fn", "profiles", "executor", "cancel_timeout_s", "clock",
    ]  # fmt: skip
    assert "sync_fn" in inspect.signature(JobRunner.submit).parameters
