"""Taking a session out of a home as one file, and into one: backing up and moving (store/archive.py has the format).

Export locks nothing and stops nobody. What it takes is consistent because of the order in which it takes it:

  1. ledgers that others read (`events.jsonl`), cut at their last whole record
  2. one commit of the repository
  3. `tasks.jsonl`, cut likewise
  4. the runs, each its sidecar first, then the log to the length that the sidecar says

A fact follows the commit it tells of, so 1 says nothing that 2 lacks; output follows the start of what
writes it, and a log grows only behind what its sidecar says.

Import makes the session in a home of its own, below `imports/` of the real one: unpacks, checks, ends what
was unfinished, runs fsck, all where nobody looks. Then one rename makes it visible. What was unfinished
ends as errored, or lost: whatever ran it is not here. No process is looked for or signalled on the word
of an archive: it may be this very machine where the first copy still runs (R7, R9, R10).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .._version import __version__
from ..clock import to_text
from ..durable import Disk, FileLock
from ..errors import (
    ArchiveRefused,
    Damaged,
    FileRefused,
    InvalidInput,
    NewerFormat,
    OpenJobsError,
    OutcomeUnknown,
    ReadFailed,
    Refused,
    RepositoryRefused,
    SessionBusy,
    SessionExists,
    StoreWriteFailed,
)
from ..facts.log import NAME as EVENTS
from ..facts.log import FileFactLog
from ..ids import check_job_id, check_session_id
from ..jobs import Errored, Job
from ..ledger.cursor import START
from ..ledger.lines import Scan, decode_payload, encode, encode_payload
from ..processes import Fact, RunTail, Task, TaskJournal, keeper_identity, layout
from ..processes.client import run_directory, task_entry
from ..processes.rundir import readable_exit, unreadable_exit
from ..processes.runs import incomplete_runs, owner_of
from ..processes.task import end_of, lost
from ..repo import bundle
from ..repo.packscan import PackRegion, index_pack
from ..runlog.binding import LOG, SIDECAR
from ..runlog.sidecar import look
from ..runlog.state import STATE_MOST_BYTES
from ..session import Documents, Memory
from ..store import GitJobStore
from ..store.adopt import adopt_session
from ..store.archive import ABOUT, BUNDLE, LEDGER, RUN_FILE, About, ArchiveReader, ArchiveWriter, Member
from ..store.index import Entry, FileIndex
from ..store.reindex import entry_of
from ..store.rename import all_jobs, renamed

log = logging.getLogger(__name__)

TASKS = "tasks.jsonl"
IMPORTED_JOB = "the session was imported while this job was unfinished; what ran it is not in this home"
IMPORTED_TASK = "the session was imported while this ran; how it ended is known where it was exported, if anywhere"
_NOTHING = "nothing was imported"
_PIECE_BYTES = 1 << 20
_LOOKS = 100
#: in this order a run's files are copied; each may be behind those after it, never ahead
_RUN_ORDER = (SIDECAR, LOG, layout.EXIT, layout.SWEPT, layout.LOST, layout.KEEPER, layout.ORDER)
_temporary_numbers = itertools.count()

#: where in the archive the bundle's pack stands, how long it is, and which objects must be in it
Region = tuple[int, int, set[bytes]]


@attrs.frozen(kw_only=True, slots=True)
class Exported:
    session_id: str
    #: the commit that was taken
    commit_id: str
    path: Path
    size_bytes: int
    jobs: int
    #: jobs and background commands that had not ended; they are in it as they stood
    unfinished_jobs: Sequence[str]
    unfinished_tasks: Sequence[str]


@attrs.frozen(kw_only=True, slots=True)
class Imported:
    session_id: str
    #: the newest commit: the archive's, or the one that ended what was unfinished
    commit_id: str
    jobs: int
    tasks: int
    #: jobs and background commands that were unfinished, and are errored and lost (or as their keeper said) now
    ended_jobs: Sequence[str]
    ended_tasks: Sequence[str]
    #: what fsck looked at
    counts: dict[str, int]


# --- out ----------------------------------------------------------------------------------------------------


def export_session(store: GitJobStore, session_id: str, path: Path) -> Exported:
    """Write the session to a new file at `path`; read back and verified when it returns, and durable.

    Running jobs and commands go on and are in it as they stand. A crash or error leaves no file at `path`.
    Raises `UnknownSession`, `FileRefused` (`path` exists), `Damaged`, `StoreWriteFailed`.
    """
    store.session(session_id)
    path = path.absolute()
    if os.path.lexists(path):
        raise FileRefused(f"{path} exists already and was left as it was; choose another name", path=str(path))
    disk = store.disk
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}-{next(_temporary_numbers)}.tmp")
    try:
        fd = os.open(temporary.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.close(fd)
        fd = disk.create(temporary)
    except OSError as error:
        raise StoreWriteFailed(f"{path} cannot be written: {error.strerror}", errno=error.errno) from error
    try:
        try:
            exported, region = _export(store, session_id, path, fd)
            disk.sync(fd)
        finally:
            os.close(fd)
        _read_back(temporary, path.name, region)
        disk.rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        if isinstance(error, OSError) and not isinstance(error, OpenJobsError):
            raise StoreWriteFailed(f"nothing was exported: {error}", errno=error.errno) from error
        raise
    try:
        disk.sync_dir(path.parent)
    except OSError as error:
        raise OutcomeUnknown(f"{path} was written, but its name may not survive a power cut: {error}") from error
    return exported


def _export(store: GitJobStore, session_id: str, path: Path, fd: int) -> tuple[Exported, Region]:
    directory = store.session_dir(session_id)
    writer = ArchiveWriter(fd, store.disk, session_id)
    with contextlib.ExitStack() as stack:
        ledgers = [_Ledger(directory / name, stack) for name in _ledgers(directory) if name != TASKS]
        documents = store.documents(session_id)
        commit_id = documents.commit_id or ""
        jobs = list(all_jobs(documents))
        if (directory / TASKS).exists():
            ledgers.append(_Ledger(directory / TASKS, stack))
        unfinished_jobs = [job.job_id for job in jobs if not job.terminal]
        unfinished_tasks = [task.task_id for task in TaskJournal(directory, session_id, disk=store.disk).unfinished()]
        branch, refs = bundle.refs_of(directory / "repo", commit_id)
        about = About(
            session_id=session_id,
            commit_id=commit_id,
            branch=branch,
            exported_at=to_text(store.clock.now()),
            openjobs=__version__,
            jobs=len(jobs),
            unfinished_jobs=len(unfinished_jobs),
            unfinished_tasks=len(unfinished_tasks),
        )
        writer.add(ABOUT, [about.encode()])
        for ledger in ledgers:
            writer.add(ledger.name, ledger.pieces())
        region = _add_bundle(writer, directory / "repo", branch, refs)
        for run in _runs(directory):
            _add_run(writer, run)
        writer.close()
    exported = Exported(
        session_id=session_id,
        commit_id=commit_id,
        path=path,
        size_bytes=os.fstat(fd).st_size,
        jobs=len(jobs),
        unfinished_jobs=unfinished_jobs,
        unfinished_tasks=unfinished_tasks,
    )
    return exported, region


class _Ledger:
    """A ledger as it was when this was made: open, and cut behind its last whole record."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.name = path.name
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, self._fd)
        self._size, _ = whole_records(self._fd, path)

    def pieces(self) -> Iterator[bytes]:
        return _pieces(self._fd, self._size, self.name)


