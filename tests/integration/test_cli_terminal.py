"""The command line on a terminal: tables that fit, a spinner, colours or none, and nothing of a job's that acts."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from openjobs.cli import table
from tests.support import eventually
from tests.support.cli import Cli, Terminal

#: what colours, cursor movements and erasing are made of; everything else from ESC on would be a job's
OURS = re.compile(r"\x1b\[(?:[0-9;]*[mKAGJ]|\?25[lh]|2K)")
SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"
HOSTILE = "echo hi #\x1b[2J\x1b]0;owned\x07\x9b31m\u202e [bold red]markup[/] :smile:"


def uuid(number: int) -> str:
    return f"00000000-{number:04x}-4000-8000-000000000000"


def on_terminal(cli: Cli, *args: str, width: int = 80, env: dict[str, str] | None = None, code: int | None = 0) -> str:
    with Terminal(cli.command(*args), {**cli.env, **(env or {})}, width=width) as terminal:
        ended = terminal.wait()
        assert code is None or ended == code, terminal.text
        return terminal.text


def bare(text: str) -> str:
    return OURS.sub("", text)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_table_is_aligned_and_fits_the_terminal(cli: Cli, width: int) -> None:
    """Whatever subjects say and however wide their characters are, no line wraps."""
    subjects = ["plain", "long " * 40, "漢字" * 60, HOSTILE, "two\nlines"]
    for number, subject in enumerate(subjects):
        session = "default" if number else "another-session-with-a-long-name"
        cli.inside("agent", "--agent", "echo", "-d", subject, "--session", session, "--job-id", uuid(number), "x")
    lines = bare(on_terminal(cli, "list", width=width)).splitlines()
    assert lines[0].split()[:2] == ["ID", "STATUS"]
    assert len(lines) == 1 + len(subjects)
    assert all(table.cells(line) <= width for line in lines)
    columns = {line.index("completed") for line in lines[1:]}
    assert len(columns) == 1


def test_colours_are_for_terminals_and_only_where_wanted(cli: Cli) -> None:
    """A table has colours; with NO_COLOR (not empty), on a dumb terminal and in a pipe it has none."""
    cli.inside("agent", "--agent", "echo", "x")
    assert "\x1b[32mcompleted" in on_terminal(cli, "list")
    assert "\x1b[32mcompleted" in on_terminal(cli, "list", env={"NO_COLOR": ""})
    for args in (["list"], ["history"], ["sessions"], ["show", cli.json("list")["jobs"][0]["job_id"]]):
        assert "\x1b" not in on_terminal(cli, *args, env={"NO_COLOR": "1"})
        assert "\x1b" not in cli.run(*args).out


def test_no_text_of_a_job_acts_on_the_terminal(cli: Cli) -> None:
    """R10: escape sequences, other control characters and rich's markup of a job are shown, by every command."""
    job_id = uuid(1)
    cli.inside("agent", "--agent", "echo", "-d", HOSTILE, "--session", "s", "--job-id", job_id, HOSTILE)
    commands = [["list"], ["show", job_id], ["output", job_id], ["wait", job_id], ["history", job_id]]
    more = [["history", "--session", "s"], ["sessions"], ["show", "0", "--json"], ["list", "--json"]]
    for args in [*commands, *more]:
        left = bare(on_terminal(cli, *args))
        for character in ("\x1b", "\x07", "\x9b", "\u202e"):
            assert character not in left, (args, left)
    shown = on_terminal(cli, "output", job_id)
    assert "#\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\u202e [bold red]markup[/] :smile:" in shown


def test_a_foreground_job_spins_on_stderr_and_leaves_a_clean_terminal(cli: Cli, tmp_path: Path) -> None:
    """While it runs a spinner shows state and subject; at the end it is gone and the cursor is back."""
    gate = tmp_path / "gate"
    script = f"while [ ! -e {gate} ]; do sleep 0.02; done; echo through"
    with Terminal(cli.command("agent", "--agent", "shell", "-d", "wait \x1b[2Jhere", script), cli.env) as terminal:
        terminal.until("wait \\x1b[2Jhere")
        terminal.until("running")
        gate.touch()
        assert terminal.wait() == 0
    text = terminal.text
    assert any(frame in text for frame in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR) >= 0
    end = bare(text[text.rfind(SHOW_CURSOR) :])
    assert end.splitlines()[-2:] == ["through", end.splitlines()[-1]]
    assert re.fullmatch(r"job [0-9a-f]{8} completed in [0-9.]+s", end.splitlines()[-1])


def test_a_result_in_a_file_has_its_spinner_on_the_terminal(cli: Cli, tmp_path: Path) -> None:
    """With stdout redirected, the result goes to the file as it is, and stderr still spins."""
    gate, out = tmp_path / "gate", tmp_path / "out"
    script = f"while [ ! -e {gate} ]; do sleep 0.02; done; printf 'a\\033b'"
    line = f"{shlex.join(cli.command('agent', '--agent', 'shell', script))} > {out}"
    with Terminal(["sh", "-c", line], cli.env) as terminal:
        terminal.until("running")
        gate.touch()
        assert terminal.wait() == 0
    assert out.read_bytes() == b"a\x1bb\n"


