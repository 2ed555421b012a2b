"""Interpreters that benchmarks start."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def environment() -> Mapping[str, str]:
    """Ours, in which this checkout is found and compiled modules are kept, as they are for an installed package."""
    compiled = tempfile.mkdtemp(prefix="openjobs-bench-pyc-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": compiled}
