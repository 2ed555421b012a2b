"""The tools of a conversation, on a store in memory: scenarios A to D of spec 003 as a model meets them."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.agents import Profiles
from openjobs.store import JobStore
from openjobs.tools import AgentTools, ToolText
from tests.support import eventually
from tests.support.turns import Turns


@pytest.fixture
def store() -> Iterator[JobStore]:
    with MockTaskStore() as store:
        store.create_session("s1")
        store.create_session("s2")
        yield store
        assert store.fsck("s1").clean


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def runner(store: JobStore, turns: Turns) -> Iterator[JobRunner]:
    with JobRunner(store, 4, turns) as runner:
        yield runner
        turns.finish_all()


@pytest.fixture
def tools(runner: JobRunner) -> AgentTools:
    return AgentTools(runner, "s1")


def background(tools: AgentTools, prompt: str, **more: Any) -> str:
    started = tools.agent(prompt, f"about {prompt}", run_in_background=True, **more)
    assert isinstance(started, dict)
    job_id: str = started["job_id"]
    return job_id


def _running(tools: AgentTools, job_id: str) -> str:
    """A look at a job, once its running commit is there."""
    look = tools.job_output(job_id, block=False)
    return look if ": running" in look else ""


# --- a foreground agent -----------------------------------------------------------------------------------


def test_a_foreground_agent_gives_the_result(tools: AgentTools, turns: Turns, store: JobStore) -> None:
    """Scenario A: the text of the turn and nothing else, and the whole life of a job behind it."""
    turns["probe X"].finish.set()
    assert tools.agent(prompt="probe X", description="probe") == "did probe X"
    (job,) = store.list("s1")
    assert [t.status.value for t in store.history(job.job_id)] == ["pending", "queued", "running", "completed"]
    assert (job.subject, job.parent_job_id, job.context_mode.value) == ("probe", None, "inherit")


def test_a_foreground_agent_is_spawn_then_await(tools: AgentTools, runner: JobRunner, turns: Turns) -> None:
    """D13: the two calls, in that order, once each."""
    calls: list[str] = []
    submit, open_wait = runner.submit, runner.open_wait

    def seen(name: str, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return call(*args, **kwargs)

        return wrapped

    turns.finish_at_once = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "submit", seen("spawn", submit))
        patch.setattr(runner, "open_wait", seen("await", open_wait))
        tools.agent("x", "x")
    assert calls == ["spawn", "await"]


def test_an_error_is_told_as_a_synchronous_tool_would(tools: AgentTools, turns: Turns) -> None:
    """`[task error] type: message`, for an exception and for a turn that says that it failed."""

    def fail(request: TurnRequest) -> TurnResult:
        raise LookupError("no sources")

    turns.finish_at_once = True
    turns["x"].outcome = fail
    turns["y"].outcome = lambda request: TurnResult(error="the model refused", final_text="so far")
    assert tools.agent("x", "x") == "[task error] LookupError: no sources"
    assert tools.call("agent", {"prompt": "y", "description": "y"}) == "[task error] the model refused"


def test_the_user_stops_the_session(tools: AgentTools, turns: Turns, runner: JobRunner) -> None:
    """Scenario A: the partial output, then `[cancelled]`, whoever cancels."""
    turns["x"].outcome = lambda request: TurnResult(final_text="half an answer")
    stopper = threading.Thread(target=lambda: (turns["x"].until_started(), runner.cancel_session("s1")))
    stopper.start()
    assert tools.agent("x", "x") == "half an answer\n[cancelled]"
    stopper.join()


def test_the_hosts_stop_reaches_a_foreground_agent(tools: AgentTools, turns: Turns, store: JobStore) -> None:
    """D5: `cancel_event` cancels the job that only this call waits for, and the call gives what there was."""
    stop = threading.Event()
    turns["x"].outcome = lambda request: TurnResult(final_text="half")

    def stop_it() -> None:
        turns["x"].until_started()
        stop.set()

    stopper = threading.Thread(target=stop_it)
    stopper.start()
    text = tools.call("agent", {"prompt": "x", "description": "x"}, cancel_event=stop)
    stopper.join()
    assert text == "half\n[cancelled]"
    assert not text.is_error
    (job,) = store.list("s1")
    assert (job.status, job.cancel_reason) == (JobStatus.CANCELLED, "its caller was stopped")


def test_a_job_that_is_cancelled_before_it_says_anything(tools: AgentTools, turns: Turns, runner: JobRunner) -> None:
    """Nothing but the marker."""
    turns["x"].outcome = lambda request: TurnResult()
    stopper = threading.Thread(target=lambda: (turns["x"].until_started(), runner.cancel_session("s1")))
    stopper.start()
    assert tools.agent("x", "x") == "[cancelled]"
    stopper.join()


# --- background ---------------------------------------------------------------------------------------------


def test_a_background_agent_is_an_id_at_once(tools: AgentTools, turns: Turns) -> None:
    """Scenario B: the caller goes on, looks, waits, and gets the reply with the final status."""
    job_id = background(tools, "long")
    turns["long"].until_started().partial("first findings")
    look = eventually(lambda: _running(tools, job_id))
    assert look.startswith(f"job {job_id}: running for ")
    assert look.endswith("(about long)\nYou will be told when it ends; there is no need to ask again.\n\n"
                         "So far:\nfirst findings")  # fmt: skip
    assert tools.job_output(job_id, timeout=1).startswith(f"job {job_id}: running")
    turns["long"].finish.set()
    line, _, text = tools.job_output(job_id[:8]).partition("\n\n")
    assert line.startswith(f"job {job_id}: completed after ")
    assert text == "did long"


def test_a_queued_job_has_nothing_to_show(tools: AgentTools, turns: Turns) -> None:
    """Its status, and that there is no need to ask."""
    for n in range(4):
        background(tools, f"busy {n}")
        turns[f"busy {n}"].until_started()
    assert ": queued for " in tools.job_output(background(tools, "later"), block=False)


def test_stopping_a_background_agent(tools: AgentTools, turns: Turns) -> None:
    """Scenario D: the answer comes at once; the end has the partial text and says why."""
    job_id = background(tools, "research")
    turns["research"].obeys = False
    turns["research"].outcome = lambda request: TurnResult(final_text="pages 1 to 3")
    turns["research"].until_started()
    assert tools.job_stop(job_id, "too slow") == {"ok": True, "status": "running"}
    assert "running, asked to stop" in tools.job_output(job_id, block=False)
    turns["research"].finish.set()
    text = tools.job_output(job_id)
    assert ": cancelled (too slow) after " in text
    assert text.endswith("\n\npages 1 to 3\n[cancelled]")


def test_stopping_what_has_ended_changes_nothing(tools: AgentTools, turns: Turns) -> None:
    """`ok` says whether the stop did anything."""
    turns.finish_at_once = True
    job_id = background(tools, "x")
    tools.job_output(job_id)
    assert tools.job_stop(job_id) == {"ok": False, "status": "completed"}


def test_a_list_shows_how_each_job_stands(tools: AgentTools, turns: Turns) -> None:
    """Newest first, as rows for a host and as lines for a model."""
    assert tools.call("list_jobs", {}) == "There are no jobs yet."
    first, second = background(tools, "one"), background(tools, "two")
    turns["two"].until_started()
    turns["one"].finish.set()
    tools.job_output(first)
    eventually(lambda: "running" in tools.list_jobs()[0]["status"])
    rows = tools.list_jobs()
    assert [(row["job_id"], row["kind"], row["status"], row["subject"]) for row in rows] == [
        (second, "agent", "running", "about two"),
        (first, "agent", "completed", "about one"),
    ]
    above, below = tools.call("list_jobs", None).splitlines()
    assert above.split()[:3] == [second[:8], "agent", "running"]
    assert below.startswith(f"{first[:8]}  agent  completed after ")
    assert below.endswith("about one")


def test_a_list_has_all_that_goes_on_and_the_newest_of_the_rest(tools: AgentTools, turns: Turns) -> None:
    """However old what goes on is."""
    old = background(tools, "old")
    turns["old"].until_started()
    turns.finish_at_once = False
    for n in range(25):
        turns[f"t{n}"].finish.set()
        tools.agent(f"t{n}", f"t{n}")
    rows = tools.list_jobs()
    assert rows[-1]["job_id"] == old
    assert [row["subject"] for row in rows[:-1]] == [f"t{n}" for n in range(24, 4, -1)]


# --- who may see what -----------------------------------------------------------------------------------------


def test_another_sessions_job_is_unknown_here(tools: AgentTools, runner: JobRunner, turns: Turns) -> None:
    """D6: it is not listed, read or stopped, and the answer is that of an id that nobody has."""
    theirs = background(AgentTools(runner, "s2"), "secret plan")
    mine = background(tools, "mine")
    for name in ("job_output", "job_stop"):
        text = tools.call(name, {"job_id": theirs})
        assert text.is_error
        assert text.startswith(f"[error] there is no job '{theirs}' here; there are:\n{mine[:8]}  agent  ")
        assert "secret" not in text
    assert [row["job_id"] for row in tools.list_jobs()] == [mine]
    assert runner.get(theirs).cancel_requested_at is None


def test_a_caller_in_another_session_sees_and_stops_its_job(tools: AgentTools, runner: JobRunner, turns: Turns) -> None:
    """D6: ownership by the session it runs in, or by the one that asked."""
    job = runner.submit(SpawnRequest(prompt="there", parent_session_id="s2", caller_session_id="s1"))
    turns["there"].until_started()
    assert [row["job_id"] for row in tools.list_jobs()] == [job.job_id]
    assert eventually(lambda: _running(tools, job.job_id)).startswith(f"job {job.job_id}: running")
    assert tools.job_stop(job.job_id)["ok"] is True
    assert "cancelled" in AgentTools(runner, "s2").job_output(job.job_id)


def test_an_ambiguous_id_is_answered_with_what_it_may_mean(runner: JobRunner, tools: AgentTools, turns: Turns) -> None:
    """And the beginning of an id that only one job of this session has is enough, whoever else has such ids."""
    ids = ["abcd0000-0000-4000-8000-00000000000" + n for n in "123"]
    for job_id, session_id in zip(ids, ("s1", "s2", "s1"), strict=True):
        runner.submit(SpawnRequest(prompt=job_id, parent_session_id=session_id, job_id=job_id))
    text = tools.call("job_output", {"job_id": "abcd"})
    assert text.is_error
    assert "more than one id" in text
    assert ids[0] in text
    assert ids[2] in text
    assert ids[1] not in text
    assert AgentTools(runner, "s2").job_output("abcd", block=False).startswith(f"job {ids[1]}")


@pytest.mark.parametrize("given", ["", "zz", "../..", "x" * 100, "1" * 37, "ab%", "\n"])
def test_what_cannot_be_an_id_is_answered_as_an_unknown_one(tools: AgentTools, given: str) -> None:
    """With the jobs there are."""
    text = tools.call("job_output", {"job_id": given})
    assert text.is_error
    assert "there are none yet" in text


def test_an_unknown_session_has_no_tools(runner: JobRunner) -> None:
    """Said when the tools are made, not at the first call."""
    with pytest.raises(errors.UnknownSession):
        AgentTools(runner, "s3")


# --- calls that come again ---------------------------------------------------------------------------------


ASK = {"prompt": "x", "description": "x"}


def test_a_call_that_is_made_again_gets_the_first_job(runner: JobRunner, turns: Turns) -> None:
    """The same message, tool call and request: one job, while it runs and after it ended."""
    tools = AgentTools(runner, "s1", caller_msg_id="m1")
    ask = {**ASK, "run_in_background": True}
    first = tools.call("agent", ask, "call_0").value["job_id"]
    turns["x"].until_started()
    assert AgentTools(runner, "s1", caller_msg_id="m1").call("agent", ask, "call_0").value["job_id"] == first
    turns["x"].finish.set()
    tools.job_output(first)
    assert tools.call("agent", ask, "call_0").value == {"job_id": first, "status": "completed", "output_file": None}
    assert turns.order == ["x"]


def test_a_foreground_call_that_is_made_again_gets_the_first_result(runner: JobRunner, turns: Turns) -> None:
    """The text of the first job, and the turn was taken once."""
    turns.finish_at_once = True
    tools = AgentTools(runner, "s1", caller_msg_id="m1")
    assert tools.call("agent", ASK, "call_0") == tools.call("agent", ASK, "call_0") == "did x"
    assert turns.order == ["x"]


def test_a_server_that_repeats_ids_gets_new_jobs(runner: JobRunner, turns: Turns, store: JobStore) -> None:
    """The same id with another request, or in another message, never gets an old answer."""
    turns.finish_at_once = True
    tools = AgentTools(runner, "s1", caller_msg_id="m1")
    assert tools.call("agent", ASK, "call_0") == "did x"
    assert tools.call("agent", {**ASK, "prompt": "y"}, "call_0") == "did y"
    assert tools.at("m2").call("agent", ASK, "call_0") == "did x"
    assert turns.order == ["x", "y", "x"]
    # And each of them can be made again.
    tools.call("agent", {**ASK, "prompt": "y"}, "call_0")
    tools.at("m2").call("agent", ASK, "call_0")
    assert turns.order == ["x", "y", "x"]


def test_without_a_message_every_call_is_a_new_job(tools: AgentTools, turns: Turns) -> None:
    """Nothing would tell a call that is made again from an id that is used again."""
    turns.finish_at_once = True
    tools.call("agent", ASK, "call_0")
    tools.call("agent", ASK, "call_0")
    assert turns.order == ["x", "x"]


@pytest.mark.parametrize("call_id", ["", "c" * 5000, "\ud800", "a\0b", "💥"])
def test_any_text_may_be_a_tool_call_id(runner: JobRunner, turns: Turns, call_id: str) -> None:
    """It comes from a model server; what is stored has a bound."""
    turns.finish_at_once = True
    tools = AgentTools(runner, "s1", caller_msg_id="m1")
    assert tools.call("agent", ASK, call_id) == tools.call("agent", ASK, call_id) == "did x"
    assert turns.order == ["x"]


# --- plans -----------------------------------------------------------------------------------------------------


def test_a_plan_of_ten_on_four_workers(runner: JobRunner, turns: Turns, store: JobStore) -> None:
    """D14: all are started at once, six of them wait, one fails, and the plan gets every status in its own order."""

    def fail(request: TurnRequest) -> TurnResult:
        raise LookupError("no sources")

    message = store.session("s1").append("assistant", "my plan")
    tools = AgentTools(runner, "s1", plan_mode=True, caller_msg_id=message.id)
    turns["t3"].outcome = fail
    ids = [background(tools, f"t{n}") for n in range(10)]
    for n in range(4):
        turns[f"t{n}"].until_started()
    eventually(lambda: _counted(tools) == {"running": 4, "queued": 6})
    assert tools.await_tasks(ids, timeout=1).startswith("0 of 10 have ended.\n\njob ")
    turns["t0"].finish.set()
    assert tools.await_tasks(ids, "any").startswith("1 of 10 have ended.")
    turns.finish_all()
    text = tools.await_tasks(ids, "all", 60_000)
    assert text.startswith("10 of 10 have ended.")
    reports = text.split("\n\njob ")[1:]
    assert [report[:36] for report in reports] == ids
    assert ": errored after " in reports[3]
    assert "[task error] LookupError: no sources" in reports[3]
    assert all("completed" in report for n, report in enumerate(reports) if n != 3)
    assert turns.most == 4
    assert {job.parent_msg_id for job in store.list("s1")} == {message.id}


def _counted(tools: AgentTools) -> dict[str, int]:
    statuses = [row["status"] for row in tools.list_jobs()]
    return {status: statuses.count(status) for status in set(statuses)}


def test_the_rest_of_a_plan_is_stopped_in_the_queue(runner: JobRunner, turns: Turns) -> None:
    """D14: what has not started ends at once and never runs."""
    tools = AgentTools(runner, "s1", plan_mode=True)
    ids = [background(tools, f"t{n}") for n in range(6)]
    for n in range(4):
        turns[f"t{n}"].until_started()
    assert tools.job_stop(ids[5], "enough") == {"ok": True, "status": "cancelled"}
    turns.finish_all()
    tools.await_tasks(ids)
    assert "t5" not in turns.order


def test_waiting_for_several_is_for_plans_only(tools: AgentTools, turns: Turns) -> None:
    """D10: absent from what a model is told, and refused when it is asked for all the same."""
    assert "await_tasks" not in tools.names
    job_id = background(tools, "x")
    text = tools.call("await_tasks", {"ids": [job_id]})
    assert text.is_error
    assert "there is no tool 'await_tasks'" in text
    with pytest.raises(errors.InvalidInput, match="for plans"):
        tools.await_tasks([job_id])


def test_many_results_share_one_answer(runner: JobRunner, turns: Turns) -> None:
    """Ten long results are ten shares of the limit."""
    turns.finish_at_once = True
    tools = AgentTools(runner, "s1", plan_mode=True, result_limit_chars=20_000)
    for n in range(10):
        turns[f"t{n}"].outcome = lambda request: TurnResult(final_text="z" * 50_000)
    text = tools.await_tasks([background(tools, f"t{n}") for n in range(10)])
    assert 20_000 < len(text) < 23_000
    assert text.count("48,000 characters left out here") == 10


# --- long results ----------------------------------------------------------------------------------------------


def test_a_long_result_is_cut_in_the_middle(runner: JobRunner, turns: Turns) -> None:
    """Beginning, end, and how much is missing; a store in memory says that it has no file."""
    turns.finish_at_once = True
    turns["x"].outcome = lambda request: TurnResult(final_text="a" * 60 + "b" * 60)
    tools = AgentTools(runner, "s1", result_limit_chars=100)
    text = tools.agent("x", "x")
    assert text == (
        "a" * 50 + "\n[20 characters left out here; the store is in memory and has no file with the whole]\n" + "b" * 50
    )


def test_the_whole_of_a_cut_result_is_in_the_file_that_is_named(turns: Turns, tmp_path: Path) -> None:
    """In the foreground and in the background; a background job's file is there before anybody hears of its end."""
    whole = "".join(f"line {n}\n" for n in range(10_000))
    turns.finish_at_once = True
    turns["x"].outcome = lambda request: TurnResult(final_text=whole)
    with GitJobStore(tmp_path / "home", durability="relaxed") as store, JobRunner(store, 2, turns) as runner:
        store.create_session("s1")
        tools = AgentTools(runner, "s1")
        text = tools.agent("x", "x")
        assert isinstance(text, str)
        path = Path(text.partition("the whole is in ")[2].partition("]\n")[0])
        assert path.read_text() == whole
        assert path.stat().st_mode & 0o077 == 0
        seen: list[bool] = []
        with runner.subscribe(on_event=lambda: seen.append(True)):
            started = tools.agent("x", "x", run_in_background=True)
            assert isinstance(started, dict)
            runner.await_job(started["job_id"])
            assert Path(started["output_file"]).read_text() == whole
        assert started["output_file"] in tools.job_output(started["job_id"])


