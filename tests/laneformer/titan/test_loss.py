"""Tests of the chunked loss: values, gradients, and that a batch's logits are never materialized whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from laneformer import Laneformer, LaneformerConfig
from laneformer.titan.loss import IGNORE_INDEX, ChunkedCrossEntropy
from laneformer.titan.spec import TitanLaneformer
from tests.laneformer.titan.titan_assets import (
    ROUNDING,
    Watch,
    build,
    draw_tokens,
    gradients_of,
    largest_difference,
)

SMALL = LaneformerConfig.from_flavor(
    "tiny",
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=512,
)


def model_and_batch(config=SMALL) -> tuple[TitanLaneformer, Tensor, Tensor]:
    """Return a model with inputs and labels (2, 48), of which one label is ignored."""
    tokens = draw_tokens(config, 48)
    labels = tokens[:, 1:].clone()
    labels[0, 5] = IGNORE_INDEX
    return build(config), tokens[:, :-1], labels


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
@pytest.mark.parametrize("z_weight", [0.0, 0.1])
def test_losses_and_gradients_are_the_plain_models(head, z_weight):
    # the z-loss, z_weight * logsumexp ** 2, adds to the gradients and not to the loss
    config = LaneformerConfig.from_dict({**SMALL.to_dict(), "lm_head_type": head})
    model, inputs, labels = model_and_batch(config)
    # 96 tokens: thirteen chunks and a rest
    model.lm_head.chunk_tokens, model.lm_head.z_loss_weight = 7, z_weight
    exact = Laneformer(config).double()
    exact.load_state_dict(model.state_dict())
    losses = model(inputs, labels)
    losses.sum().backward()
    logits = exact(inputs).flatten(0, 1)
    exact_losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    logsumexps = logits.logsumexp(-1)
    z_loss = z_weight * logsumexps[labels.flatten() != IGNORE_INDEX].square().sum()
    (exact_losses.sum() + z_loss).backward()
    assert losses.shape == labels.shape
    assert losses[0, 5] == 0
    assert (losses.flatten() - exact_losses).abs().max() < ROUNDING * exact_losses.max()
    assert largest_difference(gradients_of(model), gradients_of(exact)) < ROUNDING
    if z_weight:
        logit_stats = dict(
            zip(("logsumexps", "max_logits"), model.lm_head.logit_stats, strict=True)
        )
        expected = {"logsumexps": logsumexps, "max_logits": logits.amax(-1)}
        assert largest_difference(logit_stats, expected) < ROUNDING
        return
    with torch.no_grad():
        of_logits = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
        assert abs(of_logits - exact_losses.sum()) < ROUNDING * exact_losses.sum()


def rows_of_head(operation, out) -> int:
    """Return the number of rows if this is the head's matrix product, else 0."""
    is_product = operation is torch.ops.aten.bmm.default
    lanes = SMALL.num_lanes
    is_head = is_product and (out.shape[0], out.shape[-1]) == (lanes, SMALL.vocab_size // lanes)
    return out.shape[1] if is_head else 0


@pytest.mark.parametrize("label_count", [0, 1, 14, 15, 60, 96])
def test_skipping_ignored_rows_changes_nothing(label_count):
    # with and without the count, in float64; also the number of rows that the head scores
    model, inputs, labels = model_and_batch()
    model.double().lm_head.chunk_tokens = 14
    labels[0, 5] = inputs[0, 6]
    ignored = torch.randperm(96, generator=torch.Generator().manual_seed(label_count))[label_count:]
    labels.view(-1)[ignored] = IGNORE_INDEX
    results, scored = [], []
    for count in (None, label_count):
        with Watch(rows_of_head) as rows:
            losses = model(inputs, labels, label_count=count)
        losses.sum().backward()
        scored.append(sum(rows.values))
        results.append([losses.detach(), *gradients_of(model).values()])
        model.zero_grad()
    for whole, skipped in zip(*results, strict=True):
        assert (whole - skipped).abs().max() <= 1e-13 * whole.abs().max()
    assert scored == [96, min(max(-(-label_count // 14), 1) * 14, 96)]


def largest_bytes(operation, out) -> int:
    sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor)]
    return max(sizes, default=0)


def test_logits_are_never_whole():
    # with a vocabulary much larger than the rest, no tensor exceeds a chunk's float32 logits
    config = LaneformerConfig.from_dict({**SMALL.to_dict(), "vocab_size": 16384})
    model, inputs, labels = model_and_batch(config)
    model.lm_head.chunk_tokens = 16
    weights = max(p.numel() for p in model.parameters())
    chunk = model.lm_head.chunk_tokens * config.vocab_size
    assert max(weights, chunk) * 4 < (whole := 96 * config.vocab_size * 4)
    with Watch(largest_bytes) as chunked:
        model(inputs, labels).sum().backward()
    with Watch(largest_bytes) as plain:
        F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
    # the column numbers, int64, are one row of a chunk
    assert max(chunked.values) <= max(weights, chunk) * 4
    assert max(plain.values) >= whole


def test_bfloat16_sums_the_heads_gradient_in_float32():
    # each chunk's product is rounded, their running sum is not
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 2, 8, generator=generator).bfloat16()
    weight = torch.randn(2, 16, 8, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 32, (64,), generator=generator)

    def gradient(x, labels):
        losses = ChunkedCrossEntropy.apply(x, weight, labels, 4, None)[0]
        return torch.autograd.grad(losses.sum(), weight)[0]

    wide, narrow = torch.zeros(weight.shape), torch.zeros_like(weight)
    for chunk in map(gradient, x.split(4), labels.split(4)):
        wide, narrow = wide + chunk, narrow + chunk
    assert torch.equal(gradient(x, labels), wide.bfloat16())
    assert not torch.equal(narrow, wide.bfloat16()), "a sum in bfloat16 would be seen"
