"""A run's log holds exactly the bytes written, for every reader, and says when it is complete."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from openjobs.durable import Disk
from openjobs.errors import (
    Closed,
    Damaged,
    FileRefused,
    ForkedProcess,
    InvalidInput,
    InvalidTransition,
    LogBusy,
    LogCheckpointMissing,
    LogCompleted,
    LogCompletionUnknown,
    LogStateInvalid,
    NewerFormat,
    NotFound,
    OpenJobsError,
    SourceMismatch,
)
from openjobs.runlog import Completion, Ending, LogState, RunLogReader, RunLogWriter, Stream, binding, reader
from openjobs.runlog.check import log_findings
from openjobs.runlog.state import (
    HEADER_BYTES,
    PENDING_MOST_BYTES,
    SLOT_BYTES,
    STATE_MOST_BYTES,
    Checkpoint,
    Pending,
    decode_header,
    encode,
)
from tests.support import FakeClock, eventually
from tests.support.chaos import Chaos
from tests.support.crash_states import RecordingDisk
from tests.support.run_sources import IDENTITY, new_run, pattern, state_record

RAW = b"\0\xff\xfe invalid \xc3\x28 \x1b[31mred\x1b[0m \xe2\x82\xac no newline"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return new_run(tmp_path)


def opened(run: Path) -> RunLogWriter:
    return RunLogWriter(run, task_id="task-1", run_id="run-1")


def whole(run: Path) -> bytes:
    data, offset = b"", 0
    while True:
        chunk = RunLogReader(run).read(offset)
        data, offset = data + chunk.data, chunk.next_offset_bytes
        if not chunk.data:
            return data


def snapshot(run: Path) -> dict[str, tuple[bytes, int, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mode, p.stat().st_ino) for p in run.iterdir() if p.is_file()}


# --- writing --------------------------------------------------------------------------------------------


def test_what_is_written_is_read_byte_for_byte(run: Path) -> None:
    """Native bytes, diagnostics and events are in the log in the order they came, exactly."""
    with opened(run) as log:
        log.append(b"starting\n")
        log.accept(IDENTITY, b"accepted\n")
        log.append_native(stdout=RAW, stderr=b"err")
        log.append_native(stderr=b"or\n")
        log.complete("completed", Ending.DRAINED, b"done\n")
        state = log.state
    assert whole(run) == b"starting\naccepted\n" + RAW + b"error\ndone\n" == (run / "log").read_bytes()
    assert state == LogState(
        stdout_bytes=len(RAW),
        stderr_bytes=6,
        log_bytes=len(whole(run)),
        source=IDENTITY,
        completion=Completion(outcome="completed", ending=Ending.DRAINED),
    )
    assert RunLogReader(run).state() == state


def test_a_reopened_log_goes_on_where_it_was(run: Path) -> None:
    """State and bytes are the same after any number of restarts."""
    for number in range(5):
        with opened(run) as log:
            log.accept(IDENTITY)
            assert log.state.stdout_bytes == number * 4
            log.append_native(stdout=b"%03d\n" % number)
    assert whole(run) == b"000\n001\n002\n003\n004\n"


def test_a_long_append_becomes_several_and_stays_whole(run: Path) -> None:
    """Diagnostics longer than one intent are split; the sidecar stays under 128 KiB."""
    data = pattern(5 * PENDING_MOST_BYTES + 17)
    with opened(run) as log:
        log.append(data)
        assert (run / "log.state").stat().st_size <= STATE_MOST_BYTES < 128 * 1024
    assert whole(run) == data


def test_an_intent_never_exceeds_its_bound(run: Path) -> None:
    """What cannot be one step is refused before anything is written: native bytes, events."""
    with opened(run) as log:
        log.accept(IDENTITY)
        before = snapshot(run)
        with pytest.raises(InvalidInput):
            log.append_native(stdout=b"x" * PENDING_MOST_BYTES, stderr=b"x")
        with pytest.raises(InvalidInput):
            log.complete("completed", event=b"x" * (PENDING_MOST_BYTES + 1))
        for text in ("", "x" * 1000):
            with pytest.raises(InvalidInput):
                log.complete(text)
        assert snapshot(run) == before
        log.append_native(stdout=b"x" * (PENDING_MOST_BYTES - 1), stderr=b"x")
    assert PENDING_MOST_BYTES <= 64 * 1024


def test_an_append_is_three_barriers_and_two_where_more_comes(run: Path) -> None:
    """Intent, log, commit; the commit of one append and the intent of the next are one publication."""
    disk = RecordingDisk(run)
    with RunLogWriter(run, task_id="t", run_id="r", disk=disk) as log:
        log.accept(IDENTITY)
        for more, kinds in ((False, ["write", "sync"] * 3), (True, ["write", "sync"] * 2)):
            before = len(disk.effects)
            log.append_native(stdout=b"x", more=more)
            assert [effect.kind for effect in disk.effects[before:]] == kinds


def test_what_more_holds_back_is_shown_by_the_next_call_flush_or_close(run: Path) -> None:
    """`more=True` delays only what readers see."""
    log = opened(run)
    log.accept(IDENTITY)
    log.append_native(stdout=b"a", more=True)
    assert (whole(run), log.state.log_bytes) == (b"", 1)
    log.append_native(stdout=b"b", more=True)
    assert whole(run) == b"a"
    log.flush()
    assert whole(run) == b"ab"
    log.append_native(stdout=b"c", more=True)
    log.close()
    assert whole(run) == b"abc"


def test_nothing_to_write_changes_nothing(run: Path) -> None:
    """Empty reads at the end of a stream need no update of the journal."""
    disk = RecordingDisk(run)
    with RunLogWriter(run, task_id="t", run_id="r", disk=disk) as log:
        log.accept(IDENTITY)
        before = len(disk.effects)
        log.append(b"")
        log.append_native()
        log.flush()
        assert disk.effects[before:] == []


def test_acceptance_happens_once(run: Path) -> None:
    """The same acceptance again writes nothing, another source is refused, none means no output."""
    with opened(run) as log:
        with pytest.raises(InvalidTransition):
            log.append_native(stdout=b"x")
        log.accept(IDENTITY, b"accepted\n")
        before = snapshot(run)
        log.accept(IDENTITY, b"accepted\n")
        with pytest.raises(SourceMismatch):
            log.accept("another", b"accepted\n")
        assert snapshot(run) == before


def test_completion_is_once_and_final(run: Path) -> None:
    """The same completion again does nothing, also after a restart; anything else is refused."""
    with opened(run) as log:
        log.accept(IDENTITY)
        log.complete("failed", Ending.DRAINED, b"end\n")
    with opened(run) as log:
        before = snapshot(run)
        log.complete("failed", Ending.DRAINED, b"end\n")
        for use in (
            lambda: log.complete("completed"),
            lambda: log.complete("failed", Ending.NEVER_STARTED),
            lambda: log.append(b"x"),
            lambda: log.append_native(stdout=b"x"),
        ):
            with pytest.raises(LogCompleted):
                use()
        log.accept(IDENTITY)
        assert snapshot(run) == before
    assert whole(run) == b"end\n"


def test_only_what_no_source_accepted_can_have_never_started(run: Path, tmp_path: Path) -> None:
    """Never started and accepted exclude each other, both ways."""
    with opened(run) as log:
        with pytest.raises(InvalidTransition):
            log.complete("completed", Ending.DRAINED)
        log.complete("cancelled", Ending.NEVER_STARTED)
    with opened(new_run(tmp_path, "other")) as log:
        log.accept(IDENTITY)
        with pytest.raises(InvalidTransition):
            log.complete("cancelled", Ending.NEVER_STARTED)


def test_a_completed_log_keeps_a_small_sidecar(run: Path) -> None:
    """What is kept for years is one header, not two used slots."""
    with opened(run) as log:
        log.accept(IDENTITY)
        log.append_native(stdout=b"x" * PENDING_MOST_BYTES)
        log.append_native(stdout=b"x" * PENDING_MOST_BYTES)
        log.complete("completed")
    assert (run / "log.state").stat().st_size == HEADER_BYTES
    assert sorted(p.name for p in run.iterdir()) == ["log", "log.state"]


def test_a_closed_writer_and_a_forked_one_refuse(run: Path) -> None:
    """After close, and in a child, nothing is written; the child does not keep the lock, and its `close` waits for
    nobody."""
    log = opened(run)
    log.append(b"x")
    read_end, write_end = os.pipe()
    over, stay = os.pipe()
    with log._turn:  # as if another thread were in the middle of a call
        pid = os.fork()
    if pid == 0:
        log._turn = threading.Lock()
        log._turn.acquire()
        answer = b"wrote"
        try:
            log.close()
            log.append(b"y")
        except ForkedProcess:
            answer = b"refused"
        finally:
            os.close(stay)
            os.write(write_end, answer)
            os.read(over, 1)  # it lives on
            os._exit(0)
    assert os.read(read_end, 100) == b"refused"
    for fd in (read_end, write_end, over):
        os.close(fd)
    log.append(b"z")
    log.close()
    opened(run).close()
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.close(stay)
    os.waitpid(pid, 0)
    with pytest.raises(Closed):
        log.append(b"x")
    log.close()
    assert whole(run) == b"xz"


def test_a_second_writer_is_refused_and_changes_nothing(run: Path) -> None:
    """One writer per log, in this process or another; the first goes on undisturbed."""
    with opened(run) as log:
        log.append(b"x")
        before = snapshot(run)
        with pytest.raises(LogBusy) as caught:
            opened(run)
        assert caught.value.code == "LOG_BUSY"
        assert snapshot(run) == before
        log.append(b"y")
    assert whole(run) == b"xy"


def test_threads_may_share_a_writer(run: Path) -> None:
    """Each append stays in one piece."""
    with opened(run) as log:
        threads = [
            threading.Thread(target=lambda n=n: [log.append(b"%d" % n * 50 + b"\n") for _ in range(20)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = whole(run).splitlines()
    assert sorted(lines) == sorted([b"%d" % n * 50 for n in range(4)] * 20)


def test_it_fits_only_its_own_run(run: Path) -> None:
    """A sidecar of another task or run is refused by writer and reader."""
    with opened(run) as log:
        log.append(b"x")
    before = snapshot(run)
    for ids in ({"task_id": "task-2", "run_id": "run-1"}, {"task_id": "task-1", "run_id": "run-2"}):
        with pytest.raises(LogStateInvalid):
            RunLogWriter(run, **ids)
        with pytest.raises(LogStateInvalid):
            RunLogReader(run, **ids).read()
    assert snapshot(run) == before
    assert RunLogReader(run, task_id="task-1", run_id="run-1").read().data == b"x"


# --- reading ----------------------------------------------------------------------------------------------


def test_reading_creates_nothing(run: Path, tmp_path: Path) -> None:
    """A log or a directory that is not there is not found, and still not there."""
    for path in (run, tmp_path / "missing"):
        for use in (RunLogReader(path).state, RunLogReader(path).read, lambda p=path: list(RunLogReader(p).follow())):
            with pytest.raises(NotFound):
                use()
    assert list(run.iterdir()) == []
    assert not (tmp_path / "missing").exists()


def test_read_gives_what_is_asked_for_and_no_more(run: Path) -> None:
    """Any offset and limit; past the end nothing; memory for the limit, not for the log."""
    with opened(run) as log:
        log.append(b"0123456789")
        chunk = RunLogReader(run).read(3, 4)
        assert (chunk.data, chunk.next_offset_bytes, chunk.total_bytes, chunk.eof) == (b"3456", 7, 10, False)
        log.accept(IDENTITY)
        log.complete("completed")
    assert RunLogReader(run).read(8, 100).data == b"89"
    assert RunLogReader(run).read(8, 100).eof
    assert not RunLogReader(run).read(8, 1).eof
    assert RunLogReader(run).read(99, 100).data == b""
    with pytest.raises(InvalidInput):
        RunLogReader(run).read(-1, 1)


def test_only_committed_bytes_are_exposed(run: Path) -> None:
    """Bytes behind the committed length are nobody's yet: not read, not followed."""
    with opened(run) as log:
        log.append(b"committed\n")
    with (run / "log").open("ab") as file:
        file.write(b"not yet")
    assert whole(run) == b"committed\n"
    follower = RunLogReader(run, clock=FakeClock()).follow()
    assert next(follower) == b"committed\n"
    follower.close()


