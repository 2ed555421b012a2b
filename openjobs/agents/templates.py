"""Command templates: what `<home>/config.toml` may say about a profile, and the argv that comes of it.

    [profiles.claude]
    command = ["claude", "-p", "{prompt}"]
    timeout_s = 3600

A template is a list of arguments, never a line for a shell, and a placeholder fills exactly one
argument, so no text of a job can become a second argument or a command (R10). Placeholders are
`{prompt}`, `{job_id}`, `{session_id}` and `{home}`; any other brace stays as it is.

A prompt that starts with `-` must not become an option either. Where the template puts it at the
beginning of an argument and no `--` stands before it, it gets one leading space; after `--`,
after `=` as in `--text={prompt}`, and on standard input it is passed exactly.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..errors import InvalidConfiguration

#: names that are always there and cannot be given to a template
BUILT_IN = ("shell", "echo")
#: a configuration file is small; a larger one is a mistake
CONFIG_LIMIT_BYTES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@/-]{0,63}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PLACEHOLDER = re.compile(r"\{(prompt|job_id|session_id|home)\}")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "csh", "tcsh", "busybox"})
_KEYS = ("command", "cwd", "env", "output", "stdin", "timeout_s")
_STDIN = ("none", "prompt")
#: how standard output is understood: as the job's text, or as the events of an agent program (streams.py)
OUTPUTS = ("text", "claude", "codex", "gemini", "opencode")


@attrs.frozen(kw_only=True, slots=True)
class CommandTemplate:
    """One profile that is a command."""

    name: str
    #: the arguments, with placeholders
    command: tuple[str, ...]
    #: working directory, absolute; None: the job's own, else the session's
    cwd: Path | None = None
    #: added to the job's environment
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    #: "prompt": the prompt is what the command reads from its standard input
    stdin: str = "none"
    #: one of `OUTPUTS`
    output: str = "text"
    #: seconds after which the command is ended and the job errs
    timeout_s: float | None = None

    def arguments(self, *, prompt: str, job_id: str, session_id: str, home: str) -> list[str]:
        """The argv for one job. Pure; each element of the template gives exactly one argument."""
        values = {"prompt": prompt, "job_id": job_id, "session_id": session_id, "home": home}
        made: list[str] = []
        for element in self.command:
            argument = _PLACEHOLDER.sub(lambda found: values[found[1]], element)
            option = element.startswith("{prompt}") and argument.startswith("-") and "--" not in made
            made.append(f" {argument}" if option else argument)
        return made


def read_templates(path: Path) -> dict[str, CommandTemplate]:
    """The profiles of a configuration file; none where there is no file. Raises `InvalidConfiguration`."""
    import tomllib  # late: most commands never read the file

    try:
        # A pipe is not waited for.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidConfiguration(f"{path}: not a regular file", path=str(path))
            raw = file.read(CONFIG_LIMIT_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidConfiguration(f"{path}: cannot be read: {error.strerror or error}", path=str(path)) from error
    if len(raw) > CONFIG_LIMIT_BYTES:
        raise InvalidConfiguration(f"{path}: larger than {CONFIG_LIMIT_BYTES:,} bytes", path=str(path))
    try:
        document = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # of the text, of TOML, or of a number with thousands of digits
        raise InvalidConfiguration(f"{path}: not TOML: {error}", path=str(path)) from error
    return parse_templates(document, path)


def parse_templates(document: Mapping[str, Any], path: Path) -> dict[str, CommandTemplate]:
    """As `read_templates`, from the parsed document; `path` is only named in errors."""
    check = _Check(path)
    check.keys(document, "", ("profiles",))
    profiles = check.table(document.get("profiles", {}), "profiles")
    return {name: _template(name, entry, check) for name, entry in profiles.items()}


def check_agent_id(text: str) -> bool:
    """Whether `text` has the form of a profile's name."""
    return isinstance(text, str) and _NAME.match(text) is not None


