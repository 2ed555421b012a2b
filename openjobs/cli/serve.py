"""`openjobs serve`: the server and its panel, in the foreground."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import InvalidConfiguration
from . import exits, output
from .options import command
from .state import State

if TYPE_CHECKING:
    from ..server.running import Announcement

_NEEDED = ("starlette", "uvicorn", "websockets", "prometheus_client", "markdown_it", "nh3")


@command("serve")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Also listen on 127.0.0.1 at this port, for a browser; 0 is any."
)
@click.option("--workers", type=click.IntRange(1, 1024), help="Size of the pool, where this becomes the home's host.")
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Also answer pages of this origin, and requests to its host: for a proxy in front. May be given again.",
)
@click.option("--url", is_flag=True, help="Print a new link to the server that runs, and end.")
def serve_command(state: State, port: int | None, workers: int | None, allow_origin: tuple[str, ...], url: bool) -> int:
    """Serve the jobs to a browser and to programs, until Ctrl-C.

    Listens on serve.sock in the home, and with --port on this machine's loopback. The link that is
    printed logs a browser in once, within ten minutes. Programs use the token in serve.token.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidConfiguration(f'the server needs {", ".join(missing)}: pip install "openjobs-git[server]"')
    from ..server import running

    if url:
        link = running.login_url(state.home)
        if state.json:
            output.json_value({"url": link})
        else:
            output.line(link)
        return exits.COMPLETED
    state.make_home()
    try:
        running.serve(
            state.home,
            port=port,
            workers=workers,
            origins=allow_origin,
            environ=os.environ,
            cwd=Path.cwd(),
            announce=lambda told: _tell(state, told),
        )
    except KeyboardInterrupt:
        output.note("the server has ended")
    return exits.COMPLETED


def _tell(state: State, told: Announcement) -> None:
    if state.json:
        output.json_line(
            {
                "home": os.fspath(told.home),
                "mode": told.mode,
                "socket": None if told.socket is None else os.fspath(told.socket),
                "port": told.port,
                "url": told.url,
            }
        )
        return
    attached = " (attached to the host that runs there)" if told.mode == "attached" else ""
    said = [f"serving {told.home}{attached}"]
    if told.socket is not None:
        said.append(f"socket: {told.socket}")
    if told.url is not None:
        said += [f"open:   {told.url}", "        (good once, for ten minutes; `openjobs serve --url` prints another)"]
    else:
        said.append("with --port it can be opened in a browser")
    output.lines(said)
