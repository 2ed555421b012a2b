"""The room of facts: what is stored, who can read it and how, and what damage does (spec 001)."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs import GitJobStore, MockTaskStore, errors, facts
from openjobs.durable import Disk, FileLock
from openjobs.facts import (
    START,
    Cursor,
    Fact,
    FactLog,
    FileFactLog,
    MemoryFactLog,
    Recorder,
    Registered,
    Settled,
    to_json,
)
from openjobs.ids import new_id
from openjobs.ledger import Ledger
from tests.support import eventually
from tests.support.disks import FaultyDisk, RecordingDisk
from tests.support.facts import T0, registered, settled

RELAXED = Disk(durable=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A session's."""
    made = tmp_path / "s1"
    made.mkdir()
    return made


@pytest.fixture
def log(directory: Path) -> FileFactLog:
    return FileFactLog(directory / "events.jsonl", RELAXED)


Logs = Callable[[], FactLog]


@pytest.fixture(params=["file", "memory"])
def any_log(request: pytest.FixtureRequest, log: FileFactLog) -> FactLog:
    return log if request.param == "file" else MemoryFactLog()


# --- what is stored ------------------------------------------------------------------------------------------


def test_the_ledger_holds_plain_json(log: FileFactLog, directory: Path) -> None:
    """One line a fact, in the frame of all ledgers; anybody's JSON reader finds the same names."""
    log.append([registered(tool_call_id="toolu_1"), settled(started_at_ms=T0 + 5, tool_call_id="toolu_1")])
    lines = [record.data for record in Ledger(directory / "events.jsonl").read()]
    first = {
        "type": "job/registered",
        "job_id": "00000000-0000-4000-8000-000000000000",
        "kind": "job",
        "session_id": "s1",
        "caller_session_id": None,
        "parent_job_id": None,
        "label": "job 0",
        "tool_call_id": "toolu_1",
        "registered_at_ms": T0,
    }
    end = {"started_at_ms": T0 + 5, "settled_at_ms": T0 + 1000, "status": "completed", "producer_reported": True}
    assert lines == [first, {**first, "type": "job/settled", **end}]


def test_what_was_appended_is_read(any_log: FactLog) -> None:
    """The same facts, in the same order, each with a cursor that stands behind it."""
    written = [registered(1), registered(2), settled(2), settled(1)]
    any_log.append(written[:3])
    any_log.append(written[3:])
    found = list(any_log.read())
    assert found == written
    assert [type(fact) for fact in found] == [Registered, Registered, Settled, Settled]
    for place, fact in enumerate(found):
        assert list(any_log.read(fact.cursor)) == written[place + 1 :]


def test_a_type_of_a_newer_version_is_passed_over(log: FileFactLog, directory: Path) -> None:
    """Readers of today read what they know; new names in a known fact do not disturb them either."""
    ledger = Ledger(directory / "events.jsonl", RELAXED)
    ledger.append({"type": "job/paused", "what": 1})
    ledger.append({**to_json(registered(1)), "mood": "good"})
    assert list(log.read()) == [registered(1)]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"type": 7},
        {"type": "job/registered"},
        {**to_json(registered()), "label": None},
        {**to_json(registered()), "registered_at_ms": "today"},
        {**to_json(registered()), "registered_at_ms": True},
        {**to_json(registered()), "job_id": "7"},
        {**to_json(settled()), "producer_reported": 1},
        {**to_json(settled()), "settled_at_ms": None},
    ],
)
def test_what_is_no_fact_is_damage_with_its_place(log: FileFactLog, directory: Path, record: dict[str, Any]) -> None:
    """A record that no writer of ours made is not guessed at."""
    log.append([registered(1)])
    place = (directory / "events.jsonl").stat().st_size
    Ledger(directory / "events.jsonl", RELAXED).append(record)
    found = log.read()
    assert next(found) == registered(1)
    with pytest.raises(errors.Damaged, match=f"byte {place} is no fact"):
        next(found)


# --- windows -------------------------------------------------------------------------------------------------


def test_a_window_can_hold_an_end_whose_registration_is_earlier(log: FileFactLog, directory: Path) -> None:
    """What happened from `since` on and before `until`; the end tells what the registration told."""
    log.append([registered(0), registered(5), settled(5, 1), settled(0, 10)])
    assert list(facts.read(directory, since=T0 + 10)) == [settled(0, 10)]
    assert list(facts.read(directory, until=T0 + 5)) == [registered(0)]
    assert list(facts.read(directory, T0 + 5, T0 + 10)) == [registered(5), settled(5, 1)]
    (end,) = facts.read(directory, since=T0 + 10)
    assert (end.label, end.registered_at_ms) == ("job 0", T0)


