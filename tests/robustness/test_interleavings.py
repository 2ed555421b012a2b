"""Two writers, one effect at a time, in an order that a seed decides (R2, R3, R4): a failing order can be seen again.

Real threads, each with a repository or ledger of its own as if in another process. Before every effect on disk a
thread gives its turn back, and the scheduler picks who goes on. Locks are only tried, so nobody waits elsewhere.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from openjobs import errors
from openjobs.clock import SystemClock
from openjobs.durable import Disk
from openjobs.durable.disk import AnyPath, Buffers
from openjobs.ledger import Ledger
from openjobs.repo import Change, GitRepository, RepositoryBusy, Transaction, View
from tests.support import git
from tests.support.chaos import Chaos

WRITERS = 3


class Turns:
    """Guarantees: one thread runs at a time, and who is next depends on the seed alone."""

    def __init__(self, seed: int, threads: int) -> None:
        self._dice = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._live = threads
        self._current: int | None = None
        self.trace: list[tuple[int, str]] = []

    def give(self, number: int, what: str) -> None:
        """Come to a yield point, and go on when it is this thread's turn."""
        with self._changed:
            self._waiting.add(number)
            self._pass_on(number)
            if not self._changed.wait_for(lambda: self._current == number, timeout=60):
                raise TimeoutError(f"nobody passes the turn on; the last were {self.trace[-5:]}")
            self._waiting.discard(number)
            self.trace.append((number, what))

    def leave(self, number: int) -> None:
        with self._changed:
            self._live -= 1
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._current == number:
            self._current = None
        if self._current is None and self._waiting and len(self._waiting) == self._live:
            self._current = self._dice.choice(sorted(self._waiting))
            self._changed.notify_all()


class TurnDisk(Disk):
    """Every effect is a yield point, but for the opening of lock files: that happens under a lock of the process."""

    def __init__(self, turns: Turns, number: int) -> None:
        super().__init__(durable=False)
        self._turns, self._number = turns, number

    def create(self, path: AnyPath, mode: int = 0o600) -> int:
        self._turns.give(self._number, "create")
        return super().create(path, mode)

    def open_append(self, path: AnyPath, mode: int = 0o600) -> int:
        self._turns.give(self._number, "open")
        return super().open_append(path, mode)

    def write(self, fd: int, data: Buffers) -> int:
        self._turns.give(self._number, "write")
        return super().write(fd, data)

    def truncate(self, fd: int, length: int) -> None:
        self._turns.give(self._number, "truncate")
        super().truncate(fd, length)

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        self._turns.give(self._number, "rename")
        super().rename(source, target)

    def unlink(self, path: AnyPath) -> None:
        self._turns.give(self._number, "unlink")
        super().unlink(path)

    def mkdir(self, path: AnyPath, mode: int = 0o700) -> None:
        self._turns.give(self._number, "mkdir")
        super().mkdir(path, mode)


class TurnClock(SystemClock):
    """Who waits for a lock gives the turn back instead of sleeping."""

    def __init__(self, turns: Turns, number: int) -> None:
        self._turns, self._number = turns, number

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        self._turns.give(self._number, "wait")
        return event.is_set()


def together(turns: Turns, bodies: Sequence[Callable[[], None]]) -> None:
    failed: list[BaseException] = []

    def run(number: int, body: Callable[[], None]) -> None:
        try:
            turns.give(number, "begin")
            body()
        except BaseException as error:
            failed.append(error)
        finally:
            turns.leave(number)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failed:
        raise failed[0]


def append(text: str) -> Transaction:
    def change(view: View) -> Change | None:
        before = view.read("jobs.json") or b""
        if text.encode() in before.split():
            raise errors.JobExists(text)
        return Change(files={"jobs.json": before + text.encode() + b"\n"}, subject=text)

    return change


