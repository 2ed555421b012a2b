"""Ledgers and run logs of every format version open for ever (fixtures/ledger, fixtures/runlog)."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs.errors import InvalidInput, LogStateInvalid
from openjobs.ledger import Ledger
from openjobs.runlog import Completion, Ending, LogState, RunLogReader, RunLogWriter
from openjobs.runlog.state import (
    HEADER_BYTES,
    PENDING_MOST_BYTES,
    Checkpoint,
    Header,
    Pending,
    check_text,
    decode_header,
    encode,
)
from tests.support.run_sources import new_run, pattern, state_record

FIXTURES = Path(__file__).parents[2] / "fixtures"


def private_copy(source: Path, target: Path) -> Path:
    """git keeps no permissions, and a file that others may read is none of ours."""
    target.mkdir(mode=0o700)
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        (target / path.name).chmod(0o600)
    return target


def test_a_ledger_of_version_1_opens(tmp_path: Path) -> None:
    """Compacted, with a dropped last record whose number is not used again."""
    path = private_copy(FIXTURES / "ledger", tmp_path / "here") / "v1.jsonl"
    assert [(record.seq, record.data) for record in Ledger(path).read()] == [
        (2, {"n": 1, "text": "é\u2028"}),
        (3, {"n": 2, "text": "é\u2028"}),
    ]
    assert Ledger(path).append({"n": 6}).seq == 6


def test_a_completed_run_log_of_version_1_opens(tmp_path: Path) -> None:
    """It is read, followed, and completed again without effect."""
    run = private_copy(FIXTURES / "runlog" / "v1" / "complete", tmp_path / "here")
    state = LogState(
        stdout_bytes=4,
        stderr_bytes=4,
        log_bytes=21,
        source="keeper-1",
        completion=Completion(outcome="completed", ending=Ending.DRAINED),
    )
    assert RunLogReader(run, task_id="task-1", run_id="run-1").state() == state
    assert b"".join(RunLogReader(run).follow()) == b"starting\nout\nerr\nend\n"
    with RunLogWriter(run, task_id="task-1", run_id="run-1") as log:
        log.complete("completed")
        assert log.state == state


@pytest.mark.parametrize("arrived", range(5))
def test_a_pending_append_of_version_1_is_completed(tmp_path: Path, arrived: int) -> None:
    """Its writer died in the middle of an append."""
    run = private_copy(FIXTURES / "runlog" / "v1" / "pending", tmp_path / "here")
    assert (run / "log").read_bytes() == b"starting\nou"
    (run / "log").write_bytes(b"starting\nout\n"[: 9 + arrived])
    assert RunLogReader(run).read().data == b"starting\n"
    with RunLogWriter(run, task_id="task-1", run_id="run-1") as log:
        assert log.state == LogState(stdout_bytes=4, log_bytes=13, source="keeper-1")
    assert RunLogReader(run).read().data == b"starting\nout\n"


# --- what a state says, field by field -----------------------------------------------------------------

HERE = Path("log.state")
ACCEPTED = LogState(stdout_bytes=4, stderr_bytes=3, log_bytes=9, source="keeper-1")
AFTER = LogState(
    stdout_bytes=6,
    stderr_bytes=5,
    log_bytes=13,
    source="keeper-1",
    completion=Completion(outcome="completed", ending=Ending.DRAINED),
)
WHOLE = Checkpoint(
    task_id="task-1", run_id="run-1", generation=6, committed=ACCEPTED, pending=Pending(data=b"data", after=AFTER)
)
DOCUMENT: dict[str, Any] = {
    "task_id": "task-1",
    "run_id": "run-1",
    "generation": 6,
    "committed": {"stdout": 4, "stderr": 3, "log": 9, "accepted": True, "source": "keeper-1"},
    "pending": {
        "bytes": 4,
        "sha256": hashlib.sha256(b"data").hexdigest(),
        "after": {
            "stdout": 6,
            "stderr": 5,
            "log": 13,
            "accepted": True,
            "source": "keeper-1",
            "completion": {"outcome": "completed", "ending": "drained"},
        },
    },
}
GONE = object()

_STATES = ("committed", "pending.after")
OBJECTS = ["committed", "pending", "pending.after", "pending.after.completion"]
NUMBERS = ["generation", "pending.bytes", *(f"{at}.{key}" for at in _STATES for key in ("stdout", "stderr", "log"))]
TEXTS = [
    "task_id",
    "run_id",
    "pending.sha256",
    *(f"{at}.source" for at in _STATES),
    "pending.after.completion.outcome",
    "pending.after.completion.ending",
]
ACCEPTANCES = [f"{at}.accepted" for at in _STATES]
#: without these a state says something else, not nothing
MAY_BE_MISSING = {"pending", "pending.after.completion", *(f"{at}.source" for at in _STATES)}


def changed(**values: Any) -> dict[str, Any]:
    """`DOCUMENT` with other values at dotted paths (`__` for the dot)."""
    document = copy.deepcopy(DOCUMENT)
    for path, value in values.items():
        *way, key = path.replace("__", ".").split(".")
        at = document
        for each in way:
            at = at[each]
        if value is GONE:
            del at[key]
        else:
            at[key] = value
    return document


def refusal(document: Any) -> str:
    """The text with which a state that says this is refused; its path is a fact, and no byte of the log is blamed."""
    with pytest.raises(LogStateInvalid) as caught:
        decode_header(state_record(json.dumps(document).encode()), HERE)
    assert (caught.value.path, caught.value.offset) == ("log.state", None)
    assert str(caught.value).startswith("log.state: ")
    return str(caught.value)


def last(path: str) -> str:
    return path.rpartition(".")[2]


WRONG = [
    *(
        (path, value, f"{last(path)} is no object")
        for path in OBJECTS
        for value in (None, 7, "x", True, [], [["a", 1]])
    ),
    *(
        (path, value, f"{last(path)} is no length")
        for path in NUMBERS
        for value in (None, "1", 1.0, True, [], {}, -1, 2**62 + 1)
    ),
    *((path, value, f"{last(path)} is no text") for path in TEXTS for value in (None, 7, True, [], {})),
    *((path, value, f"{last(path)} must be a text of 1 to") for path in TEXTS for value in ("", "x" * 599)),
    *(
        ("pending.sha256", value, "sha256 is no SHA-256")
        for value in ("00", "g" * 64, DOCUMENT["pending"]["sha256"].upper(), DOCUMENT["pending"]["sha256"] + "0")
    ),
    ("pending.after.completion.ending", "else", "'else' is not a valid Ending"),
    *((path, value, "accepted without a source") for path in ACCEPTANCES for value in (None, 0, 1, "true", [], False)),
    *(
        (path, GONE, f"{last(path)} is missing")
        for path in [*OBJECTS, *NUMBERS, *TEXTS, *ACCEPTANCES]
        if path not in MAY_BE_MISSING
    ),
    *((f"{at}.source", GONE, "accepted without a source") for at in _STATES),
    *((path, 1, "unknown: more") for path in ("more", *(f"{at}.more" for at in OBJECTS))),
]


@pytest.mark.parametrize(
    ("path", "value", "text"), WRONG, ids=[f"{path}-{'GONE' if v is GONE else repr(v)[:9]}" for path, v, _ in WRONG]
)
def test_a_field_that_is_wrong_is_refused_by_its_name(path: str, value: Any, text: str) -> None:
    """Every field of a state: of a wrong type, out of its range, missing, or unknown."""
    assert text in refusal(changed(**{path: value}))


@pytest.mark.parametrize("document", [None, 7, "x", True, [], list(map(list, DOCUMENT.items()))], ids=repr)
def test_a_state_is_an_object(document: Any) -> None:
    """Nothing else is, also not the pairs that would make one."""
    assert "the state is no object" in refusal(document)


@pytest.mark.parametrize("path", [*OBJECTS, *NUMBERS, *TEXTS, *ACCEPTANCES])
def test_no_field_stands_twice(path: str) -> None:
    """Not even with the same value: which one counts is nobody's guess."""
    *way, key = path.split(".")
    document = copy.deepcopy(DOCUMENT)
    at = document
    for each in way:
        at = at[each]
    at["twin"] = at[key]
    with pytest.raises(LogStateInvalid, match="a key stands twice"):
        decode_header(state_record(json.dumps(document).replace("twin", key).encode()), HERE)


