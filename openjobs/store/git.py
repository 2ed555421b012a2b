"""`GitJobStore`: the job store whose sessions are git repositories under one home directory."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from ..clock import Clock
from ..durable import Disk, FileLock
from ..durable.files import names_in
from ..errors import (
    InvalidInput,
    OpenJobsError,
    Refused,
    RepositoryRefused,
    SessionBusy,
    SessionExists,
    StoreWriteFailed,
)
from ..facts.log import NAME as FACTS
from ..facts.log import FactLog, FileFactLog
from ..ids import IdMaker, check_session_id, is_session_id, new_id
from ..repo import Repository
from .base import JobStore
from .index import FileIndex
from .places import check_place, misplaced
from .presence import FileActive, FileLeases

_DURABILITY = {"full": True, "relaxed": False}
_CREATE_TRIES = 500
#: ledgers of facts whose ends are remembered; another one's is looked for again
_FACT_LOGS = 256
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class GitJobStore(JobStore):
    """A home on disk (docs/architecture.md has its layout). Made where missing, with mode 0700.

    `durability="full"`: what was acknowledged survives a power cut. "relaxed": it survives the
    death of the process, not of the machine. Raises `InvalidInput`, `RepositoryRefused`, OSError.
    """

    def __init__(
        self,
        home: str | os.PathLike[str],
        durability: str = "full",
        *,
        clock: Clock | None = None,
        new_id: IdMaker = new_id,
        disk: Disk | None = None,
    ) -> None:
        if durability not in _DURABILITY:
            raise InvalidInput(f"durability is 'full' or 'relaxed', not {durability!r}")
        if isinstance(home, str) and not home.strip():
            raise InvalidInput("the name of the home is empty; '.' is the current directory")
        path = Path(home).expanduser().absolute()
        disk = disk or Disk(durable=_DURABILITY[durability])
        _make_home(path, disk)
        self.durability = durability
        self.leases = FileLeases(path, disk)
        self.active = FileActive(path, disk)
        self._sessions_dir = path / "sessions"
        self._sessions = str(self._sessions_dir)
        self._facts_lock = threading.Lock()
        self._facts: OrderedDict[str, FactLog] = OrderedDict()
        super().__init__(home=path, disk=disk, index=FileIndex(path / "index", disk), clock=clock, new_id=new_id)

    def session_dir(self, session_id: str) -> Path:
        """Where the session keeps its repository, ledgers and run logs."""
        return self._sessions_dir / check_session_id(session_id)

    def _create_repository(self, session_id: str, files: Mapping[str, bytes], now: datetime) -> None:
        try:
            self._create_alone(session_id, files, now)
        except OSError as error:
            if isinstance(error, OpenJobsError):
                raise
            raise StoreWriteFailed(f"no session was created: {error}", errno=error.errno) from error

    def _create_alone(self, session_id: str, files: Mapping[str, bytes], now: datetime) -> None:
        from ..repo.git import GitRepository

        lock = self._creation_lock()
        try:
            folded = session_id.casefold()
            for known in names_in(self._sessions_dir):
                if known.casefold() == folded and (known != session_id or self.has_session(known)):
                    raise SessionExists(f"there is a session {known!r} already; pick another id")
            directory = self.session_dir(session_id)
            check_place(directory)
            self.disk.make_dirs(directory)
            GitRepository.create(directory / "repo", self.disk, files, now=now).close()
        finally:
            lock.release()

    def _creation_lock(self) -> FileLock:
        """One creation at a time in a home: ids must be unique under case folding."""
        lock = FileLock(self._sessions_dir / ".lock", self.disk)
        if lock.acquire(attempts=_CREATE_TRIES):
            return lock
        raise SessionBusy("another process is creating sessions and does not end; nothing was written. Try again.")

    def _open_repository(self, session_id: str) -> tuple[Repository, Path | None]:
        from ..repo.git import GitRepository

        if not self.has_session(session_id):
            raise self._unknown_session(session_id)
        path = self.session_dir(session_id) / "repo"
        repository = GitRepository(path, self.disk)
        return repository, path / ".git" / "openjobs"

    def _unknown_session(self, session_id: str) -> Refused:
        try:
            check_place(self.session_dir(session_id))
        except RepositoryRefused as error:
            return error
        return super()._unknown_session(session_id)

    def facts(self, session_id: str) -> FactLog:
        with self._facts_lock:
            log = self._facts.get(session_id)
            if log is None:
                log = self._facts[session_id] = FileFactLog(self.session_dir(session_id) / FACTS, self.disk)
                while len(self._facts) > _FACT_LOGS:
                    self._facts.popitem(last=False)
            self._facts.move_to_end(session_id)
            return log

    def _size_bytes(self, session_id: str) -> int:
        total = 0
        for directory, _, names in os.walk(self.session_dir(session_id) / "repo" / ".git"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, name)).st_size
        return total

    def sessions(self) -> list[str]:
        names = names_in(self._sessions_dir)
        return sorted(name for name in names if is_session_id(name) and self.has_session(name))

    def misplaced(self) -> Iterator[tuple[str, OpenJobsError]]:
        return misplaced(self._sessions_dir)

    def has_session(self, session_id: str) -> bool:
        try:
            os.lstat(f"{self._sessions}/{check_session_id(session_id)}/repo")
        except OSError as error:
            if error.errno in _NOT_THERE:
                return False
            raise
        return True  # whatever it is: what is no repository is refused with its place by who opens it


def _make_home(path: Path, disk: Disk) -> None:
    disk.make_dirs(path)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise RepositoryRefused(f"{path} is not a directory (or is a symbolic link); choose another home")
    if found.st_uid != os.geteuid():
        raise RepositoryRefused(f"{path} belongs to another user; choose another home")
    for name in ("leases", "active", "index", "sessions"):
        disk.make_dirs(path / name)
