"""Draining a run that may be on another machine: nothing lost, nothing doubled, nothing believed blindly."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from openjobs.errors import LogCompleted, SourceMismatch
from openjobs.runlog import (
    Completion,
    Drain,
    Ending,
    RunLogReader,
    RunLogWriter,
    SourceStatus,
    Stream,
    finish_never_started,
    finish_run,
)
from openjobs.runlog.state import PENDING_MOST_BYTES
from tests.support import FakeClock
from tests.support.crash_states import DyingDisk, Killed
from tests.support.run_sources import IDENTITY, RemoteHost, new_run, pattern


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return new_run(tmp_path)


def opened(run: Path) -> RunLogWriter:
    return RunLogWriter(run, task_id="t", run_id="r")


@contextlib.contextmanager
def accepted(run: Path):  # type: ignore[no-untyped-def]
    with opened(run) as log:
        log.accept(IDENTITY)
        yield log


def test_an_immediate_end_with_long_tails_is_drained_whole(run: Path) -> None:
    """A run that had ended when it was accepted: both tails, many chunks long, are in the log."""
    out, err = pattern(5 * PENDING_MOST_BYTES + 3), pattern(3 * PENDING_MOST_BYTES + 1, seed=1)
    host = RemoteHost(out, err)
    with accepted(run) as log:
        status = Drain(log, host, identity=IDENTITY).run()
        assert status == host.status()
        assert (log.state.stdout_bytes, log.state.stderr_bytes) == (len(out), len(err))
    mixed = (run / "log").read_bytes()
    assert sorted(mixed) == sorted(out + err)
    assert max(limit for _, _, limit in host.reads) <= PENDING_MOST_BYTES


def test_an_empty_run_is_drained_at_once(run: Path) -> None:
    """No bytes at all: still confirmed by a read of each stream and a second status."""
    host = RemoteHost()
    with accepted(run) as log:
        assert Drain(log, host, identity=IDENTITY).run() is not None
    assert {stream for stream, _, _ in host.reads} == set(Stream)
    assert host.asked == 2


def test_a_finished_drain_asks_nobody_any_more(run: Path) -> None:
    """Another step takes nothing, and another run gives the same end."""
    host = RemoteHost(b"x")
    with accepted(run) as log:
        drain = Drain(log, host, identity=IDENTITY)
        status = drain.run()
        asked, reads = host.asked, list(host.reads)
        assert not drain.step()
        assert drain.run() is status
    assert (host.asked, host.reads) == (asked, reads)


def test_output_is_taken_while_the_run_goes_on(run: Path) -> None:
    """Bytes come as they are made; the drain ends only when the run has."""
    host = RemoteHost(b"first\n", ended=False)
    with accepted(run) as log:
        drain = Drain(log, host, identity=IDENTITY)
        assert drain.step()
        assert RunLogReader(run).read().data == b"first\n"
        assert not drain.step()
        host.streams[Stream.STDERR] += b"oops\n"
        assert drain.step()
        host.ended = True
        assert not drain.step()
        assert drain.finished == host.status()
    assert (run / "log").read_bytes() == b"first\noops\n"


def test_an_idle_drain_sleeps_and_a_backlog_is_taken_without(run: Path) -> None:
    """Nothing new: a pause on the clock. A thousand chunks: none."""
    clock, stop = FakeClock(), threading.Event()
    host = RemoteHost(pattern(20 * PENDING_MOST_BYTES), ended=False)
    with accepted(run) as log:
        drain = Drain(log, host, identity=IDENTITY, clock=clock)
        thread = threading.Thread(target=drain.run, args=(stop,))
        thread.start()
        clock.until_waiting()
        assert log.state.stdout_bytes == 20 * PENDING_MOST_BYTES
        stop.set()
        thread.join(timeout=30)
        assert drain.finished is None


@pytest.mark.parametrize("cut", [1, PENDING_MOST_BYTES, PENDING_MOST_BYTES + 5])
def test_a_committed_stdout_prefix_with_stderr_at_zero_resumes_right(run: Path, cut: int) -> None:
    """A restart goes on at each stream's own offset."""
    out, err = pattern(3 * PENDING_MOST_BYTES), pattern(1000, seed=1)
    with accepted(run) as log:
        for begin in range(0, cut, PENDING_MOST_BYTES):
            log.append_native(stdout=out[begin : min(cut, begin + PENDING_MOST_BYTES)])
    with accepted(run) as log:
        assert (log.state.stdout_bytes, log.state.stderr_bytes) == (cut, 0)
        host = RemoteHost(out, err)
        Drain(log, host, identity=IDENTITY).run()
        assert (Stream.STDOUT, 0) not in {(stream, offset) for stream, offset, _ in host.reads}
    mixed = (run / "log").read_bytes()
    assert mixed[:cut] == out[:cut]
    assert mixed.replace(err, b"") == out


