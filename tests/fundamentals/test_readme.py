"""The README's example does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    """In an empty directory it prints the end of its job and then each step with its commit."""
    example = re.search(r"<!-- example -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example[1]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    first, *steps = done.stdout.splitlines()
    assert first == "completed SAY HELLO"
    assert [step.split()[1] for step in steps] == ["pending", "queued", "running", "completed"]
