"""Tests of /v1/completions against the engine."""

import pytest

from laneformer.engine.options import batch_seeds
from tests.laneformer.serve.endpoint import completions, join_chunks, parse_table

TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def api(tiny):
    return completions(tiny)


@pytest.fixture(scope="module")
def ids(engine):
    return engine.tokenizer.encode(TEXT).ids


def test_text_ids_and_lists(api, engine, ids):
    expected = engine.generate_text(ids, max_new_tokens=16)
    for prompt in (TEXT, ids, [TEXT], [ids]):
        answer = api.post(prompt=prompt)
        assert [choice["text"] for choice in answer["choices"]] == [expected]
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(ids)
        assert usage["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["model"] == "tiny"
    prompts = [ids, [5, 6], ids[:2], *([i] for i in range(10))]  # more than decode at a time
    answer = api.post(prompt=prompts, max_tokens=7)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [engine.generate_text(prompt, max_new_tokens=7) for prompt in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    tokens = [engine.generate(prompt, max_new_tokens=7) for prompt in prompts]
    assert answer["usage"]["completion_tokens"] == sum(map(len, tokens))


def test_control_tokens_in_a_text_are_letters_and_named(api, engine):
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>"
    answer = api.ask(prompt=[prompt, "Hi"], max_tokens=1, return_token_ids=True)
    assert answer.headers["warnings"] == "prompt: <|im_start|>, prompt: <|im_end|>"
    control = {engine.tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>")}
    assert control.isdisjoint(answer.json()["choices"][0]["prompt_token_ids"])
    assert "warnings" not in api.ask(prompt="Hi < |im_end|>", max_tokens=1).headers


def test_choices_draw_with_seeds_of_a_batch_and_share_the_prompt(api, engine):
    prompt = list(range(5, 45))
    before = api.count("reused_tokens_total")
    sampling = {"temperature": 1.5, "logit_bias": {"7": -100}}
    answer = api.post(prompt=prompt, n=4, best_of=4, seed=11, max_tokens=8, **sampling)
    options = {"temperature": 1.5, "max_new_tokens": 8, "logit_bias": {7: -100}}
    expected = [engine.generate_text(prompt, seed=seed, **options) for seed in batch_seeds(11, 4)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert len(set(expected)) == 4
    assert answer["usage"]["prompt_tokens"] == 40
    # all but the last id, which has to be read
    assert api.count("reused_tokens_total") - before >= 3 * 39
    again = api.post(prompt=prompt, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_scores_the_prompt(api, engine, ids, max_tokens):
    # as lm-eval reads it: exact log-probabilities, and none for the first token
    prompts = [ids, [9], [5, 6, 7]]
    answer = api.post(prompt=prompts, echo=True, logprobs=2, max_tokens=max_tokens, n=2)
    assert len(answer["choices"]) == 6
    for choice in answer["choices"]:
        prompt = prompts[choice["index"] // 2]
        new = []
        if max_tokens:
            new = engine.generate_detailed(prompt, logprobs=2, max_new_tokens=max_tokens).tokens
        prompt_scores = engine.logprobs(prompt).tolist() if len(prompt) > 1 else []
        scores = choice["logprobs"]
        assert scores["token_logprobs"] == [None, *prompt_scores, *(token.logprob for token in new)]
        assert scores["top_logprobs"][0] is None
        for top, token in zip(scores["top_logprobs"][len(prompt) :], new, strict=True):
            assert max(top.values()) == token.top[0][1]
        assert choice["text"] == engine.tokenizer.decode(prompt + [token.id for token in new])
        assert len(scores["tokens"]) == len(prompt) + max_tokens
        assert len(scores["text_offset"]) == len(scores["tokens"])
        assert scores["text_offset"] == sorted(scores["text_offset"])
    assert answer["usage"]["completion_tokens"] == 6 * max_tokens
    assert api.choice(prompt=TEXT, echo=True, max_tokens=1)["text"].startswith(TEXT)


def test_an_echoed_prompt_is_followed_by_one_scored_token_even_if_that_ends_the_text(
    api, engine, ids
):
    end = engine.eos_ids[0]
    force = {"logit_bias": {end: 100}, "logprobs": 1}
    (new,) = engine.generate_detailed(ids, max_new_tokens=1, **force).tokens
    assert new.id == end
    choice = api.choice(prompt=[ids], echo=True, max_tokens=1, **force)
    scores = [None, *engine.logprobs(ids).tolist(), new.logprob]
    assert choice["logprobs"]["token_logprobs"] == scores
    assert choice["text"] == engine.tokenizer.decode(ids)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stop_string_ends_text_tokens_and_request(api, engine, ids, logprobs):
    whole = engine.generate_text(ids, max_new_tokens=400, ignore_eos=True)
    stop = whole[20:23]
    cut = whole[: whole.index(stop)]
    body = {"prompt": ids, "stop": [stop, "never"], "max_tokens": 400, "ignore_eos": True}
    before = api.count('ended_total{reason="cancelled"')
    answer = api.post(**body, logprobs=logprobs)
    choice = answer["choices"][0]
    assert choice["text"] == cut
    assert choice["finish_reason"] == "stop"
    # of 400: the engine ends soon after the string
    assert answer["usage"]["completion_tokens"] < 60
    assert api.count('ended_total{reason="cancelled"') == before + 1, "in the engine, too"
    chunks = api.stream(**body, logprobs=logprobs)
    assert "".join(join_chunks(chunks, 0, "text")) == cut
    assert "".join(join_chunks(chunks, 0, "finish_reason")) == "stop"
    if logprobs:
        offsets = choice["logprobs"]["text_offset"]
        assert all(offset < len(cut) for offset in offsets)
        assert join_chunks(chunks, 0, "logprobs", "text_offset") == offsets


def test_end_of_text_and_stop_ids(api, engine, ids):
    tokens = engine.generate(ids, max_new_tokens=30)
    stop = tokens[5]
    count = tokens.index(stop) + 1
    fields = {"stop_token_ids": [stop], "max_tokens": 30, "return_token_ids": True, "logprobs": 0}
    answer = api.post(prompt=ids, **fields)
    choice = answer["choices"][0]
    assert choice["token_ids"] == tokens[:count]
    assert choice["prompt_token_ids"] == ids
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == count - 1
    assert answer["usage"]["completion_tokens"] == count
    # with this bias every token ends the text
    forced = {"prompt": ids, "logit_bias": {str(engine.eos_ids[0]): 100}, "max_tokens": 5}
    ended = api.choice(**forced)
    assert ended["text"] == ""
    assert ended["finish_reason"] == "stop"
    assert api.post(**forced, min_tokens=2)["usage"]["completion_tokens"] == 3
    never = api.post(**forced, ignore_eos=True)
    assert never["choices"][0]["finish_reason"] == "length"
    assert never["usage"]["completion_tokens"] == 5


def test_streams_say_what_whole_answers_say(api):
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 20, "return_token_ids": True}
    # two prompts of two choices each
    body = {"prompt": [TEXT, "1 2"], "n": 2, "echo": True, "logprobs": 1, **sampled}
    whole = api.post(**body)
    *pieces, last = api.stream(**body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert {c["id"] for c in pieces} == {last["id"]} != {whole["id"]}
    assert all(c["usage"] is None and c["object"] == "text_completion" for c in pieces)
    for index, choice in enumerate(whole["choices"]):
        for name in ("text", "finish_reason"):
            assert "".join(join_chunks(pieces, index, name)) == choice[name]
        assert join_chunks(pieces, index, "token_ids") == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert join_chunks(pieces, index, "logprobs", name) == values
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert all(last["usage"][name] == whole["usage"][name] for name in names)
    options = {"continuous_usage_stats": True}
    so_far = [c["usage"]["completion_tokens"] for c in api.stream(**body, stream_options=options)]
    assert so_far == sorted(so_far)
    assert so_far[-1] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("max_tokens", [13, 10**9, -1, None])
def test_the_context_limits_the_answer(api, max_tokens):
    answer = api.post(prompt=[5] * 500, max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["finish_reason"] == "length"
    scored = api.post(prompt=[5] * 512, max_tokens=0, echo=True, logprobs=0)
    assert scored["usage"]["completion_tokens"] == 0


# field | what its error says | body
REFUSED = """
prompt | maximum context length is 512 tokens, but you sent 512 tokens in the prompt | {"prompt": FULL}
prompt | outside the vocabulary | {"prompt": [[5], [1000000]]}
prompt | prompt[1] has no tokens | {"prompt": [[5], []]}
min_tokens | exceeds the limit | {"min_tokens": 20}
stop_token_ids | stop_token_ids holds | {"stop_token_ids": [1000000]}
logit_bias | logit_bias holds | {"logit_bias": {"1000000": 1}}
""".replace("FULL", str([5] * 512))


@pytest.mark.parametrize(("name", "message", "fields"), parse_table(REFUSED))
def test_refusals(api, name, message, fields):
    error = api.refusal(**{"prompt": "a", **fields})
    assert error["param"] == name
    assert message in error["message"]
    assert (error["code"] == "context_length_exceeded") == message.startswith("maximum")


def test_any_name_of_a_model_is_taken(api):
    assert api.post(model="gpt-4", prompt="a", max_tokens=1)["model"] == "tiny"
