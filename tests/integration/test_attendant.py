"""The attendant when something it looks at fails, goes or comes at the wrong moment: no task is forgotten, none
disturbs another, and no end is made up."""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs.errors import Closed, NotFound, StoreWriteFailed
from openjobs.processes import ProcessSupervisor, Task, TaskClient, TaskStatus, attendant, layout, rundir
from openjobs.processes.attendant import Live
from openjobs.processes.client import MARKS
from openjobs.processes.identity import this_system
from openjobs.processes.template import Run
from openjobs.runlog import RunLogReader
from openjobs.store import GitJobStore
from openjobs.store.presence import FileActive
from tests.support import eventually
from tests.support.processes import RELAXED, Supervise

BOUND_S = 20.0
ENV = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
FOREVER = "exec sleep 60"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s")
        store.create_session("t")
        yield store


def run_dir(store: GitJobStore, task: Task) -> Path:
    return store.session_dir(task.session_id) / "runs" / task.task_id


def logged(store: GitJobStore, task: Task) -> bytes:
    try:
        return RunLogReader(run_dir(store, task), task_id=task.task_id, run_id=task.task_id).read().data
    except NotFound:
        return b""


def outcome_of(store: GitJobStore, task: Task) -> str:
    """What its log says, once it is complete; else nothing."""
    state = RunLogReader(run_dir(store, task), task_id=task.task_id, run_id=task.task_id).state()
    return state.completion.outcome if state is not None and state.completion is not None else ""


def live_of(supervisor: ProcessSupervisor, task: Task) -> Live:
    live = supervisor._attendant.find(task.task_id)
    assert live is not None
    return live


def facts(supervisor: ProcessSupervisor, task: Task) -> list[str]:
    """The kinds of its facts, in order."""
    records = supervisor.client.journal(task.session_id)._ledger.read()
    return [record.data["fact"] for record in records if record.data["task"] == task.task_id]


def kill_keeper(task: Task) -> None:
    assert task.keeper is not None
    assert this_system().send(task.keeper, signal.SIGKILL)


