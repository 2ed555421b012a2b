"""Rows that a foreign commit put back are written again. Source: docs/git-store.md, step 1.

Somebody may commit an older `jobs.json` on top of ours (a checkout of a file, a revert). A job's
`revision` only grows, so a row whose revision went back is recognised, and what this process knows
to be durable is put in its place by a commit of the kind `restore`.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator

from ..jobs import Job
from ..repo import Change, CommitInfo
from ..session import Documents

_log = logging.getLogger(__name__)

#: rows of one session that are remembered
_ROWS = 128
#: how far back commits are looked at to tell whether a foreign one is among them
_COMMITS = 256


class Durable:
    """What this process has made durable in one session lately. Touched by the committer's thread only."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, Job] = OrderedDict()

    def note(self, row: Job) -> None:
        self._rows[row.job_id] = row
        self._rows.move_to_end(row.job_id)
        while len(self._rows) > _ROWS:
            self._rows.popitem(last=False)

    def restored(
        self, documents: Documents, own_head: str | None, log: Callable[[], Iterator[CommitInfo]]
    ) -> Change | None:
        """The change that puts our rows back after somebody else's commits since `own_head`, or None."""
        if not self._rows or not _is_foreign(log(), own_head):
            return None
        lost = [row for row in self._rows.values() if _went_back(documents.job(row.job_id), row)]
        for row in lost:
            documents.put_job(row)
        if not lost:
            return None
        _log.warning("a foreign commit put %d row(s) back; they are written again", len(lost))
        return Change(
            files=documents.changes,
            subject=f"{len(lost)} rows restored after a foreign commit",
            trailers=[("Openjobs-Kind", "restore")],
        )


def _is_foreign(log: Iterator[CommitInfo], own_head: str | None) -> bool:
    """Whether a commit since `own_head` was not made by openjobs; so it is where that was too long ago."""
    for commit in itertools.islice(log, _COMMITS):
        if commit.commit_id == own_head:
            return False
        if commit.trailer("Openjobs-Kind") is None:
            return True
    return True


def _went_back(there: Job | None, ours: Job) -> bool:
    return there is None or there.revision < ours.revision
