"""The fence around the tests holds. Every target here does not exist, so a hole in it would do no harm either."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import fence

#: below a directory that is not there: without the fence each effect fails with FileNotFoundError
NOWHERE = "/no-such-directory-for-openjobs-tests/file"


@pytest.mark.parametrize(
    "effect",
    [
        lambda own: Path(NOWHERE).write_text(""),
        lambda own: os.open(NOWHERE, os.O_CREAT | os.O_WRONLY),
        lambda own: os.rename(own, NOWHERE),
        lambda own: os.replace(NOWHERE, own),
        lambda own: os.unlink(NOWHERE),
        lambda own: os.mkdir(NOWHERE),
        lambda own: os.rmdir(NOWHERE),
        lambda own: os.link(own, NOWHERE),
        lambda own: os.symlink(own, NOWHERE),
        lambda own: os.truncate(NOWHERE, 0),
        lambda own: os.chmod(NOWHERE, 0o600),
        lambda own: shutil.move(own, NOWHERE),
        lambda own: Path(own.parent / "out" / "file").write_bytes(b""),
    ],
)
def test_nothing_outside_is_changed(tmp_path: Path, effect: Callable[[Path], object]) -> None:
    """Each effect is refused before it happens, through a link that leads out too, and is remembered."""
    own = tmp_path / "own"
    own.write_bytes(b"own")
    (tmp_path / "out").symlink_to(os.path.dirname(NOWHERE))
    with pytest.raises(fence.Outside):
        effect(own)
    assert fence.refused
    fence.refused.clear()
    assert own.read_bytes() == b"own"


def test_a_refusal_that_was_swallowed_is_remembered() -> None:
    """Code that catches everything does not hide it from the check at the test's end."""
    with contextlib.suppress(BaseException):
        os.unlink(NOWHERE)
    assert fence.refused == [f"os.remove {NOWHERE}"]
    fence.refused.clear()


def test_inside_everything_works(tmp_path: Path) -> None:
    """Files of one's own, null devices and reading anywhere are free."""
    (tmp_path / "a").write_bytes(b"x")
    os.rename(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path)
    with open(os.devnull, "w"), open(__file__):
        pass


@pytest.mark.parametrize("place", ["/tmp", "/dev", str(Path(__file__).parents[2])])
def test_a_root_itself_may_be_made_when_it_is_there(place: str) -> None:
    """`mkdir -p` names the project's folder before what lies in it, wherever the checkout is."""
    Path(place).mkdir(parents=True, exist_ok=True)
    assert not fence.refused
