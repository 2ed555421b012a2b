"""What agent programs print as JSON lines, and what that means for a job: its text, its usage, how it ended.

| `output` | program | says how its turn ended by |
|---|---|---|
| `claude` | `claude -p --output-format stream-json --verbose` | `result`: `is_error` |
| `codex` | `codex exec --json` | `turn.completed`, `turn.failed` |
| `gemini` | `gemini --output-format stream-json` | `result`: `status` |
| `opencode` | `opencode run --format json` | `step_finish` with another reason than a tool call, `error` |

None is judged by its exit code alone. Events of other kinds, and lines that are no JSON, are passed over: the run's log
has every line as it came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: a longer line is passed over
LINE_LIMIT_BYTES = 32 << 20


class EventStream:
    """Takes standard output piece by piece. Subclasses know one program's events.

    `text` is the newest answer, `usage` what the program counted, `ended` whether it said how its turn ended, and
    `error` why the turn failed. Nothing that a program prints makes it raise.
    """

    def __init__(self) -> None:
        self.text = ""
        self.usage: dict[str, Any] | None = None
        self.ended = False
        self.error: str | None = None
        self._line = bytearray()
        self._too_long = False

    def take(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._add(line)
            self._end_line()
        self._add(rest)

    def finish(self) -> None:
        """There is no more; the last line may have no newline."""
        self._end_line()

    def _add(self, piece: bytes) -> None:
        if len(self._line) + len(piece) > LINE_LIMIT_BYTES:
            self._too_long = True
            self._line.clear()
        elif not self._too_long:
            self._line += piece

    def _end_line(self) -> None:
        line, self._line = bytes(self._line), bytearray()
        too_long, self._too_long = self._too_long, False
        if too_long or not line.lstrip().startswith(b"{"):
            return
        try:
            event = json.loads(line)
            self._event(str(event.get("type")), event)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass  # not what we know; it is in the log

    def _event(self, kind: str, event: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _ended(self, error: str | None = None) -> None:
        """The last word counts."""
        self.ended, self.error = True, error


class Claude(EventStream):
    def _event(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "assistant" and event.get("parent_tool_use_id") is None:
            said = "".join(
                _text(part.get("text")) for part in event["message"]["content"] if part.get("type") == "text"
            )
            self.text = said or self.text
        elif kind == "result":
            self.usage = _numbers(event.get("usage") or {}) | _numbers(
                event, "total_cost_usd", "num_turns", "duration_ms"
            )
            failed = event["is_error"] if "is_error" in event else event.get("subtype") != "success"
            if failed:
                words = [_text(one) for one in event.get("errors") or ()]
                self._ended(_text(event.get("result")) or "; ".join(words) or _text(event.get("subtype")) or "failed")
            else:
                self.text = _text(event.get("result")) or self.text
                self._ended()


class Codex(EventStream):
    def __init__(self) -> None:
        super().__init__()
        self._said = ""

    def _event(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "item.completed":
            item = event["item"]
            if (item.get("type") or item.get("item_type")) in ("agent_message", "assistant_message"):
                self.text = _text(item.get("text"))
        elif kind == "turn.started":
            self.ended, self.error = False, None
        elif kind == "turn.completed":
            self.usage = _added(self.usage, _numbers(event.get("usage") or {}))
            self._ended()
        elif kind == "turn.failed":
            self._ended(_message(event.get("error")) or self._said or "the turn failed")
        elif kind == "error":
            # Also said of what it then got over, such as a connection that it made anew.
            self._said = _message(event)
            if not self.ended:
                self.error = self._said


class Gemini(EventStream):
    def __init__(self) -> None:
        super().__init__()
        self._anew = True

    def _event(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "message" and event.get("role") == "assistant":
            said = _text(event.get("content"))
            self.text = said if self._anew or not event.get("delta") else self.text + said
            self._anew = False
        elif kind == "tool_use":
            self._anew = True
        elif kind == "error" and event.get("severity") != "warning" and not self.ended:
            self.error = _message(event)
        elif kind == "result":
            self.usage = _numbers(event.get("stats") or {})
            if event["status"] == "success":
                self._ended()
            else:
                self._ended(_message(event.get("error")) or self.error or _text(event["status"]))


class OpenCode(EventStream):
    def __init__(self) -> None:
        super().__init__()
        self._anew = True

    def _event(self, kind: str, event: Mapping[str, Any]) -> None:
        part = event.get("part") or {}
        if kind == "step_start":
            self._anew = True
        elif kind == "text":
            said = _text(part["text"])
            self.text = said if self._anew else f"{self.text}\n{said}"
            self._anew = False
        elif kind == "step_finish":
            tokens = part.get("tokens") or {}
            counted = _numbers(tokens, "input", "output", "reasoning")
            cache = {f"cache_{name}": n for name, n in _numbers(tokens.get("cache") or {}, "read", "write").items()}
            self.usage = _added(self.usage, counted | cache | _numbers(part, "cost"))
            if part.get("reason") not in ("tool-calls", "unknown") and self.error is None:
                self._ended(None if part.get("reason") != "error" else "the step failed")
        elif kind == "error":
            error = event.get("error") or event
            self._ended(_message(error.get("data")) or _message(error) or _text(error.get("name")) or "failed")


STREAMS: Mapping[str, type[EventStream]] = {"claude": Claude, "codex": Codex, "gemini": Gemini, "opencode": OpenCode}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _message(value: Any) -> str:
    if isinstance(value, Mapping):
        return _text(value.get("message"))
    return _text(value)


def _numbers(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The numbers in it, all or those by these names."""
    return {name: number for name, number in value.items() if (not names or name in names) and _is_count(number)}


def _is_count(value: Any) -> bool:
    """What can be stored: finite, and no longer than a database's integer."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -(2**53) <= value <= 2**53


def _added(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> dict[str, Any]:
    """The sums, of several turns or steps."""
    before = one or {}
    return {
        name: before.get(name, 0) + other.get(name, 0) for name in (*before, *(n for n in other if n not in before))
    }
