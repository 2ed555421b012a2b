"""A background command under its keeper: what it gets, how its end is told, and who may speak to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs.durable import Disk
from openjobs.errors import Closed, Damaged, ForkedProcess, InvalidInput, KeeperFailed, RunRefused
from openjobs.processes import layout, rundir
from openjobs.processes.command import CommandEnd, run_command
from openjobs.processes.identity import Identity, this_system
from openjobs.processes.output import read_output
from openjobs.processes.template import Run, Template
from tests.support import eventually
from tests.support.processes import RELAXED, marked, request, settle, this_task, written

BOUND_S = 20.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def template() -> Iterator[Template]:
    with Template() as template:
        yield template


def run(command: str | list[str], tmp_path: Path, template: Template, **more: Any) -> CommandEnd:
    more = {"run_dir": tmp_path / "run", "disk": RELAXED, "task_id": this_task(), **more}
    return run_command(command, template=template, **more)


# --- the exit table -----------------------------------------------------------------------------------


def canceller(tmp_path: Path) -> threading.Event:
    """Set once the command has said that it is ready."""
    event = threading.Event()

    def watch() -> None:
        eventually(lambda: written(tmp_path / "run"))
        event.set()

    threading.Thread(target=watch, daemon=True).start()
    return event


IGNORES_TERM = "trap '' TERM; echo ready; while :; do sleep 1; done"

#: command, arguments -> exit_code, signal, stopped_by
TABLE: dict[str, tuple[str | list[str], dict[str, Any], tuple[int | None, int | None, str]]] = {
    "exit 0": ("exit 0", {}, (0, None, "exit")),
    "exit 1": ("exit 1", {}, (1, None, "exit")),
    "exit 127": ("exit 127", {}, (127, None, "exit")),
    "command not found": (["no-such-command-anywhere"], {}, (127, None, "not_found")),
    "not a program": (["/etc/passwd"], {}, (126, None, "not_started")),
    "TERM by us": ("echo ready; exec sleep 60", {"cancel": True}, (None, 15, "term")),
    "TERM by us, handled": ("trap 'exit 7' TERM; echo ready; sleep 60", {"cancel": True}, (7, None, "term")),
    "KILL by us after the grace": (IGNORES_TERM, {"cancel": True, "grace_s": 0.2}, (None, 9, "kill")),
    "KILL by somebody else": ("kill -KILL $$", {}, (None, 9, "signal")),
    "INT": ("kill -INT $$", {}, (None, 2, "signal")),
    "TERM by somebody else": ("kill -TERM $$", {}, (None, 15, "signal")),
    "timeout": ("exec sleep 60", {"timeout_s": 0.1}, (None, 15, "timeout")),
    "timeout, ignored": (IGNORES_TERM, {"timeout_s": 0.3, "grace_s": 0.1}, (None, 9, "timeout")),
    "output limit": (["yes"], {"output_limit_bytes": 1000}, (None, 15, "output_limit")),
}


@pytest.mark.parametrize("case", TABLE)
def test_every_way_to_end_is_told_apart(case: str, tmp_path: Path, template: Template) -> None:
    """Exit code, signal and stopped_by say together how a command ended, and no two ways say the same."""
    command, more, expected = TABLE[case]
    more = dict(more)
    if more.pop("cancel", False):
        more["cancel_event"] = canceller(tmp_path)
    end = run(command, tmp_path, template, **more)
    assert (end.exit_code, end.signal, end.stopped_by) == expected
    record = rundir.read_exit(tmp_path / "run")
    assert record is not None
    assert (record.exit_code, record.signal, record.stopped_by) == expected
    assert marked() == []


def test_no_two_ways_to_end_look_alike() -> None:
    """The table itself has no line twice."""
    outcomes = [outcome for _, _, outcome in TABLE.values()]
    assert len(set(outcomes)) == len(outcomes)


def test_a_command_that_cannot_be_started_says_why(tmp_path: Path, template: Template) -> None:
    """A missing directory or program is named, and is no exit of the command."""
    end = run("true", tmp_path, template, cwd="/nowhere/at/all")
    assert (end.exit_code, end.stopped_by, end.error) == (
        126,
        "not_started",
        "/nowhere/at/all: No such file or directory",
    )
    assert rundir.child_identity(tmp_path / "run") is None
    assert "no-such" in run(["no-such"], tmp_path, template, run_dir=tmp_path / "other").error


# --- what a command gets ------------------------------------------------------------------------------


def test_a_command_has_a_session_of_its_own_and_nothing_of_ours(tmp_path: Path, template: Template) -> None:
    """Session, group, /dev/null, three descriptors, default signals, the given environment and the mark."""
    program = """
