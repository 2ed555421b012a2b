"""Sealed packs encoded anew: every object is there with its bytes, smaller, and what is not ours is left alone."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dulwich.pack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs import errors
from openjobs.durable import Disk, FileLock
from openjobs.repo import Change, GitRepository, RepositoryBusy, Transaction, View, repack
from openjobs.repo import git as git_module
from openjobs.repo import packs as packs_module
from openjobs.repo.objects import KEEP_TEXT, REPACKED_TEXT, ObjectStore, PackFile
from openjobs.repo.packs import (
    BLOB,
    COMMIT,
    OFS_DELTA,
    REF_DELTA,
    TAG,
    RollingPack,
    deflate,
    encode_index,
    entry_header,
    make_delta,
    object_id,
    offset_bytes,
)
from openjobs.repo.repack import Repacker, token_delta, verify
from openjobs.repo.view import GitView
from tests.support import git

STATUSES = ("queued", "running", "completed")


def row(number: int, status: str) -> bytes:
    source = random.Random(f"{number} {status}")
    return b'{"id": "%d", "status": "%s", "key": "%s"}\n' % (
        number,
        status.encode(),
        source.randbytes(60).hex().encode(),
    )


def step(number: int, status: str) -> Transaction:
    """As a job changes: its row in a page that is replaced, its message in a segment that grows."""

    def change(view: View) -> Change:
        page = f"jobs/{number // 64:04}.json"
        rows = {line.split(b'"')[3]: line for line in (view.read(page) or b"").splitlines(keepends=True)}
        rows[b"%d" % number] = row(number, status)
        log = f"history/{number // 100:04}.jsonl"
        return Change(
            files={page: b"".join(rows.values()), log: (view.read(log) or b"") + row(number, status)},
            subject=f"job {number} is {status}: probe part {number}",
            trailers=[("Openjobs-Job", f"{number:032x}"), ("Openjobs-Status", status)],
        )

    return change


def run_jobs(repository: GitRepository, first: int, count: int) -> None:
    steps = [step(number, status) for number in range(first, first + count) for status in STATUSES]
    for number in range(0, len(steps), 6):
        repository.transact(steps[number : number + 6])


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[GitRepository]:
    made = GitRepository.create(tmp_path / "repo", Disk(durable=False), {"meta.json": b"{}\n", "a/b/c/d": b"deep\n"})
    yield made
    made.close()


def packs(repository: GitRepository) -> list[PackFile]:
    directory = repository.path / ".git" / "objects" / "pack"
    return [PackFile(str(directory), path.stem) for path in sorted(directory.glob("*.pack"))]


def objects(repository: GitRepository) -> dict[str, str]:
    """Every object that git knows of, reachable or not: id, and kind and size."""
    out = git("cat-file", "--batch-all-objects", "--batch-check", cwd=repository.path)
    return {line.split()[0]: line for line in out.splitlines()}


def healthy(repository: GitRepository) -> None:
    """git inflates and hashes everything itself."""
    assert repository.check() == []
    assert "dangling" not in git("fsck", "--strict", "--full", "--no-dangling", cwd=repository.path)
    assert git("status", "--porcelain", cwd=repository.path) == ""
    for pack in packs(repository):
        git("verify-pack", f"{pack.base}.pack", cwd=repository.path)


def size_bytes(repository: GitRepository) -> int:
    return sum(pack.size_bytes() for pack in packs(repository))


def depths(repository: GitRepository) -> dict[str, int]:
    """The longest chain by kind of object, by git."""
    longest: dict[str, int] = {}
    for pack in packs(repository):
        for line in git("verify-pack", "-v", f"{pack.base}.pack", cwd=repository.path).splitlines():
            parts = line.split()
            if len(parts) == 7 and parts[1] in ("commit", "tree", "blob"):
                longest[parts[1]] = max(longest.get(parts[1], 0), int(parts[5]))
    return longest


def test_packs_become_much_smaller_and_lose_nothing(repository: GitRepository) -> None:
    """Much of the bytes goes; each object, each commit and the work tree are as before, by git's own check."""
    run_jobs(repository, 0, 130)
    before, size, log = objects(repository), size_bytes(repository), list(repository.log())
    repository.maintain()
    assert objects(repository) == before
    assert size_bytes(repository) < size * 0.6
    assert list(repository.log()) == log
    assert (repository.view().read("jobs/0000.json") or b"").count(b"completed") == 64
    healthy(repository)


