"""How long `import openjobs` takes in a fresh interpreter, and what it is measured against."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

LIMIT_S = 0.25
ROUNDS = 15


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> int:
    # Interleaved, so that a slow moment of the machine meets both.
    pairs = [(seconds("pass"), seconds("import openjobs")) for _ in range(ROUNDS)]
    bare, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"import openjobs: {(ours - bare) * 1000:.0f} ms over an empty interpreter ({bare * 1000:.0f} ms)")
    print(f"limit {LIMIT_S * 1000:.0f} ms: {'kept' if ours - bare < LIMIT_S else 'BROKEN'}")
    return 0 if ours - bare < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
