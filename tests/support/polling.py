"""Waiting in tests: a polled bound, never a bare sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(predicate: Callable[[], T], timeout: float = 10.0, *, every: float = 0.005) -> T:
    """The first true value of `predicate`; fails after `timeout` seconds and shows the last value."""
    end = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"not true within {timeout} s; last value: {value!r}")
        time.sleep(every)
