"""A server whose jobs do what a test tells them, as a process of its own: `python host.py HOME MANY PORT [PREFIX]`.

A prompt is a JSON object: `text` to answer, `fail` to raise, `progress` and `partial` to report, `until` to wait for
the file of that name in `<home>/../go`, `deaf` to do so whatever happens. MANY finished jobs are made first. Prints
the address and a token.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from openjobs import GitJobStore, JobRunner
from openjobs.jobs import ContextMode, Job, JobStatus, SyncFn, TurnRequest, TurnResult
from openjobs.repo import Change
from openjobs.server import create_app
from openjobs.server.security import have_token
from openjobs.server.serving import Serving, listen_on_loopback
from openjobs.session import Documents
from openjobs.store.committer import Operation
from openjobs.store.index import Entry

PAGE_ROWS = 64
_LOOK_S = 0.005


def turn_in(go: Path) -> SyncFn:
    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        asked = json.loads(request.prompt) if request.prompt.startswith("{") else {"text": request.prompt}
        if "progress" in asked:
            request.progress(asked["progress"])
        if "partial" in asked:
            request.partial(asked["partial"])
        while "until" in asked and not (go / asked["until"]).exists():
            if cancel_event.is_set() and not asked.get("deaf"):
                return TurnResult(final_text="stopped half way")
            time.sleep(_LOOK_S)
        if "fail" in asked:
            raise RuntimeError(asked["fail"])
        return TurnResult(final_text=asked.get("text", ""))

    return turn


def make_many(home: Path, many: int) -> None:
    """Rows only, a page a commit: 10,000 jobs that came the usual way would be 40,000 commits."""
    store = GitJobStore(home, durability="relaxed")
    session_id = store.create_session("many")
    start = store.clock.now() - timedelta(hours=3)
    jobs = [_one_of_many(store, session_id, number, start + timedelta(seconds=number)) for number in range(many)]
    operations = [
        Operation(decide=store._in(session_id, _page(jobs[at : at + PAGE_ROWS])), result=lambda: None)
        for at in range(0, many, PAGE_ROWS)
    ]
    store._committer._index.add(Entry(job_id=job.job_id, session_id=session_id) for job in jobs)
    store._committer.add(session_id, operations)
    for operation in operations:
        operation.future.result()
    store.close()


def _one_of_many(store: GitJobStore, session_id: str, number: int, then: datetime) -> Job:
    status = (JobStatus.COMPLETED, JobStatus.ERRORED, JobStatus.CANCELLED)[number % 10 % 3]
    return Job(
        job_id=store.new_id(),
        subject=f"Job number {number}",
        description="one of many",
        agent_id="main",
        status=status,
        created_at=then,
        queued_at=then,
        started_at=then + timedelta(milliseconds=400),
        completed_at=then + timedelta(milliseconds=2500),
        parent_session_id=session_id,
        context_mode=ContextMode.CLEAN,
        error="made for a test" if status is JobStatus.ERRORED else None,
        event_id=store.new_id(),
    )


def _page(jobs: Sequence[Job]) -> Callable[[Documents], Change]:
    def decide(documents: Documents) -> Change:
        documents.close_page_if_full()
        for job in jobs:
            documents.put_job(job)
        return Change(files=documents.changes, subject="a page of many")

    return decide


def main(home: Path, many: int, port: int, prefix: str) -> None:
    if many:
        make_many(home, many)
    go = home.parent / "go"
    go.mkdir(exist_ok=True)
    store = GitJobStore(home)
    runner = JobRunner(store, 2, turn_in(go), cancel_timeout_s=1.0)
    listener = listen_on_loopback(port)
    serving = Serving(create_app(runner, prefix=prefix), [listener])
    serving.start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    token = have_token(home, store.disk)
    print(json.dumps({"port": listener.getsockname()[1], "token": token}), flush=True)
    stop.wait()
    serving.stop()
    listener.close()
    runner.shutdown(1.0)
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
