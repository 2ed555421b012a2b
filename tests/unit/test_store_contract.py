"""One contract, two stores: MockTaskStore and GitJobStore pass the same tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from openjobs import errors
from openjobs.clock import SystemClock
from openjobs.jobs import (
    Cancelled,
    CancelRequested,
    Completed,
    ContextMode,
    Errored,
    Job,
    JobStatus,
    Queued,
    Started,
)
from openjobs.session import blocks, cards
from openjobs.session.history import SEGMENT_BYTES, SEGMENT_NODES
from openjobs.session.pages import PAGE_ROWS
from openjobs.store import GitJobStore, JobStore, MockTaskStore
from tests.support import FakeClock
from tests.support.jobs import clean, job_for


@pytest.fixture(params=["memory", "git"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[JobStore]:
    store = (
        MockTaskStore(clock=clock)
        if request.param == "memory"
        else GitJobStore(tmp_path / "home", durability="relaxed", clock=clock)
    )
    yield store
    try:
        clean(store)
    finally:
        store.close()


@pytest.fixture
def sid(store: JobStore) -> str:
    return store.create_session("s1", title="A session")


def completed(store: JobStore, text: str = "done", **fields: object) -> Completed:
    return Completed(event_id=store.new_id(), result_text=text, **fields)  # type: ignore[arg-type]


def run(store: JobStore, job: Job, *, text: str = "done") -> Job:
    store.create(job, Queued(runner_id="r1"))
    return store.apply(job.job_id, Started(run_id="run-1"), completed(store, text))


def test_a_job_walks_from_pending_to_completed_and_each_step_is_one_commit(store: JobStore, sid: str) -> None:
    """Every transition is one commit, in order, with its status and the runner in its trailers."""
    job = run(store, job_for(store, sid))
    assert job.status is JobStatus.COMPLETED
    trail = store.history(job.job_id)
    assert [t.status.value for t in trail] == ["pending", "queued", "running", "completed"]
    assert len({t.commit_id for t in trail}) == 4
    assert [t.runner_id for t in trail] == ["r1", "r1", "r1", "r1"]


def test_times_are_those_of_the_call(store: JobStore, sid: str, clock: FakeClock) -> None:
    """A row's times come from the store's clock at the call, in whole milliseconds."""
    job = job_for(store, sid)
    start = clock.now()
    store.create(job, Queued(runner_id="r1"))
    clock.advance(1.5)
    store.apply(job.job_id, Started())
    clock.advance(2)
    ended = store.apply(job.job_id, completed(store))
    assert ended.created_at == ended.queued_at == start
    assert ended.started_at is not None
    assert ended.completed_at is not None
    assert (ended.started_at - start).total_seconds() == 1.5
    assert [t.time for t in store.history(job.job_id)] == [start, start, ended.started_at, ended.completed_at]


def test_what_was_applied_is_what_is_read(store: JobStore, sid: str) -> None:
    """`get` gives the job that `apply` returned."""
    job = run(store, job_for(store, sid, metadata={"a": [1, "ü"]}, timeout_s=3.5, origin_tool_call_id="call-1"))
    assert store.get(job.job_id) == job


@pytest.mark.parametrize("size", [0, 511, 512, 513, 100_000])
def test_long_texts_are_whole_for_every_reader(store: JobStore, sid: str, size: int) -> None:
    """A row keeps 512 bytes of prompt, result and error; every API returns the whole."""
    prompt, result = "pré" * (size // 3), "résultat " * (size // 9)
    created = store.create(job_for(store, sid, prompt), Queued(runner_id="r1"))
    assert created.description == prompt
    started = store.apply(created.job_id, Started(run_id="run-1"))
    assert started.description == prompt
    job = store.apply(created.job_id, completed(store, result))
    assert (job.description, job.result_text) == (prompt, result)
    got = store.get(job.job_id)
    assert got == job
    assert got.description == prompt
    assert got.result_text == result
    row = store.list(sid)[0]
    assert len(row.description.encode()) <= 512
    assert len((row.result_text or "").encode()) <= 512


def test_a_long_error_is_whole(store: JobStore, sid: str) -> None:
    """The whole text of an error outlives the row's limit."""
    job = job_for(store, sid)
    store.create(job, Queued(runner_id="r1"))
    store.apply(job.job_id, Started(), Errored(event_id=store.new_id(), error="E" * 5000, result_text="part"))
    got = store.get(job.job_id)
    assert got.error == "E" * 5000
    assert got.result_text == "part"


