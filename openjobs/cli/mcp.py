"""`openjobs mcp`: the tools of one session for a program that speaks the Model Context Protocol."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import click

from ..errors import InvalidConfiguration
from .options import command
from .state import State


@command("mcp")
@click.option(
    "--session", "session_id", default="mcp", show_default=True, metavar="ID", help="Made where it is missing."
)
@click.option(
    "--agent",
    "agents",
    multiple=True,
    metavar="NAME",
    help="An agent that may be named. Default: all. May be repeated.",
)
@click.option("--shell", is_flag=True, help="Offer background commands, too.")
@click.option("--plan", is_flag=True, help="Offer waiting for several jobs, too.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Jobs at a time.")
def mcp_command(
    state: State, session_id: str, agents: tuple[str, ...], shell: bool, plan: bool, workers: int | None
) -> int:
    """Offer a session's tools to another program, over standard input and output.

    That program starts this command as its child. It ends with its input; jobs that still run then
    are cancelled. What has ended in the background is told with the answer to the next call.
    """
    if find_spec("mcp") is None:
        raise InvalidConfiguration('this needs mcp: pip install "openjobs-git[mcp]"')
    from ..integrations import mcp

    state.make_home()
    code = mcp.serve(state.home, session_id, agents=agents, shell=shell, plan=plan, workers=workers)
    # Everything is closed; the library's thread that reads the input cannot be woken, and would keep the process.
    sys.stderr.flush()
    os._exit(code)
