"""Triton kernels of join + RMSNorm, forward and backward: one program a token, all its lanes in one tile.

    T tokens (B*S)   L lanes   D hidden   W bytes of one stream tensor (B, S, L, D)

A join adds the other lanes' delayed outputs, a sum over lanes; the norm after it needs a sum over the hidden
axis of what the join wrote. The compiler makes a kernel of each sum, and every kernel reads and writes wide
tensors again. Here a tile holds all lanes of some columns, so the sum over lanes never leaves the registers,
and the second pass over a token reads what the first one left in the cache (24,576 values in the 2B model).

    forward    with delayed and norm: reads h, partial, delayed, writes the streams and their norm     5 W
    backward   of it: reads three gradients and the streams, writes the gradients of h, partial, delayed   7 W

Sums are float32 whatever the tensors are; every result is rounded once. A tensor that is read may
have any token and lane strides (an expanded embedding, a product with the lane axis in front), but
its columns are adjacent.
"""

from __future__ import annotations

import triton
import triton.language as tl

WARPS = 4
COLUMNS = (
    256 * WARPS
)  # 16 bytes of bfloat16 a thread, so that a thread holds all lanes of its columns
TILE = 8 * COLUMNS  # values; more spill registers


def tile(num_lanes: int, hidden_size: int, lane_scales: bool) -> dict[str, int]:
    """LANES and COLS of the kernels; scales of every lane take registers, too."""
    lanes = triton.next_power_of_2(num_lanes)
    columns = min(triton.next_power_of_2(hidden_size), COLUMNS, TILE // lanes)
    return {"LANES": lanes, "COLS": columns // 2 if lane_scales else columns}


@triton.jit
def wide(pointer, token, token_stride, lane, lane_stride, column, inside):
    """A tile (LANES, COLS) in float32, zero outside of the tensor."""
    at = pointer + token * token_stride + lane[:, None] * lane_stride + column[None, :]
    return tl.load(at, mask=inside, other=0).to(tl.float32)


@triton.jit
def scales(weight, lane, column, inside, LANE_SCALES: tl.constexpr, D: tl.constexpr):
    """The norm's scale for a tile in float32: (LANES, COLS), or (1, COLS) if lanes share it."""
    if LANE_SCALES:
        return wide(weight, 0, 0, lane, D, column, inside)
    else:
        return tl.load(weight + column[None, :], mask=(column < D)[None, :], other=0).to(tl.float32)


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
    """streams = h + partial + (delayed's sum - delayed), normed = streams * rstd * weight; program
    t does token t.

    h, partial, delayed: (T, L, D) by their strides. streams, normed (T, L, D) and rstd (T, L) float32
    are contiguous. LANES and COLS are the powers of two that hold L and a tile's columns. Without JOIN,
    h is what is normed.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    own = token * L * D + lane[:, None] * D
    squares = tl.zeros((LANES,), tl.float32)
    for start in range(0, D, COLS):
        column = start + tl.arange(0, COLS)
        inside = (lane < L)[:, None] & (column < D)[None, :]
        x = wide(h, token, h_token, lane, h_lane, column, inside)
        if JOIN:
            x += wide(partial, token, partial_token, lane, partial_lane, column, inside)
            if DELAYED:
                d = wide(delayed, token, delayed_token, lane, delayed_lane, column, inside)
                x += tl.sum(d, 0)[None, :] - d
            rounded = x.to(streams.dtype.element_ty)
            tl.store(streams + own + column[None, :], rounded, mask=inside)
            x = rounded.to(tl.float32)
        if NORM:
            squares += tl.sum(x * x, 1)  # zero for lanes and columns outside, where all terms are
    if NORM:
        r = tl.rsqrt(squares / D + eps)
        tl.store(rstd + token * L + lane, r, mask=lane < L)
        tl.debug_barrier()  # what follows reads what other threads of this program may have written
        for start in range(0, D, COLS):
            column = start + tl.arange(0, COLS)
            inside = (lane < L)[:, None] & (column < D)[None, :]
            if JOIN:
                x = wide(streams, token, L * D, lane, D, column, inside)
            else:
                x = wide(h, token, h_token, lane, h_lane, column, inside)
            y = x * r[:, None] * scales(weight, lane, column, inside, LANE_SCALES, D)
            tl.store(normed + own + column[None, :], y.to(normed.dtype.element_ty), mask=inside)


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
    """Gradients of a join and the norm after it; of P programs, program p does tokens p, p + P, p + 2 P, ...

    Read are the gradients of the streams, of normed, and, where a later layer receives the partial
    output as well (handed on), that layer's gradient of it. d_h, the whole gradient of the streams, is
    written only with NORM: else it is d_streams. It is the partial's, too: d_partial is written only if
    something was handed on. d_weight, (P, D) or (P, L, D) float32 and zero before, takes each program's
    sum over its tokens.
    """
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lane = tl.arange(0, LANES)
    for turn in range(0, tl.cdiv(T - tl.program_id(0), programs)):
        token = program + turn * programs
        own = token * L * D + lane[:, None] * D
        if NORM:
            r = tl.load(rstd + token * L + lane, mask=lane < L, other=0)
            along = tl.zeros((LANES,), tl.float32)
            for start in range(0, D, COLS):
                column = start + tl.arange(0, COLS)
                inside = (lane < L)[:, None] & (column < D)[None, :]
                x = wide(streams, token, streams_token, lane, streams_lane, column, inside)
                dy = wide(d_normed, token, d_normed_token, lane, d_normed_lane, column, inside)
                along += tl.sum(x * dy * scales(weight, lane, column, inside, LANE_SCALES, D), 1)
            along *= r * r * r / D
        for start in range(0, D, COLS):
            column = start + tl.arange(0, COLS)
            inside = (lane < L)[:, None] & (column < D)[None, :]
            g = wide(d_streams, token, d_streams_token, lane, d_streams_lane, column, inside)
            if NORM:
                x = wide(streams, token, streams_token, lane, streams_lane, column, inside)
                dy = (
                    wide(d_normed, token, d_normed_token, lane, d_normed_lane, column, inside)
                    * r[:, None]
                )
                g += dy * scales(weight, lane, column, inside, LANE_SCALES, D) - x * along[:, None]
                if LANE_SCALES:
                    sums = d_weight + program * L * D + lane[:, None] * D + column[None, :]
                    tl.store(sums, tl.load(sums, mask=inside, other=0) + dy * x, mask=inside)
                else:
                    sums = d_weight + program * D + column
                    tl.store(
                        sums,
                        tl.load(sums, mask=column < D, other=0) + tl.sum(dy * x, 0),
                        mask=column < D,
                    )
                tl.store(d_h + own + column[None, :], g.to(d_h.dtype.element_ty), mask=inside)
            if DELAYED:
                dd = tl.sum(g, 0)[None, :] - g
                tl.store(
                    d_delayed + own + column[None, :],
                    dd.to(d_delayed.dtype.element_ty),
                    mask=inside,
                )
            if HANDED_ON:
                dp = g + wide(
                    d_handed_on, token, d_handed_on_token, lane, d_handed_on_lane, column, inside
                )
                tl.store(
                    d_partial + own + column[None, :],
                    dp.to(d_partial.dtype.element_ty),
                    mask=inside,
                )
        tl.debug_barrier()  # the next token adds to the sums that other threads of this program may have written
