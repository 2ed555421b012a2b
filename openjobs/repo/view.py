"""The files at one commit, read straight from git's objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache

import attrs

from ..errors import Damaged
from . import message
from .base import CommitInfo
from .objects import ObjectStore
from .trees import DIRECTORY, SUBMODULE, TreeEntry, decode_name

_COMMIT_ID = re.compile(r"[0-9a-f]{40}\Z")


def is_commit_id(text: str) -> bool:
    """Whether it has the form: 40 hex digits, as git writes them."""
    return _COMMIT_ID.match(text) is not None


class GitView:
    """Immutable, so any thread may read it; objects are found wherever they are by then."""

    __slots__ = ("_objects", "_tree", "commit_id")

    def __init__(self, objects: ObjectStore, commit_id: str | None, tree: bytes) -> None:
        self.commit_id = commit_id
        self._objects = objects
        self._tree = tree

    def read(self, path: str) -> bytes | None:
        try:
            found = self._find(path)
            if found is None or found[0] == DIRECTORY:
                return None
            if found[0] == SUBMODULE:
                raise Damaged("it is a submodule")
            return self._objects.blob(found[1])
        except Damaged as error:
            raise _at(error, path) from error

    def version(self, path: str) -> str | None:
        try:
            found = self._find(path)
        except Damaged as error:
            raise _at(error, path) from error
        return None if found is None else found[1].hex()

    def names(self, directory: str) -> Sequence[str]:
        try:
            found = self._find(directory)
            if found is None or found[0] != DIRECTORY:
                return []
            return [decode_name(name) for name in self._objects.tree(found[1]).entries]
        except Damaged as error:
            raise _at(error, directory or "/") from error

    def mode(self, path: str) -> int | None:
        found = self._find(path)
        return None if found is None else found[0]

    def _find(self, path: str) -> TreeEntry | None:
        found: TreeEntry = (DIRECTORY, self._tree, 0)
        if not path:
            return found
        for part in _names(path):
            if found[0] != DIRECTORY:
                return None
            below = self._objects.tree(found[1]).entries.get(part)
            if below is None:
                return None
            found = below
        return found


@lru_cache(maxsize=1024)
def _names(path: str) -> list[bytes]:
    return path.encode("utf-8", "surrogateescape").split(b"/")


def _at(error: Damaged, path: str) -> Damaged:
    """The same damage, named by the path in the repository that cannot be read for it."""
    return Damaged(f"{path} cannot be read: {error}", path=path, offset=error.offset, missing=error.missing)


@attrs.frozen(kw_only=True, slots=True)
class Commit:
    """What is needed of a commit object."""

    tree: bytes
    parents: tuple[str, ...]
    author: str
    time: datetime
    message: bytes

    def info(self, commit_id: str) -> CommitInfo:
        subject, trailers = message.decode(self.message)
        return CommitInfo(
            commit_id=commit_id,
            parents=self.parents,
            subject=subject,
            trailers=trailers,
            time=self.time,
            author=self.author,
        )


def parse_commit(raw: bytes, commit_id: str) -> Commit:
    """Raises `Damaged`. A foreign commit may have any headers; unknown ones are passed over."""
    head, _, text = raw.partition(b"\n\n")
    tree, parents, author, seconds = b"", [], "", 0
    try:
        for line in head.split(b"\n"):
            key, _, value = line.partition(b" ")
            if key == b"tree":
                tree = bytes.fromhex(value.decode("ascii"))
            elif key == b"parent":
                parents.append(value.decode("ascii"))
                if not is_commit_id(parents[-1]):
                    raise ValueError("its parent is no commit")
            elif key == b"author":
                author = value.rpartition(b">")[0].decode("utf-8", "replace") + ">"
            elif key == b"committer":
                seconds = int(value.rpartition(b">")[2].split()[0])
        if len(tree) != 20:
            raise ValueError("it has no tree")
        return Commit(
            tree=tree,
            parents=tuple(parents),
            author=author,
            time=datetime.fromtimestamp(seconds, UTC),
            message=text,
        )
    except (ValueError, IndexError, OverflowError, OSError) as error:
        raise Damaged(f"commit {commit_id} is damaged: {error}", path=commit_id) from None
