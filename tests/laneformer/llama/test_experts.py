"""Tests of the mixtures of experts of Qwen3-MoE and gpt-oss: passes, quantised weights, MXFP4 and refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from laneformer import Engine
from laneformer.engine.cpu import packed
from laneformer.engine.folder import read_checkpoint
from laneformer.llama.config import lanes_for
from laneformer.llama.layers import LaneExperts
from laneformer.llama.variant import Experts, FamilyConfig
from tests.laneformer.engine.assets import (
    exact_blocks,  # noqa: F401
    generate_together,
)
from tests.laneformer.llama.folders import (
    ALLOWED,
    CASES,
    IDS,
    change_tensors,
    engine_logits,
    logits_of,
    plain_model,
    reference,
    relative_error,
    write_folder,
)

MXFP4 = GGMLQuantizationType.MXFP4
ROUNDED = 0.06  # of the logits' spread: inputs are rounded to int8
SEEN = 0.01  # what another expert, another weight or a missing bias changes at least
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(CASES["qwen3-moe"], tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return write_folder(CASES["gpt-oss"], tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def blocks(gpt_oss, tmp_path_factory):
    """Return a folder with experts in MXFP4, as OpenAI's, and one with the same numbers in bf16."""
    paths = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("bf16")
    stored = load_file(gpt_oss / "model.safetensors")
    wide = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = np.ascontiguousarray(stored.pop(name).float().swapaxes(1, 2).numpy())
        packed_rows = quantize(rows, MXFP4).reshape(*rows.shape[:2], -1, 17)
        values = dequantize(packed_rows.reshape(*rows.shape[:2], -1), MXFP4)
        nibbles = np.concatenate((packed_rows[..., 1:] & 15, packed_rows[..., 1:] >> 4), -1)
        stored[f"{name}_blocks"] = torch.from_numpy(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)
        stored[f"{name}_scales"] = torch.from_numpy(np.ascontiguousarray(packed_rows[..., 0]))
        wide[name] = torch.from_numpy(values).swapaxes(1, 2).contiguous().bfloat16()
        assert np.array_equal(wide[name].float().swapaxes(1, 2).numpy(), values)
    config = json.loads((gpt_oss / "config.json").read_text())
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    for path, tensors, extra in zip(
        paths, (stored, wide), ({"quantization_config": quantization}, {}), strict=True
    ):
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps({**config, **extra}))
    return paths


def replace_tensors(
    suffix: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Weights], None]:
    return lambda weights: weights.update(
        {name: change(weight) for name, weight in weights.items() if name.endswith(suffix)}
    )


def mean_error(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(logits - exact).mean() / exact.std())


@pytest.mark.parametrize("kind", ["bf16", "int4", "gpt-oss in MXFP4"])
def test_a_column_is_what_it_is_alone(folder, blocks, kind):
    # equal bits in passes of any number of columns, in batches and as drafts; close to
    # Transformers, quantised as other matrices are
    path, dtype = (blocks[0], "auto") if kind.startswith("gpt-oss") else (folder, kind)
    exact = logits_of(reference(blocks[1] if path == blocks[0] else folder))
    for threads, lanes in ((3, 1), (2, 2)):
        with Engine.from_pretrained(
            path, threads=threads, lanes=lanes, dtype=dtype, cache=False
        ) as engine:
            all_logits = engine.logits(IDS)
            assert mean_error(all_logits, exact) < (0.2 if kind == "int4" else ROUNDED)
            for count in (1, 2, 5, 17, 64):
                assert np.array_equal(engine.logits(IDS[:count]), all_logits[:count])
            prompts = [IDS[:1], IDS[3:20], IDS[40:90]]
            options: dict[str, Any] = {"max_new_tokens": 20}
            alone = [
                engine.generate(p, reuse_prefix=False, speculate=0, **options) for p in prompts
            ]
            assert generate_together(engine, prompts, **options) == alone
            assert engine.generate(prompts[1], speculate=7, **options) == alone[1]
            followed = engine.logits([*prompts[2], *alone[2]]).argmax(-1)
            assert followed[len(prompts[2]) - 1 : -1].tolist() == alone[2]


def test_blocks_of_a_folder_are_what_transformers_reads(blocks):
    # widened, they have the bits of a folder of the same numbers; as blocks, they are close
    widened, exact = (engine_logits(path, dtype="fp32", threads=2) for path in blocks)
    assert relative_error(widened, logits_of(reference(blocks[1]))) < ALLOWED
    assert np.array_equal(widened, exact)
    logits = []
    for options in ({"threads": 1}, {"threads": 3}, {"threads": 2, "isa": "portable"}):
        with Engine.from_pretrained(blocks[0], lanes=1, cache=False, **options) as engine:
            assert (engine.dtype, engine.math) == ("gguf", "int8")
            logits.append(engine.logits(IDS))
    assert np.array_equal(logits[0], logits[1])
    assert all(mean_error(result, exact) < ROUNDED for result in logits)


