"""How much arithmetic training takes."""

from __future__ import annotations

import math

from .config import LaneformerConfig


def flops_per_token(config: LaneformerConfig, seq_len: int) -> int:
    """Training FLOPs per token: 6 for every weight that multiplies, 12 d for every head and key
    that a query sees.

    Keys outside the causal triangle or the sliding window are not counted, and neither is recomputation.
    """
    counts = config.parameter_count()
    drafts = config.num_nextn_predict_layers
    layers = config.num_hidden_layers + drafts
    matrices = layers * counts["layer"] + (1 + drafts) * math.prod(config.head_shape)
    keys = 0.0
    for layer in range(layers):
        window = min(config.window(layer) or seq_len, seq_len)
        keys += (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
    return int(6 * matrices + 12 * config.query_size * keys)
