"""The runner's small parts, each alone: timers, looking at heads, markers, the newest ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import attrs
import pytest

from openjobs import MockTaskStore
from openjobs.runner.heads import Heads, Watch
from openjobs.runner.markers import Markers
from openjobs.runner.recent import Recent
from openjobs.runner.timers import Timer, Timers
from tests.support import FakeClock, eventually
from tests.support.jobs import job_for

PATIENCE_S = 10.0
IDLE_S = 60.0


@pytest.fixture
def timers(clock: FakeClock) -> Iterator[Timers]:
    timers = Timers(clock)
    yield timers
    timers.close()


# --- timers --------------------------------------------------------------------------------------------------


def test_a_call_that_raises_is_logged_and_disturbs_no_other(
    timers: Timers, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes after it comes all the same, in order."""
    called: list[str] = []

    def broken() -> None:
        called.append("first")
        raise ValueError("broken")

    timers.call_in(1.0, broken)
    timers.call_in(2.0, lambda: called.append("second"))
    clock.until_waiting()
    clock.advance(5)
    eventually(lambda: called == ["first", "second"])
    assert "a timed call failed" in caplog.text


def test_a_timer_that_is_cancelled_as_its_time_comes_does_not_start(clock: FakeClock) -> None:
    """The thread has it in its hands already; `cancel` is the last word until the call begins."""

    class Late(Timers):
        def _call(self, timer: Timer) -> None:
            if timer is cancelled:
                timer.cancel()
            super()._call(timer)

    timers, called = Late(clock), threading.Event()
    cancelled = timers.call_in(1.0, lambda: pytest.fail("it was cancelled"))
    timers.call_in(1.0, called.set)
    clock.until_waiting()
    clock.advance(1)
    assert called.wait(PATIENCE_S)
    timers.close()


def test_closed_timers_call_nothing(timers: Timers, clock: FakeClock) -> None:
    """What was asked for is forgotten, what is asked for later too; no thread is left or made."""
    called: list[str] = []
    timers.call_in(1.0, lambda: called.append("before"))
    clock.until_waiting()
    timers.close()
    later = timers.call_in(0.0, lambda: called.append("after"))
    clock.advance(5)
    assert timers._thread is None
    later.cancel()
    assert called == []


