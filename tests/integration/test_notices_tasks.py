"""Ends of background commands are told like those of jobs (spec 000)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult
from openjobs.errors import OutcomeUnknown, StoreWriteFailed
from openjobs.jobs import Queued, Started
from openjobs.processes import ProcessSupervisor, Task, TaskJournal
from openjobs.processes.task import Fact, lost
from openjobs.runner.notices import Notices
from openjobs.session import Node
from openjobs.session.history import NOTICE, events_of
from tests.support import eventually
from tests.support.jobs import job_for

BOUND_S = 20.0
ENV = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
NEVER_CAME = lost("its keeper died or never came; it did not run")
Run = Callable[..., Task]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s")
        store.session("s").append("user", "hello")
        yield store
        report = store.fsck("s")
        assert report.clean, "\n".join(map(str, report.findings))


@pytest.fixture
def supervisor(store: GitJobStore) -> Iterator[ProcessSupervisor]:
    with ProcessSupervisor(store) as supervisor:
        yield supervisor


@pytest.fixture
def run(supervisor: ProcessSupervisor) -> Run:
    def run(command: Any, **options: Any) -> Task:
        task = supervisor.start("s", command, env=ENV, **options)
        return supervisor.wait(task.task_id, BOUND_S)

    return run


@pytest.fixture
def notices(store: GitJobStore) -> Iterator[Notices]:
    notices = Notices(store)
    yield notices
    notices.close()


@pytest.fixture
def journal(store: GitJobStore) -> TaskJournal:
    assert store.home is not None
    return TaskJournal(store.home / "sessions" / "s", "s")


def told(store: GitJobStore) -> list[Node]:
    return [node for node in store.session("s").nodes() if node.function == NOTICE]


def test_ends_of_commands_and_jobs_make_one_message(
    store: GitJobStore, run: Run, notices: Notices, journal: TaskJournal
) -> None:
    """How each ended, by its whole id; the journal says delivered, and consumed once the model has answered."""
    good, bad = run("exit 0", description="make test"), run(["sh", "-c", "exit 3"])
    with JobRunner(store, 1, lambda request, event: TurnResult(final_text="found it")) as runner:
        job = runner.await_job(runner.submit(SpawnRequest(prompt="p", parent_session_id="s", notify=True)).job_id)
    found = notices.pending("s")
    assert [(notice.kind, notice.id) for notice in found] == [
        ("task", good.task_id),
        ("task", bad.task_id),
        ("job", job.job_id),
    ]
    node = notices.deliver("s")
    assert node is not None
    assert node.content.splitlines()[1:4] == [
        f'- command {good.task_id} completed: "make test"',
        f'- command {bad.task_id} failed (exit code 3): "sh -c exit 3"',
        f'- job {job.job_id} completed: "p": found it',
    ]
    assert events_of(node) == [good.event_id, bad.event_id, job.event_id]
    assert {(task.delivered, task.consumed) for task in journal.tasks()} == {(True, False)}
    assert notices.deliver("s") is None
    store.session("s").append("assistant", "I see")
    another = run("true")
    notices.deliver("s")
    assert {task.task_id: task.consumed for task in journal.tasks()} == {
        good.task_id: True,
        bad.task_id: True,
        another.task_id: False,
    }


def test_who_read_a_commands_result_is_not_told(run: Run, notices: Notices, journal: TaskJournal) -> None:
    """By the task's id, or by the event's; each once."""
    read, acked = run("true"), run("true")
    assert notices.consume(read.task_id) is True
    assert notices.consume(read.task_id) is False
    assert notices.ack(str(acked.event_id)) is True
    assert notices.ack(str(acked.event_id)) is False
    assert {(task.delivered, task.consumed) for task in journal.tasks()} == {(False, True)}
    assert notices.deliver("s") is None


def test_of_two_who_read_a_commands_result_one_was_first(
    run: Run, notices: Notices, journal: TaskJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process consumes it between our look and our record: there is one fact, and it is the other's."""
    task = run("true")
    ours = notices._client().journal("s")
    record = ours.record

    def after_another(task_id: str, fact: Fact, **fields: Any) -> Task:
        journal.record(task_id, fact, **fields)
        return record(task_id, fact, **fields)

    monkeypatch.setattr(ours, "record", after_another)
    assert notices.consume(task.task_id[:12]) is False
    assert journal.path.read_bytes().count(b'"consumed"') == 1


