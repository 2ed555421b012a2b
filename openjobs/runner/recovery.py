"""Recovery: ending the jobs of runners that died (spec 003, D4; R5 and R7).

A job is never run again by itself, and a living runner's job is never touched: the runner named in
the row must have lost its lease, which the kernel takes away with the process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from ..errors import InvalidTransition, OpenJobsError, UnknownJob
from ..ids import IdMaker
from ..jobs import Errored, Job
from ..store import JobStore

log = logging.getLogger(__name__)

DIED = "worker died before completion"

#: one repeatable step for a job whose runner died; `job` is as it stands before or after its end
Step = Callable[[Job], None]


class Recovery:
    """Guarantees: idempotent, may itself die anywhere, and two at once end each job once (the store
    refuses the second end). What cannot be written now is logged and left to the next recovery.

    `before_end` and `after_end` are the steps that belong to the end of a job besides its commit:
    leftover process trees are ended before, run logs completed after. It never writes a fact.
    """

    def __init__(self, store: JobStore, new_id: IdMaker, own_id: str | None = None) -> None:
        """`own_id` is the runner that this recovery belongs to, which is alive."""
        self._store = store
        self._new_id = new_id
        self._own_id = own_id
        self.before_end: list[Step] = [self._end_leftovers]
        self.after_end: list[Step] = [self._finish_log]

    def run(self) -> list[Job]:
        """End what dead runners left in the sessions they had marked; returns those jobs."""
        ended: list[Job] = []
        for runner_id in self._store.leases.dead():
            jobs, complete = self._runner(runner_id)
            ended += jobs
            if complete:
                self._contained(runner_id, functools.partial(self._store.leases.remove, runner_id))
        return ended

    def mend(self, job: Job) -> Job:
        """`job`, or how it ended, where it is unfinished and its runner is dead. Raises nothing of the store's."""
        if not self.is_orphan(job):
            return job
        try:
            return self._end(job)
        except (OpenJobsError, OSError) as error:
            log.warning("job %s has no living runner but could not be ended: %s", job.job_id, error)
            return job

    def is_orphan(self, job: Job) -> bool:
        return not job.terminal and self.is_dead(job.runner_id)

    def is_dead(self, runner_id: str | None) -> bool:
        """Whether that runner is known to be gone. A job without a runner is nobody's to recover."""
        if runner_id is None or runner_id == self._own_id:
            return False
        return not self._store.leases.is_held(runner_id)

    def _runner(self, runner_id: str) -> tuple[list[Job], bool]:
        ended: list[Job] = []
        complete = True
        for session_id in self._store.active.sessions(runner_id):
            try:
                self._store.heal(session_id)
                jobs = [job for job in self._store.unfinished(session_id) if self.is_orphan(job)]
                ended += [self._end(job) for job in reversed(jobs)]
                self._finish_logs(session_id)
                self._store.active.clear(runner_id, session_id)
            except LookupError:
                log.info("session %s of runner %s is gone", session_id, runner_id)
                self._store.active.clear(runner_id, session_id)
            except (OpenJobsError, OSError) as error:
                complete = False
                log.warning("session %s of dead runner %s could not be recovered: %s", session_id, runner_id, error)
        return ended, complete

    def _end(self, job: Job) -> Job:
        self._steps(self.before_end, job)
        try:
            ended = self._store.apply(job.job_id, Errored(event_id=self._new_id(), error=DIED))
        except InvalidTransition:  # somebody else was first
            ended = self._store.get(job.job_id)
        self._steps(self.after_end, ended)
        return ended

    def _end_leftovers(self, job: Job) -> None:
        """The command that the dead runner's job had started, which its keeper still looks after."""
        if self._store.home is not None:
            from ..agents.leftovers import end_leftovers  # late: most recoveries find nothing to end

            end_leftovers(self._store.home, job)

    def _finish_log(self, job: Job) -> None:
        if self._store.home is not None:
            from ..agents.leftovers import finish_log

            finish_log(self._store.home, job, self._store.disk)

    def _finish_logs(self, session_id: str) -> None:
        """Jobs whose end is durable and whose log is not complete: the runner died between the two."""
        if self._store.home is None:
            return
        from ..processes.runs import incomplete_runs, owner_of

        for run_id in incomplete_runs(self._store.home, session_id):
            owner_id = owner_of(self._store.home, session_id, run_id)
            try:
                job = self._store.get(owner_id or "")
            except UnknownJob:
                continue  # a background command's
            if self.is_dead(job.runner_id):
                self._contained(run_id, functools.partial(self._finish_log, job))

    def _steps(self, steps: Sequence[Step], job: Job) -> None:
        for step in steps:
            self._contained(job.job_id, functools.partial(step, job))

    def _contained(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("a step of the recovery of %s failed", what)
