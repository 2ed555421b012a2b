"""What people mistype: huge numbers, nothing at all, a command of another program, a home that is not there."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from openjobs.cli import table
from tests.support import eventually
from tests.support.cli import Cli, Terminal

HUGE = "9" * 20
#: more digits than Python turns into a number
ENDLESS = "9" * 5000


def uuid(number: int) -> str:
    return f"{number:08x}-0000-4000-8000-000000000000"


def echo(cli: Cli, *more: str) -> None:
    cli.inside("agent", "--agent", "echo", *more, "hi")


@pytest.mark.parametrize("number", [HUGE, ENDLESS, "1000000000"], ids=["huge", "endless", "a milliard"])
def test_a_huge_limit_means_all(cli: Cli, number: str) -> None:
    """Every command that takes `--limit` understands more than there can be."""
    echo(cli)
    for args in (["list"], ["ps"], ["ps", "-a"], ["ps", "--session", "default"], ["history"], ["sessions"]):
        said = cli.inside(*args, "-n", number)
        assert said.err == ""
        assert said.out == cli.inside(*args).out


@pytest.mark.parametrize("number", ["-1", "1.5", "many", "", "1_0", "٣"])
def test_what_is_no_number_is_refused(cli: Cli, number: str) -> None:
    """A limit is a whole number from 0 on."""
    for name in ("list", "ps", "history", "sessions"):
        assert "is not a whole number" in cli.inside(name, "-n", number, code=2).err


@pytest.mark.parametrize("time", [HUGE + "d", "9999999999999", ENDLESS, "1e999"])
def test_a_huge_time_means_no_limit(cli: Cli, time: str) -> None:
    """Every command that takes a time understands one that never ends; `run` says how much it takes."""
    job_id = uuid(1)
    cli.inside("agent", "--agent", "echo", "--job-id", job_id, "--timeout", time, "hi")
    assert "at most 24d" in cli.inside("run", "--timeout", time, "true", code=2).err
    assert cli.inside("run", "--timeout", "24d", "true").err == ""
    assert cli.inside("wait", job_id, "--timeout", time).err == ""
    assert cli.inside("output", job_id, "--wait", "--timeout", time).out == "hi\n"
    assert cli.inside("gc", "--older-than", time).out.startswith("default: ")


@pytest.mark.parametrize("time", ["-1", "nan", "inf", "-0", "", "d"])
def test_what_is_no_time_is_refused(cli: Cli, time: str) -> None:
    assert "is not a time" in cli.inside("gc", "--older-than", time, code=2).err


def test_a_wait_at_the_host_may_be_longer_than_a_sockets(cli: Cli, tmp_path: Path) -> None:
    """A job that waits with a time that no socket takes."""
    script = f'id=$(openjobs_ agent --agent shell -b "sleep 0.5"); openjobs_ wait $id --timeout {HUGE}d'
    inner = script.replace("openjobs_", " ".join(cli.command()))
    assert "completed" in cli.run("agent", "--agent", "shell", inner).out


@pytest.mark.parametrize("background", [[], ["--background"]], ids=["foreground", "background"])
def test_no_time_at_all_is_said_in_words_of_the_command_line(cli: Cli, background: list[str]) -> None:
    """`--timeout 0` names the option, and nothing of what is inside."""
    said = cli.inside("agent", "--agent", "echo", *background, "--timeout", "0", "hi", code=2)
    assert "--timeout" in said.err
    assert "above 0" in said.err
    assert "spawn_job" not in said.err
    assert "timeout_s" not in said.err
    assert "above 0" in cli.inside("run", "--timeout", "0s", "true", code=2).err
    assert not (cli.home / "sessions").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["agent", "--agent", "echo", "a\udcff"],
        ["agent", "--agent", "echo", "-b", "a\udcff"],
        ["agent", "--agent", "echo", "-d", "a\udcff", "hi"],
        ["run", "-d", "a\udcff", "true"],
        ["stop", "abc", "--reason", "a\udcff"],
    ],
)
def test_text_that_is_not_utf8_is_refused(cli: Cli, args: list[str]) -> None:
    """One sentence, without a name from inside, and nothing is made."""
    said = cli.inside(*args, code=2)
    assert "is not UTF-8" in said.err
    assert len(said.err.splitlines()) == 1
    assert "spawn_job" not in said.err


def test_standard_input_that_is_not_utf8_is_refused(cli: Cli) -> None:
    """Also where the locale lets every byte in."""
    for locale in ("C.UTF-8", "C"):
        command = cli.command("agent", "--agent", "echo", "-")
        env = {**cli.env, "LC_ALL": locale}
        ended = subprocess.run(command, input=b"a\xff", env=env, capture_output=True, timeout=40, check=False)
        assert ended.returncode == 2
        assert b"standard input is not UTF-8" in ended.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("help", "'--help'"), ("kill", "'stop'"), ("status", "'list' or 'show'"), ("cancel", "'stop'")),
        *(
            ("lits", "'list'"),
            ("HISTORY", "'history'"),
            ("comp", "'completion'"),
            ("ls", "'list'"),
            ("agnet", "'agent'"),
        ),
    ],
)
def test_a_mistyped_command_is_answered_with_the_near_one(cli: Cli, typed: str, meant: str) -> None:
    """By spelling, by its beginning, or by what other programs call it."""
    said = cli.inside(typed, "1234", code=2).err
    assert f"No such command '{typed}'. Did you mean {meant}?" in said
    assert "Did you mean" not in cli.inside("xyzzy", code=2).err


def test_what_other_programs_call_it_names_commands_that_exist() -> None:
    from openjobs.cli.app import _WHERE, MEANT

    for typed, meant in MEANT.items():
        assert typed not in _WHERE
        for name in meant.split(" or "):
            word = name.strip("'").split()[0]
            assert word in _WHERE or word in ("--help", "--version")


def test_a_mistyped_profile_is_answered_with_the_near_one(cli: Cli) -> None:
    """Before the recipe for a new one; where nothing is near, the recipe alone."""
    first, *rest = cli.inside("agent", "--agent", "shel", "true", code=3).err.splitlines()
    assert first == "openjobs: No profile is named 'shel'; did you mean 'shell'?"
    assert any("config.toml" in line for line in rest)
    assert "did you mean 'echo'?" in cli.inside("agent", "--agent", "Ehco", "true", code=3).err
    for far in ("xyzzy", "mian", "bash"):
        assert "did you mean" not in cli.inside("agent", "--agent", far, "true", code=3).err


def test_who_names_no_agent_is_told_that_there_is_no_default_one(cli: Cli) -> None:
    """Nothing was mistyped: how to set one up, and which there are, those of the home among them."""
    cli.home.mkdir(mode=0o700)
    (cli.home / "config.toml").write_text('[profiles.reviewer]\ncommand = ["echo", "{prompt}"]\n')
    for background in ([], ["--background"]):
        first, *rest = cli.inside("agent", *background, "hello", code=3).err.splitlines()
        assert first.startswith("openjobs: No default agent is set up, a profile named 'main'; ")
        assert "did you mean" not in "\n".join([first, *rest])
        assert f"To set it up, put these three lines into {cli.home / 'config.toml'}:" in rest
        assert "[profiles.main]" in rest
        assert {"  shell", "  claude", "  reviewer"} <= set(rest)


@pytest.mark.parametrize("width", [20, 40])
def test_no_line_wraps_on_a_narrow_terminal(cli: Cli, width: int) -> None:
    """`ps`, `list`, `sessions`, `history` and `wait` are cut to the terminal."""
    cli.inside("run", "sh", "-c", "kill -KILL $$ # " + "long " * 50, code=137)
    cli.inside("run", "-d", "漢字" * 40, "--session", "a-session-with-a-name-of-forty-characters", "true")
    cli.inside("agent", "--agent", "echo", "--job-id", uuid(1), "-d", "subject " * 20, "hi")
    for args in (["ps", "-a"], ["list"], ["sessions"], ["history"], ["wait", uuid(1)[:8]]):
        with Terminal(cli.command(*args), {**cli.env, "NO_COLOR": "1"}, width=width) as terminal:
            assert terminal.wait() == 0
        lines = terminal.text.replace("\r", "").splitlines()
        assert lines
        assert max(map(table.cells, lines)) <= width, (args, lines)


def test_hints_are_for_who_reads_the_screen_not_for_scripts(cli: Cli) -> None:
    """`eval "$(openjobs completion bash)"` at a shell's start prints nothing, though stderr is a terminal."""
    with Terminal(cli.command("completion", "bash"), cli.env) as terminal:
        terminal.until("to use it")
        terminal.wait()
    for args in ("completion bash", "completion fish", "agent --agent echo -b hi"):
        script = f'said="$({" ".join(cli.command())} {args})"; echo ":$?:"'
        with Terminal(["sh", "-c", script], cli.env) as terminal:
            terminal.wait()
        assert terminal.text.split() == [":0:"]


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_id_is_said_to_be_empty(cli: Cli, empty: str) -> None:
    """Whatever takes an id, a session or a home refuses nothing at all, in one line."""
    echo(cli)
    for name in ("stop", "wait", "show", "output", "logs", "history"):
        assert "the id is empty" in cli.inside(name, empty, code=2).err
    assert "the id is empty" in cli.inside("list", "--parent", empty, code=2).err
    for args in (["run", "--session", empty, "true"], ["list", "--session", empty], ["fsck", empty]):
        assert "the session is empty" in cli.inside(*args, code=2).err
    assert "the profile is empty" in cli.inside("agent", "--agent", empty, "hi", code=2).err
    for args in (["--home", empty, "list"], ["list", "--home", empty], ["demo", "--keep", empty]):
        said = cli.inside(*args, code=2)
        assert "directory is empty" in said.err
        assert len(said.err.splitlines()) == 1


