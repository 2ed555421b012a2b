"""What `fsck` says of each way in which a session can be wrong, in both stores; and that it says nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pytest

from openjobs import errors
from openjobs.jobs import CancelRequested, Job, JobStatus, NoticeStage, Queued, Started
from openjobs.repo import Change, CommitInfo
from openjobs.session import Documents, Node, cards
from openjobs.session.notices import node_of, of_job
from openjobs.session.pages import PAGE_ROWS
from openjobs.store import GitJobStore, JobStore, MockTaskStore
from tests.support import git
from tests.support.jobs import clean, end_of, job_for

Act = Callable[[Documents], None]


@pytest.fixture(params=["memory", "git"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    """With the sessions `s1` and `s2`; what a test spoils is what `fsck` says, so it looks at that itself."""
    made: JobStore = (
        MockTaskStore() if request.param == "memory" else GitJobStore(tmp_path / "home", durability="relaxed")
    )
    with made as store:
        for name in ("s1", "s2"):
            store.create_session(name)
            store.session(name).append("user", "hello")
        yield store


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[GitJobStore]:
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        store.create_session("s1")
        yield store


def said(store: JobStore, session_id: str = "s1") -> list[str]:
    """Each finding without the session's name, and the digits of a commit."""
    report = store.fsck(session_id)
    assert report.clean == (report.findings == [])
    lines = [str(finding) for finding in report.findings]
    assert all(line.startswith(f"{session_id}: ") for line in lines)
    return [line.removeprefix(f"{session_id}: ") for line in lines]


def counted(store: JobStore, session_id: str = "s1") -> Mapping[str, int]:
    return store.fsck(session_id).counts


def forge(
    store: JobStore,
    act: Act = lambda documents: None,
    *,
    files: Mapping[str, bytes | None] | None = None,
    trailers: Sequence[tuple[str, str]] = (),
    session_id: str = "s1",
) -> str:
    """A commit beside the store's rules; its id."""

    def decide(documents: Documents) -> Change:
        act(documents)
        return Change(files={**documents.changes, **(files or {})}, subject="forged", trailers=trailers)

    store.write_later(session_id, decide, lambda: None).result()
    return store.head(session_id)


def step(store: JobStore, job_id: str, kind: str, status: str) -> str:
    """A commit that says it is one of that job; where `fsck` finds it."""
    trailers = [("Openjobs-Kind", kind), ("Openjobs-Job", job_id), ("Openjobs-Status", status)]
    return f"commit {forge(store, trailers=trailers)[:12]}"


def queued(store: JobStore, prompt: str = "do it", **fields: object) -> Job:
    return store.create(job_for(store, "s1", prompt, **fields), Queued(runner_id="r1"))


def ended(store: JobStore, prompt: str = "do it", **fields: object) -> Job:
    job = queued(store, prompt, **fields)
    store.apply(job.job_id, Started())
    return store.apply(job.job_id, end_of(job))


def put(*jobs: Job) -> Act:
    def act(documents: Documents) -> None:
        for job in jobs:
            documents.put_job(job)

    return act


def add(*nodes: Node) -> Act:
    return lambda documents: documents.append(list(nodes))


def test_a_session_in_order_has_nothing_to_say(store: JobStore) -> None:
    """Whatever was in it is counted by kind."""
    job = ended(store)
    asked = queued(store, "stop me", notice=NoticeStage.WANTED)
    store.apply(asked.job_id, CancelRequested())
    clean(store)
    counts = counted(store)
    assert {name: counts[name] for name in ("sessions", "jobs", "pages", "cards")} == {
        "sessions": 1,
        "jobs": 2,
        "pages": 1,
        "cards": 2,
    }
    assert counts["commits"] == len(list(store.repository("s1").log()))
    assert counts["messages"] == len(list(store.session("s1").nodes()))
    assert store.get(job.job_id).status is JobStatus.COMPLETED


def test_a_session_that_nobody_has_is_no_finding(store: JobStore) -> None:
    with pytest.raises(errors.UnknownSession):
        store.fsck("nobody")


