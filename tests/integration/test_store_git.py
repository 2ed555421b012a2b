"""The git store among other programs: foreign commits, damage, hand edits, many processes (R2, R3, R4, R10, R11)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openjobs import errors
from openjobs.jobs import Errored, Job, JobStatus, Queued, Started
from openjobs.session.pages import PAGE_ROWS
from openjobs.store import GitJobStore
from tests.support import eventually, git
from tests.support.chaos import Chaos
from tests.support.jobs import clean, end_of, job_for, walk_to_the_end

ME = ("-c", "user.name=me", "-c", "user.email=me@localhost")
ORDER = [JobStatus.PENDING, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.COMPLETED]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[GitJobStore]:
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("s1")
        store.session("s1").append("user", "hello")
        yield store


def repo_of(home: Path, session_id: str = "s1") -> Path:
    return home / "sessions" / session_id / "repo"


def commit_file(home: Path, name: str, data: bytes, message: str = "by hand") -> None:
    repo = repo_of(home)
    (repo / name).write_bytes(data)
    git("add", name, cwd=repo)
    git(*ME, "commit", "-q", "-m", message, cwd=repo)


def queued(store: GitJobStore, prompt: str = "do it") -> Job:
    return store.create(job_for(store, "s1", prompt), Queued(runner_id="r1"))


def test_git_tells_the_whole_life_of_a_job(store: GitJobStore, home: Path) -> None:
    """`git log`, `git show` and `git status` agree with the store; each transition changes one line of jobs.json."""
    job = walk_to_the_end(store, job_for(store, "s1", "probe the parser"))
    repo = repo_of(home)
    subjects = git("log", "--reverse", "--format=%s", cwd=repo).splitlines()
    short = job.job_id[:8]
    assert subjects[-4:] == [
        f"job {short} pending: probe the parser",
        f"job {short} pending → queued: probe the parser",
        f"job {short} queued → running: probe the parser",
        f"job {short} running → completed: probe the parser",
    ]
    trailers = git("log", "-1", "--format=%(trailers:only,unfold)", cwd=repo).split("\n")
    assert f"Openjobs-Job: {job.job_id}" in trailers
    assert "Openjobs-Status: completed" in trailers
    assert git("diff", "--numstat", "HEAD~1", "HEAD", "--", "jobs.json", cwd=repo).split() == ["1", "1", "jobs.json"]
    row = json.loads(git("show", "HEAD:jobs.json", cwd=repo))[job.job_id]
    assert row["status"] == "completed"
    assert git("status", "--porcelain", cwd=repo) == ""
    git("fsck", "--strict", cwd=repo)


def test_a_row_has_the_fields_of_the_specification(store: GitJobStore, home: Path) -> None:
    """All fields of D1 stand in every row, whatever its state."""
    job = queued(store)
    row = json.loads((repo_of(home) / "jobs.json").read_bytes())[job.job_id]
    assert {
        "job_id", "subject", "description", "agent_id", "status", "created_at", "queued_at", "started_at",
        "completed_at", "parent_session_id", "parent_job_id", "parent_msg_id", "context_mode", "head_id",
        "result_text", "error", "cancel_requested_at", "attempt",
    } <= row.keys()  # fmt: skip
    assert row["created_at"].endswith("Z")
    assert "env" not in row


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"", errors.Damaged, "jobs.json"),
        (b"{\n", errors.Damaged, "jobs.json: not JSON"),
        (b"[]\n", errors.Damaged, "expected a JSON object"),
        (b"\xff\xfe{}", errors.Damaged, "not JSON"),
        (b'{"a":{"job_id":"a"},"a":{"job_id":"a"}}\n', errors.Damaged, "stands twice"),
        (b'{"a":1}\n', errors.Damaged, "not an object"),
    ],
    ids=["empty", "cut", "list", "binary", "twice", "no row"],
)
def test_a_jobs_file_that_cannot_be_read_is_refused_and_kept(
    store: GitJobStore, home: Path, data: bytes, error: type[Exception], match: str
) -> None:
    """Damage is never read as empty: reading and writing say what is wrong, and nothing is overwritten."""
    queued(store)
    commit_file(home, "jobs.json", data)
    head = store.head("s1")
    with pytest.raises(error, match=match):
        store.list("s1")
    with pytest.raises(error, match=match):
        queued(store, "another")
    assert store.head("s1") == head
    assert (repo_of(home) / "jobs.json").read_bytes() == data
    assert not store.fsck("s1").clean
    git("revert", "--no-edit", "HEAD", cwd=repo_of(home), env={"GIT_AUTHOR_NAME": "me", "GIT_AUTHOR_EMAIL": "me@x",
        "GIT_COMMITTER_NAME": "me", "GIT_COMMITTER_EMAIL": "me@x"})  # fmt: skip
    assert len(store.list("s1")) == 1


def test_an_unknown_status_is_refused_with_its_text_and_other_jobs_go_on(store: GitJobStore, home: Path) -> None:
    """A newer version's state: named in the error; its row is kept byte for byte while others change."""
    one, two = queued(store, "one"), queued(store, "two")
    rows = json.loads((repo_of(home) / "jobs.json").read_bytes())
    rows[one.job_id]["status"] = "paused"
    commit_file(home, "jobs.json", json.dumps(rows, indent=1).encode())
    with pytest.raises(errors.UnknownStatus, match="'paused'") as refused:
        store.get(one.job_id)
    assert refused.value.status == "paused"
    with pytest.raises(errors.UnknownStatus):
        store.apply(one.job_id, Started())
    assert store.apply(two.job_id, Started()).status is JobStatus.RUNNING
    assert json.loads((repo_of(home) / "jobs.json").read_bytes())[one.job_id] == rows[one.job_id]


