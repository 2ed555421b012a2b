"""Group commit: one thread that makes everything that waits durable, session by session.

Source: docs/git-store.md, "One committer".
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import attrs

from ..clock import Clock
from ..errors import Bug, Closed, Damaged, OpenJobsError, OutcomeUnknown, Refused, SessionBusy, StoreWriteFailed
from ..repo import MAINTAIN_GAP_S, MAINTAIN_WAIT_S, Change, Maintenance, Outcome, Repository, RepositoryBusy, View
from ..sign import Answer, Sign
from .index import Entry, Index

_log = logging.getLogger(__name__)

#: at most this many events of one session in one batch
BATCH_LIMIT = 64
#: after a batch the session's locks stay free for this long, so that foreign programs get in and
#: the next batch gathers (docs/performance.md)
GAP_S = 0.0004
#: under load the gap is up to this share of what the last batch took: who was answered comes again, and a
#: batch costs little more for a few events more. It ends early when as many wait as were in that batch.
GATHER_SHARE = 0.4
GATHER_FROM = 8
GATHER_AT_MOST_S = 0.01
#: an event that nobody waits for lets the next one of its session come along: a short job's `running` and end
#: then share a batch, which halves what that job costs after its submit (docs/performance.md)
LINGER_S = 0.003
_BUSY_PAUSES_S = (0.001, 0.05)
_FAILED_PAUSES_S = (0.05, 5.0)
#: so often an event that must not fail meets an error that should not be; then that is its outcome
_FAULTS = 5


@attrs.define(kw_only=True, slots=True, eq=False)
class Operation:
    """One event on its way into git.

    `decide` is pure and may be called more than once (`repo.Transaction`). `keep` means: it has
    happened already (a job ended), so failing is no option; it is tried again until it is durable.
    """

    decide: Callable[[View], Change | None]
    #: what the future gives, asked for after the commit is durable
    result: Callable[[], Any]
    future: Future[Any] = attrs.field(factory=Answer)
    keep: bool = False
    #: nobody waits for it, so it may stay `LINGER_S` for company
    lingers: bool = False
    #: on the monotonic clock; None waits for ever
    give_up_at: float | None = None
    #: written to the index before the commit is visible
    entry: Entry | None = None
    #: the job whose commit it becomes
    job_id: str | None = None
    #: told the commit that this event became, before the next event of the batch decides
    committed: Callable[[str], None] | None = None
    failures: int = 0
    #: how many of these nobody thought of
    faults: int = 0
    #: once it is durable the repository is brought to its smallest size, in steps between the batches
    collect: bool = False


class Sessions(Protocol):
    """Where the committer gets repositories; the store."""

    def repository(self, session_id: str) -> Repository: ...
    def preface(self, session_id: str) -> Operation:
        """What is decided before each batch: our rows again, where a foreign commit put them back."""
        ...

    def rest(self, session_id: str) -> None:
        """The session has nothing waiting; its files may be given back."""
        ...

    def committed(
        self, session_id: str, before: str | None, after: str | None, made: Sequence[tuple[str, str]]
    ) -> None:
        """A batch went from commit `before` to commit `after`; `made` are the job ids and commits in it."""
        ...


@attrs.define(slots=True, eq=False)
class _Upkeep:
    """A repository on its way to its smallest size. Touched by the committer's thread only."""

    operation: Operation
    maintenance: Maintenance
    give_up_at: float
    #: when its next step may begin while nothing waits
    idle_at: float = 0.0
    #: and while something does: batches get as much time as its last step took
    shared_at: float = 0.0


class _Lane:
    """What waits for one session, and when it may be tried next."""

    __slots__ = ("enough", "linger_until", "not_before", "outcome_unknown", "pause_s", "upkeep", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Operation] = deque()
        self.upkeep: deque[_Upkeep] = deque()
        self.not_before = 0.0
        #: in the future only while nothing but lingering events waits
        self.linger_until = 0.0
        self.pause_s = 0.0
        self.outcome_unknown = False
        #: so many events end the gap before its time
        self.enough = 0

    def add(self, operations: Sequence[Operation], now: float) -> None:
        if not all(op.lingers for op in operations):
            self.linger_until = 0.0
        elif not self.waiting:
            self.linger_until = now + LINGER_S
        self.waiting.extend(operations)

    def due(self, now: float) -> bool:
        return now >= self.due_at or (self.enough > 0 and len(self.waiting) >= self.enough)

    @property
    def due_at(self) -> float:
        return max(self.not_before, self.linger_until)

    def rest(self, now: float, took_s: float, events: int, gap_s: float) -> None:
        """The gap after a batch that was made durable."""
        self.pause_s = 0.0
        gather = gap_s > 0 and events >= GATHER_FROM
        self.enough = events if gather else 0
        self.not_before = now + (max(gap_s, min(GATHER_SHARE * took_s, GATHER_AT_MOST_S)) if gather else gap_s)


