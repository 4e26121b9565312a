"""Answers from an endpoint and from the engine."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from evals.code import answers as code_answers
from evals.code.__main__ import is_chat
from evals.code.answers import (
    INSTRUCTION,
    STOPS,
    Model,
    Sampling,
    collect,
    prompt_of,
)
from evals.code.score import open_dataset
from evals.scorer import Source
from evals.scorer import endpoint as endpoint_scorer
from evals.scorer.hf import cut
from tests.evals.code.code_assets import PROBLEMS, write_dataset
from tests.laneformer.engine.assets import random_model, small_config, write_folder


def test_where_a_completion_ends() -> None:
    body = "    return a + b\n"
    assert cut(body + "\nprint(add(1, 2))", STOPS) == body
    assert cut(body, STOPS) == body


@pytest.mark.parametrize(
    "wrong", [{"n": 2}, {"n": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}]
)
def test_sampling_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="temperature"):
        Sampling(**wrong)


def test_every_answer_has_a_seed_of_its_own() -> None:
    sampling = Sampling(n=3, temperature=1.0, seed=5)
    seeds = [
        s.seed_of(f"HumanEval/{i}", k)
        for s in (sampling, Sampling(seed=6))
        for i in range(50)
        for k in range(3)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling.seed_of("HumanEval/7", 1) == Sampling(seed=5).seed_of("HumanEval/7", 1)


class Endpoint(ThreadingHTTPServer):
    """Answers with the reference solution of the asked problem; the next replies can be set to fail."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, Any]] = []
        self.failures: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body | {"path": self.path, "authorization": self.headers["Authorization"]})
        asked = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        (problem,) = [p for p in PROBLEMS if p["prompt"].strip() in asked]
        code = problem["canonical_solution"]
        if "messages" in body:
            text = f"Here it is.\n```python\n{problem['prompt']}{code}```"
            choice: dict[str, Any] = {"message": {"content": text}}
        else:
            choice = {"text": code + "\nprint(1)\n", "finish_reason": "length"}
        status = self.server.failures.pop(0) if self.server.failures else 200
        reply = json.dumps(
            {"choices": [{"finish_reason": "stop", **choice}]} if status == 200 else {"error": "no"}
        )
        self.send_response(status)
        self.send_header(
            "Content-Length", str(len(reply) + (status == 206))
        )  # 206: the connection breaks off
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_scorer, "FIRST_WAIT_S", 0.0)


def ask(server: Endpoint, sampling: Sampling, chat: bool = True, parallel: int = 1) -> Model:
    return Model(
        None, Source(base_url=server.url, model="m", concurrency=parallel, timeout_s=30), chat, sampling
    )


