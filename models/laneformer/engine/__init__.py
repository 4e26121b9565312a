"""The decode engine: threads or groups of multiprocessors that own lanes and walk a packed tape of weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Batch, Update
    from .decoder import GeneratedToken, Generation, PromptLogprobs, Statistics
    from .engine import Engine
    from .options import GenerationOptions
    from .running import Cancelled
    from .text import StopStrings, TextStream

# imported on first use: shapes, structures and the compiler of `engine.cuda` need neither the C++
# core nor numpy; its executor needs both
HOMES = {
    "batch": ("Batch", "Update"),
    "decoder": ("GeneratedToken", "Generation", "PromptLogprobs", "Statistics"),
    "engine": ("Engine",),
    "options": ("GenerationOptions",),
    "running": ("Cancelled",),
    "text": ("StopStrings", "TextStream"),
}
__all__ = [
    "Batch",
    "Cancelled",
    "Engine",
    "GeneratedToken",
    "Generation",
    "GenerationOptions",
    "PromptLogprobs",
    "Statistics",
    "StopStrings",
    "TextStream",
    "Update",
]


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{home}", __name__), name)
    raise AttributeError(f"module 'laneformer.engine' has no attribute {name!r}")
