"""Real git, with nobody's configuration."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

#: no user, system or repository-outside setting reaches git; there is an identity all the same
ISOLATED = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "A Tester",
    "GIT_AUTHOR_EMAIL": "tester@example.org",
    "GIT_COMMITTER_NAME": "A Tester",
    "GIT_COMMITTER_EMAIL": "tester@example.org",
}


def git(
    *args: str | Path,
    cwd: str | Path,
    check: bool = True,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> str:
    """What git wrote to stdout, without the last newline. A failure shows what git said."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", *map(str, args)],
        cwd=cwd,
        env={**clean, **ISOLATED, **(env or {})},
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace")
        raise AssertionError(f"git {' '.join(map(str, args))} ended with {done.returncode}:\n{said}")
    return done.stdout.decode(errors="replace").removesuffix("\n")