def test_text_that_utf8_cannot_hold_is_replaced_not_refused(store: JobStore, sid: str) -> None:
    """A lone surrogate in any text becomes U+FFFD; the job runs."""
    job = run(store, job_for(store, sid, "a\ud800b"), text="x\udfffy")
    got = store.get(job.job_id)
    assert got.description == "a\ufffdb"
    assert got.result_text == "x\ufffdy"


def test_an_event_that_does_not_fit_changes_nothing(store: JobStore, sid: str) -> None:
    """A refused event leaves row and history as they were."""
    job = run(store, job_for(store, sid))
    head = store.head(sid)
    for event in (Queued(), Started(), completed(store), CancelRequested(), Errored(event_id="x", error="late")):
        with pytest.raises(errors.InvalidTransition, match="completed"):
            store.apply(job.job_id, event)
    assert store.head(sid) == head
    assert store.get(job.job_id) == job


def test_the_same_end_twice_is_once(store: JobStore, sid: str) -> None:
    """An end whose outcome was unknown may be given again: its identity makes it a no-op."""
    job = job_for(store, sid)
    store.create(job, Queued(runner_id="r1"))
    end = completed(store)
    first = store.apply(job.job_id, Started(), end)
    assert store.apply(job.job_id, end) == first
    assert len(store.history(job.job_id)) == 4


def test_an_end_after_a_cancel_request_is_cancelled_with_its_text(store: JobStore, sid: str) -> None:
    """Whoever asked first wins: the text is kept as partial result."""
    job = job_for(store, sid)
    store.create(job, Queued(runner_id="r1"))
    store.apply(job.job_id, Started())
    store.apply(job.job_id, CancelRequested(reason="enough"))
    ended = store.apply(job.job_id, completed(store, "half"))
    assert ended.status is JobStatus.CANCELLED
    assert ended.result_text == "half"
    assert ended.cancel_reason == "enough"
    kinds = [(t.kind, t.status.value) for t in store.history(job.job_id)]
    assert kinds[-2:] == [("cancel-request", "running"), ("transition", "cancelled")]


def test_the_card_is_written_with_the_first_commit_and_again_with_the_last(store: JobStore, sid: str) -> None:
    """Invariant 4: row and card agree, and the card names the commit of the running transition."""
    job = job_for(store, sid)
    created = store.create(job, Queued(runner_id="r1"))
    session = store.session(sid)
    assert created.attach_id is not None
    card = session.node(created.attach_id)
    assert (card.function, card.content) == ("attach", cards.RUNNING)
    assert card.extra["attach"] == {
        "job_id": job.job_id,
        "session_id": sid,
        "status": "running",
        "head_id": None,
        "source_commit_id": None,
    }
    ended = store.apply(job.job_id, Started(), completed(store, "the result"))
    card = session.node(created.attach_id)
    assert card.content == "the result"
    running = store.history(job.job_id)[2]
    assert card.extra["attach"]["status"] == "completed"
    assert card.extra["attach"]["head_id"] == ended.head_id
    assert card.extra["attach"]["source_commit_id"] == running.commit_id


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Errored(event_id="e1", error="ValueError: no"), "[task error] ValueError: no"),
        (Cancelled(event_id="e2", reason="r"), "[cancelled at 2026-01-02T03:04:05.000Z]"),
        (Cancelled(event_id="e3", result_text="half"), "half\n[cancelled at 2026-01-02T03:04:05.000Z]"),
    ],
)
def test_cards_of_other_ends_say_so(store: JobStore, sid: str, end: Errored | Cancelled, text: str) -> None:
    """Errored and cancelled cards carry their markers (spec 003, D8 and D12)."""
    job = job_for(store, sid)
    created = store.create(job, Queued(runner_id="r1"))
    store.apply(job.job_id, Started(), end)
    assert created.attach_id is not None
    assert store.session(sid).node(created.attach_id).content == text


def test_every_job_that_ran_has_its_branch(store: JobStore, sid: str) -> None:
    """Prompt and answer hang off the message the job was submitted under, and leave the head alone."""
    session = store.session(sid)
    asked = session.append("user", "hello")
    job = run(store, job_for(store, sid, "probe"), text="answer")
    assert job.parent_msg_id == asked.id
    assert job.head_id is not None
    assert [(n.role, n.content) for n in session.branch(job.head_id)] == [
        ("user", "hello"),
        ("user", "probe"),
        ("assistant", "answer"),
    ]
    assert session.head_id == asked.id


