"""How a job ends: what it becomes, and in which order who learns of it (design, *How it ends*; D12)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, TurnRequest, TurnResult, errors
from openjobs.jobs import Completed, Started
from openjobs.runner import Ended, EndStep
from openjobs.runner.closing import forget_exit
from openjobs.runner.ending import AFTER_TERMINAL, BEFORE_TERMINAL
from openjobs.runner.turn import PARTIAL_LIMIT_BYTES
from tests.support import eventually
from tests.support.turns import Ask, MakeRunner, Turns


def run(runner: JobRunner, request: Any, outcome: Any) -> Any:
    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        result: TurnResult = outcome(request)
        return result

    return runner.await_job(runner.submit(request, sync_fn=turn).job_id)


def raises(error: BaseException) -> Any:
    def outcome(request: TurnRequest) -> TurnResult:
        raise error

    return outcome


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("outcome", "status", "error"),
    [
        (lambda request: TurnResult(final_text="ok"), "completed", None),
        (lambda request: TurnResult(error="it says no"), "errored", "it says no"),
        (raises(ValueError("broken")), "errored", "ValueError: broken"),
        (raises(SystemExit(3)), "errored", "SystemExit: 3"),
        (raises(KeyboardInterrupt()), "errored", "KeyboardInterrupt: "),
        (raises(errors.CancelledError("of its own accord")), "errored", "CancelledError: of its own accord"),
        (raises(Unspeakable()), "errored", "Unspeakable: (its message cannot be shown)"),
        (lambda request: "text", "errored", "TypeError: the turn must return a TurnResult, not str"),
        (lambda request: None, "errored", "TypeError: the turn must return a TurnResult, not NoneType"),
        (
            lambda request: TurnResult(final_text=7),
            "errored",
            "TypeError: TurnResult.final_text must be text, not int",
        ),
        (
            lambda request: TurnResult(usage={"x": object()}),
            "errored",
            "TypeError: TurnResult.usage cannot be written as JSON: Type is not JSON serializable: object",
        ),
        (
            lambda request: TurnResult(error=ValueError("x")),
            "errored",
            "TypeError: TurnResult.error must be text or None, not ValueError",
        ),
        (
            lambda request: TurnResult(head_id=7),
            "errored",
            "TypeError: TurnResult.head_id must be a message id or None, not int",
        ),
        (
            lambda request: TurnResult(usage=["tokens", 3]),
            "errored",
            "TypeError: TurnResult.usage must be a mapping or None, not list",
        ),
    ],
)
def test_returning_is_completed_and_everything_else_is_errored(
    runner: JobRunner, ask: Ask, outcome: Any, status: str, error: str | None
) -> None:
    """Exactly one terminal state, with `{type}: {message}` for what was raised; the worker lives on."""
    ended = run(runner, ask(), outcome)
    assert (ended.status.value, ended.error) == (status, error)
    assert run(runner, ask("again"), lambda request: TurnResult(final_text="fine")).result_text == "fine"


def test_text_that_cannot_be_encoded_is_stored_with_replacements(runner: JobRunner, ask: Ask) -> None:
    """Half surrogates, as undecodable bytes of a command become, do not cost the result."""
    assert run(runner, ask(), lambda request: TurnResult(final_text="a\udcffb")).result_text == "a?b"
    assert run(runner, ask(), raises(ValueError("x\ud800"))).error == "ValueError: x?"


def test_a_turn_without_a_message_of_its_own_gets_one(runner: JobRunner, store: MockTaskStore, ask: Ask) -> None:
    """Every job has its branch: the assistant message hangs on the prompt's message."""
    ended = run(runner, ask("probe"), lambda request: TurnResult(final_text="found"))
    branch = store.session("s1").branch(ended.head_id)
    assert [(node.role, node.content) for node in branch] == [("user", "probe"), ("assistant", "found")]


