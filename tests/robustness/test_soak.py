"""Three processes on one home, eight threads each, killed at random: nothing is lost, and who lives stays small
(R1, R4, R5, R11)."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobClient
from openjobs.jobs import TERMINAL
from tests.support import git
from tests.support.chaos import Chaos
from tests.support.polling import eventually

ROOT = Path(__file__).parents[2]
SESSIONS = ("one", "two", "three")


class Worker:
    """A process of the soak, started again after each kill."""

    def __init__(self, home: Path, number: int) -> None:
        self.home, self.number, self.lives = home, number, 0
        self.out = home.parent / f"said-{number}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, seed: int) -> None:
        self.lives += 1
        words = [str(self.home), ",".join(SESSIONS), f"{seed}.{self.number}.{self.lives}", str(self.out)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.soak_worker", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def end(self, how: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(60)

    def said(self) -> list[list[str]]:
        return [line.split() for line in self.out.read_text().splitlines()] if self.out.exists() else []


@pytest.mark.timeout(1200)
def test_a_home_in_heavy_use_loses_nothing_and_stays_small(tmp_path: Path, chaos: Chaos) -> None:
    """Two of three processes are killed again and again. Every acknowledged job is there and ended as was said, all
    are terminal after a recovery, fsck and git find nothing, and the third process does not grow."""
    seed = chaos.seed(3)
    dice, seconds = random.Random(seed), chaos.rounds(15, 240, "seconds")
    home = tmp_path / "home"
    with GitJobStore(home, "relaxed") as store:
        for session_id in SESSIONS:
            store.create_session(session_id)
    workers = [Worker(home, number) for number in range(3)]
    kills = 0
    try:
        for worker in workers:
            worker.start(seed)
        eventually(lambda: all(worker.said() for worker in workers), timeout=60)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(dice.uniform(0.3, 3.0))  # the moment of the kill is the random thing here
            worker = dice.choice(workers[1:])
            worker.end(signal.SIGKILL)
            kills += 1
            worker.start(seed)
        for worker in workers:
            worker.end(signal.SIGTERM)
    finally:
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.end(signal.SIGKILL)
    lines = [line for worker in workers for line in worker.said()]
    submitted = {line[1] for line in lines if line[0] == "submitted" and len(line) == 2}
    ended = {line[1]: line[2] for line in lines if line[0] == "ended" and len(line) == 3}
    with GitJobStore(home, "relaxed") as store, JobClient(store) as client:
        client.recover()
        for job_id in submitted:
            job = client.get(job_id)
            assert job.status in TERMINAL, f"{job_id} is {job.status}"
            assert ended.get(job_id, job.status.value) == job.status.value, f"{job_id} ended twice"
        for session_id in SESSIONS:
            assert store.fsck(session_id).findings == []
            git("fsck", "--no-dangling", cwd=store.session_dir(session_id) / "repo")
    sizes = [tuple(map(int, line[1:])) for line in workers[0].said() if line[0] == "size" and len(line) == 4]
    assert workers[0].said()[-1] == ["over"]
    middle, last = sizes[len(sizes) // 3 : 2 * len(sizes) // 3], sizes[2 * len(sizes) // 3 :]
    for what, column, most in (("memory", 0, 12 << 20), ("descriptors", 1, 8), ("threads", 2, 4)):
        before, after = (statistics.median(size[column] for size in part) for part in (middle, last))
        assert after <= before + most, f"{what} grew from {before} to {after}"
    chaos.count("kills", kills)
    chaos.count("jobs", len(submitted))
    chaos.count("ends that were told", len(ended))
    chaos.count("MB of the process that lived", round(max(size[0] for size in sizes) / 2**20))
