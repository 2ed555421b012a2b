"""`ProcessSupervisor`: starts background commands, looks after them, and records how they ended.

    start ─► index, mark ─► intent [durable] ─► keeper ─► go ─► running [durable] ─► fact ─► the caller
    end   ─► drain the log to its end ─► ended [durable] ─► fact ─► the log is complete ─► waiters

Source: spec 000; spec 004, *Finish ordering*.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from ..clock import Clock, to_text
from ..durable import Disk
from ..errors import (
    Closed,
    ForkedProcess,
    InvalidInput,
    InvalidTransition,
    KeeperFailed,
    OpenJobsError,
    OutcomeUnknown,
    ParentFinished,
    Refused,
    RunRefused,
    StoreWriteFailed,
    UnknownTask,
)
from ..facts import Recorder
from ..ids import IdMaker, check_job_id, check_session_id, short
from ..store import JobStore
from ..store.index import Entry, key_of
from ..store.presence import FileActive, Held
from . import layout, rundir
from .attendant import OUTPUT_EVERY_S, Attendant, Live, Lives
from .client import MARKS, OnDamage, TaskClient, run_directory
from .facts import TaskFacts
from .identity import System, this_system
from .journal import TaskJournal, same_command
from .output import Output
from .owned import JobTasks
from .task import Fact, Task, TaskStatus, after, check_origin, end_of, lost
from .template import Request, Spill, Template, argv_of

log = logging.getLogger(__name__)

#: how long `close` waits for the trees of job-owned tasks
_CLOSE_S = 8.0
_RECOVER_S = 30.0
#: how often a task of another worker is looked at by who waits for it
_LOOK_S = (0.02, 0.25)
_SLICE_S = 0.5
#: variables that say of which job or task a process is part; never inherited by a task of its own
_MARKS = frozenset({"OPENJOBS_JOB_ID", "OPENJOBS_SESSION_ID", "OPENJOBS_TASK_ID", "OPENJOBS_RUN_ID"})

Tasks = list[Task]


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

    What the lock protects: the marks that were made, and the decision to close. See `Attendant` for the threads.
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
        #: the tasks of jobs, ended at once where they are this worker's
        self.job_tasks = JobTasks(self.client, disk=self._disk, system=self._system, stop=self._stop_for_job)
        self.worker_id = worker_id or self._new_id()
        self._lease: Held | None = None if worker_id else store.leases.acquire(self.worker_id)
        self._facts = TaskFacts(Recorder(store.facts))
        self._attendant = Attendant(
            self.client,
            worker_id=self.worker_id,
            disk=self._disk,
            system=self._system,
            new_id=self._new_id,
            facts=self._facts,
            log_threads=log_threads,
            output_every_s=output_every_s,
        )
        self._lock = threading.Lock()
        self._marked: set[str] = set()
        #: tasks that `start` has in its hands
        self._starting: set[str] = set()
        self._closing = False

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
        spill: Spill | None = None,
    ) -> Task:
        """Start a command in the background: text goes through the shell, a list is an argv.

        Returns when `running` is durable, or the end of a command that could not be started. `env` is the whole
        environment (None: ours) and is never written down; `cwd` is the session's own directory where nothing is
        said. `spill` are two pipes, for stdout and stderr, that get what the disk has no room for (the caller's to
        close). A task with a `job_id` belongs to that job and ends with it, at the latest with `close`.

        The same `origin_tool_call_id` in the session, or the same `task_id`, with the same command returns the first
        task and starts nothing; with another command it raises `IdempotencyConflict`.

        Raises, with nothing started: `InvalidInput`, `UnknownSession`, `UnknownJob`, `ParentFinished` (the job is
        over, or was asked to stop), `SessionBusy`, `StoreWriteFailed`, `Damaged`, `Closed`, `ForkedProcess`. And
        `OutcomeUnknown`: ask again with the same id.
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
        if job_id is not None:
            if (known := self._check_job(job_id, journal, task_id)) is not None:
                return self._met(same_command(known, command))
            self.job_tasks.mark(job_id, session_id)
        self._mark(session_id)
        self._indexed(Entry(job_id=task_id, session_id=session_id, key=key))
        with self._lock:
            self._starting.add(task_id)
        try:
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
            if fresh:
                self._facts.began(task)
            if fresh and job_id is not None and self._is_over(job_id):
                return self._too_late(task)  # see owned.py
            if fresh:
                return self._launch(journal, task, request, spill)
        finally:
            with self._lock:
                self._starting.discard(task_id)
        return self._met(task)

    def _launch(self, journal: TaskJournal, task: Task, request: Request, spill: Spill | None) -> Task:
        run_dir = self._run_dir(task)
        try:
            self._disk.make_dirs(run_dir)
            run = self._template.start(run_dir, request, spill)
        except (KeeperFailed, RunRefused, OSError) as error:
            return self._not_started(task, str(error))
        except BaseException:
            self._attendant.attend(task, abandoned=True)
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
                self._facts.registered(task)
        except KeeperFailed:
            live = self._attendant.attend(task, run)
        except BaseException as error:
            # It may run, and nobody would know by what we recorded: it is ended, and that is recorded.
            rundir.request_stop(
                run_dir, reason="its start could not be recorded", grace_s=1.0, disk=self._disk, system=self._system
            )
            self._attendant.attend(task, run)
            if isinstance(error, OSError | Refused):
                raise OutcomeUnknown(
                    f"task {task.task_id} is being ended: its start could not be recorded: {error}"
                ) from error
            raise
        else:
            live = self._attendant.attend(task, run)
            if child is not None:
                return task
        return self._as_ended(live)

    def _as_ended(self, live: Live) -> Task:
        """Once its end is recorded, or cannot be (see `unrecorded_end`)."""
        deadline = time.monotonic() + _RECOVER_S
        while not live.ended.wait(_SLICE_S / 10) and time.monotonic() < deadline:
            if (task := self.unrecorded_end(live.task_id)) is not None:
                return task
        return self.client.journal(live.session_id).get(live.task_id)

    def _not_started(self, task: Task, error: str) -> Task:
        """No keeper took it; a tombstone keeps a late one from running it after all."""
        end = lost(error) | {
            "status": TaskStatus.FAILED.value,
            "exit_code": layout.CODE_NOT_STARTED,
            "stopped_by": layout.BY_NOT_STARTED,
        }
        live = self._attendant.attend(task, abandoned=True, end=end)
        return self._as_ended(live)

    def _check_job(self, job_id: str, journal: TaskJournal, task_id: str) -> Task | None:
        """Raises `ParentFinished`, but for a task that is known: it is answered with what became of it."""
        if not self._is_over(check_job_id(job_id)):
            return None
        try:
            return journal.get(task_id)
        except UnknownTask:
            raise ParentFinished(
                f"job {short(job_id)} has ended, or was asked to stop, and starts no commands any more"
            ) from None

    def _is_over(self, job_id: str) -> bool:
        job = self._store.row(job_id)
        return job.terminal or job.cancel_requested_at is not None

    def _too_late(self, task: Task) -> Task:
        """Its job ended while its intent was being written: it is recorded as cancelled, and never ran."""
        end = lost("its job ended before it could start") | {
            "status": TaskStatus.CANCELLED.value,
            "stopped_by": layout.BY_NEVER_STARTED,
        }
        live = self._attendant.attend(task, abandoned=True, end=end)
        live.ended.wait(_RECOVER_S)
        assert task.job_id is not None
        self.job_tasks.release(task.job_id)
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
        """The task once its end is recorded, or as it stands after `timeout` seconds; a dead worker's is adopted.

        Raises `UnknownTask`, and `Closed` when the supervisor is closed meanwhile.
        """
        self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        entry = self.client.find(task_id)
        journal = self.client.journal(entry.session_id)
        pause, longest = _LOOK_S
        while True:
            live = self._attendant.find(entry.job_id)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if live is not None:
                self._until_ended(live, deadline)
                return journal.get(entry.job_id)
            task = self._met(journal.get(entry.job_id))
            if task.terminal or left == 0.0:
                return task
            # Another worker's, or one of ours that is only being started.
            time.sleep(pause if left is None else min(pause, left))
            pause = min(pause * 1.5, longest)
            self._check()

    def unrecorded_end(self, task_id: str) -> Task | None:
        """The task as it ended, while no disk takes the record of that (it has no `event_id` then); else None."""
        live = self._attendant.find(task_id)
        if live is None or live.ended.is_set():
            return None
        record = live.record or live.unrecorded
        end = live.end if record is None else end_of(record)
        if end is None or not (live.warned or live.unrecorded is not None):
            return None
        at = record.ended_at if record is not None else to_text(self._clock.now())
        task = self.client.journal(live.session_id).get(live.task_id)
        if task.terminal:
            return None
        return after(task, {"fact": Fact.ENDED, "task": task.task_id, "at": at, "event_id": None, **end})

    def _until_ended(self, live: Live, deadline: float | None) -> None:
        """In slices: somebody may close us meanwhile, and then nobody here will see the end."""
        while True:
            left = _SLICE_S if deadline is None else max(0.0, deadline - time.monotonic())
            if live.ended.wait(min(left, _SLICE_S)) or left == 0.0:
                return
            self._check()

    # --- stopping ----------------------------------------------------------------------------------

    def stop(self, task_id: str, reason: str | None = None, grace_s: float = layout.DEFAULT_GRACE_S) -> Task:
        """Ask for the end of a task's whole tree: TERM, `grace_s`, KILL. The task as it stands; see `wait`.

        Another live worker's task is ended by that worker, within half a second. May be repeated; a smaller grace
        hastens. Raises `UnknownTask`, and what `Ledger.append` raises.
        """
        self._check()
        task = self._met(self.client.get(task_id))
        try:
            task = self.client.request_stop(task.task_id, reason, grace_s)
        except (StoreWriteFailed, OutcomeUnknown):
            if task.terminal or not self._is_mine(task):
                raise
            # Only others need the record; a full disk keeps nobody from ending what is his own.
            task = attrs.evolve(task, stop_reason=reason, stop_grace_s=grace_s)
        if self._is_mine(task) and not task.terminal:
            self._attendant.act_on_stop(task)
        return task

    def stop_job(self, job_id: str, reason: str | None = None) -> None:
        """Ask for the end of every task that belongs to the job, whoever looks after it (as `stop`)."""
        self._check()
        self.job_tasks.ask(job_id, reason or "its job was asked to stop", layout.DEFAULT_GRACE_S)

    def _stop_for_job(self, task: Task, reason: str, grace_s: float) -> None:
        self.stop(task.task_id, reason, grace_s)

    # --- recovery ----------------------------------------------------------------------------------

    def recover(self, *, adopt: bool = True, on_damage: OnDamage | None = None) -> Tasks:
        """Take over what dead workers left: adopt whom a keeper proves alive, record the end of all others.

        Nothing is run again, and a living worker's tasks are not touched. Idempotent, may die anywhere. Returns the
        tasks as they stand then. A process that does not stay says `adopt=False`: what still runs is left.
        A session that could not be recovered is told to `on_damage`, else logged, and left to the next recovery.
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
                    if on_damage is not None:
                        on_damage(session_id, error)
                    else:
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
        if taken:
            journal.check_lock()  # no step would ever come through, and all that follows waits for one
        lives = [live for task in taken if (live := self._take_over(task)) is not None]
        lives += self._unfinished_logs(journal)
        deadline = time.monotonic() + _RECOVER_S
        for live in lives:
            live.done.wait(max(0.0, deadline - time.monotonic()))
        return [journal.get(task.task_id) for task in taken], len(taken) < len(orphans)

    def _unfinished_logs(self, journal: TaskJournal) -> Lives:
        """A worker died between a task's end and the completion of its log."""
        from .runs import incomplete_runs

        found = []
        for run_id in incomplete_runs(self._home, journal.session_id):
            try:
                task = journal.get(run_id)
            except UnknownTask:
                continue  # a job's
            if task.terminal and self._is_dead(task):
                found.append(self._attendant.attend(task, abandoned=True))
        return found

    def _take_over(self, task: Task) -> Live | None:
        """Adopt it where its keeper proves itself alive; else find out how it ended. None: somebody else does."""
        run_dir = self._run_dir(task)
        keeper = rundir.keeper_identity(run_dir) if rundir.keeper_lives(run_dir) else None
        if keeper is None or not self._system.is_alive(keeper):
            return self._attendant.attend(task, abandoned=True)
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
        self._facts.adopted(adopted)
        self._attendant.attend(adopted)
        if adopted.stop_requested_at is not None:
            self._attendant.act_on_stop(adopted)
        return None

    def _met(self, task: Task) -> Task:
        """A task as it stands; taken over first where its worker is dead, since nobody else may be there to do it."""
        if task.terminal and task.event_id is not None:
            return task
        journal = self.client.journal(task.session_id)
        task = journal.get(task.task_id)
        if task.terminal or not (self._is_dead(task) or self._is_forgotten(task)):
            return task
        journal.check_lock()
        self._mark(task.session_id)
        live = self._take_over(task)
        if live is not None:
            live.ended.wait(_RECOVER_S)
        return journal.get(task.task_id)

    def _is_dead(self, task: Task) -> bool:
        return task.worker_id != self.worker_id and not self._store.leases.is_held(task.worker_id)

    def _is_forgotten(self, task: Task) -> bool:
        """Ours, and nobody here looks after it: its start was interrupted, or could not tell whether its intent is
        written down."""
        if not self._is_mine(task) or self._attendant.find(task.task_id) is not None:
            return False
        with self._lock:
            return task.task_id not in self._starting

    def _is_mine(self, task: Task) -> bool:
        return task.worker_id == self.worker_id

    # --- the end -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many tasks it looks after."""
        return len(self._attendant.lives())

    def close(self, timeout: float = _CLOSE_S) -> None:
        """End the trees of job-owned tasks; leave session tasks to keepers and the next worker. Twice is once."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            first, self._closing = not self._closing, True
        if not first:
            return
        lives = self._attendant.lives()
        for live in lives:
            if live.job_id is not None:
                self._end_owned(live)
        deadline = time.monotonic() + timeout
        for live in lives:
            if live.job_id is not None or live.ended.is_set():
                live.done.wait(max(0.0, deadline - time.monotonic()))
        left = {live.session_id for live in self._attendant.close()} | self._forgotten()
        if self._own_template:
            self._template.close()
        if self._lease is not None:
            self._lease.release()
        try:
            self._tidy_up(left)
        except OSError as error:
            log.warning("what this worker's end leaves could not be removed; the next one's recovery will: %s", error)
        self.client.close()

    def _forgotten(self) -> set[str]:
        """Sessions with tasks of ours that are not known to have ended, whoever looked after them."""
        found = set()
        for session_id in self._marked:
            try:
                if any(self._is_mine(task) for task in self.client.journal(session_id).unfinished()):
                    found.add(session_id)
            except (OpenJobsError, OSError):
                found.add(session_id)
        return found

    def _tidy_up(self, left: set[str]) -> None:
        """A mark stays for a session with tasks that go on: it is where the next worker looks."""
        for session_id in self._marked - left:
            self._marks.clear(self.worker_id, session_id)
        if not left:
            self._marks.remove(self.worker_id)
            if self._lease is not None:
                self._store.leases.remove(self.worker_id)

    def _end_owned(self, live: Live) -> None:
        try:
            self.client.request_stop(live.task_id, "its worker closed", 1.0)
        except (OpenJobsError, OSError) as error:
            log.warning("task %s: its stop could not be recorded: %s", live.task_id, error)
        rundir.request_stop(live.run_dir, reason="its worker closed", grace_s=1.0, disk=self._disk, system=self._system)

    def __enter__(self) -> ProcessSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Durable before the first task of ours in a session: who comes after us looks there. It stays for as long as
        we live, so that a busy session costs no change of a directory a task."""
        with self._lock:
            if session_id in self._marked:
                return
        try:
            self._marks.mark(self.worker_id, session_id)
        except OSError as error:
            raise StoreWriteFailed(f"session {session_id} could not be marked; nothing was started: {error}") from error
        with self._lock:
            self._marked.add(session_id)

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
