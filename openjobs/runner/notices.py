"""Notices, the live side: who is told that background work has ended, and when. Source: spec 000.

    ended ─► recorded [with the end] ─► delivered [a message of the conversation] ─► consumed [it was seen]

Each arrow is a durable step of its own; what a crash leaves at one is found there by the next process. A job's
stage is in its row, a background command's in `tasks.jsonl`; that a message tells of an end is said by the message.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import Closed, Damaged, ForkedProcess, InvalidInput, InvalidTransition, OpenJobsError, UnknownJob
from ..ids import check_session_id, short
from ..jobs import Job, NoticeStage
from ..session import Documents, Node
from ..session.notices import Notice, of_job
from ..session.text import beginning
from ..store import JobStore
from ..store.damage import OnDamage, once, raised
from ..store.notices import by_session, deliver_later, note_later, pending_jobs
from ..store.presence import FileActive
from .strangers import call_out, leave_if_forked

if TYPE_CHECKING:
    from ..processes import Task
    from ..processes.client import TaskClient

log = logging.getLogger(__name__)

Callback = Callable[[Notice], object]
List = list[Notice]

#: how soon what other processes ended is seen
LOOK_S = 0.25
#: a callback that raised is called again after so long: at first, and at most
_PAUSES_S = (1.0, 60.0)
#: ends that are remembered: of each subscription those it was called with, and those `ack` finds at once
_REMEMBERED = 4096
_LABEL_CHARS = 200
_BEFORE = {NoticeStage.DELIVERED: NoticeStage.RECORDED, NoticeStage.CONSUMED: NoticeStage.DELIVERED}


class NoticeSubscription:
    """One listener; `close` it, or use it as a context manager. No call begins after `close` returned, but one may
    be under way."""

    def __init__(
        self, notices: Notices, callback: Callback, session_id: str | None, on_end: Callable[[], object] | None
    ) -> None:
        self._notices = notices
        self.callback = callback
        self.session_id = session_id
        self.on_end = on_end
        self.closed = False
        #: touched by the notices' thread only: what it was called with, and what failed (when to try again, the pause)
        self.called: OrderedDict[str, None] = OrderedDict()
        self.failed: dict[str, tuple[Notice, float, float]] = {}
        #: sessions whose pending ends are still to be read (None: all it is for), when, and the pause after that
        self.unread: Sequence[str] | None = None
        self.read_at, self.pause_s = 0.0, _PAUSES_S[0]

    def close(self) -> None:
        interrupt = self._notices._unsubscribe(self)
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> NoticeSubscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Notices:
    """Guarantees

    - Each end is told by exactly one message, whichever processes deliver and wherever one of them dies.
    - A message is added at the head of a conversation that has no unfinished foreground turn, never behind one.
    - A callback is called at least once for every end that is pending while it is subscribed.

    Assumptions: the store stays open as long as this. Callbacks may take their time: they have a thread of their own,
    which they share.

    What the lock protects: the subscriptions, the thread, what `ack` remembers.
    """

    def __init__(
        self,
        store: JobStore,
        *,
        forget: Callable[[str], object] = lambda job_id: None,
        mend: Callable[[str], object] = lambda session_id: None,
        own_id: str | None = None,
        own: Callable[[str], Iterable[Job]] = lambda session_id: (),
    ) -> None:
        """`forget` is told of jobs whose rows were changed: who keeps ended jobs in memory drops them. `mend` ends
        what dead runners left in a session: a turn of theirs must not hold back notices for ever. `own` gives the
        unfinished jobs of a session that run in the runner `own_id`, without waiting for anything."""
        self._mend = mend
        self._store = store
        self._forget = forget
        self._own_id = own_id
        self._own = own
        self._say_damage = once(
            lambda session_id, error: log.warning(
                "session %s: what has ended there and cannot be read is not told yet: %s", session_id, error
            )
        )
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._subscriptions: tuple[NoticeSubscription, ...] = ()
        self._thread: threading.Thread | None = None
        #: for the thread; each has one of its own
        self._news: queue.SimpleQueue[Notice | NoticeSubscription | None] = queue.SimpleQueue()
        self._known: OrderedDict[str, Notice] = OrderedDict()
        self._tasks: TaskClient | None = None
        self._closed = False
        #: touched by the thread only: sessions as last looked at
        self._states: dict[str, object] = {}

    # --- asking ------------------------------------------------------------------------------------

    def pending(
        self, session_id: str | None = None, *, job_id: str | None = None, on_damage: OnDamage | None = None
    ) -> List:
        """What has ended and nobody was told of, oldest first: of one conversation, or of all.

        With `job_id` what that job's own turn started instead: a turn with a loop of its own takes these with `ack`.
        Until such a job has ended they are not the conversation's. Raises `UnknownSession`, and `Damaged` for a row
        or page that cannot be read, or tells that to `on_damage` and gives all others; of all sessions, what cannot
        be read is left out and logged.
        """
        if session_id is not None:
            check_session_id(session_id)
            self._store.session(session_id)
            return self._remember(self._pending(session_id, job_id, once(on_damage or raised)))
        found: List = []
        for each in self._store.sessions():
            try:
                found += self._pending(each, job_id, on_damage or self._say_damage)
            except (OpenJobsError, OSError) as error:
                log.warning("the notices of session %s cannot be read: %s", each, error)
        return self._remember(sorted(found, key=lambda notice: notice.ended_at))

    def ack(self, event_id: str) -> bool:
        """A host with a conversation of its own has told it: the notice is consumed, durably, and not told again.

        True where this call did it; False where there is nothing to tell (any more) by that id. Raises what the
        store or the journal does; then ask again.
        """
        with self._lock:
            notice = self._known.get(event_id)
        if notice is None:
            notice = next((each for each in self._everything() if each.event_id == event_id), None)
        if notice is None:
            return False
        if notice.kind == "job":
            return self._consume_job(notice.id)
        return self._consume_task(notice.session_id, notice.id)

    def consume(self, job_or_task_id: str) -> bool:
        """Somebody has read the result by its id: its end needs no notice any more, or the notice was seen.

        A unique beginning of an id is enough. True where this changed something; a job that has not ended, or of
        whose end nobody is to be told, is left. Raises `UnknownJob`, `UnknownTask`, `AmbiguousId`, and what the
        store or the journal does.
        """
        try:
            full = len(job_or_task_id) == _UUID_CHARS
            return self._consume_job(job_or_task_id if full else self._store.resolve(job_or_task_id))
        except UnknownJob:
            if self._store.home is None:
                raise
        entry = self._client().find(job_or_task_id)
        return self._consume_task(entry.session_id, entry.job_id)

    # --- delivering --------------------------------------------------------------------------------

    def deliver(self, session_id: str) -> Node | None:
        """Add one message that tells of everything that is pending, at the head of the conversation.

        Durable when it returns. None where nothing is pending, or where a foreground turn of the session is
        unfinished: then the next turn is told. Two at once, in any processes, tell each end once. What cannot be
        read is logged, and told once it can; it holds back others only where a foreground turn may be running there,
        which raises `Damaged`. Raises `UnknownSession`, `SessionBusy`, `StoreWriteFailed`, `OutcomeUnknown` (deliver
        again).
        """
        check_session_id(session_id)
        self._store.session(session_id)
        others = self._others(session_id)
        documents = self._store.documents(session_id)
        say = functools.partial(self._say_damage, session_id)
        if not others and next(documents.jobs_noticed(NoticeStage.RECORDED, say), None) is None:
            return None
        may_run = functools.partial(self._may_run, session_id)
        delivery = deliver_later(self._store, session_id, others, may_run).result()
        if delivery.held:
            self._mend(session_id)
            delivery = deliver_later(self._store, session_id, others, may_run).result()
        for error in delivery.damage:
            say(error)
        if delivery.held:
            if delivery.hidden is None:
                return None
            raise Damaged(
                f"session {session_id} is not told what has ended: {delivery.hidden}; a foreground turn that stands "
                "there may be running, and nothing is put behind one. It is told once that is mended, or whoever may "
                "run it is done or gone.",
                path=delivery.hidden.path,
            ) from delivery.hidden
        for notice in delivery.told:
            self._forget(notice.id)
        # What stands in other files follows; where a crash prevents that, the next delivery finds the message.
        self._note(session_id, delivery.seen)
        if delivery.node is not None:
            log.info("session %s was told of %d ended jobs and commands", session_id, len(delivery.told))
        return delivery.node

    def _may_run(self, session_id: str, job_id: str | None) -> bool:
        """Whether a job of the session whose row cannot be read may be running: that one, or any foreground turn.

        A runner marks a session before its first commit there, and until its last job there has ended: where no other
        one that is alive has, no job is running but those of this one, which knows them. Waits for nothing.
        """
        for live in self._own(session_id):
            if live.foreground if job_id is None else live.job_id == job_id:
                return True
        active, leases = self._store.active, self._store.leases
        return any(
            session_id in active.sessions(runner_id) and leases.is_held(runner_id)
            for runner_id in active.runners()
            if runner_id != self._own_id
        )

    def _others(self, session_id: str) -> List:
        """What the session is to be told of that is not in its own rows, told already or not."""
        found = pending_jobs(self._store, session_id, on_damage=self._say_damage)
        jobs = [job for job in found if job.parent_session_id != session_id]
        documents = self._store.documents(session_id)
        return [
            *(
                of_job(job)
                for job in jobs
                if self._is_conversations(documents, session_id, job.parent_job_id, self._say_damage)
            ),
            *(of_task(task) for task in self._untold_tasks(session_id) if task.job_id is None),
        ]

    def _note(self, session_id: str, seen: frozenset[str]) -> None:
        """Write down what the messages say: delivered, and consumed where an answer follows."""
        documents = self._store.documents(session_id)
        for stage in (NoticeStage.DELIVERED, NoticeStage.CONSUMED):
            for note in (self._note_jobs, self._note_tasks):
                try:
                    note(documents, session_id, stage, seen)
                except (OpenJobsError, OSError) as error:
                    log.warning("what session %s was told is not noted yet: %s", session_id, error)

    def _note_jobs(self, documents: Documents, session_id: str, stage: NoticeStage, seen: frozenset[str]) -> None:
        jobs = [
            job
            for job in pending_jobs(self._store, session_id, _BEFORE[stage], self._say_damage)
            if job.parent_session_id != session_id and _is_so(documents, job.event_id, stage, seen)
        ]
        for target, ids in by_session(jobs).items():
            for changed in note_later(self._store, target, ids, stage).result():
                self._forget(changed.job_id)

    def _note_tasks(self, documents: Documents, session_id: str, stage: NoticeStage, seen: frozenset[str]) -> None:
        from ..processes.task import Fact

        delivered = stage is NoticeStage.CONSUMED
        tasks = [
            task
            for task in self._untold_tasks(session_id, delivered=delivered)
            if _is_so(documents, task.event_id, stage, seen)
        ]
        if tasks:
            fact = Fact.CONSUMED if delivered else Fact.DELIVERED
            self._client().journal(session_id).record_told(fact, {task.task_id: task.event_id for task in tasks})

    # --- listening ---------------------------------------------------------------------------------

    def subscribe(
        self,
        callback: Callback,
        session_id: str | None = None,
        *,
        on_end: Callable[[], object] | None = None,
    ) -> NoticeSubscription:
        """Call `callback(notice)` for everything that is pending now and ends from now on, of one conversation or all.

        At least once each, from one thread, after the end is durable: again in the next process for what nobody
        delivered, acknowledged or consumed, and again after a pause where the callback raised. What ends in other
        processes is seen within half a second. `on_end` is called when nothing more will come.
        """
        subscription = NoticeSubscription(self, callback, session_id, on_end)
        with self._lock:
            if os.getpid() != self._pid:
                raise ForkedProcess
            if self._closed:
                raise Closed("the runner is closed")
            self._subscriptions += (subscription,)
            if self._thread is None:
                self._news = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._serve, args=(self._news,), name="openjobs-notices", daemon=True
                )
                self._thread.start()
            self._news.put(subscription)
        return subscription

    def ended(self, job: Job) -> None:
        """A step of a job's end: its end is durable, and live listeners have heard of it. Never waits."""
        if job.notice is NoticeStage.RECORDED and self._subscriptions:
            self._news.put(of_job(job))

    def close(self) -> KeyboardInterrupt | None:
        """No more calls. Waits for the one under way, unless called by it. See `strangers` for what is returned."""
        if os.getpid() != self._pid:
            return None
        with self._lock:
            self._closed = True
            left, self._subscriptions = self._subscriptions, ()
            thread, self._thread = self._thread, None
        self._news.put(None)
        interrupt = None
        for subscription in left:
            interrupt = self._over(subscription) or interrupt
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        with self._lock:
            tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.close()
        return interrupt

    def _unsubscribe(self, subscription: NoticeSubscription) -> KeyboardInterrupt | None:
        with self._lock:
            if subscription.closed:
                return None
            self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)
            thread = None
            if not self._subscriptions and self._thread is not None:
                thread, self._thread = self._thread, None
                self._news.put(None)
        interrupt = self._over(subscription)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        return interrupt

    def _over(self, subscription: NoticeSubscription) -> KeyboardInterrupt | None:
        subscription.closed = True
        if subscription.on_end is None:
            return None
        return call_out(subscription.on_end, log, "a listener's end failed")[1]

    # --- the thread --------------------------------------------------------------------------------

    def _serve(self, queue_of_news: queue.SimpleQueue[Notice | NoticeSubscription | None]) -> None:
        next_look = time.monotonic() + LOOK_S
        while True:
            try:
                news = queue_of_news.get(timeout=max(0.0, next_look - time.monotonic()))
            except queue.Empty:
                next_look = time.monotonic() + LOOK_S
                self._look()
                continue
            if news is None:
                return
            if isinstance(news, Notice):
                self._emit([news], self._subscriptions)
            else:
                self._replay(news)

    def _replay(self, subscription: NoticeSubscription) -> None:
        """What was pending before it came. What cannot be read now is read after a pause."""
        found: List = []
        unread: list[str] = []
        try:
            if subscription.unread is None:
                only = subscription.session_id
                subscription.unread = self._store.sessions() if only is None else (only,)
            for session_id in subscription.unread:
                try:
                    damage: list[OpenJobsError] = []
                    found += self.pending(session_id, on_damage=lambda where, error: damage.append(error))  # noqa: B023
                    for each in damage:
                        log.warning("not all notices of session %s can be read now: %s", session_id, each)
                    if damage:
                        unread.append(session_id)
                except (LookupError, InvalidInput, Closed):
                    continue  # nothing will ever be read there
                except (OpenJobsError, OSError) as error:
                    log.warning("the notices of session %s cannot be read now: %s", session_id, error)
                    unread.append(session_id)
            subscription.unread = unread
        except OSError as error:
            log.warning("the sessions of the home cannot be listed now: %s", error)
        if subscription.unread != []:
            subscription.read_at = time.monotonic() + subscription.pause_s
            subscription.pause_s = min(subscription.pause_s * 2, _PAUSES_S[1])
        self._emit(sorted(found, key=lambda notice: notice.ended_at), (subscription,))

    def _look(self) -> None:
        """What other processes, and background commands, came to; and callbacks that failed."""
        now = time.monotonic()
        for subscription in self._subscriptions:
            due = [notice for notice, when, _ in subscription.failed.values() if when <= now]
            self._emit(due, (subscription,))
            if subscription.unread != [] and subscription.read_at <= now:
                self._replay(subscription)
        active = self._active()
        self._states = {session_id: state for session_id, state in self._states.items() if session_id in active}
        for session_id in active:
            try:
                state = (self._store.head(session_id), self._journal_state(session_id))
                if self._states.get(session_id) == state:
                    continue
                self._emit(self._recorded_in(session_id), self._subscriptions)
                self._states[session_id] = state
            except LookupError:
                continue
            except (OpenJobsError, OSError) as error:
                log.debug("session %s cannot be looked at: %s", session_id, error)

    def _active(self) -> set[str]:
        """Sessions in which somebody alive, or not yet recovered, has something to end."""
        home = self._store.home
        if home is None:
            return set()
        from ..processes.client import MARKS

        found: set[str] = set()
        for marks in (FileActive(home, self._store.disk), FileActive(home, self._store.disk, MARKS)):
            for owner_id in marks.runners():
                found.update(marks.sessions(owner_id))
        return found

    def _recorded_in(self, session_id: str) -> List:
        """Pending ends of what ran in the session, whichever conversation they are for."""
        say = functools.partial(self._say_damage, session_id)
        jobs = list(self._store.documents(session_id).jobs_noticed(NoticeStage.RECORDED, say))
        found = [of_job(job) for job in reversed(jobs)]
        found += [of_task(task) for task in self._untold_tasks(session_id) if task.job_id is None]
        return sorted(found, key=lambda notice: notice.ended_at)

    def _emit(self, notices: Iterable[Notice], subscriptions: Sequence[NoticeSubscription]) -> None:
        for notice in notices:
            self._remember([notice])
            for subscription in subscriptions:
                if subscription.session_id in (None, notice.session_id) and not subscription.closed:
                    self._call(subscription, notice)

    def _call(self, subscription: NoticeSubscription, notice: Notice) -> None:
        if notice.event_id in subscription.called:
            return
        _, when, pause_s = subscription.failed.get(notice.event_id, (notice, 0.0, _PAUSES_S[0]))
        if when > time.monotonic():
            return
        call = functools.partial(subscription.callback, notice)
        called, _ = call_out(call, log, "a callback failed for the end of %s; it is called again", short(notice.id))
        leave_if_forked(self._pid)
        if not called:
            again = time.monotonic() + pause_s
            subscription.failed[notice.event_id] = (notice, again, min(pause_s * 2, _PAUSES_S[1]))
            return
        subscription.failed.pop(notice.event_id, None)
        subscription.called[notice.event_id] = None
        while len(subscription.called) > _REMEMBERED:
            subscription.called.popitem(last=False)

    # --- within ------------------------------------------------------------------------------------

    def _pending(self, session_id: str, job_id: str | None, tell: OnDamage) -> List:
        documents = self._store.documents(session_id)
        jobs = [of_job(job) for job in pending_jobs(self._store, session_id, on_damage=tell)]
        tasks = [of_task(task) for task in self._untold_tasks(session_id)]
        found: List = []
        for notice in (*jobs, *tasks):
            try:
                # A message may tell of it already, where a crash kept the stage from following.
                if self._is_asked_for(documents, session_id, notice, job_id, tell) and (
                    (notice.kind == "job" and notice.target_session_id == session_id)
                    or documents.notice_of(notice.event_id) is None
                ):
                    found.append(notice)
            except Damaged as error:
                tell(session_id, error)
        return sorted(found, key=lambda notice: notice.ended_at)

    def _is_asked_for(
        self, documents: Documents, session_id: str, notice: Notice, job_id: str | None, tell: OnDamage
    ) -> bool:
        if job_id is not None:
            return notice.parent_job_id == job_id
        if notice.kind == "task":
            return notice.parent_job_id is None  # a job's own commands are the job's affair, and end with it
        return self._is_conversations(documents, session_id, notice.parent_job_id, tell)

    def _is_conversations(
        self, documents: Documents, session_id: str, parent_job_id: str | None, tell: OnDamage
    ) -> bool:
        """Whether the conversation is to hear of something that this job's turn started: once the job has ended."""
        if parent_job_id is None:
            return True
        try:
            parent = documents.job(parent_job_id)
        except Damaged as error:
            tell(session_id, error)
            return not self._may_run(session_id, parent_job_id)
        return parent is None or parent.terminal

    def _everything(self) -> Iterator[Notice]:
        """Every end that nobody was told of, those of running jobs' turns too."""
        for session_id in self._store.sessions():
            try:
                yield from (of_job(job) for job in pending_jobs(self._store, session_id, on_damage=self._say_damage))
                yield from (of_task(task) for task in self._untold_tasks(session_id))
            except (OpenJobsError, OSError) as error:
                log.warning("the notices of session %s cannot be read: %s", session_id, error)

    def _remember(self, notices: List) -> List:
        with self._lock:
            for notice in notices:
                self._known[notice.event_id] = notice
                self._known.move_to_end(notice.event_id)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return notices

    def _consume_job(self, job_id: str) -> bool:
        job = self._store.row(job_id)
        if job.notice is None or not job.terminal or job.notice is NoticeStage.CONSUMED:
            return False
        changed = note_later(self._store, job.parent_session_id, [job_id], NoticeStage.CONSUMED).result()
        self._forget(job_id)
        return bool(changed)

    def _consume_task(self, session_id: str, task_id: str) -> bool:
        from ..processes.task import Fact

        journal = self._client().journal(session_id)
        task = journal.get(task_id)
        if not task.terminal or task.event_id is None or task.consumed:
            return False
        try:
            journal.record(task.task_id, Fact.CONSUMED, event_id=task.event_id)
        except InvalidTransition:
            return False  # somebody else was first
        return True

    def _untold_tasks(self, session_id: str, *, delivered: bool = False) -> list[Task]:
        if self._journal_state(session_id) is None:
            return []
        return self._client().journal(session_id).untold(delivered=delivered)

    def _journal_state(self, session_id: str) -> object:
        """One stat; None where the session never had a background command."""
        home = self._store.home
        if home is None:
            return None
        try:
            found = os.stat(home / "sessions" / session_id / _TASKS)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _client(self) -> TaskClient:
        from ..processes.client import TaskClient  # late: most processes have no background commands

        assert self._store.home is not None
        with self._lock:
            if self._tasks is None:
                self._tasks = TaskClient(self._store.home, disk=self._store.disk, clock=self._store.clock)
            return self._tasks


