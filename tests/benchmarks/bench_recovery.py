"""How long a start takes in a large home, and what it costs: with jobs that a dead runner left, and without.

    python -m tests.benchmarks.bench_recovery [--quick] [--json FILE]

The home is of real repositories: a template session of ten finished jobs, made anew for each session with ids of
its own, one commit each. The unfinished jobs are those of a runner that is killed.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from openjobs import MockTaskStore
from openjobs.durable import Disk
from openjobs.repo import GitRepository
from openjobs.store import GitJobStore
from tests.benchmarks import script
from tests.benchmarks.bench_store import SESSION, full_job
from tests.benchmarks.children import environment

JOBS_A_SESSION = 10
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")

#: a runner with so many unfinished jobs in so many sessions, which then stands still
_LEAVE = """
import sys, threading, time
from openjobs import GitJobStore, JobRunner, SpawnRequest
home, jobs, sessions = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
store = GitJobStore(home)
runner = JobRunner(store, workers=4, sync_fn=lambda request, cancel: threading.Event().wait())
waiting = [
    runner.submit_later(SpawnRequest(parent_session_id=sessions[n % len(sessions)], prompt=f"part {n}"))
    for n in range(jobs)
]
for each in waiting:
    each.result()
while runner.stats().running < min(4, jobs):
    time.sleep(0.01)
time.sleep(0.5)  # the running commits are durable
print("ready", flush=True)
time.sleep(3600)
"""

#: a start, as a program makes it, and what it took
_START = """
import json, resource, sys, time
began = time.perf_counter()
from openjobs import GitJobStore, JobRunner
from openjobs.runner.recovery import Recovery
opened, ended = set(), []
real = GitJobStore._open_repository
def counted(self, session_id):
    opened.add(session_id)
    return real(self, session_id)
GitJobStore._open_repository = counted
run = Recovery.run
def kept(self):
    ended.extend(run(self))
    return ended
Recovery.run = kept
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
imported = time.perf_counter()
before, imported_cpu = rss(), time.process_time()
store = GitJobStore(sys.argv[1])
runner = JobRunner(store, workers=4, sync_fn=lambda request, cancel: None)
ready, ready_cpu = time.perf_counter(), time.process_time()
print(json.dumps({
    "import_ms": (imported - began) * 1000,
    "ready_ms": (ready - imported) * 1000,
    "ready_processor_ms": (ready_cpu - imported_cpu) * 1000,
    "sessions_opened": len(opened),
    "jobs_ended": len(ended),
    "rss_mb": rss() / 2**20,
    "rss_more_mb": (rss() - before) / 2**20,
    "rss_peak_mb": peak(),
}), flush=True)
runner.shutdown()
store.close()
"""


def template(jobs: int) -> dict[str, bytes]:
    """The files of a session in which that many jobs have ended."""
    store = MockTaskStore()
    store.create_session(SESSION)
    store.session(SESSION).append("user", "hello")
    for number in range(jobs):
        full_job(store, number)
    view = store.repository(SESSION).view()
    files = {path: view.read(path) or b"" for path in _paths(view)}
    store.close()
    return files


def _paths(view: Any) -> list[str]:
    found = ["meta.json", "jobs.json"]
    return found + [
        f"{base}/00/0000.{end}"
        for base, end in (("jobs", "json"), ("history", "jsonl"))
        if view.read(f"{base}/00/0000.{end}") is not None
    ]


def generate(home: Path, sessions: int, jobs_each: int = JOBS_A_SESSION) -> None:
    """That many sessions with real repositories and ids of their own; not synced, and fast."""
    disk = Disk(durable=False)
    GitJobStore(home, durability="relaxed").close()
    files = template(jobs_each)
    job_ids = list(json.loads(files["jobs.json"]))
    lines = []
    for number in range(sessions):
        fresh: dict[bytes, bytes] = {}

        def other(match: re.Match[bytes], fresh: dict[bytes, bytes] = fresh) -> bytes:
            return fresh.setdefault(match[0], str(uuid.uuid4()).encode())

        session_id = f"s{number:05d}"
        directory = home / "sessions" / session_id
        directory.mkdir()
        own = {
            path: _UUID.sub(other, data).replace(b'"%s"' % SESSION.encode(), b'"%s"' % session_id.encode())
            for path, data in files.items()
        }
        GitRepository.create(directory / "repo", disk, own).close()
        lines += [b'{"j":"%s","s":"%s"}\n' % (fresh[job_id.encode()], session_id.encode()) for job_id in job_ids]
    (home / "index" / "jobs.jsonl").write_bytes(b"".join(lines))


def leave_unfinished(home: Path, jobs: int, sessions: list[str]) -> None:
    """A runner with so many unfinished jobs in these sessions, killed."""
    with subprocess.Popen(
        [sys.executable, "-c", _LEAVE, str(home), str(jobs), *sessions],
        env=environment(home.parent),
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the runner that is to be killed did not get ready")
        finally:
            process.send_signal(signal.SIGKILL)


def start(home: Path) -> dict[str, float]:
    out = subprocess.run(
        [sys.executable, "-c", _START, str(home)], env=environment(home.parent), stdout=subprocess.PIPE, check=True
    )
    found: dict[str, float] = json.loads(out.stdout)
    return found


def medians(rounds: int, one: Callable[[], dict[str, float]]) -> dict[str, float]:
    found = [one() for _ in range(rounds)]
    return {name: round(statistics.median(each[name] for each in found), 1) for name in found[0]}


def run(base: Path, quick: bool = False, sessions: int = 10_000) -> dict[str, Any]:
    """Starts in a home of 10,000 sessions and 100,000 jobs."""
    sessions, unfinished, rounds = (500, 20, 2) if quick else (sessions, 200, 5)
    home, empty = base / "large", base / "empty"
    began = time.perf_counter()
    generate(home, sessions)
    result: dict[str, Any] = {"home": {"sessions": sessions, "jobs": sessions * JOBS_A_SESSION}}
    result["home"]["generated_s"] = round(time.perf_counter() - began, 1)
    names = [f"s{number:05d}" for number in range(sessions)]

    def recovering(jobs: int, of: list[str]) -> dict[str, float]:
        leave_unfinished(home, jobs, of)
        found = start(home)
        if found["jobs_ended"] != jobs:
            raise AssertionError(f"{found['jobs_ended']} of {jobs} jobs were recovered")
        return found

    GitJobStore(empty).close()
    result["an empty home"] = medians(rounds, lambda: start(empty))
    result["nothing unfinished"] = medians(rounds, lambda: start(home))
    result["5 sessions with a job each unfinished"] = medians(rounds, lambda: recovering(5, names[:: sessions // 5]))
    for count in (unfinished // 2, 10):
        what = f"{unfinished} unfinished in {count} sessions"
        result[what] = medians(rounds, lambda c=count: recovering(unfinished, names[:: sessions // c]))  # type: ignore[misc]
    return result


def main() -> None:
    script.alone(
        __doc__,
        lambda base, arguments: run(base, arguments.quick, arguments.sessions),
        quick="a small home, for a look",
        options=lambda parser: parser.add_argument(
            "--sessions", type=int, default=10_000, help="so many sessions of ten jobs"
        ),
    )


if __name__ == "__main__":
    main()
