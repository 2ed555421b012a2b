"""Servers of the browser tests: `openjobs serve` as people have it, and one whose jobs a test leads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from tests.support import eventually
from tests.support.cli import Cli

HOST = Path(__file__).with_name("host.py")
FINAL = ("completed", "cancelled", "errored")
START_S = 60.0


@attrs.define(kw_only=True)
class Server:
    """One that runs, and how a test speaks to it beside the browser."""

    home: Path
    base: str
    token: str
    process: subprocess.Popen[str]

    @property
    def origin(self) -> str:
        return "/".join(self.base.split("/")[:3])

    @property
    def port(self) -> int:
        return int(self.origin.rsplit(":", 1)[1])

    def ask(self, path: str, body: object | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.base}/api/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from None

    def spawn(self, subject: str, prompt: object, session_id: str = "main", **fields: object) -> str:
        """A new job's id. A prompt that is no text goes as JSON: see `host.py`."""
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        asked = {"session_id": session_id, "prompt": text, "description": subject, "create_session": True, **fields}
        return str(self.ask("jobs", asked)["job_id"])

    def until(self, job_id: str, *statuses: str) -> dict[str, Any]:
        def look() -> Any:
            job = self.ask(f"jobs/{job_id}")
            return job if job["status"] in (statuses or FINAL) else None

        return dict(eventually(look, 30, every=0.05))

    def go(self, name: str) -> None:
        (self.home.parent / "go" / name).touch()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _first(process: subprocess.Popen[str], pattern: str) -> str:
    """What the first line that fits has in its group; fails when the process ends or takes too long."""
    assert process.stdout is not None
    timer = threading.Timer(START_S * 4, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if match := re.search(pattern, line):
                return match[1]
    finally:
        timer.cancel()
        timer.join()
    raise AssertionError(f"the server said no {pattern!r} and ended with {process.wait()}")


@contextmanager
def led(home: Path, many: int = 0, port: int = 0, prefix: str = "") -> Iterator[Server]:
    """A server of `host.py`."""
    command = [sys.executable, str(HOST), str(home), str(many), str(port), prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=Cli(home).env) as process:
        said = json.loads(_first(process, r"^(\{.*\})$"))
        server = Server(
            home=home, base=f"http://127.0.0.1:{said['port']}{prefix}", token=said["token"], process=process
        )
        try:
            yield server
        finally:
            server.end()


@contextmanager
def served(home: Path, port: int = 0, workers: int = 2) -> Iterator[Server]:
    """`openjobs serve`."""
    with Cli(home).start("serve", "--port", str(port), "--workers", str(workers)) as process:
        base = _first(process, r"open:\s+(http://127\.0\.0\.1:\d+)/#login=")
        token = (home / "serve.token").read_text().strip()
        server = Server(home=home, base=base, token=token, process=process)
        try:
            yield server
        finally:
            server.end()
