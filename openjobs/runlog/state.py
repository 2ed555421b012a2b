"""What the sidecar of a run's log says, and the bytes it is said in.

The file `log.state` has two slots of 60 KiB. A slot is a header in its first 4 KiB

    openjobs-runlog 1 <length of the JSON> <crc32 of version, length and JSON>\\n<JSON>

and behind it the at most 56 KiB of a pending append, whose SHA-256 is in the header. The record of
generation g is in slot g mod 2. So the whole state is under 128 KiB, and an intent under 64 KiB,
as spec 004 ("Local journal") wants it.

Publishing writes one slot in place and syncs it, instead of a new file and a rename: one barrier
where a replacement needs two and a change of the directory, five times quicker here. It is as
atomic, because the record before it is in the *other* slot and was synced before this write began:
a write that a crash cut short, or whose blocks arrived in any order, fails its checksums, and the
other slot is what holds. The slots share no block of the disk.

A header is also valid alone: what it says is committed was synced in the log before the header was
written. Readers use that and never touch the pending bytes.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any, Final

import attrs

from ..errors import InvalidInput, LogStateInvalid, NewerFormat

VERSION: Final = 1
HEADER_BYTES: Final = 4096
SLOT_BYTES: Final = 60 * 1024
#: the most bytes of one pending append
PENDING_MOST_BYTES: Final = SLOT_BYTES - HEADER_BYTES
STATE_MOST_BYTES: Final = 2 * SLOT_BYTES
#: the most of one text in a header, as JSON, so that two states and two ids always fit
_TEXT_MOST = 600
_OFFSET_MOST = 2**62

_PREFIX = re.compile(rb"openjobs-runlog ([1-9][0-9]{0,5}) ([1-9][0-9]{0,3}) ([0-9a-f]{8})\n")
_SHA256 = re.compile("[0-9a-f]{64}")


class Stream(enum.StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


class Ending(enum.StrEnum):
    #: every byte of both streams is in the log
    DRAINED = "drained"
    #: it is certain that the run never began
    NEVER_STARTED = "never_started"


def check_text(text: str, what: str) -> str:
    if not text or len(json.dumps(text)) > _TEXT_MOST:
        raise InvalidInput(f"{what} must be a text of 1 to about {_TEXT_MOST} characters")
    return text


@attrs.frozen(kw_only=True)
class Completion:
    #: how the run ended, in the caller's words
    outcome: str
    ending: Ending


@attrs.frozen(kw_only=True)
class LogState:
    """What is committed. Offsets count bytes from the beginning of the run."""

    #: how much of the native streams is in the log
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    #: the length of the mixed log
    log_bytes: int = 0
    #: the identity of the source that accepted the run; None before that
    source: str | None = None
    #: set once, never changed
    completion: Completion | None = None

    @property
    def accepted(self) -> bool:
        return self.source is not None

    def offset(self, stream: Stream) -> int:
        return self.stdout_bytes if stream is Stream.STDOUT else self.stderr_bytes


@attrs.frozen(kw_only=True)
class Pending:
    """An append that is decided, and what is committed once it is done."""

    data: bytes
    after: LogState


@attrs.frozen(kw_only=True)
class Checkpoint:
    """One record of the sidecar."""

    task_id: str
    run_id: str
    #: one more with each record
    generation: int
    committed: LogState
    pending: Pending | None = None


@attrs.frozen(kw_only=True)
class Header:
    """A checkpoint without the bytes of its pending append."""

    task_id: str
    run_id: str
    generation: int
    committed: LogState
    after: LogState | None
    pending_bytes: int
    pending_sha256: str

    def with_data(self, data: bytes) -> Checkpoint | None:
        """The checkpoint, or None where `data` is not what the header was written for."""
        pending = None
        if self.after is not None:
            if len(data) != self.pending_bytes or hashlib.sha256(data).hexdigest() != self.pending_sha256:
                return None
            pending = Pending(data=data, after=self.after)
        return Checkpoint(
            task_id=self.task_id,
            run_id=self.run_id,
            generation=self.generation,
            committed=self.committed,
            pending=pending,
        )


# --- to bytes ----------------------------------------------------------------------------------------


def encode(checkpoint: Checkpoint) -> tuple[bytes, bytes]:
    """The header and the pending bytes, to be written one behind the other at the slot's beginning."""
    document: dict[str, Any] = {
        "task_id": checkpoint.task_id,
        "run_id": checkpoint.run_id,
        "generation": checkpoint.generation,
        "committed": _state_to_json(checkpoint.committed),
    }
    data = b""
    if checkpoint.pending is not None:
        data = checkpoint.pending.data
        document["pending"] = {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "after": _state_to_json(checkpoint.pending.after),
        }
    raw = json.dumps(document, separators=(",", ":")).encode("ascii")
    header = b"openjobs-runlog %d %d %08x\n%b" % (VERSION, len(raw), _crc(b"%d" % VERSION, b"%d" % len(raw), raw), raw)
    if len(header) > HEADER_BYTES or len(data) > PENDING_MOST_BYTES:
        raise InvalidInput("the state of a run log is too large")
    return header.ljust(HEADER_BYTES, b"\n"), data


