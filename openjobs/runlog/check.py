"""Whether a run's log is what its state says. Looks only; a living writer may go on meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import Damaged, Refused
from .binding import LOG, SIDECAR, RunDirectory
from .sidecar import look
from .state import Header, Stream


def log_findings(path: Path, run_id: str) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it) for each thing that is; nothing for a run without a log.

    The state is read before the lengths: files only grow, so that none may be shorter than the state says.
    """
    try:
        directory = RunDirectory(path)
    except FileNotFoundError:
        return
    except (Refused, Damaged) as error:
        yield "", str(error)
        return
    try:
        yield from _findings(directory, run_id)
    except (Refused, Damaged, OSError) as error:
        yield SIDECAR, str(error)
    finally:
        directory.close()


def _findings(directory: RunDirectory, run_id: str) -> Iterator[tuple[str, str]]:
    header = _header(directory, run_id)
    size = _size(directory, directory.log)
    if header is None:
        if size:
            yield LOG, f"has {size:,} bytes and no checkpoint: it can be read, and neither followed nor written"
        return
    state = header.committed
    if size is None and not state.log_bytes:
        return
    if size is None or size < state.log_bytes:
        yield LOG, f"has {size or 0:,} bytes, its state says {state.log_bytes:,}"
    elif size > state.log_bytes and state.completion is not None:
        yield LOG, f"is complete with {state.log_bytes:,} bytes and has {size:,}"
    for stream in Stream:
        wanted, found = state.offset(stream), _size(directory, directory.native(stream))
        if (found or 0) < wanted:
            yield stream.value, f"has {found or 0:,} bytes, the log took {wanted:,} of it"


def _header(directory: RunDirectory, run_id: str) -> Header | None:
    try:
        fd = directory.open(directory.sidecar)
    except FileNotFoundError:
        return None
    try:
        return look(fd, directory.sidecar, task_id=None, run_id=run_id).header
    finally:
        os.close(fd)


def _size(directory: RunDirectory, path: Path) -> int | None:
    found = directory.look(path)
    return None if found is None else found.st_size