def test_a_file_has_an_end_of_any_kind(turns: Turns, tmp_path: Path) -> None:
    """What is in the file is what the tool would say."""
    turns.finish_at_once = True
    turns["x"].outcome = lambda request: TurnResult(error="no luck")
    with GitJobStore(tmp_path / "home", durability="relaxed") as store, JobRunner(store, 2, turns) as runner:
        store.create_session("s1")
        started = AgentTools(runner, "s1").agent("x", "x", run_in_background=True)
        assert isinstance(started, dict)
        runner.await_job(started["job_id"])
        assert Path(started["output_file"]).read_text() == "[task error] no luck"


# --- calls by name -----------------------------------------------------------------------------------------------


def test_an_unknown_tool_is_answered_with_those_there_are(tools: AgentTools) -> None:
    """A text, not an exception."""
    text = tools.call("spawn", {})
    assert text == "[error] there is no tool 'spawn'; there are agent, job_output, list_jobs, job_stop"
    assert text.is_error
    assert isinstance(text, ToolText)


@pytest.mark.parametrize("name", ["_spawn", "call", "definitions", "__init__", "at", "slash", ""])
def test_only_tools_can_be_called(tools: AgentTools, name: str) -> None:
    """A name from a model never reaches another method."""
    assert tools.call(name, {}).is_error


