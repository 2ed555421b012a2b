"""Where the home's socket is, and who is at the other end.

The name of a Unix socket holds about 100 bytes. A home whose path is longer gets its socket in a
short directory of its own (0700, a name nobody can guess) and a pointer file in the home. A client
trusts the pointer as far as the home is ours, and then asks the kernel who listens: what somebody
put in place of the directory belongs to somebody else and is refused.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import socket
import stat
import struct
import sys
import tempfile
import threading
from pathlib import Path

from ..durable import Disk
from ..errors import HostUnavailable

SOCKET = "host.sock"
POINTER = "host.sock.path"
#: sun_path has 108 bytes on Linux and 104 on macOS, the final NUL included
PATH_LIMIT_BYTES = 100
BACKLOG = 128

#: the name under which a new socket is made before it takes its place; not longer than `SOCKET`
_NEW = "host.new"
#: how many foreign files may be kept beside the socket before the next one is refused
_ASIDE_LIMIT = 10
#: how long a host whose queue of connections is full may keep us waiting
_DIAL_TIMEOUT_S = 10
_PREFIX = "openjobs-"
_RUNTIME = re.compile(re.escape(_PREFIX) + r"[A-Za-z0-9_]{6,32}\Z")
#: nobody is there: no such name, nobody listens, or the listener went away meanwhile
_NOBODY = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR, errno.ECONNRESET, errno.EPIPE})

_log = logging.getLogger(__name__)


def fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= PATH_LIMIT_BYTES


class Endpoint:
    """The home's socket file, kept in its place for as long as its host lives.

    Guarantees: the socket takes its place by a rename, so that it is never there without being listened at.
    A file or link that is not ours is moved aside and never followed; a directory is refused.
    Assumptions: who makes one holds the home's host lock, the file `guard`, until `close` has returned. When
    that file is another one (the home was removed and made anew), what is in the home is left to its next host.
    `_lock` protects `_path`, `_mark`, `_closed` and `_complaint`, and the files meanwhile.
    """

    def __init__(self, home: Path, guard: Path | None = None) -> None:
        self._home = home
        self._guard = guard
        self._guard_mark = None if guard is None else _file(guard)
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._mark: tuple[int, ...] | None = None
        self._closed = False
        self._complaint = ""

    def listen(self) -> socket.socket:
        """The listening socket, mode 0600; what a dead host left is removed. Raises `HostUnavailable`."""
        with self._lock:
            try:
                remove(self._home)
                return self._bind()
            except OSError as error:
                raise HostUnavailable(_cannot_listen(self._home, error)) from error

    def renew(self) -> socket.socket | None:
        """A new listening socket when the old one's file is gone or is not ours any more; None when all is well.

        Cheap, and never raises: what keeps the socket from its place is logged once.
        """
        with self._lock:
            if self._closed or self._in_place():
                self._complaint = ""
                return None
            try:
                if not self._holds():
                    raise HostUnavailable(f"{self._guard} is not this host's any more; its socket is not made again")
                listener = self._bind()
            except (OSError, HostUnavailable) as error:
                text = _cannot_listen(self._home, error) if isinstance(error, OSError) else str(error)
                if text != self._complaint:
                    self._complaint = text
                    _log.error("%s", text)
                return None
            self._complaint = ""
            _log.warning("the socket %s was gone or was not this host's; it is there again", self._path)
            return listener

    def close(self) -> None:
        """Remove socket and pointer, for good."""
        with self._lock:
            self._closed = True
            if self._holds():
                remove(self._home)
            if self._path is not None and self._path.parent != self._home and _is_runtime(self._path.parent):
                shutil.rmtree(self._path.parent, ignore_errors=True)

    def _holds(self) -> bool:
        return self._guard is None or (self._guard_mark is not None and _file(self._guard) == self._guard_mark)

    def _in_place(self) -> bool:
        return self._path is not None and find(self._home) == self._path and _mark(self._path) == self._mark

    def _bind(self) -> socket.socket:
        path = self._home / SOCKET
        if not fits(path):
            old = self._path
            path = old if old is not None and _is_runtime(old.parent) else _runtime_directory() / SOCKET
            self._path = path  # from now on `close` removes the directory
            Disk(durable=False).replace(self._home / POINTER, os.fsencode(path))
        _make_room(path)
        listener = listen_at(path, path.with_name(_NEW))
        self._path, self._mark = path, _mark(path)
        return listener


def listen_at(path: Path, new: Path) -> socket.socket:
    """A listening socket that appears at `path` when it is ready, mode 0600; made under the name `new` beside it.

    The directory must be 0700: between the making and the mode that is what keeps others out. Raises OSError, and
    then nothing is left of it.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(new))
        os.chmod(new, 0o600)
        listener.listen(BACKLOG)
        os.rename(new, path)
    except BaseException:
        listener.close()
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return listener


def listen(home: Path) -> socket.socket:
    """The listening socket, mode 0600. Only for who holds the home's host lock: what a dead host left is removed."""
    return Endpoint(home).listen()


