"""The pool: slots over an executor. No jobs, no store; items are plain names."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from openjobs.runner.pool import STUCK_LIMIT, Executor, Place, Pool, Seat
from tests.support import eventually

PATIENCE_S = 10.0


class Line:
    """Waiting items; those whose name begins with `w` are wanted."""

    def __init__(self) -> None:
        self.items: deque[str] = deque()

    def take(self, wanted_only: bool) -> str | None:
        for item in self.items:
            if not wanted_only or item.startswith("w"):
                self.items.remove(item)
                return item
        return None

    def waiting(self, wanted_only: bool) -> int:
        return sum(1 for item in self.items if not wanted_only or item.startswith("w"))


class Ground:
    """A pool whose items block until they are let go."""

    def __init__(self, workers: int, executor: Executor | None = None) -> None:
        self.lock = threading.Lock()
        self.line = Line()
        self.gates: dict[str, threading.Event] = {}
        self.seats: dict[str, Seat] = {}
        self.ended: list[str] = []
        self.begun: list[str] = []
        self.does: dict[str, Callable[[], None]] = {}
        self.pool: Pool[str] = Pool(
            workers, lock=self.lock, line=self.line, claim=self.claim, run=self.run, executor=executor, name="test"
        )

    def claim(self, item: str, seat: Seat) -> None:
        assert self.lock.locked()
        self.seats[item] = seat
        self.begun.append(item)

    def run(self, item: str, seat: Seat) -> None:
        if item in self.does:
            self.does[item]()
        assert self.gates[item].wait(PATIENCE_S)
        self.ended.append(item)

    def put(self, *items: str) -> None:
        with self.lock:
            for item in items:
                self.gates.setdefault(item, threading.Event())
                self.line.items.append(item)
            tokens = self.pool.reserve()
        self.pool.start(tokens)

    def let_go(self, *items: str) -> None:
        for item in items:
            self.gates[item].set()

    def until_begun(self, *items: str) -> None:
        eventually(lambda: set(items) <= set(self.begun))

    def locked(self, call: Callable[[Seat], object], item: str) -> None:
        with self.lock:
            call(self.seats[item])
            tokens = self.pool.reserve()
        self.pool.start(tokens)

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        eventually(lambda: set(self.begun) <= set(self.ended) | set(self.does))
        self.pool.close()


@pytest.fixture
def ground() -> Iterator[Callable[..., Ground]]:
    made: list[Ground] = []

    def make(workers: int, executor: Executor | None = None) -> Ground:
        made.append(Ground(workers, executor))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_at_most_as_many_items_run_as_there_are_workers(ground: Callable[..., Ground]) -> None:
    """With two workers and six items, two run and four wait, in order."""
    g = ground(2)
    g.put("a", "b", "c", "d", "e", "f")
    g.until_begun("a", "b")
    assert list(g.line.items) == ["c", "d", "e", "f"]
    g.let_go("a")
    g.until_begun("c")
    assert list(g.line.items) == ["d", "e", "f"]
    g.let_go("b", "c", "d", "e", "f")
    eventually(lambda: len(g.ended) == 6)
    assert g.begun == ["a", "b", "c", "d", "e", "f"]


def test_idle_threads_are_used_again(ground: Callable[..., Ground]) -> None:
    """A hundred items, one at a time, need one thread."""
    g = ground(4)
    for number in range(100):
        g.put(f"i{number}")
        g.let_go(f"i{number}")
        eventually(lambda n=number: len(g.ended) == n + 1)
        eventually(lambda: g.pool.stats().in_use == 0)
    assert len({seat.thread for seat in g.seats.values()}) == 1


def test_a_lent_slot_runs_wanted_items_only(ground: Callable[..., Ground]) -> None:
    """One worker: its item waits, so a wanted item behind an unwanted one runs, and the unwanted one does not."""
    g = ground(1)
    g.put("parent", "other", "wanted")
    g.until_begun("parent")
    g.locked(g.pool.lend, "parent")
    g.until_begun("wanted")
    g.let_go("wanted")
    eventually(lambda: g.pool.stats().in_use == 0)
    assert "other" not in g.begun
    g.locked(g.pool.take_back, "parent")
    g.let_go("parent")
    g.until_begun("other")


def test_an_unlent_slot_still_runs_anything(ground: Callable[..., Ground]) -> None:
    """Lending one of two slots does not take the other one from the queue."""
    g = ground(2)
    g.put("parent")
    g.until_begun("parent")
    g.locked(g.pool.lend, "parent")
    g.put("a", "b")
    g.until_begun("a")
    assert list(g.line.items) == ["b"]
    g.locked(g.pool.take_back, "parent")


def test_a_returning_parent_comes_before_every_queued_item(ground: Callable[..., Ground]) -> None:
    """The slot that becomes free goes to the parent that came back, then to the queue."""
    g = ground(1)
    g.put("parent", "wanted1", "wanted2")
    g.until_begun("parent")
    g.locked(g.pool.lend, "parent")
    g.until_begun("wanted1")
    with g.lock:
        ready = g.pool.take_back(g.seats["parent"])
    assert ready is not None
    assert not ready.is_set()
    g.let_go("wanted1")
    assert ready.wait(PATIENCE_S)
    assert "wanted2" not in g.begun
    assert g.pool.stats().in_use == 1
    g.let_go("parent")
    g.until_begun("wanted2")


def test_a_thread_that_must_not_wait_overdraws_until_the_next_end(ground: Callable[..., Ground]) -> None:
    """`wait=False` goes on at once; the next item to end gives its slot up and takes nothing new."""
    g = ground(1)
    g.put("parent", "wanted1", "wanted2")
    g.until_begun("parent")
    g.locked(g.pool.lend, "parent")
    g.until_begun("wanted1")
    with g.lock:
        assert g.pool.take_back(g.seats["parent"], wait=False) is None
    assert g.pool.stats().in_use == 2
    g.let_go("wanted1")
    eventually(lambda: g.pool.stats().in_use == 1)
    assert "wanted2" not in g.begun
    g.let_go("parent")
    g.until_begun("wanted2")


def test_lending_nests_to_any_depth(ground: Callable[..., Ground]) -> None:
    """On one worker each of twenty items waits for the next one."""
    g = ground(1)
    names = [f"w{n}" for n in range(20)]
    for above, name in zip([None, *names], names, strict=False):
        if above is not None:
            g.locked(g.pool.lend, above)
        g.put(name)
        g.until_begun(name)
    assert g.pool.stats().lent == 19
    for name in reversed(names[1:]):
        g.let_go(name)
        eventually(lambda n=name: n in g.ended)
        above = names[names.index(name) - 1]
        eventually(lambda: g.pool.stats().in_use == 0)
        g.locked(g.pool.take_back, above)
    assert g.pool.stats().lent == 0


def test_a_given_up_item_gives_its_slot_back(ground: Callable[..., Ground]) -> None:
    """The next item starts although the thread is stuck; when the thread returns, nothing is given twice."""
    g = ground(1)
    g.put("stuck", "next", "last")
    g.until_begun("stuck")
    g.locked(g.pool.give_up, "stuck")
    g.until_begun("next")
    assert g.pool.stats().stuck == 1
    g.let_go("stuck")
    eventually(lambda: g.pool.stats().stuck == 0)
    assert "last" not in g.begun
    assert g.pool.stats().in_use == 1
    g.let_go("next")
    g.until_begun("last")


def test_too_many_stuck_threads_keep_their_slots(ground: Callable[..., Ground]) -> None:
    """Beyond four times the workers no slot is given back; the stats say so; a returning thread ends that."""
    g = ground(1)
    for number in range(STUCK_LIMIT + 1):
        g.put(f"stuck{number}")
        g.until_begun(f"stuck{number}")
        g.locked(g.pool.give_up, f"stuck{number}")
    g.put("after")
    assert g.pool.stats().withheld == 1
    assert g.pool.stats().stuck == STUCK_LIMIT + 1
    assert "after" not in g.begun
    g.let_go("stuck0")
    g.until_begun("after")
    assert g.pool.stats().withheld == 0
    assert g.pool.stats().stuck == STUCK_LIMIT


def test_a_withheld_thread_that_returns_frees_its_slot(ground: Callable[..., Ground]) -> None:
    """Its slot was never given back, so it is given back now."""
    g = ground(1)
    for number in range(STUCK_LIMIT + 1):
        g.put(f"stuck{number}")
        g.until_begun(f"stuck{number}")
        g.locked(g.pool.give_up, f"stuck{number}")
    assert g.seats[f"stuck{STUCK_LIMIT}"].place is Place.WITHHELD
    g.put("after")
    g.let_go(f"stuck{STUCK_LIMIT}")
    g.until_begun("after")


@pytest.mark.parametrize("returning", [False, True])
def test_a_waiting_item_can_be_given_up(ground: Callable[..., Ground], returning: bool) -> None:
    """Its lent slot goes back to the queue, and its thread, should it return, never waits for a slot."""
    g = ground(1)
    g.put("parent", "wanted", "other")
    g.until_begun("parent")
    g.locked(g.pool.lend, "parent")
    g.until_begun("wanted")
    ready = None
    if returning:
        with g.lock:
            ready = g.pool.take_back(g.seats["parent"])
    g.locked(g.pool.give_up, "parent")
    if ready is not None:
        assert ready.wait(PATIENCE_S)
    with g.lock:
        assert g.pool.take_back(g.seats["parent"]) is None
    assert g.pool.stats().lent == 0
    g.let_go("wanted")
    g.until_begun("other")


def test_an_item_that_raises_costs_no_slot(ground: Callable[..., Ground], caplog: pytest.LogCaptureFixture) -> None:
    """What `run` lets through is logged, and the token goes on."""

    def fail() -> None:
        raise SystemExit("not a thread's business")

    g = ground(1)
    g.does["bad"] = fail
    g.put("bad", "good")
    g.until_begun("good")
    assert "a worker failed outside its job" in caplog.text


def test_another_executor_can_run_the_tokens(ground: Callable[..., Ground]) -> None:
    """An executor of the caller's is used as it is and stays open."""
    with ThreadPoolExecutor(3, thread_name_prefix="theirs") as executor:
        g = ground(2, executor)
        g.put("a", "b", "c")
        g.until_begun("a", "b")
        assert list(g.line.items) == ["c"]
        assert g.seats["a"].thread.name.startswith("theirs")
        g.let_go("a", "b", "c")
        eventually(lambda: len(g.ended) == 3)
        g.close()
        assert executor.submit(lambda: 7).result() == 7


