"""Whole trees end: sessions of their own, double forks, ignored TERM, suspended members."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs.processes import rundir, tree
from openjobs.processes.identity import Identity, PortableSystem, System, this_system
from openjobs.processes.template import Template
from tests.support import eventually
from tests.support.processes import RELAXED, faulty_template, marked, request, settle, this_task

BOUND_S = 20.0
ROOT = Path(__file__).parents[2]
TREES = 50


@pytest.fixture
def template() -> Iterator[Template]:
    with Template() as template:
        yield template


@pytest.fixture
def portable() -> Iterator[Template]:
    """Keepers as on systems without /proc, pidfd and subreaper."""
    with faulty_template(portable=True) as template:
        yield template


@pytest.fixture(params=["this", "portable"])
def system(request: pytest.FixtureRequest) -> System:
    """Ours, and the one for systems without /proc, which works here too."""
    return this_system() if request.param == "this" else PortableSystem()


def test_a_session_of_its_own_is_no_way_out(tmp_path: Path, template: Template) -> None:
    """`setsid sleep 300 &` outlives its command and is found and ended."""
    with template.start(tmp_path, request("setsid sleep 300 & echo hi")) as started:
        started.go()
        record = started.wait(BOUND_S)
        assert record is not None
        assert record.exit_code == 0
        assert started.wait_gone(BOUND_S)
    assert marked() == []
    record = rundir.read_exit(tmp_path)
    assert record is not None
    assert record.leftovers == []


def test_a_member_that_shed_the_mark_is_ended_too(tmp_path: Path, template: Template) -> None:
    """`env -i setsid`, twice orphaned: only the subreaper still knows whose it is."""
    command = f"(env -i setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 300' &) ; sleep 0.2"
    with template.start(tmp_path, request(command)) as started:
        started.go()
        assert started.wait_gone(BOUND_S)
    pid = int((tmp_path / "pid").read_text())
    assert [m for m in this_system().table() if m.identity.pid == pid and m.name == "sleep"] == []


class Grower:
    """Writes the scripts of one random tree: each node is a shell that starts its children and stays."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.nodes = 0

    def grow(self, depth: int = 0) -> Path:
        self.nodes += 1
        path = self.directory / f"node-{self.nodes}.sh"
        lines = []
        if self.random.random() < 0.4:
            lines.append("trap '' TERM")
        if depth < 4:
            for _ in range(self.random.choice([0, 1, 1, 2]) if depth else 2):
                start = f"sh {self.grow(depth + 1)}"
                lines.append(
                    self.random.choice([f"{start} &", f"setsid {start} &", f"({start} &)", f"(setsid {start} &)"])
                )
        lines.append(f"echo $$ > {self.directory}/{path.stem}.tmp; mv {self.directory}/{path.stem}.tmp {path}.up")
        last = self.random.choice(["sleep 300", "sleep 300", "exec sleep 300", "kill -STOP $$; sleep 300", "exit 0"])
        lines.append("sleep 300" if depth == 0 and last.startswith(("kill", "exit")) else last)
        path.write_text("\n".join(lines) + "\n")
        return path

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.directory.glob("*.up")]


@pytest.mark.parametrize("seed", range(TREES))
def test_no_random_tree_has_a_survivor_or_a_zombie(seed: int, tmp_path: Path, template: Template) -> None:
    """Depth 4, ended when it is grown or while it still grows."""
    grower = Grower(seed, tmp_path)
    root = grower.grow()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with template.start(run_dir, request(["sh", str(root)], grace_s=0.05)) as started:
        started.go()
        wanted = grower.nodes if seed % 2 else min(3, grower.nodes)
        eventually(lambda: len(grower.pids()) >= wanted)
        assert rundir.request_stop(run_dir, disk=RELAXED, system=this_system())
        record = started.wait(BOUND_S)
        assert record is not None
        assert record.stopped_by in ("term", "kill")
        assert started.wait_gone(BOUND_S)
    assert [
        m.name for m in this_system().table() if m.identity.pid in grower.pids() and m.name in ("sh", "sleep")
    ] == []
    assert marked() == []
    record = rundir.read_exit(run_dir)
    assert record is not None
    assert record.leftovers == []


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_without_its_keeper_is_ended_by_who_buries_it(seed: int, tmp_path: Path, template: Template) -> None:
    """The keeper was killed: the mark and the command's identity find what it kept."""
    grower = Grower(100 + seed, tmp_path)
    root = grower.grow()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with template.start(run_dir, request(["sh", str(root)])) as started:
        started.go()
        eventually(lambda: len(grower.pids()) == grower.nodes)
        this_system().send(started.keeper, signal.SIGKILL)
        assert started.wait_gone(BOUND_S)
    burial = settle(run_dir, grace_s=0.05)
    assert (burial.record, burial.may_have_run, burial.leftovers) == (None, True, [])
    assert marked() == []


@pytest.mark.parametrize("seed", range(4))
def test_keepers_of_other_systems_end_their_trees(seed: int, tmp_path: Path, portable: Template) -> None:
    """Without a subreaper the mark finds the orphans; on its own end the rest is swept, on request all of it."""
    grower = Grower(200 + seed, tmp_path)
    root = grower.grow()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    command = ["sh", str(root)] if seed % 2 else ["sh", "-c", f"(sh {root} &) ; sleep 0.3; echo hi; exit 4"]
    with portable.start(run_dir, request(command, grace_s=0.1)) as started:
        child = started.go()
        assert child == rundir.child_identity(run_dir)
        assert child == PortableSystem().identify(child.pid)
        eventually(lambda: len(grower.pids()) == grower.nodes or started.wait(0) is not None)
        if seed % 2:
            assert rundir.request_stop(run_dir, disk=RELAXED, system=PortableSystem())
        record = started.wait(BOUND_S)
        assert record is not None
        assert (record.exit_code, record.stopped_by) == (4, "exit") or record.stopped_by in ("term", "kill")
        assert started.wait_gone(BOUND_S)
    assert marked() == []
    record = rundir.read_exit(run_dir)
    assert record is not None
    assert record.leftovers == []


