"""A keeper at moments that hardly ever come: in a child of the test, where they can be made to come (R7, R8, R9)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import psutil
import pytest

import openjobs
from openjobs.durable import Disk
from openjobs.errors import ForkedProcess, KeeperFailed
from openjobs.processes import keeper as keeper_module
from openjobs.processes import layout, rundir, template_main
from openjobs.processes import template as template_module
from openjobs.processes.identity import this_system
from openjobs.processes.keeper import Keeper
from openjobs.processes.template import Run, Template
from openjobs.processes.tree import Ending
from tests.support import eventually
from tests.support.child import forked
from tests.support.processes import RELAXED, faulty_template, marked, request, written

BOUND_S = 20.0
#: what is done to the keeper's modules in its own process
Change = Callable[[pytest.MonkeyPatch], object]


@contextlib.contextmanager
def kept(run_dir: Path, command: str, change: Change, **more: object) -> Iterator[Run]:
    """A keeper in a child, with its modules changed; it holds the run's lock and waits for `go`."""
    ours, theirs = socket.socketpair()

    def keep() -> str:
        ours.close()
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            with Hesitant(fileno=theirs.detach()) as channel:
                keeper_module.run(channel, Disk(durable=False), this_system())
        return "left"

    run_dir.mkdir(exist_ok=True)
    with forked(keep) as child:
        theirs.close()
        with Run(ours, run_dir) as run:
            run._begin(request(command, **more), None)
            yield run
            assert run.wait_gone(BOUND_S)
        assert child.answer() == "left"


class Hesitant(socket.socket):
    """Says that there is something, and then that there is not, as often as it is told."""

    hesitations = 0

    def recv(self, *args: int) -> bytes:  # type: ignore[override]
        if self.hesitations and self.gettimeout() == 0.0:
            self.hesitations -= 1
            raise BlockingIOError
        return super().recv(*args)


def as_it_is(patch: pytest.MonkeyPatch) -> None:
    pass


def record_of(run_dir: Path) -> rundir.ExitRecord:
    record = rundir.read_exit(run_dir)
    assert record is not None
    return record


@pytest.fixture
def template() -> Iterator[Template]:
    with Template() as template:
        yield template


# --- before go ---------------------------------------------------------------------------------------------


def test_a_signal_before_go_starts_and_ends_nothing(tmp_path: Path) -> None:
    """Nothing was asked for: it goes on waiting for the word, and then runs the command."""
    seen, see = os.pipe()

    def tell(patch: pytest.MonkeyPatch) -> None:
        drain = keeper_module._drain

        def drained(fd: int) -> None:
            drain(fd)
            os.write(see, b"x")

        patch.setattr(keeper_module, "_drain", drained)

    with kept(tmp_path / "run", "exit 5", tell) as run:
        for number in (signal.SIGINT, getattr(signal, layout.STOP_SIGNAL_NAME)):
            os.kill(run.keeper.pid, number)
            assert os.read(seen, 1) == b"x"
        assert not rundir.may_have_started(tmp_path / "run")
        run.go()
        assert run.wait(BOUND_S)
    assert record_of(tmp_path / "run").exit_code == 5
    os.close(seen)
    os.close(see)