def test_a_window_is_by_time_not_by_place(log: FileFactLog, directory: Path) -> None:
    """A clock that was set back, or another process, may have written an earlier time behind a later one."""
    log.append([registered(50), registered(10), registered(60)])
    assert list(facts.read(directory, since=T0 + 20)) == [registered(50), registered(60)]


def test_times_are_given_as_datetime_or_milliseconds(log: FileFactLog, directory: Path) -> None:
    """A time without a zone is refused: it would mean something else on another machine."""
    log.append([registered(0), registered(10)])
    when = datetime.fromtimestamp(T0 / 1000, UTC) + timedelta(milliseconds=10)
    assert list(facts.read(directory, since=when)) == list(facts.read(directory, since=T0 + 10)) == [registered(10)]
    for wrong in (when.replace(tzinfo=None), "yesterday", 1.5, True):
        with pytest.raises(errors.InvalidInput, match="with a zone"):
            facts.read(directory, since=wrong)  # type: ignore[arg-type]


def test_reading_goes_on_from_a_cursor(log: FileFactLog, directory: Path) -> None:
    """Also from its text, which somebody kept in a file."""
    log.append([registered(n) for n in range(5)])
    third = list(facts.read(directory))[2]
    assert list(facts.read(directory, after=third.cursor)) == [registered(3), registered(4)]
    assert list(facts.read(directory, after=third.cursor.to_text())) == [registered(3), registered(4)]
    with pytest.raises(errors.InvalidInput, match="not a cursor"):
        facts.read(directory, after="soon")


@pytest.mark.parametrize("name", ["99.99999.99999.ffb4b6ec", "{seq}.{start}.{end}.00000000", "0.5.9.00000000"])
def test_a_cursor_of_no_fact_here_is_refused(any_log: FactLog, name: str) -> None:
    """Behind the end, with another checksum, or of nothing at all: the error says what to do, and no fact is given,
    by reading nor by following."""
    any_log.append([registered(n) for n in range(5)])
    third = list(any_log.read())[2].cursor
    # what a cursor of a ledger on disk may look like to one in memory
    wrong = Cursor.from_text(
        name.format(seq=3, start=third.start_bytes or 1, end=third.offset_bytes or 2),
    )
    with pytest.raises(errors.CursorLost, match="from the beginning"):
        next(facts.read(_Session(any_log), after=wrong))
    with facts.follow(_Session(any_log), after=wrong) as following, pytest.raises(errors.CursorLost):
        next(following)


def test_a_cursor_is_found_where_its_fact_stands_now(log: FileFactLog, directory: Path) -> None:
    """The place in bytes is a hint: number and checksum say which fact it is."""
    log.append([registered(n) for n in range(5)])
    third = list(log.read())[2].cursor
    moved = attrs.evolve(third, start_bytes=0, offset_bytes=9)
    assert list(facts.read(directory, after=moved)) == [registered(3), registered(4)]


@pytest.mark.parametrize("how", ["older", "older and longer", "cut", "removed", "written over"])
def test_a_follower_says_that_its_ledger_is_another_one(log: FileFactLog, directory: Path, how: str) -> None:
    """Not even one whose length is the same goes on as if nothing had happened; it says so each time it is asked."""
    path = directory / "events.jsonl"
    log.append([registered(0)])
    backup = path.read_bytes()
    log.append([registered(1)])
    with facts.follow(directory) as following:
        assert [next(following), next(following)] == [registered(0), registered(1)]
        if how == "removed":
            path.unlink()
        elif how == "cut":
            os.truncate(path, len(backup))
        elif how == "written over":
            other = directory / "other.jsonl"
            FileFactLog(other, RELAXED).append([registered(0), registered(2)])
            assert other.stat().st_size == path.stat().st_size
            path.write_bytes(other.read_bytes())
        else:
            path.unlink()
            path.write_bytes(backup)
            path.chmod(0o600)
            if how == "older and longer":
                FileFactLog(path, RELAXED).append([registered(n) for n in (3, 4, 5)])
        for _ in range(2):
            with pytest.raises(errors.CursorLost, match="from the beginning"):
                next(following)


