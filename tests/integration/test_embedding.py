"""docs/embedding.md: the host in 40 lines and every other piece of code on the page are run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_ai.models.test import TestModel

from openjobs import GitJobStore, JobClient, JobRunner
from openjobs.jobs import Job
from openjobs.processes import ProcessSupervisor
from openjobs.tools import AgentTools
from tests.support import eventually
from tests.support.turns import Turns

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "embedding.md").read_text()
PATIENCE_S = 30.0

#: a model that a test can foresee, in the place of a provider's
PROVIDER = """
import time

def call(name, **arguments):
    return {"content": "", "tool_calls": [{"id": "call_0", "name": name, "arguments": arguments}]}

def complete(messages, tools):
    assert [tool["function"]["name"] for tool in tools] == ["agent", "job_output", "list_jobs", "job_stop"]
    last = messages[-1]
    if last["role"] == "tool" and "busy" not in messages[-2]["content"]:
        text = "the agent says: " + last["content"]
    elif "research" in last["content"]:
        return call("agent", prompt="look at X", description="look at X")
    elif "start" in last["content"]:
        return call("agent", prompt="look at Y", description="look at Y", run_in_background=True)
    elif any("busy" in message["content"] for message in messages[-2:]):
        time.sleep(0.02)
        return {**call("list_jobs"), "content": "busy"}
    elif "hang" in last["content"]:
        return call("agent", prompt="busy for ever", description="busy")
    elif "look at" in last["content"]:
        text = last["content"][-1] + " is fine"
    else:
        text = f"{len(messages)} messages; before: " + (messages[-2]["content"] if len(messages) > 1 else "nothing")
    return {"content": text.replace(chr(10), " | "), "tool_calls": []}
"""


def snippet(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"docs/embedding.md has no code marked {name}"
    return found[1]


def test_every_piece_of_code_is_run() -> None:
    """What stands on the page has a mark, and a test here for it."""
    assert re.findall(r"<!-- ([\w-]+) -->", PAGE) == ["host", "own", "news", "shell", "plan", "pydantic-ai"]
    assert PAGE.count("```python") == 6


# --- the host ---------------------------------------------------------------------------------------------------


class Host:
    """The page's host in a process of its own; `say` gives its answer to one line."""

    def __init__(self, directory: Path) -> None:
        (directory / "host.py").write_text(snippet("host"))
        (directory / "provider.py").write_text(PROVIDER)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-u", "host.py"],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().removeprefix("> ").rstrip("\n")

    def say(self, line: str) -> str:
        self.send(line)
        return self.answer()

    def end(self) -> None:
        if self.process.poll() is None:
            self.send("")
            self.process.wait(PATIENCE_S)
        self._close()
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._close()

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def jobs(directory: Path) -> list[Job]:
    with GitJobStore(directory / "agent-home") as store, JobClient(store) as client:
        return client.list("chat") if store.has_session("chat") else []


def test_the_host_has_at_most_forty_lines() -> None:
    """As its heading says."""
    assert "## A host in 40 lines" in PAGE
    assert len(snippet("host").splitlines()) <= 40


def test_the_host_talks_starts_agents_and_hears_of_them(tmp_path: Path) -> None:
    """A conversation, an agent in the foreground, one in the background, and the news of it at the next turn."""
    host = Host(tmp_path)
    try:
        assert host.say("hello") == "1 messages; before: nothing"
        assert host.say("research X") == "the agent says: X is fine"
        assert host.say("start on Y").startswith('the agent says: {"job_id":"')
        eventually(lambda: [job.status.value for job in jobs(tmp_path) if job.subject == "look at Y"] == ["completed"])
        news = host.say("any news?")
        assert "Background work has ended: | - job " in news
        assert '"look at Y": Y is fine' in news
        host.say("and now?")
    finally:
        host.end()
    assert {job.status.value for job in jobs(tmp_path)} == {"completed"}
    with GitJobStore(tmp_path / "agent-home") as store:
        assert [node.function for node in store.session("chat").branch()].count("notice") == 1


def test_a_host_that_was_killed_goes_on_with_its_conversation(tmp_path: Path) -> None:
    """The same messages, and a word about the job that died with it."""
    host = Host(tmp_path)
    assert host.say("hello") == "1 messages; before: nothing"
    assert host.say("how are you") == "3 messages; before: 1 messages; before: nothing"
    host.send("hang")
    eventually(lambda: "busy" in [job.subject for job in jobs(tmp_path) if job.status.value == "running"])
    host.kill()
    host = Host(tmp_path)
    try:
        said = host.say("hello again")
        assert said.startswith("6 messages; before: [background job ")
        assert said.endswith('"hang" errored] | [task error] worker died before completion')
    finally:
        host.end()
    assert sorted(job.error or "" for job in jobs(tmp_path))[-2:] == ["worker died before completion"] * 2