def test_a_thread_that_cannot_be_started_is_tried_with_the_next_timer(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the interpreter's end, or without memory for another one: who asked goes on, and nothing is forgotten."""
    called: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        timers.call_in(0.0, lambda: called.append(1))
    timers.call_in(0.0, lambda: called.append(2))
    eventually(lambda: called == [1, 2])


# --- heads ---------------------------------------------------------------------------------------------------


def test_a_session_that_cannot_be_read_hides_no_other(timers: Timers, caplog: pytest.LogCaptureFixture) -> None:
    """Its watches hear of no change, until it can be read: then of the one that they missed."""
    values: dict[str, object] = {"good": 1}

    def read(session_id: str) -> object:
        if session_id not in values:
            raise OSError(5, "the disk failed")
        return values[session_id]

    heads = Heads(read, timers)
    seen: list[tuple[str, bool]] = []
    watches = [heads.watch(name, lambda changed, name=name: seen.append((name, changed))) for name in ("bad", "good")]  # type: ignore[misc]
    heads.look_now()
    assert seen == [("bad", False), ("good", True)]
    assert "session bad could not be read" in caplog.text
    values["bad"] = 1
    heads.look_now()
    assert seen[2:] == [("bad", True), ("good", False)]
    for watch in watches:
        heads.stop(watch)


def test_a_look_that_raises_disturbs_no_other(timers: Timers, caplog: pytest.LogCaptureFixture) -> None:
    """It is looked again the next time."""
    heads = Heads(lambda session_id: 1, timers)
    seen: list[bool] = []

    def broken(changed: bool) -> None:
        seen.append(changed)
        raise ValueError("broken")

    watches = [heads.watch("s1", broken), heads.watch("s1", seen.append)]
    heads.look_now()
    heads.look_now()
    assert seen == [True, True, False, False]
    assert caplog.text.count("looking at session s1 failed") == 2
    for watch in watches:
        heads.stop(watch)


def test_no_look_begins_after_a_watch_was_stopped(timers: Timers) -> None:
    """Not even where the look before it, of the same session, stops it."""
    heads = Heads(lambda session_id: 1, timers)
    seen: list[str] = []
    watches: list[Watch] = []

    def first(changed: bool) -> None:
        seen.append("first")
        for watch in watches:
            heads.stop(watch)

    watches += [heads.watch("s1", first), heads.watch("s1", lambda changed: seen.append("second"))]
    heads.look_now()
    heads.look_now()
    assert seen == ["first"]


def test_a_watch_that_begins_after_another_ended_looks_first(timers: Timers) -> None:
    """The session is being read when its last watch is stopped: what was read then is nobody's last look, so whoever
    watches next is told to look."""
    watches: list[Watch] = []

    def read(session_id: str) -> object:
        while watches:
            heads.stop(watches.pop())
        return 1

    heads = Heads(read, timers)
    watches.append(heads.watch("s1", lambda changed: pytest.fail("it was stopped")))
    heads.look_now()
    assert heads._last == {}
    seen: list[bool] = []
    watch = heads.watch("s1", seen.append)
    heads.look_now()
    assert seen == [True]
    heads.stop(watch)


# --- markers -------------------------------------------------------------------------------------------------


@pytest.fixture
def markers(store: MockTaskStore, sid: str, clock: FakeClock, timers: Timers) -> Markers:
    """Of runner `r`; idle since long when the clock is moved by a minute."""
    store.create_session("s2")
    return Markers(store, "r", clock, timers, idle_s=IDLE_S)


def idle(markers: Markers, clock: FakeClock, *session_ids: str) -> None:
    for session_id in session_ids:
        markers.use(session_id, "job")
        markers.done(session_id, "job")
    with clock._moved:
        clock._monotonic += IDLE_S  # without waking the timer: the test sweeps
    assert len(markers) == len(session_ids)


def when_cleared(store: MockTaskStore, patch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Do that once, in the middle of the first clearing."""
    clear, left = store.active.clear, [then]

    def clearing(runner_id: str, session_id: str) -> None:
        clear(runner_id, session_id)
        if left:
            left.pop()()

    patch.setattr(store.active, "clear", clearing)


def test_a_marker_that_cannot_be_removed_is_too_many_and_no_more(
    store: MockTaskStore, markers: Markers, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep goes on with the others; the next use of that session marks it again, as after any other sweep."""
    idle(markers, clock, "s1", "s2")
    clear = store.active.clear

    def refuse(runner_id: str, session_id: str) -> None:
        if session_id == "s1":
            raise OSError(30, "read-only file system")
        clear(runner_id, session_id)

    with monkeypatch.context() as patch:
        patch.setattr(store.active, "clear", refuse)
        markers.sweep()
    assert (store.active.sessions("r"), len(markers)) == (["s1"], 0)
    markers.use("s1", "job")
    assert store.active.sessions("r") == ["s1"]
    markers.done("s1", "job")


def test_a_session_that_was_never_marked_has_nothing_to_clear(
    store: MockTaskStore, markers: Markers, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mark failed, so its use did not count; the sweep forgets it and touches no file."""

    def refuse(*_: str) -> None:
        raise OSError(28, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(store.active, "mark", refuse)
        with pytest.raises(OSError, match="no space"):
            markers.use("s1", "job")
    with clock._moved:
        clock._monotonic += IDLE_S
    monkeypatch.setattr(store.active, "clear", lambda *_: pytest.fail("nothing was marked"))
    markers.sweep()
    assert len(markers) == 0


def test_a_session_that_is_used_while_others_are_swept_keeps_its_marker(
    store: MockTaskStore, markers: Markers, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was idle when the sweep began, and is not when its turn comes."""
    idle(markers, clock, "s1", "s2")
    when_cleared(store, monkeypatch, lambda: markers.use("s2", "job"))
    markers.sweep()
    assert (store.active.sessions("r"), len(markers)) == (["s2"], 1)
    markers.done("s2", "job")


def test_a_use_that_meets_its_sweep_marks_again(
    store: MockTaskStore, markers: Markers, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The use is counted while the mark is being taken away, waits for that, and has a mark when it returns."""
    idle(markers, clock, "s1")
    using = threading.Thread(target=lambda: markers.use("s1", "job"))

    def use() -> None:
        using.start()
        eventually(lambda: markers._markers["s1"].users == {"job"})

    when_cleared(store, monkeypatch, use)
    markers.sweep()
    using.join(PATIENCE_S)
    assert (store.active.sessions("r"), len(markers)) == (["s1"], 1)
    markers.done("s1", "job")


def test_no_marker_goes_while_an_end_waits_for_room(
    store: MockTaskStore, markers: Markers, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recovery must look there, should this runner die before the end is written."""
    idle(markers, clock, "s1")
    with monkeypatch.context() as patch:
        patch.setattr(store, "unsettled", lambda: 1)
        markers.sweep()
        assert store.active.sessions("r") == ["s1"]
    markers.sweep()
    assert store.active.sessions("r") == []


# --- the newest ends -----------------------------------------------------------------------------------------


def test_the_newest_ends_are_bounded_in_number_and_in_text(store: MockTaskStore, sid: str) -> None:
    """The oldest go first. An end that is put again is one end, with the text that it has now."""
    recent = Recent(limit_jobs=3, limit_chars=100)
    jobs = [job_for(store, sid, "p", result_text="x" * 19) for _ in range(4)]
    for job in jobs:
        recent.put(job)
    assert [recent.get(job.job_id) for job in jobs] == [None, *jobs[1:]]
    for _ in range(50):
        recent.put(jobs[1])
    assert len(recent) == 3
    recent.put(attrs.evolve(jobs[1], result_text="x" * 90))
    assert [recent.get(job.job_id) is not None for job in jobs] == [False, True, False, False]
    recent.drop(jobs[1].job_id)
    recent.drop(jobs[1].job_id)
    for job in jobs[:3]:
        recent.put(job)
    assert len(recent) == 3
    recent.put(attrs.evolve(jobs[3], error="e" * 100))
    assert len(recent) == 0
