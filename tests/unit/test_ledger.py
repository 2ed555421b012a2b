"""A ledger keeps what was appended, in order, for every reader."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from openjobs.clock import SystemClock
from openjobs.durable import Disk, FileLock
from openjobs.errors import (
    Bug,
    Damaged,
    FileRefused,
    ForkedProcess,
    InvalidInput,
    NewerFormat,
    OutcomeUnknown,
    SessionBusy,
    StoreWriteFailed,
)
from openjobs.ledger import START, Cursor, Ledger
from openjobs.ledger.lines import checksum, encode
from tests.support.crash_states import RecordingDisk
from tests.support.disks import FaultyDisk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.jsonl"


def texts(ledger: Ledger, since: Cursor = START) -> list[Any]:
    return [record.data["n"] for record in ledger.read(since)]


def test_what_was_appended_is_read_in_order(path: Path) -> None:
    """Every reader sees the records in the order of their numbers, which start at 1 and have no gap."""
    ledger = Ledger(path)
    ledger.append({"n": 1})
    ledger.append_many([{"n": 2}, {"n": "drei\u2028\ud800\0"}])
    found = list(Ledger(path).read())
    assert [(record.seq, record.data["n"]) for record in found] == [(1, 1), (2, 2), (3, "drei\u2028\ud800\0")]


def test_append_returns_what_a_reader_will_see(path: Path) -> None:
    """The record that append returns equals the one that is read."""
    ledger = Ledger(path)
    first = ledger.append({"b": [1, {"c": None}], "a": 1.5})
    second = ledger.append({})
    assert [first, second] == list(ledger.read())


def test_a_missing_ledger_is_empty_and_reading_does_not_make_it(path: Path) -> None:
    """Reading never creates anything."""
    assert list(Ledger(path).read()) == []
    assert list(path.parent.iterdir()) == []


def test_a_cursor_resumes_where_it_stands(path: Path) -> None:
    """Reading from a cursor gives what came after it, also after a restart with the cursor as text."""
    ledger = Ledger(path)
    records = ledger.append_many([{"n": n} for n in range(100)])
    for record in records:
        cursor = Cursor.from_text(record.cursor.to_text())
        assert texts(Ledger(path), cursor) == list(range(record.data["n"] + 1, 100))


@pytest.mark.parametrize("text", ["", "1", "1.2.3", "1.2.3.xyzxyzxy", "-1.0.0.00000000", "1.2.3.00000000\n"])
def test_a_text_that_is_no_cursor_is_refused(text: str) -> None:
    """A cursor's text is read strictly."""
    with pytest.raises(InvalidInput):
        Cursor.from_text(text)


def test_two_ledgers_on_one_file_number_together(path: Path) -> None:
    """Writers catch up with each other: no number is used twice."""
    one, two = Ledger(path), Ledger(path)
    for n in range(20):
        (one if n % 2 else two).append({"n": n})
    assert [record.seq for record in one.read()] == list(range(1, 21))
    assert texts(two) == list(range(20))


def test_threads_and_objects_append_without_loss(path: Path) -> None:
    """Eight threads over two objects: each record once, each thread's own in its order."""
    ledgers = [Ledger(path), Ledger(path)]

    def work(number: int) -> None:
        for n in range(25):
            ledgers[number % 2].append({"n": (number, n)}, durable=False)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = texts(Ledger(path))
    assert len(found) == 200
    for number in range(8):
        assert [n for who, n in found if who == number] == list(range(25))


def test_processes_append_without_loss(path: Path) -> None:
    """Four processes append at once; every record is there, once."""
    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ledger = Ledger(path)
                for n in range(25):
                    ledger.append({"n": [number, n]})
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    found = texts(Ledger(path))
    assert sorted(found) == [[number, n] for number in range(4) for n in range(25)]


def test_exclusive_reads_decides_and_appends(path: Path) -> None:
    """Under `exclusive` nothing comes between what was read and what is appended."""
    ledger = Ledger(path)
    ledger.append({"n": 1})
    with ledger.exclusive() as held:
        last = list(held.read())[-1]
        held.append({"n": last.data["n"] + 1})
        with pytest.raises(SessionBusy):
            Ledger(path, busy_timeout_s=0.0).append({"n": "stranger"})
        held.append({"n": 3})
    assert texts(ledger) == [1, 2, 3]


