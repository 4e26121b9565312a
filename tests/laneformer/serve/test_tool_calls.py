"""Tests of tool calls: their forms in templates, and a random model's answers under their grammars."""

import itertools
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from laneformer.engine.channels import CALL_ID, CALL_NUMBER, CHOSEN, HERMES, AnswerReader, CallForm
from laneformer.serve.choices import Piece
from laneformer.serve.conversation import ChoiceAnswer
from laneformer.serve.tool_calls import ToolCalling, ToolUse
from tests.laneformer.serve.conftest import TEMPLATE as SMOLLM2
from tests.laneformer.serve.endpoint import parse_table, request_with
from tests.laneformer.serve.grammar_assets import (
    TOKENIZERS,
    batch_of,
    draw_answer,
    grammars,
    text_of,
    tokens_allowed,
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
MISTRAL_3_2 = NEW_MISTRAL.replace('+ "[ARGS]"', '+ "[CALL_ID]" + call.id + "[ARGS]"')
KIMI = """{%- for message in messages %}{{- "<|im_" + message.role + "|>" + (message.content or "") }}
{%- if loop.first and tools %}{{- tools | tojson }}{%- endif %}{%- if message.tool_calls %}{{- "<|calls|>" }}
{%- for call in message.tool_calls %}{{- "<|call|>" + NUMBERED + "<|arguments|>" +
(call.function.arguments | tojson) + "<|end|>" }}{%- endfor %}{{- "<|ends|>" }}{%- endif %}{{- "<|im_end|>" }}
{%- endfor %}"""
COUNTED = """'functions.' + call.function.name + ':' + (loop.index0 | string)"""
TEXTUAL = """{%- for message in messages %}{{- "<" + message.role + ">" + message.content }}
{%- if loop.first and tools %}{{- tools | tojson }}{%- endif %}{%- for call in message.tool_calls or [] %}
{{- "\n```call\n" + call.function.name + "\n" + call.function.arguments + "\n```" }}{%- endfor %}{{- "</s>" }}
{%- endfor %}"""
LLAMA = CallForm('{"name": "', '", "parameters": ', None, "}")
NUMBERED = CallForm(
    "<|calls|><|call|>functions.",
    f":{CALL_NUMBER}<|arguments|>",
    "<|end|><|call|>functions.",
    "<|end|><|ends|>",
)
FORMS = {
    "mistral": (
        MISTRAL,
        CallForm('[TOOL_CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]"),
    ),
    "new mistral": (NEW_MISTRAL, CallForm("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "")),
    "mistral 3.2": (
        MISTRAL_3_2,
        CallForm("[TOOL_CALLS]", f"[CALL_ID]{CALL_ID}[ARGS]", "[TOOL_CALLS]", ""),
    ),
    "mistral by another way": (
        NEW_MISTRAL.replace("[ARGS]", ""),
        CallForm("[TOOL_CALLS]", "", "[TOOL_CALLS]", ""),
    ),
    "kimi k2": (KIMI.replace("NUMBERED", COUNTED), NUMBERED),
    "kimi k2 by ids": (KIMI.replace("NUMBERED", "call.id"), NUMBERED),
    "the first call alone": (
        TEXTUAL.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"),
        CallForm("```call\n", "\n", None, "\n```", as_text=True),
    ),
    "an id behind arguments": (TEXTUAL.replace('"\n```"', '"\n```" + call.id'), None),
    "textual": (TEXTUAL, CallForm("```call\n", "\n", "\n```\n```call\n", "\n```", as_text=True)),
    "smollm2": (SMOLLM2, None),
    "gemma": ("gemma.jinja", None),
    "qwen3": ("qwen3.jinja", HERMES),
    "llama 3.1": ("llama3_1.jinja", LLAMA),
    "glm": ("glm4moe.jinja", None),  # arguments as XML
    "broken": ("{% for %}", None),
}
CALLING = "smollm2", "mistral", "mistral 3.2", "kimi k2", "textual", "qwen3", "llama 3.1"
GIVEN = json.loads(Path(__file__).with_name("tools.json").read_text())
TOOLS = GIVEN["tools"]
CALLS = GIVEN["calls"]
SCHEMAS = {
    tool["function"]["name"]: tool["function"]["parameters"] or {"maxProperties": 0}
    for tool in TOOLS
}
SEEDS = 2
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def template_of(name: str) -> str:
    """Return a template from above, or as its makers published it."""
    template = FORMS[name][0]
    published = files("trl") / "chat_templates" / template if template.endswith(".jinja") else None
    return published.read_text() if published else template


def calling(name: str, kind: str = "bytes") -> ToolCalling:
    return ToolCalling({"chat_template": template_of(name), **TOKENS}, grammars(kind))


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_read_from_templates(name):
    read, (_, form) = calling(name), FORMS[name]
    assert read.form == (form or HERMES)
    assert read.describes_tools == (form is None)


def spell_calls(form: CallForm, calls: list[dict[str, Any]]) -> str:
    """Return calls as a model writes them, with their ids or numbers."""
    ids = (call["id"] for call in calls)
    numbers = itertools.count()
    text = form.write([call["function"] for call in calls])
    return re.sub(
        CHOSEN, lambda part: next(ids) if part[0] == CALL_ID else str(next(numbers)), text
    )


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("mistral 3.2", [call["id"] for call in CALLS]),
        ("kimi k2", ["functions.get_weather:0", "functions.add:1"]),
        ("kimi k2 by ids", ["functions.get_weather:0", "functions.add:1"]),
    ],
)
def test_the_id_that_a_model_writes_is_its_calls(name, ids):
    # of several equal ids, the first
    form = calling(name).form

    def read(calls):
        # letter by letter, as a stream may cut anywhere
        answer = ChoiceAnswer(AnswerReader(form))
        for letter in spell_calls(form, calls):
            answer.push(Piece(0, letter))
        answer.push(Piece(0, finish_reason="stop"))
        return [(call.id, call.name, json.loads(call.text)) for call in answer.list_calls()]

    functions = [call["function"] for call in CALLS]
    assert read(CALLS) == [
        (call_id, function["name"], function["arguments"])
        for call_id, function in zip(ids, functions, strict=True)
    ]
    (first, *_), (second, *_) = read([CALLS[0]] * 2)
    assert first == ids[0] != second


@pytest.mark.parametrize("name", [*CALLING[1:], "new mistral"])
def test_calls_go_back_as_transformers_renders_them(name):
    # the text contains the form and arguments that the model wrote
    from transformers import PreTrainedTokenizerFast

    tool = calling(name)
    # a form without a separator has one call per answer
    calls = CALLS[:1] if tool.form.between is None else CALLS
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls),
        {"role": "user", "content": "!"},
    ]
    translated = tool.select_tools(request_with(TOOLS)).translate_messages(messages)
    template = template_of(name)
    bare = grammars().tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, chat_template=template, **TOKENS)
    text = tokenizer.apply_chat_template(translated, tools=TOOLS, tokenize=False)
    expected = spell_calls(tool.form, calls)
    if name == "mistral":
        expected = tool.form.begin + 'get_weather", "arguments": {"city": "Köln'
    assert expected in text
    types = {type(call["function"]["arguments"]) for call in translated[1]["tool_calls"]}
    assert types == {str if tool.form.as_text else dict}
    assert messages[1]["tool_calls"] == calls, "what the client sent is not changed"


