"""The state machine, cell by cell: every status and every event, legal and illegal (D2, R4)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs.errors import CancelledError, InvalidInput, InvalidTransition
from openjobs.jobs import (
    EDGES,
    METADATA_LIMIT_BYTES,
    SUBJECT_LIMIT_CHARS,
    TERMINAL,
    UNFINISHED,
    Cancelled,
    CancelRequested,
    Completed,
    Errored,
    Event,
    Job,
    JobStatus,
    NoticeStage,
    Queued,
    SpawnRequest,
    Started,
    TurnRequest,
    check_metadata,
    noticed,
    request_digest,
    subject_of,
    transition,
)

T0 = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NOW = T0 + timedelta(minutes=1)

EVENTS: dict[str, Event] = {
    "queued": Queued(runner_id="r1"),
    "started": Started(run_id="run1"),
    "cancel requested": CancelRequested(reason="enough"),
    "completed": Completed(event_id="e1", result_text="done", head_id="n1", usage={"tokens": 3}),
    "cancelled": Cancelled(event_id="e1", reason="stop", result_text="half", head_id="n1"),
    "errored": Errored(event_id="e1", error="ValueError: no", result_text="half", head_id="n1"),
}

#: (status, event) -> the status after it; what is not here is refused
LEGAL = {
    (JobStatus.PENDING, "queued"): JobStatus.QUEUED,
    (JobStatus.PENDING, "cancel requested"): JobStatus.PENDING,
    (JobStatus.PENDING, "cancelled"): JobStatus.CANCELLED,
    (JobStatus.PENDING, "errored"): JobStatus.ERRORED,
    (JobStatus.QUEUED, "started"): JobStatus.RUNNING,
    (JobStatus.QUEUED, "cancel requested"): JobStatus.QUEUED,
    (JobStatus.QUEUED, "cancelled"): JobStatus.CANCELLED,
    (JobStatus.QUEUED, "errored"): JobStatus.ERRORED,
    (JobStatus.RUNNING, "cancel requested"): JobStatus.RUNNING,
    (JobStatus.RUNNING, "completed"): JobStatus.COMPLETED,
    (JobStatus.RUNNING, "cancelled"): JobStatus.CANCELLED,
    (JobStatus.RUNNING, "errored"): JobStatus.ERRORED,
}
ALL_CELLS = [(status, name) for status in JobStatus for name in EVENTS]
ILLEGAL = [cell for cell in ALL_CELLS if cell not in LEGAL]


def a_job(status: JobStatus = JobStatus.PENDING, **fields: Any) -> Job:
    return Job(
        job_id="0d6f0b1e-8d0a-4d39-9c57-0123456789ab",
        subject="a job",
        description="do it",
        agent_id="main",
        status=status,
        created_at=T0,
        parent_session_id="s1",
        revision=4,
        **fields,
    )


@pytest.mark.parametrize(("status", "name"), LEGAL, ids=lambda value: str(value))
def test_a_legal_event_leads_where_the_table_says(status: JobStatus, name: str) -> None:
    """One case per legal edge; the revision grows by one and the job's identity stays."""
    job = a_job(status)
    after = transition(job, EVENTS[name], NOW)
    assert after.status is LEGAL[status, name]
    assert after.revision == job.revision + 1
    kept = ("job_id", "subject", "description", "agent_id", "created_at", "parent_session_id", "attempt")
    assert [getattr(after, field) for field in kept] == [getattr(job, field) for field in kept]


@pytest.mark.parametrize(("status", "name"), ILLEGAL, ids=lambda value: str(value))
def test_an_illegal_event_is_refused(status: JobStatus, name: str) -> None:
    """One rejection per cell that is no edge, with the status as a fact."""
    job = a_job(status)
    with pytest.raises(InvalidTransition) as caught:
        transition(job, EVENTS[name], NOW)
    assert caught.value.status == status.value
    assert job == a_job(status)


