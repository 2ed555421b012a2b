"""Run logs that survive anything and can be followed (spec 004)."""

from .drain import Drain, Source, SourceStatus
from .finish import FinishSteps, finish_never_started, finish_run
from .reader import LogChunk, RunLogReader
from .state import Completion, Ending, LogState, Stream
from .writer import RunLogWriter

__all__ = [
    "Completion",
    "Drain",
    "Ending",
    "FinishSteps",
    "LogChunk",
    "LogState",
    "RunLogReader",
    "RunLogWriter",
    "Source",
    "SourceStatus",
    "Stream",
    "finish_never_started",
    "finish_run",
]
