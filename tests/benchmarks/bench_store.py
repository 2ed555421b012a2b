"""What a full job costs: submit to completed, with card, messages and head, four commits.

    python tests/benchmarks/bench_store.py [--quick] [--json FILE]

Everything is fully synced. Figures that are compared are taken in turn within one run, since a
disk's speed drifts by a factor of two within minutes: the ratios hold, the absolute figures less so.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from openjobs.jobs import Completed, Job, JobStatus, Queued, Started
from openjobs.repo import Change, GitRepository, View
from openjobs.session import Documents, Memory, Node, cards
from openjobs.store import GitJobStore, JobStore
from tests.benchmarks import script

SESSION = "bench"
RESULT = "The probe found three places where the parser reads past the end of its input; see the list. " * 2


def new_job(store: JobStore, number: int, session_id: str = SESSION) -> Job:
    return Job(
        job_id=store.new_id(),
        subject=f"probe part {number}",
        description=f"Look at part {number} of the parser and report what you find, with file and line.",
        agent_id="main",
        created_at=store.clock.now(),
        parent_session_id=session_id,
        request_digest=f"{number:032x}",
    )


def full_job(store: JobStore, number: int, session_id: str = SESSION) -> None:
    """As the runner does it: submit waits, running does not, the end waits."""
    job = store.create(new_job(store, number, session_id), Queued(runner_id="bench"), fresh_id=True)
    store.apply_later(job.job_id, Started(run_id="run"), keep=True)
    store.apply(job.job_id, Completed(event_id=store.new_id(), result_text=RESULT))


def filled(home: Path, finished: int, queued: int = 0) -> Path:
    """A home with one session of that many jobs: the documents are those of real jobs, written a page a commit."""
    store = GitJobStore(home, durability="relaxed")
    store.create_session(SESSION)
    store.session(SESSION).append("user", "hello")
    head = store.session(SESSION).head_id
    store.close()
    repository = GitRepository(home / "sessions" / SESSION / "repo", store.disk)
    memory = Memory(home / "sessions" / SESSION / "repo" / ".git" / "openjobs")
    now, number, total = store.clock.now(), 0, finished + queued
    index = []
    while number < total:
        count = min(32, total - number)

        def change(view: View, first: int = number, count: int = count) -> Change:
            documents = Documents(view, memory)
            documents.close_page_if_full()
            for n in range(first, first + count):
                job = new_job(store, n)
                job = _as_created(job, head, store)
                card = cards.placeholder(job, job.attach_id or "", now)
                documents.append(
                    [
                        Node(
                            id=job.user_msg_id or "", parent=head, role="user", content=job.description, created_at=now
                        ),
                        card,
                    ]
                )
                if n < finished:
                    job = _as_ended(job, store)
                    documents.append(
                        [
                            Node(
                                id=job.head_id or "",
                                parent=job.user_msg_id,
                                role="assistant",
                                content=RESULT,
                                created_at=now,
                                extra={"job_id": job.job_id, "status": "completed"},
                            ),
                            cards.finished(job, "0" * 40, now),
                        ]
                    )
                documents.put_job(job)
                index.append(b'{"j":"%s","s":"%s"}\n' % (job.job_id.encode(), SESSION.encode()))
            return Change(files=documents.changes, subject=f"{count} jobs", trailers=[("Openjobs-Kind", "bench")])

        repository.transact([change])
        number += count
    repository.maintain()
    repository.close()
    (home / "index" / "jobs.jsonl").write_bytes(b"".join(index))
    return home


def _as_created(job: Job, head: str | None, store: JobStore) -> Job:
    import attrs

    return attrs.evolve(
        job,
        status=JobStatus.QUEUED,
        queued_at=job.created_at,
        parent_msg_id=head,
        runner_id="bench",
        attach_id=store.new_id(),
        user_msg_id=store.new_id(),
        revision=0,
    )


def _as_ended(job: Job, store: JobStore) -> Job:
    import attrs

    return attrs.evolve(
        job,
        status=JobStatus.COMPLETED,
        started_at=job.created_at,
        completed_at=job.created_at,
        head_id=store.new_id(),
        result_text=RESULT,
        event_id=store.new_id(),
    )


def load(store: JobStore, threads: int, seconds: float, session_id: str = SESSION) -> tuple[int, float]:
    """Full jobs by that many submitters for about that long: how many, and the seconds it took."""
    done = [0] * threads
    end = time.perf_counter() + seconds

    def work(which: int) -> None:
        while time.perf_counter() < end:
            full_job(store, which * 1_000_000 + done[which], session_id)
            done[which] += 1

    started = time.perf_counter()
    pool = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return sum(done), time.perf_counter() - started


def naive_full_jobs(path: Path, rows: int, seconds: float) -> float:
    """Full jobs a second of a store that adds and commits the whole file for each transition, fully synced."""
    os.environ.setdefault("EMAIL", "bench@localhost")
    from dulwich import porcelain
    from dulwich.repo import Repo

    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    repo = Repo.init(str(path))
    config = repo.get_config()
    config.set((b"core",), b"fsyncObjectFiles", b"true")
    config.set((b"user",), b"name", b"bench")
    config.set((b"user",), b"email", b"bench@localhost")
    config.write_to_path()
    row = {"status": "completed", "subject": "probe part", "description": "Look at part " * 20, "result": RESULT}
    jobs = {f"{n:032x}": dict(row) for n in range(rows)}
    nodes: list[dict[str, Any]] = []

    def commit(job_id: str, status: str) -> None:
        jobs.setdefault(job_id, dict(row))["status"] = status
        nodes.append({"id": f"{len(nodes)}", "content": RESULT})
        for name, value in (("jobs.json", jobs), ("history.json", nodes)):
            target = path / name
            temporary = path / f".{name}.tmp"
            with open(temporary, "w") as file:
                json.dump(value, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        porcelain.add(repo, [str(path / "jobs.json"), str(path / "history.json")])
        porcelain.commit(repo, message=f"task: {job_id} {status}".encode())
        for directory in (path, path / ".git" / "refs" / "heads", path / ".git" / "objects"):
            fd = os.open(directory, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for status in ("pending", "queued", "running", "completed"):
            commit(f"new-{done}", status)
        done += 1
    repo.close()
    return done / (time.perf_counter() - started)


def in_turn(rounds: int, **measured: Callable[[], float]) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(rounds):
        for name, measure in measured.items():
            figures[name].append(measure())
    return figures


def directory_bytes(path: Path) -> int:
    """Files come and go while this looks."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