def _crc(version: bytes, length: bytes, raw: bytes) -> int:
    return zlib.crc32(raw, zlib.crc32(version + b" " + length))


def _state_to_json(state: LogState) -> dict[str, Any]:
    document: dict[str, Any] = {
        "stdout": state.stdout_bytes,
        "stderr": state.stderr_bytes,
        "log": state.log_bytes,
        "accepted": state.accepted,
    }
    if state.source is not None:
        document["source"] = state.source
    if state.completion is not None:
        document["completion"] = {"outcome": state.completion.outcome, "ending": state.completion.ending.value}
    return document


# --- from bytes --------------------------------------------------------------------------------------


def decode_header(raw: bytes, path: Path) -> Header | None:
    """The header at the beginning of `raw`; None where there is none, or not a whole one.

    Raises `LogStateInvalid` where a whole one says what no writer says, and `NewerFormat`.
    """
    match = _PREFIX.match(raw)
    if match is None:
        return None
    text = raw[match.end() : match.end() + int(match[2])]
    if len(text) != int(match[2]) or _crc(match[1], match[2], text) != int(match[3], 16):
        return None
    if int(match[1]) != VERSION:
        raise NewerFormat(f"{path} was written by a newer version of openjobs; it was left as it was", path=str(path))
    try:
        return _Fields(json.loads(text, object_pairs_hook=_no_key_twice), "the state").header()
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid(path, f"its contents make no sense ({error})") from error


def invalid(path: Path, why: str, offset: int | None = None) -> LogStateInvalid:
    return LogStateInvalid(f"{path}: {why}; it was left as it was", path=str(path), offset=offset)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


class _Fields:
    """An object of which every key must be taken, and no other be there."""

    def __init__(self, document: Any, what: str) -> None:
        if not isinstance(document, dict):
            raise TypeError(f"{what} is no object")
        self._left = dict(document)

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str) -> Any:
        if key not in self._left:
            raise ValueError(f"{key} is missing")
        return self._left.pop(key)

    def number(self, key: str) -> int:
        value = self.take(key)
        if type(value) is not int or not 0 <= value <= _OFFSET_MOST:
            raise ValueError(f"{key} is no length")
        return value

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str):
            raise TypeError(f"{key} is no text")
        return check_text(value, key)

    def sha256(self, key: str) -> str:
        value = self.text(key)
        if not _SHA256.fullmatch(value):
            raise ValueError(f"{key} is no SHA-256")
        return value

    def inner(self, key: str) -> _Fields:
        return _Fields(self.take(key), key)

    def done(self) -> None:
        if self._left:
            raise ValueError(f"unknown: {', '.join(sorted(self._left))}")

    def header(self) -> Header:
        committed = self.inner("committed").state()
        pending = self.inner("pending") if "pending" in self else None
        header = Header(
            task_id=self.text("task_id"),
            run_id=self.text("run_id"),
            generation=self.number("generation"),
            committed=committed,
            after=pending.inner("after").state() if pending else None,
            pending_bytes=pending.number("bytes") if pending else 0,
            pending_sha256=pending.sha256("sha256") if pending else "",
        )
        if pending:
            pending.done()
        self.done()
        if header.after is not None:
            check_step(committed, header.after, header.pending_bytes)
        return header

    def state(self) -> LogState:
        completion = self.inner("completion").completion() if "completion" in self else None
        state = LogState(
            stdout_bytes=self.number("stdout"),
            stderr_bytes=self.number("stderr"),
            log_bytes=self.number("log"),
            source=self.text("source") if "source" in self else None,
            completion=completion,
        )
        if self.take("accepted") is not state.accepted:
            raise ValueError("accepted without a source, or a source without acceptance")
        self.done()
        check_state(state)
        return state

    def completion(self) -> Completion:
        found = Completion(outcome=self.text("outcome"), ending=Ending(self.text("ending")))
        self.done()
        return found


def check_state(state: LogState) -> None:
    """Raises ValueError for a state that no run can be in."""
    native = state.stdout_bytes + state.stderr_bytes
    if native > state.log_bytes:
        raise ValueError("more native bytes than the log has")
    if native and not state.accepted:
        raise ValueError("native bytes of a run that nobody accepted")
    if state.completion and (state.completion.ending is Ending.DRAINED) != state.accepted:
        raise ValueError("drained without acceptance, or accepted and never started")


def check_step(before: LogState, after: LogState, data_bytes: int) -> None:
    """Raises ValueError where appending `data_bytes` cannot lead from one state to the other."""
    out = after.stdout_bytes - before.stdout_bytes
    err = after.stderr_bytes - before.stderr_bytes
    if not 0 < data_bytes <= PENDING_MOST_BYTES or after.log_bytes - before.log_bytes != data_bytes:
        raise ValueError("the pending bytes do not lead to the next state")
    if out < 0 or err < 0 or out + err > data_bytes:
        raise ValueError("the next state's offsets do not follow")
    if before.source not in (None, after.source) or before.completion is not None:
        raise ValueError("the next state takes something back")
