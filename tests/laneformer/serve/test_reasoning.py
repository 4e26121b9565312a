"""Tests of the text between <think> and </think>, and of its length limit."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from laneformer.serve.conversation import ENDING
from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import Endpoint

HELLO = [{"role": "user", "content": "Hello"}]
BUDGET = 6
TOKENS = 40


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    """Return a model whose template opens the reasoning."""
    # the model would not end it by itself
    folder = Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("thinking") / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if enable_thinking is not defined %}{{ '<think>\n' }}{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def client(folder):
    with in_process(folder) as client:
        yield client


def thinking(client) -> Endpoint:
    fields = {"messages": HELLO, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    return Endpoint(client, "/v1/chat/completions", **fields)


def test_a_reasoning_ends_where_its_budget_does(client, folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ending = tokenizer.encode(ENDING, add_special_tokens=False).ids
    api = thinking(client)
    free = api.choice(reasoning_budget=-1)
    assert free["message"]["content"] == ""
    for tokens in (0, 1, BUDGET):
        limited = api.choice(reasoning_budget=tokens)
        ids = limited["token_ids"]
        assert ids[:tokens] == free["token_ids"][:tokens], "it thinks as without"
        assert ids[tokens : tokens + len(ending)] == ending
        assert limited["message"]["content"]
        assert bool(limited["message"].get("reasoning_content", "")) == (tokens > 0)
    assert len(ids) == TOKENS, "the answer goes on"
    assert api.choice(thinking_token_budget=BUDGET)["token_ids"] == ids, "vLLM's name"
    assert api.choice()["token_ids"] == free["token_ids"]
    with in_process(folder, reasoning_budget=BUDGET) as server_with_a_default:
        assert thinking(server_with_a_default).choice()["token_ids"] == ids
        unlimited = thinking(server_with_a_default).choice(reasoning_budget=-1)
        assert unlimited["token_ids"] == free["token_ids"]


def test_an_answer_without_reasoning_has_no_budget(client):
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    limited, free = (
        thinking(client).choice(**quiet, **fields) for fields in ({"reasoning_budget": 1}, {})
    )
    assert limited == free