def test_native_streams_are_read_from_their_own_files(run: Path) -> None:
    """`stdout` and `stderr` stand beside the log; a missing one is not found."""
    opened(run).close()
    (run / "stdout").write_bytes(RAW)
    assert RunLogReader(run).read_native(Stream.STDOUT, 2, 9) == RAW[2:11]
    with pytest.raises(NotFound):
        RunLogReader(run).read_native(Stream.STDERR)
    (run / "stderr").symlink_to(run / "stdout")
    with pytest.raises(FileRefused):
        RunLogReader(run).read_native(Stream.STDERR)


def test_a_log_without_a_checkpoint_is_read_but_neither_followed_nor_written(run: Path) -> None:
    """Legacy: LOG_COMPLETION_UNKNOWN for a follower, LOG_CHECKPOINT_MISSING for a writer, bytes for a reader."""
    (run / "log").write_bytes(RAW)
    (run / "log").chmod(0o600)
    before = snapshot(run)
    chunk = RunLogReader(run).read()
    assert (chunk.data, chunk.completion, RunLogReader(run).state()) == (RAW, None, None)
    with pytest.raises(LogCompletionUnknown) as unknown:
        next(RunLogReader(run).follow())
    with pytest.raises(LogCheckpointMissing) as missing:
        opened(run)
    assert (unknown.value.code, missing.value.code) == ("LOG_COMPLETION_UNKNOWN", "LOG_CHECKPOINT_MISSING")
    assert snapshot(run) == before


