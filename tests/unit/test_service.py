"""The socket and what goes over it: bad frames, foreign users, bounds (R10, R11)."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openjobs import errors
from openjobs.errors import BadFrame, HostBusy, HostFailed, HostUnavailable, OpenJobsError, OutcomeUnknown, UnknownJob
from openjobs.host import address, wire
from openjobs.host.client import HostClient, connect
from openjobs.host.service import Service
from openjobs.jobs import Job, JobStatus
from tests.support import eventually

Answer = Callable[[Mapping[str, Any], Callable[[], bool]], Mapping[str, Any]]


def echo(request: Mapping[str, Any], gone: Callable[[], bool]) -> Mapping[str, Any]:
    return {"ok": True, "result": dict(request)}


@pytest.fixture
def home(scratch: Path) -> Iterator[Path]:
    """A short path."""
    path = scratch / "h"
    path.mkdir(mode=0o700)
    yield path
    address.remove(path)
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


@pytest.fixture
def serve(home: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def start(answer: Answer = echo, **options: Any) -> Service:
        service = Service(address.listen(home), answer, **options)
        made.append(service)
        service.start()
        return service

    yield start
    for service in made:
        service.stop()


def dial(home: Path) -> socket.socket:
    sock = address.dial(home)
    assert sock is not None
    sock.settimeout(10)
    return sock


def said(sock: socket.socket) -> list[Any]:
    """Everything until the other side closes."""
    raw = b""
    try:
        while chunk := sock.recv(65536):
            raw += chunk
    except ConnectionError:
        pass
    return [json.loads(line) for line in raw.splitlines()]


class TestRequests:
    def test_requests_are_answered_in_order(self, serve: Callable[..., Service], home: Path) -> None:
        """Several requests on one connection, in one piece or in many, are answered in their order."""
        serve()
        with dial(home) as sock:
            for byte in b'{"a":1}\n{"a":2}\n\n  \n{"a":3}\n':
                sock.send(bytes([byte]))
            sock.shutdown(socket.SHUT_WR)
            assert [answer["result"] for answer in said(sock)] == [{"a": 1}, {"a": 2}, {"a": 3}]

    @pytest.mark.parametrize(
        "line",
        [b"{", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b"\0", b'{"a":NaN}', b"[" * 100_000, b'{"a":' * 100_000],
    )
    def test_a_bad_line_is_answered_and_hurts_nobody(
        self, serve: Callable[..., Service], home: Path, line: bytes
    ) -> None:
        """A line that is not a JSON object gets a typed error; its connection and all others go on."""
        serve()
        with dial(home) as bad, HostClient(dial(home)) as good:
            bad.sendall(line + b'\n{"a":1}\n')
            bad.shutdown(socket.SHUT_WR)
            first, second = said(bad)
            assert first["error"]["code"] == "bad_frame"
            assert second == {"ok": True, "result": {"a": 1}}
            assert good.call("x", b=1) == {"action": "x", "b": 1}

    def test_a_line_without_end_is_cut_off(self, serve: Callable[..., Service], home: Path) -> None:
        """A frame larger than the bound is refused in bounded memory and ends its connection only."""
        service = serve(request_limit_bytes=100_000)
        with dial(home) as bad, HostClient(dial(home)) as good:
            with pytest.raises(ConnectionError):
                bad.sendall(b"x" * 50_000_000)
            assert [answer["error"]["code"] for answer in said(bad)] == ["bad_frame"]
            assert good.call("x") == {"action": "x"}
            eventually(lambda: service.clients == 1)

    def test_a_client_that_is_gone_is_seen(self, serve: Callable[..., Service], home: Path) -> None:
        """A handler can see that nobody waits for its answer any more."""
        seen, looked = threading.Event(), threading.Event()

        def wait(request: Mapping[str, Any], gone: Callable[[], bool]) -> Mapping[str, Any]:
            assert not gone()
            looked.set()
            eventually(gone)
            seen.set()
            return {}

        serve(wait)
        with dial(home) as sock:
            sock.sendall(b"{}\n")
            looked.wait(10)
        assert seen.wait(10)

    def test_an_answer_that_cannot_be_sent_is_an_error(self, serve: Callable[..., Service], home: Path) -> None:
        """A result that JSON cannot hold reaches the client as a typed error."""
        serve(lambda request, gone: {"ok": True, "result": {"x": object()}})
        with HostClient(dial(home)) as client, pytest.raises(BadFrame):
            client.call("x")

    def test_text_that_is_not_utf8_is_carried(self, serve: Callable[..., Service], home: Path) -> None:
        """An environment may hold any bytes; they arrive as they were sent."""
        serve()
        with HostClient(dial(home)) as client:
            value = os.fsdecode(b"a\xffb") + "\u2028ä"
            assert client.call("x", env={"A": value})["env"]["A"] == value


class TestClients:
    def test_another_user_is_refused(self, serve: Callable[..., Service], home: Path) -> None:
        """A connection of another user is closed before a byte of it is read (R10)."""
        asked: list[Any] = []
        serve(
            lambda request, gone: asked.append(request) or {"ok": True, "result": {}},
            peer_uid=lambda sock: os.geteuid() + 1,
        )
        with dial(home) as sock, pytest.raises((HostUnavailable, OutcomeUnknown)):
            HostClient(sock).call("x")
        assert asked == []

    def test_a_host_of_another_user_is_refused(self, serve: Callable[..., Service], home: Path) -> None:
        """A client does not talk to a socket behind which another user listens (R10)."""
        serve()
        with pytest.raises(HostUnavailable, match="is user"):
            address.dial(home, uid=os.geteuid() + 1)

    def test_the_kernel_says_who_it_is(self) -> None:
        left, right = socket.socketpair()
        with left, right:
            assert address.peer_uid(left) == os.geteuid()

    def test_there_is_a_bound_on_clients(self, serve: Callable[..., Service], home: Path) -> None:
        """One client too many is told to try again; when one leaves there is room (R11)."""
        service = serve(client_limit=2)
        with HostClient(dial(home)) as first, HostClient(dial(home)) as second:
            assert first.call("x")
            assert second.call("x")
            with HostClient(dial(home)) as third, pytest.raises(HostBusy):
                third.call("x")
            second.close()
            eventually(lambda: service.clients == 1)
            with HostClient(dial(home)) as fourth:
                assert fourth.call("x")

    def test_a_host_that_leaves_lets_nobody_in(self, serve: Callable[..., Service], home: Path) -> None:
        """Leaving is refused while a client is there; once decided, who comes is turned away unread."""
        service = serve()
        with HostClient(dial(home)) as client:
            client.call("x")
            assert not service.leave_if_quiet()
        eventually(service.leave_if_quiet)
        with dial(home) as sock:
            assert said(sock) == []
        service.stay()
        with HostClient(dial(home)) as client:
            assert client.call("x")

    def test_stopping_lets_answers_out(self, serve: Callable[..., Service], home: Path) -> None:
        """`stop` wakes waiting clients, and what is being answered is still answered."""
        asked = threading.Event()

        def slow(request: Mapping[str, Any], gone: Callable[[], bool]) -> Mapping[str, Any]:
            asked.set()
            eventually(gone)
            return {"ok": True, "result": {"late": True}}

        service = serve(slow)
        with HostClient(dial(home)) as client, dial(home) as idle:
            results: list[Any] = []
            asking = threading.Thread(target=lambda: results.append(client.call("x")))
            asking.start()
            asked.wait()
            service.stop()
            asking.join()
            assert results == [{"late": True}]
            assert said(idle) == []
            with pytest.raises((HostUnavailable, OutcomeUnknown)):
                client.call("x")
            with pytest.raises(HostUnavailable, match="has ended"):
                client.call("x")


class TestTheAddress:
    def test_socket_and_directory_are_ours_alone(self, serve: Callable[..., Service], home: Path) -> None:
        serve()
        assert (home / "host.sock").stat().st_mode & 0o777 == 0o600

    def test_a_long_home_has_a_pointer(self, home: Path) -> None:
        """A home whose path is too long for a socket gets one in a short private directory, removed at the end."""
        long = home / ("x" * 120)
        long.mkdir(mode=0o700)
        service = Service(address.listen(long), echo)
        service.start()
        found = address.find(long)
        assert found is not None
        assert len(os.fsencode(found)) <= 100
        assert found.parent.stat().st_mode & 0o777 == 0o700
        with HostClient(dial(long)) as client:
            assert client.call("x") == {"action": "x"}
        service.stop()
        address.remove(long)
        assert not found.parent.exists()
        assert list(long.iterdir()) == []
        long.rmdir()

    @pytest.mark.parametrize("content", [b"", b"a/host.sock", b"/etc/passwd", b"/" + b"x" * 200, b"/a\0/host.sock"])
    def test_a_forged_pointer_leads_nowhere(self, home: Path, content: bytes) -> None:
        """A pointer file with anything but a socket's short absolute path counts as none, and removes nothing."""
        long = home / ("x" * 120)
        long.mkdir()
        (long / "host.sock.path").write_bytes(content)
        assert address.dial(long) is None
        address.remove(long)
        assert list(long.iterdir()) == []
        long.rmdir()

    def test_a_pointer_to_somebodys_directory_removes_nothing(self, home: Path, tmp_path: Path) -> None:
        """Cleaning up after a dead host removes only directories of the form that hosts make."""
        long = home / ("x" * 120)
        long.mkdir()
        victim = home / "v"
        victim.mkdir(mode=0o700)
        (victim / "host.sock").touch()
        (long / "host.sock.path").write_bytes(os.fsencode(victim / "host.sock"))
        address.remove(long)
        assert (victim / "host.sock").exists()
        (victim / "host.sock").unlink()
        victim.rmdir()
        long.rmdir()

    def test_a_stale_socket_is_replaced(self, serve: Callable[..., Service], home: Path) -> None:
        """The socket of a host that was killed is nobody; the next host puts its own in its place."""
        address.listen(home).close()
        assert (home / "host.sock").exists()
        assert address.dial(home) is None
        serve()
        with HostClient(dial(home)) as client:
            assert client.call("x")

    def test_who_came_by_the_old_socket_is_served(self, home: Path) -> None:
        """A socket that is made again takes over, and a connection that waits at the old one is not lost."""
        endpoint = address.Endpoint(home)
        service = Service(endpoint.listen(), echo, renew=endpoint.renew, renew_every_s=0.01)
        with dial(home) as early:
            (home / "host.sock").unlink()
            service.start()
            try:
                sock = eventually(lambda: address.dial(home))
                assert sock is not None
                with HostClient(sock) as late:
                    assert late.call("x") == {"action": "x"}
                assert HostClient(early).call("y") == {"action": "y"}
            finally:
                endpoint.close()
                service.stop()
        assert endpoint.renew() is None
        assert list(home.iterdir()) == []

    @pytest.mark.parametrize("lost", ["pointer", "directory"])
    def test_a_long_homes_socket_is_made_again(self, home: Path, lost: str) -> None:
        """A home with a pointer gets its socket again when the pointer or the private directory is gone."""
        long = home / ("x" * 120)
        long.mkdir(mode=0o700)
        endpoint = address.Endpoint(long)
        old = endpoint.listen()
        found = address.find(long)
        assert found is not None
        assert endpoint.renew() is None
        if lost == "pointer":
            (long / "host.sock.path").unlink()
        else:
            shutil.rmtree(found.parent)
        new = endpoint.renew()
        assert new is not None
        with old, new, dial(long):
            endpoint.close()
        assert list(long.iterdir()) == []
        assert not found.parent.exists()
        long.rmdir()

    def test_a_home_made_anew_is_left_to_its_next_host(self, home: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Who lost the lock file touches nothing in the home any more, and says so once."""
        guard = home / "host.lock"
        guard.touch()
        endpoint = address.Endpoint(home, guard)
        with guard.open(), endpoint.listen():  # an open file's number is not given to another
            guard.unlink()
            guard.touch()
            address.listen(home).close()  # the next host's
            assert endpoint.renew() is None
            assert endpoint.renew() is None
            endpoint.close()
        assert (home / "host.sock").is_socket()
        assert len(caplog.records) == 1

    def test_only_so_many_foreign_files_are_kept(self, home: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Files in the socket's place are moved aside, each under a name of its own, up to a bound; then refused."""
        endpoint = address.Endpoint(home)
        with contextlib.ExitStack() as opened:
            opened.enter_context(endpoint.listen())
            for number in range(10):
                (home / "host.sock").unlink()
                (home / "host.sock").write_text(str(number))
                new = endpoint.renew()
                assert new is not None
                opened.enter_context(new)
                assert (home / f"host.sock.aside.{number}").read_text() == str(number)
            (home / "host.sock").unlink()
            (home / "host.sock").write_text("one too many")
            assert endpoint.renew() is None
        endpoint.close()
        assert (home / "host.sock").read_text() == "one too many"
        assert "remove it" in caplog.records[-1].getMessage()

    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue refuses at once")
    def test_a_full_queue_does_not_hold_a_client(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Connecting to a host that takes no connections ends with an error."""
        monkeypatch.setattr(address, "BACKLOG", 0)
        monkeypatch.setattr(address, "_DIAL_TIMEOUT_S", 1)
        with address.listen(home), dial(home), pytest.raises(HostUnavailable, match=r"not answer.*then try again"):
            connect(home)


def a_job(**more: Any) -> Job:
    values: dict[str, Any] = {
        "job_id": "0b8e1f1c-0000-4000-8000-000000000000",
        "subject": "s",
        "description": "d",
        "agent_id": "shell",
        "created_at": datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
        "parent_session_id": "default",
    }
    return Job(**(values | more))


class TestTheWire:
    def test_a_job_comes_back_as_it_was(self) -> None:
        """A job is the same on the other side, its internal fields apart."""
        job = a_job(
            status=JobStatus.RUNNING,
            started_at=datetime(2026, 1, 2, tzinfo=UTC),
            usage={"cost": 0.5, "deep": [1, {"a": None}]},
            metadata={"k": True},
            timeout_s=1.5,
        )
        assert wire.job_from_wire(json.loads(wire.encode(wire.job_to_wire(job)))) == job

    def test_fields_of_a_newer_host_are_left_out(self) -> None:
        job = a_job()
        assert wire.job_from_wire({**wire.job_to_wire(job), "colour": "red"}) == job

    def test_a_job_that_is_not_whole_says_so_there_too(self) -> None:
        """What of its prompt cannot be read is not taken for a short prompt."""
        job = a_job(extra={"cut": ["description"]})
        assert wire.job_from_wire(json.loads(wire.encode(wire.job_to_wire(job)))) == job

    @pytest.mark.parametrize(
        "change", [{"status": "dreaming"}, {"created_at": "yesterday"}, {"context_mode": None}, {"cut": 1}]
    )
    def test_a_job_that_cannot_be_read_is_a_typed_error(self, change: dict[str, Any]) -> None:
        with pytest.raises(BadFrame):
            wire.job_from_wire({**wire.job_to_wire(a_job()), **change})

    def test_every_error_keeps_its_type(self) -> None:
        """Each of our errors comes out of the socket as what it was put in, with its message."""
        kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OpenJobsError)]
        assert len({wire.code_of(kind) for kind in kinds}) == len(kinds) > 20
        for kind in kinds:
            again = wire.error_from_wire(json.loads(wire.encode(wire.error_to_wire(kind("what happened")))))
            assert type(again) is kind
            assert str(again) == "what happened"

    def test_the_facts_of_an_error_come_along(self) -> None:
        error = UnknownJob("no", candidates=["a", "b"], job=a_job())
        again = wire.error_from_wire(wire.error_to_wire(error))
        assert isinstance(again, UnknownJob)
        assert list(again.candidates) == ["a", "b"]
        assert not hasattr(again, "job")

    def test_an_error_of_a_newer_host_is_an_error(self) -> None:
        again = wire.error_from_wire({"code": "too_blue", "message": "the sky is too blue"})
        assert type(again) is HostFailed
        assert str(again) == "the sky is too blue"

    def test_an_error_that_is_not_ours_is_named(self) -> None:
        assert str(wire.error_from_wire(wire.error_to_wire(KeyError("x")))) == "KeyError: 'x'"

    @given(st.binary(max_size=200))
    def test_any_bytes_give_an_object_or_a_typed_error(self, line: bytes) -> None:
        """Decoding rubbish never fails in another way than with `BadFrame`."""
        try:
            assert isinstance(wire.decode(line), dict)
        except BadFrame:
            pass