def test_wrong_arguments_start_nothing(tools: AgentTools, store: JobStore) -> None:
    """Every refusal is before the first effect."""
    for arguments in ("{", "[]", {}, {"prompt": "x"}, {**ASK, "context": "none"}, {**ASK, "agent": "x"}):
        assert tools.call("agent", arguments).is_error
    assert store.list("s1") == []


def test_arguments_may_be_json(tools: AgentTools, turns: Turns) -> None:
    """As some providers send them."""
    turns.finish_at_once = True
    assert tools.call("agent", '{"prompt": "x", "description": "y", "agent_id": null}') == "did x"


def test_a_closed_runner_is_told(store: JobStore, turns: Turns) -> None:
    """A refusal of the runner is a text, too."""
    runner = JobRunner(store, 1, turns)
    tools = AgentTools(runner, "s1")
    runner.shutdown()
    text = tools.call("agent", ASK)
    assert text.is_error
    assert "takes no more jobs" in text


def test_an_unknown_agent_is_answered_with_those_there_are(store: JobStore, turns: Turns) -> None:
    """Without a word about configuration files, which are no business of a model's."""
    profiles = Profiles()
    profiles.register("main", turns)
    profiles.register("critic", turns)
    with profiles, JobRunner(store, 1, profiles=profiles) as runner:
        text = AgentTools(runner, "s1").call("agent", {**ASK, "agent_id": "critc"})
        assert text.is_error
        assert text.startswith("[error] there is no agent 'critc'; there are ")
        assert "critic" in text
        assert "\n" not in text


