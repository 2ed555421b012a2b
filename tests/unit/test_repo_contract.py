"""One suite for every `Repository`: in memory and in git they are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from openjobs import errors
from openjobs.durable import Disk
from openjobs.repo import Change, GitRepository, MemoryRepository, Outcome, Repository, Transaction, View

NOW = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)


@pytest.fixture(params=["memory", "git"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repository]:
    made: Repository
    if request.param == "memory":
        made = MemoryRepository()
        yield made
    else:
        made = git = GitRepository.create(tmp_path / "repo", Disk(durable=False), {}, now=NOW)
        yield made
        assert git.check() == []
    made.close()


def put(subject: str = "change", **files: bytes | None) -> Transaction:
    """Underscores in names stand for slashes."""
    return lambda view: Change(files={name.replace("_", "/"): data for name, data in files.items()}, subject=subject)


def refuse(view: View) -> Change | None:
    raise errors.InvalidTransition("it is over")


def test_what_was_committed_can_be_read(repository: Repository) -> None:
    """A returned `transact` is seen by every later view, and only the named paths have changed."""
    repository.transact([put(a=b"1", d_b=b"2")])
    [outcome] = repository.transact([put(a=b"3")])
    view = repository.view()
    assert view.commit_id == outcome.commit_id
    assert (view.read("a"), view.read("d/b"), view.read("missing"), view.read("d")) == (b"3", b"2", None, None)


def test_each_change_is_one_commit_in_order(repository: Repository) -> None:
    """A batch of N changes is N commits, each on top of the one before, all with the time that was given."""
    outcomes = repository.transact([put(f"step {n}", a=b"%d" % n) for n in range(5)], now=NOW)
    found = list(repository.log())[:5]
    assert [info.commit_id for info in found] == [outcome.commit_id for outcome in reversed(outcomes)]
    assert [info.subject for info in found] == [f"step {n}" for n in (4, 3, 2, 1, 0)]
    assert [info.parents for info in found[:4]] == [(info.commit_id,) for info in found[1:]]
    assert {info.time for info in found} == {NOW}
    assert {info.author for info in found} == {"openjobs <openjobs@localhost>"}


def test_a_transaction_sees_those_before_it(repository: Repository) -> None:
    """Inside a batch the view is the commit that is about to be the parent."""
    seen: list[tuple[str | None, bytes | None, list[str]]] = []

    def look(view: View) -> Change:
        seen.append((view.commit_id, view.read("a"), list(view.names("d"))))
        return Change(files={"a": (view.read("a") or b"") + b"x", f"d/{len(seen)}": b""}, subject="x")

    outcomes = repository.transact([look, look, look])
    assert [entry[1:] for entry in seen] == [(None, []), (b"x", ["1"]), (b"xx", ["1", "2"])]
    assert [entry[0] for entry in seen[1:]] == [outcome.commit_id for outcome in outcomes[:2]]
    assert repository.view().read("a") == b"xxx"


def test_a_refusal_concerns_only_its_own_transaction(repository: Repository) -> None:
    """`Refused` and `Damaged` are outcomes; the rest of the batch stands."""
    first, refused, damaged, last = repository.transact([put(a=b"1"), refuse, damage, put(b=b"2")])
    assert isinstance(refused.error, errors.InvalidTransition)
    assert refused.commit_id is None
    assert isinstance(damaged.error, errors.Damaged)
    assert first.error is last.error is None
    assert (repository.view().read("a"), repository.view().read("b")) == (b"1", b"2")
    assert len([info for info in repository.log() if info.subject == "change"]) == 2


def damage(view: View) -> Change | None:
    raise errors.Damaged("a row", path="jobs.json")


def test_nothing_to_change_is_no_commit(repository: Repository) -> None:
    """A transaction that returns None ends with the commit that it saw."""
    [made] = repository.transact([put(a=b"1")])
    before = len(list(repository.log()))
    [outcome] = repository.transact([lambda view: None])
    assert outcome.error is None
    assert outcome.commit_id == made.commit_id
    assert len(list(repository.log())) == before


def test_a_change_without_effect_is_a_commit_all_the_same(repository: Repository) -> None:
    """The same bytes again, or no files at all, still leave their mark in the log."""
    repository.transact([put(a=b"1"), put("again", a=b"1"), put("empty")])
    assert [info.subject for info in repository.log()][:2] == ["empty", "again"]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()])
def test_any_other_exception_abandons_the_batch(repository: Repository, error: BaseException) -> None:
    """Nothing of a batch with a bug in it becomes visible, and the repository can be used again."""
    repository.transact([put(a=b"1")])
    head = repository.view().commit_id

    def bug(view: View) -> Change | None:
        raise error

    with pytest.raises(type(error)):
        repository.transact([put(a=b"2"), bug])
    assert repository.view().commit_id == head
    repository.transact([put(b=b"3")])
    assert (repository.view().read("a"), repository.view().read("b")) == (b"1", b"3")


def test_before_publish_runs_between_memory_and_visibility(repository: Repository) -> None:
    """It is called after every transaction and before any of them can be seen; what it raises abandons the batch."""
    repository.transact([put(a=b"1")])
    order: list[str] = []

    def step(view: View) -> Change:
        order.append("transaction")
        return Change(files={"a": b"2"}, subject="x")

    def veto() -> None:
        order.append(f"publish {repository_view(repository)!r}")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        repository.transact([step, step], before_publish=veto)
    assert order == ["transaction", "transaction", "publish b'1'"]
    assert repository.view().read("a") == b"1"
    calls: list[int] = []
    repository.transact([put(a=b"4")], before_publish=lambda: calls.append(1))
    assert calls == [1]
    assert repository.view().read("a") == b"4"


def test_who_waits_is_told_once_it_is_durable(repository: Repository) -> None:
    """`durable` gets the outcomes that `transact` returns; whoever looks by then sees the last commit. Of a batch
    that was abandoned nobody is told."""
    told: list[list[Outcome]] = []
    seen: list[bytes | None] = []

    def durable(outcomes: list[Outcome]) -> None:
        told.append(list(outcomes))
        seen.append(repository.view().read("a"))

    returned = repository.transact([put(a=b"1"), refuse, put(a=b"2"), lambda view: None], durable=durable)
    assert told == [returned]
    assert seen == [b"2"]

    def veto() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        repository.transact([put(a=b"3")], before_publish=veto, durable=durable)
    assert len(told) == 1


def repository_view(repository: Repository) -> bytes | None:
    if isinstance(repository, MemoryRepository):
        return b"1"  # its lock is held: nobody can look, so nobody can see too much
    return repository.view().read("a")


def test_a_path_can_be_removed(repository: Repository) -> None:
    """None removes; a directory that is empty by that is gone; removing what is not there is no error."""
    repository.transact([put(a=b"1", d_e_f=b"2")])
    repository.transact([put(d_e_f=None, missing=None, no_such=None)])
    view = repository.view()
    assert (view.read("d/e/f"), view.version("d"), list(view.names("d"))) == (None, None, [])
    assert list(view.names("")) == ["a"]


def test_an_old_view_stays_as_it_is(repository: Repository) -> None:
    """What a view shows never changes, however many commits follow."""
    repository.transact([put(a=b"old", d_b=b"old")])
    old = repository.view()
    for n in range(40):
        repository.transact([put(a=b"%d" % n, d_b=None if n % 2 else b"%d" % n)])
    assert (old.read("a"), old.read("d/b"), list(old.names(""))) == (b"old", b"old", ["a", "d"])


def test_versions_are_equal_exactly_when_contents_are(repository: Repository) -> None:
    """Of files and directories, at any commit."""
    repository.transact([put(a=b"1", b=b"1", d_x=b"1", e_x=b"1")])
    first = repository.view()
    repository.transact([put(d_x=b"2")])
    second = repository.view()
    repository.transact([put(d_x=b"1")])
    third = repository.view()
    assert first.version("a") == first.version("b") == second.version("a")
    assert first.version("d") == third.version("d") != second.version("d")
    assert first.version("d/x") != second.version("d/x")
    assert first.version("missing") is None


def test_names_are_sorted(repository: Repository) -> None:
    """Names of files and directories, once each."""
    repository.transact([put(b=b"", a=b"", d_2=b"", d_1=b"", d_e_x=b"")])
    view = repository.view()
    assert list(view.names("")) == ["a", "b", "d"]
    assert list(view.names("d")) == ["1", "2", "e"]
    assert list(view.names("a")) == list(view.names("nowhere")) == []


def test_the_log_of_a_path_has_only_its_changes(repository: Repository) -> None:
    """Files and directories; from any commit on."""
    outcomes = repository.transact([put(f"s{n}", **{("a" if n % 3 else "d_b"): b"%d" % n}) for n in range(9)])
    assert [info.subject for info in repository.log(paths=["d/b"])] == ["s6", "s3", "s0"]
    start = outcomes[5].commit_id
    assert [info.subject for info in repository.log(start=start)][:3] == ["s5", "s4", "s3"]
    assert [info.subject for info in repository.log(start=start, paths=["a"])] == ["s5", "s4", "s2", "s1"]


def test_a_message_is_what_was_given(repository: Repository) -> None:
    """Subject and trailers come back; control characters cannot forge a line."""
    change = Change(
        files={"a": b"1"},
        subject="job → done\nOpenjobs-Job: forged",
        trailers=(("Openjobs-Kind", "transition"), ("Openjobs-Job", "1\nOpenjobs-Status: completed")),
    )
    repository.transact([lambda view: change])
    info = next(iter(repository.log()))
    assert info.subject == "job → done Openjobs-Job: forged"
    assert info.trailers == (("Openjobs-Kind", "transition"), ("Openjobs-Job", "1 Openjobs-Status: completed"))
    assert info.trailer("Openjobs-Status") is None


def test_bytes_come_back_unchanged(repository: Repository) -> None:
    """Line endings, zero bytes, bytes that are no text, nothing at all, and megabytes."""
    contents = {"crlf": b"a\r\nb\r\n", "zero": bytes(range(256)), "empty": b"", "big": b"0123456789abcdef" * 200_000}
    repository.transact([lambda view: Change(files=contents, subject="x")])
    view = repository.view()
    assert {name: view.read(name) for name in contents} == contents


def test_unusual_names_are_names(repository: Repository) -> None:
    """Spaces, other scripts, dots and dashes."""
    names = ["with space", "日本語/ключ.json", "-dash", "..dots", "a.b.c", ".hidden"]
    repository.transact([lambda view: Change(files={name: name.encode() for name in names}, subject="x")])
    view = repository.view()
    assert {name: view.read(name) for name in names} == {name: name.encode() for name in names}


def test_views_and_logs_may_be_read_by_other_threads(repository: Repository) -> None:
    """While one thread commits, others always see a whole commit."""
    repository.transact([put(a=b"0", b=b"0")])
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            view = repository.view()
            if view.read("a") != view.read("b"):
                wrong.append((view.read("a"), view.read("b")))
            next(iter(repository.log(paths=["a"])))

    threads = [threading.Thread(target=guarded(read, wrong)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for n in range(100):
            repository.transact([put(a=b"%d" % n, b=b"%d" % n)])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def guarded(act: Callable[[], None], problems: list[object]) -> Callable[[], None]:
    def run() -> None:
        try:
            act()
        except Exception as error:
            problems.append(error)

    return run


def test_it_opens_again_after_close(repository: Repository) -> None:
    """`close` gives back what it holds; any later call opens it again."""
    repository.transact([put(a=b"1")])
    repository.close()
    repository.close()
    assert repository.view().read("a") == b"1"
    repository.close()
    repository.transact([put(a=b"2")])
    repository.republish()
    assert repository.view().read("a") == b"2"


def test_a_commit_that_nobody_made_is_not_found(repository: Repository) -> None:
    """Neither as a view nor in the log, whatever its form; none of it is called damage."""
    [made] = repository.transact([put(a=b"1")])
    head = made.commit_id or ""
    for commit_id in ("main", "ab", "", "0" * 40, "0" * 41, "0" * 64, head[:39], head + " ", head.upper() + "a"):
        with pytest.raises(errors.NotFound):
            repository.view(commit_id)
        with pytest.raises(errors.NotFound):
            list(repository.log(start=commit_id))
        with pytest.raises(errors.NotFound):
            list(repository.log(start=commit_id, paths=["a"]))
    assert repository.view(head).read("a") == b"1"


def test_what_is_no_commit_is_not_found(repository: Repository) -> None:
    """The id of a file's or a directory's content is an id of something else."""
    repository.transact([put(d_a=b"1")])
    view = repository.view()
    for content in (view.version("d"), view.version("d/a")):
        assert content is not None
        with pytest.raises(errors.NotFound):
            repository.view(content)
        with pytest.raises(errors.NotFound):
            list(repository.log(start=content))


Files = dict[str, bytes | None]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"a/b": b"new"}, "a is no directory"),
        ({"a/b/c": b"new"}, "a is no directory"),
        ({"d": b"new"}, "d is a directory"),
        ({"d": None}, "d is a directory"),
        ({"d/e": b"new"}, "d/e is a directory"),
        ({"d/e/f/g": b"new"}, "d/e/f is no directory"),
        ({"x": b"1", "x/y": b"2"}, "have the same name"),
        ({"x/y": b"2", "x": b"1"}, "have the same name"),
        ({"a": None, "a/b": b"2"}, "have the same name"),
        ({"d": b"1", "d/e/f": None}, "have the same name"),
        ({"": b"1"}, "cannot be a path"),
        ({"d//x": b"1"}, "cannot be a path"),
        ({"../x": b"1"}, "cannot be a path"),
        ({".git/config": b"1"}, "cannot be a path"),
    ],
    ids=lambda value: ",".join(value) or "empty" if isinstance(value, dict) else "",
)
def test_a_name_is_a_file_or_a_directory(repository: Repository, files: Files, why: str) -> None:
    """A change that would lose one for the other is refused by name, and nothing else of it is kept; the rest of
    the batch stands. So is a path that git has no place for."""
    repository.transact([put(a=b"1", d_e_f=b"2")])

    def clash(view: View) -> Change:
        return Change(files={"beside": b"3", **files}, subject="both")

    first, refused, last = repository.transact([put(b=b"4"), clash, put(c=b"5")])
    assert isinstance(refused.error, errors.InvalidInput)
    assert why in str(refused.error)
    assert first.error is last.error is None
    view = repository.view()
    assert [view.read(name) for name in ("a", "b", "c", "d/e/f", "beside")] == [b"1", b"4", b"5", b"2", None]
    assert list(view.names("")) == ["a", "b", "c", "d"]


def test_a_file_may_take_the_place_of_a_directory_that_is_gone(repository: Repository) -> None:
    """And the other way round: by two changes, the first of which says what goes. To remove what is below a file
    removes nothing."""
    repository.transact([put(a=b"1", d_e=b"2"), put(a_b=None, d_e_f=None)])
    assert [repository.view().read(name) for name in ("a", "d/e")] == [b"1", b"2"]
    repository.transact([put(a=None, d_e=None), put(a_b=b"3", d=b"4")])
    view = repository.view()
    assert [view.read(name) for name in ("a", "a/b", "d", "d/e")] == [None, b"3", b"4", None]
    assert [list(view.names(name)) for name in ("", "a", "d")] == [["a", "d"], ["b"], []]


def test_upkeep_has_an_end(repository: Repository) -> None:
    """`step` says when nothing is left to do; what was committed is as before, and `close` may come twice."""
    repository.transact([put(a=b"1")])
    head = repository.view().commit_id
    maintenance = repository.maintenance()
    for _ in range(100):
        if not maintenance.step():
            break
    else:
        raise AssertionError("the upkeep never ended")
    maintenance.close()
    maintenance.close()
    repository.maintain()
    repository.rest()
    assert repository.check() == []
    assert repository.view().commit_id == head
    assert repository.view().read("a") == b"1"


def test_times_are_kept_to_the_second(repository: Repository) -> None:
    """git keeps whole seconds; zone and wall clock of the machine play no part."""
    when = NOW + timedelta(days=400)
    repository.transact([put(a=b"1")], now=when)
    assert next(iter(repository.log())).time == when
