"""Mixtures of experts: columns that share a pass, quantised weights, ties, and what a token reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from laneformer import Engine, Laneformer
from laneformer.config import LaneformerConfig
from laneformer.engine import bench
from laneformer.engine.cpu import packed
from laneformer.engine.folder import read_checkpoint
from laneformer.experts import LaneExperts
from laneformer.variant import Experts
from tests.laneformer.llama.folders import (
    CASES,
    EXPERTS,
    logits_of,
    reference,
    relative_error,
    write_folder,
)
from tests.laneformer.llama.gguf_assets import byte_level, random_llama, tokenizer_metadata, write_gguf
from tools.check.reference import weights_of

IDS = np.random.default_rng(0).integers(0, 128, 100).tolist()
ALLOWED = 1e-5  # see test_families.py; another expert, or other weights, change a tenth of the logits
DTYPES = ("bf16", "int8", "int4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(CASES["qwen3-moe"], tmp_path_factory.mktemp("experts"))


def changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the folder with other tensors."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def plain(folder: Path, lanes: int = 1) -> Laneformer:
    checkpoint = read_checkpoint(folder, lanes)
    with torch.device("meta"):
        model = Laneformer(checkpoint.config).eval()
    weights = weights_of(checkpoint.tensors)
    model.load_state_dict({name: w.float() for name, w in weights.items()}, assign=True)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("threads", "lanes"), [(1, 1), (3, 1), (2, 2)])
def test_a_column_is_what_it_is_alone(folder: Path, dtype: str, threads: int, lanes: int) -> None:
    """In passes of any number of columns, in batches, as drafts: the bits of a pass of its own."""
    options = {"threads": threads, "lanes": lanes, "dtype": dtype, "cache": False}
    with Engine.from_pretrained(folder, **options) as engine:
        every = engine.logits(IDS)
        for count in (1, 2, 5, 17, 64):
            assert np.array_equal(engine.logits(IDS[:count]), every[:count])
        prompts = [IDS[:1], IDS[3:20], IDS[40:90]]
        alone = [
            engine.generate(prompt, max_new_tokens=20, reuse_prefix=False, speculate=0) for prompt in prompts
        ]
        assert engine.generate_batch(prompts, max_new_tokens=20) == alone
        assert engine.generate(prompts[1], max_new_tokens=20, speculate=7) == alone[1]
        followed = engine.logits([*prompts[2], *alone[2]]).argmax(-1)
        assert followed[len(prompts[2]) - 1 : -1].tolist() == alone[2]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_experts_are_quantised_as_other_matrices_are(folder: Path, dtype: str) -> None:
    exact = logits_of(reference(folder), IDS)
    found = []
    for threads in (1, 2, 5):
        with Engine.from_pretrained(folder, dtype=dtype, threads=threads, lanes=1, cache=False) as engine:
            found.append(engine.logits(IDS))
            assert np.array_equal(found[0], found[-1])
    error = np.abs(found[0] - exact).mean() / exact.std()
    assert error < {"int8": 0.05, "int4": 0.2}[dtype]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_a_file_s_blocks_are_served_as_they_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wide = {"hidden_size": 256, "moe_intermediate_size": 512, "head_dim": 64}
    model = random_llama("qwen3moe", **{**EXPERTS, **wide}, norm_topk_prob=True)
    metadata = tokenizer_metadata(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt-2")
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", model, kind, metadata)
    options: dict[str, Any] = {"cache": False, "lanes": 1}
    with Engine.from_pretrained(path, dtype="fp32", **options) as engine:
        exact = engine.logits(IDS)
    found = []
    for threads in (1, 3):
        with Engine.from_pretrained(path, threads=threads, **options) as engine:
            assert engine.dtype == "gguf"
            found.append(engine.logits(IDS))
    assert np.array_equal(*found)
    assert np.abs(found[0] - exact).mean() / exact.std() < 0.06  # inputs are rounded to int8


def test_equal_scores_go_to_the_first_experts(folder: Path, tmp_path: Path) -> None:
    def blind(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.endswith("mlp.gate.weight"):
                weights[name].zero_()

    path = changed(folder, tmp_path, blind)
    expected = logits_of(plain(path), IDS)
    with Engine.from_pretrained(path, cache=False, kv_dtype="fp32", threads=2) as engine:
        assert relative_error(engine.logits(IDS), expected) < ALLOWED
    layer = plain(path).layers[0].feed_forward
    assert isinstance(layer, LaneExperts)
    assert layer.route(torch.ones(1, 1, 1, 64)).nonzero()[:, -1].tolist() == [0, 1]


def test_other_experts_and_other_weights_are_seen(folder: Path, tmp_path: Path) -> None:
    """What the comparison with Transformers would find: two experts exchanged, weights as they come."""
    truth = logits_of(reference(folder), IDS)

    def exchange(weights: dict[str, torch.Tensor]) -> None:
        first, second = (f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in (0, 1))
        weights[first], weights[second] = weights[second].clone(), weights[first].clone()

    def odds(values: dict[str, Any]) -> dict[str, Any]:
        return values | {"norm_topk_prob": False}

    path = changed(folder, tmp_path, exchange)
    with Engine.from_pretrained(path, cache=False, kv_dtype="fp32") as engine:
        assert relative_error(engine.logits(IDS), truth) > 0.01
    path = changed(folder, tmp_path, lambda weights: None)
    (path / "config.json").write_text(json.dumps(odds(json.loads((path / "config.json").read_text()))))
    with Engine.from_pretrained(path, cache=False, kv_dtype="fp32") as engine:
        assert relative_error(engine.logits(IDS), truth) > 0.01


def test_a_token_reads_the_experts_that_it_takes(folder: Path) -> None:
    """The tapes hold all of them; figures count bytes that are read."""
    with Engine.from_pretrained(folder, dtype="fp32", threads=1, cache=False) as engine:
        decoder, config = engine._decoder, engine.config
        held = len(decoder.part(0))
        expert = 4 * (2 * 48 * 64 + 64 * 40)  # of 40 gates and 40 ups each begins at a multiple of 16 rows
        resting = config.num_hidden_layers * (config.variant.experts.total - config.variant.experts.active)
        assert held - engine.weight_bytes == resting * expert
        figures = bench.prompt_speed(engine, 16)
        taken = 3 * config.hidden_size * config.intermediate_size * config.variant.experts.active
        attention = (
            2 * config.query_size + 2 * config.head_dim * config.num_key_value_heads
        ) * config.hidden_size
        products = config.num_hidden_layers * (taken + attention)
        share = figures["percent_of_product_probe"] / figures["prefill_tokens_per_s"]
        assert share == pytest.approx(100 * products / figures["probe_products_per_s"], rel=0.5)


def test_packed_experts_are_mapped_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the copy is larger than the memory."""
    path = write_folder(CASES["qwen3-moe-odds"], tmp_path)
    found = []
    for memory in (None, 1 << 40, 1):
        monkeypatch.setattr(packed, "memory_bytes", lambda memory=memory: memory)
        with Engine.from_pretrained(path, threads=2) as engine:
            found.append(engine.logits(IDS))
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert [kept.suffix for kept in (path / ".packed").iterdir()].count(".bin") == 1


