"""Notices and cards of other sessions when the disk fails, and when the process dies, at any step (R1 to R5)."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.ids import new_id
from openjobs.jobs import Completed, Job, NoticeStage, Queued, Started
from openjobs.processes.journal import TaskJournal
from openjobs.processes.task import Fact, lost
from openjobs.runner.notices import Notices
from openjobs.session import Node, cards
from openjobs.session.history import NOTICE, events_of
from openjobs.store.index import Entry, FileIndex
from tests.support import eventually
from tests.support.chaos import Chaos
from tests.support.disks import FaultyDisk
from tests.support.jobs import clean, job_for
from tests.support.kills import said_until_killed

CALLER, TARGET = "caller", "target"
END = lost("its keeper died or never came; it did not run")


def quick(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    return TurnResult(final_text=f"did {request.prompt}")


def new_home(home: Path) -> Path:
    with GitJobStore(home, durability="relaxed") as store:
        for session_id in (CALLER, TARGET):
            store.create_session(session_id)
            store.session(session_id).append("user", f"hello {session_id}")
    return home


def ended(store: GitJobStore, label: str, session_id: str, **fields: Any) -> Job:
    job = job_for(store, session_id, label, notice=NoticeStage.WANTED, **fields)
    store.create(job, Queued(runner_id="r"), Started())
    job = store.apply(job.job_id, Completed(event_id=f"end of {label}", result_text=f"result of {label}"))
    if job.elsewhere:
        store.mirror_later(job).result()
    return job


def journal_of(home: Path) -> TaskJournal:
    return TaskJournal(home / "sessions" / CALLER, CALLER)


def end_task(home: Path, journal: TaskJournal, task_id: str, event_id: str) -> None:
    """As a supervisor writes it down, without a command."""
    with contextlib.closing(FileIndex(home / "index", journal._ledger._disk, name="tasks")) as index:
        index.add([Entry(job_id=task_id, session_id=CALLER)])
    journal.begin(task_id, "true", worker_id="w", boot="b")
    journal.record(task_id, Fact.ENDED, event_id=event_id, **END)


def told(store: GitJobStore) -> list[Node]:
    return [node for node in store.session(CALLER).nodes() if node.function == NOTICE]


def card_status(store: GitJobStore, job_id: str) -> str | None:
    attach_id = store.get(job_id).attach_id
    return next((cards.status_of(node) for node in store.session(CALLER).nodes() if node.id == attach_id), None)


def give_back(store: GitJobStore) -> None:
    """A lock that a failing disk did not let go of goes with the next write, and what that leaves to do is done."""
    for session_id in (CALLER, TARGET):
        store.session(session_id).append("user", "after")
        store.heal(session_id)


def until_card(store: GitJobStore, job_id: str, status: str) -> None:
    eventually(lambda: card_status(store, job_id) == status)


# --- every effect on the disk ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pending_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversation that is to be told of two jobs of its own, one in another session, and two commands."""
    home = new_home(tmp_path_factory.mktemp("pending") / "home")
    with GitJobStore(home, durability="relaxed") as store:
        ended(store, "one", CALLER)
        ended(store, "two", CALLER)
        ended(store, "there", TARGET, caller_session_id=CALLER)
        clean(store)
    for number in range(2):
        end_task(home, journal_of(home), f"{number:08x}-2222-4333-8444-555555555555", f"end of task {number}")
    return home


EVENTS = ["end of one", "end of task 0", "end of task 1", "end of there", "end of two"]


