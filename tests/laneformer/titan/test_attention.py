"""Masks and kernels of attention change the cost of a step, never its result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from laneformer import LaneformerConfig
from laneformer.config import BOS
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer

# a windowed layer and a full one; the second receives the first one's outputs, delayed
CONFIG = LaneformerConfig.from_flavor(
    "tiny", hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_lanes=8, num_attention_heads=8,
    num_key_value_heads=8, sliding_window=24, swa_layers=(0,), broadcast_delay=1, use_early_comm=False, vocab_size=512,
)  # fmt: skip
SEQ_LEN = 64


def build(kind: str = "sdpa", mask_documents: bool = False) -> TitanLaneformer:
    model = TitanLaneformer(LaneformerArgs(config=CONFIG, attention=kind, mask_documents=mask_documents))
    model.init_weights()
    return model


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 512, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_sdpa(tokens: torch.Tensor) -> None:
    """Forward only: PyTorch has no backward of FlexAttention on CPUs. The same sums in another order."""
    tokens = tokens.clone()
    tokens[0, 20] = tokens[1, 40] = BOS
    rounding = 100 * torch.finfo(torch.float32).eps
    for documents in (False, True):
        plain = losses(build("sdpa", documents), tokens)
        assert (losses(build("flex", documents), tokens) - plain).abs().max() < rounding * plain.max()
    narrower = build("flex")
    narrower.config = dataclasses.replace(CONFIG, sliding_window=CONFIG.sliding_window - 1)
    assert (losses(narrower, tokens) - losses(build(), tokens)).abs().max() > 1e3 * rounding


def test_a_document_does_not_see_the_one_before(tokens: torch.Tensor) -> None:
    first, second = tokens.clone(), tokens.clone()
    for batch in (first, second):
        batch[:, 30] = BOS
    second[:, :30] = second[:, :30].flip(1)
    masked, open_ = build(mask_documents=True), build()
    after = slice(30, None)
    assert torch.equal(losses(masked, first)[:, after], losses(masked, second)[:, after])
    assert not torch.equal(losses(open_, first)[:, after], losses(open_, second)[:, after])