def test_a_token_that_cannot_be_sent_gives_its_slot_back(
    ground: Callable[..., Ground], caplog: pytest.LogCaptureFixture
) -> None:
    """An executor that refuses leaves the item in the line; a later token takes it."""

    class Moody:
        def __init__(self, inner: ThreadPoolExecutor) -> None:
            self.inner = inner
            self.refuse = True

        def submit(self, fn: Callable[[], None], /) -> Future[None]:
            if self.refuse:
                raise RuntimeError("cannot schedule new futures after shutdown")
            return self.inner.submit(fn)

    with ThreadPoolExecutor(2) as inner:
        moody = Moody(inner)
        g = ground(1, moody)
        g.put("a")
        assert g.pool.stats().in_use == 0
        assert "takes no more work" in caplog.text
        moody.refuse = False
        g.put("b")
        g.until_begun("a")
        g.let_go("a", "b")
        eventually(lambda: len(g.ended) == 2)


def test_a_stuck_thread_does_not_keep_the_interpreter_from_exiting() -> None:
    """A program whose main thread ends exits at once, although a pool thread sleeps for an hour."""
    program = """
import threading, time
from openjobs.runner.pool import Pool
from collections import deque
class Line:
    items = deque(["hour"])
    def take(self, wanted_only): return self.items.popleft() if self.items else None
    def waiting(self, wanted_only): return len(self.items)
lock, begun = threading.Lock(), threading.Event()
pool = Pool(1, lock=lock, line=Line(), claim=lambda i, s: None, run=lambda i, s: (begun.set(), time.sleep(3600)))
with lock:
    tokens = pool.reserve()
pool.start(tokens)
assert begun.wait(10)
print("main ends")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "main ends\n"


def test_a_slot_is_lent_once_and_given_up_once(ground: Callable[..., Ground]) -> None:
    """Two who decide the same about one thread at once, or too late, cost no slot and make none."""
    g = ground(1)
    g.put("a")
    g.until_begun("a")
    with g.lock:
        assert g.pool.lend(g.seats["a"])
        assert not g.pool.lend(g.seats["a"])
        assert (g.pool.stats().in_use, g.pool.stats().lent) == (0, 1)
        for _ in range(2):
            g.pool.give_up(g.seats["a"])
            assert (g.pool.stats().in_use, g.pool.stats().lent, g.pool.stats().stuck) == (0, 0, 1)
        assert not g.pool.lend(g.seats["a"])
        assert g.pool.take_back(g.seats["a"]) is None
    g.put("b")
    g.until_begun("b")
    g.let_go("a", "b")
    eventually(lambda: g.pool.stats().in_use == g.pool.stats().stuck == 0)
