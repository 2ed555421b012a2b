"""The host process of a home, for real: one host, jobs that outlive their clients, kills, leaving, bad clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from openjobs.durable import Disk, FileLock
from openjobs.errors import HostUnavailable, InvalidWorkers, OpenJobsError, UnknownAgent
from openjobs.host import address
from openjobs.host.client import HOST_LOCK, HostClient, connect, ensure_host, spawn
from openjobs.host.config import prepare_home
from openjobs.ids import new_id
from openjobs.jobs import Job, JobStatus, SpawnRequest
from openjobs.runner import JobClient
from openjobs.store import GitJobStore
from tests.support import eventually

pytestmark = pytest.mark.timeout(120)


def is_gone(pid: int) -> bool:
    """Whether it has ended; who adopted it may take a while to notice."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_host(home: Path) -> None:
    """The home's host, if there is one, has ended when this returns."""
    client = connect(home)
    if client is None:
        return
    with client:
        pid = client.about["pid"]
        client.call("shutdown")
    eventually(lambda: is_gone(pid), 20)


def kill(pid: int) -> None:
    """SIGKILL for a host that this test started."""
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_gone(pid), 20)


@pytest.fixture
def home(scratch: Path) -> Iterator[Path]:
    """A home with a short path; its host is ended and the directory removed after the test."""
    base = Path(scratch)
    path = prepare_home(base / "h")
    yield path
    end_host(path)
    subprocess.run(["rm", "-rf", str(path)], check=True)


@pytest.fixture
def host(home: Path) -> Iterator[HostClient]:
    with ensure_host(home, idle_s=60, workers=2) as client:
        yield client


def request(prompt: str, agent_id: str = "shell", **more: Any) -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id="default", agent_id=agent_id, **more)


def submit(home: Path, prompt: str, environ: Mapping[str, str] = os.environ, **more: Any) -> str:
    answer = spawn(home, request(prompt, **more), environ=environ, create_session=True)
    return str(answer["job_id"])


def await_one(host: HostClient, job_id: str, timeout_s: float = 30) -> Job:
    job = host.await_jobs([job_id], timeout_s=timeout_s)[0]
    assert job.terminal, f"still {job.status} after {timeout_s} s"
    return job


def run_python(code: str, *arguments: str, environ: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**environ, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )


class TestOneHost:
    def test_a_job_survives_its_client(self, home: Path, tmp_path: Path) -> None:
        """A background job goes on when the process that submitted it, and its whole session, are gone."""
        code = """
import os, sys
from pathlib import Path
from openjobs.host.client import spawn
from openjobs.jobs import SpawnRequest
home, gate = sys.argv[1:]
prompt = f"while ! test -e {gate}; do sleep 0.02; done; echo survived"
request = SpawnRequest(prompt=prompt, parent_session_id="default", agent_id="shell")
print(spawn(Path(home), request, environ=os.environ, create_session=True)["job_id"])
"""
        client = run_python(code, str(home), str(tmp_path / "gate"))
        out, _ = client.communicate(timeout=60)
        assert client.returncode == 0
        (tmp_path / "gate").touch()
        with ensure_host(home) as host:
            job = await_one(host, out.strip())
        assert (job.status, job.result_text) == (JobStatus.COMPLETED, "survived")

    def test_thirty_starters_get_one_host(self, home: Path) -> None:
        """Thirty starters at once, in ten processes, all talk to the same one host."""
        code = """
import os, sys, threading
from pathlib import Path
from openjobs.host.client import ensure_host
def start():
    with ensure_host(Path(sys.argv[1])) as host:
        os.write(1, b"%d\\n" % host.about["pid"])
threads = [threading.Thread(target=start) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
        starters = [run_python(code, str(home)) for _ in range(10)]
        pids = [line for starter in starters for line in starter.communicate(timeout=100)[0].split()]
        assert len(pids) == 30
        assert len(set(pids)) == 1

    def test_a_second_host_leaves_at_once(self, home: Path, host: HostClient) -> None:
        """A host that finds the home's lock taken changes nothing and ends."""
        second = run_python("import runpy; runpy.run_module('openjobs.host', run_name='__main__')", "--home", str(home))
        second.communicate(timeout=60)
        assert second.returncode == 0
        with ensure_host(home) as again:
            assert again.about["pid"] == host.about["pid"]

    def test_it_is_detached(self, host: HostClient) -> None:
        """The host is in a session of its own, nobody's child here, without a terminal, at home."""
        process = psutil.Process(host.about["pid"])
        assert os.getsid(process.pid) != os.getsid(0)
        assert process.ppid() != os.getpid()
        assert process.terminal() is None
        assert process.cwd() == host.about["home"]

    def test_a_long_home_works(self, home: Path) -> None:
        """A home whose path is longer than a socket's name may be has its host all the same."""
        long = prepare_home(home / ("x" * 60) / ("y" * 60))
        try:
            assert submit(long, "echo x")
            with ensure_host(long) as host:
                assert host.call("list_jobs")["tasks"]
            found = address.find(long)
            assert found is not None
        finally:
            end_host(long)
        eventually(lambda: not found.parent.exists())

    def test_why_it_does_not_start_is_told(self, home: Path) -> None:
        """An error at the start of a host reaches who wanted it, with its type."""
        with pytest.raises(InvalidWorkers, match="OPENPROGRAM_JOB_WORKERS"):
            ensure_host(home, environ={**os.environ, "OPENPROGRAM_JOB_WORKERS": "abc"})


