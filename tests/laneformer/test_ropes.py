"""RoPE by kind of layer, YaRN and layers without rotation, in a model whose lanes are late: against float64 loops at
every position, and against Transformers' tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from laneformer import Laneformer, LaneformerConfig, positions
from tests.laneformer.lane_reference import reference_logits

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
KINDS: dict[str, dict[str, Any]] = {
    "theta of windows": {"rope_theta": 4000.0, "window_rope_theta": 100.0},
    "yarn on all": {"rope_theta": 100.0, "rope_scaling": YARN},
    "yarn on full": {"rope_theta": 100.0, "rope_scaling": YARN | {"layers": "full", "beta_fast": 8}},
    "yarn and theta": {
        "rope_theta": 4000.0, "window_rope_theta": 100.0, "rope_scaling": YARN | {"attention_factor": 1.3},
    },
    "no rotation on full": {"rope_theta": 100.0, "nope_layers": (2, 4, 5)},
}  # fmt: skip
SHAPE = {
    "hidden_size": 48, "intermediate_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_lanes": 2, "sliding_window": 4, "swa_layers": (0, 1, 3),
    "max_position_embeddings": 64, "vocab_size": 40,
}  # fmt: skip
LENGTH = 20
# float32 tables in a float64 model: an angle of at most LENGTH is off by some units of 2^-24, and six layers of weights
# of unit gain multiply that by less than a hundred
TOLERANCE = 100 * LENGTH * 2.0**-24


def built(kind: str, delay: int = 2) -> Laneformer:
    model = Laneformer(LaneformerConfig(**SHAPE, broadcast_delay=delay, **KINDS[kind])).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else noise / p.shape[-1] ** 0.5)
    return model


def error(model: Laneformer, config: LaneformerConfig) -> float:
    """The largest difference of a logit, over all positions, from the reference of `config`."""
    ids = np.random.default_rng(1).integers(0, config.vocab_size, LENGTH).tolist()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0].numpy()
    return float(np.abs(logits - reference_logits(config, weights, ids)).max())


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_the_references(kind: str, delay: int) -> None:
    model = built(kind, delay)
    assert error(model, model.config) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_the_other_kind_is_noticed(kind: str) -> None:
    """Planted: the last layer with windows' table, or rotated where it is not to be; YaRN without its scale."""
    model = built(kind)
    last = model.layers[-1].attention
    if len(model.config.ropes) > 1:
        last.rope = 1
    elif model.config.nope_layers:
        last.rotates = True
    else:
        unscaled = tuple(each._replace(scale=1.0) for each in model.config.ropes)
        model.config.__dict__["ropes"] = unscaled
    assert error(model, model.config) > 100 * TOLERANCE


def test_one_table_a_kind() -> None:
    counts = {kind: len(built(kind).config.ropes) for kind in KINDS}
    assert counts == dict(zip(KINDS, (2, 1, 2, 2, 0), strict=True))
    assert LaneformerConfig(window_rope_theta=1e4).ropes == LaneformerConfig(window_rope_theta=1e4).ropes
    assert len(LaneformerConfig(rope_theta=1e4, window_rope_theta=1e4).ropes) == 1, "two of the same are one"
    found = positions.rope_table(built("yarn on full").config, torch.arange(4))
    assert found[0].shape == (2, 1, 4, 1, 6)
