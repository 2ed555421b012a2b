"""The same tools in an event loop: waits take no thread, and a task that is cancelled takes its job with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, TurnRequest, TurnResult, errors
from openjobs.tools import AgentTools
from tests.support.turns import PATIENCE_S, Turns

ASK = {"prompt": "x", "description": "x"}


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def runner(turns: Turns) -> Iterator[JobRunner]:
    with MockTaskStore() as store:
        store.create_session("s1")
        with JobRunner(store, 4, turns) as runner:
            yield runner
            turns.finish_all()


@pytest.fixture
def tools(runner: JobRunner) -> AgentTools:
    return AgentTools(runner, "s1", plan_mode=True)


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE_S)


def test_every_tool_answers_as_its_blocking_twin(tools: AgentTools, turns: Turns) -> None:
    """Texts, refusals and values are the same."""
    turns.finish_at_once = True

    async def main() -> None:
        assert await tools.acall("agent", ASK) == tools.call("agent", ASK) == "did x"
        started = await tools.acall("agent", {**ASK, "run_in_background": True})
        job_id = started.value["job_id"]
        assert await tools.acall("job_output", {"job_id": job_id}) == tools.call("job_output", {"job_id": job_id})
        assert await tools.acall("await_tasks", {"ids": [job_id]}) == tools.call("await_tasks", {"ids": [job_id]})
        assert (await tools.acall("list_jobs", {})).value == tools.list_jobs()
        assert await tools.acall("job_stop", {"job_id": job_id}) == '{"ok":false,"status":"completed"}'
        assert (await tools.acall("nothing", {})).is_error
        assert (await tools.acall("job_output", {"job_id": "zz"})).is_error

    asyncio.run(main())


def test_a_hundred_waits_take_no_threads(tools: AgentTools, turns: Turns) -> None:
    """The loop's executor has a handful of threads; waits for jobs use none of them."""

    async def main() -> None:
        job_id = (await tools.acall("agent", {**ASK, "run_in_background": True})).value["job_id"]
        waits = [asyncio.create_task(tools.acall("job_output", {"job_id": job_id})) for _ in range(100)]
        await until(turns["x"].started)
        turns["x"].finish.set()
        assert len({await wait for wait in waits}) == 1

    asyncio.run(main())


def test_a_wait_ends_when_its_time_is_up(tools: AgentTools, turns: Turns) -> None:
    """With the job as it stands."""

    async def main() -> None:
        job_id = (await tools.acall("agent", {**ASK, "run_in_background": True})).value["job_id"]
        await until(turns["x"].started)
        assert "You will be told" in await tools.acall("job_output", {"job_id": job_id, "timeout": 20})

    asyncio.run(main())


def test_a_cancelled_task_cancels_the_job_that_it_waits_for(tools: AgentTools, turns: Turns, runner: JobRunner) -> None:
    """A host that stops its own turn stops the foreground agent in it."""

    async def main() -> None:
        call = asyncio.create_task(tools.acall("agent", ASK))
        await until(turns["x"].started)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    assert turns["x"].saw_cancel.wait(PATIENCE_S)
    (job,) = runner.list("s1")
    assert runner.await_job(job.job_id, PATIENCE_S).status is JobStatus.CANCELLED


def test_a_task_that_is_cancelled_while_it_submits_leaves_no_job(
    tools: AgentTools, turns: Turns, runner: JobRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is first, the submit or the cancel."""
    submitting, go = threading.Event(), threading.Event()
    submit = runner.submit

    def late(*args: object) -> object:
        submitting.set()
        assert go.wait(PATIENCE_S)
        return submit(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "submit", late)

    async def main() -> None:
        call = asyncio.create_task(tools.acall("agent", ASK))
        await until(submitting)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go.set()

    asyncio.run(main())
    (job,) = runner.list("s1")
    assert runner.await_job(job.job_id, PATIENCE_S).status is JobStatus.CANCELLED


def test_a_cancelled_task_leaves_a_background_job_alone(tools: AgentTools, turns: Turns, runner: JobRunner) -> None:
    """Only the wait ends."""

    async def main() -> str:
        job_id: str = (await tools.acall("agent", {**ASK, "run_in_background": True})).value["job_id"]
        call = asyncio.create_task(tools.acall("job_output", {"job_id": job_id}))
        await until(turns["x"].started)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return job_id

    job_id = asyncio.run(main())
    turns["x"].finish.set()
    assert runner.await_job(job_id, PATIENCE_S).status is JobStatus.COMPLETED


def test_the_hosts_stop_event_works_in_a_loop_too(tools: AgentTools, turns: Turns) -> None:
    """As for the blocking call."""
    stop = threading.Event()
    turns["x"].outcome = lambda request: TurnResult(final_text="half")

    async def main() -> None:
        call = asyncio.create_task(tools.acall("agent", ASK, cancel_event=stop))
        await until(turns["x"].started)
        stop.set()
        assert await call == "half\n[cancelled]"

    asyncio.run(main())


def test_an_event_loop_inside_a_job_lends_the_jobs_slot(tools: AgentTools, runner: JobRunner) -> None:
    """Four jobs on four workers, each with a loop of its own that awaits a child."""

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        if request.prompt == "inner":
            return TurnResult(final_text="inner")
        inside = AgentTools.for_turn(request)
        text = asyncio.run(inside.acall("agent", {"prompt": "inner", "description": "i"}))
        return TurnResult(final_text=f"<{text}>")

    runner.sync_fn = turn
    ids = [tools.call("agent", {"prompt": "outer", "description": "o", "run_in_background": True}) for _ in range(4)]
    text = tools.await_tasks([each.value["job_id"] for each in ids], timeout=60_000)
    assert text.count("<inner>") == 4


def test_a_cancelled_task_stays_cancelled_when_its_job_cannot_be_stopped(tools: AgentTools, turns: Turns) -> None:
    """A runner that is shut down meanwhile refuses the stop; that is logged, and the caller leaves as it wanted to."""

    async def main() -> None:
        call = asyncio.create_task(tools.acall("agent", ASK))
        await until(turns["x"].started)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tools.runner, "cancel", refuse)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    def refuse(*args: object) -> None:
        raise errors.Closed("the runner is closed")

    asyncio.run(main())
