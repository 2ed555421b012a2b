"""Where a server's jobs are: in a runner of this process, or in a home whose host is another one.

Both answer the same questions; the server above knows no difference but `mode`. Every call may
wait for a disk or another process and belongs on a worker thread, except `wait_for`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from ..aio import AsyncJobClient, AsyncJobRunner
from ..errors import Closed, HostUnavailable, InvalidInput, OpenJobsError, OutcomeUnknown, UnknownTask
from ..host.actions import Context, perform
from ..host.client import connect, ensure_host
from ..ids import check_session_id, new_id
from ..jobs import Job, JobStatus
from ..processes import ProcessSupervisor
from ..processes.client import TaskClient
from ..processes.task import Task
from ..runner import JobClient, JobRunner
from ..runner.hub import Subscription
from ..runner.recovery import Recovery
from ..store import JobStore

log = logging.getLogger(__name__)

Jobs = list[Job]
Fields = Mapping[str, Any]

#: how often a spawn is handed to another host when hosts leave under it
_ATTEMPTS = 5
#: events of a runner that may wait for the server's thread
_HUB_CAPACITY = 65_536


@attrs.frozen(kw_only=True, slots=True)
class Profile:
    agent_id: str
    kind: Literal["command", "callable"]


def _said(session_id: str, error: Exception) -> None:
    """The watcher warns of it; a page of the list is what can be read."""
    log.debug("session %s cannot be read whole: %s", session_id, error)


class Backend(Protocol):
    """What the server needs of the jobs' side."""

    mode: str
    store: JobStore
    tasks: TaskClient | None
    recovery: Recovery
    #: the runner of this process whose jobs are heard of through `subscribe`; None where there is none
    runner_id: str | None

    def subscribe(self, wake: Callable[[], None]) -> Subscription | None: ...
    def get(self, job_id: str) -> tuple[Job, str | None]: ...
    def outcome(self, job_id: str) -> Job: ...
    def older(self, before: str | None, session_id: str | None, limit: int) -> Jobs: ...
    def spawn(self, fields: Fields) -> dict[str, Any]: ...
    def cancel(self, job_id: str, reason: str | None) -> dict[str, Any]: ...
    def cancel_session(self, session_id: str, reason: str | None) -> list[dict[str, Any]]: ...
    def stop_task(self, fields: Fields) -> dict[str, Any]: ...
    async def wait_for(self, ids: Sequence[str], mode: str, timeout_s: float | None) -> Jobs: ...
    def profiles(self) -> list[Profile]: ...
    def stats(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


@attrs.frozen(kw_only=True)
class Surroundings:
    """What a job gets that is started through the server: never what a web page thinks of."""

    environ: Mapping[str, str] | None = attrs.field(default=None, repr=False)
    cwd: Path | None = None

    def fill(self, fields: Fields) -> dict[str, Any]:
        filled = dict(fields)
        if self.environ is not None:
            filled["env"] = dict(self.environ)
        if self.cwd is not None and filled.get("cwd") is None:
            filled["cwd"] = os.fspath(self.cwd)
        return filled


class RunnerBackend:
    """The jobs of a runner of this process, and the others of its home."""

    mode = "host"

    def __init__(
        self,
        runner: JobRunner,
        *,
        supervisor: ProcessSupervisor | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.runner = runner
        self.store = runner.store
        self.recovery = runner.recovery
        self.runner_id: str | None = runner.runner_id
        self._own_tasks = None
        if supervisor is not None:
            self.tasks: TaskClient | None = supervisor.client
        else:
            self.tasks = self._own_tasks = None if self.store.home is None else TaskClient(self.store.home)
        self._supervised = supervisor is not None
        self._surroundings = surroundings or Surroundings()
        self._context = Context(runner=runner, store=runner.store, tasks=supervisor)
        self._waits = AsyncJobRunner(runner)

    def subscribe(self, wake: Callable[[], None]) -> Subscription | None:
        return self.runner.subscribe(_HUB_CAPACITY, wake)

    def get(self, job_id: str) -> tuple[Job, str | None]:
        """The job, and what it has said so far while it runs. Raises `UnknownJob`, `AmbiguousId`."""
        job = self.runner.get(job_id)
        return job, job.result_text if job.status is JobStatus.RUNNING else None

    def outcome(self, job_id: str) -> Job:
        return self.runner.outcome(job_id)

    def older(self, before: str | None, session_id: str | None, limit: int) -> Jobs:
        return self.runner.list(session_id=session_id, before=before, limit=limit, on_damage=_said)

    def spawn(self, fields: Fields) -> dict[str, Any]:
        return perform(self._context, "spawn_job", self._surroundings.fill(fields))

    def cancel(self, job_id: str, reason: str | None) -> dict[str, Any]:
        return perform(self._context, "cancel_job", {"job_id": job_id, "reason": reason})

    def cancel_session(self, session_id: str, reason: str | None) -> list[dict[str, Any]]:
        found = perform(self._context, "cancel_session", {"session_id": session_id, "reason": reason})
        return list(found["tasks"])

    def stop_task(self, fields: Fields) -> dict[str, Any]:
        if self._supervised:
            return perform(self._context, "stop_task", fields)
        return _ask_task_to_stop(self.tasks, fields)

    async def wait_for(self, ids: Sequence[str], mode: str, timeout_s: float | None) -> Jobs:
        return await self._waits.await_tasks(ids, mode, timeout_s)

    def profiles(self) -> list[Profile]:
        if self.runner.profiles is None:
            return []
        return _profiles(self.runner.profiles)

    def stats(self) -> Mapping[str, Any]:
        return attrs.asdict(self.runner.stats())

    def close(self) -> None:
        if self._own_tasks is not None:
            self._own_tasks.close()


class AttachedBackend:
    """A home whose host is another process: read here, changed through that host, or asked for in git."""

    mode = "attached"
    runner_id: str | None = None

    def __init__(
        self, home: Path, store: JobStore, client: JobClient, *, surroundings: Surroundings | None = None
    ) -> None:
        self._home = home
        self.store = store
        self.recovery = client.recovery
        self.tasks: TaskClient | None = TaskClient(home)
        self._client = client
        self._surroundings = surroundings or Surroundings()
        self._waits = AsyncJobClient(client)

    def subscribe(self, wake: Callable[[], None]) -> Subscription | None:
        return None

    def get(self, job_id: str) -> tuple[Job, str | None]:
        job = self._client.get(job_id)
        if job.status is not JobStatus.RUNNING:
            return job, None
        try:
            host = connect(self._home)
            if host is not None:
                with host:
                    return host.get(job.job_id)
        except OpenJobsError:
            pass  # it is about what it said so far only
        return job, None

    def outcome(self, job_id: str) -> Job:
        return self._client.outcome(job_id)

    def older(self, before: str | None, session_id: str | None, limit: int) -> Jobs:
        return self._client.list(session_id=session_id, before=before, limit=limit, on_damage=_said)

    def spawn(self, fields: Fields) -> dict[str, Any]:
        """The id is chosen here, so that asking a second host again never runs anything twice (R3)."""
        wanted = {"job_id": new_id(), **self._surroundings.fill(fields)}
        last: Exception | None = None
        for _ in range(_ATTEMPTS):
            with ensure_host(self._home) as host:
                try:
                    return host.call("spawn_job", **wanted)
                except (OutcomeUnknown, HostUnavailable, Closed) as error:
                    last = error
        assert last is not None
        raise last

    def cancel(self, job_id: str, reason: str | None) -> dict[str, Any]:
        job = self._client.cancel(job_id, reason)
        return {"job_id": job.job_id, "status": job.status.value}

    def cancel_session(self, session_id: str, reason: str | None) -> list[dict[str, Any]]:
        jobs = self._client.cancel_session(check_session_id(session_id), reason)
        return [{"job_id": job.job_id, "status": job.status.value} for job in jobs]

    def stop_task(self, fields: Fields) -> dict[str, Any]:
        return _ask_task_to_stop(self.tasks, fields)

    async def wait_for(self, ids: Sequence[str], mode: str, timeout_s: float | None) -> Jobs:
        return await self._waits.await_tasks(ids, mode, timeout_s)

    def profiles(self) -> list[Profile]:
        from ..agents import Profiles

        with Profiles(self._home) as profiles:
            return _profiles(profiles)

    def stats(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        if self.tasks is not None:
            self.tasks.close()


def _ask_task_to_stop(tasks: TaskClient | None, fields: Fields) -> dict[str, Any]:
    """Through the task's journal: whoever owns it acts within half a second."""
    if tasks is None:
        raise UnknownTask("there are no background commands here")
    grace_s = fields.get("grace_s")
    if grace_s is not None and not (
        isinstance(grace_s, int | float) and not isinstance(grace_s, bool) and grace_s >= 0
    ):
        raise InvalidInput("stop_task: grace_s must be a number of seconds from 0", field="grace_s")
    task_id = fields.get("task_id")
    if not isinstance(task_id, str):
        raise InvalidInput("stop_task needs the field task_id", field="task_id")
    options = {} if grace_s is None else {"grace_s": float(grace_s)}
    task: Task = tasks.request_stop(task_id, fields.get("reason"), **options)
    return {"task_id": task.task_id, "status": task.status.value}


def _profiles(source: Any) -> list[Profile]:
    """What can be named in a spawn; `source` is an `agents.Profiles`, or another registry that has `names`."""
    if not hasattr(source, "names"):
        return []
    from ..agents.command import CommandProfile

    return [
        Profile(agent_id=name, kind="command" if isinstance(source.get(name), CommandProfile) else "callable")
        for name in source.names()
    ]
