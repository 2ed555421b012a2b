"""Exit records that nobody can read, of runs whose keeper is dead: the run ends, says so, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openjobs import JobRunner, SpawnRequest
from openjobs.agents import Profiles
from openjobs.agents.joblog import JobLog
from openjobs.agents.leftovers import finish_log
from openjobs.durable import Disk
from openjobs.errors import Damaged, OutcomeUnknown
from openjobs.host.transfer import export_session, import_session
from openjobs.jobs import Completed, Job, JobStatus, Queued, Started
from openjobs.processes import (
    ProcessSupervisor,
    Task,
    TaskClient,
    TaskStatus,
    layout,
    read_output,
    run_command,
    run_directory,
    rundir,
)
from openjobs.processes.client import MARKS
from openjobs.processes.identity import Identity, this_system
from openjobs.processes.owned import JobTasks
from openjobs.runlog import RunLogReader
from openjobs.store import GitJobStore
from openjobs.store.presence import JOB_TASKS, FileActive
from tests.support import eventually
from tests.support.disks import FaultyDisk
from tests.support.jobs import job_for
from tests.support.processes import RELAXED, marked, this_task

BOUND_S = 20.0
ENV = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
UNREADABLE = "exit.json.unreadable"
UNTIL_GO = "while [ ! -e go ]; do sleep 0.02; done; "


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s")
        yield store


@pytest.fixture
def supervise(store: GitJobStore) -> Iterator[Callable[[], ProcessSupervisor]]:
    """Makes supervisors; at the end every task is ended and every supervisor closed."""
    made: list[ProcessSupervisor] = []

    def make() -> ProcessSupervisor:
        made.append(ProcessSupervisor(store))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.close()
    with ProcessSupervisor(store) as last:
        last.recover()
        for task in last.list("s"):
            if not task.terminal:
                last.stop(task.task_id, grace_s=0)
                assert last.wait(task.task_id, BOUND_S).terminal


@pytest.fixture
def supervisor(supervise: Callable[[], ProcessSupervisor]) -> ProcessSupervisor:
    return supervise()


def run_dir(store: GitJobStore, task: Task) -> Path:
    return store.session_dir("s") / "runs" / task.task_id


def go(store: GitJobStore) -> None:
    (store.session_dir("s") / "work" / "go").touch()


def completion(store: GitJobStore, task: Task) -> tuple[str, bytes] | None:
    """What its log says of the end, and the bytes in it; None while it is not complete."""
    reader = RunLogReader(run_dir(store, task), task_id=task.task_id, run_id=task.task_id)
    state = reader.state()
    if state is None or state.completion is None:
        return None
    return state.completion.outcome, reader.read().data


def ends(supervisor: ProcessSupervisor, task: Task) -> int:
    """How often its end is recorded."""
    records = supervisor.client.journal("s")._ledger.read()
    return sum(record.data["task"] == task.task_id and record.data["fact"] == "ended" for record in records)


def kill_keeper(task: Task) -> None:
    assert task.keeper is not None
    assert this_system().send(task.keeper, signal.SIGKILL)


def text(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def directory(path: Path) -> None:
    path.mkdir()
    (path / "within").write_text("kept")


#: what may stand in the place of a record
SPOILT: dict[str, Callable[[Path], object]] = {
    "no JSON": text(b"not a record"),
    "nothing": text(b""),
    "no object": text(b"[]"),
    "torn": text(b'{"version": 1, "task_id": "'),
    "of another version": text(b'{"version": 2}'),
    "too large": lambda path: path.write_bytes(b'{"version": 1, "more": "' + bytes(2 << 20) + b'"}'),
    "a directory": directory,
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": lambda path: os.mkfifo(path),
}


def look(path: Path) -> object:
    """What is there, without following or waiting."""
    if path.is_symlink():
        return os.readlink(path)
    if path.is_dir():
        return {found.name: found.read_bytes() for found in path.iterdir()}
    return path.read_bytes() if path.is_file() else path.stat().st_mode


# --- a worker that is there --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", SPOILT)
def test_a_run_whose_record_nobody_can_read_ends_as_lost_and_says_so(
    what: str, supervisor: ProcessSupervisor, store: GitJobStore
) -> None:
    """Who waits is released, the log is complete and has every byte, and what stood there is kept as it was."""
    task = supervisor.start("s", "echo before; exec sleep 60", env=ENV)
    eventually(lambda: supervisor.output(task.task_id).data == b"before\n")
    path = run_dir(store, task) / layout.EXIT
    SPOILT[what](path)
    found = look(path)
    kill_keeper(task)
    ended = supervisor.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.stopped_by, ended.exit_code) == (TaskStatus.LOST, "unreadable", None)
    assert ended.error == (
        f"how it ended cannot be known; its keeper's record of that cannot be read and is kept as {UNREADABLE}"
    )
    eventually(lambda: supervisor.running == 0)
    assert completion(store, task) == ("lost", b"before\n")
    assert look(path.with_name(UNREADABLE)) == found
    assert not os.path.lexists(path)
    assert supervisor.output(task.task_id).data == b"before\n"
    assert ends(supervisor, task) == 1
    assert task.child is not None
    assert not this_system().is_alive(task.child)


def test_what_stands_there_while_a_keeper_lives_is_its_to_replace(
    supervisor: ProcessSupervisor, store: GitJobStore
) -> None:
    """Nothing is moved and nothing given up: the command ends as it ends."""
    task = supervisor.start("s", UNTIL_GO + "echo late; exit 6", env=ENV)
    path = run_dir(store, task) / layout.EXIT
    path.write_text("not a record")
    live = supervisor._attendant.find(task.task_id)
    assert live is not None
    asked = threading.Event()
    look_after = live.tail.step

    def step() -> bool:
        try:
            return look_after()
        finally:
            asked.set()

    live.tail.step = step  # type: ignore[method-assign]
    supervisor._attendant._tell(lambda: supervisor._attendant._want(live))
    assert asked.wait(BOUND_S)
    assert supervisor.get(task.task_id).status is TaskStatus.RUNNING
    assert supervisor.output(task.task_id).eof is False
    assert rundir.wait_for_exit(run_dir(store, task), timeout_s=0.02, system=this_system()) is None
    go(store)
    ended = supervisor.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.exit_code) == (TaskStatus.FAILED, 6)
    eventually(lambda: supervisor.running == 0)
    assert completion(store, task) == ("failed", b"late\n")
    assert not (run_dir(store, task) / UNREADABLE).exists()


@pytest.mark.parametrize("where", ["as it is read", "as its damage is told"])
def test_a_keeper_that_puts_its_own_in_the_place_while_we_look_is_believed(
    where: str, supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. What cannot be read is read. 2. The keeper writes its record and leaves. 3. We ask what is damaged: nothing
    any more, and above all not the log."""
    task = supervisor.start("s", UNTIL_GO + "echo late; exit 6", env=ENV)
    live = supervisor._attendant.find(task.task_id)
    assert live is not None
    raced = threading.Event()

    def race() -> None:
        if not raced.is_set():
            go(store)
            eventually(lambda: not rundir.keeper_lives(run_dir(store, task)), BOUND_S)
            raced.set()

    read_exit, step = rundir.read_exit, live.tail.step

    def read(path: Path) -> rundir.ExitRecord | None:
        try:
            return read_exit(path)
        except Damaged:
            race()
            raise

    def told() -> bool:
        more = step()
        if not raced.is_set():
            with pytest.raises(Damaged) as caught:
                read_exit(run_dir(store, task))
            race()
            raise caught.value
        return more

    if where == "as it is read":
        monkeypatch.setattr(rundir, "read_exit", read)
    else:
        monkeypatch.setattr(live.tail, "step", told)
    (run_dir(store, task) / layout.EXIT).write_text("not a record")
    supervisor._attendant._tell(lambda: supervisor._attendant._want(live))
    ended = supervisor.wait(task.task_id, BOUND_S)
    assert raced.is_set()
    assert (ended.status, ended.exit_code) == (TaskStatus.FAILED, 6)
    eventually(lambda: supervisor.running == 0)
    assert completion(store, task) == ("failed", b"late\n")
    assert not (run_dir(store, task) / UNREADABLE).exists()


