"""What may happen to a task, and the journal that keeps it."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs.durable import Disk
from openjobs.durable.lease import Lease
from openjobs.errors import AmbiguousId, Damaged, IdempotencyConflict, InvalidInput, InvalidTransition, UnknownTask
from openjobs.processes import layout, rundir
from openjobs.processes.client import TaskClient, run_directory, task_entry
from openjobs.processes.journal import TaskJournal
from openjobs.processes.output import read_output
from openjobs.processes.runs import incomplete_runs, owner_of, remove_run
from openjobs.processes.task import Fact, Task, TaskStatus, after, digest_of, end_of, lost, may_follow, shown_command
from tests.support import FakeClock
from tests.support.processes import RELAXED

KEEPER = {"pid": 4001, "start": 7, "boot": "b"}
CHILD = {"pid": 4002, "start": 8, "boot": "b"}
END = {
    "status": "completed",
    "exit_code": 0,
    "signal": None,
    "stopped_by": "exit",
    "error": "",
    "stdout_bytes": 3,
    "stderr_bytes": 0,
    "seen_bytes": 3,
    "truncated": False,
    "leftovers": [],
}
FIELDS: dict[Fact, dict[str, Any]] = {
    Fact.RUNNING: {"keeper": KEEPER, "child": CHILD},
    Fact.OUTPUT: {"stdout_bytes": 2, "stderr_bytes": 1},
    Fact.ADOPTED: {"worker": "w2"},
    Fact.STOP_REQUESTED: {"reason": "why", "grace_s": 2.0},
    Fact.ENDED: {"event_id": "e1", **END},
    Fact.DELIVERED: {"event_id": "e1"},
    Fact.CONSUMED: {"event_id": "e1"},
}
#: what was recorded before, and what may be recorded next
TABLE: dict[tuple[Fact, ...], set[Fact]] = {
    (): {Fact.INTENT},
    (Fact.INTENT,): {Fact.RUNNING, Fact.OUTPUT, Fact.ADOPTED, Fact.STOP_REQUESTED, Fact.ENDED},
    (Fact.INTENT, Fact.RUNNING): {Fact.OUTPUT, Fact.ADOPTED, Fact.STOP_REQUESTED, Fact.ENDED},
    (Fact.INTENT, Fact.RUNNING, Fact.STOP_REQUESTED): {
        Fact.OUTPUT,
        Fact.ADOPTED,
        Fact.STOP_REQUESTED,
        Fact.ENDED,
    },
    (Fact.INTENT, Fact.RUNNING, Fact.ENDED): {Fact.DELIVERED, Fact.CONSUMED},
    (Fact.INTENT, Fact.ENDED): {Fact.DELIVERED, Fact.CONSUMED},
    (Fact.INTENT, Fact.RUNNING, Fact.ENDED, Fact.DELIVERED): {Fact.CONSUMED},
    (Fact.INTENT, Fact.RUNNING, Fact.ENDED, Fact.DELIVERED, Fact.CONSUMED): set(),
    (Fact.INTENT, Fact.RUNNING, Fact.ENDED, Fact.CONSUMED): set(),
}


@pytest.fixture
def journal(tmp_path: Path, clock: FakeClock) -> TaskJournal:
    return TaskJournal(tmp_path, "s", disk=Disk(durable=False), clock=clock)


def begin(journal: TaskJournal, task_id: str = "t1", command: Any = "make", **more: Any) -> tuple[Task, bool]:
    return journal.begin(task_id, command, worker_id="w1", boot="b", **more)


def walk(journal: TaskJournal, facts: tuple[Fact, ...], task_id: str = "t1", **more: Any) -> None:
    for fact in facts:
        if fact is Fact.INTENT:
            begin(journal, task_id, **more)
        else:
            journal.record(task_id, fact, **FIELDS[fact])


@pytest.mark.parametrize("before", TABLE, ids=lambda facts: "-".join(facts) or "nothing")
@pytest.mark.parametrize("fact", [fact for fact in Fact if fact is not Fact.INTENT])
def test_every_cell_of_the_table(before: tuple[Fact, ...], fact: Fact, journal: TaskJournal) -> None:
    """A fact that may follow is recorded; any other is refused, and nothing is written."""
    walk(journal, before)
    size = journal.path.stat().st_size if before else 0
    if fact in TABLE[before]:
        journal.record("t1", fact, **FIELDS[fact])
        return
    with pytest.raises(InvalidTransition if before else UnknownTask):
        journal.record("t1", fact, **FIELDS[fact])
    assert (journal.path.stat().st_size if before else 0) == size


def test_nothing_follows_without_an_intent() -> None:
    """Only an intent begins a task."""
    assert {fact for fact in Fact if may_follow(None, fact)} == {Fact.INTENT}


def test_a_task_says_all_that_was_recorded(journal: TaskJournal, tmp_path: Path, clock: FakeClock) -> None:
    """Every fact is in the task, for us and for who opens the journal later."""
    walk(journal, (Fact.INTENT, Fact.RUNNING, Fact.OUTPUT, Fact.STOP_REQUESTED, Fact.ADOPTED, Fact.ENDED))
    task = journal.record("t1", Fact.DELIVERED, event_id="e1")
    assert (task.status, task.exit_code, task.stopped_by, task.event_id) == (TaskStatus.COMPLETED, 0, "exit", "e1")
    assert (task.pid, task.worker_id, task.stop_reason, task.stop_grace_s) == (4002, "w2", "why", 2.0)
    assert (task.delivered, task.consumed) == (True, False)
    assert TaskJournal(tmp_path, "s", clock=clock).get("t1") == task


def test_the_same_origin_returns_the_first_task(journal: TaskJournal, tmp_path: Path) -> None:
    """Also from another journal on the same file, and also after the end."""
    first, fresh = begin(journal, origin_tool_call_id="call")
    assert fresh
    journal.record("t1", Fact.ENDED, **FIELDS[Fact.ENDED])
    other = TaskJournal(tmp_path, "s", disk=Disk(durable=False))
    again, fresh = begin(other, "t2", origin_tool_call_id="call")
    assert not fresh
    assert again.task_id == first.task_id
    for command in ("make all", ["make"]):
        with pytest.raises(IdempotencyConflict) as caught:
            begin(other, "t3", command, origin_tool_call_id="call")
        assert caught.value.first_id == "t1"
    assert [task.task_id for task in other.tasks()] == ["t1"]


def test_what_is_forgotten_is_read_again(tmp_path: Path) -> None:
    """The cache is bounded; every task can still be had, and no identity is ever lost."""
    journal = TaskJournal(tmp_path, "s", disk=Disk(durable=False), cache=3)
    for number in range(20):
        walk(journal, (Fact.INTENT, Fact.RUNNING, Fact.ENDED), f"t{number}", origin_tool_call_id=f"c{number}")
        if number % 2:
            journal.record(f"t{number}", Fact.CONSUMED, event_id="e1")
    assert len(journal._tasks) == 3
    for opened in (journal, TaskJournal(tmp_path, "s", cache=3)):
        tasks = list(opened.tasks())
        assert [task.task_id for task in tasks] == [f"t{number}" for number in reversed(range(20))]
        assert [task.consumed for task in tasks] == [number % 2 == 1 for number in reversed(range(20))]
        assert all(task.status is TaskStatus.COMPLETED for task in tasks)
        assert not begin(opened, "new", origin_tool_call_id="c4")[1]
        assert len(opened._tasks) == 3


def test_what_is_read_again_is_what_it_was(tmp_path: Path) -> None:
    """Intent and end alone say all that was known: who adopted it, its process, who asked for its stop and why."""
    journal = TaskJournal(tmp_path, "s", disk=Disk(durable=False), cache=1)
    steps = (Fact.INTENT, Fact.RUNNING, Fact.STOP_REQUESTED, Fact.ADOPTED, Fact.ENDED, Fact.DELIVERED)
    walk(journal, steps, "t1", origin_tool_call_id="call")
    before = journal.get("t1")
    assert (before.worker_id, before.stop_reason, before.pid, before.delivered) == ("w2", "why", 4002, True)
    walk(journal, (Fact.INTENT,), "t2")
    assert journal.get("t1") == before
    journal.compact()
    assert journal.get("t1") == before
    assert TaskJournal(tmp_path, "s").get("t1") == before


def test_compaction_keeps_identities_and_outcomes(journal: TaskJournal, tmp_path: Path) -> None:
    """What only mattered while a task ran goes; who ran, how it ended and who was told stays."""
    steps = (Fact.INTENT, Fact.RUNNING, Fact.OUTPUT, Fact.OUTPUT, Fact.STOP_REQUESTED, Fact.ENDED, Fact.DELIVERED)
    walk(journal, steps, "t1", origin_tool_call_id="call")
    walk(journal, steps[:4], "t2")
    before = journal.path.stat().st_size
    assert journal.compact().dropped == 4
    assert journal.path.stat().st_size < before
    for opened in (journal, TaskJournal(tmp_path, "s")):
        one, two = opened.get("t1"), opened.get("t2")
        assert (one.status, one.event_id, one.delivered, one.stdout_bytes) == (TaskStatus.COMPLETED, "e1", True, 3)
        assert (two.status, two.pid, two.stdout_bytes) == (TaskStatus.RUNNING, 4002, 2)
        assert not begin(opened, "t9", origin_tool_call_id="call")[1]


def test_a_journal_of_version_1_opens_for_ever(tmp_path: Path) -> None:
    """Every kind of fact and end is understood, identities are recognised, and the next fact fits (fixtures/tasks)."""
    path = tmp_path / "tasks.jsonl"
    path.write_bytes((Path(__file__).parents[2] / "fixtures" / "tasks" / "v1" / "tasks.jsonl").read_bytes())
    path.chmod(0o600)
    journal = TaskJournal(tmp_path, "default", disk=Disk(durable=False))
    made, timed, never, asked, runs = reversed(list(journal.tasks()))
    assert (made.status, made.command, made.description, made.exit_code) == (
        TaskStatus.COMPLETED,
        "make test",
        "the tests",
        0,
    )
    assert (made.delivered, made.consumed, made.stdout_bytes, made.event_id) == (True, True, 12, "event-exit")
    assert (timed.status, timed.command, timed.signal, timed.timeout_s) == (
        TaskStatus.TIMED_OUT,
        ("sleep", "60"),
        15,
        5.0,
    )
    assert (never.status, never.pid, never.job_id) == (TaskStatus.LOST, None, "00000009-0000-4000-8000-000000000000")
    assert (asked.status, asked.worker_id, asked.stop_reason, asked.stop_grace_s) == (
        "cancelled",
        "worker-2",
        "enough",
        2.5,
    )
    assert (runs.status, runs.pid, runs.stdout_bytes) == (TaskStatus.RUNNING, 4002, 100)
    assert [task.task_id for task in journal.unconsumed()] == [timed.task_id, never.task_id, asked.task_id]
    assert journal.begin("new", "make test", worker_id="w", boot="b", origin_tool_call_id="call-1") == (made, False)
    with pytest.raises(IdempotencyConflict):
        journal.begin("new", ["make", "test"], worker_id="w", boot="b", origin_tool_call_id="call-1")
    assert journal.record(runs.task_id, Fact.ENDED, **FIELDS[Fact.ENDED]).terminal


def test_two_journals_see_each_other(journal: TaskJournal, tmp_path: Path) -> None:
    """Whoever appends, the other one catches up before it decides; an end is recorded once."""
    other = TaskJournal(tmp_path, "s", disk=Disk(durable=False))
    walk(journal, (Fact.INTENT, Fact.RUNNING))
    other.record("t1", Fact.ENDED, **FIELDS[Fact.ENDED])
    with pytest.raises(InvalidTransition):
        journal.record("t1", Fact.ENDED, **FIELDS[Fact.ENDED] | {"event_id": "e2"})
    assert journal.get("t1").event_id == "e1"


def test_only_one_of_two_adopts(journal: TaskJournal, tmp_path: Path) -> None:
    """Adoption names from whom: the second who tries finds another one there."""
    other = TaskJournal(tmp_path, "s", disk=Disk(durable=False))
    walk(journal, (Fact.INTENT, Fact.RUNNING))
    assert journal.adopt("t1", "w1", worker="w2").worker_id == "w2"
    with pytest.raises(InvalidTransition):
        other.adopt("t1", "w1", worker="w3")
    assert other.get("t1").worker_id == "w2"


def test_facts_of_a_newer_version_are_passed_over(journal: TaskJournal) -> None:
    """A kind of fact that is not known here changes nothing; a known one that makes no sense is damage."""
    begin(journal)
    journal._ledger.append({"fact": "paused", "task": "t1"})
    assert journal.get("t1").status is TaskStatus.RUNNING
    journal._ledger.append({"fact": "ended", "task": "t1"})
    with pytest.raises(Damaged) as caught:
        journal.get("t1")
    assert caught.value.offset is not None


@pytest.mark.parametrize(
    ("fact", "changed"),
    [
        (Fact.INTENT, {"command": {"sh": 1}}),
        (Fact.INTENT, {"command": ["sh", 1]}),
        (Fact.INTENT, {"timeout_s": "soon"}),
        (Fact.INTENT, {"timeout_s": True}),
        (Fact.INTENT, {"output_limit_bytes": -1}),
        (Fact.INTENT, {"session": "another"}),
        (Fact.INTENT, {"task": "../../victim"}),
        (Fact.INTENT, {"at": "2026-01-01"}),
        (Fact.RUNNING, {"keeper": None}),
        (Fact.OUTPUT, {"stdout_bytes": 1.5}),
        (Fact.ADOPTED, {"worker": None}),
        (Fact.STOP_REQUESTED, {"grace_s": "long"}),
        (Fact.ENDED, {"status": "running"}),
        (Fact.ENDED, {"truncated": 0}),
        (Fact.ENDED, {"leftovers": ["x"]}),
        (Fact.CONSUMED, {"event_id": 7}),
    ],
)
def test_a_record_that_nobody_writes_is_damage_for_every_reader(
    fact: Fact, changed: dict[str, Any], journal: TaskJournal, tmp_path: Path
) -> None:
    """With its place, as soon as the journal is read, not only when its task is asked for."""
    walk(journal, (Fact.INTENT,), "t0")
    walk(journal, (Fact.INTENT,))
    walk(journal, {Fact.INTENT: (), Fact.CONSUMED: (Fact.ENDED,)}.get(fact, ()))
    intent = next(record.data for record in journal._ledger.read() if record.data["task"] == "t1")
    sound = intent if fact is Fact.INTENT else {**intent, "fact": fact.value, **FIELDS[fact]}
    place = journal.path.stat().st_size
    sound = {**sound, "task": "t2"} if fact is Fact.INTENT else sound
    journal._ledger.append({**sound, **changed})
    with pytest.raises(Damaged) as caught:
        TaskJournal(tmp_path, "s", disk=Disk(durable=False)).refresh()
    assert caught.value.offset == place
    assert next(iter(changed)) in str(caught.value)


def test_no_end_is_lost_or_doubled_between_delivery_and_consumption(journal: TaskJournal, tmp_path: Path) -> None:
    """Each step is a record: who comes after a crash between any two finds the task where it was left."""
    seen = []
    for fact in (Fact.INTENT, Fact.RUNNING, Fact.ENDED, Fact.DELIVERED, Fact.CONSUMED):
        walk(journal, (fact,))
        found = TaskJournal(tmp_path, "s").unconsumed()
        seen.append([(task.event_id, task.delivered) for task in found])
    assert seen == [[], [], [("e1", False)], [("e1", True)], []]


def test_a_text_and_a_list_are_different_commands() -> None:
    """One goes through a shell, the other does not."""
    assert digest_of("ls") != digest_of(["ls"])
    assert digest_of(["ls", "-l"]) == digest_of(("ls", "-l"))


@pytest.mark.parametrize("command", ["x" * 100_000, ["x" * 100_000], ["x"] * 60_000])
def test_a_long_command_is_written_down_as_its_beginning(command: Any, journal: TaskJournal) -> None:
    """The journal stays readable; what makes it the same command is all of it."""
    task, _ = begin(journal, command=command)
    assert len(json.dumps(shown_command(command))) < 100_000
    assert task.digest == digest_of(command)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(facts=st.lists(st.tuples(st.sampled_from(Fact), st.text(max_size=10), _VALUES), max_size=4))
def test_any_record_is_read_or_called_damaged(facts: list[tuple[Fact, str, Any]], tmp_path_factory: Any) -> None:
    """Whatever a whole record of the ledger says, reading it gives tasks or names the place of the damage."""
    journal = TaskJournal(tmp_path_factory.mktemp("s"), "s", disk=Disk(durable=False))
    begin(journal)
    for fact, name, value in facts:
        whole = {"task": "t1", "at": "2026-01-01T00:00:00.000Z", "reason": None, **FIELDS.get(fact, {})}
        replaced = {key: value if key.startswith(name[:1]) else old for key, old in whole.items()}
        journal._ledger.append({"fact": fact.value, **replaced})
    place: int | None = 0
    try:
        tasks = list(journal.tasks())
    except Damaged as damage:
        tasks, place = [], damage.offset
    assert place is not None
    assert all(isinstance(task.status, TaskStatus) and isinstance(task.error, str) for task in tasks)


@pytest.mark.parametrize("run_id", ["", ".", "..", "../../x", "a/b", "/etc", "a\n", "a\0", "-r", None, 5])
def test_no_id_of_a_run_leads_out_of_its_session(run_id: Any, tmp_path: Path) -> None:
    """Rows come from repositories that others may write."""
    with pytest.raises(InvalidInput):
        run_directory(tmp_path, "s", run_id)
    with pytest.raises(InvalidInput):
        remove_run(tmp_path, "s", run_id)


def test_lost_is_an_end_of_its_own() -> None:
    """It has neither code nor signal."""
    intent = {"fact": "intent", "task": "t", "at": "2026-01-01T00:00:00.000Z", "session": "s", "origin": None}
    intent |= {"digest": "d", "command": "x", "cwd": "", "description": "", "worker": "w", "boot": "b", "job": None}
    task = after(None, intent | {"timeout_s": None, "output_limit_bytes": 1})
    task = after(task, {"fact": "ended", "task": "t", "at": intent["at"], "event_id": "e", **lost("nobody knows")})
    assert (task.status, task.exit_code, task.signal, task.stopped_by) == (TaskStatus.LOST, None, None, "lost")


# --- looking after tasks without owning any ------------------------------------------------------------------

IDS = ["ab" + character * 30 for character in "0123456"]


@pytest.fixture
def client(tmp_path: Path, clock: FakeClock) -> Iterator[TaskClient]:
    """Of a home with one session, `s`."""
    (tmp_path / "sessions" / "s").mkdir(parents=True)
    (tmp_path / "index").mkdir()
    with TaskClient(tmp_path, disk=RELAXED, clock=clock) as client:
        yield client


def known(client: TaskClient, task_id: str = IDS[0]) -> Task:
    """A task that can be found, of a worker whose lease nobody holds."""
    task, _ = begin(client.journal("s"), task_id)
    client.index.add([task_entry(task)])
    return task


def test_a_beginning_of_several_ids_is_not_guessed(client: TaskClient) -> None:
    """The ids that begin so are named, of many only some; what begins no id names what there is."""
    for task_id in IDS:
        known(client, task_id)
    assert client.find(IDS[3][:3]).job_id == IDS[3]
    with pytest.raises(AmbiguousId, match=f"{len(IDS)} task ids") as ambiguous:
        client.find("ab")
    assert len(ambiguous.value.candidates) == 5
    assert set(ambiguous.value.candidates) < set(IDS)
    for nonsense in ("", "../s", "cd"):
        with pytest.raises(UnknownTask) as unknown:
            client.find(nonsense)
        assert set(unknown.value.candidates) < set(IDS)


def test_a_hit_of_the_index_is_only_a_hint(client: TaskClient, tmp_path: Path) -> None:
    """It is written before the intent; where that never came there is no such task."""
    task = known(client)
    (tmp_path / "elsewhere" / "index").mkdir(parents=True)
    with TaskClient(tmp_path / "elsewhere", disk=RELAXED) as other:
        other.index.add([task_entry(task)])
        with pytest.raises(UnknownTask):
            other.get(task.task_id)


def test_few_journals_are_remembered_and_all_can_be_read(
    client: TaskClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with the number of sessions; a forgotten journal says the same when it is read again."""
    monkeypatch.setattr("openjobs.processes.client._JOURNALS", 2)
    sessions = ["s", "s2", "s3", "s4"]
    for session_id in sessions:
        (tmp_path / "sessions" / session_id).mkdir(exist_ok=True)
        begin(client.journal(session_id), "t1", session_id)
    first = client.journal("s4")
    assert client.journal("s4") is first
    assert [client.journal(session_id).get("t1").command for session_id in sessions] == sessions
    assert len(client._journals) == 2


