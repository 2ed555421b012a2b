"""The runner and the client for asyncio hosts: the same names, awaitable.

    runner = AsyncJobRunner(JobRunner(store, sync_fn=work))
    async with runner:
        job = await runner.submit(SpawnRequest(prompt="probe", parent_session_id=sid))
        job = await runner.await_job(job.job_id, timeout=60)

The loop is never blocked. A wait is a callback, not a thread, so ten thousand of them are cheap;
short readings of the store run in the loop's default executor. Cancelling the awaiting task
cancels only the wait; the job goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from .jobs import Job, SpawnRequest, SyncFn
from .runner import HubEvent, JobClient, JobRunner, RunnerStats
from .runner.client import Statuses
from .runner.hub import DEFAULT_CAPACITY
from .runner.notices import Notices
from .runner.waiting import ALL, check_timeout
from .session import Node
from .session.notices import Notice
from .store.damage import OnDamage

T = TypeVar("T")
Jobs = list[Job]


class _Wait(Protocol):
    @property
    def done(self) -> bool: ...
    def close(self, *, block: bool = True) -> None: ...
    def answers(self) -> Jobs: ...


class _Both(Protocol):
    """What a runner and a client have in common."""

    def get(self, job_id: str) -> Job: ...
    def list(
        self,
        session_id: str | None = None,
        status: Statuses | None = None,
        parent_job_id: str | None = None,
        parent_msg_id: str | None = None,
        limit: int | None = 50,
        before: str | None = None,
    ) -> Jobs: ...
    def open_wait(self, ids: Sequence[str], mode: str, wake: Callable[[], None]) -> _Wait: ...
    def cancel(self, job_id: str, reason: str | None = None) -> Job: ...
    def cancel_session(self, session_id: str, reason: str | None = None) -> Jobs: ...
    def recover(self) -> Jobs: ...


class _Async:
    def __init__(self, sync: _Both) -> None:
        self._sync = sync

    async def get(self, job_id: str) -> Job:
        return await asyncio.to_thread(self._sync.get, job_id)

    async def list(
        self,
        session_id: str | None = None,
        status: Statuses | None = None,
        parent_job_id: str | None = None,
        parent_msg_id: str | None = None,
        limit: int | None = 50,
        before: str | None = None,
    ) -> Jobs:
        return await asyncio.to_thread(self._sync.list, session_id, status, parent_job_id, parent_msg_id, limit, before)

    async def await_job(self, job_id: str, timeout: float | None = None) -> Job:
        return (await self.await_tasks([job_id], ALL, timeout))[0]

    async def await_tasks(self, ids: Sequence[str], mode: str = ALL, timeout: float | None = None) -> Jobs:
        timeout = check_timeout(timeout)
        loop = asyncio.get_running_loop()
        enough = asyncio.Event()
        wait = await owned(
            asyncio.to_thread(self._sync.open_wait, ids, mode, lambda: wake(loop, enough)),
            lambda late: late.close(block=False),
        )
        try:
            if not wait.done:
                async with asyncio.timeout(timeout):
                    await enough.wait()
        except TimeoutError:
            pass
        finally:
            # Taking back a lent slot must not block the loop; the slots are overdrawn instead.
            wait.close(block=False)
        return await asyncio.to_thread(wait.answers)

    async def cancel(self, job_id: str, reason: str | None = None) -> Job:
        return await asyncio.to_thread(self._sync.cancel, job_id, reason)

    async def cancel_session(self, session_id: str, reason: str | None = None) -> Jobs:
        return await asyncio.to_thread(self._sync.cancel_session, session_id, reason)

    async def recover(self) -> Jobs:
        return await asyncio.to_thread(self._sync.recover)


class AsyncJobRunner(_Async):
    """A `JobRunner` for one event loop. Leaving `async with` cleanly waits for all jobs, as the runner does."""

    def __init__(self, runner: JobRunner) -> None:
        super().__init__(runner)
        self.sync = runner
        self.notices = AsyncNotices(runner.notices)

    async def submit(self, request: SpawnRequest, sync_fn: SyncFn | None = None) -> Job:
        """As `JobRunner.submit`. When the awaiting task is cancelled meanwhile, the job may exist all the same."""
        handed_over = await asyncio.to_thread(self.sync.submit_later, request, sync_fn)
        return await asyncio.wrap_future(handed_over)

    async def events(self, capacity: int = DEFAULT_CAPACITY) -> AsyncIterator[HubEvent]:
        """Live events from now on, until the runner is shut down. Close the iterator when done (`aclosing`)."""
        loop = asyncio.get_running_loop()
        some = asyncio.Event()
        with self.sync.subscribe(capacity, lambda: wake(loop, some)) as subscription:
            while True:
                some.clear()
                for event in subscription.drain():
                    yield event
                if subscription.closed:
                    return
                await some.wait()

    def stats(self) -> RunnerStats:
        return self.sync.stats()

    async def wait_idle(self, timeout: float | None = None) -> bool:
        return await asyncio.to_thread(self.sync.wait_idle, timeout)

    async def shutdown(self, timeout: float = 5.0) -> None:
        await asyncio.to_thread(self.sync.shutdown, timeout)

    async def __aenter__(self) -> AsyncJobRunner:
        self.sync.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.sync.__exit__, kind, error, trace)


class AsyncNotices:
    """`JobRunner.notices` for one event loop: the same names, awaitable, and `stream` in place of `subscribe`."""

    def __init__(self, sync: Notices) -> None:
        self.sync = sync

    async def pending(
        self, session_id: str | None = None, *, job_id: str | None = None, on_damage: OnDamage | None = None
    ) -> list[Notice]:
        return await asyncio.to_thread(lambda: self.sync.pending(session_id, job_id=job_id, on_damage=on_damage))

    async def ack(self, event_id: str) -> bool:
        return await asyncio.to_thread(self.sync.ack, event_id)

    async def consume(self, job_or_task_id: str) -> bool:
        return await asyncio.to_thread(self.sync.consume, job_or_task_id)

    async def deliver(self, session_id: str) -> Node | None:
        return await asyncio.to_thread(self.sync.deliver, session_id)

    async def stream(self, session_id: str | None = None) -> AsyncGenerator[Notice, None]:
        """What is pending now and what ends from now on, until the runner is shut down; each at least once.

        What is neither acknowledged, consumed nor delivered comes again in the next stream. Close the iterator
        when done (`aclosing`).
        """
        loop = asyncio.get_running_loop()
        arrived: deque[Notice] = deque()
        some = asyncio.Event()

        def arrive(notice: Notice) -> None:
            arrived.append(notice)
            wake(loop, some)

        subscription = await owned(
            asyncio.to_thread(lambda: self.sync.subscribe(arrive, session_id, on_end=lambda: wake(loop, some))),
            lambda late: late.close(),
        )
        try:
            while True:
                some.clear()
                while arrived:
                    yield arrived.popleft()
                if subscription.closed:
                    return
                await some.wait()
        finally:
            subscription.on_end = None
            await asyncio.shield(asyncio.to_thread(subscription.close))


class AsyncJobClient(_Async):
    """A `JobClient` for one event loop."""

    def __init__(self, client: JobClient) -> None:
        super().__init__(client)
        self.sync = client

    async def close(self) -> None:
        await asyncio.to_thread(self.sync.close)

    async def __aenter__(self) -> AsyncJobClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set `event` from any thread; a loop that is closed has nobody left to wake."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass


async def owned(coroutine: Any, discard: Callable[[Any], object]) -> Any:
    """The coroutine's value; when the caller is cancelled before it is there, `discard` gets it instead."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else discard(done.result()))
        raise