def test_answers_of_an_endpoint(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    dataset = open_dataset(write_dataset(tmp_path / "d.jsonl"))
    sampling = Sampling(n=2, temperature=0.8, seed=3)
    endpoint.failures = [503, 429, 500, 206]
    rows = collect(dataset, ask(endpoint, sampling, parallel=2), tmp_path / "chat")
    assert [(r["task_id"], r["sample"]) for r in rows] == [
        (p["task_id"], k) for p in PROBLEMS for k in range(2)
    ]
    assert all("```python" in r["answer"] for r in rows)
    assert len(endpoint.seen) == 6 + 4
    first = endpoint.seen[0]
    assert first["path"] == "/v1/chat/completions"
    assert first["authorization"] == "Bearer k"
    assert first["messages"] == [
        {"role": "user", "content": INSTRUCTION.format(prompt=PROBLEMS[0]["prompt"].strip())}
    ]
    assert {body["seed"] for body in endpoint.seen} == {r["seed"] for r in rows}
    completions = collect(dataset, ask(endpoint, Sampling(), False), tmp_path / "completions")
    assert endpoint.seen[-1]["path"] == "/v1/completions"
    assert completions[0]["answer"] == PROBLEMS[0]["canonical_solution"]  # up to the stop string
    assert completions[0]["finish_reason"] == "stop", "which the endpoint did not know"
    assert endpoint.seen[-1]["stop"][0] == "\ndef ", "of the eight the four likeliest"


def test_a_run_continues_where_it_ended(endpoint: Endpoint, tmp_path: Path) -> None:
    dataset, sampling = open_dataset(write_dataset(tmp_path / "d.jsonl")), Sampling()
    endpoint.failures = [200, *[503] * 50]
    with pytest.raises(ValueError, match=r"no answer in 6 attempts.*HTTP 503.*run again to continue"):
        collect(dataset, ask(endpoint, sampling), tmp_path / "r")
    path = tmp_path / "r/answers.jsonl"
    kept = path.read_text()
    assert len(kept.splitlines()) == 1
    path.write_text(kept + '{"task_id": "HumanEval/901", "sam')  # as a crash leaves it
    endpoint.failures, endpoint.seen = [], []
    rows = collect(dataset, ask(endpoint, sampling), tmp_path / "r")
    assert [r["task_id"] for r in rows] == [p["task_id"] for p in PROBLEMS]
    assert len(endpoint.seen) == 2
    assert path.read_text().startswith(kept)
    collect(dataset, ask(endpoint, sampling), tmp_path / "r")
    assert len(endpoint.seen) == 2
    other = Sampling(seed=1)
    with pytest.raises(ValueError, match="other settings: seed 0, not 1; choose another --results"):
        collect(dataset, ask(endpoint, other), tmp_path / "r")


def test_a_failure_loses_no_answer_that_arrived(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is seen first, although an answer arrived before it."""
    monkeypatch.setattr(code_answers, "as_completed", lambda asked: sorted(wait(asked).done, key=answered))
    dataset, sampling = open_dataset(write_dataset(tmp_path / "d.jsonl")), Sampling()
    endpoint.failures = [200, *[400] * 50]
    with pytest.raises(ValueError, match="refused the request"):
        collect(dataset, ask(endpoint, sampling), tmp_path / "r")
    assert len((tmp_path / "r/answers.jsonl").read_text().splitlines()) == 1


def answered(future: Future[Any]) -> bool:
    return future.exception() is None


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_not_asked_again(endpoint: Endpoint, tmp_path: Path, status: int) -> None:
    endpoint.failures = [status]
    with pytest.raises(ValueError, match=f"refused the request, HTTP {status}"):
        ask(endpoint, Sampling()).answer(PROBLEMS[0]["prompt"], 0, ())
    assert len(endpoint.seen) == 1


def test_a_base_url_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"must begin with http"):
        Model(None, Source(base_url="localhost:8000"), True, Sampling())


@pytest.fixture(scope="module")
def model_folder(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from laneformer.hf.tokenizer import write_tokenizer

    config = small_config(vocab_size=512, max_position_embeddings=512)
    folder = write_folder(tmp_path_factory.mktemp("hf"), random_model(config), eos_token_id=2)
    write_tokenizer(prepared_data / "tokenizer.model", folder, 512)
    return folder


def test_the_engine_answers_a_chat_as_its_template_says(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    from laneformer import Engine

    sampling = Sampling(temperature=0.9, max_new_tokens=12)
    answer, finish = Model(model_folder, Source(), True, sampling).answer("double it", 11, ())
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    turns = [{"role": "user", "content": "double it"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    with Engine.from_pretrained(model_folder) as engine:
        made = engine.generate(ids, max_new_tokens=12, temperature=0.9, seed=11)
    assert answer.strip() == tokenizer.decode(made, skip_special_tokens=True).strip()
    assert finish == ("stop" if made[-1] == 2 else "length")


def test_a_template_in_the_tokenizers_config_is_one(model_folder: Path, tmp_path: Path) -> None:
    """As older folders have it: a chat model was asked to complete functions, and its record said so."""
    folder, bare = (shutil.copytree(model_folder, tmp_path / name) for name in ("hf", "bare"))
    for each in (folder, bare):
        template = (each / "chat_template.jinja").read_text()
        (each / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    found = [is_chat("auto", each) for each in (model_folder, folder, bare, tmp_path, None)]
    assert found == [True, True, False, False, True]
    with pytest.raises(ValueError, match="has no chat template; use --prompt completion"):
        is_chat("chat", bare)


def test_answers_of_other_weights_are_not_reused(model_folder: Path, tmp_path: Path) -> None:
    """The same folder in 8 bits, or a shorter context, answers otherwise; its record once
    had the first's score.
    """
    dataset, sampling = open_dataset(write_dataset(tmp_path / "d.jsonl")), Sampling(max_new_tokens=2)

    def answers(source: Source) -> int:
        return len(collect(dataset, Model(model_folder, source, False, sampling), tmp_path / "r"))

    assert answers(Source()) == answers(Source()) == len(PROBLEMS)
    with pytest.raises(ValueError, match=r"other settings: dtype .*, not 'int8'; choose another --results"):
        answers(Source(dtype="int8"))
    with pytest.raises(ValueError, match="other settings: max_length 512, not 256"):
        answers(Source(max_length=256))


def test_the_engine_completes_a_function(model_folder: Path) -> None:
    from laneformer import Engine

    prompt = prompt_of(PROBLEMS[0], chat=False)
    model = Model(model_folder, Source(), False, Sampling(max_new_tokens=12))
    whole, finish = model.answer(prompt, 0, ())
    with Engine.from_pretrained(model_folder) as engine:
        assert whole == engine.generate_text(prompt, max_new_tokens=12)
    assert finish == "length"
    stop = whole[3:6]
    assert model.answer(prompt, 0, (stop,)) == (whole[: whole.index(stop)], "stop")
    with pytest.raises(ValueError, match="leaves no room"):
        model.answer("x " * 2000, 0, ())