def test_a_clean_job_starts_a_root(store: JobStore, sid: str) -> None:
    """`clean` context: the prompt has no parent; the card still hangs where the job was asked for."""
    asked = store.session(sid).append("user", "hello")
    job = run(store, job_for(store, sid, "probe", context_mode=ContextMode.CLEAN, parent_msg_id=asked.id))
    assert job.head_id is not None
    assert [n.content for n in store.session(sid).branch(job.head_id)] == ["probe", "done"]
    assert [n.function for n in store.session(sid).branch_with_cards(asked.id)] == [None, "attach"]


def test_a_foreground_turn_moves_the_head_only_where_it_still_is(store: JobStore, sid: str) -> None:
    """The head follows a completed foreground job, unless it moved meanwhile."""
    session = store.session(sid)
    session.append("user", "hello")
    job = run(store, job_for(store, sid, "one", foreground=True))
    assert session.head_id == job.head_id
    other = store.create(job_for(store, sid, "two", foreground=True), Queued(runner_id="r1"))
    moved = session.append("user", "meanwhile")
    store.apply(other.job_id, Started(), completed(store))
    assert session.head_id == moved.id


def test_an_unknown_parent_message_is_refused(store: JobStore, sid: str) -> None:
    """Nothing is written for a job that hangs on a message the session does not have."""
    head = store.head(sid)
    with pytest.raises(errors.UnknownNode, match="no-such"):
        store.create(job_for(store, sid, parent_msg_id="no-such"), Queued())
    assert store.head(sid) == head
    assert store.list(sid) == []


def test_an_end_at_an_unknown_message_is_refused(store: JobStore, sid: str) -> None:
    """`head_id` must name a message of the session."""
    job = job_for(store, sid)
    store.create(job, Queued(runner_id="r1"))
    store.apply(job.job_id, Started())
    with pytest.raises(errors.UnknownNode, match="elsewhere"):
        store.apply(job.job_id, completed(store, head_id="elsewhere"))
    assert store.get(job.job_id).status is JobStatus.RUNNING
    store.apply(job.job_id, completed(store))


def test_the_same_request_again_is_the_first_job(store: JobStore, sid: str) -> None:
    """The same job id, or the same tool call, with the same request: `JobExists` with the first job."""
    job = job_for(store, sid, origin_tool_call_id="call-1")
    store.create(job, Queued(runner_id="r1"))
    with pytest.raises(errors.JobExists) as same_id:
        store.create(attrs.evolve(job, origin_tool_call_id=None), Queued())
    assert same_id.value.job.job_id == job.job_id  # type: ignore[attr-defined]
    with pytest.raises(errors.JobExists) as same_call:
        store.create(attrs.evolve(job, job_id=store.new_id()), Queued())
    assert same_call.value.job.job_id == job.job_id  # type: ignore[attr-defined]
    assert len(store.list(sid)) == 1


def test_the_same_key_with_another_request_is_a_conflict(store: JobStore, sid: str) -> None:
    """Some model servers repeat tool call ids: never answered with somebody else's job."""
    job = job_for(store, sid, origin_tool_call_id="call-1")
    store.create(job, Queued(runner_id="r1"))
    with pytest.raises(errors.IdempotencyConflict) as conflict:
        store.create(attrs.evolve(job, job_id=store.new_id(), request_digest="other"), Queued())
    assert conflict.value.first_id == job.job_id
    with pytest.raises(errors.IdempotencyConflict):
        store.create(attrs.evolve(job, request_digest="other"), Queued())


def test_the_same_tool_call_in_another_session_is_another_job(store: JobStore, sid: str) -> None:
    """The key is session and tool call together."""
    store.create(job_for(store, sid, origin_tool_call_id="call-1"), Queued(runner_id="r1"))
    other = store.create_session("s2")
    store.create(job_for(store, other, origin_tool_call_id="call-1"), Queued(runner_id="r1"))
    assert len(store.list()) == 2


