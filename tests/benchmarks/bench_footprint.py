"""What the library takes: time to import, memory at rest, memory of queued jobs.

    python -m tests.benchmarks.bench_footprint [--quick] [--json FILE]

Each figure is of a fresh interpreter; medians of several.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks import script
from tests.benchmarks.children import environment

_RSS = """
import gc, resource
def rss():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
"""

_AT_REST = (
    _RSS
    + """
import json, sys, threading
found = {"an empty interpreter": rss()}
import openjobs
found["import openjobs"] = rss()
from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult
store = GitJobStore(sys.argv[1])
store.create_session("s")
runner = JobRunner(store, workers=4, sync_fn=lambda request, cancel: TurnResult(final_text="done"))
found["a runner"] = rss()
runner.await_job(runner.submit(SpawnRequest(parent_session_id="s", prompt="one")).job_id)
found["a runner after its first job"] = rss()
found["threads"] = threading.active_count()
runner.shutdown()
store.close()
print(json.dumps(found))
"""
)

_QUEUED = (
    _RSS
    + """
import json, sys, threading, time
from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult
home, count = sys.argv[1], int(sys.argv[2])
free = threading.Event()
def fn(request, cancel):
    free.wait()
    return TurnResult(final_text="done")
store = GitJobStore(home, durability="relaxed")
store.create_session("s")
runner = JobRunner(store, workers=4, sync_fn=fn)
prompt = "Look at one part of the parser and report what you find, with file and line."
def fill(count):
    for _ in range(count // 100):
        for each in [runner.submit_later(SpawnRequest(parent_session_id="s", prompt=prompt)) for _ in range(100)]:
            each.result()
def drain():
    free.set()
    while runner.stats().unfinished:
        time.sleep(0.02)
    free.clear()
    return rss()
free.set()
fill(3000)
full = drain()  # what is kept of finished jobs has its size
fill(count)
queued = rss()
left = drain()
print(json.dumps({"full": full, "queued": (queued - full) / count * 1000, "done": (left - full) / count * 1000}))
runner.shutdown()
store.close()
"""
)

_VERSION = """
import contextlib, io, sys
from openjobs.cli import main
sys.argv = ["openjobs", "--version"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
"""


def child(base: Path, code: str, *arguments: str) -> dict[str, Any]:
    out = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(base), stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(out.stdout)
    return found


def seconds(base: Path, code: str) -> tuple[float, float]:
    """On the clock, and of a processor."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment(base), check=True)
    took, after = time.perf_counter() - began, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return took, used


def imports(base: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds over an empty interpreter, taken in turn."""
    codes = {
        "import openjobs": "import openjobs",
        "JobRunner and GitJobStore": "from openjobs import JobRunner, GitJobStore",
        "openjobs --version": _VERSION,
    }
    for code in codes.values():
        seconds(base, code)  # compiles what it imports
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in codes}
    for _ in range(rounds):
        bare = seconds(base, "pass")
        for name, code in codes.items():
            took, used = seconds(base, code)
            found[name].append((took - bare[0], used - bare[1]))
    return {
        name: {
            "ms": round(statistics.median(took for took, _ in pairs) * 1000, 1),
            "processor_ms": round(statistics.median(used for _, used in pairs) * 1000, 1),
        }
        for name, pairs in found.items()
    }


def run(base: Path, quick: bool = False) -> dict[str, Any]:
    """Time to import, memory at rest, memory of queued jobs."""
    rounds, queued = (3, 1_000) if quick else (9, 5_000)
    rest = [child(base, _AT_REST, str(base / f"rest-{n}")) for n in range(3)]
    many = [child(base, _QUEUED, str(base / f"queued-{n}"), str(queued)) for n in range(1 if quick else 3)]
    return {
        "import": imports(base, rounds),
        "resident_mb": {
            name: round(statistics.median(each[name] for each in rest) / 2**20, 1)
            for name in rest[0]
            if name != "threads"
        },
        "threads": rest[0]["threads"],
        "mb_per_1000_queued": round(statistics.median(each["queued"] for each in many) / 2**20, 2),
        "resident_mb_after_3000_jobs": round(statistics.median(each["full"] for each in many) / 2**20, 1),
        "mb_left_per_1000_done": round(statistics.median(each["done"] for each in many) / 2**20, 2),
    }


def main() -> None:
    script.alone(__doc__, lambda base, arguments: run(base, arguments.quick), quick="fewer rounds and jobs")


if __name__ == "__main__":
    main()
