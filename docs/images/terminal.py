"""Makes docs/images/terminal.svg: what a real terminal shows. `python docs/images/terminal.py`, with tmux and rich.

Nothing in the picture is written by hand: the commands below are typed into a terminal, and its screen is taken.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 100, 46
COMMANDS = [
    "openjobs agent --agent shell 'echo hello from a job'",
    "id=$(openjobs agent --agent shell --background -d 'count files' 'ls / | wc -l')",
    "openjobs agent --agent shell -d 'this one fails' 'cat nothing'",
    "openjobs wait $id",
    "openjobs run -- sh -c 'echo a command with a trail'",
    "openjobs list",
    "openjobs history $id",
    "git -C home/sessions/default/repo log --oneline -4",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "bin").mkdir()
        tool = directory / "bin" / "openjobs"
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m openjobs "$@"\n')
        tool.chmod(0o755)
        (directory / "rc").write_text("PS1='$ '\n")
        env = {
            **os.environ,
            "PATH": f"{directory}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OPENJOBS_HOME": str(directory / "home"),
            "LC_ALL": "C.UTF-8",
            "GIT_PAGER": "cat",
        }
        socket = directory / "tmux"
        tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        subprocess.run(
            [
                *tmux,
                "new-session",
                "-d",
                "-x",
                str(WIDTH),
                "-y",
                str(HEIGHT),
                "-c",
                scratch,
                f"bash --noprofile --rcfile {scratch}/rc",
            ],
            env=env,
            check=True,
        )
        try:
            wait(tmux, 0)
            for number, command in enumerate(COMMANDS, start=1):
                subprocess.run([*tmux, "send-keys", "-l", command], check=True)
                subprocess.run([*tmux, "send-keys", "Enter"], check=True)
                wait(tmux, number)
            screen = capture(tmux)
        finally:
            subprocess.run([*tmux, "kill-server"], check=True)
            subprocess.run([sys.executable, "-c", END], env=env, check=True)
    lines = screen.rstrip().splitlines()
    while lines and lines[-1].strip() in ("$", ""):
        lines.pop()
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi("\n".join(lines)), end="")
    svg = console.export_svg(title="openjobs", font_aspect_ratio=0.61)
    (ROOT / "docs" / "images" / "terminal.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


END = (
    "import os; from pathlib import Path; from tests.support.cli import Cli;"
    " Cli(Path(os.environ['OPENJOBS_HOME'])).end_host()"
)


def capture(tmux: list[str]) -> str:
    return subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True).stdout


def wait(tmux: list[str], commands: int) -> None:
    """Until the prompt is there again."""
    plain = re.compile(r"\x1b\[[0-9;]*m")
    end = time.monotonic() + 90
    while time.monotonic() < end:
        lines = [line for line in plain.sub("", capture(tmux)).splitlines() if line.strip()]
        if lines and lines[-1].strip() == "$" and sum(line.startswith("$ ") for line in lines) >= commands:
            return
        time.sleep(0.1)
    raise SystemExit("the terminal does not come back:\n" + capture(tmux))


if __name__ == "__main__":
    if not shutil.which("tmux"):
        raise SystemExit("this needs tmux")
    main()
