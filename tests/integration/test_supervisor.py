"""Background commands under a supervisor: every end told apart, nothing run twice, owners kept apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs.errors import (
    Closed,
    ForkedProcess,
    IdempotencyConflict,
    InvalidInput,
    KeeperFailed,
    SessionBusy,
    StoreWriteFailed,
    UnknownSession,
    UnknownTask,
)
from openjobs.processes import Fact, ProcessSupervisor, Task, TaskClient, TaskStatus, keeper_lives, this_system
from openjobs.processes.client import MARKS
from openjobs.processes.order import OrderEncoder
from openjobs.processes.task import lost
from openjobs.processes.tree import TASK_VARIABLE
from openjobs.runlog import RunLogReader
from openjobs.runlog.writer import RunLogWriter
from openjobs.store import GitJobStore, MockTaskStore
from tests.support import eventually
from tests.support.chaos import Chaos
from tests.support.child import forked
from tests.support.jobs import job_for
from tests.support.processes import Supervise

BOUND_S = 20.0
ENV = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s")
        yield store


def run(supervisor: ProcessSupervisor, command: Any, **options: Any) -> Task:
    task = supervisor.start("s", command, env=ENV, **options)
    return supervisor.wait(task.task_id, BOUND_S)


def marked(task_id: str) -> list[int]:
    """Living processes of a task."""
    system = this_system()
    mark = os.fsencode(f"{TASK_VARIABLE}={task_id}")
    return [m.identity.pid for m in system.table() if m.living and system.has_variable(m.identity.pid, mark)]


def log_of(store: GitJobStore, task: Task) -> RunLogReader:
    return RunLogReader(store.session_dir("s") / "runs" / task.task_id, task_id=task.task_id, run_id=task.task_id)


# --- the exit table --------------------------------------------------------------------------------------


def stopped(supervisor: ProcessSupervisor, command: str, grace_s: float) -> Task:
    task = supervisor.start("s", command, env=ENV)
    eventually(lambda: supervisor.output(task.task_id).data.endswith(b"ready\n"))
    supervisor.stop(task.task_id, "enough", grace_s=grace_s)
    return supervisor.wait(task.task_id, BOUND_S)


ENDS: dict[str, tuple[Callable[[ProcessSupervisor], Task], tuple[Any, ...]]] = {
    "exit 0": (lambda s: run(s, "exit 0"), ("completed", 0, None, "exit")),
    "exit 1": (lambda s: run(s, "exit 1"), ("failed", 1, None, "exit")),
    "exit 127": (lambda s: run(s, "exit 127"), ("failed", 127, None, "exit")),
    "not found": (lambda s: run(s, ["no-such-command"]), ("failed", 127, None, "not_found")),
    "not executable": (lambda s: run(s, ["/"]), ("failed", 126, None, "not_started")),
    "TERM by us": (lambda s: stopped(s, "echo ready; exec sleep 60", 5.0), ("cancelled", None, 15, "term")),
    "KILL by us": (
        lambda s: stopped(s, "trap '' TERM; echo ready; while :; do sleep 1; done", 0.2),
        ("cancelled", None, 9, "kill"),
    ),
    "KILL by somebody": (lambda s: run(s, "kill -9 $$"), ("failed", None, 9, "signal")),
    "INT": (lambda s: run(s, "kill -INT $$"), ("failed", None, 2, "signal")),
    "timeout": (lambda s: run(s, ["sleep", "60"], timeout_s=0.2), ("timed_out", None, 15, "timeout")),
    "output cap": (lambda s: run(s, ["yes"], output_limit_bytes=1000), ("failed", None, 15, "output_limit")),
}


@pytest.mark.parametrize("case", ENDS)
def test_every_way_to_end_is_told_apart(case: str, supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """Status, code, signal and `stopped_by` say which it was, for us and for who reads the journal."""
    act, expected = ENDS[case]
    task = act(supervisor)
    assert (task.status.value, task.exit_code, task.signal, task.stopped_by) == expected
    assert task.event_id
    with TaskClient(store.session_dir("s").parents[1]) as client:
        assert client.get(task.task_id) == task
    completion = eventually(lambda: (state := log_of(store, task).state()) and state.completion)
    assert completion.outcome == task.status.value


def test_no_two_ways_to_end_look_alike() -> None:
    """The table has no two equal rows."""
    assert len({expected for _, expected in ENDS.values()}) == len(ENDS)


# --- starting --------------------------------------------------------------------------------------------


def test_a_started_task_is_durably_running(supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """When `start` returns, who reads the files sees it run, with the command's real pid, and never its environment."""
    task = supervisor.start("s", "echo $SECRET; exec sleep 60", env=ENV | {"SECRET": "do-not-write-me"})
    with TaskClient(supervisor.client.home) as client:
        seen = client.get(task.task_id[:8])
    assert (seen.status, seen.pid) == (TaskStatus.RUNNING, task.pid)
    assert task.child is not None
    assert this_system().is_alive(task.child)
    eventually(lambda: supervisor.output(task.task_id).total_bytes)
    supervisor.stop(task.task_id, grace_s=1.0)
    supervisor.wait(task.task_id, BOUND_S)
    eventually(lambda: supervisor.running == 0)
    files = [
        path for path in (store.session_dir("s")).rglob("*") if path.is_file() and path.name not in ("stdout", "log")
    ]
    assert len(files) > 5
    assert not [path for path in files if b"do-not-write-me" in path.read_bytes()]


