"""`openjobs demo`: the whole of it in a few seconds, on real commands and a real repository."""

from __future__ import annotations

import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from ..jobs import EDGES, Job, JobStatus, SpawnRequest, TurnRequest, TurnResult
from . import exits, live, output, shapes, table
from .options import HOME, command
from .reading import repository_path, session_steps, step_rows
from .state import State
from .text import one_line, plural, short_id

if TYPE_CHECKING:
    from ..runner import JobRunner

SESSION = "demo"
#: fewer than there are jobs, so that some are seen waiting
WORKERS = 3
POLL_S = 0.05
#: far more than it takes; a demo that hangs must say so
PATIENCE_S = 60.0


@attrs.frozen
class _Act:
    description: str
    script: str
    ends: JobStatus = JobStatus.COMPLETED
    #: asked to stop as soon as it runs
    stopped: bool = False


ACTS = (
    _Act("say which system this is", "uname -sr; sleep 0.4"),
    _Act("count to three", "for i in 1 2 3; do echo $i; sleep 0.3; done"),
    _Act("sleep for a minute, but be stopped", "echo going to sleep; sleep 60", JobStatus.CANCELLED, stopped=True),
    _Act("fail on purpose", "sleep 0.3; echo 'no such luck' >&2; exit 3", JobStatus.ERRORED),
    _Act("ask git for its version", "git --version; sleep 0.2"),
)
CHILDREN = (
    _Act("first child: add", "sleep 0.4; echo $((20 + 3))"),
    _Act("second child: multiply", "sleep 0.6; echo $((20 * 3))"),
)


@command("demo")
@click.option(
    "--keep",
    metavar="DIR",
    type=HOME,
    help="Keep what it does in this home.  [default: a new one among the temporary files]",
)
def demo_command(state: State, keep: Path | None) -> int:
    """See it work: run a few commands as jobs and show the commits they left.

    One fails and one is stopped on purpose, one starts two children and waits for them. Exit code 0
    when each job ended as it should and its history is legal. Your own home is not touched
    unless --keep or --home names it.
    """
    from ..host.launcher import Launcher

    state.use_home(keep or state.home_option or Path(tempfile.mkdtemp(prefix="openjobs-demo-")))
    with Launcher() as launcher:
        runner = state.adopt(launcher.open(state.home, workers=WORKERS))
        session_id = state.store.create_session(_free_name(state), title="what openjobs demo did")
        cast = _Cast(runner, session_id)
        _say(state, f"Running {len(ACTS) + 1} jobs and {len(CHILDREN)} children on {WORKERS} workers.\n")
        _perform(state, cast)
        wrong = cast.wrong(state)
        _report(state, cast, wrong)
    return exits.ERRORED if wrong else exits.COMPLETED


