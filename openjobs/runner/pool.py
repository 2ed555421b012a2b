"""The pool: slots over a `ThreadPoolExecutor`, whose private parts only this file knows.

The executor never holds a queue of jobs. It gets one *token* for each free slot; a token takes one
job after the other from the runner's own line and ends, giving its slot back, when nothing is left
that it may run. So order, cancelling and fairness are the runner's, and a job that is cancelled
while it waits is simply no longer in the line.

A slot is in exactly one of these places:

- *free*;
- *in use*: a token runs, or is about to take, a job;
- *lent*: the job's thread waits for another job of this runner. Until it returns, its slot runs
  only jobs that somebody waits for, and their descendants. Without this, four parents waiting for
  children on four workers would wait for ever;
- *given back*: the job was given up (a forced cancel), its thread is stuck, and the slot is free
  again although the thread lives on. At most four times the number of workers; further stuck
  threads keep their slots (`PoolStats.withheld`).
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as _stdlib
from typing import Any, Generic, Protocol, TypeVar

import attrs

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: stuck threads whose slots are given back, as a multiple of the workers
STUCK_LIMIT = 4


class Executor(Protocol):
    """What another executor must offer: run `fn` soon, in a thread where it may block."""

    def submit(self, fn: Callable[[], None], /) -> Future[Any]: ...


class Line(Protocol[T_co]):
    """The jobs that wait for a slot. Called with the runner's lock held."""

    def take(self, wanted_only: bool) -> T_co | None:
        """The next one, no longer in the line; None where there is none of that kind."""
        ...

    def waiting(self, wanted_only: bool) -> int:
        """How many there are; may be too high, never too low."""
        ...


class Place(enum.Enum):
    IN = "in"  #: holds a slot
    LENT = "lent"  #: waits for another job; its slot is lent
    RETURNING = "returning"  #: waits for a slot, before any queued job
    OUT = "out"  #: given up, its slot given back
    WITHHELD = "withheld"  #: given up, its slot withheld


class Seat:
    """One token's hold on a slot, for as long as its thread runs jobs."""

    __slots__ = ("place", "ready", "thread")

    def __init__(self) -> None:
        self.place = Place.IN
        self.ready: threading.Event | None = None
        self.thread = threading.current_thread()


@attrs.frozen(kw_only=True, slots=True)
class PoolStats:
    workers: int
    #: slots in use
    in_use: int
    #: slots lent while their threads wait for other jobs
    lent: int
    #: threads that were given up and still run
    stuck: int
    #: slots that are not given back because too many threads are stuck
    withheld: int


