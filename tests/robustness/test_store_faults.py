"""The job store when the disk fails at any one effect of a whole job (R1, R2, R3, R4)."""

from __future__ import annotations

import errno
import resource
import shutil
from pathlib import Path

import pytest

from openjobs import errors
from openjobs.jobs import Job, JobStatus, Queued, Started
from openjobs.store import GitJobStore
from tests.support import eventually
from tests.support.chaos import Chaos
from tests.support.disks import FaultyDisk
from tests.support.jobs import clean, end_of, job_for, walk_to_the_end

ORDER = [JobStatus.PENDING, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.COMPLETED]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose session is about to close a page and to replace a rolling pack."""
    home = tmp_path_factory.mktemp("template") / "home"
    store = GitJobStore(home, durability="relaxed")
    store.create_session("s1")
    store.session("s1").append("user", "hello")
    for number in range(64):
        store.create_later(job_for(store, "s1", f"job {number}"), Queued(runner_id="r1"))
    walk_to_the_end(store, job_for(store, "s1", "before"))
    for number in range(62):
        store.create_later(job_for(store, "s1", f"more {number}"), Queued(runner_id="r1"))
    walk_to_the_end(store, job_for(store, "s1", "last"))
    clean(store)
    store.close()
    return home


def one_job(store: GitJobStore, job: Job) -> list[JobStatus]:
    """The states that were acknowledged before the first error."""
    acknowledged = []
    try:
        store.create(job, Queued(runner_id="r1"))
        acknowledged.append(JobStatus.QUEUED)
        store.apply(job.job_id, Started(run_id="run"))
        acknowledged.append(JobStatus.RUNNING)
        store.apply(job.job_id, end_of(job))
        acknowledged.append(JobStatus.COMPLETED)
    except (errors.StoreWriteFailed, errors.OutcomeUnknown):
        pass
    return acknowledged


@pytest.mark.parametrize("late", [False, True], ids=["before", "late"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=lambda code: errno.errorcode[code])
def test_each_effect_of_a_job_may_fail_and_a_retry_finishes_it(
    template: Path, tmp_path: Path, code: int, for_good: bool, late: bool, chaos: Chaos
) -> None:
    """k = 1, 2, …: a typed error, what was acknowledged stands, and a retry with the same ids ends it once."""
    k, reached = 0, True
    while reached:
        # Every effect once in the long run; otherwise a share that differs by parameter.
        k += 1 if chaos else 3
        home = tmp_path / str(k)
        shutil.copytree(template, home)
        disk = FaultyDisk()
        store = GitJobStore(home, disk=disk)
        job = job_for(store, "s1", "the one")
        disk.arm(k + (0 if chaos else (code + for_good + 2 * late) % 3), code, for_good=for_good, late=late)
        acknowledged = one_job(store, job)
        reached = bool(disk.failed)
        where = f"effect {k}: {disk.failed[:1]}, acknowledged {acknowledged}"
        disk.disarm()
        with GitJobStore(home, durability="relaxed") as fresh:
            if acknowledged:
                there = fresh.get(job.job_id).status
                assert ORDER.index(there) >= ORDER.index(acknowledged[-1]), where
        ended = walk_to_the_end(store, job)
        assert ended.result_text == "result of the one", where
        assert [t.status for t in store.history(job.job_id)] == ORDER, where
        # A lock that could not be given back is given back with the next write.
        store.session("s1").append("user", "after")
        clean(store)
        store.close()
        shutil.rmtree(home)
    assert k > 30


def test_an_error_that_nobody_thought_of_at_any_effect_costs_nothing(
    template: Path, tmp_path: Path, chaos: Chaos
) -> None:
    """No memory is left at the k-th effect: who waits hears that nobody knows, what must not fail is tried again, and
    whatever was half done in memory is read from the disk again."""
    k, reached = 0, True
    while reached:
        k += 1 if chaos else 3
        home = tmp_path / str(k)
        shutil.copytree(template, home)
        disk = FaultyDisk()
        store = GitJobStore(home, disk=disk)
        job = job_for(store, "s1", "the one")
        disk.arm(k, MemoryError)
        created = store.create_later(job, Queued(runner_id="r1")).exception(timeout=60)
        if created is None:
            store.apply_later(job.job_id, Started(run_id="run"), keep=True)
            ended = store.apply_later(job.job_id, end_of(job), keep=True)
            assert ended.result(timeout=60).status is JobStatus.COMPLETED
        else:
            assert isinstance(created, errors.OutcomeUnknown)
            assert isinstance(created.__cause__, MemoryError)
            walk_to_the_end(store, job)
        reached = bool(disk.failed)
        disk.disarm()
        assert [t.status for t in store.history(job.job_id)] == ORDER, f"effect {k}: {disk.failed[:1]}"
        store.session("s1").append("user", "after")
        clean(store)
        store.close()
        shutil.rmtree(home)
    assert k > 30


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_write_that_the_system_cuts_short_costs_no_session(template: Path, tmp_path: Path, share: float) -> None:
    """The kernel itself takes a part of a pack and refuses the rest: a typed error, and room again is all it takes."""
    home = tmp_path / "home"
    shutil.copytree(template, home)
    store = GitJobStore(home, durability="relaxed")
    job = job_for(store, "s1", "the one")
    store.create(job, Queued(runner_id="r1"))
    packs = home / "sessions" / "s1" / "repo" / ".git" / "objects" / "pack"
    newest = max(packs.glob("*.pack"), key=lambda path: path.stat().st_mtime_ns).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for event, status in ((Started(run_id="run"), JobStatus.RUNNING), (end_of(job), JobStatus.COMPLETED)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(newest * share), before[1]))
        try:
            kept = store.apply_later(job.job_id, event, keep=True)
            with pytest.raises(errors.StoreWriteFailed, match="File too large"):
                store.create(job_for(store, "s1", "another"), Queued(runner_id="r1"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert kept.result(timeout=60).status is status
    assert store.get(job.job_id).result_text == "result of the one"
    assert [t.status for t in store.history(job.job_id)] == ORDER
    clean(store)
    store.close()


def test_an_end_is_kept_while_the_disk_is_full_and_lands_when_it_is_not(template: Path, tmp_path: Path) -> None:
    """`keep=True`: nobody loses a result; `unsettled` says so, and other sessions go on as soon as they can."""
    home = tmp_path / "home"
    shutil.copytree(template, home)
    disk = FaultyDisk()
    store = GitJobStore(home, disk=disk)
    job = job_for(store, "s1", "the one")
    store.create(job, Queued(runner_id="r1"))
    disk.arm(1, errno.ENOSPC, for_good=True)
    running = store.apply_later(job.job_id, Started(run_id="run"), keep=True)
    ended = store.apply_later(job.job_id, end_of(job), keep=True)
    eventually(lambda: store.unsettled() == 2)
    with pytest.raises(errors.StoreWriteFailed):
        store.create(job_for(store, "s1", "another"), Queued(runner_id="r1"))
    assert not running.done()
    assert not ended.done()
    disk.disarm()
    assert ended.result(timeout=60).status is JobStatus.COMPLETED
    assert running.result(timeout=60).status is JobStatus.RUNNING
    assert store.unsettled() == 0
    assert [t.status for t in store.history(job.job_id)] == ORDER
    clean(store)
    store.close()


def test_what_close_leaves_says_so(template: Path, tmp_path: Path) -> None:
    """A close with a bound gives up what cannot be written; its future names the reason."""
    home = tmp_path / "home"
    shutil.copytree(template, home)
    disk = FaultyDisk()
    store = GitJobStore(home, disk=disk)
    job = job_for(store, "s1", "the one")
    store.create(job, Queued(runner_id="r1"))
    disk.arm(1, errno.ENOSPC, for_good=True)
    running = store.apply_later(job.job_id, Started(run_id="run"), keep=True)
    eventually(lambda: store.unsettled() == 1)
    store.close(timeout=0.2)
    with pytest.raises(errors.Closed, match="recovery"):
        running.result(timeout=0)
    with GitJobStore(home, durability="relaxed") as fresh:
        assert fresh.get(job.job_id).status is JobStatus.QUEUED
        clean(fresh)