def test_chains_are_long_for_files_and_short_for_the_rest(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's chain ends where it should; a tree's is short, and a commit's is three at most."""
    monkeypatch.setattr(repack, "_FILE_CHAIN", 90)
    run_jobs(repository, 0, 100)
    repository.maintain()
    found = depths(repository)
    assert 64 < found["blob"] <= 90
    assert found["tree"] <= 41
    assert found["commit"] <= 3


def test_a_second_run_does_nothing(repository: GitRepository) -> None:
    """No pack is written, whoever asks."""
    run_jobs(repository, 0, 40)
    repository.maintain()
    names = {pack.name for pack in packs(repository)}
    repository.maintain()
    assert {pack.name for pack in packs(repository)} == names
    other = GitRepository(repository.path, Disk(durable=False))
    other.maintain()
    other.close()
    # The one that the newest replaced goes, as with every restart.
    assert {pack.name for pack in packs(repository)} < names


def test_small_packs_are_taken_again_and_large_ones_are_not(repository: GitRepository) -> None:
    """When as much has come after it a small one is encoded with the new; one that is larger than that stays."""
    run_jobs(repository, 0, 40)
    repository.maintain()
    [large] = [pack.name for pack in packs(repository) if pack.is_repacked()]
    run_jobs(repository, 40, 12)
    repository.maintain()
    repacked = [pack.name for pack in packs(repository) if pack.is_repacked()]
    assert large in repacked
    assert len(repacked) == 2
    run_jobs(repository, 52, 60)
    repository.maintain()
    assert len([pack for pack in packs(repository) if pack.is_repacked()]) == 1
    healthy(repository)


def test_the_newest_pack_stays_and_is_gone_on_with(repository: GitRepository) -> None:
    """Neither the rolling pack's file nor what it replaced is touched, here or after a restart."""
    run_jobs(repository, 0, 34)
    busy = repository._busy_packs()
    assert busy
    repository.maintain()
    assert busy <= {pack.name for pack in packs(repository)}
    current = repository._current
    run_jobs(repository, 34, 1)
    repository.maintain()
    repository.close()
    again = GitRepository(repository.path, Disk(durable=False))
    again.transact([lambda view: None])
    assert again._current not in (None, current)
    run_jobs(again, 35, 40)
    again.maintain()
    assert len(list(again.log())) == 1 + 3 * 75
    healthy(again)
    again.close()


def test_what_no_commit_leads_to_is_carried_over(repository: GitRepository) -> None:
    """Loose ends in our packs stay: a commit that nobody refers to, blobs without one, a tag."""
    store = repository._objects
    rolling, versions = RollingPack(), [b"line\n" * 200 + b"%d\n" % number for number in range(20)]
    ids = [object_id(BLOB, version) for version in versions]
    for number, version in enumerate(versions):
        rolling.add(BLOB, ids[number], version, ids[number - 1] if number else None, versions[number - 1])
    tree = git("write-tree", cwd=repository.path)
    lost = f"tree {tree}\nauthor a <a@b> 1 +0000\ncommitter a <a@b> 1 +0000\n\nlost\n".encode()
    rolling.add(COMMIT, object_id(COMMIT, lost), lost)
    tag = f"object {object_id(COMMIT, lost).hex()}\ntype commit\ntag v\ntagger a <a@b> 1 +0000\n\nv\n".encode()
    rolling.add(TAG, object_id(TAG, tag), tag)
    repository._packs.publish(rolling.encode())
    run_jobs(repository, 0, 15)
    before = objects(repository)
    repository.maintain()
    assert objects(repository) == before
    assert [store.blob(sha) for sha in ids] == versions
    assert store.read(object_id(TAG, tag)) == (TAG, tag)
    assert all(pack.is_repacked() for pack in packs(repository) if pack.name not in repository._busy_packs())
    healthy(repository)


def test_a_large_pack_is_done_in_parts(repository: GitRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part holds the next commits; the source goes when all of it is in parts, and not before."""
    monkeypatch.setattr(repack, "_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(repack, "_CHUNK_COMMITS", 25)
    run_jobs(repository, 0, 110)
    before = objects(repository)
    repacker = Repacker(repository._packs, repository._objects)
    most = max(len(pack) for pack in packs(repository))
    there = 0
    while repacker.step(repository._busy_packs()):
        now = packs(repository)
        there = max(there, sum(pack.is_repacked() for pack in now))
        assert objects(repository) == before
    repacker.close()
    assert there > 8
    assert max(len(pack) for pack in packs(repository)) < most
    assert sum(map(len, packs(repository))) < len(before) * 1.3
    repository.maintain()
    assert objects(repository) == before
    healthy(repository)


def test_parts_of_a_run_that_was_broken_off_are_not_done_again(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process goes on where the last one was; its mending leaves the parts alone."""
    monkeypatch.setattr(repack, "_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(repack, "_CHUNK_COMMITS", 25)
    run_jobs(repository, 0, 110)
    before = objects(repository)
    repacker = Repacker(repository._packs, repository._objects)
    for _ in range(2):
        repacker.step(repository._busy_packs())
    repacker.close()
    parts = {pack.name for pack in packs(repository) if pack.is_repacked()}
    other = GitRepository(repository.path, Disk(durable=False))
    other.recover()
    assert parts <= {pack.name for pack in packs(other)}
    monkeypatch.setattr(repack, "_CHUNK_COMMITS", 26)
    other.maintain()
    other.close()
    assert objects(repository) == before
    healthy(repository)


def test_packs_and_files_of_others_are_left_alone(repository: GitRepository) -> None:
    """A foreign pack, one with a foreign `.keep`, and loose objects are where they were."""
    run_jobs(repository, 0, 34)
    (repository.path / "theirs").write_text("theirs\n")
    git("add", "theirs", cwd=repository.path)
    git("commit", "-qm", "theirs", cwd=repository.path)
    ids = git("rev-list", "--objects", "--no-object-names", "HEAD", cwd=repository.path)
    name = git("pack-objects", "-q", ".git/objects/pack/pack", cwd=repository.path, stdin=ids.encode() + b"\n")
    kept = next(pack for pack in packs(repository) if pack.name not in repository._busy_packs() and pack.is_ours())
    os.unlink(f"{kept.base}.keep")
    Path(f"{kept.base}.keep").write_text("mine")
    loose = sorted((repository.path / ".git" / "objects").glob("??/*"))
    assert loose
    run_jobs(repository, 34, 34)
    before = objects(repository)
    repository.maintain()
    assert {f"pack-{name}", kept.name} <= {pack.name for pack in packs(repository)}
    assert sorted((repository.path / ".git" / "objects").glob("??/*")) == loose
    assert objects(repository) == before
    healthy(repository)


def test_a_torn_mark_is_ours_and_costs_one_more_run(repository: GitRepository) -> None:
    """However much of the mark the power left: the pack is encoded once more, and then marked."""
    run_jobs(repository, 0, 34)
    repository.maintain()
    [pack] = [pack for pack in packs(repository) if pack.is_repacked()]
    before = objects(repository)
    for end in (b"", b"open", b"openjobs\n", b"openjobs\nrep", b"openjobs\n\0\0\0"):
        keep = Path(f"{pack.base}.keep")
        keep.chmod(0o600)
        keep.write_bytes(end)
        keep.chmod(0o400)
        assert pack.is_ours()
        assert not pack.is_repacked()
        repository.maintain()
        assert [found.name for found in packs(repository) if found.is_repacked()] == [pack.name]
        assert keep.read_bytes() == REPACKED_TEXT
        assert objects(repository) == before


def test_a_damaged_source_stays_and_the_rest_is_done(repository: GitRepository) -> None:
    """By its checksum, or by what is in it although the checksum is right: it is named and nothing of it is removed."""
    run_jobs(repository, 0, 60)
    bad = next(pack for pack in packs(repository) if pack.name not in repository._busy_packs())
    raw = bytearray(Path(f"{bad.base}.pack").read_bytes())
    raw[len(raw) // 2] ^= 0x55
    Path(f"{bad.base}.pack").write_bytes(raw)
    others = len(packs(repository))
    with pytest.raises(errors.Damaged) as raised:
        repository.maintain()
    assert raised.value.path == f"{bad.base}.pack"
    assert Path(f"{bad.base}.pack").read_bytes() == raw
    assert any(pack.is_repacked() for pack in packs(repository))
    assert len(packs(repository)) < others


def ours(repository: GitRepository, entries: list[tuple[bytes, bytes]]) -> PackFile:
    """A pack with our mark and right checksums that holds these entries under these ids."""
    raw, places = struct.pack(">4sLL", b"PACK", 2, len(entries)), []
    for sha, entry in entries:
        places.append((sha, len(raw), zlib.crc32(entry)))
        raw += entry
    checksum = hashlib.sha1(raw).digest()
    path = Path(repository._packs.path, f"pack-{checksum.hex()}")
    path.with_suffix(".keep").write_bytes(KEEP_TEXT)
    path.with_suffix(".pack").write_bytes(raw + checksum)
    path.with_suffix(".idx").write_bytes(encode_index(sorted(places), checksum))
    return PackFile(repository._packs.path, path.name)


WANTED = bytes(19) + b"\1"
EMPTY_DELTA = zlib.compress(make_delta(b"", b""))


@pytest.mark.parametrize(
    "entry",
    [
        entry_header(BLOB, 3) + b"no stream at all",
        b"\xb0" + b"\xff" * 100,
        entry_header(OFS_DELTA, 2) + offset_bytes(0) + EMPTY_DELTA,
        entry_header(OFS_DELTA, 2) + offset_bytes(7) + EMPTY_DELTA,
        entry_header(OFS_DELTA, 2) + offset_bytes(1 << 30) + EMPTY_DELTA,
        entry_header(OFS_DELTA, 2) + b"\xff" * 100,
        entry_header(REF_DELTA, 2) + WANTED[::-1] + EMPTY_DELTA,
        entry_header(COMMIT, 5) + deflate(b"hello"),
        entry_header(COMMIT, 9) + deflate(b"tree xyz\n"),
        entry_header(COMMIT, 46) + deflate(b"tree " + b"0" * 40 + b"\n"),
    ],
    ids=["garbage", "header", "itself", "within", "far", "distance", "base", "commit", "commit's tree", "no tree"],
)
def test_a_source_that_lies_stays_and_the_rest_is_done(repository: GitRepository, entry: bytes) -> None:
    """Its checksums are right and an entry of it is none: it is named, and what else is in it can still be read."""
    run_jobs(repository, 0, 34)
    before = objects(repository)
    one = object_id(BLOB, b"one")
    bad = ours(repository, [(one, entry_header(BLOB, 3) + deflate(b"one")), (WANTED, entry)])
    raw = Path(f"{bad.base}.pack").read_bytes()
    with pytest.raises(errors.Damaged) as raised:
        repository.maintain()
    assert raised.value.path == f"{bad.base}.pack"
    assert Path(f"{bad.base}.pack").read_bytes() == raw
    assert repository._objects.blob(one) == b"one"
    for path in Path(repository._packs.path).glob(f"{bad.name}.*"):
        path.unlink()
    repository.close()
    repository.maintain()
    assert all(pack.is_repacked() for pack in packs(repository) if pack.name not in repository._busy_packs())
    assert objects(repository) == before
    healthy(repository)


def test_bases_in_other_packs_are_found_there(repository: GitRepository) -> None:
    """A pack of ours whose deltas name their bases by id (what a bundle may bring): each object is written with its
    own content."""
    run_jobs(repository, 0, 34)
    texts = [b"line\n" * 100 + b"%d\n" % number for number in range(4)]
    ids = [object_id(BLOB, text) for text in texts]
    made = [make_delta(texts[number - 1], text) for number, text in enumerate(texts)]
    ours(repository, [(ids[0], entry_header(BLOB, len(texts[0])) + deflate(texts[0]))])
    first = entry_header(REF_DELTA, len(made[1])) + ids[0] + deflate(made[1])
    second = entry_header(OFS_DELTA, len(made[2])) + offset_bytes(len(first)) + deflate(made[2])
    third = entry_header(REF_DELTA, len(made[3])) + ids[2] + deflate(made[3])
    ours(repository, [(ids[1], first), (ids[2], second), (ids[3], third)])
    repository.maintain()
    assert all(pack.is_repacked() for pack in packs(repository) if pack.name not in repository._busy_packs())
    repository.close()
    assert [repository._objects.blob(sha) for sha in ids] == texts
    healthy(repository)


def test_a_file_that_goes_back_and_forth_is_there_in_each_version(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory may be as it was many commits ago, in this part of a large pack or in the one before; and it may hold
    another repository, of which nothing is here."""
    monkeypatch.setattr(repack, "_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(repack, "_CHUNK_COMMITS", 25)
    monkeypatch.setattr(repack, "_CACHE_BYTES", 2_000)
    head = git("rev-parse", "HEAD", cwd=repository.path)
    git("update-index", "--add", "--cacheinfo", f"160000,{head},module", cwd=repository.path)
    git("commit", "-qm", "a repository in it", cwd=repository.path)
    (repository.path / "module").mkdir()
    texts = [random.Random(number).randbytes(300).hex().encode() for number in range(3)]
    for number in range(150):
        text = texts[number % 3]
        files = {"a/b/file": text, f"a/{number % 2}/x": text[:20], "top": text[::-1]}
        repository.transact([lambda view, files=files: Change(files=files, subject="x")])
    before = objects(repository)
    repository.maintain()
    assert objects(repository) == before
    newest = list(repository.log())[:150]
    for number, info in enumerate(reversed(newest)):
        assert repository.view(info.commit_id).read("a/b/file") == texts[number % 3]
    healthy(repository)


@pytest.mark.parametrize("lost", ["commit", "tree", "both"])
def test_what_is_missing_elsewhere_stops_nothing(repository: GitRepository, lost: str) -> None:
    """A foreign commit, or what it holds, is gone from the middle of the history: ours are encoded all the same."""
    run_jobs(repository, 0, 34)
    (repository.path / "theirs").write_text("theirs\n")
    git("add", "theirs", cwd=repository.path)
    head = git("rev-parse", "HEAD", cwd=repository.path)
    git("update-index", "--add", "--cacheinfo", f"160000,{head},module", cwd=repository.path)
    git("commit", "-qm", "theirs", cwd=repository.path)
    gone = [git("rev-parse", name, cwd=repository.path) for name in ("HEAD", "HEAD^{tree}")]
    run_jobs(repository, 34, 34)
    before = objects(repository)
    repository.close()
    for sha in {"commit": gone[:1], "tree": gone[1:], "both": gone}[lost]:
        (repository.path / ".git" / "objects" / sha[:2] / sha[2:]).unlink()
        del before[sha]
    repository.maintain()
    assert objects(repository) == before
    assert all(pack.is_repacked() for pack in packs(repository) if pack.name not in repository._busy_packs())
    assert (repository.view().read("jobs/0001.json") or b"").count(b"completed") == 4
    for pack in packs(repository):
        git("verify-pack", f"{pack.base}.pack", cwd=repository.path)


def test_files_that_were_written_otherwise_are_not_believed(repository: GitRepository, tmp_path: Path) -> None:
    """The pack with its objects right and its checksum wrong, and an index that is not the one of these objects."""
    run_jobs(repository, 0, 4)
    pack = packs(repository)[0]
    entries = pack.entries()
    for end in ("pack", "idx"):
        shutil.copy(f"{pack.base}.{end}", tmp_path / f"x.{end}")
    made, index = str(tmp_path / "x.pack"), str(tmp_path / "x.idx")
    verify(made, index, entries)
    for path in (made, index):
        raw = Path(path).read_bytes()
        Path(path).write_bytes(raw[:-1] + bytes((raw[-1] ^ 1,)))
        with pytest.raises(errors.Damaged, match="it has other bytes than were written") as raised:
            verify(made, index, entries)
        assert raised.value.path == path
        Path(path).write_bytes(raw)
    verify(made, index, entries)


def test_a_wrong_new_pack_is_never_seen(repository: GitRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read back with another content is damage: the old packs stay, the new one never gets its name."""
    run_jobs(repository, 0, 34)
    before, names = objects(repository), [pack.name for pack in packs(repository)]
    monkeypatch.setattr(repack, "token_delta", lambda old, new: token_delta(old, new[:-2] + b"!\n"))
    with pytest.raises(errors.Damaged):
        repository.maintain()
    assert [pack.name for pack in packs(repository)] == names
    assert sorted({path.suffix for path in Path(repository._packs.path).iterdir()}) == [".idx", ".keep", ".pack"]
    assert len(list(Path(repository._packs.path).glob("*.keep"))) == len(names)
    assert objects(repository) == before
    monkeypatch.undo()
    repository.maintain()
    healthy(repository)


def test_a_busy_repository_is_left_alone(repository: GitRepository) -> None:
    """The flock is only tried."""
    run_jobs(repository, 0, 34)
    lock = FileLock(repository.path / ".git" / "openjobs" / "lock", Disk(durable=False))
    assert lock.try_acquire()
    names = [pack.name for pack in packs(repository)]
    with pytest.raises(RepositoryBusy):
        repository.maintain()
    lock.release()
    assert [pack.name for pack in packs(repository)] == names


def test_others_get_in_between_two_steps(repository: GitRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process commits after every step; one that holds the lock for a moment is waited for."""
    run_jobs(repository, 0, 110)
    other = GitRepository(repository.path, Disk(durable=False))
    lock = FileLock(repository.path / ".git" / "openjobs" / "lock", Disk(durable=False))
    turns: list[int] = []

    def sleep(seconds: float) -> None:
        turns.append(len(turns))
        if len(turns) == 2:
            assert lock.try_acquire()
        elif len(turns) == 3:
            lock.release()
        else:
            run_jobs(other, 1000 + len(turns), 1)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(git_module, "MAINTAIN_GAP_S", 0)
    monkeypatch.setattr(repack, "_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(repack, "_CHUNK_COMMITS", 40)
    repository.maintain()
    monkeypatch.undo()
    assert len(turns) > 5
    subjects = [info.subject for info in repository.log()]
    assert len(subjects) == len(set(subjects)) == 1 + 330 + 3 * (len(turns) - 2)
    run_jobs(repository, 500, 1)
    run_jobs(other, 501, 1)
    other.close()
    healthy(repository)


def test_an_old_version_is_read_in_one_walk_along_its_chain(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the longest one, too: each entry of it is inflated once."""
    rows = [random.Random(number).randbytes(256).hex().encode() for number in range(128)]
    repository.transact([lambda view: Change(files={"page": b"\n".join(rows)}, subject="page")])
    for number in range(40):
        repository.transact([_replaced(number * 7 + k) for k in range(7)])
    repository.maintain()
    longest = depths(repository)["blob"]
    assert longest > 200
    inflated: list[int] = []
    inflate = packs_module._inflate

    def counted(source: packs_module.Source, at: int, *more: Any) -> bytes:
        inflated.append(at)
        return inflate(source, at, *more)

    monkeypatch.setattr(packs_module, "_inflate", counted)
    most = 0
    for info in list(repository.log())[::20]:
        store = ObjectStore(repository.path / ".git")
        view = GitView(store, info.commit_id, repository._commit(info.commit_id).tree)
        view.version("page")  # the trees
        inflated.clear()
        view.read("page")
        assert len(inflated) == len(set(inflated))
        most = max(most, len(inflated))
        store.close()
    assert 100 < most <= longest + 1


def _replaced(number: int) -> Transaction:
    def change(view: View) -> Change:
        rows = (view.read("page") or b"").split(b"\n")
        rows[number % len(rows)] = random.Random(1000 + number).randbytes(256).hex().encode()
        return Change(files={"page": b"\n".join(rows)}, subject=f"row {number}")

    return change


WORDS = st.lists(
    st.sampled_from([b"tree ", b"a" * 40, b"b" * 40, b"\n", b" ", b"author x", b"", "→ ".encode()]), max_size=40
)


@given(WORDS | st.lists(st.binary(max_size=30), max_size=20), WORDS | st.lists(st.binary(max_size=30), max_size=20))
def test_a_delta_of_words_gives_the_new_text(old: list[bytes], new: list[bytes]) -> None:
    """Whatever the words, and however they repeat."""
    one, other = b"".join(old), b"".join(new)
    assert b"".join(dulwich.pack.apply_delta(one, token_delta(one, other))) == other
