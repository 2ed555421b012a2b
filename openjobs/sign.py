"""An event that an interrupt cannot spoil.

`threading.Event` and `Condition` are written in Python: a Ctrl-C that arrives in the main thread between two of
their steps can leave the lock inside them held for ever, and whoever comes next, on any thread, waits for ever. The
locks of `_thread` are taken and given back in one step each, so what shares an event with the main thread uses this.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress


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
