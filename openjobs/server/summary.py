"""The newest rows of a home in memory: what lists, counts and positions are answered from.

Not thread-safe by itself: the feed's lock guards it. Nothing here reads a disk.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from ..jobs import TERMINAL, UNFINISHED, Job
from ..processes.task import Task
from .rows import JOB, PROCESS, Row, job_row, process_row

#: a job's own words in filters that name several states at once
WORDS = {"unfinished": frozenset(s.value for s in UNFINISHED), "finished": frozenset(s.value for s in TERMINAL)}
_PROCESS_WORDS = {
    "unfinished": frozenset({"running"}),
    "finished": frozenset({"completed", "failed", "cancelled", "timed_out", "lost"}),
}
Key = tuple[str, int]


class Entry:
    """One row, and what is needed to find it again."""

    __slots__ = ("key", "row", "runner_id", "searched")

    def __init__(self, row: Row, number: int, runner_id: str | None) -> None:
        self.row = row
        self.key: Key = (row["created_at"], number)
        self.runner_id = runner_id
        self.searched: str | None = None

    @property
    def unfinished(self) -> bool:
        words = WORDS if self.row["kind"] == JOB else _PROCESS_WORDS
        return str(self.row["status"]) in words["unfinished"]

    def says(self, text: str) -> bool:
        """Whether the text, in lower case, is in what a person would look for."""
        if self.searched is None:
            row = self.row
            parts = (row["subject"], row["agent_id"], row["id"], row["session_id"], row["error"], row.get("command"))
            self.searched = "\n".join(part for part in parts if part).casefold()
        return text in self.searched


@attrs.frozen(kw_only=True, slots=True)
class Filter:
    session_id: str | None = None
    #: as values of a row; empty is every one
    statuses: frozenset[str] = frozenset()
    agent_id: str | None = None
    text: str | None = None
    kind: str = JOB
    parent_job_id: str | None = None
    parent_msg_id: str | None = None

    def wants(self, row: Row) -> bool:
        """All but status and text."""
        return (
            (self.kind == "all" or row["kind"] == self.kind)
            and (self.session_id is None or row["session_id"] == self.session_id)
            and (self.agent_id is None or row["agent_id"] == self.agent_id)
            and (self.parent_job_id is None or row.get("parent_job_id") == self.parent_job_id)
            and (self.parent_msg_id is None or row.get("parent_msg_id") == self.parent_msg_id)
        )

    @property
    def is_wide(self) -> bool:
        """Whether it lets every row of its kind (and session) through but for the status: then the counts are known."""
        return attrs.evolve(self, statuses=frozenset()) == Filter(kind=self.kind, session_id=self.session_id)


@attrs.frozen(kw_only=True, slots=True)
class Change:
    """What one look at a job or process brought."""

    entry: Entry
    is_new: bool
    #: it began (True) or ended (False) to run
    running: bool | None


class Summary:
    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._entries: dict[str, Entry] = {}
        #: sorted by key, oldest first
        self._order: list[Entry] = []
        self._numbers = 0
        #: (kind, session or None for all) -> status -> rows
        self._counts: dict[tuple[str, str | None], Counter[str]] = {}
        self._children: Counter[str] = Counter()
        self._unfinished: dict[str, Entry] = {}
        self._running: set[str] = set()
        #: runner id -> its queued jobs, in the order in which they will start
        self._queued: dict[str | None, dict[str, None]] = {}
        self._positions: dict[str, int] | None = None
        #: whether rows were left out because there were more than are kept
        self.capped = False

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, identity: str) -> bool:
        return identity in self._entries

    def get(self, identity: str) -> Entry | None:
        return self._entries.get(identity)

    # --- taking in ---

    def put_job(self, job: Job) -> Change | None:
        """None where the row is not news."""
        entry = self._entries.get(job.job_id)
        if entry is not None and entry.row["revision"] >= job.revision:
            return None
        return self._put(entry, job_row(job), job.runner_id)

    def put_task(self, task: Task) -> Change | None:
        entry = self._entries.get(task.task_id)
        row = process_row(task)
        if entry is not None:
            known = entry.row
            if known["completed_at"] is not None and row["completed_at"] is None:
                return None  # an older look
            same = all(row[name] == known[name] for name in ("status", "started_at", "cancel_requested_at"))
            if same:
                entry.row = row
                return None
        return self._put(entry, row, task.worker_id)

    def _put(self, entry: Entry | None, row: Row, runner_id: str | None) -> Change:
        is_new = entry is None
        if entry is None:
            self._numbers += 1
            entry = Entry(row, self._numbers, runner_id)
            self._entries[row["id"]] = entry
            bisect.insort(self._order, entry, key=lambda each: each.key)
            if row.get("parent_job_id"):
                self._children[row["parent_job_id"]] += 1
        else:
            self._count(entry.row, -1)
            entry.row, entry.runner_id, entry.searched = row, runner_id, None
        self._count(row, 1)
        running = self._note_running(entry)
        self._note_queued(entry)
        if entry.unfinished:
            self._unfinished[row["id"]] = entry
        else:
            self._unfinished.pop(row["id"], None)
        if is_new and len(self._order) > self._keep:
            self._drop_oldest()
        return Change(entry=entry, is_new=is_new, running=running)

    def _note_running(self, entry: Entry) -> bool | None:
        identity: str = entry.row["id"]
        runs: bool = entry.row["status"] == "running"
        if runs == (identity in self._running):
            return None
        if runs:
            self._running.add(identity)
        else:
            self._running.remove(identity)
        return runs

    def _note_queued(self, entry: Entry) -> None:
        if entry.row["kind"] != JOB:
            return
        queue = self._queued.setdefault(entry.runner_id, {})
        identity = entry.row["id"]
        if entry.row["status"] == "queued":
            if identity not in queue:
                queue[identity] = None
                self._positions = None
        elif identity in queue:
            del queue[identity]
            self._positions = None
        if not queue:
            del self._queued[entry.runner_id]

    def _drop_oldest(self) -> None:
        """Something that has ended; the unfinished are always kept."""
        self.capped = True
        for place, entry in enumerate(self._order):
            if not entry.unfinished:
                del self._order[place]
                del self._entries[entry.row["id"]]
                self._count(entry.row, -1)
                return

    def _count(self, row: Row, number: int) -> None:
        for session_id in (None, row["session_id"]):
            self._counts.setdefault((row["kind"], session_id), Counter())[row["status"]] += number

    # --- giving out ---

    def shown(self, entry: Entry) -> Row:
        row = entry.row
        if row["kind"] != JOB:
            return row
        children = self._children.get(row["id"], 0)
        position = self._position(row["id"], entry.runner_id) if row["status"] == "queued" else None
        return {**row, "children": children, "queue_position": position}

    def _position(self, identity: str, runner_id: str | None) -> int | None:
        queue = self._queued.get(runner_id, {})
        if self._positions is None:
            if identity in queue and next(reversed(queue)) == identity:
                return len(queue)  # just queued: the others' places need not be counted for it
            self._positions = {
                each: place for each_queue in self._queued.values() for place, each in enumerate(each_queue, start=1)
            }
        return self._positions.get(identity)

    def newest_first(self) -> Sequence[Entry]:
        """A copy: it may be gone through without the lock."""
        return self._order[::-1]

    def from_key(self, entries: Sequence[Entry], key: Key) -> int:
        """Where, in a copy of `newest_first`, what is older than `key` begins."""
        return bisect.bisect_right(entries, _reverse(key), key=lambda each: _reverse(each.key))

    def unfinished(self) -> list[Entry]:
        return list(self._unfinished.values())

    def counts(self, kind: str, session_id: str | None = None) -> dict[str, int]:
        found: Counter[str] = Counter()
        for each in (JOB, PROCESS) if kind == "all" else (kind,):
            found.update(self._counts.get((each, session_id), {}))
        return {status: number for status, number in found.items() if number > 0}

    @property
    def running(self) -> int:
        return len(self._running)

    def of_parent(self, job_id: str, limit: int) -> list[Entry]:
        if job_id not in self._children:
            return []
        found = [entry for entry in self._order if entry.row.get("parent_job_id") == job_id]
        return found[:limit]


class _Reversed:
    """A key that sorts the other way round."""

    __slots__ = ("key",)

    def __init__(self, key: Key) -> None:
        self.key = key

    def __lt__(self, other: _Reversed) -> bool:
        return self.key > other.key


def _reverse(key: Key) -> _Reversed:
    return _Reversed(key)


def chosen(entries: Iterable[Entry], wanted: Filter) -> Iterator[Entry]:
    """Those that the filter lets through, whatever their status."""
    text = wanted.text.casefold() if wanted.text else None
    for entry in entries:
        if wanted.wants(entry.row) and (text is None or entry.says(text)):
            yield entry


def statuses_of(names: Iterable[str]) -> frozenset[str]:
    """`unfinished` and `finished` are taken apart; anything else stands for itself."""
    found: set[str] = set()
    for name in names:
        if name in WORDS:
            found |= WORDS[name] | _PROCESS_WORDS[name]
        else:
            found.add(name)
    return frozenset(found)


KNOWN_STATUSES = frozenset().union(*WORDS.values(), *_PROCESS_WORDS.values(), WORDS)


def by_session(entries: Iterable[Entry]) -> dict[str, dict[str, Any]]:
    """Of each session with a row: counts of jobs, how many run, and when anything changed last."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        row = entry.row
        about = found.setdefault(row["session_id"], {"counts": Counter(), "running": 0, "changed_at": ""})
        if row["kind"] == JOB:
            about["counts"][row["status"]] += 1
        about["running"] += row["status"] == "running"
        about["changed_at"] = max(about["changed_at"], row["changed_at"])
    return found
