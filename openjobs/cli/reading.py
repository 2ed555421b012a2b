"""`openjobs show`, `output`, `history` and `sessions`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..clock import from_text, to_text
from ..errors import OpenJobsError, UnknownSession
from ..jobs import Job
from . import exits, output, shapes, table
from .damage import Unread
from .options import JOB_ID, SECONDS, SESSION_ID, command, limit_option
from .state import DEFAULT_SESSION, LONGEST_WAIT_S, State
from .text import age, duration, one_line, short_id, to_json, visible

if TYPE_CHECKING:
    from ..repo import CommitInfo

#: so much of a prompt or result is shown on a terminal by `show`; `output` has all
SHOWN_LINES = 20


@command("show")
@click.argument("id", type=JOB_ID, metavar="ID")
def show_command(state: State, id: str) -> int:  # noqa: A002  # click's name for the argument
    """Show everything about one job, or one background command."""
    task_id = state.task_id(id)
    if task_id is not None:
        from . import tasks

        return tasks.show(state, task_id)
    job = state.client.get(state.resolve(id))
    unread = Unread()
    children = state.store.children(job.job_id, unread)
    partial = state.partial(job)
    if state.json:
        output.json_value(shapes.job(job) | {"children": children, "partial_result": partial})
        return unread.say()
    on_terminal = output.is_terminal(sys.stdout)
    colour = on_terminal and table.coloured()
    for name, pieces in _facts(job, children, state.store.clock.now(), on_terminal):
        output.line(table.to_ansi([(f"{name:<11}", "dim"), *pieces], colour))
    more = f"`{state.prog} output {short_id(job.job_id)}` prints all" if on_terminal else None
    texts = (("prompt", job.description), ("error", job.error), ("result", job.result_text), ("so far", partial))
    for name, text in texts:
        if text:
            output.line(table.to_ansi([(name, "dim")], colour))
            output.lines(_indented(text, more))
    return unread.say()


def _facts(job: Job, children: list[str], now: datetime, local: bool) -> Iterator[tuple[str, list[table.Piece]]]:
    """Name and value, in the order in which they are asked for; what a job does not have is left out."""
    word = table.status_word(job)
    took = table.seconds_taken(job, now)
    yield "job", [(one_line(job.job_id), "bold")]
    yield "subject", [(one_line(job.subject), "")]
    spent = "" if took is None else f" {'in' if job.terminal else 'for'} {duration(took)}"
    yield "status", [(word, table.STATUS_STYLE[word]), (spent, "")]
    if job.cancel_requested_at is not None:
        reason = f": {one_line(job.cancel_reason)}" if job.cancel_reason else ""
        yield "stop asked", [(_time(job.cancel_requested_at, now, local) + reason, "")]
    yield "agent", [(one_line(job.agent_id), "")]
    yield "session", [(one_line(job.parent_session_id), "")]
    if job.caller_session_id:
        yield "asked from", [(one_line(job.caller_session_id), "")]
    if job.parent_job_id:
        yield "parent job", [(one_line(job.parent_job_id), "")]
    if children:
        yield "children", [(" ".join(short_id(child) for child in children[:20]), "")]
    yield "created", [(_time(job.created_at, now, local), "")]
    for name, when in (("queued", job.queued_at), ("started", job.started_at), ("ended", job.completed_at)):
        if when is not None:
            yield name, [(f"{_time(when, now, local)}", "")]
    yield "context", [(f"{job.context_mode.value} {one_line(job.parent_msg_id or '')}".rstrip(), "")]
    for name, value in (("head", job.head_id), ("runner", job.runner_id), ("run", job.run_id)):
        if value:
            yield name, [(one_line(value), "")]
    if job.timeout_s is not None:
        yield "timeout", [(duration(job.timeout_s), "")]
    for name, mapping in (("usage", job.usage), ("metadata", job.metadata)):
        if mapping:
            yield name, [(to_json(dict(mapping)), "")]


def _time(when: datetime, now: datetime, local: bool) -> str:
    """For a person the time on their clock and how long ago; in a pipe as it is stored."""
    if not local:
        return to_text(when)
    text = when.astimezone().strftime("%Y-%m-%d %H:%M:%S") + f".{when.microsecond // 1000:03d}"
    ago = age(when, now)
    return f"{text} ({ago if ago == 'now' else ago + ' ago'})"


def _indented(text: str, more: str | None) -> list[str]:
    lines = visible(text).rstrip("\n").split("\n")
    if more is not None and len(lines) > SHOWN_LINES:
        lines = [*lines[:SHOWN_LINES], f"… {len(lines) - SHOWN_LINES} more lines; {more}"]
    return [f"  {line}" if line else "" for line in lines]


@command("output")
@click.argument("id", type=JOB_ID, metavar="ID")
@click.option("--wait", is_flag=True, help="Wait until the job has ended.")
@click.option("--timeout", type=SECONDS, help="With --wait: give up after this time (exit code 4).")
def output_command(state: State, id: str, wait: bool, timeout: float | None) -> int:  # noqa: A002
    """Print the result of one job, or what a background command wrote.

    Nothing else goes to stdout. In a pipe the text is printed as it is, on a terminal with control
    characters shown. Of a job that was cancelled or errored, or that still runs, what it said so far is
    printed. The exit code is the job's: 0 completed, 1 errored, 5 cancelled, 4 not ended yet.
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait")
    task_id = state.task_id(id)
    if task_id is not None:
        from . import tasks

        return tasks.print_output(state, task_id, wait, timeout)
    job_id = state.resolve(id)
    job = state.client.outcome(job_id)
    if wait and not job.terminal:
        job = wait_for(state, job, timeout)
    print_result(state, job)
    if not job.terminal:
        output.hint(f"`{state.prog} output {short_id(job_id)} --wait` waits for the end")
    return exits.of_job(job)


