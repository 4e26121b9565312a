"""How parameters are drawn: a function of the seed and each parameter's name, whatever its sharding."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from .config import LaneformerConfig


@torch.no_grad()
def init_parameter(config: LaneformerConfig, name: str, parameter: Tensor, seed: int = 0) -> None:
    """Set a parameter to its initial values; `name` as in Laneformer's state dict."""
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
        return
    if name.endswith(".bias"):
        parameter.zero_()
        return
    # normal, cut at three sigma; the matrices that write to the residual stream are smaller by
    # sqrt(2 N), as in GPT-2
    writes_residual = name.endswith(("wo.weight", "w2.weight"))
    shrink = math.sqrt(2 * config.num_hidden_layers) if writes_residual else 1.0
    fill_from_generator(parameter, config.initializer_range / shrink, f"{seed}/{name}")


def fill_from_generator(parameter: Tensor, std: float, key: str) -> None:
    """Fill a parameter, plain or a DTensor shard of it, from the normal distribution
    that `key` alone decides.
    """
    # drawn whole from a generator of its own: any sharding of the parameters holds the same numbers
    generator = torch.Generator(parameter.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1)
    full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    nn.init.trunc_normal_(full, std=std, a=-3 * std, b=3 * std, generator=generator)
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        # every rank draws the same tensor, so no rank has to send: src_data_rank=None only cuts
        full = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(full)
