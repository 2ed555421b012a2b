"""`JobRunner`: takes requests, runs them on the pool, and writes every state they pass through.

    submit ─► index entry, active marker ─► pending, queued ─► [durable] ─► fact ─► hub ─► the line
    worker ─► running ─► the turn ─► its end, in the order of `ending`

Source: spec 003; design, *The runner*.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import attrs

from ..clock import Clock
from ..errors import (
    CancelledError,
    Closed,
    ForkedProcess,
    IdempotencyConflict,
    InvalidInput,
    InvalidTransition,
    JobExists,
    NotFound,
    ParentFinished,
    UnknownJob,
    UnknownNode,
)
from ..ids import IdMaker, short
from ..jobs import (
    Cancelled,
    CancelRequested,
    Completed,
    ContextMode,
    Errored,
    Event,
    Job,
    JobStatus,
    Queued,
    SpawnRequest,
    Started,
    SyncFn,
    TurnRequest,
    transition,
)
from ..store import JobStore
from . import turn
from .admission import ProfileSource, check_cwd, check_env, function_for, job_from, refuse_finished_parent
from .cancel import SHUTDOWN_REASON, Canceller, Requests, StuckThread
from .client import JobClient, Statuses, answers
from .config import workers_from
from .ending import Ended, Ending, Settler
from .hub import DEFAULT_CAPACITY, JOB_STATUS, TASK_CREATED, TASK_PROGRESS, Hub, Subscription
from .live import LiveJob, Phase, Roster
from .markers import IDLE_S, Markers
from .pool import Executor, Pool, Seat
from .recent import Recent
from .recovery import Recovery
from .timers import Timers
from .waiting import ALL, Waiter, check_ids, check_mode, check_timeout

log = logging.getLogger(__name__)

Jobs = list[Job]

CANCEL_TIMEOUT_S = 30.0
SHUTDOWN_S = 5.0
#: of the shutdown's time: until running jobs are asked to stop, and until they are given up
_ASK_AT = 0.4
_GIVE_UP_AT = 0.7
#: how long `cancel` waits for its commit before it answers with the job as it stands
_CANCEL_COMMIT_S = 2.0

#: refusals of a submit after which there certainly is no new job
_NOTHING_WRITTEN = (JobExists, IdempotencyConflict, ParentFinished, NotFound, InvalidInput, Closed)

#: the job whose turn this is; in threads that copied the turn's context, too
_current: contextvars.ContextVar[LiveJob | None] = contextvars.ContextVar("openjobs_current_job", default=None)


@attrs.frozen(kw_only=True, slots=True)
class RunnerStats:
    runner_id: str
    #: slots
    workers: int
    #: jobs whose turn is running, those that wait for others included
    running: int
    queued: int
    #: unfinished jobs, those on their way to or from the store included
    unfinished: int
    #: slots lent while their jobs wait for other jobs
    lent: int
    #: threads that were given up and still run
    stuck: tuple[StuckThread, ...]
    #: slots that are lost until such a thread returns: too many are stuck to give more back
    withheld: int
    #: events that the store keeps because their commit failed at least once
    unsettled: int
    #: sessions with an active marker
    active_sessions: int


class JobRunner:
    """Runs jobs on a pool of threads, each state change one commit.

    Guarantees

    - A job that `submit` returned is durable, and reaches exactly one terminal state: by itself, by
      a cancel within `cancel_timeout_s`, by `shutdown`, or, when this process dies, by recovery.
    - Queued jobs start in the order in which they were submitted, at most `workers` at once. A slot
      is never lost: neither to a stuck job nor to a job that waits for another one of this runner.
    - Who waits, listens or reads a fact learns of an end only after that end is durable.

    Assumptions

    - The store stays open as long as the runner. Callables may do anything but end the process; one
      that ignores its cancel event keeps its thread, but neither its slot nor its job's state.
    - Only this runner changes the status of its jobs while it holds its lease.

    What each lock protects: the roster's lock all decisions (see `live.Roster`). A race, and how it
    ends: (1) a worker is about to take job J from the line, (2) `cancel(J)` gets the lock first, takes
    J out and hands `Cancelled` to the store, (3) the worker gets the lock and finds the next job. The
    other way round the worker hands in `Started` first, and the cancel, finding J running, sets its
    event. Either way the store gets the events in the order of the decisions.
    """

    def __init__(
        self,
        store: JobStore,
        workers: int | None = None,
        sync_fn: SyncFn | None = None,
        profiles: ProfileSource | None = None,
        executor: Executor | None = None,
        cancel_timeout_s: float = CANCEL_TIMEOUT_S,
        clock: Clock | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        new_id: IdMaker | None = None,
        marker_idle_s: float = IDLE_S,
    ) -> None:
        """Takes a lease and ends what dead runners left behind. Raises `InvalidWorkers`."""
        self.workers = workers_from(workers, environ)
        self.store = store
        self.sync_fn = sync_fn
        self.profiles = profiles
        self._clock: Clock = clock if clock is not None else store.clock
        self._new_id: IdMaker = new_id if new_id is not None else store.new_id
        self.runner_id = self._new_id()
        self._pid = os.getpid()
        name = f"openjobs-{short(self.runner_id)}"

        self.hub = Hub(self.runner_id)
        self.recovery = Recovery(store, self._new_id, own_id=self.runner_id)
        #: steps that follow a durable submit, each given the job: the place of the fact `job/registered`
        self.after_submit: list[Callable[[Job], None]] = []
        self.ending = Ending(hub=self._tell_hub, waiters=self._wake_waiters, release=self._release)

        self._roster = Roster()
        self._recent = Recent()
        self._timers = Timers(self._clock, f"{name}-timers")
        self._settler = Settler(store, self._told, f"{name}-settler")
        self._pool: Pool[LiveJob] = Pool(
            self.workers,
            lock=self._roster.lock,
            line=self._roster.line,
            claim=self._claim,
            run=self._run,
            executor=executor,
            name=name,
        )
        self._canceller = Canceller(
            self._roster, self._pool, self._settler, self._timers,
            new_id=self._new_id, cancel_timeout_s=cancel_timeout_s,
        )  # fmt: skip
        self._client = JobClient(store, clock=self._clock, timers=self._timers, recovery=self.recovery)
        self._requests = Requests(store, self._roster, self._client.heads, self._canceller)
        self._markers = Markers(store.active, self.runner_id, self._clock, marker_idle_s)
        self._marker_idle_s = marker_idle_s
        self._sweeping = False
        self._closing = False
        self._closed = threading.Event()
        self._lease = store.leases.acquire(self.runner_id)
        _close_at_exit(self)
        self.recovery.run()

    # --- submitting ---

    def submit(self, request: SpawnRequest, sync_fn: SyncFn | None = None) -> Job:
        """A new job, durable and queued when this returns; it does not wait for a free worker.

        `sync_fn`, else the runner's, else the profile of `agent_id` runs it, with a copy of the
        caller's context variables. The same `job_id`, or tool call id, with the same request again
        returns the first job and runs nothing.

        Raises, with nothing written: `InvalidInput`, `UnknownSession`, `UnknownAgent`, `UnknownNode`,
        `UnknownJob` (the parent), `ParentFinished`, `IdempotencyConflict`, `SessionBusy`,
        `StoreWriteFailed`, `Closed`, `ForkedProcess`. And `OutcomeUnknown`.
        """
        live, future = self._hand_over(request, sync_fn)
        try:
            job = future.result()
        except JobExists as exists:
            self._abandon(live, exists)
            return self._as_it_stands(exists)
        except Exception as error:
            self._abandon(live, error)
            raise
        except BaseException:
            # Interrupted while waiting: nobody gets to know the id, so nobody wants the job.
            self._canceller.cancel(live, "submit was interrupted")
            future.add_done_callback(lambda done: self._settler.post(lambda: self._submitted(live, done)))
            raise
        return self._admit(live, job)

    def submit_later(self, request: SpawnRequest, sync_fn: SyncFn | None = None) -> Future[Job]:
        """As `submit`, without waiting for the commit. What can be refused without the store is raised here."""
        live, future = self._hand_over(request, sync_fn)
        answer: Future[Job] = Future()
        answer.set_running_or_notify_cancel()

        def submitted(done: Future[Job]) -> None:
            try:
                answer.set_result(self._submitted(live, done))
            except BaseException as error:
                answer.set_exception(error)

        future.add_done_callback(lambda done: self._settler.post(lambda: submitted(done)))
        return answer

    def _hand_over(self, request: SpawnRequest, sync_fn: SyncFn | None) -> tuple[LiveJob, Future[Job]]:
        """The job on its way to the store, in the roster, its session marked."""
        self._check()
        if request.parent_job_id is not None:
            request = attrs.evolve(request, parent_job_id=self._client.full_id(request.parent_job_id))
        job = job_from(request, runner_id=self.runner_id, now=self._clock.now(), new_id=self._new_id)
        fn = function_for(request, sync_fn, self.sync_fn, self.profiles)
        live = LiveJob(job, fn, cwd=check_cwd(request.cwd), env=check_env(request.env))
        if not self.store.has_session(job.parent_session_id):
            self.store.session(job.parent_session_id)  # raises, with the ids that are close
        self._settler.start()
        self._register(live)
        try:
            self._mark(job.parent_session_id)
        except BaseException:
            with self._roster.lock:
                self._roster.drop(live)
            raise
        try:
            queued = Queued(runner_id=self.runner_id)
            future = self.store.create_later(job, queued, fresh_id=request.job_id is None)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        except BaseException as error:
            self._forget(live, error)
            raise
        self._requests.expect(job.parent_session_id)
        return live, future

    def _register(self, live: LiveJob) -> None:
        with self._roster.lock:
            if self._closing:
                raise Closed("the runner is shut down and takes no more jobs")
            parent = self._roster.jobs.get(live.job.parent_job_id) if live.job.parent_job_id is not None else None
            if parent is not None:
                refuse_finished_parent(parent)
            if live.job_id not in self._roster.jobs:
                # Another submit of the same id may be under way; the store says which of them it is.
                self._roster.add(live, parent)

    def _submitted(self, live: LiveJob, done: Future[Job]) -> Job:
        try:
            job = done.result()
        except JobExists as exists:
            self._abandon(live, exists)
            return self._as_it_stands(exists)
        except Exception as error:
            self._abandon(live, error)
            raise
        return self._admit(live, job)

    def _admit(self, live: LiveJob, job: Job) -> Job:
        """The job is durable as queued: tell of it, and let it have its turn."""
        for step in self.after_submit:
            try:
                step(job)
            except Exception:
                log.exception("job %s: a step after its submit failed", job.job_id)
        self.hub.publish(TASK_CREATED, job)
        self.hub.publish(JOB_STATUS, job)
        with self._roster.lock:
            live.job = job
            if self._roster.jobs.get(job.job_id) is not live:
                self._roster.add(live, None)
            if live.cancel_asked or self._closing:
                reason = live.cancel_reason if live.cancel_asked else SHUTDOWN_REASON
                self._canceller.end(live, Cancelled(event_id=self._new_id(), reason=reason))
                return job
            self._roster.move(live, Phase.QUEUED)
            self._roster.line.push(live)
            tokens = self._pool.reserve()
        self._pool.start(tokens)
        return job

    def _abandon(self, live: LiveJob, error: BaseException) -> None:
        """The submit failed; what may have been written of it all the same is ended."""
        if not isinstance(error, _NOTHING_WRITTEN) and self._may_be_there(live):
            # OutcomeUnknown, or the second of the two commits failed: the job has our name on it,
            # and nobody would ever run or recover it.
            end = Errored(event_id=self._new_id(), error=turn.clean(f"submit failed: {error}"))
            with self._roster.lock:
                self._settler.hand_in(live, end)
        else:
            self._forget(live, error)

    def _may_be_there(self, live: LiveJob) -> bool:
        try:
            self.store.get(live.job_id)
        except UnknownJob:
            return False
        except Exception:
            log.exception("job %s: whether its failed submit left anything cannot be read", live.job_id)
        return True

    def _forget(self, live: LiveJob, error: BaseException) -> None:
        with self._roster.lock:
            known = self._roster.jobs.get(live.job_id) is live
            self._roster.drop(live)
            waiters = list(live.waiters) if known else []
        self._markers.done(live.job.parent_session_id)
        for waiter in waiters:
            waiter.failed(error)

    def _as_it_stands(self, exists: JobExists) -> Job:
        first: Job = exists.job  # type: ignore[attr-defined]
        return self.get(first.job_id)

    def _mark(self, session_id: str) -> None:
        self._markers.use(session_id)
        if not self._sweeping:
            self._sweeping = True
            self._timers.call_in(self._marker_idle_s, self._sweep)

    def _sweep(self) -> None:
        """Takes away markers that nobody needs; not while an end is not durable yet (a card may follow)."""
        if self.store.unsettled() == 0:
            self._markers.sweep()
        self._sweeping = len(self._markers) > 0
        if self._sweeping:
            self._timers.call_in(self._marker_idle_s, self._sweep)

    # --- running ---

    def _claim(self, live: LiveJob, seat: Seat) -> None:
        """With the lock held: this worker has the job. Nothing waits for the commit."""
        self._roster.move(live, Phase.RUNNING)
        live.seat = seat
        self._settler.hand_in(live, Started())

    def _run(self, live: LiveJob, seat: Seat) -> None:
        """A worker's whole business with one job: the turn, and the decision how it ended."""
        thread = seat.thread
        name = thread.name
        thread.name = f"{name} job {short(live.job_id)}"
        try:
            request = self._request(live)
            end = live.context.run(self._take_turn, live, request)
            self.ending.before_terminal(Ended(job=request.job, live=live))
        except BaseException as error:
            log.exception("job %s could not be run", live.job_id)
            end = Errored(event_id=self._new_id(), error=turn.describe(error), result_text=live.partial_text)
        finally:
            thread.name = name
        with self._roster.lock:
            if live.phase is not Phase.RUNNING:
                self._canceller.came_back(live)
                log.info("job %s came back after it was given up; its late result is dropped", live.job_id)
                return
            if live.cancel_asked and isinstance(end, Completed) and not end.result_text:
                end = attrs.evolve(end, result_text=live.partial_text or "")
            self._canceller.end(live, end)

    def _request(self, live: LiveJob) -> TurnRequest:
        job = live.job
        if job.status is JobStatus.QUEUED:
            # The running commit may still be on its way; the turn sees the job as it is decided.
            job = transition(job, Started(run_id=job.run_id), self._clock.now())
        deadline = None
        if job.timeout_s is not None:
            deadline = self._clock.monotonic() + job.timeout_s
            reason = f"timed out after {job.timeout_s:g} s"
            with self._roster.lock:
                if live.phase is Phase.RUNNING:
                    timer = self._timers.call_in(job.timeout_s, lambda: self._cancel_own(live, reason))
                    live.timers.append(timer)
        return TurnRequest(
            job=job,
            session_id=job.parent_session_id,
            prompt=job.description,
            agent_id=job.agent_id,
            context_mode=job.context_mode,
            parent_msg_id=job.parent_msg_id,
            user_msg_id=job.user_msg_id,
            read_context=functools.partial(self._context_items, job),
            cwd=live.cwd,
            env=live.env,
            deadline=deadline,
            cancel_event=live.cancel_event,
            progress=turn.contained(functools.partial(self._progress, live), job.job_id),
            partial=turn.contained(functools.partial(self._partial, live), job.job_id),
        )

    def _take_turn(self, live: LiveJob, request: TurnRequest) -> Event:
        _current.set(live)
        return turn.take_turn(live, request, self._new_id())

    def _context_items(self, job: Job) -> list[Any]:
        session = self.store.session(job.parent_session_id)
        if job.context_mode is ContextMode.CLEAN or job.parent_msg_id is None:
            return []
        return list(session.branch_with_cards(job.parent_msg_id))

    def _progress(self, live: LiveJob, value: Any) -> None:
        if live.phase is Phase.RUNNING:
            self.hub.publish(TASK_PROGRESS, live.job, value)

    def _partial(self, live: LiveJob, text: str) -> None:
        if live.phase is Phase.RUNNING:
            live.partial_text = turn.bounded_partial(text)

    # --- what came of events ---

    def _told(self, live: LiveJob, event: Event, done: Future[Job]) -> None:
        """On the settler's thread, in the order in which the events were handed in."""
        error = done.exception()
        if error is None:
            self._committed(live, event, done.result())
        elif isinstance(event, Started | CancelRequested):
            self._step_refused(live, event, error)
        else:
            self._end_refused(live, event, error)

    def _committed(self, live: LiveJob, event: Event, job: Job) -> None:
        live.job = job
        if job.terminal:
            self.ending.after_terminal(Ended(job=job, live=live))
        else:
            self.hub.publish(JOB_STATUS, job)

    def _step_refused(self, live: LiveJob, event: Event, error: BaseException) -> None:
        """Running, or a cancel request, was not written. The end is what counts and follows by itself."""
        level = logging.DEBUG if isinstance(error, InvalidTransition | Closed) else logging.WARNING
        log.log(level, "job %s: %s was not written: %s", live.job_id, type(event).__name__, error)

    def _end_refused(self, live: LiveJob, event: Event, error: BaseException) -> None:
        """An end was refused. There must be one all the same (invariant 1)."""
        if isinstance(error, Closed):
            log.error("job %s: its end could not be written before the store closed; recovery will", live.job_id)
            return
        if isinstance(error, UnknownJob) and live.phase is Phase.SUBMITTED:
            self._forget(live, error)  # a failed submit that indeed wrote nothing
            return
        if isinstance(error, InvalidTransition):
            found = self.store.get(live.job_id)
            if found.terminal:
                log.warning("job %s was ended by somebody else as %s", live.job_id, found.status.value)
                self._committed(live, event, found)
                return
        if live.end_refused:
            log.error("job %s: its end cannot be written: %s", live.job_id, error)
            self._forget(live, error)
            return
        live.end_refused = True
        text = str(error) if isinstance(error, UnknownNode) else f"the end could not be written: {turn.describe(error)}"
        result = getattr(event, "result_text", None)
        with self._roster.lock:
            self._settler.hand_in(live, Errored(event_id=self._new_id(), error=turn.clean(text), result_text=result))

    # --- the steps of the end that are the runner's own ---

    def _tell_hub(self, ended: Ended) -> None:
        self.hub.publish(JOB_STATUS, ended.job)

    def _wake_waiters(self, ended: Ended) -> None:
        with self._roster.lock:
            ended.live.phase = Phase.SETTLED  # a wait that begins from now on sees that it is over
            waiters = list(ended.live.waiters)
        for waiter in waiters:
            waiter.ended(ended.job)

    def _release(self, ended: Ended) -> None:
        self._markers.done(ended.job.parent_session_id)
        with self._roster.lock:
            self._recent.put(ended.job)
            self._roster.drop(ended.live)

    # --- reading ---

    def get(self, job_id: str) -> Job:
        """The job as it stands, with the partial text of a running one. Raises `UnknownJob`, `AmbiguousId`."""
        self._check()
        job_id = self._client.full_id(job_id)
        with self._roster.lock:
            live = self._roster.jobs.get(job_id)
            if live is not None and live.phase is not Phase.SUBMITTED:
                return _shown(live, live.job)
            recent = self._recent.get(job_id)
        return recent if recent is not None else self._client.get(job_id)

    def list(
        self,
        session_id: str | None = None,
        status: Statuses | None = None,
        parent_job_id: str | None = None,
        parent_msg_id: str | None = None,
        limit: int | None = 50,
        before: str | None = None,
    ) -> Jobs:
        """Jobs, newest first, with their texts as lists show them (`get` has them whole). No session is all."""
        self._check()
        found = self._client.list(session_id, status, parent_job_id, parent_msg_id, limit, before)
        with self._roster.lock:
            own = {job.job_id: self._roster.jobs.get(job.job_id) for job in found if job.status is JobStatus.RUNNING}
            return [_shown(live, job) if (live := own.get(job.job_id)) is not None else job for job in found]

    # --- waiting ---

    def await_job(self, job_id: str, timeout: float | None = None) -> Job:
        """The job once it has ended, or as it stands after `timeout` seconds.

        Inside a job the slot is lent meanwhile. There it raises `CancelledError` when the waiting job
        itself is asked to stop, unless it waits for its own descendants, which stop with it.
        Raises `UnknownJob`.
        """
        return self.await_tasks([job_id], ALL, timeout)[0]

    def await_tasks(self, ids: Sequence[str], mode: str = ALL, timeout: float | None = None) -> Jobs:
        """The jobs in the order given, once all (or any) of them have ended, or as they stand at `timeout`."""
        timeout = check_timeout(timeout)
        enough = threading.Event()
        wait = self.open_wait(ids, mode, enough.set)
        try:
            if not wait.done:
                self._clock.wait(enough, timeout)
        finally:
            wait.close()
        return wait.answers()

    def open_wait(
        self, ids: Sequence[str], mode: str, wake: Callable[[], None], *, waiting_job_id: str | None = None
    ) -> RunnerWait:
        """A wait that calls `wake` when it is over and blocks nobody. Must be closed. Raises `UnknownJob`.

        `waiting_job_id` names the job of this runner whose slot is lent where its turn waits by other
        means than its own thread: a command that it started, and that asks from another process.
        """
        self._check()
        check_mode(mode)
        full = [self._client.full_id(job_id) for job_id in check_ids(ids)]
        return RunnerWait(self, full, mode, wake, waiting_job_id)

    # --- cancelling ---

    def cancel(self, job_id: str, reason: str | None = None) -> Job:
        """Ask for the end of a job and all its descendants; the job as it then stands.

        Pending and queued jobs are cancelled at once and never start. A running one has its event
        set and is returned as running. A finished one stays as it is. Raises `UnknownJob`.
        """
        self._check()
        job_id = self._client.full_id(job_id)
        with self._roster.lock:
            live = self._roster.jobs.get(job_id)
        if live is None:
            job = self._client.ask_to_stop(job_id, reason)
            if not job.terminal or job.status is JobStatus.CANCELLED:
                self._cancel_under(job, reason)
            return job
        futures = self._canceller.cancel(live, reason)
        self._await_commits(futures)
        self._client.ask_descendants(live.job, reason, spare=self._is_own)
        # Before the settler was told: what the commit itself says.
        told = [f.result() for f in futures if f.done() and f.exception() is None]
        return _shown(live, told[-1] if told else live.job)

    def cancel_session(self, session_id: str, reason: str | None = None) -> Jobs:
        """Ask for the end of all unfinished jobs of a session and their descendants; the jobs as they then stand."""
        self._check()
        with self._roster.lock:
            own = [live.job_id for live in self._roster.by_session.get(session_id, ())]
        others = [job.job_id for job in self.store.unfinished(session_id)]
        return [self.cancel(job_id, reason) for job_id in dict.fromkeys([*own, *others])]

    def _cancel_own(self, live: LiveJob, reason: str) -> None:
        self._canceller.cancel(live, reason)
        self._client.ask_descendants(live.job, reason, spare=self._is_own)

    def _cancel_under(self, job: Job, reason: str | None) -> None:
        """Descendants of a job that is not ours: each by whoever runs it."""
        for live in self._own_under(job):
            self._canceller.cancel(live, reason)
        self._client.ask_descendants(job, reason, spare=self._is_own)

    def _own_under(self, job: Job) -> Sequence[LiveJob]:
        with self._roster.lock:
            return [live for live in self._roster.jobs.values() if live.job.parent_job_id == job.job_id]

    def _is_own(self, job_id: str) -> bool:
        with self._roster.lock:
            return job_id in self._roster.jobs

    def _await_commits(self, futures: Sequence[Future[Job]]) -> None:
        """A cancel that returned is durable, unless the store is stuck."""
        for future in futures:
            committed = threading.Event()
            future.add_done_callback(lambda done, committed=committed: committed.set())  # type: ignore[misc]
            self._clock.wait(committed, _CANCEL_COMMIT_S)

    # --- the rest ---

    def recover(self) -> Jobs:
        """End what dead runners left behind; returns those jobs. Idempotent; done once when a runner is made."""
        self._check()
        return self.recovery.run()

    def stats(self) -> RunnerStats:
        self._check()
        unsettled = self.store.unsettled()
        active = len(self._markers)
        with self._roster.lock:
            pool = self._pool.stats()
            return RunnerStats(
                runner_id=self.runner_id,
                workers=self.workers,
                running=self._roster.running,
                queued=len(self._roster.line),
                unfinished=len(self._roster.jobs),
                lent=pool.lent,
                stuck=self._canceller.stuck(),
                withheld=pool.withheld,
                unsettled=unsettled,
                active_sessions=active,
            )

    def subscribe(self, capacity: int = DEFAULT_CAPACITY, on_event: Callable[[], None] | None = None) -> Subscription:
        """Live events of this runner's jobs from now on (see `hub`)."""
        self._check()
        return self.hub.subscribe(capacity, on_event)

    # --- the end ---

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no job is unfinished; False when the time is up."""
        self._check()
        return self._clock.wait(self._roster.idle, check_timeout(timeout))

    def shutdown(self, timeout: float = SHUTDOWN_S) -> None:
        """End everything within `timeout` seconds. Twice is once; a second caller waits for the first.

        Nothing more is admitted, and what has not started is cancelled with the reason "shutdown".
        Running jobs get two fifths of the time to finish as themselves; then their events are set;
        after seven tenths the rest becomes errored, "worker pool shutdown". The remaining time is for
        commits; what it leaves is recovery's. Stores stay open: they are their owner's.
        """
        self._check()
        timeout = check_timeout(timeout) or 0.0
        with self._roster.lock:
            first = not self._closing
            self._closing = True
        if not first:
            self._clock.wait(self._closed, timeout)
            return
        begun = self._clock.monotonic()

        def until(part: float) -> float:
            return max(0.0, begun + timeout * part - self._clock.monotonic())

        roster = self._roster
        self._canceller.cancel_waiting()
        if not self._clock.wait(roster.calm, until(_ASK_AT)):
            self._canceller.set_events()
            if not self._clock.wait(roster.calm, until(_GIVE_UP_AT)):
                self._canceller.give_up_running()
        self._clock.wait(roster.idle, until(1.0))
        self._leave()

    def _leave(self) -> None:
        self._timers.close()
        self._settler.close(1.0)
        self._pool.close()
        with self._roster.lock:
            left = list(self._roster.jobs.values())
            waiters = [(waiter, live) for live in left for waiter in live.waiters]
        for waiter, live in waiters:
            waiter.failed(Closed(f"the runner closed before the end of job {live.job_id} was written; recovery will"))
        self.hub.close()
        self._lease.release()
        if left:
            log.error("%d job(s) are left to recovery: their ends could not be written in time", len(left))
        else:
            try:
                self.store.leases.remove(self.runner_id)
            except OSError as error:
                log.warning("the lease of this runner could not be removed: %s", error)
        _open_runners.discard(self)
        self._closed.set()

    def __enter__(self) -> JobRunner:
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A clean end waits until no job is unfinished; an exception gets the bounded `shutdown`."""
        if os.getpid() != self._pid:
            return  # a forked child that leaves the block it was born in
        try:
            if kind is None and not self._closing:
                self.wait_idle()
        finally:
            self.shutdown()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this runner belongs to the parent process; make a new store and runner after a fork")


