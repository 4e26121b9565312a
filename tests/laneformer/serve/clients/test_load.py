"""Tests of 500 requests at once, a third of them cut off: answers are those given alone, nothing leaks."""

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.laneformer.serve.clients.openai_checks import Target
from tests.laneformer.serve.endpoint import data_of

PATH = "/v1/completions"
REQUESTS = 500
AT_ONCE = 48
KINDS = 12
AGAIN_S = 0.02  # not a second: the queue is to stay full
# what allocators keep, and one prefix cache: not the 100 kB a request that a leak would cost
RSS_BYTES = 24 << 20


def body_of(kind: int, stream: bool) -> dict[str, Any]:
    """Return one of twelve requests; each has one right answer."""
    prompt = f"The quick brown fox {kind}" * (1 + 2 * (kind % 3))
    sampling = {"seed": kind, "temperature": 0.9, "max_tokens": 8 + 8 * (kind % 4)}
    return {"prompt": prompt, "stream": stream, **sampling}


async def ask(client, kind, stream, counts) -> str:
    """Return the answer's text, retrying while the queue is full."""
    while (answer := await client.post(PATH, json=body_of(kind, stream))).status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
        counts["429"] += 1
        await asyncio.sleep(AGAIN_S)
    assert answer.status_code == 200, answer.text
    parts = data_of(answer.text)[:-1] if stream else [answer.text]
    return "".join(choice["text"] for part in parts for choice in json.loads(part)["choices"])


async def leave(client, kind, stream, after_s):
    body = {**body_of(kind, stream), "max_tokens": 400, "ignore_eos": True}
    try:
        async with client.stream("POST", PATH, json=body) as response:
            await asyncio.wait_for(anext(response.aiter_raw()), after_s)
            await asyncio.sleep(after_s / 2)
    except (TimeoutError, StopAsyncIteration):
        pass


async def storm(client, expected, requests) -> Counter[str]:
    rng = random.Random(0)
    counts = Counter[str]()
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(leaves, kind, stream, after_s):
        async with turn:
            if leaves:
                await leave(client, kind, stream, after_s)
            else:
                assert await ask(client, kind, stream, counts) == expected[kind], kind

    async with asyncio.TaskGroup() as group:
        for _ in range(requests):
            leaves = rng.random() < 1 / 3
            stream = rng.random() < 0.5
            group.create_task(one(leaves, rng.randrange(KINDS), stream, rng.uniform(0.001, 0.1)))
    return counts


def measure_process(server) -> tuple[int, int, int]:
    process = Path(f"/proc/{server.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    files, threads = (len(list((process / name).iterdir())) for name in ("fd", "task"))
    return pages * os.sysconf("SC_PAGE_SIZE"), files, threads


@pytest.mark.rotate
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_storm_of_requests(server, model_folder):
    import httpx

    running = server(model_folder, engine={"cache_bytes": 4 << 20}, max_waiting=4)
    endpoint = Target(running.url, "tiny", "none")

    def run(work):
        async def visit():
            limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=8)
            async with httpx.AsyncClient(
                base_url=running.url, timeout=300, limits=limits
            ) as client:
                return await work(client)

        return asyncio.run(visit())

    async def ask_alone(client):
        return [await ask(client, kind, False, Counter()) for kind in range(KINDS)]

    expected = run(ask_alone)
    assert len(set(expected)) > 6
    run(lambda client: storm(client, expected, 100))  # what is made once: buffers, threads, arenas
    assert endpoint.becomes_idle()
    before = measure_process(running)
    counts = run(lambda client: storm(client, expected, REQUESTS))
    assert counts["429"], "the queue was never full, so this shows nothing about it"
    assert endpoint.becomes_idle()
    assert run(ask_alone) == expected
    rss, files, threads = (
        after - first for after, first in zip(measure_process(running), before, strict=True)
    )
    assert rss < RSS_BYTES, f"{rss:,} bytes more than before"
    assert files <= 2, f"{files} files more than before"
    assert threads <= 0
    assert running.stop() == 0, running.output()
    assert "Traceback" not in running.output()
