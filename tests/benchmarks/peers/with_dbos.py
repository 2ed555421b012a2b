"""DBOS with its system database on SQLite, in the submitters' process.

A workflow that is started runs at once on its executor's threads; one that is enqueued is found by a thread
that asks the database, by default once a second. Both forms are measured, the second asking every 10 ms.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from .peer import PROMPT, WORKERS, Peer, noop


class Dbos(Peer):
    title = "DBOS, started workflows"
    how = "DBOS.start_workflow, max_executor_threads=4, in process; read back with retrieve_workflow"
    durable = "two commits (pending, success), each synced (rollback journal, synchronous=FULL)"
    less = "two states; the newest only"

    def transitions(self) -> float:
        return 2.0

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[int], str]]:
        with contextlib.closing(sqlite3.connect(":memory:")) as look:
            (synchronous,) = look.execute("pragma synchronous").fetchone()  # DBOS leaves it as it is
        if synchronous < 2:
            raise RuntimeError(f"this SQLite was built with synchronous={synchronous}: not equal durability")
        dbos: Any = importlib.import_module("dbos").DBOS

        @dbos.workflow()  # type: ignore[untyped-decorator]
        def job(prompt: str) -> str:
            return noop(prompt)

        dbos(
            config={
                "name": "bench",
                "system_database_url": f"sqlite:///{self.directory / 'dbos.sqlite'}",
                "max_executor_threads": WORKERS,
                "run_admin_server": False,
                "log_level": "WARNING",
            }
        )
        dbos.launch()
        logging.getLogger("dbos").setLevel(logging.WARNING)
        try:
            yield self.cycle(dbos, job)
        finally:
            dbos.destroy()

    def cycle(self, dbos: Any, job: Any) -> Callable[[int], str]:
        def cycle(number: int) -> str:
            handle = dbos.start_workflow(job, PROMPT)
            handle.get_result()
            found: str = dbos.retrieve_workflow(handle.workflow_id).get_result()
            return found

        return cycle


class DbosQueue(Dbos):
    title = "DBOS, queue asking every 10 ms"
    how = "register_queue(worker_concurrency=4, polling_interval_sec=0.01); results asked for every 1 ms"
    durable = "three commits (enqueued, pending, success), each synced (rollback journal, synchronous=FULL)"
    less = "three states; the newest only"

    def transitions(self) -> float:
        return 3.0

    def cycle(self, dbos: Any, job: Any) -> Callable[[int], str]:
        queue = dbos.register_queue("bench", worker_concurrency=WORKERS, polling_interval_sec=0.01)

        def cycle(number: int) -> str:
            found: str = queue.enqueue(job, PROMPT).get_result(polling_interval_sec=0.001)
            return found

        return cycle
