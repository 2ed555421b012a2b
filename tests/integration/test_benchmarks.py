"""The benchmarks measure what they say: small runs of those parts that need nothing but this package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from openjobs import GitJobStore
from tests.benchmarks import __main__ as table
from tests.benchmarks import bench_peers, bench_recovery
from tests.benchmarks.peers.peer import RESULT, Peer

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("name", ["openjobs", "sqlite", "git-dulwich", "git"])
def test_a_cycle_reads_its_result_back_from_the_store(name: str, tmp_path: Path) -> None:
    """Whole cycles by one and by several submitters; a system that answers with anything else fails the run."""
    with bench_peers.peer(name)(tmp_path).open() as cycle:
        assert cycle(1) == RESULT
        found = bench_peers.measure(cycle, 3, 0.05, 100)
    assert found["jobs"] >= 3
    assert found["jobs_per_s"] > 0
    assert found["p99_ms"] >= found["median_ms"] > 0
    assert found["processor_ms"] >= 0


def test_a_wrong_result_ends_the_measurement() -> None:
    """Speed without the result is not measured."""
    with pytest.raises(AssertionError, match="read back"):
        bench_peers.measure(lambda number: "something else", 2, 1.0, 0)


def test_every_system_says_how_it_was_run() -> None:
    """The table can be judged: how each was run, what is on disk when a cycle is over, and what it promises less."""
    for name in bench_peers.PEERS:
        made = bench_peers.peer(name)
        assert issubclass(made, Peer)
        assert made.title
        assert made.how
        assert made.durable
        assert made.less or name == "openjobs"


def test_what_is_not_here_is_named_and_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A system that is not installed has a row that says so."""
    monkeypatch.setattr(bench_peers, "missing", lambda name: "no such thing here")
    result = bench_peers.compare(["huey"], 1, 0.1, tmp_path)
    assert result["huey"]["skipped"] == "no such thing here"


def test_the_table_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of systems, nested figures, and systems that were not measured."""
    figures: dict[str, Any] = {
        "jobs_per_s": 200.0,
        "spread": [180.0, 210.0],
        "median_ms": 5.0,
        "p99_ms": 9.0,
        "processor_ms": 2.5,
    }
    figures |= {"openjobs_is": 1.0}
    table.show(
        {
            "peers": {
                "openjobs": {"title": "openjobs", "1": figures, "16": figures},
                "huey": {"title": "huey", "skipped": "not installed"},
            },
            "latency": {"submit": {"median_ms": 3.25, "p99_ms": 12.5}},
        }
    )
    shown = capsys.readouterr().out
    assert re.search(r"openjobs +200\.0 +\(180-210\) +5\.0 +2\.50 +1\.00x", shown)
    assert "not measured: not installed" in shown
    assert re.search(r"submit +median_ms 3\.25 +p99_ms 12\.5", shown)


def test_a_start_looks_only_at_sessions_that_a_dead_runner_had_in_use(tmp_path: Path) -> None:
    """The generated home is one of real sessions, and a start in it opens those with unfinished jobs and no other."""
    home = tmp_path / "home"
    bench_recovery.generate(home, 8, jobs_each=2)
    with GitJobStore(home) as store:
        assert len(store.sessions()) == 8
        jobs = store.list(limit=None)
        assert len({job.job_id for job in jobs}) == 16
        assert all(store.get(job.job_id).status == "completed" for job in jobs)
        assert [job.parent_session_id for job in store.list("s00003")] == ["s00003"] * 2
    bench_recovery.leave_unfinished(home, 4, ["s00001", "s00005"])
    found = bench_recovery.start(home)
    assert (found["sessions_opened"], found["jobs_ended"]) == (2, 4)
    found = bench_recovery.start(home)
    assert (found["sessions_opened"], found["jobs_ended"]) == (0, 0)