def test_the_table_of_the_code_is_the_table_of_the_test() -> None:
    """`EDGES` has exactly the moves of the matrix; the final states have none."""
    moves = {(status, to) for (status, _), to in LEGAL.items() if status is not to}
    assert moves == {(status, to) for status, targets in EDGES.items() for to in targets}
    assert {status for status in JobStatus if not EDGES[status]} == TERMINAL == set(JobStatus) - UNFINISHED
    assert all(status.terminal == (status in TERMINAL) for status in JobStatus)


@pytest.mark.parametrize(
    ("status", "name", "field"),
    [
        (JobStatus.PENDING, "queued", "queued_at"),
        (JobStatus.QUEUED, "started", "started_at"),
        (JobStatus.RUNNING, "completed", "completed_at"),
        (JobStatus.RUNNING, "cancelled", "completed_at"),
        (JobStatus.RUNNING, "errored", "completed_at"),
        (JobStatus.RUNNING, "cancel requested", "cancel_requested_at"),
    ],
)
def test_each_step_writes_its_own_time(status: JobStatus, name: str, field: str) -> None:
    """Every transition sets its timestamp, and no other one but the request that a cancel implies."""
    after = transition(a_job(status), EVENTS[name], NOW)
    assert getattr(after, field) == NOW
    times = {"queued_at", "started_at", "completed_at", "cancel_requested_at"}
    implied = {"cancel_requested_at"} if name == "cancelled" else set()
    assert {time for time in times if getattr(after, time) is not None} == {field} | implied


def test_the_runner_and_the_run_are_written_with_their_steps() -> None:
    """Who queued it and which attempt runs it; an event that does not say leaves what was there."""
    queued = transition(a_job(runner_id="r0"), Queued(), NOW)
    assert queued.runner_id == "r0"
    assert transition(a_job(), Queued(runner_id="r1"), NOW).runner_id == "r1"
    assert transition(queued, Started(run_id="run1"), NOW).run_id == "run1"


def test_a_completed_job_has_its_result() -> None:
    """Text, head, usage and the identity of the end come from the event."""
    after = transition(a_job(JobStatus.RUNNING), EVENTS["completed"], NOW)
    assert (after.result_text, after.head_id, after.usage, after.event_id) == ("done", "n1", {"tokens": 3}, "e1")
    assert after.error is None


def test_an_errored_job_has_its_error_and_its_partial_text() -> None:
    """What was there before the error is kept beside it (D12)."""
    after = transition(a_job(JobStatus.RUNNING), EVENTS["errored"], NOW)
    assert (after.error, after.result_text) == ("ValueError: no", "half")


@pytest.mark.parametrize("status", sorted(UNFINISHED))
def test_a_cancel_request_changes_no_status(status: JobStatus) -> None:
    """It leaves a time and a reason; who owns the job ends it (D5)."""
    after = transition(a_job(status), CancelRequested(reason="enough"), NOW)
    assert after.status is status
    assert (after.cancel_requested_at, after.cancel_reason) == (NOW, "enough")
    assert after.event_id is None


@pytest.mark.parametrize("status", sorted(UNFINISHED))
def test_a_second_cancel_request_is_refused(status: JobStatus) -> None:
    """The first one's time and reason stand."""
    asked = transition(a_job(status), CancelRequested(reason="first"), NOW)
    with pytest.raises(InvalidTransition):
        transition(asked, CancelRequested(reason="second"), NOW + timedelta(seconds=1))


@pytest.mark.parametrize("name", ["completed", "errored", "cancelled"])
def test_an_end_after_a_cancel_request_is_cancelled_and_keeps_its_text(name: str) -> None:
    """By return or by exception: the text is a partial result, and the request's time and reason stay."""
    asked = transition(a_job(JobStatus.RUNNING), CancelRequested(reason="enough"), NOW)
    event = EVENTS[name]
    after = transition(asked, event, NOW + timedelta(seconds=1))
    assert after.status is JobStatus.CANCELLED
    assert after.result_text == event.result_text  # type: ignore[union-attr]
    assert after.error == getattr(event, "error", None)
    assert (after.head_id, after.event_id) == ("n1", "e1")
    assert (after.cancel_requested_at, after.cancel_reason) == (NOW, "enough")
    assert after.completed_at == NOW + timedelta(seconds=1)


