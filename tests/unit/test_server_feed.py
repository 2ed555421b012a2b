"""The feed: numbered events that can be sent again, and rows in memory. 003, D9; D11."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import attrs
import pytest

from openjobs import JobRunner, MockTaskStore, SpawnRequest
from openjobs.clock import to_text
from openjobs.errors import InvalidInput
from openjobs.jobs import Job, JobStatus
from openjobs.server import RunnerBackend
from openjobs.server.feed import BATCH_EVENTS, Feed, Subscribed
from openjobs.server.summary import Filter, statuses_of
from tests.support import FakeClock, eventually
from tests.support.jobs import job_for
from tests.support.turns import Turns

MakeFeed = Callable[..., Feed]


@pytest.fixture
def runner(turns: Turns) -> Iterator[JobRunner]:
    with ExitStack() as stack:
        store = stack.enter_context(MockTaskStore())
        store.create_session("s1")
        store.create_session("s2")
        runner = JobRunner(store, sync_fn=turns, workers=2)
        stack.callback(runner.shutdown, 1.0)
        yield runner
        turns.finish_all()


@pytest.fixture
def make_feed(runner: JobRunner) -> Iterator[MakeFeed]:
    with ExitStack() as stack:

        def make(**options: Any) -> Feed:
            backend = RunnerBackend(runner)
            stack.callback(backend.close)
            feed = Feed(backend, **options)
            stack.callback(feed.close)
            feed.start()
            assert feed.until_loaded(20)
            return feed

        yield make


def ask(prompt: str, session_id: str = "s1", **more: Any) -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id=session_id, **more)


def events(feed: Feed, after: int = 0, session_id: str | None = None) -> list[dict[str, Any]]:
    """All that a listener at that place would get."""
    found: list[dict[str, Any]] = []
    while True:
        batch = feed.after(after, session_id)
        assert batch is not None
        if batch.text is not None:
            message = json.loads(batch.text)
            found += message["events"] if message["event"] == "batch" else [message]
        after = batch.next_seq
        if not batch.more:
            return found


def kinds(found: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(each["event"], each.get("status", each.get("running_total"))) for each in found]


def snapshot(found: Subscribed) -> dict[str, Any]:
    assert found.snapshot is not None
    value: dict[str, Any] = json.loads(found.snapshot)
    return value


class TestEvents:
    def test_a_job_from_submit_to_end(self, runner: JobRunner, turns: Turns, make_feed: MakeFeed) -> None:
        """Each state once, in order; `seq` grows by one; the row is the job's at that moment."""
        feed = make_feed()
        job = runner.submit(ask("one"))
        turns["one"].until_started()
        turns["one"].finish.set()
        runner.await_job(job.job_id, 20)
        found = eventually(lambda: list_of(feed, 6))
        assert kinds(found) == [
            ("task_created", "queued"),
            ("job_status", "queued"),
            ("job_status", "running"),
            ("running_task", 1),
            ("job_status", "completed"),
            ("running_task", 0),
        ]
        assert [each["seq"] for each in found] == [1, 2, 3, 4, 5, 6]
        assert {each["epoch"] for each in found} == {feed.epoch}
        assert {each["job_id"] for each in found} == {job.job_id}
        assert {each["session_id"] for each in found} == {"s1"}
        assert found[-2]["task"]["status"] == "completed"
        assert found[3]["running"] is True

    def test_a_cancel_request_is_told(self, runner: JobRunner, turns: Turns, make_feed: MakeFeed) -> None:
        """A job that was asked to stop is still running, and says so."""
        feed = make_feed()
        turns["one"].obeys = False
        job = runner.submit(ask("one"))
        turns["one"].until_started()
        runner.cancel(job.job_id, "enough")
        asked = eventually(
            lambda: [e for e in events(feed) if e["event"] == "job_status" and e["task"]["cancel_requested_at"]]
        )
        assert asked[0]["status"] == "running"
        assert asked[0]["task"]["cancel_reason"] == "enough"
        turns["one"].finish.set()

    def test_one_session_only(self, runner: JobRunner, turns: Turns, make_feed: MakeFeed) -> None:
        """A listener of one session gets its events, with the numbers that they have."""
        feed = make_feed()
        turns.finish_all()
        for session_id in ("s1", "s2", "s1"):
            runner.await_job(runner.submit(ask("x", session_id)).job_id, 20)
        eventually(lambda: list_of(feed, 18))
        mine = events(feed, session_id="s2")
        assert len(mine) == 6
        assert {each["session_id"] for each in mine} == {"s2"}
        assert [each["seq"] for each in mine] == sorted(each["seq"] for each in mine)
        assert len(events(feed, session_id="nobody")) == 0

    def test_an_older_look_changes_nothing(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """Revisions only grow: what a slow reader brings late is not told."""
        feed = make_feed()
        job = job_for(runner.store, "s1")
        newer = attrs.evolve(job, status=JobStatus.RUNNING, revision=2)
        feed.put_job(newer)
        before = feed.seq
        feed.put_job(attrs.evolve(job, status=JobStatus.QUEUED, revision=1))
        feed.put_job(newer)
        assert feed.seq == before
        assert (feed.row(job.job_id) or {})["status"] == "running"

    def test_progress_is_thinned(self, runner: JobRunner, turns: Turns, make_feed: MakeFeed) -> None:
        """At most ten a second for each job, and the newest value is the one that stays."""
        feed = make_feed()
        runner.submit(ask("one"))
        request = turns["one"].until_started()
        eventually(lambda: list_of(feed, 4))
        for number in range(500):
            request.progress({"n": number})
        told = eventually(lambda: has_value(feed, 499))
        assert len(told) <= 12
        assert [each["progress"]["n"] for each in told] == sorted(each["progress"]["n"] for each in told)
        turns["one"].finish.set()

    def test_any_progress_can_be_told(self, runner: JobRunner, turns: Turns, make_feed: MakeFeed) -> None:
        """What is not JSON is shown as text; what is too much is said to be so."""
        feed = make_feed()
        for number, value in enumerate([object(), {1: {2, 3}}, "\ud800", "x" * 100_000, float("nan"), [b"x"]]):
            prompt = f"job {number}"
            runner.submit(ask(prompt))
            request = turns[prompt].until_started()
            eventually(lambda: feed.running == 1)
            request.progress(value)
            eventually(functools.partial(progress_told, feed, number + 1))
            turns[prompt].finish.set()
            eventually(lambda: feed.running == 0)
        last = [e["progress"] for e in events(feed) if e["event"] == "task_progress"]
        assert last[3] == {"omitted": "100002 bytes"}


def progress_told(feed: Feed, count: int) -> bool:
    return len([each for each in events(feed) if each["event"] == "task_progress"]) == count


def list_of(feed: Feed, count: int) -> list[dict[str, Any]]:
    found = events(feed)
    return found if len(found) >= count else []


def has_value(feed: Feed, number: int) -> list[dict[str, Any]]:
    told = [each for each in events(feed) if each["event"] == "task_progress"]
    return told if told and told[-1]["progress"]["n"] == number else []


def test_events_that_the_hub_dropped(
    runner: JobRunner, turns: Turns, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that could not keep up reads what it missed: in the end every row is as the store has it."""
    monkeypatch.setattr("openjobs.server.backend._HUB_CAPACITY", 2)
    feed = make_feed()
    turns.finish_at_once = True
    with feed._lock:
        jobs = [runner.submit(ask(f"job {number}")) for number in range(20)]
        assert runner.wait_idle(20)
    eventually(lambda: feed.counts() == {"completed": 20})
    assert {row["id"] for row in feed.page(Filter())["tasks"]} == {job.job_id for job in jobs}


class TestReplay:
    def fill(self, feed: Feed, runner: JobRunner, count: int) -> list[Job]:
        made = []
        for _ in range(count):
            job = attrs.evolve(job_for(runner.store, "s1"), status=JobStatus.QUEUED, revision=1)
            feed.put_job(job)
            made.append(job)
        return made

    def test_what_was_missed_comes_again(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """From the number that was seen last, once each, and then on."""
        feed = make_feed()
        self.fill(feed, runner, 3)
        found = feed.subscribe(feed.epoch, 2, None, None)
        assert found.snapshot is None
        assert found.replayed == 4
        assert [each["seq"] for each in events(feed, found.after_seq)] == [3, 4, 5, 6]

    def test_nothing_was_missed(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """At the newest number there is nothing to send, and no snapshot."""
        feed = make_feed()
        self.fill(feed, runner, 3)
        found = feed.subscribe(feed.epoch, feed.seq, None, None)
        assert (found.replayed, found.snapshot, found.after_seq) == (0, None, feed.seq)

    def test_another_epoch_gets_a_snapshot(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """As does a number that this server has not told yet, and none at all."""
        feed = make_feed()
        jobs = self.fill(feed, runner, 3)
        for epoch, after in (("another", 2), (feed.epoch, feed.seq + 1), (feed.epoch, None), (None, 1)):
            found = feed.subscribe(epoch, after, None, None)
            assert found.replayed is None
            told = snapshot(found)
            assert {row["id"] for row in told["tasks"]} == {job.job_id for job in jobs}
            assert told["seq"] == found.after_seq == feed.seq
            assert told["counts"] == {"queued": 3}

    def test_what_the_ring_has_lost(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """Too old a number gets a snapshot; a listener that is too far behind is told so, and memory stays bounded."""
        feed = make_feed(keep_events=100)
        self.fill(feed, runner, 1_000)
        assert feed.after(0, None) is None
        assert feed.subscribe(feed.epoch, 0, None, None).snapshot is not None
        assert feed.after(feed.seq - 100, None) is not None
        assert feed.behind(0)[0] == 2_000

    def test_a_long_replay_comes_in_pieces(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """No frame without bounds."""
        feed = make_feed()
        self.fill(feed, runner, BATCH_EVENTS)
        first = feed.after(0, None)
        assert first is not None
        assert first.more
        assert len(events(feed)) == 2 * BATCH_EVENTS

    def test_how_far_behind(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """In events and in bytes, from any place."""
        feed = make_feed()
        self.fill(feed, runner, 5)
        sizes = [len(json.dumps(each, separators=(",", ":"), ensure_ascii=False).encode()) for each in events(feed)]
        for place in range(len(sizes) + 1):
            assert feed.behind(place) == (len(sizes) - place, sum(sizes[place:]))

    def test_since_brings_what_ended_meanwhile(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """A client that knew an earlier server gets what changed after its last event, and all that is unfinished."""
        feed = make_feed()
        now = runner.store.clock.now()
        hour = timedelta(hours=1)
        for name, age in (("old", 5 * hour), ("new", timedelta(0))):
            job = job_for(runner.store, "s1", name)
            done = attrs.evolve(
                job, created_at=now - 5 * hour, status=JobStatus.COMPLETED, completed_at=now - age, revision=3
            )
            feed.put_job(done)
        waiting = attrs.evolve(
            job_for(runner.store, "s1", "waiting"), created_at=now - 9 * hour, status=JobStatus.QUEUED, revision=1
        )
        feed.put_job(waiting)
        told = snapshot(feed.subscribe("another", 7, to_text(now - hour), None))
        assert {row["subject"] for row in told["tasks"]} == {"new", "waiting"}
        with pytest.raises(InvalidInput):
            feed.subscribe("another", 7, "yesterday", None)

    def test_bells(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """A listener is woken when there is something new; one that fails disturbs nobody; who left is not called."""
        feed = make_feed()
        rung: list[int] = []

        def broken() -> None:
            raise RuntimeError("no")

        feed.listen(broken)
        forget = feed.listen(lambda: rung.append(1))
        feed.ring()
        assert rung == []
        self.fill(feed, runner, 1)
        feed.ring()
        assert rung
        forget()
        before = len(rung)
        self.fill(feed, runner, 1)
        feed.ring()
        assert len(rung) == before


class TestPages:
    def jobs(self, feed: Feed, store: Any, count: int, **fields: Any) -> list[Job]:
        made = []
        for number in range(count):
            status = [JobStatus.COMPLETED, JobStatus.ERRORED, JobStatus.QUEUED][number % 3]
            job = attrs.evolve(
                job_for(store, "s1" if number % 2 else "s2", f"Task {number}"),
                created_at=store.clock.now() + timedelta(milliseconds=number),
                status=status,
                completed_at=store.clock.now() if status.terminal else None,
                revision=1,
                **fields,
            )
            feed.put_job(job)
            made.append(job)
        return made

    def test_paging_meets_each_once(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """Newest first, each row on exactly one page, whatever the size of a page."""
        feed = make_feed()
        jobs = self.jobs(feed, runner.store, 37)
        for limit in (1, 5, 36, 37, 50):
            ids: list[str] = []
            before = None
            while True:
                page = feed.page(Filter(), before, limit)
                ids += [row["id"] for row in page["tasks"]]
                before = page["next_before"]
                if before is None:
                    break
            assert ids == [job.job_id for job in reversed(jobs)]

    def test_filters_and_counts(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """Counts are of the whole filter but for its status, so a filter bar can show them all."""
        feed = make_feed()
        self.jobs(feed, runner.store, 30)
        page = feed.page(Filter(statuses=statuses_of(["errored"])))
        assert len(page["tasks"]) == 10
        assert page["counts"] == {"completed": 10, "errored": 10, "queued": 10}
        assert page["total"] == 30
        page = feed.page(Filter(session_id="s1", statuses=statuses_of(["finished"])), None, 5)
        assert len(page["tasks"]) == 5
        assert page["next_before"] is not None
        assert page["counts"] == {"completed": 5, "errored": 5, "queued": 5}
        page = feed.page(Filter(text="tAsK 2"))
        assert page["total"] == 11
        assert feed.page(Filter(agent_id="nobody"))["tasks"] == []
        assert feed.page(Filter(kind="process"))["total"] == 0
        assert feed.page(Filter(kind="all"))["total"] == 30

    def test_queue_positions(self, runner: JobRunner, turns: Turns, make_feed: MakeFeed) -> None:
        """1 is the next to start; when one starts or is cancelled, those behind it move up."""
        feed = make_feed()
        jobs = [runner.submit(ask(f"job {number}")) for number in range(6)]
        turns["job 0"].until_started()
        turns["job 1"].until_started()

        def positions() -> list[int | None]:
            rows = {row["id"]: row for row in feed.page(Filter())["tasks"]}
            return [rows[job.job_id]["queue_position"] if job.job_id in rows else -1 for job in jobs]

        eventually(lambda: positions() == [None, None, 1, 2, 3, 4])
        runner.cancel(jobs[3].job_id)
        eventually(lambda: positions() == [None, None, 1, None, 2, 3])
        turns["job 0"].finish.set()
        turns["job 2"].until_started()
        eventually(lambda: positions() == [None, None, None, None, 1, 2])

    def test_parents_and_children(self, runner: JobRunner, turns: Turns, make_feed: MakeFeed) -> None:
        """A parent's row counts its children; they can be asked for."""
        feed = make_feed()
        parent = runner.submit(ask("parent"))
        turns["parent"].until_started()
        child = runner.submit(ask("child", parent_job_id=parent.job_id))
        eventually(lambda: (feed.row(parent.job_id) or {}).get("children") == 1)
        assert [row["id"] for row in feed.page(Filter(parent_job_id=parent.job_id))["tasks"]] == [child.job_id]
        assert [row["id"] for row in feed.children(parent.job_id, 10)] == [child.job_id]

    def test_more_than_is_kept(self, runner: JobRunner, turns: Turns, make_feed: MakeFeed) -> None:
        """Memory holds the newest; paging goes on into the store, and nothing is missed or shown twice."""
        turns.finish_all()
        jobs = [runner.submit(ask(f"job {number}", "s1" if number % 2 else "s2")) for number in range(40)]
        assert runner.wait_idle(20)
        feed = make_feed(keep_rows=10)
        assert len(feed) <= 11
        for wanted, all_of in (
            (Filter(), jobs),
            (Filter(session_id="s1"), jobs[1::2]),
            (Filter(text="job 3"), [job for job in jobs if "job 3" in job.subject]),
            (Filter(statuses=statuses_of(["queued"])), []),
        ):
            ids: list[str] = []
            before = None
            for _ in range(60):
                page = feed.page(wanted, before, 4)
                ids += [row["id"] for row in page["tasks"]]
                before = page["next_before"]
                if before is None:
                    break
            assert sorted(ids) == sorted(job.job_id for job in all_of)
            assert not feed.page(wanted)["complete"]
        nowhere = feed.page(Filter(), "00000000-0000-4000-8000-000000000000")
        assert (nowhere["tasks"], nowhere["next_before"]) == ([], None)

    def test_unfinished_rows_are_never_dropped(self, runner: JobRunner, make_feed: MakeFeed) -> None:
        """However many came after them."""
        feed = make_feed(keep_rows=20)
        first = attrs.evolve(job_for(runner.store, "s1", "first"), status=JobStatus.QUEUED, revision=1)
        feed.put_job(first)
        self.jobs(feed, runner.store, 60)
        assert feed.row(first.job_id) is not None
        assert len(feed) <= 40


def test_the_clock_of_events_is_the_stores(clock: FakeClock) -> None:
    """`at` is what `since` is compared with, so both come from one clock."""
    with MockTaskStore(clock=clock) as store:
        store.create_session("s1")
        runner = JobRunner(store, sync_fn=Turns(finish_at_once=True), clock=clock)
        try:
            backend = RunnerBackend(runner)
            feed = Feed(backend)
            feed.put_job(attrs.evolve(job_for(store, "s1"), status=JobStatus.QUEUED, revision=1))
            assert {each["at"] for each in events(feed)} == {to_text(clock.now())}
            backend.close()
        finally:
            runner.shutdown(1.0)
