"""Does a server stay responsive while clients misbehave? /health and the gaps of a stream, idle and in a soak.

    python -m tools.soak [MODEL] --minutes 5

Beside one reader, clients send bodies of up to the limit that can never be answered, leave streams and whole answers
in the middle, and send their bodies a byte at a time. They are in a process of the lowest priority, as clients of
another machine would be. The verdict: no status of 5xx, every honest answer comes, p99 of /health and of the
reader's gaps are at most twice the idle ones, and files and memory come back. The last line of stdout is JSON.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from tools.bench.harness import ROOT
from tools.bench.serve import SMOLLM2
from tools.bench.serve_client import Server, ours

BODY_BYTES = 4 * 2**20 - 2**10  # within the server's limit
HEALTH_EVERY_S, TIMEOUT_S = 0.05, 60.0
ALLOWED_RATIO = 2.0
HEALTH_MS = 50.0  # what is below needs no ratio: at this level other programs decide
MORE_BYTES = 256 * 2**20  # of memory, beside the prefix cache's limit
CLIENTS = "import sys; from tools.soak import misbehave; misbehave(*map(float, sys.argv[1:]))"
READ: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True}


@dataclass(kw_only=True)
class Soak:
    """Misbehave for some minutes, and measure what others notice."""

    model: Annotated[Path, tyro.conf.Positional] = SMOLLM2
    """A GGUF file or a folder."""
    minutes: float = 5.0
    """Of the soak; idle figures are taken for a fifth of that before, 30 s at most."""
    clients: int = 4
    """That misbehave at a time."""
    threads: int = 1
    """Of the engine. The rest of this machine is for the clients."""

    def run(self) -> dict[str, Any]:
        with ours(self.model, "auto", self.threads) as server:
            idle = watched(server, min(30.0, 12 * self.minutes))
            before = held(server)
            arguments = [str(server.port), str(60 * self.minutes), str(self.clients)]
            clients = subprocess.Popen(
                [sys.executable, "-c", CLIENTS, *arguments], cwd=ROOT, stdout=subprocess.PIPE
            )
            soak = watched(server, 60 * self.minutes)
            statuses = json.loads(clients.communicate(timeout=2 * TIMEOUT_S)[0])
            after = settled(server, before["files"])
        return verdict({"idle": idle, "soak": soak, "statuses": statuses, "before": before, "after": after})


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """The figures with `failed`: names of what does not hold."""
    idle, soak = found["idle"], found["soak"]
    holds = {
        "no 5xx": not any(status.startswith("5") for status in found["statuses"]),
        "honest answers": soak["errors"] == 0 and soak["answers"] > 0,
        "health": soak["health_p99_ms"] <= max(HEALTH_MS, ALLOWED_RATIO * idle["health_p99_ms"]),
        "gaps": soak["gap_p99_ms"] <= ALLOWED_RATIO * idle["gap_p99_ms"],
        "files": found["after"]["files"] <= found["before"]["files"] + 2,
        "memory": found["after"]["bytes"] - found["before"]["bytes"]
        <= found["after"]["cache_bytes"] + MORE_BYTES,
    }
    return {**found, "failed": [name for name, held in holds.items() if not held]}


def watched(server: Server, seconds: float) -> dict[str, float]:
    """Times of /health, and of one reader's tokens, for so long."""
    health_ms, gaps_ms, over, errors = list[float](), list[float](), threading.Event(), 0
    prober = threading.Thread(target=probe, args=(server.port, health_ms, over))
    prober.start()
    answers, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            answer = server.ask("/v1/completions", **READ)
        except (OSError, RuntimeError, http.client.HTTPException):
            errors += 1
            continue
        answers += 1
        gaps_ms += list(1e3 * np.diff(answer.arrivals_s))
    over.set()
    prober.join()
    return {
        "health_p50_ms": quantile(health_ms, 50), "health_p99_ms": quantile(health_ms, 99),
        "health_max_ms": max(health_ms), "healths": len(health_ms), "gap_p50_ms": quantile(gaps_ms, 50),
        "gap_p99_ms": quantile(gaps_ms, 99), "answers": answers, "errors": errors,
    }  # fmt: skip


