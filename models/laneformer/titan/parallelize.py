"""Activation checkpointing, compile per layer, and FSDP2 or HSDP, in TorchTitan's order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.tools.logging import logger

from ..model import Laneformer
from .fused_layer import FusedLayer
from .join_norm import FuseJoinNorm, check_kernels
from .kernel_check import with_working_kernels
from .lane_axis import OPTION, LaneAxis, localize_before_forward, shard_lanes
from .layer import TitanLayer
from .private_torch import EXCHANGES, allow_variants, checkpoint_wrapper, pass_after_autograd
from .products import lower_keep_to_nothing
from .spec import TitanLaneformer

RECOMPILE_LIMIT = 64
# Selective activation checkpointing keeps products that fan out (wq, wk, wv, w1, w3: D or F wide), the
# streams between attention and MLP, and the results of norms and attention. Products that fan in (wo, w2)
# give every lane a stream, L times D wide, and stay out. No product is computed again, and of what is
# as wide as the streams only the join in front of the MLP's output
OPS_NOT_RECOMPUTED = EXCHANGES | {
    torch.ops.laneformer.keep.default,
    torch.ops.laneformer.join.default,
    torch.ops.laneformer.rms_norm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def parallelize_laneformer(
    model: TitanLaneformer, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Prepare the (meta) model for its mesh, without kernels that fail on this machine.

    `train.job_checks` has refused all but FSDP and HSDP.
    """
    if isinstance(model.layers[0], FusedLayer):
        check_kernels()
    model = with_working_kernels(model, job_config, wrap_and_compile_layers)
    logger.info(
        f"Joins and norms: {model.model_args.join_norm}; attention: {model.model_args.attention}"
    )
    mesh, axis = meshes(parallel_dims)
    if axis is not None:
        refuse_other_layers(model)
        shard_lanes(model, axis)
    wrap_and_compile_layers(model, job_config)
    if axis is not None:
        localize_before_forward(model.tok_embeddings, *model.layers, model.norm, model.lm_head)
    apply_fsdp(model, mesh, job_config)
    return model


def refuse_other_layers(model: TitanLaneformer) -> None:
    # the lanes of an experiment's model may exchange in a way of their own
    if others := {type(part) for part in (model, *model.layers)} - {TitanLaneformer, TitanLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in others))
        raise ValueError(f"{OPTION} > 1 is not possible with {names}; set {OPTION} = 1")


def meshes(parallel_dims: ParallelDims) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of FSDP or HSDP, and that of the lanes if they are on several ranks."""
    lanes = parallel_dims.get_mesh("tp") if parallel_dims.tp_enabled else None
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        return parallel_dims.get_mesh(names), lanes
    world = parallel_dims.world_mesh
    if lanes is None:
        return world, None
    # one device is an FSDP mesh of one for the same mixed precision: autocast's sums would widen
    # streams
    axes = init_device_mesh(world.device_type, (1, lanes.size()), mesh_dim_names=("fsdp", "tp"))
    return axes["fsdp"], axes["tp"]


def wrap_and_compile_layers(model: TitanLaneformer, job_config: JobConfig) -> None:
    # what has failed may be the compiler; the job itself stays as it was asked for and is recorded
    compile_model = (
        job_config.compile.enable
        and "model" in job_config.compile.components
        and not model.fallback
    )
    checkpointing = job_config.activation_checkpoint
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        apply_selective_checkpointing(model)
    elif checkpointing.mode == "full" and isinstance(
        getattr(model.layers[0], "lanes", None), LaneAxis
    ):
        apply_selective_checkpointing(model, EXCHANGES)  # a sum comes over the network once
    elif checkpointing.mode != "none":
        apply_ac(
            model,
            checkpointing,
            model_compile_enabled=compile_model,
            base_folder=job_config.job.dump_folder,
        )
    if compile_model:
        # All layers share one code object, and Dynamo counts its variants together: the 2B layout
        # has six (which inputs a layer receives, with or without a mask) in each of two grad modes,
        # above the default limit of 8, where fullgraph turns the limit into an error at the first
        # validation.
        allow_variants(RECOMPILE_LIMIT)
        lower_keep_to_nothing()
        pass_after_autograd(FuseJoinNorm())
        # the last norm runs over the wide streams as well, and outside of any layer
        drafts = () if model.mtp is None else (model.mtp.layer,)
        for module in (*model.layers, model.norm, *drafts):
            module.compile(backend=job_config.compile.backend, fullgraph=True)
        logger.info("Compiling each layer with torch.compile")
    if job_config.compile.enable and "loss" in job_config.compile.components:
        model.lm_head.compile_backend = job_config.compile.backend


def apply_selective_checkpointing(
    model: Laneformer, not_recomputed: frozenset[Any] = OPS_NOT_RECOMPUTED
) -> None:

    def policy(context: Any, operation: Any, *operands: Any, **options: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if operation in not_recomputed
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(
            layer,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
            preserve_rng_state=False,
        )


def shard_dimension(shape: torch.Size, degree: int) -> int:
    """Return the first dimension that `degree` divides; 0 when there is none."""
    # dimension 0 of a lane matrix is L = 8: on more than eight shards most ranks would own nothing.
    # With 8 shards (HSDP, one node) each GPU stores one lane's part, and computes all lanes
    return next((dim for dim, size in enumerate(shape) if size % degree == 0), 0)


def apply_fsdp(model: Laneformer, mesh: DeviceMesh, job_config: JobConfig) -> None:
    degree = mesh.size() if mesh.ndim == 1 else mesh.size(1)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
        cast_forward_inputs=False,  # the rotary table enters each layer in float32 and has to stay so
    )

    def cut(parameter: nn.Parameter) -> Shard:
        # a lane axis that is cut already is left alone: a checkpoint's pieces are then plain blocks.
        # It is dimension 0, so the first free one is 1
        first_free_dim = int(isinstance(parameter, DTensor) and parameter.placements[0].is_shard())
        return Shard(first_free_dim + shard_dimension(parameter.shape[first_free_dim:], degree))

    def shard(modules: nn.Module | list[nn.Module], reshard: bool) -> None:
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=cut,
        )

    reshard = job_config.parallelism.fsdp_reshard_after_forward != "never"
    shard(model.tok_embeddings, reshard)
    for layer in model.layers:
        shard(layer, reshard)
    # needed again at once by the backward pass, so gathering them twice would be waste
    at_end = job_config.parallelism.fsdp_reshard_after_forward == "always"
    if model.mtp is None:
        shard([model.norm, model.lm_head], at_end)
    else:  # which calls the head once more, without the norm
        for part in (model.norm, model.lm_head, model.mtp):
            shard(part, at_end)
    shard(model, reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by the global token count
            module.set_gradient_divide_factor(1.0)
            # gloo lacks PREMUL_SUM, and NCCL is faster with SUM
            module.set_force_sum_reduction_for_comms(True)
