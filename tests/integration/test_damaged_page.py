"""One row or page of rows that cannot be read (a commit by hand broke it) hides nothing else of its session:
what is in order is read, listed, stopped, recovered and checked, and what is not is named (R3, R10)."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from openjobs import GitJobStore, JobClient, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult, errors
from openjobs.host.actions import Context, perform
from openjobs.jobs import Queued, Started
from openjobs.runner.recovery import Recovery
from openjobs.server.backend import RunnerBackend
from openjobs.server.feed import Feed, Filter
from openjobs.session.pages import NEWEST, PAGE_ROWS
from tests.support import eventually, git
from tests.support.cli import Cli
from tests.support.jobs import job_for
from tests.support.server import serving

DEAD = "dead-runner"
ME = ("-c", "user.name=me", "-c", "user.email=me@localhost")


@attrs.frozen
class Home:
    """Three pages of unfinished jobs of a dead runner in session `s1`, something in it broken; `s2` has one job, which
    they are under."""

    path: Path
    #: where the damage is
    broken: str
    #: what was there, and what is there instead
    whole: bytes
    instead: bytes
    #: all of `s1`, oldest first; which of them are lost, and which are not
    order: list[str]
    lost: list[str]
    readable: list[str]
    parent: str

    def before(self, job_id: str) -> list[str]:
        """The readable ones that are older, newest first."""
        return [each for each in self.order[: self.order.index(job_id)] if each in self.readable][::-1]

    @property
    def file(self) -> Path:
        return self.path / "sessions" / "s1" / "repo" / self.broken

    def spoil(self) -> None:
        self._write(self.file.read_bytes().replace(self.whole, self.instead))

    def mend(self) -> None:
        data = self.file.read_bytes()
        if self.whole not in data and self.instead in data:
            self._write(data.replace(self.instead, self.whole))

    def _write(self, data: bytes) -> None:
        self.file.write_bytes(data)
        git(*ME, "commit", "-qam", "by hand", cwd=self.path / "sessions" / "s1" / "repo")


@pytest.fixture(params=["a closed page", "the newest page", "a row"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    path = tmp_path / "home"
    with GitJobStore(path, durability="relaxed") as store:
        for session_id in ("s1", "s2"):
            store.create_session(session_id)
        lease = store.leases.acquire(DEAD)
        store.active.mark(DEAD, "s1")
        lease.release()
        parent = store.create(job_for(store, "s2"), Queued(), fresh_id=True).job_id
        for _ in range(2 * PAGE_ROWS + 3):
            job = store.create(
                job_for(store, "s1", parent_job_id=parent, caller_session_id="s2"),
                Queued(runner_id=DEAD),
                fresh_id=True,
            )
            store.apply(job.job_id, Started(run_id="run"))
        documents = store.documents("s1")
        page = documents.newest_page() if request.param == "the newest page" else documents.older_page(1)
        ids = [job.job_id for job in store.list("s1", limit=None)][::-1]
        lost = list(page.lines)
    whole, instead = page.data, page.data[: len(page.data) // 2]
    if request.param == "a row":
        lost = lost[5:6]
        whole = page.lines[lost[0]]
        instead = whole.replace(b'"status":"', b'"status":"un')
    home = Home(path, page.path, whole, instead, ids, lost, [job_id for job_id in ids if job_id not in lost], parent)
    assert len(lost) == {"a closed page": PAGE_ROWS, "the newest page": 3, "a row": 1}[request.param]
    home.spoil()
    yield home
    home.mend()
    with GitJobStore(path, durability="relaxed") as store:
        assert [job.job_id for job in store.list("s1", limit=None)][::-1][: len(ids)] == ids
        assert store.fsck("s1").clean


@pytest.fixture
def store(home: Home) -> Iterator[GitJobStore]:
    with GitJobStore(home.path, durability="relaxed") as store:
        yield store


def test_all_others_are_read_and_changed(home: Home, store: GitJobStore) -> None:
    """Each by its id; those that are lost say where the damage is."""
    for job_id in home.readable:
        assert store.get(job_id).status is JobStatus.RUNNING
    for job_id in home.lost:
        with pytest.raises(errors.Damaged, match=re.escape(home.broken)):
            store.get(job_id)
    client = JobClient(store)
    assert client.get(home.readable[0]).status is JobStatus.ERRORED
    client.close()


@pytest.mark.parametrize("session_id", ["s1", None])
@pytest.mark.parametrize("status", [None, JobStatus.RUNNING])
def test_all_others_are_listed(
    home: Home, store: GitJobStore, session_id: str | None, status: JobStatus | None
) -> None:
    """With `on_damage`, which is told once; without it nothing is left out unsaid."""
    told: list[tuple[str, str]] = []
    found = store.list(session_id, status, limit=None, on_damage=lambda sid, error: told.append((sid, str(error))))
    assert [job.job_id for job in found if job.parent_session_id == "s1"][::-1] == home.readable
    assert len([job for job in found if job.parent_session_id == "s2"]) == (session_id is None and status is None)
    assert [(sid, home.broken in text) for sid, text in told] == [("s1", True)]
    with pytest.raises(errors.Damaged, match=re.escape(home.broken)):
        store.list(session_id, status, limit=None)
    with pytest.raises(errors.Damaged, match=re.escape(home.broken)):
        store.unfinished("s1")


@pytest.mark.parametrize("session_id", ["s1", None])
@pytest.mark.parametrize("status", [None, JobStatus.RUNNING])
def test_a_list_goes_on_behind_a_lost_job(
    home: Home, store: GitJobStore, session_id: str | None, status: JobStatus | None
) -> None:
    """With what is older than it, by the order in which the home's index has them; the damage is told once."""
    for job_id in home.lost[:: max(1, len(home.lost) - 1)]:
        for limit in (None, 5):
            told: list[str] = []
            found = store.list(
                session_id,
                status,
                limit=limit,
                before=job_id,
                on_damage=lambda sid, error: told.append(str(error)),  # noqa: B023
            )
            above = [home.parent] * (session_id is None and status is None)
            assert [job.job_id for job in found] == [*home.before(job_id), *above][:limit]
            assert len(told) == 1
            assert home.broken in told[0]
        with pytest.raises(errors.Damaged, match=re.escape(home.broken)):
            store.list(session_id, status, before=job_id)


