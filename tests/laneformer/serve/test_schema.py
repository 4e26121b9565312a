"""Bodies of requests: every parameter of the `openai` client is supported or refused by name; so
is what is wrong.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from laneformer.serve.bodies import Reading, RequestError, explain_errors, parse_json
from laneformer.serve.schema import CompletionRequest, ConversationRequest, Sampled

PROMPT: dict[str, Any] = {"prompt": "Hi"}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BASE: dict[type[Sampled], dict[str, Any]] = {CompletionRequest: PROMPT, ConversationRequest: TALK}
both = pytest.mark.parametrize("body", [CompletionRequest, ConversationRequest])


def parsed(body: type[Sampled], **fields: Any) -> Any:
    return body.model_validate({**BASE[body], **fields})


def refused(body: type[Sampled], **fields: Any) -> RequestError:
    with pytest.raises(ValidationError) as caught:
        parsed(body, **fields)
    error = explain_errors(caught.value.errors())
    assert error.status == 400
    return error


@both
def test_every_parameter_of_the_client_is_known(body):
    """An update of the client that brings a new one fails here: support it, take its neutral value, or refuse it."""
    from openai.types import chat, completion_create_params

    params = completion_create_params if body is CompletionRequest else chat.completion_create_params
    names = set(typing.get_type_hints(params.CompletionCreateParamsNonStreaming))
    assert names <= body.model_fields.keys() | body.unused.keys() | body.neutral.keys() | body.refused.keys()
    assert body.refused.keys().isdisjoint(body.model_fields)


@both
def test_what_is_not_supported_is_refused_by_name_and_what_changes_nothing_is_taken(body):
    for name, instead in body.refused.items():
        error = refused(body, **{name: {"any": "value"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert str(error) == f"{name} is not supported: {instead}"
    for name, harmless in {**body.unused, **body.neutral}.items():
        for value in harmless if harmless is not None else [{"any": "value"}]:
            parsed(body, **{name: value})
        if harmless is not None:
            assert refused(body, **{name: "another"}).param == name


@both
def test_null_is_as_absent(body):
    required = {*BASE[body], "max_tokens"}
    everything = {name: None for name in [*body.model_fields, *body.refused] if name not in required}
    assert parsed(body, **everything) == parsed(body)


# fields, the parameter that an error names, and a part of its message
WRONG: dict[type[Sampled], str] = {
    Sampled: """
{"max_token": 3} | max_token | did you mean 'max_tokens'?
{"xyzzy": 3} | xyzzy | known are
{"temperature": 2.5} | temperature | temperature = 2.5: input should be less than or equal to 2
{"temperature": NaN} | temperature | NaN
{"n": 0} | n | n = 0: input should be greater than or equal to 1
{"n": true} | n | valid integer
{"max_tokens": 1.5} | max_tokens | valid integer
{"stop": ["a", ""]} | stop | none of them empty
{"stop": 3} | stop | stop = 3: it must be a text, or a list
{"logit_bias": {"one": 1}} | logit_bias.one.[key] | string should match
{"logit_bias": {"1": 101}} | logit_bias.1 | less than or equal to 100
{"stream_options": {"include_usage": true}} | stream_options | needs stream = true
{"stream": true, "stream_options": {"include_usages": true}} | stream_options.include_usages | did you mean
{"stop_token_ids": ["a"]} | stop_token_ids[0] | valid integer
""",
    CompletionRequest: """
{"prompt": [1, "a"]} | prompt | a list of token ids
{"prompt": []} | prompt | 0 choices; 1 to 128 fit
{"prompt": ["a", "b"], "n": 65} | prompt | 2 prompts, n = 65: 130 choices
{"max_tokens": 0} | max_tokens | needs echo = true
{"best_of": 3, "n": 2} | best_of | must equal n = 2
""",
    ConversationRequest: """
{"messages": []} | messages | at least 1 item
{"messages": [{"role": "robot", "content": "Hi"}]} | messages[0].role | 'developer', 'user'
{"messages": [{"content": "Hi"}]} | messages[0].role | is missing
{"messages": [{"role": "user"}]} | messages[0].content | content is missing
{"messages": [{"role": "user", "content": 3}]} | messages[0].content | a text, or a list of parts
{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]} | messages[0].content | image_url
{"messages": [{"role": "user", "content": "a", "contents": "b"}]} | messages[0].contents | 'content'
{"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]} | \
messages[0].tool_calls | an assistant's
{"max_tokens": 3, "max_completion_tokens": 4} | max_tokens | contradicts
{"top_logprobs": 2} | top_logprobs | needs logprobs = true
{"chat_template_kwargs": {"tools": []}} | chat_template_kwargs | a field of the request
{"tools": [{"type": "custom"}]} | tools[0].type | 'function'
{"tools": [{"type": "function", "function": {"name": "a b"}}]} | tools[0].function.name | should match pattern
{"tools": [FUNCTION, FUNCTION]} | tools | two functions of one name
{"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}]} | tools[0].function.parametres | \
did you mean 'parameters'
{"tools": [{"type": "function", "function": {"name": "f", "returns": {}}}]} | tools[0].function.returns | is unknown
{"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]} | tools[0].function.strict | valid boolean
{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]} | \
tools[0].function.parameters | of type 'object'
{"tools": [FUNCTION], "tool_choice": "any"} | tool_choice | it must be 'none', 'auto', 'required'
{"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}} | tool_choice | it must be 'none'
{"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}} | tool_choice | \
names 'g', but the tools are ['f']
{"tool_choice": "required"} | tool_choice | needs tools
{"response_format": {"type": "xml"}} | response_format.type | 'json_object'
{"response_format": {"type": "json_schema"}} | response_format.json_schema.name | None must match
{"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}} | response_format.json_schema.name | 'a b'
{"response_format": {"type": "json_object", "schema": {}}} | response_format.schema | is unknown
""",
}
FUNCTION = '{"type": "function", "function": {"name": "f"}}'


def rows_of(body: type[Sampled]) -> Iterator[tuple[type[Sampled], str, str, str]]:
    for row in (WRONG[Sampled] + WRONG[body]).strip().splitlines():
        if row:
            fields, param, message = row.split(" | ")
            yield body, fields.replace("FUNCTION", FUNCTION), param, message


@pytest.mark.parametrize(
    ("body", "fields", "param", "message"), [*rows_of(CompletionRequest), *rows_of(ConversationRequest)]
)
def test_wrong_values_name_field_value_and_what_is_allowed(body, fields, param, message):
    error = refused(body, **json.loads(fields))
    assert error.param == param
    assert message in str(error)


def test_options_of_the_engine():
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    body = parsed(CompletionRequest, temperature=0.0, top_k=-1, seed=-1, logit_bias={"3": 5}, min_tokens=2,
                  stop_token_ids=[7], speculate=3, ignore_eos=True, repetition_penalty=1.5, min_p=0.1)  # fmt: skip
    options = body.options(defaults, 9, 4)
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.0, 0.9, 0, 0.1)
    assert (options.seed, options.max_new_tokens, options.min_new_tokens) == (2**64 - 1, 9, 2)
    assert (options.logit_bias, options.stop_ids, options.logprobs) == ({3: 5.0}, [7], 4)
    assert (options.speculate, options.ignore_eos, options.repetition_penalty) == (3, True, 1.5)
    plain = parsed(ConversationRequest)
    assert plain.options({}, 1, None).temperature == 0.0
    assert plain.options(defaults, 1, None).temperature == 0.6
    assert plain.options({}, 1, None).seed != plain.options({}, 1, None).seed  # OpenAI's: at random
    assert parsed(ConversationRequest, top_p=0).options({}, 1, None).top_p > 0
    with pytest.raises(RequestError, match="min_new_tokens"):
        body.options({}, 1, None)


def test_messages_as_a_template_sees_them():
    function = {"name": "f", "arguments": '{"a": [1]}', "parsed_arguments": {"a": [1]}}
    call = {"id": "1", "type": "function", "function": function}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    # with what the openai client's `parse` adds
    assistant = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "parsed": {}}
    result = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"}
    body = parsed(
        ConversationRequest,
        messages=[{"role": "developer", "content": parts}, {**assistant, "tool_calls": [call]}, result],
    )
    system, said, tool = (message.plain() for message in body.messages)
    assert system == {"role": "system", "content": "a\nb"}
    called = [{**call, "function": {"name": "f", "arguments": {"a": [1]}}}]
    assert said == {"role": "assistant", "content": "", "tool_calls": called}
    assert tool == result
    call["function"]["arguments"] = "{"
    broken = parsed(ConversationRequest, messages=[{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(RequestError, match="arguments of a call of 'f' are no JSON"):
        broken.messages[0].plain()


def leniently(body: type[Sampled], **fields: Any) -> tuple[Any, str]:
    """The body, and the names in the header `warnings`."""
    reading = Reading(strict=False)
    read = body.read(json.dumps({**BASE[body], **fields}).encode(), reading)
    return read, reading.headers.get("warnings", "")


def test_efforts_are_variables_of_the_template():
    own = {"reasoning_effort": "low"}
    for fields, expected in (
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "high", "chat_template_kwargs": own}, own),
    ):
        read, warnings = leniently(ConversationRequest, **fields)
        assert (read.chat_template_kwargs, warnings) == (expected, "")


# fields, and the names in the header
WITHOUT_EFFECT = """
{"reasoning_effort": "ultra", "keep_alive": "5m"} | reasoning_effort, keep_alive
{"service_tier": "flex", "verbosity": "low"} | service_tier, verbosity
{"service_tier": "auto", "store": false, "metadata": {"a": 1}} |\x20
{"thinking": {"type": "enabled"}, "cache_prompt": true, "typical_p": 1.0} | thinking, cache_prompt
{"stream_options": {"include_usage": true}} | stream_options
{"messages": [{"role": "user", "content": "a", "id": "1"}, {"role": "user", "content": "b", "id": "2"}]} | messages[].id
{"messages": [{"role": "assistant", "content": null, "reasoning": "Hm"}]} | messages[].reasoning
{"stream": true, "stream_options": {"include_obfuscation": true}} | stream_options.include_obfuscation
{"a, b\\r\\nc: \\u00e9": 1} | a b\\r\\nc: \\u00e9
{"repeat_penalty": 1.1} | repeat_penalty
"""


@pytest.mark.parametrize("row", WITHOUT_EFFECT.strip().splitlines())
def test_what_changes_nothing_is_taken_and_named(row):
    text, warnings = row.split(" | ")
    fields = json.loads(text)
    assert leniently(ConversationRequest, **fields)[1] == warnings
    if warnings:
        assert refused(ConversationRequest, **fields).param is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('{"temprature": 1}', "temprature is unknown; did you mean 'temperature'?"),
        ('{"typical_p": 0.9}', "typical_p = 0.9 is not supported; use one of [1]"),
        ('{"modalities": ["text", "audio"]}', 'modalities = ["text", "audio"] is not supported'),
        ('{"functions": []}', "functions is not supported: use tools"),
        (json.dumps({f"field_{i}": i for i in range(65)}), "field_64 is unknown"),
    ],
    ids=range(5),
)
def test_what_would_change_the_answer_is_refused(fields, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        leniently(ConversationRequest, **json.loads(fields))


def test_other_servers_names_are_known():
    assert leniently(ConversationRequest, repeat_penalty=1.1)[0].repetition_penalty == 1.1
    said = [{"role": "assistant", "content": "4", "reasoning": "2 and 2"}]
    assert leniently(ConversationRequest, messages=said)[0].messages[0].reasoning_content == "2 and 2"


def test_a_body_has_no_more_values_than_the_context_can_need():
    """They are checked in one go, meanwhile /health waits."""
    ids = json.dumps({"prompt": [7] * 2000}).encode()
    message = "it has about 2,001 values; at most 1,000 fit this model's context"
    with pytest.raises(RequestError, match=message):
        CompletionRequest.read(ids, Reading(max_values=1000))
    CompletionRequest.read(ids, Reading(max_values=3000))


def test_json_of_many_parts_is_read_alike():
    """In Python, where other threads run meanwhile."""
    value = {"a": [[i, str(i), {"b": i / 3}] for i in range(20_000)], "c": None, "d": [True, "\u00e9\\"]}
    text = json.dumps(value)
    assert parse_json(text.encode()) == json.loads(text)
    for wrong in ("[" * 100_000, text[:-1], "1," * 60_000):
        with pytest.raises(RequestError, match="the body is not a JSON object"):
            ConversationRequest.read(wrong.encode(), Reading())
