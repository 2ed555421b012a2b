"""A server whose jobs do what a test tells them, as a process of its own: `python host.py HOME [MANY [PORT]]`.

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
from datetime import timedelta
from pathlib import Path

import attrs

from openjobs import GitJobStore, JobRunner
from openjobs.jobs import Cancelled, ContextMode, Job, SyncFn, TurnRequest, TurnResult
from openjobs.server import create_app
from openjobs.server.security import have_token
from openjobs.server.serving import Serving, listen_on_loopback

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
    store = GitJobStore(home, durability="relaxed")
    session_id = store.create_session("many")
    start = store.clock.now() - timedelta(hours=3)
    job = Job(
        job_id=store.new_id(),
        subject="",
        description="one of many",
        agent_id="main",
        created_at=start,
        parent_session_id=session_id,
        context_mode=ContextMode.CLEAN,
    )
    waiting = []
    for number in range(many):
        one = attrs.evolve(
            job, job_id=store.new_id(), subject=f"Job number {number}", created_at=start + timedelta(seconds=number)
        )
        waiting.append(store.create_later(one, Cancelled(event_id=store.new_id(), reason="made for a test")))
    for each in waiting:
        each.result()
    store.close()


def main(home: Path, many: int, port: int) -> None:
    if many:
        make_many(home, many)
    go = home.parent / "go"
    go.mkdir(exist_ok=True)
    store = GitJobStore(home)
    runner = JobRunner(store, 2, turn_in(go), cancel_timeout_s=1.0)
    listener = listen_on_loopback(port)
    serving = Serving(create_app(runner), [listener])
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
    main(Path(sys.argv[1]), *([int(text) for text in sys.argv[2:]] + [0, 0])[:2])