STARTLESS = {"outcome": "cancelled", "ending": "never_started"}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        # more native bytes than the log has: one stream's, the other's, only both together's
        ({"committed.stdout": 10, "committed.stderr": 0}, "more native bytes"),
        ({"committed.stdout": 0, "committed.stderr": 10}, "more native bytes"),
        ({"committed.stdout": 5, "committed.stderr": 5}, "more native bytes"),
        ({"pending.after.stdout": 7, "pending.after.stderr": 7}, "more native bytes"),
        # output of nobody
        *(
            (
                {
                    "committed.stdout": out,
                    "committed.stderr": err,
                    "committed.accepted": False,
                    "committed.source": GONE,
                },
                "nobody accepted",
            )
            for out, err in ((1, 0), (0, 1), (3, 3))
        ),
        # an end that does not go with the beginning
        ({"pending.after.completion": STARTLESS}, "never started"),
        ({"committed.completion": STARTLESS}, "never started"),
        # what is appended does not lead from one to the other
        ({"pending.bytes": 3}, "do not lead"),
        ({"pending.bytes": 5}, "do not lead"),
        ({"pending.bytes": 0}, "do not lead"),
        ({"pending.after.log": 12}, "do not lead"),
        ({"pending.bytes": 0, "pending.after": DOCUMENT["committed"]}, "do not lead"),
        ({"pending.bytes": 56 * 1024 + 1, "pending.after.log": 9 + 56 * 1024 + 1}, "do not lead"),
        ({"pending.after.stdout": 3}, "offsets do not follow"),
        ({"pending.after.stderr": 2}, "offsets do not follow"),
        ({"pending.after.stdout": 7, "committed.log": 10, "pending.after.log": 14}, "offsets do not follow"),
        # something is taken back
        ({"pending.after.source": "keeper-2"}, "takes something back"),
        ({"committed.completion": DOCUMENT["pending"]["after"]["completion"]}, "takes something back"),
        (
            {
                "pending.after.source": GONE,
                "pending.after.accepted": False,
                "pending.after.completion": GONE,
                "committed.stdout": 0,
                "committed.stderr": 0,
                "pending.after.stdout": 0,
                "pending.after.stderr": 0,
            },
            "takes something back",
        ),
    ],
)
def test_a_state_that_no_run_can_be_in_is_refused_by_its_reason(values: dict[str, Any], text: str) -> None:
    """Each number may be right alone: together, and with the state before, they must be able to come about."""
    assert text in refusal(changed(**values))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"pending": GONE},
        {"generation": 2**62},
        {"pending": GONE, "committed.log": 2**62, "committed.stdout": 2**62 - 3},
        {"pending.bytes": 56 * 1024, "pending.after.log": 9 + 56 * 1024},
        {"pending.after.completion": GONE},
        {"pending.after.stdout": 4, "pending.after.stderr": 3},
        {"committed.stdout": 4, "committed.stderr": 5},
        {"task_id": "x" * 598, "run_id": "x" * 598},
        {
            "committed": {"stdout": 0, "stderr": 0, "log": 9, "accepted": False, "completion": STARTLESS},
            "pending": GONE,
        },
        {
            "committed": {"stdout": 0, "stderr": 0, "log": 9, "accepted": False},
            "pending.after.stdout": 1,
            "pending.after.stderr": 3,
        },
    ],
)
def test_a_state_at_the_edge_of_what_may_be_is_read(values: dict[str, Any]) -> None:
    """The largest lengths and texts, an append that fills its place, an acceptance or an end in the same step."""
    assert decode_header(state_record(json.dumps(changed(**values)).encode()), HERE) is not None


