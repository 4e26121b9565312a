"""The shipped trainer for neighbours (`custom_import = "tools.ablate.spec"`, `[variant] joins`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torchtitan.config import JobConfig

from laneformer.titan.layer import TitanLayer
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from train.spec import SPEC, register

from .variants import neighbour_layers


@dataclass
class VariantArgs(LaneformerArgs):
    joins: str = ""

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        super().update_from_config(job_config, **kwargs)
        self.joins = job_config.variant.joins


class VariantLaneformer(TitanLaneformer):
    """The trainer's model, or a neighbour on the modules of its layers."""

    def __init__(self, model_args: VariantArgs):
        super().__init__(model_args)
        if model_args.joins:
            self.layers = neighbour_layers(self.config, model_args.joins, TitanLayer)


ARGS = {flavor: VariantArgs(config=args.config) for flavor, args in SPEC.model_args.items()}
register(replace(SPEC, model_cls=VariantLaneformer, model_args=ARGS))
