"""docs/balancing.md: its configuration in a real HAProxy before three servers; one is drained, one killed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.laneformer.serve.conftest import ROOT, Server, start
from train.supervise.attempt import free_port

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin")
pytestmark = [
    pytest.mark.rotate,
    pytest.mark.skipif(HAPROXY is None, reason="no haproxy on this machine: apt-get install haproxy"),
]
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/balancing.md").read_text(), re.S | re.M))
NAMES = ("a", "b", "c")
TALKS = 8
STREAM_TOKENS = 3000


@dataclass
class Balanced:
    """A balancer with its servers by name, each of which calls its model like itself."""

    url: str
    metrics: str
    servers: dict[str, Server]

    def say(self, talk: Talk, text: str) -> tuple[str, int]:
        """One turn; which server answered, and how many tokens of the prompt it had."""
        talk.messages.append({"role": "user", "content": text})
        body = {"model": "any", "messages": talk.messages, "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        talk.messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        return found["model"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@dataclass
class Talk:
    messages: list[dict[str, str]] = field(default_factory=list)


def configured(folder: Path, servers: dict[str, Server]) -> tuple[Path, int, int]:
    """The documented file with the addresses of this machine; the ports of the API and of the metrics."""
    text, ports = BLOCKS["haproxy"], (free_port(), free_port())
    for written, port in zip(("127.0.0.1:8000", "127.0.0.1:8405"), ports, strict=True):
        assert text.count(f"bind {written}") == 1
        text = text.replace(f"bind {written}", f"bind 127.0.0.1:{port}")
    for name, server in servers.items():
        text, found = re.subn(
            rf"server {name} \S+", f"server {name} {server.url.removeprefix('http://')}", text
        )
        assert found == 1
    file = folder / "haproxy.cfg"
    file.write_text(text.replace("/run/haproxy/admin.sock", str(folder / "admin.sock")))
    return file, *ports


@pytest.fixture
def balanced(slow_folder: Path, tmp_path: Path) -> Iterator[Balanced]:
    with ThreadPoolExecutor(len(NAMES)) as pool:
        begun = [pool.submit(start, slow_folder, model=name, grace_s=60.0) for name in NAMES]
        servers = dict(zip(NAMES, (one.result() for one in begun), strict=True))
    file, port, metrics = configured(tmp_path, servers)
    process = subprocess.Popen([str(HAPROXY), "-f", str(file), "-db"], stderr=subprocess.PIPE, text=True)
    found = Balanced(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}/metrics", servers)
    try:
        wait_for(lambda: status_of(f"{found.url}/health") == 200)
        yield found
    finally:
        process.terminate()
        process.wait(20)
        for server in servers.values():
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


def wait_for(state: Any, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not state():
        assert time.monotonic() < until
        time.sleep(0.05)


def status_of(url: str) -> int:
    try:
        return httpx.get(url).status_code
    except httpx.TransportError:
        return 0


def up(balanced: Balanced) -> set[str]:
    """The servers that HAProxy takes for healthy, by its own metrics."""
    families = {f.name: f for f in text_string_to_metric_families(httpx.get(balanced.metrics).text)}
    samples = families["haproxy_server_status"].samples
    return {s.labels["server"] for s in samples if s.labels["state"] == "UP" and s.value}


def stream(url: str, ids: list[int], begun: threading.Event) -> str:
    """A long stream to its end; `ids` takes its tokens, the reason of its end is returned."""
    body = {
        "prompt": "Once",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    reason = ""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=300
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                ids += chunk["choices"][0]["token_ids"]
                reason = chunk["choices"][0]["finish_reason"] or reason
                begun.set() if ids else None
    return reason


def running(server: Server) -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return next(family.samples[0].value for family in families if family.name == "laneformer_running")


def test_one_is_drained_one_is_killed_and_no_conversation_ends(balanced: Balanced) -> None:
    wait_for(lambda: up(balanced) == set(NAMES))
    talks = [Talk([{"role": "system", "content": "Be brief."}]) for _ in range(TALKS)]
    homes = [balanced.say(talk, f"Question {i} of somebody")[0] for i, talk in enumerate(talks)]
    assert len(set(homes)) > 1, "the conversations are spread"
    for _ in range(2):
        for talk, home in zip(talks, homes, strict=True):
            name, cached = balanced.say(talk, "And then?")
            assert name == home
            assert cached > 10, "its prefix is there"

    ids: list[int] = []
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(stream, balanced.url, ids, begun)
        assert begun.wait(20)
        drained = next(name for name, server in balanced.servers.items() if running(server))
        balanced.servers[drained].process.send_signal(signal.SIGTERM)
        after = [balanced.say(talk, "And now?")[0] for talk in talks]
        assert not end.done(), "it is still being told"
        assert end.result(60) == "length"
    assert len(ids) == STREAM_TOKENS, "no token is lost"
    assert balanced.servers[drained].process.wait(30) == 0
    assert drained not in after
    assert all(new == old for new, old in zip(after, homes, strict=True) if old != drained), "others stay"

    killed = next(name for name in after)
    balanced.servers[killed].process.kill()
    (left,) = set(NAMES) - {drained, killed}
    assert {balanced.say(talk, "Still there?")[0] for talk in talks} == {left}
    wait_for(lambda: up(balanced) == {left})


def test_prometheus_asks_what_is_there() -> None:
    jobs = {job["job_name"]: job for job in yaml.safe_load(BLOCKS["yaml"])["scrape_configs"]}
    addresses = re.findall(r"server \w (\S+)", BLOCKS["haproxy"])
    assert jobs["laneformer"]["static_configs"][0]["targets"] == addresses
    (metrics,) = jobs["haproxy"]["static_configs"][0]["targets"]
    assert f"bind {metrics}" in BLOCKS["haproxy"]
