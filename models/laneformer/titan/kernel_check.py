"""Check at the start of a job that its kernels compute what the plain layer does.

One layer of the job's own shapes goes forward and backward, prepared as the job prepares its layers, so
that Inductor's cache serves the job later. Where the kernels fail on any rank, all ranks train with
plain layers.

    S sequence   L lanes   D hidden
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype

from ..joins import MODULES
from ..positions import rope_table
from .attention import training_masks
from .float8 import Float8, use_float8
from .fused_layer import FusedLayer
from .layer import TitanLayer
from .private_torch import forget_compiled

MARGIN = 4.0  # another order of summation changes a rounding error's value, hardly its size
LONGEST = 4096  # positions; SDPA may materialize the scores of one row
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
Prepare = Callable[[Any, JobConfig], None]


def with_working_kernels(model: Any, job: JobConfig, prepare: Prepare) -> Any:
    """Return the (meta) model, or one of plain layers where its kernels fail on this machine.

    `fallback` of the result has the reason, as has a warning; such layers are not compiled either.
    Raises what the plain layer raises.

    Args:
        prepare: `wrap_and_compile_layers`, what the job does to a model's layers.
    """
    args, compiled = model.model_args, job.compile.enable and "model" in job.compile.components
    is_float8 = model.float8 is not None and not model.float8.emulate
    kernels = is_float8 or (args.attention, args.join_norm) != ("sdpa", "plain")
    own_layers = [
        i for i, layer in enumerate(model.layers) if type(layer) in (TitanLayer, FusedLayer)
    ]
    # plain kernels without a GPU need no check
    if not own_layers or not (kernels or (compiled and torch.cuda.is_available())):
        return model
    # the last one with a window has a mask, and delayed outputs to add
    layer = max(own_layers, key=lambda i: (i in model.config.swa_layers, i))
    problems = [layer_problem(model, layer, job, prepare)]
    if dist.is_initialized():
        problems *= dist.get_world_size()
        dist.all_gather_object(problems, problems[0])
    forget_compiled()  # the job's shapes are the first that its layers see
    failed_rank = next((rank for rank, problem in enumerate(problems) if problem), None)
    if failed_rank is None:
        return model
    # float8 products that fail are the job's type's: to emulate them takes longer than that
    plain = plain_model(model, job, None if is_float8 else model.float8)
    plain.fallback = (
        f"model.attention = {args.attention}, model.join_norm = {args.join_norm} failed: {problems[failed_rank]} "
        f"(on rank {failed_rank}); this job trains with plain layers instead, more slowly"
    )
    logger.warning(f"Kernels: {plain.fallback}")
    return plain


def plain_model(model: Any, job: JobConfig, float8: Float8 | None) -> Any:
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job.training.dtype]):
        plain = type(model)(replace(model.model_args, attention="sdpa", join_norm="plain"))
        if float8 is not None:
            use_float8(plain, float8)
    return plain


def layer_problem(model: Any, layer: int, job: JobConfig, prepare: Prepare) -> str:
    """Return why the kernels cannot be used: an exception, or their error; "" if all is well."""
    dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
    plain = plain_model(model, job, model.float8 and replace(model.float8, emulate=True))
    expected = run_layer(plain, layer, job, WIDER[dtype])
    # the plain layer in the job's type shows how far that type may be off. All rows are equal, so
    # the reference computes one, eager, with SDPA, in the next wider type
    rounding = largest_error(run_layer(plain, layer, job, dtype), expected)
    allowed = MARGIN * max(rounding, torch.finfo(dtype).eps)
    try:
        error = largest_error(
            run_layer(model, layer, job, dtype, job.training.local_batch_size, prepare), expected
        )
    except Exception as exception:
        return f"a layer's kernels fail: {type(exception).__name__}: {' '.join(str(exception).split())[:300]}"
    return (
        "" if error <= allowed else f"layer {layer} is off by {error:.2g}, {allowed:.2g} is allowed"
    )


def run_layer(
    model: Any,
    index: int,
    job: JobConfig,
    dtype: torch.dtype,
    rows: int = 1,
    prepare: Prepare | None = None,
) -> list[Tensor]:
    """Return a layer's outputs and its inputs' gradients for the first row, and the weights' gradients.

    The weights' gradients are a mean over the rows.
    """
    config, length, model = model.config, min(job.training.seq_len, LONGEST), copy.deepcopy(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        values = mean + scale * torch.randn(*shape, generator=generator, device=device)
        return values.bfloat16().to(dtype)  # the same numbers in every type

    model.layers = nn.ModuleList([model.layers[index]])
    if prepare is not None:
        prepare(model, job)
    layer = model.layers[0].to_empty(device=device).to(dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            # scales that are all one would hide a missing one
            moments = (
                (0.25, 1.0) if name.endswith("norm.weight") else (parameter.shape[-1] ** -0.5, 0.0)
            )
            parameter.copy_(draw(*parameter.shape, scale=moments[0], mean=moments[1]))

    # of the streams, and of what is delayed
    lanes = [1 if config.equal_streams(index) else config.num_lanes]
    lanes += [config.num_lanes * config.adds_delayed(index, module) for module in MODULES]
    inputs = [draw(1, length, n, config.hidden_size).repeat(rows, 1, 1, 1) for n in lanes if n]
    leaves = iter([x.requires_grad_() for x in inputs])
    h, *delayed = (next(leaves) if n else None for n in lanes)
    positions = torch.arange(length, device=device)
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    documents = ids + (positions >= length // 3) if job.model.mask_documents else None
    mask = training_masks(config, ids, model.model_args.attention, documents)[index]
    streams, partials = layer(h, tuple(delayed), rope_table(config, positions), mask)

    outputs = [out for out in (streams, *partials) if out is not None]
    seeds = [draw(1, *out.shape[1:]).expand_as(out) for out in outputs]
    gradients = torch.autograd.grad(outputs, [*inputs, *layer.parameters()], seeds)
    row_tensors = [*outputs, *gradients[: len(inputs)]]
    return [x[0].detach() for x in row_tensors] + [x / rows for x in gradients[len(inputs) :]]


def largest_error(tensors: list[Tensor], expected: list[Tensor]) -> float:
    # in units of a tensor's largest element; NaN if one is
    pairs = zip(tensors, expected, strict=True)
    errors = [(ours.to(wide.dtype) - wide).abs().max() / wide.abs().max() for ours, wide in pairs]
    return float(torch.stack(errors).max())
