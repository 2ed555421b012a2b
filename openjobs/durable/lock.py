"""Locks between processes, by flock.

The kernel gives a flock back when its last descriptor closes, so a killed process never leaves one
behind. A forked child inherits the descriptor and would keep the lock alive: every descriptor here
is closed in the child (closed, never unlocked: unlocking would take the parent's lock away). The
owner itself unlocks before it closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref

from .disk import AnyPath, Disk

_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()
#: protects `_open_locks` and the descriptors in it; also held over every fork, see `no_fork`
_guard = threading.RLock()


def no_fork() -> contextlib.AbstractContextManager[bool]:
    """No thread of this process forks (through `os.fork`) meanwhile.

    Without it: 1. a thread locks a file, 2. another forks, 3. the first writes down its descriptor.
    The child has a copy that it knows nothing of, and the lock outlives its owner. Closing has the
    same race. So opening, locking and writing down are one step, and so are striking out and closing.

    The lock itself, and no generator around it: that one an interrupt could leave in the middle.
    """
    return _guard


def is_locked(path: AnyPath) -> bool:
    """Whether anybody holds the flock on that file. Makes nothing, follows no link, waits for no pipe.

    Looks with a shared lock, which never disturbs the owner, so that two who look never take each other for one.
    A file that is not there is held by nobody.
    """
    with no_fork():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


class FileLock:
    """An exclusive lock on a file that stays where it is.

    Guarantees: at most one holder on this machine, threads of one process included.
    Assumptions: a local file system; the file is never unlinked while somebody may hold it.
    """

    def __init__(self, path: AnyPath, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        return self._fd is not None

    def try_acquire(self) -> bool:
        """True when the lock is ours now; False when somebody (we, too) has it. Never waits."""
        with no_fork():
            if self._fd is not None:
                return False
            fd = self._disk.open_update(self.path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
            _open_locks.add(self)
            return True

    def acquire(self, *, attempts: int) -> bool:
        """As `try_acquire`, again after jittered, growing pauses of 1 to 50 ms; False after so many tries.

        Counted, not timed: a clock that a test has stopped must not make it wait for ever.
        """
        if self.try_acquire():
            return True
        from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_random_exponential

        tries = Retrying(
            stop=stop_after_attempt(attempts),
            wait=wait_random_exponential(multiplier=0.001, max=0.05),
            retry=retry_if_result(lambda got: not got),
            retry_error_callback=lambda state: False,
        )
        return bool(tries(self.try_acquire))

    def release(self) -> None:
        with no_fork():
            fd = self._fd
            if fd is not None:
                # A child that another thread is just starting has a copy until it execs: closing ours
                # alone would leave the lock with that copy. First of all, so that who is interrupted can ask again.
                fcntl.flock(fd, fcntl.LOCK_UN)
                self._fd = None
                os.close(fd)
            _open_locks.discard(self)

    def _forget_in_child(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


def _after_fork_in_child() -> None:
    for lock in list(_open_locks):
        lock._forget_in_child()
    _open_locks.clear()
    _guard.release()


def _before_fork() -> None:
    _guard.acquire()


def _after_fork_in_parent() -> None:
    _guard.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
