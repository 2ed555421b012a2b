"""`store.asked`: a cheap value that tells a runner when to look for cancel requests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore, MockTaskStore
from openjobs.jobs import CancelRequested, Completed, Job, Queued, Started
from openjobs.store import JobStore


@pytest.fixture(params=["memory", "git"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    made = MockTaskStore() if request.param == "memory" else GitJobStore(tmp_path / "home", durability="relaxed")
    with made as store:
        store.create_session("s1")
        yield store


def job_of(store: JobStore) -> Job:
    return Job(
        job_id=store.new_id(), subject="s", description="s", agent_id="a", created_at=store.clock.now(),
        parent_session_id="s1",
    )  # fmt: skip


def test_own_transitions_do_not_change_it_and_requests_do(store: JobStore) -> None:
    """However many jobs run, a runner has nothing to look for until somebody asks."""
    job = store.create(job_of(store), Queued(runner_id="r"))
    before = store.asked("s1")
    other = store.create(job_of(store), Queued(runner_id="r"))
    store.apply(job.job_id, Started())
    store.apply(job.job_id, Completed(event_id="e"))
    store.session("s1").append("user", "hello")
    assert store.asked("s1") == before
    store.apply(other.job_id, CancelRequested())
    assert store.asked("s1") != before


def test_a_commit_of_another_store_changes_it_even_when_ours_follow(tmp_path: Path) -> None:
    """A request from another process is noticed although our own commit is the newest by then."""
    with GitJobStore(tmp_path / "home") as ours, GitJobStore(tmp_path / "home") as theirs:
        ours.create_session("s1")
        job = ours.create(job_of(ours), Queued(runner_id="r"))
        before = ours.asked("s1")
        theirs.apply(job.job_id, CancelRequested())
        seen = ours.asked("s1")
        assert seen != before
        ours.apply(job.job_id, Started())
        assert ours.asked("s1") != before


def test_a_foreign_git_commit_changes_it(tmp_path: Path) -> None:
    """Somebody commits with git itself."""
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s1")
        store.create(job_of(store), Queued(runner_id="r"))
        before = store.asked("s1")
        repo = store.session_dir("s1") / "repo"
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "--allow-empty", "-m", "mine"],
            cwd=repo,
            check=True,
        )
        assert store.asked("s1") != before


def test_it_changes_when_the_session_was_forgotten_in_between(store: JobStore) -> None:
    """A session whose files were given back is looked at once more than needed, never once too few."""
    job = store.create(job_of(store), Queued(runner_id="r"))
    before = store.asked("s1")
    store._open.clear()
    store.apply(job.job_id, CancelRequested())
    assert store.asked("s1") != before
