"""What a monitor wants to know, in the text form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from .._version import __version__
from ..errors import Closed
from .rows import JOB, PROCESS

if TYPE_CHECKING:
    from .app import App

CONTENT_TYPE = CONTENT_TYPE_LATEST

#: fields of a runner's stats, and what they say
_RUNNER = {
    "workers": "Slots of the pool",
    "running": "Jobs whose turn is running here",
    "queued": "Jobs that wait for a slot here",
    "lent": "Slots lent while their jobs wait for others",
    "withheld": "Slots lost until a stuck thread returns",
    "unsettled": "Events whose commit failed and is tried again",
}


def written(app: App) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(app))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, app: App) -> None:
        self._app = app

    def collect(self) -> Iterator[Metric]:
        app, feed = self._app, self._app.feed
        info = GaugeMetricFamily("openjobs_info", "The version and mode of the server", labels=["version", "mode"])
        info.add_metric([__version__, app.backend.mode], 1)
        yield info
        for kind, name in ((JOB, "openjobs_jobs"), (PROCESS, "openjobs_processes")):
            counts = GaugeMetricFamily(name, f"Known {name.removeprefix('openjobs_')} by status", labels=["status"])
            for status, number in sorted(feed.counts(kind).items()):
                counts.add_metric([status], number)
            yield counts
        yield GaugeMetricFamily("openjobs_running", "Jobs and processes that run in the home", value=feed.running)
        yield GaugeMetricFamily("openjobs_rows", "Rows in memory", value=len(feed))
        yield CounterMetricFamily("openjobs_events", "Events that were told", value=feed.seq)
        connections = len(app.connections)
        yield GaugeMetricFamily("openjobs_connections", "Open WebSockets", value=connections)
        yield GaugeMetricFamily("openjobs_log_streams", "Logs that are followed", value=app.streams)
        yield CounterMetricFamily("openjobs_connections_dropped", "Clients that were too slow", value=app.dropped)
        yield CounterMetricFamily("openjobs_requests_refused", "Requests that were not let in", value=app.refused)
        try:
            stats = app.backend.stats()
        except Closed:
            return
        for field, text in _RUNNER.items():
            if field in stats:
                yield GaugeMetricFamily(f"openjobs_runner_{field}", text, value=stats[field])
        if "stuck" in stats:
            yield GaugeMetricFamily("openjobs_runner_stuck", "Threads that were given up", value=len(stats["stuck"]))