def test_templates_without_tools_get_them_described():
    use = calling("smollm2").select_tools(request_with(TOOLS))
    assert use.template_tools == []
    assistant = {"role": "assistant", "content": "So:", "tool_calls": CALLS}
    results = [{"role": "tool", "content": text, "tool_call_id": "x"} for text in ("1", "2")]
    system, user, called, result = use.translate_messages(
        [{"role": "user", "content": "?"}, assistant, *results]
    )
    described = (
        '{"name": "get_weather", "description": "Of a city", "parameters": {"type": "object"'
    )
    assert described in system["content"]
    assert user == {"role": "user", "content": "?"}
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln'
    assert called["content"].startswith(f"So:\n{call}")
    assert called["content"].count("</tool_call>") == 2
    one_message = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert result["content"] == one_message, "as templates want turns to alternate"
    instructions = {"role": "system", "content": "Be brief."}
    (system,) = use.translate_messages([instructions])
    assert system["content"].endswith("\n\nBe brief.")
    assert instructions["content"] == "Be brief."
    assert calling("smollm2").select_tools(request_with(TOOLS, "none")).translate_messages(
        [instructions]
    ) == [instructions]


def test_templates_without_system_messages_get_tools_in_the_first_question():
    (user,) = (
        calling("gemma")
        .select_tools(request_with(TOOLS))
        .translate_messages([{"role": "user", "content": "?"}])
    )
    assert user["role"] == "user"
    assert user["content"].endswith("</tool_call>\n\n?")


