"""What a terminal is shown of a job's text (R10), and how times, sizes and ids are said."""

from __future__ import annotations

import json
import sys
import unicodedata
from datetime import UTC, datetime, timedelta

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs.cli import control, exits, reading, table
from openjobs.cli.text import age, duration, one_line, plural, short_id, size, to_json, visible
from openjobs.errors import (
    AmbiguousId,
    Damaged,
    IdempotencyConflict,
    InvalidInput,
    InvalidSessionId,
    OutcomeUnknown,
    StoreWriteFailed,
    UnknownAgent,
    UnknownJob,
)
from openjobs.jobs import Job, JobStatus

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def job(number: int = 1, **fields: object) -> Job:
    given: dict[str, object] = {
        "job_id": f"{number:08x}-0000-4000-8000-000000000000",
        "subject": "list the files",
        "description": "ls",
        "agent_id": "shell",
        "created_at": NOW,
        "parent_session_id": "default",
    }
    return Job(**{**given, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, Größe 漢字 🙂", "plain text, Größe 漢字 🙂"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("over\rwrite", "over\\rwrite"),
        ("dos\r\nline", "dos\nline"),
        ("back\x08space", "back\\x08space"),
        ("\x7f\x9b1m", "\\x7f\\x9b1m"),
        ("a\u202eb", "a\\u202eb"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("lone\ud800", "lone\\ud800"),
        ("joined 👩\u200d🚀", "joined 👩\u200d🚀"),
    ],
)
def test_control_characters_are_shown_and_other_text_is_left_alone(text: str, shown: str) -> None:
    """Control characters are shown; text without them is not changed."""
    assert visible(text) == shown


def test_no_control_character_passes() -> None:
    """Of all of Unicode no control character but newline and tab, and no surrogate, comes through."""
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    left = {c for c in visible(everything) if unicodedata.category(c) in ("Cc", "Cs")}
    assert left == {"\n", "\t"}


@given(st.text(st.characters()))
def test_visible_text_can_be_encoded_and_is_its_own_visible_form(text: str) -> None:
    """What was made visible once is printable in UTF-8 and is not changed again."""
    shown = visible(text)
    shown.encode()
    assert visible(shown) == shown


@given(st.text(st.characters()), st.integers(2, 40))
def test_one_line_is_one_line_of_bounded_length(text: str, limit: int) -> None:
    """A line for a list has no line end that a terminal or reader knows, and is not longer than asked."""
    line = one_line(text, limit)
    assert len(line.splitlines()) <= 1
    assert len(line) <= limit


def test_one_line_keeps_words_and_shows_what_hides() -> None:
    """White space becomes one space; a control character that counts as white space is shown all the same."""
    assert one_line("  a \n\n b\tc ") == "a b c"
    assert one_line("a\x1cb\x85c\u2028d") == "a\\x1cb\\x85c\\u2028d"


@given(st.recursive(st.none() | st.text(st.characters()) | st.integers(), lambda inner: st.lists(inner, max_size=3)))
def test_json_output_means_the_same_and_holds_no_control_character(value: object) -> None:
    """JSON output reads back as the value it was, and nothing in it can act on a terminal."""
    text = to_json(value)
    assert json.loads(text) == value
    assert visible(text) == text


def test_json_escapes_characters_beyond_the_first_plane_as_a_pair() -> None:
    """A tag character is escaped as two UTF-16 units, as JSON asks for."""
    assert to_json("\U000e0041") == '"\\udb40\\udc41"'


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *[(-1, "0.0s"), (0.04, "0.0s"), (3.21, "3.2s"), (9.94, "9.9s"), (9.96, "10s"), (59.6, "1m00s")],
        *[(185, "3m05s"), (3599.7, "1h00m"), (7800, "2h10m"), (4 * 86400 + 3 * 3600, "4d3h")],
    ],
)
def test_durations_are_said_in_at_most_two_units(seconds: float, said: str) -> None:
    """Durations as people say them."""
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(-5, "now"), (0.9, "now"), (5, "5s"), (119, "1m"), (7200, "2h"), (9 * 86400, "9d")]
)
def test_ages_are_said_in_one_unit(seconds: float, said: str) -> None:
    """How long ago, in one unit; a clock that went back does not make it negative."""
    assert age(NOW - timedelta(seconds=seconds), NOW) == said


def test_sizes_and_counts_are_readable() -> None:
    """Bytes as `ls -h` says them, counts with the right ending."""
    assert [size(n) for n in (0, 512, 1434, 23 << 20, 5 << 40)] == ["0 B", "512 B", "1.4 KB", "23 MB", "5120 GB"]
    assert [plural(n, "job") for n in (0, 1, 2, 10_000)] == ["0 jobs", "1 job", "2 jobs", "10,000 jobs"]


# --- tables ------------------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(), max_size=60), min_size=1, max_size=5), st.integers(20, 200))
def test_no_line_of_a_table_is_wider_than_the_terminal(subjects: list[str], width: int) -> None:
    """Whatever the subjects are, each line of the aligned table fits, from forty columns on."""
    jobs = [job(number, subject=subject, agent_id=subject or "a") for number, subject in enumerate(subjects)]
    for row in table.aligned(jobs, NOW, max(width, 40)):
        line = table.to_ansi(row, colour=False)
        assert table.cells(line) <= max(width, 40)
        assert visible(line) == line