def test_a_session_or_its_directory_can_be_read(tmp_path: Path) -> None:
    """A session of either store, or the directory of one on disk, by anybody, without a store."""
    for store in (GitJobStore(tmp_path / "home"), MockTaskStore()):
        with store:
            session = store.session(store.create_session("s1"))
            assert list(facts.read(session)) == []
            store.facts("s1").append([registered(1)])
            assert list(facts.read(session)) == [registered(1)]
    directory = tmp_path / "home" / "sessions" / "s1"
    assert list(facts.read(directory)) == list(facts.read(str(directory))) == [registered(1)]
    with pytest.raises(errors.UnknownSession, match="s2 is not there"):
        facts.read(directory.with_name("s2"))


def test_reading_writes_nothing(directory: Path) -> None:
    """A session without facts stays without a ledger."""
    assert list(facts.read(directory)) == []
    assert facts.intervals(directory) == []
    assert list(directory.iterdir()) == []


# --- following -----------------------------------------------------------------------------------------------


def test_following_gives_what_was_and_what_comes(any_log: FactLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fact once and in order, until it is closed from another thread."""
    session = _Session(any_log)
    any_log.append([registered(1)])
    found: list[Fact] = []
    with facts.follow(session) as following:
        reader = threading.Thread(target=lambda: found.extend(following))
        reader.start()
        for n in range(2, 50):
            any_log.append([registered(n)])
        eventually(lambda: following.cursor.seq == 49)
    reader.join(10)
    assert not reader.is_alive()
    assert found == [registered(n) for n in range(1, 50)]


class _Session:
    def __init__(self, log: FactLog) -> None:
        self.facts = log


def test_following_goes_on_where_it_was(any_log: FactLog) -> None:
    """The cursor of the last fact that was given out is where the next follower begins: nothing twice, nothing
    left out, however much was read ahead."""
    session = _Session(any_log)
    any_log.append([registered(n) for n in range(1000)])
    cursor = START
    found: list[Fact] = []
    while len(found) < 1000:
        with facts.follow(session, after=cursor) as following:
            found += [next(following) for _ in range(min(7, 1000 - len(found)))]
            cursor = following.cursor
    assert found == [registered(n) for n in range(1000)]
    with facts.follow(session, after=cursor.to_text()) as following:
        any_log.append([settled(3)])
        assert next(following) == settled(3)


def test_following_with_async_for(any_log: FactLog) -> None:
    """The loop goes on meanwhile; cancelling a wait loses nothing."""
    session = _Session(any_log)
    ticks = 0

    async def main() -> list[Fact]:
        nonlocal ticks
        found: list[Fact] = []
        following = facts.follow(session)

        async def take() -> None:
            async for fact in following:
                found.append(fact)  # noqa: PERF401  # what came before a cancel must be there

        task = asyncio.create_task(take())
        for n in range(30):
            any_log.append([registered(n)])
            await asyncio.sleep(0)
            ticks += 1
            if n % 10 == 9:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                task = asyncio.create_task(take())
        async with asyncio.timeout(10):
            while len(found) < 30:
                await asyncio.sleep(0.005)
        following.close()
        async with asyncio.timeout(10):
            await task
        return found

    assert asyncio.run(main()) == [registered(n) for n in range(30)]
    assert ticks == 30


def test_a_follower_holds_nothing_between_two_facts(log: FileFactLog, directory: Path) -> None:
    """No descriptor stays open, so one that is forgotten costs nothing; the checks after each test see to that, too."""
    log.append([registered(n) for n in range(1000)])
    before = sorted(os.listdir("/dev/fd"))
    following = facts.follow(directory)
    next(following)
    assert sorted(os.listdir("/dev/fd")) == before


def test_a_follower_raises_damage_after_what_is_before_it(log: FileFactLog, directory: Path) -> None:
    """Not silently at an end: what comes behind the damage cannot be known."""
    log.append([registered(n) for n in range(3)])
    _spoil(directory / "events.jsonl", line=1)
    following = facts.follow(directory)
    assert next(following) == registered(0)
    with pytest.raises(errors.Damaged):
        next(following)


# --- intervals -----------------------------------------------------------------------------------------------


def test_intervals_have_durations_and_incomplete_ones_are_marked(log: FileFactLog, directory: Path) -> None:
    """From registration to settlement; one without an end has none, and is not made up."""
    log.append([registered(0), registered(5), settled(0, 250, started_at_ms=T0 + 100)])
    log.append([settled(7, 30, status="errored", producer_reported=False)])
    done, running, lone = facts.intervals(directory)
    assert (done.complete, done.duration_ms, done.started_at_ms, done.status) == (True, 250, T0 + 100, "completed")
    assert (running.complete, running.duration_ms, running.status) == (False, None, None)
    assert (lone.complete, lone.duration_ms, lone.producer_reported) == (True, 30, False)
    assert attrs.asdict(done) == {
        "job_id": registered(0).job_id,
        "kind": "job",
        "session_id": "s1",
        "caller_session_id": None,
        "parent_job_id": None,
        "label": "job 0",
        "tool_call_id": None,
        "registered_at_ms": T0,
        "started_at_ms": T0 + 100,
        "settled_at_ms": T0 + 250,
        "status": "completed",
        "producer_reported": True,
    }


def test_intervals_of_a_window_reach_into_it(log: FileFactLog, directory: Path) -> None:
    """Those that began before its end and did not end before its beginning."""
    log.append([registered(0), registered(100), registered(200), settled(0, 50), settled(100, 50)])

    def labels(*window: int | None) -> list[str]:
        return [each.label for each in facts.intervals(directory, *window)]

    assert labels() == ["job 0", "job 100", "job 200"]
    assert labels(T0 + 51) == ["job 100", "job 200"]
    assert labels(T0 + 50) == ["job 0", "job 100", "job 200"]
    assert labels(None, T0 + 200) == ["job 0", "job 100"]
    assert labels(T0 + 500) == ["job 200"]


def test_a_duration_is_never_negative(log: FileFactLog, directory: Path) -> None:
    """Somebody set the clock back while the job ran: both times stay as they were."""
    log.append([registered(0), settled(0, -5000)])
    (interval,) = facts.intervals(directory)
    assert (interval.duration_ms, interval.settled_at_ms) == (0, T0 - 5000)


def test_pairing_takes_facts_from_anywhere() -> None:
    """Of several sessions, or of what a follower gave so far."""
    found = facts.pair([registered(1), settled(2), settled(1)])
    assert [(each.label, each.complete) for each in found] == [("job 1", True), ("job 2", True)]


# --- damage --------------------------------------------------------------------------------------------------


def _spoil(path: Path, *, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b"job/", b"jop/")
    path.write_bytes(b"".join(lines))


def test_damage_in_the_middle_is_told_with_its_place_and_left(log: FileFactLog, directory: Path) -> None:
    """What is before it is read. A writer goes on behind it, for whoever repairs the file; nothing is changed."""
    log.append([registered(n) for n in range(3)])
    path = directory / "events.jsonl"
    _spoil(path, line=1)
    spoilt = path.read_bytes()
    found = facts.read(directory)
    assert next(found) == registered(0)
    with pytest.raises(errors.Damaged) as caught:
        next(found)
    assert caught.value.offset == len(spoilt.splitlines(keepends=True)[0])
    FileFactLog(path, RELAXED).append([registered(9)])
    assert path.read_bytes().startswith(spoilt)
    with pytest.raises(errors.Damaged):
        facts.intervals(directory)


def test_every_torn_tail_is_cut_by_the_next_append(log: FileFactLog, directory: Path) -> None:
    """A crash in the middle of an append: readers see what is whole, the next append puts the rest aside."""
    log.append([registered(0), registered(1)])
    path = directory / "events.jsonl"
    whole = path.read_bytes()
    begin = len(whole.splitlines(keepends=True)[0])
    for cut in range(begin, len(whole)):
        path.write_bytes(whole[:cut])
        assert list(facts.read(directory)) == [registered(0)], cut
        assert path.read_bytes() == whole[:cut]
        FileFactLog(path, RELAXED).append([registered(2)])
        assert list(facts.read(directory)) == [registered(0), registered(2)], cut
        for aside in directory.glob("events.jsonl.torn-*"):
            assert whole[begin:].startswith(aside.read_bytes())
            aside.unlink()


@pytest.mark.parametrize("records", [1, 2, 300])
def test_a_new_writer_finds_the_end_from_the_end(directory: Path, records: int) -> None:
    """Its first append numbers on where the last one stopped, and reads no more than the end of the file."""
    path = directory / "events.jsonl"
    FileFactLog(path, RELAXED).append([registered(n) for n in range(records)])
    FileFactLog(path, RELAXED).append([settled(1)])
    assert [record.seq for record in Ledger(path).read()] == list(range(1, records + 2))


def test_a_new_writer_among_long_records(directory: Path) -> None:
    """Records longer than what is looked at first are found all the same."""
    path = directory / "events.jsonl"
    for n in range(3):
        FileFactLog(path, RELAXED).append([registered(n, label="x" * 300_000)])
    assert [record.seq for record in Ledger(path).read()] == [1, 2, 3]


# --- a full disk ---------------------------------------------------------------------------------------------


def test_every_failure_of_an_append_is_an_error_and_the_log_goes_on(directory: Path) -> None:
    """The k-th effect fails, k = 1, 2, …, with a full disk and with a broken one: the append raises, what was there
    stays, and the next append works."""
    for code in (errno.ENOSPC, errno.EIO):
        k = 1
        while True:
            path = directory / f"events-{code}-{k}.jsonl"
            disk = FaultyDisk(durable=True)
            log = FileFactLog(path, disk)
            log.append([registered(1)])
            disk.arm(k, code)
            try:
                log.append([registered(2)])
            except errors.OpenJobsError:
                disk.disarm()
                failed = True
            else:
                failed = bool(disk.failed)
                disk.disarm()
            log.append([registered(3)])
            found = list(log.read())
            assert found[0] == registered(1)
            assert found[-1] == registered(3)
            assert found[1:-1] in ([], [registered(2)])
            if not disk.failed:
                assert not failed
                assert found == [registered(1), registered(2), registered(3)]
                break
            k += 1
        assert k > 3


# --- writers that come together --------------------------------------------------------------------------------


class _SlowDisk(RecordingDisk):
    """Its syncs wait for `go`."""

    def __init__(self) -> None:
        super().__init__(durable=True)
        self.go = threading.Event()
        self.syncing = threading.Event()

    def sync_data(self, fd: int) -> None:
        self.syncing.set()
        assert self.go.wait(10)
        super().sync_data(fd)


def test_facts_that_come_while_one_is_written_share_a_sync(directory: Path) -> None:
    """Sixteen threads, two syncs: the one that is under way, and one for all that waited."""
    disk = _SlowDisk()
    log = FileFactLog(directory / "events.jsonl", disk)
    threads = [threading.Thread(target=log.append, args=([registered(n)],)) for n in range(17)]
    threads[0].start()
    assert disk.syncing.wait(10)
    for thread in threads[1:]:
        thread.start()
    eventually(lambda: len(log._waiting) == 16)
    disk.go.set()
    for thread in threads:
        thread.join(10)
    assert sorted(fact.registered_at_ms for fact in log.read()) == [T0 + n for n in range(17)]
    assert [effect.name for effect in disk.effects].count("sync") == 2


def test_a_fact_that_no_ledger_can_hold_takes_no_other_along(directory: Path) -> None:
    """Of those that shared a write only the one that is too long fails."""
    disk = _SlowDisk()
    log = FileFactLog(directory / "events.jsonl", disk)
    failed: list[int] = []

    def append(n: int, label: str) -> None:
        try:
            log.append([registered(n, label=label)])
        except errors.InvalidInput:
            failed.append(n)

    threads = [threading.Thread(target=append, args=(n, "x" * 2**21 if n == 3 else "ok")) for n in range(6)]
    threads[0].start()
    assert disk.syncing.wait(10)
    for thread in threads[1:]:
        thread.start()
    eventually(lambda: len(log._waiting) == 5)
    disk.go.set()
    for thread in threads:
        thread.join(10)
    assert failed == [3]
    assert sorted(fact.registered_at_ms - T0 for fact in log.read()) == [0, 1, 2, 4, 5]


def test_a_ledger_that_somebody_holds_keeps_who_waits_only_once(directory: Path) -> None:
    """Another process that has the lock and does not let go: one append waits its second, the next ones do not; a
    little later it is tried again."""
    path = directory / "events.jsonl"
    now = 100.0
    log = FileFactLog(path, RELAXED, busy_timeout_s=0.01, monotonic=lambda: now)
    other = FileLock(path.with_name(".events.jsonl.lock"), RELAXED)
    assert other.try_acquire()
    with pytest.raises(errors.SessionBusy, match="another process"):
        log.append([registered(1)])
    other.release()
    with pytest.raises(errors.SessionBusy, match="a moment ago"):
        log.append([registered(2)])
    now += 5.1
    log.append([registered(3)])
    assert list(log.read()) == [registered(3)]


def test_an_interrupted_writer_leaves_nobody_waiting(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the thread that writes for others: they are told that the outcome is not known."""
    disk = _SlowDisk()
    log = FileFactLog(directory / "events.jsonl", disk)
    ledger_append = log._ledger.append_many
    calls: list[int] = []

    def append_many(payloads: Any) -> Any:
        calls.append(len(payloads))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ledger_append(payloads)

    monkeypatch.setattr(log._ledger, "append_many", append_many)
    ends: list[str] = []

    def append(n: int) -> None:
        try:
            log.append([registered(n)])
            ends.append("done")
        except BaseException as error:
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=append, args=(n,)) for n in range(4)]
    threads[0].start()
    assert disk.syncing.wait(10)
    for thread in threads[1:]:
        thread.start()
    eventually(lambda: len(log._waiting) == 3)
    disk.go.set()
    for thread in threads:
        thread.join(10)
    assert sorted(ends) == ["KeyboardInterrupt", "OutcomeUnknown", "OutcomeUnknown", "done"]
    log.append([registered(9)])


