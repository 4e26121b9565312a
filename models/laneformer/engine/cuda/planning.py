"""Choose the geometry of a model on a GPU, or refuse with what would fit; needs no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

from ...config import LaneformerConfig
from .geometry import (
    CHUNK_BYTES,
    DTYPES,
    LARGE_HEAD,
    LARGE_HEAD_WARPS,
    MAX_CHUNKS,
    OPS,
    TILE,
    WARPS,
    Geometry,
    Machine,
)

# of a multiprocessor: with fewer registers a thread than 128 the sums over tiles are spilled
MAX_TILE_WARPS = 16
BUILDS = (1, 4, 8)  # columns of the kernels of passes
MOST_COLUMNS = (8, 4, 2)  # of the largest one: as many as fit
# of a block, under way while it computes; with less, fewer columns are read faster
MIN_RING_BYTES = 32 << 10


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
    """Return the geometry with the most blocks a lane and the deepest ring that fit this GPU.

    Args:
        resident: Blocks that a multiprocessor holds together; two for the graph version, whose kernels
            overlap.
        warps, chunk_bytes: None takes the first of WARPS or CHUNK_BYTES that fits, as the engine does.
        blocks_per_lane: None takes the multiprocessors of a lane, as the engine does.

    Raises:
        ValueError: The model does not fit the kernels or the GPU; the message names what would.
    """
    check_model(config, dtype, devices)
    lanes, count = config.num_lanes // devices, machine.multiprocessors
    if count < lanes:
        raise ValueError(
            f"{lanes} lanes need {lanes} multiprocessors, this GPU has {count}; use more GPUs"
        )
    blocks, activations = blocks_per_lane or count // lanes, half if dtype == "int8" else dtype
    max_warps = MAX_TILE_WARPS // resident
    if config.head_dim >= LARGE_HEAD:
        max_warps = min(max_warps, LARGE_HEAD_WARPS)
    # sums over a block depend on its warps, so both versions give the same bits with as many
    warp_counts = [warps] if warps else [n for n in WARPS if n <= max_warps]
    candidates = list[Geometry]()
    for n, size in itertools.product(warp_counts, [chunk_bytes] if chunk_bytes else CHUNK_BYTES):
        ringless = Geometry(config, dtype, blocks, n, size, 0, devices, columns, activations)
        check_matrices(ringless)
        free_bytes = machine.shared_bytes_per_block(resident) - ringless.shared_bytes
        candidates.append(
            dataclasses.replace(ringless, chunks=min(MAX_CHUNKS, free_bytes // (n * (size + 8))))
        )
        if candidates[-1].chunks >= 2:
            return candidates[-1]
    raise ValueError(
        f"{machine.shared_bytes_per_block(resident)} bytes of shared memory a block are too few for a ring of two "
        f"chunks: {min(g.fixed_shared_bytes for g in candidates)} go to activations; use another GPU or the CPU engine"
    )


def plan_builds(
    config: LaneformerConfig, dtype: str, machine: Machine, version: str = "passes", **shape: Any
) -> list[Geometry]:
    """Return the builds of a version; of passes, the one with the most columns last.

    Args:
        shape: Arguments of `plan`; with `columns` there is one build.

    Raises:
        ValueError: Not even two columns fit.
    """
    if version == "graph":
        shape = {"columns": 1, "resident": 2, **shape}
    build = functools.partial(plan, config, dtype, machine, **shape)
    if "columns" in shape:
        return [build()]
    warps = build(columns=1).warps
    # skip counts of columns that leave fewer than half of one column's warps
    for columns in MOST_COLUMNS:
        with contextlib.suppress(ValueError):
            last = build(columns=columns)
            if (
                2 * last.warps >= warps
                and last.warps * last.chunks * last.chunk_bytes >= MIN_RING_BYTES
            ):
                break
    else:
        last = build(columns=MOST_COLUMNS[-1])
    # all builds read the same tiles, keys, values and words, so they share warps and chunk size;
    # those with fewer columns have a deeper ring
    cut = {"warps": last.warps, "chunk_bytes": last.chunk_bytes}
    fewer = [count for count in BUILDS if count < last.columns]
    return [*(plan(config, dtype, machine, **{**shape, **cut, "columns": n}) for n in fewer), last]


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


def check_matrices(geometry: Geometry) -> None:
    for op in OPS:
        matrix = geometry.matrix(op)
        multiple = 2 * matrix.thread_numbers  # columns of a segment
        if matrix.columns % multiple or matrix.rows % TILE:
            raise ValueError(
                f"the {op} matrix of a lane, {matrix.rows} x {matrix.columns}, cannot be cut: columns must be a "
                f"multiple of {multiple} and rows of {TILE}; use the CPU engine"
            )
        if matrix.units * geometry.blocks_per_lane * geometry.warps >= 2**31:
            raise ValueError(
                f"the {op} matrix has {matrix.rows} rows a lane, too many to be numbered in 32 bits"
            )
