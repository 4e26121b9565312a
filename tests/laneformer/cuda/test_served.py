"""A server over the CUDA engine: real HTTP requests to the app, the scheduler, and
CudaDecoder on emulated kernels.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine import Engine, device
from laneformer.engine.cuda import decoder as cuda_decoder
from laneformer.engine.cuda.launch import NotResident
from laneformer.serve import app
from laneformer.serve.options import ServerOptions
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses
from tests.laneformer.cuda.harness import random_model, small_config, tensors_of
from tests.laneformer.cuda.stand_ins import passes_of
from tests.laneformer.engine.assets import byte_tokenizer
from tests.laneformer.serve.grammar_assets import EOS, bytes_tokenizer
from tests.laneformer.test_chat_template import SMOLLM2
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]
CONFIG = small_config()
TENSORS = tensors_of(random_model(CONFIG), "bf16")
PROMPT = [5, 60, 7]
LONG_PROMPT = [(5 * i + 1) % 96 for i in range(15)]


@dataclass
class Served:
    url: str
    engine: Engine
    expected: list[int]  # greedy tokens after PROMPT

    def complete(self, prompt: list[int] | str = PROMPT, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)

    def tokens(self) -> list[int]:
        return self.complete().json()["choices"][0]["token_ids"]


def graph_after(builds: Path, refused: str) -> Any:
    """In the place of PassDecoder: the kernel of passes cannot run, and the graph version takes its place."""

    def make(config: LaneformerConfig, *_: Any, version: str = "passes", **__: Any) -> EmulatedPasses:
        if version == "passes":
            raise NotResident(refused)
        return EmulatedPasses(builds, 1, config=config, version=version, sequences=3)

    return make


@pytest.fixture(scope="module")
def served(cuda_builds) -> Iterator[Served]:
    """One request at a time: the graph, as others have the GPU's multiprocessors."""
    with (
        pytest.warns(UserWarning, match="the graph version decodes, one request at a time.*32 blocks"),
        serving(graph_after(cuda_builds, "32 blocks")) as served,
    ):
        yield served


@pytest.fixture(scope="module")
def shared(cuda_builds) -> Iterator[Served]:
    """Passes of three columns."""
    with serving(lambda *_, **__: EmulatedPasses(cuda_builds, 3, sequences=5)) as served:
        yield served


@contextmanager
def serving(passes: Any, config: LaneformerConfig = CONFIG, **given: Any) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_decoder, "PassDecoder", passes)
        patch.setattr(device, "why_no_cuda", lambda: None)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        tensors = TENSORS if config is CONFIG else tensors_of(random_model(config), "bf16")
        given = {"tokenizer": byte_tokenizer(), **given}
        with Engine(config, tensors, device="cuda", **given) as engine:
            expected = engine.generate(PROMPT, max_new_tokens=6, reuse_prefix=False)
            options = ServerOptions("tiny", port=0, max_waiting=4)
            address: list[str] = []
            ready = threading.Event()
            server = app.Server(
                app.create_app(engine, options), options, lambda url: (address.append(url), ready.set())
            )
            with options.listen() as listening:
                thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
                thread.start()
                assert ready.wait(30)
                yield Served(address[0], engine, expected)
                server.should_exit = True
                thread.join(30)


def test_an_answer_and_its_usage(served):
    answer = served.complete().json()
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == (served.expected, "length")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 6)
    longer = served.complete([*PROMPT, *served.expected], max_tokens=1).json()
    assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


def test_a_stream_ends_at_a_stop_id(served):
    last = next(i for i in range(2, 6) if served.expected[i] not in served.expected[:i])
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True, "return_token_ids": True}
    body["stop_token_ids"] = [served.expected[last]]
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=300) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [i for choice in choices for i in choice["token_ids"] or ()] == served.expected[: last + 1]
    assert choices[-1]["finish_reason"] == "stop"


def test_requests_wait_for_each_other(served):
    with ThreadPoolExecutor() as clients:
        assert list(clients.map(lambda _: served.tokens(), range(2))) == [served.expected] * 2
    assert len(served.complete(n=2, max_tokens=2).json()["choices"]) == 2


@pytest.mark.parametrize(
    ("name", "most", "says"),
    [("served", 1, "one request decodes at a time"), ("shared", 3, "up to 3 requests decode")],
)
def test_what_it_can_is_said(name, most, says, request, monkeypatch, capsys):
    served = request.getfixturevalue(name)
    facts = httpx.get(f"{served.url}/props").json()
    assert (facts["max_joined"], facts["isa"]) == (most, "cuda")
    state = SimpleNamespace(scheduler=SimpleNamespace(max_joined=most, unanswered=False))
    monkeypatch.setattr(app, "create_app", lambda *_: SimpleNamespace(state=state))
    monkeypatch.setattr(app, "Server", lambda *_: SimpleNamespace(run=lambda sockets: None))
    app.run(served.engine, ServerOptions("tiny", port=0))
    said = capsys.readouterr().err
    assert says in said


