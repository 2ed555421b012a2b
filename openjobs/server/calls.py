"""What can be asked, whichever way it came in: the functions behind the WebSocket's actions and the HTTP routes.

Each checks its fields, since a misspelt option would otherwise be silently lost, and raises the
typed errors of the action table.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..clock import to_text
from ..errors import InvalidInput, OpenJobsError, UnknownTask
from ..host.wire import error_to_wire
from ..ids import check_node_id, check_session_id, is_prefix
from .markdown import to_html
from .rows import JOB, PROCESS, job_row, process_row, whole_job, whole_process
from .summary import KNOWN_STATUSES, Filter, statuses_of

if TYPE_CHECKING:
    from .app import App

Fields = Mapping[str, Any]
Answer = dict[str, Any]

LIST_LIMIT = 500
CANCEL_LIMIT = 1_000
AWAIT_LIMIT = 1_000
LONGEST_WAIT_S = 86_400.0
CHILDREN_LIMIT = 200
_CANCEL_THREADS = 16

_SPAWN = frozenset(
    {"session_id", "prompt", "description", "agent_id", "context", "wait"}
    | {"job_id", "parent_job_id", "parent_msg_id", "caller_session_id", "origin_tool_call_id", "cwd"}
    | {"timeout_s", "metadata", "foreground", "create_session", "notify", "caller_msg_id"}
)


def check_fields(action: str, fields: Fields, allowed: Iterable[str]) -> None:
    allowed = set(allowed)
    for name in fields:
        if name not in allowed:
            may = ", ".join(sorted(allowed)) or "none"
            raise InvalidInput(f"{action} has no field {str(name)[:40]!r}; it has {may}", field=str(name)[:40])


def text_of(action: str, fields: Fields, name: str, *, required: bool = False, most: int = 10_000) -> str | None:
    value = fields.get(name)
    if value is None:
        if required:
            raise InvalidInput(f"{action} needs the field {name}", field=name)
        return None
    if not isinstance(value, str) or len(value) > most:
        raise InvalidInput(f"{action}: {name} must be text of at most {most:,} characters", field=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{action}: {name} must be text that can be written as UTF-8", field=name) from error
    return value


def id_of(action: str, fields: Fields, name: str) -> str:
    value = text_of(action, fields, name, required=True, most=200)
    assert value is not None
    value = value.strip().lower()
    if not is_prefix(value):
        raise InvalidInput(f"{action}: {value[:40]!r} cannot be an id or the beginning of one", field=name)
    return value


def ids_of(action: str, fields: Fields, name: str, most: int) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise InvalidInput(f"{action}: {name} must be a list of 1 to {most:,} ids", field=name)
    return [id_of(action, {name: item}, name) for item in value]


def seconds_of(action: str, fields: Fields, name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise InvalidInput(f"{action}: {name} must be a number of seconds from 0", field=name)
    return float(min(value, LONGEST_WAIT_S))


def whole_of(action: str, fields: Fields, name: str, least: int, most: int, default: int | None) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInput(f"{action}: {name} must be a whole number from {least} to {most:,}", field=name)
    return value


def session_of(action: str, fields: Fields, *, required: bool = False) -> str | None:
    value = text_of(action, fields, "session_id", required=required, most=200)
    return None if value is None else check_session_id(value)


def filter_of(action: str, fields: Fields) -> Filter:
    """The fields of `list_jobs`."""
    names = fields.get("status_filter")
    names = [] if names is None else names if isinstance(names, list) else [names]
    for name in names:
        if not isinstance(name, str) or name not in KNOWN_STATUSES:
            raise InvalidInput(
                f"{action}: status_filter must be one or a list of {', '.join(sorted(KNOWN_STATUSES))}",
                field="status_filter",
            )
    kind = text_of(action, fields, "kind") or JOB
    if kind not in (JOB, PROCESS, "all"):
        raise InvalidInput(f"{action}: kind must be 'job', 'process' or 'all'", field="kind")
    parent = fields.get("parent_job_id")
    message = text_of(action, fields, "parent_msg_id")
    return Filter(
        session_id=session_of(action, fields),
        statuses=statuses_of(names),
        agent_id=text_of(action, fields, "agent_id"),
        text=text_of(action, fields, "text", most=1_000),
        kind=kind,
        parent_job_id=None if parent is None else id_of(action, fields, "parent_job_id"),
        parent_msg_id=None if message is None else check_node_id(message),
    )


class Calls:
    """Every method but the `async` ones may wait for a disk and belongs on a worker thread."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._backend = app.backend
        self._feed = app.feed

    # --- reading ---

    def list_jobs(self, fields: Fields) -> Answer:
        check_fields(
            "list_jobs",
            fields,
            (
                *("session_id", "status_filter", "limit", "agent_id", "text", "kind"),
                *("before", "parent_job_id", "parent_msg_id"),
            ),
        )
        wanted = filter_of("list_jobs", fields)
        limit = whole_of("list_jobs", fields, "limit", 1, LIST_LIMIT, 100)
        before = None if fields.get("before") is None else id_of("list_jobs", fields, "before")
        assert limit is not None
        return self._feed.page(wanted, before, limit)

    def get_job(self, fields: Fields) -> Answer:
        """The job, whole (docs/server.md, "Shapes")."""
        check_fields("get_job", fields, ("job_id",))
        job, partial = self._backend.get(id_of("get_job", fields, "job_id"))
        self._feed.refresh(job)
        row = self._feed.row(job.job_id) or job_row(job)
        parent = None
        if job.parent_job_id is not None:
            parent = self._feed.row(job.parent_job_id) or self._stored_row(job.parent_job_id)
        whole = whole_job(job, row, partial)
        return {
            **whole,
            "prompt_html": to_html(whole["prompt"]),
            "result_html": to_html(whole["result_text"]),
            "partial_html": to_html(whole["partial_result"]),
            "parent": parent,
            "child_jobs": self._feed.children(job.job_id, CHILDREN_LIMIT),
            "session_title": self._title(job.parent_session_id),
        }

    def _stored_row(self, job_id: str) -> Answer | None:
        try:
            return job_row(self._backend.outcome(job_id))
        except OpenJobsError:
            return None

    def _title(self, session_id: str) -> str | None:
        try:
            return self._app.metas.get(session_id).title
        except OpenJobsError:
            return None

    def history(self, fields: Fields) -> Answer:
        check_fields("history", fields, ("job_id",))
        job = self._backend.outcome(id_of("history", fields, "job_id"))
        commits = [
            {
                "commit_id": each.commit_id,
                "time": to_text(each.time),
                "status": each.status.value,
                "kind": each.kind,
                "subject": each.subject,
                "runner_id": each.runner_id,
            }
            for each in self._app.store.history(job.job_id)
        ]
        return {"job_id": job.job_id, "commits": commits}

    def get_task(self, fields: Fields) -> Answer:
        check_fields("get_task", fields, ("task_id",))
        if self._backend.tasks is None:
            raise UnknownTask("there are no background commands here")
        task = self._backend.tasks.get(id_of("get_task", fields, "task_id"))
        return whole_process(task, self._feed.row(task.task_id) or process_row(task))

    def sessions(self) -> Answer:
        known = self._feed.sessions()
        found = []
        store = self._app.store
        for session_id in sorted([*store.sessions(), *(each for each, _ in store.misplaced())]):
            about = known.get(session_id, {})
            title, created_at, head_id, damaged = "", None, None, None
            try:
                meta = self._app.metas.get(session_id, about.get("changed_at", ""))
                title, created_at, head_id = meta.title, to_text(meta.created_at), meta.head_id
            except (OpenJobsError, OSError) as error:
                damaged = str(error)
            found.append(
                {
                    "session_id": session_id,
                    "title": title,
                    "created_at": created_at,
                    "head_id": head_id,
                    "changed_at": about.get("changed_at") or created_at,
                    "counts": dict(about.get("counts", {})),
                    "running": about.get("running", 0),
                    "damaged": damaged,
                }
            )
        found.sort(key=lambda each: each["changed_at"] or "", reverse=True)
        return {"sessions": found}

    def conversation(self, fields: Fields) -> Answer:
        check_fields("conversation", fields, ("session_id", "head", "before", "limit"))
        session_id = session_of("conversation", fields, required=True)
        assert session_id is not None
        head, before = text_of("conversation", fields, "head"), text_of("conversation", fields, "before")
        limit = whole_of("conversation", fields, "limit", 1, 200, 100)
        assert limit is not None
        return self._app.conversations.show(session_id, head, before, limit, self._feed.subjects)

    def profiles(self) -> Answer:
        found = self._backend.profiles()
        return {"profiles": [{"agent_id": each.agent_id, "kind": each.kind} for each in found]}

    # --- changing ---

    def spawn_job(self, fields: Fields) -> Answer:
        """Submits; `wait` is the caller's to do."""
        check_fields("spawn_job", fields, _SPAWN)
        wanted = {name: value for name, value in fields.items() if name != "wait"}
        text_of("spawn_job", fields, "prompt", required=True, most=1 << 20)
        if not isinstance(fields.get("wait", False) or False, bool):
            raise InvalidInput("spawn_job: wait must be true or false", field="wait")
        return self._backend.spawn(wanted)

    async def spawn_and_wait(self, fields: Fields) -> Answer:
        answer = await self._app.change(self.spawn_job, fields)
        if fields.get("wait"):
            jobs = await self._backend.wait_for([answer["job_id"]], "all", None)
            answer = {**answer, "status": jobs[0].status.value}
        return answer

    def cancel_job(self, fields: Fields) -> Answer:
        check_fields("cancel_job", fields, ("job_id", "reason"))
        reason = text_of("cancel_job", fields, "reason")
        answer = self._backend.cancel(id_of("cancel_job", fields, "job_id"), reason)
        self._seen(answer["job_id"])
        return answer

    def _seen(self, job_id: str) -> None:
        """What was asked for here is shown at once, whoever's job it is."""
        try:
            self._feed.refresh(self._backend.outcome(job_id))
        except OpenJobsError:
            pass  # the watcher will see it

    def cancel_jobs(self, fields: Fields) -> Answer:
        check_fields("cancel_jobs", fields, ("job_ids", "reason"))
        reason = text_of("cancel_jobs", fields, "reason")
        ids = ids_of("cancel_jobs", fields, "job_ids", CANCEL_LIMIT)

        def cancel(job_id: str) -> Answer:
            try:
                return self._backend.cancel(job_id, reason)
            except OpenJobsError as error:
                told = error_to_wire(error)
                return {"job_id": job_id, "error": {"code": told["code"], "message": told["message"]}}

        # Several at a time share a trip to the disk.
        with ThreadPoolExecutor(min(len(ids), _CANCEL_THREADS), thread_name_prefix="openjobs server cancel") as pool:
            return {"results": list(pool.map(cancel, ids))}

    def cancel_session(self, fields: Fields) -> Answer:
        check_fields("cancel_session", fields, ("session_id", "reason"))
        session_id = session_of("cancel_session", fields, required=True)
        assert session_id is not None
        return {"tasks": self._backend.cancel_session(session_id, text_of("cancel_session", fields, "reason"))}

    def stop_task(self, fields: Fields) -> Answer:
        check_fields("stop_task", fields, ("task_id", "reason", "grace_s"))
        wanted = {
            "task_id": id_of("stop_task", fields, "task_id"),
            "reason": text_of("stop_task", fields, "reason"),
            "grace_s": seconds_of("stop_task", fields, "grace_s"),
        }
        return self._backend.stop_task({name: value for name, value in wanted.items() if value is not None})

    def checkout(self, fields: Fields) -> Answer:
        check_fields("checkout", fields, ("session_id", "node_id"))
        session_id = session_of("checkout", fields, required=True)
        node_id = text_of("checkout", fields, "node_id", required=True)
        assert session_id is not None
        assert node_id is not None
        session = self._app.store.session(session_id)
        session.checkout(check_node_id(node_id))
        return {"session_id": session_id, "head_id": node_id}

    async def await_jobs(self, fields: Fields) -> Answer:
        check_fields("await_jobs", fields, ("job_ids", "mode", "timeout_s"))
        ids = ids_of("await_jobs", fields, "job_ids", AWAIT_LIMIT)
        mode = text_of("await_jobs", fields, "mode") or "all"
        if mode not in ("all", "any"):
            raise InvalidInput("await_jobs: mode must be 'all' or 'any'", field="mode")
        jobs = await self._backend.wait_for(ids, mode, seconds_of("await_jobs", fields, "timeout_s"))
        met = (any if mode == "any" else all)(job.terminal for job in jobs)
        return {"tasks": await self._app.work(self._feed.rows_of, jobs), "timed_out": not met}

    def about(self) -> Answer:
        stats = self._backend.stats()
        home = self._app.store.home
        return {
            "version": __version__,
            "mode": self._backend.mode,
            "home": None if home is None else os.fspath(home),
            "pid": os.getpid(),
            "epoch": self._feed.epoch,
            "seq": self._feed.seq,
            "workers": stats.get("workers"),
            "now": to_text(self._app.store.clock.now()),
            "limits": {"list": LIST_LIMIT, "cancel": CANCEL_LIMIT, "frame_bytes": 1 << 20},
        }


#: those of the actions that commit something
CHANGING = frozenset({"cancel_job", "cancel_jobs", "cancel_session", "stop_task"})
#: by name, for the WebSocket: those that run on a worker thread
ACTIONS: Mapping[str, Callable[[Calls, Fields], Answer]] = {
    "list_jobs": Calls.list_jobs,
    "get_job": Calls.get_job,
    "cancel_job": Calls.cancel_job,
    "cancel_jobs": Calls.cancel_jobs,
    "cancel_session": Calls.cancel_session,
    "get_task": Calls.get_task,
    "stop_task": Calls.stop_task,
}
