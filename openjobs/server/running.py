"""`openjobs serve`, from taking the home's server lock to giving it back.

One pool for each home, so a server is one of two things at a time:

1. nobody holds the home's host lock: it takes it and is the host, until it ends;
2. somebody does: it asks that host to leave when it is idle, and until then is attached to it. As soon
   as the lock is free it goes on as 1. Its sockets stay open meanwhile; clients are told to reconnect.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .._version import __version__
from ..durable import Disk, FileLock
from ..durable.files import read_file
from ..durable.lock import is_locked
from ..errors import InvalidConfiguration, NotFound, OpenJobsError
from ..host.client import HOST_LOCK, connect
from ..host.launcher import Launcher
from ..host.process import open_host, sign
from ..runner import JobClient
from ..store import GitJobStore
from .app import STATIC, App
from .backend import AttachedBackend, Backend, RunnerBackend, Surroundings
from .security import Places, TokenAuth, have_token, read_token
from .serving import SOCKET, Serving, listen_in_home, listen_on_loopback, remove_from_home

LOCK = "serve.lock"
ABOUT = "serve.json"
#: how long an idle host may take to leave
_LEAVE_S = 1.5
_POLL_S = 0.05
#: how often an attached server looks whether it can be the host
_TAKE_OVER_S = 0.5


@attrs.frozen(kw_only=True)
class Announcement:
    """What a person is told when the server is there."""

    home: Path
    mode: str
    socket: Path | None
    #: logs a browser in once; None without a port
    url: str | None
    port: int | None


def serve(
    home: Path,
    *,
    port: int | None = None,
    workers: int | None = None,
    origins: Sequence[str] = (),
    environ: Mapping[str, str],
    cwd: Path | None = None,
    announce: Callable[[Announcement], object] = lambda told: None,
    static: Path = STATIC,
) -> None:
    """Serve a prepared home until the process is asked to end. `announce` is called for each mode it takes.

    `port` None: only the home's Unix socket. `environ` and `cwd` are what jobs get that are started here.
    Raises `InvalidConfiguration` where a server of this home runs already, or it cannot listen.
    """
    disk = Disk(durable=False)
    lock = FileLock(home / LOCK, disk)
    if not lock.try_acquire():
        raise InvalidConfiguration(_already(home))
    try:
        with _listeners(home, port) as listeners:
            token = have_token(home, Disk())
            server = _Server(home, listeners, token, workers, origins, Surroundings(environ=environ, cwd=cwd), static)
            server.announce = announce
            about = {"pid": os.getpid(), "port": server.port, "version": __version__}
            disk.replace(home / ABOUT, json.dumps(about).encode() + b"\n")
            try:
                server.run()
            finally:
                with contextlib.suppress(OSError):
                    disk.unlink(home / ABOUT)
    finally:
        lock.release()


def login_url(home: Path) -> str:
    """A new link for the server that runs. Raises `NotFound` where none does."""
    about = _about(home)
    if about is None:
        raise NotFound(f"no server of {home} runs; `openjobs serve --port 0` starts one")
    port = about.get("port")
    token = read_token(home)
    if not isinstance(port, int) or token is None:
        raise NotFound("the server that runs has no port for a browser; end it and start it with --port")
    return _url(port, TokenAuth(token))


def _url(port: int, auth: TokenAuth) -> str:
    return f"http://127.0.0.1:{port}/#login={auth.code()}"


def _about(home: Path) -> dict[str, Any] | None:
    if not is_locked(home / LOCK):
        return None
    try:
        found = json.loads(read_file(str(home / ABOUT)))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _already(home: Path) -> str:
    about = _about(home) or {}
    return (
        f"a server of {home} runs already (process {about.get('pid', 'not known')}, port {about.get('port')});"
        " `openjobs serve --url` prints a link to it"
    )


@contextlib.contextmanager
def _listeners(home: Path, port: int | None) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        found: list[socket.socket] = []
        if port is not None:
            found.append(stack.enter_context(contextlib.closing(listen_on_loopback(port))))
        inside = listen_in_home(home)
        if inside is not None:
            found.append(stack.enter_context(contextlib.closing(inside)))
            stack.callback(remove_from_home, home)
        if not found:
            raise InvalidConfiguration(f"the path of {home} is too long for a socket in it; give a --port")
        yield found


class _Server:
    def __init__(
        self,
        home: Path,
        listeners: list[socket.socket],
        token: str,
        workers: int | None,
        origins: Sequence[str],
        surroundings: Surroundings,
        static: Path,
    ) -> None:
        self._home = home
        self._listeners = listeners
        self._auth = TokenAuth(token)
        self._workers = workers
        self._surroundings = surroundings
        self._static = static
        tcp = next((each for each in listeners if each.family == socket.AF_INET), None)
        self.port: int | None = None if tcp is None else tcp.getsockname()[1]
        self._places = Places.loopback(self.port or 0, origins)
        self._host_lock = FileLock(home / HOST_LOCK, Disk(durable=False))
        self.announce: Callable[[Announcement], object] = lambda told: None

    def run(self) -> None:
        again = True
        while again:
            if self._host_lock.try_acquire() or self._has_left():
                try:
                    sign(self._home, f"{os.getpid()}\n")
                    self._as_host()
                    again = False
                finally:
                    sign(self._home, "")
                    # Last of all: until here another host would meet a store that still writes.
                    self._host_lock.release()
            else:
                again = self._attached()

    def _has_left(self) -> bool:
        """Ask the host to leave; whether it did so at once, and we have its lock."""
        leaving = False
        try:
            host = connect(self._home)
            if host is not None:
                with host:
                    leaving = bool(host.call("leave").get("leaving"))
        except OpenJobsError:
            pass  # an older one, or one that does not answer: then it stays
        deadline = time.monotonic() + _LEAVE_S
        while leaving and time.monotonic() < deadline:
            if self._host_lock.try_acquire():
                return True
            time.sleep(_POLL_S)
        return False

    def _as_host(self) -> None:
        with Launcher() as launcher:
            hosted = open_host(launcher, self._home, workers=self._workers, stays=True)
            backend = RunnerBackend(hosted.runtime.runner, supervisor=hosted.tasks, surroundings=self._surroundings)
            self._open(launcher, backend)
            hosted.service.start()
            self._tell(backend)
            launcher.wait()

    def _attached(self) -> bool:
        """Whether to go on as another: the host lock is free."""
        with Launcher() as launcher:
            store = GitJobStore(self._home)
            launcher.provide("store", store, lambda left: store.close(timeout=left))
            client = JobClient(store)
            launcher.provide("client", client, lambda left: client.close())
            backend = AttachedBackend(self._home, store, client, surroundings=self._surroundings)
            self._open(launcher, backend)
            self._tell(backend)
            while not launcher.wait(_TAKE_OVER_S):
                if self._host_lock.try_acquire():
                    self._host_lock.release()  # taken again as soon as the store here is closed
                    return True
        return False

    def _open(self, launcher: Launcher, backend: Backend) -> None:
        with launcher.acquiring("server") as pending:
            app = App(backend, auth=self._auth, places=self._places, prefix="", static=self._static)
            serving = Serving(app, self._listeners)
            pending.ready(serving.stop)
            serving.start()

    def _tell(self, backend: Backend) -> None:
        inside = any(each.family == socket.AF_UNIX for each in self._listeners)
        self.announce(
            Announcement(
                home=self._home,
                mode=backend.mode,
                socket=self._home / SOCKET if inside else None,
                url=None if self.port is None else _url(self.port, self._auth),
                port=self.port,
            )
        )
