"""Where the home's socket is, and who is at the other end.

The name of a Unix socket holds about 100 bytes. A home whose path is longer gets its socket in a
short directory of its own (0700, a name nobody can guess) and a pointer file in the home. A client
trusts the pointer as far as the home is ours, and then asks the kernel who listens: what somebody
put in place of the directory belongs to somebody else and is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path

from ..durable import Disk
from ..errors import HostUnavailable

SOCKET = "host.sock"
POINTER = "host.sock.path"
#: sun_path has 108 bytes on Linux and 104 on macOS, the final NUL included
PATH_LIMIT_BYTES = 100
BACKLOG = 128

_PREFIX = "openjobs-"
_RUNTIME = re.compile(re.escape(_PREFIX) + r"[A-Za-z0-9_]{6,32}\Z")
#: nobody is there: no such name, nobody listens, or the listener went away meanwhile
_NOBODY = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR, errno.ECONNRESET, errno.EPIPE})


def fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= PATH_LIMIT_BYTES


def listen(home: Path) -> socket.socket:
    """The listening socket, mode 0600. Only for who holds the home's host lock: what a dead host left is removed."""
    remove(home)
    path = home / SOCKET
    if not fits(path):
        path = _runtime_directory() / SOCKET
        Disk(durable=False).replace(home / POINTER, os.fsencode(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Between the two calls the directory's 0700 is what keeps others out.
        listener.bind(os.fspath(path))
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def remove(home: Path) -> None:
    """Remove socket and pointer. Only under the home's host lock."""
    path = find(home)
    if path is not None and path.parent != home and _is_runtime(path.parent):
        shutil.rmtree(path.parent, ignore_errors=True)
    for name in (POINTER, SOCKET):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(home / name)


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
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(os.fspath(path))
        check_peer(sock, os.geteuid() if uid is None else uid)
    except OSError as error:
        sock.close()
        if error.errno in _NOBODY:
            return None
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

else:

    def peer_uid(sock: socket.socket) -> int:
        """As on Linux; macOS and the BSDs answer LOCAL_PEERCRED with a `struct xucred` (version, uid, …)."""
        sol_local, local_peercred = 0, 1
        raw = sock.getsockopt(sol_local, local_peercred, 128)
        return int(struct.unpack_from("=II", raw)[1])


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
