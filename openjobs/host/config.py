"""The home directory: where it is, and whether it is safe to use.

A home holds prompts, results and a socket that runs commands, so nobody else may read it, replace
it, or have chosen where it leads (R10). It is made with mode 0700. One that is there is accepted
when it is ours and nobody but us (and the administrator) could have put it, or a link on the way to
it, there.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import InvalidConfiguration

VARIABLE = "OPENJOBS_HOME"

#: names that mark a directory as a home
_OURS = frozenset(
    {"sessions", "leases", "active", "index", "config.toml", "host.lock", "host.start.lock", "host.log", "host.sock"}
)
#: file systems that live on another machine: flock and fsync may mean less there
_NETWORK = frozenset(
    {"9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.ceph", "fuse.davfs2", "fuse.gcsfuse"}
    | {"fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"}
    | {"nfs3", "nfs4", "orangefs", "smb2", "smb3", "smbfs", "sshfs", "webdav"}
)

_log = logging.getLogger(__name__)


def find_home(explicit: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """`explicit`, else `OPENJOBS_HOME`, else the platform's user state directory; absolute, not made yet.

    Raises `InvalidConfiguration` for a path that cannot be a directory of one's own.
    """
    environ = os.environ if environ is None else environ
    given = explicit if explicit is not None else environ.get(VARIABLE) or None
    if given is None:
        import platformdirs  # late: a command with --home never needs it

        return Path(platformdirs.user_state_dir("openjobs", appauthor=False))
    text = os.fspath(given)
    if not text or "\0" in text or "\n" in text:
        raise InvalidConfiguration(f"{text!r} cannot be the home directory ({VARIABLE})")
    return Path(os.path.abspath(os.path.expanduser(text)))


def prepare_home(path: Path, *, uid: int | None = None) -> Path:
    """The home with every link resolved, made (0700) where it was missing. Raises `InvalidConfiguration`.

    `uid` is who we are, for tests. Warns, once a process, about a network file system.
    """
    uid = os.geteuid() if uid is None else uid
    path = Path(os.path.abspath(path))
    try:
        real = _trusted(path, uid)
        _make(real)
        _check_own(real, uid)
    except InvalidConfiguration:
        raise
    except OSError as error:
        raise InvalidConfiguration(
            f"the home {path} cannot be used: {error.strerror or error} ({VARIABLE} names another one)", path=str(path)
        ) from error
    _warn_of_network(real)
    return real


def _trusted(path: Path, uid: int) -> Path:
    """`path` with its links resolved. A link counts only if we or root made it, and no directory on
    the way may be one in which anybody could put another directory in the place of ours."""
    todo = list(reversed(path.parts[1:]))
    at = Path(path.anchor)
    links = 0
    while todo:
        name = todo.pop()
        if name == "..":
            at = at.parent
            continue
        about = _lstat(at / name)
        if about is None:
            return at.joinpath(name, *reversed(todo))
        if not stat.S_ISLNK(about.st_mode):
            at = at / name
            if todo:
                _check_way(at, about, path)
            continue
        links += 1
        if links > 40:
            raise InvalidConfiguration(f"the home {path} leads in circles: {at / name} is a link", path=str(path))
        if about.st_uid not in (uid, 0):
            raise InvalidConfiguration(
                f"the home {path} leads through {at / name}, a link that user {about.st_uid} made", path=str(path)
            )
        target = Path(os.readlink(at / name))
        if target.is_absolute():
            at = Path(target.anchor)
        todo.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
    return at


def _check_way(directory: Path, about: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
        raise InvalidConfiguration(
            f"the home {path} lies in {directory}, where every user may rename and replace it", path=str(path)
        )


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _make(path: Path) -> None:
    missing = []
    at = path
    while _lstat(at) is None:
        missing.append(at)
        at = at.parent
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass  # another process makes the same home; it is checked below


def _check_own(path: Path, uid: int) -> None:
    """The directory itself, through one descriptor, so that what is checked is what is changed."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        if about.st_uid != uid:
            raise InvalidConfiguration(
                f"the home {path} belongs to user {about.st_uid}, not to us ({uid}); {VARIABLE} names another one",
                path=str(path),
            )
        if stat.S_IMODE(about.st_mode) & 0o077:
            _check_sole_use(path, fd)
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def _check_sole_use(path: Path, fd: int) -> None:
    """Only a directory of our own loses its permissions for others: never somebody's project or home."""
    names = set(os.listdir(fd))
    if names and not names & _OURS:
        raise InvalidConfiguration(
            f"the home {path} is open to other users and holds other things; {VARIABLE} must name a directory"
            " for openjobs alone",
            path=str(path),
        )


# --- network file systems --------------------------------------------------------------------------------

_warned: set[Path] = set()


def _warn_of_network(path: Path) -> None:
    if path in _warned:
        return
    _warned.add(path)
    kind = network_file_system(path)
    if kind is not None:
        _log.warning("the home %s is on a network file system (%s): locks and durability are not promised", path, kind)


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that holds `path` where it is a network one, else None.

    `mounts` is the text of Linux's /proc/self/mountinfo, for tests. What cannot be found out is None.
    """
    best, kind = -1, ""
    for point, name in _mounted(mounts):
        length = len(point.parts)
        if length >= best and path.is_relative_to(point):  # a later mount covers an earlier one
            best, kind = length, name
    return kind if kind in _NETWORK else None


def _mounted(mounts: str | None) -> Iterator[tuple[Path, str]]:
    if mounts is None and sys.platform == "darwin":
        import psutil

        for partition in psutil.disk_partitions(all=True):
            yield Path(partition.mountpoint), partition.fstype
        return
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return
    for line in mounts.splitlines():
        fields = line.split(" ")
        if "-" in fields[6:] and len(fields) > fields.index("-", 6) + 1:
            point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
            yield Path(point), fields[fields.index("-", 6) + 1]