@pytest.mark.parametrize("status", [JobStatus.PENDING, JobStatus.QUEUED])
def test_a_job_that_never_ran_is_cancelled_at_once(status: JobStatus) -> None:
    """No worker has to see it; the request is written with the end."""
    after = transition(a_job(status), Cancelled(event_id="e1", reason="shutdown"), NOW)
    assert after.status is JobStatus.CANCELLED
    assert (after.cancel_requested_at, after.cancel_reason, after.started_at) == (NOW, "shutdown", None)


def test_a_forced_cancel_says_so() -> None:
    """The error of a cancelled job is the sign that its worker did not answer (D5, 5)."""
    asked = transition(a_job(JobStatus.RUNNING), CancelRequested(reason="enough"), NOW)
    forced = Cancelled(event_id="e1", reason="other", error="cancel timed out, worker may be stuck")
    after = transition(asked, forced, NOW)
    assert after.error == "cancel timed out, worker may be stuck"
    assert after.cancel_reason == "enough"


@pytest.mark.parametrize("status", sorted(TERMINAL))
@pytest.mark.parametrize("name", EVENTS)
def test_a_finished_job_never_changes(status: JobStatus, name: str) -> None:
    """Also when a cancel was requested before its end (invariant 1)."""
    ended = a_job(status, cancel_requested_at=T0, completed_at=T0, event_id="e0")
    with pytest.raises(InvalidTransition):
        transition(ended, EVENTS[name], NOW)


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=12))
def test_any_series_of_events_walks_legal_edges_once(names: list[str]) -> None:
    """R4: whatever comes in whatever order, no status is entered twice and at most one end is written."""
    job, seen = a_job(), [JobStatus.PENDING]
    for name in names:
        try:
            after = transition(job, EVENTS[name], NOW)
        except InvalidTransition:
            continue
        assert after.revision == job.revision + 1
        if after.status is not job.status:
            assert after.status in EDGES[job.status]
            seen.append(after.status)
        job = after
    assert len(seen) == len(set(seen))
    assert sum(status.terminal for status in seen) <= 1
    assert job.terminal == (job.event_id is not None) == (job.completed_at is not None)


def test_unknown_fields_of_a_newer_version_travel_along() -> None:
    """`extra` is kept through every step."""
    job = attrs.evolve(a_job(), extra={"colour": "red"})
    assert transition(job, Queued(runner_id="r1"), NOW).extra == {"colour": "red"}


@pytest.mark.parametrize(
    ("description", "prompt", "subject"),
    [
        ("short", "long prompt", "short"),
        ("", "two\n  lines\tof prompt ", "two lines of prompt"),
        ("x" * 300, "p", "x" * (SUBJECT_LIMIT_CHARS - 1) + "…"),
        ("", "y" * SUBJECT_LIMIT_CHARS, "y" * SUBJECT_LIMIT_CHARS),
    ],
)
def test_a_subject_is_one_short_line(description: str, prompt: str, subject: str) -> None:
    """The description, else the prompt's first words, never longer than a list can show."""
    assert subject_of(description, prompt) == subject


def test_metadata_has_a_limit() -> None:
    """1 KB of JSON is taken, one byte more is refused."""
    check_metadata(b"x" * METADATA_LIMIT_BYTES)
    with pytest.raises(InvalidInput):
        check_metadata(b"x" * (METADATA_LIMIT_BYTES + 1))


def test_the_limits_are_what_the_pages_say() -> None:
    """Metadata of a kilobyte, subjects of two hundred characters."""
    assert METADATA_LIMIT_BYTES == 1024
    assert SUBJECT_LIMIT_CHARS == 200


