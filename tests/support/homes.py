"""A home with one of everything: jobs that ended in each way, pages that closed, background commands, logs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from openjobs import GitJobStore, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult
from openjobs.agents import Profiles
from openjobs.processes import ProcessSupervisor

from .polling import eventually

SESSION = "demo"


@attrs.frozen
class Filled:
    #: by what they are: completed, errored, cancelled, long, command; and the many
    jobs: Mapping[str, str]
    #: completed, failed, cancelled
    tasks: Mapping[str, str]


def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    if request.prompt == "wait":
        request.partial("half of it")
        cancel_event.wait(30)
        return TurnResult(final_text="half of it")
    if request.prompt == "fail":
        raise ValueError("it was told to fail")
    return TurnResult(final_text=request.prompt.upper())


def fill(home: Path, *, many: int = 4, session_id: str = SESSION, durability: str = "relaxed") -> Filled:
    """`many` more small jobs; 32 close a page."""
    with GitJobStore(home, durability) as store:
        store.create_session(session_id, title="one of everything")
        store.session(session_id).append("user", "a message before everything")
        jobs: dict[str, str] = {}
        with JobRunner(store, sync_fn=turn) as runner:

            def submit(name: str, prompt: str, **fields: Any) -> None:
                request = SpawnRequest(prompt=prompt, description=name, parent_session_id=session_id, **fields)
                jobs[name] = runner.submit(request).job_id

            submit("completed", "say hello", origin_tool_call_id="call-1")
            submit("errored", "fail")
            submit("long", "word " * 4000)
            submit("cancelled", "wait")
            until_running(runner, jobs["cancelled"])
            runner.cancel(jobs["cancelled"], reason="enough")
            for number in range(many):
                submit(f"small {number}", f"number {number}")
            runner.await_tasks(list(jobs.values()), timeout=60)
        with Profiles(home, disk=store.disk) as profiles, JobRunner(store, profiles=profiles) as runner:
            request = SpawnRequest(
                prompt="echo out; echo err >&2", description="command", parent_session_id=session_id, agent_id="shell"
            )
            jobs["command"] = runner.submit(request).job_id
            runner.await_job(jobs["command"], timeout=30)
        with ProcessSupervisor(store) as supervisor:
            tasks = {
                "completed": supervisor.start(session_id, ["sh", "-c", "echo one; echo two >&2"]).task_id,
                "failed": supervisor.start(session_id, "exit 3", origin_tool_call_id="call-2").task_id,
                "cancelled": supervisor.start(session_id, ["sleep", "60"]).task_id,
            }
            supervisor.stop(tasks["cancelled"], reason="enough", grace_s=1.0)
            for task_id in tasks.values():
                supervisor.wait(task_id, timeout=30)
    return Filled(jobs, tasks)


def until_running(runner: JobRunner, job_id: str) -> None:
    """Until it runs, so that a cancel meets it running."""
    eventually(lambda: runner.store.get(job_id).status is JobStatus.RUNNING)
