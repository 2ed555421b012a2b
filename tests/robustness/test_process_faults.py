"""Background commands when something dies, lies or is full: at most once, known or lost, nothing left."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openjobs.errors import Bug, Damaged, InvalidInput, KeeperFailed, RunRefused
from openjobs.processes import layout, rundir
from openjobs.processes import template as template_module
from openjobs.processes.command import run_command
from openjobs.processes.identity import Identity, LinuxSystem, PortableSystem, System, from_json, this_system
from openjobs.processes.output import read_output
from openjobs.processes.template import Run, Template
from tests.support import eventually
from tests.support.chaos import Chaos
from tests.support.processes import RELAXED, faulty_template, marked, request, settle, this_task, traced

BOUND_S = 20.0
hear = Run._hear
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfd")


@pytest.fixture
def template() -> Iterator[Template]:
    with Template() as template:
        yield template


@pytest.fixture
def faulty() -> Iterator[Template]:
    """A template whose keepers fail where the request says."""
    with faulty_template() as template:
        yield template


# --- identities ---------------------------------------------------------------------------------------


def forged(system: System, real: Identity, count: int) -> Iterator[Identity]:
    """Identities that somebody wrote into a file to make us signal what is not ours."""
    rng = random.Random(9)
    me = system.identify(os.getpid())
    leader = system.identify(os.getpgrp())
    init = system.identify(1)
    assert me is not None
    certain = [
        me,
        Identity(0, real.start, real.boot),
        Identity(-1, real.start, real.boot),
        Identity(1, real.start, real.boot),
        Identity(-real.pid, real.start, real.boot),
        Identity(-os.getpgrp(), me.start, me.boot),
        Identity(2**31, real.start, real.boot),
        Identity(2**64 + real.pid, real.start, real.boot),
        Identity(True, real.start, real.boot),
        Identity(real.pid, real.start, ""),
        Identity(real.pid, real.start, real.boot.upper() + "x"),
        *([leader] if leader else []),
        *([init] if init else []),
    ]
    yield from certain
    pids = [m.identity.pid for m in system.table()]
    for _ in range(count - len(certain)):
        kind = rng.randrange(4)
        if kind == 0:  # the pid was given out again
            yield Identity(real.pid, real.start + rng.choice([-1, 1]) * rng.randint(1, 10**6), real.boot)
        elif kind == 1:  # another boot
            yield Identity(real.pid, real.start, f"{rng.getrandbits(128):032x}")
        elif kind == 2:  # anybody's pid
            yield Identity(rng.choice(pids), rng.randint(-(10**9), 10**9) * 2 + 10**10, real.boot)
        else:
            yield Identity(rng.randint(-(2**33), 1), real.start, real.boot)


@pytest.mark.parametrize("kind", ["linux", "portable"])
def test_no_forged_identity_is_ever_signalled(kind: str) -> None:
    """Ten thousand of them: nothing is sent, neither TERM nor KILL nor the harmless 0. The true one is."""
    sent: list[tuple[int, int]] = []

    def note(*what: int) -> None:
        sent.append((what[0], what[1]))

    system: System
    if kind == "linux":
        if sys.platform != "linux":
            pytest.skip("needs /proc")
        system = LinuxSystem(send=note)
    else:
        system = PortableSystem(send=note)
    process = subprocess.Popen(["sleep", "300"])
    try:
        real = system.identify(process.pid)
        assert real is not None
        for identity in forged(system, real, 10_000):
            assert not system.send(identity, signal.SIGKILL), identity
            assert not system.send(identity, 0), identity
        assert sent == []
        assert system.send(real, signal.SIGTERM)
        assert len(sent) == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1, "x", [], {}, {"pid": 5}),
        {"pid": "5", "start": 1, "boot": "b"},
        {"pid": True, "start": 1, "boot": "b"},
        {"pid": 5, "start": 1.5, "boot": "b"},
        {"pid": 5, "start": 1, "boot": None},
    ],
    ids=str,
)
def test_what_is_no_identity_is_not_read_as_one(value: object) -> None:
    """Nothing is guessed from a damaged record."""
    with pytest.raises(ValueError):
        from_json(value)


def test_a_forged_keeper_is_not_told_to_stop(tmp_path: Path) -> None:
    """The lock is held, and the file names a process that is not the keeper it says: no signal, no request."""
    system = this_system()
    process = subprocess.Popen(["sleep", "300"])
    fd = os.open(tmp_path / layout.KEEPER, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        real = system.identify(process.pid)
        assert real is not None
        lies = [
            Identity(real.pid, real.start + 1, real.boot).to_json(),
            Identity(real.pid, real.start, "another-boot").to_json(),
            Identity(1, 0, real.boot).to_json(),
            Identity(-1, real.start, real.boot).to_json(),
        ]
        for lie in lies:
            (tmp_path / layout.KEEPER).write_text(json.dumps(lie) + "\n")
            assert not rundir.request_stop(tmp_path, disk=RELAXED, system=system)
            assert not (tmp_path / layout.STOP).exists()
        assert process.poll() is None
    finally:
        os.close(fd)
        process.kill()
        process.wait()


def test_a_burial_ends_nobody_by_a_forged_identity(tmp_path: Path) -> None:
    """`keeper` names a process that was never the run's: it lives on."""
    system = this_system()
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        real = system.identify(process.pid)
        assert real is not None
        for lie in (Identity(real.pid, real.start - 1, real.boot), Identity(real.pid, real.start, "other")):
            lines_of_a_keeper = [real.to_json(), {"started_at": "now"}, {"child": lie.to_json()}]
            (tmp_path / layout.KEEPER).write_text("".join(json.dumps(line) + "\n" for line in lines_of_a_keeper))
            burial = settle(tmp_path)
            assert burial.may_have_run
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody whom a test may signal."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def ends(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def refuses(*_: object) -> None:
    raise PermissionError(errno.EPERM, "not yours")


