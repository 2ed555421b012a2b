"""Tools inside a job: its children are under it and stop with it, and a cancelled job is told at its next call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from openjobs import JobRunner, JobStatus, MockTaskStore, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.store import JobStore
from openjobs.tools import AgentTools
from tests.support import eventually

PATIENCE_S = 20.0
Work = Callable[[TurnRequest, AgentTools], str]


class Host:
    """A runner whose turns have tools; what a turn does is looked up by the first word of its prompt."""

    def __init__(self, store: JobStore) -> None:
        self.work: dict[str, Work] = {}
        self.options: dict[str, object] = {}
        self.raised: dict[str, BaseException] = {}
        self.runner = JobRunner(store, 4, self.turn)
        self.tools = AgentTools(self.runner, "s1")

    def turn(self, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        tools = AgentTools.for_turn(request, **self.options)
        try:
            return TurnResult(final_text=self.work[request.prompt.split()[0]](request, tools))
        except BaseException as error:
            self.raised[request.prompt] = error
            raise


@pytest.fixture
def store() -> Iterator[JobStore]:
    with MockTaskStore() as store:
        store.create_session("s1")
        yield store
        assert store.fsck("s1").clean


@pytest.fixture
def host(store: JobStore) -> Iterator[Host]:
    host = Host(store)
    with host.runner:
        yield host


def wait_for_cancel(request: TurnRequest, tools: AgentTools) -> str:
    assert request.cancel_event.wait(PATIENCE_S)
    return "stopped half way"


def test_a_nested_job_knows_its_parent(host: Host, store: JobStore) -> None:
    """It is a child of the job, runs in its session, with its agent, and goes on from the parent's prompt."""
    host.work["outer"] = lambda request, tools: f"<{tools.agent('inner', 'inner')}>"
    host.work["inner"] = lambda request, tools: " / ".join(item.text for item in request.context)
    store.session("s1").append("user", "hello")
    assert host.tools.agent("outer", "outer", agent_id="writer") == "<hello / outer>"
    inner, outer = store.list("s1")
    assert (inner.parent_job_id, inner.parent_session_id, inner.agent_id) == (outer.job_id, "s1", "writer")
    assert inner.parent_msg_id == outer.user_msg_id
    assert store.children(outer.job_id) == [inner.job_id]


def test_four_parents_on_four_workers_get_their_childrens_results(host: Host) -> None:
    """A waiting parent lends its slot, so nobody waits for ever."""
    host.work["outer"] = lambda request, tools: f"<{tools.agent('inner ' + request.prompt, 'inner')}>"
    host.work["inner"] = lambda request, tools: request.prompt
    tools = AgentTools(host.runner, "s1", plan_mode=True)
    ids = []
    for n in range(4):
        started = tools.agent(f"outer {n}", "x", run_in_background=True)
        assert isinstance(started, dict)
        ids.append(started["job_id"])
    text = tools.await_tasks(ids, timeout=60_000)
    assert all(f"<inner outer {n}>" in text for n in range(4))


def test_stopping_a_parent_stops_its_children(host: Host, store: JobStore) -> None:
    """Foreground and background, however deep; the call that waits gives what there was."""
    got: list[str] = []
    running = threading.Barrier(3)

    def outer(request: TurnRequest, tools: AgentTools) -> str:
        tools.agent("leaf background", "b", run_in_background=True)
        text = tools.agent("middle", "m")
        assert isinstance(text, str)
        got.append(text)
        return text

    def leaf(request: TurnRequest, tools: AgentTools) -> str:
        running.wait(PATIENCE_S)
        return wait_for_cancel(request, tools)

    host.work["outer"] = outer
    host.work["middle"] = lambda request, tools: str(tools.agent("leaf foreground", "f"))
    host.work["leaf"] = leaf
    started = host.tools.agent("outer", "o", run_in_background=True)
    assert isinstance(started, dict)
    running.wait(PATIENCE_S)
    host.tools.job_stop(started["job_id"], "enough")
    assert ": cancelled (enough)" in host.tools.job_output(started["job_id"])
    host.runner.wait_idle(PATIENCE_S)
    jobs = store.list("s1")
    assert len(jobs) == 4
    assert {job.status for job in jobs} == {JobStatus.CANCELLED}
    assert got == ["stopped half way\n[cancelled]\n[cancelled]"]


def test_the_next_call_of_a_cancelled_job_raises(host: Host, store: JobStore) -> None:
    """D5: each tool, by method and by name; the job ends as cancelled, with what it had said."""
    begun = threading.Event()
    refused: list[str] = []

    def work(request: TurnRequest, tools: AgentTools) -> str:
        request.partial("as far as I got")
        begun.set()
        wait_for_cancel(request, tools)
        for name, call in (
            ("agent", lambda: tools.agent("x", "x")),
            ("list_jobs", tools.list_jobs),
            ("job_output", lambda: tools.job_output("x")),
            ("job_stop", lambda: tools.job_stop("x")),
            ("await_tasks", lambda: tools.await_tasks(["x"])),
            ("shell", lambda: tools.shell("true")),
            ("call", lambda: tools.call("list_jobs", {})),
            ("call of nothing", lambda: tools.call("nothing", {})),
        ):
            with pytest.raises(errors.CancelledError):
                call()
            refused.append(name)
        tools.list_jobs()
        return "never"

    host.work["work"] = work
    started = host.tools.agent("work", "w", run_in_background=True)
    assert isinstance(started, dict)
    assert begun.wait(PATIENCE_S)
    host.tools.job_stop(started["job_id"])
    assert host.tools.job_output(started["job_id"]).endswith("as far as I got\n[cancelled]")
    assert len(refused) == 8
    assert len(store.list("s1")) == 1


