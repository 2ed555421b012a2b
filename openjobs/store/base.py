"""The job store: one event applied is one transaction over a session's documents.

`GitJobStore` and `MockTaskStore` are this class over two repositories. Source: spec 003, D4 and D8.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import attrs

from ..clock import Clock, SystemClock
from ..durable import Disk
from ..errors import (
    AmbiguousId,
    Closed,
    Damaged,
    ForkedProcess,
    InvalidInput,
    JobExists,
    NotFound,
    OpenJobsError,
    Refused,
    RepositoryRefused,
    UnknownJob,
    UnknownNode,
    UnknownSession,
)
from ..facts.log import FactLog
from ..ids import IdMaker, check_job_id, check_node_id, check_session_id, is_prefix, new_id, short
from ..jobs import UNFINISHED, CancelRequested, Event, Job, JobStatus, Queued, Started
from ..repo import Change, CommitInfo, Repository, View
from ..session import Documents, Memory, Meta, Node, meta
from ..session.trail import Trail
from ..sign import Answer
from .change import JobChange, job_changed, job_created, refuse_again, refuse_child_of
from .committer import GAP_S, Committer, Operation
from .damage import OnDamage, once, raised
from .fsck import Report, check_session
from .index import Entry, Index
from .mirror import called_jobs, mirror_later, with_caller
from .presence import Active, Leases
from .reindex import entry_of, reindex
from .restore import restored
from .session import Session

#: a submit that another program keeps out for this long ends with `SessionBusy`
GIVE_UP_S = 10.0
#: so many sessions, those used last, keep their caches; more of them stay open with what the next small
#: change needs (opening one costs as much as a few jobs, docs/performance.md)
_BUSY_SESSIONS = 8
_OPEN_SESSIONS = 128
_KNOWN_JOBS = 4096
_CANDIDATES = 5


@attrs.frozen(kw_only=True, slots=True)
class Transition:
    """One commit in the life of a job."""

    commit_id: str
    time: datetime
    #: the job's status after it
    status: JobStatus
    #: "transition" or "cancel-request"
    kind: str
    runner_id: str | None = None
    subject: str = ""


T = TypeVar("T")
Jobs = list[Job]
Done = Callable[[Future[Job]], object]
_Ids = list[str]
_Transitions = list[Transition]


@attrs.frozen(kw_only=True, slots=True)
class Collected:
    """What `gc` did to one session's repository."""

    before_bytes: int
    after_bytes: int


_news = itertools.count(step=1 << 32)


class _Open:
    """A session that this process has in use: its repository and what is remembered of it."""

    __slots__ = ("memory", "news", "own_head", "repository", "rests", "trail")

    def __init__(self, repository: Repository, private: Path | None) -> None:
        self.repository = repository
        #: its caches were made small, and nobody has used it since
        self.rests = False
        self.memory = Memory(private)
        self.trail = Trail(private / "commits" if private is not None else None)
        #: the newest commit that is known to hold nothing unseen (see `JobStore.asked`)
        self.own_head: str | None = None
        #: grows when somebody may have asked a job to stop; begins where no other opening did
        self.news = next(_news)


