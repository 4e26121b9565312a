"""Tests that preparing a request never blocks the event loop: long work runs in a thread or is refused."""

import asyncio
import threading

import pytest

from laneformer.prompts import PromptEncoder
from laneformer.serve.grammar import Grammars
from tests.laneformer.serve.endpoint import TALK, on_a_loop

DIGITS = "0123456789" * 400_000  # 4 MB, which take seconds to encode
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def app(tiny):
    return tiny.app


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": DIGITS}]}, 0),
        ("/v1/completions", {"prompt": ["Hello", DIGITS]}, 10),
        ("/v1/completions", {"prompt": DIGITS[:16_000]}, 8 * 512),
        ("/v1/chat/completions", {"messages": TALK, "prediction": {"content": DIGITS}}, 1000),
        ("/tokenize", {"content": DIGITS}, 0),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(app, monkeypatch, path, body, most):
    # most: characters that are encoded
    encoded = []
    truth = PromptEncoder.encode_text

    def count_text(self, text, *args, **kwargs):
        encoded.append(len(text))
        return truth(self, text, *args, **kwargs)

    monkeypatch.setattr(PromptEncoder, "encode_text", count_text)
    answer = on_a_loop(app, lambda client: client.post(path, json=body))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in answer.json()["error"]["message"]
    assert max(encoded, default=0) <= most


def hold(patch, owner, name) -> list[threading.Event]:
    """Make a method set the first event when it begins and wait for the second."""
    events = begun, released = [threading.Event(), threading.Event()]
    method = getattr(owner, name)

    def wait(*args, **kwargs):
        begun.set()
        assert released.wait(WAIT_S), "the loop stood still"
        return method(*args, **kwargs)

    patch.setattr(owner, name, wait)
    return events


@pytest.mark.parametrize(
    ("owner", "name", "path", "body"),
    [
        (PromptEncoder, "encode_text", "/v1/completions", {"prompt": "Hello"}),
        (PromptEncoder, "render", "/v1/chat/completions", {"messages": TALK}),
        (
            Grammars,
            "compile_lark",
            "/v1/chat/completions",
            {"messages": TALK, "response_format": SCHEMA},
        ),
    ],
)
def test_health_answers_while_a_request_is_prepared(app, monkeypatch, owner, name, path, body):
    # encoding waits for /health to answer, so on the loop's thread it would wait for ever
    begun, answered = hold(monkeypatch, owner, name)

    async def work(client):
        posted = asyncio.create_task(client.post(path, json={**body, "max_tokens": 2}))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        health = await client.get("/health")
        answered.set()
        return health, await posted

    health, posted = on_a_loop(app, work)
    assert health.status_code == 200
    assert posted.status_code == 200


def test_more_preparation_than_there_is_room_for_is_429(app, monkeypatch):
    _, answered = hold(monkeypatch, PromptEncoder, "encode_text")

    async def work(client):
        scheduler = app.state.scheduler
        count = scheduler.max_waiting + scheduler.max_joined + 3
        tasks = [
            asyncio.create_task(client.post("/tokenize", json={"content": "a"}))
            for _ in range(count)
        ]
        # the three beyond the room are refused at once, while all others wait
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        answered.set()
        return [task.status_code for task in await asyncio.gather(*tasks)]

    statuses = on_a_loop(app, work)
    assert statuses.count(429) == 3
    assert set(statuses) == {200, 429}
