"""The registry of profiles: which callable runs the jobs of an agent id.

Looked up in this order: callables that the host program registered, the built-in `shell` and
`echo`, the command templates of `<home>/config.toml`, which is read again when it changes, so
that a running host process takes a new profile without a restart, and the agent programs that need no
configuration (`builtin.AGENTS`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..durable import Disk
from ..errors import Closed, InvalidInput, UnknownAgent
from ..jobs import SyncFn
from . import builtin
from .joblog import JobLogs
from .templates import CommandTemplate, check_agent_id, read_templates

if TYPE_CHECKING:
    from ..processes.template import Template

CONFIG = "config.toml"
#: what `openjobs agent` asks for where no profile is named
_DEFAULT = "main"
#: how much two names must have in common for one to be the other, mistyped
_NEAR = 0.7


class Profiles:
    """The profiles of one home.

    Guarantees: `get` answers from what the file says now; a file that cannot be used makes `get`
    raise for its own profiles and never for registered and built-in ones.
    Assumptions: `close` is called when no command runs any more; it ends the process that keepers
    are started from, which the first command starts.
    `_lock` protects the registered callables, the templates with the signature of their file, and `_keepers`.
    """

    def __init__(
        self,
        home: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        disk: Disk | None = None,
    ) -> None:
        """`environ` is the environment of commands whose job came without one; None means this process's own.
        `disk` says how durable their records and logs are."""
        self._disk = disk or Disk(durable=home is not None)
        #: the logs of the commands that run; the runner completes each when the job's end is durable
        self.run_logs = JobLogs()
        self._home = None if home is None else Path(home)
        self._environ = environ
        self._lock = threading.Lock()
        self._registered: dict[str, SyncFn] = {}
        self._templates: dict[str, CommandTemplate] = {}
        self._signature: tuple[int, ...] | None = None
        self._keepers: Template | None = None
        self._closed = False

    def close(self) -> None:
        """Ends what commands are started from; commands that run go on. May be repeated."""
        with self._lock:
            self._closed = True
            keepers, self._keepers = self._keepers, None
        if keepers is not None:
            keepers.close()
        self.run_logs.close()

    def __enter__(self) -> Profiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def config_path(self) -> Path | None:
        return None if self._home is None else self._home / CONFIG

    def register(self, agent_id: str, sync_fn: SyncFn) -> None:
        """`sync_fn` runs the jobs of `agent_id` from now on. Raises `InvalidInput` for a name that cannot be one."""
        if not check_agent_id(agent_id):
            raise InvalidInput(
                f"{agent_id!r} cannot be the name of a profile: 1 to 64 ASCII letters, digits or one of '_.:@/-'"
            )
        if not callable(sync_fn):
            raise InvalidInput(f"the profile {agent_id!r} must be a callable, not {type(sync_fn).__name__}")
        with self._lock:
            self._registered[agent_id] = sync_fn

    def get(self, agent_id: str) -> SyncFn:
        """What runs the jobs of `agent_id`. Raises `UnknownAgent`, or `InvalidConfiguration` for a broken file."""
        with self._lock:
            found = self._registered.get(agent_id)
        if found is not None:
            return found
        if agent_id == "echo":
            return builtin.echo
        template = builtin.SHELL if agent_id == "shell" else self._configured(agent_id)
        if template is None:
            raise self._unknown(agent_id)
        from .command import CommandProfile  # late: it brings `subprocess`

        return CommandProfile(template, self._home, self._environ, self._keeper_template, self.run_logs, self._disk)

    def _configured(self, agent_id: str) -> CommandTemplate | None:
        """From the file, else one of the agent programs that need no configuration."""
        return self._current().get(agent_id) or builtin.AGENTS.get(agent_id)

    def names(self) -> list[str]:
        """Every name that `get` would find. Raises `InvalidConfiguration` for a broken file."""
        with self._lock:
            registered = set(self._registered)
        return sorted(registered | set(builtin.NAMES) | set(builtin.AGENTS) | set(self._current()))

    def set_up(self) -> list[str]:
        """The names that the host program registered or the file has: those that somebody meant to be used here.

        Raises `InvalidConfiguration` for a broken file.
        """
        with self._lock:
            registered = set(self._registered)
        return sorted(registered | set(self._current()))

    def _keeper_template(self) -> Template:
        from ..processes.template import Template

        with self._lock:
            if self._closed:
                raise Closed("the profiles are closed; no command can be started any more")
            if self._keepers is None:
                self._keepers = Template()
            return self._keepers

    def _current(self) -> Mapping[str, CommandTemplate]:
        path = self.config_path
        if path is None:
            return {}
        with self._lock:
            signature = _signature(path)
            if signature is None:
                self._templates = {}
            elif signature != self._signature:
                self._templates = read_templates(path)
            self._signature = signature
            return self._templates

    def _unknown(self, agent_id: str) -> UnknownAgent:
        from difflib import get_close_matches  # late: only who mistypes pays for it

        name = agent_id if check_agent_id(agent_id) else _DEFAULT
        works = "`--agent shell` works at once (it runs the prompt under sh)."
        candidates = self._candidates()
        if agent_id == _DEFAULT:  # which nobody has to name: nothing was mistyped
            lines = [
                f"No default agent is set up, a profile named {_DEFAULT!r}; `--agent NAME` takes another one.",
                works,
            ]
        elif near := get_close_matches(agent_id.lower(), candidates, n=1, cutoff=_NEAR):
            lines = [f"No profile is named {agent_id!r}; did you mean {near[0]!r}?", works]
        else:
            lines = [f"No profile is named {agent_id!r}. {works}"]
        if self.config_path is not None:
            wish = "set it up" if agent_id == _DEFAULT else "add one"
            lines += [
                f"To {wish}, put these three lines into {self.config_path}:",
                f"[profiles.{name}]" if name.replace("_", "").replace("-", "").isalnum() else f'[profiles."{name}"]',
                'command = ["claude", "-p", "{prompt}"]',
                "timeout_s = 3600",
            ]
        else:
            lines.append(f"To add one, call `profiles.register({name!r}, sync_fn)`.")
        return UnknownAgent("\n".join(lines), agent_id=agent_id, candidates=candidates)

    def _candidates(self) -> list[str]:
        with self._lock:
            return sorted({*self._registered, *builtin.NAMES, *builtin.AGENTS, *self._templates})


def _signature(path: Path) -> tuple[int, ...] | None:
    """What changes when the file does; None where there is none."""
    try:
        about = path.stat()
    except OSError:
        # A file that is there and cannot be reached is reported by `read_templates`.
        return None if not path.is_symlink() else (0,)
    return (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