def test_equal_scores_go_to_the_first_experts(folder, tmp_path):
    # a router of zeros scores all experts alike, so their order decides
    path = change_tensors(folder, tmp_path, replace_tensors("mlp.gate.weight", torch.zeros_like))
    model = plain_model(path, lanes=1)
    assert (
        relative_error(engine_logits(path, kv_dtype="fp32", threads=2), logits_of(model)) < ALLOWED
    )
    layer = model.layers[0].feed_forward
    assert isinstance(layer, LaneExperts)
    assert layer.route(torch.ones(1, 1, 1, 64)).nonzero()[:, -1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("part", "factor"), [("gate_up_proj_bias", 60.0), ("sinks", 20.0), ("sinks", -20.0)]
)
def test_large_biases_and_sinks(gpt_oss, tmp_path, part, factor):
    # gates and ups beyond 7; sinks that take all of a softmax, or none of it
    grow = replace_tensors(
        part, lambda values: factor * (values.abs() if part == "sinks" else values)
    )
    path = change_tensors(gpt_oss, tmp_path, grow)
    expected = logits_of(reference(path))
    assert relative_error(logits_of(reference(gpt_oss)), expected) > SEEN
    assert relative_error(logits_of(plain_model(path, lanes=2)), expected) < ALLOWED
    assert (
        relative_error(engine_logits(path, kv_dtype="fp32", threads=3, lanes=2), expected) < ALLOWED
    )


def test_a_token_reads_the_experts_that_it_takes(folder):
    # the tapes hold all experts; `weight_bytes` counts those that are read
    with Engine.from_pretrained(folder, dtype="fp32", threads=1, cache=False) as engine:
        tape_bytes, config = len(engine._open().part(0)), engine.config
        experts = config.variant.experts
        # of 40 gates and 40 ups each begins at a multiple of 16 rows
        size = 4 * (2 * 48 * 64 + 64 * 40)
        resting = config.num_hidden_layers * (experts.total - experts.active)
        assert tape_bytes - engine.weight_bytes == resting * size


def test_packed_experts_are_mapped_at_the_next_start(tmp_path, monkeypatch):
    # also where the copy is larger than the memory
    path = write_folder(CASES["qwen3-moe-odds"], tmp_path)
    logits = []
    for memory in (None, 1 << 40, 1):
        monkeypatch.setattr(packed, "memory_bytes", lambda memory=memory: memory)
        with Engine.from_pretrained(path, threads=2) as engine:
            logits.append(engine.logits(IDS))
    assert all(np.array_equal(logits[0], other) for other in logits[1:])
    assert [path_in_cache.suffix for path_in_cache in (path / ".packed").iterdir()].count(
        ".bin"
    ) == 1


def test_a_router_of_another_type_is_taken(folder, tmp_path):
    # some folders keep it in float32
    wide = change_tensors(folder, tmp_path, replace_tensors("mlp.gate.weight", torch.Tensor.float))
    assert np.array_equal(engine_logits(wide, threads=1), engine_logits(folder, threads=1))


def test_lanes_cut_no_blocks_and_wait_for_each_other(gpt_oss):
    values = json.loads((gpt_oss / "config.json").read_text())
    # gpt-oss-20b: 2,880 columns are 90 blocks of 32, which two lanes can share and four cannot
    values |= {"intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
    assert [lanes_for(values, threads) for threads in (1, 2, 3, 4, 8)] == [1, 2, 1, 2, 2]
    assert lanes_for({**values, "intermediate_size": 40}, 8) == 8
    config = FamilyConfig.from_flavor("tiny", broadcast_delay=0, variant={"experts": [8, 2]})
    assert config.variant.experts == Experts(8, 2, True)
    assert config.tensor_shapes()["layers.0.feed_forward.w2.weight"] == (8, 4, 128, 128)
    with pytest.raises(ValueError, match="experts need broadcast_delay = 0"):
        dataclasses.replace(config, broadcast_delay=2)


# --- what is refused

UP = "model.layers.0.mlp.experts.3.up_proj.weight"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"
WRONG_TENSORS: list[tuple[Callable[[Weights], object], str]] = [
    (
        lambda w: w.pop(UP),
        r"layers\.0\.mlp\.experts\.up_proj\.weight: the experts \[3\] are missing",
    ),
    (lambda w: w.update({UP: w[UP].float()}), r"experts differ, such as \('bf16', .* and \('fp32'"),
    (lambda w: w.pop(SCALES), r"layers.1.mlp.experts.down_proj_blocks, but not .*down_proj_scales"),
    (
        lambda w: w.update({SCALES: w[SCALES][..., :-1].contiguous()}),
        r"shape .* needs scales of shape",
    ),
]


def test_wrong_tensors_are_named(folder, blocks, tmp_path):
    for path, (change, message) in zip(
        (folder, folder, blocks[0], blocks[0]), WRONG_TENSORS, strict=True
    ):
        with pytest.raises(ValueError, match=message):
            read_checkpoint(change_tensors(path, tmp_path, change))