def test_a_child_that_holds_the_pipe_does_not_keep_a_task_running(supervisor: ProcessSupervisor) -> None:
    """`sleep 60 & echo hi` completes at once with `hi`, and the sleep is ended."""
    began = time.monotonic()
    task = run(supervisor, "sleep 60 & echo hi")
    assert time.monotonic() - began < BOUND_S
    assert supervisor.output(task.task_id).data == b"hi\n"
    eventually(lambda: not marked(task.task_id))


def test_a_session_of_its_own_is_found_and_ended(supervisor: ProcessSupervisor) -> None:
    """`setsid sleep 300 &` does not outlive its task."""
    task = run(supervisor, "setsid sleep 300 & echo hi")
    assert task.status is TaskStatus.COMPLETED
    eventually(lambda: not marked(task.task_id))


@pytest.mark.parametrize(
    ("session", "command", "options"),
    [
        ("s", "", {}),
        ("s", [], {}),
        ("s", ["a\0b"], {}),
        ("s", "echo \ud800", {}),
        ("s", ["echo", "\ud800"], {}),
        ("s", "x", {"timeout_s": -1}),
        ("s", "x", {"origin_tool_call_id": ""}),
        ("s", "x", {"task_id": "no-uuid"}),
        ("s", "x", {"cwd": "/nowhere/at/all"}),
        ("nope", "x", {}),
    ],
)
def test_what_cannot_be_started_leaves_nothing(
    session: str, command: Any, options: dict[str, Any], supervisor: ProcessSupervisor, store: GitJobStore
) -> None:
    """It is refused with its reason, and no task is known of it."""
    with pytest.raises((InvalidInput, UnknownSession)):
        supervisor.start(session, command, env=ENV, **options)
    assert supervisor.list("s") == []


def test_a_store_in_memory_has_no_tasks() -> None:
    """Background commands need files that outlive the process."""
    with MockTaskStore() as store, pytest.raises(InvalidInput):
        ProcessSupervisor(store)


def test_the_session_has_a_directory_for_its_commands(supervisor: ProcessSupervisor, tmp_path: Path) -> None:
    """Without a `cwd` a command runs in the session's own; with one, there."""
    assert supervisor.output(run(supervisor, "pwd").task_id).data.endswith(b"/sessions/s/work\n")
    assert supervisor.output(run(supervisor, "pwd", cwd=tmp_path).task_id).data == os.fsencode(tmp_path) + b"\n"


def test_ids_are_unique_beginnings(supervisor: ProcessSupervisor) -> None:
    """A beginning of an id is enough; none or several are answered with candidates."""
    task = run(supervisor, "true")
    assert supervisor.get(task.task_id[:6]).task_id == task.task_id
    with pytest.raises(UnknownTask) as caught:
        supervisor.get("ffffffff-0000-4000-8000-000000000000")
    assert task.task_id in caught.value.candidates


# --- once ------------------------------------------------------------------------------------------------


def test_the_same_tool_call_runs_once(supervise: Supervise, tmp_path: Path) -> None:
    """Asked again, at once or by the next worker, it is the first task; with another command it is a conflict."""
    first, second = supervise(), supervise()
    command = f"echo x >> {tmp_path}/ran"
    tasks = [first.start("s", command, env=ENV, origin_tool_call_id="c") for _ in range(3)]
    tasks.append(first.wait(tasks[0].task_id, BOUND_S))
    first.close()
    tasks += [second.start("s", command, env=ENV, origin_tool_call_id="c") for _ in range(3)]
    assert len({task.task_id for task in tasks}) == 1
    assert tasks[-1].status is TaskStatus.COMPLETED
    for other in ("echo y", [*command.split()]):
        with pytest.raises(IdempotencyConflict):
            second.start("s", other, env=ENV, origin_tool_call_id="c")
    assert (tmp_path / "ran").read_text() == "x\n"


