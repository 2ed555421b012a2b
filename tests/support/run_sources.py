"""A source that plays a remote host, and the small things every run log test needs."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from openjobs.runlog import SourceStatus, Stream

IDENTITY = "runner-1/keeper-7/session-a"


class RemoteHost:
    """Plays a machine that runs one command. Tests set what it says and has, and see what it was asked."""

    def __init__(self, stdout: bytes = b"", stderr: bytes = b"", *, ended: bool = True) -> None:
        self.identity = IDENTITY
        self.streams = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        #: the lengths it claims at the end; None: the true ones
        self.claims: tuple[int, int] | None = None
        self.ended = ended
        self.outcome = "completed"
        #: called at each question for the status, with how many there were before
        self.on_status: Callable[[int], None] = lambda number: None
        self.asked = 0
        self.reads: list[tuple[Stream, int, int]] = []

    def status(self) -> SourceStatus:
        self.on_status(self.asked)
        self.asked += 1
        if not self.ended:
            return SourceStatus(identity=self.identity)
        out, err = self.claims or (len(self.streams[Stream.STDOUT]), len(self.streams[Stream.STDERR]))
        return SourceStatus(identity=self.identity, stdout_bytes=out, stderr_bytes=err, outcome=self.outcome)

    def read(self, stream: Stream, offset: int, limit: int) -> bytes:
        self.reads.append((stream, offset, limit))
        return self.streams[stream][offset : offset + limit]


def new_run(root: Path, name: str = "run") -> Path:
    path = root / name
    path.mkdir(mode=0o700)
    return path


def pattern(length: int, seed: int = 0) -> bytes:
    """`length` bytes of which every part differs from every other: a doubled or lost byte shows."""
    parts, have, number = [], 0, seed * 10**9
    while have < length:
        part = b"%d " % number
        parts.append(part)
        have += len(part)
        number += 1
    return b"".join(parts)[:length]


def state_record(text: bytes, version: bytes = b"1") -> bytes:
    """The header of a run log's state around any JSON, with the right length and checksum."""
    length = b"%d" % len(text)
    crc = zlib.crc32(text, zlib.crc32(version + b" " + length))
    return b"openjobs-runlog %b %b %08x\n%b" % (version, length, crc, text)
