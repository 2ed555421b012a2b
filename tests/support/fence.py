"""A fence around the tests: this process writes to temporary directories and to the project, nowhere else.

Tests hand hostile names to code that makes, renames and removes files, often as root. Should such
code be wrong, the test has to fail and the machine has to stay as it was: the interpreter asks here
before each effect, and an effect outside is refused before it happens. Child processes that are not
forks of this one are outside the fence.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: what was refused since the last look; a test that swallowed the error fails all the same
refused: list[str] = []

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: event -> the paths among its arguments, each with its directory descriptor (-1: none)
_PATHS: dict[str, Callable[[tuple[Any, ...]], list[tuple[Any, int]]]] = {
    "open": lambda a: [(a[0], -1)] if isinstance(a[2], int) and a[2] & _WRITING else [],
    "os.rename": lambda a: [(a[0], a[2]), (a[1], a[3])],
    "os.remove": lambda a: [(a[0], a[1])],
    "os.rmdir": lambda a: [(a[0], a[1])],
    "os.mkdir": lambda a: [(a[0], a[2])],
    "os.link": lambda a: [(a[1], a[3])],
    "os.symlink": lambda a: [(a[1], a[2])],
    "os.truncate": lambda a: [(a[0], -1)],
    "os.chmod": lambda a: [(a[0], a[2])],
    "os.chown": lambda a: [(a[0], a[3])],
}


class Outside(AssertionError):
    """A test tried to change something outside of its directories."""


def inside(path: str, roots: tuple[str, ...]) -> bool:
    """Whether the entry named by `path` is one of `roots` or lies below it, links in its directories followed.

    A root itself counts: pytest makes its cache with `mkdir -p`, which names the project's own folder.
    """
    where = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
    return (where + "/").startswith(roots) or "/__pycache__" in where


def put_up(project: Path) -> None:
    """From now on, for as long as this process lives: an audit hook cannot be taken away."""
    places = {"/tmp", "/dev", "/proc/self", tempfile.gettempdir(), str(project)}
    roots = tuple(sorted({os.path.realpath(place) + "/" for place in places} | {place + "/" for place in places}))

    def ask(event: str, args: tuple[Any, ...]) -> None:
        if event not in _PATHS:
            return
        for path, directory in _PATHS[event](args):
            # A path below an open directory is where that directory is, and a descriptor has been asked about.
            if isinstance(path, int) or path is None:
                continue
            text = os.fsdecode(path)
            if not os.path.isabs(text) and directory != -1:
                continue
            if not inside(text, roots):
                refused.append(f"{event} {text}")
                raise Outside(f"{event} {text}: tests change nothing outside {', '.join(sorted(places))}")

    sys.addaudithook(ask)
