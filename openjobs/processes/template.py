"""The worker's side of keepers: start one, tell it to go, hear how its command ended.

`Template` owns the template process (template_main.py); `Run` is one command that was handed to a keeper.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..errors import Closed, Damaged, ForkedProcess, InvalidInput, KeeperFailed, RunRefused
from . import layout
from .identity import Identity, from_json
from .rundir import ExitRecord, exit_record, read_exit

#: nothing of the environment, no site-packages: the template has what a keeper needs and nothing else
_ISOLATED = ("-I", "-S")
#: how long a keeper may take to answer; a machine under load is slow, a keeper that waits for a lock takes 5 s
ANSWER_TIMEOUT_S = 60.0
_HERE = Path(__file__).parent

#: descriptors for stdout and stderr
Spill = tuple[int, int]


@attrs.frozen(kw_only=True, slots=True)
class Request:
    """What a keeper is to do. `env` is all that the command gets, besides OPENJOBS_TASK_ID; it is passed over
    a socket and never written to disk."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = attrs.field(repr=False)
    #: value of OPENJOBS_TASK_ID; the mark by which leftovers are found, so it must be the run's own
    task_id: str
    #: from the start of the command; None: no limit
    timeout_s: float | None = None
    #: between TERM and KILL, whoever ends it
    grace_s: float = layout.DEFAULT_GRACE_S
    #: of both streams together, on disk
    output_limit_bytes: int = layout.DEFAULT_OUTPUT_LIMIT_BYTES
    #: at the limit: end the command ("stop"), or let it go on and only count what it writes ("drop")
    on_limit: str = "stop"
    #: False ("relaxed"): the records survive our death, not a power cut
    durable: bool = True

    def __attrs_post_init__(self) -> None:
        _check(self)


