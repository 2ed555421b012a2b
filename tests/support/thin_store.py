"""A store of rows in a dict, for what needs ten thousand jobs or the runner's own cost.

It keeps the contract that the runner builds on (order of events, one thread that completes futures,
the transition table) and nothing else: no documents, no cards, no commits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import attrs

from openjobs import errors
from openjobs.clock import Clock, SystemClock
from openjobs.facts import Fact, FactLog, MemoryFactLog
from openjobs.ids import new_id
from openjobs.jobs import UNFINISHED, Event, Job, JobStatus, transition
from openjobs.store.damage import OnDamage
from openjobs.store.index import Entry
from openjobs.store.presence import MemoryActive, MemoryLeases


class ForgetfulLog(MemoryFactLog):
    def append(self, facts: Sequence[Fact]) -> None:
        pass


class ThinStore:
    """Finished rows are forgotten when `keep` is false, so that only the runner's memory is measured."""

    def __init__(self, *, clock: Clock | None = None, keep: bool = True) -> None:
        self.home = None
        self.clock: Clock = clock or SystemClock()
        self.new_id = new_id
        self.leases = MemoryLeases()
        self.active = MemoryActive()
        self.rows: dict[str, Job] = {}
        #: every edge that was walked, in order: job id -> statuses
        self.edges: dict[str, list[JobStatus]] = {}
        self.refused = 0
        self.cpu_s = 0.0
        self._keep = keep
        self._facts = MemoryFactLog() if keep else ForgetfulLog()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="thin-store", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            call()

    def facts(self, session_id: str) -> FactLog:
        return self._facts

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(10)

    def _later(self, decide: Callable[[], Job], when_done: Callable[[Future[Job]], object] | None) -> Future[Job]:
        future: Future[Job] = Future()
        if when_done is not None:
            future.add_done_callback(when_done)

        def run() -> None:
            begun = time.thread_time()
            try:
                job = decide()
            except errors.Refused as error:
                self.refused += 1
                future.set_exception(error)
            else:
                self.cpu_s += time.thread_time() - begun
                future.set_result(job)

        self._queue.put(run)
        return future

    def create_later(
        self,
        job: Job,
        *events: Event,
        fresh_id: bool = False,
        when_done: Callable[[Future[Job]], object] | None = None,
    ) -> Future[Job]:
        def decide() -> Job:
            if job.job_id in self.rows:
                raise errors.JobExists("there", job=self.rows[job.job_id])
            self.rows[job.job_id] = attrs.evolve(job, user_msg_id="u", attach_id="a")
            return self._apply(job.job_id, events)

        return self._later(decide, when_done)

    def apply_later(
        self,
        job_id: str,
        *events: Event,
        keep: bool = False,
        when_done: Callable[[Future[Job]], object] | None = None,
    ) -> Future[Job]:
        return self._later(lambda: self._apply(job_id, events), when_done)

    def apply(self, job_id: str, *events: Event) -> Job:
        return self.apply_later(job_id, *events).result()

    def _apply(self, job_id: str, events: tuple[Event, ...]) -> Job:
        job = self.get(job_id)
        for event in events:
            job = transition(job, event, self.clock.now())
            if self._keep:
                self.edges.setdefault(job_id, []).append(job.status)
        self.rows[job_id] = job
        if job.terminal and not self._keep:
            del self.rows[job_id]
        return job

    def get(self, job_id: str) -> Job:
        if job_id not in self.rows:
            raise errors.UnknownJob
        return self.rows[job_id]

    row = outcome = get

    def has_session(self, session_id: str) -> bool:
        return True

    def head(self, session_id: str) -> str:
        return ""

    def asked(self, session_id: str) -> str:
        return ""

    def unfinished(self, session_id: str, on_damage: OnDamage | None = None) -> list[Job]:
        return [job for job in list(self.rows.values()) if job.status in UNFINISHED]

    @property
    def index(self) -> ThinStore:
        return self

    def by_parent(self, job_id: str) -> list[Entry]:
        return [
            Entry(job_id=job.job_id, session_id=job.parent_session_id)
            for job in list(self.rows.values())
            if job.parent_job_id == job_id
        ]

    def documents(self, session_id: str) -> ThinStore:
        return self

    def job(self, job_id: str) -> Job | None:
        return self.rows.get(job_id)

    def unsettled(self) -> int:
        return 0
