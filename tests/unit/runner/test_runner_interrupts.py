"""Ctrl-C in the main thread, at every place of a submit, and what strangers' code raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnResult
from openjobs.store import JobStore
from tests.support.interrupts import Interrupts
from tests.support.jobs import clean

#: they look at the request and share nothing with another thread
_PURE = ("/admission.py", "/ids.py", "/jobs.py", "/enum.py", "/text.py", "/strict_json.py", "/uuid.py")


@pytest.fixture(params=["memory", "git"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    """A store on the machine's clock."""
    store: JobStore = (
        MockTaskStore() if request.param == "memory" else GitJobStore(tmp_path / "home", durability="relaxed")
    )
    yield store
    try:
        clean(store)
    finally:
        store.close()


def test_a_submit_that_is_interrupted_anywhere_leaves_nothing_that_does_not_end(real: JobStore) -> None:
    """R6: for each place in turn, what was handed over ends, nothing else is kept, and the next job runs."""
    sid = real.create_session("s1")
    runner = JobRunner(real, 2, lambda request, cancel_event: TurnResult(final_text="done"))
    runner.await_job(runner.submit(SpawnRequest(prompt="before", parent_session_id=sid)).job_id)
    interrupts = Interrupts(but=_PURE)
    while True:
        with interrupts:
            runner.submit(SpawnRequest(prompt="work", parent_session_id=sid))
        if interrupts.place is None:
            break
        assert runner.wait_idle(10), interrupts.place
    assert len(interrupts) > 100
    job = runner.await_job(runner.submit(SpawnRequest(prompt="after", parent_session_id=sid)).job_id, 10)
    assert job.status is JobStatus.COMPLETED
    assert runner.wait_idle(10)
    assert (runner._pool._starting, runner._pool.stats().in_use) == (0, 0)
    assert {job.status for job in real.list(sid, limit=None)} <= {JobStatus.COMPLETED, JobStatus.CANCELLED}
    begun = time.monotonic()
    runner.shutdown()
    assert time.monotonic() - begun < 2
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("openjobs-" + runner.runner_id)
    ]
