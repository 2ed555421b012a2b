"""The server over real sockets: HTTP, the WebSocket, logs, who is let in, and its end. 003, D9 and D11; R10."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from openjobs import GitJobStore, JobRunner, SpawnRequest, TurnResult
from openjobs.agents import Profiles
from openjobs.jobs import JobStatus
from openjobs.processes import ProcessSupervisor
from openjobs.runner import JobClient
from openjobs.server import Admitted, App, Places, RunnerBackend, TokenAuth, create_app
from openjobs.server.serving import Serving, listen_in_home, listen_on_loopback, remove_from_home
from tests.support import eventually
from tests.support.server import PATIENCE_S, TOKEN, Client, Socket, home_with_runner, raw, serving
from tests.support.turns import Turns

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "h"


@pytest.fixture
def runner(home: Path, turns: Turns) -> Iterator[JobRunner]:
    with home_with_runner(home, sync_fn=turns, workers=2) as (store, runner):
        store.create_session("s1", title="First")
        yield runner
        turns.finish_all()


@pytest.fixture
def client(runner: JobRunner) -> Iterator[Client]:
    with serving(runner) as (client, _):
        yield client


def ask(prompt: str, session_id: str = "s1", **more: Any) -> SpawnRequest:
    return SpawnRequest(prompt=prompt, parent_session_id=session_id, **more)


class TestWebSocket:
    def test_a_job_by_the_actions_of_the_spec(self, client: Client, turns: Turns) -> None:
        """spawn_job, list_jobs, get_job, cancel_job, await_jobs with the fields and answers of D9."""
        with client.open() as ws:
            spawned = ws.ask("spawn_job", session_id="s1", prompt="probe X", description="probe", agent_id="main")
            assert set(spawned) == {"action", "request_id", "job_id", "status", "parent_msg_id"}
            assert spawned["status"] in ("queued", "running")
            job_id = spawned["job_id"]
            turns["probe X"].until_started()
            turns["probe X"].request.partial("half of it")  # type: ignore[union-attr]
            eventually(lambda: ws.ask("get_job", job_id=job_id)["status"] == "running")
            found = ws.ask("get_job", job_id=job_id[:8])
            assert (found["job_id"], found["partial_result"], found["head_id"]) == (job_id, "half of it", None)
            assert found["result_text"] is None
            listed = ws.ask("list_jobs", session_id="s1", status_filter=["running"], limit=10)
            assert [row["job_id"] for row in listed["tasks"]] == [job_id]
            assert ws.ask("list_jobs", status_filter="queued")["tasks"] == []
            early = ws.ask("await_jobs", job_ids=[job_id], timeout_s=0)
            assert early["timed_out"]
            assert early["tasks"][0]["status"] == "running"
            ws.send(action="await_jobs", job_ids=[job_id], request_id=7)
            turns["probe X"].obeys = False
            cancelled = ws.ask("cancel_job", job_id=job_id, reason="enough")
            assert set(cancelled) == {"action", "request_id", "job_id", "status"}
            assert cancelled["status"] == "running"
            turns["probe X"].finish.set()
            waited = ws.answer(7)
            assert not waited["timed_out"]
            assert waited["tasks"][0]["status"] == "cancelled"
            assert waited["tasks"][0]["cancel_reason"] == "enough"

    def test_spawn_and_wait(self, client: Client, turns: Turns) -> None:
        """`wait` answers with the end; other requests of the connection are answered meanwhile."""
        with client.open() as ws:
            ws.send(action="spawn_job", session_id="s1", prompt="one", description="d", wait=True, request_id="w")
            turns["one"].until_started()
            assert ws.ask("ping")["epoch"]
            turns["one"].finish.set()
            assert ws.answer("w")["status"] == "completed"

    def test_wait_for_any(self, client: Client, turns: Turns) -> None:
        """The first that ends is enough."""
        with client.open() as ws:
            ids = [ws.ask("spawn_job", session_id="s1", prompt=name, description="")["job_id"] for name in "ab"]
            ws.send(action="await_jobs", job_ids=ids, mode="any", request_id=1)
            turns["b"].until_started()
            turns["b"].finish.set()
            answer = ws.answer(1)
            assert not answer["timed_out"]
            assert [row["status"] for row in answer["tasks"]] == ["running", "completed"]

    def test_a_wait_costs_no_thread_and_ends_with_its_connection(self, client: Client, turns: Turns) -> None:
        """Two hundred waits at once, over four connections; when those go, nothing of the waits is left."""
        with client.open() as ws:
            job_id = ws.ask("spawn_job", session_id="s1", prompt="one", description="")["job_id"]
        turns["one"].until_started()
        with ExitStack() as stack:
            sockets = [stack.enter_context(client.open()) for _ in range(4)]
            for ws in sockets:
                for number in range(50):
                    ws.send(action="await_jobs", job_ids=[job_id], request_id=number)
                assert ws.ask("ping")["now"]
            threads = threading.active_count()
            assert threads < 60, [thread.name for thread in threading.enumerate()]
            sockets[0].connection.close()
            turns["one"].finish.set()
            for ws in sockets[1:]:
                for number in range(50):
                    assert not ws.answer(number)["timed_out"]

    def test_errors_have_action_request_and_code(self, client: Client) -> None:
        """Each with a code that a program can tell from others, and a text that says what to do."""
        cases: list[tuple[dict[str, Any], str]] = [
            ({"action": "get_job", "job_id": "00000000-0000-4000-8000-000000000000"}, "unknown_job"),
            ({"action": "get_job"}, "invalid_input"),
            ({"action": "get_job", "job_id": 5}, "invalid_input"),
            ({"action": "get_job", "job_id": "../../etc"}, "invalid_input"),
            ({"action": "get_job", "job_id": "0", "extra": 1}, "invalid_input"),
            ({"action": "list_jobs", "limit": 501}, "invalid_input"),
            ({"action": "list_jobs", "limit": True}, "invalid_input"),
            ({"action": "list_jobs", "status_filter": "wrong"}, "invalid_input"),
            ({"action": "list_jobs", "session_id": "../x"}, "invalid_session_id"),
            ({"action": "spawn_job", "session_id": "nobody", "prompt": "x"}, "unknown_session"),
            ({"action": "spawn_job", "session_id": "s1"}, "invalid_input"),
            ({"action": "spawn_job", "session_id": "s1", "prompt": "x", "env": {"LD_PRELOAD": "x"}}, "invalid_input"),
            ({"action": "spawn_job", "session_id": "s1", "prompt": "x", "wait": 1}, "invalid_input"),
            ({"action": "cancel_job", "job_id": "0123", "reason": 5}, "invalid_input"),
            ({"action": "await_jobs", "job_ids": []}, "invalid_input"),
            ({"action": "await_jobs", "job_ids": ["0123"], "mode": "some"}, "invalid_input"),
            ({"action": "await_jobs", "job_ids": ["0123"], "timeout_s": -1}, "invalid_input"),
            ({"action": "subscribe", "after_seq": -1}, "invalid_input"),
            ({"action": "subscribe", "after_seq": 1.5}, "invalid_input"),
            ({"action": "shutdown"}, "invalid_input"),
            ({"action": "start_task", "session_id": "s1", "command": "id"}, "invalid_input"),
            ({"action": "__init__"}, "invalid_input"),
        ]
        with client.open() as ws:
            for number, (fields, code) in enumerate(cases):
                ws.send(**fields, request_id=number)
                answer = ws.answer(number)
                assert set(answer) == {"action", "request_id", "error"}, fields
                assert answer["action"] == fields["action"]
                assert answer["error"]["code"] == code, answer
                assert answer["error"]["message"]

    def test_request_ids(self, client: Client) -> None:
        """Text and numbers come back as they were; anything else is refused."""
        with client.open() as ws:
            for request_id in ("a", 0, -5, 1.5, "é" * 100, ""):
                ws.send(action="ping", request_id=request_id)
                assert ws.answer(request_id)["now"]
            ws.send(action="ping")
            assert ws.answer(None)["now"]
            wrongs: list[Any] = [True, [], {}, "x" * 201, 1e300, "\ud800", "a\udfffb"]
            for wrong in wrongs:
                ws.send(action="ping", request_id=wrong)
            refusals = ws.errors(len(wrongs))
            assert {error["error"]["code"] for error in refusals} == {"invalid_input"}
            assert {error["request_id"] for error in refusals} == {None}

    def test_bad_frames_hurt_nobody_else(self, client: Client) -> None:
        """Each is answered; another client notices nothing."""
        with client.open() as good, client.open() as bad:
            good.ask("subscribe")
            for frame in (
                "",
                "{",
                "[]",
                "null",
                "5",
                '"x"',
                "{}",
                '{"action":5}',
                '{"action":null}',
                "NaN",
                "[" * 10_000,
            ):
                bad.connection.send(frame)
            bad.connection.send(b"\x00\xff")
            bad.connection.send('{"action":"ping","request_id":1e999}')
            errors = bad.errors(13)
            assert {error["error"]["code"] for error in errors} <= {"bad_frame", "invalid_input"}
            assert good.ask("ping")["now"]
            assert bad.ask("ping")["now"]

    def test_too_long_a_frame_closes_that_connection(self, client: Client) -> None:
        """With 1009; the next one is served."""
        with client.open() as ws:
            ws.connection.send("x" * (1 << 20) + "x")
            with pytest.raises(ConnectionClosed):
                ws.take(PATIENCE_S)
            assert ws.connection.protocol.close_code == 1009
        with client.open() as ws:
            assert ws.ask("ping")["now"]

    def test_too_many_frames(self, client: Client) -> None:
        """Beyond two hundred at once they are refused, one by one, and later ones served again."""
        with client.open() as ws:
            for _ in range(260):
                ws.send(action="ping")
            while len(ws.answers) < 260:
                ws.take(PATIENCE_S)
            errors = [answer["error"]["code"] for answer in ws.answers if "error" in answer]
            assert set(errors) == {"rate_limited"}
            assert len(errors) <= 60

            def served() -> bool:
                ws.answers.clear()
                ws.send(action="ping", request_id="later")
                ws.take(PATIENCE_S)
                return "now" in ws.answers[0] and ws.answers[0]["request_id"] == "later"

            eventually(served, every=0.05)

    def test_the_end_of_a_job_of_this_host_is_heard(self, client: Client, runner: JobRunner, turns: Turns) -> None:
        """Of each, one after another."""
        turns.finish_at_once = True
        with client.open() as ws:
            ws.ask("subscribe")
            for number in range(15):
                job = runner.await_job(runner.submit(ask(f"n{number}")).job_id, 20)
                ws.until("job_status", job_id=job.job_id, status="completed")

    def test_another_process_is_heard(self, client: Client, home: Path, turns: Turns) -> None:
        """Its new jobs, their ends, and what it asks of ours. The store and runner here are as another process's."""
        with GitJobStore(home, durability="relaxed") as store, client.open() as ws:
            ws.ask("subscribe")
            other = JobRunner(store, sync_fn=lambda request, event: TurnResult(final_text="x"))
            try:
                for number in range(5):
                    job = other.await_job(other.submit(ask(f"other {number}")).job_id, 20)
                    ws.until("job_status", job_id=job.job_id, status="completed")
                mine = ws.ask("spawn_job", session_id="s1", prompt="mine", description="")["job_id"]
                turns["mine"].obeys = False
                turns["mine"].until_started()
                ws.until("job_status", job_id=mine, status="running")
                with JobClient(store) as looker:
                    looker.cancel(mine, "from elsewhere")
                while not (event := ws.until("job_status", job_id=mine))["task"]["cancel_requested_at"]:
                    ws.events.remove(event)
                assert event["task"]["cancel_reason"] == "from elsewhere"
                turns["mine"].finish.set()
            finally:
                other.shutdown(1.0)

    def test_a_dead_runner_is_noticed(self, client: Client, home: Path) -> None:
        """A job whose process is gone is ended, and told, without anybody asking."""
        with GitJobStore(home, durability="relaxed") as store, client.open() as ws:
            ws.ask("subscribe")
            gate = threading.Event()
            dead = JobRunner(store, sync_fn=lambda request, event: TurnResult(final_text=str(gate.wait(20))))
            try:
                job = dead.submit(ask("lost"))
                ws.until("job_status", job_id=job.job_id, status="running")
                dead._lease.release()  # as the kernel does when its process dies
                event = ws.until("job_status", job_id=job.job_id, status="errored")
                assert event["task"]["error"] == "worker died before completion"
            finally:
                gate.set()
                dead.shutdown(1.0)

    def test_the_same_events_again(self, client: Client, turns: Turns) -> None:
        """Who comes back with epoch and number gets what it missed, once each and in order, then what is new."""
        turns.finish_at_once = True
        with client.open() as ws:
            about = ws.ask("subscribe")
            ws.ask("spawn_job", session_id="s1", prompt="one", description="", wait=True)
            ws.until("running_task", running=False)
            first = [event for event in ws.events if event["event"] != "snapshot"]
        with client.open() as ws:
            ws.ask("spawn_job", session_id="s1", prompt="two", description="", wait=True)
            answer = ws.ask("subscribe", epoch=about["epoch"], after_seq=first[2]["seq"])
            assert answer["replayed"] >= 3
            ws.ask("spawn_job", session_id="s1", prompt="three", description="", wait=True)
            while len([event for event in ws.events if event.get("status") == "completed"]) < 3:
                ws.take(PATIENCE_S)
            numbers = [event["seq"] for event in ws.events]
            assert numbers == list(range(first[2]["seq"] + 1, first[2]["seq"] + 1 + len(numbers)))
            assert ws.events[0] == first[3]

    def test_unsubscribe(self, client: Client, turns: Turns) -> None:
        """Then there are answers only."""
        turns.finish_at_once = True
        with client.open() as ws:
            ws.ask("subscribe")
            ws.until("snapshot")
            assert ws.ask("unsubscribe") == {"action": "unsubscribe", "request_id": "r2"}
            ws.ask("spawn_job", session_id="s1", prompt="one", description="", wait=True)
            ws.ask("ping")
            assert [event["event"] for event in ws.events] == ["snapshot"]


