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
from typing import Any

import httpx
import pytest

from laneformer.engine import Engine
from laneformer.serve import app
from laneformer.serve.options import ServerOptions
from tests.laneformer.cuda.emulated import emulated_engine, needs_emulator
from tests.laneformer.cuda.harness import random_model, small_config, tensors_of
from tests.laneformer.cuda.stand_ins import passes_of
from tests.laneformer.serve.grammar_assets import EOS, bytes_tokenizer
from tests.laneformer.test_chat_template import SMOLLM2
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = [pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES), needs_emulator]
CONFIG = small_config(vocab_size=384, max_position_embeddings=1024)
TENSORS = tensors_of(random_model(CONFIG), "bf16")
TOKENIZER = bytes_tokenizer()


@dataclass
class Served:
    url: str
    engine: Engine

    def complete(self) -> httpx.Response:
        body = {"prompt": [5, 60, 7], "max_tokens": 6}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)


@contextmanager
def serving(builds: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Iterator[Served]:
    """Passes of three columns."""
    emulated_engine(monkeypatch, builds, sequences=5)
    with Engine(CONFIG, TENSORS, device="cuda", tokenizer=TOKENIZER, **given) as engine:
        options = ServerOptions("tiny", port=0, max_waiting=4)
        address, ready = list[str](), threading.Event()
        served = app.create_app(engine, options)
        server = app.Server(served, options, lambda url: (address.append(url), ready.set()))
        with options.listen() as listening:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            assert ready.wait(30)
            yield Served(address[0], engine)
            server.should_exit = True
            thread.join(30)


def test_a_wait_in_vain_ends_all_requests(cuda_builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran or waited gets one sentence, and nobody is served any more."""
    with ThreadPoolExecutor(3) as clients, serving(cuda_builds, monkeypatch) as failing:
        hangs = passes_of(failing.engine)
        hangs.missing_blocks, hangs.limit_s = 1, 0.05
        answers = list(clients.map(lambda _: failing.complete(), range(3)))
        health = httpx.get(f"{failing.url}/health")
        later = failing.complete()
    assert {answer.status_code for answer in answers} == {500}
    for answer in answers:
        assert "the pass kernel waited 0.05 s in vain: lane" in answer.json()["error"]["message"]
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert later.status_code >= 500
    assert "has failed" in later.json()["error"]["message"]


PROPERTIES = {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}}
SCHEMA = {
    "type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False,
}  # fmt: skip
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}
ASKED: list[dict[str, Any]] = [
    {"response_format": AS_SCHEMA},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "forecast"}}},
    {"max_tokens": 20, "ignore_eos": True},
    {"response_format": AS_SCHEMA, "temperature": 1.0, "seed": 4, "repetition_penalty": 1.2},
]


def test_schemas_and_forced_tools_beside_others(cuda_builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has the form that was asked for, as alone."""
    pytest.importorskip("llguidance")
    given = {
        "eos_ids": [TOKENIZER.token_to_id(name) for name in EOS],
        "tokenizer_config": {"chat_template": SMOLLM2, "eos_token": EOS[1], "bos_token": "<s>"},
    }

    def ask(fields: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Hello"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 200, **fields}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        for call in message.get("tool_calls") or ():
            call.pop("id")
        return message

    with serving(cuda_builds, monkeypatch, **given) as served, ThreadPoolExecutor(4) as clients:
        alone = [ask(fields) for fields in ASKED]
        assert list(clients.map(ask, ASKED)) == alone
    call = alone[1]["tool_calls"][0]["function"]
    for text in (alone[0]["content"], call["arguments"], alone[3]["content"]):
        assert set(json.loads(text)) == {"city", "days"}
