"""Commit messages: one subject line and trailers that nobody can forge through job text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

SUBJECT_LIMIT_CHARS = 160


@lru_cache(maxsize=1024)  # ids, states and a job's subject come again with each of its commits
def clean_line(text: str) -> str:
    """`text` as one printable line: control and format characters become a space, lone surrogates `?`."""
    if text.isprintable():  # the usual case: nothing to replace
        return " ".join(text.split())
    text = text.encode("utf-8", "replace").decode("utf-8")
    return " ".join("".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text).split())


def clean_subject(text: str) -> str:
    line = clean_line(text)
    return line if len(line) <= SUBJECT_LIMIT_CHARS else line[: SUBJECT_LIMIT_CHARS - 1] + "…"


def clean_trailers(trailers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((key, clean_line(value)) for key, value in trailers)


def encode(subject: str, trailers: Iterable[tuple[str, str]]) -> bytes:
    """The message as git stores it: subject, blank line, trailers, each line ended."""
    lines = [f"{key}: {value}\n" for key, value in trailers]
    return (subject + "\n" + ("\n" + "".join(lines) if lines else "")).encode()


def decode(raw: bytes) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Subject and trailers of any commit, a foreign one too (whose last paragraph is read the same way)."""
    text = raw.decode("utf-8", "replace")
    subject, _, rest = text.partition("\n")
    last = rest.strip().rsplit("\n\n", 1)[-1]
    pairs = [line.partition(": ") for line in last.splitlines()]
    if not pairs or not all(sep and key.replace("-", "").isalnum() for key, sep, _ in pairs):
        return subject, ()
    return subject, tuple((key, value) for key, _, value in pairs)
