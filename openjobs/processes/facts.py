"""The facts of a worker's background commands: recorded once the journal's own record is durable, before anybody
here hears of it (spec 001).

Only the worker that looks after a task while it runs records its end: the one that started it, or one that adopted
it from a keeper that was alive. An end that is found afterwards has no `job/settled`: nobody saw it.
"""

from __future__ import annotations

import signal
from typing import Any

from ..clock import to_epoch_ms
from ..facts import PROCESS, Recorder, Registered, Settled
from ..jobs import subject_of
from . import layout
from .task import Task

#: the keeper's words for a command that came to its own end, or ended when it was asked to
_REPORTED = frozenset({layout.BY_EXIT, layout.BY_SIGNAL, layout.BY_TERM})
#: it was asked to end because of a limit, and may have been killed
_LIMITED = frozenset({layout.BY_TIMEOUT, layout.BY_OUTPUT_LIMIT})


class TaskFacts:
    """`began` (or `adopted`), `registered`, `settled`, in this order for each task. None of them raises for a ledger
    that cannot be written."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: tasks of this worker that have not settled -> whether their registration was recorded, or tried
        self._own: dict[str, bool] = {}

    def began(self, task: Task) -> None:
        """Its intent is durable: from now on it is this worker's."""
        self._own[task.task_id] = False

    def adopted(self, task: Task) -> None:
        """Who began it has recorded that, or nobody ever will."""
        self._own[task.task_id] = True

    def registered(self, task: Task) -> None:
        """It runs, and that is durable."""
        self._own[task.task_id] = True
        self._recorder.record(Registered(**_common(task)))

    def settled(self, task: Task) -> None:
        """Its end is durable. One that never came to run is registered with its end."""
        was_registered = self._own.pop(task.task_id, None)
        if was_registered is None or task.ended_at is None:
            return
        end = Settled(
            **_common(task),
            started_at_ms=to_epoch_ms(task.started_at) if task.started_at is not None else None,
            settled_at_ms=to_epoch_ms(task.ended_at),
            status=task.status.value,
            producer_reported=producer_reported(task),
        )
        if was_registered:
            self._recorder.record(end)
        else:
            self._recorder.record(Registered(**_common(task)), end)


def producer_reported(task: Task) -> bool:
    """Whether the command itself came to an end, by whatever code: not killed by us, not lost, and it did run."""
    if task.stopped_by in _LIMITED:
        return task.signal != signal.SIGKILL
    return task.stopped_by in _REPORTED


def _common(task: Task) -> dict[str, Any]:
    command = task.command if isinstance(task.command, str) else " ".join(task.command)
    return {
        "job_id": task.task_id,
        "kind": PROCESS,
        "session_id": task.session_id,
        "parent_job_id": task.job_id,
        "label": subject_of(task.description, command),
        "tool_call_id": task.origin_tool_call_id,
        "registered_at_ms": to_epoch_ms(task.created_at),
    }
