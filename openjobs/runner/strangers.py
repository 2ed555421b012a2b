"""Calling what is not ours: listeners, steps that others added, callbacks. One rule for all of them.

What it raises is logged and goes no further, whatever it is: a `SystemExit` of theirs means nothing for a thread of
ours, or for a job that somebody else submitted. Only a `KeyboardInterrupt` in the main thread may be a person's who
pressed Ctrl-C while it ran. It is given back, and who called raises it once nothing of ours is half done.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from threading import current_thread, main_thread
from typing import TypeVar

T = TypeVar("T")


def call_out(
    call: Callable[[], object], log: logging.Logger, said: str, *args: object
) -> tuple[bool, KeyboardInterrupt | None]:
    """Whether it returned, and the interrupt to raise later. What it raised is logged as `said`; nothing is raised."""
    try:
        call()
    except BaseException as error:
        log.exception(said, *args)
        return False, error if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread() else None
    return True, None


def leave_if_forked(pid: int) -> None:
    """On a thread of ours, after a stranger's code: in a child that it made and that came back, end at once.

    The child has one thread and copies of everything; going on would write what its parent writes, or wait for
    threads that it does not have. Nothing is flushed: the buffers are the parent's too.
    """
    if os.getpid() != pid:
        os._exit(FORKED_EXIT_CODE)


#: of a forked child that came back out of a turn or a callback
FORKED_EXIT_CODE = 70
