"""Tests of docs/balancing.md with a real HAProxy before three servers; one is drained, one killed."""

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.laneformer.serve.conftest import ROOT, Server, start, wait_until
from tests.laneformer.serve.endpoint import count_of, data_of

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin")
BLOCKS = dict(
    re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/balancing.md").read_text(), re.S | re.M)
)
NAMES = ("a", "b", "c")
TALKS = 8
STREAM_TOKENS = 3000


@dataclass
class Balanced:
    """A balancer with its servers by name, which is also the name of each server's model."""

    url: str
    metrics: str
    servers: dict[str, Server]

    def say(self, messages: list[dict[str, str]], text: str) -> tuple[str, int]:
        """Send one turn; return the server that answered and the number of prompt tokens it had cached."""
        messages.append({"role": "user", "content": text})
        body = {"model": "any", "messages": messages, "max_tokens": 4, "ignore_eos": True}
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=300)
        assert response.status_code == 200, response.text
        answer = response.json()
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        return answer["model"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def healthy(self) -> set[str]:
        up = r'^haproxy_server_status\{.*server="(\w)",state="UP"\} 1$'
        return set(re.findall(up, httpx.get(self.metrics).text, re.M))


def write_configuration(folder, servers, sockets) -> Path:
    """Write the documented file with this machine's servers and these open sockets; return its path."""
    text = BLOCKS["haproxy"]
    for address, listening in zip(("127.0.0.1:8000", "127.0.0.1:8405"), sockets, strict=True):
        assert text.count(f"bind {address}") == 1
        # HAProxy inherits open sockets, so no other process can take the ports meanwhile
        text = text.replace(f"bind {address}", f"bind fd@{listening.fileno()}")
    for name, server in servers.items():
        address = server.url.removeprefix("http://")
        text, replaced = re.subn(rf"server {name} \S+", f"server {name} {address}", text)
        assert replaced == 1
    file = folder / "haproxy.cfg"
    file.write_text(text.replace("/run/haproxy/admin.sock", str(folder / "admin.sock")))
    return file


@pytest.fixture
def balancer(slow_folder, tmp_path):
    with ThreadPoolExecutor(len(NAMES)) as pool:
        starts = [pool.submit(start, slow_folder, model_name=name, grace_s=60.0) for name in NAMES]
        servers = dict(zip(NAMES, (future.result() for future in starts), strict=True))
    # HAProxy inherits open sockets, so no other process can take their ports meanwhile
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    file = write_configuration(tmp_path, servers, sockets)
    process = subprocess.Popen(
        [str(HAPROXY), "-f", file, "-db"], pass_fds=[s.fileno() for s in sockets]
    )
    url, metrics = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in sockets)
    balancer = Balanced(url, f"{metrics}/metrics", servers)
    try:
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield balancer
    finally:
        process.terminate()
        process.wait(60)
        for server in servers.values():
            server.kill()
        for listening in sockets:
            listening.close()


def stream(url: str, ids: list[int], begun: threading.Event) -> str:
    """Read a long stream to its end, append its tokens to `ids`, and return its finish reason."""
    body = {
        "prompt": "Once",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    reason = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            for data in data_of(line):
                if data != "[DONE]":
                    (choice,) = json.loads(data)["choices"]
                    ids += choice["token_ids"]
                    reason = choice["finish_reason"] or reason
                    begun.set()
    return reason


@pytest.mark.rotate
@pytest.mark.skipif(HAPROXY is None, reason="no haproxy on this machine: apt-get install haproxy")
def test_one_is_drained_one_is_killed_and_no_conversation_ends(balancer):
    wait_until(lambda: balancer.healthy() == set(NAMES))
    talks = [[{"role": "system", "content": "Be brief."}] for _ in range(TALKS)]
    homes = [balancer.say(talk, f"Question {i} of somebody")[0] for i, talk in enumerate(talks)]
    assert len(set(homes)) > 1, "the conversations are spread"
    for _ in range(2):
        for talk, home in zip(talks, homes, strict=True):
            name, cached = balancer.say(talk, "And then?")
            assert name == home
            assert cached > 10, "its prefix is there"

    ids = []
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(stream, balancer.url, ids, begun)
        assert begun.wait(60)
        running = {
            name: count_of(httpx.get(f"{server.url}/metrics").text, "running")
            for name, server in balancer.servers.items()
        }
        # the server with the long stream
        drained = max(running, key=running.__getitem__)
        balancer.servers[drained].process.send_signal(signal.SIGTERM)
        after = [balancer.say(talk, "And now?")[0] for talk in talks]
        assert end.result(120) == "length"
    assert len(ids) == STREAM_TOKENS, "no token is lost"
    assert balancer.servers[drained].process.wait(60) == 0
    assert drained not in after
    assert all(new == old for new, old in zip(after, homes, strict=True) if old != drained), (
        "others stay"
    )

    killed = after[0]
    balancer.servers[killed].kill()
    # conversations move to the one that remains
    (survivor,) = set(NAMES) - {drained, killed}
    assert {balancer.say(talk, "Still there?")[0] for talk in talks} == {survivor}
    wait_until(lambda: balancer.healthy() == {survivor})


def test_prometheus_asks_what_is_there():
    import yaml

    jobs = {job["job_name"]: job for job in yaml.safe_load(BLOCKS["yaml"])["scrape_configs"]}
    addresses = re.findall(r"server \w (\S+)", BLOCKS["haproxy"])
    assert jobs["laneformer"]["static_configs"][0]["targets"] == addresses
    (metrics,) = jobs["haproxy"]["static_configs"][0]["targets"]
    assert f"bind {metrics}" in BLOCKS["haproxy"]
