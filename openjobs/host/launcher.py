"""The launcher: one owner of everything that must be closed, in order, however the process ends.

    with Launcher() as launcher:
        runtime = launcher.open(home)            # store and runner: providers
        launcher.on_close(service.stop)          # a disposer
        launcher.wait()

Disposers run before providers, each group in reverse order of registration, on a normal exit, on
an exception and on SIGINT, SIGTERM and SIGHUP, all within one deadline (five seconds). Source:
spec 001 (ordered cleanup serves both exit paths), design *The runner*, "Shutdown".
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from ..errors import Bug, Closed

if TYPE_CHECKING:
    from ..agents import Profiles
    from ..runner import JobRunner
    from ..store import GitJobStore

T = TypeVar("T")
#: ends one resource; its result does not matter
Disposer = Callable[[], object]
#: ends one provider within the seconds it is given
Closer = Callable[[float], object]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DEADLINE_S = 5.0
#: the part of the deadline that disposers may use up together; the rest is for the providers
_DISPOSERS_SHARE = 0.4
#: what every provider gets at least, even when those before it used up the time
_LAST_S = 0.25
#: how long after the deadline a process that a signal should end is ended without asking
_GRACE_S = 1.0
#: how long the main thread may take from SIGTERM to the beginning of the shutdown
_UNWIND_S = 0.5
#: how long a second signal waits for the end of what the first one has to see to (`Launcher.owing`)
_OWED_S = 1.0
#: how often a wait without a bound looks whether a signal came
_SLICE_S = 0.5
#: an event for the watchdog, beside signal numbers and None (the handlers are gone)
_CLOSING = 0

_log = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """A signal asks the process to end; raised in the main thread, like `KeyboardInterrupt`."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


@attrs.frozen(kw_only=True, slots=True)
class Runtime:
    """What `Launcher.open` made."""

    home: Path
    store: GitJobStore
    runner: JobRunner
    profiles: Profiles


class Acquisition:
    """A resource that is registered while it is still being made; see `Launcher.acquiring`."""

    def __init__(self, launcher: Launcher, name: str) -> None:
        self.name = name
        self._launcher = launcher
        self._settled = threading.Event()
        self._disposer: Disposer | None = None

    @property
    def stopping(self) -> bool:
        """Whether the process is closing: who makes the resource may give up."""
        return self._launcher.stopping.is_set()

    def ready(self, disposer: Disposer) -> None:
        """The resource is there and `disposer` ends it. Runs it at once when the launcher has closed without it."""
        if not self._launcher._settle(self, disposer):
            _contained(self.name, disposer)

    def __call__(self) -> None:
        """The disposer that stands in the launcher's list: waits for the resource, then ends it."""
        self._settled.wait()
        if self._disposer is not None:
            self._disposer()


