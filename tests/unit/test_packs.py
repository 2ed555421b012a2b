"""Packs are what git says they are: deltas, indexes, joined packs, against dulwich and git itself."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import struct
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import dulwich.objects
import dulwich.pack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs import errors
from openjobs.durable import Disk
from openjobs.repo import maintain
from openjobs.repo.index import Index, entry_matches, make_entry
from openjobs.repo.objects import ObjectStore, PackFile
from openjobs.repo.packdir import PackDirectory, holds_all, is_whole
from openjobs.repo.packs import (
    BLOB,
    COMMIT,
    MAX_CHAIN,
    OFS_DELTA,
    REF_DELTA,
    TREE,
    EncodedPack,
    RollingPack,
    common_prefix,
    common_suffix,
    deflate,
    encode_delta,
    encode_index,
    entry_header,
    make_delta,
    object_id,
    offset_bytes,
    read_header,
    read_offset,
)
from openjobs.repo.packs import store as stored
from openjobs.repo.packscan import PackRegion, index_pack, made_bytes, scan_pack
from openjobs.repo.trees import DIRECTORY, EMPTY, FILE, Tree, path_parts
from openjobs.repo.view import parse_commit
from tests.support import git
from tests.support.disks import FaultyDisk


@st.composite
def edited(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A text of lines, and the same with some lines changed, removed, added or moved."""
    lines = draw(st.lists(st.binary(max_size=200), max_size=40))
    repeat = draw(st.integers(1, 60))
    old = [line * repeat for line in lines]
    new = list(old)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(new)))
        action = draw(st.sampled_from(["insert", "drop", "swap"]))
        if action == "insert":
            new.insert(at, draw(st.binary(max_size=4000)))
        elif new:
            moved = new.pop(at % len(new))
            if action == "swap":
                new.insert(draw(st.integers(0, len(new))), moved)
    return b"\n".join(old), b"\n".join(new)


@given(edited())
def test_a_delta_gives_the_new_text_by_dulwich(texts: tuple[bytes, bytes]) -> None:
    """dulwich's `apply_delta` turns old into new by our instructions."""
    old, new = texts
    assert b"".join(dulwich.pack.apply_delta(old, make_delta(old, new))) == new


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300), st.integers(1, 100))
def test_common_ends_are_as_long_as_they_can_be(head: bytes, one: bytes, other: bytes, repeat: int) -> None:
    """Prefix and suffix are those that a byte by byte comparison finds."""
    a, b = head * repeat + one + head * repeat, head * repeat + other + head * repeat
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == expected
    limit = min(len(a), len(b)) - expected
    last = next((i for i in range(limit) if a[-1 - i] != b[-1 - i]), limit)
    assert common_suffix(a, b, limit) == last


def test_a_large_copy_is_split() -> None:
    """One instruction copies 64 KB at most; a text of megabytes needs many."""
    old = random.Random(1).randbytes(3_000_000)
    new = old[:1_234_567] + b"changed" + old[1_234_567:]
    delta = make_delta(old, new)
    assert b"".join(dulwich.pack.apply_delta(old, delta)) == new
    assert len(delta) < 1000


def test_two_rows_far_apart_make_a_small_delta() -> None:
    """The region between two changed rows is not written again."""
    rows = [b"row %d " % n + bytes([65 + n % 26]) * 500 for n in range(100)]
    old = b"\n".join(rows)
    rows[3], rows[90] = b"x" * 100, b"y" * 100
    assert len(make_delta(old, b"\n".join(rows))) < 1000


