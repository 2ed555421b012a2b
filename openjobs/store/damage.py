"""Telling of what cannot be read, where it must hide nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ..errors import NotFound, OpenJobsError

T = TypeVar("T")

#: told of what cannot be read, and of the session it is in
OnDamage = Callable[[str, OpenJobsError], object]


def raised(session_id: str, error: OpenJobsError) -> None:
    raise error


def found_in_either(
    looks: Iterable[Callable[[], Mapping[str, T]]],
    is_whole: Callable[[T], bool],
    tell: Callable[[Exception], object],
) -> dict[str, T]:
    """What all `looks` find by an id, or by its beginning. Where one cannot be done (its index is damaged), what the
    others have by its whole id counts, and the damage is told; else it is raised, since it may hide what was meant."""
    found: dict[str, T] = {}
    unread: list[Exception] = []
    for look in looks:
        try:
            found.update(look())
        except NotFound:
            raise
        except (OpenJobsError, OSError) as error:
            unread.append(error)
    if not unread:
        return found
    found = {key: one for key, one in found.items() if is_whole(one)}
    if not found:
        raise unread[0]
    for damage in unread:
        tell(damage)
    return found


def once(tell: OnDamage) -> OnDamage:
    """`tell`, but for what it was told before: all jobs of a page that cannot be read say the same."""
    told: set[tuple[str, str]] = set()

    def tell_once(session_id: str, error: OpenJobsError) -> None:
        if (session_id, str(error)) not in told:
            told.add((session_id, str(error)))
            tell(session_id, error)

    return tell_once
