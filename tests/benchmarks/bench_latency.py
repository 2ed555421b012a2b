"""How long people and programs wait: submit, cancel, the end of a process, a line of a log. Everything is durable.

    python -m tests.benchmarks.bench_latency [--quick] [--json FILE]

One thing at a time on an otherwise idle runner; the times of other processes are on the machine's own clock.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnRequest, TurnResult
from openjobs.agents import Profiles
from openjobs.processes import ProcessSupervisor
from tests.benchmarks import script
from tests.benchmarks.children import environment

SESSION = "bench"

#: says when it ends, and ends
_END = "import time, os; print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True); os._exit(0)"
#: a line with the time of its writing, thirty times a second
_LINES = """
import sys, time
for _ in range(int(sys.argv[1])):
    print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)
    time.sleep(0.03)
"""
#: another process asks a job to stop, and says when it did
_CANCEL = """
import sys, time
from openjobs import GitJobStore, JobClient
with GitJobStore(sys.argv[1]) as store, JobClient(store) as client:
    for line in sys.stdin:
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        client.cancel(line.strip())
        print(now, flush=True)
"""


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_ms": round(statistics.median(ordered) * 1000, 2),
        "p99_ms": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000, 2),
        "times": len(ordered),
    }


def request(text: str, agent_id: str = "main") -> SpawnRequest:
    return SpawnRequest(parent_session_id=SESSION, prompt=text, agent_id=agent_id)


def submits(home: Path, times: int) -> dict[str, Any]:
    """From the call of `submit` until the job is durable and queued, one after the other."""
    found = []
    with GitJobStore(home) as store:
        store.create_session(SESSION)
        with JobRunner(store, workers=4, sync_fn=lambda r, c: TurnResult(final_text="done")) as runner:
            for number in range(times + 10):
                began = now()
                job = runner.submit(request(f"part {number}"))
                found.append(now() - began)
                runner.await_job(job.job_id)
    return spread(found[10:])


@contextmanager
def patient(home: Path) -> Iterator[tuple[JobRunner, list[float], threading.Semaphore]]:
    """A runner whose jobs wait to be cancelled and note when they were."""
    seen: list[float] = []
    told = threading.Semaphore(0)
    started = threading.Semaphore(0)

    def fn(turn: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        started.release()
        cancel_event.wait()
        seen.append(now())
        told.release()
        return TurnResult(final_text="stopped")

    with GitJobStore(home) as store:
        if not store.has_session(SESSION):
            store.create_session(SESSION)
        with JobRunner(store, workers=4, sync_fn=fn) as runner:
            yield runner, seen, told


def cancels(home: Path, times: int) -> dict[str, Any]:
    """From the call of `cancel` until the running job's event is set."""
    found = []
    with patient(home) as (runner, seen, told):
        for number in range(times):
            job = runner.submit(request(f"part {number}"))
            while runner.get(job.job_id).status != "running":
                time.sleep(0.001)
            began = now()
            runner.cancel(job.job_id)
            told.acquire()
            found.append(seen[-1] - began)
            runner.await_job(job.job_id)
    return spread(found)


def cancels_from_outside(home: Path, times: int) -> dict[str, Any]:
    """The same by another process, which leaves a request in the repository."""
    found = []
    with (
        patient(home) as (runner, seen, told),
        subprocess.Popen(
            [sys.executable, "-c", _CANCEL, str(home)],
            env=environment(home.parent),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        for number in range(times):
            job = runner.submit(request(f"part {number}"))
            while runner.get(job.job_id).status != "running":
                time.sleep(0.001)
            other.stdin.write(f"{job.job_id}\n")
            other.stdin.flush()
            asked = float(other.stdout.readline())
            told.acquire()
            found.append(seen[-1] - asked)
            runner.await_job(job.job_id)
        other.stdin.close()
    return spread(found)


def ends(home: Path, times: int) -> dict[str, Any]:
    """From the end of a background command until `wait` returns, its end recorded and its log complete."""
    found = []
    with GitJobStore(home) as store:
        store.create_session(SESSION)
        with ProcessSupervisor(store) as supervisor:
            for _ in range(times + 2):
                task = supervisor.start(SESSION, [sys.executable, "-ISc", _END])
                supervisor.wait(task.task_id)
                over = now()
                said = (store.session_dir(SESSION) / "runs" / task.task_id / "stdout").read_text()
                found.append(over - float(said))
    return spread(found[2:])


def ends_of_jobs(home: Path, times: int) -> dict[str, Any]:
    """From the end of a job's command until `await_job` returns, its terminal commit durable."""
    found = []
    with GitJobStore(home) as store, Profiles(home) as profiles:
        store.create_session(SESSION)
        with JobRunner(store, workers=4, profiles=profiles) as runner:
            for _ in range(times + 2):
                command = f"exec {sys.executable} -ISc '{_END}'"
                job = runner.await_job(runner.submit(request(command, "shell")).job_id)
                over = now()
                found.append(over - float(job.result_text or ""))
    return spread(found[2:])


def lines(home: Path, times: int) -> dict[str, Any]:
    """From a line that a command writes to the same line in the output of `openjobs logs -f`."""
    found: list[float] = []
    with GitJobStore(home) as store:
        store.create_session(SESSION)
        with ProcessSupervisor(store) as supervisor:
            task = supervisor.start(SESSION, [sys.executable, "-ISc", _LINES, str(times + 60)])
            with subprocess.Popen(
                [sys.executable, "-m", "openjobs", "logs", "-f", task.task_id, "--home", str(home)],
                env=environment(home.parent),
                stdout=subprocess.PIPE,
            ) as follower:
                assert follower.stdout is not None
                found.extend(now() - float(line) for line in follower.stdout)
            supervisor.wait(task.task_id)
    if len(found) != times + 60:
        raise AssertionError(f"{len(found)} of {times + 60} lines were shown")
    return spread(found[60:])  # the follower starts a little later than the command


PARTS = {
    "submit": (submits, 500),
    "cancel to event": (cancels, 200),
    "cancel to event, from another process": (cancels_from_outside, 40),
    "end of a background command to wait returning": (ends, 60),
    "end of a job's command to await_job returning": (ends_of_jobs, 60),
    "a line written to a line shown by logs -f": (lines, 150),
}


def run(base: Path, quick: bool = False) -> dict[str, Any]:
    """From a call to what it brings about: medians and the 99th of a hundred."""
    result = {}
    for number, (name, (part, times)) in enumerate(PARTS.items()):
        result[name] = part(base / f"latency-{number}", times // 5 if quick else times)
    return result


def show(result: dict[str, Any]) -> None:
    for name, figures in result.items():
        print(f"{name:52} median {figures['median_ms']:8.2f} ms   p99 {figures['p99_ms']:8.2f} ms")


def main() -> None:
    script.alone(__doc__, lambda base, arguments: run(base, arguments.quick), quick="a fifth of the rounds", show=show)


if __name__ == "__main__":
    main()