def test_fields_of_a_newer_version_are_kept(store: GitJobStore, home: Path) -> None:
    """An unknown field survives every later change of its row."""
    job = queued(store)
    rows = json.loads((repo_of(home) / "jobs.json").read_bytes())
    rows[job.job_id]["priority"] = {"level": 7}
    commit_file(home, "jobs.json", json.dumps(rows).encode())
    store.apply(job.job_id, Started(), end_of(job))
    row = json.loads((repo_of(home) / "jobs.json").read_bytes())[job.job_id]
    assert row["priority"] == {"level": 7}
    assert row["status"] == "completed"


def test_a_newer_format_is_refused(store: GitJobStore, home: Path) -> None:
    """A session of a later format is not touched."""
    meta = json.loads((repo_of(home) / "meta.json").read_bytes())
    commit_file(home, "meta.json", json.dumps({**meta, "format": 2}).encode())
    with pytest.raises(errors.NewerFormat, match="format 2"):
        queued(store)


def fill(store: GitJobStore, pages: int) -> None:
    """As many jobs as close that many pages."""
    while store.documents("s1").older_pages() < pages:
        store.create(job_for(store, "s1"), Queued(runner_id="r1"), fresh_id=True)


@pytest.mark.parametrize("knows", ["a process that goes on", "a new one", "one without the catalog"])
def test_a_damaged_page_hurts_its_own_jobs_only(home: Path, knows: str) -> None:
    """Jobs of all other pages are read and changed, new ones come and pages close; those of the damaged one, and who
    asks for a job that may be there, hear where it is. Once it is put back nothing is missing."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(GitJobStore(home, durability="relaxed"))
        store.create_session("s1")
        fill(store, 4)
        jobs = list(store.documents("s1").jobs_newest_first())
        path = "jobs/00/0001.json"
        data = (repo_of(home) / path).read_bytes()
        hurt = {job.job_id for job in jobs if f'"{job.job_id}":'.encode() in data}
        assert len(hurt) == PAGE_ROWS
        if knows != "a process that goes on":
            store.close()
            if knows == "one without the catalog":
                (repo_of(home) / ".git" / "openjobs" / "jobs.catalog").unlink()
            store = stack.enter_context(GitJobStore(home, durability="relaxed"))
        commit_file(home, path, data[: len(data) // 2])
        for job in jobs:
            if job.job_id in hurt:
                with pytest.raises(errors.Damaged, match=re.escape(path)):
                    store.get(job.job_id)
            else:
                assert store.get(job.job_id) == job
        assert store.apply(jobs[0].job_id, Started()).status is JobStatus.RUNNING
        fill(store, 6)
        with pytest.raises(errors.Damaged, match=re.escape(path)):
            store.create(job_for(store, "s1", job_id=store.new_id()))
        found = iter(store.documents("s1").jobs_newest_first(frozenset({JobStatus.QUEUED})))
        with pytest.raises(errors.Damaged, match=re.escape(path)):
            list(found)
        assert any(path in str(f) for f in store.fsck("s1").findings)
        commit_file(home, path, data)
        assert [store.get(job.job_id).job_id for job in jobs] == [job.job_id for job in jobs]
        assert store.fsck("s1").clean


def test_what_was_before_the_damage_is_found_after_it(store: GitJobStore, home: Path) -> None:
    """A look at what came later, where a page is damaged, hides nothing from who is still at the version before it,
    and once the session is put back to that version, it is as if nothing had been."""
    fill(store, 3)
    before = store.documents("s1")
    assert len(list(before.jobs_newest_first(frozenset({JobStatus.QUEUED})))) == 3 * PAGE_ROWS + 1
    commit_id = before.commit_id
    for job_id in before.older_page(1).lines:
        store.apply(job_id, Started(), Errored(event_id=store.new_id(), error="no"))
    data = (repo_of(home) / "jobs/00/0000.json").read_bytes()
    commit_file(home, "jobs/00/0000.json", data[: len(data) // 2])
    damaged: list[errors.Damaged] = []
    assert len(store.unfinished("s1", damaged.append)) == PAGE_ROWS + 1
    assert len(damaged) == 1
    assert len(list(before.jobs_newest_first(frozenset({JobStatus.QUEUED})))) == 3 * PAGE_ROWS + 1
    assert before.commit_id == commit_id
    commit_file(home, "jobs/00/0000.json", data)
    assert len(store.unfinished("s1")) == 2 * PAGE_ROWS + 1


def test_a_call_is_made_where_the_page_closed_last_is_damaged(store: GitJobStore, home: Path) -> None:
    """No job of that call can be in it: the index knows of none."""
    fill(store, 2)
    path = "jobs/00/0001.json"
    data = (repo_of(home) / path).read_bytes()
    commit_file(home, path, data[: len(data) // 2])
    job = store.create(job_for(store, "s1", origin_tool_call_id="k1"), Queued(runner_id="r1"), fresh_id=True)
    assert store.get(job.job_id).status is JobStatus.QUEUED
    with pytest.raises(errors.JobExists, match=job.job_id):
        store.create(job_for(store, "s1", origin_tool_call_id="k1"), Queued(runner_id="r1"), fresh_id=True)


@pytest.mark.parametrize("knows", ["a process that goes on", "one without the catalog"])
def test_a_damaged_segment_hurts_no_newer_message(home: Path, knows: str) -> None:
    """Newer messages are read, and new ones come; what may have a newer version in the damaged one says where it is."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(GitJobStore(home, durability="relaxed"))
        store.create_session("s1")
        ids = [store.session("s1").append("user", f"{number} " + "word " * 1000).id for number in range(60)]
        path = "history/00/0001.jsonl"
        data = (repo_of(home) / path).read_bytes()
        inside = [number for number, node_id in enumerate(ids) if f'{{"id":"{node_id}"'.encode() in data]
        assert 0 < inside[0] < inside[-1] < 40
        if knows != "a process that goes on":
            store.close()
            (repo_of(home) / ".git" / "openjobs" / "nodes.catalog").unlink()
            store = stack.enter_context(GitJobStore(home, durability="relaxed"))
        commit_file(home, path, data[:-20])
        for number, node_id in enumerate(ids):
            if number <= inside[-1]:
                with pytest.raises(errors.Damaged, match=re.escape(path)):
                    store.documents("s1").node(node_id)
            else:
                assert store.documents("s1").node(node_id).content.startswith(f"{number} ")
        for _ in range(30):
            store.session("s1").append("user", "word " * 1000)
        commit_file(home, path, data)
        assert [store.documents("s1").node(node_id).id for node_id in ids] == ids