class Committer:
    """Guarantees

    - Events of one session become commits in the order in which they were given.
    - A future completes only after its commit is durable, or with the reason why it never will be.
    - A session whose lock somebody holds, or whose disk is full, never holds up the others.

    Assumptions: one committer a process and home; `Repository.transact` is called by its thread only.

    What the lock protects: the lanes, `_closing`, and the thread's start. It is never held while a
    repository is touched or a future completes.
    """

    def __init__(
        self, sessions: Sessions, index: Index, clock: Clock, *, gap_s: float = GAP_S, seed: int | None = None
    ) -> None:
        self._sessions = sessions
        self._index = index
        self._clock = clock
        self._gap_s = gap_s
        self._jitter = random.Random(seed)
        self._lock = threading.Lock()
        #: somebody has handed something in since the thread looked; not a condition, see `Sign`
        self._wake = Sign()
        self._lanes: dict[str, _Lane] = {}
        self._thread: threading.Thread | None = None
        #: held for good by the one thread that serves
        self._serves = threading.Lock()
        self._closing = False
        self._drop_at: float | None = None

    # --- the callers' side ---

    def add(self, session_id: str, operations: Sequence[Operation]) -> None:
        """Hand in events that stay together and in order. Raises `Closed`."""
        with self._lock:
            if self._closing:
                raise Closed("the store is closed")
            lane = self._lanes.get(session_id)
            if lane is None:
                lane = self._lanes[session_id] = _Lane()
            now = self._clock.monotonic()
            lane.add(operations, now)
            if self._thread is None:
                # Interrupted in the middle, whether it has begun is unknown: then the next to come begins another
                # one, and of the two the first one serves.
                thread = threading.Thread(target=self._run, name="openjobs-committer", daemon=True)
                thread.start()
                if self._thread is None:
                    self._thread = thread
            # Who waits for the end of a gap wakes by itself; waking it for each event would only cost.
            if lane.due(now) or lane.linger_until > now:
                self._wake.set()

    def deadline(self, patience_s: float) -> float:
        """A value for `Operation.give_up_at`."""
        return self._clock.monotonic() + patience_s

    def unsettled(self) -> int:
        """Events that are kept in memory after at least one failure."""
        with self._lock:
            return sum(1 for lane in self._lanes.values() for op in lane.waiting if op.failures)

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, commit what waits, and end. What `timeout_s` leaves fails with `Closed`."""
        with self._lock:
            self._closing = True
            self._drop_at = None if timeout_s is None else self._clock.monotonic() + timeout_s
            thread = self._thread
            self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # --- the thread ---

    def _run(self) -> None:
        if not self._serves.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        while True:
            picked = self._next()
            if picked is None:
                return
            session_id, lane, batch = picked
            if batch:
                self._commit(session_id, lane, batch)
            elif lane.upkeep:
                self._step(lane)
            self._finish(session_id, lane)

    def _next(self) -> tuple[str, _Lane, list[Operation]] | None:
        """The next session that may be tried, with its share; None when closed and empty."""
        wait_s: float | None = None
        while True:
            with self._lock:
                now = self._clock.monotonic()
                expired = self._expire(now)
                dropped = self._drop_upkeep() if self._closing else []
                if not expired and not dropped:
                    if not self._lanes and self._closing:
                        return None
                    picked = self._pick(now)
                    if isinstance(picked, tuple):
                        return picked
                    wait_s = picked
                    self._wake.clear()
            if not expired and not dropped:
                self._wake.wait(wait_s)
            # Outside the lock: a future's callback may hand in the next event.
            for op, error in expired:
                _fail(op, error)
            for upkeep in dropped:
                upkeep.maintenance.close()
                _fail(upkeep.operation, Closed("the store was closed before the session was as small as it can be"))

    def _pick(self, now: float) -> tuple[str, _Lane, list[Operation]] | float | None:
        """A session whose time has come, or how long to wait for one (None: until there is one). Holds the lock."""
        if not self._lanes:
            return None
        events_at, session_id = min(
            (
                (now if lane.due(now) else lane.due_at, sid)
                for sid, lane in self._lanes.items()
                if lane.waiting or not lane.upkeep
            ),
            default=(math.inf, ""),
        )
        steps = [
            (lane.upkeep[0].idle_at if events_at > now else lane.upkeep[0].shared_at, sid)
            for sid, lane in self._lanes.items()
            if lane.upkeep
        ]
        step_at, step_for = min(steps, default=(math.inf, ""))
        if min(events_at, step_at) > now:
            return min(events_at - now, step_at - now, self._patience(now))
        if step_at <= now:
            return step_for, self._lanes[step_for], []
        lane = self._lanes[session_id]
        lane.linger_until = 0.0
        return session_id, lane, [lane.waiting.popleft() for _ in range(min(BATCH_LIMIT, len(lane.waiting)))]

    def _patience(self, now: float) -> float:
        ends = [op.give_up_at for lane in self._lanes.values() for op in lane.waiting if op.give_up_at is not None]
        if self._drop_at is not None:
            ends.append(self._drop_at)
        return max(0.0, min(ends) - now) if ends else 3600.0

    def _expire(self, now: float) -> list[tuple[Operation, Exception]]:
        """Take out what waited too long, with the reason. Holds the lock."""
        dropping = self._drop_at is not None and now >= self._drop_at
        expired: list[tuple[Operation, Exception]] = []
        for session_id, lane in self._lanes.items():
            reasons = [_reason(session_id, lane, op, now, dropping) for op in lane.waiting]
            if any(reasons):
                expired += [(op, why) for op, why in zip(lane.waiting, reasons, strict=True) if why is not None]
                lane.waiting = deque(op for op, why in zip(lane.waiting, reasons, strict=True) if why is None)
        return expired

    def _commit(self, session_id: str, lane: _Lane, batch: list[Operation]) -> None:
        started = self._clock.monotonic()
        try:
            repository = self._sessions.repository(session_id)
            if lane.outcome_unknown:
                # A fresh write with its own barrier: a descriptor whose sync failed is never synced again.
                repository.republish()
                lane.outcome_unknown = False
            self._transact(session_id, lane, repository, batch, started)
        except RepositoryBusy:
            self._put_back(lane, batch, _BUSY_PAUSES_S)
        except OutcomeUnknown as error:
            lane.outcome_unknown = True
            self._retry_kept(session_id, lane, batch, error)
        except (StoreWriteFailed, Refused, Damaged, OSError) as error:
            self._retry_kept(session_id, lane, batch, error)
        except Exception as error:
            # No memory, or a fault of ours; the repository reads again what it knows.
            _log.exception("session %s: a batch failed in a way that should not be", session_id)
            lane.outcome_unknown = True
            self._retry_after_fault(session_id, lane, batch, error)
        except BaseException as error:
            for op in batch:
                _fail(op, Bug(str(error)))
            raise
        else:
            # The repository's housekeeping came after the answers; others get in after it.
            lane.not_before = max(lane.not_before, self._clock.monotonic() + self._gap_s)

    def _transact(
        self, session_id: str, lane: _Lane, repository: Repository, answered: list[Operation], started: float
    ) -> None:
        """One batch. Each event learns its commit before the next one decides: inside a batch the
        next view's commit is the commit of the event before it."""
        batch = [self._sessions.preface(session_id), *answered]
        before: str | None = None

        def step(number: int) -> Callable[[View], Change | None]:
            def decide(view: View) -> Change | None:
                nonlocal before
                if not number:
                    before = view.commit_id
                elif view.commit_id is not None:
                    _tell(batch[number - 1], view.commit_id)
                return batch[number].decide(view)

            return decide

        def publish() -> None:
            try:
                self._index.add([op.entry for op in batch if op.entry is not None])
            except OSError as error:
                if isinstance(error, RepositoryBusy):
                    raise
                raise StoreWriteFailed(f"the home's index could not be written: {error}; nothing changed") from error

        def durable(outcomes: list[Outcome]) -> None:
            made = [
                (op, outcome.commit_id)
                for op, outcome in zip(batch, outcomes, strict=True)
                if outcome.commit_id is not None and outcome.error is None
            ]
            for op, commit_id in made:
                _tell(op, commit_id)
            of_jobs = [(op.job_id, commit_id) for op, commit_id in made if op.job_id is not None]
            self._sessions.committed(session_id, before, made[-1][1] if made else before, of_jobs)
            now = self._clock.monotonic()
            lane.rest(now, now - started, len(answered), self._gap_s)
            for op, outcome in zip(batch, outcomes, strict=True):
                if op.collect and outcome.error is None:
                    lane.upkeep.append(_Upkeep(op, repository.maintenance(), now + MAINTAIN_WAIT_S))
                else:
                    _settle(op, outcome)

        has_entries = any(op.entry is not None for op in batch)
        repository.transact(
            [step(n) for n in range(len(batch))], before_publish=publish if has_entries else None, durable=durable
        )

    def _step(self, lane: _Lane) -> None:
        """One step of the lane's first upkeep. What was committed stands whether or not it succeeds."""
        upkeep, started = lane.upkeep[0], self._clock.monotonic()
        outcome: Outcome | None = None
        try:
            if not upkeep.maintenance.step():
                outcome = Outcome()
        except RepositoryBusy as error:
            outcome = Outcome(error=error) if started > upkeep.give_up_at else None
        except (OpenJobsError, OSError) as error:
            outcome = Outcome(error=error)
        else:
            upkeep.give_up_at = self._clock.monotonic() + MAINTAIN_WAIT_S
        now = self._clock.monotonic()
        upkeep.idle_at = now + MAINTAIN_GAP_S
        upkeep.shared_at = now + max(now - started, MAINTAIN_GAP_S)
        if outcome is not None:
            lane.upkeep.popleft()
            upkeep.maintenance.close()
            _settle(upkeep.operation, outcome)

    def _drop_upkeep(self) -> list[_Upkeep]:
        """Holds the lock."""
        dropped = [upkeep for lane in self._lanes.values() for upkeep in lane.upkeep]
        for lane in self._lanes.values():
            lane.upkeep.clear()
        return dropped

    def _put_back(self, lane: _Lane, batch: list[Operation], pauses_s: tuple[float, float]) -> None:
        shortest, longest = pauses_s
        lane.enough = 0
        lane.pause_s = min(max(lane.pause_s * 2, shortest), longest)
        lane.not_before = self._clock.monotonic() + lane.pause_s * self._jitter.uniform(0.5, 1.0)
        with self._lock:
            lane.waiting.extendleft(reversed(batch))

    def _retry_kept(self, session_id: str, lane: _Lane, batch: list[Operation], error: Exception) -> None:
        """Answer who can be answered; keep what has happened already."""
        kept = [op for op in batch if op.keep and not op.future.done()]
        for op in batch:
            if not op.keep:
                _fail(op, error)
        if not kept:
            lane.pause_s = 0.0
            lane.not_before = self._clock.monotonic() + self._gap_s
            return
        if not all(op.failures for op in kept):
            _log.error("session %s: %d event(s) could not be committed and are kept: %s", session_id, len(kept), error)
        for op in kept:
            op.failures += 1
        self._put_back(lane, kept, _FAILED_PAUSES_S)

    def _retry_after_fault(self, session_id: str, lane: _Lane, batch: list[Operation], fault: Exception) -> None:
        """As `_retry_kept`, but not for ever: an event that is itself the fault would stop its whole session."""
        error = OutcomeUnknown(
            f"a batch failed in a way that should not be, and whether it was written is not known: {fault!r}; "
            "retry with the same id"
        )
        error.__cause__ = fault
        for op in batch:
            op.faults += 1
            if op.faults >= _FAULTS:
                _fail(op, error)
        self._retry_kept(session_id, lane, batch, error)

    def _finish(self, session_id: str, lane: _Lane) -> None:
        with self._lock:
            idle = not lane.waiting and not lane.upkeep
            if idle and lane.not_before <= self._clock.monotonic():
                self._lanes.pop(session_id, None)
        if idle:
            self._sessions.rest(session_id)


def _reason(session_id: str, lane: _Lane, op: Operation, now: float, dropping: bool) -> Exception | None:
    """Why an event is given up, or None."""
    if dropping:
        return Closed("the store was closed before this could be made durable; recovery will see to it")
    if op.give_up_at is None or op.keep or now < op.give_up_at or not lane.pause_s:
        return None
    return SessionBusy(
        f"session {session_id} was held by another program for too long; nothing was written. Try again."
    )


def _tell(op: Operation, commit_id: str) -> None:
    if op.committed is not None:
        op.committed(commit_id)


def _settle(op: Operation, outcome: Outcome) -> None:
    if outcome.error is not None:
        _fail(op, outcome.error)
        return
    try:
        value = op.result()
    except Exception as error:
        _fail(op, error)
        return
    if op.future.set_running_or_notify_cancel():
        op.future.set_result(value)


def _fail(op: Operation, error: Exception) -> None:
    if not op.future.done() and op.future.set_running_or_notify_cancel():
        op.future.set_exception(error)
