"""A process that has no descriptor left: every call is done or has a type of ours, nothing healthy is called damaged,
and all goes on once there are some again (R3)."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult, errors
from openjobs.processes import ProcessSupervisor
from tests.support import eventually
from tests.support.jobs import clean

BOUND_S = 30.0


@contextlib.contextmanager
def only(free: int) -> Iterator[None]:
    """So many descriptors are free, and no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        assert taken
        for fd in taken[:free]:
            os.close(fd)
        del taken[:free]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)


def calls(
    home: Path, store: GitJobStore, other: GitJobStore, runner: JobRunner, supervisor: ProcessSupervisor
) -> dict[str, Callable[[], object]]:
    """Everything that a host asks of what there is: a session with an ended job and an ended command."""
    done = runner.await_job(runner.submit(SpawnRequest(prompt="one", parent_session_id="s1")).job_id, BOUND_S)
    task = supervisor.wait(supervisor.start("s1", "echo said").task_id, BOUND_S)

    def another() -> object:
        """What nobody has looked at yet is opened anew."""
        with GitJobStore(home, durability="relaxed") as fresh:
            return fresh.get(done.job_id)

    return {
        "create a session": lambda: store.create_session(),
        "submit": lambda: runner.submit(SpawnRequest(prompt="two", parent_session_id="s1")),
        "list": lambda: runner.list(limit=None),
        "list by another": lambda: other.list("s1", limit=None),
        "get": lambda: store.get(done.job_id),
        "get by another": another,
        "history": lambda: other.history(done.job_id),
        "messages": lambda: other.session("s1").messages(),
        "append": lambda: store.session("s1").append("user", "more"),
        "cancel": lambda: runner.cancel(done.job_id),
        "cancel all": lambda: runner.cancel_session("s1", "enough"),
        "recover": lambda: runner.recover(),
        "start a command": lambda: supervisor.start("s1", "echo more"),
        "list commands": lambda: supervisor.list("s1"),
        "output": lambda: supervisor.output(task.task_id),
        "recover commands": lambda: supervisor.recover(),
        "notices": lambda: runner.notices.pending("s1"),
        "deliver": lambda: runner.notices.deliver("s1"),
        "consume": lambda: runner.notices.consume(task.task_id),
        "facts": lambda: list(store.session("s1").facts.read()),
    }


@pytest.mark.parametrize("free", [0, 1, 2, 3, 5])
def test_a_process_without_descriptors_says_so_and_goes_on(free: int, tmp_path: Path) -> None:
    """What is kept (ends of jobs and commands) lands then."""
    home = tmp_path / "home"
    with (
        GitJobStore(home, durability="relaxed") as store,
        JobRunner(store, 1, lambda request, event: TurnResult(final_text=request.prompt)) as runner,
        ProcessSupervisor(store) as supervisor,
        GitJobStore(home, durability="relaxed") as other,
    ):
        store.create_session("s1")
        asked = calls(home, store, other, runner, supervisor)
        told: dict[str, BaseException] = {}
        with only(free):
            for name, call in asked.items():
                told.update(refused(name, call))
        wrong = {
            name: error
            for name, error in told.items()
            if not isinstance(error, errors.OpenJobsError) or isinstance(error, errors.Damaged)
        }
        assert wrong == {}
        assert free or told
        eventually(lambda: runner.stats().unfinished == 0 and supervisor.running == 0, BOUND_S)
        for call in asked.values():
            call()
        eventually(lambda: runner.stats().unfinished == 0 and supervisor.running == 0, BOUND_S)
        clean(store)


def refused(name: str, call: Callable[[], object]) -> dict[str, BaseException]:
    try:
        call()
    except Exception as error:
        return {name: error}
    return {}
