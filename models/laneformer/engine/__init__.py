"""The decode engine: threads or groups of multiprocessors that own lanes and walk a packed tape of weights.

No Python runs between tokens. `Engine` is imported on first use: what only a GPU needs (`engine.cuda`) works
where the C++ core is not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .batch import Batch, Update
from .decoder import GeneratedToken, Generation, PromptLogprobs, Statistics
from .options import GenerationOptions
from .running import Cancelled
from .text import StopStrings, TextStream

if TYPE_CHECKING:
    from .engine import Engine

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
    if name == "Engine":
        from .engine import Engine

        return Engine
    raise AttributeError(f"module 'laneformer.engine' has no attribute {name!r}")
