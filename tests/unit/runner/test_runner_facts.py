"""The facts of a runner's jobs: what is recorded, when, and what no failure of recording may do (spec 001)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import attrs
import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors, facts
from openjobs.clock import to_epoch_ms
from openjobs.facts import Fact, MemoryFactLog, Registered, Settled
from openjobs.jobs import Errored, Job, Queued, Started
from openjobs.runner import Ended, EndStep
from openjobs.runner.hub import JOB_STATUS, TASK_CREATED
from tests.support import FakeClock, eventually
from tests.support.jobs import job_for
from tests.support.turns import MakeRunner, Turns

SID = "s1"


@pytest.fixture
def store(clock: FakeClock) -> Iterator[MockTaskStore]:
    store = MockTaskStore(clock=clock)
    with store:
        store.create_session(SID)
        yield store


def ask(prompt: str = "work", **fields: Any) -> SpawnRequest:
    return SpawnRequest(**{"prompt": prompt, "parent_session_id": SID, **fields})


def recorded(store: MockTaskStore, session_id: str = SID) -> list[Fact]:
    return list(facts.read(store.session(session_id)))


def settled(store: MockTaskStore, job_id: str) -> Settled:
    """The one settlement of a job that has ended."""
    found = [fact for fact in recorded(store) if isinstance(fact, Settled) and fact.job_id == job_id]
    assert len(found) == 1
    return found[0]


def does(outcome: Callable[[TurnRequest], Any]) -> Any:
    return lambda request, cancel_event: outcome(request)


# --- what a reader gets ---------------------------------------------------------------------------------


def test_what_a_reader_gets_of_one_job(runner: JobRunner, store: MockTaskStore, turns: Turns, clock: FakeClock) -> None:
    """Two facts; the second one says again all that the first one said. The whole of both, as they are stored."""
    store.create_session("caller")
    job = runner.submit(ask("find it", description="probe", origin_tool_call_id="toolu_1", caller_session_id="caller"))
    turns["find it"].until_started()
    clock.advance(2.5)
    turns["find it"].finish.set()
    runner.await_job(job.job_id)
    registration = {
        "job_id": job.job_id,
        "kind": "job",
        "session_id": "s1",
        "caller_session_id": "caller",
        "parent_job_id": None,
        "label": "probe",
        "tool_call_id": "toolu_1",
        "registered_at_ms": 1767323045000,
    }
    assert [facts.to_json(fact) for fact in recorded(store)] == [
        {"type": "job/registered", **registration},
        {
            "type": "job/settled",
            **registration,
            "started_at_ms": 1767323045000,
            "settled_at_ms": 1767323047500,
            "status": "completed",
            "producer_reported": True,
        },
    ]


def test_times_are_those_of_the_row(runner: JobRunner, store: MockTaskStore, turns: Turns, clock: FakeClock) -> None:
    """Original timestamps: a fact that is recorded or read late says when it happened, not when it was written."""
    late = threading.Event()
    inner = runner.ending.set(EndStep.FACT, lambda ended: None)

    def step(ended: Ended) -> None:
        clock.advance(3600)  # the recording takes its time
        inner(ended)
        late.set()

    runner.ending.set(EndStep.FACT, step)
    job = runner.submit(ask())
    turns["work"].until_started()
    clock.advance(1.234)
    turns["work"].finish.set()
    ended = runner.await_job(job.job_id)
    assert late.is_set()
    fact = settled(store, job.job_id)
    assert ended.started_at is not None
    assert ended.completed_at is not None
    assert (fact.registered_at_ms, fact.started_at_ms, fact.settled_at_ms) == (
        to_epoch_ms(ended.created_at),
        to_epoch_ms(ended.started_at),
        to_epoch_ms(ended.completed_at),
    )
    assert fact.settled_at_ms - fact.registered_at_ms == 1234


def test_nested_calls_keep_their_identity(store: MockTaskStore, make_runner: MakeRunner) -> None:
    """Jobs that a job asks for name the job they were made in and the tool call that made them."""

    def work(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        if request.prompt == "outer":
            for number in range(2):
                child = ask(f"inner {number}", parent_job_id=request.job_id, origin_tool_call_id=f"m2:call_{number}")
                outside.await_job(outside.submit(child).job_id)
        return TurnResult(final_text="ok")

    outside = make_runner(sync_fn=work)
    outer = outside.await_job(outside.submit(ask("outer", origin_tool_call_id="m1:call_0")).job_id)
    found = {fact.label: fact for fact in recorded(store) if isinstance(fact, Settled)}
    assert {label: (fact.tool_call_id, fact.parent_job_id) for label, fact in found.items()} == {
        "outer": ("m1:call_0", None),
        "inner 0": ("m2:call_0", outer.job_id),
        "inner 1": ("m2:call_1", outer.job_id),
    }
    pairs = {fact.job_id: fact for fact in recorded(store) if isinstance(fact, Registered)}
    for fact in found.values():
        first = pairs[fact.job_id]
        names = [field.name for field in attrs.fields(Registered) if field.name != "cursor"]
        assert {name: getattr(first, name) for name in names} == {name: getattr(fact, name) for name in names}


def test_control_ids_are_unique(store: MockTaskStore, make_runner: MakeRunner) -> None:
    """The id that controls a job is the id in its facts: a UUID, and never the same again after a restart."""
    ids = []
    for _ in range(3):
        runner = make_runner(sync_fn=does(lambda request: TurnResult()))
        ids += [runner.submit(ask()).job_id for _ in range(5)]
        assert runner.wait_idle()
        runner.shutdown()
    assert [fact.job_id for fact in recorded(store) if isinstance(fact, Registered)] == ids
    assert len(set(ids)) == 15
    assert {UUID(job_id).version for job_id in ids} == {4}


def test_the_same_request_again_registers_nothing(runner: JobRunner, store: MockTaskStore, turns: Turns) -> None:
    """A retried tool call gets the first job, and that was registered once."""
    first = runner.submit(ask(origin_tool_call_id="toolu_1"))
    turns["work"].until_started()
    assert runner.submit(ask(origin_tool_call_id="toolu_1")).job_id == first.job_id
    assert [fact.type for fact in recorded(store)] == ["job/registered"]


def test_output_is_preserved(store: MockTaskStore, make_runner: MakeRunner) -> None:
    """Recording consumes nothing and changes nothing of a result, a head or a notice."""
    runner = make_runner(sync_fn=does(lambda request: TurnResult(final_text="the whole result\n" * 100)))
    job = runner.await_job(runner.submit(ask()).job_id)
    assert store.get(job.job_id) == job
    assert store.get(job.job_id).result_text == "the whole result\n" * 100
    assert store.session(SID).node(job.head_id).content == "the whole result\n" * 100  # type: ignore[arg-type]
    assert "result" not in facts.to_json(settled(store, job.job_id))


def test_recording_needs_no_commit(store: MockTaskStore, make_runner: MakeRunner) -> None:
    """A job leaves the commits that it left before there were facts."""
    runner = make_runner(sync_fn=does(lambda request: TurnResult()))
    job = runner.await_job(runner.submit(ask()).job_id)
    assert [step.status.value for step in store.history(job.job_id)] == ["pending", "queued", "running", "completed"]


# --- who reported the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "status", "reported"),
    [
        (lambda request: TurnResult(final_text="ok"), "completed", True),
        (lambda request: TurnResult(error="it says no"), "errored", True),
        (lambda request: "no result at all", "errored", True),
    ],
)
def test_a_callable_that_returned_reported(
    store: MockTaskStore, make_runner: MakeRunner, outcome: Any, status: str, reported: bool
) -> None:
    """Whatever it returned: it came to its end by itself."""
    runner = make_runner(sync_fn=does(outcome))
    job = runner.await_job(runner.submit(ask()).job_id)
    fact = settled(store, job.job_id)
    assert (fact.status, fact.producer_reported) == (status, reported)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), errors.CancelledError("of its own accord")])
def test_a_producer_that_rejects_did_not_report(
    store: MockTaskStore, make_runner: MakeRunner, error: BaseException
) -> None:
    """What it raised is an end that was written down for it."""

    def fail(request: TurnRequest) -> TurnResult:
        raise error

    runner = make_runner(sync_fn=does(fail))
    job = runner.await_job(runner.submit(ask()).job_id)
    fact = settled(store, job.job_id)
    assert (fact.status, fact.producer_reported) == ("errored", False)


@pytest.mark.parametrize("raises", [False, True])
def test_a_delayed_cancellation_settles_when_the_work_has_stopped(
    runner: JobRunner, store: MockTaskStore, turns: Turns, clock: FakeClock, raises: bool
) -> None:
    """The request settles nothing. The end has the time at which the work came back, and says whether it did so
    by returning or by raising."""
    turns["work"].obeys = False
    if raises:
        turns["work"].outcome = lambda request: request.raise_if_cancelled()  # type: ignore[assignment,return-value]
    job = runner.submit(ask())
    turns["work"].until_started()
    asked = runner.cancel(job.job_id, "enough")
    assert turns["work"].saw_cancel.wait(10)
    assert [fact.type for fact in recorded(store)] == ["job/registered"]
    clock.advance(7)
    turns["work"].finish.set()
    assert runner.await_job(job.job_id).status is JobStatus.CANCELLED
    fact = settled(store, job.job_id)
    assert asked.cancel_requested_at is not None
    assert fact.settled_at_ms == to_epoch_ms(asked.cancel_requested_at) + 7000
    assert (fact.status, fact.producer_reported) == ("cancelled", not raises)


def test_a_forced_teardown_is_bookkeeping_and_late_completion_changes_nothing(
    runner: JobRunner, store: MockTaskStore, turns: Turns, clock: FakeClock
) -> None:
    """A job that does not stop is settled without its word; when its thread comes back after all, there is
    still the one settlement, as it was."""
    turns["work"].obeys = False
    job = runner.submit(ask())
    turns["work"].until_started()
    runner.cancel(job.job_id)
    clock.advance(31)
    assert runner.await_job(job.job_id).status is JobStatus.CANCELLED
    before = settled(store, job.job_id)
    assert (before.status, before.producer_reported) == ("cancelled", False)
    clock.advance(60)
    turns["work"].finish.set()
    assert turns["work"].left.wait(10)
    eventually(lambda: not runner.stats().stuck)
    assert settled(store, job.job_id) == before
    assert before.settled_at_ms - before.registered_at_ms == 31_000


def test_what_never_started_did_not_report(make_runner: MakeRunner, store: MockTaskStore, turns: Turns) -> None:
    """A queued job that is cancelled has a settlement without a start."""
    runner = make_runner(1)
    runner.submit(ask("first"))
    turns["first"].until_started()
    waiting = runner.submit(ask("second"))
    runner.cancel(waiting.job_id)
    runner.await_job(waiting.job_id)
    fact = settled(store, waiting.job_id)
    assert (fact.status, fact.started_at_ms, fact.producer_reported) == ("cancelled", None, False)


def test_a_shutdown_settles_what_it_ends(store: MockTaskStore, turns: Turns) -> None:
    """Of three jobs one finishes in time and reports; the stuck and the queued one are settled without a report."""
    real = MockTaskStore()
    with real:  # a shutdown needs time that passes
        real.create_session(SID)
        runner = JobRunner(real, 2, turns)
        turns["stuck"].obeys = False
        jobs = {prompt: runner.submit(ask(prompt)) for prompt in ("stuck", "obeys")}
        for prompt in jobs:
            turns[prompt].until_started()
        jobs["queued"] = runner.submit(ask("queued"))
        runner.shutdown(1.0)
        ends = {prompt: settled(real, job.job_id) for prompt, job in jobs.items()}
        assert {prompt: (end.status, end.producer_reported) for prompt, end in ends.items()} == {
            "stuck": ("errored", False),
            "obeys": ("completed", True),
            "queued": ("cancelled", False),
        }
        turns.finish_all()
        assert turns["stuck"].left.wait(10)


def test_a_timeout_that_is_obeyed_is_reported(
    runner: JobRunner, store: MockTaskStore, turns: Turns, clock: FakeClock
) -> None:
    """A job that stops when its time is up came back by itself."""
    job = runner.submit(ask(timeout_s=5))
    turns["work"].until_started()
    clock.until_waiting()
    clock.advance(6)
    runner.await_job(job.job_id)
    fact = settled(store, job.job_id)
    assert (fact.status, fact.producer_reported) == ("cancelled", True)


# --- the order ------------------------------------------------------------------------------------------------


def watched(store: MockTaskStore, happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note when a fact is in the log, and whether its commit was durable then."""
    append = MemoryFactLog.append

    def noting(self: MemoryFactLog, those: Any) -> None:
        append(self, those)
        for fact in those:
            status = store.get(fact.job_id).status.value
            happened.append(f"{fact.type.value} ({status} is durable)")

    monkeypatch.setattr(MemoryFactLog, "append", noting)


