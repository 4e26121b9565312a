"""Tests of every API's fields: used, ignored, or refused by name."""

import json
import typing
from typing import Any

import pytest

from laneformer.engine import GenerationOptions
from laneformer.serve.apis.messages import MessagesRequest
from laneformer.serve.apis.ollama import ChatRequest, GenerateRequest
from laneformer.serve.apis.responses import ResponsesRequest
from laneformer.serve.bodies import Reading, RequestError
from laneformer.serve.fields import IGNORED, NEUTRAL, REFUSED
from laneformer.serve.schema import CompletionRequest, ConversationRequest
from tests.laneformer.serve.endpoint import parse_table

HELLO = [{"role": "user", "content": "Hi"}]
BODIES = {
    "completions": (CompletionRequest, {"prompt": "Hi"}),
    "chat": (ConversationRequest, {"messages": HELLO}),
    "responses": (ResponsesRequest, {"input": "Hi"}),
    "messages": (MessagesRequest, {"messages": HELLO, "max_tokens": 9}),
    "ollama": (ChatRequest, {"messages": HELLO}),
    "generate": (GenerateRequest, {"prompt": "Hi"}),
}
EVERY = pytest.mark.parametrize("api", BODIES)


def read(api, strict=False, **fields) -> tuple[Any, str]:
    """Return the body and the names in the header `warnings`."""
    (body, base), reading = BODIES[api], Reading(strict)
    request = body.read(json.dumps({**base, **fields}).encode(), reading)
    if hasattr(request, "translate"):
        request.translate()
    return request, reading.headers.get("warnings", "")


def body_of(api, **fields):
    return read(api, **fields)[0]


