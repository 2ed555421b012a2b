"""Every error that openjobs raises on purpose.

The docstring of a class is its default message; the facts are attributes. A durable call ends in
one of three ways, and each has its type: it returns (done), it raises a `Refused` (nothing
changed), or it raises `OutcomeUnknown` (look before trying again; a retry with the same id is safe).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OpenJobsError(Exception):
    """Something went wrong in openjobs."""

    def __init__(self, message: str | None = None, **facts: Any) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().splitlines()[0])
        for name, value in facts.items():
            setattr(self, name, value)


# --- what was asked for cannot be done; nothing changed -------------------------------------------


class Refused(OpenJobsError):
    """The request was refused and nothing changed."""


class InvalidInput(Refused, ValueError):
    """A value is not of the form it must have."""


class InvalidSessionId(InvalidInput):
    """A session id is 1 to 64 of ASCII letters, digits, '-', '_', '.'; no '.' or '-' first, no '.lock' last."""


class InvalidWorkers(InvalidInput):
    """The number of workers must be a whole number from 1 to 1024."""


class InvalidConfiguration(InvalidInput):
    """The configuration file has a value that cannot be used."""


class NotFound(Refused, LookupError):
    """There is nothing by that id."""

    #: ids that were close, newest first; may be empty
    candidates: Sequence[str] = ()


class UnknownSession(NotFound):
    """There is no session by that id."""


class UnknownJob(NotFound):
    """There is no job by that id."""


class UnknownTask(NotFound):
    """There is no task by that id."""


class UnknownNode(NotFound):
    """The session has no message by that id."""


class UnknownAgent(NotFound):
    """No profile has that name."""


class AmbiguousId(NotFound):
    """The id is the beginning of more than one id."""


class InvalidTransition(Refused):
    """The job is not in a state in which this can happen to it."""

    #: the status the job has, as text
    status: str = ""


class IdempotencyConflict(Refused):
    """The same idempotency key came before with another request."""

    #: the job or task that the key belongs to
    first_id: str = ""


class JobExists(Refused):
    """A job by that id exists already; job ids are never reused."""


class SessionExists(Refused):
    """A session by that id (letter case apart) exists already."""


class ParentFinished(Refused):
    """The parent job is cancelled or finished and takes no more children."""


class SessionBusy(Refused, TimeoutError):
    """Another program holds the session's lock; nothing was written. Try again."""


class RepositoryRefused(Refused):
    """The directory is not a repository that openjobs writes to; it was left as it was."""


class StoreWriteFailed(Refused, OSError):
    """The store could not be written; nothing changed."""


class ReadFailed(Refused, OSError):
    """The system could not read now (no descriptors, no memory); nothing is known to be damaged. Try again."""


class Closed(Refused):
    """The runner or store is closed."""


class KeeperFailed(Refused, OSError):
    """The keeper of the command could not be started; the command did not run."""


class RunRefused(Refused):
    """This run's directory was used before, is in use, or is recorded as lost; nothing was started."""

    #: "held", "used" or "lost"
    why: str = ""


class ForkedProcess(Refused):
    """This object belongs to the parent process; open the store again after a fork."""


class BadFrame(InvalidInput):
    """What came over the socket is not one JSON object on one line, or it is too long."""


class HostBusy(Refused):
    """The home's host process has as many clients as it takes. Try again."""


class ArchiveRefused(Refused):
    """The file is no archive of a session that can be imported; nothing was imported."""


# --- what is there cannot be read ------------------------------------------------------------------


class Damaged(OpenJobsError):
    """Stored data is damaged; it was left as it was. Run `openjobs fsck`."""

    #: the file or path in the repository
    path: str = ""
    #: where in it, in bytes, or None
    offset: int | None = None
    #: it is not there at all
    missing: bool = False


class UnknownStatus(Damaged):
    """A row has a status that this version does not know."""

    #: the status as it stands in the row
    status: str = ""


class NewerFormat(Damaged):
    """The data was written by a newer version of openjobs."""


# --- it may or may not have happened ----------------------------------------------------------------


class OutcomeUnknown(OpenJobsError):
    """The write failed after its last step had begun; it may or may not be durable. Retry with the same id."""


# --- files of ours (ledgers, run logs) ---------------------------------------------------------------


class FileRefused(Refused):
    """What stands there is no file of ours (link, special file, owner or permissions); it was left as it was."""

    #: what was looked at
    path: str = ""
    code = "FILE_REFUSED"


class CursorLost(Refused):
    """The ledger does not have the record behind which this cursor stands; read it from the beginning."""

    #: the ledger, or "" for one in memory
    path: str = ""
    code = "CURSOR_LOST"


class LogBusy(Refused):
    """Another writer has this run's log."""

    code = "LOG_BUSY"


class LogCheckpointMissing(Refused):
    """The log has bytes but no checkpoint: how much of the run's output is in it is unknown. It was left as it was."""

    code = "LOG_CHECKPOINT_MISSING"


class LogCompletionUnknown(Refused):
    """Nothing proves that this log is, or ever will be, complete; read it without following."""

    code = "LOG_COMPLETION_UNKNOWN"


class LogCompleted(Refused):
    """The log is complete and takes nothing more."""

    code = "LOG_COMPLETED"


class LogStateInvalid(Damaged):
    """The log and its checkpoint disagree, or the checkpoint cannot be read; both were left as they were."""

    code = "LOG_STATE_INVALID"


class SourceMismatch(Refused):
    """The source is not the run of this log, or contradicts what it said before; nothing of that was written."""

    code = "LOG_SOURCE_MISMATCH"


class HostUnavailable(OpenJobsError):
    """The home's host process cannot be reached or did not start."""


class HostFailed(OpenJobsError):
    """The home's host process met an error it did not expect; its log has the details."""


# --- conditions ---------------------------------------------------------------------------------------


class CancelledError(OpenJobsError):
    """The job was asked to stop."""


class Bug(OpenJobsError):
    """openjobs broke one of its own rules; please report it."""
