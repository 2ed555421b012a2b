"""The attendant: watches the tasks of one worker, brings their output into their logs, and records how they end.

One thread listens to all keepers and to the clock; a few others do what may wait for a disk, one *step* of one task
at a time: take a piece of output, or record the end. However many tasks there are, the number of threads stays.

    keeper speaks, or time passes ─► a step is wanted ─► a log thread does it ─► again, later, or done
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..durable import Disk
from ..errors import (
    Closed,
    Damaged,
    InvalidTransition,
    LogBusy,
    OpenJobsError,
    OutcomeUnknown,
    Refused,
    SessionBusy,
    StoreWriteFailed,
)
from ..ids import IdMaker, short
from . import layout, rundir
from .client import TaskClient
from .facts import TaskFacts
from .identity import System
from .rundir import ExitRecord
from .tail import RunTail
from .task import Fact, Task, TaskStatus, end_of, lost
from .template import Run

log = logging.getLogger(__name__)

#: how soon a stop that another process asked for is seen
STOP_LOOK_S = 0.2
#: at most one output record a task in this time
OUTPUT_EVERY_S = 5.0
#: how often a task without a channel to its keeper is looked at: while something happens, and at rest
_LOOK_S = (0.02, 0.25)
#: after something that could not be done now (disk full, a log in use)
_RETRY_S = (0.1, 5.0)
#: logs that stay open between two pieces of output
_OPEN_LOGS = 32
#: what may be over in a moment; the step is tried again
_PASSING = (SessionBusy, StoreWriteFailed, OutcomeUnknown, LogBusy, OSError)


class Live:
    """A task that this worker looks after.

    Its fields belong to the attendant's thread, but for `tail`, `end` and `event_id`, which belong to whoever does
    its step (one at a time: `busy`).
    """

    def __init__(self, task: Task, run_dir: Path, tail: RunTail, run: Run | None) -> None:
        self.task_id = task.task_id
        self.session_id = task.session_id
        self.job_id = task.job_id
        self.boot = task.boot
        self.run_dir = run_dir
        self.tail = tail
        #: the channel to its keeper; None for an adopted one, and once the keeper has left
        self.run = run
        #: no keeper will ever write about it again
        self.abandoned = False
        #: what the keeper told us, for a disk that had no room for it
        self.record: ExitRecord | None = None
        self.unrecorded: ExitRecord | None = None
        #: a step is queued or under way; another one is wanted after it
        self.busy = False
        self.again = False
        #: when to look again by the clock (0: not), and how long to pause after that
        self.look_at = 0.0
        self.pause_s = _LOOK_S[0]
        self.retry_s = _RETRY_S[0]
        #: said once that its output or end cannot be written
        self.warned = False
        #: the grace of the stop that was acted on
        self.stop_grace_s: float | None = None
        self.sizes = (0, 0)
        self.event_id = ""
        #: the fields of its end, where they do not come from an exit record
        self.end: dict[str, Any] | None = None
        #: set once the end is recorded
        self.ended = threading.Event()
        #: set once the log is complete, too
        self.done = threading.Event()


Lives = list[Live]


class Attendant:
    """Guarantees: every task that is given to `attend` is looked after until its end is recorded and its log complete,
    or until `close`; what a disk refuses is tried again with growing pauses.

    Assumptions: the worker holds its lease. Threads start with the first task.
    What the lock protects: the table of tasks, `busy` and `again` of each, the list of open logs, the threads, the pipe
    that wakes the first of them. Nothing that can wait for a disk is done with it held.
    """

    def __init__(
        self,
        client: TaskClient,
        *,
        worker_id: str,
        disk: Disk,
        system: System,
        new_id: IdMaker,
        facts: TaskFacts,
        log_threads: int,
        output_every_s: float,
    ) -> None:
        self._client = client
        self._worker_id = worker_id
        self._disk = disk
        self._system = system
        self._new_id = new_id
        self._facts = facts
        self._log_threads = log_threads
        self._output_every_s = output_every_s
        self._lock = threading.Lock()
        self._lives: dict[str, Live] = {}
        self._open_logs: dict[Live, None] = {}
        self._threads: list[threading.Thread] = []
        self._stopping = False
        #: for the log threads; None ends one
        self._steps: queue.SimpleQueue[Live | None] = queue.SimpleQueue()
        #: for the attendant's thread, which a byte in the pipe wakes
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_reader = self._wake_writer = -1
        #: touched by the attendant's thread only: who waits for the clock, and the journals as last seen
        self._timed: dict[Live, None] = {}
        self._states: dict[str, object] = {}

    # --- for the supervisor ------------------------------------------------------------------------

    def attend(
        self, task: Task, run: Run | None = None, *, abandoned: bool = False, end: dict[str, Any] | None = None
    ) -> Live:
        """Look after a task from now on. `abandoned`: no keeper does. `end`: how it ended, where that is known."""
        run_dir = self._client.run_dir(task)
        keeper = run.keeper if run is not None else (task.keeper or rundir.keeper_identity(run_dir))
        tail = RunTail(run_dir, owner_id=task.task_id, run_id=task.task_id, keeper=keeper, disk=self._disk)
        live = Live(task, run_dir, tail, run)
        live.abandoned, live.end = abandoned, end
        if task.terminal:
            live.ended.set()
        with self._lock:
            if self._stopping:
                if run is not None:
                    run.close()
                raise Closed("the supervisor is closed; the task is left to the next one")
            known = self._lives.setdefault(task.task_id, live)
            if known is not live:
                return known
            self._start_threads()
        self._tell(lambda: self._watch(live))
        return live

    def find(self, task_id: str) -> Live | None:
        with self._lock:
            return self._lives.get(task_id)

    def lives(self) -> Lives:
        with self._lock:
            return list(self._lives.values())

    def act_on_stop(self, task: Task) -> None:
        """Tell its keeper, if one proves itself alive."""
        rundir.request_stop(
            self._client.run_dir(task),
            reason=task.stop_reason or "it was asked to stop",
            grace_s=task.stop_grace_s,
            disk=self._disk,
            system=self._system,
        )

    def close(self) -> Lives:
        """End the threads and put everything down; the tasks that were not done."""
        with self._lock:
            self._stopping = True
            threads, self._threads = self._threads, []
        if threads:
            for _ in range(self._log_threads):
                self._steps.put(None)
            self._wake()
            for thread in threads:
                thread.join()
            with self._lock:
                os.close(self._wake_reader)
                os.close(self._wake_writer)
                self._wake_reader = self._wake_writer = -1
        lives, self._lives = list(self._lives.values()), {}
        for live in lives:
            try:
                live.tail.rest()
            except (OpenJobsError, OSError) as error:
                log.warning("task %s: its log could not be put down, the next owner goes on: %s", live.task_id, error)
            if live.run is not None:
                live.run.close()
        return [live for live in lives if not live.done.is_set()]

    # --- the attendant's thread --------------------------------------------------------------------

    def _start_threads(self) -> None:
        """With the lock held."""
        if self._threads:
            return
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        name = f"openjobs tasks {short(self._worker_id)}"
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True)]
        self._threads += [
            threading.Thread(target=self._work, name=f"{name} log {number}", daemon=True)
            for number in range(self._log_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _tell(self, call: Callable[[], None]) -> None:
        """Let the attendant do it."""
        self._news.put(call)
        self._wake()

    def _wake(self) -> None:
        """With the lock, since a `close` meanwhile would leave us a number that may be another file's."""
        with self._lock:
            if self._wake_writer >= 0:
                with contextlib.suppress(BlockingIOError):  # it is awake already
                    os.write(self._wake_writer, b"x")

    def _serve(self) -> None:
        with selectors.DefaultSelector() as self._ready:
            self._ready.register(self._wake_reader, selectors.EVENT_READ)
            next_stop = next_output = time.monotonic()
            while not self._stopping:
                due = min([next_stop, next_output, *(live.look_at for live in self._timed)])
                for key, _ in self._ready.select(max(0.0, due - time.monotonic()) if self._lives else None):
                    if key.data is None:
                        _empty(self._wake_reader)
                    else:
                        self._contained(functools.partial(self._hear, key.data))
                self._take_news()
                now = time.monotonic()
                self._look_by_the_clock(now)
                if now >= next_stop:
                    next_stop = now + STOP_LOOK_S
                    self._look_for_stops(self.lives())
                if now >= next_output:
                    next_output = now + self._output_every_s
                    self._record_outputs(self.lives())

    def _take_news(self) -> None:
        while True:
            try:
                call = self._news.get_nowait()
            except queue.Empty:
                return
            self._contained(call)

    def _contained(self, call: Callable[[], None]) -> None:
        """One task's trouble is not that of all others."""
        try:
            call()
        except Exception:
            log.exception("looking after a task failed")

    def _watch(self, live: Live) -> None:
        """From now on, what happens to it is seen; what was asked of it before, too."""
        self._states.pop(live.session_id, None)
        if live.run is not None:
            self._ready.register(live.run, selectors.EVENT_READ, live)
            live.run.want_output()
            self._hear(live)
        self._want(live)

    def _hear(self, live: Live) -> None:
        """Its keeper said something."""
        run = live.run
        assert run is not None
        run.pump()
        live.record, live.unrecorded = run.record, run.unrecorded
        if run.gone:
            self._let_go(live)
            live.abandoned = live.abandoned or not run.recorded
        if run.output or run.record is not None or run.gone:
            self._want(live)

    def _let_go(self, live: Live) -> None:
        if live.run is not None:
            self._ready.unregister(live.run)
            live.run.close()
            live.run = None

    def _look_by_the_clock(self, now: float) -> None:
        """Adopted tasks, and those whose step has to be tried again."""
        for live in [live for live in self._timed if live.look_at <= now]:
            del self._timed[live]
            live.look_at = 0.0
            try:
                if live.run is None and not live.abandoned and not rundir.keeper_lives(live.run_dir):
                    live.abandoned = True
            except OSError as error:
                log.warning("task %s: its keeper's lock cannot be looked at: %s", live.task_id, error)
            self._want(live)

    def _look_after(self, live: Live, pause_s: float) -> None:
        live.look_at = time.monotonic() + pause_s
        self._timed[live] = None

    def _want(self, live: Live) -> None:
        """A step is wanted, after the one that may be under way."""
        with self._lock:
            if live.busy:
                live.again = True
                return
            live.busy, live.again = True, False
        self._steps.put(live)

    def _stepped(self, live: Live, more: bool, retry: bool) -> None:
        """A step is over."""
        with self._lock:
            live.busy = False
        if live.done.is_set():
            self._let_go(live)
            self._timed.pop(live, None)
            with self._lock:
                self._lives.pop(live.task_id, None)
        elif retry:
            self._look_after(live, live.retry_s)
            live.retry_s = min(live.retry_s * 2, _RETRY_S[1])
        else:
            live.retry_s = _RETRY_S[0]
            self._go_on(live, more)

    def _go_on(self, live: Live, more: bool) -> None:
        if live.again or more:
            live.pause_s = _LOOK_S[0]
            self._want(live)
        elif live.run is None:
            self._look_after(live, live.pause_s)
            live.pause_s = min(live.pause_s * 1.5, _LOOK_S[1])
        elif live.run.output:
            live.run.want_output()
            self._want(live)  # asked before reading: nothing is missed

    def _look_for_stops(self, lives: Iterable[Live]) -> None:
        """What other processes wrote down; a journal that has not changed costs one stat."""
        by_session: dict[str, Lives] = {}
        for live in lives:
            by_session.setdefault(live.session_id, []).append(live)
        self._states = {session_id: state for session_id, state in self._states.items() if session_id in by_session}
        for session_id, those in by_session.items():
            try:
                self._look_for_stops_of(session_id, those)
            except Damaged as error:
                log.warning("stops of session %s cannot be looked for before it is repaired: %s", session_id, error)
                self._states[session_id] = self._client.journal(session_id).state()  # it is said once
            except (OpenJobsError, OSError) as error:
                if self._states.get(session_id) != str(error):
                    log.warning("stops of session %s cannot be looked for: %s", session_id, error)
                self._states[session_id] = str(error)  # no state of a journal: it is looked at again, and said once

    def _look_for_stops_of(self, session_id: str, lives: Lives) -> None:
        journal = self._client.journal(session_id)
        state = journal.state()
        if state == self._states.get(session_id):
            return
        asked = {task.task_id: task for task in journal.unfinished() if task.stop_requested_at is not None}
        for live in lives:
            task = asked.get(live.task_id)
            if task is None or (live.stop_grace_s is not None and task.stop_grace_s >= live.stop_grace_s):
                continue
            live.stop_grace_s = task.stop_grace_s
            self.act_on_stop(task)
        self._states[session_id] = state

    def _record_outputs(self, lives: Iterable[Live]) -> None:
        news: dict[str, dict[str, tuple[int, int]]] = {}
        for live in lives:
            sizes = (_size(live.run_dir / layout.STDOUT), _size(live.run_dir / layout.STDERR))
            if sizes != live.sizes and not live.ended.is_set():
                live.sizes = sizes
                news.setdefault(live.session_id, {})[live.task_id] = sizes
        for session_id, sizes_of in news.items():
            try:
                self._client.journal(session_id).record_outputs(sizes_of)
            except (OpenJobsError, OSError) as error:
                log.debug("output of session %s was not recorded: %s", session_id, error)

    # --- the log threads ---------------------------------------------------------------------------

    def _work(self) -> None:
        while (live := self._steps.get()) is not None:
            if self._stopping:
                continue
            more, retry = False, False
            try:
                more = self._step(live)
            except (*_PASSING, Refused, Damaged) as error:
                # Of the second kind, a journal or its lock, which a person may put right.
                retry = True
                quiet = live.warned or isinstance(error, LogBusy | SessionBusy)
                live.warned = live.warned or not quiet
                log.log(
                    logging.DEBUG if quiet else logging.WARNING,
                    "task %s: its output or end cannot be written now; it is tried again until it can: %s",
                    live.task_id,
                    error,
                )
            except Exception:
                retry = True
                log.exception("task %s: a step failed and is tried again", live.task_id)
            self._over(live, more, retry)

    def _over(self, live: Live, more: bool, retry: bool) -> None:
        self._tell(lambda: self._stepped(live, more, retry))

    def _step(self, live: Live) -> bool:
        """Take a piece of output, or the end. Whether there is more to do at once."""
        if live.abandoned and not live.ended.is_set() and not self._bury(live):
            return False
        try:
            return self._take(live)
        except Damaged as error:
            if not rundir.is_of_exit(error, live.run_dir):
                raise
            # It is moved aside, and what it said is lost; a keeper that lives after all will write its own.
            return self._settle(live)

    def _take(self, live: Live) -> bool:
        try:
            more = live.tail.step()
        except (Damaged, Refused) as error:
            if isinstance(error, _PASSING) or rundir.is_of_exit(error, live.run_dir):
                raise
            return self._without_log(live, error)
        self._rest_others(live)
        if not more and (live.tail.drained or (live.abandoned and live.tail.silent)):
            self._record_end(live)
            self._complete(live)
        return more

    def _bury(self, live: Live) -> bool:
        """No keeper looks after it: what the keeper left, or a tombstone. False where one does after all."""
        if live.end is not None and live.end["status"] == TaskStatus.LOST:
            return True  # a second look would find its own tombstone
        return self._settle(live)

    def _settle(self, live: Live) -> bool:
        burial = rundir.bury(live.run_dir, task_id=live.task_id, disk=self._disk, system=self._system, boot=live.boot)
        if burial is None:
            self._adopt_after_all(live)
            return False
        if burial.record is not None or live.end is not None:
            return True
        if live.record is not None:
            live.end = end_of(live.record)
            return True
        what = "how it ended cannot be known" if burial.may_have_run else "it did not run"
        live.end = lost(
            what if burial.unreadable else f"its keeper died or never came; {what}",
            unreadable=burial.unreadable,
            leftovers=burial.leftovers,
            stdout_bytes=_size(live.run_dir / layout.STDOUT),
            stderr_bytes=_size(live.run_dir / layout.STDERR),
        )
        return True

    def _adopt_after_all(self, live: Live) -> None:
        """Somebody holds its keeper's lock: the keeper, or for a moment who else buries it or looks."""
        journal = self._client.journal(live.session_id)
        task = journal.get(live.task_id)
        keeper = rundir.keeper_identity(live.run_dir)
        if task.terminal or keeper is None or not self._system.is_alive(keeper):
            raise SessionBusy(f"the run of task {live.task_id} is being looked at by somebody else")
        if task.worker_id != self._worker_id:
            try:
                adopted = journal.adopt(task.task_id, task.worker_id, worker=self._worker_id, keeper=keeper.to_json())
            except InvalidTransition:
                live.ended.set()
                live.done.set()
                return
            self._facts.adopted(adopted)
        live.abandoned = False

    def _record_end(self, live: Live) -> None:
        if live.ended.is_set():
            return
        if live.end is None:
            record = self._exit_record(live)
            if record is None:
                raise OutcomeUnknown(f"task {live.task_id} has ended and its exit record cannot be read")
            live.end = end_of(record)
        live.event_id = live.event_id or self._new_id()
        journal = self._client.journal(live.session_id)
        try:
            task = journal.record(live.task_id, Fact.ENDED, event_id=live.event_id, **live.end)
        except InvalidTransition:
            task = journal.get(live.task_id)  # it was recorded before, by us or by whoever recovered it
        if task.event_id == live.event_id:
            self._facts.settled(task)
        live.ended.set()

    def _exit_record(self, live: Live) -> ExitRecord | None:
        record = rundir.read_exit(live.run_dir)
        return record if record is not None else live.record

    def _complete(self, live: Live) -> None:
        """The log's completion carries the outcome that is in the journal, whoever wrote it."""
        task = self._client.journal(live.session_id).get(live.task_id)
        if live.tail.silent and task.status is TaskStatus.LOST and live.boot != self._system.boot():
            pass  # it may have written what a power cut took: nothing proves what the log should hold
        else:
            live.tail.complete(task.status.value)
        self._put_down(live)
        live.done.set()

    def _without_log(self, live: Live, error: Exception) -> bool:
        """Its log cannot be used and stays as it is; its end is recorded all the same."""
        if live.end is None and self._exit_record(live) is None:
            self._put_down(live)
            raise OutcomeUnknown(f"its log cannot be written: {error}") from error
        log.error("task %s: its log cannot be completed: %s", live.task_id, error)
        self._record_end(live)
        self._put_down(live)
        live.done.set()
        return False

    def _put_down(self, live: Live) -> None:
        with self._lock:
            self._open_logs.pop(live, None)
        live.tail.rest()

    def _rest_others(self, live: Live) -> None:
        """Only so many logs stay open. One that another thread has in its hands is left alone."""
        with self._lock:
            self._open_logs.pop(live, None)
            if live.tail.open:
                self._open_logs[live] = None
            spare = list(self._open_logs)[: max(0, len(self._open_logs) - _OPEN_LOGS)]
            spare = [one for one in spare if not one.busy]
            for one in spare:
                one.busy = True
                self._open_logs.pop(one, None)
        for one in spare:
            try:
                one.tail.rest()
            finally:
                self._over(one, False, False)


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _empty(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