@st.composite
def rows_of_fields(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two rows of fields that differ in some: names twice, zero bytes and separators inside values too."""
    field = st.binary(max_size=12) | st.sampled_from([b"", b",", b'"', b',"', b"\0", b'\0,"'])
    old = draw(st.lists(field, min_size=5, max_size=40))
    new = [draw(field) if draw(st.integers(0, 4)) == 0 else each for each in old]
    return b',"'.join(old), b',"'.join(new)


@given(rows_of_fields(), st.binary(max_size=200), st.binary(max_size=200))
def test_a_row_that_changed_in_some_fields_comes_back(rows: tuple[bytes, bytes], head: bytes, tail: bytes) -> None:
    """Whatever stands in the fields, and around the row."""
    old, new = (head + row + tail for row in rows)
    assert b"".join(dulwich.pack.apply_delta(old, make_delta(old, new))) == new


def test_only_the_changed_fields_of_a_row_are_written() -> None:
    """What lies between the first and the last field that changed is copied."""
    fields = [b'"field %d":"%s"' % (n, b"v" * 30) for n in range(30)]
    old = b"{" + b",".join(fields) + b"}"
    fields[1], fields[28] = b'"field 1":"running"', b'"field 28":7'
    new = b"{" + b",".join(fields) + b"}"
    delta = make_delta(old, new)
    assert b"".join(dulwich.pack.apply_delta(old, delta)) == new
    assert len(delta) < 100


@given(st.integers(0, 2**40))
def test_numbers_in_entries_come_back(number: int) -> None:
    """Sizes and distances, at every length."""
    assert read_offset(offset_bytes(number), 0) == (number, len(offset_bytes(number)))
    header = entry_header(BLOB, number)
    assert read_header(header) == (BLOB, number, len(header))


@given(st.binary(max_size=10_000))
def test_small_tables_deflate_for_everybody(data: bytes) -> None:
    """What is deflated with a small window is inflated by who knows nothing of it."""
    assert zlib.decompress(deflate(data)) == data


Objects = list[tuple[int, bytes, bytes | None]]


def history(seed: int, count: int, *, size: int = 4000) -> list[bytes]:
    """Versions of a page, each with a row changed."""
    source = random.Random(seed)
    rows = [source.randbytes(20).hex().encode() for _ in range(size // 40)]
    versions = []
    for _ in range(count):
        rows[source.randrange(len(rows))] = source.randbytes(20).hex().encode()
        versions.append(b"\n".join(rows))
    return versions


def fill(rolling: RollingPack, versions: list[bytes]) -> list[bytes]:
    """Each version on top of the one before; the ids."""
    ids: list[bytes] = []
    for number, data in enumerate(versions):
        sha = object_id(BLOB, data)
        if number:
            rolling.add(BLOB, sha, data, ids[-1], versions[number - 1])
        else:
            rolling.add(BLOB, sha, data)
        ids.append(sha)
    return ids


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    (tmp_path / ".git" / "objects" / "pack").mkdir(parents=True)
    made = ObjectStore(tmp_path / ".git")
    yield made
    made.close()


@pytest.fixture
def directory(store: ObjectStore) -> PackDirectory:
    return PackDirectory(store, Disk(durable=False))


def write(directory: PackDirectory, rolling: RollingPack) -> str:
    encoded = rolling.encode()
    directory.publish(encoded)
    return encoded.name


def contents_by_dulwich(path: Path) -> dict[bytes, bytes]:
    with dulwich.pack.Pack(str(path), object_format=dulwich.objects.DEFAULT_OBJECT_FORMAT) as pack:
        pack.check()
        return {bytes.fromhex(sha.decode()): pack[sha].as_raw_string() for sha in pack}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.binary(max_size=3000)), min_size=1, max_size=30))
def test_a_pack_is_read_back_by_dulwich(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bytes]]
) -> None:
    """Whatever objects in whatever chains: dulwich finds each under its id, with its bytes."""
    root = tmp_path_factory.mktemp("pack")
    (root / "objects" / "pack").mkdir(parents=True)
    store = ObjectStore(root)
    rolling, expected, newest = RollingPack(), {}, {}
    for path, repeat, data in steps:
        data = data * repeat
        sha = object_id(BLOB, data)
        base = newest.get(path)
        if base:
            rolling.add(BLOB, sha, data, base, expected[base])
        else:
            rolling.add(BLOB, sha, data)
        newest[path], expected[sha] = sha, data
    name = write(PackDirectory(store, Disk(durable=False)), rolling)
    assert contents_by_dulwich(root / "objects" / "pack" / name) == expected
    assert {sha: store.blob(sha) for sha in expected} == expected
    assert is_whole(PackFile(store.pack_dir, name))
    shutil.rmtree(root)


def test_chains_end_and_begin_again(store: ObjectStore, directory: PackDirectory, tmp_path: Path) -> None:
    """A chain has 50 deltas at most, by `git verify-pack`; every version can be read."""
    versions = history(1, 120)
    rolling = RollingPack()
    ids = fill(rolling, versions)
    name = write(directory, rolling)
    git("init", "-q", ".", cwd=tmp_path)
    lines = git("verify-pack", "-v", Path(store.pack_dir) / f"{name}.pack", cwd=tmp_path).splitlines()
    depths = [int(line.split()[5]) for line in lines if len(line.split()) == 7]
    assert max(depths) == MAX_CHAIN
    assert [store.blob(sha) for sha in ids] == versions
    assert rolling.size_bytes < 3 * 4000 + 120 * 200


def test_the_rolling_pack_goes_on_after_a_restart(store: ObjectStore, directory: PackDirectory) -> None:
    """Resumed from its file it is the same pack: same bytes, same chains, same count of commits."""
    versions = history(2, 60)
    rolling = RollingPack()
    ids = fill(rolling, versions[:40])
    rolling.add(COMMIT, object_id(COMMIT, b"tree x"), b"tree x")
    name = write(directory, rolling)
    resumed = directory.resume()
    assert resumed.name == name
    assert resumed.rolling.encode().name == name
    assert resumed.rolling.commits == 1
    for again in (rolling, resumed.rolling):
        for number in range(40, 60):
            sha = object_id(BLOB, versions[number])
            again.add(BLOB, sha, versions[number], object_id(BLOB, versions[number - 1]), versions[number - 1])
    assert resumed.rolling.encode() == rolling.encode()
    assert ids[0] in resumed.rolling


def test_a_rolled_back_pack_is_as_before() -> None:
    """Nothing of an abandoned batch is in the next one."""
    versions = history(3, 20)
    rolling = RollingPack()
    ids = fill(rolling, versions[:10])
    before, mark = rolling.encode(), rolling.mark()
    before = (before.name, before.index)
    for number in range(10, 20):
        rolling.add(BLOB, object_id(BLOB, versions[number]), versions[number], ids[-1], versions[9])
    rolling.rollback(mark)
    assert object_id(BLOB, versions[15]) not in rolling
    after = rolling.encode()
    assert (after.name, after.index) == before


def joined(store: ObjectStore, directory: PackDirectory, count: int, *, doubles: bool) -> dict[bytes, bytes]:
    """`count` sealed packs; with doubles, each begins with the last two versions of the one before."""
    expected: dict[bytes, bytes] = {}
    versions = history(4, count * 12)
    for number in range(count):
        part = versions[max(0, number * 12 - (2 if doubles else 0)) : number * 12 + 12]
        rolling = RollingPack()
        ids = fill(rolling, part)
        expected.update(zip(ids, part, strict=True))
        write(directory, rolling)
    return expected


@pytest.mark.parametrize("doubles", [False, True])
def test_joined_packs_hold_everything_once(
    store: ObjectStore, directory: PackDirectory, tmp_path: Path, doubles: bool
) -> None:
    """Eight packs become one, which git verifies, and in which each object is once."""
    expected = joined(store, directory, 8, doubles=doubles)
    assert maintain.join_packs(directory, store, busy=set()) == 7
    [pack] = store.packs()
    assert len(pack) == len(expected)
    assert contents_by_dulwich(Path(pack.base)) == expected
    assert {sha: store.blob(sha) for sha in expected} == expected
    git("init", "-q", ".", cwd=tmp_path)
    git("verify-pack", f"{pack.base}.pack", cwd=tmp_path)
    assert git("index-pack", "--strict", "-o", tmp_path / "x.idx", f"{pack.base}.pack", cwd=tmp_path)
    assert (tmp_path / "x.idx").read_bytes() == Path(f"{pack.base}.idx").read_bytes()
    assert sorted(path.suffix for path in Path(store.pack_dir).iterdir()) == [".idx", ".keep", ".pack"]


def test_packs_in_use_and_of_others_are_not_joined(store: ObjectStore, directory: PackDirectory) -> None:
    """What the next batch goes on with stays, and so does every pack without our `.keep`."""
    joined(store, directory, 10, doubles=False)
    names = sorted(pack.name for pack in store.packs())
    Path(store.pack_dir, f"{names[0]}.keep").unlink()
    Path(store.pack_dir, f"{names[1]}.keep").write_bytes(b"somebody else's")
    maintain.join_packs(directory, store, busy={names[2]})
    assert set(names[:3]) <= {pack.name for pack in store.packs()}
    assert len(store.packs()) == len(names)
    maintain.join_packs(directory, store, busy=set())
    assert set(names[:2]) <= {pack.name for pack in store.packs()}
    assert len(store.packs()) == 3


def test_mending_removes_only_what_another_pack_holds(store: ObjectStore, directory: PackDirectory) -> None:
    """A subset goes, halves go; a pack with an object of its own stays; a damaged superset proves nothing."""
    versions = history(5, 30)
    rolling = RollingPack()
    ids = fill(rolling, versions[:10])
    small = write(directory, rolling)
    rolling.add(BLOB, object_id(BLOB, versions[10]), versions[10], ids[-1], versions[9])
    large = write(directory, rolling)
    other = RollingPack()
    fill(other, versions[20:])
    alone = write(directory, other)
    half = Path(store.pack_dir, "pack-" + "0" * 40)
    half.with_suffix(".keep").write_bytes(b"openjobs\n")
    half.with_suffix(".pack").write_bytes(b"PACK")
    foreign = Path(store.pack_dir, "pack-" + "1" * 40 + ".pack")
    foreign.write_bytes(b"PACK")
    foreign.chmod(0o400)
    damaged = Path(store.pack_dir, f"{large}.pack")
    raw = bytearray(damaged.read_bytes())
    damaged.chmod(0o600)
    damaged.write_bytes(raw[:-30] + b"x" + raw[-29:])
    directory.mend()
    assert {pack.name for pack in store.packs()} == {small, large, alone}
    damaged.write_bytes(raw)
    directory.mend()
    assert {pack.name for pack in store.packs()} == {large, alone}
    assert not half.with_suffix(".pack").exists()
    assert foreign.exists()
    assert holds_all(PackFile(store.pack_dir, large), PackFile(store.pack_dir, large))


@pytest.mark.parametrize("at", range(0, 400, 7))
def test_a_damaged_pack_is_never_another_content(store: ObjectStore, directory: PackDirectory, at: int) -> None:
    """A flipped byte anywhere in the pack is `Damaged` or harmless, never a wrong or an empty content."""
    versions = history(6, 8, size=400)
    rolling = RollingPack()
    ids = fill(rolling, versions)
    path = Path(store.pack_dir, write(directory, rolling) + ".pack")
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= 0x55
    path.chmod(0o600)
    path.write_bytes(raw)
    for sha, expected in zip(ids, versions, strict=True):
        try:
            found = store.blob(sha)
        except errors.Damaged:
            continue
        assert found == expected


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("end", [".pack", ".idx"])
def test_a_cut_pack_is_damage(store: ObjectStore, directory: PackDirectory, share: float, end: str) -> None:
    """The newest object of a pack whose end is missing cannot be read, and says so."""
    rolling = RollingPack()
    ids = fill(rolling, history(7, 8))
    path = Path(store.pack_dir, write(directory, rolling) + end)
    raw = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(errors.Damaged):
        store.blob(ids[-1])


def test_a_pack_that_goes_while_it_is_looked_for_is_found_again(store: ObjectStore, directory: PackDirectory) -> None:
    """The reader knows the old pack; a writer replaces it; the next read lists the packs again."""
    versions = history(8, 20)
    rolling = RollingPack()
    ids = fill(rolling, versions[:10])
    old = write(directory, rolling)
    assert store.blob(ids[0]) == versions[0]
    rolling.add(BLOB, object_id(BLOB, versions[10]), versions[10], ids[-1], versions[9])
    write(directory, rolling)
    directory.remove(old)
    assert [store.blob(sha) for sha in ids] == versions[:10]


def test_loose_objects_are_read_and_verified(store: ObjectStore, tmp_path: Path) -> None:
    """A loose object is its bytes; an empty, cut or exchanged file is damage."""
    data = b"content" * 100
    sha = object_id(BLOB, data)
    path = tmp_path / ".git" / "objects" / sha.hex()[:2] / sha.hex()[2:]
    path.parent.mkdir()
    good = zlib.compress(b"blob %d\0" % len(data) + data)
    for bad in (b"", good[:-5], good + b"x", zlib.compress(b"blob 3\0abc"), zlib.compress(b"blob 4\0abc"), b"garbage"):
        path.write_bytes(bad)
        with pytest.raises(errors.Damaged):
            store.blob(sha)
    path.write_bytes(good)
    assert store.blob(sha) == data
    with pytest.raises(errors.Damaged, match="kind"):
        store.commit(sha)


def test_packs_of_git_are_read(store: ObjectStore, tmp_path: Path) -> None:
    """What git packed itself (its own deltas, REF_DELTA too) is read as git reads it."""
    git("init", "-q", ".", cwd=tmp_path)
    for number, data in enumerate(history(9, 12, size=8000)):
        (tmp_path / "page").write_bytes(data)
        git("add", "page", cwd=tmp_path)
        git("commit", "-qm", f"step {number}", cwd=tmp_path)
    ids = git("rev-list", "--objects", "--no-object-names", "HEAD", cwd=tmp_path).splitlines()
    for delta in (["--delta-base-offset"], []):
        name = git(
            "pack-objects", "-q", *delta, ".git/objects/pack/pack", cwd=tmp_path, stdin="\n".join(ids).encode() + b"\n"
        )
        pack = PackFile(store.pack_dir, f"pack-{name}")
        assert len(pack) == len(ids)
        store.close()
        git("prune-packed", cwd=tmp_path)
        for text in ids:
            kind, data = store.read(bytes.fromhex(text))
            assert object_id(kind, data).hex() == text


@given(
    st.dictionaries(
        st.text("ab.-/0", min_size=1, max_size=5).filter(lambda t: "/" not in t), st.booleans(), max_size=20
    )
)
def test_trees_are_sorted_as_git_sorts(names: dict[str, bool]) -> None:
    """Built in any order, a tree has the bytes that dulwich gives it, and patching an entry is the same as building."""
    tree, model = EMPTY, dulwich.objects.Tree()
    for name, is_directory in names.items():
        sha = object_id(BLOB, name.encode())
        tree = tree.put(name.encode(), DIRECTORY if is_directory else FILE, bytes(20))
        tree = tree.put(name.encode(), DIRECTORY if is_directory else FILE, sha)
        model.add(name.encode(), DIRECTORY if is_directory else FILE, sha.hex().encode())
    assert tree.raw == model.as_raw_string()
    assert object_id(TREE, tree.raw).hex().encode() == model.id
    assert Tree.parse(tree.raw).entries == tree.entries
    assert list(tree.entries) == [entry.path for entry in model.iteritems()]


@pytest.mark.parametrize(
    "path",
    [
        *("", "/a", "a/", "a//b", ".", "..", "a/../b", ".git/config", "a/.GIT/b", ".git./x", ".git /x", "git~1/x"),
        *("a\0b", "a\nb", "a\\b", ".g\u200cit/x", "x" * 300),
    ],
)
def test_a_path_that_leaves_the_work_tree_is_refused(path: str) -> None:
    """As git refuses it, on whatever file system."""
    with pytest.raises(errors.InvalidInput):
        path_parts(path)


@pytest.mark.parametrize("raw", [b"100644 a", b"100644 a\0short", b"x a\0" + bytes(20), b"100644 a/b\0" + bytes(20)])
def test_a_damaged_tree_is_damage(raw: bytes) -> None:
    """Cut, or with a name that is none."""
    with pytest.raises(errors.Damaged):
        Tree.parse(raw)


SIGNED = b"""tree %s
parent %s
parent %s
author A <a@b> C <c@d> 1 +0100
committer Someone <x@y> 1700000000 -0500
encoding ISO-8859-1
gpgsig -----BEGIN PGP SIGNATURE-----
 tree of lies
 -----END PGP SIGNATURE-----

subject

Key: value
""" % (b"1" * 40, b"2" * 40, b"3" * 40)


def test_a_foreign_commit_may_have_any_headers() -> None:
    """Unknown ones are passed over, with their further lines; the time is the committer's, whatever his zone."""
    commit = parse_commit(SIGNED, "x")
    assert (commit.tree.hex(), commit.parents) == ("1" * 40, ("2" * 40, "3" * 40))
    assert commit.author == "A <a@b> C <c@d>"
    assert commit.time == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    info = commit.info("x")
    assert (info.subject, info.trailer("Key")) == ("subject", "value")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"tree 1111", b"tree"),
        (b"tree 1111", b"tree 11"),
        (b"tree 1111", b"tree xxxx"),
        (b"tree 1111", b"blob 1111"),
        (b"parent 33", b"parent 3"),
        (b"parent 33", b"parent AA"),
        (b"parent 33", b"parent \xff\xff"),
        (b"1700000000 -0500", b""),
        (b"1700000000 -0500", b"never"),
        (b"1700000000 -0500", b"1" * 30),
    ],
)
def test_a_commit_that_lies_is_damage(old: bytes, new: bytes) -> None:
    """Without a tree, with a parent that is none, at no time that there is."""
    assert old in SIGNED
    with pytest.raises(errors.Damaged, match="commit x is damaged"):
        parse_commit(SIGNED.replace(old, new), "x")


