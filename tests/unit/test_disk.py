"""The disk seam: what each combination leaves when any single effect fails (R1, R2)."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openjobs.durable import Disk

EFFECTS = ("create", "open_append", "open_update", "write", "truncate", "sync", "sync_data", "sync_dir")
EFFECTS += ("rename", "unlink", "mkdir", "rmdir")


class RecordingDisk(Disk):
    """Writes down each effect, and lets the k-th one (from 0) fail: once, or from then on."""

    def __init__(self, fail_at: int | None = None, *, code: int = errno.EIO, for_ever: bool = False) -> None:
        super().__init__()
        self.effects: list[str] = []
        self._fail_at, self._code, self._for_ever = fail_at, code, for_ever
        for name in EFFECTS:
            setattr(self, name, self._recorded(name, getattr(self, name)))

    def _recorded(self, name: str, effect: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            k = len(self.effects)
            self.effects.append(name)
            if self._fail_at is not None and (k == self._fail_at or (self._for_ever and k > self._fail_at)):
                raise OSError(self._code, os.strerror(self._code))
            return effect(*args, **kwargs)

        return call


def test_replace_takes_its_steps_in_the_durable_order(tmp_path: Path) -> None:
    """R1: bytes before name, name before the directory's sync, and nothing after it."""
    disk = RecordingDisk()
    disk.replace(tmp_path / "f", b"new")
    assert disk.effects == ["create", "write", "sync", "rename", "sync_dir"]
    assert (tmp_path / "f").read_bytes() == b"new"


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("k", range(5))
def test_replace_is_all_or_nothing_whatever_effect_fails(tmp_path: Path, k: int, code: int, for_ever: bool) -> None:
    """R2: the old bytes or the new ones, whole; the new ones only after the rename; the error is raised."""
    path = tmp_path / "f"
    path.write_bytes(b"old")
    disk = RecordingDisk(k, code=code, for_ever=for_ever)
    with pytest.raises(OSError) as caught:
        disk.replace(path, b"new")
    assert caught.value.errno == code
    assert path.read_bytes() == (b"new" if disk.effects[k] == "sync_dir" else b"old")
    if not for_ever:
        assert os.listdir(tmp_path) == ["f"], "a temporary file stays only where it cannot be removed"
    Disk().replace(path, b"third")
    assert path.read_bytes() == b"third"


def test_a_sync_that_failed_is_never_tried_again(tmp_path: Path) -> None:
    """The kernel may have dropped the pages: a second sync of the same descriptor could lie."""
    disk = RecordingDisk(2)
    with pytest.raises(OSError):
        disk.replace(tmp_path / "f", b"new")
    assert disk.effects == ["create", "write", "sync", "unlink"]


def test_threads_that_replace_one_file_never_mix_their_bytes(tmp_path: Path) -> None:
    """Each has its own temporary file: what is read is always one whole version."""
    path, disk, faults = tmp_path / "f", Disk(durable=False), []
    versions = {bytes([65 + n]) * 5000 for n in range(4)}
    path.write_bytes(min(versions))

    def write(data: bytes) -> None:
        try:
            for _ in range(100):
                disk.replace(path, data)
        except OSError as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in versions]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in versions
    for thread in threads:
        thread.join()
    assert faults == []
    assert os.listdir(tmp_path) == ["f"]