def test_threads_that_start_one_tool_call_get_one_task(supervisor: ProcessSupervisor, tmp_path: Path) -> None:
    """Of sixteen at once one starts it, and all hear of it."""
    ids: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: ids.append(
                supervisor.start("s", f"echo x >> {tmp_path}/ran", env=ENV, origin_tool_call_id="c").task_id
            )
        )
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 16
    assert len(set(ids)) == 1
    supervisor.wait(ids[0], BOUND_S)
    assert (tmp_path / "ran").read_text() == "x\n"


# --- owners ----------------------------------------------------------------------------------------------


def test_a_stop_from_another_process_is_the_owners_to_act_on(supervise: Supervise) -> None:
    """The other one only writes it down; the owner ends the task, and both see how."""
    owner, other = supervise(), supervise()
    task = owner.start("s", "exec sleep 60", env=ENV)
    asked = other.stop(task.task_id, "from elsewhere", grace_s=3.0)
    assert (asked.status, asked.stop_reason) == (TaskStatus.RUNNING, "from elsewhere")
    ended = other.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.stopped_by, ended.worker_id) == (TaskStatus.CANCELLED, "term", owner.worker_id)


def test_a_live_second_worker_touches_nothing_of_the_first(supervise: Supervise) -> None:
    """It neither adopts nor finishes nor signals: recover, wait and the same tool call leave the task as it is."""
    owner, other = supervise(), supervise()
    task = owner.start("s", "exec sleep 60", env=ENV, origin_tool_call_id="c")
    before = owner.client.journal("s").path.read_bytes()
    assert other.recover() == []
    assert other.wait(task.task_id, 0.3).status is TaskStatus.RUNNING
    assert other.start("s", "exec sleep 60", env=ENV, origin_tool_call_id="c").task_id == task.task_id
    assert owner.client.journal("s").path.read_bytes() == before
    assert task.child is not None
    assert this_system().is_alive(task.child)


def test_closing_leaves_session_tasks_to_the_next_worker(supervise: Supervise, store: GitJobStore) -> None:
    """They go on under their keepers; who stays adopts them, drains what they wrote meanwhile, and can end them."""
    first = supervise()
    task = first.start("s", "echo one; while [ ! -e go ]; do sleep 0.05; done; echo two; exec sleep 60", env=ENV)
    first.close()
    with pytest.raises(Closed):
        first.get(task.task_id)
    run_dir = store.session_dir("s") / "runs" / task.task_id
    assert keeper_lives(run_dir)
    (store.session_dir("s") / "work" / "go").touch()
    eventually(lambda: (run_dir / "stdout").read_bytes() == b"one\ntwo\n")
    second = supervise()
    assert [(found.task_id, found.worker_id) for found in second.recover()] == [(task.task_id, second.worker_id)]
    assert second.recover() == []
    eventually(lambda: (run_dir / "log.state").exists() and log_of(store, task).read().data == b"one\ntwo\n")
    second.stop(task.task_id, grace_s=2.0)
    ended = second.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.worker_id) == (TaskStatus.CANCELLED, second.worker_id)


def test_who_waits_hears_of_the_closing(supervise: Supervise) -> None:
    """Nobody here will see the end any more; the task goes on."""
    first = supervise()
    task = first.start("s", "exec sleep 60", env=ENV)
    said: list[BaseException] = []

    def wait() -> None:
        try:
            first.wait(task.task_id)
        except Closed as closed:
            said.append(closed)

    thread = threading.Thread(target=wait)
    thread.start()
    first.close()
    thread.join(BOUND_S)
    assert len(said) == 1
    assert task.child is not None
    assert this_system().is_alive(task.child)


def test_closing_ends_the_trees_of_jobs(supervise: Supervise, store: GitJobStore) -> None:
    """A task that belongs to a job ends with its worker, and is recorded as cancelled."""
    first = supervise()
    job = store.create(job_for(store, "s"))
    task = first.start("s", "sleep 60 & exec sleep 60", env=ENV, job_id=job.job_id)
    first.close()
    with TaskClient(store.session_dir("s").parents[1]) as client:
        assert client.get(task.task_id).status is TaskStatus.CANCELLED
    eventually(lambda: not marked(task.task_id))
    assert not (store.session_dir("s").parents[1] / MARKS / first.worker_id).exists()


