"""docs/cli.md says what the command line does: every command, option, exit code and JSON field."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import attrs
import click
import pytest

from openjobs.cli import exits
from openjobs.cli.app import COMMANDS, app
from openjobs.host.wire import job_to_wire
from openjobs.jobs import Job, JobStatus
from openjobs.processes import Task, TaskStatus

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
NAMES = [name for group in COMMANDS.values() for name in group]
CONTEXT = click.Context(app, info_name="openjobs", **app.context_settings)


JOB = Job(
    job_id="00000001-0000-4000-8000-000000000000",
    subject="list the files",
    description="ls",
    agent_id="shell",
    created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    parent_session_id="default",
)


def section(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section {heading!r}"
    return found[1]


def command(name: str) -> click.Command:
    found = app.get_command(CONTEXT, name)
    assert found is not None
    return found


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)


def options(parameters: list[click.Parameter]) -> set[str]:
    return {flag for one in parameters if isinstance(one, click.Option) for flag in (*one.opts, *one.secondary_opts)}


def documented(text: str) -> set[str]:
    return {flag for cell in first_cells(text) for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", cell)}


COMMON = documented(section("Options of every command"))


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_documented_with_every_option(name: str) -> None:
    """Each command has a section that names each of its options, and none that it does not have."""
    made = command(name)
    text = section(name)
    assert documented(text) == options(made.params) - COMMON
    assert {"--home", "--json"} <= options(made.params)
    assert f"(#{name})" in PAGE.partition("## ")[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_usage_line_of_every_command_is_the_real_one(name: str) -> None:
    """What the page shows is what `--help` shows."""
    made = command(name)
    usage = " ".join(made.collect_usage_pieces(click.Context(made, info_name=name, parent=CONTEXT)))
    assert f"`openjobs {name} {usage}`" in section(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_overview_says_what_the_command_says(name: str) -> None:
    """The group's help is written down apart, so that no command is loaded for it; it must not drift."""
    _, text = next(group[name] for group in COMMANDS.values() if name in group)
    made = command(name)
    assert made.name == name
    assert " ".join((made.help or "").split()).startswith(text.rstrip("."))


def test_the_options_before_a_command_are_documented() -> None:
    """`--home` and `--json` may stand before the command; `--version` only there."""
    assert options(app.params) == (COMMON - {"-h", "--help"}) | {"--version"}
    assert "`openjobs --version`" in PAGE


def test_every_exit_code_is_documented() -> None:
    """The table of exit codes is the list in openjobs/cli/exits.py, no more and no less."""
    codes = {value for name, value in vars(exits).items() if name.isupper() and name != "CANDIDATES"}
    assert {int(cell) for cell in first_cells(section("Exit codes")) if cell.isdigit()} == codes
    said = app.epilog or ""
    assert set(map(int, re.findall(r"\d+", said))) == codes - {exits.BROKEN_PIPE}


def test_every_json_field_of_a_job_is_documented() -> None:
    """The page names each field that a job has in JSON, and the table each command."""
    text = section("JSON")
    fields = re.search(r"fields of a row: (.*?)\. What", text, re.DOTALL)
    assert fields
    assert re.findall(r"`(\w+)`", fields[1]) == list(job_to_wire(JOB))
    rows = {cell.strip("`").split()[0] for cell in first_cells(text)} - {"command"}
    assert rows == set(NAMES)


def test_every_json_field_of_a_background_command_is_documented() -> None:
    """As for a job."""
    fields = re.search(r"A \*task\* is (.*?)\n\n", section("JSON"), re.DOTALL)
    assert fields
    assert re.findall(r"`(\w+)`", fields[1]) == [field.name for field in attrs.fields(Task)]
    assert {f"`{status.value}`" for status in TaskStatus} <= set(re.findall(r"`\w+`", section("ps")))


def test_every_status_is_documented() -> None:
    """`list --status` takes each state of a job."""
    assert {f"`{status.value}`" for status in JobStatus} <= set(re.findall(r"`\w+`", section("list")))


def test_the_examples_use_options_that_exist() -> None:
    """Each command line in an example names a command and options of that command."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    found = [match for line in lines for match in re.findall(r"openjobs (\w+)([^|)\"]*)", line)]
    assert found
    for name, rest in found:
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)) <= options(command(name).params)


def test_a_job_in_json_has_every_field_but_the_internal_ones() -> None:
    """A field that is added to a job appears in JSON, or is left out on purpose."""
    all_fields = {field.name for field in attrs.fields(Job)}
    assert all_fields - set(job_to_wire(JOB)) == {"request_digest", "head_at_submit", "extra"}
