"""An append-only ledger: what was acknowledged is never lost, never changed, and read in order.

One file of lines (lines.py) and, beside it, `.<name>.lock` for the flock between processes. Parts
that a crash left behind an append are kept as `<name>.torn-<offset>`. Spec 000 (a corrupt section
in the middle refuses; only an incomplete last record is repaired, at its boundary).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..clock import Clock, SystemClock
from ..durable import Disk, FileLock
from ..durable.private import check_file, is_same, opened_for_reading, refuse_in_place_of_directory
from ..errors import (
    Bug,
    CursorLost,
    Damaged,
    FileRefused,
    ForkedProcess,
    OutcomeUnknown,
    SessionBusy,
    StoreWriteFailed,
)
from .cursor import START, Cursor
from .lines import Line, Scan, damaged, decode_payload, encode, encode_payload, is_news, is_record_of, newest, resume

_log = logging.getLogger(__name__)

#: how long a writer waits for another one
BUSY_TIMEOUT_S = 10.0
_LOCK_PAUSE_S = (0.0005, 0.02)
_FOLLOW_PAUSE_S = (0.005, 0.05)
_COPY_BYTES = 2**20


@attrs.frozen
class Record:
    #: its number, never given out twice
    seq: int
    data: Mapping[str, Any]
    #: just behind it: where to go on reading
    cursor: Cursor


@attrs.frozen
class Compacted:
    kept: int
    dropped: int


class Ledger:
    """Guarantees: records are read in the order of their numbers, by every reader the same; a durable
    append that returned survives a power cut; one that raised `Refused` left nothing; after
    `OutcomeUnknown` the record is there whole or not at all, and the ledger can be used.
    A batch is no unit: a crash may keep the first records of it. Readers never write.

    Assumptions: a local file system; all writers go through this class; where records are appended with
    `durable=False`, a file system that makes a file longer only after its data. A record can be read a
    moment before it is durable; if its sync then fails, it is gone again, and its number is used by
    another record (see `Cursor`).

    What each lock protects: `_turn` the remembered end and suspicion, and this process's threads from
    polling against each other; the flock on `.<name>.lock` every change of the file.
    No descriptor stays open between calls; an unfinished iteration holds one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        disk: Disk | None = None,
        *,
        clock: Clock | None = None,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        from_the_end: bool = False,
    ) -> None:
        """`from_the_end`: the first append looks for the last whole record and checks only what is behind it, so
        it costs the same however long the ledger is. Damage further up is then for readers to find."""
        self.path = Path(path)
        #: files with incomplete records that this object has put aside, oldest first
        self.set_aside: list[Path] = []
        self._disk = disk or Disk()
        self._clock = clock or SystemClock()
        self._busy_timeout_s = busy_timeout_s
        self._from_the_end = from_the_end
        #: reentrant only so that its owner can tell that it is
        self._turn = threading.RLock()
        #: that of the `append_many` that has the turn
        self._appends: FileLock | None = None
        self._pid = os.getpid()
        #: the end of what was checked; everything before it is known to be good
        self._end = START
        #: a sync failed here: the file's pages may say more than the disk has
        self._suspect = False

    # --- reading -----------------------------------------------------------------------------------

    def read(self, since: Cursor = START, *, must_fit: bool = False) -> Generator[Record, None, None]:
        """The records behind `since`, as far as there are any now; never repairs, never waits.

        An incomplete record at the end is not there yet. Raises `Damaged` and `FileRefused`, after the
        records before the damage; a missing file has no records. With `must_fit` it raises `CursorLost`,
        before any record, where the record that `since` names is not there (the file is another one or
        became shorter); without it the reader gets what has a higher number, or that number and other content.
        """
        position, seen = since, None
        while True:
            try:
                for record in self._read_once(position, must_fit):
                    position = record.cursor
                    yield record
                return
            except Damaged as error:
                # What is read while another process repairs the tail may be a mixture of old and new.
                # Damage stays where it is; a mixture is gone when we look again.
                if seen == (error.offset, position):
                    raise
                seen = (error.offset, position)

    def _read_once(self, since: Cursor, must_fit: bool) -> Iterator[Record]:
        try:
            with opened_for_reading(self.path) as fd:
                begin = resume(fd, since)
                missing = must_fit and begin != since
                for line in Scan(fd, begin, self.path):
                    if missing and line.cursor.seq >= since.seq:
                        # Not where it stood. After a compaction it stands elsewhere, otherwise nowhere.
                        if not is_record_of(line, since):
                            raise self._lost(since)
                        missing = False
                    if is_news(line, since) and (record := self._record(line)):
                        yield record
                if missing:
                    raise self._lost(since)
        except (FileNotFoundError, NotADirectoryError):
            refuse_in_place_of_directory(self.path.parent)
            if must_fit and since != START:
                raise self._lost(since) from None

    def _lost(self, since: Cursor) -> CursorLost:
        return CursorLost(
            f"{self.path} does not have the record of cursor {since.to_text()}: it was replaced, became shorter, or"
            " the cursor is of another one; read it from the beginning, without a cursor",
            path=str(self.path),
        )

    def _record(self, line: Line) -> Record | None:
        data = decode_payload(line.raw, self.path, line.cursor.start_bytes)
        return None if data is None else Record(line.cursor.seq, data, line.cursor)

    def follow(self, since: Cursor = START, *, stop: threading.Event, clock: Clock | None = None) -> Iterator[Record]:
        """As `read`, and then what others append, until `stop` is set.

        Costs one stat per look; a look follows after 5 ms where something happens and 50 ms where nothing does.
        """
        clock = clock or self._clock
        shortest, longest = _FOLLOW_PAUSE_S
        pause, known = shortest, None
        while not stop.is_set():
            state = self._stat()
            found = False
            if state != known:
                for record in self.read(since):
                    since, found = record.cursor, True
                    yield record
                known = state
            pause = shortest if found else min(pause * 2, longest)
            if clock.wait(stop, pause):
                return

    def _stat(self) -> tuple[int, int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.path)
            return found.st_dev, found.st_ino, found.st_size
        return None

    # --- writing -----------------------------------------------------------------------------------

    def append(self, payload: Mapping[str, Any], *, durable: bool = True) -> Record:
        """One more record; durable when it returns, unless `durable` is False: then with the next durable one.

        Raises `InvalidInput` for what JSON cannot hold, `SessionBusy`, `Damaged`, `FileRefused`,
        `StoreWriteFailed` (nothing changed) and `OutcomeUnknown`.
        """
        return self.append_many([payload], durable=durable)[0]

    def append_many(self, payloads: Sequence[Mapping[str, Any]], *, durable: bool = True) -> list[Record]:
        """Several in one write and one sync."""
        # As `exclusive`, but for a thread that a Ctrl-C may interrupt between any two steps, as the main thread's
        # submit: whether it has what it asked for is found out at the end, and never remembered on the way.
        try:
            self._take_turn()
            lock = self._appends = FileLock(self.check_lock(), self._disk)
            self._until_locked(lock)
            return Exclusive(self).append_many(payloads, durable=durable)
        finally:
            try:
                self._give_back()
            except BaseException:
                self._give_back()
                raise

    def _take_turn(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess
        if not self._turn.acquire(timeout=self._busy_timeout_s):
            raise SessionBusy(f"{self.path} is being written by another thread; nothing was written")

    def _give_back(self) -> None:
        """Whatever this thread has of the turn and its lock; what another has stays."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._appends is not None:
                self._appends.release()
                self._appends = None
        finally:
            with contextlib.suppress(RuntimeError):  # it is given back
                while True:
                    self._turn.release()

    @contextlib.contextmanager
    def exclusive(self) -> Generator[Exclusive, None, None]:
        """No other process or thread appends meanwhile: read what is new, decide, append.

        On entry the ledger has been checked to its end (with `from_the_end`: its end has been checked). Raises
        `SessionBusy`, `Damaged`, `FileRefused`.
        """
        self._take_turn()
        try:
            lock = FileLock(self.check_lock(), self._disk)
            self._until_locked(lock)
            try:
                held = Exclusive(self)
                try:
                    yield held
                finally:
                    held._over = True
            finally:
                lock.release()
        finally:
            self._turn.release()

    def compact(self, keep: Callable[[Record], bool | Mapping[str, Any]]) -> Compacted:
        """Rewrite the ledger with the records for which `keep` is true, or with the payload it gives.

        Numbers stay, the last number is never lost, and cursors stay good; a reader that stands on a
        record whose payload changed reads that one again. After any crash the old or the new file.
        """
        with self.exclusive() as held:
            return held.compact(keep)

    def check_lock(self) -> Path:
        """Where the lock is that every append takes. Raises `FileRefused`, with what to do, where something stands
        there that can be none: only a person can take it away. One look, and nothing is waited for."""
        path = self.path.with_name(f".{self.path.name}.lock")
        try:
            check_file(path, os.lstat(path))
        except (FileNotFoundError, NotADirectoryError):
            refuse_in_place_of_directory(self.path.parent)  # else the first append makes it
        except FileRefused as error:
            raise FileRefused(
                f"{error}; until that is put right nothing can be written to {self.path.name}: what is no file may be"
                " moved away, it is only a lock",
                path=str(path),
            ) from None
        return path

    def _until_locked(self, lock: FileLock) -> None:
        deadline = self._clock.monotonic() + self._busy_timeout_s
        pause, longest = _LOCK_PAUSE_S
        never = threading.Event()
        while not self._try(lock):
            if self._clock.monotonic() >= deadline:
                raise SessionBusy(f"{self.path} is being written by another process; nothing was written")
            self._clock.wait(never, pause)
            pause = min(pause * 2, longest)

    def _try(self, lock: FileLock) -> bool:
        try:
            return lock.try_acquire()
        except OSError as error:
            raise StoreWriteFailed(f"{self.path} could not be locked; nothing changed: {error}") from error


class Exclusive:
    """A ledger while nobody else can append to it. Made by `Ledger.exclusive` only."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._path = ledger.path
        self._disk = ledger._disk
        self._over = False
        self._tail_bytes = 0
        self._catch_up()

    def read(self, since: Cursor = START) -> Generator[Record, None, None]:
        return self._ledger.read(since)

    def append(self, payload: Mapping[str, Any], *, durable: bool = True) -> Record:
        return self.append_many([payload], durable=durable)[0]

    def append_many(self, payloads: Sequence[Mapping[str, Any]], *, durable: bool = True) -> list[Record]:
        """As `Ledger.append_many`."""
        if self._over:
            raise Bug("this ledger's lock was given back already")
        records, lines = self._number(payloads)
        if not records:
            return []
        self._mend()
        self._write(lines, durable)
        self._ledger._end = records[-1].cursor
        return records

    def compact(self, keep: Callable[[Record], bool | Mapping[str, Any]]) -> Compacted:
        """As `Ledger.compact`."""
        if self._over:
            raise Bug("this ledger's lock was given back already")
        self._mend()
        kept = dropped = 0

        def lines() -> Iterator[bytes]:
            nonlocal kept, dropped
            prev = 0
            with opened_for_reading(self._path) as fd:
                for line in Scan(fd, START, self._path):
                    seq = line.cursor.seq
                    record = self._ledger._record(line)
                    wish = keep(record) if record else False
                    if wish is not False:
                        kept += 1
                    elif record:
                        dropped += 1
                    if wish is not False or seq == self._ledger._end.seq:
                        raw = line.raw if wish is True else b"null" if wish is False else encode_payload(wish)
                        yield encode(seq, prev, raw)
                        prev = seq

        if self._ledger._end.seq:
            try:
                self._rewrite(lines())
            except OSError as error:
                raise OutcomeUnknown(
                    f"{self._path}: it is as it was or compacted, whole in both cases: {error}"
                ) from error
            self._catch_up()
        return Compacted(kept, dropped)

    # --- the steps of an append ----------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Check what was appended since we looked last; the first time the whole file (see `from_the_end`)."""
        try:
            with opened_for_reading(self._path) as fd:
                from_the_end = self._ledger._from_the_end and self._ledger._end == START
                scan = Scan(fd, newest(fd) if from_the_end else resume(fd, self._ledger._end), self._path)
                for _ in scan:
                    pass
                if scan.position.seq < self._ledger._end.seq:
                    raise damaged(
                        self._path,
                        scan.position.offset_bytes,
                        f"it ends at record {scan.position.seq}, but record {self._ledger._end.seq} was there",
                    )
                self._ledger._end = scan.position
                self._tail_bytes = scan.tail_bytes
        except FileNotFoundError:
            if self._ledger._end.offset_bytes:
                raise damaged(self._path, 0, "the file is gone") from None

    def _number(self, payloads: Sequence[Mapping[str, Any]]) -> tuple[list[Record], list[bytes]]:
        at, records, lines = self._ledger._end, [], []
        for payload in payloads:
            raw = encode_payload(payload)
            text = encode(at.seq + 1, at.seq, raw)
            crc = int(text[text.index(b'"crc":"') + 7 :][:8], 16)
            at = Cursor(seq=at.seq + 1, start_bytes=at.offset_bytes, offset_bytes=at.offset_bytes + len(text), crc=crc)
            data = decode_payload(raw, self._path, at.start_bytes)
            assert data is not None
            records.append(Record(at.seq, data, at))
            lines.append(text)
        return records, lines

    def _mend(self) -> None:
        """Make the end fit for an append: a torn record is put aside, doubtful pages are written anew."""
        try:
            if self._tail_bytes:
                self._put_tail_aside()
            if self._ledger._suspect:
                self._rewrite_good_part()
        except OSError as error:
            raise StoreWriteFailed(f"{self._path} could not be made ready for an append: {error}") from error

    def _put_tail_aside(self) -> None:
        """The order matters: the bytes are durable beside the ledger before they leave it."""
        end = self._ledger._end.offset_bytes
        with opened_for_reading(self._path) as fd:
            tail = os.pread(fd, self._tail_bytes, end)
        aside = self._keep_aside(tail, end)
        fd = self._disk.open_update(self._path)
        try:
            check_file(self._path, os.fstat(fd))
            self._disk.truncate(fd, end)
            self._sync_or_suspect(fd)
        finally:
            os.close(fd)
        self._tail_bytes = 0
        self._ledger.set_aside.append(aside)
        _log.warning(
            "%s ended in an incomplete record: %d bytes at %d were cut off and kept in %s",
            self._path,
            len(tail),
            end,
            aside.name,
        )

    def _keep_aside(self, tail: bytes, offset: int) -> Path:
        number = 0
        while True:
            suffix = f".torn-{offset}" + (f"-{number}" if number else "")
            aside = self._path.with_name(self._path.name + suffix)
            try:
                self._disk.write_new(aside, tail)
            except FileExistsError:
                # A crash between keeping and cutting left its copy, perhaps an incomplete one, or the
                # ledger was torn here before. Never the same file again: it may not be on the disk.
                number += 1
                continue
            self._disk.sync_dir(self._path.parent)
            return aside

    def _write(self, lines: Sequence[bytes], durable: bool) -> None:
        end = self._ledger._end.offset_bytes
        try:
            fd = self._open_at(end)
        except OSError as error:
            raise StoreWriteFailed(f"{self._path} could not be opened; nothing changed: {error}") from error
        try:
            try:
                self._disk.write(fd, lines)
            except OSError as error:
                self._take_back(fd, end, error)
            if durable:
                try:
                    self._sync_or_suspect(fd)
                except OSError as error:
                    self._start_over(error)
        finally:
            os.close(fd)

    def _open_at(self, end: int) -> int:
        """The ledger, open for appending, made where missing; its name is durable before its first byte."""
        fd = self._disk.open_append(self._path)
        try:
            found = os.fstat(fd)
            check_file(self._path, found)
            if found.st_size != end or not is_same(found, os.lstat(self._path)):
                raise damaged(self._path, end, "it changed while we had its lock")
            if end == 0:
                self._sync_name()
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _sync_name(self) -> None:
        try:
            self._disk.sync_dir(self._path.parent)
        except OSError:
            # Left there, the next append would sync the name again and believe the answer.
            with contextlib.suppress(OSError):
                self._disk.unlink(self._path)
            raise

    def _take_back(self, fd: int, end: int, error: OSError) -> None:
        """After a failed write: cut off what of it arrived, so that nothing has changed."""
        try:
            self._disk.truncate(fd, end)
            self._sync_or_suspect(fd)
        except OSError as again:
            raise OutcomeUnknown(
                f"{self._path}: the append failed ({error}) and could not be undone ({again})"
            ) from error
        raise StoreWriteFailed(f"{self._path} could not be written; nothing changed: {error}") from error

    def _sync_or_suspect(self, fd: int) -> None:
        try:
            self._disk.sync_data(fd)
        except OSError:
            self._ledger._suspect = True
            raise

    def _start_over(self, error: OSError) -> None:
        """After a failed sync: the pages of this file can no longer be trusted to reach the disk, and a
        second sync would say yes without having written them. So the good part goes to a new file,
        without the record whose fate is unknown. Where that fails too, the next append tries it first."""
        try:
            self._rewrite_good_part()
        except OSError as again:
            _log.error("%s: a sync failed, and so did writing the ledger anew: %s", self._path, again)
        raise OutcomeUnknown(f"{self._path}: the record was written but not made durable: {error}") from error

    def _rewrite_good_part(self) -> None:
        end = self._ledger._end.offset_bytes

        def parts() -> Iterator[bytes]:
            with opened_for_reading(self._path) as fd:
                for offset in range(0, end, _COPY_BYTES):
                    yield os.pread(fd, min(_COPY_BYTES, end - offset), offset)

        self._rewrite(parts())
        self._ledger._suspect = False

    def _rewrite(self, parts: Iterable[bytes]) -> None:
        """As `Disk.replace`, part by part, for files that should not be in memory whole. Under the lock
        one temporary name is enough, and what stands there was left by a crash."""
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(temporary)
        fd = self._disk.create(temporary)
        try:
            for part in parts:
                self._disk.write(fd, part)
            self._disk.sync(fd)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
            raise
        os.close(fd)
        self._disk.rename(temporary, self._path)
        self._disk.sync_dir(self._path.parent)
