"""Private parts of torch's compiler that training needs, which another version of torch may move.

Nothing else in `titan/` and `train/` may name a module of torch that begins with an underscore (a
test), except where TorchTitan asks for a GPU: `train.job_config.patch_torch_for_cpu`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass as GraphPass
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

# imported for others
__all__ = ["GraphPass", "checkpoint_wrapper"]
# what a lane's rank gets from others: under checkpointing never asked for again
EXCHANGES = frozenset(
    {torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default}
)


def lower_to_nothing(operation: Any) -> None:
    from torch._inductor.lowering import lowerings, register_lowering

    if operation not in lowerings:
        register_lowering(operation, type_promotion_kind=None)(lambda x: x)


def pass_after_autograd(graph_pass: GraphPass) -> None:
    torch._inductor.config.post_grad_custom_post_pass = graph_pass


def allow_variants(count: int) -> None:
    torch._dynamo.config.recompile_limit = count


def start_reduction(x: Tensor, group: str, how: str = "sum") -> Tensor:
    """Start an all-reduce; its result must not be read before `wait_for_reduction`."""
    reduction: Tensor = torch.ops._c10d_functional.all_reduce(x.contiguous(), how, group)
    return reduction


def wait_for_reduction(reduction: Tensor) -> Tensor:
    """Return the result of `start_reduction`, once it is complete."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(reduction)
    return result


def forget_compiled() -> None:
    torch._dynamo.reset()


def multiply_float8(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool, out: Tensor
) -> None:
    """Write float8 a (M, K) times b (K, O), times their scales, to out (M, O).

    b's columns are adjacent. Scales are float32, (1, 1) each, or (M, 1) and (1, O).
    """
    # torch.nn.functional.scaled_mm takes the same but not `out`
    torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=out.dtype, use_fast_accum=fast, out=out)
