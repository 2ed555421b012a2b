"""An event and a future that a thread may be interrupted in, at any place, without holding up any other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import pytest

from openjobs.sign import Answer, Sign
from tests.support.interrupts import Interrupts

PATIENCE_S = 10.0


def in_time(call: Callable[[], object]) -> bool:
    """Whether another thread gets to the end of it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.5)
    return not thread.is_alive()


def spoils(make: Callable[[], Future[int]], use: Callable[[Future[int]], object]) -> list[str]:
    """The places of `use` where an interrupt keeps another thread from completing the future."""
    interrupts, spoilt = Interrupts(), []
    while True:
        future = make()
        with interrupts, suppress(TimeoutError):
            use(future)
        if interrupts.place is None:
            return spoilt
        if not in_time(lambda future=future: future.set_result(1)):  # type: ignore[misc]
            spoilt.append(interrupts.place)


@pytest.mark.parametrize(
    "use",
    [
        lambda future: future.result(0),
        lambda future: future.exception(0),
        lambda future: future.add_done_callback(lambda done: None),
        lambda future: future.done(),
    ],
    ids=["result", "exception", "add_done_callback", "done"],
)
def test_who_completes_an_answer_never_waits_for_one_that_was_interrupted(
    use: Callable[[Future[int]], object],
) -> None:
    assert spoils(Answer, use) == []


@pytest.mark.leaks("threads that wait for the lock of a future for ever: that is what is shown")
def test_a_future_of_the_standard_library_is_spoilt() -> None:
    """The reason why there is another one: the harness finds the places."""
    assert spoils(Future, lambda future: future.add_done_callback(lambda done: None)) != []


@pytest.mark.parametrize("do", [Sign.set, Sign.clear, Sign.is_set, lambda sign: sign.wait(0)])
def test_a_sign_is_set_by_anybody_whatever_was_interrupted_in_it(do: Callable[[Sign], object]) -> None:
    interrupts = Interrupts()
    while True:
        sign = Sign()
        with interrupts:
            do(sign)
        if interrupts.place is None:
            return
        woken = threading.Event()
        waiter = threading.Thread(target=lambda sign=sign, woken=woken: sign.wait(PATIENCE_S) and woken.set())  # type: ignore[misc]
        waiter.start()
        assert in_time(sign.set), interrupts.place
        waiter.join(PATIENCE_S)
        assert woken.is_set(), interrupts.place


def test_an_answer_is_a_future_in_every_other_way() -> None:
    """Callbacks once each, whether they come before or after; a time-out, an error, a cancel."""
    heard: list[str] = []
    answer: Answer[int] = Answer()
    with pytest.raises(TimeoutError):
        answer.result(0.01)
    answer.add_done_callback(lambda done: heard.append("before"))
    answer.set_result(7)
    answer.add_done_callback(lambda done: heard.append("after"))
    assert (answer.result(), answer.exception(), answer.done(), heard) == (7, None, True, ["before", "after"])
    failed: Answer[int] = Answer()
    failed.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        failed.result()
    cancelled: Answer[int] = Answer()
    cancelled.add_done_callback(lambda done: heard.append("cancelled"))
    assert cancelled.cancel()
    assert cancelled.cancelled()
    assert heard[-1] == "cancelled"
    assert not answer.cancel()


def test_a_callback_that_fails_keeps_no_other_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def fail(done: Future[int]) -> None:
        raise ValueError("of a stranger")

    answer: Answer[int] = Answer()
    answer.add_done_callback(fail)
    answer.add_done_callback(lambda done: heard.append(done.result()))
    answer.set_result(1)
    assert heard == [1]
    assert "a callback of a future failed" in caplog.text
