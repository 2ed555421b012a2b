"""The template: an exec'd process with one thread, from which keepers are forked.

Run by its path, as `python -I -S template_main.py <directory of the package> <directory of psutil, or "">`,
with a socket as its standard input. Each message on it is one byte and one descriptor, the socket on which
the worker speaks with the keeper that is forked for it. End of file: the worker is gone, and so are we;
keepers have sessions of their own and go on.

The package is not imported, only the few modules that a keeper needs: its `__init__` would bring in all that
the public names stand on.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys


def main() -> None:
    root, psutil_home = sys.argv[1:3]
    _bare_package("openjobs", root)
    for name in ("durable", "processes"):
        _bare_package(f"openjobs.{name}", os.path.join(root, name))
    if psutil_home:
        sys.path.append(psutil_home)
    serve(socket.socket(fileno=os.dup(0)))


def serve(workers: socket.socket) -> None:
    from openjobs.durable.disk import Disk
    from openjobs.processes import keeper
    from openjobs.processes.identity import this_system

    disk, system = Disk(), this_system()
    keeper.prepare(system)
    _free_standard_streams()
    # Nobody waits for keepers: the system takes them away when they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while True:
        try:
            said, descriptors, _, _ = socket.recv_fds(workers, 1, 1)
        except OSError:
            return
        if not said:
            return
        for fd in descriptors:
            os.set_inheritable(fd, False)
            try:
                pid = os.fork()
            except OSError:
                pid = -1  # the worker sees the end of its socket
            if pid == 0:
                workers.close()
                try:
                    keeper.run(socket.socket(fileno=fd), disk, system)
                finally:
                    os._exit(0)
            os.close(fd)


def _free_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _bare_package(name: str, path: str) -> None:
    package = type(sys)(name)
    package.__path__ = [path]
    sys.modules[name] = package


if __name__ == "__main__":
    main()
