"""Runners on a store in memory and a clock that stands still, closed at the end whatever the test did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from openjobs import JobRunner, MockTaskStore, SpawnRequest
from tests.support import FakeClock, eventually
from tests.support.jobs import clean
from tests.support.turns import Ask, MakeRunner, Turns


@pytest.fixture
def store(clock: FakeClock) -> Iterator[MockTaskStore]:
    store = MockTaskStore(clock=clock)
    yield store
    try:
        clean(store)
    finally:
        store.close()


@pytest.fixture
def sid(store: MockTaskStore) -> str:
    return store.create_session("s1")


@pytest.fixture
def make_runner(store: MockTaskStore, turns: Turns) -> Iterator[MakeRunner]:
    """`JobRunner(store, workers, sync_fn=turns, …)`, ended with the test."""
    made: list[JobRunner] = []

    def make(workers: int = 2, **options: Any) -> JobRunner:
        options.setdefault("sync_fn", turns)
        runner = JobRunner(options.pop("store", store), workers, **options)
        made.append(runner)
        return runner

    yield make
    turns.finish_all()
    for runner in made:
        # The clock stands still, so a shutdown that had to wait for its time would wait for ever.
        eventually(runner._roster.idle.is_set)
        runner.shutdown()
        eventually(runner._closed.is_set)


@pytest.fixture
def runner(make_runner: MakeRunner) -> JobRunner:
    """Two workers."""
    return make_runner()


@pytest.fixture
def ask(sid: str) -> Ask:
    def ask(prompt: str = "work", **fields: Any) -> SpawnRequest:
        return SpawnRequest(**{"prompt": prompt, "parent_session_id": sid, **fields})

    return ask
