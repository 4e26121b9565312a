"""The decode engine: C++ threads that own lanes and walk a packed tape of weights, without Python between tokens."""

from .engine import Engine
from .options import GenerationOptions
from .results import GeneratedToken, Generation, PromptLogprobs, Statistics
from .text import StopStrings, TextStream

__all__ = [
    "Engine",
    "GeneratedToken",
    "Generation",
    "GenerationOptions",
    "PromptLogprobs",
    "Statistics",
    "StopStrings",
    "TextStream",
]