def argv_of(command: str | Sequence[str]) -> list[str]:
    """Text goes through the shell; a sequence is what it says. Raises `InvalidInput`."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not all(isinstance(word, str) for word in argv) or not argv[-1 if isinstance(command, str) else 0]:
        raise InvalidInput("a command is a non-empty text for the shell, or a non-empty list of texts")
    return argv


class Template:
    """Starts keepers, each for the price of a fork instead of an interpreter's start.

    *Guarantees.* No threaded process forks. A template that died is started again by the next `start`. Its
    death, ours, and `close` leave every keeper running. The process is made by the first `start`.
    *Assumptions.* `close` is called; a child made by fork uses a template of its own (`ForkedProcess`). Umask,
    priority and resource limits of commands are those that we had when the template was started.
    *What the lock protects.* The process and its socket. It is held while a message of one byte is sent, and
    while the template is started, never while a keeper is talked to.
    """

    def __init__(self, *, python: str | None = None, program: Sequence[str] | None = None) -> None:
        self._command = list(program) if program else [python or sys.executable, *_ISOLATED, *_program()]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pid = os.getpid()
        self._closed = False
        _templates.add(self)

    @property
    def pid(self) -> int | None:
        """Of the template process, while there is one."""
        return self._process.pid if self._process is not None else None

    def start(self, run_dir: Path, request: Request, spill: Spill | None = None) -> Run:
        """A keeper that holds the run's lock and waits for `Run.go`. Nothing runs yet.

        `spill` are two pipes, for stdout and stderr, that get what the disk has no room for; the caller keeps its
        copies. Raises `RunRefused`, `KeeperFailed`, `Closed`, `ForkedProcess`.
        """
        for attempt in (1, 2):
            try:
                return self._start(run_dir, request, spill)
            except _NoAnswer as error:
                # The template had died, or died under us. Nothing was told to go, so asking again is safe.
                if attempt == 2:
                    raise KeeperFailed(f"{KeeperFailed.__doc__} ({error})") from None
        raise AssertionError

    def close(self) -> None:
        """End the template; keepers go on. May be repeated."""
        with self._lock:
            self._closed = True
            if os.getpid() == self._pid:
                self._stop()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, run_dir: Path, request: Request, spill: Spill | None) -> Run:
        ours, theirs = socket.socketpair()
        asked = None
        try:
            with theirs:
                asked = self._hand_over(theirs)
            run = Run(ours, run_dir)
            run._begin(request, spill)
            return run
        except _NoAnswer:
            ours.close()
            with self._lock:
                if self._process is asked:
                    self._stop()
            raise
        except BaseException:
            ours.close()
            raise

    def _hand_over(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        """The template that was asked for a keeper on `channel`."""
        with self._lock:
            if os.getpid() != self._pid:
                raise ForkedProcess
            if self._closed:
                raise Closed("the template of keepers is closed")
            if self._socket is None or self._process is None or self._process.poll() is not None:
                self._stop()
                self._launch()
            assert self._socket is not None
            assert self._process is not None
            try:
                socket.send_fds(self._socket, [b"k"], [channel.fileno()])
            except OSError as error:
                self._stop()
                raise _NoAnswer(f"the template is gone: {error}") from None
            return self._process

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        # Without the mark of a task that we may be part of: keepers belong to no task's tree by it.
        env = {name: value for name, value in os.environ.items() if not name.startswith("OPENJOBS_")}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=env,
                    # A Ctrl-C at our terminal is for us.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise KeeperFailed(f"the template of keepers could not be started: {error}") from error
        self._socket = ours

    def _stop(self) -> None:
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is not None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _forget_in_child(self) -> None:
        """The child's copy would keep the template alive when its worker is gone."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Run:
    """One command in the hands of its keeper, as who started it sees it.

    Steps: `Template.start` → `go` → `wait`, as often as wanted → `close`. Closing before `go` means that the
    command never starts (and is recorded so); closing later only stops listening.

    *Assumptions.* One thread at a time. `fileno` can be watched by a selector; `pump` never blocks.
    """

    def __init__(self, channel: socket.socket, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.keeper: Identity
        #: the command's own process; None before `go`, and when it could not be started
        self.child: Identity | None = None
        #: how it ended, as soon as that is durable, or never will be
        self.record: ExitRecord | None = None
        #: how it ended, while no disk takes the record
        self.unrecorded: ExitRecord | None = None
        #: False when the keeper could not write the record down; then only we know it
        self.recorded = False
        #: whether there is output that nobody was told of since `want_output`
        self.output = False
        #: the keeper has left: its tree is dead, or named as left over, or the keeper was killed
        self.gone = False
        self._channel = channel
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        _runs.add(self)

    def fileno(self) -> int:
        return self._channel.fileno()

    def go(self) -> Identity | None:
        """Let the command run. Its identity, or None when it could not be started: see `record`.

        Raises `KeeperFailed` when the keeper was killed before it answered: look into the run's directory
        (`rundir.bury`) for what happened.
        """
        try:
            self._channel.sendall(b"g")
        except OSError:
            pass  # it may have said why before it left
        self._until(lambda: self.child is not None or self.record is not None)
        if self.child is None and self.record is None:
            raise KeeperFailed("the keeper was killed before it reported the command; the command may have run")
        return self.child

    def wait(self, timeout_s: float | None = None) -> ExitRecord | None:
        """The exit record, as soon as it is durable. None on timeout, and when the keeper was killed (`gone`)."""
        self._until(lambda: self.record is not None, timeout_s)
        return self.record

    def wait_gone(self, timeout_s: float | None = None) -> bool:
        """Whether the keeper has left: then its tree has ended, too."""
        self._until(lambda: self.gone, timeout_s)
        return self.gone

    def wait_output(self, timeout_s: float | None = None) -> None:
        """Until there is new output, an end, or the timeout. See `output`, `record`, `gone`."""
        self._until(lambda: self.output or self.record is not None, timeout_s)

    def want_output(self) -> None:
        """Ask to be told (`output`) once when there is more. Ask before reading, and nothing is missed."""
        self.output = False
        try:
            self._channel.send(b"w")
        except OSError:
            pass  # it has ended; `pump` will see that

    def pump(self) -> None:
        """Take what the keeper has said; never blocks. Call it when `fileno` is readable."""
        while not self.gone:
            try:
                data = self._channel.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.gone = True
                if self.record is None:
                    # Its last line may not have had room; the directory has it.
                    with contextlib.suppress(Damaged, OSError):  # no word of its, or none now: who buries it says so
                        self.record = read_exit(self.run_dir)
                    self.recorded = self.record is not None
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._hear(line)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, request: Request, spill: Spill | None) -> None:
        data = json.dumps({"run_dir": str(self.run_dir.absolute()), **attrs.asdict(request)}).encode()
        self._channel.settimeout(ANSWER_TIMEOUT_S)
        try:
            socket.send_fds(self._channel, [struct.pack(">I", len(data))], spill or ())
            self._channel.sendall(data)
        except OSError as error:
            raise _NoAnswer(str(error)) from None
        self._channel.setblocking(False)
        self._until(lambda: bool(self._events), ANSWER_TIMEOUT_S)
        if not self._events:
            raise _NoAnswer("the keeper left without a word" if self.gone else "the keeper does not answer")
        first = self._events.pop(0)
        if first["event"] != "keeper":
            raise RunRefused(f"{RunRefused.__doc__} ({first.get('reason')})", why=first.get("reason"))
        self.keeper = from_json(first["keeper"])

    def _until(self, reached: Any, timeout_s: float | None = None) -> None:
        """Hear the keeper until `reached`, it is gone, or the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while True:
            self.pump()
            left = None if deadline is None else deadline - time.monotonic()
            if reached() or self.gone or (left is not None and left <= 0):
                return
            poll.poll(None if left is None else int(left * 1000) + 1)

    def _hear(self, line: bytes) -> None:
        if line == b"+":
            self.output = True
            return
        event = json.loads(line)
        kind = event["event"]
        if kind == "started":
            self.child = from_json(event["child"])
        elif kind == "unrecorded":
            self.unrecorded = exit_record(event["record"])
        elif kind == "ended":
            self.record = exit_record(event["record"])
            self.recorded = event["durable"]
        else:
            self._events.append(event)


class _NoAnswer(Exception):
    """No keeper answered; nothing was told to go."""


def _program() -> list[str]:
    package = _HERE.parent
    psutil_home = ""
    if sys.platform != "linux":
        import psutil

        psutil_home = str(Path(psutil.__file__).parent.parent)
    return [str(_HERE / "template_main.py"), str(package), psutil_home]


def _check(request: Request) -> None:
    words = [*request.argv, request.cwd, request.task_id, *request.env.keys(), *request.env.values()]
    if not all(isinstance(word, str) for word in words) or any("\0" in word for word in words):
        raise InvalidInput("a command's words, its directory and its environment are texts without NUL")
    try:
        for word in words:
            word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"a command's words, its directory and its environment are valid Unicode: {error}"
        ) from error
    if not request.argv or not request.argv[0]:
        raise InvalidInput("a command needs a name")
    if not request.task_id or any("=" in name or not name for name in request.env):
        raise InvalidInput("a variable of the environment needs a name without '='")
    if not os.path.isabs(request.cwd):
        raise InvalidInput(f"the directory {request.cwd!r} of a command must be absolute")
    if request.timeout_s is not None and not 0 < request.timeout_s < 10**9:
        raise InvalidInput("timeout_s must be a positive number of seconds")
    if not 0 <= request.grace_s < 10**6:
        raise InvalidInput("grace_s must be a number of seconds, 0 or more")
    if request.output_limit_bytes < 0 or request.on_limit not in ("stop", "drop"):
        raise InvalidInput("output_limit_bytes must be 0 or more, on_limit 'stop' or 'drop'")


_templates: weakref.WeakSet[Template] = weakref.WeakSet()
_runs: weakref.WeakSet[Run] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for template in list(_templates):
        template._forget_in_child()
    # A copy of a run's socket in a child would hide our death from a keeper that waits for `go`.
    for run in list(_runs):
        run.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
