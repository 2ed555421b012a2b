"""Locks and leases between processes: at most one holder, and death gives everything back (R5)."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from openjobs.durable import Disk, FileLock, Lease, is_held, remove_if_free
from openjobs.errors import Bug
from tests.support.child import forked

DISK = Disk(durable=False)


def taken(path: Path) -> str:
    """Whether a lock of one's own can be had, as a child's answer; kept until the child ends."""
    return "got it" if FileLock(path, DISK).try_acquire() else "taken"


# --- locks ---


def test_a_lock_has_one_holder_among_processes(tmp_path: Path) -> None:
    """While one process has it another gets a plain no at once, and yes once it is given back."""
    lock = FileLock(tmp_path / "lock", DISK)
    assert lock.try_acquire()
    with forked(lambda: taken(tmp_path / "lock")) as child:
        assert child.answer() == "taken"
    lock.release()
    with forked(lambda: taken(tmp_path / "lock")) as child:
        assert child.answer() == "got it"
        assert not lock.try_acquire()
    assert lock.try_acquire()
    lock.release()


def test_a_lock_has_one_holder_among_threads(tmp_path: Path) -> None:
    """Two objects in one process exclude each other too, and one object is not taken twice."""
    first, second = FileLock(tmp_path / "lock", DISK), FileLock(tmp_path / "lock", DISK)
    assert first.try_acquire()
    assert not first.try_acquire()
    assert not second.try_acquire()
    assert (first.held, second.held) == (True, False)
    first.release()
    first.release()
    assert second.try_acquire()
    second.release()


def test_many_threads_on_one_lock_object_take_it_once(tmp_path: Path) -> None:
    """Of twenty that try at the same moment exactly one is told yes, and no descriptor is lost."""
    lock, start, answers = FileLock(tmp_path / "lock", DISK), threading.Barrier(20), []

    def try_it() -> None:
        start.wait()
        answers.append(lock.try_acquire())

    threads = [threading.Thread(target=try_it) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 19 + [True]
    lock.release()


def test_a_killed_process_leaves_no_lock_behind(tmp_path: Path) -> None:
    """R5: the system gives the lock back; the file stays and means nothing."""
    with forked(lambda: taken(tmp_path / "lock")) as child:
        assert child.answer() == "got it"
        child.kill()
    lock = FileLock(tmp_path / "lock", DISK)
    assert lock.try_acquire()
    lock.release()


def test_a_forked_child_keeps_no_lock_of_its_parent(tmp_path: Path) -> None:
    """The child's copy is closed, so the parent's release frees the lock although the child lives."""
    lock = FileLock(tmp_path / "lock", DISK)
    assert lock.try_acquire()
    with forked(lambda: f"held={lock.held}") as child:
        assert child.answer() == "held=False"
        other = FileLock(tmp_path / "lock", DISK)
        assert not other.try_acquire(), "the child's closing must not unlock"
        lock.release()
        assert other.try_acquire()
        other.release()


def test_a_child_cannot_release_its_parents_lock(tmp_path: Path) -> None:
    """It has forgotten it: release does nothing there."""
    lock = FileLock(tmp_path / "lock", DISK)
    assert lock.try_acquire()

    def release() -> str:
        lock.release()
        return "done"

    with forked(release) as child:
        child.answer()
        assert not FileLock(tmp_path / "lock", DISK).try_acquire()
    lock.release()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_a_fork_at_any_moment_copies_no_lock(tmp_path: Path) -> None:
    """While other threads take and give back locks, no child ever finds a copy of one among its descriptors."""
    stop = threading.Event()

    def churn(number: int) -> None:
        lock = FileLock(tmp_path / f"lock-{number}", DISK)
        while not stop.is_set():
            lock.try_acquire()
            lock.release()

    def copies() -> str:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return str([os.readlink(link) for link in links if os.path.lexists(link) and "lock-" in os.readlink(link)])

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            with forked(copies) as child:
                assert child.answer() == "[]"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_child_can_take_locks_of_its_own(tmp_path: Path) -> None:
    """Also when another thread of the parent was at it at the moment of the fork."""
    with forked(lambda: taken(tmp_path / "lock")) as child:
        assert child.answer() == "got it"
        assert not FileLock(tmp_path / "lock", DISK).try_acquire()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """R10: nothing is made or opened where it points to."""
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    lock = FileLock(tmp_path / "lock", DISK)
    with pytest.raises(OSError) as caught:
        lock.try_acquire()
    assert caught.value.errno in (errno.ELOOP, errno.EMLINK)
    assert not lock.held
    assert not (tmp_path / "victim").exists()


# --- leases ---


def a_lease(directory: Path, name: str = "r1", disk: Disk = DISK) -> Lease:
    lease = Lease(directory, name, disk)
    lease.acquire()
    return lease


def test_a_lease_is_held_from_acquire_to_release(tmp_path: Path) -> None:
    """Its directory is made where missing; after release the file stays, free, until it is cleaned up."""
    lease = a_lease(tmp_path / "leases")
    assert lease.held
    assert is_held(tmp_path / "leases", "r1")
    assert not remove_if_free(tmp_path / "leases", "r1", DISK)
    lease.release()
    assert not lease.held
    assert not is_held(tmp_path / "leases", "r1")
    assert lease.path.exists()
    assert remove_if_free(tmp_path / "leases", "r1", DISK)
    assert remove_if_free(tmp_path / "leases", "r1", DISK)
    assert os.listdir(tmp_path / "leases") == []


def test_a_lease_is_seen_only_when_it_is_held(tmp_path: Path) -> None:
    """At the moment its name appears its lock is there already: nobody can take the owner for dead."""
    seen: list[tuple[bool, bool]] = []

    class Looking(Disk):
        def rename(self, source: Any, target: Any) -> None:
            seen.append((Path(target).exists(), is_held(Path(target).parent, Path(target).name)))
            super().rename(source, target)
            seen.append((Path(target).exists(), is_held(Path(target).parent, Path(target).name)))

    lease = a_lease(tmp_path, disk=Looking(durable=False))
    assert seen == [(False, False), (True, True)]
    lease.release()


def test_a_lease_is_free_the_moment_its_process_is_killed(tmp_path: Path) -> None:
    """R5: another process sees it held before and free after, without a wait."""

    def hold() -> str:
        return f"held={a_lease(tmp_path).held}"

    with forked(hold) as child:
        assert child.answer() == "held=True"
        assert is_held(tmp_path, "r1")
        child.kill()
        assert not is_held(tmp_path, "r1")
    assert remove_if_free(tmp_path, "r1", DISK)


def test_a_forked_child_does_not_keep_its_parents_lease_alive(tmp_path: Path) -> None:
    """R5: when the owner is gone the lease is free, although a child of it lives on."""
    lease = a_lease(tmp_path)
    with forked(lambda: f"held={lease.held}") as child:
        assert child.answer() == "held=False"
        assert is_held(tmp_path, "r1")
        lease.release()
        assert not is_held(tmp_path, "r1")


def test_looking_at_a_lease_never_disturbs_its_owner(tmp_path: Path) -> None:
    """Many who look at once all see it held, and the owner keeps it."""
    lease = a_lease(tmp_path)
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.extend(is_held(tmp_path, "r1") for _ in range(100))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 400
    assert lease.held
    lease.release()


def test_a_lease_that_is_not_there_is_not_held(tmp_path: Path) -> None:
    """Its owner made it before anything could name it, so a missing one has no living owner."""
    assert not is_held(tmp_path, "r1")
    assert not is_held(tmp_path / "no directory", "r1")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../victim", "{tmp}/victim", "a/b", ".hidden", "a\0b", "a\n", "x" * 300, "é", "-rf"]
)
def test_a_name_out_of_a_row_never_leaves_the_directory(tmp_path: Path, name: str) -> None:
    """R10: rows may hold any text; what cannot be a lease's name is held by nobody, and nothing is removed.

    Every target is inside `tmp_path`, absolute ones too: should the check fail, nothing else is hit.
    """
    name = name.replace("{tmp}", str(tmp_path))
    leases = tmp_path / "leases"
    leases.mkdir()
    (tmp_path / "victim").write_bytes(b"precious")
    assert not is_held(leases, name)
    assert remove_if_free(leases, name, DISK)
    with pytest.raises(Bug):
        Lease(leases, name, DISK)
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert os.listdir(leases) == []


def test_a_fifo_in_the_place_of_a_lease_does_not_block(tmp_path: Path) -> None:
    """R10: whoever looks comes back at once."""
    os.mkfifo(tmp_path / "r1")
    assert not is_held(tmp_path, "r1")


def test_a_lease_is_taken_once(tmp_path: Path) -> None:
    """A second acquire is our bug, and costs neither the lease nor a descriptor."""
    lease = a_lease(tmp_path)
    with pytest.raises(Bug):
        lease.acquire()
    assert is_held(tmp_path, "r1")
    lease.release()


@pytest.mark.parametrize("effect", ["open_update", "rename", "sync_dir"])
def test_a_lease_that_could_not_be_made_is_not_held(tmp_path: Path, effect: str) -> None:
    """The error is raised, nothing stays locked or open, and the next try works."""

    class Failing(Disk):
        pass

    def fail(self: Disk, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    setattr(Failing, effect, fail)
    lease = Lease(tmp_path, "r1", Failing(durable=False))
    with pytest.raises(OSError):
        lease.acquire()
    assert not lease.held
    assert not is_held(tmp_path, "r1")
    again = a_lease(tmp_path)
    assert is_held(tmp_path, "r1")
    again.release()
