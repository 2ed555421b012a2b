"""Submitting: from a request to a durable, queued job in the line, in this order.

active marker ─► pending, queued [durable] ─► fact ─► hub ─► the line
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

import attrs

from ..clock import Clock
from ..errors import (
    Closed,
    IdempotencyConflict,
    InvalidInput,
    JobExists,
    NotFound,
    ParentFinished,
    StoreWriteFailed,
    UnknownJob,
)
from ..ids import IdMaker
from ..jobs import Cancelled, Errored, Job, Queued, SpawnRequest, SyncFn
from ..store import JobStore
from .admission import check_cwd, check_env, job_from, refuse_finished_parent
from .cancel import SHUTDOWN_REASON, Canceller, Requests
from .hub import JOB_STATUS, TASK_CREATED, Hub
from .live import LiveJob, Phase, Roster
from .markers import Markers
from .pool import Pool
from .settler import Settler
from .turn import clean

log = logging.getLogger(__name__)

#: refusals after which there certainly is no new job
_NOTHING_WRITTEN = (JobExists, IdempotencyConflict, ParentFinished, NotFound, InvalidInput, Closed)


@attrs.frozen(kw_only=True, slots=True)
class Submission:
    """A job on its way to the store, and the store's answer to come."""

    live: LiveJob
    future: Future[Job]


class Submissions:
    """Guarantees: a job is in the roster before the store hears of it, so that a cancel of its parent
    meets it; it is in the line only after it is durable and told; a submit that fails leaves no job
    behind that nobody would run."""

    def __init__(
        self,
        store: JobStore,
        roster: Roster,
        pool: Pool[LiveJob],
        canceller: Canceller,
        settler: Settler,
        requests: Requests,
        markers: Markers,
        hub: Hub,
        *,
        runner_id: str,
        clock: Clock,
        new_id: IdMaker,
    ) -> None:
        self._store = store
        self._roster = roster
        self._pool = pool
        self._canceller = canceller
        self._settler = settler
        self._requests = requests
        self._markers = markers
        self._hub = hub
        self._runner_id = runner_id
        self._clock = clock
        self._new_id = new_id
        #: each is given the job once it is durable: the place of the fact `job/registered`
        self.after_commit: list[Callable[[Job], None]] = []

    def hand_over(self, request: SpawnRequest, fn: SyncFn) -> Submission:
        """The job is in the roster, its session marked, and its commit on the way. Waits for nothing else."""
        job = job_from(request, runner_id=self._runner_id, now=self._clock.now(), new_id=self._new_id)
        live = LiveJob(job, fn, cwd=check_cwd(request.cwd), env=check_env(request.env))
        session_id = job.parent_session_id
        if not self._store.has_session(session_id):
            self._store.session(session_id)  # raises, and says which ids are close
        self._settler.start()
        self._register(live)
        try:
            self._markers.use(session_id)
        except BaseException as error:
            with self._roster.lock:
                self._roster.drop(live)
            if isinstance(error, OSError):
                raise StoreWriteFailed(f"the active marker could not be written: {error}; nothing changed") from error
            raise
        future = self._create(live, fresh_id=request.job_id is None)
        self._requests.expect(session_id)
        return Submission(live=live, future=future)

    def finish(self, submission: Submission) -> Job:
        """The job as it stands, once the store has answered. Raises what `JobRunner.submit` does."""
        try:
            job = submission.future.result()
        except JobExists as exists:
            self.forget(submission.live, exists)
            raise
        except Exception as error:
            self._abandon(submission.live, error)
            raise
        return self._admit(submission.live, job)

    def tell(self, submission: Submission) -> None:
        """The steps that follow a durable submit, before anybody else hears of the job; once. Waits for the store."""
        try:
            job = submission.future.result()
        except Exception:
            return  # `finish` tells why
        self._run_steps(submission.live, job)

    def forget(self, live: LiveJob, error: BaseException) -> None:
        """There is no such job; who waits for it is told why."""
        with self._roster.lock:
            known = self._roster.jobs.get(live.job_id) is live
            self._roster.drop(live)
            waiters = list(live.waiters) if known else []
        self._markers.done(live.job.parent_session_id)
        for waiter in waiters:
            waiter.failed(error)

    def _register(self, live: LiveJob) -> None:
        with self._roster.lock:
            if self._roster.closing:
                raise Closed("the runner is shut down and takes no more jobs")
            parent_id = live.job.parent_job_id
            parent = self._roster.jobs.get(parent_id) if parent_id is not None else None
            if parent is not None:
                refuse_finished_parent(parent)
            if live.job_id not in self._roster.jobs:
                # Another submit with the same id may be under way; the store will say whose it is.
                self._roster.add(live, parent)

    def _create(self, live: LiveJob, *, fresh_id: bool) -> Future[Job]:
        try:
            return self._store.create_later(live.job, Queued(runner_id=self._runner_id), fresh_id=fresh_id)
        except Exception as error:
            future: Future[Job] = Future()
            future.set_exception(error)
            return future
        except BaseException as error:
            self.forget(live, error)
            raise

    def _admit(self, live: LiveJob, job: Job) -> Job:
        """The job is durable as queued: tell of it, and let it have its turn."""
        self._run_steps(live, job)
        self._hub.publish(TASK_CREATED, job)
        self._hub.publish(JOB_STATUS, job)
        with self._roster.lock:
            live.job = job
            if self._roster.jobs.get(job.job_id) is not live:
                self._roster.add(live, None)
            if live.cancel_asked or self._roster.closing:
                reason = live.cancel_reason if live.cancel_asked else SHUTDOWN_REASON
                self._canceller.end(live, Cancelled(event_id=self._new_id(), reason=reason))
                return job
            self._roster.move(live, Phase.QUEUED)
            self._roster.line.push(live)
            tokens = self._pool.reserve()
        self._pool.start(tokens)
        return job

    def _run_steps(self, live: LiveJob, job: Job) -> None:
        if live.told:
            return
        live.told = True
        for step in self.after_commit:
            try:
                step(job)
            except Exception:
                log.exception("job %s: a step after its submit failed", job.job_id)

    def _abandon(self, live: LiveJob, error: Exception) -> None:
        """The submit failed; what may have been written of it all the same is ended."""
        if isinstance(error, _NOTHING_WRITTEN) or not self._may_be_there(live):
            self.forget(live, error)
            return
        # OutcomeUnknown, or only the second of the two commits failed: the job has this runner's
        # name on it, so nobody else would ever run or recover it.
        with self._roster.lock:
            self._settler.hand_in(live, Errored(event_id=self._new_id(), error=clean(f"submit failed: {error}")))

    def _may_be_there(self, live: LiveJob) -> bool:
        try:
            self._store.row(live.job_id)
        except UnknownJob:
            return False
        except Exception:
            log.exception("job %s: whether its failed submit left anything cannot be read", live.job_id)
        return True
