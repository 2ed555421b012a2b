"""`python -m openjobs.host --home H`: the host process of a home. People never start it by hand.

It holds the home's host lock for as long as it lives, runs one pool, answers the home's socket, and
leaves after a minute without work and without clients, or in the ordered way on SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m openjobs.host", description=__doc__)
    parser.add_argument("--home", required=True, help="the home directory")
    parser.add_argument("--idle-s", type=float, default=60.0, help="leave after so many seconds without work")
    parser.add_argument("--workers", type=int, default=None, help="size of the pool")
    parser.add_argument("--ready-fd", type=int, default=None, help="where to say that it listens, or why not")
    parser.add_argument("--detach", action="store_true", help="go on in a process of its own")
    options = parser.parse_args(argv)
    if not options.idle_s > 0:
        parser.error("--idle-s must be above 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    if options.ready_fd is not None:
        os.set_inheritable(options.ready_fd, False)  # no command of ours may hold it open
    # Forked before anything is imported: there is one thread, and no lock that the child could lack.
    if options.detach and os.fork() != 0:
        os._exit(0)
    from .process import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
