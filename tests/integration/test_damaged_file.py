"""One damaged file of a home is named and left as it is, and hides nothing that is in order (R3)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from openjobs import GitJobStore, JobRunner, TurnResult
from openjobs.errors import FileRefused, SessionExists
from openjobs.jobs import JobStatus, Queued, Started
from openjobs.processes import ProcessSupervisor, rundir
from openjobs.session.pages import PAGE_ROWS
from openjobs.tools import AgentTools, ToolText
from tests.support import eventually, git
from tests.support.cli import Cli
from tests.support.homes import fill
from tests.support.jobs import job_for
from tests.support.server import serving


def cut(path: Path) -> None:
    """Its first record lost its last bytes, and others follow it."""
    data = path.read_bytes()
    end = data.index(b"\n")
    path.write_bytes(data[: end // 2] + data[end:])


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/no/such/place")


@attrs.frozen
class Home:
    path: Path
    #: of session s1, s2: one background command that runs, and one that has ended
    running: list[str]
    ended: list[str]

    @property
    def journal(self) -> Path:
        return self.path / "sessions" / "s1" / "tasks.jsonl"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    path = tmp_path / "home"
    with GitJobStore(path, durability="relaxed") as store, ProcessSupervisor(store) as supervisor:
        running, ended = [], []
        for session_id in ("s1", "s2"):
            store.create_session(session_id)
            ended.append(supervisor.wait(supervisor.start(session_id, ["true"]).task_id, 20).task_id)
            running.append(supervisor.start(session_id, ["sleep", "60"]).task_id)
        journal = (path / "sessions" / "s1" / "tasks.jsonl").read_bytes()
        yield Home(path, running, ended)
        whole = path / "sessions" / "s1" / "tasks.jsonl"
        if whole.is_dir():
            whole.rmdir()
        whole.unlink(missing_ok=True)
        whole.write_bytes(journal)
        whole.chmod(0o600)
        for task_id in running:
            supervisor.stop(task_id, grace_s=0)
            supervisor.wait(task_id, 20)


@pytest.mark.parametrize("spoil", [cut, a_pipe, a_directory, a_link])
def test_a_journal_hides_no_other_sessions_commands(home: Home, spoil: Callable[[Path], None]) -> None:
    """`ps` prints those of all other sessions, and names the journal once; exit code 6."""
    spoil(home.journal)
    for options, wanted in ((("-a",), {home.running[1], home.ended[1]}), ((), {home.running[1]})):
        said = Cli(home.path).inside("ps", *options, code=6)
        assert {line.split("\t")[0] for line in said.out.splitlines()} == wanted
        assert said.err.count("session s1 is not listed whole") == 1
        assert str(home.journal) in said.err


def test_the_panel_shows_all_other_commands(home: Home) -> None:
    """A server that starts on such a home."""
    cut(home.journal)
    with (
        GitJobStore(home.path, durability="relaxed") as store,
        JobRunner(store, 1, lambda request, cancel_event: TurnResult()) as runner,
        serving(runner) as (client, app),
    ):
        assert app.feed.until_loaded(20)
        shown = {row["id"] for row in client.get("/api/jobs?kind=process&limit=200")["tasks"]}
        assert shown == {home.running[1], home.ended[1]}


@pytest.mark.parametrize("spoil", [a_pipe, a_directory, a_link])
def test_something_else_in_an_indexs_place_is_no_empty_index(home: Home, spoil: Callable[[Path], None]) -> None:
    """Lists and what looks for an id name it, exit code 6; what the other index has by its whole id is there."""
    cli = Cli(home.path)
    job_id = cli.inside("--json", "agent", "--agent", "echo", "--session", "s2", "hello").json["job_id"]
    for name, listing, hidden, other in (
        ("tasks", ["ps", "-a"], home.ended[1], job_id),
        ("jobs", ["list"], job_id, home.ended[1]),
    ):
        index = home.path / "index" / f"{name}.jsonl"
        whole = index.read_bytes()
        spoil(index)
        for command in (listing, ["show", hidden], ["show", other[:8]]):
            assert str(index) in cli.inside(*command, code=6).err
        assert other in cli.inside("show", other).out
        cli.inside("stop", other)
        if index.is_dir():
            index.rmdir()
        index.unlink(missing_ok=True)
        index.write_bytes(whole)
        assert hidden in cli.inside(*listing).out


@pytest.mark.parametrize("spoil", [a_pipe, a_directory, a_link])
def test_logs_of_a_whole_id_are_found_where_the_other_index_is_damaged(
    home: Home, spoil: Callable[[Path], None]
) -> None:
    """The damage is named beside the log; what only begins so may be in the other index, so that is refused."""
    cli = Cli(home.path)
    shell = ("--json", "agent", "--agent", "shell", "--session", "s2", "echo from a job")
    job = cli.inside(*shell).json
    task_id = cli.inside("--json", "run", "--session", "s2", "--", "echo", "from a command").json["task_id"]
    for name, hidden, others, said in (
        ("tasks", task_id, (job["job_id"], job["run_id"]), "from a job\n"),
        ("jobs", job["job_id"], (task_id,), "from a command\n"),
    ):
        index = home.path / "index" / f"{name}.jsonl"
        whole = index.read_bytes()
        spoil(index)
        for other in others:
            shown = cli.inside("logs", other)
            assert shown.out == said
            assert shown.err.count(str(index)) == 1
            assert str(index) in cli.inside("logs", other[:8], code=6).err
        assert str(index) in cli.inside("logs", hidden, code=6).err
        if index.is_dir():
            index.rmdir()
        index.unlink(missing_ok=True)
        index.write_bytes(whole)
        assert cli.inside("logs", others[0]).err == ""


@pytest.mark.parametrize("spoil", [a_pipe, a_directory, a_link])
def test_a_whole_id_is_found_by_the_panel_and_by_a_model(
    home: Home, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """What the other index has is shown and read, and the damage is in the log; a part of an id is refused."""
    cli = Cli(home.path)
    job_id = cli.run("--json", "agent", "--agent", "shell", "--session", "s2", "echo from a job").json["job_id"]
    task_id = cli.run("--json", "run", "--session", "s2", "--", "echo", "from a command").json["task_id"]
    with (
        GitJobStore(home.path, durability="relaxed") as store,
        JobRunner(store, 1, lambda request, cancel_event: TurnResult()) as runner,
        ProcessSupervisor(store) as supervisor,
        serving(runner) as (client, _),
    ):
        tools = AgentTools(runner, "s2", processes=supervisor)
        for name, hidden, other, said in (
            ("tasks", task_id, job_id, "from a job"),
            ("jobs", job_id, task_id, "from a command"),
        ):
            index = home.path / "index" / f"{name}.jsonl"
            whole = index.read_bytes()
            spoil(index)
            caplog.clear()
            assert client.request("GET", f"/api/log/{other}")[2].decode() == said + "\n"
            answer = tools.call("job_output", {"job_id": other})
            assert said in answer
            assert not answer.is_error
            assert caplog.text.count(str(index)) >= 2
            for wanted in (hidden, other[:8]):
                assert client.request("GET", f"/api/log/{wanted}")[0] != 200
                assert tools.call("job_output", {"job_id": wanted}).is_error
            if index.is_dir():
                index.rmdir()
            index.unlink(missing_ok=True)
            index.write_bytes(whole)


def test_a_journal_that_is_a_link_to_nothing_is_found(home: Home) -> None:
    """By `fsck` and `recover`: it is not taken for a session without background commands."""
    a_link(home.journal)
    cli = Cli(home.path)
    assert str(home.journal) in cli.inside("fsck", "s1", code=6).out
    assert str(home.journal) in cli.inside("recover", code=6).err
    assert home.journal.is_symlink()


def a_command_of_the_dead(home: Path, session_id: str) -> str:
    """One that has ended under its keeper, and whose worker has left before that."""
    with GitJobStore(home, durability="relaxed") as store:
        go = home / "sessions" / session_id / "work" / "go"
        with ProcessSupervisor(store) as supervisor:
            task = supervisor.start(session_id, "while [ ! -e go ]; do sleep 0.02; done; exit 3")
        go.touch()
        run_dir = supervisor.client.run_dir(task)
        eventually(lambda: not rundir.keeper_lives(run_dir), 20)
        go.unlink()
    return task.task_id


@pytest.mark.parametrize("spoil", [a_pipe, a_directory, a_link])
def test_a_journals_lock_that_is_no_file_is_told_of_at_once(home: Home, spoil: Callable[[Path], None]) -> None:
    """`recover` waits for nothing there, names it with what to do, and recovers all other sessions; exit code 6."""
    left = {session_id: a_command_of_the_dead(home.path, session_id) for session_id in ("s1", "s2")}
    lock = home.journal.with_name(".tasks.jsonl.lock")
    lock.touch()
    spoil(lock)
    cli = Cli(home.path)
    try:
        before = time.monotonic()
        recovered = cli.inside("recover", code=6)
        assert time.monotonic() - before < 10
        assert recovered.err.count(str(lock)) == 1
        assert "move" in recovered.err
        assert [line.split("\t")[:2] for line in recovered.out.splitlines()] == [[left["s2"], "failed"]]
        with (
            GitJobStore(home.path, durability="relaxed") as store,
            ProcessSupervisor(store) as supervisor,
            pytest.raises(FileRefused, match="move") as refused,
        ):
            supervisor.wait(left["s1"], 20)
        assert refused.value.path == str(lock)
        assert str(lock) in cli.inside("fsck", "s1", code=6).out
    finally:
        lock.rmdir() if lock.is_dir() and not lock.is_symlink() else lock.unlink()
    assert left["s1"] in cli.inside("recover").out


def test_a_lease_that_cannot_be_looked_at_leaves_its_jobs_and_hides_no_other(home: Home) -> None:
    """Its owner may live, so its job stays as it is; all are listed, and those of the dead are recovered (R5)."""
    with GitJobStore(home.path, durability="relaxed") as store:
        jobs = {}
        for session_id in ("s1", "s2"):
            lease = store.leases.acquire(f"runner-{session_id}")
            store.active.mark(f"runner-{session_id}", session_id)
            lease.release()
            job = store.create(job_for(store, session_id), Queued(runner_id=f"runner-{session_id}"), fresh_id=True)
            jobs[session_id] = store.apply(job.job_id, Started(run_id="run")).job_id
    broken = home.path / "leases" / "runner-s1"
    a_link(broken)
    cli = Cli(home.path)
    recovered = cli.inside("recover")
    assert [line.split("\t")[0] for line in recovered.out.splitlines()] == [jobs["s2"]]
    assert recovered.err.count(str(broken)) == 1
    listed = {line.split("\t")[0]: line.split("\t")[1] for line in cli.inside("list").out.splitlines()}
    assert listed == {jobs["s1"]: "running", jobs["s2"]: "errored"}
    assert broken.is_symlink()
    broken.unlink()
    assert jobs["s1"] in cli.inside("recover").out


PIPES = {
    ".git/openjobs/commits": (["history", "JOB"], ["agent", "--agent", "echo", "--session", "s1", "hello"]),
    ".git/openjobs/nodes.catalog": (["agent", "--agent", "echo", "--session", "s1", "hello"],),
    "a pack's index": (["gc", "s1"],),
    "config.toml": (["agent", "--agent", "mine", "hello"], ["list"]),
}


@pytest.mark.parametrize("where", PIPES)
def test_no_pipe_is_waited_for(tmp_path: Path, where: str) -> None:
    """In the place of any file that is read: what cannot go on without it is refused, all else goes on."""
    home = tmp_path / "home"
    filled = fill(home, many=34, session_id="s1")
    repo = home / "sessions" / "s1" / "repo"
    place = home / where if where == "config.toml" else repo / where
    if where == "a pack's index":
        place = min((repo / ".git" / "objects" / "pack").glob("*.idx"), key=lambda path: path.stat().st_mtime)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    for command in PIPES[where]:
        ended = Cli(home).run(*(filled.jobs["completed"] if one == "JOB" else one for one in command), code=None)
        assert ended.code in (0, 1, 2, 6), ended.err
        assert "Traceback" not in ended.err


@pytest.mark.parametrize("spoil", [a_pipe, a_link])
def test_a_session_whose_repository_is_something_else_is_not_left_out_unsaid(
    home: Home, spoil: Callable[[Path], None]
) -> None:
    """It is listed among the sessions with what is wrong, and named by whatever looks at all of them."""
    cli = Cli(home.path)
    job_id = cli.inside("--json", "agent", "--agent", "echo", "--session", "s2", "hello").json["job_id"]
    cli.inside("agent", "--agent", "echo", "--session", "s1", "hello")
    repo = home.path / "sessions" / "s1" / "repo"
    repo.rename(home.path / "kept")
    repo.touch()
    spoil(repo)
    try:
        sessions = {one["session_id"]: one["error"] for one in cli.inside("--json", "sessions").json["sessions"]}
        assert sessions.keys() == {"s1", "s2"}
        assert str(repo) in sessions["s1"]
        listed = cli.inside("list", code=6)
        assert [line.split("\t")[0] for line in listed.out.splitlines()] == [job_id]
        assert str(repo) in listed.err
        assert str(repo) in cli.inside("fsck", code=6).out
        assert str(repo) in cli.inside("recover", code=6).err
    finally:
        repo.unlink()
        (home.path / "kept").rename(repo)


@pytest.mark.parametrize("spoil", [a_pipe, a_link, lambda path: None])
def test_a_session_that_is_no_directory_is_not_left_out_unsaid(home: Home, spoil: Callable[[Path], None]) -> None:
    """A pipe, a link to nothing or a file in its place: whatever looks at all sessions names it and shows all others,
    nothing waits for it, and it stays as it is."""
    cli = Cli(home.path)
    job_id = cli.inside("--json", "agent", "--agent", "echo", "--session", "s2", "hello").json["job_id"]
    cli.inside("agent", "--agent", "echo", "--session", "s1", "hello")
    session = home.path / "sessions" / "s1"
    session.rename(home.path / "kept")
    session.touch()
    spoil(session)
    place = session.lstat()
    try:
        for listing, wanted in (
            (["list"], {job_id}),
            (["list", "--status", "unfinished"], set()),
            (["ps"], {home.running[1]}),
            (["ps", "-a"], {home.running[1], home.ended[1]}),
        ):
            said = cli.inside(*listing, code=6)
            assert {line.split("\t")[0] for line in said.out.splitlines()} == wanted
            (told,) = [line for line in said.err.splitlines() if "is not listed whole" in line]
            assert str(session) in told
        sessions = {one["session_id"]: one["error"] for one in cli.inside("--json", "sessions").json["sessions"]}
        assert sessions.keys() == {"s1", "s2"}
        assert str(session) in sessions["s1"]
        report = {one["session_id"]: one["findings"] for one in cli.json_inside("fsck", code=6)["sessions"]}
        assert report["s2"] == []
        assert [str(session) in one["what"] for one in report["s1"]] == [True]
        for command in (["recover"], ["events"], ["gc"], ["ps", "--session", "s1"], ["list", "--session", "s1"]):
            assert str(session) in cli.inside(*command, code=6).err
        for command in (["agent", "--agent", "echo", "hello"], ["run", "true"], ["logs", home.ended[0]]):
            options = () if command[0] == "logs" else ("--session", "s1")
            refused = cli.inside(command[0], *options, *command[1:], code=6)
            assert str(session) in refused.err
        assert (session.lstat().st_mode, session.lstat().st_ino) == (place.st_mode, place.st_ino)
    finally:
        session.unlink()
        (home.path / "kept").rename(session)


def test_what_stands_among_the_sessions_and_never_was_one_is_named(home: Home) -> None:
    """No index knows of it; nobody can tell whether it hides anything."""
    cli = Cli(home.path)
    os.mkfifo(home.path / "sessions" / "s3")
    for listing in (["list"], ["ps"], ["ps", "-a"], ["recover"]):
        assert "sessions/s3" in cli.inside(*listing, code=6).err
    assert "sessions/s3" in cli.inside("fsck", code=6).out
    with GitJobStore(home.path, durability="relaxed") as store, pytest.raises(SessionExists):
        store.create_session("S3")


def test_facts_of_other_sessions_are_shown(home: Home) -> None:
    """Where a session's directory has become something else."""
    session = home.path / "sessions" / "s1"
    session.rename(home.path / "kept")
    session.touch()
    try:
        said = Cli(home.path).inside("events", code=6)
        assert {line.split("\t")[2] for line in said.out.splitlines()} == {home.running[1], home.ended[1]}
        assert "s1" in said.err
    finally:
        session.unlink()
        (home.path / "kept").rename(session)


