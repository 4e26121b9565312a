"""Join + RMSNorm for training as operators around the Triton kernels, with one backward kernel for both.

The forward is two operators, `join` and `rms_norm`, although one kernel does both: selective checkpointing can so keep
the streams, which the join gives, and compute their norm again, which is as wide and cheap. Where the compiler finds
both together, in the forward graph, `FuseJoinNorm` puts the single kernel in their place.

A partial output that a later layer receives as well has two gradients. `JoinNorm` hands it on as an output of its own,
so that its backward kernel adds the second gradient on the way; autograd's addition would read and write it again.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import triton
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..config import Join
from . import join_norm_kernels as kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROGRAMS_PER_SM = 4  # of the backward kernel: each sums the gradient of the scale over its tokens
ALONE, PRESENT, NO_REDUCE, PAST = (kernels.ALONE.value, *(how.code for how in Join))
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("laneformer::join", mutates_args=())
def join(h: Tensor, partial: Tensor, delayed: Tensor | None, how: int) -> Tensor:
    """`join_lanes` of model.py as one kernel: streams (B, S, L, D) in h's dtype. `how` is Join.code."""
    return _forward(h, partial, delayed, None, how, 0.0)[0]


@torch.library.custom_op("laneformer::rms_norm", mutates_args=())
def rms_norm(h: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`LaneRMSNorm` as one kernel: the normed streams in h's dtype, and 1/rms (B, S, L) float32."""
    return _forward(h, None, None, weight, ALONE, eps)[1:]


@torch.library.custom_op("laneformer::join_norm", mutates_args=())
def join_norm(
    h: Tensor, partial: Tensor, delayed: Tensor | None, how: int, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`join`, then `rms_norm` of its streams, as one kernel: streams, normed streams, 1/rms."""
    return _forward(h, partial, delayed, weight, how, eps)


@join.register_fake
def _(h: Tensor, partial: Tensor, delayed: Tensor | None, how: int) -> Tensor:
    return h.new_empty(h.shape)


@rms_norm.register_fake
def _(h: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(h.shape[:3], dtype=torch.float32)


@join_norm.register_fake
def _(
    h: Tensor, partial: Tensor, delayed: Tensor | None, how: int, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(h.shape), h.new_empty(h.shape[:3], dtype=torch.float32)


def _forward(
    h: Tensor, partial: Tensor | None, delayed: Tensor | None, weight: Tensor | None, how: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel: streams (h itself without a partial), normed and 1/rms (empty without a weight)."""
    h = _strided(h)
    lanes, hidden = h.shape[2:]
    streams = h if partial is None else h.new_empty(h.shape)
    normed = h.new_empty(h.shape if weight is not None else 0)
    rstd = h.new_empty(h.shape[:3] if weight is not None else 0, dtype=torch.float32)
    partial, delayed = (None if t is None else _strided(t) for t in (partial, delayed))
    _check(h, partial, delayed, weight)
    lane_scales = weight is not None and weight.dim() == 2
    kernels.forward_kernel[(h.shape[0] * h.shape[1],)](
        h, partial, delayed, weight, streams, normed, rstd,
        *_strides(h), *_strides(partial), *_strides(delayed), _root(how, lanes), eps,
        HOW=how, DELAYED=delayed is not None, NORM=weight is not None, LANE_SCALES=lane_scales,
        L=lanes, D=hidden, **kernels.tile(lanes, hidden, lane_scales), num_warps=kernels.WARPS,
    )  # fmt: skip
    return streams, normed, rstd


@torch.library.custom_op("laneformer::join_norm_backward", mutates_args=())
def join_norm_backward(
    d_streams: Tensor, d_normed: Tensor | None, d_handed_on: Tensor | None,
    streams: Tensor | None, weight: Tensor | None, rstd: Tensor | None, delayed: bool, how: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of h, partial, delayed and weight; empty where there is none or, for the partial, where it is h's.

    d_normed, streams, weight and 1/rms belong to the norm, and are None for a join alone. For PRESENT the partial's
    gradient is (B, S, 1, D). The scale's is summed in float32, in an order that depends on the device's SMs alone.
    """
    d_streams = _strided(d_streams)
    d_normed, d_handed_on, streams = (None if t is None else _strided(t) for t in (d_normed, d_handed_on, streams))
    _check(d_streams, d_normed, d_handed_on, streams, weight)
    lanes, hidden = d_streams.shape[2:]
    tokens = d_streams.shape[0] * d_streams.shape[1]
    programs = min(tokens, PROGRAMS_PER_SM * _processors(d_streams.device))
    d_h, d_partial, d_delayed, d_weight = _outputs(d_streams, d_handed_on is not None, weight, delayed, how)
    sums = None if weight is None else weight.new_zeros(programs, *weight.shape, dtype=torch.float32)
    lane_scales = weight is not None and weight.dim() == 2
    kernels.backward_kernel[(programs,)](
        d_streams, d_normed, d_handed_on, streams, weight, rstd, d_h, d_partial, d_delayed, sums,
        *_strides(d_streams), *_strides(d_normed), *_strides(d_handed_on), *_strides(streams),
        tokens, _root(how, lanes),
        HOW=how, DELAYED=delayed, HANDED_ON=d_handed_on is not None, NORM=weight is not None, LANE_SCALES=lane_scales,
        L=lanes, D=hidden, **kernels.tile(lanes, hidden, lane_scales), num_warps=kernels.WARPS,
    )  # fmt: skip
    if sums is not None:
        d_weight.copy_(sums.sum(0))
    return d_h, d_partial, d_delayed, d_weight


@join_norm_backward.register_fake
def _(
    d_streams: Tensor, d_normed: Tensor | None, d_handed_on: Tensor | None,
    streams: Tensor | None, weight: Tensor | None, rstd: Tensor | None, delayed: bool, how: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(d_streams, d_handed_on is not None, weight, delayed, how)


def _outputs(like: Tensor, handed_on: bool, weight: Tensor | None, delayed: bool, how: int) -> Parts:
    """Uninitialized results of the backward kernel."""
    narrow, none = (*like.shape[:2], 1, like.shape[3]), (0,)
    partial = narrow if how == PRESENT else like.shape if handed_on or how == NO_REDUCE else none
    d_weight = like.new_empty(0) if weight is None else torch.empty_like(weight)
    return (
        like.new_empty(like.shape),
        like.new_empty(partial),
        like.new_empty(like.shape if delayed else none),
        d_weight,
    )


class JoinNorm(torch.autograd.Function):
    """(h, partial, delayed, weight) -> (streams, normed, partial): a join, a norm or a join followed by a norm.

    Without a partial it is a norm, without a weight a join. The streams leave as an output, in both cases, and the
    partial if `hand_on`: whoever uses them further has to use these, so that all gradients meet in one kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, partial: Tensor | None, delayed: Tensor | None, weight: Tensor | None,
        how: int, eps: float, hand_on: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        streams = h.view_as(h) if partial is None else join(h, partial, delayed, how)
        normed = None
        if weight is not None:
            normed, rstd = rms_norm(streams, weight, eps)
            ctx.save_for_backward(streams, weight, rstd)
        ctx.how, ctx.normed, ctx.delayed, ctx.hand_on = how, weight is not None, delayed is not None, hand_on
        return streams, normed, partial.view_as(partial) if hand_on and partial is not None else None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_streams, d_normed, d_handed_on = gradients
        streams, weight, rstd = ctx.saved_tensors if ctx.normed else (None, None, None)
        apart = ctx.how == PRESENT  # its partial's gradient is narrow, what was handed on is wide
        d_h, d_partial, d_delayed, d_weight = join_norm_backward(
            d_streams, d_normed if ctx.normed else None, d_handed_on if ctx.hand_on and not apart else None,
            streams, weight, rstd, ctx.delayed, ctx.how,
        )  # fmt: skip
        if ctx.how == PRESENT:
            d_partial = d_partial + d_handed_on if ctx.hand_on else d_partial.expand_as(d_h)
        elif ctx.how == PAST and not ctx.hand_on:
            d_partial = d_h
        return (
            d_h, None if ctx.how == ALONE else d_partial, d_delayed if ctx.delayed else None,
            d_weight if ctx.normed else None, None, None, None,
        )  # fmt: skip


def fuse_join_norm() -> None:
    """Let Inductor use the kernel that does both."""
    torch._inductor.config.post_grad_custom_post_pass = FuseJoinNorm()


class FuseJoinNorm(CustomGraphPass):
    """Inductor's pass over a graph: a `join` whose streams `rms_norm` reads becomes one `join_norm`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        operations = torch.ops.laneformer
        for norm in graph.find_nodes(op="call_function", target=operations.rms_norm.default):
            joined = norm.args[0]
            if joined.target is not operations.join.default:
                continue
            with graph.inserting_before(norm):
                both = graph.call_function(operations.join_norm.default, (*joined.args, *norm.args[1:]))
                both.meta["val"] = (joined.meta["val"], *norm.meta["val"])
                streams = graph.call_function(operator.getitem, (both, 0))
                streams.meta["val"] = joined.meta["val"]
            for part in list(norm.users):
                part.args = (both, part.args[1] + 1)
            joined.replace_all_uses_with(streams)
            graph.erase_node(norm)
            graph.erase_node(joined)

    def uuid(self) -> str:
        return "laneformer join_norm 1"


def available() -> bool:
    """Whether the kernels can run: on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1)."""
    return torch.cuda.is_available() or not isinstance(kernels.forward_kernel, triton.JITFunction)


def _root(how: int, lanes: int) -> float:
    return math.sqrt(lanes) if how == NO_REDUCE else 1.0


def _strided(x: Tensor) -> Tensor:
    """x (B, S, L, D) as the kernels can read it: one stride for all tokens, columns adjacent; else a copy."""
    one_stride = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if one_stride and x.stride(3) == 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Of a token and of a lane."""
    return (0, 0) if x is None else (x.stride(1), x.stride(2))


def _check(first: Tensor, *others: Tensor | None) -> None:
    assert first.dtype in DTYPES, f"the kernels take {DTYPES}, not {first.dtype}"
    for other in others:
        assert other is None or other.dtype == first.dtype, f"streams are {first.dtype}, another tensor {other.dtype}"


def _processors(device: torch.device) -> int:
    """SMs of the device; a few programs in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
