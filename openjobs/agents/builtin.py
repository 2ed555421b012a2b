"""The profiles that are always there."""

from __future__ import annotations

import threading

from ..jobs import TurnRequest, TurnResult
from .templates import BUILT_IN, CommandTemplate

NAMES = BUILT_IN

#: the prompt is the script; no login shell, and `--` because a script may start with a dash
SHELL = CommandTemplate(name="shell", command=("sh", "-c", "--", "{prompt}"))


#: agent programs, run without anybody at the keyboard. The prompt goes to standard input, so that it may have any
#: length and begin with a dash. A profile of the same name in the configuration file comes first.
AGENTS = {
    name: CommandTemplate(name=name, command=command, stdin="prompt", output=name)
    for name, command in {
        "claude": ("claude", "-p", "--output-format", "stream-json", "--verbose"),
        "codex": ("codex", "exec", "--json", "-"),
        "gemini": ("gemini", "--output-format", "stream-json"),
        "opencode": ("opencode", "run", "--format", "json"),
    }.items()
}


def echo(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    """Returns the prompt: for trying things out, and for tests."""
    request.raise_if_cancelled()
    return TurnResult(final_text=request.prompt)
