"""Pack weights as the kernels read them: one tape a warp, in execution order (tape.cuh).

W[row, column] of a lane -> [strip][step][row of tiles][thread][8 numbers, or 16 of 8 bits]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from .geometry import OPS, SEGMENT_BYTES, TILE, Geometry, Matrix

# (op, layer) -> (lanes of the device, rows, columns) of numbers of 8 or 16 bits
LaneMatrices = Callable[[str, int], torch.Tensor]
NUMBERS = {2: torch.int16, 1: torch.int8}


def order(geometry: Geometry, matrix: Matrix) -> np.ndarray:
    """Return which number of the matrix is at each place of its tapes: int64 (rows * columns,)."""
    return np.concatenate([*tile_strips(geometry, matrix)])


def tile_strips(geometry: Geometry, matrix: Matrix) -> Iterator[np.ndarray]:
    """Yield up to `strip` tiles below each other, through one part of the columns."""
    wide = matrix.thread_numbers // 8  # tiles of a segment
    steps = matrix.columns // (wide * TILE) // matrix.parts
    shape = (matrix.rows // TILE, 2, TILE // 2, matrix.parts, steps, wide, 4, 2, 2)
    # (row of tiles, part, step, thread / 4, thread % 4, tile, pair of columns, half of the rows,
    # 2): a segment is the last six
    tiles = (
        np.arange(matrix.rows * matrix.columns).reshape(shape).transpose(0, 3, 4, 2, 6, 5, 7, 1, 8)
    )
    for units in units_of_warps(geometry, matrix):
        for part, group in itertools.groupby(units, key=lambda unit: unit[0]):
            rows = [row for _, row in group]
            for start in range(0, len(rows), geometry.strip):
                yield tiles[rows[start : start + geometry.strip], part].swapaxes(0, 1).reshape(-1)


def units_of_warps(geometry: Geometry, matrix: Matrix) -> Iterator[list[tuple[int, int]]]:
    for block, warp in itertools.product(range(geometry.blocks_per_lane), range(geometry.warps)):
        yield matrix.tiles(block, geometry.blocks_per_lane, warp, geometry.warps)


def segment_counts(geometry: Geometry, op: str) -> np.ndarray:
    """Return the segments that each warp of a lane has of the matrix `op`: int64 (warps,)."""
    matrix = geometry.matrix(op)
    bytes_of_unit = TILE * matrix.columns // matrix.parts * geometry.number_bytes
    units = np.array([len(units) for units in units_of_warps(geometry, matrix)])
    return units * (bytes_of_unit // SEGMENT_BYTES)


def steps(geometry: Geometry) -> Iterator[tuple[str, int]]:
    """Yield (op, layer) in the order of execution."""
    for layer in range(geometry.config.num_hidden_layers):
        for op in OPS[:-1]:
            yield op, layer
    yield OPS[-1], 0


def tape_starts(geometry: Geometry) -> np.ndarray:
    """Return each tape's first byte in a device's buffer, and the last one's end: int64 (warps + 1,)."""
    *of_layer, head = (segment_counts(geometry, op) for op in OPS)
    segments = geometry.config.num_hidden_layers * sum(of_layer) + head
    chunks = -(-SEGMENT_BYTES * segments // geometry.chunk_bytes)
    return np.cumsum([0, *np.tile(chunks, geometry.lanes_per_device)]) * geometry.chunk_bytes


def segments_of(geometry: Geometry) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield each matrix (op, layer) and its segments on a device, int64 (lanes, segments), as in `order`."""
    counts = {op: segment_counts(geometry, op) for op in OPS}
    # of each segment
    warps = {op: np.arange(len(count)).repeat(count) for op, count in counts.items()}
    # in its warp's run
    places = {op: np.concatenate([*map(np.arange, count)]) for op, count in counts.items()}
    following = tape_starts(geometry)[:-1].reshape(geometry.lanes_per_device, -1) // SEGMENT_BYTES
    for op, layer in steps(geometry):
        yield op, layer, following[:, warps[op]] + places[op]
        following = following + counts[op]


def pack(geometry: Geometry, matrices: LaneMatrices, device: torch.device | str) -> torch.Tensor:
    kind, size = NUMBERS[geometry.number_bytes], SEGMENT_BYTES // geometry.number_bytes
    tapes = torch.zeros(
        int(tape_starts(geometry)[-1]) // geometry.number_bytes, dtype=kind, device=device
    )
    orders = {op: torch.from_numpy(order(geometry, geometry.matrix(op))).to(device) for op in OPS}
    for op, layer, segments in segments_of(geometry):
        for lane, places in zip(
            matrices(op, layer), torch.from_numpy(segments).to(device), strict=True
        ):
            numbers = lane.to(device).view(kind).flatten()[orders[op]]
            tapes.view(-1, size)[places] = numbers.view(-1, size)
    return tapes