@pytest.mark.rotate
def test_processes_share_experts(folder: Path) -> None:
    with Engine.from_pretrained(folder, threads=2, lanes=2, cache=False) as engine:
        expected = engine.logits(IDS)
    with Engine.from_pretrained(folder, threads=4, lanes=2, processes=2, cache=False) as engine:
        assert np.array_equal(engine.logits(IDS), expected)


def test_a_missing_or_other_expert_is_named(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    path = changed(folder, tmp_path, lambda weights: weights.__delitem__(name))
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.experts\.up_proj\.weight: the experts \[3\] are miss"
    ):
        read_checkpoint(path)

    def widen(weights: dict[str, torch.Tensor]) -> None:
        weights[name] = weights[name].float()

    path = changed(folder, tmp_path, widen)
    with pytest.raises(ValueError, match=r"experts differ, such as \('bf16', .* and \('fp32'"):
        read_checkpoint(path)


def test_a_router_of_another_type_is_taken(folder: Path, tmp_path: Path) -> None:
    """Some folders keep it in float32."""

    def widen(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.endswith("mlp.gate.weight"):
                weights[name] = weights[name].float()

    with Engine.from_pretrained(folder, cache=False, threads=1) as engine:
        expected = engine.logits(IDS)
    with Engine.from_pretrained(changed(folder, tmp_path, widen), cache=False, threads=1) as engine:
        assert np.array_equal(engine.logits(IDS), expected)


def test_lanes_wait_for_each_other() -> None:
    config = LaneformerConfig.from_flavor("tiny", broadcast_delay=0, variant={"experts": [8, 2]})
    assert config.variant.experts == Experts(8, 2, True)
    assert config.tensor_shapes()["layers.0.feed_forward.w2.weight"] == (8, 4, 128, 128)
    with pytest.raises(ValueError, match="experts need broadcast_delay = 0"):
        dataclasses.replace(config, broadcast_delay=2)
