"""The HTTP routes: thin faces over `calls`, the panel's files, logs, and what monitoring asks for."""

from __future__ import annotations

import asyncio
import logging
import mimetypes
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router, WebSocketRoute
from starlette.websockets import WebSocket

from .. import errors
from ..errors import InvalidInput, NotFound, OpenJobsError
from ..host.wire import decode, error_to_wire
from ..runlog import Stream
from .app import STREAM_LIMIT
from .calls import Calls
from .logs import READ_BYTES, Follower, Piece
from .rows import encoded
from .security import Refusal, TokenAuth
from .socket import Connection

if TYPE_CHECKING:
    from .app import App

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

BODY_BYTES = 1 << 20
#: pauses between two looks at a log that is followed
_PAUSE_S = (0.03, 0.3)
_KEEPALIVE_S = 15.0
_NUMBER = re.compile(r"[0-9]{1,15}\Z")
_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})\Z")

#: errors that are not the caller's mistake in the request itself; the first that fits counts
_STATUSES: tuple[tuple[type[OpenJobsError], int], ...] = (
    (errors.AmbiguousId, 409),
    (errors.NotFound, 404),
    (errors.IdempotencyConflict, 409),
    (errors.ParentFinished, 409),
    (errors.JobExists, 409),
    (errors.SessionExists, 409),
    (errors.InvalidTransition, 409),
    (errors.BadFrame, 400),
    (errors.InvalidInput, 400),
    (errors.SessionBusy, 503),
    (errors.StoreWriteFailed, 503),
    (errors.HostUnavailable, 503),
    (errors.HostBusy, 503),
    (errors.Closed, 503),
)


def status_of(error: BaseException) -> int:
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def answer(fields: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(fields), status, headers, media_type="application/json")


def failed(error: BaseException) -> Response:
    if isinstance(error, Refusal):
        return answer({"error": error.as_fields()}, error.status, error.headers)
    return answer({"error": error_to_wire(error)}, status_of(error))


def contained(handler: Handler) -> Handler:
    """Every error is an answer."""

    async def safe(request: Request) -> Response:
        try:
            return await handler(request)
        except (OpenJobsError, Refusal) as error:
            return failed(error)
        except (asyncio.CancelledError, ClientDisconnect):
            raise
        except Exception as error:
            log.exception("%s failed", request.url.path)
            return failed(error)

    return safe


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises `Refusal`, `BadFrame`."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES:
            raise Refusal(413, "too_large", f"a body may have {BODY_BYTES:,} bytes")
        parts.append(part)
    if not size:
        return {}
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "invalid_input", "a body must be application/json")
    return decode(b"".join(parts))