class RunnerWait:
    """A wait under way. Inside a job it lends the job's slot, from the beginning to `close`."""

    def __init__(
        self,
        runner: JobRunner,
        ids: Sequence[str],
        mode: str,
        wake: Callable[[], None],
        waiting_job_id: str | None = None,
    ) -> None:
        self._runner = runner
        self._roster = runner._roster
        self._ids = ids
        self._waiter = Waiter(ids, mode, wake)
        self._own: list[LiveJob] = []
        self._stops: list[Callable[[], None]] = []
        self._me = self._waiting_job(waiting_job_id)
        self._lent = False
        self._interruptible = False
        self._interrupted = False
        others = self._join(wake)
        try:
            for job_id in others:
                self._stops.append(runner._client.follow(job_id, self._waiter))
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> bool:
        me = self._me
        return self._waiter.done or (self._interruptible and me is not None and me.cancel_event.is_set())

    def close(self, *, block: bool = True) -> None:
        """Stop waiting. In a job this takes the slot back, waiting for a free one unless `block` is false."""
        for stop in self._stops:
            stop()
        ready = None
        with self._roster.lock:
            for live in self._own:
                live.waiters.pop(self._waiter, None)
            if self._me is not None:
                ready = self._take_back(self._me, block)
        if ready is not None:
            ready.wait()

    def answers(self) -> Jobs:
        if self._interrupted and self._me is not None:
            raise CancelledError(f"job {self._me.job_id} was asked to stop while it waited")
        return answers(self._ids, self._waiter, self._runner.get)

    def _waiting_job(self, named: str | None) -> LiveJob | None:
        me = _current.get() if named is None else self._roster.jobs.get(named)
        if me is None or me.phase is not Phase.RUNNING or self._roster.jobs.get(me.job_id) is not me:
            return None
        if me.job_id in self._ids:
            raise InvalidInput(f"job {me.job_id} cannot wait for itself")
        return me

    def _join(self, wake: Callable[[], None]) -> list[str]:
        """Wait for what is live here; returns the ids that are not."""
        others: list[str] = []
        with self._roster.lock:
            for job_id in dict.fromkeys(self._ids):
                live = self._roster.jobs.get(job_id)
                if live is not None and live.phase is Phase.SETTLED:
                    self._waiter.ended(live.job)
                elif live is not None:
                    live.waiters[self._waiter] = None
                    self._own.append(live)
                    self._roster.line.want(live)
                elif (recent := self._runner._recent.get(job_id)) is not None:
                    self._waiter.ended(recent)
                else:
                    others.append(job_id)
            if self._me is not None and not self._waiter.done:
                self._lend(self._me, wake)
            tokens = self._runner._pool.reserve()
        self._runner._pool.start(tokens)
        return others

    def _lend(self, me: LiveJob, wake: Callable[[], None]) -> None:
        """With the lock held."""
        if len(self._own) < len(set(self._ids)) or not all(live.is_under(me) for live in self._own):
            self._interruptible = True
            me.on_cancel[self._waiter] = wake
            if me.cancel_event.is_set():
                wake()
        if self._own and me.seat is not None:
            self._lent = True
            me.waits += 1
            if me.waits == 1:
                self._runner._pool.lend(me.seat)

    def _take_back(self, me: LiveJob, block: bool) -> threading.Event | None:
        """With the lock held."""
        me.on_cancel.pop(self._waiter, None)
        self._interrupted = self._interruptible and me.cancel_event.is_set() and not self._waiter.done
        if not self._lent or me.seat is None:
            return None
        self._lent = False
        me.waits -= 1
        return None if me.waits else self._runner._pool.take_back(me.seat, wait=block)


def _shown(live: LiveJob, job: Job) -> Job:
    """`job` with the partial text of its turn while it runs."""
    if job.status is JobStatus.RUNNING and live.partial_text is not None:
        return attrs.evolve(job, result_text=live.partial_text)
    return job


# --- the end of the interpreter --------------------------------------------------------------------------

_open_runners: set[JobRunner] = set()
_at_exit_lock = threading.Lock()
_at_exit_registered = False


def _close_at_exit(runner: JobRunner) -> None:
    global _at_exit_registered
    with _at_exit_lock:
        _open_runners.add(runner)
        if not _at_exit_registered:
            atexit.register(_close_all)
            _at_exit_registered = True


def _close_all() -> None:
    """The bounded end for runners that nobody closed: one deadline for all of them."""
    until = time.monotonic() + SHUTDOWN_S
    for runner in list(_open_runners):
        if runner._pid == os.getpid():
            runner.shutdown(max(0.0, until - time.monotonic()))