# --- packs of somebody else, read from end to end -----------------------------------------------------------


def pack_of(*entries: bytes, count: int | None = None, end: bytes = b"") -> bytes:
    """A pack with a right checksum, whatever its entries are."""
    raw = struct.pack(">4sLL", b"PACK", 2, len(entries) if count is None else count) + b"".join(entries) + end
    return raw + hashlib.sha1(raw).digest()


def blob(data: bytes, size: int | None = None) -> bytes:
    return entry_header(BLOB, len(data) if size is None else size) + zlib.compress(data)


def delta(distance: int, old: bytes, new: bytes) -> bytes:
    made = make_delta(old, new)
    return entry_header(OFS_DELTA, len(made)) + offset_bytes(distance) + zlib.compress(made)


def scanned(raw: bytes, path: Path, size: int | None = None) -> list[tuple[int, bytes]]:
    """Kind and id of each object; somewhere in a file, as in a bundle."""
    path.write_bytes(b"before" + raw)
    fd = os.open(path, os.O_RDONLY)
    try:
        return [
            (kind, sha) for kind, sha, _, _ in scan_pack(PackRegion(fd, 6, len(raw) if size is None else size, "x"))
        ]
    finally:
        os.close(fd)


def test_large_objects_are_bases_too(tmp_path: Path) -> None:
    """What is too large to be kept is read once more when a delta stands on it; the pack's index is git's."""
    large = random.Random(3).randbytes(9 << 20)
    first, changed = entry_header(BLOB, len(large)) + stored(large), large[:-5] + b"other"
    raw = pack_of(first, delta(len(first), large, changed), blob(b"small"))
    expected = [(BLOB, object_id(BLOB, data)) for data in (large, changed, b"small")]
    assert scanned(raw, tmp_path / "x.pack") == expected
    path = tmp_path / "y.pack"
    path.write_bytes(raw)
    fd = os.open(path, os.O_RDONLY)
    try:
        entries, checksum = index_pack(PackRegion(fd, 0, len(raw), "y"))
    finally:
        os.close(fd)
    assert checksum == raw[-20:]
    git("index-pack", path, cwd=tmp_path)
    path.with_suffix(".idx").chmod(0o600)
    assert PackFile(str(tmp_path), "y").entries() == entries


