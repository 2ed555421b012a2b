"""`openjobs run`, `ps` and `logs`, and the other commands with the id of a background command."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openjobs.durable import Disk
from openjobs.host.client import connect
from openjobs.processes import ProcessSupervisor, TaskClient, TaskStatus
from openjobs.runlog import RunLogReader, RunLogWriter
from openjobs.store import GitJobStore
from openjobs.store.index import Entry, FileIndex
from tests.support import eventually
from tests.support.cli import Cli, Terminal

BOUND_S = 20.0


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path / "h")
    yield cli
    cli.end_host()
    end_all(cli.home)


def end_all(home: Path) -> None:
    """No command of the test goes on."""
    if not home.exists():
        return
    with GitJobStore(home) as store, ProcessSupervisor(store) as supervisor:
        supervisor.recover()
        for session_id in store.sessions():
            for task in supervisor.list(session_id):
                if not task.terminal:
                    supervisor.stop(task.task_id, grace_s=0)
                    supervisor.wait(task.task_id, BOUND_S)


def raw(cli: Cli, *args: str) -> tuple[int, bytes, bytes]:
    """A command line whose bytes matter."""
    ended = subprocess.run(
        cli.command(*args), capture_output=True, env=cli.env, stdin=subprocess.DEVNULL, timeout=40, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr


# --- run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "code"),
    [
        (["sh", "-c", "exit 0"], [], 0),
        (["sh", "-c", "exit 1"], [], 1),
        (["sh", "-c", "exit 3"], [], 3),
        (["no-such-command-here"], [], 127),
        (["/"], [], 126),
        (["sh", "-c", "kill -9 $$"], [], 137),
        (["sh", "-c", "kill -TERM $$"], [], 143),
        (["sleep", "60"], ["--timeout", "0.2"], 124),
    ],
)
def test_run_exits_as_its_command_did(command: list[str], options: list[str], code: int, cli: Cli) -> None:
    """Its own code, 124 on a timeout, 128 and the number of the signal that ended it."""
    cli.inside("run", *options, "--", *command, code=code)


def test_run_passes_on_what_the_command_writes(cli: Cli) -> None:
    """Exact bytes on the stream they were written to, and nothing else; options after the command are the command's."""
    code, out, err = raw(cli, "run", "sh", "-c", "printf 'a\\0b\\377'; printf oops >&2", "--json")
    assert (code, out, err) == (0, b"a\0b\xff", b"oops")


