"""Real server processes under load and in trouble: full queues, deadlines, clients that go
away, faults, the end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.laneformer.serve.conftest import ROOT, Server, start, write_model
from tests.laneformer.serve.test_server import error_of

LONG = {"prompt": "The quick", "max_tokens": 8000, "ignore_eos": True}


def metric(server: Server, name: str) -> float:
    """The sum of all that begin so."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"laneformer_{name}"))


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.02)


def send(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request whose answer nobody has read yet."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"  # noqa: E501
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + data)
    return connection


def post(server: Server, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "The quick", **fields}, timeout=300)


@pytest.fixture(scope="module")
def slow(slow_folder: Path) -> Iterator[Server]:
    server = start(slow_folder, max_waiting=1, keep_alive_s=0.05)
    yield server
    assert server.stop() == 0, server.output()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(slow: Server, stream: bool) -> None:
    generated, cancelled = (
        metric(slow, "generated_tokens_total"),
        metric(slow, 'ended_total{reason="cancelled"}'),
    )
    connection = send(slow, {**LONG, "stream": stream})
    wait_until(lambda: metric(slow, "generated_tokens_total") > generated)
    connection.close()
    wait_until(lambda: metric(slow, "running") == 0)
    assert metric(slow, 'ended_total{reason="cancelled"}') == cancelled + 1
    assert metric(slow, "generated_tokens_total") - generated < 6000


def test_a_full_queue_and_its_order(slow: Server) -> None:
    connections = [send(slow, {**LONG, "stream": True}) for _ in range(8)]
    wait_until(lambda: metric(slow, "running") == 8)
    last = send(slow, {**LONG, "max_tokens": 3, "stream": True})
    wait_until(lambda: metric(slow, "waiting") == 1)
    full = post(slow)
    assert full.status_code == 429
    assert 1 <= int(full.headers["retry-after"]) <= 60
    assert error_of(full)["type"] == "rate_limit_error"
    assert last.recv(4096).startswith(b"HTTP/1.1 200"), "a comment opens the stream of who waits"
    assert b": keep-alive\n\n" in last.recv(4096)
    for connection in connections:
        connection.close()
    received = b""
    while b"[DONE]" not in received:
        received += last.recv(4096)
    last.close()
    wait_until(lambda: metric(slow, "running") == 0)


def test_who_waits_may_leave(slow: Server) -> None:
    connections = [send(slow, LONG) for _ in range(9)]
    wait_until(lambda: metric(slow, "waiting") == 1)
    connections.pop().close()
    wait_until(lambda: metric(slow, "waiting") == 0)
    assert metric(slow, "running") == 8
    for connection in connections:
        connection.close()
    wait_until(lambda: metric(slow, "running") == 0)


@pytest.mark.job
def test_deadlines(slow_folder: Path, server: Callable[..., Server]) -> None:
    one = server(slow_folder, deadline_s=0.3, max_waiting=4)
    with concurrent.futures.ThreadPoolExecutor(12) as threads:  # 8 run and 4 wait
        answers = list(threads.map(lambda _: post(one, **LONG), range(12)))
    for answer in answers:
        assert answer.status_code == 503
        assert "deadline of 0.3 s" in error_of(answer)["message"]
    events = post(one, **LONG, stream=True).text.split("\n\n")
    assert "deadline of 0.3 s" in json.loads(events[-3].removeprefix("data: "))["error"]["message"]
    assert events[-2] == "data: [DONE]"
    assert metric(one, "running") == 0


@pytest.mark.rotate
def test_the_limits_hold_at_a_context_of_131072_tokens(tmp_path: Path, server: Callable[..., Server]) -> None:
    """Of prompts of 100,000 tokens eight run, one waits and the next is refused at once. The deadline ends
    them, what is kept of them stays within its bytes, and the next request is answered.
    """
    sizes = {"hidden_size": 128, "num_hidden_layers": 8, "max_position_embeddings": 131_072}
    kept_bytes = 4 << 20
    one = server(
        write_model(tmp_path / "deep", **sizes),
        engine={"cache_bytes": kept_bytes},
        deadline_s=6,
        max_waiting=1,
    )
    too_long = post(one, prompt=[5] * 131_072, max_tokens=1)
    assert too_long.status_code == 400
    assert "131072" in error_of(too_long)["message"].replace(",", "")
    with concurrent.futures.ThreadPoolExecutor(9) as threads:
        answers = [threads.submit(post, one, prompt=[10 + i] * 100_000, max_tokens=4) for i in range(9)]
        wait_until(lambda: metric(one, "waiting") == 1)
        assert post(one, prompt=[9] * 100_000).status_code == 429
    for answer in answers:
        assert answer.result().status_code == 503
        assert "deadline of 6 s" in error_of(answer.result())["message"]
    assert post(one, max_tokens=3).status_code == 200
    assert 0 < metric(one, "kv_bytes") <= kept_bytes


@pytest.mark.job
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end(
    slow_folder: Path, server: Callable[..., Server], how: signal.Signals
) -> None:
    one = server(slow_folder, grace_s=30)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        answer = threads.submit(post, one, max_tokens=1500, ignore_eos=True)
        wait_until(lambda: metric(one, "running") == 1)
        one.process.send_signal(how)
        wait_until(lambda: refused(one))
        assert answer.result().json()["usage"]["completion_tokens"] == 1500
    assert one.process.wait(10) == 0, one.output()


