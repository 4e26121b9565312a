"""What a program does with the `openai` package, against a server: run by pytest, and as a
script for another major.

    PYTHONPATH=.venv/clients python tests/laneformer/serve/clients/openai_checks.py URL MODEL KEY

The strict clients raise on every field that breaks the typed schema, so each answer here is a check
of its form, too.
"""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import openai
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "def main(argv):"}]
IDLE_S = 10.0
LONG: dict[str, Any] = {"messages": QUESTION, "max_tokens": 400, "n": 32, "extra_body": {"ignore_eos": True}}


@dataclass
class Asked:
    """A server, and how to reach it."""

    url: str  # without /v1
    model: str
    key: str

    def sync(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def asynchronous(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def counts(self) -> tuple[int, int]:
        """Requests that wait or decode, and those that have been cancelled, by the server's own count."""
        headers = {"Authorization": f"Bearer {self.key}"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/metrics", headers=headers)) as answer:
            lines = [line.rsplit(maxsplit=1) for line in answer.read().decode().splitlines()]
        found = {line[0]: int(float(line[1])) for line in lines if not line[0].startswith("#")}
        busy = found["laneformer_running"] + found["laneformer_waiting"]
        return busy, found.get('laneformer_ended_total{reason="cancelled"}', 0)

    def becomes_idle(self) -> bool:
        end_s = time.monotonic() + IDLE_S
        while self.counts()[0] and time.monotonic() < end_s:
            time.sleep(0.02)
        return not self.counts()[0]

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        given = {"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0, "timeout": 60}
        return {**given, "_strict_response_validation": True, **options}

    def chat(self, client: openai.OpenAI, **options: Any) -> Any:
        given: dict[str, Any] = {
            "model": self.model,
            "messages": QUESTION,
            "max_tokens": 24,
            "temperature": 0,
        }
        return client.chat.completions.create(**{**given, **options})


def models(a: Asked) -> None:
    with a.sync() as client:
        listed = client.models.list().data
        assert [m.id for m in listed] == [a.model], listed
        assert client.models.retrieve(a.model) == listed[0]
        refused(openai.NotFoundError, lambda: client.models.retrieve("another"))


def chat(a: Asked) -> None:
    with a.sync() as client:
        first, again = a.chat(client), a.chat(client)
        assert first.choices == again.choices, "greedy answers differ"
        (choice,) = first.choices
        assert choice.message.role == "assistant"
        assert choice.finish_reason in ("stop", "length")
        usage = first.usage
        assert 0 < usage.completion_tokens <= 24
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert first.model == a.model
        assert first.id != again.id
        assert abs(first.created - time.time()) < 60
        longer = a.chat(client, max_tokens=None, max_completion_tokens=5)
        assert longer.usage.completion_tokens <= 5


def streamed_chat(a: Asked) -> None:
    with a.sync() as client:
        whole = a.chat(client, logprobs=True)
        options: dict[str, Any] = {
            "stream": True,
            "logprobs": True,
            "stream_options": {"include_usage": True},
        }
        chunks = list(a.chat(client, **options))
        *said, last = chunks
        assert last.choices == []
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
            whole.usage.prompt_tokens, whole.usage.completion_tokens,
        )  # fmt: skip
        assert all(chunk.usage is None for chunk in said), "usage is null until the last chunk"
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert said[0].choices[0].delta.role == "assistant"
        deltas = [chunk.choices[0] for chunk in said]
        assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
        assert [d.finish_reason for d in deltas if d.finish_reason] == [whole.choices[0].finish_reason]
        told = [t for d in deltas for t in (d.logprobs.content if d.logprobs else None) or []]
        assert told == whole.choices[0].logprobs.content
        assert all(chunk.usage is None for chunk in a.chat(client, stream=True)), "nobody asked for usage"


def logprobs(a: Asked) -> None:
    with a.sync() as client:
        answer = a.chat(client, logprobs=True, top_logprobs=3)
        tokens = answer.choices[0].logprobs.content
        assert len(tokens) == answer.usage.completion_tokens
        for token in tokens:
            best = [t.logprob for t in token.top_logprobs]
            assert len(best) == 3
            assert best == sorted(best, reverse=True)
            assert token.logprob == best[0], "a greedy token is the likeliest"
            assert -1e3 < token.logprob <= 0
            assert bytes(token.bytes).decode(errors="replace") == token.token or "bytes" in token.token
        spelled = b"".join(bytes(t.bytes) for t in tokens).decode(errors="replace")
        content = answer.choices[0].message.content
        assert spelled == content or answer.choices[0].finish_reason == "stop"
        plain = a.chat(client)
        assert plain.choices[0].message.content == content, "logprobs change nothing"
        assert plain.choices[0].logprobs is None


def several_choices(a: Asked) -> None:
    with a.sync() as client:
        wanted: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7}
        answer = a.chat(client, **wanted)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len(set(texts)) > 1, "every choice has a seed of its own"
        assert [c.message.content for c in a.chat(client, **wanted).choices] == texts, (
            "the same seed, the same answers"
        )
        parts = ["", "", ""]
        for chunk in a.chat(client, **wanted, stream=True):
            parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert parts == texts


def completions(a: Asked) -> None:
    with a.sync() as client:
        given: dict[str, Any] = {"model": a.model, "prompt": "import os", "max_tokens": 12, "temperature": 0}
        create = client.completions.create
        answer = create(**given, logprobs=2)
        choice = answer.choices[0]
        assert len(choice.logprobs.tokens) == answer.usage.completion_tokens
        two = create(**{**given, "prompt": ["x = 1", "import os"]})
        assert [c.index for c in two.choices] == [0, 1]
        assert two.choices[1].text == choice.text, "a list of prompts, each as if alone"
    # OpenAI's types have no place for two nulls of its own server: an unfinished chunk's reason, a
    # first token's score
    with a.sync(_strict_response_validation=False) as client:
        create = client.completions.create
        assert "".join(part.choices[0].text for part in create(**given, stream=True)) == choice.text
        echoed = create(**given, logprobs=1, echo=True)
        scores = echoed.choices[0].logprobs
        assert echoed.choices[0].text == "import os" + choice.text
        assert scores.token_logprobs[0] is None
        assert scores.top_logprobs[0] is None
        assert all(score <= 0 for score in scores.token_logprobs[1:])
        assert scores.token_logprobs[-answer.usage.completion_tokens :] == choice.logprobs.token_logprobs
        assert scores.text_offset == sorted(scores.text_offset)
        scored = create(**{**given, "max_tokens": 0}, logprobs=1, echo=True)
        assert (
            scored.choices[0].logprobs.token_logprobs == scores.token_logprobs[: scored.usage.prompt_tokens]
        )
        stop = choice.text[3:6]
        assert create(**given, stop=[stop]).choices[0].text == choice.text[: choice.text.index(stop)]


def errors(a: Asked) -> None:
    with a.sync() as client:
        unknown = refused(openai.BadRequestError, lambda: a.chat(client, extra_body={"temprature": 1}))
        assert "temprature" in unknown.message
        assert unknown.param == "temprature"
        assert "temperature" in unknown.message, "the nearest name"
        assert refused(openai.BadRequestError, lambda: a.chat(client, temperature=-1)).param == "temperature"
        refused(openai.BadRequestError, lambda: a.chat(client, messages=[]))
        assert a.chat(client, model="another").model == a.model, "any name is taken"
        too_long = [{"role": "user", "content": "word " * 3000}]
        assert "context" in refused(openai.BadRequestError, lambda: a.chat(client, messages=too_long)).message
    with a.sync(api_key="wrong") as client:
        refused(openai.AuthenticationError, lambda: a.chat(client))


def structured(a: Asked) -> None:
    class Verdict(BaseModel):
        right: bool
        colour: Literal["red", "green", "blue"]

    with a.sync() as client:
        given: dict[str, Any] = {"model": a.model, "messages": QUESTION, "max_tokens": 100, "temperature": 0}
        parsed = client.chat.completions.parse(**given, response_format=Verdict)
        assert isinstance(parsed.choices[0].message.parsed, Verdict)
        with client.chat.completions.stream(**given, response_format=Verdict) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


def tools(a: Asked) -> None:
    class Paint(BaseModel):
        colour: Literal["red", "green", "blue"]

    with a.sync() as client:
        given: dict[str, Any] = {
            "model": a.model, "messages": QUESTION, "max_tokens": 300, "temperature": 0, "tool_choice": "required",
            "parallel_tool_calls": False,  # random weights would not stop to call
            "tools": [openai.pydantic_function_tool(Paint, name="paint")],
        }  # fmt: skip
        (choice,) = client.chat.completions.parse(**given).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "paint"
        assert isinstance(call.function.parsed_arguments, Paint)
        with client.chat.completions.stream(**given) as stream:
            final = stream.get_final_completion()
        (streamed,) = final.choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments


def cancelled_stream(a: Asked) -> None:
    before = a.counts()[1]
    with a.sync() as client:
        stream = a.chat(client, **LONG, stream=True)
        for _ in range(3):
            next(stream)
        stream.close()
        assert a.becomes_idle()
        assert a.counts()[1] > before, "they ran to their end, for nobody"
        assert a.chat(client).choices, "the next one is answered"


def timeouts(a: Asked) -> None:
    with a.sync(timeout=0.02) as client:
        refused(openai.APITimeoutError, lambda: a.chat(client, **LONG))
    assert a.becomes_idle()
    with a.sync() as client:
        assert a.chat(client).choices, "the next one is answered"


def many_at_once(a: Asked) -> None:
    """Two dozen side by side, streamed or not: each as alone."""
    prompts = [[{"role": "user", "content": f"def f{i}(x):"}] for i in range(6)]
    with a.sync() as client:
        alone = [a.chat(client, messages=p).choices[0].message.content for p in prompts]

    async def ask() -> list[str]:
        async with a.asynchronous(max_retries=20) as client:

            async def one(i: int) -> str:
                given: dict[str, Any] = {"model": a.model, "messages": prompts[i % 6], "max_tokens": 24}
                given["temperature"] = 0
                if i % 2:
                    stream = await client.chat.completions.create(**given, stream=True)
                    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                return (await client.chat.completions.create(**given)).choices[0].message.content or ""

            return list(await asyncio.gather(*map(one, range(24))))

    assert asyncio.run(ask()) == alone * 4


def cancelled_tasks(a: Asked) -> None:
    """asyncio's own way to give up: a task that is cancelled between two chunks."""

    async def ask() -> None:
        async with a.asynchronous() as client:

            async def read() -> None:
                given: Any = {**LONG, "model": a.model, "stream": True}
                async for _ in await client.chat.completions.create(**given):
                    started.set()

            started = asyncio.Event()
            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()

    before = a.counts()[1]
    asyncio.run(ask())
    assert a.becomes_idle()
    assert a.counts()[1] > before, "they ran to their end, for nobody"


def refused(kind: type[Exception], ask: Callable[[], Any]) -> Any:
    try:
        answer = ask()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, but there was an answer: {answer}")


CHECKS = (
    models, chat, streamed_chat, logprobs, several_choices, completions, errors, structured, tools, cancelled_stream,
    timeouts, many_at_once, cancelled_tasks,
)  # fmt: skip


if __name__ == "__main__":
    asked = Asked(*sys.argv[1:])
    for check in CHECKS:
        check(asked)
    print(openai.__version__)
