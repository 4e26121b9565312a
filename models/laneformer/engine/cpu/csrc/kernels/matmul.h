// Products with fp32 activations: weights of 8, 16 or 32 bits are widened to fp32.
#pragma once
#include "vector.h"

namespace laneformer {
namespace {

// What the registers hold; where sums are split, even inputs go first and odd ones after them, for more columns at once.
#if defined(__AVX512F__)
constexpr int kBlockColumns = 4;
constexpr int groups_at_once(int) { return 2; }
constexpr bool is_split(int) { return false; }
#else
constexpr int kBlockColumns = 6;
constexpr int groups_at_once(int columns) { return columns == 1 ? 2 : 1; }
constexpr bool is_split(int columns) { return columns > 2; }
#endif

template <DType T>
constexpr int kPairBytes = T == DType::fp32 ? 128 : T == DType::int8 ? 32 : 64;  // one group of 16 rows, two inputs

// Two inputs' weights of one group of a tile. Those of int8 come 2^24 times too large: the byte stays on top.
template <DType T>
INLINE void load_pair(const char* tile, int group, V16& even, V16& odd) {
  const char* w = tile + (T == DType::int8 ? 0 : group * kPairBytes<T>);
  EACH_PART {
    if constexpr (T == DType::int8) {
      const I bits = *(const I*)(w + i * 4 * kWidth);
      even.part[i] = __builtin_convertvector(group ? (bits << 8) & (int32_t)0xff000000 : bits << 24, F);
      odd.part[i] = __builtin_convertvector((bits << (group ? 0 : 16)) & (int32_t)0xff000000, F);
    } else if constexpr (T == DType::bf16) {
      const I bits = *(const I*)(w + i * 4 * kWidth);
      even.part[i] = (F)(bits << 16);
      odd.part[i] = (F)(bits & (int32_t)0xffff0000);
    } else if constexpr (T == DType::fp16) {
      even.part[i] = half_part((const uint16_t*)w + i * kWidth);
      odd.part[i] = half_part((const uint16_t*)w + 16 + i * kWidth);
    } else {
      even.part[i] = *(const F*)(w + i * 4 * kWidth);
      odd.part[i] = *(const F*)(w + 64 + i * 4 * kWidth);
    }
  }
}

INLINE void store_rows(float* y, V16 v, int valid) {
  if (valid >= 16) return store(y, v);
  float x[16];
  store(x, v);
  for (int i = 0; i < valid; ++i) y[i] = x[i];
}

// Sums of 16 rows of the tile at `w`, from `row` on, times what their weights were divided by.
template <DType T>
INLINE V16 scaled(V16 sums, const char* w, int k_pairs, int row) {
  if constexpr (T != DType::int8) return sums;
  return sums * splat(0x1p-24f) * load((const float*)(w + (size_t)k_pairs * 2 * kPairBytes<T>) + row);
}

struct Columns {
  const float* x;
  int stride;  // floats
};

struct Stream {  // what to prefetch: two lines from `next`, which moves on by `step` with each pair of inputs
  const char* next;
  size_t step;
};

// Adds up inputs FIRST (0: even), and up to LAST (1: odd), of GROUPS groups of one tile times COLUMNS columns.
template <DType T, int GROUPS, int COLUMNS, int FIRST, int LAST>
INLINE void accumulate(const char* w, int group, int k_pairs, Columns in, Stream soon,
                       V16 (&sums)[2][GROUPS][COLUMNS]) {
  const float* x = in.x;
  for (int parity = FIRST; parity <= LAST; ++parity)
    for (int g = 0; g < GROUPS; ++g)
      for (int c = 0; c < COLUMNS; ++c) sums[parity][g][c] = splat(0.0f);
  for (int k = 0; k < k_pairs; ++k, w += 2 * kPairBytes<T>, x += 2, soon.next += soon.step) {
    for (int line = 0; line < 2 * kPairBytes<T>; line += 64) __builtin_prefetch(soon.next + line);
    V16 weights[2][GROUPS];
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) load_pair<T>(w, group + g, weights[0][g], weights[1][g]);
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 2
      for (int parity = FIRST; parity <= LAST; ++parity) {
        const V16 input = splat(x[c * in.stride + parity]);
#pragma GCC unroll 2
        for (int g = 0; g < GROUPS; ++g) sums[parity][g][c] = fma(weights[parity][g], input, sums[parity][g][c]);
      }
  }
}

// One tile times COLUMNS columns. Even and odd inputs have sums of their own, in the same order for any number of
// columns; a row's scale is applied once, to its sum.
template <DType T, int COLUMNS>
void multiply_tile(const char* w, int k_pairs, Columns in, Stream soon, float* y, int y_stride, int valid) {
  constexpr int kGroups = groups_at_once(COLUMNS);
  for (int group = 0; group < 2; group += kGroups) {
    V16 sums[2][kGroups][COLUMNS];
    if constexpr (is_split(COLUMNS)) {
      accumulate<T, kGroups, COLUMNS, 0, 0>(w, group, k_pairs, in, soon, sums);
      accumulate<T, kGroups, COLUMNS, 1, 1>(w, group, k_pairs, in, soon, sums);
    } else {
      accumulate<T, kGroups, COLUMNS, 0, 1>(w, group, k_pairs, in, soon, sums);
    }
    for (int g = 0, row = 16 * group; g < kGroups; ++g, row += 16)
      for (int c = 0; c < COLUMNS; ++c) {
        const V16 total = sums[0][g][c] + sums[1][g][c];
        store_rows(y + c * y_stride + row, scaled<T>(total, w, k_pairs, row), valid - row);
      }
  }
}

// Columns of the next block when `left` remain: no column is left over alone.
INLINE int block_of(int left, int most) { return left <= most ? left : left == most + 1 ? most - 1 : most; }

// Calls multiply(tile, its first row, first column, columns, what to prefetch) for blocks of columns of each tile. One
// block alone reads ahead in the stream of tiles; of several, each fetches its part of the next tile, so that memory is
// read as evenly as it is used.
template <class Multiply>
INLINE void each_block(const void* tiles, int rows, int k_pairs, DType dtype, int columns, int most, size_t ahead,
                       const Multiply& multiply) {
  const char* w = (const char*)tiles;
  const size_t bytes = tile_bytes(k_pairs, dtype), step = 2 * kTileRows * bytes_of(dtype);
  for (int row = 0; row < rows; row += kTileRows, w += bytes)
    for (int c = 0, block; c < columns; c += block) {
      block = block_of(columns - c, most);
      const Stream soon = columns > most
                              ? Stream{w + bytes + step * k_pairs * c / columns, step * block / columns}
                              : Stream{w + ahead, step};
      multiply(w, row, c, block, soon);
    }
}

template <DType T>
void matmul(const void* tiles, int rows, int k_pairs, Inputs inputs, float* y, int y_stride, int columns) {
  constexpr decltype(&multiply_tile<T, 1>) kByColumns[] = {
      multiply_tile<T, 1>, multiply_tile<T, 2>, multiply_tile<T, 3>, multiply_tile<T, 4>,
      multiply_tile<T, 5>, multiply_tile<T, 6>};
  const int stride = (int)(inputs.stride / sizeof(float));
  each_block(tiles, rows, k_pairs, T, columns, kBlockColumns, inputs.ahead,
             [&](const char* w, int row, int c, int block, Stream soon) {
               const Columns in{(const float*)inputs.data + c * stride, stride};
               kByColumns[block - 1](w, k_pairs, in, soon, y + c * y_stride + row, y_stride, rows - row);
             });
}

}  // namespace
}  // namespace laneformer
