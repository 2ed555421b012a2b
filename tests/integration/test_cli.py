"""The command line in pipes: real processes, every exit code, every JSON shape, hostile text, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from openjobs.jobs import JobStatus
from tests.support import eventually, git
from tests.support.cli import ROOT, Cli

UNKNOWN = "ffffffff-ffff-4fff-8fff-ffffffffffff"
#: a prompt that moves the cursor, sets a title, clears the screen and reverses the reading order
HOSTILE = "echo hi #\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"


def shell(cli: Cli, script: str, *more: str, code: int | None = 0, **options: Any) -> Any:
    return cli.run("agent", "--agent", "shell", *more, script, code=code, **options)


def quickly(cli: Cli, script: str, *more: str, code: int | None = 0) -> Any:
    return cli.inside("agent", "--agent", "shell", *more, script, code=code)


def background(cli: Cli, script: str, *more: str) -> str:
    return str(shell(cli, script, "--background", *more).out.strip())


def uuid(number: int, prefix: str = "0") -> str:
    return f"{prefix * 8}-{number:04x}-4000-8000-000000000000"


# --- one job ---------------------------------------------------------------------------------------------


def test_a_result_comes_out_byte_for_byte_and_the_rest_goes_to_stderr(cli: Cli) -> None:
    """In a pipe stdout has the result alone, as it is; how it ended is on stderr."""
    done = shell(cli, "printf 'a\\033[31mb\\n\\nc'")
    assert done.out == "a\x1b[31mb\n\nc\n"
    assert done.err.startswith("job ")
    assert " completed in " in done.err
    assert "\x1b" not in done.err
    (job,) = cli.json("list")["jobs"]
    again = cli.run("output", job["job_id"])
    assert again.out == done.out


def test_without_a_session_the_one_named_default_is_made(cli: Cli) -> None:
    """The first job makes the session `default`; a named session is made as well, and both are listed."""
    quickly(cli, "true")
    quickly(cli, "true", "--session", "other")
    assert {one["session_id"] for one in cli.json_inside("sessions")["sessions"]} == {"default", "other"}
    assert {job["parent_session_id"] for job in cli.json_inside("list")["jobs"]} == {"default", "other"}
    assert [job["parent_session_id"] for job in cli.json_inside("list", "--session", "other")["jobs"]] == ["other"]


def test_options_of_a_job_are_what_it_is_run_with(cli: Cli, tmp_path: Path) -> None:
    """Description, directory, environment, context and id reach the job."""
    job_id = uuid(1)
    args = ["--description", "where am I", "--cwd", str(tmp_path), "--job-id", job_id, "--context", "clean"]
    secret = {"GREETING": "hello", "TOKEN": "sesame"}
    done = shell(cli, 'pwd; echo "$GREETING $OPENJOBS_JOB_ID"', *args, env=secret)
    assert done.out.splitlines() == [str(tmp_path.resolve()), f"hello {job_id}"]
    shown = cli.json("show", job_id)
    assert (shown["subject"], shown["context_mode"], shown["agent_id"]) == ("where am I", "clean", "shell")
    assert shown["status"] == "completed"
    everything = subprocess.run(["grep", "-r", "sesame", cli.home], capture_output=True, check=False)
    assert (everything.returncode, everything.stdout) == (1, b"")


def test_a_prompt_can_come_from_standard_input(cli: Cli) -> None:
    """`-` reads the prompt, however long, from stdin."""
    text = "line\n" * 40_000
    assert cli.run("agent", "--agent", "echo", "-", stdin=text).out == text


def test_the_same_id_again_returns_the_same_job_and_runs_nothing(cli: Cli, tmp_path: Path) -> None:
    """A repeated command is answered with the first job's result; another request under its id is refused."""
    script = f"echo ran >> {tmp_path}/count; echo done"
    for _ in range(2):
        assert quickly(cli, script, "--job-id", uuid(1)).out == "done\n"
    assert (tmp_path / "count").read_text() == "ran\n"
    refused = quickly(cli, "echo other", "--job-id", uuid(1), code=6)
    assert "another request" in refused.err


