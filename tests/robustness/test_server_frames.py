"""Whatever a client sends, or does not read, costs that client only. 003, D9; R10 and R11."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from openjobs import JobRunner
from openjobs.server import App
from tests.support import eventually
from tests.support.chaos import Chaos
from tests.support.jobs import job_for
from tests.support.markup import PAYLOADS, harmless
from tests.support.server import TOKEN, Client, home_with_runner, raw, serving
from tests.support.turns import Turns

pytestmark = pytest.mark.timeout(180)

ACTIONS = [
    *("spawn_job", "list_jobs", "get_job", "cancel_job", "cancel_jobs", "cancel_session", "await_jobs"),
    *("get_task", "stop_task", "subscribe", "unsubscribe", "ping", "nothing", "", "shutdown"),
]
FIELDS = [
    *("session_id", "prompt", "description", "agent_id", "context", "wait", "job_id", "job_ids", "reason", "mode"),
    *("timeout_s", "status_filter", "limit", "before", "kind", "text", "epoch", "after_seq", "since", "task_id"),
    *("grace_s", "request_id", "parent_job_id", "metadata", "cwd", "foreground", "create_session", "__class__", ""),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**53, 2**70, -(2**70), 1.5, 1e308, "", "s1", "x" * 5000, "\u0000", "\ud800"),
    *("../../etc/passwd", "-rf", "é", "running", "all", "0", "ffffffff-ffff-4fff-bfff-ffffffffffff", "\u202e"),
    *([], [[]], [None], ["s1"], ["0123"] * 3, {}, {"a": {"b": [1]}}, {"": None}, list(range(2000))),
]


@pytest.fixture
def turns() -> Turns:
    return Turns(finish_at_once=True)


@pytest.fixture
def runner(tmp_path: Path, turns: Turns) -> Iterator[JobRunner]:
    with home_with_runner(tmp_path / "h", sync_fn=turns, workers=2) as (store, runner):
        store.create_session("s1")
        yield runner


@pytest.fixture
def served(runner: JobRunner) -> Iterator[tuple[Client, App]]:
    with serving(runner) as found:
        yield found


def frames(seed: int, count: int) -> Iterator[str]:
    """Requests that are nearly right, and texts that are nearly requests."""
    chance = random.Random(seed)
    for _ in range(count):
        fields = {chance.choice(FIELDS): chance.choice(VALUES) for _ in range(chance.randrange(6))}
        fields["action"] = chance.choice(ACTIONS) if chance.random() < 0.9 else chance.choice(VALUES)
        if fields.get("action") == "await_jobs":
            fields["timeout_s"] = 0
        text = json.dumps(fields)
        match chance.randrange(8):
            case 0:
                yield text[: chance.randrange(len(text))]
            case 1:
                place = chance.randrange(len(text))
                yield text[:place] + chr(chance.randrange(1, 0x300)) + text[place + 1 :]
            case 2:
                yield text + text
            case _:
                yield text


@pytest.mark.parametrize("seed", range(3))
def test_nearly_right_frames(served: tuple[Client, App], seed: int, chaos: Chaos) -> None:
    """Each gets an answer or an error with a code of ours, the connection stays, and so does everybody else's."""
    client, _ = served
    with client.open() as good, client.open() as bad:
        good.ask("subscribe")
        for number, frame in enumerate(frames(seed, chaos.rounds(150, 3_000, "frames"))):
            bad.connection.send(frame)
            if number % 10 == 9:
                time_to_breathe(bad)
        time_to_breathe(bad)
        codes = {answer["error"]["code"] for answer in bad.answers if "error" in answer}
        assert "host_failed" not in codes, [a for a in bad.answers if a.get("error", {}).get("code") == "host_failed"]
        assert codes
        assert good.ask("ping")["now"]


