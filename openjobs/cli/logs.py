"""`openjobs logs`: what a job's command or a background command wrote, from its run log.

Needs no git: the index of ids says where the log is. Reading creates and repairs nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import click

from ..errors import AmbiguousId, Damaged, LogCompletionUnknown, NotFound, OpenJobsError
from ..ids import is_prefix
from ..processes.client import run_directory
from ..runlog import RunLogReader, Stream
from ..store.damage import found_in_either
from . import exits, output
from .options import JOB_ID, command
from .state import State

CHUNK_BYTES = 1 << 16
_PAUSE_S = (0.005, 0.05)
#: how long nobody may own an unfinished run before its log is taken for one that will not be completed
PATIENCE_S = 3.0


@attrs.frozen(kw_only=True)
class Found:
    """A run, and whose it is."""

    owner_id: str
    session_id: str
    run_id: str
    is_task: bool


@command("logs")
@click.argument("id", type=JOB_ID, metavar="ID")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended and its log is complete.")
@click.option("--raw", is_flag=True, help="The exact bytes, also on a terminal.")
@click.option("--stream", type=click.Choice([stream.value for stream in Stream]), help="Only this stream.")
def logs_command(state: State, id: str, follow: bool, raw: bool, stream: str | None) -> int:  # noqa: A002
    """Print what a command wrote: of a job, a background command, or a run.

    Of a job its newest run. In a pipe, or with --raw, the bytes as they are; on a terminal control
    characters are shown. A job that is a Python callable has no log.
    """
    found = find(state, id)
    run_dir = run_directory(state.home, found.session_id, found.run_id)
    reader = RunLogReader(run_dir, task_id=found.owner_id, run_id=found.run_id)
    owner = _Owner(state, found)
    show = output.Shown(raw=raw or not output.is_terminal(sys.stdout))
    try:
        if follow:
            _until_there(reader, owner)
        for data in _chunks(reader, Stream(stream) if stream else None, follow, owner.abandoned):
            show.take(data)
    except NotFound:
        raise NotFound(owner.why_none()) from None
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    show.end()
    _say_if_cut(run_dir)
    return exits.COMPLETED


def find(state: State, prefix: str) -> Found:
    """The one task, job or run whose id begins so. Raises `NotFound`, `AmbiguousId`.

    Damage on one side (an index, a journal) hides nothing whose whole id the other one has: it is only named.
    """
    wanted = prefix.strip().lower()
    if not is_prefix(wanted):
        raise _unknown(prefix)
    found = found_in_either(
        (lambda: _tasks_of(state, wanted), lambda: _jobs_of(state, wanted)),
        lambda one: wanted in (one.owner_id, one.run_id),
        lambda error: output.note(f"openjobs: {exits.explain(error)}"),
    )
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        ids = list(found)
        raise AmbiguousId(f"more than one id begins with {prefix!r}", candidates=ids)
    raise _unknown(prefix)


def _tasks_of(state: State, wanted: str) -> dict[str, Found]:
    return {
        entry.job_id: Found(owner_id=entry.job_id, session_id=entry.session_id, run_id=entry.job_id, is_task=True)
        for entry in state.tasks.matching(wanted)
    }


def _jobs_of(state: State, wanted: str) -> dict[str, Found]:
    found = {}
    index = state.job_index
    for entry in (*index.by_id(wanted), *index.by_run(wanted)):
        run_id = entry.run_id or state.store.row(entry.job_id).run_id
        if run_id is not None:
            found[entry.job_id] = Found(
                owner_id=entry.job_id, session_id=entry.session_id, run_id=run_id, is_task=False
            )
    return found


def _unknown(prefix: str) -> NotFound:
    return NotFound(f"no job, background command or run has an id that begins with {prefix!r}")


class _Owner:
    """Whether anybody will ever complete the log."""

    def __init__(self, state: State, found: Found) -> None:
        self._state = state
        self._found = found
        self._alone_since: float | None = None

    def abandoned(self) -> bool:
        """Nobody owns the run, and has not for a while: after a crash the next owner may only be on its way."""
        if self._is_owned():
            self._alone_since = None
            return False
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        return now - self._alone_since >= PATIENCE_S

    def _is_owned(self) -> bool:
        if self._found.is_task:
            task = self._state.tasks.journal(self._found.session_id).get(self._found.owner_id)
            return not self._state.tasks.is_orphan(task)
        job = self._state.store.row(self._found.owner_id)
        return job.runner_id is not None and self._state.store.leases.is_held(job.runner_id)

    def has_ended(self) -> bool:
        if self._found.is_task:
            return self._state.tasks.journal(self._found.session_id).get(self._found.owner_id).terminal
        return self._state.store.row(self._found.owner_id).terminal

    def why_none(self) -> str:
        what = "background command" if self._found.is_task else "job"
        short = self._found.owner_id[:8]
        try:
            ended = self.has_ended()
        except OpenJobsError:
            ended = True
        if not ended:
            return f"{what} {short} has no log yet"
        callables = "" if self._found.is_task else ", or it was a Python callable, which has none"
        return f"{what} {short} has no log (any more): it never started, or gc took it away{callables}"


def _until_there(reader: RunLogReader, owner: _Owner) -> None:
    """A run that has just begun gets its log in a moment."""
    pause, longest = _PAUSE_S
    over = False
    while True:
        try:
            reader.state()
            return
        except NotFound:
            if over:
                raise
        # The order matters: it may have got its log, and ended, between the two looks.
        over = owner.has_ended() or owner.abandoned()
        time.sleep(pause)
        pause = min(pause * 2, longest)


def _chunks(
    reader: RunLogReader, stream: Stream | None, follow: bool, abandoned: Callable[[], bool]
) -> Iterator[bytes]:
    if stream is not None:
        yield from _native(reader, stream, follow, abandoned)
    elif follow:
        yield from reader.follow(abandoned=abandoned)
    else:
        offset = 0
        while (chunk := reader.read(offset, CHUNK_BYTES)).data:
            yield chunk.data
            offset = chunk.next_offset_bytes


def _native(reader: RunLogReader, stream: Stream, follow: bool, abandoned: Callable[[], bool]) -> Iterator[bytes]:
    """One stream, as far as it is committed."""
    offset = 0
    pause, longest = _PAUSE_S
    while True:
        state = reader.state()
        if state is None:
            raise LogCompletionUnknown("the log has no checkpoint, so nothing says how much of a stream is whole")
        moved = False
        while offset < state.offset(stream):
            data = reader.read_native(stream, offset, min(CHUNK_BYTES, state.offset(stream) - offset))
            if not data:
                raise Damaged(f"{stream.value} is shorter than the log's state says", offset=offset)
            offset += len(data)
            moved = True
            yield data
        if not follow or state.completion is not None:
            return
        if not moved and abandoned():
            raise LogCompletionUnknown("the log will not be completed by anybody")
        pause = _PAUSE_S[0] if moved else min(pause * 2, longest)
        time.sleep(pause)


def _say_if_cut(run_dir: Path) -> None:
    from ..processes import read_exit

    try:
        record = read_exit(run_dir)
    except Damaged:
        return
    if record is not None and record.truncated:
        kept = record.stdout_bytes + record.stderr_bytes
        seen = record.stdout_seen_bytes + record.stderr_seen_bytes
        output.note(f"the output was cut: {kept:,} of {seen:,} bytes were kept")