def test_a_job_started_within_a_job_is_its_child(cli: Cli) -> None:
    """A nested `openjobs agent` gets its parent from the environment, and the parent's session."""
    inner = shlex.join(cli.command("agent", "--agent", "echo", "from inside"))
    done = shell(cli, inner, "--session", "outer", "-d", "the parent")
    assert done.out == "from inside\n"
    child, parent = cli.json("list")["jobs"]
    assert child["parent_job_id"] == parent["job_id"]
    assert child["parent_session_id"] == "outer"
    assert cli.json("show", parent["job_id"])["children"] == [child["job_id"]]
    assert [job["job_id"] for job in cli.json("list", "--parent", parent["job_id"])["jobs"]] == [child["job_id"]]


def test_a_timeout_stops_the_job(cli: Cli) -> None:
    """`--timeout` is a cancel with its own reason."""
    done = quickly(cli, "sleep 60", "--timeout", "0.3s", code=5)
    assert "cancelled" in done.err
    (job,) = cli.json_inside("list")["jobs"]
    assert (job["status"], job["timeout_s"]) == ("cancelled", 0.3)


# --- in the background -----------------------------------------------------------------------------------


def test_a_background_job_prints_its_id_and_goes_on_by_itself(cli: Cli, tmp_path: Path) -> None:
    """Just the id on stdout; the job runs in the host, is listed, waited for, and its output is read."""
    gate = tmp_path / "gate"
    job_id = background(cli, f"while [ ! -e {gate} ]; do sleep 0.02; done; echo through")
    assert len(job_id) == 36
    assert cli.run("output", job_id, code=4).out == ""
    assert cli.run("wait", job_id, "--timeout", "0.1", code=4).err.startswith("timed out")
    (job,) = cli.json("list", "--status", "unfinished")["jobs"]
    assert job["job_id"] == job_id
    gate.touch()
    assert cli.run("output", job_id[:8], "--wait").out == "through\n"
    assert cli.run("wait", job_id).out.split("\t")[:2] == [job_id, "completed"]


def test_a_foreground_job_uses_the_host_that_lives(cli: Cli) -> None:
    """One pool for a home: with a host alive, the foreground job has the host's runner."""
    first = background(cli, "true")
    cli.run("wait", first)
    assert shell(cli, "echo $PWD", cwd="/").out == "/\n"
    assert len({job["runner_id"] for job in cli.json("list")["jobs"]}) == 1


def test_a_job_on_the_only_worker_may_wait_for_its_children(cli: Cli) -> None:
    """In a pool of one the parent's slot is lent while its command waits, in each of the three ways to wait."""
    openjobs = shlex.join(cli.command())
    script = f"""
        {openjobs} agent --agent echo 'in the foreground'
        id=$({openjobs} agent --agent shell --background 'echo waited for')
        {openjobs} wait $id >/dev/null
        {openjobs} output --wait $id
    """
    job_id = cli.run("agent", "--agent", "shell", "-b", script, env={"OPENPROGRAM_JOB_WORKERS": "1"}).out.strip()
    done = cli.run("output", job_id, "--wait", "--timeout", "50")
    assert [line for line in done.out.splitlines() if not line.startswith("job ")] == [
        "in the foreground",
        "waited for",
    ]
    jobs = cli.json("list", "--parent", job_id)["jobs"]
    assert [job["status"] for job in jobs] == ["completed", "completed"]
    assert len({job["runner_id"] for job in jobs}) == 1


def test_stop_ends_a_running_job_with_its_reason(cli: Cli) -> None:
    """`stop` returns at once; `wait` and `output` then say cancelled, with the partial text kept."""
    job_id = background(cli, "echo so far; sleep 60")
    eventually(lambda: cli.json("show", job_id)["status"] == "running", 20)
    eventually(lambda: cli.json("show", job_id)["partial_result"] == "so far\n", 20)
    assert cli.run("output", job_id, code=4).out == "so far\n"
    (said,) = cli.json("stop", job_id[:12], "--reason", "changed my mind")["jobs"]
    assert said["job_id"] == job_id
    assert cli.run("wait", job_id, code=5).out.split("\t")[1] == "cancelled"
    output = cli.run("output", job_id, code=5)
    assert "changed my mind" in output.err
    assert cli.json("show", job_id)["cancel_reason"] == "changed my mind"
    (again,) = cli.json("stop", job_id)["jobs"]
    assert again["status"] == "cancelled"