def test_history_without_an_id_takes_the_only_session_or_names_those_there_are(cli: Cli) -> None:
    """`default` where there is one, else the only one; else the names to choose from."""
    echo(cli, "--session", "first")
    assert cli.inside("history").out == cli.inside("history", "--session", "first").out != ""
    echo(cli, "--session", "second")
    said = cli.inside("history", code=3).err
    assert "--session" in said
    assert "first" in said
    assert "second" in said
    assert set(json.loads(cli.inside("history", "--json", code=3).err)["candidates"]) == {"first", "second"}
    echo(cli)
    assert cli.inside("history").out == cli.inside("history", "--session", "default").out


LISTS = [["list"], ["ps"], ["ps", "-a"], ["sessions"], ["recover"], ["fsck"], ["gc"], ["gc", "--older-than", "1d"]]
IDS = [
    *([name, "abc"] for name in ("show", "output", "logs", "wait", "stop", "history", "fsck", "gc")),
    *(["history"], ["history", "--session", "x"], ["list", "--session", "x"], ["list", "--parent", "abc"]),
    *(["ps", "--session", "x"], ["logs", "-f", "abc"]),
]


@pytest.mark.parametrize("what", ["nothing", "empty", "a profile"])
def test_looking_at_a_home_that_is_not_there_makes_nothing(cli: Cli, what: str) -> None:
    """Lists are empty, ids are not found, and both say that there is no home yet."""
    if what != "nothing":
        cli.home.mkdir(mode=0o755)
    if what == "a profile":
        (cli.home / "config.toml").write_text('[profiles.mine]\ncommand = ["echo", "{prompt}"]\n')
    before = sorted(cli.home.parent.rglob("*"))
    mode = cli.home.stat().st_mode if what != "nothing" else None
    for args in LISTS:
        said = cli.inside(*args)
        assert said.out == ""
        assert f"there is no home at {cli.home} yet" in said.err
        assert cli.inside(*args, "--json").err == ""
    for args in IDS:
        assert f"there is no home at {cli.home} yet" in cli.inside(*args, code=3).err.splitlines()[0]
        assert "no home" in json.loads(cli.inside(args[0], "--json", *args[1:], code=3).err)["message"]
    cli.inside("agent", "--agent", "xyzzy", "hi", code=3)
    assert sorted(cli.home.parent.rglob("*")) == before
    assert (cli.home.stat().st_mode if what != "nothing" else None) == mode
    echo(cli)
    assert cli.inside("list").err == ""
    assert cli.inside("show", "abc", code=3).err.count("no home") == 0


