"""Bodies of requests: every parameter of the `openai` client is supported or refused by name; so
is what is wrong.
"""

from __future__ import annotations

import json
import re
import typing
from typing import Any

import pytest
from pydantic import ValidationError

from laneformer.serve.bodies import Reading, RequestError, refusal
from laneformer.serve.bodies import parsed as parsed_json
from laneformer.serve.schema import UNTIL_THE_END, CompletionRequest, ConversationRequest, Sampled

PROMPT: dict[str, Any] = {"prompt": "Hi"}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BASE: dict[type[Sampled], dict[str, Any]] = {CompletionRequest: PROMPT, ConversationRequest: TALK}
both = pytest.mark.parametrize("body", [CompletionRequest, ConversationRequest])
OPTIONS = ("frequency_penalty", "logit_bias", "max_tokens", "n", "presence_penalty", "seed", "stop", "stream",
           "stream_options", "temperature", "top_p")  # fmt: skip
EFFECTIVE = {
    CompletionRequest: {"prompt", "echo", "logprobs", *OPTIONS},
    ConversationRequest: {
        "messages", "logprobs", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls",
        "response_format", "prediction", *OPTIONS,
    },
}  # fmt: skip
WITHOUT_EFFECT = {"user": ("me", None), "model": ("tiny", 1)}
NEUTRAL: dict[type[Sampled], dict[str, tuple[Any, Any]]] = {  # a value that is accepted, and one that is not, if any
    CompletionRequest: {"best_of": (1, 2), **WITHOUT_EFFECT},
    ConversationRequest: {
        "metadata": ({"a": "b"}, None), "modalities": (["text"], ["text", "audio"]), "prompt_cache_key": ("k", None),
        "prompt_cache_options": ({"mode": "implicit"}, None), "prompt_cache_retention": ("in_memory", "24h"),
        "reasoning_effort": ("high", "ultra"), "safety_identifier": ("me", None), "service_tier": ("auto", "flex"),
        "store": (False, True), "verbosity": ("medium", "low"), **WITHOUT_EFFECT,
    },
}  # fmt: skip


def parsed(body: type[Sampled], **fields: Any) -> Any:
    return body.model_validate({**BASE[body], **fields})


def refused(body: type[Sampled], **fields: Any) -> RequestError:
    with pytest.raises(ValidationError) as caught:
        parsed(body, **fields)
    error = refusal(caught.value.errors())
    assert error.status == 400
    return error


@both
def test_every_parameter_of_the_client_is_known(body):
    """An update of the client that brings a new one fails here: support it, accept its neutral value,
    or refuse it.
    """
    from openai.types import chat, completion_create_params

    params = completion_create_params if body is CompletionRequest else chat.completion_create_params
    names = set(typing.get_type_hints(params.CompletionCreateParamsNonStreaming))
    assert names == EFFECTIVE[body] | set(NEUTRAL[body]) | set(body.refused)
    assert set(body.refused).isdisjoint(body.model_fields)


@both
def test_what_is_not_supported_is_refused_by_name(body):
    for name, instead in body.refused.items():
        error = refused(body, **{name: {"any": "value"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert str(error) == f"{name} is not supported: {instead}"
        parsed(body, **{name: None})


@both
def test_what_has_no_effect_is_accepted_with_a_harmless_value_alone(body):
    for name, (accepted, other) in NEUTRAL[body].items():
        parsed(body, **{name: accepted})
        if other is None:
            continue
        error = refused(body, **{name: other})
        assert error.param is not None
        assert error.param.startswith(name)


@both
def test_null_is_as_absent(body):
    required = {*BASE[body], "max_tokens"}
    everything = {name: None for name in [*body.model_fields, *body.refused] if name not in required}
    assert parsed(body, **everything) == parsed(body)


def test_no_limit_of_tokens():
    """-1 and null: until the end of the context."""
    for none in (-1, None):
        assert parsed(CompletionRequest, max_tokens=none).max_tokens == UNTIL_THE_END
        assert parsed(ConversationRequest, max_tokens=none).max_tokens is None
    assert parsed(CompletionRequest).max_tokens == 16


# fields, the parameter that an error names, and words of its message
WRONG: dict[type[Sampled], list[tuple[dict[str, Any], str, str]]] = {
    Sampled: [
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'?"),
        ({"xyzzy": 3}, "xyzzy", "known are add_generation_prompt|known are best_of"),
        ({"temperature": 2.5}, "temperature", r"temperature = 2\.5: input should be less than or equal to 2"),
        ({"temperature": "1"}, "temperature", 'temperature = "1": input should be a valid number'),
        ({"temperature": float("nan")}, "temperature", "NaN"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"n": 0}, "n", "n = 0: input should be greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": True}, "n", "valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": -2}, "max_tokens", "greater than or equal"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"stop": ["a"] * 17}, "stop", "a list of at most 16 texts"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"stop": 3}, "stop", "stop = 3: it must be a text, or a list"),
        ({"logit_bias": {"one": 1}}, "logit_bias.one.[key]", "string should match"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream = true"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages", "did you mean"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "valid integer"),
    ],
    CompletionRequest: [
        ({"prompt": [1, "a"]}, "prompt", "a list of token ids"),
        ({"prompt": []}, "prompt", "0 choices; 1 to 128 fit"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "65 prompts, n = 2: 130 choices"),
        ({"max_tokens": 0}, "max_tokens", "needs echo = true"),
        ({"best_of": 3, "n": 2}, "best_of", "must equal n = 2"),
        ({"suffix": "x"}, "suffix", "fills no gaps"),
        ({"logprobs": 101}, "logprobs", "less than or equal to 100"),
        ({"logprobs": True}, "logprobs", "valid integer"),
    ],
    ConversationRequest: [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "Hi"}, "messages", "valid list"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "'developer', 'user'"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "content is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a text, or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content", "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
         "messages[0].content", "input_audio"),
        ({"messages": [{"role": "user", "content": "a", "contents": "b"}]}, "messages[0].contents", "'content'"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
         "messages[0].tool_calls", "an assistant's"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "contradicts"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs = true"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "a field of the request"),
    ],
}  # fmt: skip
WRONG_ROWS = [
    (body, *row) for body in (CompletionRequest, ConversationRequest) for row in WRONG[Sampled] + WRONG[body]
]


