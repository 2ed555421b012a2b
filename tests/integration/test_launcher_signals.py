"""The launcher under real signals in real processes (spec 001: ordered cleanup serves both exit paths)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

#: every program says on stdout what it does, line by line
HEAD = """
import os, signal, sys, threading, time
from openjobs.host.launcher import Interrupted, Launcher

def say(word):
    os.write(1, word.encode() + b"\\n")

def close(name):
    return lambda *left: say("closed " + name)
"""


class Program:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.said: list[str] = []

    def until(self, word: str) -> None:
        """Reads what it says up to a line."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, f"ended without {word!r}; said {self.said}"
            self.said.append(line.decode().strip())
            if self.said[-1] == word:
                return

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> int:
        """Its exit status, everything it still said read."""
        out, _ = self.process.communicate(timeout=30)
        self.said += out.decode().split("\n")[:-1]
        return self.process.returncode


@contextmanager
def program(code: str, *prefix: str) -> Iterator[Program]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", HEAD + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        yield Program(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


ORDERED = """
with Launcher() as launcher:
    launcher.provide("store", object(), close("store"))
    launcher.on_close(close("first"))
    launcher.provide("runner", object(), close("runner"))
    launcher.on_close(close("second"))
    say("ready")
    launcher.wait()
    say("asked to stop")
"""


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT)],
)
def test_a_signal_closes_everything_in_order(signum: int, status: int) -> None:
    """SIGTERM, SIGHUP and SIGINT end a waiting process in the ordered way, and its status says by what."""
    with program(ORDERED) as run:
        run.until("ready")
        run.send(signum)
        assert run.end() == status
        assert run.said == ["ready", "closed second", "closed first", "closed runner", "closed store"]


def test_a_busy_program_is_interrupted_where_it_stands() -> None:
    """A main thread that computes gets the signal as an exception, and its `finally` runs first."""
    code = """
    with Launcher() as launcher:
        launcher.on_close(close("disposer"))
        try:
            say("ready")
            while True:
                pass
        finally:
            say("unwound")
    """
    with program(code) as run:
        run.until("ready")
        run.send(signal.SIGTERM)
        assert run.end() == 143
        assert run.said == ["ready", "unwound", "closed disposer"]


def test_a_second_signal_ends_at_once() -> None:
    """A second signal during the shutdown ends the process by that signal, whatever still hangs."""
    code = """
    with Launcher() as launcher:
        launcher.provide("store", object(), close("store"))
        launcher.on_close(lambda: (say("hanging"), time.sleep(600)))
        say("ready")
        launcher.wait()
    """
    with program(code) as run:
        run.until("ready")
        run.send(signal.SIGTERM)
        run.until("hanging")
        run.send(signal.SIGINT)
        assert run.end() == -signal.SIGINT
        assert "closed store" not in run.said


def test_a_hanging_disposer_does_not_keep_the_process() -> None:
    """What hangs is left behind when its share is used up; the providers still close."""
    code = """
    with Launcher(deadline_s=2.0) as launcher:
        launcher.provide("store", object(), close("store"))
        launcher.on_close(lambda: time.sleep(600))
        say("ready")
        launcher.wait()
    """
    with program(code) as run:
        run.until("ready")
        run.send(signal.SIGTERM)
        assert run.end() == 143
        assert run.said == ["ready", "closed store"]


def test_a_program_that_swallows_the_signal_is_closed_all_the_same() -> None:
    """After SIGTERM the watchdog does the shutdown for a main thread that does not come back, and ends the process."""
    code = """
    with Launcher(deadline_s=2.0) as launcher:
        launcher.provide("store", object(), close("store"))
        while True:
            try:
                say("ready")
                time.sleep(600)
            except BaseException:
                say("swallowed")
                time.sleep(600)
    """
    with program(code) as run:
        run.until("ready")
        run.send(signal.SIGTERM)
        assert run.end() == 143
        assert run.said == ["ready", "swallowed", "closed store"]


def test_an_interrupt_may_be_answered_first() -> None:
    """After Ctrl-C a program may take its time to say something: only SIGTERM and SIGHUP are impatient."""
    code = """
    with Launcher(deadline_s=0.1) as launcher:
        launcher.provide("store", object(), close("store"))
        try:
            say("ready")
            launcher.wait()
        except KeyboardInterrupt:
            time.sleep(1.5)
            say("answered")
    """
    with program(code) as run:
        run.until("ready")
        run.send(signal.SIGINT)
        assert run.end() == 0
        assert run.said == ["ready", "answered", "closed store"]


def test_a_resource_that_is_being_made_is_not_lost() -> None:
    """A signal in the middle of an acquisition is raised at its end, when the resource is registered (spec 001)."""
    code = """
    with Launcher() as launcher:
        launcher.provide("store", object(), close("store"))
        with launcher.acquiring("agent") as pending:
            say("making")
            end = time.monotonic() + 30
            while not pending.stopping and time.monotonic() < end:
                time.sleep(0.01)
            pending.ready(close("agent"))
            say("made")
        say("not reached")
    """
    with program(code) as run:
        run.until("making")
        run.send(signal.SIGTERM)
        assert run.end() == 143
        assert run.said == ["making", "made", "closed agent", "closed store"]


def test_a_signal_during_a_normal_end_changes_only_the_status() -> None:
    """A signal that comes while everything closes anyway does not disturb that; the status tells of it."""
    code = """
    with Launcher() as launcher:
        launcher.provide("store", object(), close("store"))
        launcher.on_close(lambda: (say("closing"), sys.stdin.readline()))
    say("not reached")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert process.stdin is not None
    run = Program(process)
    run.until("closing")
    run.send(signal.SIGTERM)
    process.stdin.write(b"go on\n")
    assert run.end() == 143
    assert run.said == ["closing", "closed store"]


def test_an_ignored_signal_stays_ignored() -> None:
    """Under `nohup` a hangup ends nothing."""
    with program(ORDERED, "sh", "-c", "trap '' HUP; exec \"$@\"", "sh") as run:
        run.until("ready")
        run.send(signal.SIGHUP)
        run.send(signal.SIGTERM)
        assert run.end() == 143


def test_the_handlers_before_are_put_back() -> None:
    """After the block the program's own handlers are there again."""
    code = """
    signal.signal(signal.SIGTERM, lambda *args: say("mine"))
    with Launcher():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    say("went on")
    """
    with program(code) as run:
        assert run.end() == 0
        assert run.said == ["mine", "went on"]


def test_elsewhere_than_in_the_main_thread_there_are_no_handlers() -> None:
    """A launcher in another thread closes in order, and leaves signals alone."""
    code = """
    def work():
        with Launcher() as launcher:
            launcher.on_close(close("disposer"))
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    """
    with program(code) as run:
        assert run.end() == 0
        assert run.said == ["closed disposer"]
