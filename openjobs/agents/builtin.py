"""The profiles that are always there."""

from __future__ import annotations

import threading

from ..jobs import TurnRequest, TurnResult
from .templates import BUILT_IN, CommandTemplate

NAMES = BUILT_IN

#: the prompt is the script; no login shell, and `--` because a script may start with a dash
SHELL = CommandTemplate(name="shell", command=("sh", "-c", "--", "{prompt}"))


def echo(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    """Returns the prompt: for trying things out, and for tests."""
    request.raise_if_cancelled()
    return TurnResult(final_text=request.prompt)
