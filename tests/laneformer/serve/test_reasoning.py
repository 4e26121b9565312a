"""What stands between <think> and </think> in every API, and how long it may be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tokenizers import Tokenizer

from laneformer.engine import Engine
from laneformer.serve.app import create_app
from laneformer.serve.options import ServerOptions
from laneformer.serve.reasoning import ENDING

HELLO = [{"role": "user", "content": "Hello"}]
BUDGET, TOKENS = 6, 40


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template opens the reasoning, which it would not end by itself."""
    found = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(model_folder, found)
    config = json.loads((found / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if enable_thinking is not defined %}{{ '<think>\n' }}{% endif %}"
    (found / "tokenizer_config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def ending(folder: Path) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(ENDING, add_special_tokens=False).ids


@pytest.fixture(scope="module", params=[-1, BUDGET], ids=["no default", "the server's default"])
def client(folder: Path, request: pytest.FixtureRequest) -> Iterator[TestClient]:
    options = ServerOptions(model="tiny", api_key=None, reasoning_budget=request.param)
    with (
        Engine.from_pretrained(folder, threads=1, cache=False) as engine,
        TestClient(create_app(engine, options), "http://localhost") as client,
    ):
        client.headers["x-default"] = str(request.param)  # for the test: what the server was told
        yield client


def choice(client: TestClient, **body: Any) -> dict[str, Any]:
    fixed = {"messages": HELLO, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json=fixed | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def test_a_reasoning_ends_where_its_budget_does(client: TestClient, ending: list[int]) -> None:
    free = choice(client, reasoning_budget=-1)
    assert free["message"]["content"] == ""
    for tokens in (0, 1, BUDGET):
        found = choice(client, reasoning_budget=tokens)
        assert found["token_ids"][:tokens] == free["token_ids"][:tokens], "it thinks as without"
        assert found["token_ids"][tokens : tokens + len(ending)] == ending
        assert found["message"]["content"]
        assert bool(found["message"].get("reasoning_content", "")) == (tokens > 0)
    assert len(found["token_ids"]) == TOKENS, "the answer goes on"
    same = choice(client, thinking_token_budget=BUDGET)
    assert same["token_ids"] == found["token_ids"], "vLLM's name"
    not_asked = choice(client)
    limited = client.headers["x-default"] != "-1"
    assert not_asked["token_ids"] == (found if limited else free)["token_ids"]


def test_an_answer_without_reasoning_has_no_budget(client: TestClient) -> None:
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    assert choice(client, **quiet, reasoning_budget=1) | {"message": 0} == choice(client, **quiet) | {
        "message": 0
    }


def test_anthropics_budget(client: TestClient) -> None:
    body = {"messages": HELLO, "max_tokens": TOKENS, "thinking": {"type": "enabled", "budget_tokens": BUDGET}}
    answer = client.post("/v1/messages", json=body).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
