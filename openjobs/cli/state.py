"""What one command line has at hand: its home, and the store and client on it, opened when first used.

Only here and in `host` is the environment read. Everything heavy is imported inside the properties:
`openjobs --help` must not pay for git.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import (
    AmbiguousId,
    Damaged,
    HostUnavailable,
    NotFound,
    OpenJobsError,
    RepositoryRefused,
    SessionExists,
    UnknownJob,
)
from . import output

if TYPE_CHECKING:
    from ..host.client import HostClient
    from ..host.launcher import Runtime
    from ..jobs import Job
    from ..processes.client import TaskClient
    from ..runner import JobClient, JobRunner
    from ..store import JobStore
    from ..store.index import FileIndex

DEFAULT_SESSION = "default"
#: sockets take no timeout above 24 days; who waits longer asks again
LONGEST_WAIT_S = 86_400.0


def _is_home(path: Path) -> bool:
    """Whether anything was ever kept there; what cannot be looked at is told by who uses it."""
    try:
        return not set(os.listdir(path)) <= {"config.toml"}
    except FileNotFoundError:
        return False
    except OSError:
        return True


class State:
    def __init__(self) -> None:
        self.home_option: Path | None = None
        self.json = False
        self._runner: JobRunner | None = None
        self._host: HostClient | None = None
        self._own_host: HostClient | None = None
        self._asked_host = False
        self._makes_home = False

    @cached_property
    def home(self) -> Path:
        """`--home`, else OPENJOBS_HOME, else the platform's state directory of this user.

        Made if missing by a command line that runs something; a look at a home that is not there makes nothing.
        """
        output.show_warnings()
        if self.missing:
            return self.unchecked_home
        from ..host.config import prepare_home

        return prepare_home(self.unchecked_home)

    @cached_property
    def missing(self) -> bool:
        """There is no home yet, and none is made: what is looked at is an empty one in memory."""
        return not self._makes_home and not _is_home(self.unchecked_home)

    def make_home(self) -> None:
        """From now on the home is made where it is missing."""
        self._makes_home = True
        self._forget_missing()

    def look_again(self) -> None:
        """Somebody may have made the home in the meantime."""
        if self.missing and _is_home(self.unchecked_home):
            self._forget_missing()

    def _forget_missing(self) -> None:
        if self.__dict__.pop("missing", False):
            self.close()
        for name in ("home", "parent_job"):
            self.__dict__.pop(name, None)

    def nothing_yet(self) -> str | None:
        """What to say when a home was looked at that is not there."""
        if not self.__dict__.get("missing"):
            return None
        from .text import one_line

        return f"there is no home at {one_line(str(self.unchecked_home))} yet"

    @cached_property
    def unchecked_home(self) -> Path:
        """The same, only looked up: for shell completion, which must not make or warn about anything."""
        from ..host.config import find_home

        return find_home(self.home_option)

    @property
    def prog(self) -> str:
        """How hints call us, so that they work when they are typed."""
        return f"openjobs --home {shlex.quote(str(self.home_option))}" if self.home_option else "openjobs"

    @cached_property
    def parent_job(self) -> Job | None:
        """The job of this home that this command line runs inside of."""
        from ..host.client import parent_job

        job_id = parent_job(self.home, os.environ)
        try:
            return self.store.row(job_id) if job_id else None
        except UnknownJob:
            return None

    @cached_property
    def store(self) -> JobStore:
        if self.missing:
            from ..store import MockTaskStore

            return MockTaskStore()
        from ..store import GitJobStore

        return GitJobStore(self.home)

    @cached_property
    def client(self) -> JobClient:
        from ..runner import JobClient

        return JobClient(self.store)

    @cached_property
    def tasks(self) -> TaskClient:
        from ..processes.client import TaskClient

        return TaskClient(self.home)

    @cached_property
    def job_index(self) -> FileIndex:
        """Which session has a job, and its run, without git."""
        from ..durable import Disk
        from ..store.index import FileIndex

        return FileIndex(self.home / "index", Disk())

    def use_home(self, home: Path) -> None:
        """Another home than the user's own (a demo)."""
        self.home_option = home
        self.__dict__.pop("unchecked_home", None)
        self.make_home()

    def adopt(self, runtime: Runtime) -> JobRunner:
        """Use the runner of this process and its store from now on; who opened them closes them."""
        self._runner = runtime.runner
        self.__dict__.pop("client", None)
        if (opened := self.__dict__.pop("store", None)) is not None:
            opened.close()
        self.__dict__["store"] = runtime.store
        return runtime.runner

    def await_jobs(self, ids: Sequence[str], mode: Literal["all", "any"], timeout: float | None) -> list[Job]:
        """The jobs in the order given: ended, or as they stand after `timeout` seconds."""
        if self._runner is not None:
            return self._runner.await_tasks(ids, mode=mode, timeout=timeout)
        if self._host is None and self.nested:
            self._lend()
        if self._host is not None:
            waiting = self.parent_job.job_id if self.parent_job is not None else None
            try:
                return self._host.await_jobs(ids, mode, timeout, waiting)
            except HostUnavailable:
                self._host = None  # it ended, or an interrupt cut the answer off: git still has the truth
        return self.client.await_tasks(ids, mode=mode, timeout=timeout)

    def _lend(self) -> None:
        """Wait at the host, if there is one, so that the slot of the job we are in is lent meanwhile."""
        from ..host.client import connect

        if not self._asked_host:
            self._asked_host = True
            self._host = self._own_host = connect(self.home)

    def use_host(self, host: HostClient) -> None:
        """Wait at the home's host from now on; who connected closes it."""
        self._host = host

    @property
    def nested(self) -> bool:
        """Whether a job waits when this command line does: then in one piece, since its slot is lent meanwhile."""
        return self.parent_job is not None

    def close(self) -> None:
        if self._own_host is not None:
            self._own_host.close()
        for name in ("tasks", "job_index"):
            opened = self.__dict__.pop(name, None)
            if opened is not None:
                opened.close()
        if self._runner is not None:
            return
        for name in ("client", "store"):
            opened = self.__dict__.pop(name, None)
            if opened is not None and hasattr(opened, "close"):
                opened.close()

    def partial(self, job: Job) -> str | None:
        """What a running job has said so far, where a host runs it: only its runner knows."""
        if job.status.value != "running":
            return None
        from ..host.client import connect

        try:
            host = connect(self.home)
            if host is None:
                return None
            with host:
                return host.get(job.job_id)[1]
        except OpenJobsError:
            return None

    # --- ids -----------------------------------------------------------------------------------------

    def resolve(self, prefix: str) -> str:
        """The one job id that begins with `prefix`. `UnknownJob` and `AmbiguousId` tell the candidates."""
        try:
            return self.store.resolve(prefix.strip().lower())
        except NotFound as error:
            raise self._described(error, prefix) from None

    def resolve_all(self, prefixes: Sequence[str]) -> list[str]:
        """The ids, each once, in the order given."""
        return list(dict.fromkeys(self.resolve(prefix) for prefix in prefixes))

    def task_id(self, prefix: str) -> str | None:
        """The one background command whose id begins so; None where a job is meant. Raises `AmbiguousId`.

        An index that is damaged hides nothing whose whole id the other one has.
        """
        wanted = prefix.strip().lower()
        if not os.path.lexists(self.home / "index" / "tasks.jsonl"):
            return None
        try:
            found = [entry.job_id for entry in self.tasks.matching(wanted)]
        except (OpenJobsError, OSError):
            if any(entry.job_id == wanted for entry in self.store.index.by_id(wanted)):
                return None
            raise
        if not found:
            return None
        try:
            jobs = [self.store.resolve(wanted)]
        except NotFound as error:
            jobs = list(error.candidates) if isinstance(error, AmbiguousId) else []
        except (OpenJobsError, OSError):
            if wanted not in found:
                raise
            jobs = []
        if jobs or len(found) > 1:
            raise AmbiguousId(f"more than one id begins with {prefix!r}", candidates=[*jobs, *found])
        return found[0]

    def split(self, prefixes: Sequence[str]) -> tuple[list[str], list[str]]:
        """Ids of jobs and ids of background commands, each once, in the order given."""
        jobs: dict[str, None] = {}
        tasks: dict[str, None] = {}
        for prefix in prefixes:
            task_id = self.task_id(prefix)
            if task_id is None:
                jobs[self.resolve(prefix)] = None
            else:
                tasks[task_id] = None
        return list(jobs), list(tasks)

    def every_session(self) -> list[str]:
        """Ids of all sessions, sorted; also of those in whose place something else stands: it is said where it is."""
        return sorted([*self.store.sessions(), *(session_id for session_id, _ in self.store.misplaced())])

    def make_session(self, session_id: str) -> None:
        """A session is made on first use."""
        if not self.store.has_session(session_id):
            try:
                self.store.create_session(session_id)
            except SessionExists:
                if not self.store.has_session(session_id):
                    raise  # the same name in other letter case

    def _described(self, error: NotFound, prefix: str) -> NotFound:
        """The same error, its candidates with status and subject: an id alone helps nobody to choose."""
        from .text import one_line

        told: list[str] = []
        for job_id in list(error.candidates)[:8]:
            try:
                job = self.store.row(job_id)
                told.append(f"{job_id}  {job.status.value:<9}  {one_line(job.subject, 28)}")
            except (NotFound, Damaged, RepositoryRefused):
                told.append(job_id)
        rest = list(error.candidates)[8:]
        if isinstance(error, AmbiguousId):
            return AmbiguousId(f"more than one job id begins with {prefix!r}", candidates=[*told, *rest])
        said = f"no job id begins with {prefix!r}"
        if not told:
            said += f"; `{self.prog} list` shows the jobs there are"
        return UnknownJob(said, candidates=[*told, *rest])
