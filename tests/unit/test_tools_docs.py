"""docs/tools.md says what a model is told, word for word, and no argument is missing from it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openjobs import JobRunner, MockTaskStore, TurnResult
from openjobs.tools import AgentTools, slash
from openjobs.tools.schema import Parameter, tool_of
from openjobs.tools.tools import MAX_DEPTH, RESULT_LIMIT_CHARS

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
METHODS = (AgentTools.agent, AgentTools.job_output, AgentTools.list_jobs, AgentTools.job_stop, AgentTools.await_tasks,
           AgentTools.shell)  # fmt: skip


def render(method: Callable[..., Any]) -> str:
    """The part of the page about one tool that is made from its definition."""
    tool = tool_of(method)
    told = "\n>\n".join("> " + paragraph for paragraph in tool.description.split("\n\n"))
    lines = ["| argument | | |", "|---|---|---|", *(_row(each) for each in tool.parameters)]
    return told + "\n" + ("\n" + "\n".join(lines) + "\n" if tool.parameters else "")


def _row(parameter: Parameter) -> str:
    schema = parameter.schema
    kind = " or ".join(f"`{json.dumps(each)}`" for each in schema["enum"]) if "enum" in schema else schema["type"]
    if schema["type"] == "array":
        kind = f"list of {schema['items']['type']}s"
    if "minimum" in schema:
        kind += f", {schema['minimum']} to {schema['maximum']}"
    if not parameter.required:
        kind += ", optional" if parameter.default is None else f", default `{json.dumps(parameter.default)}`"
    return f"| `{parameter.name}` | {kind} | {parameter.doc} |"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_the_page_has_what_a_model_is_told(method: Callable[..., Any]) -> None:
    """Description and arguments of each tool, made from its definition."""
    name = method.__name__
    part = re.search(rf"^## {name}\n\n<!-- {name} -->\n(.*?)<!-- end -->", PAGE, re.MULTILINE | re.DOTALL)
    assert part, f"docs/tools.md has no part about {name}"
    assert part[1] == render(method), f"docs/tools.md should say of {name}:\n\n{render(method)}"


def test_every_tool_has_its_part() -> None:
    """No tool without one, and none that does not exist."""
    assert re.findall(r"<!-- (\w+) -->", PAGE) == [x for m in METHODS for x in (m.__name__, "end")]


def test_the_figures_on_the_page_are_the_real_ones() -> None:
    """Limits, and options that hosts are told of."""
    assert f"at most {RESULT_LIMIT_CHARS:,} characters" in PAGE
    assert f"nested {MAX_DEPTH} deep" in PAGE
    options = inspect.signature(AgentTools).parameters
    for name in ("plan_mode", "processes", "caller_msg_id", "result_limit_chars", "max_depth"):
        assert name in options
        assert f"`{name}" in PAGE


def test_the_usage_of_typed_commands_is_the_real_one() -> None:
    """What the page shows is what the refusal says."""
    typed = set(re.findall(r"`(/(?:task|spawn)[^`]*)`", PAGE))
    assert typed == {"/task PROMPT", "/task --sync PROMPT", "/spawn LABEL: PROMPT"}
    assert slash.USAGE == "/task [--sync] PROMPT, or /spawn LABEL: PROMPT"


def test_the_code_on_the_page_runs() -> None:
    """The four calls, with what the page takes for granted."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code
    with MockTaskStore() as store:
        session_id = store.create_session()
        with JobRunner(store, sync_fn=lambda request, cancel_event: TurnResult(final_text="found it")) as runner:
            names = {
                "runner": runner,
                "session_id": session_id,
                "message_id": "m1",
                "tool_call_id": "c1",
                "arguments": '{"prompt": "x", "description": "x"}',
            }
            exec(compile(code[1], "docs/tools.md", "exec"), names)
            assert {job.result_text for job in store.list(session_id)} == {"found it"}
            assert len(store.list(session_id)) == 2
