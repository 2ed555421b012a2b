"""Rows that a foreign commit put back are written again. Source: docs/git-store.md, step 1.

Somebody may commit an older `jobs.json` on top of ours (a checkout of a file, a revert). A job's
`revision` only grows, and so does the stage of its notice, so a row that went back is recognised by
comparing each foreign commit with its parent, and the parent's row is put in its place by a commit
of the kind `restore`. Nothing is remembered for this: the history itself says what was durable, to
whichever process writes next.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

from ..errors import Damaged
from ..jobs import STAGES, Job
from ..repo import Change, CommitInfo, Repository, View
from ..session import Documents, Page, pages

_log = logging.getLogger(__name__)

#: how many commits are looked at: since this process's own last one, and when it has none yet
COMMITS = 256
COMMITS_AT_FIRST = 32


def restored(documents: Documents, repository: Repository, own_head: str | None) -> Change | None:
    """The change that puts back what foreign commits since `own_head` took back, or None."""
    lost: dict[str, Job] = {}
    for commit in _foreign(repository, own_head):
        before, after = repository.view(commit.parents[0]), repository.view(commit.commit_id)
        for job in _went_back(before, after):
            if job.job_id not in lost or _age(lost[job.job_id]) < _age(job):
                lost[job.job_id] = job
    lost = {job_id: job for job_id, job in lost.items() if _is_older(documents.job(job_id), job)}
    if not lost:
        return None
    for job in lost.values():
        documents.put_job(job)
    _log.warning("a foreign commit had put %d row(s) back; they are written again", len(lost))
    return Change(
        files=documents.changes,
        subject=f"{len(lost)} rows restored after a foreign commit",
        trailers=[("Openjobs-Kind", "restore")],
    )


def _foreign(repository: Repository, own_head: str | None) -> Iterator[CommitInfo]:
    """Commits that openjobs did not make, newest first, each with a parent to compare it with."""
    limit = COMMITS if own_head is not None else COMMITS_AT_FIRST
    for commit in itertools.islice(repository.log(), limit):
        if commit.commit_id == own_head:
            return
        if commit.parents and commit.trailer("Openjobs-Kind") is None:
            yield commit


def _went_back(before: View, after: View) -> Iterator[Job]:
    """Rows of `before` whose revision is lower in `after`, or that are gone there."""
    for path in _changed_pages(before, after):
        try:
            old, new = Page.parse(path, before.read(path)), Page.parse(path, after.read(path))
        except Damaged:
            continue  # what cannot be read is refused where it is used, and left as it is
        for job_id, line in old.lines.items():
            if new.lines.get(job_id) == line:
                continue
            try:
                job, there = old.get(job_id), new.get(job_id)
            except Damaged:
                continue
            if job is not None and _is_older(there, job):
                yield job


def _changed_pages(before: View, after: View) -> Iterator[str]:
    if before.version(pages.NEWEST) != after.version(pages.NEWEST):
        yield pages.NEWEST
    if before.version(pages.OLDER) == after.version(pages.OLDER):
        return
    for sub in before.names(pages.OLDER):
        directory = f"{pages.OLDER}/{sub}"
        if before.version(directory) == after.version(directory):
            continue
        for name in before.names(directory):
            path = f"{directory}/{name}"
            if pages.number_of(name) is not None and before.version(path) != after.version(path):
                yield path


def _is_older(there: Job | None, ours: Job) -> bool:
    return there is None or _age(there) < _age(ours)


def _age(job: Job) -> tuple[int, int]:
    """What only grows in the life of a row: its revision, and after the end the stage of its notice."""
    return job.revision, -1 if job.notice is None else STAGES.index(job.notice)
