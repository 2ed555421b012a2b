"""A session that was made elsewhere becomes one of the home's: whole or not at all, and told apart which (R2, R3)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs import GitJobStore, errors
from openjobs.jobs import Queued
from openjobs.store.adopt import adopt_session
from openjobs.store.reindex import entry_of
from tests.support.jobs import clean, job_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", "relaxed") as store:
        store.create_session("here")
        yield store
        clean(store)


@pytest.fixture
def elsewhere(tmp_path: Path) -> tuple[Path, Any]:
    """The directory of a session with one job, and the job."""
    with GitJobStore(tmp_path / "other", "relaxed") as other:
        other.create_session("new")
        job = other.create(job_for(other, "new"), Queued(runner_id="r1"))
        return other.session_dir("new"), job


def test_what_was_made_elsewhere_is_one_of_the_homes(store: GitJobStore, elsewhere: tuple[Path, Any]) -> None:
    """Its jobs are found by their ids, and no directory is left behind."""
    directory, job = elsewhere
    adopt_session(store, "new", directory, [entry_of(job)])
    assert store.sessions() == ["here", "new"]
    assert store.get(job.job_id) == job
    assert not directory.exists()


def test_a_name_that_is_taken_is_refused_letter_case_apart(store: GitJobStore, elsewhere: tuple[Path, Any]) -> None:
    """On some disks the two would be one directory."""
    directory, job = elsewhere
    with pytest.raises(errors.SessionExists, match="'here'"):
        adopt_session(store, "Here", directory, [entry_of(job)])
    assert directory.exists()
    assert store.sessions() == ["here"]


def test_a_job_that_is_there_already_is_not_there_twice(store: GitJobStore, elsewhere: tuple[Path, Any]) -> None:
    """An id that only the index has, since what it names is gone, keeps nothing out."""
    directory, job = elsewhere
    entry = entry_of(job)
    store.index.add([entry])
    known = store.create(job_for(store, "here", job_id="00000000-0000-4000-8000-000000000001"), Queued(runner_id="r"))
    with pytest.raises(errors.JobExists, match="in session here"):
        adopt_session(store, "new", directory, [entry, entry_of(known)])
    assert store.sessions() == ["here"]
    adopt_session(store, "new", directory, [entry])
    assert store.get(job.job_id) == job


@pytest.mark.parametrize("step", ["the index", "the move"])
def test_a_disk_that_fails_before_the_move_changes_nothing(
    step: str, store: GitJobStore, elsewhere: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is said, and the same again succeeds."""
    directory, job = elsewhere

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if step == "the index":
            patch.setattr(store.index, "add", fail)
        else:
            patch.setattr(store.disk, "rename", fail)
        with pytest.raises(errors.StoreWriteFailed, match="was not added") as failed:
            adopt_session(store, "new", directory, [entry_of(job)])
    assert failed.value.errno == errno.ENOSPC
    assert store.sessions() == ["here"]
    adopt_session(store, "new", directory, [entry_of(job)])
    assert store.get(job.job_id) == job


def test_a_move_that_may_not_be_durable_is_said_to_be_that(
    store: GitJobStore, elsewhere: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is there, and a power cut might take it: neither done nor refused."""
    directory, job = elsewhere
    sync_dir = store.disk.sync_dir

    def fail(path: Any) -> None:
        if Path(path).name == "sessions":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_dir(path)

    with monkeypatch.context() as patch:
        patch.setattr(store.disk, "sync_dir", fail)
        with pytest.raises(errors.OutcomeUnknown, match="session new"):
            adopt_session(store, "new", directory, [entry_of(job)])
    assert store.get(job.job_id) == job
