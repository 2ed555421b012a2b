"""Ctrl-C at the moments that matter: what was started is asked to stop, or its name is said.

The order is forced: the command line sends the signal to itself at the named call, just before it or just after it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs.host.client import ensure_host
from openjobs.processes import ProcessSupervisor
from openjobs.store import GitJobStore
from tests.support import eventually
from tests.support.cli import Cli, Ended

BOUND_S = 30.0

#: argv: one `MODULE:CLASS.METHOD:WHEN` for each signal, `--`, the command line. WHEN `hang`: that call never ends
PROGRAM = """
import functools, importlib, os, signal, sys, threading

def here():
    os.kill(os.getpid(), signal.SIGINT)

def patch(where):
    module, name, when = where.split(":")
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real = getattr(owner, last)
    done = []

    @functools.wraps(real)
    def patched(*args, **options):
        if threading.current_thread() is not threading.main_thread() or done:
            return real(*args, **options)
        done.append(1)
        if when == "hang":
            here()
            while True:
                signal.pause()
        if when == "before":
            here()
        result = real(*args, **options)
        if when == "after":
            here()
        return result

    setattr(owner, last, patched)

for where in sys.argv[1 : sys.argv.index("--")]:
    patch(where)
from openjobs.cli.app import main
main(sys.argv[sys.argv.index("--") + 1 :])
"""

CONNECTION = "openjobs.host.client:HostClient"
SUPERVISOR = "openjobs.processes.supervisor:ProcessSupervisor"
JOURNAL = "openjobs.processes.journal:TaskJournal"
TEMPLATE = "openjobs.processes.template"
ATTEND = "openjobs.processes.attendant:Attendant.attend"
JOBS = "openjobs.runner.client:JobClient"


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path / "h")
    yield cli
    cli.end_host()
    if cli.home.exists():
        with GitJobStore(cli.home) as store, ProcessSupervisor(store) as supervisor:
            supervisor.recover()
            for task in [task for session in store.sessions() for task in supervisor.list(session)]:
                if not task.terminal:
                    supervisor.stop(task.task_id, grace_s=0)
                    supervisor.wait(task.task_id, BOUND_S)


def interrupted(cli: Cli, points: list[str], *args: str) -> Ended:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *points, "--", *args],
        capture_output=True,
        text=True,
        env=cli.env,
        stdin=subprocess.DEVNULL,
        timeout=BOUND_S,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def with_host(cli: Cli) -> None:
    """A host lives at the home."""
    from openjobs.host.config import prepare_home

    ensure_host(prepare_home(cli.home), environ=cli.env).close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def tasks(cli: Cli) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cli.json_inside("ps", "-a")["tasks"]
    return found


# --- run ---------------------------------------------------------------------------------------------------

STARTING = [
    f"{JOURNAL}.begin:before",
    f"{JOURNAL}.begin:after",
    f"{TEMPLATE}:Template.start:before",
    f"{TEMPLATE}:Template._launch:after",
    f"{TEMPLATE}:Template.start:after",
    f"{TEMPLATE}:Run.go:before",
    f"{TEMPLATE}:Run.go:after",
    f"{JOURNAL}.record:before",
    f"{JOURNAL}.record:after",
    f"{ATTEND}:before",
    "threading:Thread.start:after",
    f"{ATTEND}:after",
    f"{SUPERVISOR}.start:after",
    f"{SUPERVISOR}.wait:before",
    f"{SUPERVISOR}.wait:after",
    "openjobs.processes.client:TaskClient.output:after",
]


@pytest.mark.parametrize("point", STARTING)
def test_ctrl_c_at_any_moment_of_a_start_ends_the_command(cli: Cli, tmp_path: Path, point: str) -> None:
    """130, no process of the command goes on, its row says that it was stopped, and nothing fails to close."""
    pid = tmp_path / "pid"
    ended = interrupted(cli, [point], "run", "sh", "-c", f"echo $$ > {pid}; exec sleep 60")
    assert ended.code == 130, ended.err
    assert "error" not in ended.err
    for task in tasks(cli):
        assert (task["status"], task["stop_reason"]) == ("cancelled", "interrupted"), ended.err
        assert task["task_id"][:8] in ended.err
    if pid.exists() and (text := pid.read_text()):
        assert not alive(int(text))


@pytest.mark.parametrize("second", [f"{ATTEND}:after", f"{SUPERVISOR}.stop:before", f"{SUPERVISOR}.stop:after"])
def test_a_second_ctrl_c_of_run_leaves_once_the_command_was_asked(cli: Cli, second: str) -> None:
    """It ends the command line by that signal, but not before the keeper has the request."""
    ended = interrupted(cli, [f"{TEMPLATE}:Run.go:after", second], "run", "sleep", "60")
    assert ended.code == -signal.SIGINT, ended.err
    (task,) = tasks(cli)
    assert task["stop_requested_at"] is not None
    eventually(lambda: tasks(cli)[0]["status"] == "cancelled", BOUND_S)  # from what the keeper left


def test_a_run_that_cannot_ask_in_time_says_whom_to_stop(cli: Cli) -> None:
    """When the request hangs, a second Ctrl-C leaves all the same after a second, with the command's id."""
    points = [f"{SUPERVISOR}.wait:before", f"{SUPERVISOR}.stop:hang"]
    ended = interrupted(cli, points, "run", "sleep", "60")
    assert ended.code == 130
    (task,) = tasks(cli)
    assert f"`openjobs stop {task['task_id']}` stops it" in ended.err


