"""The job store killed at any moment: nothing acknowledged is lost, and it opens without help (R1, R2, R5)."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

from openjobs.jobs import UNFINISHED, Errored, JobStatus, Queued, Started
from openjobs.store import GitJobStore
from tests.support import git
from tests.support.chaos import Chaos
from tests.support.jobs import clean, end_of, job_for
from tests.support.kills import said_until_killed

ORDER = [JobStatus.PENDING, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.COMPLETED]


def _work_until_killed(home: Path, say: int) -> None:
    """Jobs one after another; each acknowledged state is one line in the pipe."""
    store = GitJobStore(home, durability="relaxed")
    os.write(say, b"ready\n")
    while True:
        job = store.create(job_for(store, "s1", "x" * 700), Queued(runner_id="r1"))
        os.write(say, f"{job.job_id} queued\n".encode())
        store.apply(job.job_id, Started(run_id="run"))
        os.write(say, f"{job.job_id} running\n".encode())
        store.apply(job.job_id, end_of(job))
        os.write(say, f"{job.job_id} completed\n".encode())


def _killed_after(home: Path, lines: int, seconds: float) -> list[tuple[str, JobStatus]]:
    """What a worker had acknowledged when it was killed: so many states at least, and what a moment more gave."""
    states = said_until_killed(functools.partial(_work_until_killed, home), lines + 1, seconds)[1:]
    return [(line.split()[0], JobStatus(line.split()[1])) for line in states]


def test_kills_lose_nothing_and_need_no_help(tmp_path: Path, chaos: Chaos) -> None:
    """After each kill every acknowledged state is there, recovery ends what was left, and fsck finds nothing."""
    rounds, dice = chaos.rounds(200, 3000, "kills"), random.Random(chaos.seed(7))
    home = tmp_path / "home"
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("s1")
        store.session("s1").append("user", "hello")
    acknowledged_in_all = 0
    for number in range(rounds):
        acknowledged = _killed_after(home, dice.randrange(6), dice.random() * 0.02)
        acknowledged_in_all += len(acknowledged)
        with GitJobStore(home, durability="relaxed") as store:
            for job_id, status in acknowledged:
                there = store.get(job_id).status
                assert ORDER.index(there) >= ORDER.index(status), f"round {number}: {job_id} lost {status}"
            for job in store.unfinished("s1"):
                store.apply(job.job_id, Errored(event_id=store.new_id(), error="worker died before completion"))
            assert store.unfinished("s1") == []
            store.heal("s1")
            if number % 20 == 0 or number == rounds - 1:
                clean(store)
                repo = home / "sessions" / "s1" / "repo"
                git("fsck", "--strict", "--no-dangling", cwd=repo)
                assert git("status", "--porcelain", cwd=repo) == ""
    assert acknowledged_in_all > rounds
    with GitJobStore(home, durability="relaxed") as store:
        assert store.list("s1", status=UNFINISHED) == []
