"""Reading and following a run's log while, or after, somebody writes it.

Spec 004, "Reader and compatibility": the checkpoint is read before the bytes, only committed bytes
are given out, and nothing is ever created, repaired or started.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import attrs

from ..clock import Clock, SystemClock
from ..durable.private import NOT_WRITABLE, is_same, opened_for_reading
from ..errors import InvalidInput, LogCompletionUnknown, NotFound
from .binding import RunDirectory
from .sidecar import Seen, look
from .state import Completion, LogState, Stream, invalid

#: how much a call of `read`, or one chunk of `follow`, holds at most if nothing else is said
CHUNK_BYTES = 2**16
#: more than the system gives in one call
_READ_MOST_BYTES = 2**30
_PAUSE_S = (0.005, 0.05)
_ABANDONED_EVERY_S = 0.5
#: how often a file that was replaced under us is opened again
_TRIES = 20


@attrs.frozen(kw_only=True)
class LogChunk:
    data: bytes
    #: where the next chunk begins
    next_offset_bytes: int
    #: how much of the log is committed
    total_bytes: int
    #: set once the log is complete; None for a log without a checkpoint, too
    completion: Completion | None

    @property
    def eof(self) -> bool:
        """Nothing comes behind this chunk, ever."""
        return self.completion is not None and self.next_offset_bytes >= self.total_bytes


class RunLogReader:
    """Guarantees: bytes come exactly as they were written, each once, in order; nothing that is not
    committed is given out; reading changes nothing on disk.

    Assumptions: none about the writer, who may be any process, or dead.
    It holds no lock and no descriptor between calls, and one of each file while `follow` runs.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        task_id: str | None = None,
        run_id: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Where ids are given, a log that belongs to another run raises `LogStateInvalid`."""
        self._path = Path(directory)
        self._task_id = task_id
        self._run_id = run_id
        self._clock = clock or SystemClock()

    def state(self) -> LogState | None:
        """What is committed; None for a log without a checkpoint. Raises `NotFound` where there is no log."""
        with self._opened() as files:
            seen = files.look()
            if seen is None:
                files.log_bytes()
            return seen.committed if seen else None

    def read(self, offset: int = 0, limit: int = CHUNK_BYTES) -> LogChunk:
        """At most `limit` bytes at `offset`, in time and memory in proportion to `limit`.

        Past the end: no bytes. A log without a checkpoint is read as it stands.
        """
        if offset < 0 or limit < 0:
            raise InvalidInput("offset and limit are numbers of bytes, 0 or more")
        with self._opened() as files:
            seen = files.look()
            total = seen.committed.log_bytes if seen else files.log_bytes()
            data = files.read(offset, min(limit, total - offset, _READ_MOST_BYTES))
            return LogChunk(
                data=data,
                next_offset_bytes=offset + len(data),
                total_bytes=total,
                completion=seen.committed.completion if seen else None,
            )

    def read_native(self, stream: Stream, offset: int = 0, limit: int = CHUNK_BYTES) -> bytes:
        """At most `limit` bytes of one native stream, as the source wrote it. Raises `NotFound`."""
        with self._opened() as files, self._native(files, stream) as fd:
            return os.pread(fd, limit, offset)

    @contextlib.contextmanager
    def _native(self, files: _Files, stream: Stream) -> Iterator[int]:
        try:
            with opened_for_reading(files.directory.native(stream), NOT_WRITABLE) as fd:
                yield fd
        except FileNotFoundError:
            raise NotFound(f"this run has no file of its {stream.value}") from None

    def follow(
        self,
        offset: int = 0,
        *,
        stop: threading.Event | None = None,
        whole_lines: bool = False,
        abandoned: Callable[[], bool] | None = None,
    ) -> Generator[bytes, None, None]:
        """Every committed byte from `offset` on, in chunks, as it comes; ends when the log is complete.

        With `whole_lines` a chunk ends with a line, except that a line longer than 64 KiB comes in
        pieces; the last line comes on completion, newline or not. Looks after 5 ms where something
        happens and 50 ms where nothing does.

        A log without a checkpoint raises `LogCompletionUnknown` at once; so does one of which
        `abandoned` (asked twice a second while nothing happens) says that nobody will ever complete it.
        `stop` ends it early, without what is held back.
        """
        stop = stop or threading.Event()
        held = _Lines() if whole_lines else None
        pause, longest = _PAUSE_S
        last_asked = self._clock.monotonic()
        position = offset
        with self._opened() as files:
            while not stop.is_set():
                state = self._followable(files)
                found = position < state.log_bytes
                while position < state.log_bytes:
                    data = files.read(position, min(CHUNK_BYTES, state.log_bytes - position))
                    position += len(data)
                    if chunk := held.take(data) if held else data:
                        yield chunk
                if state.completion is not None:
                    if held and held.rest:
                        yield held.rest
                    return
                pause = _PAUSE_S[0] if found else min(pause * 2, longest)
                if abandoned and not found and self._clock.monotonic() - last_asked >= _ABANDONED_EVERY_S:
                    last_asked = self._clock.monotonic()
                    if abandoned():
                        self._last_look(files, position)
                        continue
                if self._clock.wait(stop, pause):
                    return

    def _followable(self, files: _Files) -> LogState:
        seen = files.look()
        if seen is not None:
            return seen.committed
        if files.log_bytes():
            raise LogCompletionUnknown(f"{files.directory.log} has no checkpoint; read it without following")
        return LogState()  # the writer has made the log and not yet its state

    def _last_look(self, files: _Files, position: int) -> None:
        """Nobody is left to complete the log. Unless it was completed while we asked, say so."""
        state = self._followable(files)
        if state.completion is None and state.log_bytes <= position:
            raise LogCompletionUnknown(f"{files.directory.log} will not be completed by anybody")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[_Files]:
        try:
            directory = RunDirectory(self._path)
        except FileNotFoundError:
            raise NotFound(f"there is no log in {self._path}") from None
        files = _Files(directory, self._task_id, self._run_id)
        try:
            yield files
        finally:
            files.close()


class _Files:
    """The open files of one log. The sidecar is looked for again on every look, since a writer replaces
    it when it opens and completes the log."""

    def __init__(self, directory: RunDirectory, task_id: str | None, run_id: str | None) -> None:
        self.directory = directory
        self._ids = {"task_id": task_id, "run_id": run_id}
        self._log_fd = self._sidecar_fd = -1
        self._seen: Seen | None = None

    def look(self) -> Seen | None:
        """Raises `LogStateInvalid`, `NewerFormat`, `FileRefused`."""
        for _ in range(_TRIES - 1):
            try:
                return self._look()
            except OSError as error:
                # The file was replaced between our finding and opening or reading it.
                if error.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
                self._forget_sidecar()
        return self._look()

    def _look(self) -> Seen | None:
        path = self.directory.sidecar
        there = self.directory.look(path)
        if there is None:
            if self._seen is not None:
                raise invalid(path, "it is gone")
            return None
        if self._sidecar_fd < 0 or not is_same(there, os.fstat(self._sidecar_fd)):
            self._forget_sidecar()
            self._sidecar_fd = self.directory.open(path)
        self._seen = look(self._sidecar_fd, path, self._seen, **self._ids)
        return self._seen

    def _forget_sidecar(self) -> None:
        fd, self._sidecar_fd = self._sidecar_fd, -1
        if fd >= 0:
            os.close(fd)

    def _log(self) -> int:
        if self._log_fd < 0:
            try:
                self._log_fd = self.directory.open(self.directory.log)
            except FileNotFoundError:
                if self._seen is not None and self._seen.committed.log_bytes:
                    raise invalid(self.directory.log, "it is gone", 0) from None
                raise NotFound(f"there is no log in {self.directory.path}") from None
        return self._log_fd

    def log_bytes(self) -> int:
        return os.fstat(self._log()).st_size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` committed bytes, or none where it is not positive."""
        if length <= 0:
            return b""
        data = os.pread(self._log(), length, offset)
        if len(data) != length:
            raise invalid(self.directory.log, "it is shorter than its state says", offset + len(data))
        return data

    def close(self) -> None:
        self._forget_sidecar()
        fd, self._log_fd = self._log_fd, -1
        if fd >= 0:
            os.close(fd)
        self.directory.close()


class _Lines:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self.rest = b""

    def take(self, data: bytes) -> bytes:
        end = data.rfind(b"\n") + 1
        if not end and len(self.rest) + len(data) <= CHUNK_BYTES:
            self.rest += data
            return b""
        if not end:
            end = len(data)
        lines, self.rest = self.rest + data[:end], data[end:]
        return lines
