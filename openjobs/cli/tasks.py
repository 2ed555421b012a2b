"""`openjobs run` and `ps`, and what `show`, `output`, `wait` and `stop` do with the id of a background command."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..clock import to_text
from ..errors import OpenJobsError, UnknownTask
from ..ids import check_session_id, new_id
from . import exits, output, shapes, table
from .damage import Unread
from .interrupts import goes_on, handing_over, how_to_stop
from .options import KEPT_SECONDS, SESSION_ID, WORDS, command, limit_option
from .state import DEFAULT_SESSION, State
from .text import age, duration, one_line, plural

if TYPE_CHECKING:
    from ..host.launcher import Interrupted, Launcher
    from ..processes import ProcessSupervisor, Task
    from ..processes.client import OnDamage

TIMED_OUT_CODE = 124  #: as timeout(1) has it
#: how long an interrupted command line waits for its command to end; one that ignores TERM is killed after 5 s
STOP_S = 10.0
_PAUSE_S = (0.005, 0.05)
_READ_BYTES = 1 << 16
STREAMS = ("stdout", "stderr")
STATUS_STYLE = {
    "running": "cyan",
    "stopping": "yellow",
    "completed": "green",
    "failed": "red",
    "cancelled": "yellow",
    "timed_out": "red",
    "lost": "red",
}


# --- run --------------------------------------------------------------------------------------------------


@command("run", allow_interspersed_args=False)
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED, metavar="CMD...")
@click.option("--session", type=SESSION_ID, help="The session it belongs to, made if new.  [default: default]")
@click.option("--timeout", type=KEPT_SECONDS, help="End it after this time (exit code 124).")
@click.option("--detach", is_flag=True, help="Print the task's id and return; the command goes on by itself.")
@click.option("--description", "-d", type=WORDS, default="", help="A few words for lists; else the command's first.")
def run_command(
    state: State, cmd: tuple[str, ...], session: str | None, timeout: float | None, detach: bool, description: str
) -> int:
    """Run CMD as a background command with a durable trail, and wait for it.

    What it writes is passed on, and kept. The exit code is its own, 124 after --timeout, 128 and the
    number of the signal that ended it. Ctrl-C ends the whole process tree. It reads nothing from here.
    """
    if session is not None:
        check_session_id(session)
    state.make_home()
    wanted = session or (state.parent_job.parent_session_id if state.parent_job else DEFAULT_SESSION)
    check_session_id(wanted)
    if detach:
        return _detached(state, wanted, cmd, timeout, description)
    return _foreground(state, wanted, cmd, timeout, description)


def _detached(state: State, session: str, cmd: Sequence[str], timeout: float | None, description: str) -> int:
    from ..host.client import start_task

    task_id = new_id()
    wanted = {
        "task_id": task_id,
        "session_id": session,
        "command": list(cmd),
        "cwd": str(Path.cwd()),
        "timeout_s": timeout,
        "description": description or None,
        "create_session": True,
    }
    try:
        answer = start_task(state.home, wanted, environ=os.environ)
        with output.telling(goes_on(state, "task", task_id), also_if_gone=True):
            if state.json:
                output.json_value(answer)
            else:
                output.line(task_id)
                output.hint(f"runs in the background; `{state.prog} logs -f {task_id[:8]}` shows what it says")
    except KeyboardInterrupt:
        return handing_over(state, "task", task_id, lambda task_id: state.tasks.get(task_id))
    return exits.COMPLETED


def _foreground(state: State, session: str, cmd: Sequence[str], timeout: float | None, description: str) -> int:
    from ..host.launcher import Launcher
    from ..processes import ProcessSupervisor

    with Launcher() as launcher:
        with launcher.acquiring("supervisor") as pending:
            state.make_session(session)
            supervisor = ProcessSupervisor(state.store)
            pending.ready(supervisor.close)
        with _Spill() as spill:
            run = _Run(state, launcher, supervisor, spill)
            return run.seen_through(session, cmd, timeout, description)


class _Run:
    """A command in the foreground. However a signal comes, once it is started it is asked to stop."""

    def __init__(self, state: State, launcher: Launcher, supervisor: ProcessSupervisor, spill: _Spill) -> None:
        self._state = state
        self._launcher = launcher
        self._supervisor = supervisor
        self._spill = spill
        self._task_id = new_id()  # made here: a start that was interrupted is still known by it
        self._settled = False

    def seen_through(self, session: str, cmd: Sequence[str], timeout: float | None, description: str) -> int:
        from ..host.launcher import Interrupted

        gone: KeyboardInterrupt | Interrupted | output.Unwritten | None = None
        with self._launcher.owing(self._too_late):
            try:
                # 1. A signal waits until the start is whole. 2. The command is then the launcher's to end, too.
                with self._launcher.acquiring("command") as pending:
                    task = self._started(session, cmd, timeout, description)
                    pending.ready(self._abandoned)
                task = _passed_on(self._state, self._launcher, self._supervisor, task, self._spill)
                self._settled = True
            except (KeyboardInterrupt, Interrupted, output.Unwritten) as error:
                gone = error
                reason = _reason(error)
                with self._launcher.held():
                    asked = self._ask(reason)
        if gone is not None:
            if asked is not None:
                self._see_end(asked, reason)
            if isinstance(gone, KeyboardInterrupt):
                return exits.INTERRUPTED
            raise gone
        if self._spill.passed_bytes:
            output.note(f"{self._spill.passed_bytes:,} bytes of its output could only be passed on: they are not kept")
        try:
            with self._launcher.held():
                self._supervisor.client.consume(task)
        except (OpenJobsError, OSError) as error:
            _say_unmarked(error)
        if task.event_id is None:
            output.note(
                "its end cannot be written down now; it is recorded when the disk takes writes again, else as lost"
            )
        return _told(self._state, task)

    def _started(self, session: str, cmd: Sequence[str], timeout: float | None, description: str) -> Task:
        parent = self._state.parent_job
        task = self._supervisor.start(
            session,
            list(cmd),
            cwd=Path.cwd(),
            timeout_s=timeout,
            description=description,
            task_id=self._task_id,
            job_id=parent.job_id if parent else None,
            spill=self._spill.ends,
        )
        self._spill.started()
        return task

    def _too_late(self) -> None:
        output.note(
            f"interrupted twice; task {self._task_id} may run, and could not be asked to stop in time;"
            f" {how_to_stop(self._state, self._task_id)}"
        )

    def _abandoned(self) -> None:
        """A signal, and the main thread hangs: nobody else asks."""
        if not self._settled and self._launcher.reason is not None:
            self._supervisor.stop(self._task_id, "its terminal or its reader went away")

    def _ask(self, reason: str) -> Task | None:
        """The task as it stands once it was asked to stop; None where it could not be, which is told."""
        clear = output.fresh_line()
        try:
            task = self._supervisor.stop(self._task_id, reason)
        except UnknownTask:
            output.note(f"{clear}{reason} before the command was started; nothing runs")
        except OpenJobsError as error:
            output.note(
                f"{clear}{reason}, but task {self._task_id} could not be asked to stop: {exits.explain(error)}"
                f"\n{how_to_stop(self._state, self._task_id)}"
            )
        else:
            self._settled = True
            output.write_to_stderr(clear)
            return task
        return None

    def _see_end(self, task: Task, reason: str) -> None:
        supervisor = self._supervisor
        deadline = time.monotonic() + STOP_S
        try:
            while not task.terminal and time.monotonic() < deadline:
                task = supervisor.unrecorded_end(task.task_id) or supervisor.wait(task.task_id, _PAUSE_S[1])
        except OpenJobsError as error:
            output.note(f"{reason}; what became of task {self._task_id} is not known: {exits.explain(error)}")
            return
        if task.terminal:
            output.note(status_line(task))
        else:
            output.note(f"{reason}; task {self._task_id} was asked to stop and has not ended yet")


def _reason(error: KeyboardInterrupt | Interrupted | output.Unwritten) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, output.StdoutFailed) else "its terminal or its reader went away"


class _Spill:
    """Two pipes on which the keeper passes on what the disk has no room for, so that it is seen all the same."""

    def __init__(self) -> None:
        pipes = {name: os.pipe() for name in STREAMS}
        self._readers = {name: pipe[0] for name, pipe in pipes.items()}
        self.ends = (pipes["stdout"][1], pipes["stderr"][1])
        self._ends_open = True
        self.passed_bytes = 0
        for fd in self._readers.values():
            os.set_blocking(fd, False)

    def started(self) -> None:
        """The keeper has its own copies; when it closes them, that is all."""
        if self._ends_open:
            self._ends_open = False
            for fd in self.ends:
                os.close(fd)

    def read(self, name: str) -> bytes | None:
        """What is there now; None when nothing will come any more."""
        fd = self._readers.get(name)
        if fd is None:
            return None
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            os.close(self._readers.pop(name))
            return None
        self.passed_bytes += len(data)
        return data

    @property
    def over(self) -> bool:
        return not self._readers

    def __enter__(self) -> _Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self.started()
        for name in list(self._readers):
            os.close(self._readers.pop(name))


def _passed_on(state: State, launcher: Launcher, supervisor: ProcessSupervisor, task: Task, spill: _Spill) -> Task:
    """Copy both streams as they come, until the end: what is kept, and behind it what no disk takes.

    A signal is raised between the steps; only a write, which may take for ever, is left in its middle.
    """
    writers = {"stdout": output.bytes_to_stdout, "stderr": output.bytes_to_stderr}
    offsets = dict.fromkeys(STREAMS, 0)
    pause, longest = _PAUSE_S
    while True:
        # The order matters: what is read after the end is all there is.
        with launcher.held():
            task = supervisor.wait(task.task_id, pause if state.json else 0)
            ended = task if task.terminal else supervisor.unrecorded_end(task.task_id)
        moved = False
        for name, write in writers.items():
            with launcher.held():
                spilt = spill.read(name)  # before the file is: what is kept comes first
            while not state.json:
                with launcher.held():
                    data = supervisor.client.output(task, name, offsets[name], _READ_BYTES).data
                if not data:
                    break
                offsets[name] += len(data)
                moved = True
                write(data)
            if spilt:
                moved = True
                if not state.json:
                    write(spilt)
        if ended is not None and not moved and spill.over:
            return ended
        if not moved:
            with launcher.held():
                task = supervisor.wait(task.task_id, pause)
        pause = _PAUSE_S[0] if moved else min(pause * 1.5, longest)


def _told(state: State, task: Task) -> int:
    if state.json:
        with output.telling(f"task {task.task_id} has ended as {word_of(task)}"):
            output.json_value(shapes.task(task))
    elif task.status.value in ("timed_out", "cancelled", "lost") or task.error or task.truncated:
        output.note(status_line(task))
    return code_of(task)


def code_of(task: Task) -> int:
    """What `run` exits with: the command's own code, 124 after a timeout, 128 + n after a signal."""
    if task.status.value == "timed_out":
        return TIMED_OUT_CODE
    if task.signal is not None:
        return 128 + task.signal
    return task.exit_code if task.exit_code is not None else exits.ERRORED


