"""A job whose row is in order and whose long prompt lies in a segment that cannot be read is listed, stopped, recovered
and told of as any other; only who wants to see the prompt hears of the damage (R3, R5, R6)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from openjobs import GitJobStore, JobClient, JobRunner, JobStatus, SpawnRequest, TurnResult, errors
from openjobs.jobs import Job, Queued, Started
from openjobs.runner.recovery import DIED, Recovery
from tests.support import eventually, git
from tests.support.cli import Cli
from tests.support.jobs import clean, end_of, job_for
from tests.support.server import serving
from tests.support.turns import Turns

ME = ("-c", "user.name=me", "-c", "user.email=me@localhost")
DEAD = "dead-runner"
SEGMENT = "history/00/0000.jsonl"
PROMPT = "word " * 9000


@attrs.define
class Home:
    path: Path
    store: GitJobStore
    #: whether another segment follows the one that is spoilt
    closed: bool
    #: what stood in it
    whole: bytes = b""

    def job(self, prompt: str = PROMPT, **fields: object) -> Job:
        return self.store.create(job_for(self.store, "s1", prompt, **fields), Queued(runner_id=DEAD))

    def spoil(self) -> None:
        if self.closed:
            self.store.session("s1").append("user", "word " * 20_000)
            self.store.session("s1").append("user", "in the next segment")
        self.whole = self._file.read_bytes()
        self._write(self.whole[:-20])

    def mend(self) -> None:
        assert self._file.read_bytes() == self.whole[:-20]
        self._write(self.whole)

    @property
    def _file(self) -> Path:
        return self.path / "sessions" / "s1" / "repo" / SEGMENT

    def _write(self, data: bytes) -> None:
        self._file.write_bytes(data)
        git(*ME, "commit", "-qam", "by hand", cwd=self._file.parent)

    def refuses_to_show(self, job: Job) -> None:
        with pytest.raises(errors.Damaged, match=re.escape(SEGMENT)):
            self.store.get(job.job_id)


@pytest.fixture(params=["a closed segment", "the open segment"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        for session_id in ("s1", "s2"):
            store.create_session(session_id)
        lease = store.leases.acquire(DEAD)
        store.active.mark(DEAD, "s1")
        lease.release()
        home = Home(tmp_path / "home", store, request.param == "a closed segment")
        yield home
        home.mend()
        for job in store.list("s1", limit=None):
            assert store.get(job.job_id).description in ("short", PROMPT, PROMPT + "again")
        clean(store)


@pytest.mark.parametrize("by", ["a client", "a runner"])
def test_all_jobs_of_its_session_are_stopped(home: Home, by: str) -> None:
    jobs = [home.job("short"), home.job(), home.job("short")]
    home.spoil()
    with contextlib.ExitStack() as stack:
        if by == "a client":
            stopper: JobClient | JobRunner = stack.enter_context(JobClient(home.store))
        else:
            stopper = stack.enter_context(JobRunner(home.store, 1, lambda request, cancel_event: TurnResult()))
        stopper.cancel_session("s1", "enough")
    assert [home.store.row(job.job_id).terminal for job in jobs] == [True, True, True]
    home.refuses_to_show(jobs[1])


@pytest.mark.parametrize("caller", [None, "s2"])
def test_it_is_recovered(home: Home, caller: str | None) -> None:
    """Whether it runs or waits, and also where its card is in its caller's session."""
    jobs = [home.job(caller_session_id=caller, attach_id=home.store.new_id()) for _ in range(2)]
    home.store.apply(jobs[1].job_id, Started(run_id="run"))
    home.spoil()
    ended = Recovery(home.store, home.store.new_id).run()
    assert {(job.job_id, job.status, job.error) for job in ended} == {
        (job.job_id, JobStatus.ERRORED, DIED) for job in jobs
    }
    assert home.store.leases.dead() == []
    assert [step.status for step in home.store.history(jobs[0].job_id)][-1] is JobStatus.ERRORED
    assert [job.status for job in home.store.list("s1")] == [JobStatus.ERRORED] * 2
    home.refuses_to_show(jobs[0])


def test_each_step_is_taken_and_its_outcome_read(home: Home) -> None:
    """What is handed out says of which text it has the beginning only; the row keeps its reference."""
    job = home.job()
    home.spoil()
    running = home.store.apply(job.job_id, Started(run_id="run"))
    assert (running.status, list(running.extra["cut"])) == (JobStatus.RUNNING, ["description"])
    result = "result " * 9000
    home.store.apply(job.job_id, attrs.evolve(end_of(job), result_text=result))
    seen = home.store.outcome(job.job_id)
    assert (seen.status, seen.result_text, seen.user_msg_id) == (JobStatus.COMPLETED, result, job.user_msg_id)
    assert PROMPT.startswith(seen.description)
    assert list(seen.extra["cut"]) == ["description"]
    home.refuses_to_show(job)


def test_its_own_runner_goes_on_with_the_whole_prompt(home: Home) -> None:
    """The damage comes while the job is queued: it runs with all of its prompt, which the runner has in memory."""
    turns = Turns()
    with JobRunner(home.store, 1, turns) as runner:
        first = runner.submit(SpawnRequest(prompt="short", parent_session_id="s1"))
        eventually(lambda: home.store.row(first.job_id).status is JobStatus.RUNNING)
        second = runner.submit(SpawnRequest(prompt=PROMPT, parent_session_id="s1"))
        again = runner.submit(SpawnRequest(prompt=PROMPT + "again", parent_session_id="s1"))
        home.spoil()
        assert runner.cancel(again.job_id).status is JobStatus.CANCELLED
        turns["short"].finish.set()
        assert turns[PROMPT].until_started().job_id == second.job_id
        eventually(lambda: home.store.row(second.job_id).status is JobStatus.RUNNING)
        turns[PROMPT].finish.set()
        done = runner.await_job(second.job_id, timeout=30)
        assert (done.status, done.description) == (JobStatus.COMPLETED, PROMPT)
        assert runner.get(second.job_id).description == PROMPT
    home.refuses_to_show(second)
    with JobClient(home.store) as client:
        assert client.await_job(second.job_id, timeout=30).status is JobStatus.COMPLETED


def test_the_command_line_stops_it_and_refuses_to_show_it(home: Home) -> None:
    job = home.job()
    home.spoil()
    cli = Cli(home.path)
    assert SEGMENT in cli.inside("show", job.job_id, code=6).err
    cli.inside("stop", job.job_id)
    assert "errored" in cli.inside("wait", job.job_id, code=1).out
    assert json.loads(cli.inside("--json", "wait", job.job_id, code=1).out)["jobs"][0]["cut"] == ["description"]
    assert "errored" in cli.inside("history", job.job_id).out
    assert SEGMENT in cli.inside("show", job.job_id, code=6).err


def test_the_panel_stops_it_and_refuses_to_show_it(home: Home) -> None:
    job = home.job()
    home.spoil()
    with (
        JobRunner(home.store, 1, lambda request, cancel_event: TurnResult()) as runner,
        serving(runner) as (client, app),
    ):
        assert app.feed.until_loaded(20)
        client.post(f"/api/jobs/{job.job_id}/cancel", {})
        assert client.get(f"/api/jobs/{job.job_id}/history")["commits"][-1]["status"] == "errored"
        client.get(f"/api/jobs/{job.job_id}", status=500)
