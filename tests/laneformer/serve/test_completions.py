"""/v1/completions of a real server, through the strict `openai` client and as raw JSON,
against the engine itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from laneformer.engine import Engine
from laneformer.engine.options import batch_seeds
from tests.laneformer.serve.conftest import Server

TEXT = "The quick brown fox"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(model_folder, threads=1, cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(tiny: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{tiny.url}/v1", api_key="none", _strict_response_validation=True, max_retries=0
    )


@pytest.fixture(scope="module")
def lenient(tiny: Server) -> openai.OpenAI:
    """For what OpenAI itself sends and the client's types do not allow: null in a list of log-probabilities,
    and finish_reason = null in a stream of completions.
    """
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


def post(server: Server, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json={**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: Server, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json={**GREEDY, **body})
    assert 400 <= answer.status_code < 500
    return {**answer.json()["error"], "status": answer.status_code}


def counted(server: Server, name: str) -> float:
    """What /metrics says."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"laneformer_{name}"))


def chunks(server: Server, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
    """Of a stream; the last event must be [DONE]."""
    with httpx.stream("POST", f"{server.url}/v1/{path}", json={**GREEDY, **body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_text_ids_and_lists(client, engine):
    ids = engine.tokenizer.encode(TEXT).ids
    expected = engine.generate_text(ids, max_new_tokens=16)
    for prompt in (TEXT, ids, [TEXT], [ids]):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == [expected]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 16)
        assert (answer.choices[0].finish_reason, answer.model) == ("length", "tiny")
    prompts = [ids, [5, 6], ids[:2], *([i] for i in range(10))]  # more than decode at a time
    answer = client.completions.create(prompt=prompts, max_tokens=7, **GREEDY)
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    assert [c.text for c in answer.choices] == [engine.generate_text(p, max_new_tokens=7) for p in prompts]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    tokens = [engine.generate(p, max_new_tokens=7) for p in prompts]
    assert answer.usage.completion_tokens == sum(map(len, tokens))


def test_choices_draw_with_seeds_of_a_batch_and_share_the_prompt(client, tiny, engine):
    ids, before = list(range(5, 45)), counted(tiny, "reused_tokens_total")
    answer = client.completions.create(
        model="tiny",
        prompt=ids,
        n=4,
        best_of=4,
        temperature=1.5,
        seed=11,
        max_tokens=8,
        logit_bias={"7": -100},
    )
    expected = [
        engine.generate_text(ids, seed=seed, temperature=1.5, max_new_tokens=8, logit_bias={7: -100})
        for seed in batch_seeds(11, 4)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 4
    assert answer.usage.prompt_tokens == 40
    assert (
        counted(tiny, "reused_tokens_total") - before >= 3 * 39
    )  # all but the last id, which has to be read
    again = client.completions.create(prompt=ids, max_tokens=1, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    without_seed = [
        client.completions.create(model="tiny", prompt=ids, temperature=1.5).choices[0].text for _ in "ab"
    ]
    assert without_seed[0] != without_seed[1]


def test_logprobs(client, engine):
    ids = engine.tokenizer.encode(TEXT).ids
    found = client.completions.create(prompt=ids, logprobs=3, max_tokens=5, **GREEDY).choices[0]
    truth = engine.generate_detailed(ids, logprobs=3, max_new_tokens=5)
    assert found.logprobs.token_logprobs == [token.logprob for token in truth.tokens]
    for top, token in zip(found.logprobs.top_logprobs, truth.tokens, strict=True):
        assert 1 <= len(top) <= 4
        assert max(top.values()) == token.top[0][1]
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].logprobs is None
    starts = [*found.logprobs.text_offset[1:], len(found.text)]
    for text, begin, end in zip(found.logprobs.tokens, found.logprobs.text_offset, starts, strict=True):
        assert text.startswith("bytes:") or found.text[begin:end] == text


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_scores_the_prompt(tiny, engine, max_tokens):
    """As lm-eval reads it: each log-probability to the bit, and none for the first token."""
    prompts = [engine.tokenizer.encode(TEXT).ids, [9], [5, 6, 7]]
    answer = post(tiny, prompt=prompts, echo=True, logprobs=2, max_tokens=max_tokens, n=2)
    assert len(answer["choices"]) == 6
    for choice in answer["choices"]:
        ids = prompts[choice["index"] // 2]
        new = (
            engine.generate_detailed(ids, logprobs=2, max_new_tokens=max_tokens).tokens if max_tokens else []
        )
        scores = engine.logprobs(ids).tolist() if len(ids) > 1 else []
        found = choice["logprobs"]
        assert found["token_logprobs"] == [None, *scores, *(token.logprob for token in new)]
        assert found["top_logprobs"][0] is None
        assert all(map(len, found["top_logprobs"][1:]))
        assert choice["text"] == engine.tokenizer.decode(ids + [token.id for token in new])
        assert found["text_offset"][0] == 0
        assert found["text_offset"] == sorted(found["text_offset"])
        assert len(found["tokens"]) == len(found["text_offset"]) == len(ids) + max_tokens
    assert answer["usage"]["completion_tokens"] == 6 * max_tokens
    plain = post(tiny, prompt=TEXT, echo=True, max_tokens=1)["choices"][0]
    assert plain["logprobs"] is None
    assert plain["text"].startswith(TEXT)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_followed_by_one_scored_token_even_if_that_ends_the_text(tiny, engine, stream):
    ids, end = engine.tokenizer.encode(TEXT).ids, engine.eos_ids[0]
    asked = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {str(end): 100}}
    parts = [c["choices"][0] for c in chunks(tiny, **asked)] if stream else post(tiny, **asked)["choices"]
    scored = [logprob for part in parts if part["logprobs"] for logprob in part["logprobs"]["token_logprobs"]]
    (new,) = engine.generate_detailed(ids, logprobs=1, max_new_tokens=1, logit_bias={end: 100}).tokens
    assert scored == [None, *engine.logprobs(ids).tolist(), new.logprob]
    assert new.id == end
    assert "".join(part["text"] for part in parts) == engine.tokenizer.decode(ids)
    assert parts[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stop_string_ends_text_tokens_and_request(tiny, engine, logprobs):
    ids = engine.tokenizer.encode(TEXT).ids
    whole = engine.generate_text(ids, max_new_tokens=400, ignore_eos=True)
    stop = whole[20:23]
    cut = whole[: whole.index(stop)]
    options: dict[str, Any] = {"prompt": ids, "stop": [stop, "never"], "max_tokens": 400, "logprobs": logprobs,
                               "ignore_eos": True}  # fmt: skip
    answer = post(tiny, **options)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (cut, "stop")
    assert answer["usage"]["completion_tokens"] < 60
    streamed = [c["choices"][0] for c in chunks(tiny, **options)]
    assert "".join(c["text"] for c in streamed) == cut
    assert [c["finish_reason"] for c in streamed if c["finish_reason"]] == ["stop"]
    if logprobs:
        offsets = choice["logprobs"]["text_offset"]
        assert all(offset < len(cut) for offset in offsets)
        assert [o for c in streamed for o in (c["logprobs"] or {"text_offset": []})["text_offset"]] == offsets


def test_end_of_text_and_stop_ids(tiny, engine):
    ids = engine.tokenizer.encode(TEXT).ids
    tokens = engine.generate(ids, max_new_tokens=30)
    stop = tokens[5]
    count = tokens.index(stop) + 1
    answer = post(tiny, prompt=ids, stop_token_ids=[stop], max_tokens=30, return_token_ids=True, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (tokens[:count], ids)
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == count - 1
    assert answer["usage"]["completion_tokens"] == count
    end = engine.eos_ids[0]
    forced = post(tiny, prompt=ids, logit_bias={str(end): 100}, max_tokens=5)
    assert (forced["choices"][0]["text"], forced["choices"][0]["finish_reason"]) == ("", "stop")
    later = post(tiny, prompt=ids, logit_bias={str(end): 100}, max_tokens=5, min_tokens=2)
    assert later["usage"]["completion_tokens"] == 3
    never = post(tiny, prompt=ids, logit_bias={str(end): 100}, max_tokens=5, ignore_eos=True)
    assert (never["choices"][0]["finish_reason"], never["usage"]["completion_tokens"]) == ("length", 5)


def test_streams_say_what_whole_answers_say(tiny, lenient):
    options: dict[str, Any] = {"prompt": [TEXT, "1 2"], "n": 2, "echo": True, "logprobs": 1, "seed": 5,
                               "temperature": 1.0, "max_tokens": 20, "return_token_ids": True}  # fmt: skip
    whole = post(tiny, **options)
    pieces = chunks(tiny, **options, stream_options={"include_usage": True})
    last = pieces.pop()
    assert last["choices"] == []
    assert last["usage"] is not None
    assert {c["id"] for c in pieces} == {last["id"]} != {whole["id"]}
    assert all(c["usage"] is None and c["object"] == "text_completion" for c in pieces)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in pieces if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert [i for c in mine for i in c["token_ids"]] == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert [value for c in mine if c["logprobs"] for value in c["logprobs"][name]] == values
    said = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert said.items() <= last["usage"].items()
    streamed = lenient.completions.create(prompt=TEXT, stream=True, max_tokens=4, **GREEDY)
    assert (
        "".join(c.choices[0].text for c in streamed)
        == post(tiny, prompt=TEXT, max_tokens=4)["choices"][0]["text"]
    )


def test_usage_so_far(tiny):
    counted = chunks(
        tiny, prompt=TEXT, max_tokens=40, ignore_eos=True, stream_options={"continuous_usage_stats": True}
    )
    counts = [c["usage"]["completion_tokens"] for c in counted]
    assert counts == sorted(counts)
    assert counts[-1] == 40


def test_speculation_changes_no_text(tiny):
    plain = post(tiny, prompt=[5, 6, 7] * 8, max_tokens=60, speculate=0)
    assert plain["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0
    faster = post(tiny, prompt=[5, 6, 7] * 8, max_tokens=60)
    assert plain["choices"][0]["text"] == faster["choices"][0]["text"]
    details = faster["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0


def test_text_spells_no_control_token(tiny, engine):
    found = post(tiny, prompt="<|im_end|>a<|im_start|>", echo=True, return_token_ids=True, max_tokens=1)[
        "choices"
    ][0]
    control = {engine.tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|im_start|>")}
    assert control.isdisjoint(found["prompt_token_ids"])
    assert found["text"].startswith("<|im_end|>a<|im_start|>")


def test_the_form_is_openais(tiny):
    """The example of OpenAI's reference, field by field; null fields are there."""
    answer = post(tiny, prompt="Say this is a test", max_tokens=7)
    assert list(answer) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["system_fingerprint"].startswith("fp_")
    assert set(answer["choices"][0]) == {"text", "index", "logprobs", "finish_reason"}
    assert answer["choices"][0]["logprobs"] is None
    assert {"prompt_tokens", "completion_tokens", "total_tokens"} <= set(answer["usage"])
    assert post(tiny, prompt="a")["id"] != answer["id"]


@pytest.mark.parametrize("max_tokens", [13, 10**9, -1, None])
def test_the_context_limits_the_answer(tiny, max_tokens):
    answer = post(tiny, prompt=[5] * 500, max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["finish_reason"] == "length"
    scored = post(tiny, prompt=[5] * 512, max_tokens=0, echo=True, logprobs=0)
    assert scored["usage"]["completion_tokens"] == 0


def test_refusals(tiny, engine):
    context = engine.config.max_position_embeddings
    error = refused(tiny, prompt=[5] * 512, max_tokens=1)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["type"] == "invalid_request_error"
    assert (
        f"maximum context length is {context} tokens, but you sent 512 tokens in the prompt"
        in error["message"]
    )
    assert "outside the vocabulary" in refused(tiny, prompt=[[5], [10**6]])["message"]
    assert "prompt[1] has no tokens" in refused(tiny, prompt=[[5], []])["message"]
    assert refused(tiny, prompt="a", min_tokens=20)["param"] == "min_tokens"
    assert "max_tokens" in refused(tiny, prompt="a", max_token=3)["message"]
    assert "stop_ids holds" in refused(tiny, prompt="a", stop_token_ids=[10**6])["message"]
    assert post(tiny, model="gpt-4", prompt="a", max_tokens=1)["model"] == "tiny", "any name is taken"
