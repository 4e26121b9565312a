"""Build AdamW with weight decay on matrices only, and restore its settings after a load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.distributed import ParallelDims


def build_laneformer_optimizers(
    model_parts: list[nn.Module], optimizer_config: Any, parallel_dims: ParallelDims
) -> OptimizersContainer:
    """Build TorchTitan's optimizers, with norm scales in a group that does not decay."""
    container = build_optimizers(model_parts, optimizer_config, parallel_dims)
    for model, optimizer in zip(model_parts, container.optimizers, strict=True):
        # by identity: tensors compare element by element
        scales = {id(p) for name, p in model.named_parameters() if name.endswith("norm.weight")}
        (group,) = optimizer.param_groups
        matrices = [p for p in group["params"] if id(p) not in scales]
        norms = [p for p in group["params"] if id(p) in scales]
        group["params"] = matrices
        optimizer.add_param_group({**group, "params": norms, "weight_decay": 0.0})
    return container


def build_clamped_lr_schedulers(
    optimizers: OptimizersContainer, section: Any, training_steps: int
) -> Any:
    """Build TorchTitan's schedules, clamped to the minimum rate."""
    # its line would go on below zero
    container = build_lr_schedulers(optimizers, section, training_steps)
    for scheduler in container.schedulers:
        # partial functions, as TorchTitan's: a schedule's state, which checkpoints hold, has the same form
        scheduler.lr_lambdas = [
            functools.partial(_clamp, factor, section.warmup_steps, section.min_lr_factor)
            for factor in scheduler.lr_lambdas
        ]
    return container


def _clamp(factor: Callable[[int], float], warmup_steps: int, lowest: float, step: int) -> float:
    return factor(step) if step < warmup_steps else max(lowest, factor(step))


def apply_optimizer_settings(
    optimizers: OptimizersContainer, schedulers: LRSchedulersContainer, optimizer_config: Any
) -> None:
    """Put this job's lr, betas, eps and weight decay in place of those that a checkpoint brought along."""
    # DCP restores them with the moments: an edited job file, or a second phase, would keep the first one's
    lr = optimizer_config.lr
    for optimizer, scheduler in zip(optimizers.optimizers, schedulers.schedulers, strict=True):
        scheduler.base_lrs = [lr] * len(optimizer.param_groups)
        # build_laneformer_optimizers: matrices, norm scales
        decays = (optimizer_config.weight_decay, 0.0)
        for group, lr_lambda, decay in zip(
            optimizer.param_groups, scheduler.lr_lambdas, decays, strict=True
        ):
            # the schedule's base, which it multiplies at every step
            group["initial_lr"] = lr
            group["lr"] = lr * lr_lambda(scheduler.last_epoch)
            group["betas"] = (optimizer_config.beta1, optimizer_config.beta2)
            group["eps"] = optimizer_config.eps
            group["weight_decay"] = decay
        # what is logged before the next step
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
