"""Archives under failing disks, kills, bit flips, cuts, and in the hands of somebody hostile (R2, R3, R10)."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from openjobs import GitJobStore, errors
from openjobs.durable import Disk
from openjobs.host import transfer
from openjobs.host.transfer import export_session, import_session
from openjobs.ledger.lines import encode, encode_payload
from openjobs.repo import bundle, packscan
from openjobs.store.archive import ABOUT, BUNDLE, SUMS, ArchiveReader, header, sum_line
from tests.support.chaos import Chaos
from tests.support.disks import FaultyDisk
from tests.support.homes import SESSION, fill


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home")
    fill(path, many=1)
    return path


@pytest.fixture(scope="module")
def archive(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "x"
    with GitJobStore(home, "relaxed") as store:
        export_session(store, SESSION, path)
    return path


def refused(path: Path, home: Path, target: str | None = None) -> errors.OpenJobsError:
    """How the import ends; nothing may be left of it."""
    with GitJobStore(home, "relaxed") as store:
        with pytest.raises((errors.Refused, errors.Damaged)) as caught:
            import_session(store, path, target)
        nothing_is_left(store)
    assert "import" in str(caught.value)
    return caught.value


def nothing_is_left(store: GitJobStore) -> None:
    assert store.home is not None
    assert store.sessions() == []
    assert [name for name in os.listdir(store.home / "sessions") if not name.startswith(".lock")] == []
    if (store.home / "imports").exists():  # else it was refused before anything was made
        assert os.listdir(store.home / "imports") == [".lock"]


# --- damage -------------------------------------------------------------------------------------------------


def test_no_cut_archive_comes_in(archive: Path, tmp_path: Path, chaos: Chaos) -> None:
    """Cut at every block, at random bytes and at its last: refused, with nothing left."""
    raw = archive.read_bytes()
    source = random.Random(5)
    cuts = {0, 1, 511, 512, len(raw) - 1, len(raw) - 512, len(raw) - 1024, *range(0, len(raw), 512 if chaos else 16384)}
    cuts |= {source.randrange(len(raw)) for _ in range(chaos.rounds(20, 400, "random cuts"))}
    for cut in sorted(cuts):
        (tmp_path / "cut").write_bytes(raw[:cut])
        refused(tmp_path / "cut", tmp_path / "home")
    chaos.count("cuts", len(cuts))


def test_no_flipped_bit_comes_in(archive: Path, tmp_path: Path, chaos: Chaos) -> None:
    """Any single bit, wherever it stands: each is refused by the reader, with its place where it has one."""
    raw = bytearray(archive.read_bytes())
    source = random.Random(6)
    places = range(len(raw)) if chaos else sorted({*range(1024), *(source.randrange(len(raw)) for _ in range(300))})
    path = tmp_path / "flipped"
    path.write_bytes(raw)
    count = 0
    with open(path, "r+b") as file:
        for place in places if not chaos else source.sample(places, min(len(raw), 20000)):
            file.seek(place)
            file.write(bytes((raw[place] ^ 1 << source.randrange(8),)))
            file.flush()
            with pytest.raises((errors.ArchiveRefused, errors.Damaged)):
                for _ in ArchiveReader(file.fileno(), "x").members():
                    pass
            file.seek(place)
            file.write(bytes((raw[place],)))
            file.flush()
            count += 1
            if count % 100 == 0 and not chaos:
                (tmp_path / "one").write_bytes(raw[:place] + bytes((raw[place] ^ 1,)) + raw[place + 1 :])
                refused(tmp_path / "one", tmp_path / "home")
    chaos.count("flips", count)


def test_something_behind_the_end_is_refused(archive: Path, tmp_path: Path) -> None:
    """A byte more, a second archive behind the first: who looks at it with tar would see something else."""
    raw = archive.read_bytes()
    for more in (b"\0", raw):
        (tmp_path / "more").write_bytes(raw + more)
        refused(tmp_path / "more", tmp_path / "home")


# --- hostility ----------------------------------------------------------------------------------------------


def members_of(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {
            info.name.partition("/")[2]: tar.extractfile(info).read()  # type: ignore[union-attr]
            for info in tar.getmembers()
            if not info.name.endswith(SUMS)
        }


def rebuilt(members: dict[str, bytes], path: Path, top: str = SESSION) -> Path:
    """An archive with right sums, whatever is in it."""
    parts, sums = [], b""
    for name, data in members.items():
        parts += [header(f"{top}/{name}", len(data)), data, bytes(-len(data) % 512)]
        sums += sum_line(hashlib.sha256(data).hexdigest(), name)
    parts += [header(f"{top}/{SUMS}", len(sums)), sums, bytes(-len(sums) % 512), bytes(1024)]
    path.write_bytes(b"".join(parts))
    return path


def test_a_rebuilt_archive_comes_in(archive: Path, tmp_path: Path) -> None:
    """So what the tests below refuse is refused for what they changed."""
    with GitJobStore(tmp_path / "home", "relaxed") as store:
        import_session(store, rebuilt(members_of(archive), tmp_path / "same"))
        assert store.sessions() == [SESSION]


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "runs/../../evil",
        "runs/x/../../../evil",
        "/etc/evil",
        "runs/a/b/c",
        "repo/.git/hooks/post-checkout",
        ".hidden",
        "runs/-x/log",
        "tasks.jsonl.x",
        "work/file",
    ],
)
def test_names_that_lead_elsewhere_are_refused(archive: Path, tmp_path: Path, name: str) -> None:
    """Nothing is written but what has a place in a session."""
    refused(rebuilt({**members_of(archive), name: b"evil"}, tmp_path / "x"), tmp_path / "home")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "x"]
    assert not Path("/etc/evil").exists()


@pytest.mark.parametrize("top", ["..", ".x", "-x", "a b", ""])
def test_a_top_directory_that_is_no_session_is_refused(archive: Path, tmp_path: Path, top: str) -> None:
    """The first part of each name is the session's id."""
    refused(rebuilt(members_of(archive), tmp_path / "x", top), tmp_path / "home")


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"L", b"x"],
)
def test_links_devices_and_extensions_are_refused(archive: Path, tmp_path: Path, kind: bytes) -> None:
    """Every kind of member but a plain file, as tar itself would write it, between members that are right."""
    raw = archive.read_bytes()
    info = tarfile.TarInfo(f"{SESSION}/runs/a/log")
    info.type, info.linkname, info.mode = kind, "/etc/passwd", 0o600
    first_bytes = 512 + -(-len(members_of(archive)[ABOUT]) // 512) * 512
    evil = raw[:first_bytes] + info.tobuf(tarfile.USTAR_FORMAT) + raw[first_bytes:]
    (tmp_path / "x").write_bytes(evil)
    refused(tmp_path / "x", tmp_path / "home")


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    """Text, zeros, another tar, a compressed one, a directory, a FIFO, a device."""
    other = io.BytesIO()
    with tarfile.open(fileobj=other, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("demo/session.json"))
    for raw in (b"", b"hello", bytes(10240), other.getvalue(), zlib.compress(other.getvalue())):
        (tmp_path / "x").write_bytes(raw)
        refused(tmp_path / "x", tmp_path / "home")
    os.mkfifo(tmp_path / "fifo")
    with GitJobStore(tmp_path / "home", "relaxed") as store:
        for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
            with pytest.raises(errors.Refused):
                import_session(store, path)


def test_a_size_without_an_end_is_refused_at_once(archive: Path, tmp_path: Path) -> None:
    """A member that says it has eight gigabytes, in a file of some kilobytes."""
    raw = archive.read_bytes()
    (tmp_path / "x").write_bytes(header(f"{SESSION}/{ABOUT}", 8**11 - 1) + raw[512:])
    refused(tmp_path / "x", tmp_path / "home")
    with pytest.raises(errors.InvalidInput, match="does not fit"):
        header(f"{SESSION}/{BUNDLE}", 8**11)


def test_parts_that_contradict_each_other_are_refused(archive: Path, tmp_path: Path) -> None:
    """Another session's page, another commit, no bundle, a newer format, a torn ledger, a damaged one."""
    members = members_of(archive)

    def changed(**parts: bytes) -> dict[str, bytes]:
        return {**members, **{name.replace("__", "."): data for name, data in parts.items()}}

    about = members[ABOUT]
    cases = {
        "another commit": changed(
            session__json=about.replace(about[about.index(b"commit_id") + 12 :][:8], b"00000000")
        ),
        "newer": changed(session__json=about.replace(b'"format":1', b'"format":2')),
        "not JSON": changed(session__json=b"{"),
        "no bundle": {name: data for name, data in members.items() if name != BUNDLE},
        "torn": changed(tasks__jsonl=members["tasks.jsonl"][:-9]),
        "damaged": changed(tasks__jsonl=members["tasks.jsonl"].replace(b'"intent"', b'"infant"', 1)),
        "another branch": changed(session__json=about.replace(b"refs/heads/main", b"refs/heads/../x")),
    }
    for name, parts in cases.items():
        assert parts != members, name
        refused(rebuilt(parts, tmp_path / "x"), tmp_path / "home")
    renamed = {**members, ABOUT: about.replace(b'"session_id":"demo"', b'"session_id":"evil"')}
    refused(rebuilt(renamed, tmp_path / "x", "evil"), tmp_path / "home")


def lines_changed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A ledger with other records and right checksums."""
    lines, prev = [], 0
    for line in data.splitlines():
        record = json.loads(line)
        change(record["data"])
        lines.append(encode(record["seq"], prev, encode_payload(record["data"])))
        prev = record["seq"]
    return b"".join(lines)


@pytest.mark.parametrize("target", [None, "moved"], ids=["same name", "other name"])
@pytest.mark.parametrize(
    ("ledger", "name"),
    [("tasks.jsonl", name) for name in ("task", "session", "job", "worker", "event_id")]
    + [("events.jsonl", name) for name in ("job_id", "session_id", "caller_session_id", "parent_job_id")],
)
@pytest.mark.parametrize("value", ["../../victim", "", 5], ids=repr)
def test_ids_in_ledgers_that_are_none_are_refused(
    archive: Path, tmp_path: Path, ledger: str, name: str, value: object, target: str | None
) -> None:
    """In the ledgers of what has ended, too: each id is the name of a directory for somebody, sometime."""
    members = members_of(archive)

    def change(data: dict[str, Any]) -> None:
        if name in data:
            data[name] = value

    parts = {**members, ledger: lines_changed(members[ledger], change)}
    assert parts != members
    error = refused(rebuilt(parts, tmp_path / "x"), tmp_path / "home", target)
    assert ledger in str(error)
    assert name in str(error)


@pytest.mark.parametrize("name", ["job_id", "parent_job_id", "run_id", "caller_session_id", "runner_id"])
def test_ids_in_rows_that_are_none_are_refused(home: Path, name: str) -> None:
    """Those by which something is looked for in the home, before the row is looked at any further."""
    with GitJobStore(home, "relaxed") as store:
        job = store.list(SESSION)[0]
    transfer._check_row(job)
    with pytest.raises(errors.InvalidInput, match="victim"):
        transfer._check_row(attrs.evolve(job, **{name: "../../victim"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("command", {"a": 1}),
        ("command", ["sh", 5]),
        ("timeout_s", "soon"),
        ("timeout_s", True),
        ("output_limit_bytes", "many"),
        ("cwd", 7),
        ("job", 7),
        ("status", "asleep"),
        ("status", "running"),
        ("exit_code", "0"),
        ("leftovers", [1]),
        ("truncated", "no"),
        ("stop_grace_s", "long"),
        ("at", "yesterday"),
    ],
)
def test_records_of_commands_that_nobody_writes_are_refused(
    archive: Path, tmp_path: Path, name: str, value: object
) -> None:
    """Whatever a reader would meet later stops the import now."""
    members = members_of(archive)

    def change(data: dict[str, Any]) -> None:
        if name in data:
            data[name] = value

    parts = {**members, "tasks.jsonl": lines_changed(members["tasks.jsonl"], change)}
    assert parts != members
    assert name in str(refused(rebuilt(parts, tmp_path / "x"), tmp_path / "home"))


def test_bundles_of_somebody_else_are_refused(archive: Path, tmp_path: Path, chaos: Chaos) -> None:
    """Flipped, cut, with prerequisites, a bomb, a base outside, a pack that lies about its count."""
    members = members_of(archive)
    whole = members[BUNDLE]
    head = whole.index(b"\n\n") + 2

    def pack(*entries: bytes, count: int | None = None) -> bytes:
        raw = struct.pack(">4sLL", b"PACK", 2, len(entries) if count is None else count) + b"".join(entries)
        return whole[:head] + raw + hashlib.sha1(raw).digest()

    bomb = zlib.compress(bytes(1 << 20))
    cases = [
        b"",
        whole[: len(whole) // 2],
        whole.replace(b"# v2 git bundle\n", b"# v2 git bundle\n-" + b"0" * 40 + b" \n", 1),
        whole.replace(b"# v2", b"# v3", 1),
        whole.replace(b"refs/heads/main", b"refs/heads/\nain", 1),
        pack(),
        pack(b"\x35" + zlib.compress(b"hello"), count=7),
        pack(b"\x75" + bytes(20) + zlib.compress(b"hello")),
        pack(b"\xb5\x01" + bomb),
        pack(b"\xbf\xff\xff\xff\xff\x7f" + bomb),
        pack(b"\x65\x01" + zlib.compress(b"hello")),
        pack(b"\x05" + zlib.compress(b"hello")),
        whole + b"x",
    ]
    source = random.Random(8)
    for _ in range(chaos.rounds(25, 300, "flipped bundles")):
        place = source.randrange(len(whole))
        flipped = whole[:place] + bytes((whole[place] ^ 1 << source.randrange(8),)) + whole[place + 1 :]
        raw = flipped[head:-20]
        cases.append(flipped[:head] + raw + hashlib.sha1(raw).digest())  # with a right sum of its own
    survived = 0
    for number, raw in enumerate(cases):
        path = rebuilt({**members, BUNDLE: raw}, tmp_path / "x")
        with GitJobStore(tmp_path / str(number), "relaxed") as store:
            try:
                import_session(store, path)
                survived += 1  # a flip in what nothing refers to, or that zlib does not look at
            except (errors.Refused, errors.Damaged):
                nothing_is_left(store)
        shutil.rmtree(tmp_path / str(number))
    assert survived <= len(cases) // 4
    chaos.count("bundles", len(cases))
    chaos.count("of them with the same objects", survived)


def test_a_delta_that_would_fill_the_memory_is_not_applied() -> None:
    """Its instructions are added up first: 100 of them copy 16 MB each."""
    delta = b"\x05\xff\xff\xff\xff\x0f" + b"\xf0\xff\xff\xff" * 100
    assert packscan.made_bytes(delta) == 100 * 0xFFFFFF
    assert packscan.made_bytes(b"\x05\x05\x90\x05") == 5
    assert packscan.made_bytes(b"\x05\x03\x03abc") == 3
    assert packscan.made_bytes(b"\x80\x80\x04\x05\x80") == 0x10000


def test_trees_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    """Links, `..`, `.git`, other repositories, and a tree that unfolds to a million files."""
    from openjobs.repo.packs import BLOB, TREE, object_id

    class Objects:
        def __init__(self) -> None:
            self.found: dict[bytes, bytes] = {}

        def add(self, raw: bytes) -> bytes:
            sha = object_id(TREE, raw)
            self.found[sha] = raw
            return sha

        def tree(self, sha: bytes) -> object:
            from openjobs.repo.trees import Tree

            return Tree.parse(self.found[sha])

    objects = Objects()
    blob = object_id(BLOB, b"x")
    for entry in (
        b"120000 link\0",
        b"160000 module\0",
        b"100644 ..\0",
        b"100644 .git\0",
        b"100644 .GIT\0",
        b"100644 git~1\0",
        b"100644 a\\b\0",
    ):
        with pytest.raises(errors.RepositoryRefused):
            bundle.list_regular_files(objects, objects.add(entry + blob))  # type: ignore[arg-type]
    below = objects.add(b"".join(b"100644 %03d\0" % number + blob for number in range(100)))
    for _ in range(3):
        below = objects.add(b"".join(b"40000 %03d\0" % number + below for number in range(100)))
    with pytest.raises(errors.RepositoryRefused, match="more than"):
        bundle.list_regular_files(objects, below)  # type: ignore[arg-type]
    deep = objects.add(b"100644 x\0" + blob)
    for _ in range(2000):
        deep = objects.add(b"40000 d\0" + deep)
    with pytest.raises(errors.RepositoryRefused, match="deeply"):
        bundle.list_regular_files(objects, deep)  # type: ignore[arg-type]


# --- failing disks ------------------------------------------------------------------------------------------

CODES = [(errno.EIO, False), (errno.ENOSPC, True), (errno.EACCES, False)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("code", "for_good"), CODES, ids=["EIO", "ENOSPC-for-good", "EACCES"])
def test_each_effect_of_an_export_may_fail(home: Path, tmp_path: Path, code: int, for_good: bool) -> None:
    """k = 1, 2, …: there is no file, or a whole one; never another one beside it that counts."""
    disk = FaultyDisk()
    ends = {"done": 0, "refused": 0, "unknown": 0}
    with GitJobStore(home, "relaxed", disk=disk) as store:
        k = 1
        while True:
            path = tmp_path / "x"
            disk.arm(k, code, for_good=for_good)
            try:
                export_session(store, SESSION, path)
                end = "done"
            except errors.StoreWriteFailed:
                assert not path.exists()
                end = "refused"
            except errors.OutcomeUnknown:
                end = "unknown"
            reached = bool(disk.failed)
            disk.disarm()
            ends[end] += 1
            if path.exists():
                with open(path, "rb") as file:
                    list(ArchiveReader(file.fileno(), "x").members())
                path.unlink()
            for left in tmp_path.iterdir():  # where the disk did not even let go of the temporary file
                assert for_good
                assert left.name.endswith(".tmp")
                left.unlink()
            if not reached:
                break
            k += 1
    assert min(ends.values()) >= 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("code", "for_good"), CODES, ids=["EIO", "ENOSPC-for-good", "EACCES"])
def test_each_effect_of_an_import_may_fail(
    archive: Path, tmp_path: Path, code: int, for_good: bool, chaos: Chaos
) -> None:
    """k = 1, 2, …: the session is not there, or there whole; the next import clears up and succeeds."""
    ends = {"done": 0, "refused": 0, "unknown": 0}
    step = 1 if chaos else 29
    k = 1
    while True:
        home, disk = tmp_path / str(k), FaultyDisk()
        store = GitJobStore(home, "relaxed", disk=disk)
        try:
            disk.arm(k, code, for_good=for_good)
            try:
                import_session(store, archive, "moved")
                end = "done"
            except (errors.Refused, errors.Damaged, errors.OutcomeUnknown) as error:
                end = "unknown" if store.has_session("moved") else "refused"
                said_unknown = isinstance(error, errors.OutcomeUnknown)
                if said_unknown is not (end == "unknown"):
                    pytest.fail(f"effect {k}: {error!r} was raised, and the import is {end}")
                if end == "refused" and "nothing was imported" not in str(error):
                    pytest.fail(f"effect {k}: {error!r} does not say what became of the import")
            reached = bool(disk.failed)
            disk.disarm()
            ends[end] += 1
            if end == "refused":
                assert store.sessions() == [], f"effect {k}: {disk.failed}"
                import_session(store, archive, "moved")
            assert store.fsck("moved").clean
            assert os.listdir(home / "imports") == [".lock"]
        finally:
            store.close()
        shutil.rmtree(home)
        if not reached:
            break
        k += step
    assert ends["refused"] > 3
    assert ends["done"] >= 1
    chaos.count("effects that failed", sum(ends.values()))


def test_an_import_that_was_killed_is_cleared_by_the_next(archive: Path, tmp_path: Path) -> None:
    """Killed at each of many effects: the session is not there, and the next import finds room."""

    class Killed(BaseException):
        pass

    class Dying(Disk):
        left = 0

        def write(self, fd: int, data: object) -> int:
            self.left -= 1
            if self.left == 0:
                os._exit(9)
            return super().write(fd, data)  # type: ignore[arg-type]

    for left in (1, 5, 20, 60, 90):
        home = tmp_path / str(left)
        child = os.fork()
        if child == 0:
            try:
                disk = Dying(durable=False)
                disk.left = left
                import_session(GitJobStore(home, "relaxed", disk=disk), archive)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with GitJobStore(home, "relaxed") as store:
            if not store.sessions():
                assert import_session(store, archive).session_id == SESSION
            assert store.fsck(SESSION).clean
            assert os.listdir(home / "imports") == [".lock"]