def exit_of(task: Task) -> int:
    """What `wait` and `output` exit with: as for jobs."""
    ended = {"completed": exits.COMPLETED, "cancelled": exits.CANCELLED, "running": exits.TIMED_OUT}
    return ended.get(task.status.value, exits.ERRORED)


# --- ps ---------------------------------------------------------------------------------------------------


@command("ps")
@click.option("--all", "-a", "all_", is_flag=True, help="Those that have ended, too.")
@click.option("--session", type=SESSION_ID, help="Only commands of this session.")
@limit_option("At most so many; 0 means all.")
def ps_command(state: State, all_: bool, session: str | None, limit: int) -> int:
    """List background commands that run, newest first.

    On a terminal a table; in a pipe one line each, separated by tabs: id, status, start (UTC), seconds
    it ran, exit (code, or name of a signal), session, command.
    """
    unread = Unread()
    found = _listed(state, all_, session, unread)
    tasks = list(islice(found, limit + 1 if limit else None))
    more = bool(limit) and len(tasks) > limit
    tasks = tasks[:limit] if limit else tasks
    if state.json:
        output.json_value({"tasks": [shapes.task(task) for task in tasks], "more": more})
    else:
        tell(tasks, heading=True)
        _say_more(tasks, more, all_)
    return unread.say()


