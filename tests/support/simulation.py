"""Threads in an order that a seed decides, on a clock that only they move: a race that was met once is met again.

    with Simulation(seed) as simulation:
        simulation.run(body)

While it is entered, what `openjobs` (and the futures of the standard library) takes from `threading`, `queue` and
`time` is of the simulation. Real threads run, one at a time. Before and after whatever one of them does to a lock, an
event, a condition, a queue or a thread, the seed picks who goes on; time passes only when everybody waits, or rarely,
so that a time-out comes first now and then. Where nobody can go on there is a deadlock, raised with the last steps.

Assumptions: locks that a module made when it was imported are real, and nobody stops while holding one.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures._base
import math
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import FrameType, ModuleType, TracebackType
from typing import Any, Self

import pytest

from openjobs.clock import SystemClock, in_milliseconds

#: real seconds after which a run is taken for one that never ends
PATIENCE_S = 120.0
_HASTE = 0.004
#: steps of one thread in a row after which the others come first: it may be looking for something that they do
_GREED = 400
_STEPS = 100_000
_KEPT_STEPS = 40


class Deadlock(AssertionError):
    """Nobody can go on, and nobody waits for a time."""


class Endless(AssertionError):
    """Far more steps than anything here should take."""


class Abandoned(BaseException):
    """Raised in threads that are left when a simulation has failed."""


class _Actor:
    """One thread, and what it waits for."""

    __slots__ = ("baton", "deadline", "done", "name", "number", "ready", "strength")

    def __init__(self, number: int, name: str, strength: float) -> None:
        self.number, self.name, self.strength = number, name, strength
        self.baton = threading.Semaphore(0)
        #: None: can go on
        self.ready: Callable[[], bool] | None = None
        self.deadline = math.inf
        self.done = False


class Simulation:
    """Guarantees: the same seed, and the same program, give the same `steps`."""

    def __init__(self, seed: int, *, fine: float = 0.0, fine_in: str = "/openjobs/runner/") -> None:
        """`fine`: the chance of a change of thread at any line of a file whose path has `fine_in` in it."""
        self.dice = random.Random(seed)
        self.seconds = 1000.0
        #: chance that the next time-out comes although somebody could go on
        self.haste = _HASTE
        #: how many steps there were, and a checksum over who took them and what they were
        self.count = 0
        self.digest = 0
        self.last: deque[tuple[str, str]] = deque(maxlen=_KEPT_STEPS)
        self.failed: BaseException | None = None
        self._fine, self._fine_in = fine, fine_in
        self._style = self.dice.choice(["any", "any", "lazy", "strongest"])
        self._born = 0
        self._actors: list[_Actor] = []
        self._me = threading.local()
        self._running: _Actor | None = None
        self._in_a_row = 0
        #: while somebody looks whether what a thread waits for is so
        self._looking = False
        self._over = threading.Event()
        self._patch: pytest.MonkeyPatch | None = None
        self.clock = _Clock(self)
        self.executor = _Executor(self)

    # --- around it ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._patch = patch = pytest.MonkeyPatch()
        self.threading = _Threading(self)
        ours: dict[ModuleType, _StandIn] = {threading: self.threading, queue: _Queues(self), time: _Time(self)}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "openjobs" or module is concurrent.futures._base:
                for attribute in ("threading", "queue", "time"):
                    real = getattr(module, attribute, None)
                    if isinstance(real, ModuleType) and real in ours:
                        patch.setattr(module, attribute, ours[real])
        patch.setattr(SystemClock, "_MONOTONIC", (self.monotonic,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._patch is not None
        self._patch.undo()

    def run(self, body: Callable[[], object]) -> None:
        """`body` in a thread of its own, until it and all that it started have ended. Raises what one of them did."""
        thread = SimulatedThread(self, target=body, name="body")
        thread.start()
        first = thread.actor
        assert first is not None
        self._running = first
        first.baton.release()
        if not self._over.wait(PATIENCE_S):
            self._abandon(Endless(f"not over after {PATIENCE_S:g} s; the last steps: {self.told()}"))
        thread.real_join(PATIENCE_S)
        if self.failed is not None:
            raise self.failed

    def told(self) -> str:
        return ", ".join(f"{name}: {what}" for name, what in self.last)

    def monotonic(self) -> float:
        return self.seconds

    # --- steps ---------------------------------------------------------------------------------------

    def step(self, what: str, ready: Callable[[], bool] | None = None, timeout_s: float | None = None) -> bool:
        """A point where another thread may go on. True when `ready` holds, False when the time is up."""
        me: _Actor | None = getattr(self._me, "actor", None)
        if me is None:  # the garbage collector in some other thread
            return ready is None or ready()
        if self.failed is not None:
            raise Abandoned
        if me is not self._running or self._looking:
            raise AssertionError(f"{me.name} runs out of turn at {what}")
        me.ready = ready
        me.deadline = math.inf if timeout_s is None else self.seconds + max(0.0, timeout_s)
        self._note(me, what)
        self._hand_on(me)
        held = self._holds(ready)
        me.ready, me.deadline = None, math.inf
        return held

    def _note(self, me: _Actor, what: str) -> None:
        self.count += 1
        self.digest = hash((self.digest, me.number, hash_of(what)))
        self.last.append((me.name, what))
        if self.count > _STEPS:
            self._abandon(Endless(f"more than {_STEPS} steps; the last: {self.told()}"))
            raise Abandoned

    def _hand_on(self, me: _Actor) -> None:
        following = self._pick(me)
        if following is me:
            self._in_a_row += 1
            return
        self._in_a_row = 0
        if following is None:
            if self._actors:
                waiting = "; ".join(f"{each.name} at {self._where(each)}" for each in self._actors)
                self._abandon(Deadlock(f"nobody can go on: {waiting}. The last steps: {self.told()}"))
                raise Abandoned
            self._over.set()
            return
        self._running = following
        following.baton.release()
        if not me.done:
            me.baton.acquire()
            if self.failed is not None:
                raise Abandoned

    def _where(self, actor: _Actor) -> str:
        return next((what for name, what in reversed(self.last) if name == actor.name), "its beginning")

    def _pick(self, me: _Actor) -> _Actor | None:
        able = [each for each in self._actors if self._holds(each.ready)]
        timed = [each for each in self._actors if each.deadline < math.inf and each not in able]
        if timed and (not able or self.dice.random() < self.haste):
            first = min(timed, key=lambda each: each.deadline)
            self.seconds = max(self.seconds, first.deadline)
            return first
        if not able:
            return None
        if len(able) > 1 and self._in_a_row > _GREED and me in able:
            able.remove(me)
            me.strength = 0.0
        if self._style == "lazy" and me in able and self.dice.random() < 0.9:
            return me
        if self._style == "strongest":
            if self.dice.random() < 0.02:
                me.strength = self.dice.random()
            return max(able, key=lambda each: each.strength)
        return self.dice.choice(able)

    def _holds(self, ready: Callable[[], bool] | None) -> bool:
        """Looked at whole: another thread that went on meanwhile would be picked by a look that is over."""
        if ready is None:
            return True
        self._looking = True
        try:
            return ready()
        finally:
            self._looking = False

    def _abandon(self, error: BaseException) -> None:
        if self.failed is None:
            self.failed = error
        for actor in self._actors:
            actor.baton.release()
        self._over.set()

    # --- threads ---------------------------------------------------------------------------------------

    def born(self, name: str) -> _Actor:
        self._born += 1
        actor = _Actor(self._born, name, self.dice.random())
        self._actors.append(actor)
        return actor

    def live(self, actor: _Actor, body: Callable[[], object]) -> None:
        """On the thread itself, from its first turn to its last."""
        actor.baton.acquire()
        self._me.actor = actor
        try:
            if self.failed is None:
                if self._fine and sys.gettrace() is None:
                    sys.settrace(self._trace_calls)
                body()
        except Abandoned:
            pass
        except BaseException as error:
            self._abandon(error)
        finally:
            if self._fine and sys.gettrace() == self._trace_calls:
                sys.settrace(None)
            actor.done = True
            self._actors.remove(actor)
            if self.failed is None:
                try:
                    self._hand_on(actor)
                except Abandoned:
                    pass

    def _trace_calls(self, frame: FrameType, event: str, arg: object) -> Any:
        # A lock of a module belongs to the process, not to the simulation: nobody may stop while holding one.
        path = frame.f_code.co_filename
        return self._trace_lines if self._fine_in in path and not path.endswith("/closing.py") else None

    def _trace_lines(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and self.failed is None and not self._looking and self.dice.random() < self._fine:
            self.step(f"line {frame.f_lineno}")
        return self._trace_lines


def hash_of(text: str) -> int:
    """The same in every process."""
    return sum((number + 1) * ord(letter) for number, letter in enumerate(text))


class SimulatedThread(threading.Thread):
    def __init__(self, simulation: Simulation, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.daemon = True
        self._simulation = simulation
        self.actor: _Actor | None = None

    def start(self) -> None:
        self.actor = self._simulation.born(self.name)
        super().start()
        self._simulation.step("start")

    def run(self) -> None:
        assert self.actor is not None
        self._simulation.live(self.actor, super().run)

    def join(self, timeout: float | None = None) -> None:
        actor = self.actor
        assert actor is not None
        if self._simulation.step("join", lambda: actor.done, timeout):
            super().join(PATIENCE_S)

    def real_join(self, timeout: float) -> None:
        super().join(timeout)

    def is_alive(self) -> bool:
        self._simulation.step("is alive")
        return self.actor is not None and not self.actor.done


# --- what stands in for the modules ------------------------------------------------------------------------


class _Lock:
    """Reentrant where `again` says so."""

    def __init__(self, simulation: Simulation, *, again: bool) -> None:
        self._simulation, self._again = simulation, again
        self._owner: int | None = None
        self._held = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        self._simulation.step("acquire")
        if self._again and self._owner == me:
            self._held += 1
            return True
        if self._owner is not None and (
            not blocking
            or not self._simulation.step(
                "wait for a lock", lambda: self._owner is None, None if timeout < 0 else timeout
            )
        ):
            return False
        self._owner, self._held = me, 1
        return True

    def release(self) -> None:
        if self._owner is None or (self._again and self._owner != threading.get_ident()):
            raise RuntimeError("release of a lock that is not held")
        self._held -= 1
        if not self._held:
            self._owner = None
        if self._simulation.failed is None:  # otherwise it is being unwound
            self._simulation.step("release")

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def let_go(self) -> int:
        """Whole and without a step: what a condition does when it begins to wait."""
        held, self._owner, self._held = self._held, None, 0
        return held

    def have_again(self, held: int) -> None:
        self._simulation.step("have the lock again", lambda: self._owner is None)
        self._owner, self._held = threading.get_ident(), held


class _Condition:
    def __init__(self, simulation: Simulation, lock: _Lock | None = None) -> None:
        self._simulation = simulation
        self._lock = lock if lock is not None else _Lock(simulation, again=True)
        self._tickets: list[list[bool]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        ticket = [False]
        self._tickets.append(ticket)
        held = self._lock.let_go()
        told = self._simulation.step("wait", lambda: ticket[0], timeout)
        if not told:
            self._tickets.remove(ticket)
        self._lock.have_again(held)
        return told

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = math.inf if timeout is None else self._simulation.seconds + timeout
        while not (result := predicate()):
            left = end - self._simulation.seconds
            if left <= 0:
                break
            self.wait(None if left == math.inf else left)
        return result

    def notify(self, n: int = 1) -> None:
        for ticket in self._tickets[:n]:
            ticket[0] = True
        del self._tickets[:n]

    def notify_all(self) -> None:
        self.notify(len(self._tickets))


class _Event:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._set = False

    def is_set(self) -> bool:
        self._simulation.step("is set")
        return self._set

    def set(self) -> None:
        self._simulation.step("set")
        self._set = True

    def clear(self) -> None:
        self._simulation.step("clear")
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._simulation.step("wait for an event", lambda: self._set, timeout)
        return self._set


class _SimpleQueue:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._simulation.step("put")
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._simulation.step("get", (lambda: bool(self._items)) if block else None, timeout) or not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class _StandIn:
    """A module with some names of ours; the rest is the real one's."""

    _real: Any

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Threading(_StandIn):
    _real = threading

    def Lock(self) -> _Lock:
        return _Lock(self._simulation, again=False)

    def RLock(self) -> _Lock:
        return _Lock(self._simulation, again=True)

    def Condition(self, lock: _Lock | None = None) -> _Condition:
        return _Condition(self._simulation, lock)

    def Event(self) -> _Event:
        return _Event(self._simulation)

    def Thread(self, *args: Any, **more: Any) -> SimulatedThread:
        return SimulatedThread(self._simulation, *args, **more)


class _Queues(_StandIn):
    _real = queue

    def SimpleQueue(self) -> _SimpleQueue:
        return _SimpleQueue(self._simulation)


class _Time(_StandIn):
    _real = time

    def monotonic(self) -> float:
        return self._simulation.seconds

    def sleep(self, seconds: float) -> None:
        self._simulation.step("sleep", lambda: False, seconds)


class _Clock:
    """A `Clock` on the simulation's time."""

    _ZERO = datetime(2026, 1, 1, tzinfo=UTC)

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def now(self) -> datetime:
        return in_milliseconds(self._ZERO + timedelta(seconds=self._simulation.seconds))

    def monotonic(self) -> float:
        return self._simulation.seconds

    def wait(self, event: Any, timeout_s: float | None) -> bool:
        return bool(event.wait(timeout_s))


class _Executor:
    """A thread for each call."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._number = 0

    def submit(self, fn: Callable[[], None], /) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._number += 1

        def call() -> None:
            fn()
            future.set_result(None)

        SimulatedThread(self._simulation, target=call, name=f"token-{self._number}").start()
        return future
