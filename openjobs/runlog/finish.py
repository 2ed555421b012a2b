"""The order in which a run ends, as far as its log is part of it.

Spec 004, "Finish ordering": drain; publish or establish that it failed; store the final status;
journal final event and completion together; release; clear. Each step may be the last one that
happens, so each is either repeatable or proves that those before it are done: a log that is complete
skips everything that came before its completion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .drain import SourceStatus
from .state import Completion, Ending
from .writer import RunLogWriter


class FinishSteps(Protocol):
    """What the owner of a run does. Every step can be called again after a crash."""

    def publish(self, status: SourceStatus) -> str:
        """Bring the result home, or establish that this failed; the outcome, the same when called again."""
        ...

    def store_final(self, outcome: str) -> None:
        """The run's final status is durable when this returns; the run is still owned."""
        ...

    def final_event(self, outcome: str) -> bytes:
        """The last line of the log; may be empty."""
        ...

    def release(self) -> None:
        """Let go of what was held for the run."""
        ...

    def clear(self) -> None:
        """Remove what only recovery needed."""
        ...


def finish_run(writer: RunLogWriter, drain: Callable[[], SourceStatus | None], steps: FinishSteps) -> Completion | None:
    """Drain and finish an accepted run; its completion, or None when `drain` was stopped.

    Call it again after any crash: a completed log goes straight to what is left to clean up.
    """
    if writer.state.completion is None:
        status = drain()
        if status is None:
            return None
        outcome = steps.publish(status)
        steps.store_final(outcome)
        writer.complete(outcome, Ending.DRAINED, steps.final_event(outcome))
    return _cleaned_up(writer, steps)


def finish_never_started(writer: RunLogWriter, outcome: str, steps: FinishSteps) -> Completion:
    """Finish a run of which it is certain that no source accepted it."""
    if writer.state.completion is None:
        steps.store_final(outcome)
        writer.complete(outcome, Ending.NEVER_STARTED, steps.final_event(outcome))
    return _cleaned_up(writer, steps)


def _cleaned_up(writer: RunLogWriter, steps: FinishSteps) -> Completion:
    completion = writer.state.completion
    assert completion is not None
    steps.release()
    steps.clear()
    return completion
