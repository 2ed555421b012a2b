"""A start waits a moment for company: a short job's `running` and end share a batch, each still a commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from openjobs.jobs import Completed, JobStatus, Queued, Started
from openjobs.repo import Outcome, Transaction
from openjobs.store import JobStore, committer
from tests.support import eventually
from tests.support.jobs import job_for


def batches(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many events each batch from now on has (the committer's own look at the head apart)."""
    sizes: list[int] = []
    kind = type(store.repository("s1"))
    transact = kind.transact

    def counting(self: Any, transactions: Sequence[Transaction], **more: Callable[[], None] | None) -> list[Outcome]:
        sizes.append(len(transactions) - 1)
        return transact(self, transactions, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "transact", counting)
    return sizes


def test_a_short_job_takes_two_batches(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a start may linger, the job's end takes it along at once; history has all four commits."""
    monkeypatch.setattr(committer, "LINGER_S", 3600.0)
    sizes = batches(store, monkeypatch)
    job = store.create(job_for(store, "s1"), Queued(runner_id="r1"))
    store.apply_later(job.job_id, Started(run_id="run"), keep=True)
    store.apply(job.job_id, Completed(event_id=store.new_id(), result_text="done"))
    assert sizes == [3, 2]
    assert [t.status for t in store.history(job.job_id)] == [
        JobStatus.PENDING,
        JobStatus.QUEUED,
        JobStatus.RUNNING,
        JobStatus.COMPLETED,
    ]


def test_a_start_alone_is_committed_by_itself(store: JobStore) -> None:
    """Nothing else has to come for it to become visible."""
    job = store.create(job_for(store, "s1"), Queued(runner_id="r1"))
    store.apply_later(job.job_id, Started(run_id="run"), keep=True)
    eventually(lambda: store.get(job.job_id).status is JobStatus.RUNNING)


def test_closing_takes_a_lingering_start_along(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is closed does not wait for company."""
    job = store.create(job_for(store, "s1"), Queued(runner_id="r1"))
    monkeypatch.setattr(committer, "LINGER_S", 0.2)
    done = store.apply_later(job.job_id, Started(run_id="run"), keep=True)
    store._committer.close()
    assert done.result(timeout=0).status is JobStatus.RUNNING
