"""Five hundred requests at once, some cut off and some wrong: every answer is the one given
alone, nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.laneformer.serve.clients.openai_checks import Asked
from tests.laneformer.serve.conftest import Server

pytestmark = pytest.mark.rotate
REQUESTS, AT_ONCE = 500, 48
RSS_BYTES = (
    24 << 20
)  # what allocators keep, and one prefix cache: not the 100 kB a request that a leak would cost
BAD: list[tuple[str, Any]] = [
    ("/v1/chat/completions", b"{"), ("/v1/chat/completions", b"[]"), ("/v1/chat/completions", {"messages": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 4000}]}),
    ("/v1/completions", {"prompt": [-1]}), ("/v1/completions", {"prompt": "x", "max_tokens": -3}),
    ("/v1/completions", {"prompt": "x", "temprature": 1}), ("/v1/completions", b"\xff\xfe"),
]  # fmt: skip


def body(kind: int) -> tuple[str, dict[str, Any]]:
    """One of twelve requests; each has one right answer."""
    sampling = {"seed": kind, "temperature": 0.0 if kind % 3 else 0.9, "max_tokens": 8 + 8 * (kind % 4)}
    given: dict[str, Any] = {"model": "tiny", **sampling, "ignore_eos": True}
    text = f"The quick brown fox {kind}" * (1 + 2 * (kind % 3))
    if kind % 2:
        return "/v1/completions", {**given, "prompt": text, "logprobs": 1}
    return "/v1/chat/completions", {**given, "messages": [{"role": "user", "content": text}]}


def text_of(choice: dict[str, Any]) -> str:
    found = (
        choice["text"] if "text" in choice else choice.get("message", choice.get("delta", {})).get("content")
    )
    return found or ""


async def ask(client: httpx.AsyncClient, kind: int, stream: bool, told: Counter[str]) -> str:
    """The answer's text, however often the queue is full."""
    path, wanted = body(kind)
    while True:
        async with client.stream("POST", path, json={**wanted, "stream": stream}) as response:
            if response.status_code == 429:
                told["429"] += 1
                assert int(response.headers["retry-after"]) >= 1
                await response.aread()
            elif stream:
                assert response.status_code == 200
                lines = [
                    line.removeprefix("data: ")
                    async for line in response.aiter_lines()
                    if line.startswith("d")
                ]
                assert lines.pop() == "[DONE]"
                return "".join(text_of(json.loads(line)["choices"][0]) for line in lines)
            else:
                answer = json.loads(await response.aread())
                assert response.status_code == 200, answer
                return text_of(answer["choices"][0])
        await asyncio.sleep(0.02)  # not a second: the queue is to stay full


async def leave(client: httpx.AsyncClient, kind: int, stream: bool, after_s: float) -> None:
    """A client that goes away in the middle of its request."""
    path, wanted = body(kind)
    try:
        async with client.stream(
            "POST", path, json={**wanted, "max_tokens": 400, "stream": stream}
        ) as response:
            await asyncio.wait_for(anext(response.aiter_raw()), after_s)
            await asyncio.sleep(after_s / 2)
    except (TimeoutError, StopAsyncIteration):
        pass


async def spoil(client: httpx.AsyncClient, number: int) -> int:
    path, wanted = BAD[number % len(BAD)]
    content = wanted if isinstance(wanted, bytes) else json.dumps(wanted).encode()
    kind = {"Content-Type": "application/json"}
    while (status := (await client.post(path, content=content, headers=kind)).status_code) == 429:
        await asyncio.sleep(0.02)  # it is not read where others are being prepared
    return status


async def storm(url: str, expected: list[str], count: int = REQUESTS) -> Counter[str]:
    rng, told = random.Random(0), Counter[str]()
    plan = [
        (rng.random(), rng.randrange(12), rng.random() < 0.5, rng.uniform(0.001, 0.1)) for _ in range(count)
    ]
    turn = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=8)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:

        async def one(number: int) -> None:
            what, kind, stream, after_s = plan[number]
            async with turn:
                if what < 0.25:
                    await leave(client, kind, stream, after_s)
                    told["left"] += 1
                elif what < 0.4:
                    assert await spoil(client, number) in (400, 413, 422)
                    told["bad"] += 1
                else:
                    assert await ask(client, kind, stream, told) == expected[kind], (
                        f"request {number}, kind {kind}"
                    )
                    told["answered"] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))
    return told


def held(server: Server) -> tuple[int, int, int]:
    """Resident bytes, open files and threads of the process."""
    process = Path(f"/proc/{server.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
    )


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_storm_of_requests(server: Callable[..., Server], model_folder: Path) -> None:
    running = server(model_folder, engine={"cache_bytes": 4 << 20}, max_waiting=4)
    asked = Asked(running.url, "tiny", "none")

    async def alone() -> list[str]:
        async with httpx.AsyncClient(base_url=running.url, timeout=300, trust_env=False) as client:
            return [await ask(client, kind, False, Counter()) for kind in range(12)]

    expected = asyncio.run(alone())
    assert len(set(expected)) > 6
    asyncio.run(storm(running.url, expected, 100))  # what is made once: buffers, threads, arenas
    assert asked.becomes_idle(), f"{asked.counts()[0]} requests are left"
    before = held(running)
    told = asyncio.run(storm(running.url, expected))
    assert sum(told[what] for what in ("answered", "left", "bad")) == REQUESTS
    assert told["429"], "the queue was never full, so this shows nothing about it"
    assert asked.becomes_idle(), f"{asked.counts()[0]} requests are left"
    assert asyncio.run(alone()) == expected
    rss, files, threads = (after - first for after, first in zip(held(running), before, strict=True))
    assert rss < RSS_BYTES, f"{rss:,} bytes more than before"
    assert files <= 2, f"{files} files more than before"
    assert threads <= 0
    assert running.stop() == 0, running.output()
