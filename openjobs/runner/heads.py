"""Looking for what others committed: one cheap value of each watched session, again and again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .timers import Timers

log = logging.getLogger(__name__)

#: so that a change is acted upon within half a second, its commit included
INTERVAL_S = 0.2

#: called with whether the session changed since the last look
Look = Callable[[bool], None]


class Watch:
    __slots__ = ("look", "session_id", "stopped")

    def __init__(self, session_id: str, look: Look) -> None:
        self.session_id = session_id
        self.look = look
        self.stopped = False


class Heads:
    """Calls each watch's `look` about five times a second, on the timers' thread.

    With nothing to watch nothing runs. The first look always says "changed", so what happened
    between reading and watching is not lost.

    What the lock protects: the watches and the last known values.
    """

    def __init__(self, read: Callable[[str], object], timers: Timers, interval_s: float = INTERVAL_S) -> None:
        """`read` gives a session's value: `store.head`, or `store.asked` where only requests count."""
        self._read = read
        self._timers = timers
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._watches: dict[str, dict[Watch, None]] = {}
        self._last: dict[str, object] = {}
        self._ticking = False

    def watch(self, session_id: str, look: Look) -> Watch:
        watch = Watch(session_id, look)
        with self._lock:
            self._watches.setdefault(session_id, {})[watch] = None
            self._last.pop(session_id, None)
            if self._ticking:
                return watch
            self._ticking = True
        self._timers.call_in(self._interval_s, self._tick)
        return watch

    def stop(self, watch: Watch) -> None:
        """No look begins after this returns, but one may be under way."""
        watch.stopped = True
        with self._lock:
            of_session = self._watches.get(watch.session_id)
            if of_session is not None:
                of_session.pop(watch, None)
                if not of_session:
                    del self._watches[watch.session_id]
                    self._last.pop(watch.session_id, None)

    def _tick(self) -> None:
        try:
            self.look_now()
        finally:
            with self._lock:
                self._ticking = bool(self._watches)
                again = self._ticking
            if again:
                self._timers.call_in(self._interval_s, self._tick)

    def look_now(self) -> None:
        with self._lock:
            sessions = list(self._watches)
        for session_id in sessions:
            changed = self._changed(session_id)
            with self._lock:
                watches = list(self._watches.get(session_id, ()))
            for watch in watches:
                self._look(watch, changed)

    def _changed(self, session_id: str) -> bool:
        try:
            value = self._read(session_id)
        except Exception as error:
            log.warning("session %s could not be read: %s", session_id, error)
            return False
        with self._lock:
            if session_id not in self._watches:
                return False
            changed = self._last.get(session_id) != value
            self._last[session_id] = value
            return changed

    def _look(self, watch: Watch, changed: bool) -> None:
        if watch.stopped:
            return
        try:
            watch.look(changed)
        except Exception:
            log.exception("looking at session %s failed; the next look is in %s s", watch.session_id, self._interval_s)