def test_a_model_cannot_name_the_profile_that_runs_commands(store: JobStore, turns: Turns) -> None:
    """R10: a prompt becomes a command, or the argument of a program, only where the host lists the profile itself."""
    profiles = Profiles()
    profiles.register("main", turns)
    with profiles, JobRunner(store, 1, profiles=profiles) as runner:
        for name in ("shell", "claude", "codex"):
            text = AgentTools(runner, "s1").call("agent", {**ASK, "agent_id": name})
            assert text == f"[error] there is no agent '{name}'; there are main"
        assert store.list("s1") == []
        tools = AgentTools(runner, "s1", agents=["shell"])
        assert tools.call("agent", {"prompt": "echo hi", "description": "x", "agent_id": "shell"}) == "hi"


def test_a_host_can_say_which_agents_there_are(runner: JobRunner, turns: Turns) -> None:
    """They are in the definition, and no other is taken."""
    turns.finish_at_once = True
    tools = AgentTools(runner, "s1", agents=["main", "critic"])
    schema = tools.definitions("anthropic")[0]["input_schema"]["properties"]["agent_id"]
    assert schema["enum"] == ["main", "critic"]
    assert '"main" or "critic"' in tools.call("agent", {**ASK, "agent_id": "other"})
    assert tools.call("agent", {**ASK, "agent_id": "critic"}) == "did x"
    AgentTools(runner, "s1", agents=["critic", "main"]).agent("x", "x")
    assert runner.list("s1")[0].agent_id == "critic"  # the first is the usual one
    with pytest.raises(errors.UnknownAgent, match="there are main, critic"):
        tools.agent("x", "x", agent_id="other")


