"""Tests of the five APIs' own forms: completions, chat, /v1/responses, /v1/messages and Ollama's."""

import itertools
import json
import re
from pathlib import Path

import pytest

from laneformer.engine.channels import CHANNEL, CONSTRAIN, ENDS, MESSAGE, NEXT, START
from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import strict_client
from tests.laneformer.serve.harmony_assets import (
    ANALYSIS,
    ARGUMENTS,
    FINAL,
    HELLO,
    ROME,
    harmony_folder,
)
from tests.laneformer.serve.scripted import play

CALLED = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALLED_IN_HARMONY = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}{ARGUMENTS}"
SCRIPT = [
    ("", "<think>\nThey greet.\n</think>\n\nGood day!"),
    ("Rome?", f"<think>They ask.</think>I look.{CALLED}"),
    ("21 degrees", "It is warm."),
    (START, f"{ANALYSIS}They greet.{NEXT}{FINAL}Good day!"),
    (
        f"Rome?{ENDS[0]}",
        f"{ANALYSIS}They ask.{NEXT}{CHANNEL}commentary{MESSAGE}I look.{NEXT}{CALLED_IN_HARMONY}",
    ),
    (f'21 degrees"{ENDS[0]}', f"{FINAL}It is warm."),
]
# Requests and answers by API, without ids, times and token counts. A model that writes harmony must
# give the same answers as one that writes <think> and <tool_call>.
FORMS = Path(__file__).with_name("api_forms.json")
# what is another each time: ids, times, and counts, which depend on the tokenizer
VARYING = {
    r'"(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|fp_)?[0-9a-f]{9,32}"': r'"\1ID"',
    r'"created(_at)?": ("[^"]*"|\d+)': r'"created\1": 0',
    r'"(\w*(?:tokens|count|duration))": \d+': r'"\1": 0',
}


def without_ids(text: str) -> str:
    for pattern, fixed in VARYING.items():
        text = re.sub(pattern, fixed, text)
    return text


def outline(stream: list[str]) -> list[str]:
    """Return the events without their texts, with consecutive ones of a kind as one."""
    texts = r'"(delta|text|content|response|thinking|partial_json|arguments|reasoning_content)": "(?:[^"\\]|\\.)*"'
    events = [line for line in stream if line.startswith(("data: ", "{"))]
    blank = [
        re.sub(r'("sequence_number": )\d+', r"\g<1>0", re.sub(texts, r'"\1": ""', event))
        for event in events
    ]
    return [event for event, _ in itertools.groupby(blank)]


