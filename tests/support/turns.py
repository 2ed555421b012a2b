"""Turns that begin and end when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from openjobs import JobRunner, SpawnRequest, TurnRequest, TurnResult

PATIENCE_S = 20.0

#: the fixtures of tests/unit/runner
MakeRunner = Callable[..., JobRunner]
Ask = Callable[..., SpawnRequest]


class Turn:
    """One turn, known by its prompt."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.finish = threading.Event()
        self.saw_cancel = threading.Event()
        self.left = threading.Event()
        self.request: TurnRequest | None = None
        self.thread_name = ""
        #: whether it ends by itself when it is asked to stop
        self.obeys = True
        #: what it does at its end
        self.outcome: Callable[[TurnRequest], TurnResult] = lambda request: TurnResult(
            final_text=f"did {request.prompt}"
        )

    def until_started(self) -> TurnRequest:
        assert self.started.wait(PATIENCE_S), "the turn did not start"
        assert self.request is not None
        return self.request


class Turns:
    """A `sync_fn`. Every turn waits for its `finish`, or (unless it disobeys) for its cancel event."""

    def __init__(self, *, finish_at_once: bool = False) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, Turn] = {}
        self.finish_at_once = finish_at_once
        self.order: list[str] = []
        self.now = 0
        self.most = 0

    def __getitem__(self, prompt: str) -> Turn:
        with self._lock:
            return self._turns.setdefault(prompt, Turn())

    def finish_all(self) -> None:
        self.finish_at_once = True
        with self._lock:
            turns = list(self._turns.values())
        for turn in turns:
            turn.finish.set()

    def __call__(self, request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        turn = self[request.prompt]
        with self._lock:
            self.order.append(request.prompt)
            self.now += 1
            self.most = max(self.most, self.now)
        turn.request = request
        turn.thread_name = threading.current_thread().name
        turn.started.set()
        try:
            self._wait(turn, cancel_event)
            return turn.outcome(request)
        finally:
            with self._lock:
                self.now -= 1
            turn.left.set()

    def _wait(self, turn: Turn, cancel_event: threading.Event) -> None:
        end = time.monotonic() + PATIENCE_S
        while not (self.finish_at_once or turn.finish.wait(0.002)):
            if cancel_event.is_set():
                turn.saw_cancel.set()
                if turn.obeys:
                    return
            assert time.monotonic() < end, f"nobody ended the turn {turn.request!r}"
