"""The loss of a step by source: every sequence comes from one source, so sums over sequences are all it takes.

The model returns a loss per token, so that a logged step pays for two sums and no other step for anything. The sums
stay on the device until `reduce`, which is the one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX, LossFunction


def sequence_losses(losses: torch.Tensor) -> torch.Tensor:
    """Losses (B, S) in nats, 0 where the label is ignored -> the sum of each sequence, float64 (B,), no gradient."""
    return losses.detach().double().sum(1)


class SourceLosses:
    """Sums of loss and tokens by source over the micro-batches of one step."""

    def __init__(self, sources: int, device: torch.device):
        self.sums = torch.zeros(2, sources, dtype=torch.float64, device=device)  # loss, tokens
        self.source: torch.Tensor | None = None  # int64 (B,) of the coming micro-batch; None: do not look

    def watch(self, loss_fn: LossFunction) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The same loss function, which also adds to the sums while `source` is set."""

        def watched(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if self.source is not None:
                self.sums[0].index_add_(0, self.source, sequence_losses(pred))
                self.sums[1].index_add_(0, self.source, (labels != IGNORE_INDEX).sum(1).double())
            return loss_fn(pred, labels)

        return watched

    def reduce(self, mesh: DeviceMesh | None) -> list[float | None]:
        """Mean loss of each source over all ranks, None for a source that the step has no token of; starts anew."""
        if mesh is not None:
            torch.distributed.all_reduce(self.sums, group=mesh.get_group())
        losses, tokens = self.sums.tolist()
        self.sums.zero_()
        return [loss / count if count else None for loss, count in zip(losses, tokens, strict=True)]
