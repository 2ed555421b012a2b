"""Times: one way to write them, and two clocks that keep the same contract."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs.clock import Clock, SystemClock, from_text, in_milliseconds, to_epoch_ms, to_text
from tests.support import FakeClock, eventually


@pytest.mark.parametrize("when", [datetime(2026, 1, 2, 3, 4, 5, 678999, UTC), datetime(1999, 12, 31, tzinfo=UTC)])
def test_a_time_is_written_in_one_form(when: datetime) -> None:
    """ISO-8601, UTC, three decimals, `Z`."""
    text = to_text(when)
    assert text.endswith("Z")
    assert len(text) == len("2026-01-02T03:04:05.678Z")
    assert from_text(text) == in_milliseconds(when)


def test_another_zone_is_written_as_utc() -> None:
    """The same instant has the same text, wherever it was taken."""
    there = datetime(2026, 1, 2, 5, 0, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    assert to_text(there) == "2026-01-01T23:30:00.000Z"


@given(st.datetimes(min_value=datetime(1900, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001 - the zone is given
def test_a_time_comes_back_to_the_millisecond(when: datetime) -> None:
    """Writing and reading loses the microseconds below, and nothing else; text sorts as time does."""
    assert from_text(to_text(when)) == in_milliseconds(when)
    assert to_text(when) <= to_text(in_milliseconds(when) + timedelta(milliseconds=1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-01-02",
        "2026-01-02T03:04:05",
        "2026-13-01T00:00:00Z",
        "0001-01-01T00:00:00+23:00",
        "2026-01-02T03:04:05Z\n",
    ],
)
def test_what_is_no_time_with_a_zone_is_a_value_error(text: str) -> None:
    """Damaged or hostile rows meet one type of error, a year out of range included."""
    with pytest.raises(ValueError):
        from_text(text)


def test_epoch_milliseconds_are_exact() -> None:
    """Ledgers hold whole milliseconds since 1970."""
    assert to_epoch_ms(datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)) == 1767323045678


def test_the_system_clock_gives_whole_milliseconds_in_utc() -> None:
    """What it says can be written and read again unchanged."""
    now = SystemClock().now()
    assert now.utcoffset() == timedelta(0)
    assert now.microsecond % 1000 == 0
    assert abs(now - datetime.now(UTC)) < timedelta(seconds=5)


def test_the_system_clock_waits_for_an_event_or_the_time() -> None:
    """True when the event is set, False when the time is up."""
    clock: Clock = SystemClock()
    event = threading.Event()
    before = clock.monotonic()
    assert not clock.wait(event, 0.01)
    assert clock.monotonic() - before >= 0.01
    event.set()
    assert clock.wait(event, None)


def test_the_fake_clock_stands_still_until_it_is_moved() -> None:
    """Both of its times go on by what it is moved, and only then."""
    clock = FakeClock()
    now, monotonic = clock.now(), clock.monotonic()
    time.sleep(0.01)
    assert (clock.now(), clock.monotonic()) == (now, monotonic)
    clock.advance(1.5)
    assert clock.now() == now + timedelta(seconds=1.5)
    assert clock.monotonic() == monotonic + 1.5
    clock.jump(-86400)
    assert clock.now() < now
    assert clock.monotonic() == monotonic + 1.5


def waiting_thread(
    clock: Clock, event: threading.Event, timeout_s: float | None
) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(clock.wait(event, timeout_s)))
    thread.start()
    return thread, answers


def test_a_fake_wait_ends_when_its_time_has_passed() -> None:
    """Not before, whatever real time does."""
    clock = FakeClock()
    thread, answers = waiting_thread(clock, threading.Event(), 30.0)
    clock.until_waiting()
    clock.advance(29.9)
    time.sleep(0.02)
    assert answers == []
    clock.advance(0.2)
    thread.join(5)
    assert answers == [False]


def test_a_fake_wait_ends_when_its_event_is_set() -> None:
    """Without any move of the clock, also where there is no time limit."""
    clock, event = FakeClock(), threading.Event()
    waits = [waiting_thread(clock, event, limit) for limit in (None, 30.0)]
    clock.until_waiting(2)
    event.set()
    for thread, answers in waits:
        thread.join(5)
        assert answers == [True]
    assert eventually(lambda: clock.wait(event, 0))


def test_a_fake_wait_of_nothing_returns_at_once() -> None:
    """A time limit of zero or less only looks."""
    assert not FakeClock().wait(threading.Event(), 0)
    assert not FakeClock().wait(threading.Event(), -1)


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_a_wait_goes_on_over_its_slices(monkeypatch: pytest.MonkeyPatch, timeout_s: float | None) -> None:
    """It ends with its event or its time, not with a slice."""
    monkeypatch.setattr("openjobs.clock._SLICE_S", 0.002)
    event, clock = threading.Event(), SystemClock()
    assert not clock.wait(event, 0.02)
    assert not clock.wait(event, -1)
    setter = threading.Timer(0.05, event.set)
    setter.start()
    assert clock.wait(event, timeout_s)
    setter.join()
