"""The numbers that int8 weights stand for."""

from __future__ import annotations

import torch


def round_to_int8(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # each row has whole multiples of a scale, at most 127 of them
    rounded = {}
    for name, weight in weights.items():
        if name.startswith("tok_embeddings") or name.endswith(("norm.weight", ".bias")):
            rounded[name] = weight
            continue
        scale = weight.float().abs().amax(-1, keepdim=True) / 127
        scale[scale < torch.finfo(torch.float32).tiny] = 0  # too small to divide by
        ratios = (weight.float() / scale).nan_to_num(0, 0, 0)  # rows of zeros stay zeros
        rounded[name] = ratios.round().double() * scale.double()  # ties to even
    return rounded
