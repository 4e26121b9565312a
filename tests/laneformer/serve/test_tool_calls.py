"""Calls of tools: their forms as templates have them, answers of a random model, and how these stream."""

from __future__ import annotations

import json
import random
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from laneformer.serve.tool_calls import HERMES, CallForm, CallParser, ToolCalling, ToolUse
from tests.laneformer.serve.grammar_assets import TOKENIZERS, batch_of, drawn, grammars, text_of

TEMPLATES = Path(str(files("trl") / "chat_templates"))  # of many models, as published
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = """{{- bos_token }}{%- for message in messages %}{%- if message["role"] == "user" %}
{%- if tools and loop.last %}{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST] " + message["content"] + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
{%- endfor %}{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
{%- elif message["role"] == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content|string }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}{%- endfor %}"""
NEW_MISTRAL = """{{- bos_token }}{%- for message in messages %}{%- if message["role"] == "user" %}
{%- if tools %}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST]" + message["content"] + "[/INST]" }}{%- elif message["role"] == "tool" %}
{{- "[TOOL_RESULTS]" + message["content"] + "[/TOOL_RESULTS]" }}{%- else %}{{- message["content"] }}
{%- for call in message.tool_calls or [] %}
{{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + (call.function.arguments if call.function.arguments is string else
call.function.arguments | tojson) }}{%- endfor %}{{- eos_token }}{%- endif %}{%- endfor %}"""
TEXTUAL = """{%- for message in messages %}{{- "<" + message.role + ">" + message.content }}
{%- if loop.first and tools %}{{- tools | tojson }}{%- endif %}{%- for call in message.tool_calls or [] %}
{{- "\n```call\n" + call.function.name + "\n" + call.function.arguments + "\n```" }}{%- endfor %}{{- "</s>" }}
{%- endfor %}"""
QWEN = CallForm(HERMES.begin, HERMES.middle, HERMES.between, HERMES.end)
LLAMA = CallForm('{"name": "', '", "parameters": ', None, "}")
FORMS = {
    "mistral": (MISTRAL, CallForm('[TOOL_CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]")),
    "new mistral": (NEW_MISTRAL, CallForm("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "")),
    "textual": (TEXTUAL, CallForm("```call\n", "\n", "\n```\n```call\n", "\n```", as_text=True)),
    "smollm2": (SMOLLM2, None),
    "gemma": ("gemma.jinja", None),
    "qwen2.5": ("qwen2_5.jinja", QWEN),
    "qwen3": ("qwen3.jinja", QWEN),
    "qwen3 2507": ("qwen3_instruct_2507.jinja", QWEN),
    "llama 3.1": ("llama3_1.jinja", LLAMA),
    "llama 3.2": ("llama3_2.jinja", LLAMA),
    "glm": ("glm4moe.jinja", None),  # arguments as XML
    "broken": ("{% for %}", None),
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city"],
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get", "description": "Anything", "parameters": None}},
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
]
SCHEMAS = {"get": {"type": "object", "maxProperties": 0}, "get_weather": CITY, "add": ADD}
CALLS = [
    {
        "id": "abcDEF123",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Köln\n\"'"}},
    },
    {"id": "abcDEF124", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def calling(name: str, kind: str = "bytes") -> ToolCalling:
    template = FORMS[name][0]
    source = (TEMPLATES / template).read_text() if template.endswith(".jinja") else template
    return ToolCalling({"chat_template": source, **TOKENS}, grammars(kind))


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_read_from_templates(name: str) -> None:
    found, (_, form) = calling(name), FORMS[name]
    assert (found.form, found.described) == (form or HERMES, form is None)


@pytest.mark.parametrize("name", ["mistral", "new mistral", "textual", "qwen2.5", "qwen3", "llama 3.1"])
def test_calls_go_back_as_transformers_renders_them(name: str) -> None:
    """And as the model wrote them: the form, with the arguments, is in the text."""
    tool = calling(name)
    count = 1 if tool.form.between is None else 2
    source = FORMS[name][0]
    source = (TEMPLATES / source).read_text() if source.endswith(".jinja") else source
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=grammars().tokenizer, chat_template=source, **TOKENS)
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:count]},
        *({"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in CALLS[:count]),
        {"role": "user", "content": "!"},
    ]
    sent = tool.use(TOOLS).messages(messages)
    text = tokenizer.apply_chat_template(sent, tools=TOOLS, tokenize=False)
    written = tool.form.written([call["function"] for call in CALLS[:count]])
    if name == "mistral":
        written = tool.form.begin + 'get_weather", "arguments": {"city": "Köln'
    assert written in text
    types = {type(call["function"]["arguments"]) for call in sent[1]["tool_calls"]}
    assert types == {str if tool.form.as_text else dict}
    assert messages[1]["tool_calls"] == CALLS[:count], "what the client sent is not changed"


def test_templates_without_tools_get_them_described() -> None:
    use = calling("smollm2").use(TOOLS)
    assert use.template_tools == []
    assistant = {"role": "assistant", "content": "So:", "tool_calls": CALLS}
    answers = [{"role": "tool", "content": text, "tool_call_id": "x"} for text in ("1", "2")]
    system, user, called, answered = use.messages([{"role": "user", "content": "?"}, assistant, *answers])
    assert (
        '{"name": "get_weather", "description": "Of a city", "parameters": {"type": "object"'
        in system["content"]
    )
    assert user == {"role": "user", "content": "?"}
    assert called["content"].startswith(
        'So:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln'
    )
    assert called["content"].count("</tool_call>") == 2
    assert answered["content"] == (
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    ), "one message, as templates want turns to alternate"
    own = {"role": "system", "content": "Be brief."}
    (system,) = use.messages([own])
    assert system["content"].endswith("\n\nBe brief.")
    assert own["content"] == "Be brief."
    assert calling("smollm2").use(TOOLS, "none").messages([own]) == [own]


def test_templates_without_system_messages_get_tools_in_the_first_question() -> None:
    use = calling("gemma").use(TOOLS)
    (user,) = use.messages([{"role": "user", "content": "?"}])
    assert user["role"] == "user"
    assert user["content"].endswith("</tool_call>\n\n?")


def parsed(
    use: ToolUse, text: str, pieces: random.Random | None = None
) -> tuple[str | None, list[tuple[str, Any]]]:
    """Content and calls, put together from deltas as a client does it."""
    parser = use.parser()
    assert parser is not None
    deltas, calls, content = [], [], ""
    while text:
        cut = pieces.randint(1, 9) if pieces else len(text)
        deltas += parser.push(text[:cut])
        text = text[cut:]
    for delta in [*deltas, *parser.finish()]:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert (call["index"], call["type"], len(call["id"])) == (len(calls), "function", 9)
                assert call["function"]["arguments"] == ""
                calls.append([call["function"]["name"], ""])
            else:
                assert call["index"] == len(calls) - 1
                calls[-1][1] += call["function"]["arguments"]
    whole = [[call["function"]["name"], call["function"]["arguments"]] for call in parser.calls]
    assert whole == calls
    assert parser.called == bool(calls)
    said = content if content.strip() or not calls else None
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", ["smollm2", "mistral", "new mistral", "textual", "qwen3", "llama 3.1"])
def test_every_call_is_valid(name: str, kind: str) -> None:
    check_calls(name, kind, range(2))


@pytest.mark.job
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", ["smollm2", "mistral", "new mistral", "textual", "qwen3", "llama 3.1"])
def test_every_call_of_many_is_valid(name: str, kind: str) -> None:
    check_calls(name, kind, range(100, 125))


def check_calls(name: str, kind: str, seeds: range) -> None:
    tool = calling(name, kind)
    named = {"type": "function", "function": {"name": "get_weather"}}
    choices = (("required", True), ("required", False), (named, True), ("auto", True))
    ended = dict.fromkeys(map(str, choices), 0)
    with batch_of(kind) as batch:
        for choice, parallel in choices:
            use = tool.use(TOOLS, choice, parallel)
            for seed in seeds:
                grammar = use.grammar()
                assert grammar is not None
                ids, reason = drawn(batch, grammar, seed=seed)
                text = text_of(kind, ids, skip_special_tokens=False)
                if reason != "stop":
                    continue
                ended[str((choice, parallel))] += 1
                content, calls = parsed(use, text, random.Random(seed))
                assert parsed(use, text) == (content, calls)
                for function, arguments in calls:
                    jsonschema.validate(arguments, SCHEMAS[function])
                    assert arguments.keys() <= SCHEMAS[function].get("properties", {}).keys()
                if choice != "auto":
                    assert content is None
                    assert calls
                if not parallel or choice == named or tool.form.between is None:
                    assert len(calls) <= 1
                if choice == named:
                    assert calls[0][0] == "get_weather"
    assert all(ended.values()), ended


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", ["smollm2", "mistral", "textual", "qwen3", "llama 3.1"])
def test_auto_lets_text_be_text_until_a_call_begins(name: str, kind: str) -> None:
    """What a model would write is forced through the grammar; behind the marker it has no choice but a call."""
    tool, known = calling(name, kind), grammars(kind)
    use = tool.use(TOOLS)
    said = "" if tool.form.marker == "{" else "Let me <see> {it}: "
    call = tool.form.written([{"name": "add", "arguments": {"a": 1, "b": -20}}])

    def goes(text: str) -> int:
        grammar, ids = use.grammar(), ids_of(kind, text)
        assert grammar is not None
        for index, token in enumerate([*ids, known.eos_ids[0]]):
            words = grammar.mask(index)
            if not words[token // 32] >> token % 32 & 1:
                return index
            grammar.accept(token)
        return len(ids) + 1

    texts = [said + call, "Only text, with a { brace and a <tool.", ""]
    texts += ["<think>\nI {{ think.\n</think>\n\nSo.", *(["<think>\nHm.</think>" + call] if said else [])]
    for text in texts:
        assert goes(text) == len(ids_of(kind, text)) + 1, text
    assert goes(said + call.replace("add", "sub")) < len(ids_of(kind, said + call))
    assert goes(said + call.replace("-20", '"x"')) < len(ids_of(kind, said + call))
    assert parsed(use, said + call) == (said or None, [("add", {"a": 1, "b": -20})])
    assert parsed(use, "Only a <tool.", random.Random(1)) == ("Only a <tool.", [])


@pytest.mark.parametrize("name", ["smollm2", "mistral", "new mistral", "textual", "qwen3"])
def test_several_calls_are_told_apart(name: str) -> None:
    use = calling(name).use(TOOLS)
    made = [call["function"] for call in CALLS] * 2
    expected = [(function["name"], function["arguments"]) for function in made]
    for seed in range(20):
        assert parsed(use, "Hm. " + use.calling.form.written(made), random.Random(seed)) == ("Hm. ", expected)


def ids_of(kind: str, text: str) -> list[int]:
    """Ids of an answer: without the space that some tokenizers put before a text and behind a control token."""
    known = Tokenizer.from_str(grammars(kind).tokenizer.to_str())
    known.no_truncation()
    before, *parts = known.encode("\n", add_special_tokens=False).ids, *re.split(r"(\[TOOL_CALLS\])", text)
    ids = [known.encode(p if p[:1] == "[" else "\n" + p, add_special_tokens=False).ids for p in parts]
    return [
        i
        for part, found in zip(parts, ids, strict=True)
        for i in found[0 if part[:1] == "[" else len(before) :]
    ]


def test_a_call_that_the_limit_cuts_streams_what_there_is() -> None:
    parser = CallParser(HERMES)
    deltas = parser.push('Hm.<tool_call>\n{"name": "add", "arguments": {"a": "}\\"')
    assert [*deltas, *parser.finish()][0] == {"content": "Hm."}
    assert parser.calls[0]["function"] == {"name": "add", "arguments": '{"a": "}\\"'}
    parser = CallParser(HERMES)
    assert parser.push("Hm <tool_c") == [{"content": "Hm "}]
    assert parser.finish() == [{"content": "<tool_c"}]
    assert not parser.called


def test_without_tools_there_is_nothing_to_force() -> None:
    for use in (calling("qwen3").use(), calling("qwen3").use([]), calling("qwen3").use(TOOLS, "none")):
        assert (use.template_tools, use.grammar(), use.parser()) == ([], None, None)


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ({}, None, "tools must be a list"),
        (tool() * 200, None, "at most 128"),
        ([{"type": "custom"}], None, r"tools\[0\] must be {'type': 'function'"),
        (tool(name="a b"), None, r"tools\[0\].function.name = 'a b' must match"),
        (tool() + tool(), None, "'f' must match .* and no other function's name"),
        (tool(parametres={}), None, r"tools\[0\].function has 'parametres'"),
        (tool(strict=1), None, "strict true or false"),
        (tool(parameters={"type": "array"}), None, r"tools\[0\].function.parameters must be a JSON schema of type"),
        (tool(), "any", "tool_choice = 'any'"),
        (tool(), {"type": "function", "function": {"name": "g"}}, r"tool_choice names 'g', but the tools are \['f'\]"),
        (tool(), {"type": "allowed_tools"}, "tool_choice = {'type': 'allowed_tools'}"),
        (None, "required", "needs tools"),
        (
            tool(parameters={"type": "object", "properties": {"x": {"type": "y"}}}), None,
            r"tools\[0\].function.parameters.properties.x: Invalid type: y",
        ),
        (
            [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "title": "x" * 9000}}}
             for i in range(9)], None, "the schemas of a request together",
        ),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_bad_tools_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calling("qwen3").use(tools, choice).grammar()
