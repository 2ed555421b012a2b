"""`openjobs run` while no disk takes anything: output is seen, the code is returned, what is not kept is said."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openjobs.cli.state import State
from openjobs.cli.tasks import STREAMS, _passed_on, _Spill
from openjobs.host.launcher import Launcher
from openjobs.processes import ProcessSupervisor, Task, TaskStatus
from openjobs.store import GitJobStore
from tests.support import eventually
from tests.support.disks import FaultyDisk
from tests.support.processes import faulty_template

BOUND_S = 20.0
NO_SIGNALS = Launcher(signals=False)
#: fits no pipe; both streams, in order
COMMAND = "seq 1 40000; seq 1 30000 >&2; seq 40001 50000; exit 3"
STDOUT = b"".join(b"%d\n" % number for number in range(1, 50001))
STDERR = b"".join(b"%d\n" % number for number in range(1, 30001))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s")
    return tmp_path / "home"


def started(supervisor: ProcessSupervisor, spill: _Spill, command: str, **fault: int) -> Task:
    env = {"PATH": os.environ.get("PATH", os.defpath), **{name: str(value) for name, value in fault.items()}}
    task = supervisor.start("s", command, env=env, spill=spill.ends)
    spill.started()
    return task


def unrecorded(supervisor: ProcessSupervisor, task: Task) -> Task:
    ended = eventually(lambda: supervisor.unrecorded_end(task.task_id), BOUND_S)
    assert ended is not None
    return ended


@pytest.mark.parametrize("effect", range(1, 14))
def test_what_the_keeper_cannot_keep_is_seen(
    effect: int, home: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """From any effect on its disk is full: every byte of both streams comes, once and in order, kept or not, and the
    code is the command's; or it never ran and no byte comes."""
    with (
        GitJobStore(home, durability="relaxed") as store,
        faulty_template() as template,
        ProcessSupervisor(store, template=template) as supervisor,
        _Spill() as spill,
    ):
        task = started(supervisor, spill, COMMAND, FAULT_EFFECT=effect, FAULT_TIMES=10**9)
        task = _passed_on(State(), NO_SIGNALS, supervisor, task, spill)
        out, err = capfdbinary.readouterr()
        if task.exit_code == 3:
            assert (out, err) == (STDOUT, STDERR)
            kept = task.stdout_bytes + task.stderr_bytes
            assert task.seen_bytes == len(STDOUT) + len(STDERR)
            assert "No space left" in task.error or kept == task.seen_bytes
        else:
            assert task.exit_code in (126, None)
            assert out == err == b""
        if not task.terminal or task.event_id is None:
            task = supervisor.wait(task.task_id, BOUND_S)  # the keeper gives up in a moment
        assert task.terminal


def test_output_is_seen_while_it_comes(home: Path) -> None:
    """Not only at the end: a line that no disk takes is there before the command ends; the limit holds for it, too."""
    with (
        GitJobStore(home, durability="relaxed") as store,
        faulty_template() as template,
        ProcessSupervisor(store, template=template) as supervisor,
        _Spill() as spill,
    ):
        task = started(supervisor, spill, "echo first; exec sleep 60", FAULT_EFFECT=6, FAULT_TIMES=10**9)
        assert eventually(lambda: spill.read("stdout"), BOUND_S) == b"first\n"
        assert not supervisor.get(task.task_id).terminal
        supervisor.stop(task.task_id, "enough")
        eventually(lambda: [spill.read(name) for name in STREAMS] == [None, None], BOUND_S)
        ended = unrecorded(supervisor, task)
        assert (ended.status, ended.stopped_by, ended.event_id) == (TaskStatus.CANCELLED, "term", None)
        assert (ended.seen_bytes, ended.stdout_bytes) == (6, 0)


