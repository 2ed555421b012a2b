"""A benchmark run by itself: its options, a directory to work in, what it prints and what it writes."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def show_lines(result: Figures) -> None:
    for name, figures in result.items():
        print(f"{name}: {figures}", flush=True)


def alone(
    doc: str | None,
    measure: Callable[[Path, argparse.Namespace], Figures],
    *,
    quick: str,
    show: Callable[[Figures], object] = show_lines,
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """`measure(directory, arguments)` in a temporary directory; `options` adds a benchmark's own."""
    parser = argparse.ArgumentParser(description=doc)
    options(parser)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary directory")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="openjobs-bench-", dir=arguments.directory))
    try:
        result = measure(base, arguments)
    finally:
        shutil.rmtree(base, ignore_errors=True)  # minutes, where a home is large
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def parts(doc: str | None, by_name: Mapping[str, Callable[[Path, bool], Figures]]) -> None:
    """The parts that are named, or all, each shown as soon as it is measured."""

    def measure(base: Path, arguments: argparse.Namespace) -> Figures:
        figures: Figures = {}
        for name in arguments.parts or by_name:
            print(f"{name}: {(by_name[name].__doc__ or '').strip()}", flush=True)
            figures[name] = by_name[name](base, arguments.quick)
            for key, value in figures[name].items():
                print(f"  {key}: {value}", flush=True)
        return figures

    alone(
        doc,
        measure,
        quick="smaller sizes, for a look",
        show=lambda result: None,
        options=lambda parser: parser.add_argument(
            "parts", nargs="*", choices=[*by_name, []], help="which parts; all without any"
        ),
    )
