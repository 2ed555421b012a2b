"""The check that nothing is left behind finds each kind of thing that could be."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import eventually
from tests.support.leaks import Snapshot, settled

Undo = Callable[[], object]


def a_thread(scratch: Path) -> Undo:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left over")
    thread.start()
    return lambda: (stop.set(), thread.join())


def a_child(scratch: Path) -> Undo:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return lambda: child.communicate(b"\n")


def a_child_that_ended_and_was_not_waited_for(scratch: Path) -> Undo:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    return lambda: os.waitpid(pid, 0)


def a_process_that_left_the_tree(scratch: Path) -> Undo:
    # A grandchild in its own session whose parent is gone: only its environment says whose it is.
    reading, writing = os.pipe()
    code = f"import os; os.fork() or (os.setsid(), os.read({reading}, 1))"
    subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[reading])
    os.close(reading)
    return lambda: os.close(writing)


def a_descriptor(scratch: Path) -> Undo:
    fd = os.open(os.devnull, os.O_RDONLY)
    return lambda: os.close(fd)


def a_temporary_file(scratch: Path) -> Undo:
    fd, name = tempfile.mkstemp()
    os.close(fd)
    return lambda: os.unlink(name)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (a_thread, "left over"),
        (a_child, "process"),
        (a_child_that_ended_and_was_not_waited_for, "process"),
        (a_descriptor, "descriptor"),
        (a_temporary_file, "temporary file"),
        pytest.param(
            a_process_that_left_the_tree,
            "process",
            marks=pytest.mark.skipif(not os.path.isdir("/proc"), reason="found by /proc alone"),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_left_behind_is_named(make: Callable[[Path], Undo], named: str, scratch: Path) -> None:
    """Each kind is found while it is there, and no more once it is gone."""
    before = Snapshot(scratch)
    undo = make(scratch)
    try:
        assert eventually(before.new)
        assert any(named in text for text in before.new())
    finally:
        undo()
    assert settled(before.new) == []


def test_what_goes_away_soon_is_not_left_behind(scratch: Path) -> None:
    """A thread that is about to end gets its moment."""
    before = Snapshot(scratch)
    timer = threading.Timer(0.05, lambda: None)
    timer.start()
    assert before.new()
    assert settled(before.new) == []
