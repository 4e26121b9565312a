"""Records how the trainer prepared its model; named as `experimental.custom_import` by test_production.py.

Rank 0 writes RUN/facts.json when training ends: what is compiled, checkpointed and cast, which no metric shows.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

import train.spec  # noqa: F401 - what custom_import names otherwise
from laneformer.titan import loss
from train.trainer import LaneformerTrainer

train_loop = LaneformerTrainer.train


def policies(model: torch.nn.Module) -> set[tuple[str, str]]:
    """(parameter dtype, reduction dtype) of all FSDP units that own parameters."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return {(str(g.mp_policy.param_dtype), str(g.mp_policy.reduce_dtype)) for g in groups if g is not None}


def recorded_train(self: LaneformerTrainer) -> None:
    (model,) = self.model_parts
    computed: set[str] = set()

    def look(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        computed.update(str(t.dtype) for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point())

    weights = sorted({str(p.dtype) for p in model.parameters()})  # now: some stay gathered after the last step
    model.lm_head.register_forward_pre_hook(look)
    train_loop(self)
    if torch.distributed.get_rank() == 0:
        facts = {
            "layers": len(model.layers),
            "checkpointed": sum(isinstance(layer, CheckpointWrapper) for layer in model.layers),
            "compiled": sum(layer._compiled_call_impl is not None for layer in model.layers),
            "norm_compiled": model.norm._compiled_call_impl is not None,
            "graphs": counters["stats"]["unique_graphs"],
            "loss_graphs": loss._compiled.cache_info().currsize,  # losses, and their gradient
            "streams": sorted(computed),
            "policies": sorted(policies(model)),
            "weights": weights,
            "async_mode": self.checkpointer.async_mode.name,
        }
        (self.run / "facts.json").write_text(json.dumps(facts))


LaneformerTrainer.train = recorded_train  # type: ignore[method-assign]