#: a stored blob that holds the bytes of another entry, so that a delta can name a place within it
HIDING = entry_header(BLOB, 400) + stored((entry_header(REF_DELTA, 5) + bytes(20) + zlib.compress(b"hello")).ljust(400))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (pack_of(blob(b"one"), count=2), "is damaged at byte 24"),
        (pack_of(blob(b"one"), end=b"x"), "does not end where the pack does"),
        (pack_of(entry_header(BLOB, 100) + b"\x78\x01\x01\xff\xff\0\0xyz"), "the pack is cut"),
        (pack_of(blob(b"one", 4)), "has not 4 bytes"),
        (pack_of(blob(b"one", 2)), "more than 2 bytes"),
        (pack_of(b"\xbf" + b"\xff" * 5000), "the pack is cut"),
        (pack_of(blob(b"one"), delta(99, b"one", b"two")), "the delta has no base"),
        (pack_of(blob(b"one"), delta(0, b"one", b"two")), "the delta has no base"),
        (pack_of(HIDING, delta(len(HIDING) - HIDING.index(b"\x75\0"), b"", b"x")), "the base 0{40} is outside"),
        (pack_of(blob(b"one"), delta(len(blob(b"one")), b"another", b"two")), "the delta does not fit"),
    ],
    ids=["count", "behind", "cut", "short", "long", "header", "far", "itself", "outside", "unfit"],
)
def test_a_pack_that_lies_is_damage(tmp_path: Path, raw: bytes, why: str) -> None:
    """Its checksum is right, so its maker meant it; each lie is refused by name, and nothing is read beyond it."""
    with pytest.raises(errors.Damaged, match=why):
        scanned(raw, tmp_path / "x.pack")


