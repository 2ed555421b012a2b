"""Submitting: what is written, what runs, what is refused (design, *The runner*; spec 003, D1 to D4, D12)."""

from __future__ import annotations

import contextvars
import threading
from functools import reduce
from pathlib import Path

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, TurnRequest, TurnResult, errors
from openjobs.ids import new_id
from openjobs.jobs import ContextMode
from openjobs.runner.config import DEFAULT_WORKERS, workers_from
from openjobs.runner.submission import Submission
from tests.support import FakeClock, eventually
from tests.support.turns import Ask, MakeRunner, Turns


def statuses(store: MockTaskStore, job_id: str) -> list[str]:
    return [t.status.value for t in store.history(job_id) if t.kind == "transition"]


def test_a_submitted_job_is_durable_and_queued(runner: JobRunner, store: MockTaskStore, ask: Ask) -> None:
    """When `submit` returns, both its commits are there, and the job names its runner."""
    job = runner.submit(ask("probe", description="short"))
    assert job.status is JobStatus.QUEUED
    assert statuses(store, job.job_id)[:2] == ["pending", "queued"]
    assert (job.subject, job.description, job.runner_id) == ("short", "probe", runner.runner_id)


def test_a_job_walks_every_edge_once(runner: JobRunner, turns: Turns, store: MockTaskStore, ask: Ask) -> None:
    """pending, queued, running, completed: one commit each, each with its time."""
    job = runner.submit(ask())
    turns["work"].finish.set()
    ended = runner.await_job(job.job_id)
    assert statuses(store, job.job_id) == ["pending", "queued", "running", "completed"]
    assert ended.result_text == "did work"
    assert None not in (ended.queued_at, ended.started_at, ended.completed_at)
    assert store.get(job.job_id) == ended


def test_submit_does_not_wait_for_a_worker(make_runner: MakeRunner, ask: Ask) -> None:
    """With its one worker busy, a runner still takes jobs at once."""
    runner = make_runner(1)
    jobs = [runner.submit(ask(f"j{n}")) for n in range(5)]
    assert [job.status for job in jobs] == [JobStatus.QUEUED] * 5


