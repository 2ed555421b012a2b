"""A forked child that runs one function and answers with a line: for what a fork may and may not keep."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator


class Child:
    """What `forked` yields. The child lives until `end` (or the block's end), so that what it keeps open stays open."""

    def __init__(self, pid: int, answers: int, hold: int) -> None:
        self.pid = pid
        self._answers, self._hold = answers, hold
        self._ended = False

    def answer(self) -> str:
        """The line that the child's function returned; blocks until there is one."""
        got = b""
        while not got.endswith(b"\n"):
            more = os.read(self._answers, 4096)
            if not more:
                raise AssertionError(f"the child ended without an answer: {got.decode()!r}")
            got += more
        return got.decode().removesuffix("\n")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Let it go, and wait until it is gone."""
        if self._ended:
            return
        self._ended = True
        os.close(self._hold)
        os.waitpid(self.pid, 0)
        os.close(self._answers)


@contextlib.contextmanager
def forked(function: Callable[[], str]) -> Iterator[Child]:
    """`function` in a forked child. It never returns into pytest, whatever happens in it."""
    answers, say = os.pipe()
    held, hold = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(answers)
            os.close(hold)
            os.write(say, function().encode() + b"\n")
            os.read(held, 1)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(0)
    os.close(say)
    os.close(held)
    child = Child(pid, answers, hold)
    try:
        yield child
    finally:
        child.end()