def test_what_a_dead_worker_left_is_shown_without_being_recorded(client: TaskClient) -> None:
    """No keeper and no record: lost, as far as anybody can see. A record that nobody can read proves no more, and that
    is said; it is not touched by who only looks."""
    task = known(client)
    shown = client.get(task.task_id)
    assert (shown.status, shown.event_id) == (TaskStatus.LOST, None)
    assert "nobody has recorded" in shown.error
    run_dir = client.run_dir(task)
    run_dir.mkdir(parents=True)
    (run_dir / layout.EXIT).write_text("not a record")
    shown = client.get(task.task_id)
    assert (shown.status, shown.stopped_by, shown.event_id) == (TaskStatus.LOST, "unreadable", None)
    assert "cannot be read and is kept as exit.json" in shown.error
    assert [path.name for path in run_dir.iterdir()] == [layout.EXIT]
    (run_dir / layout.EXIT).rename(run_dir / "exit.json.unreadable")
    assert client.get(task.task_id).error == shown.error + ".unreadable"
    assert client.journal("s").get(task.task_id) == task


def test_who_waits_goes_when_he_is_told_to_or_has_waited_enough(client: TaskClient, tmp_path: Path) -> None:
    """The task is returned as it stands; one that ends meanwhile ends the waiting."""
    lease = Lease(tmp_path / "leases", "w1", RELAXED)
    lease.acquire()
    try:
        task = known(client)
        told = threading.Event()
        told.set()
        assert client.wait(task.task_id, stop=told) == task
        assert client.wait(task.task_id, timeout_s=0.02) == task
        record = functools.partial(client.journal("s").record, **FIELDS[Fact.ENDED])
        ending = threading.Thread(target=record, args=(task.task_id, Fact.ENDED))
        ending.start()
        assert client.wait(task.task_id).status is TaskStatus.COMPLETED
        ending.join()
    finally:
        lease.release()


