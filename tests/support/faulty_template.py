"""A template whose keepers fail at a chosen moment; run like openjobs/processes/template_main.py.

The command's environment says how: FAULT_LINE=n kills the keeper before the n-th line that it runs in keeper.py or
disk.py after it has read its request; FAULT_EFFECT=n, FAULT_TIMES=m make effects n to n+m-1 on its disk fail.
With a second argument, the directory of psutil, keepers are as on systems without /proc, pidfd and subreaper.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

TRACED = ("keeper.py", "disk.py")
EFFECTS = ("create", "open_update", "write", "truncate", "sync", "sync_data", "sync_dir", "rename")


def main() -> None:
    root = sys.argv[1]
    sys.path.insert(0, os.path.join(root, "processes"))
    import template_main

    template_main._bare_package("openjobs", root)
    for name in ("durable", "processes"):
        template_main._bare_package(f"openjobs.{name}", os.path.join(root, name))
    import socket

    from openjobs.processes import identity, keeper

    if sys.argv[2]:
        sys.path.append(sys.argv[2])
        identity.this_system = identity.PortableSystem  # type: ignore[assignment]
        keeper._become_subreaper = lambda: False

    read = keeper.Keeper._read_request

    def read_and_prepare(self: keeper.Keeper) -> None:
        read(self)
        env = self._request["env"]
        if "FAULT_EFFECT" in env:
            fail(self._disk, int(env["FAULT_EFFECT"]), int(env["FAULT_TIMES"]))
        if "FAULT_LINE" in env:
            die_before(int(env["FAULT_LINE"]))

    keeper.Keeper._read_request = read_and_prepare  # type: ignore[method-assign]
    keeper.RECORD_TIMEOUT_S = 0.2
    template_main.serve(socket.socket(fileno=os.dup(0)))


def fail(disk: object, first: int, times: int) -> None:
    count = 0

    def failing(name: str) -> object:
        real = getattr(disk, name)

        def effect(*args: object, **more: object) -> object:
            nonlocal count
            count += 1
            if first <= count < first + times:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **more)

        return effect

    for name in EFFECTS:
        setattr(disk, name, failing(name))


def die_before(line: int) -> None:
    left = line

    def tracer(frame: object, event: str, _argument: object) -> object:
        nonlocal left
        if os.path.basename(frame.f_code.co_filename) not in TRACED:  # type: ignore[attr-defined]
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return tracer

    sys.settrace(tracer)  # type: ignore[arg-type]
    # Tracing begins with the next call; the keeper's own `run` is being run already.
    frame = sys._getframe(1)
    while frame is not None and os.path.basename(frame.f_code.co_filename) != "template_main.py":
        frame.f_trace = tracer  # type: ignore[assignment]
        frame = frame.f_back  # type: ignore[assignment]


if __name__ == "__main__":
    main()