@pytest.mark.parametrize(("body", "fields", "param", "message"), WRONG_ROWS)
def test_wrong_values_name_field_value_and_what_is_allowed(body, fields, param, message):
    error = refused(body, **fields)
    assert error.param == param
    assert re.search(message, str(error)), str(error)


@both
@pytest.mark.parametrize("text", ["3", "[]", '"text"', "null", "{", ""])
def test_what_is_no_object(body, text):
    with pytest.raises(ValidationError) as caught:
        body.model_validate_json(text)
    assert "the body is not a JSON object" in str(refusal(caught.value.errors()))


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
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assistant = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    result = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"}
    body = parsed(
        ConversationRequest,
        messages=[{"role": "developer", "content": parts}, {**assistant, "tool_calls": [call]}, result],
    )
    system, said, tool = (message.plain() for message in body.messages)
    assert system == {"role": "system", "content": "a\nb"}
    assert said["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"a": [1]}}}]
    assert (said["role"], said["content"]) == ("assistant", "")
    assert tool == result
    call["function"]["arguments"] = "{"
    broken = parsed(ConversationRequest, messages=[{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(RequestError, match="arguments of a call of 'f' are no JSON"):
        broken.messages[0].plain()


def test_what_the_openai_client_parsed_may_be_sent_back():
    """`client.chat.completions.parse` adds what it made of the answer; the template does not see it."""
    function = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    call = {"id": "1", "type": "function", "function": function}
    answers = [{"content": "{}", "parsed": {"a": 2}}, {"tool_calls": [call]}]
    messages = [{"role": "assistant", **answer} for answer in answers]
    answer, called = (m.plain() for m in parsed(ConversationRequest, messages=messages).messages)
    assert answer == {"role": "assistant", "content": "{}"}
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def leniently(body: type[Sampled], **fields: Any) -> tuple[Any, str]:
    """The body, and the names in the header `warnings`."""
    reading = Reading(strict=False)
    read = body.read(json.dumps({**BASE[body], **fields}).encode(), reading)
    return read, reading.headers.get("warnings", "")


def test_efforts_are_variables_of_the_template():
    for effort, expected in (("none", {"enable_thinking": False}), ("high", {"reasoning_effort": "high"})):
        read, warnings = leniently(ConversationRequest, reasoning_effort=effort)
        assert (read.chat_template_kwargs, warnings) == (expected, "")
    own = {"reasoning_effort": "low"}
    read, _ = leniently(ConversationRequest, reasoning_effort="high", chat_template_kwargs=own)
    assert read.chat_template_kwargs == own


@pytest.mark.parametrize(
    ("fields", "warnings"),
    [
        ({"reasoning_effort": "ultra", "keep_alive": "5m"}, "reasoning_effort, keep_alive"),
        ({"service_tier": "flex", "verbosity": "low"}, "service_tier, verbosity"),
        ({"service_tier": "auto", "store": False, "metadata": {"a": 1}}, ""),
        ({"thinking": {"type": "enabled"}, "cache_prompt": True, "typical_p": 1.0}, "thinking, cache_prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": "Hi", "id": "1"}] * 3}, "messages[].id"),
        ({"messages": [{"role": "assistant", "content": None, "reasoning": "Hm"}]}, "messages[].reasoning"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"a, b\r\nc: \u00e9": 1}, "a b\\r\\nc: \\u00e9"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_taken_and_named(fields, warnings):
    assert leniently(ConversationRequest, **fields)[1] == warnings
    if warnings:
        assert refused(ConversationRequest, **fields).param is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "temprature is unknown; did you mean 'temperature'?"),
        ({"typical_p": 0.9}, r"typical_p = 0\.9 is not supported; use one of \[1\]"),
        ({"modalities": ["text", "audio"]}, r"modalities = \[\"text\", \"audio\"\] is not supported"),
        ({"functions": []}, "functions is not supported: use tools"),
        ({f"field_{i}": i for i in range(65)}, "field_64 is unknown"),
    ],
)
def test_what_would_change_the_answer_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        leniently(ConversationRequest, **fields)


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
    assert parsed_json(text.encode()) == json.loads(text)
    for wrong in ("[" * 100_000, text[:-1], "1," * 60_000):
        with pytest.raises(RequestError, match="the body is not a JSON object"):
            ConversationRequest.read(wrong.encode(), Reading())
