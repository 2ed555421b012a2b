"""A command line with a home of its own, and supervisors that end what they started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs.processes import ProcessSupervisor
from openjobs.store import GitJobStore
from tests.support.cli import Cli
from tests.support.processes import Supervise

_BOUND_S = 20.0


@pytest.fixture
def cli(scratch: Path) -> Iterator[Cli]:
    """A home of its own; its host, if one was started, leaves before leaks are looked for."""
    home = scratch / "home"
    made = Cli(home)
    yield made
    made.end_host()
    subprocess.run(["rm", "-r", str(home)], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def supervise(store: GitJobStore) -> Iterator[Supervise]:
    """Makes supervisors; at the end every task that was started is ended and every supervisor closed."""
    made: list[ProcessSupervisor] = []

    def make(**options: Any) -> ProcessSupervisor:
        made.append(ProcessSupervisor(store, **options))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.close()
    with ProcessSupervisor(store) as last:
        last.recover()
        for session_id in store.sessions():
            for task in last.list(session_id):
                if not task.terminal:
                    last.stop(task.task_id, "the test is over", grace_s=0)
                    assert last.wait(task.task_id, _BOUND_S).terminal


@pytest.fixture
def supervisor(supervise: Supervise) -> ProcessSupervisor:
    return supervise()
