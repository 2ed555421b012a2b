"""A real agent loop, offline: pydantic-ai's own loop with models that are functions, on a real runner."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.models.test import TestModel

from openjobs import GitJobStore, JobRunner, JobStatus, SpawnRequest
from openjobs.agents import Profiles
from openjobs.integrations.pydantic_ai import JobTools, job_turn
from openjobs.tools import AgentTools
from tests.support import eventually

PATIENCE_S = 30.0
#: a step of a model: what it answers to what the tools returned last
Step = Callable[[list[str]], list[ToolCallPart] | str]


def call(name: str, call_id: str | None = None, **arguments: Any) -> ToolCallPart:
    return ToolCallPart(name, arguments, tool_call_id=call_id or f"call_{name}_{json.dumps(arguments)[:60]}")


def spawn(prompt: str, **more: Any) -> ToolCallPart:
    return call("agent", prompt=prompt, description=f"about {prompt}", **more)


def script(*steps: Step) -> FunctionModel:
    """A model that walks through steps, each given the answers to the calls of the one before."""

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        requests = [m for m in messages if isinstance(m, ModelRequest)]
        returned = [str(part.content) for part in requests[-1].parts if isinstance(part, ToolReturnPart)]
        done = sum(
            1 for m in messages if isinstance(m, ModelResponse) and any(isinstance(p, ToolCallPart) for p in m.parts)
        )
        said = steps[done](returned)
        return ModelResponse(parts=[TextPart(said)] if isinstance(said, str) else said)

    return FunctionModel(answer)


def last_prompt(messages: list[ModelMessage]) -> str:
    parts = [part for m in messages if isinstance(m, ModelRequest) for part in m.parts]
    return str([part.content for part in parts if isinstance(part, UserPromptPart)][-1])


def echo_agent(before: Callable[[str], object] = lambda prompt: None) -> Agent[None, str]:
    """Answers with its prompt in capitals."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        prompt = last_prompt(messages)
        await asyncio.to_thread(before, prompt)
        return ModelResponse(parts=[TextPart(prompt.upper())])

    return Agent(FunctionModel(answer))


class Host:
    def __init__(self, home: Path) -> None:
        self.store = GitJobStore(home, durability="relaxed")
        self.store.create_session("s1")
        self.profiles = Profiles()
        self.runner = JobRunner(self.store, 4, profiles=self.profiles)

    def tools(self, **options: Any) -> AgentTools:
        return AgentTools(self.runner, "s1", **options)

    def run(self, model: FunctionModel | TestModel, prompt: str = "go", **options: Any) -> str:
        return str(asyncio.run(Agent(model).run(prompt, toolsets=[JobTools(self.tools(**options))])).output)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "home")
    with host.store, host.profiles, host.runner:
        yield host
    assert not host.runner._roster.jobs


def test_a_model_that_calls_every_tool_with_anything(host: Host) -> None:
    """pydantic-ai's own test model makes arguments from the schemas; every answer is a text, wrong ids included."""
    host.profiles.register("main", job_turn(echo_agent(), stream=False))
    text = host.run(TestModel(), plan_mode=True)
    answers = json.loads(text)
    assert answers["agent"] == "A"
    assert answers["job_output"].startswith("[error] there is no job 'a' here") or "job " in answers["job_output"]
    assert answers["list_jobs"]
    assert set(answers) == {"agent", "job_output", "list_jobs", "job_stop", "await_tasks"}


def test_the_framework_tells_a_model_what_we_say(host: Host) -> None:
    """Names, descriptions and schemas arrive as `definitions` has them."""
    seen: list[dict[str, Any]] = []

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.extend(
            {"name": t.name, "description": t.description, "inputSchema": t.parameters_json_schema}
            for t in info.function_tools
        )
        return ModelResponse(parts=[TextPart("done")])

    host.run(FunctionModel(answer))
    assert seen == host.tools().definitions("mcp")


def test_a_foreground_agent_is_another_agents_loop(host: Host) -> None:
    """Scenario A: one loop calls, another one answers, and the job between them keeps its usage."""
    host.profiles.register("main", job_turn(echo_agent(), stream=False))
    text = host.run(script(lambda _: [spawn("probe x")], lambda returned: f"it said {returned}"))
    assert text == "it said ['PROBE X']"
    (job,) = host.store.list("s1")
    assert job.usage is not None
    assert job.usage["requests"] == 1
    assert job.usage["output_tokens"] > 0