class TestJobs:
    def test_a_job_has_its_clients_environment_and_directory(self, home: Path, tmp_path: Path) -> None:
        """The client's environment and directory count, and nothing of the one who started the host."""
        ensure_host(home, environ={**os.environ, "SECRET": "of the starter"}).close()
        environ = {"PATH": os.environ["PATH"], "MINE": "1"}
        job_id = submit(home, "env; pwd -P", environ, cwd=tmp_path)
        with ensure_host(home) as host:
            text = await_one(host, job_id).result_text or ""
            assert "SECRET" not in _environment_of(host.about["pid"])
        assert "MINE=1" in text
        assert "SECRET" not in text
        assert text.splitlines()[-1] == str(tmp_path.resolve())

    def test_a_refused_job_is_a_typed_error(self, home: Path) -> None:
        """What the host refuses is raised at the client as what it is."""
        with pytest.raises(UnknownAgent, match="--agent shell"):
            spawn(home, request("x", agent_id="main"), environ=os.environ, create_session=True)

    def test_a_new_profile_needs_no_restart(self, home: Path, host: HostClient) -> None:
        """A running host takes a profile that is added to its configuration."""
        with pytest.raises(UnknownAgent):
            submit(home, "x", agent_id="mine")
        (home / "config.toml").write_text('[profiles.mine]\ncommand = ["echo", "I say:", "{prompt}"]\n')
        assert await_one(host, submit(home, "x", agent_id="mine")).result_text == "I say: x"

    def test_a_command_that_waits_for_its_child_lends_its_slot(self, home: Path, tmp_path: Path) -> None:
        """On one worker a job's command submits a child through the host and waits for it: both end."""
        script = tmp_path / "nested.py"
        script.write_text("""
import os
from pathlib import Path
from openjobs.host.client import connect, parent_job, spawn
from openjobs.jobs import SpawnRequest
home = Path(os.environ["OPENJOBS_HOME"])
request = SpawnRequest(prompt="echo from the child", parent_session_id="default", agent_id="shell")
child = spawn(home, request, environ=os.environ)["job_id"]
with connect(home) as host:
    job = host.await_jobs([child], waiting_job_id=parent_job(home, os.environ))[0]
print(job.parent_job_id, job.result_text)
""")
        with ensure_host(home, workers=1) as host:
            job_id = submit(home, f"{sys.executable} {script}", {**os.environ, "PYTHONPATH": os.getcwd()})
            job = await_one(host, job_id, 60)
            assert job.error is None
            assert job.result_text == f"{job_id} from the child"
            assert host.call("stats")["lent"] == 0

    def test_a_submit_that_races_with_leaving_is_not_lost(self, home: Path) -> None:
        """Hosts that leave after a tenth of a second lose none of the jobs that come at just that time."""
        ids = []
        for number in range(10):
            made = spawn(
                home,
                request(str(number), agent_id="echo"),
                environ=os.environ,
                create_session=True,
                ensure=lambda home: ensure_host(home, idle_s=0.1),
            )
            ids.append(made["job_id"])
            time.sleep(0.02 * number)  # the pause grows over the time at which a host leaves
        eventually(lambda: connect_is_none(home), 30)
        with _client(home) as client:
            jobs = [client.get(job_id) for job_id in ids]
        assert [job.result_text for job in jobs] == [str(number) for number in range(10)]


