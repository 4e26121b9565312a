"""A mixture of experts in place of a layer's MLP: a router chooses some of them at every position.

B batch   S positions   L lanes   D hidden   E experts   F an expert's intermediate rows
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import LaneformerConfig


class Weight(nn.Module):
    """A parameter of this shape, named `weight`."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class LaneExperts(nn.Module):
    """The sum of the chosen experts' MLPs by their weights; a partial output per lane, (B, S, L, D).

    Every lane owns rows of each expert (see LaneLinear): w1 and w3 (E, L, F / L, D), w2 (E, L, D, F / L). The
    router (E, D) is every lane's, which chooses by its own stream.
    """

    def __init__(self, config: LaneformerConfig):
        super().__init__()
        assert config.variant.experts is not None, "a dense model has no experts"
        self.experts, self.gelu = config.variant.experts, config.variant.hidden_act == "gelu_pytorch_tanh"
        total, lanes, d, f = (
            self.experts.total,
            config.num_lanes,
            config.hidden_size,
            config.intermediate_size,
        )
        self.router = Weight(total, d)
        self.w1, self.w3 = Weight(total, lanes, f // lanes, d), Weight(total, lanes, f // lanes, d)
        self.w2 = Weight(total, lanes, d, f // lanes)

    def route(self, x: Tensor) -> Tensor:
        """Normed streams (B, S, L, D) -> weights of all experts (B, S, L, E), zero for those not chosen.

        Of equal scores the first expert's is the larger.
        """
        scores = torch.einsum("bsli,ei->bsle", x, self.router.weight)
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.experts.active]
        odds = scores.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights = torch.zeros_like(odds).scatter(-1, chosen, odds.gather(-1, chosen))
        if self.experts.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """One expert's partial outputs of some positions (N, L, D)."""
        gate = torch.einsum("nli,loi->nlo", x, self.w1.weight[number])
        up = torch.einsum("nli,loi->nlo", x, self.w3.weight[number])
        gated = (F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * up
        return torch.einsum("nli,loi->nlo", gated, self.w2.weight[number])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x)
        out = x.new_zeros(*x.shape[:2], self.w2.weight.shape[1], x.shape[-1])
        for number in range(self.experts.total):
            weight = weights[..., number, None]
            served = (weight != 0).any(2)[..., 0]  # (B, S)
            if served.any():
                out[served] += weight[served] * self.expert(number, x[served])
        return out