def read_answer(use: ToolUse, text: str) -> tuple[str, list[tuple[str, Any]]]:
    reader = AnswerReader(use.form)
    deltas = [*reader.push(text), *reader.finish()]
    calls = []
    for kind, part in deltas:
        if kind == "call":
            calls.append([part, ""])
        elif kind == "arguments":
            calls[-1][1] += part
    content = "".join(part for kind, part in deltas if kind == "text")
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", CALLING)
def test_every_call_is_valid(name, kind):
    tool = calling(name, kind)
    with batch_of(kind) as batch:
        for choice, parallel in (
            ("required", True),
            ("required", False),
            (NAMED, True),
            ("auto", True),
        ):
            use = tool.select_tools(request_with(TOOLS, choice, parallel_tool_calls=parallel))
            answers = [draw_answer(batch, use.make_grammar(), seed=seed) for seed in range(SEEDS)]
            # a random model may also reach the token limit, in the middle of a call
            ended = [ids for ids, reason in answers if reason == "stop"]
            assert ended, choice
            for ids in ended:
                text = text_of(kind, ids, skip_special_tokens=False)
                content, calls = read_answer(use, text)
                assert "probed" not in text
                for function, arguments in calls:
                    jsonschema.validate(arguments, SCHEMAS[function])
                    assert arguments.keys() <= SCHEMAS[function].get("properties", {}).keys()
                if choice != "auto":
                    assert not content.strip()
                    assert calls
                if not parallel or choice == NAMED or tool.form.between is None:
                    assert len(calls) <= 1
                if choice == NAMED:
                    assert calls[0][0] == "get_weather"


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", CALLING)
def test_auto_lets_text_be_text_until_a_call_begins(name, kind):
    # the model's text is forced through the grammar; after the marker only a call is allowed
    use = calling(name, kind).select_tools(request_with(TOOLS))
    end = grammars(kind).eos_ids[0]
    form = use.calling.form
    text_before = "" if form.marker == "{" else "Let me <see> {it}: "
    add = {"name": "add", "arguments": {"a": 1, "b": -20}}
    call = spell_calls(form, [{"id": "abcDEF124", "function": add}])
    texts = [text_before + call, "Only text, with a { brace and a <tool.", ""]
    texts += [
        "<think>\nI {{ think.\n</think>\n\nSo.",
        *(["<think>\nHm.</think>" + call] if text_before else []),
    ]
    for text in texts:
        ids = [*ids_of(kind, text), end]
        assert tokens_allowed(use.make_grammar(), ids) == len(ids), text
    for wrong in (call.replace("add", "sub"), call.replace("-20", '"x"')):
        assert tokens_allowed(use.make_grammar(), ids_of(kind, text_before + wrong)) < len(
            ids_of(kind, text_before + call)
        )
    assert read_answer(use, text_before + call) == (text_before, [("add", {"a": 1, "b": -20})])


