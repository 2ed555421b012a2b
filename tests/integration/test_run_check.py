"""What `fsck` says of what keepers left in the directories of runs, and of leases; and that it says nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openjobs import GitJobStore
from openjobs.durable import Disk, Lease
from openjobs.durable.lease import lease_findings
from openjobs.processes import ProcessSupervisor, layout, rundir
from openjobs.processes.check import run_findings
from openjobs.processes.identity import this_system
from openjobs.processes.order import BLOCK, OrderEncoder
from tests.support import eventually
from tests.support.cli import Cli
from tests.support.homes import Filled, fill

FOREVER = "echo begun; exec sleep 60"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[Cli, Filled]]:
    """With one of everything, of which nothing is wrong before a test spoils it; nothing is repaired by a look."""
    cli = Cli(tmp_path / "home")
    filled = fill(cli.home)
    assert found(cli) == {}
    yield cli, filled
    before = [(path, path.lstat().st_mtime_ns) for path in sorted((cli.home / "sessions").rglob("*"))]
    found(cli)
    assert [(path, path.lstat().st_mtime_ns) for path in sorted((cli.home / "sessions").rglob("*"))] == before


def found(cli: Cli) -> dict[str, str]:
    """What `fsck` finds, and where."""
    report = cli.json_inside("fsck", code=None)
    findings = [finding for session in report["sessions"] for finding in session["findings"]] + report["home"]
    assert len(findings) == report["findings"]
    assert cli.inside("fsck", code=6 if findings else 0)
    return {finding["where"]: finding["what"] for finding in findings}


def run_of(cli: Cli, run_id: str) -> Path:
    return cli.home / "sessions" / "demo" / "runs" / run_id


def job_run(cli: Cli, filled: Filled) -> Path:
    return run_of(cli, cli.json_inside("show", filled.jobs["command"])["run_id"])


def changed(path: Path, **fields: object) -> None:
    """The record says something else."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


SPOILT: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_bytes(b"not a record"),
    "of another version": lambda path: path.write_bytes(b'{"version": 2}'),
    "a directory": Path.mkdir,
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("what", SPOILT)
def test_an_exit_record_that_cannot_be_read_is_named(home: tuple[Cli, Filled], what: str) -> None:
    """Of a background command and of a job's, each with its place; both keep the end that they had."""
    cli, filled = home
    for run in (run_of(cli, filled.tasks["failed"]), job_run(cli, filled)):
        (run / layout.EXIT).unlink()
        SPOILT[what](run / layout.EXIT)
        assert set(found(cli)) == {f"runs/{run.name}/exit.json"}
        assert str(run / layout.EXIT) in found(cli)[f"runs/{run.name}/exit.json"]
        (run / layout.EXIT).rmdir() if what == "a directory" else (run / layout.EXIT).unlink()
    assert cli.json_inside("show", filled.tasks["failed"])["exit_code"] == 3


def test_an_exit_record_that_says_something_else_than_the_journal_is_named(home: tuple[Cli, Filled]) -> None:
    """With what each of them says. Of a job the row has no such words, so only whose record it is can be wrong."""
    cli, filled = home
    run = run_of(cli, filled.tasks["failed"])
    path, where = run / layout.EXIT, f"runs/{run.name}/exit.json"
    whole = path.read_bytes()
    keeper = json.loads(whole)["keeper"]
    for fields, said in (
        ({"exit_code": 4}, "says exit_code 4 where the journal says 3"),
        ({"exit_code": 0}, "says status completed where the journal says failed, exit_code 0 where the journal says 3"),
        ({"exit_code": None, "signal": 9, "stopped_by": "signal"}, "signal 9 where the journal says None"),
        ({"stdout_bytes": 7}, "says stdout_bytes 7 where the journal says 0"),
        ({"task_id": "another"}, "is of run another"),
        ({"keeper": {**keeper, "pid": keeper["pid"] + 1}}, "is of another keeper"),
    ):
        changed(path, **fields)
        assert set(found(cli)) == {where}
        assert said in found(cli)[where]
        path.write_bytes(whole)
    of_job = job_run(cli, filled)
    changed(of_job / layout.EXIT, task_id="another")
    assert found(cli) == {f"runs/{of_job.name}/exit.json": "is of run another"}
    changed(of_job / layout.EXIT, task_id=of_job.name)
    assert found(cli) == {}


def test_a_record_is_compared_with_nothing_where_the_journal_cannot_be_read(home: tuple[Cli, Filled]) -> None:
    """One finding for the journal; a record that cannot be read is named all the same."""
    cli, filled = home
    journal = cli.home / "sessions" / "demo" / "tasks.jsonl"
    journal.write_bytes(b"x" + journal.read_bytes())
    run = run_of(cli, filled.tasks["failed"])
    changed(run / layout.EXIT, exit_code=4)
    assert set(found(cli)) == {"tasks.jsonl"}
    (run / layout.EXIT).write_text("not a record")
    assert set(found(cli)) == {"tasks.jsonl", f"runs/{run.name}/exit.json"}