class _Cast:
    """The demo's jobs: who they are and how each should end."""

    def __init__(self, runner: JobRunner, session_id: str) -> None:
        self.runner = runner
        self.session_id = session_id
        self.ends: dict[str, JobStatus] = {}
        self.stopped: set[str] = set()

    def submit_all(self) -> None:
        for act in ACTS:
            self._submit(act)
        parent = SpawnRequest(
            prompt="Let two children compute, and add up what they say.",
            description="a parent with two children",
            parent_session_id=self.session_id,
        )
        self._add(self.runner.submit(parent, sync_fn=self._parent), JobStatus.COMPLETED)

    def _submit(self, act: _Act, parent_job_id: str | None = None) -> Job:
        request = SpawnRequest(
            prompt=act.script,
            description=act.description,
            parent_session_id=self.session_id,
            agent_id="shell",
            parent_job_id=parent_job_id,
        )
        job = self.runner.submit(request)
        if act.stopped:
            self.stopped.add(job.job_id)
        return self._add(job, act.ends)

    def _add(self, job: Job, ends: JobStatus) -> Job:
        self.ends[job.job_id] = ends
        return job

    def _parent(self, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        """Runs on a worker, whose slot is lent while it waits for the children."""
        ids = [self._submit(act, request.job_id).job_id for act in CHILDREN]
        done = self.runner.await_tasks(ids, mode="all", timeout=PATIENCE_S)
        request.raise_if_cancelled()
        return TurnResult(final_text=f"the sum is {sum(int(job.result_text or 0) for job in done)}")

    def jobs(self) -> list[Job]:
        return self.runner.list(session_id=self.session_id, limit=None)[::-1]

    def stop_some(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.job_id in self.stopped and job.status is JobStatus.RUNNING:
                self.stopped.discard(job.job_id)
                self.runner.cancel(job.job_id, reason="the demo stops it")

    def done(self, jobs: Sequence[Job]) -> bool:
        return len(jobs) == len(ACTS) + 1 + len(CHILDREN) and all(job.terminal for job in jobs)

    def wrong(self, state: State) -> list[str]:
        """What is not as it should be, in words."""
        found = []
        for job in self.jobs():
            expected = self.ends.get(job.job_id)
            if job.status is not expected:
                found.append(f"job {short_id(job.job_id)} ({one_line(job.subject)}) is {job.status}, not {expected}")
            steps = [step.status for step in state.store.history(job.job_id) if step.kind == "transition"]
            if steps[:1] != [JobStatus.PENDING] or any(to not in EDGES[of] for of, to in pairwise(steps)):
                found.append(f"job {short_id(job.job_id)} went {' → '.join(steps)}")
        return found if self.done(self.jobs()) else ["not every job has ended", *found]


def _free_name(state: State) -> str:
    """`demo`, or `demo-2` and so on in a home that saw one before."""
    number = 1
    while state.store.has_session(name := SESSION if number == 1 else f"{SESSION}-{number}"):
        number += 1
    return name


def _say(state: State, text: str) -> None:
    if not state.json:
        output.line(text)


def _perform(state: State, cast: _Cast) -> None:
    """Submit, show and stop until everything has ended."""
    shown: list[Job] = []
    told: dict[str, str] = {}

    def draw(width: int, height: int) -> list[list[table.Piece]]:
        return table.aligned(shown, state.store.clock.now(), width, live.frame(sys.stdout))

    plain = not state.json and not output.is_live(sys.stdout)
    stage = live.drawing(draw) if not state.json else live.nothing()
    with stage:
        cast.submit_all()
        end = time.monotonic() + PATIENCE_S
        while not cast.done(shown) and time.monotonic() < end:
            shown = cast.jobs()
            cast.stop_some(shown)
            if plain:
                _tell_changes(shown, told)
            time.sleep(POLL_S)


def _tell_changes(jobs: Sequence[Job], told: dict[str, str]) -> None:
    for job in jobs:
        word = table.status_word(job)
        if told.get(job.job_id) != word:
            told[job.job_id] = word
            output.line(f"{short_id(job.job_id)}  {word:<10}  {one_line(job.subject)}")


def _report(state: State, cast: _Cast, wrong: Sequence[str]) -> None:
    steps = session_steps(state, cast.session_id, 0)
    repository = repository_path(state, cast.session_id)
    look = f"git -C {shlex.quote(str(repository))} log --oneline --reverse"
    if state.json:
        output.json_value(_shape(state, cast, wrong, steps, look))
        return
    colour = output.is_terminal(sys.stdout) and table.coloured()
    width = table.terminal_width() if output.is_terminal(sys.stdout) else 1000
    output.line("\nWhat they said:\n")
    for job in cast.jobs():
        said = one_line("; ".join(filter(None, (job.result_text, job.error, job.cancel_reason))))
        output.line(
            table.to_ansi([(short_id(job.job_id), "bold"), (f"  {table.fitted(said, width - 10)}", "")], colour)
        )
    output.line(f"\n{plural(len(steps), 'commit')}, one for each thing that happened:\n")
    output.lines([table.to_ansi(row, colour) for row in step_rows(steps, width)])
    output.line(f"\nLook yourself:\n  {look}")
    output.line(f"  openjobs --home {shlex.quote(str(state.home))} list\n")
    for line in wrong:
        output.note(f"wrong: {line}")
    output.line("Something is not as it should be." if wrong else "Each job ended as it should.")


def _shape(
    state: State, cast: _Cast, wrong: Sequence[str], steps: Sequence[dict[str, Any]], look: str
) -> dict[str, Any]:
    return {
        "ok": not wrong,
        "wrong": list(wrong),
        "home": str(state.home),
        "session_id": cast.session_id,
        "command": look,
        "jobs": shapes.jobs(cast.jobs()),
        "commits": list(steps),
    }