def ids_of(kind: str, text: str) -> list[int]:
    """Return an answer's ids, without the space that some tokenizers add before a text."""
    tokenizer = Tokenizer.from_str(grammars(kind).tokenizer.to_str())
    tokenizer.no_truncation()
    ids = []
    # encode behind a newline and cut it off, so that no tokenizer adds a space
    before = tokenizer.encode("\n", add_special_tokens=False).ids
    for part in re.split(r"(\[TOOL_CALLS\]|\[ARGS\])", text):
        if part[:1] == "[":
            ids += tokenizer.encode(part, add_special_tokens=False).ids
        else:
            ids += tokenizer.encode("\n" + part, add_special_tokens=False).ids[len(before) :]
    return ids


def test_without_tools_there_is_nothing_to_force():
    for request in (request_with([]), request_with(TOOLS, "none")):
        use = calling("qwen3").select_tools(request)
        assert use.template_tools == []
        assert use.make_grammar() is None
        assert use.form is None


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
# schema of an argument | keyword that is refused | value that the rest allows
REFUSED = r"""
{"type": "string", "pattern": ZOD_EMAIL} | pattern | "a@b.org"
{"type": ["string", "null"], "pattern": "(a)\\1"} | pattern | null
{"type": "string", "pattern": "\\bfoo\\b"} | pattern | "foo"
{"type": "object", "patternProperties": {"(?=a)b": {}}} | patternProperties | {}
{"type": "array", "items": {"anyOf": [{"pattern": "(?<=a)"}]}} | items.anyOf[0].pattern | ["b"]
{"type": "y"} | type | 1
{"type": "integer", "minimum": 5, "maximum": 3} | maximum | 7
{"enum": []} | enum | "a"
{"$ref": "#/$defs/nowhere"} | $ref | "a"
{"$ref": "https://example.com/schema.json"} | $ref | "a"
{"type": "array", "minItems": "3"} | minItems | []
{"type": "integer", "multipleOf": 0} | multipleOf | 2
{"allOf": [{"type": "string"}, {"type": "integer"}]} | allOf | "a"
""".replace("ZOD_EMAIL", json.dumps(ZOD_EMAIL))


@pytest.mark.parametrize(("schema", "keyword", "value"), parse_table(REFUSED))
def test_what_a_grammar_cannot_demand_of_a_tool_is_left_out_and_named(schema, keyword, value):
    # the rest of its schema still holds; a response format is refused instead
    properties = {"x": schema, "n": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["x", "n"]}
    broken = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    use = calling("qwen3").select_tools(request_with([*TOOLS, broken], "required"))
    grammar = use.make_grammar()
    assert grammar is not None
    assert use.unused == [f"tools[{len(TOOLS)}].function.parameters.properties.x.{keyword}"]
    for number, fits in ((1, True), ("1", False)):
        arguments = {"x": value, "n": number}
        ids = ids_of("bytes", HERMES.write([{"name": "f", "arguments": arguments}]))
        assert (tokens_allowed(grammar.copy(), ids) == len(ids)) == fits
    assert use.template_tools[-1]["function"]["parameters"] == parameters, (
        "the model sees all of it"
    )
    with pytest.raises(ValueError, match="response_format"):
        grammars().compile_schema(parameters, "response_format")


def test_tools_beyond_the_limits_are_refused():
    # each of the nine is within the limit, and all of them are not
    parameters = {"type": "object", "title": "x" * 9000}
    functions = [{"name": f"f{i}", "parameters": parameters} for i in range(9)]
    tools = [{"type": "function", "function": function} for function in functions]
    with pytest.raises(ValueError, match="the schemas of a request together"):
        calling("qwen3").select_tools(request_with(tools)).make_grammar()
    patterns = {f"p{i}": {"pattern": "(?=a)"} for i in range(20)}
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": patterns}},
        }
    ]
    with pytest.raises(
        ValueError, match=r"tools\[0\].function.parameters.properties.p\d+: regex parse error"
    ):
        calling("qwen3").select_tools(request_with(tools)).make_grammar()
