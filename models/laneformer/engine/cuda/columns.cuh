// Up to 8 columns (sequences, or positions of one) for one stream of weights, by matrix-multiply instructions.
//
// Weights are cut into tiles of 16 x 16, a segment of the tape each, in the order in which an instruction wants them in
// its threads' registers: thread t has rows t / 4 and t / 4 + 8 at columns 4 (t % 4) .. + 3, as {row, + 8, row, + 8} of
// two each. An input is the sum of three 16-bit numbers, high, middle and low; in bf16 that is all of a float32. Each
// has an instruction and a sum of its own. What one column of an instruction becomes does not depend on the others, so a
// column gives the same bits alone and beside any others, at any place.
//
// A block has whole rows. Its warps share the columns out, kParts[Op] parts of them, because rows alone would be too
// few; the parts' sums are added in their order. How many parts there are is a matter of the matrix, not of the cut.
#pragma once
#include "rows.cuh"

constexpr int kPassColumns = kMmaColumns ? kMmaColumns : 1;
constexpr int kTile = 16;

// Inputs are [column][padded(count)]: whole float4 at a time, eight threads of two columns then reach every bank once.
DEVICE constexpr int padded(int count) { return (count + 31) / 32 * 32 + 16; }

// The leading bits of two numbers as a pair of 16 bits; what they leave stays. Three times is all of a float32 in bf16;
// in fp16 as far as its least step of 2^-24 reaches.
DEVICE uint32_t take_leading(float& a, float& b) {
#if WEIGHTS_BF16
  const uint32_t pair = bits_of(a) >> 16 | (bits_of(b) & 0xffff0000u);
#else
  const uint32_t pair = pack_halves(a, b);
#endif
  a -= low_half(pair), b -= high_half(pair);
  return pair;
}

// out [column][rows] of 16 rows a tile: the next Strip rows of tiles, times one part of the inputs x [column][stride]
template <int Op, int Strip>
DEVICE void multiply_tiles(Tape& tape, const float* x, int stride, float* out, int rows) {
  const int thread = here(thread_index()) % kWarpThreads, g = thread / 4, c = thread % 4;
  const float* from = x + g % kPassColumns * stride + 4 * c;  // columns that are not asked for compute another again
  float sum[Strip][3][4] = {};
#pragma unroll 1
  for (int step = 0; step < kColumns[Op] / kTile / kParts[Op]; ++step, from += kTile) {
    float4 v = *reinterpret_cast<const float4*>(from);
    uint2 b[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) b[i].x = take_leading(v.x, v.y), b[i].y = take_leading(v.z, v.w);
    tape.need<Strip>();
#pragma unroll
    for (int r = 0; r < Strip; ++r) {
      const uint4 a = tape.peek(r, thread);
#pragma unroll
      for (int i = 0; i < 3; ++i) multiply_tile(sum[r][i], a, b[i]);
    }
    tape.drop(Strip);
  }
#pragma unroll
  for (int r = 0; r < Strip; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * c + i % 2, row = r * kTile + i / 2 * 8 + g;
      if (column < kPassColumns) out[column * rows + row] = sum[r][0][i] + sum[r][1][i] + sum[r][2][i];
    }
}

// out [column][rows of this block] = W x for x [column][stride] in shared memory, which the whole block has seen. `out`
// holds kParts[Op] such arrays on the way. All threads of the block take part, and see the result.
template <int Op>
DEVICE void multiply_columns(Tape& tape, int block, const float* x, int stride, float* out) {
  const int warp = here(thread_index()) / kWarpThreads, rows = Matrix<Op>::row_count(block), tiles = rows / kTile;
  const int units = tiles * kParts[Op], end = units * (warp + 1) / kWarps;
#pragma unroll 1
  for (int unit = units * warp / kWarps, count; unit < end; unit += count) {
    const int part = unit / tiles, tile = unit % tiles;
    count = min(kStrip, min(end - unit, tiles - tile));
    const float* of_part = x + part * (kColumns[Op] / kParts[Op]);
    float* to = out + part * kPassColumns * rows + tile * kTile;
    if (count == 1) multiply_tiles<Op, 1>(tape, of_part, stride, to, rows);
    if constexpr (kStrip >= 2)
      if (count == 2) multiply_tiles<Op, 2>(tape, of_part, stride, to, rows);
    if constexpr (kStrip >= 3)
      if (count == 3) multiply_tiles<Op, 3>(tape, of_part, stride, to, rows);
    if constexpr (kStrip >= 4)
      if (count == 4) multiply_tiles<Op, 4>(tape, of_part, stride, to, rows);
  }
  sync_block();
  for (int i = thread_index(); i < kPassColumns * rows; i += kThreads) {
    float sum = out[i];
    for (int part = 1; part < kParts[Op]; ++part) sum += out[part * kPassColumns * rows + i];
    out[i] = sum;
  }
  sync_block();
}