def test_parallel_background_agents(host: Host) -> None:
    """Three at the same time, each read by its id: they run together, and the answers are their own."""
    together = threading.Barrier(3)
    host.profiles.register("main", job_turn(echo_agent(lambda prompt: together.wait(PATIENCE_S)), stream=False))
    ids: list[str] = []

    def read(returned: list[str]) -> list[ToolCallPart]:
        ids.extend(json.loads(each)["job_id"] for each in returned)
        return [call("job_output", job_id=job_id) for job_id in ids]

    text = host.run(
        script(
            lambda _: [spawn(f"part {n}", run_in_background=True) for n in range(3)],
            read,
            lambda returned: "\n".join(returned),
        )
    )
    assert [line for line in text.splitlines() if line.isupper()] == ["PART 0", "PART 1", "PART 2"]
    assert text.count(": completed after ") == 3
    assert host.runner.notices.pending("s1") == []


def test_parallel_foreground_agents(host: Host) -> None:
    """Several calls in one response wait together, not one after the other."""
    together = threading.Barrier(4)
    host.profiles.register("main", job_turn(echo_agent(lambda prompt: together.wait(PATIENCE_S)), stream=False))
    text = host.run(script(lambda _: [spawn(f"part {n}") for n in range(4)], lambda returned: "+".join(returned)))
    assert text == "PART 0+PART 1+PART 2+PART 3"


def test_a_plan_of_ten_jobs_on_four_workers(host: Host) -> None:
    """D14: ten are spawned, four run, one fails; the plan waits once and has them all."""
    now, most = [0], [0]
    lock = threading.Lock()
    four = threading.Event()

    def before(prompt: str) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 4:
                four.set()
        assert four.wait(PATIENCE_S)
        with lock:
            now[0] -= 1
        if prompt == "task 3":
            raise LookupError("no sources")

    host.profiles.register("main", job_turn(echo_agent(before), stream=False))
    text = host.run(
        script(
            lambda _: [spawn(f"task {n}", run_in_background=True) for n in range(10)],
            lambda returned: [call("await_tasks", ids=[json.loads(r)["job_id"] for r in returned], timeout=60_000)],
            lambda returned: returned[0],
        ),
        plan_mode=True,
    )
    assert text.startswith("10 of 10 have ended.")
    assert [f"TASK {n}" in text for n in range(10)] == [n != 3 for n in range(10)]
    assert "[task error] LookupError: no sources" in text
    assert most[0] == 4


def test_a_run_that_is_cancelled_takes_its_foreground_agent_with_it(host: Host) -> None:
    """The host stops the loop in the middle of the tool call."""
    begun, never = threading.Event(), threading.Event()

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        begun.set()
        await asyncio.sleep(PATIENCE_S)
        never.set()
        return ModelResponse(parts=[TextPart("never")])

    host.profiles.register("main", job_turn(Agent(FunctionModel(answer)), stream=False))

    async def main() -> None:
        agent = Agent(script(lambda _: [spawn("long")]))
        run = asyncio.create_task(agent.run("go", toolsets=[JobTools(host.tools())]))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(main())
    (job,) = host.store.list("s1")
    assert host.runner.await_job(job.job_id, PATIENCE_S).status is JobStatus.CANCELLED
    assert not never.is_set()


def test_a_job_that_is_cancelled_in_the_middle_of_its_answer(host: Host) -> None:
    """D5: the stream is left at its next chunk, and what had come is kept."""
    begun = threading.Event()

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        yield "the first "
        yield "half"
        begun.set()
        await asyncio.sleep(PATIENCE_S)
        yield " and the rest"

    host.profiles.register("main", job_turn(Agent(FunctionModel(stream_function=stream))))
    started = host.tools().agent("x", "x", run_in_background=True)
    assert isinstance(started, dict)
    assert begun.wait(PATIENCE_S)
    eventually(lambda: host.runner.get(started["job_id"]).result_text == "the first half")
    host.tools().job_stop(started["job_id"], "enough")
    assert host.tools().job_output(started["job_id"]).endswith("the first half\n[cancelled]")


def test_a_job_that_is_cancelled_while_its_own_agent_waits_for_another(host: Host) -> None:
    """The loop, the child's loop, and everything under it end."""
    begun = threading.Event()

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if last_prompt(messages) == "outer":
            return ModelResponse(parts=[spawn("inner")])
        begun.set()
        await asyncio.sleep(PATIENCE_S)
        return ModelResponse(parts=[TextPart("never")])

    host.profiles.register("main", job_turn(Agent(FunctionModel(answer)), stream=False))
    job = host.runner.submit(SpawnRequest(prompt="outer", parent_session_id="s1"))
    assert begun.wait(PATIENCE_S)
    host.runner.cancel(job.job_id)
    assert host.runner.await_job(job.job_id, PATIENCE_S).status is JobStatus.CANCELLED
    assert host.runner.wait_idle(PATIENCE_S)
    assert {each.status for each in host.store.list("s1")} == {JobStatus.CANCELLED}
    assert len(host.store.list("s1")) == 2


