"""Weights as the kernels read them: one tape a warp, its rows of every matrix in the order of execution.

rows.cuh describes a tape and reads it; the index arithmetic is here. Everything is a permutation of 16-bit numbers, so
packing is one gather a matrix, on the GPU when the tensors are there.

    W[row, column] of a lane -> [strip][step][row of segments][thread][8 numbers]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from .geometry import OPS, Geometry, Matrix

LaneMatrix = Callable[[str, int, int], torch.Tensor]  # (op, layer, lane) -> (rows, columns), 16-bit


def order(matrix: Matrix, warps: int, strip: int) -> np.ndarray:
    """Which number of the matrix comes at each place of its tapes, warp after warp: int64 (rows * columns,)."""
    threads, rows = matrix.row_threads, matrix.segment_rows
    shape = (matrix.rows // rows, rows, matrix.steps, 2, threads, 4)
    # (row of segments, step, row in it, thread, half, 4): a segment is the last four axes
    segments = np.arange(matrix.rows * matrix.columns).reshape(shape).transpose(0, 2, 1, 4, 3, 5)
    strips = []
    for warp in range(warps):
        first, end = (matrix.first_row(w, warps) // rows for w in (warp, warp + 1))
        for start in range(first, end, strip):
            strips.append(segments[start : min(start + strip, end)].swapaxes(0, 1).reshape(-1))
    return np.concatenate(strips) if strips else np.empty(0, np.int64)


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
        matrix = geometry.matrix(op)
        first = np.array([matrix.first_row(w, warps) for w in range(warps + 1)])
        numbers += np.diff(first) * matrix.columns
    chunks = -(-2 * numbers // geometry.chunk_bytes)
    return np.concatenate([[0], np.tile(chunks, geometry.lanes_per_device).cumsum()]).astype(np.uint64) * np.uint64(
        geometry.chunk_bytes
    )


def places(geometry: Geometry) -> Iterator[tuple[str, int, int, list[tuple[slice, slice]]]]:
    """For each matrix (op, layer, lane of the device): where each warp's numbers are in its tapes, and in `order`."""
    warps, starts = geometry.warps_per_lane, (tape_starts(geometry) // 2).astype(np.int64)
    at = starts[:-1].copy()
    for op, layer in steps(geometry):
        matrix = geometry.matrix(op)
        ends = [matrix.first_row(w, warps) * matrix.columns for w in range(warps + 1)]
        for lane in range(geometry.lanes_per_device):
            pairs = []
            for warp in range(warps):
                tape, size = lane * warps + warp, ends[warp + 1] - ends[warp]
                pairs.append((slice(at[tape], at[tape] + size), slice(ends[warp], ends[warp + 1])))
                at[tape] += size
            yield op, layer, lane, pairs


def pack(geometry: Geometry, matrices: LaneMatrix, first_lane: int, device: torch.device | str) -> torch.Tensor:
    """The tapes of the lanes `first_lane`, ... of one device: int16 (numbers,)."""
    tapes = torch.zeros(int(tape_starts(geometry)[-1]) // 2, dtype=torch.int16, device=device)
    orders = {
        op: torch.from_numpy(order(geometry.matrix(op), geometry.warps_per_lane, geometry.strip)).to(device)
        for op in OPS
    }
    for op, layer, lane, pairs in places(geometry):
        numbers = matrices(op, layer, first_lane + lane).to(device).view(torch.int16).flatten()[orders[op]]
        for there, here in pairs:
            tapes[there] = numbers[here]
    return tapes
