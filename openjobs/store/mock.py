"""`MockTaskStore`: the job store in memory, for unit tests. Source: spec 003, D13."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from ..clock import Clock
from ..durable import Disk
from ..errors import SessionExists
from ..facts.log import FactLog, MemoryFactLog
from ..ids import IdMaker, new_id
from ..repo import Change, MemoryRepository, Repository
from .base import JobStore
from .index import MemoryIndex
from .presence import MemoryActive, MemoryLeases


class MockTaskStore(JobStore):
    """The same store on repositories in memory: every rule holds, nothing survives the process."""

    def __init__(self, *, clock: Clock | None = None, new_id: IdMaker = new_id) -> None:
        self._repositories: dict[str, MemoryRepository] = {}
        self._facts: dict[str, MemoryFactLog] = {}
        self._creating = threading.Lock()
        self.leases = MemoryLeases()
        self.active = MemoryActive()
        super().__init__(
            home=None, disk=Disk(durable=False), index=MemoryIndex(), clock=clock, new_id=new_id, gap_s=0.0
        )

    def _create_repository(self, session_id: str, files: Mapping[str, bytes], now: datetime) -> None:
        repository = MemoryRepository()
        with self._creating:
            if session_id.casefold() in {known.casefold() for known in self._repositories}:
                raise SessionExists(f"there is a session {session_id!r} already")
            repository.transact([lambda view: Change(files=files, subject="session created")], now=now)
            self._repositories[session_id] = repository

    def _open_repository(self, session_id: str) -> tuple[Repository, Path | None]:
        repository = self._repositories.get(session_id)
        if repository is None:
            raise self._unknown_session(session_id)
        return repository, None

    def facts(self, session_id: str) -> FactLog:
        with self._creating:
            return self._facts.setdefault(session_id, MemoryFactLog())

    def _size_bytes(self, session_id: str) -> int:
        return 0

    def sessions(self) -> list[str]:
        with self._creating:
            return sorted(self._repositories)

    def has_session(self, session_id: str) -> bool:
        return session_id in self._repositories
