"""The chunked loss: its numbers, its gradients, and that the logits of a batch are never whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laneformer import Laneformer, LaneformerConfig
from laneformer.titan.loss import IGNORE_INDEX, ChunkedCrossEntropy
from laneformer.titan.spec import TitanLaneformer
from tests.laneformer.titan.titan_assets import ROUNDING, build, draw_tokens, gradients_of, largest_difference

SMALL = LaneformerConfig.from_flavor(
    "tiny", hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=512
)


def model_and_batch(config: LaneformerConfig = SMALL) -> tuple[TitanLaneformer, Tensor, Tensor]:
    """With inputs and labels (2, 48), of which one is ignored."""
    tokens = draw_tokens(config, 48)
    labels = tokens[:, 1:].clone()
    labels[0, 5] = IGNORE_INDEX
    return build(config), tokens[:, :-1], labels


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
@pytest.mark.parametrize("z_weight", [0.0, 0.1])
def test_losses_and_gradients_are_the_plain_models(head, z_weight):
    """The z-loss, z_weight * log-denominator ** 2, joins the gradients and not the loss; what the log shows is of the
    logits.
    """
    config = LaneformerConfig.from_dict({**SMALL.to_dict(), "lm_head_type": head})
    model, inputs, labels = model_and_batch(config)
    # 96 tokens: thirteen chunks and a rest
    model.lm_head.chunk_tokens, model.lm_head.z_loss_weight = 7, z_weight
    exact = Laneformer(config).double()
    exact.load_state_dict(model.state_dict())
    losses = model(inputs, labels)
    losses.sum().backward()
    logits = exact(inputs).flatten(0, 1)
    wanted = F.cross_entropy(logits, labels.flatten(), reduction="none")
    denominators = logits.logsumexp(-1)
    z_loss = z_weight * denominators[labels.flatten() != IGNORE_INDEX].square().sum()
    (wanted.sum() + z_loss).backward()
    assert losses.shape == labels.shape
    assert losses[0, 5] == 0
    assert (losses.flatten() - wanted).abs().max() < ROUNDING * wanted.max()
    assert largest_difference(gradients_of(model), gradients_of(exact)) < ROUNDING
    if z_weight:
        seen = dict(zip(("denominators", "peaks"), model.lm_head.seen, strict=True))
        expected = {"denominators": denominators, "peaks": logits.amax(-1)}
        assert largest_difference(seen, expected) < ROUNDING
        return
    with torch.no_grad():
        of_logits = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
        assert abs(of_logits - wanted.sum()) < ROUNDING * wanted.sum()
        wrong = model(inputs, labels.roll(1, 1)).sum()
        assert abs(wrong - wanted.sum()) > 0.1, "labels one place off must be seen"


@pytest.mark.parametrize("trained", [0, 1, 14, 15, 60, 96])
def test_skipping_ignored_rows_changes_nothing(trained):
    """Losses and gradients with and without the count, in float64; and how many rows the head has scored."""
    model, inputs, labels = model_and_batch()
    model.double().lm_head.chunk_tokens = 14
    labels[0, 5] = inputs[0, 6]
    ignored = torch.randperm(96, generator=torch.Generator().manual_seed(trained))[trained:]
    labels.view(-1)[ignored] = IGNORE_INDEX
    results, scored = [], []
    for given in (None, trained):
        with CountedRows() as counted:
            losses = model(inputs, labels, trained=given)
        losses.sum().backward()
        scored.append(counted.rows)
        results.append([losses.detach(), *gradients_of(model).values()])
        model.zero_grad()
    for whole, skipped in zip(*results, strict=True):
        assert (whole - skipped).abs().max() <= 1e-13 * whole.abs().max()
    assert scored == [96, min(max(-(-trained // 14), 1) * 14, 96)]


class CountedRows(TorchDispatchMode):
    """Rows that reach the head's matrix product."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default and out.shape[-1] == SMALL.vocab_size // SMALL.num_lanes:
            self.rows += out.shape[1] if out.shape[0] == SMALL.num_lanes else 0
        return out


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation yields."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return out


def test_logits_are_never_whole():
    """With a vocabulary that dwarfs the rest, no tensor of a step is larger than a chunk's logits in float32."""
    config = LaneformerConfig.from_dict({**SMALL.to_dict(), "vocab_size": 16384})
    model, inputs, labels = model_and_batch(config)
    model.lm_head.chunk_tokens = 16
    weights = max(p.numel() for p in model.parameters())
    chunk = model.lm_head.chunk_tokens * config.vocab_size
    assert max(weights, chunk) * 4 < (whole := 96 * config.vocab_size * 4)
    with LargestTensor() as chunked:
        model(inputs, labels).sum().backward()
    with LargestTensor() as plain:
        F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
    # the column numbers, int64, are one row of a chunk
    assert chunked.bytes <= max(weights, chunk) * 4
    assert plain.bytes >= whole


def test_bfloat16_sums_the_heads_gradient_in_float32():
    """Chunks' products are rounded, their running sum is not: the float32 sum of every chunk's own gradient."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 2, 8, generator=generator).bfloat16()
    weight = torch.randn(2, 16, 8, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 32, (64,), generator=generator)

    def gradient(x: Tensor, labels: Tensor) -> Tensor:
        losses = ChunkedCrossEntropy.apply(x, weight, labels, 4, None)[0]
        return torch.autograd.grad(losses.sum(), weight)[0]

    wide, narrow = torch.zeros(weight.shape), torch.zeros_like(weight)
    for chunk in map(gradient, x.split(4), labels.split(4)):
        wide, narrow = wide + chunk, narrow + chunk
    assert torch.equal(gradient(x, labels), wide.bfloat16())
    assert not torch.equal(narrow, wide.bfloat16()), "a sum in bfloat16 would be seen"
