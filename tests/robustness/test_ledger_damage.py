"""A ledger after crashes, faults and bit rot: repaired at its end, refused in its middle, never guessed."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from openjobs.durable import Disk
from openjobs.errors import Damaged, OutcomeUnknown, Refused, StoreWriteFailed
from openjobs.ledger import Ledger
from openjobs.ledger.ledger import Exclusive
from openjobs.ledger.lines import MAX_LINE_BYTES
from tests.support.crash_states import CrashState, DyingDisk, FailingDisk, Killed, RecordingDisk, distinct

NAME = "tasks.jsonl"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / NAME


def opened(path: Path) -> Ledger:
    """What a test does to look and to go on; no power is cut then."""
    return Ledger(path, Disk(durable=False))


def numbers(path: Path) -> list[int]:
    return [record.data["n"] for record in opened(path).read()]


def filled(path: Path, count: int = 5) -> list[int]:
    """A ledger with `count` records; where each begins, and the end."""
    records = opened(path).append_many([{"n": n, "text": "é" * n} for n in range(count)])
    return [0, *(record.cursor.offset_bytes for record in records)]


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)


def test_cut_at_every_byte_of_the_last_two_records(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Old records are intact, the torn one is kept aside and reported, and the next append is readable."""
    bounds = filled(path)
    data = path.read_bytes()
    for length in range(bounds[3], len(data) + 1):
        for old in path.parent.iterdir():
            old.unlink()
        put(path, data[:length])
        whole = max(i for i, bound in enumerate(bounds) if bound <= length)
        assert numbers(path) == list(range(whole))
        assert path.read_bytes() == data[:length], "reading repaired"

        ledger = opened(path)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert ledger.append({"n": 99}).seq == whole + 1
        assert numbers(path) == [*range(whole), 99]
        if length == bounds[whole]:
            assert ledger.set_aside == []
            assert not caplog.records
        else:
            assert [aside.read_bytes() for aside in ledger.set_aside] == [data[bounds[whole] : length]]
            assert str(length - bounds[whole]) in caplog.text
        assert path.read_bytes()[: bounds[whole]] == data[: bounds[whole]]


