"""Cancelling: who is asked, what is decided at once, and what happens when asking is not enough.

Source: spec 003, D5 and scenario D; R6.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import attrs

from ..ids import IdMaker, short
from ..jobs import Cancelled, CancelRequested, Errored, Event, Job
from ..store import JobStore
from ..store.damage import once
from .client import under
from .heads import Heads, Watch
from .live import LiveJob, Phase, Roster
from .pool import Pool
from .settler import Settler
from .timers import Timers

log = logging.getLogger(__name__)

STUCK = "cancel timed out, worker may be stuck"
SHUTDOWN = "worker pool shutdown"
SHUTDOWN_REASON = "shutdown"


@attrs.frozen(kw_only=True, slots=True)
class StuckThread:
    """A thread that was given up and still runs."""

    job_id: str
    thread_name: str


class Canceller:
    """Decides about this runner's own jobs.

    Guarantees

    - A job that is pending or queued when it is cancelled never starts: taking it from the line and
      ending it are one step under the lock that a worker's claim needs too.
    - A running job has its event set before `cancel` returns, and is terminal `cancel_timeout_s`
      later, whatever it does.
    - What is under a cancelled job is cancelled with it, jobs on their way to the store included:
      (1) a submit registers its job under the parent, or is refused, with the lock held; (2) a
      cancel marks the parent and walks its descendants with the lock held; so either the walk meets
      the child, or the submit meets the mark.

    What each lock protects: the roster's lock all jobs, and the list of stuck threads.
    """

    def __init__(
        self,
        roster: Roster,
        pool: Pool[LiveJob],
        settler: Settler,
        timers: Timers,
        *,
        new_id: IdMaker,
        cancel_timeout_s: float,
        below: Callable[[Job, str | None], None],
        asked: Callable[[LiveJob], None] = lambda live: None,
    ) -> None:
        """`below` asks what is under a job and not known to the roster as such; `asked` hears of each running job
        whose event was set, with the lock held. Both wait for nothing."""
        self._roster = roster
        self._pool = pool
        self._settler = settler
        self._timers = timers
        self._new_id = new_id
        self._cancel_timeout_s = cancel_timeout_s
        self.below = below
        self._asked = asked
        self._stuck: dict[LiveJob, StuckThread] = {}

    # --- asking ---

    def cancel(self, live: LiveJob, reason: str | None, *, committed: bool = False) -> list[Future[Job]]:
        """Cancel a job and all that is under it; the futures of what was decided about the job itself.

        `committed` says that the request is in the store already: another process asked.
        """
        try:
            with self._roster.lock:
                futures = self._ask(live, reason, committed=committed)
                for each in list(live.descendants()):
                    self._ask(each, under(live.job, reason))
            return futures
        except BaseException as error:
            if not isinstance(error, Exception):
                # A Ctrl-C in the main thread: what was decided and not handed in would never be.
                self._settler.post(functools.partial(self.complete, live, reason))
            raise

    def complete(self, live: LiveJob, reason: str | None) -> None:
        """As `cancel`, where an earlier one may have been interrupted: once more from its beginning. An end that was
        handed in already is refused the second time, and changes nothing."""
        with self._roster.lock:
            for each in (live, *list(live.descendants())):
                why = reason if each is live else under(live.job, reason)
                if each.cancel_asked:
                    why = each.cancel_reason
                if each.phase is Phase.ENDED:
                    self._settler.hand_in(each, Cancelled(event_id=self._new_id(), reason=why))
                else:
                    each.cancel_asked = False
                    self._ask(each, why)

    def _ask(self, live: LiveJob, reason: str | None, *, committed: bool = False) -> list[Future[Job]]:
        """With the lock held."""
        if live.cancel_asked or live.phase >= Phase.ENDED:
            return []
        live.cancel_asked = True
        live.cancel_reason = reason
        live.cancel_event.set()
        if live.phase is Phase.QUEUED:
            self._roster.line.remove(live)
            return [self.end(live, Cancelled(event_id=self._new_id(), reason=reason))]
        if live.phase is not Phase.RUNNING:
            return []  # still on its way to the store: the submit ends it
        for wake in live.on_cancel.values():
            wake()
        self._asked(live)
        live.timers.append(self._timers.call_in(self._cancel_timeout_s, lambda: self.force(live)))
        return [] if committed else [self._settler.hand_in(live, CancelRequested(reason=reason))]

    def end_in_time(self, live: LiveJob) -> None:
        """A running job with a `timeout_s` is cancelled after it, with that as the reason."""
        timeout_s = live.job.timeout_s
        if timeout_s is None:
            return
        with self._roster.lock:
            if live.phase is Phase.RUNNING:
                live.timers.append(self._timers.call_in(timeout_s, lambda: self._out_of_time(live, timeout_s)))

    def _out_of_time(self, live: LiveJob, timeout_s: float) -> None:
        reason = f"timed out after {timeout_s:g} s"
        self.cancel(live, reason)
        self.below(live.job, reason)

    def end(self, live: LiveJob, event: Event) -> Future[Job]:
        """With the lock held: the end is decided, and nobody can decide another one."""
        self._roster.move(live, Phase.ENDED)
        for timer in live.timers:
            timer.cancel()
        live.timers.clear()
        return self._settler.hand_in(live, event)

    # --- when asking is not enough ---

    def force(self, live: LiveJob) -> None:
        """The job did not stop in time: it ends as cancelled and its thread is given up (D5, 5)."""
        with self._roster.lock:
            if live.phase is not Phase.RUNNING:
                return
            self._give_up(live)
            self.end(
                live,
                Cancelled(
                    event_id=self._new_id(), reason=live.cancel_reason, error=STUCK, result_text=live.partial_text
                ),
            )
            tokens = self._pool.reserve()
        log.warning("job %s did not stop within %g s of being asked; its thread is given up", live.job_id,
                    self._cancel_timeout_s)  # fmt: skip
        self._pool.start(tokens)

    def give_up_running(self) -> None:
        """The runner closes: whoever still runs is errored."""
        with self._roster.lock:
            for live in self._roster.in_phase(Phase.RUNNING):
                self._give_up(live)
                self.end(live, Errored(event_id=self._new_id(), error=SHUTDOWN, result_text=live.partial_text))

    def _give_up(self, live: LiveJob) -> None:
        assert live.seat is not None
        live.given_up = True
        self._pool.give_up(live.seat)
        self._stuck[live] = StuckThread(job_id=live.job_id, thread_name=live.seat.thread.name)

    def came_back(self, live: LiveJob) -> None:
        """With the lock held: the thread of a job that was given up has returned after all."""
        self._stuck.pop(live, None)

    def stuck(self) -> tuple[StuckThread, ...]:
        """With the lock held."""
        return tuple(self._stuck.values())

    # --- closing ---

    def cancel_waiting(self) -> None:
        """The runner closes: what has not started ends as cancelled."""
        with self._roster.lock:
            for live in (*self._roster.line, *self._roster.in_phase(Phase.SUBMITTED)):
                self._ask(live, SHUTDOWN_REASON)

    def set_events(self) -> None:
        """The runner closes: whoever still runs is asked to stop, and ends as it ends."""
        with self._roster.lock:
            for live in self._roster.in_phase(Phase.RUNNING):
                if not live.cancel_asked:
                    live.cancel_reason = SHUTDOWN_REASON
                live.cancel_event.set()
                for wake in live.on_cancel.values():
                    wake()
                self._asked(live)


class Requests:
    """Notices what other processes ask of this runner's jobs (design: "seen within half a second").

    A session is watched from its first unfinished job until a look finds none left.

    What the lock protects: the watches. It is taken before the roster's, never after.
    """

    def __init__(self, store: JobStore, roster: Roster, heads: Heads, canceller: Canceller) -> None:
        self._store = store
        self._roster = roster
        self._heads = heads
        self._canceller = canceller
        self._lock = threading.Lock()
        self._watches: dict[str, Watch] = {}
        #: once, though every change of the session leads to another look
        self._say_damage = once(
            lambda session_id, error: log.warning(
                "session %s: requests to jobs that stand there are not seen: %s", session_id, error
            )
        )

    def expects(self, session_id: str) -> bool:
        """A watch is only dropped while the roster shows no job, with the roster's lock held."""
        return session_id in self._watches

    def expect(self, session_id: str) -> None:
        """Called after a job of the session is in the roster."""
        with self._lock:
            if session_id not in self._watches:
                self._watches[session_id] = self._heads.watch(
                    session_id, lambda changed: self._look(session_id, changed)
                )

    def _look(self, session_id: str, changed: bool) -> None:
        with self._lock, self._roster.lock:
            if not self._roster.by_session.get(session_id):
                watch = self._watches.pop(session_id, None)
                if watch is not None:
                    self._heads.stop(watch)
                return
        if changed:
            self.act_upon(self._store.unfinished(session_id, functools.partial(self._say_damage, session_id)))

    def act_upon(self, rows: Iterable[Job]) -> None:
        for row in rows:
            if row.cancel_requested_at is None:
                continue
            with self._roster.lock:
                live = self._roster.jobs.get(row.job_id)
                news = live is not None and not live.cancel_asked and live.phase is not Phase.SUBMITTED
            if live is not None and news:
                log.info("job %s is cancelled from elsewhere", short(row.job_id))
                self._canceller.cancel(live, row.cancel_reason, committed=True)
                self._canceller.below(row, row.cancel_reason)
