"""One WebSocket: requests in, answers and events out (spec 003, D9; docs/server.md, "WebSocket").

What one client sends, however malformed or much, costs that client only. Events are read from the
feed's shared ring at this connection's own place, so a slow client holds nothing but its place; one
that is too far behind is closed with 4409 and subscribes again where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from ..clock import to_text
from ..errors import BadFrame, InvalidInput, OpenJobsError
from ..host.wire import decode, error_to_wire
from .app import CONNECTION_LIMIT, expired
from .calls import ACTIONS, CHANGING, Calls, check_fields, session_of, text_of, whole_of
from .rows import encoded
from .security import Admitted, Refusal

if TYPE_CHECKING:
    from .app import App

log = logging.getLogger(__name__)

FRAME_BYTES = 1 << 20
FRAMES_A_SECOND = 50.0
FRAMES_AT_ONCE = 200.0
REFUSALS_IN_A_ROW = 1_000
UNDER_WAY = 64
#: how far behind a client may be
BEHIND_EVENTS = 2_000
BEHIND_BYTES = 8 << 20
#: how long a send may take before it is asked how far behind the client is
_SLOW_S = 0.5
#: how long a closing handshake may take
_CLOSE_S = 2.0

RESYNC = 4409
LOGIN_ENDED = 4401
TOO_MANY_FRAMES = 4429


class Connection:
    """Guarantees: an answer or error to every frame that is read, with its `request_id`; events in
    order, each once, none left out without a close code that says so."""

    def __init__(self, app: App, socket: WebSocket) -> None:
        self._app = app
        self._feed = app.feed
        self._socket = socket
        self._calls = Calls(app)
        self._admitted: Admitted | None = socket.scope.get("state", {}).get("admitted")
        self._bell = asyncio.Event()
        self._answers: set[asyncio.Task[None]] = set()
        self._sender: asyncio.Task[None] | None = None
        self._closer: asyncio.Task[None] | None = None
        self._ended = False
        #: the last event that was sent, and the one at which this subscription began
        self._place = 0
        self._begun = 0
        self._session_id: str | None = None
        self._sending_since: float | None = None
        self._frames = FRAMES_AT_ONCE
        self._framed_at = 0.0
        self._refused = 0

    # --- life ---

    async def serve(self) -> None:
        if len(self._app.connections) >= CONNECTION_LIMIT:
            from .app import refuse

            refusal = Refusal(503, "unavailable", f"{CONNECTION_LIMIT} connections are open already")
            await refuse(self._socket.scope, self._socket.receive, self._socket._send, refusal)
            return
        loop = asyncio.get_running_loop()
        self._framed_at = loop.time()
        self._app.connections.add(self)
        try:
            await self._socket.accept()
            await self._read()
        except (WebSocketDisconnect, OSError):
            pass  # it went away
        finally:
            self._app.connections.discard(self)
            self._ended = True
            await self._cancel_all()
            if self._closer is not None:
                await self._closer

    async def _cancel_all(self) -> None:
        tasks = [task for task in (*self._answers, self._sender) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, code: int, reason: str) -> None:
        """On the loop: close with that code, without waiting for the client for long."""
        if not self._ended and self._closer is None:
            self._closer = asyncio.ensure_future(self._close(code, reason))

    async def _close(self, code: int, reason: str) -> None:
        if self._sender is not None:
            self._sender.cancel()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.close(code, reason)
        except (TimeoutError, RuntimeError, OSError, WebSocketDisconnect):
            self._app.abort(self._socket.scope)

    # --- in ---

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if expired(self._admitted):
                self.end(LOGIN_ENDED, "the login has ended")
                return
            text = message.get("text")
            if not self._may():
                self._refused += 1
                if self._refused >= REFUSALS_IN_A_ROW:
                    self.end(TOO_MANY_FRAMES, "too many frames")
                    return
                await self._send_error(None, None, "rate_limited", "too many frames; wait a moment")
                continue
            self._refused = 0
            if text is None:
                await self._send_error(None, None, "bad_frame", "frames must be text")
                continue
            await self._take(text)

    def _may(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._frames = min(self._frames + (now - self._framed_at) * FRAMES_A_SECOND, FRAMES_AT_ONCE)
        self._framed_at = now
        if self._frames < 1:
            return False
        self._frames -= 1
        return True

    async def _take(self, text: str) -> None:
        request_id: Any = None
        action: Any = None
        try:
            if len(text) > FRAME_BYTES:
                raise BadFrame(f"a frame may have {FRAME_BYTES:,} bytes")
            # Lone surrogates cannot come in (a frame is UTF-8), but as escapes; each field is checked.
            fields = decode(text.encode())
            request_id = _request_id(fields.pop("request_id", None))
            action = fields.pop("action", None)
            if not isinstance(action, str):
                action = None
                raise InvalidInput("a request needs an action, as text", field="action")
            if len(self._answers) >= UNDER_WAY:
                busy = f"{UNDER_WAY} requests are under way; wait for an answer"
                await self._send_error(action, request_id, "rate_limited", busy)
                return
            self._begin(self._answer(action, request_id, fields))
            await asyncio.sleep(0)  # what needs no thread is answered before the next frame is read
        except OpenJobsError as error:
            await self._send_failure(action, request_id, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, action: str, request_id: Any, fields: dict[str, Any]) -> None:
        try:
            call = ACTIONS.get(action)
            if call is not None:
                on_thread = self._app.change if action in CHANGING else self._app.work
                await self._send(await on_thread(_encoded, action, request_id, call, self._calls, fields))
            elif action == "subscribe":
                await self._subscribe(request_id, fields)
            else:
                result = await self._other(action, fields)
                await self._send(_text({"action": action, "request_id": request_id, **result}))
        except asyncio.CancelledError:
            raise
        except (WebSocketDisconnect, RuntimeError) as error:
            if not self._ended:
                log.debug("an answer could not be sent: %s", error)
        except Exception as error:
            if not isinstance(error, OpenJobsError):
                log.exception("the action %s failed", action)
            await self._send_failure(action, request_id, error)

    async def _other(self, action: str, fields: dict[str, Any]) -> dict[str, Any]:
        match action:
            case "spawn_job":
                return await self._calls.spawn_and_wait(fields)
            case "await_jobs":
                return await self._calls.await_jobs(fields)
            case "unsubscribe":
                check_fields(action, fields, ())
                await self._stop_sending()
                return {}
            case "ping":
                check_fields(action, fields, ())
                now = to_text(self._app.store.clock.now())
                return {"now": now, "epoch": self._feed.epoch, "seq": self._feed.seq}
            case _:
                known = sorted([*ACTIONS, "spawn_job", "await_jobs", "subscribe", "unsubscribe", "ping"])
                raise InvalidInput(f"{action[:40]!r} is not an action; there are {', '.join(known)}", field="action")

    # --- out ---

    async def _subscribe(self, request_id: Any, fields: dict[str, Any]) -> None:
        check_fields("subscribe", fields, ("epoch", "after_seq", "since", "session_id"))
        epoch, since = text_of("subscribe", fields, "epoch", most=100), text_of("subscribe", fields, "since", most=100)
        after_seq = whole_of("subscribe", fields, "after_seq", 0, 2**53, None)
        session_id = session_of("subscribe", fields)
        await self._stop_sending()
        await self._app.work(self._feed.until_loaded)
        found = await self._app.work(self._feed.subscribe, epoch, after_seq, since, session_id)
        about = {"epoch": self._feed.epoch, "seq": found.seq, "replayed": found.replayed}
        await self._send(_text({"action": "subscribe", "request_id": request_id, **about}))
        if found.snapshot is not None:
            await self._send(found.snapshot)
        await self._stop_sending()  # two subscriptions at once: the later one counts
        self._place, self._begun, self._session_id = found.after_seq, found.seq, session_id
        self._sender = asyncio.ensure_future(self._send_events())

    async def _stop_sending(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sender

    def wake(self) -> None:
        """On the loop: there may be new events. Also when somebody looks whether this client still takes any."""
        self._bell.set()
        since = self._sending_since
        if since is not None and asyncio.get_running_loop().time() - since > _SLOW_S and self._is_behind():
            self._drop()

    def _is_behind(self) -> bool:
        """What was sent again on request does not count."""
        events, size = self._feed.behind(max(self._place, self._begun))
        return events > BEHIND_EVENTS or size > BEHIND_BYTES

    def _drop(self) -> None:
        if self._closer is None:
            self._app.dropped += 1
            self.end(RESYNC, "too far behind: connect again and subscribe with epoch and after_seq")

    async def _send_events(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._bell.clear()
                batch = self._feed.after(self._place, self._session_id)
                if batch is None or (self._place >= self._begun and self._is_behind()):
                    self._drop()
                    return
                if expired(self._admitted):
                    self.end(LOGIN_ENDED, "the login has ended")
                    return
                if batch.text is not None:
                    self._sending_since = loop.time()
                    await self._socket.send_text(batch.text)
                    self._sending_since = None
                self._place = batch.next_seq
                if not batch.more:
                    await self._bell.wait()
        except (WebSocketDisconnect, RuntimeError, OSError):
            pass  # it went away; the reader ends the rest

    async def _send(self, text: str) -> None:
        await self._socket.send_text(text)

    async def _send_failure(self, action: str | None, request_id: Any, error: BaseException) -> None:
        told = error_to_wire(error)
        await self._send_error(action, request_id, told["code"], told["message"])

    async def _send_error(self, action: str | None, request_id: Any, code: str, message: str) -> None:
        shown = None if action is None else action[:100]
        fields = {"action": shown, "request_id": request_id, "error": {"code": code, "message": message}}
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            await self._send(_text(fields))


def _encoded(action: str, request_id: Any, call: Any, calls: Calls, fields: dict[str, Any]) -> str:
    return _text({"action": action, "request_id": request_id, **call(calls, fields)})


def _text(fields: dict[str, Any]) -> str:
    return encoded(fields).decode()


def _request_id(value: Any) -> Any:
    """Text or a number, to be given back as it was."""
    if value is None:
        return None
    if isinstance(value, str):
        return text_of("request", {"request_id": value}, "request_id", most=200)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and abs(value) <= 2**53:
        return value
    raise InvalidInput("request_id must be text of at most 200 characters, or a number", field="request_id")
