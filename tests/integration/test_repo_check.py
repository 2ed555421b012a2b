"""`check` names whatever is wrong with a repository, and nothing else: each kind of damage, made for real."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import dulwich.repo
import pytest

from openjobs import errors
from openjobs.durable import Disk, FileLock, is_locked
from openjobs.repo import Change, GitRepository, View
from openjobs.repo import check as checking
from openjobs.repo.index import Index
from openjobs.repo.objects import ObjectStore, PackFile
from openjobs.repo.packs import (
    REF_DELTA,
    TREE,
    RollingPack,
    deflate,
    encode_index,
    entry_header,
    make_delta,
    object_id,
)
from openjobs.repo.refs import list_refs
from tests.support import git

NOW = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
FILES = {"meta.json": b"{}\n", "jobs.json": b"start\n", "history/00/0000.jsonl": b"line\n" * 200}
ME = ("-c", "user.name=me", "-c", "user.email=me@localhost")


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[GitRepository]:
    made = GitRepository.create(tmp_path / "repo", Disk(durable=False), FILES, now=NOW)
    made.transact([append("one")])
    yield made
    made.close()


def append(text: str) -> Callable[[View], Change]:
    return lambda view: Change(files={"jobs.json": (view.read("jobs.json") or b"") + text.encode()}, subject=text)


def found(path: Path) -> list[str]:
    """What a fresh process says; paths below the repository without what is before them."""
    repository = GitRepository(path, Disk(durable=False))
    try:
        return [line.replace(f"{path}/", "") for line in repository.check()]
    finally:
        repository.close()


def loosened(path: Path) -> Path:
    """Every object a file of its own, so that one of them can be damaged; the directory of them."""
    objects = path / ".git" / "objects"
    with dulwich.repo.Repo(str(path)) as other:
        for sha in [*other.object_store]:
            kept = objects / sha[:2].decode() / sha[2:].decode()
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(other[sha].as_legacy_object())
    shutil.rmtree(objects / "pack")
    (objects / "pack").mkdir()
    assert found(path) == []
    return objects


def sha_of(path: Path, name: str) -> str:
    return git("rev-parse", name, cwd=path)


def loose(objects: Path, sha: str) -> Path:
    return objects / sha[:2] / sha[2:]


# --- git's own files ----------------------------------------------------------------------------------------


def test_a_repository_of_git_is_in_order_and_stays_as_it_is(tmp_path: Path) -> None:
    """One that openjobs never wrote to, with merges, links and a submodule: nothing to say, and nothing is made."""
    repo = tmp_path / "repo"
    git("init", "-q", "-b", "main", repo, cwd=tmp_path)
    (repo / "jobs.json").write_text("x\n")
    (repo / "link").symlink_to("jobs.json")
    git("add", ".", cwd=repo)
    git("commit", "-qm", "first", cwd=repo)
    git("update-index", "--add", "--cacheinfo", f"160000,{sha_of(repo, 'HEAD')},module", cwd=repo)
    git("commit", "-qm", "a submodule", cwd=repo)
    (repo / "module").mkdir()
    git("checkout", "-qb", "side", "HEAD~1", cwd=repo)
    git("commit", "-q", "--allow-empty", "-m", "beside", cwd=repo)
    git("checkout", "-q", "main", cwd=repo)
    git("merge", "-q", "--no-edit", "side", cwd=repo)
    before = sorted(str(path) for path in repo.rglob("*"))
    assert found(repo) == []
    assert sorted(str(path) for path in repo.rglob("*")) == before


def unmerged(repo: Path) -> None:
    entry = f"100644 {sha_of(repo, 'HEAD:jobs.json')}"
    lines = "".join(f"{entry} {stage}\tconflict\n" for stage in (1, 2))
    git("update-index", "--index-info", cwd=repo, stdin=lines.encode())


def replaced_by_directory(repo: Path) -> None:
    (repo / "meta.json").unlink()
    (repo / "meta.json").mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda repo: (repo / ".git" / "index").unlink(), [".git/index is missing"]),
        (unmerged, ["index: conflict has a conflict", "index: conflict is not in the newest commit"]),
        (lambda repo: git("rm", "-q", "--cached", "meta.json", cwd=repo), ["index: meta.json is missing"]),
        (
            lambda repo: git(
                "update-index", "--cacheinfo", f"100644,{sha_of(repo, 'HEAD:jobs.json')},meta.json", cwd=repo
            ),
            ["index: meta.json is not as in the newest commit"],
        ),
        (lambda repo: (repo / "meta.json").unlink(), ["meta.json is missing in the work tree"]),
        (lambda repo: (repo / "meta.json").write_text("other"), ["meta.json is not as in the newest commit"]),
        (replaced_by_directory, ["meta.json cannot be read: it is no regular file"]),
    ],
    ids=["no index", "conflict", "not in index", "other in index", "removed", "edited", "directory"],
)
def test_index_and_work_tree_are_copies_of_the_newest_commit(
    repository: GitRepository, spoil: Callable[[Path], object], said: list[str]
) -> None:
    """Where one is not, that path is named, once for each thing that is wrong with it."""
    spoil(repository.path)
    assert sorted(set(found(repository.path))) == said


def test_an_index_that_cannot_be_read_is_a_finding(repository: GitRepository) -> None:
    """A check does not end with an exception because of what it is there to find."""
    (repository.path / ".git" / "index").write_bytes(b"DIRC")
    assert found(repository.path) == [".git/index is damaged: it does not begin as an index does"]


def test_a_branch_that_goes_while_others_look_is_a_finding(repository: GitRepository) -> None:
    """The repository was fine when it was opened; HEAD or branch are not any more."""
    git_dir = repository.path / ".git"
    assert repository.check() == []
    branch = git_dir / "refs" / "heads" / "main"
    kept = branch.read_bytes()
    branch.unlink()
    assert repository.check() == ["the branch has no commit"]
    branch.write_bytes(kept)
    (git_dir / "HEAD").write_text("nonsense")
    assert repository.check() == [f"{git_dir}/HEAD is damaged: it names no branch"]


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("refs/heads/main.lock", 0o400, "a lock of a killed process of ours"),
        ("HEAD.lock", 0o644, "a lock of another program"),
        ("openjobs/scratch/work", 0o600, "a temporary file of a killed process of ours"),
        ("objects/pack/openjobs-pack.tmp", 0o600, "a temporary file of a killed process"),
        ("objects/pack/pack-" + "0" * 40 + ".idx", 0o400, "half of a pack"),
        ("objects/pack/pack-" + "0" * 40 + ".keep", 0o400, "half of a pack"),
    ],
)
def test_what_a_killed_process_leaves_is_named(repository: GitRepository, name: str, mode: int, said: str) -> None:
    """And stays where it is: a check changes nothing."""
    left = repository.path / ".git" / name
    left.write_bytes(b"")
    left.chmod(mode)
    assert found(repository.path) == [f".git/{name}: {said}"]
    assert left.exists()


def test_half_a_pack_that_its_writer_completes_is_no_finding(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are on their way are looked at again after the writer has finished."""
    pack_dir = repository.path / ".git" / "objects" / "pack"
    pack = max(pack_dir.glob("*.pack"))
    kept = pack.rename(pack.with_name("elsewhere"))
    waits: list[str] = []

    def finish(git_dir: str) -> None:
        waits.append(git_dir)
        if len(waits) == 2:  # after the first look
            kept.rename(pack)

    monkeypatch.setattr(checking, "_let_finish", finish)
    assert repository.check() == []
    assert len(waits) == 2


