"""docs/facts.md: its examples run, and it names every field of a fact."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs import JobRunner, MockTaskStore, SpawnRequest, TurnResult, facts
from tests.unit.test_facts import settled

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
    assert len(re.findall("```python", PAGE)) == 2


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
