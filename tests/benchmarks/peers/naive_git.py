"""The naive store in git: all jobs in one file, written, added and committed for each transition."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from abc import abstractmethod
from typing import Any

from .peer import HandMade

_LESS = "no recovery, no cancel; each transition costs more the more jobs there are"


class _NaiveGit(HandMade):
    less = _LESS
    durable = "four commits, each synced"

    def prepare(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, dict[str, str]] = {}
        self._file = self.directory / "jobs.json"
        self.init()

    def write(self, job_id: str, status: str, text: str) -> None:
        with self._lock:
            self._jobs.setdefault(job_id, {"prompt": text}).update(status=status, result=text)
            temporary = self.directory / ".jobs.json.tmp"
            with open(temporary, "w") as file:
                json.dump(self._jobs, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._file)
            self.commit(f"job {job_id[:8]} {status}")

    def read(self, job_id: str) -> str:
        with open(self._file) as file:
            found: dict[str, dict[str, str]] = json.load(file)
        return found[job_id]["result"]

    @abstractmethod
    def init(self) -> None: ...

    @abstractmethod
    def commit(self, message: str) -> None: ...


class GitCommands(_NaiveGit):
    title = "naive: git add && git commit"
    how = "four threads and a queue in process; two git commands a transition, core.fsync=all"

    def init(self) -> None:
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        self._git("init", "-q", "-b", "main")
        for name, value in (
            ("user.name", "bench"),
            ("user.email", "bench@localhost"),
            ("core.fsync", "all"),
            ("core.fsyncMethod", "fsync"),
            ("gc.auto", "0"),
        ):
            self._git("config", name, value)

    def commit(self, message: str) -> None:
        self._git("add", "jobs.json")
        self._git("commit", "-q", "-m", message)

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.directory, env=self._env, check=True)


class DulwichPorcelain(_NaiveGit):
    title = "naive: porcelain.add, porcelain.commit"
    how = "four threads and a queue in process; the same with dulwich and no further process"

    def init(self) -> None:
        from dulwich.repo import Repo

        self._repo: Any = Repo.init(str(self.directory))
        config = self._repo.get_config()
        config.set((b"core",), b"fsyncObjectFiles", b"true")
        config.set((b"user",), b"name", b"bench")
        config.set((b"user",), b"email", b"bench@localhost")
        config.write_to_path()

    def commit(self, message: str) -> None:
        from dulwich import porcelain

        porcelain.add(self._repo, [str(self._file)])
        porcelain.commit(self._repo, message=message.encode())
        for name in (".", ".git/refs/heads", ".git/objects"):
            fd = os.open(self.directory / name, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def finish(self) -> None:
        self._repo.close()