def test_the_list_of_an_agents_tools_shows_all_that_can_be_read(tmp_path: Path) -> None:
    """And names what cannot be: it is an error with everything else in its text, whatever file is damaged."""
    path = tmp_path / "home"
    filled = fill(path, many=34, session_id="s1")
    session = path / "sessions" / "s1"

    def listed() -> ToolText:
        with (
            GitJobStore(path, durability="relaxed") as store,
            JobRunner(store, 1, lambda request, cancel_event: TurnResult()) as runner,
            ProcessSupervisor(store) as supervisor,
        ):
            return AgentTools(runner, "s1", processes=supervisor).call("list_jobs", {})

    journal = (session / "tasks.jsonl").read_bytes()
    cut(session / "tasks.jsonl")
    said = listed()
    assert said.is_error
    assert "tasks.jsonl" in said
    assert filled.jobs["command"][:8] in said
    (session / "tasks.jsonl").write_bytes(journal)
    page = session / "repo" / "jobs" / "00" / "0000.json"
    page.write_bytes(page.read_bytes()[:1000])
    git("-c", "user.name=me", "-c", "user.email=me@localhost", "commit", "-qam", "by hand", cwd=session / "repo")
    said = listed()
    assert said.is_error
    assert "jobs/00/0000.json" in said
    assert filled.jobs["command"][:8] in said
    assert filled.tasks["failed"][:8] in said


@pytest.mark.parametrize("status", [None, JobStatus.QUEUED])
def test_damage_in_another_session_hides_nothing_that_was_asked_for(
    tmp_path: Path, status: JobStatus | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A session sees its own jobs, and those it asked for elsewhere as far as they can be read."""
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        for session_id in ("caller", "other"):
            store.create_session(session_id)
        asked = [
            store.create(job_for(store, "other", caller_session_id="caller"), Queued()).job_id
            for _ in range(PAGE_ROWS + 2)
        ]
        own = store.create(job_for(store, "caller"), Queued()).job_id
        page = store.documents("other").older_page(0)
        lost = set(page.lines)
        repo = tmp_path / "home" / "sessions" / "other" / "repo"
        (repo / page.path).write_bytes(page.data[:1000])
        git("-c", "user.name=me", "-c", "user.email=me@localhost", "commit", "-qam", "by hand", cwd=repo)
        seen = {job.job_id for job in store.visible("caller", status, limit=None)}
        assert seen == {own, *asked} - lost
        assert len(lost) == PAGE_ROWS
        assert sum(page.path in record.getMessage() for record in caplog.records) == 1
