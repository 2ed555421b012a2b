"""Whether a session is what the guarantees say it is. Reads only; never repairs.

Checked: the repository itself (objects, linear history, index and work tree, stray locks), that the
commits of each job walk legal edges and end at most once, that rows agree with them, that pages and
segments are well formed, that cards and messages agree with rows (spec 003, invariants 1, 2, 4), also where the
card is in another session, that each notice was told once, and that the home's index finds every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from ..errors import Damaged, OpenJobsError
from ..jobs import EDGES, Job, JobStatus, NoticeStage
from ..repo import CommitInfo
from ..session import Documents, Node, cards, pages
from ..session.history import NOTICE, events_of
from ..session.pages import Page
from .reindex import entry_of, lacking

if TYPE_CHECKING:
    from .base import JobStore


@attrs.frozen(kw_only=True, slots=True)
class Finding:
    session_id: str
    #: the file, commit or job it is about
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.session_id}: {self.where}: {self.what}"


@attrs.frozen(kw_only=True, slots=True)
class Report:
    findings: list[Finding]
    #: what was looked at, by kind: sessions, commits, objects, pages, jobs, messages, cards
    counts: dict[str, int]

    @property
    def clean(self) -> bool:
        return not self.findings


class _Trail:
    """The commits of one job, as its trailers tell them."""

    def __init__(self) -> None:
        self.status: JobStatus | None = None
        self.commits = 0
        self.cancel_requests = 0

    def walk(self, commit: CommitInfo) -> str | None:
        """What is wrong with this commit as the next one of the job, or None."""
        kind, text = commit.trailer("Openjobs-Kind"), commit.trailer("Openjobs-Status")
        try:
            status = JobStatus(text or "")
        except ValueError:
            return f"has the status {text!r}"
        before, self.commits = self.status, self.commits + 1
        if kind == "cancel-request":
            self.cancel_requests += 1
            if self.cancel_requests > 1:
                return "is a second cancel request"
            if status is not before or status.terminal:
                return f"is a cancel request of a job that was {before or 'not there'}"
            return None
        self.status = status
        if before is None:
            return None if status is JobStatus.PENDING else f"is the first of its job but says {status.value}"
        if status not in EDGES[before]:
            return f"goes from {before.value} to {status.value}"
        return None


def check_session(store: JobStore, session_id: str) -> Report:
    """Everything about one session. What stops a part of the check is a finding of its own, and so is what the disk
    says; nothing is called wrong only because something else could not be read."""
    counts: Counter[str] = Counter(sessions=1)
    findings: list[Finding] = []

    def found(where: str, what: str) -> None:
        findings.append(Finding(session_id=session_id, where=where, what=what))

    def part(name: str, problems: Callable[[], Iterator[tuple[str, str]]]) -> bool:
        """Whether it could be looked at to its end."""
        try:
            for where, what in problems():
                found(where, what)
        except Damaged as error:
            found(error.path or name, str(error))
        except (OpenJobsError, OSError) as error:
            found(name, str(error))
        else:
            return True
        return False

    try:
        repository = store.repository(session_id)
        documents = store.documents(session_id)
    except (OpenJobsError, OSError) as error:
        found("repository", str(error))
        return Report(findings=findings, counts=dict(counts))
    part("repository", lambda: (("repository", line) for line in repository.check()))
    trails: dict[str, _Trail] = {}
    # From the commit at which rows are read: others may go on meanwhile.
    has_history = part("history", lambda: _check_commits(repository.log(start=documents.commit_id), trails, counts))
    rows: dict[str, Job] = {}
    listed: set[str] = set()
    unread: list[Damaged] = []
    has_rows = part("pages", lambda: _check_pages(documents, rows, listed, unread, counts)) and not unread
    if has_history:
        part("rows", lambda: _check_rows(rows, trails))
    if has_history and has_rows:
        part("commits", lambda: _check_trails(trails, listed))
    part("index", lambda: _check_index(store, rows, session_id))
    nodes: dict[str, Node] = {}
    has_nodes = part("messages", lambda: _check_nodes(documents, nodes, counts))
    part("cards of other sessions", lambda: _check_cards_of_others(store, nodes, counts, session_id))
    if has_nodes:
        part("cards", lambda: _check_cards(store, rows, nodes, counts))
        part("notices", lambda: _check_notices(rows, nodes, counts))
    return Report(findings=findings, counts=dict(counts))


def _check_commits(
    log: Iterator[CommitInfo], trails: dict[str, _Trail], counts: Counter[str]
) -> Iterator[tuple[str, str]]:
    # Newest first is how git tells it; edges are walked from the oldest on.
    ours = []
    for commit in log:
        counts["commits"] += 1
        if commit.trailer("Openjobs-Job") is not None:
            ours.append(commit)
            if len(commit.parents) != 1:
                yield f"commit {commit.commit_id[:12]}", f"has {len(commit.parents)} parents"
    for commit in reversed(ours):
        job_id = commit.trailer("Openjobs-Job") or ""
        if commit.trailer("Openjobs-Kind") not in ("transition", "cancel-request"):
            continue
        wrong = trails.setdefault(job_id, _Trail()).walk(commit)
        if wrong is not None:
            yield f"commit {commit.commit_id[:12]}", f"job {job_id}: {wrong}"


def _check_pages(
    documents: Documents, rows: dict[str, Job], listed: set[str], unread: list[Damaged], counts: Counter[str]
) -> Iterator[tuple[str, str]]:
    """`listed` are the jobs that have a row, `rows` those whose row can be read. What cannot be read hides no page."""
    documents.meta()
    for number in [*range(documents.older_pages()), None]:
        try:
            page = documents.newest_page() if number is None else documents.older_page(number)
        except Damaged as error:
            unread.append(error)
            yield error.path or pages.NEWEST, str(error)
            continue
        yield from _check_page(page, rows, listed, counts)
        if number is not None and not page.was_full(number):
            yield page.path, f"is closed with {len(page)} rows and {len(page.data)} bytes"


def _check_page(page: Page, rows: dict[str, Job], listed: set[str], counts: Counter[str]) -> Iterator[tuple[str, str]]:
    counts["pages"] += 1
    if page.path != pages.NEWEST and not len(page):
        yield page.path, "is missing or empty"
    for job_id in page.lines:
        counts["jobs"] += 1
        if job_id in listed:
            yield page.path, f"has job {job_id}, which another page has too"
        listed.add(job_id)
        try:
            job = page.get(job_id)
        except Damaged as error:
            yield page.path, str(error)
            continue
        assert job is not None
        rows[job_id] = job


def _check_rows(rows: dict[str, Job], trails: dict[str, _Trail]) -> Iterator[tuple[str, str]]:
    for job_id, job in rows.items():
        trail = trails.get(job_id)
        if trail is None:
            yield f"job {job_id}", "has a row but no commit"
        elif trail.status is not job.status:
            yield f"job {job_id}", f"is {job.status.value} in its row and {trail.status} in its last commit"
        elif trail.commits - 1 != job.revision:
            yield f"job {job_id}", f"has revision {job.revision} after {trail.commits} commits"
        elif bool(trail.cancel_requests) and job.cancel_requested_at is None:
            yield f"job {job_id}", "was asked to stop by a commit that its row does not know"


def _check_trails(trails: dict[str, _Trail], listed: set[str]) -> Iterator[tuple[str, str]]:
    for job_id in sorted(trails.keys() - listed):
        yield f"job {job_id}", "has commits but no row"


def _check_index(store: JobStore, rows: dict[str, Job], session_id: str) -> Iterator[tuple[str, str]]:
    """The rows were read before: whoever makes a job meanwhile has written its entry first."""
    lost = lacking(store.index, session_id, map(entry_of, rows.values()))
    if lost:
        yield "index", lacks("job", [entry.job_id for entry in lost])


def lacks(kind: str, ids: Sequence[str]) -> str:
    """The words for what the index does not find."""
    some = ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
    return (
        f"the home's index lacks {len(ids):,} {kind}{'s' if len(ids) > 1 else ''} of this session ({some});"
        " `openjobs recover` puts them back"
    )


def _check_nodes(documents: Documents, nodes: dict[str, Node], counts: Counter[str]) -> Iterator[tuple[str, str]]:
    for segment in documents.segments():
        for node in segment.nodes():
            nodes[node.id] = node
    counts["messages"] += len(nodes)
    for node in nodes.values():
        if node.parent is not None and node.parent not in nodes:
            yield f"message {node.id}", f"hangs on {node.parent}, which is not there"
    head = documents.meta().head_id
    if head is not None and head not in nodes:
        yield "meta.json", f"the head is message {head}, which is not there"


def _check_cards(
    store: JobStore, rows: dict[str, Job], nodes: dict[str, Node], counts: Counter[str]
) -> Iterator[tuple[str, str]]:
    callers: dict[str, Documents | None] = {}
    for job in rows.values():
        for name in ("user_msg_id", "head_id", "result_msg_id"):
            node_id = getattr(job, name)
            if node_id is not None and node_id not in nodes:
                yield f"job {job.job_id}", f"{name} is message {node_id}, which is not there"
        if job.attach_id is None:
            continue
        card = nodes.get(job.attach_id)
        if job.elsewhere and card is None:
            yield from _check_card_elsewhere(store, job, callers, counts)
            continue
        if card is None:
            yield f"job {job.job_id}", "has no card"
            continue
        counts["cards"] += 1
        if cards.status_of(card) != _on_card(job):
            yield f"job {job.job_id}", f"is {job.status.value}, but its card says {cards.status_of(card)}"


def _within_reach(
    store: JobStore, session_id: str, read: dict[str, Documents | None], counts: Counter[str]
) -> Documents | None:
    """Another session's documents, read once; None, and a card counted, where they cannot be."""
    if session_id not in read:
        read[session_id] = _readable(store, session_id)
    documents = read[session_id]
    if documents is None:
        counts["cards out of reach"] += 1
    return documents