def test_a_client_that_goes_away_ends_its_request(served):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 25}, timeout=0.3)
    assert served.tokens() == served.expected
    ended = httpx.get(f"{served.url}/metrics").text
    assert 'laneformer_ended_total{reason="cancelled"} 1.0' in ended


def test_a_prompt_too_large_for_the_memory_ends_the_request(served, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(passes_of(served.engine), "read", full)
    response = served.complete(LONG_PROMPT)
    assert (response.status_code, "no memory for this request" in response.text) == (500, True)
    monkeypatch.undo()
    assert served.tokens() == served.expected


# ---- requests that share passes ----


REQUESTS: list[dict[str, Any]] = [  # six at a time, each with options of its own
    {"prompt": PROMPT},
    {"prompt": [7, 7, 9, 7, 7], "speculate": 2, "max_tokens": 9},
    {"prompt": LONG_PROMPT, "temperature": 1.2, "seed": 5},
    {"prompt": [3], "temperature": 0.9, "top_p": 0.8, "seed": 6, "max_tokens": 4},
    {"prompt": PROMPT, "repetition_penalty": 1.4, "logit_bias": {"7": 2.0}, "max_tokens": 8},
    {"prompt": [9, 8], "logprobs": 2, "min_tokens": 5},
]


def test_each_gets_what_it_gets_alone(shared):
    """With several in a pass, prompts are read beside the others' tokens."""
    alone = [shared.complete(**request).json()["choices"][0] for request in REQUESTS]
    passes = passes_of(shared.engine)
    before = passes.passes
    with ThreadPoolExecutor(6) as clients:
        together = list(clients.map(lambda r: shared.complete(**r).json(), REQUESTS))
    needed = sum(answer["usage"]["completion_tokens"] for answer in together)
    assert [answer["choices"][0] for answer in together] == alone
    assert passes.passes - before < needed, "passes are shared"
    assert alone[0]["token_ids"] == shared.expected


def test_one_leaves_and_the_others_go_on(shared):
    with ThreadPoolExecutor(2) as clients:
        other = clients.submit(shared.complete, max_tokens=20)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{shared.url}/v1/completions", json={"prompt": [4, 5], "max_tokens": 27}, timeout=0.3)
        assert other.result().json()["choices"][0]["token_ids"][:6] == shared.expected
    assert shared.tokens() == shared.expected
    assert 'laneformer_ended_total{reason="cancelled"} 1.0' in httpx.get(f"{shared.url}/metrics").text


def test_a_wait_in_vain_ends_all_requests(cuda_builds):
    """Whoever ran or waited gets one sentence, and nobody is served any more."""
    with (
        ThreadPoolExecutor(3) as clients,
        serving(lambda *_, **__: EmulatedPasses(cuda_builds, 3)) as failing,
    ):
        hangs = passes_of(failing.engine)
        hangs.missing_blocks, hangs.limit_s = 1, 0.05
        answers = list(clients.map(lambda _: failing.complete(), range(3)))
        health = httpx.get(f"{failing.url}/health")
        later = failing.complete()
    said = {answer.json()["error"]["message"] for answer in answers}
    assert {answer.status_code for answer in answers} == {500}
    assert all("the pass kernel waited 0.05 s in vain: lane" in text for text in said)
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert later.status_code >= 500
    assert "has failed" in later.json()["error"]["message"]


# ---- grammars ----


@pytest.fixture(scope="module")
def grammatical(cuda_builds) -> Iterator[Served]:
    """Passes of three columns, a tokenizer of many pieces and a chat template."""
    sizes = {"vocab_size": 384, "max_position_embeddings": 1024}
    tokenizer = bytes_tokenizer()
    given = {
        "tokenizer": tokenizer,
        "eos_ids": [tokenizer.token_to_id(name) for name in EOS],
        "tokenizer_config": {"chat_template": SMOLLM2, "eos_token": EOS[1], "bos_token": "<s>"},
    }
    passes = lambda *_, **__: EmulatedPasses(cuda_builds, 3, changes=sizes, sequences=5)  # noqa: E731
    with serving(passes, small_config(**sizes), **given) as served:
        yield served


def test_schemas_and_forced_tools_beside_others(grammatical):
    """Each answer has the form that was asked for, as alone."""
    pytest.importorskip("llguidance")
    properties = {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "forecast", "parameters": schema}}
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "forecast"}}},
        {"max_tokens": 20, "ignore_eos": True},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}},
         "temperature": 1.0, "seed": 4, "repetition_penalty": 1.2},
    ]  # fmt: skip

    def ask(fields: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Hello"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 200, **fields}
        answer = httpx.post(f"{grammatical.url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        for call in message.get("tool_calls") or ():
            call.pop("id")
        return message

    alone = [ask(fields) for fields in asked]
    for text in (
        alone[0]["content"],
        alone[1]["tool_calls"][0]["function"]["arguments"],
        alone[3]["content"],
    ):
        assert set(json.loads(text)) == {"city", "days"}
    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, asked)) == alone