def test_neither_stream_starves_the_other(run: Path) -> None:
    """With endless stdout, stderr still gets its share of every append."""
    host = RemoteHost(pattern(50 * PENDING_MOST_BYTES), pattern(PENDING_MOST_BYTES, seed=1), ended=False)
    with accepted(run) as log:
        Drain(log, host, identity=IDENTITY).step()
    mixed = (run / "log").read_bytes()
    assert host.streams[Stream.STDERR][-100:] in mixed[: 3 * PENDING_MOST_BYTES]


# --- what is not believed ---------------------------------------------------------------------------------


def refused(run: Path, host: RemoteHost) -> None:
    with opened(run) as log:
        drain = Drain(log, host, identity=IDENTITY, clock=FakeClock())
        before = log.state
        with pytest.raises(SourceMismatch) as caught:
            drain.run()
        assert caught.value.code == "LOG_SOURCE_MISMATCH"
        assert drain.finished is None
        assert log.state == before


def test_another_run_is_refused(run: Path) -> None:
    """Another identity, before, at, or after the first answer: none of its bytes are in the log."""
    with accepted(run) as log, pytest.raises(SourceMismatch):
        Drain(log, RemoteHost(), identity="someone else")
    host = RemoteHost(b"strange bytes")
    host.identity = "someone else"
    refused(run, host)
    assert (run / "log").read_bytes() == b""


def test_a_run_that_nobody_accepted_is_not_drained(run: Path) -> None:
    """Acceptance is in the journal before the first byte."""
    with opened(run) as log, pytest.raises(SourceMismatch):
        Drain(log, RemoteHost(), identity=IDENTITY)


def test_stale_final_lengths_are_refused(run: Path) -> None:
    """Final lengths below what is in the log already, or below what the source still gives."""
    with accepted(run) as log:
        log.append_native(stdout=b"0123456789")
    for claims in ((9, 0), (0, 0)):
        host = RemoteHost(b"0123456789")
        host.claims = claims
        refused(run, host)
    host = RemoteHost(b"0123456789+more")
    host.claims = (10, 0)
    refused(run, host)
    assert (run / "log").read_bytes() == b"0123456789"


def test_a_source_that_changes_its_mind_is_refused(run: Path) -> None:
    """After it has ended, length, outcome, identity and the end itself are fixed; also in the last look."""
    accepted_run = accepted(run)
    with accepted_run:
        pass

    def later(number: int, change: Callable[[RemoteHost], None]) -> RemoteHost:
        host = RemoteHost()
        host.on_status = lambda asked: change(host) if asked >= number else None
        return host

    for change in (
        lambda host: setattr(host, "outcome", "failed"),
        lambda host: setattr(host, "ended", False),
        lambda host: setattr(host, "identity", "someone else"),
        lambda host: setattr(host, "claims", (0, 1)),
    ):
        refused(run, later(1, change))


def test_a_source_that_gives_more_than_asked_is_refused(run: Path) -> None:
    """A chunk longer than its limit would break the bound of the intent."""
    with accepted(run):
        pass
    host = RemoteHost()
    host.read = lambda stream, offset, limit: b"x" * (limit + 1)  # type: ignore[method-assign]
    refused(run, host)


def test_an_end_of_one_stream_only_is_refused(run: Path) -> None:
    """Both lengths or none."""
    with accepted(run):
        pass
    host = RemoteHost()
    host.status = lambda: SourceStatus(identity=IDENTITY, stdout_bytes=0)  # type: ignore[method-assign]
    refused(run, host)


def test_a_source_that_never_gives_its_last_bytes_is_given_up(run: Path) -> None:
    """It ended, claims more than it has, and gives nothing for ten seconds: refused, what came is kept."""
    clock = FakeClock()
    host = RemoteHost(b"0123456789")
    host.claims = (11, 0)
    with accepted(run) as log:
        drain = Drain(log, host, identity=IDENTITY, clock=clock)
        assert drain.step()
        for _ in range(3):
            assert not drain.step()
            clock.advance(3)
        assert drain.finished is None
        clock.advance(2)
        with pytest.raises(SourceMismatch):
            drain.step()
    assert (run / "log").read_bytes() == b"0123456789"


