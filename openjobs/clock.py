"""Time as an argument: the core never asks the operating system for it directly.

A frozen `datetime` (freezegun) does not freeze every thread, and a wall clock may jump a day, so
durations always come from `monotonic`, and `now` is used only for what is written down.
"""

from __future__ import annotations

import math
import threading
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """The wall clock, UTC, whole milliseconds (what a row can hold)."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Block until `event` is set (True) or `timeout_s` have passed on this clock (False)."""
        ...


_SLICE_S = 1.0


class SystemClock:
    """The machine's own clocks. Its durations go on while a test has frozen the date."""

    #: kept in a tuple: freezegun replaces the function wherever a name is bound to it directly
    _MONOTONIC = (time.monotonic,)

    def now(self) -> datetime:
        return in_milliseconds(datetime.now(UTC))

    def monotonic(self) -> float:
        return self._MONOTONIC[0]()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        # In slices: Python would see a Ctrl-C that comes in the instant before a wait only at that wait's end.
        end = math.inf if timeout_s is None else self.monotonic() + timeout_s
        while not event.wait(max(0.0, min(end - self.monotonic(), _SLICE_S))):
            if self.monotonic() >= end:
                return event.is_set()
        return True


def in_milliseconds(when: datetime) -> datetime:
    return when.replace(microsecond=when.microsecond // 1000 * 1000)


@lru_cache(maxsize=1024)  # a job's times are written again with each of its commits
def to_text(when: datetime) -> str:
    """ISO-8601, UTC, three decimals, `Z`: the one form in which times are stored."""
    if when.tzinfo is not UTC:
        when = when.astimezone(UTC)
    return when.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def from_text(text: str) -> datetime:
    """Raises ValueError when `text` is not an ISO-8601 time with a zone."""
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    try:
        return when.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{text!r} is outside the years 1 to 9999") from None


def to_epoch_ms(when: datetime) -> int:
    return round(when.timestamp() * 1000)
