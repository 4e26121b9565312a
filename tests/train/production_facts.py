"""Record how the trainer prepared its model; test_production.py loads it by custom_import.

Rank 0 writes RUN/facts.json when training ends: what is compiled, checkpointed and cast, timeouts,
and what a step waits for. With LANEFORMER_FAULTS the faults of `tests.train.faults` happen, too.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import checkpoint
from torchtitan.distributed import utils as dist_utils

import train.spec  # noqa: F401 - what custom_import names otherwise
from laneformer.titan import loss
from train.trainer import LaneformerTrainer

if not torch.cuda.is_available():
    # the staging of async_with_pinned_mem, and its process that writes, without pinned memory and
    # streams
    checkpoint.StagingOptions = lambda *settings: StagingOptions(False, True, True, False)
if "LANEFORMER_FAULTS" in os.environ:
    import tests.train.faults  # noqa: F401

train_loop, set_pg_timeouts = LaneformerTrainer.train, dist_utils.set_pg_timeouts
timeouts_s: list[float] = []
all_reduce = torch.distributed.all_reduce
# exchanges of gradients between replicas in each step; the last entry is of the one under way
reductions = [0]


def count_all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    # metrics are exchanged in float64
    reductions[-1] += tensor.dtype == torch.float32
    return all_reduce(tensor, *arguments, **options)


def record_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    timeouts_s.append(timeout.total_seconds())
    set_pg_timeouts(timeout, parallel_dims)


def record_order(trainer: LaneformerTrainer) -> list[str]:
    # the optimizer may move the weights only when they are staged
    order: list[str] = []
    wait, move = trainer.checkpointer.maybe_wait_for_staging, trainer.optimizers.step

    def record_wait() -> None:
        wait()
        order.append("staging is over")

    def record_move(*arguments: Any, **options: Any) -> None:
        order.append("optimizer")
        reductions.append(0)
        move(*arguments, **options)

    trainer.checkpointer.maybe_wait_for_staging = record_wait
    trainer.optimizers.step = record_move
    return order


def policies(model: torch.nn.Module) -> set[tuple[str, str]]:
    """Return (parameter dtype, reduction dtype) of all FSDP units that own parameters."""
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    units = [state._mp_policy for state in states if state._fsdp_param_group is not None]
    return {(str(policy.param_dtype), str(policy.reduce_dtype)) for policy in units}


def record_training(self: LaneformerTrainer) -> None:
    (model,) = self.model_parts
    computed: set[str] = set()

    def look(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        computed.update(
            str(t.dtype) for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point()
        )

    # now: some stay gathered after the last step
    weights = sorted({str(p.dtype) for p in model.parameters()})
    model.lm_head.register_forward_pre_hook(look)
    order = record_order(self)
    train_loop(self)
    if torch.distributed.get_rank() == 0:
        facts = {
            "layers": len(model.layers),
            "checkpointed": sum(isinstance(layer, CheckpointWrapper) for layer in model.layers),
            "compiled": sum(layer._compiled_call_impl is not None for layer in model.layers),
            "norm_compiled": model.norm._compiled_call_impl is not None,
            "graphs": counters["stats"]["unique_graphs"],
            # losses, and their gradient
            "loss_graphs": loss._compile.cache_info().currsize,
            "streams": sorted(computed),
            "policies": sorted(policies(model)),
            "weights": weights,
            "async_mode": self.checkpointer.async_mode.name,
            "order": order,
            "timeouts_s": timeouts_s,
            "reductions": reductions[:-1],
            "allocator": os.environ["PYTORCH_CUDA_ALLOC_CONF"],
        }
        (self.run / "facts.json").write_text(json.dumps(facts))


torch.distributed.all_reduce = count_all_reduce
dist_utils.set_pg_timeouts = record_pg_timeouts
LaneformerTrainer.train = record_training
