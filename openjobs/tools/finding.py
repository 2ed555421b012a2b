"""What an id means to one session, and what jobs and commands it has.

Ownership: a session sees and stops what runs in it and what was asked for in it (spec 003, D6). Any other id is
unknown, so that nothing can be learned about other sessions by guessing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import AmbiguousId, Damaged, FileRefused, NotFound, OpenJobsError, UnknownJob
from ..ids import is_prefix
from ..jobs import TERMINAL, UNFINISHED, Job
from ..store.damage import found_in_either
from . import texts

if TYPE_CHECKING:
    from ..processes import ProcessSupervisor, Task
    from ..runner import JobRunner

log = logging.getLogger(__name__)

Rows = list[dict[str, Any]]

#: how many of the jobs there are an answer to a wrong id names
_NAMED = 10
#: a list stays readable with ten thousand queued jobs
_UNFINISHED = 100


class Finder:
    def __init__(self, runner: JobRunner, processes: ProcessSupervisor | None, session_id: str) -> None:
        self._runner = runner
        self._store = runner.store
        self._processes = processes
        self._session_id = session_id

    def find(self, given: str) -> Job | Task:
        """The one job or command that the id, or a beginning of it, means here.

        Raises `UnknownJob` and `AmbiguousId`, with what there is.
        """
        prefix = given.strip().lower()
        found = self._matching(prefix) if is_prefix(prefix) else []
        if len(found) == 1:
            return found[0]
        if found:
            rows = self.shown(found[:_NAMED])
            raise AmbiguousId(
                f"{given!r} is the beginning of more than one id; give more of it:\n{texts.table(rows)}",
                candidates=[row["job_id"] for row in rows],
            )
        rows = self._readable(_NAMED, (), [])[:_NAMED]
        there = f"there are:\n{texts.table(rows)}" if rows else "there are none yet"
        raise UnknownJob(f"there is no job {given!r} here; {there}", candidates=[row["job_id"] for row in rows])

    def rows(self, ended: int, own: Collection[str] = ()) -> Rows:
        """What has not ended (the newest hundred of it) and the newest `ended` of the rest, newest first; `own` as in
        `shown`. Jobs and commands count apart. Raises `Damaged`, with all that can be read in its text."""
        damage: list[OpenJobsError] = []
        rows = self._readable(ended, own, damage)
        if damage:
            said = "\n".join(dict.fromkeys(map(str, damage)))
            rest = f"what can be read:\n{texts.table(rows)}" if rows else "nothing else is there"
            raise Damaged(f"not all can be listed: {said}\n{rest}", path=getattr(damage[0], "path", ""))
        return rows

    def _readable(self, ended: int, own: Collection[str], damage: list[OpenJobsError]) -> Rows:
        def tell(session_id: str, error: OpenJobsError) -> None:
            damage.append(error)

        jobs = self._runner.visible(self._session_id, UNFINISHED, limit=_UNFINISHED, on_damage=tell)
        jobs += self._runner.visible(self._session_id, TERMINAL, limit=ended, on_damage=tell)
        found: list[Job | Task] = list({job.job_id: job for job in jobs}.values())
        if self._processes is not None:
            tasks: list[Task] = []
            try:
                tasks = self._processes.list(self._session_id)
            except (Damaged, FileRefused) as error:
                damage.append(error)
            found += list(islice((task for task in tasks if not task.terminal), _UNFINISHED))
            found += list(islice((task for task in tasks if task.terminal), ended))
        return self.shown(sorted(found, key=lambda each: each.created_at, reverse=True), own)

    def shown(self, found: Sequence[Job | Task], own: Collection[str] = ()) -> Rows:
        """Rows for a list; `own` are ids of jobs that who asks runs in."""
        now = self._store.clock.now()
        return [
            texts.job_row(each, now, own=each.job_id in own) if isinstance(each, Job) else texts.task_row(each, now)
            for each in found
        ]

    def _matching(self, prefix: str) -> list[Job | Task]:
        """At most some more than are named."""
        found = found_in_either(
            (lambda: self._some(self._jobs(prefix)), lambda: self._some(self._tasks(prefix))),
            lambda one: _id_of(one) == prefix,
            lambda error: log.warning("not all can be found by its id: %s", error),
        )
        return list(found.values())

    def _some(self, found: Iterator[Job | Task]) -> dict[str, Job | Task]:
        return {_id_of(one): one for one in islice(found, _NAMED + 1)}

    def _jobs(self, prefix: str) -> Iterator[Job]:
        met = set()
        for entry in self._store.index.by_id(prefix):
            if entry.job_id in met:
                continue
            met.add(entry.job_id)
            job = self._job(entry.job_id)
            if job is not None and job.owned_by(self._session_id):
                yield job

    def _tasks(self, prefix: str) -> Iterator[Task]:
        if self._processes is not None:
            for entry in self._processes.client.matching(prefix):
                if entry.session_id == self._session_id:
                    yield self._processes.get(entry.job_id)

    def _job(self, job_id: str) -> Job | None:
        """None: the index knows an id before its job is written, and that may never have come."""
        try:
            return self._runner.outcome(job_id)
        except NotFound:
            return None


def _id_of(found: Job | Task) -> str:
    return found.job_id if isinstance(found, Job) else found.task_id