def git_figures(home: Path) -> tuple[int, int]:
    git = home / "sessions" / SESSION / "repo" / ".git"
    return directory_bytes(git), len(list((git / "objects" / "pack").glob("*.pack")))


def milliseconds_per_job(store: JobStore, threads: int, seconds: float) -> float:
    count, took = load(store, threads, seconds)
    return took * 1000 / count


def bench_flat(base: Path, quick: bool) -> dict[str, Any]:
    """A full job by the number of jobs the session has already, finished or queued."""
    sizes = {"10": (10, 0), "1k": (1_000, 0), "10k": (10_000, 0)}
    if not quick:
        sizes["100k"] = (100_000, 0)
    sizes["10k queued"] = (10, 10_000)
    stores = {}
    for name, (finished, queued) in sizes.items():
        started = time.perf_counter()
        stores[name] = GitJobStore(filled(base / f"flat-{name.replace(' ', '-')}", finished, queued))
        stores[name].session(SESSION).append("user", "warm")
        print(f"  filled {name}: {time.perf_counter() - started:.1f} s", flush=True)
    result: dict[str, Any] = {}
    for threads in (1, 16):
        rounds, seconds = (5, 1.0) if quick else (9, 2.0)
        figures = in_turn(
            rounds,
            **{
                name: (lambda s=store, t=threads, d=seconds: milliseconds_per_job(s, t, d))
                for name, store in stores.items()
            },
        )
        base_ms = statistics.median(figures["10"])
        for name, values in figures.items():
            median = statistics.median(values)
            result[f"{threads} submitters, {name}"] = {
                "ms_per_job": round(median, 3),
                "jobs_per_s": round(1000 / median, 1),
                "ratio_to_10": round(median / base_ms, 3),
                "spread": [round(min(values), 3), round(max(values), 3)],
            }
    for store in stores.values():
        store.close()
    return result


def bench_naive(base: Path, quick: bool) -> dict[str, Any]:
    """Sixteen submitters against the naive store with 1,000 jobs in its file, in turn."""
    store = GitJobStore(filled(base / "against-naive", 1_000))
    seconds = 1.0 if quick else 3.0
    figures = in_turn(
        3,
        ours=lambda: 1000 / milliseconds_per_job(store, 16, seconds),
        naive=lambda: naive_full_jobs(base / "naive", 1_000, seconds),
    )
    store.close()
    ours, naive = statistics.median(figures["ours"]), statistics.median(figures["naive"])
    return {
        "ours_jobs_per_s": round(ours, 1),
        "ours_transitions_per_s": round(ours * 4, 1),
        "naive_jobs_per_s": round(naive, 2),
        "ratio": round(ours / naive, 1),
    }


