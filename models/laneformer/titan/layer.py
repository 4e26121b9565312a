"""A layer for training: the same mathematics, arranged so that the backward pass moves fewer bytes.

`keep` marks what selective checkpointing holds from the forward for the backward pass. A product or an attention kernel
could be named by its operation, an addition could not: the streams between attention and MLP look like any other sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config import Join, LaneformerConfig
from ..model import LaneformerLayer, LaneRMSNorm, join_lanes
from .attention import TitanAttention


@torch.library.custom_op("laneformer::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    """x, marked: under selective checkpointing it is held for the backward pass. A copy in eager mode only."""
    return x.clone()


@keep.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


keep.register_autograd(lambda context, gradient: gradient)


def lower_keep_to_nothing() -> None:
    """Teach Inductor that the mark is no kernel; without this it would copy the tensor."""
    from torch._inductor.lowering import lowerings, register_lowering

    operation = torch.ops.laneformer.keep.default
    if operation not in lowerings:
        register_lowering(operation, type_promotion_kind=None)(_as_it_is)


def _as_it_is(x: Any) -> Any:
    return x


class TitanLayer(LaneformerLayer):
    """The model's layer; its backward pass starts from the streams between attention and MLP.

    Without them it would compute wo again, and the join, which reads two more wide tensors.
    """

    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__(config, layer)
        self.attention = TitanAttention(config, layer)

    def join_and_norm(
        self, h: Tensor, partial: Tensor, how: Join, delayed: Tensor | None, norm: LaneRMSNorm
    ) -> tuple[Tensor, Tensor]:
        h = keep(join_lanes(h, partial, how, delayed))
        return h, norm(h)
