"""The action table: what can be asked of a home's runner, as plain functions. Source: spec 003, D9.

`TABLE` maps a name to its handler; `perform` finds, checks and runs one; `answer` makes of a
request line's object what goes back. The socket here and the WebSocket server are two faces of
this one table. Every field is checked before anything is done, and an unknown field is refused,
since a misspelt one would otherwise be an option silently lost.

| action | fields | answer |
|---|---|---|
| spawn_job | session_id, prompt, description?, agent_id?, context?, wait?, … | job_id, status, parent_msg_id |
| list_jobs | session_id?, status_filter?, limit?, parent_job_id?, parent_msg_id?, before? | tasks, unread? |
| get_job | job_id | the job's fields, partial_result |
| cancel_job | job_id, reason? | job_id, status |
| await_jobs | job_ids, mode?, timeout_s?, waiting_job_id? | tasks, timed_out |
| cancel_session | session_id, reason? | tasks |
| start_task | session_id, command, cwd?, env?, timeout_s?, task_id?, … | a background command |
| list_tasks | session_id | tasks |
| get_task | task_id | a background command |
| stop_task | task_id, reason?, grace_s? | task_id, status |
| stats, ping, leave, shutdown | | |
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ..errors import Closed, InvalidInput, OpenJobsError, SessionExists
from ..ids import check_job_id, check_node_id, check_session_id, is_prefix
from ..jobs import ContextMode, Job, JobStatus, SpawnRequest
from .wire import error_to_wire, job_to_wire, task_to_wire

LIST_LIMIT = 1000
AWAIT_LIMIT = 10_000
#: of a background command's output, where nothing is said
OUTPUT_LIMIT_BYTES = 64 << 20
#: how often a waiting action looks whether anybody still waits for its answer
_SLICE_S = 0.5

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Context:
    """What the handlers work on, and who asks."""

    runner: Any
    store: Any
    #: looks after background commands; None where there are none
    tasks: Any = None
    #: what `ping` says beside its own fields
    about: Mapping[str, Any] = attrs.field(factory=dict)
    #: asks the process to end, with a reason
    stop: Callable[[str], object] = attrs.field(default=lambda reason: None)
    #: asks the host to end as soon as it has neither work nor clients; False where it stays
    leave: Callable[[], bool] = attrs.field(default=lambda: False)
    #: whether the asker went away, or the host must end the connection
    gone: Callable[[], bool] = attrs.field(default=lambda: False)


Fields = Mapping[str, Any]
Handler = Callable[[Context, Fields], dict[str, Any]]


def answer(context: Context, request: Mapping[str, Any]) -> dict[str, Any]:
    """`{ok: true, result}` or `{ok: false, error: {code, message, ...}}`, with the request's `id` where it had one."""
    reply: dict[str, Any] = {"id": request["id"]} if isinstance(request.get("id"), str | int) else {}
    fields = {name: value for name, value in request.items() if name not in ("id", "action")}
    try:
        return {**reply, "ok": True, "result": perform(context, request.get("action"), fields)}
    except OpenJobsError as error:
        return {**reply, "ok": False, "error": error_to_wire(error)}
    except Exception as error:
        _log.exception("the action %r failed", request.get("action"))
        return {**reply, "ok": False, "error": error_to_wire(error)}


def perform(context: Context, action: Any, fields: Fields) -> dict[str, Any]:
    """The result of one action. Raises the typed error."""
    handler = TABLE.get(action) if isinstance(action, str) else None
    if handler is None:
        raise InvalidInput(f"{action!r} is not an action; there are {', '.join(sorted(TABLE))}")
    return handler(context, fields)


# --- D9 -----------------------------------------------------------------------------------------------------

_SPAWN = ("session_id", "prompt", "description", "agent_id", "context", "wait")
_SPAWN_MORE = (
    *("job_id", "parent_job_id", "parent_msg_id", "caller_session_id", "caller_msg_id", "cwd", "env"),
    *("origin_tool_call_id", "timeout_s", "metadata", "foreground", "notify", "create_session", "waiting_job_id"),
)


