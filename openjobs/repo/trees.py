"""Directories as git stores them: immutable, parsed once, changed by patching the bytes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..errors import Damaged, InvalidInput

DIRECTORY, FILE, EXECUTABLE, LINK, SUBMODULE = 0o040000, 0o100644, 0o100755, 0o120000, 0o160000

#: mode, id, where the id begins in the raw tree
TreeEntry = tuple[int, bytes, int]


class Tree:
    """One directory. `entries` is in git's order: a directory sorts as if its name ended with a slash."""

    __slots__ = ("entries", "raw")

    def __init__(self, raw: bytes, entries: Mapping[bytes, TreeEntry]) -> None:
        self.raw = raw
        self.entries = entries

    @classmethod
    def parse(cls, raw: bytes) -> Tree:
        """Raises `Damaged`."""
        entries: dict[bytes, TreeEntry] = {}
        at, end = 0, len(raw)
        try:
            while at < end:
                space = raw.index(b" ", at)
                zero = raw.index(b"\0", space)
                name, sha_at, at_next = raw[space + 1 : zero], zero + 1, zero + 21
                if not name or b"/" in name or at_next > end or name in entries:
                    raise ValueError(name)
                entries[name] = (int(raw[at:space], 8), raw[sha_at:at_next], sha_at)
                at = at_next
        except ValueError:
            raise Damaged(f"a tree is damaged at byte {at}", offset=at) from None
        return cls(raw, entries)

    def put(self, name: bytes, mode: int, sha: bytes) -> Tree:
        found = self.entries.get(name)
        if found is None or found[0] != mode:
            rest = [(n, e[0], e[1]) for n, e in self.entries.items() if n != name]
            return _build([*rest, (name, mode, sha)])
        at = found[2]
        entries = dict(self.entries)
        entries[name] = (mode, sha, at)
        return Tree(self.raw[:at] + sha + self.raw[at + 20 :], entries)

    def drop(self, name: bytes) -> Tree:
        return _build((n, e[0], e[1]) for n, e in self.entries.items() if n != name)


EMPTY = Tree(b"", {})


def _build(items: Iterable[tuple[bytes, int, bytes]]) -> Tree:
    raw = bytearray()
    entries: dict[bytes, TreeEntry] = {}
    for name, mode, sha in sorted(items, key=lambda i: i[0] + b"/" if i[1] == DIRECTORY else i[0]):
        raw += b"%o %s\0" % (mode, name)
        entries[name] = (mode, sha, len(raw))
        raw += sha
    return Tree(bytes(raw), entries)


@lru_cache(maxsize=4096)
def path_parts(path: str) -> tuple[bytes, ...]:
    """The names on the way to a file that is to be written. Raises `InvalidInput`.

    What is refused is what git refuses, on every file system that it knows: a name that leaves the
    work tree, or one that some file system takes for `.git`.
    """
    parts = path.split("/")
    for part in parts:
        plain = "".join(c for c in part if unicodedata.category(c) != "Cf").casefold().rstrip(". ")
        bad = not plain or plain in (".git", "git~1") or any(ord(c) < 32 or c in "\\\x7f" for c in part)
        if bad or len(_encode(part)) > 255:
            raise InvalidInput(f"{path!r} cannot be a path in a repository")
    return tuple(map(_encode, parts))


def _encode(part: str) -> bytes:
    return part.encode("utf-8", "surrogateescape")


def decode_name(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
