"""What a system under measurement offers: whole job cycles, one after the other, by any number of submitters."""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

WORKERS = 4
PROMPT = "Look at one part of the parser and report what you find, with file and line."
RESULT = "The probe found three places where the parser reads past the end of its input; see the list. " * 2


class Peer(ABC):
    """One system, in a fresh directory and a process of its own."""

    #: what the table calls it
    title: str
    #: how it was run, for the table
    how: str
    #: what stands on disk when a cycle is over, and what is promised less than openjobs does
    durable: str
    less: str

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abstractmethod
    def open(self) -> contextlib.AbstractContextManager[Callable[[int], str]]:
        """The system running; gives a cycle: submit job `n`, wait for its end, read its result back from the store."""

    def transitions(self) -> float:
        """Durable state changes that a cycle makes."""
        return 4.0


class HandMade(Peer):
    """A store by hand under four threads and a queue: for systems that have a store and no workers."""

    @abstractmethod
    def write(self, job_id: str, status: str, text: str) -> None:
        """One durable transition."""

    @abstractmethod
    def read(self, job_id: str) -> str:
        """The result, from the store."""

    def prepare(self) -> None: ...

    def finish(self) -> None: ...

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[int], str]]:
        line: queue.SimpleQueue[tuple[str, threading.Event] | None] = queue.SimpleQueue()

        def work() -> None:
            while (item := line.get()) is not None:
                job_id, ended = item
                self.write(job_id, "running", "")
                self.write(job_id, "completed", noop(PROMPT))
                ended.set()

        def cycle(number: int) -> str:
            job_id, ended = f"{number:032x}", threading.Event()
            self.write(job_id, "pending", PROMPT)
            self.write(job_id, "queued", "")
            line.put((job_id, ended))
            ended.wait()
            return self.read(job_id)

        self.prepare()
        threads = [threading.Thread(target=work) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        try:
            yield cycle
        finally:
            for _ in threads:
                line.put(None)
            for thread in threads:
                thread.join()
            self.finish()


def noop(prompt: str) -> str:
    """The work: none."""
    return RESULT