def spawn_job(context: Context, fields: Fields) -> dict[str, Any]:
    """Submits a job; with `wait` answers when it has ended (`waiting_job_id`: as in `await_jobs`).

    `create_session` makes a session that is missing.
    """
    read = _Reader("spawn_job", fields, _SPAWN + _SPAWN_MORE)
    request = SpawnRequest(
        prompt=read.text("prompt"),
        parent_session_id=check_session_id(read.text("session_id")),
        description=read.text("description", default=""),
        agent_id=read.text("agent_id", default="main"),
        context_mode=read.one_of("context", [mode.value for mode in ContextMode], default=ContextMode.INHERIT.value),
        parent_msg_id=read.checked("parent_msg_id", check_node_id),
        parent_job_id=read.checked("parent_job_id", check_job_id),
        caller_session_id=read.checked("caller_session_id", check_session_id),
        caller_msg_id=read.checked("caller_msg_id", check_node_id),
        origin_tool_call_id=read.optional_text("origin_tool_call_id"),
        job_id=read.checked("job_id", check_job_id),
        cwd=read.raw_text("cwd"),
        env=read.environment("env"),
        timeout_s=read.seconds("timeout_s"),
        metadata=read.table("metadata"),
        foreground=read.flag("foreground"),
        notify=read.flag("notify"),
    )
    wait = read.flag("wait")
    waiting_job_id = read.checked("waiting_job_id", check_job_id)
    if read.flag("create_session"):
        _have_session(context, request.parent_session_id)
    job = context.runner.submit(request)
    if wait:
        job = _await(context, [job.job_id], "all", None, waiting_job_id)[0]
    return {"job_id": job.job_id, "status": job.status.value, "parent_msg_id": job.parent_msg_id}


def list_jobs(context: Context, fields: Fields) -> dict[str, Any]:
    """The newest jobs first; without `session_id` those of all sessions.

    What cannot be read hides no other job: the answer has `unread` then, each with its session and what is wrong.
    """
    read = _Reader(
        "list_jobs", fields, ("session_id", "status_filter", "limit", "parent_job_id", "parent_msg_id", "before")
    )
    unread: list[dict[str, Any]] = []
    jobs = context.runner.list(
        session_id=read.checked("session_id", check_session_id),
        status=read.statuses("status_filter"),
        parent_job_id=read.checked("parent_job_id", check_job_id),
        parent_msg_id=read.checked("parent_msg_id", check_node_id),
        limit=read.whole("limit", 1, LIST_LIMIT, default=50),
        before=read.checked("before", check_job_id),
        on_damage=lambda session_id, error: unread.append({**error_to_wire(error), "session_id": session_id}),
    )
    tasks = [job_to_wire(job) for job in jobs]
    return {"tasks": tasks, "unread": unread} if unread else {"tasks": tasks}


def get_job(context: Context, fields: Fields) -> dict[str, Any]:
    """The entity; while it runs also what it has said so far (`partial_result`)."""
    read = _Reader("get_job", fields, ("job_id",))
    job = context.runner.get(read.checked("job_id", _check_prefix, required=True))
    fields_of_job = job_to_wire(job)
    partial = fields_of_job["result_text"] if job.status is JobStatus.RUNNING else None
    if partial is not None:
        fields_of_job["result_text"] = None  # as the row has it while it runs (D1)
    return {**fields_of_job, "partial_result": partial}


def cancel_job(context: Context, fields: Fields) -> dict[str, Any]:
    """Asks a job to stop and answers with its present status; never waits for the worker."""
    read = _Reader("cancel_job", fields, ("job_id", "reason"))
    job_id = read.checked("job_id", _check_prefix, required=True)
    job = context.runner.cancel(job_id, reason=read.optional_text("reason"))
    return {"job_id": job.job_id, "status": job.status.value}


# --- what the command line needs beside them -----------------------------------------------------------------


def await_jobs(context: Context, fields: Fields) -> dict[str, Any]:
    """Waits on the server for all or any of the jobs, at most `timeout_s`, and answers with all as they stand.

    `waiting_job_id` names the job that waits, so that its slot is lent meanwhile.
    """
    read = _Reader("await_jobs", fields, ("job_ids", "mode", "timeout_s", "waiting_job_id"))
    ids = read.checked_list("job_ids", _check_prefix, AWAIT_LIMIT)
    mode = read.one_of("mode", ["all", "any"], default="all")
    timeout_s = read.seconds("timeout_s", zero=True)
    waiting_job_id = read.checked("waiting_job_id", check_job_id)
    jobs = _await(context, ids, mode, timeout_s, waiting_job_id)
    met = (any if mode == "any" else all)(job.terminal for job in jobs)
    return {"tasks": [job_to_wire(job) for job in jobs], "timed_out": not met}


def cancel_session(context: Context, fields: Fields) -> dict[str, Any]:
    """Asks every unfinished job of a session to stop."""
    read = _Reader("cancel_session", fields, ("session_id", "reason"))
    session_id = check_session_id(read.text("session_id"))
    jobs = context.runner.cancel_session(session_id, reason=read.optional_text("reason"))
    return {"tasks": [{"job_id": job.job_id, "status": job.status.value} for job in jobs]}