def test_context_and_place(runner: JobRunner, turns: Turns, store: JobStore) -> None:
    """The card hangs on the caller's message; a message that is not the session's is only part of the key."""
    turns.finish_at_once = True
    session = store.session("s1")
    message = session.append("assistant", "I will look")
    session.append("user", "go on")
    AgentTools(runner, "s1", caller_msg_id=message.id).agent("x", "x", context="clean")
    AgentTools(runner, "s1", caller_msg_id="of-the-host").agent("x", "x")
    second, first = store.list("s1")
    assert (first.parent_msg_id, first.context_mode.value) == (message.id, "clean")
    assert second.parent_msg_id == session.head_id


# --- definitions ---------------------------------------------------------------------------------------------------


def test_the_definitions_are_the_methods(runner: JobRunner) -> None:
    """D10: three tools and the list; one more for plans; a shell only where there is one."""
    assert AgentTools(runner, "s1").names == ["agent", "job_output", "list_jobs", "job_stop"]
    tools = AgentTools(runner, "s1", plan_mode=True)
    assert tools.names == ["agent", "job_output", "list_jobs", "job_stop", "await_tasks"]
    for made in tools.definitions("mcp"):
        method = getattr(AgentTools, made["name"])
        assert list(made["inputSchema"]["properties"]) == list(inspect.signature(method).parameters)[1:]
    with pytest.raises(errors.InvalidInput):
        tools.definitions("toml")  # type: ignore[arg-type]


