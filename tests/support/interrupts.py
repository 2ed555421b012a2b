"""A Ctrl-C at every place of a call where one can arrive.

CPython looks for signals at the beginning of a function, after a call and at a jump backwards, and nowhere else: so
between two of those places nothing interrupts, and at each of them everything may.
"""

from __future__ import annotations

import dis
import gc
import opcode
import sys
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

_LOOKS = {
    number
    for name, number in opcode.opmap.items()
    if name.startswith("CALL") or name == "RESUME" or "BACKWARD" in name.replace("NO_INTERRUPT", "")
}

#: what an exception comes out of inside the collector, and is only printed
_NEVER = ("/_weakrefset.py", "/weakref.py", "/support/interrupts.py")


class Interrupts:
    """Each `with` block on the main thread is interrupted once, at the first place where none was before.

    `place` is None once a block got to its end: then there is no further place in it.
    """

    def __init__(self, *, but: tuple[str, ...] = ()) -> None:
        """`but`: ends of the paths of files that are passed over, since they share nothing."""
        self._but = (*but, *_NEVER)
        self._met: set[tuple[CodeType, int]] = set()
        self._before: dict[FrameType, int] = {}
        self._handlers: dict[CodeType, list[tuple[int, int, int]]] = {}
        self.place: str | None = None

    def __len__(self) -> int:
        return len(self._met)

    def __enter__(self) -> Self:
        self.place = None
        gc.disable()  # what the collector calls belongs to others, and an exception there is only printed
        sys.settrace(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        sys.settrace(None)
        gc.enable()
        self._before.clear()
        return isinstance(error, KeyboardInterrupt)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        path = frame.f_code.co_filename
        if path.endswith(self._but):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            code, at = frame.f_code, frame.f_lasti
            before = self._before.get(frame)
            self._before[frame] = at
            if (
                before is not None
                and (at < before or "BACKWARD" not in opcode.opname[code.co_code[before]])
                and code.co_code[before] in _LOOKS
                and (code, at) not in self._met
                and self._handler(code, before) == self._handler(code, at)
            ):
                self._met.add((code, at))
                self.place = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}, after {at}"
                raise KeyboardInterrupt
        return self._stepped

    def _handler(self, code: CodeType, at: int) -> int | None:
        """Where an exception at that instruction goes. A signal's is raised at the call, ours at what comes after it:
        where the two differ, ours would be one that cannot happen."""
        if code not in self._handlers:
            table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
            self._handlers[code] = [(each.start, each.end, each.target) for each in table]
        return next((target for start, end, target in self._handlers[code] if start <= at < end), None)
