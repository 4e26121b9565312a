"""What depends on positions alone: the rotation of queries and keys, and which keys a query sees.

B batch   S query positions   T key positions   d head dimension
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import LaneformerConfig
from .ropes import stretch_llama3


def rope_table(config: LaneformerConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each (B or 1, S, 1, d/2) float32, for integer positions (S,) or (B, S).

    Where the config has `ropes`, both have an axis of those in front.
    """
    positions = positions if positions.dim() == 2 else positions[None]
    position = positions[..., None].float()
    if not config.ropes:
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequency = 1.0 / config.rope_theta ** (pairs / config.head_dim)
        angle = position * stretch_llama3(frequency, config.rope_scaling)
        return angle.cos()[:, :, None], angle.sin()[:, :, None]
    ropes = [
        rope.of_pairs(config.max_position_embeddings, config.head_dim // 2) for rope in config.ropes
    ]
    # copied without waiting: the host stays ahead of a GPU
    numbers = torch.tensor(ropes, dtype=torch.float32, device="cpu").to(
        positions.device, non_blocking=True
    )
    frequency, scale = numbers.unbind(1)
    angle, scale = position * frequency[:, None, None], scale[:, None, None]
    return (angle.cos() * scale)[..., None, :], (angle.sin() * scale)[..., None, :]


def apply_rope(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate neighbouring pairs (2j, 2j+1) of x (B, S, heads, d): the
    complex-number convention, not rotate-half.
    """
    cos, sin = cos_sin
    even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def causal_mask(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees, bool (S, T): none after it; with a window only the
    last `window`, itself included.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def layer_masks(
    config: LaneformerConfig, query_positions: Tensor, key_positions: Tensor
) -> list[Tensor | None]:
    """One mask a layer; None where plain causality (or a single query that sees everything) says it all."""
    new, total = len(query_positions), len(key_positions)

    def mask(window: int | None) -> Tensor | None:
        is_plain = new in (1, total) and (window is None or total <= window)
        return None if is_plain else causal_mask(query_positions, key_positions, window)

    windows = [config.window(i) for i in range(config.num_hidden_layers)]
    by_window = {window: mask(window) for window in set(windows)}
    return [by_window[window] for window in windows]
