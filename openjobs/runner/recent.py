"""The newest ends, so that asking for one right after it happened reads nothing."""

from __future__ import annotations

from collections import OrderedDict

from ..jobs import Job

_LIMIT_JOBS = 512
_LIMIT_CHARS = 4 << 20


class Recent:
    """A bounded map of finished jobs. Called with the roster's lock held.

    A finished job changes only with its notice; whoever changes that drops it here.
    """

    def __init__(self, limit_jobs: int = _LIMIT_JOBS, limit_chars: int = _LIMIT_CHARS) -> None:
        self._limit_jobs = limit_jobs
        self._limit_chars = limit_chars
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def drop(self, job_id: str) -> None:
        job = self._jobs.pop(job_id, None)
        if job is not None:
            self._chars -= _chars(job)

    def put(self, job: Job) -> None:
        before = self._jobs.pop(job.job_id, None)
        if before is not None:
            self._chars -= _chars(before)
        self._jobs[job.job_id] = job
        self._chars += _chars(job)
        while self._jobs and (len(self._jobs) > self._limit_jobs or self._chars > self._limit_chars):
            _, oldest = self._jobs.popitem(last=False)
            self._chars -= _chars(oldest)


def _chars(job: Job) -> int:
    return len(job.description) + len(job.result_text or "") + len(job.error or "")
