"""Background commands when their worker dies, their disk fails or their journal lies: nothing runs twice, and no end
is lost, doubled or made up."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

import openjobs.processes
from openjobs import JobClient, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult
from openjobs.durable import Disk
from openjobs.errors import Damaged, OpenJobsError, OutcomeUnknown
from openjobs.processes import (
    Fact,
    ProcessSupervisor,
    Task,
    TaskJournal,
    TaskStatus,
    read_exit,
    run_command,
    run_directory,
)
from openjobs.processes.client import MARKS
from openjobs.processes.identity import Identity, LinuxSystem, this_system
from openjobs.processes.tree import TASK_VARIABLE
from openjobs.runlog import RunLogReader
from openjobs.store import GitJobStore
from openjobs.store.presence import JOB_TASKS, FileActive
from tests.support import eventually
from tests.support.disks import FaultyDisk

BOUND_S = 30.0
ENV = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
ROOM = Path(openjobs.processes.__file__).parent
#: the modules whose every line may be a worker's last
TRACED = {str(ROOM / name) for name in ("supervisor.py", "attendant.py", "journal.py", "tail.py")}


def new_home(path: Path) -> Path:
    with GitJobStore(path, durability="relaxed") as store:
        store.create_session("s")
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return new_home(tmp_path / "home")


@contextlib.contextmanager
def supervised(home: Path, **options: Any) -> Iterator[ProcessSupervisor]:
    with GitJobStore(home, durability="relaxed") as store, ProcessSupervisor(store, **options) as supervisor:
        yield supervisor


def marked(task_id: str) -> list[int]:
    system = this_system()
    mark = os.fsencode(f"{TASK_VARIABLE}={task_id}")
    return [m.identity.pid for m in system.table() if m.living and system.has_variable(m.identity.pid, mark)]


# --- the worker dies ---------------------------------------------------------------------------------------


def die_at(line: int, traced: Collection[str] = TRACED) -> None:
    """Kill this process before the `line`-th line that any thread runs in `traced` from now on."""
    left = itertools.count(line, -1)

    def tracer(frame: Any, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename not in traced:
            return None
        if event == "line" and next(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return tracer

    threading.settrace(tracer)
    sys.settrace(tracer)


def worker(home: Path, command: str, line: int) -> int:
    """A process that starts one command and sees it through, unless it dies at that line. Its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            store = GitJobStore(home, durability="relaxed")
            die_at(line)
            supervisor = ProcessSupervisor(store)
            task = supervisor.start("s", command, env=ENV, origin_tool_call_id=f"call-{line}")
            supervisor.wait(task.task_id)
            eventually(lambda: supervisor.running == 0)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_worker_killed_at_any_line_runs_nothing_twice(tmp_path: Path, chaos: bool) -> None:
    """From before the intent to after the end: the next worker and the same tool call find the first task; it ran at
    most once; where its keeper knew how it ended that is its end, else it is lost; its log is complete."""
    ends = set()
    for line in itertools.count(1, 3 if chaos else 31):
        home = new_home(tmp_path / f"home-{line}")  # one each: what is read from an old journal are lines, too
        ran = tmp_path / f"ran-{line}"
        command = f"echo ran >> {ran}; exit 3"
        finished = worker(home, command, line) == 0
        with supervised(home) as supervisor:
            supervisor.recover()
            task = supervisor.start("s", command, env=ENV, origin_tool_call_id=f"call-{line}")
            task = supervisor.wait(task.task_id, BOUND_S)
            again = supervisor.start("s", command, env=ENV, origin_tool_call_id=f"call-{line}")
            assert again == task
            eventually(lambda: supervisor.running == 0)
        times = ran.read_text().count("ran") if ran.exists() else 0
        assert times <= 1
        if task.status is TaskStatus.FAILED:
            assert (task.exit_code, task.stopped_by) in ((3, "exit"), (None, "never_started"))
            assert times == (task.stopped_by == "exit")
        else:
            assert task.status is TaskStatus.LOST
        facts = [json.loads(raw)["data"] for raw in (home / "sessions" / "s" / "tasks.jsonl").read_bytes().splitlines()]
        mine = [fact["fact"] for fact in facts if fact["task"] == task.task_id]
        assert (mine.count("intent"), mine.count("ended"), mine[0]) == (1, 1, "intent")
        assert not marked(task.task_id)
        state = RunLogReader(run_directory(home, "s", task.task_id)).state()
        assert state is not None
        assert state.completion is not None
        assert state.completion.outcome == task.status.value
        assert not list((home / MARKS).iterdir())
        ends.add((task.status, task.stopped_by))
        if finished:
            break
    assert (TaskStatus.FAILED, "exit") in ends
    assert (TaskStatus.LOST, "lost") in ends


