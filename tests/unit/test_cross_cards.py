"""Cards in the session of a job's caller: the target commits first, the card follows (spec 003, D6 and D8)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnResult, errors
from openjobs.jobs import Cancelled, Completed, Errored, Job, Queued, Started
from openjobs.runner import Ended, EndStep, JobClient
from openjobs.runner.recovery import Recovery
from openjobs.session import Node, cards
from openjobs.store import Session
from tests.support import FakeClock, eventually
from tests.support.jobs import clean, job_for
from tests.support.turns import Turns


@pytest.fixture
def store(clock: FakeClock) -> Iterator[MockTaskStore]:
    store = MockTaskStore(clock=clock)
    store.create_session("target")
    store.create_session("caller")
    store.session("target").append("user", "hello target")
    store.session("caller").append("user", "hello caller")
    yield store
    clean(store)
    store.close()


@pytest.fixture
def runner(store: MockTaskStore, turns: Turns) -> Iterator[JobRunner]:
    runner = JobRunner(store, 2, turns)
    yield runner
    turns.finish_all()
    eventually(runner._roster.idle.is_set)
    runner.shutdown()


@pytest.fixture
def caller(store: MockTaskStore) -> Session:
    return store.session("caller")


def ask(prompt: str = "probe", **fields: Any) -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id="target", caller_session_id="caller", **fields)


def card_of(session: Session, job: Job) -> Node | None:
    return next((node for node in session.nodes() if node.id == job.attach_id), None)


def status_of(session: Session, job: Job) -> str | None:
    card = card_of(session, job)
    return cards.status_of(card) if card is not None else None


def test_the_card_is_in_the_callers_session_and_names_the_target(
    store: MockTaskStore, runner: JobRunner, turns: Turns, caller: Session
) -> None:
    """Running after admission, its end after the terminal commit; the target's session has no card of it."""
    job = runner.submit(ask())
    assert eventually(lambda: status_of(caller, job)) == "running"
    turns["probe"].finish.set()
    ended = runner.await_job(job.job_id)
    eventually(lambda: status_of(caller, job) == "completed")
    card = card_of(caller, job)
    assert card is not None
    assert card.content == "did probe"
    assert card.parent == caller.head_id
    assert card.extra["attach"] == {
        "job_id": job.job_id,
        "session_id": "target",
        "status": "completed",
        "head_id": ended.head_id,
        "source_commit_id": store.running_commit(ended),
    }
    assert store.running_commit(ended) is not None
    assert card_of(store.session("target"), job) is None


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Completed(event_id="e", result_text="found it"), "found it"),
        (Errored(event_id="e", error="ValueError: no"), "[task error] ValueError: no"),
        (Cancelled(event_id="e", result_text="half"), "half\n[cancelled at 2026-01-02T03:04:05.000Z]"),
    ],
)
def test_a_turn_of_the_caller_sees_each_end_as_what_it_is(
    store: MockTaskStore, caller: Session, end: Any, text: str
) -> None:
    """The attach rules hold for jobs of other sessions too: running is not seen, each end as its own text."""
    job = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id="r"))
    store.mirror_later(job).result()
    store.apply(job.job_id, Started())
    assert [item.text for item in caller.context()] == ["hello caller"]
    store.mirror_later(store.apply(job.job_id, end)).result()
    assert [item.text for item in caller.context()] == ["hello caller", text]
    assert store.session("target").messages() == [{"role": "user", "content": "hello target"}]


def test_the_branch_of_a_job_elsewhere_can_be_seen(store: MockTaskStore, caller: Session) -> None:
    """On request the messages of its branch in the target's session stand in place of the result."""
    job = store.create(job_for(store, "target", "look", caller_session_id="caller"), Queued(runner_id="r"))
    store.apply(job.job_id, Started())
    store.mirror_later(store.apply(job.job_id, Completed(event_id="e", result_text="found it"))).result()
    seen = [(item.role, item.text) for item in caller.context(expand_branches=True)]
    assert seen == [("user", "hello caller"), ("user", "look"), ("assistant", "found it")]


