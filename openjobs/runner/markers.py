"""Active markers: which sessions a recovery must look into, should this runner die."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..clock import Clock
from ..store import JobStore
from .timers import Timers

log = logging.getLogger(__name__)

#: a session without unfinished jobs keeps its marker for so long
IDLE_S = 60.0


class _Marker:
    __slots__ = ("idle_since", "lock", "there", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: whom it is for; counted by name, so that who was interrupted can take back what may have been counted
        self.users: set[object] = set()
        self.there = False
        self.idle_since = 0.0


class Markers:
    """A session is marked, durably, before `use` returns, and stays so while it is in use.

    A marker is made once and taken away lazily, after a minute without use, so that a session with
    one short job after the other costs two syncs and not two per job.

    What each lock protects: `_guard` the counts; a marker's own lock its file, so that the marking
    of one session never waits for that of another. Clearing and marking of one session exclude each
    other: (1) `sweep` takes the marker's lock and sees no use, (2) a submit counts its use and waits
    for that lock, (3) `sweep` clears and lets go, (4) the submit finds `there` false and marks again.
    """

    def __init__(
        self,
        store: JobStore,
        runner_id: str,
        clock: Clock,
        timers: Timers,
        idle_s: float = IDLE_S,
        post: Callable[[Callable[[], object]], object] = lambda call: call(),
    ) -> None:
        """`post` runs a call on a thread that no interrupt reaches: a timer that is half set would stay so."""
        self._post = post
        self._store = store
        self._runner_id = runner_id
        self._clock = clock
        self._timers = timers
        self._idle_s = idle_s
        self._sweeping = False
        self._guard = threading.Lock()
        self._markers: dict[str, _Marker] = {}

    def use(self, session_id: str, user: object) -> None:
        """Raises what marking raises; then the use does not count."""
        with self._guard:
            begin_sweeping, self._sweeping = not self._sweeping, True
            marker = self._markers.get(session_id)
            if marker is None:
                marker = self._markers[session_id] = _Marker()
            marker.users.add(user)
            there = marker.there
        if begin_sweeping:
            self._post(lambda: self._timers.call_in(self._idle_s, self.sweep))
        if there:
            return
        try:
            with marker.lock:
                if not marker.there:
                    self._store.active.mark(self._runner_id, session_id)
                    marker.there = True
        except BaseException:
            self.done(session_id, user)
            raise

    def done(self, session_id: str, user: object) -> None:
        """Twice is once; of a user that never came, nothing."""
        with self._guard:
            marker = self._markers.get(session_id)
            if marker is None or user not in marker.users:
                return
            marker.users.remove(user)
            if not marker.users:
                marker.idle_since = self._clock.monotonic()

    def sweep(self) -> None:
        """Take away the markers of sessions that have been idle for long enough.

        Not while an end is kept that could not be written: something may still follow it, as a card in
        another session.
        """
        if self._store.unsettled() == 0:
            self._sweep()
        with self._guard:
            self._sweeping = bool(self._markers)
            again = self._sweeping
        if again:
            self._timers.call_in(self._idle_s, self.sweep)

    def __len__(self) -> int:
        with self._guard:
            return len(self._markers)

    def _sweep(self) -> None:
        before = self._clock.monotonic() - self._idle_s
        with self._guard:
            idle = [(s, m) for s, m in self._markers.items() if not m.users and m.idle_since <= before]
        for session_id, marker in idle:
            self._clear(session_id, marker)

    def _clear(self, session_id: str, marker: _Marker) -> None:
        with marker.lock:
            with self._guard:
                if marker.users:
                    return
                was_there, marker.there = marker.there, False
            if was_there:
                try:
                    self._store.active.clear(self._runner_id, session_id)
                except OSError as error:
                    # Harmless: a marker too many costs the next recovery one look.
                    log.warning("the active marker of session %s could not be removed: %s", session_id, error)
            with self._guard:
                if not marker.users:
                    self._markers.pop(session_id, None)
