"""Ids: what is one, and what only looks like one."""

from __future__ import annotations

import os
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs import errors, ids

GOOD_SESSIONS = [
    "a",
    "A",
    "0",
    "_",
    "_x",
    "default",
    "a.b",
    "a-b",
    "a..b",
    "a.",
    "a-",
    "x" * 64,
    "lock",
    "a.locks",
    "CON",
]

BAD_SESSIONS = {
    "empty": "",
    "a newline at the end": "a\n",
    "a newline alone": "\n",
    "a newline inside": "a\nb",
    "a carriage return": "a\r",
    "a null byte": "a\0",
    "a null byte at the end of a long id": "x" * 63 + "\0",
    "65 characters": "x" * 65,
    "64 characters and a newline": "x" * 64 + "\n",
    "a leading dot": ".a",
    "this directory": ".",
    "the directory above": "..",
    "git's own directory": ".git",
    "a leading dash": "-a",
    "an option": "--help",
    "git's suffix for locks": "a.lock",
    "the suffix in capitals": "a.LOCK",
    "the suffix in mixed case": "a.LoCk",
    "the suffix alone": ".lock",
    "a slash": "a/b",
    "an absolute path": "/etc",
    "a way out": "a/../../b",
    "a backslash": "a\\b",
    "a space": "a b",
    "a space at the end": "a ",
    "a tab": "a\t",
    "a colon": "a:b",
    "a tilde": "~root",
    "a star": "a*",
    "a variable": "$HOME",
    "a letter with an accent": "é",
    "an accent that combines": "e\u0301",
    "a letter that looks like a": "а",
    "a digit that is not ASCII": "٣",
    "a full-width letter": "ａ",
    "the Kelvin sign, which folds to k": "loc\u212a",
    "a lock by folding": "a.loc\u212a",
    "a right-to-left mark": "a\u200f",
    "a line separator": "a\u2028",
    "a lone surrogate": "a\ud800",
    "an escape sequence": "a\x1b[2J",
}


@pytest.mark.parametrize("text", GOOD_SESSIONS)
def test_a_session_id_of_the_grammar_is_taken_as_it_is(text: str) -> None:
    """1 to 64 ASCII letters, digits, '-', '_', '.' make a session id, and come back unchanged."""
    assert ids.check_session_id(text) == text


@pytest.mark.parametrize("text", BAD_SESSIONS.values(), ids=BAD_SESSIONS.keys())
def test_what_is_outside_the_grammar_is_no_session_id(text: str) -> None:
    """R10: whatever could leave its directory, clash with git's locks or differ by encoding is refused by type."""
    with pytest.raises(errors.InvalidSessionId) as caught:
        ids.check_session_id(text)
    assert isinstance(caught.value, errors.Refused)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("value", [None, 7, b"a", ["a"], True])
def test_a_session_id_is_text(value: object) -> None:
    """What is not a `str` is refused by the same type."""
    with pytest.raises(errors.InvalidSessionId):
        ids.check_session_id(value)  # type: ignore[arg-type]


@given(st.text(max_size=70))
def test_an_accepted_session_id_is_a_plain_file_name(text: str) -> None:
    """R10: any text that passes is one ASCII path component, neither hidden nor an option nor a lock."""
    try:
        ids.check_session_id(text)
    except errors.InvalidSessionId:
        return
    assert text.isascii()
    assert text.isprintable()
    assert 1 <= len(text) <= 64
    assert "/" not in text
    assert text[0] not in ".-"
    assert not text.lower().endswith(".lock")


def test_ids_that_differ_only_in_case_fold_together() -> None:
    """Both are valid; the store keeps one per folded form, since some file systems know only one."""
    assert ids.check_session_id("Work").casefold() == ids.check_session_id("work").casefold()


def test_a_new_id_is_a_random_uuid() -> None:
    """Version 4, lower case, and valid as a job id."""
    made = {ids.new_id() for _ in range(1000)}
    assert len(made) == 1000
    assert {uuid.UUID(text).version for text in made} == {4}
    assert all(ids.check_job_id(text) == text for text in made)


GOOD_JOB = "0d6f0b1e-8d0a-4d39-9c57-0123456789ab"


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD_JOB.upper(),
        GOOD_JOB + "\n",
        " " + GOOD_JOB,
        "{" + GOOD_JOB + "}",
        "urn:uuid:" + GOOD_JOB,
        GOOD_JOB.replace("-", ""),
        GOOD_JOB[:-1],
        GOOD_JOB + "0",
        GOOD_JOB[:-1] + "g",
        GOOD_JOB[:-1] + "٣",
        "../" + GOOD_JOB,
        None,
        uuid.UUID(GOOD_JOB),
    ],
)
def test_only_a_whole_lower_case_uuid_is_a_job_id(text: object) -> None:
    """One job has one spelling, so it can be a file's name and a key."""
    with pytest.raises(errors.InvalidInput):
        ids.check_job_id(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a", "msg_1", "a.b:c@d-e", "_x", "x" * 128])
def test_a_message_id_may_be_a_hosts_own(text: str) -> None:
    """Hosts bring ids of their own; any short line without blanks and slashes will do."""
    assert ids.check_node_id(text) == text


@pytest.mark.parametrize("text", ["", "a\n", "a b", "a/b", "-a", ".a", ":a", "x" * 129, "é", "a\0", None])
def test_a_message_id_is_one_short_line(text: object) -> None:
    """What could be a path, an option or two lines is refused."""
    with pytest.raises(errors.InvalidInput):
        ids.check_node_id(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "valid"), [("0d6f", True), (GOOD_JOB, True), ("", False), ("0D", False), ("x", False)]
)
def test_a_prefix_is_of_the_characters_of_an_id(text: str, valid: bool) -> None:
    """Anything else cannot be the beginning of a job id, and need not be looked up."""
    assert ids.is_prefix(text) is valid
    assert not ids.is_prefix(GOOD_JOB + "0")


def test_a_prefix_finds_all_that_begin_with_it_in_order() -> None:
    """The caller decides by their number: none, one, or ambiguous."""
    assert ids.starting_with("ab", ["abc", "b", "abd"]) == ["abc", "abd"]
    assert ids.short(GOOD_JOB) == "0d6f0b1e"


def test_ids_are_random_uuids_and_never_the_same() -> None:
    """Ten thousand of them, version 4, all different."""
    made = [ids.new_id() for _ in range(10_000)]
    assert len(set(made)) == len(made)
    assert {uuid.UUID(each).version for each in made} == {4}
    assert [ids.check_job_id(each) for each in made] == made


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_ids_of_its_own() -> None:
    """Ids that the parent made in advance are not the child's too."""
    ids.new_id()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, " ".join(ids.new_id() for _ in range(100)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        theirs = pipe.read().split()
    os.waitpid(child, 0)
    assert len(theirs) == 100
    assert not {ids.new_id() for _ in range(1000)} & set(theirs)
