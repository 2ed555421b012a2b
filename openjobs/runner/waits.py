"""Waits on a runner: its own jobs tell by themselves, others are looked at; a job lends its slot meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..errors import CancelledError, InvalidInput
from ..jobs import Job
from .client import JobClient, answers
from .live import LiveJob, Phase, Roster
from .pool import Pool
from .recent import Recent
from .waiting import Waiter
from .worker import current_job


class RunnerWait:
    """A wait under way, from its making to `close`. Blocks nobody; calls `wake` when it is over."""

    def __init__(
        self,
        ids: Sequence[str],
        mode: str,
        wake: Callable[[], None],
        *,
        roster: Roster,
        pool: Pool[LiveJob],
        recent: Recent,
        client: JobClient,
        get: Callable[[str], Job],
        waiting_job_id: str | None = None,
    ) -> None:
        self._ids = ids
        self._roster = roster
        self._pool = pool
        self._get = get
        self._waiter = Waiter(ids, mode, wake)
        self._own: list[LiveJob] = []
        self._stops: list[Callable[[], None]] = []
        self._me = self._waiting_job(waiting_job_id)
        self._lent = False
        self._interruptible = False
        self._interrupted = False
        others = self._join(recent)
        try:
            for job_id in others:
                self._stops.append(client.follow(job_id, self._waiter))
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> bool:
        return self._waiter.done or self._stopped()

    def close(self, *, block: bool = True) -> None:
        """Stop waiting. In a job this takes the slot back, waiting for a free one unless `block` is false."""
        for stop in self._stops:
            stop()
        self._interrupted = self._stopped() and not self._waiter.done
        with self._roster.lock:
            for live in self._own:
                live.waiters.pop(self._waiter, None)
            ready = self._take_back(self._me, block) if self._me is not None else None
        if ready is not None:
            ready.wait()

    def answers(self) -> list[Job]:
        if self._interrupted and self._me is not None:
            raise CancelledError(f"job {self._me.job_id} was asked to stop while it waited")
        return answers(self._ids, self._waiter, self._get)

    def _waiting_job(self, named: str | None) -> LiveJob | None:
        """The job of this runner that waits: the one named, else the one in whose turn we are, if we are in one."""
        me = current_job.get() if named is None else self._roster.jobs.get(named)
        if me is None or me.phase is not Phase.RUNNING or self._roster.jobs.get(me.job_id) is not me:
            return None
        if me.job_id in self._ids:
            raise InvalidInput(f"job {me.job_id} cannot wait for itself")
        return me

    def _join(self, recent: Recent) -> list[str]:
        """Wait for what is live here; returns the ids that are not."""
        others: list[str] = []
        with self._roster.lock:
            for job_id in dict.fromkeys(self._ids):
                live = self._roster.jobs.get(job_id)
                ended = live.job if live is not None and live.phase is Phase.SETTLED else recent.get(job_id)
                if ended is not None:
                    self._waiter.ended(ended)
                elif live is not None:
                    live.waiters[self._waiter] = None
                    self._own.append(live)
                    self._roster.line.want(live)
                else:
                    others.append(job_id)
            if self._me is not None and not self._waiter.done:
                self._lend(self._me, only_own=not others)
            tokens = self._pool.reserve()
        self._pool.start(tokens)
        return others

    def _lend(self, me: LiveJob, only_own: bool) -> None:
        """With the lock held."""
        if not only_own or not all(live.is_under(me) for live in self._own):
            # What is not under it does not stop with it, so the wait must be ended for it to stop.
            self._interruptible = True
            me.on_cancel[self._waiter] = self._waiter.wake
            if me.cancel_event.is_set():
                self._waiter.wake()
        if self._own and me.seat is not None:
            self._lent = True
            me.waits += 1
            if me.waits == 1:
                self._pool.lend(me.seat)

    def _take_back(self, me: LiveJob, block: bool) -> threading.Event | None:
        """With the lock held."""
        me.on_cancel.pop(self._waiter, None)
        if not self._lent or me.seat is None:
            return None
        self._lent = False
        me.waits -= 1
        return None if me.waits else self._pool.take_back(me.seat, wait=block)

    def _stopped(self) -> bool:
        return self._interruptible and self._me is not None and self._me.cancel_event.is_set()