def test_a_worker_that_says_nothing_for_too_long_gets_nothing_run(tmp_path: Path) -> None:
    """Recorded as never started, and nobody starts it any more."""

    def impatient(patch: pytest.MonkeyPatch) -> None:
        read = Keeper._read_request

        def read_and_hurry(self: Keeper) -> None:
            read(self)
            patch.setattr(keeper_module, "GO_TIMEOUT_S", 0.0)

        patch.setattr(Keeper, "_read_request", read_and_hurry)

    with kept(tmp_path / "run", "touch ran", impatient, cwd=tmp_path) as run:
        assert run.wait(BOUND_S)
    assert record_of(tmp_path / "run").stopped_by == layout.BY_NEVER_STARTED
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("go", [False, True])
def test_a_worker_that_goes_without_having_listened(go: bool, tmp_path: Path, template: Template) -> None:
    """Its socket is reset rather than ended: before `go` nothing runs, after it the command runs to its end."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    asked = request(f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 5")
    data = json.dumps({"run_dir": str(run_dir), **attrs.asdict(asked)}).encode()
    ours, theirs = socket.socketpair()
    with theirs:
        template._hand_over(theirs)
    with ours:
        ours.sendall(struct.pack(">I", len(data)) + data)
        assert select.select([ours], [], [], BOUND_S)[0]  # it said who it is
        if go:
            ours.send(b"g")
            eventually(lambda: rundir.child_identity(run_dir))
    (tmp_path / "go").touch()
    eventually(lambda: rundir.read_exit(run_dir) and not rundir.keeper_lives(run_dir), BOUND_S)
    record = record_of(run_dir)
    assert (record.stopped_by, record.exit_code) == (("exit", 5) if go else (layout.BY_NEVER_STARTED, None))


# --- what is there and is not ------------------------------------------------------------------------------


def test_a_word_that_is_announced_and_not_there_is_waited_for(tmp_path: Path) -> None:
    """From a worker (`go`, and a wish for output), and in the command's pipe: nothing is taken for an end."""

    def hesitate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Hesitant, "hesitations", 1)
        start, read = Keeper._start, os.read
        refused: set[int] = set()

        def hesitate_again(self: Keeper) -> bool:
            assert isinstance(self._channel, Hesitant)
            assert self._channel.hesitations == 0
            self._channel.hesitations = 1

            def hesitating(fd: int, count: int) -> bytes:
                if fd in self._streams and fd not in refused:
                    refused.add(fd)
                    raise BlockingIOError
                return read(fd, count)

            patch.setattr(keeper_module.os, "read", hesitating)
            return start(self)

        patch.setattr(Keeper, "_start", hesitate_again)

    command = f"echo one; echo two >&2; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo three; exit 5"
    with kept(tmp_path / "run", command, hesitate) as run:
        assert run.go() is not None
        run.want_output()
        eventually(lambda: written(tmp_path / "run") == b"one\n", BOUND_S)
        (tmp_path / "go").touch()
        assert run.wait(BOUND_S)
    record = record_of(tmp_path / "run")
    assert (record.exit_code, record.stdout_bytes, record.stderr_bytes) == (5, 10, 4)
    assert written(tmp_path / "run") == b"one\nthree\n"


def test_bytes_that_somebody_else_took_from_the_pipe_are_not_counted(tmp_path: Path) -> None:
    """Another process may open the pipe by its name in /proc: the record says what is in the file, and is written."""

    def robbed(patch: pytest.MonkeyPatch) -> None:
        drain, ioctl = Keeper._drain_pipes, keeper_module.fcntl.ioctl

        def drained(self: Keeper) -> None:
            assert len(self._streams) == 2
            patch.setattr(keeper_module.fcntl, "ioctl", lambda *args: struct.pack("i", 4))  # which are gone at once
            drain(self)
            patch.setattr(keeper_module.fcntl, "ioctl", ioctl)

        patch.setattr(Keeper, "_drain_pipes", drained)

    with kept(tmp_path / "run", "setsid sleep 300 & exit 5", robbed) as run:
        run.go()
        assert run.wait(BOUND_S)
    record = record_of(tmp_path / "run")
    assert (record.exit_code, record.stdout_bytes, written(tmp_path / "run")) == (5, 0, b"")
    assert marked() == []


