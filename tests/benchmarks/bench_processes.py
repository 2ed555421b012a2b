"""What a keeper costs: against a bare `subprocess.Popen`, in milliseconds, and in memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from openjobs.durable import Disk
from openjobs.processes.command import run_command
from openjobs.processes.identity import this_system
from openjobs.processes.template import Request, Template

ROUNDS = 200
ENV = {"PATH": "/usr/bin:/bin"}


def timed(what: Callable[[int], object], rounds: int = ROUNDS) -> list[float]:
    times = []
    for n in range(rounds):
        began = time.perf_counter()
        what(n)
        times.append((time.perf_counter() - began) * 1000)
    return sorted(times)


def show(name: str, times: list[float]) -> float:
    median = statistics.median(times)
    print(f"{name:<64} median {median:8.2f} ms   p99 {times[int(len(times) * 0.99)]:8.2f} ms")
    return median


def request(*argv: str, durable: bool = True) -> Request:
    return Request(argv=argv, cwd="/", env=ENV, task_id="bench", durable=durable)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="oj-bench-") as name, Template() as template:
        home = Path(name)

        def bare(_: int) -> None:
            subprocess.Popen(["true"], env=ENV, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True).wait()

        popen = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            process = subprocess.Popen(["true"], env=ENV, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True)
            popen.append((time.perf_counter() - began) * 1000)
            process.wait()
        bare_start = show("start: subprocess.Popen", sorted(popen))
        bare_whole = show("start to end: subprocess.Popen, wait", timed(bare))

        def first(_: int) -> None:
            with Template() as fresh:
                (home / f"first-{time.monotonic_ns()}").mkdir()
                run_command(["true"], run_dir=home / f"f{time.monotonic_ns()}", env=ENV, template=fresh)

        show("start to end, with a new template", timed(first, 20))
        starts, ends = [], []
        for n in range(ROUNDS):
            run_dir = home / f"start-{n}"
            run_dir.mkdir()
            began = time.perf_counter()
            with template.start(run_dir, request("true")) as run:
                run.go()
                starts.append((time.perf_counter() - began) * 1000)
                run.wait()
                ends.append((time.perf_counter() - began) * 1000)
                run.wait_gone()
        start = show("start: keeper, go, identities known", sorted(starts))
        whole = show("start to end: with a durable exit record", sorted(ends))
        print(f"{'ratio to Popen':<64} start {start / bare_start:.1f}   start to end {whole / bare_whole:.1f}")
        for durable in (True, False):
            show(f"end of process to `wait` returning, durable={durable}", ending(home, template, durable))
        relaxed = Disk(durable=False)
        show(
            "run_command, relaxed",
            timed(lambda n: run_command(["true"], run_dir=home / f"r{n}", env=ENV, template=template, disk=relaxed)),
        )
        throughput(home, template)
        memory(home, template)


def ending(home: Path, template: Template, durable: bool) -> list[float]:
    """The command says when it ends; the clock is the machine's, so both sides read the same."""
    program = "import time; print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True); import os; os._exit(0)"
    times = []
    for n in range(40):
        run_dir = home / f"end-{durable}-{n}"
        run_dir.mkdir()
        with template.start(run_dir, request(sys.executable, "-ISc", program, durable=durable)) as run:
            run.go()
            run.wait()
            now = time.clock_gettime(time.CLOCK_MONOTONIC)
            times.append((now - float((run_dir / "stdout").read_text())) * 1000)
            run.wait_gone()
    return sorted(times)


def throughput(home: Path, template: Template) -> None:
    size = 500 * 10**6
    began = time.perf_counter()
    end = run_command(
        f"head -c {size} /dev/zero",
        run_dir=home / "big",
        env=ENV,
        template=template,
        output_limit_bytes=2 * size,
        disk=Disk(durable=False),
    )
    assert end.stdout_bytes == size
    print(f"{'output kept':<64} {size / 10**6 / (time.perf_counter() - began):.0f} MB/s")


def memory(home: Path, template: Template) -> None:
    run_dir = home / "memory"
    run_dir.mkdir()
    with template.start(run_dir, request("sleep", "60")) as run:
        run.go()
        about = psutil.Process(run.keeper.pid).memory_full_info()
        assert template.pid is not None
        whole = psutil.Process(template.pid).memory_full_info()
        print(f"{'memory of a keeper, its own':<64} {about.uss / 2**20:.1f} MB (resident {about.rss / 2**20:.1f} MB)")
        print(f"{'memory of the template':<64} {whole.rss / 2**20:.1f} MB")
        this_system().send(run.keeper, 15)
        run.wait_gone()


if __name__ == "__main__":
    main()
