"""A session that was made whole elsewhere on the home's file system becomes one of the home's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import JobExists, OutcomeUnknown, SessionExists, StoreWriteFailed
from .git import GitJobStore
from .index import Entry

#: so many are written to the index at once
_ENTRIES = 1000


def adopt_session(store: GitJobStore, session_id: str, directory: Path, entries: Sequence[Entry]) -> None:
    """Move `directory`, whose content is synced, to the session's place. `entries` are its jobs, for the index.

    Whole or not at all: the rename is the last step. Raises `SessionExists`, `JobExists`, `SessionBusy`,
    `StoreWriteFailed`, `OutcomeUnknown`.
    """
    place = store.session_dir(session_id)
    lock = store._creation_lock()
    try:
        _refuse_taken(place)
        _refuse_known(store, {entry.job_id for entry in entries})
        try:
            for at in range(0, len(entries), _ENTRIES):
                store.index.add(entries[at : at + _ENTRIES])
            store.disk.rename(directory, place)
        except OSError as error:
            raise StoreWriteFailed(f"session {session_id} was not added: {error}", errno=error.errno) from error
        try:
            store.disk.sync_dir(place.parent)
        except OSError as error:
            raise OutcomeUnknown(f"session {session_id}: {error}", errno=error.errno) from error
    finally:
        lock.release()


def _refuse_taken(place: Path) -> None:
    """Nothing may have that name, letter case apart."""
    for known in os.listdir(place.parent):
        if known.casefold() == place.name.casefold():
            raise SessionExists(f"there is a session {known!r} already; pick another id")


def _refuse_known(store: GitJobStore, ids: set[str]) -> None:
    """One look at the whole index: a look for each id would read it as often."""
    for entry in store.index.newest_first() if ids else ():
        if entry.job_id in ids and store._is_there(entry):
            raise JobExists(
                f"job {entry.job_id} is in session {entry.session_id} of this home already; nothing was imported"
            )
