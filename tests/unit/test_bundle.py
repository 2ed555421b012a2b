"""A repository as one stream and back: packs of other writers, packs that go meanwhile, bundles that lack something."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from openjobs import errors
from openjobs.durable import Disk
from openjobs.repo import Change, GitRepository, Transaction, bundle
from openjobs.repo.objects import PackFile
from openjobs.repo.packs import BLOB, COMMIT, OFS_DELTA, TREE, encode_index, entry_header, object_id, offset_bytes
from tests.support import git

NOW = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
BRANCH = "refs/heads/main"


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[GitRepository]:
    made = GitRepository.create(tmp_path / "repo", Disk(durable=False), {"jobs.json": b"line\n" * 300}, now=NOW)
    for number in range(5):
        made.transact([append(f"{number}\n")])
    made.close()
    yield made
    made.close()


def append(text: str) -> Transaction:
    return lambda view: Change(files={"jobs.json": (view.read("jobs.json") or b"") + text.encode()}, subject=text)


def pack_dir(repository: GitRepository) -> Path:
    return repository.path / ".git" / "objects" / "pack"


def head(repository: GitRepository) -> str:
    return git("rev-parse", "HEAD", cwd=repository.path)


def written(repository: GitRepository) -> bytes:
    writer = bundle.BundleWriter(repository.path, *bundle.refs_of(repository.path, head(repository)))
    return b"".join(writer.pieces())


def restored(raw: bytes, path: Path, branch: str = BRANCH) -> GitRepository:
    """Whole by our check and by git's."""
    bundle.restore(path, Disk(durable=False), io.BytesIO(raw), branch, NOW)
    made = GitRepository(path, Disk(durable=False))
    assert made.check() == []
    git("fsck", "--strict", "--full", cwd=path)
    made.close()
    return made


def objects(path: Path) -> list[str]:
    return git("cat-file", "--batch-all-objects", "--batch-check", cwd=path).splitlines()


# --- writing ------------------------------------------------------------------------------------------------


def test_deltas_that_name_their_base_by_its_id_are_written_whole(repository: GitRepository, tmp_path: Path) -> None:
    """As git packs where it was told not to write distances: such a base may be anywhere."""
    ids = git("rev-list", "--objects", "--no-object-names", "HEAD", cwd=repository.path).encode() + b"\n"
    name = git("pack-objects", "-q", tmp_path / "pack", cwd=repository.path, stdin=ids)
    kinds = git("verify-pack", "-v", tmp_path / f"pack-{name}.pack", cwd=tmp_path)
    assert "chain length" in kinds
    before = objects(repository.path)
    for path in pack_dir(repository).iterdir():
        path.unlink()
    for end in ("pack", "idx"):
        (tmp_path / f"pack-{name}.{end}").rename(pack_dir(repository) / f"pack-{name}.{end}")
    assert objects(repository.path) == before
    made = restored(written(repository), tmp_path / "new")
    assert objects(made.path) == before
    assert made.view().read("jobs.json") == b"line\n" * 300 + b"0\n1\n2\n3\n4\n"


def test_what_is_there_twice_is_written_once(repository: GitRepository, tmp_path: Path) -> None:
    """In two packs, or in one and in a file of its own; what is only in a file of its own comes along."""
    [pack] = pack_dir(repository).glob("*.pack")
    before = pack.read_bytes(), pack.with_suffix(".idx").read_bytes()
    for number in range(3):
        repository.transact([append(f"more {number}\n")])
    repository.close()
    for end, raw in zip(("pack", "idx"), before, strict=True):
        (pack_dir(repository) / f"{pack.stem}.{end}").write_bytes(raw)
    (repository.path / "theirs").write_text("theirs\n")
    git("add", "theirs", cwd=repository.path)
    git("commit", "-qm", "theirs", cwd=repository.path)
    tip = git("rev-parse", "HEAD~1", cwd=repository.path)
    alone = repository.path / ".git" / "objects" / tip[:2] / tip[2:]
    alone.parent.mkdir(exist_ok=True)
    raw = git("cat-file", "commit", tip, cwd=repository.path).encode() + b"\n"
    alone.write_bytes(zlib.compress(b"commit %d\0" % len(raw) + raw))
    assert len(list(pack_dir(repository).glob("*.pack"))) == 2
    raw = written(repository)
    made = restored(raw, tmp_path / "new")
    assert objects(made.path) == objects(repository.path)
    [whole] = (PackFile(str(pack_dir(made)), path.stem) for path in pack_dir(made).glob("*.pack"))
    assert len(whole) == len(objects(repository.path))


