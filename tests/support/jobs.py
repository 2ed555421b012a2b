"""Jobs as a runner makes them, without a runner."""

from __future__ import annotations

import attrs

from openjobs import errors
from openjobs.jobs import Completed, Event, Job, JobStatus, Queued, SpawnRequest, Started, request_digest
from openjobs.store import JobStore


def job_for(store: JobStore, session_id: str, prompt: str = "do it", **fields: object) -> Job:
    """A job that is about to be created."""
    request = SpawnRequest(prompt=prompt, parent_session_id=session_id)
    base = Job(
        job_id=store.new_id(),
        subject=prompt[:40],
        description=prompt,
        agent_id="main",
        created_at=store.clock.now(),
        parent_session_id=session_id,
        request_digest=request_digest(request),
    )
    return attrs.evolve(base, **fields)  # type: ignore[arg-type]


def end_of(job: Job) -> Completed:
    """Its end, with an identity that a retry has too."""
    return Completed(event_id=f"end-{job.job_id}", result_text=f"result of {job.subject}")


def walk_to_the_end(store: JobStore, job: Job) -> Job:
    """As a caller that retries with the same ids: from wherever the job is to completed."""
    try:
        store.create(job, Queued(runner_id="r1"))
    except errors.JobExists:
        pass
    steps: dict[JobStatus, Event] = {
        JobStatus.PENDING: Queued(runner_id="r1"),
        JobStatus.QUEUED: Started(run_id="run"),
        JobStatus.RUNNING: end_of(job),
    }
    while not (now := store.get(job.job_id)).terminal:
        store.apply(job.job_id, steps[now.status])
    return now


def clean(store: JobStore) -> None:
    """Every session is what the guarantees say."""
    for session_id in store.sessions():
        report = store.fsck(session_id)
        assert report.clean, "\n".join(map(str, report.findings))
