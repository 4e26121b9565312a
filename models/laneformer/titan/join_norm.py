"""Join and RMSNorm for training: operators around the Triton kernels, with one backward kernel.

B batch   S sequence   L lanes   D hidden
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import triton
from torch import Tensor

from . import join_norm_kernels as kernels
from .private_torch import GraphPass

PROGRAMS_PER_SM = 4  # of the backward kernel: each sums the gradient of the scale over its tokens
Parts = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("laneformer::join", mutates_args=())
def join(h: Tensor, partial: Tensor, delayed: Tensor | None) -> Tensor:
    """Compute `join_lanes` of model.py for Join.PAST: streams (B, S, L, D) in h's dtype."""
    return _forward(h, partial, delayed, None, 0.0)[0]


@torch.library.custom_op("laneformer::rms_norm", mutates_args=())
def rms_norm(h: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `LaneRMSNorm`: the normed streams in h's dtype, and 1/rms (B, S, L) float32."""
    return _forward(h, None, None, weight, eps)[1:]


@torch.library.custom_op("laneformer::join_norm", mutates_args=())
def join_norm(
    h: Tensor, partial: Tensor, delayed: Tensor | None, weight: Tensor, eps: float
) -> Parts:
    """Compute `join`, then `rms_norm` of its streams, in one kernel: streams, normed streams, 1/rms."""
    return _forward(h, partial, delayed, weight, eps)


def _allocate_parts(h: Tensor, joined: bool, normed: bool) -> Parts:
    """Return streams (h itself without a join), normed streams and 1/rms (both empty without a norm)."""
    streams = h.new_empty(h.shape) if joined else h
    shapes = (h.shape, h.shape[:3]) if normed else (0, 0)
    return streams, h.new_empty(shapes[0]), h.new_empty(shapes[1], dtype=torch.float32)


join.register_fake(lambda h, partial, delayed: _allocate_parts(h, True, False)[0])
rms_norm.register_fake(lambda h, weight, eps: _allocate_parts(h, False, True)[1:])
join_norm.register_fake(lambda h, partial, delayed, weight, eps: _allocate_parts(h, True, True))


def _forward(
    h: Tensor, partial: Tensor | None, delayed: Tensor | None, weight: Tensor | None, eps: float
) -> Parts:
    h, partial, delayed = (_readable_by_kernels(t) for t in (h, partial, delayed))
    streams, normed, rstd = _allocate_parts(h, partial is not None, weight is not None)
    kernels.forward_kernel[(h.shape[0] * h.shape[1],)](
        h,
        partial,
        delayed,
        weight,
        streams,
        normed,
        rstd,
        *_strides(h),
        *_strides(partial),
        *_strides(delayed),
        eps,
        JOIN=partial is not None,
        DELAYED=delayed is not None,
        **_shape(h, weight),
    )
    return streams, normed, rstd


@torch.library.custom_op("laneformer::join_norm_backward", mutates_args=())
def join_norm_backward(
    d_streams: Tensor,
    d_normed: Tensor | None,
    d_handed_on: Tensor | None,
    streams: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor | None,
    delayed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of h, partial, delayed and weight.

    A gradient is empty where there is none, or where it equals another: h's is d_streams for a join
    alone, the partial's is h's if nothing was handed on.

    Args:
        d_normed, streams, weight, rstd: Of the norm; None for a join alone.
    """
    d_streams, d_normed, d_handed_on, streams = (
        _readable_by_kernels(t) for t in (d_streams, d_normed, d_handed_on, streams)
    )
    tokens = d_streams.shape[0] * d_streams.shape[1]
    programs = min(tokens, PROGRAMS_PER_SM * _processors(d_streams.device))
    d_h, d_partial, d_delayed, d_weight = _outputs(
        d_streams, d_handed_on is not None, weight, delayed
    )
    # the scale's gradient is summed in float32, in an order that depends on the device's SMs alone
    sums = (
        None if weight is None else weight.new_zeros(programs, *weight.shape, dtype=torch.float32)
    )
    kernels.backward_kernel[(programs,)](
        d_streams,
        d_normed,
        d_handed_on,
        streams,
        weight,
        rstd,
        d_h,
        d_partial,
        d_delayed,
        sums,
        *_strides(d_streams),
        *_strides(d_normed),
        *_strides(d_handed_on),
        *_strides(streams),
        tokens,
        DELAYED=delayed,
        HANDED_ON=d_handed_on is not None,
        **_shape(d_streams, weight),
    )
    if sums is not None:
        d_weight.copy_(sums.sum(0))
    return d_h, d_partial, d_delayed, d_weight


join_norm_backward.register_fake(
    lambda d_streams, d_normed, d_handed_on, streams, weight, rstd, delayed: _outputs(
        d_streams, d_handed_on is not None, weight, delayed
    )
)


def _outputs(
    like: Tensor, handed_on: bool, weight: Tensor | None, delayed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_h, d_partial, d_delayed = (
        like.new_empty(like.shape if has else 0) for has in (weight is not None, handed_on, delayed)
    )
    return (
        d_h,
        d_partial,
        d_delayed,
        like.new_empty(0) if weight is None else torch.empty_like(weight),
    )


class JoinNorm(torch.autograd.Function):
    """A join, a norm, or both: (h, partial, delayed, weight) -> (streams, normed, partial).

    The streams are h + partial + (delayed's sum over lanes - delayed), all (B, S, L, D); h alone without
    a partial. normed is None without a weight, the returned partial unless `hand_on`. Later uses of
    streams or partial must take the returned ones, so that all their gradients meet in one kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        partial: Tensor | None,
        delayed: Tensor | None,
        weight: Tensor | None,
        eps: float,
        hand_on: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        streams = h.view_as(h) if partial is None else join(h, partial, delayed)
        normed = None
        if weight is not None:
            normed, rstd = rms_norm(streams, weight, eps)
            ctx.save_for_backward(streams, weight, rstd)
        ctx.joined, ctx.delayed, ctx.normed = (
            partial is not None,
            delayed is not None,
            weight is not None,
        )
        # a partial that a later layer also receives has two gradients: handed on as an output, it
        # gets their sum in the backward kernel, where autograd would read and write it again
        ctx.hand_on = hand_on
        return (
            streams,
            normed,
            partial.view_as(partial) if hand_on and partial is not None else None,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_streams, d_normed, d_handed_on = gradients
        if not (ctx.normed or ctx.delayed or ctx.hand_on):
            return d_streams, d_streams, None, None, None, None
        d_h, d_partial, d_delayed, d_weight = join_norm_backward(
            d_streams,
            d_normed if ctx.normed else None,
            d_handed_on if ctx.hand_on else None,
            *(ctx.saved_tensors if ctx.normed else (None, None, None)),
            ctx.delayed,
        )
        d_h = d_h if ctx.normed else d_streams
        d_partial = d_partial if ctx.hand_on else d_h
        gradients_if_used = (
            (d_h, True),
            (d_partial, ctx.joined),
            (d_delayed, ctx.delayed),
            (d_weight, ctx.normed),
        )
        return (*(gradient if has else None for gradient, has in gradients_if_used), None, None)


class FuseJoinNorm(GraphPass):
    """Inductor pass that fuses a `join` with the `rms_norm` that reads its streams."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        operations = torch.ops.laneformer
        for norm in graph.find_nodes(op="call_function", target=operations.rms_norm.default):
            join = norm.args[0]
            if join.target is not operations.join.default:
                continue
            with graph.inserting_before(norm):
                join_norm = graph.call_function(
                    operations.join_norm.default, (*join.args, *norm.args[1:])
                )
                join_norm.meta["val"] = (join.meta["val"], *norm.meta["val"])
                streams = graph.call_function(operator.getitem, (join_norm, 0))
                streams.meta["val"] = join.meta["val"]
            for part in list(norm.users):
                part.args = (join_norm, part.args[1] + 1)
            join.replace_all_uses_with(streams)
            graph.erase_node(norm)
            graph.erase_node(join)

    def uuid(self) -> str:
        return "laneformer join_norm 1"


def check_kernels() -> None:
    if not torch.cuda.is_available() and isinstance(kernels.forward_kernel, triton.JITFunction):
        raise ValueError(
            "model.join_norm = 'triton' needs a GPU, and torch sees none; use 'auto' or 'plain'"
        )


def _readable_by_kernels(x: Tensor | None) -> Any:
    """Return x (B, S, L, D) with one stride for all tokens and adjacent columns, copied if needed."""
    if x is None:
        return None
    one_stride = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if one_stride and x.stride(3) == 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, int]:
    # of a token and of a lane
    return (0, 0) if x is None else (x.stride(1), x.stride(2))


def _shape(x: Tensor, weight: Tensor | None) -> dict[str, Any]:
    lanes, hidden = x.shape[2:]
    lane_scales = weight is not None and weight.dim() == 2
    choices = {"NORM": weight is not None, "LANE_SCALES": lane_scales, "L": lanes, "D": hidden}
    return {**choices, **kernels.tile(lanes, hidden, lane_scales), "num_warps": kernels.WARPS}


def _processors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