def test_a_pack_whose_end_is_not_in_the_file_is_damage(tmp_path: Path) -> None:
    """The bundle says it is longer than what came, by a byte or by much."""
    raw = pack_of(blob(random.Random(1).randbytes(5000)))
    for cut, size in ((1, len(raw)), (1000, len(raw)), (0, len(raw) + 1), (0, 1 << 40)):
        with pytest.raises(errors.Damaged, match=r"the pack is cut|checksum is wrong"):
            scanned(raw[: len(raw) - cut], tmp_path / "x.pack", size)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "does not begin as a pack does"),
        (b"PACK\0\0\0\x02\0\0\0\0", "does not begin as a pack does"),
        (b"KCAP" + pack_of()[4:], "does not begin as a pack does"),
        (pack_of()[:7] + b"\x03" + pack_of()[8:], "does not begin as a pack does"),
        (pack_of(blob(b"one"))[:-1] + b"x", "its checksum is wrong"),
    ],
    ids=["nothing", "no checksum", "magic", "version", "checksum"],
)
def test_what_is_no_pack_is_damage(tmp_path: Path, raw: bytes, why: str) -> None:
    """Before any of it is inflated."""
    with pytest.raises(errors.Damaged, match=why):
        scanned(raw, tmp_path / "x.pack")
    assert scanned(pack_of(), tmp_path / "x.pack") == []


REGION = st.one_of(st.binary(min_size=1, max_size=300), st.tuples(st.integers(0, 1000), st.integers(1, 200_000)))


@given(st.lists(REGION, max_size=12))
def test_what_a_delta_makes_is_known_without_making_it(regions: list[bytes | tuple[int, int]]) -> None:
    """To the byte: new bytes and copies, also those that are written as several."""
    sizes = [len(each) if isinstance(each, bytes) else each[1] for each in regions]
    assert made_bytes(encode_delta(10, sum(sizes), regions)) == sum(sizes)


def test_copies_with_few_operands_are_counted_too() -> None:
    """git leaves out operands that are zero; no size at all is 65,536. Where one is cut, what is there counts."""
    head = b"\x05\x05"
    for copy, size in (
        (b"\x80", 65536),
        (b"\x90\x07", 7),
        (b"\xa0\x01", 256),
        (b"\xc0\x01", 65536),
        (b"\xf0\x01\x02\x03", 0x30201),
        (b"\x91\x09\x07", 7),
        (b"\x8f\x01\x02\x03\x04", 65536),
        (b"\xb0\x07", 7),
    ):
        assert made_bytes(head + copy) == size
        assert made_bytes(head + b"\x03abc" + copy) == size + 3


# --- git's index ---------------------------------------------------------------------------------------------


def index_of(body: bytes, count: int = 1, version: int = 2) -> bytes:
    raw = struct.pack(">4sLL", b"DIRC", version, count) + body
    return raw + hashlib.sha1(raw).digest()


ENTRY = make_entry(b"jobs.json", bytes(20), FILE, None)
#: version 4: 62 fixed bytes, how much of the name before is dropped, the rest of the name, a zero
FOURTH = ENTRY[:62] + b"\0jobs.json\0"


def loaded(path: Path, raw: bytes) -> Index:
    path.write_bytes(raw)
    return Index.load(str(path))


def test_an_index_in_any_version_is_read_to_its_end(tmp_path: Path) -> None:
    """Names, and extensions that are caches, which are dropped when it is written."""
    assert loaded(tmp_path / "i", index_of(ENTRY)).names() == [b"jobs.json"]
    second = ENTRY[:62] + b"\x04lock\0"
    assert loaded(tmp_path / "i", index_of(FOURTH + second, 2, 4)).names() == [b"jobs.json", b"jobs.lock"]
    cached = loaded(tmp_path / "i", index_of(ENTRY + b"TREE\0\0\0\x03abc" + b"XXXX\0\0\0\0"))
    assert b"".join(cached.encode()) == index_of(ENTRY)


@pytest.mark.parametrize(
    ("raw", "error", "why"),
    [
        (index_of(FOURTH + ENTRY[:62] + b"\x0clock\0", 2, 4), errors.Damaged, "the entry at byte 85 is wrong"),
        (
            index_of(make_entry(b"jobs2.json", bytes(20), FILE, None)[:-4]),
            errors.Damaged,
            "the entry at byte 12 is wrong",
        ),
        (index_of(ENTRY[:62] + bytes(2)), errors.Damaged, "an entry has no name"),
        (index_of(ENTRY, 2), errors.Damaged, "is damaged"),
        (index_of(ENTRY)[:-1] + b"x", errors.Damaged, "its checksum is wrong"),
        (index_of(ENTRY, version=5), errors.Damaged, "there is no version 5"),
        (index_of(ENTRY + b"TREE\0\0"), errors.Damaged, "an extension is cut"),
        (index_of(ENTRY + b"TREE\0\0\0\x09abc"), errors.Damaged, "an extension is cut"),
        (index_of(ENTRY + b"link\0\0\0\0"), errors.RepositoryRefused, "its index is split"),
        (index_of(ENTRY + b"sdir\0\0\0\0"), errors.RepositoryRefused, "needs the extension sdir"),
    ],
    ids=["prefix", "padding", "nameless", "count", "checksum", "version", "cut", "long", "split", "sparse"],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, raw: bytes, error: type[Exception], why: str) -> None:
    """Its checksum is right; what it says is not, or is more than is understood here."""
    with pytest.raises(error, match=why):
        loaded(tmp_path / "i", raw)


def test_an_index_that_is_no_file_is_not_a_missing_one(tmp_path: Path) -> None:
    """Only a missing one is made again; over a link or a directory nothing is written."""
    with pytest.raises(FileNotFoundError):
        Index.load(str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    with pytest.raises(errors.Damaged, match="no regular file"):
        Index.load(str(tmp_path / "index"))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.Damaged, match="cannot be read"):
        Index.load(str(tmp_path / "link"))


def test_an_entry_matches_no_directory(tmp_path: Path) -> None:
    """Whatever stands in a file's place with the same times and numbers is another thing."""
    made = os.lstat(tmp_path)
    assert not entry_matches(make_entry(b"x", bytes(20), FILE, made), made)


