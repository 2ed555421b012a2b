"""`JobRunner`: takes requests, runs them on the pool, and writes every state they pass through.

    submit ─► index entry, active marker ─► pending, queued ─► [durable] ─► fact ─► hub ─► the line
    worker ─► running ─► the turn ─► its end, in the order of `ending`

Source: spec 003; design, *The runner*.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING

import attrs

from ..clock import Clock
from ..errors import Closed, ForkedProcess, JobExists, OpenJobsError, StoreWriteFailed
from ..facts import Recorder
from ..ids import IdMaker, short
from ..jobs import UNFINISHED, ContextMode, Job, JobStatus, SpawnRequest, SyncFn
from ..sign import Answer, Sign
from ..store import JobStore
from ..store.damage import OnDamage
from ..store.presence import Held
from .admission import ProfileSource, function_for
from .cancel import Canceller, Requests, StuckThread
from .client import JobClient, Statuses, cancel_unfinished, under
from .closing import SHUTDOWN_S, at_exit, end_all, forget_exit
from .config import workers_from
from .ending import Ended, Ending, EndStep
from .facts import JobFacts
from .heads import Heads
from .hub import DEFAULT_CAPACITY, JOB_STATUS, Hub, Subscription
from .live import LiveJob, Phase, Roster
from .markers import IDLE_S, Markers
from .mirrors import Mirrors
from .notices import Notices
from .owned import OwnedTasks
from .pool import Executor, Pool
from .recent import Recent
from .recovery import Recovery
from .settler import Settler
from .submission import Submission, Submissions
from .timers import Timers
from .waiting import ALL, check_ids, check_mode, check_timeout
from .waits import RunnerWait
from .worker import Worker

if TYPE_CHECKING:
    from ..agents.joblog import JobLogs

log = logging.getLogger(__name__)

Jobs = list[Job]
AfterSubmit = list[Callable[[Job], None]]

CANCEL_TIMEOUT_S = 30.0
#: how long `cancel` waits for its commit before it answers with the job as it stands
_CANCEL_COMMIT_S = 2.0
#: how long threads that have nothing left to do get to end
_JOIN_S = 1.0


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
    #: cards in callers' sessions that are not written yet
    cards_waiting: int = 0


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
        environ: Mapping[str, str] | None = None,
        new_id: IdMaker | None = None,
        marker_idle_s: float = IDLE_S,
    ) -> None:
        """Takes a lease and ends what dead runners left behind. Raises `InvalidWorkers`, `StoreWriteFailed`.

        Without `workers` their number is looked up in `environ`, in this process's own where none is given.
        """
        self.workers = workers_from(workers, os.environ if environ is None else environ)
        self.store = store
        self.sync_fn = sync_fn
        self.profiles = profiles
        clock = clock if clock is not None else store.clock
        new_id = new_id if new_id is not None else store.new_id
        self.runner_id = new_id()
        self._clock = clock
        self._pid = os.getpid()
        name = f"openjobs-{short(self.runner_id)}"

        self.hub = Hub(self.runner_id)
        self.ending = Ending()
        self.recovery = Recovery(store, new_id, own_id=self.runner_id)
        self._roster = Roster()
        self._recent = Recent()
        self._timers = Timers(clock, f"{name}-timers")
        self._client = JobClient(store, clock=clock, timers=self._timers, recovery=self.recovery)
        self._settler = Settler(store, self._roster, self.ending, self.hub, new_id=new_id, name=f"{name}-settler")
        #: the background commands that jobs started
        self.owned_tasks = OwnedTasks(store, self._settler, self._timers)
        self._worker = Worker(
            store, self._roster, self._settler, self.ending, self.hub, clock=clock, new_id=new_id, runner=self
        )
        self._pool: Pool[LiveJob] = Pool(
            self.workers,
            lock=self._roster.lock,
            line=self._roster.line,
            claim=self._worker.claim,
            run=lambda live, seat: self._worker.run(live, seat, self._canceller),
            executor=executor,
            name=name,
        )
        self._canceller = Canceller(
            self._roster,
            self._pool,
            self._settler,
            self._timers,
            new_id=new_id,
            cancel_timeout_s=cancel_timeout_s,
            below=self._cancel_below,
            asked=self.owned_tasks.asked,
        )
        self._markers = Markers(store, self.runner_id, clock, self._timers, marker_idle_s, self._settler.post)
        self._mirrors = Mirrors(store, self._timers, clock)
        self.recovery.mirror = self._mirrors.follow
        #: who is told that background jobs and commands have ended
        self.notices = Notices(
            store,
            forget=self._forget,
            mend=lambda session_id: self._client.list(session_id, status=UNFINISHED, on_damage=lambda *damage: None),
            own_id=self.runner_id,
            own=self._unfinished_here,
        )
        self._submissions = Submissions(
            store,
            self._roster,
            self._pool,
            self._canceller,
            self._settler,
            Requests(store, self._roster, Heads(store.asked, self._timers), self._canceller),
            self._markers,
            self.hub,
            runner_id=self.runner_id,
            clock=clock,
            new_id=new_id,
        )
        self._settler.lost = self._submissions.forget
        self._run_logs: JobLogs | None = getattr(profiles, "run_logs", None)
        if self._run_logs is not None:
            self.ending.set(EndStep.RUN_LOG, self._finish_log)
        self.ending.set(EndStep.LEFTOVERS, self.owned_tasks.turn_over)
        self.ending.also("background commands", EndStep.RELEASE, self.owned_tasks.job_over)
        recorder = Recorder(store.facts)
        facts = JobFacts(recorder)
        self._settler.together = recorder.together
        self.after_submit.append(facts.registered)
        self.ending.set(EndStep.FACT, facts.settled)
        self.after_submit.append(self._begin_card)
        self.ending.also("cards", EndStep.FACT, lambda ended: self._begin_card(ended.job))
        self.ending.set(EndStep.HUB, self._tell_hub)
        self.ending.also("notices", EndStep.HUB, lambda ended: self.notices.ended(ended.job))
        self.ending.set(EndStep.WAITERS, self._wake_waiters)
        self.ending.set(EndStep.RELEASE, self._release)
        self._closed = threading.Event()
        self._lease = self._take_lease()
        at_exit(id(self), self.shutdown)
        self.recovery.run()

    @property
    def after_submit(self) -> AfterSubmit:
        """Steps that follow a durable submit, each given the job, before live listeners hear of it and before it can
        start. The first is the fact `job/registered`."""
        return self._submissions.after_commit

    # --- submitting ---

    def submit(self, request: SpawnRequest, sync_fn: SyncFn | None = None) -> Job:
        """A new job, durable and queued when this returns; it does not wait for a free worker.

        `sync_fn`, else the runner's, else the profile of `agent_id` runs it, with a copy of the
        caller's context variables. The same `job_id`, or tool call id, with the same request again
        returns the first job and runs nothing.

        Raises, with nothing written: `InvalidInput`, `UnknownSession`, `UnknownAgent`, `UnknownNode`,
        `UnknownJob` (the parent), `ParentFinished`, `IdempotencyConflict`, `SessionBusy`,
        `StoreWriteFailed`, `Closed`, `ForkedProcess`. And `OutcomeUnknown`. Interrupted by a Ctrl-C,
        it leaves a job that is cancelled by itself, or none.
        """
        submission = self._prepare(request, sync_fn)
        try:
            self._submissions.hand_over(submission)
            submission.wait()
            self._submissions.tell(submission)
            return self._finish(submission)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._submissions.settle_later(submission)
            raise

    def submit_later(self, request: SpawnRequest, sync_fn: SyncFn | None = None) -> Future[Job]:
        """As `submit`, without waiting for the commit. What can be refused without the store is raised here."""
        submission = self._prepare(request, sync_fn)
        answer = self._finish_later(submission)
        try:
            self._submissions.hand_over(submission)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._submissions.settle_later(submission)
            raise
        return answer

    def _prepare(self, request: SpawnRequest, sync_fn: SyncFn | None) -> Submission:
        self._check()
        if request.parent_job_id is not None:
            request = attrs.evolve(request, parent_job_id=self._client.full_id(request.parent_job_id))
        if request.foreground and request.parent_msg_id is None:
            self._tell_before(request)
        return self._submissions.prepare(request, function_for(request, sync_fn, self.sync_fn, self.profiles))

    def _tell_before(self, request: SpawnRequest) -> None:
        """A turn of the conversation begins: it is told what has ended. Its own start never depends on that."""
        if request.context_mode != ContextMode.INHERIT or not self.store.has_session(request.parent_session_id):
            return
        try:
            self.notices.deliver(request.parent_session_id)
        except (OpenJobsError, OSError) as error:
            log.warning("session %s could not be told what has ended: %s", request.parent_session_id, error)

    def _finish(self, submission: Submission) -> Job:
        try:
            return self._submissions.finish(submission)
        except JobExists as exists:
            first: Job = exists.job  # type: ignore[attr-defined]
            return self.outcome(first.job_id)

    def _finish_later(self, submission: Submission) -> Future[Job]:
        """Before it is handed over."""
        answer: Future[Job] = Answer()
        answer.set_running_or_notify_cancel()

        def finish() -> None:
            try:
                answer.set_result(self._finish(submission))
            except BaseException as error:
                answer.set_exception(error)

        def record() -> None:
            self._submissions.tell(submission)

        submission.then = lambda: self._settler.post(finish, record)
        return answer

    # --- the steps of a job's end that are the runner's own ---

    def _finish_log(self, ended: Ended) -> None:
        assert self._run_logs is not None
        self._run_logs.finish(ended.job.run_id, ended.job.status.value)

    def _tell_hub(self, ended: Ended) -> None:
        self.hub.publish(JOB_STATUS, ended.job)

    def _wake_waiters(self, ended: Ended) -> None:
        with self._roster.lock:
            ended.live.phase = Phase.SETTLED  # a wait that begins from now on sees that it is over
            waiters = list(ended.live.waiters)
        for waiter in waiters:
            waiter.ended(ended.job)

    def _begin_card(self, job: Job) -> None:
        """The card in a caller's session follows; nobody waits for it."""
        if job.elsewhere:
            self._mirrors.follow(job)

    def _release(self, ended: Ended) -> None:
        session_id = ended.job.parent_session_id
        if ended.job.elsewhere:
            # The marker stays until the card is durable: it is where a recovery looks for one that is behind.
            self._mirrors.follow(ended.job).add_done_callback(
                lambda card: self._markers.done(session_id, ended.live) if card.exception() is None else None
            )
        else:
            self._markers.done(session_id, ended.live)
        with self._roster.lock:
            self._recent.put(ended.job)
            self._roster.drop(ended.live)

    def _unfinished_here(self, session_id: str) -> Jobs:
        """Without the lock: asked on the store's thread, for which somebody may be waiting with it. A copy of the keys
        is made in one step."""
        lives = list(self._roster.by_session.get(session_id, ()))
        return [live.job for live in lives if live.phase < Phase.ENDED]

    def _forget(self, job_id: str) -> None:
        """Something that may follow an end was written: the next `get` reads it."""
        with self._roster.lock:
            self._recent.drop(job_id)

    # --- reading ---

    def get(self, job_id: str) -> Job:
        """The job as it stands, with the partial text of a running one. Raises `UnknownJob`, `AmbiguousId`."""
        return self._job(job_id, self._client.get)

    def outcome(self, job_id: str) -> Job:
        """As `get`, also where the prompt cannot be read: then `description` has its beginning only."""
        return self._job(job_id, self._client.outcome)

    def _job(self, job_id: str, read: Callable[[str], Job]) -> Job:
        self._check()
        job_id = self._client.full_id(job_id)
        with self._roster.lock:
            live = self._roster.jobs.get(job_id)
            if live is not None and live.phase is not Phase.SUBMITTED:
                return _shown(live, live.job)
            recent = self._recent.get(job_id)
        return recent if recent is not None else read(job_id)

    def list(
        self,
        session_id: str | None = None,
        status: Statuses | None = None,
        parent_job_id: str | None = None,
        parent_msg_id: str | None = None,
        limit: int | None = 50,
        before: str | None = None,
        on_damage: OnDamage | None = None,
    ) -> Jobs:
        """Jobs, newest first, with their texts as lists show them (`get` has them whole). No session is all;
        what cannot be read raises, or is told to `on_damage`, with its session."""
        self._check()
        found = self._client.list(session_id, status, parent_job_id, parent_msg_id, limit, before, on_damage)
        return self._as_they_stand(found)

    def visible(
        self, session_id: str, status: Statuses | None = None, limit: int | None = 50, on_damage: OnDamage | None = None
    ) -> Jobs:
        """The jobs that a session may see and stop, newest first: its own, and those that it asked for in others
        (spec 003, D6). For one job there is `Job.owned_by`. Raises `UnknownSession`, and what cannot be read, or
        tells that to `on_damage`."""
        self._check()
        return self._as_they_stand(self._client.visible(session_id, status, limit, on_damage))

    def _as_they_stand(self, found: Jobs) -> Jobs:
        """With what is known here of this runner's own, and not yet in the store."""
        with self._roster.lock:
            own = {job.job_id: self._roster.jobs.get(job.job_id) for job in found if not job.terminal}
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
        enough = Sign()
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

        `waiting_job_id` names the running job of this runner that waits, and lends its slot, where it
        does so by other means than its own thread: a command that it started asks through the host.
        """
        self._check()
        check_mode(mode)
        return RunnerWait(
            [self._client.full_id(job_id) for job_id in check_ids(ids)],
            mode,
            wake,
            roster=self._roster,
            pool=self._pool,
            recent=self._recent,
            client=self._client,
            get=self.outcome,
            waiting_job_id=waiting_job_id,
        )

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
        if live is not None:
            return self._cancel_own([live], reason)[0]
        job = self._client.ask_to_stop(job_id, reason)
        if not job.terminal or job.status is JobStatus.CANCELLED:
            self._cancel_below(job, reason)
        return job

    def cancel_session(self, session_id: str, reason: str | None = None) -> Jobs:
        """Ask for the end of all unfinished jobs of a session and their descendants; the jobs as they then stand.
        Raises `Damaged` for what cannot be read, after all others were asked."""
        self._check()
        with self._roster.lock:
            own = list(self._roster.by_session.get(session_id, ()))
        stopped = self._cancel_own(own, reason)
        done = {job.job_id for job in stopped}
        return stopped + cancel_unfinished(self.store, session_id, lambda job_id: self.cancel(job_id, reason), done)

    def _cancel_own(self, lives: Sequence[LiveJob], reason: str | None) -> Jobs:
        """All are decided before any commit is waited for."""
        commits = [future for live in lives for future in self._canceller.cancel(live, reason)]
        self._await_commits(commits)
        for live in lives:
            if live.seat is not None or len(lives) == 1:
                # Looking below costs a search of the index: with ten thousand queued jobs too much,
                # and what is under one that never ran is in its session or in the roster.
                self._cancel_below(live.job, reason)
        return [_shown(live, live.job) for live in lives]

    def _cancel_below(self, job: Job, reason: str | None) -> None:
        """Descendants that the roster does not know as such: those of other runners, and what is under them."""

        def own(job_id: str) -> bool:
            with self._roster.lock:
                live = self._roster.jobs.get(job_id)
            if live is not None:
                self._canceller.cancel(live, under(job, reason))
            return live is not None

        try:
            self._client.ask_below(job, reason, own)
        except Exception:
            log.exception("what is under job %s could not all be asked to stop", job.job_id)

    def _await_commits(self, futures: Sequence[Future[Job]]) -> None:
        """A cancel that returned is durable, unless the store is stuck."""
        until = self._clock.monotonic() + _CANCEL_COMMIT_S
        for future in futures:
            committed = Sign()
            future.add_done_callback(lambda done, committed=committed: committed.set())  # type: ignore[misc]
            self._clock.wait(committed, max(0.0, until - self._clock.monotonic()))

    # --- the rest ---

    def recover(self) -> Jobs:
        """End what dead runners left behind; returns those jobs. Idempotent; done once when a runner is made."""
        self._check()
        return self.recovery.run()

    def stats(self) -> RunnerStats:
        self._check()
        unsettled = self.store.unsettled()
        active = len(self._markers)
        cards = len(self._mirrors)
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
                cards_waiting=cards,
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
        commits; what it leaves is recovery's. The store stays open: it is its owner's.
        """
        self._check()
        timeout_s = check_timeout(timeout) or 0.0
        with self._roster.lock:
            first, self._roster.closing = not self._roster.closing, True
        if not first:
            self._clock.wait(self._closed, timeout_s)
            return
        until = self._clock.monotonic() + timeout_s
        end_all(self._roster, self._canceller, self._clock, timeout_s)
        self._mirrors.wait_idle(max(0.0, until - self._clock.monotonic()))
        self._leave()

    def _leave(self) -> None:
        cards = len(self._mirrors)
        self._mirrors.close()
        self._timers.close()
        self._settler.close(_JOIN_S)
        self._pool.close(_JOIN_S)
        with self._roster.lock:
            left = list(self._roster.jobs.values())
            waits = [(waiter, live) for live in left for waiter in live.waiters]
        for waiter, live in waits:
            waiter.failed(Closed(f"the runner closed before the end of job {live.job_id} was written; recovery will"))
        interrupt = self.hub.close()
        interrupt = self.notices.close() or interrupt
        self._lease.release()
        if left:
            log.error("%d job(s) are left to recovery: their ends could not be written in time", len(left))
        elif cards:
            log.warning("%d card(s) in callers' sessions are left to recovery", cards)
        elif self._run_logs is not None and self._run_logs.unfinished:
            log.warning("the logs of %d command(s) are left to recovery", self._run_logs.unfinished)
        else:
            self._remove_lease()
        forget_exit(id(self))
        self._closed.set()
        if interrupt is not None:
            raise interrupt

    def _take_lease(self) -> Held:
        try:
            return self.store.leases.acquire(self.runner_id)
        except OSError as error:
            raise StoreWriteFailed(f"the runner's lease could not be written: {error}; nothing changed") from error

    def _remove_lease(self) -> None:
        try:
            for session_id in self.store.active.sessions(self.runner_id):
                self.store.active.clear(self.runner_id, session_id)
            self.store.leases.remove(self.runner_id)
        except OSError as error:
            log.warning("the lease of this runner could not be removed: %s", error)

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
            if kind is None and not self._roster.closing:
                self.wait_idle()
        finally:
            self.shutdown()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this runner belongs to the parent process; make a new store and runner after a fork")


def _shown(live: LiveJob, job: Job) -> Job:
    """`job` with the partial text of its turn, which may have begun before the running commit is durable."""
    if live.partial_text is not None and not job.terminal:
        return attrs.evolve(job, result_text=live.partial_text)
    return job
