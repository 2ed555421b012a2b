"""Waiting for jobs to end: one small object per wait, told by whoever learns of an end."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence

from ..errors import InvalidInput
from ..jobs import Job
from .strangers import call_out

log = logging.getLogger(__name__)

ALL = "all"
ANY = "any"


class Waiter:
    """Collects the ends of some jobs and calls `wake` once enough of them are there.

    `ended` may be called by any thread, more than once for one job. `wake` may be called more than
    once, and must be short: it sets an event or posts to an event loop.
    """

    __slots__ = ("_need", "_wake", "error", "jobs")

    def __init__(self, ids: Collection[str], mode: str, wake: Callable[[], None]) -> None:
        self._need = len(set(ids)) if mode == ALL else min(1, len(ids))
        self._wake = wake
        self.jobs: dict[str, Job] = {}
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.jobs) >= self._need

    def ended(self, job: Job) -> None:
        self.jobs[job.job_id] = job
        if self.done:
            self.wake()

    def failed(self, error: BaseException) -> None:
        """The wait can never be answered (the job was not created, or its end cannot be written)."""
        self.error = error
        self.wake()

    def wake(self) -> None:
        """What it is told by is a stranger's: the next one who waits is told all the same."""
        call_out(self._wake, log, "somebody who waits for jobs could not be woken")


def check_mode(mode: str) -> str:
    if mode not in (ALL, ANY):
        raise InvalidInput(f"mode is 'all' or 'any', not {mode!r}")
    return mode


def check_ids(ids: Sequence[str]) -> list[str]:
    if isinstance(ids, str):
        raise InvalidInput("await_tasks takes a list of job ids; for one id there is await_job")
    return list(ids)


def check_timeout(timeout: float | None) -> float | None:
    """Seconds that a wait may take. A negative number is none left; too many are as many as can be waited."""
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or math.isnan(timeout):
        raise InvalidInput(f"a timeout is a number of seconds or None, not {timeout!r}")
    return min(max(0.0, timeout), threading.TIMEOUT_MAX)
