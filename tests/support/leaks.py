"""What a test may leave behind: nothing. Threads, processes, descriptors and temporary files are counted."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

#: how long the things that a test started may take to go away after it
PATIENCE_S = 3.0

_FD_DIR = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


class Snapshot:
    """What there was before a test; `new` names what there is more."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._threads = set(threading.enumerate())
        self._fds = _descriptors()
        self._processes = set(_children())

    def new(self) -> list[str]:
        found = [f"thread {thread.name!r}" for thread in threading.enumerate() if thread not in self._threads]
        found += [text for pid, text in _processes(self._scratch).items() if pid not in self._processes]
        found += [f"descriptor {fd}: {what}" for fd, what in _descriptors().items() if self._fds.get(fd) != what]
        found += [f"temporary file {path}" for path in sorted(self._scratch.iterdir())]
        return found


def settled(look: Callable[[], list[str]], patience_s: float = PATIENCE_S) -> list[str]:
    """What `look` still finds after a bounded wait. Garbage is collected once, late: a test that
    needs the collector to close its files for it takes a pause, not a failure."""
    end = time.monotonic() + patience_s
    collected = False
    while found := look():
        if time.monotonic() >= end:
            return found
        if not collected and time.monotonic() >= end - patience_s / 2:
            gc.collect()
            collected = True
        time.sleep(0.005)
    return []


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir(_FD_DIR):
        try:
            found[int(name)] = os.readlink(f"{_FD_DIR}/{name}") if _FD_DIR.startswith("/proc") else _identity(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _identity(fd: int) -> str:
    about = os.fstat(fd)
    return f"device {about.st_dev} inode {about.st_ino}"


def _processes(scratch: Path) -> Mapping[int, str]:
    """Our children, and on Linux also every process that was started with this test's TMPDIR:
    one that left our tree is still ours."""
    found = {pid: _describe(pid) for pid in _children()}
    mark = b"\0TMPDIR=" + os.fsencode(scratch) + b"\0"
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                environ = file.read()
        except OSError:
            continue  # it ended, or is another user's
        pid = int(path.split("/")[2])
        if pid != os.getpid() and mark in b"\0" + environ:
            found.setdefault(pid, _describe(pid))
    return found


def _children() -> list[int]:
    """Without psutil where the kernel keeps the list: this is asked twice for every test."""
    lists = glob.glob("/proc/self/task/*/children")
    if not lists:
        return [child.pid for child in psutil.Process().children()]
    found: list[int] = []
    for path in lists:
        with contextlib.suppress(OSError), open(path) as file:  # a thread may have ended
            found += map(int, file.read().split())
    return found


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.status()}): {' '.join(process.cmdline()) or process.name()}"
    except psutil.Error:
        return f"process {pid}"
