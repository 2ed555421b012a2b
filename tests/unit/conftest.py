"""The store of tests that hold for both stores. A file or folder may have its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs.store import GitJobStore, JobStore, MockTaskStore
from tests.support.jobs import clean


@pytest.fixture(params=["memory", "git"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    """With the session `s1`; looked through at the end, unless the test has closed it."""
    store: JobStore = (
        MockTaskStore() if request.param == "memory" else GitJobStore(tmp_path / "home", durability="relaxed")
    )
    with store:
        store.create_session("s1")
        yield store
        if not store._closed:
            clean(store)