def test_a_reader_that_stands_still_holds_up_its_command_and_nobody_else(home: Path) -> None:
    """The pipe is full: the command waits as it would for a terminal, a stop is obeyed, and no byte is lost."""
    with (
        GitJobStore(home, durability="relaxed") as store,
        faulty_template() as template,
        ProcessSupervisor(store, template=template) as supervisor,
        _Spill() as spill,
    ):
        task = started(supervisor, spill, "exec yes", FAULT_EFFECT=6, FAULT_TIMES=10**9)
        assert task.child is not None
        eventually(lambda: _blocked(task), BOUND_S)
        supervisor.stop(task.task_id, "enough", grace_s=1.0)
        got = bytearray()
        ended = unrecorded(supervisor, task)
        while (data := spill.read("stdout")) is not None:
            got += data
        assert len(got) == ended.seen_bytes
        assert got == (b"y\n" * len(got))[: len(got)]


def _blocked(task: Task) -> bool:
    assert task.child is not None
    return "pipe" in Path(f"/proc/{task.child.pid}/wchan").read_text() if sys.platform == "linux" else True


def test_a_journal_that_takes_nothing_keeps_no_exit_code(home: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Once the command runs, the worker's disk is full: output and code are there at once; when it has room again,
    the end is recorded."""
    disk = FaultyDisk()
    with GitJobStore(home, disk=disk) as store, ProcessSupervisor(store) as supervisor, _Spill() as spill:
        task = started(supervisor, spill, COMMAND)
        disk.arm(1, errno.ENOSPC, for_good=True)
        ended = _passed_on(State(), NO_SIGNALS, supervisor, task, spill)
        assert capfdbinary.readouterr() == (STDOUT, STDERR)
        assert (ended.exit_code, ended.event_id) == (3, None)
        assert not supervisor.get(task.task_id).terminal
        disk.disarm()
        again = supervisor.wait(task.task_id, BOUND_S)
        assert (again.exit_code, again.status) == (3, TaskStatus.FAILED)
        assert again.event_id is not None
        eventually(lambda: supervisor.running == 0, BOUND_S)


def test_a_full_disk_keeps_nobody_from_ending_his_own_command(home: Path) -> None:
    """Neither the journal nor the request file can be written: the keeper is told by a signal."""
    disk = FaultyDisk()
    with GitJobStore(home, disk=disk) as store, ProcessSupervisor(store) as supervisor, _Spill() as spill:
        task = started(supervisor, spill, "exec sleep 60")
        disk.arm(1, errno.ENOSPC, for_good=True)
        supervisor.stop(task.task_id, "enough")
        ended = unrecorded(supervisor, task)
        assert ended.status is TaskStatus.CANCELLED
        disk.disarm()
        assert supervisor.wait(task.task_id, BOUND_S).status is TaskStatus.CANCELLED
        eventually(lambda: supervisor.running == 0, BOUND_S)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs a small file system of its own")
def test_the_command_line_on_a_full_file_system(tmp_path: Path) -> None:
    """The real thing: 3 MB of room, 7 MB of output."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", small], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    root = Path(__file__).parents[2]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "openjobs", "run", "--", "sh", "-c", "seq 1 1000000; echo last >&2; exit 3"],
            env={**os.environ, "PYTHONPATH": str(root), "OPENJOBS_HOME": str(small / "home")},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 3
        assert ended.stdout == b"".join(b"%d\n" % number for number in range(1, 1000001))
        lines = ended.stderr.decode().splitlines()
        assert "last" in lines
        assert sum("they are not kept" in line for line in lines) == 1
        assert "cannot be written down now" in ended.stderr.decode()
        # Its keeper still tries; room, and it leaves.
        subprocess.run(["mount", "-o", "remount,size=9m", small], check=True)
        eventually(lambda: list(small.glob("home/sessions/default/runs/*/exit.json")), BOUND_S)
    finally:
        eventually(lambda: subprocess.run(["umount", small], check=False, capture_output=True).returncode == 0, BOUND_S)
