"""What everybody but the keeper does with a run's directory: read it, ask for a stop, bury the dead.

Everything here works from any process that can read the directory, on a run whose worker is long gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..clock import from_text
from ..durable import Disk, is_locked
from ..durable.files import unreadable
from ..errors import Damaged
from . import layout, tree
from .identity import Identity, Member, System, from_json

log = logging.getLogger(__name__)

#: no file that a keeper writes about itself is larger
_MAX_BYTES = 1 << 20


@attrs.frozen(kw_only=True, slots=True)
class ExitRecord:
    """How a command ended, as its keeper saw it. What is in `exit.json`, and `swept.json` where there is one."""

    task_id: str
    keeper: Identity
    #: None when the command never ran
    child: Identity | None
    #: ISO-8601; None when the command never ran
    started_at: str | None
    ended_at: str
    #: None after a signal, and when it never started
    exit_code: int | None
    #: the number of the signal that ended it
    signal: int | None
    #: one of `layout.BY_…`
    stopped_by: str
    #: what who asked for the stop gave as reason
    reason: str = ""
    #: why it could not be started, or why output could not be kept; "" where all went well
    error: str = ""
    #: bytes in the files `stdout` and `stderr`
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    #: bytes that the command wrote
    stdout_seen_bytes: int = 0
    stderr_seen_bytes: int = 0
    #: whether less was kept than seen
    truncated: bool = False
    #: who of its tree still lived when it ended: pid, start, boot, name; at most 32 of `remaining_count`
    remaining: Sequence[Mapping[str, Any]] = ()
    remaining_count: int = 0
    #: who could not be ended afterwards; None while that is not known
    leftovers: Sequence[Mapping[str, Any]] | None = None

    @property
    def ran(self) -> bool:
        return self.child is not None and self.stopped_by not in (layout.BY_NOT_FOUND, layout.BY_NOT_STARTED)


def exit_record(value: Mapping[str, Any], swept: Mapping[str, Any] | None = None) -> ExitRecord:
    """The record that a keeper wrote or sent. Raises ValueError for anything else."""
    try:
        if value["version"] != 1:
            raise ValueError(f"exit records of version {value['version']!r} are not known here")
        from_text(value["ended_at"])
        if value["started_at"] is not None:
            from_text(value["started_at"])
        remaining_count = _number(value["remaining_count"])
        if swept is not None:
            leftovers: Sequence[Mapping[str, Any]] | None = _named(swept["leftovers"])
        else:
            leftovers = [] if remaining_count == 0 else None
        return ExitRecord(
            task_id=str(value["task_id"]),
            keeper=from_json(value["keeper"]),
            child=from_json(value["child"]) if value["child"] is not None else None,
            started_at=value["started_at"],
            ended_at=value["ended_at"],
            exit_code=_number(value["exit_code"]) if value["exit_code"] is not None else None,
            signal=_number(value["signal"]) if value["signal"] is not None else None,
            stopped_by=str(value["stopped_by"]),
            reason=str(value["reason"]),
            error=str(value["error"]),
            stdout_bytes=_number(value["stdout_bytes"]),
            stderr_bytes=_number(value["stderr_bytes"]),
            stdout_seen_bytes=_number(value["stdout_seen_bytes"]),
            stderr_seen_bytes=_number(value["stderr_seen_bytes"]),
            truncated=bool(value["truncated"]),
            remaining=_named(value["remaining"]),
            remaining_count=remaining_count,
            leftovers=leftovers,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an exit record: {error!r}") from None


def read_exit(run_dir: Path) -> ExitRecord | None:
    """How the command ended; None while there is no record. Raises `Damaged`.

    Where only the word about the rest of its tree cannot be read, `leftovers` are not known.
    """
    path = run_dir / layout.EXIT
    value = _read(path)
    if value is None:
        return None
    try:
        record = exit_record(value)
    except ValueError as error:
        raise Damaged(f"{path}: {error}", path=str(path)) from None
    try:
        swept = _read(run_dir / layout.SWEPT)
        return record if swept is None else exit_record(value, swept)
    except (Damaged, ValueError) as error:
        log.debug("who was left of a command's tree is not known: %s", error)
        return attrs.evolve(record, leftovers=None)


def check_swept(run_dir: Path) -> None:
    """Raises `Damaged` where the word about the rest of a run's tree cannot be read, which hides nothing else."""
    path = run_dir / layout.SWEPT
    value = _read(path)
    try:
        if value is not None:
            _named(value.get("leftovers"))
    except ValueError as error:
        raise Damaged(f"{path}: {error}", path=str(path)) from None


def readable_exit(run_dir: Path, disk: Disk) -> ExitRecord | None:
    """As `read_exit`, of a run that nobody writes to any more: what cannot be read is moved aside, unchanged, and
    counts as never written; see `unreadable_exit`.

    Only with the keeper's lock held, or in a copy: a living keeper may be about to write the record.
    """
    try:
        return read_exit(run_dir)
    except Damaged as error:
        path = run_dir / layout.EXIT
        aside = _free_name(path)
        disk.rename(path, aside)
        disk.sync_dir(run_dir)
        log.error("%s; it is kept as %s", error, aside.name)
        return None


