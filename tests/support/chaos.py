"""How hard the harnesses work, what they counted, and how a failure is seen again.

`nox -s chaos` sets OPENJOBS_CHAOS; OPENJOBS_CHAOS_SCALE (default 1) multiplies the number of rounds, and OPENJOBS_SEED
replaces the seed of those that have one. The counts are printed at the end of the run, and with each failure its seed
and the command that shows it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

# Read once: every test begins without variables of ours.
ON = os.environ.get("OPENJOBS_CHAOS") == "1"
SCALE = os.environ.get("OPENJOBS_CHAOS_SCALE", "")
SEED_WANTED = os.environ.get("OPENJOBS_SEED", "")
#: properties of a test report that are ours
COUNTS, SEED = "openjobs counts", "openjobs seed"


@attrs.define
class Chaos:
    """True in the long run."""

    on: bool
    scale: float
    seed_wanted: int | None
    #: what pytest keeps with the test's report
    properties: list[tuple[str, Any]]
    counts: dict[str, int] = attrs.field(factory=dict)

    def __bool__(self) -> bool:
        return self.on

    def rounds(self, few: int, many: int, what: str = "rounds") -> int:
        """How many: `few` as a rule, `many` times the scale in the long run, never fewer."""
        number = max(few, round(many * self.scale)) if self.on else few
        self.count(what, number)
        return number

    def count(self, what: str, number: int = 1) -> None:
        """So many more of those; they are printed at the end."""
        if not self.counts:
            self.properties.append((COUNTS, self.counts))
        self.counts[what] = self.counts.get(what, 0) + number

    def seed(self, usual: int) -> int:
        """The seed to use, and to print should this fail."""
        chosen = usual if self.seed_wanted is None else self.seed_wanted
        self.properties.append((SEED, chosen))
        return chosen


def chaos_of(properties: list[tuple[str, Any]]) -> Chaos:
    seed = int(SEED_WANTED) if SEED_WANTED else None
    return Chaos(on=ON, scale=float(SCALE or 1), seed_wanted=seed, properties=properties)


def told(nodeid: str, properties: Iterable[tuple[str, Any]]) -> str | None:
    """`test: 200 rounds, 1,234 states`, or None where nothing was counted."""
    found = dict(properties).get(COUNTS)
    return f"{nodeid}: " + ", ".join(f"{number:,} {what}" for what, number in found.items()) if found else None


def again(nodeid: str, properties: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """How a failure is seen again."""
    seeds = [value for name, value in properties if name == SEED]
    before = "OPENJOBS_CHAOS=1 " if ON else ""
    if SCALE:
        before += f"OPENJOBS_CHAOS_SCALE={SCALE} "
    if seeds:
        before += f"OPENJOBS_SEED={seeds[-1]} "
    yield f"{before}pytest '{nodeid}'"
