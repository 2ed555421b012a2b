"""Background commands, each under a keeper that outlives the worker (docs/decisions/0003-keepers.md)."""

from .client import TaskClient, run_directory
from .command import CommandEnd, run_command
from .identity import Identity, System, this_system
from .journal import TaskJournal
from .output import Output, read_output
from .owned import JobTasks
from .rundir import (
    Burial,
    ExitRecord,
    bury,
    child_identity,
    keeper_identity,
    keeper_lives,
    read_exit,
    request_stop,
    wait_for_exit,
    wait_gone,
)
from .source import KeeperSource, source_identity
from .supervisor import ProcessSupervisor
from .tail import RunTail
from .task import Fact, Task, TaskStatus
from .template import Request, Run, Template, argv_of

__all__ = [
    "Burial",
    "CommandEnd",
    "ExitRecord",
    "Fact",
    "Identity",
    "JobTasks",
    "KeeperSource",
    "Output",
    "ProcessSupervisor",
    "Request",
    "Run",
    "RunTail",
    "System",
    "Task",
    "TaskClient",
    "TaskJournal",
    "TaskStatus",
    "Template",
    "argv_of",
    "bury",
    "child_identity",
    "keeper_identity",
    "keeper_lives",
    "read_exit",
    "read_output",
    "request_stop",
    "run_command",
    "run_directory",
    "source_identity",
    "this_system",
    "wait_for_exit",
    "wait_gone",
]
