"""Commands as an agent's tool: real processes, read and stopped with the tools that jobs are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.processes import ProcessSupervisor, TaskStatus
from openjobs.tools import AgentTools
from tests.support import eventually

PATIENCE_S = 30.0


class Host:
    def __init__(self, home: Path) -> None:
        self.store = GitJobStore(home, durability="relaxed")
        self.store.create_session("s1")
        self.store.create_session("s2")
        self.processes = ProcessSupervisor(self.store)
        self.work: Any = None
        self.runner = JobRunner(self.store, 2, self.turn)
        self.tools = AgentTools(self.runner, "s1", processes=self.processes, plan_mode=True)

    def turn(self, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        return TurnResult(final_text=self.work(request, AgentTools.for_turn(request, processes=self.processes)))

    def close(self) -> None:
        self.runner.shutdown()
        self.processes.close()
        self.store.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "home")
    yield host
    for session_id in ("s1", "s2"):
        for task in host.processes.list(session_id):
            host.processes.stop(task.task_id, grace_s=0)
            host.processes.wait(task.task_id, PATIENCE_S)
    host.close()


@pytest.fixture
def tools(host: Host) -> AgentTools:
    return host.tools


def background(tools: AgentTools, command: str, **more: Any) -> dict[str, Any]:
    started = tools.shell(command, run_in_background=True, **more)
    assert isinstance(started, dict)
    return started


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo one; echo two", "one\ntwo"),
        ("echo one >&2; echo two >&2", "one\ntwo"),
        ("true", ""),
        ("echo no >&2; exit 3", "no\n[exit code 3]"),
        ("exit 3", "[exit code 3]"),
        ("kill -9 $$", "[failed, ended by SIGKILL]"),
        ("printf 'caf\\303\\251 \\377'", "café \ufffd"),
    ],
)
def test_a_foreground_command_gives_its_output(tools: AgentTools, command: str, said: str) -> None:
    """Both streams, and how it ended where that is not with 0."""
    text = tools.call("shell", {"command": command})
    assert text == said
    assert not text.is_error


def test_a_command_that_takes_too_long_is_ended(tools: AgentTools) -> None:
    """With what it had written."""
    assert tools.shell("echo begun; sleep 60", timeout=300) == "begun\n[timed out after 300 ms]"


def test_a_long_output_is_cut_and_its_whole_is_in_a_file(tools: AgentTools, host: Host) -> None:
    """Beginning and end, and the log that has every byte."""
    short = AgentTools(host.runner, "s1", processes=host.processes, result_limit_chars=100)
    for lines in (100, 20_000):  # what fits into one read, and what does not
        text = short.shell(f"seq 1 {lines}")
        assert isinstance(text, str)
        assert text.startswith("1\n2\n3\n")
        assert text.endswith(f"\n{lines}")
        assert len(text) < 100 + 300
        path = Path(text.partition("the whole is in ")[2].partition("]\n")[0])
        assert path.read_text() == "".join(f"{n}\n" for n in range(1, lines + 1))


def test_a_background_command_is_read_and_stopped_like_a_job(tools: AgentTools, host: Host) -> None:
    """Scenario B and D for a command: the same tools take its id, and the list shows it."""
    started = background(tools, "echo ready; sleep 60", description="the server")
    task_id = started["job_id"]
    assert started["status"] == "running"
    eventually(lambda: Path(started["output_file"]).exists() and Path(started["output_file"]).read_text() == "ready\n")
    look = tools.job_output(task_id[:8], block=False)
    assert look.startswith(f"task {task_id}: running for ")
    assert look.endswith(
        "(the server)\nYou will be told when it ends; there is no need to ask again.\n\nSo far:\nready"
    )
    assert tools.job_output(task_id, timeout=1).startswith(f"task {task_id}: running")
    (row,) = tools.list_jobs()
    assert (row["job_id"], row["kind"], row["status"], row["subject"]) == (task_id, "shell", "running", "the server")
    assert tools.call("list_jobs", {}).startswith(f"{task_id[:8]}  shell  running for ")
    assert tools.job_stop(task_id, "enough") == {"ok": True, "status": "running"}
    text = tools.job_output(task_id)
    assert text.startswith(f"task {task_id}: cancelled, after ")
    assert text.endswith("\n\nready")
    assert tools.job_stop(task_id) == {"ok": True, "status": "cancelled"}


def test_an_end_that_was_read_is_consumed(tools: AgentTools, host: Host) -> None:
    """Spec 000: who has read it need not be told; who has not, is."""
    read, unread = background(tools, "exit 3")["job_id"], background(tools, "true")["job_id"]
    assert "failed, exit code 3, after" in tools.job_output(read)
    host.processes.wait(unread, PATIENCE_S)
    assert host.processes.get(read).consumed
    assert [notice.id for notice in host.runner.notices.pending("s1")] == [unread]


def test_jobs_and_commands_are_waited_for_together(tools: AgentTools, host: Host) -> None:
    """In plan mode, all or any."""
    go = threading.Event()
    host.work = lambda request, tools: str(go.wait(PATIENCE_S))
    job = tools.agent("x", "a job", run_in_background=True)
    assert isinstance(job, dict)
    task = background(tools, "echo done")
    ids = [job["job_id"], task["job_id"]]
    text = tools.await_tasks(ids, "any", 60_000)
    assert text.startswith(f"1 of 2 have ended.\n\njob {ids[0]}: ")
    assert f"\n\ntask {ids[1]}: completed, exit code 0, after " in text
    go.set()
    assert tools.await_tasks(ids, "all", 60_000).startswith("2 of 2 have ended.")


def test_the_hosts_stop_ends_a_foreground_command(tools: AgentTools, host: Host, tmp_path: Path) -> None:
    """D5: with its whole tree, and with what it had written."""
    stop = threading.Event()
    ready = tmp_path / "ready"
    stopper = threading.Thread(target=lambda: stop.set() if eventually(ready.exists, PATIENCE_S) else None)
    stopper.start()
    text = tools.call("shell", {"command": f"echo begun; touch '{ready}'; sleep 60"}, cancel_event=stop)
    stopper.join()
    assert text == "begun\n[cancelled]"
    (task,) = host.processes.list("s1")
    assert (task.status, task.stop_reason) == (TaskStatus.CANCELLED, "its caller was stopped")


def test_a_cancelled_job_ends_its_foreground_command(host: Host, tmp_path: Path) -> None:
    """The command ends, the tool gives what there was, and the next call raises."""
    ready = tmp_path / "ready"
    got: list[str] = []

    def work(request: TurnRequest, tools: AgentTools) -> str:
        got.append(str(tools.shell(f"echo begun; touch '{ready}'; sleep 60")))
        with pytest.raises(errors.CancelledError):
            tools.shell("echo next")
        return "stopped"

    host.work = work
    started = host.tools.agent("x", "x", run_in_background=True)
    assert isinstance(started, dict)
    eventually(ready.exists, PATIENCE_S)
    host.tools.job_stop(started["job_id"])
    assert host.tools.job_output(started["job_id"]).endswith("stopped\n[cancelled]")
    assert got == ["begun\n[cancelled]"]


def test_a_jobs_background_command_ends_with_it(host: Host) -> None:
    """However the job ends."""
    host.work = lambda request, tools: background(tools, "sleep 60")["job_id"]
    task_id = host.tools.agent("x", "x")
    assert isinstance(task_id, str)
    task = host.processes.wait(task_id, PATIENCE_S)
    assert task.status is TaskStatus.CANCELLED
    assert task.job_id == host.store.list("s1")[0].job_id


def test_a_call_that_is_made_again_runs_nothing_twice(host: Host, tmp_path: Path) -> None:
    """The same message, tool call and command: the first task. Another command or message: a new one."""
    log = tmp_path / "log"
    tools = AgentTools(host.runner, "s1", processes=host.processes, caller_msg_id="m1")
    ask = {"command": f"echo ran >> '{log}'; echo out"}
    assert tools.call("shell", ask, "call_0") == tools.call("shell", ask, "call_0") == "out"
    assert log.read_text() == "ran\n"
    assert tools.call("shell", {"command": "echo other"}, "call_0") == "other"
    assert tools.call("shell", {"command": "echo other"}, "call_0") == "other"
    assert tools.at("m2").call("shell", ask, "call_0") == "out"
    assert log.read_text() == "ran\nran\n"
    assert len(host.processes.list("s1")) == 3


def test_another_sessions_command_is_unknown_here(tools: AgentTools, host: Host) -> None:
    """As with jobs."""
    theirs = background(AgentTools(host.runner, "s2", processes=host.processes), "sleep 60; echo secret")["job_id"]
    for name in ("job_output", "job_stop"):
        text = tools.call(name, {"job_id": theirs})
        assert text.is_error
        assert text.endswith("there are none yet")
    assert tools.list_jobs() == []
    assert host.processes.stop(theirs).stop_reason is None
    host.processes.wait(theirs, PATIENCE_S)


def test_a_command_gets_the_hosts_directory_and_environment(host: Host, tmp_path: Path) -> None:
    """A job's children get the job's."""
    where = tmp_path / "somewhere"
    where.mkdir()
    env = {"PATH": "/usr/bin:/bin", "COLOUR": "green"}
    tools = AgentTools(host.runner, "s1", processes=host.processes, cwd=where, env=env)
    assert tools.shell("pwd; echo $COLOUR") == f"{where}\ngreen"
    host.work = lambda request, inside: inside.shell("pwd; echo $COLOUR; echo $OPENJOBS_JOB_ID")
    text = tools.agent("x", "x")
    assert text == f"{where}\ngreen\n{host.store.list('s1')[0].job_id}"


def test_without_a_supervisor_there_is_no_shell(host: Host) -> None:
    """Neither in the definitions nor by name."""
    tools = AgentTools(host.runner, "s1")
    assert "shell" not in tools.names
    assert tools.call("shell", {"command": "true"}).is_error
    with pytest.raises(errors.InvalidInput):
        tools.shell("true")


def test_commands_in_an_event_loop(tools: AgentTools, host: Host, tmp_path: Path) -> None:
    """The same answers; a task that is cancelled ends the command that only it waits for."""
    ready = tmp_path / "ready"

    async def main() -> None:
        assert await tools.acall("shell", {"command": "echo hi; exit 2"}) == "hi\n[exit code 2]"
        call = asyncio.create_task(tools.acall("shell", {"command": f"touch '{ready}'; sleep 60"}))
        await asyncio.to_thread(eventually, ready.exists, PATIENCE_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    task = host.processes.list("s1")[0]
    assert host.processes.wait(task.task_id, PATIENCE_S).status is TaskStatus.CANCELLED


def test_what_cannot_be_run_is_told(tools: AgentTools, host: Host, tmp_path: Path) -> None:
    """A refusal is a text, and nothing was started."""
    text = AgentTools(host.runner, "s1", processes=host.processes, cwd=tmp_path / "none").call(
        "shell", {"command": "true"}
    )
    assert text.is_error
    assert "does not exist" in text
    assert tools.call("shell", {"command": "a\0b"}).is_error
    assert tools.call("shell", {"command": " "}).is_error
    assert host.processes.list("s1") == []


def test_a_conversations_background_command_outlives_the_turn(host: Host) -> None:
    """A host that runs the conversation's turns as foreground jobs: a server that is started in one is there in the
    next; a command that the turn waits for ends with it all the same."""
    host.work = lambda request, tools: background(tools, "sleep 60")["job_id"]
    turn = host.runner.submit(SpawnRequest(prompt="x", parent_session_id="s1", foreground=True))
    task_id = host.runner.await_job(turn.job_id, PATIENCE_S).result_text or ""
    task = host.processes.get(task_id)
    assert (task.status, task.job_id) == (TaskStatus.RUNNING, None)
    host.work = lambda request, tools: tools.shell("sleep 60")
    turn = host.runner.submit(SpawnRequest(prompt="x", parent_session_id="s1", foreground=True))
    eventually(lambda: len(host.processes.list("s1")) == 2, PATIENCE_S)
    host.runner.cancel(turn.job_id)
    assert host.runner.await_job(turn.job_id, PATIENCE_S).result_text == "[cancelled]"
    assert host.processes.get(task_id).status is TaskStatus.RUNNING


def test_a_command_that_is_no_text_for_the_system_is_refused(tools: AgentTools, host: Host) -> None:
    """Half of a surrogate pair: `shell` says so and starts nothing, in the words in which `agent` does."""
    said = "is not valid Unicode: it has half of a surrogate pair"
    for half in ("\ud800", "\udcff"):
        for name, arguments in (
            ("shell", {"command": f"echo {half}"}),
            ("shell", {"command": f"echo {half}", "run_in_background": True}),
            ("agent", {"prompt": f"echo {half}", "description": "x"}),
        ):
            text = tools.call(name, arguments)
            assert text.is_error, text
            assert text.startswith(f"[error] {name} was not called: ")
            assert said in text
            text.encode()
    with pytest.raises(errors.InvalidInput):
        tools.shell("echo \ud800")
    assert host.processes.list("s1") == []
    assert host.runner.list("s1") == []
