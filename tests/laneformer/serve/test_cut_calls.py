"""A call that the limit of tokens, or a stop string, has cut: no API tells it as whole, and it can be sent back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.scripted import play

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

CUT = '{"city": "Ro'
WHOLE = '{"city": "Rome"}'
ASK = [{"role": "user", "content": "How warm is it?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def write_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'


@pytest.fixture(scope="module")
def client(model_folder):
    """Of a model that answers by the system's rules: what it writes, and why it ends."""
    script = [
        ("rule cut", write_call(CUT), "length"),
        ("rule stopped", write_call(CUT), "stop"),
        ("rule between", write_call(WHOLE), "length"),
        ("rule whole", write_call(WHOLE) + "}\n</tool_call>", "stop"),
        ("rule nothing", write_call(""), "length"),
        ("rule text", "It is wa", "length"),
        ("rule half", write_call('{"city": "\\ud83d"}'), "length"),
        ("Go on.", "Good.", "stop"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        play(script, patch)
        with in_process(model_folder, engine={"context_tokens": 2048}) as client:
            yield client


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# rule: whether the call is whole, whether the answer is, OpenAI's finish_reason
CASES: dict[str, tuple[bool, bool, str]] = {
    "cut": (False, False, "length"),
    "stopped": (False, True, "stop"),
    "between": (True, False, "length"),
    "whole": (True, True, "tool_calls"),
    "nothing": (False, False, "length"),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_api_says_whether_a_call_is_whole(client, rule):
    is_whole, is_complete, reason = CASES[rule]
    tools = {"tools": [{"type": "function", **FUNCTION}], "instructions": f"rule {rule}"}
    response = post(client, "/v1/responses", input=ASK, **tools)
    assert response["status"] == ("completed" if is_complete else "incomplete")
    assert [item["status"] for item in response["output"]] == [
        "completed" if is_whole else "incomplete"
    ]
    stream = client.post("/v1/responses", json={"input": ASK, **tools, "stream": True}).text
    assert ("function_call_arguments.done" in stream) == is_whole, "clients make the call then"
    (done,) = [
        json.loads(line[6:])
        for line in stream.splitlines()
        if '"response.output_item.done"' in line[:60]
    ]
    assert done["item"]["status"] == response["output"][0]["status"]

    system = [{"role": "system", "content": f"rule {rule}"}]
    choice = post(client, "/v1/chat/completions", messages=system + ASK, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == reason
    message = post(
        client,
        "/v1/messages",
        messages=ASK,
        system=f"rule {rule}",
        max_tokens=99,
        tools=[{"name": "weather", "input_schema": PARAMETERS}],
    )
    assert (
        message["stop_reason"]
        == {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[reason]
    )
    assert (message["content"][0]["input"] == {"city": "Rome"}) == is_whole
    ollama = post(client, "/api/chat", messages=system + ASK, tools=TOOLS, stream=False)
    assert ollama["done_reason"] == ("stop" if is_complete else "length")
    assert (
        ollama["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    ) == is_whole


def test_a_text_that_is_cut_is_incomplete(client):
    (item,) = post(client, "/v1/responses", input=ASK, instructions="rule text")["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "It is wa")


@pytest.mark.parametrize("rule", ["cut", "stopped", "nothing", "half"])
def test_our_own_answer_can_be_sent_back(client, rule):
    """In the API that gave it, by a client that changes nothing."""
    system, more = (
        [{"role": "system", "content": f"rule {rule}"}],
        [{"role": "user", "content": "Go on."}],
    )
    chat = post(client, "/v1/chat/completions", messages=system + ASK, tools=TOOLS)["choices"][0][
        "message"
    ]
    sent = [*ASK, chat, *more]
    assert (
        post(client, "/v1/chat/completions", messages=sent, tools=TOOLS)["choices"][0]["message"][
            "content"
        ]
        == "Good."
    )

    tools: Any = [{"type": "function", **FUNCTION}]
    output = post(client, "/v1/responses", input=ASK, instructions=f"rule {rule}", tools=tools)[
        "output"
    ]
    answer = post(client, "/v1/responses", input=[*ASK, *output, *more], tools=tools)
    assert answer["output"][0]["content"][0]["text"] == "Good."

    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    first = post(
        client, "/v1/messages", messages=ASK, system=f"rule {rule}", max_tokens=99, tools=tools
    )
    sent = [*ASK, {"role": "assistant", "content": first["content"]}, *more]
    assert (
        post(client, "/v1/messages", messages=sent, max_tokens=99, tools=tools)["content"][0][
            "text"
        ]
        == "Good."
    )

    first = post(client, "/api/chat", messages=system + ASK, tools=TOOLS, stream=False)["message"]
    sent = [*ASK, first, *more]
    assert (
        post(client, "/api/chat", messages=sent, tools=TOOLS, stream=False)["message"]["content"]
        == "Good."
    )
