"""Tests of the server under load and in trouble: full queues, deadlines, disconnects, faults, shutdown."""

import asyncio
import json
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from laneformer.engine.cpu.decoder import CpuDecoder
from laneformer.serve.options import ServerOptions
from laneformer.serve.scheduler import Busy, Running, Scheduler, ServingError
from tests.laneformer.serve.conftest import in_process, wait_until
from tests.laneformer.serve.endpoint import TALK, count_of, data_of, error_of, on_a_loop

PATH = "/v1/completions"
LONG = {"prompt": "The quick", "max_tokens": 8000, "ignore_eos": True}
SHORT = {"prompt": "The quick", "max_tokens": 3, "ignore_eos": True}


def error_in(stream: str) -> str:
    *_, error, end = data_of(stream)
    assert end == "[DONE]"
    return json.loads(error)["error"]["message"]


# In this process


class Visit:
    """A request whose client reads all that comes, and may leave."""

    def __init__(self, app, **body):
        self.status = 0
        self.received = b""
        self._unsent = json.dumps(body).encode()
        self._gone = asyncio.Event()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "headers": headers,
            "query_string": b"",
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def leave(self):
        self._gone.set()
        await self.task

    async def _receive(self) -> dict[str, Any]:
        if self._unsent is not None:
            body = self._unsent
            self._unsent = None
            return {"type": "http.request", "body": body}
        # ASGI: the next message after the body is the disconnect
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]):
        self.status = message.get("status", self.status)
        self.received += message.get("body", b"")


async def until(condition: Callable[[], object], timeout_s: float = 120.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def slow(slow_folder):
    with in_process(slow_folder, max_waiting=1, keep_alive_s=0.05) as client:
        yield client.app


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(slow, stream):
    scheduler = slow.state.scheduler
    tokens = scheduler.totals.generated_tokens
    cancelled = scheduler.totals.ended["cancelled"]

    async def leave():
        visit = Visit(slow, **LONG, stream=stream)
        await until(lambda: scheduler.totals.generated_tokens > tokens)
        await visit.leave()
        await until(lambda: not scheduler.running)

    asyncio.run(leave())
    assert scheduler.totals.ended["cancelled"] == cancelled + 1
    # far from the end of the answer
    assert scheduler.totals.generated_tokens - tokens < 6000


def test_a_full_queue_and_who_leaves_it(slow):
    scheduler = slow.state.scheduler

    async def fill(client):
        visits = [Visit(slow, **LONG, stream=True) for _ in range(scheduler.max_joined)]
        await until(lambda: len(scheduler.running) == scheduler.max_joined)
        # a waiting client leaves, then one stays and is answered once there is room
        for leaves in (True, False):
            last = Visit(slow, **SHORT, stream=True)
            await until(lambda last=last: last.received)
            assert last.received.startswith(b": keep-alive\n\n"), (
                "a comment opens the stream of who waits"
            )
            assert last.status == 200
            assert len(scheduler.waiting) == 1
            refused = await client.post(PATH, json=SHORT)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            if leaves:
                await last.leave()
                await until(lambda: not scheduler.waiting)
        for visit in visits:
            await visit.leave()
        await last.task
        assert last.received.endswith(b"data: [DONE]\n\n")

    on_a_loop(slow, fill)


def test_a_deadline(slow_folder):
    with in_process(slow_folder, deadline_s=0.3) as client:
        late = client.post(PATH, json=LONG)
        assert not client.app.state.scheduler.running
        assert client.app.state.scheduler.totals.ended == {"cancelled": 1}
    assert late.status_code == 503
    assert "deadline of 0.3 s" in error_of(late)["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (Busy(3, 7), 429, "rate_limit_error", "3 requests are waiting"),
        (ServingError("shutting down"), 503, "server_error", "shutting down"),
        (KeyError("secret"), 500, "server_error", "the server has failed; its log says why"),
    ],
)
def test_what_ends_an_answer_is_a_status_or_the_end_of_its_stream(
    tiny, monkeypatch, error, status, kind, message
):
    async def fail(running):
        raise error

    monkeypatch.setattr(Running, "__anext__", fail)
    body = {"messages": TALK, "max_tokens": 3}
    whole = tiny.post("/v1/chat/completions", json=body)
    assert whole.status_code == status
    assert error_of(whole)["type"] == kind
    assert error_of(whole)["message"].startswith(message)
    assert whole.headers.get("retry-after") == ("7" if status == 429 else None)
    streamed = tiny.post("/v1/chat/completions", json={**body, "stream": True})
    assert streamed.status_code == 200
    assert error_in(streamed.text).startswith(message)