def _template(name: str, entry: Any, check: _Check) -> CommandTemplate:
    where = f"profiles.{name}"
    if not check_agent_id(name):
        check.fail(
            f"profiles.{name!r}", "is not a name", "1 to 64 ASCII letters, digits or one of '_.:@/-', no '-' first"
        )
    if name in BUILT_IN:
        check.fail(where, "is built in and cannot be replaced", "any other name")
    table = check.table(entry, where)
    check.keys(table, where, _KEYS)
    stdin = table.get("stdin", "none")
    if stdin not in _STDIN:
        check.fail(f"{where}.stdin", f"is {stdin!r}", " or ".join(map(repr, _STDIN)))
    output = table.get("output", "text")
    if output not in OUTPUTS:
        check.fail(f"{where}.output", f"is {output!r}", " or ".join(map(repr, OUTPUTS)))
    command = _command(table.get("command"), f"{where}.command", check)
    if stdin != "prompt" and not any("{prompt}" in element for element in command):
        check.fail(
            f"{where}.command", "gives the prompt to nobody", 'an argument with {prompt}, or stdin = "prompt" beside it'
        )
    return CommandTemplate(
        name=name,
        command=command,
        cwd=_directory(table.get("cwd"), f"{where}.cwd", check),
        env=_variables(table.get("env", {}), f"{where}.env", check),
        stdin=stdin,
        output=output,
        timeout_s=_seconds(table.get("timeout_s"), f"{where}.timeout_s", check),
    )


def _command(value: Any, where: str, check: _Check) -> tuple[str, ...]:
    allowed = 'a list of arguments, e.g. ["claude", "-p", "{prompt}"]'
    if value is None:
        check.fail(where, "is missing", allowed)
    if not isinstance(value, list) or not value or not all(isinstance(element, str) for element in value):
        check.fail(where, f"is {value!r}", allowed)
    command = tuple(value)
    if any("\0" in element for element in command):
        check.fail(where, "has a NUL character", allowed)
    if not command[0] or _PLACEHOLDER.search(command[0]):
        check.fail(where, f"starts with {command[0]!r}", "the name or path of a program first, without placeholders")
    for index, element in enumerate(command):
        if "{prompt}" in element and element != "{prompt}" and _is_script(command, index):
            check.fail(
                where,
                f"puts the prompt into the shell script {element!r}, where it would be run as code",
                '["sh", "-c", "my-tool \\"$1\\"", "sh", "{prompt}"], or the profile \'shell\' where that is meant',
            )
    return command


def _is_script(command: Sequence[str], index: int) -> bool:
    """Whether the argument is what a shell takes for its script: the one after its `-c`."""
    for place in range(index - 1, 0, -1):
        option = command[place]
        if option == "--":
            continue
        if not re.fullmatch(r"-[A-Za-z]*c", option):
            return False
        return any(os.path.basename(word) in _SHELLS for word in command[:place])
    return False


def _directory(value: Any, where: str, check: _Check) -> Path | None:
    if value is None:
        return None
    path = Path(value).expanduser() if isinstance(value, str) and value and "\0" not in value else None
    if path is None or not path.is_absolute():
        check.fail(where, f"is {value!r}", "an absolute path, or one that starts with '~/'")
    return path


def _variables(value: Any, where: str, check: _Check) -> dict[str, str]:
    table = check.table(value, where)
    for name, text in table.items():
        if not _VARIABLE.match(name) or name.startswith("OPENJOBS_"):
            check.fail(
                f"{where}.{name}", "cannot be set", "letters, digits and '_', no digit first, no OPENJOBS_ in front"
            )
        if not isinstance(text, str) or "\0" in text:
            check.fail(f"{where}.{name}", f"is {text!r}", "a string")
    return dict(table)


#: more is a mistake, and may be more than a float holds
_LONGEST_S = 1e12


def _seconds(value: Any, where: str, check: _Check) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LONGEST_S:
        check.fail(where, f"is {value!r}", "a number of seconds above 0")
    return float(value)


@attrs.frozen
class _Check:
    """Says what is wrong in which file, at which key, and what would be right."""

    path: Path

    def fail(self, where: str, wrong: str, allowed: str) -> Any:
        raise InvalidConfiguration(f"{self.path}: {where} {wrong}; allowed: {allowed}", path=str(self.path), key=where)

    def table(self, value: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(where, f"is {value!r}", f"a table, [{where}]")
        return dict(value)

    def keys(self, table: Mapping[str, Any], where: str, allowed: Sequence[str]) -> None:
        for key in table:
            if key not in allowed:
                full = f"{where}.{key}" if where else key
                self.fail(full, "is not a known key", ", ".join(allowed))
