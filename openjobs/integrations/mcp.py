"""The tools of a session for any client of the Model Context Protocol, over stdio (extra `mcp`).

    openjobs mcp --session my-project --shell

A program that speaks the protocol starts this command as its child and gives its model `agent`, `job_output`,
`list_jobs`, `job_stop` (and `shell`, `await_tasks` where asked for). Which agents there are is in the home's
`config.toml`. What has ended in the background is told with the answer to the next call.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

try:
    import mcp_types as types
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel.server import Server
    from mcp.server.stdio import stdio_server
except ImportError as error:
    what = "openjobs.integrations.mcp needs mcp: pip install 'openjobs-git[mcp]'"
    raise ImportError(f"{what} ({error})") from error

from .._version import __version__
from ..errors import OpenJobsError, SessionExists
from ..host.launcher import Interrupted, Launcher, Runtime
from ..session.notices import text_of
from ..tools import AgentTools

log = logging.getLogger(__name__)

INSTRUCTIONS = (
    "Background agents and commands with a trail. Start what takes long in the background and go on; "
    "what has ended is told with the answer to your next call."
)


def server_of(tools: AgentTools) -> Server:
    """A server whose tools are those of `tools`; run it on any transport of the protocol's library.

    A request that the client cancels takes its foreground agent or command with it.
    """

    async def list_tools(
        context: ServerRequestContext, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=each["name"], description=each["description"], input_schema=each["inputSchema"])
                for each in tools.definitions("mcp")
            ]
        )

    async def call_tool(context: ServerRequestContext, params: types.CallToolRequestParams) -> types.CallToolResult:
        # Request ids count from the start of each connection, so they are no key that outlives it.
        answer = await tools.acall(params.name, params.arguments)
        content: list[types.ContentBlock] = [types.TextContent(type="text", text=str(answer))]
        news = await asyncio.to_thread(_news, tools)
        if news:
            content.append(types.TextContent(type="text", text=news))
        return types.CallToolResult(content=content, is_error=answer.is_error)

    return Server(
        "openjobs",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _say(session_id: str, error: Exception) -> None:
    log.warning("not all that has ended can be told now, session %s: %s", session_id, error)


def _news(tools: AgentTools) -> str:
    """What has ended and was not told, which it is hereby."""
    notices = tools.runner.notices
    try:
        pending = notices.pending(tools.session_id, on_damage=_say)
        for notice in pending:
            notices.ack(notice.event_id)
    except (OpenJobsError, OSError) as error:
        log.warning("what has ended cannot be told now: %s", error)
        return ""
    return text_of(pending) if pending else ""


async def _serve(tools: AgentTools) -> None:
    server = server_of(tools)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def _tools(
    launcher: Launcher, runtime: Runtime, session_id: str, agents: Sequence[str], *, shell: bool, plan: bool
) -> AgentTools:
    try:
        runtime.store.create_session(session_id)
    except SessionExists:
        pass
    processes = None
    if shell:
        from ..processes import ProcessSupervisor

        processes = ProcessSupervisor(runtime.store, worker_id=runtime.runner.runner_id)
        launcher.provide("processes", processes, processes.close)
        runtime.runner.owned_tasks.use(processes.job_tasks)
        processes.recover()
    return AgentTools(
        runtime.runner, session_id, processes=processes, agents=agents or None, plan_mode=plan, cwd=Path.cwd()
    )


def serve(
    home: Path,
    session_id: str,
    *,
    agents: Sequence[str] = (),
    shell: bool = False,
    plan: bool = False,
    workers: int | None = None,
) -> int:
    """Serve the tools of one session over standard input and output, until the input ends; the exit code.

    `home` is one that `prepare_home` gave. Jobs that still run are cancelled, and written down, before this returns.
    Raises what `Launcher.open` raises.
    """
    try:
        with Launcher() as launcher:
            runtime = launcher.open(home, workers=workers)
            asyncio.run(_serve(_tools(launcher, runtime, session_id, agents, shell=shell, plan=plan)))
    except Interrupted as end:
        return 128 + end.signum
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0
