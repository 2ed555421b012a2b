"""The end of a job, as an ordered list of steps, and the thread that walks it.

    before:  leftovers ─► drain                  the worker, before the end is decided
             terminal [durable]                  the store
    after:   run log ─► fact ─► hub ─► waiters ─► release        this thread

The order is the promise: who waits never learns of an end that a crash could take back, and a fact
is there before anybody acts on it. A step that fails is logged and the next one follows: a failing
fact or listener never keeps a waiter. Recovery repeats what a crash left undone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum

import attrs

from ..errors import Bug
from ..jobs import Event, Job
from ..store import JobStore
from .live import LiveJob

log = logging.getLogger(__name__)


class EndStep(StrEnum):
    """The steps, in their order."""

    LEFTOVERS = "leftovers"  #: what is left of the job's processes is ended
    DRAIN = "drain"  #: its log is read to the end
    #: here the terminal commit becomes durable
    RUN_LOG = "run log"  #: its run log is complete
    FACT = "fact"  #: `job/settled` is written for readers elsewhere
    HUB = "hub"  #: live listeners hear of it
    WAITERS = "waiters"  #: who waits is woken
    RELEASE = "release"  #: what the runner held for it is given back


BEFORE_TERMINAL = (EndStep.LEFTOVERS, EndStep.DRAIN)
AFTER_TERMINAL = (EndStep.RUN_LOG, EndStep.FACT, EndStep.HUB, EndStep.WAITERS, EndStep.RELEASE)


@attrs.frozen(kw_only=True, slots=True)
class Ended:
    """A job at its end: before the terminal commit as it runs, after it as it ended."""

    job: Job
    live: LiveJob


Step = Callable[[Ended], None]


def nothing(ended: Ended) -> None:
    """The step of a part that is not there."""


class Ending:
    """The steps of one runner's jobs. A part of the system takes its place with `set`."""

    def __init__(self, *, hub: Step, waiters: Step, release: Step) -> None:
        self._steps: dict[EndStep, Step] = dict.fromkeys(EndStep, nothing)
        self._steps |= {EndStep.HUB: hub, EndStep.WAITERS: waiters, EndStep.RELEASE: release}

    def set(self, name: EndStep, step: Step) -> Step:
        """`step` in the place of `name`; returns what stood there."""
        before, self._steps[name] = self._steps[name], step
        return before

    def before_terminal(self, ended: Ended) -> None:
        self._walk(BEFORE_TERMINAL, ended)

    def after_terminal(self, ended: Ended) -> None:
        self._walk(AFTER_TERMINAL, ended)

    def _walk(self, names: tuple[EndStep, ...], ended: Ended) -> None:
        for name in names:
            try:
                self._steps[name](ended)
            except Exception:
                log.exception("job %s: the step %r of its end failed", ended.job.job_id, name.value)


#: what a job's event came to: the job as committed, or why it never will be
Told = Callable[[LiveJob, Event, "Future[Job]"], None]


class Settler:
    """Hands events to the store and acts on what came of them, on one thread of its own.

    The store's futures complete on its committer's thread, which must not wait for a fact's fsync or
    for a listener; so they are only put into a queue there. Events of one job, and of one session,
    are told in the order in which they were handed in.

    What the lock protects: the thread's start and end.
    """

    def __init__(self, store: JobStore, told: Told, name: str) -> None:
        self._store = store
        self._told = told
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def hand_in(self, live: LiveJob, event: Event) -> Future[Job]:
        """With the runner's lock held, right where it was decided. Never raises and never waits."""
        try:
            future = self._store.apply_later(live.job_id, event, keep=True)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self.post(lambda: self._told(live, event, done)))
        return future

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` on the settler's thread, after what was posted before."""
        self._queue.put(call)

    def start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends after what is posted now; waits for that, unless called by its own thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception as error:
                log.exception("%s", Bug(f"settling an event failed: {error}"))