# --- background commands --------------------------------------------------------------------------------------


def start_task(context: Context, fields: Fields) -> dict[str, Any]:
    """Starts a background command that belongs to this process; answers when it is durably running.

    `command` is a text for the shell or a list of arguments. The same `task_id`, or `origin_tool_call_id`, again
    returns the first one.
    """
    read = _Reader(
        "start_task",
        fields,
        (
            *("session_id", "command", "cwd", "env", "timeout_s", "output_limit_bytes", "on_limit"),
            *("origin_tool_call_id", "description", "task_id", "create_session"),
        ),
    )
    session_id = check_session_id(read.text("session_id"))
    options = {
        "cwd": read.raw_text("cwd"),
        "env": read.environment("env"),
        "timeout_s": read.seconds("timeout_s"),
        "origin_tool_call_id": read.optional_text("origin_tool_call_id"),
        "description": read.text("description", default=""),
        "task_id": read.checked("task_id", check_job_id),
        "on_limit": read.one_of("on_limit", ["stop", "drop"], default="stop"),
        "output_limit_bytes": read.whole("output_limit_bytes", 0, 2**50, default=OUTPUT_LIMIT_BYTES),
    }
    command = read.command("command")
    supervisor = _supervisor(context)
    if read.flag("create_session"):
        _have_session(context, session_id)
    return task_to_wire(supervisor.start(session_id, command, **options))


def list_tasks(context: Context, fields: Fields) -> dict[str, Any]:
    """The background commands of a session, newest first."""
    read = _Reader("list_tasks", fields, ("session_id",))
    session_id = check_session_id(read.text("session_id"))
    return {"tasks": [task_to_wire(task) for task in _supervisor(context).list(session_id)]}


def get_task(context: Context, fields: Fields) -> dict[str, Any]:
    read = _Reader("get_task", fields, ("task_id",))
    return task_to_wire(_supervisor(context).get(read.checked("task_id", _check_prefix, required=True)))


def stop_task(context: Context, fields: Fields) -> dict[str, Any]:
    """Asks a background command to stop and answers with its present status."""
    read = _Reader("stop_task", fields, ("task_id", "reason", "grace_s"))
    task_id = read.checked("task_id", _check_prefix, required=True)
    grace_s = read.seconds("grace_s", zero=True)
    options = {} if grace_s is None else {"grace_s": grace_s}
    task = _supervisor(context).stop(task_id, read.optional_text("reason"), **options)
    return {"task_id": task.task_id, "status": task.status.value}


def _supervisor(context: Context) -> Any:
    if context.tasks is None:
        raise InvalidInput("nobody looks after background commands here")
    return context.tasks


def stats(context: Context, fields: Fields) -> dict[str, Any]:
    _Reader("stats", fields, ())
    return {**_as_table(context.runner.stats()), "host": dict(context.about)}


def ping(context: Context, fields: Fields) -> dict[str, Any]:
    _Reader("ping", fields, ())
    return dict(context.about)


def shutdown(context: Context, fields: Fields) -> dict[str, Any]:
    """Asks the host to end, in the ordered way; answers before it does."""
    _Reader("shutdown", fields, ())
    context.stop("shutdown was asked for")
    return {"stopping": True}


def leave(context: Context, fields: Fields) -> dict[str, Any]:
    """Asks an idle host to make room for another one; work and other clients come first."""
    _Reader("leave", fields, ())
    return {"leaving": context.leave()}


TABLE: Mapping[str, Handler] = {
    handler.__name__: handler
    for handler in (
        *(spawn_job, list_jobs, get_job, cancel_job, await_jobs, cancel_session),
        *(start_task, list_tasks, get_task, stop_task),
        *(stats, ping, leave, shutdown),
    )
}
#: actions that change nothing: when their answer is lost they can simply be asked again
READING = frozenset({"list_jobs", "get_job", "await_jobs", "list_tasks", "get_task", "stats", "ping"})


# --- parts --------------------------------------------------------------------------------------------------


def _have_session(context: Context, session_id: str) -> None:
    if not context.store.has_session(session_id):
        try:
            context.store.create_session(session_id)
        except SessionExists:
            if not context.store.has_session(session_id):
                raise  # the same name in other letter case


