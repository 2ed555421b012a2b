"""persist-queue: its acknowledging SQLite queue with four threads, results in its SQLite dictionary.

It is a queue: workers, results and waiting are the user's. Its connections use WAL and leave `synchronous` at
SQLite's default, which the bench asks for and shows.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from .peer import PROMPT, WORKERS, Peer, noop


class PersistQueue(Peer):
    title = "persist-queue"
    how = "SQLiteAckQueue and PDict(multithreading=True), four threads in process; results by an event, read from PDict"
    durable = "four commits (put, unack, result, ack), each synced (WAL, synchronous=FULL)"
    less = "a queue: no job states beyond it, no history"

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[int], str]]:
        persistqueue: Any = importlib.import_module("persistqueue")
        warnings.simplefilter("ignore")
        jobs: Any = persistqueue.SQLiteAckQueue(str(self.directory / "queue"), multithreading=True)
        results: Any = persistqueue.PDict(str(self.directory / "results"), "results", multithreading=True)
        for made in (jobs, results):
            (synchronous,) = made._putter.execute("pragma synchronous").fetchone()
            if synchronous < 2:
                raise RuntimeError(f"this SQLite was built with synchronous={synchronous}: not equal durability")
        ended: dict[str, threading.Event] = {}
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                try:
                    # Not without a timeout: a wake-up that comes between its look and its wait is lost, for 10 s.
                    item = jobs.get(timeout=0.02)
                except persistqueue.Empty:
                    continue
                job_id, prompt = item
                results[job_id] = noop(prompt)
                jobs.ack(item)
                ended[job_id].set()

        def cycle(number: int) -> str:
            job_id = f"{number:032x}"
            event = ended[job_id] = threading.Event()
            jobs.put((job_id, PROMPT))
            event.wait()
            del ended[job_id]
            found: str = results[job_id]
            return found

        threads = [threading.Thread(target=work) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        try:
            yield cycle
        finally:
            over.set()
            for thread in threads:
                thread.join()
            jobs.close()
            results.close()
