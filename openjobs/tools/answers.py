"""What the tools answer about one job or command, and what they note when an end was read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OpenJobsError
from ..jobs import Job
from . import texts
from .results import write_result

if TYPE_CHECKING:
    from ..processes import ProcessSupervisor, Task
    from ..runner import JobRunner

log = logging.getLogger(__name__)


class Answers:
    def __init__(self, runner: JobRunner, processes: ProcessSupervisor | None) -> None:
        self._runner = runner
        self._store = runner.store
        self._processes = processes

    def result(self, job: Job, limit_chars: int) -> str:
        """What a foreground `agent` gives."""
        self._seen(job)
        return texts.cut(texts.end_text(job), limit_chars, lambda: self._whole(job))

    def output(self, task: Task, limit_chars: int) -> str:
        """What a foreground `shell` gives."""
        self._seen(task)
        return "\n".join(filter(None, [self._written(task, limit_chars), texts.marker(task)]))

    def report(self, found: Job | Task, limit_chars: int, hint: str) -> str:
        """A line that says how it stands, and what there is; `hint` follows where it has not ended."""
        now = self._store.clock.now()
        if isinstance(found, Job):
            line = texts.job_line(found, now)
            said = texts.end_text(found) if found.terminal else (found.result_text or "")
            said = texts.cut(said, limit_chars, lambda: self._whole(found))
        else:
            line = texts.task_line(found, now)
            said = self._written(found, limit_chars)
        if not found.terminal:
            return f"{line}\n{hint}" + (f"\n\nSo far:\n{said}" if said else "")
        self._seen(found)
        return f"{line}\n\n{said}" if said else line

    def log_of(self, task: Task) -> Path:
        """The file that holds both streams of a command as they came."""
        from ..processes import run_directory  # late: only commands need that room
        from ..runlog.binding import LOG

        assert self._store.home is not None
        return run_directory(self._store.home, task.session_id, task.task_id) / LOG

    def _whole(self, job: Job) -> str:
        """Where the whole text of a job is, as part of a sentence."""
        if not job.terminal:
            return "the whole can be read when it has ended"
        try:
            path = write_result(self._store.home, job)
        except OSError as error:
            return f"the file with the whole could not be written: {error.strerror}"
        if path is None:
            return "the store is in memory and has no file with the whole"
        return f"the whole is in {path}"

    def _written(self, task: Task, limit_chars: int) -> str:
        """What a command wrote: all, or beginning and end."""
        assert self._processes is not None
        limit_bytes = limit_chars * 4  # a character has at most four
        begin = self._processes.output(task.task_id, limit=limit_bytes)
        text = begin.data.decode("utf-8", "replace")
        left = begin.total_bytes - begin.next_offset
        if left <= 0:
            return texts.cut(text.rstrip("\n"), limit_chars, lambda: f"the whole is in {self.log_of(task)}")
        # Too long to be read whole: its two ends are.
        offset = max(begin.next_offset, begin.total_bytes - limit_bytes)
        end = self._processes.output(task.task_id, offset=offset, limit=limit_bytes).data.decode("utf-8", "replace")
        head, tail = text[: (limit_chars + 1) // 2], end[-(limit_chars // 2) :]
        missing = begin.total_bytes - len(head.encode()) - len(tail.encode())
        return f"{head}\n[{missing:,} bytes left out here; the whole is in {self.log_of(task)}]\n{tail}".rstrip("\n")

    def _seen(self, ended: Job | Task) -> None:
        """The caller has read this end, so nobody needs to tell it (spec 000: consumed)."""
        if not ended.terminal or (isinstance(ended, Job) and ended.notice is None):
            return
        try:
            self._runner.notices.consume(ended.job_id if isinstance(ended, Job) else ended.task_id)
        except (OpenJobsError, OSError) as error:
            log.warning("an end was read, and may be told of again: %s", error)
