"""What happens in a home, in one numbered row of events, and the newest rows as they stand.

Two threads feed it. One takes the events of this process's runner from its hub and passes them on
within milliseconds; the other looks at what other processes changed, about three times a second:
new lines of the indexes, heads of sessions with unfinished jobs, journals of unfinished processes.
The commits are the truth; an event only carries a row as it was committed.

Everybody who listens reads from one shared ring of encoded events at a place of their own, so a
thousand listeners cost the memory of one, and a slow one is only far behind.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import orjson

from ..clock import from_text, to_text
from ..errors import Closed, InvalidInput, UnknownJob
from ..ids import IdMaker, new_id
from ..jobs import Job
from ..processes.task import Task
from ..runner.hub import TASK_PROGRESS, HubEvent, Subscription
from .backend import Backend
from .rows import JOB, PROCESS, Row, clean, encoded, job_row
from .summary import Change, Entry, Filter, Summary, by_session, chosen
from .watcher import Watcher

log = logging.getLogger(__name__)

#: rows kept in memory, and events that can be replayed
KEEP_ROWS = 20_000
KEEP_EVENTS = 10_000
#: how often other processes' changes are looked for; at least this, more seldom where a look costs much
LOOK_EVERY_S = 0.3
#: how long a change may take to be told, so that many are told at once
GATHER_S = 0.005
PROGRESS_EVERY_S = 0.1
PROGRESS_LIMIT_BYTES = 16 << 10
#: of one delivery
BATCH_EVENTS = 500
BATCH_BYTES = 512 << 10
SNAPSHOT_ROWS = 5_000
SNAPSHOT_NEWEST = 200
#: how much older than `since` a change may be and still have been told after it
_SLACK = timedelta(seconds=10)
_LOAD_WAIT_S = 2.0
_CLOSE_S = 0.5


@attrs.frozen(slots=True)
class _Told:
    """One event, encoded."""

    text: str
    session_id: str
    #: bytes of all events up to this one
    total_bytes: int


@attrs.frozen(kw_only=True, slots=True)
class Batch:
    """What is new for one listener: text of a frame (None: nothing), and where it stands afterwards."""

    text: str | None
    next_seq: int
    more: bool = False


@attrs.frozen(kw_only=True, slots=True)
class Subscribed:
    seq: int
    #: events that will come again; None where a snapshot comes instead
    replayed: int | None
    snapshot: str | None
    #: the last event that this listener has
    after_seq: int


class Feed:
    """Guarantees

    - `seq` grows by one with every event; every listener that stays within the ring gets every event
      of its session once, in that order, and one that does not is told so.
    - A row never goes back behind what was told: revisions only grow.
    - A change of this process's jobs is told as soon as its commit is; another process's after at
      most one look.

    Assumptions: the backend's store stays open until `close` has returned.
    What the lock protects: the summary, the ring and `seq`. It is never held while a disk is read.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        keep_rows: int = KEEP_ROWS,
        keep_events: int = KEEP_EVENTS,
        look_every_s: float = LOOK_EVERY_S,
        make_id: IdMaker = new_id,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = make_id()
        self._backend = backend
        self._store = backend.store
        self._keep_rows = keep_rows
        self._keep_events = keep_events
        self._look_every_s = look_every_s
        self._monotonic = monotonic
        self._lock = threading.RLock()
        self._summary = Summary(keep_rows)
        self._seq = 0
        #: the ring: `_told[i]` has the number `_first + i`
        self._told: list[_Told] = []
        self._first = 1
        self._total_bytes = 0
        self._joined: dict[tuple[int, int, str | None], Batch] = {}
        self._bells: tuple[Callable[[], None], ...] = ()
        self._fresh = False
        #: how long events are gathered; grows with the number of listeners
        self.gather_s = GATHER_S
        self._stop = threading.Event()
        self._wake = threading.Event()
        #: the newest rows of each session are there; all that are kept are
        self._begun = threading.Event()
        self._loaded = threading.Event()
        self._subscription: Subscription | None = None
        self._missed = 0
        self._reread = threading.Event()
        self._progress: dict[str, tuple[str, Any]] = {}
        self._progress_at: dict[str, float] = {}
        self._watcher = Watcher(self, backend)
        self._threads = [
            threading.Thread(target=self._serve, name="openjobs server events", daemon=True),
            threading.Thread(target=self._watch, name="openjobs server watch", daemon=True),
        ]

    # --- life ---

    def start(self) -> None:
        self._subscription = self._backend.subscribe(self._wake.set)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._subscription is not None:
            self._subscription.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_CLOSE_S)  # one that is reading a large home ends when it looks up

    @property
    def loaded(self) -> bool:
        return self._loaded.is_set()

    def until_loaded(self, timeout_s: float = _LOAD_WAIT_S) -> bool:
        return self._loaded.wait(timeout_s)

    def listen(self, bell: Callable[[], None]) -> Callable[[], None]:
        """`bell` is rung, on any thread, when there is something new; it must only wake somebody up."""
        with self._lock:
            self._bells += (bell,)

        def forget() -> None:
            with self._lock:
                self._bells = tuple(each for each in self._bells if each is not bell)

        return forget

    # --- the thread of this process's own events ---

    def _serve(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self._until_progress())
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._take()
            except Exception:
                log.exception("events could not be passed on")
            self.ring()
            self._stop.wait(self.gather_s)

    def _take(self) -> None:
        subscription = self._subscription
        events = subscription.drain() if subscription is not None else []
        for event in events:
            try:
                if event.kind == TASK_PROGRESS:
                    self._hold_progress(event)
                else:
                    self.put_job(event.job)
            except Exception:
                log.exception("job %s: an event could not be passed on", event.job_id)
        if subscription is not None and subscription.missed != self._missed:
            self._missed = subscription.missed
            self._reread.set()
        self._tell_progress()

    def _hold_progress(self, event: HubEvent) -> None:
        self._progress[event.job_id] = (event.session_id, event.value)

    def _until_progress(self) -> float | None:
        if not self._progress:
            return None
        due = min(self._progress_at.get(job_id, 0.0) for job_id in self._progress) + PROGRESS_EVERY_S
        return max(due - self._monotonic(), 0.0)

    def _tell_progress(self) -> None:
        now = self._monotonic()
        for job_id in list(self._progress):
            if now - self._progress_at.get(job_id, float("-inf")) < PROGRESS_EVERY_S:
                continue
            session_id, value = self._progress.pop(job_id)
            self._progress_at[job_id] = now
            with self._lock:
                entry = self._summary.get(job_id)
                if entry is not None and entry.unfinished:
                    self._tell("task_progress", session_id, {"job_id": job_id, "progress": _bounded(value)})
        if len(self._progress_at) > 256:
            self._progress_at = {job_id: at for job_id, at in self._progress_at.items() if now - at < PROGRESS_EVERY_S}

    # --- the thread that looks at the others ---

    def _watch(self) -> None:
        watcher = self._watcher
        try:
            watcher.load(self._stop, self._begun.set)
        except Closed:
            return
        except Exception:
            log.exception("the home could not be read")
        self._begun.set()
        self._loaded.set()
        pause_s = self._look_every_s
        while not self._stop.wait(pause_s):
            started = self._monotonic()
            try:
                if self._reread.is_set():
                    self._reread.clear()
                    watcher.reread()
                watcher.look()
            except Closed:
                return
            except Exception:
                log.exception("other processes' changes could not be looked for")
            self.ring()
            pause_s = max(self._look_every_s, self._monotonic() - started)

    # --- taking in ---

    def put_job(self, job: Job, *, tell: bool = True) -> None:
        with self._lock:
            change = self._summary.put_job(job)
            if change is not None and tell:
                self._tell_change(change, "job_id")

    def put_task(self, task: Task, *, tell: bool = True) -> None:
        with self._lock:
            change = self._summary.put_task(task)
            if change is not None and tell:
                self._tell_change(change, "task_id")

    def _tell_change(self, change: Change, name: str) -> None:
        row = self._summary.shown(change.entry)
        about = {name: row["id"], "status": row["status"]}
        if change.is_new:
            self._tell("task_created", row["session_id"], {**about, "task": row})
        self._tell("job_status", row["session_id"], {**about, "task": row})
        if change.running is not None:
            self._tell(
                "running_task",
                row["session_id"],
                {name: row["id"], "running": change.running, "running_total": self._summary.running},
            )

    def _tell(self, event: str, session_id: str, fields: Mapping[str, Any]) -> None:
        """With the lock held."""
        self._seq += 1
        message = {
            "event": event,
            "epoch": self.epoch,
            "seq": self._seq,
            "at": to_text(self._store.clock.now()),
            "session_id": session_id,
            **fields,
        }
        raw = encoded(message)
        self._total_bytes += len(raw)
        self._told.append(_Told(raw.decode(), session_id, self._total_bytes))
        if len(self._told) > self._keep_events + 1_000:
            del self._told[:1_000]
            self._first += 1_000
        self._fresh = True

    def ring(self) -> None:
        """Wake the listeners, if there is anything new."""
        with self._lock:
            if not self._fresh:
                return
            self._fresh = False
            self._joined.clear()
            bells = self._bells
        for bell in bells:
            try:
                bell()
            except Exception:
                log.exception("a listener could not be woken")

    # --- giving out: events ---

    @property
    def seq(self) -> int:
        return self._seq

    def behind(self, after_seq: int) -> tuple[int, int]:
        """How many events, and how many bytes, come after that number."""
        with self._lock:
            if after_seq + 1 < self._first:
                return self._seq - after_seq, self._total_bytes
            place = after_seq - self._first
            had = self._told[place].total_bytes if 0 <= place < len(self._told) else self._bytes_before()
            return self._seq - after_seq, self._total_bytes - had

    def _bytes_before(self) -> int:
        if not self._told:
            return self._total_bytes
        return self._told[0].total_bytes - len(self._told[0].text.encode())

    def after(self, seq: int, session_id: str | None) -> Batch | None:
        """The next events after `seq` as the text of one frame; None where the ring has lost them."""
        with self._lock:
            if seq + 1 < self._first:
                return None
            key = (seq, self._seq, session_id)
            found = self._joined.get(key)
            if found is not None:
                return found
            batch = self._joined_after(seq, session_id)
            if len(self._joined) < 64:
                self._joined[key] = batch
            return batch

    def _joined_after(self, seq: int, session_id: str | None) -> Batch:
        texts: list[str] = []
        place = seq + 1 - self._first
        length = 0
        while place < len(self._told) and len(texts) < BATCH_EVENTS and length < BATCH_BYTES:
            told = self._told[place]
            place += 1
            if session_id is None or told.session_id == session_id:
                texts.append(told.text)
                length += len(told.text)
        text = None
        if len(texts) == 1:
            text = texts[0]
        elif texts:
            text = '{"event":"batch","events":[' + ",".join(texts) + "]}"
        next_seq = place + self._first - 1
        return Batch(text=text, next_seq=next_seq, more=place < len(self._told))

    def subscribe(
        self, epoch: str | None, after_seq: int | None, since: str | None, session_id: str | None
    ) -> Subscribed:
        """Where a listener begins. In one step, so that nothing falls between the snapshot and what follows."""
        changed_after = _before(since) if since is not None else None
        with self._lock:
            known = epoch == self.epoch and after_seq is not None and self._first - 1 <= after_seq <= self._seq
            if known:
                assert after_seq is not None
                told = self._told[after_seq + 1 - self._first :]
                replayed = sum(session_id is None or each.session_id == session_id for each in told)
                return Subscribed(seq=self._seq, replayed=replayed, snapshot=None, after_seq=after_seq)
            seq = self._seq
            entries = [e for e in self._summary.newest_first() if session_id in (None, e.row["session_id"])]
            wanted = _of_snapshot(entries, changed_after)
            rows = [self._summary.shown(entry) for entry in wanted[:SNAPSHOT_ROWS]]
            about = {
                "event": "snapshot",
                "epoch": self.epoch,
                "seq": seq,
                "counts": self._summary.counts(JOB),
                "running_total": self._summary.running,
                "complete": self.loaded and not self._summary.capped,
                "partial": len(wanted) > SNAPSHOT_ROWS,
            }
        text = encoded({**about, "tasks": rows}).decode()
        return Subscribed(seq=seq, replayed=None, snapshot=text, after_seq=seq)

    # --- giving out: rows ---

    def page(self, wanted: Filter, before: str | None = None, limit: int = 100) -> dict[str, Any]:
        """Rows, newest first, with the counts of the whole filter (docs/server.md, "Lists").

        May read the store, where what is asked for is older than what is kept. Behind a `before` that nobody
        knows there is nothing.
        """
        self._begun.wait(_LOAD_WAIT_S)
        with self._lock:
            entries = self._summary.newest_first()
            first = self._summary.get(before) if before is not None else None
            start = self._summary.from_key(entries, first.key) if first is not None else 0
            capped = self._summary.capped or not self.loaded
            counts = self._summary.counts(wanted.kind, wanted.session_id) if wanted.is_wide else None
        found: list[Entry] = []
        if before is None or first is not None:
            here = itertools.islice(entries, start, None)
            found = list(itertools.islice(_with_status(chosen(here, wanted), wanted), limit + 1))
        if counts is None:
            counts = {}
            for entry in chosen(entries, wanted):
                status = entry.row["status"]
                counts[status] = counts.get(status, 0) + 1
        more = len(found) > limit
        with self._lock:
            rows = [self._summary.shown(entry) for entry in found[:limit]]
        if not more and len(rows) < limit and wanted.kind != PROCESS and (capped or (before and first is None)):
            last = before if before and first is None else self._oldest_job(entries, wanted.session_id)
            older, more = self._older(wanted, last, limit - len(rows))
            rows += older
        with self._lock:
            return {
                "epoch": self.epoch,
                "seq": self._seq,
                "tasks": rows,
                "next_before": rows[-1]["id"] if more and rows else None,
                "counts": counts,
                "total": sum(counts.values()),
                "running_total": self._summary.running,
                "complete": self.loaded and not self._summary.capped,
            }

    @staticmethod
    def _oldest_job(entries: Sequence[Entry], session_id: str | None) -> str | None:
        """What has ended is dropped from the oldest on, so what is older than this one is not in memory."""
        for entry in reversed(entries):
            if entry.row["kind"] == JOB and not entry.unfinished and session_id in (None, entry.row["session_id"]):
                return str(entry.row["id"])
        return None

    def _older(self, wanted: Filter, before: str | None, limit: int) -> tuple[list[Row], bool]:
        """Rows that are not in memory any more, from the store; bounded in what it looks at."""
        rows: list[Row] = []
        for _ in range(10):
            try:
                jobs = self._backend.older(before, wanted.session_id, 500)
            except UnknownJob:
                return rows, False
            for job in jobs:
                before = job.job_id
                with self._lock:
                    if job.job_id in self._summary:
                        continue  # an unfinished one, shown before
                entry = Entry(job_row(job), 0, job.runner_id)
                if next(_with_status(chosen([entry], wanted), wanted), None) is not None:
                    rows.append(entry.row)
                    if len(rows) >= limit:
                        return rows, True
            if len(jobs) < 500:
                return rows, False
        return rows, True

    def row(self, identity: str) -> Row | None:
        with self._lock:
            entry = self._summary.get(identity)
            return None if entry is None else self._summary.shown(entry)

    def refresh(self, job: Job) -> None:
        """A job that was just read, told to everybody where that is news; one that is not kept stays so."""
        if self.knows(job.job_id):
            self.put_job(job)
            self.ring()

    def rows_of(self, jobs: Sequence[Job]) -> list[Row]:
        """The rows of jobs that were just read."""
        for job in jobs:
            self.refresh(job)
        return [self.row(job.job_id) or job_row(job) for job in jobs]

    @property
    def subjects(self) -> Subjects:
        return Subjects(self)

    def children(self, job_id: str, limit: int) -> list[Row]:
        with self._lock:
            return [self._summary.shown(entry) for entry in self._summary.of_parent(job_id, limit)]

    def counts(self, kind: str = JOB) -> dict[str, int]:
        with self._lock:
            return self._summary.counts(kind)

    @property
    def running(self) -> int:
        with self._lock:
            return self._summary.running

    def sessions(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            entries = self._summary.newest_first()
        return by_session(entries)

    def __len__(self) -> int:
        with self._lock:
            return len(self._summary)

    # --- for the watcher ---

    def unfinished(self) -> list[Entry]:
        with self._lock:
            return self._summary.unfinished()

    def knows(self, identity: str) -> bool:
        with self._lock:
            return identity in self._summary

    @property
    def room(self) -> int:
        return self._keep_rows

    def cap(self) -> None:
        with self._lock:
            self._summary.capped = True


def _with_status(entries: Iterator[Entry], wanted: Filter) -> Iterator[Entry]:
    if not wanted.statuses:
        return entries
    return (entry for entry in entries if entry.row["status"] in wanted.statuses)


def _of_snapshot(entries: Sequence[Entry], changed_after: str | None) -> list[Entry]:
    """Unfinished ones first, since those must not be missing."""
    unfinished = [entry for entry in entries if entry.unfinished]
    ended = [entry for entry in entries if not entry.unfinished]
    if changed_after is None:
        return [*unfinished, *ended[: max(SNAPSHOT_NEWEST - len(unfinished), 0)]]
    return [*unfinished, *(entry for entry in ended if entry.row["changed_at"] >= changed_after)]


def _before(since: str) -> str:
    try:
        return to_text(from_text(since) - _SLACK)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(
            f"since must be a time as it stands in an event, not {since[:40]!r}", field="since"
        ) from error


def _bounded(value: Any) -> Any:
    """A turn may report anything; what cannot be sent, or is too much, is said to be so."""
    try:
        raw = orjson.dumps(clean(value), default=lambda each: clean(str(each)))
    except (TypeError, ValueError, RecursionError):
        return {"omitted": "it cannot be written as JSON"}
    return orjson.loads(raw) if len(raw) <= PROGRESS_LIMIT_BYTES else {"omitted": f"{len(raw)} bytes"}


class Subjects:
    """The subjects of the jobs that are in memory, by id."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def get(self, job_id: str) -> str | None:
        row = self._feed.row(job_id)
        return None if row is None else row["subject"]
