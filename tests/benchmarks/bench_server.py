"""The server under 200 clients and 50 transitions a second, and with 10,000 jobs: latency, memory, first list."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult
from openjobs.server import Places, TokenAuth, create_app
from openjobs.server.serving import Serving, listen_on_loopback

TOKEN = "a-token-of-the-benchmark-0123456789abcdef"
CLIENTS = 200
TRANSITIONS_A_SECOND = 50
SECONDS = 30
JOBS = 10_000
#: of another process than the server's
ELSEWHERE = 50

_EVENT = re.compile(rb'"event":"job_status"[^{}]*?"job_id":"([0-9a-f-]{36})","status":"(\w+)"')


# --- the server's side, a process of its own -------------------------------------------------------------------


def serve(home: Path, transitions: int, seconds: float) -> None:
    """Answers until its standard input ends. Jobs (three transitions each) are submitted at a steady pace."""
    store = GitJobStore(home)
    runner = JobRunner(store, sync_fn=lambda request, event: TurnResult(final_text="done"), workers=4)
    told: list[tuple[str, str, float]] = []
    listener = listen_on_loopback(0)
    app = create_app(runner, auth=TokenAuth(TOKEN), places=Places.loopback(listener.getsockname()[1]))
    serving = Serving(app, [listener])
    began = time.monotonic()
    serving.start()
    app.feed.until_loaded(120)
    loaded = time.monotonic() - began
    print(json.dumps({"port": listener.getsockname()[1], "loaded_s": loaded, "rows": len(app.feed)}), flush=True)

    subscription = runner.subscribe(65_536)

    def note() -> None:
        """When the runner told of each transition: it is durable then."""
        while (event := subscription.get()) is not None:
            if event.kind == "job_status":
                told.append((event.job_id, event.status, time.monotonic()))

    noting = threading.Thread(target=note)
    noting.start()
    for line in sys.stdin:
        if line.strip() == "go":
            _submit(runner, store, transitions, seconds)
            runner.wait_idle(60)
            print(json.dumps({"done": True}), flush=True)
        elif line.strip() == "stop":
            began = time.monotonic()
            serving.stop()
            stopped = time.monotonic() - began
            subscription.close()
            noting.join()
            print(json.dumps({"stop_s": stopped, "told": told}), flush=True)
    listener.close()
    runner.shutdown()
    store.close()


def _submit(runner: JobRunner, store: GitJobStore, transitions: int, seconds: float) -> None:
    if not store.has_session("bench"):
        store.create_session("bench")
    pause = 3 / transitions
    due = time.monotonic()
    pending = []
    for number in range(int(seconds / pause)):
        pending.append(runner.submit_later(SpawnRequest(prompt=f"job {number}", parent_session_id="bench")))
        due += pause
        time.sleep(max(due - time.monotonic(), 0.0))
    for future in pending:
        future.result()


# --- the clients' side -----------------------------------------------------------------------------------------


class Listener(asyncio.Protocol):
    """As little WebSocket as it takes to note when each event came."""

    seen: dict[bytes, list[tuple[str, str]]] = {}  # noqa: RUF012  # shared: every client gets the same frames

    def __init__(self, port: int) -> None:
        self._port = port
        self._buffer = bytearray()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrived: list[tuple[list[tuple[str, str]], float]] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        head = f"GET /api/ws HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        self.transport.write((head + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n").encode())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self.opened.done():
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            assert b" 101 " in self._buffer[:end].split(b"\r\n")[0], bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            request = b'{"action":"subscribe"}'
            self.transport.write(b"\x81" + bytes([0x80 | len(request)]) + b"\0\0\0\0" + request)
            self.opened.set_result(None)
        now = time.monotonic()
        while (frame := self._frame()) is not None:
            events = self.seen.get(frame)
            if events is None:
                events = [(job.decode(), status.decode()) for job, status in _EVENT.findall(frame)]
                if len(self.seen) > 64:
                    self.seen.clear()
                self.seen[frame] = events
            if events:
                self.arrived.append((events, now))

    def _frame(self) -> bytes | None:
        if len(self._buffer) < 2:
            return None
        length, at = self._buffer[1] & 0x7F, 2
        if length == 126:
            length, at = struct.unpack_from("!H", self._buffer, 2)[0], 4
        elif length == 127:
            length, at = struct.unpack_from("!Q", self._buffer, 2)[0], 10
        if len(self._buffer) < at + length:
            return None
        frame = bytes(self._buffer[at : at + length])
        if self._buffer[0] & 0x0F == 9:  # a ping
            self.transport.write(b"\x8a" + bytes([0x80 | length]) + b"\0\0\0\0" + frame)
        del self._buffer[: at + length]
        return frame


class Server:
    def __init__(self, home: Path, transitions: int, seconds: float) -> None:
        command = [sys.executable, __file__, "--serve", str(home), str(transitions), str(seconds)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    @property
    def memory_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6


async def broadcast(home: Path, clients: int, transitions: int, seconds: float) -> None:
    server = Server(home, transitions, seconds)
    loop = asyncio.get_running_loop()
    port = server.about["port"]
    listeners: list[Listener] = []
    for _ in range(clients):
        _, listener = await loop.create_connection(lambda: Listener(port), "127.0.0.1", port)
        await listener.opened
        listeners.append(listener)
    memory = [server.memory_mb]
    processor = psutil.Process(server.process.pid).cpu_times()
    began = time.monotonic()
    server.say("go")
    done = asyncio.create_task(asyncio.to_thread(server.read))
    while not done.done():
        await asyncio.wait([done], timeout=seconds / 10)
        memory.append(server.memory_mb)
    took = time.monotonic() - began
    used = psutil.Process(server.process.pid).cpu_times()
    await asyncio.sleep(1.0)
    server.say("stop")
    ended = await asyncio.to_thread(server.read)
    told = {(job_id, status): at for job_id, status, at in ended["told"]}
    late: list[float] = []
    for listener in listeners:
        for events, at in listener.arrived:
            late += [(at - told[event]) * 1000 for event in events if event in told]
        listener.transport.close()
    server.close()
    late.sort()
    print(f"{clients} clients, {len(told) / took:.0f} transitions a second for {took:.0f} s: {len(late):,} deliveries")
    missing = clients * len(told) - len(late)
    print(f"  not delivered: {missing}")
    for name, share in (("median", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
        print(f"  broadcast latency {name:<6} {late[int(len(late) * share)]:8.1f} ms")
    busy = used.user + used.system - processor.user - processor.system
    print(f"  processor time of the server {100 * busy / took:.0f} % of one core")
    first, middle, last = memory[0], memory[len(memory) // 2], memory[-1]
    print(f"  memory {first:.0f} MB at first, {middle:.0f} in the middle, {last:.0f} at the end")
    print(f"  stop with {clients} open sockets {ended['stop_s']:.2f} s")


async def from_elsewhere(home: Path, jobs: int) -> None:
    """Jobs of another process than the server's: from "durable there" to a client that is told."""
    server = Server(home, 0, 0)
    loop = asyncio.get_running_loop()
    port = server.about["port"]
    _, listener = await loop.create_connection(lambda: Listener(port), "127.0.0.1", port)
    await listener.opened

    def ends() -> dict[tuple[str, str], float]:
        """This process stands for the other one."""
        found = {}
        with GitJobStore(home) as store, JobRunner(store, 1, lambda request, event: TurnResult()) as runner:
            for _ in range(jobs):
                job = runner.submit(SpawnRequest(prompt="elsewhere", parent_session_id="bench"))
                runner.await_job(job.job_id, 60)
                found[job.job_id, "completed"] = time.monotonic()
        return found

    ended = await asyncio.to_thread(ends)
    await asyncio.sleep(2.0)
    server.say("stop")
    await asyncio.to_thread(server.read)
    listener.transport.close()
    server.close()
    seen = {event: at for events, at in listener.arrived for event in events}
    late = sorted((seen[event] - at) * 1000 for event, at in ended.items() if event in seen)
    print(f"{jobs} jobs of another process, {len(ended) - len(late)} of them not told")
    print(f"  from its end there to a client: median {statistics.median(late):.0f} ms, slowest {late[-1]:.0f} ms")


