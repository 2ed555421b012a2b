"""Admission: from a request to a job that may be written, or a refusal that writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from ..errors import InvalidInput, ParentFinished, UnknownAgent
from ..ids import IdMaker, check_job_id, check_node_id, check_session_id
from ..jobs import (
    ContextMode,
    Job,
    NoticeStage,
    SpawnRequest,
    SyncFn,
    check_metadata,
    request_digest,
    subject_of,
)
from ..session import strict_json
from .live import LiveJob, Phase

_KEY_LIMIT_CHARS = 512


class ProfileSource(Protocol):
    """Where the callables of agent ids come from."""

    def get(self, agent_id: str) -> SyncFn:
        """Raises `errors.UnknownAgent`."""
        ...


def job_from(request: SpawnRequest, *, runner_id: str, now: datetime, new_id: IdMaker) -> Job:
    """The pending job that `request` asks for. Raises `InvalidInput` (`InvalidSessionId`) for what it may not hold."""
    _check(request)
    return Job(
        job_id=check_job_id(request.job_id) if request.job_id is not None else new_id(),
        subject=subject_of(request.description, request.prompt),
        description=request.prompt,
        agent_id=request.agent_id,
        created_at=now,
        parent_session_id=check_session_id(request.parent_session_id),
        parent_job_id=request.parent_job_id,
        parent_msg_id=request.parent_msg_id,
        context_mode=ContextMode(request.context_mode),
        caller_session_id=_caller(request),
        caller_msg_id=request.caller_msg_id,
        origin_tool_call_id=request.origin_tool_call_id,
        runner_id=runner_id,
        # Known before anything runs: what a crash leaves behind between the start and its commit has a name.
        run_id=new_id(),
        metadata=dict(request.metadata) if request.metadata is not None else None,
        timeout_s=float(request.timeout_s) if request.timeout_s is not None else None,
        foreground=request.foreground,
        notice=NoticeStage.WANTED if request.notify else None,
        request_digest=request_digest(request),
    )


def function_for(
    request: SpawnRequest, given: SyncFn | None, default: SyncFn | None, profiles: ProfileSource | None
) -> SyncFn:
    """What runs the job: the one given with it, else the runner's, else the profile's. Raises `UnknownAgent`."""
    fn = given if given is not None else default
    if fn is None:
        if profiles is None:
            raise UnknownAgent(
                f"nothing runs the agent {request.agent_id!r}: give the runner or the submit a sync_fn, or profiles",
                agent_id=request.agent_id,
            )
        fn = profiles.get(request.agent_id)
    if not callable(fn):
        raise InvalidInput(f"sync_fn must be a callable, not {type(fn).__name__}")
    return fn


def refuse_finished_parent(parent: LiveJob) -> None:
    """A parent that was asked to stop takes no children, so that a cancel reaches all it should reach."""
    if parent.phase >= Phase.ENDED or parent.cancel_asked:
        state = "ended" if parent.phase >= Phase.ENDED else "being cancelled"
        raise ParentFinished(f"the parent job {parent.job_id} is {state} and takes no more children")


def check_env(env: Mapping[str, str] | None) -> Mapping[str, str] | None:
    if env is None:
        return None
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(f"env maps text to text; {name!r} does not")
    return dict(env)


def check_cwd(cwd: str | Path | None) -> Path | None:
    return None if cwd is None else Path(cwd)


def _check(request: SpawnRequest) -> None:
    _text("prompt", request.prompt)
    _text("description", request.description)
    if not _text("agent_id", request.agent_id):
        raise InvalidInput("agent_id is empty")
    if request.context_mode not in set(ContextMode):
        raise InvalidInput(f"context_mode is 'inherit' or 'clean', not {request.context_mode!r}")
    if request.parent_msg_id is not None:
        check_node_id(request.parent_msg_id)
    if request.caller_msg_id is not None:
        check_node_id(request.caller_msg_id)
        if request.caller_session_id in (None, request.parent_session_id):
            raise InvalidInput("caller_msg_id is a message of another session; for one of the target use parent_msg_id")
    if request.origin_tool_call_id is not None:
        key = _text("origin_tool_call_id", request.origin_tool_call_id)
        if not 1 <= len(key) <= _KEY_LIMIT_CHARS:
            raise InvalidInput(f"origin_tool_call_id has {len(key)} characters; it may have 1 to {_KEY_LIMIT_CHARS}")
    _check_timeout(request.timeout_s)
    _check_metadata(request.metadata)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{name} is not valid Unicode: {error}") from error
    return value


def _check_timeout(timeout_s: Any) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise InvalidInput(f"timeout_s is a number of seconds or None, not {timeout_s!r}")
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidInput(f"timeout_s must be above zero and finite, not {timeout_s!r}")


def _check_metadata(metadata: Mapping[str, Any] | None) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata must be a mapping, not {type(metadata).__name__}")
    try:
        encoded = strict_json.dumps_foreign(metadata)
    except TypeError as error:
        raise InvalidInput(f"metadata cannot be written as JSON: {error}") from error
    check_metadata(encoded)


def _caller(request: SpawnRequest) -> str | None:
    """The session of the caller where it is another one (spec 003, D6)."""
    caller = request.caller_session_id
    if caller is None or caller == request.parent_session_id:
        return None
    return check_session_id(caller)