def in_a_process(act: Callable[[], None]) -> int:
    """Its exit code; 0 when `act` came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


#: the modules that end a job's tasks
OWNED = {str(ROOM / "owned.py"), str(ROOM.parent / "runner" / "owned.py"), str(ROOM.parent / "runner" / "recovery.py")}


def host_with_a_job(home: Path, line: int) -> None:
    """A job whose turn starts two commands is cancelled; the process dies before that line of what looks after them."""
    store = GitJobStore(home, durability="relaxed")
    die_at(line, OWNED | TRACED)
    supervisor = ProcessSupervisor(store)
    runner = JobRunner(store, workers=1)
    runner.owned_tasks.use(supervisor.job_tasks)
    started = threading.Event()

    def turn(request: TurnRequest, cancel: threading.Event) -> TurnResult:
        for _ in range(2):
            supervisor.start("s", "setsid sleep 300 & exec sleep 300", env=ENV, job_id=request.job_id)
        started.set()
        cancel.wait(BOUND_S)
        return TurnResult(final_text="")

    job = runner.submit(SpawnRequest(prompt="p", parent_session_id="s"), sync_fn=turn)
    started.wait(BOUND_S)
    runner.cancel(job.job_id)
    runner.await_job(job.job_id, BOUND_S)
    eventually(lambda: supervisor.running == 0 and not list((home / JOB_TASKS).glob("*")), BOUND_S)


def tasks_in(home: Path) -> list[Task]:
    return list(TaskJournal(home / "sessions" / "s", "s", disk=Disk(durable=False)).tasks())


def test_a_host_killed_at_any_line_leaves_no_task_of_its_job(tmp_path: Path, chaos: bool) -> None:
    """From the start of a job's commands to their end with it: who recovers the job ends what is left of their trees,
    without a supervisor; the next supervisor records how they ended; nothing else is left."""
    ends, left_running = set(), 0
    for line in itertools.count(1, 11 if chaos else 173):
        home = new_home(tmp_path / f"home-{line}")
        finished = in_a_process(lambda home=home, line=line: host_with_a_job(home, line)) == 0  # type: ignore[misc]
        tasks = tasks_in(home)
        left_running += any(marked(task.task_id) for task in tasks)
        with GitJobStore(home, durability="relaxed") as store:
            JobClient(store).recover()
            assert all(job.terminal for job in store.list("s"))
            for task in tasks:
                eventually(lambda task=task: not marked(task.task_id), BOUND_S)
            with ProcessSupervisor(store) as supervisor:
                supervisor.recover()
                for task in tasks:
                    task = supervisor.wait(task.task_id, BOUND_S)
                    assert task.terminal
                    ends.add(task.status)
                eventually(lambda: supervisor.running == 0)
        facts = [json.loads(raw)["data"]["fact"] for raw in _lines(home / "sessions" / "s" / "tasks.jsonl")]
        assert facts.count("ended") == facts.count("intent") == len(tasks)
        assert not list((home / MARKS).glob("*"))
        assert not list((home / JOB_TASKS).glob("*"))
        if finished:
            break
    assert left_running > 3
    assert TaskStatus.CANCELLED in ends


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def test_a_recovery_killed_at_any_line_is_done_by_the_next(tmp_path: Path, chaos: bool) -> None:
    """A host was killed while its job's commands ran: wherever recoveries die, the one that does not has ended them."""
    home = new_home(tmp_path / "home")
    ready = os.pipe()

    def host() -> None:
        store = GitJobStore(home, durability="relaxed")
        supervisor, runner = ProcessSupervisor(store), JobRunner(store, workers=1)

        def turn(request: TurnRequest, cancel: threading.Event) -> TurnResult:
            supervisor.start("s", "trap '' TERM; setsid sleep 300 & sleep 300", env=ENV, job_id=request.job_id)
            os.write(ready[1], b"x")
            cancel.wait()
            return TurnResult(final_text="")

        runner.submit(SpawnRequest(prompt="p", parent_session_id="s"), sync_fn=turn)
        signal.pause()

    pid = os.fork()
    if pid == 0:
        try:
            host()
        finally:
            os._exit(1)
    os.read(ready[0], 1)
    for fd in ready:
        os.close(fd)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (task,) = tasks_in(home)
    assert marked(task.task_id)

    def recover(line: int) -> None:
        store = GitJobStore(home, durability="relaxed")
        die_at(line, OWNED)
        JobClient(store).recover()

    deaths = 0
    for line in itertools.count(1, 1 if chaos else 5):
        if in_a_process(lambda line=line: recover(line)) == 0:  # type: ignore[misc]
            break
        deaths += 1
    assert deaths > 5
    assert not marked(task.task_id)
    with GitJobStore(home, durability="relaxed") as store:
        (job,) = store.list("s")
        assert (job.status, job.error) == (JobStatus.ERRORED, "worker died before completion")
        with ProcessSupervisor(store) as supervisor:
            supervisor.recover()
            assert supervisor.get(task.task_id).status is TaskStatus.CANCELLED
    assert not list((home / JOB_TASKS).glob("*/*"))


