"""The launcher under real signals in real processes (spec 001: ordered cleanup serves both exit paths)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from openjobs import GitJobStore, facts
from openjobs.facts import Fact, Registered, Settled

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
def program(code: str, *prefix: str, home: Path | None = None) -> Iterator[Program]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", HEAD + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "JOBS": str(home)},
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


def test_a_signal_at_the_entry_of_the_exit_keeps_nothing_from_being_closed() -> None:
    """Between the block and the shutdown there is one moment more; the signal is raised behind both."""
    code = """
    class Late(Launcher):
        def __exit__(self, *error):
            # What the interpreter calls when a signal came just before the first line of `Launcher.__exit__`.
            class Entry:
                f_code = Launcher.__exit__.__code__
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, Entry)
            return super().__exit__(*error)

    with Late() as launcher:
        launcher.provide("store", object(), close("store"))
        say("ready")
    say("never")
    """
    with program(code) as run:
        assert run.end() == 143
        assert run.said == ["ready", "closed store"]


@pytest.mark.parametrize("word", ["", "late"])
def test_a_second_signal_waits_for_what_the_first_one_owes(word: str) -> None:
    """It ends the process at the end of the block; after a second without that, once it was said what is not done."""
    code = f"""
    late = {bool(word)}
    with Launcher() as launcher:
        with launcher.owing(lambda: say("late")):
            try:
                say("ready")
                launcher.wait()
            except KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                say("asking")
                while late:
                    time.sleep(0.01)
                say("asked")
        say("never")
    """
    with program(code) as run:
        run.until("ready")
        run.send(signal.SIGINT)
        assert run.end() == (130 if word else -signal.SIGINT)
        assert run.said == ["ready", "asking", word or "asked"]


def test_nothing_is_owed_after_the_block() -> None:
    """Left without a signal the block leaves no thread, and a second signal ends the process at once again."""
    code = """
    with Launcher() as launcher:
        before = threading.active_count()
        with launcher.owing(lambda: say("late")):
            pass
        assert threading.active_count() == before
        try:
            say("ready")
            launcher.wait()
        except KeyboardInterrupt:
            say("first")
            os.kill(os.getpid(), signal.SIGINT)
            say("never")
    """
    with program(code) as run:
        run.until("ready")
        run.send(signal.SIGINT)
        assert run.end() == -signal.SIGINT
        assert run.said == ["ready", "first"]


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


# --- jobs of a process that ends: what becomes of them reaches their session ------------------------------------

#: a home with a session, and a job in hand; `run(…)` gives the runner what the job does
JOBS = """
from pathlib import Path
from openjobs import SpawnRequest, TurnResult

def submit(runtime, work):
    store = runtime.store
    if not store.has_session("s1"):
        store.create_session("s1")
    job = runtime.runner.submit(SpawnRequest(prompt="work", parent_session_id="s1"), sync_fn=work)
    return job.job_id

started = threading.Event()

def running():
    assert started.wait(30)
    say("running")

def obeys(request, cancel_event):
    started.set()
    cancel_event.wait(60)
    return TurnResult(final_text="stopped when asked")

def never(request, cancel_event):
    started.set()
    time.sleep(600)
