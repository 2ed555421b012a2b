"""The command group: which commands there are, where each is loaded from, and how a command line ends.

A command's module is imported when that command is named, and nothing heavier than click before
that: `openjobs --help` and shell completion are typed by people who wait.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from ..errors import UnknownAgent
from . import exits, output
from .options import CONTEXT, Helpful, NothingAsked, common_options
from .state import State

#: heading -> command -> (module of this package, one line of help)
COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Run": {
        "agent": ("agent", "Run PROMPT as a job and print its result."),
        "run": ("tasks", "Run CMD as a background command with a durable trail, and wait for it."),
        "stop": ("control", "Ask jobs, and the jobs they started, to stop."),
        "serve": ("serve", "Serve the jobs to a browser and to programs, until Ctrl-C."),
        "mcp": ("mcp", "Offer a session's tools to another program, over standard input and output."),
        "demo": ("demo", "See it work: run a few commands as jobs and show the commits they left."),
    },
    "Look": {
        "list": ("listing", "List jobs, newest first."),
        "ps": ("tasks", "List background commands that run, newest first."),
        "show": ("reading", "Show everything about one job."),
        "output": ("reading", "Print the result of one job."),
        "logs": ("logs", "Print what a command wrote: of a job, a background command, or a run."),
        "wait": ("control", "Wait until jobs have ended."),
        "history": ("reading", "Show the commits of one job or session."),
        "events": ("events", "Show when jobs and background commands were registered and settled, oldest first."),
        "sessions": ("reading", "List sessions, the one used last first."),
    },
    "Look after": {
        "recover": ("upkeep", "End the jobs whose process died."),
        "fsck": ("upkeep", "Check that sessions are whole."),
        "gc": ("upkeep", "Pack sessions into less space."),
        "export": ("archive", "Write one session to a new FILE: to back it up, or to move it."),
        "import": ("archive", "Make a session of a FILE that `openjobs export` wrote."),
        "completion": ("completion", "Print the script that completes commands and job ids."),
    },
}
#: what other programs call it
MEANT = {
    "help": "'--help'",
    "version": "'--version'",
    **dict.fromkeys(("kill", "cancel", "abort", "terminate", "rm", "delete"), "'stop'"),
    **dict.fromkeys(("status", "info", "inspect"), "'list' or 'show'"),
    **dict.fromkeys(("ls", "jobs", "queue"), "'list'"),
    **dict.fromkeys(("exec", "start", "submit", "spawn", "new"), "'agent' or 'run'"),
    **dict.fromkeys(("result", "results", "cat"), "'output'"),
    **dict.fromkeys(("tail", "follow"), "'logs --follow'"),
    **dict.fromkeys(("watch", "top"), "'list --watch'"),
    **dict.fromkeys(("describe", "get", "view"), "'show'"),
    "session": "'sessions'",
    **dict.fromkeys(("check", "verify", "doctor"), "'fsck'"),
    **dict.fromkeys(("clean", "prune", "pack"), "'gc'"),
    **dict.fromkeys(("join", "await"), "'wait'"),
    **dict.fromkeys(("backup", "save", "dump"), "'export'"),
    **dict.fromkeys(("restore", "load"), "'import'"),
}
_WHERE = {name: where for group in COMMANDS.values() for name, where in group.items()}


class LazyGroup(Helpful, click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_WHERE)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _WHERE:
            return None
        module = import_module(f"{__package__}.{_WHERE[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from difflib import get_close_matches

            typed = args[0].lower()
            meant = MEANT.get(typed) or " or ".join(map(repr, get_close_matches(typed, _WHERE, n=1)))
            if not meant and len(longer := [name for name in _WHERE if name.startswith(typed)]) == 1:
                meant = repr(longer[0])
            asked = f" Did you mean {meant}?" if meant else ""
            raise click.UsageError(f"No such command {args[0]!r}.{asked}", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()], col_spacing=3)


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .._version import __version__

        output.line(f"openjobs {__version__}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings=CONTEXT,
    epilog="A job id may be shortened to any beginning that fits one job. "
    "Exit codes: 0 completed, 1 errored, 2 usage, 3 not found or ambiguous, 4 wait timed out, 5 cancelled, "
    "6 store damaged or refused, 74 output not written, 130 interrupted.",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def app() -> None:
    """Background jobs whose every state change is one git commit."""


app.params = [*common_options(), *app.params]


def run(args: Sequence[str]) -> int:
    """One command line, as the number it exits with. Never raises for what a command may run into."""
    state = State()
    debug = os.environ.get("OPENJOBS_DEBUG") == "1"
    try:
        code = _run(list(args), state)
        if code == exits.COMPLETED and not state.json and (said := state.nothing_yet()):
            output.note(f"openjobs: {said}")
        return code
    except output.Unwritten as error:
        output.abandon_stdout()
        return _unwritten(error, state)
    except click.UsageError as error:
        return _usage(error, state)
    except (KeyboardInterrupt, click.Abort):
        output.note("interrupted")
        return exits.INTERRUPTED
    except Exception as error:
        if debug:
            raise
        return _failed(error, state)
    finally:
        state.close()


def _run(args: list[str], state: State) -> int:
    if "_OPENJOBS_COMPLETE" in os.environ:
        app.main(args, prog_name="openjobs", complete_var="_OPENJOBS_COMPLETE", obj=state)
    try:
        with app.make_context("openjobs", args, obj=state) as context:
            code = app.invoke(context)
            return code if isinstance(code, int) else exits.COMPLETED
    except click.exceptions.Exit as ended:
        return ended.exit_code


def _unwritten(error: output.Unwritten, state: State) -> int:
    gone = isinstance(error, output.ReaderGone)
    code = exits.BROKEN_PIPE if gone else exits.UNWRITTEN
    if gone and not error.done:
        return code  # the usual end of `| head`
    if state.json:
        _tell_json(error, str(error), code)
    else:
        output.note(f"openjobs: {error}")
    return code


def _usage(error: click.UsageError, state: State) -> int:
    from .text import one_line

    path = error.ctx.command_path if error.ctx else "openjobs"
    said = one_line(error.format_message())
    if state.json:
        _tell_json(error, said, exits.USAGE)
    elif isinstance(error, NothingAsked):
        output.note(error.format_message())
    else:
        output.note(f"{path}: {said} (`{path} --help` shows how)")
    return exits.USAGE


def _failed(error: Exception, state: State) -> int:
    code = exits.of_error(error)
    said = exits.explain(error)
    if code == exits.NOT_FOUND and not isinstance(error, UnknownAgent) and (nothing := state.nothing_yet()):
        first, *rest = said.splitlines()
        said = "\n".join([f"{first.partition('; `')[0]}; {nothing}", *rest])  # instead of where to look
    if state.json:
        _tell_json(error, said.splitlines()[0], code)
    else:
        output.note(f"openjobs: {said}")
    return code


def _tell_json(error: Exception, said: str, code: int) -> None:
    from . import shapes
    from .text import to_json

    output.note(to_json(shapes.failed(error, said, code)))


def main(args: Sequence[str] | None = None) -> Any:
    """The console script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
        stream = getattr(sys, name)
        # A terminal or locale that lacks a character gets its number instead of a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:] if args is None else args))