def test_a_request_is_the_same_by_what_it_asks_for() -> None:
    """Each thing that is asked for makes another digest; the id, `cwd` and `env` do not, and neither does saying no,
    or saying the same in another order."""
    plain = SpawnRequest(prompt="p", parent_session_id="s")
    others = [
        attrs.evolve(plain, prompt="q"),
        attrs.evolve(plain, description="d"),
        attrs.evolve(plain, agent_id="other"),
        attrs.evolve(plain, context_mode="clean"),
        attrs.evolve(plain, parent_msg_id="m"),
        attrs.evolve(plain, parent_job_id="j"),
        attrs.evolve(plain, caller_session_id="c"),
        attrs.evolve(plain, caller_msg_id="m"),
        attrs.evolve(plain, timeout_s=1.0),
        attrs.evolve(plain, foreground=True),
        attrs.evolve(plain, metadata={}),
        attrs.evolve(plain, metadata={"a": 1}),
        attrs.evolve(plain, notify=True),
    ]
    digests = {request_digest(request) for request in [plain, *others]}
    assert len(digests) == len(others) + 1
    assert {len(digest) for digest in digests} == {32}
    one_order, other_order = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert request_digest(attrs.evolve(plain, metadata=one_order)) == request_digest(
        attrs.evolve(plain, metadata=other_order)
    )
    same = attrs.evolve(plain, job_id="x", cwd="/", env={"A": "b"}, notify=False, caller_msg_id=None)
    # It stands in the rows of old homes: a request that is made again there must find its job.
    assert request_digest(same) == request_digest(plain) == "331c3aa6c9347ffdb6508686d59faebc"


def test_a_notice_only_goes_on() -> None:
    """Of an ended job whose notice was wanted: each stage once, in order; of any other job nothing changes."""
    running = transition(transition(a_job(), EVENTS["queued"], NOW), EVENTS["started"], NOW)
    wanted = attrs.evolve(running, notice=NoticeStage.WANTED)
    ended = transition(wanted, Completed(event_id="e", head_id=None, result_text="r"), NOW)
    assert ended.notice is NoticeStage.RECORDED
    assert noticed(wanted, NoticeStage.DELIVERED) is wanted
    delivered = noticed(ended, NoticeStage.DELIVERED)
    assert delivered.notice is NoticeStage.DELIVERED
    assert delivered.revision == ended.revision
    assert noticed(delivered, NoticeStage.DELIVERED) is delivered
    assert noticed(delivered, NoticeStage.RECORDED) is delivered
    without = transition(running, Completed(event_id="e", head_id=None, result_text="r"), NOW)
    assert without.notice is None
    assert noticed(without, NoticeStage.CONSUMED) is without


def test_who_may_see_a_job() -> None:
    """The session that it runs in, and the one that asked for it, where that is another; its news go to that one."""
    here = a_job()
    session = here.parent_session_id
    assert not here.elsewhere
    assert not a_job(caller_session_id=session).elsewhere
    asked = a_job(caller_session_id="c")
    assert asked.elsewhere
    assert [asked.owned_by(each) for each in (session, "c", "x")] == [True, True, False]
    assert [here.owned_by(each) for each in (session, "c")] == [True, False]
    assert (here.conversation_id, asked.conversation_id) == (session, "c")


def test_a_turn_goes_on_until_it_is_asked_to_stop() -> None:
    """`raise_if_cancelled` does nothing before the request, and raises `CancelledError` with the job's id after it."""
    job = a_job(JobStatus.RUNNING)
    turn = TurnRequest(
        job=job,
        session_id="s1",
        prompt="p",
        agent_id="main",
        context_mode=job.context_mode,
        parent_msg_id=None,
        user_msg_id=None,
        read_context=list,
    )
    turn.raise_if_cancelled()
    turn.cancel_event.set()
    with pytest.raises(CancelledError, match=job.job_id):
        turn.raise_if_cancelled()
