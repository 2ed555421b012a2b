"""Reading `log.state`: whole for a writer, headers only for a reader. Nothing here writes."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from .binding import RunDirectory
from .state import (
    HEADER_BYTES,
    PENDING_MOST_BYTES,
    SLOT_BYTES,
    STATE_MOST_BYTES,
    Checkpoint,
    Header,
    LogState,
    decode_header,
    invalid,
)

#: how often a reader looks again when a writer has changed both slots while it looked
_LOOKS = 100


def load(directory: RunDirectory, task_id: str, run_id: str) -> Checkpoint | None:
    """The newest whole record; None where there is no sidecar. Only for who has the log's lock.

    Raises `LogStateInvalid`, `NewerFormat` and `FileRefused`.
    """
    path = directory.sidecar
    if directory.look(path) is None:
        return None
    fd = directory.open(path)
    try:
        if directory.verify(path, fd).st_size > STATE_MOST_BYTES:
            raise invalid(path, "it is too long")
        slots = [os.pread(fd, SLOT_BYTES, slot * SLOT_BYTES) for slot in (0, 1)]
    finally:
        os.close(fd)
    found = [_record(raw, slot, path) for slot, raw in enumerate(slots)]
    whole = sorted((record for record in found if record), key=lambda record: record.generation)
    if not whole:
        raise invalid(path, "it holds no whole record")
    if len(whole) == 2 and whole[0].generation + 1 != whole[1].generation:
        raise invalid(path, "its two records do not follow each other")
    _check_ids(whole[-1], path, task_id, run_id)
    return whole[-1]


def _record(raw: bytes, slot: int, path: Path) -> Checkpoint | None:
    header = decode_header(raw[:HEADER_BYTES], path)
    if header is None:
        return None
    if header.generation % 2 != slot:
        raise invalid(path, "a record stands in the wrong place")
    return header.with_data(raw[HEADER_BYTES : HEADER_BYTES + min(header.pending_bytes, PENDING_MOST_BYTES)])


def load_locked_out(directory: RunDirectory, task_id: str, run_id: str) -> None:
    """Raises `LogStateInvalid` unless a missing log is one that was never written to."""
    found = load(directory, task_id, run_id)
    if found is not None and (found.committed.log_bytes or found.pending is not None):
        raise invalid(directory.log, f"it is gone, its state says {found.committed.log_bytes} bytes", 0)


def _check_ids(record: Checkpoint | Header, path: Path, task_id: str | None, run_id: str | None) -> None:
    if task_id not in (None, record.task_id) or run_id not in (None, record.run_id):
        raise invalid(path, f"it belongs to run {record.run_id!r} of {record.task_id!r}")


@attrs.frozen
class Seen:
    """What a reader saw, and by what it knows that nothing changed since."""

    raw: tuple[bytes, bytes]
    header: Header

    @property
    def committed(self) -> LogState:
        return self.header.committed


def look(fd: int, path: Path, last: Seen | None = None, *, task_id: str | None, run_id: str | None) -> Seen:
    """What is committed now, from an open sidecar, while a writer may be writing to it.

    One slot may be half written, then the other one holds. Both can only be where the writer changed
    both between our two looks: then again.
    """
    for _ in range(_LOOKS):
        raw = os.pread(fd, HEADER_BYTES, 0), os.pread(fd, HEADER_BYTES, SLOT_BYTES)
        if last is not None and raw == last.raw:
            return last
        headers = [header for header in (decode_header(part, path) for part in raw) if header]
        if headers:
            newest = max(headers, key=lambda header: header.generation)
            _check_ids(newest, path, task_id, run_id)
            return Seen(raw, newest)
    raise invalid(path, "it holds no whole record")
