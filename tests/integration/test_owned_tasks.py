"""Background commands that belong to a job: they end with it, however it ends and whoever is left to end them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs import JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult
from openjobs.errors import Damaged, ParentFinished, StoreWriteFailed, UnknownJob
from openjobs.jobs import Completed, Queued, Started
from openjobs.processes import ProcessSupervisor, Task, TaskClient, TaskJournal, TaskStatus, this_system
from openjobs.processes.owned import JobTasks
from openjobs.processes.tree import TASK_VARIABLE
from openjobs.runner.owned import LeftTasks
from openjobs.store import GitJobStore
from openjobs.store.presence import JOB_TASKS, FileActive
from tests.support import eventually
from tests.support.jobs import job_for

BOUND_S = 20.0
ENV = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
#: a member of the tree has a session of its own
TREE = "setsid sleep 300 & exec sleep 300"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    made = GitJobStore(tmp_path / "home", durability="relaxed")
    with made:
        made.create_session("s")
        made.create_session("other")
        yield made


@pytest.fixture(params=["asked through the journal", "told by the runner"])
def supervisor(store: GitJobStore, runner: JobRunner, request: pytest.FixtureRequest) -> Iterator[ProcessSupervisor]:
    """Of the runner's own process; the runner may know it or not."""
    with ProcessSupervisor(store) as supervisor:
        if request.param == "told by the runner":
            runner.owned_tasks.use(supervisor.job_tasks)
        yield supervisor
        for task in supervisor.list("s"):
            if not task.terminal:
                supervisor.stop(task.task_id, "the test is over", grace_s=0)
                supervisor.wait(task.task_id, BOUND_S)


@pytest.fixture
def runner(store: GitJobStore) -> Iterator[JobRunner]:
    with JobRunner(store, workers=4) as runner:
        yield runner


class Turn:
    """A turn that starts commands, and then does what it is told."""

    def __init__(
        self, *sessions: str, then: Callable[[TurnRequest, threading.Event], TurnResult] | None = None
    ) -> None:
        self.sessions = sessions or ("s",)
        self.then = then or (lambda request, cancel: TurnResult(final_text=str(cancel.wait(BOUND_S))))
        self.supervisor: ProcessSupervisor | None = None
        self.tasks: list[Task] = []
        self.started = threading.Event()

    def __call__(self, request: TurnRequest, cancel: threading.Event) -> TurnResult:
        assert self.supervisor is not None
        for session_id in self.sessions:
            self.tasks.append(self.supervisor.start(session_id, TREE, env=ENV, job_id=request.job_id))
        self.started.set()
        return self.then(request, cancel)


def begun(runner: JobRunner, supervisor: ProcessSupervisor, turn: Turn, **fields: Any) -> str:
    """The id of a job that has started its commands."""
    turn.supervisor = supervisor
    job = runner.submit(SpawnRequest(prompt="p", parent_session_id="s", **fields), sync_fn=turn)
    assert turn.started.wait(BOUND_S)
    return job.job_id


def marked(task: Task) -> list[int]:
    system = this_system()
    mark = os.fsencode(f"{TASK_VARIABLE}={task.task_id}")
    return [m.identity.pid for m in system.table() if m.living and system.has_variable(m.identity.pid, mark)]


def gone(task: Task) -> None:
    """Nobody of its tree lives any more, or in a moment."""
    eventually(lambda: not marked(task), BOUND_S)


def marks(store: GitJobStore) -> list[str]:
    assert store.home is not None
    return sorted(path.name for path in (store.home / JOB_TASKS).glob("*"))


# --- one process -------------------------------------------------------------------------------------------


def test_a_cancel_ends_the_tasks_of_the_job(
    runner: JobRunner, supervisor: ProcessSupervisor, store: GitJobStore
) -> None:
    """In whatever session, with their whole trees, before anybody hears of the job's end; others' go on."""
    turn = Turn("s", "other")
    other = supervisor.start("s", "exec sleep 300", env=ENV)
    job_id = begun(runner, supervisor, turn)
    assert marks(store) == [job_id]
    runner.cancel(job_id, "enough")
    job = runner.await_job(job_id, BOUND_S)
    assert job.status is JobStatus.CANCELLED
    for task in turn.tasks:
        ended = supervisor.get(task.task_id)
        assert (ended.status, ended.stop_reason) == (TaskStatus.CANCELLED, "its job was asked to stop")
        gone(task)
    assert not supervisor.get(other.task_id).terminal
    eventually(lambda: not marks(store))


