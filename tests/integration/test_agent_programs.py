"""Agent programs as profiles: text, usage and end from what they print, never from the exit code alone."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs.agents import Profiles
from openjobs.agents.streams import LINE_LIMIT_BYTES, STREAMS
from openjobs.jobs import TurnResult
from openjobs.runlog import RunLogReader
from tests.unit.test_profiles import request_for

Lines = list[Any]

CLAUDE_START: Lines = [
    {"type": "system", "subtype": "init", "session_id": "s", "model": "m", "tools": ["Bash"]},
    {"type": "assistant", "message": {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}]}},
    {"type": "assistant", "message": {"content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]}},
    {"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": "t", "content": "a b"}]}},
]
CLAUDE_END = {
    "type": "result",
    "subtype": "success",
    "is_error": False,
    "duration_ms": 1200,
    "num_turns": 2,
    "result": "Two files: a and b.",
    "session_id": "s",
    "total_cost_usd": 0.0123,
    "usage": {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 7, "service_tier": "standard"},
}
CLAUDE_USAGE = {
    "input_tokens": 10,
    "cache_read_input_tokens": 5,
    "output_tokens": 7,
    "total_cost_usd": 0.0123,
    "num_turns": 2,
    "duration_ms": 1200,
}
CODEX_START: Lines = [
    {"type": "thread.started", "thread_id": "0199"},
    {"type": "turn.started"},
    {"type": "item.started", "item": {"id": "item_1", "type": "command_execution", "command": "ls"}},
    {"type": "item.completed", "item": {"id": "item_0", "type": "reasoning", "text": "**Thinking**"}},
    {"type": "item.completed", "item": {"id": "item_2", "type": "agent_message", "text": "Looking."}},
    {"type": "item.completed", "item": {"id": "item_3", "type": "agent_message", "text": "Two files."}},
]
CODEX_USAGE = {"input_tokens": 24763, "cached_input_tokens": 24448, "output_tokens": 122}
GEMINI_START: Lines = [
    {"type": "init", "timestamp": "2026-01-01T00:00:00.000Z", "session_id": "s", "model": "auto"},
    {"type": "message", "role": "user", "content": "ls"},
    {"type": "message", "role": "assistant", "content": "I will ", "delta": True},
    {"type": "message", "role": "assistant", "content": "look.", "delta": True},
    {"type": "tool_use", "tool_name": "list_directory", "tool_id": "1", "parameters": {}},
    {"type": "tool_result", "tool_id": "1", "status": "success", "output": "a b"},
    {"type": "message", "role": "assistant", "content": "Two ", "delta": True},
    {"type": "message", "role": "assistant", "content": "files.", "delta": True},
]
GEMINI_STATS = {"total_tokens": 30, "input_tokens": 20, "output_tokens": 10, "duration_ms": 900, "tool_calls": 1}
OPENCODE_START: Lines = [
    {"type": "step_start", "timestamp": 1, "sessionID": "ses_1", "part": {"type": "step-start"}},
    {"type": "text", "sessionID": "ses_1", "part": {"type": "text", "text": "Let me look."}},
    {"type": "tool_use", "sessionID": "ses_1", "part": {"tool": "bash", "state": {"status": "completed"}}},
    {
        "type": "step_finish",
        "part": {"reason": "tool-calls", "cost": 0.25, "tokens": {"input": 3, "output": 4, "cache": {"read": 1}}},
    },
    {"type": "step_start", "sessionID": "ses_1", "part": {"type": "step-start"}},
    {"type": "text", "sessionID": "ses_1", "part": {"type": "text", "text": "Two files."}},
]
OPENCODE_END = {
    "type": "step_finish",
    "part": {"reason": "stop", "cost": 0.5, "tokens": {"input": 5, "output": 6, "cache": {"read": 2, "write": 0}}},
}
OPENCODE_USAGE = {"input": 8, "output": 10, "cache_read": 3, "cache_write": 0, "cost": 0.75}
UNKNOWN: Lines = [{"type": "telemetry.v9", "item": 7}, "Warning: no JSON {", {"no": "type"}, [1, 2], ""]

#: program, what it prints, its exit code; text, error (a part of it), usage
CASES: dict[str, tuple[str, Lines, int, str, str | None, dict[str, Any] | None]] = {
    "claude": ("claude", [*CLAUDE_START, CLAUDE_END], 0, "Two files: a and b.", None, CLAUDE_USAGE),
    "claude, unknown events": (
        "claude",
        [*UNKNOWN, *CLAUDE_START, *UNKNOWN, CLAUDE_END, *UNKNOWN],
        0,
        "Two files: a and b.",
        None,
        CLAUDE_USAGE,
    ),
    "claude, is_error with exit code 0": (
        "claude",
        [*CLAUDE_START, {**CLAUDE_END, "is_error": True, "result": "API Error: 529"}],
        0,
        "Let me look.",
        "API Error: 529",
        CLAUDE_USAGE,
    ),
    "claude, out of turns": (
        "claude",
        [
            *CLAUDE_START,
            {"type": "result", "subtype": "error_max_turns", "is_error": True, "errors": [], "num_turns": 9},
        ],
        1,
        "Let me look.",
        "error_max_turns",
        {"num_turns": 9},
    ),
    "claude, a good end and a bad exit code": ("claude", [CLAUDE_END], 1, "Two files: a and b.", None, CLAUDE_USAGE),
    "claude, no end": ("claude", CLAUDE_START, 0, "Let me look.", "did not say how its turn ended", None),
    "codex": (
        "codex",
        [*CODEX_START, {"type": "turn.completed", "usage": CODEX_USAGE}],
        0,
        "Two files.",
        None,
        CODEX_USAGE,
    ),
    "codex, failed with exit code 0": (
        "codex",
        [*CODEX_START, {"type": "turn.failed", "error": {"message": "usage limit reached"}}],
        0,
        "Two files.",
        "usage limit reached",
        None,
    ),
    "codex, an error that it got over": (
        "codex",
        [
            {"type": "turn.started"},
            {"type": "error", "message": "Reconnecting... 1/5"},
            *CODEX_START[2:],
            {"type": "turn.completed", "usage": CODEX_USAGE},
        ],
        1,
        "Two files.",
        None,
        CODEX_USAGE,
    ),
    "codex, an error and nothing more": (
        "codex",
        [*CODEX_START, {"type": "error", "message": "stream disconnected"}],
        1,
        "Two files.",
        "stream disconnected",
        None,
    ),
    "codex, no end": ("codex", CODEX_START, 3, "Two files.", "exit code 3", None),
    "gemini": (
        "gemini",
        [*GEMINI_START, {"type": "result", "status": "success", "stats": GEMINI_STATS}],
        0,
        "Two files.",
        None,
        GEMINI_STATS,
    ),
    "gemini, a warning": (
        "gemini",
        [
            {"type": "error", "severity": "warning", "message": "loop detected"},
            *GEMINI_START,
            {"type": "result", "status": "success", "stats": GEMINI_STATS},
        ],
        0,
        "Two files.",
        None,
        GEMINI_STATS,
    ),
    "gemini, failed": (
        "gemini",
        [
            *GEMINI_START,
            {
                "type": "result",
                "status": "error",
                "error": {"type": "FatalTurnLimitedError", "message": "too many turns"},
            },
        ],
        53,
        "Two files.",
        "too many turns",
        {},
    ),
    "gemini, no end": ("gemini", GEMINI_START, 0, "Two files.", "did not say how its turn ended", None),
    "opencode": ("opencode", [*OPENCODE_START, OPENCODE_END], 0, "Two files.", None, OPENCODE_USAGE),
    "opencode, failed with exit code 0": (
        "opencode",
        [
            *OPENCODE_START,
            {"type": "error", "sessionID": "ses_1", "error": {"name": "APIError", "data": {"message": "rate limited"}}},
        ],
        0,
        "Two files.",
        "rate limited",
        {"input": 3, "output": 4, "cache_read": 1, "cost": 0.25},
    ),
    "opencode, no end": (
        "opencode",
        OPENCODE_START,
        0,
        "Two files.",
        "did not say how its turn ended",
        {"input": 3, "output": 4, "cache_read": 1, "cost": 0.25},
    ),
}

Play = Callable[[str, Lines, int], Profiles]


def printed(lines: Lines) -> bytes:
    return b"".join((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in lines)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """Puts a program of that name into the PATH that prints these lines, and remembers its arguments and its prompt."""
    made: list[Profiles] = []

    def put(program: str, lines: Lines, code: int) -> Profiles:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (tmp_path / "lines").write_bytes(printed(lines))
        script = f'#!/bin/sh\ncat > {tmp_path}/prompt\necho "$@" > {tmp_path}/args\ncat {tmp_path}/lines\nexit {code}\n'
        (folder / program).write_text(script)
        (folder / program).chmod(0o755)
        home = tmp_path / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        path = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        made.append(Profiles(home, environ={"PATH": path}))
        return made[-1]

    yield put
    for profiles in made:
        profiles.close()


@pytest.mark.parametrize("case", CASES)
def test_an_agent_program_is_judged_by_what_it_says(case: str, play: Play, tmp_path: Path) -> None:
    """Its last answer is the text, its counts are the usage, its own word is the end; the log has every line."""
    program, lines, code, text, error, usage = CASES[case]
    profiles = play(program, lines, code)
    request = request_for("- list the files")
    result = profiles.get(program)(request, threading.Event())
    assert isinstance(result, TurnResult)
    assert result.final_text == text
    assert (result.error or "") == "" if error is None else error in (result.error or "")
    assert result.usage == usage
    assert (tmp_path / "prompt").read_text() == "- list the files"
    run = tmp_path / "home" / "sessions" / "default" / "runs" / str(request.job.run_id)
    assert RunLogReader(run).read(limit=1 << 20).data == printed(lines)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("claude", "-p --output-format stream-json --verbose"),
        ("codex", "exec --json -"),
        ("gemini", "--output-format stream-json"),
        ("opencode", "run --format json"),
    ],
)
def test_the_prompt_is_no_argument(program: str, arguments: str, play: Play, tmp_path: Path) -> None:
    """It goes to standard input, whatever it begins with and however long it is."""
    prompt = "--dangerous\n" + "x" * 300_000
    play(program, [], 0).get(program)(request_for(prompt), threading.Event())
    assert (tmp_path / "args").read_text() == arguments + "\n"
    assert (tmp_path / "prompt").read_text() == prompt


def test_a_missing_program_is_named(play: Play) -> None:
    """A profile that is always there does not mean that its program is."""
    profiles = play("something-else", [], 0)
    with pytest.raises(ValueError, match="no program 'codex'"):
        profiles.get("codex")(request_for("x", env={"PATH": "/nowhere"}), threading.Event())


def test_a_profile_of_ones_own_comes_first(play: Play, tmp_path: Path) -> None:
    """By the same name, or by another one with the same events."""
    profiles = play("my-codex", [*CODEX_START, {"type": "turn.failed", "error": {"message": "no"}}], 0)
    (tmp_path / "home" / "config.toml").write_text(
        '[profiles.codex]\ncommand = ["my-codex", "{prompt}"]\noutput = "codex"\n'
        '[profiles.plain]\ncommand = ["my-codex", "{prompt}"]\n'
    )
    result = profiles.get("codex")(request_for("hello"), threading.Event())
    assert (result.error, (tmp_path / "args").read_text()) == ("no", "hello\n")
    plain = profiles.get("plain")(request_for("hello"), threading.Event())
    assert plain.error is None
    assert "turn.failed" in plain.final_text


def test_what_it_says_is_seen_while_it_runs(play: Play) -> None:
    """The partial text of the job is the newest answer, not the JSON."""
    seen: list[str] = []
    profiles = play("codex", [*CODEX_START, {"type": "turn.completed", "usage": {}}], 0)
    profiles.get("codex")(request_for("x", partial=seen.append), threading.Event())
    assert seen[-1] == "Two files."
    assert not any("{" in text for text in seen)


@pytest.mark.parametrize("program", STREAMS)
def test_pieces_may_be_cut_anywhere(program: str) -> None:
    """Whatever pieces the output comes in, it means the same; the last line needs no newline."""
    lines = next(lines for name, lines, *_ in CASES.values() if name == program)
    data = printed(lines).removesuffix(b"\n")
    whole = STREAMS[program]()
    whole.take(data)
    whole.finish()
    for size in (1, 7, 100):
        stream = STREAMS[program]()
        for at in range(0, len(data), size):
            stream.take(data[at : at + size])
        stream.finish()
        assert vars(stream) == vars(whole)
    assert whole.ended


def test_a_line_without_end_costs_bounded_memory() -> None:
    """It is passed over; the next line counts again."""
    stream = STREAMS["codex"]()
    for _ in range(LINE_LIMIT_BYTES // (1 << 20) + 2):
        stream.take(b"{" * (1 << 20))
    assert len(stream._line) <= LINE_LIMIT_BYTES
    stream.take(b"\n" + printed([{"type": "turn.completed", "usage": {}}]))
    assert stream.ended


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_KINDS = sorted(
    {
        str(line["type"])
        for _, lines, *_ in CASES.values()
        for line in lines
        if isinstance(line, dict) and "type" in line
    }
)
_FIELDS = (
    "message",
    "item",
    "error",
    "usage",
    "part",
    "result",
    "is_error",
    "content",
    "role",
    "status",
    "stats",
    "errors",
)


@given(
    program=st.sampled_from(sorted(STREAMS)),
    lines=st.lists(st.tuples(st.sampled_from(_KINDS), st.dictionaries(st.sampled_from(_FIELDS), _VALUES)), max_size=5),
)
def test_no_event_breaks_a_job(program: str, lines: list[tuple[str, dict[str, Any]]]) -> None:
    """Whatever is in an event of a known kind, the text is text and the usage can be stored."""
    stream = STREAMS[program]()
    stream.take(printed([{"type": kind, **fields} for kind, fields in lines]))
    stream.finish()
    assert isinstance(stream.text, str)
    assert stream.error is None or isinstance(stream.error, str)
    json.dumps(stream.usage)
