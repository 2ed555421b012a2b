"""Rows and messages that cannot be read hold back what stands there, and all of a conversation's notices only where a
turn may be running that nobody can see (R3; guarantees, *Notices*)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, SpawnRequest, TurnResult, errors
from openjobs.aio import AsyncNotices
from openjobs.integrations import mcp
from openjobs.jobs import Completed, Job, NoticeStage, Queued, Started
from openjobs.runner.notices import Notices
from openjobs.session.history import events_of
from openjobs.tools import AgentTools
from tests.support import eventually, git
from tests.support.jobs import clean, job_for
from tests.support.turns import Turns

ME = ("-c", "user.name=me", "-c", "user.email=me@localhost")
CLOSED, NEWEST, SEGMENT = "jobs/00/0000.json", "jobs.json", "history/00/0000.jsonl"


@attrs.define
class Home:
    """Session `s1`; a file of it may be spoilt."""

    path: Path
    store: GitJobStore
    whole: dict[str, bytes] = attrs.field(factory=dict)

    def ended(self, **fields: object) -> Job:
        fields = {"notice": NoticeStage.WANTED, **fields}
        job = self.store.create(job_for(self.store, "s1", **fields), Queued(runner_id="r"), fresh_id=True)
        end = Completed(event_id=self.store.new_id(), result_text="done")
        return self.store.apply(job.job_id, Started(run_id="run"), end)

    def fill(self) -> None:
        """The page so far is closed, and the newest one has no row in common with it."""
        while not self.store.documents("s1").older_pages():
            self.ended(notice=None)

    def spoil(self, path: str, row: Job | None = None) -> None:
        """Half of the file, or one row of it: its status is one that nobody knows."""
        data = self.whole[path] = self._file(path).read_bytes()
        if row is None:
            self._write(path, data[: len(data) // 2])
            return
        line = self.store.documents("s1")._page(path).lines[row.job_id]
        self._write(path, data.replace(line, line.replace(b'"status":"', b'"status":"un')))

    def mend(self) -> None:
        for path in list(self.whole):
            self._write(path, self.whole.pop(path))

    def _file(self, path: str) -> Path:
        return self.path / "sessions" / "s1" / "repo" / path

    def _write(self, path: str, data: bytes) -> None:
        self._file(path).write_bytes(data)
        git(*ME, "commit", "-qam", "by hand", cwd=self.path / "sessions" / "s1" / "repo")

    def told(self) -> list[str]:
        """Every end that a message tells of."""
        nodes = self.store.session("s1").branch()
        return [event_id for node in nodes for event_id in events_of(node)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s1")
        store.create_session("s2")
        home = Home(tmp_path / "home", store)
        yield home
        home.mend()
        clean(store)


@pytest.fixture
def notices(home: Home) -> Iterator[Notices]:
    notices = Notices(home.store)
    yield notices
    notices.close()


@pytest.fixture(params=["nobody's runner", "a runner"])
def either(request: pytest.FixtureRequest, home: Home) -> Iterator[Notices]:
    """Those of a runner whose own turns are over, though the session has its mark; or of none."""
    if request.param != "a runner":
        notices = Notices(home.store)
        yield notices
        notices.close()
        return
    with JobRunner(home.store, 1, lambda request, event: TurnResult()) as runner:
        turn = runner.submit(SpawnRequest(prompt="hello", parent_session_id="s1", foreground=True))
        assert runner.await_job(turn.job_id, timeout=30).terminal
        assert home.store.active.runners() == [runner.runner_id]
        yield runner.notices


@pytest.mark.parametrize("broken", ["a closed page", "the newest page", "a row"])
def test_what_can_be_read_is_told_and_the_rest_once_it_can(
    home: Home, either: Notices, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Pending, called back and delivered, each once; what is held is logged."""
    notices, first = either, home.ended()
    home.fill()
    second = home.ended()
    lost, seen = (second, first) if broken == "the newest page" else (first, second)
    path = NEWEST if broken == "the newest page" else CLOSED
    home.spoil(path, lost if broken == "a row" else None)
    damage: list[str] = []
    pending = notices.pending("s1", on_damage=lambda session_id, error: damage.append(str(error)))
    assert [notice.id for notice in pending] == [notice.id for notice in notices.pending()] == [seen.job_id]
    assert len(damage) == 1
    assert path in damage[0]
    with pytest.raises(errors.Damaged, match=re.escape(path)):
        notices.pending("s1")
    later = asyncio.run(AsyncNotices(notices).pending("s1", on_damage=lambda *damage: None))
    assert [notice.id for notice in later] == [seen.job_id]
    heard: list[str] = []
    with notices.subscribe(lambda notice: heard.append(notice.id), "s1"):
        eventually(lambda: heard == [seen.job_id])
    assert notices.deliver("s1") is not None
    assert notices.deliver("s1") is None
    assert home.told() == [seen.event_id]
    said = [each.getMessage() for each in caplog.records if "is not told yet" in each.getMessage()]
    assert len(said) == 1
    assert path in said[0]
    assert home.store.get(seen.job_id).notice is NoticeStage.DELIVERED
    home.mend()
    assert notices.deliver("s1") is not None
    assert home.told() == [seen.event_id, lost.event_id]


