"""Timers on one thread, which lives only while there is something to wait for."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable

from ..clock import Clock
from ..sign import Sign
from .strangers import call_out

log = logging.getLogger(__name__)


class Timer:
    """One call to come. `cancel` makes sure that it does not start any more."""

    __slots__ = ("_call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def take(self) -> Callable[[], None] | None:
        call, self._call = self._call, None
        return call


class Timers:
    """Calls functions at monotonic times of a clock.

    Guarantees: calls run one after the other on one daemon thread, never early, in order of their
    times; one that raises is logged and disturbs no other. Without timers there is no thread.

    Assumptions: the calls are short; they hold up all later ones.

    What the lock protects: the heap and which thread serves it.
    """

    def __init__(self, clock: Clock, name: str = "openjobs timers") -> None:
        self._clock = clock
        self._name = name
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._earlier = Sign()  # something changed that the thread should look at
        self._thread: threading.Thread | None = None
        #: held by the thread that serves; one whose start was interrupted may come late and find it taken
        self._serves = threading.Lock()
        self._closed = False

    def call_in(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self._clock.monotonic() + delay_s, call)
        with self._lock:
            if self._closed:
                return timer
            heapq.heappush(self._heap, (timer.when, next(self._order), timer))
            if self._thread is None:
                self._start_thread()
            elif self._heap[0][2] is timer:
                self._earlier.set()
        return timer

    def close(self) -> None:
        """Forgets all timers and waits for the thread, unless called by it."""
        with self._lock:
            self._closed = True
            self._heap.clear()
            thread = self._thread
            self._earlier.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is exiting
            log.debug("no timer thread: %s", error)
        else:
            if self._thread is None:
                self._thread = thread

    def _serve(self) -> None:
        if not self._serves.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        while True:
            with self._lock:
                self._drop_cancelled()
                if not self._heap:
                    self._thread = None
                    self._serves.release()
                    return
                wait_s = self._heap[0][0] - self._clock.monotonic()
                due = heapq.heappop(self._heap)[2] if wait_s <= 0 else None
                self._earlier.clear()
            if due is None:
                self._clock.wait(self._earlier, min(wait_s, threading.TIMEOUT_MAX))
            else:
                self._call(due)

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0][2]._call is None:
            heapq.heappop(self._heap)

    def _call(self, timer: Timer) -> None:
        call = timer.take()
        if call is None:
            return
        call_out(call, log, "a timed call failed")
