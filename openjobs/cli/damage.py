"""What a list could not read is said beside the list, and in the exit code."""

from __future__ import annotations

from . import exits, output
from .text import one_line


class Unread:
    """To be given as `on_damage`."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def __call__(self, session_id: str, error: Exception) -> None:
        self._said.add((session_id, one_line(str(error))))

    def say(self) -> int:
        """A line on stderr for each; the exit code of the list."""
        for session_id, said in sorted(self._said):
            output.note(f"session {session_id} is not listed whole: {said}")
        return exits.REFUSED if self._said else exits.COMPLETED
