"""RQ on a Redis of its own (loopback, a free port, `appendfsync always`), with four worker processes.

RQ's `Worker` forks for each job, which its documentation advises for production; `SimpleWorker` runs jobs in
its own process, which it names the fast one. Both are measured.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..children import ROOT
from .peer import PROMPT, WORKERS, Peer, noop


class Rq(Peer):
    title = "RQ, SimpleWorker"
    how = "4 `rq worker -w rq.SimpleWorker` processes; result awaited by XREAD (Job.latest_result)"
    durable = "each Redis command or transaction synced before its answer (appendfsync always)"
    less = "the newest state only, results kept for 500 s; a server beside the program"
    worker = "rq.worker.SimpleWorker"

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[int], str]]:
        redis: Any = importlib.import_module("redis")
        rq: Any = importlib.import_module("rq")
        with redis_server(self.directory) as port:
            url = f"redis://127.0.0.1:{port}"
            connection = redis.Redis(port=port)
            queue = rq.Queue("bench", connection=connection)
            with rq_workers(url, self.worker, connection):

                def cycle(number: int) -> str:
                    result = queue.enqueue(noop, PROMPT).latest_result(timeout=60)
                    assert result is not None
                    found: str = result.return_value
                    return found

                yield cycle
            connection.close()


class RqForking(Rq):
    title = "RQ, forking Worker"
    how = "4 `rq worker` processes, a fork for each job (RQ's default)"
    worker = "rq.worker.Worker"


def available() -> str | None:
    """Why RQ cannot be measured here, or None."""
    return None if shutil.which("redis-server") else "no redis-server here (Debian: apt-get install redis-server)"


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    redis: Any = importlib.import_module("redis")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--daemonize", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as look:
            until = time.monotonic() + 20
            while True:
                try:
                    found: Any = look.config_get("appendfsync")
                    assert found["appendfsync"] == "always"
                    break
                except redis.exceptions.ConnectionError:
                    if time.monotonic() > until or process.poll() is not None:
                        raise
                    time.sleep(0.01)
        yield port
    finally:
        end(process)


@contextlib.contextmanager
def rq_workers(url: str, worker: str, connection: Any) -> Iterator[None]:
    workers: Any = importlib.import_module("rq").Worker
    command = [sys.executable, "-m", "rq.cli", "worker", "--url", url, "-w", worker, "--quiet", "bench"]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(WORKERS)
    ]
    try:
        until = time.monotonic() + 30
        while len(workers.all(connection=connection)) < WORKERS:
            if time.monotonic() > until or any(process.poll() is not None for process in processes):
                raise RuntimeError("the RQ workers did not start")
            time.sleep(0.02)
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