def test_a_spoilt_word_about_the_rest_of_the_tree_is_named(home: tuple[Cli, Filled]) -> None:
    """Whatever it is; the end of the command is in another file, and in order."""
    cli, filled = home
    run = run_of(cli, filled.tasks["completed"])
    for spoilt in (b"not a record", b'{"leftovers": "somebody"}', b"[]"):
        (run / layout.SWEPT).write_bytes(spoilt)
        assert set(found(cli)) == {f"runs/{run.name}/swept.json"}
    (run / layout.SWEPT).write_bytes(b'{"leftovers": []}')
    assert found(cli) == {}


def order(*chunks: tuple[int, int]) -> bytes:
    encoder = OrderEncoder()
    return b"".join(encoder.entry(*chunk) for chunk in chunks)


BLOCKS = order(*[(0, 1 << 20)] * 3000)
HEADER = 16
ORDERS: dict[str, tuple[bytes, str]] = {
    "more of one stream": (order((0, 4), (1, 5)), "tells of 5 bytes of stderr, of which its keeper kept 4"),
    "a beginning beyond any file": (b"\xff" * 40, "block 0 of the order of output begins beyond any file"),
    "a beginning that is none": (bytes(7) + b"\x01" + BLOCKS[8:], "does not begin at 0"),
    "an entry without end": (bytes(HEADER) + b"\xff" * 30, "block 0 of the order of output has an entry without end"),
    "a block that does not follow": (BLOCKS[:BLOCK] + bytes(BLOCK) + BLOCKS[BLOCK:], "block 1"),
    "a block of nothing": (bytes(BLOCK) + order((0, 4)), "block 0 of the order of output has no entry"),
}


@pytest.mark.parametrize("what", ORDERS)
def test_an_order_that_no_keeper_wrote_is_named(home: tuple[Cli, Filled], what: str) -> None:
    """Of a background command and of a job's."""
    cli, filled = home
    assert len(BLOCKS) > 2 * BLOCK
    data, said = ORDERS[what]
    for run in (run_of(cli, filled.tasks["completed"]), job_run(cli, filled)):
        whole = (run / layout.ORDER).read_bytes()
        (run / layout.ORDER).write_bytes(data)
        assert set(found(cli)) == {f"runs/{run.name}/order"}
        assert said in found(cli)[f"runs/{run.name}/order"]
        (run / layout.ORDER).write_bytes(whole)


@pytest.mark.parametrize("what", ["a directory", "a link", "a pipe"])
def test_an_order_that_is_no_file_is_named(home: tuple[Cli, Filled], what: str) -> None:
    """Nothing is waited for."""
    cli, filled = home
    run = run_of(cli, filled.tasks["completed"])
    whole = (run / layout.ORDER).read_bytes()
    (run / layout.ORDER).unlink()
    SPOILT[what](run / layout.ORDER)
    assert set(found(cli)) == {f"runs/{run.name}/order"}
    (run / layout.ORDER).rmdir() if what == "a directory" else (run / layout.ORDER).unlink()
    (run / layout.ORDER).write_bytes(whole)


def test_an_order_without_end_is_looked_at_no_further_than_it_goes(tmp_path: Path) -> None:
    """A hole of a terabyte costs nothing: the first block that nobody wrote is where the look ends."""
    path = tmp_path / layout.ORDER
    path.write_bytes(order((0, 4)))
    os.truncate(path, 1 << 40)
    ((where, what),) = run_findings(tmp_path, None, ())
    assert (where, what) == ("order", "block 1 of the order of output does not begin where the one before it ends")


