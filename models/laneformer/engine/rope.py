"""Tables of the rotary embedding, bit for bit those of model.py, in numpy."""

from __future__ import annotations

import numpy as np

from ..config import LaneformerConfig


def rope_tables(config: LaneformerConfig) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (context, d/2) float32, with model.py's float32 steps (each rounded once, as PyTorch's are)."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequency = np.float32(1) / np.power(config.rope_theta, exponent.astype(np.float64)).astype(np.float32)
    if config.rope_scaling is not None:
        s = config.rope_scaling
        turns = s["original_max_position_embeddings"] * frequency / np.float32(2 * np.pi)
        blend = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        blend = blend.clip(0, 1).astype(np.float32)
        frequency = frequency * (blend + (1 - blend) / np.float32(s["factor"]))
    positions = np.arange(config.max_position_embeddings, dtype=np.float32)
    angle = (positions[:, None] * frequency).astype(np.float32).astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