class TestHttp:
    def test_the_same_as_the_socket(self, client: Client, turns: Turns) -> None:
        """List, get, spawn, cancel; one list is the other."""
        spawned = client.post("/api/jobs", {"session_id": "s1", "prompt": "**bold**", "description": "b"}, 201)
        job_id = spawned["job_id"]
        turns["**bold**"].until_started()
        eventually(lambda: client.get(f"/api/jobs/{job_id}")["status"] == "running")
        with client.open() as ws:
            listed = client.get("/api/jobs?status=running,queued&session=s1")
            answer = ws.ask("list_jobs", status_filter=["running", "queued"], session_id="s1")
            assert listed == {name: value for name, value in answer.items() if name not in ("action", "request_id")}
        assert listed["running_total"] == 1
        turns["**bold**"].obeys = False
        assert client.post(f"/api/jobs/{job_id}/cancel", {"reason": "r"})["status"] == "running"
        turns["**bold**"].finish.set()
        done = eventually(lambda: (found := client.get(f"/api/jobs/{job_id}"))["status"] == "cancelled" and found)
        assert done["prompt_html"] == "<p><strong>bold</strong></p>\n"
        assert done["cancel_reason"] == "r"
        assert done["session_title"] == "First"

    def test_history_and_conversation(self, client: Client, runner: JobRunner, turns: Turns) -> None:
        """The commits of a job's life; its branch; its card; the head moved to it."""
        session = runner.store.session("s1")
        first = session.append("user", "hello")
        turns.finish_at_once = True
        job = runner.await_job(runner.submit(ask("look", description="a look")).job_id, 20)
        history = client.get(f"/api/jobs/{job.job_id}/history")
        assert [(each["status"], each["kind"]) for each in history["commits"]] == [
            (status, "transition") for status in ("pending", "queued", "running", "completed")
        ]
        assert all(re.fullmatch(r"[0-9a-f]{40}", each["commit_id"]) for each in history["commits"])
        shown = client.get("/api/sessions/s1/conversation")
        assert [message["id"] for message in shown["messages"]] == [first.id, job.attach_id]
        card = shown["messages"][1]["attach"]
        assert (card["job_id"], card["status"], card["head_id"]) == (job.job_id, "completed", job.head_id)
        branch = shown["branches"][0]
        assert (branch["head_id"], branch["fork_id"], branch["label"]) == (job.head_id, first.id, "a look")
        shown = client.get(f"/api/sessions/s1/conversation?head={job.head_id}")
        assert [message["content"] for message in shown["messages"] if not message["attach"]] == [
            "hello",
            "look",
            "did look",
        ]
        assert shown["branches"][0]["current"]
        page = client.get(f"/api/sessions/s1/conversation?head={job.head_id}&limit=1")
        assert page["more_before"] == job.head_id
        page = client.get(f"/api/sessions/s1/conversation?head={job.head_id}&limit=5&before={job.head_id}")
        assert [message["content"] for message in page["messages"] if not message["attach"]] == ["hello", "look"]
        assert client.post("/api/sessions/s1/checkout", {"node_id": job.head_id})["head_id"] == job.head_id
        assert session.head_id == job.head_id
        assert client.get("/api/sessions/s1/conversation")["head_id"] == job.head_id
        client.post("/api/sessions/s1/checkout", {"node_id": "nobody"}, 404)
        client.get("/api/sessions/s1/conversation?head=nobody", 404)
        client.get("/api/sessions/nobody/conversation", 404)

    def test_cards_that_hang_on_no_message(self, client: Client, runner: JobRunner, turns: Turns) -> None:
        """A session that began with jobs: their cards are shown where its conversation begins, in pages, too."""
        turns.finish_at_once = True
        jobs = [runner.await_job(runner.submit(ask(f"n{number}")).job_id, 20) for number in range(3)]
        shown = client.get("/api/sessions/s1/conversation")
        assert (shown["head_id"], shown["session_head_id"]) == (None, None)
        assert [message["attach"]["job_id"] for message in shown["messages"]] == [job.job_id for job in jobs]
        page = client.get("/api/sessions/s1/conversation?limit=2")
        assert [message["id"] for message in page["messages"]] == [job.attach_id for job in jobs[1:]]
        page = client.get(f"/api/sessions/s1/conversation?limit=2&before={page['more_before']}")
        assert [message["id"] for message in page["messages"]] == [jobs[0].attach_id]
        runner.store.session("s1").append("user", "hello")
        assert client.get("/api/sessions/s1/conversation")["head_id"]
        assert len(client.get("/api/sessions/s1/conversation?head=root")["messages"]) == 3

    def test_sessions_profiles_about(self, client: Client, runner: JobRunner, turns: Turns) -> None:
        """What the panel begins with."""
        turns.finish_at_once = True
        runner.store.create_session("s2", title="Second")
        runner.await_job(runner.submit(ask("x", "s2")).job_id, 20)
        found = eventually(
            lambda: (s := client.get("/api/sessions")["sessions"])[0]["counts"] == {"completed": 1} and s
        )
        assert [(each["session_id"], each["title"], each["running"]) for each in found] == [
            ("s2", "Second", 0),
            ("s1", "First", 0),
        ]
        assert client.get("/api/profiles") == {"profiles": []}
        about = client.get("/api/about")
        assert (about["mode"], about["workers"]) == ("host", 2)

    def test_bulk_cancel(self, client: Client, runner: JobRunner) -> None:
        """Each by itself: one that is not there keeps no other from being stopped."""
        ids = [runner.submit(ask(f"n{number}")).job_id for number in range(5)]
        missing = "00000000-0000-4000-8000-000000000000"
        results = client.post("/api/cancel", {"job_ids": [*ids, missing], "reason": "all"})["results"]
        assert [result["job_id"] for result in results] == [*ids, missing]
        assert results[-1]["error"]["code"] == "unknown_job"
        assert runner.wait_idle(20)
        assert {runner.get(job_id).status for job_id in ids} == {JobStatus.CANCELLED}

    def test_errors(self, client: Client) -> None:
        """A status that fits, and the code."""
        cases = [
            ("GET", "/api/jobs/00000000-0000-4000-8000-000000000000", None, 404, "unknown_job"),
            ("GET", "/api/jobs/..%2f..%2fetc", None, 404, "not_found"),
            ("GET", "/api/jobs/zz", None, 400, "invalid_input"),
            ("GET", "/api/jobs?limit=x", None, 400, "invalid_input"),
            ("GET", "/api/jobs?limit=0", None, 400, "invalid_input"),
            ("GET", "/api/jobs?nothing=1", None, 400, "invalid_input"),
            ("GET", "/api/jobs?limit=1&limit=2", None, 400, "invalid_input"),
            ("GET", "/api/nothing", None, 404, "not_found"),
            ("GET", "/api/log/00000000-0000-4000-8000-000000000000", None, 404, "not_found"),
            ("POST", "/api/jobs", b"{", 400, "bad_frame"),
            ("POST", "/api/jobs", b"[]", 400, "bad_frame"),
            ("POST", "/api/jobs", b"x" * (1 << 20) + b"x", 413, "too_large"),
            ("DELETE", "/api/jobs", None, 405, "invalid_input"),
            ("PUT", "/api/jobs/zz/cancel", b"{}", 405, "invalid_input"),
            ("POST", "/healthz", b"{}", 405, "invalid_input"),
            ("POST", "/", b"{}", 405, "invalid_input"),
            ("GET", "/api/ws", None, 404, "not_found"),
        ]
        for method, path, body, status, code in cases:
            found, headers, answer = client.request(method, path, body)
            assert found == status, (method, path, answer)
            assert headers["content-type"] == "application/json"
            assert json.loads(answer)["error"]["code"] == code, (method, path)
            assert json.loads(answer)["error"]["message"]
        assert client.request("DELETE", "/api/jobs")[1]["allow"] == "GET, HEAD, POST"
        assert client.request("GET", "/api/cancel")[1]["allow"] == "POST"
        status, _, answer = client.request("POST", "/api/jobs", b"{}", {"Content-Type": "text/plain"})
        assert (status, json.loads(answer)["error"]["code"]) == (415, "invalid_input")

    @pytest.mark.parametrize(
        "request_bytes",
        [
            b"GET /healthz HTTP/1.1\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
            b"nonsense\r\n\r\n",
        ],
    )
    def test_what_is_no_request_gets_an_error_like_the_others(self, request_bytes: bytes, client: Client) -> None:
        """No route and no check of ours has seen it."""
        head, _, body = raw(client.port, request_bytes).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: application/json" in head.lower()
        assert b"default-src 'none'" in head
        error = json.loads(body)["error"]
        assert error["code"] == "invalid_input"
        assert "Host" in error["message"]
        assert client.get("/healthz") == {"status": "ok"}

    def test_too_many_connections_get_one_too(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever comes when all are taken is told so, and the next one is served when there is room again."""
        monkeypatch.setattr("openjobs.server.serving.CONCURRENCY", 2)
        with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE_S) as one:
            one.sendall(f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode())
            assert b" 200 " in one.recv(65536).split(b"\r\n")[0]
            assert client.get("/api/about", 503)["error"]["code"] == "unavailable"
            assert "default-src 'none'" in client.request("GET", "/")[1]["content-security-policy"]
        eventually(lambda: client.request("GET", "/healthz")[0] == 200)

    def test_metrics_and_health(self, client: Client, runner: JobRunner) -> None:
        """Health is open to all; metrics are not."""
        runner.submit(ask("x"))
        eventually(lambda: b'openjobs_jobs{status="running"} 1.0' in client.request("GET", "/metrics")[2])
        _, headers, text = client.request("GET", "/metrics")
        assert headers["content-type"].startswith("text/plain")
        assert b"openjobs_runner_workers 2.0" in text
        stranger = Client(client.port, token=None)
        assert stranger.get("/healthz") == {"status": "ok"}
        stranger.get("/metrics", 401)

    def test_what_every_answer_says_to_the_browser(self, client: Client) -> None:
        """No frame, no sniffing, no script but from here, nothing kept."""
        for path in ("/", "/healthz", "/api/about", "/api/nothing", "/metrics"):
            _, headers, _ = client.request("GET", path)
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] in ("no-store", "no-cache")
            assert "server" not in headers
            assert "access-control-allow-origin" not in headers

    def test_without_the_panels_files(self, runner: JobRunner, tmp_path: Path) -> None:
        """A page says how to get them; the rest works."""
        with serving(runner, static=tmp_path / "none") as (client, _):
            status, _, page = client.request("GET", "/")
            assert status == 200
            assert b"nox -s panel" in page
            assert b"<script" not in page
            assert client.get("/api/about")["mode"] == "host"

    def test_the_panels_files(self, runner: JobRunner, tmp_path: Path) -> None:
        """Those in the folder and no others, whatever the address says; a link in it leads nowhere."""
        (tmp_path / "static" / "assets").mkdir(parents=True)
        (tmp_path / "static" / "index.html").write_text("<!doctype html>panel")
        (tmp_path / "static" / "assets" / "index-1a.js").write_text("1")
        (tmp_path / "secret.svg").write_text("secret")
        (tmp_path / "static" / "link.svg").symlink_to(tmp_path / "secret.svg")
        with serving(runner, static=tmp_path / "static") as (client, _):
            stranger = Client(client.port, token=None)
            status, headers, page = stranger.request("GET", "/?job=1")
            assert (status, page) == (200, b"<!doctype html>panel")
            status, headers, _ = stranger.request("GET", "/assets/index-1a.js")
            assert (status, headers["content-type"]) == (200, "text/javascript; charset=utf-8")
            assert "immutable" in headers["cache-control"]
            for path in (
                *("/link.svg", "/secret.svg", "/assets/none.js", "/assets/..%2f..%2fsecret.svg", "/..%2fsecret.svg"),
                *("/assets/%2e%2e/%2e%2e/secret.svg", "/assets/", "/assets", "/assets/.hidden"),
                *("//etc/passwd", "/assets//etc/passwd", "/assets/x%00.js", "/assets/../../secret.svg"),
            ):
                for who in (client, stranger):
                    status, _, body = who.request("GET", path)
                    assert status in (400, 401, 404), path
                    assert b"secret" not in body


class TestLogs:
    @pytest.fixture
    def runner(self, home: Path) -> Iterator[JobRunner]:
        with GitJobStore(home, durability="relaxed") as store, Profiles(home, disk=store.disk) as profiles:
            store.create_session("s1")
            runner = JobRunner(store, profiles=profiles)
            try:
                yield runner
            finally:
                runner.shutdown(2.0)

    def shell(self, runner: JobRunner, script: str) -> str:
        return runner.submit(ask(script, agent_id="shell", cwd=str(runner.store.home))).job_id

    def test_ranges(self, client: Client, runner: JobRunner) -> None:
        """Any piece by byte offset, its end, the whole as a file, one stream of the two."""
        job_id = self.shell(runner, "printf 'one\\ntwo\\n'; printf 'three\\n' >&2")
        runner.await_job(job_id, 20)

        def whole() -> bool:
            return client.request("GET", f"/api/log/{job_id}")[1].get("x-log-complete") == "true"

        eventually(whole)
        status, headers, body = client.request("GET", f"/api/log/{job_id[:8]}")
        assert status == 200
        assert sorted(body.splitlines()) == [b"one", b"three", b"two"]
        assert (headers["x-log-offset"], headers["x-log-next-offset"], headers["x-log-size"]) == ("0", "14", "14")
        assert headers["content-type"].startswith("text/plain")
        assert "sandbox" in headers["content-security-policy"]
        assert client.request("GET", f"/api/log/{job_id}?offset=2&limit=3")[2] == body[2:5]
        assert client.request("GET", f"/api/log/{job_id}?tail=4")[2] == body[-4:]
        assert client.request("GET", f"/api/log/{job_id}?tail=400")[2] == body
        assert client.request("GET", f"/api/log/{job_id}?offset=400")[2] == b""
        assert client.request("GET", f"/api/log/{job_id}?stream=stderr")[2] == b"three\n"
        status, headers, part = client.request("GET", f"/api/log/{job_id}", headers={"Range": "bytes=3-6"})
        assert (status, part, headers["content-range"]) == (206, body[3:7], "bytes 3-6/14")
        status, headers, said = client.request("GET", f"/api/log/{job_id}", headers={"Range": "bytes=14-"})
        assert (status, headers["content-range"]) == (416, "bytes */14")
        assert headers["content-type"] == "application/json"
        assert json.loads(said)["error"]["code"] == "invalid_input"
        status, headers, part = client.request("GET", f"/api/log/{job_id}?download=1")
        assert (status, part) == (200, body)
        assert headers["content-disposition"].startswith("attachment; filename=")
        assert client.request("GET", f"/api/log/{job_id}?offset=-1")[0] == 400
        assert client.request("GET", f"/api/log/{job_id}?stream=stdin")[0] == 400

    def test_a_stream_is_the_log(self, client: Client, runner: JobRunner) -> None:
        """Every byte once, in order, from any offset, characters whole; then it ends with the outcome."""
        text = "".join(f"{number} é€😀\n" for number in range(300))
        path = Path(str(runner.store.home)) / "text"
        path.write_text(text)
        job_id = self.shell(runner, f"head -c 1001 {path}; sleep 0.3; tail -c +1002 {path}")
        events = list(self.follow(client, job_id))
        data = [fields for name, _, fields in events if name == "data"]
        assert "".join(fields["text"] for fields in data) == text
        offset = 0
        for (_, identity, fields), _ in zip([e for e in events if e[0] == "data"], data, strict=True):
            assert fields["offset"] == offset
            offset += len(fields["text"].encode())
            assert fields["next_offset"] == offset == int(identity)
        assert events[-1][0] == "end"
        assert events[-1][2] == {"size": len(text.encode()), "outcome": "completed"}
        middle = data[len(data) // 2]["next_offset"] if len(data) > 1 else 0
        again = list(self.follow(client, job_id, last=str(middle)))
        assert "".join(f["text"] for name, _, f in again if name == "data") == text.encode()[middle:].decode()

    def test_bytes_that_are_no_text(self, client: Client, runner: JobRunner) -> None:
        """They are shown as U+FFFD and counted as they are."""
        job_id = self.shell(runner, "printf 'a\\377\\376b\\303'")
        events = list(self.follow(client, job_id))
        assert "".join(f["text"] for name, _, f in events if name == "data") == "a\ufffd\ufffdb\ufffd"
        assert events[-1][2]["size"] == 5

    def test_a_log_that_will_never_be(self, client: Client, runner: JobRunner) -> None:
        """Of a job that is not there, and of one that ends without a log."""
        found = list(self.follow(client, "00000000-0000-4000-8000-000000000000"))
        assert [(name, fields["code"]) for name, _, fields in found] == [("failed", "not_found")]
        job_id = runner.submit(ask("x", agent_id="echo")).job_id
        runner.await_job(job_id, 20)
        found = list(self.follow(client, job_id))
        assert [name for name, _, _ in found] == ["waiting", "failed"]

    def follow(self, client: Client, job_id: str, last: str | None = None) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Event name, id and fields, until the server ends the stream."""
        head = f"GET /api/log/{job_id}/stream HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {TOKEN}\r\n" + (f"Last-Event-ID: {last}\r\n" if last else "") + "\r\n"
        with socket.create_connection(("127.0.0.1", client.port), timeout=30) as sock:
            sock.sendall(head.encode())
            answer = sock.makefile("rb").read()
        body = b""
        rest = answer.partition(b"\r\n\r\n")[2]
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
        for block in body.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != ":")
            if "event" in fields:
                yield fields["event"], fields.get("id", ""), json.loads(fields["data"])