def test_wide_characters_are_cut_by_the_cells_they_take() -> None:
    """A Chinese character takes two cells; half of one is never shown."""
    assert table.fitted("漢字漢字", 6) == "漢字… "
    assert table.fitted("漢字", 6) == "漢字  "
    assert table.fitted("abc", 6, right=True) == "   abc"


def test_shown_ids_are_long_enough_to_tell_them_apart() -> None:
    """Eight characters, or more where two ids share eight."""
    shorten = table.short_ids(["aaaaaaaa-1111-4000", "bbbbbbbb-2222-4000"])
    assert shorten("aaaaaaaa-1111-4000") == "aaaaaaaa"
    shorten = table.short_ids(["aaaaaaaa-1111-4000", "aaaaaaaa-2222-4000"])
    assert shorten("aaaaaaaa-1111-4000") == "aaaaaaaa-111"


def test_a_plain_line_has_seven_fields_whatever_the_job_says() -> None:
    """A tab or newline in a subject cannot forge a field or a line."""
    (line,) = table.plain([job(subject="a\tb\nc\x1b[2J", agent_id="x\ty")])
    assert line.split("\t") == [
        "00000001-0000-4000-8000-000000000000",
        "pending",
        "2026-01-02T03:04:05.000Z",
        "-",
        "x y",
        "default",
        "a b c\\x1b[2J",
    ]


def test_nothing_of_a_job_reaches_a_terminal_as_it_is() -> None:
    """R10: whatever a damaged or hostile store says in any field, each way to show a job shows it."""
    evil = "\x1b[2J\x9b\u202e\r\n"
    texts = [field.name for field in attrs.fields(Job) if field.type in ("str", "str | None")]
    for status in JobStatus:
        hostile = job(**dict.fromkeys(texts, evil), status=status, started_at=NOW, completed_at=NOW, usage={evil: evil})
        shown = [
            *table.plain([hostile]),
            *(table.to_ansi(row, colour=False) for row in table.aligned([hostile, job()], NOW, 120)),
            *(table.to_ansi(pieces, colour=False) for _, pieces in reading._facts(hostile, [evil], NOW, True)),
            control.ended_line(hostile, short_id(hostile.job_id), colour=False),
            reading.status_line(hostile),
        ]
        assert len(shown) > 15
        for line in shown:
            assert visible(line) == line
            assert "\n" not in line


def test_a_running_job_that_was_asked_to_stop_is_cancelling() -> None:
    """People see that it is on its way; the status itself stays what it is."""
    running = job(status=JobStatus.RUNNING, started_at=NOW, cancel_requested_at=NOW)
    assert table.status_word(running) == "cancelling"
    assert table.status_word(job(status=JobStatus.QUEUED)) == "queued"


# --- how a command ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["completed", "completed"], 0),
        (["completed", "errored", "cancelled"], 1),
        (["cancelled", "completed"], 5),
        (["errored", "running"], 4),
        ([], 0),
    ],
)
def test_the_exit_code_of_several_jobs_is_that_of_the_worst(statuses: list[str], code: int) -> None:
    """Unfinished outweighs errored outweighs cancelled outweighs completed."""
    assert exits.of_jobs(job(status=JobStatus(status)) for status in statuses) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownJob(), 3),
        (AmbiguousId(), 3),
        (UnknownAgent(), 3),
        (InvalidSessionId(), 2),
        (Damaged(), 6),
        (IdempotencyConflict(), 6),
        (StoreWriteFailed(), 6),
        (OutcomeUnknown(), 6),
        (PermissionError(13, "Permission denied"), 6),
        (RuntimeError("a bug"), 1),
    ],
)
def test_each_error_has_its_exit_code(error: Exception, code: int) -> None:
    """Not found is 3, a value of the wrong form 2, a damaged or refusing store 6, anything else 1."""
    assert exits.of_error(error) == code


@pytest.mark.parametrize("action", ["spawn_job", "list_jobs", "start_task", "cancel_session"])
def test_an_explanation_names_no_action_of_the_host(action: str) -> None:
    """What stands in front of a host's error is a name that nobody typed."""
    assert exits.explain(InvalidInput(f"{action}: cwd must be text")) == "cwd must be text"


def test_an_explanation_names_candidates_and_hides_nothing() -> None:
    """At most eight candidates and how many more there are; control characters in an error are shown."""
    error = AmbiguousId("more than one job id begins with '1'", candidates=[f"1{n}" for n in range(11)])
    assert exits.explain(error).splitlines()[1:3] == ["it could be:", "  10"]
    assert exits.explain(error).splitlines()[-1] == "  … and 3 more"
    assert exits.explain(UnknownJob("no \x1b[2J")) == "no \\x1b[2J"
    assert "OPENJOBS_DEBUG=1" in exits.explain(RuntimeError("a bug"))
