"""Make the work tree and the index the copy of HEAD again that they were before somebody was killed.

Only what is provably a copy of ours is touched: content that is in a pack of this library. What a
person staged or edited stays as it is; an edited file is moved aside when its path is next written.
"""

from __future__ import annotations

from ..durable.files import lstat
from .index import Index, entry_matches, entry_sha, make_entry
from .objects import ObjectStore
from .trees import DIRECTORY, EXECUTABLE, FILE
from .worktree import WorkTree

#: path and (mode, id) of every file of a tree
Listing = dict[bytes, tuple[int, bytes]]


def list_files(objects: ObjectStore, tree: bytes) -> Listing:
    """However deep somebody's directories are nested. Raises `Damaged`."""
    found: Listing = {}
    queue = [(b"", tree)]
    while queue:
        where, at = queue.pop()
        for name, (mode, sha, _) in objects.tree(at).entries.items():
            if mode == DIRECTORY:
                queue.append((where + name + b"/", sha))
            else:
                found[where + name] = mode, sha
    return found


def mend_files(objects: ObjectStore, tree: bytes, index: Index, work: WorkTree, *, rebuild: bool) -> bool:
    """Restore from `tree`; whether the index was changed. With `rebuild` the index was missing."""
    listing = list_files(objects, tree)
    changed = False
    for name, (mode, sha) in listing.items():
        changed |= _mend_file(objects, name, mode, sha, index, work, rebuild=rebuild)
    for name in index.names():
        entry = index.get(name)
        if name not in listing and entry is not None and objects.in_our_packs(entry_sha(entry)):
            path = _path(name)
            if not work.is_edited(path, entry, objects.in_our_packs, objects.is_torn):
                work.remove(path, entry, lambda _: True)
            index.drop(name)
            changed = True
    return changed


def _mend_file(
    objects: ObjectStore, name: bytes, mode: int, sha: bytes, index: Index, work: WorkTree, *, rebuild: bool
) -> bool:
    entry, path = index.get(name), _path(name)
    found = lstat(work.path(path))
    same = entry is not None and entry_sha(entry) == sha
    if same and entry is not None and found is not None and entry_matches(entry, found):
        return False
    if mode not in (FILE, EXECUTABLE):
        return False
    staged = not same and not rebuild and not objects.in_our_packs(sha if entry is None else entry_sha(entry))
    if staged:
        return False
    if work.is_edited(path, entry, objects.in_our_packs, objects.is_torn):
        if not same:
            index.put(name, make_entry(name, sha, mode, None))
        return not same
    if found is not None and found.st_size and work.holds(path, sha):
        index.put(name, make_entry(name, sha, mode, found))
        return True
    if found is None and same and not objects.in_our_packs(sha):
        # Somebody's own file, which somebody removed and has not committed yet.
        return False
    written = work.put(path, objects.blob(sha), mode, entry, lambda _: True)
    index.put(name, make_entry(name, sha, mode, written))
    return True


def _path(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