def test_a_list_goes_on_behind_a_job_of_another_session(home: Home, store: GitJobStore) -> None:
    """Which is not in the list itself; one that nobody knows is refused."""
    home.mend()
    assert store.list("s1", before=home.parent) == []
    assert [job.job_id for job in store.list("s2", before=home.order[0])] == [home.parent]
    for session_id in ("s1", None):
        with pytest.raises(errors.UnknownJob):
            store.list(session_id, before=store.new_id())


def test_the_command_line_goes_on_behind_a_lost_job(home: Home) -> None:
    """Also where it is named by a beginning of its id."""
    for named in (home.lost[-1], home.lost[-1][:13]):
        ended = Cli(home.path).inside("list", "--session", "s1", "--limit", "7", "--before", named, code=6)
        assert [line.split("\t")[0] for line in ended.out.splitlines()] == home.before(home.lost[-1])[:7]
        assert ended.err.count("session s1 is not listed whole") == 1


@pytest.mark.parametrize("session_id", ["s1", None])
def test_whoever_asks_the_host_gets_all_others(home: Home, store: GitJobStore, session_id: str | None) -> None:
    """With what cannot be read beside them, once."""
    with JobRunner(store, 1, lambda request, event: TurnResult()) as runner:
        answer = perform(Context(runner=runner, store=store), "list_jobs", {"session_id": session_id, "limit": 200})
    found = [task["job_id"] for task in answer["tasks"] if task["parent_session_id"] == "s1"]
    assert found[::-1] == home.readable
    (unread,) = answer["unread"]
    assert unread["session_id"] == "s1"
    assert unread["code"] in ("damaged", "unknown_status")
    assert home.broken in unread["message"]


