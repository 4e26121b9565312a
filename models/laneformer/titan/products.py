"""Matrix products for training: fewer and larger ones, and the mark on what the backward pass keeps.

    B batch   S sequence   L lanes   D hidden   o, i the output and input features that one lane owns

`keep` marks what selective checkpointing holds from the forward for the backward pass. Naming operations
would not do: the streams between attention and MLP are a sum like any other, and the shape of a product
depends on the lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..lanes import LaneLinear
from .private_torch import lower_to_nothing


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
    lower_to_nothing(torch.ops.laneformer.keep.default)


def one_product(x: Tensor, *parts: LaneLinear) -> tuple[Tensor, ...]:
    """x (B, S, L or 1, D) through matrices that fan out, as one product; a result (B, S, L,
    o) for each, kept.

    The input is read once, and its gradient is written once instead of summed from several wide tensors.
    """
    weight = torch.cat([part.weight for part in parts], 1)
    product = keep(torch.einsum("bsli,loi->bslo", x, weight))
    return product.split([part.weight.shape[1] for part in parts], -1)


class LaneSum(LaneLinear):
    """A product that fans in and the sum over lanes, as one: x (B, S, L, i) -> (B, S, 1, out)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsli,loi->bso", x, self.weight)[:, :, None]