def test_an_interrupted_hand_over_of_a_command_names_it(cli: Cli) -> None:
    """`run --detach`: the host has it, nobody has printed its id; Ctrl-C says which it is and how to stop it."""
    with_host(cli)
    ended = interrupted(cli, ["openjobs.host.client:start_task:after"], "run", "--detach", "sleep", "60")
    assert (ended.code, ended.out) == (130, "")
    (task,) = tasks(cli)
    assert task["status"] == "running"
    assert f"task {task['task_id']} was handed over and goes on; `openjobs stop {task['task_id']}`" in ended.err


# --- agent -------------------------------------------------------------------------------------------------


def the_job(cli: Cli) -> dict[str, Any]:
    (job,) = cli.json_inside("list")["jobs"]
    found: dict[str, Any] = job
    return found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"{CONNECTION}._exchange:before", f"{JOBS}.cancel:before"),
        (f"{CONNECTION}.spawn:after", f"{JOBS}.cancel:before"),
        (f"{CONNECTION}.spawn:after", f"{JOBS}.cancel:after"),
        (f"{CONNECTION}.await_jobs:before", f"{JOBS}.ask_to_stop:before"),
    ],
)
def test_a_second_ctrl_c_keeps_no_job_of_the_host_from_being_asked(cli: Cli, first: str, second: str) -> None:
    """However fast it comes, the job in the host is cancelled; it may also never have been handed over."""
    with_host(cli)
    ended = interrupted(cli, [first, second], "agent", "--agent", "shell", "sleep 60")
    if first.endswith("_exchange:before"):
        assert ended.code in (130, -signal.SIGINT)
        assert cli.json_inside("list")["jobs"] == []
        return
    assert ended.code == -signal.SIGINT, ended.err
    eventually(lambda: the_job(cli)["status"] == "cancelled", BOUND_S)
    assert the_job(cli)["cancel_reason"] == "interrupted"


def test_an_agent_that_cannot_ask_in_time_says_which_job_to_stop(cli: Cli) -> None:
    """When the request hangs, a second Ctrl-C leaves all the same after a second, with the job's id."""
    with_host(cli)
    points = [f"{CONNECTION}.await_jobs:before", f"{JOBS}.cancel:hang"]
    ended = interrupted(cli, points, "agent", "--agent", "shell", "sleep 60")
    assert ended.code == 130
    assert f"`openjobs stop {the_job(cli)['job_id']}` stops it" in ended.err
    cli.inside("stop", the_job(cli)["job_id"], "--wait", code=None)


@pytest.mark.parametrize("point", [f"{CONNECTION}.spawn:after", "openjobs.host.client:spawn:after"])
def test_an_interrupted_hand_over_of_a_job_names_it(cli: Cli, point: str) -> None:
    """`agent --background`: the host has the job, nobody has printed its id; Ctrl-C says which it is."""
    with_host(cli)
    ended = interrupted(cli, [point], "agent", "--agent", "echo", "--background", "x")
    assert (ended.code, ended.out) == (130, "")
    job_id = the_job(cli)["job_id"]
    assert f"interrupted; job {job_id} was handed over and goes on; `openjobs stop {job_id}` stops it" in ended.err


def test_a_hand_over_that_did_not_happen_is_said_so(cli: Cli) -> None:
    """Interrupted before the host had the request: nothing runs, and that is what is said."""
    with_host(cli)
    ended = interrupted(cli, [f"{CONNECTION}.spawn:before"], "agent", "--agent", "echo", "--background", "x")
    assert ended.code == 130
    assert re.search(r"interrupted before job [0-9a-f-]{36} was written down; nothing runs", ended.err)
    assert cli.json_inside("list")["jobs"] == []


# --- while it still starts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["openjobs.cli.app", "openjobs.errors", "click", "openjobs.cli.listing"])
def test_who_interrupts_a_start_gets_one_word(cli: Cli, module: str) -> None:
    """Most of a short command is imports; a Ctrl-C among them is no traceback."""
    program = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "from openjobs.cli import main\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "main(['list'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=cli.env, timeout=BOUND_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


# --- why something did not close ---------------------------------------------------------------------------


@pytest.mark.parametrize("debug", ["0", "1"])
def test_what_failed_to_close_is_told_with_its_reason(cli: Cli, debug: str) -> None:
    """One line with the error; OPENJOBS_DEBUG=1 shows where it came from."""
    program = (
        "import sys; from openjobs.processes.supervisor import ProcessSupervisor as P\n"
        "def close(self, *_): raise RuntimeError('no way out')\n"
        "P.close = close\n"
        "from openjobs.cli.app import main; main(['run', 'true'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**cli.env, "OPENJOBS_DEBUG": debug},
        timeout=BOUND_S,
        check=False,
    )
    assert "openjobs: error: supervisor failed to close: RuntimeError: no way out" in ended.stderr
    assert ("Traceback" in ended.stderr) == (debug == "1")
