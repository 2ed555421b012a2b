"""What goes over the home's socket: one JSON object a line, jobs and errors as plain values.

The standard library's `json` is used on purpose: an environment variable or argument that is not
UTF-8 is a string with lone surrogates in Python, and only this encoder carries it unchanged.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from .. import errors
from ..clock import from_text, to_text
from ..errors import BadFrame, HostFailed, OpenJobsError
from ..jobs import ContextMode, Job, JobStatus, NoticeStage

if TYPE_CHECKING:
    from ..processes.task import Task

#: what both sides must agree on; a client refuses a host with another one
PROTOCOL = 1
#: a request holds at most a prompt, an environment and some names
REQUEST_LIMIT_BYTES = 16 << 20
#: an answer may list whole texts of many jobs
ANSWER_LIMIT_BYTES = 256 << 20
#: seconds from the first byte of a line to its end
LINE_TIMEOUT_S = 30.0

_CHUNK_BYTES = 1 << 16
#: fields of a job that say how it is stored, not what it is
_INTERNAL = frozenset({"extra", "request_digest", "head_at_submit"})
_TIMES = ("created_at", "queued_at", "started_at", "completed_at", "cancel_requested_at")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def encode(message: Mapping[str, Any], limit_bytes: int = ANSWER_LIMIT_BYTES) -> bytes:
    """One line. Raises `BadFrame` when it is too long or holds what JSON cannot."""
    try:
        line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise BadFrame(f"this cannot be sent: {error}") from error
    if len(line) > limit_bytes:
        raise BadFrame(f"this would be {len(line):,} bytes on the socket; the limit is {limit_bytes:,}")
    return line


def decode(line: bytes) -> dict[str, Any]:
    """The object on one line. Raises `BadFrame`."""
    try:
        message = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}"[:300]) from error
    if not isinstance(message, dict):
        raise BadFrame(f"a line must be a JSON object, not {type(message).__name__}")
    return message


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Lines:
    """Lines read from a socket, each at most `limit_bytes` long. For one thread."""

    def __init__(self, sock: socket.socket, limit_bytes: int, line_timeout_s: float | None = LINE_TIMEOUT_S) -> None:
        self._sock = sock
        self._limit = limit_bytes
        self._line_timeout_s = line_timeout_s
        self._buffer = bytearray()
        self._searched = 0

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next line without its end; None when the other side is gone or was cut off.

        `timeout_s` bounds the wait for the first byte. Raises `TimeoutError`, and `BadFrame` for a line
        that is too long, after which nothing more can be read.
        """
        deadline: float | None = None
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > self._limit:
                raise BadFrame(f"a line of more than {self._limit:,} bytes")
            if self._buffer and deadline is None and self._line_timeout_s is not None:
                deadline = time.monotonic() + self._line_timeout_s
            left = timeout_s if deadline is None else max(deadline - time.monotonic(), 0.001)
            self._sock.settimeout(left)
            try:
                chunk = self._sock.recv(_CHUNK_BYTES)
            except ConnectionError:
                return None
            if not chunk:
                return None
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        if len(line) > self._limit:
            raise BadFrame(f"a line of more than {self._limit:,} bytes")
        return line


# --- jobs ---------------------------------------------------------------------------------------------------


def job_to_wire(job: Job) -> dict[str, Any]:
    """Every field by its name in spec 003, texts whole, times as ISO-8601 UTC; `cut` names texts that are not."""
    fields = {
        field.name: _plain(getattr(job, field.name)) for field in attrs.fields(Job) if field.name not in _INTERNAL
    }
    return fields | {"cut": list(cut)} if (cut := job.extra.get("cut")) else fields


def job_from_wire(fields: Mapping[str, Any]) -> Job:
    """The job again; fields that this version does not know are left out."""
    known = {field.name for field in attrs.fields(Job)} - _INTERNAL
    values = {name: value for name, value in fields.items() if name in known}
    try:
        for name in _TIMES:
            if values.get(name) is not None:
                values[name] = from_text(values[name])
        values["status"] = JobStatus(values["status"])
        values["context_mode"] = ContextMode(values["context_mode"])
        if values.get("notice") is not None:
            values["notice"] = NoticeStage(values["notice"])
        return Job(**values, extra={"cut": list(fields["cut"])} if fields.get("cut") else {})
    except (KeyError, TypeError, ValueError) as error:
        raise BadFrame(f"the host sent a job that cannot be read: {error}") from error


def task_to_wire(task: Task) -> dict[str, Any]:
    """Every field of a background command; its process and keeper as pid, start and boot."""
    fields = attrs.asdict(task, recurse=False)
    fields |= {name: None if fields[name] is None else fields[name].to_json() for name in ("keeper", "child")}
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return to_text(value)
        case JobStatus() | ContextMode():
            return value.value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case None | bool() | int() | str():
            return value
        case float() if value == value and abs(value) != float("inf"):
            return value
        case _:
            return str(value)


# --- errors -------------------------------------------------------------------------------------------------


def code_of(kind: type[OpenJobsError]) -> str:
    """`UnknownJob` is `unknown_job`."""
    return _WORD.sub("_", kind.__name__).lower()


def _all_kinds() -> dict[str, type[OpenJobsError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OpenJobsError)]
    return {code_of(kind): kind for kind in kinds}


_KINDS = _all_kinds()


def error_to_wire(error: BaseException) -> dict[str, Any]:
    """`{code, message, ...facts}`. An error that is not ours is `host_failed` and named, without its traceback."""
    if not isinstance(error, OpenJobsError):
        return {"code": code_of(HostFailed), "message": f"{type(error).__name__}: {error}"}
    facts = {name: _fact(value) for name, value in vars(error).items() if not name.startswith("_")}
    return {
        **{name: value for name, value in facts.items() if value is not None},
        "code": code_of(type(error)),
        "message": str(error),
    }


def _fact(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple() if all(isinstance(item, str) for item in value):
            return list(value)
        case _:
            return None


def error_from_wire(fields: Mapping[str, Any]) -> OpenJobsError:
    """The typed error again; a code that this version does not know is a `HostFailed`."""
    kind = _KINDS.get(str(fields.get("code")), HostFailed)
    facts = {name: value for name, value in fields.items() if name not in ("code", "message", "args")}
    return kind(str(fields.get("message") or kind.__doc__), **facts)
