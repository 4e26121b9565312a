"""What TorchTitan needs of the Laneformer; the only part of the package that imports torchtitan."""

from .parallelize import parallelize_laneformer
from .spec import LaneformerArgs, LaneformerStateDictAdapter, TitanLaneformer, model_args_by_flavor

__all__ = [
    "LaneformerArgs",
    "LaneformerStateDictAdapter",
    "TitanLaneformer",
    "model_args_by_flavor",
    "parallelize_laneformer",
]