def test_a_writer_that_does_not_end_is_not_waited_for_for_ever(
    repository: GitRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check looks all the same, after a bounded number of tries."""
    monkeypatch.setattr(checking, "_FINISH_S", 0)
    looks: list[str] = []

    def looked(path: str) -> bool:
        looks.append(path)
        return is_locked(path)

    monkeypatch.setattr(checking, "is_locked", looked)
    (repository.path / "meta.json").unlink()
    held = FileLock(repository.path / ".git" / "openjobs" / "lock", Disk(durable=False))
    assert held.acquire(attempts=1)
    try:
        assert found(repository.path) == ["meta.json is missing in the work tree"]
    finally:
        held.release()
    assert len(looks) == checking._FINISH_TRIES


def test_a_pack_with_a_wrong_sum_is_named(repository: GitRepository) -> None:
    """One bit in its last bytes, where no object is."""
    pack = max((repository.path / ".git" / "objects" / "pack").glob("*.pack"))
    raw = pack.read_bytes()
    pack.chmod(0o600)
    pack.write_bytes(raw[:-1] + bytes((raw[-1] ^ 1,)))
    assert found(repository.path) == [f".git/objects/pack/{pack.name} is damaged: a checksum is wrong"]


# --- objects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["HEAD~1", "HEAD:history", "HEAD:history/00", "HEAD~1:jobs.json"])
@pytest.mark.parametrize("how", ["missing", "other content", "cut"])
def test_a_damaged_object_is_named(repository: GitRepository, name: str, how: str) -> None:
    """A commit, a tree or a blob, of the newest commit or of an older one; and nothing else is called damaged."""
    objects = loosened(repository.path)
    sha = sha_of(repository.path, name)
    other = sha_of(repository.path, "HEAD:meta.json")
    place = loose(objects, sha)
    raw = place.read_bytes()
    place.unlink()
    if how == "other content":
        place.write_bytes(loose(objects, other).read_bytes())
    elif how == "cut":
        place.write_bytes(raw[: len(raw) // 2])
    said = found(repository.path)
    assert said
    assert all(sha in line.replace("/", "") for line in said)
    assert all(("missing" if how == "missing" else "damaged") in line for line in said)


def test_a_commit_that_cannot_be_understood_is_named(repository: GitRepository) -> None:
    """Its bytes are what its id says, and it is no commit of any use: git would not make it."""
    repo = repository.path
    raw = f"tree {sha_of(repo, 'HEAD^{tree}')}\nparent {sha_of(repo, 'HEAD')}\n"
    odd = git(
        *("hash-object", "-t", "commit", "-w", "--stdin", "--literally"),
        cwd=repo,
        stdin=f"{raw}author x <x> 0 +0000\ncommitter x <x> never\n\nx\n".encode(),
    )
    head = git(*ME, "commit-tree", "-p", odd, "-m", "on top", "HEAD^{tree}", cwd=repo)
    git("update-ref", "refs/heads/main", head, cwd=repo)
    [line] = found(repo)
    assert line.startswith(f"commit {odd} is damaged")


def test_a_parent_that_is_no_commit_id_is_damage_of_its_child(repository: GitRepository) -> None:
    """Named by the check and by the log where it is met; what comes before it in the log is given."""
    repo = repository.path
    tree = sha_of(repo, "HEAD^{tree}")
    raw = f"tree {tree}\nparent {sha_of(repo, 'HEAD')[:-1]}!\nauthor x <x> 0 +0000\ncommitter x <x> 0 +0000\n\nx\n"
    odd = git(*("hash-object", "-t", "commit", "-w", "--stdin", "--literally"), cwd=repo, stdin=raw.encode())
    head = git(*ME, "commit-tree", "-p", odd, "-m", "on top", tree, cwd=repo)
    git("update-ref", "refs/heads/main", head, cwd=repo)
    assert found(repo) == [f"commit {odd} is damaged: its parent is no commit"]
    log = repository.log()
    with pytest.raises(errors.Damaged, match=odd):
        next(log)
    assert repository.view().read("jobs.json") == b"start\none"
    with pytest.raises(errors.Damaged, match=odd):
        repository.view(odd)


@pytest.mark.parametrize("name", ["HEAD", "HEAD~1"])
@pytest.mark.parametrize("how", ["missing", "other content", "cut"])
def test_a_commit_of_the_history_that_cannot_be_had_is_damage(repository: GitRepository, name: str, how: str) -> None:
    """Whoever names it, newest or older, hears that it is damaged, not that there is no such commit; and of an id to
    which nothing leads nobody can say so in such a repository."""
    objects = loosened(repository.path)
    sha, other = sha_of(repository.path, name), sha_of(repository.path, "HEAD:jobs.json")
    repository.close()
    place = loose(objects, sha)
    raw = place.read_bytes()
    place.unlink()
    if how == "other content":
        shutil.copy(loose(objects, other), place)
    elif how == "cut":
        place.write_bytes(raw[: len(raw) // 2])
    for ask in (
        lambda: repository.view(sha),
        lambda: list(repository.log(start=sha)),
        lambda: repository.view("0" * 40),
    ):
        with pytest.raises(errors.Damaged) as raised:
            ask()
        assert sha in str(raised.value).replace("/", "")


def test_a_parent_that_is_no_commit_is_damage(repository: GitRepository) -> None:
    """The id of a file's content stands where the history has a commit; anywhere else it is the id of no commit."""
    repo = repository.path
    blob, tree = sha_of(repo, "HEAD:jobs.json"), sha_of(repo, "HEAD^{tree}")
    with pytest.raises(errors.NotFound, match=blob):
        repository.view(blob)
    raw = f"tree {tree}\nparent {blob}\nauthor x <x> 0 +0000\ncommitter x <x> 0 +0000\n\nx\n"
    odd = git(*("hash-object", "-t", "commit", "-w", "--stdin", "--literally"), cwd=repo, stdin=raw.encode())
    git("update-ref", "refs/heads/main", odd, cwd=repo)
    assert found(repo) == [f"object {blob} is not of the kind that it should be"]
    for ask in (lambda: repository.view(blob), lambda: list(repository.log())):
        with pytest.raises(errors.Damaged, match=f"{blob} is not of the kind"):
            ask()


def test_a_directory_that_is_a_file_is_damage(repository: GitRepository) -> None:
    """A tree that calls a file's content a directory, or a directory a file, also where that one was seen as what it
    is."""
    repo = repository.path
    blob, tree = sha_of(repo, "HEAD:jobs.json"), sha_of(repo, "HEAD:history")
    raw = ObjectStore(repo / ".git").tree(bytes.fromhex(sha_of(repo, "HEAD^{tree}"))).raw
    for odd, wrong in ((b"40000 z\0", blob), (b"100644 z\0", tree)):
        made = git(
            *("hash-object", "-t", "tree", "-w", "--stdin", "--literally"),
            cwd=repo,
            stdin=raw + odd + bytes.fromhex(wrong),
        )
        head = git(*ME, "commit-tree", "-p", "HEAD", "-m", "odd", made, cwd=repo)
        git("update-ref", "refs/heads/main", head, cwd=repo)
        assert f"object {wrong} is not of the kind that it should be" in found(repo)


def test_a_commit_to_which_nothing_leads_is_found_until_it_is_gone(repository: GitRepository) -> None:
    """One of another branch can be looked at by its id; removed, it was never a part of the history."""
    repo = repository.path
    aside = git(*ME, "commit-tree", "-p", "HEAD", "-m", "aside", "HEAD~1^{tree}", cwd=repo)
    assert repository.view(aside).read("jobs.json") == b"start\n"
    assert next(iter(repository.log(start=aside))).subject == "aside"
    repository.close()
    loose(repo / ".git" / "objects", aside).unlink()
    with pytest.raises(errors.NotFound, match=aside):
        repository.view(aside)
    with pytest.raises(errors.NotFound, match=aside):
        next(iter(repository.log(start=aside)))


def test_a_history_of_many_ways_is_walked_once(repository: GitRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """To say that nothing leads to an id: each commit is read once, however many ways lead there."""
    repo = repository.path
    for number in range(20):
        side = git(*ME, "commit-tree", "-p", "HEAD", "-m", f"side {number}", "HEAD^{tree}", cwd=repo)
        merge = git(*ME, "commit-tree", "-p", "HEAD", "-p", side, "-m", f"merge {number}", "HEAD^{tree}", cwd=repo)
        git("update-ref", "HEAD", merge, cwd=repo)
    read: list[str] = []
    commit = repository._commit
    monkeypatch.setattr(repository, "_commit", lambda commit_id: (read.append(commit_id), commit(commit_id))[1])
    with pytest.raises(errors.NotFound):
        repository.view("1" * 40)
    assert len(read) - len(set(read)) <= 1  # the newest is read to know the branch, too
    assert len(set(read)) == 42
    assert found(repo) == []


def test_a_commit_whose_base_is_missing_is_damage(repository: GitRepository) -> None:
    """It is there, as a delta of what is not: that is another object's absence."""
    repo = repository.path
    head, parent = sha_of(repo, "HEAD"), sha_of(repo, "HEAD~1")
    raw, base = (git("cat-file", "commit", one, cwd=repo).encode() + b"\n" for one in (head, parent))
    delta = make_delta(base, raw)
    entry = entry_header(REF_DELTA, len(delta)) + bytes.fromhex(parent) + deflate(delta)
    pack = struct.pack(">4sLL", b"PACK", 2, 1) + entry
    checksum = hashlib.sha1(pack).digest()
    objects = loosened(repo)
    name = objects / "pack" / f"pack-{checksum.hex()}"
    name.with_suffix(".pack").write_bytes(pack + checksum)
    name.with_suffix(".idx").write_bytes(encode_index([(bytes.fromhex(head), 12, zlib.crc32(entry))], checksum))
    loose(objects, head).unlink()
    repository.close()
    assert repository.view(head).read("jobs.json") == b"start\none"
    repository.close()
    loose(objects, parent).unlink()
    with pytest.raises(errors.Damaged, match=f"object {parent} is missing"):
        repository.view(head)


def test_directories_may_be_nested_as_deep_as_somebody_likes(repository: GitRepository) -> None:
    """Deeper than Python calls itself: the check, the healing of the work tree and the next commit get through."""
    repo = repository.path
    below = git("mktree", cwd=repo, stdin=f"100644 blob {sha_of(repo, 'HEAD:meta.json')}\tx\n".encode())
    tree, rolling = bytes.fromhex(below), RollingPack()
    for _ in range(1500):
        raw = b"40000 d\0" + tree
        tree = object_id(TREE, raw)
        rolling.add(TREE, tree, raw)
    encoded = rolling.encode()
    name = repo / ".git" / "objects" / "pack" / encoded.name
    name.with_suffix(".pack").write_bytes(b"".join(map(bytes, encoded.pack)))
    name.with_suffix(".idx").write_bytes(encoded.index)
    top = git("ls-tree", "HEAD", cwd=repo) + f"\n040000 tree {tree.hex()}\td\n"
    deep = git("mktree", cwd=repo, stdin=top.encode())
    git("update-ref", "HEAD", git(*ME, "commit-tree", "-p", "HEAD", "-m", "deep", deep, cwd=repo), cwd=repo)
    path = "d/" * 1501 + "x"
    git("read-tree", "HEAD", cwd=repo)
    assert found(repo) == [f"{path} is missing in the work tree"]
    assert repository.view().read(path) == b"{}\n"
    repository.transact([append("two")])
    assert repository.view().read("jobs.json") == b"start\nonetwo"


def test_what_the_disk_says_to_a_check_is_a_finding(repository: GitRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what was found before."""
    (repository.path / ".git" / "HEAD.lock").touch()

    def refused(pack: PackFile) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", pack.base)

    monkeypatch.setattr(checking, "is_whole", refused)
    lock, said = found(repository.path)
    assert lock == ".git/HEAD.lock: a lock of another program"
    assert said.startswith("[Errno 13] Permission denied")


def test_our_own_history_is_a_line(repository: GitRepository) -> None:
    """A merge by somebody else is his affair; one that says it is ours cannot be."""
    repo = repository.path
    parents = ("-p", sha_of(repo, "HEAD"), "-p", sha_of(repo, "HEAD~1"))
    ours = {"GIT_AUTHOR_NAME": "openjobs", "GIT_AUTHOR_EMAIL": "openjobs@localhost"}
    foreign = git(*ME, "commit-tree", *parents, "-m", "a merge", "HEAD^{tree}", cwd=repo)
    git("update-ref", "refs/heads/main", foreign, cwd=repo)
    assert found(repo) == []
    false = git("commit-tree", *parents, "-m", "a merge", "HEAD^{tree}", cwd=repo, env=ours)
    git("update-ref", "refs/heads/main", false, cwd=repo)
    assert found(repo) == [f"commit {false} is ours and has 2 parents"]


# --- references ---------------------------------------------------------------------------------------------


def test_the_list_of_references_leaves_out_what_is_no_object(repository: GitRepository, tmp_path: Path) -> None:
    """Branches and tags, loose before packed; symbolic ones, links, remotes and torn files are passed over."""
    repo, git_dir = repository.path, repository.path / ".git"
    head, before = sha_of(repo, "HEAD"), sha_of(repo, "HEAD~1")
    assert list_refs(str(git_dir)) == {"refs/heads/main": head}
    git("tag", "v1", "HEAD~1", cwd=repo)
    git("branch", "work/deep", cwd=repo)
    git("update-ref", "refs/remotes/origin/main", "HEAD", cwd=repo)
    git("pack-refs", "--all", cwd=repo)
    git("update-ref", "refs/heads/work/deep", "HEAD~1", cwd=repo)
    git("symbolic-ref", "refs/heads/alias", "refs/heads/main", cwd=repo)
    (git_dir / "refs" / "heads" / "torn").write_text(head[:12])
    outside = tmp_path / "outside"
    outside.write_text(head + "\n")
    (git_dir / "refs" / "tags").mkdir(exist_ok=True)
    (git_dir / "refs" / "tags" / "link").symlink_to(outside)
    assert list_refs(str(git_dir)) == {"refs/heads/main": head, "refs/heads/work/deep": before, "refs/tags/v1": before}


def linked(path: Path) -> None:
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(kept)


def packed(repo: Path) -> Path:
    git("pack-refs", "--all", cwd=repo)
    return repo / ".git" / "packed-refs"


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda repo: linked(repo / ".git" / "HEAD"), errors.Damaged, "HEAD cannot be read"),
        (lambda repo: linked(repo / ".git" / "refs" / "heads" / "main"), errors.Damaged, "main cannot be read"),
        (lambda repo: linked(packed(repo)), errors.Damaged, "packed-refs cannot be read"),
        (
            lambda repo: packed(repo).write_text("x" * 40 + " refs/heads/main\n"),
            errors.Damaged,
            "no commit id for refs/heads/main",
        ),
        (
            lambda repo: packed(repo).write_text("0" * 40 + " refs/heads/mainly\n"),
            errors.RepositoryRefused,
            "no commit",
        ),
        (
            lambda repo: (
                git("branch", "real", cwd=repo),
                git("symbolic-ref", "refs/heads/main", "refs/heads/real", cwd=repo),
            ),
            errors.RepositoryRefused,
            "symbolic",
        ),
    ],
    ids=["HEAD link", "branch link", "table link", "table torn", "not in table", "symbolic"],
)
def test_a_branch_that_cannot_be_told_is_refused(
    repository: GitRepository, spoil: Callable[[Path], object], error: type[Exception], match: str
) -> None:
    """Reading and writing say why; the branch is never taken for an empty one, and nothing is written."""
    repository.close()
    spoil(repository.path)
    fresh = GitRepository(repository.path, Disk(durable=False))
    for ask in (fresh.view, lambda: fresh.transact([append("two")])):
        with pytest.raises(error, match=match):
            ask()
    fresh.close()
    assert sorted(os.listdir(repository.path)) == [".git", "history", "jobs.json", "meta.json"]
    assert (repository.path / "jobs.json").read_bytes() == b"start\none"


# --- the index ----------------------------------------------------------------------------------------------


def test_a_sparse_index_is_refused(repository: GitRepository) -> None:
    """It names directories where we look for files: an extension that no reader may pass over."""
    repo = repository.path
    git("sparse-checkout", "set", "--cone", "--sparse-index", cwd=repo)
    assert b"sdir" in (repo / ".git" / "index").read_bytes()
    with pytest.raises(errors.RepositoryRefused, match="sdir"):
        Index.load(str(repo / ".git" / "index"))
    with pytest.raises(errors.RepositoryRefused):
        repository.transact([append("two")])
