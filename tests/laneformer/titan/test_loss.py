"""The chunked loss: its numbers, its gradients, and that the logits of a batch are never whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laneformer import Laneformer, LaneformerConfig
from laneformer.titan.loss import IGNORE_INDEX, ChunkedCrossEntropy
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer

SMALL = LaneformerConfig.from_flavor(
    "tiny", hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=512
)


def model_and_batch(
    config: LaneformerConfig = SMALL, **arguments: Any
) -> tuple[TitanLaneformer, torch.Tensor]:
    model = TitanLaneformer(LaneformerArgs(config=config, **arguments))
    model.init_weights()
    tokens = torch.randint(3, config.vocab_size, (2, 49), generator=torch.Generator().manual_seed(0))
    return model, tokens


def test_gradients_are_those_of_the_formula() -> None:
    """Against finite differences in float64; 10 tokens in chunks of 3, one of them ignored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(4, 5, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 20, (10,), generator=generator)
    labels[3] = IGNORE_INDEX
    assert torch.autograd.gradcheck(
        lambda x, w: ChunkedCrossEntropy.apply(x, w, labels, 3, None)[0], (x, weight)
    )


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
def test_losses_and_gradients_are_the_plain_models(head: str) -> None:
    config = LaneformerConfig.from_dict({**SMALL.to_dict(), "lm_head_type": head})
    model, tokens = model_and_batch(config)
    model.lm_head.chunk_tokens = 7  # 96 tokens: thirteen chunks and a rest
    exact = Laneformer(config).double()
    exact.load_state_dict(model.state_dict())
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, 5] = IGNORE_INDEX
    losses = model(inputs, labels)
    losses.sum().backward()
    wanted = F.cross_entropy(exact(inputs).flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )
    wanted.sum().backward()
    assert losses.shape == labels.shape
    assert losses[0, 5] == 0
    # float32 through six layers, each a chain of a few dozen roundings: a hundred roundings of the value
    rounding = 100 * torch.finfo(torch.float32).eps
    assert (losses - wanted).abs().max() < rounding * wanted.max()
    for (name, a), b in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < rounding * b.grad.abs().max(), name
    with torch.no_grad():
        of_logits = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
        assert abs(of_logits - wanted.sum()) < rounding * wanted.sum()
        assert abs(model(inputs, labels.roll(1, 1)).sum() - wanted.sum()) > 0.1, (
            "labels one place off must be seen"
        )


@pytest.mark.parametrize("trained", [0, 1, 14, 15, 60, 96])
def test_skipping_ignored_rows_changes_nothing(trained: int) -> None:
    """Losses and gradients with and without the count, in float64; and how many rows the head has scored."""
    model, tokens = model_and_batch()
    model.double().lm_head.chunk_tokens = 14
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    ignored = torch.randperm(96, generator=torch.Generator().manual_seed(trained))[trained:]
    labels.view(-1)[ignored] = IGNORE_INDEX
    results, scored = [], []
    for given in (None, trained):
        with CountedRows() as counted:
            losses = model(inputs, labels, trained=given)
        losses.sum().backward()
        scored.append(counted.rows)
        results.append([losses.detach(), *(p.grad for p in model.parameters())])
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


def test_logits_are_never_whole() -> None:
    """With a vocabulary that dwarfs the rest, no tensor of a step is larger than a chunk's logits in float32."""
    config = LaneformerConfig.from_dict({**SMALL.to_dict(), "vocab_size": 16384})
    model, tokens = model_and_batch(config)
    model.lm_head.chunk_tokens = 16
    weights = max(p.numel() for p in model.parameters())
    chunk = model.lm_head.chunk_tokens * config.vocab_size
    assert max(weights, chunk) * 4 < (whole := 96 * config.vocab_size * 4)
    with LargestTensor() as chunked:
        model(tokens[:, :-1], tokens[:, 1:]).sum().backward()
    with LargestTensor() as plain:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    # the column numbers, int64, are one row of a chunk
    assert chunked.bytes <= max(weights, chunk) * 4
    assert plain.bytes >= whole


def test_bfloat16_sums_the_heads_gradient_in_float32() -> None:
    """Many chunks give the gradient of one: rounded once to bfloat16, not once a chunk."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 2, 8, generator=generator).bfloat16()
    weight = (0.1 * torch.randn(2, 16, 8, generator=generator)).bfloat16()
    labels = torch.randint(0, 32, (256,), generator=generator)

    def gradient(chunk: int) -> torch.Tensor:
        leaf = weight.clone().requires_grad_()
        ChunkedCrossEntropy.apply(x, leaf, labels, chunk, None)[0].sum().backward()
        return leaf.grad.float()

    one, many = gradient(256), gradient(4)
    # per chunk a product rounded to bfloat16 (half an ulp, 2^-9 of it), then one rounding of the sum
    # (2^-8 covers both)
    bound = 2**-8 * (one.abs() + gradient_of_magnitudes(x, weight, labels))
    assert ((one - many).abs() <= bound).all()


def gradient_of_magnitudes(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What the head's gradient would be, were nothing to cancel: the scale of the chunks' own roundings."""
    logits = torch.einsum("nli,loi->lno", x.float(), weight.float())
    p = logits.transpose(0, 1).flatten(1).softmax(-1)
    d = (p - F.one_hot(labels, p.shape[1])).abs().view(len(x), *weight.shape[:2])
    return torch.einsum("nlo,nli->loi", d, x.float().abs())


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate"])
def test_the_z_loss_joins_the_gradients_and_not_the_loss(head: str) -> None:
    """Gradients are those of loss + weight * log-denominator ** 2 in float64; what the log shows
    is of the logits.
    """
    config, z_weight = LaneformerConfig.from_dict({**SMALL.to_dict(), "lm_head_type": head}), 0.1
    model, tokens = model_and_batch(config)
    model.lm_head.chunk_tokens, model.lm_head.z_loss_weight = 7, z_weight
    exact = Laneformer(config).double()
    exact.load_state_dict(model.state_dict())
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, 5] = IGNORE_INDEX
    losses = model(inputs, labels)
    losses.sum().backward()
    logits = exact(inputs).flatten(0, 1)
    wanted = F.cross_entropy(logits, labels.flatten(), reduction="none")
    denominators = logits.logsumexp(-1)
    z_loss = z_weight * denominators[labels.flatten() != IGNORE_INDEX].square().sum()
    (wanted.sum() + z_loss).backward()
    rounding = 100 * torch.finfo(torch.float32).eps
    assert (losses.flatten() - wanted).abs().max() < rounding * wanted.max()
    for (name, a), b in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < rounding * b.grad.abs().max(), name
    seen = model.lm_head.seen
    assert (seen[0] - denominators).abs().max() < rounding * denominators.abs().max()
    assert (seen[1] - logits.amax(-1)).abs().max() < rounding * logits.abs().max()
