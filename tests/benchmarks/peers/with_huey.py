"""huey with its SQLite storage and `fsync=True`; its consumer's worker threads in the submitters' process.

The consumer asks the database for work, since SQLite cannot wake it: by default after 0.1 s, growing to
10 s while idle, and who waits for a result asks after 0.05 s, growing to 1 s. Both forms are measured: as it
comes, and asking every millisecond.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .peer import PROMPT, WORKERS, Peer, noop


class Huey(Peer):
    title = "huey, asking every 1 ms"
    how = "SqliteHuey(fsync=True); consumer of 4 threads in process, initial_delay=max_delay=0.001"
    durable = "three commits (enqueue, dequeue, result), each synced (WAL, synchronous=FULL)"
    less = "a job that runs is in no table: a crash loses it; no states, no history"
    delay_s = 0.001
    most_s = 0.001
    result_s: float = 0.001

    def transitions(self) -> float:
        return 3.0

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[int], str]]:
        module: Any = importlib.import_module("huey")
        logging.getLogger("huey").setLevel(logging.WARNING)
        huey = module.SqliteHuey("bench", filename=str(self.directory / "huey.db"), fsync=True, timeout=60)

        @huey.task()  # type: ignore[untyped-decorator]
        def job(prompt: str) -> str:
            return noop(prompt)

        consumer = huey.create_consumer(
            workers=WORKERS,
            worker_type="thread",
            periodic=False,
            initial_delay=self.delay_s,
            max_delay=self.most_s,
            backoff=1.15,
        )
        consumer._set_signal_handlers = lambda: None
        consumer.start()

        def cycle(number: int) -> str:
            result = job(PROMPT)
            # `preserve`: the result stays, as it does in the others, and is read as soon as it is there.
            found: str = result.get(blocking=True, max_delay=self.result_s, preserve=True)
            return found

        try:
            yield cycle
        finally:
            consumer.stop(graceful=True)
            for thread in threading.enumerate():
                if thread.name.startswith("Worker-"):
                    thread.join(5)


class HueyAsItComes(Huey):
    title = "huey, as it comes"
    how = "the same with its own pauses: 0.1 s growing to 10 s, results asked for after 0.05 s"
    delay_s = 0.1
    most_s = 10.0
    result_s = 1.0