def test_queued_jobs_start_in_the_order_of_their_submits(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """One worker runs them first in, first out."""
    runner = make_runner(1)
    ids = [runner.submit(ask(f"j{n}")).job_id for n in range(20)]
    turns.finish_all()
    runner.await_tasks(ids)
    assert turns.order == [f"j{n}" for n in range(20)]


def test_the_runner_never_runs_more_than_its_workers(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """Two hundred quick jobs on three workers: never more than three at once, and all of them run."""
    runner = make_runner(3)
    turns.finish_all()
    ended = runner.await_tasks([runner.submit(ask(f"j{n}")).job_id for n in range(200)])
    assert {job.status for job in ended} == {JobStatus.COMPLETED}
    assert turns.most <= 3


# --- what runs --------------------------------------------------------------------------------------------


class Named:
    def __init__(self, **functions: object) -> None:
        self.functions = functions

    def get(self, agent_id: str) -> object:
        if agent_id not in self.functions:
            raise errors.UnknownAgent(f"no profile {agent_id}")
        return self.functions[agent_id]


def says(text: str) -> object:
    return lambda request, cancel_event: TurnResult(final_text=text)


@pytest.mark.parametrize(
    ("with_submit", "with_runner", "expected"),
    [(True, True, "submit"), (False, True, "runner"), (False, False, "profile")],
)
def test_the_nearest_callable_runs_the_job(
    make_runner: MakeRunner, ask: Ask, with_submit: bool, with_runner: bool, expected: str
) -> None:
    """The one given to `submit`, else the runner's, else the profile of the agent."""
    runner = make_runner(sync_fn=says("runner") if with_runner else None, profiles=Named(main=says("profile")))
    job = runner.submit(ask(), sync_fn=says("submit") if with_submit else None)
    assert runner.await_job(job.job_id).result_text == expected


@pytest.mark.parametrize("profiles", [None, Named()])
def test_an_unknown_agent_is_refused_and_nothing_is_written(
    make_runner: MakeRunner, store: MockTaskStore, sid: str, ask: Ask, profiles: Named | None
) -> None:
    """Without anything that runs it, there is no job: no commit, no marker, no index entry."""
    runner = make_runner(sync_fn=None, profiles=profiles)
    before = store.head(sid)
    with pytest.raises(errors.UnknownAgent):
        runner.submit(ask(agent_id="nobody"))
    assert store.head(sid) == before
    assert store.active.sessions(runner.runner_id) == []
    assert runner.stats().unfinished == 0


def test_a_turn_sees_what_was_asked(runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask) -> None:
    """Prompt, session, agent, fork point, its own message, directory and environment."""
    first = store.session(sid).append("user", "hello")
    job = runner.submit(ask("probe", agent_id="a1", cwd="/tmp", env={"K": "v"}))
    request = turns["probe"].until_started()
    assert (request.job_id, request.session_id, request.prompt, request.agent_id) == (job.job_id, sid, "probe", "a1")
    assert (request.context_mode, request.parent_msg_id) == (ContextMode.INHERIT, first.id)
    assert request.user_msg_id == job.user_msg_id
    assert (request.cwd, request.env) == (Path("/tmp"), {"K": "v"})
    assert request.job.status is JobStatus.RUNNING
    assert [item.text for item in request.context] == ["hello"]


def test_a_clean_turn_sees_no_context(
    runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask
) -> None:
    """`clean` starts a new root."""
    store.session(sid).append("user", "hello")
    runner.submit(ask("probe", context_mode="clean"))
    assert turns["probe"].until_started().context == []


def test_the_environment_is_never_written(runner: JobRunner, store: MockTaskStore, sid: str, ask: Ask) -> None:
    """A secret in `env` is in no version of any file of the session."""
    runner.submit(ask(env={"TOKEN": "s3cr3t-value"}))
    view = store.repository(sid).view()
    for path in ("jobs.json", "meta.json", "history/00/0000.jsonl"):
        assert b"s3cr3t-value" not in (view.read(path) or b"")


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


def test_the_worker_gets_a_copy_of_the_submitters_context_variables(runner: JobRunner, ask: Ask) -> None:
    """It sees their values at submit, and what it sets stays its own."""

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        seen = VARIABLE.get()
        VARIABLE.set("changed")
        return TurnResult(final_text=seen)

    VARIABLE.set("mine")
    job = runner.submit(ask(), sync_fn=turn)
    again = runner.submit(ask("again"), sync_fn=turn)
    VARIABLE.set("later")
    assert [j.result_text for j in runner.await_tasks([job.job_id, again.job_id])] == ["mine", "mine"]
    assert VARIABLE.get() == "later"


# --- idempotency -----------------------------------------------------------------------------------------


def test_the_same_job_id_again_returns_the_first_job_and_runs_nothing(
    runner: JobRunner, turns: Turns, store: MockTaskStore, ask: Ask
) -> None:
    """R3: a retry with the same id never applies twice."""
    request = ask(job_id=new_id())
    first = runner.submit(request)
    assert runner.submit(request).job_id == first.job_id
    turns["work"].finish.set()
    ended = runner.await_job(first.job_id)
    assert runner.submit(request) == ended
    assert turns.order == ["work"]
    assert len(store.history(first.job_id)) == 4


def test_the_same_tool_call_again_returns_the_first_job(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """(session, tool call id) is an idempotency key, too."""
    first = runner.submit(ask(origin_tool_call_id="call-1"))
    assert runner.submit(ask(origin_tool_call_id="call-1")).job_id == first.job_id
    assert runner.stats().unfinished == 1


@pytest.mark.parametrize("key", ["job_id", "origin_tool_call_id"])
def test_the_same_key_with_another_request_is_a_conflict(runner: JobRunner, ask: Ask, key: str) -> None:
    """Some model servers repeat tool call ids; the second request is not silently dropped."""
    value = new_id()
    first = runner.submit(ask("one", **{key: value}))
    with pytest.raises(errors.IdempotencyConflict) as caught:
        runner.submit(ask("two", **{key: value}))
    assert caught.value.first_id == first.job_id
    assert runner.stats().unfinished == 1


def test_many_submits_of_one_id_at_once_make_one_job(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """Sixteen threads, one id: one job, one run, and everybody gets it."""
    runner = make_runner(4)
    request = ask(job_id=new_id())
    got: list[str] = []
    barrier = threading.Barrier(16)

    def submit() -> None:
        barrier.wait()
        got.append(runner.submit(request).job_id)

    threads = [threading.Thread(target=submit) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns.finish_all()
    assert runner.await_job(request.job_id or "").status is JobStatus.COMPLETED
    assert got == [request.job_id] * 16
    assert turns.order == ["work"]


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": 7}, errors.InvalidInput),
        ({"prompt": "half a \ud800 character"}, errors.InvalidInput),
        ({"agent_id": ""}, errors.InvalidInput),
        ({"context_mode": "both"}, errors.InvalidInput),
        ({"timeout_s": 0}, errors.InvalidInput),
        ({"timeout_s": float("nan")}, errors.InvalidInput),
        ({"timeout_s": "10"}, errors.InvalidInput),
        ({"metadata": {"big": "x" * 2000}}, errors.InvalidInput),
        ({"metadata": {"odd": object()}}, errors.InvalidInput),
        ({"metadata": [1]}, errors.InvalidInput),
        ({"metadata": {"deep": reduce(lambda inner, _: [inner], range(252), [])}}, errors.InvalidInput),
        ({"env": {"A": 1}}, errors.InvalidInput),
        ({"job_id": "7"}, errors.InvalidInput),
        ({"origin_tool_call_id": ""}, errors.InvalidInput),
        ({"parent_session_id": "../x"}, errors.InvalidSessionId),
        ({"parent_session_id": "nowhere"}, errors.UnknownSession),
        ({"caller_session_id": ".git"}, errors.InvalidSessionId),
        ({"parent_msg_id": "nothing"}, errors.UnknownNode),
        ({"parent_job_id": "00000000-0000-4000-8000-000000000000"}, errors.UnknownJob),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    runner: JobRunner, store: MockTaskStore, sid: str, ask: Ask, fields: dict[str, object], error: type[Exception]
) -> None:
    """A typed error, no commit, and a runner that is idle as before."""
    before = store.head(sid)
    with pytest.raises(error):
        runner.submit(ask(**fields))
    assert store.head(sid) == before
    assert runner.stats().unfinished == 0
    assert runner.wait_idle(0)


@pytest.mark.parametrize("text", ["0", "-1", "abc", "1e9", "1025", "4.0", "٣٣٣٣٣"])
def test_a_wrong_number_of_workers_names_the_variable_and_the_value(text: str) -> None:
    """`OPENPROGRAM_JOB_WORKERS` that cannot be used is an error, not a default."""
    with pytest.raises(errors.InvalidWorkers) as caught:
        workers_from(None, {"OPENPROGRAM_JOB_WORKERS": text})
    assert f"OPENPROGRAM_JOB_WORKERS={text!r}" in str(caught.value)


@pytest.mark.parametrize(("text", "workers"), [("1", 1), ("1024", 1024), (" 7 ", 7), ("", DEFAULT_WORKERS)])
def test_the_variable_says_how_many_workers(text: str, workers: int) -> None:
    """From 1 to 1024; the default is 4; an argument wins over it."""
    assert workers_from(None, {"OPENPROGRAM_JOB_WORKERS": text}) == workers
    assert workers_from(3, {"OPENPROGRAM_JOB_WORKERS": text}) == 3


@pytest.mark.parametrize("workers", [0, -1, 1025, True, 2.0, "2"])
def test_a_wrong_workers_argument_is_refused(make_runner: MakeRunner, workers: object) -> None:
    """The argument has the same bounds."""
    with pytest.raises(errors.InvalidWorkers):
        make_runner(workers)


def test_the_variable_is_read_when_a_runner_is_made(make_runner: MakeRunner) -> None:
    """From the `environ` it is given."""
    assert make_runner(None, environ={"OPENPROGRAM_JOB_WORKERS": "9"}).workers == 9


def test_a_job_that_may_be_there_after_a_failed_submit_is_ended(
    runner: JobRunner, store: MockTaskStore, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R3: after `OutcomeUnknown` a job with this runner's name on it would be nobody's; it becomes errored."""
    create_later = store.create_later

    def unsure(*args: object, when_done: object, **kwargs: object) -> object:
        create_later(*args, **kwargs).result()  # type: ignore[arg-type]
        raise errors.OutcomeUnknown

    monkeypatch.setattr(store, "create_later", unsure)
    request = ask(job_id=new_id())
    with pytest.raises(errors.OutcomeUnknown):
        runner.submit(request)
    eventually(lambda: runner.stats().unfinished == 0)
    job = store.get(request.job_id or "")
    assert job.status is JobStatus.ERRORED
    assert job.error is not None
    assert job.error.startswith("submit failed: ")
    assert turns.order == []


def test_a_submit_that_is_interrupted_leaves_a_cancelled_job_at_most(
    runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it waits for the commit: nobody got the id, so nothing runs."""

    def interrupted(submission: Submission) -> None:
        eventually(lambda: submission.done)
        raise KeyboardInterrupt

    monkeypatch.setattr(Submission, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.submit(ask())
    assert runner.wait_idle()
    (job,) = store.list(sid)
    assert (job.status, job.cancel_reason) == (JobStatus.CANCELLED, "submit was interrupted")
    assert turns.order == []


# --- active markers ---------------------------------------------------------------------------------------


def test_the_active_marker_is_there_before_the_job(
    runner: JobRunner, store: MockTaskStore, sid: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash right after the pending commit must find the session in `active/`."""
    seen: list[list[str]] = []
    create_later = store.create_later

    def look(*args: object, **kwargs: object) -> object:
        seen.append(store.active.sessions(runner.runner_id))
        return create_later(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "create_later", look)
    runner.submit(ask())
    assert seen == [[sid]]


def test_a_session_is_marked_once_and_cleared_after_a_minute_idle(
    runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask, clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two durable effects for a session full of short jobs, not two for each."""
    marks: list[str] = []
    mark = store.active.mark
    monkeypatch.setattr(store.active, "mark", lambda r, s: (marks.append(s), mark(r, s)))
    turns.finish_all()
    for n in range(10):
        runner.await_job(runner.submit(ask(f"j{n}")).job_id)
    assert marks == [sid]
    assert runner.wait_idle()
    clock.advance(59)
    assert store.active.sessions(runner.runner_id) == [sid]
    clock.advance(61)
    eventually(lambda: store.active.sessions(runner.runner_id) == [])
    runner.await_job(runner.submit(ask("one more")).job_id)
    assert marks == [sid, sid]


def test_a_busy_session_keeps_its_marker(
    runner: JobRunner, store: MockTaskStore, sid: str, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """However long its job runs."""
    runner.submit(ask())
    turns["work"].until_started()
    for _ in range(5):
        clock.advance(61)
    assert store.active.sessions(runner.runner_id) == [sid]


def test_a_jump_of_the_wall_clock_changes_only_the_written_times(
    runner: JobRunner, turns: Turns, ask: Ask, clock: FakeClock
) -> None:
    """A day forward, two back: nothing times out, and the row says what the clock said."""
    job = runner.submit(ask(timeout_s=5))
    turns["work"].until_started()
    clock.jump(86400)
    clock.jump(-2 * 86400)
    turns["work"].finish.set()
    ended = runner.await_job(job.job_id)
    assert ended.status is JobStatus.COMPLETED
    assert ended.completed_at is not None
    assert ended.completed_at < ended.created_at