def test_a_damaged_segment_is_named(store: GitJobStore, home: Path) -> None:
    """A message that cannot be read is damage with file and offset."""
    node = store.session("s1").append("user", "hello")
    segment = repo_of(home) / "history/00/0000.jsonl"
    data = segment.read_bytes()
    commit_file(home, "history/00/0000.jsonl", data + b'{"id":"x","parent":')
    with pytest.raises(errors.Damaged) as damage:
        store.session("s1").node(node.id)
    assert damage.value.path == "history/00/0000.jsonl"
    assert damage.value.offset == len(data)


def test_jobs_go_on_where_the_open_segment_is_damaged(store: GitJobStore, home: Path) -> None:
    """What comes now stands in the next one; the damaged one is left as it is, and named."""
    first, path = queued(store), "history/00/0000.jsonl"
    data = (repo_of(home) / path).read_bytes()
    commit_file(home, path, data[:-20])
    second = queued(store, "another")
    for job in (first, second):
        assert store.apply(job.job_id, Started(), end_of(job)).status is JobStatus.COMPLETED
        assert store.get(job.job_id).result_text == end_of(job).result_text
    assert (repo_of(home) / path).read_bytes() == data[:-20]
    assert any(path in str(finding) for finding in store.fsck("s1").findings)
    commit_file(home, path, data)
    branch = store.session("s1").branch(store.get(first.job_id).head_id)
    assert [node.content for node in branch][-2:] == ["do it", end_of(first).result_text]
    assert store.fsck("s1").clean


