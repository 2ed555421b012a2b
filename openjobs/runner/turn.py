"""One turn: calling what runs the job, and what its return or exception means for the job's end.

Nothing here decides: a cancel may win over the end that is returned (see `jobs.transition`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ..errors import CancelledError
from ..jobs import Cancelled, Completed, End, Errored, TurnRequest, TurnResult
from ..session import strict_json
from .live import LiveJob
from .strangers import FORKED_EXIT_CODE, call_out, leave_if_forked

log = logging.getLogger(__name__)

#: a job's partial text, in bytes of UTF-8; of a longer one the end is kept
PARTIAL_LIMIT_BYTES = 1 << 20
DROPPED = "[the first {} bytes of this partial output were dropped]\n"


def take_turn(live: LiveJob, request: TurnRequest, event_id: str) -> End:
    """Run the callable and return the end it came to. Never raises, whatever the callable does."""
    pid = os.getpid()
    try:
        result = live.fn(request, live.cancel_event)
        leave_if_forked(pid)
    except BaseException as error:
        if os.getpid() != pid:
            # As `sys.exit` says, where the child that the turn made used it.
            code = getattr(error, "code", FORKED_EXIT_CODE) if isinstance(error, SystemExit) else FORKED_EXIT_CODE
            os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
        # SystemExit and KeyboardInterrupt too: in a worker they mean nothing but this job's end.
        log.info("job %s raised", live.job_id, exc_info=True)
        if isinstance(error, CancelledError) and live.cancel_event.is_set():
            return Cancelled(
                event_id=event_id,
                reason=live.cancel_reason,
                result_text=live.partial_text,
                usage=_usage(getattr(error, "usage", None))[0],
            )
        return Errored(event_id=event_id, error=describe(error), result_text=live.partial_text)
    live.returned = True
    return end_of(result, event_id, live.partial_text)


def end_of(result: Any, event_id: str, partial_text: str | None) -> End:
    """The end that a returned value means. A field that cannot be used makes it an error that says so, after the
    turn's own; what the other fields say is kept all the same, the text above all.
    """
    if not isinstance(result, TurnResult):
        error = f"TypeError: the turn must return a TurnResult, not {type(result).__name__}"
        return Errored(event_id=event_id, error=error, result_text=partial_text)
    faults: list[str] = []
    text = _text(result.final_text, "final_text must be text", faults) or ""
    said = None if result.error is None else _text(result.error, "error must be text or None", faults)
    head_id = None if result.head_id is None else _text(result.head_id, "head_id must be a message id or None", faults)
    usage, fault = _usage(result.usage)
    if fault is not None:
        faults.append(f"TypeError: TurnResult.usage {fault}")
    if faults or result.error is not None:
        return Errored(
            event_id=event_id,
            error="; ".join([*([] if said is None else [said]), *faults[:1]]),
            result_text=text or partial_text,
            head_id=head_id,
            usage=usage,
        )
    return Completed(event_id=event_id, result_text=text, head_id=head_id, usage=usage)


def describe(error: BaseException) -> str:
    """`{type}: {message}` (spec 003, D12)."""
    try:
        message = str(error)
    except BaseException:
        message = "(its message cannot be shown)"
    return clean(f"{type(error).__name__}: {message}")


def bounded_partial(text: str) -> str:
    """`text`, or its end with a line that says how much is missing."""
    text = clean(text)
    if len(text) * 4 <= PARTIAL_LIMIT_BYTES:
        return text
    encoded = text.encode()
    excess = len(encoded) - PARTIAL_LIMIT_BYTES
    if excess <= 0:
        return text
    return DROPPED.format(excess) + encoded[excess:].decode(errors="ignore")


def clean(text: str) -> str:
    """`text` as it can be stored: half surrogates (undecodable bytes of a command) become `?`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def contained(call: Callable[[Any], None], job_id: str) -> Callable[[Any], None]:
    """`call` for use by a turn: what it raises is logged, never the turn's problem."""

    def safely(value: Any) -> None:
        call_out(functools.partial(call, value), log, "job %s: a report of its progress failed", job_id)

    return safely


def _text(value: Any, wanted: str, faults: list[str]) -> str | None:
    if isinstance(value, str):
        return clean(value)
    faults.append(f"TypeError: TurnResult.{wanted}, not {type(value).__name__}")
    return None


def _usage(usage: Any) -> tuple[dict[str, Any] | None, str | None]:
    """What was reported as it is stored, or what is wrong with it."""
    if usage is None:
        return None, None
    if not isinstance(usage, Mapping):
        return None, f"must be a mapping or None, not {type(usage).__name__}"
    try:
        written = strict_json.dumps_foreign(usage)
    except Exception as error:  # a mapping of somebody's own may fail in any way
        return None, f"cannot be written as JSON: {error}"
    return orjson.loads(written), None