def test_all_others_are_recovered_and_the_lost_once_they_are_back(
    home: Home, store: GitJobStore, caplog: pytest.LogCaptureFixture
) -> None:
    """What the dead runner left is ended as far as it can be read; its lease and its mark stay for the rest."""
    recovery = Recovery(store, store.new_id)
    ended = recovery.run()
    assert {job.job_id for job in ended} == set(home.readable)
    assert {job.status for job in ended} == {JobStatus.ERRORED}
    assert any(home.broken in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert store.active.sessions(DEAD) == ["s1"]
    home.mend()
    assert {job.job_id for job in recovery.run()} == set(home.lost)
    assert store.leases.dead() == []


def test_all_others_are_stopped(home: Home, store: GitJobStore) -> None:
    """Who stops a whole session hears of the damage after the others were stopped."""
    client = JobClient(store)
    with pytest.raises(errors.Damaged, match=re.escape(home.broken)):
        client.cancel_session("s1", "enough")
    client.close()
    assert all(store.get(job_id).terminal for job_id in home.readable)


def test_all_others_under_a_job_are_listed_and_asked_to_stop(
    home: Home, store: GitJobStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Who cancels the job above them stops all that can be read (R6); what is not asked is logged, once."""
    told: list[str] = []
    found = store.list(
        parent_job_id=home.parent, limit=None, on_damage=lambda session_id, error: told.append(str(error))
    )
    assert [job.job_id for job in found][::-1] == home.readable
    assert len(told) == 1
    with pytest.raises(errors.Damaged, match=re.escape(home.broken)):
        store.list(parent_job_id=home.parent, limit=None)
    client = JobClient(store)
    assert client.cancel(home.parent, "enough").status is JobStatus.CANCELLED
    client.close()
    eventually(lambda: all(store.get(job_id).cancel_requested_at for job_id in home.readable))
    said = [record.getMessage() for record in caplog.records if "asked to stop" in record.getMessage()]
    assert len(said) == 1
    assert home.broken in said[0]


@pytest.mark.parametrize("by", ["a client", "a runner"])
def test_what_is_under_a_lost_job_is_asked_to_stop(home: Home, by: str, caplog: pytest.LogCaptureFixture) -> None:
    """However deep: the home's index says whose children they are. The one between is not asked, which is logged."""
    home.mend()
    with GitJobStore(home.path, durability="relaxed") as store:
        below = [home.lost[0]]
        for _ in range(3):
            job = job_for(store, "s2", parent_job_id=below[-1])
            below.append(store.create(job, Queued(runner_id=DEAD), fresh_id=True).job_id)
        home.spoil()
        stopper = JobClient(store) if by == "a client" else JobRunner(store, 1, lambda request, event: TurnResult())
        with stopper:
            assert stopper.cancel(home.parent, "enough").status is JobStatus.CANCELLED
            eventually(lambda: all(store.get(job_id).cancel_requested_at for job_id in below[1:]))
        assert {store.get(job_id).cancel_reason for job_id in below[1:]} == {
            f"its ancestor {home.parent} was cancelled: enough"
        }
    said = [record.getMessage() for record in caplog.records if "asked to stop" in record.getMessage()]
    assert len(said) == 1
    assert home.broken in said[0]


def test_what_stood_in_a_session_that_is_gone_keeps_nothing_from_being_stopped(tmp_path: Path) -> None:
    """The home's index still names it."""
    with GitJobStore(tmp_path / "home", durability="relaxed") as store:
        for session_id in ("s1", "s2"):
            store.create_session(session_id)
        parent = store.create(job_for(store, "s1"), Queued())
        gone, left = (
            store.create(job_for(store, session_id, parent_job_id=parent.job_id), Queued(runner_id=DEAD))
            for session_id in ("s2", "s1")
        )
    shutil.rmtree(tmp_path / "home" / "sessions" / "s2")
    with GitJobStore(tmp_path / "home", durability="relaxed") as store, JobClient(store) as client:
        assert client.cancel(parent.job_id).status is JobStatus.CANCELLED
        assert store.get(left.job_id).cancel_requested_at is not None
        with pytest.raises(errors.UnknownJob):
            store.get(gone.job_id)
        assert store.fsck("s1").clean


@pytest.mark.parametrize("status", [None, JobStatus.RUNNING])
def test_all_others_are_seen_by_the_session_that_asked_for_them(
    home: Home, store: GitJobStore, status: JobStatus | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is in order itself; what it cannot see is logged, once."""
    seen = [job.job_id for job in store.visible("s2", status, limit=None)]
    assert seen[::-1] == [home.parent] * (status is None) + home.readable
    said = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
    assert len(said) == 1
    assert home.broken in said[0]


def test_a_session_that_cannot_be_read_is_told(home: Home) -> None:
    """To `on_damage`, by whoever lists that session as by whoever lists all."""
    head = home.path / "sessions" / "s1" / "repo" / ".git" / "HEAD"
    text = head.read_bytes()
    head.write_bytes(b"nothing of git's")
    with GitJobStore(home.path, durability="relaxed") as store:
        for session_id, status in itertools.product(("s1", None), (None, JobStatus.RUNNING)):
            told: list[str] = []
            found = store.list(session_id, status, on_damage=lambda session_id, error: told.append(session_id))  # noqa: B023
            assert {job.parent_session_id for job in found} <= {"s2"}
            assert told == ["s1"]
            with pytest.raises(errors.Damaged, match="HEAD"):
                store.list(session_id, status)
    head.write_bytes(text)


def test_a_request_from_elsewhere_is_seen(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    """A job of this process is asked to stop by another one, in a session that has damage."""
    began: list[str] = []

    def work(request: TurnRequest, cancel_event: object) -> TurnResult:
        began.append(request.job_id)
        request.cancel_event.wait(60)
        return TurnResult(final_text="stopped")

    with (
        GitJobStore(home.path, durability="relaxed") as store,
        GitJobStore(home.path, durability="relaxed") as theirs,
        JobRunner(store, 1, work) as runner,
    ):
        request = SpawnRequest(prompt="long", parent_session_id="s1")
        if home.broken == NEWEST:
            with pytest.raises(errors.Damaged, match=re.escape(home.broken)):
                runner.submit(request)
            return
        job = runner.submit(request)
        eventually(lambda: began == [job.job_id])
        client = JobClient(theirs)
        client.cancel(job.job_id, "from elsewhere")
        client.close()
        assert runner.await_job(job.job_id, timeout=30).status is JobStatus.CANCELLED
    said = [record.getMessage() for record in caplog.records if "are not seen" in record.getMessage()]
    assert len(said) == 1
    assert home.broken in said[0]


def test_a_new_job_is_refused_only_where_the_newest_page_is_damaged(home: Home, store: GitJobStore) -> None:
    job = job_for(store, "s1")
    if home.broken == NEWEST:
        with pytest.raises(errors.Damaged, match=re.escape(home.broken)):
            store.create(job, Queued(runner_id=DEAD), fresh_id=True)
    else:
        store.create(job, Queued(runner_id=DEAD), fresh_id=True)
        assert store.get(job.job_id).status is JobStatus.QUEUED


def test_fsck_looks_at_all_other_pages(home: Home, store: GitJobStore) -> None:
    """The damage is what it finds, and it accuses nothing else."""
    report = store.fsck("s1")
    assert len(report.findings) == 1
    assert home.broken in str(report.findings[0])
    assert report.counts["jobs"] == len(home.readable) + (len(home.lost) == 1)


def test_the_command_line_lists_and_names(home: Home) -> None:
    """Exit code 6, the readable jobs on standard output, the damage on standard error, once."""
    for options in (("--session", "s1"), ()):
        ended = Cli(home.path).inside("list", "--limit", "0", *options, code=6)
        ids = {line.split("\t")[0] for line in ended.out.splitlines() if line.split("\t")[5] == "s1"}
        assert ids == set(home.readable)
        assert ended.err.count("session s1 is not listed whole") == 1
        assert home.broken in ended.err


def test_the_command_line_shows_the_job_above_them(home: Home) -> None:
    """With the children that can be read; exit code 6, and the damage once on standard error."""
    ended = Cli(home.path).inside("--json", "show", home.parent, code=6)
    assert json.loads(ended.out)["children"] == home.readable
    assert ended.err.count(home.broken) == 1


def test_the_panel_pages_through_all_others(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    """Also where they are not in memory any more, and each page comes from the store."""
    with (
        GitJobStore(home.path, durability="relaxed") as store,
        JobRunner(store, 1, lambda request, cancel_event: TurnResult()) as runner,
    ):
        backend = RunnerBackend(runner)
        feed = Feed(backend, keep_rows=5)
        feed.start()
        try:
            assert feed.until_loaded(20)
            ids: list[str] = []
            before = None
            while before is not None or not ids:
                page = feed.page(Filter(session_id="s1"), before, 20)
                ids += [row["id"] for row in page["tasks"]]
                before = page["next_before"]
        finally:
            feed.close()
            backend.close()
    assert ids == home.readable[::-1]


def test_the_panel_shows_all_others(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    """A server that starts on such a home has the readable rows, and logs what is missing once."""
    with (
        GitJobStore(home.path, durability="relaxed") as store,
        JobRunner(store, 1, lambda request, cancel_event: TurnResult()) as runner,
        serving(runner) as (client, app),
    ):
        assert app.feed.until_loaded(20)
        rows = client.get("/api/jobs?session=s1&limit=200")["tasks"]
        assert {row["id"] for row in rows} == set(home.readable)
        assert client.get(f"/api/jobs/{home.readable[0]}")["status"] == "errored"
        client.get(f"/api/jobs/{home.lost[0]}", status=500)
    said = [record.getMessage() for record in caplog.records if "cannot be read whole" in record.getMessage()]
    assert len([text for text in said if text.startswith("session s1 cannot be read whole")]) == 1
