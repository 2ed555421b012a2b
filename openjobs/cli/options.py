"""Options that every command has, and what a job id or session is on a command line."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click
from click.shell_completion import CompletionItem

from . import output
from .state import State

if TYPE_CHECKING:  # generic in newer versions of click only
    Text = click.ParamType[str]
    Number = click.ParamType[float]
    Whole = click.ParamType[int]
else:
    Text = Number = Whole = click.ParamType

#: a longer time is taken as this one: 31 years
LONGEST_S = 999_999_999.0
#: more of anything than a home will ever hold
MANY = 10**9


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
            type=HOME,
            expose_value=False,
            callback=_set_home,
            # Not click's `envvar`: the variable would then win over a `--home` before the command's name.
            help="Where sessions are kept.  [env: OPENJOBS_HOME; default: your state directory]",
        ),
        click.Option(
            ["--json"], is_flag=True, is_eager=True, expose_value=False, callback=_set_json, help="Print JSON."
        ),
    ]


class NothingAsked(click.UsageError):
    """A group without a command; the message is the whole help. Versions of click differ in what they make of it."""


class Helpful(click.Command):
    """Its help is written as all other output is: click's own writing knows nothing of a reader that went away."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        found = super().get_help_option(ctx)
        if found is not None:
            found.callback = _show_help
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            raise NothingAsked(ctx.get_help(), ctx)
        return super().parse_args(ctx, args)


def _show_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        output.line(ctx.get_help())
        ctx.exit()


#: of the group and of every command
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def command(name: str, **context: Any) -> Callable[[Callable[..., int]], click.Command]:
    """A command that takes the `State` first and returns its exit code; `context` are settings of click's."""

    def decorate(function: Callable[..., int]) -> click.Command:
        made = click.command(name, cls=Helpful, context_settings={**CONTEXT, **context})(_with_state(function))
        made.params += common_options()  # last in the help: first what is this command's own
        return made

    return decorate


def limit_option(help: str) -> Callable[[Callable[..., int]], Callable[..., int]]:  # noqa: A002
    return click.option("--limit", "-n", metavar="N", type=Count(), default=50, show_default=True, help=help)


def _not_empty(kind: Text, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
    text = str(value)
    if not text.strip():
        kind.fail(f"the {kind.name} is empty", param, ctx)
    return text


class JobId(Text):
    """A job id or its beginning; completed from the index of ids."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return _not_empty(self, value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from .completion import job_ids

        return job_ids(ctx.ensure_object(State), incomplete)


class SessionId(Text):
    name = "session"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return _not_empty(self, value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from .completion import sessions

        return sessions(ctx.ensure_object(State), incomplete)


class AgentId(Text):
    name = "profile"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return _not_empty(self, value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from .completion import profiles

        return profiles(ctx.ensure_object(State), incomplete)


class Words(Text):
    """Free text, which is written down and sent as UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not is_utf8(text):
            self.fail("the text is not UTF-8", param, ctx)
        return text


def is_utf8(text: str) -> bool:
    """Python keeps bytes of a command line that are no characters as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Count(Whole):
    """At most so many; 0, like any number that no home ever reaches, means all."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not re.fullmatch(r"[0-9]+", text):
            self.fail(f"{value!r} is not a whole number from 0 on", param, ctx)
        digits = text.lstrip("0")
        return int(digits or "0") if len(digits) < len(str(MANY)) else 0


class Directory(click.Path):
    """A directory that need not be there; never the empty text, which would be the current one."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            self.fail("the name of the directory is empty", param, ctx)
        return super().convert(value, param, ctx)


class Seconds(Number):
    """A span: a number of seconds, or a number with s, m, h or d (`90`, `1.5m`, `2h`).

    What is longer than `LONGEST_S` is taken as that: nobody is there to see the difference.
    """

    name = "time"

    def __init__(self, *, zero: bool = True, most_days: int | None = None) -> None:
        self._zero = zero
        self._most_days = most_days

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
        if not seconds >= 0 or (not text[:1].isdigit() and text[:1] not in "+."):
            self.fail(f"{value!r} is not a time: a number of seconds, or a number with s, m, h or d", param, ctx)
        if seconds == 0 and not self._zero:
            self.fail("the time must be above 0", param, ctx)
        if self._most_days is not None and seconds > self._most_days * 86400:
            self.fail(f"the time must be at most {self._most_days}d; leave it out for no limit", param, ctx)
        return min(seconds, LONGEST_S)


JOB_ID = JobId()
SESSION_ID = SessionId()
AGENT_ID = AgentId()
SECONDS = Seconds()
#: of what runs: no time at all would be none to run in
POSITIVE_SECONDS = Seconds(zero=False)
#: the keeper of a background command polls, which takes no more milliseconds than fit into 31 bits
KEPT_SECONDS = Seconds(zero=False, most_days=24)
WORDS = Words()
HOME = Directory()