def test_a_busy_ledger_is_left_as_it_was(path: Path) -> None:
    """Who does not get the lock in time is told so, and nothing is written."""
    ledger = Ledger(path, busy_timeout_s=0.0)
    ledger.append({"n": 1})
    lock = FileLock(path.with_name(".tasks.jsonl.lock"), ledger._disk)
    assert lock.try_acquire()
    before = path.read_bytes()
    with pytest.raises(SessionBusy):
        ledger.append({"n": 2})
    assert path.read_bytes() == before
    lock.release()
    ledger.append({"n": 2})


def test_a_forked_child_may_not_append(path: Path) -> None:
    """A ledger of the parent refuses to write in a child; the parent is not disturbed."""
    ledger = Ledger(path)
    ledger.append({"n": 1})
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ledger.append({"n": 2})
        except ForkedProcess:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    ledger.append({"n": 3})
    assert texts(ledger) == [1, 3]


def test_follow_gives_what_others_append_until_it_is_stopped(path: Path) -> None:
    """A follower gets the old records, then new ones as they come, and ends when told."""
    Ledger(path).append({"n": 0})
    stop, found = threading.Event(), []

    def look() -> None:
        for record in Ledger(path).follow(stop=stop, clock=SystemClock()):
            found.append(record.data["n"])
            if len(found) == 10:
                stop.set()

    thread = threading.Thread(target=look)
    thread.start()
    for n in range(1, 10):
        Ledger(path).append({"n": n})
    thread.join(timeout=20)
    assert found == list(range(10))


@pytest.mark.parametrize("payload", [{"n": float("nan")}, {"n": object()}, {"n": b"x"}, {"n": "x" * 2**20}])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(path: Path, payload: dict[str, Any]) -> None:
    """A payload that cannot be kept, or is too long, changes nothing; neither does the batch it is in."""
    with pytest.raises(InvalidInput):
        Ledger(path).append_many([{"n": 1}, payload])
    assert not path.exists()


def test_compaction_keeps_numbers_and_cursors(path: Path) -> None:
    """Kept records keep their numbers; a reader goes on where it stood; the last number is never used again."""
    ledger = Ledger(path)
    records = ledger.append_many([{"n": n} for n in range(10)])
    done = ledger.compact(lambda record: {"n": -4} if record.data["n"] == 4 else record.data["n"] in (2, 6))
    assert (done.kept, done.dropped) == (3, 7)
    assert [(record.seq, record.data["n"]) for record in Ledger(path).read()] == [(3, 2), (5, -4), (7, 6)]
    assert ledger.append({"n": "next"}).seq == 11
    assert texts(Ledger(path), records[5].cursor) == [6, "next"]
    assert texts(ledger, records[9].cursor) == ["next"]
    ledger.compact(lambda record: False)
    assert texts(ledger) == []
    assert Ledger(path).append({"n": 1}).seq == 12