def test_ctrl_c_stops_the_turn_and_its_agents(tmp_path: Path) -> None:
    """And not the host."""
    host = Host(tmp_path)
    try:
        host.send("hang")
        eventually(lambda: "busy" in [job.subject for job in jobs(tmp_path) if job.status.value == "running"])
        host.process.send_signal(signal.SIGINT)
        host.answer()
        assert host.say("hello").endswith("messages; before: nothing")
    finally:
        host.end()
    assert [job.status.value for job in jobs(tmp_path)] == ["completed", "cancelled", "cancelled"]


# --- the other pieces -------------------------------------------------------------------------------------------


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the page's code finds: a store, a runner whose turns answer with their prompt, a session."""
    turns = Turns(finish_at_once=True)
    with GitJobStore(tmp_path / "home", durability="relaxed") as store, JobRunner(store, 4, turns) as runner:
        session_id = store.create_session()
        yield {
            "AgentTools": AgentTools,
            "ProcessSupervisor": ProcessSupervisor,
            "store": store,
            "runner": runner,
            "session_id": session_id,
            "turns": turns,
        }


def run(name: str, names: dict[str, Any], replace: tuple[str, str] = ("", "")) -> None:
    code = compile(snippet(name).replace(*replace), f"docs/embedding.md, {name}", "exec")
    exec(code, names)


def test_a_conversation_of_ones_own(names: dict[str, Any]) -> None:
    """Every call has an answer; run again, nothing is started twice."""

    def ask(call_id: str, name: str, arguments: object) -> SimpleNamespace:
        return SimpleNamespace(id=call_id, name=name, arguments=arguments)

    names["conversation"] = [
        SimpleNamespace(id="m1", tool_calls=[ask("call_0", "agent", '{"prompt": "x", "description": "x"}')]),
        SimpleNamespace(
            id="m2", tool_calls=[ask("call_0", "agent", {"prompt": "x", "description": "x"}), ask("call_1", "age", {})]
        ),
    ]
    for _ in range(2):
        names |= {"answers": [], "stop": threading.Event()}
        run("own", names)
        assert [(call_id, is_error) for call_id, _, is_error in names["answers"]] == [
            ("call_0", False),
            ("call_0", False),
            ("call_1", True),
        ]
        assert names["answers"][0][1] == "did x"
    assert names["turns"].order == ["x", "x"]


def test_news_for_a_conversation_of_ones_own(names: dict[str, Any]) -> None:
    """Each end once."""
    heard: list[str] = []
    names["conversation"] = SimpleNamespace(tell=heard.append)
    tools = AgentTools(names["runner"], names["session_id"])
    started = tools.agent("x", "the cache", run_in_background=True)
    assert isinstance(started, dict)
    names["runner"].await_job(started["job_id"])
    run("news", names)
    run("news", names)
    assert heard == ["the cache completed: did x"]


def test_commands(names: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the directory that the host gives."""
    (tmp_path / "Makefile").write_text("test:\n\t@echo all good\n")
    run("shell", names, ('cwd="/path/to/project"', f"cwd={str(tmp_path)!r}"))
    assert capsys.readouterr().out in ("all good\n", "sh: 1: make: not found\n[exit code 127]\n")


def test_a_plan(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """All parts, each with its end."""
    names["plan"] = [SimpleNamespace(prompt=f"part {n}", description=f"part {n}") for n in range(10)]
    run("plan", names)
    text = capsys.readouterr().out
    assert text.startswith("10 of 10 have ended.")
    assert all(f"did part {n}" in text for n in range(10))


def test_with_pydantic_ai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One agent's loop calls, another one's answers."""
    monkeypatch.chdir(tmp_path)
    run("pydantic-ai", {"model": TestModel(call_tools=["agent"])})
    out = capsys.readouterr().out
    assert out.startswith('{"agent":"')
    with GitJobStore("agent-home") as store:
        assert {job.status.value for job in store.list()} == {"completed"}


def test_the_server_has_the_options_that_the_page_names() -> None:
    """What is written for another program's configuration works."""
    from openjobs.cli.mcp import mcp_command

    part = PAGE.partition("## From another program, over MCP")[2].partition("\n## ")[0]
    named = set(re.findall(r"(?<![\w-])--[a-z]+", part))
    assert named == {"--session", "--shell", "--agent"}
    assert named <= {flag for each in mcp_command.params for flag in each.opts}
