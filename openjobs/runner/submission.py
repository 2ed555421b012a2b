"""Submitting: from a request to a durable, queued job in the line, in this order.

active marker ─► pending, queued [durable] ─► fact ─► hub ─► the line

The calling thread does all of it, and may be the main thread, where a Ctrl-C comes between any two steps. Then it posts
one thing, in one step of its own, and leaves: the settler's thread brings the job to its end, whatever was done of it
(`settle`). For that each step can be taken again, or finds that it was taken.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

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
from .strangers import call_out
from .turn import clean

log = logging.getLogger(__name__)

_SLICE_S = 1.0
INTERRUPTED = "submit was interrupted"

#: refusals after which there certainly is no new job
_NOTHING_WRITTEN = (JobExists, IdempotencyConflict, ParentFinished, NotFound, InvalidInput, Closed)


class Submission:
    """A job on its way to the store, and the store's answer to come.

    Nothing of it is waited for through a `Future`: one that its waiter was interrupted in may keep its lock for ever,
    and with it the committer's thread.
    """

    __slots__ = ("_gate", "done", "error", "fresh_id", "job", "live", "then")

    def __init__(self, live: LiveJob, *, fresh_id: bool) -> None:
        self.live = live
        self.fresh_id = fresh_id
        #: the job, or why there is none; once `done`
        self.job: Job | None = None
        self.error: BaseException | None = None
        self.done = False
        #: called once it is done, on the committer's thread
        self.then: Callable[[], object] | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def answered(self, future: Future[Job]) -> None:
        """On the committer's thread; `future` is complete."""
        self.error = future.exception()
        if self.error is None:
            self.job = future.result()
        self.done = True
        self._gate.release()
        if self.then is not None:
            self.then()

    def wait(self) -> None:
        """Until it is answered; once."""
        # In slices: Python would see a Ctrl-C that comes in the instant before a wait only at that wait's end.
        while not self._gate.acquire(timeout=_SLICE_S):
            pass

    def result(self) -> Job:
        if self.error is not None:
            raise self.error
        assert self.job is not None
        return self.job


