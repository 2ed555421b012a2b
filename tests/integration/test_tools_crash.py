"""A host that dies in the middle of a tool call and makes the call again: the first job, or the first command,
and nothing is done twice (R3, R7)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, TurnRequest, TurnResult
from openjobs.jobs import TERMINAL
from openjobs.processes import ProcessSupervisor
from openjobs.tools import AgentTools
from tests.support import eventually
from tests.support.child import forked
from tests.support.disks import Effect, RecordingDisk

ASK = {"prompt": "work", "description": "work", "run_in_background": True}
LAST_WORD = "worker died before completion"


class DyingDisk(RecordingDisk):
    """The process is killed right before the k-th effect from `arm` on."""

    left = 0

    def arm(self, k: int) -> None:
        self.left = k

    def _do(self, name, target, act, torn=None):  # type: ignore[no-untyped-def]
        self.effects.append(Effect(name, "?"))
        if self.left:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
        return act()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s1")
    return tmp_path / "home"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def turn_that_logs(log: Path) -> object:
    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        with log.open("a") as file:
            file.write("ran\n")
        return TurnResult(final_text="done")

    return turn


def again(home: Path, log: Path) -> Iterator[AgentTools]:
    """The next host: what it finds, it recovers."""
    with GitJobStore(home, durability="relaxed") as store:
        with JobRunner(store, 1, turn_that_logs(log)) as runner:  # type: ignore[arg-type]
            yield AgentTools(runner, "s1", caller_msg_id="m1")
        assert store.fsck("s1").clean


def test_a_call_that_a_kill_interrupted_gets_the_first_job(home: Path, log: Path) -> None:
    """Its turn was running: the answer says that the worker died, and nothing runs again by itself."""

    def child() -> str:
        def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
            log.write_text("ran\n")
            threading.Event().wait()
            raise AssertionError

        store = GitJobStore(home, durability="relaxed")
        runner = JobRunner(store, 1, turn)
        job_id: str = AgentTools(runner, "s1", caller_msg_id="m1").call("agent", ASK, "call_0").value["job_id"]
        eventually(log.exists)
        eventually(lambda: store.get(job_id).status is JobStatus.RUNNING)
        return job_id

    with forked(child) as host:
        first = host.answer()
        host.kill()
    for tools in again(home, log):
        assert tools.call("agent", ASK, "call_0").value == {**_files(tools, first), "status": "errored"}
        assert tools.job_output(first).endswith(f"[task error] {LAST_WORD}")
        assert Path(_files(tools, first)["output_file"]).read_text() == f"[task error] {LAST_WORD}"
        # In the foreground it is another request, and so a job of its own.
        foreground = {**ASK, "run_in_background": False}
        assert tools.call("agent", foreground, "call_0") == "done"
        assert tools.call("agent", foreground, "call_0") == "done"
    assert log.read_text() == "ran\nran\n"


def _files(tools: AgentTools, job_id: str) -> dict[str, str]:
    run_id = tools.runner.get(job_id).run_id
    assert run_id is not None
    path = tools._store.home / "sessions" / "s1" / "runs" / run_id / "result.txt"  # type: ignore[operator]
    return {"job_id": job_id, "output_file": str(path)}


def test_a_call_whose_job_had_ended_gets_its_result(home: Path, log: Path) -> None:
    """The host died before it could tell the model; the next one tells the same."""

    def child() -> str:
        runner = JobRunner(GitJobStore(home, durability="relaxed"), 1, turn_that_logs(log))  # type: ignore[arg-type]
        return AgentTools(runner, "s1", caller_msg_id="m1").call("agent", {**ASK, "run_in_background": False}, "call_0")

    with forked(child) as host:
        assert host.answer() == "done"
        host.kill()
    for tools in again(home, log):
        assert tools.call("agent", {**ASK, "run_in_background": False}, "call_0") == "done"
        assert tools.call("agent", {**ASK, "run_in_background": False}, "call_1") == "done"
    assert log.read_text() == "ran\nran\n"


def test_a_kill_before_any_effect_of_a_submit_leaves_one_job_at_most(home: Path, log: Path, chaos: bool) -> None:
    """Killed before the k-th effect, for every k (a share of them here): one job, whether it got in before or not."""
    k = 0
    found: set[str] = set()
    killed = True
    while killed:
        k += 1 if chaos else 4
        call_id = f"call_{k}"

        def child(k: int = k, call_id: str = call_id) -> str:
            disk = DyingDisk()
            store = GitJobStore(home, disk=disk)
            runner = JobRunner(store, 1, turn_that_logs(log))  # type: ignore[arg-type]
            disk.arm(k)
            made = AgentTools(runner, "s1", caller_msg_id="m1").call("agent", ASK, call_id)
            disk.arm(0)
            return str(made.value["job_id"])

        with forked(child) as host:
            try:
                host.answer()
                killed = False
            except AssertionError:
                killed = True
            host.kill()
        log.unlink(missing_ok=True)
        for tools in again(home, log):
            answer = tools.call("agent", ASK, call_id)
            assert not answer.is_error
            text = tools.job_output(answer.value["job_id"])
            found.add("retried" if text.endswith("done") else "first")
            jobs = tools.runner.list("s1", limit=None)
            assert len([job for job in jobs if job.origin_tool_call_id == f"m1:{call_id}"]) == 1
            assert all(job.status in TERMINAL for job in jobs)
        assert (not log.exists()) or log.read_text() == "ran\n"
    assert k > 5
    assert "retried" in found


def test_a_command_that_a_kill_interrupted_is_not_run_again(home: Path, log: Path) -> None:
    """Its keeper lived on: the retry in the next host reads the first command's whole output."""

    def child() -> str:
        store = GitJobStore(home, durability="relaxed")
        tools = AgentTools(
            JobRunner(store, 1, turn_that_logs(log)),  # type: ignore[arg-type]
            "s1",
            caller_msg_id="m1",
            processes=ProcessSupervisor(store),
        )
        tools.call("shell", command, "call_0")
        return "never"

    command = {"command": f"echo ran >> '{log}'; sleep 1; echo whole"}
    with forked(child) as host:
        eventually(lambda: log.exists() and log.read_text() == "ran\n")
        host.kill()
    with GitJobStore(home, durability="relaxed") as store, ProcessSupervisor(store) as processes:
        processes.recover()
        with JobRunner(store, 1, turn_that_logs(log)) as runner:  # type: ignore[arg-type]
            tools = AgentTools(runner, "s1", caller_msg_id="m1", processes=processes)
            assert tools.call("shell", command, "call_0") == "whole"
            assert len(processes.list("s1")) == 1
    assert log.read_text() == "ran\n"
