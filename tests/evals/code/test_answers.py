"""Answers from an endpoint and from the engine."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from evals.code.__main__ import is_chat
from evals.code.answers import INSTRUCTION, Model, Sampling, collect, prompt_of
from evals.code.score import open_dataset
from evals.scorer import Source, fast_tokenizer
from records.files import read_lines
from tests.evals.code.code_assets import PROBLEMS, write_dataset
from tests.evals.code.conftest import Endpoint


@pytest.fixture
def dataset(tmp_path):
    return open_dataset(write_dataset(tmp_path / "d.jsonl"))


def test_samplings():
    """Those that make no sense are refused; every answer has a seed of its own, which repeats."""
    wrong = [{"n": 2}, {"n": 0}, {"temperature": -1.0}, {"top_p": 0.0}]
    for options in (*wrong, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match="temperature"):
            Sampling(**options)
    asked = [(f"HumanEval/{i}", k) for i in range(50) for k in range(3)]
    seeds = [Sampling(seed=seed).seed_of(*key) for seed in (5, 6, 5) for key in asked]
    assert len({*seeds}) == 2 * len(asked)
    assert seeds[: len(asked)] == seeds[2 * len(asked) :]
    assert 0 <= min(seeds) <= max(seeds) < 2**31


def model_at(server: Endpoint, sampling: Sampling, chat: bool = True, parallel: int = 1) -> Model:
    source = Source(base_url=server.url, model="m", concurrency=parallel, timeout_s=30)
    return Model(None, source, chat, sampling)


def test_answers_of_an_endpoint(endpoint, dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    sampling = Sampling(n=2, temperature=0.8, seed=3)
    endpoint.statuses = [503, 429, 500, 206]
    rows = collect(dataset, model_at(endpoint, sampling, parallel=2), tmp_path / "chat")
    asked = [(p["task_id"], k) for p in PROBLEMS for k in range(2)]
    assert [(row["task_id"], row["sample"]) for row in rows] == asked
    assert all("```python" in row["answer"] for row in rows)
    assert len(endpoint.seen) == 6 + 4
    first = endpoint.seen[0]
    assert (first["path"], first["authorization"]) == ("/v1/chat/completions", "Bearer k")
    content = INSTRUCTION.format(prompt=PROBLEMS[0]["prompt"].strip())
    assert [{"role": "user", "content": content}] in [body["messages"] for body in endpoint.seen]
    assert {body["seed"] for body in endpoint.seen} == {row["seed"] for row in rows}
    completions = collect(dataset, model_at(endpoint, Sampling(), chat=False), tmp_path / "completions")
    last = endpoint.seen[-1]
    assert (last["path"], last["stop"][0]) == ("/v1/completions", "\ndef "), "the four likeliest stops"
    assert completions[0]["answer"] == PROBLEMS[0]["canonical_solution"]  # up to the stop string
    assert completions[0]["finish_reason"] == "stop", "which the endpoint did not know"


def test_a_run_continues_where_it_ended(endpoint, dataset, tmp_path):
    def answer(seed=0):
        rows = collect(dataset, model_at(endpoint, Sampling(seed=seed)), tmp_path / "r")
        return [row["task_id"] for row in rows]

    endpoint.statuses = [200, *[503] * 50]
    with pytest.raises(ValueError, match=r"no answer in 6 attempts.*HTTP 503.*run again to continue"):
        answer()
    assert len(read_lines(tmp_path / "r/answers.jsonl")) == 1
    endpoint.statuses, endpoint.seen = [], []
    for _ in range(2):
        assert answer() == [p["task_id"] for p in PROBLEMS]
        assert len(endpoint.seen) == 2
    with pytest.raises(ValueError, match="other settings: seed 0, not 1; choose another --results"):
        answer(seed=1)


def test_a_failure_loses_no_answer_that_arrived(endpoint, dataset, tmp_path, monkeypatch):
    """The first problem fails once the others are answered."""
    model, answered = model_at(endpoint, Sampling(), parallel=2), threading.Semaphore(0)
    give = model.answer

    def answer(prompt, seed, stops):
        if PROBLEMS[0]["prompt"].strip() in prompt:
            for _ in PROBLEMS[1:]:
                answered.acquire()
            raise ValueError("broken")
        answer = give(prompt, seed, stops)
        answered.release()
        return answer

    monkeypatch.setattr(model, "answer", answer)
    with pytest.raises(ValueError, match="broken"):
        collect(dataset, model, tmp_path / "r")
    assert len(read_lines(tmp_path / "r/answers.jsonl")) == len(PROBLEMS) - 1


def test_a_refusal_is_not_asked_again(endpoint):
    for number, status in enumerate((400, 401, 404), 1):
        endpoint.statuses = [status]
        with pytest.raises(ValueError, match=f"refused the request, HTTP {status}"):
            model_at(endpoint, Sampling()).answer(PROBLEMS[0]["prompt"], 0, ())
        assert len(endpoint.seen) == number
    with pytest.raises(ValueError, match=r"must begin with http"):
        Model(None, Source(base_url="localhost:8000"), True, Sampling())


def test_the_engine_answers_chats_and_completes_functions(folder):
    chat = Model(folder, Source(), True, Sampling(temperature=0.9, max_new_tokens=12))
    engine = chat.scorer
    tokenizer, turns = fast_tokenizer(folder), [{"role": "user", "content": "double it"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    new = engine.engine.generate(ids, max_new_tokens=12, temperature=0.9, seed=11)
    text = engine.text_after(ids, [id_ for id_ in new if id_ != 2])
    assert chat.answer("double it", 11, ()) == (text, "stop" if new[-1] == 2 else "length")
    prompt = prompt_of(PROBLEMS[0], chat=False)
    model = Model(folder, Source(), False, Sampling(max_new_tokens=12))
    whole = engine.engine.generate_text(prompt, max_new_tokens=12)
    stop = whole[3:6]
    assert model.answer(prompt, 0, (stop,)) == (whole[: whole.index(stop)], "stop")


def test_a_template_in_the_tokenizers_config_is_one(folder, tmp_path):
    """As older folders have it: a chat model was asked to complete functions, and its record said so."""
    inside, bare = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("hf", "bare"))
    template = (folder / "chat_template.jinja").read_text()
    for each in (inside, bare):
        (each / "chat_template.jinja").unlink()
    config = inside / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    chats = [is_chat("auto", each) for each in (folder, inside, bare, tmp_path, None)]
    assert chats == [True, True, False, False, True]
    with pytest.raises(ValueError, match="has no chat template; use --prompt completion"):
        is_chat("chat", bare)


def test_answers_of_other_weights_are_not_reused(folder, dataset, tmp_path):
    """The same folder in 8 bits, or with a shorter context, answers otherwise."""

    def answer(source):
        model = Model(folder, source, False, Sampling(max_new_tokens=2))
        assert len(collect(dataset, model, tmp_path / "r")) == len(PROBLEMS)

    for _ in range(2):
        answer(Source())
    with pytest.raises(ValueError, match=r"other settings: dtype .*, not 'int8'; choose another --results"):
        answer(Source(dtype="int8"))
    with pytest.raises(ValueError, match="other settings: max_length 512, not 256"):
        answer(Source(max_length=256))