#: the name of a session's journal of background commands (`processes.journal.NAME`, which is imported late)
_TASKS = "tasks.jsonl"
_JOIN_S = 5.0
_UUID_CHARS = 36


def of_task(task: Task) -> Notice:
    """The notice of an ended background command of a session."""
    assert task.event_id is not None
    assert task.ended_at is not None
    command = task.command if isinstance(task.command, str) else " ".join(task.command)
    return Notice(
        event_id=task.event_id,
        session_id=task.session_id,
        kind="task",
        id=task.task_id,
        status=_how(task),
        label=task.description or command[:_LABEL_CHARS],
        excerpt=beginning(task.error),
        ended_at=task.ended_at,
        target_session_id=task.session_id,
        parent_job_id=task.job_id,
    )


def _how(task: Task) -> str:
    if task.signal is not None:
        return f"{task.status.value} (signal {task.signal})"
    return task.status.value if not task.exit_code else f"{task.status.value} (exit code {task.exit_code})"


def _is_so(documents: Documents, event_id: str | None, stage: NoticeStage, seen: frozenset[str]) -> bool:
    """Whether a message tells of it (delivered), or is answered as well (consumed)."""
    if stage is NoticeStage.CONSUMED:
        return event_id in seen
    try:
        return event_id is not None and documents.notice_of(event_id) is not None
    except Damaged:  # as far as can be read, nothing tells of it
        return False
