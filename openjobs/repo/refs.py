"""HEAD, the branch it names, and the value of that branch: loose first, then packed.

Sources: gitrepository-layout(5), git-check-ref-format(1).
"""

from __future__ import annotations

import os
import re

from ..durable.files import read_file, unreadable
from ..errors import Damaged, RepositoryRefused

_HEX = re.compile(rb"[0-9a-f]{40}\Z")
_BRANCH = re.compile(
    r"refs/heads/(?!.*(?:\.\.|//|@\{|/\.|\.lock(?:/|\Z)))[^\x00-\x20\x7f~^:?*\[\\./][^\x00-\x20\x7f~^:?*\[\\]*\Z"
)
#: what a session's repository begins on
MAIN = "refs/heads/main"


def read_branch(git_dir: str) -> str:
    """The full name of the branch that HEAD is on. Raises `Damaged`, and `RepositoryRefused` where it is detached.

    One that is on another branch while there is a `main` is refused, too: somebody has switched, and what is written
    there would be gone when they switch back. A repository without a `main` is on the branch that it is on.
    """
    path = f"{git_dir}/HEAD"
    try:
        raw = read_file(path, 4096)
    except OSError as error:
        raise unreadable(error, path) from error
    text = raw.rstrip(b"\n")
    if _HEX.match(text):
        raise RepositoryRefused("HEAD is detached: it must be on a branch")
    name = text.removeprefix(b"ref:").strip().decode("utf-8", "surrogateescape")
    if not text.startswith(b"ref:") or not name.startswith("refs/"):
        raise Damaged(f"{path} is damaged: it names no branch", path=path)
    if not _BRANCH.match(name) or name.endswith("/"):
        raise RepositoryRefused("HEAD names something that is not a branch")
    if name != MAIN and read_ref(git_dir, MAIN) is not None:
        raise RepositoryRefused(
            f"HEAD was switched to {name.removeprefix('refs/heads/')!r}, and the session is on 'main': "
            f"switch back with `git -C {os.path.dirname(git_dir)} checkout main`"
        )
    return name


def is_branch(name: str) -> bool:
    """Whether that can be the full name of a branch."""
    return _BRANCH.match(name) is not None and not name.endswith("/") and name.isprintable()


def list_refs(git_dir: str) -> dict[str, str]:
    """Every branch and tag with the object (40 hex digits) that it is at; what cannot be read is left out."""
    found: dict[str, str] = {}
    # The files before the table: `git pack-refs` writes the table first and removes the files then.
    for kind in ("heads", "tags"):
        for directory, _, names in os.walk(f"{git_dir}/refs/{kind}"):
            for name in names:
                ref = os.path.relpath(f"{directory}/{name}", git_dir)
                try:
                    text = read_file(f"{git_dir}/{ref}", 4096).rstrip(b"\n")
                except OSError:
                    continue
                if _HEX.match(text):
                    found[ref] = text.decode()
    try:
        table = read_file(f"{git_dir}/packed-refs")
    except OSError:
        table = b""
    for line in table.splitlines():
        if _HEX.match(line[:40]) and line[40:46] == b" refs/":
            found.setdefault(line[41:].decode("utf-8", "surrogateescape"), line[:40].decode())
    return {name: sha for name, sha in found.items() if name.startswith(("refs/heads/", "refs/tags/"))}


def read_ref(git_dir: str, ref: str) -> str | None:
    """The commit (40 hex digits) that the branch is at, or None. Raises `Damaged`."""
    path = f"{git_dir}/{ref}"
    try:
        raw = read_file(path, 4096)
    except (FileNotFoundError, NotADirectoryError):
        return _packed(git_dir, ref)
    except OSError as error:
        raise unreadable(error, path) from error
    text = raw.rstrip(b"\n")
    if text.startswith(b"ref:"):
        raise RepositoryRefused(f"{ref} is a symbolic reference")
    if not _HEX.match(text):
        raise Damaged(f"{path} is damaged: it holds no commit id", path=path)
    return text.decode()


def _packed(git_dir: str, ref: str) -> str | None:
    path = f"{git_dir}/packed-refs"
    try:
        raw = read_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(error, path) from error
    wanted = b" " + ref.encode("utf-8", "surrogateescape")
    for line in raw.splitlines():
        if line.endswith(wanted) and len(line) == 40 + len(wanted):
            if not _HEX.match(line[:40]):
                raise Damaged(f"{path} is damaged: it holds no commit id for {ref}", path=path)
            return line[:40].decode()
    return None
