"""Tests of OpenAI's harmony, which gpt-oss writes: its parts in every API, grammars, and the template."""

import itertools
import json

import jsonschema
import pytest
from tokenizers import Tokenizer

from laneformer.engine.channels import CHANNEL, CONSTRAIN, ENDS, HARMONY, MESSAGE, NEXT, START
from laneformer.prompts import ChatTemplate
from laneformer.serve.grammar import Grammars
from laneformer.serve.tool_calls import ToolCalling
from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import conversations, request_with
from tests.laneformer.serve.grammar_assets import tokens_allowed
from tests.laneformer.serve.harmony_assets import (
    ANALYSIS,
    ARGUMENTS,
    CONTROL,
    FINAL,
    GPT_OSS,
    HELLO,
    ROME,
    harmony_folder,
)

BUDGET = 25  # tokens of reasoning, more than its header takes
THOUGHT = f"{ANALYSIS}They greet.{NEXT}"
CALLED = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return harmony_folder(tmp_path_factory.mktemp("harmony"))


@pytest.fixture(scope="module")
def grammars(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return Grammars(
        tokenizer, size, [tokenizer.token_to_id(name) for name in ENDS[1:]], harmony=True
    )


def test_a_conversation_in_its_own_template(grammars):
    calling = ToolCalling({"chat_template": GPT_OSS}, grammars)
    assert calling.form == HARMONY
    assert calling.describes_tools is False
    use = calling.select_tools(request_with(TOOLS))
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    calls = [{"id": i, "type": "function", "function": call} for i in ("a", "b")]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "Good day!", "reasoning_content": "hidden"},
        # the reasoning of an earlier turn is dropped, that of the last turn's calls stays
        *ROME,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Of Rome.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
    ]
    text = ChatTemplate({"chat_template": GPT_OSS}).render(
        use.translate_messages(messages), tools=use.template_tools, add_generation_prompt=True
    )
    assert "type weather = (_: {" in text
    call_text = f'{START}assistant to=functions.weather{CHANNEL}commentary json{MESSAGE}{{"city": "Rome"}}{ENDS[1]}'
    gave = f"{START}functions.weather to=assistant{CHANNEL}commentary{MESSAGE}"
    assert text.endswith(
        f"{START}assistant{CHANNEL}final{MESSAGE}Good day!{ENDS[0]}{START}user{MESSAGE}{ROME[0]['content']}{ENDS[0]}"
        f"{START}assistant{CHANNEL}analysis{MESSAGE}Of Rome.\nI look.{ENDS[0]}"
        f'{call_text}{gave}"first"{ENDS[0]}{call_text}{gave}"second"{ENDS[0]}{START}assistant'
    )
    assert "hidden" not in text
    assert messages[3]["tool_calls"] == calls, "what the client sent is not changed"


def ids_of(grammars, text) -> list[int]:
    return grammars.tokenizer.encode(text, add_special_tokens=False).ids


def begins(grammars, grammar, text, *end) -> bool:
    """Return whether an answer may begin so."""
    ids = [*ids_of(grammars, text), *end]
    return tokens_allowed(grammar.copy(), ids) == len(ids)


def fits(grammars, grammar, text) -> bool:
    return begins(grammars, grammar, text, grammars.eos_ids[0])


def test_grammars_leave_room_for_reasoning(grammars):
    calling = ToolCalling({"chat_template": GPT_OSS}, grammars)
    auto, required = (
        calling.select_tools(request_with(TOOLS, choice)).make_grammar()
        for choice in ("auto", "required")
    )
    # the recipient stands in the channel or in the role, with or without a type
    role = f" to=functions.weather{CHANNEL}commentary"
    calls = [CALLED + ARGUMENTS, f"{role} json{MESSAGE}{ARGUMENTS}", f"{role}{MESSAGE}{ARGUMENTS}"]
    preamble = f"{CHANNEL}commentary{MESSAGE}I look.{NEXT}"
    for before, call in itertools.product(("", THOUGHT), calls):
        assert fits(grammars, auto, before + call)
        assert fits(grammars, required, before + call)
        assert fits(grammars, auto, before + preamble + call)
    for before in ("", THOUGHT, THOUGHT + preamble):
        assert fits(grammars, auto, f"{before}{FINAL}Fine.")
    assert not begins(grammars, required, f"{THOUGHT}{FINAL}Fine.")
    form = grammars.compile_schema({"type": "object"}, "response_format")
    for before in ("", THOUGHT):
        assert fits(grammars, form, f'{before}{FINAL}{{"a": 1}}')
    assert not begins(grammars, form, '{"a": 1}')
    for wrong in (THOUGHT + THOUGHT, CALLED.replace("weather", "other"), CALLED + '{"city": 1}'):
        assert not begins(grammars, auto, wrong)


@pytest.fixture(scope="module")
def api(folder):
    with in_process(folder, engine={"context_tokens": 2048}) as client:
        yield conversations(client)


def test_calls_of_random_weights_are_valid(api):
    # through the real decode loop, which reads control tokens and ends at stop ids
    calls = []
    for seed in range(4):
        sampled = {"tools": TOOLS, "temperature": 1, "seed": seed, "max_tokens": 300}
        choice = api.choice(messages=ROME, tool_choice="required", **sampled)
        assert not any(json.dumps(mark)[1:-1] in json.dumps(choice) for mark in CONTROL)
        if choice["finish_reason"] == "tool_calls":
            calls += choice["message"]["tool_calls"]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_a_budget_ends_the_reasoning_before_an_answer_of_a_schema(api, grammars):
    head, ending = (ids_of(grammars, text) for text in (ANALYSIS, NEXT))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [17]}}}
    choice = api.choice(
        messages=HELLO,
        response_format=form,
        return_token_ids=True,
        temperature=1,
        max_tokens=300,
        # push the model into reasoning, which it would not begin by itself
        logit_bias={str(i): 30 for i in head},
        reasoning_budget=BUDGET,
    )
    assert choice["message"]["content"] == "17"
    assert choice["finish_reason"] == "stop"
    text = grammars.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
    assert text.startswith(ANALYSIS), "in whatever tokens"
    assert choice["message"]["reasoning_content"]
    assert choice["token_ids"][BUDGET : BUDGET + len(ending)] == ending
