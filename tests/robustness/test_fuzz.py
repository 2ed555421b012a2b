"""Everything that is parsed from a disk, changed at random: typed errors only, in bounded time (R10, R11)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from openjobs import GitJobStore, errors
from openjobs.agents import read_templates
from openjobs.host.transfer import export_session
from openjobs.ledger import Ledger
from openjobs.processes import TaskJournal, child_identity, keeper_identity, read_exit, read_output
from openjobs.repo.bundle import read_head
from openjobs.repo.index import Index
from openjobs.repo.packscan import PackRegion, scan_pack
from openjobs.repo.trees import Tree
from openjobs.repo.view import parse_commit
from openjobs.runlog import RunLogReader
from openjobs.session import Page, meta
from openjobs.session.history import Segment
from openjobs.store.archive import ArchiveReader
from tests.support.chaos import Chaos
from tests.support.homes import SESSION, fill

#: what a parser may raise: ours, or what says that a file is not there
ALLOWED = (errors.OpenJobsError, FileNotFoundError)
#: one document, however it was changed, is read in this time on a busy machine
MOST_S = 5.0


@attrs.frozen
class Target:
    """A document as it was really written, and what reads it."""

    data: bytes
    read: Callable[[Path], object]
    #: other files that stand beside it
    beside: dict[str, bytes] = attrs.field(factory=dict)
    name: str = "document"


def all_of(items: Iterator[object]) -> int:
    return sum(1 for _ in items)


def objects_of(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return all_of(scan_pack(PackRegion(fd, 0, os.fstat(fd).st_size, "pack")))
    finally:
        os.close(fd)


def archive_of(path: Path) -> None:
    with open(path, "rb") as file:
        for member in ArchiveReader(file.fileno(), "archive").members():
            all_of(iter(member))


def bundle_of(path: Path) -> None:
    with open(path, "rb") as file:
        read_head(file)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    home = tmp_path_factory.mktemp("fuzz")
    made = fill(home / "home", many=2)
    with GitJobStore(home / "home", "relaxed") as store:
        export_session(store, SESSION, home / "archive")
        head = store.repository(SESSION).view()
        task = next(iter(store.session_dir(SESSION).glob(f"runs/{made.tasks['completed']}")))
        repo = store.session_dir(SESSION) / "repo"
        commit = next(store.repository(SESSION).log())
        [first, *_] = sorted((repo / ".git" / "objects" / "pack").glob("*.pack"))
        pages, segment, title = (head.read(path) or b"" for path in ("jobs.json", "history/00/0000.jsonl", "meta.json"))
        run_files = {path.name: path.read_bytes() for path in task.iterdir()}
        directory = store.session_dir(SESSION)
        index = (repo / ".git" / "index").read_bytes()
        pack, tasks = first.read_bytes(), (directory / "tasks.jsonl").read_bytes()

    def text_page(path: Path) -> int:
        return all_of(Page.parse("jobs.json", path.read_bytes()).jobs())

    tree = b"100644 jobs.json\0" + bytes(20) + b"40000 history\0" + bytes(range(20))
    raw_commit = b"tree %s\nauthor a <b> 1 +0000\ncommitter a <b> 1 +0000\n\nx\n\nOpenjobs-Kind: message\n" % (
        b"0" * 40
    )
    assert commit.commit_id
    toml = b'[profiles.main]\ncommand = ["claude", "-p", "{prompt}"]\ntimeout_s = 3600\nenv = { A = "b" }\n'
    return {
        "rows": Target(pages, text_page),
        "messages": Target(segment, lambda path: all_of(Segment.parse("h", path.read_bytes()).nodes())),
        "title": Target(title, lambda path: meta.decode(path.read_bytes())),
        "ledger": Target(tasks, lambda path: all_of(Ledger(path).read())),
        "journal": Target(tasks, lambda path: all_of(TaskJournal(path.parent, SESSION).tasks()), name="tasks.jsonl"),
        "sidecar": Target(
            run_files["log.state"],
            lambda path: RunLogReader(path.parent).read(),
            {"log": run_files["log"]},
            "log.state",
        ),
        "exit record": Target(run_files["exit.json"], lambda path: read_exit(path.parent), name="exit.json"),
        "keeper's words": Target(
            run_files["keeper"],
            lambda path: (keeper_identity(path.parent), child_identity(path.parent)),
            name="keeper",
        ),
        "order of output": Target(
            run_files["order"],
            lambda path: read_output(path.parent, "mixed", 0, 65536),
            {name: run_files[name] for name in ("stdout", "stderr")},
            "order",
        ),
        "pack": Target(pack, objects_of),
        "index": Target(index, lambda path: Index.load(str(path))),
        "tree": Target(tree, lambda path: Tree.parse(path.read_bytes())),
        "commit": Target(raw_commit, lambda path: parse_commit(path.read_bytes(), "0" * 40)),
        "bundle": Target(b"# v2 git bundle\n" + b"0" * 40 + b" refs/heads/main\n\nPACK", bundle_of),
        "archive": Target((home / "archive").read_bytes(), archive_of),
        "profiles": Target(toml, read_templates),
    }


PIECES = (
    b"\0",
    b"\xff",
    b"\n",
    b'"',
    b"{",
    b"}",
    b"[" * 2000,
    b"9" * 400,
    b"-1",
    b"1e999",
    b"null",
    b"\xed\xa0\x80",
    b"\r",
)


def changed(data: bytes, dice: random.Random) -> bytes:
    """One to four changes: a bit, a cut, a piece put in, doubled, moved, or replaced by something special."""
    raw = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(raw) + 1)
        to = min(len(raw), at + dice.randint(0, 64))
        match dice.randrange(6):
            case 0 if at < len(raw):
                raw[at] ^= 1 << dice.randrange(8)
            case 1:
                del raw[at:to]
            case 2:
                raw[at:at] = raw[at:to]
            case 3:
                raw[at:to] = dice.choice(PIECES)
            case 4:
                del raw[at:]
            case _:
                raw[at:at] = dice.randbytes(dice.randint(1, 40))
    return bytes(raw)


NAMES = (
    *("rows", "messages", "title", "ledger", "journal", "sidecar", "exit record", "keeper's words"),
    *("order of output", "pack", "index", "tree", "commit", "bundle", "archive", "profiles"),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_no_document_breaks_its_reader(name: str, targets: dict[str, Target], tmp_path: Path, chaos: Chaos) -> None:
    """Read as it is, or refused with a type of ours; never another exception, never for long."""
    target, first = targets[name], chaos.seed(0)
    for other, data in target.beside.items():
        (tmp_path / other).write_bytes(data)
        (tmp_path / other).chmod(0o600)
    path = tmp_path / target.name
    path.touch(0o600)
    path.write_bytes(target.data)
    target.read(path)  # so that what is refused below is refused for what was changed
    refused = 0
    for number in range(first, first + chaos.rounds(250, 10_000, "documents")):
        path.write_bytes(changed(target.data, random.Random(f"{name} {number}")))
        began = time.monotonic()
        try:
            target.read(path)
        except ALLOWED:
            refused += 1
        except BaseException:
            chaos.seed(number)
            raise
        assert time.monotonic() - began < MOST_S, f"document {number}"
    chaos.count("refused", refused)
