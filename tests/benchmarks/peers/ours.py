"""openjobs: `JobRunner` with a callable, in the submitters' process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .peer import PROMPT, WORKERS, Peer, noop


class OpenJobs(Peer):
    title = "openjobs"
    how = "JobRunner(workers=4, sync_fn=…) in process, one session; read back with store.get"
    durable = "four commits, each synced"
    less = ""

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[int], str]]:
        from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnRequest, TurnResult

        def fn(request: TurnRequest, cancel_event: object) -> TurnResult:
            return TurnResult(final_text=noop(request.prompt))

        with GitJobStore(self.directory / "home", durability="full") as store:
            store.create_session("bench")
            store.session("bench").append("user", "hello")
            with JobRunner(store, workers=WORKERS, sync_fn=fn) as runner:

                def cycle(number: int) -> str:
                    request = SpawnRequest(parent_session_id="bench", prompt=PROMPT, description=f"part {number}")
                    job = runner.submit(request)
                    runner.await_job(job.job_id)
                    return store.get(job.job_id).result_text or ""

                yield cycle
