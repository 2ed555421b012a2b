"""What holds for every test: a clean environment at its start, and nothing left behind at its end."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from .support import FakeClock, fence
from .support.chaos import Chaos, again, chaos_of, told
from .support.leaks import Snapshot, settled
from .support.turns import Turns

fence.put_up(Path(__file__).parents[1])

# Under `nohup`, or behind a shell's `&`, these are ignored by every child too, and tests send them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("COVERAGE_RUN"):  # what measures starts with site-packages, from the environment
    from openjobs.processes import template

    template._ISOLATED = ()

CHAOS = os.environ.get("OPENJOBS_CHAOS") == "1"

# A failure must come back when the same command is run again; `nox -s chaos` looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("chaos", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("chaos" if CHAOS else "fixed")

#: variables by which somebody's own settings would reach a test
LEAKING = ("OPENJOBS_", "OPENPROGRAM_", "GIT_", "XDG_")
LEAKING_NAMES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES", "EDITOR", "PAGER")


@pytest.fixture(scope="session", autouse=True)
def _base_temp(tmp_path_factory: pytest.TempPathFactory) -> None:
    """pytest's own directory is made before any test has a TMPDIR of its own."""
    tmp_path_factory.getbasetemp()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty TMPDIR with a short name, since the name of a Unix socket may hold only 100 characters."""
    path = Path(tempfile.mkdtemp(prefix="oj-", dir="/tmp")).resolve()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest, scratch: Path) -> Iterator[None]:
    """First fixture in, last one out: no more threads, processes, descriptors, temporary files than before."""
    before = Snapshot(scratch)
    fence.refused.clear()
    yield
    assert not fence.refused, f"the test tried to change what is not its own: {fence.refused}"
    if request.node.get_closest_marker("leaks") is None:
        found = settled(before.new)
        assert not found, "the test left behind:\n  " + "\n  ".join(found)


@pytest.fixture(autouse=True)
def _clean_environment(
    _nothing_left_behind: None, scratch: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No variable of ours or git's leaks in; HOME is empty, so git knows no user, and nobody's hooks."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(LEAKING) or name in LEAKING_NAMES:
                patch.delenv(name)
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        patch.setenv("TMPDIR", str(scratch))
        patch.setattr(tempfile, "tempdir", str(scratch))
        yield


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command that ran in this process says its warnings on the terminal; the next test's are its own."""
    logger = logging.getLogger("openjobs")
    before = logger.level, logger.propagate, logger.handlers[:]
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers[:] = before[1], before[2]


@pytest.fixture
def turns() -> Iterator[Turns]:
    """Turns that the test leads; whatever became of the test, none is left waiting."""
    turns = Turns()
    yield turns
    turns.finish_all()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> Chaos:
    """True in the long run (`nox -s chaos`); how many rounds, and what was counted."""
    return chaos_of(request.node.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the harnesses counted (in the long run), and how to see each failure again."""
    for outcome in ("passed", "failed") if CHAOS else ():
        for report in terminalreporter.stats.get(outcome, []):
            if report.when == "call" and (line := told(report.nodeid, report.user_properties)):
                terminalreporter.write_line(f"{outcome}: {line}")
    for report in terminalreporter.stats.get("failed", []):
        for line in again(report.nodeid, report.user_properties):
            terminalreporter.write_line(f"again: {line}")
