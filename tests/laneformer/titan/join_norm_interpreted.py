"""Tests of the join and norm kernels in Triton's interpreter against the model's formulas in float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from laneformer.joins import Join
from laneformer.model import join_lanes
from laneformer.titan import join_norm_kernels
from laneformer.titan.fused_layer import FusedLayer
from laneformer.titan.join_norm import FuseJoinNorm, JoinNorm

# The interpreter runs the kernels' code with NumPy and cannot show what a GPU does. It must be
# selected before Triton is imported, so test_join_norm.py runs these tests in a separate process.
EPS = 1e-5
OPERATIONS = torch.ops.laneformer


# --- one join, one norm


def exact(
    h: Tensor,
    partial: Tensor | None,
    delayed: Tensor | None,
    weight: Tensor | None,
    how: Join | None,
) -> Any:
    """Return streams, normed streams and the partial."""
    streams = h if how is None else join_lanes(h, partial, how, delayed)
    normed = None
    if weight is not None:
        normed = streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + EPS) * weight
    return streams, normed, None if partial is None else partial * 1


def draw(
    how: Join | None, lanes: int, dim: int, dtype: torch.dtype, delay: bool, scale: str, device: str
) -> Any:
    """Return [h, partial, delayed, weight], each a tensor or None, and three gradients."""
    generator = torch.Generator().manual_seed(lanes + dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    h = normal(2, 3, lanes, dim)
    # the lane axis is the first in memory, as a product leaves it
    partial = None if how is None else normal(lanes, 2, 3, dim).permute(1, 2, 0, 3)
    delayed = normal(2, 3, lanes, dim) if delay else None
    weight = {"none": None, "shared": normal(dim), "lane": normal(lanes, dim)}[scale]
    gradients = [normal(2, 3, lanes, dim) for _ in range(3)]
    return [h, partial, delayed, weight], gradients


def results(
    inputs: list[Tensor | None], gradients: list[Tensor], how: Join | None, function: Any
) -> list[Tensor]:
    """Return the outputs (streams, normed) of `function`, then the gradients of all inputs."""
    # the third output uses the partial a second time
    # autograd.grad needs leaves of its own for each run
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    outputs = [t for t in function(*leaves, how) if t is not None]
    inputs_used = [t for t in leaves if t is not None]
    return [*outputs[:2], *torch.autograd.grad(outputs, inputs_used, gradients[: len(outputs)])]


def run_fused(
    h: Tensor,
    partial: Tensor | None,
    delayed: Tensor | None,
    weight: Tensor | None,
    how: Join | None,
) -> Any:
    if how is None:
        return JoinNorm.apply(h, None, None, weight, EPS, False)
    layer: Any = SimpleNamespace(joins=[how], sends=[True])
    norm: Any = None if weight is None else SimpleNamespace(weight=weight, eps=EPS)
    return FusedLayer.join(layer, 0, h, partial, delayed, norm)


def largest_error(
    actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype, how: Join | None = None
) -> float:
    """Return the largest error in units of what rounding explains, relative to each result's maximum."""
    # Half an eps for each rounding: of the result, of its inputs (the norm reads rounded streams)
    # and
    # of the partial where a plain operation prepares it. Sums of a few dozen values add a few eps
    # of
    # float32.
    roundings = 3 if how in (Join.PRESENT, Join.NO_REDUCE) else 2
    allowed = roundings / 2 * torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps
    assert all(a.dtype == dtype for a in actual)
    return max(
        ((a.cpu().double() - b).abs().max() / b.abs().max() / allowed).item()
        for a, b in zip(actual, expected, strict=True)
    )


def kernel_error(
    how: Join | None,
    lanes: int,
    dim: int,
    dtype: torch.dtype,
    delay: bool,
    scale: str,
    device: str = "cpu",
    reference: Any = exact,
) -> float:
    inputs, gradients = draw(how, lanes, dim, dtype, delay, scale, device)
    actual = results(inputs, gradients, how, run_fused)
    wide = [None if t is None else t.cpu().double() for t in inputs]
    expected = results(wide, [g.cpu().double() for g in gradients], how, reference)
    return largest_error(actual, expected, dtype, how)


CASES = [
    (how, delay, scale)
    for how, delay, scale in itertools.product(
        (None, *Join), (False, True), ("none", "shared", "lane")
    )
    if (how == Join.PAST or not delay) and not (how is None and scale == "none")
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lanes", [8, 1, 2])
def test_every_join_and_norm_is_the_models(lanes, dtype):
    # six tokens for four programs of the backward kernel; 24 columns are no power of two
    for how, delay, scale in CASES:
        if delay and lanes == 1:
            continue  # there are no other lanes
        assert kernel_error(how, lanes, 24, dtype, delay, scale) <= 1, (how, delay, scale)


def own_lane_twice(h: Tensor, partial: Tensor, delayed: Tensor, weight: Tensor, how: Join) -> Any:
    return exact(h + delayed, partial, delayed, weight, how)


def leave_unscaled(h: Tensor, partial: Tensor, delayed: Tensor, weight: Tensor, how: Join) -> Any:
    streams, _, again = exact(h, partial, delayed, weight, how)
    # changes the gradient of the scale, and no value
    wrong = streams.detach() * (weight - weight.detach())  # zero, but for its gradient
    return streams, exact(h, partial, delayed, weight.detach(), how)[1] + wrong, again


def test_faults_would_be_seen():
    # a lane's own delayed output added twice; the gradient of a scale without 1/rms
    for fault in (own_lane_twice, leave_unscaled):
        assert kernel_error(Join.PAST, 8, 24, torch.bfloat16, True, "shared", reference=fault) > 5


def test_several_tiles(monkeypatch):
    # the last tile lies partly outside the hidden axis; the 2B model's 3,072 columns are 3 x 1,024
    monkeypatch.setattr(join_norm_kernels, "COLUMNS", 16)
    for scale in ("shared", "lane"):
        assert kernel_error(Join.PAST, 3, 40, torch.float32, True, scale) <= 1


# --- in a graph of the compiler


def test_join_and_norm_in_one_graph_become_one_kernel():
    from torch.fx.experimental.proxy_tensor import make_fx

    def both(h: Tensor, partial: Tensor, delayed: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        streams = OPERATIONS.join(h, partial, delayed)
        normed, rstd = OPERATIONS.rms_norm(streams, weight, EPS)
        return 2 * streams, 3 * normed, rstd, OPERATIONS.rms_norm(h, weight, EPS)[0]

    inputs, _ = draw(Join.PAST, 2, 24, torch.float32, True, "shared", "cpu")
    module = make_fx(both)(*inputs)
    FuseJoinNorm()(module.graph)
    module.graph.lint()
    module.recompile()
    # the second norm reads other streams and must stay separate
    called = [str(node.target) for node in module.graph.nodes if "laneformer" in str(node.target)]
    assert sorted(called) == ["laneformer.join_norm.default", "laneformer.rms_norm.default"]
    for actual, expected in zip(module(*inputs), both(*inputs), strict=True):
        assert torch.equal(actual, expected)
