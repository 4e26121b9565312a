"""The decode engine: threads or groups of multiprocessors that own lanes and walk a packed tape of weights.

No Python runs between tokens. All names are imported on first use: what only a GPU needs (`engine.cuda`)
works where the C++ core is not built, and its shapes and structures where numpy is missing.
"""

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