def test_a_model_over_the_protocol_is_told_what_can_be_read(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    lost = home.ended()
    home.fill()
    seen = home.ended()
    home.spoil(CLOSED)
    with JobRunner(home.store, 1, lambda request, event: TurnResult()) as runner:
        text = mcp._news(AgentTools(runner, "s1"))
        assert seen.job_id in text
        assert lost.job_id not in text
        assert mcp._news(AgentTools(runner, "s1")) == ""
        assert any(CLOSED in each.getMessage() for each in caplog.records if "can be told now" in each.getMessage())
        home.mend()
        assert lost.job_id in mcp._news(AgentTools(runner, "s1"))


def test_nothing_is_put_behind_a_turn_that_another_process_may_run(home: Home, notices: Notices) -> None:
    """Its row cannot be read: all waits until its runner is done with the session or gone, and says so."""
    turns = Turns()
    with GitJobStore(home.path, durability="relaxed") as theirs, JobRunner(theirs, 1, turns) as runner:
        turn = runner.submit(SpawnRequest(prompt="turn", parent_session_id="s1", foreground=True))
        turns["turn"].until_started()
        eventually(lambda: home.store.row(turn.job_id).status is JobStatus.RUNNING)
        home.fill()
        job = home.ended()
        assert notices.deliver("s1") is None
        home.spoil(CLOSED)
        for _ in range(2):
            with pytest.raises(errors.Damaged, match=rf"{re.escape(CLOSED)}.*a foreground turn"):
                notices.deliver("s1")
        assert home.told() == []
        assert [notice.id for notice in notices.pending("s1", on_damage=lambda *damage: None)] == [job.job_id]
        turns["turn"].finish.set()
        assert runner.wait_idle(30)
    assert notices.deliver("s1") is not None
    assert home.told() == [job.event_id]


def test_nothing_is_put_behind_a_turn_that_this_runner_runs(home: Home) -> None:
    """It knows its own turns without their rows: what waits is told as soon as that one is over."""
    turns = Turns()
    with JobRunner(home.store, 1, turns) as runner:
        turn = runner.submit(SpawnRequest(prompt="turn", parent_session_id="s1", foreground=True))
        turns["turn"].until_started()
        eventually(lambda: home.store.row(turn.job_id).status is JobStatus.RUNNING)
        home.fill()
        job = home.ended()
        home.spoil(CLOSED)
        with pytest.raises(errors.Damaged, match=re.escape(CLOSED)):
            runner.notices.deliver("s1")
        turns["turn"].finish.set()
        assert runner.wait_idle(30)
        assert runner.notices.deliver("s1") is not None
        assert home.told() == [job.event_id]


def test_what_a_job_started_that_may_be_running_waits_alone(home: Home, notices: Notices) -> None:
    """Its end is that job's to hear of, as long as it may run; the others are told."""
    turns = Turns()
    with GitJobStore(home.path, durability="relaxed") as theirs, JobRunner(theirs, 1, turns) as runner:
        above = runner.submit(SpawnRequest(prompt="above", parent_session_id="s1"))
        turns["above"].until_started()
        eventually(lambda: home.store.row(above.job_id).status is JobStatus.RUNNING)
        child = home.ended(parent_job_id=above.job_id)
        other = home.ended()
        _as_if_nobody_runs_a_foreground_turn(notices)
        home.spoil(NEWEST, above)
        assert notices.deliver("s1") is not None
        assert home.told() == [other.event_id]
        asked = notices.pending("s1", on_damage=lambda *damage: None)
        assert asked == []
        data = home._file(NEWEST).read_bytes()
        home.whole[NEWEST] = data.replace(b'"status":"un', b'"status":"')
        home.mend()
        turns["above"].finish.set()
        assert runner.wait_idle(30)
    assert notices.deliver("s1") is not None
    assert home.told() == [other.event_id, child.event_id]


def _as_if_nobody_runs_a_foreground_turn(notices: Notices) -> None:
    may_run = notices._may_run
    notices._may_run = lambda session_id, job_id: job_id is not None and may_run(session_id, job_id)  # type: ignore[method-assign]


def test_a_damaged_segment_holds_nothing_back_that_is_of_the_session(
    home: Home, notices: Notices, caplog: pytest.LogCaptureFixture
) -> None:
    """A row says whether a message tells of its end. What ran in another session may be told there, and waits."""
    home.store.session("s1").append("user", "word " * 20_000)
    home.store.session("s1").append("user", "in the next segment")
    job = home.ended()
    there = home.store.create(
        job_for(home.store, "s2", caller_session_id="s1", notice=NoticeStage.WANTED), Queued(runner_id="r")
    )
    end = Completed(event_id=home.store.new_id(), result_text="done")
    there = home.store.apply(there.job_id, Started(run_id="run"), end)
    assert home.store.mirror_later(there).result()
    home.spoil(SEGMENT)
    node = notices.deliver("s1")
    assert node is not None
    assert events_of(node) == [job.event_id]
    assert home.store.get(job.job_id).notice is NoticeStage.DELIVERED
    assert any(SEGMENT in each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    home.mend()
    assert notices.deliver("s1") is not None
    assert home.told() == [job.event_id, there.event_id]