class Submissions:
    """Guarantees: a job is in the roster before the store hears of it, so that a cancel of its parent
    meets it; it is in the line only after it is durable and told; a submit that fails, or is interrupted
    wherever it is, leaves no job behind that nobody would run or end."""

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

    def prepare(self, request: SpawnRequest, fn: SyncFn) -> Submission:
        """What can be refused by looking at the request. Nobody else knows of it yet."""
        job = job_from(request, runner_id=self._runner_id, now=self._clock.now(), new_id=self._new_id)
        live = LiveJob(job, fn, cwd=check_cwd(request.cwd), env=check_env(request.env))
        session_id = job.parent_session_id
        if not self._store.has_session(session_id):
            self._store.session(session_id)  # raises, and says which ids are close
        self._settler.start()
        return Submission(live, fresh_id=request.job_id is None)

    def hand_over(self, submission: Submission) -> None:
        """The job is in the roster, its session marked, and its commit on the way. Waits for nothing else.

        Interrupted in here, or later, by what is no `Exception`: then `settle_later` is the next thing to be called.
        """
        live = submission.live
        session_id = live.job.parent_session_id
        self._register(live)
        try:
            self._markers.use(session_id, live)
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            with self._roster.lock:
                self._roster.drop(live)
            if isinstance(error, OSError):
                raise StoreWriteFailed(f"the active marker could not be written: {error}; nothing changed") from error
            raise
        if not self._requests.expects(session_id):
            # Not on this thread: a timer that is half set would stay so.
            self._settler.post(functools.partial(self._requests.expect, session_id))
        try:
            self._store.create_later(
                live.job,
                Queued(runner_id=self._runner_id),
                fresh_id=submission.fresh_id,
                when_done=submission.answered,
            )
        except Exception as error:
            failed: Future[Job] = Future()
            failed.set_exception(error)
            submission.answered(failed)

    def settle_later(self, submission: Submission) -> None:
        """Its submit was interrupted: nobody gets to know the id, so nobody wants the job."""
        self._settler.post(functools.partial(self._settle, submission))

    def _settle(self, submission: Submission) -> None:
        """On the settler's thread, which no interrupt reaches: whatever was done of a submit, the job ends, if there is
        one, and nothing is kept for it."""
        live = submission.live
        self._canceller.complete(live, INTERRUPTED)
        self._pool.send_again()
        if live.phase is not Phase.SUBMITTED:
            return
        if submission.done:
            self._conclude(submission)
            return
        # Whether the store has it cannot be seen. What is handed in for a session is answered in its order: once
        # something later is, so is this, or it was never handed in.
        try:
            later = self._store.write_later(live.job.parent_session_id, lambda documents: None, lambda: None)
        except Exception as error:
            log.debug("job %s: nothing can be handed in any more: %s", live.job_id, error)
            self._conclude(submission)
        else:
            later.add_done_callback(lambda done: self._settler.post(functools.partial(self._conclude, submission)))

    def _conclude(self, submission: Submission) -> None:
        if not submission.done:
            self.forget(submission.live, Closed("the submit was interrupted before the store had the job"))
            return
        try:
            self.finish(submission)
        except Exception as error:
            log.debug("job %s: its submit was interrupted, and refused: %s", submission.live.job_id, error)

    def finish(self, submission: Submission) -> Job:
        """The job as it stands, once the store has answered. Raises what `JobRunner.submit` does."""
        try:
            job = submission.result()
        except JobExists as exists:
            self.forget(submission.live, exists)
            raise
        except Exception as error:
            self._abandon(submission.live, error)
            raise
        return self._admit(submission.live, job)

    def tell(self, submission: Submission) -> None:
        """The steps that follow a durable submit, before anybody else hears of the job; each once."""
        if submission.job is not None:  # otherwise `finish` tells why
            interrupt = self._run_steps(submission.live, submission.job)
            if interrupt is not None:
                raise interrupt

    def forget(self, live: LiveJob, error: BaseException) -> None:
        """There is no such job; who waits for it is told why."""
        with self._roster.lock:
            self._roster.drop(live)
            waiters = list(live.waiters)
        self._markers.done(live.job.parent_session_id, live)
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

    def _admit(self, live: LiveJob, job: Job) -> Job:
        """The job is durable as queued: tell of it, and let it have its turn."""
        if live.phase is not Phase.SUBMITTED:
            return job  # done already, for a submit that was interrupted
        interrupt = self._run_steps(live, job)
        interrupt = self._hub.publish(TASK_CREATED, job) or interrupt
        interrupt = self._hub.publish(JOB_STATUS, job) or interrupt
        if interrupt is not None:
            raise interrupt
        with self._roster.lock:
            if live.phase is not Phase.SUBMITTED:
                return job
            live.job = job
            if self._roster.jobs.get(job.job_id) is not live:
                self._roster.add(live, None)
            if live.cancel_asked or self._roster.closing:
                reason = live.cancel_reason if live.cancel_asked else SHUTDOWN_REASON
                self._roster.line.remove(live)  # where an interrupted try had put it
                self._canceller.end(live, Cancelled(event_id=self._new_id(), reason=reason))
                return job
            self._roster.move(live, Phase.QUEUED)
            self._roster.line.push(live)
            tokens = self._pool.reserve()
        self._pool.start(tokens)
        return job

    def _run_steps(self, live: LiveJob, job: Job) -> KeyboardInterrupt | None:
        """Each step at most once: what a step that was interrupted did of its work is unknown."""
        interrupt = None
        while live.told < len(self.after_commit):
            step = self.after_commit[live.told]
            live.told += 1
            call = functools.partial(step, job)
            interrupt = call_out(call, log, "job %s: a step after its submit failed", job.job_id)[1] or interrupt
        return interrupt

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