def test_wait_for_any_has_the_code_of_the_first_that_ended(cli: Cli) -> None:
    """`--any` returns with the first end; all of them give the worst code."""
    slow = background(cli, "sleep 60")
    failed = background(cli, "exit 3")
    assert cli.run("wait", slow, failed, "--any", code=1).out.split("\t")[:2] == [failed, "errored"]
    told = cli.json("wait", slow, failed, "--timeout", "0", code=4)
    assert [job["job_id"] for job in told["jobs"]] == [slow, failed]
    assert told["timed_out"] is True
    cli.run("stop", slow)
    cli.run("wait", slow, failed, code=1)


# --- exit codes and errors -------------------------------------------------------------------------------


def test_a_job_that_errs_is_exit_code_1(cli: Cli) -> None:
    """The error is on stderr, whole on one line, and output says the same again."""
    done = quickly(cli, "echo partial; exit 3", code=1)
    assert "errored" in done.err
    (job,) = cli.json_inside("list")["jobs"]
    assert cli.inside("output", job["job_id"], code=1).out == done.out
    assert cli.inside("wait", job["job_id"], code=1).err == ""


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["list", "--nonsense"],
        ["list", "--limit", "-1"],
        ["list", "--status", "sleeping"],
        ["agent"],
        ["agent", "--agent", "echo", "  "],
        ["agent", "--agent", "echo", "--session", "../escape", "hi"],
        ["agent", "--agent", "echo", "--job-id", "not-a-uuid", "hi"],
        ["agent", "--agent", "echo", "--timeout", "soon", "hi"],
        ["output", UNKNOWN, "--timeout", "3"],
        ["history", UNKNOWN, "--session", "default"],
        ["wait"],
    ],
)
def test_wrong_usage_is_exit_code_2_in_one_line(cli: Cli, args: list[str]) -> None:
    """One line on stderr, nothing on stdout, and nothing is made."""
    said = cli.inside(*args, code=2)
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert not (cli.home / "sessions" / "default").exists()


@pytest.mark.parametrize("workers", ["0", "-1", "abc", "1e9"])
def test_a_wrong_number_of_workers_names_the_variable(cli: Cli, workers: str) -> None:
    """The error for OPENPROGRAM_JOB_WORKERS says which variable it is about."""
    said = cli.inside("agent", "--agent", "echo", "hi", code=2, env={"OPENPROGRAM_JOB_WORKERS": workers})
    assert "OPENPROGRAM_JOB_WORKERS" in said.err
    assert len(said.err.splitlines()) == 1


def test_no_profile_leaves_no_session_and_says_what_works(cli: Cli) -> None:
    """An unknown agent is exit code 3, names `--agent shell`, and writes nothing."""
    said = cli.inside("agent", "do something", code=3)
    assert "--agent shell" in said.err
    assert "config.toml" in said.err
    assert cli.json_inside("sessions")["sessions"] == []


def test_ids_may_be_shortened_and_doubt_is_answered_with_candidates(cli: Cli) -> None:
    """A unique beginning works; an ambiguous or unknown one is exit code 3 with the candidates."""
    first, second = uuid(0x1111), uuid(0x2222)
    quickly(cli, "echo first", "--job-id", first, "-d", "the first")
    quickly(cli, "echo second", "--job-id", second, "-d", "the second")
    assert cli.inside("output", first[:10]).out == "first\n"
    assert cli.inside("output", second[:10].upper()).out == "second\n"
    said = cli.inside("show", "0000", code=3)
    assert f"  {first}  completed  the first" in said.err
    assert f"  {second}  completed  the second" in said.err
    said = cli.inside("stop", "abc", code=3)
    assert "no job id begins with 'abc'" in said.err
    assert second in said.err
    error = json.loads(cli.inside("output", "0000", "--json", code=3).err)
    assert (error["error"], error["exit_code"], len(error["candidates"])) == ("AmbiguousId", 3, 2)
    assert "there is no session" in cli.inside("list", "--session", "defaut", code=3).err
    assert "default" in cli.inside("history", "--session", "def", code=3).err


