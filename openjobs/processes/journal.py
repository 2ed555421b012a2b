"""`TaskJournal`: the facts of one session's background commands, in `sessions/<sid>/tasks.jsonl`.

Spec 000: the journal is the authoritative source, what is remembered of it is bounded, and the identities by which a
start is recognised again are never forgotten. Damage in the middle refuses; only an incomplete last record is
repaired, at its boundary (`openjobs.ledger`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..clock import Clock, SystemClock, to_text
from ..durable import Disk
from ..errors import Damaged, IdempotencyConflict, InvalidTransition, OutcomeUnknown, UnknownTask
from ..ledger import START, Compacted, Cursor, Exclusive, Ledger, Record
from .task import Fact, Task, after, digest_of, may_follow, shown_command, text_of

NAME = "tasks.jsonl"
#: how many ended tasks are remembered whole; others are read again from the file
CACHE = 1000

Tasks = list[Task]


@attrs.define(slots=True)
class _Known:
    """What is always remembered of a task: by what a start is recognised, and where its records stand."""

    task_id: str
    origin: str | None
    digest: str
    #: just before its intent, and just before its end
    intent_at: Cursor
    ended_at: Cursor | None = None
    delivered: bool = False
    consumed: bool = False


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
            return list(self._live.values())

    def unconsumed(self) -> Tasks:
        """Tasks whose end nobody has seen yet, oldest first; `delivered` tells which are on their way."""
        self.refresh()
        with self._lock:
            ids = [known.task_id for known in self._known.values() if known.ended_at and not known.consumed]
        return [self._known_task(task_id) for task_id in ids]

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
            self._catch_up(iter([record for record in records if record.seq > self._seen.seq]))

    def _catch_up(self, records: Iterator[Record]) -> None:
        """With the lock held."""
        for record in records:
            if record.seq <= self._seen.seq:
                # What we read before had never become durable and is gone: begin again.
                self._forget()
                self._catch_up(self._ledger.read())
                return
            before, self._seen = self._seen, record.cursor
            self._apply(record, before)

    def _apply(self, record: Record, before: Cursor) -> None:
        fact = record.data
        if fact.get("fact") not in list(Fact):
            return  # of a newer version
        try:
            task_id = text_of(fact, "task")
            if fact["fact"] in (Fact.DELIVERED, Fact.CONSUMED) and self._flagged(task_id, Fact(fact["fact"])):
                return
            task = self._remembered(task_id)
            if not may_follow(task, Fact(fact["fact"])):
                return
            task = after(task, fact)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(
                f"{self.path}: record {record.seq} is no fact of a task: {error!r}",
                path=str(self.path),
                offset=before.offset_bytes,
            ) from None
        if fact["fact"] == Fact.INTENT:
            self._known[task_id] = _Known(task_id, task.origin_tool_call_id, task.digest, before)
            if task.origin_tool_call_id is not None:
                self._origins.setdefault(task.origin_tool_call_id, task_id)
        known = self._known[task_id]
        known.delivered, known.consumed = task.delivered, task.consumed
        if not task.terminal:
            self._live[task_id] = task
            return
        if fact["fact"] == Fact.ENDED:
            known.ended_at = before
            self._live.pop(task_id, None)
        self._keep(task)

    def _flagged(self, task_id: str, kind: Fact) -> bool:
        """Note what became of a notice whose task is not remembered whole; opening an old journal reads no record
        twice for it."""
        known = self._known.get(task_id)
        if known is None or known.ended_at is None or task_id in self._ended:
            return False
        known.delivered |= kind is Fact.DELIVERED
        known.consumed |= kind is Fact.CONSUMED
        return True

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
        task = self._live.get(task_id) or self._ended.get(task_id)
        if task is None and (known := self._known.get(task_id)) is not None:
            task = self._read_again(known)
            self._keep(task)
        return task

    def _keep(self, task: Task) -> None:
        self._ended[task.task_id] = task
        self._ended.move_to_end(task.task_id)
        while len(self._ended) > self._cache:
            self._ended.popitem(last=False)

    def _read_again(self, known: _Known) -> Task:
        """An ended task that was forgotten: its intent and its end say all that matters."""
        assert known.ended_at is not None
        task = None
        for cursor in (known.intent_at, known.ended_at):
            task = after(task, next(self._ledger.read(cursor)).data)
        assert task is not None
        return attrs.evolve(task, delivered=known.delivered, consumed=known.consumed)

    def _forget(self) -> None:
        self._seen = START
        self._known: dict[str, _Known] = {}
        self._origins: dict[str, str] = {}
        self._live: dict[str, Task] = {}
        self._ended: OrderedDict[str, Task] = OrderedDict()

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