# --- the commits of a job -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "what"),
    [
        (["queued"], "is the first of its job but says queued"),
        (["pending", "running"], "goes from pending to running"),
        (["pending", "queued", "queued"], "goes from queued to queued"),
        (["pending", "errored", "errored"], "goes from errored to errored"),
        (["pending", "cancelled", "pending"], "goes from cancelled to pending"),
        (["pending", "done"], "has the status 'done'"),
        (["?pending"], "is a cancel request of a job that was not there"),
        (["pending", "?queued"], "is a cancel request of a job that was pending"),
        (["pending", "errored", "?errored"], "is a cancel request of a job that was errored"),
        (["pending", "?pending", "?pending"], "is a second cancel request"),
    ],
    ids=" ".join,
)
def test_an_illegal_step_is_named_with_its_commit(store: JobStore, steps: list[str], what: str) -> None:
    """Each commit of a job walks an edge from the one before it; `?` is a request to stop."""
    job_id = store.new_id()
    for text in steps:
        where = step(store, job_id, "cancel-request" if text.startswith("?") else "transition", text.lstrip("?"))
    assert said(store) == [f"{where}: job {job_id}: {what}", f"job {job_id}: has commits but no row"]


def test_a_status_that_is_missing_is_none_that_there_is(store: JobStore) -> None:
    job_id = store.new_id()
    where = forge(store, trailers=[("Openjobs-Kind", "transition"), ("Openjobs-Job", job_id)])[:12]
    assert f"commit {where}: job {job_id}: has the status None" in said(store)


def test_commits_of_other_kinds_walk_no_edge(store: JobStore) -> None:
    """A card or a page may name a job whenever it likes."""
    job = ended(store)
    for kind in ("card", "notice", "page", "something new"):
        step(store, job.job_id, kind, "pending")
    assert said(store) == []


def test_a_merge_of_somebody_says_nothing_and_one_that_names_a_job_does(on_disk: GitJobStore) -> None:
    """The history of a job is a line; who merges his own branches is free to."""
    queued(on_disk)
    repo = on_disk.session_dir("s1") / "repo"
    parents = ("-p", "HEAD", "-p", "HEAD~1")
    git("update-ref", "HEAD", git("commit-tree", *parents, "-m", "a merge", "HEAD^{tree}", cwd=repo), cwd=repo)
    assert said(on_disk) == []
    text = "a merge\n\nOpenjobs-Kind: restore\nOpenjobs-Job: x\n"
    merge = git("commit-tree", *parents, "-m", text, "HEAD^{tree}", cwd=repo)
    git("update-ref", "HEAD", merge, cwd=repo)
    assert said(on_disk) == [f"commit {merge[:12]}: has 2 parents"]


# --- a history that ends half-way -----------------------------------------------------------------------------


def damaged() -> Exception:
    return errors.Damaged("a commit is damaged", path="abc")


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        (damaged, "abc: a commit is damaged"),
        (lambda: errors.Damaged("something is damaged"), "history: something is damaged"),
        (lambda: errors.NotFound("no commit id"), "history: no commit id"),
        (lambda: OSError(errno.EIO, "Input/output error"), "history: [Errno 5] Input/output error"),
    ],
    ids=["damage", "damage somewhere", "refusal", "disk"],
)
def test_a_history_that_cannot_be_read_to_its_end_is_one_finding(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], finding: str
) -> None:
    """Whatever stops it: no exception, and no row is accused of lacking the commits that could not be read."""
    ended(store)
    repository = store.repository("s1")
    log = repository.log

    def breaks(**options: object) -> Iterator[CommitInfo]:
        whole = log()
        yield next(whole)
        yield next(whole)
        raise error()

    with monkeypatch.context() as patch:
        patch.setattr(repository, "log", breaks)
        assert said(store) == [finding]
        assert counted(store)["commits"] == 2
        assert counted(store)["cards"] == 1
    clean(store)


def spoil_parent(repo: Path) -> str:
    """An older commit whose parent is no commit id, and one on top of it."""
    tree = git("rev-parse", "HEAD^{tree}", cwd=repo)
    raw = f"tree {tree}\nparent somewhere else\nauthor x <x> 0 +0000\ncommitter x <x> 0 +0000\n\nx\n"
    odd = git(*("hash-object", "-t", "commit", "-w", "--stdin", "--literally"), cwd=repo, stdin=raw.encode())
    git("update-ref", "HEAD", git("commit-tree", "-p", odd, "-m", "on top", tree, cwd=repo), cwd=repo)
    return f"{odd}: commit {odd} is damaged: its parent is no commit"


