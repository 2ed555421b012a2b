"""What a worker thread does with one job: claim it, take its turn, decide how it ended."""

from __future__ import annotations

import contextvars
import functools
import logging
from typing import Any

import attrs

from ..clock import Clock
from ..ids import IdMaker, short
from ..jobs import Completed, ContextMode, End, Errored, Job, JobStatus, Started, TurnRequest, transition
from ..store import JobStore
from . import turn
from .cancel import Canceller
from .ending import Ended, Ending
from .hub import TASK_PROGRESS, Hub
from .live import LiveJob, Phase, Roster
from .pool import Seat
from .settler import Settler

log = logging.getLogger(__name__)

#: the job whose turn this is; in threads and tasks that copied the turn's context, too
current_job: contextvars.ContextVar[LiveJob | None] = contextvars.ContextVar("openjobs_current_job", default=None)


class Worker:
    """The two calls that the pool makes for each job: `claim`, then `run`.

    The running commit is handed in and not waited for, so a job starts at once; a crash before that
    commit is durable leaves the job as queued, and recovery ends it.
    """

    def __init__(
        self,
        store: JobStore,
        roster: Roster,
        settler: Settler,
        ending: Ending,
        hub: Hub,
        *,
        clock: Clock,
        new_id: IdMaker,
        runner: object,
    ) -> None:
        """`runner` is what a turn is given to submit jobs of its own with."""
        self._runner = runner
        self._store = store
        self._roster = roster
        self._settler = settler
        self._ending = ending
        self._hub = hub
        self._clock = clock
        self._new_id = new_id

    def claim(self, live: LiveJob, seat: Seat) -> None:
        """With the lock held, in one step with taking the job from the line: from now on it runs."""
        self._roster.move(live, Phase.RUNNING)
        live.seat = seat
        self._settler.hand_in(live, Started())

    def run(self, live: LiveJob, seat: Seat, canceller: Canceller) -> None:
        """Never raises."""
        thread = seat.thread
        name = thread.name
        thread.name = f"{name} job {short(live.job_id)}"
        try:
            end = self._turn(live, canceller)
        except BaseException as error:
            log.exception("job %s could not be run", live.job_id)
            end = Errored(event_id=self._new_id(), error=turn.describe(error), result_text=live.partial_text)
        finally:
            thread.name = name
        with self._roster.lock:
            if live.phase is Phase.RUNNING:
                live.producer_reported = live.returned
                canceller.end(live, _with_partial(live, end))
                return
            canceller.came_back(live)
        log.info("job %s came back after it was given up; its late result is dropped", live.job_id)

    def _turn(self, live: LiveJob, canceller: Canceller) -> End:
        request = self._request(live)
        canceller.end_in_time(live)
        end = live.context.run(self._in_context, live, request)
        self._ending.before_terminal(Ended(job=request.job, live=live))
        return end

    def _in_context(self, live: LiveJob, request: TurnRequest) -> End:
        current_job.set(live)
        return turn.take_turn(live, request, self._new_id())

    def _request(self, live: LiveJob) -> TurnRequest:
        job = live.job
        if job.status is JobStatus.QUEUED:
            # Its commit may still be on the way; the turn sees the job as it was decided.
            job = transition(job, Started(), self._clock.now())
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
            deadline=self._clock.monotonic() + job.timeout_s if job.timeout_s is not None else None,
            cancel_event=live.cancel_event,
            progress=turn.contained(functools.partial(self._progress, live), job.job_id),
            partial=turn.contained(functools.partial(self._partial, live), job.job_id),
            runner=self._runner,
        )

    def _context_items(self, job: Job) -> list[Any]:
        """What the turn continues from: the branch up to where it forks off, with what hangs beside it."""
        if job.context_mode is ContextMode.CLEAN or job.parent_msg_id is None:
            return []
        items = self._store.session(job.parent_session_id).context(job.parent_msg_id)
        # Read late, after the job's end, its own card would be among them.
        return [item for item in items if item.job_id != job.job_id]

    def _progress(self, live: LiveJob, value: Any) -> None:
        if live.phase is Phase.RUNNING:
            self._hub.publish(TASK_PROGRESS, live.job, value)

    def _partial(self, live: LiveJob, text: str) -> None:
        if live.phase is Phase.RUNNING:
            live.partial_text = turn.bounded_partial(text)


def _with_partial(live: LiveJob, end: End) -> End:
    """A cancelled job that returned nothing keeps what it had reported."""
    if live.cancel_asked and isinstance(end, Completed) and not end.result_text:
        return attrs.evolve(end, result_text=live.partial_text or "")
    return end
