"""The files that a keeper and everybody else meet at in one run's directory.

| file | written by | what it means |
|---|---|---|
| `keeper` | keeper | locked as long as the keeper lives; lines of JSON, see below |
| `stdout`, `stderr`, `order` | keeper | the native streams and the order they came in (order.py) |
| `stop` | anybody | a request: reason and grace; the keeper looks at it when it is signalled |
| `exit.json` | keeper | how it ended; written once, durable before anybody hears of it |
| `swept.json` | keeper | what became of the rest of the tree, where there was one |
| `exit.json.unreadable` | who buries it | an exit record that nobody can read, as it was found |
| `keeper.fault` | keeper | a traceback: the keeper had a fault of its own and left |
| `lost` | who buries it | nobody will ever know; a late keeper starts nothing |

The lines of `keeper`, each written once: the keeper's identity; `started_at`, before the command can run, so that
without it nothing ran; `child`, the command's identity. A stream's file is made with its first byte.

Only the standard library at import: the keeper uses this.
"""

from __future__ import annotations

import re

#: the id of a run, which is its directory's name: one name, never a path
RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}\Z")

KEEPER = "keeper"
STDOUT = "stdout"
STDERR = "stderr"
ORDER = "order"
STOP = "stop"
EXIT = "exit.json"
SWEPT = "swept.json"
LOST = "lost"
FAULT = "keeper.fault"
#: ends the name of an exit record that was moved aside
UNREADABLE = ".unreadable"

#: asks a keeper to look at the `stop` file
STOP_SIGNAL_NAME = "SIGUSR1"

#: `stopped_by` in an exit record
BY_EXIT = "exit"  #: it ended by itself, with whatever code
BY_SIGNAL = "signal"  #: a signal that was not ours
BY_TERM = "term"  #: it was asked to end, by us
BY_KILL = "kill"  #: it did not end within the grace, and was killed by us
BY_TIMEOUT = "timeout"
BY_OUTPUT_LIMIT = "output_limit"
BY_NOT_FOUND = "not_found"  #: there is no such command; nothing ran
BY_NOT_STARTED = "not_started"  #: the command could not be started; nothing ran
BY_NEVER_STARTED = "never_started"  #: the worker went away, or a stop came, before it said go; nothing ran

#: exit codes of commands that could not be started, as shells give them
CODE_NOT_FOUND = 127
CODE_NOT_STARTED = 126

DEFAULT_GRACE_S = 5.0
DEFAULT_OUTPUT_LIMIT_BYTES = 64 * 2**20
