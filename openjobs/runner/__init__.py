"""The runner: jobs that run, are waited for and cancelled."""

from ..session.notices import Notice
from .cancel import StuckThread
from .client import JobClient
from .ending import Ended, EndStep
from .hub import Hub, HubEvent, Subscription
from .notices import Notices, NoticeSubscription
from .runner import JobRunner, RunnerStats

__all__ = [
    "EndStep",
    "Ended",
    "Hub",
    "HubEvent",
    "JobClient",
    "JobRunner",
    "Notice",
    "NoticeSubscription",
    "Notices",
    "RunnerStats",
    "StuckThread",
    "Subscription",
]
