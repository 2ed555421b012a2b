"""Ledgers and run logs of every format version open for ever (fixtures/ledger, fixtures/runlog)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from openjobs.ledger import Ledger
from openjobs.runlog import Completion, Ending, LogState, RunLogReader, RunLogWriter

FIXTURES = Path(__file__).parents[2] / "fixtures"


def private_copy(source: Path, target: Path) -> Path:
    """git keeps no permissions, and a file that others may read is none of ours."""
    target.mkdir(mode=0o700)
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        (target / path.name).chmod(0o600)
    return target


def test_a_ledger_of_version_1_opens(tmp_path: Path) -> None:
    """Compacted, with a dropped last record whose number is not used again."""
    path = private_copy(FIXTURES / "ledger", tmp_path / "here") / "v1.jsonl"
    assert [(record.seq, record.data) for record in Ledger(path).read()] == [
        (2, {"n": 1, "text": "é\u2028"}),
        (3, {"n": 2, "text": "é\u2028"}),
    ]
    assert Ledger(path).append({"n": 6}).seq == 6


def test_a_completed_run_log_of_version_1_opens(tmp_path: Path) -> None:
    """It is read, followed, and completed again without effect."""
    run = private_copy(FIXTURES / "runlog" / "v1" / "complete", tmp_path / "here")
    state = LogState(
        stdout_bytes=4,
        stderr_bytes=4,
        log_bytes=21,
        source="keeper-1",
        completion=Completion(outcome="completed", ending=Ending.DRAINED),
    )
    assert RunLogReader(run, task_id="task-1", run_id="run-1").state() == state
    assert b"".join(RunLogReader(run).follow()) == b"starting\nout\nerr\nend\n"
    with RunLogWriter(run, task_id="task-1", run_id="run-1") as log:
        log.complete("completed")
        assert log.state == state


@pytest.mark.parametrize("arrived", range(5))
def test_a_pending_append_of_version_1_is_completed(tmp_path: Path, arrived: int) -> None:
    """Its writer died in the middle of an append."""
    run = private_copy(FIXTURES / "runlog" / "v1" / "pending", tmp_path / "here")
    assert (run / "log").read_bytes() == b"starting\nou"
    (run / "log").write_bytes(b"starting\nout\n"[: 9 + arrived])
    assert RunLogReader(run).read().data == b"starting\n"
    with RunLogWriter(run, task_id="task-1", run_id="run-1") as log:
        assert log.state == LogState(stdout_bytes=4, log_bytes=13, source="keeper-1")
    assert RunLogReader(run).read().data == b"starting\nout\n"
