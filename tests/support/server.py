"""A server in the test's own process, and clients that speak to it over real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from openjobs import GitJobStore, JobRunner
from openjobs.server import App, Places, Surroundings, TokenAuth, create_app
from openjobs.server.serving import Serving, listen_on_loopback

TOKEN = "a-token-of-the-tests-0123456789abcdefgh"
PATIENCE_S = 20.0


class Client:
    """HTTP and WebSocket with the token, unless told otherwise."""

    def __init__(self, port: int, token: str | None = TOKEN, prefix: str = "") -> None:
        self.port = port
        self.prefix = prefix
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by lower-case name, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        sent = {**self.headers, **(headers or {})}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, self.prefix + path, body=data, headers=sent)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str, status: int = 200) -> Any:
        found, _, body = self.request("GET", path)
        assert found == status, (found, body)
        return json.loads(body)

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        found, _, answer = self.request("POST", path, {} if body is None else body)
        assert found == status, (found, answer)
        return json.loads(answer) if answer else None

    @contextmanager
    def open(self, **options: Any) -> Iterator[Socket]:
        headers = options.pop("headers", self.headers)
        uri = f"ws://127.0.0.1:{self.port}{self.prefix}/api/ws"
        with connect(
            uri, additional_headers=headers, compression=None, max_size=None, proxy=None, close_timeout=2, **options
        ) as connection:
            yield Socket(connection)


class Socket:
    """A WebSocket whose answers and events are kept apart."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.events: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self._number = 0

    def send(self, **fields: Any) -> None:
        self.connection.send(json.dumps(fields))

    def ask(self, action: str, **fields: Any) -> dict[str, Any]:
        """The answer to one request, with a `request_id` of its own."""
        self._number += 1
        request_id = f"r{self._number}"
        self.send(action=action, request_id=request_id, **fields)
        return self.answer(request_id)

    def answer(self, request_id: Any, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while True:
            for place, answer in enumerate(self.answers):
                if answer.get("request_id") == request_id:
                    return self.answers.pop(place)
            self.take(end - time.monotonic())

    def take(self, timeout_s: float) -> None:
        """One more frame."""
        message = json.loads(self.connection.recv(timeout=max(timeout_s, 0.001)))
        if "event" not in message:
            self.answers.append(message)
        elif message["event"] == "batch":
            self.events += message["events"]
        else:
            self.events.append(message)

    def until(self, event: str, timeout_s: float = PATIENCE_S, **fields: Any) -> dict[str, Any]:
        """The first event of that kind with these values, those that came before included."""
        end = time.monotonic() + timeout_s
        seen = 0
        while True:
            for message in self.events[seen:]:
                if message["event"] == event and all(message.get(name) == value for name, value in fields.items()):
                    return message
            seen = len(self.events)
            self.take(end - time.monotonic())

    def errors(self, count: int) -> list[dict[str, Any]]:
        """So many answers that are errors without a request id."""
        while len(found := [answer for answer in self.answers if "error" in answer]) < count:
            self.take(PATIENCE_S)
        return found


@contextmanager
def serving(runner: JobRunner, **options: Any) -> Iterator[tuple[Client, App]]:
    """A server for that runner on a free port of the loopback."""
    listener = listen_on_loopback(0)
    port = listener.getsockname()[1]
    options.setdefault("auth", TokenAuth(TOKEN))
    options.setdefault("places", Places.loopback(port))
    options.setdefault("surroundings", Surroundings())
    app = create_app(runner, **options)
    server = Serving(app, [listener])
    try:
        server.start()
        yield Client(port, prefix=options.get("prefix", "")), app
    finally:
        server.stop()
        listener.close()


@contextmanager
def home_with_runner(home: Path, **options: Any) -> Iterator[tuple[GitJobStore, JobRunner]]:
    """A store on disk that syncs nothing, and a runner; jobs are stopped in the end."""
    store = GitJobStore(home, durability="relaxed")
    try:
        runner = JobRunner(store, **options)
        try:
            yield store, runner
        finally:
            runner.shutdown(2.0)
    finally:
        store.close()


def raw(port: int, data: bytes, patience_s: float = 5.0) -> bytes:
    """What a server answers to these bytes, until it closes or says no more."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as sock:
        sock.sendall(data)
        found = b""
        try:
            while chunk := sock.recv(65536):
                found += chunk
                head, mark, body = found.partition(b"\r\n\r\n")
                if mark and _is_whole(head, body):
                    break
        except (TimeoutError, ConnectionError):
            pass
        return found


def _is_whole(head: bytes, body: bytes) -> bool:
    if b" 101 " in head.split(b"\r\n")[0]:
        return True
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(body) >= int(value)
    return False
