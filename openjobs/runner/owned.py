"""The background commands of a runner's jobs: asked to stop when their job is, and ended with it.

A job that started none costs one look into a directory that is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import OpenJobsError, UnknownJob
from ..jobs import Job
from ..store import JobStore
from ..store.presence import JOB_TASKS, FileActive
from .ending import Ended
from .live import LiveJob
from .settler import Settler
from .timers import Timers

if TYPE_CHECKING:
    from ..processes.owned import JobTasks

log = logging.getLogger(__name__)

ASKED = "its job was asked to stop"
ENDED = "its job has ended"
DIED = "its job's worker died"
#: while the job may still end by itself
_ASK_GRACE_S = 5.0
#: how often, and how many times, tasks that outlive a job given up are looked at
_AGAIN_S = 1.0
_LOOKS = 60


class TasksOfJobs:
    """Any job's tasks, as a runner and a recovery need them."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._marks = FileActive(store.home, store.disk, JOB_TASKS) if store.home is not None else None
        self._tasks: JobTasks | None = None

    def use(self, tasks: JobTasks) -> None:
        """A supervisor's own, which acts at once on what it looks after, instead of asking through the journal."""
        self._tasks = tasks

    def has_any(self, job_id: str) -> bool:
        return self._marks is not None and bool(self._marks.sessions(job_id))

    def jobs(self) -> list[str]:
        """Jobs with marks, ended or not."""
        return self._marks.runners() if self._marks is not None else []

    @property
    def tasks(self) -> JobTasks:
        """For a job that has any."""
        if self._tasks is None:
            from ..processes.client import TaskClient  # late: most jobs start no background commands
            from ..processes.owned import JobTasks

            assert self._store.home is not None
            client = TaskClient(self._store.home, disk=self._store.disk, clock=self._store.clock)
            self._tasks = JobTasks(client, disk=self._store.disk)
        return self._tasks


class OwnedTasks(TasksOfJobs):
    """The steps that a runner takes for the tasks of its jobs.

    1. A job is asked to stop: its tasks are, so that a turn that waits for one goes on.   settler's thread
    2. Its turn is over: what is left of them is ended, and that is waited for.            worker's thread
    3. Its end is durable, so that it gets no new ones: a last look, and its marks go.     settler's thread
    """

    def __init__(self, store: JobStore, settler: Settler, timers: Timers) -> None:
        super().__init__(store)
        self._settler = settler
        self._timers = timers

    def asked(self, live: LiveJob) -> None:
        """Waits for nothing: called with the roster's lock held."""
        if self._marks is not None:
            self._settler.post(lambda: self._contained(live.job_id, lambda: self._ask(live.job_id)))

    def turn_over(self, ended: Ended) -> None:
        if self.has_any(ended.job.job_id):
            self.tasks.end(ended.job.job_id, ASKED if ended.live.cancel_asked else ENDED)

    def job_over(self, ended: Ended) -> None:
        self._look(ended.job.job_id, _LOOKS)

    def _ask(self, job_id: str) -> None:
        if self.has_any(job_id):
            self.tasks.ask(job_id, ASKED, _ASK_GRACE_S)

    def _look(self, job_id: str, looks: int) -> None:
        if not self.has_any(job_id):
            return
        try:
            self.tasks.ask(job_id, ENDED)
            if self.tasks.release(job_id):
                return
        except (OpenJobsError, OSError) as error:
            log.warning("job %s: its background commands could not be ended yet: %s", job_id, error)
        if looks <= 1:
            return

        def again() -> None:
            self._settler.post(lambda: self._contained(job_id, lambda: self._look(job_id, looks - 1)))

        self._timers.call_in(_AGAIN_S, again)

    def _contained(self, job_id: str, call: Callable[[], None]) -> None:
        try:
            call()
        except (OpenJobsError, OSError) as error:
            log.warning("job %s: its background commands could not be ended: %s", job_id, error)


class LeftTasks(TasksOfJobs):
    """The steps that a recovery takes for the tasks of jobs whose runner is dead. Each can be repeated."""

    def end(self, job: Job) -> None:
        """Before the job's end is written; in a bounded time."""
        if self.has_any(job.job_id):
            self.tasks.end(job.job_id, DIED)

    def release(self, job: Job) -> None:
        """After it."""
        if job.terminal and self.has_any(job.job_id):
            self.tasks.ask(job.job_id, DIED)
            self.tasks.release(job.job_id)

    def of_runner(self, runner_id: str) -> bool:
        """Its jobs whose end is durable and whose tasks nobody looked for after that. Whether nothing is left."""
        complete = True
        for job_id in self.jobs():
            try:
                job = self._store.row(job_id)
                if job.terminal and job.runner_id == runner_id:
                    self.end(job)
                    complete = self.tasks.release(job_id) and complete
            except UnknownJob:
                continue  # its session is gone, and its tasks' journal with it
            except (OpenJobsError, OSError) as error:
                complete = False
                log.warning("the background commands of job %s could not be ended: %s", job_id, error)
        return complete