def test_a_watched_list_sees_a_home_that_is_made_later(cli: Cli) -> None:
    """`list --watch` makes none either."""
    with cli.start("list", "--watch") as watching:
        assert watching.stdout is not None
        with pytest.raises(subprocess.TimeoutExpired):
            watching.wait(1.0)
        assert not cli.home.exists()
        echo(cli, "-d", "at last")
        assert "at last" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130


def test_a_cut_result_says_where_all_of_it_is(cli: Cli) -> None:
    """The command that it names prints every byte."""
    job_id = uuid(1)
    done = cli.inside("agent", "--agent", "shell", "--job-id", job_id, "head -c 2000000 /dev/zero | tr '\\0' x")
    first, second, _ = done.out.split("\n", 2)
    assert first.endswith("bytes were cut]")
    assert second == f"[`openjobs logs {job_id[:8]}` has them all]"
    assert len(cli.run("logs", job_id[:8]).out) == 2_000_000


@pytest.mark.parametrize("with_host", [False, True], ids=["own runner", "host"])
def test_ctrl_c_shows_what_was_said_so_far(cli: Cli, tmp_path: Path, with_host: bool) -> None:
    """On stdout, as `output` would; with --json the job."""
    if with_host:
        cli.run("agent", "--agent", "echo", "-b", "hi")
    for more in ([], ["--json"]):
        ready = tmp_path / f"ready{len(more)}"
        with cli.start("agent", "--agent", "shell", *more, f"echo half; touch {ready}; sleep 60") as one:
            eventually(ready.exists, 20)
            time.sleep(0.2)
            one.send_signal(signal.SIGINT)
            out, err = one.communicate(timeout=20)
        assert one.returncode == 130, err
        assert (json.loads(out)["result_text"] if more else out.strip()) == "half"
        assert "cancelled" in err


def test_a_session_that_cannot_be_read_hides_no_other(cli: Cli) -> None:
    """`list` shows the healthy ones, names the other on stderr, and exits with 6; a wrong id stays a wrong id."""
    echo(cli, "--session", "good")
    echo(cli, "--session", "bad")
    (cli.home / "sessions" / "bad" / "repo" / ".git" / "HEAD").write_text("garbage\n")
    said = cli.inside("list", code=6)
    assert [line.split("\t")[5] for line in said.out.splitlines()] == ["good"]
    assert "session bad is not listed" in said.err
    assert "no job id begins with" in cli.inside("show", "ffffffff", code=3).err
