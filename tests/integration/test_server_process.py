"""`openjobs serve` as a process: it is the host, or stands beside one and takes its place; links; signals; kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from openjobs.host.client import connect, ensure_host, spawn
from openjobs.host.config import prepare_home
from openjobs.jobs import SpawnRequest
from openjobs.server.security import read_token
from tests.support import eventually
from tests.support.server import Client

pytestmark = pytest.mark.timeout(180)


class Serve:
    """One `openjobs serve`, ended by the test."""

    def __init__(self, home: Path, *options: str, cwd: Path | None = None, port: int = 0) -> None:
        self.home = home
        command = [
            sys.executable,
            "-m",
            "openjobs",
            "--home",
            str(home),
            "--json",
            "serve",
            "--port",
            str(port),
            *options,
        ]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd(), "SERVED": "by me"},
            cwd=cwd,
        )

    def told(self) -> dict[str, Any]:
        """What it says about itself, next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        found: dict[str, Any] = json.loads(line)
        return found

    def client(self, told: dict[str, Any]) -> Client:
        return Client(told["port"], read_token(self.home))

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        status = self.process.wait(20)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return status


@pytest.fixture
def home(scratch: Path) -> Iterator[Path]:
    path = prepare_home(scratch / "h")
    yield path
    host = connect(path)
    if host is not None:
        with host:
            pid = host.about["pid"]
            host.call("shutdown")
        eventually(lambda: not _lives(pid), 20)
    shutil.rmtree(path)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def servers(home: Path) -> Iterator[Any]:
    made: list[Serve] = []

    def start(*options: str, **more: Any) -> Serve:
        made.append(Serve(home, *options, **more))
        return made[-1]

    yield start
    for each in made:
        each.end()


def openjobs(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "openjobs", "--home", str(home), *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )


class TestTheHost:
    def test_it_is_the_homes_host(self, home: Path, servers: Any, tmp_path: Path) -> None:
        """The command line uses its pool; a job that is started here has its environment and directory."""
        server = servers("--workers", "3", cwd=tmp_path)
        told = server.told()
        assert (told["mode"], told["home"]) == ("host", str(home))
        client = server.client(told)
        done = openjobs(home, "agent", "--agent", "shell", "--background", "echo hello")
        assert done.returncode == 0, done.stderr
        job_id = done.stdout.strip()
        found = eventually(lambda: (j := client.get(f"/api/jobs/{job_id}"))["status"] == "completed" and j, 30)
        assert found["runner_id"]
        with connect(home) as host:  # type: ignore[union-attr]
            assert host.about["pid"] == server.process.pid
        assert client.get("/api/about")["workers"] == 3
        with client.open() as ws:
            answer = ws.ask(
                "spawn_job",
                session_id="default",
                agent_id="shell",
                prompt="echo $SERVED; pwd",
                description="",
                wait=True,
            )
            result = ws.ask("get_job", job_id=answer["job_id"])["result_text"]
        assert result.split("\n")[:2] == ["by me", str(tmp_path)]
        assert server.end() == 128 + signal.SIGTERM
        assert not (home / "serve.sock").exists()
        assert not (home / "serve.json").exists()

    def test_a_second_one_is_refused_and_a_link_is_to_be_had(self, home: Path, servers: Any) -> None:
        """The error names the process; `--url` prints a link that gives one login."""
        assert openjobs(home, "serve", "--url").returncode == 3
        server = servers()
        told = server.told()
        second = openjobs(home, "serve", "--port", "0")
        assert second.returncode == 2
        assert str(server.process.pid) in second.stderr
        link = openjobs(home, "serve", "--url")
        assert link.returncode == 0
        code = re.fullmatch(rf"http://127\.0\.0\.1:{told['port']}/#login=(\S+)\n", link.stdout)
        assert code
        stranger = Client(told["port"], None)
        assert stranger.request("POST", "/api/login", {"code": code[1]})[0] == 204
        assert stranger.request("POST", "/api/login", {"code": code[1]})[0] == 401
        other = re.search(r"#login=(\S+)", told["url"])
        assert other
        assert stranger.request("POST", "/api/login", {"code": other[1]})[0] == 204

    def test_ctrl_c_is_its_normal_end(self, servers: Any) -> None:
        """Exit status 0, and a running job ends as a host's jobs do."""
        server = servers()
        client = server.client(server.told())
        client.post(
            "/api/jobs",
            {"session_id": "s", "prompt": "sleep 60", "agent_id": "shell", "create_session": True},
            201,
        )
        began = time.monotonic()
        assert server.end(signal.SIGINT) == 0
        assert time.monotonic() - began < 8.0

    def test_a_port_in_use(self, home: Path, servers: Any) -> None:
        """Is said, and nothing is left behind."""
        port = servers().told()["port"]
        other = home.with_name("other")
        try:
            done = openjobs(other, "serve", "--port", str(port))
            assert done.returncode == 2
            assert f"port {port} is in use" in done.stderr
        finally:
            shutil.rmtree(other, ignore_errors=True)