# --- the order of the end -----------------------------------------------------------------------------------


class Steps:
    """An owner that writes down what is asked of it and dies after a chosen number of steps."""

    def __init__(self, run: Path, dies_after: int = 99) -> None:
        self.done: list[str] = []
        self._run = run
        self._left = dies_after

    def _step(self, name: str) -> None:
        if not self._left:
            raise Killed
        self._left -= 1
        state = RunLogReader(self._run).state()
        self.done.append(name + ("+" if state and state.completion else ""))

    def publish(self, status: SourceStatus) -> str:
        self._step("publish")
        return "publication failed" if status.outcome == "unfetchable" else status.outcome

    def store_final(self, outcome: str) -> None:
        self._step(f"store {outcome}")

    def final_event(self, outcome: str) -> bytes:
        self._step("event")
        return b"[%b]\n" % outcome.encode()

    def release(self) -> None:
        self._step("release")

    def clear(self) -> None:
        self._step("clear")


ORDER = ["publish", "store completed", "event", "release+", "clear+"]


def test_a_run_ends_in_the_one_order(run: Path) -> None:
    """Drain, publish, store, journal, release, clear; the log is complete only from release on."""
    steps = Steps(run)
    with accepted(run) as log:
        done = finish_run(log, Drain(log, RemoteHost(b"out\n"), identity=IDENTITY).run, steps)
    assert done == Completion(outcome="completed", ending=Ending.DRAINED)
    assert steps.done == ORDER
    assert (run / "log").read_bytes() == b"out\n[completed]\n"


def test_an_end_interrupted_anywhere_is_finished_by_the_next(run: Path, tmp_path: Path) -> None:
    """Whatever the last step was: the log is the same, and a complete log skips source and publication."""
    for dies_after in range(6):
        for number in range(40):
            here = new_run(tmp_path, f"run-{dies_after}-{number}")
            disk = DyingDisk(number)
            first = Steps(here, dies_after)
            with contextlib.suppress(Killed), RunLogWriter(here, task_id="t", run_id="r", disk=disk) as log:
                log.accept(IDENTITY)
                finish_run(log, Drain(log, RemoteHost(b"out\n"), identity=IDENTITY).run, first)
            second = Steps(here)
            host = RemoteHost(b"out\n")
            with accepted_or_complete(here) as log:
                was_complete = log.state.completion is not None
                finish_run(log, lambda log=log, host=host: Drain(log, host, identity=IDENTITY).run(), second)
            assert second.done == (["release+", "clear+"] if was_complete else ORDER)
            assert host.asked == 0 or not was_complete
            assert (here / "log").read_bytes() == b"out\n[completed]\n"
            assert b"".join(RunLogReader(here).follow()) == b"out\n[completed]\n"


def accepted_or_complete(run: Path) -> RunLogWriter:
    log = opened(run)
    if not log.state.accepted:
        log.accept(IDENTITY)
    return log


def test_a_failed_publication_is_what_the_log_says(run: Path) -> None:
    """The completion has the outcome that was established, whatever the source would say later."""
    host = RemoteHost()
    host.outcome = "unfetchable"
    with accepted(run) as log:
        finish_run(log, Drain(log, host, identity=IDENTITY).run, Steps(run))
    state = RunLogReader(run).state()
    assert state is not None
    assert state.completion is not None
    assert state.completion.outcome == "publication failed"


def test_a_stopped_drain_finishes_nothing(run: Path) -> None:
    """Stopping is no end: no step was taken, and it can go on later."""
    steps = Steps(run)
    with accepted(run) as log:
        assert finish_run(log, lambda: None, steps) is None
        assert steps.done == []
        assert log.state.completion is None


def test_a_run_that_never_started_is_finished_locally(run: Path) -> None:
    """Only where no source accepted it; its followers end."""
    with opened(run) as log:
        log.append(b"the keeper could not start\n")
        done = finish_never_started(log, "failed", Steps(run))
        again = Steps(run)
        assert finish_never_started(log, "failed", again) == done
        assert again.done == ["release+", "clear+"]
        with pytest.raises(LogCompleted):
            log.accept(IDENTITY)
    assert b"".join(RunLogReader(run).follow()) == b"the keeper could not start\n[failed]\n"
