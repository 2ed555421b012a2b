"""Recording facts where work is committed: at once, in order, and without ever being in the way."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from .fact import Fact
from .log import FactLog

log = logging.getLogger(__name__)


class Recorder:
    """Guarantees: when `record` returns, the facts are durable in the ledgers of their sessions, or a warning says
    which are missing; it never raises for a ledger that cannot be written (spec 001: recording must neither hide
    a job that has started nor keep who waits for one that has ended). A fact that could not be recorded is not
    tried again: it would come after what it caused.

    It has no state but what a thread gathers in its own `together`, and is used by any number of threads.
    """

    def __init__(self, log_of: Callable[[str], FactLog]) -> None:
        """`log_of` gives the log of a session by its id; see `JobStore.facts`."""
        self._log_of = log_of
        self._gathered = threading.local()

    def record(self, *facts: Fact) -> None:
        gathered: list[Fact] | None = getattr(self._gathered, "facts", None)
        if gathered is not None:
            gathered.extend(facts)
        else:
            self._write(facts)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What this thread records inside the block is written at its end, with one sync for each session.

        For who has many commits in hand and lets nobody know of any of them before the end of the block. A block
        within a block is part of it.
        """
        if getattr(self._gathered, "facts", None) is not None:
            yield
            return
        self._gathered.facts = []
        try:
            yield
        finally:
            facts: list[Fact] = self._gathered.facts
            self._gathered.facts = None
            self._write(facts)

    def _write(self, facts: list[Fact] | tuple[Fact, ...]) -> None:
        by_session: dict[str, list[Fact]] = {}
        for fact in facts:
            by_session.setdefault(fact.session_id, []).append(fact)
        for session_id, those in by_session.items():
            try:
                self._log_of(session_id).append(those)
            except Exception as error:
                missing = ", ".join(f"{fact.type.value} of {fact.job_id}" for fact in those)
                log.warning("session %s: not recorded, or not known to be: %s: %s", session_id, missing, error)