def test_an_engine_error_ends_its_request_alone(tiny, monkeypatch):
    collect = CpuDecoder.collect

    def failing(self, timeout_s):
        for update in collect(self, timeout_s):
            # only the request that ends with seven tokens fails
            if update.ended and len(update.tokens) + update.first == 7:
                update = update._replace(ended=update.ended._replace(error="planted"))
            yield update

    monkeypatch.setattr(CpuDecoder, "collect", lambda *arguments: list(failing(*arguments)))
    failed = tiny.post(PATH, json={**SHORT, "max_tokens": 7})
    assert failed.status_code == 500
    assert "planted" in error_of(failed)["message"]
    assert tiny.post(PATH, json={**SHORT, "max_tokens": 6}).status_code == 200
    assert tiny.get("/health").status_code == 200


def test_a_dead_engine_shows(model_folder, monkeypatch):
    monkeypatch.setattr(Scheduler, "_collect", lambda self: 1 // 0)
    with in_process(model_folder) as client:
        assert client.get("/health").status_code == 200
        for _ in range(2):
            failed = client.post(PATH, json=SHORT)
            assert failed.status_code == 500
            assert "ZeroDivisionError" in error_of(failed)["message"]
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed"


@pytest.mark.parametrize("api_key", [None, "k"])
def test_open_to_the_network_without_a_key_is_said(monkeypatch, capsys, api_key):
    monkeypatch.delenv("LANEFORMER_API_KEY", raising=False)
    ServerOptions("m", host="0.0.0.0", port=0, api_key=api_key).listen().close()
    warned = "WARNING: 0.0.0.0 without an API key" in capsys.readouterr().err
    assert warned == (api_key is None)


# As a process


def metric(server, name) -> float:
    return count_of(httpx.get(f"{server.url}/metrics").text, name)


def post(server, **body) -> httpx.Response:
    return httpx.post(f"{server.url}{PATH}", json=body, timeout=300)


def is_refused(server) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 503
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return True  # no listener, or a connection that it had taken in and closed as it ended


@pytest.mark.job
@pytest.mark.parametrize(
    ("signal_number", "grace_s"), [(signal.SIGTERM, 60.0), (signal.SIGINT, 0.2)]
)
def test_a_signal_lets_answers_end_or_cancels_them(slow_folder, server, signal_number, grace_s):
    running = server(slow_folder, grace_s=grace_s)
    # an answer that ends within the grace period, or one that cannot
    tokens = 1000 if grace_s > 1 else 8000
    with ThreadPoolExecutor() as threads:
        streamed = threads.submit(post, running, **LONG | {"max_tokens": tokens}, stream=True)
        whole = threads.submit(post, running, **LONG | {"max_tokens": tokens})
        wait_until(lambda: metric(running, "running") == 2)
        running.process.send_signal(signal_number)
        wait_until(lambda: is_refused(running))
        if grace_s > 1:
            assert whole.result().json()["usage"]["completion_tokens"] == tokens
        else:
            assert whole.result().status_code == 503
            assert "shutting down" in error_in(streamed.result().text)
    assert running.process.wait(30) == 0, running.output()


def send(server, body) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def memory_bytes(server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.job
def test_a_slow_reader_holds_up_nobody(model_folder, server):
    running = server(model_folder)
    # about 200 kB each, which the sockets cannot hold
    body = {**LONG, "max_tokens": 500, "stream": True, "logprobs": 5}
    before = 0
    connections = []
    for ended in (16, 32):
        before = memory_bytes(running)
        connections += [send(running, body) for _ in range(16)]
        wait_until(lambda ended=ended: metric(running, 'ended_total{reason="length"') == ended)
    alone = post(running, **{**SHORT, "max_tokens": 200})
    assert alone.json()["usage"]["completion_tokens"] == 200
    assert memory_bytes(running) - before < 64 * 2**20
    for connection in connections:
        connection.close()
