"""The command `openjobs`: a thin face over host, runner and store."""

from .app import main

__all__ = ["main"]