def router(app: App) -> Router:
    routes = Routes(app)
    methods: dict[str, set[str]] = {}

    class Only(Route):
        """One method at an address; what no route there takes is an error like the others."""

        def __init__(self, path: str, handler: Handler, method: str) -> None:
            super().__init__(path, contained(handler), methods=[method])
            methods.setdefault(path, set()).update(self.methods or ())

        async def handle(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["method"] in (self.methods or ()):
                await super().handle(scope, receive, send)
                return
            allowed = ", ".join(sorted(methods[self.path]))
            refusal = Refusal(405, "invalid_input", f"that address takes {allowed} only", {"allow": allowed})
            await failed(refusal)(scope, receive, send)

    def get(path: str, handler: Handler) -> Route:
        return Only(path, handler, "GET")

    def post(path: str, handler: Handler) -> Route:
        return Only(path, handler, "POST")

    async def connect(socket: WebSocket) -> None:
        await Connection(app, socket).serve()

    async def missing(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).close(4404)
            return
        response = answer({"error": {"code": "not_found", "message": "there is nothing at that address"}}, 404)
        await response(scope, receive, send)

    return Router(
        [
            get("/healthz", routes.healthz),
            get("/metrics", routes.metrics),
            WebSocketRoute("/api/ws", connect),
            get("/api/about", routes.about),
            get("/api/jobs", routes.jobs),
            post("/api/jobs", routes.spawn),
            get("/api/jobs/{id}", routes.job),
            get("/api/jobs/{id}/history", routes.history),
            post("/api/jobs/{id}/cancel", routes.cancel),
            post("/api/cancel", routes.cancel_many),
            get("/api/processes/{id}", routes.process),
            post("/api/processes/{id}/stop", routes.stop),
            get("/api/log/{id}", routes.log),
            get("/api/log/{id}/stream", routes.log_stream),
            get("/api/sessions", routes.sessions),
            get("/api/sessions/{id}/conversation", routes.conversation),
            post("/api/sessions/{id}/checkout", routes.checkout),
            get("/api/profiles", routes.profiles),
            post("/api/login", routes.login),
            post("/api/logout", routes.logout),
            get("/", routes.index),
            get("/{name}", routes.file),
            get("/assets/{name}", routes.asset),
        ],
        redirect_slashes=False,
        default=missing,
    )


class Routes:
    def __init__(self, app: App) -> None:
        self._app = app
        self._calls = Calls(app)

    async def _ask(self, call: Callable[..., Any], *args: Any, status: int = 200) -> Response:
        """The call and its encoding both on a worker thread: an answer may be long."""
        return await self._app.work(lambda: answer(call(*args), status))

    async def _change(self, call: Callable[..., Any], *args: Any) -> Response:
        return await self._app.change(lambda: answer(call(*args)))

    # --- jobs and processes ---

    async def about(self, request: Request) -> Response:
        return await self._ask(self._calls.about)

    async def jobs(self, request: Request) -> Response:
        query = _query(request, "session", "status", "agent", "q", "kind", "parent", "message", "before", "limit")
        fields: dict[str, Any] = {
            "session_id": query.get("session"),
            "agent_id": query.get("agent"),
            "text": query.get("q"),
            "kind": query.get("kind"),
            "parent_job_id": query.get("parent"),
            "parent_msg_id": query.get("message"),
            "before": query.get("before"),
            "limit": _number(query, "limit"),
        }
        if "status" in query:
            fields["status_filter"] = [name for name in query["status"].split(",") if name]
        wanted = {name: value for name, value in fields.items() if value not in (None, "")}
        return await self._ask(self._calls.list_jobs, wanted)

    async def spawn(self, request: Request) -> Response:
        return answer(await self._calls.spawn_and_wait(await body_of(request)), 201)

    async def job(self, request: Request) -> Response:
        return await self._ask(self._calls.get_job, {"job_id": request.path_params["id"]})

    async def history(self, request: Request) -> Response:
        return await self._ask(self._calls.history, {"job_id": request.path_params["id"]})

    async def cancel(self, request: Request) -> Response:
        fields = {**await body_of(request), "job_id": request.path_params["id"]}
        return await self._change(self._calls.cancel_job, fields)

    async def cancel_many(self, request: Request) -> Response:
        return await self._change(self._calls.cancel_jobs, await body_of(request))

    async def process(self, request: Request) -> Response:
        return await self._ask(self._calls.get_task, {"task_id": request.path_params["id"]})

    async def stop(self, request: Request) -> Response:
        fields = {**await body_of(request), "task_id": request.path_params["id"]}
        return await self._change(self._calls.stop_task, fields)

    # --- sessions ---

    async def sessions(self, request: Request) -> Response:
        return await self._ask(self._calls.sessions)

    async def conversation(self, request: Request) -> Response:
        query = _query(request, "head", "before", "limit")
        fields = {
            "session_id": request.path_params["id"],
            "head": query.get("head") or None,
            "before": query.get("before") or None,
            "limit": _number(query, "limit"),
        }
        return await self._ask(self._calls.conversation, fields)

    async def checkout(self, request: Request) -> Response:
        fields = {**await body_of(request), "session_id": request.path_params["id"]}
        return await self._change(self._calls.checkout, fields)

    async def profiles(self, request: Request) -> Response:
        return await self._ask(self._calls.profiles)

    # --- logs ---

    async def log(self, request: Request) -> Response:
        query = _query(request, "offset", "limit", "tail", "stream", "download")
        stream = _stream(query)
        run = await self._app.work(self._app.logs.find, request.path_params["id"])
        if query.get("download"):
            return await self._download(run, stream)
        offset, limit = _number(query, "offset") or 0, min(_number(query, "limit") or READ_BYTES, READ_BYTES)
        ranged = _RANGE.match(request.headers.get("range", ""))
        if ranged is not None:
            offset = int(ranged[1])
            limit = min(int(ranged[2]) - offset + 1 if ranged[2] else READ_BYTES, READ_BYTES)
            if limit < 1:
                raise InvalidInput("a range ends behind its beginning")
        tail = _number(query, "tail")
        if tail is not None:
            size = (await self._app.work(self._app.logs.read, run, 0, 0, stream)).size
            offset, limit = max(size - tail, 0), min(tail, READ_BYTES)
        piece: Piece = await self._app.work(self._app.logs.read, run, offset, limit, stream)
        if ranged is not None and not piece.data:
            said = f"the range begins behind the end: {piece.size:,} bytes are there"
            raise Refusal(416, "invalid_input", said, {"content-range": f"bytes */{piece.size}"})
        response = Response(piece.data, 206 if ranged is not None else 200)
        self._say_what_it_is(response, piece)
        if ranged is not None:
            response.headers["content-range"] = f"bytes {piece.offset}-{piece.next_offset - 1}/{piece.size}"
        return response

    @staticmethod
    def _say_what_it_is(response: Response, piece: Piece) -> None:
        response.headers["content-type"] = "text/plain; charset=utf-8"
        response.headers["content-security-policy"] = "default-src 'none'; sandbox; frame-ancestors 'none'"
        response.headers["accept-ranges"] = "bytes"
        response.headers["x-log-offset"] = str(piece.offset)
        response.headers["x-log-next-offset"] = str(piece.next_offset)
        response.headers["x-log-size"] = str(piece.size)
        response.headers["x-log-complete"] = "true" if piece.complete else "false"

    async def _download(self, run: Any, stream: Stream | None) -> Response:
        first: Piece = await self._app.work(self._app.logs.read, run, 0, READ_BYTES, stream)

        async def pieces() -> AsyncIterator[bytes]:
            """What was there when it was asked for."""
            piece = first
            while piece.data:
                yield piece.data
                left = first.size - piece.next_offset
                if left <= 0:
                    return
                limit = min(left, READ_BYTES)
                piece = await self._app.work(self._app.logs.read, run, piece.next_offset, limit, stream)

        response = StreamingResponse(pieces())
        self._say_what_it_is(response, first)
        response.headers["content-length"] = str(first.size)
        name = quote(f"{run.run_id}{'.' + stream.value if stream else ''}.log", safe=".-_")
        response.headers["content-disposition"] = f'attachment; filename="{name}"'
        return response

    async def log_stream(self, request: Request) -> Response:
        query = _query(request, "offset")
        last = request.headers.get("last-event-id", "")
        offset = int(last) if _NUMBER.match(last) else _number(query, "offset") or 0
        if self._app.streams >= STREAM_LIMIT:
            raise Refusal(503, "unavailable", f"{STREAM_LIMIT} logs are followed already; close one")
        follower = Follower(self._app.logs, request.path_params["id"], offset)
        response = StreamingResponse(self._followed(follower), media_type="text/event-stream")
        response.headers["x-accel-buffering"] = "no"
        return response

    async def _followed(self, follower: Follower) -> AsyncIterator[bytes]:
        self._app.streams += 1
        try:
            pause, longest = _PAUSE_S
            quiet = 0.0
            yield b"retry: 1000\n\n"
            while not self._app.closing:
                events = await self._app.work(follower.look)
                for name, offset, fields in events:
                    mark = "" if offset is None else f"id: {offset}\n"
                    yield f"event: {name}\n{mark}data: {encoded(fields).decode()}\n\n".encode()
                if follower.over:
                    return
                if follower.moved:
                    pause = _PAUSE_S[0]
                    quiet = 0.0
                    continue
                await asyncio.sleep(pause)
                quiet += pause
                pause = min(pause * 1.5, longest)
                if quiet >= _KEEPALIVE_S:
                    quiet = 0.0
                    yield b": still here\n\n"
        except errors.Closed:
            return
        finally:
            self._app.streams -= 1

    # --- logins ---

    async def login(self, request: Request) -> Response:
        auth = self._app.auth
        if not isinstance(auth, TokenAuth):
            raise NotFound("logins are the business of the program that this server is part of")
        fields = await body_of(request)
        code, token = fields.get("code"), fields.get("token")
        good = (isinstance(code, str) and auth.use_code(code)) or (isinstance(token, str) and auth.is_token(token))
        if not good:
            raise Refusal(401, "unauthorised", "this login is not good (any more); `openjobs serve --url` makes one")
        response = Response(status_code=204)
        response.headers["set-cookie"] = auth.cookie(secure=request.url.scheme == "https", path=_cookie_path(request))
        return response

    async def logout(self, request: Request) -> Response:
        response = Response(status_code=204)
        auth = self._app.auth
        if isinstance(auth, TokenAuth):
            secure = request.url.scheme == "https"
            response.headers["set-cookie"] = auth.no_cookie(secure=secure, path=_cookie_path(request))
        return response

    # --- monitoring ---

    async def healthz(self, request: Request) -> Response:
        return answer({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        from .metrics import CONTENT_TYPE, written

        text = await self._app.work(written, self._app)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    # --- the panel's files ---

    async def index(self, request: Request) -> Response:
        page = self._app.static / "index.html"
        if not page.is_file():
            return Response(_NO_PANEL, media_type="text/html; charset=utf-8")
        return await self._file(page, "no-cache")

    async def asset(self, request: Request) -> Response:
        return await self._file(
            self._app.static / "assets" / request.path_params["name"], "public, max-age=31536000, immutable"
        )

    async def file(self, request: Request) -> Response:
        return await self._file(self._app.static / request.path_params["name"], "no-cache")

    async def _file(self, path: Path, caching: str) -> Response:
        """One file right in its folder: the admission let only plain names through."""

        def read() -> bytes | None:
            try:
                if path.is_symlink() or not path.is_file():
                    return None
                return path.read_bytes()
            except (OSError, ValueError):
                return None

        data = await self._app.work(read)
        if data is None:
            raise Refusal(404, "not_found", "there is nothing at that address")
        kind = _KINDS.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return Response(data, headers={"content-type": kind, "cache-control": caching})


_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".map": "application/json",
}

_NO_PANEL = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>openjobs</title></head>
<body><h1>openjobs is running</h1>
<p>The panel's files are not part of this installation: it was made from a source tree, where they are not kept.</p>
<p>To get them, run <code>nox -s panel</code> in the source tree, and then <code>pip install '.[server]'</code> once
more (an editable installation needs only the first). Then load this page again.</p>
<p>The API works without them: see docs/server.md.</p></body></html>
"""


def _cookie_path(request: Request) -> str:
    return str(request.scope.get("root_path") or "") + "/"


def _query(request: Request, *allowed: str) -> dict[str, str]:
    """Raises `InvalidInput` for a parameter that nobody reads, or one that is given twice."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in allowed:
            raise InvalidInput(
                f"there is no parameter {name[:40]!r} here; there is {', '.join(allowed)}", field=name[:40]
            )
        if name in found:
            raise InvalidInput(f"the parameter {name!r} is given twice", field=name)
        found[name] = value
    return found


def _number(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None or text == "":
        return None
    if not _NUMBER.match(text):
        raise InvalidInput(f"{name} must be a whole number from 0", field=name)
    return int(text)


def _stream(query: dict[str, str]) -> Stream | None:
    text = query.get("stream")
    if text in (None, "", "mixed"):
        return None
    try:
        return Stream(text)
    except ValueError as error:
        raise InvalidInput("stream must be 'stdout', 'stderr' or 'mixed'", field="stream") from error
