"""The job store against a plain dictionary, whatever the order of what happens (R2, R3, R4, R5)."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from openjobs import errors
from openjobs.jobs import (
    EDGES,
    CancelRequested,
    Completed,
    Errored,
    Event,
    Job,
    JobStatus,
    Queued,
    Started,
    transition,
)
from openjobs.store import GitJobStore
from tests.support import FakeClock, git
from tests.support.chaos import Chaos
from tests.support.jobs import clean, job_for


class StoreMachine(RuleBasedStateMachine):
    """Two stores on one home take turns with a foreign git; the model is job id -> status."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="machine-"))
        self.clock = FakeClock()
        self.home = self.base / "home"
        self.store = self.opened()
        self.other = self.opened()
        self.store.create_session("s1")
        self.store.session("s1").append("user", "hello")
        self.model: dict[str, Job] = {}
        self.foreign = 0
        self.ends = 0

    def opened(self) -> GitJobStore:
        return GitJobStore(self.home, durability="relaxed", clock=self.clock)

    def pick(self, which: bool) -> GitJobStore:
        return self.store if which else self.other

    @rule(target=jobs, which=st.booleans(), prompt=st.text(max_size=600), queued=st.booleans())
    def submit(self, which: bool, prompt: str, queued: bool) -> str:
        store = self.pick(which)
        job = job_for(store, "s1", prompt)
        self.model[job.job_id] = store.create(job, *([Queued(runner_id="r1")] if queued else []))
        return job.job_id

    def apply(self, which: bool, job_id: str, event: Event) -> None:
        """The store does what the pure function says, or refuses where it refuses."""
        store, before = self.pick(which), self.model[job_id]
        try:
            expected = transition(before, event, self.clock.now()).status
        except errors.InvalidTransition:
            head = store.head("s1")
            try:
                store.apply(job_id, event)
                raise AssertionError(f"{before.status} took {event}")
            except errors.InvalidTransition:
                assert store.head("s1") == head
                return
        after = store.apply(job_id, event)
        assert after.status is expected
        self.model[job_id] = after

    @rule(which=st.booleans(), job_id=jobs)
    def queue(self, which: bool, job_id: str) -> None:
        self.apply(which, job_id, Queued(runner_id="r1"))

    @rule(which=st.booleans(), job_id=jobs)
    def start(self, which: bool, job_id: str) -> None:
        self.apply(which, job_id, Started(run_id="run"))

    @rule(which=st.booleans(), job_id=jobs, text=st.text(max_size=700))
    def finish(self, which: bool, job_id: str, text: str) -> None:
        self.ends += 1
        self.apply(which, job_id, Completed(event_id=f"e{self.ends}", result_text=text))

    @rule(which=st.booleans(), job_id=jobs)
    def fail(self, which: bool, job_id: str) -> None:
        self.ends += 1
        self.apply(which, job_id, Errored(event_id=f"e{self.ends}", error="ValueError: no"))

    @rule(which=st.booleans(), job_id=jobs)
    def ask_to_stop(self, which: bool, job_id: str) -> None:
        self.apply(which, job_id, CancelRequested(reason="enough"))

    @rule(seconds=st.floats(0, 100_000))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([-86_400.0, 86_400.0]))
    def somebody_sets_the_clock(self, seconds: float) -> None:
        self.clock.jump(seconds)

    @rule()
    def crash_and_recover(self) -> None:
        """The other process is gone without a word; the next one ends what it left."""
        self.other.close(timeout=0)
        self.other = self.opened()
        for job in self.other.unfinished("s1"):
            self.ends += 1
            event = Errored(event_id=f"e{self.ends}", error="worker died before completion")
            self.model[job.job_id] = self.other.apply(job.job_id, event)

    @rule()
    def foreign_commit(self) -> None:
        self.foreign += 1
        repo = self.home / "sessions" / "s1" / "repo"
        (repo / "notes.txt").write_text(f"{self.foreign}\n")
        git("add", "notes.txt", cwd=repo)
        git("-c", "user.name=me", "-c", "user.email=me@x", "commit", "-q", "-m", f"note {self.foreign}", cwd=repo)

    @rule(job_id=consumes(jobs))
    def same_id_again(self, job_id: str) -> None:
        job = job_for(self.store, "s1", "something else", job_id=job_id, request_digest="other")
        try:
            self.store.create(job)
            raise AssertionError("a job id was used twice")
        except errors.IdempotencyConflict:
            pass

    @invariant()
    def both_read_what_the_model_says(self) -> None:
        for store in (self.store, self.other):
            rows = {job.job_id: job.status for job in store.list("s1", limit=None)}
            assert rows == {job_id: job.status for job_id, job in self.model.items()}

    def teardown(self) -> None:
        try:
            clean(self.store)
            for job_id, job in self.model.items():
                assert self.store.get(job_id) == job
                statuses = [t.status for t in self.store.history(job_id) if t.kind == "transition"]
                assert statuses[0] is JobStatus.PENDING
                assert all(b in EDGES[a] for a, b in itertools.pairwise(statuses))
            log = git("log", "--format=%s", cwd=self.home / "sessions" / "s1" / "repo")
            assert log.count("note ") == self.foreign
        finally:
            self.store.close()
            self.other.close()
            shutil.rmtree(self.base)


def test_the_store_is_a_dictionary_with_a_trail(chaos: Chaos) -> None:
    """Any sequence of events, crashes, clock changes and foreign commits leaves store and model equal."""
    run_state_machine_as_test(
        StoreMachine,
        settings=hypothesis.settings(
            hypothesis.settings.default,
            max_examples=chaos.rounds(25, 500, "sequences"),
            stateful_step_count=40,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