def test_a_state_is_read_as_it_was_written() -> None:
    """Bytes and back: every field, with and without a pending append, and the bytes are version 1's."""
    raw, data = encode(WHOLE)
    assert raw.rstrip(b"\n") == state_record(json.dumps(DOCUMENT, separators=(",", ":")).encode())
    assert (len(raw), data) == (4096, b"data")
    pending = Header(
        task_id="task-1",
        run_id="run-1",
        generation=6,
        committed=ACCEPTED,
        after=AFTER,
        pending_bytes=4,
        pending_sha256=DOCUMENT["pending"]["sha256"],
    )
    header = decode_header(raw, HERE)
    assert header == pending
    assert header.with_data(b"data") == WHOLE
    settled = attrs.evolve(WHOLE, committed=AFTER, pending=None)
    raw, data = encode(settled)
    header = decode_header(raw, HERE)
    assert header == attrs.evolve(pending, committed=AFTER, after=None, pending_bytes=0, pending_sha256="")
    assert data == b""
    assert header.with_data(b"") == settled


def test_pending_bytes_that_a_header_was_not_written_for_are_none() -> None:
    """Others of the same length, fewer, more; and a length that its own checksum does not go with."""
    header = decode_header(encode(WHOLE)[0], HERE)
    assert header is not None
    assert [header.with_data(data) for data in (b"dat4", b"dat", b"data+", b"")] == [None] * 4
    assert attrs.evolve(header, pending_bytes=5).with_data(b"data") is None


