"""Tests of the multi-token-prediction head against plain loops, and of its config."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import Laneformer
from tests.laneformer.drafts import draft_logits
from tests.laneformer.lane_reference import reference_drafts
from tests.laneformer.test_model import FLOAT64_TOLERANCE, IDS, build, exact_rope

STEPS = 3


def drafts_of(model: Laneformer) -> list[np.ndarray]:
    with torch.no_grad():
        return [logits[0].numpy() for logits in draft_logits(model, torch.tensor([IDS]), STEPS)]


def difference(model: Laneformer, plant: str = "") -> float:
    """Return the difference between the model's logits and the loops' at positions that all steps have."""
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    ours, worst = drafts_of(model), 0.0
    for position in range(len(IDS) - STEPS):
        theirs = reference_drafts(model.config, weights, IDS, position, STEPS, plant)
        worst = max(worst, *(abs(a[position] - b).max() for a, b in zip(ours, theirs, strict=True)))
    return worst


@pytest.fixture(autouse=True)
def rope_in_float64(monkeypatch):
    # the model's float32 table would limit the comparison in float64
    monkeypatch.setattr("laneformer.model.rope_table", exact_rope)


SWITCHES: list[dict[str, Any]] = [
    {"broadcast_delay": delay, "deliver_tail": tail}
    for delay, tail in itertools.product((0, 1, 2, 3), (True, False))
] + [
    {"use_early_comm": False},
    {"use_attention_comm": False},
    {"use_mlp_comm": False},
    {"rebroadcast_early": True},
    {"broadcast_delay": 4},  # more than half of the layers
    {"replicated_rmsn_scale": False},
    {"lm_head_type": "replicate"},
    {"flush": True},  # its input has the tail already
    {"flush": True, "deliver_tail": False, "first_late_layer": 3},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_drafts_are_those_of_the_loops(switches):
    # steps 1 to 3 in one pass over all positions equal passes of single columns
    assert difference(build(num_nextn_predict_layers=1, **switches)) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("plant", ["tail", "token"])
def test_the_comparison_would_notice(plant):
    assert difference(build(num_nextn_predict_layers=1), plant) > 1e-6


def test_the_model_without_the_head_is_unchanged():
    # the state dict and the logits; what the head reads of the last layers joins no stream
    with_head, without = build(num_nextn_predict_layers=1), build()
    fields = {"num_nextn_predict_layers", "draft_vocab_size", "deliver_tail"}
    assert not fields & without.config.to_dict().keys()
    without.load_state_dict(
        {n: t for n, t in with_head.state_dict().items() if not n.startswith("mtp.")}
    )
    ids = torch.tensor([IDS])
    assert torch.equal(with_head(ids), without(ids))
