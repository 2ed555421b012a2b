"""Hosts that are killed at any moment lose no job that a client was told of (R1, R3, R5, R7)."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from openjobs.errors import OpenJobsError
from openjobs.host.client import connect, ensure_host, spawn
from openjobs.host.config import prepare_home
from openjobs.ids import new_id
from openjobs.jobs import SpawnRequest
from openjobs.runner import JobClient
from openjobs.store import GitJobStore
from tests.support import eventually
from tests.support.chaos import Chaos

CLIENTS = 4


def is_gone(pid: int) -> bool:
    """Whether it has ended; who adopted it may take a while to notice."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def home(scratch: Path) -> Iterator[Path]:
    path = prepare_home(scratch / "h")
    yield path
    if (client := connect(path)) is not None:
        with client:
            pid = client.about["pid"]
            client.call("shutdown")
        eventually(lambda: is_gone(pid), 30)
    shutil.rmtree(path)


@pytest.mark.timeout(600)
def test_no_acknowledged_job_is_lost(home: Path, chaos: Chaos) -> None:
    """While hosts are killed under four clients, every submit ends as told: the job is there, once, and it ends.

    A job is completed with its own result, or errored because its worker died; its effect was done at
    most once; a client that was refused may simply ask again under the same id.
    """
    chance = random.Random(7)
    deadline = time.monotonic() + chaos.rounds(12, 300, "seconds of kills")
    told: list[str] = []
    marks = home.parent / "marks"
    marks.mkdir()

    def submit() -> None:
        while time.monotonic() < deadline:
            job_id = new_id()
            request = SpawnRequest(
                prompt=f"echo x >> {marks}/{job_id}; echo {job_id}",
                parent_session_id="default",
                agent_id="shell",
                job_id=job_id,
            )
            try:
                spawn(home, request, environ=os.environ, create_session=True)
            except OpenJobsError:
                continue  # five hosts in a row were killed under it: refused, or its outcome is unknown
            told.append(job_id)

    clients = [threading.Thread(target=submit) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    kills = 0
    while time.monotonic() < deadline:
        with ensure_host(home) as host:
            pid = host.about["pid"]
        time.sleep(chance.uniform(0, 1.5))
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
            kills += 1
    for client in clients:
        client.join()

    assert told
    assert kills >= 3
    store = GitJobStore(home)
    reader = JobClient(store)
    try:
        reader.recover()
        for job_id in told:
            job = eventually(lambda job_id=job_id: _ended(reader, job_id), 30)  # type: ignore[misc]
            ran = len((marks / job_id).read_text().split()) if (marks / job_id).exists() else 0
            assert ran <= 1, f"job {job_id} ran {ran} times"
            if job.error is None:
                assert (job.result_text, ran) == (job_id, 1)
            else:
                assert job.error == "worker died before completion"
        assert len(set(told)) == len(told)
    finally:
        reader.close()
        store.close()
        shutil.rmtree(marks)


def _ended(reader: JobClient, job_id: str) -> object:
    job = reader.get(job_id)
    return job if job.terminal else None
