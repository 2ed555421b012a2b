"""The action table (spec 003, D9): fields, answers, errors, and waiting on the server."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs.agents import Profiles
from openjobs.errors import Bug, Closed, InvalidInput, InvalidSessionId, UnknownAgent, UnknownJob, UnknownSession
from openjobs.host.actions import READING, TABLE, Context, answer, perform
from openjobs.host.client import _READING
from openjobs.ids import new_id
from openjobs.jobs import JobStatus, TurnRequest, TurnResult
from openjobs.runner import JobRunner
from openjobs.store import MockTaskStore
from tests.support import eventually


class Turns:
    """Profiles of which a test decides when they end."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.started = threading.Semaphore(0)

    def hold(self, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        """Says something, and ends when it may or is cancelled."""
        request.partial("so far")
        self.started.release()
        eventually(lambda: self.go_on.is_set() or cancel_event.is_set(), 30)
        return TurnResult(final_text="all of it")


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def context(turns: Turns) -> Iterator[Context]:
    store = MockTaskStore()
    store.create_session("default")
    profiles = Profiles()
    profiles.register("hold", turns.hold)
    runner = JobRunner(store, workers=1, profiles=profiles)
    yield Context(runner=runner, store=store, about={"pid": 1, "version": "v"})
    turns.go_on.set()
    runner.shutdown()
    store.close()


def spawn(context: Context, /, prompt: str = "hello", agent_id: str = "echo", **more: Any) -> dict[str, Any]:
    return perform(context, "spawn_job", {"session_id": "default", "prompt": prompt, "agent_id": agent_id, **more})


class TestSpawn:
    def test_it_answers_with_the_fields_of_d9(self, context: Context) -> None:
        """`spawn_job` answers at once with exactly job_id, status and parent_msg_id."""
        made = spawn(context, description="a greeting")
        assert set(made) == {"job_id", "status", "parent_msg_id"}
        assert made["status"] in set(JobStatus)
        assert context.runner.await_job(made["job_id"], 10).subject == "a greeting"

    def test_with_wait_it_answers_at_the_end(self, context: Context) -> None:
        assert spawn(context, wait=True)["status"] == "completed"

    def test_everything_asked_for_reaches_the_turn(self, context: Context) -> None:
        """Directory, environment, metadata and timeout arrive as they were sent."""
        seen: list[TurnRequest] = []

        def look(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
            seen.append(request)
            return TurnResult()

        context.runner.profiles.register("look", look)
        job_id = new_id()
        spawn(
            context,
            agent_id="look",
            wait=True,
            job_id=job_id,
            context="clean",
            cwd="/tmp",
            env={"A": "\udcff"},
            timeout_s=60,
            metadata={"k": [1]},
        )
        assert seen[0].job_id == job_id
        assert str(seen[0].cwd) == "/tmp"
        assert seen[0].env == {"A": "\udcff"}
        assert seen[0].context_mode == "clean"
        assert seen[0].job.timeout_s == 60
        assert seen[0].job.metadata == {"k": [1]}

    def test_the_same_id_again_runs_nothing(self, context: Context) -> None:
        """A retry with the same job id returns the first job (R3)."""
        job_id = new_id()
        first = spawn(context, job_id=job_id, wait=True)
        again = spawn(context, job_id=job_id, wait=True)
        assert again == first
        assert len(perform(context, "list_jobs", {})["tasks"]) == 1

    def test_a_missing_session_is_made_only_on_request(self, context: Context) -> None:
        with pytest.raises(UnknownSession):
            perform(context, "spawn_job", {"session_id": "new", "prompt": "x", "agent_id": "echo"})
        for _ in range(2):
            made = perform(
                context, "spawn_job", {"session_id": "new", "prompt": "x", "agent_id": "echo", "create_session": True}
            )
        assert context.runner.await_job(made["job_id"], 10).parent_session_id == "new"

    def test_an_unknown_agent_writes_nothing(self, context: Context) -> None:
        with pytest.raises(UnknownAgent, match="--agent shell"):
            spawn(context, agent_id="main")
        assert perform(context, "list_jobs", {}) == {"tasks": []}


class TestReading:
    def test_jobs_are_listed_newest_first(self, context: Context) -> None:
        """`list_jobs` filters by session and status, and answers `{tasks: [...]}`."""
        ids = [spawn(context, str(number), wait=True)["job_id"] for number in range(3)]
        listed = perform(context, "list_jobs", {"session_id": "default", "status_filter": "completed", "limit": 2})
        assert [job["job_id"] for job in listed["tasks"]] == ids[:0:-1]
        assert perform(context, "list_jobs", {"status_filter": ["errored", "cancelled"]}) == {"tasks": []}

    def test_a_running_job_shows_what_it_said(self, context: Context, turns: Turns) -> None:
        """`get_job` gives the entity, by a prefix too, and the partial result while it runs (D9)."""
        job_id = spawn(context, agent_id="hold")["job_id"]
        turns.started.acquire()
        found = eventually(lambda: _running(perform(context, "get_job", {"job_id": job_id[:13]})))
        assert found["job_id"] == job_id
        assert found["partial_result"] == "so far"
        assert found["result_text"] is None
        turns.go_on.set()
        context.runner.await_job(job_id, 10)
        found = perform(context, "get_job", {"job_id": job_id})
        assert found["partial_result"] is None
        assert found["result_text"] == "all of it"
        assert found["head_id"] is not None

    def test_an_unknown_job_is_a_typed_error(self, context: Context) -> None:
        for action in ("get_job", "cancel_job"):
            with pytest.raises(UnknownJob):
                perform(context, action, {"job_id": new_id()})


def _running(found: dict[str, Any]) -> dict[str, Any] | None:
    return found if found["status"] == "running" else None


class TestCancelling:
    def test_it_answers_with_the_present_status(self, context: Context, turns: Turns) -> None:
        """`cancel_job` answers `{job_id, status}` at once and does not wait for the worker (D5)."""
        running = spawn(context, agent_id="hold")["job_id"]
        turns.started.acquire()
        queued = spawn(context, agent_id="hold")["job_id"]
        assert perform(context, "cancel_job", {"job_id": queued}) == {"job_id": queued, "status": "cancelled"}
        assert perform(context, "cancel_job", {"job_id": running, "reason": "no"})["status"] in ("running", "cancelled")
        ended = context.runner.await_job(running, 10)
        assert (ended.status, ended.cancel_reason, ended.result_text) == (JobStatus.CANCELLED, "no", "all of it")

    def test_a_whole_session_is_cancelled(self, context: Context, turns: Turns) -> None:
        ids = {spawn(context, agent_id="hold")["job_id"] for _ in range(2)}
        turns.started.acquire()
        asked = perform(context, "cancel_session", {"session_id": "default", "reason": "stop"})
        assert {job["job_id"] for job in asked["tasks"]} == ids
        assert {job.status for job in context.runner.await_tasks(list(ids), timeout=10)} == {JobStatus.CANCELLED}


class TestWaiting:
    def test_all_and_any(self, context: Context, turns: Turns) -> None:
        """The server waits for all or any, and says whether the time was up; the order is that of the question."""
        done = spawn(context, wait=True)["job_id"]
        held = spawn(context, agent_id="hold")["job_id"]
        turns.started.acquire()
        met = perform(context, "await_jobs", {"job_ids": [held, done], "mode": "any"})
        assert [job["job_id"] for job in met["tasks"]] == [held, done]
        assert met["timed_out"] is False
        late = perform(context, "await_jobs", {"job_ids": [held, done], "timeout_s": 0})
        assert late["timed_out"] is True
        assert late["tasks"][0]["completed_at"] is None
        assert late["tasks"][1]["status"] == "completed"
        turns.go_on.set()
        assert perform(context, "await_jobs", {"job_ids": [held], "timeout_s": 10})["timed_out"] is False

    def test_nobody_waits_for_a_client_that_is_gone(self, context: Context, turns: Turns) -> None:
        """When the asker goes away its wait ends and the job goes on."""
        held = spawn(context, agent_id="hold")["job_id"]
        turns.started.acquire()
        alone = attrs.evolve(context, gone=lambda: True)
        with pytest.raises(Closed):
            perform(alone, "await_jobs", {"job_ids": [held]})
        assert not context.runner.get(held).terminal

    def test_a_waiting_job_lends_its_slot(self, context: Context) -> None:
        """A job whose command waits through the host lends its slot: one worker is enough for parent and child."""

        def parent(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
            # As a nested command does it: from another thread, which is not the runner's.
            results: list[Any] = []

            def command() -> None:
                child = spawn(context, "from the child", parent_job_id=request.job_id)
                waited = perform(
                    context,
                    "await_jobs",
                    {"job_ids": [child["job_id"]], "waiting_job_id": request.job_id, "timeout_s": 20},
                )
                results.append(waited["tasks"][0]["result_text"])

            nested = threading.Thread(target=command)
            nested.start()
            nested.join()
            return TurnResult(final_text=str(results))

        context.runner.profiles.register("parent", parent)
        job = context.runner.await_job(spawn(context, agent_id="parent")["job_id"], 30)
        assert job.result_text == "['from the child']"
        assert context.runner.stats().lent == 0


class TestTheRest:
    def test_stats_and_ping(self, context: Context) -> None:
        assert perform(context, "ping", {}) == {"pid": 1, "version": "v"}
        stats = perform(context, "stats", {})
        assert stats["workers"] == 1
        assert stats["host"] == {"pid": 1, "version": "v"}

    def test_shutdown_is_only_asked_for(self, context: Context) -> None:
        reasons: list[str] = []
        asked = attrs.evolve(context, stop=reasons.append)
        assert perform(asked, "shutdown", {}) == {"stopping": True}
        assert len(reasons) == 1

    def test_the_client_knows_which_actions_only_read(self) -> None:
        """The two lists agree: the client does not import the runner's side."""
        assert READING == _READING
        assert set(TABLE) > READING


def test_the_documented_fields_are_the_ones_there_are(context: Context) -> None:
    """docs/host.md names every action, and each field that it names is taken."""
    page = (Path(__file__).parents[2] / "docs" / "host.md").read_text().split("## The actions")[1]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*?) \|", page, re.MULTILINE)
    documented = {
        name: re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", fields)) for names, fields in rows for name in _names(names)
    }
    documented["spawn_job"] += _names(page.split("also takes")[1])
    assert set(documented) == set(TABLE)
    for action, fields in documented.items():
        if fields:
            with pytest.raises(InvalidInput) as raised:
                perform(context, action, dict.fromkeys(fields, object()))
            assert "has no field" not in str(raised.value)


def _names(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


ID = new_id()


@pytest.mark.parametrize(
    ("action", "fields", "names"),
    [
        (None, {}, "None is not an action"),
        ("rm", {}, "'rm' is not an action"),
        (["x"], {}, "is not an action"),
        ("ping", {"x": 1}, "ping has no field 'x'"),
        ("spawn_job", {}, "prompt"),
        ("spawn_job", {"prompt": "x"}, "session_id"),
        ("spawn_job", {"prompt": 1, "session_id": "s"}, "prompt must be text, not 1"),
        ("spawn_job", {"prompt": "\ud800", "session_id": "s"}, "UTF-8"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "contxt": "clean"}, "no field 'contxt'"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "context": "dirty"}, "context must be"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "wait": "yes"}, "wait must be true or false"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "job_id": "x"}, "job id"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "timeout_s": True}, "timeout_s"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "timeout_s": 0}, "above 0"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "timeout_s": float("inf")}, "timeout_s"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "env": {"A": 1}}, "env must map"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "env": {"A=B": "1"}}, "env must map"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "env": ["A"]}, "env must be an object"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "cwd": "a\0"}, "cwd"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "metadata": []}, "metadata"),
        ("spawn_job", {"prompt": "x", "session_id": "default", "parent_msg_id": "../x"}, "message id"),
        ("list_jobs", {"limit": 0}, "limit"),
        ("list_jobs", {"limit": 10**9}, "limit"),
        ("list_jobs", {"limit": True}, "limit"),
        ("list_jobs", {"status_filter": "asleep"}, "status_filter"),
        ("list_jobs", {"status_filter": [["running"]]}, "status_filter"),
        ("get_job", {}, "job_id"),
        ("get_job", {"job_id": "../../etc"}, "job id"),
        ("cancel_job", {"job_id": ID, "reason": 1}, "reason"),
        ("await_jobs", {}, "job_ids"),
        ("await_jobs", {"job_ids": []}, "job_ids"),
        ("await_jobs", {"job_ids": [1]}, "job_ids"),
        ("await_jobs", {"job_ids": [ID] * 10_001}, "job_ids"),
        ("await_jobs", {"job_ids": [ID], "mode": "some"}, "mode"),
        ("await_jobs", {"job_ids": [ID], "timeout_s": -1}, "timeout_s"),
    ],
)
def test_a_bad_field_is_named(context: Context, action: Any, fields: dict[str, Any], names: str) -> None:
    """Every wrong, missing or unknown field is a typed error that names it, and nothing is done (R10)."""
    with pytest.raises(InvalidInput) as raised:
        perform(context, action, fields)
    assert names in str(raised.value)
    assert len(str(raised.value)) < 1000
    assert context.runner.stats().unfinished == 0