def test_a_job_that_is_cancelled_between_check_and_submit(host: Host) -> None:
    """The store refuses the child, and the call raises what the check would have."""
    begun, go = threading.Event(), threading.Event()

    def work(request: TurnRequest, tools: AgentTools) -> str:
        submit = host.runner.submit

        def late(spawn: SpawnRequest) -> object:
            begun.set()
            assert go.wait(PATIENCE_S)
            return submit(spawn)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host.runner, "submit", late)
            return str(tools.agent("child", "c"))

    host.work["work"] = work
    host.work["child"] = lambda request, tools: "never"
    job = host.runner.submit(SpawnRequest(prompt="work", parent_session_id="s1"))
    assert begun.wait(PATIENCE_S)
    host.runner.cancel(job.job_id)
    go.set()
    assert host.runner.await_job(job.job_id, PATIENCE_S).status is JobStatus.CANCELLED
    assert isinstance(host.raised["work"], errors.CancelledError)


def test_nesting_has_a_bound_and_says_so(host: Host, store: JobStore) -> None:
    """The job that is as deep as may be gets a text, and can do its part itself."""
    host.options = {"max_depth": 3}
    host.work["dig"] = lambda request, tools: str(tools.call("agent", {"prompt": "dig", "description": "d"}))
    assert host.tools.agent("dig", "d") == (
        "[error] agents are nested 3 deep here, and may not be nested deeper: do this part yourself"
    )
    assert len(store.list("s1")) == 3


def test_a_job_may_not_wait_for_what_ends_after_it(host: Host) -> None:
    """For itself and for its ancestors there is an answer at once, not a wait until the time is up."""
    said: list[str] = []

    def inner(request: TurnRequest, tools: AgentTools) -> str:
        for job_id in (request.job_id, str(request.job.parent_job_id)):
            said.append(tools.call("job_output", {"job_id": job_id, "timeout": 600_000}))
            said.append(tools.call("job_stop", {"job_id": job_id}))
            said.append(tools.call("job_output", {"job_id": job_id, "block": False}))
        return "done"

    host.work["outer"] = lambda request, tools: str(tools.agent("inner", "i"))
    host.work["inner"] = inner
    assert host.tools.agent("outer", "o") == "done"
    for n in (0, 3):
        assert "so it cannot be waited for from inside: it ends after you do" in said[n]
        assert "to end it, end your own turn" in said[n + 1]
        assert said[n + 2].startswith("job ")


def test_a_nested_list_says_where_one_is(host: Host) -> None:
    """The jobs that who asks runs in are marked."""
    seen: list[str] = []

    def inner(request: TurnRequest, tools: AgentTools) -> str:
        eventually(lambda: all(row["status"] == "running" for row in tools.list_jobs()))
        seen.append(tools.call("list_jobs", {}))
        return "done"

    host.work["outer"] = lambda request, tools: str(tools.agent("inner", "the inner one"))
    host.work["inner"] = inner
    host.tools.agent("outer", "the outer one")
    assert all(", you are in it" in line for line in seen[0].splitlines())


def test_a_nested_agent_is_told_to_look_itself(host: Host) -> None:
    """A job is over before its conversation's next turn, which is told of what it left unread."""
    texts: list[str] = []

    def outer(request: TurnRequest, tools: AgentTools) -> str:
        texts.append(tools.definitions("mcp")[0]["description"])
        started = tools.agent("inner", "i", run_in_background=True)
        assert isinstance(started, dict)
        texts.append(tools.job_output(started["job_id"]))
        return "done"

    host.work["outer"] = outer
    host.work["inner"] = lambda request, tools: "inner result"
    host.tools.agent("outer", "o")
    assert "You will be told" not in texts[0]
    assert "Read it with job_output before you end" in texts[0]
    assert texts[1].endswith("inner result")


def test_a_turn_without_a_runner_has_no_tools(host: Host) -> None:
    """A request that somebody made by hand is refused, with the reason."""
    seen: list[TurnRequest] = []

    def work(request: TurnRequest, tools: AgentTools) -> str:
        seen.append(request)
        return ""

    host.work["work"] = work
    host.tools.agent("work", "w")
    import attrs

    with pytest.raises(errors.InvalidInput, match="run by no runner"):
        AgentTools.for_turn(attrs.evolve(seen[0], runner=None))


def test_a_turn_of_the_conversation_is_no_nesting(host: Host, store: JobStore) -> None:
    """A host may run the conversation's own turns as foreground jobs: they are told of what they start, and are no
    level of depth."""
    host.options = {"max_depth": 1}
    texts: list[str] = []

    def talk(request: TurnRequest, tools: AgentTools) -> str:
        texts.append(tools.definitions("mcp")[0]["description"])
        texts.append(tools.call("agent", {"prompt": "dig", "description": "d"}))
        started = tools.agent("leaf", "l", run_in_background=True)
        assert isinstance(started, dict)
        return str(started["job_id"])

    host.work["talk"] = talk
    host.work["dig"] = lambda request, tools: str(tools.call("agent", {"prompt": "dig", "description": "d"}))
    host.work["leaf"] = lambda request, tools: "found it"
    job = host.runner.submit(SpawnRequest(prompt="talk", parent_session_id="s1", foreground=True))
    leaf = host.runner.await_job(job.job_id, PATIENCE_S).result_text or ""
    assert "You will be told" in texts[0]
    assert texts[1].startswith("[error] agents are nested 1 deep here")
    host.runner.await_job(leaf, PATIENCE_S)
    host.work["hear"] = lambda request, tools: " / ".join(item.text for item in request.context)
    turn = host.runner.submit(SpawnRequest(prompt="hear", parent_session_id="s1", foreground=True))
    heard = host.runner.await_job(turn.job_id, PATIENCE_S).result_text or ""
    assert f"job {leaf} completed" in heard
