"""At any moment, under concurrent jobs, a turn sees all of an ended job or nothing (spec 003, D8; invariant 4)."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openjobs import GitJobStore, JobRunner, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.jobs import Cancelled, CancelRequested, Completed, End, Errored, Event, Job, Queued, Started
from openjobs.session import cards
from openjobs.session.context import ContextItem, ItemKind, chat_messages
from openjobs.store import JobStore
from tests.support.chaos import Chaos
from tests.support.jobs import job_for

SESSIONS = ("here", "there")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.integers(400, 3000).map(lambda n: "long " * (n // 5))
ENDS: st.SearchStrategy[Callable[[str], End]] = st.one_of(
    TEXTS.map(lambda text: lambda event_id: Completed(event_id=event_id, result_text=text)),
    TEXTS.map(lambda text: lambda event_id: Errored(event_id=event_id, error=f"ValueError: {text}")),
    TEXTS.map(lambda text: lambda event_id: Cancelled(event_id=event_id, result_text=text or None)),
)


@st.composite
def lives(draw: st.DrawFn) -> tuple[bool, list[str], Callable[[str], End]]:
    """Whether the caller is elsewhere, which steps happen before the end, and the end."""
    steps = draw(st.sampled_from([[], ["start"], ["start", "ask"]]))
    return draw(st.booleans()), steps, draw(ENDS)


def check(store: JobStore, session_id: str, jobs: list[Job]) -> None:
    """Every item of the context is a whole message or a whole end, as the rows say."""
    session = store.session(session_id)
    items = session.context()
    rows = {job.job_id: store.get(job.job_id) for job in jobs}
    ended = [item for item in items if item.kind is ItemKind.ATTACH]
    for item in ended:
        job = rows[str(item.job_id)]
        assert job.terminal
        assert (item.text, item.status) == (cards.ending_text(job), job.status)
    expected = {job.job_id for job in rows.values() if job.terminal and not job.elsewhere and job.owned_by(session_id)}
    assert expected <= {str(item.job_id) for item in ended}
    assert not any(item.text == cards.RUNNING for item in items)
    for item in session.context(expand_branches=True):
        if item.kind is ItemKind.ATTACH and item.status == "completed":
            job = rows[str(item.job_id)]
            assert item.text in (job.description, job.result_text)


@settings(max_examples=40)
@given(st.lists(lives(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_after_every_step_each_end_is_seen_whole_or_not(
    scripts: list[tuple[bool, list[str], Callable[[str], End]]], dice: random.Random
) -> None:
    """Jobs of both sessions in any interleaving of creation, start, cancel request, end and card."""
    with MockTaskStore() as store:
        for session_id in SESSIONS:
            store.create_session(session_id)
            store.session(session_id).append("user", f"hello {session_id}")
        jobs: list[Job] = []
        todo: list[list[Callable[[], object]]] = []
        for number, (elsewhere, steps, end) in enumerate(scripts):
            caller = {"caller_session_id": "here"} if elsewhere else {}
            job = job_for(store, "there" if elsewhere else "here", f"job {number}", **caller)
            todo.append(_steps(store, job, jobs, steps, end(f"end {number}")))
        while todo:
            script = dice.choice(todo)
            script.pop(0)()
            if not script:
                todo.remove(script)
            for session_id in SESSIONS:
                check(store, session_id, jobs)
            if dice.random() < 0.2:
                store.session(dice.choice(SESSIONS)).append("assistant", "meanwhile")


def _steps(store: JobStore, job: Job, jobs: list[Job], steps: list[str], end: End) -> list[Callable[[], object]]:
    events: dict[str, Event] = {"start": Started(), "ask": CancelRequested()}

    def create() -> None:
        jobs.append(store.create(job, Queued(runner_id="r")))

    def apply(event: Event) -> Callable[[], object]:
        return lambda: store.apply(job.job_id, event)

    def mirror() -> object:
        return store.mirror_later(store.get(job.job_id)).result() if job.elsewhere else None

    if "start" not in steps and isinstance(end, Completed):
        steps = ["start"]
    return [create, mirror, *(apply(events[step]) for step in steps), apply(end), mirror]


@pytest.fixture(params=["mock", "git"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    store: JobStore = (
        MockTaskStore() if request.param == "mock" else GitJobStore(tmp_path / "home", durability="relaxed")
    )
    for session_id in SESSIONS:
        store.create_session(session_id)
        store.session(session_id).append("user", f"hello {session_id}")
    yield store
    for session_id in SESSIONS:
        report = store.fsck(session_id)
        assert report.clean, "\n".join(map(str, report.findings))
    store.close()


WHOLE = re.compile(
    r"(?:\[task error\] ValueError: )?<(?P<prompt>[\w-]+):x{2000}:(?P=prompt)>(?:\n\[cancelled at [^\]]+\])?"
    r"|\[cancelled at [^\]]+\]"
)


def test_readers_beside_running_jobs_never_see_half_an_end(store: JobStore, chaos: Chaos) -> None:
    """Four workers end jobs of both sessions as they can while two readers look at every context, again and again."""

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        text = f"<{request.prompt}:{'x' * 2000}:{request.prompt}>"
        request.partial(text)
        if request.prompt.startswith("bad"):
            raise ValueError(text)
        if request.prompt.startswith("slow"):
            assert cancel_event.wait(20)
        return TurnResult(final_text=text)

    over = threading.Event()
    seen: set[str] = set()
    wrong: list[str] = []

    def look() -> None:
        while not over.is_set() and not wrong:
            for session_id in SESSIONS:
                for item in store.session(session_id).context():
                    if item.kind is not ItemKind.ATTACH:
                        continue
                    seen.add(str(item.job_id))
                    if not WHOLE.fullmatch(item.text) or item.status not in ("completed", "cancelled", "errored"):
                        wrong.append(f"{item.status}: {item.text[:80]}")

    readers = [threading.Thread(target=look) for _ in range(2)]
    jobs: list[Job] = []
    try:
        with JobRunner(store, 4, turn) as runner:
            for reader in readers:
                reader.start()
            for number in range(chaos.rounds(40, 400)):
                kind = ("good", "bad", "slow")[number % 3]
                target = "there" if number % 2 else "here"
                request = SpawnRequest(prompt=f"{kind}-{number}", parent_session_id=target, caller_session_id="here")
                job = runner.submit(request)
                jobs.append(job)
                if kind == "slow":
                    runner.cancel(job.job_id)
            assert runner.wait_idle(60)
            runner._mirrors.wait_idle(20)
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert seen
    assert {str(item.job_id) for item in store.session("here").context() if item.job_id} == {job.job_id for job in jobs}


# --- the budget ------------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=30), min_size=1, max_size=12), st.integers(0, 200))
def test_what_a_budget_leaves_out_is_said(texts: list[str], budget: int) -> None:
    """The newest items, whole; the last one always; a first item says how many are missing, and there is none
    where all are there."""
    store = MockTaskStore()
    store.create_session("s")
    session = store.session("s")
    for text in texts:
        session.append("user", text)
    items = session.context(budget=budget)
    store.close()
    cut: ContextItem | None = items[0] if items[0].kind is ItemKind.CUT else None
    kept = items[1:] if cut is not None else items
    assert [item.text for item in kept] == texts[len(texts) - len(kept) :]
    assert kept
    if len(kept) > 1:
        assert sum(len(message["content"]) for message in chat_messages(kept)) <= budget
    if cut is None:
        assert len(kept) == len(texts)
    else:
        assert cut.text == f"[{len(texts) - len(kept)} earlier messages left out]"
        assert sum(map(len, texts[len(texts) - len(kept) - 1 :])) > budget


@pytest.mark.parametrize("budget", [-1, 1.5, True, "10"])
def test_a_budget_that_is_none_is_refused(budget: object) -> None:
    """A number of characters, 0 or more."""
    store = MockTaskStore()
    store.create_session("s")
    store.session("s").append("user", "x")
    with pytest.raises(errors.InvalidInput):
        store.session("s").context(budget=budget)  # type: ignore[arg-type]
    store.close()