def test_a_branch_that_cannot_be_read_is_said_with_the_result(store: MockTaskStore, caller: Session) -> None:
    """The result is in the caller's own card; that the branch is out of reach is no secret."""
    job = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id="r"))
    store.apply(job.job_id, Started())
    store.mirror_later(store.apply(job.job_id, Completed(event_id="e", result_text="found it"))).result()
    del store._repositories["target"]
    store._open.pop("target")
    text = caller.context(expand_branches=True)[-1].text
    assert text == "[its branch in session target cannot be read (UnknownSession); its result:]\nfound it"


def test_a_card_never_goes_back(store: MockTaskStore, caller: Session) -> None:
    """A running card that comes late, or the same end again, changes nothing."""
    job = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id="r"))
    running = store.apply(job.job_id, Started())
    ended = store.apply(job.job_id, Completed(event_id="e", result_text="found it"))
    assert store.mirror_later(ended).result() is True
    before = store.head("caller")
    assert store.mirror_later(running).result() is False
    assert store.mirror_later(ended).result() is False
    assert store.head("caller") == before


def test_the_card_hangs_on_the_callers_message(store: MockTaskStore, caller: Session) -> None:
    """The one that was named; else the head at submit, wherever the conversation has gone since."""
    first = caller.head_id
    caller.append("assistant", "more")
    named = store.create(
        job_for(store, "target", "named", caller_session_id="caller", caller_msg_id=first), Queued(runner_id="r")
    )
    head = caller.head_id
    other = store.create(job_for(store, "target", "other", caller_session_id="caller"), Queued(runner_id="r"))
    caller.append("user", "even more")
    for job in (named, other):
        store.mirror_later(job).result()
    assert [getattr(card_of(caller, job), "parent", "") for job in (named, other)] == [first, head]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"caller_session_id": "nowhere"}, errors.UnknownSession),
        ({"caller_session_id": "caller", "caller_msg_id": "nothing"}, errors.UnknownNode),
        ({"caller_session_id": "target", "caller_msg_id": "x"}, errors.InvalidInput),
        ({"caller_session_id": None, "caller_msg_id": "x"}, errors.InvalidInput),
        ({"caller_session_id": "caller", "caller_msg_id": "../x"}, errors.InvalidInput),
    ],
)
def test_a_caller_that_is_not_there_is_refused(
    store: MockTaskStore, runner: JobRunner, fields: dict[str, Any], error: type[Exception]
) -> None:
    """Nothing is written: neither a job nor a card."""
    with pytest.raises(error):
        runner.submit(SpawnRequest(**{"prompt": "x", "parent_session_id": "target", **fields}))
    assert store.list() == []


def test_ownership_is_the_session_or_the_callers(store: MockTaskStore, runner: JobRunner, turns: Turns) -> None:
    """A session sees its own jobs and those it asked for elsewhere, and no others; ids are found by the index."""
    turns.finish_at_once = True
    elsewhere = runner.submit(ask("elsewhere"))
    own = runner.submit(SpawnRequest(prompt="own", parent_session_id="caller"))
    foreign = runner.submit(SpawnRequest(prompt="foreign", parent_session_id="target"))
    assert [job.owned_by("caller") for job in (elsewhere, own, foreign)] == [True, True, False]
    assert [job.owned_by("target") for job in (elsewhere, own, foreign)] == [True, False, True]
    assert {job.job_id for job in runner.visible("caller")} == {elsewhere.job_id, own.job_id}
    assert {job.job_id for job in runner.visible("target")} == {elsewhere.job_id, foreign.job_id}
    runner.await_tasks([elsewhere.job_id, own.job_id])
    assert {job.job_id for job in runner.visible("caller", status=JobStatus.COMPLETED)} == {
        elsewhere.job_id,
        own.job_id,
    }
    assert len(runner.visible("caller", limit=1)) == 1
    assert runner.visible("caller", limit=0) == []
    assert [job.job_id for job in runner.visible("caller", status=JobStatus.QUEUED)] == []
    with JobClient(store) as client:
        assert {job.job_id for job in client.visible("caller")} == {elsewhere.job_id, own.job_id}


