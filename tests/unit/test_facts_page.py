"""docs/facts.md: its examples run, and it names every field of a fact."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs import JobRunner, MockTaskStore, SpawnRequest, TurnResult, facts
from openjobs.host.launcher import Launcher
from tests.support.facts import settled

PAGE = (Path(__file__).parents[2] / "docs" / "facts.md").read_text()


def example(mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"docs/facts.md has no example {mark!r}"
    return found[1]


def test_every_name_of_a_fact_is_documented() -> None:
    """In the order in which they are written."""
    table = PAGE.partition("## What a fact says")[2].partition("\n##")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert named == list(facts.to_json(settled()))


def test_every_example_is_run() -> None:
    """No example but those that these tests run."""
    assert len(re.findall("```python", PAGE)) == 3


def test_reading_as_the_page_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Every fact of the session, and its intervals."""
    store = MockTaskStore()
    with store:
        session = store.session(store.create_session("s1"))
        with JobRunner(store, 1, lambda request, cancel_event: TurnResult()) as runner:
            job = runner.submit(SpawnRequest(prompt="probe", parent_session_id="s1"))
            runner.await_job(job.job_id)
        store.facts("s1").append([attrs.evolve(facts.fact.registered(job), job_id=store.new_id(), label="other")])
        exec(compile(example("read"), "docs/facts.md", "exec"), {"session": session})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"job/registered {job.job_id} probe"
    assert said[1] == f"job/settled {job.job_id} probe"
    assert re.fullmatch(r"probe completed \d+\.\d+", said[3])
    assert said[4] == "other has no recorded end"


def test_following_as_the_page_shows_it() -> None:
    """The settlements, each with the text of the cursor to go on from."""
    store = MockTaskStore()
    names: dict[str, Any] = {}
    exec(compile(example("follow"), "docs/facts.md", "exec"), names)
    ends = [settled(1), settled(2)]

    async def first(cursor: Any) -> tuple[Any, str]:
        found: tuple[Any, str] = await anext(names["settlements"](session, cursor))
        return found

    with store:
        session = store.session(store.create_session("s1"))
        session.facts.append(ends)
        found, cursor = asyncio.run(first(facts.START))
        assert found == ends[0]
        assert asyncio.run(first(cursor))[0] == ends[1]


def test_a_launcher_as_the_page_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that the agent runs while it is made is recorded; the agent is closed before the host's own disposer."""
    closed: list[str] = []

    class Agent:
        def __init__(self, runner: JobRunner) -> None:
            runner.store.create_session("s1")
            job = runner.submit(
                SpawnRequest(prompt="probe", parent_session_id="s1"), sync_fn=lambda request, event: TurnResult()
            )
            runner.await_job(job.job_id)

        def close(self) -> None:
            closed.append("agent")

    monkeypatch.setattr(Launcher, "wait", lambda self: True)
    names: dict[str, Any] = {"home": tmp_path / "h", "connect": Agent, "flush": lambda: closed.append("host")}
    exec(compile(example("launcher"), "docs/facts.md", "exec"), names)
    assert closed == ["agent", "host"]
    ends = list(facts.read(tmp_path / "h" / "sessions" / "s1"))
    assert [fact.type for fact in ends] == ["job/registered", "job/settled"]