@pytest.mark.parametrize("state", ["completed", "cancel-requested"])
def test_a_child_of_a_finished_parent_is_refused(store: JobStore, sid: str, state: str) -> None:
    """A job that ended or is being cancelled takes no more children, in its own or another session."""
    parent = job_for(store, sid)
    if state == "completed":
        run(store, parent)
    else:
        store.create(parent, Queued(runner_id="r1"))
        store.apply(parent.job_id, Started(), CancelRequested())
    other = store.create_session("s2")
    for session_id in (sid, other):
        with pytest.raises(errors.ParentFinished, match=parent.job_id):
            store.create(job_for(store, session_id, "child", parent_job_id=parent.job_id), Queued())


def test_children_are_found_by_their_parent(store: JobStore, sid: str) -> None:
    """Children are listed oldest first, and by `parent_job_id`."""
    parent = store.create(job_for(store, sid), Queued(runner_id="r1"))
    children = [store.create(job_for(store, sid, f"c{n}", parent_job_id=parent.job_id), Queued()) for n in range(3)]
    assert store.children(parent.job_id) == [c.job_id for c in children]
    assert [j.job_id for j in store.list(parent_job_id=parent.job_id)] == [c.job_id for c in reversed(children)]


def test_lists_are_newest_first_over_pages_and_sessions(store: JobStore, sid: str) -> None:
    """200 jobs in two sessions: order, limit, status filter and `before` hold across pages."""
    other = store.create_session("s2")
    made = []
    for number in range(200):
        job = job_for(store, sid if number % 4 else other, f"job {number}")
        store.create_later(job, Queued(runner_id="r1"))
        made.append(job.job_id)
    ours = [i for n, i in enumerate(made) if n % 4]
    store.apply(made[199], Started())  # waits for all before it in its session
    store.apply(made[196], Started())
    assert [j.job_id for j in store.list(sid, limit=None)] == ours[::-1]
    assert {j.job_id for j in store.list(limit=None)} == set(made)
    assert [j.job_id for j in store.list(sid)] == ours[::-1][:50]
    assert [j.job_id for j in store.list(sid, limit=10, before=ours[70])] == ours[60:70][::-1]
    store.apply(ours[0], Started(), completed(store))
    store.apply(ours[100], Started(), completed(store))
    assert [j.job_id for j in store.list(sid, status="completed")] == [ours[100], ours[0]]
    assert [j.job_id for j in store.list(sid, status=["completed", "running"])] == [ours[149], ours[100], ours[0]]
    assert {j.job_id for j in store.unfinished(sid)} == set(ours) - {ours[0], ours[100]}
    assert store.list(sid, limit=0) == []
    assert store.get(ours[0]).status is JobStatus.COMPLETED


def test_an_unknown_status_filter_names_the_known_ones(store: JobStore, sid: str) -> None:
    """A typing mistake is answered with what there is."""
    with pytest.raises(errors.InvalidInput, match="pending, queued, running"):
        store.list(sid, status="done")


def test_messages_over_many_segments_are_found(store: JobStore, sid: str) -> None:
    """1,200 messages fill three segments; each is found, and the chain is whole."""
    session = store.session(sid)
    first = session.append("user", "m0")
    for number in range(1, 1200):
        session.append("user", f"m{number}")
    assert session.node(first.id).content == "m0"
    assert [n.content for n in session.branch()] == [f"m{n}" for n in range(1200)]


def test_unknown_and_ambiguous_ids_are_answered_with_candidates(store: JobStore, sid: str) -> None:
    """A unique prefix works; otherwise the error names what there is."""
    with pytest.raises(errors.UnknownJob, match="no jobs yet"):
        store.get(store.new_id())
    one = store.create(job_for(store, sid, job_id="aaaaaaaa-0000-4000-8000-000000000001"), Queued())
    two = store.create(job_for(store, sid, job_id="aaaaaaaa-0000-4000-8000-000000000002"), Queued())
    assert store.resolve(one.job_id) == one.job_id
    with pytest.raises(errors.AmbiguousId) as ambiguous:
        store.resolve("aaaaaaaa")
    assert set(ambiguous.value.candidates) == {one.job_id, two.job_id}
    with pytest.raises(errors.UnknownJob) as unknown:
        store.resolve("bbbb")
    assert set(unknown.value.candidates) == {one.job_id, two.job_id}
    for bad in ("", "../x", "A" * 8, "zz"):
        with pytest.raises(errors.UnknownJob):
            store.resolve(bad)


