"""Whether what the keeper of a run left can be read and agrees with the journal. Looks only, one block at a time."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ..errors import Damaged
from . import layout, rundir
from .identity import this_system
from .order import STREAMS, Order
from .rundir import ExitRecord
from .task import Task, end_of

#: what of an end its journal repeats from the record; who was left over may be known only later
_REPEATED = ("status", "exit_code", "signal", "stopped_by", "stdout_bytes", "stderr_bytes", "truncated")


def run_findings(run_dir: Path, task: Task | None, named: Collection[str]) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it) for each thing that is. `task` is what the journal says of the run, where it is a
    background command's; `named` are files that something was said of already.

    A living keeper may be about to write its record, so that is looked at only once none lives. What gc takes away
    meanwhile is no damage.
    """
    try:
        lives = rundir.keeper_lives(run_dir)
    except OSError as error:
        yield layout.KEEPER, f"whether its keeper lives cannot be known: {error.strerror}"
        return
    record = None
    if not lives:
        try:
            record = rundir.read_exit(run_dir)
            rundir.check_swept(run_dir)
        except Damaged as error:
            yield (layout.EXIT if rundir.is_of_exit(error, run_dir) else layout.SWEPT), str(error)
        except OSError as error:
            yield layout.EXIT, str(error)
    if record is not None:
        yield from _record_findings(run_dir.name, record, task, named)
    yield from _order_findings(run_dir, record, named)


def _record_findings(
    run_id: str, record: ExitRecord, task: Task | None, named: Collection[str]
) -> Iterator[tuple[str, str]]:
    if record.task_id != run_id:
        if "log.state" not in named:  # else the whole directory is another run's, which was said
            yield layout.EXIT, f"is of run {record.task_id}"
        return
    if task is None or not task.terminal or task.keeper is None:
        return  # without a keeper nothing was taken from a record
    if task.keeper != record.keeper:
        yield layout.EXIT, "is of another keeper than the one that the journal knows"
        return
    wrong = [
        f"{name} {said} where the journal says {known}"
        for name, said in end_of(record).items()
        if name in _REPEATED and said != (known := getattr(task, name))
    ]
    if wrong:
        yield layout.EXIT, f"says {', '.join(wrong)}"


def _order_findings(run_dir: Path, record: ExitRecord | None, named: Collection[str]) -> Iterator[tuple[str, str]]:
    path = run_dir / layout.ORDER
    try:
        fd = rundir.open_regular(path)
        if fd < 0:
            return
        try:
            ends = Order(fd).check()
        finally:
            os.close(fd)
        is_synced = record is not None or _is_of_this_boot(run_dir)
    except (Damaged, ValueError, OSError) as error:
        yield layout.ORDER, str(error)
        return
    # After the order: streams only grow, and an entry is written after its bytes.
    for name, end in zip(STREAMS, ends, strict=True):
        size = _size(run_dir / name)
        if record is not None and end > (kept := getattr(record, f"{name}_bytes")):
            yield layout.ORDER, f"tells of {end:,} bytes of {name}, of which its keeper kept {kept:,}"
        elif end > size and is_synced and name not in named and os.path.lexists(path):
            yield layout.ORDER, f"tells of {end:,} bytes of {name}, which has {size:,}"


def _is_of_this_boot(run_dir: Path) -> bool:
    """Without a record nothing was synced: what a power cut took of a stream, it need not have taken of the order."""
    keeper = rundir.keeper_identity(run_dir)
    return keeper is not None and keeper.boot == this_system().boot()


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0