def test_a_turn_that_waits_for_its_task_goes_on_when_it_is_cancelled(
    runner: JobRunner, supervisor: ProcessSupervisor
) -> None:
    """The task is ended as soon as the job is asked to stop, not only once the turn is over."""

    def wait(request: TurnRequest, cancel: threading.Event) -> TurnResult:
        return TurnResult(final_text=supervisor.wait(turn.tasks[0].task_id, BOUND_S).status.value)

    turn = Turn(then=wait)
    job_id = begun(runner, supervisor, turn)
    runner.cancel(job_id)
    job = runner.await_job(job_id, BOUND_S)
    assert (job.status, job.result_text) == (JobStatus.CANCELLED, "cancelled")
    gone(turn.tasks[0])


def test_tasks_of_descendants_end_with_the_job_that_is_cancelled(
    runner: JobRunner, supervisor: ProcessSupervisor
) -> None:
    """The cancel goes down the jobs, and from each to its tasks."""
    below = Turn()

    def submit(request: TurnRequest, cancel: threading.Event) -> TurnResult:
        child = begun(runner, supervisor, below, parent_job_id=request.job_id)
        runner.await_job(child, BOUND_S)
        return TurnResult(final_text="")

    above = Turn(then=submit)
    job_id = begun(runner, supervisor, above)
    assert below.started.wait(BOUND_S)
    runner.cancel(job_id)
    assert runner.await_job(job_id, BOUND_S).status is JobStatus.CANCELLED
    for task in (*above.tasks, *below.tasks):
        assert supervisor.wait(task.task_id, BOUND_S).status is TaskStatus.CANCELLED
        gone(task)


def _fails(request: TurnRequest, cancel: threading.Event) -> TurnResult:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("then", "fields", "status"),
    [
        (lambda request, cancel: TurnResult(final_text="done"), {}, JobStatus.COMPLETED),
        (_fails, {}, JobStatus.ERRORED),
        (None, {"timeout_s": 0.2}, JobStatus.CANCELLED),
    ],
    ids=["completed", "errored", "timed out"],
)
def test_however_a_job_ends_its_tasks_end_with_it(
    then: Any,
    fields: dict[str, Any],
    status: JobStatus,
    runner: JobRunner,
    supervisor: ProcessSupervisor,
    store: GitJobStore,
) -> None:
    """When its end is known, they have ended; what belongs to no job goes on."""
    turn = Turn(then=then)
    job_id = begun(runner, supervisor, turn, **fields)
    assert runner.await_job(job_id, BOUND_S).status is status
    assert supervisor.get(turn.tasks[0].task_id).status is TaskStatus.CANCELLED
    eventually(lambda: not marked(turn.tasks[0]) and not marks(store), BOUND_S)


def test_a_shutdown_ends_the_tasks_of_jobs(store: GitJobStore) -> None:
    """Also those of a turn that does not come back."""
    free = threading.Event()
    turn = Turn(then=lambda request, cancel: TurnResult(final_text=str(free.wait(BOUND_S))))
    with ProcessSupervisor(store) as supervisor:
        runner = JobRunner(store, workers=1)
        begun(runner, supervisor, turn)
        runner.shutdown(2.0)
        task = supervisor.wait(turn.tasks[0].task_id, BOUND_S)
        assert task.status is TaskStatus.CANCELLED
        free.set()
        eventually(lambda: not marked(task), BOUND_S)


def test_a_job_that_was_given_up_leaves_no_tasks(store: GitJobStore) -> None:
    """Its thread is stuck and tries to start more: refused, and what ran is ended."""
    free = threading.Event()
    said: list[Exception] = []

    def stuck(request: TurnRequest, cancel: threading.Event) -> TurnResult:
        free.wait(BOUND_S)
        try:
            looking.start("s", "exec sleep 300", env=ENV, job_id=request.job_id)
        except ParentFinished as refused:
            said.append(refused)
        return TurnResult(final_text="late")

    turn = Turn(then=stuck)
    with ProcessSupervisor(store) as looking, JobRunner(store, workers=1, cancel_timeout_s=0.3) as runner:
        job_id = begun(runner, looking, turn)
        runner.cancel(job_id)
        job = runner.await_job(job_id, BOUND_S)
        assert job.status is JobStatus.CANCELLED
        assert runner.stats().stuck
        task = looking.wait(turn.tasks[0].task_id, BOUND_S)
        assert task.status is TaskStatus.CANCELLED
        free.set()
        eventually(lambda: bool(said), BOUND_S)
        eventually(lambda: not marks(store), BOUND_S)
        assert [one.task_id for one in looking.list("s")] == [task.task_id]
        gone(task)


def test_the_supervisor_that_the_runner_knew_may_be_gone(runner: JobRunner, store: GitJobStore) -> None:
    """Then the next one is asked through the journal."""
    with ProcessSupervisor(store) as first:
        runner.owned_tasks.use(first.job_tasks)
    with ProcessSupervisor(store) as second:
        turn = Turn()
        job_id = begun(runner, second, turn)
        runner.cancel(job_id)
        assert runner.await_job(job_id, BOUND_S).status is JobStatus.CANCELLED
        assert second.get(turn.tasks[0].task_id).status is TaskStatus.CANCELLED
        gone(turn.tasks[0])


