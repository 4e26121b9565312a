"""Products for several columns at once (columns.cuh): right, and the same bits in any company."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.engine.cuda.geometry import OPS, Geometry
from laneformer.engine.cuda.memory import TORCH_TYPES
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.tape import pack, tape_starts
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import build_unit, emulator_proof
from tests.laneformer.cuda.harness import SMALL, small_config

pytestmark = emulator_proof
UNIT = 2.0**-24  # half a step of float32 at 1


class Products(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("tapes", "tape_at", "scales", "x", "out")]


def planned(columns: int, dtype: str = "bf16", **shape: Any) -> Geometry:
    config = small_config(num_hidden_layers=1, swa_layers=(), intermediate_size=224, vocab_size=160)
    return plan(config, dtype, SMALL, **{"warps": 3, "columns": columns, **shape})


def weights(geometry: Geometry) -> dict[str, torch.Tensor]:
    """Of one lane. The first tile's rows are those of a unit matrix: what comes out is what goes in."""
    generator = torch.Generator().manual_seed(5)
    matrices = {}
    for op in OPS:
        matrix = geometry.matrix(op)
        values = torch.randn(matrix.rows, matrix.columns, generator=generator)
        values[:16] = torch.eye(matrix.columns)[-16:]
        matrices[op] = values.to(TORCH_TYPES[geometry.dtype])
    return matrices


def inputs(geometry: Geometry, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(count, geometry.matrix(op).columns, generator=generator) for op in OPS]


def products(geometry: Geometry, x: list[torch.Tensor], builds: Path, seed: int = 0) -> list[torch.Tensor]:
    """W x of every matrix, (columns, rows), from one launch of a lane's blocks."""
    w = weights(geometry)
    tapes = pack(geometry, lambda op, layer: w[op].expand(geometry.lanes_per_device, -1, -1), "cpu")
    starts, flat = torch.from_numpy(tape_starts(geometry)), torch.cat([part.flatten() for part in x])
    shapes = [(geometry.columns, geometry.matrix(op).rows) for op in OPS]
    out = torch.full((sum(rows * columns for rows, columns in shapes),), float("nan"))
    library = build_unit(geometry, '#include "products.cu"\nEMULATE(products, Products)\n', builds)
    stride = max(geometry.matrix(op).columns for op in OPS) + 48
    ring = geometry.warps * geometry.chunks * (geometry.chunk_bytes + 8)
    scales = torch.empty(0)
    emulator.launch(
        library, "products", Products(*(t.data_ptr() for t in (tapes, starts, scales, flat, out))), seed=seed,
        blocks=geometry.blocks_per_lane, threads=geometry.threads,
        shared_bytes=ring + 4 * geometry.columns * (stride + geometry.max_sums),
    )  # fmt: skip
    parts = out.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@pytest.mark.parametrize(("dtype", "columns"), [("bf16", 1), ("bf16", 8), ("fp16", 5)])
def test_products_are_those_of_float32(dtype: str, columns: int, cuda_builds: Path) -> None:
    """Of weights in 8 bits: test_int8.py."""
    geometry = planned(columns, dtype)
    x, w = inputs(geometry, columns), weights(geometry)
    for op, inp, out in zip(OPS, x, products(geometry, x, cuda_builds), strict=True):
        matrix = w[op].double()
        exact, terms = inp.double() @ matrix.T, inp.double().abs() @ matrix.abs().T
        assert ((out - exact).abs() <= UNIT * (3 * inp.shape[1]) ** 0.5 * terms + UNIT / 2).all(), op
        lost = (out[:, :16] - inp[:, -16:]).abs().max()
        assert lost == 0 if dtype == "bf16" else lost <= UNIT, f"{op}: inputs lose bits"


def test_a_column_is_the_same_in_any_company(cuda_builds: Path) -> None:
    """Alone, beside another, at any of eight places; and however blocks, warps and chunks are cut."""
    eight = planned(8)
    x = inputs(eight, 8)
    right = products(eight, x, cuda_builds)
    cuts = [
        (planned(1), 3), (planned(3), 1), (planned(2, warps=4, blocks_per_lane=3, chunk_bytes=512), 2),
        (planned(8, warps=1, chunk_bytes=1024), 0),
    ]  # fmt: skip
    for seed, (geometry, first) in enumerate(cuts):
        own = [part[first : first + geometry.columns] for part in x]
        for op, part, all_of_them in zip(OPS, products(geometry, own, cuda_builds, seed), right, strict=True):
            assert torch.equal(part, all_of_them[first : first + geometry.columns]), (op, geometry)


def test_parts_are_added_in_their_order(cuda_builds: Path) -> None:
    """Eight of them, each in a column without the others: added from the first to the last
    they are the product.
    """
    config = small_config(num_hidden_layers=1, swa_layers=(), hidden_size=128, vocab_size=160)
    eight = plan(config, "bf16", SMALL, warps=3, columns=8)
    x = [values.expand(8, -1) for values in inputs(eight, 1)]
    own = [
        torch.block_diag(*values[0].view(eight.matrix(op).parts, -1))
        for op, values in zip(OPS, x, strict=True)
    ]
    apart = products(eight, [torch.nn.functional.pad(v, (0, 0, 0, 8 - len(v))) for v in own], cuda_builds)
    for op, whole, parts in zip(OPS, products(eight, x, cuda_builds), apart, strict=True):
        assert torch.equal(whole[0], functools.reduce(torch.add, parts)), op
    assert max(eight.matrix(op).parts for op in OPS) == 8
