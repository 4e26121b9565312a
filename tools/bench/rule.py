"""Weights that are a function of their place, so that a bundle has none: fill.cu makes the same ones on a
GPU.

Numbers are odd integers below 256 times a power of two, which 16 bits hold exactly, and keep the size of what
goes through a matrix. The rule is of the kernels' matrices, whose rows are those of a layer's tensors joined.

    L lanes   D hidden   V vocabulary
"""

from __future__ import annotations

import math

import numpy as np
import torch

from laneformer.config import EMBEDDING, HEAD, NORMS, LaneformerConfig
from laneformer.engine.cuda.geometry import OPS, Geometry
from laneformer.engine.cuda.memory import PARTS
from laneformer.engine.cuda.tape import steps
from laneformer.engine.cuda.tape_model import tensor_rows
from laneformer.supports import refuse_unsupported
from tools.check.reference import Weights

EMBEDDING_SEED, NORM_SEED, SEEDS = len(OPS), len(OPS) + 1, len(OPS) + 2
DEVIATION = 255 / math.sqrt(3)  # of odd integers from -255 to 255


def mixed(values: np.ndarray) -> np.ndarray:
    """uint32, by fill.cu's `mixed`."""
    x: np.ndarray = values.astype(np.uint32)
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    return x ^ x >> 16


def hashes(seed: int, count: int) -> np.ndarray:
    """uint32 of each place of a matrix or vector."""
    return mixed(np.arange(count, dtype=np.uint32) ^ mixed(np.array([seed + 1]))[0])


def exponents(config: LaneformerConfig, geometry: Geometry) -> list[int]:
    """Of OPS, then of the embedding: a matrix of n columns has numbers of about n ** -0.5."""
    columns = [geometry.matrix(op).columns for op in OPS]
    return [round(math.log2(DEVIATION * math.sqrt(n))) for n in (*columns, 1)]


def numbers(seed: int, count: int, exponent: int) -> torch.Tensor:
    """bfloat16 (count,)."""
    odd = 2 * (hashes(seed, count) >> np.uint32(24)).astype(np.int32) - 255
    return torch.from_numpy(odd.astype(np.float32) * np.float32(2.0**-exponent)).bfloat16()


def weights_by_rule(config: LaneformerConfig, geometry: Geometry) -> tuple[Weights, int]:
    """The model's weights, and the sum of all tapes' 32-bit words modulo 2^32. ValueError for what has more
    tensors.
    """
    refuse_unsupported(config, "the rule of fill.cu")
    powers, weights, total = exponents(config, geometry), Weights(), 0
    for op, layer in steps(geometry):
        matrix = geometry.matrix(op)
        shape = config.num_lanes, matrix.rows, matrix.columns
        flat = numbers(layer * SEEDS + OPS.index(op), math.prod(shape), powers[OPS.index(op)])
        total += int(flat.view(torch.int32).sum(dtype=torch.int64))
        whole = flat.view(shape)
        if op == "head":
            weights[HEAD] = whole[:, : config.vocab_size // config.num_lanes].contiguous()
            continue
        for name, rows in zip(PARTS[op], tensor_rows(geometry, op), strict=True):
            weights[f"layers.{layer}.{name}.weight"] = whole[:, rows].contiguous()
    size = config.vocab_size, config.hidden_size
    weights[EMBEDDING] = numbers(EMBEDDING_SEED, math.prod(size), powers[-1]).view(size)
    return {**weights, **norms(config)}, total % 2**32


def norms(config: LaneformerConfig) -> Weights:
    """bfloat16, around 1, in the order of memory.norm_scales."""
    names = [f"layers.{i}.{norm}.weight" for i in range(config.num_hidden_layers) for norm in NORMS]
    names, shapes = [*names, "norm.weight"], config.tensor_shapes()
    sizes = [math.prod(shapes[name]) for name in names]
    steps_of = (hashes(NORM_SEED, sum(sizes)) >> np.uint32(26)).astype(np.float32) - 32
    values = torch.from_numpy(1 + steps_of / 128).bfloat16().split(sizes)
    return {name: part.view(shapes[name]) for name, part in zip(names, values, strict=True)}