def test_an_end_is_consumed_once_and_only_once_it_is_recorded(client: TaskClient) -> None:
    """Two who have seen the same end leave one fact; an end that nobody recorded has nothing to consume."""
    task = known(client)
    client.consume(client.get(task.task_id))
    ended = client.journal("s").record(task.task_id, Fact.ENDED, **FIELDS[Fact.ENDED])
    client.consume(ended)
    client.consume(ended)
    assert client.get(task.task_id).consumed
    assert client.journal("s").path.read_bytes().count(b'"consumed"') == 1


def test_a_stop_that_an_end_overtakes_changes_nothing(client: TaskClient) -> None:
    """Who asks gets the task as it ended."""
    task = known(client)
    client.journal("s").record(task.task_id, Fact.ENDED, **FIELDS[Fact.ENDED])
    asked = client.ask_to_stop(task, "too late", 1.0)
    assert (asked.status, asked.stop_requested_at) == (TaskStatus.COMPLETED, None)


# --- the runs of a session -----------------------------------------------------------------------------------


def test_a_log_of_impossible_size_is_nothing_to_go_on_with(client: TaskClient) -> None:
    """Its state is never longer than two slots; what is longer is not read, and a run without one has no owner."""
    run_dir = client.run_dir(known(client))
    run_dir.mkdir(parents=True)
    assert incomplete_runs(client.home, "s") == []
    assert owner_of(client.home, "s", run_dir.name) is None
    with open(run_dir / "log.state", "wb") as file:
        file.truncate(1 << 40)
    assert incomplete_runs(client.home, "s") == []
    assert incomplete_runs(client.home, "no-such-session") == []


