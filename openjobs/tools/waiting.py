"""What a tool waits for: jobs and background commands together, blocking or in an event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from ..aio import owned, wake
from ..errors import OpenJobsError
from ..jobs import Job
from ..runner.waiting import ALL

if TYPE_CHECKING:
    from ..processes import ProcessSupervisor, Task
    from ..runner import JobRunner

log = logging.getLogger(__name__)

#: how often a wait looks at what cannot wake it: another's stop event, background commands
LOOK_S = 0.05
#: a wait is in slices, since a signal that comes right before it begins does not end it
_SLICE_S = 0.5

T = TypeVar("T")
Stops = Sequence[threading.Event]
Ends = list["Job | Task"]


@attrs.frozen(kw_only=True)
class Pending(Generic[T]):
    """A tool's answer that is still to come: what it waits for, and what it then is."""

    jobs: Sequence[str] = ()
    tasks: Sequence[str] = ()
    mode: str = ALL
    timeout_s: float | None = None
    #: makes the answer of what was waited for: jobs, then tasks, as they ended or as they stand
    answer: Callable[[Ends], T]
    #: what becomes of it when its caller is stopped: an answer, or something else to wait for; None: `answer`
    stopped: Callable[[], Any] | None = None


def settle(step: Any, runner: JobRunner, processes: ProcessSupervisor | None, stops: Stops) -> Any:
    """Wait until `step` is an answer, and return that. A stop that is set ends the wait.

    Interrupted (Ctrl-C, a signal that ends the process), what only the caller waited for is stopped, too.
    """
    while isinstance(step, Pending):
        try:
            ends = _wait(step, runner, processes, stops)
        except (KeyboardInterrupt, SystemExit):
            abandon(step)
            raise
        if ends is None:
            assert step.stopped is not None
            step, stops = step.stopped(), ()
        else:
            step = step.answer(ends)
    return step


def abandon(step: Any) -> None:
    """Nobody waits for it any more: what only its caller waited for is stopped. Never raises a refusal, since the
    caller has its own reason to leave."""
    if isinstance(step, Pending) and step.stopped is not None:
        try:
            step.stopped()
        except OpenJobsError as error:
            log.warning("what a caller left behind could not be stopped: %s", error)


async def settle_async(step: Any, runner: JobRunner, processes: ProcessSupervisor | None, stops: Stops) -> Any:
    """As `settle`, in an event loop."""
    while isinstance(step, Pending):
        ends = await _wait_async(step, runner, processes, stops)
        if ends is None:
            assert step.stopped is not None
            step, stops = await asyncio.to_thread(step.stopped), ()
        else:
            step = await asyncio.to_thread(step.answer, ends)
    return step


def _wait(step: Pending[Any], runner: JobRunner, processes: ProcessSupervisor | None, stops: Stops) -> Ends | None:
    """What was waited for; None where a stop came first and has something to do."""
    clock = runner.store.clock
    until = math.inf if step.timeout_s is None else clock.monotonic() + step.timeout_s
    enough = threading.Event()
    wait = _Wait(step, runner, processes, enough.set)
    stop = False
    try:
        while not wait.done:
            left = until - clock.monotonic()
            stop = any(each.is_set() for each in stops)
            if stop or left <= 0:
                break
            enough.wait(min(LOOK_S if stops or step.tasks else _SLICE_S, left))
    finally:
        wait.close()
    return None if stop and step.stopped is not None else wait.ends()


async def _wait_async(
    step: Pending[Any], runner: JobRunner, processes: ProcessSupervisor | None, stops: Stops
) -> Ends | None:
    clock = runner.store.clock
    loop = asyncio.get_running_loop()
    until = math.inf if step.timeout_s is None else clock.monotonic() + step.timeout_s
    enough = asyncio.Event()
    wait = await owned(
        asyncio.to_thread(_Wait, step, runner, processes, lambda: wake(loop, enough)),
        lambda late: late.close(block=False),
    )
    stop = False
    try:
        while not wait.done:
            left = until - clock.monotonic()
            stop = any(each.is_set() for each in stops)
            if stop or left <= 0:
                break
            pause = min(left, LOOK_S) if stops or step.tasks else left
            try:
                async with asyncio.timeout(None if pause == math.inf else pause):
                    await enough.wait()
            except TimeoutError:
                pass
    finally:
        wait.close(block=False)
    return None if stop and step.stopped is not None else await asyncio.to_thread(wait.ends)


class _Wait:
    """One wait under way: jobs tell by themselves, tasks are looked at."""

    def __init__(
        self, step: Pending[Any], runner: JobRunner, processes: ProcessSupervisor | None, wake: Callable[[], None]
    ) -> None:
        self._step = step
        self._processes = processes
        self._jobs = runner.open_wait(list(step.jobs), step.mode, wake) if step.jobs else None

    @property
    def done(self) -> bool:
        jobs_done = self._jobs is not None and self._jobs.done
        if self._step.mode == ALL:
            return (jobs_done or self._jobs is None) and all(task.terminal for task in self._tasks())
        return jobs_done or any(task.terminal for task in self._tasks())

    def close(self, *, block: bool = True) -> None:
        if self._jobs is not None:
            self._jobs.close(block=block)

    def ends(self) -> Ends:
        jobs: Ends = list(self._jobs.answers()) if self._jobs is not None else []
        return jobs + self._tasks()

    def _tasks(self) -> Ends:
        if not self._step.tasks:
            return []
        assert self._processes is not None
        return [self._processes.wait(task_id, 0) for task_id in self._step.tasks]
