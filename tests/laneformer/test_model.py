"""Tests of the model against another implementation: the update table as plain loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import Laneformer, LaneformerConfig
from laneformer.joins import MODULES
from laneformer.model import KVCache, LaneAttention, run_layers
from laneformer.positions import rope_table
from tests.laneformer.lane_reference import reference_logits

SMALL = {
    "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_lanes": 2, "sliding_window": 4, "swa_layers": (0, 1, 3),
    "max_position_embeddings": 64, "vocab_size": 40,
}  # fmt: skip
IDS = [3, 17, 39, 0, 8, 8, 25, 31, 2, 11]
HEADS = [
    {"lm_head_type": "vocab_parallel"},
    {"lm_head_type": "lane"},
    {"lm_head_type": "replicate"},
    {"lm_head_type": "replicate", "pre_norm_lane_agg": True},
]
UNIT_F32 = 2.0**-24  # half a unit in the last place of float32
# Float64 sums of a few hundred terms, six layers deep, on logits of order one: every operation is
# off by at most 2^-53 of its result, and even if 10^4 of them pulled one way 10^4 * 2^-53 is
# 1.1e-12. A wrong term is off by 1e-6 or more.
FLOAT64_TOLERANCE = 1e4 * 2.0**-53


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: object) -> Laneformer:
    """Return a small model with large matrices and norm scales far from 1."""
    # with the usual ones many terms would vanish in rounding, so an error in them would, too
    model = Laneformer(LaneformerConfig(**{**SMALL, **overrides})).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(
                1 + 0.3 * noise if name.endswith("norm.weight") else noise / math.sqrt(p.shape[-1])
            )
    return model


def exact_rope(
    config: LaneformerConfig, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # the model's float32 table would limit the comparison in float64
    j = torch.arange(config.head_dim // 2, dtype=torch.float64)
    angle = positions[:, None] * config.rope_theta ** (-2 * j / config.head_dim)
    return angle.cos()[None, :, None], angle.sin()[None, :, None]


def lane_batched_logits(model: Laneformer, ids: list[int]) -> np.ndarray:
    positions = torch.arange(len(ids))
    embedding = model.tok_embeddings(torch.tensor([ids]))
    cos_sin, masks = exact_rope(model.config, positions), model.masks(positions, positions)
    with torch.no_grad():
        h, _ = run_layers(model.layers, model.config, embedding, cos_sin, masks)
        return model.lm_head(h, model.norm)[0].numpy()


def transcribe(model: Laneformer, ids: list[int], plant: str = "") -> np.ndarray:
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return reference_logits(model.config, weights, ids, plant)


def difference(model: Laneformer, plant: str = "") -> float:
    return float(np.abs(lane_batched_logits(model, IDS) - transcribe(model, IDS, plant)).max())


BOTH = (True, False)


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("early", BOTH)
def test_forward_is_the_update_table(delay, early):
    names = ("use_attention_comm", "use_mlp_comm", "rebroadcast_early")
    for values in itertools.product(BOTH, repeat=3):
        switches: dict[str, Any] = dict(zip(names, values, strict=True))
        model = build(broadcast_delay=delay, use_early_comm=early, **switches)
        assert difference(model) < FLOAT64_TOLERANCE, switches


@pytest.mark.parametrize("delay", [1, 2, 4])
@pytest.mark.parametrize("first", [0, 1, 3, 5])
def test_late_upper_layers_and_the_flush_are_the_update_table(delay, first):
    # with heads that read the streams in different ways; all, some or no early layers wait
    rows: list[dict[str, Any]] = [
        {"flush": flush, "use_early_comm": early, **head}
        for (flush, early), head in zip(itertools.product(BOTH, repeat=2), HEADS, strict=True)
    ]
    rows += [
        {"flush": True, "use_early_comm": False, f"use_{module}_comm": False} for module in MODULES
    ]
    rows += [{"early_layers": early, "flush": early == 1} for early in (1, 2, 3, 4)]
    for row in rows:
        model = build(broadcast_delay=delay, first_late_layer=first, **row)
        assert difference(model) < FLOAT64_TOLERANCE, row


@pytest.mark.parametrize("head", HEADS, ids=lambda head: "-".join(map(str, head.values())))
@pytest.mark.parametrize("replicated", BOTH)
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_heads_norm_scales_and_lanes(head, replicated, lanes):
    model = build(num_lanes=lanes, num_key_value_heads=4, replicated_rmsn_scale=replicated, **head)
    assert difference(model) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("plant", ["remote", "delay", "window", "flush", "border"])
@pytest.mark.parametrize("early", [True, False])
def test_planted_errors_are_noticed(plant, early):
    overrides = {"flush": {"flush": True}, "border": {"first_late_layer": 3}}.get(plant, {})
    model = build(broadcast_delay=2, use_early_comm=early, **overrides)
    assert difference(model, plant) > 1e6 * FLOAT64_TOLERANCE


def test_rope_table_is_exact_to_its_float32_angle():
    # the angle has rounding errors of the frequency (power and reciprocal) and of its product with
    # the position, then cos
    config = LaneformerConfig.from_flavor("2b")
    positions = torch.arange(config.max_position_embeddings)
    (cos, sin), (exact_cos, exact_sin) = (
        rope_table(config, positions),
        exact_rope(config, positions),
    )
    position = positions[None, :, None, None]
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float64)
    frequency = config.rope_theta ** (-2 * pairs / config.head_dim)
    # exponent off by one unit times ln(theta) in the result, power 2, reciprocal 1, product 1; cos,
    # sin 2 themselves
    bound = (math.log(config.rope_theta) + 4) * UNIT_F32 * position * frequency + 2 * UNIT_F32
    assert ((cos - exact_cos).abs() <= bound).all()
    assert ((sin - exact_sin).abs() <= bound).all()


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("chunks", [[1] * 10, [3, 1, 4, 2], [6, 4], [4, 6], [9, 1]])
def test_cached_decoding_is_the_full_forward(delay, chunks):
    # the window is 4, so every split crosses its edge
    model, ids = build(broadcast_delay=delay), torch.tensor([IDS, IDS[::-1]])
    cache = KVCache(model.config.num_hidden_layers)
    with torch.no_grad():
        pieces = [model(part, cache) for part in ids.split(chunks, 1)]
        full = model(ids)
    assert (torch.cat(pieces, 1) - full).abs().max() < FLOAT64_TOLERANCE
    assert cache.length == len(IDS)


def initialize(seed: int, **overrides: object) -> dict[str, torch.Tensor]:
    model = Laneformer(LaneformerConfig.from_flavor("tiny", **overrides))
    model.init_weights(seed)
    return model.state_dict()


def test_init_is_a_function_of_seed_and_name():
    first, again, other = initialize(0), initialize(0), initialize(1)
    # a layer's weights depend on its name, not on how many numbers were drawn before
    deeper = initialize(0, num_hidden_layers=7)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert name.endswith("norm.weight") or not torch.equal(value, other[name]), name
    assert torch.equal(
        first["layers.3.attention.wq.weight"], deeper["layers.3.attention.wq.weight"]
    )
    assert not torch.equal(
        first["layers.0.attention.wq.weight"], first["layers.1.attention.wq.weight"]
    )


def test_init_has_the_stated_deviations():
    sigma, layers = 0.02, 6
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    # deviation of a normal cut at three sigma
    cut = math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))
    for name, value in initialize(0).items():
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name
            continue
        stated = (
            sigma / math.sqrt(2 * layers) if name.endswith(("wo.weight", "w2.weight")) else sigma
        )
        # the deviation of n draws is itself off by about 1 / sqrt(2 n); five of those
        assert abs(value.double().std() / (stated * cut) - 1) < 5 / math.sqrt(2 * value.numel()), (
            name
        )
        assert value.abs().max() <= 3 * stated * (1 + UNIT_F32), name


def test_attention_compiles_for_any_length():
    # a second length makes lengths symbolic, and so every comparison of them
    attention = LaneAttention(LaneformerConfig.from_flavor("tiny"), 0)
    compiled = torch.compile(attention.attend, fullgraph=True, dynamic=True, backend="eager")
    for length in (8, 16, 1):
        query, key = torch.randn(2, 8, length, 16), torch.randn(2, 4, length, 16)
        assert torch.equal(compiled(query, key, key, None), attention.attend(query, key, key, None))
