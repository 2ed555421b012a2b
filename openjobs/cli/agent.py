"""`openjobs agent`: one job from a prompt, waited for or handed over.

A foreground job goes to the home's host when one lives (one pool per home), else a runner of our
own runs it in this process. A background job needs a process that outlives this one: the host.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from ..errors import Closed, HostUnavailable, OpenJobsError, OutcomeUnknown, UnknownJob
from ..ids import check_job_id, check_session_id, new_id
from ..jobs import ContextMode, Job, SpawnRequest
from . import exits, output, shapes
from .interrupts import PAUSE_S, TRIES, goes_on, handing_over, how_to_stop
from .options import AGENT_ID, POSITIVE_SECONDS, SESSION_ID, WORDS, command, is_utf8
from .reading import print_result, status_line, wait_for
from .state import DEFAULT_SESSION, State
from .text import short_id

if TYPE_CHECKING:
    from ..host.client import HostClient
    from ..host.launcher import Launcher

#: how long an interrupted command line waits for its job to end: a command that ignores TERM is killed after 5 s
STOP_S = 10.0


@command("agent")
@click.argument("prompt", type=WORDS)
@click.option("--session", type=SESSION_ID, help="The session it runs on, made if new.  [default: default]")
@click.option("--agent", type=AGENT_ID, default="main", show_default=True, help="The profile that runs it.")
@click.option("--description", "-d", type=WORDS, default="", help="A few words for lists; else the prompt's first.")
@click.option("--background", "-b", is_flag=True, help="Print the job's id and return; the job goes on by itself.")
@click.option("--timeout", type=POSITIVE_SECONDS, help="Stop the job after this time.")
@click.option(
    "--context",
    type=click.Choice([mode.value for mode in ContextMode]),
    default=ContextMode.INHERIT.value,
    show_default=True,
    help="Go on from the session's conversation, or start a clean one.",
)
@click.option(
    "--cwd",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where its commands run.  [default: here]",
)
@click.option(
    "--job-id", metavar="UUID", help="The id it shall have (a UUID): the same command again then returns the same job."
)
def agent_command(state: State, prompt: str, **options: Any) -> int:
    """Run PROMPT as a job and print its result. `-` reads it from standard input.

    The result goes to stdout, how it ended to stderr. Ctrl-C stops the job; a second one leaves at once.
    Started from within a job (OPENJOBS_JOB_ID), it becomes a child of that job.
    """
    if prompt == "-":
        prompt = _from_stdin()
    if not prompt.strip():
        raise click.UsageError("the prompt is empty")
    wanted = _Wanted(prompt=prompt, **options)
    wanted.check(state)
    state.make_home()
    return _in_background(state, wanted) if wanted.background else _in_foreground(state, wanted)


def _from_stdin() -> str:
    try:
        text = sys.stdin.read() if sys.stdin is not None else ""  # closed by the shell: `<&-`
    except UnicodeDecodeError:
        text = "\udcff"
    if not is_utf8(text):
        raise click.UsageError("the prompt on standard input is not UTF-8")
    return text


@attrs.frozen(kw_only=True)
class _Wanted:
    """What the command line asks for."""

    prompt: str
    session: str | None
    agent: str
    description: str
    background: bool
    timeout: float | None
    context: str
    cwd: Path | None
    job_id: str | None

    def check(self, state: State) -> None:
        """Refuse before anything is made: a mistyped agent must not leave a session behind."""
        from ..agents import Profiles

        Profiles(state.home).get(self.agent)
        if self.session is not None:
            check_session_id(self.session)
        if self.job_id is not None:
            check_job_id(self.job_id)

    def request(self, state: State) -> SpawnRequest:
        parent = state.parent_job
        target = self.session or (parent.parent_session_id if parent else DEFAULT_SESSION)
        return SpawnRequest(
            prompt=self.prompt,
            description=self.description,
            parent_session_id=target,
            agent_id=self.agent,
            context_mode=self.context,
            parent_job_id=parent.job_id if parent else None,
            caller_session_id=parent.parent_session_id if parent and parent.parent_session_id != target else None,
            # Made here, not by the runner: an interrupted hand-over can still be cancelled, and tried again.
            job_id=self.job_id or new_id(),
            cwd=(self.cwd or Path.cwd()).absolute(),
            env=dict(os.environ),
            timeout_s=self.timeout,
            # A child's turn must not move the head that its parent's turn is going to move.
            foreground=not self.background and parent is None,
        )


def _in_background(state: State, wanted: _Wanted) -> int:
    from ..host.client import spawn

    request = wanted.request(state)
    job_id = request.job_id
    assert job_id is not None
    try:
        answer = spawn(state.home, request, environ=os.environ, create_session=True)
        with output.telling(goes_on(state, "job", job_id), also_if_gone=True):
            if state.json:
                output.json_value({**answer, "session_id": request.parent_session_id})
            else:
                output.line(job_id)
                output.hint(
                    f"runs in the background; `{state.prog} output {short_id(job_id)} --wait` prints its result"
                )
    except KeyboardInterrupt:
        return handing_over(state, "job", job_id, lambda job_id: state.client.outcome(job_id))
    return exits.COMPLETED


def _in_foreground(state: State, wanted: _Wanted) -> int:
    from ..host.client import connect
    from ..host.launcher import Launcher

    with Launcher() as launcher:
        host = connect(state.home)
        if host is not None:
            launcher.on_close(host.close)
            state.use_host(host)
            request = wanted.request(state)
            turn = _Turn(lambda: _handed_over(state, host, request), state.client.cancel, request)
        else:
            runner = state.adopt(launcher.open(state.home))
            request = wanted.request(state)
            state.make_session(request.parent_session_id)
            turn = _Turn(lambda: runner.submit(request), runner.cancel, request)
        return turn.run(state, launcher)


def _handed_over(state: State, host: HostClient, request: SpawnRequest) -> Job:
    from ..host.client import spawn

    try:
        answer = host.spawn(request, create_session=True)
    except (Closed, HostUnavailable, OutcomeUnknown):
        # It left at this very moment. The job's id is ours, so asking the next one is safe.
        answer = spawn(state.home, request, environ=os.environ, create_session=True)
    return state.client.outcome(answer["job_id"])


@attrs.define
class _Turn:
    """A foreground job: who takes it, and who is asked to stop it."""

    submit: Callable[[], Job]
    cancel: Callable[..., Job]
    request: SpawnRequest

    def run(self, state: State, launcher: Launcher) -> int:
        """A signal's first deed is to ask for the job's end; a second signal waits for that, within a bound."""
        from ..host.launcher import Interrupted

        signalled: KeyboardInterrupt | Interrupted | None = None
        with launcher.owing(lambda: self._too_late(state)):
            try:
                job = wait_for(state, self.submit())
            except (KeyboardInterrupt, Interrupted) as error:
                signalled = error
                asked = self._ask(state, "terminated" if isinstance(error, Interrupted) else "interrupted")
        if signalled is None:
            shown = short_id(job.job_id)
            with output.telling(f"job {shown} {job.status.value}; `{state.prog} output {shown}` prints its result"):
                print_result(state, job)
            return exits.of_job(job)
        if asked is not None:
            self._see_end(state, asked, partial=isinstance(signalled, KeyboardInterrupt))
        if isinstance(signalled, Interrupted):
            raise signalled
        return exits.INTERRUPTED

    @property
    def job_id(self) -> str:
        assert self.request.job_id is not None
        return self.request.job_id

    def _too_late(self, state: State) -> None:
        output.note(
            f"interrupted twice; job {self.job_id} may run, and could not be asked to stop in time;"
            f" {how_to_stop(state, self.job_id)}"
        )

    def _ask(self, state: State, reason: str) -> Job | None:
        """The job as it stands once it was asked to stop; None where it could not be, which is told."""
        clear = output.fresh_line()  # the terminal has written ^C there
        try:
            job = self._cancel(self.job_id, reason)
        except UnknownJob:
            output.note(f"{clear}{reason} before the job was written down; nothing runs")
            return None
        except OpenJobsError as error:
            output.note(
                f"{clear}{reason}, but job {short_id(self.job_id)} could not be asked to stop: {exits.explain(error)}"
                f"\n{how_to_stop(state, self.job_id)}"
            )
            return None
        if job.terminal:
            output.write_to_stderr(clear)
        else:
            output.note(f"{clear}{reason}: stopping job {short_id(self.job_id)} (Ctrl-C again leaves at once)")
        return job

    def _see_end(self, state: State, job: Job, *, partial: bool) -> None:
        if not job.terminal:
            job = _ended(state, job)
        if partial:  # else nobody is there to read it
            _show_partial(state, job)
        if job.terminal:
            output.note(status_line(job))
        else:
            output.note(f"job {short_id(self.job_id)} has not ended yet; it was asked to stop")

    def _cancel(self, job_id: str, reason: str) -> Job:
        """Ask for the end of a job that may be on its way into the store at this very moment."""
        for _ in range(TRIES):
            try:
                return self.cancel(job_id, reason=reason)
            except UnknownJob:
                time.sleep(PAUSE_S)
        return self.cancel(job_id, reason=reason)


def _show_partial(state: State, job: Job) -> None:
    """What it had said until it was interrupted."""
    text = job.result_text if job.terminal else state.partial(job)
    if state.json:
        output.json_value(shapes.job(job) | ({} if job.terminal else {"partial_result": text}))
    elif text:
        output.result(text)


def _ended(state: State, job: Job) -> Job:
    """The job as it is after a bounded wait."""
    return state.await_jobs([job.job_id], "all", STOP_S)[0]