def first_fails(call: Callable[..., Any], error: Exception, times: int = 1) -> Callable[..., Any]:
    """`call`, whose first calls raise."""
    left = [error] * times

    def flaky(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return call(*args, **options)

    return flaky


# --- it closes ---------------------------------------------------------------------------------------------


def test_a_start_that_a_close_overtakes_leaves_its_command_to_the_next_worker(
    supervise: Supervise, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor closes while the keeper is being asked: `start` says so, the command runs, and is adopted."""
    first = supervise()
    start = first._template.start
    runs = []

    def closing(*args: Any) -> Run:
        runs.append(start(*args))
        first.close()
        return runs[0]

    monkeypatch.setattr(first._template, "start", closing)
    with pytest.raises(Closed, match="next one"):
        first.start("s", FOREVER, env=ENV)
    assert runs[0]._channel.fileno() == -1
    second = supervise()
    second.recover()
    (task,) = second.list("s")
    assert (task.status, task.worker_id) == (TaskStatus.RUNNING, second.worker_id)
    assert task.child is not None
    assert this_system().is_alive(task.child)


def test_a_close_that_overtakes_the_waking_writes_into_nobodys_file(
    supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe that wakes the attendant is closed, and its number is another file's at once."""
    first = supervise()
    first.wait(first.start("s", "true", env=ENV).task_id, BOUND_S)
    tell = first._attendant._tell
    opened: list[int] = []

    def late(call: Callable[[], None]) -> None:
        first.close()
        opened.extend(os.open(tmp_path / f"other-{n}", os.O_CREAT | os.O_WRONLY) for n in range(16))
        tell(call)

    eventually(lambda: first.running == 0)
    monkeypatch.setattr(first._attendant, "_tell", late)
    try:
        first.start("s", FOREVER, env=ENV)
        assert [path.name for path in sorted(tmp_path.glob("other-*")) if path.stat().st_size] == []
    finally:
        for fd in opened:
            os.close(fd)


def test_a_log_that_cannot_be_put_down_keeps_nobody_from_closing(
    supervise: Supervise, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails at that moment: all others are put down, too, and the next worker goes on with the log."""
    first = supervise()
    tasks = [first.start("s", "echo one; exec sleep 60", env=ENV) for _ in range(2)]
    eventually(lambda: all(logged(store, task) == b"one\n" for task in tasks))
    tail = live_of(first, tasks[0]).tail
    rest = tail.rest

    def rest_and_fail() -> None:
        rest()
        fail()

    monkeypatch.setattr(tail, "rest", rest_and_fail)
    first.close()
    second = supervise()
    second.recover()
    for task in tasks:
        second.stop(task.task_id, grace_s=1.0)
        assert second.wait(task.task_id, BOUND_S).status is TaskStatus.CANCELLED
        eventually(lambda: outcome_of(store, task) == "cancelled")  # noqa: B023
        assert logged(store, task) == b"one\n"


def fail() -> None:
    raise OSError(5, "the disk failed")


def test_a_close_waits_for_the_step_under_way_and_for_no_other(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued behind it belongs to the next worker already."""
    supervisor = supervise(log_threads=1)
    lives = [live_of(supervisor, supervisor.start("s", FOREVER, env=ENV)) for _ in range(2)]
    under_way, go_on, done = threading.Event(), threading.Event(), []

    def step(live: Live) -> bool:
        under_way.set()
        assert go_on.wait(BOUND_S)
        done.append(live)
        return False

    look = supervisor._attendant
    for live in lives:
        monkeypatch.setattr(live.tail, "step", functools.partial(step, live))
        look._tell(functools.partial(look._want, live))
    assert under_way.wait(BOUND_S)
    eventually(lambda: all(live.busy for live in lives))
    closing = threading.Thread(target=supervisor.close)
    closing.start()
    eventually(lambda: look._stopping)
    go_on.set()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert len(done) == 1


# --- something fails ---------------------------------------------------------------------------------------


def test_a_task_is_looked_after_once(supervisor: ProcessSupervisor) -> None:
    """Two threads that meet it at once have the same one in their hands."""
    task = supervisor.start("s", FOREVER, env=ENV)
    live = live_of(supervisor, task)
    assert supervisor._attendant.attend(task, abandoned=True) is live
    assert not live.abandoned
    assert supervisor.running == 1


def test_what_fails_for_one_task_disturbs_no_other(
    supervisor: ProcessSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of ours is said, and the thread that everybody depends on goes on."""
    running = supervisor.start("s", "sleep 0.2; exit 4", env=ENV)
    supervisor._attendant._tell(fail)
    assert supervisor.wait(running.task_id, BOUND_S).exit_code == 4
    assert "looking after a task failed" in caplog.text
    task = supervisor.start("s", "exit 5", env=ENV)
    assert supervisor.wait(task.task_id, BOUND_S).exit_code == 5


def test_a_record_that_no_keeper_wrote_disturbs_no_other(supervisor: ProcessSupervisor, store: GitJobStore) -> None:
    """Somebody wrote into a run's directory, and its keeper was killed: that task is lost, which is not made up, and
    all others end as they end."""
    spoilt = supervisor.start("s", FOREVER, env=ENV)
    other = supervisor.start("t", "while [ ! -e go ]; do sleep 0.02; done; exit 3", env=ENV)
    (run_dir(store, spoilt) / layout.EXIT).write_text("not a record")
    kill_keeper(spoilt)
    assert supervisor.wait(spoilt.task_id, BOUND_S).status is TaskStatus.LOST
    (store.session_dir("t") / "work" / "go").touch()
    assert supervisor.wait(other.task_id, BOUND_S).exit_code == 3
    assert facts(supervisor, spoilt).count("ended") == 1


def test_a_step_that_fails_is_taken_again(
    supervisor: ProcessSupervisor,
    store: GitJobStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even for a reason that nobody thought of: the output is whole and the end recorded."""
    task = supervisor.start("s", "while [ ! -e go ]; do sleep 0.02; done; echo late; exit 6", env=ENV)
    tail = live_of(supervisor, task).tail
    monkeypatch.setattr(tail, "step", first_fails(tail.step, RuntimeError("a fault of ours"), times=2))
    (store.session_dir("s") / "work" / "go").touch()
    assert supervisor.wait(task.task_id, BOUND_S).exit_code == 6
    assert logged(store, task) == b"late\n"
    assert caplog.text.count("a step failed and is tried again") == 2


def test_a_lock_that_cannot_be_looked_at_is_not_taken_for_free(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adopted task whose keeper's lock cannot be read for a moment is not given up."""
    first = supervise()
    task = first.start("s", FOREVER, env=ENV)
    first.close()
    second = supervise()
    second.recover()
    live = live_of(second, task)
    looked = threading.Event()
    lives = rundir.keeper_lives

    def denied(directory: Path) -> bool:
        if looked.is_set():
            return lives(directory)
        looked.set()
        raise PermissionError(13, "not now")

    monkeypatch.setattr(rundir, "keeper_lives", denied)
    assert looked.wait(BOUND_S)
    assert not live.abandoned
    second.stop(task.task_id, grace_s=1.0)
    assert second.wait(task.task_id, BOUND_S).status is TaskStatus.CANCELLED


def test_a_journal_that_cannot_be_read_keeps_no_stop_of_another_session(
    supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others ask is acted on wherever it can be read, and elsewhere as soon as it can be."""
    kept = supervisor.start("s", FOREVER, env=ENV)
    other = supervisor.start("t", FOREVER, env=ENV)
    with monkeypatch.context() as patch, TaskClient(supervisor.client.home) as client:
        patch.setattr(supervisor.client.journal("s"), "state", fail)
        for task in (kept, other):
            client.request_stop(task.task_id, "from elsewhere", grace_s=1.0)
        assert supervisor.wait(other.task_id, BOUND_S).status is TaskStatus.CANCELLED
        assert supervisor.client.journal("s").get(kept.task_id).status is TaskStatus.RUNNING
    assert supervisor.wait(kept.task_id, BOUND_S).status is TaskStatus.CANCELLED


def test_a_damaged_journal_is_said_once_and_keeps_no_stop_of_another_session(
    supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Something that no writer of ours made stands in it: what others ask is not looked for behind that, it is not
    said again at every look, and once it is repaired all goes on."""
    kept = supervisor.start("s", FOREVER, env=ENV)
    other = supervisor.start("t", FOREVER, env=ENV)
    looks = []
    look = supervisor._attendant._look_for_stops_of

    def counted(session_id: str, lives: list[Live]) -> None:
        looks.append(session_id)
        look(session_id, lives)

    monkeypatch.setattr(supervisor._attendant, "_look_for_stops_of", counted)
    path = store.session_dir("s") / "tasks.jsonl"
    size = path.stat().st_size
    supervisor.client.journal("s")._ledger.append({"fact": "ended", "task": kept.task_id, "at": "never"})
    eventually(lambda: looks.count("s") >= 4)
    assert caplog.text.count("before it is repaired") == 1
    supervisor.stop(other.task_id, grace_s=1.0)
    assert supervisor.wait(other.task_id, BOUND_S).status is TaskStatus.CANCELLED
    os.truncate(path, size)
    with TaskClient(supervisor.client.home) as client:
        client.request_stop(kept.task_id, "from elsewhere", grace_s=1.0)
    assert supervisor.wait(kept.task_id, BOUND_S).status is TaskStatus.CANCELLED


def test_a_journal_that_takes_no_end_is_said_once_and_has_it_when_it_can(
    supervisor: ProcessSupervisor, store: GitJobStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory stands in the place of its lock until somebody takes it away: nothing else would help."""
    task = supervisor.start("s", "while [ ! -e go ]; do sleep 0.02; done; exit 6", env=ENV)
    lock = store.session_dir("s") / ".tasks.jsonl.lock"
    lock.unlink()
    lock.mkdir()
    (store.session_dir("s") / "work" / "go").touch()
    live = live_of(supervisor, task)
    eventually(lambda: live.retry_s >= 0.8, BOUND_S)  # it was tried three times at least
    said = [record for record in caplog.records if str(lock) in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
    assert not [record for record in caplog.records if record.exc_info]
    lock.rmdir()
    assert supervisor.wait(task.task_id, BOUND_S).exit_code == 6
    assert facts(supervisor, task).count("ended") == 1


def test_an_end_whose_record_cannot_be_read_now_is_not_made_up(
    supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for again, until it is there."""
    task = supervisor.start("s", "while [ ! -e go ]; do sleep 0.02; done; exit 6", env=ENV)
    seen = supervisor._attendant._exit_record
    answers = [None, None]
    monkeypatch.setattr(supervisor._attendant, "_exit_record", lambda live: answers.pop() if answers else seen(live))
    (store.session_dir("s") / "work" / "go").touch()
    ended = supervisor.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.exit_code, answers) == (TaskStatus.FAILED, 6, [])
    assert facts(supervisor, task).count("ended") == 1


# --- no keeper, or one after all ---------------------------------------------------------------------------


def test_a_lost_task_is_buried_once(supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses the record of its end: the second try finds a tombstone, which is its own, and says the same."""
    task = supervisor.start("s", FOREVER, env=ENV)
    journal = supervisor.client.journal("s")
    monkeypatch.setattr(journal, "record", first_fails(journal.record, StoreWriteFailed("the disk is full")))
    burials: list[Path] = []
    bury = rundir.bury

    def counted(directory: Path, **more: Any) -> rundir.Burial | None:
        burials.append(directory)
        return bury(directory, **more)

    monkeypatch.setattr(rundir, "bury", counted)
    kill_keeper(task)
    assert supervisor.wait(task.task_id, BOUND_S).status is TaskStatus.LOST
    eventually(lambda: journal.get(task.task_id).event_id)
    assert "cannot be known" in journal.get(task.task_id).error
    assert len(burials) == 1


def test_a_keeper_that_shows_itself_late_is_adopted(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held its lock and had not written down yet who it is: nobody buries it, and its end is its own."""
    first = supervise()
    task = first.start("s", "sleep 0.5; exit 4", env=ENV)
    first.close()
    second = supervise()
    known = rundir.keeper_identity
    answers = [None]
    monkeypatch.setattr(rundir, "keeper_identity", lambda path: answers.pop() if answers else known(path))
    (ended,) = second.recover()
    assert (ended.status, ended.exit_code, ended.worker_id) == (TaskStatus.FAILED, 4, second.worker_id)
    assert facts(second, task) == ["intent", "running", "adopted", "ended"]
    assert not rundir.is_lost(second.client.run_dir(task))


def test_a_keeper_that_somebody_else_adopts_meanwhile_is_his(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two who find it late one adopts it, and the other lets it go without a word about its end."""
    first = supervise()
    task = first.start("s", FOREVER, env=ENV)
    first.close()
    second, third = supervise(), supervise()
    journal = second.client.journal("s")
    adopt = journal.adopt

    def second_comes(*args: Any, **fields: Any) -> Task:
        third.recover()
        return adopt(*args, **fields)

    monkeypatch.setattr(journal, "adopt", second_comes)
    live = second._attendant.attend(journal.get(task.task_id), abandoned=True)
    assert live.done.wait(BOUND_S)
    eventually(lambda: second.running == 0)
    assert third.running == 1
    assert facts(third, task) == ["intent", "running", "adopted"]
    assert third.get(task.task_id).worker_id == third.worker_id


def test_a_run_that_somebody_else_looks_at_is_not_called_lost(
    supervise: Supervise, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keeper's lock is held and no keeper lives: whoever holds it may be about to settle it. It is tried again."""
    supervisor = supervise()
    task = supervisor.start("s", FOREVER, env=ENV)
    live = live_of(supervisor, task)
    bury = rundir.bury
    tries: list[rundir.Burial | None] = []
    fd = os.open(run_dir(store, task) / layout.KEEPER, os.O_RDWR)

    def somebody_is_faster(directory: Path, **more: Any) -> rundir.Burial | None:
        if not tries:
            assert task.keeper is not None
            eventually(lambda: not this_system().is_alive(task.keeper))  # type: ignore[arg-type]
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tries.append(bury(directory, **more))
        return tries[-1]

    monkeypatch.setattr(rundir, "bury", somebody_is_faster)
    try:
        kill_keeper(task)
        eventually(lambda: len(tries) >= 2)
        assert not live.ended.is_set()
        assert not rundir.is_lost(run_dir(store, task))
    finally:
        os.close(fd)
    assert supervisor.wait(task.task_id, BOUND_S).status is TaskStatus.LOST
    assert tries[:2] == [None, None]


def test_a_start_that_is_interrupted_with_its_command_running_is_seen_through(
    supervisor: ProcessSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the keeper's answer and the record of it: nobody knows the channel any more, and the task ends as
    its command does."""
    start = supervisor._template.start
    runs: list[Run] = []

    def interrupted(*args: Any) -> Run:
        runs.append(start(*args))
        runs[0].go()
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor._template, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        supervisor.start("s", "sleep 0.3; exit 4", env=ENV, origin_tool_call_id="c")
    (task,) = supervisor.list("s")
    try:
        ended = supervisor.wait(task.task_id, BOUND_S)
    finally:
        runs[0].close()
    assert (ended.status, ended.exit_code) == (TaskStatus.FAILED, 4)
    assert facts(supervisor, task) == ["intent", "ended"]


@pytest.mark.parametrize("boot", ["this", "another"])
def test_a_log_is_called_complete_only_where_something_proves_it(
    boot: str, supervisor: ProcessSupervisor, store: GitJobStore
) -> None:
    """An intent without any trace of a keeper: in this boot nothing ran; of another boot a power cut may have taken
    what was there, so its log stays as it is."""
    name = this_system().boot() if boot == "this" else "another"
    journal = supervisor.client.journal("s")
    FileActive(supervisor.client.home, RELAXED, MARKS).mark("gone", "s")
    task, _ = journal.begin("0" * 32, "true", worker_id="gone", boot=name)
    (ended,) = supervisor.recover()
    assert ended.status is TaskStatus.LOST
    assert ("did not run" in ended.error) == (boot == "this")
    eventually(lambda: supervisor.running == 0)
    assert (run_dir(store, task) / "log.state").exists() == (boot == "this")


# --- many logs ---------------------------------------------------------------------------------------------


def test_logs_that_are_put_down_in_between_lose_nothing(
    supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tasks write than logs may be open: each takes its turn, and has every byte."""
    monkeypatch.setattr(attendant, "_OPEN_LOGS", 1)
    command = "for n in 1 2 3 4 5 6; do echo $n; sleep 0.03; done"
    tasks = [supervisor.start("s", command, env=ENV) for _ in range(4)]
    for task in tasks:
        assert supervisor.wait(task.task_id, BOUND_S).status is TaskStatus.COMPLETED
        assert logged(store, task) == b"1\n2\n3\n4\n5\n6\n"
    eventually(lambda: supervisor.running == 0)
    assert not supervisor._attendant._open_logs
