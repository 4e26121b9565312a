"""Tests of float8 products against float64 within computed bounds, of what the backward pass saves, and of refusals."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition, nop
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from laneformer import LaneformerConfig
from laneformer.titan import float8
from laneformer.titan.float8 import RECIPES, Float8, check_device, check_shapes, use_float8
from laneformer.titan.parallelize import apply_selective_checkpointing
from laneformer.titan.products import lower_keep_to_nothing
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from tests.laneformer.titan.titan_assets import SHAPE, Results, draw_tokens, train

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# the largest error of rounding: relative to a normal value, and of values too small to be normal
RELATIVE = {E4M3: 2.0**-4, E5M2: 2.0**-3}
ABSOLUTE = {E4M3: 2.0**-10, E5M2: 2.0**-17}
LANES, TOKENS, INPUTS, OUTPUTS = 3, 48, 64, 32
# a layer of equal streams whose partial outputs are summed, and one of lanes
CONFIG = LaneformerConfig.from_flavor(
    "tiny", **SHAPE | {"intermediate_size": 128, "use_early_comm": True}
)
SEQ_LEN = 32


class Products(NamedTuple):
    """A product and its gradients: y (1, T, L, O), d_x (1, T, L, K), d_w (L, O, K)."""

    y: Tensor
    d_x: Tensor
    d_w: Tensor


def draw_tensors() -> tuple[Tensor, Tensor, Tensor]:
    # rows and columns differ in size, so the scale of another row or lane is off by factors
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator)
        for axis, size in enumerate(shape):
            # a random factor for each index of the axis
            of_axis = torch.randn(size, generator=generator).exp2()
            values *= of_axis.reshape(*(-1 if i == axis else 1 for i in range(len(shape))))
        return values

    return (
        draw(1, TOKENS, LANES, INPUTS),
        draw(LANES, OUTPUTS, INPUTS),
        draw(1, TOKENS, LANES, OUTPUTS),
    )


def compute_products(multiply: Float8) -> Products:
    x, weight, gradient = draw_tensors()
    x.requires_grad_(), weight.requires_grad_()
    y = multiply(x, weight)
    y.backward(gradient)
    return Products(y.detach(), x.grad, weight.grad)


def exact_and_bounds(recipe) -> tuple[Products, Products]:
    """Return the products in float64 and the largest allowed error of each element."""
    x, weight, gradient = (t.double() for t in draw_tensors())
    rows, gradients = x[0].transpose(0, 1), gradient[0].transpose(0, 1)  # (L, T, ...)

    def rounding(values, dtype, turned):
        """Return the largest rounding error of each value."""
        # transposed values were rounded by the other axis' scales, too, and may be subnormal by
        # either
        steps = [ABSOLUTE[dtype] / recipe.scale(values, dtype).double()]
        if turned and recipe.by_row:
            steps.append(ABSOLUTE[dtype] / recipe.scale(values.mT, dtype).double().mT)
        return torch.maximum(values.abs() * RELATIVE[dtype], steps[-1]) + sum(steps[:-1])

    def product(a, b, of_a, turned=False):
        """Return a (L, M, K) times b (L, N, K) and the largest error of both roundings."""
        off_a, off_b = rounding(a, of_a, turned), rounding(b, E4M3, turned)
        size = (a.abs() + off_a) @ (b.abs() + off_b).mT
        # the float32 sum adds its own error
        float32 = (a.shape[-1] + 4) * torch.finfo(torch.float32).eps * size
        return a @ b.mT, size - a.abs() @ b.abs().mT + float32

    pairs = (
        product(rows, weight, E4M3),
        product(gradients, weight.mT, recipe.gradient),
        product(gradients.mT, rows.mT, recipe.gradient, turned=True),
    )
    (y, d_x, d_w), bounds = zip(*pairs, strict=True)
    arranged = lambda a, b, c: Products(a.transpose(0, 1)[None], b.transpose(0, 1)[None], c)  # noqa: E731
    return arranged(y, d_x, d_w), arranged(*bounds)


def off(products, recipe) -> list[float]:
    """Return the largest errors of y, d_x and d_w in units of what is allowed."""
    exact, allowed = exact_and_bounds(recipe)
    return [
        float(((f - e).abs() / a).max()) for f, e, a in zip(products, exact, allowed, strict=True)
    ]


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def recipe(request):
    return request.param


def test_within_what_rounding_allows(recipe):
    # torch's products and the emulation sum in different order; torch's repeat bit for bit
    emulated, scaled, again = (
        compute_products(Float8(recipe, emulate)) for emulate in (True, False, False)
    )
    assert max(off(emulated, recipe)) <= 1
    assert max(off(scaled, recipe)) <= 1
    for one, other in zip(emulated, scaled, strict=True):
        assert (one - other).abs().max() <= 1e-6 * one.abs().max()
    assert all(torch.equal(one, other) for one, other in zip(scaled, again, strict=True))


FAULTS = {
    "a scale applied twice": lambda a, b: (a * a, b),
    "the other operand's scale applied twice": lambda a, b: (a, b * b),
    "operands not scaled back": lambda a, b: (torch.ones_like(a), torch.ones_like(b)),
    "scales of rows in the wrong order": lambda a, b: (a.flip(0), b),
    "scales of columns in the wrong order": lambda a, b: (a, b.flip(1)),
}


def test_a_wrong_scale_is_found(recipe, monkeypatch):
    # in y and both gradients; with one scale per lane there is no order
    multiply = float8.multiply_float8
    for name, change in FAULTS.items():
        if "order" in name and not recipe.by_row:
            continue

        def wrong(a, b, a_scale, b_scale, *others, change=change):
            multiply(a, b, *(scale.contiguous() for scale in change(a_scale, b_scale)), *others)

        monkeypatch.setattr(float8, "multiply_float8", wrong)
        assert min(off(compute_products(Float8(recipe, emulate=False)), recipe)) > 1.5, name


def test_zeros_and_what_is_not_finite(recipe):
    # the guard against bad steps needs to see infinities and NaNs
    x, weight, _ = draw_tensors()
    multiply = Float8(recipe, emulate=False)
    assert multiply(torch.zeros_like(x), weight).abs().max() == 0
    for bad in (float("inf"), float("nan")):
        x[0, 5, 1, 7] = bad
        assert not multiply(x, weight)[0, 5, 1].isfinite().any()


# --- in a layer


def step(recipe, emulate=True, backend=None, checkpointing=True) -> Results:
    torch._dynamo.reset()
    model = TitanLaneformer(LaneformerArgs(config=CONFIG))
    if recipe is not None:
        use_float8(model, Float8(recipe, emulate))
    model.init_weights()
    if checkpointing:
        apply_selective_checkpointing(model)
    for layer in model.layers if backend else ():
        layer.compile(backend=backend, fullgraph=True)
    return train(model, draw_tokens(CONFIG, SEQ_LEN))


def assert_same(actual: Results, expected: Results):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_step_repeats_and_is_near_the_one_without_float8(recipe):
    eager = step(recipe)
    assert_same(step(recipe), eager)
    assert_same(step(recipe, checkpointing=False), eager)
    wide = step(None)
    difference = (eager["losses"] - wide["losses"]).abs().max()
    assert 0 < difference < 0.01 * wide["losses"].max()
    # gradients round twice in each of several layers; a wrong gradient is off by much more
    for name, gradient in wide.items():
        assert (eager[name] - gradient).norm() < 0.25 * gradient.norm(), name


@pytest.mark.proof
def test_inductor_agrees():
    # Inductor's sums round differently, which may select a neighbouring float8 value
    lower_keep_to_nothing()
    recipe = RECIPES["rowwise"]
    eager, compiled = step(recipe), step(recipe, backend="inductor")
    for name, values in eager.items():
        assert (compiled[name] - values).norm() < 0.05 * values.norm(), name


@pytest.mark.job
def test_a_compiled_step_is_the_same_and_keeps_its_input_in_float8_alone(recipe):
    # bit for bit, one graph per layer; one byte is saved per value of the normed streams and of
    # w2's input, and no product is recomputed
    layers = []  # of each, the last first: float8 values kept, and products

    def see(graph, inputs):
        saved_values = 0
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            is_saved = isinstance(value, Tensor) and not node.name.startswith(
                ("primals", "tangents")
            )
            saved_values += value.numel() if is_saved and value.dtype == E4M3 else 0
        layers.append(
            (saved_values, sum("scaled_product" in str(node.target) for node in graph.graph.nodes))
        )
        return make_boxed_func(graph)

    cut = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=nop, bw_compiler=see, partition_fn=cut)
    assert_same(step(recipe, backend=backend), step(recipe))
    tokens, d, f = 2 * SEQ_LEN, CONFIG.hidden_size, CONFIG.intermediate_size
    streams = (CONFIG.num_lanes, 1)  # the last layer's are the lanes' own
    # two gradients of each of two products
    assert layers == [(tokens * (count * d + f), 4) for count in streams]


# --- who may use it


def test_gpus_without_float8_are_refused():
    for emulate, capability in ((False, (8, 9)), (False, (9, 0)), (True, None)):
        check_device(emulate, capability)
    with pytest.raises(
        ValueError, match=r"8\.9 or later .*this GPU has 8\.0; leave model\.converters empty"
    ):
        check_device(False, (8, 0))
    with pytest.raises(
        ValueError, match=r"torch sees no GPU; .*quantize\.linear\.float8\.emulate = true"
    ):
        check_device(False, None)


@pytest.mark.parametrize(
    ("change", "tokens", "message"),
    [
        ({"hidden_size": 72}, 64, r"hidden_size = 72 is no multiple of 16"),
        ({"intermediate_size": 192}, 64, r"intermediate_size / num_lanes = 24"),
        ({}, 40, r"local_batch_size \* training\.seq_len = 40"),
    ],
)
def test_shapes_without_products_are_refused(change, tokens, message):
    check_shapes(CONFIG, 64)
    with pytest.raises(ValueError, match=message):
        check_shapes(dataclasses.replace(CONFIG, **change), tokens)
