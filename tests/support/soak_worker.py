"""One process of the soak: `python -m tests.support.soak_worker HOME SESSIONS SEED OUT`, until it is killed or ended.

Eight threads submit, wait, cancel and look, over a runner of its own. Each acknowledgement is a line appended to OUT:
`submitted ID`, `ended ID STATUS`, and every half second `size RSS_BYTES DESCRIPTORS THREADS`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading

import psutil

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnRequest, TurnResult, errors

THREADS = 8


def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    dice = random.Random(request.prompt)
    if dice.random() < 0.1:
        raise ValueError("by seed")
    cancel_event.wait(dice.random() * 0.02)
    return TurnResult(final_text=request.prompt * dice.randint(1, 20))


def main(home: str, sessions: str, seed: str, out: str) -> None:
    fd = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())

    def say(line: str) -> None:
        os.write(fd, f"{line}\n".encode())

    with GitJobStore(home, "relaxed") as store, JobRunner(store, sync_fn=turn, workers=3) as runner:

        def person(number: int) -> None:
            dice = random.Random(f"{seed}.{number}")
            while not over.is_set():
                request = SpawnRequest(
                    prompt=f"{seed}.{number}.{dice.random()}", parent_session_id=dice.choice(sessions.split(","))
                )
                try:
                    job_id = runner.submit(request).job_id
                    say(f"submitted {job_id}")
                    if dice.random() < 0.2:
                        runner.cancel(job_id, "by seed")
                    job = runner.await_job(job_id, timeout=30)
                except (errors.SessionBusy, errors.StoreWriteFailed):
                    continue
                if job.terminal:
                    say(f"ended {job_id} {job.status.value}")

        people = [threading.Thread(target=person, args=(number,)) for number in range(THREADS)]
        for each in people:
            each.start()
        process = psutil.Process()
        while not over.wait(0.5):
            say(f"size {process.memory_info().rss} {process.num_fds()} {process.num_threads()}")
        for each in people:
            each.join()
    say("over")


if __name__ == "__main__":
    main(*sys.argv[1:])
