"""/v1/responses, /v1/messages and Ollama's API: each tells the same conversation in its own form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.laneformer.serve.conftest import Server
from tests.laneformer.serve.scripted import scripted

THOUGHT = "<think>\nThey greet.\n</think>\n\nGood day!"
CALL = '<think>I look.</think>Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPT = [
    ("", THOUGHT),
    ("Rome?", CALL),
    ("21 degrees", "It is warm."),
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city"}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ROME: list[Any] = [{"role": "user", "content": "How warm is it in Rome?"}]


@pytest.fixture(scope="module")
def served(model_folder: Path) -> Iterator[Server]:
    server = scripted(model_folder, SCRIPT, engine={"context_tokens": 2048}, api_key="k")
    yield server
    assert server.stop() == 0, server.output()


def post(server: Server, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, headers={"x-api-key": "k"})
    assert answer.status_code == status, answer.text
    return answer.json()


def events(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """Of a stream, whose `event:` lines must say what the data is."""
    body = {**body, "stream": True}
    answer = httpx.post(f"{server.url}{path}", json=body, headers={"x-api-key": "k"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for part in answer.text.split("\n\n"):
        if part and not part.startswith(":"):
            name, data = part.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def test_reasoning_in_chat_completions(served: Server) -> None:
    message = post(served, "/v1/chat/completions", messages=HELLO)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("They greet.", "Good day!")
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    text = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers={"x-api-key": "k"}).text
    chunks = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n")[:-2]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.fixture(scope="module")
def client(served: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="k", _strict_response_validation=True, max_retries=0
    )


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="any", input="Hello", instructions="Be kind.", max_output_tokens=90
    )
    assert (answer.status, answer.output_text, answer.model) == ("completed", "Good day!", "any")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "They greet."
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    again = client.responses.create(
        model="any", input=[*HELLO, *(i.model_dump() for i in answer.output), *HELLO]
    )
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_responses_streamed(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL, "parameters": SCHEMA, "strict": False}
    with client.responses.stream(model="any", input=ROME, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    call: Any = answer.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 3
    assert "response.function_call_arguments.done" in kinds
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    sent = [*ROME, *(item.model_dump(exclude_none=True) for item in answer.output), result]
    assert client.responses.create(model="any", input=sent, tools=[tool]).output_text == "It is warm."


def test_responses_tell_what_they_are(served: Server) -> None:
    found = events(served, "/v1/responses", input="Hello")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["response"]["store"] is False
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[].content"),
    ):
        error = post(served, "/v1/responses", 400, **{"input": "Hello", **fields})["error"]
        assert error["param"] == param


def test_messages(served: Server) -> None:
    body = {
        "model": "claude",
        "max_tokens": 99,
        "system": [{"type": "text", "text": "Be kind."}],
        "messages": HELLO,
    }
    answer = post(served, "/v1/messages", **body)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "They greet.", "signature": ""},
        {"type": "text", "text": "Good day!", "citations": None},
    ]
    assert (answer["model"], answer["stop_reason"], answer["role"]) == ("claude", "end_turn", "assistant")
    assert (
        post(served, "/v1/messages/count_tokens", **body)["input_tokens"] == answer["usage"]["input_tokens"]
    )
    kinds = [event["type"] for event in events(served, "/v1/messages", **body)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_messages_with_tools(served: Server) -> None:
    tools = [{**TOOL, "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    body = {"max_tokens": 400, "messages": ROME, "tools": tools, "tool_choice": {"type": "auto"}}
    answer = post(served, "/v1/messages", **body)
    assert answer["stop_reason"] == "tool_use"
    used = answer["content"][-1]
    assert (used["name"], used["input"]) == ("weather", {"city": "Rome"})
    result = {
        "type": "tool_result",
        "tool_use_id": used["id"],
        "content": [{"type": "text", "text": "21 degrees"}],
    }
    turns = [
        *ROME,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    said = post(served, "/v1/messages", **{**body, "messages": turns})
    assert said["content"] == [{"type": "text", "text": "It is warm.", "citations": None}]


def test_what_has_no_effect_is_named(served: Server) -> None:
    tool = {"type": "web_search"}
    for path, body in (
        ("/v1/responses", {"input": "Hello", "tools": [tool], "truncation": "auto"}),
        ("/v1/messages", {"messages": HELLO, "tools": [tool], "context_management": {}}),
    ):
        answer = httpx.post(f"{served.url}{path}", json={**body, "stream": True}, headers={"x-api-key": "k"})
        assert answer.status_code == 200, answer.text
        names = answer.headers["warnings"].split(", ")
        assert len(names) == 2
        assert "tools[].web_search" in names


def test_errors_have_each_apis_form(served: Server) -> None:
    wrong = post(served, "/v1/messages", 400, messages=[])
    assert (wrong["type"], wrong["error"]["type"]) == ("error", "invalid_request_error")
    assert "messages" in post(served, "/api/chat", 400, messages=3)["error"]
    for path in ("/v1/messages", "/api/chat", "/v1/responses"):
        assert httpx.post(f"{served.url}{path}", json={}).status_code == 401
    for path in ("/v1/embeddings", "/api/embed"):
        assert "embeddings are not supported" in str(post(served, path, 400, input="a")["error"])


def test_ollama_chat(served: Server) -> None:
    body = {
        "model": "tiny",
        "messages": HELLO,
        "options": {"num_ctx": 4096, "num_predict": 50, "temperature": 0},
    }
    whole = post(served, "/api/chat", **body, stream=False)
    assert whole["message"] == {"role": "assistant", "content": "Good day!", "thinking": "They greet."}
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert whole["eval_count"] > 0
    text = httpx.post(f"{served.url}/api/chat", content=json.dumps(body), headers={"x-api-key": "k"}).text
    lines = [json.loads(line) for line in text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Good day!"
    assert [line["done"] for line in lines] == [*[False] * (len(lines) - 1), True]
    tool = {"type": "function", "function": {**TOOL, "parameters": SCHEMA}}
    called = post(served, "/api/chat", messages=ROME, tools=[tool], stream=False)["message"]
    assert called["tool_calls"] == [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    sent = [*ROME, called, {"role": "tool", "tool_name": "weather", "content": "21 degrees"}]
    assert post(served, "/api/chat", messages=sent, stream=False)["message"]["content"] == "It is warm."


def test_ollama_generate_and_facts(served: Server) -> None:
    assert post(served, "/api/generate", prompt="Hello", stream=False)["response"] == "Good day!"
    assert post(served, "/api/generate", model="tiny")["done_reason"] == "load"
    assert post(served, "/api/show", model="tiny")["model_info"]["llama.context_length"] == 2048
    for path in ("tags", "ps"):
        found = httpx.get(f"{served.url}/api/{path}", headers={"x-api-key": "k"}).json()
        assert [model["name"] for model in found["models"]] == ["tiny"]
    assert httpx.get(f"{served.url}/api/version", headers={"x-api-key": "k"}).json()["version"]
