"""The command `openjobs`: a thin face over host, runner and store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> Any:
    """The console script. Most of a start is imports, so who presses Ctrl-C at once presses it here."""
    try:
        from .app import main
    except KeyboardInterrupt:
        import sys

        from . import exits

        sys.stderr.write("interrupted\n")
        sys.exit(exits.INTERRUPTED)
    return main(args)