def refused(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 503
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return True  # no listener, or a connection that it had taken in and closed as it ended


@pytest.mark.job
def test_the_grace_ends(slow_folder: Path, server: Callable[..., Server]) -> None:
    one = server(slow_folder, grace_s=0.2)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        streamed = threads.submit(post, one, **LONG, stream=True)
        whole = threads.submit(post, one, **LONG)
        wait_until(lambda: metric(one, "running") == 2)
        began_s = time.monotonic()
        assert one.stop() == 0
        assert time.monotonic() - began_s < 5
    assert (
        "shutting down"
        in json.loads(streamed.result().text.split("\n\n")[-3].removeprefix("data: "))["error"]["message"]
    )
    assert whole.result().status_code == 503


@pytest.mark.job
def test_an_engine_error_ends_its_request_alone(model_folder: Path, server: Callable[..., Server]) -> None:
    one = server(
        model_folder,
        """
from laneformer.engine.cpu.decoder import CpuDecoder
collect = CpuDecoder.collect
def failing(self, timeout_s):
    return [c._replace(ended=c.ended._replace(error="planted")) if c.ended and len(c.tokens) + c.first == 7 else c
            for c in collect(self, timeout_s)]
CpuDecoder.collect = failing
""",
    )
    failed = post(one, max_tokens=7, ignore_eos=True)
    assert failed.status_code == 500
    assert "planted" in error_of(failed)["message"]
    assert error_of(failed)["type"] == "server_error"
    events = post(one, max_tokens=7, ignore_eos=True, stream=True).text
    assert "planted" in events
    assert post(one, max_tokens=6, ignore_eos=True).status_code == 200
    assert httpx.get(f"{one.url}/health").status_code == 200


@pytest.mark.job
def test_a_dead_engine_shows(model_folder: Path, server: Callable[..., Server]) -> None:
    one = server(
        model_folder,
        """
from laneformer.serve.scheduler import Scheduler
Scheduler._collect = lambda self: 1 // 0
""",
    )
    assert httpx.get(f"{one.url}/health").status_code == 200
    for _ in range(2):
        failed = post(one)
        assert failed.status_code == 500
        assert "ZeroDivisionError" in error_of(failed)["message"]
    health = httpx.get(f"{one.url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert one.stop() == 0


@pytest.mark.job
def test_what_nobody_foresaw_is_in_the_log_alone(model_folder: Path, server: Callable[..., Server]) -> None:
    one = server(
        model_folder,
        """
from laneformer.serve import app
app.CompletionAnswer = lambda body, context: {}["secret"]
""",
    )
    failed = post(one)
    assert failed.status_code == 500
    assert "secret" not in failed.text
    assert "its log says why" in error_of(failed)["message"]
    wait_until(lambda: "KeyError: 'secret'" in one.output())


@pytest.mark.job
def test_a_slow_reader_holds_up_nobody(model_folder: Path, server: Callable[..., Server]) -> None:
    one = server(model_folder)
    body = {"prompt": "The quick", "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 5}
    connections = [send(one, body) for _ in range(24)]  # about 200 kB each, which the sockets cannot hold
    wait_until(lambda: metric(one, "running") == metric(one, "waiting") == 0)
    before = memory_bytes(one)
    more = [send(one, body) for _ in range(24)]
    wait_until(lambda: metric(one, "running") == metric(one, "waiting") == 0)
    alone = post(one, max_tokens=200, ignore_eos=True)
    assert alone.json()["usage"]["completion_tokens"] == 200
    assert memory_bytes(one) - before < 64 * 2**20
    for connection in [*connections, *more]:
        connection.close()


def memory_bytes(server: Server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.job
def test_a_storm_of_clients_that_go_away(slow_folder: Path, server: Callable[..., Server]) -> None:
    one = server(slow_folder, max_waiting=1000)
    body = {"prompt": "Hello", "max_tokens": 40, "seed": 7, "temperature": 1.0, "ignore_eos": True}
    expected = post(one, **body).json()["choices"][0]["text"]
    rng = random.Random(1)

    def visit(i: int) -> str | None:
        if i % 4:
            with contextlib.closing(send(one, {**LONG, "stream": bool(i % 2)})) as connection:
                connection.settimeout(0.2 * rng.random())
                with contextlib.suppress(TimeoutError):
                    connection.recv(1000)
            return None
        return post(one, **body).json()["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        texts = [text for text in threads.map(visit, range(80)) if text is not None]
    assert texts == [expected] * 20
    wait_until(lambda: metric(one, "running") == metric(one, "waiting") == 0)
    assert one.stop() == 0
    assert "Traceback" not in one.output()


def run_main(arguments: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    code = (
        "import json, sys\nfrom laneformer.serve.options import ServerOptions\n"
        "ServerOptions(**json.loads(sys.argv[1])).listen()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_port_in_use_is_one_clear_line(slow: Server) -> None:
    port = int(slow.url.rsplit(":", 1)[1])
    printed = run_main({"model": "second", "port": port}).stderr.strip().splitlines()[-1]
    assert f"ValueError: cannot listen on port {port} of 127.0.0.1: Address already in use" in printed


@pytest.mark.job
def test_open_to_the_network_without_a_key_is_said(model_folder: Path, server: Callable[..., Server]) -> None:
    one, other = server(model_folder, host="0.0.0.0"), server(model_folder, host="0.0.0.0", api_key="k")
    assert "WARNING: 0.0.0.0 without an API key" in one.output()
    assert "WARNING" not in other.output()
