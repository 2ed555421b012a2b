"""What more than one test needs."""

from .clock import FakeClock
from .git import git
from .polling import eventually

__all__ = ["FakeClock", "eventually", "git"]
