"""Tests of RoPE by kind of layer, YaRN and NoPE layers against float64 loops and Transformers' tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from laneformer import Laneformer, LaneformerConfig, positions
from laneformer.engine.folder import rope_tables
from tests.laneformer.test_model import build, transcribe

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
KINDS: dict[str, dict[str, Any]] = {
    "theta of windows": {"rope_theta": 4000.0, "window_rope_theta": 100.0},
    "yarn on all": {"rope_theta": 100.0, "rope_scaling": YARN},
    "yarn on full": {
        "rope_theta": 100.0,
        "rope_scaling": YARN | {"layers": "full", "beta_fast": 8},
    },
    "yarn and theta": {
        "rope_theta": 4000.0,
        "window_rope_theta": 100.0,
        "rope_scaling": YARN | {"attention_factor": 1.3},
    },
    "no rotation on full": {"rope_theta": 100.0, "nope_layers": (2, 4, 5)},
}
LENGTH = 20
# float32 tables in a float64 model: an angle of at most LENGTH is off by some units of 2^-24, and
# six layers of weights of unit gain multiply that by less than a hundred
TOLERANCE = 100 * LENGTH * 2.0**-24


def build_model(kind: str, delay: int = 2) -> Laneformer:
    return build(hidden_size=48, broadcast_delay=delay, **KINDS[kind])


def error(model: Laneformer) -> float:
    """Return the largest difference of a logit from the reference over all positions."""
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, LENGTH).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0].numpy()
    return float(np.abs(logits - transcribe(model, ids)).max())


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_the_references(kind, delay):
    model = build_model(kind, delay)
    assert error(model) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_the_other_kind_is_noticed(kind):
    # planted: the last layer with the windows' table, or rotated although NoPE; YaRN without scale
    model = build_model(kind)
    last = model.layers[-1].attention
    if len(model.config.ropes) > 1:
        last.rope_index = 1
    elif model.config.nope_layers:
        last.rotates = True
    else:
        unscaled = tuple(rope._replace(scale=1.0) for rope in model.config.ropes)
        model.config.__dict__["ropes"] = unscaled
    assert error(model) > 100 * TOLERANCE


@pytest.mark.parametrize(("layers", "theta"), [("all", 1e4), ("full", 5e5)])
def test_yarn_is_transformers_at_131072_positions(layers, theta):
    # equal where the frequencies are, the engine within rounding; windows keep their base and,
    # with "full", no scale
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    config = LaneformerConfig.from_flavor(
        "2b",
        rope_theta=theta,
        window_rope_theta=1e4,
        rope_scaling=scaling | {"layers": layers},
        max_position_embeddings=131_072,
    )
    places = torch.arange(131_072)
    (cos, sin), engine = positions.rope_table(config, places), rope_tables(config)
    for kind, rope in enumerate(config.ropes):
        parameters = {"rope_type": "default"} if kind and layers == "full" else scaling
        llama = LlamaConfig(
            hidden_size=3072,
            num_attention_heads=32,
            max_position_embeddings=131_072,
            rope_parameters={**parameters, "rope_theta": 1e4 if kind else theta},
        )
        rotary, frequencies = LlamaRotaryEmbedding(llama), torch.tensor(rope.frequencies)
        # torch's float32 power is off by two units at most, ours is rounded once
        assert ((rotary.inv_freq / frequencies - 1).abs() <= 2 * 2.0**-23).all()
        rotary.inv_freq = frequencies
        tables = (cos, sin), engine, rotary(torch.zeros(1), places[None])
        for ours, engines, theirs in zip(*tables, strict=True):
            assert torch.equal(ours[kind, 0, :, 0], theirs[0, :, : config.head_dim // 2])
            # the engine's cosines are float64's, rounded once; torch's are within two units
            assert np.abs(engines[kind] - ours[kind, 0, :, 0].numpy()).max() <= 4 * 2.0**-24


def test_one_table_a_kind():
    counts = {kind: len(build_model(kind).config.ropes) for kind in KINDS}
    assert counts == dict(zip(KINDS, (2, 1, 2, 2, 0), strict=True))
    assert (
        LaneformerConfig(window_rope_theta=1e4).ropes
        == LaneformerConfig(window_rope_theta=1e4).ropes
    )
    assert len(LaneformerConfig(rope_theta=1e4, window_rope_theta=1e4).ropes) == 1, (
        "two of the same are one"
    )
    table = positions.rope_table(build_model("yarn on full").config, torch.arange(4))
    # (kinds, 1, positions, 1, pairs)
    assert table[0].shape == (2, 1, 4, 1, 6)
