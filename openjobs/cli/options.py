"""Options that every command has, and what a job id or session is on a command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click
from click.shell_completion import CompletionItem

from .state import State

if TYPE_CHECKING:  # generic in newer versions of click only
    Text = click.ParamType[str]
    Number = click.ParamType[float]
else:
    Text = Number = click.ParamType


def _with_state(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> int:
        return function(click.get_current_context().ensure_object(State), *args, **options)

    return call


def _set_home(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    if value is not None:
        ctx.ensure_object(State).home_option = value


def _set_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(State).json = True


def common_options() -> list[click.Parameter]:
    """Valid before and after the command's name."""
    return [
        click.Option(
            ["--home"],
            metavar="DIR",
            type=click.Path(file_okay=False, path_type=Path),
            expose_value=False,
            callback=_set_home,
            # Not click's `envvar`: the variable would then win over a `--home` before the command's name.
            help="Where sessions are kept.  [env: OPENJOBS_HOME; default: your state directory]",
        ),
        click.Option(
            ["--json"], is_flag=True, is_eager=True, expose_value=False, callback=_set_json, help="Print JSON."
        ),
    ]


#: of the group and of every command
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def command(name: str, **context: Any) -> Callable[[Callable[..., int]], click.Command]:
    """A command that takes the `State` first and returns its exit code; `context` are settings of click's."""

    def decorate(function: Callable[..., int]) -> click.Command:
        made = click.command(name, cls=click.Command, context_settings={**CONTEXT, **context})(_with_state(function))
        made.params += common_options()  # last in the help: first what is this command's own
        return made

    return decorate


def limit_option(help: str) -> Callable[[Callable[..., int]], Callable[..., int]]:  # noqa: A002
    return click.option(
        "--limit", "-n", metavar="N", type=click.IntRange(min=0), default=50, show_default=True, help=help
    )


class JobId(Text):
    """A job id or its beginning; completed from the index of ids."""

    name = "id"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from .completion import job_ids

        return job_ids(ctx.ensure_object(State), incomplete)


class SessionId(Text):
    name = "session"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from .completion import sessions

        return sessions(ctx.ensure_object(State), incomplete)


class AgentId(Text):
    name = "profile"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from .completion import profiles

        return profiles(ctx.ensure_object(State), incomplete)


class Seconds(Number):
    """A span: a number of seconds, or a number with s, m, h or d (`90`, `1.5m`, `2h`)."""

    name = "time"
    _UNITS: ClassVar = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip()
        unit = self._UNITS.get(text[-1:].lower())
        try:
            seconds = float(text[:-1]) * unit if unit else float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            self.fail(f"{value!r} is not a time: a number of seconds, or a number with s, m, h or d", param, ctx)
        return seconds


JOB_ID = JobId()
SESSION_ID = SessionId()
AGENT_ID = AgentId()
SECONDS = Seconds()
