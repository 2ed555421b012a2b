"""Facts through kills, power cuts, full disks and damage: what was acknowledged is there, and nothing is made up."""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs
import pytest

from openjobs import GitJobStore, JobRunner, JobStatus, SpawnRequest, TurnRequest, TurnResult, errors, facts
from openjobs.clock import to_epoch_ms
from openjobs.durable import Disk
from openjobs.durable.disk import AnyPath
from openjobs.facts import Fact, FileFactLog, Registered, Settled
from openjobs.ledger import Ledger
from tests.support.chaos import Chaos
from tests.support.crash_states import RecordingDisk, distinct
from tests.support.disks import FaultyDisk
from tests.support.facts import T0, registered
from tests.support.kills import said_until_killed

T = TypeVar("T")
NAME = "events.jsonl"
RELAXED = Disk(durable=False)


def quick(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
    return TurnResult(final_text=f"did {request.prompt}")


def ask(prompt: str = "work") -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id="s1")


def numbers(directory: Path) -> list[int]:
    return [fact.registered_at_ms - T0 for fact in facts.read(directory)]


# --- kills -----------------------------------------------------------------------------------------------


def _work_until_killed(home: Path, say: int) -> None:
    """Three threads submit jobs and wait for them; each acknowledgement is one line in the pipe."""
    store = GitJobStore(home, durability="relaxed")
    runner = JobRunner(store, 4, quick)

    def work() -> None:
        while True:
            job = runner.submit(ask())
            os.write(say, f"{job.job_id} registered\n".encode())
            runner.await_job(job.job_id)
            os.write(say, f"{job.job_id} settled\n".encode())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _killed_after(home: Path, lines: int, seconds: float) -> list[tuple[str, str]]:
    said = said_until_killed(functools.partial(_work_until_killed, home), lines, seconds)
    return [(line.split()[0], line.split()[1]) for line in said]


def test_kills_lose_no_fact_that_was_acknowledged_and_recovery_makes_none_up(tmp_path: Path, chaos: Chaos) -> None:
    """After each kill: what `submit` returned is registered; what a waiter heard of is settled; each once; no fact
    tells of what the row does not say; and a job that recovery ends stays without a settlement."""
    rounds, dice = chaos.rounds(25, 500, "kills"), random.Random(chaos.seed(11))
    home = tmp_path / "home"
    with GitJobStore(home, durability="relaxed") as store:
        store.create_session("s1")
    left_open = settled_in_all = 0
    for number in range(rounds):
        acknowledged = _killed_after(home, dice.randrange(1, 12), dice.random() * 0.02)
        with GitJobStore(home, durability="relaxed") as store:
            before = list(facts.read(store.session("s1")))
            with JobRunner(store, 1, quick):
                pass  # it recovers
            assert list(facts.read(store.session("s1"))) == before, f"round {number}"
            starts = [fact.job_id for fact in before if isinstance(fact, Registered)]
            ends = {fact.job_id: fact for fact in before if isinstance(fact, Settled)}
            assert len(starts) == len(set(starts))
            assert len(starts) + len(ends) == len(before)
            for job_id, what in acknowledged:
                assert job_id in (starts if what == "registered" else ends), f"round {number}: {job_id} {what}"
            for job in store.list("s1", limit=40):
                assert job.terminal
                end = ends.get(job.job_id)
                if job.error == "worker died before completion":
                    assert end is None
                    left_open += 1
                elif end is not None:
                    assert job.completed_at is not None
                    assert (end.status, end.settled_at_ms) == (job.status.value, to_epoch_ms(job.completed_at))
            settled_in_all += sum(what == "settled" for _, what in acknowledged)
    assert left_open > 0
    assert settled_in_all > rounds


# --- power cuts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 3])
def test_every_power_cut_keeps_what_was_acknowledged(tmp_path: Path, at_once: int) -> None:
    """All legal states of the disk at every moment of several appends, each by a new writer: facts whose append
    had returned are there, in order, and the next writer goes on. Where facts share a write, on file systems that
    make a file longer only after its data."""
    recorded = tmp_path / "recorded"
    recorded.mkdir(mode=0o700)
    disk = RecordingDisk(recorded)
    for number in range(4):
        FileFactLog(recorded / NAME, disk).append([registered(at_once * number + each) for each in range(at_once)])
        disk.note(str(number))
    count = 0
    for count, state in enumerate(distinct(disk, only_beginnings=[NAME] if at_once > 1 else []), start=1):
        root = tmp_path / f"state-{count}"
        root.mkdir(mode=0o700)
        state.build(root)
        found = numbers(root)
        assert found == list(range(len(found)))
        assert len(found) >= at_once * len(state.notes)
        FileFactLog(root / NAME, RELAXED).append([registered(99)])
        assert numbers(root) == [*found, 99]
    assert count >= 20


