"""`openjobs completion`, and what job ids and sessions complete to.

Asked at every press of the tab key: reads the index of ids and directory names, never a repository,
makes nothing, and is silent about everything that is wrong.
"""

from __future__ import annotations

import mmap
import os
import re
from itertools import islice
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from . import exits, output
from .options import command
from .state import State

#: a shell shows no more than a screenful
OFFERED = 50

_LINE = re.compile(rb'\{"j":"([0-9a-f-]{36})"')

_INSTALL = {
    "bash": 'eval "$(openjobs completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(openjobs completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "openjobs completion fish > ~/.config/fish/completions/openjobs.fish",
}


@command("completion")
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def completion_command(state: State, shell: str) -> int:
    """Print the script that completes commands and job ids.

    Options, sessions and profiles too, where they fit.

    \b
    bash: eval "$(openjobs completion bash)"   in ~/.bashrc
    zsh:  eval "$(openjobs completion zsh)"    in ~/.zshrc, after compinit
    fish: openjobs completion fish > ~/.config/fish/completions/openjobs.fish
    """
    from .app import app

    kind = get_completion_class(shell)
    assert kind is not None
    source = kind(app, {}, "openjobs", "_OPENJOBS_COMPLETE").source()
    if state.json:
        output.json_value({"shell": shell, "script": source})
    else:
        output.lines([source.rstrip("\n")])
        output.hint(f"to use it: {_INSTALL[shell]}")
    return exits.COMPLETED


def job_ids(state: State, incomplete: str) -> list[CompletionItem[str]]:
    """The newest ids of jobs and background commands that begin so, from the index's files themselves: the store
    takes 0.2 s to import."""
    found: dict[str, None] = {}
    for name in ("jobs", "tasks"):
        try:
            _take_ids(state.unchecked_home / "index" / f"{name}.jsonl", incomplete.lower(), found)
        except Exception:
            continue
    return [CompletionItem(one) for one in islice(found, OFFERED)]


def _take_ids(path: Path, beginning: str, found: dict[str, None]) -> None:
    needle = b'{"j":"' + beginning.encode()
    most = len(found) + OFFERED
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # waits for no pipe
    with os.fdopen(fd, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = len(data)
        while len(found) < most and (at := data.rfind(needle, 0, at)) >= 0:
            if (line := _LINE.match(data, at)) is not None:
                found[line[1].decode()] = None


def sessions(state: State, incomplete: str) -> list[CompletionItem[str]]:
    try:
        names = sorted(path.name for path in (state.unchecked_home / "sessions").iterdir())
    except Exception:
        return []
    fitting = (name for name in names if name.startswith(incomplete) and not name.startswith("."))
    return [CompletionItem(name) for name in islice(fitting, OFFERED)]


def profiles(state: State, incomplete: str) -> list[CompletionItem[str]]:
    from ..agents import Profiles

    try:
        names = Profiles(state.unchecked_home).names()
    except Exception:
        names = ["shell", "echo"]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