def test_the_signatures_are_those_of_the_specification() -> None:
    """D10 and D15: names, order and defaults."""

    def shape(method: Any) -> list[tuple[str, Any]]:
        parameters = list(inspect.signature(method).parameters.values())[1:]
        return [(each.name, "…" if each.default is each.empty else each.default) for each in parameters]

    assert shape(AgentTools.agent) == [
        ("prompt", "…"), ("description", "…"), ("agent_id", None), ("context", None), ("run_in_background", False)
    ]  # fmt: skip
    assert shape(AgentTools.job_output) == [("job_id", "…"), ("block", True), ("timeout", 30_000)]
    assert shape(AgentTools.list_jobs) == []
    assert shape(AgentTools.job_stop) == [("job_id", "…"), ("reason", None)]
    assert shape(AgentTools.await_tasks) == [("ids", "…"), ("mode", "all"), ("timeout", 30_000)]
    assert shape(AgentTools.shell) == [
        ("command", "…"), ("description", None), ("run_in_background", False), ("timeout", None)
    ]  # fmt: skip


def test_the_texts_say_when_and_how() -> None:
    """D15: both modes and when to use which, that nobody need poll, and what the ids are."""
    text = inspect.getdoc(AgentTools.agent) or ""
    flat = " ".join(text.split())
    for said in (
        "Use run_in_background for",
        "You will be told when it ends",
        "returns a job_id",
        "job_output",
        "job_stop",
    ):
        assert said in flat
    assert "list_jobs shows all" in " ".join((inspect.getdoc(AgentTools.job_output) or "").split())


