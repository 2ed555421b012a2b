"""The shapes of `--json`, as docs/cli.md promises them: names may be added, never renamed or removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..clock import to_text
from ..host.wire import job_to_wire, task_to_wire
from ..jobs import Job

if TYPE_CHECKING:
    from ..processes.task import Task


def job(one: Job) -> dict[str, Any]:
    """Every field of the job by its name in spec 003; times as ISO-8601 UTC; texts whole, but for those that `cut`
    names, which cannot be read."""
    return job_to_wire(one)


def jobs(many: Sequence[Job]) -> list[dict[str, Any]]:
    """As `job`, but long texts may be beginnings; `cut` names the fields where they are."""
    return [job(one) | {"cut": list(one.extra.get("cut", ()))} for one in many]


def task(one: Task) -> dict[str, Any]:
    """Every field of a background command; identities of processes as pid, start and boot."""
    return task_to_wire(one)


def stopped(one: Job) -> dict[str, Any]:
    return {
        "job_id": one.job_id,
        "status": one.status.value,
        "cancel_requested_at": to_text(one.cancel_requested_at) if one.cancel_requested_at else None,
        "cancel_reason": one.cancel_reason,
    }


def failed(error: BaseException, said: str, code: int) -> dict[str, Any]:
    """What stderr says under `--json` when a command fails."""
    return {
        "error": type(error).__name__,
        "message": said,
        "exit_code": code,
        "candidates": [str(candidate) for candidate in getattr(error, "candidates", ())],
    }
