"""The cards that the planner knows (tools/bench/planned.py), and models that people run on them."""

from __future__ import annotations

from typing import Any

from laneformer.config import FLAVORS, LaneformerConfig
from laneformer.llama.config import config_of_llama, lanes_for_gpus
from tools.bench.planned import CARDS, LIMITS, REGISTERS, Card

__all__ = ["CARDS", "LIMITS", "MODELS", "REGISTERS", "Card"]


def llama(**values: Any) -> LaneformerConfig:
    """On one GPU, from what the model's config.json says of it."""
    return config_of_llama(values, lanes_for_gpus(values, 1))


MODELS = {
    **{flavor: LaneformerConfig.from_flavor(flavor) for flavor in FLAVORS},
    "Qwen3-0.6B": llama(
        model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "Llama-3-8B": llama(
        model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    ),
    "Qwen2.5-7B": llama(
        model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768,
    ),
}  # fmt: skip
