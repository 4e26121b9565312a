"""Who cannot run a config says what it is of it that it has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .config import LaneformerConfig


def refuse_unsupported(config: LaneformerConfig, who: str) -> None:
    """ValueError, with their names, for what other families' models have and `who` has not."""
    tied = {"tie_word_embeddings": True} if config.tie_word_embeddings else {}
    refuse(config.borrowed() | tied, who, "the engine and the plain PyTorch model do")


def refuse_variant(config: LaneformerConfig, who: str, fix: str, has: Sequence[str] = ()) -> None:
    """ValueError, with their names, for what a variant has and `who` has not, which has these of its fields."""
    found = config.variant.differences()
    refuse({name: value for name, value in found.items() if name not in has}, who, fix)


def refuse(found: dict[str, Any], who: str, fix: str) -> None:
    if found:
        listing = ", ".join(f"{name} = {value}" for name, value in found.items())
        raise ValueError(f"{who} does not support {listing}; {fix}")