def test_a_turn_can_name_the_message_where_it_landed(runner: JobRunner, store: MockTaskStore, ask: Ask) -> None:
    """`head_id` is taken over."""

    def outcome(request: TurnRequest) -> TurnResult:
        node = store.session("s1").append("assistant", "mine", parent=request.user_msg_id)
        return TurnResult(final_text="mine", head_id=node.id)

    ended = run(runner, ask(), outcome)
    assert ended.status is JobStatus.COMPLETED
    assert store.session("s1").node(ended.head_id).content == "mine"


def test_a_head_that_is_not_there_is_an_error_that_says_so(runner: JobRunner, store: MockTaskStore, ask: Ask) -> None:
    """`head_id` must name a message of the session; the result is kept as partial."""
    ended = run(runner, ask(), lambda request: TurnResult(final_text="lost?", head_id="nowhere"))
    assert ended.status is JobStatus.ERRORED
    assert ended.error == "the turn ended at message nowhere, which session s1 does not have"
    assert ended.result_text == "lost?"
    assert [t.status.value for t in store.history(ended.job_id)] == ["pending", "queued", "running", "errored"]


def test_usage_is_kept(runner: JobRunner, ask: Ask) -> None:
    """What the profile reported, for completed and errored jobs."""
    usage = {"input_tokens": 12, "cost": 0.5}
    assert run(runner, ask(), lambda request: TurnResult(usage=usage)).usage == usage
    assert run(runner, ask(), lambda request: TurnResult(error="x", usage=usage)).usage == usage


class Unreadable(Mapping[str, Any]):
    """A mapping that fails when it is read."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no keys")

    def __len__(self) -> int:
        return 1


def nested(levels: int) -> Any:
    """One that JSON's writer takes as it is, and not as a part of a row."""
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


UNSTORABLE = {
    "depth": {"x": nested(252)},
    "number": {"tokens": 2**64},
    "key": {3: "a key that is no text"},
    "object": {"x": object()},
    "text": {"x": "\ud800"},
    "name": {"\ud800": 1},
    "list": ["tokens", 3],
    "mapping": Unreadable(),
}


@pytest.mark.parametrize(
    "usage", UNSTORABLE, ids=["depth", "number", "key", "object", "text", "name", "list", "mapping"]
)
def test_a_usage_that_cannot_be_written_costs_no_answer(
    runner: JobRunner, store: MockTaskStore, ask: Ask, usage: Any
) -> None:
    """As with a head that is not there: the job errs, says why, and keeps the answer and the error of its own."""
    ended = run(runner, ask(), lambda request: TurnResult(final_text="the answer", usage=usage))
    assert (ended.status.value, ended.result_text, ended.usage) == ("errored", "the answer", None)
    assert ended.error.startswith("TypeError: TurnResult.usage ")
    ended = run(runner, ask("2"), lambda request: TurnResult(final_text="half", error="it says no", usage=usage))
    assert (ended.status.value, ended.result_text) == ("errored", "half")
    assert ended.error.startswith("it says no; TypeError: TurnResult.usage ")
    assert store.fsck("s1").clean


@pytest.mark.parametrize("wrong", [{"head_id": 7}, {"error": ValueError("x")}, {"head_id": 7, "usage": {"x": 2**64}}])
def test_no_field_of_a_wrong_type_costs_the_answer(runner: JobRunner, ask: Ask, wrong: dict[str, Any]) -> None:
    ended = run(runner, ask(), lambda request: TurnResult(final_text="the answer", **wrong))
    assert (ended.status.value, ended.result_text) == ("errored", "the answer")


def test_what_can_be_kept_beside_a_field_that_cannot_is_kept(runner: JobRunner, store: MockTaskStore, ask: Ask) -> None:
    """The message where the turn landed, and its usage."""

    def landed(request: TurnRequest) -> TurnResult:
        node = store.session("s1").append("assistant", "mine", parent=request.user_msg_id)
        return TurnResult(final_text="mine", head_id=node.id, usage={"x": 2**64})

    ended = run(runner, ask(), landed)
    assert store.session("s1").node(ended.head_id).content == "mine"
    wrong: Any = 7
    assert run(runner, ask("2"), lambda request: TurnResult(head_id=wrong, usage={"x": 1})).usage == {"x": 1}