class JobStore(ABC):
    """Guarantees

    - An event whose call returned (or whose future completed) is durable, and one commit.
    - Row, card and messages that share a session change in the same commit (invariant 4).
    - An event that no longer fits changes nothing, whoever committed in between.

    What the lock protects: the open sessions and the map of known jobs. Repositories are written by
    the committer's thread only.
    """

    leases: Leases
    active: Active

    def __init__(
        self,
        *,
        home: Path | None,
        disk: Disk,
        index: Index,
        clock: Clock | None = None,
        new_id: IdMaker = new_id,
        gap_s: float = GAP_S,
    ) -> None:
        self.home = home
        self.disk = disk
        self.clock: Clock = clock or SystemClock()
        self.new_id = new_id
        self.index = index
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._sessions_of: OrderedDict[str, str] = OrderedDict()
        #: job id -> commit of its running transition, for the card; touched by the committer's thread only
        self._running_commits: OrderedDict[str, str] = OrderedDict()
        self._closed = False
        self._committer = Committer(self, index, SystemClock(), gap_s=gap_s)

    # --- what the two stores differ in ---

    @abstractmethod
    def _create_repository(self, session_id: str, files: Mapping[str, bytes], now: datetime) -> None:
        """Make the session's repository with its first commit. Raises `SessionExists`."""

    @abstractmethod
    def _open_repository(self, session_id: str) -> tuple[Repository, Path | None]:
        """The repository and the folder for derived files. Raises `UnknownSession`, `RepositoryRefused`, `Damaged`."""

    @abstractmethod
    def facts(self, session_id: str) -> FactLog:
        """Where the lifecycle facts of the session's jobs and background commands stand (spec 001).

        Looks at nothing: whether there is such a session is for who writes or reads there to find out.
        """

    @abstractmethod
    def _size_bytes(self, session_id: str) -> int:
        """What the session's repository takes, without its work tree."""

    @abstractmethod
    def sessions(self) -> list[str]:
        """Ids of all sessions, sorted."""

    @abstractmethod
    def has_session(self, session_id: str) -> bool: ...

    def misplaced(self) -> Iterable[tuple[str, OpenJobsError]]:
        """Session id and what is wrong, for what stands in the place of a session and is no directory.

        None of `sessions`, since none can be used; but a session that is asked for by that id is refused, not unknown.
        """
        return ()

    # --- sessions ---

    def create_session(self, session_id: str | None = None, title: str = "") -> str:
        """A new session's id. Raises `InvalidSessionId`, `SessionExists` (letter case apart)."""
        self._check_usable()
        session_id = self.new_id() if session_id is None else check_session_id(session_id)
        now = self.clock.now()
        first = Meta(session_id=session_id, title=title, created_at=now)
        self._create_repository(session_id, {meta.PATH: meta.encode(first), "jobs.json": b"{}\n"}, now)
        return session_id

    def session(self, session_id: str) -> Session:
        """Raises `UnknownSession`."""
        self._check_usable()
        check_session_id(session_id)
        if not self.has_session(session_id):
            raise self._unknown_session(session_id)
        return Session(self, session_id)

    def head(self, session_id: str) -> str:
        """The newest commit's id; one small read, for callers that look again and again."""
        return self.repository(session_id).view().commit_id or ""

    def asked(self, session_id: str) -> tuple[int, str]:
        """A value that changes whenever somebody may have asked a job of the session to stop: with each
        cancel request through this store, and each commit of another program's. As cheap as `head`."""
        opened = self._opened(session_id)
        head = opened.repository.view().commit_id or ""
        return opened.news, "" if head == opened.own_head else head

    def documents(self, session_id: str) -> Documents:
        """The session's documents as they are now, for reading."""
        opened = self._opened(session_id)
        return Documents(opened.repository.view(), opened.memory)

    # --- writing ---

    def create(self, job: Job, *events: Event, fresh_id: bool = False) -> Job:
        """A new job: its `pending` commit with user message and card, then one commit an event.

        `fresh_id` says that the id was just made at random, so nobody can have used it. Raises
        `JobExists` (with `.job`), `IdempotencyConflict`, `ParentFinished`, `UnknownNode`,
        `UnknownSession`, `SessionBusy`, `StoreWriteFailed`, `OutcomeUnknown`.
        """
        return self.create_later(job, *events, fresh_id=fresh_id).result()

    def create_later(
        self, job: Job, *events: Event, fresh_id: bool = False, when_done: Done | None = None
    ) -> Future[Job]:
        """As `create`, without waiting. `when_done` is called with the future once it is complete, as a callback that
        was added to it before anything was handed over; not where this raises."""
        self._check_usable()
        check_job_id(job.job_id)
        session_id = check_session_id(job.parent_session_id)
        if not self.has_session(session_id):
            raise self._unknown_session(session_id)
        entry = entry_of(job)
        since = 0 if entry.key is None else self.index.position()
        self._refuse_known(job, entry.key, fresh_id)
        self._refuse_finished_parent(job)
        if job.elsewhere:
            job = with_caller(self, job)
        now = self.clock.now()
        job = attrs.evolve(
            job,
            attach_id=job.attach_id or self.new_id(),
            user_msg_id=job.user_msg_id or self.new_id(),
            # From the first commit on: a crash before `queued` must leave a job that recovery can end.
            runner_id=job.runner_id or next((e.runner_id for e in events if isinstance(e, Queued)), None),
        )
        change = JobChange(job)
        give_up_at = self._give_up_at()

        def created(documents: Documents) -> Change:
            rivals = [] if entry.key is None else [rival.job_id for rival in self.index.by_key(entry.key, since)]
            try:
                return job_created(documents, change, now, fresh_id=fresh_id, rivals=rivals)
            except JobExists as error:
                # Found by its row, so it has to be found by its id too, whatever became of the index.
                self._remember(error.job.job_id, session_id)  # type: ignore[attr-defined]
                raise

        operations = [
            Operation(decide=self._in(session_id, _close_page), result=lambda: None, give_up_at=give_up_at),
            Operation(
                decide=self._in(session_id, created),
                result=self._result(change),
                entry=entry,
                job_id=job.job_id,
                give_up_at=give_up_at,
            ),
            *self._changes(session_id, job.job_id, change, events, now, keep=False),
        ]
        # All of it before the committer has them, which completes futures: a caller's thread that is interrupted
        # inside one of those leaves its lock held, and would hold up everybody's commits.
        future = _first_failure(operations[1:], when_done)
        self._remember(job.job_id, session_id)
        self._committer.add(session_id, operations)
        return future

    def apply(self, job_id: str, *events: Event) -> Job:
        """The job after the events, each one commit, durable. All or, from the first refused one on, none.

        Raises `UnknownJob`, `InvalidTransition`, `SessionBusy`, `StoreWriteFailed`, `OutcomeUnknown`.
        """
        return self.apply_later(job_id, *events).result()

    def apply_later(
        self, job_id: str, *events: Event, keep: bool = False, when_done: Done | None = None
    ) -> Future[Job]:
        """As `apply`, without waiting. With `keep` a commit that fails is kept and tried again until
        it is durable or refused. The events of one job stay in the order in which they are given.
        `when_done` is that of `create_later`."""
        self._check_usable()
        session_id = self._session_of(job_id)
        operations = self._changes(session_id, job_id, JobChange(None), events, self.clock.now(), keep=keep)
        if not operations:
            raise InvalidInput("apply needs at least one event")
        future = _first_failure(operations, when_done)
        self._committer.add(session_id, operations)
        return future

    def _changes(
        self, session_id: str, job_id: str, change: JobChange, events: Sequence[Event], now: datetime, *, keep: bool
    ) -> list[Operation]:
        give_up_at = None if keep else self._give_up_at()
        operations = []
        for event in events:
            step = JobChange(None)
            operations.append(
                Operation(
                    decide=self._in(session_id, self._changed_by(session_id, job_id, step, event, now)),
                    result=self._result(step),
                    keep=keep,
                    # The worker that starts a job goes on with it; its end is what somebody waits for.
                    lingers=keep and isinstance(event, Started),
                    give_up_at=give_up_at,
                    job_id=job_id,
                    committed=self._noting(session_id, job_id, event),
                )
            )
        return operations

    def _changed_by(
        self, session_id: str, job_id: str, step: JobChange, event: Event, now: datetime
    ) -> Callable[[Documents], Change | None]:
        def running_commit(job: Job) -> str | None:
            if job.started_at is None:
                return None
            return self._running_commits.get(job_id) or self._find_running_commit(session_id, job_id)

        return lambda documents: job_changed(documents, job_id, step, event, now, running_commit, self.new_id)

    def _noting(self, session_id: str, job_id: str, event: Event) -> Callable[[str], None] | None:
        if isinstance(event, Started):
            return self._note_running(job_id)
        return self._note_request(session_id) if isinstance(event, CancelRequested) else None

    def _note_request(self, session_id: str) -> Callable[[str], None]:
        def note(commit_id: str) -> None:
            self._opened(session_id).news += 1

        return note

    def _result(self, step: JobChange) -> Callable[[], Job]:
        """Asked for once the commit is durable."""

        def result() -> Job:
            assert step.job is not None
            if step.job.terminal:
                self._running_commits.pop(step.job.job_id, None)
            return step.job

        return result

    def _note_running(self, job_id: str) -> Callable[[str], None]:
        def note(commit_id: str) -> None:
            self._running_commits[job_id] = commit_id
            while len(self._running_commits) > _KNOWN_JOBS:
                self._running_commits.popitem(last=False)

        return note

    def _find_running_commit(self, session_id: str, job_id: str, commits: int | None = None) -> str | None:
        """Only after a crash, for another process's job, or for a card in another session."""
        for transition in reversed(self._transitions(session_id, job_id, commits=commits)):
            if transition.kind == "transition" and transition.status is JobStatus.RUNNING:
                return transition.commit_id
        return None

    def append_message(
        self,
        session_id: str,
        *,
        role: str,
        content: str,
        parent: str | None,
        root: bool,
        node_id: str | None,
        function: str | None,
        extra: Mapping[str, Any] | None,
        advance_head: bool | None,
    ) -> Node:
        """See `Session.append`."""
        self._check_usable()
        node_id = self.new_id() if node_id is None else check_node_id(node_id)
        now = self.clock.now()
        made: list[Node] = []

        def decide(documents: Documents) -> Change:
            found = documents.meta()
            after = None if root else (parent if parent is not None else found.head_id)
            if after is not None and not documents.has_node(after):
                raise UnknownNode(f"there is no message {after} in session {session_id}")
            node = Node(
                id=node_id,
                parent=after,
                role=role,
                content=content,
                function=function,
                created_at=now,
                extra=dict(extra or {}),
            )
            documents.append([node])
            if advance_head if advance_head is not None else after == found.head_id:
                documents.put_meta(attrs.evolve(found, head_id=node_id))
            made[:] = [node]
            return Change(
                files=documents.changes,
                subject=f"message {short(node_id)} ({role})",
                trailers=[("Openjobs-Kind", "message")],
            )

        operation = Operation(
            decide=self._in(session_id, decide), result=lambda: made[0], give_up_at=self._give_up_at()
        )
        self._committer.add(session_id, [operation])
        node: Node = operation.future.result()
        return node

    def move_head(self, session_id: str, node_id: str | None) -> None:
        """See `Session.checkout`."""
        self._check_usable()

        def decide(documents: Documents) -> Change | None:
            found = documents.meta()
            if node_id is not None and not documents.has_node(node_id):
                raise UnknownNode(f"there is no message {node_id} in session {session_id}")
            if found.head_id == node_id:
                return None
            documents.put_meta(attrs.evolve(found, head_id=node_id))
            return Change(
                files=documents.changes,
                subject=f"head to {short(node_id or 'none')}",
                trailers=[("Openjobs-Kind", "message")],
            )

        operation = Operation(decide=self._in(session_id, decide), result=lambda: None, give_up_at=self._give_up_at())
        self._committer.add(session_id, [operation])
        operation.future.result()

    def write_later(
        self,
        session_id: str,
        decide: Callable[[Documents], Change | None],
        result: Callable[[], T],
    ) -> Future[T]:
        """One more commit over a session's documents; `result` is asked for once it is durable.

        For what is neither a job's event nor a message of the user's. `decide` is pure and may be called more
        than once. Raises `UnknownSession`; the future has what `apply` raises.
        """
        self._check_usable()
        if not self.has_session(check_session_id(session_id)):
            raise self._unknown_session(session_id)
        operation = Operation(decide=self._in(session_id, decide), result=result, give_up_at=self._give_up_at())
        self._committer.add(session_id, [operation])
        return operation.future

    def mirror_later(self, job: Job) -> Future[bool]:
        """Bring the card in the caller's session up to a job of another one; see `mirror`."""
        return mirror_later(self, job)

    def running_commit(self, job: Job) -> str | None:
        """The commit of the job's running transition, None if it never ran; a few small reads."""
        if job.started_at is None:
            return None
        return self._find_running_commit(job.parent_session_id, job.job_id, commits=job.revision + 1)

    def unsettled(self) -> int:
        """Events that are kept in memory because their commit failed at least once."""
        return self._committer.unsettled()

    # --- reading ---

    def get(self, job_id: str) -> Job:
        """The job with its whole texts. Raises `UnknownJob`."""
        documents = self.documents(self._session_of(job_id))
        job = documents.job(job_id)
        if job is None:
            raise self._unknown_job(job_id)
        return documents.whole(job)

    def row(self, job_id: str) -> Job:
        """The job with its texts as far as its row has them: all that it takes to see how it stands, and to change
        that. Raises `UnknownJob`."""
        job = self.documents(self._session_of(job_id)).job(job_id)
        if job is None:
            raise self._unknown_job(job_id)
        return job

    def outcome(self, job_id: str) -> Job:
        """As `get`, also where the prompt cannot be read: then `description` is as far as the row has it, and
        `extra["cut"]` names it. Raises `UnknownJob`."""
        documents = self.documents(self._session_of(job_id))
        job = documents.job(job_id)
        if job is None:
            raise self._unknown_job(job_id)
        return documents.outcome(job)

    def resolve(self, prefix: str) -> str:
        """The full id that begins with `prefix`. Raises `UnknownJob` or `AmbiguousId`, with candidates."""
        self._check_usable()
        if not is_prefix(prefix):
            raise self._unknown_job(prefix)
        found = dict.fromkeys(e.job_id for e in self.index.by_id(prefix) if self._may_be_there(e))
        if len(found) == 1:
            return next(iter(found))
        if not found:
            raise self._unknown_job(prefix)
        candidates = list(found)[-_CANDIDATES:]
        raise AmbiguousId(
            f"{prefix} is the beginning of {len(found)} job ids; give more of it: {', '.join(candidates)}",
            candidates=candidates,
        )

    def list(
        self,
        session_id: str | None = None,
        status: JobStatus | str | Collection[JobStatus | str] | None = None,
        parent_job_id: str | None = None,
        parent_msg_id: str | None = None,
        limit: int | None = 50,
        before: str | None = None,
        on_damage: OnDamage | None = None,
    ) -> Jobs:
        """Jobs, newest first, with their texts as rows hold them (see `get` for whole ones).

        `before` is a job id: only jobs created before that one; where that one cannot be read, or is of a session that
        is not asked for, by the order in which the home's index has them. `limit=None` is no limit. What cannot be
        read (a row, a page of rows, a session) raises; with `on_damage` that is told of it instead, with the
        session's id and each time once, and everything else is listed. Raises `UnknownSession`, and `UnknownJob` for
        `before`.
        """
        self._check_usable()
        statuses = _statuses(status)
        found: Jobs = []
        if limit is not None and limit <= 0:
            return found
        tell = raised if on_damage is None else once(on_damage)

        def candidates() -> Iterator[Job]:
            return self._candidates(session_id, statuses, parent_job_id, before, tell)

        for job in candidates() if before is None else self._behind(before, candidates):
            if parent_job_id is not None and job.parent_job_id != parent_job_id:
                continue
            if parent_msg_id is not None and job.parent_msg_id != parent_msg_id:
                continue
            if statuses is not None and job.status not in statuses:
                continue
            found.append(job)
            if limit is not None and len(found) >= limit:
                break
        return found

    def visible(
        self,
        session_id: str,
        status: JobStatus | str | Collection[JobStatus | str] | None = None,
        limit: int | None = 50,
        on_damage: OnDamage | None = None,
    ) -> Jobs:
        """The jobs that a session may see, newest first: its own, and those that it asked for in others (D6).
        What of its own cannot be read raises, or is told to `on_damage`, as with `list`."""
        found = self.list(session_id, status, limit=limit, on_damage=on_damage)
        at_most = None if limit is None else max(limit, 0)
        found += itertools.islice(called_jobs(self, session_id, _statuses(status)), at_most)
        found.sort(key=lambda job: job.created_at, reverse=True)
        return found[:at_most]

    def children(self, job_id: str, on_damage: OnDamage | None = None) -> _Ids:
        """Ids of the jobs that were submitted under it, oldest first. What cannot be read raises, or is told to
        `on_damage`, with its session."""
        found: dict[str, None] = {}
        for entry in self.index.by_parent(job_id):
            try:
                if self._is_there(entry):
                    found[entry.job_id] = None
            except (Damaged, RepositoryRefused) as error:
                (on_damage or raised)(entry.session_id, error)
        return list(found)

    def unfinished(self, session_id: str, on_damage: Callable[[Damaged], object] | None = None) -> Jobs:
        """The session's jobs that have not ended, newest first. A row or page that cannot be read is told to
        `on_damage` and hides no other; without it, it is raised."""
        return list(self.documents(session_id).jobs_newest_first(UNFINISHED, on_damage))

    def history(self, job_id: str) -> _Transitions:
        """The commits of a job's life, oldest first. Raises `UnknownJob`."""
        session_id = self._session_of(job_id)
        job = self.row(job_id)
        times = _times_of(job)
        return [
            attrs.evolve(t, time=times.get(t.status if t.kind == "transition" else t.kind) or t.time)
            for t in self._transitions(session_id, job_id, commits=job.revision + 1)
        ]

    def _transitions(self, session_id: str, job_id: str, *, commits: int | None) -> _Transitions:
        """By the derived trail where it has all `commits` of them, else from the log."""
        opened = self._opened(session_id)
        noted = [self._commit_at(opened.repository, commit_id) for commit_id in opened.trail.commits(job_id)]
        found = [t for t in (_transition_of(c, job_id) for c in noted if c is not None) if t is not None]
        if commits is not None and len(found) == commits:
            return found
        found = []
        for commit in opened.repository.log():
            transition = _transition_of(commit, job_id)
            if transition is not None:
                found.append(transition)
                if transition.status is JobStatus.PENDING and transition.kind == "transition":
                    break
        return found[::-1]

    @staticmethod
    def _commit_at(repository: Repository, commit_id: str) -> CommitInfo | None:
        try:
            return next(iter(repository.log(start=commit_id)), None)
        except (NotFound, Damaged):
            return None

    # --- upkeep ---

    def fsck(self, session_id: str) -> Report:
        """Check everything about one session; reads only. Raises `UnknownSession`."""
        self._check_usable()
        if not self.has_session(check_session_id(session_id)):
            why = self._unknown_session(session_id)
            if isinstance(why, UnknownSession):
                raise why
        return check_session(self, session_id)  # what else stands there is a finding

    def reindex(self, session_id: str | None = None, *, on_damage: OnDamage | None = None) -> int:
        """Put back what the home's index lacks of the rows of one session, or of all; how many jobs it lacked.

        Durable when it returns, and idempotent; may run beside writers. Rows that can be read are put back also
        where others cannot: that is told to `on_damage`, once a session, or raised at the end. Raises
        `UnknownSession`, `Damaged`, `RepositoryRefused`, `SessionBusy`, `StoreWriteFailed`.
        """
        self._check_usable()
        if session_id is not None and not self.has_session(check_session_id(session_id)):
            raise self._unknown_session(session_id)
        every = [session_id] if session_id is not None else [*self.sessions(), *(each for each, _ in self.misplaced())]
        return reindex(self, every, on_damage)

    def heal(self, session_id: str) -> None:
        """Remove what a killed writer left in a session (locks, temporary files, half a pack), and put
        work tree and index back to the newest commit; the next write would do the same.
        Raises `SessionBusy`, `StoreWriteFailed`, `Damaged`."""
        operation = Operation(decide=lambda view: None, result=lambda: None, give_up_at=self._give_up_at())
        self._committer.add(session_id, [operation])
        operation.future.result()

    def gc(self, session_id: str) -> Collected:
        """Bring one session's repository to its smallest size. Raises `SessionBusy`, `StoreWriteFailed`."""
        before = self._size_bytes(session_id)
        operation = Operation(decide=lambda view: None, result=lambda: None, collect=True)
        self._committer.add(session_id, [operation])
        operation.future.result()
        return Collected(before_bytes=before, after_bytes=self._size_bytes(session_id))

    # --- the committer's side ---

    def repository(self, session_id: str) -> Repository:
        return self._opened(session_id).repository

    def committed(
        self, session_id: str, before: str | None, after: str | None, made: Sequence[tuple[str, str]]
    ) -> None:
        opened = self._opened(session_id)
        opened.trail.note(made)
        if before != opened.own_head:
            opened.news += 1  # another program committed in between
        opened.own_head = after

    def preface(self, session_id: str) -> Operation:
        opened = self._opened(session_id)

        def decide(view: View) -> Change | None:
            if opened.own_head == view.commit_id:
                return None
            return restored(Documents(view, opened.memory), opened.repository, opened.own_head)

        return Operation(decide=decide, result=lambda: None)

    def rest(self, session_id: str) -> None:
        """Give back what sessions hold that were not used for the longest time."""
        with self._lock:
            oldest = list(itertools.islice(self._open, max(0, len(self._open) - _BUSY_SESSIONS)))
            surplus = max(0, len(self._open) - _OPEN_SESSIONS)
            closing = [self._open.pop(sid) for sid in oldest[:surplus] if sid != session_id]
            resting = [opened for sid in oldest[surplus:] if not (opened := self._open[sid]).rests]
            for opened in resting:
                opened.rests = True
        for opened in closing:
            opened.repository.close()
        for opened in resting:
            opened.memory.rest()
            opened.repository.rest()

    # --- the end ---

    def close(self, timeout: float | None = None) -> None:
        """Commit what waits (at most `timeout` seconds), then give back every file. Twice is once."""
        if os.getpid() != self._pid:
            return
        self._committer.close(timeout)
        with self._lock:
            self._closed = True
            opened = list(self._open.values())
            self._open.clear()
        for each in opened:
            each.repository.close()
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- within ---

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess
        if self._closed:
            raise Closed("the store is closed")

    def _opened(self, session_id: str) -> _Open:
        self._check_usable()
        return self._in_use(session_id)

    def _in_use(self, session_id: str) -> _Open:
        """As `_opened`, for the committer's thread, which ends before the store is closed."""
        with self._lock:
            opened = self._open.get(session_id)
            if opened is not None:
                self._open.move_to_end(session_id)
                opened.rests = False
                return opened
            repository, private = self._open_repository(session_id)
            opened = self._open[session_id] = _Open(repository, private)
            return opened

    def _in(self, session_id: str, decide: Callable[[Documents], Change | None]) -> Callable[[View], Change | None]:
        return lambda view: decide(Documents(view, self._in_use(session_id).memory))

    def _give_up_at(self) -> float:
        return self._committer.deadline(GIVE_UP_S)

    def _remember(self, job_id: str, session_id: str) -> None:
        with self._lock:
            self._sessions_of[job_id] = session_id
            self._sessions_of.move_to_end(job_id)
            while len(self._sessions_of) > _KNOWN_JOBS:
                self._sessions_of.popitem(last=False)

    def _session_of(self, job_id: str) -> str:
        self._check_usable()
        with self._lock:
            known = self._sessions_of.get(job_id)
        if known is not None:
            return known
        if is_prefix(job_id):
            for entry in self.index.by_id(job_id):
                if entry.job_id == job_id and self._is_there(entry):
                    self._remember(job_id, entry.session_id)
                    return entry.session_id
        raise self._unknown_job(job_id)

    def _is_there(self, entry: Entry) -> bool:
        """A hit in the index is only a hint: the row says whether the job exists."""
        try:
            return self.documents(entry.session_id).job(entry.job_id) is not None
        except UnknownSession:
            return False

    def _may_be_there(self, entry: Entry) -> bool:
        """As `_is_there`, and True where that cannot be read: who looks at the job says what is the matter."""
        try:
            return self._is_there(entry)
        except (Damaged, RepositoryRefused):
            return True

    def _refuse_known(self, job: Job, key: str | None, fresh_id: bool) -> None:
        entries: list[Entry] = []
        if not fresh_id:
            entries += [e for e in self.index.by_id(job.job_id) if e.job_id == job.job_id]
        if key is not None:
            entries += list(self.index.by_key(key))
        for entry in entries:
            try:
                first = self.documents(entry.session_id).job(entry.job_id)
            except UnknownSession:
                continue
            if first is not None:
                refuse_again(first, job)

    def _refuse_finished_parent(self, job: Job) -> None:
        """The quick check; the one that counts is in the transaction where both share a session."""
        if job.parent_job_id is None:
            return
        try:
            session_id = self._session_of(job.parent_job_id)
        except UnknownJob:
            raise UnknownJob(f"the parent job {job.parent_job_id} does not exist") from None
        if session_id != job.parent_session_id:
            parent = self.documents(session_id).job(job.parent_job_id)
            if parent is not None:
                refuse_child_of(parent)

    def _candidates(
        self,
        session_id: str | None,
        statuses: frozenset[JobStatus] | None,
        parent_job_id: str | None,
        before: str | None,
        tell: OnDamage,
    ) -> Iterator[Job]:
        if parent_job_id is not None and before is None:
            for job_id in reversed(self.children(parent_job_id, tell)):
                job = self.documents(self._session_of(job_id)).job(job_id)
                if job is not None and session_id in (None, job.parent_session_id):
                    yield job
        elif session_id is not None:
            if not self.has_session(check_session_id(session_id)):
                raise self._unknown_session(session_id)
            try:
                documents = self.documents(session_id)
                documents.older_pages()
            except (Damaged, RepositoryRefused) as error:
                tell(session_id, error)
                return
            wanted = statuses if before is None else None
            yield from documents.jobs_newest_first(wanted, functools.partial(tell, session_id))
        else:
            few = statuses is not None and statuses <= UNFINISHED and before is None
            yield from self._of_all_sessions(statuses if few else None, tell)

    def _behind(self, before: str, candidates: Callable[[], Iterator[Job]]) -> Iterator[Job]:
        """Those of `candidates` that are older than the job `before`, whether that is among them or not."""
        jobs = candidates()
        for job in jobs:
            if job.job_id == before:
                yield from jobs
                return
        newer: set[str] = set()
        for entry in self.index.newest_first():
            newer.add(entry.job_id)
            if entry.job_id == before:
                break
        else:
            raise self._unknown_job(before)
        yield from (job for job in candidates() if job.job_id not in newer)

    def _of_all_sessions(self, few: frozenset[JobStatus] | None, tell: OnDamage) -> Iterator[Job]:
        """Jobs of the whole home, newest first. `few` are statuses that few jobs have: one look at each
        session finds them all, without reading the others' rows."""
        sessions: dict[str, Documents | dict[str, Job] | None] = {}
        if tell is not raised:  # who lists what can be read hears of all that cannot, also where no index knows of it
            for session_id, error in self.misplaced():
                sessions[session_id] = None
                tell(session_id, error)
        met: set[str] = set()
        chosen: Documents | dict[str, Job] | None
        for entry in self.index.newest_first():
            if entry.job_id in met:
                continue
            met.add(entry.job_id)
            try:
                if entry.session_id in sessions:
                    chosen = sessions[entry.session_id]
                else:
                    chosen = documents = self.documents(entry.session_id)
                    documents.older_pages()  # where that can be read, what else cannot hides its own jobs only
                    if few is not None:
                        readable = documents.jobs_newest_first(few, functools.partial(tell, entry.session_id))
                        chosen = {job.job_id: job for job in readable}
                    if few is not None or len(sessions) < _BUSY_SESSIONS:
                        sessions[entry.session_id] = chosen
                if chosen is None:
                    continue
            except UnknownSession:
                continue
            except (Damaged, RepositoryRefused) as error:
                sessions[entry.session_id] = None
                tell(entry.session_id, error)
                continue
            try:
                job = chosen.get(entry.job_id) if isinstance(chosen, dict) else chosen.job(entry.job_id)
            except Damaged as error:
                tell(entry.session_id, error)
                continue
            if job is not None:
                yield job

    def _unknown_session(self, session_id: str) -> Refused:
        """What to raise where there is no such session, or something else in its place."""
        near = [s for s in self.sessions() if s.casefold().startswith(session_id.casefold()[:3])][:_CANDIDATES]
        hint = f"; there is {', '.join(near)}" if near else ""
        return UnknownSession(f"there is no session {session_id!r}{hint}", candidates=near)

    def _unknown_job(self, job_id: str) -> UnknownJob:
        candidates = []
        for entry in self.index.newest_first():
            with contextlib.suppress(Damaged, RepositoryRefused):  # only a hint
                if self._is_there(entry):
                    candidates.append(entry.job_id)
            if len(candidates) >= _CANDIDATES:
                break
        hint = f"; the newest are {', '.join(candidates)}" if candidates else "; there are no jobs yet"
        return UnknownJob(f"there is no job {job_id!r}{hint}", candidates=candidates)


