"""Bringing the output of one run under a keeper into the run's log, and completing that log.

Spec 004: drain to the end, then the outcome becomes durable elsewhere (a record, a commit), then the log is complete.
The log is opened when there is something to do and can be put down at any time: the place is in its sidecar.
"""

from __future__ import annotations

from pathlib import Path

from ..clock import Clock
from ..durable import Disk
from ..runlog import Completion, Drain, Ending, RunLogWriter, SourceStatus
from .identity import Identity
from .source import KeeperSource


class RunTail:
    """Guarantees: after any restart it goes on at the committed offsets; each byte is in the log once.

    Assumptions: one thread at a time; the run was handed to `keeper`. Every call raises what the log's writer and
    the source raise, `LogBusy` among it, and can be repeated.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        owner_id: str,
        run_id: str,
        keeper: Identity | None,
        disk: Disk,
        clock: Clock | None = None,
    ) -> None:
        """`owner_id` is the job or task; without a keeper there never was any output."""
        self._run_dir = run_dir
        self._owner_id = owner_id
        self._run_id = run_id
        self._disk = disk
        self._clock = clock
        self._source = KeeperSource(run_dir, task_id=run_id, keeper=keeper) if keeper is not None else None
        self._writer: RunLogWriter | None = None
        self._drain: Drain | None = None
        #: the source's last word, once every byte is in the log
        self.finished: SourceStatus | None = None
        #: set once the log is complete
        self.completion: Completion | None = None

    @property
    def silent(self) -> bool:
        """No keeper ever had the run, so there is no output."""
        return self._source is None

    @property
    def drained(self) -> bool:
        """Every byte is in the log, or the log is complete already."""
        return self.finished is not None or self.completion is not None

    @property
    def open(self) -> bool:
        return self._writer is not None

    def step(self) -> bool:
        """Take what is there now, at most some MiB. Whether there was any; see `finished`."""
        if self._source is None or self.finished is not None or self.completion is not None:
            return False
        writer = self._opened()
        if self.completion is not None:
            return False
        if self._drain is None:
            writer.accept(self._source.identity)
            self._drain = Drain(writer, self._source, identity=self._source.identity, clock=self._clock)
        more = self._drain.step()
        self.finished = self._drain.finished
        return more

    def complete(self, outcome: str) -> None:
        """The outcome is durable elsewhere; the log is complete and is put down. The same again does nothing."""
        writer = self._opened()
        if writer.state.completion is None:
            writer.complete(outcome, Ending.DRAINED if writer.state.accepted else Ending.NEVER_STARTED)
        self.completion = writer.state.completion
        self.rest()

    def rest(self) -> None:
        """Put the log down; the next call opens it again."""
        writer, self._writer, self._drain = self._writer, None, None
        if self._source is not None:
            self._source.close()
        if writer is not None:
            writer.close()

    def _opened(self) -> RunLogWriter:
        if self._writer is None:
            self._disk.make_dirs(self._run_dir)
            self._writer = RunLogWriter(self._run_dir, task_id=self._owner_id, run_id=self._run_id, disk=self._disk)
            self.completion = self._writer.state.completion
        return self._writer