"""
HOME = 'Path(os.environ["JOBS"])'


def recorded(home: Path) -> tuple[Fact, Fact | None, str]:
    """The facts of the one job, and the status of its row."""
    with GitJobStore(home) as store:
        (job,) = store.list("s1")
        assert os.listdir(home / "leases") == []
        found = list(facts.read(store.session("s1")))
        assert all(fact.job_id == job.job_id for fact in found)
    assert len(found) <= 2
    return found[0], found[1] if len(found) > 1 else None, job.status.value


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT), (None, 0)],
)
def test_both_exits_settle_jobs_before_their_session_closes(tmp_path: Path, signum: int | None, status: int) -> None:
    """Signal or normal end: a running job is ended by the runner, its settlement is recorded, and only then is the
    store closed. A disposer still finds everything open."""
    code = f"""
    with Launcher() as launcher:
        runtime = launcher.open({HOME}, workers=1)
        job_id = submit(runtime, obeys)
        launcher.on_close(lambda: say(f"a disposer finds it ended: {{runtime.runner.get(job_id).terminal}}"))
        launcher.provide("last", object(), lambda left: say("last provider first"))
        running()
        if {signum is None}:
            threading.Timer(0.1, launcher.stop, ("enough",)).start()
        launcher.wait()
    """
    with program(JOBS + textwrap.dedent(code), home=tmp_path / "h") as run:
        run.until("running")
        if signum is not None:
            run.send(signum)
        assert run.end() == status
    assert run.said == ["running", "a disposer finds it ended: False", "last provider first"]
    first, last, row = recorded(tmp_path / "h")
    assert isinstance(first, Registered)
    assert isinstance(last, Settled)
    assert (last.status, last.producer_reported, row) == ("completed", True, "completed")


def test_a_job_that_does_not_stop_is_settled_within_the_bound(tmp_path: Path) -> None:
    """Five seconds are enough for its end and its settlement, which says that nobody reported it."""
    code = f"""
    with Launcher() as launcher:
        runtime = launcher.open({HOME}, workers=1)
        submit(runtime, never)
        running()
        launcher.wait()
    """
    with program(JOBS + textwrap.dedent(code), home=tmp_path / "h") as run:
        run.until("running")
        began = time.monotonic()
        run.send(signal.SIGTERM)
        assert run.end() == 143
        assert time.monotonic() - began < 12  # five, on a machine that others use
    _, last, row = recorded(tmp_path / "h")
    assert isinstance(last, Settled)
    assert (last.status, last.producer_reported, row) == ("errored", False, "errored")


def test_a_settlement_during_start_up_reaches_the_session(tmp_path: Path) -> None:
    """An agent that runs a job while it is still being made: the end of the process waits for it, so that its job
    settles as itself and is recorded; then the agent is closed, and after it the store."""
    code = f"""
    with Launcher() as launcher:
        runtime = launcher.open({HOME}, workers=1)
        go_on = threading.Event()

        def start_up(request, cancel_event):
            go_on.wait(60)
            return TurnResult(final_text="the agent is ready")

        with launcher.acquiring("agent") as pending:
            job_id = submit(runtime, start_up)
            say("making")
            end = time.monotonic() + 30
            while not pending.stopping and time.monotonic() < end:
                time.sleep(0.01)
            go_on.set()
            ended = runtime.runner.await_job(job_id)
            pending.ready(lambda: say("closed agent, its job " + ended.status.value))
        say("not reached")
    """
    with program(JOBS + textwrap.dedent(code), home=tmp_path / "h") as run:
        run.until("making")
        run.send(signal.SIGTERM)
        assert run.end() == 143
    assert run.said == ["making", "closed agent, its job completed"]
    _, last, row = recorded(tmp_path / "h")
    assert isinstance(last, Settled)
    assert (last.status, last.producer_reported, row) == ("completed", True, "completed")


def test_an_acquisition_that_never_ends_does_not_keep_settlements_away(tmp_path: Path) -> None:
    """An agent hangs while it is made: its share of the time passes, then the runner ends its jobs and the store
    closes, and the process ends within its bound although its main thread never comes back."""
    code = f"""
    with Launcher(deadline_s=2.5) as launcher:
        runtime = launcher.open({HOME}, workers=1)
        with launcher.acquiring("agent") as pending:
            submit(runtime, obeys)
            running()
            time.sleep(600)
    """
    with program(JOBS + textwrap.dedent(code), home=tmp_path / "h") as run:
        run.until("running")
        began = time.monotonic()
        run.send(signal.SIGTERM)
        assert run.end() == 143
        assert time.monotonic() - began < 10
    _, last, row = recorded(tmp_path / "h")
    assert isinstance(last, Settled)
    assert (last.status, row) == ("completed", "completed")


@pytest.mark.parametrize("swallows", [False, True])
def test_a_signal_while_a_home_is_opened_leaves_nothing_open(tmp_path: Path, swallows: bool) -> None:
    """Between the store and the runner: what was opened is owned when the signal is raised; and where opening takes
    longer than the process may, what comes too late is closed by who opened it. No lease is left."""
    code = f"""
    import openjobs.runner
    made = openjobs.runner.JobRunner

    class Slow(made):
        def __init__(self, *args, **kwargs):
            say("opening")
            end = time.monotonic() + 20
            while not (launcher._closed.is_set() if {swallows} else launcher.stopping.is_set()):
                assert time.monotonic() < end
                time.sleep(0.01)
            super().__init__(*args, **kwargs)
            say("opened")

    openjobs.runner.JobRunner = Slow
    with Launcher() as launcher:
        runtime = launcher.open({HOME}, workers=1)
        say("not reached")
    """
    with program(JOBS + textwrap.dedent(code), home=tmp_path / "h") as run:
        run.until("opening")
        run.send(signal.SIGTERM)
        assert run.end() == 143
    assert run.said == ["opening", "opened"]
    assert os.listdir(tmp_path / "h" / "leases") == []
