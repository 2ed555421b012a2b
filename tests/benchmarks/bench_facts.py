"""What the facts of a job cost it, and what reading them costs.

    python tests/benchmarks/bench_facts.py [--quick] [--json FILE]

Everything is fully synced. Jobs with and without facts are taken in turn within one run, since a disk's speed
drifts by a factor of two within minutes.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnRequest, TurnResult, facts
from openjobs.facts import Fact, FactLog, FileFactLog, MemoryFactLog, Registered, Settled
from openjobs.ids import new_id
from tests.benchmarks import script

WORKERS = 4


class NoFacts(MemoryFactLog):
    def append(self, facts: Sequence[Fact]) -> None:
        pass


class CountingLog(FileFactLog):
    """Counts appends that reach the disk."""

    writes = 0

    def _write(self) -> None:
        self.writes += 1
        super()._write()


def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    return TurnResult(final_text="found three places")


def jobs_a_second(runner: JobRunner, session_id: str, jobs: int, submitters: int) -> float:
    """From submit to the waiter that hears of the end."""

    def submit(count: int) -> None:
        for _ in range(count):
            job = runner.submit(SpawnRequest(prompt="look at it", parent_session_id=session_id))
            runner.await_job(job.job_id)

    threads = [threading.Thread(target=submit, args=(jobs // submitters,)) for _ in range(submitters)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return jobs / (time.perf_counter() - began)


def bench_jobs(base: Path, quick: bool) -> dict[str, Any]:
    """Full jobs a second through a runner, with facts and without them, in turn."""
    rounds, figures = (3 if quick else 9), {}
    with GitJobStore(base / "jobs") as store:
        none = NoFacts()
        for submitters, jobs in ((1, 30), (16, 160)):
            rates: dict[str, list[float]] = {"with": [], "without": []}
            processor_s: dict[str, list[float]] = {"with": [], "without": []}
            writes = recorded = 0
            for number in range(rounds):
                for kind in ("with", "without") if number % 2 else ("without", "with"):
                    session_id = store.create_session()
                    path = store.session_dir(session_id) / "events.jsonl"
                    log: FactLog = none if kind == "without" else CountingLog(path)
                    store.facts = lambda session_id, log=log: log  # type: ignore[method-assign,misc]
                    with JobRunner(store, WORKERS, turn) as runner:
                        began = time.process_time()
                        rates[kind].append(jobs_a_second(runner, session_id, jobs, submitters))
                        processor_s[kind].append((time.process_time() - began) / jobs)
                    if isinstance(log, CountingLog):
                        writes, recorded = writes + log.writes, recorded + 2 * jobs
            del store.facts
            name = f"{submitters}_submitters"
            figures[f"{name}_without_facts_a_s"] = round(statistics.median(rates["without"]), 1)
            figures[f"{name}_with_facts_a_s"] = round(statistics.median(rates["with"]), 1)
            ratios = [one / other for one, other in zip(rates["without"], rates["with"], strict=True)]
            figures[f"{name}_times_as_long"] = round(statistics.median(ratios), 2)
            for kind, spent in processor_s.items():
                figures[f"{name}_{kind}_facts_processor_ms_a_job"] = round(statistics.median(spent) * 1000, 2)
            figures[f"{name}_facts_a_sync"] = round(recorded / writes, 1)
    return figures


def made(number: int) -> list[Fact]:
    about: dict[str, Any] = {
        "job_id": new_id(),
        "kind": "job",
        "session_id": "bench",
        "label": "look at the parser and report",
        "tool_call_id": f"toolu_{number:020d}",
        "registered_at_ms": 1_767_323_045_000 + number,
    }
    end: dict[str, Any] = {"started_at_ms": 1_767_323_045_001, "settled_at_ms": 1_767_323_046_000 + number}
    return [Registered(**about), Settled(**about, **end, status="completed", producer_reported=True)]


def bench_ledger(base: Path, quick: bool) -> dict[str, Any]:
    """One ledger of many jobs: appending, opening, reading, following."""
    jobs = 10_000 if quick else 100_000
    directory = base / "ledger"
    directory.mkdir()
    path = directory / "events.jsonl"
    log = FileFactLog(path)

    def appended() -> float:
        began = time.perf_counter()
        log.append([made(0)[0]])
        return time.perf_counter() - began

    few = statistics.median(appended() for _ in range(200))
    for number in range(0, jobs, 1000):
        log.append([fact for each in range(number, number + 1000) for fact in made(each)])
    many = statistics.median(appended() for _ in range(200))
    first = []
    for _ in range(10):
        log = FileFactLog(path)
        first.append(appended())
    began = time.perf_counter()
    count = sum(1 for _ in facts.read(directory))
    read_s = time.perf_counter() - began
    cursor = None
    for fact in facts.read(directory):
        cursor = fact.cursor
    assert cursor is not None
    delays = []
    with facts.follow(directory, after=cursor) as following:
        for _ in range(50):
            threading.Timer(0.02, log.append, ([made(0)[0]],)).start()
            next(following)
            delays.append(time.perf_counter())
            began = time.perf_counter()
            log.append([made(0)[0]])
            next(following)
            delays[-1] = time.perf_counter() - began
    return {
        "jobs": jobs,
        "bytes_a_job": round(path.stat().st_size / (jobs + 310)),
        "append_to_few_ms": round(few * 1000, 2),
        "append_to_many_ms": round(many * 1000, 2),
        "first_append_of_a_process_ms": round(statistics.median(first) * 1000, 2),
        "read_facts_a_s": round(count / read_s),
        "append_and_hear_of_it_ms": round(statistics.median(delays) * 1000, 1),
    }


PARTS = {"jobs": bench_jobs, "ledger": bench_ledger}


def main() -> None:
    script.parts(__doc__, PARTS)


if __name__ == "__main__":
    main()