def test_sessions_are_unique_and_named_well(store: JobStore, sid: str) -> None:
    """The same name, in other letter case too, is refused; so is every name that is not one."""
    for name in ("s1", "S1"):
        with pytest.raises(errors.SessionExists):
            store.create_session(name)
    for name in ("", ".x", "-x", "a/b", "a\n", "x.lock", "é", "a" * 65):
        with pytest.raises(errors.InvalidSessionId):
            store.create_session(name)
    assert store.sessions() == ["s1"]
    with pytest.raises(errors.UnknownSession):
        store.session("nope")
    with pytest.raises(errors.UnknownSession):
        store.create(job_for(store, "nope"), Queued())
    minted = store.create_session()
    assert store.has_session(minted)
    assert store.session(sid).title == "A session"


def test_sixteen_threads_share_one_store(store: JobStore, sid: str) -> None:
    """Concurrent creates and ends: every job ends once, and no commit is lost."""
    jobs_each, failures = 5, []

    def work() -> None:
        try:
            for _ in range(jobs_each):
                run(store, job_for(store, sid))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    jobs = store.list(sid, limit=None)
    assert len(jobs) == 16 * jobs_each
    assert {j.status for j in jobs} == {JobStatus.COMPLETED}


def test_events_of_one_job_keep_their_order_without_waiting(store: JobStore, sid: str) -> None:
    """`apply_later`: no end is committed before its running, although nobody waits between them."""
    job = store.create(job_for(store, sid), Queued(runner_id="r1"))
    store.apply_later(job.job_id, Started(), keep=True)
    ended = store.apply_later(job.job_id, completed(store), keep=True).result(timeout=30)
    assert ended.status is JobStatus.COMPLETED
    assert [t.status.value for t in store.history(job.job_id)] == ["pending", "queued", "running", "completed"]


def test_a_closed_store_says_so(store: JobStore, sid: str) -> None:
    """Every call after close is `Closed`; close twice is once."""
    job = run(store, job_for(store, sid))
    store.close()
    store.close()
    for call in (
        lambda: store.get(job.job_id),
        lambda: store.list(),
        lambda: store.create_session("x"),
        lambda: store.apply(job.job_id, Started()),
    ):
        with pytest.raises(errors.Closed):
            call()
    store._closed = False  # for the fixture's check


def test_leases_tell_the_living_from_the_dead(store: JobStore) -> None:
    """A held lease is held; a released one is dead until it is removed with its markers."""
    lease = store.leases.acquire("r1")
    assert store.leases.is_held("r1")
    assert not store.leases.is_held("r2")
    assert store.leases.dead() == []
    store.active.mark("r1", "s1")
    assert store.active.sessions("r1") == ["s1"]
    lease.release()
    assert store.leases.dead() == ["r1"]
    store.leases.remove("r1")
    assert store.leases.dead() == []


def test_the_system_clock_is_the_default() -> None:
    """Without a clock the store uses the machine's."""
    store = MockTaskStore()
    assert isinstance(store.clock, SystemClock)
    store.close()


def test_pages_and_segments_are_small_first_and_larger_later(
    monkeypatch: pytest.MonkeyPatch, store: JobStore, sid: str
) -> None:
    """The first directory of each has small ones, all others have them twice as large; everything in them is found."""
    monkeypatch.setattr(blocks, "FANOUT", 2)
    jobs = [store.create(job_for(store, sid), Queued(runner_id="r1"), fresh_id=True) for _ in range(4 * PAGE_ROWS)]
    jobs.append(store.create(job_for(store, sid), Queued(runner_id="r1"), fresh_id=True))
    documents = store.documents(sid)
    sizes = [len(documents.older_page(number)) for number in range(documents.older_pages())]
    assert [*sizes, len(documents.newest_page())] == [PAGE_ROWS, PAGE_ROWS, 2 * PAGE_ROWS, 1]
    assert [store.get(job.job_id) for job in jobs] == jobs
    nodes = [store.session(sid).append("user", "x" * 40_000) for _ in range(20)]
    *segments, newest = store.documents(sid).segments()
    for number, segment in enumerate([*segments, newest]):
        scale = 1 if number < 2 else 2
        last = max(at for at, _ in segment.places.values())
        assert last < scale * SEGMENT_BYTES
        assert segment is newest or len(segment.data) >= scale * SEGMENT_BYTES or len(segment.places) == SEGMENT_NODES
    assert len(segments) > 4
    assert [store.documents(sid).node(node.id) for node in nodes] == nodes