def test_a_damaged_store_is_exit_code_6_without_a_traceback(cli: Cli) -> None:
    """Damage is told in one line, with what to do; fsck names it."""
    shell(cli, "true")
    assert cli.run("fsck").out.startswith("default: ok (")
    head = cli.home / "sessions" / "default" / "repo" / ".git" / "HEAD"
    head.write_text("garbage\n")
    said = cli.run("list", "--session", "default", code=6)
    assert len(said.err.splitlines()) == 1
    assert "Traceback" not in said.err
    assert "finding" in cli.run("fsck", code=6).out
    report = cli.json("fsck", code=6)
    assert report["findings"] == len(report["sessions"][0]["findings"]) > 0
    # Another session is still readable, and the list of sessions says which one is not.
    shell(cli, "true", "--session", "whole")
    told = {one["session_id"]: one["error"] for one in cli.json("sessions")["sessions"]}
    assert told["default"]
    assert told["whole"] is None


def test_a_home_that_cannot_be_used_is_told(cli: Cli, tmp_path: Path) -> None:
    """A file in the place of the home, or a home that is not ours alone, is one line and no traceback."""
    file = tmp_path / "file"
    file.touch()
    crowded = tmp_path / "crowded"
    crowded.mkdir(mode=0o755)
    (crowded / "thesis.txt").touch()
    for home in (file, crowded):
        said = cli.inside("--home", home, "list", code=None)
        assert said.code in (2, 6)
        assert str(home) in said.err
        assert len(said.err.splitlines()) == 1
    assert stat.S_IMODE(crowded.stat().st_mode) == 0o755


def test_where_an_error_came_from_is_shown_on_request_only(cli: Cli) -> None:
    """A traceback appears with OPENJOBS_DEBUG=1 and never without."""
    assert "Traceback" in cli.run("show", "abc", code=1, env={"OPENJOBS_DEBUG": "1"}).err
    assert "Traceback" not in cli.run("show", "abc", code=3).err


# --- hostile text ----------------------------------------------------------------------------------------


def test_control_characters_of_a_job_are_shown_wherever_it_is_listed(cli: Cli) -> None:
    """R10: no list, history, error or JSON lets a job's text act on a terminal."""
    quickly(cli, HOSTILE, "-d", HOSTILE, "--job-id", uuid(1))
    quickly(cli, f"echo '{HOSTILE}' >&2; exit 1", "--job-id", uuid(2), code=1)
    listings = [["list"], ["show", uuid(1)], ["show", uuid(2)], ["history"], ["history", uuid(1)], ["wait", uuid(2)]]
    more = [["list", "--json"], ["show", uuid(2), "--json"], ["history", "--json"], ["show", "0"], ["fsck"]]
    said = [cli.inside(*args, code=None) for args in [*listings, *more]]
    for one in said:
        for character in ("\x1b", "\x07", "\x9b", "\u202e"):
            assert character not in one.out + one.err
    assert "\\x1b[2J" in said[0].out
    assert cli.json_inside("show", uuid(1))["description"] == HOSTILE


def test_what_was_typed_is_shown_too_when_it_is_refused(cli: Cli) -> None:
    """An option or id with control characters in it is not echoed to the terminal."""
    for args in (["list", "--\x1b[2J"], ["show", "\x1b[2J"], ["list", "--session", "\x1b[2J"]):
        said = cli.inside(*args, code=None)
        assert said.code in (2, 3)
        assert "\x1b" not in said.err


# --- signals and pipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_host", [False, True], ids=["own runner", "host"])
def test_ctrl_c_stops_a_foreground_job_and_says_so(cli: Cli, tmp_path: Path, with_host: bool) -> None:
    """SIGINT: the job is cancelled, its command is gone, the exit code is 130."""
    if with_host:
        cli.run("wait", background(cli, "true"))
    pid_file = tmp_path / "pid"
    with cli.start(
        "agent", "--agent", "shell", f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 60"
    ) as one:
        eventually(pid_file.exists, 20)
        one.send_signal(signal.SIGINT)
        out, err = one.communicate(timeout=20)
    assert one.returncode == 130, err
    assert out == ""
    assert "interrupted" in err
    assert "cancelled" in err
    assert "Traceback" not in err
    job = cli.json("list")["jobs"][0]
    assert (job["status"], job["cancel_reason"]) == ("cancelled", "interrupted")
    eventually(lambda: not alive(int(pid_file.read_text())))


