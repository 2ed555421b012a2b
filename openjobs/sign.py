"""An event, and a future, that an interrupt cannot spoil.

`threading.Event` and `Condition` are written in Python: a Ctrl-C that arrives in the main thread between two of
their steps can leave the lock inside them held for ever, and whoever comes next, on any thread, waits for ever. The
locks of `_thread` are taken and given back in one step each, so what shares an event with the main thread uses this.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S = 1.0


class Sign(threading.Event):
    """As `threading.Event`. After an interrupt inside `set`, who waits may sleep on until the next `set`, or the end of
    its own time-out; inside `wait` it leaves nothing behind."""

    def __init__(self) -> None:
        self._up = False
        self._gates: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        return self._up

    def set(self) -> None:
        self._up = True
        if self._gates:
            for gate in tuple(self._gates):
                with suppress(RuntimeError):  # it is open already
                    gate.release()

    def clear(self) -> None:
        self._up = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._up:
            return True
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        try:
            # 1. Its gate is there, 2. it looks again: who sets it after that look finds the gate.
            if self._up:
                return True
            return gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)) or self._up
        finally:
            with suppress(ValueError):
                self._gates.remove(gate)


class Answer(Future[T]):
    """A `Future` that threads which may be interrupted wait for, ask and add callbacks to, while another completes it.

    None of that takes the lock that completing it takes; so who completes it never waits for one that was left.
    """

    def __init__(self) -> None:
        super().__init__()
        self._complete = Sign()
        self._calls: deque[Callable[[Future[T]], object]] = deque()

    def result(self, timeout: float | None = None) -> T:
        self._until_complete(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._until_complete(timeout)
        return super().exception(0)

    def done(self) -> bool:
        return self._complete.is_set()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        # 1. It is there, 2. it looks: who completes it after that look calls it. Each is taken out by one of the two.
        self._calls.append(fn)
        if self._complete.is_set():
            self._call()

    def set_result(self, result: T) -> None:
        super().set_result(result)
        self._completed()

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        self._completed()

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._completed()
        return cancelled

    def _until_complete(self, timeout: float | None) -> None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        # In slices: Python would see a Ctrl-C that comes in the instant before a wait only at that wait's end.
        while not self._complete.wait(max(0.0, min(end - time.monotonic(), _SLICE_S))):
            if time.monotonic() >= end:
                raise TimeoutError

    def _completed(self) -> None:
        self._complete.set()
        self._call()

    def _call(self) -> None:
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:
                return
            try:
                call(self)
            except Exception:
                log.exception("a callback of a future failed")
