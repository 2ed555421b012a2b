"""A keeper's directory as the source of a run log (004: the native streams of a run)."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Damaged
from ..runlog import SourceStatus, Stream
from . import rundir
from .identity import Identity
from .output import Streams


def source_identity(task_id: str, keeper: Identity) -> str:
    """Which run, under which keeper, in which boot of this machine: the same text from start to end."""
    return f"keeper {keeper.pid}.{keeper.start} of {task_id} in boot {keeper.boot}"


class KeeperSource:
    """`runlog.Source` of one run's directory.

    Guarantees: the lengths are given only once they are final: with the exit record, or with the tombstone of a run
    whose keeper is dead. Reading never creates or repairs anything. Raises `Damaged` for what no keeper wrote.
    """

    def __init__(self, run_dir: Path, *, task_id: str, keeper: Identity) -> None:
        self._run_dir = run_dir
        self._task_id = task_id
        self._keeper = keeper
        self._final: SourceStatus | None = None
        self._fds: dict[Stream, int] = {}

    @property
    def identity(self) -> str:
        return source_identity(self._task_id, self._keeper)

    def status(self) -> SourceStatus:
        """`outcome` is "exit 0", "signal 9", "lost", …: what stopped it, and the code or signal where it has one."""
        if self._final is None:
            self._final = self._look()
        return self._final or SourceStatus(identity=self.identity)

    def read(self, stream: Stream, offset: int, limit: int) -> bytes:
        """Keeps the stream's file open until `close`: a drain reads it a thousand times."""
        if self._final is not None:
            total = self._final.stdout_bytes if stream is Stream.STDOUT else self._final.stderr_bytes
            limit = min(limit, (total or 0) - offset)
        if limit <= 0:
            return b""
        fd = self._fds.get(stream, -1)
        if fd < 0:
            fd = rundir.open_regular(self._run_dir / stream.value)
            if fd < 0:
                return b""
            self._fds[stream] = fd
        return os.pread(fd, limit, offset)

    def close(self) -> None:
        """Give the files back; the next read opens them again."""
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def _look(self) -> SourceStatus | None:
        # The order matters: a keeper may write its record and leave between two looks.
        lives = rundir.keeper_lives(self._run_dir)
        try:
            record = rundir.read_exit(self._run_dir)
        except Damaged:
            if lives:
                return None  # it puts its own in the place
            raise
        if record is not None:
            number = record.exit_code if record.signal is None else record.signal
            return SourceStatus(
                identity=source_identity(record.task_id, record.keeper),
                stdout_bytes=record.stdout_bytes,
                stderr_bytes=record.stderr_bytes,
                outcome=record.stopped_by if number is None else f"{record.stopped_by} {number}",
            )
        if lives or not rundir.is_lost(self._run_dir):
            return None
        with Streams(self._run_dir) as streams:
            return SourceStatus(
                identity=self.identity,
                stdout_bytes=streams.total("stdout"),
                stderr_bytes=streams.total("stderr"),
                outcome="lost",
            )