# --- the disk fails ----------------------------------------------------------------------------------------


def test_a_disk_that_fails_at_any_effect_runs_nothing_twice(home: Path, tmp_path: Path) -> None:
    """Each effect of a start and of its end fails once: the caller hears so or does not notice, the same tool call
    again is the same task, and it ends."""
    for effect in itertools.count(1):
        ran = tmp_path / f"ran-{effect}"
        command = f"echo ran >> {ran}; exit 3"
        disk = FaultyDisk()
        with GitJobStore(home, disk=disk) as store, ProcessSupervisor(store) as supervisor:
            disk.arm(effect)
            with contextlib.suppress(OpenJobsError, OSError):
                supervisor.start("s", command, env=ENV, origin_tool_call_id=f"call-{effect}")
            task = _asked_again(supervisor, command, effect)
            task = supervisor.wait(task.task_id, BOUND_S)
            assert task.terminal
            eventually(lambda: supervisor.running == 0, BOUND_S)
            failed = disk.failed
        times = ran.read_text().count("ran") if ran.exists() else 0
        assert times <= 1
        if task.exit_code == 3:
            assert times == 1
        if not failed:
            break
    assert effect > 10


def _asked_again(supervisor: ProcessSupervisor, command: str, effect: int) -> Task:
    def ask() -> Task | None:
        try:
            return supervisor.start("s", command, env=ENV, origin_tool_call_id=f"call-{effect}")
        except (OpenJobsError, OSError):
            return None

    task = eventually(ask)
    assert task is not None
    return task


