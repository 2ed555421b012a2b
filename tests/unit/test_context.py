"""What a turn sees of its branch and of the jobs beside it (spec 003, D8)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from openjobs.errors import UnknownNode
from openjobs.jobs import Cancelled, Completed, End, Errored, Job, Queued, Started
from openjobs.store import JobStore, MockTaskStore, Session
from tests.support import FakeClock


@pytest.fixture
def store(clock: FakeClock) -> Iterator[JobStore]:
    store = MockTaskStore(clock=clock)
    store.create_session("s1")
    yield store
    assert store.fsck("s1").clean
    store.close()


@pytest.fixture
def session(store: JobStore) -> Session:
    return store.session("s1")


def started(store: JobStore, prompt: str) -> Job:
    job = Job(
        job_id=store.new_id(),
        subject=prompt,
        description=prompt,
        agent_id="main",
        created_at=store.clock.now(),
        parent_session_id="s1",
    )
    store.create(job, Queued(runner_id="r"))
    return store.apply(job.job_id, Started())


def ended(store: JobStore, prompt: str, end: End) -> Job:
    return store.apply(started(store, prompt).job_id, end)


def test_a_running_job_is_not_seen(store: JobStore, session: Session) -> None:
    """A turn before the job's end sees the messages only."""
    session.append("user", "hello")
    started(store, "probe")
    assert [i.text for i in session.context()] == ["hello"]


def test_each_end_is_seen_as_what_it_is(store: JobStore, session: Session) -> None:
    """Completed by its result, cancelled by partial text and marker, errored by its error line, in order."""
    session.append("user", "hello")
    ended(store, "one", Completed(event_id="e1", result_text="result"))
    ended(store, "two", Errored(event_id="e2", error="ValueError: no"))
    ended(store, "three", Cancelled(event_id="e3", result_text="half"))
    session.append("assistant", "next")
    items = session.context()
    assert [i.text for i in items] == [
        "hello",
        "result",
        "[task error] ValueError: no",
        "half\n[cancelled at 2026-01-02T03:04:05.000Z]",
        "next",
    ]
    assert [i.status for i in items] == [None, "completed", "errored", "cancelled", None]


def test_a_completed_job_can_be_seen_as_its_branch(store: JobStore, session: Session) -> None:
    """On request the branch's own messages stand in place of the result."""
    session.append("user", "hello")
    ended(store, "probe", Completed(event_id="e1", result_text="result"))
    assert [(i.role, i.text) for i in session.context(expand_branches=True)] == [
        ("user", "hello"),
        ("user", "probe"),
        ("assistant", "result"),
    ]


def test_a_job_sees_its_siblings_that_ended_and_not_itself(store: JobStore, session: Session) -> None:
    """The context at a job's own prompt has the cards on its ancestors."""
    session.append("user", "hello")
    ended(store, "first", Completed(event_id="e1", result_text="first result"))
    second = started(store, "second")
    assert [i.text for i in session.context(second.user_msg_id)] == ["hello", "first result", "second"]


def test_the_budget_keeps_the_newest_and_says_what_it_left_out(session: Session) -> None:
    """Whole items, newest first; the last message is kept whatever its size."""
    for number in range(10):
        session.append("user", f"message {number}")
    assert [i.text for i in session.context(budget=25)] == ["[8 earlier messages left out]", "message 8", "message 9"]
    assert [i.text for i in session.context(budget=0)] == ["[9 earlier messages left out]", "message 9"]


def test_chat_messages_name_the_job(store: JobStore, session: Session) -> None:
    """A provider gets roles and texts; an ended job says that it is one."""
    session.append("user", "hello")
    job = ended(store, "probe X", Completed(event_id="e1", result_text="result"))
    assert session.messages() == [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": f'[background job {job.job_id[:8]} "probe X" completed]\nresult'},
    ]


def test_an_unknown_head_is_refused_and_no_head_is_nothing(session: Session) -> None:
    """An empty session has an empty context."""
    assert session.context() == []
    with pytest.raises(UnknownNode):
        session.context("nope")


def test_cards_are_found_over_many_segments(store: JobStore, session: Session) -> None:
    """A job that ended 600 messages ago is seen where it hangs."""
    first = session.append("user", "m0")
    ended(store, "probe", Completed(event_id="e1", result_text="result"))
    for number in range(1, 600):
        session.append("user", f"m{number}")
    texts = [i.text for i in session.context()]
    assert texts[:3] == ["m0", "result", "m1"]
    assert [n.function for n in session.branch_with_cards(first.id)] == [None, "attach"]


def test_a_turn_that_is_on_the_branch_is_not_seen_twice(store: JobStore, session: Session) -> None:
    """A foreground turn, or a job's branch that was checked out: its own messages, and not its card, too."""
    session.append("user", "hello")
    fork = session.append("assistant", "hi")
    ended(store, "beside", Completed(event_id="e1", result_text="result"))
    job = ended(store, "go on", Completed(event_id="e2", result_text="went on"))
    assert [i.text for i in session.context(fork.id)] == ["hello", "hi", "result", "went on"]
    assert [i.text for i in session.context(job.head_id)] == ["hello", "hi", "result", "go on", "went on"]
