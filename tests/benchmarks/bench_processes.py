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

from openjobs import JobRunner, SpawnRequest
from openjobs.agents import Profiles
from openjobs.durable import Disk
from openjobs.processes import ProcessSupervisor
from openjobs.processes.command import run_command
from openjobs.processes.identity import this_system
from openjobs.processes.template import Request, Template
from openjobs.runlog import RunLogReader
from openjobs.store import GitJobStore

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
        supervised(home, bare_start)


def supervised(home: Path, bare_start: float) -> None:
    """Starts with everything durable, beside the drains of those that were started before."""
    with GitJobStore(home / "home") as store:
        store.create_session("s")
        with ProcessSupervisor(store) as supervisor:
            supervisor.wait(supervisor.start("s", ["true"], env=ENV).task_id)
            alone = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                task = supervisor.start("s", ["true"], env=ENV)
                alone.append((time.perf_counter() - began) * 1000)
                supervisor.wait(task.task_id)
                until(lambda: supervisor.running == 0)
            start = show("task: start, intent and running durable", sorted(alone))
            print(f"{'ratio to Popen':<64} {start / bare_start:.1f}")
            begun = time.perf_counter()
            ids = [supervisor.start("s", ["true"], env=ENV).task_id for _ in range(ROUNDS)]
            started = time.perf_counter() - begun
            for task_id in ids:
                supervisor.wait(task_id)
            whole = time.perf_counter() - begun
            print(f"{f'{ROUNDS} tasks at once, started / all ended and recorded':<64} {started:.2f} s / {whole:.2f} s")
            until(lambda: supervisor.running == 0)
            grown(supervisor)
            grown_by_jobs(home / "jobs")
            lines(supervisor, store.session_dir("s") / "runs")
            drained(supervisor)


def grown(supervisor: ProcessSupervisor) -> None:
    """What two thousand short tasks leave in this process."""
    us = psutil.Process()
    before = us.memory_info().rss, us.num_fds(), us.num_threads()
    for _ in range(2000 // ROUNDS):
        for task_id in [supervisor.start("s", ["true"], env=ENV).task_id for _ in range(ROUNDS)]:
            supervisor.wait(task_id)
        until(lambda: supervisor.running == 0)
    after = us.memory_info().rss, us.num_fds(), us.num_threads()
    more = [b - a for a, b in zip(before, after, strict=True)]
    print(f"{'after 2,000 short tasks':<64} {more[0] / 2**20:+.1f} MB, {more[1]:+d} files, {more[2]:+d} threads")


def grown_by_jobs(home: Path, count: int = 2000) -> None:
    """What two thousand short agent jobs leave in this process: each a command under a keeper, drained in the thread
    that waits for it."""
    us = psutil.Process()
    with (
        GitJobStore(home, durability="relaxed") as store,
        Profiles(home, disk=store.disk) as profiles,
        JobRunner(store, workers=4, profiles=profiles) as runner,
    ):
        store.create_session("jobs")
        request = SpawnRequest(prompt="true", parent_session_id="jobs", agent_id="shell", env=ENV)

        def batch() -> None:
            runner.await_tasks([runner.submit(request).job_id for _ in range(50)])

        for _ in range(4):
            batch()
        before = us.memory_info().rss, us.num_fds(), us.num_threads()
        began = time.perf_counter()
        for _ in range(count // 50):
            batch()
        spent = time.perf_counter() - began
        runner.wait_idle()
        after = us.memory_info().rss, us.num_fds(), us.num_threads()
    more = [b - a for a, b in zip(before, after, strict=True)]
    what = f"after {count:,} short agent jobs ({count / spent:.0f} a second)"
    print(f"{what:<64} {more[0] / 2**20:+.1f} MB, {more[1]:+d} files, {more[2]:+d} threads")


def until(reached: Callable[[], bool]) -> None:
    while not reached():
        time.sleep(0.001)


def lines(supervisor: ProcessSupervisor, runs: Path) -> None:
    """From the moment a command writes a line to the moment a follower of its log has it; the machine's clock."""
    program = (
        "import time, sys\n"
        "for _ in range(60):\n"
        "    print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True); time.sleep(0.03)\n"
    )
    task = supervisor.start("s", [sys.executable, "-ISc", program], env=ENV)
    run = runs / task.task_id
    until(lambda: (run / "log.state").exists())
    times = []
    for chunk in RunLogReader(run).follow(whole_lines=True):
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        times += [(now - float(line)) * 1000 for line in chunk.split()]
    show("a line, from the command to a follower", sorted(times))
    over = time.clock_gettime(time.CLOCK_MONOTONIC)
    task = supervisor.wait(task.task_id)
    assert task.ended_at is not None
    behind = max(0.0, time.time() - task.ended_at.timestamp() - (time.clock_gettime(time.CLOCK_MONOTONIC) - over))
    print(f"{'from the recorded end to the end of the follower':<64} {behind * 1000:.2f} ms")
    began = time.perf_counter()
    b"".join(RunLogReader(run).follow())
    print(f"{'following a finished log to its end':<64} {(time.perf_counter() - began) * 1000:.2f} ms")


def drained(supervisor: ProcessSupervisor) -> None:
    size = 100 * 10**6
    began = time.perf_counter()
    command = f"head -c {size} /dev/zero"
    task = supervisor.start("s", command, env=ENV, output_limit_bytes=2 * size)
    task = supervisor.wait(task.task_id)
    assert task.stdout_bytes == size
    spent = time.perf_counter() - began
    print(f"{'from the command through keeper and log, durable':<64} {size / 10**6 / spent:.0f} MB/s")


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
