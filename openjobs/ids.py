"""Ids: how they are made, what is a valid one, and how a short one is understood."""

from __future__ import annotations

import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable

from .errors import InvalidInput, InvalidSessionId

#: makes one new id; the core takes it as an argument so that tests can fix the randomness
IdMaker = Callable[[], str]

#: how many characters of an id people are shown
SHORT = 8

SESSION_ID_CHARS = 64
_SESSION = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{SESSION_ID_CHARS - 1}}}\Z")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")
#: what a caller may use as the id of a message: never empty, never a path, one line
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}\Z")


#: ids made in advance: reading the system's randomness lets other threads in, which costs a busy
#: process more than the id does
_ready: deque[str] = deque()
_BATCH = 64


def new_id() -> str:
    """A random UUID, version 4, as text. A forked child never gets one of its parent's."""
    try:
        return _ready.popleft()
    except IndexError:
        random = os.urandom(16 * _BATCH)
        made = [str(uuid.UUID(bytes=random[at : at + 16], version=4)) for at in range(0, len(random), 16)]
        _ready.extend(made[1:])
        return made[0]


os.register_at_fork(after_in_child=_ready.clear)


def short(full: str) -> str:
    return full[:SHORT]


def is_session_id(text: str) -> bool:
    return _SESSION.match(text) is not None and not text.casefold().endswith(".lock")


def check_session_id(text: str) -> str:
    """`text` itself. Raises `InvalidSessionId`.

    The id becomes a directory name, so a trailing newline, a leading dot or dash and the suffix
    that git uses for its locks are refused; `\\Z` because `$` would let the newline through.
    """
    if not isinstance(text, str) or not is_session_id(text):
        raise InvalidSessionId(f"{text!r} cannot be a session id: {InvalidSessionId.__doc__}", value=text)
    return text


def check_job_id(text: str) -> str:
    """`text` itself. Raises `InvalidInput` unless it is a lower-case UUID."""
    if not isinstance(text, str) or not _UUID.match(text):
        raise InvalidInput(f"{text!r} cannot be a job id: it must be a UUID in lower case; leave it out to get one")
    return text


def check_node_id(text: str) -> str:
    if not isinstance(text, str) or not _NODE.match(text):
        raise InvalidInput(
            f"{text!r} cannot be a message id: 1 to 128 ASCII letters, digits or one of '_.:@-', "
            "starting with a letter, digit or '_'"
        )
    return text


def is_prefix(text: str) -> bool:
    """Whether `text` can be the beginning of a job id."""
    return bool(text) and len(text) <= 36 and all(c in "0123456789abcdef-" for c in text)


def starting_with(prefix: str, ids: Iterable[str]) -> list[str]:
    return [i for i in ids if i.startswith(prefix)]
