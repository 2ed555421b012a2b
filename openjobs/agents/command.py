"""Running a command template as a job's turn.

The command runs under a keeper (`openjobs.processes`), so its whole tree ends with a cancel, a
timeout or an error here, and what it writes is bounded. Its text is what it wrote on standard
output; an exit code other than 0, a signal or a timeout makes the job errored with the end of its
standard error.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ..durable import Disk
from ..errors import CancelledError, InvalidInput
from ..ids import check_session_id, new_id, short
from ..jobs import TurnRequest, TurnResult
from ..processes import layout
from ..processes.command import CommandEnd, run_command
from ..processes.identity import Identity
from ..processes.template import Template
from .joblog import JobLog, JobLogs
from .leftovers import run_directory
from .streams import STREAMS, EventStream
from .templates import CommandTemplate

#: the end of standard output that becomes the job's text
RESULT_LIMIT_BYTES = 1 << 20
#: the end of standard output that is shown while the command runs
PARTIAL_LIMIT_BYTES = 1 << 16
#: the end of standard error in the job's error
ERROR_LIMIT_CHARS = 2000
#: one argument may be this long on Linux (MAX_ARG_STRLEN, execve(2)); elsewhere the sum is what counts
ARGUMENT_LIMIT_BYTES = (1 << 17) - 1

#: never taken over from an environment: they say of which job or task a process is part
_MARKS = frozenset({"OPENJOBS_JOB_ID", "OPENJOBS_SESSION_ID", "OPENJOBS_TASK_ID", "OPENJOBS_RUN_ID"})
#: `$1` is the file, the rest the command: the shell only opens the file and becomes the command
_WITH_STDIN = ("/bin/sh", "-c", 'file=$1; shift; exec "$@" < "$file"', "sh")


class CommandProfile:
    """A `SyncFn` that runs one template. Any number of jobs may run it at the same time."""

    def __init__(
        self,
        template: CommandTemplate,
        home: Path | None,
        environ: Mapping[str, str] | None,
        keepers: Callable[[], Template],
        run_logs: JobLogs,
        disk: Disk,
    ) -> None:
        self._template = template
        self._home = home
        self._environ = environ
        self._keepers = keepers
        self._run_logs = run_logs
        self._disk = disk

    def __call__(self, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        template = self._template
        arguments = template.arguments(
            prompt=request.prompt,
            job_id=request.job_id,
            session_id=request.session_id,
            home="" if self._home is None else str(self._home),
        )
        _check(arguments, template)
        env = self._env(request)
        cwd = self._directory(request)
        with _RunDirectory(self._home, request) as run_dir:
            if template.stdin == "prompt":
                _check_found(arguments[0], env, cwd)
                arguments = [*_WITH_STDIN, str(_written(run_dir / "prompt", request.prompt)), *arguments]
            events = STREAMS[template.output]() if template.output != "text" else None
            said = _Said(request, self._log(request, run_dir), events)
            try:
                end = run_command(
                    arguments,
                    run_dir=run_dir,
                    cwd=cwd,
                    env=env,
                    task_id=run_dir.name,
                    cancel_event=cancel_event,
                    timeout_s=template.timeout_s,
                    on_limit="drop",
                    on_started=said.begin,
                    on_output=said.take,
                    tail_bytes=RESULT_LIMIT_BYTES,
                    template=self._keepers(),
                    disk=self._disk,
                )
            finally:
                said.close()
        if events is None:
            result = TurnResult(
                final_text=_text(end, None if self._home is None else request.job_id), error=_error(end, template)
            )
        else:
            result = TurnResult(final_text=events.text, error=_judged(events, end, template), usage=events.usage)
        if end.cancelled:
            # Returned, it would count as completed where nobody cancelled the job: when its runner shuts down.
            request.partial(result.final_text)
            raise CancelledError(f"the command of job {request.job_id} was ended", usage=result.usage)
        return result

    def _env(self, request: TurnRequest) -> dict[str, str]:
        """The client's own environment where it sent one, and never a mixture of two."""
        if request.env is not None:
            base = request.env
        else:
            base = os.environ if self._environ is None else self._environ
        env = {name: value for name, value in base.items() if name not in _MARKS}
        env.update(self._template.env)
        env["OPENJOBS_JOB_ID"] = request.job_id
        env["OPENJOBS_SESSION_ID"] = request.session_id
        if self._home is not None:
            env["OPENJOBS_HOME"] = str(self._home)
        return env

    def _log(self, request: TurnRequest, run_dir: Path) -> JobLog | None:
        """Without a home the output vanishes with the command's directory, and so would a log."""
        return None if self._home is None else self._run_logs.open(request.job, run_dir, self._disk)

    def _directory(self, request: TurnRequest) -> Path:
        """The template's directory, else the job's, else the session's own, made on demand."""
        chosen = self._template.cwd or request.cwd
        if chosen is not None:
            if not chosen.is_dir():
                raise InvalidInput(f"the working directory {chosen} does not exist or is not a directory")
            return chosen
        if self._home is None:
            return Path.cwd()
        work = self._home / "sessions" / check_session_id(request.session_id) / "work"
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        return work


