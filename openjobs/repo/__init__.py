"""A versioned set of files: read a path, apply changes to some paths as one commit."""

from .base import Change, CommitInfo, Outcome, Repository, RepositoryBusy, Transaction, View
from .memory import MemoryRepository

__all__ = [
    "Change",
    "CommitInfo",
    "MemoryRepository",
    "Outcome",
    "Repository",
    "RepositoryBusy",
    "Transaction",
    "View",
]