def test_every_flipped_bit_is_refused_with_its_place_and_the_file_left_alone(path: Path) -> None:
    """Any one bit anywhere in a ledger of whole records: the record's offset is named, nothing is written."""
    bounds = filled(path, 3)
    data = path.read_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        put(path, bytes(flipped))
        begins = max(bound for bound in bounds if bound <= bit // 8)
        for use in (lambda: numbers(path), lambda: opened(path).append({"n": 9})):
            with pytest.raises(Damaged) as caught:
                use()
            assert (caught.value.path, caught.value.offset) == (str(path), begins), bit
        assert path.read_bytes() == bytes(flipped)
    assert sorted(p.name for p in path.parent.iterdir()) == [f".{NAME}.lock", NAME]


def test_records_before_the_damage_can_still_be_read(path: Path) -> None:
    """A reader gets everything in front of the damage, then the error."""
    bounds = filled(path)
    data = bytearray(path.read_bytes())
    data[bounds[2] + 30] ^= 1
    put(path, bytes(data))
    reading = Ledger(path).read()
    assert [next(reading).data["n"] for _ in range(2)] == [0, 1]
    with pytest.raises(Damaged):
        next(reading)


@pytest.mark.parametrize("tail", [b"\0" * 5000, b'{"v":1,"seq":6' + b"\0" * 4000 + b'"}}\n', b"\0\n", b"{"])
def test_blocks_that_never_arrived_are_an_incomplete_record(path: Path, tail: bytes) -> None:
    """NULs where the end of the file grew before its data did are put aside like any cut."""
    filled(path)
    put(path, path.read_bytes() + tail)
    ledger = opened(path)
    ledger.append({"n": 5})
    assert ledger.set_aside[0].read_bytes() == tail
    assert numbers(path) == list(range(6))


@pytest.mark.parametrize("place", ["middle", "end, too long", "behind a hole"])
def test_a_hole_with_records_behind_it_is_damage(path: Path, place: str) -> None:
    """NULs are an incomplete append only where nothing whole follows and no append could be so long."""
    bounds = filled(path)
    data = path.read_bytes()
    match place:
        case "middle":
            data = data[: bounds[2]] + b"\0" * (bounds[3] - bounds[2]) + data[bounds[3] :]
        case "end, too long":
            data += b"\0" * (3 * MAX_LINE_BYTES)
        case "behind a hole":
            data = data[: bounds[4]] + b"\0\n" + data[bounds[4] :]
    put(path, data)
    with pytest.raises(Damaged):
        opened(path).append({})
    assert path.read_bytes() == data


def test_a_crash_between_keeping_and_cutting_loses_nothing(path: Path) -> None:
    """Killed at every effect of a repair, with every part of a write: the torn bytes are in a file, and
    the next append works."""
    bounds = filled(path)
    torn = path.read_bytes()[:-7]
    for after in range(60):
        for part in (0.0, 0.5, 1.0):
            for old in path.parent.iterdir():
                old.unlink()
            put(path, torn)
            disk = DyingDisk(after, part)
            try:
                Ledger(path, disk).append({"n": 4})
            except Killed:
                pass
            else:
                assert disk.count <= after
            if numbers(path) != [0, 1, 2, 3, 4]:
                opened(path).append({"n": 4})
            assert numbers(path) == [0, 1, 2, 3, 4]
            kept = [p.read_bytes() for p in path.parent.glob(NAME + ".torn-*")]
            assert torn[bounds[4] :] in kept
    assert disk.count <= after, "sixty effects were not enough to see a whole append"


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("start", ["missing", "whole", "torn"])
def test_an_append_with_any_failing_effect_leaves_a_ledger_that_works(
    path: Path, code: int, once: bool, start: str
) -> None:
    """The k-th effect fails: refused means nothing changed, unknown means whole or not at all, and with
    the disk well again the next append is read, by a new ledger and by the one that saw the fault."""
    for same in (True, False):
        for at in range(100):
            for old in path.parent.iterdir():
                old.unlink()
            before: list[int] = []
            if start != "missing":
                filled(path)
                before = list(range(5))
            if start == "torn":
                put(path, path.read_bytes()[:-3])
                before.pop()
            disk = FailingDisk(at, code, once=once)
            ledger = Ledger(path, disk)
            may_be = {tuple(before), (*before, 77)}
            try:
                ledger.append({"n": 77})
            except OutcomeUnknown:
                pass
            except StoreWriteFailed:
                may_be = {tuple(before)}
            else:
                may_be = {(*before, 77)}
            after = tuple(numbers(path))
            assert after in may_be, (at, start)
            failed, disk._once, disk._at = disk.failed, True, -1
            (ledger if same else Ledger(path)).append({"n": 88})
            assert tuple(numbers(path)) == (*after, 88)
            if not failed:
                break
        else:
            pytest.fail("a hundred effects were not enough to see an append without a fault")


def test_after_a_failed_sync_the_same_bytes_are_never_synced_again(path: Path) -> None:
    """The file whose sync failed is not synced a second time: what is good goes to a new file."""

    class Disks(Disk):
        def __init__(self) -> None:
            super().__init__()
            self.failing = False
            self.failed: set[int] = set()

        def sync_data(self, fd: int) -> None:
            inode = os.fstat(fd).st_ino
            assert inode not in self.failed, "a file was synced again after its sync had failed"
            if self.failing:
                self.failed.add(inode)
                raise OSError(errno.EIO, "no")
            super().sync_data(fd)

    disk = Disks()
    ledger = Ledger(path, disk)
    ledger.append({"n": 1})
    ledger.append({"n": 2}, durable=False)
    with path.open("rb") as _keeps_the_inode_number_taken:
        disk.failing = True
        with pytest.raises(OutcomeUnknown):
            ledger.append({"n": 3})
        disk.failing = False
        assert numbers(path) == [1, 2]
        ledger.append({"n": 4})
    assert numbers(path) == [1, 2, 4]


def test_a_reader_that_saw_a_record_whose_sync_failed_reads_its_successor(path: Path) -> None:
    """The number of a record that never became durable is used again; a cursor behind it misses nothing."""
    ledger = opened(path)
    ledger.append({"n": 1})
    good = path.read_bytes()
    ghost = ledger.append({"n": "ghost"})
    put(path, good)
    again = opened(path)
    assert again.append({"n": 2}).seq == ghost.seq
    assert [record.data["n"] for record in again.read(ghost.cursor)] == [2]


# --- power cuts ----------------------------------------------------------------------------------------


def workload(disk: RecordingDisk, path: Path, *, relaxed: bool = False) -> None:
    ledger = Ledger(path, disk)
    for n in range(3):
        ledger.append({"n": n, "text": "x" * (5000 if n == 1 else 10)})
        disk.note(str(n))
    ledger.append({"n": 3}, durable=not relaxed)
    ledger.append({"n": 4})
    disk.note("3")
    disk.note("4")
    disk.note("compacting")
    ledger.compact(lambda record: record.data["n"] % 2 == 0)
    disk.note("compacted")
    ledger.append({"n": 5})
    disk.note("5")


def check(state: CrashState, root: Path) -> None:
    root.mkdir(mode=0o700)
    state.build(root)
    path = root / NAME
    found = numbers(path)
    noted = {int(note) for note in state.notes if note.isdigit()}
    compacted = noted - {1, 3} <= set(found) and not {1, 3} & set(found)
    assert noted <= set(found) or ("compacting" in state.notes and compacted), (state, found)
    assert compacted or "compacted" not in state.notes
    assert found == sorted(found)
    last = opened(path).append({"n": 6})
    assert numbers(path) == [*found, 6]
    assert last.seq == 1 if not found else last.seq > max(found)


@pytest.mark.parametrize("relaxed", [False, True])
def test_every_power_cut_keeps_what_was_acknowledged(tmp_path: Path, relaxed: bool) -> None:
    """All legal crash states of appends and a compaction: what was acknowledged is there.

    With records that are not synced one by one, on file systems that grow a file only after its data.
    """
    recorded = tmp_path / "recorded"
    recorded.mkdir(mode=0o700)
    disk = RecordingDisk(recorded)
    workload(disk, recorded / NAME, relaxed=relaxed)
    count = 0
    for count, state in enumerate(distinct(disk, only_beginnings=[NAME] if relaxed else []), start=1):
        check(state, tmp_path / f"state-{count}")
    assert count > 60


def failed_syncs_and_power_cuts(tmp_path: Path) -> None:
    for number in range(50):
        recorded = tmp_path / f"recorded-{number}"
        recorded.mkdir(mode=0o700)
        disk = RecordingDisk(recorded, fail_sync=number)
        ledger = Ledger(recorded / NAME, disk)
        for n in range(5):
            try:
                ledger.append({"n": n}, durable=n != 1)
            except (OutcomeUnknown, StoreWriteFailed):
                continue
            if n != 1:
                disk.note(str(n))
        for count, state in enumerate(distinct(disk, only_beginnings=[NAME]), start=1):
            check(state, tmp_path / f"state-{number}-{count}")
        if disk.syncs <= number:
            assert number > 2
            return
    pytest.fail("fifty syncs were not enough to see a run without a failing one")


def test_every_failed_sync_and_then_every_power_cut(tmp_path: Path) -> None:
    """The kernel dropped what a failed sync should have written, and says yes to the next: what is
    acknowledged afterwards, by the ledger that saw the fault, is there after any power cut."""
    failed_syncs_and_power_cuts(tmp_path)


def test_a_ledger_that_trusts_a_failed_sync_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the new file after a failed sync, the search above finds a lost record."""

    def trust(self: Exclusive, error: OSError) -> None:
        self._ledger._suspect = False
        raise OutcomeUnknown from error

    monkeypatch.setattr(Exclusive, "_start_over", trust)
    with pytest.raises((AssertionError, Damaged)):
        failed_syncs_and_power_cuts(tmp_path)


@pytest.mark.parametrize("forgotten", ["sync of the data", "sync of the name", "cut before it is kept"])
def test_the_harness_finds_a_wrong_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    """A ledger that forgets one step fails the check above: the check can see what it is there for."""
    recorded = tmp_path / "recorded"
    recorded.mkdir(mode=0o700)
    torn = b'{"v":1,"seq":1,'
    if forgotten == "cut before it is kept":
        put(recorded / NAME, torn)
        keep = Exclusive._keep_aside

        def cut_first(self: Exclusive, tail: bytes, offset: int) -> Path:
            fd = self._disk.open_update(self._path)
            self._disk.truncate(fd, offset)
            self._disk.sync_data(fd)
            os.close(fd)
            return keep(self, tail, offset)

        monkeypatch.setattr(Exclusive, "_keep_aside", cut_first)
    disk = RecordingDisk(recorded)
    if forgotten == "sync of the data":
        monkeypatch.setattr(disk, "sync_data", lambda fd: None)
    if forgotten == "sync of the name":
        monkeypatch.setattr(disk, "sync_dir", lambda path: None)
    workload(disk, recorded / NAME)
    monkeypatch.undo()

    def all_hold() -> None:
        for count, state in enumerate(distinct(disk), start=1):
            root = tmp_path / f"state-{count}"
            if forgotten == "cut before it is kept":
                assert any(torn in data for data in state.files.values())
            check(state, root)

    with pytest.raises((AssertionError, Refused, Damaged)):
        all_hold()