# --- packs that lie, read by their indexes ---------------------------------------------------------------------


def placed(store: ObjectStore, raw: bytes, *entries: tuple[bytes, int]) -> PackFile:
    """A pack with an index that says where each object begins; both have right checksums, if the pack has."""
    name = Path(store.pack_dir, f"pack-{hashlib.sha1(raw).hexdigest()}")
    name.with_suffix(".pack").write_bytes(raw)
    index = encode_index(sorted((sha, at, 0) for sha, at in entries), raw[-20:])
    name.with_suffix(".idx").write_bytes(index)
    store.forget_packs()
    return PackFile(store.pack_dir, name.name)


#: an object that no pack has, whatever an index says
WANTED = bytes(19) + b"\1"
ONE = blob(b"one")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (entry_header(BLOB, 1 << 40) + zlib.compress(b"x"), "an object of 1099511627776 bytes is too large"),
        (entry_header(0, 3) + zlib.compress(b"one"), "there is no kind of entry 0"),
        (entry_header(5, 3) + zlib.compress(b"one"), "there is no kind of entry 5"),
        (b"\xbf" + b"\xff" * 5000, "the pack is cut"),
        (entry_header(OFS_DELTA, 5) + b"\xff" * 5000, "the entry is cut"),
        (delta(0, b"one", b"two"), "the delta has no base"),
        (delta(4000, b"one", b"two"), "the delta has no base"),
        (delta(len(ONE), b"another", b"two"), "the delta does not fit"),
        (entry_header(BLOB, 3) + b"no stream at all", "Error -3 while decompressing"),
        (blob(b"one", 2), "has not 2 bytes"),
        (blob(b"one", 4), "has not 4 bytes"),
        (entry_header(BLOB, 100) + b"\x78\x01\x01\xff\xff\0\0xyz", "the pack is cut"),
        (blob(b"other"), "it has another content"),
    ],
    ids=[
        *("huge", "kind 0", "kind 5", "header", "distance", "itself", "far", "unfit"),
        *("garbage", "long", "short", "stream", "other"),
    ],
)
def test_an_entry_that_lies_is_damage(store: ObjectStore, entry: bytes, why: str) -> None:
    """The index leads to it, and it is not what it says: refused by name, and the objects beside it are read."""
    one = object_id(BLOB, b"one")
    placed(store, pack_of(ONE, entry), (one, 12), (WANTED, 12 + len(ONE)))
    with pytest.raises(errors.Damaged, match=why):
        store.blob(WANTED)
    assert store.blob(one) == b"one"


def test_an_entry_behind_the_end_is_damage(store: ObjectStore) -> None:
    """An index that leads out of its pack."""
    placed(store, pack_of(ONE), (WANTED, 5000))
    with pytest.raises(errors.Damaged, match="the pack is cut"):
        store.blob(WANTED)


def test_bases_that_go_in_circles_are_damage(store: ObjectStore) -> None:
    """Two deltas, each of which names the other as its base: the search ends."""
    other = bytes(19) + b"\2"
    made = zlib.compress(make_delta(b"", b"x"))
    entries = [entry_header(REF_DELTA, len(make_delta(b"", b"x"))) + sha + made for sha in (other, WANTED)]
    placed(store, pack_of(*entries), (WANTED, 12), (other, 12 + len(entries[0])))
    with pytest.raises(errors.Damaged, match="deltas go in circles"):
        store.blob(WANTED)


