"""Which process is meant: its pid, when it started, and in which boot of the machine.

A pid alone says nothing, since the system gives it out again. Nothing in openjobs signals a process
by its pid: `System.send` proves the identity first and signals only what it proved.

On Linux a descriptor of the process (`pidfd_open(2)`) is opened *before* the start time is compared,
so the signal goes to the very process that was compared: whoever has the pid after the comparison
started later than the identity was written down, and would have failed it. Elsewhere psutil compares
and `kill(2)` follows at once; a reuse within those microseconds cannot be excluded there.

Only the standard library at import: the keeper (keeper.py) runs without site packages.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

_PID_MAX = 2**31 - 1
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Identity:
    """One process, for ever. A value.

    `start` is when it started, in the system's own finest unit (Linux: clock ticks since boot,
    elsewhere microseconds since the epoch); `boot` names the boot of the machine.
    """

    __slots__ = ("boot", "pid", "start")

    def __init__(self, pid: int, start: int, boot: str) -> None:
        self.pid = pid
        self.start = start
        self.boot = boot

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Identity(pid={self.pid!r}, start={self.start!r}, boot={self.boot!r})"

    def _key(self) -> tuple[int, int, str]:
        return (self.pid, self.start, self.boot)

    def to_json(self) -> dict[str, object]:
        return {"pid": self.pid, "start": self.start, "boot": self.boot}


def from_json(value: object) -> Identity:
    """The identity that `to_json` wrote. Raises ValueError for anything of another shape; what it
    accepts is still only a claim, which `System` proves."""
    if not isinstance(value, dict):
        raise ValueError("an identity is an object")
    pid, start, boot = value.get("pid"), value.get("start"), value.get("boot")
    if type(pid) is not int or type(start) is not int or not isinstance(boot, str):
        raise ValueError("an identity has pid, start and boot")
    return Identity(pid, start, boot)


class Member:
    """One line of the process table, as it was at one moment."""

    __slots__ = ("identity", "living", "name", "ppid", "session")

    def __init__(self, identity: Identity, ppid: int, session: int, name: str, living: bool) -> None:
        self.identity = identity
        self.ppid = ppid
        #: session id, or 0 where it is unknown
        self.session = session
        self.name = name
        #: False for a zombie: it has ended, and its parent has not looked yet
        self.living = living


class System(ABC):
    """What the operating system says about processes, and the one way to signal one.

    Guarantees: `send` signals only a process that it proved to be the identity's, never pid 0, 1 or a
    negative number (which mean groups), never ourselves or the leader of our group, and nothing from
    another boot. It never signals a group.
    Assumptions: one machine, one pid namespace.
    """

    @abstractmethod
    def boot(self) -> str:
        """The name of this boot of the machine."""

    @abstractmethod
    def identify(self, pid: int, *, zombie: bool = False) -> Identity | None:
        """Who has that pid now; None where nobody does, or only a zombie (unless that is wanted, too)."""

    @abstractmethod
    def table(self) -> Iterator[Member]:
        """Every process that can be seen, zombies too."""

    @abstractmethod
    def has_variable(self, pid: int, variable: bytes) -> bool:
        """Whether the process was started with `variable` (`NAME=value`) in its environment; False
        also where we may not look."""

    @abstractmethod
    def _send(self, identity: Identity, signum: int) -> bool:
        """As `send`, for an identity that may be one of a process."""

    def is_alive(self, identity: Identity) -> bool:
        """Whether that very process runs. A zombie does not."""
        return self._plausible(identity) and self.identify(identity.pid) == identity

    def send(self, identity: Identity, signum: int) -> bool:
        """Signal that very process. False when nothing was sent: it has ended, the pid is another's,
        the identity is not one we signal, or the system does not let us."""
        if not self._plausible(identity) or identity.pid in (os.getpid(), os.getpgrp()):
            return False
        return self._send(identity, signum)

    def _plausible(self, identity: Identity) -> bool:
        return (
            type(identity.pid) is int
            and type(identity.start) is int
            and 1 < identity.pid <= _PID_MAX
            and identity.boot == self.boot()
        )


class LinuxSystem(System):
    """`/proc` and pidfd."""

    def __init__(self, send: Callable[[int, int], None] | None = None) -> None:
        #: (descriptor of a process, signal); the only effect on another process
        self._signal = send
        self._boot = ""

    def boot(self) -> str:
        if not self._boot:
            with open(_BOOT_ID) as file:
                self._boot = file.read().strip()
        return self._boot

    def identify(self, pid: int, *, zombie: bool = False) -> Identity | None:
        member = self._member(pid)
        return member.identity if member is not None and (member.living or zombie) else None

    def table(self) -> Iterator[Member]:
        for name in os.listdir("/proc"):
            if name.isdigit():
                member = self._member(int(name))
                if member is not None:
                    yield member

    def has_variable(self, pid: int, variable: bytes) -> bool:
        data = _read(f"/proc/{pid}/environ")
        return data is not None and variable in data.split(b"\0")

    def _send(self, identity: Identity, signum: int) -> bool:
        if sys.platform != "linux":
            return False
        try:
            fd = os.pidfd_open(identity.pid)
        except OSError as error:
            return error.errno == errno.ENOSYS and self._send_by_pid(identity, signum)
        try:
            if self.identify(identity.pid) != identity:
                return False
            if self._signal is not None:
                self._signal(fd, signum)
            else:
                signal.pidfd_send_signal(fd, signum)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def _send_by_pid(self, identity: Identity, signum: int) -> bool:
        """For sandboxes that imitate Linux without pidfd; the pid may be reused between the two steps."""
        if self._signal is not None or self.identify(identity.pid) != identity:
            return False
        try:
            os.kill(identity.pid, signum)
        except OSError:
            return False
        return True

    def _member(self, pid: int) -> Member | None:
        data = _read(f"/proc/{pid}/stat")
        if not data:
            return None
        # The name may hold spaces and parentheses; what follows its last parenthesis does not (proc(5)).
        head, _, tail = data.rpartition(b")")
        fields = tail.split()
        # A leader that left its other threads running looks like a zombie and is not one.
        living = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
        name = head.partition(b"(")[2].decode(errors="replace")
        return Member(Identity(pid, int(fields[19]), self.boot()), int(fields[1]), int(fields[3]), name, living)


class PortableSystem(System):
    """psutil, for macOS."""

    def __init__(self, send: Callable[[int, int], None] = os.kill) -> None:
        import psutil

        self._psutil = psutil
        #: (pid, signal); the only effect on another process
        self._signal = send
        self._boot = ""

    def boot(self) -> str:
        if not self._boot:
            self._boot = _darwin_boot() or f"boot-{int(self._psutil.boot_time())}"
        return self._boot

    def identify(self, pid: int, *, zombie: bool = False) -> Identity | None:
        try:
            process = self._psutil.Process(pid)
            wanted = zombie or process.status() != self._psutil.STATUS_ZOMBIE
            return self._identity(pid, process.create_time()) if wanted else None
        except (self._psutil.Error, OSError, ValueError):
            return None

    def table(self) -> Iterator[Member]:
        for process in self._psutil.process_iter():
            try:
                with process.oneshot():
                    identity = self._identity(process.pid, process.create_time())
                    living = process.status() != self._psutil.STATUS_ZOMBIE
                    yield Member(identity, process.ppid(), _session(process.pid), process.name(), living)
            except (self._psutil.Error, OSError):
                continue

    def has_variable(self, pid: int, variable: bytes) -> bool:
        name, _, value = os.fsdecode(variable).partition("=")
        try:
            return bool(self._psutil.Process(pid).environ().get(name) == value)
        except (self._psutil.Error, OSError):
            return False

    def _send(self, identity: Identity, signum: int) -> bool:
        if self.identify(identity.pid) != identity:
            return False
        try:
            self._signal(identity.pid, signum)
        except OSError:
            return False
        return True

    def _identity(self, pid: int, created_s: float) -> Identity:
        return Identity(pid, round(created_s * 1_000_000), self.boot())


def this_system() -> System:
    return LinuxSystem() if sys.platform == "linux" else PortableSystem()


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = b""
        while chunk := os.read(fd, 65536):
            data += chunk
        return data
    except OSError:
        return None
    finally:
        os.close(fd)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _darwin_boot() -> str:
    """macOS names each boot; the time of the boot would move whenever somebody sets the clock."""
    if sys.platform == "darwin":
        import ctypes

        text = ctypes.create_string_buffer(64)
        size = ctypes.c_size_t(len(text))
        failed = ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0)
        return "" if failed else text.value.decode()
    return ""
