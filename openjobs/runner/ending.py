"""The end of a job, as an ordered list of steps.

    before:  leftovers ─► drain                                the worker, before the end is decided
             terminal [durable]                                the store
    after:   run log ─► fact ─► hub ─► waiters ─► release      the settler

The order is the promise: who waits never learns of an end that a crash could take back, and a fact
is there before anybody acts on it. The ends of several jobs that became durable together are recorded
together (run logs, facts) before any of them is announced (hub, waiters, release). A step that fails
is logged and the next one follows: a failing fact or listener never keeps a waiter. Recovery repeats
what a crash left undone, but for the fact.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from enum import StrEnum

import attrs

from ..jobs import Job
from .live import LiveJob
from .strangers import call_out

log = logging.getLogger(__name__)


class EndStep(StrEnum):
    """The steps, in their order."""

    LEFTOVERS = "leftovers"  #: what is left of the job's processes is ended
    DRAIN = "drain"  #: its output is read to the end (a command's profile has done so before it returns)
    #: here the terminal commit becomes durable
    RUN_LOG = "run log"  #: its run log is complete
    FACT = "fact"  #: `job/settled` is written for readers elsewhere
    HUB = "hub"  #: live listeners hear of it
    WAITERS = "waiters"  #: who waits is woken
    RELEASE = "release"  #: what the runner held for it is given back


BEFORE_TERMINAL = (EndStep.LEFTOVERS, EndStep.DRAIN)
#: who gets to know once the end is recorded
ANNOUNCED = (EndStep.HUB, EndStep.WAITERS, EndStep.RELEASE)
AFTER_TERMINAL = (EndStep.RUN_LOG, EndStep.FACT, *ANNOUNCED)


@attrs.frozen(kw_only=True, slots=True)
class Ended:
    """A job at its end: before the terminal commit as it runs, after it as it ended."""

    job: Job
    live: LiveJob


Step = Callable[[Ended], None]


def nothing(ended: Ended) -> None:
    """The step of a part that is not there."""


class Ending:
    """The steps of one runner's jobs. A part of the system takes its place with `set`, before jobs run."""

    def __init__(self) -> None:
        self._steps: dict[EndStep, Step] = dict.fromkeys(EndStep, nothing)
        #: further steps, by the name of the part that they are of
        self._also: dict[str, tuple[EndStep, Step]] = {}

    def set(self, name: EndStep, step: Step) -> Step:
        """`step` in the place of `name`; returns what stood there."""
        before, self._steps[name] = self._steps[name], step
        return before

    def also(self, part: str, after: EndStep, step: Step) -> Step:
        """`step` right after `after`, for a part that comes while jobs may run; the one that `part` has, if any."""
        return self._also.setdefault(part, (after, step))[1]

    def before_terminal(self, ended: Ended) -> None:
        for name in BEFORE_TERMINAL:
            self._take(name, [self._steps[name], *self._further(name)], ended)

    def record(self, ended: Ended) -> None:
        """Up to the fact, which may be written a little later, with those of other jobs; before `announce`."""
        self._take(EndStep.RUN_LOG, [self._steps[EndStep.RUN_LOG], *self._further(EndStep.RUN_LOG)], ended)
        self._take(EndStep.FACT, [self._steps[EndStep.FACT]], ended)

    def announce(self, ended: Ended) -> None:
        self._take(EndStep.FACT, self._further(EndStep.FACT), ended)
        for name in ANNOUNCED:
            self._take(name, [self._steps[name], *self._further(name)], ended)

    def _further(self, name: EndStep) -> list[Step]:
        return [step for after, step in list(self._also.values()) if after is name]

    def _take(self, name: EndStep, steps: list[Step], ended: Ended) -> None:
        for step in steps:
            if step is nothing:
                continue
            call_out(
                functools.partial(step, ended),
                log,
                "job %s: the step %r of its end failed",
                ended.job.job_id,
                name.value,
            )
