"""Looking after jobs without running any: read, wait, cancel, and recover what is met.

A `JobClient` has no pool and holds no lease. `JobRunner` uses one for the jobs that are not its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future

from ..clock import Clock
from ..errors import Closed, Damaged, ForkedProcess, InvalidTransition, OpenJobsError, RepositoryRefused, UnknownSession
from ..jobs import Cancelled, CancelRequested, Job, JobStatus
from ..sign import Sign
from ..store import JobStore
from ..store.damage import OnDamage, once
from ..store.index import Entry
from .heads import Heads, Watch
from .recovery import Recovery
from .timers import Timers
from .waiting import ALL, Waiter, check_ids, check_mode, check_timeout

log = logging.getLogger(__name__)

Jobs = list[Job]
Ids = list[str]
Requests = list[Future[Job]]
Statuses = JobStatus | str | Collection[JobStatus | str]

_UUID_CHARS = 36


class JobClient:
    """Reads, waits for, cancels and recovers the jobs of a home.

    Guarantees: changes of other processes are seen within half a second; an unfinished job whose
    runner died is ended as errored by whatever call meets it; nothing is ever run.

    Assumptions: the store stays open as long as the client; `close` it before the store.

    What each lock protects: none of its own. Waits are `Waiter` objects, told by the timers' thread.
    """

    def __init__(
        self,
        store: JobStore,
        *,
        clock: Clock | None = None,
        timers: Timers | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        self.store = store
        self._clock: Clock = clock if clock is not None else store.clock
        self._timers = timers if timers is not None else Timers(self._clock, "openjobs client timers")
        self._owns_timers = timers is None
        self.heads = Heads(store.head, self._timers)
        self.recovery = recovery if recovery is not None else Recovery(store, store.new_id)
        self._pid = os.getpid()
        self._closed = False

    # --- reading ---

    def get(self, job_id: str) -> Job:
        """The job as it stands; a unique beginning of its id is enough. Raises `UnknownJob`, `AmbiguousId`."""
        self._check()
        return self.recovery.mend(self.store.get(self.full_id(job_id)))

    def outcome(self, job_id: str) -> Job:
        """As `get`, also where the prompt cannot be read: then `description` has its beginning only."""
        self._check()
        return self.recovery.mend(self.store.outcome(self.full_id(job_id)))

    def list(
        self,
        session_id: str | None = None,
        status: Statuses | None = None,
        parent_job_id: str | None = None,
        parent_msg_id: str | None = None,
        limit: int | None = 50,
        before: str | None = None,
        on_damage: OnDamage | None = None,
    ) -> Jobs:
        """Jobs, newest first, with their texts as lists show them (`get` has them whole). No session is all;
        what cannot be read raises, or is told to `on_damage`, with its session."""
        self._check()
        read = functools.partial(
            self.store.list,
            session_id=session_id,
            status=status,
            parent_job_id=self.full_id(parent_job_id) if parent_job_id is not None else None,
            parent_msg_id=parent_msg_id,
            limit=limit,
            before=self.full_id(before) if before is not None else None,
            on_damage=on_damage,
        )
        found = read()
        return read() if self._mended(found) else found

    def visible(
        self, session_id: str, status: Statuses | None = None, limit: int | None = 50, on_damage: OnDamage | None = None
    ) -> Jobs:
        """The jobs that a session may see and stop, newest first: its own, and those that it asked for in others
        (spec 003, D6). Raises `UnknownSession`, and what cannot be read, or tells that to `on_damage`."""
        self._check()
        found = self.store.visible(session_id, status, limit, on_damage)
        return self.store.visible(session_id, status, limit, on_damage) if self._mended(found) else found

    # --- waiting ---

    def await_job(self, job_id: str, timeout: float | None = None) -> Job:
        """The job once it has ended, or as it stands after `timeout` seconds. Raises `UnknownJob`."""
        return self.await_tasks([job_id], ALL, timeout)[0]

    def await_tasks(self, ids: Sequence[str], mode: str = ALL, timeout: float | None = None) -> Jobs:
        """The jobs in the order given, once all (or any) of them have ended, or as they stand at `timeout`."""
        timeout = check_timeout(timeout)
        enough = Sign()
        wait = self.open_wait(ids, mode, enough.set)
        try:
            if not wait.done:
                self._clock.wait(enough, timeout)
        finally:
            wait.close()
        return wait.answers()

    def open_wait(self, ids: Sequence[str], mode: str, wake: Callable[[], None]) -> ClientWait:
        """A wait that calls `wake` when it is over and blocks nobody. Must be closed. Raises `UnknownJob`."""
        self._check()
        check_mode(mode)
        return ClientWait(self, [self.full_id(job_id) for job_id in check_ids(ids)], mode, wake)

    def follow(self, job_id: str, waiter: Waiter) -> Callable[[], None]:
        """Tell `waiter` of the job's end; the result stops that. Raises `UnknownJob`."""
        job = self.recovery.mend(self.store.outcome(job_id))
        if job.terminal:
            waiter.ended(job)
            return lambda: None
        watch: Watch | None = None

        def look(changed: bool) -> None:
            seen = self.store.outcome(job_id) if changed else job
            seen = self.recovery.mend(seen)
            if seen.terminal:
                waiter.ended(seen)
                if watch is not None:
                    self.heads.stop(watch)

        watch = self.heads.watch(job.parent_session_id, look)
        return functools.partial(self.heads.stop, watch)

    # --- cancelling ---

    def cancel(self, job_id: str, reason: str | None = None) -> Job:
        """Ask for the end of a job and its descendants; the job as it stands.

        Its runner ends it within half a second; where that runner is dead, the job is ended here. A
        finished job stays as it is. Raises `UnknownJob`, `SessionBusy`, `StoreWriteFailed`.
        """
        self._check()
        job = self.ask_to_stop(self.full_id(job_id), reason)
        for request in self.ask_below(job, reason):
            error = request.exception()
            if error is not None and not isinstance(error, InvalidTransition):
                log.warning("a job under %s was not asked to stop: %s", job.job_id, error)
        return job

    def cancel_session(self, session_id: str, reason: str | None = None) -> Jobs:
        """Ask for the end of every unfinished job of a session, and their descendants. Raises `Damaged` for what
        cannot be read, after all others were asked."""
        self._check()
        return cancel_unfinished(self.store, session_id, lambda job_id: self.cancel(job_id, reason))

    def ask_to_stop(self, job_id: str, reason: str | None) -> Job:
        """One job that is not this process's own."""
        job = self.recovery.mend(self.store.outcome(job_id))
        if job.terminal:
            return job
        try:
            if job.runner_id is None:  # written by hand: nobody else will end it
                ended = self.store.apply(job_id, Cancelled(event_id=self.store.new_id(), reason=reason))
                self.recovery.begin_card(ended)
                return ended
            if job.cancel_requested_at is not None:
                return job
            return self.store.apply(job_id, CancelRequested(reason=reason))
        except InvalidTransition:  # it ended, or somebody else asked, in between
            return self.store.outcome(job_id)

    def ask_below(self, job: Job, reason: str | None, own: Callable[[str], bool] = lambda job_id: False) -> Requests:
        """Ask all unfinished jobs under `job` to stop; waits for nothing and returns the requests on their way.

        `own` is told of each first, and answers True for one that needs no request: the caller's own. One that
        cannot be read is logged and keeps no other from being asked, nor what is under it: the home's index, not the
        row, says whose child a job is.
        """
        requests: Requests = []

        @once
        def say(session_id: str, error: OpenJobsError) -> None:
            log.warning("not all jobs under %s were asked to stop: %s", job.job_id, error)

        around, met = [job.job_id], {job.job_id}
        while around:
            below = {entry.job_id: entry for parent in around for entry in self.store.index.by_parent(parent)}
            around = [child for child in below if child not in met]
            met.update(around)
            for child in around:
                try:
                    if not own(child) and self._can_be_asked(below[child]):
                        request = CancelRequested(reason=under(job, reason))
                        requests.append(self.store.apply_later(child, request, keep=True))
                except (Damaged, RepositoryRefused) as error:
                    say(below[child].session_id, error)
        return requests

    def _can_be_asked(self, entry: Entry) -> bool:
        """The index knows an id before its job is written, and keeps those of sessions that are gone."""
        try:
            job = self.store.documents(entry.session_id).job(entry.job_id)
        except UnknownSession:
            return False
        return job is not None and not job.terminal and job.cancel_requested_at is None and job.runner_id is not None

    # --- the rest ---

    def recover(self) -> Jobs:
        """End what dead runners left behind; returns those jobs. Idempotent."""
        self._check()
        return self.recovery.run()

    def full_id(self, job_id: str) -> str:
        """`job_id`, or the one id that begins with it. Raises `UnknownJob`, `AmbiguousId`."""
        return job_id if isinstance(job_id, str) and len(job_id) == _UUID_CHARS else self.store.resolve(job_id)

    def close(self) -> None:
        """Ends the client's thread, if there is one. The store stays open."""
        self._closed = True
        if self._owns_timers and os.getpid() == self._pid:
            self._timers.close()

    def __enter__(self) -> JobClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess
        if self._closed:
            raise Closed("the client is closed")

    def _mended(self, jobs: Iterable[Job]) -> bool:
        """Whether any of these was a dead runner's and has been ended."""
        runners = {job.runner_id for job in jobs if not job.terminal}
        dead = {runner_id for runner_id in runners if self.recovery.is_dead(runner_id)}
        met = [job for job in jobs if not job.terminal and job.runner_id in dead]
        mended = [self.recovery.mend(job) for job in met]
        return any(after is not before for before, after in zip(met, mended, strict=True))


