"""The ASGI application: who is let in, which route answers, and the life of what they share.

    app = create_app(runner)          # an ASGI app for any server; `app.close()` ends its threads

Source: spec 003, D9 and D11; docs/server.md has the wire contract.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from ..errors import Closed, InvalidConfiguration
from .backend import Backend, RunnerBackend, Surroundings
from .conversation import Conversations, Metas
from .feed import Feed
from .logs import Logs
from .security import (
    Admitted,
    Auth,
    Places,
    Receive,
    Refusal,
    Scope,
    Send,
    TokenAuth,
    check_origin_given,
    check_places,
    have_token,
    headers_of,
)

if TYPE_CHECKING:
    from ..runner import JobRunner
    from .socket import Connection

T = TypeVar("T")

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
CONNECTION_LIMIT = 512
STREAM_LIMIT = 64
_WORKERS = 8

#: what anybody may ask for: the panel's own files, a login, and whether the server lives
_OPEN_FILE = re.compile(r"/(assets/[A-Za-z0-9_-][A-Za-z0-9_.-]*|[A-Za-z0-9_-]+\.(svg|ico|png|webmanifest))?\Z")
_OPEN = frozenset({("GET", "/healthz"), ("HEAD", "/healthz"), ("POST", "/api/login")})
_HOST = re.compile(r"[A-Za-z0-9.\[\]:-]{1,255}\Z")
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


def create_app(
    runner: JobRunner | Backend,
    *,
    auth: Auth | None = None,
    places: Places | None = None,
    prefix: str = "",
    surroundings: Surroundings | None = None,
    static: Path | None = None,
) -> App:
    """An ASGI app with the WebSocket, the HTTP routes and the panel for the jobs of `runner`.

    `auth` decides who is let in; without one it is the token in `<home>/serve.token`, which is made where
    it is missing. `places` has the lists of hosts and origins; without them a page must come from the host
    that it speaks to. `prefix` ("/jobs") is what stands in front of every path where whoever mounts the app
    does not take it away. `surroundings` is the environment and directory of jobs that are started here.

    The app starts with its first request or lifespan event. Call `close` before the runner is shut down.
    Raises `InvalidConfiguration`.
    """
    backend: Backend
    if hasattr(runner, "submit"):
        backend = RunnerBackend(runner, surroundings=surroundings)  # type: ignore[arg-type]
    else:
        backend = runner
    if auth is None:
        if backend.store.home is None:
            raise InvalidConfiguration("jobs in memory have no home to keep a token in: give `auth`")
        auth = TokenAuth(have_token(backend.store.home, backend.store.disk))
    return App(backend, auth=auth, places=places or Places(), prefix=prefix, static=static or STATIC)


class App:
    """Guarantees: nobody gets further than the open routes without being admitted; whatever one
    request or connection does, the others go on.

    Assumptions: used from one event loop at a time; `close` is called once nobody uses it any more.
    What the lock protects: whether it has started or closed.
    """

    def __init__(self, backend: Backend, *, auth: Auth, places: Places, prefix: str, static: Path) -> None:
        if prefix and (not prefix.startswith("/") or prefix.endswith("/")):
            raise InvalidConfiguration(f"a prefix begins with a slash and does not end with one, unlike {prefix!r}")
        self.backend = backend
        self.store = backend.store
        self.auth = auth
        self.places = places
        self.prefix = prefix
        self.static = static
        self.feed = Feed(backend)
        self.logs = Logs(backend)
        self.conversations = Conversations(backend.store)
        self.metas = Metas(backend.store)
        self.connections: set[Connection] = set()
        self.streams = 0
        self.dropped = 0
        self.refused = 0
        #: ends a connection without waiting for its client, where the server offers that
        self.abort: Callable[[Scope], object] = lambda scope: None
        #: whether the server has as many connections as it may
        self.crowded: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._started = False
        self.closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forget: Callable[[], None] = lambda: None
        self._readers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="openjobs server read")
        self._writers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="openjobs server write")
        self._router: Any = None

    # --- life ---

    def start(self) -> None:
        """Begin to read the home. Done by the first request, too."""
        with self._lock:
            if self._started or self.closing:
                return
            self._started = True
        self._routes()
        self._forget = self.feed.listen(self._ring)
        self.feed.start()

    def begin_close(self) -> None:
        """From any thread: every WebSocket is closed with 1012, every stream ends, nobody new is let in."""
        self.closing = True
        self._call_soon(self._close_connections)

    def close(self) -> None:
        """End the app's threads. Twice is once. The runner and its store stay open."""
        with self._lock:
            started, self._started = self._started, False
            self.closing = True
        if started:
            self._forget()
            self.feed.close()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        self.backend.close()

    def _close_connections(self) -> None:
        for connection in list(self.connections):
            connection.end(1012, "the server ends or restarts")

    def _ring(self) -> None:
        """On the feed's threads."""
        self._call_soon(self._wake_connections)

    def _call_soon(self, call: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop is closed: nobody is left to be told

    def _wake_connections(self) -> None:
        for connection in list(self.connections):
            connection.wake()
        # So many frames a second cost more than the wait for the next ones does.
        self.feed.gather_s = min(0.005 + len(self.connections) * 0.0001, 0.03)

    async def work(self, call: Callable[..., T], *args: Any) -> T:
        """`call` on a worker thread: whatever may wait for a disk."""
        return await self._on(self._readers, call, *args)

    async def change(self, call: Callable[..., T], *args: Any) -> T:
        """As `work`, for what commits: a session that somebody keeps locked must not keep others from reading."""
        return await self._on(self._writers, call, *args)

    async def _on(self, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        if self.closing:
            raise Closed("the server is ending")
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)

    # --- ASGI ---

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            return
        self._loop = asyncio.get_running_loop()
        self.start()
        scope = dict(scope)
        headers = headers_of(scope)
        send = self._guarded(scope, headers, send)
        try:
            if not self._strip(scope) and scope["type"] == "http":
                await _to_the_slash(scope, send)  # addresses in the panel are relative
                return
            await self._admit(scope, headers)
        except Refusal as refusal:
            self.refused += 1
            await refuse(scope, receive, send, refusal)
            return
        from starlette.requests import ClientDisconnect

        try:
            await self._routes()(scope, receive, send)
        except ClientDisconnect:
            pass  # it left in the middle of its request, or of our answer: nobody is there to be answered
        except Exception:
            log.exception("%s failed", scope["path"])
            raise

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._loop = asyncio.get_running_loop()
                self.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                self.begin_close()
                await asyncio.to_thread(self.close)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _admit(self, scope: Scope, headers: dict[str, list[str]]) -> None:
        """Raises `Refusal`. Who it is goes into the state."""
        path: str = scope["path"][len(scope["root_path"]) :]
        is_socket = scope["type"] == "websocket"
        method = "WEBSOCKET" if is_socket else scope["method"]
        if not is_socket and self.crowded():
            raise Refusal(503, "unavailable", "too many connections are open; close one", {"connection": "close"})
        files = method in ("GET", "HEAD") and _OPEN_FILE.match(path) is not None
        check_places(self.places.here(scope), headers, navigation=files)
        if self.closing:
            raise Refusal(503, "unavailable", "the server is ending")
        if files or (method, path) in _OPEN:
            return
        found = self.auth.admit(headers, scope)
        admitted = await found if isinstance(found, Awaitable) else found
        if admitted is None:
            raise Refusal(401, "unauthorised", "log in first: `openjobs serve --url` prints a link")
        if admitted.by_cookie and (is_socket or method in _CHANGING):
            check_origin_given(headers)
        scope.setdefault("state", {})
        scope["state"] = {**scope["state"], "admitted": admitted}

    def _strip(self, scope: Scope) -> str:
        """The path below the app; the rest goes into the root path. Raises `Refusal` for one that is not below it."""
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and (path == root or path.startswith(root + "/")):
            path = path[len(root) :]
        if self.prefix:
            if path != self.prefix and not path.startswith(self.prefix + "/"):
                raise Refusal(404, "not_found", "there is nothing at that address")
            path = path[len(self.prefix) :]
            root += self.prefix
        scope["root_path"] = root
        scope["path"] = root + path
        return path

    def _guarded(self, scope: Scope, headers: dict[str, list[str]], send: Send) -> Send:
        """Puts what every answer must have in front of what it has."""
        policy = self._policy(headers)

        async def guarded(message: Any) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                given = list(message.get("headers", []))
                names = {name.lower() for name, _ in given}
                more = [pair for pair in (*HEADERS, policy) if pair[0] not in names]
                if b"cache-control" not in names:
                    more.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*given, *more]}
            await send(message)

        return guarded

    def _policy(self, headers: dict[str, list[str]]) -> tuple[bytes, bytes]:
        host = headers.get("host", [""])[0]
        # Browsers that do not count a WebSocket of the same host as 'self' need it named.
        socket = f" ws://{host} wss://{host}" if _HOST.match(host) else ""
        text = (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
            f"connect-src 'self'{socket}; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        return b"content-security-policy", text.encode("ascii")

    def _routes(self) -> Any:
        if self._router is None:
            from .http import router

            self._router = router(self)
        return self._router


async def _to_the_slash(scope: Scope, send: Send) -> None:
    location = (scope["path"] + "/").encode("utf-8", "replace")
    if location.startswith(b"//"):
        raise Refusal(404, "not_found", "there is nothing at that address")
    headers = [(b"location", location), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 307, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def refuse(scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
    """The answer to who is not let in; to a WebSocket before it is open, where the server can say more than no."""
    body = orjson.dumps({"error": refusal.as_fields()})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    kind = "http"
    if scope["type"] == "websocket":
        await receive()  # websocket.connect
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 4401 if refusal.status == 401 else 4403})
            return
        kind = "websocket.http"
    await send({"type": f"{kind}.response.start", "status": refusal.status, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})


def expired(admitted: Admitted | None) -> bool:
    return admitted is not None and admitted.until_s is not None and time.time() >= admitted.until_s