def test_agents_that_start_agents_have_a_bound(host: Host) -> None:
    """Each of them has the tools of its job; the deepest is told to do the work itself."""

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        parts = messages[-1].parts
        if any(isinstance(part, ToolReturnPart) for part in parts):
            return ModelResponse(parts=[TextPart(str(parts[0].content))])  # type: ignore[union-attr]
        return ModelResponse(parts=[spawn("deeper")])

    host.profiles.register("main", job_turn(Agent(FunctionModel(answer)), stream=False))
    assert host.tools().agent("dig", "dig") == (
        "[error] agents are nested 5 deep here, and may not be nested deeper: do this part yourself"
    )
    assert len(host.store.list("s1")) == 5


def test_a_run_that_is_resumed_gets_the_first_jobs(host: Host) -> None:
    """A host that died before it had the answers runs on from its messages: nothing is started twice."""
    ran: list[str] = []
    host.profiles.register("main", job_turn(echo_agent(ran.append), stream=False))
    pending = ModelResponse(parts=[spawn("one"), spawn("two")])
    history: list[ModelMessage] = [ModelRequest(parts=[UserPromptPart("go")]), pending]
    kept = ModelMessagesTypeAdapter.dump_json(history)

    def resume() -> str:
        agent = Agent(script(lambda _: [], lambda returned: "+".join(returned)))
        messages = ModelMessagesTypeAdapter.validate_json(kept)
        return str(asyncio.run(agent.run(message_history=messages, toolsets=[JobTools(host.tools())])).output)

    assert resume() == resume() == "ONE+TWO"
    assert sorted(ran) == ["one", "two"]


def test_the_same_call_in_a_later_response_is_a_new_job(host: Host) -> None:
    """Even where a server repeats its ids: an old answer is never given."""
    ran: list[str] = []
    host.profiles.register("main", job_turn(echo_agent(ran.append), stream=False))
    again: Step = lambda _: [call("agent", "call_0", prompt="test", description="test")]  # noqa: E731
    host.run(script(again, again, lambda returned: returned[0]))
    assert ran == ["test", "test"]


def test_what_a_job_sees_of_its_conversation(host: Host) -> None:
    """The messages of its branch in their roles; with a clean context only the prompt."""
    seen: list[list[tuple[str, str]]] = []

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append([(type(part).__name__, str(part.content)) for m in messages for part in m.parts])  # type: ignore[union-attr]
        return ModelResponse(parts=[TextPart("done")])

    session = host.store.session("s1")
    session.append("system", "be brief")
    session.append("user", "hello")
    session.append("assistant", "hi")
    host.profiles.register("main", job_turn(Agent(FunctionModel(answer)), stream=False))
    host.tools().agent("task", "t")
    host.tools().agent("task", "t", context="clean")
    system, user, text = SystemPromptPart.__name__, UserPromptPart.__name__, TextPart.__name__
    assert seen[0] == [(system, "be brief"), (user, "hello"), (text, "hi"), (user, "task")]
    assert seen[1] == [(user, "task")]


def test_a_structured_answer_is_json(host: Host) -> None:
    """An agent with an output type gives its fields."""

    class Answer(BaseModel):
        good: bool
        why: str

    agent: Agent[None, Answer] = Agent(TestModel(custom_output_args={"good": True, "why": "it is"}), output_type=Answer)
    host.profiles.register("main", job_turn(agent, tools=lambda request: None, stream=False))
    text = host.tools().agent("x", "x")
    assert isinstance(text, str)
    assert json.loads(text) == {"good": True, "why": "it is"}


def test_what_a_model_raises_is_the_jobs_error(host: Host) -> None:
    """`[task error] type: message`, as with any other turn."""

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        raise ConnectionError("the provider is down")

    host.profiles.register("main", job_turn(Agent(FunctionModel(answer)), stream=False))
    assert host.tools().agent("x", "x") == "[task error] ConnectionError: the provider is down"


def test_a_streaming_model_can_call_tools_too(host: Host) -> None:
    """Text, then a call, then text: the partial text is that of the newest response."""

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
        if isinstance(messages[-1].parts[0], ToolReturnPart):
            yield "listed"
        else:
            yield {0: DeltaToolCall(name="list_jobs", json_args="{}", tool_call_id="c1")}

    host.profiles.register("main", job_turn(Agent(FunctionModel(stream_function=stream))))
    assert host.tools().agent("x", "x") == "listed"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing openjobs never needs it; importing the adapter says what to install."""
    monkeypatch.delitem(sys.modules, "openjobs.integrations.pydantic_ai")
    monkeypatch.setitem(sys.modules, "pydantic_ai", None)
    with pytest.raises(ImportError, match=r"pip install 'openjobs-git\[pydantic-ai\]'"):
        import openjobs.integrations.pydantic_ai  # noqa: F401