def test_ctrl_c_at_the_keyboard_stops_the_job(cli: Cli, tmp_path: Path) -> None:
    """^C is SIGINT for the command line alone: it cancels the job, says so and shows the cursor again."""
    ready = tmp_path / "ready"
    with Terminal(cli.command("agent", "--agent", "shell", f"touch {ready}; sleep 60"), cli.env) as terminal:
        eventually(ready.exists, 20)
        terminal.until("running")
        terminal.press("\x03")
        assert terminal.wait() == 130
    text = terminal.text
    assert "interrupted: stopping job" in text
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)
    (job,) = cli.json("list")["jobs"]
    assert (job["status"], job["cancel_reason"]) == ("cancelled", "interrupted")


@pytest.mark.parametrize("with_host", [False, True], ids=["own runner", "host"])
def test_a_terminal_that_is_closed_stops_the_foreground_job(cli: Cli, tmp_path: Path, with_host: bool) -> None:
    """Closing the window is SIGHUP: the job is stopped, not left behind and not made an orphan."""
    if with_host:
        cli.run("wait", cli.run("agent", "--agent", "echo", "-b", "x").out.strip())
    ready = tmp_path / "ready"
    with Terminal(cli.command("agent", "--agent", "shell", f"touch {ready}; sleep 60"), cli.env) as terminal:
        eventually(ready.exists, 20)
        terminal.until("running")
        terminal.hang_up()
        assert terminal.process.wait(30) == 128 + signal.SIGHUP
    job = cli.json("list")["jobs"][0]
    assert (job["status"], job["cancel_reason"]) == ("cancelled", "terminated")


def test_list_watch_draws_over_itself_until_ctrl_c(cli: Cli) -> None:
    """A live table: what changes is seen without a new command, and ^C ends it with the cursor shown."""
    cli.inside("agent", "--agent", "echo", "-d", "the first", "x")
    with Terminal(cli.command("list", "--watch"), cli.env) as terminal:
        terminal.until("the first")
        terminal.until("1 completed")
        cli.inside("agent", "--agent", "echo", "-d", "the second", "x")
        terminal.until("the second")
        terminal.until("2 completed")
        terminal.press("\x03")
        assert terminal.wait() == 130
    text = terminal.text
    assert "Traceback" not in text
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR)


def test_a_watched_table_never_draws_more_lines_than_the_terminal_has(cli: Cli) -> None:
    """With more jobs than lines the newest are shown; a taller drawing could not be drawn over."""
    for number in range(8):
        cli.inside("agent", "--agent", "echo", "--job-id", uuid(number), "x")
    with Terminal(cli.command("list", "--watch"), cli.env, height=6) as terminal:
        text = bare(terminal.until("Ctrl-C ends"))
        terminal.press("\x03")
        terminal.wait()
    first_drawing = text[: text.index("Ctrl-C ends")].strip()
    assert len(first_drawing.splitlines()) <= 6
    assert "8 completed" in first_drawing


def test_waiting_tells_each_end_on_a_line_of_its_own(cli: Cli) -> None:
    """The spinner makes room for every line that is told."""
    ids = [
        cli.run("agent", "--agent", "shell", "--background", "-d", f"job {n}", f"exit {n}").out.strip()
        for n in range(2)
    ]
    text = on_terminal(cli, "wait", *ids, code=1)
    for job_id, word in zip(ids, ("completed", "errored"), strict=True):
        (line,) = [line for line in bare(text).splitlines() if line.lstrip("\r").startswith(job_id[:8])]
        assert line.lstrip("\r").split()[1] == word


def test_hints_are_for_people(cli: Cli) -> None:
    """What to do next is said on a terminal only."""
    assert "no jobs yet" in on_terminal(cli, "list")
    cli.inside("agent", "--agent", "echo", "x")
    assert cli.run("list", "--session", "default", "--status", "errored").err == ""
    assert "openjobs output" in on_terminal(cli, "agent", "--agent", "echo", "-b", "x")
    assert cli.run("agent", "--agent", "echo", "-b", "x").err == ""


def test_the_demo_is_drawn_live(cli: Cli) -> None:
    """On a terminal the demo shows its table and ends with the same words as in a pipe."""
    text = on_terminal(cli, "demo", "--keep", str(cli.home))
    assert HIDE_CURSOR in text
    assert "running ⠋" in text or "running ⠙" in text or "running" in bare(text)
    assert "git -C" in text
    assert "Each job ended as it should." in text


def test_without_utf8_everything_is_still_said(cli: Cli) -> None:
    """On a terminal of another encoding a character it lacks is shown by its number, without a traceback."""
    cli.inside("agent", "--agent", "echo", "-d", "Größe 漢字", "x")
    text = on_terminal(cli, "list", env={"PYTHONIOENCODING": "ascii"})
    assert "Gr\\xf6\\xdfe \\u6f22" in text
