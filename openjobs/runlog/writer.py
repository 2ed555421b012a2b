"""The one writer of a run's log: each byte once, whatever stops it and wherever.

Spec 004, "Local journal". One append is

    1. publish the intent: the bytes and the state after them        (sidecar, one barrier)
    2. see that the log's end is what was committed, append          (log, one barrier)
    3. see that the log is still the file it was
    4. publish the state after them as committed                     (sidecar, one barrier)

Stopped anywhere, the next writer finds the intent, checks that what the log has behind its committed
length is a beginning of the intent's bytes, and appends what is missing. In a row of appends, step 4
of one and step 1 of the next are one publication: a record that says "committed so far" *and* "this
comes next". Nothing is weakened: the log was synced before it, and a record is all there or not at all.
What is dropped is only a record that nobody would have read.

The log is never cut and its committed bytes are never written again. Bytes that an interrupted append
left behind the committed length are verified, then written once more over themselves: where they are
there because of a sync that failed, the kernel counts their pages as clean, and a second sync alone
would claim what the disk does not have.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Generator
from types import TracebackType

import attrs

from ..durable import Disk
from ..durable.lock import no_fork
from ..errors import (
    Closed,
    FileRefused,
    ForkedProcess,
    InvalidInput,
    InvalidTransition,
    LogBusy,
    LogCheckpointMissing,
    LogCompleted,
    OutcomeUnknown,
    SourceMismatch,
    StoreWriteFailed,
)
from .binding import RunDirectory
from .sidecar import load, load_locked_out
from .state import (
    PENDING_MOST_BYTES,
    SLOT_BYTES,
    Checkpoint,
    Completion,
    Ending,
    LogState,
    Pending,
    check_step,
    check_text,
    encode,
    invalid,
)

_COMPARE_BYTES = 2**16
_writers: weakref.WeakSet[RunLogWriter] = weakref.WeakSet()


class RunLogWriter:
    """Guarantees: what a call wrote is in the log once it returned, survives a power cut, and is there
    exactly once after any crash; a second writer gets `LogBusy`; an error leaves the log either
    untouched (`Refused`) or to be completed by the next call or the next writer (`OutcomeUnknown`:
    look at `state` before writing the same again).

    Assumptions: a local file system that makes a file longer only after its data (else a power cut
    can leave blocks of NULs behind the committed length, and the log is refused as it stands).

    What each lock protects: the flock on the log all of the run's files, against other processes and
    other writers; `_turn` this object, against threads. No descriptor is handed out.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, task_id: str, run_id: str, disk: Disk | None = None
    ) -> None:
        """Opens the log, or makes it where there is none, and finishes what an earlier writer began.

        Raises `LogBusy`, `LogCheckpointMissing`, `LogStateInvalid`, `NewerFormat`, `FileRefused`,
        `StoreWriteFailed`. None of them altered the log's bytes.
        """
        self.task_id = check_text(task_id, "a task id")
        self.run_id = check_text(run_id, "a run id")
        self._disk = disk or Disk()
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._log_fd = self._sidecar_fd = -1
        self._checkpoint = Checkpoint(task_id=task_id, run_id=run_id, generation=0, committed=LogState())
        #: what is in the log and synced; the sidecar may say so only by a pending intent
        self._state = LogState()
        #: something was begun and not ended: the sidecar must be read before it is written
        self._unsure = True
        self._directory = RunDirectory(directory)
        try:
            self._open_log()
            self._reload()
        except BaseException:
            self._close_files()
            raise

    # --- what it knows -----------------------------------------------------------------------------

    @property
    def state(self) -> LogState:
        """What is in the log. After an error, what the sidecar says once it has been read again."""
        with self._ready():
            return self._state

    # --- what it takes -----------------------------------------------------------------------------

    def accept(self, source: str, event: bytes = b"") -> None:
        """The source called `source` has the run; `event` goes into the log in the same step.

        Once; the same again does nothing. Raises `SourceMismatch` for another source.
        """
        check_text(source, "the identity of a source")
        with self._ready():
            if self._state.source == source:
                return
            if self._state.accepted:
                raise SourceMismatch(f"the run was accepted by {self._state.source!r}, not by {source!r}")
            self._refuse_if_complete()
            self._put(event, attrs.evolve(self._state, source=source))

    def append(self, data: bytes) -> None:
        """Bytes of ours, for instance a diagnostic. More than 56 KiB become several appends."""
        with self._ready():
            self._refuse_if_complete()
            for begin in range(0, len(data), PENDING_MOST_BYTES):
                self._put(data[begin : begin + PENDING_MOST_BYTES], self._state)

    def append_native(self, *, stdout: bytes = b"", stderr: bytes = b"", more: bool = False) -> None:
        """The next bytes of the native streams, stdout first, together at most 56 KiB, in one step.

        With `more`, readers see them with the next call, or `flush`; they are durable now.
        """
        data = stdout + stderr
        with self._ready():
            self._refuse_if_complete()
            if not self._state.accepted:
                raise InvalidTransition("nobody accepted this run yet, so it has no output", status="not accepted")
            after = attrs.evolve(
                self._state,
                stdout_bytes=self._state.stdout_bytes + len(stdout),
                stderr_bytes=self._state.stderr_bytes + len(stderr),
            )
            if data:
                self._put(data, after, more=more)

    def flush(self) -> None:
        """Show readers what is in the log."""
        with self._ready():
            self._show()

    def complete(self, outcome: str, ending: Ending = Ending.DRAINED, event: bytes = b"") -> None:
        """The log is complete: nothing comes any more. `event` goes into it in the same step.

        The same again does nothing; another completion raises `LogCompleted`. `DRAINED` needs a source
        that accepted the run, `NEVER_STARTED` that none did; else `InvalidTransition`.
        """
        completion = Completion(outcome=check_text(outcome, "an outcome"), ending=ending)
        with self._ready():
            if self._state.completion == completion:
                return
            self._refuse_if_complete()
            if (ending is Ending.DRAINED) is not self._state.accepted:
                status = "accepted" if self._state.accepted else "not accepted"
                raise InvalidTransition(f"a run that is {status} cannot end as {ending.value}", status=status)
            self._put(event, attrs.evolve(self._state, completion=completion))

    def close(self) -> None:
        """Give the log up. What `more` held back is shown, unless an error left the state unknown."""
        if os.getpid() != self._pid:
            return  # its descriptors were closed when it was forked
        with self._turn:
            try:
                if self._log_fd >= 0 and not self._unsure:
                    self._show()
            finally:
                self._close_files()

    def __enter__(self) -> RunLogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._close_files()

    # --- opening -----------------------------------------------------------------------------------

    def _open_log(self) -> None:
        """Open and lock the log; nothing is made where the sidecar says that there must be one."""
        path = self._directory.log
        if self._directory.look(path) is None:
            load_locked_out(self._directory, self.task_id, self.run_id)
        with no_fork():
            try:
                self._log_fd = self._disk.open_append(path)
                fcntl.flock(self._log_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LogBusy(f"{path} has another writer", path=str(path)) from None
            except OSError as error:
                raise _not_written(f"{path} could not be opened", error) from error
            _writers.add(self)
        self._directory.verify(path, self._log_fd)

    def _reload(self) -> None:
        """Read the state, see that the log agrees, and finish a pending append.

        The record is written anew into a new file first. What was read may be known to the page cache
        only, from a sync that failed; to act on an intent that is not durable is the one thing that a
        crash could not be recovered from.
        """
        found = load(self._directory, self.task_id, self.run_id)
        size = self._directory.verify(self._directory.log, self._log_fd).st_size
        if found is None:
            if size:
                raise LogCheckpointMissing(
                    f"{self._directory.log} has {size} bytes but no checkpoint; they were left as they were",
                    path=str(self._directory.log),
                )
            found = attrs.evolve(self._checkpoint, generation=0, committed=LogState(), pending=None)
        arrived = self._arrived(found, size)
        try:
            self._replace_sidecar(found)
            if found.pending is not None:
                self._finish(found.pending, found.committed.log_bytes, arrived)
                self._publish(found.pending.after, None)
        except OSError as error:
            raise _not_written("the log could not be made ready for writing", error) from error
        self._state = self._checkpoint.committed
        self._unsure = False

    def _arrived(self, checkpoint: Checkpoint, size: int) -> int:
        """How many of the pending bytes are in the log. Raises `LogStateInvalid` unless they are a beginning."""
        committed, pending = checkpoint.committed.log_bytes, checkpoint.pending
        most = len(pending.data) if pending else 0
        if not committed <= size <= committed + most:
            raise invalid(self._directory.log, f"it has {size} bytes, its state says {committed}", min(size, committed))
        if size == committed or pending is None:
            return 0
        fd = self._directory.open(self._directory.log)
        try:
            self._directory.verify(self._directory.log, fd)
            for offset in range(0, size - committed, _COMPARE_BYTES):
                part = os.pread(fd, min(_COMPARE_BYTES, size - committed - offset), committed + offset)
                if part != pending.data[offset : offset + len(part)] or not part:
                    raise invalid(self._directory.log, "its end is not what was being appended", committed + offset)
        finally:
            os.close(fd)
        return size - committed

    def _finish(self, pending: Pending, committed: int, arrived: int) -> None:
        """Make a verified pending append whole and durable."""
        if arrived:
            fd = self._disk.open_update(self._directory.log)
            try:
                self._directory.verify(self._directory.log, fd)
                os.lseek(fd, committed, os.SEEK_SET)
                self._disk.write(fd, pending.data[:arrived])
            finally:
                os.close(fd)
        self._append_and_sync(pending.data[arrived:], pending.after.log_bytes)

    # --- one append ----------------------------------------------------------------------------------

    def _put(self, data: bytes, after: LogState, *, more: bool = False) -> None:
        after = attrs.evolve(after, log_bytes=self._state.log_bytes + len(data))
        if not data:
            self._change(after)
            return
        if len(data) > PENDING_MOST_BYTES:
            raise InvalidInput(f"{len(data)} bytes are too many for one append; {PENDING_MOST_BYTES} are the most")
        check_step(self._state, after, len(data))
        self._verify(self._state.log_bytes)
        self._unsure = True
        self._publish_or_say(self._state, Pending(data=data, after=after))
        try:
            self._append_and_sync(data, after.log_bytes)
        except OSError as error:
            raise _pending("the append was begun and will be finished before anything else", error) from error
        self._state = after
        self._unsure = False
        if not more:
            self._show()

    def _change(self, after: LogState) -> None:
        """A new state without bytes."""
        self._verify(self._state.log_bytes)
        self._unsure = True
        self._publish_or_say(after, None)
        self._state = after
        self._unsure = False

    def _show(self) -> None:
        if self._checkpoint.committed != self._state:
            self._unsure = True
            self._publish_or_say(self._state, None)
            self._unsure = False

    def _append_and_sync(self, data: bytes, length: int) -> None:
        if data:
            self._disk.write(self._log_fd, data)
        self._disk.sync_data(self._log_fd)
        self._verify(length)

    def _verify(self, length: int) -> None:
        """The log and the sidecar are the files that were opened, and the log is `length` bytes long."""
        found = self._directory.verify(self._directory.log, self._log_fd)
        self._directory.verify(self._directory.sidecar, self._sidecar_fd)
        if found.st_size != length:
            raise invalid(self._directory.log, f"it has {found.st_size} bytes, its state says {length}", length)

    # --- publishing ----------------------------------------------------------------------------------

    def _publish_or_say(self, committed: LogState, pending: Pending | None) -> None:
        try:
            self._publish(committed, pending)
        except OSError as error:
            raise _pending("the log's state was being published", error) from error

    def _publish(self, committed: LogState, pending: Pending | None) -> None:
        """The next record, durable when this returns. See state.py for why one write in place is atomic."""
        after = attrs.evolve(
            self._checkpoint, generation=self._checkpoint.generation + 1, committed=committed, pending=pending
        )
        if committed.completion is not None:
            # The last record there will be: a small file of its own instead of two used slots.
            self._replace_sidecar(after)
            return
        os.lseek(self._sidecar_fd, after.generation % 2 * SLOT_BYTES, os.SEEK_SET)
        self._disk.write(self._sidecar_fd, encode(after))
        self._disk.sync_data(self._sidecar_fd)
        self._checkpoint = after

    def _replace_sidecar(self, checkpoint: Checkpoint) -> None:
        """The record in a new file, in slot 0: its generation is even."""
        path = self._directory.sidecar
        checkpoint = attrs.evolve(checkpoint, generation=(checkpoint.generation + 2) // 2 * 2)
        self._disk.replace(path, encode(checkpoint))
        old, self._sidecar_fd = self._sidecar_fd, -1
        if old >= 0:
            os.close(old)
        self._sidecar_fd = self._disk.open_update(path)
        self._directory.verify(path, self._sidecar_fd)
        self._checkpoint = checkpoint

    # --- being alive -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ready(self) -> Generator[None, None, None]:
        """This thread's turn, with a state that is known."""
        # First: in a child the lock may be held by a thread that was not copied.
        if os.getpid() != self._pid:
            raise ForkedProcess
        with self._turn:
            if self._log_fd < 0:
                raise Closed("this log's writer is closed")
            if self._unsure:
                self._reload()
            yield

    def _refuse_if_complete(self) -> None:
        if self._state.completion is not None:
            raise LogCompleted(f"the log is complete ({self._state.completion.outcome}) and takes nothing more")

    def _close_files(self) -> None:
        with no_fork():
            _writers.discard(self)
            log, self._log_fd = self._log_fd, -1
            sidecar, self._sidecar_fd = self._sidecar_fd, -1
            for fd in (log, sidecar):
                if fd >= 0:
                    os.close(fd)
            self._directory.close()

    def _forget_in_child(self) -> None:
        for fd in (self._log_fd, self._sidecar_fd):
            with contextlib.suppress(OSError):
                if fd >= 0:
                    os.close(fd)
        self._log_fd = self._sidecar_fd = -1
        with contextlib.suppress(OSError):
            self._directory.close()


def _not_written(what: str, error: OSError) -> Exception:
    if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
        return FileRefused(f"{what}: {error}")
    return StoreWriteFailed(f"{what}; the next try starts from what is there: {error}")


def _pending(what: str, error: OSError) -> OutcomeUnknown:
    return OutcomeUnknown(f"{what}; look at the log's state before writing the same again: {error}")


def _after_fork_in_child() -> None:
    """A copy of the descriptor would keep the lock after its owner: closed here, never unlocked."""
    for writer in list(_writers):
        writer._forget_in_child()
    _writers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
