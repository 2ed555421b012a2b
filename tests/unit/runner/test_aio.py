"""The same for asyncio hosts: nothing blocks the loop, and a wait costs no thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from openjobs import JobClient, JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.aio import AsyncJobClient, AsyncJobRunner
from tests.support import FakeClock, eventually
from tests.support.turns import Ask, MakeRunner, Turns


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 30))


def test_submit_and_await(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """The names are the runner's, awaitable."""
    turns.finish_all()

    async def main() -> None:
        jobs = AsyncJobRunner(runner)
        job = await jobs.submit(ask())
        ended = await jobs.await_job(job.job_id)
        assert ended.result_text == "did work"
        assert await jobs.get(job.job_id) == ended
        assert [row.job_id for row in await jobs.list()] == [job.job_id]
        assert jobs.stats().workers == 2
        assert await jobs.recover() == []

    run(main)


def test_refusals_are_the_same(runner: JobRunner, ask: Ask) -> None:
    """Whether they come before or from the store."""

    async def main() -> None:
        jobs = AsyncJobRunner(runner)
        with pytest.raises(errors.InvalidInput):
            await jobs.submit(ask(timeout_s=-1))
        with pytest.raises(errors.UnknownNode):
            await jobs.submit(ask(parent_msg_id="nothing"))
        with pytest.raises(errors.UnknownJob):
            await jobs.await_job("0" * 36)

    run(main)


def test_a_thousand_waits_need_no_thread_each(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """They are callbacks."""

    async def main() -> None:
        jobs = AsyncJobRunner(runner)
        job = await jobs.submit(ask())
        waits = [asyncio.create_task(jobs.await_job(job.job_id)) for _ in range(1000)]
        while len(runner._roster.jobs[job.job_id].waiters) < 1000:
            await asyncio.sleep(0.005)
        assert threading.active_count() < 80
        turns["work"].finish.set()
        assert {ended.status for ended in await asyncio.gather(*waits)} == {JobStatus.COMPLETED}

    run(main)


def test_the_loop_is_never_blocked(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """While submits and waits are under way, the loop goes on turning."""
    runner = make_runner(1)

    async def main() -> None:
        jobs = AsyncJobRunner(runner)
        submitted = [await jobs.submit(ask(f"j{n}")) for n in range(5)]
        wait = asyncio.create_task(jobs.await_tasks([job.job_id for job in submitted]))
        turned = 0
        while not wait.done():
            turned += 1
            if turned == 50:
                turns.finish_all()
            await asyncio.sleep(0)
        assert turned > 50
        assert all(job.status is JobStatus.COMPLETED for job in wait.result())

    run(main)


def test_cancelling_the_task_cancels_only_the_wait(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """The job goes on, and nothing of the wait is left."""

    async def main() -> None:
        jobs = AsyncJobRunner(runner)
        job = await jobs.submit(ask())
        live = runner._roster.jobs[job.job_id]
        wait = asyncio.create_task(jobs.await_job(job.job_id))
        while not live.waiters:
            await asyncio.sleep(0.001)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert not live.waiters
        early = asyncio.create_task(jobs.await_job(job.job_id))
        await asyncio.sleep(0)
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early
        while live.waiters:
            await asyncio.sleep(0.001)
        turns["work"].finish.set()
        assert (await jobs.await_job(job.job_id)).status is JobStatus.COMPLETED

    run(main)


def test_a_wait_can_run_out_of_time(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """The job as it stands."""

    async def main() -> None:
        jobs = AsyncJobRunner(runner)
        job = await jobs.submit(ask())
        assert not (await jobs.await_job(job.job_id, timeout=0.01)).terminal
        (asked,) = await jobs.cancel_session("s1", "enough")
        assert asked.job_id == job.job_id
        assert (await jobs.await_job(job.job_id)).cancel_reason == "enough"

    run(main)


def test_a_turn_may_await_its_child_in_a_loop_of_its_own(make_runner: MakeRunner, turns: Turns, ask: Ask) -> None:
    """One worker: the slot is lent although no thread blocks in `await_job`."""
    runner = make_runner(1)
    turns.finish_all()

    def parent(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        async def main() -> str:
            jobs = AsyncJobRunner(runner)
            child = await jobs.submit(
                SpawnRequest(prompt="child", parent_session_id=request.session_id, parent_job_id=request.job_id)
            )
            return (await jobs.await_job(child.job_id)).result_text or ""

        return TurnResult(final_text=asyncio.run(main()))

    assert runner.await_job(runner.submit(ask("parent"), sync_fn=parent).job_id).result_text == "did child"
    assert runner.stats().lent == 0


def test_events_are_an_async_iterator(runner: JobRunner, turns: Turns, ask: Ask) -> None:
    """Until the runner is shut down, or the iterator is closed."""
    turns.finish_all()

    async def main() -> None:
        jobs = AsyncJobRunner(runner)
        async with aclosing(jobs.events()) as events:
            task = asyncio.create_task(jobs.submit(ask()))
            heard = []
            async for event in events:
                heard.append(event.status)
                if event.job.terminal:
                    break
            await task
        assert heard == ["queued", "queued", "running", "completed"]
        assert not runner.hub._subscriptions
        await jobs.wait_idle()
        rest = asyncio.create_task(_all(jobs))
        while not runner.hub._subscriptions:
            await asyncio.sleep(0.001)
        await jobs.shutdown()
        assert await rest == []

    run(main)


async def _all(jobs: AsyncJobRunner) -> list[Any]:
    return [event async for event in jobs.events()]


def test_async_with_waits_for_all_jobs(store: MockTaskStore, turns: Turns, ask: Ask) -> None:
    """As the runner's own `with`."""
    turns.finish_all()

    async def main() -> str:
        async with AsyncJobRunner(JobRunner(store, 1, turns)) as jobs:
            return (await jobs.submit(ask())).job_id

    assert store.get(run(main)).status is JobStatus.COMPLETED


def test_the_client_too(store: MockTaskStore, runner: JobRunner, turns: Turns, ask: Ask, clock: FakeClock) -> None:
    """Reads, waits and cancels what another runner has."""

    async def main() -> None:
        job = runner.submit(ask())
        turns["work"].until_started()
        async with AsyncJobClient(JobClient(store)) as client:
            assert not (await client.get(job.job_id)).terminal
            wait = asyncio.create_task(client.await_job(job.job_id))
            assert not (await client.cancel(job.job_id, "bye")).terminal
            while not client.sync.heads._watches:  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)
            while not wait.done():
                clock.advance(0.25)
                await asyncio.sleep(0.005)
            assert wait.result().cancel_reason == "bye"

    run(main)
    eventually(lambda: runner.stats().unfinished == 0)