def _check_card_elsewhere(
    store: JobStore, job: Job, callers: dict[str, Documents | None], counts: Counter[str]
) -> Iterator[tuple[str, str]]:
    """A card in the caller's session follows the row; it may be late only while somebody sees to it."""
    caller = job.caller_session_id or ""
    documents = _within_reach(store, caller, callers, counts)
    if documents is None:
        return
    said = _said_of(job, documents)
    counts["cards"] += said is not None
    if said == _on_card(job) or (said in (None, "running") and _is_seen_to(store, job)):
        return
    # Row and card were read at different moments, so all is looked at again in the order that nobody can overtake:
    #   1. the mark, which goes when the card has followed the row
    #   2. the card, which never goes before the row
    #   3. the row
    is_seen_to = _is_seen_to(store, job)
    said = _said_of(job, store.documents(caller))
    job = store.documents(job.parent_session_id).job(job.job_id) or job
    if said == _on_card(job) or (said in (None, "running") and is_seen_to):
        return
    what = f"its card in session {caller} says {said}" if said is not None else f"it has no card in session {caller}"
    yield f"job {job.job_id}", f"is {job.status.value}, but {what}"


def _check_cards_of_others(
    store: JobStore, nodes: dict[str, Node], counts: Counter[str], session_id: str
) -> Iterator[tuple[str, str]]:
    """Cards here of jobs that run elsewhere: never ahead of their rows."""
    others: dict[str, Documents | None] = {}
    for node in nodes.values():
        if node.function != cards.FUNCTION or not cards.status_of(node):
            continue
        attach = node.extra["attach"]
        target, job_id = attach.get("session_id"), attach.get("job_id")
        if target == session_id or not isinstance(target, str) or not isinstance(job_id, str):
            continue
        documents = _within_reach(store, target, others, counts)
        if documents is None:
            continue
        counts["cards of other sessions"] += 1
        job = documents.job(job_id)
        if job is None:
            yield f"message {node.id}", f"is the card of job {job_id}, which session {target} does not have"
        elif cards.is_final(node) and cards.status_of(node) != job.status:
            yield f"message {node.id}", f"says that job {job_id} is {cards.status_of(node)}; it is {job.status.value}"


