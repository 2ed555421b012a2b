"""The job store: one event applied is one transaction, one commit."""

from .base import JobStore, Transition
from .git import GitJobStore
from .mock import MockTaskStore
from .session import Session

__all__ = ["GitJobStore", "JobStore", "MockTaskStore", "Session", "Transition"]