def test_gc_leaves_a_run_whose_keeper_lives(client: TaskClient) -> None:
    """Whatever a journal says of it; once the keeper is gone the files go, and are counted."""
    run_dir = client.run_dir(known(client))
    run_dir.mkdir(parents=True)
    (run_dir / layout.STDOUT).write_bytes(b"x" * 1000)
    fd = os.open(run_dir / layout.KEEPER, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert remove_run(client.home, "s", run_dir.name) == 0
        assert (run_dir / layout.STDOUT).exists()
    finally:
        os.close(fd)
    assert remove_run(client.home, "s", run_dir.name) == 1000
    assert not run_dir.exists()
    assert remove_run(client.home, "s", run_dir.name) == 0


def test_gc_counts_what_it_found_and_not_what_went_meanwhile(
    client: TaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gc takes a file away between the list of them and the look at it."""
    run_dir = client.run_dir(known(client))
    run_dir.mkdir(parents=True)
    for name in (layout.STDOUT, layout.STDERR):
        (run_dir / name).write_bytes(b"x" * 1000)
    look = Path.lstat

    def late(path: Path) -> os.stat_result:
        if path.name == layout.STDERR:
            path.unlink()
        return look(path)

    monkeypatch.setattr(Path, "lstat", late)
    monkeypatch.setattr(rundir, "is_locked", lambda path: False)
    assert remove_run(client.home, "s", run_dir.name) == 1000
    assert not run_dir.exists()


# --- at the edges ------------------------------------------------------------------------------------------


def test_a_fact_that_does_not_fit_is_refused_by_what_the_task_is(journal: TaskJournal) -> None:
    """With the status that it has; a task that is not there has none."""
    ended = {"fact": Fact.ENDED.value, "task": "t1", "at": "2026-01-01T00:00:00.000Z", "event_id": "e", **END}
    with pytest.raises(InvalidTransition) as refused:
        after(None, ended)
    assert refused.value.status == "unknown"
    begin(journal, "t1")
    done = journal.record("t1", Fact.ENDED, event_id="e", **END)
    with pytest.raises(InvalidTransition) as refused:
        after(done, ended)
    assert refused.value.status == "completed"


@pytest.mark.parametrize(
    ("name", "value"), [("error", 7), ("stopped_by", None), ("stdout_bytes", "3"), ("exit_code", 1.0)]
)
def test_a_fact_of_another_form_is_no_fact(journal: TaskJournal, name: str, value: object) -> None:
    """Nothing is shown, compared or counted with that is not what it says it is."""
    task, _ = begin(journal, "t1")
    ended = {"fact": Fact.ENDED.value, "task": "t1", "at": "2026-01-01T00:00:00.000Z", "event_id": "e", **END}
    with pytest.raises(ValueError, match=name):
        after(task, {**ended, name: value})


@pytest.mark.parametrize(("reason", "status"), [("enough", TaskStatus.CANCELLED), ("", TaskStatus.FAILED)])
def test_what_never_started_was_stopped_or_failed(reason: str, status: TaskStatus) -> None:
    """A stop that came before the start is a stop; a worker that went away without a word is none."""
    record = rundir.exit_record(
        {
            "version": 1,
            "task_id": "t1",
            "keeper": KEEPER,
            "child": None,
            "started_at": None,
            "ended_at": "2026-01-01T00:00:00.000Z",
            "exit_code": None,
            "signal": None,
            "stopped_by": layout.BY_NEVER_STARTED,
            "reason": reason,
            "error": "",
            "stdout_bytes": 0,
            "stderr_bytes": 0,
            "stdout_seen_bytes": 0,
            "stderr_seen_bytes": 0,
            "truncated": False,
            "remaining": [],
            "remaining_count": 0,
        }
    )
    end = end_of(record)
    assert (end["status"], end["error"]) == (status.value, "it was never started; nothing ran")


def test_the_same_id_begins_one_task(journal: TaskJournal) -> None:
    """Whoever comes second gets the first one."""
    first, _ = begin(journal, "t1")
    second, fresh = journal.begin("t1", "make", worker_id="w2", boot="b")
    assert (second, fresh) == (first, False)


def test_a_journal_with_nonsense_gives_its_lock_back(journal: TaskJournal) -> None:
    """Who reads or wants to write is told of the damage, each time; nothing is put behind it, and nobody is kept from
    what can be done about it."""
    begin(journal, "t1")
    journal._ledger.append({"fact": "ended", "task": "t1", "at": "never"})
    for _ in range(2):
        with pytest.raises(Damaged, match="no facts of a task"):
            begin(journal, "t2")
        with pytest.raises(Damaged, match="no facts of a task"):
            journal.get("t1")
    assert journal._ledger.append({"fact": "of a newer version"}).seq == 3


def test_what_was_read_and_then_lost_is_forgotten(journal: TaskJournal, tmp_path: Path) -> None:
    """A record that had not become durable is gone, and another one stands in its place: that one counts."""
    begin(journal, "t1")
    size = (tmp_path / "tasks.jsonl").stat().st_size
    begin(journal, "t2")
    other = TaskJournal(tmp_path, "s", disk=Disk(durable=False))
    os.truncate(tmp_path / "tasks.jsonl", size)
    other._ledger.append({"fact": "of a newer version"})
    begin(other, "t3")
    journal.refresh()
    assert sorted(task.task_id for task in journal.tasks()) == ["t1", "t3"]
    with pytest.raises(UnknownTask):
        journal.get("t2")


def test_only_places_in_an_output_can_be_asked_for(tmp_path: Path) -> None:
    """Before anything is opened."""
    for wrong in ({"offset": -1}, {"limit": -1}):
        with pytest.raises(InvalidInput, match="0 or more"):
            read_output(tmp_path / "nowhere", **wrong)  # type: ignore[arg-type]