def lose_commit(repo: Path) -> str:
    """A commit on top of one that is nowhere."""
    tree = git("rev-parse", "HEAD^{tree}", cwd=repo)
    parent = git("commit-tree", "-p", "HEAD", "-m", "to be lost", tree, cwd=repo)
    git("update-ref", "HEAD", git("commit-tree", "-p", parent, "-m", "on top", tree, cwd=repo), cwd=repo)
    (repo / ".git" / "objects" / parent[:2] / parent[2:]).unlink()
    return f"{parent}: object {parent} is missing"


@pytest.mark.parametrize("spoil", [spoil_parent, lose_commit])
def test_a_commit_half_way_that_is_damaged_or_missing_is_named(
    on_disk: GitJobStore, spoil: Callable[[Path], str]
) -> None:
    """By the repository's own check and by the walk; the rows, which are all there, are called wrong by neither."""
    ended(on_disk)
    finding = spoil(on_disk.session_dir("s1") / "repo")
    assert said(on_disk) == [f"repository: {finding.partition(': ')[2]}", finding]
    assert len(on_disk.list("s1")) == 1


@pytest.mark.parametrize("part", ["check", "log"])
def test_a_repository_that_refuses_while_fsck_looks_is_a_finding(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """It could be opened, and cannot be any more when a part of the check begins; the other parts go on."""
    ended(store)

    def refuse(**options: object) -> Sequence[str]:
        raise errors.RepositoryRefused("it is gone")

    with monkeypatch.context() as patch:
        patch.setattr(store.repository("s1"), part, refuse)
        assert said(store) == [f"{ {'check': 'repository', 'log': 'history'}[part] }: it is gone"]
        assert counted(store)["cards"] == 1
    clean(store)


def test_a_session_that_goes_on_meanwhile_is_in_order(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs begin and end while their session is looked at: rows are compared with the commits up to that moment."""
    job = queued(store)
    repository = store.repository("s1")
    check = repository.check

    def others_go_on() -> Sequence[str]:
        found = check()
        store.apply(job.job_id, Started())
        store.apply(job.job_id, end_of(job))
        queued(store, "another")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(repository, "check", others_go_on)
        assert said(store) == []
    clean(store)
    assert counted(store)["jobs"] == 2


def test_objects_that_are_gone_are_findings(on_disk: GitJobStore) -> None:
    """The whole directory of them, while the session is open: each part says that it could not look."""
    ended(on_disk)
    pack_dir = on_disk.session_dir("s1") / "repo" / ".git" / "objects" / "pack"
    assert said(on_disk) == []
    shutil.rmtree(pack_dir)
    found = said(on_disk)
    assert found
    assert all("No such file or directory" in line and str(pack_dir) in line for line in found)


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), errors.SessionBusy("held")])
def test_a_session_that_cannot_be_opened_is_a_finding(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """And nothing else is said of it."""

    def closed(session_id: str) -> Documents:
        raise error

    monkeypatch.setattr(store, "documents", closed)
    assert said(store) == [f"repository: {error}"]
    assert counted(store) == {"sessions": 1}


# --- pages and rows -------------------------------------------------------------------------------------------


def test_a_row_that_disagrees_with_its_commits_is_named(store: JobStore) -> None:
    """In status, in how many steps it took, and in whether it was asked to stop."""
    status, revision, asked = queued(store), queued(store), queued(store)
    asked = store.apply(asked.job_id, CancelRequested(reason="enough"))
    forge(
        store,
        put(
            attrs.evolve(status, status=JobStatus.RUNNING),
            attrs.evolve(revision, revision=7),
            attrs.evolve(asked, cancel_requested_at=None),
        ),
    )
    assert said(store) == [
        f"job {status.job_id}: is running in its row and queued in its last commit",
        f"job {revision.job_id}: has revision 7 after 2 commits",
        f"job {asked.job_id}: was asked to stop by a commit that its row does not know",
    ]


def test_a_row_that_nobody_committed_is_named(store: JobStore) -> None:
    """And the home's index does not know it."""
    jobs = [attrs.evolve(job_for(store, "s1"), revision=0) for _ in range(4)]
    forge(store, put(jobs[0]))
    job_id = jobs[0].job_id
    lacks = "index: the home's index lacks"
    assert said(store) == [
        f"job {job_id}: has a row but no commit",
        f"{lacks} 1 job of this session ({job_id}); `openjobs recover` puts them back",
    ]
    forge(store, put(*jobs))
    ids = [job.job_id for job in jobs]
    assert said(store)[-1] == (
        f"{lacks} 4 jobs of this session ({', '.join(ids[:3])}, …); `openjobs recover` puts them back"
    )


def test_a_closed_page_is_full_and_there(store: JobStore) -> None:
    """One with few rows, one that is empty, one that is missing before another; and no job stands twice."""
    job = queued(store)
    data = store.repository("s1").view().read("jobs.json")
    assert data is not None
    forge(store, files={"jobs/00/0000.json": data, "jobs/00/0001.json": b"{}\n", "jobs/00/0003.json": data})
    assert said(store) == [
        f"jobs/00/0000.json: is closed with 1 rows and {len(data)} bytes",
        "jobs/00/0001.json: is missing or empty",
        "jobs/00/0001.json: is closed with 0 rows and 3 bytes",
        "jobs/00/0002.json: is missing or empty",
        "jobs/00/0002.json: is closed with 0 rows and 0 bytes",
        f"jobs/00/0003.json: has job {job.job_id}, which another page has too",
        f"jobs/00/0003.json: is closed with 1 rows and {len(data)} bytes",
        f"jobs.json: has job {job.job_id}, which another page has too",
    ]


def test_a_page_that_was_closed_when_it_was_full_is_in_order(store: JobStore) -> None:
    """As the store itself closes them."""
    for number in range(PAGE_ROWS):
        store.create_later(job_for(store, "s1", f"job {number}"), Queued(runner_id="r1"))
    queued(store, "the last")
    assert said(store) == []
    assert (counted(store)["pages"], counted(store)["jobs"]) == (2, PAGE_ROWS + 1)


def test_a_row_that_cannot_be_read_hides_no_other(store: JobStore) -> None:
    """It is named, and is not called missing; the others are looked at."""
    unreadable, wrong = queued(store), queued(store)
    data = store.repository("s1").view().read("jobs.json")
    assert data is not None
    forge(store, put(attrs.evolve(wrong, revision=7)))
    data = store.repository("s1").view().read("jobs.json")
    assert data is not None
    forge(store, files={"jobs.json": data.replace(b'"status":"queued"', b'"status":"napping"', 1)})
    first, second = said(store)
    assert first.startswith("jobs.json: ")
    assert unreadable.job_id in first
    assert "napping" in first
    assert second == f"job {wrong.job_id}: has revision 7 after 2 commits"


def test_a_page_that_cannot_be_read_makes_no_job_missing(store: JobStore) -> None:
    """Damage is one finding, with its place, and is no reason to say that jobs have no row."""
    queued(store)
    forge(store, files={"jobs.json": b"{\n"})
    [finding] = said(store)
    assert finding.startswith("jobs.json: jobs.json: not JSON at byte 2")


def test_a_job_whose_row_is_gone_is_named(store: JobStore) -> None:
    job = queued(store)
    forge(store, files={"jobs.json": None})
    assert said(store) == [f"job {job.job_id}: has commits but no row"]


# --- messages and cards ---------------------------------------------------------------------------------------


def message(store: JobStore, **fields: object) -> Node:
    base = Node(id=store.new_id(), role="user", content="x", created_at=store.clock.now())
    return attrs.evolve(base, **fields)  # type: ignore[arg-type]


def test_a_message_hangs_on_one_that_is_there(store: JobStore) -> None:
    """And so does the head of the conversation."""
    node = message(store, parent="nowhere")
    forge(store, add(node))
    assert said(store) == [f"message {node.id}: hangs on nowhere, which is not there"]

    def beheaded(documents: Documents) -> None:
        documents.put_meta(attrs.evolve(documents.meta(), head_id="nobody"))

    forge(store, beheaded)
    assert said(store)[-1] == "meta.json: the head is message nobody, which is not there"


def test_messages_that_cannot_be_read_make_no_card_missing(store: JobStore) -> None:
    """Cards and notices are looked for only where all messages are known."""
    ended(store, notice=NoticeStage.WANTED)
    data = store.repository("s1").view().read("history/00/0000.jsonl")
    assert data is not None
    forge(store, files={"history/00/0000.jsonl": data + b"{\n"})
    [finding] = said(store)
    assert finding.startswith("history/00/0000.jsonl: ")
    assert "cards" not in counted(store)


@pytest.mark.parametrize(
    "odd", [{"extra": [1]}, {"extra": "text"}, {"extra": 1}, {"function": ["attach"]}, {"function": {"x": 1}}], ids=str
)
def test_a_message_with_fields_of_another_kind_is_damage(store: JobStore, odd: Mapping[str, object]) -> None:
    """It is named with its place, and ends no reader with an error that nobody expects."""
    data = store.repository("s1").view().read("history/00/0000.jsonl")
    assert data is not None
    line = {"id": "odd", "parent": None, "role": "system", "function": "attach", "content": ""}
    fields = {**line, "created_at": "2026-01-02T03:04:05.000Z", **odd}
    forge(store, files={"history/00/0000.jsonl": data + json.dumps(fields, separators=(",", ":")).encode() + b"\n"})
    [finding] = said(store)
    assert finding.startswith(
        f"history/00/0000.jsonl: history/00/0000.jsonl: the message at byte {len(data)} cannot be read"
    )


def test_the_messages_that_a_row_names_are_there(store: JobStore) -> None:
    """Its prompt, its head, its result, its card."""
    job = ended(store)
    forge(store, put(attrs.evolve(job, user_msg_id="u", head_id="h", result_msg_id="r", attach_id="a")))
    where = f"job {job.job_id}"
    assert said(store) == [
        f"{where}: user_msg_id is message u, which is not there",
        f"{where}: head_id is message h, which is not there",
        f"{where}: result_msg_id is message r, which is not there",
        f"{where}: has no card",
    ]


def test_a_card_says_what_its_row_says(store: JobStore) -> None:
    """Running until the end, and then the end; a row without a card is one of an old store."""
    job, running, plain = ended(store), queued(store), queued(store)
    assert job.attach_id is not None
    assert running.attach_id is not None
    now = store.clock.now()
    forge(
        store,
        add(
            cards.placeholder(job, job.attach_id, now),
            cards.finished(attrs.evolve(job, attach_id=running.attach_id), None, now),
        ),
    )
    forge(store, put(attrs.evolve(plain, attach_id=None)))
    assert said(store) == [
        f"job {job.job_id}: is completed, but its card says running",
        f"job {running.job_id}: is queued, but its card says completed",
    ]


# --- cards in other sessions ----------------------------------------------------------------------------------


def test_a_card_elsewhere_may_be_late_only_while_somebody_sees_to_it(store: JobStore) -> None:
    """Of a job that another session asked for: not there, running, and the end."""
    job = queued(store, caller_session_id="s2")
    assert job.attach_id is not None
    where = f"job {job.job_id}: is queued"
    assert said(store) == [f"{where}, but it has no card in session s2"]
    store.active.mark("r1", "s1")
    assert said(store) == []
    store.mirror_later(job).result()
    store.active.clear("r1", "s1")
    assert said(store) == []
    store.apply(job.job_id, Started())
    job = store.apply(job.job_id, end_of(job))
    assert said(store) == [f"job {job.job_id}: is completed, but its card in session s2 says running"]
    store.active.mark("r1", "s1")
    assert said(store) == []
    store.active.clear("r1", "s1")
    store.mirror_later(job).result()
    clean(store)
    assert counted(store)["cards"] == 1
    assert counted(store, "s2")["cards of other sessions"] == 1


def test_a_card_elsewhere_that_follows_meanwhile_is_in_order(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends, its card follows, and its runner has nothing more to see to, while both sessions are read: at
    whichever moment that is."""
    repository, documents = store.repository("s1"), store.documents
    check = repository.check
    for moment in ("between", "after"):
        store.active.mark("r1", "s1")
        job = queued(store, caller_session_id="s2")
        store.mirror_later(job).result()
        store.apply(job.job_id, Started())

        def to_the_end(job: Job = job) -> None:
            store.mirror_later(store.apply(job.job_id, end_of(job))).result()
            store.active.clear("r1", "s1")

        def between() -> Sequence[str]:
            found = check()
            to_the_end()
            return found

        def after(session_id: str) -> Documents:
            found = documents(session_id)
            if session_id == "s2" and store.active.sessions("r1"):
                found.find_node("whatever")
                to_the_end()
            return found

        with monkeypatch.context() as patch:
            if moment == "between":
                patch.setattr(repository, "check", between)
            else:
                patch.setattr(store, "documents", after)
            assert said(store) == []
        assert store.active.sessions("r1") == []
        clean(store)


def test_a_card_elsewhere_is_never_ahead_of_its_job(store: JobStore) -> None:
    """Not even while somebody sees to the job: neither the job's session nor the card's passes over it."""
    job = queued(store, caller_session_id="s2")
    assert job.attach_id is not None
    store.active.mark("r1", "s1")
    forge(
        store,
        add(cards.finished(attrs.evolve(job, status=JobStatus.ERRORED, error="no"), None, store.clock.now())),
        session_id="s2",
    )
    assert said(store) == [f"job {job.job_id}: is queued, but its card in session s2 says errored"]
    assert said(store, "s2") == [f"message {job.attach_id}: says that job {job.job_id} is errored; it is queued"]


def test_a_card_of_a_job_that_no_session_has_is_named(store: JobStore) -> None:
    """Where the session is there and the job is not."""
    job = attrs.evolve(job_for(store, "s1"), attach_id="card")
    forge(store, add(cards.placeholder(job, "card", store.clock.now())), session_id="s2")
    assert said(store, "s2") == [f"message card: is the card of job {job.job_id}, which session s1 does not have"]


@pytest.mark.parametrize("target", ["gone", "../s1", "", 7, None])
def test_a_card_whose_session_is_out_of_reach_is_counted(store: JobStore, target: object) -> None:
    """It cannot be compared; what is wrong with that session is a finding of its own check. Nothing that a card
    says leads anywhere else."""
    node = message(
        store, function="attach", extra={"attach": {"job_id": "j", "session_id": target, "status": "completed"}}
    )
    other = message(
        store, function="attach", extra={"attach": {"job_id": 1, "session_id": "s1", "status": "completed"}}
    )
    forge(store, add(node, attrs.evolve(node, id="again"), other, message(store, function="attach")), session_id="s2")
    assert said(store, "s2") == []
    assert counted(store, "s2").get("cards out of reach", 0) == (2 if isinstance(target, str) else 0)
    assert "cards of other sessions" not in counted(store, "s2")


def test_a_caller_out_of_reach_is_counted(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each card that should be there, also where the disk refuses; the caller's session is read once."""
    for _ in range(2):
        queued(store, caller_session_id="s2")
    read, documents = [], store.documents

    def refuse(session_id: str) -> Documents:
        read.append(session_id)
        if session_id == "s2":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return documents(session_id)

    monkeypatch.setattr(store, "documents", refuse)
    report = store.fsck("s1")
    assert report.findings == []
    assert report.counts["cards out of reach"] == 2
    assert read == ["s1", "s2"]


# --- notices --------------------------------------------------------------------------------------------------


def test_an_end_is_told_once(store: JobStore) -> None:
    """By whichever message came first."""
    job = ended(store, notice=NoticeStage.WANTED)
    forge(store, put(attrs.evolve(job, notice=NoticeStage.DELIVERED)))
    assert said(store) == [f"job {job.job_id}: its end is said to be told, and no message tells of it"]
    notice = of_job(job)
    nodes = [node_of([notice], name, None, store.clock.now()) for name in ("first", "second")]
    forge(store, add(nodes[0]))
    assert said(store) == []
    forge(store, add(nodes[1]))
    assert said(store) == [f"message second: tells of {notice.event_id}, which message first has told"]
    assert counted(store)["notices"] == 2


def test_a_notice_is_wanted_until_the_end_and_not_after_it(store: JobStore) -> None:
    """A job that has not ended has nothing to tell, and one that has cannot still be waited for."""
    running, done = queued(store, notice=NoticeStage.WANTED), ended(store, notice=NoticeStage.WANTED)
    assert said(store) == []
    forge(
        store,
        put(
            attrs.evolve(running, notice=NoticeStage.RECORDED),
            attrs.evolve(done, notice=NoticeStage.WANTED),
        ),
    )
    assert said(store) == [
        f"job {running.job_id}: is queued, but its notice is recorded",
        f"job {done.job_id}: is completed, but its notice is wanted",
    ]


def test_an_end_that_is_told_in_another_session_needs_no_message_here(store: JobStore) -> None:
    """The conversation that asked for the job is the one that hears of it."""
    job = ended(store, notice=NoticeStage.WANTED, caller_session_id="s2")
    store.mirror_later(job).result()
    forge(store, put(attrs.evolve(job, notice=NoticeStage.DELIVERED)))
    assert said(store) == []
