"""Run one command to its end, under a keeper: what the command profiles of agent jobs stand on.

The caller's thread waits; the command's whole tree ends with a cancel, a timeout, or an exception in the caller.
If the process dies meanwhile, the keeper goes on and leaves the outcome in the run's directory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ..durable import Disk
from ..errors import Bug, Damaged, KeeperFailed
from ..ids import new_id
from . import layout, rundir
from .identity import Identity, System, this_system
from .output import Streams
from .rundir import ExitRecord
from .template import Request, Run, Template, argv_of
from .tree import AFTER_KILL_S

#: how often a waiting thread looks at its cancel event; an end is seen at once
CANCEL_POLL_S = 0.05
#: the keeper died before it could say how the command ended; what was left of its tree was ended
BY_LOST = "lost"
_READ_BYTES = 256 * 1024

#: called with "stdout" or "stderr" and what came on it, in order, in the caller's thread
OnOutput = Callable[[str, bytes], None]


@attrs.frozen(kw_only=True, slots=True)
class CommandEnd:
    """How a command ended.

    `stopped_by` is one of `layout.BY_…`, or "lost". Exactly one of `exit_code` and `signal` is a number, but for
    "never_started" and "lost", which have neither.
    """

    exit_code: int | None
    signal: int | None
    stopped_by: str
    reason: str = ""
    error: str = ""
    #: whether our cancel event was set before it ended
    cancelled: bool = False
    #: the last bytes kept of each stream
    stdout_tail: bytes = b""
    stderr_tail: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    #: what the command wrote, kept or not
    seen_bytes: int = 0
    truncated: bool = False
    started_at: str | None = None
    ended_at: str | None = None
    #: members of its tree that could not be ended: pid, start, boot, name
    leftovers: Sequence[Mapping[str, object]] = ()

    @property
    def succeeded(self) -> bool:
        return self.stopped_by == layout.BY_EXIT and self.exit_code == 0


def run_command(
    command: str | Sequence[str],
    *,
    run_dir: Path,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    task_id: str | None = None,
    cancel_event: threading.Event | None = None,
    timeout_s: float | None = None,
    grace_s: float = layout.DEFAULT_GRACE_S,
    output_limit_bytes: int = layout.DEFAULT_OUTPUT_LIMIT_BYTES,
    on_limit: str = "stop",
    on_started: Callable[[Identity, Identity], None] | None = None,
    on_output: OnOutput | None = None,
    tail_bytes: int = 65536,
    template: Template | None = None,
    disk: Disk | None = None,
    system: System | None = None,
) -> CommandEnd:
    """Run `command` (text: through the shell; sequence: argv) and return how it ended.

    `env` is the whole environment (None: ours). `run_dir` is a directory of this one run, made where missing; the
    output, the exit record and the identities stay in it. `on_started(keeper, child)` is called once it runs.
    After a cancel, a timeout and the output limit the call returns only when the tree has ended, at most
    `grace_s` and a few seconds later; after an end by itself at once, while the keeper ends what is left.
    Without a `template` one is started for this command alone, which costs an interpreter's start.

    An exception in a callback ends the tree and goes on to the caller. Raises `InvalidInput`, `KeeperFailed`,
    `RunRefused` before anything runs; afterwards nothing of its own.
    """
    disk = disk or Disk()
    system = system or this_system()
    request = Request(
        argv=argv_of(command),
        cwd=os.path.abspath(cwd or os.getcwd()),
        env=dict(os.environ if env is None else env),
        task_id=task_id or new_id(),
        timeout_s=timeout_s,
        grace_s=grace_s,
        output_limit_bytes=output_limit_bytes,
        on_limit=on_limit,
        durable=disk.durable,
    )
    disk.make_dirs(run_dir)
    if template is not None:
        run = template.start(run_dir, request)
    else:
        with Template() as own:
            run = own.start(run_dir, request)
    with run:
        return _Foreground(run, request, cancel_event, on_output, tail_bytes, disk, system).see_through(on_started)


class _Foreground:
    """One command that a thread waits for."""

    def __init__(
        self,
        run: Run,
        request: Request,
        cancel_event: threading.Event | None,
        on_output: OnOutput | None,
        tail_bytes: int,
        disk: Disk,
        system: System,
    ) -> None:
        self._run = run
        self._request = request
        self._cancel_event = cancel_event
        self._on_output = on_output
        self._tail_bytes = tail_bytes
        self._disk = disk
        self._system = system
        self._offset = 0
        self._cancelled = False

    def see_through(self, on_started: Callable[[Identity, Identity], None] | None) -> CommandEnd:
        run = self._run
        if self._is_cancelled():
            # Before `go`, the keeper records that it never started.
            self._stop()
            run.wait()
        else:
            try:
                child = self._go()
                if child is not None and on_started is not None:
                    on_started(run.keeper, child)
                self._attend()
            except BaseException:
                self._stop()
                self._until_gone()
                raise
        record = run.record
        if record is None:
            return self._lost()
        if self._cancelled or record.stopped_by in (layout.BY_TIMEOUT, layout.BY_OUTPUT_LIMIT):
            self._until_gone()
            with contextlib.suppress(Damaged, OSError):  # what it said itself is true
                record = rundir.read_exit(run.run_dir) or record
        return self._end(record)

    def _go(self) -> Identity | None:
        """A keeper that was killed before it said what it started may have started it: that is a lost command,
        whose tree is ended like any other's."""
        try:
            return self._run.go()
        except KeeperFailed:
            return None

    def _attend(self) -> None:
        """Hand on output and watch for a cancel, until there is a record or the keeper is dead."""
        run = self._run
        patience_s = None if self._cancel_event is None else CANCEL_POLL_S
        while True:
            if self._on_output is not None:
                run.want_output()
                self._hand_on()
            if run.record is not None or run.gone:
                break
            if not self._cancelled and self._is_cancelled():
                self._stop()
            run.wait_output(None if self._cancelled else patience_s)
        if self._on_output is not None:
            self._hand_on()

    def _hand_on(self) -> None:
        assert self._on_output is not None
        with Streams(self._run.run_dir) as streams:
            while True:
                before = self._offset
                for stream, data in streams.read("mixed", self._offset, _READ_BYTES):
                    self._offset += len(data)
                    self._on_output(stream, data)
                if self._offset == before:
                    return

    def _is_cancelled(self) -> bool:
        return self._cancel_event is not None and self._cancel_event.is_set()

    def _stop(self) -> None:
        self._cancelled = True
        rundir.request_stop(self._run.run_dir, reason="cancelled", disk=self._disk, system=self._system)

    def _until_gone(self) -> None:
        self._run.wait_gone(self._request.grace_s + 2 * AFTER_KILL_S)

    def _lost(self) -> CommandEnd:
        """The keeper was killed. What it left behind is ended here, and nobody will start it again."""
        run_dir, task_id = self._run.run_dir, self._request.task_id
        deadline = time.monotonic() + AFTER_KILL_S
        while True:
            burial = rundir.bury(
                run_dir, task_id=task_id, disk=self._disk, system=self._system, grace_s=self._request.grace_s
            )
            if burial is not None:
                break
            if time.monotonic() >= deadline:
                raise Bug("the keeper's socket is closed, and its lock is held")
            time.sleep(0.005)
        if burial.record is not None:
            return self._end(burial.record)
        error = "the keeper was killed"
        if burial.unreadable:
            error += f", and its record of the end cannot be read (it is kept as {burial.unreadable})"
        return attrs.evolve(self._end(None), stopped_by=BY_LOST, error=error, leftovers=burial.leftovers)

    def _end(self, record: ExitRecord | None) -> CommandEnd:
        with Streams(self._run.run_dir) as streams:
            totals = {name: streams.total(name) for name in ("stdout", "stderr")}
            tails = {
                name: b"".join(
                    data for _, data in streams.read(name, max(0, total - self._tail_bytes), self._tail_bytes)
                )
                for name, total in totals.items()
            }
        end = CommandEnd(
            exit_code=None,
            signal=None,
            stopped_by=BY_LOST,
            cancelled=self._cancelled,
            stdout_tail=tails["stdout"],
            stderr_tail=tails["stderr"],
            stdout_bytes=totals["stdout"],
            stderr_bytes=totals["stderr"],
            seen_bytes=sum(totals.values()),
        )
        if record is None:
            return end
        return attrs.evolve(
            end,
            exit_code=record.exit_code,
            signal=record.signal,
            stopped_by=record.stopped_by,
            reason=record.reason,
            error=record.error,
            seen_bytes=record.stdout_seen_bytes + record.stderr_seen_bytes,
            truncated=record.truncated,
            started_at=record.started_at,
            ended_at=record.ended_at,
            leftovers=record.leftovers or (),
        )