class TestProcesses:
    def test_beside_jobs(self, home: Path) -> None:
        """Listed, shown whole, followed, stopped with a reason; their changes are events, too."""
        with GitJobStore(home, durability="relaxed") as store:
            store.create_session("s1")
            runner = JobRunner(store, sync_fn=Turns(finish_at_once=True))
            supervisor = ProcessSupervisor(store, worker_id=runner.runner_id)
            try:
                with serving(RunnerBackend(runner, supervisor=supervisor)) as (client, _), client.open() as ws:  # type: ignore[arg-type]
                    ws.ask("subscribe")
                    task = supervisor.start("s1", ["sh", "-c", "echo hi; sleep 60"], description="a sleeper")
                    event = ws.until("task_created", task_id=task.task_id)
                    assert event["task"]["kind"] == "process"
                    assert ws.until("running_task", task_id=task.task_id)["running_total"] == 1
                    listed = client.get("/api/jobs?kind=process&session=s1")
                    assert [(row["id"], row["subject"], row["status"]) for row in listed["tasks"]] == [
                        (task.task_id, "a sleeper", "running")
                    ]
                    assert listed["counts"] == {"running": 1}
                    assert client.get("/api/jobs")["tasks"] == []
                    whole = client.get(f"/api/processes/{task.task_id[:8]}")
                    assert whole["command"] == "sh -c 'echo hi; sleep 60'"
                    eventually(lambda: client.request("GET", f"/api/log/{task.task_id}")[2] == b"hi\n")
                    answer = ws.ask("stop_task", task_id=task.task_id, reason="enough", grace_s=1)
                    assert answer["task_id"] == task.task_id
                    ended = ws.until("job_status", task_id=task.task_id, status="cancelled")
                    assert ended["task"]["cancel_reason"] == "enough"
                    assert ws.until("running_task", task_id=task.task_id, running=False)["running_total"] == 0
            finally:
                supervisor.close()
                runner.shutdown(1.0)