def test_a_chain_that_is_too_long_is_damage(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than git makes them, nobody follows it."""
    monkeypatch.setattr("openjobs.repo.packs.MAX_CHAIN_READ", 20)
    entries, at = [ONE], 12
    for _ in range(22):
        at += len(entries[-1])
        entries.append(delta(len(entries[-1]), b"one", b"one"))
    placed(store, pack_of(*entries), (WANTED, at))
    with pytest.raises(errors.Damaged, match="the chain of deltas is too long"):
        store.blob(WANTED)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (entry_header(BLOB, 1 << 40) + zlib.compress(b"x"), "an object of 1099511627776 bytes is too large"),
        (entry_header(REF_DELTA, 5) + bytes(20) + zlib.compress(b"hello"), "its base is outside"),
        (entry_header(0, 3) + zlib.compress(b"one"), "it is of no kind that there is"),
        (entry_header(BLOB, 3) + b"no stream at all", "Error -3 while decompressing"),
    ],
    ids=["huge", "outside", "kind 0", "garbage"],
)
def test_an_entry_that_lies_ends_the_walk_over_its_pack(tmp_path: Path, entry: bytes, why: str) -> None:
    """Read from end to end, too; the place is counted from the pack's beginning."""
    with pytest.raises(errors.Damaged, match=f"x is damaged at byte {12 + len(ONE)} of its pack: .*{why}"):
        scanned(pack_of(ONE, entry), tmp_path / "x.pack")


def test_a_delta_that_makes_too_much_is_never_applied(tmp_path: Path) -> None:
    """A few kilobytes of instructions would fill the memory: what they make is added up first."""
    copies = b"\x80" * 8193  # each of them 65,536 bytes from the base's beginning
    bomb = b"\x80\x80\x04" + b"\x80\x80\x84\x80\x02" + copies
    base = entry_header(BLOB, 65536) + zlib.compress(bytes(65536))
    raw = pack_of(base, entry_header(OFS_DELTA, len(bomb)) + offset_bytes(len(base)) + zlib.compress(bomb))
    with pytest.raises(errors.Damaged, match="what the delta makes is too large"):
        scanned(raw, tmp_path / "x.pack")


# --- large indexes, and files that change under a reader ---------------------------------------------------------


def test_places_behind_two_gigabytes_are_kept_in_a_table_of_their_own(store: ObjectStore) -> None:
    """As git writes and dulwich reads it; one in that table is found as any other."""
    ids = sorted(hashlib.sha1(b"%d" % number).digest() for number in range(5))
    places = [12, (1 << 31) - 1, 1 << 31, (1 << 40) + 7, 100]
    entries = [(sha, at, number) for number, (sha, at) in enumerate(zip(ids, places, strict=True))]
    path = Path(store.pack_dir, "pack-x.idx")
    path.write_bytes(encode_index(entries, bytes(20)))
    pack = PackFile(store.pack_dir, "pack-x")
    assert pack.entries() == entries
    assert [pack.find(sha) for sha in ids] == places
    with dulwich.pack.load_pack_index(str(path), dulwich.objects.DEFAULT_OBJECT_FORMAT) as index:
        assert list(index.iterentries()) == entries


def test_an_object_of_a_large_pack_is_found_where_its_index_says(store: ObjectStore) -> None:
    """Its place stands in the table of large ones although it is small: git allows that."""
    raw = pack_of(ONE)
    sha = object_id(BLOB, b"one")
    pack = placed(store, raw, (sha, 12))
    index = bytearray(Path(f"{pack.base}.idx").read_bytes())
    index[-44:-40] = struct.pack(">L", 1 << 31)
    index[-40:-40] = struct.pack(">Q", 12)
    Path(f"{pack.base}.idx").write_bytes(index)
    assert store.blob(sha) == b"one"


def test_an_index_that_is_cut_while_it_is_read_is_damage(store: ObjectStore) -> None:
    """A large one is read where it is needed, so it may have changed since its table was read."""
    count = 4000
    entries = sorted((hashlib.sha1(b"%d" % number).digest(), 12, 0) for number in range(count))
    path = Path(store.pack_dir, "pack-x.idx")
    path.write_bytes(encode_index(entries, bytes(20)))
    pack = PackFile(store.pack_dir, "pack-x")
    assert len(pack) == count
    assert pack.find(entries[7][0]) == 12
    os.truncate(path, 70_000)
    with pytest.raises(errors.Damaged, match="it is cut"):
        pack.entries()
    assert not holds_all(pack, pack)
    pack.forget()
    with pytest.raises(errors.Damaged, match="it is cut or its table is wrong"):
        len(pack)


def linked(path: Path) -> None:
    kept = path.rename(path.with_name("kept"))
    path.symlink_to(kept)


def test_a_link_where_an_object_should_be_is_damage(store: ObjectStore, tmp_path: Path) -> None:
    """A pack, or a file of its own: what it leads to is not read, whatever is there."""
    packed, alone = object_id(BLOB, b"one"), object_id(BLOB, b"two")
    linked(Path(f"{placed(store, pack_of(ONE), (packed, 12)).base}.pack"))
    path = tmp_path / ".git" / "objects" / alone.hex()[:2] / alone.hex()[2:]
    path.parent.mkdir()
    path.write_bytes(zlib.compress(b"blob 3\0two"))
    assert store.blob(alone) == b"two"
    store.close()
    linked(path)
    for sha in (packed, alone):
        with pytest.raises(errors.Damaged, match="cannot be read: Too many levels of symbolic links"):
            store.blob(sha)


def test_a_reader_without_descriptors_calls_nothing_damaged(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system says of this process says nothing about a file, so it is passed on."""
    sha = object_id(BLOB, b"one")
    placed(store, pack_of(ONE), (sha, 12))
    assert len(store.packs()[0]) == 1

    def refused(path: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files", path)

    with monkeypatch.context() as patch:
        patch.setattr("openjobs.repo.objects.open_file", refused)
        with pytest.raises(OSError, match="Too many open files"):
            store.blob(sha)
    assert store.blob(sha) == b"one"


def test_a_search_ends_although_writers_never_do(
    store: ObjectStore, directory: PackDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the packs are listed there is another one: what is missing is called so after a bounded number of
    looks."""
    listed = store.rescan
    looks: list[str] = []

    def never_the_same() -> list[PackFile]:
        rolling = RollingPack()
        fill(rolling, [b"%d" % len(looks)])
        looks.append(write(directory, rolling))
        if len(looks) > 1:
            directory.remove(looks[-2])
        return listed()

    monkeypatch.setattr("openjobs.repo.objects._LOOKS", 12)
    monkeypatch.setattr(store, "rescan", never_the_same)
    with pytest.raises(errors.Damaged, match="is missing"):
        store.blob(WANTED)
    assert len(looks) == 13


def test_at_rest_little_is_kept_and_everything_is_found(store: ObjectStore) -> None:
    """Of the trees that were read the last few stay in memory; the others are read again."""
    trees = [EMPTY.put(b"%d" % number, FILE, WANTED) for number in range(20)]
    raws = [entry_header(TREE, len(tree.raw)) + zlib.compress(tree.raw) for tree in trees]
    ids = [object_id(TREE, tree.raw) for tree in trees]
    places = [12 + sum(map(len, raws[:number])) for number in range(20)]
    placed(store, pack_of(*raws), *zip(ids, places, strict=True))
    for _ in range(2):
        assert [store.tree(sha).entries for sha in ids] == [tree.entries for tree in trees]
        store.rest()
        assert len(store._trees) == 8


# --- what the writer does with packs that are not as they should be -----------------------------------------------


def test_the_writer_goes_on_with_the_pack_that_holds_the_others(store: ObjectStore, directory: PackDirectory) -> None:
    """Whichever was touched last: a copy of an older one may be newer by its time."""
    versions = history(11, 12)
    rolling = RollingPack()
    ids = fill(rolling, versions[:10])
    small = write(directory, rolling)
    rolling.add(BLOB, object_id(BLOB, versions[10]), versions[10], ids[-1], versions[9])
    large = write(directory, rolling)
    os.utime(f"{store.pack_dir}/{large}.idx", (1, 1))
    resumed = directory.resume()
    assert (resumed.name, list(resumed.superseded)) == (large, [small])
    assert sorted(resumed.rolling.ids()) == sorted(object_id(BLOB, version) for version in versions[:11])


def test_mending_leaves_alone_what_it_cannot_read(store: ObjectStore, directory: PackDirectory) -> None:
    """A pack whose index is cut holds nothing that can be proved, and is held by nothing."""
    versions = history(12, 12)
    rolling = RollingPack()
    ids = fill(rolling, versions[:10])
    small = write(directory, rolling)
    rolling.add(BLOB, object_id(BLOB, versions[10]), versions[10], ids[-1], versions[9])
    large = write(directory, rolling)
    index = Path(store.pack_dir, f"{large}.idx")
    raw = index.read_bytes()
    os.truncate(index, 1100)
    directory.mend()
    assert {pack.name for pack in store.packs()} == {small, large}
    assert not holds_all(PackFile(store.pack_dir, large), PackFile(store.pack_dir, small))
    assert not is_whole(PackFile(store.pack_dir, "pack-that-is-gone"))
    index.write_bytes(raw)
    directory.mend()
    assert {pack.name for pack in store.packs()} == {large}


def test_a_pack_that_is_there_survives_the_failure_to_write_it_again(store: ObjectStore) -> None:
    """At each effect of the second writing; what a failure leaves of a new one goes."""
    disk = FaultyDisk()
    directory = PackDirectory(store, disk)
    rolling = RollingPack()
    [sha] = fill(rolling, [b"content" * 100])
    encoded = rolling.encode()
    body, entries = bytes(encoded.pack[0]), PackFile(store.pack_dir, directory_name(directory, encoded)).entries()
    fill(rolling, [b"other" * 100])
    for k in range(1, 20):
        disk.arm(k)
        try:
            directory.publish_stream(lambda: iter([body]), entries, repacked=True)
        except OSError:
            assert PackFile(store.pack_dir, encoded.name).is_ours()
        else:
            break
        finally:
            disk.disarm()
        store.close()
        assert store.blob(sha) == b"content" * 100
        assert is_whole(PackFile(store.pack_dir, encoded.name))
    assert disk.failed == []
    assert PackFile(store.pack_dir, encoded.name).is_repacked()


def directory_name(directory: PackDirectory, encoded: EncodedPack) -> str:
    directory.publish(encoded)
    return encoded.name


def test_the_mark_of_somebody_else_is_never_replaced(store: ObjectStore, directory: PackDirectory) -> None:
    """A `.keep` that is not ours says that its owner wants the pack: it stays, word for word."""
    rolling = RollingPack()
    fill(rolling, [b"content"])
    name = write(directory, rolling)
    keep = Path(store.pack_dir, f"{name}.keep")
    keep.unlink()
    keep.write_text("mine\n")
    directory.keep(name)
    directory.publish(rolling.encode(), repacked=True)
    assert keep.read_text() == "mine\n"
    assert not PackFile(store.pack_dir, name).is_ours()


def test_packs_that_are_the_beginnings_of_one_are_joined_into_that_one(
    store: ObjectStore, directory: PackDirectory
) -> None:
    """Where the largest already is what comes of it, it stays and the others go."""
    versions = history(13, 10)
    rolling, names = RollingPack(), []
    for number, version in enumerate(versions):
        before = versions[number - 1] if number else b""
        rolling.add(BLOB, object_id(BLOB, version), version, object_id(BLOB, before) if number else None, before)
        names.append(write(directory, rolling))
        os.utime(f"{store.pack_dir}/{names[-1]}.idx", (number, number))
    assert maintain.join_packs(directory, store, busy=set()) == 9
    assert [pack.name for pack in store.packs()] == [names[-1]]
    assert [store.blob(object_id(BLOB, version)) for version in versions] == versions


def test_what_is_too_much_on_the_way_waits(store: ObjectStore, directory: PackDirectory) -> None:
    """Joining after a batch copies a bounded number of bytes; maintenance copies all of them."""
    expected = joined(store, directory, 8, doubles=False)
    size = sum(pack.size_bytes() for pack in store.packs())
    assert maintain.join_packs(directory, store, busy=set(), limit_bytes=size - 1) == 0
    assert len(store.packs()) == 8
    assert maintain.join_packs(directory, store, busy=set(), limit_bytes=size) == 7
    assert {sha: store.blob(sha) for sha in expected} == expected


def test_damaged_packs_are_not_joined(store: ObjectStore, directory: PackDirectory) -> None:
    """One that is whole stays as it is beside seven that are not, and that is said; with two of them there is
    something to join, and the damaged ones stay for who may still find much in them."""
    joined(store, directory, 8, doubles=False)
    names = [pack.name for pack in store.packs()]
    whole = {name: Path(store.pack_dir, f"{name}.pack").read_bytes() for name in names}
    for name in names[1:]:
        Path(store.pack_dir, f"{name}.pack").write_bytes(whole[name][:-1] + b"x")
    with pytest.raises(errors.Damaged, match="or one beside it is damaged"):
        maintain.join_packs(directory, store, busy=set())
    assert [pack.name for pack in store.packs()] == names
    Path(store.pack_dir, f"{names[1]}.pack").write_bytes(whole[names[1]])
    maintain.join_once(directory, store, busy=set())
    left = {pack.name for pack in store.packs()}
    assert set(names[2:]) <= left
    assert left.isdisjoint(names[:2])
    assert len(left) == 7


def chained(store: ObjectStore, count: int, first: bytes) -> list[tuple[bytes, bytes]]:
    """A pack of `count` deltas, each of which names the one before by its id, the first of them `first`."""
    base, data, pieces, at = object_id(BLOB, first), first, [], 12
    found: list[tuple[bytes, bytes]] = []
    entries: list[tuple[bytes, int]] = []
    for number in range(count):
        new = first + b"%d" % number
        made = make_delta(data, new)
        pieces.append(entry_header(REF_DELTA, len(made)) + base + zlib.compress(made))
        base, data = object_id(BLOB, new), new
        found.append((base, data))
        entries.append((base, at))
        at += len(pieces[-1])
    placed(store, pack_of(*pieces), *entries)
    return found


def test_a_chain_by_ids_is_read_to_its_end_or_called_too_long(store: ObjectStore) -> None:
    """git follows each base by its id where it was told not to write distances: one at a time, and not for ever."""
    first = b"content" * 100
    placed(store, pack_of(blob(first)), (object_id(BLOB, first), 12))
    found = chained(store, 200, first)
    for number in (119, 60):
        store.close()
        assert store.blob(found[number][0]) == found[number][1]
    store.close()
    with pytest.raises(errors.Damaged, match="chain of deltas is too long"):
        store.blob(found[199][0])
    for sha, data in found:
        assert store.blob(sha) == data


def test_a_long_chain_on_a_base_that_is_missing_is_looked_through_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the chain is in two packs: what is missing is named, after a number of looks that does not double
    with each delta."""
    looks: list[bytes] = []
    copies = store._copies

    def counted(sha: bytes, *more: object) -> object:
        looks.append(sha)
        return copies(sha, *more)  # type: ignore[arg-type]

    first = b"content" * 100
    found = chained(store, 50, first)
    for path in list(Path(store.pack_dir).iterdir()):
        shutil.copy(path, path.with_name(f"pack-other{path.suffix}"))
    store.forget_packs()
    monkeypatch.setattr(store, "_copies", counted)
    with pytest.raises(errors.Damaged, match=f"object {object_id(BLOB, first).hex()} is missing"):
        store.blob(found[-1][0])
    assert len(looks) == 2 * 51
