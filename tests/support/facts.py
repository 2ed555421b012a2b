"""Facts as a runner records them, without a runner."""

from __future__ import annotations

from typing import Any

import attrs

from openjobs.facts import Registered, Settled

#: 2026-01-02 03:04:05 UTC
T0 = 1_767_323_045_000


def registered(number: int = 0, *, at_ms: int | None = None, **more: Any) -> Registered:
    """Of the job with that number, so many milliseconds after `T0` (its number, if nothing is said)."""
    made = {
        "job_id": f"{number:08x}-0000-4000-8000-000000000000",
        "kind": "job",
        "session_id": "s1",
        "label": f"job {number}",
        "registered_at_ms": T0 + (number if at_ms is None else at_ms),
    }
    return Registered(**{**made, **more})


def settled(number: int = 0, after_ms: int = 1000, *, at_ms: int | None = None, **more: Any) -> Settled:
    """Of the same job, so long after its registration."""
    first = attrs.asdict(registered(number, at_ms=at_ms), filter=attrs.filters.exclude("cursor"))
    end = {
        "settled_at_ms": first["registered_at_ms"] + after_ms,
        "status": "completed",
        "producer_reported": True,
    }
    return Settled(**{**first, **end, **more})
