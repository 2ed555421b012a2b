"""The launcher's order and bounds, without signals (spec 001; signals: tests/integration/test_launcher_signals.py)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from openjobs.errors import Bug, Closed
from openjobs.host.launcher import Launcher
from tests.support import eventually


@pytest.fixture
def order() -> list[str]:
    return []


def launcher(**options: float) -> Launcher:
    return Launcher(signals=False, **options)  # type: ignore[arg-type]


def note(order: list[str], name: str) -> Callable[..., None]:
    return lambda *left: order.append(name)


def test_disposers_run_before_providers_each_in_reverse(order: list[str]) -> None:
    """Disposers run before providers, both in reverse order of registration, however they were mixed."""
    with launcher() as owner:
        owner.provide("store", object(), note(order, "store"))
        owner.on_close(note(order, "first"))
        owner.provide("runner", object(), note(order, "runner"))
        owner.on_close(note(order, "second"))
    assert order == ["second", "first", "runner", "store"]


def test_an_exception_ends_in_the_same_order(order: list[str]) -> None:
    """An exception in the block closes everything in the same order and goes on to the caller."""
    owner = launcher()
    owner.provide("store", object(), note(order, "store"))
    owner.on_close(note(order, "disposer"))
    with pytest.raises(ZeroDivisionError), owner:
        raise ZeroDivisionError
    assert order == ["disposer", "store"]


def test_a_failing_disposer_is_contained(order: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A disposer or provider that raises is logged and keeps no other from closing."""

    def fail(*left: float) -> None:
        raise RuntimeError("broken")

    with launcher() as owner:
        owner.provide("store", object(), note(order, "store"))
        owner.provide("runner", object(), fail)
        owner.on_close(note(order, "disposer"))
        owner.on_close(fail, name="the hub")
    assert order == ["disposer", "store"]
    assert "the hub failed to close" in caplog.text
    assert "runner failed to close" in caplog.text


def test_a_hanging_disposer_is_left_behind(order: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A disposer that hangs is named in the log, and everything else still closes."""
    hang = threading.Event()
    with launcher(deadline_s=0.2) as owner:
        owner.provide("store", object(), note(order, "store"))
        owner.on_close(note(order, "disposer"))
        owner.on_close(lambda: hang.wait(), name="the hub")
    assert order == ["disposer", "store"]
    assert "the hub did not close in time" in caplog.text
    hang.set()


def test_the_deadline_is_shared() -> None:
    """Each provider is given what is left of the one deadline, the first not the share of those after it."""
    given: dict[str, float] = {}
    owner = Launcher(signals=False, deadline_s=5.0, monotonic=lambda: 100.0)
    owner.provide("store", object(), lambda left: given.update(store=left))
    owner.provide("runner", object(), lambda left: given.update(runner=left))
    owner.close()
    assert given == {"runner": 4.75, "store": 5.0}


def test_a_provider_gets_a_last_moment(order: list[str]) -> None:
    """Even when disposers used up the time, each provider is called with a moment to write."""
    now = iter(range(0, 1000, 10))
    owner = Launcher(signals=False, monotonic=lambda: next(now))
    left_s: list[float] = []
    owner.provide("store", object(), left_s.append)
    owner.on_close(note(order, "disposer"))
    owner.close()
    assert order == ["disposer"]
    assert left_s == [0.25]


def test_what_ended_before_is_not_closed_again(order: list[str]) -> None:
    """What `on_close` returns takes the disposer off the list."""
    with launcher() as owner:
        forget = owner.on_close(note(order, "disposer"))
        forget()
        forget()
    assert order == []


def test_nothing_is_registered_after_the_end() -> None:
    """A closing launcher refuses new resources; a provider that is there already is closed at once."""
    owner = launcher()
    owner.close()
    with pytest.raises(Closed):
        owner.on_close(lambda: None)
    left_s: list[float] = []
    with pytest.raises(Closed, match="store was closed again"):
        owner.provide("store", object(), left_s.append)
    assert left_s == [0.25]


def test_closing_twice_closes_once(order: list[str]) -> None:
    """`close` may be called by anyone, any number of times; whoever comes second waits for the first."""
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        go_on.wait()
        order.append("disposer")

    owner = launcher()
    owner.on_close(slow)
    threads = [threading.Thread(target=owner.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    entered.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert order == ["disposer"]


class TestAcquiring:
    def test_a_resource_closes_in_the_place_where_its_making_began(self, order: list[str]) -> None:
        """A resource is in the order by when it was begun, not by when it was ready."""
        with launcher() as owner, owner.acquiring("agent") as pending:
            owner.on_close(note(order, "registered meanwhile"))
            pending.ready(note(order, "agent"))
        assert order == ["registered meanwhile", "agent"]

    def test_closing_waits_for_what_is_being_made(self, order: list[str]) -> None:
        """A resource that becomes ready while everything closes is closed, before the providers (spec 001)."""
        owner = launcher()
        owner.provide("store", object(), note(order, "store"))
        begun, told = threading.Event(), threading.Event()

        def make() -> None:
            with owner.acquiring("agent") as pending:
                begun.set()
                eventually(lambda: pending.stopping)
                told.set()
                pending.ready(note(order, "agent"))

        maker = threading.Thread(target=make)
        maker.start()
        begun.wait()
        owner.close()
        maker.join()
        assert told.is_set()
        assert order == ["agent", "store"]

    def test_what_failed_to_be_made_is_not_closed(self, order: list[str]) -> None:
        """A block that raises had no resource; the launcher forgets it."""
        with launcher() as owner:
            owner.on_close(note(order, "other"))
            with pytest.raises(OSError, match="no"), owner.acquiring("agent"):
                raise OSError("no")
        assert order == ["other"]

    def test_what_is_ready_too_late_is_closed_by_its_maker(self, order: list[str]) -> None:
        """A resource that is ready only after the launcher gave up is closed at once, not leaked."""
        owner = launcher(deadline_s=0.1)
        with owner.acquiring("agent") as pending:
            owner.close()
            assert order == []
            pending.ready(note(order, "agent"))
            assert order == ["agent"]

    def test_ready_twice_is_our_bug(self) -> None:
        with launcher() as owner, owner.acquiring("agent") as pending:
            pending.ready(lambda: None)
            with pytest.raises(Bug):
                pending.ready(lambda: None)


class TestWaiting:
    def test_stop_ends_the_wait(self) -> None:
        """`stop`, from any thread, ends `wait`; the first reason stays."""
        with launcher() as owner:
            threading.Thread(target=owner.stop, args=("idle",)).start()
            assert owner.wait()
            owner.stop("again")
            assert owner.wait()
            assert owner.reason == "idle"
            assert owner.stopping.is_set()

    def test_a_wait_can_time_out(self) -> None:
        with launcher() as owner:
            assert not owner.wait(0.001)

    def test_a_wait_without_a_bound_is_many_short_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """1. The main thread is about to wait, 2. a signal comes, 3. it waits: what Python does on it, it does when
        that wait is over."""
        waited: list[float] = []

        class Asked:
            def get(self, timeout: float) -> str:
                waited.append(timeout)
                if len(waited) < 3:
                    raise queue.Empty
                raise KeyboardInterrupt

        with launcher() as owner:
            monkeypatch.setattr(owner, "_asked", Asked())
            with pytest.raises(KeyboardInterrupt):
                owner.wait()
        assert all(0 < seconds <= 1 for seconds in waited)