import json, os, sys
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps([os.getpid(), os.getsid(0), os.getpgrp(), os.readlink("/proc/self/fd/0"), os.read(0, 1).decode(),
    sorted(os.listdir("/proc/self/fd"))[:4], os.getcwd(), dict(os.environ), int(status["SigBlk"], 16)]))
"""
    given = {"ONE": "1", "BYTES": "caf\udce9", "LONG": "x" * 100_000}
    end = run([sys.executable, "-I", "-c", program], tmp_path, template, env=given, cwd=tmp_path, tail_bytes=1 << 20)
    pid, session, group, stdin, read, fds, cwd, env, blocked = json.loads(end.stdout_tail)
    assert pid == session == group
    assert (stdin, read, blocked) == ("/dev/null", "", 0)
    assert fds == ["0", "1", "2", "3"]  # 3 is the listing itself
    assert cwd == str(tmp_path)
    assert env.pop("OPENJOBS_TASK_ID") == this_task()
    assert {name: env[name] for name in given} == given


def test_no_signal_is_ignored_in_a_command(tmp_path: Path, template: Template) -> None:
    """Python ignores SIGPIPE, and an ignored signal would be inherited."""
    end = run(["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"], tmp_path, template)
    assert end.stdout_tail.split() == [b"SigBlk:", b"0" * 16, b"SigIgn:", b"0" * 16]


def test_the_environment_is_never_on_disk(tmp_path: Path, template: Template) -> None:
    """A secret in `env` reaches the command and no file."""
    run('test -n "$SECRET"', tmp_path, template, env={"SECRET": "hunter2-hunter2"})
    assert all(b"hunter2" not in path.read_bytes() for path in (tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    "bad",
    [
        {"argv": []},
        {"argv": [""]},
        {"argv": ["a\0b"]},
        {"cwd": "relative"},
        {"env": {"A=B": "c"}},
        {"env": {"A": 1}},
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"grace_s": -1},
        {"output_limit_bytes": -1},
        {"on_limit": "explode"},
        {"task_id": ""},
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    """Nothing is started for it."""
    with pytest.raises(InvalidInput):
        attrs.evolve(request("true"), **bad)


# --- output -----------------------------------------------------------------------------------------


def test_who_else_holds_the_pipe_does_not_keep_a_command_from_completing(tmp_path: Path, template: Template) -> None:
    """`sleep 60 & echo hi` is complete with `hi` while the sleep still lives; then the sleep is ended too."""
    with template.start(_new(tmp_path), request("sleep 60 & echo hi")) as started:
        started.go()
        record = started.wait(BOUND_S)
        assert record is not None
        assert (record.exit_code, record.stdout_bytes) == (0, 3)
        # A shell that is about to become the sleep, or the sleep.
        assert [m["name"] for m in record.remaining] in (["sleep"], ["sh"])
        assert started.wait_gone(BOUND_S)
    assert marked() == []
    after = rundir.read_exit(tmp_path / "run")
    assert after is not None
    assert after.leftovers == []
    assert read_output(tmp_path / "run").data == b"hi\n"


def test_what_was_in_the_pipe_at_the_end_is_kept(tmp_path: Path, template: Template) -> None:
    """60,000 bytes written at once just before the exit, with the pipe held by another."""
    end = run("sleep 60 & head -c 60000 /dev/zero", tmp_path, template)
    assert end.stdout_bytes == 60_000


def test_a_writer_that_stays_does_not_keep_a_command_from_completing(tmp_path: Path, template: Template) -> None:
    """The pipe is never empty, and the command is complete all the same."""
    end = run("yes & sleep 0.1", tmp_path, template, output_limit_bytes=10_000, on_limit="drop")
    assert (end.exit_code, end.stopped_by, end.stdout_bytes) == (0, "exit", 10_000)


def test_the_mixed_order_is_the_order_in_which_it_came(tmp_path: Path, template: Template) -> None:
    """Each piece is written only when the one before has arrived; the mixed text has them in that order."""
    program = """