def test_a_pack_whose_end_is_missing_is_damage_while_it_is_copied(repository: GitRepository) -> None:
    """Named with its place; what came before was written, and its reader will miss the rest."""
    [pack] = pack_dir(repository).glob("*.pack")
    os.truncate(pack, 200)
    with pytest.raises(errors.Damaged, match="it is cut") as raised:
        written(repository)
    assert raised.value.path == str(pack)


@pytest.mark.parametrize("distance", [1, 5000])
def test_a_delta_without_a_base_is_damage_while_it_is_copied(repository: GitRepository, distance: int) -> None:
    """It cannot be moved, since where it belongs is unknown."""
    sha = object_id(BLOB, b"x")
    delta = entry_header(OFS_DELTA, 3) + offset_bytes(distance) + zlib.compress(b"\0\0\0")
    raw = struct.pack(">4sLL", b"PACK", 2, 1) + delta
    checksum = hashlib.sha1(raw).digest()
    (pack_dir(repository) / "pack-x.pack").write_bytes(raw + checksum)
    (pack_dir(repository) / "pack-x.idx").write_bytes(encode_index([(sha, 12, 0)], checksum))
    with pytest.raises(errors.Damaged, match=r"pack-x\.pack is damaged at byte 12"):
        written(repository)


def test_packs_that_are_swapped_while_they_are_opened_are_listed_again(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A writer replaces a pack between listing and opening; one that never stops is a failure that says so, and no
    file stays open."""
    opened, swaps = bundle.open_file, 3

    def swapped(path: str) -> int:
        nonlocal swaps
        if swaps:
            swaps -= 1
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return opened(path)

    monkeypatch.setattr(bundle, "open_file", swapped)
    raw = written(repository)
    assert swaps == 0
    restored(raw, tmp_path / "new")
    swaps = 1000
    with pytest.raises(FileNotFoundError):
        written(repository)
    assert swaps == 1000 - 50


# --- reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda raw: raw.replace(b"# v2 git bundle", b"# v3 git bundle"), "names something that is no branch"),
        (lambda raw: raw.removeprefix(b"# v2 git bundle\n"), "it is no bundle of git's"),
        (lambda raw: raw.replace(b"\n\nPACK", b"\n-" + b"0" * 40 + b"\n\nPACK"), "names something that is no branch"),
        (lambda raw: raw[: raw.index(b"\n\nPACK")], "it is no bundle of git's"),
        (lambda raw: b"", "names something that is no branch"),
        (lambda raw: raw.replace(b"\n\nPACK", b"\n" + b"1" * 40 + b" refs/tags/v1\n\nPACK"), "the bundle lacks 1111"),
    ],
    ids=["version 3", "no signature", "needs another", "no pack", "nothing", "lacks a tag"],
)
def test_a_bundle_that_is_not_whole_is_damage(
    repository: GitRepository, tmp_path: Path, spoil: Callable[[bytes], bytes], why: str
) -> None:
    """Nothing of it becomes a branch."""
    raw = spoil(written(repository))
    with pytest.raises(errors.Damaged, match=why):
        bundle.restore(tmp_path / "new", Disk(durable=False), io.BytesIO(raw), BRANCH, NOW)
    assert not (tmp_path / "new" / ".git" / "refs" / "heads" / "main").exists()


@pytest.mark.parametrize("branch", ["refs/heads/other", "refs/tags/v1", "HEAD", "main", ""])
def test_a_bundle_without_the_branch_is_refused(repository: GitRepository, tmp_path: Path, branch: str) -> None:
    """Before anything is made."""
    with pytest.raises(errors.RepositoryRefused, match="lacks the branch"):
        bundle.restore(tmp_path / "new", Disk(durable=False), io.BytesIO(written(repository)), branch, NOW)
    assert not (tmp_path / "new").exists()


def bundle_of(tree: bytes, *others: tuple[int, bytes]) -> bytes:
    """One commit with that tree."""
    text = b"tree %s\nauthor x <x> 0 +0000\ncommitter x <x> 0 +0000\n\nx\n" % object_id(TREE, tree).hex().encode()
    found = [(COMMIT, text), (TREE, tree), *others]
    pack = struct.pack(">4sLL", b"PACK", 2, len(found))
    pack += b"".join(entry_header(kind, len(data)) + zlib.compress(data) for kind, data in found)
    line = f"{object_id(COMMIT, text).hex()} {BRANCH}\n\n".encode()
    return bundle.SIGNATURE + line + pack + hashlib.sha1(pack).digest()


DATA = object_id(BLOB, b"x")


def nested(deep: int) -> tuple[bytes, list[tuple[int, bytes]]]:
    trees = [b"100644 x\0" + DATA]
    for _ in range(deep):
        trees.append(b"40000 d\0" + object_id(TREE, trees[-1]))
    return trees[-1], [(BLOB, b"x"), *((TREE, tree) for tree in trees[:-1])]


def test_no_session_is_nested_so_deep_or_holds_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many directories in one another as there may be come in, one more does not; the same with files."""
    disk = Disk(durable=False)
    tree, others = nested(40)
    bundle.restore(tmp_path / "deep", disk, io.BytesIO(bundle_of(tree, *others)), BRANCH, NOW)
    assert (tmp_path / "deep" / ("d/" * 40 + "x")).read_bytes() == b"x"
    tree, others = nested(41)
    with pytest.raises(errors.RepositoryRefused, match="nested too deeply"):
        bundle.restore(tmp_path / "deeper", disk, io.BytesIO(bundle_of(tree, *others)), BRANCH, NOW)
    monkeypatch.setattr(bundle, "MOST_FILES", 3)
    many = b"".join(b"100644 %d\0" % number + DATA for number in range(3))
    bundle.restore(tmp_path / "three", disk, io.BytesIO(bundle_of(many, (BLOB, b"x"))), BRANCH, NOW)
    with pytest.raises(errors.RepositoryRefused, match="more than 3 files"):
        bundle.restore(
            tmp_path / "four", disk, io.BytesIO(bundle_of(many + b"100644 3\0" + DATA, (BLOB, b"x"))), BRANCH, NOW
        )


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (b"120000 link\0" + DATA, "'link' in it is a link or another repository"),
        (b"160000 module\0" + DATA, "'module' in it is a link or another repository"),
        (b"100664 odd\0" + DATA, "'odd' in it is a link or another repository"),
        (b"100644 ..\0" + DATA, "'..' cannot be a path"),
        (b"100644 .git\0" + DATA, "'.git' cannot be a path"),
    ],
    ids=["link", "module", "mode", "above", "git"],
)
def test_what_no_session_holds_is_refused(tmp_path: Path, entry: bytes, why: str) -> None:
    """By the name in the commit; no file of it is written."""
    with pytest.raises(errors.RepositoryRefused, match=why):
        bundle.restore(tmp_path / "new", Disk(durable=False), io.BytesIO(bundle_of(entry, (BLOB, b"x"))), BRANCH, NOW)
    assert os.listdir(tmp_path / "new") == [".git"]


def test_what_came_in_is_ours_to_go_on_with(repository: GitRepository, tmp_path: Path) -> None:
    """Branches and tags come along; the next commit is on top of the old ones."""
    git("tag", "v1", "HEAD~1", cwd=repository.path)
    git("branch", "beside", "HEAD~2", cwd=repository.path)
    made = restored(written(repository), tmp_path / "new")
    refs = "for-each-ref", "--format=%(refname) %(objectname)"
    assert git(*refs, cwd=made.path) == git(*refs, cwd=repository.path)
    assert all(PackFile(str(pack_dir(made)), path.stem).is_ours() for path in pack_dir(made).glob("*.pack"))
    made.transact([append("more\n")])
    assert next(iter(made.log())).parents == (head(repository),)
    assert made.check() == []
    made.close()