def _await(
    context: Context, ids: Sequence[str], mode: str, timeout_s: float | None, waiting_job_id: str | None
) -> list[Job]:
    """One wait, which looks up now and then, so that no thread waits on behalf of a client that is gone."""
    clock = context.store.clock
    deadline = None if timeout_s is None else clock.monotonic() + timeout_s
    enough = threading.Event()
    wait = context.runner.open_wait(ids, mode, enough.set, waiting_job_id=waiting_job_id)
    gone = False
    try:
        while not wait.done:
            left = _SLICE_S if deadline is None else deadline - clock.monotonic()
            if left <= 0 or clock.wait(enough, min(left, _SLICE_S)):
                break
            gone = context.gone()
            if gone:
                raise Closed("the connection ended while waiting; the jobs go on")
    finally:
        wait.close(block=not gone)
    jobs: list[Job] = wait.answers()
    return jobs


def _as_table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else attrs.asdict(value)


def _check_prefix(text: str) -> str:
    if not is_prefix(text):
        raise InvalidInput(f"{text!r} cannot be a job id or the beginning of one")
    return text


class _Reader:
    """The fields of one request, each taken out with its check; errors name action and field."""

    def __init__(self, action: str, fields: Fields, allowed: Sequence[str]) -> None:
        self._action = action
        self._fields = fields
        unknown = [name for name in fields if name not in allowed]
        if unknown:
            may = ", ".join(allowed) or "none"
            raise InvalidInput(f"{action} has no field {unknown[0]!r}; it has {may}", field=str(unknown[0]))

    def _wrong(self, name: str, wanted: str) -> InvalidInput:
        value = repr(self._fields.get(name))
        shown = value if len(value) <= 80 else value[:79] + "…"
        return InvalidInput(f"{self._action}: {name} must be {wanted}, not {shown}", field=name)

    def raw_text(self, name: str) -> str | None:
        """Text that goes to the operating system (a path): it need not be UTF-8, but has no NUL."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value or "\0" in value:
            raise self._wrong(name, "text without NUL")
        return value

    def optional_text(self, name: str) -> str | None:
        """Text that is stored: it must be writable as UTF-8."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self._wrong(name, "text that can be written as UTF-8") from error
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.optional_text(name)
        if value is None:
            value = default
        if value is None:
            raise InvalidInput(f"{self._action} needs the field {name}", field=name)
        return value

    def checked(self, name: str, check: Callable[[str], str], *, required: bool = False) -> Any:
        value = self.optional_text(name)
        if value is None and required:
            raise InvalidInput(f"{self._action} needs the field {name}", field=name)
        return None if value is None else check(value)

    def checked_list(self, name: str, check: Callable[[str], str], most: int) -> list[str]:
        value = self._fields.get(name)
        if not isinstance(value, list) or not 1 <= len(value) <= most or not all(isinstance(i, str) for i in value):
            raise self._wrong(name, f"a list of 1 to {most:,} ids")
        return [check(item) for item in value]

    def one_of(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self._fields.get(name)
        if value is None:
            return default
        if value not in allowed:
            raise self._wrong(name, " or ".join(map(repr, allowed)))
        return str(value)

    def statuses(self, name: str) -> list[JobStatus] | None:
        value = self._fields.get(name)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        try:
            return [JobStatus(item) for item in values]
        except ValueError as error:
            raise self._wrong(name, "one or a list of " + ", ".join(status.value for status in JobStatus)) from error

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return bool(value)

    def whole(self, name: str, least: int, most: int, default: int) -> int:
        value = self._fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, f"a whole number from {least} to {most:,}")
        return value

    def seconds(self, name: str, *, zero: bool = False) -> float | None:
        value = self._fields.get(name)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < 0 or (value == 0 and not zero):
            raise self._wrong(name, f"a number of seconds {'from' if zero else 'above'} 0")
        return float(value)

    def command(self, name: str) -> str | list[str]:
        """What is to be run goes to the operating system: it need not be UTF-8, but has no NUL."""
        value = self._fields.get(name)
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not words or not all(isinstance(w, str) and "\0" not in w for w in words):
            raise self._wrong(name, "a text for the shell or a list of arguments, without NUL")
        return value  # type: ignore[return-value]

    def table(self, name: str) -> dict[str, Any] | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def environment(self, name: str) -> dict[str, str] | None:
        value = self.table(name)
        if value is None:
            return None
        for key, text in value.items():
            if not isinstance(text, str) or not key or "=" in key or "\0" in key or "\0" in text:
                # The value is not shown: environments hold secrets.
                raise InvalidInput(f"{self._action}: {name} must map names to text; {key!r} does not", field=name)
        return value
