"""A caller's session on disk that is held, damaged or gone delays its card only (spec 003, D6)."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult
from openjobs.jobs import Queued, Started
from openjobs.session import cards
from openjobs.store.index import Entry
from tests.support import eventually
from tests.support.jobs import job_for
from tests.support.turns import Turns


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[GitJobStore]:
    with GitJobStore(home, durability="relaxed") as store:
        for session_id in ("caller", "target"):
            store.create_session(session_id)
            store.session(session_id).append("user", f"hello {session_id}")
        yield store


def card_status(store: GitJobStore, attach_id: str | None) -> str | None:
    nodes = store.session("caller").nodes()
    return next((cards.status_of(node) for node in nodes if node.id == attach_id), None)


def ask(prompt: str = "probe") -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id="target", caller_session_id="caller", notify=True)


def test_a_caller_whose_lock_another_program_holds(store: GitJobStore, home: Path) -> None:
    """The job starts, ends and answers who waits; with the lock gone the card and the notice say how it ended."""
    lock = home / "sessions" / "caller" / "repo" / ".git" / "index.lock"
    lock.write_bytes(b"somebody's")
    with JobRunner(store, 1, lambda request, event: TurnResult(final_text="found it")) as runner:
        job = runner.submit(ask())
        ended = runner.await_job(job.job_id, timeout=20)
        assert ended.status is JobStatus.COMPLETED
        assert runner.wait_idle(20)
        assert card_status(store, job.attach_id) is None
        assert runner.stats().cards_waiting == 1
        assert store.active.sessions(runner.runner_id) == ["target"]
        lock.unlink()
        eventually(lambda: card_status(store, ended.attach_id) == "completed")
        eventually(lambda: runner.stats().cards_waiting == 0)
        assert runner.notices.deliver("caller") is not None
    assert store.fsck("caller").clean
    assert store.fsck("target").clean


def test_a_caller_that_is_damaged(store: GitJobStore, home: Path) -> None:
    """The same; what is damaged is left as it is, and once it was put right by hand the card is written."""
    branch = home / "sessions" / "caller" / "repo" / ".git" / "refs" / "heads" / "main"
    turns = Turns()
    with JobRunner(store, 1, turns) as runner:
        job = runner.submit(ask())
        turns["probe"].until_started()
        eventually(lambda: runner.stats().cards_waiting == 0)
        good = branch.read_bytes()
        branch.write_bytes(b"no commit at all\n")
        turns["probe"].finish.set()
        assert runner.await_job(job.job_id, timeout=20).result_text == "did probe"
        eventually(lambda: runner.stats().cards_waiting == 1)
        assert [each.job_id for each in runner.visible("target")] == [job.job_id]
        assert branch.read_bytes() == b"no commit at all\n"
        branch.write_bytes(good)
        eventually(lambda: runner.stats().cards_waiting == 0, timeout=20)
    assert card_status(store, store.get(job.job_id).attach_id) == "completed"
    assert store.fsck("caller").clean


def test_a_caller_that_is_gone(store: GitJobStore, home: Path) -> None:
    """Its directory was taken away while the job ran: the job ends, and the runner leaves no work behind."""
    turns = Turns()
    with JobRunner(store, 1, turns) as runner:
        job = runner.submit(ask())
        turns["probe"].until_started()
        eventually(lambda: runner.stats().cards_waiting == 0)
        shutil.rmtree(home / "sessions" / "caller")
        turns["probe"].finish.set()
        assert runner.await_job(job.job_id, timeout=20).status is JobStatus.COMPLETED
        eventually(lambda: runner.stats().cards_waiting == 0)
        assert runner.notices.pending() == []
    assert store.leases.dead() == []
    assert store.fsck("target").clean


def test_a_caller_that_cannot_be_read_keeps_no_job_from_being_made(store: GitJobStore, home: Path) -> None:
    """Which message its card hangs on is seen when the card is written."""
    branch = home / "sessions" / "caller" / "repo" / ".git" / "refs" / "heads" / "main"
    good = branch.read_bytes()
    branch.write_bytes(b"no commit at all\n")
    job = store.create(job_for(store, "target", caller_session_id="caller"), Queued(runner_id="r"))
    assert (job.status, job.caller_msg_id) == (JobStatus.QUEUED, None)
    branch.write_bytes(good)
    assert store.mirror_later(job).result(20)
    assert card_status(store, job.attach_id) == "running"


@pytest.mark.parametrize("status", [None, "running", "queued", ["queued", "completed"]])
def test_a_session_that_cannot_be_read_hides_no_other_of_those_that_were_asked(
    status: str | list[str] | None, store: GitJobStore, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was asked is damaged, one is gone, one is whole; what the home's index knows and no session has is no
    job."""
    made: dict[str, list[str]] = {}
    for session_id in ("whole", "damaged", "gone"):
        store.create_session(session_id)
        jobs = [job_for(store, session_id, caller_session_id="caller") for _ in range(2)]
        made[session_id] = [store.create(job, Queued(runner_id="r")).job_id for job in jobs]
    store.apply(made["whole"][0], Started())
    store.create(job_for(store, "whole"), Queued(runner_id="r"))
    for session_id in ("whole", "never-made"):
        store.index.add([Entry(job_id=store.new_id(), session_id=session_id, caller_session_id="caller")])
    branch = home / "sessions" / "damaged" / "repo" / ".git" / "refs" / "heads" / "main"
    good = branch.read_bytes()
    branch.write_bytes(b"no commit at all\n")
    shutil.rmtree(home / "sessions" / "gone")
    seen = [job.job_id for job in store.visible("caller", status)]
    expected = {None: [1, 0], "running": [0]}.get(status if isinstance(status, str | None) else "queued", [1])
    assert sorted(seen) == sorted(made["whole"][number] for number in expected)
    assert "what session caller asked session damaged for cannot be read" in caplog.text
    branch.write_bytes(good)


def test_a_turn_of_one_process_asks_for_a_job_of_another_session(store: GitJobStore, home: Path) -> None:
    """Two runners on one home, each with its session: the card and the notice come to the one that asked."""

    def work(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        return TurnResult(final_text=f"{request.session_id} says {request.prompt}")

    with (
        GitJobStore(home, durability="relaxed") as other,
        JobRunner(store, 1, work) as here,
        JobRunner(other, 1, work) as there,
    ):
        heard: list[str] = []
        with here.notices.subscribe(lambda notice: heard.append(notice.id), "caller"):
            job = there.submit(ask("hello"))
            assert here.await_job(job.job_id, timeout=20).result_text == "target says hello"
            eventually(lambda: heard == [job.job_id])
        eventually(lambda: store.session("caller").context()[-1].text == "target says hello")
        assert [each.job_id for each in here.visible("caller")] == [job.job_id]
        node = here.notices.deliver("caller")
        assert node is not None
        assert job.job_id in node.content
        assert there.notices.pending("caller") == []
