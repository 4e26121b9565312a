"""A layer for training: the same mathematics, arranged so that a step moves fewer bytes.

B batch   S sequence   L lanes   D hidden
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..config import LaneformerConfig
from ..joins import Join
from ..lanes import LaneRMSNorm
from ..model import LaneAttention, LaneFeedForward, LaneformerLayer, join_lanes
from .attention import TitanAttention
from .products import LaneSum, keep, multiply_fused


class TitanFeedForward(LaneFeedForward):
    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return multiply_fused(x, self.w1, self.w3)


class KeptRMSNorm(LaneRMSNorm):
    """The norm, kept for the backward pass: gradients of the product after it read its result."""

    def forward(self, x: Tensor) -> Tensor:
        return keep(super().forward(x))


class TitanLayer(LaneformerLayer):
    """The model's layer, with the streams between attention and MLP kept for the backward pass.

    Without them the backward pass would compute wo and the join again, which reads two more wide tensors.
    """

    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__(config, layer)
        self.attention_norm, self.ffn_norm = KeptRMSNorm(config), KeptRMSNorm(config)
        self.attention: LaneAttention = TitanAttention(config, layer)
        self.feed_forward: LaneFeedForward = TitanFeedForward(config)
        lanes, d_model = config.num_lanes, config.hidden_size
        if self.adds_sum_only(0):
            self.attention.wo = LaneSum(lanes, config.query_size, d_model, fan="in")
        if self.adds_sum_only(1):
            self.feed_forward.w2 = LaneSum(lanes, config.intermediate_size, d_model, fan="in")

    def adds_sum_only(self, module: int) -> bool:
        return self.joins[module] == Join.PRESENT and not self.sends[module]

    def join_and_norm(
        self, h: Tensor, partial: Tensor, how: Join, delayed: Any | None, norm: LaneRMSNorm
    ) -> tuple[Tensor, Tensor]:
        h = keep(join_lanes(h, partial, how, delayed, self.lanes))
        return h, norm(h)