class TestBesideAHost:
    def test_an_idle_host_makes_room(self, home: Path, servers: Any) -> None:
        """Within seconds the server is the host, and what the old one did is there."""
        with ensure_host(home) as host:
            pid = host.about["pid"]
        server = servers()
        assert server.told()["mode"] == "host"
        eventually(lambda: not _lives(pid), 20)

    def test_a_busy_host_is_left_alone_and_its_place_taken_later(
        self, home: Path, servers: Any, tmp_path: Path
    ) -> None:
        """Attached, jobs are seen, started on that host's pool and stopped; when it leaves, the server is the host."""
        gate = tmp_path / "gate"
        script = f"echo so far; while ! test -e {gate}; do sleep 0.05; done; echo done"
        request = SpawnRequest(prompt=script, parent_session_id="default", agent_id="shell")
        job_id = spawn(home, request, environ=os.environ, create_session=True)["job_id"]
        server = servers()
        told = server.told()
        assert told["mode"] == "attached"
        client = server.client(told)
        with client.open() as ws:
            before = ws.ask("subscribe")
            eventually(lambda: client.get(f"/api/jobs/{job_id}")["status"] == "running", 20)
            other = ws.ask("spawn_job", session_id="default", agent_id="shell", prompt="sleep 60", description="other")
            ws.until("job_status", job_id=other["job_id"], status="running")
            runner = {client.get(f"/api/jobs/{each}")["runner_id"] for each in (job_id, other["job_id"])}
            assert len(runner) == 1, "one pool"
            assert ws.ask("cancel_job", job_id=other["job_id"], reason="enough")["status"] == "running"
            ws.until("job_status", job_id=other["job_id"], status="cancelled")
            ws.send(action="await_jobs", job_ids=[job_id], request_id="w")
            gate.touch()
            assert ws.answer("w", 30)["tasks"][0]["status"] == "completed"
            after = server.told()
            assert (after["mode"], after["port"]) == ("host", told["port"])
            code = None
            try:
                while True:
                    ws.take(20)
            except ConnectionClosed as closed:
                code = closed.rcvd.code if closed.rcvd else None
            assert code == 1012
        with client.open() as ws:
            again = ws.ask("subscribe", epoch=before["epoch"], after_seq=before["seq"])
            assert again["replayed"] is None
            rows = {row["id"]: row["status"] for row in ws.until("snapshot")["tasks"]}
            assert rows == {job_id: "completed", other["job_id"]: "cancelled"}
            assert client.get("/api/about")["mode"] == "host"


class TestKilled:
    def test_a_client_that_reconnects_has_missed_nothing(self, home: Path, servers: Any) -> None:
        """The server is killed in the middle of many jobs, started again on its port; who comes back with epoch,
        number and time of the last event knows the end of every job, and the live events go on."""
        server = servers()
        told = server.told()
        client = server.client(told)
        statuses: dict[str, str] = {}
        asked: list[str] = []
        with client.open() as ws:
            ws.ask("subscribe")
            for number in range(40):
                prompt = "sleep 30" if number % 10 == 9 else f"echo {number}"
                fields = {"session_id": "default", "agent_id": "shell", "prompt": prompt, "description": str(number)}
                asked.append(ws.ask("spawn_job", **fields, create_session=True)["job_id"])
            while sum(e["event"] == "job_status" and e["status"] == "completed" for e in ws.events) < 8:
                ws.take(20)
            last = ws.events[-1]
            statuses |= {e["job_id"]: e["status"] for e in ws.events if e["event"] == "job_status"}
            server.process.kill()
            server.process.wait(20)
        again = servers(port=told["port"])
        assert again.told()["port"] == told["port"]
        with client.open() as ws:
            answer = ws.ask("subscribe", epoch=last["epoch"], after_seq=last["seq"], since=last["at"])
            assert answer["epoch"] != last["epoch"]
            assert answer["replayed"] is None
            snapshot = ws.until("snapshot")
            assert not snapshot["partial"]
            statuses |= {row["id"]: row["status"] for row in snapshot["tasks"]}
            assert set(statuses) >= set(asked)
            more = ws.ask("spawn_job", session_id="default", agent_id="echo", prompt="x", description="")["job_id"]
            ws.until("job_status", job_id=more, status="completed")
            statuses |= {e["job_id"]: e["status"] for e in ws.events if e["event"] == "job_status"}
        for job_id in asked:
            truth = client.get(f"/api/jobs/{job_id}")["status"]
            assert truth in ("completed", "errored", "cancelled")
            assert statuses[job_id] == truth