def post(client, path, status=200, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture(scope="module", autouse=True)
def play_script():
    with pytest.MonkeyPatch.context() as patch:
        play(SCRIPT, patch)
        yield


@pytest.fixture(scope="module")
def api_client(model_folder):
    with in_process(model_folder, engine={"context_tokens": 2048}, api_key="k") as client:
        client.headers["x-api-key"] = "k"
        yield client


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    folder = harmony_folder(tmp_path_factory.mktemp("harmony"))
    with in_process(folder, engine={"context_tokens": 2048}) as client:
        yield client


@pytest.mark.parametrize("model", ["api_client", "harmony"])
@pytest.mark.parametrize("form", json.loads(FORMS.read_text()), ids=lambda form: form["path"])
def test_answers_have_each_apis_form(request, model, form):
    client = request.getfixturevalue(model)
    for body, expected in zip(form["bodies"], form["answers"], strict=True):
        answer = client.post(form["path"], json={**form["fields"], **body})
        assert answer.status_code == 200, answer.text
        assert json.loads(without_ids(json.dumps(answer.json()))) == expected
    streamed = client.post(
        form["path"], json={**form["fields"], **form["bodies"][1], "stream": True}
    )
    lines = without_ids(streamed.text).splitlines()
    if model == "api_client":
        assert lines == form["stream"]
    assert outline(lines) == outline(form["stream"]), "texts may be cut elsewhere"


def test_reasoning_is_counted(api_client):
    usage = post(api_client, "/v1/chat/completions", messages=HELLO)["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    usage = post(api_client, "/v1/responses", input="Hello")["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    body = {"messages": HELLO, "max_tokens": 99, "system": [{"type": "text", "text": "Be kind."}]}
    count = post(api_client, "/v1/messages/count_tokens", **body)["input_tokens"]
    assert count == post(api_client, "/v1/messages", **body)["usage"]["input_tokens"]
    assert post(api_client, "/api/generate", prompt="Hello", stream=False)["eval_count"] > 0


def test_responses_through_the_strict_client(api_client):
    client = strict_client(api_client, "k")
    options = {"model": "any", "instructions": "Be kind.", "max_output_tokens": 90}
    answer = client.responses.create(input="Hello", **options)
    assert answer.status == "completed"
    assert answer.output_text == "Good day!"
    assert answer.model == "any"
    conversation = [*HELLO, *(item.model_dump() for item in answer.output), *HELLO]
    assert (
        client.responses.create(model="any", input=conversation).usage.input_tokens
        > answer.usage.input_tokens
    )
    with client.responses.stream(model="any", input=ROME) as stream:
        assert [event.type for event in stream][-1] == "response.completed"


def test_embeddings_are_refused(api_client):
    for path in ("/v1/embeddings", "/api/embed"):
        assert "embeddings are not supported" in str(
            post(api_client, path, 400, input="a")["error"]
        )


BAD = '{"type": "object", "properties": {"x": {"type": "y"}}}'
# of a tool, too: all remainders together are too many states
HEAVY = '{"type": "object", "properties": {"x": {"multipleOf": 9973}, "y": {"multipleOf": 9967}}}'
# path, a field that is wrong beside a good conversation, and the name in the error
WRONG = """
chat/completions | "tools": [{"type": "function", "function": {"name": "f", "parameters": HEAVY}}] \
| tools[0].function.parameters
chat/completions | "tool_choice": {"type": "function", "function": {"name": "g"}} | tool_choice
chat/completions | "response_format": {"type": "json_object", "schema": BAD} | response_format.schema
chat/completions | "tools": [{"type": "function", "function": {"name": "f"}}], \
"response_format": {"type": "json_object"} \
| response_format
chat/completions | "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}} \
| response_format.json_schema.schema
responses | "tools": [{"type": "function", "name": "f", "parameters": HEAVY}] | tools[0].parameters
responses | "tools": [{"type": "function"}] | tools[0].name
responses | "tool_choice": "required" | tool_choice
responses | "text": {"format": {"type": "json_schema", "schema": BAD}} | text.format.schema
responses | "input": [{"role": "robot", "content": "a"}] | input
responses | "max_output_tokens": 0 | max_output_tokens
responses | "input": [{"type": "item_reference", "id": "1"}] | input
responses | "input": [{"role": "user", "content": [{"type": "input_image"}]}] | input[].content
messages | "tools": [{"name": "f", "input_schema": HEAVY}] | tools[0].input_schema
messages | "output_config": {"format": {"type": "json_schema", "schema": BAD}} | output_config.format.schema
messages | "thinking": {"budget_tokens": "a"} | thinking.budget_tokens
messages | "stop_sequences": 3 | stop_sequences
api/chat | "format": BAD | format
api/chat | "options": {"temperature": "hot"} | options.temperature
api/chat | "messages": [{"role": "robot"}] | messages
api/chat | "messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}] | messages
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_errors_name_the_apis_own_field(api_client, row):
    path, field, name = row.replace("BAD", BAD).replace("HEAVY", HEAVY).split(" | ")
    base = {"input": "a"} if path == "responses" else {"messages": HELLO}
    fields = {**base, **json.loads(f"{{{field}}}")}
    error = post(
        api_client, f"/{path}" if path.startswith("api") else f"/v1/{path}", 400, **fields
    )["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(name)
    assert not isinstance(error, dict) or error.get("param", name) == name


PARAMETERS = {"type": "object", "properties": {"mail": {"type": "string", "pattern": "^(?!a).+@"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


@pytest.mark.parametrize(
    ("path", "tool", "place"),
    [
        ("/v1/chat/completions", FUNCTION, "function.parameters"),
        ("/v1/responses", {"type": "function", **FUNCTION["function"]}, "parameters"),
        ("/v1/messages", {"name": "f", "input_schema": PARAMETERS}, "input_schema"),
        ("/api/chat", FUNCTION, "function.parameters"),
    ],
)
def test_a_keyword_that_no_grammar_knows_is_named(api_client, path, tool, place):
    # no grammar looks ahead, so the pattern is left out and a header names it
    question = (
        {"input": "Rome?"} if path == "/v1/responses" else {"messages": ROME, "max_tokens": 9}
    )
    body = {**question, "tools": [tool]}
    answer = api_client.post(path, json={"model": "tiny", "stream": False, **body})
    assert answer.status_code == 200, answer.text
    assert f"tools[0].{place}.properties.mail.pattern" in answer.headers["warnings"].split(", ")


def test_errors_have_each_apis_form(api_client):
    wrong = post(api_client, "/v1/messages", 400, messages=[])
    assert wrong["type"] == "error"
    assert wrong["error"]["type"] == "invalid_request_error"
    assert "messages" in post(api_client, "/api/chat", 400, messages=3)["error"]
    for path in ("/v1/messages", "/api/chat", "/v1/responses"):
        assert api_client.post(path, json={}, headers={"x-api-key": "other"}).status_code == 401


def test_ollama_knows_the_model(api_client):
    assert post(api_client, "/api/generate", model="tiny")["done_reason"] == "load"
    # without a content type, as curl -d sends it
    assert api_client.post("/api/chat", content=json.dumps({"messages": HELLO})).status_code == 200
    assert post(api_client, "/api/show", model="tiny")["model_info"]["llama.context_length"] == 2048
    for path in ("tags", "ps"):
        models = api_client.get(f"/api/{path}").json()["models"]
        assert [model["name"] for model in models] == ["tiny"]
    assert api_client.get("/api/version").json()["version"]
