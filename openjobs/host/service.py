"""Serving the home's socket: one thread for each connection, and a bound on their number."""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadFrame, HostBusy
from .address import peer_uid as kernel_peer_uid
from .wire import REQUEST_LIMIT_BYTES, Lines, decode, encode, error_to_wire

CLIENT_LIMIT = 128
#: how long an answer may take to be accepted by its client
_SEND_TIMEOUT_S = 30.0
#: how long `stop` lets answers that are under way go out
_DRAIN_S = 1.0
#: how often it is asked whether the listener's file is still in its place
RENEW_EVERY_S = 1.0

#: makes the answer to one request; the second argument says whether the asker is gone
Answerer = Callable[[Mapping[str, Any], Callable[[], bool]], Mapping[str, Any]]

_log = logging.getLogger(__name__)


class Service:
    """Answers the requests that come over one listening socket.

    Guarantees: a client that sends rubbish, sends nothing, does not read, or goes away costs its own
    connection only. Requests of one connection are answered in their order.
    Assumptions: the listener belongs to this object from now on; `answer` never raises. `renew`, asked every
    `renew_every_s`, gives a listener that takes the old one's place, or None.
    `_lock` protects `_connections`, `_leaving` and `_stopping`.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Answerer,
        *,
        uid: int | None = None,
        peer_uid: Callable[[socket.socket], int] = kernel_peer_uid,
        client_limit: int = CLIENT_LIMIT,
        request_limit_bytes: int = REQUEST_LIMIT_BYTES,
        renew: Callable[[], socket.socket | None] = lambda: None,
        renew_every_s: float = RENEW_EVERY_S,
    ) -> None:
        self._listener = listener
        self._renew = renew
        self._renew_every_s = renew_every_s
        self._answer = answer
        self._uid = os.geteuid() if uid is None else uid
        self._peer_uid = peer_uid
        self._client_limit = client_limit
        self._request_limit_bytes = request_limit_bytes
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._leaving = False
        self._stopping = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept_all, name="openjobs host accept", daemon=True)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._acceptor.start()

    @property
    def clients(self) -> int:
        with self._lock:
            return len(self._connections)

    def leave_if_quiet(self) -> bool:
        """True when no client is connected, and from now on none gets in (`stay` takes that back).

        Who is turned away has got no answer and no request of theirs was read, so they try again with
        the next host and nothing is lost.
        """
        with self._lock:
            self._leaving = not self._connections
            return self._leaving

    def stay(self) -> None:
        with self._lock:
            self._leaving = False

    def stop(self) -> None:
        """No more connections; answers under way go out; then every connection is closed. Bounded."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            open_ones = dict(self._connections)
        self._wake_writer.send(b"x")
        if self._acceptor.ident is not None:
            self._acceptor.join()
        self._listener.close()
        for sock in open_ones:
            _shut(sock, socket.SHUT_RD)  # who waits for a request sees the end, who answers goes on
        deadline = time.monotonic() + _DRAIN_S
        for thread in open_ones.values():
            thread.join(max(deadline - time.monotonic(), 0.0))
        for sock, thread in open_ones.items():
            if thread.is_alive():
                _shut(sock, socket.SHUT_RDWR)
                thread.join(0.1)
        self._wake_reader.close()
        self._wake_writer.close()

    # --- accepting ---

    def _accept_all(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._wake_reader, selectors.EVENT_READ)
            renew_at = time.monotonic() + self._renew_every_s
            while True:
                ready.select(max(renew_at - time.monotonic(), 0.0))
                with self._lock:
                    if self._stopping:
                        return
                self._accept_one()
                if time.monotonic() >= renew_at:
                    self._look_after_listener(ready)
                    renew_at = time.monotonic() + self._renew_every_s

    def _look_after_listener(self, ready: selectors.BaseSelector) -> None:
        try:
            listener = self._renew()
        except Exception:
            _log.exception("the socket could not be looked after")
            return
        if listener is None:
            return
        while self._accept_one():
            pass  # who came by the old name is served
        ready.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        listener.setblocking(False)
        ready.register(listener, selectors.EVENT_READ)

    def _accept_one(self) -> bool:
        """Whether there was somebody."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return False
        except OSError:
            # Out of descriptors, most likely: the connection stays in the backlog until there are some.
            _log.exception("a connection cannot be accepted")
            time.sleep(0.1)
            return False
        try:
            sock.setblocking(True)
            self._admit(sock)
        except Exception:
            with self._lock:
                self._connections.pop(sock, None)
            sock.close()
            _log.exception("a connection could not be served")
        return True

    def _admit(self, sock: socket.socket) -> None:
        try:
            peer = self._peer_uid(sock)
        except OSError:
            sock.close()
            return
        if peer != self._uid:
            _log.warning("a connection of user %d was refused", peer)
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(sock,), name="openjobs host client", daemon=True)
        with self._lock:
            refused = self._leaving or self._stopping
            full = len(self._connections) >= self._client_limit
            if not refused and not full:
                self._connections[sock] = thread
        if refused:
            sock.close()
        elif full:
            _send(sock, {"ok": False, "error": error_to_wire(HostBusy())}, timeout_s=0.1)
            sock.close()
        else:
            thread.start()

    # --- one connection ---

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._converse(sock)
        except (OSError, TimeoutError):
            pass  # the client is gone, stuck in the middle of a line, or does not read
        except Exception:
            _log.exception("a connection failed")
        finally:
            with self._lock:
                self._connections.pop(sock, None)
            sock.close()

    def _converse(self, sock: socket.socket) -> None:
        lines = Lines(sock, self._request_limit_bytes)
        while True:
            try:
                line = lines.read()
            except BadFrame as error:
                _send(sock, {"ok": False, "error": error_to_wire(error)})
                return  # where the next line begins is unknown
            if line is None:
                return
            if line.strip():
                _send(sock, self._reply(sock, line))

    def _reply(self, sock: socket.socket, line: bytes) -> Mapping[str, Any]:
        try:
            request = decode(line)
        except BadFrame as error:
            return {"ok": False, "error": error_to_wire(error)}
        return self._answer(request, lambda: _is_gone(sock))


def _send(sock: socket.socket, message: Mapping[str, Any], timeout_s: float = _SEND_TIMEOUT_S) -> None:
    try:
        line = encode(message)
    except BadFrame as error:
        line = encode({"ok": False, "error": error_to_wire(error)})
    sock.settimeout(timeout_s)
    sock.sendall(line)


def _is_gone(sock: socket.socket) -> bool:
    """Whether the other side closed, without taking anything out of the socket."""
    try:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if not poll.poll(0):
            return False
        return sock.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def _shut(sock: socket.socket, how: int) -> None:
    try:
        sock.shutdown(how)
    except OSError:
        pass  # it ended by itself
