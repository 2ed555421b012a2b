"""Everything that is measured, as one table (and as JSON, and as a picture).

    python -m tests.benchmarks [--quick] [--json FILE] [--picture FILE.svg] [--page FILE.md] [PART …]
    python -m tests.benchmarks --from FILE …        show, or draw, what was measured before

Parts: `peers`, `store`, `latency`, `recovery`, `footprint`; all without any. `nox -s bench` runs this in an
environment that has the other systems.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import bench_footprint, bench_latency, bench_limits, bench_peers, bench_recovery, bench_store

BEGIN, END = "<!-- whole job cycle -->", "<!-- end of whole job cycle -->"


def peers(base: Path, quick: bool) -> dict[str, Any]:
    """Whole job cycles beside other systems: submit a no-op job, its result durable and read back. 4 workers."""
    rounds, seconds = (2, 0.7) if quick else (5, 2.0)
    return bench_peers.compare(list(bench_peers.PEERS), rounds, seconds, base)


def store(base: Path, quick: bool) -> dict[str, Any]:
    """Transitions a second, against the disk; by jobs that the session has already; bytes."""
    return {
        "against the disk": bench_limits.run(base, quick),
        "by jobs there are": bench_store.bench_flat(base, quick),
        "bytes and packs": bench_store.bench_size(base, quick),
    }


PARTS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "peers": peers,
    "store": store,
    "latency": bench_latency.run,
    "recovery": bench_recovery.run,
    "footprint": bench_footprint.run,
}


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
    }


def show(result: dict[str, Any]) -> None:
    for part, figures in result.items():
        print(f"\n== {part}")
        if part == "peers":
            bench_peers.show(figures)
        else:
            _show(figures, "")


def _show(figures: dict[str, Any], indent: str) -> None:
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            print(f"{indent}{name}")
            _show(value, indent + "  ")
        elif isinstance(value, dict):
            print(f"{indent}{name:56}" + "  ".join(f"{key} {_short(each)}" for key, each in value.items()))
        else:
            print(f"{indent}{name:56}{_short(value)}")


def _short(value: Any) -> str:
    return f"{value:,.10g}" if isinstance(value, float | int) else str(value)


def draw(result: dict[str, Any], path: Path) -> None:
    """Jobs a second of each system, one and sixteen submitters. The only use of matplotlib."""
    import importlib

    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "openjobs"
    matplotlib.rcParams["svg.fonttype"] = "none"
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    rows = [row for row in result["peers"].values() if "skipped" not in row]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.36 * len(rows) + 1.4), sharey=True)
    for axis, submitters in zip(axes, ("1", "16"), strict=True):
        names = [row["title"] for row in rows]
        rates = [row[submitters]["jobs_per_s"] for row in rows]
        least = [rate - row[submitters]["spread"][0] for rate, row in zip(rates, rows, strict=True)]
        most = [row[submitters]["spread"][1] - rate for rate, row in zip(rates, rows, strict=True)]
        colours = ["#2f6f9f" if name == "openjobs" else "#b8c4cc" for name in names]
        axis.barh(names, rates, color=colours, xerr=[least, most], ecolor="#66727a", capsize=2)
        axis.set_xscale("log")
        axis.set_title(
            f"{submitters} submitter{'s' if submitters != '1' else ''}, jobs a second (log scale)", fontsize=10
        )
        axis.grid(axis="x", which="both", alpha=0.25)
        for place, rate in enumerate(rates):
            axis.annotate(
                f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}",
                (rate, place),
                (4, -9),
                textcoords="offset points",
                fontsize=7,
            )
    axes[0].invert_yaxis()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def write_page(result: dict[str, Any], page: Path) -> None:
    """The table of the whole job cycle between the page's two marks."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no {BEGIN} and {END}")
    load = ", ".join(f"{value:g}" for value in result["machine"]["load"])
    note = (
        f"Python {result['machine']['python']}, {result['machine']['system']}, {result['machine']['processors']} "
        f"processors; load of the machine when the run began (1, 5, 15 minutes): {load}."
    )
    table = bench_peers.markdown(result["peers"])
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{note}\n\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all without any")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller homes, for a look")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--picture", type=Path, help="draw the whole job cycles there (needs matplotlib)")
    parser.add_argument("--page", type=Path, help="put their table into that page, between its marks")
    parser.add_argument("--from", dest="measured", type=Path, help="figures from such a file; nothing is measured")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary directory")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    result: dict[str, Any] = {}
    if arguments.measured:
        result = json.loads(arguments.measured.read_text())
    else:
        result["machine"] = machine()
        base = Path(tempfile.mkdtemp(prefix="openjobs-bench-", dir=arguments.directory))
        try:
            for name in arguments.parts or PARTS:
                print(f"{name}: {(PARTS[name].__doc__ or '').strip()}", file=sys.stderr, flush=True)
                directory = base / name
                directory.mkdir()
                result[name] = PARTS[name](directory, arguments.quick)
                if arguments.json:  # what was measured stays when a later part fails
                    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            shutil.rmtree(base, ignore_errors=True)
    show(result)
    if arguments.picture and "peers" in result:
        draw(result, arguments.picture)
    if arguments.page and "peers" in result:
        write_page(result, arguments.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
