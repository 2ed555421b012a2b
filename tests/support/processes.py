"""Real commands under real keepers, for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from openjobs.durable import Disk
from openjobs.processes import rundir
from openjobs.processes.identity import System, this_system
from openjobs.processes.template import Request, argv_of

from .polling import eventually

RELAXED = Disk(durable=False)


def request(command: str | list[str], *, task_id: str = "a-task", grace_s: float = 5.0, **more: object) -> Request:
    """What `run_command` would make of it, with the test's own environment."""
    return Request(
        argv=argv_of(command),
        cwd=str(more.pop("cwd", "/")),
        env=dict(more.pop("env", os.environ)),  # type: ignore[call-overload]
        task_id=task_id,
        grace_s=grace_s,
        **more,  # type: ignore[arg-type]
    )


def settle(run_dir: Path, *, task_id: str = "a-task", grace_s: float = 0.2) -> rundir.Burial:
    """What a recovering host finds out, once no keeper lives."""
    system = this_system()

    def bury() -> rundir.Burial | None:
        return rundir.bury(run_dir, task_id=task_id, disk=RELAXED, system=system, boot=system.boot(), grace_s=grace_s)

    return eventually(bury)


def marked(task_id: str, system: System | None = None) -> list[int]:
    """The living processes that carry the run's mark."""
    system = system or this_system()
    mark = f"OPENJOBS_TASK_ID={task_id}".encode()
    return [m.identity.pid for m in system.table() if m.living and system.has_variable(m.identity.pid, mark)]


def traced(step: int, file: str, then: Callable[[], None]) -> None:
    """Call `then` before the `step`-th line of `file` that this thread runs from now on."""
    left = step

    def tracer(frame: object, event: str, _argument: object) -> object:
        nonlocal left
        if frame.f_code.co_filename != file:  # type: ignore[attr-defined]
            return None
        if event == "line":
            left -= 1
            if left == 0:
                then()
        return tracer

    sys.settrace(tracer)  # type: ignore[arg-type]
