"""Weights as the kernels read them: one tape a warp, its rows of every matrix in the order of execution.

tape.cuh describes a tape, and columns.cuh reads it; the index arithmetic is here. Everything is a permutation of
numbers, so packing is one gather a matrix, on the GPU when the tensors are there.

    W[row, column] of a lane -> [strip][step][row of tiles][thread][8 numbers, or 16 of 8 bits]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from .geometry import OPS, SEGMENT_BYTES, TILE, Geometry, Matrix

LaneMatrix = Callable[
    [str, int, int], torch.Tensor
]  # (op, layer, lane) -> (rows, columns) of that many bytes:
NUMBERS = {2: torch.int16, 1: torch.int8}


def order(geometry: Geometry, matrix: Matrix) -> np.ndarray:
    """Which number of the matrix comes at each place of its tapes, warp after warp: int64 (rows * columns,)."""
    return np.concatenate([*tile_strips(geometry, matrix)])


def tile_strips(geometry: Geometry, matrix: Matrix) -> Iterator[np.ndarray]:
    """Up to `strip` tiles below each other, through one part of the columns."""
    wide = matrix.thread_numbers // 8  # tiles of a segment
    steps = matrix.columns // (wide * TILE) // matrix.parts
    shape = (matrix.rows // TILE, 2, TILE // 2, matrix.parts, steps, wide, 4, 2, 2)
    # (row of tiles, part, step, thread / 4, thread % 4, tile, pair of columns, half of the rows, 2): a segment
    # is the last six
    tiles = np.arange(matrix.rows * matrix.columns).reshape(shape).transpose(0, 3, 4, 2, 6, 5, 7, 1, 8)
    for block, warp in itertools.product(range(geometry.blocks_per_lane), range(geometry.warps)):
        units = matrix.tiles(block, geometry.blocks_per_lane, warp, geometry.warps)
        for part, group in itertools.groupby(units, key=lambda unit: unit[0]):
            rows = [row for _, row in group]
            for start in range(0, len(rows), geometry.strip):
                yield tiles[rows[start : start + geometry.strip], part].swapaxes(0, 1).reshape(-1)


def ends(geometry: Geometry, matrix: Matrix) -> list[int]:
    """Where each warp's numbers begin in `order`, and the end of the last's."""
    owners = itertools.product(range(geometry.blocks_per_lane), range(geometry.warps))
    units = [
        len(matrix.tiles(block, geometry.blocks_per_lane, warp, geometry.warps)) for block, warp in owners
    ]
    return [0, *itertools.accumulate(n * TILE * matrix.columns // matrix.parts for n in units)]


def steps(geometry: Geometry) -> Iterator[tuple[str, int]]:
    """(op, layer) of a token, in the order of execution."""
    for layer in range(geometry.config.num_hidden_layers):
        for op in OPS[:-1]:
            yield op, layer
    yield OPS[-1], 0


def tape_starts(geometry: Geometry) -> np.ndarray:
    """The first byte of each warp's tape in a device's buffer, and the end of the last: uint64 (warps + 1,)."""
    warps = geometry.warps_per_lane
    numbers = np.zeros(warps, np.int64)
    for op, _ in steps(geometry):
        numbers += np.diff(ends(geometry, geometry.matrix(op)))
    chunks = -(-geometry.number_bytes * numbers // geometry.chunk_bytes)
    return np.concatenate([[0], np.tile(chunks, geometry.lanes_per_device).cumsum()]).astype(
        np.uint64
    ) * np.uint64(geometry.chunk_bytes)


def places(geometry: Geometry) -> Iterator[tuple[str, int, int, list[tuple[slice, slice]]]]:
    """For each matrix (op, layer, lane of the device): where each warp's numbers are in its
    tapes, and in `order`.
    """
    warps, at = geometry.warps_per_lane, tape_starts(geometry).astype(np.int64) // geometry.number_bytes
    for op, layer in steps(geometry):
        first = ends(geometry, geometry.matrix(op))
        for lane in range(geometry.lanes_per_device):
            pairs = []
            for warp in range(warps):
                tape, size = lane * warps + warp, first[warp + 1] - first[warp]
                pairs.append((slice(at[tape], at[tape] + size), slice(first[warp], first[warp + 1])))
                at[tape] += size
            yield op, layer, lane, pairs


def pack(
    geometry: Geometry, matrices: LaneMatrix, first_lane: int, device: torch.device | str
) -> torch.Tensor:
    """The tapes of the lanes `first_lane`, ... of one device: (numbers,) of NUMBERS."""
    kind, size = NUMBERS[geometry.number_bytes], SEGMENT_BYTES // geometry.number_bytes
    tapes = torch.zeros(int(tape_starts(geometry)[-1]) // geometry.number_bytes, dtype=kind, device=device)
    orders = {op: torch.from_numpy(order(geometry, geometry.matrix(op))).to(device) for op in OPS}
    for op, layer, lane, pairs in places(geometry):
        numbers = matrices(op, layer, first_lane + lane).to(device).view(kind).flatten()[orders[op]]
        segments = np.concatenate([np.arange(there.start, there.stop, size) for there, _ in pairs]) // size
        tapes.view(-1, size)[torch.from_numpy(segments).to(device)] = numbers.view(-1, size)
    return tapes