@pytest.mark.parametrize(
    "usage", UNSTORABLE, ids=["depth", "number", "key", "object", "text", "name", "list", "mapping"]
)
def test_a_usage_that_cannot_be_written_changes_no_cancelled_job(
    runner: JobRunner, turns: Turns, ask: Ask, usage: Any
) -> None:
    """What a cancelled turn reports besides is left out: it was cancelled all the same."""

    def stopped(request: TurnRequest) -> TurnResult:
        error = errors.CancelledError()
        error.usage = usage  # type: ignore[attr-defined]
        raise error

    turns["work"].outcome = stopped
    job = runner.submit(ask())
    turns["work"].until_started()
    runner.cancel(job.job_id, reason="enough")
    ended = runner.await_job(job.job_id)
    assert (ended.status.value, ended.cancel_reason, ended.usage) == ("cancelled", "enough", None)


# --- partial output -----------------------------------------------------------------------------------------


def test_partial_text_is_shown_while_running_and_kept_on_an_error(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """The newest one; never written before the end."""

    def fail(request: TurnRequest) -> TurnResult:
        raise RuntimeError("too bad")

    turns["work"].outcome = fail
    job = runner.submit(ask())
    request = turns["work"].until_started()
    request.partial("one")
    request.partial("one two")
    eventually(lambda: runner.get(job.job_id).status is JobStatus.RUNNING)
    assert runner.get(job.job_id).result_text == "one two"
    assert [row.result_text for row in runner.list()] == ["one two"]
    turns["work"].finish.set()
    ended = runner.await_job(job.job_id)
    assert (ended.status, ended.result_text) == (JobStatus.ERRORED, "one two")


def test_partial_text_is_not_the_result_of_a_completed_job(runner: JobRunner, ask: Ask) -> None:
    """Returning nothing is completed with nothing."""

    def outcome(request: TurnRequest) -> TurnResult:
        request.partial("draft")
        return TurnResult()

    assert run(runner, ask(), outcome).result_text == ""


@pytest.mark.parametrize("character", ["x", "é", "😀"])
def test_partial_text_that_fits_to_the_byte_is_kept_whole(runner: JobRunner, ask: Ask, character: str) -> None:
    """The bound is of bytes, not of characters."""
    text = character * (PARTIAL_LIMIT_BYTES // len(character.encode()))

    def outcome(request: TurnRequest) -> TurnResult:
        request.partial(text)
        raise RuntimeError

    assert run(runner, ask(), outcome).result_text == text


@pytest.mark.parametrize("character", ["x", "é", "😀"])
def test_partial_text_is_bounded_and_says_what_is_missing(runner: JobRunner, ask: Ask, character: str) -> None:
    """Of a text over 1 MiB the end is kept, whole characters only."""
    count = PARTIAL_LIMIT_BYTES // len(character.encode()) + 10

    def outcome(request: TurnRequest) -> TurnResult:
        request.partial(character * count + "end")
        raise RuntimeError

    text = run(runner, ask(), outcome).result_text
    first, rest = text.split("\n", 1)
    assert first.startswith("[the first ")
    assert rest.endswith(character + "end")
    assert len(rest.encode()) <= PARTIAL_LIMIT_BYTES
    assert set(rest) == {character, *"end"}


def test_a_report_that_cannot_be_used_does_not_hurt_the_turn(
    runner: JobRunner, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """`partial(7)` is logged."""

    def outcome(request: TurnRequest) -> TurnResult:
        request.partial(7)  # type: ignore[arg-type]
        return TurnResult(final_text="ok")

    assert run(runner, ask(), outcome).status is JobStatus.COMPLETED
    assert "a report of its progress failed" in caplog.text


# --- the order ----------------------------------------------------------------------------------------------


def test_the_end_has_one_order(make_runner: MakeRunner, store: MockTaskStore, ask: Ask) -> None:
    """leftovers, drain, [terminal durable], run log, fact, hub, waiters, release."""
    runner = make_runner()
    seen: list[tuple[str, bool]] = []

    def watch(name: EndStep) -> None:
        inner = runner.ending.set(name, lambda ended: None)

        def step(ended: Ended) -> None:
            seen.append((name.value, store.get(ended.job.job_id).terminal))
            inner(ended)

        runner.ending.set(name, step)

    for name in EndStep:
        watch(name)
    run(runner, ask(), lambda request: TurnResult())
    assert runner.wait_idle()
    assert [name for name, _ in seen] == [name.value for name in (*BEFORE_TERMINAL, *AFTER_TERMINAL)]
    assert [durable for _, durable in seen] == [False] * len(BEFORE_TERMINAL) + [True] * len(AFTER_TERMINAL)


@pytest.mark.parametrize("failing", [EndStep.LEFTOVERS, EndStep.DRAIN, EndStep.RUN_LOG, EndStep.FACT, EndStep.HUB])
def test_a_failing_step_never_keeps_a_waiter_or_a_slot(
    make_runner: MakeRunner, ask: Ask, caplog: pytest.LogCaptureFixture, failing: EndStep
) -> None:
    """It is logged with its name; the job ends as itself."""
    runner = make_runner(1)

    def fail(ended: Ended) -> None:
        raise OSError("disk full")

    runner.ending.set(failing, fail)
    for prompt in ("one", "two"):
        assert run(runner, ask(prompt), lambda request: TurnResult()).status is JobStatus.COMPLETED
    assert runner.wait_idle()
    assert f"the step '{failing.value}' of its end failed" in caplog.text


def test_a_failing_step_after_a_submit_does_not_hurt_the_job(
    make_runner: MakeRunner, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """The place of the fact `job/registered`."""
    runner = make_runner()
    seen: list[str] = []

    def fail(job: Any) -> None:
        seen.append(job.status.value)
        raise OSError("disk full")

    runner.after_submit.append(fail)
    assert run(runner, ask(), lambda request: TurnResult()).status is JobStatus.COMPLETED
    assert seen == ["queued"]
    assert "a step after its submit failed" in caplog.text


@pytest.mark.parametrize("at", AFTER_TERMINAL)
def test_a_crash_at_any_step_leaves_a_terminal_job(store: MockTaskStore, ask: Ask, at: EndStep) -> None:
    """The steps before the crash are done, those after it are not, and the row is terminal and its card agrees."""
    runner = JobRunner(store, 1, lambda request, cancel_event: TurnResult(final_text="done"))
    done: list[EndStep] = []
    died, over = threading.Event(), threading.Event()

    def crash(ended: Ended) -> None:
        died.set()
        over.wait()

    for name in AFTER_TERMINAL:
        inner = runner.ending.set(name, lambda ended: None)
        runner.ending.set(name, lambda ended, inner=inner, name=name: (inner(ended), done.append(name)))  # type: ignore[misc]
    runner.ending.set(at, crash)
    job = runner.submit(ask())
    assert died.wait(10)
    # The dead runner's lease goes with its process.
    runner._lease.release()
    runner._pool.close()
    runner._timers.close()
    forget_exit(id(runner))
    assert done == list(AFTER_TERMINAL[: AFTER_TERMINAL.index(at)])
    row = store.get(job.job_id)
    assert row.status is JobStatus.COMPLETED
    assert row.attach_id is not None
    card = store.session("s1").node(row.attach_id)
    assert card.extra["attach"]["status"] == "completed"
    with JobRunner(store, 1, lambda request, cancel_event: TurnResult()) as after:
        assert after.get(job.job_id) == row
    over.set()
    runner._settler.close(10)


def test_no_end_is_committed_before_its_running(
    make_runner: MakeRunner, store: MockTaskStore, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker does not wait for the running commit, yet the store gets it first."""
    runner = make_runner(4)
    handed: dict[str, list[type]] = {}
    apply_later = store.apply_later

    def note(job_id: str, *events: Any, **kwargs: Any) -> Any:
        handed.setdefault(job_id, []).extend(type(event) for event in events)
        return apply_later(job_id, *events, **kwargs)

    monkeypatch.setattr(store, "apply_later", note)
    ids = [runner.submit(ask(f"j{n}"), sync_fn=lambda request, cancel_event: TurnResult()).job_id for n in range(50)]
    runner.await_tasks(ids)
    assert all(handed[job_id] == [Started, Completed] for job_id in ids)


def test_an_end_that_somebody_else_wrote_is_settled(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """R4: there is one end. Ours is refused, waiters get the one that is there, and the slot comes back."""
    from openjobs.jobs import Errored

    job = runner.submit(ask())
    turns["work"].until_started()
    eventually(lambda: store.get(job.job_id).status is JobStatus.RUNNING)
    store.apply(job.job_id, Errored(event_id=store.new_id(), error="written by hand"))
    turns["work"].finish.set()
    assert runner.await_job(job.job_id).error == "written by hand"
    assert runner.wait_idle()
    assert "was ended by somebody else" in caplog.text


def test_an_end_that_cannot_be_written_at_all_fails_its_waiters(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage in the session: who waits is told why, instead of waiting for ever."""
    job = runner.submit(ask())
    turns["work"].until_started()
    eventually(lambda: runner.get(job.job_id).status is JobStatus.RUNNING)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise errors.Damaged("jobs.json is not JSON")

    monkeypatch.setattr(store, "apply_later", broken)
    turns["work"].finish.set()
    with pytest.raises(errors.Damaged):
        runner.await_job(job.job_id)
    assert runner.wait_idle()
    monkeypatch.undo()
    from openjobs.jobs import Errored

    store.apply(job.job_id, Errored(event_id=store.new_id(), error="mended by the test"))


# --- the hub ------------------------------------------------------------------------------------------------


def test_listeners_hear_of_each_committed_state_in_order(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask
) -> None:
    """task_created, then job_status for each state; a progress report in between; no gaps in `n`."""
    with runner.subscribe() as events:
        job = runner.submit(ask())
        request = turns["work"].until_started()
        heard = [event for event in (events.get(10) for _ in range(3)) if event is not None]
        request.progress({"tokens": 3})
        turns["work"].finish.set()
        runner.await_job(job.job_id)
        assert runner.wait_idle()
        heard += events.drain()
    assert [(event.kind, event.status) for event in heard] == [
        ("task_created", "queued"),
        ("job_status", "queued"),
        ("job_status", "running"),
        ("task_progress", "running"),
        ("job_status", "completed"),
    ]
    assert heard[3].value == {"tokens": 3}
    assert [event.n for event in heard] == list(range(1, 6))
    assert {event.epoch for event in heard} == {runner.runner_id}


def test_a_listener_hears_of_an_end_only_after_it_is_durable(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask
) -> None:
    """A broadcast follows its commit."""
    turns.finish_all()
    with runner.subscribe() as events:
        runner.submit(ask())
        while (event := events.get(10)) is not None:
            assert store.get(event.job_id).revision >= event.job.revision
            if event.job.terminal:
                break


def test_a_slow_listener_loses_events_and_slows_nobody(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """Its queue is bounded; what it missed is counted."""
    runner = make_runner()
    turns.finish_all()
    slow = runner.subscribe(capacity=5)
    runner.await_tasks([runner.submit(ask(f"j{n}")).job_id for n in range(20)])
    assert runner.wait_idle()
    assert len(slow.drain()) == 5
    assert slow.missed == 75
    slow.close()
    assert slow.get(0) is None


def test_a_failing_listener_is_logged_and_contained(
    runner: JobRunner, turns: Turns, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not called again; the others hear everything, and jobs end."""
    turns.finish_all()

    def fail() -> None:
        raise RuntimeError("listener")

    bad = runner.subscribe(on_event=fail)
    with runner.subscribe() as good:
        runner.await_job(runner.submit(ask()).job_id)
        assert runner.wait_idle()
        assert len(good.drain()) == 4
    assert caplog.text.count("a subscriber of the hub failed") == 1
    assert bad.closed
