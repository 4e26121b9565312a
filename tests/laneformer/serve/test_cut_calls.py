"""Tests that no API reports a tool call as whole that the token limit or a stop string has cut."""

import json

import pytest

from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import Endpoint, data_of
from tests.laneformer.serve.scripted import play

CUT = '{"city": "Ro'
WHOLE = '{"city": "Rome"}'
QUESTION = {"role": "user", "content": "How warm is it?"}
GO_ON = {"role": "user", "content": "Go on."}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
CHAT, RESPONSES, MESSAGES, OLLAMA = PATHS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)


def write_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'


@pytest.fixture(scope="module")
def client(model_folder):
    """Yield a client of a model that writes, and ends, as the system message says."""
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


def ask(client, path, rule, *turns, **more):
    """Return an answer's first part, and the whole answer, in the terms of the API at this path."""
    system = f"rule {rule}" if rule else ""
    if path == RESPONSES:
        tool = {"type": "function", **FUNCTION}
        body = {"input": turns, "instructions": system}
    elif path == MESSAGES:
        tool = {"name": "weather", "input_schema": PARAMETERS}
        body = {"messages": turns, "system": system, "max_tokens": 99}
    else:
        tool = {"type": "function", "function": FUNCTION}
        rules = [{"role": "system", "content": system}] if rule else []
        body = {"messages": [*rules, *turns], "stream": False}
    answer = Endpoint(client, path).post(**body, tools=[tool])
    parts = {RESPONSES: "output", MESSAGES: "content", CHAT: "choices"}
    return answer[parts[path]][0] if path in parts else answer["message"], answer


# rule: whether the call is whole, whether the answer is, OpenAI's finish_reason
CASES = {
    "cut": (False, False, "length"),
    "stopped": (False, True, "stop"),
    "between": (True, False, "length"),
    "whole": (True, True, "tool_calls"),
    "nothing": (False, False, "length"),
}
ANTHROPIC_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


@pytest.mark.parametrize("rule", CASES)
def test_each_api_says_whether_a_call_is_whole(client, rule):
    is_whole, is_complete, reason = CASES[rule]
    item, response = ask(client, RESPONSES, rule, QUESTION)
    assert response["status"] == ("completed" if is_complete else "incomplete")
    assert item["status"] == ("completed" if is_whole else "incomplete")
    body = {"input": [QUESTION], "instructions": f"rule {rule}", "tools": response["tools"]}
    stream = client.post(RESPONSES, json={**body, "stream": True}).text
    assert ("function_call_arguments.done" in stream) == is_whole, "clients make the call then"
    events = map(json.loads, data_of(stream))
    (ended,) = (event for event in events if event["type"] == "response.output_item.done")
    assert ended["item"]["status"] == item["status"]

    assert ask(client, CHAT, rule, QUESTION)[0]["finish_reason"] == reason
    call, message = ask(client, MESSAGES, rule, QUESTION)
    assert message["stop_reason"] == ANTHROPIC_REASONS[reason]
    assert (call["input"] == {"city": "Rome"}) == is_whole
    message, ollama = ask(client, OLLAMA, rule, QUESTION)
    assert ollama["done_reason"] == ("stop" if is_complete else "length")
    assert (message["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}) == is_whole


def test_a_text_that_is_cut_is_incomplete(client):
    item, _ = ask(client, RESPONSES, "text", QUESTION)
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"] == "It is wa"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", ["cut", "stopped", "nothing", "half"])
def test_our_own_answer_can_be_sent_back(client, rule, path):
    # to the API that gave it, by a client that changes nothing
    part, answer = ask(client, path, rule, QUESTION)
    turns = {
        CHAT: lambda: [part["message"]],
        RESPONSES: lambda: answer["output"],
        MESSAGES: lambda: [{"role": "assistant", "content": answer["content"]}],
        OLLAMA: lambda: [part],
    }[path]()
    last, _ = ask(client, path, "", QUESTION, *turns, GO_ON)
    assert '"Good."' in json.dumps(last)
