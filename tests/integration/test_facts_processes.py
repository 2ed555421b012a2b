"""The facts of background commands, under real keepers, and followed from another process (spec 001)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs import GitJobStore, facts
from openjobs.clock import to_epoch_ms
from openjobs.facts import Fact, FileFactLog, Registered, Settled, to_json
from openjobs.processes import ProcessSupervisor, Task, TaskClient, this_system
from tests.support import eventually
from tests.support.jobs import job_for
from tests.support.processes import Supervise

BOUND_S = 20.0
ENV = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    store = GitJobStore(tmp_path / "home", durability="relaxed")
    with store:
        store.create_session("s")
        yield store


def recorded(store: GitJobStore) -> list[Fact]:
    return list(facts.read(store.session("s")))


def of(store: GitJobStore, task_id: str) -> list[Fact]:
    return [fact for fact in recorded(store) if fact.job_id == task_id]


def run(supervisor: ProcessSupervisor, command: Any, **options: Any) -> Task:
    task = supervisor.start("s", command, env=ENV, **options)
    return supervisor.wait(task.task_id, BOUND_S)


def stopped(supervisor: ProcessSupervisor, command: str, grace_s: float) -> Task:
    task = supervisor.start("s", command, env=ENV)
    eventually(lambda: supervisor.output(task.task_id).data.endswith(b"ready\n"))
    supervisor.stop(task.task_id, "enough", grace_s=grace_s)
    return supervisor.wait(task.task_id, BOUND_S)


def killed_keeper(supervisor: ProcessSupervisor) -> Task:
    task = supervisor.start("s", "exec sleep 60", env=ENV)
    assert task.keeper is not None
    this_system().send(task.keeper, signal.SIGKILL)
    return supervisor.wait(task.task_id, BOUND_S)


def test_what_a_reader_gets_of_one_command(supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """As of a job, with the kind of its producer; the times are those of the journal."""
    job = store.create(job_for(store, "s"))
    task = run(
        supervisor, ["sh", "-c", "exit 3"], origin_tool_call_id="toolu_1", description="try it", job_id=job.job_id
    )
    assert task.started_at is not None
    assert task.ended_at is not None
    registration = {
        "job_id": task.task_id,
        "kind": "process",
        "session_id": "s",
        "caller_session_id": None,
        "parent_job_id": job.job_id,
        "label": "try it",
        "tool_call_id": "toolu_1",
        "registered_at_ms": to_epoch_ms(task.created_at),
    }
    assert [to_json(fact) for fact in of(store, task.task_id)] == [
        {"type": "job/registered", **registration},
        {
            "type": "job/settled",
            **registration,
            "started_at_ms": to_epoch_ms(task.started_at),
            "settled_at_ms": to_epoch_ms(task.ended_at),
            "status": "failed",
            "producer_reported": True,
        },
    ]


def test_a_command_without_a_description_is_labelled_by_itself(supervisor: ProcessSupervisor, store: Any) -> None:
    """One line, of the words or of the text."""
    run(supervisor, ["echo", "a\nb"])
    run(supervisor, "true  &&\n true")
    assert [fact.label for fact in recorded(store) if isinstance(fact, Registered)] == ["echo a b", "true && true"]


REPORTS: dict[str, tuple[Callable[[ProcessSupervisor], Task], str, bool]] = {
    "exit 0": (lambda s: run(s, "exit 0"), "completed", True),
    "exit 1": (lambda s: run(s, "exit 1"), "failed", True),
    "killed by somebody": (lambda s: run(s, "kill -9 $$"), "failed", True),
    "asked, and obeyed": (lambda s: stopped(s, "echo ready; exec sleep 60", 5.0), "cancelled", True),
    "asked, and killed": (
        lambda s: stopped(s, "trap '' TERM; echo ready; while :; do sleep 1; done", 0.2),
        "cancelled",
        False,
    ),
    "out of time, and obeyed": (lambda s: run(s, ["sleep", "60"], timeout_s=0.2), "timed_out", True),
    "out of time, and killed": (
        lambda s: run(s, "trap '' TERM; while :; do sleep 1; done", timeout_s=0.2, grace_s=0.2),
        "timed_out",
        False,
    ),
    "its keeper was killed": (killed_keeper, "lost", False),
    "no such command": (lambda s: run(s, ["no-such-command"]), "failed", False),
}


@pytest.mark.parametrize("case", REPORTS)
def test_who_reported_the_end_of_a_command(case: str, supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """The command itself, unless it was killed by us, lost, or never ran; and there is one pair of facts."""
    act, status, reported = REPORTS[case]
    task = act(supervisor)
    first, last = of(store, task.task_id)
    assert isinstance(first, Registered)
    assert isinstance(last, Settled)
    assert (last.status, last.producer_reported) == (status, reported)


def test_a_command_is_registered_before_anybody_has_its_id(supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """When `start` returns, the registration is there, and the record that it runs was before it."""
    seen: list[bool] = []
    append = FileFactLog.append

    def look(self: FileFactLog, those: Any) -> None:
        with TaskClient(store.session_dir("s").parents[1]) as client:
            seen.extend(client.get(fact.job_id).started for fact in those)
        append(self, those)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileFactLog, "append", look)
        task = supervisor.start("s", "exec sleep 60", env=ENV)
    assert seen == [True]
    assert [fact.type for fact in of(store, task.task_id)] == ["job/registered"]


def test_a_command_is_settled_before_its_waiters_resume(
    supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is in the journal when the fact is recorded, and nobody here knows of it then."""
    task = supervisor.start("s", "exec sleep 60", env=ENV)
    live = supervisor._attendant.find(task.task_id)
    assert live is not None
    seen: list[tuple[bool, bool]] = []
    append = FileFactLog.append

    def look(self: FileFactLog, those: Any) -> None:
        with TaskClient(store.session_dir("s").parents[1]) as client:
            seen.append((client.get(task.task_id).event_id is not None, live.ended.is_set()))
        append(self, those)

    monkeypatch.setattr(FileFactLog, "append", look)
    supervisor.stop(task.task_id, grace_s=5.0)
    supervisor.wait(task.task_id, BOUND_S)
    assert seen == [(True, False)]


