"""Real commands under real keepers, for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

import openjobs.processes
from openjobs.durable import Disk
from openjobs.processes import ProcessSupervisor, rundir, template
from openjobs.processes.identity import this_system
from openjobs.processes.template import Request, Template, argv_of
from openjobs.processes.tree import TASK_VARIABLE

from .polling import eventually

RELAXED = Disk(durable=False)
#: the fixture that makes supervisors
Supervise = Callable[..., ProcessSupervisor]


def faulty_template(*, portable: bool = False) -> Template:
    """Its keepers fail where the request's environment says (faulty_template.py); `portable`: as on other systems."""
    program = str(Path(__file__).with_name("faulty_template.py"))
    package = str(Path(openjobs.processes.__file__).parents[1])
    psutil_home = str(Path(psutil.__file__).parents[1]) if portable else ""
    return Template(program=[sys.executable, *template._ISOLATED, program, package, psutil_home])


def this_task() -> str:
    """The mark of this test's commands. Nobody else's, for a test ends whoever carries it."""
    return "task-of-" + os.path.basename(os.environ["TMPDIR"])


def request(command: str | list[str], *, task_id: str | None = None, grace_s: float = 5.0, **more: object) -> Request:
    """What `run_command` would make of it, with the test's own environment."""
    return Request(
        argv=argv_of(command),
        cwd=str(more.pop("cwd", "/")),
        env=dict(more.pop("env", os.environ)),  # type: ignore[call-overload]
        task_id=task_id or this_task(),
        grace_s=grace_s,
        **more,  # type: ignore[arg-type]
    )


def settle(run_dir: Path, *, grace_s: float = 0.2) -> rundir.Burial:
    """What a recovering host finds out, once no keeper lives."""
    system = this_system()

    def bury() -> rundir.Burial | None:
        return rundir.bury(
            run_dir, task_id=this_task(), disk=RELAXED, system=system, boot=system.boot(), grace_s=grace_s
        )

    return eventually(bury)


def written(run_dir: Path, stream: str = "stdout") -> bytes:
    """What has arrived; a stream's file is made with its first byte."""
    path = run_dir / stream
    return path.read_bytes() if path.exists() else b""


def marked() -> list[int]:
    """The living processes that carry the mark of this test's commands."""
    system = this_system()
    mark = os.fsencode(f"{TASK_VARIABLE}={this_task()}")
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
