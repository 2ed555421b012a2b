"""The git repository of a session: N changes, N commits, one pack, one barrier.

See docs: git store, *The protocol*. The order of effects is the promise:

  1. flock; `index.lock`; read the branch
  2. blobs, trees and commits in memory, one commit per transaction
  3. one pack, synced (packdir.py)
  4. the work tree's files
  5. the index, renamed into place while `index.lock` is held
  6. `<ref>.lock`, read the branch again, write, sync, rename, sync the directory: the commit point
  7. reflog, remove `index.lock`, drop superseded packs

Why the index comes before the branch: `git commit` reads the index before it locks it. With the
branch first, a foreign commit that had read the old index would put our file back:
  1. git reads the index
  2. we move the branch
  3. git takes `index.lock` and commits the tree of the old index on top of our commit
With the index first, and locked until the branch has moved, git either sees our index or finds that
the branch is not where it was.

git itself is never run; no hook, filter, signer or editor; no environment variable and no
configuration outside the repository is read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ..durable import Disk, FileLock
from ..durable.files import lstat
from ..errors import Damaged, NotFound, OpenJobsError, OutcomeUnknown, RepositoryRefused, StoreWriteFailed
from . import maintain, refuse
from .base import (
    MAINTAIN_GAP_S,
    MAINTAIN_WAIT_S,
    CommitInfo,
    Maintenance,
    Outcome,
    RepositoryBusy,
    Transaction,
    View,
)
from .draft import AUTHOR, Draft, FileState, Head
from .heal import mend_files
from .index import Index, Signature, entry_matches, entry_sha, make_entry, mode_of, signature
from .locks import create_lock, is_ours
from .objects import ObjectStore
from .packdir import SEAL_BYTES, SEAL_COMMITS, PackDirectory
from .packs import COMMIT, RollingPack
from .refs import read_branch, read_ref
from .repack import Repacker
from .scratch import Scratch
from .view import Commit, GitView, is_commit_id, parse_commit
from .worktree import WorkTree

log = logging.getLogger(__name__)

Mark = tuple[int, int, int]


class GitRepository:
    """A plain git repository at `path`, whose work tree is a copy of its newest commit.

    Guarantees: as `Repository`; a commit of another program is never lost; a killed writer's
    leftovers are removed by the next `transact`, nobody else's are.
    Assumptions: a local file system; one thread at a time in `transact`, `republish`, `maintain` and
    `close`. Any thread may use `view` and `log`.
    What each lock protects: the flock on `.git/openjobs/lock` everything of ours under `.git`, between
    processes of this library; `index.lock` the index and the work tree, against git; `<ref>.lock` the
    branch, against git; `ObjectStore`'s own lock the caches.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        """Nothing is read or opened before the first call that needs it."""
        self.path = path
        self._disk = disk
        self._git = str(path / ".git")
        own = path / ".git" / "openjobs"
        self._scratch = Scratch(own / "scratch", disk)
        self._index_path = f"{self._git}/index"
        self._index_lock = f"{self._git}/index.lock"
        self._flock = FileLock(own / "lock", disk)
        self._objects = ObjectStore(path / ".git")
        self._packs = PackDirectory(self._objects, disk)
        self._work = WorkTree(path, self._scratch, disk)
        self._opened = False
        self._healed = False
        #: the branch may not be durable where it is; written again before anything else
        self._unsure = False
        self._head: Head | None = None
        self._index: Index | None = None
        self._index_seen: Signature | None = None
        #: the rolling pack's file, and files that it replaced
        self._current: str | None = None
        self._retired: list[str] = []
        self._superseded: list[str] = []
        #: there were many packs when we looked last
        self._crowded = False

    @classmethod
    def create(
        cls,
        path: Path,
        disk: Disk,
        files: Mapping[str, bytes],
        *,
        subject: str = "session created",
        trailers: Sequence[tuple[str, str]] = (),
        now: datetime | None = None,
    ) -> GitRepository:
        """A new repository with one commit that holds `files`, whole or not there at all.

        Raises `errors.SessionExists`, `errors.StoreWriteFailed`, `errors.OutcomeUnknown`.
        """
        from .create import create

        create(path, disk, files, subject=subject, trailers=trailers, now=now or datetime.now(UTC))
        return cls(path, disk)

    @property
    def kept_aside(self) -> Sequence[str]:
        """Files that somebody had changed by hand and that were moved aside, newest last (100 at most)."""
        return tuple(self._work.kept_aside)

    # --- reading ---

    def view(self, commit_id: str | None = None) -> View:
        self._open()
        if commit_id is not None:
            return GitView(self._objects, commit_id, self._asked(commit_id).tree)
        head = self._read_head()
        return GitView(self._objects, head.commit, head.tree)

    def log(self, *, start: str | None = None, paths: Sequence[str] = ()) -> Iterator[CommitInfo]:
        self._open()
        return self._log(self._read_head().commit if start is None else start, tuple(paths), asked=start is not None)

    def _log(self, commit_id: str, paths: Sequence[str], *, asked: bool) -> Iterator[CommitInfo]:
        at = commit_id
        commit = self._asked(commit_id) if asked else self._commit(commit_id)
        before = self._versions(at, commit, paths)
        while True:
            parent = commit.parents[0] if commit.parents else None
            below = self._commit(parent) if parent else None
            after, before = before, self._versions(parent, below, paths)
            if not paths or after != before:
                yield commit.info(at)
            if parent is None or below is None:
                return
            at, commit = parent, below

    def _versions(self, commit_id: str | None, commit: Commit | None, paths: Sequence[str]) -> list[str | None]:
        if commit is None or not paths:
            return [None] * len(paths)
        view = GitView(self._objects, commit_id, commit.tree)
        return [view.version(path) for path in paths]

    def _asked(self, commit_id: str) -> Commit:
        """The commit that a caller names: one that is missing is damage only where the history leads to it."""
        if not is_commit_id(commit_id):
            raise NotFound(f"{commit_id!r} is no commit id")
        try:
            is_there = self._objects.read(bytes.fromhex(commit_id))[0] == COMMIT
        except Damaged as error:
            if not error.missing or error.path != commit_id:
                raise
            is_there = False
        if not is_there and not self._leads_to(commit_id):
            raise NotFound(f"there is no commit {commit_id}")
        return self._commit(commit_id)

    def _leads_to(self, commit_id: str) -> bool:
        """Walks the whole history: only who asks for what is not there waits for it. Raises `Damaged`."""
        seen: set[str] = set()
        queue = [self._read_head().commit]
        while queue:
            at = queue.pop()
            if at == commit_id:
                return True
            if at not in seen:
                seen.add(at)
                queue += self._commit(at).parents
        return False

    def _commit(self, commit_id: str) -> Commit:
        return parse_commit(self._objects.commit(bytes.fromhex(commit_id)), commit_id)

    def _open(self) -> None:
        if not self._opened:
            refuse.check(self.path)
            self._opened = True

    def _read_head(self) -> Head:
        """The branch as it is on disk now."""
        try:
            ref = read_branch(self._git)
            commit = read_ref(self._git, ref)
        except Damaged:
            if not os.path.isdir(self._git):
                self._opened = False
                refuse.check(self.path)
            raise
        if commit is None:
            raise RepositoryRefused(f"{self.path}: the branch {ref} has no commit")
        head = self._head
        if head is not None and head.commit == commit and head.ref == ref:
            return head
        return Head(ref=ref, commit=commit, tree=self._commit(commit).tree)

    # --- writing ---

    def transact(
        self,
        transactions: Sequence[Transaction],
        *,
        before_publish: Callable[[], None] | None = None,
        durable: Callable[[list[Outcome]], None] | None = None,
        now: datetime | None = None,
    ) -> list[Outcome]:
        now = now or datetime.now(UTC)
        with self._flocked():
            with self._index_locked():
                try:
                    outcomes, draft = self._batch(transactions, before_publish, now)
                except (OpenJobsError, OSError):
                    raise
                except BaseException:  # anywhere, and what is in memory may be half done
                    self._distrust()
                    self._unsure = True
                    raise
            if durable is not None:
                durable(outcomes)
            if draft.subjects:
                self._after(draft)
        return outcomes

    def _batch(
        self, transactions: Sequence[Transaction], before_publish: Callable[[], None] | None, now: datetime
    ) -> tuple[list[Outcome], Draft]:
        while True:
            draft = self._begin(now)
            rolling = self._rolling()
            mark = rolling.mark()
            try:
                outcomes = [draft.apply(transaction) for transaction in transactions]
                if before_publish is not None:
                    before_publish()
            except BaseException:
                rolling.rollback(mark)
                raise
            if not draft.subjects or self._publish(draft, mark):
                return outcomes, draft

    def republish(self) -> None:
        with self._flocked(), self._index_locked():
            self._unsure = True
            self._begin(datetime.now(UTC))

    def recover(self) -> None:
        """Remove a killed writer's leftovers now; the first `transact` does it by itself."""
        with self._flocked(), self._index_locked():
            self._distrust()
            self._begin(datetime.now(UTC))

    def maintain(self) -> None:
        """Encode sealed packs anew, join them, and cut the reflogs. No object is ever dropped.

        The locks are given back between two steps of a second or so, and what was done by then stands.
        Raises `RepositoryBusy` where they are taken at the beginning, or for long later on.
        """
        with contextlib.closing(self.maintenance()) as maintenance:
            give_up_at, is_going_on = -math.inf, True
            while is_going_on:
                started = time.monotonic()
                try:
                    is_going_on = maintenance.step()
                except RepositoryBusy:
                    if time.monotonic() > give_up_at:
                        raise
                    time.sleep(MAINTAIN_GAP_S)
                    continue
                now = time.monotonic()
                give_up_at = now + MAINTAIN_WAIT_S
                if is_going_on and now - started > MAINTAIN_GAP_S:
                    time.sleep(MAINTAIN_GAP_S)

    def maintenance(self) -> Maintenance:
        return _Steps(self, Repacker(self._packs, self._objects))

    def maintain_step(self, repacker: Repacker) -> bool:
        """One step under the lock; see `maintenance`."""
        with self._flocked(), _as_refusal():
            return self._maintain_step(repacker)

    def _maintain_step(self, repacker: Repacker) -> bool:
        """False when nothing is left to do."""
        try:
            head = self._refresh()
            self._drop_superseded()
            busy = self._busy_packs()
            if repacker.step(busy) or maintain.join_once(self._packs, self._objects, busy=busy):
                return True
            maintain.cut_reflogs(self._git, head.ref, self._scratch, self._disk)
            return False
        except RepositoryBusy:
            raise
        except BaseException:
            # Some packs may be there twice now, which the next write mends.
            self._distrust()
            raise

    def check(self) -> list[str]:
        """Everything that is wrong with the repository, one line each; nothing is changed."""
        from .check import check

        self._open()
        return check(self.path, self._objects)

    def rest(self) -> None:
        self._objects.rest()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # housekeeping: the next process does it
            if self._retired and self._flock.try_acquire():
                try:
                    self._superseded += self._retired
                    self._drop_superseded()
                finally:
                    self._flock.release()
        self._forget()
        self._objects.close()
        self._opened = False

    # --- locks ---

    @contextlib.contextmanager
    def _flocked(self) -> Iterator[None]:
        self._open()
        with _as_refusal():
            if not os.path.isdir(self._scratch.directory):
                refuse.check(self.path)
                self._disk.make_dirs(self._scratch.directory)
            if not self._flock.try_acquire():
                raise RepositoryBusy(f"{self.path} is being written by another process")
        try:
            yield
        finally:
            self._flock.release()

    @contextlib.contextmanager
    def _index_locked(self) -> Iterator[None]:
        self._take_index_lock()
        try:
            yield
        finally:
            self._give_index_lock()

    def _take_index_lock(self) -> None:
        with _as_refusal():
            fd, was_stale = create_lock(self._disk, self._index_lock)
            try:
                self._disk.write(fd, b"openjobs %d\n" % os.getpid())
            except BaseException:
                os.close(fd)
                self._give_index_lock()
                raise
            os.close(fd)
        if was_stale:
            # Somebody was killed while the files were his; and his last rename may not be durable.
            self._distrust()
            self._unsure = True

    def _give_index_lock(self) -> None:
        try:
            self._disk.unlink(self._index_lock)
        except OSError as error:
            # Ours by its mode, so whoever has the flock next removes it.
            log.warning("%s could not be removed: %s", self._index_lock, error)
            self._distrust()

    # --- the steps ---

    def _begin(self, now: datetime) -> Draft:
        """Steps 1 and 2's beginning: all that is known is as it is on disk, and everything is mended."""
        with _as_refusal():
            head = self._refresh()
            if not self._healed:
                self._heal(head)
        if self._unsure:
            self._publish_again(head)
        return Draft(self._objects, head, now)

    def _refresh(self) -> Head:
        head = self._read_head()
        is_moved = self._head is None or self._head is not head
        if is_moved:
            self._resume()
            self._head = head
        # Who moved the branch has replaced the index, too: perhaps twice in one tick of the file system's
        # clock, so that it has the number of the file that we knew, its size and its times.
        if is_moved or self._index is None or signature(self._index_path) != self._index_seen:
            self._load_index()
        return head

    def _resume(self) -> None:
        """Somebody else has committed, or we have just begun: which pack do we go on with?

        Another process of this library may have gone on with ours, so ours is stale unless it is
        still the newest.
        """
        if self._objects.rolling is not None and self._current is not None and self._packs.newest() == self._current:
            return
        if not self._healed:
            self._packs.mend()
        resumed = self._packs.resume()
        self._objects.rolling = resumed.rolling
        self._current = resumed.name
        self._retired = list(resumed.superseded)
        # Who seals a pack joins the sealed ones. Where that one is always killed, the next to come does it.
        self._crowded = len(self._objects.packs()) >= maintain.CROWDED_PACKS

    def _load_index(self) -> None:
        seen = signature(self._index_path)
        try:
            self._index = Index.load(self._index_path)
        except FileNotFoundError:
            self._index = Index()
            self._healed = False
        self._index_seen = seen

    def _heal(self, head: Head) -> None:
        self._scratch.clear()
        locks = [f"{self._git}/HEAD.lock"]
        for directory, _, names in os.walk(f"{self._git}/refs/heads"):
            locks += [f"{directory}/{name}" for name in names if name.endswith(".lock")]
        for lock in filter(is_ours, locks):
            self._disk.unlink(lock)
        index = self._index_now()
        if mend_files(self._objects, head.tree, index, self._work, rebuild=self._index_seen is None):
            self._write_index()
        self._healed = True

    def _publish(self, draft: Draft, mark: Mark) -> bool:
        """Steps 3 to 7. False when the branch has moved: nothing of ours is left, and it begins again."""
        ref_lock = f"{self._git}/{draft.base.ref}.lock"
        name: str | None = None
        touched = locked = moved = False
        try:
            encoded = self._rolling().encode()
            if not self._packs.has(encoded.name):
                name = encoded.name
            self._packs.publish(encoded)
            touched = True
            self._write_files(draft.files, draft)
            self._write_index()
            fd, _ = self._create_ref_lock(ref_lock)
            locked = True
            try:
                moved = self._has_moved(draft.base)
                if not moved:
                    self._disk.write(fd, draft.commit.encode() + b"\n")
                    self._disk.sync(fd)
            finally:
                os.close(fd)
        except BaseException as error:
            self._undo(draft, mark, name, ref_lock if locked else None, touched=touched)
            if isinstance(error, OSError) and not isinstance(error, OpenJobsError):
                raise _write_failed(error) from error
            raise
        if moved:
            self._undo(draft, mark, name, ref_lock, touched=touched)
            return False
        self._commit_point(ref_lock, draft.base.ref)
        self._head = draft.head()
        if encoded.name != self._current:
            self._superseded += self._retired
            self._retired = [self._current] if self._current is not None else []
            self._current = encoded.name
        self._write_reflog(draft)
        return True

    def _has_moved(self, base: Head) -> bool:
        return read_branch(self._git) != base.ref or read_ref(self._git, base.ref) != base.commit

    def _create_ref_lock(self, path: str) -> tuple[int, bool]:
        try:
            return create_lock(self._disk, path)
        except FileNotFoundError:
            # `git pack-refs` removes a directory that it has emptied.
            self._disk.make_dirs(os.path.dirname(path))
            return create_lock(self._disk, path)

    def _commit_point(self, ref_lock: str, ref: str) -> None:
        """After the rename has begun nobody can say that nothing happened."""
        path = f"{self._git}/{ref}"
        try:
            self._disk.rename(ref_lock, path)
            self._disk.sync_dir(os.path.dirname(path))
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._disk.unlink(ref_lock)
            self._distrust()
            self._unsure = True
            if isinstance(error, OSError):
                raise OutcomeUnknown(f"{path}: {error}", errno=error.errno) from error
            raise

    def _publish_again(self, head: Head) -> None:
        """The branch, where it is, by a new file and a new barrier."""
        ref_lock = f"{self._git}/{head.ref}.lock"
        with _as_refusal():
            self._disk.sync_dir(self._objects.pack_dir)
            fd, _ = self._create_ref_lock(ref_lock)
            try:
                try:
                    if read_ref(self._git, head.ref) != head.commit:
                        raise RepositoryBusy(f"{head.ref} has just been moved by another program")
                    self._disk.write(fd, head.commit.encode() + b"\n")
                    self._disk.sync(fd)
                finally:
                    os.close(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._disk.unlink(ref_lock)
                raise
        self._commit_point(ref_lock, head.ref)
        self._unsure = False

    def _write_files(
        self, files: Mapping[str, FileState], draft: Draft, is_torn: Callable[[bytes], bool] = lambda data: False
    ) -> None:
        new = {state[1] for state in files.values() if state is not None}
        index = self._index_now()
        for path, state in files.items():
            name = path.encode("utf-8", "surrogateescape")
            before = draft.before[path]

            def is_safe(sha: bytes, before: bytes | None = before) -> bool:
                return sha == before or sha in new or self._objects.in_our_packs(sha)

            entry = index.get(name)
            stood = self._content_of(entry) if entry is not None and entry_sha(entry) == before else None
            if state is None:
                self._work.remove(path, entry, is_safe, before=stood)
                index.drop(name)
            else:
                mode, sha = state
                data = self._objects.blob(sha)
                found = self._work.put(path, data, mode, entry, is_safe, before=stood, is_torn=is_torn)
                index.put(name, make_entry(name, sha, mode if found is None else mode_of(found), found))

    def _content_of(self, entry: bytes) -> bytes | None:
        try:
            return self._objects.blob(entry_sha(entry))
        except Damaged:  # the file is replaced then, not appended to
            return None

    def _write_index(self) -> None:
        """A new file, synced (an index that cannot be read would stop every program), renamed into place."""
        index = self._index_now()
        if self._index_seen is not None:
            for name in index.young(self._index_seen[0] // 10**9):
                entry, found = index.get(name), lstat(self._work.path(name.decode("utf-8", "surrogateescape")))
                if entry is not None and found is not None and not entry_matches(entry, found):
                    index.doubt(name)
        self._scratch.move(self._scratch.write("index", index.encode()), self._index_path)
        self._index_seen = signature(self._index_path)

    def _write_reflog(self, draft: Draft) -> None:
        """Supplementary: the commit stands, so a failure is only logged."""
        count = len(draft.subjects)
        what = f"commit: {draft.subjects[0]}" if count == 1 else f"commit: {count} changes, last: {draft.subjects[-1]}"
        line = b"%s %s %s%s\t%s\n" % (
            draft.base.commit.encode(),
            draft.commit.encode(),
            AUTHOR,
            draft.stamp,
            what.encode(),
        )
        try:
            for path in (f"{self._git}/logs/{draft.base.ref}", f"{self._git}/logs/HEAD"):
                try:
                    fd = self._disk.open_append(path)
                except FileNotFoundError:
                    self._disk.make_dirs(os.path.dirname(path))
                    fd = self._disk.open_append(path)
                try:
                    self._disk.write(fd, line)
                finally:
                    os.close(fd)
        except OSError as error:
            log.warning("the reflog of %s could not be written: %s", self.path, error)

    def _undo(self, draft: Draft, mark: Mark, pack: str | None, ref_lock: str | None, *, touched: bool) -> None:
        """Nothing became visible: put back what steps 3 to 6 have changed.

        What cannot be put back now (the disk is full) is mended by the next `transact`; until then
        the pack stays, for it is what tells our content from somebody's edits.
        """
        try:
            self._scratch.clear()
            self._packs.clear()
            if ref_lock is not None:
                self._disk.unlink(ref_lock)
            if touched:
                self._restore(draft)
            if pack is not None:
                self._packs.remove(pack)
                self._objects.forget_packs()
        except (OSError, Damaged, RepositoryRefused) as error:
            log.warning("%s could not be put back as it was; the next write does it: %s", self.path, error)
            self._distrust()
        else:
            self._rolling().rollback(mark)

    def _restore(self, draft: Draft) -> None:
        self._load_index()
        head = self._read_head()
        view = GitView(self._objects, head.commit, head.tree)
        states: dict[str, FileState] = {}
        for path in draft.files:
            mode, version = view.mode(path), view.version(path)
            states[path] = (mode, bytes.fromhex(version)) if mode is not None and version is not None else None
        self._write_files(states, draft, is_torn=self._objects.is_torn)
        self._write_index()

    # --- afterwards ---

    def _after(self, draft: Draft) -> None:
        """Housekeeping. The batch is durable, so whatever fails here is only logged, and done another time."""
        try:
            if signature(self._index_path) != self._index_seen:
                self._write_index_again(draft)
            self._drop_superseded()
            rolling = self._objects.rolling
            # Large batches fill a pack in one or two: then a new one, which begins with whole blobs, comes later.
            enough = SEAL_COMMITS + 2 * len(draft.subjects)
            sealed = rolling is not None and (rolling.commits >= enough or rolling.size_bytes >= SEAL_BYTES)
            if sealed:
                self._objects.rolling = RollingPack()
                self._current = None
                self._objects.forget_packs()
            if sealed or self._crowded:
                self._crowded = False
                maintain.join_packs(
                    self._packs, self._objects, busy=self._busy_packs(), limit_bytes=maintain.BY_THE_WAY_BYTES
                )
        except (OSError, Damaged) as error:
            log.warning("housekeeping in %s failed: %s", self.path, error)

    def _write_index_again(self, draft: Draft) -> None:
        """Another program has replaced our index by one that it had read before; ours are put in again."""
        ours = self._index
        try:
            self._take_index_lock()
        except (RepositoryBusy, StoreWriteFailed):
            return
        try:
            self._load_index()
            index = self._index_now()
            for path, state in draft.files.items():
                name = path.encode("utf-8", "surrogateescape")
                entry = ours.get(name) if ours is not None and state is not None else None
                if entry is not None:
                    index.put(name, entry)
                elif state is None:
                    index.drop(name)
            self._write_index()
        finally:
            self._give_index_lock()

    def _busy_packs(self) -> set[str]:
        return {name for name in (self._current, *self._retired, *self._superseded) if name is not None}

    def _drop_superseded(self) -> None:
        while self._superseded:
            self._packs.remove(self._superseded[-1])
            self._superseded.pop()

    def _rolling(self) -> RollingPack:
        assert self._objects.rolling is not None
        return self._objects.rolling

    def _index_now(self) -> Index:
        assert self._index is not None
        return self._index

    def _forget(self) -> None:
        self._head = None
        self._index = None
        self._index_seen = None
        self._objects.rolling = None
        self._objects.forget_packs()
        self._current = None
        self._retired = []
        self._superseded = []

    def _distrust(self) -> None:
        """All that is known of the disk may be wrong: it is read and mended again before the next write."""
        self._forget()
        self._healed = False


class _Steps:
    def __init__(self, repository: GitRepository, repacker: Repacker) -> None:
        self._repository = repository
        self._repacker = repacker

    def step(self) -> bool:
        if self._repository.maintain_step(self._repacker):
            return True
        if self._repacker.damaged:
            path = self._repacker.damaged[0]
            raise Damaged(f"{path} is damaged; everything else was made small", path=path)
        return False

    def close(self) -> None:
        self._repacker.close()


@contextlib.contextmanager
def _as_refusal() -> Iterator[None]:
    """What the system says before anything has become visible is a refusal."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OpenJobsError):
            raise
        raise _write_failed(error) from error


def _write_failed(error: OSError) -> StoreWriteFailed:
    return StoreWriteFailed(f"nothing was changed: {error}", errno=error.errno)
