"""OpenAI's harmony, which gpt-oss writes: told apart in every API, forced by grammars, and back in its own template."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import AsyncGenerator, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from tokenizers import AddedToken, Tokenizer

from laneformer.chat import ChatTemplate
from laneformer.engine import Engine
from laneformer.engine.channels import CHANNEL, CONSTRAIN, ENDS, MESSAGE, NEXT, START, Harmony
from laneformer.serve.app import create_app
from laneformer.serve.choices import Choices, Piece
from laneformer.serve.grammar import Grammars
from laneformer.serve.options import ServerOptions
from laneformer.serve.tool_calls import HARMONY, ToolCalling

BUDGET = 25  # tokens of reasoning, more than its header takes
TEMPLATE = (files("trl") / "chat_templates" / "gptoss.jinja").read_text()
CONTROL = [*ENDS, START, CHANNEL, CONSTRAIN, MESSAGE]
THOUGHT = f"{CHANNEL}analysis{MESSAGE}They greet.{NEXT}"
CALLED = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
ARGUMENTS = '{"city": "Rome"}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city"}
TOOLS = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ROME: list[Any] = [{"role": "user", "content": "How warm is it in Rome?"}]
SCRIPT = [
    ("", f"{THOUGHT}{CHANNEL}final{MESSAGE}Good day!"),
    ("Rome?", f"{THOUGHT}{CHANNEL}commentary{MESSAGE}I look.{NEXT}{CALLED}{ARGUMENTS}"),
    ("21 degrees", f"{CHANNEL}final{MESSAGE}It is warm."),
]


def test_text_is_told_as_it_comes() -> None:
    for before, text in (("", "Hello"), (f"{CHANNEL}final{MESSAGE}", "Hello"), (CALLED, "{")):
        reader = Harmony(calls=True)
        reader.push(before)
        assert reader.push(text) == ("", text)


def harmony_folder(model: Path, to: Path) -> Path:
    """The model with the tokens of the format in place of the last pieces of its vocabulary, and gpt-oss's template."""
    shutil.copytree(model, to)
    described = json.loads((to / "tokenizer.json").read_text())
    pieces = sorted(described["model"]["vocab"], key=described["model"]["vocab"].__getitem__)
    merged = set(pieces[-len(CONTROL) :])
    ids = [described["model"]["vocab"].pop(piece) for piece in pieces[-len(CONTROL) :]]
    described["model"]["merges"] = [
        pair for pair in described["model"]["merges"] if not merged & {*pair, "".join(pair)}
    ]
    for name, i in zip(CONTROL, ids, strict=True):
        described["model"]["vocab"][name] = i
    made = Tokenizer.from_str(json.dumps(described))
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    assert [made.token_to_id(name) for name in CONTROL] == ids
    made.save(str(to / "tokenizer.json"))
    config = json.loads((to / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    ends = [made.token_to_id(name) for name in ENDS[1:]]
    (to / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": ends}))
    return to


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harmony_folder(model_folder, tmp_path_factory.mktemp("harmony") / "model")


@pytest.fixture(scope="module")
def known(folder: Path) -> Grammars:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return Grammars(tokenizer, size, [tokenizer.token_to_id(name) for name in ENDS[1:]], harmony=True)


def test_a_conversation_in_its_own_template(known: Grammars) -> None:
    calling = ToolCalling({"chat_template": TEMPLATE}, known)
    assert (calling.form, calling.described) == (HARMONY, False)
    use, call = calling.use(TOOLS), {"name": "weather", "arguments": {"city": "Rome"}}
    calls = [{"id": i, "type": "function", "function": call} for i in ("a", "b")]
    sent = [
        *HELLO,
        {"role": "assistant", "content": "Good day!", "reasoning_content": "hidden"},
        *ROME,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Of Rome.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
    ]
    text = ChatTemplate({"chat_template": TEMPLATE}).render(
        use.messages(sent), tools=use.template_tools, add_generation_prompt=True
    )
    assert "type weather = (_: {" in text
    written = (
        f'{START}assistant to=functions.weather{CHANNEL}commentary json{MESSAGE}{{"city": "Rome"}}{ENDS[1]}'
    )
    gave = f"{START}functions.weather to=assistant{CHANNEL}commentary{MESSAGE}"
    assert text.endswith(
        f"{START}assistant{CHANNEL}final{MESSAGE}Good day!{ENDS[0]}{START}user{MESSAGE}{ROME[0]['content']}{ENDS[0]}"
        f"{START}assistant{CHANNEL}analysis{MESSAGE}Of Rome.\nI look.{ENDS[0]}"
        f'{written}{gave}"first"{ENDS[0]}{written}{gave}"second"{ENDS[0]}{START}assistant'
    )
    assert "hidden" not in text
    assert sent[3]["tool_calls"] == calls, "what the client sent is not changed"


def goes(known: Grammars, grammar: Any, text: str) -> int:
    """How many tokens of the text, and of the end behind it, the grammar allows."""
    ids = known.tokenizer.encode(text, add_special_tokens=False).ids
    for index, token in enumerate([*ids, known.eos_ids[0]]):
        if not grammar.mask(index)[token // 32] >> token % 32 & 1:
            return index - len(ids)
        grammar.accept(token)
    return 1


def test_grammars_leave_room_for_reasoning(known: Grammars) -> None:
    """1: all of the text may be written, and end there; 0: it may not end there; less: not all of it."""
    use, final = ToolCalling({"chat_template": TEMPLATE}, known).use, f"{CHANNEL}final{MESSAGE}Fine."
    role = f" to=functions.weather{CHANNEL}commentary"
    calls = [CALLED + ARGUMENTS, f"{role} json{MESSAGE}{ARGUMENTS}", f"{role}{MESSAGE}{ARGUMENTS}"]
    said = f"{CHANNEL}commentary{MESSAGE}I look.{NEXT}"
    for before, call in itertools.product(("", THOUGHT), calls):
        assert goes(known, use(TOOLS).grammar(), before + call) == 1
        assert goes(known, use(TOOLS, "required").grammar(), before + call) == 1
        assert goes(known, use(TOOLS).grammar(), before + said + call) == 1
    for before in ("", THOUGHT, THOUGHT + said):
        assert goes(known, use(TOOLS).grammar(), before + final) == 1
    assert goes(known, use(TOOLS, "required").grammar(), THOUGHT + final) < 0
    assert goes(known, use(TOOLS).grammar(), THOUGHT + THOUGHT) < 0
    assert goes(known, use(TOOLS).grammar(), CALLED.replace("weather", "other")) < 0
    assert goes(known, use(TOOLS).grammar(), CALLED + '{"city": 1}') < 0
    for form, value in (({"type": "json_object"}, '{"a": 1}'), ({"type": "text"}, None)):
        grammar = known.of_response_format(form)
        assert (grammar is None) == (value is None)
        if grammar is not None:
            assert goes(known, grammar.copy(), f"{THOUGHT}{CHANNEL}final{MESSAGE}{value}") == 1
            assert goes(known, grammar.copy(), f"{CHANNEL}final{MESSAGE}{value}") == 1
            assert goes(known, grammar.copy(), str(value)) < 0
            assert goes(known, grammar.copy(), final) < 0


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    options = ServerOptions(model="tiny", api_key=None)
    with (
        Engine.from_pretrained(folder, threads=1, cache=False, context_tokens=2048) as engine,
        TestClient(create_app(engine, options), "http://localhost") as client,
    ):
        yield client


@pytest.fixture
def served(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """Its model says what is written above, in pieces of five characters."""

    async def scripted(self: Choices, choice: int) -> AsyncGenerator[Piece, None]:
        prompt = self.context.tokenizer.decode(self.prompts[0], skip_special_tokens=False)
        text = [answer for key, answer in SCRIPT if key in prompt][-1]
        for start in range(0, len(text), 5):
            yield Piece(choice, text[start : start + 5], (), [0])
            self.generated[choice] += 1
        yield Piece(choice, finish_reason="stop")

    monkeypatch.setattr(Choices, "_choice", scripted)
    monkeypatch.setattr(Choices, "begin", lambda self: None)
    return client


def asked(client: TestClient, path: str, **body: Any) -> str:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert not any(json.dumps(mark)[1:-1] in answer.text for mark in CONTROL), answer.text
    return answer.text


def data_of(text: str) -> list[dict[str, Any]]:
    """Of the events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chat_completions(served: TestClient) -> None:
    message = json.loads(asked(served, "/v1/chat/completions", messages=HELLO))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("They greet.", "Good day!")
    body = {"messages": ROME, "tools": TOOLS}
    whole = json.loads(asked(served, "/v1/chat/completions", **body))["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    said = whole["message"]
    assert (said["reasoning_content"], said["content"]) == ("They greet.", "I look.")
    assert [c["function"] for c in said["tool_calls"]] == [{"name": "weather", "arguments": ARGUMENTS}]
    chunks = data_of(asked(served, "/v1/chat/completions", **body, stream=True))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == said[name]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert "".join(call["arguments"] for call in calls) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "21 degrees"}
    after = {**body, "messages": [*ROME, said, result]}
    last = json.loads(asked(served, "/v1/chat/completions", **after))["choices"][0]
    assert (last["message"]["content"], last["finish_reason"]) == ("It is warm.", "stop")


def test_responses(served: TestClient) -> None:
    tools = [{"type": "function", **TOOL, "parameters": SCHEMA}]
    answer = json.loads(asked(served, "/v1/responses", input=ROME, tools=tools))
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert answer["output"][0]["content"][0]["text"] == "They greet."
    assert (answer["output"][2]["name"], answer["output"][2]["arguments"]) == ("weather", ARGUMENTS)
    events = data_of(asked(served, "/v1/responses", input=ROME, tools=tools, stream=True))
    done = events[-1]["response"]["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    for kind, text in (
        ("reasoning_text", "They greet."),
        ("output_text", "I look."),
        ("function_call_arguments", ARGUMENTS),
    ):
        assert "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta") == text
    result = {"type": "function_call_output", "call_id": done[2]["call_id"], "output": "21 degrees"}
    last = json.loads(asked(served, "/v1/responses", input=[*ROME, *done, result], tools=tools))
    assert last["output"][-1]["content"][0]["text"] == "It is warm."


def test_messages(served: TestClient) -> None:
    body: dict[str, Any] = {"max_tokens": 400, "messages": ROME, "tools": [{**TOOL, "input_schema": SCHEMA}]}
    answer = json.loads(asked(served, "/v1/messages", **body))
    kinds = ["thinking", "text", "tool_use"]
    assert (answer["stop_reason"], [block["type"] for block in answer["content"]]) == ("tool_use", kinds)
    assert answer["content"][2]["input"] == {"city": "Rome"}
    events = data_of(asked(served, "/v1/messages", **body, stream=True))
    assert [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"] == kinds
    told = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    for name, text in (("thinking", "They greet."), ("text", "I look."), ("partial_json", ARGUMENTS)):
        assert "".join(delta.get(name, "") for delta in told) == text
    result = {"type": "tool_result", "tool_use_id": answer["content"][2]["id"], "content": "21 degrees"}
    turns = [
        *ROME,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    last = json.loads(asked(served, "/v1/messages", **{**body, "messages": turns}))
    assert last["content"][0]["text"] == "It is warm."


def test_ollama(served: TestClient) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    whole = json.loads(asked(served, "/api/chat", messages=ROME, tools=TOOLS, stream=False))["message"]
    expected = {"content": "I look.", "thinking": "They greet.", "tool_calls": [call]}
    assert whole == {"role": "assistant", **expected}
    lines = [json.loads(line) for line in asked(served, "/api/chat", messages=ROME, tools=TOOLS).splitlines()]
    said = [line["message"] for line in lines]
    for name in ("content", "thinking"):
        assert "".join(message.get(name, "") for message in said) == whole[name]
    assert [call for message in said for call in message.get("tool_calls", [])] == [call]
    back = [*ROME, whole, {"role": "tool", "tool_name": "weather", "content": "21 degrees"}]
    last = json.loads(asked(served, "/api/chat", messages=back, tools=TOOLS, stream=False))
    assert last["message"]["content"] == "It is warm."


def test_a_model_of_random_weights_under_grammars_and_a_budget(client: TestClient, known: Grammars) -> None:
    """Through the real decode loop: control tokens are read, stop ids end the answer, a budget ends the reasoning."""
    body: dict[str, Any] = {"messages": ROME, "tools": TOOLS, "tool_choice": "required", "temperature": 1}
    calls = 0
    for seed in range(4):
        answer = client.post("/v1/chat/completions", json={**body, "seed": seed, "max_tokens": 300})
        found = answer.json()["choices"][0]
        assert not any(mark in answer.text for mark in CONTROL)
        if found["finish_reason"] == "tool_calls":
            calls += 1
            (call,) = found["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert calls
    head = f"{CHANNEL}analysis{MESSAGE}"
    thinks, ending = (known.tokenizer.encode(text, add_special_tokens=False).ids for text in (head, NEXT))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [17]}}}
    body = {
        "messages": HELLO,
        "response_format": form,
        "return_token_ids": True,
        "temperature": 1,
        "max_tokens": 300,
    }
    body |= {"logit_bias": {str(i): 30 for i in thinks}, "reasoning_budget": BUDGET}
    found = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (found["message"]["content"], found["finish_reason"]) == ("17", "stop")
    text = known.tokenizer.decode(found["token_ids"], skip_special_tokens=False)
    assert text.startswith(head), "in whatever tokens"
    assert found["message"]["reasoning_content"]
    assert found["token_ids"][BUDGET : BUDGET + len(ending)] == ending
