"""Transitions a second by number of submitters, against what the disk allows in the same run.

    python -m tests.benchmarks.bench_limits [--quick] [--json FILE]

The limits: a line appended to a file and `fdatasync`, and the bare system calls of the commit protocol with constant
bytes of the same sizes. And whole jobs of one submitter in one batch each: nobody who waits until an end is in git can
be quicker, even where a submit were answered before it is. All are taken in turn, in short rounds.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from openjobs.jobs import Completed, Queued, Started
from openjobs.store import GitJobStore
from tests.benchmarks import script
from tests.benchmarks.bench_repo import Bare
from tests.benchmarks.bench_store import RESULT, SESSION, directory_bytes, filled, in_turn, load, new_job

SUBMITTERS = (1, 4, 16, 64)
WHOLE = "whole jobs in one batch each, 1 submitter"
_LINE = b"x" * 299 + b"\n"


def per_second(one: Callable[[], object], seconds: float) -> float:
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        one()
        count += 1
    return count / (time.perf_counter() - began)


def run(base: Path, quick: bool = False) -> dict[str, Any]:
    rounds, seconds = (3, 0.5) if quick else (7, 1.5)
    store = GitJobStore(filled(base / "limits", 10))
    store.session(SESSION).append("user", "warm")
    bare = Bare(base / "limits-bare")
    fd = os.open(base / "limits-append", os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def append() -> None:
        os.write(fd, _LINE)
        if hasattr(os, "fdatasync"):
            os.fdatasync(fd)
        else:
            os.fsync(fd)

    def whole_job() -> None:
        end = Completed(event_id=store.new_id(), result_text=RESULT)
        store.create(new_job(store, 0), Queued(runner_id="bench"), Started(run_id="run"), end, fresh_id=True)

    def transitions(threads: int) -> float:
        count, took = load(store, threads, seconds)
        return count * 4 / took

    measured: dict[str, Callable[[], float]] = {
        "append and fdatasync": lambda: per_second(append, seconds / 2),
        "bare system calls of a batch": lambda: per_second(bare.commit, seconds / 2),
        WHOLE: lambda: per_second(whole_job, seconds / 2),
    }
    for threads in SUBMITTERS:
        name = f"transitions, {threads} submitter{'s' if threads > 1 else ''}"
        measured[name] = lambda n=threads: transitions(n)  # type: ignore[misc]
    before = directory_bytes(base / "limits" / "sessions")
    figures = in_turn(rounds, **measured)
    made = sum(figures[name][r] * seconds for name in measured if name.startswith("transitions") for r in range(rounds))
    made += 4 * sum(figures[WHOLE]) * seconds / 2
    grown = directory_bytes(base / "limits" / "sessions") - before
    store.close()
    os.close(fd)
    limit = statistics.median(figures["append and fdatasync"])
    result: dict[str, Any] = {
        name: {
            "per_s": round(statistics.median(values), 1),
            "spread": [round(min(values), 1), round(max(values), 1)],
            "of_append_and_fdatasync": round(statistics.median(values) / limit, 3),
        }
        for name, values in figures.items()
    }
    result["bytes on disk for a transition, before gc"] = {"bytes": round(grown / made)}
    return result


def main() -> None:
    script.alone(__doc__, lambda base, arguments: run(base, arguments.quick), quick="fewer and shorter rounds")


if __name__ == "__main__":
    main()
