"""What moves on a terminal: a spinner on stderr, a table that is drawn over. Rich is imported here only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from . import table
from .output import is_live

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
PLAIN_FRAMES = "|/-\\"
FRAMES_PER_S = 8


def frame(stream: TextIO) -> str:
    """The spinner's picture of this moment."""
    frames = FRAMES if (stream.encoding or "").lower().replace("-", "") == "utf8" else PLAIN_FRAMES
    return frames[int(time.monotonic() * FRAMES_PER_S) % len(frames)]


def console_for(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, no_color=not table.coloured(), highlight=False, markup=False, emoji=False)


def as_text(pieces: Sequence[table.Piece]) -> Text:
    """The same line for rich. `Text` takes no markup, so brackets in a job's text stay brackets."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis", end="")
    for piece, style in pieces:
        text.append(piece, style)
    return text


class _Lines:
    """Rich asks for the lines anew at every frame, with the width the terminal has then."""

    def __init__(self, draw: Callable[[int, int], list[list[table.Piece]]]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = self._draw(options.max_width, options.size.height)
        for number, pieces in enumerate(lines):
            if number:
                yield Segment.line()
            yield as_text(pieces)


@contextmanager
def drawing(
    draw: Callable[[int, int], list[list[table.Piece]]], stream: TextIO | None = None, *, transient: bool = False
) -> Iterator[None]:
    """Keep `draw(width, height)` on the terminal while the block runs; nothing where lines cannot be drawn over.

    `draw` is called on rich's own thread, eight times a second: it must be quick and not raise.
    """
    stream = stream or sys.stdout
    if not is_live(stream):
        yield
        return
    from rich.live import Live

    live = Live(
        _Lines(draw),
        console=console_for(stream),
        refresh_per_second=FRAMES_PER_S,
        transient=transient,
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="crop",
    )
    live.start()
    try:
        yield
    finally:
        try:
            live.stop()
        except OSError:
            pass  # the terminal is gone; what the block raised (its signal) matters more


@contextmanager
def nothing() -> Iterator[None]:
    """In the place of a drawing where none is wanted."""
    yield


@contextmanager
def spinner(words: str | Callable[[], str]) -> Iterator[None]:
    """A spinner with the words (as they are at that moment) behind it on stderr while the block runs."""

    def draw(width: int, height: int) -> list[list[table.Piece]]:
        room = max(10, width - 3)
        said = words if isinstance(words, str) else words()
        return [[(frame(sys.stderr) + " ", "cyan"), (table.fitted(said, room).rstrip(), "")]]

    with drawing(draw, sys.stderr, transient=True):
        yield
