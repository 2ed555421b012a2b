"""The committer by itself, over a repository that answers as it is told: who is told what, and who goes on (R3, R4)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from openjobs.clock import SystemClock
from openjobs.errors import Bug, Closed, Damaged, InvalidInput, OutcomeUnknown, SessionBusy, StoreWriteFailed
from openjobs.repo import Change, RepositoryBusy, View
from openjobs.repo.memory import MemoryRepository
from openjobs.store import committer as committer_module
from openjobs.store.committer import Committer, Operation
from openjobs.store.index import Entry
from tests.support import eventually

BOUND_S = 20.0


class Told(MemoryRepository):
    """Raises what it is told to, then goes on; its maintenance does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: deque[Exception] = deque()
        self.step_faults: deque[Exception] = deque()
        self.closed = 0
        self.republished = 0

    def republish(self) -> None:
        self.republished += 1
        super().republish()

    def transact(self, *args: Any, **more: Any) -> Any:
        if self.faults:
            raise self.faults.popleft()
        return super().transact(*args, **more)

    def maintenance(self) -> Any:
        return self

    def step(self) -> bool:
        if self.step_faults:
            raise self.step_faults.popleft()
        return False

    def close(self) -> None:
        self.closed += 1


class Sessions:
    """One repository, whatever the session."""

    def __init__(self) -> None:
        self.told = Told()

    def repository(self, session_id: str) -> Told:
        return self.told

    def preface(self, session_id: str) -> Operation:
        return Operation(decide=lambda view: None, result=lambda: None)

    def rest(self, session_id: str) -> None:
        pass

    def committed(
        self, session_id: str, before: str | None, after: str | None, made: Sequence[tuple[str, str]]
    ) -> None:
        pass


class Index:
    """Raises what it is told to, then goes on."""

    def __init__(self) -> None:
        self.faults: deque[Exception] = deque()
        self.entries: list[Entry] = []

    def add(self, entries: Iterable[Entry]) -> None:
        if self.faults:
            raise self.faults.popleft()
        self.entries += entries


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def committer(sessions: Sessions, index: Index) -> Iterator[Committer]:
    made = Committer(sessions, index, SystemClock())  # type: ignore[arg-type]
    yield made
    made.close()


def event(text: str, result: Callable[[], Any] = lambda: "done", **fields: Any) -> Operation:
    return Operation(decide=lambda view: Change(files={text: b"x"}, subject=text), result=result, **fields)


def subjects(sessions: Sessions) -> list[str]:
    return [info.subject for info in sessions.told.log()]