def _say_more(tasks: Sequence[Task], more: bool, all_: bool) -> None:
    if not tasks and output.is_terminal(sys.stdout):
        output.hint("nothing runs" if not all_ else "no background commands yet; `openjobs run -- CMD` runs one")
    elif more and output.is_terminal(sys.stdout):
        output.hint(f"the newest {len(tasks):,}; `--limit 0` shows all")


def _listed(state: State, all_: bool, session: str | None, on_damage: OnDamage) -> Iterator[Task]:
    if session is not None:
        state.store.session(session)  # says which there are where this one is not
        found = iter(state.tasks.list(session))
    elif all_:
        found = state.tasks.newest_first(on_damage)
    else:
        found = iter(state.tasks.running(on_damage))
    return (task for task in found if all_ or not task.terminal)


def tell(tasks: Sequence[Task], *, heading: bool = False) -> None:
    """One line each: whole and tab-separated in a pipe, aligned on a terminal."""
    if not tasks:
        return
    if not output.is_terminal(sys.stdout):
        output.lines([plain(task) for task in tasks])
        return
    now = datetime.now(tasks[0].created_at.tzinfo)
    shorten = table.short_ids(task.task_id for task in tasks)
    rows: list[tuple[str, ...]] = [("ID", "STATUS", "AGE", "TOOK", "EXIT", "COMMAND")] if heading else []
    rows += [
        (shorten(t.task_id), word_of(t), age(t.created_at, now), _took(t, now), exit_word(t), subject(t)) for t in tasks
    ]
    width = table.terminal_width()
    if width < table.NARROW:  # as `list` does: times make room for the command
        rows = [(*row[:2], *row[4:]) for row in rows]
    widths = [max(table.cells(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    room = max(10, width - sum(widths) - 2 * len(widths))
    colour = table.coloured()
    for row in rows:
        style = STATUS_STYLE.get(row[1], "dim")
        pieces = [
            (table.fitted(row[index], width) + "  ", style if index == 1 or (row is rows[0] and heading) else "")
            for index, width in enumerate(widths)
        ]
        pieces.append((table.fitted(row[-1], room).rstrip(), ""))
        output.line(table.to_ansi(table.clipped(pieces, width), colour))


def plain(task: Task) -> str:
    took = seconds_taken(task, None)
    return "\t".join(
        (
            task.task_id,
            word_of(task),
            to_text(task.created_at),
            "-" if took is None else f"{took:.3f}",
            exit_word(task),
            task.session_id,
            subject(task),
        )
    )


def word_of(task: Task) -> str:
    """As people read it: a running one that was asked to stop is `stopping`."""
    if not task.terminal and task.stop_requested_at is not None:
        return "stopping"
    return task.status.value


def exit_word(task: Task) -> str:
    if task.signal is not None:
        try:
            return signal.Signals(task.signal).name
        except ValueError:
            return f"signal {task.signal}"
    return "-" if task.exit_code is None else str(task.exit_code)


def subject(task: Task) -> str:
    return one_line(task.description or command_text(task), 500)


def command_text(task: Task) -> str:
    import shlex

    return task.command if isinstance(task.command, str) else shlex.join(task.command)


def seconds_taken(task: Task, now: datetime | None) -> float | None:
    end = task.ended_at or now
    return (end - task.started_at).total_seconds() if task.started_at and end else None


def _took(task: Task, now: datetime) -> str:
    seconds = seconds_taken(task, now)
    return "-" if seconds is None else duration(seconds)


def status_line(task: Task) -> str:
    """`task 1a2b3c4d failed (exit 3) in 3.2s`, with what went wrong."""
    took = seconds_taken(task, None)
    how = f" ({exit_word(task)})" if task.terminal and exit_word(task) != "-" else ""
    spent = f" in {duration(took)}" if took is not None else ""
    why = task.error or (task.stop_reason if task.terminal else "") or ""
    if task.truncated and "cut" not in why:
        kept = task.stdout_bytes + task.stderr_bytes
        why = f"{why}; " if why else ""
        why += f"its output was cut at {kept:,} of {task.seen_bytes:,} bytes"
    colour = output.is_terminal(sys.stderr) and table.coloured()
    word = word_of(task)
    return table.to_ansi(
        [
            ("task ", ""),
            (task.task_id[:8], "bold"),
            (" " if task.terminal else " is ", ""),
            (word, STATUS_STYLE[word]),
            (how + spent + (f": {one_line(why, 500)}" if why else ""), ""),
        ],
        colour,
    )


# --- what the commands for jobs do with a task's id --------------------------------------------------------


def show(state: State, task_id: str) -> int:
    task = state.tasks.get(task_id)
    leftovers = _leftovers(state, task)
    if state.json:
        output.json_value(shapes.task(task) | {"leftovers": leftovers})
        return exits.COMPLETED
    colour = output.is_terminal(sys.stdout) and table.coloured()
    for name, text, style in _facts(task, leftovers):
        output.line(table.to_ansi([(f"{name:<11}", "dim"), (text, style)], colour))
    return exits.COMPLETED


def _facts(task: Task, leftovers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    word = word_of(task)
    yield "task", task.task_id, "bold"
    yield "command", one_line(command_text(task), 2000), ""
    if task.description:
        yield "subject", one_line(task.description), ""
    yield "status", word, STATUS_STYLE[word]
    if task.terminal:
        yield "exit", exit_word(task), ""
        yield "ended by", one_line(task.stopped_by or ""), ""
    if task.error:
        yield "error", one_line(task.error, 2000), ""
    if task.stop_requested_at is not None:
        yield (
            "stop asked",
            to_text(task.stop_requested_at) + (f": {one_line(task.stop_reason)}" if task.stop_reason else ""),
            "",
        )
    yield "session", task.session_id, ""
    if task.job_id:
        yield "job", task.job_id, ""
    yield "directory", one_line(task.cwd), ""
    if task.pid is not None:
        yield "process", str(task.pid), ""
    for name, when in (("created", task.created_at), ("started", task.started_at), ("ended", task.ended_at)):
        if when is not None:
            yield name, to_text(when), ""
    yield "output", f"{task.stdout_bytes:,} + {task.stderr_bytes:,} bytes", ""
    if task.truncated:
        yield "cut", f"{task.seen_bytes:,} bytes were written", "yellow"
    if leftovers:
        names = ", ".join(f"{one_line(str(one.get('name')))} ({one.get('pid')})" for one in leftovers)
        yield "left over", names, "red"
    if task.terminal:
        yield "seen", "yes" if task.consumed else "no", ""


def _leftovers(state: State, task: Task) -> list[dict[str, Any]]:
    """Who of its tree could not be ended: known to the keeper only after the end is recorded."""
    from ..processes import read_exit

    try:
        record = read_exit(state.tasks.run_dir(task))
    except OpenJobsError:
        record = None
    found = task.leftovers or (record.leftovers if record is not None else None) or ()
    return [dict(one) for one in found]


def print_output(state: State, task_id: str, wait: bool, timeout: float | None) -> int:
    task = state.tasks.get(task_id)
    if wait and not task.terminal:
        task = wait_for(state, [task.task_id], False, timeout, quiet=True)[0]
    if state.json:
        found = state.tasks.output(task, limit=1 << 24)
        output.json_value(shapes.task(task) | {"output": found.data.decode("utf-8", "replace")})
    else:
        _copy_output(state, task)
        output.note(status_line(task))
    try:
        state.tasks.consume(task)
    except (OpenJobsError, OSError) as error:
        _say_unmarked(error)
    if not task.terminal:
        output.hint(f"`{state.prog} output {task.task_id[:8]} --wait` waits for the end")
    return exit_of(task)


def _say_unmarked(error: Exception) -> None:
    output.note(f"that its end was seen could not be written down: {exits.explain(error)}")


def _copy_output(state: State, task: Task) -> None:
    show = output.Shown(raw=not output.is_terminal(sys.stdout))
    offset = 0
    while (piece := state.tasks.output(task, offset=offset, limit=1 << 20)).data:
        show.take(piece.data)
        offset = piece.next_offset
    show.end()


def wait_for(state: State, ids: Sequence[str], any_: bool, timeout: float | None, *, quiet: bool = False) -> list[Task]:
    """The tasks in the order given, ended or as they stand after the time; each is told as it ends."""
    started = time.monotonic()
    latest = {task_id: state.tasks.get(task_id) for task_id in ids}
    told: set[str] = set()
    while True:
        ended = [task for task in latest.values() if task.terminal and task.task_id not in told]
        if not quiet and not state.json:
            tell(ended)
        told |= {task.task_id for task in ended}
        left = [task_id for task_id in ids if task_id not in told]
        over = timeout is not None and time.monotonic() - started >= timeout
        if not left or (any_ and told) or over:
            return [latest[task_id] for task_id in ids]
        with _waiting([latest[task_id] for task_id in left], started):
            latest |= _next_end(state, left, None if timeout is None else started + timeout)


def _next_end(state: State, left: Sequence[str], deadline: float | None) -> dict[str, Task]:
    pause = 0.01
    while True:
        found = {task_id: state.tasks.get(task_id) for task_id in left}
        if any(task.terminal for task in found.values()) or (deadline is not None and time.monotonic() >= deadline):
            return found
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _waiting(left: Sequence[Task], started: float) -> AbstractContextManager[None]:
    from .live import spinner

    what = subject(left[0]) if len(left) == 1 else plural(len(left), "command")
    return spinner(lambda: f"waiting {duration(time.monotonic() - started)} for {what}")


def stop(state: State, task_id: str, reason: str | None) -> Task:
    """Ask its owner; where that is gone, end it ourselves."""
    task = state.tasks.get(task_id)
    if task.terminal:
        return task
    if not state.tasks.is_orphan(task):
        return state.tasks.request_stop(task_id, reason)
    from ..processes import ProcessSupervisor

    with ProcessSupervisor(state.store) as supervisor:
        supervisor.stop(task_id, reason)
        return supervisor.wait(task_id, STOP_S)