def time_to_breathe(ws: Any) -> None:
    """Until everything that was sent before is answered, as far as the rate limit lets it be."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        ws.send(action="ping", request_id="breath")
        ws.take(20)
        if any(answer.get("request_id") == "breath" and "now" in answer for answer in ws.answers):
            ws.answers = [answer for answer in ws.answers if answer.get("request_id") != "breath"]
            return
    raise AssertionError("the server does not answer any more")


def test_payloads_with_markup(served: tuple[Client, App]) -> None:
    """Two hundred jobs whose prompt, description and result are markup: what is HTML in an answer is harmless, what
    is text is as it was, and every answer says that it is JSON."""
    client, _ = served
    payloads = random.Random(7).sample(sorted(set(PAYLOADS)), 200)
    ids: list[str | None] = []
    with client.open() as ws:
        ws.ask("subscribe")
        for payload in payloads:
            ws.send(action="spawn_job", session_id="s1", prompt=payload, description=payload, request_id=payload[:150])
            answer = ws.answer(payload[:150])
            if answer.get("error", {}).get("code") == "invalid_input":
                ids.append(None)  # a NUL, for one
                continue
            ids.append(answer["job_id"])
            if len(ids) % 20 == 0:
                time_to_breathe(ws)
    assert len([each for each in ids if each]) > 190
    for payload, job_id in zip(payloads, ids, strict=True):
        if job_id is None:
            continue
        status, headers, body = client.request("GET", f"/api/jobs/{job_id}")
        assert (status, headers["content-type"]) == (200, "application/json")
        job = json.loads(body)
        assert job["prompt"] == payload
        for name, value in job.items():
            if name.endswith("_html") and value is not None:
                harmless(value)
    page = client.get("/api/sessions/s1/conversation?limit=200")
    for message in page["messages"]:
        harmless(message["content_html"])


def masked(first: int, payload: bytes, *, length: int | None = None, mask: bool = True) -> bytes:
    """A frame with a header that may lie."""
    size = len(payload) if length is None else length
    bit = 0x80 if mask else 0
    if size < 126:
        head = bytes([first, bit | size])
    elif size < 1 << 16:
        head = bytes([first, bit | 126]) + struct.pack("!H", size)
    else:
        head = bytes([first, bit | 127]) + struct.pack("!Q", size)
    return head + (b"\0\0\0\0" if mask else b"") + payload


def test_broken_protocol(served: tuple[Client, App]) -> None:
    """Reserved bits and codes, no mask, lengths that lie, fragments that never end, text that is no text."""
    client, app = served
    ping = b'{"action":"ping"}'
    broken = [
        masked(0x81, ping, mask=False),
        masked(0xF1, ping),
        masked(0x83, ping),
        masked(0x8B, ping),
        masked(0x80, ping),
        masked(0x81, b"\xff\xfe{}"),
        masked(0x81, b"\xed\xa0\x80"),
        masked(0x88, b"\x03"),
        masked(0x88, b"\x03\xe8\xff"),
        masked(0x89, b"x" * 126),
        masked(0x09, b"x"),
        masked(0x01, ping) + masked(0x81, ping),
        masked(0x81, ping, length=1 << 40),
        masked(0x81, ping, length=(1 << 63) + 5),
        masked(0x01, b"x" * 60_000) + masked(0x00, b"x" * 60_000) * 20,
        masked(0x82, b"\0" * 100),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 20,
    ]
    with client.open() as good:
        for data in broken:
            with socket.create_connection(("127.0.0.1", client.port), timeout=10) as sock:
                head = f"GET /api/ws HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nAuthorization: Bearer {TOKEN}\r\n"
                head += "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                sock.sendall((head + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n").encode())
                assert b" 101 " in sock.recv(4096)
                sock.sendall(data)
                sock.settimeout(0.3)
                try:
                    while sock.recv(65536):
                        pass
                except (TimeoutError, ConnectionError):
                    pass
            assert good.ask("ping")["now"]
        eventually(lambda: len(app.connections) == 1)


def test_broken_requests(served: tuple[Client, App]) -> None:
    """HTTP that is none, too long, too slow, smuggled: an error or a closed connection; the next one is served."""
    client, _ = served
    host = f"Host: 127.0.0.1:{client.port}\r\n"
    about = f"GET /api/about HTTP/1.1\r\n{host}Authorization: Bearer {TOKEN}\r\n"
    broken = [
        b"\0" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET /api/about\r\n\r\n",
        f"GET /api/about HTTP/1.1\r\n{host}{'X: y' * 40_000}\r\n\r\n".encode(),
        f"GET /{'a' * 100_000} HTTP/1.1\r\n{host}\r\n".encode(),
        f"{about}Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n".encode(),
        f"POST /api/jobs HTTP/1.1\r\n{host}Content-Length: -1\r\n\r\n".encode(),
        f"POST /api/jobs HTTP/1.1\r\n{host}Content-Length: 5, 6\r\n\r\nhello".encode(),
        f"GET /%ff%fe HTTP/1.1\r\n{host}\r\n".encode(),
        f"GET /api/jobs/%00 HTTP/1.1\r\n{host}Authorization: Bearer {TOKEN}\r\n\r\n".encode(),
        f"GET /api/jobs?q=%ff%00 HTTP/1.1\r\n{host}Authorization: Bearer {TOKEN}\r\n\r\n".encode(),
        f"OPTIONS * HTTP/1.1\r\n{host}\r\n".encode(),
        f"CONNECT evil.example:80 HTTP/1.1\r\n{host}\r\n".encode(),
        f"TRACE /api/about HTTP/1.1\r\n{host}Authorization: Bearer {TOKEN}\r\n\r\n".encode(),
    ]
    for data in broken:
        answer = raw(client.port, data, 1.0)
        status = answer.split(b" ")[1:2]
        assert answer == b"" or status[0][:1] in (b"4", b"2"), (data[:80], answer[:200])
        assert b"Traceback" not in answer
        if status == [b"200"]:
            assert b"epoch" in answer  # the search for odd bytes: an honest, empty list
    assert client.get("/api/about")["mode"] == "host"


def test_a_client_that_does_not_read_is_dropped(runner: JobRunner) -> None:
    """It holds no more than its socket, others hear everything meanwhile, and when it comes back it missed nothing."""
    process = psutil.Process()
    with serving(runner) as (client, app), ExitStack() as stack:
        good = stack.enter_context(client.open())
        about = good.ask("subscribe")
        slow = socket.create_connection(("127.0.0.1", client.port), timeout=10)
        stack.callback(slow.close)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"GET /api/ws HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        slow.sendall((head + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n").encode())
        assert b" 101 " in slow.recv(4096)
        slow.sendall(masked(0x81, b'{"action":"subscribe"}'))
        eventually(lambda: len(app.connections) == 2)
        memory = process.memory_info().rss
        put = 0
        end = time.monotonic() + 60
        while app.dropped == 0 and time.monotonic() < end:
            for _ in range(200):
                app.feed.put_job(job_for(runner.store, "s1", "x" * 150))
                put += 1
            app.feed.ring()
            while sum(event["event"] == "task_created" for event in good.events) < put:
                good.take(20)
        assert app.dropped == 1
        assert process.memory_info().rss - memory < 150e6
        eventually(lambda: len(app.connections) == 1)
        assert [event["seq"] for event in good.events[1:]] == list(range(1, 2 * put + 1))
        with client.open() as again:
            answer = again.ask("subscribe", epoch=about["epoch"], after_seq=about["seq"])
            if answer["replayed"] is None:
                assert len(again.until("snapshot")["tasks"]) == min(put, 5_000)
            else:
                assert answer["replayed"] == 2 * put


def test_a_slow_client_that_reads_again_is_told_to_resync(runner: JobRunner) -> None:
    """It learns from the close code why it was dropped."""
    with serving(runner) as (client, app), client.open(max_queue=1) as ws:
        ws.ask("subscribe")
        ws.until("snapshot")
        put = 0
        end = time.monotonic() + 60
        while app.dropped == 0 and time.monotonic() < end:
            for _ in range(300):
                app.feed.put_job(job_for(runner.store, "s1", "x" * 150))
                put += 1
            app.feed.ring()
            time.sleep(0.01)  # the server's loop has its turn
        code = None
        try:
            while True:
                ws.take(20)
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd else None
        assert code == 4409


def test_connections_are_bounded(runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is told so, before it is open; when one leaves there is room again."""
    monkeypatch.setattr("openjobs.server.socket.CONNECTION_LIMIT", 5)
    with serving(runner) as (client, app), ExitStack() as stack:
        sockets = [stack.enter_context(client.open()) for _ in range(5)]
        assert b" 503 " in raw(client.port, handshake(client.port)).split(b"\r\n")[0]
        sockets[0].connection.close()
        eventually(lambda: len(app.connections) == 4)
        with client.open() as ws:
            assert ws.ask("ping")["now"]


def handshake(port: int) -> bytes:
    head = f"GET /api/ws HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    return (head + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n").encode()
