"""The geometry of a model on a GPU: what fits, and what is refused.

Nothing here needs a GPU: `Machine` says what decides (launch.py reads it from the driver).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from ...config import LaneformerConfig
from .geometry import (
    CHUNK_BYTES,
    DTYPES,
    LARGE_HEAD,
    LARGE_HEAD_WARPS,
    MAX_CHUNKS,
    MAX_RESIDENT_WARPS,
    MAX_WARPS,
    OPS,
    SEGMENT_BYTES,
    TILE,
    WARPS,
    Geometry,
    Machine,
    Matrix,
)
from .structures import MAX_COLUMNS

MAX_TILE_WARPS = (
    16  # of a multiprocessor: with fewer registers a thread than 128 the sums over tiles are spilled
)
BUILDS = (1, 4, 8)  # columns of the kernels of passes
MOST_COLUMNS = (8, 4, 2)  # of the largest one: as many as fit
MIN_RING_BYTES = 32 << 10  # of a block, under way while it computes; with less, fewer columns are read faster


def plan(
    config: LaneformerConfig,
    dtype: str,
    machine: Machine,
    *,
    devices: int = 1,
    resident: int = 1,
    warps: int | None = None,
    chunk_bytes: int | None = None,
    blocks_per_lane: int | None = None,
    columns: int = 1,
    half: str = "bf16",  # beside int8: of the embedding, keys and values
) -> Geometry:
    """The geometry for this GPU: as many blocks a lane as there are multiprocessors, a ring as
    deep as memory allows.

    `resident`: blocks that a multiprocessor holds together; two for the graph version, whose kernels overlap.
    What is not given of `warps` and `chunk_bytes` is the first of WARPS and CHUNK_BYTES that fits. Both versions
    give the same bits where they have as many warps, because sums over a block depend on these.

    ValueError where the model does not fit the kernels or the GPU; the message says what would.
    """
    check_model(config, dtype, devices)
    blocks = blocks_of(machine, config.num_lanes // devices, blocks_per_lane)
    max_warps = min(MAX_WARPS, MAX_RESIDENT_WARPS // resident)
    if warps is not None and not 1 <= warps <= max_warps:
        raise ValueError(f"warps = {warps} is outside 1 to {max_warps}, which is what a block can have")
    check_tapes(chunk_bytes, columns)

    def bare(warps: int, chunk_bytes: int) -> Geometry:
        activations = half if dtype == "int8" else dtype
        return Geometry(config, dtype, blocks, warps, chunk_bytes, 0, devices, columns, activations)

    for op in OPS:
        check_matrix(op, bare(1, 0).matrix(op), blocks * max_warps)

    def cut(warps: int, chunk_bytes: int) -> Geometry:
        without = bare(warps, chunk_bytes)
        left = machine.shared_among(resident) - without.shared_bytes
        return dataclasses.replace(without, chunks=min(MAX_CHUNKS, left // (warps * (chunk_bytes + 8))))

    most = min(LARGE_HEAD_WARPS if config.head_dim >= LARGE_HEAD else MAX_WARPS, MAX_TILE_WARPS // resident)
    counts = (warps,) if warps else [count for count in WARPS if count <= most]
    sizes = (chunk_bytes,) if chunk_bytes else CHUNK_BYTES
    cuts = [cut(count, size) for count in counts for size in sizes]
    for geometry in cuts:
        if geometry.chunks >= 2:
            return geometry
    raise ring_does_not_fit(machine, resident, cuts, bool(warps or chunk_bytes))


def plan_builds(
    config: LaneformerConfig, dtype: str, machine: Machine, version: str = "passes", **shape: Any
) -> list[Geometry]:
    """The builds of a version; of passes, the one with the most columns last; ValueError where not even two fit.

    All read the same tiles, keys, values and words, so all have the warps and chunks of the last one, and those with
    fewer columns a deeper ring. So many columns are left out that take more than half the warps of one column.
    The graph has one build. `shape` goes to `plan`; where it says how many columns, there is one build.
    """
    if version == "graph":
        shape = {"columns": 1, "resident": 2, **shape}
    build = functools.partial(plan, config, dtype, machine, **shape)
    if "columns" in shape:
        return [build()]
    warps = build(columns=1).warps
    for most in MOST_COLUMNS:
        with contextlib.suppress(ValueError):
            last = build(columns=most)
            if 2 * last.warps >= warps and last.warps * last.chunks * last.chunk_bytes >= MIN_RING_BYTES:
                break
    else:
        last = build(columns=MOST_COLUMNS[-1])
    cut = {"warps": last.warps, "chunk_bytes": last.chunk_bytes}
    fewer = [count for count in BUILDS if count < last.columns]
    return [*(plan(config, dtype, machine, **{**shape, **cut, "columns": n}) for n in fewer), last]


def ring_does_not_fit(machine: Machine, resident: int, cuts: list[Geometry], shrinkable: bool) -> ValueError:
    """The error where no ring of two chunks fits beside the activations; it names the smallest geometry tried."""
    least = min(geometry.fixed_shared_bytes for geometry in cuts)
    return ValueError(
        f"{machine.shared_among(resident)} bytes of shared memory a block are too few for a ring of two chunks: "
        f"{least} go to activations; use "
        + ("fewer warps or smaller chunks" if shrinkable else "another GPU or the CPU engine")
    )


def blocks_of(machine: Machine, lanes: int, given: int | None) -> int:
    """Blocks of a lane."""
    there = machine.multiprocessors
    most = there // lanes
    if most < 1:
        raise ValueError(f"{lanes} lanes need {lanes} multiprocessors, this GPU has {there}; use more GPUs")
    if given is not None and not 1 <= given <= most:
        raise ValueError(f"blocks_per_lane = {given} is outside 1 to {most} ({there} multiprocessors)")
    return most if given is None else given


def check_tapes(chunk_bytes: int | None, columns: int) -> None:
    if chunk_bytes is not None and (chunk_bytes < 1 or chunk_bytes % SEGMENT_BYTES):
        raise ValueError(f"chunk_bytes = {chunk_bytes} must be a positive multiple of {SEGMENT_BYTES}")
    if not 1 <= columns <= MAX_COLUMNS:
        raise ValueError(f"columns = {columns} is outside 1 to {MAX_COLUMNS}")


def check_model(config: LaneformerConfig, dtype: str, devices: int) -> None:
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype = {dtype!r}: the CUDA engine holds weights of 16 or 8 bits; use {' or '.join(map(repr, DTYPES))}"
        )
    if config.lm_head_type != "vocab_parallel":
        head = config.lm_head_type
        raise ValueError(
            f"lm_head_type = {head!r}: the CUDA engine has the vocab_parallel head only; use the CPU, or for a "
            f"model of the Llama family lanes that divide its vocabulary of {config.vocab_size}"
        )
    if devices < 1 or config.num_lanes % devices:
        counts = [n for n in range(1, config.num_lanes + 1) if config.num_lanes % n == 0]
        raise ValueError(
            f"{devices} devices cannot share {config.num_lanes} lanes evenly; use one of {counts}"
        )
    if config.head_dim % 8:
        raise ValueError(
            f"head dimension {config.head_dim} is not a multiple of 8, as the kernels need; use the CPU engine"
        )


def check_matrix(op: str, matrix: Matrix, warps: int) -> None:
    multiple = 2 * matrix.thread_numbers  # columns of a segment
    if matrix.columns % multiple or matrix.rows % TILE:
        raise ValueError(
            f"the {op} matrix of a lane, {matrix.rows} x {matrix.columns}, cannot be cut: columns must be a "
            f"multiple of {multiple} and rows of {TILE}; use the CPU engine"
        )
    if matrix.units * warps >= 2**31:
        raise ValueError(f"the {op} matrix has {matrix.rows} rows a lane, too many to be numbered in 32 bits")
