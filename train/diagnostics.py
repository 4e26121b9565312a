"""Measure a logged step inside the model: its logits, and each layer's gradients and stream."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX


def gather_ranks(local: Tensor) -> Tensor:
    """Gather a vector (n,) of each rank into (ranks, n)."""
    gathered = local.new_empty(torch.distributed.get_world_size() * len(local))
    torch.distributed.all_gather_into_tensor(gathered, local)
    return gathered.view(-1, len(local))


class Diagnostics:
    """Measures a logged step, in this order: `begin`, `end_micro_batch`, `measure_gradients`, `gather`."""

    def __init__(self, model: Any):
        self.model = model
        self.watching = False
        for layer in self.model.layers:
            # Dynamo compiles a layer's hooks as well, and one that appends again for every length of the list
            layer.register_forward_hook(torch.compiler.disable(self._measure_stream))

    def begin(self) -> None:
        """Watch the next micro-batch's streams; every micro-batch adds its logits."""
        self.watching = True
        self.mean_squares: list[Tensor] = []
        # (3,): sum of squared log-sum-exps, labels, largest logit
        self.logits: list[Tensor] = []
        # (2 K,): sums of loss, and of labels, of each step of the head that drafts
        self.drafts: list[Tensor] = []

    def _measure_stream(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        if self.watching:
            # (B, S, L, D); the norm of a wide tensor without a wide copy of it
            stream = outputs[0].detach()
            square = torch.linalg.vector_norm(stream, dtype=torch.float32).double().square()
            self.mean_squares.append(square / stream.numel())

    @torch.no_grad()
    def end_micro_batch(self, labels: Tensor) -> None:
        """Add the logits that the head has just computed, labels (B, S); stop watching the streams."""
        logsumexps, max_logits = self.model.lm_head.logit_stats
        is_label = (labels != IGNORE_INDEX).flatten()
        squares = torch.where(is_label, logsumexps, 0.0).double().square().sum()
        max_logit = torch.where(is_label, max_logits, -math.inf).max().double()
        self.logits.append(torch.stack([squares, is_label.sum().double(), max_logit]))
        if (drafted := self.model.drafted) is not None:
            tokens = (drafted.labels != IGNORE_INDEX).sum((1, 2))
            self.drafts.append(torch.cat([drafted.losses.double().sum((1, 2)), tokens.double()]))
        self.watching = False

    @torch.no_grad()
    def measure_gradients(self) -> None:
        """Measure this rank's shards of the step's gradients, before they are clipped."""
        none = self.logits[0].new_zeros(1)
        norms = []
        for layer in self.model.layers:
            gradients = [p.grad for p in layer.parameters() if p.grad is not None]
            shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
            shard_norms = torch.stack(torch._foreach_norm(shards)) if shards else none
            # a shard that n ranks hold counts as 1/n on each, since the sum is over all ranks
            shares = shard_norms.new_tensor(
                [1 / count_copies(grad) for grad in gradients] or [1.0], dtype=torch.float64
            )
            norms.append((shard_norms.double().square() * shares).sum())
        self.squared_norms = torch.stack(norms)

    def gather(self) -> dict[str, Any]:
        """Return the values of the row, equal on all ranks.

        z_loss is without its weight; layer_grad_norm is before clipping; layer_stream_rms is of the first micro-batch;
        draft_loss is of each step of the head that drafts.
        """
        ranks, layers = torch.distributed.get_world_size(), len(self.squared_norms)
        logits = torch.stack(self.logits)
        # each rank's part of the mean over ranks
        mean_squares = torch.stack(self.mean_squares) / ranks
        drafts = torch.stack(self.drafts).sum(0) if self.drafts else logits.new_zeros(0)
        # the maximum comes last: all other columns are summed over ranks
        last = (logits[:, :2].sum(0), logits[:, 2].max()[None])
        local = torch.cat([self.squared_norms, mean_squares, drafts, *last])
        # one all-gather a logged step
        table = gather_ranks(local)
        *sums, squared_logsumexps, label_count, max_logit = torch.cat(
            [table[:, :-1].sum(0), table[:, -1].max()[None]]
        ).tolist()
        return {
            "z_loss": squared_logsumexps / label_count if label_count else math.nan,
            "max_logit": max_logit,
            "layer_grad_norm": [math.sqrt(square) for square in sums[:layers]],
            "layer_stream_rms": [math.sqrt(square) for square in sums[layers : 2 * layers]],
            **({"draft_loss": ratios(*sums[2 * layers :])} if self.drafts else {}),
        }


def count_copies(gradient: Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return 1
    places = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in places if placement.is_replicate())


def ratios(*sums: float) -> list[float]:
    """Divide: (a, b, ..., of a, of b, ...) -> [a / of a, b / of b, ...]; NaN by zero."""
    half = len(sums) // 2
    return [
        value / count if count else math.nan
        for value, count in zip(sums[:half], sums[half:], strict=True)
    ]
