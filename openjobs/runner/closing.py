"""The end of a runner: one deadline, whatever its jobs do; also when the interpreter exits without asking."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

from ..clock import Clock
from .cancel import Canceller
from .live import Roster

SHUTDOWN_S = 5.0
#: parts of the time: until running jobs are asked to stop (2 s of 5), and until they are given up
#: (3.5 s of 5, so that 1.5 s are left for commits)
_ASK_AT = 0.4
_GIVE_UP_AT = 0.7


def end_all(roster: Roster, canceller: Canceller, clock: Clock, timeout_s: float) -> None:
    """End every job within `timeout_s`. The roster takes no more jobs already (`closing`)."""
    begun = clock.monotonic()

    def until(part: float) -> float:
        return max(0.0, begun + timeout_s * part - clock.monotonic())

    canceller.cancel_waiting()
    if not clock.wait(roster.calm, until(_ASK_AT)):
        canceller.set_events()
        if not clock.wait(roster.calm, until(_GIVE_UP_AT)):
            canceller.give_up_running()
    clock.wait(roster.idle, until(1.0))


# --- the end of the interpreter --------------------------------------------------------------------------

#: closes one runner within the seconds it is given; the pid of the process it belongs to
_open: dict[int, tuple[Callable[[float], None], int]] = {}
_lock = threading.Lock()
_registered = False


def at_exit(key: int, close: Callable[[float], None]) -> None:
    """Call `close` when the interpreter exits, unless `forget_exit` comes first."""
    global _registered
    with _lock:
        _open[key] = (close, os.getpid())
        if not _registered:
            # Not at import: what is registered first is called last, so this comes before what
            # the host registered before it made its first runner.
            atexit.register(_close_all)
            _registered = True


def forget_exit(key: int) -> None:
    with _lock:
        _open.pop(key, None)


def _close_all() -> None:
    """One deadline for all runners that nobody closed."""
    until = time.monotonic() + SHUTDOWN_S
    with _lock:
        left = [close for close, pid in _open.values() if pid == os.getpid()]
    for close in left:
        close(max(0.0, until - time.monotonic()))
