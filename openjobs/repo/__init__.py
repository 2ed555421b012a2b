"""A versioned set of files: read a path, apply changes to some paths as one commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import (
    MAINTAIN_GAP_S,
    MAINTAIN_WAIT_S,
    Change,
    CommitInfo,
    Maintenance,
    Outcome,
    Repository,
    RepositoryBusy,
    Transaction,
    View,
)
from .memory import MemoryRepository

if TYPE_CHECKING:
    from .git import GitRepository

__all__ = [
    "MAINTAIN_GAP_S",
    "MAINTAIN_WAIT_S",
    "Change",
    "CommitInfo",
    "GitRepository",
    "Maintenance",
    "MemoryRepository",
    "Outcome",
    "Repository",
    "RepositoryBusy",
    "Transaction",
    "View",
]


def __getattr__(name: str) -> Any:
    """`GitRepository` is loaded when it is first asked for: who only counts jobs need not wait for it."""
    if name == "GitRepository":
        from .git import GitRepository

        return GitRepository
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
