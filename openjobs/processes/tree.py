"""A command and everything that came out of it: finding it, and ending it.

Who belongs to a tree is told by three signs, since each alone can be shed: being a descendant (lost
when a parent dies, unless a living keeper is the subreaper), being in the command's session (lost by
`setsid`), and the run's own variable in the environment (lost by `env -i`).

Only the standard library at import: the keeper runs this.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

from .identity import Identity, Member, System

#: in the environment of every command; its value is the run's own
TASK_VARIABLE = "OPENJOBS_TASK_ID"

#: how long after KILL a process may still be seen (it may hang in the kernel) before it is named as left over
AFTER_KILL_S = 5.0
#: how many looks in a row must find nobody, where the system cannot say for sure that nobody is left. One look
#: is no snapshot: a member may appear behind it while its parent ends before it, and in the middle of an exec
#: a process has no environment to know it by.
CONFIRMATIONS = 3
_CONFIRM_S = 0.01
_LOOK_FIRST_S = 0.005
_LOOK_LAST_S = 0.05


def find(
    system: System, *, root: int | None = None, leader: Identity | None = None, task_id: str | None = None
) -> list[Member]:
    """The living members of a tree: descendants of pid `root` (not itself), the process `leader`, its session
    and descendants, and, for a `task_id`, who carries it and their descendants. Never this process, nor, unless
    it is the `root`, what it started: it may be part of the very tree that it ends.

    The session counts only while its leader is proven to be there: later its number may be another's.
    """
    table = list(system.table())
    inside = {m.identity.pid for m in table if m.identity == leader}
    if leader is not None and inside:
        inside |= {m.identity.pid for m in table if m.session == leader.pid}
    if task_id is not None:
        variable = os.fsencode(f"{TASK_VARIABLE}={task_id}")
        inside |= {m.identity.pid for m in table if m.living and system.has_variable(m.identity.pid, variable)}
    inside.discard(os.getpid())
    found = inside | _descendants(inside if root is None else inside | {root}, table)
    found -= {os.getpid(), root}
    return [m for m in table if m.identity.pid in found and m.living]


def _descendants(roots: Iterable[int], table: Iterable[Member]) -> set[int]:
    children: dict[int, list[int]] = {}
    for member in table:
        children.setdefault(member.ppid, []).append(member.identity.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


class Ending:
    """TERM to every member once, the grace, then KILL until nobody is left; one `step` at a time.

    Members that appear meanwhile get the same. A stopped process gets CONT after its TERM, or it would
    never see it. `leftovers` is who was still there `AFTER_KILL_S` after the grace. `nobody`, where there is such
    a function, knows for certain that the tree is empty, or not; else several looks must find nobody.
    """

    def __init__(
        self,
        system: System,
        members: Callable[[], list[Member]],
        *,
        grace_s: float,
        nobody: Callable[[], bool] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._members = members
        self._monotonic = monotonic
        self._kill_at = monotonic() + grace_s
        self._pause_s = _LOOK_FIRST_S
        self._nobody = nobody
        self._absent = 0
        self.termed: set[Identity] = set()
        self.killed: set[Identity] = set()
        self.leftovers: list[Member] = []

    def hasten(self, grace_s: float) -> None:
        """Somebody asked again, and is less patient."""
        self._kill_at = min(self._kill_at, self._monotonic() + grace_s)

    def step(self) -> float | None:
        """Do what is due. Seconds until it is worth looking again, None when it is over."""
        began = self._monotonic()
        members = self._members()
        now = self._monotonic()
        if self._is_over(members):
            return None
        # On a machine with many processes a look is dear; it never takes more than a quarter of our time.
        dear_s = 3 * (now - began)
        if now >= self._kill_at + AFTER_KILL_S:
            self.leftovers = members
            return None
        if not members:
            return _CONFIRM_S
        if now >= self._kill_at:
            self._kill(members)
            return max(_LOOK_FIRST_S, dear_s)
        self._terminate(members)
        self._pause_s = min(self._pause_s * 2, _LOOK_LAST_S)
        return min(max(self._pause_s, dear_s), self._kill_at - now)

    def _is_over(self, members: list[Member]) -> bool:
        self._absent = 0 if members else self._absent + 1
        if self._nobody is not None:
            return self._nobody()
        return self._absent >= CONFIRMATIONS

    def _terminate(self, members: list[Member]) -> None:
        for identity in (m.identity for m in members if m.identity not in self.termed):
            self.termed.add(identity)
            self._system.send(identity, signal.SIGTERM)
            self._system.send(identity, signal.SIGCONT)

    def _kill(self, members: list[Member]) -> None:
        for identity in (m.identity for m in members):
            self.killed.add(identity)
            self._system.send(identity, signal.SIGKILL)


def end(
    system: System, members: Callable[[], list[Member]], *, grace_s: float, pause: Callable[[float], None] = time.sleep
) -> Ending:
    """End a tree and wait for it; at most `grace_s` and `AFTER_KILL_S`. See `leftovers` of what it returns."""
    ending = Ending(system, members, grace_s=grace_s)
    while (pause_s := ending.step()) is not None:
        pause(pause_s)
    return ending