def test_an_empty_log_without_a_checkpoint_begins_afresh(run: Path) -> None:
    """Nothing is known to be in it, so nothing is inferred."""
    (run / "log").touch(0o600)
    with opened(run) as log:
        log.append(b"x")
    assert whole(run) == b"x"


# --- following --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_lines", [False, True])
@pytest.mark.parametrize("data", [b"", b"\n", b"a\nb", RAW, pattern(200_000), b"x" * 300_000 + b"\ny", b"a\n" * 70_000])
def test_a_follower_gets_every_byte_and_ends(run: Path, data: bytes, whole_lines: bool) -> None:
    """Whatever the last line looks like, and however the bytes came: all of them, once, and then the end."""
    found: list[bytes] = []
    log = opened(run)
    log.accept(IDENTITY)
    thread = threading.Thread(target=lambda: found.extend(RunLogReader(run).follow(whole_lines=whole_lines)))
    thread.start()
    for begin in range(0, len(data), 50_000):
        log.append_native(stdout=data[begin : begin + 50_000])
    log.complete("completed")
    log.close()
    thread.join(timeout=30)
    assert b"".join(found) == data
    if whole_lines:
        assert all(chunk.endswith(b"\n") or len(chunk) > 2**15 for chunk in found[:-1])
    assert b"".join(RunLogReader(run).follow(len(data) // 2)) == data[len(data) // 2 :]


def test_a_partial_line_waits_for_its_end_or_for_completion(run: Path) -> None:
    """With whole lines, what has no newline yet is held back until it has one, or the log is complete."""
    clock = FakeClock()
    with opened(run) as log:
        log.accept(IDENTITY)
        log.append_native(stdout=b"one\ntw")
        found: list[bytes] = []
        follower = RunLogReader(run, clock=clock).follow(whole_lines=True)
        thread = threading.Thread(target=lambda: found.extend(follower))
        thread.start()
        clock.until_waiting()
        assert found == [b"one\n"]
        log.append_native(stdout=b"o\nthree")
        log.complete("completed")
        clock.advance(1)
        thread.join(timeout=30)
        assert found == [b"one\n", b"two\n", b"three"]


def test_a_finished_run_is_followed_to_its_end_while_another_is_active(tmp_path: Path) -> None:
    """Only the selected run's own completion counts."""
    with opened(new_run(tmp_path, "old")) as old, opened(new_run(tmp_path, "new")) as new:
        for log in (old, new):
            log.accept(IDENTITY)
            log.append_native(stdout=b"bytes without newline")
        old.complete("completed")
        assert b"".join(RunLogReader(tmp_path / "old").follow()) == b"bytes without newline"


def test_a_follower_can_be_stopped(run: Path) -> None:
    """`stop` ends it although the log is not complete."""
    stop, found = threading.Event(), []
    with opened(run) as log:
        log.append(b"x")
        thread = threading.Thread(target=lambda: found.extend(RunLogReader(run).follow(stop=stop)))
        thread.start()
        eventually(lambda: found == [b"x"])
        stop.set()
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_follower_starts_before_the_writer_has_made_its_state(run: Path) -> None:
    """A log that was just made, still empty and without checkpoint, is waited for."""
    (run / "log").touch(0o600)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(RunLogReader(run).follow()))
    thread.start()
    with opened(run) as log:
        log.accept(IDENTITY)
        log.append_native(stdout=b"x")
        log.complete("completed")
    thread.join(timeout=30)
    assert b"".join(found) == b"x"


def test_a_follower_of_an_abandoned_log_says_so(run: Path) -> None:
    """Where nobody is left to complete it, every committed byte and then LOG_COMPLETION_UNKNOWN."""
    clock = FakeClock()
    with opened(run) as log:
        log.append(b"x")
    follower = RunLogReader(run, clock=clock).follow(abandoned=lambda: True)
    assert next(follower) == b"x"
    caught: list[BaseException] = []

    def go_on() -> None:
        try:
            next(follower)
        except LogCompletionUnknown as error:
            caught.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    clock.until_waiting()
    clock.advance(1)
    thread.join(timeout=30)
    assert len(caught) == 1


def test_a_follower_that_is_stopped_before_it_begins_gives_nothing(run: Path) -> None:
    """`stop` counts from the start, also where there is something to give."""
    stop = threading.Event()
    with opened(run) as log:
        log.append(b"x")
    stop.set()
    assert list(RunLogReader(run).follow(stop=stop)) == []


def test_a_follower_asks_again_and_looks_once_more_before_it_gives_up(run: Path) -> None:
    """A writer that lives is waited for, half a second at a time; one that completed the log while somebody asked
    whether it lives did complete it."""
    asked: list[float] = []

    class Passing(FakeClock):
        """Time passes by waiting, and only so."""

        def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
            assert timeout_s
            assert self.monotonic() < began + 60
            self.advance(timeout_s)
            return event.is_set()

    clock = Passing()
    began = clock.monotonic()
    log = opened(run)
    log.accept(IDENTITY)
    log.append_native(stdout=b"x")

    def abandoned() -> bool:
        asked.append(clock.monotonic())
        if len(asked) < 3:
            return False
        log.append_native(stdout=b"y")
        log.complete("completed")
        log.close()
        return True

    assert list(RunLogReader(run, clock=clock).follow(abandoned=abandoned)) == [b"x", b"y"]
    assert len(asked) == 3
    assert all(later - earlier >= 0.5 for earlier, later in itertools.pairwise([began, *asked]))


def test_a_state_or_a_log_that_is_gone_is_no_end(run: Path) -> None:
    """What was there and is not any more is damage, for who reads and for who follows; what never was is not found."""
    with opened(run) as log:
        log.append(b"x")
    follower = RunLogReader(run).follow()
    assert next(follower) == b"x"
    (run / "log.state").rename(run / "elsewhere")
    with pytest.raises(LogStateInvalid, match=r"log\.state: it is gone"):
        next(follower)
    (run / "elsewhere").rename(run / "log.state")
    (run / "log").unlink()
    for use in (RunLogReader(run).read, lambda: next(RunLogReader(run).follow())):
        with pytest.raises(LogStateInvalid, match="log: it is gone") as caught:
            use()
        assert caught.value.offset == 0


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
def test_a_reader_looks_again_where_the_state_was_replaced_under_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """ESTALE from a replacement is not the reader's failure; a lasting one is."""
    with opened(run) as log:
        log.append(b"x")
    left = [3]
    look = reader.look

    def stale(*args: object, **ids: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(code, "stale")
        return look(*args, **ids)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "look", stale)
    assert RunLogReader(run).read().data == b"x"
    left[0] = 10**6
    with pytest.raises(OSError, match="stale"):
        RunLogReader(run).read()


def test_a_reader_says_at_once_what_is_no_replacement(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot be read is asked once."""
    opened(run).close()
    asked = []

    def broken(*args: object, **ids: object) -> object:
        asked.append(args)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(reader, "look", broken)
    with pytest.raises(OSError, match="broken"):
        RunLogReader(run).read()
    assert len(asked) == 1


def test_readers_never_see_half_a_publication(run: Path) -> None:
    """While a writer publishes as fast as it can, a reader's total only grows and its bytes are right."""
    stop, problems = threading.Event(), []
    data = pattern(2_000_000)

    def look() -> None:
        total = 0
        try:
            while not stop.is_set():
                chunk = RunLogReader(run).read(total, 10_000)
                if chunk.total_bytes < total or chunk.data != data[total : total + len(chunk.data)]:
                    problems.append((total, chunk))
                total = chunk.next_offset_bytes
        except OpenJobsError as error:
            problems.append(error)

    with opened(run) as log:
        log.accept(IDENTITY)
        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for begin in range(0, len(data), 20_000):
            log.append_native(stdout=data[begin : begin + 20_000], more=begin % 3 == 0)
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems


# --- what else may stand there ----------------------------------------------------------------------------


def _link(path: Path) -> None:
    path.symlink_to(path.parent / "target")


def _open_to_others(path: Path) -> None:
    if not path.exists():
        path.touch()
    path.chmod(0o666)


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _directory(path: Path) -> None:
    path.mkdir(mode=0o700)


@pytest.mark.parametrize("name", ["log", "log.state"])
@pytest.mark.parametrize("make", [_link, _fifo, _directory, _open_to_others])
def test_what_is_no_file_of_ours_is_refused(run: Path, name: str, make: Callable[[Path], None]) -> None:
    """A link, FIFO, directory or file open to others, for log and sidecar, for writer and reader: untouched."""
    with opened(run) as log:
        log.append(b"x")
    (run / "target").write_bytes((run / name).read_bytes())
    (run / "target").chmod(0o600)
    if make is not _open_to_others:
        (run / name).unlink()
    make(run / name)
    before = snapshot(run)
    with pytest.raises(FileRefused):
        opened(run)
    with pytest.raises(FileRefused):
        RunLogReader(run).read()
    with pytest.raises(FileRefused):
        next(RunLogReader(run).follow())
    assert snapshot(run) == before


def test_a_link_in_place_of_the_run_is_refused(run: Path, tmp_path: Path) -> None:
    """The directory itself must be a directory of ours, and not open to others."""
    opened(run).close()
    (tmp_path / "link").symlink_to(run)
    run.chmod(0o777)
    for path in (run, tmp_path / "link"):
        with pytest.raises(FileRefused):
            opened(path)
        with pytest.raises(FileRefused):
            RunLogReader(path).read()


@pytest.mark.parametrize("name", ["log", "log.state", ""])
def test_a_file_put_in_place_of_an_open_one_is_noticed(run: Path, tmp_path: Path, name: str) -> None:
    """Log, sidecar or the whole directory exchanged under a writer: refused, and the stranger is left alone."""
    log = opened(run)
    log.append(b"x")
    if name:
        copy = run / "copy"
        copy.write_bytes((run / name).read_bytes())
        copy.chmod(0o600)
        copy.rename(run / name)
    else:
        run.rename(tmp_path / "elsewhere")
        new_run(tmp_path)
        for old in (tmp_path / "elsewhere").iterdir():
            (run / old.name).write_bytes(old.read_bytes())
            (run / old.name).chmod(0o600)
    before = snapshot(run)
    with pytest.raises(FileRefused):
        log.append(b"y")
    assert snapshot(run) == before
    log.close()


def test_a_directory_put_in_place_while_it_was_opened_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked at is what must be opened."""
    opened(run).close()
    look = binding.check_directory

    def then_exchanged(path: Path, found: os.stat_result) -> None:
        look(path, found)
        run.rename(tmp_path / "elsewhere")
        new_run(tmp_path)

    monkeypatch.setattr(binding, "check_directory", then_exchanged)
    with pytest.raises(FileRefused, match="put in place"):
        RunLogReader(run).read()
    assert list(run.iterdir()) == []


def test_a_link_put_in_place_of_the_log_while_it_is_opened_is_refused(run: Path) -> None:
    """Between the look and the opening: nothing is written where the link leads."""

    class Overtaken(Disk):
        def open_append(self, path: str | os.PathLike[str], mode: int = 0o600) -> int:
            (run / "log").symlink_to(run / "target")
            return super().open_append(path, mode)

    (run / "target").write_bytes(b"mine")
    with pytest.raises(FileRefused, match="could not be opened"):
        RunLogWriter(run, task_id="task-1", run_id="run-1", disk=Overtaken())
    assert sorted(path.name for path in run.iterdir()) == ["log", "target"]
    assert (run / "target").read_bytes() == b"mine"


@pytest.mark.parametrize("others", [b"x+", b""])
def test_a_log_that_somebody_else_changes_under_its_writer_is_refused(run: Path, others: bytes) -> None:
    """Longer or shorter than what this writer wrote: with its place, before anything is added."""
    log = opened(run)
    log.append(b"x")
    (run / "log").write_bytes(others)
    before = snapshot(run)
    with pytest.raises(LogStateInvalid, match=f"it has {len(others)} bytes, its state says 1") as caught:
        log.append(b"y")
    assert caught.value.offset == 1
    assert snapshot(run) == before
    log.close()


def test_a_check_finds_what_a_log_is_not(run: Path, tmp_path: Path) -> None:
    """Nothing for a log as its state says, complete or not, begun or not; else the file and what is wrong with it."""

    def found() -> list[tuple[str, str]]:
        return list(log_findings(run, "run-1"))

    assert list(log_findings(tmp_path / "missing", "run-1")) == []
    assert found() == []
    (run / "log").touch(0o600)
    assert found() == []
    (run / "log").write_bytes(b"x" * 2000)
    assert found() == [("log", "has 2,000 bytes and no checkpoint: it can be read, and neither followed nor written")]
    (run / "log").unlink()

    log = opened(run)
    (run / "log").rename(run / "elsewhere")
    assert found() == []  # nothing was in it
    (run / "elsewhere").rename(run / "log")
    log.accept(IDENTITY)
    log.append_native(stdout=b"out", stderr=b"err!")
    assert found() == [
        ("stdout", "has 0 bytes, the log took 3 of it"),
        ("stderr", "has 0 bytes, the log took 4 of it"),
    ]
    for stream, data in ((Stream.STDOUT, b"out and more"), (Stream.STDERR, b"err!")):
        (run / stream.value).write_bytes(data)
        (run / stream.value).chmod(0o600)
    assert found() == []
    with (run / "log").open("ab") as file:
        file.write(b"being appended")
    assert found() == []  # a writer may be at it
    os.truncate(run / "log", 7)
    log.complete("completed")
    log.close()
    assert found() == []
    os.truncate(run / "log", 8)
    assert found() == [("log", "is complete with 7 bytes and has 8")]
    os.truncate(run / "log", 6)
    assert found() == [("log", "has 6 bytes, its state says 7")]
    (run / "log").unlink()
    assert found() == [("log", "has 0 bytes, its state says 7")]
    assert [file for file, _ in log_findings(run, "run-2")] == ["log.state"]
    (run / "log.state").write_bytes(b"")
    ((file, what),) = found()
    assert file == "log.state"
    assert "no whole record" in what
    run.chmod(0o777)
    ((file, what),) = found()
    assert file == ""
    assert "refused" in what


@pytest.mark.parametrize("change", ["longer", "shorter", "gone", "other bytes"])
def test_a_log_that_its_state_does_not_fit_is_refused(run: Path, change: str) -> None:
    """Unexpected lengths and contents are refused with their place, and nothing is altered."""
    with opened(run) as log:
        log.append(b"0123456789")
    match change:
        case "longer":
            (run / "log").write_bytes(b"0123456789+")
        case "shorter":
            (run / "log").write_bytes(b"012345678")
        case "gone":
            (run / "log").unlink()
        case "other bytes":
            put(run, Checkpoint(task_id="task-1", run_id="run-1", generation=0, committed=LogState()), b"01xx")
    before = snapshot(run)
    with pytest.raises(LogStateInvalid) as caught:
        opened(run)
    assert caught.value.offset is not None
    assert snapshot(run) == before


def test_a_log_that_was_never_written_to_may_be_missing(run: Path) -> None:
    """Its state says no byte and nothing pending: it begins. With either one it is gone, from its first byte on."""
    with opened(run) as log:
        log.accept(IDENTITY)
    (run / "log").unlink()
    with opened(run) as log:
        assert log.state == LogState(source=IDENTITY)
    put(run, Checkpoint(task_id="task-1", run_id="run-1", generation=0, committed=LogState()), b"")
    (run / "log").unlink()
    before = snapshot(run)
    with pytest.raises(LogStateInvalid, match="it is gone, its state says 0 bytes") as caught:
        opened(run)
    assert (caught.value.offset, caught.value.path) == (0, str(run / "log"))
    assert snapshot(run) == before


def test_a_state_says_how_much_of_each_stream_it_has() -> None:
    """`offset` is where that stream goes on."""
    state = LogState(stdout_bytes=4, stderr_bytes=3, log_bytes=9, source=IDENTITY)
    assert {stream: state.offset(stream) for stream in Stream} == {Stream.STDOUT: 4, Stream.STDERR: 3}


def put(run: Path, checkpoint: Checkpoint, arrived: bytes) -> None:
    """A state with the pending append `0123456789`, of which the log has `arrived`."""
    pending = Pending(data=b"0123456789", after=LogState(log_bytes=10))
    (run / "log.state").write_bytes(b"".join(encode(attrs.evolve(checkpoint, pending=pending))))
    (run / "log").write_bytes(arrived)


@pytest.mark.parametrize("arrived", range(11))
def test_a_pending_append_is_completed_with_the_missing_bytes_only(run: Path, arrived: int) -> None:
    """Before, in the middle of, and after the append: each byte once."""
    opened(run).close()
    put(
        run,
        Checkpoint(task_id="task-1", run_id="run-1", generation=0, committed=LogState()),
        b"0123456789"[:arrived],
    )
    assert whole(run) == b""
    with opened(run) as log:
        assert log.state.log_bytes == 10
        log.append(b"+")
    assert whole(run) == b"0123456789+"


def test_a_flipped_bit_in_any_byte_of_a_state_is_refused_or_means_the_same(run: Path, chaos: Chaos) -> None:
    """One bit in each byte (all eight in the long run) of the used part of a sidecar with two records: the
    log is never altered but by what was pending, and what opens goes on with every byte once."""
    log = opened(run)
    log.accept(IDENTITY)
    log.append_native(stdout=b"one\n")
    log.append_native(stdout=b"two\n", more=True)
    log._close_files()
    state = (run / "log.state").read_bytes()
    parts = (*range(620), *range(HEADER_BYTES, HEADER_BYTES + 4))
    used = [at for slot in (0, 1) for n in parts if (at := slot * SLOT_BYTES + n) < len(state)]
    outcomes = {"refused": 0, "same": 0}
    for number, place in enumerate(used):
        for bit in range(8) if chaos else (number % 8,):
            flipped = bytearray(state)
            flipped[place] ^= 1 << bit
            (run / "log.state").write_bytes(flipped)
            (run / "log").write_bytes(b"one\ntwo\n")
            try:
                with RunLogWriter(run, task_id="task-1", run_id="run-1", disk=Disk(durable=False)) as again:
                    at = again.state.stdout_bytes
                    again.append_native(stdout=b"one\ntwo\nthree\n"[at:])
                assert whole(run) == b"one\ntwo\nthree\n"
                outcomes["same"] += 1
            except Damaged:
                assert (run / "log").read_bytes() == b"one\ntwo\n"
                assert (run / "log.state").read_bytes() == bytes(flipped)
                outcomes["refused"] += 1
    assert all(outcomes.values()), outcomes


def test_every_flipped_bit_of_a_single_record_is_refused(run: Path) -> None:
    """A completed log has one record: whatever bit of it is wrong, both files are left as they are."""
    with opened(run) as log:
        log.accept(IDENTITY)
        log.complete("completed", event=b"end\n")
    state = (run / "log.state").read_bytes()
    for bit in range(len(state.rstrip(b"\n")) * 8):
        flipped = bytearray(state)
        flipped[bit // 8] ^= 1 << bit % 8
        (run / "log.state").write_bytes(flipped)
        with pytest.raises(Damaged):
            opened(run)
        with pytest.raises(Damaged):
            RunLogReader(run).read()
        assert (run / "log.state").read_bytes() == bytes(flipped)
    assert (run / "log").read_bytes() == b"end\n"


def test_every_truncation_of_a_single_record_is_refused(run: Path) -> None:
    """A sidecar cut anywhere inside its record, empty ones included."""
    with opened(run) as log:
        log.append(b"x")
        log.accept(IDENTITY)
        log.complete("completed")
    state = (run / "log.state").read_bytes()
    for length in range(len(state.rstrip(b"\n"))):
        (run / "log.state").write_bytes(state[:length])
        with pytest.raises(LogStateInvalid):
            opened(run)
        with pytest.raises(LogStateInvalid):
            RunLogReader(run).state()
        assert (run / "log.state").read_bytes() == state[:length]
    assert (run / "log").read_bytes() == b"x"


GOOD = (
    b'{"task_id":"task-1","run_id":"run-1","generation":0,"committed":{"stdout":0,"stderr":0,"log":0,"accepted":false}}'
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"log":0', b'"log":-1'),
        (b'"log":0', b'"log":0.0'),
        (b'"log":0', b'"log":true'),
        (b'"log":0', b'"log":0,"log":0'),
        (b'"log":0', b'"log":99999999999999999999'),
        (b'"log":0', b'"log":0,"more":1'),
        (b'"log":0,', b""),
        (b'"stdout":0', b'"stdout":5'),
        (b'"accepted":false', b'"accepted":true'),
        (b'"accepted":false', b'"accepted":false,"source":"x"'),
        (b'"accepted":false', b'"accepted":false,"completion":{"outcome":"x","ending":"drained"}'),
        (b'"accepted":false', b'"accepted":false,"completion":{"outcome":"x","ending":"else"}'),
        (b'"generation":0', b'"generation":1'),
        (b'"run-1"', b'"run-2"'),
        (b'"run-1"', b"7"),
        (b"{", b"["),
        (GOOD, b"[" * 3000),
        (GOOD, b"null"),
        (b"}}", b'},"pending":{"bytes":0,"sha256":"00","after":{"stdout":0,"stderr":0,"log":0,"accepted":false}}}'),
        (b"}}", b'},"pending":{"bytes":9,"sha256":"00","after":{"stdout":0,"stderr":0,"log":0,"accepted":false}}}'),
    ],
)
def test_a_state_that_no_writer_writes_is_refused(run: Path, old: bytes, new: bytes) -> None:
    """Right checksum, wrong sense: types, ranges, doubled and unknown keys, contradictions."""
    opened(run).close()
    assert old in GOOD
    (run / "log.state").write_bytes(state_record(GOOD.replace(old, new, 1)))
    before = snapshot(run)
    with pytest.raises(LogStateInvalid):
        opened(run)
    assert snapshot(run) == before
    (run / "log.state").write_bytes(state_record(GOOD))
    opened(run).close()


def test_a_newer_version_is_refused_by_its_own_name(run: Path) -> None:
    """A state of a later format stops readers and writers, whatever else the file holds."""
    opened(run).close()
    (run / "log.state").write_bytes(state_record(GOOD, b"2"))
    before = snapshot(run)
    for use in (lambda: opened(run), RunLogReader(run).read):
        with pytest.raises(NewerFormat):
            use()
    assert snapshot(run) == before


def test_a_state_that_is_too_long_or_contradicts_itself_is_refused(run: Path) -> None:
    """Two records must follow each other, and nothing stands behind them."""
    opened(run).close()
    one, two = (
        b"".join(encode(Checkpoint(task_id="task-1", run_id="run-1", generation=g, committed=LogState())))
        for g in (4, 7)
    )
    for data in (one.ljust(SLOT_BYTES, b"\0") + two, one.ljust(STATE_MOST_BYTES + 1, b"\0"), b"\0" * SLOT_BYTES + one):
        (run / "log.state").write_bytes(data)
        with pytest.raises(LogStateInvalid):
            opened(run)
    assert decode_header(one, run) is not None
