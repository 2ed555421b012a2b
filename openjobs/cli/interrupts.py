"""What a person is told who pressed Ctrl-C while something was being handed over to another process."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import OpenJobsError, UnknownJob, UnknownTask
from . import exits, output
from .state import State

#: a hand-over that was interrupted half-way has landed, or failed, within the product of both
TRIES = 20
PAUSE_S = 0.1


def how_to_stop(state: State, found_id: str) -> str:
    return f"`{state.prog} stop {found_id}` stops it"


def goes_on(state: State, what: str, found_id: str) -> str:
    return f"{what} {found_id} was handed over and goes on; {how_to_stop(state, found_id)}"


def handing_over(state: State, what: str, found_id: str, look: Callable[[str], object]) -> int:
    """The exit code, once it is said whether `look` finds what was handed over: it goes on by itself then."""
    try:
        landed: bool | None = _landed(look, found_id)
    except (KeyboardInterrupt, OpenJobsError):  # impatient, or it cannot be known
        landed = None
    if landed:
        output.note(f"interrupted; {goes_on(state, what, found_id)}")
    elif landed is None:
        output.note(f"interrupted; {what} {found_id} may have been handed over; {how_to_stop(state, found_id)}")
    else:
        output.note(f"interrupted before {what} {found_id} was written down; nothing runs")
    return exits.INTERRUPTED


def _landed(look: Callable[[str], object], found_id: str) -> bool:
    for _ in range(TRIES):
        try:
            look(found_id)
        except (UnknownJob, UnknownTask):
            time.sleep(PAUSE_S)
        else:
            return True
    return False
