"""How quick the run log is here: drain, append, follower. Run: python -m tests.benchmarks.bench_runlog

Each figure comes with what the disk itself needs, so that figures of two machines can be compared.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from openjobs.durable import Disk
from openjobs.runlog import Drain, RunLogReader, RunLogWriter, SourceStatus, Stream

TOTAL_BYTES = 48 * 2**20
LINES = 200


class _Memory:
    """A source that has everything already."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._block = os.urandom(2**20)

    def status(self) -> SourceStatus:
        return SourceStatus(identity="bench", stdout_bytes=self._total, stderr_bytes=0, outcome="completed")

    def read(self, stream: Stream, offset: int, limit: int) -> bytes:
        left = self._total - offset if stream is Stream.STDOUT else 0
        begin = offset % 2**19
        return self._block[begin : begin + max(0, min(limit, left))]


def drain_mb_per_s(root: Path, total: int = TOTAL_BYTES, *, disk: Disk | None = None) -> float:
    with RunLogWriter(root, task_id="t", run_id="r", disk=disk) as writer:
        writer.accept("bench")
        begin = time.perf_counter()
        Drain(writer, _Memory(total), identity="bench").run()
        return total / (time.perf_counter() - begin) / 1e6


def bare_mb_per_s(root: Path, total: int = TOTAL_BYTES) -> float:
    """Two files in turn, 56 KiB written and synced to each: the journal's two barriers and nothing else."""
    disk, data = Disk(), os.urandom(57344)
    slot, log = disk.create(root / "slot"), disk.create(root / "bare")
    begin = time.perf_counter()
    for number in range(total // len(data)):
        os.lseek(slot, number % 2 * 61440, os.SEEK_SET)
        disk.write(slot, data)
        disk.sync_data(slot)
        disk.write(log, data)
        disk.sync_data(log)
    spent = time.perf_counter() - begin
    for fd, name in ((slot, "slot"), (log, "bare")):
        os.close(fd)
        os.unlink(root / name)
    return total / spent / 1e6


def compared(root: Path, rounds: int = 25, total: int = 6 * 2**20) -> None:
    """Both in turn, a little at a time: what else the machine does is the same for both."""
    ways: dict[str, Callable[[Path], float]] = {
        "drain, durable": lambda run: drain_mb_per_s(run, total),
        "the two barriers alone": lambda run: bare_mb_per_s(run, total),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            run = root / f"{number} {name}"
            run.mkdir(mode=0o700)
            found[name].append(way(run))
            shutil.rmtree(run)
    for name, speeds in found.items():
        ordered = sorted(speeds)
        print(f"{name}: median {statistics.median(ordered):.0f} MB/s, best {ordered[-1]:.0f} MB/s")
    drained, bare = found.values()
    ratio = statistics.median(ours / theirs for ours, theirs in zip(drained, bare, strict=True))
    print(f"a drain against its two barriers alone: {ratio:.2f} times")


def append_ms(root: Path) -> list[float]:
    found = []
    with RunLogWriter(root, task_id="t", run_id="r") as writer:
        for _ in range(LINES):
            begin = time.perf_counter()
            writer.append(b"x" * 99 + b"\n")
            found.append((time.perf_counter() - begin) * 1e3)
    return found


def follower_ms(root: Path) -> list[float]:
    """From the moment an append returned to the moment the follower has the line."""
    seen: dict[int, float] = {}
    with RunLogWriter(root, task_id="t", run_id="r") as writer:

        def follow() -> None:
            for chunk in RunLogReader(root).follow(whole_lines=True):
                for line in chunk.splitlines():
                    seen[int(line)] = time.perf_counter()

        thread = threading.Thread(target=follow)
        thread.start()
        written = {}
        for number in range(LINES):
            time.sleep(number % 10 * 0.012)
            writer.append(b"%d\n" % number)
            written[number] = time.perf_counter()
        writer.accept("bench")
        writer.complete("completed")
        thread.join()
    return [max(0.0, seen[number] - written[number]) * 1e3 for number in written]


def barrier_ms(root: Path, size: int) -> float:
    """One write and sync of `size` bytes at the end of a file: what the disk itself needs."""
    disk, found = Disk(), []
    fd = disk.create(root / "barrier")
    for _ in range(200):
        begin = time.perf_counter()
        disk.write(fd, b"x" * size)
        disk.sync_data(fd)
        found.append((time.perf_counter() - begin) * 1e3)
    os.close(fd)
    os.unlink(root / "barrier")
    return statistics.median(found)


def _show(name: str, found: list[float]) -> None:
    ordered = sorted(found)
    print(f"{name}: median {statistics.median(ordered):.2f} ms, worst {ordered[-1]:.2f} ms")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        runs = []
        for number in range(5):
            runs.append(Path(name) / str(number))
            runs[-1].mkdir(mode=0o700)
        print(
            f"the disk: {barrier_ms(runs[0], 57344):.2f} ms for 56 KiB, {barrier_ms(runs[0], 100):.2f} ms for 100 bytes"
        )
        compared(runs[0])
        print(f"drain: {drain_mb_per_s(runs[1], disk=Disk(durable=False)):.0f} MB/s relaxed")
        _show("append of a line", append_ms(runs[2]))
        _show("follower behind a commit", follower_ms(runs[3]))
        begin = time.perf_counter()
        RunLogWriter(runs[4], task_id="t", run_id="r").close()
        print(f"making a log: {(time.perf_counter() - begin) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