def test_other_systems_find_and_end_a_tree_by_its_mark(tmp_path: Path, system: System) -> None:
    """Without subreaper and pidfd, too; nobody else is touched."""
    env = {**os.environ, tree.TASK_VARIABLE: this_task()}
    script = "setsid sleep 300 & (setsid sleep 300 &); trap '' TERM; echo up; while :; do sleep 1; done"
    other = subprocess.Popen(["sleep", "300"])
    ours = subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE)
    try:
        assert ours.stdout is not None
        ours.stdout.readline()
        eventually(lambda: len(marked()) == 4)
        ending = tree.end(system, lambda: tree.find(system, task_id=this_task()), grace_s=0.1)
        assert ending.leftovers == []
        assert marked() == []
        assert ours.wait(BOUND_S) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


BURIES = """
import os, subprocess, sys
from openjobs.processes import tree
from openjobs.processes.identity import this_system
mine = subprocess.Popen(["sleep", "300"], env={"PATH": os.environ["PATH"]})
system = this_system()
tree.end(system, lambda: tree.find(system, task_id=sys.argv[1]), grace_s=0.1)
print(mine.poll(), flush=True)
mine.kill()
"""


def test_who_ends_the_tree_that_it_is_part_of_spares_itself() -> None:
    """A nested host buries the run that it was started in: neither it nor what it started is ended, others are."""
    env = {**os.environ, tree.TASK_VARIABLE: this_task(), "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen(["sleep", "300"], env=env)
    try:
        nested = [sys.executable, "-c", BURIES, this_task()]
        done = subprocess.run(nested, env=env, capture_output=True, text=True, timeout=BOUND_S)
        assert done.stdout == "None\n", done.stderr
        assert other.wait(BOUND_S) == -signal.SIGTERM
    finally:
        other.kill()
        other.wait()


def test_an_identity_holds_for_one_process_only(system: System) -> None:
    """It is alive until its process ends; a zombie is not alive; the next with its pid is another."""
    process = subprocess.Popen(["sleep", "300"])
    try:
        identity = system.identify(process.pid)
        assert identity is not None
        assert system.is_alive(identity)
        later = Identity(identity.pid, identity.start + 1, identity.boot)
        assert not system.is_alive(later)
        assert not system.send(later, signal.SIGKILL)
        assert process.poll() is None
        assert system.send(identity, signal.SIGKILL)
        eventually(lambda: not system.is_alive(identity))  # a zombie: nobody has waited for it
        assert system.identify(process.pid) is None
    finally:
        process.kill()
        process.wait()
    assert not system.send(identity, signal.SIGKILL)


def test_a_leader_that_left_its_threads_running_is_alive() -> None:
    """It shows as a zombie while its process works on."""
    program = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(300,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    if sys.platform != "linux":
        pytest.skip("only Linux shows it so")
    system = this_system()
    process = subprocess.Popen([sys.executable, "-I", "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        state = Path(f"/proc/{process.pid}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
        identity = system.identify(process.pid)
        assert identity is not None
        assert system.send(identity, signal.SIGKILL)
        assert process.wait(BOUND_S) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


class Table(System):
    """A made-up process table; signals are noted, and obeyed by who does."""

    def __init__(self, processes: dict[int, tuple[int, int]], *, deaf: set[int]) -> None:
        self.processes = processes
        self.deaf = deaf
        self.sent: list[tuple[int, int]] = []

    def boot(self) -> str:
        return "a-boot"

    def identify(self, pid: int, *, zombie: bool = False) -> Identity | None:
        return Identity(pid, pid, "a-boot") if pid in self.processes else None

    def table(self) -> Iterator[tree.Member]:
        for pid, (ppid, session) in self.processes.items():
            yield tree.Member(Identity(pid, pid, "a-boot"), ppid, session, "a", True)

    def has_variable(self, pid: int, variable: bytes) -> bool:
        return False

    def _send(self, identity: Identity, signum: int) -> bool:
        self.sent.append((identity.pid, signum))
        if signum == signal.SIGKILL and identity.pid not in self.deaf:
            self.processes.pop(identity.pid, None)
        return True


def test_who_hangs_in_the_kernel_is_named_as_left_over() -> None:
    """An ending is bounded: what KILL does not end within its time is given up and named."""
    base = 10**6
    system = Table({base: (1, base), base + 1: (base, base), base + 2: (1, 5)}, deaf={base + 1})
    leader = Identity(base, base, "a-boot")
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    ending = tree.Ending(system, lambda: tree.find(system, leader=leader), grace_s=1.0, monotonic=lambda: now)
    # The leader's end takes its session's proof with it; the table keeps it, as the kernel does for a zombie.
    system.deaf.add(base)
    while (pause_s := ending.step()) is not None:
        pass_time(pause_s)
    assert [m.identity.pid for m in ending.leftovers] == [base, base + 1]
    assert [s for s in system.sent if s[1] == signal.SIGTERM] == [(base, 15), (base + 1, 15)]
    assert all(pid in (base, base + 1) for pid, _ in system.sent)
    assert now <= 1.0 + tree.AFTER_KILL_S + 0.1
