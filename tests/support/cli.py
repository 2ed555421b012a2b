"""The command line as people have it: a process of its own, in a pipe or on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

PATIENCE_S = 40.0
ROOT = Path(__file__).parents[2]


@attrs.frozen
class Ended:
    """How a command line ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Command lines on one home."""

    def __init__(self, home: Path, env: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENJOBS_HOME": str(home), **(env or {})}

    def command(self, *args: str | Path) -> list[str]:
        return [sys.executable, "-m", "openjobs", *map(str, args)]

    def start(self, *args: str | Path, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*args),
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "encoding": "utf-8",
                "env": {**self.env, **(env or {})},
                **options,
            },
        )

    def run(
        self,
        *args: str | Path,
        code: int | None = 0,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Ended:
        """Run it to its end; fails when the exit code is another than `code` (None: any)."""
        if stdin is not None:
            options["stdin"] = subprocess.PIPE
        with self.start(*args, env=env, **options) as process:
            try:
                out, err = process.communicate(stdin, timeout=PATIENCE_S)
            except BaseException:
                process.kill()
                raise
        ended = Ended(process.returncode, out or "", err or "")
        assert code is None or ended.code == code, f"openjobs {args} ended with {ended.code}:\n{ended.out}{ended.err}"
        return ended

    def json(self, *args: str | Path, code: int | None = 0, **options: Any) -> Any:
        return self.run(*args, "--json", code=code, **options).json

    def inside(self, *args: str | Path, code: int | None = 0, env: Mapping[str, str] | None = None) -> Ended:
        """As `run`, in this process: a tenth of the time, for what does not depend on the process."""
        from openjobs.cli.app import run

        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"OPENJOBS_HOME": str(self.home), **(env or {})}.items():
                patch.setenv(name, value)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    ended = run([str(arg) for arg in args])
                except SystemExit as left:
                    ended = left.code if isinstance(left.code, int) else 1
        said = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        assert code is None or ended == code, f"openjobs {args} ended with {ended}:\n{said[0]}{said[1]}"
        return Ended(ended, *said)

    def json_inside(self, *args: str | Path, code: int | None = 0) -> Any:
        return self.inside(*args, "--json", code=code).json

    def end_host(self) -> None:
        """Ask the home's host, if one lives, to leave; returns when it has."""
        from openjobs.durable import Disk, FileLock
        from openjobs.host.client import HOST_LOCK, connect

        if not self.home.exists():
            return
        host = connect(self.home)
        if host is not None:
            with contextlib.suppress(Exception), host:
                host.call("shutdown")
        lock = FileLock(self.home / HOST_LOCK, Disk(durable=False))
        end = time.monotonic() + PATIENCE_S
        while not lock.try_acquire():
            assert time.monotonic() < end, "the host does not leave"
            time.sleep(0.02)
        lock.release()


class Terminal:
    """A command on a terminal of its own, whose screen is everything that was written to it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, width: int = 80, height: int = 24) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._screen = b""
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that ^C becomes a signal
        )
        os.close(slave)

    @property
    def text(self) -> str:
        return self._screen.decode(errors="replace")

    def read(self, timeout_s: float) -> bool:
        """Take in what is there, waiting for it; False at the end."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return True
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # Linux says EIO when nobody has the terminal any more
            return False
        self._screen += piece
        return bool(piece)

    def until(self, words: str) -> str:
        """The screen once it shows `words`."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.text:
            assert time.monotonic() < end, f"the terminal does not show {words!r}:\n{self.text}"
            if not self.read(0.05):
                assert words in self.text, f"it ended without {words!r}:\n{self.text}"
        return self.text

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self._master)
        self._master = -1

    def wait(self) -> int:
        """The exit code; everything it wrote is in `text`."""
        end = time.monotonic() + PATIENCE_S
        while self.read(0.05):
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
            if self.process.poll() is not None and not select.select([self._master], [], [], 0)[0]:
                break
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self._master >= 0:
            self.hang_up()
