"""Whatever stops the writer of a run's log, and wherever: the log is byte-identical, each byte once."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from openjobs.durable import Disk
from openjobs.errors import OpenJobsError, OutcomeUnknown, StoreWriteFailed
from openjobs.runlog import Drain, LogState, RunLogReader, RunLogWriter
from openjobs.runlog.sidecar import load
from openjobs.runlog.state import PENDING_MOST_BYTES, SLOT_BYTES, Pending, encode
from tests.support import eventually
from tests.support.chaos import Chaos
from tests.support.crash_states import DyingDisk, FailingDisk, Killed, RecordingDisk, distinct
from tests.support.run_sources import IDENTITY, RemoteHost, new_run, pattern

STARTING = b"starting\n"
LONG = (pattern(PENDING_MOST_BYTES + 100), pattern(300, seed=1))
SHORT = (b"out, no newline", b"err\n")
#: two alphabets, so that the streams can be told apart in a mixed log
DIGITS, LETTERS = b"0123456789 ", b"abcdefghij_"


def work(log: RunLogWriter, native: tuple[bytes, bytes]) -> None:
    """A whole run, or what is left of it."""
    if log.state.log_bytes == 0:
        log.append(STARTING)
    if log.state.completion is None:
        log.accept(IDENTITY, b"accepted\n")
        Drain(log, RemoteHost(*native), identity=IDENTITY).run()
    log.complete("completed", event=b"end\n")


def opened(run: Path, disk: Disk | None = None, kind: type[RunLogWriter] = RunLogWriter) -> RunLogWriter:
    return kind(run, task_id="t", run_id="r", disk=disk)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bytes, bytes], bytes]:
    """What the log of an undisturbed run holds."""
    found = {}
    for number, native in enumerate((LONG, SHORT)):
        run = new_run(tmp_path_factory.mktemp("expected"), str(number))
        with opened(run) as log:
            work(log, native)
        found[native] = (run / "log").read_bytes()
        assert len(found[native]) == len(STARTING + b"accepted\nend\n") + sum(map(len, native))
    return found


def visible(run: Path) -> bytes:
    """What a reader sees; nothing where no log was made yet."""
    reader = RunLogReader(run)
    try:
        data, offset = b"", 0
        while (chunk := reader.read(offset)).data:
            data, offset = data + chunk.data, chunk.next_offset_bytes
        return data
    except LookupError:
        return b""


def check(run: Path, want: bytes, native: tuple[bytes, bytes], at_least: int = 0) -> None:
    """Readers see a beginning, `at_least` so long; the next writer completes it to the byte, and followers end."""
    before = (run / "log").read_bytes() if (run / "log").exists() else b""
    seen = visible(run)
    assert want.startswith(seen)
    assert len(before) >= at_least
    with opened(run, Disk(durable=False)) as log:
        assert log.state.log_bytes >= max(len(seen), at_least)
        assert (run / "log").read_bytes().startswith(before), "bytes that were there are not there any more"
        work(log, native)
    assert (run / "log").read_bytes() == want
    assert b"".join(RunLogReader(run).follow()) == want


# --- kills --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("native", [LONG, SHORT], ids=["long", "short"])
def test_killed_at_every_effect(
    tmp_path: Path, native: tuple[bytes, bytes], part: float, expected: dict[tuple[bytes, bytes], bytes]
) -> None:
    """Before, in the middle of and after every write, sync and rename: byte-identical, each byte once."""
    for number in range(200):
        run = new_run(tmp_path, str(number))
        disk = DyingDisk(number, part)
        with contextlib.suppress(Killed), opened(run, disk) as log:
            work(log, native)
        died = disk.count > number
        check(run, expected[native], native)
        if not died:
            return
    pytest.fail("two hundred effects were not enough to see a whole run")


def test_killed_at_every_effect_of_every_recovery(
    tmp_path: Path, expected: dict[tuple[bytes, bytes], bytes], chaos: Chaos
) -> None:
    """The recovery of a killed writer is killed as well, at each of its effects; the third one finishes."""
    first, deepest = 0, 0
    while True:
        died_first = False
        for second in range(0 if chaos else first % 2, 200, 1 if chaos else 2):
            run = new_run(tmp_path, f"{first}-{second}")
            disks = DyingDisk(first, 0.5), DyingDisk(second, 0.5)
            for disk in disks:
                with contextlib.suppress(Killed), opened(run, disk) as log:
                    work(log, SHORT)
            check(run, expected[SHORT], SHORT)
            died_first = disks[0].count > first
            deepest = max(deepest, second)
            if disks[1].count <= second:
                break
        first += 1
        if not died_first:
            break
    assert first > 20
    assert deepest > 20


def test_a_killed_process_leaves_a_log_that_the_next_one_continues(tmp_path: Path) -> None:
    """Real processes, real SIGKILL, wherever it finds them: one log, every byte once, and its end."""
    run = new_run(tmp_path)
    native = pattern(3_000_000), pattern(600_000, seed=1).translate(bytes.maketrans(DIGITS, LETTERS))
    total = len(STARTING + b"accepted\nend\n") + sum(map(len, native))
    for cycle in range(12):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException), opened(run) as log:
                work(log, native)
            os._exit(0)
        goal = (cycle + 1) * total // 13 + cycle * 37
        eventually(lambda goal=goal: (run / "log").exists() and (run / "log").stat().st_size >= goal, 30)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with opened(run) as log:
        work(log, native)
        assert (log.state.stdout_bytes, log.state.stderr_bytes) == tuple(map(len, native))
    data = (run / "log").read_bytes()
    assert len(data) == total
    assert b"".join(RunLogReader(run).follow()) == data
    mixed = data[len(STARTING + b"accepted\n") : -len(b"end\n")]
    assert (mixed.translate(None, LETTERS), mixed.translate(None, DIGITS)) == native


# --- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("same", [True, False], ids=["same writer", "next writer"])
def test_every_effect_fails(
    tmp_path: Path, code: int, once: bool, same: bool, expected: dict[tuple[bytes, bytes], bytes]
) -> None:
    """The k-th effect fails: a typed error, and the same or the next writer goes on from the state it reads."""
    for number in range(200):
        run = new_run(tmp_path, str(number))
        disk = FailingDisk(number, code, once=once)
        log = None
        try:
            log = opened(run, disk)
            work(log, SHORT)
        except (OutcomeUnknown, StoreWriteFailed):
            pass
        failed = disk.failed
        assert expected[SHORT].startswith(visible(run))
        if log and same:
            disk._at, disk._once = -1, True
            work(log, SHORT)
            assert (run / "log").read_bytes() == expected[SHORT]
        if log:
            log.close()
        check(run, expected[SHORT], SHORT)
        if not failed:
            return
    pytest.fail("two hundred effects were not enough to see a run without a fault")


def test_a_full_disk_in_the_middle_of_an_append_leaves_bytes_that_are_completed(tmp_path: Path) -> None:
    """ENOSPC half-way through the log: outcome unknown, nothing cut off, finished before anything else."""
    run = new_run(tmp_path)

    class FullDisk(Disk):
        full = False

        def write(self, fd: int, data: object) -> int:
            raw = data if isinstance(data, bytes) else b"".join(data)  # type: ignore[call-overload]
            if self.full and os.fstat(fd).st_ino == (run / "log").stat().st_ino:
                super().write(fd, raw[: len(raw) // 2])
                raise OSError(errno.ENOSPC, "full")
            return super().write(fd, raw)

    disk = FullDisk()
    with opened(run, disk) as log:
        disk.full = True
        with pytest.raises(OutcomeUnknown):
            log.append(b"0123456789")
        assert (run / "log").read_bytes() == b"01234"
        assert visible(run) == b""
        with pytest.raises(StoreWriteFailed):
            log.append(b"+")
        disk.full = False
        assert log.state.log_bytes == 10
        log.append(b"+")
    assert visible(run) == b"0123456789+"


# --- power cuts -----------------------------------------------------------------------------------------------


def survives(
    tmp_path: Path, disk: RecordingDisk, native: tuple[bytes, bytes], want: bytes, known: set[object] | None = None
) -> int:
    """Check every crash state of what `disk` recorded, but those in `known`; how many there were."""
    known = set() if known is None else known
    count = 0
    for count, state in enumerate(distinct(disk, only_beginnings=["log"]), start=1):
        acknowledged = max((int(note) for note in state.notes), default=0)
        what = (acknowledged, tuple(sorted(state.files.items())))
        if what in known:
            continue
        known.add(what)
        run = tmp_path / f"state-{count}"
        run.mkdir(mode=0o700)
        state.build(run)
        try:
            check(run, want, native, acknowledged)
        except (AssertionError, OpenJobsError) as error:
            names = {name: len(data) for name, data in state.files.items()}
            raise AssertionError(f"state {count} after effect {state.moment}: {names}: {error}") from error
        shutil.rmtree(run)
    return count


def noting(disk: RecordingDisk, kind: type[RunLogWriter] = RunLogWriter) -> type[RunLogWriter]:
    """A writer that notes its length whenever a call of it has returned."""

    def noted(name: str) -> Callable[..., None]:
        def method(self: RunLogWriter, *args: object, **options: object) -> None:
            getattr(kind, name)(self, *args, **options)
            disk.note(str(self._state.log_bytes))

        return method

    names = ("accept", "append", "append_native", "complete", "flush")
    return type("Noting", (kind,), {name: noted(name) for name in names})


def recorded(root: Path, native: tuple[bytes, bytes], kind: type[RunLogWriter] = RunLogWriter) -> RecordingDisk:
    run = new_run(root, "recorded")
    disk = RecordingDisk(run)
    with opened(run, disk, noting(disk, kind)) as log:
        work(log, native)
    return disk


@pytest.mark.parametrize("native", [LONG, SHORT], ids=["long", "short"])
def test_every_power_cut_of_a_run(
    tmp_path: Path, native: tuple[bytes, bytes], expected: dict[tuple[bytes, bytes], bytes]
) -> None:
    """Every legal subset of unsynced effects at every moment: what was acknowledged is there, each byte once."""
    assert survives(tmp_path, recorded(tmp_path, native), native, expected[native]) > 60


@pytest.mark.parametrize("arrived", [0, 1, 6, 12])
def test_every_power_cut_of_a_recovery(
    tmp_path: Path, arrived: int, expected: dict[tuple[bytes, bytes], bytes]
) -> None:
    """A second cut while the intent of the first is being completed."""
    run = new_run(tmp_path, "recorded")
    with opened(run) as log:
        log.append(STARTING)
        log._checkpoint = log._checkpoint.__class__(
            task_id="t",
            run_id="r",
            generation=log._checkpoint.generation + 1,
            committed=log.state,
            pending=Pending(data=b"accepted\n", after=LogState(log_bytes=18, source=IDENTITY)),
        )
        header = encode(log._checkpoint)
        with (run / "log.state").open("r+b") as file:
            file.seek(log._checkpoint.generation % 2 * SLOT_BYTES)
            file.writelines(header)
    with (run / "log").open("ab") as file:
        file.write(b"accepted\n"[:arrived])
    disk = RecordingDisk(run)
    with opened(run, disk, noting(disk)) as log:
        work(log, SHORT)
    assert survives(tmp_path, disk, SHORT, expected[SHORT]) > 30


@pytest.mark.parametrize("same", [True, False], ids=["same writer", "next writer"])
def test_every_failed_sync_and_then_every_power_cut(
    tmp_path: Path, same: bool, expected: dict[tuple[bytes, bytes], bytes], chaos: Chaos
) -> None:
    """The kernel dropped what a failed sync should have written, and says yes to the next: nothing that
    was acknowledged after it is lost in a power cut."""
    known: set[object] = set()
    # Which writer goes on matters little to a sync, so that each takes every other one in the short run.
    for number in range(0 if chaos else same, 100, 1 if chaos else 2):
        here = tmp_path / str(number)
        here.mkdir()
        disk = failing_once(here, number, same)
        survives(here, disk, SHORT, expected[SHORT], known)
        if disk.syncs <= number:
            assert number > 5
            return
    pytest.fail("a hundred syncs were not enough to see a run without a failing one")


def failing_once(root: Path, number: int, same: bool, kind: type[RunLogWriter] = RunLogWriter) -> RecordingDisk:
    run = new_run(root, "recorded")
    disk = RecordingDisk(run, fail_sync=number)
    noted = noting(disk, kind)
    log = None
    try:
        log = opened(run, disk, noted)
        work(log, SHORT)
    except (OutcomeUnknown, StoreWriteFailed):
        pass
    disk.fail_sync = None
    if log is None or not same:
        if log:
            log._close_files()
        log = opened(run, disk, noted)
    work(log, SHORT)
    log.close()
    return disk


# --- the harness bites ----------------------------------------------------------------------------------------


class CommitsBeforeTheLog(RunLogWriter):
    """Publishes the committed state and syncs the log afterwards, that is, never."""

    def _append_and_sync(self, data: bytes, length: int) -> None:
        if data:
            self._disk.write(self._log_fd, data)


class AppendsBeforeTheIntent(RunLogWriter):
    """Writes the log first."""

    def _publish(self, committed: LogState, pending: Pending | None) -> None:
        if pending is not None:
            self._disk.write(self._log_fd, pending.data)
        super()._publish(committed, pending)

    def _append_and_sync(self, data: bytes, length: int) -> None:
        super()._append_and_sync(b"", length)


class NeverSyncsTheIntent(RunLogWriter):
    """Takes a written intent for a durable one."""

    def _publish(self, committed: LogState, pending: Pending | None) -> None:
        sync = self._disk.sync_data
        if pending is not None:
            self._disk.sync_data = lambda fd: None  # type: ignore[method-assign]
        try:
            super()._publish(committed, pending)
        finally:
            self._disk.sync_data = sync  # type: ignore[method-assign]


class OneSlot(RunLogWriter):
    """Writes each record over the one before."""

    def _publish(self, committed: LogState, pending: Pending | None) -> None:
        object.__setattr__(self._checkpoint, "generation", self._checkpoint.generation + 1)
        super()._publish(committed, pending)


@pytest.mark.parametrize("kind", [CommitsBeforeTheLog, AppendsBeforeTheIntent, NeverSyncsTheIntent, OneSlot])
def test_a_writer_with_a_wrong_order_is_found(
    tmp_path: Path, kind: type[RunLogWriter], expected: dict[tuple[bytes, bytes], bytes]
) -> None:
    """Each wrong recipe loses or refuses something in at least one crash state."""
    disk = recorded(tmp_path, SHORT, kind)
    with pytest.raises(AssertionError, match=r"^state \d+ after effect"):
        survives(tmp_path, disk, SHORT, expected[SHORT])


class SyncsOldPagesAgain(RunLogWriter):
    """Believes the second sync of bytes whose first one failed."""

    def _finish(self, pending: Pending, committed: int, arrived: int) -> None:
        self._append_and_sync(pending.data[arrived:], pending.after.log_bytes)


class BelievesWhatItReads(RunLogWriter):
    """Acts on the state that it reads, without writing it anew."""

    def _replace_sidecar(self, checkpoint):  # type: ignore[no-untyped-def]
        found = load(self._directory, self.task_id, self.run_id)
        if found is None or checkpoint.committed.completion is not None:
            super()._replace_sidecar(checkpoint)
            return
        if self._sidecar_fd < 0:
            self._sidecar_fd = self._disk.open_update(self._directory.sidecar)
        self._checkpoint = found


@pytest.mark.parametrize("kind", [SyncsOldPagesAgain, BelievesWhatItReads])
def test_a_writer_that_trusts_a_failed_sync_is_found(
    tmp_path: Path, kind: type[RunLogWriter], expected: dict[tuple[bytes, bytes], bytes]
) -> None:
    """Each needs one failed sync and one power cut to lose bytes, and the search finds them."""

    def search() -> None:
        known: set[object] = set()
        for number in range(30):
            here = tmp_path / str(number)
            here.mkdir()
            survives(here, failing_once(here, number, True, kind), SHORT, expected[SHORT], known)

    with pytest.raises(AssertionError, match=r"^state \d+ after effect"):
        search()
