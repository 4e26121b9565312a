"""Layers of other model families in plain PyTorch (variant.py), the reference of the engine.

B batch   S query positions   T key positions   L lanes   H query heads   d head dimension   D hidden
E experts   F an expert's intermediate rows
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Cache
from ..config import LaneformerConfig
from ..lanes import LaneLinear, LaneRMSNorm
from ..model import LaneAttention, LaneFeedForward, Laneformer, LaneformerLayer
from ..positions import apply_rope
from .variant import Variant, variant_of

LIMIT, STEEPNESS = 7.0, 1.702  # of swiglu_oai


def apply_gate(act: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return an MLP's inner values, by variant.py's name of its gate."""
    # gpt-oss: gates are at most 7, ups from -7 to 7 and one more
    if act == "swiglu_oai":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)
    return (F.gelu(gate, approximate="tanh") if act == "gelu_pytorch_tanh" else F.silu(gate)) * up


def add_to_sum(partial: Tensor, bias: Tensor) -> Tensor:
    """Add a bias of the lanes' sum to partial outputs (..., L, D): to the first lane's."""
    return torch.cat((partial[..., :1, :] + bias, partial[..., 1:, :]), -2)


def post_norm(config: LaneformerConfig, variant: Variant) -> LaneRMSNorm | None:
    return LaneRMSNorm(config) if variant.post_norms else None


def norm_partial(partial: Tensor, norm: LaneRMSNorm | None) -> Tensor:
    """Return what joins: partial outputs (B, S, L, D), or the norm of their sum (B, S, 1, D)."""
    return partial if norm is None else norm(partial.sum(2, keepdim=True))


class Weight(nn.Module):
    def __init__(self, *shape: int, bias: tuple[int, ...] | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))


class BiasedOutput(LaneLinear):
    """wo with a bias (D,) of the lanes' sum."""

    def __init__(self, config: LaneformerConfig):
        super().__init__(config.num_lanes, config.query_size, config.hidden_size, fan="in")
        self.bias = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return add_to_sum(torch.einsum("bsli,loi->bslo", x, self.weight), self.bias)


class FamilyAttention(LaneAttention):
    def __init__(self, config: LaneformerConfig, variant: Variant, layer: int):
        super().__init__(config, layer)
        self.variant = variant
        if variant.output_bias:
            self.wo = BiasedOutput(config)
        if variant.joint_qk_norm:
            # one norm over all heads
            self.q_norm = LaneRMSNorm(config, config.query_size)
            self.k_norm = LaneRMSNorm(config, config.head_dim * config.num_key_value_heads)
        self.sinks = Weight(config.num_attention_heads) if variant.attention_sinks else None
        self.post_norm = post_norm(config, variant)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        return norm_partial(super().forward(x, cos_sin, mask, cache), self.post_norm)

    def heads(self, x: Tensor, norm: LaneRMSNorm | None = None) -> Tensor:
        if norm is None or not self.variant.joint_qk_norm:
            return super().heads(x, norm)
        return super().heads(norm(x.flatten(2))[:, :, None])

    def rotate(
        self, query: Tensor, key: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self.variant.query_growth is None:
            return super().rotate(query, key, cos_sin)
        # see FamilyModel.rope
        key_rope, query_rope = self.rope_index, self.rope_index + self.num_ropes
        rotated = apply_rope(query, (cos_sin[0][query_rope], cos_sin[1][query_rope]))
        return rotated, apply_rope(key, (cos_sin[0][key_rope], cos_sin[1][key_rope]))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.sinks is not None:
            return self._attend_with_sinks(query, key, value, mask, self.sinks.weight)
        causal = mask is None and query.shape[2] > 1
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=True,
            scale=self.variant.attention_scale,
        )

    def _attend_with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
    ) -> Tensor:
        """Attend with one more score for each head, `sinks` (H,), that belongs to no key."""
        # a KV head for each query head of its group
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scale = self.variant.attention_scale or query.shape[-1] ** -0.5
        scores = query @ key.transpose(-1, -2) * scale
        if mask is None:
            new, total = scores.shape[-2:]
            # plain causality: queries are the last positions
            mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        scores = scores.masked_fill(~mask, float("-inf"))
        # a sink takes its share of the softmax, and no value
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
        return weights[..., :-1].to(value.dtype) @ value


