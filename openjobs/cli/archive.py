"""`openjobs export` and `import`: a session as one file, and back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UnknownSession
from . import exits, output
from .live import spinner
from .options import SESSION_ID, command
from .state import State
from .text import one_line, plural, size

if TYPE_CHECKING:
    from ..store import GitJobStore

FILE = click.Path(path_type=Path)


@command("export")
@click.argument("session", type=SESSION_ID, metavar="SESSION")
@click.argument("file", type=FILE, metavar="FILE")
def export_command(state: State, session: str, file: Path) -> int:
    """Write one session to a new FILE: to back it up, or to move it.

    The file is a tar archive with the git history, the facts of background commands, and all logs. It is
    read back and verified. Nothing is stopped: jobs that run are in it as they stand, and are named.
    """
    if state.missing:
        raise UnknownSession(f"there is no session {session!r}")
    from ..host.transfer import export_session

    with spinner(f"exporting {one_line(session)}"):
        made = export_session(_git(state), session, file)
    with output.telling(f"session {one_line(session)} was exported to {one_line(str(made.path))}"):
        if state.json:
            output.json_value(
                {
                    "session_id": made.session_id,
                    "commit_id": made.commit_id,
                    "path": str(made.path),
                    "size_bytes": made.size_bytes,
                    "jobs": made.jobs,
                    "unfinished_jobs": list(made.unfinished_jobs),
                    "unfinished_tasks": list(made.unfinished_tasks),
                }
            )
            return exits.COMPLETED
        output.line(one_line(str(made.path)))
    told = (plural(made.jobs, "job"), f"commit {made.commit_id[:12]}", size(made.size_bytes), "verified")
    output.note(f"{one_line(session)}: {', '.join(told)}")
    _tell("unfinished, exported as it stands: ", made.unfinished_jobs, made.unfinished_tasks)
    return exits.COMPLETED


@command("import")
@click.argument("file", type=FILE, metavar="FILE")
@click.option("--session", type=SESSION_ID, help="The name it gets here. Without it: its own.")
def import_command(state: State, file: Path, session: str | None) -> int:
    """Make a session of a FILE that `openjobs export` wrote.

    Everything in it is verified before anything of it can be seen; a session by that name, or one with the
    same jobs, is never touched. What had not ended when it was exported ends now as errored (a job) or
    lost (a background command): whatever ran it is not here.
    """
    state.make_home()
    from ..host.transfer import import_session

    notes = _Notes()
    log = logging.getLogger("openjobs")
    log.addHandler(notes)
    try:
        with spinner(f"importing {one_line(str(file))}"):
            made = import_session(_git(state), file, session)
    finally:
        log.removeHandler(notes)
    if state.json:
        value: dict[str, Any] = {
            "session_id": made.session_id,
            "commit_id": made.commit_id,
            "jobs": made.jobs,
            "tasks": made.tasks,
            "ended_jobs": list(made.ended_jobs),
            "ended_tasks": list(made.ended_tasks),
            "counts": made.counts,
        }
        with output.telling(f"session {made.session_id} was imported"):
            output.json_value(value)
        return exits.COMPLETED
    with output.telling(f"session {made.session_id} was imported"):
        output.line(made.session_id)
    output.note(
        f"{made.session_id}: {plural(made.jobs, 'job')}, {plural(made.tasks, 'background command')},"
        f" commit {made.commit_id[:12]}, checked"
    )
    _tell("was unfinished, has ended here: ", made.ended_jobs, made.ended_tasks)
    for said in notes.said:
        output.note(f"openjobs: {one_line(said)}")
    return exits.COMPLETED


class _Notes(logging.Handler):
    """What is worth a word and no failure, for people."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _tell(words: str, jobs: Any, tasks: Any) -> None:
    for kind, ids in (("job", jobs), ("background command", tasks)):
        for each in ids:
            output.note(f"{words}{kind} {each}")


def _git(state: State) -> GitJobStore:
    from ..store import GitJobStore

    store = state.store
    assert isinstance(store, GitJobStore)  # in memory only where a home is missing
    return store
