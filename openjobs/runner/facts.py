"""The facts of a runner's jobs: recorded once the commit is durable, before anybody hears of it (spec 001).

Only a runner records, and only of its own jobs as they end in its hands. A job that recovery ends has
no `job/settled`: nobody saw its end, and nobody makes one up.
"""

from __future__ import annotations

from ..facts import Recorder
from ..facts.fact import registered, settled
from ..jobs import Job
from .ending import Ended


class JobFacts:
    """The steps of a job's life that record facts. They never raise for a ledger that cannot be written."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def registered(self, job: Job) -> None:
        self._recorder.record(registered(job))

    def settled(self, ended: Ended) -> None:
        fact = settled(ended.job, producer_reported=ended.live.producer_reported)
        if ended.live.told:
            self._recorder.record(fact)
        else:
            # Its submit failed half-way, so nobody was told of it; it is in the session all the same.
            self._recorder.record(registered(ended.job), fact)
