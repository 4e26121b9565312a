"""Matrix products for training: fewer and larger ones, and a mark on what the backward pass keeps.

B batch   S sequence   L lanes   D hidden   o, i the output and input features that one lane owns
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..lanes import LaneLinear
from .private_torch import lower_to_nothing


# Selective checkpointing keeps the results of this operation. Names of torch's own would not do: the
# streams between attention and MLP are a sum like any other, and a product's shape depends on the
# lanes
@torch.library.custom_op("laneformer::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    """Return x, marked to be kept for the backward pass; a copy in eager mode only."""
    return x.clone()


keep.register_fake(torch.empty_like)
keep.register_autograd(lambda context, gradient: gradient)


def lower_keep_to_nothing() -> None:
    lower_to_nothing(torch.ops.laneformer.keep.default)


def multiply_fused(x: Tensor, *parts: LaneLinear) -> tuple[Tensor, ...]:
    """Multiply x (B, S, L or 1, D) by fan-out matrices at once; return a kept (B, S, L, o) for each."""
    # reads the input once, and writes its gradient once instead of a sum of several wide tensors
    weight = torch.cat([part.weight for part in parts], 1)
    product = keep(torch.einsum("bsli,loi->bslo", x, weight))
    return product.split([part.weight.shape[1] for part in parts], -1)


class LaneSum(LaneLinear):
    """A fan-in product with the sum over lanes: x (B, S, L, i) -> (B, S, 1, out)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsli,loi->bso", x, self.weight)[:, :, None]