class ClientWait:
    """A wait under way; `close` it, then ask for its `answers`."""

    def __init__(self, client: JobClient, ids: Ids, mode: str, wake: Callable[[], None]) -> None:
        self._client = client
        self._ids = ids
        self._waiter = Waiter(ids, mode, wake)
        self._stops = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            for job_id in dict.fromkeys(ids):
                stack.callback(client.follow(job_id, self._waiter))
            self._stops = stack.pop_all()

    @property
    def done(self) -> bool:
        return self._waiter.done

    def close(self, *, block: bool = True) -> None:
        self._stops.close()

    def answers(self) -> Jobs:
        return answers(self._ids, self._waiter, self._client.outcome)


def cancel_unfinished(
    store: JobStore, session_id: str, cancel: Callable[[str], Job], but: Collection[str] = ()
) -> Jobs:
    """`cancel` each unfinished job of a session but these. Raises `Damaged` for what cannot be read, after all
    others were asked."""
    damage: list[Damaged] = []
    asked: Jobs = []
    for job in store.unfinished(session_id, damage.append):
        if job.job_id not in but:
            try:
                asked.append(cancel(job.job_id))
            except Damaged as error:
                damage.append(error)
    if damage:
        raise damage[0]
    return asked


def answers(ids: Sequence[str], waiter: Waiter, get: Callable[[str], Job]) -> Jobs:
    """What a wait came to: each job as it ended, or as it stands."""
    if waiter.error is not None:
        raise waiter.error
    return [waiter.jobs[job_id] if job_id in waiter.jobs else get(job_id) for job_id in ids]


def under(parent: Job, reason: str | None) -> str:
    """The reason that a descendant of a cancelled job is given."""
    return f"its ancestor {parent.job_id} was cancelled" + (f": {reason}" if reason else "")
