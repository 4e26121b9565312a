"""Chat completions, /v1/responses, /v1/messages and Ollama's API: each tells the same conversation in its
own form, whether the model writes <think> and <tool_call> or harmony.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from laneformer.engine.channels import CHANNEL, CONSTRAIN, ENDS, MESSAGE, NEXT, START
from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import data_of, strict_client
from tests.laneformer.serve.harmony_assets import CONTROL, harmony_folder
from tests.laneformer.serve.scripted import play

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

ARGUMENTS = '{"city": "Rome"}'
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
CALLED = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALLED_IN_HARMONY = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}{ARGUMENTS}"
SCRIPT = [
    ("", "<think>\nThey greet.\n</think>\n\nGood day!"),
    ("Rome?", f"<think>They ask.</think>I look.{CALLED}"),
    ("21 degrees", "It is warm."),
    (START, f"{ANALYSIS}They greet.{NEXT}{FINAL}Good day!"),
    (f"Rome?{ENDS[0]}",
     f"{ANALYSIS}They ask.{NEXT}{CHANNEL}commentary{MESSAGE}I look.{NEXT}{CALLED_IN_HARMONY}"),
    (f'21 degrees"{ENDS[0]}', f"{FINAL}It is warm."),
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city"}
FUNCTION = {"type": "function", "function": {**TOOL, "parameters": SCHEMA}}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ROME: list[Any] = [{"role": "user", "content": "How warm is it in Rome?"}]


Place = tuple[str, str | None]  # a key, and the `type` of the objects that have it there


class Api(NamedTuple):
    """Where an API says what. streamed: the same in its events, where that differs."""

    path: str
    body: Callable[[list[Any]], dict[str, Any]]
    result: Callable[
        [Any], list[Any]
    ]  # turns behind the question about Rome: an answer with a call, what it gave
    reasoning: Place
    content: Place
    name: Place
    arguments: Place
    end: Place
    ends: tuple[str, str]  # of an answer, and of one with a call
    streamed: tuple[Place, ...] = ()


CHAT = Api(
    "/v1/chat/completions",
    lambda turns: {"messages": turns, "tools": [FUNCTION]},
    lambda answer: [
        message := answer["choices"][0]["message"],
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21 degrees"},
    ],
    ("reasoning_content", None), ("content", None), ("name", None), ("arguments", None), ("finish_reason", None),
    ("stop", "tool_calls"),
)  # fmt: skip
RESPONSES = Api(
    "/v1/responses",
    lambda turns: {"input": turns, "tools": [{"type": "function", **TOOL, "parameters": SCHEMA}]},
    lambda answer: [
        *answer["output"],
        {"type": "function_call_output", "call_id": answer["output"][-1]["call_id"], "output": "21 degrees"},
    ],
    ("text", "reasoning_text"), ("text", "output_text"), ("name", "function_call"),
    ("arguments", "function_call"), ("status", None),
    ("completed", "completed"),
    tuple(
        ("delta", f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    ),
)  # fmt: skip
MESSAGES = Api(
    "/v1/messages",
    lambda turns: {"messages": turns, "max_tokens": 400, "tools": [{**TOOL, "input_schema": SCHEMA}]},
    lambda answer: [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [{
            "type": "tool_result", "tool_use_id": answer["content"][-1]["id"],
            "content": [{"type": "text", "text": "21 degrees"}],
        }]},
    ],
    ("thinking", "thinking"), ("text", "text"), ("name", "tool_use"), ("input", "tool_use"), ("stop_reason", None),
    ("end_turn", "tool_use"),
    (("thinking", "thinking_delta"), ("text", "text_delta"), ("partial_json", "input_json_delta")),
)  # fmt: skip
OLLAMA = Api(
    "/api/chat",
    lambda turns: {"messages": turns, "tools": [FUNCTION], "stream": False},
    lambda answer: [
        answer["message"],
        {"role": "tool", "tool_name": "weather", "content": "21 degrees"},
    ],
    ("thinking", None), ("content", None), ("name", None), ("arguments", None), ("done_reason", None),
    ("stop", "stop"),
)  # fmt: skip


def values_at(value: Any, place: Place) -> Iterator[Any]:
    key, kind = place
    if isinstance(value, dict):
        if value.get(key) and kind in (None, value.get("type")):
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from values_at(inner, place)


def read(answer: Any, places: Sequence[Place], end: Place) -> tuple[str, str, Any, str]:
    """Reasoning, content, arguments of a call, and the reason of the end; of an answer or its events."""
    reasoning, content = ("".join(values_at(answer, place)) for place in places[:2])
    arguments = list(values_at(answer, places[2]))
    if arguments and isinstance(arguments[0], str):
        arguments = [json.loads("".join(arguments))]
    return reasoning, content, arguments, [*values_at(answer, end)][-1]


def events_of(stream: str) -> list[dict[str, Any]]:
    """The JSON of a stream, whose `event:` lines, where it has some, must say what the data is."""
    lines = stream.splitlines()
    events = [json.loads(data) for data in data_of(stream) if data != "[DONE]"]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names in ([], [event.get("type") for event in events])
    return events or [json.loads(line) for line in lines]  # Ollama's have no prefix


def post(client: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture(scope="module", autouse=True)
def _script() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        play(SCRIPT, patch)
        yield


@pytest.fixture(scope="module")
def served(model_folder: Path) -> Iterator[TestClient]:
    with in_process(model_folder, engine={"context_tokens": 2048}, api_key="k") as client:
        client.headers["x-api-key"] = "k"
        yield client


@pytest.fixture(scope="module")
def harmony(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = harmony_folder(model_folder, tmp_path_factory.mktemp("harmony") / "model")
    with in_process(folder, engine={"context_tokens": 2048}) as client:
        yield client


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES, OLLAMA], ids=lambda api: api.path)
@pytest.mark.parametrize("model", ["served", "harmony"])
def test_reasoning_answer_and_calls(request: pytest.FixtureRequest, model: str, api: Api) -> None:
    client, places = request.getfixturevalue(model), (api.reasoning, api.content, api.arguments)
    greeting = ("They greet.", "Good day!", [], api.ends[0])
    call = ("They ask.", "I look.", [{"city": "Rome"}], api.ends[1])
    for turns, expected in ((HELLO, greeting), (ROME, call)):
        whole = post(client, api.path, **api.body(turns))
        assert read(whole, places, api.end) == expected
        stream = client.post(api.path, json={**api.body(turns), "stream": True}).text
        assert read(events_of(stream), api.streamed or places, api.end) == expected
        assert not any(json.dumps(mark)[1:-1] in stream + json.dumps(whole) for mark in CONTROL)
        for answer in (whole, events_of(stream)):
            assert set(values_at(answer, api.name)) == ({"weather"} if turns is ROME else set())
    end = post(client, api.path, **api.body([*ROME, *api.result(whole)]))
    assert read(end, places, api.end) == ("", "It is warm.", [], api.ends[0])


def test_events_have_each_apis_order(served: TestClient) -> None:
    body = {"messages": ROME, "max_tokens": 99, "tools": [{**TOOL, "input_schema": SCHEMA}], "stream": True}
    kinds = [event["type"] for event in events_of(served.post("/v1/messages", json=body).text)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    events = events_of(served.post("/v1/responses", json={"input": "Hello", "stream": True}).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["store"] is False
    lines = events_of(served.post("/api/chat", json={"messages": HELLO}).text)
    assert [line["done"] for line in lines] == [*[False] * (len(lines) - 1), True]


def test_reasoning_is_counted(served: TestClient) -> None:
    usage = post(served, "/v1/chat/completions", messages=HELLO)["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    usage = post(served, "/v1/responses", input="Hello")["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


def test_responses_through_the_strict_client(served: TestClient) -> None:
    client = strict_client(served, "k")
    options: Any = {"model": "any", "instructions": "Be kind.", "max_output_tokens": 90}
    answer = client.responses.create(input="Hello", **options)
    assert (answer.status, answer.output_text, answer.model) == ("completed", "Good day!", "any")
    sent: Any = [*HELLO, *(item.model_dump() for item in answer.output), *HELLO]
    assert client.responses.create(model="any", input=sent).usage.input_tokens > answer.usage.input_tokens
    tools: Any = [{"type": "function", **TOOL, "parameters": SCHEMA, "strict": False}]
    with client.responses.stream(model="any", input=ROME, tools=tools) as stream:
        kinds = [event.type for event in stream]
        output = stream.get_final_response().output
    assert [item.type for item in output] == ["reasoning", "message", "function_call"]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 3
    assert "response.function_call_arguments.done" in kinds


def test_blocks_of_messages(served: TestClient) -> None:
    system = [{"type": "text", "text": "Be kind."}]
    body = {"model": "claude", "max_tokens": 99, "system": system, "messages": HELLO}
    answer = post(served, "/v1/messages", **body)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "They greet.", "signature": ""},
        {"type": "text", "text": "Good day!", "citations": None},
    ]
    assert (answer["model"], answer["role"]) == ("claude", "assistant")
    count = post(served, "/v1/messages/count_tokens", **body)
    assert count["input_tokens"] == answer["usage"]["input_tokens"]


def test_what_no_api_can_do_is_refused(served: TestClient) -> None:
    image = {"role": "user", "content": [{"type": "input_image"}]}
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input"),
        ({"input": [image]}, "input[].content"),
    ):
        error = post(served, "/v1/responses", 400, **{"input": "Hello", **fields})["error"]
        assert error["param"] == param
    for path in ("/v1/embeddings", "/api/embed"):
        assert "embeddings are not supported" in str(post(served, path, 400, input="a")["error"])


def test_what_has_no_effect_is_named(served: TestClient) -> None:
    search = {"type": "web_search"}
    for path, body in (
        ("/v1/responses", {"input": "Hello", "tools": [search], "truncation": "auto"}),
        ("/v1/messages", {"messages": HELLO, "tools": [search], "context_management": {}}),
    ):
        answer = served.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        names = answer.headers["warnings"].split(", ")
        assert len(names) == 2
        assert "tools[].web_search" in names


def test_errors_have_each_apis_form(served: TestClient) -> None:
    wrong = post(served, "/v1/messages", 400, messages=[])
    assert (wrong["type"], wrong["error"]["type"]) == ("error", "invalid_request_error")
    assert "messages" in post(served, "/api/chat", 400, messages=3)["error"]
    for path in ("/v1/messages", "/api/chat", "/v1/responses"):
        assert served.post(path, json={}, headers={"x-api-key": "other"}).status_code == 401


def test_ollama_generates_and_knows_the_model(served: TestClient) -> None:
    options = {"num_ctx": 4096, "num_predict": 50, "temperature": 0}
    answer = post(served, "/api/generate", prompt="Hello", stream=False, options=options)
    assert answer["response"] == "Good day!"
    assert answer["eval_count"] > 0
    assert post(served, "/api/generate", model="tiny")["done_reason"] == "load"
    # without a content type, as curl -d sends it
    assert served.post("/api/chat", content=json.dumps({"messages": HELLO})).status_code == 200
    assert post(served, "/api/show", model="tiny")["model_info"]["llama.context_length"] == 2048
    for path in ("tags", "ps"):
        models = served.get(f"/api/{path}").json()["models"]
        assert [model["name"] for model in models] == ["tiny"]
    assert served.get("/api/version").json()["version"]