def test_a_second_ctrl_c_leaves_at_once(cli: Cli, tmp_path: Path) -> None:
    """While the job takes its time to end, a second SIGINT ends the command line by that signal."""
    pid_file = tmp_path / "pid"
    script = f"trap '' TERM; echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; while :; do sleep 0.05; done"
    with cli.start("agent", "--agent", "shell", script) as one:
        eventually(pid_file.exists, 20)
        assert one.stderr is not None
        one.send_signal(signal.SIGINT)
        assert "Ctrl-C again" in one.stderr.readline()
        one.send_signal(signal.SIGINT)
        one.wait(timeout=20)
    assert one.returncode in (-signal.SIGINT, 130)
    os.killpg(int(pid_file.read_text()), signal.SIGKILL)
    # The next command that meets the job finds its process dead and says what is known.
    (job,) = cli.json("list")["jobs"]
    assert job["status"] in ("errored", "cancelled")
    assert job["error"] in ("worker died before completion", None)


def test_sigterm_stops_the_job_in_the_ordered_way(cli: Cli, tmp_path: Path) -> None:
    """A terminated command line ends its job before it goes."""
    ready = tmp_path / "ready"
    with cli.start("agent", "--agent", "shell", f"touch {ready}; sleep 60") as one:
        eventually(ready.exists, 20)
        one.send_signal(signal.SIGTERM)
        _, err = one.communicate(timeout=20)
    assert one.returncode == 128 + signal.SIGTERM, err
    (job,) = cli.json("list")["jobs"]
    assert job["status"] == "cancelled"


def test_ctrl_c_while_waiting_leaves_the_job_alone(cli: Cli) -> None:
    """`wait` is interrupted with 130; the job goes on."""
    job_id = background(cli, "sleep 60")
    with cli.start("wait", job_id) as one:
        # No sign from outside tells that it waits: interrupted earlier it ends in the same way.
        eventually(lambda: cli.json("show", job_id)["status"] == "running", 20)
        one.send_signal(signal.SIGINT)
        _, err = one.communicate(timeout=20)
    assert one.returncode in (130, -signal.SIGINT), err
    assert cli.json("show", job_id)["status"] == "running"
    cli.run("stop", job_id)
    cli.run("wait", job_id, code=5)


def test_a_reader_that_goes_away_ends_it_quietly(cli: Cli) -> None:
    """`openjobs list | head`: no traceback, no complaint, and the code a shell gives to SIGPIPE."""
    quickly(cli, "true")
    quiet = (["list"], ["list", "--json"], ["--version"], ["--help"], ["list", "--help"])
    for args in (*quiet, ["agent", "--agent", "echo", "hi"]):
        with nobody_reads() as closed:
            said = cli.run(*args, code=141, stdout=closed)
        assert said.err == ""


