"""The tools over the Model Context Protocol: the library's own client in this process, and a real server process that
is spoken to in plain messages, as any client writes them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client

from openjobs import GitJobStore, JobRunner, JobStatus, MockTaskStore
from openjobs.integrations.mcp import server_of
from openjobs.tools import AgentTools
from tests.support import eventually
from tests.support.turns import PATIENCE_S, Turns

ROOT = Path(__file__).parents[2]
#: an agent that runs its prompt, so that a test says what it does
PROFILE = '[profiles.main]\ncommand = ["sh", "-c", "{prompt}"]\n'
ASK = {"prompt": "x", "description": "about x"}


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def tools(turns: Turns) -> Iterator[AgentTools]:
    with MockTaskStore() as store:
        store.create_session("s1")
        with JobRunner(store, 4, turns) as runner:
            yield AgentTools(runner, "s1")
            turns.finish_all()


def texts(result: Any) -> list[str]:
    return [each.text for each in result.content]


def talk(tools: AgentTools, what: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with Client(server_of(tools)) as client:
            await what(client)

    asyncio.run(main())


def test_a_client_is_told_what_definitions_say(tools: AgentTools) -> None:
    """Names, descriptions and schemas, and how news comes."""

    async def what(client: Client) -> None:
        found = (await client.list_tools()).tools
        assert [
            {"name": each.name, "description": each.description, "inputSchema": each.input_schema} for each in found
        ] == tools.definitions("mcp")

    talk(tools, what)


def test_calls_and_refusals(tools: AgentTools, turns: Turns) -> None:
    """What is refused is an error that the model reads, not one of the protocol."""
    turns.finish_at_once = True

    async def what(client: Client) -> None:
        answer = await client.call_tool("agent", ASK)
        assert (texts(answer), answer.is_error) == (["did x"], False)
        for name, arguments in (("agent", {"prompt": "x"}), ("job_output", {"job_id": "zz"}), ("nothing", {})):
            answer = await client.call_tool(name, arguments)
            assert answer.is_error
            assert texts(answer)[0].startswith("[error] ")

    talk(tools, what)


def test_what_has_ended_is_told_with_the_next_answer(tools: AgentTools, turns: Turns) -> None:
    """Once; an end that the model reads by itself is not told."""

    async def start(client: Client, prompt: str) -> str:
        started = await client.call_tool("agent", {**ASK, "prompt": prompt, "run_in_background": True})
        job_id: str = json.loads(texts(started)[0])["job_id"]
        turns[prompt].finish.set()
        await asyncio.to_thread(tools.runner.await_job, job_id)
        return job_id

    async def what(client: Client) -> None:
        job_id = await start(client, "x")
        answer = texts(await client.call_tool("list_jobs", {}))
        assert len(answer) == 2
        assert answer[1].startswith(f'Background work has ended:\n- job {job_id} completed: "about x": did x')
        assert len(texts(await client.call_tool("list_jobs", {}))) == 1
        assert len(texts(await client.call_tool("job_output", {"job_id": await start(client, "y")}))) == 1

    talk(tools, what)


def test_a_request_that_the_client_cancels(tools: AgentTools, turns: Turns) -> None:
    """Its foreground agent ends with it, and the server goes on."""

    async def what(client: Client) -> None:
        call = asyncio.create_task(client.call_tool("agent", ASK))
        assert await asyncio.to_thread(turns["x"].started.wait, PATIENCE_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(turns["x"].saw_cancel.wait, PATIENCE_S)
        assert not (await client.call_tool("list_jobs", {})).is_error

    talk(tools, what)
    (job,) = tools.runner.list("s1")
    assert tools.runner.await_job(job.job_id, PATIENCE_S).status is JobStatus.CANCELLED


# --- a process over stdio ----------------------------------------------------------------------------------------


class Server:
    """`ask` sends one request and gives its result."""

    def __init__(self, home: Path, *options: str) -> None:
        home.mkdir(mode=0o700, exist_ok=True)
        (home / "config.toml").write_text(PROFILE)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "openjobs", "mcp", "--home", str(home), "--session", "s1", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._next = 0

    def begin(self) -> None:
        about = self.ask(
            "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "x", "version": "1"}
        )
        assert "told with the answer to your next call" in about["instructions"]
        self._write({"method": "notifications/initialized"})

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        self._write({"id": self._next, "method": method, "params": params})
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if message.get("id") == self._next and "result" in message:
                return dict(message["result"])
        raise AssertionError("the server ended")

    def call(self, name: str, **arguments: Any) -> str:
        result = self.ask("tools/call", name=name, arguments=arguments)
        assert not result.get("isError"), result
        return str(result["content"][0]["text"])

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Its exit code, after the end of its input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of one home; each ends with the test."""
    started: list[Server] = []

    def start(*options: str) -> Server:
        started.append(Server(tmp_path / "home", *options))
        started[-1].begin()
        return started[-1]

    yield start
    for server in started:
        server.end()


@pytest.mark.timeout(180)
def test_a_server_process_until_its_input_ends(start: Callable[..., Server], tmp_path: Path) -> None:
    """Agents from the home's configuration and commands; what still runs at the end is ended and written down."""
    server = start("--shell", "--plan")
    names = [tool["name"] for tool in server.ask("tools/list")["tools"]]
    assert names == ["agent", "job_output", "list_jobs", "job_stop", "await_tasks", "shell"]
    assert server.call("shell", command="echo hi; exit 2") == "hi\n[exit code 2]"
    assert server.call("agent", prompt="echo found", description="x") == "found"
    left = json.loads(server.call("agent", prompt="exec sleep 60", description="left", run_in_background=True))
    with GitJobStore(tmp_path / "home") as store:
        eventually(lambda: store.get(left["job_id"]).status is JobStatus.RUNNING, PATIENCE_S)
        assert server.end() == 0
        job = store.get(left["job_id"])
    assert (job.status, job.cancel_reason) == (JobStatus.CANCELLED, "shutdown")


@pytest.mark.timeout(180)
def test_a_signal_ends_a_server_process_in_order(start: Callable[..., Server], tmp_path: Path) -> None:
    """Although a thread of the library's waits for input; only the agents that were named can be used."""
    server = start("--agent", "echo")
    agent = server.ask("tools/list")["tools"][0]
    assert agent["inputSchema"]["properties"]["agent_id"]["enum"] == ["echo"]
    assert server.call("agent", prompt="exec sleep 60", description="x") == "exec sleep 60"
    refused = server.ask("tools/call", name="agent", arguments={**ASK, "agent_id": "main"})
    assert refused["isError"]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    with GitJobStore(tmp_path / "home") as store:
        assert [job.status for job in store.list("s1")] == [JobStatus.COMPLETED]
        assert store.leases.dead() == []  # nothing is left to recovery


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing openjobs never needs it; importing the server says what to install."""
    monkeypatch.delitem(sys.modules, "openjobs.integrations.mcp", raising=False)
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    with pytest.raises(ImportError, match=r"pip install 'openjobs-git\[mcp\]'"):
        import openjobs.integrations.mcp  # noqa: F401
