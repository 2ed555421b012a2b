"""Recovery: ending the jobs of runners that died (spec 003, D4; R5 and R7).

A job is never run again by itself, and a living runner's job is never touched: the runner named in
the row must have lost its lease, which the kernel takes away with the process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

from ..errors import Damaged, InvalidTransition, OpenJobsError, UnknownJob, UnknownSession
from ..ids import IdMaker
from ..jobs import Errored, Job
from ..session import cards
from ..store import JobStore
from .owned import LeftTasks

log = logging.getLogger(__name__)

DIED = "worker died before completion"

#: how long a recovery waits for cards in other sessions; one that is held by somebody comes later
_CARDS_S = 2.0

#: one repeatable step for a job whose runner died; `job` is as it stands before or after its end
Step = Callable[[Job], None]


class Recovery:
    """Guarantees: idempotent, may itself die anywhere, and two at once end each job once (the store
    refuses the second end). What cannot be written now is logged and left to the next recovery.

    `before_end` and `after_end` are the steps that belong to the end of a job besides its commit:
    leftover process trees and background commands are ended before, run logs completed after. It
    never writes a fact.
    """

    def __init__(self, store: JobStore, new_id: IdMaker, own_id: str | None = None) -> None:
        """`own_id` is the runner that this recovery belongs to, which is alive."""
        self._store = store
        self._new_id = new_id
        self._own_id = own_id
        #: sees to a card in a caller's session; a runner's own goes on trying for as long as it lives
        self.mirror: Callable[[Job], Future[bool]] = lambda job: store.mirror_later(job)
        self.tasks = LeftTasks(store)
        self.before_end: list[Step] = [self._end_leftovers, self.tasks.end]
        self.after_end: list[Step] = [self._finish_log, self.tasks.release]

    def run(self) -> list[Job]:
        """End what dead runners left in the sessions they had marked; returns those jobs."""
        ended: list[Job] = []
        for runner_id in self._store.leases.dead():
            jobs, complete = self._runner(runner_id)
            ended += jobs
            if self.tasks.of_runner(runner_id) and complete:
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
                damage: list[Damaged] = []
                jobs = [job for job in self._store.unfinished(session_id, damage.append) if self.is_orphan(job)]
                ended += self._end_together(jobs[::-1])
                self._finish_logs(session_id)
                if self._mend_cards(session_id) and not damage:
                    self._store.active.clear(runner_id, session_id)
                else:
                    complete = False
                for error in damage:
                    log.warning(
                        "session %s of dead runner %s was not recovered whole: %s", session_id, runner_id, error
                    )
            except LookupError:
                log.info("session %s of runner %s is gone", session_id, runner_id)
                self._store.active.clear(runner_id, session_id)
            except (OpenJobsError, OSError) as error:
                complete = False
                log.warning("session %s of dead runner %s could not be recovered: %s", session_id, runner_id, error)
        return ended, complete

    def _end(self, job: Job) -> Job:
        return self._end_together([job])[0]

    def _end_together(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs of one session, as they ended. Their ends share a batch: a thousand jobs cost few syncs."""
        for job in jobs:
            self._steps(self.before_end, job)
        ends = [self._store.apply_later(job.job_id, Errored(event_id=self._new_id(), error=DIED)) for job in jobs]
        wait(ends)
        return [self._ended(job, end) for job, end in zip(jobs, ends, strict=True)]

    def _ended(self, job: Job, end: Future[Job]) -> Job:
        try:
            ended = end.result()
        except InvalidTransition:  # somebody else was first
            ended = self._store.outcome(job.job_id)
        self._steps(self.after_end, ended)
        self.begin_card(ended)
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
                job = self._store.row(owner_id or "")
            except UnknownJob:
                continue  # a background command's
            if self.is_dead(job.runner_id):
                self._contained(run_id, functools.partial(self._finish_log, job))

    def begin_card(self, job: Job) -> None:
        """The card in a caller's session follows; nobody waits for it."""
        if job.elsewhere:
            self._steps([self._mirror], job)

    def _mirror(self, job: Job) -> None:
        self.mirror(job)

    def _mend_cards(self, session_id: str) -> bool:
        """Cards in callers' sessions that are behind their rows: a runner died between the two commits. False where
        one could not be written yet; the marker stays, so the next recovery looks again."""
        behind = [job for job in self._called(session_id) if self._is_behind(job)]
        futures: list[Future[bool]] = []
        for job in behind:
            try:
                futures.append(self.mirror(self._store.outcome(job.job_id)))
            except UnknownSession:
                log.info("job %s: its caller's session %s is gone", job.job_id, job.caller_session_id)
        done, late = wait(futures, timeout=_CARDS_S)
        failed = [future.exception() for future in done if future.exception() is not None]
        for error in failed:
            log.warning("session %s: a card in its caller's session could not be written: %s", session_id, error)
        return not late and not failed

    def _called(self, session_id: str) -> Iterator[Job]:
        """The session's jobs whose caller is elsewhere and whose runner is gone."""
        documents = self._store.documents(session_id)
        dead: dict[str | None, bool] = {}
        for job_id in dict.fromkeys(entry.job_id for entry in self._store.index.with_caller(session_id)):
            job = documents.job(job_id)
            if job is None or not job.elsewhere or not job.terminal:
                continue
            if job.runner_id not in dead:
                dead[job.runner_id] = self.is_dead(job.runner_id)
            if dead[job.runner_id]:
                yield job

    def _is_behind(self, job: Job) -> bool:
        try:
            card = self._store.documents(job.caller_session_id or "").find_node(job.attach_id or "")
        except UnknownSession:
            return False
        except (OpenJobsError, OSError):
            return True  # it cannot be known; trying says why
        return card is None or not cards.is_final(card)

    def _steps(self, steps: Sequence[Step], job: Job) -> None:
        for step in steps:
            self._contained(job.job_id, functools.partial(step, job))

    def _contained(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("a step of the recovery of %s failed", what)