def whole_records(fd: int, path: Path) -> tuple[int, int]:
    """How many bytes of a ledger are whole records, and how many of a torn one follow. Raises `Damaged`."""
    scan = Scan(fd, START, path)
    for _ in scan:
        pass
    return scan.position.offset_bytes, scan.tail_bytes


def _pieces(fd: int, size: int, name: str) -> Iterator[bytes]:
    at = 0
    while at < size:
        piece = os.pread(fd, min(_PIECE_BYTES, size - at), at)
        if not piece:
            raise StoreWriteFailed(f"{name} became shorter while it was being read; nothing was exported. Try again.")
        at += len(piece)
        yield piece


def _ledgers(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if LEDGER.match(name) and _is_file(directory / name))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _add_bundle(writer: ArchiveWriter, repo: Path, branch: str, refs: dict[str, str]) -> Region:
    made = bundle.BundleWriter(repo, branch, refs)
    writer.add(BUNDLE, made.pieces())
    head_bytes = len(made.head())
    return writer.at + head_bytes, writer.size - head_bytes, made.ids


def _runs(directory: Path) -> list[Path]:
    runs = directory / "runs"
    try:
        return [runs / name for name in sorted(os.listdir(runs)) if (runs / name).is_dir()]
    except FileNotFoundError:
        return []


