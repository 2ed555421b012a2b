"""From facts to intervals: how long each job or background command took."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from .fact import Fact, Settled
from .reading import Source, When, in_ms, read


@attrs.frozen(kw_only=True, slots=True)
class Interval:
    """From the registration of a job to its settlement, waiting for a worker and cleaning up included.

    It is no processor time, and the intervals of jobs that wait for each other overlap: their sum says little.
    """

    job_id: str
    kind: str
    session_id: str
    caller_session_id: str | None
    parent_job_id: str | None
    label: str
    tool_call_id: str | None
    registered_at_ms: int
    #: these are None while there is no settlement; the first one also where it never started
    started_at_ms: int | None = None
    settled_at_ms: int | None = None
    status: str | None = None
    producer_reported: bool | None = None

    @property
    def complete(self) -> bool:
        """Whether its settlement was recorded. If not, it runs, or its record is lost: the row knows which."""
        return self.settled_at_ms is not None

    @property
    def duration_ms(self) -> int | None:
        """Never below 0, though the machine's clock may have been set back meanwhile."""
        return None if self.settled_at_ms is None else max(0, self.settled_at_ms - self.registered_at_ms)


def pair(facts: Iterable[Fact]) -> list[Interval]:
    """An interval for every job that the facts speak of, in the order in which they first do.

    A settlement is enough for a complete one, since it repeats the registration.
    """
    found: dict[str, Fact] = {}
    for fact in facts:
        if isinstance(fact, Settled) or fact.job_id not in found:
            found[fact.job_id] = fact
    return [_interval(fact) for fact in found.values()]


def intervals(session: Source, since: When | None = None, until: When | None = None) -> list[Interval]:
    """The intervals of a session that reach into the window from `since` to `until` (not included).

    An incomplete one has no end and reaches into every window after its registration. Raises as `read`; damage
    is raised even where the facts before it would do, since what it took away may have been an end.
    """
    first, last = in_ms(since), in_ms(until)
    return [
        each
        for each in pair(read(session))
        if (last is None or each.registered_at_ms < last)
        and (first is None or each.settled_at_ms is None or each.settled_at_ms >= first)
    ]


def _interval(fact: Fact) -> Interval:
    names = [field.name for field in attrs.fields(Interval)]
    return Interval(**{name: getattr(fact, name) for name in names if hasattr(fact, name)})