def test_compaction_that_fails_to_decide_changes_nothing(path: Path) -> None:
    """An exception from the caller's choice leaves the ledger and its directory as they were."""
    ledger = Ledger(path)
    ledger.append({"n": 1})
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    with pytest.raises(ZeroDivisionError):
        ledger.compact(lambda record: bool(1 // 0))
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before
    ledger.append({"n": 2})


def test_another_process_goes_on_after_a_compaction(path: Path) -> None:
    """A writer that knew the file before it was compacted finds its end again."""
    one, two = Ledger(path), Ledger(path)
    one.append_many([{"n": n} for n in range(5)])
    two.append({"n": 5})
    one.compact(lambda record: record.data["n"] == 3)
    assert two.append({"n": 6}).seq == 7
    assert texts(one) == [3, 6]


def test_a_ledger_that_lost_records_is_refused(path: Path) -> None:
    """A file put back to an earlier state would give a number out twice."""
    ledger = Ledger(path)
    ledger.append({"n": 1})
    old = path.read_bytes()
    ledger.append({"n": 2})
    path.write_bytes(old)
    with pytest.raises(Damaged):
        ledger.append({"n": 3})
    path.unlink()
    with pytest.raises(Damaged):
        ledger.append({"n": 3})
    assert not path.exists()


@pytest.mark.parametrize(
    "line",
    [
        encode(1, 0, b'{"n":1,"n":2}'),
        encode(1, 0, b'{"n":{"a":1,"b":2,"a":3}}'),
        encode(1, 0, b"[1]"),
        encode(1, 0, b"nul"),
        encode(1, 0, b"[" * 200_000),
    ],
)
def test_a_payload_of_another_form_is_refused(path: Path, line: bytes) -> None:
    """A key that stands twice, and anything but an object, is damage although the checksum is right."""
    path.write_bytes(line)
    path.chmod(0o600)
    with pytest.raises(Damaged) as caught:
        list(Ledger(path).read())
    assert (caught.value.path, caught.value.offset) == (str(path), 0)


def test_a_newer_version_is_refused_by_its_own_name(path: Path) -> None:
    """A record of a later format stops readers and writers, and nothing is cut off."""
    ledger = Ledger(path)
    ledger.append({"n": 1})
    data = path.read_bytes() + b'{"v":2,"some":"thing"}\n'
    path.write_bytes(data)
    for use in (lambda: list(Ledger(path).read()), lambda: Ledger(path).append({})):
        with pytest.raises(NewerFormat) as caught:
            use()
        assert caught.value.offset == data.index(b'{"v":2')
    assert path.read_bytes() == data


def test_a_lost_or_moved_line_is_noticed(path: Path) -> None:
    """Lines that are whole but missing, doubled or in another order are damage."""
    Ledger(path).append_many([{"n": n} for n in range(4)])
    a, b, c, d = path.read_bytes().splitlines(keepends=True)
    for lines in ([a, c, d], [b, c, d], [a, b, b, c, d], [a, c, b, d], [a, encode(5, 1, b"{}"), encode(5, 5, b"{}")]):
        path.write_bytes(b"".join(lines))
        with pytest.raises(Damaged):
            list(Ledger(path).read())


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory", "readable", "lock link", "lock fifo"])
def test_what_is_no_file_of_ours_is_refused(path: Path, tmp_path: Path, kind: str) -> None:
    """A link, a FIFO, a directory or a file others may read is neither read nor written, nor is what it leads to."""
    other = tmp_path / "other"
    other.write_bytes(encode(1, 0, b'{"n":1}'))
    lock = path.with_name(".tasks.jsonl.lock")
    match kind:
        case "link":
            path.symlink_to(other)
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case "fifo":
            os.mkfifo(path, 0o600)
        case "directory":
            path.mkdir(mode=0o700)
        case "readable":
            path.write_bytes(b"")
            path.chmod(0o644)
        case "lock link":
            lock.symlink_to(other)
        case "lock fifo":
            os.mkfifo(lock, 0o600)
    if not kind.startswith("lock"):
        with pytest.raises(FileRefused):
            list(Ledger(path).read())
    with pytest.raises(FileRefused):
        Ledger(path).append({"n": 2})
    assert other.read_bytes() == encode(1, 0, b'{"n":1}')
    assert not (tmp_path / "nothing").exists()


def test_reading_takes_memory_for_a_line_not_for_the_file(path: Path) -> None:
    """A file without any newline is refused after the longest possible line, not read whole."""
    with path.open("wb") as file:
        file.truncate(2**32)
    path.chmod(0o600)
    with pytest.raises(Damaged) as caught:
        list(Ledger(path).read())
    assert caught.value.offset == 0


def test_a_record_that_need_not_be_durable_is_not_synced(path: Path) -> None:
    """`durable=False` writes without a sync; the next durable append covers it."""
    disk = RecordingDisk(path.parent)
    ledger = Ledger(path, disk)
    ledger.append({"n": 1})
    before = len(disk.effects)
    ledger.append({"n": 2}, durable=False)
    assert [effect.kind for effect in disk.effects[before:]] == ["write"]
    ledger.append({"n": 3})
    assert [effect.kind for effect in disk.effects[before:]] == ["write", "write", "sync"]


def test_the_checksum_covers_number_and_payload() -> None:
    """Two numbers never share a checksum for one payload by construction alone."""
    assert checksum(1, b"{}") != checksum(2, b"{}")
    assert checksum(1, b"{}") != checksum(1, b"[]")


# --- at the edges ------------------------------------------------------------------------------------------


def test_nothing_appended_is_nothing_written(path: Path) -> None:
    """Not even the file; and what was never written cannot be made smaller."""
    ledger = Ledger(path)
    assert ledger.append_many([]) == []
    done = ledger.compact(lambda record: True)
    assert (done.kept, done.dropped) == (0, 0)
    assert not path.exists()


def test_a_lock_that_was_given_back_is_not_used_any_more(path: Path) -> None:
    """Whoever kept what `exclusive` gave is told, before he writes beside somebody else."""
    ledger = Ledger(path)
    with ledger.exclusive() as held:
        held.append({"n": 1})
    for late in (lambda: held.append({"n": 2}), lambda: held.compact(lambda record: True)):
        with pytest.raises(Bug, match="given back"):
            late()
    assert texts(ledger) == [1]


def test_another_thread_is_waited_for_as_long_as_was_said(path: Path) -> None:
    """One object, two threads: the second is refused in time, and nothing was written by it."""
    ledger = Ledger(path, busy_timeout_s=0.01)
    refused: list[BaseException] = []

    def append() -> None:
        try:
            ledger.append({"n": 2})
        except SessionBusy as error:
            refused.append(error)

    with ledger.exclusive() as held:
        thread = threading.Thread(target=append)
        thread.start()
        thread.join(10)
        held.append({"n": 1})
    assert "another thread" in str(refused[0])
    assert texts(ledger) == [1]


def test_a_compaction_that_the_disk_refuses_leaves_it_whole(path: Path) -> None:
    """As it was, or compacted: that it is not known which is said."""
    disk = FaultyDisk()
    ledger = Ledger(path, disk=disk)
    ledger.append_many([{"n": number} for number in range(4)])
    k = 0
    while True:
        k += 1
        disk.arm(k)
        try:
            ledger.compact(lambda record: record.data["n"] % 2 == 0)
        except (OutcomeUnknown, StoreWriteFailed):
            assert texts(Ledger(path)) in ([0, 1, 2, 3], [0, 2, 3], [0, 2])
        if not disk.failed:
            break
    disk.disarm()
    assert k > 3
    assert ledger.append({"n": 4}).seq == 5
    assert texts(Ledger(path))[-1] == 4


def test_a_file_that_changes_under_our_lock_is_left_alone(path: Path) -> None:
    """Somebody writes to it without asking: nothing of ours is put behind that."""

    class Disturbed(Disk):
        def open_append(self, where: Any, mode: int = 0o600) -> int:
            with open(where, "ab") as file:
                file.write(b"not ours")
            return super().open_append(where, mode)

    Ledger(path).append({"n": 1})
    before = path.read_bytes()
    with pytest.raises(Damaged, match="while we had its lock"):
        Ledger(path, disk=Disturbed(durable=False)).append({"n": 2})
    assert path.read_bytes() == before + b"not ours"


def test_who_follows_sees_what_comes_later_and_nothing_twice(path: Path) -> None:
    """Through looks at which there is no file yet, looks at which nothing is new, and one that is told to stop."""
    ledger, stop = Ledger(path), threading.Event()
    happens = [
        lambda: None,
        lambda: ledger.append({"n": 1}),
        lambda: None,
        lambda: ledger.append_many([{"n": 2}, {"n": 3}]),
        lambda: None,
        stop.set,
    ]

    class Led(SystemClock):
        def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
            happens.pop(0)()
            return event.is_set()

    assert [record.data["n"] for record in ledger.follow(stop=stop, clock=Led())] == [1, 2, 3]
    assert list(ledger.follow(stop=stop)) == []
    assert happens == []


@pytest.mark.parametrize("how", ["another file", "written over", "cut", "gone"])
def test_what_became_of_the_file_since_our_own_append_is_noticed(path: Path, how: str) -> None:
    """Who appended last does not read it again, but looks whether it is still the file that he left."""
    ledger = Ledger(path)
    ledger.append_many([{"n": 1}, {"n": 2}])
    left = path.read_bytes()
    other = Ledger(path.with_name("other"))
    other.append_many([{"n": 8}, {"n": 9}])
    assert len(other.path.read_bytes()) == len(left)
    if how == "another file":
        other.path.rename(path)
    elif how == "written over":
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, other.path.read_bytes(), 0)
        os.close(fd)
        os.utime(path, ns=(0, 0))
    elif how == "cut":
        os.truncate(path, len(left) // 2)
    else:
        path.unlink()
    if how in ("cut", "gone"):
        with pytest.raises(Damaged):
            ledger.append({"n": 3})
    else:
        assert ledger.append({"n": 3}).seq == 3
        assert texts(Ledger(path)) == [8, 9, 3]