def test_a_stop_that_is_signalled_and_not_there_stops_nothing(tmp_path: Path, template: Template) -> None:
    """Somebody sent the signal without having said what he wants."""
    (tmp_path / "run").mkdir()
    with template.start(tmp_path / "run", request(f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 5")) as run:
        run.go()
        os.kill(run.keeper.pid, getattr(signal, layout.STOP_SIGNAL_NAME))
        (tmp_path / "go").touch()
        assert run.wait(BOUND_S)
    assert record_of(tmp_path / "run").stopped_by == "exit"


# --- its tree ----------------------------------------------------------------------------------------------


def test_a_command_that_ends_under_the_very_look_at_its_tree_is_recorded_before_the_rest(tmp_path: Path) -> None:
    """Nobody who waits for the command waits for what it left behind."""

    def slow(patch: pytest.MonkeyPatch) -> None:
        members = Keeper._members

        def look(self: Keeper) -> list[object]:
            if self._ending is not None and self._ending.termed and self._status is None:
                os.waitid(os.P_PID, self._child_pid, os.WEXITED | os.WNOWAIT)
            return members(self)  # type: ignore[return-value]

        patch.setattr(Keeper, "_members", look)

    command = "trap 'sleep 0.1; exit 7' TERM; echo up; while :; do sleep 0.02; done"
    with kept(tmp_path / "run", command, slow) as run:
        run.go()
        eventually(lambda: written(tmp_path / "run") == b"up\n", BOUND_S)
        assert rundir.request_stop(tmp_path / "run", reason="enough", disk=RELAXED, system=this_system())
        assert run.wait(BOUND_S)
    record = record_of(tmp_path / "run")
    assert (record.stopped_by, record.exit_code, record.reason) == ("term", 7, "enough")
    assert marked() == []


def test_a_keeper_stays_with_a_command_that_cannot_be_killed(tmp_path: Path) -> None:
    """It looks again every second, and records the end when it comes."""
    asked, ask = os.pipe()

    def helpless(patch: pytest.MonkeyPatch) -> None:
        step = Ending.step

        def no_step(self: Ending) -> float | None:
            os.write(ask, b"x")
            return None

        def completed(self: Keeper) -> None:
            patch.setattr(Ending, "step", step)
            complete(self)

        complete = Keeper._complete
        patch.setattr(Ending, "step", no_step)
        patch.setattr(Keeper, "_complete", completed)

    with kept(tmp_path / "run", "exec sleep 300", helpless) as run:
        child = run.go()
        assert child is not None
        assert rundir.request_stop(tmp_path / "run", reason="enough", disk=RELAXED, system=this_system())
        assert os.read(asked, 1) == b"x"
        assert run.record is None
        os.kill(child.pid, signal.SIGKILL)
        assert run.wait(BOUND_S)
    record = record_of(tmp_path / "run")
    assert (record.stopped_by, record.signal) == ("signal", signal.SIGKILL)
    os.close(asked)
    os.close(ask)


@pytest.mark.parametrize("why", ["no library", "it cannot be loaded", "another system"])
def test_without_a_subreaper_the_tree_is_found_by_its_mark(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the command left in a session of its own ends all the same."""

    def poor(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(keeper_module, "_loaded", [None] if why == "no library" else [])
        if why == "it cannot be loaded":
            patch.setitem(sys.modules, "ctypes", None)
        if why == "another system":
            other = type(sys)("sys")
            other.__dict__.update(vars(sys), platform="another")
            patch.setattr(keeper_module, "sys", other)

    with kept(tmp_path / "run", "setsid sleep 300 & echo up; exit 5", poor) as run:
        run.go()
        assert run.wait(BOUND_S)
    assert record_of(tmp_path / "run").exit_code == 5
    assert marked() == []


# --- what no disk takes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def spilling(run_dir: Path, command: str, **more: object) -> Iterator[tuple[Run, int]]:
    """A command whose output no disk takes, and the descriptor where it comes instead."""
    pipes = [os.pipe(), os.pipe()]
    env = {"PATH": os.environ.get("PATH", os.defpath), "FAULT_EFFECT": "6", "FAULT_TIMES": str(10**9)}
    ends = pipes[0][1], pipes[1][1]
    with faulty_template() as template, template.start(run_dir, request(command, env=env, **more), ends) as run:
        for fd in (*ends, pipes[1][0]):
            os.close(fd)
        yield run, pipes[0][0]
        assert run.wait_gone(BOUND_S)


def test_the_limit_holds_for_what_no_disk_takes(tmp_path: Path) -> None:
    """To the byte, and the command is ended as for any other output."""
    (tmp_path / "run").mkdir()
    with spilling(tmp_path / "run", "exec yes", output_limit_bytes=101) as (run, out):
        run.go()
        got = b""
        while data := os.read(out, 65536):
            got += data
        os.close(out)
        assert got == (b"y\n" * 60)[:101]
        eventually(lambda: run.pump() or run.unrecorded, BOUND_S)
        assert run.unrecorded is not None
        assert run.unrecorded.stopped_by == layout.BY_OUTPUT_LIMIT
    assert marked() == []


def test_who_reads_no_more_holds_up_no_command(tmp_path: Path) -> None:
    """The reader of what no disk takes is gone: the command writes on, and its bytes are counted."""
    (tmp_path / "run").mkdir()
    with spilling(tmp_path / "run", "head -c 1000000 /dev/zero; exit 5") as (run, out):
        os.close(out)
        run.go()
        eventually(lambda: run.pump() or run.unrecorded, BOUND_S)
        assert run.unrecorded is not None
        assert (run.unrecorded.exit_code, run.unrecorded.stdout_seen_bytes) == (5, 1_000_000)


# --- the template ------------------------------------------------------------------------------------------


def test_a_worker_under_nohup_starts_commands_like_any_other(tmp_path: Path) -> None:
    """What the worker ignores, its commands do not."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Template() as template, template.start(tmp_path, request("kill -USR2 $$; echo alive")) as run:
            run.go()
            assert run.wait(BOUND_S)
    finally:
        signal.signal(signal.SIGUSR2, before)
    record = record_of(tmp_path)
    assert (record.signal, written(tmp_path)) == (signal.SIGUSR2, b"")


def test_a_template_finds_psutil_where_it_is_told(tmp_path: Path) -> None:
    """On systems that need it; it has no site packages of its own."""
    program = [sys.executable, *template_module._ISOLATED, template_main.__file__]
    homes = [str(Path(openjobs.__file__).parent), str(Path(psutil.__file__).parents[1])]
    with Template(program=[*program, *homes]) as template, template.start(tmp_path, request("exit 5")) as run:
        run.go()
        assert run.wait(BOUND_S)
    assert record_of(tmp_path).exit_code == 5


def test_a_template_that_cannot_fork_says_so_by_the_end_of_the_socket_and_goes_on(tmp_path: Path) -> None:
    """No process is to be had for a moment: the one worker hears that, and the next one is served."""
    ours, theirs = socket.socketpair()

    def serve() -> str:
        ours.close()
        fork, refused = os.fork, [OSError(11, "no process to be had")]

        def flaky() -> int:
            if refused:
                raise refused.pop()
            return fork()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fork", flaky)
            patch.setattr(template_main, "_free_standard_streams", lambda: None)
            template_main.serve(theirs)
        return "left"

    with forked(serve) as child:
        theirs.close()
        runs = []
        for number in range(2):
            mine, keepers = socket.socketpair()
            with keepers:
                socket.send_fds(ours, [b"k"], [keepers.fileno()])
            (tmp_path / str(number)).mkdir()
            runs.append(Run(mine, tmp_path / str(number)))
        with runs[0], pytest.raises(template_module._NoAnswer):
            runs[0]._begin(request("exit 5"), None)
        with runs[1]:
            runs[1]._begin(request("exit 5"), None)
            runs[1].go()
            assert runs[1].wait(BOUND_S)
            assert runs[1].wait_gone(BOUND_S)
        ours.close()
        assert child.answer() == "left"
    assert record_of(tmp_path / "1").exit_code == 5


def test_a_template_whose_socket_fails_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its worker is gone."""
    ours, theirs = socket.socketpair()

    def broken(*args: object) -> object:
        raise ConnectionResetError(104, "connection reset by peer")

    def serve() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "recv_fds", broken)
            patch.setattr(template_main, "_free_standard_streams", lambda: None)
            template_main.serve(theirs)
        return "left"

    with ours, theirs, forked(serve) as child:
        assert child.answer() == "left"


def test_a_template_that_does_not_leave_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker closes and does not wait for ever; keepers are no concern of that."""
    waited: list[float | None] = []
    wait = subprocess.Popen.wait

    def stubborn(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waited.append(timeout)
        if timeout is not None:
            raise subprocess.TimeoutExpired("template", timeout)
        return wait(process)

    program = [sys.executable, "-c", "import signal; signal.pause()"]
    template = Template(program=program)
    with template._lock:
        template._launch()
    pid = template.pid
    assert pid is not None
    monkeypatch.setattr(subprocess.Popen, "wait", stubborn)
    template.close()
    assert waited == [5, None]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_template_that_dies_as_it_is_asked_is_asked_again(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was told to go, so that a second try is safe; two in a row are said."""
    send = socket.send_fds
    broken = [1]

    def breaks(*args: object) -> int:
        if broken:
            broken.pop()
            raise BrokenPipeError(32, "broken pipe")
        return send(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(template_module.socket, "send_fds", breaks)
    with template.start(tmp_path, request("exit 5")) as run:
        run.go()
        assert run.wait(BOUND_S)
    assert record_of(tmp_path).exit_code == 5
    broken.extend([1, 1])
    with pytest.raises(KeeperFailed, match="the template is gone"):
        template.start(tmp_path / "second", request("exit 5"))


def test_a_keeper_that_dies_before_it_is_told_what_to_run_is_asked_for_again(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that failed so at once, one template was to blame, and the other one's is left alone."""
    broken = [1]
    begin = Run._begin

    def breaks(run: Run, *args: object) -> None:
        if broken:
            broken.pop()
            with template._lock:
                template._stop()  # somebody else saw the same, and was faster
            run._channel.shutdown(socket.SHUT_RDWR)
        begin(run, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "_begin", breaks)
    with template.start(tmp_path, request("exit 5")) as run:
        run.go()
        assert run.wait(BOUND_S)
    assert record_of(tmp_path).exit_code == 5


def test_a_template_that_is_closed_in_a_forked_child_is_its_parents(tmp_path: Path, template: Template) -> None:
    """The child's close ends nothing, and starts nothing."""

    def close() -> str:
        template.close()
        try:
            template.start(tmp_path / "child", request("true"))
        except ForkedProcess:
            return "refused"
        return "started"

    with template.start(tmp_path, request("exit 5")) as run, forked(close) as child:
        assert child.answer() == "refused"
        run.go()
        assert run.wait(BOUND_S)
    assert record_of(tmp_path).exit_code == 5


def test_where_another_system_needs_psutil_the_template_is_told_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its directory, since the template has no site packages."""
    other = type(sys)("sys")
    other.__dict__.update(vars(sys), platform="another")
    monkeypatch.setattr(template_module, "sys", other)
    assert Path(template_module._program()[-1], "psutil").is_dir()
    monkeypatch.undo()
    assert (template_module._program()[-1] == "") is (sys.platform == "linux")