# --- what a recovery and a runner's end cannot read --------------------------------------------------------


def left_by_a_dead_runner(store: GitJobStore) -> tuple[str, Task]:
    """A job that ended, and its command, which nobody ended: the runner died between the two."""
    job = store.create(job_for(store, "s"), Queued(runner_id="dead"), Started())
    assert store.home is not None
    with ProcessSupervisor(store) as first:
        task = first.start("s", TREE, env=ENV)  # of no job, so that this supervisor leaves it
        journal = first.client.journal("s")
        intent = next(iter(journal._ledger.read())).data
    (store.session_dir("s") / "tasks.jsonl").unlink()
    TaskJournal(store.session_dir("s"), "s", disk=store.disk)._ledger.append({**intent, "job": job.job_id})
    FileActive(store.home, store.disk, JOB_TASKS).mark(job.job_id, "s")
    store.apply(job.job_id, Completed(event_id="e", result_text="done"))
    return job.job_id, task


def test_a_recovery_ends_the_commands_of_jobs_that_had_ended(store: GitJobStore) -> None:
    """Of that runner only; what belongs to a job whose session is gone is nobody's any more."""
    job_id, task = left_by_a_dead_runner(store)
    assert store.home is not None
    FileActive(store.home, store.disk, JOB_TASKS).mark("00000000-0000-4000-8000-000000000001", "s")
    left = LeftTasks(store)
    assert left.of_runner("another")
    assert marked(task)
    assert left.of_runner("dead")
    gone(task)
    assert job_id not in marks(store)


