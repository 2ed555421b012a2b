"""Notices: a conversation is told once of what has ended in the background (spec 000; design, *Notices*)."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs import GitJobStore, JobRunner, MockTaskStore, SpawnRequest, TurnResult, errors
from openjobs.aio import AsyncJobRunner
from openjobs.jobs import STAGES, Completed, Errored, Job, NoticeStage, Queued, Started, noticed, transition
from openjobs.runner.notices import Notices
from openjobs.session import Node
from openjobs.session.history import NOTICE, events_of
from openjobs.session.notices import Notice, of_job, text_of
from openjobs.store import JobStore, Session
from openjobs.store.notices import pending_jobs
from tests.support import FakeClock, eventually, git
from tests.support.child import forked
from tests.support.clock import START
from tests.support.jobs import clean, job_for
from tests.support.turns import Turns


@pytest.fixture(params=["mock", "git"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[JobStore]:
    store = (
        MockTaskStore(clock=clock)
        if request.param == "mock"
        else GitJobStore(tmp_path / "home", durability="relaxed", clock=clock)
    )
    store.create_session("s1")
    store.session("s1").append("user", "hello")
    yield store
    clean(store)
    store.close()


@pytest.fixture
def notices(store: JobStore) -> Iterator[Notices]:
    notices = Notices(store)
    yield notices
    notices.close()


@pytest.fixture
def session(store: JobStore) -> Session:
    return store.session("s1")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and pauses of a hundredth of a second."""
    monkeypatch.setattr("openjobs.runner.notices._PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr("openjobs.runner.notices.LOOK_S", 0.01)


def ended(store: JobStore, label: str = "probe", session_id: str = "s1", **fields: Any) -> Job:
    """A background job that has completed."""
    fields = {"notice": NoticeStage.WANTED, **fields}
    job = store.create(job_for(store, session_id, label, **fields), Queued(runner_id="r"))
    store.apply(job.job_id, Started())
    return store.apply(job.job_id, Completed(event_id=store.new_id(), result_text=f"result of {label}"))


def ended_together(store: JobStore, *stages: NoticeStage | None) -> list[Job]:
    """As many jobs, in few trips to the disk."""
    futures = []
    for number, stage in enumerate(stages):
        job = job_for(store, "s1", f"job {number}", notice=stage)
        end = Completed(event_id=store.new_id(), result_text="x")
        futures.append(store.create_later(job, Queued(runner_id="r"), Started(), end, fresh_id=True))
    return [future.result() for future in futures]


def told(session: Session) -> list[Node]:
    return [node for node in session.nodes() if node.function == NOTICE]


def stage_of(store: JobStore, job: Job) -> NoticeStage | None:
    return store.get(job.job_id).notice


# --- recorded ------------------------------------------------------------------------------------------


def test_the_end_of_a_background_job_is_recorded_with_it(store: JobStore, notices: Notices) -> None:
    """In the terminal commit, whatever the end; of a job that nobody wants to be told of nothing is."""
    job = store.create(job_for(store, "s1", "one", notice=NoticeStage.WANTED), Queued(runner_id="r"))
    assert job.notice is NoticeStage.WANTED
    assert notices.pending("s1") == []
    lost = store.apply(job.job_id, Errored(event_id="e1", error="worker died before completion"))
    assert lost.notice is NoticeStage.RECORDED
    assert ended(store, "foreground", notice=None).notice is None
    found = notices.pending("s1")
    assert [(n.event_id, n.kind, n.id, n.status, n.label, n.excerpt) for n in found] == [
        ("e1", "job", job.job_id, "errored", "one", "worker died before completion")
    ]


def test_a_stage_is_never_left_for_an_earlier_one() -> None:
    """Each cell of the table: where a notice is, and what it is brought to."""
    base = Job(
        job_id="j", subject="s", description="d", agent_id="main", created_at=START, parent_session_id="s1",
        notice=NoticeStage.WANTED,
    )  # fmt: skip
    assert noticed(base, NoticeStage.DELIVERED) is base  # it has not ended
    over = transition(base, Errored(event_id="e", error="x"), START)
    for here in STAGES[1:]:
        for to in STAGES:
            after = noticed(attrs.evolve(over, notice=here), to).notice
            assert after == max(here, to, key=STAGES.index)
    quiet = attrs.evolve(over, notice=None)
    assert all(noticed(quiet, to) is quiet for to in STAGES)


def test_what_was_asked_for_is_on_the_row(store: JobStore, session: Session) -> None:
    """`notify` makes a background job, and is part of what makes two requests the same."""
    with JobRunner(store, 1, lambda request, event: TurnResult(final_text="x")) as runner:
        job = runner.submit(SpawnRequest(prompt="p", parent_session_id="s1", origin_tool_call_id="c", notify=True))
        assert store.get(job.job_id).notice in (NoticeStage.WANTED, NoticeStage.RECORDED)
        with pytest.raises(errors.IdempotencyConflict):
            runner.submit(SpawnRequest(prompt="p", parent_session_id="s1", origin_tool_call_id="c"))
        runner.await_job(job.job_id)
        assert runner.submit(SpawnRequest(prompt="q", parent_session_id="s1")).notice is None


# --- delivered -----------------------------------------------------------------------------------------


def test_ten_ends_make_one_message(store: JobStore, notices: Notices, session: Session, clock: FakeClock) -> None:
    """One node at the head, in order of the ends, covering each by its id; a second delivery has nothing to say."""
    before = session.head_id
    jobs = []
    for number in range(10):
        jobs.append(ended(store, f"probe {number}"))
        clock.advance(1)
    node = notices.deliver("s1")
    assert node is not None
    assert session.head_id == node.id
    assert (node.parent, node.role, node.function) == (before, "user", NOTICE)
    assert events_of(node) == [job.event_id for job in jobs]
    lines = node.content.splitlines()
    assert lines[0] == "10 pieces of background work have ended:"
    assert lines[1] == f'- job {jobs[0].job_id} completed: "probe 0": result of probe 0'
    assert len(lines) == 12
    assert {stage_of(store, job) for job in jobs} == {NoticeStage.DELIVERED}
    assert notices.pending("s1") == []
    head = store.head("s1")
    assert notices.deliver("s1") is None
    assert store.head("s1") == head
    assert session.messages()[-1] == {"role": "user", "content": node.content}
    assert [item.kind.value for item in session.context()][-1] == "notice"


def test_a_conversation_without_messages_can_be_told(store: JobStore, notices: Notices) -> None:
    """The notice is its first message."""
    store.create_session("empty")
    ended(store, session_id="empty")
    node = notices.deliver("empty")
    assert node is not None
    assert (node.parent, store.session("empty").head_id) == (None, node.id)


def test_many_ends_over_many_pages_are_found_and_told_once(store: JobStore, notices: Notices, session: Session) -> None:
    """Rows in closed pages are found by their tags, and are not found again."""
    stages = [NoticeStage.WANTED if number % 7 == 0 else None for number in range(150)]
    jobs = ended_together(store, *stages)
    wanted = [job.event_id for job in jobs if job.notice is not None]
    assert [notice.event_id for notice in notices.pending("s1")] == wanted
    node = notices.deliver("s1")
    assert node is not None
    assert events_of(node) == wanted
    ended_together(store, *[None] * 80)
    assert notices.pending("s1") == []
    fresh = Notices(store)
    assert fresh.deliver("s1") is None
    assert len(told(session)) == 1


def test_nothing_is_put_behind_a_running_turn(store: JobStore, notices: Notices, session: Session) -> None:
    """While a foreground turn is unfinished the ends wait; the next turn's start tells them, before its prompt."""
    turns = Turns()
    with JobRunner(store, 2, turns) as runner:
        first = runner.submit(SpawnRequest(prompt="first", parent_session_id="s1", foreground=True))
        turns["first"].until_started()
        turns["job"].finish.set()
        job = runner.submit(SpawnRequest(prompt="job", parent_session_id="s1", notify=True))
        runner.await_job(job.job_id)
        assert runner.notices.deliver("s1") is None
        assert len(runner.notices.pending("s1")) == 1
        turns["first"].finish.set()
        answer = runner.await_job(first.job_id)
        assert session.head_id == answer.head_id
        turns["second"].finish.set()
        second = runner.submit(SpawnRequest(prompt="second", parent_session_id="s1", foreground=True))
        request = turns["second"].until_started()
        assert [item.kind.value for item in request.context][-1] == "notice"
        runner.await_job(second.job_id)
    branch = [node.content for node in session.branch()]
    assert branch[:3] == ["hello", "first", "did first"]
    assert branch[3].startswith("Background work has ended:\n- job ")
    assert branch[4:] == ["second", "did second"]
    assert len(told(session)) == 1


def test_a_turn_that_names_its_place_is_not_moved(store: JobStore, session: Session) -> None:
    """With a `parent_msg_id` of its own, or as a new root, a turn is told nothing; the ends stay pending."""
    with JobRunner(store, 1, lambda request, event: TurnResult(final_text="x")) as runner:
        ended(store)
        for fields in ({"parent_msg_id": session.head_id}, {"context_mode": "clean"}):
            job = runner.submit(SpawnRequest(prompt="p", parent_session_id="s1", foreground=True, **fields))
            runner.await_job(job.job_id)
        assert len(runner.notices.pending("s1")) == 1


def test_a_turn_starts_although_nobody_can_be_told(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that fails costs the turn nothing; the next one tells."""
    with JobRunner(store, 1, lambda request, event: TurnResult(final_text="x")) as runner:
        ended(store)

        def fails(session_id: str) -> None:
            raise errors.SessionBusy("held")

        with monkeypatch.context() as patch:
            patch.setattr(runner.notices, "deliver", fails)
            job = runner.submit(SpawnRequest(prompt="p", parent_session_id="s1", foreground=True))
        assert runner.await_job(job.job_id).result_text == "x"
        assert runner.notices.deliver("s1") is not None


def test_two_that_deliver_at_once_tell_each_end_once(store: JobStore, session: Session) -> None:
    """Four threads, each with notices of its own, while jobs end: every end is in exactly one message."""
    over = threading.Event()

    def deliver() -> None:
        mine = Notices(store)
        while not over.is_set():
            mine.deliver("s1")

    threads = [threading.Thread(target=deliver) for _ in range(4)]
    for thread in threads:
        thread.start()
    jobs = [ended(store, f"job {number}") for number in range(25)]
    over.set()
    for thread in threads:
        thread.join()
    Notices(store).deliver("s1")
    events = [event_id for node in told(session) for event_id in events_of(node)]
    assert sorted(events) == sorted(str(job.event_id) for job in jobs)
    assert [node.id for node in session.branch() if node.function == NOTICE] == [node.id for node in told(session)]


def test_what_stands_in_a_message_is_not_told_again_whatever_the_row_says(tmp_path: Path, clock: FakeClock) -> None:
    """Somebody checks out an older `jobs.json`: the stage comes back by the repair, and by the message."""
    with GitJobStore(tmp_path / "home", durability="relaxed", clock=clock) as store:
        store.create_session("s1")
        job = ended(store)
        before = store.head("s1")
        notices = Notices(store)
        assert notices.deliver("s1") is not None
        repo = tmp_path / "home" / "sessions" / "s1" / "repo"
        git("checkout", before, "--", "jobs.json", cwd=repo)
        git("-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q", "-m", "mine", cwd=repo)
        assert stage_of(store, job) is NoticeStage.RECORDED
        assert notices.deliver("s1") is None
        assert stage_of(store, job) is NoticeStage.DELIVERED
        assert len(told(store.session("s1"))) == 1
        assert store.fsck("s1").clean


# --- consumed ------------------------------------------------------------------------------------------


def test_who_read_the_result_is_not_told(store: JobStore, notices: Notices, session: Session) -> None:
    """Consumed before the delivery, once; a job that runs, or that nobody is told of, is left as it is."""
    job, quiet = ended(store), ended(store, notice=None)
    running = store.create(job_for(store, "s1", "runs", notice=NoticeStage.WANTED), Queued(runner_id="r"))
    assert notices.consume(job.job_id) is True
    assert notices.consume(job.job_id) is False
    assert notices.consume(quiet.job_id) is False
    assert notices.consume(running.job_id) is False
    assert (stage_of(store, job), stage_of(store, running)) == (NoticeStage.CONSUMED, NoticeStage.WANTED)
    assert notices.deliver("s1") is None
    assert told(session) == []
    with pytest.raises(errors.NotFound):
        notices.consume(store.new_id())


def test_a_host_with_its_own_conversation_acknowledges(store: JobStore, notices: Notices) -> None:
    """By event id, once, also in a process that did not see it pend; nothing is delivered then."""
    job = ended(store)
    assert notices.ack("nothing") is False
    assert Notices(store).ack(str(job.event_id)) is True
    assert notices.ack(str(job.event_id)) is False
    assert stage_of(store, job) is NoticeStage.CONSUMED
    assert notices.pending() == []
    assert notices.deliver("s1") is None


def test_a_notice_that_was_answered_is_consumed(store: JobStore, notices: Notices, session: Session) -> None:
    """With the next delivery: those with an assistant message behind them on the branch, and only those."""
    job = ended(store)
    notices.deliver("s1")
    second = ended(store, "second")
    notices.deliver("s1")
    assert stage_of(store, job) is NoticeStage.DELIVERED  # no answer yet
    session.append("assistant", "I see")
    aside = ended(store, "third")
    notices.deliver("s1")
    assert [stage_of(store, each) for each in (job, second, aside)] == [
        NoticeStage.CONSUMED,
        NoticeStage.CONSUMED,
        NoticeStage.DELIVERED,
    ]


def test_the_runner_shows_the_stage_as_it_is(store: JobStore) -> None:
    """What the runner remembers of ended jobs does not hide what came after the end."""
    with JobRunner(store, 1, lambda request, event: TurnResult(final_text="x")) as runner:
        job = runner.submit(SpawnRequest(prompt="p", parent_session_id="s1", notify=True))
        assert runner.await_job(job.job_id).notice is NoticeStage.RECORDED
        runner.notices.deliver("s1")
        assert runner.get(job.job_id).notice is NoticeStage.DELIVERED
        runner.notices.consume(job.job_id)
        assert runner.get(job.job_id).notice is NoticeStage.CONSUMED


# --- whose it is ---------------------------------------------------------------------------------------


def test_the_callers_conversation_is_told_of_a_job_elsewhere(store: JobStore, notices: Notices) -> None:
    """The message is in the caller's session, the stage on the row in the target's."""
    store.create_session("target")
    job = ended(store, "there", "target", caller_session_id="s1")
    store.mirror_later(job).result()
    assert [notice.target_session_id for notice in notices.pending("s1")] == ["target"]
    assert notices.pending("target") == []
    assert notices.deliver("target") is None
    node = notices.deliver("s1")
    assert node is not None
    assert events_of(node) == [job.event_id]
    assert stage_of(store, job) is NoticeStage.DELIVERED
    store.session("s1").append("assistant", "I see")
    ended(store, "another")
    notices.deliver("s1")
    assert stage_of(store, job) is NoticeStage.CONSUMED


def test_a_delivery_that_died_before_the_targets_row_is_finished_by_the_next(
    store: JobStore, notices: Notices, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is there, the row in the other session says recorded: it is neither pending nor told again."""
    store.create_session("target")
    job = ended(store, "there", "target", caller_session_id="s1")
    store.mirror_later(job).result()
    with monkeypatch.context() as patch:
        patch.setattr(Notices, "_note_jobs", lambda *a: (_ for _ in ()).throw(errors.StoreWriteFailed("full")))
        assert notices.deliver("s1") is not None
    assert stage_of(store, job) is NoticeStage.RECORDED
    assert notices.pending("s1") == []
    assert notices.deliver("s1") is None
    assert stage_of(store, job) is NoticeStage.DELIVERED
    assert len(told(session)) == 1


def test_what_a_running_job_started_is_that_jobs_to_hear_of(
    store: JobStore, notices: Notices, session: Session
) -> None:
    """Its own turn asks for it and acknowledges; what is left when it has ended is the conversation's."""
    parent = store.create(job_for(store, "s1", "parent"), Queued(runner_id="r"))
    store.apply(parent.job_id, Started())
    taken, left = (ended(store, label, parent_job_id=parent.job_id) for label in ("taken", "left"))
    assert notices.pending("s1") == []
    assert notices.deliver("s1") is None
    found = notices.pending("s1", job_id=parent.job_id)
    assert [notice.label for notice in found] == ["taken", "left"]
    assert notices.ack(found[0].event_id) is True
    store.apply(parent.job_id, Completed(event_id="end", result_text="done"))
    assert [notice.label for notice in notices.pending("s1")] == ["left"]
    node = notices.deliver("s1")
    assert node is not None
    assert events_of(node) == [left.event_id]
    assert stage_of(store, taken) is NoticeStage.CONSUMED


def test_all_sessions_at_once_leaves_out_what_cannot_be_read(
    store: JobStore, notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pending()` without a session; one that is damaged hides no other."""
    store.create_session("s2")
    store.create_session("broken")
    jobs = [ended(store, "a"), ended(store, "b", "s2")]
    real = store.documents

    def documents(session_id: str) -> Any:
        if session_id == "broken":
            raise errors.Damaged("broken", path="jobs.json")
        return real(session_id)

    with monkeypatch.context() as patch:
        patch.setattr(store, "documents", documents)
        assert {notice.event_id for notice in notices.pending()} == {job.event_id for job in jobs}
        with pytest.raises(errors.Damaged):
            notices.pending("broken")
    with pytest.raises(errors.UnknownSession):
        notices.pending("nowhere")
    with pytest.raises(errors.UnknownSession):
        notices.deliver("nowhere")


# --- listening -----------------------------------------------------------------------------------------


def test_a_callback_hears_what_is_pending_and_what_ends(store: JobStore) -> None:
    """At least once each, of one conversation or of all; and the next process hears what nobody took."""
    store.create_session("s2")
    early = ended(store, "early")
    with JobRunner(store, 2, lambda request, event: TurnResult(final_text="x")) as runner:
        everything: list[str] = []
        of_s2: list[str] = []
        with (
            runner.notices.subscribe(lambda notice: everything.append(notice.event_id)),
            runner.notices.subscribe(lambda notice: of_s2.append(notice.event_id), "s2"),
        ):
            jobs = [
                runner.await_job(runner.submit(SpawnRequest(prompt="p", parent_session_id=sid, notify=True)).job_id)
                for sid in ("s1", "s2")
            ]
            quiet = runner.submit(SpawnRequest(prompt="p", parent_session_id="s1"))
            runner.await_job(quiet.job_id)
            events = [str(job.event_id) for job in (early, *jobs)]
            eventually(lambda: set(everything) >= set(events))
            eventually(lambda: of_s2 == events[2:])
            assert runner.notices.ack(events[0]) is True
        assert set(everything) == set(events)
    with JobRunner(store, 1, lambda request, event: TurnResult()) as second:
        again: list[str] = []
        with second.notices.subscribe(lambda notice: again.append(notice.event_id)):
            eventually(lambda: set(again) == set(events[1:]))


def test_a_callback_comes_after_its_end_is_durable_and_may_take_its_time(store: JobStore) -> None:
    """It finds the ended row, and a slow one keeps no waiter."""
    hold, seen = threading.Event(), []

    def slow(notice: Notice) -> None:
        seen.append(store.get(notice.id).status.value)
        assert hold.wait(20)

    runner = JobRunner(store, 1, lambda request, event: TurnResult(final_text="x"))
    with runner, runner.notices.subscribe(slow):
        for _ in range(3):
            job = runner.submit(SpawnRequest(prompt="p", parent_session_id="s1", notify=True))
            assert runner.await_job(job.job_id, timeout=20).terminal
        hold.set()
        eventually(lambda: seen == ["completed"] * 3)


def test_a_callback_that_raises_is_called_again(store: JobStore, notices: Notices, hasty: None) -> None:
    """After a pause, until it returns; another listener does not notice."""
    calls: list[str] = []
    others: list[Notice] = []

    def callback(notice: Notice) -> None:
        calls.append(notice.event_id)
        if len(calls) < 4:
            raise RuntimeError("not now")

    job = ended(store)
    with notices.subscribe(callback), notices.subscribe(others.append):
        eventually(lambda: len(calls) == 4)
        eventually(lambda: len(others) == 1)
    assert set(calls) == {job.event_id}


def test_closing_ends_the_thread_and_says_so(store: JobStore) -> None:
    """A closed runner's notices take no listener, and tell the ones they had."""
    over = threading.Event()
    with JobRunner(store, 1, lambda request, event: TurnResult()) as runner:
        subscription = runner.notices.subscribe(lambda notice: None, on_end=over.set)
        assert [t.name for t in threading.enumerate() if t.name == "openjobs-notices"]
    assert over.is_set()
    assert subscription.closed
    assert not [t.name for t in threading.enumerate() if t.name == "openjobs-notices"]
    with pytest.raises(errors.Closed):
        runner.notices.subscribe(lambda notice: None)


def test_a_listener_may_come_and_go_from_its_own_callback(store: JobStore, notices: Notices) -> None:
    """Closing oneself, acknowledging and subscribing anew inside a call wait for nobody."""
    heard: list[str] = []

    def once(notice: Notice) -> None:
        subscription.close()
        assert notices.ack(notice.event_id) is True
        heard.append(notice.event_id)
        later.append(notices.subscribe(lambda other: heard.append(other.event_id)))

    later: list[Any] = []
    subscription = notices.subscribe(once)
    first = ended(store)
    notices.ended(first)
    eventually(lambda: later)
    second = ended(store, "second")
    notices.ended(second)
    eventually(lambda: second.event_id in heard)
    later[0].close()
    # At least once: what ends while a subscription begins may be among what was pending then, too.
    assert heard == [first.event_id, *[second.event_id] * heard.count(second.event_id)]


@pytest.mark.parametrize("whose", [None, "s1"])
def test_what_is_pending_and_cannot_be_read_is_heard_once_it_can(
    store: JobStore, notices: Notices, monkeypatch: pytest.MonkeyPatch, hasty: None, whose: str | None
) -> None:
    """A session is damaged, or its disk fails, when a listener comes: others are heard of at once, it as soon as it
    can be read."""
    store.create_session("s2")
    late, other = ended(store, "late"), ended(store, "other", "s2")
    real = store.documents
    tries: list[str] = []

    def documents(session_id: str) -> Any:
        if session_id == "s1" and len(tries) < 3:
            tries.append(session_id)
            raise errors.Damaged("broken", path="jobs.json") if len(tries) < 2 else OSError(5, "the disk failed")
        return real(session_id)

    monkeypatch.setattr(store, "documents", documents)
    heard: list[str] = []
    with notices.subscribe(lambda notice: heard.append(notice.event_id), whose):
        expected = [late.event_id] if whose else [other.event_id, late.event_id]
        eventually(lambda: heard == expected)
    assert len(tries) == 3


def test_a_home_that_cannot_be_listed_is_listed_later(
    store: JobStore, notices: Notices, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    """The listener comes at that moment, and hears of everything after it."""
    job = ended(store)
    real, failures = store.sessions, [OSError(24, "too many open files")] * 2

    def sessions() -> list[str]:
        if failures:
            raise failures.pop()
        return real()

    monkeypatch.setattr(store, "sessions", sessions)
    heard: list[str] = []
    with notices.subscribe(lambda notice: heard.append(notice.event_id)):
        eventually(lambda: heard == [job.event_id])


@pytest.mark.parametrize("session_id", ["nowhere", "../outside"])
def test_a_listener_of_no_session_hears_nothing(
    store: JobStore, notices: Notices, hasty: None, session_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read again and again for it, and nothing is complained of."""
    with notices.subscribe(lambda notice: pytest.fail("there is no such session"), session_id) as subscription:
        eventually(lambda: subscription.unread == [])
    assert caplog.records == []


def test_a_callback_that_failed_is_left_alone_for_its_pause(
    store: JobStore, notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same end comes by another way meanwhile: it is not called sooner, and other ends do not wait for it. Where
    it returned it is not called again."""
    monkeypatch.setattr("openjobs.runner.notices._PAUSES_S", (60.0, 60.0))
    calls: list[str] = []

    def callback(notice: Notice) -> None:
        calls.append(notice.event_id)
        if notice.label == "bad":
            raise RuntimeError("not now")

    with notices.subscribe(callback):
        bad = ended(store, "bad")
        notices.ended(bad)
        notices.ended(bad)
        good, last = ended(store, "good"), ended(store, "last")
        for job in (good, good, last):
            notices.ended(job)
        eventually(lambda: calls[-1:] == [last.event_id])
        assert calls == [bad.event_id, good.event_id, last.event_id]


def test_a_listener_whose_end_fails_keeps_no_other_from_its_own(store: JobStore) -> None:
    """Closing goes on: it is not the closer's fault."""
    notices, over = Notices(store), threading.Event()

    def broken() -> None:
        raise RuntimeError("no end")

    notices.subscribe(lambda notice: None, on_end=broken)
    notices.subscribe(lambda notice: None, on_end=over.set)
    notices.close()
    assert over.is_set()
    assert notices._thread is None


def test_what_is_remembered_is_bounded_and_forgetting_costs_nothing(
    store: JobStore, notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every end is called for and can be acknowledged, long after it was forgotten; a session that cannot be read
    hides no end of another."""
    monkeypatch.setattr("openjobs.runner.notices._REMEMBERED", 2)
    store.create_session("a-broken-one")
    heard: list[str] = []
    with notices.subscribe(lambda notice: heard.append(notice.event_id)) as subscription:
        jobs = [ended(store, f"job {number}") for number in range(5)]
        for job in jobs:
            notices.ended(job)
        eventually(lambda: set(heard) == {job.event_id for job in jobs})
        eventually(lambda: len(subscription.called) == 2)
    assert len(notices._known) == 2
    pending = pending_jobs

    def broken(store: JobStore, session_id: str, *stages: NoticeStage, **more: Any) -> Any:
        if session_id == "a-broken-one":
            raise errors.Damaged("broken", path="jobs.json")
        return pending(store, session_id, *stages, **more)

    monkeypatch.setattr("openjobs.runner.notices.pending_jobs", broken)
    assert notices.ack(str(jobs[0].event_id)) is True
    assert stage_of(store, jobs[0]) is NoticeStage.CONSUMED
    assert notices.ack(str(jobs[0].event_id)) is False


def test_a_forked_child_takes_no_listener_and_closes_nobodys(store: JobStore, notices: Notices) -> None:
    """The thread is the parent's, and so are its listeners."""
    heard: list[str] = []

    def child() -> str:
        notices.close()
        try:
            notices.subscribe(lambda notice: None)
        except errors.ForkedProcess:
            return "refused"
        return "taken"

    with notices.subscribe(lambda notice: heard.append(notice.event_id)):
        with forked(child) as process:
            assert process.answer() == "refused"
        job = ended(store)
        notices.ended(job)
        eventually(lambda: heard == [job.event_id])


def test_an_asyncio_host_iterates(store: JobStore) -> None:
    """The same names, awaitable; the stream ends with the runner."""

    async def main() -> list[str]:
        heard = []
        runner = AsyncJobRunner(JobRunner(store, 1, lambda request, event: TurnResult(final_text="x")))
        async with runner:
            job = await runner.submit(SpawnRequest(prompt="p", parent_session_id="s1", notify=True))
            async with aclosing(runner.notices.stream("s1")) as stream:
                async for notice in stream:
                    heard.append(notice.id)
                    break
            assert heard == [job.job_id]
            assert [notice.id for notice in await runner.notices.pending("s1")] == heard
            assert await runner.notices.deliver("s1") is not None
            assert await runner.notices.consume(job.job_id) is True
            assert await runner.notices.ack("nothing") is False

            async def all_of_it() -> None:
                async with aclosing(runner.notices.stream()) as stream:
                    async for notice in stream:
                        heard.append(notice.id)  # noqa: PERF401  each is heard as it comes

            rest = asyncio.create_task(all_of_it())
            other = await runner.submit(SpawnRequest(prompt="q", parent_session_id="s1", notify=True))
            await runner.await_job(other.job_id)
            while len(heard) < 2:
                await asyncio.sleep(0.005)
        await asyncio.wait_for(rest, 20)
        assert heard == [job.job_id, other.job_id]
        return heard

    assert len(asyncio.run(main())) == 2


def test_what_ends_in_another_process_is_heard(tmp_path: Path) -> None:
    """Two stores and runners on one home: a listener of one hears the other's jobs within moments."""
    quick = lambda request, event: TurnResult(final_text="x")  # noqa: E731
    with GitJobStore(tmp_path / "home") as one, GitJobStore(tmp_path / "home") as two:
        one.create_session("s1")
        with JobRunner(one, 1, quick) as listener, JobRunner(two, 1, quick) as other:
            heard: list[str] = []
            with listener.notices.subscribe(lambda notice: heard.append(notice.id)):
                job = other.submit(SpawnRequest(prompt="p", parent_session_id="s1", notify=True))
                eventually(lambda: heard == [job.job_id])
            assert listener.notices.deliver("s1") is not None
            assert other.notices.deliver("s1") is None


# --- the text ------------------------------------------------------------------------------------------


def a_notice(label: str = "probe", excerpt: str = "", number: int = 0, status: str = "completed") -> Notice:
    return Notice(
        event_id=f"event-{number}", session_id="s1", kind="job" if number % 2 == 0 else "task",
        id=f"{number:08x}-0000-4000-8000-000000000000", status=status, label=label, excerpt=excerpt,
        ended_at=START + timedelta(seconds=number), target_session_id="s1",
    )  # fmt: skip


def test_a_session_in_which_nothing_happens_is_not_read_again(tmp_path: Path, hasty: None) -> None:
    """While somebody works in it, it costs two stats a look; what happens in one that cannot be read now is heard once
    it can be, and one that is gone is passed over."""
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        for session_id in ("s1", "s2"):
            store.create_session(session_id)
            store.active.mark("somebody", session_id)
        store.active.mark("somebody", "gone")
        notices = Notices(store)
        reads: list[str] = []
        heads: list[str] = []
        recorded_in, head = notices._recorded_in, store.head
        failing = [errors.SessionBusy("not now")] * 3

        def counted(session_id: str) -> list[Notice]:
            reads.append(session_id)
            if session_id == "s2" and failing:
                raise failing.pop()
            return recorded_in(session_id)

        def look(session_id: str) -> Any:
            heads.append(session_id)
            return head(session_id)

        notices._recorded_in = counted  # type: ignore[method-assign]
        store.head = look  # type: ignore[method-assign]
        heard: list[str] = []
        with notices.subscribe(lambda notice: heard.append(notice.event_id)):
            eventually(lambda: reads.count("s2") == 4)
            before = len(heads)
            eventually(lambda: len(heads) > before + 20)
            assert (reads.count("s1"), reads.count("s2"), reads.count("gone")) == (1, 4, 0)
            job = ended(store, "news", "s2")  # as by another process: nobody tells the thread
            eventually(lambda: heard == [job.event_id])
            assert reads.count("s1") == 1
        notices.close()


def test_the_text_of_one_end() -> None:
    """What it was, how it ended, the whole id, the beginning of what it brought, and where the whole is."""
    assert text_of([a_notice("probe X", "three places\nread past the end")]) == (
        "Background work has ended:\n"
        '- job 00000000-0000-4000-8000-000000000000 completed: "probe X": three places read past the end\n'
        "Use job_output with an id for the whole result."
    )


def test_what_does_not_fit_is_counted_and_pointed_to() -> None:
    """A thousand ends stay within the bound, and the model learns how to find the rest."""
    text = text_of([a_notice("label " * 50, "word " * 1000, number) for number in range(1000)])
    assert len(text) <= 4000
    shown = text.count("-4000-8000-000000000000")
    assert text.splitlines()[0] == "1000 pieces of background work have ended:"
    assert f"- {1000 - shown} more that cannot be shown here; list_jobs shows all of them" in text


WORDS = st.text(max_size=300)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=30), st.integers(60, 3000))
def test_the_text_is_bounded_and_ids_are_whole(texts: list[tuple[str, str]], limit: int) -> None:
    """Whatever labels and results hold: never longer than the limit, one line an end, no control characters, every id
    whole or not there at all, and `list_jobs` named where one is not."""
    notices = [a_notice(label, excerpt, number) for number, (label, excerpt) in enumerate(texts)]
    text = text_of(notices, limit)
    assert len(text) <= limit
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", text)
    lines = [line for line in text.splitlines() if line.startswith(("- job ", "- command "))]
    for line, notice in zip(lines, notices, strict=False):
        assert line.split(" ")[2] == notice.id
    if len(lines) < len(notices):
        assert "list_jobs" in text
    assert len(text.splitlines()) <= len(notices) + 3


def test_a_row_with_cut_texts_is_enough(store: JobStore, notices: Notices) -> None:
    """A long result is told by its beginning, which the row has."""
    job = store.create(job_for(store, "s1", "long", notice=NoticeStage.WANTED), Queued(runner_id="r"))
    store.apply(job.job_id, Started())
    store.apply(job.job_id, Completed(event_id="e", result_text="word " * 5000))
    node = notices.deliver("s1")
    assert node is not None
    assert len(node.content) < 800
    # From the whole texts too: what listeners and `ack` keep of an end is bounded.
    assert of_job(store.get(job.job_id)).excerpt == ("word " * 5000)[:512]


def test_a_dead_runners_turn_holds_nothing_back(store: JobStore, session: Session) -> None:
    """An unfinished foreground turn whose runner died is ended by the delivery that meets it."""
    with JobRunner(store, 1, lambda request, event: TurnResult()) as runner:
        store.leases.acquire("dead").release()
        turn = store.create(job_for(store, "s1", "turn", foreground=True), Queued(runner_id="dead"))
        job = ended(store)
        node = runner.notices.deliver("s1")
        assert node is not None
        assert events_of(node) == [job.event_id]
        assert store.get(turn.job_id).terminal


def test_the_beginning_of_an_id_is_enough(store: JobStore, notices: Notices) -> None:
    """As wherever a model gives an id."""
    job = ended(store)
    assert notices.consume(job.job_id[:13]) is True
    assert stage_of(store, job) is NoticeStage.CONSUMED


def test_a_stage_comes_over_the_wire_as_what_it_is(store: JobStore) -> None:
    """A client of the host process gets a stage, not only its word; none stays none."""
    from openjobs.host import wire

    for job in (ended(store), ended(store, notice=None)):
        got = wire.job_from_wire(json.loads(wire.encode(wire.job_to_wire(job))))
        assert got.notice is job.notice
