"""Markers of who works where: one writes them while another takes the empty folder away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from openjobs.durable import Disk
from openjobs.durable.disk import AnyPath
from openjobs.store.presence import FileActive, MemoryActive
from tests.support.disks import RecordingDisk

T = TypeVar("T")


class MetDisk(RecordingDisk):
    """Somebody comes by just before the chosen effects, counted from 0."""

    def __init__(self, meet: Callable[[], None], *at: int) -> None:
        super().__init__(durable=True)
        self._meet, self._at = meet, at

    def _do(
        self, name: str, target: AnyPath | int, act: Callable[[], T], torn: Callable[[], object] | None = None
    ) -> T:
        if len(self.effects) in self._at:
            self._meet()
        return super()._do(name, target, act, torn)


@pytest.fixture
def other(tmp_path: Path) -> FileActive:
    return FileActive(tmp_path, Disk(durable=False))


def remover(other: FileActive) -> Callable[[], None]:
    def remove() -> None:
        other.clear("r", "s")
        other.remove("r")

    return remove


def effects_of_a_mark(tmp_path: Path) -> int:
    disk = RecordingDisk(durable=True)
    FileActive(tmp_path / "counted", disk).mark("r", "s")
    return len(disk.effects)


@pytest.mark.parametrize("known", [True, False], ids=["the folder is there", "the folder is new"])
def test_a_mark_outlives_a_removal_that_it_meets_at_any_effect(tmp_path: Path, other: FileActive, known: bool) -> None:
    """Where the removal comes before the mark's last effect, the mark is there when `mark` returns."""
    met = 0
    for at in range(effects_of_a_mark(tmp_path)):
        if known:
            other.mark("r", "of-before")
            other.clear("r", "of-before")
        disk = MetDisk(remover(other), at)
        FileActive(tmp_path, disk).mark("r", "s")
        assert other.sessions("r") == ["s"], (at, disk.effects)
        met += len(disk.effects) > at
        remover(other)()
        assert other.runners() == []
    assert met


def test_two_removals_in_one_mark(tmp_path: Path, other: FileActive) -> None:
    last = effects_of_a_mark(tmp_path) - 1
    disk = MetDisk(remover(other), last, 2 * last + 1)
    FileActive(tmp_path, disk).mark("r", "s")
    assert other.sessions("r") == ["s"], disk.effects


def test_a_folder_that_is_always_taken_away_is_an_error_in_the_end(tmp_path: Path, other: FileActive) -> None:
    disk = MetDisk(remover(other), *range(10_000))
    with pytest.raises(FileNotFoundError):
        FileActive(tmp_path, disk).mark("r", "s")
    assert other.runners() == []


@pytest.mark.parametrize("kept", ["on disk", "in memory"])
def test_who_has_a_mark_is_known(tmp_path: Path, kept: str) -> None:
    active = FileActive(tmp_path, Disk()) if kept == "on disk" else MemoryActive()
    assert active.runners() == []
    for runner_id, session_id in (("r2", "s1"), ("r1", "s1"), ("r1", "s2")):
        active.mark(runner_id, session_id)
    assert (active.runners(), active.sessions("r1")) == (["r1", "r2"], ["s1", "s2"])