def test_an_end_that_the_worker_heard_of_is_known_whatever_became_of_the_record(
    supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper's own word came through its socket; the file was spoilt before anybody had read it."""
    task = supervisor.start("s", UNTIL_GO + "echo late; exit 6", env=ENV)
    live = supervisor._attendant.find(task.task_id)
    assert live is not None
    heard = threading.Event()
    settle = live.tail.step

    def held() -> bool:
        assert heard.wait(BOUND_S)
        return settle()

    monkeypatch.setattr(live.tail, "step", held)
    supervisor._attendant._tell(lambda: supervisor._attendant._want(live))
    go(store)
    eventually(lambda: live.run is None and live.record is not None, BOUND_S)
    path = run_dir(store, task) / layout.EXIT
    path.write_text("not a record")
    heard.set()
    ended = supervisor.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.exit_code, ended.stopped_by) == (TaskStatus.FAILED, 6, "exit")
    eventually(lambda: supervisor.running == 0)
    assert completion(store, task) == ("failed", b"late\n")
    assert path.with_name(UNREADABLE).read_text() == "not a record"


@pytest.mark.parametrize("heard", [True, False])
def test_a_record_that_is_spoilt_after_the_log_was_drained(
    heard: bool, supervise: Callable[[], ProcessSupervisor], store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lengths were believed, and the end is asked for: it is what the worker heard, or lost for one that adopted
    the run and heard nothing."""
    supervisor = supervise()
    task = supervisor.start("s", UNTIL_GO + "echo late; exit 6", env=ENV)
    if not heard:
        supervisor.close()
        supervisor = supervise()
        supervisor.recover()
    drained, spoilt = threading.Event(), threading.Event()
    record_end = supervisor._attendant._record_end

    def late(live: Any) -> None:
        drained.set()
        assert spoilt.wait(BOUND_S)
        record_end(live)

    monkeypatch.setattr(supervisor._attendant, "_record_end", late)
    go(store)
    assert drained.wait(BOUND_S)
    eventually(lambda: not rundir.keeper_lives(run_dir(store, task)))
    path = run_dir(store, task) / layout.EXIT
    path.write_text("not a record")
    spoilt.set()
    ended = supervisor.wait(task.task_id, BOUND_S)
    eventually(lambda: supervisor.running == 0)
    if heard:
        assert (ended.status, ended.exit_code) == (TaskStatus.FAILED, 6)
    else:
        assert (ended.status, ended.stopped_by) == (TaskStatus.LOST, "unreadable")
    assert completion(store, task) == (ended.status.value, b"late\n")
    assert path.with_name(UNREADABLE).read_text() == "not a record"


def test_a_disk_that_cannot_move_it_aside_is_tried_again_with_growing_pauses(
    supervisor: ProcessSupervisor,
    store: GitJobStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is said of the end before the record is safe; once it is, that is all that is tried."""
    task = supervisor.start("s", "exec sleep 60", env=ENV)
    live = supervisor._attendant.find(task.task_id)
    assert live is not None
    (run_dir(store, task) / layout.EXIT).write_text("not a record")
    refused: list[float] = []
    rename = store.disk.rename

    def full(source: Any, target: Any) -> None:
        if Path(target).name == UNREADABLE and len(refused) < 3:
            refused.append(live.retry_s)
            assert not live.ended.is_set()
            raise OSError(errno.ENOSPC, "no space left on device")
        rename(source, target)

    monkeypatch.setattr(store.disk, "rename", full)
    kill_keeper(task)
    ended = supervisor.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.stopped_by) == (TaskStatus.LOST, "unreadable")
    assert refused == sorted(set(refused))
    assert caplog.text.count("is tried again until it can") == 1
    eventually(lambda: supervisor.running == 0)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_a_machine_that_has_no_room_for_a_descriptor_says_nothing_of_a_record(
    code: int, supervisor: ProcessSupervisor, store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read once there is room, and not taken for damaged."""
    task = supervisor.start("s", UNTIL_GO + "exit 6", env=ENV)
    refused: list[str] = []
    opened = os.open

    def full(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if str(path).endswith(layout.EXIT) and len(refused) < 5:
            refused.append(str(path))
            raise OSError(code, os.strerror(code))
        return opened(path, flags, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rundir.os, "open", full)
        go(store)
        ended = supervisor.wait(task.task_id, BOUND_S)
    assert (ended.status, ended.exit_code, len(refused)) == (TaskStatus.FAILED, 6, 5)
    assert not (run_dir(store, task) / UNREADABLE).exists()


def test_a_record_on_a_bad_place_of_the_medium_is_one_that_nobody_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens, and its bytes do not come."""

    def bad(fd: int, length: int) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    (tmp_path / layout.EXIT).write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(rundir.os, "read", bad)
        with pytest.raises(Damaged, match="cannot be read: input/output error"):
            rundir.read_exit(tmp_path)


# --- a worker that is not there any more -------------------------------------------------------------------


def left_behind(supervise: Callable[[], ProcessSupervisor], store: GitJobStore, command: str) -> Task:
    """A task that ended after its worker had left; its keeper has written all it knows."""
    first = supervise()
    task = first.start("s", UNTIL_GO + command, env=ENV)
    first.close()
    go(store)
    eventually(lambda: not rundir.keeper_lives(run_dir(store, task)), BOUND_S)
    return task


def test_the_next_worker_records_what_it_cannot_read_as_lost(
    supervise: Callable[[], ProcessSupervisor], store: GitJobStore
) -> None:
    """Until then readers are told the same, and nothing is touched; afterwards nobody has anything left to do."""
    task = left_behind(supervise, store, "echo late; exit 6")
    path = run_dir(store, task) / layout.EXIT
    path.write_text("not a record")
    with TaskClient(store.session_dir("s").parents[1]) as client:
        shown = client.wait(task.task_id, BOUND_S)
        assert (shown.status, shown.stopped_by, shown.event_id) == (TaskStatus.LOST, "unreadable", None)
        assert client.output(shown).data == b"late\n"
    assert path.read_text() == "not a record"
    second = supervise()
    (ended,) = second.recover()
    assert (ended.status, ended.stopped_by) == (TaskStatus.LOST, "unreadable")
    assert ended.error.endswith(UNREADABLE)
    assert completion(store, task) == ("lost", b"late\n")
    assert path.with_name(UNREADABLE).read_text() == "not a record"
    assert supervise().recover() == []
    assert ends(second, task) == 1


def test_a_log_whose_end_was_recorded_before_is_completed_with_that_end(
    supervise: Callable[[], ProcessSupervisor], store: GitJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker died between the end and the completion of the log, and the keeper's record was spoilt since."""
    first = supervise()

    def dies(live: Any) -> None:
        raise OutcomeUnknown("it dies here")

    monkeypatch.setattr(first._attendant, "_complete", dies)
    task = first.start("s", "echo said; exit 6", env=ENV)
    assert first.wait(task.task_id, BOUND_S).exit_code == 6
    eventually(lambda: not rundir.keeper_lives(run_dir(store, task)), BOUND_S)
    first.close(timeout=0)
    assert completion(store, task) is None
    (run_dir(store, task) / layout.EXIT).write_text("not a record")
    FileActive(first.client.home, RELAXED, MARKS).mark(first.worker_id, "s")
    second = supervise()
    second.recover()
    assert second.get(task.task_id).exit_code == 6
    assert completion(store, task) == ("failed", b"said\n")
    assert ends(second, task) == 1


@pytest.mark.parametrize("spoilt", [b'{"leftovers": "somebody"}', b"{}", b"not a record"])
def test_a_spoilt_word_about_the_rest_of_the_tree_costs_no_end(
    spoilt: bytes, supervise: Callable[[], ProcessSupervisor], store: GitJobStore
) -> None:
    """How the command ended is in another file, for every reader; only who was left over is not known."""
    task = left_behind(supervise, store, "setsid sleep 300 & exit 3")
    path = run_dir(store, task) / layout.SWEPT
    assert path.exists()
    path.write_bytes(spoilt)
    with TaskClient(store.session_dir("s").parents[1]) as client:
        assert client.get(task.task_id).exit_code == 3
    second = supervise()
    (ended,) = second.recover()
    assert (ended.status, ended.exit_code) == (TaskStatus.FAILED, 3)
    assert path.read_bytes() == spoilt
    record = rundir.read_exit(run_dir(store, task))
    assert record is not None
    assert record.leftovers is None


def test_the_tasks_of_a_job_do_not_hold_up_its_end_by_what_cannot_be_read(store: GitJobStore) -> None:
    """Nobody waits for a record that will never come, and the job's mark goes."""
    job = store.create(job_for(store, "s"), Queued(runner_id="dead"), Started())
    store.apply(job.job_id, Completed(event_id="e", result_text="done"))
    FileActive(store.session_dir("s").parents[1], store.disk, JOB_TASKS).mark(job.job_id, "s")
    with TaskClient(store.session_dir("s").parents[1]) as client:
        task, _ = client.journal("s").begin("0" * 32, "x", worker_id="gone", boot="another", job_id=job.job_id)
        client.run_dir(task).mkdir(parents=True)
        (client.run_dir(task) / layout.EXIT).write_text("not a record")
        tasks = JobTasks(client, disk=store.disk)
        assert [found.task_id for found in tasks.ask(job.job_id, "its job is over")] == [task.task_id]
        assert tasks.end(job.job_id, "its job is over", patience_s=0) == []
        assert tasks.release(job.job_id)
        assert (client.run_dir(task) / UNREADABLE).read_text() == "not a record"
        (found,) = client.list("s")
        assert (found.status, found.stopped_by) == (TaskStatus.LOST, "unreadable")


def test_the_log_of_a_dead_runners_job_is_completed_without_the_record(store: GitJobStore, tmp_path: Path) -> None:
    """The job's end is durable; only the keeper's file was spoilt before the log was complete."""
    home = store.session_dir("s").parents[1]
    job = store.create(job_for(store, "s"), Queued(runner_id="dead"), Started(run_id=store.new_id()))
    job = store.apply(job.job_id, Completed(event_id="e", result_text="done"))
    directory = run_directory(home, "s", str(job.run_id))
    end = run_command("echo said", run_dir=directory, env=ENV, task_id=job.run_id, disk=RELAXED)
    assert end.succeeded
    eventually(lambda: not rundir.keeper_lives(directory))
    (directory / layout.EXIT).write_text("not a record")
    assert finish_log(home, job, RELAXED)
    reader = RunLogReader(directory, task_id=job.job_id, run_id=str(job.run_id))
    state = reader.state()
    assert state is not None
    assert state.completion is not None
    assert (state.completion.outcome, reader.read().data) == ("completed", b"said\n")
    assert (directory / UNREADABLE).read_text() == "not a record"


@pytest.mark.parametrize("what", ["no JSON", "a directory", "a pipe", "a link"])
def test_the_log_of_a_living_runners_job_is_completed_without_the_record(
    what: str, store: GitJobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner had heard of the end before the file was spoilt: the job ended as it ended, and its log is whole."""
    close = JobLog.close

    def spoilt(job_log: JobLog) -> None:
        spoil(job_log._run_dir, what)
        close(job_log)

    monkeypatch.setattr(JobLog, "close", spoilt)
    with jobs_of(store, tmp_path) as (profiles, ended):
        job = ended("echo said")
        assert (job.status, job.result_text) == (JobStatus.COMPLETED, "said")
        assert job_completion(store, job) == ("completed", b"said\n")
        assert profiles.run_logs.unfinished == 0
    directory = run_directory(tmp_path / "home", "s", str(job.run_id))
    assert os.path.lexists(directory / UNREADABLE)


def test_such_a_log_waits_while_somebody_has_the_run(
    store: GitJobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds the keeper's lock may be a keeper, so nothing is touched; it goes on with the end of another job, or
    when the runner leaves."""
    close = JobLog.close
    held: list[int] = []

    def spoilt(job_log: JobLog) -> None:
        if len(held) < 2:
            spoil(job_log._run_dir, "no JSON")
            held.append(os.open(job_log._run_dir / layout.KEEPER, os.O_RDWR | os.O_CLOEXEC))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        close(job_log)

    monkeypatch.setattr(JobLog, "close", spoilt)
    with jobs_of(store, tmp_path) as (profiles, ended):
        jobs = [ended("echo one"), ended("echo two")]
        assert [job_completion(store, job) for job in jobs] == [None, None]
        for job in jobs:
            directory = run_directory(tmp_path / "home", "s", str(job.run_id))
            assert (directory / layout.EXIT).read_text() == "not a record"
        os.close(held[0])
        ended("echo three")
        assert [job_completion(store, job) for job in jobs] == [("completed", b"one\n"), None]
        assert profiles.run_logs.unfinished == 1
        os.close(held[1])
    assert job_completion(store, jobs[1]) == ("completed", b"two\n")


def test_such_a_log_is_completed_whichever_effect_fails_first(
    store: GitJobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each effect of settling it fails once: what was there is kept, and the log is whole with the end of the next."""
    close = JobLog.close
    armed = [0]

    def spoilt(job_log: JobLog) -> None:
        if armed:
            spoil(job_log._run_dir, "no JSON")
            disk.arm(armed.pop())
        close(job_log)

    monkeypatch.setattr(JobLog, "close", spoilt)
    disk = FaultyDisk()
    effect, failed = 0, True
    with jobs_of(store, tmp_path, disk) as (profiles, ended):
        while failed:
            effect += 1
            armed[:] = [effect]
            disk.failed.clear()
            job = ended("echo said")
            failed = bool(disk.failed)
            ended("true")
            assert job_completion(store, job) == ("completed", b"said\n"), effect
            directory = run_directory(tmp_path / "home", "s", str(job.run_id))
            assert (directory / UNREADABLE).read_text() == "not a record"
            assert profiles.run_logs.unfinished == 0
    assert effect > 5


def spoil(directory: Path, what: str) -> None:
    """What stands in the place of the record of a run that has ended, when its keeper is gone."""
    eventually(lambda: not rundir.keeper_lives(directory), BOUND_S)
    (directory / layout.EXIT).unlink()
    SPOILT[what](directory / layout.EXIT)


@contextlib.contextmanager
def jobs_of(
    store: GitJobStore, tmp_path: Path, disk: Disk | None = None
) -> Iterator[tuple[Profiles, Callable[[str], Job]]]:
    """A runner's profiles, and a function that runs a shell command as its job, which ends only when its output has
    been taken."""
    home = tmp_path / "home"
    with Profiles(home, disk=disk or store.disk) as profiles, JobRunner(store, workers=1, profiles=profiles) as runner:

        def ended(script: str) -> Job:
            gate = tmp_path / store.new_id()
            waiting = f"{script}; while [ ! -e {gate} ]; do sleep 0.02; done"
            job = runner.submit(SpawnRequest(prompt=waiting, parent_session_id="s", agent_id="shell", env=ENV))
            log = run_directory(home, "s", str(job.run_id or store.get(job.job_id).run_id)) / "log"
            eventually(lambda: script == "true" or (log.exists() and log.stat().st_size > 0), BOUND_S)
            gate.touch()
            return runner.await_job(job.job_id, BOUND_S)

        yield profiles, ended


def job_completion(store: GitJobStore, job: Job) -> tuple[str, bytes] | None:
    directory = run_directory(store.session_dir("s").parents[1], "s", str(job.run_id))
    reader = RunLogReader(directory, task_id=job.job_id, run_id=str(job.run_id))
    state = reader.state()
    if state is None or state.completion is None:
        return None
    return state.completion.outcome, reader.read().data


def test_a_session_with_such_a_record_comes_into_another_home(
    supervise: Callable[[], ProcessSupervisor], store: GitJobStore, tmp_path: Path
) -> None:
    """It was exported before anybody had looked: the copy says what its own home will say, and has the file."""
    task = left_behind(supervise, store, "echo late; exit 6")
    (run_dir(store, task) / layout.EXIT).write_text("not a record")
    export_session(store, "s", tmp_path / "x")
    assert (run_dir(store, task) / layout.EXIT).exists()
    with GitJobStore(tmp_path / "new", "relaxed") as copy, TaskClient(tmp_path / "new") as tasks:
        assert list(import_session(copy, tmp_path / "x").ended_tasks) == [task.task_id]
        found = tasks.get(task.task_id)
        assert (found.status, found.stopped_by) == (TaskStatus.LOST, "unreadable")
        assert completion(copy, task) == ("lost", b"late\n")
        assert (run_dir(copy, task) / UNREADABLE).read_text() == "not a record"
        assert copy.fsck("s").clean


# --- a command that is waited for --------------------------------------------------------------------------


def test_a_command_that_is_waited_for_is_lost_and_says_so(tmp_path: Path) -> None:
    """Its keeper was killed beside a file that nobody can read; what it had written until then is handed on."""
    said: list[bytes] = []
    keepers: list[Identity] = []

    def spoil(stream: str, data: bytes) -> None:
        said.append(data)
        (tmp_path / layout.EXIT).write_text("not a record")
        assert this_system().send(keepers[0], signal.SIGKILL)

    end = run_command(
        "echo one; exec sleep 300",
        run_dir=tmp_path,
        env=ENV,
        disk=RELAXED,
        task_id=this_task(),
        on_started=lambda keeper, child: keepers.append(keeper),
        on_output=spoil,
    )
    assert (end.stopped_by, end.exit_code, end.stdout_tail) == ("lost", None, b"one\n")
    assert UNREADABLE in end.error
    assert b"".join(said) == b"one\n"
    assert (tmp_path / UNREADABLE).read_text() == "not a record"
    assert marked() == []


# --- moving it aside ---------------------------------------------------------------------------------------


def test_what_was_moved_aside_before_stays(tmp_path: Path) -> None:
    """A second one gets a number; the burial of a run names the first."""
    for content in ("one", "two", "three"):
        (tmp_path / layout.EXIT).write_text(content)
        burial = bury(tmp_path, RELAXED)
        assert (burial.record, burial.unreadable) == (None, UNREADABLE)
    kept = sorted(path.name for path in tmp_path.glob(f"{UNREADABLE}*"))
    assert [(tmp_path / name).read_text() for name in kept] == ["one", "two", "three"]


def bury(directory: Path, disk: Any) -> rundir.Burial:
    system = this_system()
    found = rundir.bury(directory, task_id=this_task(), disk=disk, system=system, boot=system.boot(), grace_s=0.1)
    assert found is not None
    return found


@pytest.mark.parametrize("late", [False, True])
def test_a_burial_that_fails_anywhere_is_done_by_the_next(late: bool, tmp_path: Path) -> None:
    """Each effect on the disk fails in turn, before it happens or after: the record is there under one of its two
    names at any moment, and the next burial says what the first would have said."""
    effect, failed = 0, True
    while failed:
        effect += 1
        directory = tmp_path / str(effect)
        directory.mkdir()
        (directory / layout.EXIT).write_text("not a record")
        disk = FaultyDisk(durable=True)
        disk.arm(effect, late=late)
        try:
            bury(directory, disk)
        except OSError:
            pass
        failed = bool(disk.failed)
        kept = [path.read_text() for path in directory.glob("exit.json*")]
        assert kept == ["not a record"], disk.failed
        burial = bury(directory, RELAXED)
        assert (burial.record, burial.unreadable, burial.may_have_run) == (None, UNREADABLE, False)
        assert rundir.is_lost(directory)
        assert (directory / UNREADABLE).read_text() == "not a record"
    assert effect > 5


def test_an_output_that_is_no_file_ends_no_reading_in_an_error_of_the_system(tmp_path: Path) -> None:
    """A directory or a pipe in the place of a stream is damage, by name, and no descriptor stays open."""
    for name, make in (("stdout", Path.mkdir), ("stderr", os.mkfifo)):
        make(tmp_path / name)
        before = len(os.listdir("/dev/fd"))
        with pytest.raises(Damaged, match=f"{name} is not a file"):
            read_output(tmp_path, name)
        assert len(os.listdir("/dev/fd")) == before
        os.rmdir(tmp_path / name) if name == "stdout" else os.unlink(tmp_path / name)
