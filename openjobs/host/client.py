"""Talking to the home's host process, and starting one when none is alive.

    with ensure_host(home) as host:
        host.call("list_jobs", session_id="default")

    spawn(home, request, environ=os.environ)     # survives a host that leaves at that very moment

Thirty processes that want a host at once get the same one: who starts it holds
`<home>/host.start.lock`, and the host itself holds `<home>/host.lock` for as long as it lives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..durable import Disk, FileLock
from ..errors import Closed, HostBusy, HostFailed, HostUnavailable, OutcomeUnknown
from ..ids import new_id
from ..jobs import Job, SpawnRequest
from . import address
from .config import VARIABLE
from .wire import (
    ANSWER_LIMIT_BYTES,
    PROTOCOL,
    REQUEST_LIMIT_BYTES,
    Lines,
    decode,
    encode,
    error_from_wire,
    job_from_wire,
)

HOST_LOCK = "host.lock"
START_LOCK = "host.start.lock"
LOG = "host.log"
#: seconds without work and clients after which a host leaves
IDLE_S = 60.0
#: names the job that a process is part of; a job submitted there is its child
JOB_VARIABLE = "OPENJOBS_JOB_ID"

_PING_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0
_POLL_S = 0.02
#: how long a host may hold its lock without a socket; one that ends needs less (`launcher.DEADLINE_S`)
_NO_SOCKET_S = 10.0
#: the first and the longest pause before we try again to start a host, while another one has the lock
_TAKEN_S = (0.05, 1.0)
_LOG_LIMIT_BYTES = 1 << 20
#: how often a submit is tried when hosts keep leaving under it
_ATTEMPTS = 5
#: actions that change nothing (`actions.READING`, without importing the runner's side)
_READING = frozenset({"list_jobs", "get_job", "await_jobs", "list_tasks", "get_task", "stats", "ping"})
#: what a host process takes over from who starts it: enough to run Python and to find its files,
#: none of the secrets that a client's environment may hold
_KEPT = frozenset({"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "OPENPROGRAM_JOB_WORKERS"})
_KEPT_PREFIXES = ("LC_", "PYTHON", "COVERAGE_", "DYLD_", "LD_LIBRARY_PATH")


class HostClient:
    """One connection to a host.

    Guarantees: requests of several threads go one after the other. After an error of the connection
    every further call raises `HostUnavailable`; make a new client.
    `_lock` protects the connection from the first byte of a request to the last of its answer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lines = Lines(sock, ANSWER_LIMIT_BYTES)
        self._lock = threading.Lock()
        self._broken = False
        #: what the host said of itself: pid, version, protocol, home
        self.about: Mapping[str, Any] = {}

    def call(self, action: str, **fields: Any) -> dict[str, Any]:
        """The result of one action (see `host.actions`). Fields that are None are left out.

        Raises the typed error that the host raised; `HostUnavailable` when it cannot be reached, and
        `OutcomeUnknown` when the answer of an action that changes something was lost.
        """
        return self._call(action, fields, None)

    def _call(self, action: str, fields: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
        request = {"action": action, **{name: value for name, value in fields.items() if value is not None}}
        line = encode(request, REQUEST_LIMIT_BYTES)
        with self._lock:
            if self._broken:
                raise HostUnavailable("the connection to the host has ended")
            try:
                answer = self._exchange(action, line, timeout_s)
            except BaseException:
                # Whatever comes next on this connection would be taken for another request's answer.
                self._broken = True
                raise
        if answer.get("ok") is True and isinstance(answer.get("result"), dict):
            return dict(answer["result"])
        error = answer.get("error")
        raise error_from_wire(error) if isinstance(error, dict) else HostFailed("the host's answer cannot be read")

    def _exchange(self, action: str, line: bytes, timeout_s: float | None) -> dict[str, Any]:
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(line)
        except OSError as error:
            # A host that turns a client away says why before it closes.
            reply = self._last_words()
            if reply is not None:
                return reply
            raise HostUnavailable(f"the host went away before it had the request: {error}", sent=False) from error
        try:
            raw = self._lines.read(timeout_s)
        except OSError as error:
            raise HostUnavailable(f"the host does not answer: {error}", sent=True) from error
        if raw is None:
            if action in _READING:
                raise HostUnavailable("the host went away before it answered", sent=True)
            raise OutcomeUnknown(f"the host went away before it answered {action}; ask again to learn what happened")
        return decode(raw)

    def _last_words(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            raw = self._lines.read(0.1)
            return None if raw is None else decode(raw)
        return None

    # --- the actions that are asked most, with real types ---

    def spawn(
        self,
        request: SpawnRequest,
        *,
        wait: bool = False,
        create_session: bool = False,
        waiting_job_id: str | None = None,
    ) -> dict[str, Any]:
        """`{job_id, status, parent_msg_id}`. Use the module's `spawn` where the host may leave meanwhile."""
        fields = attrs.asdict(request, recurse=False)
        fields["session_id"] = fields.pop("parent_session_id")
        fields["context"] = str(fields.pop("context_mode"))
        fields["cwd"] = None if request.cwd is None else os.fspath(request.cwd)
        fields["env"] = None if request.env is None else dict(request.env)
        fields["metadata"] = None if request.metadata is None else dict(request.metadata)
        fields |= {"wait": wait or None, "create_session": create_session or None, "waiting_job_id": waiting_job_id}
        return self.call("spawn_job", **fields)

    def get(self, job_id: str) -> tuple[Job, str | None]:
        """The job and, while it runs, its partial text."""
        found = self.call("get_job", job_id=job_id)
        return job_from_wire(found), found.get("partial_result")

    def await_jobs(
        self,
        job_ids: Sequence[str],
        mode: str = "all",
        timeout_s: float | None = None,
        waiting_job_id: str | None = None,
    ) -> list[Job]:
        """The jobs as they stand when all (or any) have ended or the time is up, in the order given.

        Raises `HostUnavailable` when the host ends meanwhile: git has the truth then, or the next host.
        """
        try:
            answer = self.call(
                "await_jobs", job_ids=list(job_ids), mode=mode, timeout_s=timeout_s, waiting_job_id=waiting_job_id
            )
        except Closed as error:
            raise HostUnavailable(f"the host is ending: {error}", sent=True) from error
        return [job_from_wire(fields) for fields in answer["tasks"]]

    def cancel(self, job_id: str, reason: str | None = None) -> dict[str, Any]:
        """`{job_id, status}`, at once."""
        return self.call("cancel_job", job_id=job_id, reason=reason)

    def close(self) -> None:
        """From any thread: a call that waits ends with an error."""
        self._broken = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> HostClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(home: Path) -> HostClient | None:
    """A client of the living host of a prepared home; None when there is none, or it is just leaving.

    Raises `HostUnavailable` for one that does not answer, speaks another protocol or is another user's.
    """
    try:
        sock = address.dial(home)
    except HostUnavailable as error:
        if hasattr(error, "silent"):
            raise _silent(home, _lock_holder(home)) from error
        raise
    if sock is None:
        return None
    client = HostClient(sock)
    pid = address.peer_pid(sock) or _lock_holder(home)
    try:
        client.about = client._call("ping", {}, _PING_TIMEOUT_S)
        if client.about.get("protocol") != PROTOCOL:
            raise HostUnavailable(
                f"the host of {home} is of another version ({client.about.get('version')});"
                f" it leaves after a minute without work, or stop process {client.about.get('pid')}",
                pid=client.about.get("pid"),
            )
    except HostUnavailable as error:
        client.close()
        if isinstance(error.__cause__, TimeoutError):
            raise _silent(home, pid) from error
        if hasattr(error, "sent"):
            return None  # it was leaving: nobody read our request
        raise
    except BaseException:
        client.close()
        raise
    return client


def ensure_host(
    home: Path,
    *,
    environ: Mapping[str, str] | None = None,
    idle_s: float = IDLE_S,
    workers: int | None = None,
    timeout_s: float = _START_TIMEOUT_S,
) -> HostClient:
    """A client of the home's host, which is started when none is alive. `home` must be prepared.

    `environ` is where a new host's few own variables come from (PATH, HOME, ...), `idle_s` and
    `workers` are for a new host only. Raises `HostUnavailable`, or the error for which the host did not start.
    """
    deadline = time.monotonic() + timeout_s
    lock = FileLock(home / START_LOCK, Disk(durable=False))
    taken = _Taken(home)
    while True:
        client = _try_connect(home)
        if client is None and taken.try_again and lock.try_acquire():
            try:
                client = _try_connect(home)
                if client is None:
                    answer = _start(home, os.environ if environ is None else environ, idle_s, workers, deadline)
                    client = _try_connect(home)
                    taken.seen(bool(answer.get("taken")) and client is None)
            finally:
                lock.release()
        if client is not None:
            return client
        if time.monotonic() >= deadline:
            raise HostUnavailable(f"no host of {home} could be reached within {timeout_s:g} s (see {home / LOG})")
        time.sleep(_POLL_S)


def spawn(
    home: Path,
    request: SpawnRequest,
    *,
    environ: Mapping[str, str],
    wait: bool = False,
    create_session: bool = False,
    ensure: Callable[[Path], HostClient] | None = None,
) -> dict[str, Any]:
    """Hand a job to the home's host: `{job_id, status, parent_msg_id}`. A host that leaves loses nothing.

    `environ` is the client's environment: the job gets it unless the request has its own, and a job
    id in it (of a job of this home) makes the new job that job's child. The job's id is chosen here, so
    asking a second host again never runs anything twice (R3).
    """
    request = attrs.evolve(
        request,
        job_id=request.job_id or new_id(),
        env=dict(environ) if request.env is None else request.env,
        parent_job_id=request.parent_job_id or parent_job(home, environ),
    )
    last: Exception | None = None
    for _ in range(_ATTEMPTS):
        with (ensure or (lambda home: ensure_host(home, environ=environ)))(home) as client:
            try:
                return client.spawn(request, wait=wait, create_session=create_session)
            except (OutcomeUnknown, HostUnavailable, Closed) as error:
                last = error
    assert last is not None
    raise last


def start_task(
    home: Path,
    fields: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    ensure: Callable[[Path], HostClient] | None = None,
) -> dict[str, Any]:
    """Hand a background command to the home's host: the task. `fields` as in `actions.start_task`.

    `environ` is the command's environment. The task's id is chosen here, so that asking a second host again never
    runs anything twice (R3).
    """
    wanted = {"task_id": new_id(), "env": dict(environ), **fields}
    last: Exception | None = None
    for _ in range(_ATTEMPTS):
        with (ensure or (lambda home: ensure_host(home, environ=environ)))(home) as client:
            try:
                return client.call("start_task", **wanted)
            except (OutcomeUnknown, HostUnavailable, Closed) as error:
                last = error
    assert last is not None
    raise last


def parent_job(home: Path, environ: Mapping[str, str]) -> str | None:
    """The job of this home that the process with that environment is part of."""
    job_id = environ.get(JOB_VARIABLE)
    return job_id if job_id and environ.get(VARIABLE) == str(home) else None


# --- starting one -------------------------------------------------------------------------------------------


class _Taken:
    """What we know of a host that holds the home's lock and cannot be reached."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._pid: int | None = None
        self._since: float | None = None
        self._next = 0.0
        self._pause_s = _TAKEN_S[0]

    @property
    def try_again(self) -> bool:
        """Whether it is time to ask again who has the lock, by starting a host."""
        return time.monotonic() >= self._next

    def seen(self, taken: bool) -> None:
        """Raises `HostUnavailable` when the same process has had the lock, and no socket, for too long."""
        now, pid = time.monotonic(), _lock_holder(self._home)
        if not taken:
            self._since, self._pause_s = None, _TAKEN_S[0]
            return
        if self._since is None or pid != self._pid:
            self._since, self._pid = now, pid
        self._next = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _TAKEN_S[1])
        blocked = address.obstacle(self._home)
        if blocked is not None:
            raise HostUnavailable(blocked, pid=pid)
        if now - self._since >= _NO_SOCKET_S:
            raise HostUnavailable(
                f"{_process(pid)} holds {self._home / HOST_LOCK}, but has had no socket to talk to for"
                f" {now - self._since:.0f} s; {_advice(self._home, pid)}",
                pid=pid,
            )


def _silent(home: Path, pid: int | None) -> HostUnavailable:
    what = f"the host of {home} ({_process(pid)}) does not answer: nothing for {_PING_TIMEOUT_S:g} s"
    return HostUnavailable(f"{what}; {_advice(home, pid)}", pid=pid)


def _process(pid: int | None) -> str:
    return "a process that is not known" if pid is None else f"process {pid}"


def _advice(home: Path, pid: int | None) -> str:
    if pid is None:
        return f"see {home / LOG}, find it with `fuser {home / HOST_LOCK}`, end it, then try again"
    return f"see {home / LOG}; when it is stuck, end it with `kill {pid}` (or `kill -9 {pid}`), then try again"


def _lock_holder(home: Path) -> int | None:
    """The process that wrote its number into the host lock; it may be gone."""
    try:
        fd = os.open(home / HOST_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, 32).strip()
    except OSError:
        return None
    finally:
        os.close(fd)
    return int(text) if text.isdigit() else None


def _try_connect(home: Path) -> HostClient | None:
    try:
        return connect(home)
    except HostBusy:
        return None  # try again until the time is up


def _start(
    home: Path, environ: Mapping[str, str], idle_s: float, workers: int | None, deadline: float
) -> dict[str, Any]:
    """Start a host process, detached, and wait until it listens or says why it does not: its answer."""
    import subprocess  # late: most commands find a host

    reader, writer = os.pipe()
    try:
        with _open_log(home) as log:
            command = [sys.executable, "-P", "-m", "openjobs.host", "--home", str(home)]
            command += ["--idle-s", repr(idle_s), "--ready-fd", str(writer), "--detach"]
            if workers is not None:
                command += ["--workers", str(workers)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                env=_host_environment(environ),
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        writer = -1
        process.wait()  # it goes on as a child of nobody; this is only its first half
        return _wait_ready(reader, home, deadline)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _wait_ready(reader: int, home: Path, deadline: float) -> dict[str, Any]:
    import select

    said = b""
    poll = select.poll()
    poll.register(reader, select.POLLIN | select.POLLHUP)
    while not said.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise HostUnavailable(f"the host of {home} did not start in time (see {home / LOG})")
        piece = os.read(reader, 65536)
        if not piece:
            raise HostUnavailable(f"the host of {home} did not start: {_log_tail(home)} (see {home / LOG})")
        said += piece
    answer = decode(said)
    if isinstance(answer.get("error"), dict):
        raise error_from_wire(answer["error"])
    return answer


def _host_environment(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    root = Path(__file__).resolve().parents[2]
    if not {"site-packages", "dist-packages"} & set(root.parts):
        # Run from a source tree, which a new interpreter would not find: `-P` keeps its directory out.
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), kept.get("PYTHONPATH")]))
    return kept


@contextlib.contextmanager
def _open_log(home: Path) -> Any:
    path = home / LOG
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_size > _LOG_LIMIT_BYTES:
            os.replace(path, home / f"{LOG}.1")
    fd = Disk().open_append(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _log_tail(home: Path) -> str:
    from ..durable.files import read_file  # late: only who failed to reach a host asks

    try:
        lines = read_file(str(home / LOG)).decode(errors="replace")[-2000:].strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"
