"""What TorchTitan needs of the Laneformer; the only part of the package that imports torchtitan."""

from .loss import build_token_loss
from .parallelize import parallelize_laneformer
from .spec import LaneformerArgs, TitanLaneformer, model_args_by_flavor
from .state_dict_adapter import LaneformerStateDictAdapter

__all__ = [
    "LaneformerArgs",
    "LaneformerStateDictAdapter",
    "TitanLaneformer",
    "build_token_loss",
    "model_args_by_flavor",
    "parallelize_laneformer",
]