def test_facts_come_after_the_commit_and_before_everybody(
    runner: JobRunner, store: MockTaskStore, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal publication order: commit, fact, live listeners, waiters. A listener that journals the notice of an
    end on hearing of it writes behind the settlement that caused it."""
    happened: list[str] = []
    watched(store, happened, monkeypatch)
    publish = runner.hub.publish

    def listener(kind: str, job: Job, value: Any = None) -> None:
        if kind in (TASK_CREATED, JOB_STATUS):
            happened.append(f"hub {kind} {job.status.value}")
        publish(kind, job, value)

    monkeypatch.setattr(runner.hub, "publish", listener)
    wait_over = threading.Event()
    job = runner.submit(ask())
    happened.append("submit returned")
    turns["work"].until_started()

    def woken() -> None:
        happened.append("waiter")
        wait_over.set()

    wait = runner.open_wait([job.job_id], "all", woken)
    turns["work"].finish.set()
    assert wait_over.wait(10)
    wait.close()
    told = [each for each in happened if each != "hub job_status running"]
    assert told == [
        "job/registered (queued is durable)",
        "hub task_created queued",
        "hub job_status queued",
        "submit returned",
        "job/settled (completed is durable)",
        "hub job_status completed",
        "waiter",
    ]


def test_a_job_does_not_start_before_it_is_registered(
    runner: JobRunner, store: MockTaskStore, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the work does, its registration is before it."""
    seen: list[list[str]] = []

    def look(request: TurnRequest) -> TurnResult:
        seen.append([fact.type.value for fact in recorded(store)])
        return TurnResult()

    turns["work"].outcome = look
    turns["work"].finish.set()
    runner.await_job(runner.submit(ask()).job_id)
    assert seen == [["job/registered"]]


def hold(runner: JobRunner, gate: threading.Event) -> None:
    """Returns when the settler waits for the gate: what comes from now on is in one piece."""
    held = threading.Event()

    def wait() -> None:
        held.set()
        assert gate.wait(20)

    runner._settler.post(wait)
    assert held.wait(10)


@pytest.mark.parametrize("later", [False, True])
def test_many_ends_at_once_are_recorded_before_any_is_announced(
    make_runner: MakeRunner, store: MockTaskStore, turns: Turns, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """Ends that became durable together share an append, and each is still before its own listeners and waiters;
    so are registrations of jobs that were submitted without waiting."""
    runner = make_runner(8)
    happened: list[tuple[str, str]] = []
    appends: list[int] = []
    append = MemoryFactLog.append

    def noting(self: MemoryFactLog, those: Any) -> None:
        append(self, those)
        appends.append(len(those))
        happened.extend((fact.type.value, fact.job_id) for fact in those)

    monkeypatch.setattr(MemoryFactLog, "append", noting)
    publish = runner.hub.publish

    def listener(kind: str, job: Job, value: Any = None) -> None:
        if kind == TASK_CREATED or job.terminal:
            happened.append(("created" if kind == TASK_CREATED else "ended", job.job_id))
        publish(kind, job, value)

    monkeypatch.setattr(runner.hub, "publish", listener)
    runner.await_job(runner.submit(ask("first"), sync_fn=does(lambda request: TurnResult())).job_id)
    assert runner.wait_idle()
    appends.clear()
    gate = threading.Event()
    if later:
        hold(runner, gate)
        answers = [runner.submit_later(ask(f"j{n}")) for n in range(8)]
        eventually(lambda: runner._settler._queue.qsize() == 8)
        gate.set()
        ids = [answer.result(10).job_id for answer in answers]
    else:
        ids = [runner.submit(ask(f"j{n}")).job_id for n in range(8)]
    for n in range(8):
        turns[f"j{n}"].until_started()
    gate.clear()
    hold(runner, gate)
    turns.finish_all()
    eventually(lambda: runner._settler._queue.qsize() >= 8)
    gate.set()
    runner.await_tasks(ids)
    assert runner.wait_idle()
    places = {each: place for place, each in enumerate(happened)}
    for job_id in ids:
        order = [places[what, job_id] for what in ("job/registered", "created", "job/settled", "ended")]
        assert order == sorted(order)
    assert sum(appends) == 16
    assert max(appends) > 1


# --- when recording fails ---------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def append(self: MemoryFactLog, those: Any) -> None:
        raise error

    monkeypatch.setattr(MemoryFactLog, "append", append)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), errors.Damaged("byte 7"), RuntimeError("?")])
