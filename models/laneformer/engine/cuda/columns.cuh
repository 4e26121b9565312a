// Up to 8 columns (sequences, or positions of one) for one stream of weights, by matrix-multiply
// instructions.
//
// Weights are cut into tiles of 16 x 16, a segment of the tape each, in the order in which an instruction
// wants them in its threads' registers: thread t has rows t / 4 and t / 4 + 8 at columns 4 (t % 4) .. + 3, as
// {row, + 8, row, + 8} of two each. With numbers of 8 bits a segment is two tiles beside each other, of which
// a thread has 8 bytes each; 16 bits hold these integers exactly, and the sums are multiplied by their rows'
// scales. An input is the sum of three 16-bit numbers, high, middle and low; in bf16 that is all of a
// float32. Each has an instruction and a sum of its own. What one column of an instruction becomes does not
// depend on the others, so a column gives the same bits alone and beside any others, at any place.
//
// A block has whole rows. Its warps share the columns out, kParts[Op] parts of them, because rows alone would
// be too few; the parts' sums are added in their order. How many parts there are is a matter of the matrix,
// not of the cut.
#pragma once
#include "tape.cuh"

constexpr int kTiles = kEightBits ? 2 : 1;  // of a segment

// Inputs are [column][padded(count)]: whole float4 at a time, eight threads of two columns then reach every
// bank once.
DEVICE constexpr int padded(int count) { return (count + 31) / 32 * 32 + 16; }

// The leading bits of two numbers as a pair of 16 bits; what they leave stays. Three times is all of a
// float32 in bf16; in fp16 as far as its least step of 2^-24 reaches.
DEVICE uint32_t take_leading(float& a, float& b) {
#if WEIGHTS_BF16
  const uint32_t pair = bits_of(a) >> 16 | (bits_of(b) & 0xffff0000u);
#else
  const uint32_t pair = pack_halves(a, b);
#endif
  a -= low_half(pair), b -= high_half(pair);
  return pair;
}

// sum[i] += the tiles of a segment times the i-th numbers of the inputs
DEVICE void multiply_segment(float (&sum)[3][4], uint4 w, const uint2 (&b)[kTiles][3]) {
#if WEIGHTS_INT8
  const uint32_t fours[] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const float4 low = unpack4(fours[2 * t]), high = unpack4(fours[2 * t + 1]);
    const uint4 a = {pack_halves(low.x, low.y), pack_halves(low.z, low.w), pack_halves(high.x, high.y),
                     pack_halves(high.z, high.w)};
#pragma unroll
    for (int i = 0; i < 3; ++i) multiply_tile(sum[i], a, b[t][i]);
  }
#else
#pragma unroll
  for (int i = 0; i < 3; ++i) multiply_tile(sum[i], w, b[0][i]);
#endif
}

template <int Op>
constexpr int kPartSteps = kColumns[Op] / (kTiles * kTile) / kParts[Op];  // segments of a row of tiles, in one part

// of one warp, for the rows of a block
template <int Op>
DEVICE int segments(int block, int warp) {
  const int units = Matrix<Op>::row_count(block) / kTile * kParts[Op];
  return (units * (warp + 1) / kWarps - units * warp / kWarps) * kPartSteps<Op>;
}

// out [column][rows] of 16 rows a tile: the next Strip rows of tiles, times one part of the inputs x
// [column][stride]
template <int Op, int Strip>
DEVICE void multiply_tiles(Tape& tape, const float* x, int stride, float* out, int rows) {
  const int thread = here(thread_index()) % kWarpThreads, g = thread / 4, c = thread % 4;
  const float* from = x + g % kMmaColumns * stride + 4 * c;  // columns that are not asked for compute another again
  float sum[Strip][3][4] = {};
#pragma unroll 1
  for (int step = 0; step < kPartSteps<Op>; ++step, from += kTiles * kTile) {
    uint2 b[kTiles][3];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float4 v = *reinterpret_cast<const float4*>(from + t * kTile);
#pragma unroll
      for (int i = 0; i < 3; ++i) b[t][i].x = take_leading(v.x, v.y), b[t][i].y = take_leading(v.z, v.w);
    }
    tape.need<Strip>();
#pragma unroll
    for (int r = 0; r < Strip; ++r) multiply_segment(sum[r], tape.peek(r, thread), b);
    tape.drop(Strip);
  }
#pragma unroll
  for (int r = 0; r < Strip; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * c + i % 2, row = r * kTile + i / 2 * 8 + g;
      if (column < kMmaColumns) out[column * rows + row] = sum[r][0][i] + sum[r][1][i] + sum[r][2][i];
    }
}

// out [column][rows of this block] = W x for x [column][stride] in shared memory, which the whole block has
// seen. `out` holds kParts[Op] such arrays on the way. All threads of the block take part, and see the
// result. `scales`: with 8 bits, of this block's rows; the first ones are on their way while the rows are
// read.
template <int Op>
DEVICE void multiply_columns(Tape& tape, int block, const float* scales, const float* x, int stride, float* out) {
  const int warp = here(thread_index()) / kWarpThreads, rows = Matrix<Op>::row_count(block), tiles = rows / kTile;
  float scale = 1.0f;
  if (kEightBits && thread_index() < kMmaColumns * rows) scale = scales[thread_index() % rows];
  const int units = tiles * kParts[Op], end = units * (warp + 1) / kWarps;
#pragma unroll 1
  for (int unit = units * warp / kWarps, count; unit < end; unit += count) {
    const int part = unit / tiles, tile = unit % tiles;
    count = min(kStrip, min(end - unit, tiles - tile));
    const float* of_part = x + part * (kColumns[Op] / kParts[Op]);
    float* to = out + part * kMmaColumns * rows + tile * kTile;
    if (count == 1) multiply_tiles<Op, 1>(tape, of_part, stride, to, rows);
    if constexpr (kStrip >= 2)
      if (count == 2) multiply_tiles<Op, 2>(tape, of_part, stride, to, rows);
    if constexpr (kStrip >= 3)
      if (count == 3) multiply_tiles<Op, 3>(tape, of_part, stride, to, rows);
    if constexpr (kStrip >= 4)
      if (count == 4) multiply_tiles<Op, 4>(tape, of_part, stride, to, rows);
  }
  sync_block();
  for (int i = thread_index(); i < kMmaColumns * rows; i += kThreads) {
    float sum = out[i];
    for (int part = 1; part < kParts[Op]; ++part) sum += out[part * kMmaColumns * rows + i];
    if (kEightBits) sum *= i == thread_index() ? scale : scales[i % rows];
    out[i] = sum;
  }
  sync_block();
}
