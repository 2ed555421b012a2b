"""Cards in callers' sessions, kept up with the jobs of this runner. Source: spec 003, D6 and D8; `store.mirror`."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, InvalidStateError

from ..clock import Clock
from ..errors import Closed, ForkedProcess, OpenJobsError, UnknownSession
from ..ids import short
from ..jobs import Job
from ..store import JobStore
from .timers import Timers

log = logging.getLogger(__name__)

#: pauses before a card is tried again: the first, and the longest
_PAUSES_S = (0.1, 5.0)


class _Card:
    __slots__ = ("done", "job", "pause_s", "trying", "warned")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done: Future[bool] = Future()
        self.trying = False
        self.pause_s = _PAUSES_S[0]
        self.warned = False


class Mirrors:
    """Guarantees: the card of a job that was given to `follow` is written after what it shows is durable, and tried
    again for as long as the runner lives; nothing waits for it. A caller's session that is gone needs no card.

    Assumptions: `follow` is called with durable states, in order; the marker of the job's session stays until the
    future is done, so that a recovery looks there.

    What the lock protects: the cards on their way. It is never held while the store is asked.
    """

    def __init__(self, store: JobStore, timers: Timers, clock: Clock) -> None:
        self._store = store
        self._timers = timers
        self._clock = clock
        self._lock = threading.Lock()
        self._cards: dict[str, _Card] = {}
        self._closed = False
        #: set while no card is on its way
        self.idle = threading.Event()
        self.idle.set()

    def __len__(self) -> int:
        with self._lock:
            return len(self._cards)

    def follow(self, job: Job) -> Future[bool]:
        """See to the card of a job whose caller lives elsewhere; done once it is durable, or there is nothing to write.

        Never raises and never waits. The future has `Closed` when the runner closes first.
        """
        with self._lock:
            card = self._cards.get(job.job_id)
            if card is None:
                card = self._cards[job.job_id] = _Card(job)
                self.idle.clear()
            else:
                card.job = job  # who is trying sees that there is more to say
            begin = not card.trying
            card.trying = True
        if begin:
            self._try(card)
        return card.done

    def wait_idle(self, timeout_s: float) -> bool:
        return self._clock.wait(self.idle, timeout_s)

    def close(self) -> None:
        """Nothing is tried any more; what is on its way is left to recovery."""
        with self._lock:
            self._closed = True
            left = list(self._cards.values())
        for card in left:
            with contextlib.suppress(InvalidStateError):  # it was written at the last moment
                card.done.set_exception(Closed("the runner closed before the card was written; recovery mends it"))

    # --- within ---

    def _try(self, card: _Card) -> None:
        job = card.job
        try:
            future = self._store.mirror_later(job)
        except Exception as error:
            self._settled(card, job, error)
            return
        future.add_done_callback(lambda done: self._settled(card, job, done.exception()))

    def _settled(self, card: _Card, job: Job, error: BaseException | None) -> None:
        """On the committer's thread, or whoever tried: short, and never waiting."""
        if isinstance(error, UnknownSession):
            log.warning("job %s: the session %s of its caller is gone", job.job_id, job.caller_session_id)
            error = None
        if error is not None:
            self._again(card, job, error)
            return
        with self._lock:
            more = card.job is not job and not self._closed
            if not more:
                self._cards.pop(job.job_id, None)
                if not self._cards:
                    self.idle.set()
        if more:
            self._timers.call_in(0.0, lambda: self._try(card))
        else:
            with contextlib.suppress(InvalidStateError):
                card.done.set_result(True)

    def _again(self, card: _Card, job: Job, error: BaseException) -> None:
        if self._closed or isinstance(error, Closed | ForkedProcess):
            return
        if not card.warned:
            card.warned = True
            expected = isinstance(error, OpenJobsError | OSError)
            log.log(
                logging.WARNING if expected else logging.ERROR,
                "job %s: its card in session %s cannot be written now, and is tried again until it can: %s",
                short(job.job_id),
                job.caller_session_id,
                error,
                exc_info=None if expected else error,
            )
        pause_s, card.pause_s = card.pause_s, min(card.pause_s * 2, _PAUSES_S[1])
        self._timers.call_in(pause_s, lambda: self._try(card))
