"""The run logs of jobs that are commands: drained while they run, completed once their end is durable.

Spec 004, *Finish ordering*: native drain, terminal commit, completion of the log. The thread that runs the command
drains; the runner says when the commit is durable. Whichever comes last completes the log, so that a job whose end
was forced still gets a whole log, when its tree is dead and drained. A crash in between is recovery's (leftovers.py).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..durable import Disk
from ..errors import LogBusy, OpenJobsError, OutcomeUnknown, StoreWriteFailed
from ..jobs import Job

if TYPE_CHECKING:
    from ..processes.identity import Identity
    from ..processes.tail import RunTail

log = logging.getLogger(__name__)

#: between TERM and KILL, for what a dead keeper left of a tree
GRACE_S = 1.0


class JobLogs:
    """Guarantees: a log is never the job's problem. One that cannot be written now (disk full) goes on with the next
    output, with the end, with the end of other jobs, and with the end of all; one that cannot be used at all is left
    as it is. A keeper's record that cannot be read costs no log either: it is settled as whoever buries a run does.

    What the lock protects: the table of logs that are not complete.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[str, JobLog] = {}

    def open(self, job: Job, run_dir: Path, disk: Disk) -> JobLog:
        """The log of a command that is about to start; `close` it when the command has ended."""
        made = JobLog(self, job, run_dir, disk)
        with self._lock:
            self._logs[made.run_id] = made
        return made

    def finish(self, run_id: str | None, outcome: str) -> None:
        """The job's end is durable: its log, where it has one, is complete now or as soon as it is drained."""
        with self._lock:
            found = self._logs.get(run_id) if run_id is not None else None
            late = [one for one in self._logs.values() if one.late and one is not found]
        if found is not None:
            found._finish(outcome)
        for one in late:
            one._complete_if_all_is_known()

    @property
    def unfinished(self) -> int:
        """How many logs are not complete: what a process that ends now leaves to recovery."""
        with self._lock:
            return len(self._logs)

    def close(self) -> None:
        """Put every log down as it is. One whose command still runs is opened again by its next output; one that only
        could not be written is tried once more."""
        with self._lock:
            logs = list(self._logs.values())
        for each in logs:
            if each.late:
                each._complete_if_all_is_known()
            each._rest()

    def _done(self, run_id: str) -> None:
        with self._lock:
            self._logs.pop(run_id, None)


class JobLog:
    """One run's log. What its lock protects: the log's writer and what is known of the end."""

    def __init__(self, logs: JobLogs, job: Job, run_dir: Path, disk: Disk) -> None:
        self.run_id = run_dir.name
        self._logs = logs
        self._job_id = job.job_id
        self._run_dir = run_dir
        self._disk = disk
        self._lock = threading.Lock()
        self._tail: RunTail | None = None
        self._drained = False
        self._outcome: str | None = None
        #: it cannot be used and is left as it is
        self._broken = False
        #: all is known, and it could not be written down yet
        self.late = False

    def begin(self, keeper: Identity, child: Identity) -> None:
        """The command runs; who looks finds its log."""
        self._contained(keeper)

    def take(self) -> None:
        """There is output."""
        self._contained(None)

    def close(self) -> None:
        """The command has ended; every byte is in the log when this returns."""
        from ..processes import rundir  # late, as all of that room: only commands need it

        self._contained(rundir.keeper_identity(self._run_dir))
        with self._lock:
            self._drained = True
        self._complete_if_all_is_known()

    def _finish(self, outcome: str) -> None:
        with self._lock:
            self._outcome = outcome
        self._complete_if_all_is_known()

    def _contained(self, keeper: Identity | None) -> None:
        with self._lock:
            self._try(keeper)

    def _try(self, keeper: Identity | None) -> bool:
        """With the lock held: take what is there. Whether that went well."""
        if self._broken:
            return False
        from ..processes import rundir

        try:
            self._step(keeper)
        except (StoreWriteFailed, OutcomeUnknown, LogBusy, OSError) as error:
            log.warning("job %s: its log could not be written and is tried again: %s", self._job_id, error)
            self._put_down()
            return False
        except OpenJobsError as error:
            if rundir.is_of_exit(error, self._run_dir):
                return True  # not the log's fault; see `_bury`
            log.error("job %s: its log cannot be written; it is left as it is: %s", self._job_id, error)
            self._broken = True
            self._put_down()
            return False
        return True

    def _step(self, keeper: Identity | None) -> None:
        if self._tail is None:
            if keeper is None:
                return
            from ..processes.tail import RunTail

            self._tail = RunTail(
                self._run_dir, owner_id=self._job_id, run_id=self.run_id, keeper=keeper, disk=self._disk
            )
        while self._tail.step():
            pass

    def _take_all(self, tail: RunTail) -> bool:
        """With the lock held, of a command that has ended: whether every byte is in the log."""
        if not self._try(None):
            return False
        return tail.drained or (self._bury() and self._try(None) and tail.drained)

    def _bury(self) -> bool:
        """With the lock held. A keeper that has gone left no record that says how much output there is, or one that
        nobody can read: that is moved aside, and what is there is all. False while somebody holds the keeper's lock, or
        where the disk refuses; then it is tried again."""
        from ..processes import rundir
        from ..processes.identity import this_system

        system = this_system()
        try:
            found = rundir.bury(self._run_dir, task_id=self.run_id, disk=self._disk, system=system, grace_s=GRACE_S)
        except (OpenJobsError, OSError) as error:
            log.warning("job %s: its run could not be settled and is tried again: %s", self._job_id, error)
            return False
        return found is not None

    def _complete_if_all_is_known(self) -> None:
        with self._lock:
            if not self._drained or self._outcome is None:
                return
            self.late = not self._completed(self._outcome)
            if self.late:
                return
        self._logs._done(self.run_id)

    def _completed(self, outcome: str) -> bool:
        """With the lock held. Whether nothing is left to do, now or ever."""
        if self._tail is not None and self._take_all(self._tail):
            try:
                self._tail.complete(outcome)
            except (StoreWriteFailed, OutcomeUnknown, LogBusy, OSError) as error:
                log.warning("job %s: its log could not be completed and is tried again: %s", self._job_id, error)
            except OpenJobsError as error:
                log.error("job %s: its log cannot be completed; it is left as it is: %s", self._job_id, error)
                self._broken = True
        self._put_down()
        return self._tail is None or self._broken or self._tail.completion is not None

    def _rest(self) -> None:
        with self._lock:
            self._put_down()

    def _put_down(self) -> None:
        """With the lock held."""
        if self._tail is not None:
            try:
                self._tail.rest()
            except (OpenJobsError, OSError) as error:
                log.warning("job %s: its log could not be put down: %s", self._job_id, error)
