"""Everything at once, by seed: submits, children, waits, cancels, stubborn turns, timeouts, shutdown (R4, R6, R11).

Threads switch every few microseconds, so that a decision that is not one step under the lock shows.
`nox -s chaos` runs many more seeds.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from openjobs import JobRunner, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.jobs import EDGES, TERMINAL, JobStatus
from openjobs.runner.pool import PoolStats
from tests.support import eventually
from tests.support.chaos import Chaos
from tests.support.thin_store import ThinStore


@pytest.fixture
def _restless() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


class Storm:
    """One runner, a few submitters, and turns that do what their seed says."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store: Any = ThinStore()
        self.workers = self.random.randint(1, 4)
        self.runner = JobRunner(self.store, self.workers, self.turn, cancel_timeout_s=0.05)
        self.end_stubborn = threading.Event()
        self.lock = threading.Lock()
        #: the events of the jobs whose turns began
        self.ran: dict[str, threading.Event] = {}
        self.ids: list[str] = []
        self.failed: list[BaseException] = []

    def turn(self, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        with self.lock:
            assert request.job_id not in self.ran, "a job ran twice"
            self.ran[request.job_id] = cancel_event
        return self.act(random.Random(request.prompt), request, cancel_event)

    def act(self, dice: random.Random, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        what = dice.random()
        if what < 0.25:
            return TurnResult(final_text="quick")
        if what < 0.35:
            raise ValueError("by seed")
        if what < 0.5:
            cancel_event.wait(dice.random() * 0.02)
            request.raise_if_cancelled()
            return TurnResult()
        if what < 0.55:
            self.end_stubborn.wait(10)
            return TurnResult(final_text="late")
        if len(request.prompt) > 40:
            return TurnResult()
        children = [self.submit(f"{request.prompt}.{dice.random():.6f}", request) for _ in range(dice.randint(1, 3))]
        if what < 0.9:
            self.runner.await_tasks([c for c in children if c], dice.choice(["all", "any"]), dice.choice([None, 0.01]))
        return TurnResult()

    def submit(self, prompt: str, under: TurnRequest | None = None) -> str | None:
        request = SpawnRequest(
            prompt=prompt,
            parent_session_id="s1",
            parent_job_id=under.job_id if under is not None else None,
            timeout_s=0.03 if prompt.endswith("7") else None,
        )
        try:
            job_id = self.runner.submit(request).job_id
        except (errors.ParentFinished, errors.Closed):
            return None
        with self.lock:
            self.ids.append(job_id)
        return job_id

    def person(self, seed: str) -> None:
        """Submits, looks, waits and cancels, until the runner closes."""
        dice = random.Random(seed)
        try:
            for number in range(12):
                job_id = self.submit(f"{seed}.{number}.{dice.random():.4f}")
                what = dice.random()
                if job_id is None:
                    return
                if what < 0.3:
                    self.runner.cancel(job_id, "by seed")
                elif what < 0.6:
                    self.runner.await_job(job_id, timeout=0.05)
                elif what < 0.7:
                    self.runner.cancel(dice.choice(self.ids))
                self.runner.stats()
        except BaseException as error:
            self.failed.append(error)

    def run(self) -> None:
        seed = self.random.random()
        people = [threading.Thread(target=self.person, args=(f"{seed}.{n}",)) for n in range(4)]
        for person in people:
            person.start()
        if self.random.random() < 0.5:
            time.sleep(self.random.random() * 0.1)
            self.runner.shutdown(timeout=0.5)
        for person in people:
            person.join(30)
        if not self.runner._roster.closing:
            with self.lock:
                left = list(self.ids)
            for job_id in left:
                self.runner.cancel(job_id)
            assert self.runner.wait_idle(20)
        self.end_stubborn.set()
        self.runner.shutdown(timeout=2)
        eventually(lambda: not self.runner.stats().stuck)

    def check(self) -> None:
        assert not self.failed, self.failed
        assert set(self.store.rows) >= set(self.ids)
        for job_id, job in self.store.rows.items():
            assert job.status in TERMINAL, f"{job_id} is {job.status} for ever"
            walked = [JobStatus.PENDING]
            for status in self.store.edges[job_id]:
                if status is not walked[-1]:
                    walked.append(status)
            assert all(after in EDGES[before] for before, after in pairwise(walked)), walked
            assert (job.started_at is not None) == (job_id in self.ran)
            if job.status is JobStatus.CANCELLED and job_id in self.ran:
                assert self.ran[job_id].is_set(), "a cancelled job ran and its event was not set"
        all_free = PoolStats(workers=self.workers, in_use=0, lent=0, stuck=0, withheld=0)
        eventually(lambda: self.runner._pool.stats() == all_free)
        with self.runner._roster.lock:
            assert self.runner._pool._starting == 0
            assert not self.runner._roster.jobs
            assert not self.runner._roster.by_session
            assert len(self.runner._roster.line) == 0
            assert self.runner._roster.running == 0


@pytest.mark.usefixtures("_restless")
def test_a_storm_leaves_every_job_terminal_and_every_slot_free(chaos: Chaos) -> None:
    """Legal histories, one end each; cancelled means never ran or saw the event; nothing is left in the runner."""
    first = chaos.seed(0)
    for seed in range(first, first + chaos.rounds(12, 500, "storms")):
        storm = Storm(seed)
        try:
            storm.run()
            storm.check()
        except BaseException:
            chaos.seed(seed)
            print(f"seed {seed}")
            raise
        finally:
            storm.end_stubborn.set()
            storm.runner.shutdown(timeout=1)
            storm.store.close()


@pytest.mark.timeout(300)
def test_the_runner_forgets_finished_jobs(chaos: Chaos) -> None:
    """R11: after thousands of jobs in a hundred sessions a runner holds no more memory than after the first ones."""
    store: Any = ThinStore(keep=False)
    total = chaos.rounds(6_000, 50_000, "jobs")

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        return TurnResult(final_text="x" * 100)

    def run(count: int) -> int:
        for n in range(count // 100):
            ids = [runner.submit(SpawnRequest(prompt=f"{n}", parent_session_id=f"s{k}")).job_id for k in range(100)]
            runner.await_tasks(ids)
        assert runner.wait_idle(10)
        gc.collect()
        return sys.getallocatedblocks()

    with JobRunner(store, 4, turn) as runner:
        threads = threading.active_count()
        before = run(2_000)
        after = run(total)
        assert after < before * 1.02
        assert threading.active_count() <= threads + 7
        assert len(runner._recent) <= 512
    store.close()