def test_a_temporary_file_of_a_dead_process_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is taken may be somebody else's: another one is used and it stays."""
    numbers = iter([0, 0, 1])
    monkeypatch.setattr("openjobs.durable.disk._temporary_numbers", numbers)
    left = tmp_path / f".f.{os.getpid()}-0.tmp"
    left.write_bytes(b"somebody's")
    Disk().replace(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert left.read_bytes() == b"somebody's"


def test_replace_puts_a_file_in_the_place_of_a_link(tmp_path: Path) -> None:
    """R10: a link that somebody planted is replaced, never written through."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "f").symlink_to(victim)
    Disk().replace(tmp_path / "f", b"new")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "f").is_symlink()


@pytest.mark.parametrize("k", range(3))
def test_a_new_file_that_could_not_be_written_whole_is_removed(tmp_path: Path, k: int) -> None:
    """No empty or half file stays under a final name."""
    with pytest.raises(OSError):
        RecordingDisk(k, code=errno.ENOSPC).write_new(tmp_path / "f", b"new")
    assert os.listdir(tmp_path) == []


def test_a_new_file_never_takes_the_place_of_another(tmp_path: Path) -> None:
    """Neither a file nor a link, not even one that leads nowhere."""
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("f", "link"):
        with pytest.raises(FileExistsError):
            Disk().write_new(tmp_path / name, b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert not (tmp_path / "nowhere").exists()


def test_files_and_directories_are_for_their_owner_only(tmp_path: Path) -> None:
    """R10: 0600 and 0700, whatever the process's umask allows."""
    Disk().replace(tmp_path / "f", b"x")
    Disk().make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("at_most", [1, 3, 7, 1000])
def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_most: int) -> None:
    """However little the system takes at a time, across buffers and empty ones: all of it lands, in order."""
    real = os.write

    def stingy(fd: int, buffers: list[memoryview]) -> int:
        return real(fd, b"".join(buffers)[:at_most])

    monkeypatch.setattr(os, "writev", stingy)
    parts = [b"", b"abc", bytearray(b"defgh"), b"", memoryview(b"ij"), b"k" * 20, b""]
    disk, path = Disk(), tmp_path / "f"
    fd = disk.create(path)
    try:
        assert disk.write(fd, parts) == 30
        assert disk.write(fd, b"") == 0
        assert disk.write(fd, []) == 0
    finally:
        os.close(fd)
    assert path.read_bytes() == b"abcdefghij" + b"k" * 20


def test_more_buffers_than_one_call_takes_are_all_written(tmp_path: Path) -> None:
    """The system's limit on buffers a call is ours to know."""
    parts = [str(n).encode() + b"\n" for n in range(5000)]
    Disk().write_new(tmp_path / "f", iter(parts))
    assert (tmp_path / "f").read_bytes() == b"".join(parts)


def test_items_wider_than_a_byte_are_counted_in_bytes(tmp_path: Path) -> None:
    """A view of integers is its memory, not its number of integers."""
    wide = memoryview(bytes(range(16))).cast("I")
    Disk().write_new(tmp_path / "f", wide)
    assert (tmp_path / "f").read_bytes() == bytes(range(16))


def test_directories_are_made_one_by_one_each_synced_into_its_parent(tmp_path: Path) -> None:
    """R1: a directory that exists needs nothing; each new one is durable before the next is made in it."""
    disk = RecordingDisk()
    disk.make_dirs(tmp_path / "a" / "b")
    disk.make_dirs(tmp_path / "a" / "b")
    assert disk.effects == ["mkdir", "sync_dir", "mkdir", "sync_dir"]


def test_a_directory_that_may_not_be_durable_is_not_taken_for_one(tmp_path: Path) -> None:
    """R1: after a failed sync the next call makes and syncs it again."""
    with pytest.raises(OSError):
        RecordingDisk(3).make_dirs(tmp_path / "a" / "b")
    again = RecordingDisk()
    again.make_dirs(tmp_path / "a" / "b")
    assert again.effects == ["mkdir", "sync_dir"]


def test_directories_made_by_two_at_once_are_fine(tmp_path: Path) -> None:
    """Whoever comes second finds it there."""

    class Raced(Disk):
        def mkdir(self, path: Any, mode: int = 0o700) -> None:
            os.mkdir(path, mode)
            super().mkdir(path, mode)

    Raced().make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_relaxed_leaves_out_the_syncs_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `durable=False` no sync reaches the system; the bytes are written all the same."""
    called: list[int] = []
    for name in ("fsync", "fdatasync"):
        if hasattr(os, name):
            monkeypatch.setattr(os, name, called.append)
    disk = Disk(durable=False)
    disk.make_dirs(tmp_path / "a")
    disk.replace(tmp_path / "a" / "f", b"x")
    fd = disk.open_append(tmp_path / "a" / "f")
    disk.write(fd, b"y")
    disk.sync_data(fd)
    os.close(fd)
    assert called == []
    assert (tmp_path / "a" / "f").read_bytes() == b"xy"


def test_a_file_system_that_cannot_sync_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some answer EINVAL; every other error is raised. No descriptor stays open either way."""
    for code in (errno.EINVAL, errno.EIO):

        def failing(fd: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("openjobs.durable.disk._full_sync", failing)
        if code == errno.EINVAL:
            Disk().sync_dir(tmp_path)
        else:
            with pytest.raises(OSError):
                Disk().sync_dir(tmp_path)