def bench_size(base: Path, quick: bool) -> dict[str, Any]:
    """Bytes of `.git` a job and packs at any time, one at a time and under load; then after gc."""
    jobs = 1_000 if quick else 10_000
    result = {}
    for name, threads in (("one at a time", 1), ("16 submitters", 16)):
        home = base / f"size-{threads}"
        store = GitJobStore(home, durability="relaxed")
        store.create_session(SESSION)
        store.session(SESSION).append("user", "hello")
        empty, most_packs = git_figures(home)[0], 0
        left = [jobs]
        lock = threading.Lock()

        def work(store: GitJobStore = store, left: list[int] = left, lock: threading.Lock = lock) -> None:
            while True:
                with lock:
                    if not left[0]:
                        return
                    left[0] -= 1
                    number = left[0]
                full_job(store, number)

        pool = [threading.Thread(target=work) for _ in range(threads)]
        for thread in pool:
            thread.start()
        while any(thread.is_alive() for thread in pool):
            most_packs = max(most_packs, git_figures(home)[1])
            time.sleep(0.05)
        before, packs = git_figures(home)
        started = time.perf_counter()
        store.gc(SESSION)
        took = time.perf_counter() - started
        after, packs_after = git_figures(home)
        store.close()
        result[name] = {
            "jobs": jobs,
            "bytes_per_job": round((before - empty) / jobs),
            "bytes_per_job_after_gc": round((after - empty) / jobs),
            "most_packs": max(most_packs, packs),
            "packs_after_gc": packs_after,
            "gc_s": round(took, 2),
        }
    return result


_OPEN = """
import sys, time
from openjobs.store import GitJobStore
import openjobs.repo.git
home, what = sys.argv[1:3]
started = time.perf_counter()
store = GitJobStore(home)
if what == "list":
    assert len(store.list("bench", limit=50)) == 50
else:
    store.get(what)
print(time.perf_counter() - started)
store.close()
"""


def bench_open(base: Path, quick: bool) -> dict[str, Any]:
    """A fresh process opens a big session: the newest 50, and any one job by id."""
    size = 10_000 if quick else 100_000
    home = base / ("flat-10k" if quick else "flat-100k")
    if not home.exists():
        filled(home, size)
    ids = [json.loads(line)["j"] for line in (home / "index" / "jobs.jsonl").read_bytes().splitlines()]
    picked = [ids[len(ids) * n // 7] for n in range(7)]

    def run(what: str) -> float:
        out = subprocess.run(
            [sys.executable, "-c", _OPEN, str(home), what],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            check=True,
            stdout=subprocess.PIPE,
        )
        return float(out.stdout)

    first = run(picked[0])
    return {
        "jobs": size,
        "list_newest_50_ms": round(statistics.median(run("list") for _ in range(7)) * 1000, 1),
        "get_first_time_ms": round(first * 1000, 1),
        "get_by_id_ms": round(statistics.median(run(each) for each in picked) * 1000, 1),
    }


def bench_memory(base: Path, quick: bool) -> dict[str, Any]:
    """Resident memory, descriptors and threads over many jobs in 100 sessions."""
    jobs = 5_000 if quick else 50_000
    store = GitJobStore(base / "memory", durability="relaxed")
    sessions = [store.create_session(f"s{n:03d}") for n in range(100)]
    lock, number, samples, most_files = threading.Lock(), [0], [], 0

    def work() -> None:
        while True:
            with lock:
                if number[0] >= jobs:
                    return
                number[0] += 1
                mine = number[0]
            full_job(store, mine, sessions[mine % 100])

    pool = [threading.Thread(target=work) for _ in range(16)]
    started = time.perf_counter()
    for thread in pool:
        thread.start()
    while any(thread.is_alive() for thread in pool):
        samples.append((number[0], _rss_bytes()))
        most_files = max(most_files, len(os.listdir("/dev/fd")))
        time.sleep(0.2)
    took = time.perf_counter() - started
    threads = threading.active_count()
    store.close()
    tenths = {}
    for tenth in range(1, 11):
        tenths[f"{tenth}/10"] = round(next((rss for done, rss in samples if done >= jobs * tenth // 10), 0) / 2**20, 1)
    return {
        "jobs": jobs,
        "jobs_per_s": round(jobs / took, 1),
        "rss_mb_by_tenths": tenths,
        "rss_mb_peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "most_open_files": most_files,
        "threads_of_the_store": threads - 1,
    }


def _rss_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


PARTS = {"flat": bench_flat, "naive": bench_naive, "size": bench_size, "open": bench_open, "memory": bench_memory}


def main() -> None:
    script.parts(__doc__, PARTS)


if __name__ == "__main__":
    main()