def _add_run(writer: ArchiveWriter, run: Path) -> None:
    """Every regular file of a run; what goes away meanwhile (gc) is not in it."""
    names = set(os.listdir(run))
    ordered = [*(name for name in _RUN_ORDER if name in names), *sorted(names - set(_RUN_ORDER))]
    log_bytes: int | None = None
    for name in ordered:
        member = f"runs/{run.name}/{name}"
        if not RUN_FILE.match(member) or not _is_file(run / name):
            continue
        if name == SIDECAR:
            state, log_bytes = _sidecar(run)
            writer.add(member, [state])
            continue
        fd = os.open(run / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if name == LOG and log_bytes is not None:
                size = min(size, log_bytes)
            writer.add(member, _pieces(fd, size, member))
        finally:
            os.close(fd)


def _sidecar(run: Path) -> tuple[bytes, int | None]:
    """The sidecar at one moment, and the length of the log then (None where it cannot be read)."""
    fd = os.open(run / SIDECAR, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(_LOOKS):
            before = os.pread(fd, STATE_MOST_BYTES + 1, 0)
            try:
                committed = look(fd, run / SIDECAR, task_id=None, run_id=None).committed.log_bytes
            except (Damaged, Refused):
                committed = None
            if os.pread(fd, STATE_MOST_BYTES + 1, 0) == before:
                return before, committed
        raise StoreWriteFailed(f"{run / SIDECAR} changes all the time; nothing was exported. Try again.")
    finally:
        os.close(fd)


def _read_back(path: Path, name: str, region: Region) -> None:
    """The file says what it should, and every object of the bundle is whole. Raises `Damaged`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for _ in ArchiveReader(fd, name).members():
            pass
        start, size, wanted = region
        entries, _ = index_pack(PackRegion(fd, start, size, BUNDLE))
    finally:
        os.close(fd)
    if not bundle.same_objects(entries, wanted):
        raise Damaged("an object of the repository is damaged; run `openjobs fsck`. Nothing was exported", path=BUNDLE)


# --- in -----------------------------------------------------------------------------------------------------


def import_session(store: GitJobStore, path: Path, session_id: str | None = None) -> Imported:
    """Make the archive at `path` a session of the store's home, under its own name or `session_id`.

    Everything is checked before anything is visible: sums, every object, ledgers, fsck. What was
    unfinished ends, see above. Nothing but the empty lock `imports/.lock` is left of an import that was
    refused, failed, or killed (the next one clears it), and every error but `OutcomeUnknown` says that nothing
    was imported. Raises `ArchiveRefused`, `Damaged`, `SessionExists`, `JobExists` (its jobs are in this
    home already), `NewerFormat`, `SessionBusy`, `StoreWriteFailed`, `OutcomeUnknown`.
    """
    fd = _open_archive(path)
    try:
        reader = ArchiveReader(fd, str(path))
        target = check_session_id(session_id if session_id is not None else reader.about.session_id)
        if any(known.casefold() == target.casefold() for known in store.sessions()):
            raise SessionExists(
                f"there is a session {target!r} already; {_NOTHING}. Give the copy another name with --session"
            )
        _refuse_too_large(store, path, os.fstat(fd).st_size)
        try:
            with _staging(store) as stage:
                return _import(store, stage, reader, target)
        except RecursionError:
            raise reader.refused("something in it is nested too deeply") from None
        except (Damaged, RepositoryRefused, InvalidInput) as error:
            raise _of_archive(error, path) from error
        except OutcomeUnknown as error:
            if store.has_session(target):
                raise
            # Of a write in the staged home, which is gone: the session cannot appear any more.
            raise StoreWriteFailed(f"{error}; {_NOTHING}") from error
        except OpenJobsError as error:
            raise _with_outcome(error) from error
        except OSError as error:
            raise StoreWriteFailed(f"nothing was imported: {error}", errno=error.errno) from error
    finally:
        os.close(fd)


def _with_outcome(error: OpenJobsError) -> OpenJobsError:
    """The same error, which says what became of the import."""
    if _NOTHING in str(error):
        return error
    said = type(error)(f"{error}; {_NOTHING}", **vars(error))
    if isinstance(error, OSError) and isinstance(said, OSError):
        said.errno = error.errno
    return said


def _of_archive(error: OpenJobsError, path: Path) -> OpenJobsError:
    """What is wrong with a part, told of the archive; a newer format is no damage."""
    if _NOTHING in str(error):
        return error
    said = f"{path}: {error}; {_NOTHING}"
    if isinstance(error, NewerFormat):
        return NewerFormat(said, path=str(path))
    if isinstance(error, Damaged):
        return Damaged(said, path=str(path))
    return ArchiveRefused(said)


def _open_archive(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ArchiveRefused(f"{path} is no regular file; nothing was imported")
    return fd


def _refuse_too_large(store: GitJobStore, path: Path, size: int) -> None:
    assert store.home is not None
    free = shutil.disk_usage(store.home).free
    if size > free:
        raise StoreWriteFailed(f"{path} needs {size:,} bytes, and {store.home} has {free:,} left; nothing was imported")


@contextlib.contextmanager
def _staging(store: GitJobStore) -> Iterator[Path]:
    """A directory that is nobody's home yet, on the home's file system; gone at the end."""
    assert store.home is not None
    imports = store.home / "imports"
    store.disk.make_dirs(imports)
    lock = FileLock(imports / ".lock", store.disk)
    if not lock.acquire(attempts=100):
        raise SessionBusy("another import into this home is under way; nothing was imported. Try again.")
    stage = imports / "staging"
    try:
        shutil.rmtree(stage, ignore_errors=True)  # of an import that was killed
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        lock.release()


def _import(store: GitJobStore, stage: Path, reader: ArchiveReader, target: str) -> Imported:
    disk, about = store.disk, reader.about
    with GitJobStore(stage, clock=store.clock, new_id=store.new_id, disk=disk) as staged:
        directory = staged.session_dir(target)
        disk.make_dirs(directory)
        commit_id = _unpack(reader, directory, store, rename_to=target if target != about.session_id else None)
        if commit_id != about.commit_id:
            raise reader.refused("its bundle is at another commit than it says")
        _rename(staged, target, about.session_id, reader)
        jobs = list(all_jobs(staged.documents(target)))
        entries = [_entry(job, target, reader) for job in jobs]
        staged.index.add(entries)
        for _ in FileFactLog(directory / EVENTS, disk).read():
            pass  # whether each is a fact
        journal = TaskJournal(directory, target, disk=disk, clock=store.clock)
        ended_tasks = [_end_task(store, stage, journal, task) for task in journal.unfinished()]
        tasks = [task_entry(task) for task in journal.tasks()]
        ended_jobs = [_end_job(staged, job) for job in jobs if not job.terminal]
        owners = {task_id: task_id for task_id in ended_tasks}
        owners.update({job.run_id: job.job_id for job in jobs if job.run_id is not None and not job.terminal})
        _finish_logs(store, staged, stage, journal, owners)
        newest = staged.head(target)
    counts = _checked(store, stage, target)
    _refuse_known_tasks(store, tasks)
    _sync_tree(directory, disk)
    adopt_session(store, target, directory, entries)
    return Imported(
        session_id=target,
        commit_id=newest,
        jobs=len(jobs),
        tasks=len(tasks),
        ended_jobs=ended_jobs,
        ended_tasks=ended_tasks,
        counts=counts,
    )


def _checked(store: GitJobStore, stage: Path, session_id: str) -> dict[str, int]:
    """What fsck looked at in the session as it will be seen. Raises `Damaged` with its first finding."""
    with GitJobStore(stage, clock=store.clock, new_id=store.new_id, disk=store.disk) as staged:
        report = staged.fsck(session_id)
    if report.clean:
        return dict(report.counts)
    first = report.findings[0]
    raise Damaged(
        f"the session in it is damaged ({len(report.findings)} findings; {first.where}: {first.what})", path=first.where
    )


def _unpack(reader: ArchiveReader, directory: Path, store: GitJobStore, rename_to: str | None) -> str:
    """The session's files; the commit that its repository is at."""
    disk = store.disk
    commit_id = None
    for member in reader.members():
        if member.name == BUNDLE:
            commit_id = bundle.restore(directory / "repo", disk, member, reader.about.branch, store.clock.now())
        elif LEDGER.match(member.name):
            try:
                _write_ledger(member, directory / member.name, disk, reader.about.session_id, rename_to)
            except InvalidInput as error:
                raise reader.refused(f"{member.name}: {error}") from None
        else:
            disk.make_dirs((directory / member.name).parent)
            _write_file(member, directory / member.name, disk)
    if commit_id is None:
        raise reader.refused(f"{BUNDLE} is missing")
    return commit_id


def _write_file(member: Member, path: Path, disk: Disk) -> None:
    fd = disk.create(path)
    try:
        for piece in member:
            disk.write(fd, piece)
        disk.sync(fd)
    finally:
        os.close(fd)


def _write_ledger(member: Member, path: Path, disk: Disk, session_id: str, rename_to: str | None) -> None:
    """Whole records only, each id in them one; those of background commands name the session that they are in.

    Raises `InvalidInput`, `Damaged`.
    """
    _write_file(member, path, disk)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _, tail_bytes = whole_records(fd, path)
        if tail_bytes:
            raise Damaged(f"{path.name} in it ends in the middle of a record; nothing was imported", path=path.name)
        for line in Scan(fd, START, path):
            data = decode_payload(line.raw, path, line.cursor.start_bytes) or {}
            _check_ids(data, line.cursor.seq)
            if path.name == TASKS and data.get("session", session_id) != session_id:
                raise InvalidInput(f"record {line.cursor.seq} is of session {data['session']!r}")
        if rename_to is None or path.name != TASKS:
            return
        lines = [_renamed_line(line.cursor.seq, line.raw, path, rename_to) for line in Scan(fd, START, path)]
    finally:
        os.close(fd)
    previous = [0, *(seq for seq, _ in lines)]
    disk.replace(path, b"".join(encode(seq, prev, raw) for (seq, raw), prev in zip(lines, previous, strict=False)))


def _check_ids(data: Mapping[str, Any], seq: int) -> None:
    """By their names, of whatever kind the record is: ids become names of directories, of this version or a later.

    Raises `InvalidInput`.
    """
    for name, check in _IDS.items():
        if (value := data.get(name)) is None:
            continue
        try:
            check(value)
        except InvalidInput as error:
            raise InvalidInput(f"{name} of record {seq}: {error}") from None


def _check_name(value: str) -> str:
    """The id of a worker or runner: it names a lease."""
    if not isinstance(value, str) or not layout.RUN_ID.match(value):
        raise InvalidInput(f"{value!r} cannot be the id of a worker")
    return value


_IDS: Mapping[str, Callable[[str], str]] = {
    "task": check_job_id,
    "job": check_job_id,
    "job_id": check_job_id,
    "parent_job_id": check_job_id,
    "run_id": check_job_id,
    "event_id": check_job_id,
    "session": check_session_id,
    "session_id": check_session_id,
    "caller_session_id": check_session_id,
    "worker": _check_name,
    "runner_id": _check_name,
}


def _renamed_line(seq: int, raw: bytes, path: Path, session_id: str) -> tuple[int, bytes]:
    data = decode_payload(raw, path, 0)
    return (seq, encode_payload({**data, "session": session_id})) if data and "session" in data else (seq, raw)


def _rename(staged: GitJobStore, target: str, old_id: str, reader: ArchiveReader) -> None:
    found = staged.documents(target).meta().session_id
    if found != old_id:
        raise reader.refused(f"it says it is session {old_id!r}, and its repository {found!r}")
    if target == old_id:
        return
    [outcome] = staged.repository(target).transact([lambda view: renamed(Documents(view, Memory()), target)])
    if outcome.error is not None:
        raise outcome.error


def _entry(job: Job, session_id: str, reader: ArchiveReader) -> Entry:
    try:
        _check_row(job)
    except InvalidInput as error:
        raise reader.refused(f"a row of a job: {error}") from None
    if job.parent_session_id != session_id:
        raise reader.refused(f"job {job.job_id} in it is of another session")
    return entry_of(job)


def _check_row(job: Job) -> None:
    """The ids of a row by which something is looked for in the home."""
    check_job_id(job.job_id)
    for name in ("parent_job_id", "run_id", "caller_session_id", "runner_id"):
        if (value := getattr(job, name)) is not None:
            _IDS[name](value)


def _end_task(store: GitJobStore, stage: Path, journal: TaskJournal, task: Task) -> str:
    """As its keeper said, where that came along and can be read; else lost."""
    run_dir = run_directory(stage, task.session_id, task.task_id)
    record = readable_exit(run_dir, store.disk)
    end = lost(IMPORTED_TASK, unreadable=unreadable_exit(run_dir)) if record is None else end_of(record)
    journal.record(task.task_id, Fact.ENDED, event_id=store.new_id(), **end)
    return task.task_id


def _end_job(staged: GitJobStore, job: Job) -> str:
    staged.apply(job.job_id, Errored(event_id=staged.new_id(), error=IMPORTED_JOB))
    return job.job_id


def _finish_logs(
    store: GitJobStore, staged: GitJobStore, stage: Path, journal: TaskJournal, ended: Mapping[str, str]
) -> None:
    """Every log has an end, since nothing will be added: what came along of a run's output is drained into it.

    `ended` are the runs of what was ended here, whose log may not have been begun, with their owners.
    """
    session_id = journal.session_id
    begun = {run_id: owner_of(stage, session_id, run_id) or "" for run_id in incomplete_runs(stage, session_id)}
    for run_id, owner_id in {**ended, **begun}.items():
        run_dir = run_directory(stage, session_id, run_id)
        try:
            if run_dir.is_dir():
                _finish_log(run_dir, owner_id, _outcome(staged, journal, owner_id), store.disk)
        except (StoreWriteFailed, OutcomeUnknown, ReadFailed):
            raise
        except (Refused, Damaged) as error:
            log.warning("the log of run %s came in incomplete and stays so: %s", run_id, error)


def _finish_log(run_dir: Path, owner_id: str, outcome: str, disk: Disk) -> None:
    run_id = run_dir.name
    if readable_exit(run_dir, disk) is None:
        disk.replace(run_dir / layout.LOST, json.dumps({"lost_at": time.time(), "task_id": run_id}).encode())
    tail = RunTail(run_dir, owner_id=owner_id, run_id=run_id, keeper=keeper_identity(run_dir), disk=disk)
    try:
        while tail.step():
            pass
        if tail.silent or tail.finished is not None:
            tail.complete(outcome)
    finally:
        tail.rest()


def _outcome(staged: GitJobStore, journal: TaskJournal, owner_id: str) -> str:
    with contextlib.suppress(LookupError):
        return journal.get(owner_id).status.value
    return staged.get(owner_id).status.value


def _refuse_known_tasks(store: GitJobStore, tasks: Sequence[Entry]) -> None:
    """Their index is written before the session can be seen, as that of jobs is."""
    assert store.home is not None
    if not tasks:
        return
    ids = {entry.job_id for entry in tasks}
    index = FileIndex(store.home / "index", store.disk, name="tasks")
    try:
        for entry in index.newest_first():
            if entry.job_id in ids and _has_task(store, entry):
                raise Refused(
                    f"background command {entry.job_id} is in session {entry.session_id} of this home already;"
                    " nothing was imported"
                )
        for at in range(0, len(tasks), 1000):
            index.add(tasks[at : at + 1000])
    finally:
        index.close()


def _has_task(store: GitJobStore, entry: Entry) -> bool:
    with contextlib.suppress(LookupError, FileRefused, Damaged):
        TaskJournal(store.session_dir(entry.session_id), entry.session_id).get(entry.job_id)
        return True
    return False


def _sync_tree(directory: Path, disk: Disk) -> None:
    """The names in every directory; the files were synced when they were written."""
    for at, _, _ in os.walk(directory, topdown=False):
        disk.sync_dir(at)