def test_a_running_command_is_not_consumed(supervisor: ProcessSupervisor, notices: Notices) -> None:
    """Looking at what still runs takes no notice away."""
    task = supervisor.start("s", "sleep 30", env=ENV)
    assert notices.consume(task.task_id) is False
    supervisor.stop(task.task_id, grace_s=0)
    supervisor.wait(task.task_id, BOUND_S)
    assert [notice.status for notice in notices.pending("s")] == ["cancelled (signal 9)"]


def test_a_jobs_own_commands_are_the_jobs_affair(
    store: GitJobStore, supervisor: ProcessSupervisor, notices: Notices
) -> None:
    """Its turn asks for them by its id; the conversation is not told, also when the job has ended."""
    job = store.create(job_for(store, "s"), Queued(runner_id="r"))
    store.apply(job.job_id, Started())
    task = supervisor.start("s", "true", env=ENV, job_id=job.job_id)
    supervisor.wait(task.task_id, BOUND_S)
    assert notices.pending("s") == []
    assert notices.deliver("s") is None
    assert [notice.id for notice in notices.pending("s", job_id=job.job_id)] == [task.task_id]


@pytest.mark.parametrize("error", [StoreWriteFailed("full"), OutcomeUnknown("perhaps"), OSError(5)])
def test_a_delivery_that_died_before_the_journal_is_finished_by_the_next(
    store: GitJobStore, run: Run, journal: TaskJournal, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The message is there and the journal knows nothing of it: not pending, not told again, and then noted."""
    task = run("true")

    def record_told(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(TaskJournal, "record_told", record_told)
        first = Notices(store)
        assert first.deliver("s") is not None
        first.close()
    assert not journal.get(task.task_id).delivered
    second = Notices(store)
    assert second.pending("s") == []
    assert second.deliver("s") is None
    second.close()
    assert journal.get(task.task_id).delivered
    assert len(told(store)) == 1


def test_a_lost_command_is_told_as_lost(store: GitJobStore, journal: TaskJournal, notices: Notices) -> None:
    """Its worker died; what the next one finds out is the news."""
    journal.begin("11111111-2222-4333-8444-555555555555", "true", worker_id="gone", boot="b")
    journal.record("11111111-2222-4333-8444-555555555555", Fact.ENDED, event_id="e", **NEVER_CAME)
    node = notices.deliver("s")
    assert node is not None
    assert '11111111-2222-4333-8444-555555555555 lost: "true": its keeper died' in node.content


def test_a_listener_hears_of_commands_within_moments(store: GitJobStore, run: Run) -> None:
    """While a worker looks after commands in a session its ends are heard, whoever the worker is."""
    heard: list[str] = []
    with (
        JobRunner(store, 1, lambda request, event: TurnResult()) as runner,
        runner.notices.subscribe(lambda notice: heard.append(notice.id)),
    ):
        task = run("true")
        eventually(lambda: heard == [task.task_id])


def test_the_next_turn_is_told_of_commands(store: GitJobStore, run: Run) -> None:
    """A foreground turn begins with what has ended, commands included."""
    task = run("exit 4")
    with JobRunner(store, 1, lambda request, event: TurnResult(final_text="ok")) as runner:
        job = runner.submit(SpawnRequest(prompt="next", parent_session_id="s", foreground=True))
        runner.await_job(job.job_id)
    texts = [node.content for node in store.session("s").branch()]
    assert f"command {task.task_id} failed (exit code 4)" in texts[1]
    assert texts[2:] == ["next", "ok"]


def test_many_ends_are_noted_in_one_write(journal: TaskJournal, notices: Notices) -> None:
    """Each once: those to whom it happened before are passed over."""
    for number in range(200):
        journal.begin(f"{number:08x}-2222-4333-8444-555555555555", "true", worker_id="w", boot="b")
        journal.record(f"{number:08x}-2222-4333-8444-555555555555", Fact.ENDED, event_id=f"e{number}", **NEVER_CAME)
    events = {task.task_id: task.event_id for task in journal.tasks()}
    before = journal.path.read_bytes().count(b"\n")
    journal.record_told(Fact.CONSUMED, events)
    journal.record_told(Fact.DELIVERED, events)
    journal.record_told(Fact.CONSUMED, events)
    assert journal.path.read_bytes().count(b"\n") == before + 200
    assert all(task.consumed for task in journal.tasks())
    assert notices.pending("s") == []
    assert notices.deliver("s") is None