def _close_page(documents: Documents) -> Change | None:
    if not documents.close_page_if_full():
        return None
    return Change(files=documents.changes, subject="page closed", trailers=[("Openjobs-Kind", "page")])


def _first_failure(operations: Sequence[Operation], when_done: Done | None) -> Future[Job]:
    """A future that gives what the last of them gives, or the first failure among them."""
    if len(operations) == 1:
        only: Future[Job] = operations[0].future
        if when_done is not None:
            only.add_done_callback(when_done)
        return only
    combined: Future[Job] = Answer()
    if when_done is not None:
        combined.add_done_callback(when_done)

    def done(last: Future[Any]) -> None:
        for op in operations:
            error = op.future.exception() if op.future.done() else None
            if error is not None:
                combined.set_exception(error)
                return
        combined.set_result(last.result())

    operations[-1].future.add_done_callback(done)
    return combined


def _statuses(status: JobStatus | str | Collection[JobStatus | str] | None) -> frozenset[JobStatus] | None:
    if status is None:
        return None
    try:
        return frozenset({JobStatus(status)} if isinstance(status, str) else {JobStatus(s) for s in status})
    except ValueError as error:
        raise InvalidInput(f"{error}; a status is one of {', '.join(JobStatus)}") from None


def _times_of(job: Job) -> dict[str, datetime | None]:
    """When a job entered each state, in milliseconds; a commit's own time has whole seconds."""
    return {
        JobStatus.PENDING: job.created_at,
        JobStatus.QUEUED: job.queued_at,
        JobStatus.RUNNING: job.started_at,
        job.status if job.terminal else "": job.completed_at,
        "cancel-request": job.cancel_requested_at,
    }


def _transition_of(commit: CommitInfo, job_id: str) -> Transition | None:
    if commit.trailer("Openjobs-Job") != job_id:
        return None
    kind, status = commit.trailer("Openjobs-Kind"), commit.trailer("Openjobs-Status")
    if kind not in ("transition", "cancel-request") or status is None or status not in set(JobStatus):
        return None
    return Transition(
        commit_id=commit.commit_id,
        time=commit.time,
        status=JobStatus(status),
        kind=kind,
        runner_id=commit.trailer("Openjobs-Runner"),
        subject=commit.subject,
    )