@pytest.mark.parametrize("session_id", ["", ".", "a/b", "a.lock", "x\n", "-a", "é", "a" * 65])
def test_a_bad_session_id_is_refused(context: Context, session_id: str) -> None:
    """Every session id that the design rules out is a typed error in every action that takes one."""
    for action, more in (("spawn_job", {"prompt": "x"}), ("list_jobs", {}), ("cancel_session", {})):
        with pytest.raises(InvalidSessionId):
            perform(context, action, {"session_id": session_id, **more})


class TestAnswers:
    def test_an_answer_has_the_requests_id(self, context: Context) -> None:
        assert answer(context, {"id": 7, "action": "ping"}) == {"id": 7, "ok": True, "result": dict(context.about)}

    def test_an_error_is_a_code_and_a_message(self, context: Context) -> None:
        told = answer(context, {"action": "get_job", "job_id": "0" * 8})
        assert told["ok"] is False
        assert told["error"]["code"] == "unknown_job"
        assert told["error"]["message"]

    def test_our_own_failure_is_an_answer_too(self, context: Context, caplog: pytest.LogCaptureFixture) -> None:
        """An error that nobody expected is answered and logged, and ends nothing."""

        def fail() -> None:
            raise ZeroDivisionError("oh")

        broken = attrs.evolve(context, runner=type("Broken", (), {"stats": staticmethod(fail)})())
        assert answer(broken, {"action": "stats"})["error"] == {
            "code": "host_failed",
            "message": "ZeroDivisionError: oh",
        }
        assert "the action 'stats' failed" in caplog.text
        bug = attrs.evolve(context, stop=lambda reason: _raise(Bug("x")))
        assert answer(bug, {"action": "shutdown"})["error"]["code"] == "bug"


def _raise(error: Exception) -> None:
    raise error
