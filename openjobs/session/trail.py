"""Which commits belong to a job: a derived index, so that the history of an old job needs no walk.

One fixed-size record for each commit of a job, appended without a barrier after the commit is
durable. Never the truth: each hit is checked in the commit it names, and a job for which fewer
commits are found than its row's revision says is looked up in the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..durable.files import read_file
from .catalog import APPEND, KEY_BYTES, key

_COMMIT_BYTES = 20
_RECORD_BYTES = KEY_BYTES + _COMMIT_BYTES


class Trail:
    """The records of one session. Appending is done by one thread; any may look."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def note(self, commits: Iterable[tuple[str, str]]) -> None:
        """(job id, commit id) pairs in order. What cannot be written is found in the log instead."""
        data = b"".join([key(job_id) + bytes.fromhex(commit_id) for job_id, commit_id in commits])
        if self._file is None or not data:
            return
        try:
            fd = os.open(self._file, APPEND, 0o600)
            try:
                if os.fstat(fd).st_size % _RECORD_BYTES:
                    os.ftruncate(fd, 0)  # torn by a crash: begun anew, older jobs are found in the log
                os.write(fd, data)
            finally:
                os.close(fd)
        except OSError:
            self._file = None

    def commits(self, job_id: str) -> list[str]:
        """Commit ids that are said to be the job's, oldest first, each once."""
        if self._file is None:
            return []
        try:
            data = read_file(os.fspath(self._file))
        except OSError:
            return []
        wanted, found, at = key(job_id), [], -1
        while (at := data.find(wanted, at + 1)) >= 0:
            commit = data[at + KEY_BYTES : at + _RECORD_BYTES]
            if at % _RECORD_BYTES == 0 and len(commit) == _COMMIT_BYTES:
                found.append(commit.hex())
        return list(dict.fromkeys(found))
