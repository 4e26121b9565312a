"""The shipped trainer for neighbours (`experimental.custom_import = "tools.ablate.spec"`, `[variant] joins`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torchtitan.config import JobConfig

from laneformer.model import deliver, run_layers
from laneformer.titan.layer import TitanLayer
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from train.spec import SPEC, register

from .variants import FLUSHED, keep_last_partials, neighbour_layers


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
        self.flushed = model_args.joins == FLUSHED
        if self.flushed:
            keep_last_partials(self.layers, self.config)
        elif model_args.joins:
            self.layers = neighbour_layers(self.config, model_args.joins, TitanLayer)

    def from_embedding(
        self, embedding: Tensor, rope: tuple[Tensor, Tensor], masks: Any, labels: Tensor | None, trained: int | None
    ) -> Tensor:  # fmt: skip
        if not self.flushed:
            return super().from_embedding(embedding, rope, masks, labels, trained)
        h, tail = run_layers(self.layers, self.config, embedding, rope, masks)
        return self.lm_head(deliver(h, tail, self.config), self.norm, labels, trained)


ARGS = {flavor: VariantArgs(config=args.config) for flavor, args in SPEC.model_args.items()}
register(replace(SPEC, model_cls=VariantLaneformer, model_args=ARGS))
