"""Ending what a dead process's job left running: its command has a keeper, which outlives the worker."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..durable import Disk
from ..jobs import Job
from ..processes import rundir
from ..processes.identity import this_system

#: between TERM and KILL: nobody wants the result any more
GRACE_S = 1.0
#: how long one job's leftovers may keep a recovery
PATIENCE_S = 5.0

_log = logging.getLogger(__name__)


def run_directory(home: Path, session_id: str, run_id: str) -> Path:
    """The directory of one run: log, output, exit record."""
    return home / "sessions" / session_id / "runs" / run_id


def end_leftovers(home: Path, job: Job) -> None:
    """End the command of a job whose runner is dead; idempotent, bounded, and only proven processes are signalled (R9).

    Nothing happens where the job never started one. What could not be ended is logged.
    """
    if job.run_id is None:
        return
    run_dir = run_directory(home, job.parent_session_id, job.run_id)
    if not os.path.isdir(run_dir):
        return
    disk, system = Disk(durable=False), this_system()
    # 1. A living keeper ends its own tree. 2. A dead one left a tree that is found by its marks.
    if rundir.request_stop(run_dir, reason="its worker died", grace_s=GRACE_S, disk=disk, system=system):
        rundir.wait_for_exit(run_dir, timeout_s=PATIENCE_S, system=system)
        return
    burial = rundir.bury(run_dir, task_id=job.run_id, disk=disk, system=system, grace_s=GRACE_S)
    if burial is None:
        _log.warning("job %s: its command's keeper lives but could not be told to stop", job.job_id)
    elif burial.leftovers:
        _log.warning("job %s: processes of its command could not be ended: %s", job.job_id, burial.leftovers)
