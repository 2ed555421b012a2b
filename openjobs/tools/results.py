"""The file with the whole text of a job's end, for who is shown a part of it, or reads files more easily than answers.

Written right after the terminal commit, before anybody hears of the end. A crash in between leaves none: the text is
in the session, and whoever is shown a part of it gets the file then.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..durable import Disk
from ..jobs import Job
from ..runner.ending import Ended, EndStep
from .texts import end_text

if TYPE_CHECKING:
    from ..runner import JobRunner

log = logging.getLogger(__name__)

RESULT = "result.txt"
#: nothing there needs to survive a power cut: it is in the session, too
_DISK = Disk(durable=False)


def result_file(home: Path | None, job: Job) -> Path | None:
    """Where the whole text of a job's end is put; None for a store in memory."""
    if home is None or job.run_id is None:
        return None
    from ..processes import run_directory  # late: it brings all that commands need

    return run_directory(home, job.parent_session_id, job.run_id) / RESULT


def write_result(home: Path | None, job: Job) -> Path | None:
    """Have the file of an ended job; may be repeated. Raises OSError."""
    path = result_file(home, job)
    if path is not None and not path.exists():
        _DISK.make_dirs(path.parent)
        _DISK.replace(path, end_text(job).encode())
    return path


class ResultFiles:
    """Writes the files of a runner's jobs that are to have one. What the lock protects: which those are."""

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._wanted: set[str] = set()

    @classmethod
    def of(cls, runner: JobRunner) -> ResultFiles:
        """The one of this runner, made when it is first asked for."""
        found = runner.ending.also("tools", EndStep.RUN_LOG, cls(runner.store.home))
        assert isinstance(found, cls)
        return found

    def keep(self, runner: JobRunner, job: Job) -> None:
        """The job's file is to be there from its end on. A file that cannot be written is never the job's problem:
        who is shown a part of the text is told so."""
        with self._lock:
            self._wanted.add(job.job_id)
        job = runner.outcome(job.job_id)
        if job.terminal:  # before it was noted here
            try:
                self._write(job)
            except OSError as error:
                log.warning("job %s: the file with its result could not be written: %s", job.job_id, error)

    def __call__(self, ended: Ended) -> None:
        """The step of a job's end."""
        if ended.job.job_id in self._wanted:
            self._write(ended.job)

    def _write(self, job: Job) -> None:
        with self._lock:
            self._wanted.discard(job.job_id)
        write_result(self._home, job)