class _RunDirectory:
    """`<home>/sessions/<sid>/runs/<run_id>`, kept until gc; without a home a temporary one."""

    def __init__(self, home: Path | None, request: TurnRequest) -> None:
        run_id = request.job.run_id or new_id()
        self._temporary: str | None = None
        if home is None:
            self._temporary = tempfile.mkdtemp(prefix="openjobs-run-")
            self._path = Path(self._temporary) / run_id
        else:
            self._path = run_directory(home, check_session_id(request.session_id), run_id)

    def __enter__(self) -> Path:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._path

    def __exit__(self, *_: object) -> None:
        (self._path / "prompt").unlink(missing_ok=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _Said:
    """What the command says while it runs: its newest output for whoever looks at the job, all of it for the log."""

    def __init__(self, request: TurnRequest, log: JobLog | None, events: EventStream | None) -> None:
        self._show = request.partial
        self._log = log
        self._events = events
        self._tail = bytearray()

    def begin(self, keeper: Identity, child: Identity) -> None:
        if self._log is not None:
            self._log.begin(keeper, child)

    def close(self) -> None:
        if self._events is not None:
            self._events.finish()
        if self._log is not None:
            self._log.close()

    def take(self, stream: str, data: bytes) -> None:
        if self._log is not None:
            self._log.take()
        if stream == "stdout" and self._events is not None:
            before = self._events.text
            self._events.take(data)
            if self._events.text != before:
                self._show(self._events.text)
        elif stream == "stdout":
            self._tail += data
            del self._tail[:-PARTIAL_LIMIT_BYTES]
            self._show(self._tail.decode("utf-8", "replace"))


def _check(arguments: list[str], template: CommandTemplate) -> None:
    for argument in arguments:
        if "\0" in argument:
            hint = "" if template.stdin == "prompt" else '; stdin = "prompt" in the profile would take it'
            raise InvalidInput(f"a prompt with a NUL character cannot be an argument of a command{hint}")
        if len(argument.encode("utf-8", "surrogateescape")) > ARGUMENT_LIMIT_BYTES:
            raise InvalidInput(
                f"the prompt makes an argument of more than {ARGUMENT_LIMIT_BYTES:,} bytes;"
                ' stdin = "prompt" in a profile takes prompts of any length'
            )


def _check_found(program: str, env: Mapping[str, str], cwd: Path) -> None:
    """Under `_WITH_STDIN` a missing program would be the shell's error; this says it as the keeper does."""
    if "/" in program:
        found = os.access(cwd / program, os.X_OK)
    else:
        found = shutil.which(program, path=env.get("PATH", os.defpath)) is not None
    if not found:
        raise InvalidInput(_not_found(program))


def _not_found(program: str) -> str:
    return f"there is no program {program!r} (in the PATH of who submitted the job)"


def _written(path: Path, prompt: str) -> Path:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(prompt.encode("utf-8", "surrogateescape"))
    return path


def _text(end: CommandEnd, logged: str | None) -> str:
    """Standard output as text, without the last line's end; what was cut is said where it was.

    `logged` is the job whose log has what was cut.
    """
    text = end.stdout_tail.decode("utf-8", "replace").removesuffix("\n")
    cut = end.stdout_bytes - len(end.stdout_tail)
    if cut > 0:
        where = "" if logged is None else f"[`openjobs logs {short(logged)}` has them all]\n"
        text = f"[the first {cut:,} bytes were cut]\n{where}{text}"
    if end.truncated:
        lost = end.seen_bytes - end.stdout_bytes - end.stderr_bytes
        text += f"\n[{lost:,} more bytes of output were not kept]"
    return text


def _error(end: CommandEnd, template: CommandTemplate) -> str | None:
    """Why the job errs; None when the command succeeded or was stopped because the job was."""
    if end.succeeded or end.cancelled:
        return None
    match end.stopped_by:
        case layout.BY_EXIT:
            what = f"exit code {end.exit_code}"
        case layout.BY_TIMEOUT:
            what = f"timed out after {template.timeout_s:g} s"
        case layout.BY_NOT_FOUND:
            return _not_found(template.command[0])
        case layout.BY_NOT_STARTED | layout.BY_NEVER_STARTED:
            return f"{template.command[0]!r} could not be started: {end.error or end.reason}"
        case layout.BY_SIGNAL:
            what = f"ended by {_signal_name(end.signal)}"
        case _:
            what = f"stopped ({end.error or end.reason or end.stopped_by})"
    return _with_stderr(what, end)


def _with_stderr(what: str, end: CommandEnd) -> str:
    said = end.stderr_tail.decode("utf-8", "replace").strip()
    if len(said) > ERROR_LIMIT_CHARS:
        said = "…" + said[-ERROR_LIMIT_CHARS:]
    return f"{what}: {said}" if said else what


def _judged(events: EventStream, end: CommandEnd, template: CommandTemplate) -> str | None:
    """Why the job errs, by what the program said of its turn; its exit code alone says nothing."""
    if end.cancelled:
        return None
    if events.error is not None:
        return events.error
    if not events.ended:
        found = _error(end, template) or _with_stderr("exit code 0", end)
        if end.stopped_by in (layout.BY_NOT_FOUND, layout.BY_NOT_STARTED):
            return found
        return f"{template.command[0]} did not say how its turn ended; {found}"
    return None if end.stopped_by == layout.BY_EXIT else _error(end, template)


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
