"""The README's example does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import openjobs

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.skipif(not hasattr(openjobs, "JobRunner"), reason="the public names are not there yet")
def test_the_readmes_example_runs(tmp_path: Path) -> None:
    """In an empty directory it prints the end of its job and then each step with its commit."""
    example = re.search(r"<!-- example -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example[1]], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    first, *steps = done.stdout.splitlines()
    assert first == "completed SAY HELLO"
    assert [step.split()[1] for step in steps] == ["pending", "queued", "running", "completed"]