def test_what_a_killed_keeper_leaves_is_no_damage(home: tuple[Cli, Filled]) -> None:
    """The last entry has no end, and a stream has more than its order; but not less, in the boot in which it ran."""
    cli, _ = home
    with GitJobStore(cli.home, durability="relaxed") as store, ProcessSupervisor(store) as supervisor:
        task = supervisor.start("demo", FOREVER)
        run = supervisor.client.run_dir(task)
        eventually(lambda: (run / layout.ORDER).exists())
        assert found(cli) == {}  # it runs
        (run / layout.EXIT).write_text("what a living keeper puts its own in the place of")
        assert found(cli) == {}
        (run / layout.EXIT).unlink()
        assert task.keeper is not None
        this_system().send(task.keeper, signal.SIGKILL)
        assert supervisor.wait(task.task_id, 20).status.value == "lost"
    whole = (run / layout.ORDER).read_bytes()
    (run / layout.ORDER).write_bytes(whole + b"\xff")
    assert found(cli) == {}
    log = (run / "log", run / "log.state")
    for path in log:
        path.unlink()
    (run / layout.STDOUT).write_bytes(b"begun\nmore")
    assert found(cli) == {}
    (run / layout.STDOUT).write_bytes(b"beg")
    assert found(cli) == {f"runs/{run.name}/order": "tells of 6 bytes of stdout, which has 3"}
    (run / layout.STDOUT).unlink()
    assert found(cli) == {f"runs/{run.name}/order": "tells of 6 bytes of stdout, which has 0"}
    first, *rest = (run / layout.KEEPER).read_text().splitlines(keepends=True)
    (run / layout.KEEPER).write_text(json.dumps({**json.loads(first), "boot": "before"}) + "\n" + "".join(rest))
    assert found(cli) == {}  # a power cut may have taken it


def test_a_keepers_lock_that_is_no_file_is_named(home: tuple[Cli, Filled]) -> None:
    """Nobody can tell there whether it lives."""
    cli, filled = home
    run = run_of(cli, filled.tasks["completed"])
    (run / layout.KEEPER).rename(run / "kept")
    (run / layout.KEEPER).symlink_to("kept")
    assert set(found(cli)) == {f"runs/{run.name}/keeper"}
    (run / layout.KEEPER).unlink()
    (run / "kept").rename(run / layout.KEEPER)


def test_what_gc_takes_away_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole directory went between the look at the order and that at the streams."""
    run = tmp_path / "run"
    run.mkdir()
    (run / layout.ORDER).write_bytes(order((0, 4)))
    (run / layout.STDOUT).write_bytes(b"four")
    assert list(run_findings(run, None, ())) == []
    monkeypatch.setattr(rundir, "keeper_identity", lambda run_dir: taken(run))
    assert list(run_findings(run, None, ())) == []


def taken(run: Path) -> object:
    for path in run.iterdir():
        path.unlink()
    run.rmdir()
    return this_system().identify(os.getpid())


# --- leases ------------------------------------------------------------------------------------------------


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


LEASES: dict[str, Callable[[Path], object]] = {
    **{name: SPOILT[name] for name in ("a directory", "a link", "a link to nowhere", "a pipe")},
    "a socket": bound,
    "what everybody may read": lambda path: (path.touch(), path.chmod(0o644)),
}


FOLLOWS = {
    **dict.fromkeys(("a link", "a link to nowhere", "a socket"), "counts as alive"),
    **dict.fromkeys(("a directory", "a pipe"), "counts as dead"),
}


@pytest.mark.parametrize("what", LEASES)
def test_what_is_no_lease_is_named(home: tuple[Cli, Filled], what: str) -> None:
    """With what follows from it. With a session's name only that session is looked at."""
    cli, _ = home
    path = cli.home / "leases" / "runner-1"
    LEASES[what](path)
    assert set(found(cli)) == {"leases/runner-1"}
    assert str(path) in found(cli)["leases/runner-1"]
    said = cli.inside("fsck", code=6)
    assert said.out.count("\n  leases/runner-1: ") == 1
    assert FOLLOWS.get(what, "1 finding") in said.out
    assert "1 finding" in said.err
    cli.inside("fsck", "demo")
    assert os.path.lexists(path)


def test_leases_in_use_and_those_of_the_dead_are_in_order(tmp_path: Path) -> None:
    """Whether somebody holds one, was killed with it, or was just making it."""
    leases = tmp_path / "leases"
    assert list(lease_findings(leases)) == []
    held, free = Lease(leases, "held", Disk(durable=False)), Lease(leases, "free", Disk(durable=False))
    held.acquire()
    free.acquire()
    free.release()
    os.close(os.open(leases / ".making.tmp", os.O_CREAT, 0o600))
    assert list(lease_findings(leases)) == []
    for name, data in ((".DS_Store", b""), ("held", b"words")):
        fd = os.open(leases / name, os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(fd, data)
        os.close(fd)
    assert list(lease_findings(leases)) == [
        (".DS_Store", "is no name of a lease; nobody needs it"),
        ("held", "has 5 bytes, and a lease has none"),
    ]
    held.release()


@pytest.mark.parametrize("what", ["a link to nowhere", "a pipe"])
def test_a_directory_of_leases_that_is_none_is_named(home: tuple[Cli, Filled], what: str) -> None:
    """Nobody's life can be known there."""
    cli, _ = home
    leases = cli.home / "leases"
    leases.rename(cli.home / "kept")
    SPOILT[what](leases)
    assert set(found(cli)) == {"leases"}
    leases.unlink()
    (cli.home / "kept").rename(leases)
