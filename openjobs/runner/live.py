"""The runner's unfinished jobs: what is known of each, and how they belong together.

Nothing here is ever written down. A row says what a job is; this says how to cancel it, wait for
it and run it (spec 003, D1, last paragraph).
"""

from __future__ import annotations

import contextvars
import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from ..jobs import Job, SyncFn
from ..sign import Sign
from .pool import Seat
from .timers import Timer
from .waiting import Waiter


class Phase(enum.IntEnum):
    """How far the runner's decisions are, which is ahead of what is durable."""

    SUBMITTED = 0  #: on its way to the store
    QUEUED = 1  #: in the line
    RUNNING = 2  #: a worker has it
    ENDED = 3  #: its end is decided and on its way to the store
    SETTLED = 4  #: its end is durable and who waited was woken


class LiveJob:
    """One unfinished job of this runner. Its fields are protected by the roster's lock."""

    __slots__ = (
        "cancel_asked",
        "cancel_event",
        "cancel_reason",
        "children",
        "context",
        "cwd",
        "end_refused",
        "env",
        "fn",
        "given_up",
        "job",
        "number",
        "on_cancel",
        "partial_text",
        "phase",
        "producer_reported",
        "returned",
        "seat",
        "timers",
        "told",
        "up",
        "waiters",
        "waits",
    )

    def __init__(
        self,
        job: Job,
        fn: SyncFn,
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        #: as last committed (before that: as it will be)
        self.job = job
        self.fn = fn
        self.cwd = cwd
        self.env = env
        self.context = context if context is not None else contextvars.copy_context()
        self.phase = Phase.SUBMITTED
        self.cancel_event = Sign()
        self.cancel_asked = False
        self.cancel_reason: str | None = None
        #: newest partial text; kept when the job is cancelled or errs
        self.partial_text: str | None = None
        #: its callable came back by itself; written by the worker's thread
        self.returned = False
        #: its end was told by the callable, not by who gave it up (spec 001)
        self.producer_reported = False
        #: how many of the steps that follow its submit were begun
        self.told = 0
        #: the store refused its first end
        self.end_refused = False
        #: ended without its thread
        self.given_up = False
        self.seat: Seat | None = None
        self.timers: list[Timer] = []
        self.waiters: dict[Waiter, None] = {}
        #: called, with the lock held, when it is asked to stop: ends waits that would outlast it
        self.on_cancel: dict[Waiter, Callable[[], None]] = {}
        #: waits for other jobs that its own thread is in
        self.waits = 0
        #: the nearest ancestor that has not ended
        self.up: LiveJob | None = None
        self.children: dict[LiveJob, None] = {}
        #: place in the line: smaller is older
        self.number = 0

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it or for one of its ancestors."""
        live: LiveJob | None = self
        while live is not None:
            if live.waiters:
                return True
            live = live.up
        return False

    def descendants(self) -> Iterator[LiveJob]:
        """Nearest first."""
        around = list(self.children)
        while around:
            yield from around
            around = [child for live in around for child in live.children]

    def is_under(self, ancestor: LiveJob) -> bool:
        live = self.up
        while live is not None and live is not ancestor:
            live = live.up
        return live is not None


class Line:
    """The queued jobs, oldest first (spec 003, D3: FIFO).

    Jobs that somebody waits for are in a second, smaller heap too, so that a lent slot finds the
    oldest of them without looking through all. Entries there may be out of date; `take` checks.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._jobs: OrderedDict[LiveJob, None] = OrderedDict()
        self._wanted: list[tuple[int, LiveJob]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[LiveJob]:
        return iter(list(self._jobs))

    def push(self, live: LiveJob) -> None:
        live.number = next(self._numbers)
        self._jobs[live] = None
        if live.wanted:
            self._push_wanted(live)

    def remove(self, live: LiveJob) -> None:
        """Also where it is not in the line: its way there was interrupted."""
        self._jobs.pop(live, None)
        if not self._jobs:
            self._wanted.clear()

    def want(self, live: LiveJob) -> None:
        """Somebody began to wait for `live`: it and its descendants may use lent slots."""
        for each in (live, *live.descendants()):
            if each in self._jobs:
                self._push_wanted(each)

    def take(self, wanted_only: bool) -> LiveJob | None:
        if not wanted_only:
            live = self._jobs.popitem(last=False)[0] if self._jobs else None
        else:
            live = self._oldest_wanted()
            if live is not None:
                del self._jobs[live]
        if not self._jobs:
            self._wanted.clear()
        return live

    def waiting(self, wanted_only: bool) -> int:
        return len(self._wanted) if wanted_only else len(self._jobs)

    def _push_wanted(self, live: LiveJob) -> None:
        heappush(self._wanted, (live.number, live))
        if len(self._wanted) > 2 * len(self._jobs) + 64:
            # Jobs that an ordinary slot took, and jobs with several waiters, are in it too often.
            self._wanted = [(each.number, each) for each in self._jobs if each.wanted]

    def _oldest_wanted(self) -> LiveJob | None:
        while self._wanted:
            _, live = heappop(self._wanted)
            if live in self._jobs and live.wanted:
                return live
        return None


class Roster:
    """All unfinished jobs of one runner.

    What the lock protects: everything in here, in every `LiveJob`, in the line and in the pool. It
    is *the* lock of the runner: who holds it may decide, and hands what was decided to the store
    before letting go, so that the store sees events in the order of decisions (invariant 7).
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.line = Line()
        self.jobs: dict[str, LiveJob] = {}
        self.by_session: dict[str, dict[LiveJob, None]] = {}
        #: set while there is no unfinished job
        self.idle = Sign()
        self.idle.set()
        #: set while no job is running
        self.calm = threading.Event()
        self.calm.set()
        self.running = 0
        #: set for ever once no more jobs are taken
        self.closing = False

    def add(self, live: LiveJob, up: LiveJob | None) -> None:
        """With the lock held."""
        self.jobs[live.job_id] = live
        self.by_session.setdefault(live.job.parent_session_id, {})[live] = None
        self.idle.clear()
        if up is not None:
            live.up = up
            up.children[live] = None

    def drop(self, live: LiveJob) -> None:
        """With the lock held. Its children move up to its own nearest ancestor."""
        if self.jobs.get(live.job_id) is live:
            del self.jobs[live.job_id]
        in_session = self.by_session.get(live.job.parent_session_id)
        if in_session is not None:
            in_session.pop(live, None)
            if not in_session:
                del self.by_session[live.job.parent_session_id]
        up = live.up
        for child in live.children:
            child.up = up
            if up is not None:
                up.children[child] = None
        live.children.clear()
        if up is not None:
            up.children.pop(live, None)
        live.up = None
        if not self.jobs:
            self.idle.set()

    def move(self, live: LiveJob, to: Phase) -> None:
        """With the lock held, forwards only."""
        if to is Phase.RUNNING:
            self.running += 1
            self.calm.clear()
        elif live.phase is Phase.RUNNING:
            self.running -= 1
            if not self.running:
                self.calm.set()
        live.phase = to

    def in_phase(self, phase: Phase) -> list[LiveJob]:
        """With the lock held."""
        return [live for live in self.jobs.values() if live.phase is phase]
