"""The Laneformer as TorchTitan sees a model: arguments by flavor, FLOPs for MFU, construction and initialisation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.protocols.model import BaseModelArgs

from ..config import FLAVORS, LaneformerConfig
from ..model import Laneformer, init_parameter


def flops_per_token(config: LaneformerConfig, seq_len: int) -> int:
    """Training FLOPs per token: 6 for every weight that multiplies, 12 d for every head and key that a query sees.

    Keys outside the causal triangle or the sliding window are not counted, and neither is recomputation.
    """
    counts = config.parameter_count()
    matrices = counts["total"] - counts["embedding"] - counts["norms"]
    keys = 0.0
    for layer in range(config.num_hidden_layers):
        window = min(config.window(layer) or seq_len, seq_len)
        keys += (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
    return int(6 * matrices + 12 * config.hidden_size * keys)


@dataclass
class LaneformerArgs(BaseModelArgs):
    """Architecture and initialisation seed; TorchTitan logs it and asks it for parameters and FLOPs."""

    config: LaneformerConfig = field(default_factory=LaneformerConfig)
    init_seed: int = 0

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Take `[architecture]` overrides, the seed, and check the sequence length. Raises ValueError."""
        section = vars(job_config.architecture)
        overrides = {key: value for key, value in section.items() if value is not None}
        self.config = dataclasses.replace(self.config, **overrides)
        self.init_seed = job_config.debug.seed or 0
        longest = self.config.max_position_embeddings
        if job_config.training.seq_len > longest:
            raise ValueError(
                f"training.seq_len = {job_config.training.seq_len} exceeds max_position_embeddings = {longest} "
                f"of flavor {job_config.model.flavor!r}; use at most {longest}"
            )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return sum(p.numel() for p in model.parameters()), flops_per_token(self.config, seq_len)


def model_args_by_flavor() -> dict[str, LaneformerArgs]:
    return {name: LaneformerArgs(config=LaneformerConfig.from_flavor(name)) for name in FLAVORS}


class TitanLaneformer(Laneformer):
    """The same module with the constructor and `init_weights` of TorchTitan's ModelProtocol, a protocol by shape."""

    def __init__(self, model_args: LaneformerArgs):
        super().__init__(model_args.config)
        self.model_args = model_args

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        """Draw the parameters where they lie; there are no buffers to place."""
        for name, parameter in self.named_parameters():
            # checkpointed layers have a wrapper in their names, which must not change the numbers drawn
            plain = name.replace("_checkpoint_wrapped_module.", "")
            init_parameter(self.config, plain, parameter, self.model_args.init_seed)
