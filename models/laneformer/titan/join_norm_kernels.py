"""Triton kernels of join and RMSNorm, forward and backward: one program a token, all its lanes in one tile.

    T tokens (B*S)   L lanes   D hidden   W bytes of one stream tensor (B, S, L, D)

A join needs a sum over lanes, the norm after it a sum over the hidden axis of what the join wrote.
The compiler makes a kernel of each sum, which reads and writes the wide tensors again. Here a tile
holds all lanes of some columns: the sum over lanes stays in registers, and the second pass over a
token reads what the first one left in the cache (24,576 values in the 2B model).

    forward    with delayed and norm: reads h, partial, delayed, writes the streams and their norm     5 W
    backward   of it: reads three gradients and the streams, writes the gradients of h, partial, delayed   7 W

Sums are float32 whatever the tensors' types; every result is rounded once. Inputs may have any token
and lane strides (an expanded embedding, a product with the lane axis in front), but adjacent columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

WARPS = 4
# 16 bytes of bfloat16 a thread, so that a thread holds all lanes of its columns
COLUMNS = 256 * WARPS
TILE = 8 * COLUMNS  # values; more spill registers


def tile(num_lanes: int, hidden_size: int, lane_scales: bool) -> dict[str, int]:
    """Return LANES and COLS of the kernels."""
    lanes = triton.next_power_of_2(num_lanes)
    columns = min(triton.next_power_of_2(hidden_size), COLUMNS, TILE // lanes)
    # scales of every lane take registers, too
    return {"LANES": lanes, "COLS": columns // 2 if lane_scales else columns}


@triton.jit
def tile_at(start, lane, L: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr):
    """The columns of the tile that begins at `start`, and which of its values the tensor has."""
    column = start + tl.arange(0, COLS)
    return column, (lane < L)[:, None] & (column < D)[None, :]


@triton.jit
def rows(pointer, token, token_stride, lane, lane_stride):
    """Where the rows of a token's lanes begin, (LANES, 1)."""
    return pointer + token * token_stride + lane[:, None] * lane_stride