# --- the recorder --------------------------------------------------------------------------------------------


class _Broken:
    def append(self, those: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def read(self, after: Cursor = START) -> Iterator[Fact]:
        return iter(())

    def state(self) -> object:
        return None


def test_one_session_that_cannot_be_written_takes_no_other_along(caplog: pytest.LogCaptureFixture) -> None:
    """A warning names what is missing; the facts of the other session are there."""
    good = MemoryFactLog()
    logs: dict[str, FactLog] = {"bad": _Broken(), "s1": good}
    recorder = Recorder(logs.__getitem__)
    with caplog.at_level(logging.WARNING), recorder.together():
        recorder.record(registered(1, session_id="bad"))
        recorder.record(registered(2))
        recorder.record(settled(1, session_id="bad"), settled(2))
        assert list(good.read()) == []
    assert list(good.read()) == [registered(2), settled(2)]
    (said,) = caplog.messages
    assert said == (
        f"session bad: not recorded, or not known to be: job/registered of {registered(1).job_id}, "
        f"job/settled of {registered(1).job_id}: [Errno 28] No space left on device"
    )


def test_what_is_gathered_is_this_threads_own() -> None:
    """While one thread gathers, another one's facts are written at once."""
    log = MemoryFactLog()
    recorder = Recorder(lambda session_id: log)
    with recorder.together():
        recorder.record(registered(1))
        other = threading.Thread(target=recorder.record, args=(registered(2),))
        other.start()
        other.join()
        assert list(log.read()) == [registered(2)]
    assert list(log.read()) == [registered(2), registered(1)]


def test_a_block_within_a_block_is_part_of_it() -> None:
    """Nothing that was gathered before is lost, and nothing is written early."""
    log = MemoryFactLog()
    recorder = Recorder(lambda session_id: log)
    with recorder.together():
        recorder.record(registered(1))
        with recorder.together():
            recorder.record(registered(2))
        assert list(log.read()) == []
    assert list(log.read()) == [registered(1), registered(2)]


def test_what_was_gathered_is_written_although_the_block_raises() -> None:
    """A step that fails does not take the facts of others along."""
    log = MemoryFactLog()
    recorder = Recorder(lambda session_id: log)

    def fail() -> None:
        with recorder.together():
            recorder.record(registered(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(log.read()) == [registered(1)]


def test_a_store_remembers_only_so_many_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded over any number of sessions, and a log that was forgotten goes on where it was."""
    monkeypatch.setattr("openjobs.store.git._FACT_LOGS", 2)
    store = GitJobStore(tmp_path, durability="relaxed")
    with store:
        for name in ("a", "b", "c"):
            (store.session_dir(name)).mkdir()
            store.facts(name).append([registered(1)])
        assert len(store._facts) == 2
        store.facts("a").append([registered(2)])
        assert list(facts.read(store.session_dir("a"))) == [registered(1), registered(2)]


def test_ids_of_facts_are_checked_like_any_id() -> None:
    """A fact of a made-up id would be refused by its readers."""
    assert facts.fact.from_json(to_json(registered(job_id=new_id())), START) is not None
    with pytest.raises(ValueError, match="cannot be a job id"):
        facts.fact.from_json(to_json(registered(job_id="../../etc")), START)
