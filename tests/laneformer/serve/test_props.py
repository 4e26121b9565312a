"""Tests of /props about drafts: a small model and its memory, or the model's own head."""

import dataclasses
import re
from typing import Any

import pytest

from laneformer.cli.options import ModelOptions
from laneformer.engine import Engine
from tests.laneformer.serve.conftest import in_process, serving
from tests.laneformer.serve.endpoint import completions

LIMIT = 2**20  # bytes of the prefix cache


def facts_after_a_completion(engine) -> dict[str, Any]:
    with serving(engine) as client:
        answer = completions(client).post(prompt="Hello", max_tokens=30, ignore_eos=True)
        facts = client.get("/props").json()
        metrics = client.get("/metrics").text
    details = answer["usage"]["completion_tokens_details"]
    drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert f"laneformer_proposed_tokens_total {drafted:.1f}" in metrics
    assert 0 < facts["kv_bytes"] < facts["cache_bytes"] == LIMIT
    for name in ("kv_bytes", "cache_bytes"):
        (value,) = re.findall(rf"^laneformer_{name} (\S+)$", metrics, re.MULTILINE)
        assert float(value) == facts[name]
    return facts | {"drafted": drafted}


def test_a_draft_model_and_its_memory(model_folder):
    options = {"threads": 1, "cache": False, "cache_bytes": LIMIT, "math": "exact"}
    with Engine.from_pretrained(model_folder, draft=model_folder, **options) as engine:
        engine._open().fix_cost(0.001, 0.001)  # type: ignore[attr-defined]
        facts = facts_after_a_completion(engine)
    assert facts["drafted"] > 0
    assert facts["draft_head"] is None
    assert facts["math"] == "exact"
    assert facts["draft_model"]["weight_bytes"] == facts["weight_bytes"]
    assert facts["draft_model"]["kv_bytes"] > 0


def test_the_models_own_head(model_folder):
    with Engine.from_pretrained(model_folder, threads=1, cache=False) as engine:
        config = dataclasses.replace(engine.config, num_nextn_predict_layers=1, draft_vocab_size=64)
        text = {"tokenizer": engine.tokenizer, "tokenizer_config": engine.tokenizer_config}
    with Engine.random(config, threads=1, cache_bytes=LIMIT, **text) as engine:
        engine._open().fix_cost(0.001, 0.001)  # type: ignore[attr-defined]
        facts = facts_after_a_completion(engine)
    assert facts["drafted"] > 0
    assert facts["draft_model"] is None
    assert facts["draft_head"]["ids"] == 64
    assert 0 < facts["draft_head"]["weight_bytes"] < facts["weight_bytes"]


def test_a_slower_link_is_measured_and_changes_no_token(model_folder, engine):
    # 1 ms between two lanes; each token waits for it at least once
    with in_process(model_folder, engine={"threads": 2}, link_us=1000.0) as client:
        link = client.get("/props").json()["link"]
        text = completions(client).choice(prompt=[1, 2, 3], max_tokens=5)["text"]
    assert link["us"] == 1000.0
    assert link["tokens_per_s"] < 1000
    assert text == engine.generate_text([1, 2, 3], max_new_tokens=5)


def test_a_slower_link_needs_lanes_on_several_threads(model_folder):
    with (
        pytest.raises(
            ValueError, match=r"1 threads share every lane of .*; take as many threads as lanes"
        ),
        in_process(model_folder, link_us=5.0),
    ):
        pass


def test_the_command_s_arithmetic_is_the_fast_one_and_said(model_folder):
    flags = {"dtype": "int8", "threads": 1, "cache": False, "cache_bytes": LIMIT}
    with ModelOptions(**flags).load(model_folder) as engine:
        assert facts_after_a_completion(engine)["math"] == "int8"
