"""What may be a home, and who may write to it at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openjobs import GitJobStore, errors
from openjobs.durable import Disk, FileLock
from openjobs.store import git as git_store


def test_a_durability_that_is_none_is_refused_with_those_that_are(tmp_path: Path) -> None:
    """A typing error never weakens what was asked for."""
    with pytest.raises(errors.InvalidInput, match="'full' or 'relaxed', not 'Full'"):
        GitJobStore(tmp_path / "home", "Full")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("empty", ["", "  "])
def test_a_home_without_a_name_is_refused(empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is not set never makes a home of the directory where somebody happens to be."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.InvalidInput, match="is empty"):
        GitJobStore(empty)
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """What it leads to may be changed by somebody else at any moment; nothing is made there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(errors.RepositoryRefused, match="symbolic link"):
        GitJobStore(tmp_path / "link", "relaxed")
    assert list((tmp_path / "real").iterdir()) == []


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """He could change every file under us."""
    me = os.geteuid()
    monkeypatch.setattr(git_store.os, "geteuid", lambda: me + 1)
    with pytest.raises(errors.RepositoryRefused, match="another user"):
        GitJobStore(tmp_path / "home", "relaxed")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_session_is_not_made_while_another_process_is_making_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names that differ in case only would otherwise both be free; who cannot wait any longer is told so."""
    monkeypatch.setattr(git_store, "_CREATE_TRIES", 2)
    with GitJobStore(tmp_path / "home", "relaxed") as store:
        lock = FileLock(tmp_path / "home" / "sessions" / ".lock", Disk(durable=False))
        assert lock.try_acquire()
        with pytest.raises(errors.SessionBusy, match="nothing was written"):
            store.create_session("s")
        lock.release()
        assert store.sessions() == []
        assert store.create_session("s") == "s"


def test_only_so_many_ledgers_of_facts_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten is read again when somebody asks: nothing is lost, and memory is bounded (R11)."""
    monkeypatch.setattr(git_store, "_FACT_LOGS", 2)
    with GitJobStore(tmp_path / "home", "relaxed") as store:
        for session_id in ("one", "two", "three"):
            store.create_session(session_id)
        first = store.facts("one")
        assert store.facts("one") is first
        store.facts("two")
        store.facts("three")
        assert store.facts("one") is not first
        assert len(store._facts) == 2
