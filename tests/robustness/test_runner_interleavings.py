"""Runner, store and cancel, one step of one thread at a time, in an order that a seed decides (R4, R6).

The runner's own threads, the committer, turns, people who submit, wait and cancel, and a second runner on the same
store: all of them are real, but who goes on after each look at a lock, an event or a queue is the seed's choice, and so
is the time (tests/support/simulation.py). A failing seed fails again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from openjobs import JobClient, JobRunner, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.jobs import EDGES, TERMINAL, Job, JobStatus
from openjobs.runner.closing import forget_exit
from openjobs.runner.notices import Notices
from openjobs.runner.pool import Pool, PoolStats, Seat
from openjobs.session.history import NOTICE, events_of
from tests.support.chaos import Chaos
from tests.support.simulation import Deadlock, Endless, SimulatedThread, Simulation

CANCEL_TIMEOUT_S = 3.0
SESSIONS = ("s1", "s2")


class Scene:
    """Two runners on one store, three people, and turns that do what their seed says."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.dice = simulation.dice
        self.store: Any = MockTaskStore(clock=simulation.clock, new_id=self.new_id)
        for session_id in SESSIONS:
            self.store.create_session(session_id)
        #: nobody but the one runner asks a job to stop
        self.alone = self.dice.random() < 0.5
        self.runners = [self.runner() for _ in range(1 if self.alone else self.dice.randint(1, 2))]
        self.client = JobClient(self.store, clock=simulation.clock)
        #: what the first runner's listeners and its callback were told, in order
        self.heard = self.runners[0].hub.subscribe(capacity=10_000)
        self.called: list[str] = []
        self.runners[0].notices.subscribe(lambda notice: self.called.append(notice.event_id))
        #: the events of the jobs whose turns began
        self.ran: dict[str, Any] = {}
        self.ids: list[str] = []
        self.over = False

    def new_id(self) -> str:
        return f"{self.dice.getrandbits(32):08x}-0000-4000-8000-{self.dice.getrandbits(48):012x}"

    def runner(self) -> JobRunner:
        workers = self.dice.randint(1, 2)
        return JobRunner(
            self.store,
            workers,
            self.turn,
            executor=self.simulation.executor,
            cancel_timeout_s=CANCEL_TIMEOUT_S,
            clock=self.simulation.clock,
            new_id=self.new_id,
        )

    def wait_s(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        self.simulation.step("pass time", until, seconds)

    # --- turns ---

    def turn(self, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        assert request.job_id not in self.ran, "a job ran twice"
        self.ran[request.job_id] = cancel_event
        what = self.dice.random()
        if what < 0.3:
            return TurnResult(final_text="quick")
        if what < 0.4:
            raise ValueError("by seed")
        if what < 0.6:
            cancel_event.wait(self.dice.random() * 4)
            request.raise_if_cancelled()
            return TurnResult()
        if what < 0.7:  # one that hears nothing
            self.wait_s(self.dice.random() * 4 * CANCEL_TIMEOUT_S, lambda: self.over)
            return TurnResult(final_text="late")
        if request.job.parent_job_id is not None:
            return TurnResult()
        runner = request.runner
        children = [self.submit(runner, request) for _ in range(self.dice.randint(1, 2))]
        if what < 0.95:
            runner.await_tasks(
                [c for c in children if c], self.dice.choice(["all", "any"]), self.dice.choice([None, 2.0])
            )
        return TurnResult()

    def submit(self, runner: JobRunner, under: TurnRequest | None = None) -> str | None:
        request = SpawnRequest(
            prompt=f"job {len(self.ids)}",
            parent_session_id=self.dice.choice(SESSIONS),
            parent_job_id=under.job_id if under is not None else None,
            timeout_s=self.dice.choice([None, None, 1.5]),
            notify=self.dice.random() < 0.5,
        )
        try:
            job = runner.submit(request)
        except (errors.ParentFinished, errors.Closed):
            return None
        assert self.store.get(job.job_id).status is not JobStatus.PENDING, "submit returned before it was queued"
        self.ids.append(job.job_id)
        return job.job_id

    # --- people ---

    def person(self) -> None:
        for _ in range(self.dice.randint(2, 5)):
            runner = self.dice.choice(self.runners)
            job_id = self.submit(runner)
            if job_id is None:
                return
            try:
                self.act(runner, job_id)
            except errors.Closed:
                return

    def act(self, runner: JobRunner, job_id: str) -> None:
        what = self.dice.random()
        anyone: JobRunner | JobClient = self.dice.choice([runner] if self.alone else [*self.runners, self.client])
        if what < 0.25:
            self.ended(anyone.cancel(job_id, "by seed"))
        elif what < 0.55:
            self.ended(anyone.await_job(job_id, timeout=self.dice.choice([0.0, 1.0, 30.0])))
        elif what < 0.7:
            anyone.cancel(self.dice.choice(self.ids))
        elif what < 0.75:
            runner.cancel_session(self.dice.choice(SESSIONS))
        elif what < 0.8:
            runner.notices.deliver(self.dice.choice(SESSIONS))
        elif what < 0.87:
            for job in anyone.await_tasks(self.ids[-3:], "any", 2.0):
                self.ended(job)
        else:
            assert anyone.get(job_id).job_id == job_id

    def ended(self, job: Job) -> None:
        """Who is told of an end can read it."""
        if job.terminal:
            assert self.store.get(job.job_id).status is job.status

    # --- the whole ---

    def __call__(self) -> None:
        people = [SimulatedThread(self.simulation, target=self.person, name=f"person-{n}") for n in range(3)]
        for person in people:
            person.start()
        if self.dice.random() < 0.3:
            self.wait_s(self.dice.random() * 4)
            self.simulation.haste = 0.0  # so that its time is enough
            self.runners[-1].shutdown(timeout=2.0)
        for person in people:
            person.join()
        for job_id in list(self.ids) if self.dice.random() < 0.5 else []:
            (self.runners[0] if self.alone else self.client).cancel(job_id)
        for runner in self.runners:
            assert runner._roster.closing or runner.wait_idle()
        self.over = True
        self.simulation.haste = 0.0
        for session_id in SESSIONS:
            self.client_of_notices().deliver(session_id)
        for runner in self.runners:
            runner.shutdown(timeout=5.0)
        self.check()
        self.store.close()

    def client_of_notices(self) -> Notices:
        """As in another process."""
        return Notices(self.store)

    def check(self) -> None:
        self.check_notices()
        self.check_listeners()
        for job_id in self.ids:
            job = self.store.get(job_id)
            assert job.status in TERMINAL, f"{job_id} is {job.status} for ever"
            steps = [one for one in self.store.history(job_id) if one.kind == "transition"]
            walked = [one.status for one in steps]
            assert walked[0] is JobStatus.PENDING
            assert all(after in EDGES[before] for before, after in pairwise(walked)), walked
            assert (JobStatus.RUNNING in walked) == (job_id in self.ran), walked
            if job.status is JobStatus.CANCELLED and job_id in self.ran and self.alone:
                # A request of another process may come between its last look and its end.
                assert self.ran[job_id].is_set(), "a cancelled job ran and its event was not set"
        for runner in self.runners:
            free = PoolStats(workers=runner.workers, in_use=0, lent=0, stuck=0, withheld=0)
            self.wait_s(100.0, lambda pool=runner._pool, free=free: pool.stats() == free)  # type: ignore[misc]
            assert runner._pool.stats() == free
            assert runner._pool._starting == 0
            assert not runner._roster.jobs
            assert not runner._roster.by_session
            assert len(runner._roster.line) == 0
            assert runner._roster.running == 0

    def check_notices(self) -> None:
        """Each end is told by exactly one message."""
        told = [
            event_id
            for session_id in SESSIONS
            for node in self.store.session(session_id).nodes()
            if node.function == NOTICE
            for event_id in events_of(node)
        ]
        wanted = [job for job in map(self.store.get, self.ids) if job.notice is not None]
        ended = {job.event_id for job in wanted if not self.runner_of(job)._roster.closing}
        assert len(told) == len(set(told)), "an end was told twice"
        assert ended <= set(told), "an end was not told"

    def runner_of(self, job: Job) -> JobRunner:
        return next(runner for runner in self.runners if runner.runner_id == job.runner_id)

    def check_listeners(self) -> None:
        """Events come in the order of the commits, and each end once."""
        of_job: dict[str, list[JobStatus]] = {}
        for event in self.heard.drain():
            of_job.setdefault(event.job_id, []).append(event.job.status)
        for heard in of_job.values():
            order = [list(JobStatus).index(status) if status not in TERMINAL else 9 for status in heard]
            assert order == sorted(order), heard
            assert order.count(9) <= 1, heard


def simulated(seed: int, *, fine: float = 0.0) -> Simulation:
    scenes: list[Scene] = []

    def body() -> None:
        scenes.append(Scene(simulation))
        scenes[0]()

    with Simulation(seed, fine=fine) as simulation:
        try:
            simulation.run(body)
        finally:
            for runner in scenes[0].runners if scenes else []:
                forget_exit(id(runner))  # one that was left as it was has nobody to end it
    return simulation


@pytest.mark.parametrize(("fine", "few", "many"), [(0.0, 25, 3000), (0.02, 10, 1000)], ids=["at locks", "at any line"])
def test_any_order_of_steps_leaves_every_job_terminal_and_every_slot_free(
    chaos: Chaos, fine: float, few: int, many: int
) -> None:
    """Legal histories with one end, cancelled means never ran or saw the event, nothing left in the runner, no thread
    left, nobody waiting for ever."""
    first = chaos.seed(0)
    steps = 0
    for seed in range(first, first + chaos.rounds(few, many, "orders")):
        try:
            steps += simulated(seed, fine=fine).count
        except BaseException:
            chaos.seed(seed)
            raise
    chaos.count("steps", steps)


def test_the_same_seed_is_the_same_order() -> None:
    for seed in range(3):
        one, other = simulated(seed), simulated(seed)
        assert (one.count, one.digest, one.seconds) == (other.count, other.digest, other.seconds)


# --- the harness bites ---------------------------------------------------------------------------------------


def opposed(threads: Any) -> Callable[[], None]:
    """Two locks, taken in two orders."""

    def body() -> None:
        locks = [threads.Lock(), threads.Lock()]

        def take(first: int) -> None:
            with locks[first], locks[1 - first]:
                pass

        both = [threads.Thread(target=take, args=(n,)) for n in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()

    return body


def test_a_deadlock_is_met() -> None:
    met = 0
    for seed in range(40):
        with Simulation(seed) as simulation:
            body = opposed(simulation.threading)
            try:
                simulation.run(body)
            except Deadlock:
                met += 1
    assert 0 < met < 40


def test_a_slot_that_is_owed_to_nobody_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool as it was before a token that took nothing gave its slot to who waits for one (see `Pool._serve`)."""

    def forgetful(pool: Pool[Any]) -> None:
        seat = Seat()
        with pool._lock:
            pool._starting -= 1
        while True:
            with pool._lock:
                item = pool._next(seat)
            if item is None:
                return
            pool._run(item, seat)

    def many() -> None:
        for seed in range(300):
            simulated(seed)

    monkeypatch.setattr(Pool, "_serve", forgetful)
    with pytest.raises((Deadlock, Endless)):
        many()
