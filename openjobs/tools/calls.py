"""What a call by name is on its way: the text that a model gets, and what a caller who leaves has let go of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import orjson

from ..errors import Bug, CancelledError, ForkedProcess, OpenJobsError, OutcomeUnknown
from . import texts
from .waiting import abandon


class ToolText(str):
    """A tool's answer as text, for the model."""

    #: the tool did not do what it was asked to
    is_error: bool
    #: what the method returned: a text, a dict or a list; None for an error
    value: Any

    def __new__(cls, text: str, *, is_error: bool = False, value: Any = None) -> ToolText:
        made = super().__new__(cls, text)
        made.is_error = is_error
        made.value = value
        return made


def told(value: Any) -> ToolText:
    """A tool's value as a model reads it."""
    match value:
        case str():
            return ToolText(value, value=value)
        case list():
            return ToolText(texts.table(value) if value else "There are no jobs yet.", value=value)
        case _:
            return ToolText(orjson.dumps(value).decode(), value=value)


def told_error(error: OpenJobsError) -> ToolText:
    """A refusal as a model reads it. Raises what is no matter of a model's."""
    if isinstance(error, CancelledError | Bug | ForkedProcess):
        raise error
    hint = " See with list_jobs whether it is there before you try again." if isinstance(error, OutcomeUnknown) else ""
    return ToolText(f"[error] {error}{hint}", is_error=True)


class Hand:
    """What a thread takes for a caller who may leave meanwhile; whoever of the two is later lets go of it.

    What the lock protects: which of the two was first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step: Any = None
        self._left = False

    def take(self, begin: Callable[[], Any]) -> Any:
        step = begin()
        with self._lock:
            self._step = step
            left = self._left
        if left:
            self.let_go()
        return step

    def let_go(self) -> None:
        """The caller is gone: what only it waits for is stopped."""
        with self._lock:
            self._left = True
            step, self._step = self._step, None
        abandon(step)