def test_two_that_recover_at_once_share_what_is_left(supervise: Supervise) -> None:
    """Each running task is adopted by exactly one of them, each end is recorded once, and nobody is disturbed."""
    first = supervise()
    running = [first.start("s", "exec sleep 60", env=ENV) for _ in range(4)]
    ending = [first.start("s", "sleep 0.3; exit 4", env=ENV) for _ in range(4)]
    lost = first.start("s", "exec sleep 60", env=ENV)
    first.close()
    with TaskClient(first.client.home) as client:
        eventually(lambda: all(client.get(task.task_id).terminal for task in ending))
    assert lost.keeper is not None
    this_system().send(lost.keeper, signal.SIGKILL)
    others = [supervise(), supervise()]
    together = threading.Barrier(2)

    def recover(supervisor: ProcessSupervisor) -> None:
        together.wait()
        supervisor.recover()

    threads = [threading.Thread(target=recover, args=(supervisor,)) for supervisor in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: sum(supervisor.running for supervisor in others) == len(running))
    owners = {supervisor.worker_id for supervisor in others}
    found = {task.task_id: task for task in others[0].list("s")}
    for task in running:
        assert found[task.task_id].status is TaskStatus.RUNNING
        assert found[task.task_id].worker_id in owners
        assert task.child is not None
        assert this_system().is_alive(task.child)
    assert [(found[task.task_id].status, found[task.task_id].exit_code) for task in ending] == [
        (TaskStatus.FAILED, 4)
    ] * 4
    assert found[lost.task_id].status is TaskStatus.LOST
    facts = [json.loads(line)["data"] for line in first.client.journal("s").path.read_bytes().splitlines()]
    adopted = [fact["task"] for fact in facts if fact["fact"] == "adopted"]
    assert sorted(adopted) == sorted(task.task_id for task in running)
    ended = [fact["task"] for fact in facts if fact["fact"] == "ended"]
    assert sorted(ended) == sorted([*(task.task_id for task in ending), lost.task_id])


def test_an_outcome_that_only_the_keeper_knows_is_taken_from_its_record(supervise: Supervise) -> None:
    """The command ends while nobody looks: a reader sees how at once, the next worker records it."""
    first = supervise()
    task = first.start("s", "sleep 0.3; echo late; exit 7", env=ENV)
    first.close()
    with TaskClient(first.client.home) as client:
        seen = eventually(lambda: (found := client.get(task.task_id)).terminal and found)
        assert (seen.status, seen.exit_code, seen.event_id) == (TaskStatus.FAILED, 7, None)
        assert client.output(seen).data == b"late\n"
    second = supervise()
    (ended,) = second.recover()
    assert (ended.status, ended.exit_code) == (TaskStatus.FAILED, 7)
    assert ended.ended_at == seen.ended_at  # and not when it was recorded
    assert ended.event_id
    assert second.recover() == []
    assert second.get(task.task_id).event_id == ended.event_id


def test_a_task_whose_keeper_was_killed_is_lost(supervise: Supervise, store: GitJobStore) -> None:
    """What was written is kept, the tree is ended, a tombstone stands, and nothing runs again."""
    supervisor = supervise()
    task = supervisor.start("s", "echo before; exec sleep 60", env=ENV, origin_tool_call_id="c")
    assert task.keeper is not None
    eventually(lambda: supervisor.output(task.task_id).data == b"before\n")
    this_system().send(task.keeper, signal.SIGKILL)
    ended = supervisor.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.exit_code, ended.signal, ended.stopped_by) == (TaskStatus.LOST, None, None, "lost")
    assert (store.session_dir("s") / "runs" / task.task_id / "lost").exists()
    assert not marked(task.task_id)
    assert supervisor.start("s", "echo before; exec sleep 60", env=ENV, origin_tool_call_id="c") == ended
    completion = eventually(lambda: (state := log_of(store, task).state()) and state.completion)
    assert (completion.outcome, log_of(store, task).read().data) == ("lost", b"before\n")


def test_a_shared_lease_is_not_the_supervisors_to_give_back(supervise: Supervise, store: GitJobStore) -> None:
    """A runner's host shares its lease; tasks belong to that runner and outlive the supervisor."""
    lease = store.leases.acquire("runner-1")
    try:
        shared = supervise(worker_id="runner-1")
        task = shared.start("s", "exec sleep 60", env=ENV)
        shared.close()
        assert store.leases.is_held("runner-1")
        assert task.worker_id == "runner-1"
        assert supervise().recover() == []
    finally:
        lease.release()


