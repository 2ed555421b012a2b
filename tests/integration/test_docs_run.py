"""The documentation runs: every command and program on a page, in order, prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import Cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

BLOCK = re.compile(
    r"^(?P<skip><!-- not run: [^\n]+ -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
#: run from top to bottom in one shell, in an empty directory
PAGES = ["tutorial.md", *sorted(str(path.relative_to(DOCS)) for path in (DOCS / "howto").glob("*.md"))]
MARK = "@@@@ block"


def blocks(page: str) -> list[re.Match[str]]:
    return list(BLOCK.finditer((DOCS / page).read_text()))


def script(page: str, directory: Path) -> tuple[str, dict[int, str]]:
    """One shell script of all blocks, each announced; and what is expected of some, by number."""
    lines, expected = ["set -eu", f"TOP={directory}"], {}
    for number, block in enumerate(blocks(page)):
        text = block["text"]
        if block["skip"]:
            continue
        if block["kind"] == "text":
            expected[number - 1] = text
            continue
        lines.append(f"echo '{MARK} {number}'")
        if block["kind"] == "python":
            (directory.parent / f"block{number}.py").write_text(text)
            lines.append(f"(cd $TOP && {sys.executable} -W error {directory.parent}/block{number}.py)")
        elif block["kind"] == "sh":
            lines.append(text)
    return "\n".join(lines), expected


def prepared(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """An empty directory and an environment with `openjobs` in it, as after an installation."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "openjobs").write_text(f'#!/bin/sh\nexec {sys.executable} -m openjobs "$@"\n')
    (tools / "openjobs").chmod(0o755)
    directory = tmp_path / "empty"
    directory.mkdir(mode=0o700)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    return directory, env


def run(code: str, directory: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["bash", "-c", code], cwd=directory, env=env, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        for lock in directory.rglob("host.lock"):
            Cli(lock.parent).end_host()


def pattern(expected: str) -> re.Pattern[str]:
    """`…` is anything on a line; alone on a line it is any number of lines."""
    lines = [
        r"(?:[^\n]*\n)*" if line == "…" else r"[^\n]*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in expected.splitlines()
    ]
    return re.compile("".join(lines))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    """Its commands and programs, one after the other in one shell, succeed and print what stands below them."""
    directory, env = prepared(tmp_path)
    code, expected = script(page, directory)
    done = run(code, directory, env)
    assert done.returncode == 0, f"{page} stops after:\n{done.stdout}\n{done.stderr}"
    parts = re.split(rf"^{MARK} (\d+)\n", done.stdout, flags=re.MULTILINE)
    said = dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))
    assert said
    for number, text in expected.items():
        assert pattern(text).fullmatch(said[number]), f"{page}, block {number} says\n{said[number]}\ninstead of\n{text}"


def test_every_page_with_code_is_run_by_some_test() -> None:
    """A page with shell or Python on it is run here, or names the test that runs it."""
    for path in sorted(DOCS.rglob("*.md")):
        page = str(path.relative_to(DOCS))
        code = [block for block in blocks(page) if block["kind"] in ("sh", "python") and not block["skip"]]
        if not code or page in PAGES or page.startswith("decisions/"):  # those are records, not instructions
            continue
        known = [one.name for one in (ROOT / "tests").rglob("test_*.py") if path.name in one.read_text()]
        assert known, f"no test reads {page}, which has code on it"


def prepared_project(directory: Path) -> None:
    """What the examples of the reference pages speak of."""
    (directory / "Makefile").write_text("test:\n\t@echo tested\nall:\n\t@echo made\n")
    for name in ("nightly.sh", "server.sh"):
        (directory / name).write_text("#!/bin/sh\necho served\n")
        (directory / name).chmod(0o755)
    home = directory / "jobs"
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text('[profiles.reviewer]\ncommand = ["cat"]\nstdin = "prompt"\n')
    subprocess.run(["git", "init", "-q", directory], check=True)
    subprocess.run(["git", "-C", directory, "add", "-N", "Makefile"], check=True)


@pytest.mark.timeout(120)
def test_the_examples_of_the_command_line_run(tmp_path: Path) -> None:
    """Every example on docs/cli.md succeeds, in a project with a Makefile and a profile `reviewer`; what follows
    without end is stopped, and scripts of other shells are only printed."""
    directory, env = prepared(tmp_path)
    prepared_project(directory)
    code = "\n".join(
        ["set -eu", f"export OPENJOBS_HOME={directory}/jobs"]
        + [block["text"] for block in blocks("cli.md") if block["kind"] == "sh" and not block["skip"]]
    )
    code = re.sub(r"^(openjobs events --follow)", r"timeout 3 \1", code, flags=re.MULTILINE)
    code = re.sub(r'^eval ("\$\(openjobs completion \w+\)")', r"test -n \1", code, flags=re.MULTILINE)
    done = run("mkdir -p ~/.config/fish/completions\n" + code, directory, env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for word in ("tested", "served", "restored: ok"):
        assert word in done.stdout


@pytest.mark.timeout(120)
def test_the_readmes_commands_run(tmp_path: Path) -> None:
    """Each line of the README's terminal block, with the id that the line before it gave."""
    readme = (ROOT / "README.md").read_text()
    [block] = [
        one["text"] for one in BLOCK.finditer(readme) if one["kind"] == "sh" and "openjobs list\n" in one["text"]
    ]
    directory, env = prepared(tmp_path)
    prepared_project(directory)
    code = ["set -eu", f"export OPENJOBS_HOME={directory}/jobs"]
    for line in block.splitlines():
        code += ["ID=$(openjobs list -n 1 | cut -f 1)", re.sub(r"\bID\b", "$ID", line)]
    done = run("\n".join(code), directory, env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("tested") == 2


def test_the_program_on_the_page_of_background_commands_runs(tmp_path: Path) -> None:
    """docs/processes.md begins with one, on a store with a session `default`."""
    directory, env = prepared(tmp_path)
    prepared_project(directory)
    [block] = [one["text"] for one in blocks("processes.md") if one["kind"] == "python"]
    work = directory / "jobs" / "sessions" / "default" / "work"
    work.mkdir(parents=True, mode=0o700)
    (work / "Makefile").write_text("test:\n\t@echo tested\n")
    before = 'from openjobs import GitJobStore\nstore = GitJobStore("jobs")\nstore.create_session("default")\n'
    (tmp_path / "block.py").write_text(before + block + "store.close()\n")
    done = run(f"{sys.executable} -W error {tmp_path}/block.py", directory, env)
    assert done.stdout == "completed 0 b'tested\\n'\n", done.stderr


def test_the_program_on_the_page_of_the_server_runs(tmp_path: Path) -> None:
    """docs/server.md ends with an app that another host may mount."""
    pytest.importorskip("starlette")
    directory, env = prepared(tmp_path)
    [block] = [one["text"] for one in blocks("server.md") if one["kind"] == "python"]
    before = "from openjobs import GitJobStore, JobRunner\nstore = GitJobStore('jobs')\nrunner = JobRunner(store)\n"
    (tmp_path / "block.py").write_text(before + block + "print(callable(app))\nrunner.shutdown()\nstore.close()\n")
    done = run(f"{sys.executable} {tmp_path}/block.py", directory, env)
    assert done.stdout == "True\n", done.stderr