class Held:
    """`store.mirror_later` that answers with an error for as long as a test says."""

    def __init__(self, store: MockTaskStore, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = error
        self.tries = 0
        real = store.mirror_later

        def mirror_later(job: Job) -> Any:
            self.tries += 1
            if self.error is not None:
                raise self.error
            return real(job)

        monkeypatch.setattr(store, "mirror_later", mirror_later)


@pytest.mark.parametrize(
    "error", [errors.SessionBusy(), errors.Damaged("broken", path="x"), errors.StoreWriteFailed("full"), OSError(5)]
)
def test_a_callers_session_that_cannot_be_written_delays_the_card_only(
    store: MockTaskStore,
    runner: JobRunner,
    turns: Turns,
    caller: Session,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """The job ends and its waiters are woken; the marker stays; the card comes when it can, then the marker goes."""
    held = Held(store, error, monkeypatch)
    turns.finish_at_once = True
    job = runner.submit(ask())
    assert runner.await_job(job.job_id).status is JobStatus.COMPLETED
    assert runner.wait_idle()
    assert runner.stats().cards_waiting == 1
    assert status_of(caller, job) is None
    clock.advance(120)
    runner._markers.sweep()
    assert store.active.sessions(runner.runner_id) == ["target"]
    held.error = None

    def tried_again() -> bool:
        clock.advance(6)
        return runner.stats().cards_waiting == 0

    eventually(tried_again)
    assert status_of(caller, job) == "completed"
    clock.advance(120)
    runner._markers.sweep()
    assert store.active.sessions(runner.runner_id) == []


def test_a_callers_session_that_is_gone_needs_no_card(
    store: MockTaskStore, runner: JobRunner, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tried for ever, and the runner leaves no work behind."""
    job = runner.submit(ask())
    eventually(lambda: runner.stats().cards_waiting == 0)
    held = Held(store, errors.UnknownSession("gone"), monkeypatch)
    turns["probe"].finish.set()
    assert runner.await_job(job.job_id).status is JobStatus.COMPLETED
    eventually(lambda: runner.stats().cards_waiting == 0)
    assert held.tries >= 1
    held.error = None
    store.mirror_later(store.get(job.job_id)).result()


@pytest.mark.parametrize("error", [errors.SessionBusy("held"), ZeroDivisionError("a fault of ours")])
def test_a_card_that_fails_again_and_again_is_complained_of_once(
    store: MockTaskStore,
    runner: JobRunner,
    turns: Turns,
    caller: Session,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """Whatever the reason; a fault of ours is no reason to give up, and is said with its place."""
    held = Held(store, error, monkeypatch)
    turns.finish_at_once = True
    job = runner.submit(ask())
    assert runner.await_job(job.job_id).terminal

    def tried(times: int) -> bool:
        clock.advance(6)
        return held.tries >= times

    eventually(lambda: tried(5))
    said = [record for record in caplog.records if "its card in session caller" in record.getMessage()]
    assert [(record.levelname, record.exc_info is not None) for record in said] == [
        ("WARNING", False) if isinstance(error, errors.SessionBusy) else ("ERROR", True)
    ]
    held.error = None
    eventually(lambda: tried(held.tries) and runner.stats().cards_waiting == 0)
    assert status_of(caller, job) == "completed"


def test_a_card_that_fails_as_its_runner_closes_is_not_tried_again(
    store: MockTaskStore, turns: Turns, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    """Its write is under way when the runner closes, and fails after that: it is recovery's now."""
    under_way: list[Future[bool]] = []

    def mirror_later(job: Job) -> Future[bool]:
        under_way.append(Future())
        return under_way[-1]

    with monkeypatch.context() as patch:
        patch.setattr(store, "mirror_later", mirror_later)
        turns.finish_at_once = True
        first = JobRunner(store, 1, turns)
        job = first.submit(ask())
        assert first.await_job(job.job_id).terminal
        first.shutdown(timeout=0)
        assert len(under_way) == 1
        under_way[0].set_exception(errors.SessionBusy("held"))
        clock.advance(60)
        assert len(under_way) == 1
    with JobRunner(store, 1, turns) as second:
        assert status_of(store.session("caller"), job) == "completed"
        assert second.recover() == []


def test_what_a_closing_runner_cannot_write_is_left_to_recovery(
    store: MockTaskStore, turns: Turns, caller: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease and marker stay, and the next runner writes the card before it takes them away."""
    held = Held(store, errors.SessionBusy(), monkeypatch)
    turns.finish_at_once = True
    first = JobRunner(store, 1, turns)
    job = first.submit(ask())
    assert first.await_job(job.job_id).terminal
    first.shutdown(timeout=0)
    assert store.leases.dead() == [first.runner_id]
    assert status_of(caller, job) is None
    held.error = None
    with JobRunner(store, 1, turns) as second:
        assert status_of(caller, job) == "completed"
        assert store.leases.dead() == []
        assert second.recover() == []


def test_the_order_is_commit_fact_card_and_nobody_waits_for_the_card(
    store: MockTaskStore, turns: Turns, caller: Session
) -> None:
    """When the card is begun, the end is durable in the target and its fact is written; hub and waiters follow."""
    order: list[str] = []
    runner = JobRunner(store, 1, turns)
    real = store.mirror_later

    def noting(step: EndStep) -> None:
        before = runner.ending.set(step, lambda ended: None)

        def note(ended: Ended) -> None:
            order.append(step.value)
            before(ended)

        runner.ending.set(step, note)

    noting(EndStep.FACT)
    noting(EndStep.HUB)

    def mirror_later(job: Job) -> Any:
        if job.terminal:
            order.append(f"card of {store.get(job.job_id).status.value}")
        return real(job)

    store.mirror_later = mirror_later  # type: ignore[method-assign]
    turns.finish_at_once = True
    job = runner.submit(ask())
    runner.await_job(job.job_id)
    eventually(lambda: runner.stats().cards_waiting == 0)
    runner.shutdown()
    assert order[:3] == ["fact", "card of completed", "hub"]
    assert status_of(caller, job) == "completed"


def test_recovery_ends_the_job_and_its_card(store: MockTaskStore, caller: Session) -> None:
    """A runner that died with a job of another session's caller: errored, and the caller's card says so."""
    lease = store.leases.acquire("dead")
    store.active.mark("dead", "target")
    job = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id="dead"))
    store.mirror_later(job).result()
    store.apply(job.job_id, Started())
    lease.release()
    with JobRunner(store, 1, lambda request, event: TurnResult()) as runner:
        assert runner.get(job.job_id).status is JobStatus.ERRORED
        eventually(lambda: status_of(caller, job) == "errored")
    assert caller.context()[-1].text == "[task error] worker died before completion"


def test_who_meets_a_dead_runners_job_mends_its_card_too(store: MockTaskStore, caller: Session) -> None:
    """A client without a pool: reading the job is enough."""
    store.leases.acquire("dead").release()
    job = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id="dead"))
    with JobClient(store) as client:
        assert client.get(job.job_id).status is JobStatus.ERRORED
    eventually(lambda: status_of(caller, job) == "errored")


@pytest.fixture
def dead(store: MockTaskStore) -> str:
    """A runner that had worked in `target`, and is gone."""
    lease = store.leases.acquire("dead")
    store.active.mark("dead", "target")
    lease.release()
    return "dead"


def finished(store: MockTaskStore, runner_id: str) -> Job:
    """A job of another session's caller, whose card was never written."""
    job = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id=runner_id), Started())
    return store.apply(job.job_id, Completed(event_id=store.new_id(), result_text="done"))


@pytest.mark.parametrize("error", [errors.SessionBusy("held"), OSError(28, "no space")])
def test_a_card_that_a_recovery_cannot_write_is_left_to_the_next(
    store: MockTaskStore, dead: str, caller: Session, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The marker and the lease stay until it is written."""
    job = finished(store, dead)
    recovery = Recovery(store, store.new_id)
    mirror = recovery.mirror
    failed: Future[bool] = Future()
    failed.set_exception(error)
    recovery.mirror = lambda job: failed
    assert recovery.run() == []
    assert (store.active.sessions(dead), store.leases.dead()) == (["target"], [dead])
    assert "could not be written" in caplog.text
    recovery.mirror = mirror
    assert recovery.run() == []
    assert status_of(caller, job) == "completed"
    assert (store.active.sessions(dead), store.leases.dead()) == ([], [])


@pytest.mark.parametrize("when", ["before the look", "after it"])
def test_a_recovery_writes_no_card_where_the_callers_session_is_gone(
    store: MockTaskStore, dead: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Nothing is left to do, and nothing stays behind."""
    job = finished(store, dead)
    recovery = Recovery(store, store.new_id)
    documents = store.documents
    asked: list[str] = []

    def gone(session_id: str) -> Any:
        if session_id == "caller":
            raise errors.UnknownSession(session_id)
        return documents(session_id)

    def mirror(job: Job) -> Future[bool]:
        asked.append(job.job_id)
        raise errors.UnknownSession("caller")

    recovery.mirror = mirror
    with monkeypatch.context() as patch:
        if when == "before the look":
            patch.setattr(store, "documents", gone)
        assert recovery.run() == []
    assert len(asked) == (when == "after it")
    assert store.leases.dead() == []
    store.mirror_later(job).result()


def test_a_recovery_looks_only_after_cards_of_the_dead(
    store: MockTaskStore, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living runner's card is its own affair, also where it is behind; one that cannot be read is tried; what runs
    has no end to show."""
    held = store.leases.acquire("alive")
    try:
        behind = finished(store, "alive")
        begun = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id="alive"))
        jobs = [finished(store, dead), finished(store, dead)]
        real = store.documents

        def unreadable(session_id: str) -> Any:
            if session_id == "caller":
                raise errors.Damaged("broken", path="history.json")
            return real(session_id)

        recovery = Recovery(store, store.new_id)
        asked: list[str] = []
        mirror = recovery.mirror

        def noted(job: Job) -> Future[bool]:
            asked.append(job.job_id)
            return mirror(job)

        recovery.mirror = noted
        with monkeypatch.context() as patch:
            patch.setattr(store, "documents", unreadable)
            recovery.run()
        assert sorted(asked) == sorted(job.job_id for job in jobs)
        for job in (behind, begun):
            store.mirror_later(job).result()
    finally:
        held.release()


@pytest.mark.parametrize("fault", ["missing", "running", "ahead", "no row"])
def test_fsck_finds_a_card_that_disagrees_with_its_row(store: MockTaskStore, fault: str) -> None:
    """In the caller's session: one that is missing or behind with nobody to mend it, and one that is ahead."""
    job = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id="r"))
    running = store.apply(job.job_id, Started())
    mended: list[Any] = []
    if fault == "no row":
        stray = job_for(store, "target", caller_session_id="caller", attach_id="stray")
        store.mirror_later(stray).result()
        store.mirror_later(running).result()
        assert "does not have" in str(store.fsck("caller").findings[0])
        store._repositories.pop("caller")
        store._open.pop("caller")
        store.create_session("caller")
        mended.append(running)
    elif fault == "ahead":
        ended = store.apply(job.job_id, Completed(event_id="e", result_text="x"))
        wrong = Node(
            id=job.attach_id or "", role="system", function="attach", created_at=store.clock.now(),
            extra={"attach": {"job_id": job.job_id, "session_id": "target", "status": "errored"}},
        )  # fmt: skip
        store.session("caller").append("system", "", root=True, node_id=wrong.id, function="attach", extra=wrong.extra)
        assert "it is completed" in str(store.fsck("caller").findings[0])
        assert "says errored" in str(store.fsck("target").findings[0])
        store._repositories.pop("caller")
        store._open.pop("caller")
        store.create_session("caller")
        mended.append(ended)
    else:
        if fault == "running":
            store.mirror_later(running).result()
            mended.append(store.apply(job.job_id, Completed(event_id="e", result_text="x")))
        else:
            mended.append(running)
        assert "card" in str(store.fsck("target").findings[0])
        store.active.mark("r", "target")  # somebody sees to it
        assert store.fsck("target").clean
        store.active.clear("r", "target")
    for each in mended:
        store.mirror_later(each).result()