def is_of_exit(error: Exception, run_dir: Path) -> bool:
    """Whether the run's exit record is what is damaged, and not its log. The error knows; by now another may stand
    there."""
    return isinstance(error, Damaged) and error.path == str(run_dir / layout.EXIT)


def unreadable_exit(run_dir: Path) -> str:
    """The name of the exit record that was moved aside (the first one), or ""."""
    name = layout.EXIT + layout.UNREADABLE
    return name if os.path.lexists(run_dir / name) else ""


def keeper_lives(run_dir: Path) -> bool:
    """Whether a keeper holds its lock; the lock is its proof of life."""
    try:
        return is_locked(run_dir / layout.KEEPER)
    except NotADirectoryError:
        return False


def keeper_identity(run_dir: Path) -> Identity | None:
    """Who the run's keeper is or was; None before it wrote that down. Only a claim until `System` proves it."""
    return _identity(_keeper_line(run_dir, 0))


def child_identity(run_dir: Path) -> Identity | None:
    """Who the run's command is or was; None when it never came so far. Only a claim until `System` proves it."""
    value = _keeper_line(run_dir, 2)
    return _identity(value.get("child")) if isinstance(value, dict) else None


def may_have_started(run_dir: Path) -> bool:
    """Whether the keeper wrote down that it starts the command; without that nothing ran."""
    return bool(_bytes(run_dir / layout.KEEPER).partition(b"\n")[2])


def is_lost(run_dir: Path) -> bool:
    return os.path.lexists(run_dir / layout.LOST)


def request_stop(run_dir: Path, *, reason: str = "", grace_s: float | None = None, disk: Disk, system: System) -> bool:
    """Ask the run's keeper to end the tree: TERM, `grace_s` (None: what it was started with), KILL.

    True when a living keeper, proven by its lock and its identity, was told; the end comes later, as an exit
    record. False when there is none: the run has ended, or is lost. May be repeated; a smaller grace hastens.
    """
    if not keeper_lives(run_dir):
        return False
    identity = _identity_of_living_keeper(run_dir)
    if identity is None or not system.is_alive(identity):
        return False
    request = {"reason": reason, "grace_s": grace_s, "requested_at": time.time()}
    try:
        disk.replace(run_dir / layout.STOP, json.dumps(request).encode())
        number = getattr(signal, layout.STOP_SIGNAL_NAME)
    except OSError:
        number = signal.SIGTERM  # a full disk: its keeper ends the tree all the same, with the grace it has
    sent = system.send(identity, number)
    # Somebody may have stopped the keeper, too; it would look only when it goes on.
    system.send(identity, signal.SIGCONT)
    return sent


def wait_for_exit(
    run_dir: Path,
    *,
    timeout_s: float | None = None,
    cancel_event: threading.Event | None = None,
    system: System,
) -> ExitRecord | None:
    """Wait for the exit record of a run that another process started. None on timeout or cancel, and when
    the keeper is dead without one: nobody will write it then (see `bury`). Raises `Damaged` where a dead one's
    cannot be read.

    Looks often at first, then twenty times a second. Who started the run waits on its `Run` instead.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = 0.002
    with _death_of(_identity_of_living_keeper(run_dir), system) as death:
        while True:
            # The order matters: a keeper may write its record and end between two looks.
            lives = keeper_lives(run_dir)
            try:
                record = read_exit(run_dir)
            except Damaged:
                if not lives:
                    raise
                record = None  # a living keeper puts its own in the place
            if record is not None or not lives or (cancel_event is not None and cancel_event.is_set()):
                return record
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            death(pause_s if left is None else min(pause_s, left))
            pause_s = min(pause_s * 2, 0.05)


def wait_gone(run_dir: Path, *, timeout_s: float) -> bool:
    """Whether the run's keeper left within the time: then its tree has ended, too, or `swept.json` names who has
    not, unless the keeper was killed."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while keeper_lives(run_dir):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)
    return True


@attrs.frozen(kw_only=True, slots=True)
class Burial:
    """What was found out about a run without a keeper."""

    #: the outcome, where the keeper left one; the run is not lost then
    record: ExitRecord | None
    #: the name under which an exit record that nobody can read is kept, or ""
    unreadable: str = ""
    #: whether the command may have run; False only when it is proven that it did not
    may_have_run: bool
    #: what of its tree could not be ended: pid, start, boot, name
    leftovers: Sequence[Mapping[str, Any]] = ()


@attrs.frozen(kw_only=True, slots=True)
class LastWords:
    """What a keeper left that is dead."""

    record: ExitRecord | None
    keeper: Identity | None
    #: whether it wrote down that it starts the command
    started: bool


