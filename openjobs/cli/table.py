"""Tables of jobs: tab-separated and whole in a pipe, aligned and cut to the width on a terminal.

The plain form and the aligned form come from one list of columns. Rich lays a table out by measuring
every cell several times, 10 s for 10,000 rows, so only its cell widths are used here; `live` draws
the same pieces.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

import attrs

from ..clock import to_text
from ..ids import SHORT
from ..jobs import Job, JobStatus
from .text import age, duration, one_line

#: a piece of a line: visible text and its style (a key of `STYLES`, or "")
Piece = tuple[str, str]

STYLES = {"green": "32", "red": "31", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}
STATUS_STYLE = {
    "pending": "dim",
    "queued": "dim",
    "running": "cyan",
    "cancelling": "yellow",
    "completed": "green",
    "errored": "red",
    "cancelled": "yellow",
}
#: below so many columns of the terminal times and session make room for the subject
NARROW = 60
#: from here on there is room for the agent, too
WIDE = 100


@attrs.frozen
class Column:
    heading: str
    #: the cell on a terminal
    cell: Callable[[Job, datetime], Piece]
    #: at most so many terminal cells; None takes what is left
    limit: int | None = None
    right: bool = False


def plain(jobs: Iterable[Job]) -> list[str]:
    """One line a job: id, status, created, seconds it took or has taken, agent, session, subject."""
    return [
        "\t".join(
            (
                one_line(job.job_id),
                status_word(job),
                to_text(job.created_at),
                f"{took:.3f}" if (took := seconds_taken(job, None)) is not None else "-",
                one_line(job.agent_id),
                one_line(job.parent_session_id),
                one_line(job.subject),
            )
        )
        for job in jobs
    ]


def status_word(job: Job) -> str:
    """The status as people read it: a running job that was asked to stop is `cancelling`."""
    if job.status is JobStatus.RUNNING and job.cancel_requested_at is not None:
        return "cancelling"
    return job.status.value


def seconds_taken(job: Job, now: datetime | None) -> float | None:
    """From start to end; of a running job to `now`; None where it never started."""
    end = job.completed_at or now
    return (end - job.started_at).total_seconds() if job.started_at and end else None


def short_ids(ids: Iterable[str]) -> Callable[[str], str]:
    """Cuts ids to eight characters, or to as many as keep these ids apart."""
    known = list(ids)
    length = SHORT
    while length < 36 and len({one[:length] for one in known}) < len(set(known)):
        length += 4
    return lambda one: one_line(one[:length])


def aligned(jobs: Sequence[Job], now: datetime, width: int, spinner: str = "") -> list[list[Piece]]:
    """The heading and one line a job, as pieces, none wider than `width` cells."""
    columns = _columns(jobs, width, spinner)
    cells = [[column.cell(job, now) for column in columns] for job in jobs]
    widths = _widths(columns, cells, width)
    heading = [(column.heading, "dim") for column in columns]
    return [clipped(_laid_out(row, columns, widths), width) for row in [heading, *cells]]


def clipped(pieces: Sequence[Piece], width: int) -> list[Piece]:
    """The pieces, the last of them cut, in at most `width` cells: a line that wraps breaks the table."""
    left = width
    shown: list[Piece] = []
    for text, style in pieces:
        if (taken := cells(text)) > left:
            return [*shown, (fitted(text, left), style)]
        shown.append((text, style))
        left -= taken
    return shown


def to_ansi(pieces: Sequence[Piece], colour: bool) -> str:
    text = "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if colour and style else text for text, style in pieces)
    return text.rstrip()


def coloured() -> bool:
    """https://no-color.org: a non-empty NO_COLOR means none."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def terminal_width() -> int:
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def cells(text: str) -> int:
    """How many columns of the terminal `text` takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fitted(text: str, width: int, right: bool = False) -> str:
    """`text` in exactly `width` cells, cut with an ellipsis."""
    if cells(text) > width:
        text = _cropped(text, width - 1) + "…" if width > 1 else text[:width]
    space = " " * (width - cells(text))
    return space + text if right else text + space


def _cropped(text: str, width: int) -> str:
    if text.isascii():
        return text[:width]
    from rich.cells import set_cell_size

    return set_cell_size(text, width).rstrip(" ")  # half of a wide character became a space


def _columns(jobs: Sequence[Job], width: int, spinner: str) -> list[Column]:
    shorten = short_ids(job.job_id for job in jobs)

    def status(job: Job, now: datetime) -> Piece:
        word = status_word(job)
        if spinner and job.status is JobStatus.RUNNING:
            return f"{word} {spinner}", STATUS_STYLE[word]
        return word, STATUS_STYLE[word]

    def took(job: Job, now: datetime) -> Piece:
        seconds = seconds_taken(job, now)
        return ("-" if seconds is None else duration(seconds)), ""

    columns = [Column("ID", lambda job, now: (shorten(job.job_id), "bold")), Column("STATUS", status)]
    if width >= NARROW:
        columns += [
            Column("AGE", lambda job, now: (age(job.created_at, now), ""), right=True),
            Column("TOOK", took, right=True),
        ]
    if width >= WIDE:
        columns.append(Column("AGENT", lambda job, now: (one_line(job.agent_id), ""), limit=14))
    if width >= NARROW and len({job.parent_session_id for job in jobs}) > 1:
        columns.append(Column("SESSION", lambda job, now: (one_line(job.parent_session_id), ""), limit=20))
    columns.append(Column("SUBJECT", lambda job, now: (one_line(job.subject), "")))
    return columns


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Piece]], width: int) -> list[int]:
    widths: list[int] = []
    for index, column in enumerate(columns[:-1]):
        widest = max([cells(column.heading), *(cells(row[index][0]) for row in rows)])
        widths.append(min(widest, column.limit or widest))
    left = width - sum(widths) - 2 * len(widths)
    return [*widths, max(left, 8)]


def _laid_out(row: Sequence[Piece], columns: Sequence[Column], widths: Sequence[int]) -> list[Piece]:
    pieces: list[Piece] = []
    for (text, style), column, width in zip(row, columns, widths, strict=True):
        if pieces:
            pieces.append(("  ", ""))
        pieces.append((fitted(text, width, column.right), style))
    return pieces
