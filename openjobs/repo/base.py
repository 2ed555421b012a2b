"""What a repository is to the floors above: versions of a set of files, one commit at a time.

A `Transaction` is a function from the newest `View` to a `Change`. It is called with the lock held,
perhaps more than once (another program may have committed in between), so it must be pure: it
decides by what it reads, and raises `errors.Refused` where its event no longer fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol

import attrs

from ..errors import SessionBusy


class RepositoryBusy(SessionBusy):
    """Another program holds a lock of this repository; nothing was written."""


class View(Protocol):
    """The files at one commit (or, inside a batch, at a commit that is about to be)."""

    @property
    def commit_id(self) -> str | None:
        """The commit, 40 hex digits. Inside a transaction the parent-to-be of the new commit.
        None before the first commit."""
        ...

    def read(self, path: str) -> bytes | None:
        """The file's bytes, or None where there is none. Raises `errors.Damaged`."""
        ...

    def version(self, path: str) -> str | None:
        """An id of the file's (or directory's) content, equal exactly when the content is equal;
        cheaper than `read`. None where there is none."""
        ...

    def names(self, directory: str) -> Sequence[str]:
        """The names in a directory ("" is the root), sorted as git does; empty where there is none."""
        ...


@attrs.frozen(kw_only=True, slots=True)
class Change:
    """One commit to be: the new bytes of some paths (None removes one), and its message.

    `subject` is one line; `trailers` are `Key: value` lines, in order. Control characters in either
    are replaced, so a message can never forge a trailer or a line.

    A name is a file or a directory. A change that would put one in the other's place, or that has both, is
    refused with `errors.InvalidInput`: the transaction's outcome, like what it raises itself. So is a path that
    git would refuse.
    """

    files: Mapping[str, bytes | None]
    subject: str
    trailers: Sequence[tuple[str, str]] = ()


@attrs.frozen(kw_only=True, slots=True)
class CommitInfo:
    commit_id: str
    parents: tuple[str, ...]
    subject: str
    trailers: tuple[tuple[str, str], ...]
    time: datetime
    author: str

    def trailer(self, key: str) -> str | None:
        return next((value for name, value in self.trailers if name == key), None)


#: raises `errors.Refused` (or `errors.Damaged`) to change nothing; None means: nothing to change
Transaction = Callable[[View], Change | None]


@attrs.frozen(kw_only=True, slots=True)
class Outcome:
    """How one transaction of a batch ended: with a commit, with nothing to do, or with `error`.

    `error` is what the transaction raised; the other transactions of the batch stand regardless.
    """

    commit_id: str | None = None
    error: Exception | None = None


#: how long other processes get in between two steps of maintenance; who is put off tries again within 50 ms
MAINTAIN_GAP_S = 0.06
#: how long maintenance that has begun waits for a lock
MAINTAIN_WAIT_S = 10.0


class Maintenance(Protocol):
    """One run that makes a repository small. What its steps have done stands, whenever it ends."""

    def step(self) -> bool:
        """A bounded part of the work, a second or so; False when nothing is left to do.

        Raises `RepositoryBusy` (nothing was done; try again), `errors.StoreWriteFailed`, and at the end
        `errors.Damaged` where a pack had to be left as it is.
        """
        ...

    def close(self) -> None:
        """Give back what it holds. Twice is once."""
        ...


class Repository(Protocol):
    """Owned by one thread at a time for `transact`; `view` and `log` may be called by any thread."""

    def view(self, commit_id: str | None = None) -> View:
        """The files at a commit (default: the newest); stays readable while others commit.

        Raises `errors.NotFound` where there is no such commit and `errors.Damaged` where there must be one: the
        history leads to it, and it is missing or cannot be read.
        """
        ...

    def transact(
        self,
        transactions: Sequence[Transaction],
        *,
        before_publish: Callable[[], None] | None = None,
        durable: Callable[[list[Outcome]], None] | None = None,
        now: datetime | None = None,
    ) -> list[Outcome]:
        """Apply each transaction in order, as one commit each, and make all of them durable together.

        Returning means durable; `durable` is told so a little earlier, before the housekeeping.
        `before_publish` is called after all transactions were applied in memory and before any commit
        can become visible; what it raises abandons the batch.

        Raises `RepositoryBusy` (a lock is taken; it was only tried), `errors.StoreWriteFailed`
        (nothing became visible), `errors.OutcomeUnknown` (the batch may be visible, and durable),
        `errors.Damaged`, `errors.RepositoryRefused`.
        """
        ...

    def republish(self) -> None:
        """Make the newest commit's visibility durable again after `OutcomeUnknown`, by a new write
        and a new barrier (never by syncing the old descriptor once more)."""
        ...

    def log(self, *, start: str | None = None, paths: Sequence[str] = ()) -> Iterator[CommitInfo]:
        """Commits along first parents, newest first, from `start` (default: the newest).

        Read while it is walked: raises what `view` raises for `start`, and `errors.Damaged` at the first commit
        that is missing or cannot be read.
        """
        ...

    def check(self) -> Sequence[str]:
        """Everything that is wrong with the repository itself, one line each; nothing is changed."""
        ...

    def maintain(self) -> None:
        """Bring the repository to its smallest size. No object is ever dropped; safe beside other programs.
        Raises `RepositoryBusy`, `errors.StoreWriteFailed`."""
        ...

    def maintenance(self) -> Maintenance:
        """The same in steps, for the thread that transacts: it may transact between two of them."""
        ...

    def rest(self) -> None:
        """Keep little more in memory than what the next small write needs; called by the writing thread."""
        ...

    def close(self) -> None:
        """Give back files and memory. May be opened again by any later call."""
        ...
