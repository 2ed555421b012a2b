"""The host process, from taking the home's host lock to giving it back."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from .._version import __version__
from ..durable import Disk, FileLock
from ..errors import Closed, OpenJobsError
from ..processes import ProcessSupervisor
from . import address
from .actions import Context, answer
from .client import HOST_LOCK
from .config import prepare_home
from .launcher import Launcher, Runtime
from .service import Service
from .wire import PROTOCOL, error_to_wire

#: a job that came without an environment gets no more than this of ours
_BARE = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ")
_TICK_S = 0.5
#: how often the host looks for background commands of workers that died
RECOVER_EVERY_S = 1.0

_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """The exit status. Says on `ready_fd` that it listens, that the lock is taken, or why it cannot start."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    ready = _Ready(options.ready_fd)
    try:
        home = prepare_home(Path(options.home))
        os.chdir(home)  # never in the way of an unmount, and no code is found in somebody's directory
        lock = FileLock(home / HOST_LOCK, Disk(durable=False))
        if not lock.try_acquire():
            ready.say({"taken": True})
            return 0
        try:
            sign(home, f"{os.getpid()}\n")
            return _serve(home, options, ready)
        finally:
            sign(home, "")
            # Last of all: until here another host would meet a store that still writes.
            lock.release()
    except KeyboardInterrupt:
        return 130
    except OpenJobsError as error:
        _log.error("the host cannot run: %s", error)
        ready.say({"error": error_to_wire(error)})
        return 1
    except Exception as error:
        _log.exception("the host failed")
        ready.say({"error": error_to_wire(error)})
        return 1
    finally:
        ready.close()


def sign(home: Path, text: str) -> None:
    """Say in the lock file who holds it, for the clients that wait. Only a help: nothing depends on it."""
    with contextlib.suppress(OSError):
        fd = os.open(home / HOST_LOCK, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _serve(home: Path, options: argparse.Namespace, ready: _Ready) -> int:
    with Launcher() as launcher:
        hosted = open_host(launcher, home, workers=options.workers)
        hosted.service.start()
        _log.info("host of %s, version %s", home, __version__)
        ready.say({"ready": True})
        leave_when_idle(
            launcher, hosted.service, hosted.runtime, options.idle_s, tasks=hosted.tasks, asked=hosted.asked_to_leave
        )
        _log.info("leaving: %s", launcher.reason)
    return 0


@attrs.frozen(kw_only=True)
class Hosted:
    """What makes a process the host of a home."""

    runtime: Runtime
    tasks: ProcessSupervisor
    #: not started yet
    service: Service
    #: set when somebody would take the host's place as soon as there is no work
    asked_to_leave: threading.Event


def open_host(launcher: Launcher, home: Path, *, workers: int | None = None, stays: bool = False) -> Hosted:
    """Runner, background commands and the home's socket, owned by `launcher`. Only under the home's host lock.

    `stays`: it does not leave for anybody who asks.
    """
    asked = threading.Event()

    def leave() -> bool:
        if not stays:
            asked.set()
        return not stays

    # A signal from here on waits for the end of the block: what was opened is owned by then.
    with launcher.acquiring("service") as pending:
        environ = {name: os.environ[name] for name in _BARE if name in os.environ}
        runtime = launcher.open(home, workers=workers, environ=environ)
        tasks = _tasks(launcher, runtime)
        context = Context(
            runner=runtime.runner,
            store=runtime.store,
            tasks=tasks,
            about={"pid": os.getpid(), "version": __version__, "protocol": PROTOCOL, "home": str(home)},
            stop=launcher.stop,
            leave=leave,
        )
        endpoint = address.Endpoint(home, guard=home / HOST_LOCK)
        launcher.on_close(endpoint.close, name="socket file")
        service = Service(endpoint.listen(), answerer(context), renew=endpoint.renew)
        pending.ready(service.stop)
    return Hosted(runtime=runtime, tasks=tasks, service=service, asked_to_leave=asked)


def _tasks(launcher: Launcher, runtime: Runtime) -> ProcessSupervisor:
    """Looks after background commands under the runner's lease, and takes over those of workers that die."""
    supervisor = ProcessSupervisor(runtime.store, worker_id=runtime.runner.runner_id)
    launcher.provide("tasks", supervisor, lambda left: supervisor.close(left))
    runtime.runner.owned_tasks.use(supervisor.job_tasks)
    stop = threading.Event()

    def recover() -> None:
        while True:
            try:
                supervisor.recover()
            except Closed:
                return
            except Exception:
                _log.exception("background commands could not be recovered")
            if stop.wait(RECOVER_EVERY_S):
                return

    thread = threading.Thread(target=recover, name="openjobs tasks recovery", daemon=True)

    def end() -> None:
        stop.set()
        thread.join()

    thread.start()
    launcher.on_close(end, name="tasks recovery")
    return supervisor


def answerer(context: Context) -> Callable[[Mapping[str, Any], Callable[[], bool]], Mapping[str, Any]]:
    """What a `Service` calls for each request."""
    return lambda request, gone: answer(attrs.evolve(context, gone=gone), request)


def leave_when_idle(
    launcher: Launcher,
    service: Service,
    runtime: Runtime,
    idle_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    tasks: ProcessSupervisor | None = None,
    asked: threading.Event | None = None,
) -> None:
    """Returns when the end is asked for, or after `idle_s` without work and without clients.

    Once `asked` is set, the first moment without work and clients will do.

    The order in which leaving is decided: 1. nobody is connected and from now on nobody gets in, so no
    submit is under way; 2. there is still no work. Otherwise we stay.
    """
    quiet_since = monotonic()
    while not launcher.wait(min(_TICK_S, idle_s / 4)):
        if service.clients or is_busy(runtime, tasks):
            quiet_since = monotonic()
            continue
        wanted = asked is not None and asked.is_set()
        if (wanted or monotonic() - quiet_since >= idle_s) and service.leave_if_quiet():
            if is_busy(runtime, tasks):
                service.stay()
            else:
                launcher.stop("another host is to take this one's place" if wanted else f"{idle_s:g} s without work")


def is_busy(runtime: Runtime, tasks: ProcessSupervisor | None = None) -> bool:
    """Whether jobs or background commands are unfinished, or ends of jobs not yet durable."""
    stats = runtime.runner.stats()
    return stats.unfinished > 0 or stats.unsettled > 0 or (tasks is not None and tasks.running > 0)


class _Ready:
    """The pipe to who started us: one line, once."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def say(self, message: Mapping[str, Any]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # who started us is gone; others will come
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
