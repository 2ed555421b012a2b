"""The same tool call made at the same moment: one job, however many ask for it (R3)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs import JobRunner, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.jobs import Queued
from openjobs.store import GitJobStore, JobStore
from openjobs.store.index import Entry
from tests.support.jobs import clean, job_for

CALLERS = 12


def all_look_before_any_is_made(store: JobStore, monkeypatch: pytest.MonkeyPatch, callers: int) -> None:
    """The race, forced: nobody's event is handed to the committer before everybody has looked in the index."""
    looked = threading.Barrier(callers)
    refuse_known = store._refuse_known

    def look(*arguments: Any) -> None:
        refuse_known(*arguments)
        looked.wait(10)

    monkeypatch.setattr(store, "_refuse_known", look)


def test_one_job_for_all_who_submit_the_same_call(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the same job, and it runs once."""
    ran: list[str] = []

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        ran.append(request.job.job_id)
        return TurnResult(final_text="done")

    all_look_before_any_is_made(store, monkeypatch, CALLERS)
    request = SpawnRequest(prompt="p", parent_session_id="s1", origin_tool_call_id="k1")
    with JobRunner(store, 4, turn) as runner, ThreadPoolExecutor(CALLERS) as callers:
        jobs = list(callers.map(lambda _: runner.submit(request), range(CALLERS)))
        ids = {job.job_id for job in jobs}
        assert len(ids) == 1
        runner.await_tasks([job.job_id for job in jobs])
    assert ran == list(ids)


def test_the_same_call_with_another_request_is_refused(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two is made, the other is an `IdempotencyConflict` that names it."""
    all_look_before_any_is_made(store, monkeypatch, 2)
    outcomes: list[object] = []

    def submit(prompt: str) -> None:
        job = attrs.evolve(job_for(store, "s1", prompt), origin_tool_call_id="k1")
        try:
            outcomes.append(store.create(job, Queued(runner_id="r"), fresh_id=True).job_id)
        except errors.IdempotencyConflict as error:
            outcomes.append(error)

    threads = [threading.Thread(target=submit, args=(prompt,)) for prompt in ("one", "another")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (conflict,) = [each for each in outcomes if isinstance(each, errors.IdempotencyConflict)]
    (made,) = [each for each in outcomes if isinstance(each, str)]
    assert conflict.first_id == made
    assert [job.job_id for job in store.list("s1")] == [made]


def create_in_one_batch(store: JobStore, monkeypatch: pytest.MonkeyPatch, calls: list[str], prompt: str) -> list[Any]:
    """As many jobs as tool calls, all handed in before the first is decided; the job, or the error, of each."""
    may_begin = threading.Event()
    commit = store._committer._commit

    def commit_then(*arguments: Any) -> None:
        may_begin.wait(10)
        commit(*arguments)

    monkeypatch.setattr(store._committer, "_commit", commit_then)
    # The first keeps the committer busy.
    jobs = [job_for(store, "s1"), *(job_for(store, "s1", prompt, origin_tool_call_id=call) for call in calls)]
    futures = [store.create_later(job, fresh_id=True) for job in jobs]
    may_begin.set()
    return [future.exception(10) or future.result() for future in futures[1:]]


def test_the_first_and_the_last_of_a_batch_are_one(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages the jobs between them fill: these have rows of more than three kilobytes."""
    calls = ["k", *map(str, range(30)), "k"]
    first, *others, last = create_in_one_batch(store, monkeypatch, calls, "\x01" * 1000)
    assert store.documents("s1").older_pages() > 2
    assert isinstance(last, errors.JobExists)
    assert last.job.job_id == first.job_id
    assert len(store.list("s1", limit=None)) == 1 + len([first, *others])


def test_another_process_that_was_first_is_found(tmp_path: Path) -> None:
    """Between the look and the commit another process made the call's job, in a page closed since."""
    home = tmp_path / "home"
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("s1")
        first = attrs.evolve(job_for(store, "s1", "p"), origin_tool_call_id="k1")
        again = attrs.evolve(job_for(store, "s1", "p"), origin_tool_call_id="k1")
        refuse_known = store._refuse_known

        def look(*arguments: Any) -> None:
            refuse_known(*arguments)
            with GitJobStore(home, durability="relaxed") as other:
                other.create(first, Queued(runner_id="r"), fresh_id=True)
                for number in range(140):
                    other.create_later(job_for(other, "s1", f"later {number}"), Queued(runner_id="r"), fresh_id=True)

        store._refuse_known = look  # type: ignore[method-assign]
        with pytest.raises(errors.JobExists, match=first.job_id):
            store.create(again, Queued(runner_id="r"), fresh_id=True)
        clean(store)


def test_an_entry_half_written_at_the_look_is_found_later(tmp_path: Path) -> None:
    """A position in the middle of a line does not hide that line."""
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        entry = Entry(job_id="j" * 8, session_id="s1", key="k" * 24)
        store.index.add([entry])
        end = store.index.position()
        for since in range(end + 1):
            assert [e.job_id for e in store.index.by_key("k" * 24, since)] == [entry.job_id]
