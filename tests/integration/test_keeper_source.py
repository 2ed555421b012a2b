"""A keeper's directory drained into a run log: every byte once, whatever restarts or dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs.errors import SourceMismatch
from openjobs.processes import Identity, Run, Template, bury, request_stop, this_system
from openjobs.processes.source import KeeperSource
from openjobs.runlog import Drain, Ending, RunLogWriter
from tests.support import eventually
from tests.support.processes import RELAXED, request, settle, this_task, written

BOUND_S = 20.0
#: those of the running test; each holds its streams open
SOURCES: list[KeeperSource] = []


def source_of(run: Run, keeper: Identity) -> KeeperSource:
    SOURCES.append(KeeperSource(run.run_dir, task_id=this_task(), keeper=keeper))
    return SOURCES[-1]


@pytest.fixture
def started(tmp_path: Path, request_command: str) -> Iterator[Run]:
    with Template() as template, template.start(tmp_path, request(request_command, grace_s=0.2)) as run:
        run.go()
        yield run
        while SOURCES:
            SOURCES.pop().close()
        request_stop(tmp_path, grace_s=0, disk=RELAXED, system=this_system())
        run.wait_gone(BOUND_S)


@pytest.fixture
def request_command(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(run: Run) -> tuple[RunLogWriter, Drain]:
    source = source_of(run, run.keeper)
    log = RunLogWriter(run.run_dir, task_id=this_task(), run_id="run", disk=RELAXED)
    log.accept(source.identity)
    return log, Drain(log, source, identity=source.identity)


@pytest.mark.parametrize("request_command", ["seq 1 60000; seq 1 30000 >&2; exit 3"], indirect=True)
def test_a_drain_takes_every_byte_across_restarts(started: Run) -> None:
    """The writer is opened anew after every step; the log ends with the keeper's own words."""
    finished = None
    for _ in range(10_000):
        log, drain = opened(started)
        with log:
            drain.step()
            finished = drain.finished
            if finished is not None:
                log.complete(finished.outcome)
                break
    assert finished is not None
    assert finished.outcome == "exit 3"
    with RunLogWriter(started.run_dir, task_id=this_task(), run_id="run", disk=RELAXED) as log:
        state = log.state
    assert (state.stdout_bytes, state.stderr_bytes) == (
        len(written(started.run_dir)),
        len(written(started.run_dir, "stderr")),
    )
    assert state.log_bytes == state.stdout_bytes + state.stderr_bytes
    assert state.completion is not None
    assert state.completion.ending is Ending.DRAINED


@pytest.mark.parametrize("request_command", ["echo before; exec sleep 300"], indirect=True)
def test_a_lost_run_is_drained_once_it_is_buried(started: Run) -> None:
    """While its keeper lives, and until somebody took its lock, the lengths are not final."""
    log, drain = opened(started)
    with log:
        eventually(drain.step)
        assert bury(started.run_dir, task_id=this_task(), disk=RELAXED, system=this_system()) is None
        this_system().send(started.keeper, signal.SIGKILL)
        assert started.wait_gone(BOUND_S)
        drain.step()
        assert drain.finished is None
        settle(started.run_dir)
        finished = drain.run()
        assert finished is not None
        assert (finished.outcome, finished.stdout_bytes, finished.stderr_bytes) == ("lost", 7, 0)


@pytest.mark.parametrize("request_command", ["echo hi"], indirect=True)
def test_another_keepers_record_is_refused(started: Run) -> None:
    """A directory in which another keeper worked is not this run's source."""
    started.wait(BOUND_S)
    other = source_of(started, this_system().identify(1) or started.keeper)
    with RunLogWriter(started.run_dir, task_id=this_task(), run_id="run", disk=RELAXED) as log:
        log.accept(other.identity)
        with pytest.raises(SourceMismatch):
            Drain(log, other, identity=other.identity).run()