def commits_by_turns(path: Path, seed: int) -> list[tuple[int, str]]:
    """Each writer makes four commits in two batches; all try one that only one may make."""
    turns = Turns(seed, WRITERS)
    made: list[str] = []

    def writer(number: int) -> Callable[[], None]:
        def body() -> None:
            repository = GitRepository(path, TurnDisk(turns, number))
            for batch in range(2):
                texts = [f"{number}.{batch}.{k}" for k in range(2)]
                while True:
                    try:
                        outcomes = repository.transact([*map(append, texts), append(f"once {batch}".replace(" ", "-"))])
                        break
                    except RepositoryBusy:
                        turns.give(number, "busy")
                assert [outcome.error for outcome in outcomes[:2]] == [None, None]
                made.extend(texts + ([f"once-{batch}"] if outcomes[2].error is None else []))
            repository.close()

        return body

    together(turns, [writer(number) for number in range(WRITERS)])
    repository = GitRepository(path, Disk(durable=False))
    repository.transact([lambda view: None])
    subjects = [info.subject for info in repository.log()]
    assert sorted(subjects) == sorted([*made, "session created"])
    assert sorted(made) == sorted(
        [f"{n}.{b}.{k}" for n in range(WRITERS) for b in range(2) for k in range(2)] + ["once-0", "once-1"]
    )
    assert (repository.view().read("jobs.json") or b"").decode().split() == list(reversed(subjects[:-1]))
    assert repository.check() == []
    repository.close()
    return turns.trace


@pytest.mark.timeout(900)
def test_commits_of_several_writers_in_any_order(tmp_path: Path, chaos: Chaos) -> None:
    """Whatever the order of their effects: each commit once, in one line, none refused that should be, all whole."""
    first, effects, orders = chaos.seed(0), 0, set()
    for seed in range(first, first + chaos.rounds(12, 400, "orders")):
        path = tmp_path / str(seed) / "repo"
        path.parent.mkdir()
        GitRepository.create(path, Disk(durable=False), {"jobs.json": b""}).close()
        try:
            trace = commits_by_turns(path, seed)
        except BaseException:
            chaos.seed(seed)
            raise
        effects += len(trace)
        orders.add(tuple(trace))
        if seed % 20 == 0:
            git("fsck", "--strict", "--no-dangling", cwd=path)
    assert len(orders) > 1
    chaos.count("effects", effects)
    chaos.count("different orders", len(orders))


def test_the_same_seed_is_the_same_order(tmp_path: Path) -> None:
    """Else a failure could not be seen again."""
    traces = []
    for name in ("one", "two"):
        path = tmp_path / name / "repo"
        path.parent.mkdir()
        GitRepository.create(path, Disk(durable=False), {"jobs.json": b""}).close()
        traces.append(commits_by_turns(path, 5))
    assert traces[0] == traces[1]


@pytest.mark.timeout(900)
def test_appends_of_several_writers_in_any_order(tmp_path: Path, chaos: Chaos) -> None:
    """Each record once, in order for each writer, and numbered without a gap."""
    first, effects = chaos.seed(0), 0
    for seed in range(first, first + chaos.rounds(40, 2_000, "orders")):
        turns = Turns(seed, WRITERS)
        path = tmp_path / f"{seed}.jsonl"

        def writer(number: int, turns: Turns = turns, path: Path = path) -> Callable[[], None]:
            def body() -> None:
                ledger = Ledger(path, TurnDisk(turns, number), clock=TurnClock(turns, number), busy_timeout_s=600)
                for k in range(3):
                    ledger.append({"writer": number, "k": k})

            return body

        try:
            together(turns, [writer(number) for number in range(WRITERS)])
            found: list[Any] = list(Ledger(path).read())
            assert [record.seq for record in found] == list(range(1, 3 * WRITERS + 1))
            for number in range(WRITERS):
                assert [record.data["k"] for record in found if record.data["writer"] == number] == [0, 1, 2]
        except BaseException:
            chaos.seed(seed)
            raise
        effects += len(turns.trace)
        os.unlink(path)
    chaos.count("effects", effects)
