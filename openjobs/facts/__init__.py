"""Lifecycle facts: when each job and background command was registered, and when and how it settled (spec 001).

    for fact in facts.read(store.session("default"), since=yesterday):
        print(fact.type, fact.job_id)
    for fact in facts.follow(session_directory, after=cursor):
        …

Facts are for readers elsewhere: whoever wants to know how long things took, without git and without
asking the process that ran them. They stand in the session's `events.jsonl`.
"""

from ..ledger import START, Cursor
from .fact import JOB, PROCESS, Fact, FactType, Registered, Settled, to_json
from .intervals import Interval, intervals, pair
from .log import FactLog, FileFactLog, MemoryFactLog
from .reading import Follow, follow, read
from .recorder import Recorder

__all__ = [
    "JOB",
    "PROCESS",
    "START",
    "Cursor",
    "Fact",
    "FactLog",
    "FactType",
    "FileFactLog",
    "Follow",
    "Interval",
    "MemoryFactLog",
    "Recorder",
    "Registered",
    "Settled",
    "follow",
    "intervals",
    "pair",
    "read",
    "to_json",
]
