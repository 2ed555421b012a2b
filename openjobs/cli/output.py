"""Where words go: results to stdout, everything about them to stderr, JSON as one value or one line each.

Whether a stream is a terminal is asked per stream: `openjobs agent … > file` still spins on stderr.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .text import one_line, to_json, visible


class Unwritten(Exception):
    """Our stdout could not be written.

    A type of its own: an `OSError` from anywhere else (a socket, the store) is told as what it is. `done` says what
    was done all the same, where that would be known from stdout alone.
    """

    done = ""

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.done}" if self.done else super().__str__()


class ReaderGone(Unwritten):
    """Whoever read our stdout has closed it, which is nothing to complain about."""


class StdoutFailed(Unwritten):
    """It took no more: a full disk, a descriptor that is only for reading."""


@contextmanager
def telling(done: str, *, also_if_gone: bool = False) -> Iterator[None]:
    """What is written inside tells of what was `done`: where it cannot be written, stderr says so instead.

    A reader that goes away ends a command quietly, unless `also_if_gone`: of what goes on by itself nobody else knows.
    """
    try:
        yield
    except Unwritten as error:
        if also_if_gone or isinstance(error, StdoutFailed):
            error.done = done
        raise


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at this stream."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def is_live(stream: TextIO) -> bool:
    """Whether lines on this stream can be drawn over."""
    return is_terminal(stream) and os.environ.get("TERM", "dumb") != "dumb"


def line(text: str = "") -> None:
    """One line on stdout, flushed, since somebody may be waiting for it. `text` is visible already."""
    lines([text])


def lines(texts: list[str]) -> None:
    """Many lines at once: 10,000 flushes are 10,000 system calls."""
    with _writing():
        sys.stdout.write("".join(text + "\n" for text in texts))
        sys.stdout.flush()


def note(text: str) -> None:
    """About the result, not the result: one line on stderr."""
    write_to_stderr(text + "\n")


def write_to_stderr(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # nobody listens there; what matters went to stdout or into the exit code


def fresh_line() -> str:
    """What puts stderr's cursor on an empty line, whatever a spinner or the terminal's ^C left there."""
    if is_live(sys.stderr):
        return "\r\x1b[K"
    return "\n" if is_terminal(sys.stderr) else ""


def hint(text: str) -> None:
    """What one could do next; only a person is told, never a script: `id=$(openjobs …)` has stderr on a terminal."""
    if is_terminal(sys.stderr) and is_terminal(sys.stdout):
        note(text)


def result(text: str) -> None:
    """A job's text: as it is into a pipe or file, made visible on a terminal.

    It ends with a newline, its own or ours: a shell's `read` loses a last line without one.
    """
    if text and not text.endswith("\n"):
        text += "\n"
    with _writing():
        if is_terminal(sys.stdout):
            sys.stdout.write(visible(text))
            sys.stdout.flush()
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
            sys.stdout.buffer.flush()


def bytes_to_stdout(data: bytes) -> None:
    """A command's own bytes, as they are."""
    with _writing():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def bytes_to_stderr(data: bytes) -> None:
    try:
        sys.stderr.flush()
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()
    except (OSError, ValueError):
        pass  # nobody listens there


class Shown:
    """Output on its way to stdout, piece by piece: exact (`raw`), or made visible for a terminal.

    Characters and line ends that are split across pieces are put together; a byte that belongs to no character is
    shown as `\\xff`. `end` finishes an unfinished last line on a terminal.
    """

    def __init__(self, *, raw: bool) -> None:
        self._raw = raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""
        self._at_line_start = True

    def take(self, data: bytes) -> None:
        if self._raw:
            bytes_to_stdout(data)
        else:
            self._write(self._decoder.decode(data))

    def end(self) -> None:
        if self._raw:
            return
        self._write(self._decoder.decode(b"", final=True), last=True)
        if not self._at_line_start:
            self._put("\n")

    def _write(self, text: str, *, last: bool = False) -> None:
        text = self._held + text
        # Half of a line end of other systems, perhaps.
        self._held = "\r" if text.endswith("\r") and not last else ""
        self._put(visible(text[: len(text) - len(self._held)]))

    def _put(self, text: str) -> None:
        if text:
            with _writing():
                sys.stdout.write(text)
                sys.stdout.flush()
            self._at_line_start = text.endswith("\n")


def json_value(value: Any) -> None:
    """The one value of a `--json` command, indented for a person."""
    line(to_json(value, indent=2 if is_terminal(sys.stdout) else None))


def json_line(value: Any) -> None:
    """One value of a stream."""
    line(to_json(value))


def show_warnings() -> None:
    """What the library logs as a warning or worse is one visible line on stderr.

    Without this Python prints it raw, with tracebacks, and a job's text may be in it. OPENJOBS_DEBUG=1 adds the
    traceback.
    """
    import logging

    debug = os.environ.get("OPENJOBS_DEBUG") == "1"

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(f"openjobs: {record.levelname.lower()}: {one_line(record.getMessage())}")
            if debug and record.exc_info:
                note(visible(logging.Formatter().formatException(record.exc_info)))

    logger = logging.getLogger("openjobs")
    if logger.handlers:
        return
    logger.addHandler(Lines(logging.WARNING))
    if not debug:
        logger.propagate = False


def abandon_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush has nobody to complain about."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone("nobody reads standard output") from None
    except OSError as error:
        raise StdoutFailed(f"standard output could not be written: {error.strerror or error}") from None