# --- typed by a person -----------------------------------------------------------------------------------------


def test_a_task_that_is_typed(tools: AgentTools, turns: Turns, store: JobStore) -> None:
    """D7: `/task` is an id at once, `/task --sync` the result."""
    turns["probe X"].finish.set()
    assert tools.slash("/task --sync probe X") == "did probe X"
    turns["two\nlines"].finish.set()
    started = tools.slash("  /task two\nlines ")
    assert isinstance(started, dict)
    assert tools.job_output(started["job_id"]).endswith("did two\nlines")
    assert store.list("s1")[0].subject == "two lines"


def test_a_labelled_spawn_that_is_typed(tools: AgentTools, turns: Turns, store: JobStore) -> None:
    """`/spawn label: prompt`: the label is what lists show; the prompt may have colons."""
    started = tools.slash("/spawn the cache: probe X: all of it")
    assert isinstance(started, dict)
    job = store.get(started["job_id"])
    assert (job.subject, job.description) == ("the cache", "probe X: all of it")


@pytest.mark.parametrize(
    "line",
    ["", "hello", "/", "/task", "/task --sync", "/task --sync  ", "/task --synch x", "/spawn", "/spawn x", "/spawn : x",
     "/spawn x:", "/spawn x:  ", "/stop x", "/tasks x"],
)  # fmt: skip
def test_what_cannot_be_understood_is_answered_with_the_usage(tools: AgentTools, store: JobStore, line: str) -> None:
    """And starts nothing."""
    with pytest.raises(errors.InvalidInput, match=r"type /task \[--sync\] PROMPT, or /spawn LABEL: PROMPT"):
        tools.slash(line)
    assert store.list("s1") == []