def held(committer: Committer) -> tuple[Operation, threading.Event]:
    """The committer is in the middle of a batch until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def decide(view: View) -> None:
        begun.set()
        assert go_on.wait(BOUND_S)

    operation = Operation(decide=decide, result=lambda: "held")
    committer.add("s", [operation])
    assert begun.wait(BOUND_S)
    return operation, go_on


def test_who_has_gone_keeps_nobody_from_his_answer(committer: Committer, sessions: Sessions) -> None:
    """A future that was cancelled meanwhile: its event is a commit like any other, and the others are answered."""
    _, go_on = held(committer)
    gone, stays = event("gone"), event("stays")
    committer.add("s", [gone, stays])
    assert gone.future.cancel()
    go_on.set()
    assert stays.future.result(BOUND_S) == "done"
    assert subjects(sessions) == ["stays", "gone"]


def test_who_has_gone_is_not_told_of_a_failure_either(committer: Committer, sessions: Sessions) -> None:
    """Nor does that end the thread for all others."""
    _, go_on = held(committer)
    gone, stays = event("gone"), event("stays")
    committer.add("s", [gone, stays])
    assert gone.future.cancel()
    sessions.told.faults.append(StoreWriteFailed("the disk is full"))
    go_on.set()
    with pytest.raises(StoreWriteFailed):
        stays.future.result(BOUND_S)
    later = event("later")
    committer.add("s", [later])
    assert later.future.result(BOUND_S) == "done"
    assert subjects(sessions) == ["later"]


def test_an_answer_that_cannot_be_made_is_told_and_the_commit_stands(committer: Committer, sessions: Sessions) -> None:
    """What the caller wanted to know of a durable commit fails: that reaches him, and nobody else."""

    def fails() -> None:
        raise Damaged("that page cannot be read", path="jobs/1")

    bad, good = event("bad", fails), event("good")
    committer.add("s", [bad, good])
    with pytest.raises(Damaged, match="that page"):
        bad.future.result(BOUND_S)
    assert good.future.result(BOUND_S) == "done"
    assert subjects(sessions) == ["good", "bad"]


def test_an_event_that_is_refused_is_no_commit_and_its_neighbours_are(committer: Committer, sessions: Sessions) -> None:
    """Each learns its own outcome, in a repository that has no commit yet, too."""

    def refuse(view: View) -> Change:
        raise InvalidInput("not so")

    told: list[str] = []
    first = event("first", committed=told.append, job_id="j1")
    refused = Operation(decide=refuse, result=lambda: "never")
    committer.add("s", [refused, first])
    with pytest.raises(InvalidInput):
        refused.future.result(BOUND_S)
    assert first.future.result(BOUND_S) == "done"
    assert told == [info.commit_id for info in sessions.told.log()]


def test_an_index_that_somebody_holds_is_waited_for(committer: Committer, sessions: Sessions, index: Index) -> None:
    """Another process writes to it at that moment: nothing is refused, and the entry is there before the commit."""
    index.faults.extend([RepositoryBusy("the index is held")] * 2)
    operation = event("one", entry=Entry(job_id="j1", session_id="s"))
    committer.add("s", [operation])
    assert operation.future.result(BOUND_S) == "done"
    assert [entry.job_id for entry in index.entries] == ["j1"]
    assert subjects(sessions) == ["one"]


def test_an_index_that_cannot_be_written_refuses_the_event(
    committer: Committer, sessions: Sessions, index: Index
) -> None:
    """No commit becomes visible that the index does not know."""
    index.faults.append(OSError(28, "no space left on device"))
    operation = event("one", entry=Entry(job_id="j1", session_id="s"))
    committer.add("s", [operation])
    with pytest.raises(StoreWriteFailed, match="nothing changed"):
        operation.future.result(BOUND_S)
    assert subjects(sessions) == []


def test_a_fault_of_ours_is_told_and_ends_nothing_else(
    committer: Committer, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody thought of: those of its batch hear of it, and the next event is committed."""
    sessions.told.faults.append(KeyError("what"))
    first = event("first")
    committer.add("s", [first])
    with pytest.raises(OutcomeUnknown, match=r"KeyError.*retry with the same id") as caught:
        first.future.result(BOUND_S)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "failed in a way that should not be" in caplog.text
    second = event("second")
    committer.add("s", [second])
    assert second.future.result(BOUND_S) == "done"


def test_what_has_happened_already_outlasts_a_fault_of_ours(committer: Committer, sessions: Sessions) -> None:
    """It is tried again, as where a disk is full, behind a publication of what may have been written."""
    sessions.told.faults.extend([MemoryError()] * 3)
    ended = event("ended", keep=True)
    committer.add("s", [ended])
    assert ended.future.result(BOUND_S) == "done"
    assert subjects(sessions) == ["ended"]
    assert sessions.told.republished >= 1


def test_an_event_that_is_itself_the_fault_stops_no_other_for_long(committer: Committer, sessions: Sessions) -> None:
    """Even one that must not fail has an outcome in the end, and its session goes on."""

    def wrong(view: View) -> Change:
        raise TypeError("nobody thought of that")

    bad = Operation(decide=wrong, result=lambda: "never", keep=True)
    committer.add("s", [bad])
    with pytest.raises(OutcomeUnknown, match="nobody thought of that"):
        bad.future.result(BOUND_S)
    later = event("later")
    committer.add("s", [later])
    assert later.future.result(BOUND_S) == "done"
    assert subjects(sessions) == ["later"]


