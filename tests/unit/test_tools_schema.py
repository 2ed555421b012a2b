"""What a model is told of a tool, and what is made of what it sends."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs import errors
from openjobs.tools import AgentTools
from openjobs.tools.schema import Filled, Range, definition, tool_of


class Sample:
    def wait(
        self,
        name: Annotated[str, "Who.", Filled()],
        count: Annotated[int, "How often.", Range(0, 10)] = 3,
        mode: Annotated[Literal["all", "any"], "Which."] = "all",
        ids: Annotated[list[str] | None, "Some."] = None,
        loud: Annotated[bool, "Whether."] = False,
        note: Annotated[str | None, "Why."] = None,
    ) -> str:
        """Wait for
        somebody.

        Or not.

        For the host: raises nothing.
        """
        return name


WAIT = tool_of(Sample.wait)
ALL = (AgentTools.agent, AgentTools.job_output, AgentTools.list_jobs, AgentTools.job_stop, AgentTools.await_tasks,
       AgentTools.shell)  # fmt: skip


def refused(arguments: Any) -> str:
    with pytest.raises(errors.InvalidInput) as caught:
        WAIT.checked(arguments)
    return str(caught.value)


def test_the_schema_is_the_signature() -> None:
    """Type, bounds, choices, default and meaning of each parameter; no other is allowed."""
    assert WAIT.schema == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "description": "Who."},
            "count": {"type": "integer", "minimum": 0, "maximum": 10, "default": 3, "description": "How often."},
            "mode": {"type": "string", "enum": ["all", "any"], "default": "all", "description": "Which."},
            "ids": {"type": "array", "items": {"type": "string"}, "minItems": 1, "description": "Some."},
            "loud": {"type": "boolean", "default": False, "description": "Whether."},
            "note": {"type": "string", "description": "Why."},
        },
        "required": ["name"],
        "additionalProperties": False,
    }


def test_the_description_is_the_docstring_without_what_is_for_the_host() -> None:
    """Paragraphs stay, line ends within them go, and what is for people who read the code is left out."""
    assert WAIT.description == "Wait for somebody.\n\nOr not."


def test_each_provider_gets_its_own_form() -> None:
    """The same schema under the names that each expects; another form is refused."""
    assert definition(WAIT, "openai") == {
        "type": "function",
        "function": {"name": "wait", "description": WAIT.description, "parameters": WAIT.schema},
    }
    for form, key in (("anthropic", "input_schema"), ("mcp", "inputSchema")):
        assert definition(WAIT, form) == {"name": "wait", "description": WAIT.description, key: WAIT.schema}
    with pytest.raises(errors.InvalidInput, match="openai, anthropic or mcp"):
        definition(WAIT, "yaml")


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.__name__)
def test_every_tool_says_what_each_argument_is(method: Any) -> None:
    """No parameter without a sentence, no tool without a description, none of them long."""
    tool = tool_of(method)
    assert [each.name for each in tool.parameters] == list(inspect.signature(method).parameters)[1:]
    assert all(each.doc.endswith(".") for each in tool.parameters)
    assert 40 < len(tool.description) < 650
    assert "For the host" not in tool.description
    json.dumps(tool.schema)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "x", "count": 10, "mode": "any", "ids": ["a"], "loud": True, "note": "n"},
        '{"name": "x", "count": 10, "mode": "any", "ids": ["a"], "loud": true, "note": "n"}',
        b'{"name": "x", "count": 10.0, "mode": "any", "ids": ["a"], "loud": true, "note": "n"}',
    ],
)
def test_arguments_are_an_object_or_its_json(arguments: Any) -> None:
    """Providers send either; a whole number may come as 10.0."""
    checked = WAIT.checked(arguments)
    assert checked == {"name": "x", "count": 10, "mode": "any", "ids": ["a"], "loud": True, "note": "n"}
    assert type(checked["count"]) is int


def test_null_is_what_was_left_out() -> None:
    """Some providers make a model name every parameter."""
    assert WAIT.checked({"name": "x", "count": None, "note": None}) == {"name": "x"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "'name' is missing: Who."),
        (None, "'name' is missing"),
        ("", "'name' is missing"),
        ({"name": None}, "'name' is missing"),
        ({"name": "  "}, "'name' must be a text that is not empty, not \"  \""),
        ({"name": 7}, "'name' must be a text that is not empty, not 7"),
        ({"name": "x", "cuont": 1}, "it has no argument \"cuont\", did you mean 'count'?"),
        ({"name": "x", "zzz": 1}, 'it has no argument "zzz"; it takes name, count?, mode?, ids?, loud?, note?'),
        ({"name": "x", "count": "soon"}, "'count' must be a whole number from 0 to 10, not \"soon\""),
        ({"name": "x", "count": True}, "'count' must be a whole number"),
        ({"name": "x", "count": 1.5}, "not 1.5"),
        ({"name": "x", "count": float("nan")}, "'count' must be a whole number"),
        ({"name": "x", "count": float("inf")}, "'count' must be a whole number"),
        ({"name": "x", "count": 11}, "from 0 to 10, not 11"),
        ({"name": "x", "mode": "some"}, '\'mode\' must be "all" or "any", not "some"'),
        ({"name": "x", "loud": "yes"}, "'loud' must be true or false"),
        ({"name": "x", "ids": "a"}, "'ids' must be a list of texts, not \"a\""),
        ({"name": "x", "ids": [1]}, "'ids' must be a list of texts"),
        ({"name": "x", "ids": []}, "'ids' must be a list of texts"),
        ({"name": "a \ud800"}, "'name' is not valid Unicode: it has half of a surrogate pair, 'a \\ud800'"),
        ({"name": "x", "ids": ["a", "\udcff"]}, "'ids' is not valid Unicode"),
        ("[1]", "its arguments must be one JSON object; it takes name, count?, mode?, ids?, loud?, note?"),
        ('{"name": ', "are no valid JSON (unexpected end of data, character"),
        ("nonsense", "are no valid JSON"),
    ],
)
def test_a_fault_is_told_with_what_would_be_right(arguments: Any, said: str) -> None:
    """So that a model's next try is right."""
    text = refused(arguments)
    assert text.startswith("wait was not called: ")
    assert said in text


def test_all_faults_are_told_at_once() -> None:
    """One answer, one correction."""
    text = refused({"count": -1, "loud": 0, "x": 1})
    assert text.count(";") >= 3
    assert all(name in text for name in ("'name'", "'count'", "'loud'", '"x"'))


def test_a_long_wrong_value_is_shown_cut() -> None:
    """A model's mistake does not come back whole."""
    assert len(refused({"name": "x", "count": "y" * 10_000})) < 300


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(ANY_JSON | st.dictionaries(st.sampled_from([each.name for each in WAIT.parameters]), ANY_JSON) | st.binary())
def test_whatever_a_model_sends_is_checked_or_refused(arguments: Any) -> None:
    """Nothing else is raised, and what passes can be called."""
    try:
        checked = WAIT.checked(arguments)
    except errors.InvalidInput:
        return
    assert Sample().wait(**checked) == checked["name"]