class Pool(Generic[T]):
    """At most `workers` jobs run at once, and no slot is ever lost.

    Guarantees: a free slot and a job that may use it never stay together (once `start` was called
    with what `reserve` returned); a returning parent gets the next free slot before any queued job;
    a stuck thread never costs a slot while fewer than four times `workers` are stuck.

    Assumptions: `claim` and the methods of `line` are called with the lock held and never block;
    `run` is called without it, may block for ever, and raises nothing.

    What the lock protects: every field. It is the runner's own lock, so that taking a job from the
    line and deciding that it runs are one step, which no cancel can divide.
    """

    def __init__(
        self,
        workers: int,
        *,
        lock: threading.Lock,
        line: Line[T],
        claim: Callable[[T, Seat], None],
        run: Callable[[T, Seat], None],
        executor: Executor | None = None,
        name: str = "openjobs",
    ) -> None:
        self.workers = workers
        self._lock = lock
        self._line = line
        self._claim = claim
        self._run = run
        self._own = _Threads(name) if executor is None else None
        self._executor: Executor = self._own if self._own is not None else executor  # type: ignore[assignment]
        self._in_use = 0  # slots that a token holds, tokens on their way to a thread included
        self._starting = 0  # of these, tokens that have not looked at the line yet
        self._lent = 0  # threads that wait for another job, the returning ones included
        self._returning: deque[Seat] = deque()
        self._out: dict[Seat, None] = {}  # stuck threads whose slots were given back
        self._withheld: dict[Seat, None] = {}  # stuck threads whose slots were not

    # --- with the lock held ------------------------------------------------------------------------

    def reserve(self) -> int:
        """Give free slots to whom they are due; returns how many tokens the caller must `start`."""
        while self._returning and self._in_use < self.workers:
            self._admit(self._returning.popleft())
        free = self.workers - self._in_use
        if free <= 0:
            return 0
        unlent = min(free - self._lent, self._line.waiting(False) - self._starting)
        tokens = max(unlent, 0)
        if self._lent and tokens < free:
            tokens += min(free - tokens, self._line.waiting(True))
        self._in_use += tokens
        self._starting += tokens
        if tokens and self._own is not None:
            self._own.needed = self._in_use + self._lent + len(self._out)
        return tokens

    def lend(self, seat: Seat) -> bool:
        """The seat's thread is about to wait for another job. False where it has no slot to lend."""
        if seat.place is not Place.IN:
            return False
        seat.place = Place.LENT
        self._in_use -= 1
        self._lent += 1
        return True

    def take_back(self, seat: Seat, *, wait: bool = True) -> threading.Event | None:
        """The seat's thread has stopped waiting. An event means: wait for it before going on.

        With `wait=False` the thread goes on at once, and the slots are overdrawn by one until the
        next job ends; that is for threads that must not block, as an event loop's.
        """
        if seat.place is not Place.LENT:
            return None
        if self._in_use < self.workers or not wait:
            self._admit(seat)
            return None
        seat.place = Place.RETURNING
        seat.ready = threading.Event()
        self._returning.append(seat)
        return seat.ready

    def give_up(self, seat: Seat) -> None:
        """The seat's job was ended without its thread; the slot is given back where the limit allows."""
        if seat.place in (Place.OUT, Place.WITHHELD):
            return
        if seat.place is Place.IN:
            self._in_use -= 1
        else:
            self._lent -= 1
        if seat.place is Place.RETURNING:
            self._returning.remove(seat)
            assert seat.ready is not None
            seat.ready.set()
        if len(self._out) < STUCK_LIMIT * self.workers:
            seat.place = Place.OUT
            self._out[seat] = None
        else:
            seat.place = Place.WITHHELD
            self._withheld[seat] = None
            self._in_use += 1

    def stats(self) -> PoolStats:
        return PoolStats(
            workers=self.workers,
            in_use=self._in_use - len(self._withheld),
            lent=self._lent,
            stuck=len(self._out) + len(self._withheld),
            withheld=len(self._withheld),
        )

    # --- without the lock ----------------------------------------------------------------------------

    def start(self, tokens: int) -> None:
        """Send that many tokens to the executor. One that cannot be sent gives its slot back."""
        for _ in range(tokens):
            try:
                self._executor.submit(self._serve)
            except RuntimeError as error:
                log.warning("the executor takes no more work (%s); queued jobs wait", error)
                with self._lock:
                    if self._starting:
                        self._in_use -= 1
                        self._starting -= 1

    def send_again(self) -> None:
        """After a `start` that was interrupted: nobody knows which tokens were sent. All that have not begun are sent;
        one too many finds that none is due and ends."""
        with self._lock:
            tokens = self._starting
            if self._own is not None:
                self._own.needed = self._in_use + self._lent + len(self._out)
        self.start(tokens)

    def close(self, timeout_s: float = 1.0) -> None:
        """Idle threads end; waits for them, never for a stuck one. An executor of the caller's stays open."""
        if self._own is None:
            return
        self._own.shutdown(wait=False)
        with self._lock:
            stuck = {seat.thread for seat in (*self._out, *self._withheld)}
        until = time.monotonic() + timeout_s
        for thread in self._own.threads() - stuck - {threading.current_thread()}:
            thread.join(max(0.0, until - time.monotonic()))

    # --- a token -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        seat = Seat()
        due = False
        while True:
            with self._lock:
                if not due:
                    if not self._starting:
                        return
                    self._starting -= 1
                    due = True
                item = self._next(seat)
                # A slot that is given back is due to somebody, also when this token took nothing at all:
                # 1. a parent lends its slot and this token is sent; 2. the parent stops waiting at once and
                # queues for a slot; 3. the token looks, leaves its slot to the parent, who sleeps.
                tokens = self.reserve() if item is None else 0
            if item is None:
                break
            try:
                self._run(item, seat)
            except BaseException:
                log.exception("a worker failed outside its job")
        self.start(tokens)

    def _next(self, seat: Seat) -> T | None:
        """What this token runs now, claimed; None once its slot is given back."""
        if seat.place is not Place.IN:
            self._leave(seat)
            return None
        if self._in_use <= self.workers and not self._returning:
            item = self._line.take(self._in_use + self._lent > self.workers)
            if item is not None:
                self._claim(item, seat)
                return item
        self._in_use -= 1
        return None

    def _leave(self, seat: Seat) -> None:
        """A stuck thread has come back after all."""
        if seat.place is Place.WITHHELD:
            del self._withheld[seat]
            self._in_use -= 1
        elif seat.place is Place.OUT:
            del self._out[seat]
            if self._withheld:
                other = next(iter(self._withheld))
                del self._withheld[other]
                other.place = Place.OUT
                self._out[other] = None
                self._in_use -= 1

    def _admit(self, seat: Seat) -> None:
        self._lent -= 1
        self._in_use += 1
        seat.place = Place.IN
        if seat.ready is not None:
            seat.ready.set()
            seat.ready = None


class _Threads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` whose threads never keep the interpreter from exiting.

    The standard one joins its threads at exit, so one stuck job would keep a finished program
    alive. Ours are daemons and unknown to that join. They are also counted differently: the
    standard executor keeps a count of idle threads that runs too high after a backlog, and would
    leave a token behind a stuck thread. Here there are as many threads as tokens that have not
    ended, so every token has one.
    """

    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1 << 20, thread_name_prefix=name)
        #: tokens that have not ended, the one just sent included
        self.needed = 0
        # The standard method starts no thread while this says that one is idle.
        self._idle_semaphore = _NobodyIdle()  # type: ignore[assignment]

    def threads(self) -> set[threading.Thread]:
        return set(self._threads)

    def _adjust_thread_count(self) -> None:
        while len(self._threads) < self.needed:
            if not self._add_thread():
                return

    def _add_thread(self) -> bool:
        # A thread is a daemon when the thread that made it is one.
        maker = threading.Thread(target=self._make, args=(super()._adjust_thread_count,), daemon=True)
        try:
            maker.start()
        except RuntimeError as error:
            log.warning("no further worker thread can be started (%s)", error)
            return False
        maker.join()
        return True

    def _make(self, standard: Callable[[], None]) -> None:
        """All of it on the thread that makes it: who waits for that one may be interrupted."""
        before = self.threads()
        standard()
        for thread in self.threads() - before:
            _stdlib._threads_queues.pop(thread, None)  # type: ignore[attr-defined]


class _NobodyIdle:
    """In the place of the executor's count of idle threads, a condition that the submitting thread must not share."""

    def acquire(self, *, timeout: float) -> bool:
        return False

    def release(self) -> None:
        pass
