"""The decode engine: C++ threads that own lanes and walk a packed tape of weights, without Python between tokens."""

from .engine import Engine
from .options import GenerationOptions

__all__ = ["Engine", "GenerationOptions"]