def test_a_foreign_revert_of_a_row_is_undone_by_the_next_write(store: GitJobStore, home: Path) -> None:
    """Somebody checks out an older jobs.json and commits it: rows that went back are written again."""
    job = queued(store)
    old = (repo_of(home) / "jobs.json").read_bytes()
    store.apply(job.job_id, Started())
    commit_file(home, "jobs.json", old, "an older file")
    store.session("s1").append("user", "anything that is written")
    assert store.get(job.job_id).status is JobStatus.RUNNING
    assert store.apply(job.job_id, end_of(job)).status is JobStatus.COMPLETED
    commit_file(home, "jobs.json", old, "and once more")
    store.heal("s1")
    assert store.get(job.job_id).status is JobStatus.COMPLETED
    clean(store)


def test_a_finished_job_is_never_revived_by_a_foreign_commit(home: Path) -> None:
    """Whoever writes next, a fresh process that would recover it too, finds the end in the history (R4, R5)."""
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("s1")
        job = walk_to_the_end(store, job_for(store, "s1", "done long ago"))
    git("checkout", "HEAD~2", "--", "jobs.json", cwd=repo_of(home))
    git(*ME, "commit", "-q", "-m", "an older file", cwd=repo_of(home))
    with GitJobStore(home, durability="relaxed") as store:
        assert [j.job_id for j in store.unfinished("s1")] == [job.job_id]
        with pytest.raises(errors.InvalidTransition, match="completed"):
            store.apply(job.job_id, Errored(event_id="e", error="worker died before completion"))
        assert store.get(job.job_id) == job
        clean(store)


def test_a_file_edited_by_hand_is_kept_aside(store: GitJobStore, home: Path) -> None:
    """git is the truth; what was typed into the work tree stays beside it and is not believed."""
    job = queued(store)
    (repo_of(home) / "jobs.json").write_text("what I typed")
    assert store.get(job.job_id).status is JobStatus.QUEUED
    store.apply(job.job_id, Started(), end_of(job))
    kept = [p for p in repo_of(home).iterdir() if p.is_file() and p.read_bytes() == b"what I typed"]
    assert len(kept) == 1
    clean(store)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda repo: git("checkout", "-q", "--detach", cwd=repo),
        lambda repo: git("config", "core.bare", "true", cwd=repo),
        lambda repo: (repo / ".git" / "shallow").write_text("0" * 40 + "\n"),
        lambda repo: (
            (repo / ".git" / "objects" / "info").mkdir(exist_ok=True)
            or (repo / ".git" / "objects" / "info" / "alternates").write_text("/elsewhere\n")
        ),
    ],
    ids=["detached", "bare", "shallow", "alternates"],
)
def test_a_repository_that_is_not_ours_to_write_is_refused(home: Path, spoil: object) -> None:
    """The reason is named, and nothing is changed."""
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("s1")
    spoil(repo_of(home))  # type: ignore[operator]
    with GitJobStore(home, durability="relaxed") as store, pytest.raises(errors.RepositoryRefused):
        queued(store)


