"""Bringing the native streams of a run into its log, to the last byte, whatever restarts in between.

Spec 004, "Terminal drain and lifecycle". The source says whether the run goes on, and once it has
ended, how long both streams are for good. What it says is bound: from then on it must say exactly
that. When both streams have been read to those lengths and one read more gives nothing, it is asked
once more, and only then the drain is finished.
"""

from __future__ import annotations

import threading
from typing import Protocol

import attrs

from ..clock import Clock, SystemClock
from ..errors import SourceMismatch
from .state import PENDING_MOST_BYTES, LogState, Stream
from .writer import RunLogWriter

_PAUSE_S = (0.005, 0.05)
#: how many chunks are taken before the source is asked for its status again
_CHUNKS_A_STEP = 256
#: how long a source that has ended may give nothing although bytes are missing
PATIENCE_S = 10.0


@attrs.frozen(kw_only=True)
class SourceStatus:
    """What a source says of the run."""

    #: which run on which machine for which session this is; the same text from acceptance to the end
    identity: str
    #: the lengths of both streams, for good; None while the run goes on
    stdout_bytes: int | None = None
    stderr_bytes: int | None = None
    #: how the run ended, in the source's words; empty while it goes on
    outcome: str = ""

    @property
    def ended(self) -> bool:
        return self.stdout_bytes is not None and self.stderr_bytes is not None


class Source(Protocol):
    """Where a run's output comes from: the keeper's directory, or another machine."""

    def status(self) -> SourceStatus: ...

    def read(self, stream: Stream, offset: int, limit: int) -> bytes:
        """At most `limit` bytes at `offset`; none where there are none (yet). Never others than before."""
        ...


class Drain:
    """Guarantees: what is in the log are the source's bytes, each once, in order per stream; how they are
    cut into appends depends only on offsets and on what the source has, so that a restart goes on as if
    nothing had been. Nothing a source contradicts itself about is written.

    Assumptions: one drain per writer, used by one thread; the writer's run was accepted by `identity`.
    The place is the writer's committed state; the drain keeps none of its own.
    """

    def __init__(
        self,
        writer: RunLogWriter,
        source: Source,
        *,
        identity: str,
        clock: Clock | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Raises `SourceMismatch` where the log's run was accepted by another source, or by none."""
        if writer.state.source != identity:
            raise SourceMismatch(f"the run was accepted by {writer.state.source!r}, not by {identity!r}")
        self._writer = writer
        self._source = source
        self._identity = identity
        self._clock = clock or SystemClock()
        self._patience_s = patience_s
        #: the terminal status, from the first time the source gave it
        self._bound: SourceStatus | None = None
        self._last_progress_s = self._clock.monotonic()
        #: the terminal status, drained and confirmed
        self.finished: SourceStatus | None = None

    def run(self, stop: threading.Event | None = None) -> SourceStatus | None:
        """Drain until the run has ended and every byte is in the log; then its status. None when stopped.

        Raises `SourceMismatch`, and what the source and the writer raise. Can be called again.
        """
        stop = stop or threading.Event()
        pause, longest = _PAUSE_S
        while self.finished is None and not stop.is_set():
            if self.step():
                pause = _PAUSE_S[0]
            elif self.finished is None:
                self._clock.wait(stop, pause)
                pause = min(pause * 2, longest)
        return self.finished

    def step(self) -> bool:
        """Ask for the status and take the backlog that is there. Whether there was any."""
        if self.finished is not None:
            return False
        self._bind(self._source.status())
        chunks = 0
        while chunks < _CHUNKS_A_STEP and self._take_chunk():
            chunks += 1
        if chunks:
            self._writer.flush()
            self._last_progress_s = self._clock.monotonic()
        else:
            self._confirm()
        return chunks > 0

    def _bind(self, status: SourceStatus) -> None:
        if status.identity != self._identity:
            raise SourceMismatch(f"the source is {status.identity!r}, the run was accepted by {self._identity!r}")
        if self._bound is not None and status != self._bound:
            raise SourceMismatch(f"the source said {self._bound}, and now {status}")
        state = self._writer.state
        for stream in Stream:
            final, have = _final(status, stream), state.offset(stream)
            if final is not None and final < have:
                raise SourceMismatch(f"the source says {stream.value} ended with {final} bytes, the log has {have}")
        if (status.stdout_bytes is None) != (status.stderr_bytes is None):
            raise SourceMismatch("the source says of one stream only that it ended")
        if status.ended and self._bound is None:
            self._bound = status
            self._last_progress_s = self._clock.monotonic()

    def _take_chunk(self) -> bool:
        """One append from both streams: stderr at most half of it while stdout has more."""
        state = self._writer.state
        half = PENDING_MOST_BYTES // 2
        stderr = self._read(state, Stream.STDERR, 0, half)
        stdout = self._read(state, Stream.STDOUT, 0, PENDING_MOST_BYTES - len(stderr))
        if not stdout and len(stderr) == half:
            stderr += self._read(state, Stream.STDERR, half, PENDING_MOST_BYTES - half)
        if stdout or stderr:
            self._writer.append_native(stdout=stdout, stderr=stderr, more=True)
        return bool(stdout or stderr)

    def _read(self, state: LogState, stream: Stream, ahead: int, limit: int) -> bytes:
        offset = state.offset(stream) + ahead
        data = self._source.read(stream, offset, limit)
        if len(data) > limit:
            raise SourceMismatch(f"the source gave {len(data)} bytes of {stream.value}, asked for {limit}")
        final = _final(self._bound, stream)
        if final is not None and offset + len(data) > final:
            raise SourceMismatch(f"the source says {stream.value} ended with {final} bytes, but it has more")
        return data

    def _confirm(self) -> None:
        """Nothing more was there. Finished, if that is all and the source still says so."""
        if self._bound is None:
            return
        state = self._writer.state
        missing = {s: left for s in Stream if (left := (_final(self._bound, s) or 0) - state.offset(s))}
        if missing:
            if self._clock.monotonic() - self._last_progress_s >= self._patience_s:
                text = ", ".join(f"{left} bytes of {stream.value}" for stream, left in missing.items())
                raise SourceMismatch(f"the source has ended and does not give the last {text}")
            return
        self._bind(self._source.status())
        self.finished = self._bound


def _final(status: SourceStatus | None, stream: Stream) -> int | None:
    if status is None:
        return None
    return status.stdout_bytes if stream is Stream.STDOUT else status.stderr_bytes
