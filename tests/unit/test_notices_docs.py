"""The pages about notices and context say what is so: their examples are run, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from openjobs.session.notices import _EXCERPT_ALONE_CHARS, _EXCERPT_CHARS, TEXT_LIMIT_CHARS
from openjobs.store import JobStore

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"<!-- (?:run|check) -->\n```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["notices.md", "context.md"])
def test_the_examples_run(page: str, tmp_path: Path) -> None:
    """Every marked block, one after the other; every Python block is marked."""
    text = (DOCS / page).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python")
    names: dict[str, Any] = {"home": tmp_path / "home"}
    store: JobStore | None = None
    try:
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}[{number}]", "exec"), names)
    finally:
        store = names.get("store")
        if store is not None:
            store.close()
    assert store is not None


def test_the_figures_on_the_page_are_the_real_ones() -> None:
    """The bounds of a notice's text."""
    text = (DOCS / "notices.md").read_text()
    assert f"At most {TEXT_LIMIT_CHARS:,} characters" in text
    assert f"up to {_EXCERPT_ALONE_CHARS:,} characters" in text
    assert f"{_EXCERPT_CHARS} for one of several" in text
