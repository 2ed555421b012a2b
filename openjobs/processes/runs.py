"""The runs of a session on disk: which logs are not complete, and what gc may take away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..durable.files import names_in
from ..errors import Damaged, FileRefused, Refused, UnknownTask
from ..runlog import RunLogReader
from ..runlog.binding import RunDirectory
from ..runlog.check import log_findings
from ..runlog.sidecar import look
from ..runlog.state import STATE_MOST_BYTES
from .check import run_findings
from .client import run_directory
from .journal import TaskJournal
from .rundir import keeper_lives
from .task import Task

_SIDECAR = "log.state"


def incomplete_runs(home: Path, session_id: str) -> list[str]:
    """Ids of the runs whose log was begun and not completed. Reads one small file for each that may be one."""
    runs = home / "sessions" / session_id / "runs"
    return [name for name in _names(runs) if _is_incomplete(runs / name)]


def check_runs(home: Path, session_id: str, journal: TaskJournal) -> Iterator[tuple[str, str]]:
    """(where, what is wrong) for the runs of a session: logs that are not what their states say, and what a keeper
    left that cannot be read or is not what the journal says. Looks only. What is wrong with the journal itself is for
    its own check."""
    runs = home / "sessions" / session_id / "runs"
    for name in _names(runs):
        named = set()
        for file, what in log_findings(runs / name, name):
            named.add(file)
            yield f"runs/{name}/{file}".rstrip("/"), what
        if "" in named:
            continue  # it is no directory of ours
        for file, what in run_findings(runs / name, _task(journal, name), named):
            yield f"runs/{name}/{file}", what


def _task(journal: TaskJournal, run_id: str) -> Task | None:
    try:
        return journal.get(run_id)
    except (UnknownTask, Damaged, FileRefused):
        return None  # a job's, or nobody can tell


def _names(runs: Path) -> list[str]:
    try:
        return sorted(names_in(runs))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_incomplete(run_dir: Path) -> bool:
    try:
        size = os.lstat(run_dir / _SIDECAR).st_size
        if size > STATE_MOST_BYTES:
            return False
        state = RunLogReader(run_dir).state()
    except (OSError, Refused, Damaged):
        return False
    return state is not None and state.completion is None


def owner_of(home: Path, session_id: str, run_id: str) -> str | None:
    """The job or task whose run that is, as its log says. Raises `Damaged`, `FileRefused`."""
    directory = RunDirectory(run_directory(home, session_id, run_id))
    try:
        fd = directory.open(directory.sidecar)
        try:
            return look(fd, directory.sidecar, task_id=None, run_id=run_id).header.task_id
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    finally:
        directory.close()


def remove_run(home: Path, session_id: str, run_id: str) -> int:
    """Take a finished run's files away; how many bytes they had. A run whose keeper lives is left alone (0).

    Raises `InvalidInput` for what cannot be an id.
    """
    run_dir = run_directory(home, session_id, run_id)
    if not run_dir.is_dir() or run_dir.is_symlink() or keeper_lives(run_dir):
        return 0
    freed = 0
    for path in run_dir.iterdir():
        try:
            freed += path.lstat().st_size
        except OSError:
            continue
    shutil.rmtree(run_dir, ignore_errors=True)
    return freed