@contextmanager
def nobody_reads() -> Iterator[IO[bytes]]:
    """A pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        yield closed


@contextmanager
def takes_nothing() -> Iterator[IO[bytes]]:
    """What every write to fails, as on a full disk."""
    with open(os.devnull, "rb") as only_for_reading:
        yield only_for_reading


def test_an_output_that_cannot_be_written_is_said_to_be_that(cli: Cli) -> None:
    """A code of its own and one line that names standard output, whatever the command: not that of a damaged store."""
    quickly(cli, "true")
    for args in (["list"], ["sessions"], ["--version"], ["--help"], ["list", "-h"], ["completion", "bash"], ["fsck"]):
        with takes_nothing() as full:
            said = cli.run(*args, code=74, stdout=full)
        assert said.err == "openjobs: standard output could not be written: Bad file descriptor\n"
    with takes_nothing() as full:
        told = json.loads(cli.run("list", "--json", code=74, stdout=full).err)
    assert (told["exit_code"], told["message"].partition(":")[0]) == (74, "standard output could not be written")


def test_a_job_whose_result_cannot_be_written_is_named(cli: Cli) -> None:
    """It ended and is kept: stderr says which it is and what prints it."""
    with takes_nothing() as full:
        said = cli.run("agent", "--agent", "echo", "hi", code=74, stdout=full).err
    (job,) = cli.json_inside("list")["jobs"]
    shown = job["job_id"][:8]
    assert f"standard output could not be written: Bad file descriptor; job {shown} completed; " in said
    assert f"`openjobs output {shown}`" in said


@pytest.mark.parametrize(
    ("target", "code", "why"),
    [
        (takes_nothing, 74, "standard output could not be written: Bad file descriptor"),
        (nobody_reads, 141, "nobody reads standard output"),
    ],
)
@pytest.mark.parametrize("what", ["job", "task"])
def test_what_was_handed_over_is_named_where_its_id_cannot_be_written(
    cli: Cli, what: str, target: Callable[[], AbstractContextManager[IO[bytes]]], code: int, why: str
) -> None:
    """It runs by itself, and nothing else says by which id it can be stopped."""
    args = ["agent", "--agent", "shell", "-b", "exit"] if what == "job" else ["run", "--detach", "true"]
    for as_json in ([], ["--json"]):
        with target() as stdout:
            said = cli.run(*as_json, *args, code=code, stdout=stdout).err
        listed = cli.json_inside("list")["jobs"] if what == "job" else cli.json_inside("ps", "-a")["tasks"]
        found = listed[0][f"{what}_id"]
        words = f"{why}; {what} {found} was handed over and goes on; `openjobs stop {found}` stops it"
        assert (json.loads(said)["message"] if as_json else said) == (words if as_json else f"openjobs: {words}\n")
    cli.run("wait", found)


def test_who_cannot_be_told_keeps_no_other_job_from_being_stopped(cli: Cli) -> None:
    """All are asked before the first is told."""
    jobs = [background(cli, "sleep 60") for _ in range(2)]
    task_id = cli.run("run", "--detach", "sleep", "60").out.strip()
    with takes_nothing() as full:
        cli.run("stop", task_id, *jobs, code=74, stdout=full)
    assert cli.run("wait", *jobs, task_id, code=5).out.count("cancelled") == 3


def test_list_watch_tells_every_change_until_it_is_interrupted(cli: Cli) -> None:
    """In a pipe `list --watch` prints a job again whenever it changed; with --json one value a line."""
    shell(cli, "true", "--job-id", uuid(1))
    with cli.start("list", "--watch", "--json") as one:
        assert one.stdout is not None
        assert json.loads(one.stdout.readline())["job_id"] == uuid(1)
        shell(cli, "true", "--job-id", uuid(2))
        seen = [json.loads(one.stdout.readline())]
        while seen[-1]["status"] not in ("completed", "errored"):
            seen.append(json.loads(one.stdout.readline()))
        assert {job["job_id"] for job in seen} == {uuid(2)}
        one.send_signal(signal.SIGINT)
        _, err = one.communicate(timeout=20)
    assert one.returncode == 130, err


# --- shapes ----------------------------------------------------------------------------------------------

#: as docs/cli.md lists them; tests/unit/test_docs_cli.py holds that list against the real one
PAGE = (ROOT / "docs" / "cli.md").read_text()
JOB_KEYS = set(re.findall(r"`(\w+)`", PAGE.partition("fields of a row: ")[2].partition(". What")[0]))


def test_json_has_the_shapes_that_the_page_promises(cli: Cli) -> None:
    """Each command's value has exactly the documented names."""
    job = cli.json_inside("agent", "--agent", "echo", "hi")
    assert set(job) == JOB_KEYS
    assert job["result_text"] == "hi"
    job_id = job["job_id"]
    spawned = cli.json_inside("agent", "--agent", "echo", "--background", "ho")
    assert set(spawned) == {"job_id", "status", "parent_msg_id", "session_id"}
    waited = cli.json_inside("wait", job_id, spawned["job_id"])
    assert set(waited) == {"jobs", "timed_out"}
    assert [set(one) for one in waited["jobs"]] == [JOB_KEYS, JOB_KEYS]
    listed = cli.json_inside("list", "--limit", "1")
    assert set(listed) == {"jobs", "more"}
    assert listed["more"] is True
    assert set(listed["jobs"][0]) == JOB_KEYS | {"cut"}
    (older,) = cli.json_inside("list", "--before", spawned["job_id"])["jobs"]
    assert older["job_id"] == job_id
    assert set(cli.json_inside("show", job_id)) == JOB_KEYS | {"children", "partial_result"}
    assert set(cli.json_inside("output", job_id)) == JOB_KEYS
    (stopped,) = cli.json_inside("stop", job_id)["jobs"]
    assert set(stopped) == {"job_id", "status", "cancel_requested_at", "cancel_reason"}
    steps = cli.json_inside("history", job_id)["commits"]
    names = {"commit_id", "time", "kind", "status", "job_id", "runner_id", "subject"}
    assert [set(step) for step in steps] == [names] * 4
    assert [step["status"] for step in steps] == ["pending", "queued", "running", "completed"]
    assert set(cli.json_inside("history")["commits"][0]) == names
    told = cli.json_inside("sessions")
    assert set(told) == {"sessions", "more"}
    assert set(told["sessions"][0]) == {"session_id", "title", "unfinished", "changed_at", "repository", "error"}
    assert cli.json_inside("recover") == {"jobs": [], "tasks": [], "indexed": 0}
    report = cli.json_inside("fsck")
    assert set(report) == {"sessions", "home", "findings"}
    assert set(report["sessions"][0]) == {"session_id", "counts", "findings"}
    (packed,) = cli.json_inside("gc")["sessions"]
    assert set(packed) == {"session_id", "before_bytes", "after_bytes", "logs_removed", "logs_bytes"}
    assert set(cli.json_inside("completion", "bash")) == {"shell", "script"}