def test_a_recording_that_fails_hides_no_job_and_keeps_no_waiter(
    runner: JobRunner,
    store: MockTaskStore,
    turns: Turns,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """The job is there, has its id, runs and ends, its waiters are woken; what is missing is in the log."""
    failing(monkeypatch, error)
    with caplog.at_level(logging.WARNING):
        job = runner.submit(ask())
        turns["work"].finish.set()
        assert runner.await_job(job.job_id, timeout=None).status is JobStatus.COMPLETED
    assert runner.wait_idle()
    monkeypatch.undo()
    assert recorded(store) == []
    said = [record for record in caplog.records if record.name == "openjobs.facts.recorder"]
    assert {record.levelno for record in said} == {logging.WARNING}
    assert [record.getMessage().split(": ")[2] for record in said] == [
        f"job/registered of {job.job_id}",
        f"job/settled of {job.job_id}",
    ]


def test_a_missing_end_stays_missing(
    runner: JobRunner, store: MockTaskStore, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settlement that could not be recorded is not made up later: not by a read, not by the next runner."""
    job = runner.submit(ask())
    turns["work"].until_started()
    with monkeypatch.context() as broken:
        failing(broken, OSError(28, "No space left on device"))
        turns["work"].finish.set()
        runner.await_job(job.job_id)
        assert runner.wait_idle()
    runner.shutdown()
    with JobRunner(store, 1, turns) as after:
        assert after.get(job.job_id).status is JobStatus.COMPLETED
        after.recover()
    assert [fact.type for fact in recorded(store)] == ["job/registered"]
    (interval,) = facts.intervals(store.session(SID))
    assert (interval.complete, interval.duration_ms) == (False, None)


def test_a_missing_registration_stays_missing_and_the_end_says_all(
    runner: JobRunner, store: MockTaskStore, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settlement has everything that the registration would have said."""
    with monkeypatch.context() as broken:
        failing(broken, OSError(28, "No space left on device"))
        job = runner.submit(ask(origin_tool_call_id="toolu_1"))
    turns["work"].finish.set()
    runner.await_job(job.job_id)
    assert [fact.type for fact in recorded(store)] == ["job/settled"]
    (interval,) = facts.intervals(store.session(SID))
    assert (interval.complete, interval.tool_call_id) == (True, "toolu_1")


def test_an_interrupt_while_recording_leaves_no_job_that_nobody_runs(
    runner: JobRunner, store: MockTaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a registration: nobody got the id, so the job is cancelled, not forgotten."""

    def interrupt(self: MemoryFactLog, those: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryFactLog, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.submit(ask())
    assert runner.wait_idle()
    (job,) = store.list(SID)
    assert job.status is JobStatus.CANCELLED
    assert [fact.type for fact in recorded(store)] == ["job/settled"]


def test_recovery_records_nothing(store: MockTaskStore, turns: Turns) -> None:
    """Jobs whose runner died get their end in the row; a fact about it would be made up."""
    dead = store.leases.acquire("dead")
    store.active.mark("dead", SID)
    job = job_for(store, SID)
    store.create(job, Queued(runner_id="dead"))
    store.apply(job.job_id, Started())
    dead.release()
    with JobRunner(store, 1, turns) as runner:
        assert runner.get(job.job_id).error == "worker died before completion"
    assert recorded(store) == []


def test_an_end_that_somebody_else_wrote_is_recorded_as_it_stands(
    runner: JobRunner, store: MockTaskStore, turns: Turns
) -> None:
    """The row wins: the fact has its status and time, once."""
    job = runner.submit(ask())
    turns["work"].until_started()
    eventually(lambda: store.get(job.job_id).status is JobStatus.RUNNING)
    store.apply(job.job_id, Errored(event_id=store.new_id(), error="written by hand"))
    turns["work"].finish.set()
    runner.await_job(job.job_id)
    assert settled(store, job.job_id).status == "errored"


def test_a_submit_that_failed_half_way_is_registered_with_its_end(
    runner: JobRunner, store: MockTaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first of its two commits was written: nobody got its id, but it is in the session, so it is a pair."""
    create_later = store.create_later

    def half(job: Job, *events: Any, when_done: Any, **options: Any) -> Any:
        create_later(job, **options).result()
        raise errors.OutcomeUnknown("the second commit")

    monkeypatch.setattr(store, "create_later", half)
    with pytest.raises(errors.OutcomeUnknown):
        runner.submit(ask())
    assert runner.wait_idle()
    assert [fact.type for fact in recorded(store)] == ["job/registered", "job/settled"]
    (interval,) = facts.intervals(store.session(SID))
    assert (interval.status, interval.producer_reported, interval.duration_ms) == ("errored", False, 0)