def wait_for(state: State, job: Job, timeout: float | None = None) -> Job:
    """The job when it has ended or the time is up, with a spinner in the meantime."""
    from .live import spinner

    started = time.monotonic()

    def words() -> str:
        waited = duration(time.monotonic() - started)
        return f"{table.status_word(job)} {waited} · {short_id(job.job_id)} · {one_line(job.subject)}"

    with spinner(words):
        end = None if timeout is None else started + timeout
        while not job.terminal:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                break
            # In slices, so that the spinner tells queued from running.
            piece = (None if left is None else min(left, LONGEST_WAIT_S)) if state.nested else min(1.0, left or 1.0)
            job = state.await_jobs([job.job_id], "all", piece)[0]
    return job


def print_result(state: State, job: Job) -> None:
    """The text to stdout, how it came about to stderr."""
    text = state.partial(job) if not job.terminal else job.result_text
    if state.json:
        output.json_value(shapes.job(job) | ({} if job.terminal else {"partial_result": text}))
        return
    if text:
        output.result(text)
    output.note(status_line(job))


def status_line(job: Job) -> str:
    """`job 1a2b3c4d completed in 3.2s`, with what went wrong."""
    word = table.status_word(job)
    took = table.seconds_taken(job, None)
    spent = f" in {duration(took)}" if took is not None else ""
    why = ""
    if job.error:
        why = f": {one_line(job.error, 500)}"
    elif job.terminal and job.cancel_reason:
        why = f": {one_line(job.cancel_reason, 500)}"
    colour = output.is_terminal(sys.stderr) and table.coloured()
    verb = "is " if not job.terminal else ""
    return table.to_ansi(
        [
            ("job ", ""),
            (short_id(job.job_id), "bold"),
            (f" {verb}", ""),
            (word, table.STATUS_STYLE[word]),
            (spent + why, ""),
        ],
        colour,
    )


@command("history")
@click.argument("id", type=JOB_ID, metavar="[ID]", required=False)
@click.option("--session", type=SESSION_ID, help="The commits of this session instead of one job's.")
@limit_option("At most so many of a session's newest commits; 0 means all.")
def history_command(state: State, id: str | None, session: str | None, limit: int) -> int:  # noqa: A002
    """Show the commits of one job or session, oldest first.

    Without ID: those of the session given by --session, else of the session `default`, else of the only one.
    """
    if id is not None and session is not None:
        raise click.UsageError("give either a job's ID or --session")
    if id is not None:
        steps = _job_steps(state, state.resolve(id))
    else:
        steps = session_steps(state, session or _only_session(state), limit)
    if state.json:
        output.json_value({"commits": steps})
    elif output.is_terminal(sys.stdout):
        output.lines([table.to_ansi(row, table.coloured()) for row in step_rows(steps, table.terminal_width())])
    else:
        output.lines(["\t".join(one_line(str(step[key] or "-")) for key in STEP_KEYS) for step in steps])
    return exits.COMPLETED


def _only_session(state: State) -> str:
    """`default`, else the only one there is. Raises `UnknownSession`, with those there are."""
    if state.store.has_session(DEFAULT_SESSION):
        return DEFAULT_SESSION
    names = state.store.sessions()
    if len(names) == 1:
        return names[0]
    if not names:
        raise UnknownSession("there is no session yet; the first `openjobs agent` makes one", candidates=())
    newest = sorted(names, key=lambda name: _changed_at(state, name), reverse=True)
    raise UnknownSession(f"there is no session {DEFAULT_SESSION!r}; name one with --session", candidates=newest)


STEP_KEYS = ("commit_id", "time", "kind", "status", "job_id", "subject")


def _step(commit: CommitInfo) -> dict[str, Any]:
    return {
        "commit_id": commit.commit_id,
        "time": to_text(commit.time),
        "kind": commit.trailer("Openjobs-Kind"),
        "status": commit.trailer("Openjobs-Status"),
        "job_id": commit.trailer("Openjobs-Job"),
        "runner_id": commit.trailer("Openjobs-Runner"),
        "subject": commit.subject,
    }


