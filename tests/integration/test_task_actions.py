"""Background commands through the action table, as the home's socket and other faces reach them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs.errors import IdempotencyConflict, InvalidInput, UnknownSession, UnknownTask
from openjobs.host.actions import Context, answer, perform
from openjobs.ids import new_id
from openjobs.processes import ProcessSupervisor
from openjobs.store import GitJobStore
from tests.support import eventually

BOUND_S = 20.0
ENV = {"PATH": os.environ.get("PATH", os.defpath)}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store, ProcessSupervisor(store) as supervisor:
        yield Context(runner=None, store=store, tasks=supervisor)
        for session_id in store.sessions():
            for task in supervisor.list(session_id):
                supervisor.stop(task.task_id, grace_s=0)
                supervisor.wait(task.task_id, BOUND_S)


def start(context: Context, command: Any, **fields: Any) -> dict[str, Any]:
    wanted = {"session_id": "s", "command": command, "env": ENV, "create_session": True, **fields}
    return perform(context, "start_task", wanted)


def test_a_command_is_started_seen_and_stopped(context: Context) -> None:
    """Every answer can be sent as JSON; a stop answers with the status as it is then."""
    task = start(context, ["sleep", "60"], description="rest", timeout_s=30)
    assert (task["status"], task["description"], task["command"]) == ("running", "rest", ["sleep", "60"])
    json.dumps(task)
    seen = perform(context, "get_task", {"task_id": task["task_id"][:8]})
    assert (seen["task_id"], seen["child"]) == (task["task_id"], task["child"])
    assert [one["task_id"] for one in perform(context, "list_tasks", {"session_id": "s"})["tasks"]] == [task["task_id"]]
    stopped = perform(context, "stop_task", {"task_id": task["task_id"], "reason": "enough", "grace_s": 1})
    assert stopped == {"task_id": task["task_id"], "status": "running"}
    ended = eventually(
        lambda: (found := perform(context, "get_task", {"task_id": task["task_id"]}))["ended_at"] and found
    )
    assert (ended["status"], ended["signal"], ended["stop_reason"]) == ("cancelled", 15, "enough")


def test_the_same_id_again_starts_nothing(context: Context, tmp_path: Path) -> None:
    """A client whose host left asks the next one with the id that it chose."""
    task_id, command = new_id(), f"echo x >> {tmp_path}/ran"
    answers = [start(context, command, task_id=task_id) for _ in range(3)]
    assert {one["task_id"] for one in answers} == {task_id}
    context.tasks.wait(task_id, BOUND_S)
    assert (tmp_path / "ran").read_text() == "x\n"
    with pytest.raises(IdempotencyConflict):
        start(context, "something else", task_id=task_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"command": []},
        {"command": [1]},
        {"command": "a\0b"},
        {"command": None},
        {"timeout_s": 0},
        {"timeout_s": "5"},
        {"on_limit": "explode"},
        {"output_limit_bytes": -1},
        {"task_id": "1"},
        {"env": {"A=B": "c"}},
        {"cwd": "a\0"},
        {"session_id": "../x"},
        {"colour": "red"},
    ],
)
def test_every_field_is_checked_before_anything_is_done(fields: dict[str, Any], context: Context) -> None:
    """A wrong one is named, and neither a session nor a task is made."""
    with pytest.raises(InvalidInput):
        start(context, **{"command": "true", **fields})
    assert context.store.sessions() == []


def test_what_is_unknown_is_said_to_be(context: Context) -> None:
    """A session that is not to be made, a task that is not there; and a face without a supervisor."""
    with pytest.raises(UnknownSession):
        perform(context, "start_task", {"session_id": "nope", "command": "true"})
    with pytest.raises(UnknownTask):
        perform(context, "stop_task", {"task_id": "ffffffff"})
    reply = answer(Context(runner=None, store=context.store), {"action": "list_tasks", "session_id": "s", "id": 7})
    assert (reply["ok"], reply["id"], reply["error"]["code"]) == (False, 7, "invalid_input")