def test_a_state_stands_where_version_1_looks_for_it(tmp_path: Path) -> None:
    """Two slots of 60 KiB, by turns; in each a header of 4 KiB and behind it the at most 56 KiB of an append.

    Another version finds the second record, and what is pending, by these numbers alone.
    """
    run = new_run(tmp_path)
    first, second = pattern(56 * 1024), pattern(56 * 1024, seed=1)
    with RunLogWriter(run, task_id="task-1", run_id="run-1") as log:
        log.accept("keeper-1")
        log.append_native(stdout=first, more=True)
        log.append_native(stdout=second, more=True)
        state = (run / "log.state").read_bytes()
        assert len(state) == 2 * 61_440
        found = {}
        for at in (0, 61_440):
            header = decode_header(state[at : at + 4096], HERE)
            assert header is not None
            found[header.generation % 2] = (at, header.generation)
            wanted = first if header.committed.log_bytes == 0 else second
            assert state[at + 4096 : at + 61_440] == wanted
        assert {parity: at for parity, (at, _) in found.items()} == {0: 0, 1: 61_440}
        assert abs(found[0][1] - found[1][1]) == 1
        log._close_files()  # killed here
    with RunLogWriter(run, task_id="task-1", run_id="run-1") as log:
        assert log.state.stdout_bytes == 2 * 56 * 1024
    assert (run / "log").read_bytes() == first + second


@pytest.mark.parametrize(
    ("fits", "too_long"),
    [("x" * 598, "x" * 599), ("é" * 99 + "xxxx", "é" * 99 + "xxxxx"), ("\n" * 299, "\n" * 300)],
)
def test_a_text_of_a_state_has_a_limit(tmp_path: Path, fits: str, too_long: str) -> None:
    """600 bytes of JSON, quotes included: what a writer takes every reader takes, and one more is refused by both."""
    assert check_text(fits, "an id") == fits
    with pytest.raises(InvalidInput, match="an id must be a text of 1 to about 600 characters"):
        check_text(too_long, "an id")
    run = new_run(tmp_path)
    with RunLogWriter(run, task_id=fits, run_id=fits) as log:
        log.accept(fits, b"accepted\n")
        log.append_native(stdout=b"x" * PENDING_MOST_BYTES)
        log.complete(fits, event=b"end\n")
    assert RunLogReader(run, task_id=fits, run_id=fits).state() == LogState(
        stdout_bytes=PENDING_MOST_BYTES,
        log_bytes=9 + PENDING_MOST_BYTES + 4,
        source=fits,
        completion=Completion(outcome=fits, ending=Ending.DRAINED),
    )


def test_two_states_of_the_longest_texts_and_numbers_fit_into_a_header() -> None:
    """Whatever a writer takes can be written."""
    long = check_text("x" * 598, "a text")
    most = 2**62
    before = LogState(stdout_bytes=most - 4, stderr_bytes=0, log_bytes=most - 4, source=long)
    after = attrs.evolve(
        before, stdout_bytes=most, log_bytes=most, completion=Completion(outcome=long, ending=Ending.DRAINED)
    )
    whole = Checkpoint(
        task_id=long, run_id=long, generation=most, committed=before, pending=Pending(data=b"data", after=after)
    )
    header = decode_header(encode(whole)[0], HERE)
    assert header is not None
    assert header.with_data(b"data") == whole


def _with_task_id(length: int) -> Checkpoint:
    return attrs.evolve(WHOLE, task_id="x" * length)


def _with_pending(length: int) -> Checkpoint:
    return attrs.evolve(WHOLE, pending=Pending(data=b"x" * length, after=AFTER))


@pytest.mark.parametrize(
    ("made", "most"),
    [
        (_with_task_id, HEADER_BYTES - len(encode(_with_task_id(1000))[0].rstrip(b"\n")) + 1000),
        (_with_pending, 56 * 1024),
    ],
)
def test_a_record_that_does_not_fit_its_slot_is_never_written(made: Callable[[int], Checkpoint], most: int) -> None:
    """A header of 4 KiB and an append of 56 KiB fit exactly; one byte more would stand in the next one's place."""
    header, data = encode(made(most))
    assert len(header) == 4096
    assert len(data) <= 56 * 1024
    with pytest.raises(InvalidInput, match="too large"):
        encode(made(most + 1))
