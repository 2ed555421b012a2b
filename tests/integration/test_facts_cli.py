"""`openjobs events`: what it shows of facts that jobs and commands left, as processes of their own (spec 001)."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs.facts import FileFactLog, Registered, Settled
from tests.support.cli import Cli, Terminal
from tests.support.facts import T0, registered, settled

DAY_MS = 86_400_000


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path / "h")
    yield cli
    cli.end_host()


def facts_in(cli: Cli, session_id: str, *facts: Registered | Settled) -> None:
    """Facts that some runner has recorded there."""
    directory = cli.home / "sessions" / session_id
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    FileFactLog(directory / "events.jsonl").append(facts)


def labels(text: str) -> list[str]:
    return [line.split("\t")[8] for line in text.splitlines()]


def test_jobs_and_commands_are_shown_as_they_went(cli: Cli) -> None:
    """A job and a background command, each with its registration and its end; nine fields a line in a pipe."""
    cli.run("agent", "--agent", "echo", "probe")
    cli.run("run", "--session", "other", "--", "sh", "-c", "exit 3", code=3)
    lines = [line.split("\t") for line in cli.run("events").out.splitlines()]
    assert [(line[1], line[3], line[4], line[6], line[7], line[8]) for line in lines] == [
        ("job/registered", "job", "-", "-", "default", "probe"),
        ("job/settled", "job", "completed", "yes", "default", "probe"),
        ("job/registered", "process", "-", "-", "other", "sh -c exit 3"),
        ("job/settled", "process", "failed", "yes", "other", "sh -c exit 3"),
    ]
    assert lines[0][2] == lines[1][2]
    assert [line[5] for line in lines[::2]] == ["-", "-"]
    assert all(re.fullmatch(r"\d+\.\d{3}", line[5]) for line in lines[1::2])
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line[0]) for line in lines)


def test_json_is_what_stands_in_the_ledger(cli: Cli) -> None:
    """And the cursor, which is where `--after` goes on."""
    facts_in(cli, "s1", registered(1, at_ms=0), settled(1, 250, at_ms=0), registered(2, at_ms=300))
    told = cli.run("events", "--json").json
    assert not told["more"]
    assert told["facts"][1] == {
        "type": "job/settled",
        "job_id": "00000001-0000-4000-8000-000000000000",
        "kind": "job",
        "session_id": "s1",
        "caller_session_id": None,
        "parent_job_id": None,
        "label": "job 1",
        "tool_call_id": None,
        "registered_at_ms": T0,
        "started_at_ms": None,
        "settled_at_ms": T0 + 250,
        "status": "completed",
        "producer_reported": True,
        "cursor": told["facts"][1]["cursor"],
    }
    cursor = told["facts"][0]["cursor"]
    assert cli.run("events", "--json", "--session", "s1", "--after", cursor).json["facts"] == told["facts"][1:]


def test_windows(cli: Cli) -> None:
    """By time with a zone, by local time, by milliseconds, by how long ago; `--until` does not include."""
    facts_in(cli, "s1", registered(1, at_ms=0), registered(2, at_ms=1000), settled(1, DAY_MS, at_ms=0))
    at = "2026-01-02T03:04:06Z"  # one second after T0
    assert labels(cli.run("events", "--since", at).out) == ["job 2", "job 1"]
    assert labels(cli.run("events", "--until", at).out) == ["job 1"]
    assert labels(cli.run("events", "--since", str(T0 + 1), "--until", str(T0 + 1001)).out) == ["job 2"]
    local = cli.run("events", "--since", "2026-01-02T04:04:06", env={"TZ": "UTC-1"})
    assert labels(local.out) == ["job 2", "job 1"]
    assert labels(cli.run("events", "--since", "20000d").out) == ["job 1", "job 2", "job 1"]
    assert cli.run("events", "--since", "0").out == ""


def test_the_newest_fifty_unless_asked(cli: Cli) -> None:
    """Of all sessions together, in order of time; `--limit 0` and any window mean all."""
    for name in ("s1", "s2"):
        facts_in(cli, name, *(registered(n, session_id=name, at_ms=n * 2 + (name == "s2")) for n in range(40)))
    shown = cli.run("events", "--json").json
    assert (len(shown["facts"]), shown["more"]) == (50, True)
    times = [fact["registered_at_ms"] - T0 for fact in shown["facts"]]
    assert times == list(range(30, 80))
    assert len(cli.run("events", "--limit", "0").out.splitlines()) == 80
    assert len(cli.run("events", "--since", "2026-01-01").out.splitlines()) == 80
    assert labels(cli.run("events", "-n", "1").out) == ["job 39"]
    assert len(cli.run("events", "--session", "s1").out.splitlines()) == 40


def test_following_shows_what_other_processes_record(cli: Cli) -> None:
    """What is there, then what comes, also in a session that is made only now; Ctrl-C ends it with 130."""
    facts_in(cli, "s1", registered(1, at_ms=0))
    with cli.start("events", "--follow", "--json") as follower:
        assert follower.stdout is not None
        first = json.loads(follower.stdout.readline())
        assert (first["type"], first["label"]) == ("job/registered", "job 1")
        cli.run("agent", "--session", "new", "--agent", "echo", "probe")
        told = [json.loads(follower.stdout.readline()) for _ in range(2)]
        assert [(fact["type"], fact["session_id"]) for fact in told] == [
            ("job/registered", "new"),
            ("job/settled", "new"),
        ]
        facts_in(cli, "s1", settled(1))
        assert json.loads(follower.stdout.readline())["status"] == "completed"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 130
        assert follower.stderr is not None
        assert follower.stderr.read() == ""


def test_following_goes_on_after_a_cursor(cli: Cli) -> None:
    """`--session`, `--after` and `--follow`: what an SDK in another language does."""
    facts_in(cli, "s1", registered(1, at_ms=0), registered(2))
    cursor = cli.run("events", "--json").json["facts"][0]["cursor"]
    with cli.start("events", "-f", "--json", "--session", "s1", "--after", cursor) as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["label"] == "job 2"
        facts_in(cli, "s1", registered(3))
        assert json.loads(follower.stdout.readline())["label"] == "job 3"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 130


def test_a_cursor_that_does_not_fit_is_refused(cli: Cli) -> None:
    """Behind the end, with a wrong checksum, or in a session without facts: exit code 6, a line, and no fact."""
    facts_in(cli, "s1", registered(1), registered(2), registered(3))
    facts_in(cli, "s2")
    number, start, end, _ = cli.run("events", "--json").json["facts"][1]["cursor"].split(".")
    for session, cursor in (
        ("s1", "99.99999.99999.ffb4b6ec"),
        ("s1", f"{number}.{start}.{end}.00000000"),
        ("s2", f"{number}.{start}.{end}.00000000"),
    ):
        for follow in ((), ("--follow",)):
            told = cli.run("events", "--session", session, "--after", cursor, *follow, code=6)
            assert told.out == ""
            assert "read it from the beginning" in told.err


@pytest.mark.parametrize("one", [True, False], ids=["one session", "all sessions"])
@pytest.mark.parametrize("how", ["older", "removed"])
def test_a_follower_tells_that_a_ledger_was_replaced(cli: Cli, one: bool, how: str) -> None:
    """By an older backup, to which a fact was added, or taken away: one session ends with exit code 6; of all
    sessions the others go on."""
    facts_in(cli, "s1", registered(1))
    facts_in(cli, "s2", registered(2))
    path = cli.home / "sessions" / "s1" / "events.jsonl"
    backup = path.read_bytes()
    facts_in(cli, "s1", registered(3))
    with cli.start("events", "--follow", *(("--session", "s1") if one else ())) as follower:
        assert follower.stdout is not None
        assert follower.stderr is not None
        while "job 3" not in follower.stdout.readline():
            pass
        if how == "older":
            new = path.with_name("new")
            new.write_bytes(backup)
            new.chmod(0o600)
            FileFactLog(new).append([registered(4)])
            new.rename(path)
        else:
            path.unlink()
        said = follower.stderr.readline()
        assert "read it from the beginning" in said
        if one:
            assert follower.wait(20) == 6
        else:
            assert said.startswith("session s1 is not shown from here on: ")
            facts_in(cli, "s2", registered(5))
            assert "job 5" in follower.stdout.readline()
            follower.send_signal(signal.SIGINT)
            assert follower.wait(20) == 130
        assert follower.stdout.read() == ""


def test_following_waits_for_a_home(cli: Cli) -> None:
    """A home that is not there yet is no reason to end; nothing is made there by looking."""
    with cli.start("events", "-f", "--json") as follower:
        cli.run("list")
        assert not cli.home.exists()
        cli.run("agent", "--agent", "echo", "probe")
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["label"] == "probe"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 130


def test_damage_is_named_and_the_rest_is_shown(cli: Cli) -> None:
    """What is before it, and other sessions; exit code 6. A follower of that session alone ends."""
    facts_in(cli, "s1", registered(1, at_ms=0), registered(2))
    facts_in(cli, "s2", registered(3, session_id="s2", at_ms=5))
    path = cli.home / "sessions" / "s1" / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"job 2", b"job 9"))
    told = cli.run("events", code=6)
    assert labels(told.out) == ["job 1", "job 3"]
    assert re.search(r"^session s1 is not shown from its damage on: .* at byte \d+", told.err, re.MULTILINE)
    assert "damaged at byte" in cli.run("events", "-f", "--session", "s1", code=6).err


def test_fsck_looks_at_facts(cli: Cli) -> None:
    """Damage in the ledger of facts is a finding, exit code 6; without any there is none."""
    cli.run("agent", "--agent", "echo", "probe")
    cli.run("fsck")
    path = cli.home / "sessions" / "default" / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b"job/", b"jop/", 1))
    told = cli.run("fsck", "--json", code=6).json
    assert [finding["where"] for finding in told["sessions"][0]["findings"]] == ["events.jsonl"]


def test_nothing_there(cli: Cli) -> None:
    """No home, no facts, no such session."""
    told = cli.run("events")
    assert told.out == ""
    assert "there is no home" in told.err
    assert cli.run("events", "--json").json == {"facts": [], "more": False}
    assert cli.run("events", "--session", "s9", code=3).err.startswith("openjobs: there is no session 's9'")
    facts_in(cli, "s1", registered(1, at_ms=0))
    assert cli.run("events", "--session", "s9", code=3).err.startswith("openjobs: there is no session 's9'")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--after", "1.0.283.42dfd127"], "--after needs --session"),
        (["--session", "s1", "--after", "soon"], "not a cursor"),
        (["--follow", "--until", "1h"], "either --follow or --until"),
        (["--since", "yesterday"], "is not a time"),
        (["--since", "2026-02-31"], "is not a time"),
        (["--since", "2026-01-01T00:00+99:00"], "is not a time"),
        (["--limit", "-1"], "is not a whole number"),
    ],
)
def test_what_cannot_be_meant_is_refused(cli: Cli, arguments: list[str], said: str) -> None:
    """Exit code 2, one line."""
    told = cli.run("events", *arguments, code=2)
    assert said in told.err
    assert len(told.err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--since", "--until"])
@pytest.mark.parametrize("typed", ["tomorrow", "12:00", "2026-02-31", "2026-1-1", "1w", ""])
def test_what_is_no_time_is_answered_with_every_form_of_one(cli: Cli, option: str, typed: str) -> None:
    """Dates, times ago and milliseconds, whichever of them was meant."""
    told = cli.inside("events", option, typed, code=2).err
    for form in ("2026-01-31", "2026-01-31T12:00Z", "10m", "7d", "milliseconds since 1970"):
        assert form in told


def test_on_a_terminal_nothing_acts(cli: Cli) -> None:
    """A table of local times, short ids and durations; a label cannot move the cursor or colour anything."""
    facts_in(
        cli,
        "s1",
        registered(1, at_ms=0, label="evil \x1b[2J\x07\u202e label"),
        settled(1, 1500, at_ms=0, status="cancelled", producer_reported=False),
    )
    with Terminal(cli.command("events"), {**cli.env, "TZ": "UTC", "NO_COLOR": "1"}, width=100) as terminal:
        assert terminal.wait() == 0
    lines = terminal.text.replace("\r\n", "\n").splitlines()
    assert lines == [
        "2026-01-02 03:04:05.000  00000001  registered           s1            evil \\x1b[2J\\x07\\u202e label",
        "2026-01-02 03:04:06.500  00000001  cancelled      1.5s  s1            no report  job 1",
    ]
