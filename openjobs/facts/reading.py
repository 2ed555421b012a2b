"""Readers of facts: a window of time, or everything from a cursor on, as it comes."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..clock import to_epoch_ms
from ..errors import InvalidInput, UnknownSession
from ..ledger import START, Cursor
from .fact import Fact
from .log import NAME, FactLog, FileFactLog


@runtime_checkable
class HasFacts(Protocol):
    """A session of a store."""

    @property
    def facts(self) -> FactLog: ...


#: a session of a store, or a session's directory (`<home>/sessions/<session id>`)
Source = HasFacts | str | os.PathLike[str]
#: a time with a zone, or milliseconds since 1970
When = datetime | int

#: facts that are read at a time
_PIECE = 256
#: how often is looked for more: while something happens, and at rest
_PAUSE_S = (0.005, 0.05)


def log_of(source: Source) -> FactLog:
    """Raises `UnknownSession` for a directory that is not there."""
    if isinstance(source, HasFacts):
        return source.facts
    directory = Path(source)
    if not directory.is_dir():
        raise UnknownSession(f"{directory} is not there: give a session, or the directory of one")
    return FileFactLog(directory / NAME)


def read(
    session: Source, since: When | None = None, until: When | None = None, *, after: Cursor | str = START
) -> Iterator[Fact]:
    """The facts of a session in the order in which they were recorded, as far as there are any now.

    `since` and `until` choose by the time of what a fact says, `since` included and `until` not; so a window can
    hold a settlement whose registration is earlier. `after` is the cursor of the last fact that is known already.
    Never writes and never waits; needs no git. An incomplete fact at the end is not there yet.

    Raises `UnknownSession`, `InvalidInput`, `CursorLost` (the fact of `after` is not there: read from the
    beginning), and while it reads `Damaged` and `FileRefused`, after the facts before the damage.
    """
    first, last = in_ms(since), in_ms(until)
    found = log_of(session).read(_cursor(after))
    return (fact for fact in found if (first is None or fact.at_ms >= first) and (last is None or fact.at_ms < last))


def follow(session: Source, after: Cursor | str = START) -> Follow:
    """The facts behind `after`, and then those that are recorded from now on, by any process. See `Follow`."""
    return Follow(log_of(session), _cursor(after))


class Follow:
    """Facts as they come, with `for` or with `async for`, until `close`.

    Each fact once and in order; `cursor` stands behind the last one that was given out, and a later `follow`
    (in another process, too) goes on there. No file stays open and no thread is held between two facts. A look for
    news costs one stat: after 5 ms where something happens, after 50 ms where nothing does.

    The iteration raises what `read` raises; `CursorLost` also where the ledger is replaced, becomes shorter or is
    taken away while it is followed.

    One at a time iterates; `close` may be called from any thread, and ends the iteration.
    """

    def __init__(self, log: FactLog, after: Cursor) -> None:
        self.cursor = after
        self._log = log
        self._read_to = after
        self._ready: deque[Fact] = deque()
        #: raised once what was read before it is given out
        self._error: Exception | None = None
        #: the log as it was before it was last read to its end
        self._known: object = _NEVER
        self._pause_s = _PAUSE_S[0]
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def __enter__(self) -> Follow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Follow:
        return self

    def __next__(self) -> Fact:
        while not self._closed.is_set():
            if (fact := self._next_ready()) is not None:
                return fact
            state = self._log.state()
            if state != self._known:
                self._take(state, self._piece())
            else:
                self._closed.wait(self._longer_pause())
        raise StopIteration

    def __aiter__(self) -> Follow:
        return self

    async def __anext__(self) -> Fact:
        import asyncio  # late: stores import this room, and most have no loop

        while not self._closed.is_set():
            if (fact := self._next_ready()) is not None:
                return fact
            state = self._log.state()
            if state != self._known:
                self._take(state, await asyncio.to_thread(self._piece))
            else:
                await asyncio.sleep(self._longer_pause())
        raise StopAsyncIteration

    def _next_ready(self) -> Fact | None:
        if self._ready:
            fact = self._ready.popleft()
            self.cursor = fact.cursor
            return fact
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    def _piece(self) -> tuple[list[Fact], Exception | None]:
        """Changes nothing here: whoever waited for it may have been cancelled meanwhile."""
        facts: list[Fact] = []
        try:
            # An iterable that raises leaves what came before in the list: facts before damage are given out, too.
            facts += islice(self._log.read(self._read_to), _PIECE)
        except Exception as error:
            return facts, error
        return facts, None

    def _take(self, state: object, piece: tuple[list[Fact], Exception | None]) -> None:
        """`state` was looked at before the piece was read, so that nothing falls between."""
        facts, self._error = piece
        if facts:
            self._ready.extend(facts)
            self._read_to = facts[-1].cursor
            self._pause_s = _PAUSE_S[0]
        if len(facts) < _PIECE and self._error is None:
            self._known = state

    def _longer_pause(self) -> float:
        pause = self._pause_s
        self._pause_s = min(pause * 2, _PAUSE_S[1])
        return pause


_NEVER = object()


def _cursor(after: Cursor | str) -> Cursor:
    return Cursor.from_text(after) if isinstance(after, str) else after


def in_ms(when: When | None) -> int | None:
    if when is None or (isinstance(when, int) and not isinstance(when, bool)):
        return when
    if not isinstance(when, datetime) or when.tzinfo is None:
        raise InvalidInput(f"a time is a datetime with a zone, or milliseconds since 1970, not {when!r}")
    return to_epoch_ms(when)
