// Products with fp32 activations: weights of 8, 16 or 32 bits are widened to fp32.
#pragma once
#include "vector.h"

namespace laneformer {
namespace {

// What the registers hold: sums of so many groups of rows at once, and where sums are split, of even inputs or odd ones.
#if defined(__AVX512F__)
constexpr int kBlockColumns = 4;
constexpr int groups_at_once(int) { return 2; }
constexpr bool is_split(int) { return false; }
#else
constexpr int kBlockColumns = 6;
constexpr int groups_at_once(int columns) { return columns <= 2 ? 2 : 1; }
constexpr bool is_split(int columns) { return columns > 1; }
#endif
constexpr int kSplitPairs = 64;  // inputs of a tile that are read several times stay in the first-level cache
// At the first of these times they are there already: fetched so many bytes ahead, into the first cache or the second.
template <DType T>
constexpr size_t kSplitAhead = T == DType::int8 ? 12288 : 20480;
template <DType T>
constexpr int kSplitCache = T == DType::int8 ? 3 : 2;

INLINE int least(int a, int b) { return a < b ? a : b; }

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

struct Stream {  // what to prefetch: it moves on by `step` bytes while a pair of inputs of the whole tile is added up
  const char* next;
  size_t step;
};

// Adds inputs FIRST (0: even) to LAST (1: odd) of `pairs` pairs to the sums of GROUPS groups of one tile times COLUMNS
// columns.
template <DType T, int GROUPS, int COLUMNS, int FIRST, int LAST>
INLINE void accumulate(const char* w, int group, int pairs, Columns in, Stream& soon, V16 (&sums)[2][2][COLUMNS]) {
  constexpr int kSweeps = 4 / (GROUPS * (1 + LAST - FIRST)), kSoonBytes = 2 * kPairBytes<T> / kSweeps;
  constexpr int kCache = is_split(COLUMNS) ? kSplitCache<T> : 3;
  const float* x = in.x;
  const size_t step = soon.step / kSweeps;
  V16 s[2][GROUPS][COLUMNS];
  for (int parity = FIRST; parity <= LAST; ++parity)
    for (int g = 0; g < GROUPS; ++g)
      for (int c = 0; c < COLUMNS; ++c) s[parity][g][c] = sums[parity][group + g][c];
  for (int k = 0; k < pairs; ++k, w += 2 * kPairBytes<T>, x += 2, soon.next += step) {
    for (int line = 0; line < kSoonBytes; line += 64) __builtin_prefetch(soon.next + line, 0, kCache);
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) {
      V16 weights[2];
      load_pair<T>(w, group + g, weights[0], weights[1]);
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 2
        for (int parity = FIRST; parity <= LAST; ++parity)
          s[parity][g][c] = fma(weights[parity], splat(x[c * in.stride + parity]), s[parity][g][c]);
    }
  }
  for (int parity = FIRST; parity <= LAST; ++parity)
    for (int g = 0; g < GROUPS; ++g)
      for (int c = 0; c < COLUMNS; ++c) sums[parity][group + g][c] = s[parity][g][c];
}

// One tile times COLUMNS columns. Even and odd inputs have sums of their own, in the same order for any number of
// columns; a row's scale is applied once, to its sum.
template <DType T, int COLUMNS>
void multiply_tile(const char* w, int k_pairs, Columns in, Stream soon, float* y, int y_stride, int valid) {
  constexpr int kGroups = groups_at_once(COLUMNS);
  V16 sums[2][2][COLUMNS];
  for (int i = 0; i < 4; ++i)
    for (int c = 0; c < COLUMNS; ++c) sums[i / 2][i % 2][c] = splat(0.0f);
  const int block = is_split(COLUMNS) ? kSplitPairs : k_pairs;
  for (int k = 0; k < k_pairs; k += block) {
    const int pairs = least(block, k_pairs - k);
    const char* from = w + (size_t)k * 2 * kPairBytes<T>;
    const Columns inputs{in.x + 2 * k, in.stride};
#pragma GCC unroll 2
    for (int group = 0; group < 2; group += kGroups)
      if constexpr (is_split(COLUMNS)) {
        accumulate<T, kGroups, COLUMNS, 0, 0>(from, group, pairs, inputs, soon, sums);
        accumulate<T, kGroups, COLUMNS, 1, 1>(from, group, pairs, inputs, soon, sums);
      } else
        accumulate<T, kGroups, COLUMNS, 0, 1>(from, group, pairs, inputs, soon, sums);
  }
  for (int g = 0, row = 0; g < 2; ++g, row += 16)
    for (int c = 0; c < COLUMNS; ++c) {
      const V16 total = sums[0][g][c] + sums[1][g][c];
      store_rows(y + c * y_stride + row, scaled<T>(total, w, k_pairs, row), valid - row);
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

// Blocks never have more columns than kBlockColumns; wider tiles would double what AVX-512 compiles.
template <DType T, int COLUMNS>
constexpr auto kTileOf = multiply_tile<T, COLUMNS <= kBlockColumns ? COLUMNS : kBlockColumns>;

template <DType T>
void matmul(const void* tiles, int rows, int k_pairs, Inputs inputs, float* y, int y_stride, int columns) {
  constexpr decltype(&multiply_tile<T, 1>) kByColumns[] = {
      kTileOf<T, 1>, kTileOf<T, 2>, kTileOf<T, 3>, kTileOf<T, 4>, kTileOf<T, 5>, kTileOf<T, 6>};
  const int stride = (int)(inputs.stride / sizeof(float));
  each_block(tiles, rows, k_pairs, T, columns, kBlockColumns, is_split(columns) ? kSplitAhead<T> : inputs.ahead,
             [&](const char* w, int row, int c, int block, Stream soon) {
               const Columns in{(const float*)inputs.data + c * stride, stride};
               kByColumns[block - 1](w, k_pairs, in, soon, y + c * y_stride + row, y_stride, rows - row);
             });
}

}  // namespace
}  // namespace laneformer