def test_a_recording_that_fails_keeps_no_command_and_no_waiter(
    supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The command runs, ends, and is waited for; what is missing is warned of."""

    def fail(self: FileFactLog, those: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FileFactLog, "append", fail)
        task = run(supervisor, "echo hello")
    assert task.status == "completed"
    assert supervisor.output(task.task_id).data == b"hello\n"
    assert [message.count(task.task_id) for message in caplog.messages if "not recorded" in message] == [1, 1]
    assert recorded(store) == []


def test_the_same_call_again_registers_nothing(supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """A retried tool call gets the first command, running or ended."""
    first = run(supervisor, "exit 0", origin_tool_call_id="toolu_1")
    assert run(supervisor, "exit 0", origin_tool_call_id="toolu_1").task_id == first.task_id
    assert [fact.type for fact in recorded(store)] == ["job/registered", "job/settled"]


def test_an_adopted_command_is_settled_by_who_saw_its_end(supervise: Supervise, store: GitJobStore) -> None:
    """Registered by one worker, settled by another, as one pair."""
    first = supervise()
    task = first.start("s", "while [ ! -e go ]; do sleep 0.05; done; exit 4", env=ENV)
    first.close()
    second = supervise()
    second.recover()
    (store.session_dir("s") / "work" / "go").touch()
    second.wait(task.task_id, BOUND_S)
    start, end = of(store, task.task_id)
    assert isinstance(end, Settled)
    assert (start.type, end.status, end.producer_reported) == ("job/registered", "failed", True)


def test_an_end_that_is_found_afterwards_is_not_recorded(supervise: Supervise, store: GitJobStore) -> None:
    """The command ended while no worker looked: its task gets its end from the keeper's record, and the facts stay
    incomplete, as they are for every end that nobody saw."""
    first = supervise()
    task = first.start("s", "sleep 0.3; exit 7", env=ENV)
    first.close()
    with TaskClient(first.client.home) as client:
        eventually(lambda: client.get(task.task_id).terminal)
    second = supervise()
    (ended,) = second.recover()
    assert ended.exit_code == 7
    assert [fact.type for fact in of(store, task.task_id)] == ["job/registered"]
    (interval,) = facts.intervals(store.session("s"))
    assert not interval.complete


FOLLOWER = """
import sys
from openjobs import facts
with facts.follow(sys.argv[1], after=sys.argv[2]) as following:
    for fact in following:
        print(fact.type, fact.job_id, fact.cursor.to_text(), flush=True)
"""


def test_another_process_follows_and_goes_on_from_its_cursor(supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """A follower elsewhere hears of each fact as it comes; killed and started again with the cursor of the last
    line that it printed, it misses none and repeats none."""
    heard: list[str] = []
    cursor = facts.START.to_text()
    ids = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, str(store.session_dir("s")), cursor],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        ) as follower:
            assert follower.stdout is not None
            try:
                ids += [run(supervisor, "exit 0").task_id for _ in range(2)]
                for _ in range(4):
                    kind, job_id, cursor = follower.stdout.readline().split()
                    heard.append(f"{kind} {job_id}")
            finally:
                follower.kill()
    expected = [f"{kind} {task_id}" for task_id in ids for kind in ("job/registered", "job/settled")]
    assert heard == expected


RUNNER = """
import sys
from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult
with GitJobStore(sys.argv[1], durability="relaxed") as store:
    with JobRunner(store, 4, lambda request, cancel_event: TurnResult()) as runner:
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(25):
            print(runner.submit(SpawnRequest(prompt="work", parent_session_id="s")).job_id, flush=True)
"""


def test_runners_of_several_processes_record_in_one_session(store: GitJobStore) -> None:
    """Three processes with jobs of one session at the same time: every job has its two facts, in their order, and
    nobody's are lost among the others'."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(store.home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        for _ in range(3)
    ]
    ids: list[str] = []
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    for program in programs:
        out, _ = program.communicate(timeout=50)
        assert program.returncode == 0
        ids += out.split()
    assert len(set(ids)) == 75
    found: dict[str, list[str]] = {}
    for fact in recorded(store):
        found.setdefault(fact.job_id, []).append(fact.type.value)
    assert found == {job_id: ["job/registered", "job/settled"] for job_id in ids}
    assert {interval.status for interval in facts.intervals(store.session("s"))} == {"completed"}
