"""Stack the experts of a checkpoint's layers as one tensor (E, rows, inputs) a layer and part.

E experts
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from ..tensors import Tensor, TensorSource

INPUTS = 32  # of a block of MXFP4
EXPERT = re.compile(r"(?P<stem>.*\.experts)\.(?P<number>\d+)\.(?P<part>.*)")
# most folders have a tensor for each expert; gpt-oss's are stacked, gate and up projection as one
# matrix whose even rows are gates and whose odd rows are ups
FUSED = ".mlp.experts."
ROWS = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2), "down_proj": slice(None)}
RENAMED = {".self_attn.sinks": ".self_attn.sinks.weight", ".mlp.router.": ".mlp.gate."}
Sources = dict[str, TensorSource]


def stack_experts(sources: Sources) -> Sources:
    """Return `layer.experts.0.part`, `layer.experts.1.part`, ... as `layer.experts.part`, (E, ...).

    Other tensors stay.

    Raises:
        ValueError: An expert is missing, or of another shape or type than the first.
    """
    stacked = {name: source for name, source in sources.items() if not EXPERT.fullmatch(name)}
    numbers: dict[str, dict[int, TensorSource]] = defaultdict(dict)
    for match in filter(None, map(EXPERT.fullmatch, sources)):
        numbers[f"{match['stem']}.{match['part']}"][int(match["number"])] = sources[match[0]]
    for name, experts in numbers.items():
        if missing := set(range(max(experts) + 1)) - experts.keys():
            raise ValueError(f"{name}: the experts {sorted(missing)} are missing")
        # a stack has one type and shape
        kinds = {(expert.dtype, expert.shape) for expert in experts.values()}
        if len(kinds) > 1:
            raise ValueError(
                f"{name}: experts differ, such as {' and '.join(map(str, sorted(kinds)[:2]))}"
            )
        stacked[name] = stack([experts[i] for i in sorted(experts)])
    return stacked


def stack(experts: list[TensorSource]) -> TensorSource:
    dtype, shape, _ = experts[0]
    load = lambda: Tensor(dtype, np.stack([expert.load().values for expert in experts]))  # noqa: E731
    return TensorSource(dtype, (len(experts), *shape), load)


def split_experts(sources: Sources) -> Sources:
    """Return gpt-oss's experts as `experts.gate_proj.weight`, (E, rows, inputs), and so on.

    Other tensors get the names of other mixtures of experts.
    """
    split: Sources = {}
    for name in sources:
        stem, _, part = name.partition(FUSED)
        if not part:
            split[new_name(name)] = sources[name]
        # scales are read with their blocks
        elif not part.endswith("_scales"):
            kind = "bias" if part.endswith("_bias") else "weight"
            matrix = part.removesuffix("_bias").removesuffix("_blocks")
            for projection in ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,):
                split[f"{stem}{FUSED}{projection}.{kind}"] = slice_stacked_rows(
                    sources, name, ROWS.get(projection, slice(None))
                )
    return split


def new_name(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def choose_rows(source: TensorSource, rows: slice) -> TensorSource:
    count, total, *inputs = source.shape

    def load() -> Tensor:
        tensor = source.load()
        return Tensor(tensor.dtype, tensor.values[:, rows])

    return TensorSource(source.dtype, (count, len(range(total)[rows]), *inputs), load)


def slice_stacked_rows(sources: Sources, name: str, rows: slice) -> TensorSource:
    """Return those rows of one of gpt-oss's tensors as (E, rows, inputs), or of a bias (E, rows)."""
    dtype, shape, load = sources[name]
    if name.endswith("_blocks"):
        return join_blocks(name, sources, rows)
    if len(shape) == 2:
        return choose_rows(sources[name], rows)
    if len(shape) != 3:
        raise ValueError(f"{name} has shape {shape}; experts' matrices have 3 dimensions, biases 2")
    # in 16 bits gpt-oss's matrices are transposed, (E, in, out)
    load_transposed = lambda: Tensor(dtype, load().values.swapaxes(1, 2))  # noqa: E731
    return choose_rows(TensorSource(dtype, (shape[0], shape[2], shape[1]), load_transposed), rows)


def join_blocks(name: str, sources: Sources, rows: slice) -> TensorSource:
    # MXFP4 (OCP Microscaling Formats) is `_blocks` (E, out, in / 32, 16), bytes of two inputs each,
    # and `_scales` (E, out, in / 32); it becomes rows of the blocks of GGUF files
    scales_name = name.removesuffix("_blocks") + "_scales"
    if scales_name not in sources:
        raise ValueError(f"the checkpoint holds {name}, but not {scales_name}")
    blocks, scales = sources[name], sources[scales_name]
    if len(blocks.shape) != 4 or (*scales.shape, INPUTS // 2) != blocks.shape:
        raise ValueError(
            f"{name} of shape {blocks.shape} needs scales of shape {blocks.shape[:-1]}, not {scales.shape}, and "
            f"{INPUTS // 2} bytes a block"
        )
    blocks, scales = choose_rows(blocks, rows), choose_rows(scales, rows)
    load = lambda: Tensor("mxfp4", as_gguf(blocks.load().values, scales.load().values))  # noqa: E731
    return TensorSource("mxfp4", (*blocks.shape[:2], INPUTS * blocks.shape[2]), load)


def as_gguf(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return MXFP4 blocks (..., G, 16) with exponents (..., G) as rows of ggml's blocks, (..., 17 G)."""
    # byte i of an MXFP4 block has inputs 2i and 2i + 1; ggml's has an exponent, then bytes of i and
    # i + 16
    rows = np.empty((*blocks.shape[:-1], 17), np.uint8)
    # low half bytes have the even inputs, high ones the odd
    first, second = blocks[..., :8], blocks[..., 8:]
    rows[..., 0] = scales
    rows[..., 1::2] = first & 15 | second << 4
    rows[..., 2::2] = first >> 4 | second & 0xF0
    return rows.reshape(*blocks.shape[:-2], -1)
