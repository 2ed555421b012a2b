"""The settler: hands decided events to the store, and acts on what became of them.

The store's futures complete on its committer's thread, which must not wait for a fact's fsync or
for a listener; there they are only put into a queue, and one thread of the runner's own goes on. It
takes what is there in pieces: first everything of a piece is recorded (facts share a sync), then each
is announced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import attrs

from ..errors import Bug, Closed, InvalidTransition, UnknownJob, UnknownNode
from ..ids import IdMaker
from ..jobs import CancelRequested, Errored, Event, Job, Started
from ..session.rows import with_prompt_of
from ..store import JobStore
from .ending import Ended, Ending
from .hub import JOB_STATUS, Hub
from .live import LiveJob, Phase, Roster
from .strangers import leave_if_forked
from .turn import clean, describe

log = logging.getLogger(__name__)

#: a piece: so many ends at most wait for each other's records
_PIECE = 16


@attrs.define(eq=False, slots=True)
class _Call:
    """Something for the settler's thread: `record` for the whole piece, then `call`, one after the other."""

    call: Callable[[], object]
    record: Callable[[], object] | None = None


@attrs.define(eq=False, slots=True)
class _Told:
    """The store's answer to an event."""

    live: LiveJob
    event: Event
    done: Future[Job]
    #: as it stands after the event; None where that failed
    job: Job | None = None
    #: the end that it was is written down where readers elsewhere look
    recorded: bool = False


class Settler:
    """Guarantees

    - Events of one job, and of one session, reach the store in the order in which they were handed
      in, and are told in that order. No end is committed before its running.
    - Nobody hears of an end before it was recorded.
    - Every end that was decided is settled exactly once: as it was decided, as an error that says why
      the store refused it, or as somebody else ended the job in the meantime.

    Assumptions: `hand_in` is called with the roster's lock held, right where the event was decided.

    What the lock protects: the thread's start and end.
    """

    def __init__(
        self, store: JobStore, roster: Roster, ending: Ending, hub: Hub, *, new_id: IdMaker, name: str
    ) -> None:
        self._store = store
        self._roster = roster
        self._ending = ending
        self._hub = hub
        self._new_id = new_id
        self._name = name
        #: what is done with a live job whose end can never be written
        self.lost: Callable[[LiveJob, BaseException], None] = lambda live, error: None
        #: what is recorded inside the block may be written at its end
        self.together: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: held for good by the one thread that serves
        self._serves = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    # --- handing in ---

    def hand_in(self, live: LiveJob, event: Event) -> Future[Job]:
        """Never raises and never waits; a failed commit is tried again by the store."""

        def done(future: Future[Job]) -> None:
            told = _Told(live, event, future)
            if future.exception() is None:
                # At once, so that no reader goes back behind what it was told.
                told.job = live.job = with_prompt_of(future.result(), live.job)
            self._queue.put(_Call(lambda: self._told(told), lambda: self._record(told)))

        try:
            return self._store.apply_later(live.job_id, event, keep=True, when_done=done)
        except Exception as error:
            failed: Future[Job] = Future()
            failed.add_done_callback(done)
            failed.set_exception(error)
            return failed

    def post(self, call: Callable[[], object], record: Callable[[], object] | None = None) -> None:
        """Run `call` on the settler's thread, after what was put there before; `record` a little earlier."""
        self._queue.put(_Call(call, record))

    # --- the thread ---

    def start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                # Interrupted in the middle, whether it has begun is unknown: then the next to come begins another
                # one, and of the two the first one serves.
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                if self._thread is None:
                    self._thread = thread

    def close(self, timeout_s: float) -> None:
        """Ends after what is in the queue now; waits for that, unless called by its own thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _serve(self) -> None:
        if not self._serves.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        last = False
        while not last:
            piece, last = self._take()
            with self.together():
                for each in piece:
                    if each.record is not None:
                        self._contained(each.record)
            for each in piece:
                self._contained(each.call)
            piece.clear()  # it holds jobs; the next one may be long in coming

    def _take(self) -> tuple[list[_Call], bool]:
        """What is there, at least one and at most a piece; whether it is the last."""
        piece: list[_Call] = []
        with contextlib.suppress(queue.Empty):
            while len(piece) < _PIECE:
                call = self._queue.get(block=not piece)
                if call is None:
                    return piece, True
                piece.append(call)
        return piece, False

    def _contained(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            log.exception("%s", Bug(f"settling an event failed: {error}"))
        leave_if_forked(self._pid)

    # --- what became of an event ---

    def _record(self, told: _Told) -> None:
        if told.job is not None and told.job.terminal:
            told.recorded = True
            self._ending.record(Ended(job=told.job, live=told.live))

    def _told(self, told: _Told) -> None:
        if told.job is not None:
            self._committed(told.live, told.job, recorded=told.recorded)
            return
        error = told.done.exception()
        assert error is not None
        if isinstance(told.event, Started | CancelRequested):
            self._step_refused(told.live, told.event, error)
        else:
            self._end_refused(told.live, told.event, error)

    def _committed(self, live: LiveJob, job: Job, *, recorded: bool = False) -> None:
        if not job.terminal:
            self._hub.publish(JOB_STATUS, job)
            return
        ended = Ended(job=job, live=live)
        if not recorded:
            self._ending.record(ended)
        self._ending.announce(ended)

    def _step_refused(self, live: LiveJob, event: Event, error: BaseException) -> None:
        """Running, or a cancel request, was not written. The end is what counts, and follows by itself."""
        level = logging.DEBUG if isinstance(error, InvalidTransition | Closed) else logging.WARNING
        log.log(level, "job %s: %s was not written: %s", live.job_id, type(event).__name__, error)

    def _end_refused(self, live: LiveJob, event: Event, error: BaseException) -> None:
        """The store refused an end. There must be one all the same (invariant 1)."""
        if live.phase is Phase.SETTLED:
            return  # an interrupt made it uncertain whether an end was handed in, so another one was
        if isinstance(error, Closed):
            log.error("job %s: its end could not be written before the store closed; recovery will", live.job_id)
        elif isinstance(error, UnknownJob) and live.phase is Phase.SUBMITTED:
            self.lost(live, error)  # a failed submit that indeed wrote nothing
        elif isinstance(error, InvalidTransition) and (found := self._store.outcome(live.job_id)).terminal:
            found = with_prompt_of(found, live.job)
            log.warning("job %s was ended by somebody else as %s", live.job_id, found.status.value)
            live.job = found
            self._committed(live, found)
        elif live.end_refused:
            log.error("job %s: its end cannot be written: %s", live.job_id, error)
            self.lost(live, error)
        else:
            live.end_refused = True
            self._end_as_error(live, event, error)

    def _end_as_error(self, live: LiveJob, event: Event, error: BaseException) -> None:
        text = str(error) if isinstance(error, UnknownNode) else f"the end could not be written: {describe(error)}"
        result_text = getattr(event, "result_text", None)
        with self._roster.lock:
            self.hand_in(live, Errored(event_id=self._new_id(), error=clean(text), result_text=result_text))
