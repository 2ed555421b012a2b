"""Whole job cycles (submit a no-op job, its result durable and read back) beside other systems, at equal durability.

    python -m tests.benchmarks.bench_peers [--rounds N] [--seconds S] [--json FILE] [NAME …]

Each system has a process of its own and a fresh directory in each round; the rounds go through the systems in
turn, so that a slow minute of the machine meets all of them. What a median stands for is a round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.children import ROOT, environment
from tests.benchmarks.peers.peer import RESULT, Peer

SUBMITTERS = (1, 16)
WARM = 3

PEERS = {
    "openjobs": "ours:OpenJobs",
    "sqlite": "sqlite_table:SqliteTable",
    "persist-queue": "with_persistqueue:PersistQueue",
    "huey": "with_huey:Huey",
    "huey-default": "with_huey:HueyAsItComes",
    "dbos": "with_dbos:Dbos",
    "dbos-queue": "with_dbos:DbosQueue",
    "rq": "with_rq:Rq",
    "rq-fork": "with_rq:RqForking",
    "git-dulwich": "naive_git:DulwichPorcelain",
    "git": "naive_git:GitCommands",
}


def peer(name: str) -> type[Peer]:
    module, made = PEERS[name].split(":")
    found: type[Peer] = getattr(importlib.import_module(f"tests.benchmarks.peers.{module}"), made)
    return found


def missing(name: str) -> str | None:
    """Why a system cannot be measured here, or None."""
    needs = {"persist-queue": "persistqueue", "huey": "huey", "huey-default": "huey", "dbos": "dbos"}
    needs |= {"dbos-queue": "dbos", "rq": "rq", "rq-fork": "rq"}
    if name in needs and importlib.util.find_spec(needs[name]) is None:
        return f"{needs[name]} is not installed here (`nox -s bench` installs it)"
    if name.startswith("rq"):
        from tests.benchmarks.peers.with_rq import available

        return available()
    return None


def processor_s() -> float:
    """Processor time of this process and all below it, those that have ended included."""
    us = psutil.Process()
    total = 0.0
    for process in (us, *us.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and those of children that were waited for
    return total


def measure(cycle: Callable[[int], str], submitters: int, seconds: float, first: int) -> dict[str, float]:
    """Cycles by that many submitters for about that long, and how long each took."""
    times: list[list[float]] = [[] for _ in range(submitters)]
    errors: list[BaseException] = []
    end = time.perf_counter() + seconds

    def submit(which: int) -> None:
        number = first + which * 1_000_000
        try:
            while time.perf_counter() < end or not times[which]:
                began = time.perf_counter()
                if cycle(number) != RESULT:
                    raise AssertionError("the result that was read back is not the job's")
                times[which].append(time.perf_counter() - began)
                number += 1
        except BaseException as error:
            errors.append(error)

    processor, started = processor_s(), time.perf_counter()
    threads = [threading.Thread(target=submit, args=(n,)) for n in range(submitters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, processor = time.perf_counter() - started, processor_s() - processor
    if errors:
        raise errors[0]
    every = sorted(one for each in times for one in each)
    return {
        "jobs_per_s": len(every) / took,
        "median_ms": statistics.median(every) * 1000,
        "p99_ms": every[min(len(every) - 1, len(every) * 99 // 100)] * 1000,
        "processor_ms": processor / len(every) * 1000,
        "jobs": len(every),
    }


def one_round(name: str, seconds: float, directory: Path) -> dict[str, dict[str, float]]:
    found = {}
    with peer(name)(directory).open() as cycle:
        for number in range(WARM):
            cycle(900_000_000 + number)
        for submitters in SUBMITTERS:
            found[str(submitters)] = measure(cycle, submitters, seconds, submitters * 100_000_000)
    return found


def child(name: str, seconds: float, base: Path) -> dict[str, dict[str, float]]:
    """One round in a process of its own."""
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    try:
        out = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.bench_peers", "--child", name, str(seconds), str(directory)],
            cwd=ROOT,
            env=environment(base),
            check=True,
            stdout=subprocess.PIPE,
            timeout=120 + 10 * seconds,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    found: dict[str, dict[str, float]] = json.loads(out.stdout.decode().splitlines()[-1])
    return found


def compare(names: list[str], rounds: int, seconds: float, base: Path) -> dict[str, Any]:
    """Medians over the rounds, by system."""
    figures: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in names}
    skipped = {name: why for name in names if (why := missing(name)) is not None}
    for number in range(rounds):
        # Each round begins somewhere else, so that nobody always follows the same one.
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order:
            if name not in skipped:
                try:
                    figures[name].append(child(name, seconds, base))
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    skipped[name] = str(error)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {}
    for name in names:
        made = peer(name)
        row: dict[str, Any] = {"title": made.title, "how": made.how, "durable": made.durable, "less": made.less}
        if name in skipped:
            row["skipped"] = skipped[name]
        for submitters in map(str, SUBMITTERS):
            if name in skipped:
                continue
            rates = [each[submitters]["jobs_per_s"] for each in figures[name]]
            row[submitters] = {
                "jobs_per_s": statistics.median(rates),
                "spread": [min(rates), max(rates)],
                "median_ms": statistics.median(each[submitters]["median_ms"] for each in figures[name]),
                "p99_ms": statistics.median(each[submitters]["p99_ms"] for each in figures[name]),
                "processor_ms": statistics.median(each[submitters]["processor_ms"] for each in figures[name]),
            }
        result[name] = row
    for row in result.values():
        for submitters in map(str, SUBMITTERS):
            if submitters in row and submitters in result.get("openjobs", {}):
                row[submitters]["openjobs_is"] = (
                    result["openjobs"][submitters]["jobs_per_s"] / row[submitters]["jobs_per_s"]
                )
    return result


def show(result: dict[str, Any]) -> None:
    heads = [f"{n} submitter{'s' if n > 1 else ''}" for n in SUBMITTERS]
    print(f"{'whole job cycle':40}" + "".join(f"{head:>25}{'':34}" for head in heads))
    print(f"{'':40}" + "   jobs/s  (least-most)  median ms  CPU ms/job  openjobs is" * len(SUBMITTERS))
    for row in result.values():
        line = f"{row['title']:40}"
        if "skipped" in row:
            print(line + f"not measured: {row['skipped']}")
            continue
        for submitters in map(str, SUBMITTERS):
            found = row[submitters]
            spread = f"({found['spread'][0]:.0f}-{found['spread'][1]:.0f})"
            ratio = f"{found['openjobs_is']:.2f}x" if "openjobs_is" in found else ""
            line += f"{found['jobs_per_s']:9.1f} {spread:>12} {found['median_ms']:10.1f} {found['processor_ms']:11.2f}"
            line += f" {ratio:>12}"
        print(line)


def markdown(result: dict[str, Any]) -> str:
    """The same for a page: figures, then how each was run and what it promises."""
    first, second = map(str, SUBMITTERS)
    head = f"| jobs a second | {first} submitter | openjobs is | CPU ms a job "
    head += f"| {second} submitters | openjobs is | CPU ms a job |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in result.values():
        if "skipped" in row:
            lines.append(f"| {row['title']} | not measured: {row['skipped']} | | | | | |")
            continue
        cells = []
        for submitters in (first, second):
            found = row[submitters]
            least, most = found["spread"]
            cells.append(f"{_figure(found['jobs_per_s'])} ({_figure(least)} to {_figure(most)})")
            cells.append(f"{found['openjobs_is']:.2g} times" if row["title"] != "openjobs" else "")
            cells.append(f"{found['processor_ms']:.2g}")
        lines.append(f"| {row['title']} | {' | '.join(cells)} |")
    lines += ["", "| | how it was run | on disk when a cycle is over | what it promises less |", "|---|---|---|---|"]
    lines += [f"| {row['title']} | {row['how']} | {row['durable']} | {row['less']} |" for row in result.values()]
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        name, seconds, directory = sys.argv[2:5]
        print(json.dumps(one_round(name, float(seconds), Path(directory))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PEERS)}; all without any")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary directory")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="openjobs-bench-", dir=arguments.directory))
    try:
        result = compare(arguments.names or list(PEERS), arguments.rounds, arguments.seconds, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