def connect_is_none(home: Path) -> bool:
    client = connect(home)
    if client is not None:
        client.close()
    return client is None


def _environment_of(pid: int) -> str:
    return str(psutil.Process(pid).environ())


class _client:
    """A JobClient of a home, with its store."""

    def __init__(self, home: Path) -> None:
        self._store = GitJobStore(home)
        self._client = JobClient(self._store)

    def __enter__(self) -> JobClient:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._store.close()


class TestEnding:
    def test_it_leaves_when_there_is_nothing_to_do(self, home: Path) -> None:
        """Without work and clients a host leaves, taking its socket along."""
        with ensure_host(home, idle_s=0.2) as host:
            pid = host.about["pid"]
        eventually(lambda: is_gone(pid), 20)
        assert not (home / "host.sock").exists()
        assert "leaving: 0.2 s without work" in (home / "host.log").read_text()

    def test_it_stays_for_work_and_for_clients(self, home: Path, tmp_path: Path) -> None:
        """A host does not leave while a job runs that nobody waits for, nor while a client is connected."""
        with ensure_host(home, idle_s=0.1) as host:
            pid = host.about["pid"]
        gate = tmp_path / "gate"
        job_id = submit(home, f"while ! test -e {gate}; do sleep 0.02; done; echo done")
        with ensure_host(home, idle_s=0.1) as host:
            busy = host.about["pid"]
        time.sleep(1.0)  # ten times as long as an idle host stays
        assert not is_gone(busy)
        gate.touch()
        eventually(lambda: is_gone(busy), 20)
        with _client(home) as client:
            assert client.get(job_id).result_text == "done"
        with ensure_host(home, idle_s=0.1) as host:
            time.sleep(1.0)
            assert host.call("ping")["pid"] == host.about["pid"]
        assert pid

    @pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    def test_a_signal_ends_it_in_order(self, home: Path, signum: int) -> None:
        """On a signal running jobs end as the shutdown ends them, queued ones as cancelled, all written down."""
        with ensure_host(home, workers=1) as host:
            pid = host.about["pid"]
            running = submit(home, "echo begun; exec sleep 600")
            queued = submit(home, "echo never")
            eventually(lambda: host.get(running)[1] == "begun\n", 20)
            os.kill(pid, signum)
            with pytest.raises(OpenJobsError):
                host.await_jobs([running])
        eventually(lambda: is_gone(pid), 20)
        assert not (home / "host.sock").exists()
        with _client(home) as client:
            ended, never = client.get(running), client.get(queued)
        assert never.status is JobStatus.CANCELLED
        assert never.cancel_reason == "shutdown"
        assert ended.terminal
        assert (ended.result_text or "").strip() == "begun"
        assert ended.error != "worker died before completion"

    def test_a_killed_host_is_replaced_and_recovered(self, home: Path) -> None:
        """After kill -9 the next client gets another host; the dead one's job is errored and its command ended."""
        with ensure_host(home) as host:
            pid = host.about["pid"]
            job_id = submit(home, "echo $$; exec sleep 600")
            command = int(eventually(lambda: host.get(job_id)[1], 20))
            kill(pid)
            with pytest.raises(HostUnavailable):
                host.get(job_id)
        assert (home / "host.sock").exists()
        with ensure_host(home) as host:
            assert host.about["pid"] != pid
            job, _ = host.get(job_id)
        assert (job.status, job.error) == (JobStatus.ERRORED, "worker died before completion")
        eventually(lambda: is_gone(command), 20)

    def test_a_command_line_recovers_without_a_host(self, home: Path) -> None:
        """A client that only reads ends a killed host's job too, command included (R5, R9)."""
        with ensure_host(home) as host:
            pid = host.about["pid"]
            job_id = submit(home, "echo $$; exec sleep 600")
            command = int(eventually(lambda: host.get(job_id)[1], 20))
        kill(pid)
        with _client(home) as client:
            # The kernel frees the lease when the last thread of the dead process has left.
            eventually(lambda: client.get(job_id).error == "worker died before completion", 20)
        eventually(lambda: is_gone(command), 20)

    def test_the_same_submit_after_a_kill_runs_nothing_twice(self, home: Path) -> None:
        """Asking a second host for a job that the first one had returns that job (R3)."""
        job_id = new_id()
        asked = request("echo once", job_id=job_id)
        spawn(home, asked, environ=os.environ, create_session=True)
        with ensure_host(home) as host:
            first = await_one(host, job_id)
            kill(host.about["pid"])
        again = spawn(home, asked, environ=os.environ, create_session=True)
        assert again["job_id"] == job_id
        with ensure_host(home) as host:
            assert host.get(job_id)[0] == first
            assert len(host.call("list_jobs")["tasks"]) == 1