def _job_steps(state: State, job_id: str) -> list[dict[str, Any]]:
    return [
        {
            "commit_id": one.commit_id,
            "time": to_text(one.time),
            "kind": one.kind,
            "status": one.status.value,
            "job_id": job_id,
            "runner_id": one.runner_id,
            "subject": one.subject,
        }
        for one in state.store.history(job_id)
    ]


def session_steps(state: State, session_id: str, limit: int) -> list[dict[str, Any]]:
    """The newest commits of a session, oldest first, whoever made them."""
    state.store.session(session_id)  # says which sessions there are where this one is not
    newest = islice(state.store.repository(session_id).log(), limit or None)
    return [_step(commit) for commit in newest][::-1]


def step_rows(steps: Sequence[dict[str, Any]], width: int) -> list[list[table.Piece]]:
    """Commit, time and subject for a terminal; a transition's subject names job and states already."""
    rows: list[list[table.Piece]] = []
    times = [from_text(step["time"]).astimezone() for step in steps]
    today = len({when.date() for when in times} | {datetime.now().astimezone().date()}) == 1
    for step, when in zip(steps, times, strict=True):
        # Git keeps whole seconds.
        stamp = when.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")
        style = table.STATUS_STYLE.get(step["status"] or "", "") if step["kind"] == "transition" else "dim"
        room = max(10, width - 7 - 2 - len(stamp) - 2)
        rows.append(
            [
                (step["commit_id"][:7], "yellow"),
                ("  ", ""),
                (stamp, "dim"),
                ("  ", ""),
                (table.fitted(one_line(step["subject"]), room).rstrip(), style),
            ]
        )
    return [table.clipped(row, width) for row in rows]


@command("sessions")
@limit_option("At most so many; 0 means all.")
def sessions_command(state: State, limit: int) -> int:
    """List sessions, the one used last first.

    Each with its title, the number of its unfinished jobs, when its repository last changed, and where it is.
    """
    newest = sorted(((_changed_at(state, one), one) for one in state.every_session()), reverse=True)
    shown = [_session(state, one, changed) for changed, one in newest[: limit or None]]
    if state.json:
        output.json_value({"sessions": shown, "more": len(shown) < len(newest)})
        return exits.COMPLETED
    if not output.is_terminal(sys.stdout):
        output.lines(["\t".join(one_line(str(one[key])) for key in SESSION_KEYS) for one in shown])
        return exits.COMPLETED
    output.lines([table.to_ansi(row, table.coloured()) for row in _session_rows(shown, state.store.clock.now())])
    if not shown:
        output.hint("no sessions yet; the first `openjobs agent` makes one")
    elif len(shown) < len(newest):
        output.hint(f"{len(shown):,} of {len(newest):,}; `--limit 0` shows all")
    return exits.COMPLETED


SESSION_KEYS = ("session_id", "unfinished", "changed_at", "title", "repository")


def repository_path(state: State, session_id: str) -> Path:
    return state.home / "sessions" / session_id / "repo"


def _changed_at(state: State, session_id: str) -> float:
    """When its branch last moved: one look at one file, since there may be 10,000 sessions."""
    git = repository_path(state, session_id) / ".git"
    for path in (git / "logs" / "HEAD", git / "refs" / "heads" / "main", git):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def _session(state: State, session_id: str, changed: float) -> dict[str, Any]:
    """One session; `error` instead of what its documents say where they cannot be read."""
    told: dict[str, Any] = {
        "session_id": session_id,
        "title": "",
        "unfinished": None,
        "changed_at": to_text(datetime.fromtimestamp(changed, UTC)),
        "repository": str(repository_path(state, session_id)),
        "error": None,
    }
    try:
        told["title"] = state.store.session(session_id).title
        told["unfinished"] = len(state.store.unfinished(session_id))
    except OpenJobsError as error:
        told["error"] = str(error)
    return told


def _session_rows(shown: Sequence[dict[str, Any]], now: datetime) -> list[list[table.Piece]]:
    width = table.terminal_width()
    widest = min(max([7, *(len(one["session_id"]) for one in shown)]), max(7, width - 23 - 10), 40)
    room = max(10, width - widest - 2 - 10 - 2 - 7 - 2)
    rows: list[list[table.Piece]] = []
    if shown:
        rows.append([(f"{'SESSION':<{widest}}  UNFINISHED  CHANGED  TITLE", "dim")])
    for one in shown:
        said = one["error"] or one["title"]
        count = "?" if one["unfinished"] is None else f"{one['unfinished']:,}"
        rows.append(
            [
                (table.fitted(one["session_id"], widest), "bold"),
                (f"  {count:>10}", "cyan" if one["unfinished"] else ""),
                (f"  {age(from_text(one['changed_at']), now):>7}  ", ""),
                (table.fitted(one_line(said), room).rstrip(), "red" if one["error"] else ""),
            ]
        )
    return [table.clipped(row, width) for row in rows]
