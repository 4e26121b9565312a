"""RMSNorm of lanes' streams, of heads, and of modules' outputs.

B batch   S positions   L lanes   D hidden
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import LaneformerConfig


class LaneRMSNorm(nn.Module):
    """RMSNorm of every lane's own stream, (..., L, D) -> (..., L, D); the scale is shared (D,) or
    per lane (L, D).

    With `size`, of the last axis of that size.
    """

    def __init__(self, config: LaneformerConfig, size: int | None = None):
        super().__init__()
        d = size or config.hidden_size
        shared = config.replicated_rmsn_scale or size is not None
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(d) if shared else torch.ones(config.num_lanes, d))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class SumNorm(LaneRMSNorm):
    """RMSNorm of the sum of all lanes' partial outputs, (B, S, L, D) -> (B, S, 1, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sum(2, keepdim=True))
