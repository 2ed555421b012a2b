"""Reading what a command wrote, while it runs and for as long as the run's directory is kept.

A read costs memory and time in proportion to `limit`, not to the log: native files are read at the offset, and
the place in the mixed order is found by halving (order.py). Reading never creates or repairs anything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from ..errors import Damaged, InvalidInput
from . import layout
from .order import STREAMS, Order
from .rundir import ExitRecord, is_lost, keeper_lives, may_have_started, open_regular, read_exit

#: most that one read gives
MAX_LIMIT = 16 * 2**20


@attrs.frozen(kw_only=True, slots=True)
class Output:
    """A piece of a command's output."""

    data: bytes
    #: where the next piece begins
    next_offset: int
    #: whether there is and will be nothing after this piece
    eof: bool
    #: how much is kept by now
    total_bytes: int
    #: whether the command wrote more than was kept
    truncated: bool


def read_output(run_dir: Path, stream: str = "mixed", offset: int = 0, limit: int = 65536) -> Output:
    """At most `limit` bytes of "stdout", "stderr" or "mixed" from byte `offset` on.

    What has no known order, because the keeper was killed between two writes, comes at the end of "mixed", stdout
    first. Raises `InvalidInput` for arguments that make no sense and `Damaged` for files that no keeper wrote.
    """
    if stream not in (*STREAMS, "mixed"):
        raise InvalidInput(f"there is no stream {stream!r}: stdout, stderr or mixed")
    if offset < 0 or limit < 0:
        raise InvalidInput("offset and limit are 0 or more")
    with Streams(run_dir) as streams:
        total = streams.total(stream)
        data = b"".join(piece for _, piece in streams.read(stream, offset, min(limit, MAX_LIMIT)))
        return Output(
            data=data,
            next_offset=offset + len(data),
            eof=streams.final and offset + len(data) >= total,
            total_bytes=total,
            truncated=streams.record is not None and streams.record.truncated,
        )


class Streams:
    """The files of a run, open for reading; `final` and all lengths are as of its making. Raises `Damaged`.

    An exit record that cannot be read hides no output: what is there is shown, as without one.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        # The order matters: a keeper that is dead, or has recorded the end, writes no more.
        lives = keeper_lives(run_dir) and not is_lost(run_dir)
        self.record: ExitRecord | None = None
        with contextlib.suppress(Damaged):
            self.record = read_exit(run_dir)
        #: whether all that there will be is there
        self.final = self.record is not None or (not lives and may_have_started(run_dir))
        self._fds = [-1, -1, -1]
        try:
            for index, name in enumerate((layout.STDOUT, layout.STDERR, layout.ORDER)):
                self._fds[index] = open_regular(run_dir / name)
        except BaseException:
            self.close()
            raise
        if self.record is not None:
            self._ends = [self.record.stdout_bytes, self.record.stderr_bytes]
        else:
            self._ends = [os.fstat(fd).st_size if fd >= 0 else 0 for fd in self._fds[:2]]

    def total(self, stream: str) -> int:
        if stream != "mixed":
            return self._ends[STREAMS.index(stream)]
        if self.final or self._fds[2] < 0:
            return sum(self._ends)
        with self._damage_named():
            return Order(self._fds[2]).total()

    def read(self, stream: str, offset: int, limit: int) -> Iterator[tuple[str, bytes]]:
        """(stream, bytes) in order, at most `limit` bytes together."""
        places = self._places(stream, offset)
        while limit > 0:
            with self._damage_named():
                place = next(places, None)
            if place is None:
                return
            index, start, length = place[0], place[1], min(place[2], limit)
            data = os.pread(self._fds[index], length, start) if self._fds[index] >= 0 else b""
            if data:
                yield STREAMS[index], data
            if len(data) < length:
                return
            limit -= len(data)

    @contextlib.contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            path = str(self._run_dir / layout.ORDER)
            raise Damaged(f"{path}: {error}", path=path) from None

    def _places(self, stream: str, offset: int) -> Iterator[tuple[int, int, int]]:
        if stream != "mixed":
            index = STREAMS.index(stream)
            if offset < self._ends[index]:
                yield index, offset, self._ends[index] - offset
            return
        covered = [0, 0]
        at = offset
        if self._fds[2] >= 0:
            order = Order(self._fds[2])
            if self.final and any(said > there for said, there in zip(order.ends(), self._ends, strict=True)):
                raise ValueError("it says that more was written than there is")  # else the rest would be left out
            for index, start, length in order.chunks(offset):
                yield index, start, length
                at += length
            covered = list(order.ends())
        if self.final:
            for index in (0, 1):
                length = self._ends[index] - covered[index]
                base = sum(covered) + (self._ends[0] - covered[0] if index else 0)
                skip = max(0, at - base)
                if length > skip:
                    yield index, covered[index] + skip, length - skip
                    at += length - skip

    def close(self) -> None:
        fds, self._fds = self._fds, [-1, -1, -1]
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
