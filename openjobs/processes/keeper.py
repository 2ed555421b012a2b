"""The keeper: a small process that is the parent of one background command and outlives the worker.

It is forked from the template (template_main.py), speaks with the worker over one socket, and is for the
rest of the world what it leaves in the run's directory (layout.py). In order:

1. read what to run; lock `keeper`, or refuse: the run has a keeper, or was run before, or is lost
2. report who it is, and wait for the worker's `g`; end of file instead: recorded as never started
3. write down that the command is started; start it; write down its identity
4. copy both pipes to their files, watch for the end, the timeout, the output limit, a stop
5. the command has ended: take what is in the pipes now, make `exit.json` durable, tell the worker
6. end what is left of the tree; `swept.json` names what could not be ended

*The socket.* Worker to keeper: a frame (4 bytes length, JSON: the request), `g`, then any number of `w`
("tell me once when there is output"). Keeper to worker: lines of JSON with `event`: `keeper`, `refused`,
`started`, `unrecorded` (how it ended, while no disk takes the record), `ended`; and the line `+` for output.
The keeper never waits for the worker to read.

*The spill.* With the length may come two descriptors of pipes, where output goes that cannot be kept (disk full).
While one is full the command waits, as it would for a terminal; stops and timeouts go on. Each is closed once the
command has ended and all is through, or nobody reads it any more.

*Guarantees.* One run's command is started at most once, whoever dies. Unless `keeper` says `started_at` it did
not run. An exit record that can be read is true and durable, and so are the bytes it counts.
*Assumptions.* Single-threaded, in a session of its own; the run's directory stays.

Only the standard library, and little of it: this runs once per command, without site packages.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

from ..durable.disk import Disk
from . import layout
from .identity import Identity, Member, System
from .order import STREAMS, OrderEncoder
from .tree import TASK_VARIABLE, Ending, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: most that is read from a pipe at once
CHUNK_BYTES = 65536
#: how long the worker may take over its part of the conversation before `go`
GO_TIMEOUT_S = 60.0
#: how long somebody may hold the lock to look whether we live
LOCK_TIMEOUT_S = 2.0
#: how long an exit record that cannot be written (disk full) is tried again
RECORD_TIMEOUT_S = 600.0
#: how many members of a tree are named in a record
NAMED_MEMBERS = 32
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, prctl(2)
_SET_NAME = 15  # PR_SET_NAME


class Refusal(Exception):
    """This keeper must not run its command; its argument says why in one word."""


class _Stream:
    """One pipe of the command, and the file its bytes go to."""

    def __init__(self, index: int, pipe: int) -> None:
        self.index = index
        self.pipe = pipe
        #: made with the first byte that is kept; -1 before
        self.file = -1
        #: bytes in the file
        self.kept = 0
        #: bytes that came
        self.seen = 0
        #: where goes what cannot be kept, -1 where nowhere; and what of it is on its way
        self.spill = -1
        self.held = b""
        #: nobody can write to the pipe any more
        self.ended = False


class Keeper:
    """One keeper's life; `run` is all of it."""

    def __init__(self, channel: socket.socket, disk: Disk, system: System) -> None:
        self._channel: socket.socket | None = channel
        self._disk = disk
        self._system = system
        self._request: dict[str, Any] = {}
        self._dir = ""
        self._lock = -1
        self._me: Identity | None = None
        self._subreaper = False
        self._wake = -1
        self._terminated = False
        self._asked_to_look = False
        # the command
        self._child: Identity | None = None
        self._child_pid = 0
        self._status: int | None = None
        self._childless = False
        self._started_at = ""
        self._timeout_at: float | None = None
        # its output
        self._streams: dict[int, _Stream] = {}
        self._all_streams: list[_Stream] = []
        self._order = -1
        self._encoder = OrderEncoder()
        self._cut = False
        self._output_error = ""
        #: descriptors for what cannot be kept, one a stream
        self._spills: list[int] = []
        self._exit: dict[str, Any] = {}
        #: records that no disk took yet (name, content, until when); when the first is tried again
        self._unwritten: list[tuple[str, bytes, float]] = []
        self._write_due = 0.0
        self._write_pause_s = 0.05
        self._note_wanted = False
        self._note_due = False
        # its end
        self._ending: Ending | None = None
        self._ending_due = 0.0
        self._cause = ""
        self._reason = ""
        self._completed = False
        #: command and tree have ended
        self._over = False

    # --- the order of things ---

    def run(self) -> None:
        self._catch_signals()
        self._read_request()
        self._subreaper = _become_subreaper()
        try:
            self._take_lock()
        except Refusal as refusal:
            self._tell(event="refused", reason=str(refusal))
            return
        assert self._me is not None
        self._tell(event="keeper", keeper=self._me.to_json())
        if not self._may_go():
            self._never_started()
        elif self._start():
            self._tell(event="started", child=self._child.to_json() if self._child else None)
            self._keep()
        self._close_spills()
        while self._unwritten:
            time.sleep(max(0.0, self._write_due - time.monotonic()))
            self._write_again()
        os.close(self._lock)

    def _keep(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for stream in self._all_streams:
            poll.register(stream.pipe, select.POLLIN)
        assert self._channel is not None
        listening = self._channel.fileno()
        poll.register(listening, select.POLLIN)
        self._reap()
        spilling: dict[int, _Stream] = {}
        while True:
            for fd, _ in poll.poll(self._patience_ms()):
                if fd in self._streams:
                    if not self._copy(self._streams[fd], CHUNK_BYTES):
                        poll.unregister(fd)
                        self._streams.pop(fd).ended = True
                elif fd in spilling:
                    self._spill(spilling[fd])
                elif fd == self._wake:
                    self._on_signal()
                else:
                    self._listen()
            if listening >= 0 and self._channel is None:
                poll.unregister(listening)
                listening = -1
            self._note()
            if self._status is not None and not self._completed:
                self._complete()
            spilling = self._watch_spills(poll, spilling)
            self._write_again()
            if self._timeout_at is not None and time.monotonic() >= self._timeout_at:
                self._timeout_at = None
                self._end("timeout", "", self._request["grace_s"])
            self._over = self._over or not self._go_on_ending()
            if self._over and not spilling:
                return

    def _patience_ms(self) -> int | None:
        due = [self._timeout_at] if self._timeout_at is not None else []
        if self._ending is not None and not self._over:
            due.append(self._ending_due)
        if self._unwritten:
            due.append(self._write_due)
        if not due:
            return None
        # poll takes 31 bits; one that wakes too early only looks again.
        return max(0, min(int((min(due) - time.monotonic()) * 1000) + 1, 2**31 - 1))

    # --- signals ---

    def _catch_signals(self) -> None:
        # The template inherited what was blocked in the thread that started it.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._nothing)
        signal.signal(getattr(signal, layout.STOP_SIGNAL_NAME), self._look)
        signal.signal(signal.SIGTERM, self._terminate)
        # Caught, not ignored: what is ignored would be ignored in the command as well.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, self._nothing)

    def _nothing(self, _number: int, _frame: object) -> None:
        """A handler all the same: a signal that is ignored or left to its default wakes nobody."""

    def _look(self, _number: int, _frame: object) -> None:
        self._asked_to_look = True

    def _terminate(self, _number: int, _frame: object) -> None:
        self._terminated = True

    def _on_signal(self) -> None:
        _drain(self._wake)
        self._reap()
        request = self._stop_request()
        if request is not None:
            self._end("stop", *request)

    def _stop_request(self) -> tuple[str, float] | None:
        """(reason, grace in seconds) of a stop that was asked for since the last look."""
        default = float(self._request["grace_s"])
        if self._terminated:
            self._terminated = False
            return "the keeper was told to end (SIGTERM)", default
        if not self._asked_to_look:
            return None
        self._asked_to_look = False
        try:
            # The command may have put anything there, a pipe that would hold us up, too.
            fd = os.open(self._path(layout.STOP), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                value = json.loads(file.read(65536))
            grace_s = value.get("grace_s")
            return str(value.get("reason") or ""), default if grace_s is None else max(0.0, float(grace_s))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
            # Somebody asked, only not in words that can be read.
            return "", default

    def _reap(self) -> None:
        """Every child that has ended, the command and what became ours as subreaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                self._ending_due = 0.0
                return
            if pid == 0:
                self._childless = False
                return
            if pid == self._child_pid and self._status is None:
                self._status = status

    # --- before the command ---

    def _read_request(self) -> None:
        assert self._channel is not None
        self._channel.settimeout(GO_TIMEOUT_S)
        head, self._spills, _, _ = socket.recv_fds(self._channel, 4, 2)
        for fd in self._spills:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)
        (length,) = struct.unpack(">I", head + _receive(self._channel, 4 - len(head)))
        self._request = json.loads(_receive(self._channel, length))
        self._dir = self._request["run_dir"]
        if not self._request["durable"]:
            self._disk.durable = False
        self._channel.setblocking(False)

    def _take_lock(self) -> None:
        """Hold `keeper`, and say in it who we are. Raises `Refusal`.

        Who looks whether a keeper lives, or buries a run, holds the lock for a moment; hence the patience.
        """
        self._lock = fd = self._disk.open_update(self._path(layout.KEEPER))
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Refusal("held") from None
                time.sleep(0.005)
        if os.path.lexists(self._path(layout.LOST)):
            raise Refusal("lost")
        if os.path.lexists(self._path(layout.EXIT)) or os.pread(fd, 4096, 0).partition(b"\n")[2]:
            raise Refusal("used")
        self._me = self._system.identify(os.getpid())
        assert self._me is not None
        self._disk.truncate(fd, 0)
        self._disk.write(fd, _dump(self._me.to_json()) + b"\n")

    def _may_go(self) -> bool:
        """Whether the worker said go. A stop that came first wins."""
        assert self._channel is not None
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._channel, select.POLLIN)
        deadline = time.monotonic() + GO_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            ready = {fd for fd, _ in poll.poll(int(left * 1000) + 1)}
            if self._wake in ready:
                _drain(self._wake)
            request = self._stop_request()
            if request is not None:
                self._reason = request[0]
                return False
            if self._channel.fileno() in ready:
                try:
                    return self._channel.recv(1) == b"g"
                except BlockingIOError:
                    continue
                except OSError:
                    return False
        return False

    def _never_started(self) -> None:
        self._record(stopped_by=layout.BY_NEVER_STARTED, exit_code=None, signal_number=None)

    # --- the command ---

    def _start(self) -> bool:
        """False when it could not be started, which is recorded then.

        1. `started_at` is written: the command may have run
        2. it is started (by vfork, so it costs no copy of this process)
        3. its identity is written
        Killed between 1 and 2 it did not run, and between 2 and 3 only the mark in its environment finds it.
        Nothing here is synced: it is for who comes after our death, and a power cut ends the command as well.
        """
        try:
            self._started_at = _now()
            self._disk.write(self._lock, _dump({"started_at": self._started_at}) + b"\n")
            ends = self._open_streams()
        except OSError as error:
            self._not_started(error, "what it needs")
            return False
        env = dict(self._request["env"])
        env[TASK_VARIABLE] = self._request["task_id"]
        try:
            process = subprocess.Popen(
                self._request["argv"],
                stdin=subprocess.DEVNULL,
                stdout=ends[0],
                stderr=ends[1],
                cwd=self._request["cwd"],
                env=env,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._not_started(error, self._request["argv"][0])
            return False
        timeout_s = self._request["timeout_s"]
        if timeout_s is not None:
            self._timeout_at = time.monotonic() + timeout_s
        self._child_pid = process.pid
        # Its end is ours to see, with that of every other child.
        process.returncode = 0
        for fd in ends:
            os.close(fd)
        # A command that has ended already is a zombie, but one of ours: its pid is still its own.
        # Where a zombie does not tell when it started, the identity is one that nothing proves.
        self._child = self._system.identify(process.pid, zombie=True) or Identity(process.pid, 0, self._system.boot())
        try:
            self._disk.write(self._lock, _dump({"child": self._child.to_json()}) + b"\n")
        except OSError:
            pass  # without it, who buries us has the mark
        return True

    def _open_streams(self) -> list[int]:
        """The ends of two pipes that the command gets."""
        ends = []
        for index in (0, 1):
            pipe, end = os.pipe()
            os.set_blocking(pipe, False)
            stream = _Stream(index, pipe)
            if len(self._spills) == 2:
                stream.spill = self._spills[index]
            self._all_streams.append(stream)
            self._streams[pipe] = stream
            ends.append(end)
        return ends

    def _not_started(self, error: OSError | ValueError, what: str) -> None:
        number = error.errno if isinstance(error, OSError) else None
        named = error.filename if isinstance(error, OSError) and error.filename else what
        missing = number in (errno.ENOENT, errno.ENOTDIR) and named == self._request["argv"][0]
        self._record(
            stopped_by=layout.BY_NOT_FOUND if missing else layout.BY_NOT_STARTED,
            exit_code=layout.CODE_NOT_FOUND if missing else layout.CODE_NOT_STARTED,
            signal_number=None,
            error=f"{named}: {os.strerror(number) if number else error}",
        )

    # --- output ---

    def _copy(self, stream: _Stream, limit: int) -> int:
        """Take what is in a pipe, at most `limit` bytes; how many came, 0 at its end."""
        try:
            data = os.read(stream.pipe, limit)
        except BlockingIOError:
            return -1
        if data and not self._completed:
            stream.seen += len(data)
            self._note_due = True
            self._store(stream, data)
        return len(data)

    def _store(self, stream: _Stream, data: bytes) -> None:
        if self._output_error:
            self._pass_on(stream, data)
            return
        before = stream.kept
        keep = data[: self._request["output_limit_bytes"] - sum(s.kept for s in self._all_streams)]
        if keep:
            try:
                if stream.file < 0:
                    stream.file = self._disk.create(self._path(STREAMS[stream.index]))
                if self._order < 0:
                    self._order = self._disk.create(self._path(layout.ORDER))
                self._disk.write(stream.file, keep)
                stream.kept += len(keep)
                self._disk.write(self._order, self._encoder.entry(stream.index, len(keep)))
            except OSError as error:
                # The command goes on; what it writes from here is counted and named as not kept.
                self._output_error = f"output could not be written: {os.strerror(error.errno or 0)}"
                stream.kept = os.fstat(stream.file).st_size if stream.file >= 0 else 0
                self._pass_on(stream, data[stream.kept - before :])
                return
        if len(keep) < len(data):
            self._limit_reached()

    def _limit_reached(self) -> None:
        if not self._cut:
            self._cut = True
            if self._request["on_limit"] == "stop":
                self._end("output_limit", "", self._request["grace_s"])

    # --- output that no disk takes ---

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        """To whoever waits for it, if anybody does. The limit holds for it, too."""
        if stream.spill >= 0:
            room = self._request["output_limit_bytes"] - sum(s.seen for s in self._all_streams) + len(data)
            if room < len(data):
                self._limit_reached()
            stream.held += data[: max(0, room)]
            self._spill(stream)

    def _spill(self, stream: _Stream) -> None:
        """As much of what is held as the pipe takes now."""
        try:
            while stream.held:
                stream.held = stream.held[os.write(stream.spill, stream.held) :]
        except BlockingIOError:
            return
        except OSError:
            stream.held = b""  # nobody reads it any more
            self._close_spill(stream)
        if self._completed or stream.ended:
            self._close_spill(stream)

    def _close_spill(self, stream: _Stream) -> None:
        if stream.spill >= 0:
            os.close(stream.spill)
            stream.spill = -1

    def _close_spills(self) -> None:
        """Nothing comes any more, whatever is still to be written down."""
        for stream in self._all_streams:
            self._close_spill(stream)
        if not self._all_streams:
            for fd in self._spills:
                os.close(fd)

    def _watch_spills(self, poll: select.poll, before: dict[int, _Stream]) -> dict[int, _Stream]:
        """The spills that have to take something first; the pipes behind them rest meanwhile."""
        if not self._spills:
            return before
        for stream in self._all_streams:
            if stream.spill >= 0 and not stream.held:
                self._spill(stream)  # closes it at the end
        # A pipe that rests is not read, so it does not end: whose spill takes something is watched again.
        now = {stream.spill: stream for stream in self._all_streams if stream.held}
        for fd in now.keys() - before.keys():
            poll.register(fd, select.POLLOUT)
            poll.unregister(now[fd].pipe)
        for fd in before.keys() - now.keys():
            poll.unregister(fd)
            poll.register(before[fd].pipe, select.POLLIN)
        return now

    def _drain_pipes(self) -> None:
        """What is in the pipes at this moment, and not what others, who still hold them, write later."""
        for stream in self._streams.values():
            waiting = struct.unpack("i", fcntl.ioctl(stream.pipe, termios.FIONREAD, bytes(4)))[0]
            while waiting > 0:
                count = self._copy(stream, min(waiting, CHUNK_BYTES))
                if count <= 0:
                    break
                waiting -= count

    # --- the end ---

    def _end(self, cause: str, reason: str, grace_s: float) -> None:
        """Begin to end the tree; the first cause is the cause."""
        if self._ending is not None:
            self._ending.hasten(grace_s)
        else:
            self._ending = Ending(
                self._system,
                self._members,
                grace_s=grace_s,
                # A subreaper without children has no tree left; nothing can get away from under it.
                nobody=(lambda: self._childless) if self._subreaper else None,
            )
            if not self._completed:
                self._cause, self._reason = cause, reason
        self._ending_due = 0.0

    def _members(self) -> list[Member]:
        self._reap()
        if self._childless and self._subreaper:
            return []
        task_id = None if self._subreaper else self._request["task_id"]
        return find(self._system, root=os.getpid(), leader=self._child, task_id=task_id)

    def _go_on_ending(self) -> bool:
        """The next step of an ending that has begun. False when the keeper has nothing left to do."""
        if self._ending is None:
            return not self._completed
        if time.monotonic() < self._ending_due:
            return True
        pause_s = self._ending.step()
        if self._status is not None and not self._completed:
            # It ended under this very step: its record comes before the rest of the tree.
            self._ending_due = 0.0
            self._complete()
            return True
        if pause_s is not None:
            self._ending_due = time.monotonic() + pause_s
            return True
        if not self._completed:
            # It could not be killed; the keeper stays for as long as it lives.
            self._ending_due = time.monotonic() + 1.0
            return True
        self._swept(self._ending)
        return False

    def _complete(self) -> None:
        self._drain_pipes()
        self._timeout_at = None
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        number = -code if code < 0 else None
        left = self._members()
        self._record(
            stopped_by=self._stopped_by(number),
            exit_code=code if code >= 0 else None,
            signal_number=number,
            remaining=left,
        )
        self._completed = True
        if self._ending is None and not (self._subreaper and self._childless):
            self._end("", "", self._request["grace_s"])

    def _stopped_by(self, number: int | None) -> str:
        ending = self._ending
        touched = ending is not None and (self._child in ending.termed or self._child in ending.killed)
        if ending is None or not touched:
            return layout.BY_EXIT if number is None else layout.BY_SIGNAL
        if self._cause in (layout.BY_TIMEOUT, layout.BY_OUTPUT_LIMIT):
            return self._cause
        if number == signal.SIGKILL:
            return layout.BY_KILL if self._child in ending.killed else layout.BY_SIGNAL
        return layout.BY_TERM

    def _record(
        self,
        *,
        stopped_by: str,
        exit_code: int | None,
        signal_number: int | None,
        error: str = "",
        remaining: list[Member] | None = None,
    ) -> None:
        """Make `exit.json` and the bytes it counts durable, then tell the worker."""
        remaining = remaining or []
        out, err = self._all_streams if len(self._all_streams) == 2 else (None, None)
        assert self._me is not None
        self._exit = record = {
            "version": 1,
            "task_id": self._request["task_id"],
            "keeper": self._me.to_json(),
            "child": self._child.to_json() if self._child else None,
            "started_at": self._started_at or None,
            "ended_at": _now(),
            "exit_code": exit_code,
            "signal": signal_number,
            "stopped_by": stopped_by,
            "reason": self._reason,
            "error": error or self._output_error,
            "stdout_bytes": out.kept if out else 0,
            "stderr_bytes": err.kept if err else 0,
            "stdout_seen_bytes": out.seen if out else 0,
            "stderr_seen_bytes": err.seen if err else 0,
            "truncated": self._cut or bool(self._output_error),
            "remaining": _named(remaining),
            "remaining_count": len(remaining),
        }
        self._sync_output()
        self._write(layout.EXIT, record)
        if self._unwritten:
            self._tell(event="unrecorded", record=record)

    def _sync_output(self) -> None:
        files = [s.file for s in self._all_streams if s.kept]
        for fd in [*files, self._order] if files else []:
            try:
                self._disk.sync_data(fd)
            except OSError as error:
                self._output_error = (
                    self._output_error or f"output could not be synced: {os.strerror(error.errno or 0)}"
                )

    def _write(self, name: str, record: object) -> None:
        """Make a record durable, now or as soon as the disk takes it: a full one has room again at some time, and
        only the keeper knows how its command ended."""
        self._unwritten.append((name, _dump(record), time.monotonic() + RECORD_TIMEOUT_S))
        self._write_again()

    def _write_again(self) -> None:
        while self._unwritten and time.monotonic() >= self._write_due:
            name, data, until = self._unwritten[0]
            durable = gone = False
            try:
                self._disk.replace(self._path(name), data)
                durable = True
            except OSError as error:
                gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
            if not durable and not gone and time.monotonic() < until:
                self._write_due = time.monotonic() + self._write_pause_s
                self._write_pause_s = min(self._write_pause_s * 2, 5.0)
                return
            del self._unwritten[0]
            if name == layout.EXIT:
                self._tell(event="ended", durable=durable, record=self._exit)

    def _swept(self, ending: Ending) -> None:
        ended = len((ending.termed | ending.killed) - {self._child})
        if not ended and not ending.leftovers:
            return
        self._write(layout.SWEPT, {"version": 1, "ended": ended, "leftovers": _named(ending.leftovers), "at": _now()})

    # --- the worker ---

    def _tell(self, **event: object) -> None:
        """One line to the worker, if it is there and has room; what it must know is in the directory too."""
        self._send(_dump(event) + b"\n")

    def _note(self) -> None:
        if self._note_wanted and self._note_due:
            self._note_wanted = self._note_due = False
            self._send(b"+\n")

    def _listen(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._note_wanted = True
        else:
            self._channel.close()
            self._channel = None

    def _send(self, data: bytes) -> None:
        if self._channel is not None:
            try:
                self._channel.send(data)
            except OSError:
                pass  # it went away, or reads nothing: the directory has it all

    def leave_word(self, error: Exception) -> None:
        """A fault of ours, for whoever looks into the directory of a run that was lost by it."""
        import traceback

        if self._dir:
            with open(self._path(layout.FAULT), "w") as file:
                traceback.print_exception(error, file=file)

    def _path(self, name: str) -> str:
        return f"{self._dir}/{name}"


def run(channel: socket.socket, disk: Disk, system: System) -> None:
    """A keeper from its first to its last moment; call it in a process made for it."""
    os.setsid()
    keeper = Keeper(channel, disk, system)
    try:
        keeper.run()
    except Exception as error:
        keeper.leave_word(error)


def prepare(system: System) -> None:
    """What every keeper needs and the template can pay for once."""
    _libc()
    system.boot()
    # A worker under nohup ignores some; its commands are to start like any other. (The two that Python
    # itself ignores are given back to every command by subprocess.)
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


_loaded: list[Any] = []


def _libc() -> Any:
    """The C library on Linux, else None; ctypes is loaded only here."""
    if not _loaded:
        if sys.platform == "linux":
            try:
                import ctypes

                _loaded.append(ctypes.CDLL(None))
            except (ImportError, OSError):
                _loaded.append(None)
        else:
            _loaded.append(None)
    return _loaded[0]


def _become_subreaper() -> bool:
    """Orphans of the command's tree become our children (prctl(2)), so that none can get away."""
    libc = _libc()
    if libc is None:
        return False
    libc.prctl(_SET_NAME, b"openjobs-keeper", 0, 0, 0)
    return bool(libc.prctl(_SUBREAPER, 1, 0, 0, 0) == 0)


def _receive(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = channel.recv(min(count - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _named(members: list[Member]) -> list[dict[str, object]]:
    return [{**m.identity.to_json(), "name": m.name} for m in members[:NAMED_MEMBERS]]


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _now() -> str:
    """ISO-8601 UTC with milliseconds, as clock.py writes it."""
    milliseconds = time.time_ns() // 1_000_000
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(milliseconds // 1000))}.{milliseconds % 1000:03d}Z"