def _check_notices(rows: dict[str, Job], nodes: dict[str, Node], counts: Counter[str]) -> Iterator[tuple[str, str]]:
    told: dict[str, str] = {}
    for node in nodes.values():
        if node.function != NOTICE:
            continue
        counts["notices"] += 1
        for event_id in events_of(node):
            if event_id in told:
                yield f"message {node.id}", f"tells of {event_id}, which message {told[event_id]} has told"
            told[event_id] = node.id
    for job in rows.values():
        if job.notice is None:
            continue
        if job.terminal is (job.notice is NoticeStage.WANTED):
            yield f"job {job.job_id}", f"is {job.status.value}, but its notice is {job.notice.value}"
        elif job.notice is NoticeStage.DELIVERED and not job.elsewhere and job.event_id not in told:
            yield f"job {job.job_id}", "its end is said to be told, and no message tells of it"


def _said_of(job: Job, documents: Documents) -> str | None:
    """What the job's card says, or None where there is none."""
    card = documents.find_node(job.attach_id or "")
    return cards.status_of(card) if card is not None else None


def _on_card(job: Job) -> str:
    return job.status.value if job.terminal else "running"


def _readable(store: JobStore, session_id: str) -> Documents | None:
    """Another session's documents, or None: what is wrong with it is a finding of its own check."""
    try:
        documents = store.documents(session_id)
        documents.meta()
    except (OpenJobsError, OSError):
        return None
    return documents


def _is_seen_to(store: JobStore, job: Job) -> bool:
    """Whether a runner, or the recovery after it, still has work in the job's session."""
    return job.runner_id is not None and job.parent_session_id in store.active.sessions(job.runner_id)