def take_away(path: Path, victim: Path) -> None:
    path.unlink()


def put_file(path: Path, victim: Path) -> None:
    path.unlink()
    path.write_text("somebody's")


def put_link(path: Path, victim: Path) -> None:
    path.unlink()
    path.symlink_to(victim)


def put_socket(path: Path, victim: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(os.fspath(path))


class TestTheSocketsPlace:
    @pytest.mark.parametrize("change", [take_away, put_file, put_link, put_socket])
    def test_a_lost_socket_is_made_again(
        self, home: Path, host: HostClient, tmp_path: Path, change: Callable[[Path, Path], None]
    ) -> None:
        """A busy host whose socket is gone or replaced is found again; what was in its place is kept, not followed."""
        path, victim = home / "host.sock", tmp_path / "victim"
        victim.write_text("precious")
        change(path, victim)
        with ensure_host(home) as again:
            assert again.about["pid"] == host.about["pid"]
        assert path.is_socket()
        assert not path.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o600
        assert host.call("ping")["pid"] == host.about["pid"]
        assert victim.read_text() == "precious"
        aside = home / "host.sock.aside.0"
        assert aside.is_symlink() == (change is put_link)
        if change is put_file:
            assert aside.read_text() == "somebody's"
        assert "it is there again" in (home / "host.log").read_text()

    def test_a_directory_in_its_place_is_told_at_the_start(self, home: Path) -> None:
        """A host that cannot start for a directory in its way says so in one sentence, and what to do."""
        (home / "host.sock").mkdir()
        with pytest.raises(HostUnavailable, match=r"^\S*/host.sock is a directory, .*: move it away, then try again$"):
            ensure_host(home)
        (home / "host.sock").rmdir()
        ensure_host(home).close()

    def test_a_directory_in_the_place_of_a_living_hosts_socket(self, home: Path, host: HostClient) -> None:
        """It is left alone and told to who wants the host; when it is away, the host is found again."""
        (home / "host.sock").unlink()
        (home / "host.sock").mkdir()
        with pytest.raises(HostUnavailable, match=r"host.sock is a directory, .*: move it away"):
            ensure_host(home)
        eventually(lambda: "host.sock is a directory" in (home / "host.log").read_text(), 20)
        (home / "host.sock").rmdir()
        with ensure_host(home) as again:
            assert again.about["pid"] == host.about["pid"]

    def test_a_lock_without_a_socket_is_told(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who waits for a host that has the lock and no socket learns which process that is, and what to do."""
        monkeypatch.setattr("openjobs.host.client._NO_SOCKET_S", 0.5)
        lock = FileLock(home / HOST_LOCK, Disk(durable=False))
        assert lock.try_acquire()
        try:
            (home / HOST_LOCK).write_text("4711\n")
            with pytest.raises(HostUnavailable, match=r"process 4711 holds \S*/host.lock, .*`kill 4711`"):
                ensure_host(home)
            (home / HOST_LOCK).write_text("")
            with pytest.raises(HostUnavailable, match=r"not known holds \S*/host.lock, .*`fuser "):
                ensure_host(home)
        finally:
            lock.release()
        with ensure_host(home) as host:
            assert (home / HOST_LOCK).read_text() == f"{host.about['pid']}\n"

    def test_a_silent_host_is_told(self, home: Path, host: HostClient, monkeypatch: pytest.MonkeyPatch) -> None:
        """A host that accepts and says nothing is named, with what to do; it is used again when it goes on."""
        pid = host.about["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            monkeypatch.setattr("openjobs.host.client._PING_TIMEOUT_S", 0.5)
            with pytest.raises(HostUnavailable, match=rf"\(process {pid}\) does not answer.*`kill {pid}`"):
                ensure_host(home)
        finally:
            monkeypatch.undo()
            os.kill(pid, signal.SIGCONT)
        with ensure_host(home) as again:
            assert again.about["pid"] == pid


class TestBadClients:
    @pytest.fixture
    def raw(self, home: Path, host: HostClient) -> Iterator[Callable[[], socket.socket]]:
        made: list[socket.socket] = []

        def dial() -> socket.socket:
            sock = address.dial(home)
            assert sock is not None
            sock.settimeout(20)
            made.append(sock)
            return sock

        yield dial
        for sock in made:
            sock.close()

    def test_rubbish_hurts_nobody(self, host: HostClient, raw: Callable[[], socket.socket]) -> None:
        """Malformed frames get typed errors or a closed connection, and other clients notice nothing."""
        for rubbish in (
            b"\n",
            b"}{\n",
            b"\xff\n",
            b"[1]\n",
            b'{"action": []}\n',
            b'{"action": "spawn_job"}\n',
            b"half",
        ):
            sock = raw()
            sock.sendall(rubbish)
            sock.shutdown(socket.SHUT_WR)
            for line in iter(lambda sock=sock: _line(sock), b""):
                assert json.loads(line)["ok"] is False
        assert host.call("ping")["pid"] == host.about["pid"]

    def test_a_huge_frame_is_cut_off(self, host: HostClient, raw: Callable[[], socket.socket]) -> None:
        """A frame beyond the bound ends its own connection, and the host's memory stays bounded."""
        before = psutil.Process(host.about["pid"]).memory_info().rss
        sock = raw()
        with pytest.raises(OSError, match=r".*"):
            sock.sendall(b"x" * (100 << 20))
        assert json.loads(_line(sock))["error"]["code"] == "bad_frame"
        assert host.call("ping")["pid"] == host.about["pid"]
        assert psutil.Process(host.about["pid"]).memory_info().rss - before < (64 << 20)

    def test_silent_clients_hurt_nobody(self, home: Path, host: HostClient, raw: Callable[[], socket.socket]) -> None:
        """Fifty clients that say nothing, or half a line, cost the others nothing."""
        for number in range(50):
            raw().sendall(b"" if number % 2 else b'{"action":')
        assert await_one(host, submit(home, "echo fine")).result_text == "fine"

    def test_many_clients_at_once(self, home: Path, host: HostClient) -> None:
        """Twenty clients submit and wait at the same time, each for its own job."""
        results: dict[int, str | None] = {}

        def work(number: int) -> None:
            with ensure_host(home) as mine:
                results[number] = await_one(mine, submit(home, str(number), agent_id="echo"), 60).result_text

        threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: str(number) for number in range(20)}


def _line(sock: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = sock.recv(1)
        if not piece:
            return b""
        line += piece
    return line
