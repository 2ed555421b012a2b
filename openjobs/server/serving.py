"""The app on its sockets: the home's Unix socket, a loopback port, and uvicorn on a thread of its own.

The listening sockets are made here and stay open over a change of the app (see `cli.serve`), so that a
client that reconnects meanwhile waits a moment instead of being turned away.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidConfiguration
from ..host.address import BACKLOG, fits, listen_at
from .app import App
from .security import Scope
from .socket import FRAME_BYTES

log = logging.getLogger(__name__)

SOCKET = "serve.sock"
_NEW = "serve.new"
#: connections of every kind
CONCURRENCY = 640
HEADER_BYTES = 64 << 10
PING_S = 20.0
#: how long open connections get to end by themselves, and what a stop may take at most
_GRACE_S = 0.5
STOP_S = 1.8
_START_S = 10.0


class Serving:
    """One app, served until `stop`.

    Guarantees: `stop` returns within two seconds, whatever clients do; every WebSocket that reads is
    closed with 1012 first. Assumptions: the sockets are the caller's and stay open.
    """

    def __init__(self, app: App, sockets: Sequence[socket.socket]) -> None:
        import uvicorn

        from .protocol import Protocol

        self._app = app
        self._sockets = sockets
        config = uvicorn.Config(
            app,
            log_config=None,
            # What fails is logged by the app. Here each client that is turned away would be an error.
            log_level="critical",
            access_log=False,
            lifespan="off",
            http=Protocol,
            ws="auto",
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEADER_BYTES,
            ws_max_size=FRAME_BYTES,
            ws_ping_interval=PING_S,
            ws_ping_timeout=PING_S,
            ws_per_message_deflate=False,
        )
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="openjobs server", daemon=True)
        app.abort = self._abort
        app.crowded = lambda: len(self._server.server_state.connections) >= CONCURRENCY

    def start(self) -> None:
        """Returns when requests are answered. Raises what kept it from that."""
        self._app.start()
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.01)
        if not self._server.started:
            raise self._error or InvalidConfiguration("the server did not start in time")

    def stop(self) -> None:
        self._app.begin_close()
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(_GRACE_S)
            if self._thread.is_alive():
                self._call_soon(self._abort_all)
                self._thread.join(STOP_S - _GRACE_S)
        if self._thread.is_alive():
            log.error("the server did not end in time and was left behind")
        self._app.close()

    def _run(self) -> None:
        # Copies: uvicorn closes what it is given.
        copies = [each.dup() for each in self._sockets]
        try:
            asyncio.run(self._serve(copies))
        except BaseException as error:
            self._error = error
            log.exception("the server failed")
        finally:
            for each in copies:
                each.close()

    async def _serve(self, sockets: list[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=sockets)
        self._abort_all()

    def _call_soon(self, call: Any) -> None:
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)

    def _abort(self, scope: Scope) -> None:
        """End the connection of that scope without waiting for what it has not read."""
        for connection in list(self._server.server_state.connections):
            known = getattr(connection, "scope", None)
            if known is not None and known.get("client") == scope.get("client") and _same(known, scope):
                connection.transport.abort()

    def _abort_all(self) -> None:
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()


def _same(one: Any, other: Any) -> bool:
    """The app gets a copy of the scope, with the same headers object in it."""
    return one.get("headers") is other.get("headers")


# --- sockets ----------------------------------------------------------------------------------------------------


def listen_in_home(home: Path) -> socket.socket | None:
    """The home's own socket, mode 0600; None where the path of the home is too long for one.

    Only for who holds the home's server lock: what a dead server left is replaced. Raises `InvalidConfiguration`.
    """
    path = home / SOCKET
    if not fits(path):
        return None
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise InvalidConfiguration(f"{path} is not a socket, where the server's belongs: move it away")
    try:
        return listen_at(path, path.with_name(_NEW))
    except OSError as error:
        raise InvalidConfiguration(f"the socket {path} cannot be made: {error.strerror or error}") from error


def remove_from_home(home: Path) -> None:
    path = home / SOCKET
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def listen_on_loopback(port: int) -> socket.socket:
    """127.0.0.1 only; 0 is any free port. Raises `InvalidConfiguration`."""
    # With its protocol named, asyncio sets TCP_NODELAY: else small frames wait 40 ms for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidConfiguration(f"port {port} is in use already; pick another one, or 0 for any") from error
        raise InvalidConfiguration(f"port {port} cannot be used: {error.strerror or error}") from error
    return listener
