"""`gc` inside a living process: its steps and the batches of the same session take turns."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from openjobs import errors
from openjobs.repo import RepositoryBusy
from openjobs.store import JobStore
from openjobs.store.base import Collected
from tests.support import eventually


class Steps:
    """A run of maintenance that does what each step of the script says."""

    def __init__(self, *script: object) -> None:
        self.script = list(script)
        self.closed = 0

    def step(self) -> bool:
        if not self.script:
            return False
        act = self.script.pop(0)
        if isinstance(act, Exception):
            raise act
        assert callable(act)
        act()
        return True

    def close(self) -> None:
        self.closed += 1


def gc_with(
    store: JobStore, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Thread, Future[Collected]]:
    monkeypatch.setattr(type(store.repository("s1")), "maintenance", lambda _: steps)
    result: Future[Collected] = Future()

    def run() -> None:
        try:
            result.set_result(store.gc("s1"))
        except Exception as error:
            result.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def test_a_message_is_committed_between_two_steps(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the first step hands in a message and ends; 2. the message is durable; 3. only then is the second step."""
    order: list[str] = []
    written = threading.Event()

    def first() -> None:
        def write() -> None:
            store.session("s1").append("user", "in between")
            order.append("message")
            written.set()

        writer = threading.Thread(target=write)
        writer.start()
        writers.append(writer)
        # The event is waiting before this step ends.
        eventually(lambda: bool(store._committer._lanes["s1"].waiting))
        order.append("first step")

    def second() -> None:
        written.wait(10)
        order.append("second step")

    writers: list[threading.Thread] = []
    steps = Steps(first, second)
    thread, result = gc_with(store, steps, monkeypatch)
    result.result(timeout=20)
    for each in (thread, *writers):
        each.join()
    assert order == ["first step", "message", "second step"]
    assert steps.closed == 1


def test_a_busy_step_is_tried_again_and_a_failed_one_is_told(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that somebody holds put a step off; what is damaged ends the run with its reason."""
    done: list[str] = []
    steps = Steps(RepositoryBusy("held"), lambda: done.append("step"), errors.Damaged("a pack", path="p"))
    thread, result = gc_with(store, steps, monkeypatch)
    with pytest.raises(errors.Damaged, match="a pack"):
        result.result(timeout=20)
    thread.join()
    assert done == ["step"]
    assert steps.closed == 1
    store.session("s1").append("user", "the session goes on")


def test_closing_the_store_ends_a_run(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` waits for the step that runs, not for the run; what was done stands, and the caller is told."""
    running, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        go_on.wait(10)

    steps = Steps(slow, *[lambda: None] * 10_000)
    thread, result = gc_with(store, steps, monkeypatch)
    assert running.wait(10)
    closer = threading.Thread(target=store.close)
    closer.start()
    eventually(lambda: store._committer._closing)
    go_on.set()
    with pytest.raises(errors.Closed, match="as small as it can be"):
        result.result(timeout=20)
    for each in (thread, closer):
        each.join()
    assert steps.closed == 1
