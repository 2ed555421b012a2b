"""The documentation is under test: what it links to and names exists."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
#: a file of the project in backquotes: a path with a folder of ours in front, or one of the top files
NAMED = re.compile(r"`((?:openjobs|tests|docs|fixtures)/[\w./-]+|pyproject\.toml|noxfile\.py)`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made where the pages are shown."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """Each relative link is to a file that exists, and its anchor to a heading that is there."""
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """A page that names a file of the project names one that is there."""
    for name in NAMED.findall(page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_page_can_be_found_from_the_index() -> None:
    """docs/index.md links to each page beside and below it."""
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text())}
    missing = [page for page in (ROOT / "docs").rglob("*.md") if page != index and page not in linked]
    assert missing == []


def test_the_guarantees_are_numbered_without_a_gap() -> None:
    """R1, R2, …, R11: tests and pages cite the numbers."""
    text = (ROOT / "docs" / "guarantees.md").read_text()
    assert re.findall(r"^## R(\d+) ", text, re.MULTILINE) == [str(n) for n in range(1, 12)]


def test_every_dependency_has_its_reason() -> None:
    """docs/dependencies.md has a line for each, and for none that is gone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    wanted = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    always = page.partition("## Always installed")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| ([\w-]+) \|", always, re.MULTILINE)) - {"package"} == wanted
    for lines in project["optional-dependencies"].values():
        for line in lines:
            assert re.match(r"[\w-]+", line)[0] in page  # type: ignore[index]


def test_the_readme_has_its_two_commands_and_an_example() -> None:
    """One line each to run the main job and to pass the tests; both make their own environment."""
    readme = (ROOT / "README.md").read_text()
    for mark, end in (("demo", "openjobs demo"), ("tests", "nox -s tests")):
        block = re.search(rf"<!-- {mark} -->\n```sh\n(.*?)```", readme, re.DOTALL)
        assert block, f"README.md has no block marked {mark}"
        lines = block[1].splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("python3 -m venv .venv && ")
        assert lines[0].endswith(end)
    example = re.search(r"<!-- example -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert example
    compile(example[1], "README.md", "exec")


def test_every_public_name_is_on_the_reference_page() -> None:
    """docs/reference.md has a heading for each name of the package, and each heading names something that exists."""
    import openjobs

    text = (ROOT / "docs" / "reference.md").read_text()
    headings = re.findall(r"^## `([\w.]+)`$", text, re.MULTILINE)
    public = {f"openjobs.{name}" for name in openjobs.__all__ if not name.startswith("__")}
    assert public <= set(headings)
    for heading in headings:
        module, _, name = heading.rpartition(".")
        assert hasattr(import_module(module), name), heading