def test_a_forked_child_may_not_use_it(supervisor: ProcessSupervisor) -> None:
    """It belongs to the parent; the child gets a clear error."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            supervisor.start("s", "true", env=ENV)
        except ForkedProcess:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- output ----------------------------------------------------------------------------------------------


def test_the_log_has_every_byte_of_both_streams(supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """More than one intent holds, binary, without a last newline."""
    program = "import os; d = bytes(range(256)) * 1024; os.write(1, d); os.write(2, d[::-1]); os.write(1, b'end')"
    task = run(supervisor, [sys.executable, "-ISc", program])
    eventually(lambda: (state := log_of(store, task).state()) and state.completion)
    data = bytes(range(256)) * 1024
    assert supervisor.output(task.task_id, "stdout", limit=10**6).data == data + b"end"
    assert supervisor.output(task.task_id, "stderr", limit=10**6).data == data[::-1]
    log = b"".join(log_of(store, task).follow())
    assert len(log) == 2 * len(data) + 3
    assert sorted(log) == sorted(data * 2 + b"end")


def test_a_follower_sees_lines_while_the_task_runs_and_ends_with_it(
    supervisor: ProcessSupervisor, store: GitJobStore
) -> None:
    """Every line comes before the next one is written; the last one has no newline."""
    work = store.session_dir("s") / "work"
    script = "for n in 1 2 3; do echo $n; while [ ! -e $n ]; do sleep 0.02; done; done; printf last"
    task = supervisor.start("s", script, env=ENV)
    eventually(lambda: (store.session_dir("s") / "runs" / task.task_id / "log.state").exists())
    seen = b""
    for chunk in log_of(store, task).follow():
        seen += chunk
        for line in seen.split():
            if line.isdigit():
                (work / line.decode()).touch()
    assert seen == b"1\n2\n3\nlast"


def test_a_command_may_go_on_beyond_its_cap(supervisor: ProcessSupervisor) -> None:
    """With "drop" the rest is counted and dropped; with "stop" the command is ended. Both say what was seen."""
    command = "head -c 3000000 /dev/zero; exit 3"
    task = run(supervisor, command, output_limit_bytes=2**20, on_limit="drop")
    assert (task.status, task.exit_code, task.truncated) == (TaskStatus.FAILED, 3, True)
    assert (task.stdout_bytes, task.seen_bytes) == (2**20, 3_000_000)
    task = run(supervisor, "yes", output_limit_bytes=2**20)
    assert (task.stopped_by, task.stdout_bytes, task.truncated) == ("output_limit", 2**20, True)
    assert task.seen_bytes > 2**20
    assert f"{task.seen_bytes:,}" in task.error
    found = supervisor.output(task.task_id, offset=2**20 - 2)
    assert (found.data, found.eof, found.truncated, found.total_bytes) == (b"y\n", True, True, 2**20)


def test_reading_a_huge_output_costs_what_is_asked_for(
    supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece from the middle of a gigabyte takes memory, and reads from the disk, in proportion to the piece, also of
    the mixture."""
    task = run(supervisor, "true")
    eventually(lambda: supervisor.running == 0)
    run_dir = store.session_dir("s") / "runs" / task.task_id
    size, piece = 2**30, 65536
    with (run_dir / "stdout").open("wb") as file:
        file.truncate(size)  # a hole: it takes no room on the disk
    encoder = OrderEncoder()
    (run_dir / "order").write_bytes(b"".join(encoder.entry(0, piece) for _ in range(size // piece)))
    record = json.loads((run_dir / "exit.json").read_bytes())
    (run_dir / "exit.json").write_text(json.dumps(record | {"stdout_bytes": size, "stdout_seen_bytes": size}))
    read, pread = [0], os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        read[0] += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    for stream in ("stdout", "mixed"):
        read[0] = 0
        tracemalloc.start()
        found = supervisor.output(task.task_id, stream, offset=size // 2 + 1, limit=piece)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (len(found.data), found.total_bytes, found.eof) == (piece, size, False)
        assert peak < 20 * piece
        assert piece <= read[0] < 2 * piece


def test_output_records_are_sparse(supervise: Supervise) -> None:
    """While it runs, the journal says now and then how much it wrote, and no more often than it may."""
    supervisor = supervise(output_every_s=0.1)
    task = supervisor.start("s", "while :; do echo x; sleep 0.01; done", env=ENV)
    eventually(lambda: supervisor.get(task.task_id).stdout_bytes > 0)
    began, first = time.monotonic(), _outputs(supervisor)
    eventually(lambda: _outputs(supervisor) > first + 3)
    assert _outputs(supervisor) - first <= (time.monotonic() - began) / 0.1 + 1


def _outputs(supervisor: ProcessSupervisor) -> int:
    return supervisor.client.journal("s").path.read_bytes().count(b'"fact":"output"')


# --- many ------------------------------------------------------------------------------------------------


def test_many_short_tasks_leave_nothing_behind(supervisor: ProcessSupervisor, chaos: Chaos) -> None:
    """Threads and descriptors are as many after hundreds of tasks as after a few; each has its end."""
    count = chaos.rounds(150, 2000)

    def batch(number: int) -> None:
        for task in [supervisor.start("s", ["true"], env=ENV) for _ in range(number)]:
            assert supervisor.wait(task.task_id, BOUND_S).status is TaskStatus.COMPLETED
        eventually(lambda: supervisor.running == 0)

    batch(20)
    before = _descriptors(), threading.active_count()
    for _ in range(count // 50):
        batch(50)
    assert (_descriptors(), threading.active_count()) == before
    assert len(supervisor.list("s")) == 20 + count // 50 * 50


def _descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_threads_that_log_do_not_lock_out_those_that_start(supervisor: ProcessSupervisor) -> None:
    """Sixty-four threads log all the time while five hundred processes start from four: all start, and all end."""
    import logging

    noise = logging.getLogger("tests.noise")
    noise.propagate = False
    handler = logging.StreamHandler(open(os.devnull, "w"))  # noqa: SIM115  # closed below
    noise.addHandler(handler)
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            noise.warning("words")
            time.sleep(0.001)

    each = 125
    ids: list[str] = []

    def start() -> None:
        ids.extend(supervisor.start("s", "echo $$", env=ENV).task_id for _ in range(each))

    loud = [threading.Thread(target=chatter) for _ in range(64)]
    starters = [threading.Thread(target=start) for _ in range(4)]
    for thread in (*loud, *starters):
        thread.start()
    for thread in starters:
        thread.join()
    ended = [supervisor.wait(task_id, 10 * BOUND_S) for task_id in ids]
    stop.set()
    for thread in loud:
        thread.join()
    handler.stream.close()
    noise.removeHandler(handler)
    assert [task.status for task in ended] == [TaskStatus.COMPLETED] * 4 * each


def test_reading_a_task_needs_no_git(supervisor: ProcessSupervisor) -> None:
    """The index of ids, the journal and the run's directory are enough, and nothing is written."""
    task = attrs.evolve(run(supervisor, "echo hi"))
    home = supervisor.client.home
    (home / "sessions" / "s" / "repo").rename(home / "sessions" / "s" / "hidden")
    program = f"""
import sys
from pathlib import Path
from openjobs.processes.client import TaskClient
with TaskClient(Path({str(home)!r})) as client:
    task = client.get({task.task_id[:8]!r})
    print(task.status.value, client.output(task).data)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    (home / "sessions" / "s" / "hidden").rename(home / "sessions" / "s" / "repo")
    assert said.stdout == "completed b'hi\\n'\n", said.stderr


# --- what the disk refuses -------------------------------------------------------------------------------


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(28, "no space left on device")


def test_a_start_that_cannot_be_marked_or_indexed_starts_nothing(
    supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes after us looks at the marks, and ids are found in the index: without either there is no task."""
    for target, name, said in (
        (supervisor._marks, "mark", "could not be marked"),
        (supervisor.client.index, "add", "index of tasks"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, refuse)
            with pytest.raises(StoreWriteFailed, match=said):
                supervisor.start("s", "true", env=ENV)
    assert supervisor.list("s") == []
    assert run(supervisor, "exit 3").exit_code == 3


def test_a_run_that_no_keeper_takes_has_failed(supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The intent is written, and nothing ran: code 126, with the reason, and it will not be run later either."""

    def refused(*_: Any) -> Any:
        raise KeeperFailed("no keeper")

    with monkeypatch.context() as patch:
        patch.setattr(supervisor._template, "start", refused)
        task = supervisor.start("s", "true", env=ENV, origin_tool_call_id="c")
    assert (task.status, task.exit_code, task.stopped_by) == (TaskStatus.FAILED, 126, "not_started")
    assert "no keeper" in task.error
    assert supervisor.start("s", "true", env=ENV, origin_tool_call_id="c") == task


@pytest.mark.parametrize("mine", [True, False])
def test_a_stop_that_no_disk_takes_reaches_what_is_ours(
    mine: bool, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only others need the record. Another worker's task cannot be asked for without one, and that is said."""
    owner, other = supervise(), supervise()
    asking = owner if mine else other
    task = owner.start("s", "exec sleep 60", env=ENV)

    def full(*_: Any, **__: Any) -> Any:
        raise StoreWriteFailed("full")

    with monkeypatch.context() as patch:
        patch.setattr(asking.client, "request_stop", full)
        if mine:
            asking.stop(task.task_id, grace_s=1.0)
            assert owner.wait(task.task_id, BOUND_S).status is TaskStatus.CANCELLED
        else:
            with pytest.raises(StoreWriteFailed):
                asking.stop(task.task_id, grace_s=1.0)
    assert owner.get(task.task_id).terminal == mine


def test_a_close_ends_the_commands_of_jobs_without_any_record(
    supervise: Supervise, store: GitJobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stop of a job's command cannot be written down, and the supervisor's own marks cannot be removed: the command
    ends, and the close does."""
    job = store.create(job_for(store, "s"))
    first = supervise()
    task = first.start("s", "exec sleep 60", env=ENV, job_id=job.job_id)
    monkeypatch.setattr(first.client, "request_stop", refuse)
    monkeypatch.setattr(first._marks, "clear", refuse)
    first.close()
    with TaskClient(first.client.home) as client:
        assert client.get(task.task_id).status is TaskStatus.CANCELLED
    eventually(lambda: not marked(task.task_id))
    assert "its stop could not be recorded" in caplog.text
    assert "could not be removed; the next one's recovery will" in caplog.text
    assert supervise().recover() == []
    assert not (first.client.home / MARKS / first.worker_id).exists()


def test_a_session_that_cannot_be_recovered_now_is_left_for_the_next_time(
    supervise: Supervise, store: GitJobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It hides no other session, and what leads there stays: the mark and the lease of the dead worker."""
    store.create_session("t")
    first = supervise()
    here, there = first.start("s", "exec sleep 60", env=ENV), first.start("t", "exec sleep 60", env=ENV)
    first.close()
    second = supervise()
    with monkeypatch.context() as patch:
        patch.setattr(second.client.journal("s"), "unfinished", refuse)
        second.recover()
        assert f"tasks of session s, worker {first.worker_id[:8]}" in caplog.text
        assert second.running == 1
    assert store.leases.dead() == [first.worker_id]
    second.recover()
    assert {second.get(task.task_id).worker_id for task in (here, there)} == {second.worker_id}
    assert store.leases.dead() == []


def test_what_a_short_process_leaves_running_is_the_next_hosts(supervise: Supervise, store: GitJobStore) -> None:
    """`adopt=False`: what runs is left, with the marks that lead there; what has ended is recorded."""
    first = supervise()
    running = first.start("s", "exec sleep 60", env=ENV)
    ending = first.start("s", "sleep 0.2; exit 4", env=ENV)
    first.close()
    with TaskClient(first.client.home) as client:
        eventually(lambda: not keeper_lives(client.run_dir(ending)))
    short = supervise()
    assert [task.task_id for task in short.recover(adopt=False)] == [ending.task_id]
    eventually(lambda: short.running == 0)
    assert store.leases.dead() == [first.worker_id]
    staying = supervise()
    assert [task.task_id for task in staying.recover()] == [running.task_id]


def test_a_stop_that_was_asked_for_while_nobody_looked_is_acted_on_by_who_adopts(supervise: Supervise) -> None:
    """The request is in the journal; the keeper was never told."""
    first = supervise()
    task = first.start("s", "exec sleep 60", env=ENV)
    first.close()
    with TaskClient(first.client.home) as client:
        client.request_stop(task.task_id, "while nobody looked", grace_s=1.0)
    second = supervise()
    second.recover()
    ended = second.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.stop_reason) == (TaskStatus.CANCELLED, "while nobody looked")


def test_no_end_is_shown_as_unrecorded_that_is_recorded(
    supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing for a task that runs, that is not ours, or that somebody else recorded meanwhile; while no disk takes the
    record, the end as it is."""
    task = supervisor.start("s", "while [ ! -e go ]; do sleep 0.02; done; exit 4", env=ENV)
    assert supervisor.unrecorded_end("no-such-task") is None
    assert supervisor.unrecorded_end(task.task_id) is None
    journal = supervisor.client.journal("s")
    record = journal.record
    with monkeypatch.context() as patch:
        patch.setattr(journal, "record", refuse)
        (supervisor.client.home / "sessions" / "s" / "work" / "go").touch()
        seen = eventually(lambda: supervisor.unrecorded_end(task.task_id))
        assert seen is not None
        assert (seen.exit_code, seen.event_id) == (4, None)
        record(task.task_id, Fact.ENDED, event_id="another", **lost("another was first"))
        assert supervisor.unrecorded_end(task.task_id) is None
    assert supervisor.wait(task.task_id, BOUND_S).event_id == "another"
    eventually(lambda: supervisor.running == 0)


def test_a_forked_childs_close_ends_nothing(supervise: Supervise, store: GitJobStore) -> None:
    """Not the commands of jobs, not the lease, not the template: they are the parent's."""
    supervisor = supervise()
    job = store.create(job_for(store, "s"))
    task = supervisor.start("s", "exec sleep 60", env=ENV, job_id=job.job_id)

    def close() -> str:
        supervisor.close()
        return "closed"

    with forked(close) as child:
        assert child.answer() == "closed"
    assert supervisor.get(task.task_id).status is TaskStatus.RUNNING
    assert store.leases.is_held(supervisor.worker_id)
    assert run(supervisor, "exit 3").exit_code == 3
    supervisor.stop_job(job.job_id)
    ended = supervisor.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.stop_reason) == (TaskStatus.CANCELLED, "its job was asked to stop")


def test_a_lease_that_a_dead_runner_shared_stays_until_its_jobs_are_recovered(
    supervise: Supervise, store: GitJobStore
) -> None:
    """The supervisor takes its own marks away; the runner's lead to its lease."""
    first = supervise()
    first.start("s", "exec sleep 60", env=ENV)
    first.close()
    store.active.mark(first.worker_id, "s")
    second = supervise()
    second.recover()
    assert not (second.client.home / MARKS / first.worker_id).exists()
    assert store.leases.dead() == [first.worker_id]


def test_the_log_of_a_jobs_own_run_is_no_tasks(supervise: Supervise, store: GitJobStore) -> None:
    """It lies in the same folder, unfinished; a recovery of tasks leaves it to the runner's."""
    first = supervise()
    task = first.start("s", "exec sleep 60", env=ENV)
    first.close()
    directory = store.session_dir("s") / "runs" / "a-jobs-run"
    directory.mkdir()
    RunLogWriter(directory, task_id="a-job", run_id="a-jobs-run", disk=store.disk).close()
    second = supervise()
    assert [taken.task_id for taken in second.recover()] == [task.task_id]
    state = RunLogReader(directory).state()
    assert state is not None
    assert state.completion is None


def test_an_index_that_is_busy_says_so_itself(supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused for a reason of its own keeps its type, and nothing is started."""

    def busy(*_: Any) -> None:
        raise SessionBusy("the index is being written")

    with monkeypatch.context() as patch:
        patch.setattr(supervisor.client.index, "add", busy)
        with pytest.raises(SessionBusy):
            supervisor.start("s", "true", env=ENV)
    assert supervisor.list("s") == []


def test_a_keeper_that_was_killed_before_it_said_anything_leaves_a_lost_task(
    supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was never told to go, or may have gone: nobody can know, and `start` says so."""
    start = supervisor._template.start

    def then_killed(*args: Any) -> Any:
        started = start(*args)
        this_system().send(started.keeper, signal.SIGKILL)
        assert started.wait_gone(BOUND_S)
        return started

    monkeypatch.setattr(supervisor._template, "start", then_killed)
    task = supervisor.start("s", "exec sleep 60", env=ENV)
    assert (task.status, task.stopped_by) == (TaskStatus.LOST, "lost")
    assert task.event_id
    assert not marked(task.task_id)


def test_a_start_that_failed_says_so_although_no_disk_takes_it(
    supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is shown as it is, without the id that a recorded one has, and is recorded once there is room."""

    def refused(*_: Any) -> Any:
        raise KeeperFailed("no keeper")

    journal = supervisor.client.journal("s")
    with monkeypatch.context() as patch:
        patch.setattr(supervisor._template, "start", refused)
        patch.setattr(journal, "record", refuse)
        task = supervisor.start("s", "true", env=ENV)
        assert (task.status, task.exit_code, task.event_id) == (TaskStatus.FAILED, 126, None)
    eventually(lambda: supervisor.running == 0)
    recorded = supervisor.get(task.task_id)
    assert (recorded.status, recorded.exit_code) == (TaskStatus.FAILED, 126)
    assert recorded.event_id