class FamilyFeedForward(LaneFeedForward):
    def __init__(self, config: LaneformerConfig, variant: Variant):
        super().__init__(config)
        self.act, self.post_norm = variant.hidden_act, post_norm(config, variant)

    def forward(self, x: Tensor) -> Tensor:
        return norm_partial(self.w2(apply_gate(self.act, *self.project(x))), self.post_norm)


class LaneExperts(nn.Module):
    """The weighted sum of the chosen experts' MLPs; a partial output per lane, (B, S, L, D).

    Every lane owns rows of each expert (see LaneLinear): w1 and w3 (E, L, F / L, D), w2 (E, L, D, F / L).
    All lanes have the router (E, D), and each chooses by its own stream. Biases: w1 and w3 (E, L, F / L),
    the sum of the lanes' w2 (E, D), the router (E,).
    """

    def __init__(self, config: LaneformerConfig, variant: Variant):
        super().__init__()
        assert variant.experts is not None, "a dense model has no experts"
        self.experts, self.act = variant.experts, variant.hidden_act
        total, d, biased = self.experts.total, config.hidden_size, self.experts.biased
        inner = (total, config.num_lanes, config.intermediate_size // config.num_lanes)
        self.router = Weight(total, d, bias=(total,) if biased else None)
        self.w1, self.w3 = (Weight(*inner, d, bias=inner if biased else None) for _ in range(2))
        self.w2 = Weight(*inner[:2], d, inner[2], bias=(total, d) if biased else None)
        self.post_norm = post_norm(config, variant)

    def route(self, x: Tensor) -> Tensor:
        """Return the weights of all experts (B, S, L, E), zero for those not chosen.

        Args:
            x: Normed streams (B, S, L, D).
        """
        scores = torch.einsum("bsli,ei->bsle", x, self.router.weight)
        scores = scores if self.router.bias is None else scores + self.router.bias
        # stable: of equal scores the first expert's counts as larger
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[
            ..., : self.experts.active
        ]
        odds = scores.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights = torch.zeros_like(odds).scatter(-1, chosen, odds.gather(-1, chosen))
        if self.experts.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype)

    def expert(self, number: int, x: Tensor) -> Tensor:
        gate = torch.einsum("nli,loi->nlo", x, self.w1.weight[number])
        up = torch.einsum("nli,loi->nlo", x, self.w3.weight[number])
        if self.w1.bias is not None and self.w3.bias is not None:
            gate, up = gate + self.w1.bias[number], up + self.w3.bias[number]
        out = torch.einsum("nli,loi->nlo", apply_gate(self.act, gate, up), self.w2.weight[number])
        return out if self.w2.bias is None else add_to_sum(out, self.w2.bias[number])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x)
        out = x.new_zeros(*x.shape[:2], self.w2.weight.shape[1], x.shape[-1])
        for number in range(self.experts.total):
            weight = weights[..., number, None]
            # only positions at which some lane has chosen this expert
            is_chosen = (weight != 0).any(2)[..., 0]  # (B, S)
            if is_chosen.any():
                out[is_chosen] += weight[is_chosen] * self.expert(number, x[is_chosen])
        return norm_partial(out, self.post_norm)


class FamilyLayer(LaneformerLayer):
    """A layer whose lanes wait for each other."""

    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__(config, layer)
        variant = variant_of(config)
        self.attention = FamilyAttention(config, variant, layer)
        self.feed_forward = (LaneExperts if variant.experts else FamilyFeedForward)(config, variant)
        # the norms of "post" are over modules' outputs
        if not variant.pre_norms:
            self.attention_norm, self.ffn_norm = nn.Identity(), nn.Identity()


def plain_model(config: LaneformerConfig) -> Laneformer:
    return FamilyModel(config) if config.needs_other_layers() else Laneformer(config)


class FamilyModel(Laneformer):
    def __init__(self, config: LaneformerConfig):
        super().__init__(config, FamilyLayer)

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * variant_of(self.config).embedding_scale

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().rope(positions)
        growth = variant_of(self.config).query_growth
        # where queries grow, their tables follow those of keys
        if growth is None:
            return cos, sin
        scale = 1 + growth[0] * torch.log(
            1 + torch.floor(positions[None, :, None].float() / growth[1])
        )
        scale = scale[..., None]
        return torch.cat((cos, cos * scale)), torch.cat((sin, sin * scale))
