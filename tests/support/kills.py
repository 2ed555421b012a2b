"""A worker in a process of its own that is killed in the middle of its work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


def said_until_killed(work: Callable[[int], object], lines: int, seconds: float) -> list[str]:
    """Fork, let `work(descriptor)` say lines, and kill it `seconds` after it has said so many; all that it said.

    What it says acknowledges what it did: a line that was cut by the kill is not among them.
    """
    hear, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hear)
            work(say)
        finally:
            os._exit(1)
    os.close(say)
    heard = b""
    while heard.count(b"\n") < lines:
        more = os.read(hear, 4096)
        assert more, "the worker ended by itself"
        heard += more
    time.sleep(seconds)  # the moment of the kill is the random thing here; nothing waits for it
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(hear, 65536):
        heard += more
    os.close(hear)
    return heard.decode().split("\n")[:-1]