def test_a_branch_that_somebody_switched_to_takes_no_jobs(home: Path) -> None:
    """What ends meanwhile is kept until they switch back; what was acknowledged is never on a branch that goes away."""
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("s1")
        job = queued(store)
        git("checkout", "-qb", "aside", cwd=repo_of(home))
        started = store.apply_later(job.job_id, Started(), keep=True)
        ended = store.apply_later(job.job_id, end_of(job), keep=True)
        eventually(lambda: store.unsettled() == 2)
        for refused in (lambda: queued(store), lambda: store.get(job.job_id), lambda: store.session("s1").head_id):
            with pytest.raises(errors.RepositoryRefused, match=re.escape(f"`git -C {repo_of(home)} checkout main`")):
                refused()
        assert not store.fsck("s1").clean
        assert not started.done()
        git("checkout", "-q", "main", cwd=repo_of(home))
        assert ended.result(timeout=30).status is JobStatus.COMPLETED
        git("branch", "-D", "aside", cwd=repo_of(home))
        clean(store)


_CREATOR = """
import sys
from openjobs import errors
from openjobs.store import GitJobStore
with GitJobStore(sys.argv[1], durability="relaxed") as store:
    print("ready", flush=True)
    sys.stdin.read()
    try:
        store.create_session("same")
        print("made")
    except errors.SessionExists:
        print("exists")
"""


def test_thirty_processes_create_the_same_session_and_one_does(home: Path) -> None:
    """One winner, 29 clear refusals, one clean session."""
    root = str(Path(__file__).resolve().parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CREATOR, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        for _ in range(30)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # end of file is the sign to begin
    got = []
    for process in processes:
        assert process.stdout is not None
        got.append(process.stdout.read().decode().strip())
        process.stdout.close()
        assert process.wait(timeout=60) == 0
    assert sorted(got) == ["exists"] * 29 + ["made"]
    with GitJobStore(home, durability="relaxed") as store:
        assert store.sessions() == ["same"]
        clean(store)


_WORKER = """
import sys
from openjobs.store import GitJobStore
sys.path.insert(0, sys.argv[3])
from tests.support.jobs import job_for, walk_to_the_end
with GitJobStore(sys.argv[1], durability="relaxed") as store:
    for number in range(int(sys.argv[2])):
        print(walk_to_the_end(store, job_for(store, "s1", f"job {number}")).job_id, flush=True)
"""


def test_two_processes_and_a_foreign_git_share_a_session(store: GitJobStore, home: Path, chaos: Chaos) -> None:
    """Every acknowledged job of both and every foreign commit is there, in one linear history."""
    jobs = chaos.rounds(25, 300)
    root = str(Path(__file__).resolve().parents[2])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(home), str(jobs), root],
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": root},
        )
        for _ in range(2)
    ]
    stop, notes = threading.Event(), []

    def commit_notes() -> None:
        repo = repo_of(home)
        while not stop.is_set():
            (repo / "notes.txt").write_text(f"{len(notes)}\n")
            for command in (("add", "notes.txt"), (*ME, "commit", "-q", "-m", f"note {len(notes)}")):
                if subprocess.run(["git", *command], cwd=repo, capture_output=True, check=False).returncode:
                    break  # somebody had the lock: git does not retry, and neither does this person
            else:
                notes.append(f"note {len(notes)}")

    foreign = threading.Thread(target=commit_notes)
    foreign.start()
    made = [worker.communicate(timeout=240)[0].split() for worker in workers]
    stop.set()
    foreign.join()
    assert [worker.returncode for worker in workers] == [0, 0]
    assert [len(ids) for ids in made] == [jobs, jobs]
    for job_id in made[0] + made[1]:
        assert [t.status for t in store.history(job_id)] == ORDER
    subjects = git("log", "--format=%s", cwd=repo_of(home)).splitlines()
    assert [s for s in reversed(subjects) if s.startswith("note ")] == notes
    store.heal("s1")
    clean(store)
    git("fsck", "--strict", "--no-dangling", cwd=repo_of(home))


