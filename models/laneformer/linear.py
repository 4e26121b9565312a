"""What modules of lanes are made of: sums, matrices with their biases, gates, attention with sinks.

B batch   S query positions   T key positions   L lanes   H query heads   d head dimension
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIMIT, STEEPNESS = 7.0, 1.702  # of swiglu_oai


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

    def receive(self, sent: Any, first_only: bool = False) -> Tensor:
        """For each lane what the others have sent, (B, S, L, D); for the first one alone (B, S, 1, D)."""
        partial: Tensor = sent
        return partial.sum(2, keepdim=True) - (partial[:, :, :1] if first_only else partial)


class Weight(nn.Module):
    """A parameter of this shape, named `weight`; with `bias`, another of that shape."""

    def __init__(self, *shape: int, bias: tuple[int, ...] | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))


class LaneLinear(nn.Module):
    """One matrix per lane: y[b,s,l,o] = sum_i x[b,s,l,i] W[l,o,i].

    fan "out" (wq, wk, wv, w1, w3, head): the lane owns rows, weight (L, out/L, in), x (B,S,L,in) ->
    (B,S,L,out/L). fan "in" (wo, w2): the lane owns columns, weight (L, out, in/L), x (B,S,L,in/L) -> a
    partial sum (B,S,L,out). With `bias` (L, out/L), or of the sum (out,).
    """

    def __init__(self, num_lanes: int, in_features: int, out_features: int, fan: str, bias: bool = False):
        super().__init__()
        assert fan in ("out", "in"), f"fan is 'out' or 'in', not {fan!r}"
        shape = (
            (out_features // num_lanes, in_features)
            if fan == "out"
            else (out_features, in_features // num_lanes)
        )
        self.weight = nn.Parameter(torch.empty(num_lanes, *shape))
        of_lanes = (num_lanes, shape[0]) if fan == "out" else shape[:1]
        self.bias = nn.Parameter(torch.empty(of_lanes)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bsli,loi->bslo", x, self.weight)
        if self.bias is None:
            return y
        return y + self.bias if self.bias.dim() == 2 else add_to_sum(y, self.bias)


def add_to_sum(partial: Tensor, bias: Tensor) -> Tensor:
    """A bias of what partial outputs (..., L, D) add up to: the first lane's."""
    return torch.cat((partial[..., :1, :] + bias, partial[..., 1:, :]), -2)


def gated(act: str, gate: Tensor, up: Tensor) -> Tensor:
    """An MLP's inner values, by variant.py's name of its gate.

    "swiglu_oai" is gpt-oss's: gates are at most 7, ups from -7 to 7 and one more.
    """
    if act == "swiglu_oai":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)
    return (F.gelu(gate, approximate="tanh") if act == "gelu_pytorch_tanh" else F.silu(gate)) * up


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor
) -> Tensor:
    """Attention whose softmax has one score more a head, of no key.

    Queries (B, H, S, d), sinks (H,) -> (B, H, S, d). No mask is plain causality.
    """
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril(
            scores.shape[-1] - scores.shape[-2]
        )
    scores = scores.masked_fill(~mask, float("-inf"))
    scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
    return weights[..., :-1].to(value.dtype) @ value
