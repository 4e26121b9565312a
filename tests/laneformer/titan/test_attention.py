"""Tests that attention masks and kernels change a step's cost but not its result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from laneformer import LaneformerConfig
from laneformer.titan import attention
from laneformer.titan.spec import TitanLaneformer
from tests.laneformer.titan import titan_assets
from tests.laneformer.titan.titan_assets import ROUNDING, SHAPE

CONFIG = LaneformerConfig.from_flavor("tiny", **SHAPE | {"num_attention_heads": 16})
SEQ_LEN, BOS = 64, 1


def build(kind: str = "sdpa", mask_documents: bool = False) -> TitanLaneformer:
    return titan_assets.build(CONFIG, attention=kind, mask_documents=mask_documents, bos_id=BOS)


@pytest.fixture(scope="module")
def tokens():
    return titan_assets.draw_tokens(CONFIG, SEQ_LEN)


@torch.no_grad()
def losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_sdpa(tokens):
    # forward only: PyTorch has no FlexAttention backward on CPUs; sums are in another order
    tokens = tokens.clone()
    tokens[0, 20] = tokens[1, 40] = BOS
    for documents in (False, True):
        plain = losses(build("sdpa", documents), tokens)
        assert (
            losses(build("flex", documents), tokens) - plain
        ).abs().max() < ROUNDING * plain.max()
    narrower = build("flex")
    narrower.config = dataclasses.replace(CONFIG, sliding_window=CONFIG.sliding_window - 1)
    assert (losses(narrower, tokens) - losses(build(), tokens)).abs().max() > 1e3 * ROUNDING


@pytest.mark.job
def test_block_masks_are_compiled_once(tokens, monkeypatch):
    # as on a GPU: other documents recompile nothing, and the masks equal the plain ones
    inputs, compiled = tokens[:, :-1].clone(), CompileCounter()
    monkeypatch.setattr(
        attention,
        "_block_mask_builder",
        lambda _: torch.compile(create_block_mask, backend=compiled),
    )
    for boundary in (20, 40, 50):
        inputs[0, boundary] = BOS
        documents = attention.document_ids(inputs, BOS)
        masks = [
            mask.to_dense() for mask in attention.training_masks(CONFIG, inputs, "flex", documents)
        ]
        if boundary == 20:
            graphs = compiled.frame_count
    assert compiled.frame_count == graphs > 0
    monkeypatch.setattr(attention, "_block_mask_builder", lambda _: create_block_mask)
    expected = [
        mask.to_dense() for mask in attention.training_masks(CONFIG, inputs, "flex", documents)
    ]
    assert all(map(torch.equal, masks, expected))