def test_gc_and_repack_beside_us_lose_nothing(store: GitJobStore, home: Path) -> None:
    """A foreign `git gc` and `git repack -a -d` while jobs are committed: each acknowledged state stays."""
    stop = threading.Event()

    def repack() -> None:
        while not stop.is_set():
            for command in (("repack", "-q", "-a", "-d"), ("gc", "-q")):
                subprocess.run(["git", *command], cwd=repo_of(home), capture_output=True, check=False)

    foreign = threading.Thread(target=repack)
    foreign.start()
    try:
        made = [walk_to_the_end(store, job_for(store, "s1", f"job {n}")).job_id for n in range(40)]
    finally:
        stop.set()
        foreign.join()
    for job_id in made:
        assert [t.status for t in store.history(job_id)] == ORDER
    store.gc("s1")
    clean(store)
    git("fsck", "--strict", "--no-dangling", cwd=repo_of(home))


def test_many_sessions_hold_few_files_and_no_threads(home: Path) -> None:
    """40 sessions in use one after another: descriptors and threads stay few (R11)."""
    with GitJobStore(home, durability="relaxed") as store:
        most = 0
        for number in range(40):
            session_id = store.create_session(f"s{number}")
            walk_to_the_end(store, job_for(store, session_id))
            most = max(most, len(os.listdir("/dev/fd")))
        threads = [t.name for t in threading.enumerate() if t.name.startswith("openjobs")]
        assert most < 100
        assert threads == ["openjobs-committer"]
        assert len(store.list(limit=None)) == 40


def test_after_a_fork_the_parents_store_is_refused(store: GitJobStore) -> None:
    """A child that uses the parent's store gets a clear error; the parent goes on."""
    from tests.support.child import forked

    def use() -> str:
        try:
            store.list("s1")
        except errors.ForkedProcess as error:
            return f"refused: {error}"
        return "worked"

    with forked(use) as child:
        assert child.answer().startswith("refused")
    queued(store)


def test_what_is_no_session_is_passed_over(store: GitJobStore, home: Path) -> None:
    """A stray directory or file beside the sessions stops nothing."""
    (home / "sessions" / "foo bar").mkdir()
    (home / "sessions" / "empty").mkdir()
    (home / "sessions" / "file").write_text("x")
    assert store.sessions() == ["s1"]


def test_one_damaged_session_hides_no_other(store: GitJobStore, home: Path) -> None:
    """A list of the whole home raises, or names the session and shows the others; a wrong id is still a wrong id."""
    store.create_session("s2")
    here = walk_to_the_end(store, job_for(store, "s1"))
    walk_to_the_end(store, job_for(store, "s2"))
    (repo_of(home, "s2") / ".git" / "HEAD").write_text("garbage")
    damaged: list[str] = []
    for status in (None, "running"):
        with pytest.raises((errors.Damaged, errors.RepositoryRefused)):
            store.list(status=status)
        store.list(status=status, on_damage=lambda session_id, error: damaged.append(session_id))
    assert damaged == ["s2", "s2"]
    assert [j.job_id for j in store.list(on_damage=lambda session_id, error: None)] == [here.job_id]
    with pytest.raises(errors.UnknownJob, match=here.job_id):
        store.resolve("ffffffff")


def test_history_does_not_depend_on_the_derived_trail(store: GitJobStore, home: Path) -> None:
    """Without the file of commit ids, with a torn one, and with a wrong one the history is the same."""
    jobs = [walk_to_the_end(store, job_for(store, "s1", f"job {n}")) for n in range(5)]
    expected = store.history(jobs[0].job_id)
    assert [t.status for t in expected] == ORDER
    trail = repo_of(home) / ".git" / "openjobs" / "commits"
    data = trail.read_bytes()
    for other in (b"", data[:-7], data[::-1], data[:56]):
        trail.write_bytes(other)
        assert store.history(jobs[0].job_id) == expected
    walk_to_the_end(store, job_for(store, "s1", "after"))
    trail.unlink()
    assert store.history(jobs[0].job_id) == expected


def test_opening_a_home_reads_no_session(home: Path) -> None:
    """Start-up costs nothing for sessions that nobody uses: a damaged idle one is not even noticed."""
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("idle")
        store.create_session("used")
    (repo_of(home, "idle") / ".git" / "HEAD").write_text("garbage")
    with GitJobStore(home, durability="relaxed") as store:
        walk_to_the_end(store, job_for(store, "used"))
        assert [j.parent_session_id for j in store.list()] == ["used"]
        with pytest.raises((errors.Damaged, errors.RepositoryRefused)):
            store.list("idle")
