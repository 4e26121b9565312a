"""Helpers to send requests to an application in this process and to read its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from laneformer.prompts import ChatTemplate
from laneformer.serve.bodies import STRICTLY
from laneformer.serve.schema import ConversationRequest

if TYPE_CHECKING:
    import httpx
    import openai

GREEDY = {"model": "tiny", "temperature": 0}
TALK = [{"role": "user", "content": "Hello, how are you?"}]


class Endpoint:
    """A path of an application with default fields for its requests."""

    def __init__(self, client, path, **fields):
        self.client = client
        self.path = path
        self.fields = fields

    def ask(self, **body) -> httpx.Response:
        return self.client.post(self.path, json={**self.fields, **body})

    def post(self, **body):
        answer = self.ask(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def choice(self, **body):
        return self.post(**body)["choices"][0]

    def refusal(self, **body) -> dict[str, Any]:
        answer = self.ask(**body)
        assert answer.status_code == 400, answer.text
        return error_of(answer)

    def stream(self, **body) -> list[Any]:
        """Return the events' JSON; the last event must be OpenAI's [DONE]."""
        *events, last = data_of(self.ask(**body, stream=True).text)
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    def count(self, metric: str) -> float:
        """Return the sum of the server's metrics whose names begin with `metric`."""
        return count_of(self.client.get("/metrics").text, metric)


def completions(client) -> Endpoint:
    return Endpoint(client, "/v1/completions", **GREEDY)


def conversations(client) -> Endpoint:
    return Endpoint(client, "/v1/chat/completions", messages=TALK, **GREEDY)


def strict_client(client, api_key="none") -> openai.OpenAI:
    """Return an OpenAI client that raises on every field that breaks its schema."""
    import openai

    options = {"http_client": client, "api_key": api_key, "max_retries": 0}
    return openai.OpenAI(
        base_url="http://localhost/v1", _strict_response_validation=True, **options
    )


def join_chunks(chunks: Iterable[Any], index: int, *keys: str) -> list[Any]:
    """Concatenate what the chunks of one choice have under these keys: characters or list elements."""
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
    for key in keys:
        # chunks without the key, or with null, add nothing
        parts = [part[key] for part in parts if part.get(key)]
    return [entry for part in parts for entry in part]


def data_of(text: str) -> list[str]:
    """Return the data of a stream's events, without its comments."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def count_of(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(f"laneformer_{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the one value of an error response after checking OpenAI's four fields."""
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def prompt_of(engine, messages) -> list[int]:
    """Return the ids of a conversation whose contents contain no control token."""
    text = ChatTemplate(engine.tokenizer_config).render(list(messages), add_generation_prompt=True)
    return engine.tokenizer.encode(text, add_special_tokens=False).ids


def on_a_loop(app, work):
    """Run work(client) on a new event loop, where requests run concurrently."""
    import httpx

    async def visit():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=300
        ) as client:
            return await work(client)

    return asyncio.run(visit())


def request_with(tools, choice=None, **fields) -> ConversationRequest:
    body = {"messages": TALK, "tools": tools, "tool_choice": choice, **fields}
    return ConversationRequest.from_fields(body, STRICTLY)


def parse_table(text: str, separator: str = " | ") -> list[list[Any]]:
    return [
        [parse_cell(cell) for cell in row.split(separator)] for row in text.strip().splitlines()
    ]


def parse_cell(cell: str):
    try:
        return json.loads(cell)
    except ValueError:
        return cell
