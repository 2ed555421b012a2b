"""What stands in the place of a session's directory and is none: a pipe, a file, a link that leads nowhere.

Nobody can tell what it hides, so whoever looks at all sessions names it as one that cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..durable.private import refuse_in_place_of_directory
from ..errors import FileRefused, OpenJobsError, RepositoryRefused
from ..ids import is_session_id


def check_place(directory: Path) -> None:
    """Raises `RepositoryRefused` for such a thing; nothing is opened, so nothing is waited for."""
    try:
        refuse_in_place_of_directory(directory)
    except FileRefused as error:
        raise RepositoryRefused(str(error)) from None


def misplaced(sessions: Path) -> Iterator[tuple[str, OpenJobsError]]:
    """Session id and what is wrong, for each among a home's sessions. One look at the directory that holds them."""
    try:
        with os.scandir(sessions) as entries:
            names = [entry.name for entry in entries if is_session_id(entry.name) and not entry.is_dir()]
    except FileNotFoundError:
        return
    for name in sorted(names):
        try:
            check_place(sessions / name)
        except RepositoryRefused as error:
            yield name, error
