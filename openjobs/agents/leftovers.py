"""What a dead process's job left: a command that its keeper still looks after, and a log that nobody completed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..durable import Disk
from ..errors import LogBusy
from ..jobs import Job
from ..processes import rundir
from ..processes.client import run_directory
from ..processes.identity import this_system
from ..processes.tail import RunTail

__all__ = ["end_leftovers", "finish_log", "run_directory"]

#: between TERM and KILL: nobody wants the result any more
GRACE_S = 1.0
#: how long one job's leftovers may keep a recovery
PATIENCE_S = 5.0

_log = logging.getLogger(__name__)


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


def finish_log(home: Path, job: Job, disk: Disk) -> bool:
    """Drain and complete the log of an ended job whose runner is dead. Whether it is complete, or there is none.

    Idempotent; raises what the log and its source raise. While a keeper lives, or somebody else has the log, nothing
    happens. A job that ran no command has no log.
    """
    if job.run_id is None or not job.terminal:
        return True
    run_dir = run_directory(home, job.parent_session_id, job.run_id)
    keeper = rundir.keeper_identity(run_dir)
    if keeper is None:
        return True
    if rundir.last_words(run_dir, task_id=job.run_id, disk=disk) is None:
        return False
    tail = RunTail(run_dir, owner_id=job.job_id, run_id=job.run_id, keeper=keeper, disk=disk)
    try:
        while tail.step():
            pass
        if tail.finished is not None:
            tail.complete(job.status.value)
    except LogBusy:
        return False
    finally:
        tail.rest()
    return tail.completion is not None