def last_words(run_dir: Path, *, task_id: str, disk: Disk) -> LastWords | None:
    """As `bury`, without the end of the tree."""
    disk.make_dirs(run_dir)
    fd = disk.open_update(run_dir / layout.KEEPER)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        words = LastWords(
            record=readable_exit(run_dir, disk), keeper=keeper_identity(run_dir), started=may_have_started(run_dir)
        )
        if words.record is None and not is_lost(run_dir):
            disk.replace(run_dir / layout.LOST, json.dumps({"lost_at": time.time(), "task_id": task_id}).encode())
        return words
    finally:
        os.close(fd)


def bury(
    run_dir: Path,
    *,
    task_id: str,
    disk: Disk,
    system: System,
    boot: str | None = None,
    grace_s: float = layout.DEFAULT_GRACE_S,
) -> Burial | None:
    """Settle a run whose keeper is dead: its exit record, or a durable tombstone and the end of what is left.

    None when a keeper lives, and nothing was done. With the keeper's lock held the record is read, else `lost` is
    written; a keeper that comes late finds it and starts nothing. A record that cannot be read is moved aside first:
    it is never believed, and never lost. Then the command's tree is ended: its process by proven identity, everybody
    by the run's variable in the environment. May be repeated, and die anywhere.

    `boot` is the boot in which the run was begun, from the caller's own records. Only in that boot the absence
    of `started_at` proves that nothing ran: it is not synced, so a power cut may have taken it.
    """
    words = last_words(run_dir, task_id=task_id, disk=disk)
    if words is None:
        return None
    record, started = words.record, words.started
    same_boot = system.boot() == (words.keeper.boot if words.keeper is not None else boot)
    leftovers: Sequence[Member] = ()
    if started:
        # Without that word nothing ran, or in a boot of which nobody lives.
        leader = child_identity(run_dir)
        leftovers = tree.end(
            system, lambda: tree.find(system, leader=leader, task_id=task_id), grace_s=grace_s
        ).leftovers
    return Burial(
        record=record,
        unreadable=unreadable_exit(run_dir) if record is None else "",
        may_have_run=record.ran if record is not None else started or not same_boot,
        leftovers=[{**m.identity.to_json(), "name": m.name} for m in leftovers],
    )


def _identity_of_living_keeper(run_dir: Path) -> Identity | None:
    """A keeper writes its identity right after it has the lock; wait that moment."""
    for _ in range(200):
        identity = keeper_identity(run_dir)
        if identity is not None or not keeper_lives(run_dir):
            return identity
        time.sleep(0.005)
    return None


def _free_name(path: Path) -> Path:
    """What was moved aside before stays."""
    aside = path.with_name(path.name + layout.UNREADABLE)
    number = 0
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}{layout.UNREADABLE}-{number}")
    return aside


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} is not a number that a keeper writes")
    return value


def _named(value: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(member, dict) for member in value):
        raise ValueError("members of a tree are a list of objects")
    return value


def _identity(value: object) -> Identity | None:
    try:
        return from_json(value)
    except ValueError:
        return None


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file; None where there is none. Raises `Damaged`."""
    data = _bytes(path)
    if not data:
        if not os.path.lexists(path):
            return None
        data = _bytes(path)  # it may have come between the two looks
    value = _parse(data)
    if not isinstance(value, dict):
        raise Damaged(f"{path} is not what a keeper writes", path=str(path))
    return value


def _keeper_line(run_dir: Path, number: int) -> object:
    """What the keeper wrote in that line, when it is whole; else None."""
    lines = _bytes(run_dir / layout.KEEPER).split(b"\n")
    return _parse(lines[number]) if number < len(lines) - 1 else None


def _parse(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _bytes(path: Path) -> bytes:
    """A small file's content; nothing where there is none. Raises as `open_regular` does."""
    fd = open_regular(path)
    if fd < 0:
        return b""
    try:
        return os.read(fd, min(os.fstat(fd).st_size, _MAX_BYTES))
    except OSError as error:  # its place on the medium is bad
        raise unreadable(error, str(path)) from None
    finally:
        os.close(fd)


def open_regular(path: Path) -> int:
    """A descriptor for reading a file of a run; -1 where there is none. Waits for no pipe, follows no link.

    Raises `Damaged` for what is no file or cannot be opened, and `ReadFailed` where that says nothing of the file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    except OSError as error:
        raise unreadable(error, str(path)) from None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise Damaged(f"{path} is not a file", path=str(path))


@contextlib.contextmanager
def _death_of(identity: Identity | None, system: System) -> Any:
    """A function that waits some seconds, or less when that process ends."""
    fd = -1
    if sys.platform == "linux" and identity is not None:
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(identity.pid)
    if fd < 0 or identity is None or not system.is_alive(identity):
        if fd >= 0:
            os.close(fd)
        yield time.sleep
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        yield lambda seconds: poll.poll(int(seconds * 1000) + 1)
    finally:
        os.close(fd)
