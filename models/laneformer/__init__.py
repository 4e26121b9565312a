"""Laneformer: a lane-structured Transformer with Delayed Tensor Parallelism, and its batch-1 decode engine.

`LaneformerConfig` and `Engine` need no torch; `Laneformer`, the PyTorch model, is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import LaneformerConfig

if TYPE_CHECKING:
    from .engine import Engine
    from .model import Laneformer

__all__ = ["Engine", "Laneformer", "LaneformerConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Laneformer":
        from .model import Laneformer

        return Laneformer
    if name == "Engine":
        from .engine import Engine

        return Engine
    raise AttributeError(f"module 'laneformer' has no attribute {name!r}")
