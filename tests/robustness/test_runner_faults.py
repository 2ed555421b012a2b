"""The runner when the disk fails: what has happened is kept and tried again (design, *The store*; R3, R6, R11)."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.ids import new_id
from openjobs.jobs import TERMINAL
from tests.support import eventually
from tests.support.disks import FaultyDisk
from tests.support.turns import Turns


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def store(tmp_path: Path, disk: FaultyDisk) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", disk=disk) as store:
        store.create_session("s1")
        yield store
        disk.disarm()
        report = store.fsck("s1")
        assert report.clean, "\n".join(map(str, report.findings))


def quick(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    return TurnResult(final_text=f"did {request.prompt}")


def ask(prompt: str, **fields: object) -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id="s1", **fields)  # type: ignore[arg-type]


def test_an_end_on_a_full_disk_is_kept_and_written_when_there_is_room(store: GitJobStore, disk: FaultyDisk) -> None:
    """Its waiters wait, the stats say so, and the result is not lost."""
    turns = Turns()
    with JobRunner(store, 1, turns) as runner:
        job = runner.submit(ask("work"))
        turns["work"].until_started()
        eventually(lambda: store.get(job.job_id).status is JobStatus.RUNNING)
        disk.arm(1, errno.ENOSPC, for_good=True)
        turns["work"].finish.set()
        eventually(lambda: runner.stats().unsettled)
        assert not runner.await_job(job.job_id, timeout=0.05).terminal
        with pytest.raises(errors.StoreWriteFailed):
            runner.submit(ask("more"))
        disk.disarm()
        assert runner.await_job(job.job_id, timeout=30).result_text == "did work"
        assert runner.stats().unsettled == 0
    assert [t.status.value for t in store.history(job.job_id)] == ["pending", "queued", "running", "completed"]


def test_a_cancel_on_a_full_disk_still_stops_the_job(store: GitJobStore, disk: FaultyDisk) -> None:
    """The event does not wait for the commit."""
    turns = Turns()
    with JobRunner(store, 1, turns) as runner:
        job = runner.submit(ask("work"))
        turns["work"].until_started()
        disk.arm(1, errno.ENOSPC, for_good=True)
        assert not runner.cancel(job.job_id, "stop").terminal
        assert turns["work"].saw_cancel.wait(10)
        disk.disarm()
        assert runner.await_job(job.job_id, timeout=30).cancel_reason == "stop"


@pytest.mark.parametrize("late", [False, True], ids=["before", "late"])
def test_any_one_effect_of_a_job_may_fail(tmp_path: Path, late: bool) -> None:
    """k = 1, 2, …, from the runner's lease to its removal: a typed error or a job that ends; nothing hangs."""
    k = 0
    failed = True
    while failed:
        k += 1
        disk = FaultyDisk()
        with GitJobStore(tmp_path / f"home{k}", disk=disk) as store:
            store.create_session("s1")
            disk.arm(k, errno.EIO, late=late)
            job_id = new_id()
            try:
                with JobRunner(store, 1, quick) as runner:
                    try:
                        runner.submit(ask("work", job_id=job_id))
                    except (errors.StoreWriteFailed, errors.OutcomeUnknown):
                        again = runner.submit(ask("work", job_id=job_id))
                        assert runner.await_job(again.job_id, timeout=30).terminal
                    assert runner.await_job(job_id, timeout=30).terminal
                    assert runner.wait_idle(30)
            except errors.StoreWriteFailed:
                assert not store.list()  # there was no runner: its lease could not be written
            failed = bool(disk.failed)
            disk.disarm()
            assert all(job.status in TERMINAL for job in store.list())
        with GitJobStore(tmp_path / f"home{k}", durability="relaxed") as store, JobRunner(store, 1, quick) as runner:
            # A file that could not be removed is swept by the next one who opens the session.
            assert runner.await_job(runner.submit(ask("after")).job_id, timeout=30).terminal
            report = store.fsck("s1")
            assert report.clean, f"k={k}: " + "\n".join(map(str, report.findings))
            assert store.leases.dead() == []
    assert k > 10