import os, sys, time
files = {1: sys.argv[1] + "/stdout", 2: sys.argv[1] + "/stderr"}
sizes = {1: 0, 2: 0}
for n in range(200):
    fd = 1 + (n * n // 3) % 2
    piece = b"%d " % n
    os.write(fd, piece)
    sizes[fd] += len(piece)
    while not os.path.exists(files[fd]) or os.stat(files[fd]).st_size < sizes[fd]:
        time.sleep(0.0005)
"""
    seen: list[bytes] = []
    run_dir = tmp_path / "run"
    end = run(
        [sys.executable, "-I", "-c", program, str(run_dir)], tmp_path, template, on_output=lambda _, d: seen.append(d)
    )
    assert end.succeeded
    expected = b"".join(b"%d " % n for n in range(200))
    assert read_output(run_dir).data == expected
    assert b"".join(seen) == expected
    for offset in range(0, len(expected), 37):
        piece = read_output(run_dir, offset=offset, limit=50)
        assert piece.data == expected[offset : offset + 50]
        assert piece.eof == (offset + 50 >= len(expected))


def test_both_streams_are_exact(tmp_path: Path, template: Template) -> None:
    """Ten megabytes, NULs and invalid UTF-8 among them, are in the files and in the callbacks, byte for byte."""
    text = bytes(range(256)) * 20_000
    (tmp_path / "data").write_bytes(text)
    seen = {"stdout": bytearray(), "stderr": bytearray()}
    end = run(
        f"cat {tmp_path}/data & cat {tmp_path}/data >&2; wait",
        tmp_path,
        template,
        on_output=lambda stream, data: seen[stream].extend(data),
    )
    assert (end.stdout_bytes, end.stderr_bytes, end.truncated) == (len(text), len(text), False)
    assert (tmp_path / "run" / "stdout").read_bytes() == (tmp_path / "run" / "stderr").read_bytes() == text
    assert seen["stdout"] == seen["stderr"] == text
    assert end.stdout_tail == text[-65536:]
    assert read_output(tmp_path / "run").total_bytes == 2 * len(text)


@pytest.mark.parametrize("limit", [0, 1, 65536, 10**6])
def test_the_output_limit_is_exact(limit: int, tmp_path: Path, template: Template) -> None:
    """`yes` leaves exactly the limit on disk, says that it was cut and how much was seen, and is ended."""
    end = run(["yes"], tmp_path, template, output_limit_bytes=limit)
    assert (end.stopped_by, end.truncated, end.stdout_bytes) == ("output_limit", True, limit)
    assert end.seen_bytes > limit
    assert len(written(tmp_path / "run")) == limit


def test_a_command_may_go_on_beyond_the_limit(tmp_path: Path, template: Template) -> None:
    """With `drop` it ends by itself, and what it wrote beyond the limit is counted."""
    end = run(
        "yes | head -c 3000000; yes | head -c 1000000 >&2; exit 3",
        tmp_path,
        template,
        output_limit_bytes=10**6,
        on_limit="drop",
    )
    assert (end.exit_code, end.stopped_by, end.truncated, end.seen_bytes) == (3, "exit", True, 4_000_000)
    assert (end.stdout_bytes, end.stderr_bytes) == (10**6, 0)


def test_a_limit_that_is_met_exactly_cuts_nothing(tmp_path: Path, template: Template) -> None:
    """The command wrote as much as it may: nothing was lost, and nothing is said to be."""
    end = run("yes | head -c 5000", tmp_path, template, output_limit_bytes=5000)
    assert (end.exit_code, end.truncated, end.stdout_bytes) == (0, False, 5000)


def test_reading_refuses_what_no_keeper_wrote(tmp_path: Path, template: Template) -> None:
    """A link, a pipe or a broken record in place of a file is refused, and nothing is followed or waited for."""
    run("echo hi", tmp_path, template)
    run_dir = tmp_path / "run"
    stdout = run_dir / "stdout"
    stdout.rename(run_dir / "moved")
    stdout.symlink_to("/etc/passwd")
    with pytest.raises(Damaged):
        read_output(run_dir)
    (run_dir / "exit.json").write_bytes(b'{"version": 1}')
    with pytest.raises(Damaged):
        rundir.read_exit(run_dir)
    (run_dir / "exit.json").unlink()
    os.mkfifo(run_dir / "exit.json")
    with pytest.raises(Damaged):
        rundir.read_exit(run_dir)
    with pytest.raises(InvalidInput):
        read_output(run_dir, "stdin")


# --- go, stop, and who may start ------------------------------------------------------------------------


def _new(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return run_dir


def test_nothing_runs_before_go(tmp_path: Path, template: Template) -> None:
    """A worker that goes away before `go` leaves a record that says that nothing ran."""
    run_dir = _new(tmp_path)
    started = template.start(run_dir, request(f"touch {tmp_path}/ran"))
    assert rundir.keeper_lives(run_dir)
    assert rundir.keeper_identity(run_dir) == started.keeper
    started.close()
    record = rundir.wait_for_exit(run_dir, timeout_s=BOUND_S, system=this_system())
    assert record is not None
    assert (record.stopped_by, record.exit_code, record.signal, record.ran) == ("never_started", None, None, False)
    assert not (tmp_path / "ran").exists()
    burial = settle(run_dir)
    assert burial.record == record
    assert not burial.may_have_run
    assert not rundir.is_lost(run_dir)


def test_a_stop_before_go_wins(tmp_path: Path, template: Template) -> None:
    """The worker's `go` comes too late, and is told so."""
    run_dir = _new(tmp_path)
    with template.start(run_dir, request(f"touch {tmp_path}/ran")) as started:
        assert rundir.request_stop(run_dir, reason="changed my mind", disk=RELAXED, system=this_system())
        assert rundir.wait_for_exit(run_dir, timeout_s=BOUND_S, system=this_system())
        assert started.go() is None
        assert started.record is not None
        assert (started.record.stopped_by, started.record.reason) == ("never_started", "changed my mind")
    assert not (tmp_path / "ran").exists()


def test_identities_are_the_real_ones(tmp_path: Path, template: Template) -> None:
    """Keeper and command are who the run's directory says, and prove it."""
    run_dir = _new(tmp_path)
    system = this_system()
    with template.start(run_dir, request("echo $$; exec sleep 60")) as started:
        child = started.go()
        assert child is not None
        assert child == rundir.child_identity(run_dir) == system.identify(child.pid)
        assert system.is_alive(child)
        assert system.is_alive(started.keeper)
        eventually(lambda: written(run_dir) == b"%d\n" % child.pid)
        assert rundir.request_stop(run_dir, disk=RELAXED, system=system)
        assert started.wait_gone(BOUND_S)
        assert not system.is_alive(child)
        eventually(lambda: not system.is_alive(started.keeper))


STOPPER = """
import sys
from pathlib import Path
from openjobs.durable import Disk
from openjobs.processes import rundir
from openjobs.processes.identity import this_system
print(rundir.request_stop(Path(sys.argv[1]), reason="from elsewhere", grace_s=1.0, disk=Disk(), system=this_system()))
"""


def test_a_stop_may_come_from_any_process(tmp_path: Path, template: Template) -> None:
    """Another process, which knows only the directory, ends the command, and its reason is recorded."""
    run_dir = _new(tmp_path)
    with template.start(run_dir, request("exec sleep 60")) as started:
        started.go()
        said = subprocess.run(
            [sys.executable, "-c", STOPPER, str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S
        )
        assert said.stdout == "True\n", said.stderr
        record = started.wait(BOUND_S)
        assert record is not None
        assert (record.stopped_by, record.signal, record.reason) == ("term", 15, "from elsewhere")
        assert started.wait_gone(BOUND_S)
    assert not rundir.request_stop(run_dir, disk=RELAXED, system=this_system())


def test_a_second_stop_may_be_less_patient(tmp_path: Path, template: Template) -> None:
    """A grace of a thousand seconds ends when somebody asks again with none."""
    run_dir = _new(tmp_path)
    with template.start(run_dir, request(IGNORES_TERM, grace_s=1000)) as started:
        started.go()
        eventually(lambda: written(run_dir))
        assert rundir.request_stop(run_dir, reason="first", disk=RELAXED, system=this_system())
        assert started.wait(0.2) is None
        assert rundir.request_stop(run_dir, reason="second", grace_s=0, disk=RELAXED, system=this_system())
        record = started.wait(BOUND_S)
        assert record is not None
        assert (record.stopped_by, record.signal, record.reason) == ("kill", 9, "first")
        assert started.wait_gone(BOUND_S)


def test_a_keeper_that_is_told_to_end_ends_its_command(tmp_path: Path, template: Template) -> None:
    """TERM to the keeper itself, as when the machine shuts down, is a stop like another."""
    run_dir = _new(tmp_path)
    with template.start(run_dir, request("exec sleep 60")) as started:
        started.go()
        this_system().send(started.keeper, signal.SIGTERM)
        record = started.wait(BOUND_S)
        assert record is not None
        assert record.stopped_by == "term"
        assert "SIGTERM" in record.reason
        assert started.wait_gone(BOUND_S)


def test_a_stopped_keeper_acts_on_a_stop(tmp_path: Path, template: Template) -> None:
    """Somebody suspended the keeper; the request wakes it."""
    run_dir = _new(tmp_path)
    with template.start(run_dir, request("exec sleep 60")) as started:
        started.go()
        this_system().send(started.keeper, signal.SIGSTOP)
        assert rundir.request_stop(run_dir, disk=RELAXED, system=this_system())
        record = started.wait(BOUND_S)
        assert record is not None
        assert record.stopped_by == "term"
        assert started.wait_gone(BOUND_S)


NONSENSE = {
    "torn": b'{"grace_s": "soon"',
    "huge": b'{"grace_s": 1' + b"0" * 400 + b"}",
    "deep": b"[" * 60_000,
    "list": b"[]",
    "negative": b'{"grace_s": -5, "reason": null}',
}


@pytest.mark.parametrize("what", ["pipe", "directory", "link", *NONSENSE])
def test_a_command_cannot_make_its_keeper_deaf(what: str, tmp_path: Path, template: Template) -> None:
    """Whatever the command put in the place of the request, the keeper ends it when it is asked."""
    run_dir = _new(tmp_path)
    with template.start(run_dir, request("exec sleep 60")) as started:
        started.go()
        stop = run_dir / layout.STOP
        if what == "pipe":
            os.mkfifo(stop)
        elif what == "directory":
            stop.mkdir()
        elif what == "link":
            stop.symlink_to(tmp_path / "elsewhere")
        else:
            stop.write_bytes(NONSENSE[what])
        assert this_system().send(started.keeper, getattr(signal, layout.STOP_SIGNAL_NAME))
        record = started.wait(BOUND_S)
        assert record is not None
        assert record.stopped_by == ("kill" if what == "negative" else "term")
        assert started.wait_gone(BOUND_S)


def test_a_signal_blocked_in_the_worker_is_not_blocked_in_its_keepers(tmp_path: Path) -> None:
    """The template is started by a thread that blocks what a keeper must hear."""
    run_dir = _new(tmp_path)
    blocked = {signal.SIGCHLD, signal.SIGTERM, getattr(signal, layout.STOP_SIGNAL_NAME)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with Template() as template, template.start(run_dir, request("exec sleep 60")) as started:
            started.go()
            assert rundir.request_stop(run_dir, disk=RELAXED, system=this_system())
            assert started.wait_gone(BOUND_S)
            assert started.record is not None
            assert started.record.stopped_by == "term"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_late_keeper_obeys_the_tombstone(tmp_path: Path, template: Template) -> None:
    """Who buried the run was first: the keeper starts nothing."""
    run_dir = _new(tmp_path)
    burial = settle(run_dir)
    assert (burial.record, burial.may_have_run) == (None, False)
    with pytest.raises(RunRefused) as refused:
        template.start(run_dir, request(f"touch {tmp_path}/ran"))
    assert refused.value.why == "lost"
    assert not (tmp_path / "ran").exists()


def test_a_run_is_started_only_once(tmp_path: Path, template: Template) -> None:
    """A directory that was used is refused; so is one in use."""
    run(f"echo ran >> {tmp_path}/count", tmp_path, template)
    with pytest.raises(RunRefused) as refused:
        run(f"echo ran >> {tmp_path}/count", tmp_path, template)
    assert refused.value.why == "used"
    other = tmp_path / "other"
    other.mkdir()
    with template.start(other, request("true")) as first:
        with pytest.raises(RunRefused) as refused:
            template.start(other, request("true"))
        assert refused.value.why == "held"
        first.go()
        assert first.wait_gone(BOUND_S)
    assert (tmp_path / "count").read_bytes() == b"ran\n"


def test_a_living_keeper_is_not_buried(tmp_path: Path, template: Template) -> None:
    """Nothing is written and nobody is signalled as long as the lock is held."""
    run_dir = _new(tmp_path)
    system = this_system()
    with template.start(run_dir, request("exec sleep 60")) as started:
        child = started.go()
        assert rundir.bury(run_dir, task_id=this_task(), disk=RELAXED, system=system) is None
        assert not rundir.is_lost(run_dir)
        assert child is not None
        assert system.is_alive(child)
        rundir.request_stop(run_dir, disk=RELAXED, system=system)
        assert started.wait_gone(BOUND_S)


def test_adoption_needs_only_the_directory(tmp_path: Path, template: Template) -> None:
    """Another process's run can be waited for, with a timeout and a cancel, and ends as it ends."""
    run_dir = _new(tmp_path)
    system = this_system()
    cancel = threading.Event()
    with template.start(run_dir, request(f"while ! test -e {tmp_path}/go; do sleep 0.01; done; exit 5")) as started:
        started.go()
        started.close()
    assert rundir.wait_for_exit(run_dir, timeout_s=0.05, system=system) is None
    cancel.set()
    assert rundir.wait_for_exit(run_dir, cancel_event=cancel, system=system) is None
    (tmp_path / "go").touch()
    record = rundir.wait_for_exit(run_dir, timeout_s=BOUND_S, system=system)
    assert record is not None
    assert record.exit_code == 5
    assert rundir.wait_gone(run_dir, timeout_s=BOUND_S)


# --- the template ---------------------------------------------------------------------------------------


def test_a_template_that_died_is_started_again_and_its_keepers_live_on(tmp_path: Path, template: Template) -> None:
    """Killing the template hurts no command, and the next start works."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    go = tmp_path / "go"
    with template.start(tmp_path / "a", request(f"until test -e {go}; do sleep 0.01; done; echo late")) as first:
        first.go()
        killed = template.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        with template.start(tmp_path / "b", request("echo again")) as second:
            assert template.pid != killed
            second.go()
            assert second.wait(BOUND_S) is not None
            assert second.wait_gone(BOUND_S)
        assert first.record is None
        go.touch()
        record = first.wait(BOUND_S)
        assert record is not None
        assert (record.exit_code, record.stdout_bytes) == (0, 5)
        assert first.wait_gone(BOUND_S)


def test_a_closed_template_leaves_its_keepers(tmp_path: Path) -> None:
    """`close` ends the template alone."""
    template = Template()
    go = tmp_path / "go"
    with template.start(_new(tmp_path), request(f"until test -e {go}; do sleep 0.01; done; exit 9")) as started:
        started.go()
        template.close()
        template.close()
        with pytest.raises(Closed):
            template.start(tmp_path / "run", request("true"))
        go.touch()
        record = started.wait(BOUND_S)
        assert record is not None
        assert record.exit_code == 9
        assert started.wait_gone(BOUND_S)


def test_a_template_that_cannot_be_started_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Neither a missing interpreter nor one that ends at once hangs the caller."""
    for program in (["/nowhere/python"], ["/bin/true"]):
        with Template(program=program) as template, pytest.raises(KeeperFailed):
            template.start(tmp_path, request("true"))


def test_a_forked_child_cannot_use_its_parents_template(tmp_path: Path, template: Template) -> None:
    """It gets a clear error, and its parent's template goes on."""
    run("true", tmp_path, template)
    pid = os.fork()
    if pid == 0:
        try:
            template.start(tmp_path, request("true"))
        except ForkedProcess:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run("true", tmp_path, template, run_dir=tmp_path / "more").succeeded


# --- in the foreground ---------------------------------------------------------------------------------


def test_a_command_needs_no_template_of_the_callers(tmp_path: Path) -> None:
    """One is started for it alone, and the record is durable."""
    end = run_command(["echo", "x y"], run_dir=tmp_path / "run")
    assert (end.succeeded, end.stdout_tail) == (True, b"x y\n")


def test_a_cancelled_command_never_starts(tmp_path: Path, template: Template) -> None:
    """The event was set before."""
    cancel = threading.Event()
    cancel.set()
    end = run(f"touch {tmp_path}/ran", tmp_path, template, cancel_event=cancel)
    assert (end.stopped_by, end.cancelled, end.exit_code, end.signal) == ("never_started", True, None, None)
    assert not (tmp_path / "ran").exists()


def test_a_cancel_ends_the_whole_tree_before_it_returns(tmp_path: Path, template: Template) -> None:
    """Nothing that came out of the command is left, sessions of its own or not."""
    command = "trap '' TERM; setsid sleep 300 & (setsid sleep 300 &) ; sleep 300 & echo ready; wait; sleep 300"
    end = run(command, tmp_path, template, cancel_event=canceller(tmp_path), grace_s=0.3)
    assert end.cancelled
    assert end.leftovers == ()
    assert marked() == []


def test_an_exception_in_a_callback_ends_the_command(tmp_path: Path, template: Template) -> None:
    """It reaches the caller, and the tree is gone by then."""

    def fail(_stream: str, _data: bytes) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        run("echo x; exec sleep 300", tmp_path, template, on_output=fail)
    assert marked() == []
    record = rundir.read_exit(tmp_path / "run")
    assert record is not None
    assert record.stopped_by == "term"


def test_the_caller_hears_who_runs(tmp_path: Path, template: Template) -> None:
    """`on_started` gets both identities while the command runs."""
    seen: list[tuple[Identity, Identity, bool]] = []
    system = this_system()
    run(
        "exec sleep 0.2",
        tmp_path,
        template,
        on_started=lambda k, c: seen.append((k, c, system.is_alive(k) and system.is_alive(c))),
    )
    [(keeper, child, alive)] = seen
    assert alive
    assert keeper == rundir.keeper_identity(tmp_path / "run")
    assert child == rundir.child_identity(tmp_path / "run")


def test_a_command_whose_keeper_was_killed_before_its_report_is_lost_too(
    tmp_path: Path, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the command was reported or not, what it left is ended with it: nobody else would ever look."""
    go = Run.go

    def unheard(run: Run) -> None:
        child = go(run)
        assert child is not None
        eventually(lambda: marked() != [])
        os.kill(run.keeper.pid, signal.SIGKILL)
        run.wait_gone(10)
        raise KeeperFailed("killed")

    monkeypatch.setattr(Run, "go", unheard)
    end = run_command("sleep 600 & sleep 600", run_dir=tmp_path / "run", task_id=this_task(), template=template)
    assert (end.stopped_by, end.exit_code, end.error) == ("lost", None, "the keeper was killed")
    assert marked() == []


def test_a_command_whose_keeper_was_killed_is_lost(tmp_path: Path, template: Template) -> None:
    """Nobody can say how it ended; what was left of it is ended, and its output is still there."""

    def kill(keeper: Identity, _child: Identity) -> None:
        eventually(lambda: written(tmp_path / "run"))
        this_system().send(keeper, signal.SIGKILL)

    end = run("echo before; setsid sleep 300 & exec sleep 300", tmp_path, template, on_started=kill, grace_s=0.2)
    assert (end.stopped_by, end.exit_code, end.signal, end.stdout_tail) == ("lost", None, None, b"before\n")
    assert rundir.is_lost(tmp_path / "run")
    assert marked() == []
    assert read_output(tmp_path / "run").eof


def test_durable_and_relaxed_leave_the_same_files(tmp_path: Path, template: Template) -> None:
    """Only the syncs differ."""
    for name, disk in (("a", Disk()), ("b", RELAXED)):
        run("echo hi", tmp_path, template, run_dir=tmp_path / name, disk=disk)
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))
    assert set(os.listdir(tmp_path / "a")) == {
        layout.KEEPER,
        layout.STDOUT,
        layout.ORDER,
        layout.EXIT,
    }


def test_a_run_of_an_old_version_can_be_read_for_ever() -> None:
    """The directory that version 1 left: its record, what was swept, both streams and their order."""
    run_dir = ROOT / "fixtures" / "runs" / "v1"
    record = rundir.read_exit(run_dir)
    assert record is not None
    assert (record.exit_code, record.signal, record.stopped_by, record.ran) == (3, None, "exit", True)
    assert ([m["name"] for m in record.remaining], record.leftovers) == (["sleep"], [])
    assert record.started_at == "2026-11-29T22:38:46.540Z"
    assert record.child == rundir.child_identity(run_dir)
    assert record.keeper == rundir.keeper_identity(run_dir)
    whole = read_output(run_dir)
    assert (whole.data, whole.eof, whole.truncated) == (b"one\ntwo\nthree\n", True, False)
    assert read_output(run_dir, "stderr").data == b"two\n"