def test_ctrl_c_ends_the_whole_tree(cli: Cli) -> None:
    """The first one ends the command, waits for that and says what became of it."""
    with cli.start("run", "sh", "-c", "sleep 60 & echo ready; wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=BOUND_S)
    assert process.returncode == 130
    assert "cancelled" in said
    (line,) = cli.inside("ps", "-a").out.splitlines()
    assert line.split("\t")[1:2] == ["cancelled"]


def test_a_command_whose_output_cannot_be_passed_on_is_ended(cli: Cli) -> None:
    """As one whose reader went away; why, and by which id what it wrote is kept, is said."""
    with open(os.devnull, "rb") as only_for_reading:
        said = cli.run("run", "--", "sh", "-c", "echo hi; exec sleep 60", code=74, stdout=only_for_reading).err
    (task,) = cli.json("ps", "-a")["tasks"]
    assert (task["status"], task["stop_reason"]) == (
        "cancelled",
        "standard output could not be written: Bad file descriptor",
    )
    assert said.startswith(f"task {task['task_id'][:8]} cancelled (SIGTERM)")
    assert cli.run("logs", task["task_id"]).out == "hi\n"


def test_a_command_whose_end_cannot_be_told_is_named(cli: Cli) -> None:
    """With `--json` nothing is passed on: it has ended when stdout fails."""
    with open(os.devnull, "rb") as only_for_reading:
        said = json.loads(cli.run("run", "--json", "--", "true", code=74, stdout=only_for_reading).err)
    (task,) = cli.json("ps", "-a")["tasks"]
    assert said["message"].endswith(f"; task {task['task_id']} has ended as completed")


@pytest.mark.parametrize("command", [["true"], ["sh", "-c", "exit 3"]], ids=["completed", "failed"])
def test_an_end_that_cannot_be_marked_as_seen_changes_no_exit_code(cli: Cli, command: list[str]) -> None:
    """On a home that takes no writes its output is printed, its end is the exit code, and one line says the rest."""
    cli.run("run", "--detach", "--", *command)
    task_id = cli.json("ps", "-a")["tasks"][0]["task_id"]
    code = cli.run("wait", task_id, code=None).code
    with writes_fail(cli):
        for as_json in ([], ["--json"]):
            said = cli.inside("output", task_id, *as_json, code=code).err
            assert said.splitlines()[-1].startswith("that its end was seen could not be written down: ")
    assert cli.json("show", task_id)["consumed"] is False
    cli.run("output", task_id, code=code)
    assert cli.json("show", task_id)["consumed"] is True


@contextlib.contextmanager
def writes_fail(cli: Cli) -> Iterator[None]:
    """Every write of this process to the home fails, as on a file system that is mounted to be read only."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as patch:
        for effect in ("create", "open_append", "open_update", "rename", "unlink", "mkdir"):
            patch.setattr(Disk, effect, refuse)
        yield


def test_a_command_that_a_job_runs_ends_with_the_job(cli: Cli) -> None:
    """`openjobs run` inside a job's command is the job's: listed as such, and ended when the job is stopped."""
    inner = f"{sys.executable} -m openjobs run -- sh -c 'echo in; exec sleep 300'"
    with cli.start("agent", "--agent", "shell", inner) as agent:
        (task,) = eventually(lambda: cli.json_inside("ps")["tasks"], BOUND_S)
        job_id = task["job_id"]
        assert [path.name for path in (cli.home / "job-tasks").glob("*/*")] == [task["session_id"]]
        cli.inside("stop", job_id)
        assert agent.wait(BOUND_S) == 5
        agent.communicate()
    (ended,) = cli.json_inside("ps", "-a")["tasks"]
    assert ended["task_id"] == task["task_id"]
    assert ended["status"] in ("cancelled", "failed")  # whoever was first: its keeper, or that of the job's command
    assert ended["signal"] == signal.SIGTERM
    eventually(lambda: not list((cli.home / "job-tasks").glob("*")), BOUND_S)


def test_a_killed_command_line_leaves_its_command_to_the_host(cli: Cli, tmp_path: Path) -> None:
    """It goes on under its keeper; the home's host adopts it, and its output and end are known."""
    script = "echo one; while [ ! -e go ]; do sleep 0.05; done; echo two"
    with cli.start("run", "sh", "-c", script, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "one\n"
        process.kill()
    task_id = cli.inside("ps").out.split("\t")[0]
    with TaskClient(cli.home) as client:
        first = client.get(task_id).worker_id
        cli.inside("run", "--detach", "--", "true")  # a host, which stays for a while
        eventually(lambda: client.get(task_id).worker_id != first, BOUND_S)
        (tmp_path / "go").touch()
        assert client.wait(task_id, BOUND_S).status is TaskStatus.COMPLETED
    assert raw(cli, "logs", "-f", task_id)[1] == b"one\ntwo\n"


def test_a_killed_hosts_commands_are_the_next_hosts(cli: Cli, tmp_path: Path) -> None:
    """A detached command goes on; whoever hosts the home next adopts it and records its end."""
    script = f"echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo two; exit 7"
    task_id = cli.inside("run", "--detach", "--", "sh", "-c", script).out.strip()
    host = connect(cli.home)
    assert host is not None
    with host:
        os.kill(host.about["pid"], signal.SIGKILL)
    assert cli.json_inside("show", task_id)["status"] == "running"
    with TaskClient(cli.home) as client:
        first = client.get(task_id).worker_id
        cli.inside("run", "--detach", "--", "true")
        eventually(lambda: client.get(task_id).worker_id != first, BOUND_S)
    (tmp_path / "go").touch()
    assert raw(cli, "logs", "-f", task_id) == (0, b"one\ntwo\n", b"")
    cli.inside("wait", task_id, code=1)
    assert cli.json_inside("show", task_id)["exit_code"] == 7


def test_a_detached_command_belongs_to_the_host(cli: Cli) -> None:
    """It can be listed, followed, waited for, shown and printed; its id may be shortened; another terminal stops it."""
    task_id = cli.run("run", "--detach", "-d", "count", "--", "sh", "-c", "echo 1; sleep 0.3; printf 2").out.strip()
    assert raw(cli, "logs", "-f", task_id[:8]) == (0, b"1\n2", b"")
    assert cli.inside("wait", task_id).out.split("\t")[:2] == [task_id, "completed"]
    shown = cli.json_inside("show", task_id)
    assert (shown["status"], shown["exit_code"], shown["consumed"]) == ("completed", 0, False)
    assert cli.inside("output", task_id).out == "1\n2"
    assert cli.json_inside("show", task_id)["consumed"] is True
    endless = cli.inside("run", "--detach", "--", "sleep", "300").out.strip()
    assert cli.inside("ps").out.split("\t")[:2] == [endless, "running"]
    stopped = cli.json_inside("stop", endless, "--reason", "enough")["tasks"][0]
    assert stopped["stop_reason"] == "enough"
    assert cli.inside("wait", endless, code=5).out.split("\t")[1] == "cancelled"
    assert cli.inside("ps").out == ""
    with GitJobStore(cli.home) as store:
        assert store.unfinished("default") == []


def test_a_command_whose_worker_is_gone_can_be_stopped(cli: Cli) -> None:
    """Nobody lives who owns it: the command line that was told to stop it ends it itself."""
    with cli.start("run", "sh", "-c", "echo ready; exec sleep 300") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    task_id = cli.inside("ps").out.split("\t")[0]
    assert cli.json_inside("stop", task_id)["tasks"][0]["status"] == "cancelled"


def test_recover_records_ends_and_leaves_what_runs(cli: Cli) -> None:
    """An end that only a keeper knows is recorded; a command that still runs waits for a process that stays."""
    ids = []
    for script in ("echo ready; sleep 0.2; exit 4", "echo ready; exec sleep 300"):
        with cli.start("run", "sh", "-c", script) as process:
            assert process.stdout is not None
            process.stdout.readline()
            ids.append(cli.inside("ps").out.split("\t")[0])
            process.kill()
    with TaskClient(cli.home) as client:
        eventually(lambda: client.get(ids[0]).terminal)
    (ended,) = cli.json_inside("recover")["tasks"]
    assert (ended["task_id"], ended["status"], ended["exit_code"]) == (ids[0], "failed", 4)
    assert ended["event_id"]
    assert cli.json_inside("show", ids[1])["status"] == "running"
    assert cli.json_inside("recover")["tasks"] == []


def test_wait_takes_commands_and_jobs_together(cli: Cli) -> None:
    """The code is that of the worst, whatever they are."""
    task_id = cli.inside("run", "--detach", "--", "sh", "-c", "exit 3").out.strip()
    job_id = cli.inside("agent", "--agent", "echo", "--background", "hi").out.strip()
    answer = cli.json_inside("wait", task_id, job_id, code=1)
    assert [one["status"] for one in (*answer["jobs"], *answer["tasks"])] == ["completed", "failed"]
    endless = cli.inside("run", "--detach", "--", "sleep", "300").out.strip()
    cli.inside("wait", endless, "--timeout", "0.1", code=4)
    cli.inside("wait", endless, task_id, "--any", code=1)
    cli.inside("wait", endless, job_id, "--any", code=2)


def test_an_unknown_id_is_said_to_be_one(cli: Cli) -> None:
    """Also where there are background commands."""
    cli.inside("run", "true")
    for command in ("logs", "show", "output", "stop", "wait"):
        cli.inside(command, "ffffffff", code=3)


# --- logs --------------------------------------------------------------------------------------------------

STRANGE = b"\x1b]0;title\x07nul \0 bad \xff\xfe " + "é€😀".encode() + b" \r over\nlast"


def test_strange_bytes_are_exact_in_a_pipe(cli: Cli, tmp_path: Path) -> None:
    """NULs, invalid UTF-8, escapes, characters split across chunks, a very long line, no newline at the end."""
    data = STRANGE + b"x" * 65535 + "€".encode() * 300_000 + b"\x1b[31m" + b"y" * 10**7
    (tmp_path / "data").write_bytes(data)
    assert raw(cli, "run", "cat", str(tmp_path / "data")) == (0, data, b"")
    task_id = cli.inside("ps", "-a").out.split("\t")[0]
    for options in ([], ["-f"], ["--raw"], ["--stream", "stdout"], ["-f", "--stream", "stdout"]):
        code, out, err = raw(cli, "logs", *options, task_id)
        assert (code, err) == (0, b"")
        assert out == data
    assert raw(cli, "logs", "--stream", "stderr", task_id)[1] == b""


def test_strange_bytes_are_visible_on_a_terminal(cli: Cli, tmp_path: Path) -> None:
    """Nothing that a terminal would obey reaches it, unless --raw is given."""
    (tmp_path / "data").write_bytes(STRANGE)
    assert raw(cli, "run", "cat", str(tmp_path / "data")) == (0, STRANGE, b"")
    task_id = cli.inside("ps", "-a").out.split("\t")[0]
    with Terminal(cli.command("logs", task_id), cli.env, width=200) as terminal:
        assert terminal.wait() == 0
        assert terminal.text == "\\x1b]0;title\\x07nul \\x00 bad \\xff\\xfe é€😀 \\r over\r\nlast\r\n"
    with Terminal(cli.command("logs", "--raw", task_id), cli.env) as terminal:
        assert terminal.wait() == 0
        assert terminal._screen.startswith(b"\x1b]0;title\x07nul \0 bad \xff\xfe ")


def test_a_follower_ends_quietly_when_its_reader_goes(cli: Cli) -> None:
    """As any command in a pipe; the command that it followed goes on."""
    task_id = cli.inside("run", "--detach", "--", "sh", "-c", "while :; do echo x; sleep 0.01; done").out.strip()
    with cli.start("logs", "-f", task_id) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(BOUND_S) == 141
    assert cli.json_inside("show", task_id)["status"] == "running"


def test_the_log_of_a_finished_run_ends_while_another_one_is_active(cli: Cli) -> None:
    """Nothing but the run's own completion ends it or keeps it."""
    ended = cli.inside("run", "--detach", "--", "sh", "-c", "printf done").out.strip()
    cli.inside("wait", ended)
    cli.inside("run", "--detach", "--", "sleep", "300")
    assert raw(cli, "logs", "-f", ended) == (0, b"done", b"")


def test_a_jobs_log_is_found_by_job_and_by_run(cli: Cli) -> None:
    """Both ids may be shortened. A callable has no log, and is said to have none."""
    cli.inside("agent", "--agent", "shell", "echo out; echo err >&2")
    job = cli.json_inside("list")["jobs"][0]
    for one in (job["job_id"], job["job_id"][:8], job["run_id"], job["run_id"][:8]):
        code, out, _ = raw(cli, "logs", "-f", one)
        assert (code, sorted(out.splitlines())) == (0, [b"err", b"out"])
    cli.inside("agent", "--agent", "echo", "hi")
    callable_id = cli.json_inside("list")["jobs"][0]["job_id"]
    assert "Python callable" in cli.inside("logs", callable_id, code=3).err


def test_reading_a_log_needs_no_git_and_changes_nothing(cli: Cli) -> None:
    """Without any repository the bytes are there, and every file stays as it was."""
    cli.inside("agent", "--agent", "shell", "echo hi")
    job_id = cli.json_inside("list")["jobs"][0]["job_id"]
    (cli.home / "sessions" / "default" / "repo").rename(cli.home / "gone")
    before = snapshot(cli.home)
    for options in ([], ["-f"], ["-f", "--stream", "stdout"]):
        assert raw(cli, "logs", *options, job_id) == (0, b"hi\n", b"")
    assert snapshot(cli.home) == before
    (cli.home / "gone").rename(cli.home / "sessions" / "default" / "repo")


def snapshot(home: Path) -> dict[str, tuple[int, int]]:
    found = [path for path in home.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_cut_output_is_said_to_be_cut(cli: Cli) -> None:
    """How much was kept, and how much was seen."""
    cli.home.mkdir(mode=0o700, exist_ok=True)
    with GitJobStore(cli.home) as store:
        store.create_session("default")
        with ProcessSupervisor(store) as supervisor:
            task = supervisor.start("default", ["yes"], output_limit_bytes=2**20)
            task = supervisor.wait(task.task_id, BOUND_S)
            eventually(lambda: supervisor.running == 0)
    code, out, err = raw(cli, "logs", "-f", task.task_id)
    assert (code, len(out)) == (0, 2**20)
    assert f"{2**20:,} of {task.seen_bytes:,} bytes" in err.decode()
    assert f"{task.seen_bytes:,}" in cli.inside("output", task.task_id, code=1).err


def test_a_thousand_runs_are_followed_to_their_last_byte(tmp_path: Path) -> None:
    """Each ends without a newline, and is followed while it is written: every follower has every byte, and has ended
    within a second of the completion."""

    def follow(run: Path) -> tuple[bytes, float]:
        data = b"".join(RunLogReader(run).follow())
        return data, time.monotonic()

    def one(number: int) -> tuple[Path, bytes]:
        run = tmp_path / str(number)
        run.mkdir(mode=0o700)
        return run, b"line\n" * (number % 7) + b"last %d" % number

    with ThreadPoolExecutor(20) as pool:
        for first in range(0, 1000, 20):
            with contextlib.ExitStack() as stack:
                runs = [one(number) for number in range(first, first + 20)]
                disk = Disk(durable=False)
                writers = [
                    stack.enter_context(RunLogWriter(run, task_id="t", run_id="r", disk=disk)) for run, _ in runs
                ]
                followers = [pool.submit(follow, run) for run, _ in runs]
                for writer, (_, data) in zip(writers, runs, strict=True):
                    writer.accept("here")
                    writer.append_native(stdout=data)
                completed = []
                for writer in writers:
                    writer.complete("completed")
                    completed.append(time.monotonic())
                for (_, data), follower, since in zip(runs, followers, completed, strict=True):
                    got, ended = follower.result(BOUND_S)
                    assert got == data
                    assert ended - since < 1.0


# --- gc ----------------------------------------------------------------------------------------------------


def test_gc_takes_away_what_is_old_and_was_seen(cli: Cli) -> None:
    """Logs go; who ran and how it ended stays, and so does what nobody has seen yet."""
    cli.inside("run", "sh", "-c", "echo seen")
    seen = cli.inside("ps", "-a").out.split("\t")[0]
    unseen = cli.inside("run", "--detach", "--", "sh", "-c", "echo unseen").out.strip()
    cli.inside("wait", unseen)
    assert cli.json_inside("gc", "--older-than", "1h")["sessions"][0]["logs_removed"] == 0
    before = cli.json_inside("show", seen)
    assert cli.json_inside("gc", "--older-than", "0")["sessions"][0]["logs_removed"] == 1
    assert cli.json_inside("show", seen) == before
    assert cli.inside("logs", unseen).out == "unseen\n"
    assert "gc" in cli.inside("logs", seen, code=3).err


def test_a_terminal_gets_a_table_that_fits(cli: Cli) -> None:
    """Cut to its width, with what a command's own text would do to it made visible."""
    cli.inside("run", "sh", "-c", "exit 3 # \x1b[2J" + "long " * 50, code=3)
    cli.inside("run", "-d", "a few words", "true")
    with Terminal(cli.command("ps", "-a"), cli.env, width=70) as terminal:
        assert terminal.wait() == 0
    lines = re.sub("\x1b\\[[0-9;]*m", "", terminal.text).splitlines()
    assert [line.split()[1] for line in lines] == ["STATUS", "completed", "failed"]
    assert lines[1].endswith("a few words")
    assert "\\x1b[2J" in lines[2]
    assert max(map(len, lines)) <= 70
    with Terminal(cli.command("ps"), cli.env) as terminal:
        assert "nothing runs" in terminal.until("nothing runs")
        terminal.wait()


def test_fsck_names_a_damaged_journal(cli: Cli) -> None:
    """With its place; the file stays as it was, and what needs it refuses."""
    cli.inside("run", "true")
    path = cli.home / "sessions" / "default" / "tasks.jsonl"
    good = path.read_bytes()
    bad = bytearray(good)
    bad[40] ^= 1
    path.write_bytes(bad)
    (report,) = cli.json_inside("fsck", code=6)["sessions"]
    assert [one["where"] for one in report["findings"]] == ["tasks.jsonl"]
    assert cli.inside("run", "true", code=6).out == ""
    assert path.read_bytes() == bad
    path.write_bytes(good)


def test_fsck_names_run_logs_that_are_not_what_their_states_say(cli: Cli) -> None:
    """Too short, too long, gone, without a state, damaged, of another run, a stream too short: each with its place,
    and nothing is changed."""
    cli.inside("run", "--", "sh", "-c", "echo out; echo err >&2")
    (run,) = (cli.home / "sessions" / "default" / "runs").iterdir()
    log, state, stdout = run / "log", run / "log.state", run / "stdout"
    whole = {path: path.read_bytes() for path in (log, state, stdout)}
    cases: dict[tuple[str, str], dict[Path, bytes | None]] = {
        ("log", "has 7 bytes, its state says 8"): {log: whole[log][:-1]},
        ("log", "is complete with 8 bytes and has 9"): {log: whole[log] + b"x"},
        ("log", "has 0 bytes, its state says 8"): {log: None},
        ("log", "has 8 bytes and no checkpoint"): {state: None},
        ("log.state", "no whole record"): {state: whole[state][:100]},
        ("log.state", "no whole record "): {state: b"\0" * 5000},
        ("stdout", "has 3 bytes, the log took 4"): {stdout: whole[stdout][:3]},
    }
    for (where, what), damage in cases.items():
        for path, data in damage.items():
            path.unlink() if data is None else path.write_bytes(data)
        (report,) = cli.json_inside("fsck", code=6)["sessions"]
        assert [one["where"] for one in report["findings"]] == [f"runs/{run.name}/{where}"], what
        assert what.strip() in report["findings"][0]["what"]
        for path, data in damage.items():
            assert (path.read_bytes() if path.exists() else None) == data
            path.write_bytes(whole[path])
            path.chmod(0o600)
    other = run.with_name("another-run")
    shutil.copytree(run, other)
    (report,) = cli.json_inside("fsck", code=6)["sessions"]
    assert [one["where"] for one in report["findings"]] == ["runs/another-run/log.state"]
    shutil.rmtree(other)
    assert cli.json_inside("fsck")["findings"] == 0


def test_ids_of_commands_are_completed(cli: Cli) -> None:
    """As those of jobs, without opening anything."""
    cli.inside("run", "true")
    task_id = cli.inside("ps", "-a").out.split("\t")[0]
    words = {"COMP_WORDS": f"openjobs logs {task_id[:4]}", "COMP_CWORD": "2"}
    said = cli.run(env={"_OPENJOBS_COMPLETE": "bash_complete", **words}).out
    assert said == f"plain,{task_id}\n"


# --- the index ---------------------------------------------------------------------------------------------


def test_an_id_that_was_only_indexed_is_nobodys(cli: Cli) -> None:
    """The index is written before the intent: a crash between the two leaves an entry without a task."""
    cli.inside("run", "true")
    phantom = "12345678-0000-4000-8000-000000000000"
    index = FileIndex(cli.home / "index", Disk(), name="tasks")
    index.add([Entry(job_id=phantom, session_id="default")])
    index.close()
    cli.inside("show", phantom, code=3)
    assert len(cli.inside("ps", "-a").out.splitlines()) == 1


def test_nothing_is_slow_to_see(cli: Cli) -> None:
    """A follower has a line long before the command ends."""
    task_id = cli.inside("run", "--detach", "--", "sh", "-c", "echo first; exec sleep 300").out.strip()
    with cli.start("logs", "-f", task_id) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        cli.inside("stop", task_id)
        began = time.monotonic()
        assert process.wait(BOUND_S) == 0
        assert time.monotonic() - began < BOUND_S
    assert os.path.exists(cli.home)