# --- what need not be told again -----------------------------------------------------------------------------------


def test_an_end_that_was_read_is_not_told_again(tools: AgentTools, runner: JobRunner, turns: Turns) -> None:
    """`job_output` before the notice is delivered consumes it; an end that nobody read is told."""
    turns.finish_at_once = True
    read, unread = background(tools, "read"), background(tools, "unread")
    runner.await_tasks([read, unread])
    tools.job_output(read, block=False)
    assert [notice.id for notice in runner.notices.pending("s1")] == [unread]
    assert runner.notices.deliver("s1") is not None


def test_a_foreground_agent_is_never_told_of(tools: AgentTools, runner: JobRunner, turns: Turns) -> None:
    """Its result was the answer."""
    turns.finish_at_once = True
    tools.agent("x", "x")
    assert runner.notices.pending("s1") == []
    assert runner.notices.deliver("s1") is None


def test_a_look_at_a_running_job_does_not_use_up_its_notice(tools: AgentTools, runner: JobRunner, turns: Turns) -> None:
    """Only an end that was shown was read."""
    job_id = background(tools, "x")
    tools.job_output(job_id, block=False)
    tools.list_jobs()
    turns["x"].finish.set()
    runner.await_job(job_id)
    assert [notice.id for notice in runner.notices.pending("s1")] == [job_id]


# --- the edges -------------------------------------------------------------------------------------------------------


def test_ctrl_c_stops_the_job_that_the_caller_waits_for(tools: AgentTools, turns: Turns, runner: JobRunner) -> None:
    """An interrupted call leaves no job behind that nobody would read."""

    def interrupt() -> None:
        live = runner._roster.jobs[turns["x"].until_started().job_id]
        eventually(lambda: live.waiters)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        tools.agent("x", "x")
    interrupter.join()
    (job,) = runner.list("s1")
    assert runner.await_job(job.job_id).status is JobStatus.CANCELLED


def test_a_list_stays_readable_with_very_many_jobs(store: JobStore) -> None:
    """The newest hundred of those that wait, and the answer to a wrong id names ten."""
    turns = Turns()
    with JobRunner(store, 1, turns) as runner:
        tools = AgentTools(runner, "s1")
        for n in range(150):
            runner.submit_later(SpawnRequest(prompt=f"t{n}", parent_session_id="s1"))
        eventually(lambda: runner.stats().queued == 149)
        assert len(tools.list_jobs()) == 100
        assert len(tools.call("job_output", {"job_id": "f" * 36}).splitlines()) == 11
        runner.cancel_session("s1")


@pytest.mark.parametrize("prompt", ["\ud800", "a" * 300_000, "\0", "\x1b[2J"])
def test_any_text_may_be_a_prompt(tools: AgentTools, turns: Turns, prompt: str) -> None:
    """What cannot be stored is refused with a text; anything else arrives as it is."""
    turns.finish_at_once = True
    text = tools.call("agent", {"prompt": prompt, "description": prompt})
    assert ("not valid Unicode" in text) if prompt == "\ud800" else (not text.is_error)


def test_a_file_that_cannot_be_written_is_told_where_it_matters(
    turns: Turns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job runs and its id comes back; only the answer that is cut says that there is no file."""
    turns.finish_at_once = True
    turns["x"].outcome = lambda request: TurnResult(final_text="y" * 1000)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with GitJobStore(tmp_path / "home", durability="relaxed") as store, JobRunner(store, 2, turns) as runner:
        store.create_session("s1")
        monkeypatch.setattr("openjobs.durable.Disk.replace", full)
        tools = AgentTools(runner, "s1", result_limit_chars=100, caller_msg_id="m1")
        started = tools.call("agent", {**ASK, "run_in_background": True}, "call_0")
        assert not started.is_error
        job_id = started.value["job_id"]
        runner.await_job(job_id)
        assert tools.call("agent", {**ASK, "run_in_background": True}, "call_0").value["job_id"] == job_id
        assert "the file with the whole could not be written: No space left" in tools.job_output(job_id)
        assert not Path(started.value["output_file"]).exists()