def test_commands_that_cannot_be_looked_for_are_left_to_the_next_recovery(
    store: GitJobStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged journal: it is said, the job's mark stays, and so does what leads there."""
    job_id, task = left_by_a_dead_runner(store)
    path = store.session_dir("s") / "tasks.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"no record\n" + whole)
    left = LeftTasks(store)
    assert not left.of_runner("dead")
    assert "could not be ended" in caplog.text
    assert (marks(store), bool(marked(task))) == ([job_id], True)
    path.write_bytes(whole)
    assert LeftTasks(store).of_runner("dead")
    gone(task)
    assert marks(store) == []


@pytest.mark.parametrize("way", ["returns", "is cancelled"])
def test_commands_of_an_ended_job_are_ended_once_their_journal_can_be_read(
    runner: JobRunner,
    store: GitJobStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    """The job's own end does not wait for that; its commands do not go on for longer than they must."""
    failing = threading.Event()
    failing.set()
    unfinished = JobTasks.unfinished

    def unreadable(tasks: JobTasks, job_id: str) -> list[Task]:
        if failing.is_set():
            raise Damaged("broken", path="tasks.jsonl")
        return unfinished(tasks, job_id)

    monkeypatch.setattr(JobTasks, "unfinished", unreadable)
    over = threading.Event()

    def then(request: TurnRequest, cancel: threading.Event) -> TurnResult:
        assert (over if way == "returns" else cancel).wait(BOUND_S)
        return TurnResult(final_text="done")

    with ProcessSupervisor(store) as supervisor:
        turn = Turn(then=then)
        job_id = begun(runner, supervisor, turn)
        if way == "is cancelled":
            runner.cancel(job_id)
        over.set()
        job = runner.await_job(job_id, BOUND_S)
        assert (job.status.value, job.result_text) == ("completed" if way == "returns" else "cancelled", "done")
        eventually(lambda: "could not be ended yet" in caplog.text)
        (task,) = turn.tasks
        assert marked(task)
        failing.clear()
        assert supervisor.wait(task.task_id, BOUND_S).status is TaskStatus.CANCELLED
        gone(task)
        eventually(lambda: not marks(store), BOUND_S)


def test_marks_that_cannot_be_made_start_nothing(
    store: GitJobStore, runner: JobRunner, supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the mark nobody would find the command at the job's end."""

    def full(*_: str) -> None:
        raise OSError(28, "no space")

    release = threading.Event()
    job = runner.submit(
        SpawnRequest(prompt="p", parent_session_id="s"),
        sync_fn=lambda request, cancel: TurnResult(final_text=str(release.wait(BOUND_S))),
    )
    with monkeypatch.context() as patch:
        patch.setattr(supervisor.job_tasks._marks, "mark", full)
        with pytest.raises(StoreWriteFailed, match="nothing was started"):
            supervisor.start("s", TREE, env=ENV, job_id=job.job_id)
    assert supervisor.list("s") == []
    release.set()
    runner.await_job(job.job_id, BOUND_S)


def test_a_command_that_cannot_be_asked_to_stop_keeps_no_other_from_being_asked(
    store: GitJobStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk has no room for the request: it is said of that one, and all others hear of theirs."""
    job = store.create(job_for(store, "s"), Queued(runner_id="r"), Started())
    asked: list[str] = []
    with TaskClient(store.session_dir("s").parents[1]) as client:
        tasks = [
            client.journal("s").begin(f"{n:032x}", "x", worker_id="w", boot="b", job_id=job.job_id)[0] for n in range(3)
        ]

        def stop(task: Task, reason: str, grace_s: float) -> None:
            if task.task_id == tasks[1].task_id:
                raise StoreWriteFailed("the disk is full")
            asked.append(task.task_id)

        owned = JobTasks(client, disk=store.disk, stop=stop)
        owned.mark(job.job_id, "s")
        assert [task.task_id for task in owned.ask(job.job_id, "enough")] == [task.task_id for task in tasks]
    assert asked == [tasks[0].task_id, tasks[2].task_id]
    assert f"task {tasks[1].task_id} of job" in caplog.text
    store.apply(job.job_id, Completed(event_id="e", result_text="done"))


# --- starts that meet an end -------------------------------------------------------------------------------


def test_a_job_that_is_over_starts_nothing(
    runner: JobRunner, supervisor: ProcessSupervisor, store: GitJobStore
) -> None:
    """Refused with nothing written; but what it started once is answered with what became of it."""
    turn = Turn(then=lambda request, cancel: TurnResult(final_text="done"))
    job_id = begun(runner, supervisor, turn)
    runner.await_job(job_id, BOUND_S)
    before = supervisor.list("s")
    with pytest.raises(ParentFinished):
        supervisor.start("s", "true", env=ENV, job_id=job_id)
    again = supervisor.start("s", TREE, env=ENV, job_id=job_id, task_id=turn.tasks[0].task_id)
    assert again.terminal
    assert supervisor.list("s") == before
    eventually(lambda: not marks(store), BOUND_S)
    with pytest.raises(UnknownJob):
        supervisor.start("s", "true", env=ENV, job_id="00000000-0000-4000-8000-000000000001")


def test_a_start_that_its_jobs_end_overtakes_runs_nothing(
    runner: JobRunner, supervisor: ProcessSupervisor, store: GitJobStore, tmp_path: Path
) -> None:
    """The job ends between the first look and the intent: the second look sees it, and the task never ran."""
    turn = Turn(then=lambda request, cancel: TurnResult(final_text="done"))
    job_id = begun(runner, supervisor, turn)
    runner.await_job(job_id, BOUND_S)
    first, over = [False], supervisor._is_over
    supervisor._is_over = lambda job_id: first.pop() if first else over(job_id)  # type: ignore[method-assign]
    task = supervisor.start("s", f"touch {tmp_path}/ran", env=ENV, job_id=job_id)
    assert (task.status, task.stopped_by, task.exit_code) == (TaskStatus.CANCELLED, "never_started", None)
    assert "its job ended" in task.error
    assert not (tmp_path / "ran").exists()
    assert not marks(store)


def test_an_end_that_a_start_overtakes_stops_it(store: GitJobStore) -> None:
    """The start looks before the job's end is durable, from a thread that the turn left running: its intent is there
    before the end looks, which stops it."""
    looked, ended = threading.Event(), threading.Event()
    tasks: list[Task] = []

    def leave(request: TurnRequest, cancel: threading.Event) -> TurnResult:
        threads.append(threading.Thread(target=lambda: tasks.append(late(request.job_id))))
        threads[0].start()
        assert looked.wait(BOUND_S)
        return TurnResult(final_text="done")

    def late(job_id: str) -> Task:
        return keeper.start("s", TREE, env=ENV, job_id=job_id)

    threads: list[threading.Thread] = []
    with ProcessSupervisor(store) as keeper, JobRunner(store, workers=1) as runner:
        over = keeper._is_over
        looks = iter([False])

        def look(job_id: str) -> bool:
            try:
                return next(looks)
            except StopIteration:
                answer = over(job_id)  # as it was before the end
                looked.set()
                assert ended.wait(BOUND_S)
                return answer

        keeper._is_over = look  # type: ignore[method-assign]
        job = runner.submit(SpawnRequest(prompt="p", parent_session_id="s"), sync_fn=leave)
        assert looked.wait(BOUND_S)
        # Its turn's end waits for the task that is on its way, as long as it may.
        runner.await_job(job.job_id, BOUND_S)
        ended.set()
        threads[0].join(BOUND_S)
        task = keeper.wait(tasks[0].task_id, BOUND_S)
        assert task.status is TaskStatus.CANCELLED
        eventually(lambda: not marked(task) and not marks(store), BOUND_S)
