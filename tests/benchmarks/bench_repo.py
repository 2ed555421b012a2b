"""What a commit costs: against the bare system calls of the protocol, and by size of batch.

    python tests/benchmarks/bench_repo.py [directory] [seconds per figure]

Interleaved, since a disk's speed drifts by a factor of two within minutes; ratios hold.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from openjobs.durable import Disk
from openjobs.repo import Change, GitRepository, Transaction, View

ROW_BYTES, ROWS, SEGMENT_BYTES = 595, 84, 100_000


class Workload:
    """One row of a 50 KB page per commit; every fourth appends to a segment that grows to 100 KB and a bit."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pool = [self._row(i) for i in range(500)]
        self._rows = self._pool[:ROWS]
        self._number = 0
        self._segment, self._segments = b"", 0

    def _row(self, i: int) -> bytes:
        text = " ".join(f"word{self._random.randrange(3000)}" for _ in range(70))
        return (
            f'"{i:08d}-4c2f-4f0e":{{"status":"running","stamp":{self._random.random()},"text":"{text}'.ljust(
                ROW_BYTES - 3
            )
            + '"}'
        )[:ROW_BYTES].encode()

    def page(self) -> bytes:
        return b"{\n" + b",\n".join(self._rows) + b"\n}\n"

    def files(self) -> dict[str, bytes]:
        self._segment = b"".join(self._row(i) + b"\n" for i in range(SEGMENT_BYTES * 9 // 10 // ROW_BYTES))
        return {"meta.json": b"{}\n", "jobs.json": self.page(), "history/00/0000.jsonl": self._segment}

    def next(self) -> Transaction:
        self._number += 1
        number = self._number

        def change(view: View) -> Change:
            assert view.read("jobs.json") is not None
            at = self._random.randrange(ROWS)
            self._rows[at] = self._random.choice(self._pool)
            files: dict[str, bytes | None] = {"jobs.json": self.page()}
            if number % 4 == 0:
                if len(self._segment) > SEGMENT_BYTES * 11 // 10:
                    self._segment, self._segments = b"", self._segments + 1
                self._segment += self._random.choice(self._pool) + b"\n"
                files[f"history/{self._segments // 100:02d}/{self._segments % 100:04d}.jsonl"] = self._segment
            return Change(
                files=files, subject=f"job {number} queued → running", trailers=(("Openjobs-Job", str(number)),)
            )

        return change


class Bare:
    """The same system calls with constant bytes of the same sizes, and nothing else."""

    def __init__(self, path: Path) -> None:
        self._git = f"{path}/.git"
        self._path = str(path)
        os.makedirs(f"{self._git}/openjobs/scratch")
        os.makedirs(f"{self._git}/objects/pack")
        os.makedirs(f"{self._git}/refs/heads")
        os.makedirs(f"{self._git}/logs/refs/heads")
        self._write(f"{self._git}/refs/heads/main", b"a" * 41)
        self._write(f"{self._git}/HEAD", b"ref: refs/heads/main\n")
        self._write(f"{self._git}/index", b"x" * 400)
        self._pack, self._idx, self._page = os.urandom(45_000), os.urandom(4_000), os.urandom(50_000)
        self._names: list[str] = []
        self._number = 0

    @staticmethod
    def _write(path: str, data: bytes, *, sync: bool = False) -> None:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        os.write(fd, data)
        if sync:
            os.fsync(fd)
        os.close(fd)

    @staticmethod
    def _read(path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.read(fd, 100)
        os.close(fd)

    @staticmethod
    def _sync_dir(path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)

    def commit(self) -> None:
        git, scratch = self._git, f"{self._git}/openjobs/scratch"
        self._number += 1
        lock = os.open(f"{git}/openjobs/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._write(f"{git}/index.lock", b"openjobs 12345\n")
        self._read(f"{git}/HEAD")
        self._read(f"{git}/refs/heads/main")
        os.stat(f"{git}/index")
        pack = f"{git}/objects/pack/pack-{self._number:040x}"
        self._write(pack + ".keep", b"openjobs\n")
        self._write(f"{scratch}/pack", self._pack, sync=True)
        self._write(f"{scratch}/idx", self._idx, sync=True)
        os.rename(f"{scratch}/pack", pack + ".pack")
        os.rename(f"{scratch}/idx", pack + ".idx")
        self._sync_dir(f"{git}/objects/pack")
        self._write(f"{scratch}/work", self._page)
        os.rename(f"{scratch}/work", f"{self._path}/jobs.json")
        os.lstat(f"{self._path}/jobs.json")
        self._write(f"{scratch}/index", b"x" * 400, sync=True)
        os.rename(f"{scratch}/index", f"{git}/index")
        fd = os.open(f"{git}/refs/heads/main.lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o400)
        self._read(f"{git}/HEAD")
        self._read(f"{git}/refs/heads/main")
        os.write(fd, b"a" * 41)
        os.fsync(fd)
        os.close(fd)
        os.rename(f"{git}/refs/heads/main.lock", f"{git}/refs/heads/main")
        self._sync_dir(f"{git}/refs/heads")
        for name in ("refs/heads/main", "HEAD"):
            fd = os.open(f"{git}/logs/{name}", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            os.write(fd, b"x" * 150)
            os.close(fd)
        os.unlink(f"{git}/index.lock")
        os.stat(f"{git}/index")
        self._names.append(pack)
        if len(self._names) > 2:
            old = self._names.pop(0)
            for end in (".idx", ".pack", ".keep"):
                os.unlink(old + end)
        os.close(lock)


def timed(work: object, seconds: float, chunk: int = 20) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(chunk):
            start = time.perf_counter()
            work()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
    return times


def single(root: Path, seconds: float) -> None:
    load = Workload(1)
    repository = GitRepository.create(root / "single", Disk(), load.files())
    bare = Bare(root / "bare")
    ours: list[float] = []
    theirs: list[float] = []
    end = time.perf_counter() + 2 * seconds
    while time.perf_counter() < end:
        ours += timed(lambda: repository.transact([load.next()]), 0)
        ours += timed(lambda: repository.transact([load.next()]), 0.1)
        theirs += timed(bare.commit, 0.1)
    slow, bare_slow = (sorted(times)[len(times) * 99 // 100] for times in (ours, theirs))
    median, bare_median = statistics.median(ours), statistics.median(theirs)
    print(
        f"one commit at a time: median {median * 1e3:.2f} ms, bare system calls {bare_median * 1e3:.2f} ms, "
        f"ratio {median / bare_median:.2f}; p99 {slow * 1e3:.1f} against {bare_slow * 1e3:.1f} ms"
    )
    describe(root / "single", len(ours))
    repository.close()


def relative(root: Path, seconds: float) -> None:
    """Batches of 16 and bare single commits in turns: their ratio holds on a busy machine."""
    load = Workload(2)
    repository = GitRepository.create(root / "relative", Disk(), load.files())
    bare = Bare(root / "relative-bare")
    ours: list[float] = []
    theirs: list[float] = []
    end = time.perf_counter() + 2 * seconds
    while time.perf_counter() < end:
        ours += timed(lambda: repository.transact([load.next() for _ in range(16)]), 0.05, 2)
        theirs += timed(bare.commit, 0.05, 2)
    batch, one = statistics.median(ours), statistics.median(theirs)
    print(
        f"a batch of 16 takes {batch / one:.2f} times a bare single commit ({batch * 1e3:.2f} and {one * 1e3:.2f} ms)"
    )
    repository.close()


def batches(root: Path, seconds: float, disk: Disk, label: str) -> None:
    for size in (1, 4, 16, 64, 256):
        path = root / f"{label}-{size}"
        load = Workload(size)
        repository = GitRepository.create(path, disk, load.files())
        count, end, start = 0, time.perf_counter() + seconds, time.perf_counter()
        while time.perf_counter() < end:
            repository.transact([load.next() for _ in range(size)])
            count += size
        took = time.perf_counter() - start
        print(
            f"{label}: batches of {size:3}: {count / took:6.0f} commits/s, {took / count * size * 1e3:.1f} ms a batch"
        )
        describe(path, count)
        repository.close()


def tracked(root: Path, entries: int, seconds: float) -> None:
    """What 3,000 tracked files cost a single commit."""
    load = Workload(9)
    files = load.files() | {
        f"jobs/{i // 250:02d}/{i % 250:04d}.json": b"{}\n" + str(i).encode() for i in range(entries)
    }
    repository = GitRepository.create(root / "wide", Disk(durable=False), files)
    repository = GitRepository(root / "wide", Disk())
    start = time.perf_counter()
    repository.transact([load.next()])
    first = time.perf_counter() - start
    times = timed(lambda: repository.transact([load.next()]), seconds)
    print(
        f"with {entries} tracked files: first {first * 1e3:.0f} ms, then median {statistics.median(times) * 1e3:.2f} ms"
    )
    repository.close()


def describe(path: Path, commits: int) -> None:
    packs = path / ".git" / "objects" / "pack"
    size = sum(file.stat().st_size for file in packs.iterdir())
    print(f"    {commits} commits, {size / commits:.0f} bytes each, {len(list(packs.glob('*.pack')))} packs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("seconds", nargs="?", type=float, default=3.0)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="bench-repo-", dir=arguments.directory))
    try:
        if arguments.profile:
            import cProfile

            with cProfile.Profile() as profile:
                batches(root, arguments.seconds, Disk(), "synced")
            profile.print_stats("tottime")
            return
        single(root, arguments.seconds)
        relative(root, arguments.seconds)
        batches(root, arguments.seconds, Disk(), "synced")
        batches(root, arguments.seconds, Disk(durable=False), "relaxed")
        tracked(root, 3000, arguments.seconds)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