def test_the_commits_shown_are_those_that_git_shows(cli: Cli) -> None:
    """`history` and `git log` name the same commits in the same order."""
    quickly(cli, "true")
    (session,) = cli.json_inside("sessions")["sessions"]
    log = git("log", "--reverse", "--format=%H %s", cwd=session["repository"]).splitlines()
    assert [f"{one['commit_id']} {one['subject']}" for one in cli.json_inside("history")["commits"]] == log
    assert [line.split("\t")[0] for line in cli.inside("history", "-n", "2").out.splitlines()] == [
        line.split()[0] for line in log[-2:]
    ]


def test_a_long_result_is_whole_in_show_and_marked_as_cut_in_list(cli: Cli) -> None:
    """A list holds beginnings of long texts and says which; `show`, `output` and `wait` have all of it."""
    text = "x" * 5000
    cli.inside("agent", "--agent", "echo", text)
    (listed,) = cli.json_inside("list")["jobs"]
    assert set(listed["cut"]) == {"description", "result_text"}
    assert len(listed["result_text"]) < 5000
    assert cli.json_inside("show", listed["job_id"])["result_text"] == text
    assert cli.json_inside("wait", listed["job_id"])["jobs"][0]["result_text"] == text


# --- the demo, completion and the rest -------------------------------------------------------------------


def test_the_demo_ends_as_expected_and_its_git_command_works(cli: Cli, tmp_path: Path) -> None:
    """It exits with 0, shows each transition, and the printed command shows the same commits."""
    done = cli.run("demo", "--keep", tmp_path / "demo")
    assert "Each job ended as it should." in done.out
    (look,) = [line.strip() for line in done.out.splitlines() if line.strip().startswith("git -C")]
    log = subprocess.run(look, shell=True, capture_output=True, text=True, check=True).stdout.splitlines()
    for line in log:
        commit, _, subject = line.partition(" ")
        assert any(shown.startswith(commit[:7]) and shown.endswith(subject) for shown in done.out.splitlines()), line
    for status in JobStatus:
        assert status.value in done.out
    assert not cli.home.exists()