@pytest.mark.parametrize("late", [False, True], ids=["before", "late"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
def test_each_effect_of_a_delivery_may_fail_and_the_next_one_finishes_it(
    pending_home: Path, tmp_path: Path, for_good: bool, late: bool, chaos: Chaos
) -> None:
    """k = 1, 2, …: a typed error or a delivery; then each end is told by one message, and every record says so."""
    k, reached = 2 * for_good + late, True
    while reached:
        k += 1 if chaos else 5
        home = tmp_path / str(k)
        shutil.copytree(pending_home, home)
        disk = FaultyDisk()
        with GitJobStore(home, disk=disk) as store:
            notices = Notices(store)
            disk.arm(k, errno.EIO, for_good=for_good, late=late)
            with contextlib.suppress(errors.StoreWriteFailed, errors.OutcomeUnknown, errors.SessionBusy):
                notices.deliver(CALLER)
            reached = bool(disk.failed)
            where = f"effect {k}: {disk.failed[:1]}"
            disk.disarm()
            notices.close()
        with GitJobStore(home, durability="relaxed") as store:
            notices = Notices(store)
            notices.deliver(CALLER)
            assert notices.pending() == [], where
            assert sorted(e for node in told(store) for e in events_of(node)) == EVENTS, where
            assert {job.notice for job in store.list()} == {NoticeStage.DELIVERED}, where
            assert all(task.delivered for task in journal_of(home).tasks()), where
            assert notices.deliver(CALLER) is None
            notices.close()
            give_back(store)
            clean(store)
        shutil.rmtree(home)
    assert k > 12


@pytest.mark.parametrize("late", [False, True], ids=["before", "late"])
def test_each_effect_of_a_consumption_may_fail_and_it_can_be_asked_again(
    pending_home: Path, tmp_path: Path, late: bool, chaos: Chaos
) -> None:
    """An error means: ask again; what is consumed is never told."""
    k, reached = 2 * late, True
    while reached:
        k += 1 if chaos else 5
        home = tmp_path / str(k)
        shutil.copytree(pending_home, home)
        disk = FaultyDisk()
        with GitJobStore(home, disk=disk) as store:
            notices = Notices(store)
            found = {notice.event_id: notice for notice in notices.pending(CALLER)}
            wanted = [found[name].id for name in ("end of one", "end of there", "end of task 0")]
            disk.arm(k, errno.ENOSPC, late=late)
            for each in wanted:
                try:
                    notices.consume(each)
                except (errors.StoreWriteFailed, errors.OutcomeUnknown, errors.SessionBusy, OSError):
                    notices.consume(each)
            reached = bool(disk.failed)
            disk.disarm()
            node = notices.deliver(CALLER)
            assert node is not None
            assert sorted(events_of(node)) == ["end of task 1", "end of two"]
            notices.close()
        with GitJobStore(home, durability="relaxed") as store:
            assert len(told(store)) == 1
            give_back(store)
            clean(store)
        shutil.rmtree(home)
    assert k > 8


@pytest.mark.parametrize("late", [False, True], ids=["before", "late"])
def test_any_one_effect_of_a_job_of_another_session_may_fail(tmp_path: Path, late: bool, chaos: Chaos) -> None:
    """k = 1, 2, …: the job ends for whoever waits; its card is there at the latest after the next runner's start."""
    k, failed = 0, True
    while failed:
        k += 1 if chaos else 6
        home = new_home(tmp_path / str(k))
        disk, job_id = FaultyDisk(), new_id()
        with GitJobStore(home, disk=disk) as store:
            disk.arm(k + late, errno.EIO, late=late)
            request = SpawnRequest(
                prompt="work", parent_session_id=TARGET, caller_session_id=CALLER, job_id=job_id, notify=True
            )
            with contextlib.suppress(errors.StoreWriteFailed), JobRunner(store, 1, quick) as runner:
                try:
                    runner.submit(request)
                except (errors.StoreWriteFailed, errors.OutcomeUnknown):
                    runner.submit(request)
                assert runner.await_job(job_id, timeout=30).terminal
            failed = bool(disk.failed)
            where = f"effect {k + late}: {disk.failed[:1]}"
            disk.disarm()
        with GitJobStore(home, durability="relaxed") as store, JobRunner(store, 1, quick) as runner:
            if store.list():
                until_card(store, job_id, runner.get(job_id).status.value)
                assert runner.notices.deliver(CALLER) is not None, where
                assert len(told(store)) == 1
            give_back(store)
            clean(store)
            assert store.leases.dead() == [], where
        shutil.rmtree(home)
    assert k > 20


# --- the death of the process -----------------------------------------------------------------------------


def dies(work: Callable[[], object]) -> None:
    """`work` in a forked child that must be killed by it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), status


def die(*args: object, **kwargs: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", ["before the running card", "before the last card", "after the last card"])
def test_a_death_between_the_targets_commit_and_the_card_is_mended(tmp_path: Path, step: str) -> None:
    """The job is in the target's session as far as it came; the next runner's start ends it and writes the card."""
    home = new_home(tmp_path / "home")
    job_id = new_id()

    def work() -> None:
        store = GitJobStore(home)
        real = store.mirror_later

        def mirror_later(job: Job) -> Any:
            if not job.terminal:
                return die() if step == "before the running card" else real(job)
            if step == "after the last card":
                real(job).result()
            return die()

        store.mirror_later = mirror_later  # type: ignore[method-assign]
        runner = JobRunner(store, 1, quick)
        runner.submit(
            SpawnRequest(prompt="work", parent_session_id=TARGET, caller_session_id=CALLER, job_id=job_id, notify=True)
        )
        runner.await_job(job_id)
        time.sleep(20)

    dies(work)
    expected = "errored" if step == "before the running card" else "completed"
    with GitJobStore(home, durability="relaxed") as store, JobRunner(store, 1, quick) as runner:
        assert store.get(job_id).status.value == expected
        until_card(store, job_id, expected)
        assert store.leases.dead() == []
        node = runner.notices.deliver(CALLER)
        assert node is not None
        assert expected in node.content
        clean(store)


@pytest.mark.parametrize(
    "step", ["before the message", "after the message", "before the rows elsewhere", "before the journal", "at the end"]
)
def test_a_death_at_each_step_of_a_delivery(pending_home: Path, tmp_path: Path, step: str) -> None:
    """Before the message everything is pending still; from then on nothing is told again, and the rest is noted."""
    home = tmp_path / "home"
    shutil.copytree(pending_home, home)

    def work() -> None:
        store = GitJobStore(home)
        notices = Notices(store)
        if step == "before the message":
            store.write_later = die  # type: ignore[method-assign]
        elif step == "after the message":
            notices._note = die  # type: ignore[method-assign]
        elif step == "before the rows elsewhere":
            notices._note_jobs = die  # type: ignore[method-assign]
        elif step == "before the journal":
            notices._note_tasks = die  # type: ignore[method-assign]
        notices.deliver(CALLER)
        die()

    dies(work)
    with GitJobStore(home, durability="relaxed") as store:
        before = len(told(store))
        assert before == (0 if step == "before the message" else 1)
        notices = Notices(store)
        assert len(notices.pending(CALLER)) == (0 if before else 5)
        assert (notices.deliver(CALLER) is None) is bool(before)
        assert sorted(e for node in told(store) for e in events_of(node)) == EVENTS
        assert {job.notice for job in store.list()} == {NoticeStage.DELIVERED}
        assert all(task.delivered for task in journal_of(home).tasks())
        notices.close()
        clean(store)


def _work_until_killed(home: Path, say: int, seed: int) -> None:
    """Jobs of both sessions and commands end, are told, read and answered; every acknowledged end is a line."""
    dice = random.Random(seed)
    store = GitJobStore(home, durability="relaxed")
    notices, journal = Notices(store), journal_of(home)
    os.write(say, b"ready\n")
    while True:
        name = new_id()
        kind = dice.choice(["own", "elsewhere", "task"])
        if kind == "task":
            end_task(home, journal, name, f"end of {name}")
            item_id = name
        else:
            elsewhere = {"caller_session_id": CALLER} if kind == "elsewhere" else {}
            job = job_for(
                store, TARGET if kind == "elsewhere" else CALLER, name, notice=NoticeStage.WANTED, **elsewhere
            )
            store.create(job, Queued(runner_id="dead"), Started())
            job = store.apply(job.job_id, Completed(event_id=f"end of {name}", result_text="x" * 700))
            if kind == "elsewhere":
                store.mirror_later(job)
            item_id = job.job_id
        os.write(say, f"ended end of {name}\n".encode())
        if dice.random() < 0.3:
            if notices.consume(item_id):
                os.write(say, f"consumed end of {name}\n".encode())
        elif dice.random() < 0.5:
            notices.deliver(CALLER)
        if dice.random() < 0.2:
            store.session(CALLER).append("assistant", "I see")


def _killed_after(home: Path, lines: int, seconds: float, seed: int) -> Iterator[tuple[str, str]]:
    said = said_until_killed(lambda say: _work_until_killed(home, say, seed), lines + 1, seconds)
    for line in said[1:]:
        what, _, event_id = line.partition(" ")
        yield what, event_id


def test_kills_at_any_moment_tell_each_end_once(tmp_path: Path, chaos: Chaos) -> None:
    """After each kill the next process delivers: every acknowledged end is told once or was read, none twice."""
    rounds, dice = chaos.rounds(25, 500, "kills"), random.Random(chaos.seed(11))
    home = new_home(tmp_path / "home")
    all_ended: set[str] = set()
    consumed: set[str] = set()
    for number in range(rounds):
        for what, event_id in _killed_after(home, dice.randrange(8), dice.random() * 0.02, number):
            (all_ended if what == "ended" else consumed).add(event_id)
        with GitJobStore(home, durability="relaxed") as store, JobRunner(store, 1, quick) as runner:
            runner.notices.deliver(CALLER)
            assert runner.notices.pending(CALLER) == []
            events = [event_id for node in told(store) for event_id in events_of(node)]
            assert len(events) == len(set(events)), f"round {number}: told twice"
            assert all_ended - consumed <= set(events) | _consumed(store, home), f"round {number}: not told"
    assert len(all_ended) > rounds


def _consumed(store: GitJobStore, home: Path) -> set[str]:
    """Ends whose consumption became durable without being acknowledged."""
    rows = {str(job.event_id) for job in store.list(limit=None) if job.notice is NoticeStage.CONSUMED}
    return rows | {str(task.event_id) for task in journal_of(home).tasks() if task.consumed}