class Launcher:
    """Owns store, runner and whatever else must end with the process.

    Guarantees: every disposer and provider that was registered is called at most once, and once
    unless the deadline or a second signal came first. A disposer that raises is logged and does not
    keep the others from running; one that hangs is left behind on its daemon thread and named in the log.
    Assumptions: signal handlers are installed only where the `with` stands in the main thread, and
    never for a signal that was ignored before (`nohup`).
    `_lock` protects the lists and `_closed`. A signal handler takes no lock at all.
    """

    def __init__(
        self,
        *,
        deadline_s: float = DEADLINE_S,
        signals: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._deadline_s = deadline_s
        self._monotonic = monotonic
        self._end_process = end_process
        self._lock = threading.Lock()
        self._disposers: list[tuple[str, Disposer]] = []
        self._providers: list[tuple[str, Closer]] = []
        self._begun = False
        self._closed = threading.Event()
        #: set as soon as the end is asked for
        self.stopping = threading.Event()
        #: why, for the log
        self.reason: str | None = None
        # SimpleQueue, since a signal handler may put into it wherever the main thread stands.
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._signals = _Signals(self) if signals else None

    # --- what is owned ---

    def open(self, home: Path, **options: Any) -> Runtime:
        """Store, profiles and runner of `home`, owned from now on. Options as in `open_runtime`.

        A signal to the main thread meanwhile is raised once they are owned. Raises `Closed` where the process
        ends while they are being opened; what was opened by then is closed.
        """
        with self.held():
            return open_runtime(self, home, **options)

    def provide(self, name: str, value: T, close: Closer) -> T:
        """`value`, which everything else may use until the very end: closed after all disposers.

        Raises `Closed` where the process is ending already; `value` is closed then.
        """
        with self._lock:
            if not self._begun:
                self._providers.append((name, close))
                return value
        _contained(name, functools.partial(close, _LAST_S))
        raise Closed(f"the process is ending; {name} was closed again")

    def on_close(self, disposer: Disposer, *, name: str | None = None) -> Callable[[], None]:
        """`disposer` runs when the process ends. Returns what takes it off the list again. Raises `Closed`.

        The resource need not be there yet: register first, then make it, and let the disposer cope;
        or use `acquiring`, which waits for it.
        """
        entry = (name or str(getattr(disposer, "__qualname__", disposer)), disposer)
        with self._lock:
            self._check_open()
            self._disposers.append(entry)

        def forget() -> None:
            with self._lock:
                self._disposers = [other for other in self._disposers if other is not entry]

        return forget

    @contextlib.contextmanager
    def acquiring(self, name: str) -> Iterator[Acquisition]:
        """Registers a resource before it exists, so that an end in between still ends it, in its place.

            with launcher.acquiring("agent") as pending:
                agent = connect()
                pending.ready(agent.close)

        While the block runs, closing waits for it (within the deadline); a signal that arrives while the
        main thread is in the block is raised at its end. A block left without `ready` had no resource.
        """
        pending = Acquisition(self, name)
        with self.held():  # from before it is on the list: an entry that nobody settles would be waited for
            forget = self.on_close(pending, name=name)
            try:
                yield pending
            finally:
                with self._lock:
                    none = pending._disposer is None
                    pending._settled.set()
                if none:
                    forget()

    def held(self) -> contextlib.AbstractContextManager[None]:
        """A signal to the main thread is raised at the end of the block, not in the middle of what must be whole.

        For what is short or bounded: until the end of the block a first signal does nothing but wait.
        """
        return self._signals.held() if self._signals is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def owing(self, too_late: Callable[[], object]) -> Iterator[None]:
        """Around work that a first signal leaves something to be done for (somebody has to be asked to stop).

        The block is left once that is done. A second signal ends the process there, no sooner, unless that takes
        more than a second: then `too_late` is called, on another thread, to say what was not done, and the process
        ends at once with 128 and the signal's number. Without signal handlers it does nothing.
        """
        if self._signals is None:
            yield
            return
        with self._signals.owing(too_late):
            yield

    def _settle(self, pending: Acquisition, disposer: Disposer) -> bool:
        with self._lock:
            if pending._settled.is_set():
                raise Bug(f"{pending.name} was made ready twice or after its block")
            if self._closed.is_set():
                return False
            pending._disposer = disposer
            pending._settled.set()
            return True

    def _check_open(self) -> None:
        if self._begun:
            raise Closed("the process is ending; nothing can be registered any more")

    # --- the end ---

    def stop(self, reason: str) -> None:
        """Ask for the end, from any thread: `wait` returns. Not from a signal handler."""
        if self.reason is None:
            self.reason = reason
        self.stopping.set()
        self._asked.put(reason)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the end is asked for (True) or the time is up (False); signals raise out of it."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.stopping.is_set():
            left = end - time.monotonic()
            if left <= 0:
                return False
            # In slices: a signal that comes in the instant before a wait is seen only when that wait is over.
            with contextlib.suppress(queue.Empty):
                self._asked.get(timeout=min(left, _SLICE_S))
                return True
        return True

    def close(self) -> None:
        """The ordered shutdown. Idempotent; a second caller waits for the first."""
        with self._lock:
            first, self._begun = not self._begun, True
            disposers, providers = list(reversed(self._disposers)), list(reversed(self._providers))
        if not first:
            self._closed.wait()
            return
        self.stopping.set()
        started = self._monotonic()
        try:
            for name, disposer in disposers:
                left = started + self._deadline_s * _DISPOSERS_SHARE - self._monotonic()
                self._bounded(name, disposer, max(left, 0.0))
            for index, (name, close) in enumerate(providers):
                reserved = _LAST_S * (len(providers) - index - 1)
                left = max(started + self._deadline_s - reserved - self._monotonic(), _LAST_S)
                self._bounded(name, functools.partial(close, left), left + _LAST_S)
        finally:
            with self._lock:
                self._closed.set()

    def _bounded(self, name: str, action: Disposer, patience_s: float) -> None:
        """Runs `action` on a thread of its own: what hangs must not keep the rest from closing."""
        thread = threading.Thread(target=_contained, args=(name, action), name=f"close {name}", daemon=True)
        thread.start()
        thread.join(patience_s)
        if thread.is_alive():
            _log.error("%s did not close in time and was left behind", name)

    def __enter__(self) -> Launcher:
        if self._signals is not None:
            self._signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._signals is None:
            self.close()
            return
        self._signals.closing()
        try:
            self.close()
        finally:
            late = self._signals.uninstall()
        if late is not None and kind is None:
            # The signal came while everything was being closed anyway: only the exit status has to say so.
            raise _as_exception(late)


class _Signals:
    """The handlers, installed for the time of one `with` in the main thread.

    First signal: `Interrupted` is raised in the main thread (KeyboardInterrupt for SIGINT), or noted
    where that must not happen (a `held` or `acquiring` block, the shutdown itself). Second signal: the
    process ends at once by that signal, or at the end of an `owing` block, which has a bound of its own.

    The watchdog, a thread made beforehand because a handler may interrupt any code, is for a main
    thread that does not come back: after SIGTERM and SIGHUP it does the shutdown itself, and it ends
    the process when the shutdown overruns its bound. After SIGINT it waits for the shutdown to begin,
    since a program may have more to say to a person who pressed Ctrl-C.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._previous: dict[int, Any] = {}
        self._first: int | None = None
        self._raised = False
        self._holds = 0
        self._owing = 0
        #: the second signal, where it has to wait
        self._second: int | None = None
        #: None: nothing is owed any more
        self._late: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._watchdog: threading.Thread | None = None

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._watchdog = threading.Thread(target=self._watch, name="openjobs shutdown watchdog", daemon=True)
        self._watchdog.start()
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)

    def uninstall(self) -> int | None:
        """The handlers that were there before; the signal that nobody raised yet, or None."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
        if self._watchdog is not None:
            self._events.put(None)
            self._watchdog.join()
            self._watchdog = None
        return None if self._raised else self._first

    def closing(self) -> None:
        """From now on a first signal is only noted: what it asks for is under way."""
        self._holds += 1
        self._events.put(_CLOSING)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if self._holds == 0 and self._first is not None and not self._raised:
                self._raise(self._first)

    @contextlib.contextmanager
    def owing(self, too_late: Callable[[], object]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Made beforehand, since a handler may interrupt any code.
        bound = threading.Thread(target=self._bound, args=(too_late,), name="openjobs second signal", daemon=True)
        begun = False
        try:
            with self.held():
                bound.start()
                self._owing += 1
                begun = True
            yield
        finally:
            if begun:
                with self.held():
                    # 1. From here on a second signal ends the process by itself. 2. One that waited does so now.
                    self._owing -= 1
                    if self._second is not None:
                        self._end_at_once(self._second)
                    self._late.put(None)
                    bound.join()

    def _bound(self, too_late: Callable[[], object]) -> None:
        signum = self._late.get()
        if signum is None:
            return
        with contextlib.suppress(queue.Empty):
            self._late.get(timeout=_OWED_S)  # the end of the block
            return
        # Bounded, since the main thread may hang in a write to where the words go.
        self._launcher._bounded("what is said of a second signal", too_late, _LAST_S)
        self._launcher._end_process(128 + signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._first is not None:
            if self._owing == 0:
                self._end_at_once(signum)
            elif self._second is None:
                self._second = signum
                self._late.put(signum)
            return
        self._first = signum
        if self._launcher.reason is None:
            self._launcher.reason = signal.Signals(signum).name
        self._events.put(signum)
        # At the very entry of `__exit__` an exception would leave everything unclosed; it is raised when that is done.
        leaving = frame is not None and frame.f_code is Launcher.__exit__.__code__
        if self._holds == 0 and not leaving:
            self._raise(signum)

    def _raise(self, signum: int) -> None:
        self._raised = True
        raise _as_exception(signum)

    def _end_at_once(self, signum: int) -> None:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def _watch(self) -> None:
        signum = self._events.get()
        if signum is None:
            return
        if signum == _CLOSING:
            self._until_done(None)  # `close` has a bound of its own
            return
        bound_s = self._launcher._deadline_s + _GRACE_S
        if signum == signal.SIGINT:
            if self._events.get() is None:
                return
        else:
            begun = self._launcher._monotonic()
            # Not set by the handler: it may have interrupted the very lock that `set` takes.
            self._launcher.stopping.set()
            if not self._until(_CLOSING, _UNWIND_S):
                self._launcher.close()
            # From the signal on, also for a main thread that is stuck long after everything was closed.
            bound_s = max(0.0, begun + _UNWIND_S + bound_s - self._launcher._monotonic())
        if not self._until_done(bound_s):
            _log.critical("the shutdown overran its bound after %s; ending at once", signal.Signals(signum).name)
            self._launcher._end_process(128 + signum)

    def _until_done(self, timeout_s: float | None) -> bool:
        return self._until(None, timeout_s)

    def _until(self, wanted: int | None, timeout_s: float | None) -> bool:
        """True once `wanted` (or None, the last event) came; False when the time is up."""
        try:
            while (event := self._events.get(timeout=timeout_s)) is not None:
                if event == wanted:
                    return True
        except queue.Empty:
            return False
        self._events.put(None)  # who waits for the end after us must see it, too
        return True


def _as_exception(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else Interrupted(signum)


def _contained(name: str, action: Disposer) -> None:
    try:
        action()
    except Exception as error:
        _log.exception("%s failed to close: %s: %s", name, type(error).__name__, error)


def open_runtime(
    launcher: Launcher,
    home: Path,
    *,
    workers: int | None = None,
    durability: str = "full",
    environ: Mapping[str, str] | None = None,
    runner_options: Mapping[str, Any] | None = None,
) -> Runtime:
    """Store, profiles and runner of a prepared home, registered as providers in that order.

    `environ` is what a command gets whose job came without an environment; None: this process's own.
    """
    from ..agents import Profiles
    from ..runner import JobRunner
    from ..store import GitJobStore

    store = GitJobStore(home, durability=durability)
    launcher.provide("store", store, lambda left: store.close(timeout=left))
    profiles = Profiles(home, environ=environ, disk=store.disk)
    launcher.provide("profiles", profiles, lambda left: profiles.close())
    runner = JobRunner(store, workers=workers, profiles=profiles, **(runner_options or {}))
    launcher.provide("runner", runner, lambda left: runner.shutdown(timeout=left))
    return Runtime(home=home, store=store, runner=runner, profiles=profiles)
