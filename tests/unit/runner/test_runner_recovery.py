"""Recovery, and what a client without a pool can do (design, *Recovery*; spec 003, D4; R5, R7)."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from openjobs import Job, JobClient, JobRunner, JobStatus, MockTaskStore, SpawnRequest, errors
from openjobs.jobs import CancelRequested, Errored, Queued, Started, request_digest
from openjobs.runner.recovery import Recovery
from tests.support import FakeClock, eventually
from tests.support.turns import Ask, MakeRunner, Turns

DIED = "worker died before completion"


def job_of(store: MockTaskStore, runner_id: str | None, *events: object, prompt: str = "left") -> Job:
    """A job as a runner that died left it."""
    job = Job(
        job_id=store.new_id(),
        subject=prompt,
        description=prompt,
        agent_id="main",
        created_at=store.clock.now(),
        parent_session_id="s1",
        runner_id=runner_id,
        request_digest=request_digest(SpawnRequest(prompt=prompt, parent_session_id="s1")),
    )
    return store.create(job, *events)  # type: ignore[arg-type]


@pytest.fixture
def dead(store: MockTaskStore, sid: str) -> str:
    """A runner that had a lease and a marked session, and is gone."""
    lease = store.leases.acquire("dead-runner")
    store.active.mark("dead-runner", sid)
    lease.release()
    return "dead-runner"


@pytest.mark.parametrize("events", [(), (Queued(),), (Queued(), Started())])
def test_a_new_runner_ends_what_a_dead_one_left(
    store: MockTaskStore, dead: str, make_runner: MakeRunner, turns: Turns, events: tuple[object, ...]
) -> None:
    """pending, queued and running become errored, card and all; nothing is run again; the lease is gone."""
    left = job_of(store, dead, *events)
    runner = make_runner()
    ended = runner.get(left.job_id)
    assert (ended.status, ended.error) == (JobStatus.ERRORED, DIED)
    assert left.attach_id is not None
    assert store.session("s1").node(left.attach_id).extra["attach"]["status"] == "errored"
    assert turns.order == []
    assert store.leases.dead() == []
    assert store.active.sessions(dead) == []


def test_recovery_is_idempotent(store: MockTaskStore, dead: str, make_runner: MakeRunner) -> None:
    """The second run finds nothing, and the history has one end."""
    left = job_of(store, dead, Queued())
    runner = make_runner()
    assert runner.recover() == []
    assert [t.status.value for t in store.history(left.job_id)] == ["pending", "queued", "errored"]


def test_a_finished_job_is_never_revived_or_ended_again(
    store: MockTaskStore, dead: str, make_runner: MakeRunner
) -> None:
    """Invariant 5."""
    from openjobs.jobs import Completed

    done = job_of(store, dead, Queued(), Started(), Completed(event_id="e1", result_text="fine"))
    make_runner()
    assert store.get(done.job_id) == done


def test_a_job_that_was_asked_to_stop_ends_as_cancelled(
    store: MockTaskStore, dead: str, make_runner: MakeRunner
) -> None:
    """Any end after a request is cancelled; the error says what happened."""
    left = job_of(store, dead, Queued(), Started(), CancelRequested(reason="stop"))
    ended = make_runner().get(left.job_id)
    assert (ended.status, ended.cancel_reason, ended.error) == (JobStatus.CANCELLED, "stop", DIED)


def test_a_living_runners_jobs_are_never_touched(
    store: MockTaskStore, make_runner: MakeRunner, turns: Turns, ask: Ask
) -> None:
    """Another runner starts, lists, waits and recovers; the job goes on."""
    first = make_runner()
    job = first.submit(ask())
    turns["work"].until_started()
    second = make_runner()
    second.recover()
    second.list()
    assert not second.await_job(job.job_id, timeout=0).terminal
    assert not second.get(job.job_id).terminal
    turns["work"].finish.set()
    assert first.await_job(job.job_id).status is JobStatus.COMPLETED


@pytest.mark.parametrize("call", ["get", "list", "await_job", "cancel", "cancel_session"])
def test_every_call_that_meets_a_dead_runners_job_ends_it(store: MockTaskStore, sid: str, call: str) -> None:
    """Without a restart, by a client that has no pool."""
    left = job_of(store, "died-without-a-trace", Queued(), Started())
    with JobClient(store) as client:
        if call == "list":
            assert [job.status for job in client.list(sid)] == [JobStatus.ERRORED]
            assert client.list(sid, status="running") == []
        elif call == "cancel_session":
            assert [job.error for job in client.cancel_session(sid)] == [DIED]
        else:
            assert getattr(client, call)(left.job_id).error == DIED
    assert store.get(left.job_id).error == DIED


def test_of_two_recoveries_at_once_the_second_takes_the_firsts_end(store: MockTaskStore, dead: str) -> None:
    """The job ends by another hand between the look and the end: there is one end, and it is told as it is."""
    left = job_of(store, dead, Queued(), Started())
    recovery = Recovery(store, store.new_id)

    def be_first(job: Job) -> None:
        store.apply(job.job_id, Errored(event_id="first", error="I was first"))

    recovery.before_end.append(be_first)
    (ended,) = recovery.run()
    assert (ended.error, store.get(left.job_id).error) == ("I was first", "I was first")
    assert [t.status.value for t in store.history(left.job_id)] == ["pending", "queued", "running", "errored"]


def test_a_wait_ends_when_the_runner_dies(store: MockTaskStore, sid: str, clock: FakeClock) -> None:
    """Its lease is looked at about as often as the session."""
    lease = store.leases.acquire("mortal")
    left = job_of(store, "mortal", Queued(), Started())
    got: list[Job] = []
    with JobClient(store) as client:
        thread = threading.Thread(target=lambda: got.append(client.await_job(left.job_id)))
        thread.start()
        clock.until_waiting(2)
        clock.advance(0.3)
        clock.until_waiting(2)
        assert not got
        lease.release()
        clock.advance(0.3)
        thread.join(10)
    assert got[0].error == DIED


def test_a_session_that_cannot_be_recovered_now_is_left_for_the_next_time(
    store: MockTaskStore, dead: str, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A busy or damaged session is logged; the dead runner's folder stays until all is done."""
    left = job_of(store, dead, Queued())
    apply = store.apply_later
    monkeypatch.setattr(store, "apply_later", lambda *args: (_ for _ in ()).throw(errors.SessionBusy()))
    runner = make_runner()
    assert "could not be recovered" in caplog.text
    assert store.leases.dead() == [dead]
    assert runner.get(left.job_id).status is JobStatus.QUEUED
    monkeypatch.setattr(store, "apply_later", apply)
    assert [job.job_id for job in runner.recover()] == [left.job_id]
    assert store.leases.dead() == []


