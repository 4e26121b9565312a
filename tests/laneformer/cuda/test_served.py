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
from typing import Any

import httpx
import pytest
import torch

from laneformer.engine import Engine, device
from laneformer.engine.cuda import decoder as cuda_decoder
from laneformer.serve import app
from laneformer.serve.options import ServerOptions
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses
from tests.laneformer.cuda.harness import random_model, small_config, tensors_of
from tests.laneformer.cuda.stand_ins import passes_of
from tests.laneformer.serve.grammar_assets import EOS, bytes_tokenizer
from tests.laneformer.test_chat_template import SMOLLM2
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]
SIZES = {"vocab_size": 384, "max_position_embeddings": 1024}
CONFIG = small_config(**SIZES)
TENSORS = tensors_of(random_model(CONFIG), "bf16")
TOKENIZER = bytes_tokenizer()


@dataclass
class Served:
    url: str
    engine: Engine

    def complete(self) -> httpx.Response:
        body = {"prompt": [5, 60, 7], "max_tokens": 6}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)


@pytest.fixture(scope="module")
def shared(cuda_builds) -> Iterator[Served]:
    """Passes of three columns, a tokenizer of many pieces and a chat template."""
    given = {
        "eos_ids": [TOKENIZER.token_to_id(name) for name in EOS],
        "tokenizer_config": {"chat_template": SMOLLM2, "eos_token": EOS[1], "bos_token": "<s>"},
    }
    make = lambda *_, **__: EmulatedPasses(cuda_builds, 3, changes=SIZES, sequences=5)  # noqa: E731
    with serving(make, **given) as served:
        yield served


@contextmanager
def serving(passes: Any, **given: Any) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_decoder, "PassDecoder", passes)
        patch.setattr(device, "why_no_cuda", lambda: None)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        with Engine(CONFIG, TENSORS, device="cuda", tokenizer=TOKENIZER, **given) as engine:
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
                yield Served(address[0], engine)
                server.should_exit = True
                thread.join(30)


def test_a_wait_in_vain_ends_all_requests(cuda_builds):
    """Whoever ran or waited gets one sentence, and nobody is served any more."""
    with (
        ThreadPoolExecutor(3) as clients,
        serving(lambda *_, **__: EmulatedPasses(cuda_builds, 3, changes=SIZES)) as failing,
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


def test_schemas_and_forced_tools_beside_others(shared):
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
        answer = httpx.post(f"{shared.url}/v1/chat/completions", json=body, timeout=300)
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
