"""Tests that the training model has the plain model's losses and gradients for every kind of join."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from laneformer import LaneformerConfig
from laneformer.titan import fused_layer
from laneformer.titan.parallelize import apply_selective_checkpointing
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from tests.laneformer.test_model import FLOAT64_TOLERANCE, HEADS, IDS, SMALL, build
from tests.laneformer.titan.titan_assets import (
    PlainJoinNorm,
    gradients_of,
    largest_difference,
    train,
)

# of attention, of the MLP; and whether delayed outputs are sent again, lanes have norm scales of
# their own
COMMS = [
    (True, True, False),
    (True, True, True),
    (False, True, True),
    (True, False, False),
    (False, False, True),
]


def difference(join_norm="plain", **overrides) -> float:
    plain = build(**overrides)
    model = TitanLaneformer(LaneformerArgs(config=plain.config, join_norm=join_norm)).double()
    model.load_state_dict(plain.state_dict())
    apply_selective_checkpointing(model)
    tokens = torch.tensor([IDS, IDS[::-1]])
    losses = nn.functional.cross_entropy(plain(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none")
    losses.sum().backward()
    return largest_difference(
        train(model, tokens), {"losses": losses.detach(), **gradients_of(plain)}
    )


@pytest.mark.parametrize(
    ("join_norm", "delay"), [("plain", 0), ("plain", 1), ("plain", 3), ("triton", 0), ("triton", 1)]
)
@pytest.mark.parametrize("early", [True, False])
def test_every_join(monkeypatch, early, delay, join_norm):
    # also with layers for the kernels; test_join_norm.py compares those with these formulas
    monkeypatch.setattr(fused_layer, "JoinNorm", PlainJoinNorm(0.0))
    for attention, mlp, other in COMMS:
        options = {
            "broadcast_delay": delay,
            "use_early_comm": early,
            "use_attention_comm": attention,
            "use_mlp_comm": mlp,
            "rebroadcast_early": other,
            "replicated_rmsn_scale": not other,
        }
        assert difference(join_norm, **options) < FLOAT64_TOLERANCE, options


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("flush", [True, False])
def test_late_upper_layers_and_the_flush(first, flush):
    for delay, head in zip((0, 1, 2, 3), HEADS, strict=True):
        options = {"broadcast_delay": delay, "first_late_layer": first, "flush": flush, **head}
        assert difference(**options) < FLOAT64_TOLERANCE, options


def test_every_head():
    # with delay 0 no join separates the lanes, and one stream reaches the head
    for delay, head in itertools.product((0, 2), HEADS):
        assert difference(broadcast_delay=delay, **head) < FLOAT64_TOLERANCE, (delay, head)


def streams(**overrides) -> list[int]:
    """Return the number of streams that leave each layer."""
    config = LaneformerConfig(**{**SMALL, **overrides})
    model = TitanLaneformer(LaneformerArgs(config=config))
    model.init_weights()
    counts = []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, inputs, output: counts.append(output[0].shape[2]))
    model(torch.tensor([IDS]))
    return counts


def test_equal_streams_are_one():
    # until a join separates the lanes, whatever their norms' scales do
    assert streams(broadcast_delay=2) == [1, 1, 2, 2, 2, 2]
    assert streams(broadcast_delay=3, replicated_rmsn_scale=False) == [1, 1, 1, 2, 2, 2]
    assert streams(broadcast_delay=0) == [1] * 6
    assert streams(broadcast_delay=1, first_late_layer=4, flush=True) == [1, 1, 1, 1, 2, 2]
    assert streams(use_early_comm=False) == streams(use_mlp_comm=False) == [2] * 6
