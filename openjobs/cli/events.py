"""`openjobs events`: when jobs and background commands were registered, and when and how they settled.

Reads the ledgers of facts alone: no git, no index. Reading creates and repairs nothing.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import attrs
import click

from .. import facts
from ..clock import from_text, to_epoch_ms, to_text
from ..errors import CursorLost, Damaged, FileRefused, InvalidInput
from ..facts import Cursor, Fact, FileFactLog, Settled
from ..ids import check_session_id, is_session_id
from . import exits, output, table
from .options import SECONDS, SESSION_ID, Count, Text, command
from .state import State
from .text import duration, one_line, short_id

#: so many of the newest where nothing else says which
LIMIT = 50
_LEDGER = "events.jsonl"
#: how often is looked for more; of many sessions the looks may take a fifth of one processor
_PAUSE_S = (0.01, 0.1)
_IDLE_SHARE = 4
#: the words of a background command's end; those of a job are in `table`
_STYLE = {**table.STATUS_STYLE, "registered": "dim", "failed": "red", "timed_out": "red", "lost": "red"}


class Moment(Text):
    """A time as milliseconds since 1970: `2026-01-31T12:00` (local where no zone is said), a time ago (`90`, `10m`,
    `2h`), or such milliseconds themselves, as the facts have them."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if re.fullmatch(r"[0-9]{12,15}", text):
            return int(text)
        if re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
            try:
                return to_epoch_ms(from_text(_with_zone(text)))
            except (ValueError, OverflowError):
                self._refuse(value, param, ctx)
        try:
            ago = SECONDS.convert(text, param, ctx)
        except click.BadParameter:
            self._refuse(value, param, ctx)
        return to_epoch_ms(datetime.now(UTC) - timedelta(seconds=ago))

    def _refuse(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> NoReturn:
        self.fail(
            f"{value!r} is not a time: a date (2026-01-31), with a time of day (2026-01-31T12:00, 2026-01-31T12:00Z),"
            " how long ago (90, 10m, 2h, 7d), or milliseconds since 1970",
            param,
            ctx,
        )


def _with_zone(text: str) -> str:
    when = datetime.fromisoformat(text)
    return when.isoformat() if when.tzinfo is not None else when.astimezone().isoformat()


WHEN = Moment()


@attrs.frozen(kw_only=True)
class _Wanted:
    session: str | None
    since: int | None
    until: int | None
    after: Cursor

    def holds(self, fact: Fact) -> bool:
        return (self.since is None or fact.at_ms >= self.since) and (self.until is None or fact.at_ms < self.until)


@command("events")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is recorded from now on, until Ctrl-C.")
@click.option("--session", type=SESSION_ID, help="Only facts of this session.")
@click.option("--since", type=WHEN, help="Only what happened at this time or later; or so long ago: 10m.")
@click.option("--until", type=WHEN, help="Only what happened before this time.")
@click.option("--after", metavar="CURSOR", help="Only what was recorded behind this fact of the --session.")
@click.option("--limit", "-n", metavar="N", type=Count(), help="At most so many of the newest; 0 means all.")
def events_command(
    state: State,
    follow: bool,
    session: str | None,
    since: int | None,
    until: int | None,
    after: str | None,
    limit: int | None,
) -> int:
    """Show when jobs and background commands were registered and settled, oldest first.

    The newest 50 unless --since, --until, --after or --limit say which. In a pipe one line a fact,
    separated by tabs: time (UTC), type, id, kind, status, seconds from registration to settlement,
    whether the work itself reported its end, session, label.
    """
    if after is not None and session is None:
        raise click.UsageError("--after needs --session: a cursor is a place in one session")
    if follow and until is not None:
        raise click.UsageError("give either --follow or --until")
    wanted = _Wanted(session=session, since=since, until=until, after=_cursor(after))
    if limit is None:
        limit = LIMIT if since is None and until is None and after is None else 0
    log = _Logs(state, wanted)
    found = log.newest(limit)
    more, found = bool(limit) and len(found) > limit, found[-limit:] if limit else found
    show = _Shown(state, several=session is None)
    try:
        if state.json and not follow:
            output.json_value({"facts": [_json(fact) for fact in found], "more": more})
        else:
            show.all(found)
            if more:
                output.hint(f"the newest {len(found):,}; `--limit 0` shows all")
            elif not found and not follow:
                output.hint("no such facts")
        while follow:
            log.tell_damage()
            show.all(log.next())
    except KeyboardInterrupt:  # the way to end it, nothing to complain about
        return exits.INTERRUPTED
    log.tell_damage()
    return exits.REFUSED if log.damaged else exits.COMPLETED


def _cursor(text: str | None) -> Cursor:
    if text is None:
        return facts.START
    try:
        return Cursor.from_text(text)
    except InvalidInput as error:
        raise click.UsageError(str(error)) from None


class _Logs:
    """The ledgers of one session or of all, those of sessions that come later included."""

    def __init__(self, state: State, wanted: _Wanted) -> None:
        self._state = state
        self._wanted = wanted
        #: where in each ledger we are, and how it was when we looked
        self._places: dict[str, Cursor] = {}
        self._states: dict[str, object] = {}
        #: sessions that cannot be read any further
        self.damaged: dict[str, Exception] = {}
        self._told: set[str] = set()
        self._pause_s = _PAUSE_S[0]

    def newest(self, limit: int) -> list[Fact]:
        """What there is, of each session at most the newest `limit` and one more."""
        found: list[Fact] = []
        for session_id in self._sessions():
            found += deque(self._read(session_id), maxlen=limit + 1 if limit else None)
        return self._in_order(found)[-limit - 1 :] if limit else self._in_order(found)

    def next(self) -> list[Fact]:
        """What has come since; waits for it."""
        while True:
            began = time.monotonic()
            found = [fact for session_id in self._sessions() for fact in self._read(session_id)]
            if found:
                self._pause_s = _PAUSE_S[0]
                return self._in_order(found)
            if self._wanted.session is not None and self._wanted.session in self.damaged:
                raise self.damaged[self._wanted.session]
            self.tell_damage()
            time.sleep(max(self._pause_s, (time.monotonic() - began) * _IDLE_SHARE))
            self._pause_s = min(self._pause_s * 2, _PAUSE_S[1])
            self._state.look_again()

    def tell_damage(self) -> None:
        """Each session that cannot be read any further, once."""
        for session_id, error in sorted(self.damaged.items()):
            if session_id not in self._told:
                self._told.add(session_id)
                place = "here" if isinstance(error, CursorLost) else "its damage"
                output.note(f"session {session_id} is not shown from {place} on: {error}")

    def _sessions(self) -> list[str]:
        """Those with facts. Raises `UnknownSession` for one that was asked for and is not there."""
        if self._state.missing:
            if self._wanted.session is not None:
                self._state.store.session(self._wanted.session)  # says that there is none
            return []
        directory = self._state.home / "sessions"
        if self._wanted.session is not None:
            if not (directory / check_session_id(self._wanted.session)).is_dir():
                self._state.store.session(self._wanted.session)  # says which there are
            return [self._wanted.session]
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            names = []
        # One that was taken away while it was followed is looked at, too, and says so.
        return sorted({*self._places, *(name for name in names if is_session_id(name))})

    def _read(self, session_id: str) -> Iterator[Fact]:
        if session_id in self.damaged:
            return
        log = FileFactLog(self._path(session_id))
        state: object = None
        try:
            state = log.state()
            if state == self._states.get(session_id, _NEVER):
                return
            for fact in log.read(self._places.get(session_id, self._wanted.after)):
                self._places[session_id] = fact.cursor
                if self._wanted.holds(fact):
                    yield fact
        except (CursorLost, Damaged, FileRefused, OSError) as error:
            if isinstance(error, CursorLost) and self._wanted.session is not None:
                raise
            self.damaged[session_id] = error
        self._states[session_id] = state

    def _path(self, session_id: str) -> Path:
        return self._state.home / "sessions" / session_id / _LEDGER

    def _in_order(self, found: list[Fact]) -> list[Fact]:
        """Of one session as it was recorded; of several by time."""
        return found if self._wanted.session is not None else sorted(found, key=lambda fact: fact.at_ms)


_NEVER = object()


class _Shown:
    def __init__(self, state: State, *, several: bool) -> None:
        self._json = state.json
        self._terminal = output.is_terminal(sys.stdout)
        self._several = several

    def all(self, found: Sequence[Fact]) -> None:
        if self._json:
            for fact in found:
                output.json_line(_json(fact))
        elif self._terminal:
            colour, width = table.coloured(), table.terminal_width()
            today = datetime.now().astimezone().date()
            dated = any(_when(fact.at_ms).astimezone().date() != today for fact in found)
            output.lines([table.to_ansi(table.clipped(self._row(fact, dated), width), colour) for fact in found])
        else:
            output.lines([_plain(fact) for fact in found])

    def _row(self, fact: Fact, dated: bool) -> list[table.Piece]:
        when = _when(fact.at_ms).astimezone()
        word = _word(fact)
        took = _seconds(fact)
        stamp = when.strftime("%Y-%m-%d %H:%M:%S" if dated else "%H:%M:%S")
        row = [
            (f"{stamp}.{when.microsecond // 1000:03d}", "dim"),
            (short_id(fact.job_id), "bold"),
            (table.fitted(word, 10), _STYLE.get(word, "")),
            (table.fitted("" if took is None else duration(took), 7, right=True), ""),
        ]
        if self._several:
            row.append((table.fitted(one_line(fact.session_id), 12), ""))
        if isinstance(fact, Settled) and not fact.producer_reported:
            row.append(("no report", "dim"))  # raised, given up, killed or never started
        row.append((one_line(fact.label), ""))
        return [piece for each in row for piece in (each, ("  ", ""))][:-1]


def _word(fact: Fact) -> str:
    return one_line(fact.status) if isinstance(fact, Settled) else "registered"


def _seconds(fact: Fact) -> float | None:
    if not isinstance(fact, Settled):
        return None
    return max(0, fact.settled_at_ms - fact.registered_at_ms) / 1000


def _when(at_ms: int) -> datetime:
    """A time that no calendar has (in a ledger anything can stand) is shown as the nearest that it has."""
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
    except OverflowError:
        return datetime(9999, 12, 30, tzinfo=UTC) if at_ms > 0 else datetime(1, 1, 2, tzinfo=UTC)


def _plain(fact: Fact) -> str:
    seconds = _seconds(fact)
    end = fact if isinstance(fact, Settled) else None
    return "\t".join(
        one_line(each)
        for each in (
            to_text(_when(fact.at_ms)),
            fact.type.value,
            fact.job_id,
            fact.kind,
            "-" if end is None else end.status,
            "-" if seconds is None else f"{seconds:.3f}",
            "-" if end is None else "yes" if end.producer_reported else "no",
            fact.session_id,
            fact.label,
        )
    )


def _json(fact: Fact) -> dict[str, Any]:
    """As it stands in the ledger, and where to go on behind it."""
    return {**facts.to_json(fact), "cursor": fact.cursor.to_text()}