def test_the_demo_again_in_the_same_home_is_another_session(cli: Cli) -> None:
    """`--home` or `--keep` may name a home that was used before; JSON has all of it."""
    first = cli.json_inside("demo", "--home", cli.home)
    assert set(first) == {"ok", "wrong", "home", "session_id", "command", "jobs", "commits"}
    assert (first["ok"], first["wrong"], first["session_id"]) == (True, [], "demo")
    ends = sorted(job["status"] for job in first["jobs"])
    assert ends == ["cancelled", *["completed"] * 6, "errored"]
    assert cli.json_inside("demo", "--keep", cli.home)["session_id"] == "demo-2"
    assert cli.inside("fsck").out.count(": ok (") == 2


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("openjobs sh", ["show"]),
        ("openjobs output --w", ["--wait"]),
        ("openjobs show 0", [uuid(2), uuid(1)]),
        ("openjobs wait 00000000-0001", [uuid(1)]),
        ("openjobs list --session de", ["default"]),
        ("openjobs agent --agent sh", ["shell"]),
    ],
)
def test_commands_options_ids_sessions_and_profiles_complete(cli: Cli, words: str, wanted: list[str]) -> None:
    """What bash asks at the tab key, it is answered; ids newest first."""
    quickly(cli, "true", "--job-id", uuid(1))
    quickly(cli, "true", "--job-id", uuid(2))
    env = {"_OPENJOBS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    said = cli.run(env=env)
    assert [line.partition(",")[2] for line in said.out.splitlines()] == wanted


def test_completion_is_silent_where_there_is_no_home(cli: Cli) -> None:
    """At the tab key nothing is made and nothing is complained about."""
    env = {"_OPENJOBS_COMPLETE": "bash_complete", "COMP_WORDS": "openjobs show ", "COMP_CWORD": "2"}
    said = cli.inside(env=env)
    assert (said.out.strip(), said.err) == ("", "")
    assert not cli.home.exists()


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(cli: Cli, kind: str) -> None:
    """The script alone goes to stdout, ready for eval."""
    said = cli.inside("completion", kind)
    assert "_OPENJOBS_COMPLETE" in said.out
    assert said.err == ""


def test_recover_ends_what_a_killed_process_left(cli: Cli, tmp_path: Path) -> None:
    """After kill -9 of a foreground command line its job is errored, once."""
    pid_file = tmp_path / "pid"
    script = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 60"
    with cli.start("agent", "--agent", "shell", script, "--job-id", uuid(1)) as one:
        eventually(pid_file.exists, 20)
        eventually(lambda: len(cli.json("history", uuid(1))["commits"]) == 3, 20)
        one.kill()
        one.wait(timeout=20)
    (job,) = cli.json("recover")["jobs"]
    assert (job["job_id"], job["status"], job["error"]) == (uuid(1), "errored", "worker died before completion")
    assert cli.json("recover")["jobs"] == []
    if alive(int(pid_file.read_text())):
        os.killpg(int(pid_file.read_text()), signal.SIGKILL)


def test_options_of_every_command_may_stand_before_it(cli: Cli, tmp_path: Path) -> None:
    """`--home` and `--json` before the command mean the same; the nearer `--home` wins over the variable."""
    quickly(cli, "true", "--job-id", uuid(1))
    other = {"OPENJOBS_HOME": str(tmp_path / "other")}
    for args in (["--json", "list", "--home", str(cli.home)], ["--home", str(cli.home), "list", "--json"]):
        assert [job["job_id"] for job in cli.inside(*args, env=other).json["jobs"]] == [uuid(1)]
    assert cli.inside("--json", "list", env=other).json["jobs"] == []


def test_closed_streams_are_no_trouble(cli: Cli) -> None:
    """`>&-` and `2>&-`: nothing to write to is nothing to complain about."""
    for redirect in (">&-", "2>&-", ">&- 2>&-"):
        line = f"{shlex.join(cli.command('agent', '--agent', 'echo', 'hi'))} {redirect}"
        done = subprocess.run(["sh", "-c", line], env=cli.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


def test_version_and_help_work_without_a_home(cli: Cli) -> None:
    """Nothing is made for them."""
    from openjobs._version import __version__

    assert cli.inside("--version").out == f"openjobs {__version__}\n"
    assert "Exit codes" in cli.inside("--help").out
    assert "--reason" in cli.inside("stop", "-h").out
    assert not cli.home.exists()


def test_help_loads_no_command_and_nothing_heavy(cli: Cli) -> None:
    """`openjobs --help` imports click and the group, not git, rich, the store or any command."""
    code = (
        "import sys; from openjobs.cli.app import run; run(['--help'])\n"
        "heavy = {'dulwich', 'rich', 'attrs', 'orjson', 'psutil', 'cattrs', 'tenacity', 'platformdirs'}\n"
        "ours = {name for name in sys.modules if name.startswith('openjobs.')}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "print(sorted(ours - {'openjobs.errors'}), file=sys.stderr)\n"
    )
    done = subprocess.run([*cli.command()[:1], "-c", code], env=cli.env, capture_output=True, text=True, check=True)
    heavy, ours = done.stderr.splitlines()
    assert heavy == "[]"
    rooms = {name.split(".")[1] for name in json.loads(ours.replace("'", '"'))}
    assert rooms <= {"cli", "_version"}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended; only its parent has not been told yet.
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
