"""Telling of what cannot be read, where it must hide nothing else."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import OpenJobsError

#: told of what cannot be read, and of the session it is in
OnDamage = Callable[[str, OpenJobsError], object]


def raised(session_id: str, error: OpenJobsError) -> None:
    raise error


def once(tell: OnDamage) -> OnDamage:
    """`tell`, but for what it was told before: all jobs of a page that cannot be read say the same."""
    told: set[tuple[str, str]] = set()

    def tell_once(session_id: str, error: OpenJobsError) -> None:
        if (session_id, str(error)) not in told:
            told.add((session_id, str(error)))
            tell(session_id, error)

    return tell_once
