"""The same repository in memory: for unit tests, and for hosts that want no trail."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import attrs

from ..errors import Damaged, InvalidInput, NotFound, Refused
from .base import Change, CommitInfo, Maintenance, Outcome, Transaction, View
from .message import clean_subject, clean_trailers
from .trees import path_parts

AUTHOR = "openjobs <openjobs@localhost>"


@attrs.frozen(slots=True)
class _Commit:
    info: CommitInfo
    files: Mapping[str, bytes]


class _MemoryView:
    def __init__(self, commit_id: str | None, files: Mapping[str, bytes]) -> None:
        self.commit_id = commit_id
        self._files = files

    def read(self, path: str) -> bytes | None:
        return self._files.get(path)

    def version(self, path: str) -> str | None:
        data = self._files.get(path)
        if data is not None:
            return hashlib.sha1(data).hexdigest()
        below = [(p, d) for p, d in self._files.items() if p.startswith(path + "/")]
        if not below:
            return None
        return hashlib.sha1(repr(sorted((p, hashlib.sha1(d).digest()) for p, d in below)).encode()).hexdigest()

    def names(self, directory: str) -> Sequence[str]:
        prefix = directory + "/" if directory else ""
        return sorted({p[len(prefix) :].split("/", 1)[0] for p in self._files if p.startswith(prefix)})


class _NothingToDo:
    def step(self) -> bool:
        return False

    def close(self) -> None:
        """Holds nothing."""


class MemoryRepository:
    """Guarantees: what `transact` returned is seen by every later `view`; views never change.
    The lock protects the list of commits; a view holds its own mapping and needs none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a transaction may look at the log
        self._commits: dict[str, _Commit] = {}
        self._head: str | None = None

    def view(self, commit_id: str | None = None) -> View:
        with self._lock:
            if commit_id is not None and commit_id not in self._commits:
                raise NotFound(f"there is no commit {commit_id}")
            return self._view_at(commit_id or self._head)

    def _view_at(self, commit_id: str | None) -> _MemoryView:
        return _MemoryView(commit_id, self._commits[commit_id].files if commit_id else {})

    def transact(
        self,
        transactions: Sequence[Transaction],
        *,
        before_publish: Callable[[], None] | None = None,
        durable: Callable[[list[Outcome]], None] | None = None,
        now: datetime | None = None,
    ) -> list[Outcome]:
        outcomes = self._apply(transactions, before_publish, now or datetime.now(UTC))
        if durable is not None:
            durable(outcomes)
        return outcomes

    def _apply(
        self, transactions: Sequence[Transaction], before_publish: Callable[[], None] | None, now: datetime
    ) -> list[Outcome]:
        with self._lock:
            made: dict[str, _Commit] = {}
            head = self._head
            files: Mapping[str, bytes] = self._commits[head].files if head else {}
            outcomes: list[Outcome] = []
            for transaction in transactions:
                try:
                    change = transaction(_MemoryView(head, files))
                    if change is not None:
                        _check_paths(change.files, files)
                except (Refused, Damaged) as error:
                    outcomes.append(Outcome(error=error))
                    continue
                if change is None:
                    outcomes.append(Outcome(commit_id=head))
                    continue
                commit = self._commit(change, head, files, now)
                made[commit.info.commit_id] = commit
                head, files = commit.info.commit_id, commit.files
                outcomes.append(Outcome(commit_id=head))
            if before_publish is not None:
                before_publish()
            self._commits.update(made)
            self._head = head
            return outcomes

    def _commit(self, change: Change, parent: str | None, files: Mapping[str, bytes], now: datetime) -> _Commit:
        after = dict(files)
        for path, data in change.files.items():
            if data is None:
                after.pop(path, None)
            else:
                after[path] = data
        subject, trailers = clean_subject(change.subject), clean_trailers(change.trailers)
        digest = hashlib.sha1(repr((parent, subject, trailers, now, len(self._commits), sorted(change.files))).encode())
        for path in sorted(change.files):
            digest.update(change.files[path] or b"")
        info = CommitInfo(
            commit_id=digest.hexdigest(),
            parents=(parent,) if parent else (),
            subject=subject,
            trailers=trailers,
            time=now,
            author=AUTHOR,
        )
        return _Commit(info, after)

    def republish(self) -> None:
        """Nothing to do: memory has no barrier."""

    def log(self, *, start: str | None = None, paths: Sequence[str] = ()) -> Iterator[CommitInfo]:
        with self._lock:
            commits, at = dict(self._commits), self._head if start is None else start
        if at is not None and at not in commits:
            raise NotFound(f"there is no commit {at}")
        while at is not None:
            commit = commits[at]
            parent = commit.info.parents[0] if commit.info.parents else None
            before = commits[parent].files if parent else {}
            if not paths or any(before.get(p) != commit.files.get(p) for p in paths):
                yield commit.info
            at = parent

    def check(self) -> Sequence[str]:
        """Nothing on disk that could be wrong."""
        return []

    def maintenance(self) -> Maintenance:
        return _NothingToDo()

    def maintain(self) -> None:
        """Nothing to do."""

    def rest(self) -> None:
        """All that there is is in memory."""

    def close(self) -> None:
        """Nothing to give back."""


def _check_paths(changed: Mapping[str, bytes | None], files: Mapping[str, bytes]) -> None:
    """Raises `InvalidInput` for what git refuses: see `Change`."""
    for path in changed:
        path_parts(path)
        if any(parent in changed for parent in _parents(path)):
            raise InvalidInput(f"{path!r}: a file and a directory have the same name")
    for path, data in changed.items():
        clash = next((parent for parent in _parents(path) if parent in files), None)
        if clash is not None and data is not None:
            raise InvalidInput(f"{clash} is no directory")
        if path not in files and any(other.startswith(path + "/") for other in files):
            raise InvalidInput(f"{path} is a directory")


def _parents(path: str) -> Iterator[str]:
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)
