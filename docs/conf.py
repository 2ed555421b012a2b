"""The documentation as a site: `nox -s docs`. The pages are plain Markdown, to be read where they lie, too.

The source directory is the checkout, so that a link to the README or the licence is one here as well. What only a
site needs is added while it is built: the tree of pages (in the order of docs/index.md) and, on docs/reference.md,
the docstrings of the public names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from openjobs._version import __version__  # noqa: E402

project = "openjobs"
author = "The openjobs authors"
copyright = author  # noqa: A001
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "docs/**/*.md"]
exclude_patterns = ["**/node_modules/**"]
html_theme = "furo"
html_title = f"openjobs {release}"
html_static_path: list[str] = []
html_copy_source = False
myst_heading_anchors = 4
#: the top of a page is a heading of the first rank in all of them; lists of tables below may skip one
suppress_warnings: list[str] = []
pygments_style = "friendly"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+\.md)\)")


def add_what_a_site_needs(app: Any, docname: str, source: list[str]) -> None:
    if docname == "docs/index":
        pages = dict.fromkeys(_LINK.findall(source[0]))
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    if docname == "docs/reference":
        source[0] = re.sub(r"^## `([\w.]+)`\n", _documented, source[0], flags=re.MULTILINE)


def _documented(heading: re.Match[str]) -> str:
    name = heading[1]
    kind = "autoclass" if name.rpartition(".")[2][:1].isupper() else "automodule"
    return f"## `{name}`\n\n```{{eval-rst}}\n.. {kind}:: {name}\n```\n"


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text with backquotes: nothing in them is markup of another kind."""
    text: list[str] = []
    for line in lines:
        escaped = re.sub(r"([*|_\\])", r"\\\1", line)
        escaped = re.sub(
            r"`([^`]*)`", lambda found: f"``{_plain(found[1])}``" if found[1].strip() else found[0], escaped
        )
        text.append(escaped)
    lines[:] = _blocks(text)


def _plain(code: str) -> str:
    return re.sub(r"\\([*|_\\])", r"\1", code)


def _blocks(lines: list[str]) -> list[str]:
    """What is indented (examples, races in steps) becomes a line block, which keeps its lines."""
    found: list[str] = []
    for line in lines:
        indented = line.startswith("  ") and line.strip()
        previous = found[-1] if found else ""
        if indented and not previous.startswith(("| ", "  ")) and previous:
            found.append("")
        if not indented and line.strip() and previous.startswith("| "):
            found.append("")
        found.append("| " + line.strip() if indented else line)
    return found


def setup(app: Any) -> None:
    app.connect("source-read", add_what_a_site_needs)
    app.connect("autodoc-process-docstring", as_restructured_text)
