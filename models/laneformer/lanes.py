"""What modules of lanes are made of: the exchange between lanes, one matrix per lane, RMSNorm.

B batch   S positions   L lanes   D hidden
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .config import LaneformerConfig


class Lanes:
    """How lanes' partial outputs meet: here, where one tensor holds all lanes.

    Training may give them to several ranks (titan/lane_axis.py): then `here` of the `total` lanes are this
    rank's, and L is `here` in its tensors.
    """

    def __init__(self, total: int):
        self.total = self.here = total

    def sum(self, partial: Tensor) -> Tensor:
        """Partial outputs (B, S, L or 1, D) -> their sum over all lanes (B, S, 1, D), at once."""
        return partial.sum(2, keepdim=True)

    def send(self, partial: Tensor) -> Any:
        """Partial outputs (B, S, L, D) on their way to all lanes: what `receive` takes, later."""
        return partial

    def receive(self, in_flight: Any, first_only: bool = False) -> Tensor:
        """For each lane what the others have sent, (B, S, L, D); for the first one alone (B, S, 1, D)."""
        partial: Tensor = in_flight
        return partial.sum(2, keepdim=True) - (partial[:, :, :1] if first_only else partial)


class LaneLinear(nn.Module):
    """One matrix per lane: y[b,s,l,o] = sum_i x[b,s,l,i] W[l,o,i].

    fan "out" (wq, wk, wv, w1, w3): the lane owns rows, weight (L, out/L, in), x (B, S, L, in) ->
    (B, S, L, out/L), with a bias (L, out/L) if asked for. fan "in" (wo, w2): the lane owns columns, weight
    (L, out, in/L), x (B, S, L, in/L) -> a partial sum (B, S, L, out).
    """

    def __init__(
        self, num_lanes: int, in_features: int, out_features: int, fan: str, bias: bool = False
    ):
        super().__init__()
        assert fan in ("out", "in"), f"fan is 'out' or 'in', not {fan!r}"
        if fan == "out":
            rows, columns = out_features // num_lanes, in_features
        else:
            rows, columns = out_features, in_features // num_lanes
        self.weight = nn.Parameter(torch.empty(num_lanes, rows, columns))
        self.bias = nn.Parameter(torch.empty(num_lanes, rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bsli,loi->bslo", x, self.weight)
        return y if self.bias is None else y + self.bias


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
