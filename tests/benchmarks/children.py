"""Interpreters that benchmarks start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(base: Path) -> Mapping[str, str]:
    """Ours, in which this checkout is found, and compiled modules are kept below `base` as they are for an installed
    package."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(base / "compiled")}
