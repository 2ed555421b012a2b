"""The background commands that belong to a job: found from the job alone, and ended with it.

    such a task starts:  mark [durable] ─► intent [durable] ─► is the job over? ─► keeper ─► go
    a job ends:          terminal commit [durable] ─► look at the marks ─► stop what is left ─► the marks go

Each writes before it looks. Of a start and an end that meet, at least one sees the other, so that no task outlives its
job unseen, whoever dies in between: (1) the start looks before the commit, then its intent was written before the end
looks, and the end stops it; (2) it looks after the commit, then it sees that the job is over, and starts nothing.

`<home>/job-tasks/<job_id>/<session_id>` is an empty file. A job without tasks has none, and its end costs one look.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ..durable import Disk
from ..errors import Closed, OpenJobsError, StoreWriteFailed
from ..ids import check_job_id, short
from ..store.presence import JOB_TASKS, FileActive
from . import rundir
from .client import TaskClient
from .identity import System, this_system
from .task import Task

log = logging.getLogger(__name__)

#: between TERM and KILL, once the job is over: nobody wants the result any more
GRACE_S = 1.0
#: how long the end of a job waits for the trees of its tasks
PATIENCE_S = 5.0
_LOOK_S = (0.005, 0.1)

Tasks = list[Task]


class JobTasks:
    """Guarantees: `ask` and `end` reach every task of the job whose intent is durable, in any session and of any
    worker. A living worker's task is asked for in its journal, and that worker acts; a dead worker's keeper is told,
    and a tree without keeper is ended, by proven identity only (R9). Each call can be repeated, and may die anywhere.
    """

    def __init__(
        self,
        client: TaskClient,
        *,
        disk: Disk,
        system: System | None = None,
        stop: Callable[[Task, str, float], object] | None = None,
    ) -> None:
        """`stop(task, reason, grace_s)` asks a task to stop where a supervisor can do so at once."""
        self._client = client
        self._disk = disk
        self._system = system
        self._stop = stop or self._ask_for
        self._marks = FileActive(client.home, disk, JOB_TASKS)

    def mark(self, job_id: str, session_id: str) -> None:
        """Before the intent of the job's task in that session; durable. Raises `StoreWriteFailed`."""
        try:
            self._marks.mark(check_job_id(job_id), session_id)
        except OSError as error:
            raise StoreWriteFailed(
                f"the tasks of job {short(job_id)} could not be marked; nothing was started: {error}"
            ) from error

    def unfinished(self, job_id: str) -> Tasks:
        """Tasks of the job whose end is not recorded. Raises `Damaged`, `FileRefused`."""
        return [
            task
            for session_id in self._marks.sessions(check_job_id(job_id))
            for task in self._client.journal(session_id).unfinished()
            if task.job_id == job_id
        ]

    def ask(self, job_id: str, reason: str, grace_s: float = GRACE_S) -> Tasks:
        """Ask for the end of all of them: TERM, `grace_s`, KILL; those that were unfinished. Waits for no end."""
        found = self.unfinished(job_id)
        for task in found:
            if _is_asked(task, grace_s) and not self._client.is_orphan(task):
                continue
            try:
                try:
                    self._stop(task, reason, grace_s)
                except Closed:  # that supervisor is gone; another one, or none, looks after the task
                    self._ask_for(task, reason, grace_s)
            except (OpenJobsError, OSError) as error:
                log.warning("task %s of job %s could not be asked to stop: %s", task.task_id, short(job_id), error)
        return found

    def end(self, job_id: str, reason: str, *, patience_s: float = PATIENCE_S) -> Tasks:
        """As `ask`, and wait until they have ended; those that have not after `patience_s`."""
        deadline = time.monotonic() + patience_s
        pause, longest = _LOOK_S
        if not self.ask(job_id, reason):
            return []
        while left := self._running(job_id):
            if time.monotonic() >= deadline:
                log.warning("job %s: %d of its background commands have not ended yet", short(job_id), len(left))
                break
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
        return left

    def release(self, job_id: str) -> bool:
        """Take the job's marks away, unless one of its tasks goes on; whether they are gone. Only of a job that is
        over: it gets no new ones."""
        if self._running(job_id):
            return False
        for session_id in self._marks.sessions(job_id):
            self._marks.clear(job_id, session_id)
        self._marks.remove(job_id)
        return True

    def _running(self, job_id: str) -> Tasks:
        """Without those whose end only their keeper knows, or can only be recorded as lost."""
        return [task for task in self.unfinished(job_id) if not self._client.shown(task).terminal]

    def _ask_for(self, task: Task, reason: str, grace_s: float) -> None:
        """1. The request is durable, so that whoever adopts the task acts on it. 2. Nobody lives who would act: its
        keeper is told; where that is dead, too, what it left is ended. Its end is for a supervisor to record."""
        if not _is_asked(task, grace_s):
            self._client.ask_to_stop(task, reason, grace_s)
        run_dir = self._client.run_dir(task)
        if not self._client.is_orphan(task) or not os.path.isdir(run_dir):
            return
        system = self._system or this_system()
        if not rundir.request_stop(run_dir, reason=reason, grace_s=grace_s, disk=self._disk, system=system):
            rundir.bury(run_dir, task_id=task.task_id, disk=self._disk, system=system, boot=task.boot, grace_s=grace_s)


def _is_asked(task: Task, grace_s: float) -> bool:
    return task.stop_requested_at is not None and task.stop_grace_s <= grace_s