def test_what_ends_the_thread_is_told_to_who_waits(committer: Committer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever for a thread that is gone, and what ended it is not kept from whoever looks."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    def ends(view: View) -> None:
        raise SystemExit("enough")

    operation = Operation(decide=ends, result=lambda: None)
    committer.add("s", [operation])
    with pytest.raises(Bug, match="enough"):
        operation.future.result(BOUND_S)
    committer.close()
    assert seen == [SystemExit]


def test_an_event_is_given_up_when_its_session_is_held_for_too_long(committer: Committer, sessions: Sessions) -> None:
    """Nothing was written, and that is said; what must not fail, and who waits for ever, goes on being tried."""
    sessions.told.faults.extend([RepositoryBusy("a lock is taken")] * 1000)
    first = event("first", give_up_at=committer.deadline(0.02))
    kept = event("kept", give_up_at=committer.deadline(0.02), keep=True)
    patient = event("patient")
    committer.add("s", [first, kept, patient])
    with pytest.raises(SessionBusy, match="nothing was written"):
        first.future.result(BOUND_S)
    assert not kept.future.done()
    assert not patient.future.done()
    sessions.told.faults.clear()
    assert (kept.future.result(BOUND_S), patient.future.result(BOUND_S)) == ("done", "done")
    assert subjects(sessions) == ["patient", "kept"]


# --- a repository on its way to its smallest size ----------------------------------------------------------


def test_maintenance_waits_for_a_lock_and_then_says_that_it_is_done(committer: Committer, sessions: Sessions) -> None:
    """A lock that is taken for a moment costs it a pause."""
    sessions.told.step_faults.extend([RepositoryBusy("held")] * 2)
    operation = event("small", collect=True)
    committer.add("s", [operation])
    assert operation.future.result(BOUND_S) == "done"
    assert sessions.told.closed == 1


@pytest.mark.parametrize("error", [Damaged("a pack is damaged", path="p"), OSError(5, "the disk failed")])
def test_maintenance_that_cannot_go_on_says_why_and_the_commit_stands(
    error: Exception, committer: Committer, sessions: Sessions
) -> None:
    """What was committed before it is there; the next event comes to its turn."""
    sessions.told.step_faults.append(error)
    operation = event("small", collect=True)
    committer.add("s", [operation])
    with pytest.raises(type(error)):
        operation.future.result(BOUND_S)
    assert subjects(sessions) == ["small"]
    assert sessions.told.closed == 1


def test_maintenance_that_waits_for_a_lock_for_too_long_gives_up(
    committer: Committer, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else holds it for longer than anybody should."""
    monkeypatch.setattr(committer_module, "MAINTAIN_WAIT_S", -1.0)
    sessions.told.step_faults.append(RepositoryBusy("held"))
    operation = event("small", collect=True)
    committer.add("s", [operation])
    with pytest.raises(RepositoryBusy):
        operation.future.result(BOUND_S)


def test_a_committer_that_is_closed_takes_nothing_more(committer: Committer, sessions: Sessions) -> None:
    """What it had taken before is committed; what comes later is refused, and does not wait for ever."""
    _, go_on = held(committer)
    first = event("first")
    committer.add("s", [first])
    closing = threading.Thread(target=committer.close)
    closing.start()
    eventually(lambda: committer._closing)
    with pytest.raises(Closed):
        committer.add("s", [event("second")])
    go_on.set()
    closing.join(BOUND_S)
    assert first.future.result(0) == "done"
    assert subjects(sessions) == ["first"]


def test_a_close_ends_maintenance_that_is_under_way(committer: Committer, sessions: Sessions) -> None:
    """What was not done is said, and what was opened for it is given back."""
    sessions.told.step_faults.extend([RepositoryBusy("held")] * 1000)
    operation = event("small", collect=True)
    committer.add("s", [operation])
    eventually(lambda: len(sessions.told.step_faults) < 1000)
    committer.close()
    with pytest.raises(Closed, match="as small as it can be"):
        operation.future.result(0)
    assert (subjects(sessions), sessions.told.closed) == (["small"], 1)
