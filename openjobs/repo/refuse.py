"""Which repositories are written to: a plain SHA-1 repository of its own, HEAD on a branch.

Everything else (git knows many kinds) is refused before anything is touched, with the reason.
"""

from __future__ import annotations

import os
import stat
from io import BytesIO
from pathlib import Path

from ..durable.files import lstat, names_in, read_file
from ..errors import RepositoryRefused
from .refs import read_branch, read_ref

#: places that must be real directories: a link would let content lead us out of the session
_DIRECTORIES = ("", "/objects", "/objects/pack", "/refs", "/refs/heads")
_MAYBE_DIRECTORIES = ("/openjobs", "/openjobs/scratch", "/logs", "/logs/refs", "/logs/refs/heads", "/objects/info")
_ABSENT = {
    "/objects/info/alternates": "its objects are shared with another repository (alternates)",
    "/shallow": "it is a shallow clone",
    "/commondir": "it is a linked work tree",
    "/reftable": "its references are kept in a reftable",
}
#: extensions that change nothing for us
_HARMLESS_EXTENSIONS = {b"noop", b"preciousobjects"}


def check(path: Path) -> None:
    """Raises `RepositoryRefused`, or `Damaged` where HEAD or the branch cannot be read."""
    git_dir = str(path / ".git")
    found = lstat(git_dir)
    if found is None:
        raise _refused(path, "there is no .git in it")
    if stat.S_ISREG(found.st_mode):
        raise _refused(path, "it is a linked work tree or a submodule (.git is a file)")
    for name in _DIRECTORIES:
        _must_be_directory(path, git_dir + name, required=True)
    for name in _MAYBE_DIRECTORIES:
        _must_be_directory(path, git_dir + name, required=False)
    for name, reason in _ABSENT.items():
        if os.path.lexists(git_dir + name):
            raise _refused(path, reason)
    if any(name.endswith(".promisor") for name in names_in(git_dir + "/objects/pack")):
        raise _refused(path, "it is a partial clone")
    _check_config(path, git_dir + "/config")
    branch = read_branch(git_dir)
    if read_ref(git_dir, branch) is None:
        raise _refused(path, "its branch has no commit yet")


def _must_be_directory(path: Path, name: str, *, required: bool) -> None:
    found = lstat(name)
    if found is None:
        if required:
            raise _refused(path, f"{name} is missing")
    elif stat.S_ISLNK(found.st_mode):
        raise _refused(path, f"{name} is a symbolic link")
    elif not stat.S_ISDIR(found.st_mode):
        raise _refused(path, f"{name} is not a directory")


def _check_config(path: Path, name: str) -> None:
    """The repository's own config alone, without its includes: what git itself reads to know the format."""
    from dulwich.config import ConfigFile

    try:
        config = ConfigFile.from_file(BytesIO(read_file(name)), expand_includes=False)
    except (OSError, ValueError) as error:
        raise _refused(path, f"its config cannot be read: {error}") from error

    def value(section: bytes, key: bytes) -> bytes | None:
        try:
            return config.get((section,), key).lower()
        except KeyError:
            return None

    if value(b"core", b"repositoryformatversion") not in (None, b"0", b"1"):
        raise _refused(path, "its format is newer than this program")
    if value(b"core", b"bare") in (b"true", b"yes", b"on", b"1"):
        raise _refused(path, "it is bare")
    if value(b"core", b"worktree") is not None:
        raise _refused(path, "its work tree is elsewhere (core.worktree)")
    if value(b"core", b"splitindex") in (b"true", b"yes", b"on", b"1"):
        raise _refused(path, "its index is split")
    for section in config.sections():
        kind = section[0].lower()
        if kind == b"extensions":
            for key in config.items(section):
                if key[0].lower() not in _HARMLESS_EXTENSIONS and key[1].lower() not in (b"sha1", b"files"):
                    raise _refused(path, f"it uses the extension {key[0].decode(errors='replace')}")
        if kind == b"remote":
            for key in config.items(section):
                if key[0].lower() in (b"promisor", b"partialclonefilter"):
                    raise _refused(path, "it is a partial clone")


def _refused(path: Path, reason: str) -> RepositoryRefused:
    return RepositoryRefused(f"{path} is not a repository that openjobs writes to, and was left as it was: {reason}")
