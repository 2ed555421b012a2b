"""What the durable seam costs over the bare system calls of the same protocol, interleaved in one run."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from openjobs.durable import Disk

ROUNDS = 300
DATA = b"x" * 600


def bare_replace(path: Path) -> None:
    temporary = f"{path}.tmp"
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, DATA)
    os.fsync(fd)
    os.close(fd)
    os.rename(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> int:
    disk = Disk()
    with tempfile.TemporaryDirectory(dir=".") as name:
        ours, bare = Path(name) / "ours", Path(name) / "bare"
        pairs = [
            (seconds(lambda: disk.replace(ours, DATA)), seconds(lambda: bare_replace(bare))) for _ in range(ROUNDS)
        ]
    for label, side in zip(("Disk.replace", "bare calls"), zip(*pairs, strict=True), strict=True):
        q = [value * 1000 for value in statistics.quantiles(side, n=20)]
        print(f"{label:14} median {statistics.median(side) * 1000:.3f} ms, p5 {q[0]:.3f}, p95 {q[-1]:.3f}")
    print(f"median ratio {statistics.median(a / b for a, b in pairs):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
