"""Float8 products for w1, w2 and w3: TorchTitan's `quantize.linear.float8` for matrices of lanes.

    N products of one call: the lanes, or 1   T tokens (B*S)   O, K output and input features of one product

`y = x w^T` and both of its gradients multiply float8 values and sum in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.protocols.model_converter import ModelConverter

from ..config import LaneformerConfig
from ..lanes import LaneRMSNorm
from ..model import LaneFeedForward
from .layer import TitanLayer
from .private_torch import multiply_float8
from .products import keep

NAME = "quantize.linear.float8"
CAPABILITY = (8, 9)
MULTIPLE = 16  # of both axes of a float8 product on a GPU, in bytes
SMALLEST = 1e-12  # a larger value has a scale of its own; below it everything is zero
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Recipe:
    """What one scale covers and how gradients are computed."""

    name: str
    # one scale for each row instead of one for each matrix
    by_row: bool
    gradient: torch.dtype
    # fewer bits in sums of the backward pass, as always in the forward pass
    fast_backward: bool

    def scale(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factor of x (N, M, K) before rounding: (N, 1, 1), or by row (N, M, 1), float32."""
        # dynamic, as in torchao (arXiv 2209.05433, section 4.3): the largest value that a scale covers
        # becomes the format's largest
        largest = x.abs().amax(-1 if self.by_row else (-2, -1), keepdim=True).float()
        scale = torch.finfo(dtype).max / largest.clamp(min=SMALLEST)
        # a row's scale is a power of two: sign and exponent without the 23 bits of the mantissa
        return (scale.view(torch.int32) >> 23 << 23).view(torch.float32) if self.by_row else scale

    def transpose(self, values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Transpose float8 values (N, M, K) and their scale to (N, K, M)."""
        if not self.by_row:
            return values.mT.contiguous(), scale
        # powers of two: values get the scales of their columns without another rounding
        columns = (values.float() / scale).mT
        scale = self.scale(columns, values.dtype)
        return quantize(columns, scale, values.dtype), scale


RECIPES = {
    "tensorwise": Recipe("tensorwise", False, E5M2, False),
    "rowwise": Recipe("rowwise", True, E4M3, True),
}


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype).contiguous()


@torch.library.custom_op("laneformer::scaled_product", mutates_args=())
def multiply_scaled(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    fast: bool,
    emulate: bool,
) -> Tensor:
    """Multiply float8 values a (N, M, K) and b (N, O, K), divided by their scales, to (N, M, O) in `dtype`.

    Args:
        a_scale, b_scale: Factors of the values, float32 (N, 1, 1), or by row (N, M, 1) and (N, O, 1).
        emulate: Multiply in float32, which holds a product of two float8 values exactly.
    """
    inverse_a, inverse_b = a_scale.reciprocal(), b_scale.reciprocal().mT
    if emulate:
        return (torch.bmm(a.float(), b.float().mT) * inverse_a * inverse_b).to(dtype)
    out = a.new_empty(*a.shape[:2], b.shape[1], dtype=dtype)
    for n in range(len(a)):
        multiply_float8(a[n], b[n].t(), inverse_a[n], inverse_b[n], fast, out[n])
    return out


multiply_scaled.register_fake(
    lambda a, b, a_scale, b_scale, dtype, *_: a.new_empty(*a.shape[:2], b.shape[1], dtype=dtype)
)


class Float8Product(torch.autograd.Function):
    """Multiply x (N, T, K) and weight (N, O, K) to (N, T, O) in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, emulate: bool) -> Tensor:
        x_scale, w_scale = recipe.scale(x, E4M3), recipe.scale(weight, E4M3)
        values, weights = keep(quantize(x, x_scale, E4M3)), quantize(weight, w_scale, E4M3)
        # marked after its use: the mark is where the compiler ends a kernel
        x_scale, w_scale = keep(x_scale), keep(w_scale)
        # of x only the float8 values are kept
        ctx.save_for_backward(values, x_scale, weight, w_scale)
        ctx.recipe, ctx.emulate = recipe, emulate
        return multiply_scaled(values, weights, x_scale, w_scale, x.dtype, True, emulate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, x_scale, weight, w_scale = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        options = weight.dtype, recipe.fast_backward, ctx.emulate
        # Hopper's tensor cores read both operands along the summed axis, so the weight's gradient
        # needs x and y's gradient transposed; in float8 that moves half the bytes
        x, x_scale = recipe.transpose(x, x_scale)
        if recipe.by_row:
            w_scale = recipe.scale(weight.mT, E4M3)
        scale = recipe.scale(gradient, recipe.gradient)
        values = quantize(gradient, scale, recipe.gradient)
        d_x = multiply_scaled(values, quantize(weight.mT, w_scale, E4M3), scale, w_scale, *options)
        values, scale = recipe.transpose(values, scale)
        return d_x, multiply_scaled(values, x, scale, x_scale, *options), None, None


@dataclass(frozen=True)
class Float8:
    """Settings of the job's section `[quantize.linear.float8]`."""

    recipe: Recipe
    emulate: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x (B, S, N, K) and weight (N, O, K) to (B, S, N, O)."""
        rows = x.flatten(0, 1).transpose(0, 1)
        y: Tensor = Float8Product.apply(rows, weight, self.recipe, self.emulate)
        return y.transpose(0, 1).unflatten(0, x.shape[:2])


class Float8FeedForward(LaneFeedForward):
    """`TitanFeedForward` with float8 products; with `sums`, w2's outputs are added up, (B, S, 1, D)."""

    def __init__(self, config: LaneformerConfig, float8: Float8, sums: bool):
        super().__init__(config)
        self.float8, self.sums = float8, sums

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        # streams that are equal in all lanes are one product with all lanes' weights
        weight = torch.cat([self.w1.weight, self.w3.weight], 1)
        width = weight.shape[1]
        product = keep(self.float8(x, weight.unflatten(0, (x.shape[2], -1)).flatten(1, 2)))
        return product.unflatten(-1, (-1, width)).flatten(2, 3).split(width // 2, -1)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        inner = F.silu(gate) * up
        if not self.sums:
            return self.float8(inner, self.w2.weight)
        # the sum over lanes is part of the product's own
        weight = self.w2.weight.transpose(0, 1).flatten(1)
        return self.float8(inner.flatten(2)[:, :, None], weight[None])


def float8_of(job_config: JobConfig) -> Float8 | None:
    """Return the float8 settings of a job; None without float8."""
    section = job_config.quantize.linear.float8
    if NAME not in job_config.model.converters:
        return None
    return Float8(RECIPES[section.recipe_name or "tensorwise"], section.emulate)


def check_shapes(config: LaneformerConfig, tokens: int) -> None:
    """Raise ValueError where an axis of a product is no multiple of what a GPU takes.

    Args:
        tokens: Of a micro-batch.
    """
    axes = {
        "hidden_size": config.hidden_size,
        "intermediate_size / num_lanes": config.intermediate_size // config.num_lanes,
        "training.local_batch_size * training.seq_len": tokens,
    }
    for name, size in axes.items():
        if size % MULTIPLE:
            raise ValueError(
                f"{NAME}: {name} = {size} is no multiple of {MULTIPLE}, which float8 products need; "
                "change it, or train without model.converters"
            )


def check_device(emulate: bool, capability: tuple[int, int] | None) -> None:
    """Raise ValueError without float8 products on the GPU (None: no GPU), unless emulated."""
    if emulate or (capability is not None and capability >= CAPABILITY):
        return
    available = (
        "torch sees no GPU" if capability is None else "this GPU has {}.{}".format(*capability)
    )
    raise ValueError(
        f"model.converters = [{NAME!r}] needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or later "
        f"(Ada, Hopper, Blackwell), and {available}; leave model.converters empty to train in bfloat16, or set "
        f"{NAME}.emulate = true, which multiplies the same float8 values in float32, slowly"
    )


def use_float8(model: Any, float8: Float8) -> None:
    """Let the layers of a TitanLaneformer compute w1, w2 and w3 in float8, in place."""
    model.float8 = float8
    for layer in model.layers:
        assert isinstance(layer, TitanLayer), f"{type(layer).__name__} has no float8 products"
        plain, norm = layer.feed_forward, layer.ffn_norm
        with torch.device("meta"):  # the parameters stay those of the layer, on their device
            layer.feed_forward = Float8FeedForward(model.config, float8, layer.adds_sum_only(1))
            # not kept: the products keep its result in float8
            layer.ffn_norm = LaneRMSNorm(model.config)
        layer.feed_forward.w1, layer.feed_forward.w2, layer.feed_forward.w3 = (
            plain.w1,
            plain.w2,
            plain.w3,
        )
        layer.ffn_norm.weight = norm.weight


class Float8Converter(ModelConverter):
    def __init__(self, job_config: JobConfig, parallel_dims: Any):
        float8 = float8_of(job_config)
        assert float8 is not None, f"{NAME} is in model.converters"
        self.float8 = float8
        on_gpu = torch.cuda.is_available()
        check_device(self.float8.emulate, torch.cuda.get_device_capability() if on_gpu else None)

    def convert(self, model: nn.Module) -> None:
        use_float8(model, self.float8)

    def post_optimizer_hook(self, model: Any) -> None:
        """Scales are dynamic: there is nothing to update."""
