"""Masks and kernels of attention change the cost of a step, never its result."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from laneformer import LaneformerConfig
from laneformer.config import BOS
from laneformer.titan import attention
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


def lengths_attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **options: Any):
    """`varlen_attn` as PyTorch documents it, one segment after the other; it has no kernel for CPUs."""
    ends, _, longest, _ = given
    left, right = options["window_size"]
    assert right == 0
    assert options["enable_gqa"]
    assert ends.dtype == torch.int32
    assert ends.diff().max() <= longest
    parts = []
    for start, end in itertools.pairwise(ends.tolist()):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        at = torch.arange(end - start)
        distance = at[:, None] - at[None, :]
        seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        part = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("documents", [False, True])
def test_varlen_attention_is_sdpa(tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch, documents: bool) -> None:
    """Layout, windows and ends of the documents; the kernel itself needs a GPU."""
    monkeypatch.setattr(attention, "varlen_attn", lengths_attended)
    tokens = tokens.clone()
    tokens[0, 20] = tokens[1, 40] = tokens[1, 0] = BOS
    rounding = 100 * torch.finfo(torch.float32).eps
    plain = losses(build("sdpa", documents), tokens)
    assert (losses(build("varlen", documents), tokens) - plain).abs().max() < rounding * plain.max()
    wrong = lambda *given, **options: lengths_attended(*given, **{**options, "window_size": (CONFIG.sliding_window, 0)})  # noqa: E731
    monkeypatch.setattr(attention, "varlen_attn", wrong)
    assert (losses(build("varlen", documents), tokens) - plain).abs().max() > 1e3 * rounding


def test_block_masks_are_compiled_once(tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: other documents in the next batch compile nothing again, and the masks are the plain ones."""
    inputs, compiled = tokens[:, :-1].clone(), CompileCounter()
    monkeypatch.setattr(attention, "_block_mask_builder", lambda _: torch.compile(create_block_mask, backend=compiled))
    for boundary in (20, 40, 50):
        inputs[0, boundary] = BOS
        documents = attention.document_ids(inputs)
        found = [mask.to_dense() for mask in attention.training_masks(CONFIG, inputs, "flex", documents)]
        if boundary == 20:
            graphs = compiled.frame_count
    assert compiled.frame_count == graphs > 0
    monkeypatch.setattr(attention, "_block_mask_builder", lambda _: create_block_mask)
    wanted = [mask.to_dense() for mask in attention.training_masks(CONFIG, inputs, "flex", documents)]
    assert all(map(torch.equal, found, wanted))


def test_a_document_does_not_see_the_one_before(tokens: torch.Tensor) -> None:
    first, second = tokens.clone(), tokens.clone()
    for batch in (first, second):
        batch[:, 30] = BOS
    second[:, :30] = second[:, :30].flip(1)
    masked, open_ = build(mask_documents=True), build()
    after = slice(30, None)
    assert torch.equal(losses(masked, first)[:, after], losses(masked, second)[:, after])
    assert not torch.equal(losses(open_, first)[:, after], losses(open_, second)[:, after])
