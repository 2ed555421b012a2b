"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

from openjobs.clock import in_milliseconds

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

#: how often a waiting thread looks at its event: `threading.Event` has no hook for `set`
POLL_S = 0.002


class FakeClock:
    """`openjobs.clock.Clock`, moved by hand.

    Guarantees: a `wait` returns True once its event is set, False once `advance` has passed its
    time, and never by the passing of real time alone.
    The lock protects both times and the list of who waits; `_moved` is notified at every advance.
    """

    def __init__(self, start: datetime = START) -> None:
        self._moved = threading.Condition()
        self._now = start
        self._monotonic = 1000.0
        self._deadlines: list[float] = []

    def now(self) -> datetime:
        with self._moved:
            return in_milliseconds(self._now)

    def monotonic(self) -> float:
        with self._moved:
            return self._monotonic

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        with self._moved:
            deadline = float("inf") if timeout_s is None else self._monotonic + timeout_s
            self._deadlines.append(deadline)
            self._moved.notify_all()
            try:
                while not event.is_set():
                    if self._monotonic >= deadline:
                        return False
                    self._moved.wait(POLL_S)
                return True
            finally:
                self._deadlines.remove(deadline)

    def advance(self, seconds: float) -> None:
        """Both clocks go on by `seconds`; whoever waited for less is woken."""
        with self._moved:
            self._now += timedelta(seconds=seconds)
            self._monotonic += seconds
            self._moved.notify_all()

    def jump(self, seconds: float) -> None:
        """Only the wall clock jumps, forward or back, as when somebody sets it."""
        with self._moved:
            self._now += timedelta(seconds=seconds)

    def until_waiting(self, count: int = 1, timeout_s: float = 10.0) -> None:
        """Block until at least `count` threads wait on this clock; fails after `timeout_s` real seconds."""
        end = time.monotonic() + timeout_s
        with self._moved:
            while len(self._deadlines) < count:
                left = end - time.monotonic()
                assert left > 0, f"{len(self._deadlines)} threads wait on the clock, not {count}"
                self._moved.wait(left)