def test_an_identity_is_shown_as_what_it_is() -> None:
    """A message that names one says all that makes it, in the form of the call that makes the same."""
    identity = Identity(5, 7, "b")
    assert eval(repr(identity), {"Identity": Identity}) == identity
    assert repr(identity) != repr(Identity(5, 8, "b"))


@pytest.mark.parametrize("kind", [pytest.param(LinuxSystem, marks=on_linux), PortableSystem])
def test_a_signal_that_the_system_refuses_was_not_sent(
    kind: type[LinuxSystem] | type[PortableSystem], sleeper: subprocess.Popen[bytes]
) -> None:
    """Somebody else's process, or one that ended in between: False, and no error."""
    system = kind(send=refuses)
    identity = system.identify(sleeper.pid)
    assert identity is not None
    assert not system.send(identity, signal.SIGTERM)
    assert sleeper.poll() is None


@on_linux
def test_without_pidfd_the_identity_is_proven_all_the_same(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sandbox that does not know `pidfd_open(2)` a pid is signalled, after its start time was compared; never
    where the effect was to go elsewhere, and a refusal is no error."""

    def unknown(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    system = LinuxSystem()
    real = system.identify(sleeper.pid)
    assert real is not None
    assert not system.send(Identity(real.pid, real.start + 1, real.boot), signal.SIGKILL)
    assert not LinuxSystem(send=lambda fd, signum: None).send(real, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", refuses)
        assert not system.send(real, signal.SIGKILL)
    assert sleeper.poll() is None
    assert system.send(real, signal.SIGTERM)
    assert sleeper.wait(BOUND_S) == -signal.SIGTERM


@on_linux
def test_a_pidfd_that_is_refused_for_another_reason_sends_nothing(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, say: there is no second way around the proof."""

    def full(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    system = LinuxSystem()
    real = system.identify(sleeper.pid)
    assert real is not None
    monkeypatch.setattr(os, "pidfd_open", full)
    assert not system.send(real, signal.SIGKILL)
    assert sleeper.poll() is None


@on_linux
def test_a_process_that_ends_while_it_is_looked_at_is_nobody(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reaped between the opening of its files in /proc and the reading of them."""
    system = LinuxSystem()
    opens = os.open

    def then_ends(path: str, flags: int) -> int:
        fd = opens(path, flags)
        ends(sleeper)
        return fd

    system.boot()
    monkeypatch.setattr("openjobs.processes.identity.os.open", then_ends)
    assert system.identify(sleeper.pid) is None


def test_other_systems_pass_over_who_ends_while_they_look(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is of those who are there; who has gone has no environment either."""
    system = PortableSystem()
    gone, us = psutil.Process(sleeper.pid), psutil.Process()
    ends(sleeper)
    monkeypatch.setattr(psutil, "process_iter", lambda: [gone, us])
    assert [member.identity.pid for member in system.table()] == [os.getpid()]
    assert not system.has_variable(gone.pid, b"HOME=" + os.fsencode(os.environ["HOME"]))
    monkeypatch.setattr(os, "getsid", refuses)
    (member,) = system.table()
    assert (member.identity.pid, member.session) == (os.getpid(), 0)


@on_linux
def test_a_system_without_pidfd_in_its_python_signals_nobody(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux's way to signal is Linux's alone."""
    system = LinuxSystem()
    real = system.identify(sleeper.pid)
    assert real is not None
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert not system.send(real, signal.SIGKILL)
    assert sleeper.poll() is None


# --- a run's directory ------------------------------------------------------------------------------------


def test_a_directory_that_is_none_has_no_keeper(tmp_path: Path) -> None:
    """A file stands where the run's directory, or one above it, should be: nothing lives there, and nothing is read."""
    (tmp_path / "file").write_text("x")
    assert not rundir.keeper_lives(tmp_path / "file")
    assert rundir.keeper_identity(tmp_path / "file") is None
    assert rundir.read_exit(tmp_path / "file") is None


@pytest.mark.parametrize("name", [layout.EXIT, layout.KEEPER])
def test_a_link_in_place_of_a_record_is_damage(name: str, tmp_path: Path) -> None:
    """Whatever it points to, it is no keeper's word."""
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match=name):
        (rundir.read_exit if name == layout.EXIT else rundir.keeper_identity)(tmp_path)


def test_a_keeper_that_stays_is_waited_for_as_long_as_was_said(tmp_path: Path, template: Template) -> None:
    """False while it goes on; True once it is gone."""
    with template.start(tmp_path, request("exec sleep 300", grace_s=0.2)) as started:
        started.go()
        assert not rundir.wait_gone(tmp_path, timeout_s=0.05)
        assert rundir.request_stop(tmp_path, disk=RELAXED, system=this_system())
        assert rundir.wait_gone(tmp_path, timeout_s=BOUND_S)


def test_a_lock_without_a_name_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody holds the keeper's lock and never says who it is: it is not waited for without end, and not told."""
    pauses: list[float] = []
    monkeypatch.setattr("openjobs.processes.rundir.time.sleep", pauses.append)
    fd = os.open(tmp_path / layout.KEEPER, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert not rundir.request_stop(tmp_path, disk=RELAXED, system=this_system())
    finally:
        os.close(fd)
    assert 0.5 < sum(pauses) < 5
    assert not (tmp_path / layout.STOP).exists()


@pytest.mark.parametrize("why", ["no pidfd", "another has its pid"])
def test_an_end_is_waited_for_without_a_descriptor_of_the_keeper(
    why: str, tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has none, or the pid may be another's by now, the directory is looked at instead."""

    def unknown(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    class Forgetful(LinuxSystem):
        def is_alive(self, identity: Identity) -> bool:
            return False

    system = Forgetful() if why == "another has its pid" else this_system()
    command = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 5"
    with template.start(tmp_path, request(command)) as started:
        started.go()
        with monkeypatch.context() as patch:
            if why == "no pidfd":
                patch.setattr(os, "pidfd_open", unknown, raising=False)
            assert rundir.wait_for_exit(tmp_path, timeout_s=0.05, system=system) is None
            (tmp_path / "go").touch()
            record = rundir.wait_for_exit(tmp_path, timeout_s=BOUND_S, system=system)
    assert record is not None
    assert record.exit_code == 5


def test_a_run_without_a_keeper_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody will ever write a record, so the answer comes at once, however long one would wait."""
    assert rundir.wait_for_exit(tmp_path, system=this_system()) is None


# --- a command that is waited for --------------------------------------------------------------------------


def test_a_command_whose_dead_keepers_lock_is_held_is_settled_once_it_is_free(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else buries it, or looks: that is waited for, and the command is lost, not forgotten."""
    bury, looks = rundir.bury, [None, None]
    monkeypatch.setattr(rundir, "bury", lambda *args, **more: looks.pop() if looks else bury(*args, **more))
    end = run_command(
        "exec sleep 300",
        run_dir=tmp_path,
        template=template,
        disk=RELAXED,
        task_id=this_task(),
        on_started=lambda keeper, child: os.kill(keeper.pid, signal.SIGKILL),
    )
    assert (end.stopped_by, end.exit_code, end.error, looks) == ("lost", None, "the keeper was killed", [])
    assert marked() == []


def test_a_lock_that_is_never_given_back_is_said(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of ours holds a dead keeper's lock for long; who waits is told of it in the end."""
    monkeypatch.setattr(rundir, "bury", lambda *args, **more: None)
    monkeypatch.setattr("openjobs.processes.command.AFTER_KILL_S", 0.05)
    with pytest.raises(Bug, match="lock is held"):
        run_command(
            "exec sleep 300",
            run_dir=tmp_path,
            template=template,
            disk=RELAXED,
            task_id=this_task(),
            on_started=lambda keeper, child: os.kill(keeper.pid, signal.SIGKILL),
        )
    monkeypatch.undo()
    assert settle(tmp_path).may_have_run
    assert marked() == []


def test_a_record_that_only_the_burial_finds_is_the_end(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper was killed right after it wrote its record, before it could say so: how it ended is known."""
    monkeypatch.setattr(template_module, "read_exit", lambda path: None)
    monkeypatch.setattr(Run, "_hear", lambda run, line: None if b'"ended"' in line else hear(run, line))
    end = run_command("exit 6", run_dir=tmp_path, template=template, disk=RELAXED, task_id=this_task())
    assert (end.stopped_by, end.exit_code) == ("exit", 6)


def test_there_are_three_streams_and_no_other(tmp_path: Path) -> None:
    """A name that is none of them is not a file to be read."""
    with pytest.raises(InvalidInput, match="no stream"):
        read_output(tmp_path, "../stdout")


# --- the keeper dies, or its disk does -------------------------------------------------------------------


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def start_and_wait(template: Template, run_dir: Path, command: str, env: dict[str, str]) -> Run | None:
    """The run, when its keeper is gone; None when there never was one."""
    try:
        started = template.start(run_dir, request(command, env={**os.environ, **env}, grace_s=0.2))
    except (KeeperFailed, RunRefused):
        return None
    with started:
        try:
            started.go()
        except KeeperFailed:
            pass
        assert started.wait_gone(BOUND_S)
    return started


def check_outcome(template: Template, run_dir: Path, count: Path, code: int) -> rundir.Burial:
    """What is known afterwards is true, nothing is left, and nothing will run it again."""
    burial = settle(run_dir)
    ran = lines(count)
    assert ran <= 1
    assert burial.leftovers == [] or burial.leftovers == ()
    assert marked() == []
    if not burial.may_have_run:
        assert ran == 0
    if burial.record is not None and burial.record.stopped_by == "exit":
        assert (burial.record.exit_code, ran) == (code, 1)
    assert rundir.is_lost(run_dir) == (burial.record is None)
    with pytest.raises(RunRefused):
        template.start(run_dir, request(f"echo again >> {count}"))
    assert lines(count) == ran
    again = settle(run_dir)
    assert again == burial
    return burial


def test_a_keeper_killed_at_any_line_runs_its_command_at_most_once(
    tmp_path: Path, template: Template, faulty: Template, chaos: Chaos
) -> None:
    """The outcome is known where the keeper had recorded it, else the run is lost; nothing is left of its tree."""
    outcomes = set()
    for line in itertools.count(1, 1 if chaos else 17):
        run_dir = tmp_path / f"run-{line}"
        run_dir.mkdir()
        count = tmp_path / f"count-{line}"
        command = f"echo ran >> {count}; sleep 300 & exit 3"
        started = start_and_wait(faulty, run_dir, command, {"FAULT_LINE": str(line)})
        burial = check_outcome(template, run_dir, count, 3)
        outcomes.add((burial.may_have_run, burial.record is not None))
        if started is not None and (run_dir / layout.SWEPT).exists():
            break
    # Killed before the command, with it, and after its record: each was met.
    assert outcomes >= {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("times", [1, 3, 10**6])
def test_a_disk_that_fails_at_any_effect_leaves_a_known_outcome(
    times: int, tmp_path: Path, template: Template, faulty: Template
) -> None:
    """ENOSPC at the k-th effect and for a while: at most once, and the record is true wherever there is one."""
    reported = 0
    for effect in itertools.count(1):
        run_dir = tmp_path / f"run-{effect}"
        run_dir.mkdir()
        count = tmp_path / f"count-{effect}"
        fault = {"FAULT_EFFECT": str(effect), "FAULT_TIMES": str(times)}
        started = start_and_wait(faulty, run_dir, f"echo ran >> {count}; echo out; exit 3", fault)
        burial = check_outcome(template, run_dir, count, 3)
        if started is not None and started.record is not None:
            # The worker hears the outcome even when it could not be written down.
            reported += 1
            # An error of the last sync leaves a record that may not be durable, but is the same.
            assert burial.record is not None or not started.recorded
            assert burial.record in (None, started.record)
            assert started.record.stopped_by in ("exit", "not_started", "never_started")
        if burial.record is not None and burial.record.stopped_by == "exit":
            kept = read_output(run_dir).data
            assert burial.record.stdout_seen_bytes == 4
            assert len(kept) == burial.record.stdout_bytes
            assert burial.record.truncated == (kept != b"out\n") or burial.record.error
            if not burial.record.error and kept == b"out\n" and effect > 20:
                break
        assert effect < 100
    assert reported > 5


# --- the worker dies ---------------------------------------------------------------------------------------


def test_a_worker_killed_at_any_line_leaves_a_run_that_is_told(
    tmp_path: Path, template: Template, chaos: Chaos
) -> None:
    """From before the template to after the end: the command ran at most once; with `go` exactly once, and its
    record appears without the worker; before `go` it is proven that nothing ran."""
    source = template_module.__file__
    outcomes = set()
    for line in itertools.count(1, 1 if chaos else 19):
        run_dir = tmp_path / f"run-{line}"
        run_dir.mkdir()
        count = tmp_path / f"count-{line}"
        job = request(f"echo ran >> {count}; sleep 300 & exit 3", grace_s=0.1)
        pid = os.fork()
        if pid == 0:
            traced(line, source, lambda: os.kill(os.getpid(), signal.SIGKILL))
            with Template() as own, own.start(run_dir, job) as started:
                started.go()
                started.wait()
            os._exit(0)
        finished = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        # The template may still be about to fork a keeper for who is gone.
        eventually(lambda: not _templates())
        burial = check_outcome(template, run_dir, count, 3)
        assert burial.record is not None or not burial.may_have_run
        outcomes.add(burial.record.stopped_by if burial.record else None)
        if finished:
            break
    assert outcomes == {None, "never_started", "exit"}


def _templates() -> list[int]:
    """Templates of workers that are gone; the test's own has not been started yet, or is our child."""
    own = {child.pid for child in psutil.Process().children()}
    mark = os.fsencode("TMPDIR=" + os.environ["TMPDIR"])
    system = this_system()
    candidates = [m.identity.pid for m in system.table() if m.name.startswith("python") and m.identity.pid not in own]
    return [pid for pid in candidates if system.has_variable(pid, mark)]


# --- many ----------------------------------------------------------------------------------------------------


def test_of_many_who_start_one_run_exactly_one_does(tmp_path: Path, template: Template) -> None:
    """Eight threads hand the same directory to keepers at once."""
    count = tmp_path / "count"
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    def attempt(_: int) -> bool:
        try:
            with template.start(run_dir, request(f"echo ran >> {count}; exit 0")) as started:
                started.go()
                return started.wait_gone(BOUND_S)
        except RunRefused:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
    assert lines(count) == 1


def test_threads_start_commands_at_once(tmp_path: Path, template: Template) -> None:
    """Thirty-two threads share one template, and each gets its own command's output and code."""

    def attempt(n: int) -> tuple[int | None, bytes]:
        end = run_command(f"echo {n}; exit {n % 7}", run_dir=tmp_path / str(n), template=template, disk=RELAXED)
        return end.exit_code, end.stdout_tail

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(attempt, range(128))) == [(n % 7, b"%d\n" % n) for n in range(128)]


def test_short_commands_leave_nothing_behind(tmp_path: Path, template: Template, chaos: Chaos) -> None:
    """Descriptors, threads and memory, ours and the template's, are flat over many commands."""

    def run(n: int) -> None:
        assert run_command("exit 0", run_dir=tmp_path / str(n), template=template, disk=RELAXED).succeeded

    def measure() -> tuple[int, int, int]:
        assert template.pid is not None
        other = psutil.Process(template.pid)
        return psutil.Process().num_fds(), threading.active_count(), other.num_fds()

    def memory() -> int:
        assert template.pid is not None
        return psutil.Process().memory_info().rss + psutil.Process(template.pid).memory_info().rss

    for n in range(50):
        run(n)
    before, rss = measure(), memory()
    for n in range(50, chaos.rounds(250, 2050, "commands")):
        run(n)
    assert measure() == before
    assert memory() - rss < 4 * 2**20
    assert template.pid is not None
    eventually(lambda: psutil.Process(template.pid).children(recursive=True) == [])


# --- files that no keeper wrote ----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
FIELDS = {field.name for field in attrs.fields(rundir.ExitRecord)} | {"version", "remaining_count"}


@given(
    record=st.binary(max_size=200)
    | st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON).map(lambda value: json.dumps(value).encode()),
    changed=st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_record_is_read_or_called_damaged(record: bytes, changed: dict[str, object], tmp_path: Path) -> None:
    """Garbage, parts of a record, and a good record with fields of other kinds: a typed error or a whole record."""
    good = {
        "version": 1,
        "task_id": "t",
        "keeper": {"pid": 5, "start": 6, "boot": "b"},
        "child": None,
        "started_at": None,
        "ended_at": "2026-01-01T00:00:00.000Z",
        "exit_code": 0,
        "signal": None,
        "stopped_by": "exit",
        "reason": "",
        "error": "",
        "stdout_bytes": 0,
        "stderr_bytes": 0,
        "stdout_seen_bytes": 0,
        "stderr_seen_bytes": 0,
        "truncated": False,
        "remaining": [],
        "remaining_count": 0,
    }
    for data in (record, json.dumps({**good, **changed}).encode(), record[:100] * 1000, b'{"a":' * 50_000):
        (tmp_path / layout.EXIT).write_bytes(data)
        (tmp_path / layout.KEEPER).write_bytes(data)
        rundir.keeper_identity(tmp_path)
        rundir.child_identity(tmp_path)
        (tmp_path / layout.KEEPER).write_bytes(data + b"\n" + data + b"\n" + data + b"\n")
        rundir.keeper_identity(tmp_path)
        rundir.child_identity(tmp_path)
        try:
            found = rundir.read_exit(tmp_path)
        except Damaged:
            continue
        assert isinstance(found, rundir.ExitRecord)
        read_output(tmp_path)


@given(order=st.binary(max_size=9000), stdout=st.binary(max_size=50), offset=st.integers(0, 2**63), final=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_order_is_read_or_called_damaged(
    order: bytes, stdout: bytes, offset: int, final: bool, tmp_path: Path
) -> None:
    """Bytes that are no order of output never give more than is there, and no other error than `Damaged`."""
    (tmp_path / layout.ORDER).write_bytes(order)
    (tmp_path / layout.STDOUT).write_bytes(stdout)
    (tmp_path / layout.STDERR).write_bytes(b"e" * 10)
    (tmp_path / layout.KEEPER).write_bytes(b"{}\n{}\n" if final else b"")
    for start in (0, offset % 70, offset):
        try:
            assert len(read_output(tmp_path, "mixed", start, 60).data) <= 60
        except Damaged:
            pass
