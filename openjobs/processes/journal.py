"""`TaskJournal`: the facts of one session's background commands, in `sessions/<sid>/tasks.jsonl`.

Spec 000: the journal is the authoritative source, what is remembered of it is bounded, and the identities by which a
start is recognised again are never forgotten. Damage in the middle refuses; only an incomplete last record is
repaired, at its boundary (`openjobs.ledger`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..clock import Clock, SystemClock, to_text
from ..durable import Disk
from ..errors import Damaged, IdempotencyConflict, InvalidTransition, OutcomeUnknown, UnknownTask
from ..ledger import START, Compacted, Cursor, Exclusive, Ledger, Record
from .task import Fact, Task, after, check_fact, digest_of, known_at_the_end, may_follow, shown_command, text_of

NAME = "tasks.jsonl"
#: how many tasks are remembered whole; others are read again from the file
CACHE = 1000
_KINDS = frozenset(kind.value for kind in Fact)
#: what reading a fact raises that no writer of ours made
_NONSENSE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)

Tasks = list[Task]


@attrs.define(slots=True)
class _Known:
    """What is always remembered of a task: by what a start is recognised, and where its records stand."""

    task_id: str
    origin: str | None
    digest: str
    #: just before its intent, and just before its end
    intent_at: Cursor
    #: the facts of one that has not ended; of two `output` in a row the later one
    facts: list[Mapping[str, Any]]
    ended_at: Cursor | None = None
    started: bool = False
    delivered: bool = False
    consumed: bool = False

    @property
    def terminal(self) -> bool:
        return self.ended_at is not None


class TaskJournal:
    """Guarantees: a fact whose call returned is durable (`output` facts only with the next one that is); each of
    intent, running, end, delivery and consumption is recorded at most once, whichever process tries; a task is
    found by its origin for ever, after any crash and any compaction.

    Assumptions: a local file system; all writers go through this class.

    What the lock protects: what is remembered. It is taken inside the ledger's lock, never around it.
    """

    def __init__(
        self,
        directory: Path,
        session_id: str,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        cache: int = CACHE,
    ) -> None:
        """`directory` is the session's own. Nothing is read before the first call."""
        self.session_id = session_id
        self.path = directory / NAME
        self._clock = clock or SystemClock()
        self._ledger = Ledger(self.path, disk, clock=self._clock)
        self._cache = cache
        self._lock = threading.RLock()
        self._seen: Cursor = START
        self._forget()

    # --- writing -----------------------------------------------------------------------------------

    def begin(
        self,
        task_id: str,
        command: str | Sequence[str],
        *,
        worker_id: str,
        boot: str,
        cwd: str = "",
        description: str = "",
        origin_tool_call_id: str | None = None,
        job_id: str | None = None,
        timeout_s: float | None = None,
        output_limit_bytes: int = 0,
    ) -> tuple[Task, bool]:
        """The intent to start a command, durable: (task, True). Or the first task of that origin or id, and False.

        Raises `IdempotencyConflict` where that one has another command, and what `Ledger.append` raises.
        """
        with self._exclusive() as held:
            with self._lock:
                first = self._first(task_id, origin_tool_call_id)
            if first is not None:
                return same_command(first, command), False
            fact = {
                "fact": Fact.INTENT.value,
                "task": task_id,
                "at": self._now(),
                "session": self.session_id,
                "origin": origin_tool_call_id,
                "digest": digest_of(command),
                "command": shown_command(command),
                "cwd": cwd,
                "description": description,
                "worker": worker_id,
                "boot": boot,
                "job": job_id,
                "timeout_s": timeout_s,
                "output_limit_bytes": output_limit_bytes,
            }
            return self._append(held, fact), True

    def record(self, task_id: str, kind: Fact, **fields: Any) -> Task:
        """One more fact; the task after it. Durable, but for `output`.

        Raises `InvalidTransition` for a fact that no longer fits (with nothing written), `UnknownTask`, and what
        `Ledger.append` raises.
        """
        fact = {"fact": kind.value, "task": task_id, "at": self._now(), **fields}
        with self._exclusive() as held:
            task = self._known_task(task_id)
            if not may_follow(task, kind):
                raise InvalidTransition(
                    f"task {task_id} is {task.status.value}; {kind.value} does not follow", status=task.status.value
                )
            if kind is Fact.ENDED:
                before = known_at_the_end(task)
                unsaid = {name: value for name, value in before.items() if fact.get(name) is None}
                fact = {**fact, **unsaid}
            return self._append(held, fact)

    def adopt(self, task_id: str, from_worker: str, **fields: Any) -> Task:
        """Another worker looks after it from now on, if until this moment `from_worker` did: of two who try, one does.

        Raises as `record`.
        """
        fact = {"fact": Fact.ADOPTED.value, "task": task_id, "at": self._now(), **fields}
        with self._exclusive() as held:
            task = self._known_task(task_id)
            if task.worker_id != from_worker or not may_follow(task, Fact.ADOPTED):
                raise InvalidTransition(f"task {task_id} is looked after by somebody else", status=task.status.value)
            return self._append(held, fact)

    def record_outputs(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """How much each of several tasks has written (stdout, stderr), in one write that is not synced."""
        with self._exclusive() as held:
            with self._lock:
                facts = [
                    {
                        "fact": Fact.OUTPUT.value,
                        "task": task_id,
                        "at": self._now(),
                        "stdout_bytes": out,
                        "stderr_bytes": err,
                    }
                    for task_id, (out, err) in sizes.items()
                    if task_id in self._live
                ]
            self._take(held.append_many(facts, durable=False))

    def record_told(self, kind: Fact, events: Mapping[str, str | None]) -> None:
        """The delivery or consumption of several tasks' ends (task id -> event id), durable, in one write. Those to
        whom it happened before are passed over. Raises what `Ledger.append` raises."""
        with self._exclusive() as held:
            with self._lock:
                facts = [
                    {"fact": kind.value, "task": task_id, "at": self._now(), "event_id": event_id}
                    for task_id, event_id in events.items()
                    if may_follow(self._known.get(task_id), kind)
                ]
            if not facts:
                return
            try:
                self._take(held.append_many(facts))
            except OutcomeUnknown:
                with self._lock:
                    self._forget()
                raise

    def compact(self) -> Compacted:
        """Leave out what only mattered while a task ran. Identities and outcomes stay, and so do cursors."""
        needless = {Fact.OUTPUT.value, Fact.ADOPTED.value, Fact.STOP_REQUESTED.value, Fact.RUNNING.value}
        with self._exclusive() as held:
            with self._lock:
                live = set(self._live)
            done: Compacted = held.compact(
                lambda record: record.data.get("fact") not in needless or record.data["task"] in live
            )
            with self._lock:
                self._forget()
                self._catch_up(held.read())
            return done

    # --- reading -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in what others appended. Never repairs. Raises `Damaged`, `FileRefused`."""
        with self._lock:
            self._catch_up(self._ledger.read(self._seen))

    def get(self, task_id: str) -> Task:
        """As the file says it now. Raises `UnknownTask`."""
        self.refresh()
        return self._known_task(task_id)

    def of_origin(self, origin_tool_call_id: str) -> Task | None:
        """The first task of that tool call."""
        self.refresh()
        with self._lock:
            return self._first("", origin_tool_call_id)

    def tasks(self) -> Iterator[Task]:
        """Newest first."""
        self.refresh()
        with self._lock:
            ids = list(reversed(self._known))
        return (self._known_task(task_id) for task_id in ids)

    def unfinished(self) -> Tasks:
        """Oldest first."""
        self.refresh()
        with self._lock:
            return [self._known_task(task_id) for task_id in self._live]

    def unconsumed(self) -> Tasks:
        """Tasks whose end nobody has seen yet, oldest first; `delivered` tells which are on their way."""
        self.refresh()
        with self._lock:
            ids = [known.task_id for known in self._known.values() if known.terminal and not known.consumed]
        return [self._known_task(task_id) for task_id in ids]

    def untold(self, *, delivered: bool = False) -> Tasks:
        """Ended tasks that nobody was told of, oldest first; with `delivered` those that a message tells of and that
        nobody has seen."""
        self.refresh()
        with self._lock:
            ids = [
                known.task_id
                for known in self._known.values()
                if known.terminal and not known.consumed and known.delivered is delivered
            ]
        return [task for task in map(self._known_task, ids) if task.event_id is not None]

    def check_lock(self) -> None:
        """Raises `FileRefused` where nothing can be recorded before a person has put something right."""
        self._ledger.check_lock()

    def state(self) -> tuple[int, int, int] | None:
        """What changes when the file does; one stat."""
        return self._ledger._stat()

    # --- within ------------------------------------------------------------------------------------

    def _exclusive(self) -> Any:
        return _Turn(self)

    def _append(self, held: Exclusive, fact: Mapping[str, Any]) -> Task:
        try:
            record = held.append(fact)
        except OutcomeUnknown:
            with self._lock:
                self._forget()  # another thread may have read what is gone again
            raise
        with self._lock:
            self._take([record])
            return self._known_task(fact["task"])

    def _take(self, records: Sequence[Record]) -> None:
        """Our own records; another thread may have read them from the file in the meantime."""
        with self._lock:
            seen = self._seen.seq
            self._catch_up(record for record in records if record.seq > seen)

    def _catch_up(self, records: Generator[Record, None, None]) -> None:
        """With the lock held."""
        with contextlib.closing(records):
            for record in records:
                if record.seq <= self._seen.seq:
                    # What we read before had never become durable and is gone: begin again.
                    self._forget()
                    self._catch_up(self._ledger.read())
                    return
                self._apply(record, self._seen)
                self._seen = record.cursor  # not before: what cannot be understood is damage at every look

    def _apply(self, record: Record, before: Cursor) -> None:
        """Note where a fact stands. Tasks are made of facts only when somebody asks for them."""
        fact = record.data
        if fact.get("fact") not in _KINDS:
            return  # of a newer version
        try:
            kind = Fact(fact["fact"])
            check_fact(kind, fact)
            if kind is Fact.INTENT and fact["session"] != self.session_id:
                raise ValueError(f"it is of session {fact['session']!r}")
            self._note(kind, fact["task"], fact, before)
        except _NONSENSE as error:
            raise self._damaged(before, error) from None

    def _note(self, kind: Fact, task_id: str, fact: Mapping[str, Any], before: Cursor) -> None:
        known = self._known.get(task_id)
        if not may_follow(known, kind):
            return
        made = self._tasks.get(task_id)
        if made is not None:
            self._keep(after(made, fact))
        if known is None:
            origin = None if fact["origin"] is None else text_of(fact, "origin")
            known = _Known(task_id, origin, text_of(fact, "digest"), before, [])
            self._known[task_id] = known
            self._live[task_id] = None
            if origin is not None:
                self._origins.setdefault(origin, task_id)
        match kind:
            case Fact.ENDED:
                known.ended_at, known.facts = before, []
                self._live.pop(task_id, None)
            case Fact.DELIVERED:
                known.delivered = True
            case Fact.CONSUMED:
                known.consumed = True
            case _:
                known.started |= kind is Fact.RUNNING
                if kind is Fact.OUTPUT and known.facts[-1]["fact"] == Fact.OUTPUT:
                    known.facts.pop()
                known.facts.append(fact)

    def _first(self, task_id: str, origin: str | None) -> Task | None:
        """With the lock held: the task that was begun before with that id, or that origin."""
        if task_id in self._known:
            return self._known_task(task_id)
        if origin is not None and origin in self._origins:
            return self._known_task(self._origins[origin])
        return None

    def _known_task(self, task_id: str) -> Task:
        with self._lock:
            task = self._remembered(task_id)
            if task is None:
                near = [one for one in self._known if task_id and one.startswith(task_id[:4])][:5]
                raise UnknownTask(f"there is no task {task_id!r} in session {self.session_id}", candidates=near)
            return task

    def _remembered(self, task_id: str) -> Task | None:
        task = self._tasks.get(task_id)
        if task is None and (known := self._known.get(task_id)) is not None:
            task = self._made(known)
            self._keep(task)
        return task

    def _keep(self, task: Task) -> None:
        self._tasks[task.task_id] = task
        self._tasks.move_to_end(task.task_id)
        while len(self._tasks) > self._cache:
            self._tasks.popitem(last=False)

    def _made(self, known: _Known) -> Task:
        """The task, of the facts of one that runs; of one that has ended its intent and its end say all."""
        facts: list[Mapping[str, Any]] = known.facts
        if known.ended_at is not None:
            facts = [next(self._ledger.read(cursor)).data for cursor in (known.intent_at, known.ended_at)]
        task = None
        try:
            for fact in facts:
                task = after(task, fact)
        except _NONSENSE as error:
            raise self._damaged(known.intent_at, error) from None
        assert task is not None
        return attrs.evolve(task, delivered=known.delivered, consumed=known.consumed)

    def _damaged(self, before: Cursor, error: Exception) -> Damaged:
        return Damaged(
            f"{self.path}: what stands from byte {before.offset_bytes} on are no facts of a task: {error!r}",
            path=str(self.path),
            offset=before.offset_bytes,
        )

    def _forget(self) -> None:
        self._seen = START
        self._known: dict[str, _Known] = {}
        self._origins: dict[str, str] = {}
        #: ids of tasks that have not ended, oldest first
        self._live: dict[str, None] = {}
        #: tasks that somebody asked for
        self._tasks: OrderedDict[str, Task] = OrderedDict()

    def _now(self) -> str:
        return to_text(self._clock.now())


class _Turn:
    """The ledger's lock, with the journal caught up to the file's end."""

    def __init__(self, journal: TaskJournal) -> None:
        self._journal = journal
        self._turn = journal._ledger.exclusive()

    def __enter__(self) -> Exclusive:
        held = self._turn.__enter__()
        try:
            with self._journal._lock:
                self._journal._catch_up(held.read(self._journal._seen))
        except BaseException as error:
            self._turn.__exit__(type(error), error, error.__traceback__)
            raise
        return held

    def __exit__(self, *error: Any) -> None:
        self._turn.__exit__(*error)


def same_command(first: Task, command: str | Sequence[str]) -> Task:
    """`first`, begun with the same id or origin. Raises `IdempotencyConflict` where its command is another."""
    if first.digest != digest_of(command):
        raise IdempotencyConflict(
            f"task {first.task_id} has this id or origin_tool_call_id, and another command", first_id=first.task_id
        )
    return first
