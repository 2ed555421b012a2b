"""Live events inside one process: who is there hears them, nothing is stored.

Every event has `(epoch, n)`: `epoch` names the hub's life, `n` counts up by one. A listener that
missed some reads the store again; the commits are the truth, events only say when to look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from ..jobs import Job
from ..sign import Sign
from .strangers import call_out

log = logging.getLogger(__name__)

#: events a subscription holds before the oldest are dropped
DEFAULT_CAPACITY = 1024

TASK_CREATED = "task_created"
JOB_STATUS = "job_status"
TASK_PROGRESS = "task_progress"


@attrs.frozen(kw_only=True, slots=True)
class HubEvent:
    epoch: str
    n: int
    kind: str  #: TASK_CREATED, JOB_STATUS or TASK_PROGRESS (spec 003, D9)
    job: Job  #: as it was committed
    value: Any = None  #: what the turn reported, for TASK_PROGRESS

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def session_id(self) -> str:
        return self.job.parent_session_id

    @property
    def status(self) -> str:
        return self.job.status.value


class Subscription:
    """A bounded queue of events. Close it, or use it as a context manager.

    A full queue drops its oldest event and counts it in `missed`: a slow listener never slows a job.
    `on_event` is called after an event was put in, on the thread that published it: it must only
    wake somebody up (as `loop.call_soon_threadsafe` does).
    """

    def __init__(self, hub: Hub, capacity: int, on_event: Callable[[], None] | None) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        #: something is there, or nothing will come; set by any thread, so by the main thread too
        self._ready = Sign()
        self._events: deque[HubEvent] = deque(maxlen=capacity)
        self._closed = False
        self.on_event = on_event
        self.missed = 0

    def get(self, timeout: float | None = None) -> HubEvent | None:
        """The next event; None when the time is up or the subscription was closed and is empty."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                if self._closed:
                    return None
                self._ready.clear()
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._ready.wait(left)

    def drain(self) -> list[HubEvent]:
        """All events that are there now."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    @property
    def closed(self) -> bool:
        """Whether no further event will be put in."""
        with self._lock:
            return self._closed

    def close(self) -> None:
        self._hub._remove(self)
        self._end()

    def _put(self, event: HubEvent) -> None:
        with self._lock:
            if len(self._events) == self._events.maxlen:
                self.missed += 1
            self._events.append(event)
            self._ready.set()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            self._ready.set()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Hub:
    """Hands each event to all subscriptions.

    Guarantees: one order for all listeners, without gaps in `n`; a listener that raises, whatever it
    is, is logged and removed, and nobody else notices.

    What the lock protects: the counter and the list of subscriptions, so that events are put into
    the queues in the order of their numbers.
    """

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self._lock = threading.Lock()
        self._n = 0
        self._subscriptions: tuple[Subscription, ...] = ()

    def subscribe(self, capacity: int = DEFAULT_CAPACITY, on_event: Callable[[], None] | None = None) -> Subscription:
        subscription = Subscription(self, capacity, on_event)
        with self._lock:
            self._subscriptions += (subscription,)
        return subscription

    def publish(self, kind: str, job: Job, value: Any = None) -> KeyboardInterrupt | None:
        """Never raises what a listener does, and never waits for one. See `strangers` for what is returned."""
        with self._lock:
            self._n += 1
            listeners = self._subscriptions
            if not listeners:
                return None
            event = HubEvent(epoch=self.epoch, n=self._n, kind=kind, job=job, value=value)
            for listener in listeners:
                listener._put(event)
        return self._wake(listeners)

    def close(self) -> KeyboardInterrupt | None:
        """Ends all subscriptions; what is in them can still be read."""
        with self._lock:
            listeners, self._subscriptions = self._subscriptions, ()
        for listener in listeners:
            listener._end()
        return self._wake(listeners)

    def _wake(self, listeners: tuple[Subscription, ...]) -> KeyboardInterrupt | None:
        interrupt = None
        for listener in listeners:
            if listener.on_event is None:
                continue
            called, held = call_out(listener.on_event, log, "a subscriber of the hub failed and is no longer called")
            interrupt = held or interrupt
            if not called:
                self._remove(listener)
                listener._end()
        return interrupt

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(s for s in self._subscriptions if s is not subscription)
