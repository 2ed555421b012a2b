"""Commits that are being made on top of a head, in memory: nothing of them is on disk yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import attrs

from ..errors import Damaged, InvalidInput, ReadFailed, Refused
from . import message
from .base import Change, Outcome, Transaction
from .objects import ObjectStore
from .packs import BLOB, COMMIT
from .trees import DIRECTORY, EMPTY, EXECUTABLE, FILE, decode_name, path_parts
from .view import GitView

AUTHOR = b"openjobs <openjobs@localhost>"

#: a directory's part of a change: name -> bytes, None (remove), or the same one floor down
Nested = dict[bytes, "bytes | Nested | None"]
#: mode and id of a file's newest blob, or None where it is removed
FileState = tuple[int, bytes] | None


@attrs.frozen(kw_only=True, slots=True)
class Head:
    """The branch and the commit it is at."""

    ref: str
    commit: str
    tree: bytes


class Draft:
    def __init__(self, objects: ObjectStore, base: Head, now: datetime) -> None:
        self._objects = objects
        self.stamp = b" %d +0000" % int(now.timestamp())
        self.base = base
        self.commit = base.commit
        self.tree = base.tree
        self.subjects: list[str] = []
        #: what the batch changes altogether, for the work tree and the index
        self.files: dict[str, FileState] = {}
        #: the blob that the base has at each path that was touched, None where it has no file there
        self.before: dict[str, bytes | None] = {}

    def head(self) -> Head:
        return Head(ref=self.base.ref, commit=self.commit, tree=self.tree)

    def apply(self, transaction: Transaction) -> Outcome:
        """One transaction, one commit at most. Any exception but a refusal or damage is passed on."""
        rolling = self._objects.rolling
        assert rolling is not None
        mark = rolling.mark()
        try:
            change = transaction(GitView(self._objects, self.commit, self.tree))
            if change is not None:
                self._commit(change)
        except ReadFailed:  # of a whole batch or of none, and over in a moment
            raise
        except (Refused, Damaged) as error:
            rolling.rollback(mark)
            return Outcome(error=error)
        return Outcome(commit_id=self.commit)

    def start(self, files: Mapping[str, bytes], subject: str, trailers: Sequence[tuple[str, str]]) -> None:
        """The first commit of a repository."""
        tree = self._edit(None, _nested(files), "", self.files)
        self.tree = tree if tree is not None else self._objects.add_tree(EMPTY, None)
        self.commit = self._add_commit(self.tree, b"", subject, trailers)

    def _commit(self, change: Change) -> None:
        states: dict[str, FileState] = {}
        tree = self._edit(self.tree, _nested(change.files), "", states)
        if tree is None:
            tree = self._objects.add_tree(EMPTY, None)
        parent = b"parent " + self.commit.encode() + b"\n"
        self.commit = self._add_commit(tree, parent, change.subject, change.trailers)
        self.tree = tree
        self.files.update(states)

    def _add_commit(self, tree: bytes, parent: bytes, subject: str, trailers: Sequence[tuple[str, str]]) -> str:
        subject = message.clean_subject(subject)
        author = AUTHOR + self.stamp
        raw = b"tree %s\n%sauthor %s\ncommitter %s\n\n%s" % (
            tree.hex().encode(),
            parent,
            author,
            author,
            message.encode(subject, message.clean_trailers(trailers)),
        )
        self.subjects.append(subject)
        return self._objects.add(COMMIT, raw).hex()

    def _edit(self, base: bytes | None, changes: Nested, where: str, states: dict[str, FileState]) -> bytes | None:
        """The directory `base` with `changes`; None when nothing is left in it."""
        objects = self._objects
        tree = objects.tree(base) if base is not None else EMPTY
        for name, value in changes.items():
            old = tree.entries.get(name)
            is_directory = old is not None and old[0] == DIRECTORY
            path = where + decode_name(name)
            if isinstance(value, dict):
                below = self._edit(old[1] if old and is_directory else None, value, path + "/", states)
                if below is not None:
                    if old and not is_directory:
                        raise InvalidInput(f"{path} is no directory")
                    tree = tree.put(name, DIRECTORY, below)
                elif is_directory:
                    tree = tree.drop(name)
            elif is_directory:
                raise InvalidInput(f"{path} is a directory")
            else:
                before = old[1] if old is not None else None
                self.before.setdefault(path, before)
                if value is not None:
                    mode = old[0] if old and old[0] == EXECUTABLE else FILE
                    sha = objects.add(BLOB, value, before)
                    tree = tree.put(name, mode, sha)
                    states[path] = (mode, sha)
                elif old is not None:
                    tree = tree.drop(name)
                    states[path] = None
        return objects.add_tree(tree, base) if tree.entries else None


def _nested(files: Mapping[str, bytes | None]) -> Nested:
    root: Nested = {}
    for path, data in files.items():
        *directories, name = path_parts(path)
        level = root
        for directory in directories:
            below = level.setdefault(directory, {})
            if not isinstance(below, dict):
                raise InvalidInput(f"{path!r}: a file and a directory have the same name")
            level = below
        if isinstance(level.get(name), dict):
            raise InvalidInput(f"{path!r}: a file and a directory have the same name")
        level[name] = data
    return root