def refusal_of(api, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(api, **fields)
    assert caught.value.status_code == 400
    return caught.value


def param_of(api, **fields) -> str | None:
    return refusal_of(api, **fields).param


@pytest.mark.parametrize(
    ("api", "module", "parameters"),
    [
        ("completions", "completion_create_params", "CompletionCreateParamsNonStreaming"),
        ("chat", "chat.completion_create_params", "CompletionCreateParamsNonStreaming"),
        ("responses", "responses.response_create_params", "ResponseCreateParamsNonStreaming"),
    ],
)
def test_every_parameter_of_the_client_is_known(api, module, parameters):
    # fails when a client update adds a parameter: support it, or add it to fields.py
    import importlib

    names = typing.get_type_hints(
        getattr(importlib.import_module(f"openai.types.{module}"), parameters)
    )
    body = BODIES[api][0]
    assert (
        names.keys()
        <= body.field_names | body.aliases.keys() | IGNORED.keys() | NEUTRAL.keys() | REFUSED.keys()
    )


# would change the answer
IGNORED_ELSEWHERE = """
guided_json guided_regex structured_outputs grammar json_schema bad_words allowed_token_ids n_predict max_new_tokens
stop_words logits_processors chat_template documents prompt_logprobs suffixes xyzzy
"""


@EVERY
@pytest.mark.parametrize("name", IGNORED_ELSEWHERE.split())
def test_what_is_not_known_is_refused_by_its_name(api, name):
    assert param_of(api, **{name: {"any": "value"}}) == name


NESTED = """
chat | {"response_format": {"type": "json_object", "scheme": {}, "x": 1}} | response_format.x
chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schemas": {"a": 1}}}} | \
response_format.json_schema.schemas
chat | {"thinking": {"type": "enabled", "tokens": 3}} | thinking.tokens
chat | {"reasoning": {"max_tokens": 3}} | reasoning.max_tokens
chat | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}, "mode": "auto"}} | tool_choice
chat | {"stream": true, "stream_options": {"include_everything": true}} | stream_options.include_everything
chat | {"prediction": {"content": "a", "exact": true}} | prediction.exact
completions | {"response_format": {"type": "json_object"}} | response_format
completions | {"stream": true, "stream_options": {"usage": true}} | stream_options.usage
responses | {"text": {"format": {"type": "json_object", "grammar": "a"}}} | text.format.grammar
responses | {"text": {"maximum": 3}} | text.maximum
responses | {"reasoning": {"budget": 3}} | reasoning.budget
responses | {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}} | tool_choice
responses | {"stream": true, "stream_options": {"obfuscate": 3}} | stream_options.obfuscate
messages | {"thinking": {"type": "enabled", "budget": 1024}} | thinking.budget
messages | {"tool_choice": {"type": "any", "names": ["f"]}} | tool_choice
messages | {"output_config": {"format": {"type": "json_schema", "regex": "a"}}} | output_config.format.regex
messages | {"output_format": {"type": "json_schema", "schema": {}}} | output_format
ollama | {"options": {"format": "json"}} | options.format
ollama | {"options": {"n": 2}} | options.n
ollama | {"options": {"mirostat": 2}} | options.mirostat
ollama | {"raw": true} | raw
generate | {"template": "{{ .Prompt }}"} | template
"""
TOOL = '{"type": "function", "function": {"name": "f"}}'


TURN = '{"role": "user", "content": "Hi"}'


def rows(table: str) -> list[list[Any]]:
    """Return a case for each of the APIs in the first cell, such as "completions+chat"."""
    table = table.replace("TOOL", TOOL).replace("TURN", TURN)
    return [[api, *cells] for apis, *cells in parse_table(table) for api in apis.split("+")]


@pytest.mark.parametrize(("api", "fields", "param"), rows(NESTED))
def test_so_is_a_key_that_nobody_reads(api, fields, param):
    assert param_of(api, **fields) == param


# the parameter that an error names, and a part of its message
WRONG = """
completions+chat | {"max_token": 3} | max_token | did you mean 'max_tokens'?
completions+chat | {"temperature": 2.5} | temperature | temperature = 2.5: input should be less than or equal to 2
completions+chat | {"temperature": NaN} | temperature | temperature = NaN
completions+chat | {"n": 0} | n | n = 0: input should be greater than or equal to 1
completions+chat | {"n": true} | n | valid integer
completions+chat | {"max_tokens": 1.5} | max_tokens | valid integer
completions+chat | {"stop": ["a", ""]} | stop | none of them empty
completions+chat | {"stop": 3} | stop | stop = 3: it must be a text, or a list
completions+chat | {"logit_bias": {"one": 1}} | logit_bias.one.[key] | string should match
completions+chat | {"logit_bias": {"1": 101}} | logit_bias.1 | less than or equal to 100
completions+chat | {"stream": true, "stream_options": {"include_usages": true}} | stream_options.include_usages \
| did you mean
completions+chat | {"stop_token_ids": ["a"]} | stop_token_ids[0] | valid integer
completions | {"prompt": [1, "a"]} | prompt | a list of token ids
completions | {"prompt": []} | prompt | 0 choices; 1 to 128 fit
completions | {"prompt": ["a", "b"], "n": 65} | prompt | 2 prompts, n = 65: 130 choices
completions | {"max_tokens": 0} | max_tokens | needs echo = true
completions | {"best_of": 3, "n": 2} | best_of | must equal n = 2
chat | {"messages": []} | messages | at least 1 item
chat | {"messages": [{"role": "robot", "content": "Hi"}]} | messages[0].role | 'developer', 'user'
chat | {"messages": [{"content": "Hi"}]} | messages[0].role | is missing
chat | {"messages": [{"role": "user"}]} | messages[0].content | content is missing
chat | {"messages": [{"role": "user", "content": 3}]} | messages[0].content | a text, or a list of parts
chat | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]} | messages[0].content \
| image_url
chat | {"messages": [{"role": "user", "content": "a", "contents": "b"}]} | messages[0].contents | 'content'
chat | {"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]} \
| \
messages[0].tool_calls | an assistant's
chat | {"max_tokens": 3, "max_completion_tokens": 4} | max_tokens | contradicts
chat | {"top_logprobs": 2} | top_logprobs | needs logprobs = true
chat | {"chat_template_kwargs": {"tools": []}} | chat_template_kwargs | a field of the request
chat | {"tools": [{"type": "custom"}]} | tools[0].type | 'function'
chat | {"tools": [{"type": "function", "function": {"name": "a b"}}]} | tools[0].function.name | should match pattern
chat | {"tools": [TOOL, TOOL]} | tools | two functions of one name
chat | {"tools": [{"type": "function", "function": {"name": "f", "parametres": {"a": 1}}}]} \
| tools[0].function.parametres | \
did you mean 'parameters'
chat | {"tools": [{"type": "function", "function": {"name": "f", "returns": {"a": 1}}}]} | tools[0].function.returns \
| \
is unknown
chat | {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]} | tools[0].function.strict \
| valid boolean
chat | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]} | \
tools[0].function.parameters | of type 'object'
chat | {"tools": [TOOL], "tool_choice": "any"} | tool_choice | it must be 'none', 'auto', 'required'
chat | {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}} | tool_choice | it must be 'none'
chat | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}} | tool_choice | \
names 'g', but the tools are ['f']
chat | {"tool_choice": "required"} | tool_choice | needs tools
chat | {"response_format": {"type": "xml"}} | response_format.type | 'json_object'
chat | {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}} | response_format.json_schema.name \
| missing
chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}} \
| response_format.json_schema.name | match
chat | {"response_format": {"type": "text", "schema": {"type": "object"}}} | response_format.type | takes no schema
chat | {"messages": [TURN, FINAL], "continue_final_message": true} | continue_final_message | excludes add_generation
chat | {"messages": [TURN], ONWARDS} | continue_final_message | needs an assistant's text
chat | {"messages": [TURN, {"role": "assistant", "content": ""}], ONWARDS} | continue_final_message | needs an
chat | {"messages": [TURN, {"role": "assistant", "content": "x", "tool_calls": [{"id": "a", "type": "function", \
"function": {"name": "f", "arguments": "{}"}}]}], ONWARDS} | continue_final_message | needs an assistant's text
chat | {"messages": [TURN, FINAL], "response_format": {"type": "json_object"}, ONWARDS} | continue_final_message | \
cannot be combined with response_format
chat | {"chat_template_kwargs": {"continue_final_message": true}} | chat_template_kwargs | a field of the request
messages | {"messages": [TURN, {"role": "assistant", "content": "Hello "}]} | messages | end with trailing white space
messages | {"messages": [TURN, {"role": "assistant", "content": [{"type": "text", "text": "Hello\\n"}]}]} | messages | \
end with trailing white space
messages | {"messages": [TURN, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]} | messages \
| ends in 'thinking'
messages | {"messages": [TURN, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, \
{"type": "tool_use", "id": "a", "name": "f"}]}]} | messages | ends in 'tool_use'
messages | {"messages": [TURN, FINAL], "output_config": {"format": {"type": "json_schema", "schema": {}}}} | \
output_config.format | cannot be combined
"""
WRONG = WRONG.replace("FINAL", '{"role": "assistant", "content": "x"}')
WRONG = WRONG.replace("ONWARDS", '"add_generation_prompt": false, "continue_final_message": true')


@pytest.mark.parametrize(("api", "fields", "param", "message"), rows(WRONG))
def test_wrong_values_name_field_value_and_what_is_allowed(api, fields, param, message):
    error = refusal_of(api, **fields)
    assert error.param == param
    assert message in str(error)


@EVERY
def test_what_asks_for_nothing_passes(api):
    body = BODIES[api][0]
    for name in {*REFUSED, *IGNORED, *NEUTRAL} - body.field_names - body.aliases.keys():
        for empty in ("", [], {}, None):
            assert read(api, **{name: empty})[1] == ""
    for name in NEUTRAL.keys() - body.field_names - body.aliases.keys():
        for value in NEUTRAL[name]:
            assert read(api, **{name: value})[1] == ""
        assert param_of(api, **{name: "another"}) == name
    for name in REFUSED.keys() - body.field_names:
        assert param_of(api, **{name: {"any": "value"}}) == name
    assert read(api, stop="")[0].stop == []
    everything = dict.fromkeys(body.field_names - BODIES[api][1].keys() - {"max_tokens"})
    assert body_of(api, **everything) == body_of(api), "null is as absent"


# and the names in the header
WITHOUT_EFFECT = """
chat | {"reasoning_effort": "ultra", "keep_alive": "5m", "ttl": 3} | ttl, reasoning_effort
chat | {"service_tier": "flex", "verbosity": "low"} | service_tier, verbosity
chat | {"cache_prompt": true, "drop_params": true} | cache_prompt, drop_params
chat | {"snippy": {"enabled": false}, "tool_stream": true} | snippy, tool_stream
chat | {"stream_options": {"include_usage": true}} | stream_options
chat | {"messages": [{"role": "user", "content": "a", "id": "1"}, {"role": "assistant", "id": "2"}]} | messages[].id
chat | {"messages": [{"role": "user", "content": "a", "b, c\\r\\nd: \\u00e9": 1}]} | messages[].b c\\r\\nd: \\u00e9
chat | {"stream": true, "stream_options": {"include_obfuscation": true}} | stream_options.include_obfuscation
responses | {"store": true, "truncation": "auto", "reasoning": {"effort": "xhigh"}} | store, truncation, effort
responses | {"tools": [{"type": "web_search"}]} | tools[].web_search
messages | {"context_management": {"edits": []}, "speed": "fast"} | context_management, speed
messages | {"output_config": {"effort": "max"}} | effort
ollama | {"options": {"num_ctx": 4096, "temprature": 1}} | options.num_ctx, options.temprature
"""


@pytest.mark.parametrize(("api", "fields", "warnings"), rows(WITHOUT_EFFECT))
def test_what_changes_nothing_is_named_and_strictly_refused(api, fields, warnings):
    assert read(api, **fields)[1] == warnings
    with pytest.raises(RequestError):
        read(api, strict=True, **fields)


# bookkeeping, as the sources of programs send it
EXTRAS = """
completions+chat+responses+messages+ollama+generate | {"metadata": {"a": 1}, "user": "me", "store": false, \
"service_tier": "auto", "prompt_cache_key": "k"} | any program
responses | {"include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"}, "tool_choice": "auto", \
"text": {"verbosity": "medium"}, "reasoning": {"effort": "medium", "summary": "auto"}, \
"parallel_tool_calls": false} | Codex
messages | {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "medium"}, \
"betas": ["a"]} | Claude Code
"""


@pytest.mark.parametrize(("api", "fields", "program"), rows(EXTRAS))
def test_programs_extras_pass_unnamed(api, fields, program):
    assert read(api, strict=True, **fields)[1] == "", program


def chat_of(api, **fields) -> ConversationRequest:
    request = read(api, **fields)[0]
    return request.translate() if hasattr(request, "translate") else request


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
FORMS = """
chat | {"response_format": {"type": "json_object", "schema": SCHEMA}} | SCHEMA
chat | {"response_format": {"type": "json_schema", "schema": SCHEMA}} | SCHEMA
chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}} | SCHEMA
responses | {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": true}}} | SCHEMA
messages | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}} | SCHEMA
ollama+generate | {"format": SCHEMA} | SCHEMA
"""


@pytest.mark.parametrize(("api", "fields", "schema"), rows(FORMS.replace("SCHEMA", SCHEMA)))
def test_each_apis_schema_is_enforced(api, fields, schema):
    assert chat_of(api, **fields).response_format.find_schema()[0] == schema


# and the variables of the template
REASONING = """
chat | {"reasoning_effort": "low"} | {"reasoning_effort": "low"}
chat | {"reasoning": {"effort": "none"}} | {"enable_thinking": false}
chat | {"thinking": {"type": "disabled"}} | {"enable_thinking": false}
chat | {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}} | {"reasoning_effort": "low"}
responses | {"reasoning": {"effort": "low"}} | {"reasoning_effort": "low"}
messages | {"thinking": {"type": "disabled"}} | {"enable_thinking": false}
messages | {"output_config": {"effort": "low"}} | {"reasoning_effort": "low"}
ollama | {"think": false} | {"enable_thinking": false}
ollama | {"think": "low"} | {"enable_thinking": true, "reasoning_effort": "low"}
"""


@pytest.mark.parametrize(("api", "fields", "variables"), rows(REASONING))
def test_reasoning_in_each_apis_words(api, fields, variables):
    assert chat_of(api, **fields).chat_template_kwargs == variables


BUDGETS = """
chat+messages | {"thinking": {"type": "enabled", "budget_tokens": 7}} | 7
chat | {"thinking_budget": 7} | 7
"""


@pytest.mark.parametrize(("api", "fields", "budget"), rows(BUDGETS))
def test_budgets_of_reasoning(api, fields, budget):
    assert chat_of(api, **fields).reasoning_budget == budget


def test_other_names_of_fields():
    assert read("completions", repeat_penalty=1.1, strict=True)[0].repetition_penalty == 1.1
    answered = [{"role": "assistant", "content": "4", "reasoning": "2 and 2"}]
    assert read("chat", messages=answered)[0].messages[0].reasoning_content == "2 and 2"
    assert chat_of("messages", stop_sequences=["a"]).stop == ["a"]
    assert chat_of("responses", max_output_tokens=7).max_tokens == 7
    assert param_of("responses", max_output_tokens="many") == "max_output_tokens"


@pytest.mark.parametrize(("limit", "expected"), [(0, None), (-1, None), (-2, None), (3, 3)])
def test_ollamas_limits_below_one_are_none(limit, expected):
    options = {"num_predict": limit, "repeat_penalty": 1.5, "stop": "a", "seed": -1}
    chat = chat_of("ollama", options=options)
    assert chat.max_tokens == expected
    assert chat.repetition_penalty == 1.5
    assert chat.stop == ["a"]
    assert chat.n == 1


@EVERY
def test_a_seed_of_minus_one_is_none(api):
    fields = {"seed": -1} if api != "ollama" else {"options": {"seed": -1}}
    request = chat_of(api, **fields)
    assert len({request.generation_options({}, 1, None).seed for _ in range(2)}) == 2
    fields = json.loads(json.dumps(fields).replace("-1", "-2"))
    assert chat_of(api, **fields).generation_options({}, 1, None).seed == 2**64 - 2


def test_options_of_the_engine():
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    same = {"temperature": 0.0, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True}
    own = {"logit_bias": {"3": 5}, "min_tokens": 2, "stop_token_ids": [7], "seed": -2, "top_k": -1}
    body = body_of("completions", **same, **own)
    assert body.generation_options(defaults, 9, 4) == GenerationOptions(
        **same,
        top_p=0.9,
        # the engine's seeds have 64 bits and no sign
        seed=2**64 - 2,
        max_new_tokens=9,
        min_new_tokens=2,
        logit_bias={3: 5.0},
        stop_ids=[7],
        logprobs=4,
    )
    # two tokens at least and one at most
    with pytest.raises(RequestError, match="min_tokens"):
        body.generation_options({}, 1, None)
    plain = body_of("chat")
    temperatures = [plain.generation_options(d, 1, None).temperature for d in ({}, defaults)]
    assert temperatures == [0.0, 0.6]
    assert body_of("chat", top_p=0).generation_options({}, 1, None).top_p > 0
    assert body_of("chat", speculate=3).generation_options({}, 1, None).speculate == 3


def test_messages_as_a_template_sees_them():
    # with the fields that the openai client's `parse` adds
    function = {"name": "f", "arguments": '{"a": [1]}', "parsed_arguments": {"a": [1]}}
    call = {"id": "1", "type": "function", "function": function}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    assistant |= {"refusal": None, "annotations": [], "parsed": {}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    result = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"}
    messages = [{"role": "developer", "content": parts}, assistant, result]
    translated = [turn.to_template() for turn in body_of("chat", messages=messages).messages]
    translated_call = {**call, "function": {"name": "f", "arguments": {"a": [1]}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [translated_call]}
    assert translated == [{"role": "system", "content": "a\nb"}, answer, result]
    function["arguments"] = "{"
    (cut,) = body_of("chat", messages=[assistant]).messages
    assert cut.to_template()["tool_calls"][0]["function"]["arguments"] == {"cut": "{"}


def test_a_body_has_no_more_values_than_the_context_can_need():
    # they are checked in one go, while /health waits
    ids = json.dumps({"prompt": [7] * 2000}).encode()
    message = "it has about 2,001 values; at most 1,000 fit this model's context"
    with pytest.raises(RequestError, match=message):
        CompletionRequest.read(ids, Reading(max_values=1000))
    CompletionRequest.read(ids, Reading(max_values=3000))
