// Products with fp32 activations: weights of 8, 16 or 32 bits are widened to fp32.
#pragma once
#include "vector.h"

namespace laneformer {
namespace {

#if defined(__AVX512F__)
constexpr int kTileGroups = 2, kTileColumns = 4;  // what the registers hold: 2 * groups * columns accumulators
#elif defined(__AVX2__)
constexpr int kTileGroups = 1, kTileColumns = 2;
#else
constexpr int kTileGroups = 1, kTileColumns = 1;
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

#ifndef LANEFORMER_PREFETCH
#define LANEFORMER_PREFETCH 4096  // bytes ahead; about one DRAM latency at full speed
#endif

// GROUPS groups of 16 rows of one tile, from `first`, times COLUMNS inputs. Even and odd inputs have accumulators of
// their own; a row's scale is applied once, to its sum.
template <DType T, int GROUPS, int COLUMNS>
INLINE void multiply_groups(const char* w, int first, int k_pairs, const float* x, int x_stride, float* y, int y_stride,
                            int valid) {
  constexpr int kBytes = kPairBytes<T>;
  V16 even[GROUPS][COLUMNS], odd[GROUPS][COLUMNS];
  for (int g = 0; g < GROUPS; ++g)
    for (int c = 0; c < COLUMNS; ++c) even[g][c] = odd[g][c] = splat(0.0f);
  for (int k = 0; k < k_pairs; ++k, w += 2 * kBytes) {
    if constexpr (COLUMNS == 1) {
      for (int line = 0; line < GROUPS * kBytes; line += 64) __builtin_prefetch(w + LANEFORMER_PREFETCH + line);
    }
    V16 w_even[GROUPS], w_odd[GROUPS];
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) load_pair<T>(w, first + g, w_even[g], w_odd[g]);
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) {
      const V16 x_even = splat(x[c * x_stride + 2 * k]), x_odd = splat(x[c * x_stride + 2 * k + 1]);
#pragma GCC unroll 2
      for (int g = 0; g < GROUPS; ++g) {
        even[g][c] = fma(w_even[g], x_even, even[g][c]);
        odd[g][c] = fma(w_odd[g], x_odd, odd[g][c]);
      }
    }
  }
  for (int g = 0, row = 16 * first; g < GROUPS; ++g, row += 16)
    for (int c = 0; c < COLUMNS; ++c) {
      V16 total = even[g][c] + odd[g][c];
      if constexpr (T == DType::int8) total = total * splat(0x1p-24f) * load((const float*)w + row);
      store_rows(y + c * y_stride + row, total, valid - row);
    }
}

template <DType T, int GROUPS, int COLUMNS>
INLINE void multiply_tile(const char* w, int k_pairs, const float* x, int x_stride, float* y, int y_stride, int valid) {
#pragma GCC unroll 2
  for (int g = 0; g < 2; g += GROUPS)
    multiply_groups<T, GROUPS, COLUMNS>(w, g, k_pairs, x, x_stride, y, y_stride, valid);
}

template <DType T>
void matmul(const void* tiles, int rows, int k_pairs, Inputs inputs, float* y, int y_stride, int columns) {
  const char* w = (const char*)tiles;
  const float* x = (const float*)inputs.data;
  const int x_stride = (int)(inputs.stride / sizeof(float));
  for (int row = 0; row < rows; row += kTileRows, w += tile_bytes(k_pairs, T)) {
    int c = 0;
    for (; c + kTileColumns <= columns && kTileColumns > 1; c += kTileColumns)
      multiply_tile<T, kTileGroups, kTileColumns>(w, k_pairs, x + c * x_stride, x_stride, y + c * y_stride + row,
                                                  y_stride, rows - row);
    for (; c < columns; ++c)
      multiply_tile<T, 2, 1>(w, k_pairs, x + c * x_stride, x_stride, y + c * y_stride + row, y_stride, rows - row);
  }
}

}  // namespace
}  // namespace laneformer
