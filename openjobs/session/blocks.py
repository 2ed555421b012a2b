"""The numbered files of a session, in order of creation: closed pages of rows, segments of messages.

Each commit hashes a whole page and a whole segment, and each batch writes git's index, which has an
entry for every one of them: small ones make a commit cheaper, few ones a batch. So they are small in
the beginning, and twice as large once there are many.
"""

from __future__ import annotations

#: no directory holds more of them than this
FANOUT = 256


def path_of(directory: str, number: int, ending: str) -> str:
    return f"{directory}/{number // FANOUT:02d}/{number:04d}{ending}"


def scale(number: int) -> int:
    """How many times the smallest size that one may have."""
    return 1 if number < FANOUT else 2
