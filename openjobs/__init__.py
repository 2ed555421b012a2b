"""Background jobs for agent hosts, whose every state change is one git commit."""

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import aio, errors, facts
    from .jobs import Job, JobStatus, SpawnRequest, TurnRequest, TurnResult
    from .runner import JobClient, JobRunner
    from .store import GitJobStore, MockTaskStore

__all__ = [
    "GitJobStore",
    "Job",
    "JobClient",
    "JobRunner",
    "JobStatus",
    "MockTaskStore",
    "SpawnRequest",
    "TurnRequest",
    "TurnResult",
    "__version__",
    "aio",
    "errors",
    "facts",
]

# Found on first use (PEP 562), so that `import openjobs` costs next to nothing.
_HOMES = {
    "GitJobStore": "store",
    "Job": "jobs",
    "JobClient": "runner",
    "JobRunner": "runner",
    "JobStatus": "jobs",
    "MockTaskStore": "store",
    "SpawnRequest": "jobs",
    "TurnRequest": "jobs",
    "TurnResult": "jobs",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("aio", "errors", "facts"):
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