@triton.jit
def wide(rows, column, inside):
    """A tile (LANES, COLS) in float32, zero outside of the tensor."""
    return tl.load(rows + column[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def scales(weight, lane, column, inside, LANE_SCALES: tl.constexpr, D: tl.constexpr):
    """The norm's scale for a tile in float32: (LANES, COLS), or (1, COLS) if lanes share it."""
    if LANE_SCALES:
        return wide(rows(weight, 0, 0, lane, D), column, inside)
    else:
        return tl.load(weight + column[None, :], mask=(column < D)[None, :], other=0).to(tl.float32)


@triton.jit
def store_tile(rows, column, values, inside):
    tl.store(rows + column[None, :], values.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def sum_products(
    stream,
    d_norm,
    weight,
    lane,
    LANE_SCALES: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
    COLS: tl.constexpr,
):
    """Sum stream * d_norm * scale of each of a token's lanes, (LANES,)."""
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, D, COLS):
        column, inside = tile_at(start, lane, L, D, COLS)
        products = wide(stream, column, inside) * wide(d_norm, column, inside)
        total += tl.sum(products * scales(weight, lane, column, inside, LANE_SCALES, D), 1)
    return total


@triton.jit
def add_products(
    d_weight,
    program,
    products,
    lane,
    column,
    inside,
    LANE_SCALES: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
):
    """Add a token's tile to a program's sums, (P, L, D), or (P, D) if lanes share the scale."""
    if LANE_SCALES:
        sums = rows(d_weight, program, L * D, lane, D) + column[None, :]
        tl.store(sums, tl.load(sums, mask=inside, other=0) + products, mask=inside)
    else:
        sums = d_weight + program * D + column
        total = tl.load(sums, mask=column < D, other=0) + tl.sum(products, 0)
        tl.store(sums, total, mask=column < D)


@triton.jit
def forward_kernel(
    h,
    partial,
    delayed,
    weight,
    streams,
    normed,
    rstd,
    h_token,
    h_lane,
    partial_token,
    partial_lane,
    delayed_token,
    delayed_lane,  # strides in elements
    eps,
    JOIN: tl.constexpr,
    DELAYED: tl.constexpr,
    NORM: tl.constexpr,
    LANE_SCALES: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write streams = h + partial + (delayed's sum - delayed), normed = streams * rstd * weight of a token.

    h, partial, delayed: (T, L, D) by their strides. streams, normed (T, L, D) and rstd (T, L) float32
    are contiguous. LANES and COLS are the powers of two that hold L and a tile's columns. Without JOIN,
    h is what is normed.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    own = token * L * D + lane[:, None] * D
    read = rows(h, token, h_token, lane, h_lane)
    squares = tl.zeros((LANES,), tl.float32)
    for start in range(0, D, COLS):
        column, inside = tile_at(start, lane, L, D, COLS)
        x = wide(read, column, inside)
        if JOIN:
            x += wide(rows(partial, token, partial_token, lane, partial_lane), column, inside)
            if DELAYED:
                d = wide(rows(delayed, token, delayed_token, lane, delayed_lane), column, inside)
                x += tl.sum(d, 0)[None, :] - d
            # the norm is of what is written, in the streams' own dtype
            x = x.to(streams.dtype.element_ty).to(tl.float32)
            store_tile(streams + own, column, x, inside)
        if NORM:
            squares += tl.sum(x * x, 1)  # zero for lanes and columns outside, where all terms are
    if NORM:
        r = tl.rsqrt(squares / D + eps)
        tl.store(rstd + token * L + lane, r, mask=lane < L)
        tl.debug_barrier()  # what follows reads what other threads of this program may have written
        if JOIN:
            read = streams + own
        for start in range(0, D, COLS):
            column, inside = tile_at(start, lane, L, D, COLS)
            scale = scales(weight, lane, column, inside, LANE_SCALES, D)
            y = wide(read, column, inside) * r[:, None] * scale
            store_tile(normed + own, column, y, inside)


@triton.jit
def backward_kernel(
    d_streams,
    d_normed,
    d_handed_on,
    streams,
    weight,
    rstd,
    d_h,
    d_partial,
    d_delayed,
    d_weight,
    d_streams_token,
    d_streams_lane,
    d_normed_token,
    d_normed_lane,
    d_handed_on_token,
    d_handed_on_lane,
    streams_token,
    streams_lane,
    T,
    DELAYED: tl.constexpr,
    HANDED_ON: tl.constexpr,
    NORM: tl.constexpr,
    LANE_SCALES: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write the gradients of a join and the norm after it; of P programs, p does tokens p, p + P, ..."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lane = tl.arange(0, LANES)
    for turn in range(0, tl.cdiv(T - tl.program_id(0), programs)):
        token = program + turn * programs
        own = token * L * D + lane[:, None] * D
        d_stream = rows(d_streams, token, d_streams_token, lane, d_streams_lane)
        if NORM:
            stream = rows(streams, token, streams_token, lane, streams_lane)
            d_norm = rows(d_normed, token, d_normed_token, lane, d_normed_lane)
            r = tl.load(rstd + token * L + lane, mask=lane < L, other=0)
            along = r * r * r / D
            along *= sum_products(stream, d_norm, weight, lane, LANE_SCALES, L, D, LANES, COLS)
        for start in range(0, D, COLS):
            column, inside = tile_at(start, lane, L, D, COLS)
            g = wide(d_stream, column, inside)
            if NORM:  # without it the gradient of h is d_streams itself
                x = wide(stream, column, inside)
                dy = wide(d_norm, column, inside) * r[:, None]
                g += dy * scales(weight, lane, column, inside, LANE_SCALES, D) - x * along[:, None]
                add_products(d_weight, program, dy * x, lane, column, inside, LANE_SCALES, L, D)
                store_tile(d_h + own, column, g, inside)
            if DELAYED:
                store_tile(d_delayed + own, column, tl.sum(g, 0)[None, :] - g, inside)
            if HANDED_ON:  # to a later layer, whose gradient of the partial joins h's
                later = rows(d_handed_on, token, d_handed_on_token, lane, d_handed_on_lane)
                store_tile(d_partial + own, column, g + wide(later, column, inside), inside)
        # the next token adds to the sums that other threads of this program may have written
        tl.debug_barrier()
