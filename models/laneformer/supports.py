"""Names the config features that a backend does not support."""

from __future__ import annotations

from typing import Any

from .config import LaneformerConfig


def refuse_unsupported(config: LaneformerConfig, who: str) -> None:
    """ValueError, with their names, for what other families' models have and `who` has not."""
    tied_field = {"tie_word_embeddings": True} if config.tie_word_embeddings else {}
    refuse(config.extensions() | tied_field, who, "the engine and the plain PyTorch model do")


def refuse_other_layers(config: LaneformerConfig, who: str, fix: str) -> None:
    """ValueError, with their names, for fields that need layers of their own (llama/layers.py)."""
    refuse(config.needs_other_layers(), who, fix)


def refuse(fields: dict[str, Any], who: str, fix: str) -> None:
    if fields:
        listing = ", ".join(f"{name} = {value}" for name, value in fields.items())
        raise ValueError(f"{who} does not support {listing}; {fix}")