@pytest.mark.parametrize("who", ["the same worker", "the next worker"])
def test_an_intent_whose_start_was_interrupted_is_settled_by_who_meets_it(
    who: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is there, and its writer could not know: the same tool call gets that task, which never ran."""
    begin = TaskJournal.begin

    def unsure(self: TaskJournal, *args: Any, **fields: Any) -> Any:
        begin(self, *args, **fields)
        raise OutcomeUnknown("it may be there")

    command = f"echo ran >> {tmp_path}/ran"
    with supervised(home) as supervisor:
        with monkeypatch.context() as patch:
            patch.setattr(TaskJournal, "begin", unsure)
            with pytest.raises(OutcomeUnknown):
                supervisor.start("s", command, env=ENV, origin_tool_call_id="c")
        if who == "the same worker":
            task = supervisor.start("s", command, env=ENV, origin_tool_call_id="c")
    if who == "the next worker":
        with supervised(home) as supervisor:
            (task,) = supervisor.recover()
    assert (task.status, task.error) == (TaskStatus.LOST, "its keeper died or never came; it did not run")
    assert not (tmp_path / "ran").exists()


# --- the journal lies --------------------------------------------------------------------------------------


class Watching(LinuxSystem):
    """The real system; a signal is written down instead of sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        super().__init__(send=lambda fd, signum: self.sent.append(signum))


def forged(seed: int, system: LinuxSystem) -> dict[str, Any]:
    """An identity that is nobody's, or not its bearer's: reused pid, other boot, init, ourselves, a group."""
    me = system.identify(os.getpid())
    assert me is not None
    rnd = random.Random(seed)
    kinds = [
        Identity(me.pid, me.start - rnd.randint(1, 10**6), me.boot),  # the pid was given out again
        Identity(me.pid, me.start + 1, me.boot),
        Identity(me.pid, me.start, "00000000-0000-4000-8000-000000000000"),  # another boot
        Identity(1, 0, me.boot),
        Identity(0, me.start, me.boot),  # to kill(2): our own group
        Identity(-1, me.start, me.boot),  # to kill(2): everybody
        Identity(-me.pid, me.start, me.boot),
        Identity(os.getppid(), rnd.randint(0, 10**6), me.boot),
        Identity(2**31 - 1, 1, me.boot),
        Identity(2**40, 1, me.boot),
    ]
    return kinds[seed % len(kinds)].to_json()


@pytest.mark.skipif(sys.platform != "linux", reason="counts the signals that would go to real processes of this system")
def test_no_forged_identity_is_signalled_and_all_are_lost(home: Path, chaos: bool) -> None:
    """Thousands of journal entries that name other people's processes: not one signal, and each is recorded as lost."""
    count = 10_000 if chaos else 1_000
    system = Watching()
    journal = TaskJournal(home / "sessions" / "s", "s", disk=Disk(durable=False))
    FileActive(home, Disk(durable=False), MARKS).mark("dead", "s")
    boots = (system.boot(), "00000000-0000-4000-8000-000000000000")
    for number in range(count):
        task_id = f"{number:08x}-0000-4000-8000-000000000000"
        journal.begin(task_id, "sleep 1000", worker_id="dead", boot=boots[number % 7 == 0])
        who = forged(number, system)
        journal.record(task_id, Fact.RUNNING, keeper=who, child=who)
        if number % 20 == 0:
            # The run's directory tells the same lie.
            run = run_directory(home, "s", task_id)
            run.mkdir(parents=True, mode=0o700)
            lines = [who, {"started_at": "2026-01-01T00:00:00.000Z"}, {"child": who}]
            (run / "keeper").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with supervised(home, system=system) as supervisor:
        supervisor.recover()
        eventually(lambda: supervisor.running == 0, max(300.0, 0.15 * count), every=0.1)
        assert {task.status for task in supervisor.list("s")} == {TaskStatus.LOST}
        assert len(supervisor.list("s")) == count
    assert system.sent == []


# --- the journal is cut or damaged -------------------------------------------------------------------------


def written(directory: Path) -> TaskJournal:
    """A journal of three tasks: one seen, one ended, one running."""
    directory.mkdir()
    journal = TaskJournal(directory, "s", disk=Disk(durable=False))
    end = {"status": "completed", "exit_code": 0, "signal": None, "stopped_by": "exit", "error": "", "event_id": "e"}
    end |= {"stdout_bytes": 0, "stderr_bytes": 0, "seen_bytes": 0, "truncated": False, "leftovers": []}
    who = {"pid": 4, "start": 5, "boot": "b"}
    for number in range(3):
        journal.begin(f"t{number}", "x", worker_id="w", boot="b", origin_tool_call_id=f"c{number}")
        journal.record(f"t{number}", Fact.RUNNING, keeper=who, child=who)
        if number < 2:
            journal.record(f"t{number}", Fact.ENDED, **end)
        if number == 0:
            journal.record("t0", Fact.CONSUMED, event_id="e")
    return journal


def test_a_journal_cut_anywhere_in_its_last_two_records(tmp_path: Path) -> None:
    """Old tasks are as they were, the torn record is kept aside, and the next one can be written and read."""
    whole = written(tmp_path / "whole").path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 0x0A]
    for cut in range(ends[-3], len(whole)):
        directory = tmp_path / f"cut-{cut}"
        directory.mkdir()
        path = directory / "tasks.jsonl"
        path.write_bytes(whole[:cut])
        path.chmod(0o600)
        journal = TaskJournal(directory, "s", disk=Disk(durable=False))
        assert [task.status for task in journal.tasks()][-2:] == [TaskStatus.COMPLETED] * 2
        task, fresh = journal.begin("new", "y", worker_id="w", boot="b", origin_tool_call_id="cn")
        assert fresh
        assert TaskJournal(directory, "s").get("new") == task
        assert not journal.begin("t9", "x", worker_id="w", boot="b", origin_tool_call_id="c1")[1]
        complete = max(end for end in ends if end <= cut)
        assert path.read_bytes()[:complete] == whole[:complete]
        aside = list(directory.glob("tasks.jsonl.torn-*"))
        assert [one.read_bytes() for one in aside] == ([whole[complete:cut]] if cut > complete else [])


