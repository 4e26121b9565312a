"""A mixture of experts in place of a layer's MLP: a router chooses some of them at every position.

B batch   S positions   L lanes   D hidden   E experts   F an expert's intermediate rows
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import LaneformerConfig
from .linear import Weight, add_to_sum, gated


class LaneExperts(nn.Module):
    """The sum of the chosen experts' MLPs by their weights; a partial output per lane, (B, S, L, D).

    Every lane owns rows of each expert (see LaneLinear): w1 and w3 (E, L, F / L, D), w2 (E, L, D, F / L). The
    router (E, D) is every lane's, which chooses by its own stream. Where they are biased: w1 and w3
    (E, L, F / L), the sum of the lanes' w2 (E, D), the router (E,).
    """

    def __init__(self, config: LaneformerConfig):
        super().__init__()
        assert config.variant.experts is not None, "a dense model has no experts"
        self.experts, self.act = config.variant.experts, config.variant.hidden_act
        total, lanes, d, f = (
            self.experts.total,
            config.num_lanes,
            config.hidden_size,
            config.intermediate_size,
        )
        biased = self.experts.biased
        inner = (total, lanes, f // lanes)
        self.router = Weight(total, d, bias=(total,) if biased else None)
        self.w1, self.w3 = (Weight(*inner, d, bias=inner if biased else None) for _ in range(2))
        self.w2 = Weight(total, lanes, d, f // lanes, bias=(total, d) if biased else None)

    def route(self, x: Tensor) -> Tensor:
        """Normed streams (B, S, L, D) -> weights of all experts (B, S, L, E), zero for those not chosen.

        Of equal scores the first expert's is the larger.
        """
        scores = torch.einsum("bsli,ei->bsle", x, self.router.weight)
        scores = scores if self.router.bias is None else scores + self.router.bias
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
        if self.w1.bias is not None and self.w3.bias is not None:
            gate, up = gate + self.w1.bias[number], up + self.w3.bias[number]
        out = torch.einsum("nli,loi->nlo", gated(self.act, gate, up), self.w2.weight[number])
        return out if self.w2.bias is None else add_to_sum(out, self.w2.bias[number])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x)
        out = x.new_zeros(*x.shape[:2], self.w2.weight.shape[1], x.shape[-1])
        for number in range(self.experts.total):
            weight = weights[..., number, None]
            served = (weight != 0).any(2)[..., 0]  # (B, S)
            if served.any():
                out[served] += weight[served] * self.expert(number, x[served])
        return out
