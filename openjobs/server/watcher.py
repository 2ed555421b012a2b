"""What no hub tells: jobs and processes of other processes, found by looking at indexes, heads and journals.

One look costs little where nothing happened: the newest lines of two index files, the head of each
session that has unfinished jobs, the journal of each session that has unfinished processes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..errors import Closed, OpenJobsError
from ..jobs import Job
from ..processes.task import Task
from ..store.damage import once
from ..store.index import Index
from .backend import Backend
from .rows import JOB, PROCESS
from .summary import Entry

log = logging.getLogger(__name__)

#: how long an index entry may wait for its commit
_EXPECT_S = 30.0
_DEAD_EVERY_S = 1.0
#: rows of a session that are read before all others
_FIRST = 200
#: of a session with fewer unfinished rows than this each is read by itself
_FEW = 16


class Sink(Protocol):
    """Where what was found goes: the feed."""

    @property
    def room(self) -> int: ...
    def __len__(self) -> int: ...
    def cap(self) -> None: ...
    def knows(self, identity: str) -> bool: ...
    def unfinished(self) -> list[Entry]: ...
    def put_job(self, job: Job, *, tell: bool = True) -> None: ...
    def put_task(self, task: Task, *, tell: bool = True) -> None: ...


class _ToCome:
    """What an index says is new since the last look, until it can be read (or is known), or no longer awaited."""

    def __init__(self) -> None:
        self._newest: str | None = None
        #: id -> its session, and until when it is awaited
        self._expected: dict[str, tuple[str, float]] = {}

    def begin(self, index: Index) -> None:
        """All that stands there now is read by somebody else."""
        self._newest = next((entry.job_id for entry in index.newest_first()), None)

    def look(self, index: Index, knows: Callable[[str], bool], read: Callable[[str, str], bool]) -> None:
        now = time.monotonic()
        newest = self._newest
        for entry in index.newest_first():
            if entry.job_id == newest:
                break
            if self._newest == newest:
                self._newest = entry.job_id
            self._expected.setdefault(entry.job_id, (entry.session_id, now + _EXPECT_S))
        for identity, (session_id, until) in list(self._expected.items()):
            if knows(identity) or now > until or read(session_id, identity):
                del self._expected[identity]


def _say_damage(session_id: str, error: Exception) -> None:
    log.warning("session %s cannot be read whole: %s", session_id, error)


class Watcher:
    """Looks at the store and the journals for what no hub tells. One thread."""

    def __init__(self, feed: Sink, backend: Backend) -> None:
        self._feed = feed
        self._backend = backend
        self._store = backend.store
        self._tasks = backend.tasks
        self._jobs_to_come = _ToCome()
        self._tasks_to_come = _ToCome()
        self._heads: dict[str, str] = {}
        self._asked: dict[str, tuple[int, str]] = {}
        self._dead_at = 0.0

    # --- the first reading ---

    def load(self, stop: threading.Event, begun: Callable[[], object] = lambda: None) -> None:
        """The rows of the home. `begun` is called when the newest of each session are there."""
        self._jobs_to_come.begin(self._store.index)
        entries = list(itertools.islice(self._store.index.newest_first(), self._feed.room + 1))
        if len(entries) > self._feed.room:
            self._feed.cap()
        wanted: dict[str, int] = {}
        for entry in entries[: self._feed.room]:
            wanted[entry.session_id] = wanted.get(entry.session_id, 0) + 1
        self._load_jobs({session_id: min(number, _FIRST) for session_id, number in wanted.items()}, stop)
        try:
            self._load_tasks(stop)
        except (OpenJobsError, OSError) as error:
            if isinstance(error, Closed):
                raise
            log.warning("background commands cannot be read: %s", error)
        begun()
        self._load_jobs({session_id: number for session_id, number in wanted.items() if number > _FIRST}, stop)

    def _load_jobs(self, wanted: dict[str, int], stop: threading.Event) -> None:
        jobs: list[Job] = []
        for session_id, number in wanted.items():
            if stop.is_set():
                return
            jobs += self._session(session_id, number)
        jobs.sort(key=lambda job: (job.created_at, job.queued_at or job.created_at))
        for job in jobs:
            self._feed.put_job(job, tell=False)

    def _session(self, session_id: str, number: int) -> list[Job]:
        try:
            # The index may know some that were never committed: then this is a few more than needed.
            say = once(_say_damage)
            found = self._store.list(session_id=session_id, limit=number, on_damage=say)
            known = {job.job_id for job in found}
            unfinished = self._store.unfinished(session_id, functools.partial(say, session_id))
            return [*reversed(found), *(job for job in unfinished if job.job_id not in known)]
        except (OpenJobsError, OSError) as error:
            if isinstance(error, Closed):
                raise
            log.warning("session %s cannot be read: %s", session_id, error)
            return []

    def _load_tasks(self, stop: threading.Event) -> None:
        if self._tasks is None:
            return
        self._tasks_to_come.begin(self._tasks.index)
        room = max(self._feed.room - len(self._feed), self._feed.room // 10)
        found: list[Task] = []
        for task in self._tasks.newest_first(_say_damage):
            if stop.is_set() or len(found) >= room:
                break
            found.append(task)
        for task in reversed(found):
            self._feed.put_task(task, tell=False)

    # --- again and again ---

    def look(self) -> None:
        self._new_jobs()
        self._changed_jobs()
        self._dead_runners()
        if self._tasks is not None:
            self._changed_tasks()

    def reread(self) -> None:
        """Events of the hub were lost: read what they may have been about."""
        for entry in self._feed.unfinished():
            if entry.row["kind"] == JOB:
                self._read_one(entry.row["session_id"], entry.row["id"])
        if self._store.home is None:  # else the index tells of new ones
            for job in reversed(self._store.list(limit=self._feed.room, on_damage=_say_damage)):
                self._feed.put_job(job)

    def _new_jobs(self) -> None:
        if self._store.home is None:
            return  # in memory: nobody else has it
        self._jobs_to_come.look(self._store.index, self._feed.knows, self._read_one)

    def _read_one(self, session_id: str, job_id: str) -> bool:
        try:
            job = self._store.documents(session_id).job(job_id)
        except Closed:
            raise
        except (OpenJobsError, OSError) as error:
            log.debug("job %s cannot be read: %s", job_id, error)
            return False
        if job is None:
            return False
        self._feed.put_job(job)
        return True

    def _changed_jobs(self) -> None:
        own: dict[str, list[Entry]] = {}
        others: dict[str, list[Entry]] = {}
        for entry in self._feed.unfinished():
            if entry.row["kind"] != JOB:
                continue
            if entry.runner_id is not None and entry.runner_id == self._backend.runner_id:
                if entry.row["status"] == "running":
                    own.setdefault(entry.row["session_id"], []).append(entry)
            else:
                others.setdefault(entry.row["session_id"], []).append(entry)
        for session_id, entries in others.items():
            self._look_at(session_id, entries)
        for session_id, entries in own.items():
            self._requests_to(session_id, entries)
        self._heads = {session_id: head for session_id, head in self._heads.items() if session_id in others}
        self._asked = {session_id: asked for session_id, asked in self._asked.items() if session_id in own}

    def _look_at(self, session_id: str, entries: list[Entry]) -> None:
        try:
            head = self._store.head(session_id)
            if self._heads.get(session_id) == head:
                return
            if len(entries) < _FEW:
                ids = [entry.row["id"] for entry in entries]
            else:
                found = self._store.unfinished(session_id, lambda error: log.debug("session %s: %s", session_id, error))
                for job in reversed(found):
                    self._feed.put_job(job)
                still = {job.job_id for job in found}
                ids = [entry.row["id"] for entry in entries if entry.row["id"] not in still]
            for job_id in ids:
                self._read_one(session_id, job_id)
            self._heads[session_id] = head
        except Closed:
            raise
        except (OpenJobsError, OSError) as error:
            log.debug("session %s cannot be read: %s", session_id, error)

    def _requests_to(self, session_id: str, entries: list[Entry]) -> None:
        """What other processes ask of running jobs of ours; their ends come through the hub."""
        try:
            asked = self._store.asked(session_id)
        except Closed:
            raise
        except (OpenJobsError, OSError):
            return
        if self._asked.get(session_id) != asked:
            self._asked[session_id] = asked
            for entry in entries:
                self._read_one(session_id, entry.row["id"])

    def _dead_runners(self) -> None:
        now = time.monotonic()
        if now < self._dead_at:
            return
        self._dead_at = now + _DEAD_EVERY_S
        entries = [entry for entry in self._feed.unfinished() if entry.row["kind"] == JOB]
        recovery = self._backend.recovery
        dead = {runner_id for runner_id in {entry.runner_id for entry in entries} if recovery.is_dead(runner_id)}
        for entry in entries:
            if entry.runner_id in dead:
                try:
                    self._feed.put_job(recovery.mend(self._store.row(entry.row["id"])))
                except Closed:
                    raise
                except (OpenJobsError, OSError) as error:
                    log.debug("job %s cannot be read: %s", entry.row["id"], error)

    def _changed_tasks(self) -> None:
        assert self._tasks is not None
        self._tasks_to_come.look(self._tasks.index, self._feed.knows, self._read_task)
        for row in [entry.row for entry in self._feed.unfinished()]:
            if row["kind"] == PROCESS:
                self._read_task(row["session_id"], row["id"])

    def _read_task(self, session_id: str, task_id: str) -> bool:
        assert self._tasks is not None
        try:
            self._feed.put_task(self._tasks.shown(self._tasks.journal(session_id).get(task_id)))
        except (OpenJobsError, OSError) as error:
            log.debug("background command %s cannot be read: %s", task_id, error)
            return False
        return True