def lists(home: Path, jobs: int) -> None:
    """A home with many jobs: how long until the server has read it, and what lists cost."""
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("many")
        runner = JobRunner(store, sync_fn=lambda request, event: TurnResult(final_text="done"), workers=4)
        for _ in range(jobs // 500):
            asked = [SpawnRequest(prompt=f"job {n}", parent_session_id="many") for n in range(500)]
            for future in [runner.submit_later(request) for request in asked]:
                future.result()
            runner.wait_idle(120)
        runner.shutdown()
    server = Server(home, 0, 0)
    print(f"{server.about['rows']:,} jobs in one session: read in {server.about['loaded_s']:.2f} s")
    connection = http.client.HTTPConnection("127.0.0.1", server.about["port"])
    paths = [
        *(
            "jobs?limit=100",
            "jobs?session=many&limit=100",
            "jobs?status=completed&limit=100",
            "jobs?q=job+49&limit=100",
        ),
        *("sessions", "sessions/many/conversation"),
    ]
    for path in paths:
        times = []
        for _ in range(50):
            began = time.perf_counter()
            connection.request("GET", f"/api/{path}", headers={"Authorization": f"Bearer {TOKEN}"})
            body = connection.getresponse().read()
            times.append((time.perf_counter() - began) * 1000)
        first, times = times[0], sorted(times)
        print(
            f"  GET {path:<36} first {first:7.1f} ms   median {statistics.median(times):6.1f} ms"
            f"   p99 {times[int(len(times) * 0.99)]:6.1f} ms   {len(body) / 1000:.0f} KB"
        )
    print(f"  memory of the server {server.memory_mb:.0f} MB")
    server.say("stop")
    server.read()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--transitions", type=int, default=TRANSITIONS_A_SECOND)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve[0]), int(options.serve[1]), float(options.serve[2]))
        return
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="oj-bench-") as name:
        asyncio.run(broadcast(Path(name) / "h", options.clients, options.transitions, options.seconds))
        asyncio.run(from_elsewhere(Path(name) / "h", ELSEWHERE))
    if options.jobs:
        with tempfile.TemporaryDirectory(prefix="oj-bench-") as name:
            lists(Path(name) / "h", options.jobs)


if __name__ == "__main__":
    main()