#: what a trick may be answered with
REFUSED = (b"400", b"401", b"403", b"421")


def status_of(answer: bytes) -> bytes:
    return answer.split(b" ")[1] if b" " in answer else b""


def closing_code(ws: Socket) -> int | None:
    """With what the server closed it."""
    try:
        while True:
            ws.take(PATIENCE_S)
    except ConnectionClosed as closed:
        return None if closed.rcvd is None else closed.rcvd.code


def handshake(port: int, *headers: str, path: str = "/api/ws") -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        *headers,
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
    ]
    return raw(port, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))


class TestWhoIsLetIn:
    def login(self, client: Client, auth: TokenAuth) -> str:
        """The cookie that a browser would have."""
        status, headers, _ = Client(client.port, None).request("POST", "/api/login", {"code": auth.code()})
        assert status == 204
        return headers["set-cookie"].partition(";")[0]

    def test_sixty_tricks_with_host_and_origin(self, runner: JobRunner) -> None:
        """None is let in, though each brings a good cookie: neither over HTTP nor to the WebSocket."""
        auth = TokenAuth(TOKEN)
        with serving(runner, auth=auth) as (client, _):
            port = client.port
            own = f"127.0.0.1:{port}"
            cookie = f"Cookie: {self.login(client, auth)}"
            hosts = [
                "evil.example",
                f"evil.example:{port}",
                f"127.0.0.1.evil.example:{port}",
                f"localhost.evil.example:{port}",
                f"127.0.0.1:{port}.evil.example",
                f"127.0.0.1:{port}@evil.example",
                f"evil.example@127.0.0.1:{port}",
                f"localhost.:{port}",
                f"LOCALHOST:{port}",
                f"127.1:{port}",
                f"2130706433:{port}",
                f"0x7f000001:{port}",
                f"0177.0.0.1:{port}",
                f"0.0.0.0:{port}",
                f"[::]:{port}",
                f"[::ffff:127.0.0.1]:{port}",
                f"127.0.0.2:{port}",
                f"127.0.0.1:{port + 1}",
                f"127.0.0.1:0{port}",
                "127.0.0.1",
                "localhost",
                "127.0.0.1:",
                "",
                f"127.0.0.1:{port} evil.example",
                f"127.0.0.1:{port},evil.example",
                f"127.0.0.1:{port}/",
                f"127.0.0.1:{port}#",
                f"http://127.0.0.1:{port}",
                f"169.254.169.254:{port}",
                f"rbndr.us:{port}",
            ]
            origins = [
                "null",
                "",
                "http://evil.example",
                f"http://evil.example:{port}",
                f"https://127.0.0.1:{port}",
                f"http://127.0.0.1:{port + 1}",
                "http://127.0.0.1",
                "http://localhost",
                f"http://127.0.0.1:{port}.evil.example",
                f"http://127.0.0.1.evil.example:{port}",
                f"http://evil.example/127.0.0.1:{port}",
                f"http://127.0.0.1:{port}/",
                f"http://127.0.0.1:{port}@evil.example",
                f"http://evil.example@127.0.0.1:{port}",
                f"HTTP://127.0.0.1:{port}",
                f"http://LOCALHOST:{port}",
                f"http://localhost.:{port}",
                f"http://127.0.0.1:{port}, http://evil.example",
                f"http://127.0.0.1:{port} http://evil.example",
                f"http://127.0.0.1:{port}#",
                f"http://127.0.0.1:{port}?",
                f"http://127.0.0.1:0{port}",
                f"http://0.0.0.0:{port}",
                f"http://[::]:{port}",
                f"http://2130706433:{port}",
                "file://",
                f"ws://127.0.0.1:{port}",
                f"//127.0.0.1:{port}",
                f"127.0.0.1:{port}",
                "chrome-extension://abcdefghijklmnop",
                "*",
                "http://*",
            ]
            tricks: list[tuple[str, ...]] = [(f"Host: {host}", f"Origin: http://{own}") for host in hosts]
            tricks += [(f"Host: {own}", f"Origin: {origin}") for origin in origins]
            tricks += [
                (f"Host: {own}",),  # a WebSocket with a cookie and no Origin at all
                (f"Host: {own}", f"Origin: http://{own}", "Origin: http://evil.example"),
                (f"Host: {own}", "Host: evil.example", f"Origin: http://{own}"),
                ("Host: evil.example", f"X-Forwarded-Host: {own}", f"Origin: http://{own}"),
                ("Host: evil.example", f"Forwarded: host={own}", f"Origin: http://{own}"),
                (f"Host: {own}", "Origin: http://evil.example", f"Referer: http://{own}/"),
                (f"Host: {own}", f"Origin: http://{own}", "Sec-Fetch-Site: cross-site"),
                (f"Host: {own}", f"Origin: http://{own}", "Sec-Fetch-Site: same-site"),
            ]
            assert len(tricks) >= 60
            body = json.dumps({"job_ids": ["0123"]})
            for headers in tricks:
                answer = handshake(port, *headers, cookie)
                assert answer.split(b"\r\n")[0].split()[1:2] in ([b"400"], [b"401"], [b"403"], [b"421"]), (
                    headers,
                    answer,
                )
                lines = ["POST /api/cancel HTTP/1.1", *headers, cookie, "Content-Type: application/json"]
                request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", body])
                answer = raw(port, request.encode("latin-1"))
                assert answer.split(b"\r\n")[0].split()[1:2] in ([b"400"], [b"401"], [b"403"], [b"421"]), (
                    headers,
                    answer,
                )
                assert b"results" not in answer
            good = (f"Host: {own}", f"Origin: http://{own}", cookie)
            assert b" 101 " in handshake(port, *good).split(b"\r\n")[0], "the same without a trick is let in"
            assert b" 401 " in handshake(port, *good[:2]).split(b"\r\n")[0]

    def test_the_absolute_form_does_not_hide_the_host(self, runner: JobRunner) -> None:
        """`GET http://127.0.0.1:…/` with another Host is judged by that Host."""
        with serving(runner) as (client, _):
            target = f"GET http://127.0.0.1:{client.port}/api/about HTTP/1.1\r\n"
            head = f"Authorization: Bearer {TOKEN}\r\n\r\n"
            answer = raw(client.port, f"{target}Host: evil.example\r\n{head}".encode())
            assert b" 200 " not in answer.split(b"\r\n")[0]

    def test_login_and_logout(self, runner: JobRunner, caplog: pytest.LogCaptureFixture) -> None:
        """A code gives a cookie once; the cookie opens what it should; nothing secret is in any log."""
        auth = TokenAuth(TOKEN)
        caplog.set_level(0)
        with serving(runner, auth=auth) as (client, _):
            stranger = Client(client.port, None)
            stranger.get("/api/about", 401)
            code = auth.code()
            status, headers, _ = stranger.request("POST", "/api/login", {"code": code})
            assert status == 204
            assert "HttpOnly" in headers["set-cookie"]
            assert "SameSite=Strict" in headers["set-cookie"]
            cookie = headers["set-cookie"].partition(";")[0]
            assert stranger.request("POST", "/api/login", {"code": code})[0] == 401
            assert stranger.request("GET", "/api/about", headers={"Cookie": cookie})[0] == 200
            own = f"http://127.0.0.1:{client.port}"
            assert stranger.request("POST", "/api/logout", {}, {"Cookie": cookie})[0] == 403
            status, headers, _ = stranger.request("POST", "/api/logout", {}, {"Cookie": cookie, "Origin": own})
            assert (status, "Max-Age=0" in headers["set-cookie"]) == (204, True)
            assert stranger.request("POST", "/api/login", {"token": TOKEN})[0] == 204
            with stranger.open(headers={"Cookie": cookie}, origin=own) as ws:
                assert ws.ask("ping")["now"]
            with pytest.raises(InvalidStatus) as refused, stranger.open(headers={}, origin=own):
                pass
            assert refused.value.response.status_code == 401
            for _ in range(30):
                stranger.request("POST", "/api/login", {"token": "guess"})
            assert stranger.request("POST", "/api/login", {"token": TOKEN})[0] == 204, "guesses lock nobody out"
        said = [record.getMessage() for record in caplog.records if record.name != "websockets.client"]
        assert said, "something was logged, so that this can fail"
        for secret in (TOKEN, code, cookie.partition("=")[2]):
            assert not [line for line in said if secret in line]

    def test_a_login_that_ends_closes_the_socket(self, runner: JobRunner) -> None:
        """With 4401, at the next frame."""
        now = [time.time()]
        auth = TokenAuth(TOKEN, now=lambda: now[0] - 7 * 86_400 + 2)
        with serving(runner, auth=auth) as (client, _):
            cookie = auth.cookie(secure=False, path="/").partition(";")[0]
            own = f"http://127.0.0.1:{client.port}"
            with client.open(headers={"Cookie": cookie}, origin=own) as ws:
                assert ws.ask("ping")["now"]

                def closed() -> bool:
                    try:
                        ws.ask("ping")
                    except ConnectionClosed as error:
                        return error.rcvd is not None and error.rcvd.code == 4401
                    return False

                eventually(closed, every=0.1)

    @pytest.mark.parametrize(
        "path",
        [
            "/api/jobs",
            "/api/jobs/0123/cancel",
            "/api/cancel",
            "/api/processes/0123/stop",
            "/api/sessions/s1/checkout",
            "/api/login",
        ],
    )
    def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_failure(
        self, runner: JobRunner, path: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing is logged, nothing is answered, nothing is done."""
        app = create_app(runner, auth=TokenAuth(TOKEN), places=Places.loopback(80))
        came = [{"type": "http.request", "body": b'{"a":', "more_body": True}, {"type": "http.disconnect"}]
        headers = {
            "host": "127.0.0.1:80",
            "authorization": f"Bearer {TOKEN}",
            "content-type": "application/json",
            "content-length": "50",
        }
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "scheme": "http",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        answers: list[Any] = []

        async def receive() -> Any:
            return came.pop(0)

        async def send(message: Any) -> None:
            answers.append(message)

        try:
            asyncio.run(app(scope, receive, send))
        finally:
            app.close()
        assert (came, answers) == ([], [])
        assert caplog.records == []

    def test_a_home_of_its_own_socket(self, runner: JobRunner, scratch: Path) -> None:
        """The Unix socket is for this user alone; the token is asked for there, too."""
        listener = listen_in_home(scratch)
        assert listener is not None
        assert (scratch / "serve.sock").stat().st_mode & 0o777 == 0o600
        app = create_app(runner, auth=TokenAuth(TOKEN), places=Places.loopback(0))
        server = Serving(app, [listener])
        try:
            server.start()
            for token, status in ((TOKEN, b"200"), ("wrong", b"401")):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(10)
                    sock.connect(str(scratch / "serve.sock"))
                    request = f"GET /api/about HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
                    sock.sendall((request + "Connection: close\r\n\r\n").encode())
                    answer = sock.makefile("rb").read()
                    assert answer.split()[1] == status
        finally:
            server.stop()
            listener.close()
            remove_from_home(scratch)


class TestMounted:
    def test_under_a_prefix_with_an_authentication_of_its_own(self, runner: JobRunner, turns: Turns) -> None:
        """A host program mounts the app in its own; its own answer to "who is it" counts."""
        from starlette.applications import Starlette
        from starlette.routing import Mount

        class Own:
            async def admit(self, headers: Any, scope: Any) -> Admitted | None:
                await asyncio.sleep(0)
                known = headers.get("x-user") == ["me"]
                return Admitted(by_cookie=True) if known else None

        turns.finish_at_once = True
        inner = create_app(runner, auth=Own())
        outer = Starlette(routes=[Mount("/tools/jobs", app=inner)])
        listener = listen_on_loopback(0)
        try:
            with running(outer, listener, inner):
                client = Client(listener.getsockname()[1], None, prefix="/tools/jobs")
                me = {"X-User": "me"}
                assert client.request("GET", "/api/about")[0] == 401
                assert client.request("GET", "/api/about", headers=me)[0] == 200
                assert client.request("GET", "/", headers=me)[0] == 200
                own = f"http://127.0.0.1:{client.port}"
                with client.open(headers=me, origin=own) as ws:
                    spawned = ws.ask("spawn_job", session_id="s1", prompt="x", description="", wait=True)
                    assert spawned["status"] == "completed"
                with pytest.raises(InvalidStatus), client.open(headers=me, origin="http://evil.example"):
                    pass
                with pytest.raises(InvalidStatus), client.open(headers=me):
                    pass
                assert client.request("POST", "/api/login", {"code": "x"}, {"Origin": own})[0] == 404
        finally:
            listener.close()

    def test_a_prefix_that_nobody_takes_away(self, runner: JobRunner) -> None:
        """For a server or proxy that passes paths on as they are."""
        with serving(runner, prefix="/jobs") as (client, _):
            assert client.get("/api/about")["mode"] == "host"
            with client.open() as ws:
                assert ws.ask("ping")["now"]
            status, headers, _ = client.request("GET", "")
            assert (status, headers["location"]) == (307, "/jobs/")
            outside = Client(client.port)
            for path in ("/api/about", "/jobsx/api/about", "/"):
                outside.get(path, 404)
            status, headers, _ = client.request("POST", "/api/login", {"token": TOKEN})
            assert "; Path=/jobs/" in headers["set-cookie"]


class running:  # a context manager, used as one
    """Any ASGI app on a socket, as another program would run it."""

    def __init__(self, app: Any, listener: socket.socket, inner: App) -> None:
        import uvicorn

        config = uvicorn.Config(app, log_config=None, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._inner = inner
        self._copy = listener.dup()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._copy])), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        eventually(lambda: self._server.started)

    def __exit__(self, *exc: object) -> None:
        self._inner.begin_close()
        self._server.should_exit = True
        self._thread.join(10)
        self._inner.close()
        self._copy.close()


class TestEnding:
    def test_with_open_sockets_nobody_is_waited_for(self, runner: JobRunner, turns: Turns) -> None:
        """WebSockets that read, that do not, that are half open, waits, streams: all end, readers with 1012."""
        with ExitStack() as stack:
            with serving(runner) as (client, _):
                job_id = client.post("/api/jobs", {"session_id": "s1", "prompt": "x", "description": ""}, 201)["job_id"]
                turns["x"].until_started()
                sockets = [stack.enter_context(client.open()) for _ in range(20)]
                for ws in sockets:
                    ws.ask("subscribe")
                    ws.send(action="await_jobs", job_ids=[job_id])
                for head in (b"", b"GET /api/ws HTTP/1.1\r\n", _stream_request(client.port, job_id)):
                    silent = stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
                    silent.sendall(head)
            for ws in sockets:
                assert closing_code(ws) == 1012


def _stream_request(port: int, job_id: str) -> bytes:
    head = f"GET /api/log/{job_id}/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    return f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode()