def test_a_flipped_bit_in_the_middle_is_refused_with_its_place(tmp_path: Path) -> None:
    """The file stays as it is, and nothing is started on top of it."""
    whole = written(tmp_path / "whole").path.read_bytes()
    first = whole.index(b"\n") + 1
    for at in range(0, len(whole) - len(whole.splitlines()[-1]) - 1, 13):
        directory = tmp_path / f"bit-{at}"
        directory.mkdir()
        bad = bytearray(whole)
        bad[at] ^= 1 << at % 8
        path = directory / "tasks.jsonl"
        path.write_bytes(bad)
        path.chmod(0o600)
        journal = TaskJournal(directory, "s", disk=Disk(durable=False))
        with pytest.raises(Damaged) as caught:
            journal.begin("new", "y", worker_id="w", boot="b")
        assert caught.value.offset is not None
        assert caught.value.offset <= at
        assert path.read_bytes() == bad
        if at >= first:
            assert caught.value.offset > 0
        assert list(directory.glob("tasks.jsonl.torn-*")) == []


def test_a_record_that_appears_between_two_looks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper writes its record at the very moment in which somebody looks for it: it is there, not damaged."""
    run_command("exit 3", run_dir=tmp_path / "run", env=ENV, disk=Disk(durable=False))
    record = tmp_path / "run" / "exit.json"
    whole = record.read_bytes()
    record.unlink()
    exists = os.path.lexists

    def appears(path: Path) -> bool:
        if path == record:
            record.write_bytes(whole)
        return exists(path)

    monkeypatch.setattr("openjobs.processes.rundir.os.path.lexists", appears)
    found = read_exit(tmp_path / "run")
    assert found is not None
    assert found.exit_code == 3


# --- the log cannot be used --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["link", "pipe", "directory", "strange bytes"])
def test_a_log_that_cannot_be_written_keeps_no_end_from_being_recorded(what: str, home: Path, tmp_path: Path) -> None:
    """What stands in its place is left as it was; the task ends as it ends."""
    with supervised(home) as supervisor:
        task = supervisor.start("s", f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 5", env=ENV)
        run = run_directory(home, "s", task.task_id)
        eventually(lambda: (run / "log.state").exists())
        supervisor._attendant.find(task.task_id).tail.rest()  # type: ignore[union-attr]
        (run / "log").unlink()
        if what == "link":
            (run / "log").symlink_to(tmp_path / "elsewhere")
        elif what == "pipe":
            os.mkfifo(run / "log", 0o600)
        elif what == "directory":
            (run / "log").mkdir()
        else:
            (run / "log").write_bytes(b"not ours")
        (tmp_path / "go").touch()
        ended = supervisor.wait(task.task_id, BOUND_S)
        assert (ended.status, ended.exit_code) == (TaskStatus.FAILED, 5)
        eventually(lambda: supervisor.running == 0)
    assert not (tmp_path / "elsewhere").exists()
    if what == "strange bytes":
        assert (run / "log").read_bytes() == b"not ours"
