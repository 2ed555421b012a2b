"""The logs of jobs and processes for the server: find one, read a piece, follow it by byte offsets.

Source: spec 004 through `runlog.RunLogReader`; reading creates and repairs nothing.
"""

from __future__ import annotations

import codecs
import logging
import time
from collections.abc import Callable
from typing import Any

import attrs

from ..errors import AmbiguousId, LogCompletionUnknown, NotFound, OpenJobsError
from ..ids import is_prefix
from ..processes.client import run_directory
from ..runlog import RunLogReader, Stream
from ..store.damage import found_in_either
from .backend import Backend

log = logging.getLogger(__name__)

#: of one answer, and of one event of a stream
READ_BYTES = 1 << 20
PIECE_BYTES = 64 << 10
#: how long nobody may own an unfinished run before its log is taken for one that will not be completed
PATIENCE_S = 3.0


@attrs.frozen(kw_only=True)
class Run:
    owner_id: str
    session_id: str
    run_id: str
    is_task: bool


@attrs.frozen(kw_only=True)
class Piece:
    data: bytes
    offset: int
    next_offset: int
    size: int
    complete: bool
    outcome: str | None = None


class Logs:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._store = backend.store

    def find(self, prefix: str) -> Run:
        """The one job, process or run whose id begins so. Raises `NotFound`, `AmbiguousId`, and what hides it."""
        wanted = prefix.strip().lower()
        if self._store.home is None:
            raise NotFound("jobs in memory have no logs")
        found: dict[str, Run] = {}
        if is_prefix(wanted):
            found = found_in_either(
                (lambda: self._processes_of(wanted), lambda: self._jobs_of(wanted)),
                lambda run: wanted in (run.owner_id, run.run_id),
                lambda error: log.warning("not all can be found by its id: %s", error),
            )
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            raise AmbiguousId(f"more than one id begins with {prefix!r}", candidates=list(found))
        raise NotFound(f"no job, process or run with a log has an id that begins with {prefix[:40]!r}")

    def _processes_of(self, wanted: str) -> dict[str, Run]:
        tasks = self._backend.tasks
        return {
            entry.job_id: Run(owner_id=entry.job_id, session_id=entry.session_id, run_id=entry.job_id, is_task=True)
            for entry in (tasks.matching(wanted) if tasks is not None else ())
        }

    def _jobs_of(self, wanted: str) -> dict[str, Run]:
        found = {}
        index = self._store.index
        for each in (*index.by_id(wanted), *index.by_run(wanted)):
            job = self._store.documents(each.session_id).job(each.job_id)
            run_id = each.run_id or (job.run_id if job is not None else None)
            if job is not None and run_id is not None:
                found[each.job_id] = Run(owner_id=each.job_id, session_id=each.session_id, run_id=run_id, is_task=False)
        return found

    def read(self, run: Run, offset: int, limit: int, stream: Stream | None = None) -> Piece:
        """At most `limit` bytes. Raises `NotFound` where there is no log (yet), `LogStateInvalid`, `Damaged`."""
        reader = self._reader(run)
        if stream is None:
            chunk = reader.read(offset, limit)
            completion = chunk.completion
            return Piece(
                data=chunk.data,
                offset=offset,
                next_offset=chunk.next_offset_bytes,
                size=chunk.total_bytes,
                complete=completion is not None,
                outcome=None if completion is None else str(completion.outcome),
            )
        state = reader.state()
        if state is None:
            raise LogCompletionUnknown("the log has no checkpoint, so nothing says how much of a stream is whole")
        size = state.offset(stream)
        length = max(min(limit, size - offset), 0)
        data = reader.read_native(stream, offset, length) if length else b""
        return Piece(
            data=data,
            offset=offset,
            next_offset=offset + len(data),
            size=size,
            complete=state.completion is not None,
            outcome=None if state.completion is None else str(state.completion.outcome),
        )

    def _reader(self, run: Run) -> RunLogReader:
        assert self._store.home is not None
        directory = run_directory(self._store.home, run.session_id, run.run_id)
        return RunLogReader(directory, task_id=run.owner_id, run_id=run.run_id)

    def has_owner(self, run: Run) -> bool:
        """Whether a living process looks after it, so that its log may still grow or be completed."""
        if run.is_task:
            assert self._backend.tasks is not None
            task = self._backend.tasks.journal(run.session_id).get(run.owner_id)
            return not self._backend.tasks.is_orphan(task)
        job = self._store.documents(run.session_id).job(run.owner_id)
        return job is not None and not self._backend.recovery.is_dead(job.runner_id)

    def has_ended(self, run: Run) -> bool:
        if run.is_task:
            assert self._backend.tasks is not None
            return self._backend.tasks.journal(run.session_id).get(run.owner_id).terminal
        job = self._store.documents(run.session_id).job(run.owner_id)
        return job is None or job.terminal


class Follower:
    """One look after the other at a log that grows; each `look` gives the events that are due.

    Blocking, for a worker thread; nothing is held between two looks. Events are
    (name, byte offset behind it or None, fields).
    """

    def __init__(self, logs: Logs, wanted: str, offset: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._wanted = wanted
        self._offset = offset
        self._monotonic = monotonic
        self._run: Run | None = None
        self._waiting_told = False
        self._quiet_since: float | None = None
        self.over = False
        #: whether the last look brought bytes, so that there may be more at once
        self.moved = False

    def look(self) -> list[tuple[str, int | None, dict[str, Any]]]:
        self.moved = False
        try:
            if self._run is None:
                self._run = self._logs.find(self._wanted)
            piece = self._logs.read(self._run, self._offset, PIECE_BYTES)
        except NotFound as error:
            return self._missing(error)
        except (OpenJobsError, OSError) as error:
            return self._failed(error)
        text, used = decoded(piece.data, final=piece.complete and piece.next_offset >= piece.size)
        if used:
            begin, self._offset = self._offset, self._offset + used
            self.moved, self._quiet_since = True, None
            return [("data", self._offset, {"offset": begin, "next_offset": self._offset, "text": text})]
        if piece.complete:
            self.over = True
            return [("end", self._offset, {"size": piece.size, "outcome": piece.outcome})]
        return self._patience(LogCompletionUnknown("nobody will complete this log any more"))

    def _missing(self, error: NotFound) -> list[tuple[str, int | None, dict[str, Any]]]:
        if self._run is None or isinstance(error, AmbiguousId):
            return self._failed(error)
        told = self._patience(NotFound("there is no log (any more): it never started, wrote none, or gc took it away"))
        if told or self._waiting_told:
            return told
        self._waiting_told = True
        return [("waiting", None, {})]

    def _patience(self, error: OpenJobsError) -> list[tuple[str, int | None, dict[str, Any]]]:
        """Nothing new. Where nobody is left who could bring something, that is the end, after a moment."""
        assert self._run is not None
        now = self._monotonic()
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since < PATIENCE_S:
            return []
        self._quiet_since = now
        try:
            if self._logs.has_owner(self._run) and not self._logs.has_ended(self._run):
                return []
        except OpenJobsError:
            pass
        return self._failed(error)

    def _failed(self, error: Exception) -> list[tuple[str, int | None, dict[str, Any]]]:
        from ..host.wire import error_to_wire

        self.over = True
        told = error_to_wire(error)
        return [("failed", None, {"code": told["code"], "message": told["message"]})]


def decoded(data: bytes, *, final: bool) -> tuple[str, int]:
    """The text of `data`, cut before a character that is not whole yet, and how many bytes that is.

    What is not UTF-8 becomes U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final)
    held = len(decoder.getstate()[0])
    return text, len(data) - held
