"""What a person types into a chat: `/task` and `/spawn` (spec 003, D7 and D15). Pure."""

from __future__ import annotations

import attrs

from ..errors import InvalidInput

USAGE = "/task [--sync] PROMPT, or /spawn LABEL: PROMPT"


@attrs.frozen(kw_only=True)
class Typed:
    prompt: str
    label: str = ""
    sync: bool = False


def parse(line: str) -> Typed:
    """Raises `InvalidInput`, with the usage, for what is neither."""
    command, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if command == "/task":
        sync = rest == "--sync" or rest.startswith("--sync ")
        prompt = rest.removeprefix("--sync").strip() if sync else rest
        if not sync and rest.startswith("--"):
            raise InvalidInput(f"{rest.split()[0]} is no option of /task; type {USAGE}")
        return Typed(prompt=_some(prompt, "/task needs a prompt"), sync=sync)
    if command == "/spawn":
        label, colon, prompt = rest.partition(":")
        if not colon or not label.strip():
            raise InvalidInput(f"/spawn needs a label and a colon before the prompt; type {USAGE}")
        return Typed(prompt=_some(prompt.strip(), "/spawn needs a prompt after the label"), label=label.strip())
    raise InvalidInput(f"{command or 'nothing'} is no command here; type {USAGE}")


def _some(prompt: str, complaint: str) -> str:
    if not prompt:
        raise InvalidInput(f"{complaint}; type {USAGE}")
    return prompt
