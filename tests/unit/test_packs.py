"""Packs are what git says they are: deltas, indexes, joined packs, against dulwich and git itself."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
import zlib
from collections.abc import Iterator
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
    RollingPack,
    common_prefix,
    common_suffix,
    deflate,
    entry_header,
    make_delta,
    object_id,
    offset_bytes,
    read_header,
    read_offset,
)
from openjobs.repo.packs import store as stored
from openjobs.repo.packscan import PackRegion, index_pack, scan_pack
from openjobs.repo.trees import DIRECTORY, EMPTY, FILE, Tree, path_parts
from tests.support import git


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
        (pack_of(blob(b"one"), end=b"x"), "something behind the last object"),
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
        (index_of(ENTRY, version=5), errors.Damaged, "there is no version 5"),
        (index_of(ENTRY + b"TREE\0\0"), errors.Damaged, "an extension is cut"),
        (index_of(ENTRY + b"TREE\0\0\0\x09abc"), errors.Damaged, "an extension is cut"),
        (index_of(ENTRY + b"link\0\0\0\0"), errors.RepositoryRefused, "its index is split"),
        (index_of(ENTRY + b"sdir\0\0\0\0"), errors.RepositoryRefused, "needs the extension sdir"),
    ],
    ids=["prefix", "padding", "nameless", "count", "version", "cut", "long", "split", "sparse"],
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
