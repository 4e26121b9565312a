"""Tests of answers from an endpoint and from the engine."""

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from evals.code.__main__ import is_chat
from evals.code.answers import INSTRUCTION, Sampling, collect
from evals.code.score import open_dataset
from evals.items import Partial
from evals.scorer import Answerer, load_tokenizer, open_scorer
from records.files import read_lines
from tests.evals.code.code_assets import PROBLEMS, write_dataset
from tests.evals.code.conftest import Endpoint


def test_samplings():
    # greedy answers are one; every sampled answer has its own seed, which repeats
    with pytest.raises(
        ValueError, match="n = 2 greedy answers would be identical; set --temperature"
    ):
        Sampling(n=2)
    keys = [(f"HumanEval/{i}", k) for i in range(50) for k in range(3)]
    seeds = [Sampling(seed=seed).seed_of(*key) for seed in (5, 6, 5) for key in keys]
    assert len({*seeds}) == 2 * len(keys)
    assert seeds[: len(keys)] == seeds[2 * len(keys) :]
    assert 0 <= min(seeds) <= max(seeds) < 2**31


GREEDY = Sampling()


def collect_from(server: Endpoint, folder: Path, sampling=GREEDY, chat=True, parallel=1, of="m"):
    answerer = Answerer(base_url=server.url, model="m", concurrency=parallel, timeout_s=30)
    dataset = open_dataset(write_dataset(folder / "d.jsonl"))
    partial = Partial(folder / "answers.jsonl")
    return collect(dataset, open_scorer(None, answerer), sampling, chat, partial, of)


def test_answers_of_an_endpoint(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    # each is tried again; 206 breaks the connection off
    endpoint.statuses = [503, 429, 500, 206]
    rows = collect_from(endpoint, tmp_path, Sampling(n=2, temperature=0.8, seed=3), parallel=2)
    keys = [(p["task_id"], k) for p in PROBLEMS for k in range(2)]
    assert [(row["task_id"], row["sample"]) for row in rows] == keys
    assert all("```python" in row["answer"] for row in rows)
    assert len(endpoint.requests) == 6 + 4
    first = endpoint.requests[0]
    assert (first["path"], first["authorization"]) == ("/v1/chat/completions", "Bearer k")
    content = INSTRUCTION.format(prompt=PROBLEMS[0]["prompt"].strip())
    assert [{"role": "user", "content": content}] in [
        body["messages"] for body in endpoint.requests
    ]
    assert {body["seed"] for body in endpoint.requests} == {row["seed"] for row in rows}
    completions = collect_from(endpoint, tmp_path, chat=False, of="completions")
    last = endpoint.requests[-1]
    # the four likeliest stops
    assert (last["path"], last["stop"][0]) == ("/v1/completions", "\ndef ")
    # the answer ends before the stop string
    assert completions[0]["answer"] == PROBLEMS[0]["canonical_solution"]
    # which the endpoint did not know
    assert completions[0]["finish_reason"] == "stop"


def test_a_run_continues_where_it_ended(endpoint, tmp_path):
    endpoint.statuses = [200, *[503] * 50]
    with pytest.raises(
        ValueError, match=r"no answer in 6 attempts.*HTTP 503.*run again to continue"
    ):
        collect_from(endpoint, tmp_path)
    assert len(read_lines(tmp_path / "answers.jsonl")) == 1
    endpoint.statuses = []
    endpoint.requests = []
    for of, requests in (("m", 2), ("m", 2), ("other settings", 5), ("m", 5)):
        rows = collect_from(endpoint, tmp_path, of=of)
        assert [row["task_id"] for row in rows] == [p["task_id"] for p in PROBLEMS]
        assert len(endpoint.requests) == requests


def test_a_failure_loses_no_answer_that_arrived(tmp_path):
    # the first problem fails once the others are answered
    answered = threading.Semaphore(0)

    def generate(prompt, *_, **sampling):
        if PROBLEMS[0]["prompt"].strip() in prompt:
            for _ in PROBLEMS[1:]:
                answered.acquire()
            raise ValueError("broken")
        answered.release()
        return "", "stop"

    scorer = SimpleNamespace(parallel=2, generate=generate)
    dataset = open_dataset(write_dataset(tmp_path / "d"))
    with pytest.raises(ValueError, match="broken"):
        collect(dataset, scorer, GREEDY, False, Partial(tmp_path / "a"), "m")
    assert len(read_lines(tmp_path / "a")) == len(PROBLEMS) - 1


def test_a_refusal_is_not_asked_again(endpoint, tmp_path):
    for number, status in enumerate((400, 401, 404), 1):
        endpoint.statuses = [status]
        with pytest.raises(ValueError, match=f"refused the request, HTTP {status}"):
            open_scorer(None, Answerer(base_url=endpoint.url)).generate(PROBLEMS[0]["prompt"], 9)
        assert len(endpoint.requests) == number
    with pytest.raises(ValueError, match=r"must begin with http"):
        open_scorer(None, Answerer(base_url="localhost:8000"))


def test_the_engine_answers_chats(folder):
    scorer = open_scorer(folder, Answerer())
    turns = [{"role": "user", "content": "double it"}]
    template = load_tokenizer(folder).apply_chat_template
    ids = template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    new = scorer.engine.generate(ids, max_new_tokens=12, temperature=0.9, seed=11)
    text = scorer.text_after(ids, [id_ for id_ in new if id_ != 2])
    answer = scorer.generate(turns, 12, temperature=0.9, seed=11)
    assert answer == (text, "stop" if new[-1] == 2 else "length")
    scorer.close()


def test_a_template_in_the_tokenizers_config_is_one(folder, tmp_path):
    # as in older folders: without it, a chat model was asked to complete functions
    inside, bare = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("hf", "bare"))
    template = (folder / "chat_template.jinja").read_text()
    for path in (inside, bare):
        (path / "chat_template.jinja").unlink()
    config = inside / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    chats = [is_chat("auto", path) for path in (folder, inside, bare, tmp_path, None)]
    assert chats == [True, True, False, False, True]
    with pytest.raises(ValueError, match="has no chat template; use --prompt completion"):
        is_chat("chat", bare)
