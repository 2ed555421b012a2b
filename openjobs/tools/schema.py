"""What a tool takes, read from its signature: the JSON schema a model is given, and the check of what it sends.

A tool is a method. Its parameters' annotations say type, meaning and bounds (`Annotated[int, "...", Range(0, 9)]`),
its docstring what it does; nothing of that is written a second time. Source: spec 003, D10 and D15.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import orjson

from ..errors import InvalidInput

#: a paragraph of a tool's docstring that begins so, and all after it, is for people who read the code
FOR_THE_HOST = "For the host:"
#: how much of a wrong value an error shows
_SHOWN_CHARS = 60

Schema = dict[str, Any]


@attrs.frozen
class Range:
    """Bounds of a whole number, both included."""

    least: int
    most: int


class Filled:
    """A text that says something."""


@attrs.frozen(kw_only=True)
class Parameter:
    name: str
    doc: str
    #: JSON schema without the description
    schema: Schema
    required: bool
    default: Any = None

    @property
    def full_schema(self) -> Schema:
        extra = {} if self.required or self.default is None else {"default": self.default}
        return {**self.schema, **extra, "description": self.doc}

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, in words that say what would be right."""
        if value is None and not self.required:
            return None  # many models send null for what they leave out
        if not all(map(_is_unicode, value if isinstance(value, list | tuple) else [value])):
            return f"{self.name!r} is not valid Unicode: it has half of a surrogate pair, {_shown(value)}"
        wanted = _wanted(self.schema)
        return None if _fits(value, self.schema) else f"{self.name!r} must be {wanted}, not {_shown(value)}"


@attrs.frozen(kw_only=True)
class Tool:
    """One tool as models see it."""

    name: str
    description: str
    parameters: Sequence[Parameter]

    @property
    def schema(self) -> Schema:
        return {
            "type": "object",
            "properties": {each.name: each.full_schema for each in self.parameters},
            "required": [each.name for each in self.parameters if each.required],
            "additionalProperties": False,
        }

    def checked(self, arguments: Any) -> dict[str, Any]:
        """The arguments to call it with. Raises `InvalidInput`, which names every fault at once."""
        given = self._object(arguments)
        known = {each.name: each for each in self.parameters}
        faults = [self._unknown(name, known) for name in given if name not in known]
        for each in self.parameters:
            if each.required and given.get(each.name) is None:
                faults.append(f"{each.name!r} is missing: {each.doc}")
            elif each.name in given and (fault := each.fault(given[each.name])) is not None:
                faults.append(fault)
        if faults:
            raise InvalidInput(f"{self.name} was not called: {'; '.join(faults)}")
        return {name: _as_typed(value) for name, value in given.items() if value is not None}

    def _object(self, arguments: Any) -> Mapping[str, Any]:
        if isinstance(arguments, str | bytes | bytearray):
            text = arguments.strip()
            if not text:
                return {}
            try:
                arguments = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise InvalidInput(
                    f"{self.name} was not called: its arguments are no valid JSON ({error.msg}, character {error.pos})"
                ) from None
        if arguments is None:
            return {}
        if not isinstance(arguments, Mapping):
            raise InvalidInput(f"{self.name} was not called: its arguments must be one JSON object; {self._takes}")
        return arguments

    def _unknown(self, name: Any, known: Mapping[str, Parameter]) -> str:
        near = difflib.get_close_matches(str(name), known, n=1)
        return f"it has no argument {_shown(name)}" + (f", did you mean {near[0]!r}?" if near else f"; {self._takes}")

    @property
    def _takes(self) -> str:
        if not self.parameters:
            return "it takes none"
        return "it takes " + ", ".join(each.name + ("" if each.required else "?") for each in self.parameters)


def tool_of(method: Callable[..., Any]) -> Tool:
    """The tool that a method is. Costs its evaluation once."""
    return _tool_of(inspect.unwrap(getattr(method, "__func__", method)))


@functools.cache
def _tool_of(function: Callable[..., Any]) -> Tool:
    signature = inspect.signature(function, eval_str=True)
    parameters = [_parameter(each) for each in list(signature.parameters.values())[1:]]
    text = inspect.cleandoc(function.__doc__ or "").partition(FOR_THE_HOST)[0]
    return Tool(name=function.__name__, description=_unwrapped(text), parameters=tuple(parameters))


def definition(tool: Tool, form: str) -> Schema:
    """One tool in the form that a provider takes. Raises `InvalidInput`."""
    match form:
        case "openai":
            function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
            return {"type": "function", "function": function}
        case "anthropic":
            return {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
        case "mcp":
            return {"name": tool.name, "description": tool.description, "inputSchema": tool.schema}
        case _:
            raise InvalidInput(f"there is no form {form!r} of definitions: openai, anthropic or mcp")


# --- parts --------------------------------------------------------------------------------------------


def _parameter(parameter: inspect.Parameter) -> Parameter:
    hint = parameter.annotation
    notes: tuple[Any, ...] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *rest = typing.get_args(hint)
        notes = tuple(rest)
    schema = _schema(hint)
    for note in notes:
        if isinstance(note, Range):
            schema |= {"minimum": note.least, "maximum": note.most}
        elif isinstance(note, Filled):
            schema |= {"minLength": 1}
    return Parameter(
        name=parameter.name,
        doc=next((note for note in notes if isinstance(note, str)), ""),
        schema=schema,
        required=parameter.default is inspect.Parameter.empty,
        default=None if parameter.default is inspect.Parameter.empty else parameter.default,
    )


def _schema(hint: Any) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (only,) = [each for each in arguments if each is not type(None)]
        return _schema(only)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0]), "minItems": 1}
    return {"type": {str: "string", bool: "boolean", int: "integer"}[hint]}


def _is_unicode(value: Any) -> bool:
    """Whether a text, if it is one, can be written down and handed to a program."""
    try:
        return not isinstance(value, str) or value.encode() is not None
    except UnicodeEncodeError:
        return False


def _fits(value: Any, schema: Schema) -> bool:
    match schema["type"]:
        case "string":
            good = isinstance(value, str) and len(value.strip()) >= schema.get("minLength", 0)
            return good and value in schema.get("enum", (value,))
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
                return False
            return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        case _:
            items = schema["items"]
            return isinstance(value, list | tuple) and bool(value) and all(_fits(each, items) for each in value)


def _wanted(schema: Schema) -> str:
    match schema["type"]:
        case "string":
            if "enum" in schema:
                return " or ".join(f'"{each}"' for each in schema["enum"])
            return "a text that is not empty" if schema.get("minLength") else "a text"
        case "boolean":
            return "true or false"
        case "integer":
            if "minimum" in schema:
                return f"a whole number from {schema['minimum']} to {schema['maximum']}"
            return "a whole number"
        case _:
            return "a list of texts"


def _as_typed(value: Any) -> Any:
    """JSON knows one kind of number: 30000.0 is the whole number it says it is."""
    if isinstance(value, float):
        return int(value)
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _unwrapped(text: str) -> str:
    """Paragraphs as single lines: how wide the source is, is no business of a model's."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)
