"""Where the facts of one session stand: a ledger on disk, or a list in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from ..durable import Disk
from ..errors import CursorLost, Damaged, InvalidInput, OutcomeUnknown, SessionBusy
from ..ledger import START, Cursor, Ledger, Record
from .fact import Fact, from_json, to_json

NAME = "events.jsonl"
#: how long a writer waits for another process's append; a waiter of a job waits as long
BUSY_TIMEOUT_S = 1.0
#: after it waited in vain it gives up at once for this long
_BUSY_PAUSE_S = 5.0


class FactLog(Protocol):
    def append(self, facts: Sequence[Fact]) -> None:
        """Durable when it returns. Raises what `Ledger.append` raises."""
        ...

    def read(self, after: Cursor = START) -> Iterator[Fact]:
        """The facts behind `after`, as far as there are any now, in their order. Never writes, never waits.

        Raises `CursorLost`, before any fact, where the fact of `after` is not there; `Damaged` (with the offset)
        and `FileRefused`, after the facts before the damage.
        """
        ...

    def state(self) -> object:
        """What changes when facts are appended; cheap."""
        ...


@attrs.define(eq=False, slots=True)
class _Share:
    """What one caller wants to have appended."""

    facts: Sequence[Fact]
    done: bool = False
    error: Exception | None = None


class FileFactLog:
    """Guarantees: what `append` returned for is durable, in the order in which one thread appended it; each fact
    is there whole or not at all, whatever died meanwhile. Facts that several threads append at the same time
    share one write and one sync. An append costs the same however long the ledger is: it looks at the ledger's
    end only, and who reads looks at all of it.

    Assumptions: those of `Ledger`; where facts share a write, a file system that makes a file longer only after
    its data (otherwise a power cut can leave a hole in front of whole records, which is damage).

    What each lock protects: `_lock` the list of what waits; `_turn` the right to write. 1. A thread puts its share
    on the list, 2. it gets the turn, 3. its share is done (who had the turn before took it along), or it writes all
    that is on the list now.
    """

    def __init__(
        self,
        path: Path,
        disk: Disk | None = None,
        *,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._ledger = Ledger(path, disk, busy_timeout_s=busy_timeout_s, from_the_end=True)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._waiting: list[_Share] = []
        self._busy_until = 0.0

    # --- writing ---

    def append(self, facts: Sequence[Fact]) -> None:
        share = _Share(facts)
        with self._lock:
            self._waiting.append(share)
        with self._turn:
            if not share.done:
                self._write()
        if share.error is not None:
            raise share.error

    def _write(self) -> None:
        with self._lock:
            shares, self._waiting = self._waiting, []
        try:
            self._check_busy()
            self._append(shares)
        except Exception as error:
            for share in shares:
                share.error = share.error or error
        except BaseException:
            for share in shares:
                share.error = OutcomeUnknown(f"{self.path}: the append was interrupted")
            raise
        finally:
            for share in shares:
                share.done = True

    def _append(self, shares: Sequence[_Share]) -> None:
        try:
            self._ledger.append_many([to_json(fact) for share in shares for fact in share.facts])
        except InvalidInput as error:
            if len(shares) == 1:
                raise
            # One fact that a ledger cannot hold must not take the others with it.
            for share in shares:
                try:
                    self._ledger.append_many([to_json(fact) for fact in share.facts])
                except InvalidInput:
                    share.error = error
        except SessionBusy:
            self._busy_until = self._monotonic() + _BUSY_PAUSE_S
            raise

    def _check_busy(self) -> None:
        """Somebody holds the ledger and does not let go: not every job's waiters wait for that again."""
        if self._monotonic() < self._busy_until:
            raise SessionBusy(f"{self.path} was held by another process a moment ago; nothing was written")

    # --- reading ---

    def read(self, after: Cursor = START) -> Iterator[Fact]:
        for record in self._ledger.read(after, must_fit=True):
            fact = self._fact(record)
            if fact is not None:
                yield fact

    def _fact(self, record: Record) -> Fact | None:
        try:
            return from_json(record.data, record.cursor)
        except ValueError as error:
            at = record.cursor.start_bytes
            raise Damaged(
                f"{self.path}: what stands at byte {at} is no fact: {error}", path=str(self.path), offset=at
            ) from None

    def state(self) -> object:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        # With its time: a file that was written over may have the length that it had.
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class MemoryFactLog:
    """The same for a store in memory; gone with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: list[Fact] = []

    def append(self, facts: Sequence[Fact]) -> None:
        with self._lock:
            for fact in facts:
                self._facts.append(attrs.evolve(fact, cursor=Cursor(seq=len(self._facts) + 1)))

    def read(self, after: Cursor = START) -> Iterator[Fact]:
        with self._lock:
            if after.seq > len(self._facts) or after != Cursor(seq=after.seq):
                raise CursorLost(
                    f"there is no fact of cursor {after.to_text()} in this store in memory; read from the beginning,"
                    " without a cursor"
                )
            found = self._facts[after.seq :]
        return iter(found)

    def state(self) -> object:
        return len(self._facts)