def quantile(values: list[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 2)


def probe(port: int, times_ms: list[float], over: threading.Event) -> None:
    while not over.wait(HEALTH_EVERY_S):
        began = time.perf_counter()
        assert send(port, "GET", "/health", b"") == "200"
        times_ms.append(1e3 * (time.perf_counter() - began))


def send(port: int, method: str, path: str, body: bytes) -> str:
    """The status, once the whole answer has come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)


def held(server: Server) -> dict[str, int]:
    """What the process holds, as Linux counts it."""
    process = Path(f"/proc/{server.process.pid}")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/props")
        cache_bytes = json.load(connection.getresponse())["cache_bytes"]
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"files": len(list((process / "fd").iterdir())), "bytes": resident, "cache_bytes": cache_bytes}


def settled(server: Server, files: int) -> dict[str, int]:
    """Once the last connections are closed, or after some seconds."""
    for _ in range(20):
        if (now := held(server))["files"] <= files + 2:
            break
        time.sleep(0.5)
    return now


# --- clients that misbehave, in a process of their own ---------------------------------------------------------------


def misbehave(port: float, seconds: float, clients: float) -> None:
    """Prints how often each status came."""
    os.nice(19)
    statuses, bodies = Counter[str](), [*hostile()]
    shared = int(port), bodies, time.monotonic() + seconds, statuses
    threads = [threading.Thread(target=client, args=(i, *shared)) for i in range(int(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(statuses))


def client(
    number: int, port: int, bodies: Sequence[tuple[str, bytes]], until: float, statuses: Counter[str]
) -> None:
    """Each act once, then any until the time is over."""
    rng, left = random.Random(number), [bodies[number % len(bodies)]]
    acts: list[Callable[[], str]] = [
        lambda: send(port, "POST", *(left.pop() if left else rng.choice(bodies))), lambda: cut(port, rng),
        lambda: drip(port, rng),
    ]  # fmt: skip
    for turn in itertools.count():
        if turn >= len(acts) and time.monotonic() >= until:
            break
        act = acts[turn] if turn < len(acts) else rng.choice(acts)
        try:
            statuses[act()] += 1
        except (OSError, http.client.HTTPException):
            statuses["broken off"] += 1


def hostile() -> Iterator[tuple[str, bytes]]:
    """Paths and bodies: long, deep, of many values, of no sense."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    digits, words = "0123456789" * (BODY_BYTES // 10), "word " * (BODY_BYTES // 5)
    deep: Any = {"type": "string"}
    for _ in range(40):
        deep = {"type": "object", "properties": dict.fromkeys("ab"[: 1 + (_ < 10)], deep)}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": deep}}
    for path, body in (
        (chat, user(digits)), (chat, user(words)), (text, {"prompt": digits}), ("/tokenize", {"content": words}),
        (text, {"prompt": [7] * (BODY_BYTES // 4)}), (text, {"prompt": ["a"] * (BODY_BYTES // 6)}),
        (chat, {"messages": user("a")["messages"] * (BODY_BYTES // 40)}), (chat, user("a") | {"response_format": form}),
        (chat, user("a") | {"prediction": {"content": words}}), (chat, user("\ud800")), ("/v1/messages", user(digits)),
    ):  # fmt: skip
        yield path, json.dumps(body).encode()
    yield chat, b'{"messages": ' + b"[" * 100_000
    yield text, b"\xff\xfe" * 1000
    yield text, b'{"prompt": "a", "x": NaN}' + b" " * BODY_BYTES


def user(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def cut(port: int, rng: random.Random) -> str:
    """Leave a stream, or an answer that has not come."""
    body = json.dumps({**READ, "max_tokens": 500, "stream": rng.random() < 0.7}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as one:
        one.settimeout(rng.uniform(0.01, 1.0))
        one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with contextlib.suppress(TimeoutError):
            one.recv(rng.randrange(1, 5000))
    return "cut"


def drip(port: int, rng: random.Random) -> str:
    """A body that comes a byte at a time, and often never ends."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n\r\n")
        for byte in b'{"prompt": "a", '[: rng.randrange(17)]:
            one.sendall(bytes([byte]))
            time.sleep(0.02)
    return "dripped"


def main() -> None:
    found = tyro.cli(Soak, prog="python -m tools.soak", description=__doc__).run()
    for name in found["failed"]:
        print(f"soak: {name} does not hold", file=sys.stderr)
    print(json.dumps(found))
    raise SystemExit(bool(found["failed"]))


if __name__ == "__main__":
    main()
