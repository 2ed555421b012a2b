"""Looking after tasks without owning any: find, read, wait, ask for a stop.

Everything here works on files of the home alone (the index of ids, a session's `tasks.jsonl`, a run's directory): no
git, no lease. Reading writes nothing.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import attrs

from ..clock import Clock, SystemClock
from ..durable import Disk
from ..durable.lease import is_held
from ..errors import AmbiguousId, Damaged, InvalidInput, InvalidTransition, OpenJobsError, UnknownTask
from ..ids import check_session_id, is_prefix
from ..store.index import Entry, FileIndex, key_of
from ..store.places import misplaced
from ..store.reindex import lacking
from . import layout, rundir
from .journal import TaskJournal
from .output import Output, read_output
from .task import Fact, Task, after, end_of, lost

#: where in the home the marks of live workers are: which sessions have tasks of theirs
MARKS = "active-tasks"
#: journals that are remembered; another one is read again when it is needed
_JOURNALS = 256
_CANDIDATES = 5
_LOOK_S = (0.01, 0.25)

Tasks = list[Task]
#: told of a session that cannot be read whole
OnDamage = Callable[[str, OpenJobsError | OSError], None]


def run_directory(home: Path, session_id: str, run_id: str) -> Path:
    """The directory of one run: log, output, exit record.

    Raises `InvalidInput` for what cannot be an id: rows come from repositories that others may write, and a run's
    directory is written to, and taken away by gc.
    """
    if not isinstance(run_id, str) or not layout.RUN_ID.match(run_id):
        raise InvalidInput(f"{run_id!r} cannot be the id of a run")
    return home / "sessions" / check_session_id(session_id) / "runs" / run_id


def task_entry(task: Task) -> Entry:
    """Of the index, as it was written when the task was made."""
    origin = task.origin_tool_call_id
    key = key_of(task.session_id, origin) if origin is not None else None
    return Entry(job_id=task.task_id, session_id=task.session_id, key=key)


class TaskClient:
    """Reads the tasks of a home, and asks their owners to stop them.

    Guarantees: a read shows what is durable; of a task whose worker died it shows what its keeper left, and writes
    nothing. Assumptions: `close` is called; it gives back the index's file.
    What the lock protects: the open journals.
    """

    def __init__(self, home: Path, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        self.home = home
        self._disk = disk or Disk()
        self._clock: Clock = clock or SystemClock()
        self.index = FileIndex(home / "index", self._disk, name="tasks")
        self._lock = threading.Lock()
        self._journals: OrderedDict[str, TaskJournal] = OrderedDict()

    # --- finding -----------------------------------------------------------------------------------

    def find(self, prefix: str) -> Entry:
        """The one task whose id begins so. Raises `UnknownTask`, `AmbiguousId`, with candidates."""
        found = self.matching(prefix)
        if len(found) == 1:
            return found[0]
        if found:
            ids = [entry.job_id for entry in found][-_CANDIDATES:]
            raise AmbiguousId(f"{prefix} is the beginning of {len(found)} task ids: {', '.join(ids)}", candidates=ids)
        near = [entry.job_id for _, entry in zip(range(_CANDIDATES), self.index.newest_first(), strict=False)]
        raise UnknownTask(f"there is no task {prefix!r}", candidates=near)

    def matching(self, prefix: str) -> list[Entry]:
        """Every task that is known to its session and whose id begins so."""
        if not is_prefix(prefix):
            return []
        entries = {entry.job_id: entry for entry in self.index.by_id(prefix)}
        return [entry for entry in entries.values() if self._is_there(entry)]

    def journal(self, session_id: str) -> TaskJournal:
        with self._lock:
            journal = self._journals.get(session_id)
            if journal is None:
                directory = self.home / "sessions" / check_session_id(session_id)
                journal = TaskJournal(directory, session_id, disk=self._disk, clock=self._clock)
                self._journals[session_id] = journal
                while len(self._journals) > _JOURNALS:
                    self._journals.popitem(last=False)
            self._journals.move_to_end(session_id)
            return journal

    def unindexed(self, session_id: str) -> list[tuple[datetime, Entry]]:
        """What the index lacks of a session's tasks, with when each was made. Raises `Damaged`, `FileRefused`."""
        made = {task.task_id: task for task in self.journal(session_id).tasks()}
        found = lacking(self.index, session_id, map(task_entry, made.values()))
        return [(made[entry.job_id].created_at, entry) for entry in found]

    # --- reading -----------------------------------------------------------------------------------

    def get(self, task_id: str) -> Task:
        """The task as it stands; a unique beginning of its id is enough. Raises `UnknownTask`, `AmbiguousId`."""
        entry = self.find(task_id)
        return self.shown(self.journal(entry.session_id).get(entry.job_id))

    def list(self, session_id: str) -> Tasks:
        """The tasks of a session, newest first."""
        return [self.shown(task) for task in self.journal(session_id).tasks()]

    def newest_first(self, on_damage: OnDamage | None = None) -> Iterator[Task]:
        """The tasks of all sessions. What cannot be read raises; with `on_damage` that is told of it instead, once a
        session, and all others follow."""
        met, told = set(), set()
        elsewhere = self._misplaced(on_damage) if on_damage is not None else set()
        for entry in self.index.newest_first():
            if entry.job_id in met or entry.session_id in elsewhere:
                continue
            try:
                task = self.shown(self.journal(entry.session_id).get(entry.job_id))
            except UnknownTask:
                continue  # a hit in the index is only a hint, see `_is_there`
            except (OpenJobsError, OSError) as error:
                if on_damage is None:
                    raise
                if entry.session_id not in told:
                    told.add(entry.session_id)
                    on_damage(entry.session_id, error)
                continue
            met.add(entry.job_id)
            yield task

    def running(self, on_damage: OnDamage) -> Tasks:
        """The unfinished tasks of the sessions that workers have marked, newest first; no other journal is read."""
        found = []
        elsewhere = self._misplaced(on_damage)
        for session_id in sorted({path.name for path in (self.home / MARKS).glob("*/*")} - elsewhere):
            try:
                found += [self.shown(task) for task in self.journal(session_id).unfinished()]
            except (OpenJobsError, OSError) as error:
                on_damage(session_id, error)
        return sorted(found, key=lambda task: task.created_at, reverse=True)

    def _misplaced(self, on_damage: OnDamage) -> set[str]:
        """Ids of sessions in whose place something else stands, each told to `on_damage`."""
        found = dict(misplaced(self.home / "sessions"))
        for session_id, error in found.items():
            on_damage(session_id, error)
        return set(found)

    def run_dir(self, task: Task) -> Path:
        return run_directory(self.home, task.session_id, task.task_id)

    def output(self, task: Task, stream: str = "mixed", offset: int = 0, limit: int = 65536) -> Output:
        """At most `limit` bytes of what it wrote, in time and memory in proportion to `limit`.

        Raises `InvalidInput`, `Damaged`. After gc there are no bytes.
        """
        found = read_output(self.run_dir(task), stream, offset, limit)
        if task.terminal and not found.eof and found.next_offset >= found.total_bytes:
            found = attrs.evolve(found, eof=True, truncated=task.truncated)
        return found

    def shown(self, task: Task) -> Task:
        """Where its worker is dead and nobody took over: what the keeper left, with no `event_id` yet. A record that
        cannot be read counts for as little here as for whoever will record the end."""
        if task.terminal or not self.is_orphan(task):
            return task
        run_dir = self.run_dir(task)
        # The order matters: a keeper may write its record and leave between two looks.
        lives = rundir.keeper_lives(run_dir)
        record, unreadable = None, rundir.unreadable_exit(run_dir)
        try:
            record = rundir.read_exit(run_dir)
        except Damaged:
            unreadable = layout.EXIT
        if record is not None:
            end = end_of(record)
        elif lives:
            return task
        else:
            end = lost("its worker and its keeper died; nobody has recorded its end yet", unreadable=unreadable)
        at = record.ended_at if record is not None else task.created_at.isoformat()
        return after(task, {"fact": Fact.ENDED, "task": task.task_id, "at": at, "event_id": None, **end})

    def is_orphan(self, task: Task) -> bool:
        """Whether the worker that alone may act on it is gone."""
        return not is_held(self.home / "leases", task.worker_id)

    # --- waiting and asking --------------------------------------------------------------------------

    def wait(self, task_id: str, timeout_s: float | None = None, stop: threading.Event | None = None) -> Task:
        """The task once it has ended, or as it stands after `timeout_s` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        stop = stop or threading.Event()
        pause, longest = _LOOK_S
        task = self.get(task_id)
        while not task.terminal:
            left = longest if deadline is None else deadline - time.monotonic()
            if left <= 0 or stop.wait(min(pause, left)):
                break
            pause = min(pause * 1.5, longest)
            task = self.get(task.task_id)
        return task

    def request_stop(self, task_id: str, reason: str | None = None, grace_s: float = layout.DEFAULT_GRACE_S) -> Task:
        """Write down that it is to stop; its owner acts within half a second. A task that has ended stays as it is.

        Raises `UnknownTask`, and what `Ledger.append` raises.
        """
        task = self.get(task_id)
        return task if task.terminal else self.ask_to_stop(task, reason, grace_s)

    def ask_to_stop(self, task: Task, reason: str | None, grace_s: float) -> Task:
        """As `request_stop`, for a task at hand."""
        journal = self.journal(task.session_id)
        try:
            return journal.record(task.task_id, Fact.STOP_REQUESTED, reason=reason, grace_s=grace_s)
        except InvalidTransition:
            return self.shown(journal.get(task.task_id))

    def consume(self, task: Task) -> None:
        """Somebody has seen the end: its output may be taken away by gc, and nobody needs to be told of it."""
        if task.terminal and task.event_id is not None and not task.consumed:
            try:
                self.journal(task.session_id).record(task.task_id, Fact.CONSUMED, event_id=task.event_id)
            except InvalidTransition:
                pass  # somebody else was first

    def close(self) -> None:
        self.index.close()

    def __enter__(self) -> TaskClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_there(self, entry: Entry) -> bool:
        """A hit in the index is only a hint: it is written before the intent."""
        try:
            self.journal(entry.session_id).get(entry.job_id)
        except UnknownTask:
            return False
        return True
