"""The home's index of ids: which session has a job, by job id, parent or idempotency key.

A superset of the truth: an entry is durable before the commit that creates its job can become
visible, so a miss is a miss; a hit is checked in the session's repository. One append-only file of
JSON lines in order of creation, shared by all processes of the home.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import attrs
import orjson

from ..durable import Disk, FileLock
from ..durable.files import read_failed
from ..errors import FileRefused
from ..repo import RepositoryBusy


@attrs.frozen(kw_only=True, slots=True)
class Entry:
    job_id: str
    session_id: str
    parent_job_id: str | None = None
    #: of (session, tool call), see `key_of`
    key: str | None = None
    #: the run whose log it has
    run_id: str | None = None
    #: the session that asked for it, where that is another one
    caller_session_id: str | None = None


def key_of(session_id: str, origin_tool_call_id: str) -> str:
    raw = f"{session_id}\0{origin_tool_call_id}".encode("utf-8", "replace")
    return blake2b(raw, digest_size=12).hexdigest()


class Index(Protocol):
    def add(self, entries: Iterable[Entry]) -> None:
        """Durable when it returns. Raises OSError (nothing is lost: a superset stays one)."""
        ...

    def by_id(self, prefix: str) -> Iterator[Entry]: ...
    def by_key(self, key: str, since: int = 0) -> Iterator[Entry]:
        """`since` is a `position` taken before: only what may have been added after it."""
        ...

    def position(self) -> int: ...
    def by_parent(self, job_id: str) -> Iterator[Entry]: ...
    def by_run(self, prefix: str) -> Iterator[Entry]: ...
    def by_caller(self, session_id: str) -> Iterator[Entry]:
        """Jobs of other sessions that this one asked for, oldest first."""
        ...

    def with_caller(self, session_id: str) -> Iterator[Entry]:
        """Jobs of this session that another one asked for, oldest first."""
        ...

    def of_session(self, session_id: str) -> Iterator[Entry]: ...
    def newest_first(self) -> Iterator[Entry]: ...
    def close(self) -> None: ...


#: more than an entry takes
_LONGEST_LINE = 1024


class MemoryIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._keys: dict[str, list[Entry]] = {}
        self._parents: dict[str, list[Entry]] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._entries[entry.job_id] = entry
                if entry.key is not None:
                    self._keys.setdefault(entry.key, []).append(entry)
                if entry.parent_job_id is not None:
                    self._parents.setdefault(entry.parent_job_id, []).append(entry)

    def by_id(self, prefix: str) -> Iterator[Entry]:
        with self._lock:
            exact = self._entries.get(prefix)
            found = [exact] if exact else [e for e in self._entries.values() if e.job_id.startswith(prefix)]
        return iter(found)

    def by_key(self, key: str, since: int = 0) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._keys.get(key, ())))

    def position(self) -> int:
        return 0

    def by_parent(self, job_id: str) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._parents.get(job_id, ())))

    def by_run(self, prefix: str) -> Iterator[Entry]:
        with self._lock:
            return iter([e for e in self._entries.values() if e.run_id is not None and e.run_id.startswith(prefix)])

    def by_caller(self, session_id: str) -> Iterator[Entry]:
        with self._lock:
            return iter([e for e in self._entries.values() if e.caller_session_id == session_id])

    def with_caller(self, session_id: str) -> Iterator[Entry]:
        with self._lock:
            found = [e for e in self._entries.values() if e.session_id == session_id]
        return (entry for entry in found if entry.caller_session_id is not None)

    def of_session(self, session_id: str) -> Iterator[Entry]:
        with self._lock:
            return iter([e for e in self._entries.values() if e.session_id == session_id])

    def newest_first(self) -> Iterator[Entry]:
        with self._lock:
            return iter(list(reversed(self._entries.values())))

    def close(self) -> None:
        """Nothing to give back."""


class FileIndex:
    """Guarantees: an entry that `add` returned for is found by every process from then on.

    Assumptions: lines are whole once the flock was given back; a line that a crash tore is ended by
    the next writer and never believed.
    What the lock protects: the mapped file of this process. The flock orders writers of all processes.
    """

    def __init__(self, directory: Path, disk: Disk, name: str = "jobs") -> None:
        """`name` is what is indexed: another thing has a file and a lock of its own."""
        self._path = directory / f"{name}.jsonl"
        self._disk = disk
        self._writers = FileLock(directory / ("lock" if name == "jobs" else f"{name}.lock"), disk)
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._mapped_bytes = 0
        self._fd: int | None = None
        #: where our own last line ended
        self._end = -1

    def add(self, entries: Iterable[Entry]) -> None:
        lines = b"".join([_encode(e) for e in entries])
        if not lines:
            return
        with self._lock:
            # Held for one append and one sync: a few tries keep a busy neighbour from failing a batch.
            if not self._writers.acquire(attempts=50):
                raise RepositoryBusy("another process is writing the home's index; nothing was written. Try again.")
            try:
                if self._fd is None:
                    fresh = not self._path.exists()
                    self._fd = self._disk.open_append(self._path)
                    if fresh:
                        self._disk.sync_dir(self._path.parent)
                try:
                    size = os.fstat(self._fd).st_size
                    if size != self._end and self._is_torn(size):
                        lines = b"\n" + lines
                    self._disk.write(self._fd, lines)
                    self._disk.sync_data(self._fd)
                    self._end = size + len(lines)
                except BaseException:
                    os.close(self._fd)
                    self._fd = None
                    raise
            finally:
                self._writers.release()

    def _is_torn(self, size: int) -> bool:
        """Whether somebody's last line has no end."""
        if not size:
            return False
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, 1, size - 1) != b"\n"
        finally:
            os.close(fd)

    def by_id(self, prefix: str) -> Iterator[Entry]:
        return self._matching(b'{"j":"' + prefix.encode())

    def by_key(self, key: str, since: int = 0) -> Iterator[Entry]:
        return self._matching(b'"k":"' + key.encode() + b'"', since)

    def position(self) -> int:
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0

    def by_parent(self, job_id: str) -> Iterator[Entry]:
        return self._matching(b'"p":"' + job_id.encode() + b'"')

    def by_run(self, prefix: str) -> Iterator[Entry]:
        return self._matching(b'"r":"' + prefix.encode())

    def by_caller(self, session_id: str) -> Iterator[Entry]:
        return self._matching(b'"c":"' + session_id.encode() + b'"')

    def with_caller(self, session_id: str) -> Iterator[Entry]:
        return self._matching(b'"s":"' + session_id.encode() + b'","c":"')

    def of_session(self, session_id: str) -> Iterator[Entry]:
        return self._matching(b'"s":"' + session_id.encode() + b'"')

    def _matching(self, needle: bytes, since: int = 0) -> Iterator[Entry]:
        found = []
        with self._lock:
            data = self._mapping()
            if data is None:
                return iter(())
            # A line may have been half written when the position was taken; a shorter file is another one.
            at = data.find(needle, max(0, since - _LONGEST_LINE) if since <= len(data) else 0)
            while at >= 0:
                end = data.find(b"\n", at)
                if end < 0:
                    break
                found.append(data[data.rfind(b"\n", 0, at) + 1 : end])
                at = data.find(needle, end)
        return (e for e in map(_decode, found) if e is not None)

    def newest_first(self) -> Iterator[Entry]:
        with self._lock:
            data = self._mapping()
            end = len(data) if data is not None else 0
        while end > 0:
            with self._lock:
                data = self._mapping()
                assert data is not None
                start = max(0, end - 65536)
                if start:
                    start = data.find(b"\n", start, end) + 1 or start
                    if start >= end:  # one line longer than a chunk: not ours
                        start = data.rfind(b"\n", 0, start - 1) + 1
                lines = data[start:end].split(b"\n")
            for line in reversed(lines):
                if (entry := _decode(line)) is not None:
                    yield entry
            end = start

    def _mapping(self) -> mmap.mmap | None:
        """The file as it is now. Holds the lock. Raises `FileRefused` for anything else in its place: a pipe, or a
        link to nothing, would be read as an index of nothing."""
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise FileRefused(
                f"{self._path} was refused and left as it was: it is not a regular file", path=str(self._path)
            )
        size = found.st_size
        if self._map is None or size != self._mapped_bytes:
            self._unmap()
            if size:
                try:
                    with open(self._path, "rb") as file:
                        size = os.fstat(file.fileno()).st_size  # by now it may be another one
                        self._map = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else None
                except OSError as error:
                    raise read_failed(error, str(self._path)) from error
                self._mapped_bytes = size
        return self._map

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map, self._mapped_bytes = None, 0

    def close(self) -> None:
        with self._lock:
            self._unmap()
            if self._fd is not None:
                with contextlib.suppress(OSError):
                    os.close(self._fd)
                self._fd = None


def _encode(entry: Entry) -> bytes:
    fields = {"j": entry.job_id, "s": entry.session_id}
    if entry.caller_session_id is not None:
        fields["c"] = entry.caller_session_id  # right after "s": `with_caller` looks for both at once
    if entry.parent_job_id is not None:
        fields["p"] = entry.parent_job_id
    if entry.key is not None:
        fields["k"] = entry.key
    if entry.run_id is not None:
        fields["r"] = entry.run_id
    return orjson.dumps(fields) + b"\n"


def _decode(line: bytes) -> Entry | None:
    if not line:
        return None
    try:
        fields = orjson.loads(line)
        return Entry(
            job_id=fields["j"],
            session_id=fields["s"],
            parent_job_id=fields.get("p"),
            key=fields.get("k"),
            run_id=fields.get("r"),
            caller_session_id=fields.get("c"),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None  # torn by a crash: its commit never happened
