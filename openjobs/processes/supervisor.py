"""`ProcessSupervisor`: starts background commands, looks after them, and records how they ended.

    start ─► index, mark ─► intent [durable] ─► keeper ─► go ─► running [durable] ─► the caller
    end   ─► drain the log to its end ─► ended [durable] ─► the log is complete ─► waiters

Source: spec 000; spec 004, *Finish ordering*.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..clock import Clock
from ..durable import Disk
from ..errors import (
    Closed,
    Damaged,
    ForkedProcess,
    InvalidInput,
    InvalidTransition,
    KeeperFailed,
    LogBusy,
    OpenJobsError,
    OutcomeUnknown,
    Refused,
    RunRefused,
    SessionBusy,
    StoreWriteFailed,
    UnknownTask,
)
from ..ids import IdMaker, check_job_id, check_session_id, short
from ..store import JobStore
from ..store.index import Entry, key_of
from ..store.presence import FileActive, Held
from . import layout, rundir
from .client import TaskClient, run_directory
from .identity import System, this_system
from .journal import TaskJournal, same_command
from .output import Output
from .rundir import ExitRecord
from .tail import RunTail
from .task import Fact, Task, TaskStatus, check_origin, end_of, lost
from .template import Request, Run, Template, argv_of

log = logging.getLogger(__name__)

#: where the marks of live workers are: which sessions have tasks of theirs
MARKS = "active-tasks"
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
#: how long `close` waits for the trees of job-owned tasks
_CLOSE_S = 8.0
_RECOVER_S = 30.0
#: variables that say of which job or task a process is part; never inherited by a task of its own
_MARKS = frozenset({"OPENJOBS_JOB_ID", "OPENJOBS_SESSION_ID", "OPENJOBS_TASK_ID", "OPENJOBS_RUN_ID"})

Tasks = list[Task]
_Lives = list["_Live"]


class _Live:
    """A task that this worker looks after. Its fields belong to the attendant, but for those of a step (`tail`,
    `end`, `event_id`), which belong to the thread that does the step."""

    def __init__(self, task: Task, run_dir: Path, tail: RunTail, run: Run | None) -> None:
        self.task_id = task.task_id
        self.session_id = task.session_id
        self.job_id = task.job_id
        self.boot = task.boot
        self.run_dir = run_dir
        self.tail = tail
        #: the channel to its keeper; None for an adopted one, and once the keeper has left
        self.run = run
        #: nobody but us will ever write about it
        self.abandoned = False
        #: a step is queued or under way; another one is wanted after it
        self.busy = False
        self.again = False
        self.watched = False
        #: when to look again by the clock, and how long to pause after that
        self.look_at = 0.0
        self.pause_s = _LOOK_S[0]
        self.retry_s = _RETRY_S[0]
        self.stop_acted_s: float | None = None
        self.sizes = (0, 0)
        self.event_id = ""
        self.end: dict[str, Any] | None = None
        #: what the keeper told us, for a disk that had no room for it
        self.record: ExitRecord | None = None
        #: set once its end is recorded and its log complete
        self.done = threading.Event()
        #: the end is recorded
        self.ended = threading.Event()


class ProcessSupervisor:
    """One live worker that starts and looks after background commands.

    Guarantees

    - No command runs twice: the intent is durable before anything starts, and whoever finds it later records what
      the keeper left, or `lost`. The same `origin_tool_call_id` (or `task_id`) returns the first task for ever.
    - A task of another live worker is never adopted, signalled or finished.
    - Only a keeper that proves itself by lock and identity is signalled.
    - An end is recorded once, after the last byte is in the log, with an `event_id` that never changes.

    Assumptions: the store stays open as long as the supervisor; `close` is called. Without it, and after `close`,
    session tasks go on under their keepers, and the next worker that stays adopts them.

    What each lock protects: `_lock` the table of live tasks and what the threads share. Nothing that can wait for a
    disk is done with it held.
    """

    def __init__(
        self,
        store: JobStore,
        clock: Clock | None = None,
        *,
        worker_id: str | None = None,
        template: Template | None = None,
        system: System | None = None,
        new_id: IdMaker | None = None,
        log_threads: int = 3,
        output_every_s: float = OUTPUT_EVERY_S,
    ) -> None:
        """`worker_id` is a runner whose lease the supervisor shares (and which outlives it); else it takes its own.

        Recovers nothing by itself: that is for a process that stays (`recover`).
        """
        if store.home is None:
            raise InvalidInput("background commands need a home on disk, not a store in memory")
        self._store = store
        self._home: Path = store.home
        self._disk: Disk = store.disk
        self._clock: Clock = clock or store.clock
        self._system = system or this_system()
        self._new_id = new_id or store.new_id
        self._pid = os.getpid()
        self._own_template = template is None
        self._template = template or Template()
        self._output_every_s = output_every_s
        self._marks = FileActive(self._home, self._disk, MARKS)
        self.client = TaskClient(self._home, disk=self._disk, clock=self._clock)
        self.worker_id = worker_id or self._new_id()
        self._lease: Held | None = None if worker_id else store.leases.acquire(self.worker_id)
        self._lock = threading.Lock()
        self._lives: dict[str, _Live] = {}
        self._marked: set[str] = set()
        self._closing = False
        #: the threads are to end
        self._stopping = False
        self._steps: queue.SimpleQueue[_Live | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_reader = self._wake_writer = -1
        self._threads: list[threading.Thread] = []
        self._log_threads = log_threads
        self._open_logs: dict[_Live, None] = {}
        #: seen state of each session's journal, for stops that others ask for
        self._states: dict[str, object] = {}

    # --- starting ----------------------------------------------------------------------------------

    def start(
        self,
        session_id: str,
        command: str | Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output_limit_bytes: int = layout.DEFAULT_OUTPUT_LIMIT_BYTES,
        on_limit: str = "stop",
        grace_s: float = layout.DEFAULT_GRACE_S,
        origin_tool_call_id: str | None = None,
        description: str = "",
        task_id: str | None = None,
        job_id: str | None = None,
    ) -> Task:
        """Start a command in the background: text goes through the shell, a list is an argv.

        Returns when `running` is durable, or the end of a command that could not be started. `env` is the whole
        environment (None: ours) and is never written down; `cwd` is the session's own directory where nothing is
        said. A task with a `job_id` belongs to that job: `close` ends it.

        The same `origin_tool_call_id` in the session, or the same `task_id`, with the same command returns the first
        task and starts nothing; with another command it raises `IdempotencyConflict`.

        Raises, with nothing started: `InvalidInput`, `UnknownSession`, `SessionBusy`, `StoreWriteFailed`, `Damaged`,
        `Closed`, `ForkedProcess`. And `OutcomeUnknown`: ask again with the same id.
        """
        self._check()
        check_session_id(session_id)
        self._store.session(session_id)
        task_id = check_job_id(task_id) if task_id is not None else self._new_id()
        request = Request(
            argv=argv_of(command),
            cwd=str(self._directory(session_id, cwd)),
            env=self._environment(session_id, env, job_id),
            task_id=task_id,
            timeout_s=timeout_s,
            grace_s=grace_s,
            output_limit_bytes=output_limit_bytes,
            on_limit=on_limit,
            durable=self._disk.durable,
        )
        journal = self.client.journal(session_id)
        if check_origin(origin_tool_call_id) is not None and (first := journal.of_origin(str(origin_tool_call_id))):
            return self._met(same_command(first, command))
        key = key_of(session_id, origin_tool_call_id) if origin_tool_call_id is not None else None
        self._mark(session_id)
        self._indexed(Entry(job_id=task_id, session_id=session_id, key=key))
        task, fresh = journal.begin(
            task_id,
            command,
            worker_id=self.worker_id,
            boot=self._system.boot(),
            cwd=request.cwd,
            description=description[:2000],
            origin_tool_call_id=origin_tool_call_id,
            job_id=job_id,
            timeout_s=timeout_s,
            output_limit_bytes=output_limit_bytes,
        )
        if not fresh:
            self._unmark_if_idle(session_id)
            return self._met(task)
        return self._launch(journal, task, request)

    def _launch(self, journal: TaskJournal, task: Task, request: Request) -> Task:
        run_dir = self._run_dir(task)
        try:
            self._disk.make_dirs(run_dir)
            run = self._template.start(run_dir, request)
        except (KeeperFailed, RunRefused, OSError) as error:
            return self._not_started(task, str(error))
        except BaseException:
            self._attend(task, None, abandoned=True)
            raise
        try:
            child = run.go()
            if child is not None:
                task = journal.record(
                    task.task_id,
                    Fact.RUNNING,
                    keeper=run.keeper.to_json(),
                    child=child.to_json(),
                    worker=self.worker_id,
                )
        except KeeperFailed:
            live = self._attend(task, run)
        except BaseException as error:
            # It may run, and nobody would know by what we recorded: it is ended, and that is recorded.
            rundir.request_stop(
                run_dir, reason="its start could not be recorded", grace_s=1.0, disk=self._disk, system=self._system
            )
            self._attend(task, run)
            if isinstance(error, OSError | Refused):
                raise OutcomeUnknown(
                    f"task {task.task_id} is being ended: its start could not be recorded: {error}"
                ) from error
            raise
        else:
            live = self._attend(task, run, child is None)
            if child is not None:
                return task
        live.ended.wait(_RECOVER_S)
        return journal.get(task.task_id)

    def _not_started(self, task: Task, error: str) -> Task:
        """No keeper took it; a tombstone keeps a late one from running it after all."""
        live = self._attend(task, None, abandoned=True, not_started=error)
        live.ended.wait(_RECOVER_S)
        return self.client.journal(task.session_id).get(task.task_id)

    # --- reading -----------------------------------------------------------------------------------

    def get(self, task_id: str) -> Task:
        """The task as it stands; a unique beginning of its id is enough. Raises `UnknownTask`, `AmbiguousId`."""
        self._check()
        return self.client.get(task_id)

    def list(self, session_id: str) -> Tasks:
        """The tasks of a session, newest first."""
        self._check()
        return self.client.list(session_id)

    def output(self, task_id: str, stream: str = "mixed", offset: int = 0, limit: int = 65536) -> Output:
        """At most `limit` bytes of what it wrote ("stdout", "stderr" or "mixed"), from byte `offset` on.

        Costs time and memory in proportion to `limit`. Raises `UnknownTask`, `InvalidInput`, `Damaged`.
        """
        return self.client.output(self.get(task_id), stream, offset, limit)

    def wait(self, task_id: str, timeout: float | None = None) -> Task:
        """The task once its end is recorded, or as it stands after `timeout` seconds; a dead worker's is adopted."""
        self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        entry = self.client.find(task_id)
        journal = self.client.journal(entry.session_id)
        pause, longest = _LOOK_S
        while True:
            with self._lock:
                live = self._lives.get(entry.job_id)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if live is not None:
                live.ended.wait(left)
                return journal.get(entry.job_id)
            task = self._met(journal.get(entry.job_id))
            if task.terminal or left == 0.0:
                return task
            if not self._is_mine(task):
                time.sleep(pause if left is None else min(pause, left))
                pause = min(pause * 1.5, longest)

    # --- stopping ----------------------------------------------------------------------------------

    def stop(self, task_id: str, reason: str | None = None, grace_s: float = layout.DEFAULT_GRACE_S) -> Task:
        """Ask for the end of a task's whole tree: TERM, `grace_s`, KILL. The task as it stands; see `wait`.

        Another live worker's task is ended by that worker, within half a second. May be repeated; a smaller grace
        hastens. Raises `UnknownTask`, and what `Ledger.append` raises.
        """
        self._check()
        task = self._met(self.client.get(task_id))
        task = self.client.request_stop(task.task_id, reason, grace_s)
        if self._is_mine(task) and not task.terminal:
            self._act_on_stop(task)
        return task

    def stop_job(self, job_id: str, reason: str | None = None) -> None:
        """Ask for the end of every task of this worker that belongs to the job."""
        with self._lock:
            ids = [live.task_id for live in self._lives.values() if live.job_id == job_id]
        for task_id in ids:
            self.stop(task_id, reason)

    def _act_on_stop(self, task: Task) -> None:
        reason = task.stop_reason or "it was asked to stop"
        rundir.request_stop(
            self._run_dir(task), reason=reason, grace_s=task.stop_grace_s, disk=self._disk, system=self._system
        )

    # --- recovery ----------------------------------------------------------------------------------

    def recover(self, *, adopt: bool = True) -> Tasks:
        """Take over what dead workers left: adopt whom a keeper proves alive, record the end of all others.

        Nothing is run again, and a living worker's tasks are not touched. Idempotent, may die anywhere. Returns the
        tasks as they stand then. A process that does not stay says `adopt=False`: what still runs is left.
        """
        self._check()
        met: Tasks = []
        for worker_id in self._marks.runners():
            if worker_id == self.worker_id or self._store.leases.is_held(worker_id):
                continue
            complete = True
            for session_id in self._marks.sessions(worker_id):
                try:
                    ended, left = self._recover_session(session_id, adopt)
                    met += ended
                    if left:
                        complete = False
                    else:
                        self._marks.clear(worker_id, session_id)
                except (OpenJobsError, OSError) as error:
                    complete = False
                    log.warning("tasks of session %s, worker %s: %s", session_id, short(worker_id), error)
            if complete:
                self._marks.remove(worker_id)
                if not self._store.active.sessions(worker_id):
                    self._store.leases.remove(worker_id)
        return met

    def _recover_session(self, session_id: str, adopt: bool) -> tuple[Tasks, bool]:
        """What was taken over, and whether anything was left."""
        self._mark(session_id)
        journal = self.client.journal(session_id)
        orphans = [task for task in journal.unfinished() if self._is_dead(task)]
        taken = [task for task in orphans if adopt or not rundir.keeper_lives(self._run_dir(task))]
        lives = [live for task in taken if (live := self._take_over(task)) is not None]
        lives += self._unfinished_logs(journal)
        deadline = time.monotonic() + _RECOVER_S
        for live in lives:
            live.done.wait(max(0.0, deadline - time.monotonic()))
        return [journal.get(task.task_id) for task in taken], len(taken) < len(orphans)

    def _unfinished_logs(self, journal: TaskJournal) -> _Lives:
        """A worker died between a task's end and the completion of its log."""
        from .runs import incomplete_runs

        found = []
        for run_id in incomplete_runs(self._home, journal.session_id):
            try:
                task = journal.get(run_id)
            except UnknownTask:
                continue  # a job's
            if task.terminal and self._is_dead(task):
                found.append(self._attend(task, None, abandoned=True))
        return found

    def _take_over(self, task: Task) -> _Live | None:
        """Adopt it where its keeper proves itself alive; else find out how it ended. None: somebody else does."""
        run_dir = self._run_dir(task)
        keeper = rundir.keeper_identity(run_dir) if rundir.keeper_lives(run_dir) else None
        if keeper is None or not self._system.is_alive(keeper):
            return self._attend(task, None, abandoned=True)
        child = rundir.child_identity(run_dir)
        journal = self.client.journal(task.session_id)
        try:
            adopted = journal.adopt(
                task.task_id,
                task.worker_id,
                worker=self.worker_id,
                keeper=keeper.to_json(),
                child=child.to_json() if child is not None else None,
            )
        except InvalidTransition:
            return None
        self._attend(adopted, None)
        if adopted.stop_requested_at is not None:
            self._act_on_stop(adopted)
        return None

    def _met(self, task: Task) -> Task:
        """A task as it stands; taken over first where its worker is dead, since nobody else may be there to do it."""
        if task.terminal and task.event_id is not None:
            return task
        journal = self.client.journal(task.session_id)
        task = journal.get(task.task_id)
        if task.terminal or self._is_mine(task) or not self._is_dead(task):
            return task
        self._mark(task.session_id)
        live = self._take_over(task)
        if live is not None:
            live.ended.wait(_RECOVER_S)
        self._unmark_if_idle(task.session_id)
        return journal.get(task.task_id)

    def _is_dead(self, task: Task) -> bool:
        return task.worker_id != self.worker_id and not self._store.leases.is_held(task.worker_id)

    def _is_mine(self, task: Task) -> bool:
        return task.worker_id == self.worker_id

    # --- the end -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many tasks it looks after."""
        with self._lock:
            return len(self._lives)

    def close(self, timeout: float = _CLOSE_S) -> None:
        """End the trees of job-owned tasks; leave session tasks to keepers and the next worker. Twice is once."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            first, self._closing = not self._closing, True
            owned = [live for live in self._lives.values() if live.job_id is not None]
            ending = [live for live in self._lives.values() if live.ended.is_set()]
        if not first:
            return
        for live in owned:
            self._end_owned(live)
        deadline = time.monotonic() + timeout
        for live in (*owned, *ending):
            live.done.wait(max(0.0, deadline - time.monotonic()))
        self._stop_threads()
        with self._lock:
            every = list(self._lives.values())
            self._lives = {live.task_id: live for live in every if not live.done.is_set()}
            left = bool(self._lives)
        for live in every:
            live.tail.rest()
            if live.run is not None:
                live.run.close()
        if self._own_template:
            self._template.close()
        for session_id in list(self._marked):
            self._unmark_if_idle(session_id)
        if not left:
            self._marks.remove(self.worker_id)
        if self._lease is not None:
            self._lease.release()
            if not left:
                self._store.leases.remove(self.worker_id)
        self.client.close()

    def _end_owned(self, live: _Live) -> None:
        try:
            self.client.request_stop(live.task_id, "its worker closed", 1.0)
        except (OpenJobsError, OSError) as error:
            log.warning("task %s: its stop could not be recorded: %s", live.task_id, error)
        rundir.request_stop(live.run_dir, reason="its worker closed", grace_s=1.0, disk=self._disk, system=self._system)

    def _stop_threads(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
            writer = self._wake_writer
        if not threads:
            return
        self._stopping = True
        for _ in range(self._log_threads):
            self._steps.put(None)
        os.write(writer, b"x")
        for thread in threads:
            thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._wake_reader = self._wake_writer = -1

    def __enter__(self) -> ProcessSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the attendant: one thread that watches all ----------------------------------------------------

    def _attend(
        self,
        task: Task,
        run: Run | None,
        ended: bool = False,
        *,
        abandoned: bool = False,
        not_started: str | None = None,
    ) -> _Live:
        """Look after a task from now on, or go on doing so."""
        run_dir = self._run_dir(task)
        keeper = run.keeper if run is not None else (task.keeper or rundir.keeper_identity(run_dir))
        tail = RunTail(run_dir, owner_id=task.task_id, run_id=task.task_id, keeper=keeper, disk=self._disk, clock=None)
        live = _Live(task, run_dir, tail, run)
        live.abandoned = abandoned
        if task.terminal:
            live.ended.set()
        if not_started is not None:
            live.end = {
                **lost(not_started),
                "status": TaskStatus.FAILED.value,
                "exit_code": layout.CODE_NOT_STARTED,
                "stopped_by": layout.BY_NOT_STARTED,
            }
        with self._lock:
            known = self._lives.setdefault(task.task_id, live)
            if known is not live:
                return known
            self._start_threads()
        self._tell(lambda: self._watch(live))
        return live

    def _start_threads(self) -> None:
        """With the lock held."""
        if self._threads:
            return
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        name = f"openjobs tasks {short(self.worker_id)}"
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
        try:
            os.write(self._wake_writer, b"x")
        except OSError:
            pass  # it is awake already, or closing

    def _serve(self) -> None:
        with selectors.DefaultSelector() as ready:
            self._ready = ready
            ready.register(self._wake_reader, selectors.EVENT_READ)
            next_stop = next_output = time.monotonic()
            while not self._stopping:
                now = time.monotonic()
                with self._lock:
                    lives = list(self._lives.values())
                timed = [live for live in lives if live.look_at]
                due = min([next_stop, next_output, *(live.look_at for live in timed)]) if lives else now + 3600
                for key, _ in ready.select(max(0.0, due - now)):
                    if key.data is None:
                        _drain_pipe(self._wake_reader)
                    else:
                        self._hear(key.data)
                self._take_news()
                now = time.monotonic()
                for live in timed:
                    if live.look_at and live.look_at <= now:
                        live.look_at = 0.0
                        self._contained(live, self._look)
                if now >= next_stop:
                    next_stop = now + STOP_LOOK_S
                    self._look_for_stops(lives)
                if now >= next_output:
                    next_output = now + self._output_every_s
                    self._record_outputs(lives)
            for key in list(ready.get_map().values()):
                ready.unregister(key.fileobj)

    def _take_news(self) -> None:
        while True:
            try:
                call = self._news.get_nowait()
            except queue.Empty:
                return
            try:
                call()
            except Exception:
                log.exception("attending a task failed")

    def _watch(self, live: _Live) -> None:
        """Attendant: from now on, what happens to it is seen."""
        if live.run is not None:
            self._ready.register(live.run, selectors.EVENT_READ, live)
            live.watched = True
            live.run.want_output()
            self._hear(live)
        self._want(live)

    def _hear(self, live: _Live) -> None:
        """Attendant: the keeper said something."""
        run = live.run
        if run is None:
            return
        run.pump()
        live.record = run.record
        if run.gone:
            self._let_go(live)
            live.abandoned = live.abandoned or not run.recorded
        if run.output or run.record is not None or run.gone:
            self._want(live)

    def _let_go(self, live: _Live) -> None:
        if live.run is not None:
            if live.watched:
                self._ready.unregister(live.run)
                live.watched = False
            live.run.close()
            live.run = None

    def _look(self, live: _Live) -> None:
        """Attendant: an adopted task, or one whose step has to be tried again, by the clock."""
        if live.run is None and not live.abandoned and not rundir.keeper_lives(live.run_dir):
            live.abandoned = True
        self._want(live)

    def _want(self, live: _Live) -> None:
        """Attendant: a step is wanted, after the one that may be under way."""
        with self._lock:
            if live.busy:
                live.again = True
                return
            live.busy, live.again = True, False
        self._steps.put(live)

    def _stepped(self, live: _Live, more: bool, retry: bool) -> None:
        """Attendant: a step is over."""
        with self._lock:
            live.busy = False
        if live.done.is_set():
            self._let_go(live)
            with self._lock:
                self._lives.pop(live.task_id, None)
                idle = all(other.session_id != live.session_id for other in self._lives.values())
            if idle:
                self._states.pop(live.session_id, None)
                self._unmark_if_idle(live.session_id)
            return
        if retry:
            live.look_at = time.monotonic() + live.retry_s
            live.retry_s = min(live.retry_s * 2, _RETRY_S[1])
            return
        live.retry_s = _RETRY_S[0]
        if live.again or more:
            self._want(live)
        elif live.run is not None:
            if live.run.output:
                live.run.want_output()
                self._want(live)  # asked before reading: nothing is missed
        else:
            live.pause_s = _LOOK_S[0] if more else min(live.pause_s * 1.5, _LOOK_S[1])
            live.look_at = time.monotonic() + live.pause_s

    def _look_for_stops(self, lives: Sequence[_Live]) -> None:
        for session_id in {live.session_id for live in lives}:
            journal = self.client.journal(session_id)
            try:
                state = journal.state()
                if state == self._states.get(session_id):
                    continue
                tasks = {task.task_id: task for task in journal.unfinished()}
                self._states[session_id] = state
            except (OpenJobsError, OSError) as error:
                log.warning("the journal of session %s cannot be read: %s", session_id, error)
                continue
            for live in lives:
                task = tasks.get(live.task_id)
                if task is None or task.stop_requested_at is None or live.session_id != session_id:
                    continue
                if live.stop_acted_s is None or task.stop_grace_s < live.stop_acted_s:
                    live.stop_acted_s = task.stop_grace_s
                    self._contained(live, lambda live, task=task: self._act_on_stop(task))  # type: ignore[misc]

    def _record_outputs(self, lives: Sequence[_Live]) -> None:
        news: dict[str, dict[str, tuple[int, int]]] = {}
        for live in lives:
            sizes = (_size(live.run_dir / layout.STDOUT), _size(live.run_dir / layout.STDERR))
            if sizes != live.sizes and not live.ended.is_set():
                live.sizes = sizes
                news.setdefault(live.session_id, {})[live.task_id] = sizes
        for session_id, sizes_of in news.items():
            try:
                self.client.journal(session_id).record_outputs(sizes_of)
            except (OpenJobsError, OSError) as error:
                log.debug("output of session %s was not recorded: %s", session_id, error)

    def _contained(self, live: _Live, call: Callable[[_Live], object]) -> None:
        try:
            call(live)
        except Exception:
            log.exception("task %s: looking after it failed", live.task_id)

    # --- the log threads: what may wait for a disk -----------------------------------------------------

    def _work(self) -> None:
        while (live := self._steps.get()) is not None:
            if self._stopping:
                continue
            more, retry = False, False
            try:
                more = self._step(live)
            except (SessionBusy, StoreWriteFailed, OutcomeUnknown, LogBusy, OSError) as error:
                retry = True
                log.log(
                    logging.DEBUG if isinstance(error, LogBusy) else logging.WARNING,
                    "task %s: its output or end could not be written and is tried again: %s",
                    live.task_id,
                    error,
                )
            except Exception:
                retry = True
                log.exception("task %s: a step failed and is tried again", live.task_id)
            if self._stopping:
                continue
            self._tell(lambda live=live, more=more, retry=retry: self._stepped(live, more, retry))  # type: ignore[misc]

    def _step(self, live: _Live) -> bool:
        """Take a piece of output, or the end. Whether there is more to do at once."""
        if live.done.is_set():
            return False
        if live.abandoned and live.end is None and not live.ended.is_set():
            if not self._bury(live):
                return False
        elif live.abandoned and not live.ended.is_set():
            rundir.bury(live.run_dir, task_id=live.task_id, disk=self._disk, system=self._system, boot=live.boot)
        try:
            more = live.tail.step()
        except (Damaged, Refused) as error:
            if isinstance(error, SessionBusy | StoreWriteFailed | LogBusy):
                raise
            return self._without_log(live, error)
        self._rest_others(live)
        if more:
            return True
        if (
            live.tail.finished is not None
            or live.tail.completion is not None
            or (live.abandoned and self._no_output(live))
        ):
            self._record_end(live)
            self._complete(live)
            return False
        return False

    def _no_output(self, live: _Live) -> bool:
        return live.tail._source is None

    def _bury(self, live: _Live) -> bool:
        """Nobody looks after it any more: what the keeper left, or a tombstone. False while a keeper lives."""
        burial = rundir.bury(live.run_dir, task_id=live.task_id, disk=self._disk, system=self._system, boot=live.boot)
        if burial is None:
            self._adopt_after_all(live)
            return False
        if burial.record is None and live.record is not None:
            live.end = end_of(live.record)
        elif burial.record is None:
            what = "how it ended cannot be known" if burial.may_have_run else "it did not run"
            live.end = lost(
                f"its keeper died or never came; {what}",
                leftovers=burial.leftovers,
                stdout_bytes=_size(live.run_dir / layout.STDOUT),
                stderr_bytes=_size(live.run_dir / layout.STDERR),
            )
        return True

    def _adopt_after_all(self, live: _Live) -> None:
        """Somebody holds its keeper's lock: the keeper, or for a moment who else buries it or looks."""
        journal = self.client.journal(live.session_id)
        task = journal.get(live.task_id)
        keeper = rundir.keeper_identity(live.run_dir)
        if task.terminal or keeper is None or not self._system.is_alive(keeper):
            raise SessionBusy(f"the run of task {live.task_id} is being looked at by somebody else")
        if not self._is_mine(task):
            try:
                journal.adopt(task.task_id, task.worker_id, worker=self.worker_id, keeper=keeper.to_json())
            except InvalidTransition:
                live.ended.set()
                live.done.set()
                return
        live.abandoned = False

    def _record_end(self, live: _Live) -> None:
        if live.ended.is_set():
            return
        end = live.end
        if end is None:
            record = self._exit_record(live)
            if record is None:
                raise OutcomeUnknown(f"task {live.task_id} has ended and its exit record cannot be read")
            end = live.end = end_of(record)
        live.event_id = live.event_id or self._new_id()
        try:
            self.client.journal(live.session_id).record(live.task_id, Fact.ENDED, event_id=live.event_id, **end)
        except InvalidTransition:
            pass  # it was recorded before, by us or by whoever recovered it
        live.ended.set()

    def _exit_record(self, live: _Live) -> ExitRecord | None:
        record = rundir.read_exit(live.run_dir)
        return record if record is not None else live.record

    def _complete(self, live: _Live) -> None:
        """The log's completion carries the outcome that is in the journal, whoever wrote it."""
        task = self.client.journal(live.session_id).get(live.task_id)
        self._open_logs.pop(live, None)
        if live.tail._source is None and task.status is TaskStatus.LOST and live.boot != self._system.boot():
            live.tail.rest()  # it may have run and written what is gone: nothing proves what the log should hold
        else:
            live.tail.complete(task.status.value)
        live.done.set()

    def _without_log(self, live: _Live, error: Exception) -> bool:
        """Its log cannot be used and stays as it is; its end is recorded all the same."""
        if self._exit_record(live) is None and live.end is None:
            live.tail.rest()
            raise OutcomeUnknown(f"its log cannot be written: {error}")
        log.error("task %s: its log cannot be completed: %s", live.task_id, error)
        self._record_end(live)
        self._open_logs.pop(live, None)
        live.tail.rest()
        live.done.set()
        return False

    def _rest_others(self, live: _Live) -> None:
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
                self._tell(lambda one=one: self._stepped(one, False, False))  # type: ignore[misc]

    # --- within ------------------------------------------------------------------------------------

    def _run_dir(self, task: Task) -> Path:
        return run_directory(self._home, task.session_id, task.task_id)

    def _directory(self, session_id: str, cwd: str | os.PathLike[str] | None) -> Path:
        if cwd is not None:
            path = Path(cwd).absolute()
            if not path.is_dir():
                raise InvalidInput(f"the working directory {path} does not exist or is not a directory")
            return path
        work = self._home / "sessions" / session_id / "work"
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        return work

    def _environment(self, session_id: str, env: Mapping[str, str] | None, job_id: str | None) -> dict[str, str]:
        made = {name: value for name, value in (os.environ if env is None else env).items() if name not in _MARKS}
        made["OPENJOBS_SESSION_ID"] = session_id
        made["OPENJOBS_HOME"] = str(self._home)
        if job_id is not None:
            made["OPENJOBS_JOB_ID"] = job_id
        return made

    def _mark(self, session_id: str) -> None:
        """Durable before the first task of ours in a session: who comes after us looks there."""
        with self._lock:
            if session_id in self._marked:
                return
        self._marks.mark(self.worker_id, session_id)
        with self._lock:
            self._marked.add(session_id)

    def _unmark_if_idle(self, session_id: str) -> None:
        """Kept while the process lives, so that a busy session costs no directory change a task."""
        if not self._closing:
            return
        with self._lock:
            busy = any(live.session_id == session_id for live in self._lives.values())
            if busy:
                return
            self._marked.discard(session_id)
        self._marks.clear(self.worker_id, session_id)

    def _indexed(self, entry: Entry) -> None:
        try:
            self.client.index.add([entry])
        except Refused:
            raise
        except OSError as error:
            raise StoreWriteFailed(f"the index of tasks could not be written; nothing was started: {error}") from error

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess
        if self._closing:
            raise Closed("the supervisor is closed")


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _drain_pipe(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