def remove(home: Path) -> None:
    """Remove socket and pointer, and nothing that is not a host's. Only under the home's host lock."""
    path = find(home)
    if path is not None and path.parent != home and _is_runtime(path.parent):
        shutil.rmtree(path.parent, ignore_errors=True)
    for name in (POINTER, SOCKET):
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(home / name).st_mode
            if stat.S_ISSOCK(mode) if name == SOCKET else not stat.S_ISDIR(mode):
                os.unlink(home / name)


def obstacle(home: Path) -> str | None:
    """What keeps a host from making its socket, and what to do, in a sentence; None when nothing does."""
    for path in filter(None, (find(home), home / _NEW, home / POINTER)):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                return f"{path} is a directory, where the host's socket belongs: move it away, then try again"
    return None


def _cannot_listen(home: Path, error: OSError) -> str:
    return obstacle(home) or f"the host's socket cannot be made in {home}: {error.strerror or error}"


def _make_room(path: Path) -> None:
    """Move aside what is in the socket's place, except a socket, which the new one's rename replaces."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISSOCK(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    for number in range(_ASIDE_LIMIT):
        aside = path.with_name(f"{SOCKET}.aside.{number}")
        if not os.path.lexists(aside):
            os.rename(path, aside)
            _log.warning("%s was in the place of the host's socket and not one; it is %s now", path, aside.name)
            return
    raise HostUnavailable(
        f"{path} is not the host's socket, and {_ASIDE_LIMIT} such files are kept beside it already:"
        f" remove it and {path}.aside.*, then try again"
    )


def _mark(path: Path) -> tuple[int, ...] | None:
    """What tells a file from one that was put in its place while it was open."""
    try:
        about = os.lstat(path)
    except OSError:
        return None
    return about.st_dev, about.st_ino, about.st_mode, about.st_uid


def _file(path: Path) -> tuple[int, ...] | None:
    """Which file it is, whatever its mode."""
    mark = _mark(path)
    return None if mark is None else mark[:2]


def find(home: Path) -> Path | None:
    """Where the socket would be; None when the home has a long path and no pointer."""
    path = home / SOCKET
    if fits(path):
        return path
    try:
        fd = os.open(home / POINTER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        raw = os.read(fd, PATH_LIMIT_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(fd)
    path = Path(os.fsdecode(raw))
    return path if path.is_absolute() and path.name == SOCKET and fits(path) and b"\0" not in raw else None


def dial(home: Path, *, uid: int | None = None) -> socket.socket | None:
    """A connection to whoever listens; None when nobody does. Raises `HostUnavailable` when it is another user."""
    path = find(home)
    if path is None:
        return None
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.lstat(path).st_mode):
            return None  # a host makes a socket; a link was put there by something else
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _limit_connecting(sock, _DIAL_TIMEOUT_S)
        sock.connect(os.fspath(path))
        _limit_connecting(sock, 0)
        check_peer(sock, os.geteuid() if uid is None else uid)
    except OSError as error:
        sock.close()
        if error.errno in _NOBODY:
            return None
        if error.errno == errno.EAGAIN:
            raise HostUnavailable(f"the host at {path} takes no connections", silent=True) from error
        raise HostUnavailable(f"the socket {path} cannot be used: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket, uid: int) -> None:
    """Raises `HostUnavailable` unless the other end runs as `uid`."""
    other = peer_uid(sock)
    if other != uid:
        raise HostUnavailable(f"at the other end of the socket is user {other}, not we ({uid})", uid=other)


if sys.platform == "linux":

    def peer_uid(sock: socket.socket) -> int:
        """Who made the other end (unix(7), SO_PEERCRED): the kernel's word, not the peer's."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", raw)[1]) & 0xFFFFFFFF

    def peer_pid(sock: socket.socket) -> int | None:
        """Which process listens at the other end; None when the kernel does not say (another namespace)."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", raw)[0]) or None

    def _limit_connecting(sock: socket.socket, seconds: int) -> None:
        """A blocking `connect` to a full queue gives up after so many seconds (EAGAIN); 0: never."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

else:

    def peer_uid(sock: socket.socket) -> int:
        """As on Linux; macOS and the BSDs answer LOCAL_PEERCRED with a `struct xucred` (version, uid, …)."""
        sol_local, local_peercred = 0, 1
        raw = sock.getsockopt(sol_local, local_peercred, 128)
        return int(struct.unpack_from("=II", raw)[1])

    def peer_pid(sock: socket.socket) -> int | None:
        """As on Linux; macOS answers LOCAL_PEERPID."""
        try:
            return sock.getsockopt(0, 2) or None
        except OSError:
            return None

    def _limit_connecting(sock: socket.socket, seconds: int) -> None:
        """Not needed: a full queue refuses at once."""


def _runtime_directory() -> Path:
    """A new short directory, 0700, with a name nobody can guess."""
    base = tempfile.gettempdir()
    # One more than the random part of `mkdtemp`, for the slashes.
    if len(os.fsencode(base)) + len(_PREFIX) + 10 + len(SOCKET) > PATH_LIMIT_BYTES:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))


def _is_runtime(directory: Path) -> bool:
    """Whether it is such a directory: nothing else is ever removed."""
    try:
        about = os.lstat(directory)
    except OSError:
        return False
    mine = about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) == 0o700
    return mine and stat.S_ISDIR(about.st_mode) and _RUNTIME.match(directory.name) is not None