@pytest.mark.timeout(20)
def test_the_jobs_of_a_session_are_ended_together(
    store: MockTaskStore, dead: str, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ends of a session are handed in, in the order of the jobs' creation, before any is waited for: they share
    a batch, so a start after a crash costs syncs by the session and not by the job."""
    left = [job_of(store, dead, Queued()).job_id for _ in range(20)]
    apply_later = store.apply_later
    handed_in: list[tuple[str, Any, Future[Job]]] = []

    def held_back(job_id: str, *events: Any) -> Future[Job]:
        """Nothing is committed before everything is here; who waits for the first end waits for ever."""
        handed_in.append((job_id, events, Future()))
        if len(handed_in) == len(left):
            for each, its, answer in handed_in:
                answer.set_result(apply_later(each, *its).result())
        return handed_in[-1][2]

    monkeypatch.setattr(store, "apply_later", held_back)
    make_runner()
    assert [job_id for job_id, _, _ in handed_in] == left
    assert {store.get(job_id).error for job_id in left} == {DIED}


def test_a_session_that_is_gone_does_not_keep_recovery_busy(
    store: MockTaskStore, dead: str, make_runner: MakeRunner
) -> None:
    """Marked, and deleted since."""
    store.active.mark(dead, "deleted-session")
    make_runner()
    assert store.leases.dead() == []


def test_the_steps_of_recovery_are_replaceable_and_contained(
    store: MockTaskStore, sid: str, runner: JobRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """Leftovers are ended before the end is written, logs completed after it; a failure is logged."""
    seen: list[tuple[str, bool]] = []
    runner.recovery.before_end.append(lambda job: seen.append(("before", store.get(job.job_id).terminal)))
    runner.recovery.after_end.append(lambda job: seen.append(("after", job.terminal)))
    runner.recovery.after_end.append(lambda job: 1 / 0)  # type: ignore[arg-type,return-value]
    left = job_of(store, "gone", Queued(), Started())
    assert runner.get(left.job_id).error == DIED
    assert seen == [("before", False), ("after", True)]
    assert "a step of the recovery" in caplog.text


# --- the client --------------------------------------------------------------------------------------------


def test_a_client_reads_what_a_runner_does(store: MockTaskStore, runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """get and list, by id or by its beginning."""
    job = runner.submit(ask())
    with JobClient(store) as client:
        assert client.get(job.job_id[:8]).job_id == job.job_id
        assert [row.job_id for row in client.list(status=["queued", "running"])] == [job.job_id]
        with pytest.raises(errors.UnknownJob):
            client.get("00000000-0000-4000-8000-000000000000")
    with pytest.raises(errors.Closed):
        client.get(job.job_id)


@pytest.mark.parametrize("state", ["running", "queued"])
def test_a_cancel_from_outside_is_obeyed_within_half_a_second(
    store: MockTaskStore, make_runner: MakeRunner, turns: Turns, ask: Ask, clock: FakeClock, state: str
) -> None:
    """The client commits a request and gets the present status; the owner ends the job, and alone does so."""
    runner = make_runner(1)
    first, second = runner.submit(ask("running")), runner.submit(ask("queued"))
    turns["running"].until_started()
    eventually(lambda: runner.get(first.job_id).status is JobStatus.RUNNING)
    job = first if state == "running" else second
    with JobClient(store) as client:
        asked = client.cancel(job.job_id, "from outside")
        assert (asked.status.value, asked.cancel_reason) == (state, "from outside")
        assert client.cancel(job.job_id, "again").cancel_reason == "from outside"
    clock.advance(0.45)
    ended = runner.await_job(job.job_id)
    assert (ended.status, ended.cancel_reason) == (JobStatus.CANCELLED, "from outside")
    kinds = [t.kind for t in store.history(job.job_id)]
    assert kinds.count("cancel-request") == 1
    assert state == "running" or "queued" not in turns.order


def test_a_cancel_from_outside_reaches_descendants_everywhere(
    store: MockTaskStore, make_runner: MakeRunner, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """The child runs on another runner than its parent."""
    one, two = make_runner(), make_runner()
    parent = one.submit(ask("parent"))
    child = two.submit(ask("child", parent_job_id=parent.job_id))
    grandchild = one.submit(ask("grandchild", parent_job_id=child.job_id))
    for prompt in ("parent", "child", "grandchild"):
        turns[prompt].until_started()
    with JobClient(store) as client:
        client.cancel(parent.job_id)
    clock.advance(0.45)
    assert one.await_job(parent.job_id).status is JobStatus.CANCELLED
    assert two.await_job(child.job_id).status is JobStatus.CANCELLED
    assert one.await_job(grandchild.job_id).status is JobStatus.CANCELLED


def test_a_cancel_reaches_own_jobs_under_another_runners_job(
    make_runner: MakeRunner, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """Parent here, child on the other runner, grandchild here again."""
    one, two = make_runner(), make_runner()
    parent = one.submit(ask("parent"))
    child = two.submit(ask("child", parent_job_id=parent.job_id))
    grandchild = one.submit(ask("grandchild", parent_job_id=child.job_id))
    for prompt in ("parent", "child", "grandchild"):
        turns[prompt].until_started()
    one.cancel(parent.job_id, "all of it")
    assert one.await_job(grandchild.job_id).cancel_reason == f"its ancestor {parent.job_id} was cancelled: all of it"
    eventually(lambda: two.get(child.job_id).cancel_requested_at or two.store.get(child.job_id).cancel_requested_at)
    clock.advance(0.45)
    assert two.await_job(child.job_id).status is JobStatus.CANCELLED


def test_a_runner_asks_another_runner_to_stop_its_job(
    store: MockTaskStore, make_runner: MakeRunner, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """`cancel` on a runner that is not the one named in the row."""
    one, two = make_runner(), make_runner()
    job = one.submit(ask())
    turns["work"].until_started()
    asked = two.cancel(job.job_id, "from the other one")
    assert not asked.terminal
    clock.advance(0.45)
    assert one.await_job(job.job_id).cancel_reason == "from the other one"


def test_a_client_waits_for_all_or_any(
    store: MockTaskStore, make_runner: MakeRunner, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """As a runner does; nothing is left of the wait."""
    runner = make_runner()
    ids = [runner.submit(ask(prompt)).job_id for prompt in ("slow", "fast")]
    turns["fast"].finish.set()
    runner.await_job(ids[1])
    with JobClient(store) as client:
        slow, fast = client.await_tasks(ids, mode="any")
        assert (slow.terminal, fast.terminal) == (False, True)
        assert not client.heads._watches
        turns["slow"].finish.set()
        runner.await_job(ids[0])
        got: list[list[Job]] = []
        thread = threading.Thread(target=lambda: got.append(client.await_tasks(ids)))
        thread.start()
        eventually(lambda: not thread.is_alive() or client.heads._watches)
        clock.advance(0.5)
        thread.join(10)
        assert [job.status for job in got[0]] == [JobStatus.COMPLETED] * 2


def test_a_finished_job_is_not_cancelled_from_outside(
    store: MockTaskStore, runner: JobRunner, turns: Turns, ask: Ask
) -> None:
    """It is returned as it is."""
    turns.finish_all()
    ended = runner.await_job(runner.submit(ask()).job_id)
    with JobClient(store) as client:
        assert client.cancel(ended.job_id) == ended


def test_a_client_without_work_has_no_thread(store: MockTaskStore, sid: str) -> None:
    """Reading starts none."""
    before = threading.active_count()
    with JobClient(store) as client:
        client.list()
        assert threading.active_count() == before
