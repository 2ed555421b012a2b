"""The house stands: no lower floor imports a higher one, and on one floor the order is as written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import openjobs
from openjobs.server.backend import Surroundings

PACKAGE = Path(openjobs.__path__[0])

#: docs/architecture.md, "The floors"; within a floor a room may import those before it.
FLOORS = [
    ["_version", "errors", "sign", "clock", "ids", "jobs"],
    ["durable", "repo", "ledger", "runlog"],
    ["session", "facts"],
    ["store"],
    ["processes", "agents", "runner"],
    ["host"],
    ["aio", "tools", "integrations", "server", "cli"],
    ["__main__"],
]
ORDER = {room: place for place, room in enumerate(room for floor in FLOORS for room in floor)}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(source: str, package: list[str]) -> Iterator[tuple[int, str]]:
    """The line and the room of every import from inside openjobs; `package` holds the names above the module.

    The empty room is the package itself, whose names are for users only.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                if top == "openjobs":
                    yield node.lineno, rest.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = [*base, *(node.module or "").split(".")] if node.module else base
            if full[:1] != ["openjobs"]:
                continue
            if len(full) > 1:
                yield node.lineno, full[1]
            else:
                for alias in node.names:
                    yield node.lineno, alias.name if alias.name in ORDER else ""


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_imports_what_stands_above_it(path: Path) -> None:
    """A module imports only its own room and rooms that come before it in the house."""
    room = room_of(path)
    if room == "__init__":
        return  # the public names: it may import any room, and no room imports it
    assert room in ORDER, f"give the room {room!r} a place in FLOORS here and in docs/architecture.md"
    package = ["openjobs", *path.relative_to(PACKAGE).parts[:-1]]
    for line, other in imported_rooms(path.read_text(), package):
        assert other, f"{path}:{line} imports the package itself; import the room"
        assert ORDER[other] <= ORDER[room], f"{path}:{line}: {room} may not import {other}"


def test_the_check_sees_every_form_of_import() -> None:
    """Absolute, relative, whole-module, late and nested imports are all seen."""
    source = """
import os, openjobs.store.git
from ..errors import Bug
from .. import cli, JobRunner
from . import sibling
def late():
    import openjobs.runner as runner
    from openjobs.host.config import x
"""
    found = [room for _, room in imported_rooms(source, ["openjobs", "repo"])]
    assert found == ["store", "errors", "cli", "", "repo", "runner", "host"]


def test_every_room_is_drawn() -> None:
    """docs/architecture.md names each room of the package that exists."""
    drawing = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    for room in {room_of(path) for path in modules()} - {"__init__", "__main__", "_version"}:
        assert room in drawing, f"docs/architecture.md does not name {room}"


def test_no_signature_holds_the_environment() -> None:
    """`help` and `inspect.signature` show defaults, and an environment has secrets in it."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
                shown = [ast.unparse(default) for default in defaults]
                assert not [text for text in shown if "environ" in text], f"{path}:{node.lineno}"


def test_nothing_shows_the_environment_that_it_holds() -> None:
    """What is logged or printed while debugging is `repr`."""
    env = {"TOKEN": "secret"}
    request = openjobs.SpawnRequest(prompt="x", parent_session_id="s", env=env)
    assert "secret" not in repr(request)
    assert "secret" not in repr(Surroundings(environ=env))