# --- damage ------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_last_record_stops_writers(tmp_path: Path) -> None:
    """A new writer that looks at the end only still refuses to go on behind an end that is damaged, and leaves the
    file alone; where the bit looks like a block that never arrived, the record is put aside, not thrown away."""
    path = tmp_path / NAME
    FileFactLog(path, RELAXED).append([registered(n) for n in range(3)])
    whole = path.read_bytes()
    begin = whole.rstrip(b"\n").rfind(b"\n") + 1
    aside = 0
    for bit in range(begin * 8, len(whole) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            FileFactLog(path, RELAXED).append([registered(9)])
        except errors.Damaged as error:
            assert error.offset == begin  # noqa: PT017  # the other outcome is looked at, too
            assert path.read_bytes() == bytes(flipped)
        else:
            assert 0 in flipped
            (kept,) = tmp_path.glob(NAME + ".torn-*")
            assert kept.read_bytes() == bytes(flipped[begin:])
            kept.unlink()
            aside += 1
    assert aside < 100


def test_looking_at_the_end_finds_what_looking_at_all_finds(tmp_path: Path) -> None:
    """However the ledger ends: cut anywhere, with NULs, with rubbish. What the one accepts the other accepts, with
    the same numbers; damage at the end is damage for both."""
    path, other = tmp_path / NAME, tmp_path / "whole" / NAME
    other.parent.mkdir()
    FileFactLog(path, RELAXED).append([registered(n) for n in range(4)])
    whole = path.read_bytes()
    begin = whole.rstrip(b"\n").rfind(b"\n") + 1
    tails = [whole[begin:cut] for cut in range(begin, len(whole) + 1)]
    tails += [b"\0" * 5000, b'{"v":1,"seq":4' + b"\0" * 4000 + b'"}}\n', b"\0\n", b"{", b"rubbish\n", b"\n", b"\n\n"]
    for tail in tails:
        ends = []
        for file, from_the_end in ((path, True), (other, False)):
            file.write_bytes(whole[:begin] + tail)
            file.chmod(0o600)
            try:
                record = Ledger(file, RELAXED, from_the_end=from_the_end).append({"n": 1})
            except errors.Damaged as error:
                ends.append((error.offset, file.read_bytes()))
            else:
                ends.append((record.seq, file.read_bytes()))
        assert ends[0] == ends[1], tail[:40]
        for kept in tmp_path.rglob(NAME + ".torn-*"):
            kept.unlink()


# --- a disk that refuses facts ---------------------------------------------------------------------------------


class FactsFault(FaultyDisk):
    """Only effects on ledgers of facts count, and fail."""

    def _do(
        self, name: str, target: AnyPath | int, act: Callable[[], T], torn: Callable[[], object] | None = None
    ) -> T:
        path = self._paths.get(target, "?") if isinstance(target, int) else os.fspath(target)
        if NAME in path or (name == "sync_dir" and path.endswith("/s1")):
            return super()._do(name, target, act, torn)
        return act()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("for_good", [False, True])
def test_jobs_go_on_whatever_fails_in_their_facts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int, for_good: bool
) -> None:
    """The k-th effect on the ledger fails, k = 1, 2, …: every job is submitted, runs and is waited for; what is missing
    was warned of; and once the disk is well again, facts are recorded again and read to the end."""
    disk = FactsFault(durable=True)
    with GitJobStore(tmp_path / "home", disk=disk) as store, JobRunner(store, 2, quick) as runner:
        store.create_session("s1")
        whole = 0
        for k in range(1, 60):
            caplog.clear()
            disk.arm(k, code, for_good=for_good)
            job = runner.await_job(runner.submit(ask(f"faulty {k}")).job_id)
            assert job.status is JobStatus.COMPLETED
            disk.disarm()
            failed = bool(disk.failed)
            after = runner.await_job(runner.submit(ask(f"well {k}")).job_id)
            assert after.status is JobStatus.COMPLETED
            found = list(facts.read(store.session("s1")))
            assert [fact.type for fact in found if fact.job_id == after.job_id] == ["job/registered", "job/settled"]
            of_first = [fact.type for fact in found if fact.job_id == job.job_id]
            assert of_first in (["job/registered", "job/settled"], ["job/registered"], ["job/settled"], [])
            if len(of_first) < 2:
                assert f"of {job.job_id}" in caplog.text
            if not failed:
                assert of_first == ["job/registered", "job/settled"]
                whole += 1
                if whole == 2:
                    return
        pytest.fail("sixty effects were not enough to see a job whose facts had none that failed")


def test_a_full_disk_loses_facts_and_no_job(tmp_path: Path) -> None:
    """Everything is refused while a job ends: its end is written once there is room, and then its fact, before its
    waiters hear of it."""
    disk = FaultyDisk()
    started, go_on = threading.Event(), threading.Event()

    def slow(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        started.set()
        assert go_on.wait(20)
        return TurnResult(final_text="done")

    with GitJobStore(tmp_path / "home", disk=disk) as store, JobRunner(store, 1, slow) as runner:
        store.create_session("s1")
        job = runner.submit(ask())
        assert started.wait(20)
        disk.arm(1, errno.ENOSPC, for_good=True)
        go_on.set()
        assert not runner.await_job(job.job_id, timeout=0.2).terminal
        disk.disarm()
        assert runner.await_job(job.job_id, timeout=30).status is JobStatus.COMPLETED
        found: list[Fact] = list(facts.read(store.session("s1")))
    assert [fact.type for fact in found] == ["job/registered", "job/settled"]
    row = attrs.asdict(found[1])
    assert row["producer_reported"] is True
